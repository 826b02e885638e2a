"""The norm of a boxed tree from its shards, and clipping by it, inside ``shard_map``."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import collectives
from xlstm_jax.distributed.data_parallel.boxes import (
    is_differentiable,
    leaf_axes,
    leaf_names,
    leaf_value,
    leaves_with_path,
    split_differentiable,
)
from xlstm_jax.distributed.data_parallel.communication import wide_dtype

# ------------------------------------------------------------------------------------------------ norms over shards


def global_norm(tree: PyTree) -> jax.Array:
    """The L2 norm over all values of a boxed tree, the same on every device.

    Inside ``shard_map`` the squares of each leaf are summed over the axes that its box names, and over no others: one
    collective for each distinct set of axes. Outside, values are global and nothing is communicated. In a loss that is
    averaged over devices (``value_and_grad``, ``make_train_step``) it has the gradient of the norm of all parameters.

    Args:
      tree: gradients or parameters, boxed where they are split; leaves that are no floats do not count.
    Returns:
      A float32 scalar, or wider where a leaf is.
    Raises:
      ValueError: a box names an axis that is not bound; or (under ``check_vma=True``) the type of a leaf says that it
        differs between devices along an axis that its box does not name. Both name the leaf.
    """
    by_axes = {}
    for path, leaf in leaves_with_path(tree):
        if is_differentiable(leaf):
            axes = _axes_of_values(path, leaf)
            by_axes[axes] = by_axes.get(axes, 0) + _sum_of_squares(leaf_value(leaf))
    sums = _sum_over_devices(list(by_axes.values()), tuple(tuple(sorted(axes)) for axes in by_axes))
    return jnp.sqrt(sum(sums, start=jnp.float32(0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_over_devices(values: list[jax.Array], axes: tuple[tuple[str, ...], ...]) -> list[jax.Array]:
    """Sums ``values[i]`` over ``axes[i]``; its gradient is that of a loss which is the mean over devices.

    The transpose of a sum over N devices is a sum of their cotangents. Each device's loss contains the whole norm and
    the mean over devices counts it once, so here it is their mean, without which a penalty would weigh N times as much.
    """
    return collectives.psum(values, axes)


def _sum_fwd(values, axes):
    return collectives.psum(values, axes), values


def _sum_bwd(axes, values, cotangents):
    means = collectives.pmean(cotangents, axes)  # over tracked axes JAX has summed them: they are divided below

    def mean(cotangent, value, over):
        varying = collectives.varying_axes(value)
        summed = [axis for axis in over if collectives.is_tracked(axis) and axis in varying]
        return collectives.to_varying(cotangent / collectives.axis_size(summed), varying)

    return ([mean(*of_one) for of_one in zip(means, values, axes, strict=True)],)


def _sum_of_squares(value: jax.Array) -> jax.Array:
    wide = value.astype(wide_dtype(value.dtype))
    return jnp.sum(jnp.square(jnp.abs(wide)))


def _axes_of_values(path: str, leaf: Any) -> frozenset[str]:
    """The axes over which a leaf's values are spread here; none where its box is about a global array."""
    axes = leaf_axes(leaf)
    unbound = [axis for axis in axes if not collectives.is_bound(axis)]
    if len(unbound) == len(axes) and not collectives.manual_axes():
        axes = ()
    elif unbound:
        raise ValueError(collectives.unbound_message(unbound[0], f"global_norm of '{path}', boxed {leaf_names(leaf)}"))
    stray = sorted(collectives.varying_axes(leaf_value(leaf)) - set(axes))
    if stray:
        raise ValueError(
            f"global_norm: '{path}' of shape {np.shape(leaf_value(leaf))} differs between devices along {stray[0]!r}, "
            f"but its box names {leaf_names(leaf)}. If it is a gradient, average it first (value_and_grad, "
            f"sync_gradients); if it is a slice, it must come in its box; for a penalty on parameters within a loss, "
            f"use optax.add_decayed_weights in the optimizer."
        )
    return frozenset(axes)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """``optax.clip_by_global_norm`` for boxed updates inside ``shard_map``: every device scales by the one true norm.

    Args:
      max_norm: updates of a larger global norm are scaled down to it.
    """

    def update(updates, state, params=None):
        del params
        norm = global_norm(updates)
        live, put_back = split_differentiable(updates)
        clipped = jax.tree.map(lambda u: jnp.where(norm < max_norm, u, (u / norm.astype(u.dtype)) * max_norm), live)
        return put_back(clipped), state

    return optax.GradientTransformation(optax.init_empty_state, update)
