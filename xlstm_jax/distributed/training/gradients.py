"""Gradients of the mean over all devices, inside ``shard_map``, right in both ``check_vma`` modes.

Weighting. A loss is the mean over this device's examples; the gradient is the mean over devices of its gradients. Where
devices hold different weights (tokens), the loss function returns (sum, weight) instead. With W the weight on all N
devices, each device differentiates sum * N / W: the mean of these over devices is the global weighted mean, and what is
scattered has the size of a mean, so that narrow dtypes do not overflow. Minibatches j combine as
sum_j W_j g_j / sum_j W_j.

Types. Under ``check_vma=True`` JAX sums the cotangent of a leaf over every axis that the leaf does not vary over.
Parameters are therefore cast to varying before they are differentiated: what comes back is each device's own gradient,
as under ``check_vma=False``, and one mean serves both modes.
"""

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from xlstm_jax.common_types import AxisNames, PyTree, Scalar
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.gather import sync_gradients
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, rebox, split_by_model
from xlstm_jax.distributed.data_parallel.logical_names import rules_of_mesh
from xlstm_jax.distributed.data_parallel.remat import split_arrays
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import as_axis_names
from xlstm_jax.distributed.data_parallel.wire.dtypes import wide_dtype
from xlstm_jax.distributed.data_parallel.wire.tracing import RunningLoss, inside_loss
from xlstm_jax.distributed.training.loss import LocalLossFn, Loss, LossFunction, P
from xlstm_jax.distributed.training.varying import check_branches
from xlstm_jax.wording import listed, one_line

# JAX's words
NO_TYPE = " requires varying manual axes to match"
MIXED_AXES = re.compile(r"(\S+) can only accept axis_name .* Got input type: (.*), axes: \((.*)\) and input state")
KERNEL = "`manual_axis_type` on `jax.ShapeDtypeStruct` must not be `None`"
FORWARD, FORWARD_RULE = "can't apply forward-mode autodiff (jvp) to a custom_vjp", "rule for 'custom_lin'"
BRANCHES, TYPES = "branches must have equal output types", "manual axis types do not match"
CARRY, VARYING = "carry input and carry output must have equal types, but they differ", "to='varying'"


