"""State that minibatches hand on, each kind in a file of its own: a line here registers each.

Remove a line and its file, and batches do without that state.
"""

from xlstm_jax.distributed.training.carries.carry import Carry, Inputs
from xlstm_jax.distributed.training.carries.kept_collections import KeptCollections
from xlstm_jax.distributed.training.carries.metric_state import MetricState
from xlstm_jax.distributed.training.carries.overwritten_scales import OverwrittenScales

CARRIES: list[type[Carry]] = [
    OverwrittenScales,
    KeptCollections,  # behind all others that take collections: it takes the rest
    MetricState,
]


def carries_of(inputs: Inputs) -> list[Carry]:
    """Returns the carries of a batch, each with its part of ``inputs``."""
    carries: list[Carry] = []
    if not inputs.collections and inputs.fold_aux is None:
        return carries
    left = dict(inputs.collections)
    for kind in CARRIES:
        if (carry := kind.of(inputs._replace(collections=left))) is not None:
            carries.append(carry)
            left = {name: tree for name, tree in left.items() if name not in carry.takes()}
    # Otherwise the loss function would run without them, or its observations would be averaged.
    assert not left, f"no carry takes the collections {sorted(left)}"
    assert inputs.fold_aux is None or any(carry.takes_aux for carry in carries), "no carry takes the metric"
    return carries
