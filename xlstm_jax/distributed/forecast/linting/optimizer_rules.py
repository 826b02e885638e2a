"""The lint's rules about optimizers: what a compiler makes of a rule that needs whole matrices, of which it has shards.

``make_train_step`` runs an optimizer on global arrays, outside of ``shard_map``. A matrix product there is shared among
devices by the compiler, with collectives for each: Newton-Schulz has 15 of them for every matrix. What it does not
share every device does.
"""

import math
import re
from collections.abc import Iterator

from xlstm_jax.distributed.forecast.hlo.op_names import in_shard_map
from xlstm_jax.distributed.forecast.linting.step import Finding, Step, sum_wire_bytes
from xlstm_jax.wording import format_bytes, format_fraction

MIN_SHARED_BYTES = 2**20
# Of a device's fair share: below are the paddings of what devices do not divide.
MAX_WORK = 1.5
MIN_REPEATED_FRACTION = 0.01  # of the step's FLOP
CURE = (
    "Take xlstm_jax.distributed.muon for optax.contrib.muon, or put on_whole_matrices around the rule that needs whole "
    "matrices: each device then updates whole ones of its own."
)
_PRODUCT = re.compile(r"\b(?:dot_general|eigh|svd|qr)\b")


def shared_matrix_products(step: Step) -> Iterator[Finding]:
    """Collectives that serve matrix products outside of ``shard_map``."""
    found = [c for c in step.forecast.collectives if not in_shard_map(c.op_name) and _PRODUCT.search(c.op_name)]
    sent = sum_wire_bytes(found)
    if sent < MIN_SHARED_BYTES:
        return
    fraction = format_fraction(sent / step.forecast.wire_bytes)
    yield Finding(
        "shared-matrix-product",
        "the optimizer",
        f"multiplies matrices of which each device has shards: {sum(c.count for c in found)} collectives within its "
        f"matrix products, {format_bytes(sent)} per device, {fraction} of the step's traffic, and work that devices "
        "do more than once.",
        CURE,
        round(sent),
    )


def repeated_products(step: Step) -> Iterator[Finding]:
    """Matrix products outside of ``shard_map`` of which each device does far more than its share."""
    found = step.forecast
    share, done = found.flops.shared, found.shared_flops or 0.0
    if done <= MAX_WORK * share or done - share < MIN_REPEATED_FRACTION * found.flops.total:
        return
    yield Finding(
        "repeated-product",
        "the optimizer",
        f"each device does {done:.3g} FLOP of matrix products a step, where its share among {found.devices} devices is "
        f"{share:.3g}: {done / share:.3g} times as many, as the compiler does not share them all.",
        # An owner has one matrix of M < D whole: 1 / M of the work, where now each device has done / share / D of it.
        f"{CURE} That is less work from {math.floor(found.devices * share / done) + 1} matrices of a shape on.",
        0,
    )
