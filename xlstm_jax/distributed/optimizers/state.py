"""Parameters as passed to an optimizer, and the storage of the optimizer's state.

  trainable, given_state -> tx.update -> stored_state, with_trainable       in a step, on global arrays

An optimizer gets arrays without boxes and without padding, so that a norm is the norm of the parameters, and a factored
moment covers its unsharded matrix. The state of a parameter is padded and split over devices like the parameter. A
transform with a custom layout for a leaf of its state puts a ``StateBox`` around the leaf.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import placement, trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_box, leaf_of, rebox, stored_value, true_value
from xlstm_jax.distributed.data_parallel.policy import choose_shard_dim
from xlstm_jax.distributed.data_parallel.wire.axes import axes_entry, entry_axes
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.distributed.data_parallel.wire.dtypes import value_dtype

State = TypeVar("State", bound=tuple[Any, ...])


class StateBox(Sharded, repr=False):
    """Box by which an optax transform sets the layout of its state: split as the names say, never unboxed for it."""


def is_state_box(leaf: PyTree) -> bool:
    """Returns whether a leaf of an optimizer's state is in a ``StateBox``."""
    return isinstance(leaf, StateBox)


def owner_of_state(path: str, params: Mapping[str, Any]) -> Any | None:
    """Returns the entry of ``params`` whose path is the end of ``path``, a path in an optimizer's state.

    ``0/mu/dense/kernel`` belongs to ``dense/kernel``; for a step counter the result is None.
    """
    parts = path.split("/")
    # Longest first: `mu/a/kernel` belongs to `a/kernel`, even with another `kernel` at the top. "." is the path of a
    # tree that is a single leaf.
    for start in range(len(parts)):
        if (ending := "/".join(parts[start:])) in params:
            return params[ending]
    return params.get(".")


def owners(opt_state: PyTree, params: PyTree) -> list[str]:
    """Returns for each leaf of an optimizer's state the path of the leaf's parameter; without one, the leaf's path."""
    paths = {path: path for path, _ in trees.leaves_with_path(params)}
    return [owner_of_state(path, paths) or path for path, _ in trees.leaves_with_path(opt_state)]


def states_of(opt_state: PyTree, state_type: type[State]) -> list[State]:
    """Returns all instances of ``state_type``, as ``SkipNonfiniteState``, at any depth of an optimizer's state."""

    def is_it(node: Any) -> bool:
        return isinstance(node, state_type)

    states = [node for _, node in trees.flatten_with_path(opt_state, is_it)[0] if is_it(node)]
    return states + [state for outer in states for state in states_of(tuple(outer), state_type)]


def as_parameters(state: PyTree, params: PyTree, caller: str) -> PyTree:
    """Returns weights from an optimizer's state, in the boxes, dtypes and places of ``params`` and in new buffers."""
    by_path = dict(trees.sharded_leaves(state))

    def as_parameter(path: str, leaf: Sharded) -> PyTree:
        value, mean = leaf.value, by_path.get(path, leaf).value
        if np.shape(mean) != np.shape(value):
            raise ValueError(
                f"{caller}: what the optimizer keeps of '{path}' has the shape {np.shape(mean)}, and the parameter "
                f"{np.shape(value)}. Pass the opt_state and the params of the same training state, in their boxes."
            )
        # The state may be in host memory (`Offload`) while its parameter is not. Tracers have no place.
        is_placed = isinstance(value, jax.Array) and not isinstance(value, Tracer)
        placed = jax.device_put(mean, value.sharding) if is_placed else mean
        return jnp.array(placed, value_dtype(value))

    return trees.map_values_with_path(as_parameter, params)


def trainable(tree: PyTree) -> PyTree:
    """Converts parameters or gradients to arrays for optax: without boxes and padding; None where no gradient is."""

    def value(leaf: Any) -> Any:
        box = leaf_of(leaf)
        if not box.is_differentiable:
            return None
        return box.value if box.stores_value else true_value(box)

    return trees.map_leaves(value, tree)


def with_trainable(tree: PyTree, values: PyTree) -> PyTree:
    """Returns ``tree`` with ``values``, a tree as ``trainable`` returns, in its boxes; leaves without gradient stay."""
    trainable, put_back = trees.split_differentiable(tree)
    values = jax.tree.leaves(values)
    return put_back([rebox(p, stored_value(p, value)) for p, value in zip(trainable, values, strict=True)])


