"""``value_and_grad``: gradients of the mean loss over devices, inside ``shard_map``, in both ``check_vma`` modes.

``LossFunction`` calls the user's loss function, and converts the return value, in any of the forms that ``loss`` lists,
to a ``Loss``. The step, its minibatches and the comparison with one device read the fields of a ``Loss``.

Weighting. A loss is the mean over the local examples; the gradient is the mean over devices of the local gradients. If
devices hold different weights (tokens), the loss function returns (sum, weight) instead. With W the total weight on N
devices, each device differentiates sum * N / W: the mean of these over devices is the global weighted mean, and the
scattered values have the size of a mean, so that narrow dtypes do not overflow. Minibatches j combine as
sum_j W_j g_j / sum_j W_j.

Types. Under ``check_vma=True`` JAX sums the cotangent of a leaf over every axis that the leaf does not vary over.
Parameters are therefore cast to varying before differentiation: JAX then returns local gradients, as under
``check_vma=False``, and a single mean serves both modes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.tracers import current_trace
from jax.core import Tracer

from xlstm_jax.common_types import AxisNames, PyTree, Scalar
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.averages import remember_gradients
from xlstm_jax.distributed.data_parallel.boxes import boxes_without_constraints
from xlstm_jax.distributed.data_parallel.extension import with_extensions
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of, rebox, split_by_model
from xlstm_jax.distributed.data_parallel.shard import mean_gradients
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names, value_dtype, wide_dtype
from xlstm_jax.distributed.data_parallel.wire.communication import set_context
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS, RunningLoss
from xlstm_jax.distributed.training.loss import LocalLossFn, P
from xlstm_jax.distributed.training.moments import Differentiated, LossOfDevice, run_checks
from xlstm_jax.formatting import kind_of
from xlstm_jax.private_names import core

# ---------------------------------------------------------------------------------------------------- the loss function


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """Return value of a user's loss function, in the form that the library reads.

    ``total`` is the mean, or the weighted sum if ``weight`` is given. ``aux`` and ``collections`` are as returned by
    the loss function, or None.
    """

    total: Scalar
    weight: Scalar | None = None
    aux: PyTree = None
    collections: PyTree = None


@dataclass(frozen=True)
class LossFunction:
    """User's loss function, with flags that describe the structure of its return value. Calls return a ``Loss``."""

    fn: Callable[..., Any]
    weighted: bool
    has_aux: bool = False
    has_collections: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Loss:
        """Calls the user's function; returns its loss, weight, auxiliary output and collections as a ``Loss``.

        The fields ``weighted``, ``has_aux`` and ``has_collections`` say which parts the function returns; others are
        None.

        Raises:
          TypeError: the return value has another structure, or the loss is not a real scalar of a floating dtype.
        """
        total: Any = self.fn(*args, **kwargs)
        weight: Any = None
        aux, collections = None, None
        # Unpack pairs from the outermost inwards.
        if self.has_collections:
            pair = "(what it returns without collections, updated collections)"
            total, collections = _pair(total, "with collections", pair)
        if self.has_aux:
            total, aux = _pair(total, "has_aux=True", "(loss, aux)")
        if self.weighted:
            total, weight = _pair(total, "weighted=True", "(sum, weight)")
        if total is None or (self.weighted and weight is None):
            raise TypeError("loss_fn returned None where a scalar loss is expected; does it end with a return?")
        for value in (total, weight) if self.weighted else (total,):
            is_number = hasattr(value, "dtype") or isinstance(value, int | float | complex)
            if not is_number or np.shape(value) != ():
                described = kind_of(value)
                with contextlib.suppress(TypeError):  # raised for a leaf that is no number, such as a string
                    described = jax.tree.map(jax.typeof, value)
                raise TypeError(
                    f"loss_fn returned {described} where a scalar loss is expected, with has_aux={self.has_aux} and "
                    f"weighted={self.weighted}. A pair (loss, aux) needs has_aux=True, a pair (sum, weight) "
                    "weighted=True."
                )
        if not jnp.issubdtype(dtype := jnp.result_type(total), jnp.floating):
            raise TypeError(f"loss_fn returned a loss of dtype {dtype}; only a real float has a gradient.")
        return Loss(total, weight, aux, collections)


