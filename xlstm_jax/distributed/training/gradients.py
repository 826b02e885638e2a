"""Gradients of the mean over all devices, inside ``shard_map``, right in both ``check_vma`` modes.

Weighting. A loss is the mean over this device's examples, and the gradient the mean over devices of its gradient. Where
devices hold different weights (tokens), the loss function returns (sum, weight) instead. With W the weight on all N
devices, each differentiates sum * N / W: the mean of that over devices is the global weighted mean, and every number
that is scattered stays of the size of a mean. Minibatches j combine as sum_j W_j g_j / sum_j W_j.

Types. Under ``check_vma=True`` JAX sums the cotangent of a leaf over every axis that the leaf does not vary over.
Parameters are therefore cast to varying before they are differentiated: what comes back is each device's own gradient,
as under ``check_vma=False``, and one mean serves both modes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.gather import sync_gradients
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, rebox, split_by_model
from xlstm_jax.distributed.data_parallel.remat import split_arrays
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import as_axis_names
from xlstm_jax.distributed.data_parallel.wire.communication import wide_dtype
from xlstm_jax.distributed.data_parallel.wire.tracing import RunningLoss, inside_loss
from xlstm_jax.distributed.training.branches import check_branches
from xlstm_jax.wording import kind_of, one_line

P = ParamSpec("P")
# JAX's words
NO_TYPE = " requires varying manual axes to match"
FORWARD, FORWARD_RULE = "can't apply forward-mode autodiff (jvp) to a custom_vjp", "rule for 'custom_lin'"
CARRY, VARYING = "carry input and carry output must have equal types, but they differ", "to='varying'"
Scalar = jax.Array | float
# loss, (sum, weight) with ``weighted``; with ``has_aux`` a pair of that and aux; with collections a pair of all that
# and the updated collections
LossOutput = Scalar | tuple[Any, Any]
UPDATED = "(what it returns without collections, updated collections)"


class LocalLossFn(Protocol[P]):
    """The loss of this device's batch, ``loss_fn(params, ...)``: what ``value_and_grad`` takes."""

    def __call__(self, params: PyTree, /, *args: P.args, **kwargs: P.kwargs) -> LossOutput: ...


