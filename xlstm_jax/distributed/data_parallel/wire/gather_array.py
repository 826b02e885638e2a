"""The gather of one array, and the rule of its gradient.

  forward    W[d_fsdp, f]  -->  W[d, f]         all-gather, one stage for each axis
  backward   dW[d, f]      -->  dW[d_fsdp, f]   reduce-scatter, mean over N, then over copies of the shard

``gather_params`` gathers each leaf of a tree so, and a box that is read gathers itself so. ``prefetch`` takes the same
steps one by one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, DType
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, as_axis_names, axes_entry, entry_axes
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.distributed.data_parallel.wire.dtypes import is_prng_key, term_of_mean, widened
from xlstm_jax.distributed.data_parallel.wire.tracing import running_loss
from xlstm_jax.distributed.data_parallel.wire.wires import Wire
from xlstm_jax.foreign import is_batched


def gather_array_with_mean_grads(
    x: jax.Array,
    axis: int,
    axis_name: AxisNames,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
    *,
    replicas: Copies | None = None,
) -> jax.Array:
    """All-gathers ``x`` along a dim; the gradient is reduce-scattered as the *mean* over the axis.

    >>> def loss(shard, x):  # of 1 value on each of 4 devices; x differs by device
    ...     return (gather_array_with_mean_grads(shard, 0, "fsdp") * x).sum()
    >>> grad = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))
    >>> grad(jnp.ones(4), jnp.array([0.0, 1.0, 2.0, 3.0])).tolist()
    [1.5, 1.5, 1.5, 1.5]

    Args:
      x: this device's shard, [..., d / N, ...]. Integers and PRNG keys are gathered too, uncast and without gradient.
      axis: the dim d along which the shards are concatenated.
      axis_name: an axis or a tuple of axes, outermost first. One all-gather per axis, the innermost first.
      gather_dtype: dtype that is sent, and of the result; None: x's own. With the dtype in which the module computes
        nothing is left to cast (and to save for the backward pass). "int8" and "float8_e4m3fn" are sent in
        blocks with scales (see docs/quantized.md); the result then has x's own dtype, and its gradient, which passes
        as if nothing had been rounded, is scattered as that of any other.
      grad_scatter_dtype: dtype in which the gradient is summed; None: float32, or x's own where that is wider. It is
        divided by N before the sum, so that a float16 sum overflows only where the mean does. On one device nothing
        travels, and nothing is narrowed.
      replicas: other axes along which there are copies of ``x``; its gradient is then averaged over them too, after the
        scatter. Where the type of ``x`` says that the copies are equal (``check_vma=True``) it is summed, as JAX sums
        the gradient of any such value, and ``sync_gradients`` divides.
    Returns:
      [..., d, ...] in ``gather_dtype``; in x's own where that is a format of blocks. Its cotangent comes back as
      [..., d / N, ...] in x's dtype.
    Raises:
      ValueError: an axis is not bound, ``x`` has no such dim, or a dtype would make floats complex, or the reverse.
    """
    axes, how = as_axis_names(axis_name), Communication.of(gather_dtype, grad_scatter_dtype, replicas)
    collectives.check_bound(axes, caller="gather_array_with_mean_grads")
    collectives.check_bound(how.copied_axes, caller="gather_array_with_mean_grads, replicas")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"gather_array_with_mean_grads: axis={axis} is no dim of an array of shape {x.shape}.")
    how.dtypes(x)  # refused here, not in the backward pass
    return _gather(x, None, axis % x.ndim, axes, how)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Primal:
    """What the backward pass must know of the value that was gathered: a residual without any array in it."""

    shape: tuple[int, ...]
    dtype: DType
    varying: frozenset[str]
    batched: bool

    @classmethod
    def of(cls, x: jax.Array) -> "Primal":
        return cls(x.shape, x.dtype, collectives.varying_axes(x), is_batched(x))


# ``wire`` None is the wire that ``how`` names. ``path`` is where the leaf stands, for errors in the backward pass.
@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _gather(
    x: jax.Array, wire: Wire | None, dim: int, axes: tuple[str, ...], how: Communication, path: str = ""
) -> jax.Array:
    return _whole(x, wire, dim, axes, how)


def _gather_fwd(
    x: jax.Array, wire: Wire | None, dim: int, axes: tuple[str, ...], how: Communication, path: str
) -> tuple[jax.Array, Primal]:
    return _whole(x, wire, dim, axes, how), Primal.of(x)


def _gather_bwd(
    dim: int, axes: tuple[str, ...], how: Communication, path: str, primal: Primal, cotangent: jax.Array
) -> tuple[jax.Array | np.ndarray, None]:
    if cotangent.dtype == jax.dtypes.float0:
        return np.zeros(primal.shape, jax.dtypes.float0), None
    check_one_gradient_of_one_batch(path, primal, cotangent, axes)
    return _scattered(cotangent, dim, axes, how, primal), None


_gather.defvjp(_gather_fwd, _gather_bwd)


# Functions of their own for JAX: of all leaves of one shape, as of layers in a Python loop, each is traced and lowered
# once. XLA inlines them. What looks at tracers, or names a leaf, stays outside.


@partial(jax.jit, static_argnums=(2, 3, 4))
def _whole(x: jax.Array, wire: Wire | None, dim: int, axes: tuple[str, ...], how: Communication) -> jax.Array:
    """The forward pass of a gather."""
    wire = wire or how.wire(x, dim, axes)
    sent = wire.send(shard_as_sent(x, how))
    return wire.receive(collectives.all_gather(sent, wire.along(dim), axes))


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _scattered(cotangent: jax.Array, dim: int, axes: tuple[str, ...], how: Communication, primal: Primal) -> jax.Array:
    """The backward pass of a gather."""
    terms = terms_to_scatter(apart_from_product(cotangent, axes), axes, how, primal)
    return gradient_of_shard(collectives.reduce_scatter(terms, dim, axes), how, primal)


def apart_from_product(cotangent: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The cotangent of a narrow matrix that travels, which XLA on CPU does not transpose within a product.

    JAX transposes the product that makes the gradient of a kernel. Where nothing else reads the product, XLA swaps its
    operands instead, and its fast kernels for CPU do not take them so: in bfloat16 the step of a decoder then takes
    twice as long, in float32 as long. The two transposes here leave the product without any before the barrier.
    """
    if cotangent.ndim != 2 or cotangent.dtype.itemsize >= 4 or not collectives.spread_axes(axes):
        return cotangent
    return jax.lax.platform_dependent(cotangent, cpu=lambda g: jax.lax.optimization_barrier(g.T).T, default=lambda g: g)