def _pair(returned: Any, option: str, meaning: str) -> tuple[Any, Any]:
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise TypeError(f"{option}: loss_fn must return {meaning}, not {kind_of(returned)}.")
    return returned[0], returned[1]


# --------------------------------------------------------------------------------------------------------- its gradient


def fold_rng_over_axis(rng: jax.Array, axis_name: AxisNames) -> jax.Array:
    """Returns a key that differs between devices along the axes of a ``shard_map``, for dropout and similar draws.

    The index of the device along ``axis_name``, an axis or a tuple of axes, is folded into ``rng``. Devices that differ
    only along other axes get the same key. Raises a ``ValueError`` if an axis is not bound.

    >>> draw = lambda key: jax.random.uniform(fold_rng_over_axis(key, "fsdp"), (1,))
    >>> draws = jax.shard_map(draw, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("fsdp"))(jax.random.key(0))
    >>> len(set(draws.tolist()))  # the mesh has 4 devices along "fsdp"
    4
    """
    axes = collectives.bound_axes(axis_name, caller="fold_rng_over_axis")
    return jax.random.fold_in(rng, collectives.axis_index(axes))


def value_and_grad(
    loss_fn: LocalLossFn[P], axis_names: AxisNames, has_aux: bool = False, *, weighted: bool = False
) -> Callable[Concatenate[PyTree, P], tuple[Any, PyTree]]:
    """Returns ``jax.value_and_grad`` of the mean loss over devices, for use inside ``shard_map``.

    Gradients are already averaged, and reduce-scattered for split leaves: do not call ``sync_gradients`` on them. Works
    in both ``check_vma`` modes.

    >>> step = value_and_grad(lambda w, x: jnp.mean(w * x), "fsdp")
    >>> over_devices = jax.shard_map(step, mesh=mesh, in_specs=(jax.P(), jax.P("fsdp")), out_specs=jax.P())
    >>> over_devices(jnp.float32(2), jnp.arange(8.0))  # of all 8 values, 2 on each device
    (Array(7., dtype=float32), Array(3.5, dtype=float32))

    Args:
      loss_fn: ``loss_fn(params, *args, **kwargs)`` -> the mean loss over the local batch, a real scalar. With
        ``weighted``: ``(sum, weight)``, the weighted sum of the local losses and the sum of their weights, which may be
        0 and is a constant: no gradient flows through it. With ``has_aux`` a pair of the loss and any tree.
      axis_names: every axis along which the batch or gathered weights differ, including the axes of the wrappers.
      has_aux: as in ``jax.value_and_grad``; the auxiliary output is returned as computed on this device.
      weighted: see ``loss_fn``.
    Returns:
      A function with the arguments of ``loss_fn`` that returns ``(loss, grads)``, or ``((loss, aux), grads)``: the
      loss, equal on every device, and gradients boxed like ``params``. If the total weight is 0, both are 0. Gradients
      of non-float leaves have dtype float0; gradients of frozen leaves are zeros.
    Raises:
      ValueError: an axis is not bound; or the type of the loss or weight shows that it was already reduced over an
        axis, or varies over an axis missing from ``axis_names``. (With ``check_vma=False`` there are no such types: a
        loss averaged by ``pmean`` is accepted, and its gradient is correct.)
      TypeError: the loss function does not return the structure that ``has_aux`` and ``weighted`` describe.
    """
    axes, loss = as_axis_names(axis_names), LossFunction(with_extensions(loss_fn), weighted, has_aux)

    def value_and_grad_fn(params: PyTree, /, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, PyTree]:
        collectives.check_bound(axes, caller="value_and_grad")
        boxed = trees.map_leaves(split_by_model, params)
        local = local_result(lambda params: loss(params, *args, **kwargs), boxed, axes)
        if local.gathered_in_branches:
            arrays, put_back = trees.split_arrays((args, kwargs))

            def again(params: PyTree, arrays: PyTree, _: None) -> Loss:
                args, kwargs = put_back(arrays)
                return loss(params, *args, **kwargs)

            run_checks("gradient", Differentiated(local.gathered_in_branches, again, (boxed, arrays, None), axes))
        (mean,) = collectives.pmean([local.loss], [axes])
        grads = averaged(local.grads, params, axes)
        remember_gradients(grads, axes)
        return ((mean, local.aux), grads) if has_aux else (mean, grads)

    return value_and_grad_fn