def fold_rng_over_axis(rng: jax.Array, axis_name: AxisNames) -> jax.Array:
    """A key that differs from device to device along the axes of a ``shard_map``, for dropout and the like.

    >>> draw = lambda key: jax.random.uniform(fold_rng_over_axis(key, "fsdp"), (1,))
    >>> draws = jax.shard_map(draw, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("fsdp"))(jax.random.key(0))
    >>> len(set(draws.tolist()))  # the mesh has 4 devices along "fsdp"
    4
    """
    axes = as_axis_names(axis_name)
    collectives.check_bound(axes, caller="fold_rng_over_axis")
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
      equal on all devices, and gradients boxed like ``params``. The gradient of the global weighted mean is 0, and so
      is the loss, where the weight is 0 everywhere. Leaves that are no floats have
      gradients of dtype float0; those of frozen leaves are zeros.
    Raises:
      ValueError: an axis is not bound; or the type of the loss or weight shows that it was reduced over an axis
        already, or varies over one that is left out. (Without types a loss averaged by ``pmean`` gives the same.)
      TypeError: the loss function returned something else than announced.
    """
    axes = as_axis_names(axis_names)

    def value_and_grad_fn(params: PyTree, /, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, PyTree]:
        collectives.check_bound(axes, caller="value_and_grad")
        own = trees.map_leaves(split_by_model, params)
        local = local_result(lambda params: loss_fn(params, *args, **kwargs), own, axes, has_aux, weighted)
        if local.gathered_in_branches:
            arrays, put_back = split_arrays((args, kwargs))

            def again(params: PyTree, arrays: PyTree, _: None) -> LossOutput:
                args, kwargs = put_back(arrays)
                return cast(Callable[..., LossOutput], loss_fn)(params, *args, **kwargs)

            check_branches(local.gathered_in_branches, again, (own, arrays, None), axes)
        (loss,) = collectives.pmean([local.loss], [axes])
        grads = averaged(local.grads, params, axes)
        return ((loss, local.aux), grads) if has_aux else (loss, grads)

    return value_and_grad_fn


class LocalResult(NamedTuple):
    """What one device computes of one minibatch: the mean over devices of ``loss`` and ``grads`` is the minibatch's.

    ``grads`` is a list, of the leaves that take a gradient. ``aux`` is as the loss function returned it, ``weight`` W,
    and ``scale`` N / W, the factor that made the loss out of the function's sum; both are 1 without ``weighted``.
    ``collections`` are those that it has updated, if it returns them; ``gathered_in_branches`` the paths of leaves
    that it gathers within a branch.
    """

    loss: jax.Array
    grads: list[Any]
    aux: PyTree
    scale: Scalar
    weight: Scalar
    collections: PyTree = None
    gathered_in_branches: Sequence[str] = ()


def local_result(
    loss_fn: Callable[[PyTree], LossOutput],
    params: PyTree,
    axes: tuple[str, ...],
    has_aux: bool,
    weighted: bool,
    has_collections: bool = False,
    devices: int = 1,
) -> LocalResult:
    """Differentiates the loss function on this device, and checks what it returns.

    With ``devices`` what is differentiated, and returned, is this device's term of the mean over so many.
    """
    live, put_back = trees.split_differentiable(params)
    _check_any_trainable(live, params)
    running = RunningLoss(axes, frozenset(axis for leaf in live for axis in leaf_of(leaf).model_axes))

    def scaled_loss(live: list[Any]) -> tuple[Any, Any]:
        with inside_loss(running):
            out: Any = loss_fn(put_back(live))
        out, updated = _pair(out, "with collections", UPDATED) if has_collections else (out, None)
        out, aux = _pair(out, "has_aux=True", "(loss, aux)") if has_aux else (out, None)
        loss, scale, weight = _scaled(out, axes) if weighted else (out, 1, 1)
        _check_scalar(loss, has_aux, weighted)
        _check_not_reduced(loss, axes, "the loss")
        _check_no_axis_left_out(loss, axes)
        return loss / devices if devices > 1 else loss, (aux, scale, weight, updated)

    value_and_grads = jax.value_and_grad(scaled_loss, has_aux=True)
    with explained():
        (loss, (aux, scale, weight, updated)), grads = value_and_grads(varying_leaves(live, axes))
    return LocalResult(loss, grads, aux, scale, weight, updated, running.gathered_in_branches)


def _check_any_trainable(live: list[Any], params: PyTree) -> None:
    frozen = [path for path, leaf in trees.leaves_with_path(params) if not leaf_of(leaf).trainable]
    if frozen and not live:
        raise ValueError(
            f"all {len(frozen)} parameters are frozen, '{frozen[0]}' among them: there is nothing to train. Is "
            "trainable=, the predicate of a leaf's path, true of those that are to be trained? Paths are as this one."
        )


@contextmanager
def explained() -> Iterator[None]:
    """Around a user's function: raises JAX's errors of types and of forward derivatives with what to do about them."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
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
    if not isinstance(error, ValueError) or NO_TYPE not in text:
        return None
    primitive = text.partition(NO_TYPE)[0].removeprefix("Primitive ")
    return ValueError(
        f"JAX {jax.__version__} has no gradient of this loss under check_vma=True: one of its own derivatives mixes "
        f"types in the primitive {primitive!r}. On JAX 0.12 the exact gelu, erf and erfc do so in float32. Pass "
        "check_vma=False (to make_train_step, or to your shard_map): unless the model reduces over a further axis, the "
        "gradients are the same. Or take gelu(approximate=True), or bfloat16 for that function."
    )