def stored_state(opt_state: PyTree, params: PyTree) -> PyTree:
    """Converts the state that optax returned to the stored form: moments get the padding and boxes of parameters."""
    by_path = dict(trees.sharded_leaves(params))
    if all(leaf.stores_value for leaf in by_path.values()):
        return opt_state

    def stored(path: str, leaf: PyTree) -> PyTree:
        owner = owner_of_state(path, by_path)
        if owner is None or owner.stores_value or np.shape(leaf) != owner.true_shape:
            return leaf
        return rebox(owner, stored_value(owner, leaf))

    return trees.map_leaves_with_path(stored, opt_state)


def given_state(opt_state: PyTree) -> PyTree:
    """Converts a stored state to the form for ``tx.update``: without boxes and padding, except each ``StateBox``."""
    return trees.map_leaves(
        lambda leaf: true_value(leaf) if is_box(leaf) and not is_state_box(leaf) else leaf, opt_state
    )


def optimizer_state_shardings(opt_state: PyTree, params: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Returns the shardings of an optimizer's state: each leaf is split like its parameter.

    A leaf with a shape unlike its parameter's (a factored moment, a history) is split over the same axes along the
    largest dim that the axes divide. A leaf without a parameter is replicated. Shardings change no value.

    >>> params = {"w": nn.Partitioned(jnp.ones((8, 2)), names=("fsdp", None))}
    >>> opt_state = optax.sgd(0.1, momentum=0.9).init(unbox(params))
    >>> optimizer_state_shardings(opt_state, params, mesh)[0].trace["w"].spec
    P('fsdp',)

    Args:
      opt_state: arrays or ``ShapeDtypeStruct``, without boxes.
      params: boxed parameters, arrays or abstract.
    Returns:
      A ``NamedSharding`` for every leaf of ``opt_state``.
    """
    return state_shardings(opt_state, leaves_and_specs(params, mesh), mesh)


# For each parameter the leaf, and the spec of its values, which the moments of the parameter share.
LeavesAndSpecs = Mapping[str, tuple[Sharded, PartitionSpec]]


def leaves_and_specs(params: PyTree, mesh: Mesh | AbstractMesh) -> LeavesAndSpecs:
    """Returns by path each leaf of boxed parameters, and the ``PartitionSpec`` of its values on the mesh."""
    return {path: (leaf, placement.spread_spec(leaf.names, mesh)) for path, leaf in trees.sharded_leaves(params)}


def state_shardings(opt_state: PyTree, by_path: LeavesAndSpecs, mesh: Mesh | AbstractMesh) -> PyTree:
    """Does ``optimizer_state_shardings`` for parameters by path."""

    def sharding(path: str, leaf: PyTree) -> NamedSharding:
        value = leaf.value if is_box(leaf) else leaf
        if value is not leaf and is_state_box(leaf):
            return NamedSharding(mesh, placement.spread_spec(leaf_of(leaf).names, mesh))
        owner, spec = owner_of_state(path, by_path) or (None, PartitionSpec())
        shape = np.shape(value)
        if owner is not None and any(owner.names):
            copies = owner.communication.replicas
            if shape != np.shape(owner.value):
                spec = _spec_of_other_shape(shape, owner, mesh)
            elif copies and copies.splits_optimizer_state:
                spec = _split_further(spec, shape, copies, mesh)
        return NamedSharding(mesh, spec)

    return trees.map_leaves_with_path(sharding, opt_state)


def _spec_of_other_shape(shape: tuple[int, ...], owner: Sharded, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the spec of a leaf of the optimizer's state whose shape differs from that of its parameter ``owner``."""
    sizes = {axis: mesh.shape[axis] for axis in owner.axes if mesh.shape[axis] > 1}
    # No minimum size: the threshold avoids gathers of small parameters, and state is never gathered.
    dim = choose_shard_dim(shape, (None,) * len(shape), sizes, min_weight_size=0).dim
    return PartitionSpec(*[None] * dim, axes_entry(tuple(sizes))) if sizes and dim is not None else PartitionSpec()


def _split_further(
    spec: PartitionSpec, shape: tuple[int, ...], copies: Copies, mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Returns ``spec`` with a dim split over the axes of copies of the parameter, too (ZeRO-1)."""
    axes = tuple(axis for axis in copies.axes if mesh.shape[axis] > 1)
    entries = [entry_axes(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    # Local sizes: the copies divide the dims after the parameter's axes.
    local_shape = [size // math.prod(mesh.shape[a] for a in entry) for size, entry in zip(shape, entries, strict=True)]
    fitting = [dim for dim, size in enumerate(local_shape) if size % math.prod(mesh.shape[a] for a in axes) == 0]
    if not axes or not fitting:
        return spec
    dim = max(fitting, key=lambda dim: local_shape[dim])
    entries[dim] += axes
    return PartitionSpec(*map(axes_entry, entries))