class LocalResult(NamedTuple):
    """Loss and gradients of a minibatch on one device, before they are averaged over devices.

    ``grads`` is a list with an entry per differentiable leaf. ``weight`` is W, the total weight over N devices, and
    ``scale`` is N / W, the factor from a local sum to ``loss``; both are 1 if the loss is a mean. ``aux`` and
    ``collections`` are as in ``Loss``. ``gathered_in_branches``: paths of leaves gathered inside a ``lax.cond``.
    """

    loss: jax.Array
    grads: list[Any]
    aux: PyTree
    scale: Scalar
    weight: Scalar
    collections: PyTree
    gathered_in_branches: Sequence[str]


def local_result(
    loss_fn: Callable[..., Loss], params: PyTree, axes: tuple[str, ...], *rest: PyTree, devices: int | None = None
) -> LocalResult:
    """Differentiates ``loss_fn(params, *rest)`` on this device with respect to ``params``; returns a ``LocalResult``.

    Loss and gradients are not yet averaged over devices. The gradients are a list with an entry for each differentiable
    leaf of ``params``, in the order of the tree. ``axes`` are the axes of the batch. With ``devices``, the number of
    devices along ``axes``, the loss is divided by ``devices`` before differentiation: the sum over devices is then the
    global mean. Callers pass ``devices`` if ``params`` include the scales of fp8 products.

    Raises:
      ValueError: all parameters are frozen, or the loss varies by its type over other axes than ``axes``.
    """
    trainable, put_back = trees.split_differentiable(params)
    if not trainable and (frozen := [path for path, leaf in trees.sharded_leaves(params) if not leaf.trainable]):
        raise ValueError(
            f"all {len(frozen)} parameters are frozen, '{frozen[0]}' among them: there is nothing to train. Let "
            "trainable=, a predicate of such a path, return True for the leaves to train."
        )
    model_axes = frozenset().union(*[leaf_of(leaf).model_axes for leaf in trainable])
    running = RunningLoss(axes, model_axes=model_axes, overwrites=devices is not None)
    typed_frozen, spread = partial(varying_if_frozen, axes=axes), collectives.spread_axes(axes)

    def scaled_loss(trainable: list[Any]) -> tuple[Any, Any]:
        with set_context(RUNNING_LOSS, replace(running, trace=current_trace())), boxes_without_constraints():
            result = loss_fn(put_back(trainable, fill_other=typed_frozen), *rest)
        mean: Any = result.total
        scale: Scalar = 1
        weight: Scalar = 1
        if result.weight is not None:
            # Differentiate sum * N / W, W being the total weight on the N devices. The gradient is stopped also of a
            # weight computed from parameters (a soft mask): W is a divisor shared by the devices.
            if isinstance(result.weight, Tracer):
                run_checks("loss", LossOfDevice(result.weight, axes, "the weight"))
            local = jax.lax.stop_gradient(jnp.asarray(result.weight, wide_dtype(jnp.result_type(mean))))
            (weight,) = collectives.psum([collectives.to_varying(local, spread)], [axes])
            # The mean over N devices of sum * N / W is the global sum over W. With W = 0 the factor is 0: the inner
            # where keeps NaN out.
            scale = jnp.where(weight != 0, collectives.axis_size(axes) / jnp.where(weight != 0, weight, 1), 0)
            mean = mean * scale.astype(jnp.result_type(mean))
        # A type that varies over exactly the axes to average over shows no mistake.
        if collectives.varying_axes(mean) != frozenset(spread):
            run_checks("loss", LossOfDevice(mean, axes, "the loss"))
        return mean / devices if devices and devices > 1 else mean, (result.aux, scale, weight, result.collections)

    # Cast parameters to varying, so that JAX does not sum their gradients over devices: see the module docstring.
    value_and_grads = jax.value_and_grad(scaled_loss, has_aux=True)
    with explained():
        (mean, (aux, scale, weight, collections)), grads = value_and_grads(varying_leaves(trainable, axes))
    return LocalResult(mean, grads, aux, scale, weight, collections, running.gathered_in_branches)


