"""Baselines of the benchmarks: training steps written without the library.

  jit_step     ``jax.jit`` with ``NamedSharding``: the plain model on global arrays, each parameter split along its
               largest dim over a flat axis (or along the width of the model, or along two dims over the axes of a
               torus), activations constrained to the batch sharding; XLA places the collectives
  plain_step   fully sharded data parallelism by hand, in ``shard_map`` over a flat axis: ``all_gather`` in bfloat16
               before a module runs, ``psum_scatter`` in float32 in the backward pass, the optimizer on local shards

Both functions take the model, loss, optimizer and batch of a ``Workload`` with unwrapped modules, and return the step
and its abstract arguments, as ``Workload.build_step`` does.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed import abstract_batch
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of, rebox
from xlstm_jax.distributed.data_parallel.store import LeafToSplit
from xlstm_jax.distributed.data_parallel.trees import map_leaves, partition_specs
from xlstm_jax.forecast.training import Workload


def split_dim(shape: tuple[int, ...], parts: int, min_weight_size: int) -> int | None:
    """Returns the largest dim that ``parts`` divides; None without such a dim or for a small array."""
    dims = [dim for dim, size in enumerate(shape) if size % parts == 0]
    large = int(np.prod(shape)) >= min_weight_size
    return max(dims, key=lambda dim: shape[dim]) if dims and large else None


def split_width(width: int, shape: tuple[int, ...], parts: int, min_weight_size: int) -> int | None:
    """Returns the last dim of size ``width``; None without such a dim or for a small array."""
    dims = [dim for dim, size in enumerate(shape) if size == width and size % parts == 0]
    return dims[-1] if dims and math.prod(shape) >= min_weight_size else None


@dataclasses.dataclass(frozen=True)
class AlongWidth:
    """Mode of the option ``uneven`` that splits a leaf along its last dim of size ``width``, as ``split_width`` does.

    The largest dim is split of a leaf without such a dim, and of the table of a vocabulary, which has more than
    ``TABLE`` rows for each column: a lookup reads rows, and a table gathered along its columns is copied.
    """

    TABLE: ClassVar[int] = 8
    width: int

    def reason(self, dim: int, size: int, parts: int) -> None:
        """Leaves that the axes do not divide stay replicated."""

    def prepare_for_split(self, leaf: LeafToSplit, parts: int) -> LeafToSplit:
        """Returns ``leaf`` with the dim of size ``width`` as the dim to split."""
        shape = leaf.value.shape
        dim = split_width(self.width, shape, parts, 0)
        return leaf if dim is None or max(shape) > self.TABLE * self.width else leaf._replace(dim=dim)


def split_two_dims(shape: tuple[int, ...], axis_sizes: Mapping[str, int], min_weight_size: int) -> P:
    """Returns the spec that splits the largest dim over all axes but the last, and the next dim over the last axis.

    Falls back to the largest dim over every axis; ``P()`` if that does not divide, or for a small array.

    >>> split_two_dims((2048, 8192), {"x": 4, "y": 4, "z": 8}, 1)
    PartitionSpec('z', ('x', 'y'))
    """
    *first, last = axis_sizes
    parts = math.prod(axis_sizes[axis] for axis in first)
    order = sorted(range(len(shape)), key=lambda dim: -shape[dim])
    entries: list[Any] = [None] * len(shape)
    if len(shape) > 1 and shape[order[0]] % parts == 0 and shape[order[1]] % axis_sizes[last] == 0 and first:
        entries[order[0]], entries[order[1]] = tuple(first), last
    else:
        dim = split_dim(shape, parts * axis_sizes[last], min_weight_size)
        if dim is not None:
            entries[dim] = tuple(axis_sizes)
    return P(*entries) if math.prod(shape) >= min_weight_size else P()


SplitDim = Callable[[tuple[int, ...], int, int], int | None]


def remodelled(workload: Workload, **fields: Any) -> Workload:
    """Returns the workload with changed fields of the model."""
    return dataclasses.replace(workload, model=workload.model.clone(**fields))


# ---------------------------------------------------------------------------------------------------- jit and shardings


def jit_step(
    workload: Workload, mesh: Any, min_weight_size: int, split_dim: SplitDim = split_dim, *, kernel: bool = False
) -> tuple[Any, tuple[PyTree, ...]]:
    """Builds the step of a trainer on global arrays.

    ``split_dim`` chooses the dim of each leaf on a mesh with one axis; on a mesh with several axes ``split_two_dims``
    splits the leaves. With ``kernel`` the attention of the model is a kernel that XLA cannot
    split over devices, so it runs in ``shard_map`` on the local rows, as in other trainers.
    """
    axis, parts = mesh.axis_names[0] if len(mesh.axis_names) == 1 else mesh.axis_names, mesh.size
    # Without the constraint XLA splits activations like the weights, and stores the activations of the global batch.
    split = NamedSharding(mesh, P(axis))
    workload = remodelled(workload, constrain=lambda x: lax.with_sharding_constraint(x, split))
    if kernel:
        attention = jax.shard_map(
            workload.model.attention, mesh=mesh, in_specs=P(axis), out_specs=P(axis), check_vma=False
        )
        workload = remodelled(workload, attention=attention)

    def place(leaf):
        if len(mesh.axis_names) > 1:
            spec = split_two_dims(leaf.shape, mesh.shape, min_weight_size)
        else:
            dim = split_dim(leaf.shape, parts, min_weight_size)
            spec = P() if dim is None else P(*[None] * dim, axis)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(place, jax.eval_shape(functools.partial(_init, workload), jax.random.key(0)))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)

    def step(state, batch, rng):
        loss, grads = jax.value_and_grad(workload.loss_fn)(state.params, state.apply_fn, batch, rng)
        return state.apply_gradients(grads=grads), {"loss": loss}

    jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, NamedSharding(mesh, P())))
    return jitted, (state, abstract_batch(workload.batch, mesh, mesh.axis_names), _abstract_key())


def _init(workload: Workload, rng: jax.Array) -> TrainState:
    inputs = (jnp.zeros(x.shape, x.dtype) for x in workload.init_inputs)
    params = workload.model.init(rng, *inputs)["params"]
    return TrainState.create(apply_fn=workload.model.apply, params=params, tx=workload.tx)


def _abstract_key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


# ------------------------------------------------------------------------------------------------ the plain algorithm


def plain_step(
    workload: Workload, mesh: Any, min_weight_size: int, *, axis: str = "fsdp", gather_dtype: Any = jnp.bfloat16
) -> tuple[Any, tuple[PyTree, ...]]:
    """Builds the step by hand: parameters split over ``axis``, replicated along the remaining mesh axes."""
    axes, workload = mesh.axis_names, plainly_wrapped(workload, min_weight_size, axis, gather_dtype)
    state, specs = plain_state(workload, mesh)

    def per_device(state, batch, rng):
        loss, grads = jax.value_and_grad(workload.loss_fn)(state.params, state.apply_fn, batch, rng)
        grads = map_leaves(lambda leaf: rebox(leaf, _mean_of_copies(leaf, axes)), grads)
        return state.apply_gradients(grads=grads), {"loss": lax.pmean(loss, axes)}

    places = {"in_specs": (specs, P(axes), P()), "out_specs": (specs, P())}
    step = jax.jit(jax.shard_map(per_device, mesh=mesh, check_vma=False, **places), donate_argnums=0)
    return step, (state, abstract_batch(workload.batch, mesh, axes), _abstract_key())


def plainly_wrapped(
    workload: Workload, min_weight_size: int, axis: str = "fsdp", gather_dtype: Any = jnp.bfloat16
) -> Workload:
    """Returns the workload with the model wrapped by hand, initialised on one row of the batch."""
    options = {"axis": axis, "min_weight_size": min_weight_size, "gather_dtype": gather_dtype}
    wrap = functools.partial(plain_shard_module, **options)
    row = tuple(jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in workload.init_inputs)
    return dataclasses.replace(remodelled(workload, wrap=wrap), inputs=row)


def plain_state(workload: Workload, mesh: Any) -> tuple[PyTree, PyTree]:
    """Returns the abstract state of a workload wrapped by hand, and its partition specs."""
    local = jax.eval_shape(plain_init(workload, mesh, P()), _abstract_key())
    specs = partition_specs(local, mesh)
    whole = jax.eval_shape(plain_init(workload, mesh, specs), _abstract_key())

    def placed(leaf, spec):
        return rebox(leaf, _abstract(leaf_of(leaf).value, NamedSharding(mesh, spec)))

    return map_leaves(placed, whole, specs), specs


def plain_init(workload: Workload, mesh: Any, specs: PyTree) -> Any:
    """Returns the initialisation of a state by key: every device initialises the full state, and keeps its shards."""
    init = functools.partial(_init, workload)
    return jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False)


def _abstract(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _mean_of_copies(leaf: Any, axes: tuple[str, ...]) -> jax.Array:
    over = tuple(axis for axis in axes if axis not in leaf_of(leaf).axes)
    return lax.pmean(leaf_of(leaf).value, over) if over else leaf_of(leaf).value


def plain_shard_module(cls: type[nn.Module], axis: str, min_weight_size: int, gather_dtype: Any) -> type[nn.Module]:
    """Wraps a module so that parameters are gathered before each call, and split after initialisation."""
    gather = functools.partial(map_leaves, functools.partial(_gather_leaf, axis=axis, dtype=gather_dtype))
    split = functools.partial(map_leaves, functools.partial(_split_leaf, axis=axis, min_weight_size=min_weight_size))
    return nn.map_variables(cls, "params", gather, split, mutable=True)


def _split_leaf(leaf: Any, axis: str, min_weight_size: int) -> Any:
    parts = lax.axis_size(axis)
    dim = None if leaf_of(leaf).axes else split_dim(leaf.shape, parts, min_weight_size)
    if dim is None:
        return leaf
    size = leaf.shape[dim] // parts
    value = lax.dynamic_slice_in_dim(leaf, lax.axis_index(axis) * size, size, dim)
    return Sharded(value, tuple(axis if d == dim else None for d in range(leaf.ndim)))


def _gather_leaf(leaf: Any, axis: str, dtype: Any) -> Any:
    if axis not in leaf_of(leaf).axes:
        return leaf
    return _gather(leaf.value, leaf.names.index(axis), axis, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(x: jax.Array, dim: int, axis: str, dtype: Any) -> jax.Array:
    return lax.all_gather(x.astype(dtype), axis, axis=dim, tiled=True)


def _gather_fwd(x, dim, axis, dtype):
    return _gather(x, dim, axis, dtype), None


def _gather_bwd(dim, axis, dtype, _, cotangent):
    del dtype
    summed = lax.psum_scatter(cotangent.astype(jnp.float32), axis, scatter_dimension=dim, tiled=True)
    return (summed / lax.axis_size(axis),)


_gather.defvjp(_gather_fwd, _gather_bwd)
