"""``global_norm``, ``clip_by_global_norm``: the norm of a boxed tree from its shards, inside ``shard_map``.

Gradients must be averaged before; ``check_averaged`` raises if their types show otherwise.
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
from xlstm_jax.formatting import kind_of

AxesOfEach = tuple[tuple[str, ...], ...]


def global_norm(tree: PyTree) -> jax.Array:
    """Returns the L2 norm over all values of a boxed tree, the same on every device.

    Inside ``shard_map`` the squares of each leaf are summed over exactly the axes that its box names, with a collective
    for each distinct set of axes. Outside, values are global and nothing is communicated. In a loss that is averaged
    over devices (``value_and_grad``, ``make_train_step``) the gradient is the gradient of the norm of all parameters.

    >>> w = nn.Partitioned(jnp.ones((8, 2)), names=("fsdp", None))
    >>> jax.shard_map(global_norm, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P())(w)
    Array(4., dtype=float32)

    Args:
      tree: gradients or parameters, boxed if split. Frozen leaves and leaves that are not floats do not count.
    Returns:
      A float32 scalar, or wider for a wider leaf.
    Raises:
      ValueError: a box names an unbound axis; or (under ``check_vma=True``) a leaf varies, by its type, over an axis
        that its box does not name. Both errors name the leaf.
    """
    by_axes: dict[frozenset[str], Any] = {}
    leaves = [(path, leaf) for path, leaf in trees.sharded_leaves(tree) if leaf.is_differentiable]
    named = {axis for _, leaf in leaves for axis in leaf.axes}
    if not collectives.manual_axes() and not any(map(collectives.is_bound, named)):
        return trees.l2_norm([leaf.value for _, leaf in leaves])
    for path, leaf in leaves:
        axes = axes_of_values(path, leaf, "global_norm")
        # Sum before the collective: a single scalar is sent for each set of axes, for any number of leaves. (With
        # operations of ``lax`` for equal dtypes: operations of ``jnp`` take three times as long to trace.)
        total, before = trees.sum_of_squares(leaf.value), by_axes.get(axes, 0)
        alike = axes in by_axes and before.dtype == total.dtype  # NumPy's float64 is equal to None
        by_axes[axes] = jax.lax.add(before, total) if alike else before + total
    sums = _differentiable_sum(list(by_axes.values()), tuple([tuple(sorted(axes)) for axes in by_axes]))
    return jnp.sqrt(sum(sums, start=jnp.float32(0)))


# Sums values[i] over axes[i]; the gradient is for a loss that is averaged over devices. The transpose of a sum over N
# devices is the sum of the cotangents. Each device's loss contains the full norm, and the mean over devices counts the
# norm once: so the mean of the cotangents is right, and the sum is N times too large.
_differentiable_sum = jax.custom_vjp(collectives.psum, nondiff_argnums=(1,))


def _sum_bwd(axes: AxesOfEach, values: list[jax.Array], cotangents: list[jax.Array]) -> tuple[list[jax.Array]]:
    """Returns the gradients in the backward pass of ``_differentiable_sum``, for a loss that is averaged over devices.

    Args:
      axes: for each value the mesh axes over which the value was summed.
      values: this device's values before the sums.
      cotangents: the cotangents of the sums, in the order of ``values``.
    Returns:
      A tuple with a single list: the gradient of value i is the mean of cotangent i over the devices of ``axes[i]``.
    """
    # Over tracked axes (check_vma) JAX has already summed the cotangents, and pmean has no effect: divide below.
    means = collectives.pmean(cotangents, axes)

    def mean(cotangent: jax.Array, value: jax.Array, over: tuple[str, ...]) -> jax.Array:
        varying = collectives.varying_axes(value)
        summed = [axis for axis in over if collectives.is_tracked(axis) and axis in varying]
        # JAX requires a cotangent of the type of its value.
        return collectives.to_varying(cotangent / collectives.axis_size(summed), sorted(varying))

    return ([mean(*of_one) for of_one in zip(means, values, axes, strict=True)],)


_differentiable_sum.defvjp(lambda values, axes: (collectives.psum(values, axes), values), _sum_bwd)


def axes_of_values(path: str, leaf: Sharded, caller: str) -> frozenset[str]:
    """Returns the mesh axes over which a leaf's values are split: the axes of its box inside ``shard_map``.

    Outside of ``shard_map``, where arrays are global, the set is empty. ``path`` and ``caller``, a public function,
    name leaf and function in errors.

    Raises:
      ValueError: some of the box's axes are not bound; or the values differ between devices along an axis that the box
        does not name.
    """
    axes = leaf.axes
    unbound = [axis for axis in axes if not collectives.is_bound(axis)]
    if len(unbound) == len(axes) and not collectives.manual_axes():
        axes = ()
    elif unbound:
        raise ValueError(collectives.unbound_message(unbound[0], f"{caller} of '{path}', boxed {leaf.names}"))
    stray = sorted(collectives.varying_axes(leaf.value) - set(axes))
    if stray:
        penalty = " For a penalty on parameters within a loss, use optax.add_decayed_weights."
        raise ValueError(not_averaged(path, leaf, stray, caller) + penalty)
    return frozenset(axes)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Clips boxed updates inside ``shard_map`` by their global norm over devices, like ``optax.clip_by_global_norm``.

    >>> tx, grads = clip_by_global_norm(1.0), nn.Partitioned(jnp.ones((8, 2)), names=("fsdp", None))
    >>> clip = lambda grads: tx.update(grads, tx.init(grads))[0]
    >>> jax.shard_map(clip, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))(grads).value[0]  # norm: 4
    Array([0.25, 0.25], dtype=float32)

    Args:
      max_norm: more than 0; ``inf`` clips nothing.
    Raises:
      ValueError: ``max_norm`` is 0, negative or NaN; or (in ``update``) as ``global_norm``.
      TypeError: ``max_norm`` is not a number.
    """
    if np.shape(max_norm) != () or not isinstance(max_norm, int | float | np.number | jax.Array):
        raise TypeError(f"clip_by_global_norm: max_norm is {kind_of(max_norm)}, where one number is needed, as 1.0.")
    if not isinstance(max_norm, Tracer) and not max_norm > 0:
        raise ValueError(
            f"clip_by_global_norm: max_norm={max_norm}; it must be more than 0. A negative norm would reverse "
            "updates, and 0 would make them 0 or NaN. To clip nothing pass float('inf')."
        )

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        norm = global_norm(updates)
        trainable, put_back = trees.split_differentiable(updates)
        # The same operations as in optax, for the same rounding.
        clipped = jax.tree.map(
            lambda u: jnp.where(norm < max_norm, u, (u / norm.astype(u.dtype)) * max_norm), trainable
        )
        return put_back(clipped), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def check_averaged(grads: PyTree, params: PyTree, caller: str) -> None:
    """Raises a ``ValueError`` if the type of a float leaf shows a gradient that was not averaged over all axes.

    Under ``check_vma=True`` a type shows the axes along which a value differs between devices. A parameter whose
    gradient differs along more axes than the parameter would drift apart, and JAX's error names neither leaf nor cause.
    Leaves without a parameter of the same path in ``params``, which may be None, are not checked. ``caller`` begins the
    error.
    """
    of_params = dict(trees.sharded_leaves(params))  # empty for an optimizer without parameters
    for path, leaf in trees.sharded_leaves(grads):
        if leaf.is_differentiable and path in of_params:
            split = collectives.varying_axes(of_params[path].value).union(leaf.axes)
            if stray := sorted(collectives.varying_axes(leaf.value) - split):
                raise ValueError(not_averaged(path, leaf, stray, caller))


def not_averaged(path: str, leaf: Sharded, stray: list[str], caller: str) -> str:
    """Returns the error text for a leaf that differs between devices along axes that its box does not name.

    ``stray`` are these axes; ``caller``, a public function, begins the text.
    """
    declared = f"its box names {leaf.names}" if any(leaf.names) else "it is in no box"
    return (
        f"{caller}: '{path}' of shape {np.shape(leaf.value)} differs between devices along "
        f"{', '.join(map(repr, stray))}, but {declared}. Call sync_gradients once, over all axes that the batch is "
        "split over, as value_and_grad does, and pass a shard in its box."
    )