def fold_rng_over_axis(rng: jax.Array, axis_name: AxisNames) -> jax.Array:
    """A key that differs from device to device along the axes of a ``shard_map``, for dropout and the like.

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
    """``jax.value_and_grad`` of the loss over all devices; for use inside ``shard_map``, in either ``check_vma`` mode.

    Gradients come back averaged, those of split leaves scattered: do not call ``sync_gradients`` on them.

    >>> step = value_and_grad(lambda w, x: jnp.mean(w * x), "fsdp")
    >>> over_devices = jax.shard_map(step, mesh=mesh, in_specs=(jax.P(), jax.P("fsdp")), out_specs=jax.P())
    >>> over_devices(jnp.float32(2), jnp.arange(8.0))  # of all 8 values, 2 on each device
    (Array(7., dtype=float32), Array(3.5, dtype=float32))

    Args:
      loss_fn: ``loss_fn(params, *args, **kwargs)`` -> the mean loss over this device's batch, a real scalar. With
        ``weighted``: ``(sum, weight)``, the weighted sum of losses on this device and the sum of its weights, which may
        be 0 and is a constant: no gradient flows through it. With ``has_aux`` a pair of that and anything.
      axis_names: all the axes along which the batch or gathered weights differ: those of the wrappers among them.
      has_aux: as in ``jax.value_and_grad``; the auxiliary output is returned as this device computed it.
      weighted: see ``loss_fn``.
    Returns:
      A function of the arguments of ``loss_fn`` that returns ``(loss, grads)``, or ``((loss, aux), grads)``: the loss,
      equal on all devices, and gradients boxed like ``params``. Where the weight is 0 everywhere, both are 0.
      Gradients of leaves that are no floats have dtype float0; gradients of frozen leaves are zeros.
    Raises:
      ValueError: an axis is not bound; or the type of the loss or weight shows that it was reduced over an axis
        already, or varies over an axis that ``axis_names`` leaves out. (With ``check_vma=False`` there are no types: a
        loss that was averaged by ``pmean`` is then accepted, and its gradient is the right one.)
      TypeError: the loss function does not return what ``has_aux`` and ``weighted`` say.
    """
    axes, loss = as_axis_names(axis_names), LossFunction(loss_fn, weighted, has_aux)

    def value_and_grad_fn(params: PyTree, /, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, PyTree]:
        collectives.check_bound(axes, caller="value_and_grad")
        own = trees.map_leaves(split_by_model, params)
        local = local_result(lambda params: loss(params, *args, **kwargs), own, axes)
        if local.gathered_in_branches:
            arrays, put_back = split_arrays((args, kwargs))

            def again(params: PyTree, arrays: PyTree, _: None) -> Loss:
                args, kwargs = put_back(arrays)
                return loss(params, *args, **kwargs)

            check_branches(local.gathered_in_branches, again, (own, arrays, None), axes)
        (mean,) = collectives.pmean([local.loss], [axes])
        grads = averaged(local.grads, params, axes)
        return ((mean, local.aux), grads) if has_aux else (mean, grads)

    return value_and_grad_fn


class LocalResult(NamedTuple):
    """What one device computes of one minibatch: the mean over devices of ``loss`` and ``grads`` is the minibatch's.

    ``grads`` is a list with an entry for each leaf that takes a gradient. ``weight`` is W, the weight on all devices,
    and ``scale`` is N / W, the factor from a sum to ``loss``; both are 1 where the loss is a mean. ``aux`` and
    ``collections`` are as in ``Loss``. ``gathered_in_branches`` are the paths of leaves that are gathered in a branch.
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
    """Differentiates ``loss_fn(params, *rest)`` on this device, and checks over which axes it varies.

    With ``devices`` the loss is divided by that number first: it is then this device's term of the mean over devices.
    This is for ``params`` that have the state of fp8 products among them.
    """
    live, put_back = trees.split_differentiable(params)
    frozen = [path for path, leaf in trees.leaves_with_path(params) if not leaf_of(leaf).trainable]
    if frozen and not live:
        raise ValueError(
            f"all {len(frozen)} parameters are frozen, '{frozen[0]}' among them: there is nothing to train. Is "
            "trainable=, the predicate of a leaf's path, true of those that are to be trained? Paths are as this one."
        )
    model_axes = frozenset().union(*[leaf_of(leaf).model_axes for leaf in live])
    running = RunningLoss(axes, model_axes=model_axes, overwrites=devices is not None)

    def scaled_loss(live: list[Any]) -> tuple[Any, Any]:
        with inside_loss(running), rules_of_mesh():
            found = loss_fn(put_back(live), *rest)
        mean, scale, weight = _scaled(found, axes)
        _check_axes(mean, axes, "the loss")
        return mean / devices if devices and devices > 1 else mean, (found.aux, scale, weight, found.collections)

    # Varying parameters, so that JAX does not sum their gradients over devices: see the top of this file.
    value_and_grads = jax.value_and_grad(scaled_loss, has_aux=True)
    with explained():
        (mean, (aux, scale, weight, collections)), grads = value_and_grads(varying_leaves(live, axes))
    return LocalResult(mean, grads, aux, scale, weight, collections, running.gathered_in_branches)


