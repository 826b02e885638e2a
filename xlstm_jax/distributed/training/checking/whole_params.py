"""Warnings of sharding that was asked for and does not happen: losses are right, and the memory is not saved.

  no parameter is split       every device holds all of them, their gradients and the optimizer's state
  a wrapper around a scan     the weights of all layers are gathered at once

Each is told once, where a state is created or a step is traced, and never on a mesh of one device.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.common_types import Model, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.modules.unit import Stacks
from xlstm_jax.distributed.data_parallel.reasons import Indivisible, Reason, TooSmall, Unwrapped
from xlstm_jax.distributed.plan.leaf_plan import PARAMETERS
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.wording import format_bytes, format_mesh, joined

LARGEST = 3  # leaves that are named
USERS_LINE = 4  # the caller of create_train_state, for warnings.warn
AnyMesh = Mesh | AbstractMesh

CURES: dict[type[Reason], str] = {
    Unwrapped: "Wrap the modules that own them with shard_module_params, or choose them by shard_modules.",
    TooSmall: "Lower min_weight_size of the wrapper.",
    Indivisible: "Pass uneven='pad' to the wrapper, or choose another mesh.",
}
LOST_BOXES = (
    "Wrap the modules with shard_module_params and lower its min_weight_size; or boxes were lost (by unbox, or by "
    "model.init outside of the mesh): make the state with create_train_state."
)
_told: set[object] = set()


def warn_if_nothing_is_split(
    params: PyTree, mesh: AnyMesh, reasons: Callable[[], Mapping[str, Reason]] = dict[str, Reason]
) -> None:
    """Warns where no leaf is split over devices of the mesh, unless it has warned of the same parameters before.

    ``reasons`` returns why leaves are whole, by their paths, as far as that is known.
    """
    leaves = dict(trees.leaves_with_path(params))
    # Over an axis of size 1, too: whoever says fsdp=1 means it.
    split = any(leaf_of(leaf).axes for leaf in leaves.values())
    key = (tuple(mesh.shape.items()), tuple((path, np.shape(leaf_of(leaf).value)) for path, leaf in leaves.items()))
    if split or mesh.size == 1 or not leaves or key in _told:
        return
    _told.add(key)
    why, nbytes = reasons(), {path: leaf_of(leaf).stored_bytes for path, leaf in leaves.items()}
    largest = sorted(leaves, key=lambda path: -nbytes[path])[:LARGEST]
    named = [f"'{path}', {format_bytes(nbytes[path])}" + (f" ({why[path]})" if path in why else "") for path in largest]
    cures = dict.fromkeys(CURES.get(type(why[path]), LOST_BOXES) if path in why else LOST_BOXES for path in largest)
    _warn(
        f"no parameter is split: each of the {mesh.size} devices of the mesh {format_mesh(mesh.shape)} holds all "
        f"{format_bytes(sum(nbytes.values()))} of parameters, and as much for gradients and each moment of the "
        f"optimizer. The largest: {'; '.join(named)}. {' '.join(cures)} If it is meant, pass whole_ok=True."
    )


def reasons_in_plan(model: Model, mesh: AnyMesh, rng: PyTree, inputs: PyTree, kwargs: Mapping[str, Any]) -> Any:
    """A function that returns why each parameter of the model is split or whole, as its wrappers decide."""

    def reasons() -> dict[str, Reason]:
        plan = plan_sharding(model, mesh.shape, *inputs, rng=rng, **kwargs)
        of_params = [row for row in plan.rows if row.collection == PARAMETERS]
        return {row.path: Unwrapped() if plan.assumed else row.reason for row in of_params}

    return reasons


def warn_of_gathered_stacks(stacks: Stacks, mesh: AnyMesh) -> None:
    """Warns of layers that a wrapped module gathers all at once, unless it has warned of the same before."""
    new = {name: cls for name, cls in stacks.layers.items() if (name, cls) not in _told}
    if mesh.size == 1 or not new:
        return
    _told.update(new.items())
    named = joined([f"{name!r} scans over layers of {cls}" for name, cls in new.items()])
    _warn(
        f"{named} within a module that shard_module_params wraps: it gathers the weights of all layers at once. Wrap "
        f"what is scanned, nn.scan(shard_module_params({next(iter(new.values()))}, ...), ...): it gathers a layer at a "
        "time. If it is meant, pass whole_ok=True."
    )


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=USERS_LINE)
