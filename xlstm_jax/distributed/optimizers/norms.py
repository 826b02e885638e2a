"""The norm of a boxed tree from its shards, and clipping by it, inside ``shard_map``.

Gradients must be averaged before: ``check_averaged`` sees in their types where they are not.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.dtypes import wide_dtype
from xlstm_jax.wording import kind_of

AxesOfEach = tuple[tuple[str, ...], ...]


def global_norm(tree: PyTree) -> jax.Array:
    """The L2 norm over all values of a boxed tree, the same on every device.

    Inside ``shard_map`` the squares of each leaf are summed over the axes that its box names, and over no others: one
    collective for each distinct set of axes. Outside, values are global and nothing is communicated. In a loss that is
    averaged over devices (``value_and_grad``, ``make_train_step``) it has the gradient of the norm of all parameters.

    >>> w = nn.Partitioned(jnp.ones((8, 2)), names=("fsdp", None))
    >>> jax.shard_map(global_norm, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P())(w)
    Array(4., dtype=float32)

    Args:
      tree: gradients or parameters, boxed where they are split; frozen leaves and leaves of no float do not count.
    Returns:
      A float32 scalar, or wider where a leaf is.
    Raises:
      ValueError: a box names an axis that is not bound; or (under ``check_vma=True``) the type of a leaf says that it
        differs between devices along an axis that its box does not name. Both name the leaf.
    """
    by_axes: dict[frozenset[str], Any] = {}
    for path, leaf in trees.sharded_leaves(tree):
        if leaf.is_differentiable:
            axes = _axes_of_values(path, leaf)
            value = leaf.value
            wide = value.astype(wide_dtype(value.dtype))
            squares = jax.lax.square(jax.lax.abs(wide) if jnp.iscomplexobj(wide) else wide)
            # Added up before the collective: one scalar travels for each set of axes, however many leaves have it.
            # (By operations of ``lax``, where dtypes are alike: those of ``jnp`` take three times as long to trace.)
            total, before = jax.lax.reduce_sum(squares, range(squares.ndim)), by_axes.get(axes, 0)
            alike = axes in by_axes and before.dtype == total.dtype  # NumPy's float64 is equal to None
            by_axes[axes] = jax.lax.add(before, total) if alike else before + total
    sums = _differentiable_sum(list(by_axes.values()), tuple(tuple(sorted(axes)) for axes in by_axes))
    return jnp.sqrt(sum(sums, start=jnp.float32(0)))


# Sums values[i] over axes[i]; its gradient is for a loss that is averaged over devices. The transpose of a sum over N
# devices is the sum of their cotangents. Each device's loss contains the whole norm, and the mean over devices counts
# it once: so the mean of the cotangents is right, and their sum N times too large.
_differentiable_sum = jax.custom_vjp(collectives.psum, nondiff_argnums=(1,))


def _sum_bwd(axes: AxesOfEach, values: list[jax.Array], cotangents: list[jax.Array]) -> tuple[list[jax.Array]]:
    # Over tracked axes (check_vma) JAX has summed the cotangents, which pmean leaves as they are: divided below.
    means = collectives.pmean(cotangents, axes)

    def mean(cotangent: jax.Array, value: jax.Array, over: tuple[str, ...]) -> jax.Array:
        varying = collectives.varying_axes(value)
        summed = [axis for axis in over if collectives.is_tracked(axis) and axis in varying]
        # JAX wants a cotangent in the type of its value.
        return collectives.to_varying(cotangent / collectives.axis_size(summed), sorted(varying))

    return ([mean(*of_one) for of_one in zip(means, values, axes, strict=True)],)


_differentiable_sum.defvjp(lambda values, axes: (collectives.psum(values, axes), values), _sum_bwd)


def _axes_of_values(path: str, leaf: Sharded) -> frozenset[str]:
    """The axes over which a leaf's values are spread here; none outside of ``shard_map``, where arrays are global."""
    axes = leaf.axes
    unbound = [axis for axis in axes if not collectives.is_bound(axis)]
    if len(unbound) == len(axes) and not collectives.manual_axes():
        axes = ()
    elif unbound:
        raise ValueError(collectives.unbound_message(unbound[0], f"global_norm of '{path}', boxed {leaf.names}"))
    stray = sorted(collectives.varying_axes(leaf.value) - set(axes))
    if stray:
        penalty = " For a penalty on parameters within a loss, use optax.add_decayed_weights."
        raise ValueError(not_averaged(path, leaf, stray, "global_norm") + penalty)
    return frozenset(axes)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """``optax.clip_by_global_norm`` for boxed updates inside ``shard_map``: every device scales by the global norm.

    >>> tx, grads = clip_by_global_norm(1.0), nn.Partitioned(jnp.ones((8, 2)), names=("fsdp", None))
    >>> clip = lambda grads: tx.update(grads, tx.init(grads))[0]
    >>> jax.shard_map(clip, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))(grads).value[0]  # norm: 4
    Array([0.25, 0.25], dtype=float32)

    Args:
      max_norm: more than 0; ``inf`` clips nothing.
    Raises:
      ValueError: ``max_norm`` is 0, negative or NaN; or (in ``update``) what ``global_norm`` raises.
      TypeError: ``max_norm`` is no number.
    """
    if np.shape(max_norm) != () or not isinstance(max_norm, int | float | np.number | jax.Array):
        raise TypeError(f"clip_by_global_norm: max_norm is {kind_of(max_norm)}, where one number is needed, as 1.0.")
    if not isinstance(max_norm, Tracer) and not max_norm > 0:
        raise ValueError(
            f"clip_by_global_norm: max_norm={max_norm}; it must be more than 0. A negative norm would turn "
            "updates around, and 0 would make them 0 or NaN. To clip nothing: float('inf')."
        )

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        norm = global_norm(updates)
        live, put_back = trees.split_differentiable(updates)
        # The expression of optax, operation by operation, so that results round alike.
        clipped = jax.tree.map(lambda u: jnp.where(norm < max_norm, u, (u / norm.astype(u.dtype)) * max_norm), live)
        return put_back(clipped), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def check_averaged(grads: PyTree, params: PyTree, caller: str) -> None:
    """Raises a ``ValueError`` where the type of a float leaf shows a gradient that was not averaged over all axes.

    Under ``check_vma=True`` a type says along which axes a value differs between devices. A parameter whose gradient
    differs along more axes than itself would drift apart, and JAX's own error names neither leaf nor cause.
    """
    of_params = dict(trees.sharded_leaves(params))  # nothing where the optimizer was given no parameters
    for path, leaf in trees.sharded_leaves(grads):
        if leaf.is_differentiable and path in of_params:
            split = collectives.varying_axes(of_params[path].value).union(leaf.axes)
            if stray := sorted(collectives.varying_axes(leaf.value) - split):
                raise ValueError(not_averaged(path, leaf, stray, caller))


def not_averaged(path: str, leaf: Sharded, stray: list[str], caller: str) -> str:
    """The text of a leaf that differs between devices along other axes than its box names."""
    declared = f"its box names {leaf.names}" if any(leaf.names) else "it is in no box"
    return (
        f"{caller}: '{path}' of shape {np.shape(leaf.value)} differs between devices along "
        f"{', '.join(map(repr, stray))}, but {declared}. If it is a gradient, "
        f"sync_gradients over {', '.join(map(repr, stray))} is missing, or ran over too few axes: name all axes that "
        "the batch is split over, in one call (value_and_grad does it for you). A shard must come in its box."
    )
