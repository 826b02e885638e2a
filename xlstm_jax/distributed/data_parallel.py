"""Fully sharded data parallelism for Linen modules, used inside ``shard_map``.

Life of a parameter W[d, f] on mesh axis "fsdp" of size N (d_fsdp: dim d is split over that axis):
  init      W[d, f]       -- shard_params  -->  W[d_fsdp, f]    each device keeps its slice, in a box with its names
  forward   W[d_fsdp, f]  -- gather_params -->  W[d, f]         all-gather, dropped after use
  backward  dW[d, f]      -- its transpose -->  dW[d_fsdp, f]   reduce-scatter, mean over N
Leaves that stay whole are averaged by ``sync_gradients``. ``shard_module_params`` puts all of it around a module.

A wrapped module is the same module in three places:
  inside shard_map        as above
  under jax.set_mesh      values are global: init boxes them with their names, apply strips the boxes, XLA does the rest
  anywhere else           values are global and bare: it is the plain module
For a plan, under a ``plan_boxes.planning_mesh``, init puts every leaf into a box that says what was decided about it.

The method is ZeRO-3 (arXiv:1910.02054), known as FSDP (arXiv:2304.11277).
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from xlstm_jax.common_types import AxisNames, Parameter, PyTree
from xlstm_jax.distributed import collectives
from xlstm_jax.distributed.partitioning import (
    DEFAULT_MIN_WEIGHT_SIZE,
    Part,
    ShardChoice,
    as_axis_names,
    axes_entry,
    box_dim,
    choose_shard_dim,
    entry_axes,
    is_box,
    is_prng_key,
    leaf_axes,
    leaf_names,
    leaf_value,
    map_leaves,
    map_leaves_with_path,
    rebox,
    split_differentiable,
    value_dtype,
    wide_dtype,
)
from xlstm_jax.distributed.plan_boxes import Decision, Planned, is_planning

Target = TypeVar("Target", bound=Any)


# ---------------------------------------------------------------------------------------------------------- sharding


def shard_params(params: PyTree, axis_name: AxisNames, min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE) -> PyTree:
    """Splits parameters over a mesh axis: every device keeps its slice of each leaf that is large enough.

    Call it inside ``shard_map``, on values that are equal on all devices of the axis. To initialise a model use
    ``training.init_sharded``, which never holds the whole tree.

    Args:
      params: leaves [..., d, ...], bare or boxed; boxes that name other axes (tensor parallel) are kept and extended.
      axis_name: an axis or a tuple of axes, outermost first; a dim is split over all of them.
      min_weight_size: leaves with fewer values stay whole; one of exactly this size is split.
    Returns:
      The tree, leaves split along the largest dim that the axis divides and no other axis has taken, as
      ``nn.Partitioned`` with value [..., d / N, ...]. Leaves that are too small, that the axis does not divide, that
      are split over it already, and PRNG keys come back as they are.
    Raises:
      ValueError: an axis is not bound; lists those that are.
    """
    axes = as_axis_names(axis_name)
    collectives.check_bound(axes, caller="shard_params")
    sizes = {axis: collectives.axis_size((axis,)) for axis in axes}
    return _box_params(params, sizes, min_weight_size, _own_slice)


def _box_params(params: PyTree, axis_sizes: dict[str, int], min_weight_size: int, take: Callable[..., Any]) -> PyTree:
    """Boxes the leaves that ``choose_shard_dim`` picks, with what ``take(value, dim, axes)`` makes of each."""
    axes = tuple(axis_sizes)

    def box(leaf):
        dim, _ = _choice(leaf, axis_sizes, min_weight_size)
        return leaf if dim is None else box_dim(leaf, take(leaf_value(leaf), dim, axes), dim, axes)

    return map_leaves(box, params)


def _choice(leaf: Any, axis_sizes: dict[str, int], min_weight_size: int) -> ShardChoice:
    value = leaf_value(leaf)
    if is_prng_key(value):
        return ShardChoice(None, "holds PRNG keys, which are never split")
    return choose_shard_dim(np.shape(value), leaf_names(leaf), axis_sizes, min_weight_size)


def plan_params(
    params: PyTree,
    axis_sizes: dict[str, int],
    min_weight_size: int,
    gather_dtype: Any = None,
    grad_scatter_dtype: Any = None,
) -> PyTree:
    """What ``shard_params`` would decide: every leaf, global or abstract, split or not, in a box that says why.

    Args:
      params: leaves, bare or boxed.
      axis_sizes: the axes to split over, outermost first, with their sizes.
      min_weight_size, gather_dtype, grad_scatter_dtype: see ``shard_module_params``.
    Returns:
      The tree with every leaf as ``Planned``.
    Raises:
      ValueError: a dtype does not fit a leaf that would be gathered; names the leaf.
    """
    axes = tuple(axis_sizes)

    def box(path, leaf):
        value, choice = leaf_value(leaf), _choice(leaf, axis_sizes, min_weight_size)
        names, wire = leaf_names(leaf), [str(value_dtype(value))] * 2
        if choice.dim is not None:
            names = leaf_names(box_dim(leaf, value, choice.dim, axes))
            requested = {"gather_dtype": gather_dtype, "grad_scatter_dtype": grad_scatter_dtype}
            wire = [str(wire_dtype(value, dtype, option, path)) for option, dtype in requested.items()]
        return Planned.of(leaf, Decision(axes, choice, np.shape(value), names, *wire))

    return map_leaves_with_path(box, params)


def _own_slice(value: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    parts = collectives.axis_size(axes)
    if parts == 1:
        return value
    size = value.shape[dim] // parts
    return lax.dynamic_slice_in_dim(value, collectives.axis_index(axes) * size, size, dim)


def _whole(value: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    del dim, axes
    return value


# --------------------------------------------------------------------------------------------------------- gathering


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Primal:
    """What the backward pass must know of the value that was gathered: a residual without any array in it."""

    shape: tuple[int, ...]
    dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather_array_with_mean_grads(
    x: jax.Array,
    axis: int,
    axis_name: AxisNames,
    gather_dtype: Any = None,
    grad_scatter_dtype: Any = None,
) -> jax.Array:
    """All-gathers ``x`` along a dim; the gradient is reduce-scattered as the *mean* over the axis.

    Args:
      x: this device's piece, [..., d / N, ...]. Integers and PRNG keys are gathered too, never cast, without gradient.
      axis: the dim d along which the pieces are concatenated.
      axis_name: an axis or a tuple of axes, outermost first. One all-gather per axis, the innermost first.
      gather_dtype: dtype on the wire and of the result; None: x's own. Narrow it to the dtype that the module computes
        in, so that nothing is left to cast (and to save for the backward pass).
      grad_scatter_dtype: dtype in which the gradient is summed over the wire; None: x's own. It is divided by N before
        the sum, in float32 or wider, so that a float16 sum of N gradients overflows only where their mean does.
    Returns:
      [..., d, ...] in ``gather_dtype``. Its cotangent comes back as [..., d / N, ...] in x's dtype.
    Raises:
      ValueError: an axis is not bound, or a dtype on the wire would change the kind of the numbers (float, complex).
    """
    return _gather_fwd(x, axis, axis_name, gather_dtype, grad_scatter_dtype)[0]


def _gather_fwd(x, axis, axis_name, gather_dtype, grad_scatter_dtype):
    axes = as_axis_names(axis_name)
    collectives.check_bound(axes, caller="gather_array_with_mean_grads")
    wire_dtype(x, grad_scatter_dtype, "grad_scatter_dtype")
    wire = x if is_prng_key(x) else x.astype(wire_dtype(x, gather_dtype, "gather_dtype"))
    return collectives.all_gather(wire, axis % x.ndim, axes), _Primal(x.shape, x.dtype)


def _gather_bwd(axis, axis_name, gather_dtype, grad_scatter_dtype, primal, cotangent):
    del gather_dtype
    if cotangent.dtype == jax.dtypes.float0:
        return (np.zeros(primal.shape, jax.dtypes.float0),)
    axes = as_axis_names(axis_name)
    wide = cotangent.astype(wide_dtype(cotangent.dtype))
    mean = (wide / collectives.axis_size(axes)).astype(wire_dtype(primal, grad_scatter_dtype, "grad_scatter_dtype"))
    return (collectives.reduce_scatter(mean, axis % len(primal.shape), axes).astype(primal.dtype),)


gather_array_with_mean_grads.defvjp(_gather_fwd, _gather_bwd)


def wire_dtype(x: Any, requested: Any, argument: str, path: str | None = None) -> Any:
    """The dtype in which ``x`` travels when ``requested`` was asked for: its own where that is None or x is no float.

    Raises:
      ValueError: ``requested`` is no floating dtype, or would make a complex value real or a real one complex.
    """
    dtype = value_dtype(x)
    if requested is None or not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    requested = jnp.dtype(requested)
    kind = jnp.complexfloating if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.floating
    if not jnp.issubdtype(requested, kind):
        leaf = f"'{path}'" if path else "the value"
        lost = "would lose its imaginary part" if kind is jnp.complexfloating else "is a real float"
        raise ValueError(
            f"{argument}={requested.name} does not fit {leaf} of dtype {dtype.name}, shape {tuple(x.shape)}: "
            f"it {lost}. Use a {'complex' if kind is jnp.complexfloating else 'floating'} dtype there, or wrap the "
            f"module that owns it by itself, with {argument}=None."
        )
    return requested


def gather_params(
    params: PyTree, axis_name: AxisNames, gather_dtype: Any = None, grad_scatter_dtype: Any = None
) -> PyTree:
    """Undoes ``shard_params``: all-gathers every leaf that is boxed over the axis. Call it inside ``shard_map``.

    Args:
      params: the tree, boxed where it is split.
      axis_name: an axis or a tuple of axes; where a leaf is split over only some of them, over those.
      gather_dtype: see ``gather_array_with_mean_grads``; applies to the leaves that are gathered.
      grad_scatter_dtype: likewise.
    Returns:
      The tree with whole values. A leaf that is still split over another axis stays boxed with the names that are left;
      every other comes back as a plain array. Leaves that were not split are not touched, nor cast.

      A dim split over ``("fsdp", "tp")``, gathered over "fsdp", yields the contiguous part that ``"tp"`` alone would
      hold. Its pieces lie scattered over "tp" too, so both axes travel; with "fsdp" innermost, only "fsdp" does.
    Raises:
      ValueError: an axis is not bound, or a dtype does not fit a leaf; names the leaf.
    """
    axes = as_axis_names(axis_name)
    collectives.check_bound(axes, caller="gather_params")

    def gather(path, leaf):
        if not is_box(leaf):
            return leaf
        value, names = leaf.value, list(leaf_names(leaf))
        for dim, entry in enumerate(names):
            if set(entry_axes(entry)) & set(axes):
                wire_dtype(value, gather_dtype, "gather_dtype", path)
                wire_dtype(value, grad_scatter_dtype, "grad_scatter_dtype", path)
                value, names[dim] = _gather_dim(value, dim, entry_axes(entry), axes, gather_dtype, grad_scatter_dtype)
        return Part(value, tuple(names)) if any(names) else value

    with jax.named_scope("gather_params"):
        return map_leaves_with_path(gather, params)


def _gather_dim(value, dim, held, axes, gather_dtype, grad_scatter_dtype):
    """Gathers one dim, split over ``held``, over those of ``axes``; returns the value and the entry that is left."""
    first = next(i for i, axis in enumerate(held) if axis in axes)
    outer, inner = held[:first], held[first:]
    kept = tuple(axis for axis in inner if axis not in axes)
    if not kept:
        value = gather_array_with_mean_grads(value, dim, inner, gather_dtype, grad_scatter_dtype)
        return value, axes_entry(outer)
    # An axis to keep lies inside one to gather. Its pieces are gathered as well (an all-gather whose transpose is a
    # sum, as the pieces are parts and not replicas), and the part that it holds by itself is cut out.
    for axis in reversed(inner):
        if axis in axes:
            value = gather_array_with_mean_grads(value, dim, axis, gather_dtype, grad_scatter_dtype)
        else:
            value = collectives.all_gather(value, dim, (axis,))
    return _own_slice(value, dim, kept), axes_entry(outer + kept)


# ------------------------------------------------------------------------------------------------- lifting on modules


def shard_module_params(
    target: Target,
    axis_name: AxisNames,
    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE,
    gather_dtype: Any = None,
    grad_scatter_dtype: Any = None,
) -> Target:
    """Makes a module keep its parameters sharded: gathered just before it runs, sliced just after it is initialised.

    Inside ``shard_map`` the parameters are gathered over ``axis_name`` when a public method of the module is entered,
    and its gradients are reduce-scattered as means. Outside, the module is the plain one (see the top of this file).
    Parameter names, shapes and initial values are those of the plain module: the wrapped class keeps its name.

    What is gathered together lives together: wrap blocks rather than the whole model, and put transformations outside,
    ``nn.scan(nn.remat(shard_module_params(Block, "fsdp")), ...)``. Wrapped the other way around, a scan gathers all its
    layers at once.

    Args:
      target: a Linen module class (or ``functools.partial`` of one), a module instance, or a function whose first
        argument is a module. An instance gives an instance with the same fields and name.
      axis_name: an axis or a tuple of axes, outermost first.
      min_weight_size: leaves with fewer values stay whole on every device.
      gather_dtype: dtype of the all-gather and of the parameters that the module sees; None: as stored.
      grad_scatter_dtype: dtype of the reduce-scatter of gradients; None: as stored.
    Returns:
      The wrapped target, to be used like the target.
    Raises:
      ValueError: (when it runs) some mesh axes are bound, but not ``axis_name``; lists those that are.
      TypeError: the target is none of these, or an instance that its parent has already named.
    """
    axes = as_axis_names(axis_name)
    if not isinstance(min_weight_size, int | np.integer):
        raise TypeError(f"min_weight_size={min_weight_size!r} is not a number of values.")
    for dtype in (gather_dtype, grad_scatter_dtype):
        jnp.dtype(dtype or jnp.float32)  # a name that is no dtype fails here, not in the first step
    wrap = functools.partial(
        _lift,
        gather=functools.partial(_gather_here, axes, gather_dtype, grad_scatter_dtype),
        shard=functools.partial(_shard_here, axes, min_weight_size, gather_dtype, grad_scatter_dtype),
    )
    if isinstance(target, nn.Module):
        return _wrap_instance(target, wrap)
    if not callable(target):
        raise TypeError(f"shard_module_params takes a module class, a module or a function of one, not {target!r}.")
    return wrap(target)


def _mode(axes: tuple[str, ...]) -> str:
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
    missing = next((axis for axis in unbound if axis not in mesh.shape), unbound[0])
    where = "axis_sizes" if is_planning() else "the mesh that jax.set_mesh has set"
    raise ValueError(
        f"shard_module_params: {missing!r} is not an axis of {where}, which has {tuple(mesh.shape)}. Pass one of them."
    )


def _gather_here(axes, gather_dtype, grad_scatter_dtype, variables):
    if _mode(axes) == "manual":
        return gather_params(variables, axes, gather_dtype, grad_scatter_dtype)

    def take_out(leaf):
        if isinstance(leaf, Planned):
            return leaf.gathered(axes)
        # Boxes over other axes stay, for the wrapper of those.
        return leaf.value if is_box(leaf) and set(leaf_axes(leaf)) <= set(axes) else leaf

    return map_leaves(take_out, variables)


def _shard_here(axes, min_weight_size, gather_dtype, grad_scatter_dtype, variables):
    mode = _mode(axes)
    if mode == "manual":
        return shard_params(variables, axes, min_weight_size)
    if mode == "plain":
        return variables
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {axis: mesh.shape[axis] for axis in axes}
    if is_planning():
        return plan_params(variables, sizes, min_weight_size, gather_dtype, grad_scatter_dtype)
    return _box_params(variables, sizes, min_weight_size, _whole)


def _lift(target: Target, gather: Callable[[PyTree], PyTree], shard: Callable[[PyTree], PyTree]) -> Target:
    """``nn.map_variables`` on "params" around every public method, under the target's own name."""
    cls = target.func if isinstance(target, functools.partial) else target
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        return nn.map_variables(target, "params", gather, shard, mutable=True)
    methods = _public_methods(cls)
    lifted = nn.map_variables(target, "params", gather, shard, mutable=True, methods=methods)
    lifted_cls = lifted.func if isinstance(target, functools.partial) else lifted
    for name in methods:
        setattr(lifted_cls, name, _only_when_bound(getattr(cls, name), getattr(lifted_cls, name)))
    # Linen names submodules after their class, so another name would rename the parameters of the whole model.
    lifted_cls.__name__, lifted_cls.__qualname__, lifted_cls.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return lifted