@contextmanager
def explained() -> Iterator[None]:
    """Around a user's function: raises JAX's errors about types and forward derivatives anew, with a cure."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
        if cure := _with_cure(error):
            raise cure from error
        raise


def _with_cure(error: Exception) -> Exception | None:
    text = one_line(error)
    if (isinstance(error, NotImplementedError) and FORWARD_RULE in text) or FORWARD in text:
        return TypeError(
            "jax.jvp, jax.linearize or jax.jacfwd differentiates forward through the gather of a parameter, which has "
            "a backward rule only. Gather first, and differentiate what was gathered: whole = gather_params(params, "
            "axes), and jax.jvp(lambda whole: f(whole), (whole,), (tangents,)). Derivatives with respect to inputs "
            "need none of it."
        )
    if CARRY in text and VARYING in text:
        return TypeError(
            "a scan or a loop of this model begins with a carry that is equal on all devices by its type (zeros, as an "
            f"LSTM's), and becomes one that varies: {text.partition(CARRY)[2].partition(', so')[0].strip(' :*,')}. "
            "Pass check_vma=False (to make_train_step, or to your shard_map): the gradients are the same. Or cast the "
            "carry where the model makes it: pcast(carry, axes, to='varying') of jax.lax, with all axes of the batch. "
            "(nn.RNN within a wrapped model does so by itself.)"
        )
    if BRANCHES in text and TYPES in text:
        return TypeError(
            "a branch of this model (lax.cond or switch) returns what is equal on all devices by its type (a constant, "
            "a collection), and another returns what varies: "
            f"{text.partition(' The output')[2].partition(' This might')[0].strip(' ,.')}. Pass check_vma=False (to "
            "make_train_step, or to your shard_map): the gradients are the same. Or cast the results of both branches: "
            "pcast(result, axes, to='varying') of jax.lax, with all axes of the batch."
        )
    if KERNEL in text:
        return ValueError(
            f"{_module_of(error)} calls a Pallas kernel, whose result has no type under check_vma=True. Wrap the "
            "function that runs the kernel: typed_kernel(kernel)(...), from xlstm_jax.distributed. Values and "
            "gradients are the same."
        )
    if jax.config.jax_auto_pcast and (found := MIXED_AXES.search(text)):
        return _of_mixed_axes(*found.groups())
    if _is_of_vmapped_axis(error):
        return _of_vmapped_axis("a collective", "an axis that the mesh does not have")
    if not isinstance(error, ValueError) or not (NO_TYPE in text or MIXED_AXES.search(text)):
        return None
    primitive = MIXED_AXES.sub(r"\1", text).partition(NO_TYPE)[0].removeprefix("Primitive ")
    if not jax.config.jax_auto_pcast:
        return ValueError(
            f"the primitive {primitive!r} mixes types, and jax_auto_pcast is False: under check_vma=True JAX casts "
            "no value that is equal on all devices where it meets one that varies, which nearly every model needs. "
            "Leave it on, jax.config.update('jax_auto_pcast', True); or pass check_vma=False (to make_train_step, or "
            "to your shard_map), where there are no types."
        )
    cure = (
        "Pass check_vma=False (to make_train_step, or to your shard_map): unless the model reduces over a further "
        "axis, the gradients are the same."
    )
    if primitive == "polynomial":
        return ValueError(
            f"JAX {jax.__version__} has no gradient of this loss under check_vma=True: in float32 its derivatives of "
            f"the exact gelu, erf and erfc mix types in the primitive {primitive!r}. {cure} Or take "
            "gelu(approximate=True), or bfloat16 for that function."
        )
    return ValueError(
        f"one of JAX's own rules (of a derivative, say, or of a branch under jax.vmap) mixes types in the primitive "
        f"{primitive!r}, on JAX {jax.__version__} under check_vma=True. {cure}"
    )


def _is_of_vmapped_axis(error: Exception) -> bool:
    """Whether an error is JAX's bare assertion of a collective over an axis of ``jax.vmap`` alone."""
    # It has no text. It is raised where JAX would cast the operand to varying over axes that no mesh has.
    return isinstance(error, AssertionError) and traceback.extract_tb(error.__traceback__)[-1].name == "pvary"


def _of_vmapped_axis(collective: str, axes: str) -> ValueError:
    return ValueError(
        f"{collective} reduces over {axes}, as jax.vmap or nn.vmap(axis_name=...) names it, and under check_vma=True "
        "JAX has no collective over such an axis inside shard_map. Pass check_vma=False (to make_train_step and "
        "make_eval_step, or to your shard_map): values and gradients are those of one device."
    )


def _of_mixed_axes(collective: str, operand: str, axes: str) -> ValueError:
    """Of a collective over ``axes`` along some of which its operand, a type, does not vary; all as JAX writes them."""
    mesh = collectives.manual_axes()
    if off_mesh := [axis for axis in re.findall(r"'([^']*)'", axes) if axis not in mesh]:
        return _of_vmapped_axis(f"{collective} over ({axes})", listed(off_mesh))
    return ValueError(
        f"{collective} reduces over ({axes}), and its operand, {operand}, is equal along some of these axes by its "
        "type: under check_vma=True one call reduces over axes of one kind. Name the axes along which it differs, as "
        "axis_name= of a BatchNorm those of the batch; or pass check_vma=False (to make_train_step, or to your "
        "shard_map), where a mean over equal values changes nothing."
    )


