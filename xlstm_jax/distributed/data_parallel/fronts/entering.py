"""What happens where a module is entered and left: its parameters are gathered, and split after initialisation.

It depends on where the module runs:
  inside shard_map        values are shards: they are gathered on entry, and split after init
  under jax.set_mesh      values are global: init boxes them with their names, apply strips the boxes, XLA does the rest
  anywhere else           values are global and bare: it is the plain module
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.gather import gather_own_params
from xlstm_jax.distributed.data_parallel.leaf import is_box, leaf_of, read_value, whole_value
from xlstm_jax.distributed.data_parallel.planned import Planned, is_planning
from xlstm_jax.distributed.data_parallel.shard import (
    ShardRule,
    box_params,
    box_shards,
    is_gathered_here,
    plan_params,
    with_unit,
)
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves_with_path
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import as_axis_names
from xlstm_jax.distributed.data_parallel.wire.communication import Replicas
from xlstm_jax.distributed.data_parallel.wire.tracing import path_in_model


class Unit(NamedTuple):
    """What a wrapper was asked for: over which axes modules are split, by what rule, and when weights are dropped."""

    axes: tuple[str, ...]
    rule: ShardRule
    reshard_after_forward: bool

    @classmethod
    def of(
        cls,
        axis_name: AxisNames,
        min_weight_size: int,
        gather_dtype: DTypeLike | None,
        grad_scatter_dtype: DTypeLike | None,
        *,
        reshard_after_forward: bool,
        replicas: Replicas | None,
        uneven: str,
        trainable: bool,
    ) -> "Unit":
        """From the arguments of ``shard_module_params``, which raises what this does."""
        axes = as_axis_names(axis_name)
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"reshard_after_forward={reshard_after_forward!r} is not True or False.")
        if not isinstance(trainable, bool):
            raise TypeError(
                f"trainable={trainable!r} is not True or False. A predicate of a parameter's path goes to "
                "create_train_state(..., trainable=...)."
            )
        rule = ShardRule.of(min_weight_size, uneven, gather_dtype, grad_scatter_dtype, replicas, trainable)
        if replicas and (both := set(axes) & set(replicas.axes)):
            raise ValueError(
                f"{min(both)!r} is in axis_name={axes} and in {replicas}; an axis splits or copies, not both."
            )
        return cls(axes, rule, reshard_after_forward)


@runtime_checkable
class ShardsItself(Protocol):
    """A model of another front than Linen's, which knows its modules; ``shard_modules`` takes it."""

    def with_units(self, where: Any, unit: Unit) -> Any:
        """The model, in which the modules that ``where`` says are units."""
        ...


def running(axes: tuple[str, ...]) -> Literal["manual", "global", "plain"]:
    """Where the wrapped module runs: "manual" (axes bound), "global" (the mesh is set), or "plain"."""
    unbound = [axis for axis in axes if not collectives.is_bound(axis)]
    if not unbound:
        return "manual"
    mesh = jax.sharding.get_abstract_mesh()
    if len(unbound) == len(axes) and all(axis in mesh.shape for axis in axes):
        return "global"
    if mesh.empty:
        return "plain"
    if mesh.manual_axes:
        raise ValueError(collectives.unbound_message(unbound[0], "shard_module_params"))
    raise _no_axis(next((axis for axis in unbound if axis not in mesh.shape), unbound[0]))


def _no_axis(axis: str) -> ValueError:
    where = "axis_sizes" if is_planning() else "the mesh that jax.set_mesh has set"
    there = tuple(jax.sharding.get_abstract_mesh().shape)
    return ValueError(f"shard_module_params: {axis!r} is not an axis of {where}, which has {there}. Pass one of them.")


def gather_here(axes: tuple[str, ...], rule: ShardRule, variables: PyTree) -> PyTree:
    """What the module sees: its leaves whole, but for those that a wrapped module inside of it gathers by itself."""
    if running(axes) == "manual":
        check_shards(variables, axes)
        return gather_own_params(variables, axes, replace(rule.communication, replicas=None), is_gathered_here)

    def take_out(path: str, leaf: Any) -> Any:
        if not is_gathered_here(path, leaf):
            return leaf
        if isinstance(leaf, Planned):
            return leaf.gathered(axes)
        # Boxes over other axes stay, for the wrapper of those.
        return read_value(leaf) if is_box(leaf) and set(leaf_of(leaf).axes) <= set(axes) else leaf

    return map_leaves_with_path(take_out, variables)


def shard_here(axes: tuple[str, ...], rule: ShardRule, variables: PyTree) -> PyTree:
    mode = running(axes)
    if mode == "plain":
        return variables
    if mode == "manual":
        return with_unit(box_shards(variables, axes, rule), variables)
    mesh, replicas = jax.sharding.get_abstract_mesh(), rule.communication.replicas
    if replicas and (missing := [axis for axis in replicas.axes if axis not in mesh.shape]):
        raise _no_axis(missing[0])
    sizes = {axis: mesh.shape[axis] for axis in axes}
    return with_unit((plan_params if is_planning() else box_params)(variables, sizes, rule), variables)


def check_shards(variables: Any, axes: tuple[str, ...]) -> None:
    """Raises where a leaf that a box splits over ``axes`` is a global array: it did not come through the ``shard_map``.

    Those of an outer ``jit`` are traced, and their types get lost in a scan of Linen; the front for Linen sees those by
    their shapes.
    """
    for path, leaf in leaves_with_path(variables):
        value = leaf_of(leaf).value
        if isinstance(value, jax.Array) and not isinstance(value, Tracer) and split_over(leaf, axes):
            raise closed_over(path_in_model(path), leaf, axes)


def split_over(leaf: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``axes`` over which the leaf's box splits it on more than one device."""
    return collectives.spread_axes([axis for axis in leaf_of(leaf).axes if axis in axes])


def closed_over(path: str, leaf: Any, axes: tuple[str, ...]) -> ValueError:
    """What to raise of a leaf whose box says that it is split, and whose value is whole."""
    return whole_value(f"'{path}'", np.shape(leaf_of(leaf).value), split_over(leaf, axes))