def varying_leaves(leaves: list[Any], axes: tuple[str, ...]) -> list[Any]:
    """Leaves cast to varying over the axes, but for the axes of their copies, over which the gather casts them."""
    spread = collectives.spread_axes(axes)
    return [collectives.to_varying(leaf, [a for a in spread if a not in leaf_of(leaf).copied_axes]) for leaf in leaves]


def averaged(grads: list[Any], params: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Gradients averaged over devices in the tree of ``params``; float0 for leaves that take none, 0 for frozen."""

    def no_gradient(leaf: Any) -> Any:
        value = leaf_of(leaf).value
        if not leaf_of(leaf).trainable and leaf_of(value).is_differentiable:
            return rebox(leaf, jnp.zeros_like(value))
        return rebox(leaf, np.zeros(np.shape(value), jax.dtypes.float0))

    live, put_back = trees.split_differentiable(params)
    means = (leaf_of(leaf).value for leaf in sync_gradients(grads, axes))
    return put_back(map(rebox, live, means), rest=no_gradient)


def _scaled(out: Any, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sum, weight) -> (sum * N / W, N / W, W), W being the weight on all devices."""
    total, weight = _pair(out, "weighted=True", "(sum, weight)")
    if isinstance(weight, Tracer):
        _check_not_reduced(weight, axes, "the weight")
    local = jax.lax.stop_gradient(jnp.asarray(weight, wide_dtype(jnp.result_type(total))))
    (weight,) = collectives.psum([collectives.to_varying(local, collectives.spread_axes(axes))], [axes])
    scale = jnp.where(weight != 0, collectives.axis_size(axes) / jnp.where(weight != 0, weight, 1), 0)
    return total * scale.astype(jnp.result_type(total)), scale, weight


def _pair(out: Any, option: str, what: str) -> tuple[Any, Any]:
    if not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(f"{option}: loss_fn must return {what}, not {kind_of(out)}.")
    return out[0], out[1]


def _check_scalar(loss: Any, has_aux: bool, weighted: bool) -> None:
    if loss is None:
        raise TypeError("loss_fn returned None where a scalar loss is expected; does it end with a return?")
    if isinstance(loss, tuple | list | dict) or np.shape(loss) != ():
        raise TypeError(
            f"loss_fn returned {jax.tree.map(jax.typeof, loss)} where a scalar loss is expected, with {has_aux=} and "
            f"{weighted=}. A pair (loss, aux) needs has_aux=True, a pair (sum, weight) weighted=True."
        )
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(f"loss_fn returned a loss of dtype {jnp.result_type(loss)}; only a real float has a gradient.")


def _check_no_axis_left_out(loss: jax.Array, axes: tuple[str, ...]) -> None:
    """Raises where the type of the loss varies over another axis: JAX would sum gradients of whole leaves over it."""
    for axis in collectives.spread_axes(sorted(collectives.varying_axes(loss) - set(axes))):
        raise ValueError(
            f"the loss varies over {axis!r}, which the axes to average over, {axes}, leave out: gradients of whole "
            f"leaves would be summed over its {collectives.axis_size([axis])} devices. Name all axes along which the "
            f"batch or gathered weights differ, or reduce over {axis!r} in the model (tensor parallel)."
        )


def _check_not_reduced(value: jax.Array, axes: tuple[str, ...], what: str) -> None:
    """Raises where the type of ``value`` shows that it is the same on all devices along one of the axes."""
    for axis in collectives.spread_axes(axes):
        if collectives.is_tracked(axis) and axis not in collectives.varying_axes(value):
            raise ValueError(
                f"{what} that loss_fn returned does not vary over {axis!r} (its type is {jax.typeof(value)}): it was "
                "reduced over that axis already, or does not depend on parameters and batch at all. Return this "
                "device's own value; it is averaged over the axes here. (Pass a constant weight as a Python number.)"
            )
