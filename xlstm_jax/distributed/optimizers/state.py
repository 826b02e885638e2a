"""What an optimizer sees of a state, how what it keeps is stored, and its update.

  a step's order   trainable -> tx.update -> stored_state

It sees global arrays without boxes and without padding: a norm is then the norm, and a factored moment sees its whole
matrix. What it keeps of a parameter lies like that parameter.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.axes import axes_entry, entry_axes
from xlstm_jax.distributed.data_parallel.boxes import (
    is_differentiable,
    is_padded,
    leaf_axes,
    leaf_communication,
    leaf_spec,
    leaf_value,
    leaves_with_path,
    map_leaves,
    map_leaves_with_path,
    rebox,
    shardings,
    split_differentiable,
    true_shape,
    true_value,
    with_padding,
)
from xlstm_jax.distributed.data_parallel.communication import is_prng_key
from xlstm_jax.distributed.data_parallel.shard_choice import choose_shard_dim


def owner_of_state(path: str, params: dict[str, Any]) -> Any | None:
    """The parameter that a leaf of an optimizer's state belongs to: the one whose path its own path ends with.

    Args:
      path: the path of the state's leaf, as ``0/mu/dense/kernel``.
      params: parameters by their paths, as ``dict(leaves_with_path(params))``.
    """
    parts = path.split("/")
    endings = ("/".join(parts[i:]) for i in range(len(parts)))
    return next((params[ending] for ending in endings if ending in params), params.get("."))


def own_copy(value: jax.Array) -> jax.Array:
    """A buffer of its own with a type that a step will not change.

    Some optimizers keep the parameters themselves, but the state is donated as a whole, each buffer once. And some keep
    weakly typed numbers, which the first update makes strong, so that the second step would compile again.
    """
    return jnp.copy(value) if is_prng_key(value) else jnp.array(value, value.dtype)


def trainable(tree: PyTree) -> PyTree:
    """The tree as an optimizer sees it: bare values without padding, and None for what takes no gradient."""
    return map_leaves(lambda leaf: true_value(leaf) if is_differentiable(leaf) else None, tree)


def with_trainable(tree: PyTree, values: PyTree) -> PyTree:
    """The inverse of ``trainable``: ``values`` in the boxes and places of ``tree``, whose other leaves stay."""
    boxes, put_back = split_differentiable(tree)
    values = jax.tree.leaves(values)
    return put_back([rebox(box, with_padding(box, value)) for box, value in zip(boxes, values, strict=True)])


def stored_state(opt_state: PyTree, params: PyTree) -> PyTree:
    """An optimizer's state as it is stored: what has the true shape of a padded parameter, padded and boxed like it."""
    by_path = dict(leaves_with_path(params))

    def stored(path, leaf):
        owner = owner_of_state(path, by_path)
        if owner is None or not is_padded(owner) or np.shape(leaf) != true_shape(owner):
            return leaf
        return rebox(owner, with_padding(owner, leaf))

    return map_leaves_with_path(stored, opt_state)


def optimizer_state_shardings(opt_state: PyTree, params: PyTree, mesh: Mesh) -> PyTree:
    """Where an optimizer's state lies: each leaf like the parameter that it belongs to.

    A leaf of another shape than its parameter's (a factored moment, a history) is split over the same axes along the
    largest dim that they divide; what belongs to no parameter is replicated. The values do not depend on it.

    Args:
      opt_state: arrays or ``ShapeDtypeStruct``, without boxes.
      params: boxed parameters, arrays or abstract.
    Returns:
      A ``NamedSharding`` for every leaf of ``opt_state``.
    """
    by_path = dict(leaves_with_path(params))

    def sharding(path, leaf):
        return NamedSharding(mesh, _state_spec(leaf, owner_of_state(path, by_path), mesh))

    return map_leaves_with_path(sharding, opt_state)


def _state_spec(leaf: Any, owner: Any, mesh: Mesh) -> PartitionSpec:
    if owner is None or not leaf_axes(owner):
        return PartitionSpec()
    shape = np.shape(leaf_value(leaf))
    if shape == np.shape(leaf_value(owner)):
        return _split_further(leaf_spec(owner, mesh), shape, owner, mesh)
    sizes = {axis: mesh.shape[axis] for axis in leaf_axes(owner) if mesh.shape[axis] > 1}
    dim = choose_shard_dim(shape, (None,) * len(shape), sizes, min_weight_size=0).dim
    return PartitionSpec(*[None] * dim, axes_entry(tuple(sizes))) if sizes and dim is not None else PartitionSpec()


def _split_further(spec: PartitionSpec, shape: tuple[int, ...], owner: Any, mesh: Mesh) -> PartitionSpec:
    """``spec``, and over the copies of the shards where the owner's ``Replicas`` say so: the largest dim that fits."""
    replicas = leaf_communication(owner).replicas
    if not (replicas and replicas.shard_optimizer_state):
        return spec
    axes = tuple(axis for axis in replicas.axes if mesh.shape[axis] > 1)
    entries = [entry_axes(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    own = [size // math.prod(mesh.shape[a] for a in entry) for size, entry in zip(shape, entries, strict=True)]
    fitting = [dim for dim, size in enumerate(own) if size % math.prod(mesh.shape[a] for a in axes) == 0]
    if not axes or not fitting:
        return spec
    dim = max(fitting, key=lambda dim: own[dim])
    entries[dim] += axes
    return PartitionSpec(*map(axes_entry, entries))


def apply_updates(state: TrainState, grads: PyTree, loss: jax.Array, value_fn: Any, mesh: Mesh) -> TrainState:
    """The optimizer's update on global arrays, put back into the places and boxes of the state."""
    params, grads = trainable(state.params), trainable(grads)
    tx, opt_state = optax.with_extra_args_support(state.tx), map_leaves(true_value, state.opt_state)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss, grad=grads, value_fn=value_fn)
    opt_state = stored_state(opt_state, state.params)
    new_params = with_trainable(state.params, optax.apply_updates(params, updates))
    return state.replace(
        step=state.step + 1,
        params=jax.lax.with_sharding_constraint(new_params, shardings(new_params, mesh)),
        opt_state=jax.lax.with_sharding_constraint(opt_state, optimizer_state_shardings(opt_state, state.params, mesh)),
    )