def shard_as_sent(x: jax.Array, how: Communication) -> jax.Array:
    """Returns the shard in the dtype of its gather, for ``Wire.send``.

    Copies are equal by type only until here: the cast to varying over them must not be JAX's, which transposes it to a
    sum of whole gradients.
    """
    x = collectives.to_varying(x, collectives.spread_axes(how.copied_axes))
    return x if is_prng_key(x) else x.astype(how.dtypes(x)[0])


def terms_to_scatter(cotangent: jax.Array, axes: tuple[str, ...], how: Communication, primal: Primal) -> jax.Array:
    """What the stages of a reduce-scatter begin with: this device's terms of the mean over ``axes``."""
    if not collectives.spread_axes(axes):
        return widened(cotangent)
    return term_of_mean(cotangent, collectives.axis_size(axes), how.dtypes(primal)[1])


def gradient_of_shard(scattered: jax.Array, how: Communication, primal: Primal) -> jax.Array:
    """What the stages of a reduce-scatter end with, as the gradient: its mean over copies, of the primal's type."""
    grad = mean_over_copies(scattered, how.replicas, primal.varying) if how.replicas else scattered
    return collectives.to_varying(grad, primal.varying).astype(primal.dtype)


def check_one_gradient_of_one_batch(path: str, primal: Primal, cotangent: jax.Array, axes: tuple[str, ...]) -> None:
    """Raises where the cotangent is not the gradient of this device's whole batch, as averaging over devices assumes.

    Under ``vmap`` the cotangents may belong to as many shards (an ensemble), but not all to a single shard.
    """
    if not collectives.spread_axes(axes):
        return
    for_each_example = is_batched(cotangent) and not primal.batched
    if for_each_example or running_loss().axes:
        where = "under vmap, for each example" if for_each_example else "in a loss function, which is differentiated"
        raise ValueError(
            f"the gradient of {f'{path!r}' if path else 'a parameter'}, of shape {primal.shape} on this device, is "
            f"taken {where}: it would be averaged over the devices of {axes}, and that of leaves which are not split "
            "would not. In the loss function gather first, whole = gather_params(params, axis_name), and take it of "
            "whole: it is then the gradient of this device's examples."
        )