@contextmanager
def explained() -> Iterator[None]:
    """Enters a context for user code: JAX's errors about types and forward derivatives are raised with a cure added.

    Other errors are raised unchanged.
    """
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
        run_checks("failure", error)
        raise


def traced_call(on_mesh: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, core.Jaxpr]:
    """Calls ``on_mesh(*args)``, a function made by ``jax.shard_map``; returns the pair of its results and its jaxpr.

    The function is traced once: its equations become a part of the step that is being traced.
    """
    # inline=True yields the same program as without this jit; the call reuses the trace.
    once = jax.jit(on_mesh, inline=True)
    with explained():
        jaxpr = once.trace(*args).jaxpr
    return once(*args), jaxpr


def varying_leaves(leaves: list[Any], axes: tuple[str, ...]) -> list[Any]:
    """Returns the leaves, in order, cast to types that vary over ``axes``; the values are unchanged.

    Without the cast JAX would sum the gradients over devices. If devices along some axes have copies of the shard of a
    leaf, its type stays equal along these axes: the gather of the leaf casts over them.
    """
    spread = collectives.spread_axes(axes)
    boxes = [leaf_of(leaf) for leaf in leaves]
    if not [box for box in boxes if box.communication.replicas]:
        return collectives.to_varying(leaves, spread)
    return [
        collectives.to_varying(leaf, [axis for axis in spread if axis not in box.communication.copied_axes])
        for leaf, box in zip(leaves, boxes, strict=True)
    ]


def varying_if_frozen(leaf: Any, axes: tuple[str, ...]) -> Any:
    """Returns ``leaf``, if it is a frozen float, cast to a type that varies over ``axes``; else ``leaf`` unchanged.

    A frozen leaf has no gradient, so the cast changes no sum. Trainable leaves are cast by ``varying_leaves``. A
    gradient rule of a model (``jax.custom_vjp``, as of Flax's fp8 products) returns a gradient of each operand that
    varies with the batch, and JAX compares its type with the operand's.
    """
    box = leaf_of(leaf)
    is_float = jnp.issubdtype(value_dtype(box.value), jnp.inexact)
    return varying_leaves([leaf], axes)[0] if is_float and not box.trainable else leaf


def averaged(grads: list[Any], params: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Averages local gradients over devices; returns the mean gradients in the tree and boxes of ``params``.

    ``grads`` is a list with the gradient of each differentiable leaf of ``params``, in the order of the tree. ``axes``
    are the axes of the batch. Frozen float leaves get zeros, integers and keys zeros of dtype float0.
    """

    def no_gradient(leaf: Sharded) -> Any:
        if jnp.issubdtype(value_dtype(leaf.value), jnp.inexact):
            return jnp.zeros_like(leaf.value)
        # JAX's convention for non-float leaves: integers, bools, keys.
        return np.zeros(np.shape(leaf.value), jax.dtypes.float0)

    leaves, treedef = trees.flatten_with_path(params)
    live = [path for path, leaf in leaves if leaf_of(leaf).is_differentiable]
    means = mean_gradients([(path, leaf_of(grad)) for path, grad in zip(live, grads, strict=True)], axes)
    mean_of = dict(zip(live, means, strict=True))
    rest = partial(trees.map_values, no_gradient)
    return jax.tree.unflatten(
        treedef, [rebox(leaf, mean_of[path]) if path in mean_of else rest(leaf) for path, leaf in leaves]
    )