def _module_of(error: Exception) -> str:
    """The innermost Linen module that was running as ``error`` was raised: its path, or the class of the model."""
    innermost: Any = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        running = frame.f_locals.get("self")
        innermost = running if getattr(running, "scope", None) is not None else innermost
    return f"module '{'/'.join(innermost.path) or type(innermost).__name__}'" if innermost else "this loss"


def varying_leaves(leaves: list[Any], axes: tuple[str, ...]) -> list[Any]:
    """Casts leaves to varying over the axes, apart from the axes of their copies: the gather casts over those."""
    spread = collectives.spread_axes(axes)
    copied = [leaf_of(leaf).communication.copied_axes for leaf in leaves]
    return [
        collectives.to_varying(leaf, [axis for axis in spread if axis not in own])
        for leaf, own in zip(leaves, copied, strict=True)
    ]


def averaged(grads: list[Any], params: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Averages gradients over devices, in the tree of ``params``; frozen leaves get 0, integers and keys float0."""

    def no_gradient(leaf: Any) -> Any:
        value = leaf_of(leaf).value
        if not leaf_of(leaf).trainable and leaf_of(value).is_differentiable:
            return rebox(leaf, jnp.zeros_like(value))
        # As JAX has it for what is no float: integers, bools, keys.
        return rebox(leaf, np.zeros(np.shape(value), jax.dtypes.float0))

    live, put_back = trees.split_differentiable(params)
    means = (leaf_of(leaf).value for leaf in sync_gradients(grads, axes))
    return put_back(map(rebox, live, means), rest=no_gradient)


def _scaled(loss: Loss, axes: tuple[str, ...]) -> tuple[Any, Scalar, Scalar]:
    """(sum * N / W, N / W, W), with W the weight on all N devices; of a mean (mean, 1, 1)."""
    total, weight = loss.total, loss.weight
    if weight is None:
        return total, 1, 1
    if isinstance(weight, Tracer):
        _check_axes(weight, axes, "the weight")
    # A constant also where it is computed from parameters (a soft mask): W is a divisor that all devices share.
    local = jax.lax.stop_gradient(jnp.asarray(weight, wide_dtype(jnp.result_type(total))))
    (weight,) = collectives.psum([collectives.to_varying(local, collectives.spread_axes(axes))], [axes])
    # The mean over N devices of sum * N / W is the sum on all devices over W; the inner where keeps NaN out.
    scale = jnp.where(weight != 0, collectives.axis_size(axes) / jnp.where(weight != 0, weight, 1), 0)
    return total * scale.astype(jnp.result_type(total)), scale, weight


def _check_axes(value: jax.Array, axes: tuple[str, ...], what: str) -> None:
    """Raises where a loss or a weight, by its type, varies over other axes than those to average over."""
    varying = collectives.varying_axes(value)
    for axis in collectives.spread_axes(axes):
        if collectives.is_tracked(axis) and axis not in varying:
            raise ValueError(
                f"{what} that loss_fn returned does not vary over {axis!r} (its type is {jax.typeof(value)}): it was "
                "reduced over that axis already, or does not depend on parameters and batch at all. Return this "
                "device's own value; it is averaged over the axes here. (Pass a constant weight as a Python number, "
                "and one that lax.cond or a loop makes of the rows as pcast(weight, axes, to='varying') of jax.lax.)"
            )
    # JAX would sum the gradients of leaves that do not vary over such an axis, and nobody would divide them.
    for axis in collectives.spread_axes(sorted(varying - set(axes))):
        raise ValueError(
            f"the loss varies over {axis!r}, which the axes to average over, {axes}, leave out: gradients of whole "
            f"leaves would be summed over its {collectives.axis_size([axis])} devices. Name all axes along which the "
            f"batch or gathered weights differ, or reduce over {axis!r} in the model (tensor parallel)."
        )