def gathered_by_hand(shard: jax.Array, own: tuple[str, ...], path: str) -> jax.Array:
    """The shard, for a gather over ``own``: axes over which the model itself splits the leaf.

    Nobody gathers such a leaf but a user, by hand. ``sync_gradients`` takes its gradient for a sum over the batch axes
    among ``own``, and divides it. The gather's transpose is a mean; this makes a sum of it.
    """
    own = collectives.spread_axes(own)
    return _gathered_by_hand(shard, own, running_loss().axes, path) if own else shard


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered_by_hand(shard: jax.Array, own: tuple[str, ...], batch_axes: tuple[str, ...], path: str) -> jax.Array:
    return shard


def _by_hand_bwd(
    own: tuple[str, ...], batch_axes: tuple[str, ...], path: str, residual: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    if not batch_axes:
        raise ValueError(
            f"the model itself splits {f'{path!r}' if path else 'a parameter'} over {own}, by its box, and a gather "
            "over these is differentiated: it makes the mean of gradients, of which sync_gradients would not know. "
            "Take the gradient by training.value_and_grad, which does."
        )
    return (cotangent * collectives.axis_size([axis for axis in own if axis in batch_axes]),)


_gathered_by_hand.defvjp(lambda shard, own, batch_axes, path: (shard, None), _by_hand_bwd)


def mean_over_copies(grad: jax.Array, copies: Copies, varying: Collection[str] = ()) -> jax.Array:
    """Returns the mean of a shard's gradient over its copies, in a wide dtype.

    ``varying`` are the axes over which the type of the shard varies. Over a tracked axis that is not among them the
    result is the sum and not the mean: JAX sums the shard's other gradients there (of a penalty on its values), and
    all terms of one gradient must be of one kind.
    """
    axes, wide = collectives.spread_axes(copies.axes), widened(grad)
    if not axes:
        return wide
    mean = copies.mean(wide, axes).astype(wide.dtype)
    summed = [axis for axis in axes if collectives.is_tracked(axis) and axis not in varying]
    return mean * collectives.axis_size(summed) if summed else mean


def gather_dims(
    value: jax.Array,
    names: Sequence[AxisEntry],
    axes: Collection[str],
    how: Communication,
    path: str,
    wire: Wire | None,
) -> tuple[jax.Array, tuple[AxisEntry, ...]]:
    """Gathers all dims that ``names`` say are split, over those of ``axes``; returns the value and the names left.

    The value travels by ``wire``; None: as ``how`` says.
    """
    left = list(names)
    for dim, entry in enumerate(names):
        held = entry_axes(entry)
        if set(held).isdisjoint(axes):
            continue
        if set(held) <= set(axes):
            value, left[dim] = _gather(value, wire, dim, held, how, path), None
        else:
            value, left[dim] = _gather_some(value, wire, dim, held, axes, how, path)
        how = replace(how, replicas=None)  # once for each leaf
    return value, tuple(left)


def _gather_some(
    value: jax.Array,
    wire: Wire | None,
    dim: int,
    held: tuple[str, ...],
    axes: Collection[str],
    how: Communication,
    path: str,
) -> tuple[jax.Array, AxisEntry]:
    """Gathers one dim, split over ``held``, over some of these axes; returns the value and the entry that is left."""
    first = next(i for i, axis in enumerate(held) if axis in axes)
    outer, inner = held[:first], held[first:]
    kept = tuple(axis for axis in inner if axis not in axes)
    if not kept:
        return _gather(value, wire, dim, inner, how, path), axes_entry(outer)
    if (wire or how.wire(value, dim, held)).rounds_again:
        raise ValueError(
            f"gather_dtype={how.gather_dtype}: {f'{path!r}' if path else 'a parameter'} is split over {held}, and "
            f"gathered over those of {sorted(axes)}: {kept} stays split and lies inside of an axis that is gathered, "
            "so that values would be rounded more than once. Let axes that stay come first, or pass a floating dtype."
        )
    # An axis to keep lies inside one to gather. Its shards are gathered as well (an all-gather whose transpose is a
    # sum, as they are shards and not copies), and the one that it holds by itself is cut out.
    for axis in reversed(inner):
        if axis in axes:
            value, how = _gather(value, wire, dim, (axis,), how, path), replace(how, replicas=None)
        else:
            value = collectives.all_gather(value, dim, (axis,))
    return collectives.own_shard(value, dim, kept), axes_entry(outer + kept)