def _public_methods(cls: type[nn.Module]) -> list[str]:
    """The methods through which others use a module: public, its own, and not kept unlifted by ``nn.nowrap``."""
    fields = {field.name for field in dataclasses.fields(cls)}  # a field's default may be a function, as nn.relu
    linens_own = fields | set(vars(nn.Module)) | {"setup"}

    def is_public(name, fn):
        return name == "__call__" or not (name.startswith("_") or name in linens_own or getattr(fn, "nowrap", False))

    return [name for name, fn in inspect.getmembers_static(cls, inspect.isfunction) if is_public(name, fn)]


def _only_when_bound(plain: Callable[..., Any], lifted: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is lifted where the module has parameters to gather, and left as it is on an unbound module."""

    @functools.wraps(plain)
    def method(self, *args, **kwargs):
        if self.scope is None:
            return plain(self, *args, **kwargs)
        # The gather runs outside of the module's own scope: named here, it is found in profiles and forecasts.
        with jax.named_scope(f"{self.name or type(self).__name__}.sharded"):
            return lifted(self, *args, **kwargs)

    return method


def _wrap_instance(module: nn.Module, wrap: Callable[[Any], Any]) -> nn.Module:
    if isinstance(module.parent, nn.Module) and module.name is not None:
        cls = type(module).__name__
        raise TypeError(
            f"shard_module_params got the instance {cls}(name={module.name!r}), which "
            f"{type(module.parent).__name__} has named and registered already. Wrap the class, then make the instance: "
            f"shard_module_params({cls}, axis_name)(...)."
        )
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}
    return wrap(type(module))(**fields, parent=module.parent)


# ----------------------------------------------------------------------------------------------- replicated gradients


def sync_gradients(grads: PyTree, axis_names: AxisNames) -> PyTree:
    """Averages gradients over the data axes that their leaves are not split over.

    Call it once, inside ``shard_map``, on what comes straight from ``jax.grad`` of a loss that is the mean over this
    device's batch. It is *not* for the gradients of ``training.value_and_grad``, which has done it.

    A leaf that is split over an axis has been averaged over it by the transpose of its gather. Under ``check_vma=True``
    a leaf whose type does not vary over an axis has been summed over it by JAX, and is divided; any other is averaged.

    Args:
      grads: boxed where the parameters are; leaves without gradient (float0) pass.
      axis_names: all mesh axes along which the batch or gathered weights differ (those of the wrappers among them), a
        string or a sequence. One that is left out goes unseen here.
    Returns:
      The tree with the same boxes and dtypes; sums run in float32 where the leaves are narrower.
    Raises:
      ValueError: an axis is not bound; lists those that are.
    """
    axes = as_axis_names(axis_names)
    collectives.check_bound(axes, caller="sync_gradients")
    live, put_back = split_differentiable(grads)
    over = [tuple(axis for axis in axes if axis not in leaf_axes(leaf)) for leaf in live]
    with jax.named_scope("sync_gradients"):
        divided = [_divide_summed(leaf_value(leaf), left) for leaf, left in zip(live, over, strict=True)]
        synced = collectives.pmean(divided, over)
    return put_back([rebox(leaf, value) for leaf, value in zip(live, synced, strict=True)])


def _divide_summed(grad: Parameter, axes: tuple[str, ...]) -> jax.Array:
    """Divides by the sizes of those tracked axes over which JAX has already summed ``grad``."""
    varying = collectives.varying_axes(grad)
    parts = collectives.axis_size([a for a in axes if a not in varying and collectives.is_tracked(a)])
    return grad / parts if parts > 1 else grad
