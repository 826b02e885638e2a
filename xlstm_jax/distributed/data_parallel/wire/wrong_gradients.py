"""Errors for gradients that the mean over devices, which the backward pass of a gather computes, would falsify.

  for each example             ``vmap`` of ``grad``: a mean over devices would mix their examples
  within a loss, or outside    the gradient of a loss function is taken inside ``shard_map``, once
  of a gradient                second gradients

The backward pass of a gather replaces JAX's transpose, a sum over N devices, by the mean. The rule serves one gradient.
The second gradient of ``jax.grad`` of ``jax.grad`` does not run the rule: JAX transposes the forward pass of the first
gradient to a sum, N times too large, and its mean to 1/N of a gather. The result of every backward rule refuses to be
transposed: a first gradient depends on parameters through the cotangent of the rule alone. (The forward pass has no
such mark, because policies of ``jax.checkpoint`` must find the gather in it.) Forward derivatives of a gradient,
``jax.jvp`` or ``jax.linearize`` of ``jax.grad``, transpose nothing, and are right.
"""

from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

import jax

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS
from xlstm_jax.introspection import transposes_a_shard_map
from xlstm_jax.private_names import BatchTracer, ad, batching, core, mlir

Function = TypeVar("Function", bound=Callable[..., Any])


class GatheredShard(Protocol):
    """Facts on the shard of a gather, as ``PrimalType`` has them: shape, and where the gather runs."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def batched(self) -> bool: ...

    @property
    def in_loss(self) -> bool: ...


def check_one_gradient_of_one_batch(
    path: str, primal: GatheredShard, cotangent: jax.Array, axes: tuple[str, ...], of_layers: bool | None = None
) -> None:
    """Raises a ``ValueError`` in the backward pass of a gather if a mean of gradients over ``axes`` would be wrong.

    First case: ``cotangent`` is batched by ``vmap``, one gradient per example, and the shard (described by ``primal``)
    is not. If the shard is batched too, as in an ensemble, each shard has its own gradient, and nothing is raised.
    Second case: the gather is differentiated within a loss function that is differentiated itself. Under a ``remat``
    inside the ``vmap`` no tracer shows that the shard is one of several; callers then pass ``of_layers=True``, which
    permits the first case. Third case: the gradient is taken from outside of ``shard_map``, where JAX expects a sum
    over the devices. ``path`` names the leaf in the error. If all ``axes`` have size 1, nothing is raised.
    """
    if not collectives.spread_axes(axes):
        return
    if not primal.in_loss and transposes_a_shard_map():
        count = collectives.axis_size(axes)
        raise ValueError(
            f"the gradient of {f'{path!r}' if path else 'a parameter'}, of shape {primal.shape} on this device, is "
            f"taken from outside of shard_map: it would be 1/{count} of the gradient, a mean over the {count} devices "
            f"of {axes} where JAX expects the sum. Take the gradient inside: value_and_grad(loss_fn, axis_names) of "
            "xlstm_jax.distributed, in the function under shard_map, which then returns the gradients."
        )
    for_each_example = isinstance(cotangent, BatchTracer) and not (primal.batched or of_layers)
    if for_each_example or RUNNING_LOSS.get().axes:
        where = "under vmap, for each example" if for_each_example else "in a loss function, which is differentiated"
        raise ValueError(
            f"the gradient of {f'{path!r}' if path else 'a parameter'}, of shape {primal.shape} on this device, is "
            f"taken {where}: it would be a mean over the devices of {axes}. Call full = gather_params(params, "
            "axis_name) first in the loss function, and differentiate with respect to full."
        )


# ------------------------------------------------------------------------------------------------- second gradients


def not_transposed(arguments: int, axes_at: int) -> Callable[[Function], Function]:
    """Returns a decorator for a function whose forward derivative is JAX's, and whose transpose raises an error.

    The function takes an array and returns an array. The rest of its ``arguments`` is static (hashable). The argument
    ``axes_at`` has the mesh axes; if all have size 1, the transpose is JAX's, and is right.
    """

    def decorated(fn: Function) -> Function:
        new: Any = jax.custom_jvp(fn, nondiff_argnums=tuple(range(1, arguments)))

        def derivative(*args: Any) -> tuple[Any, Any]:
            *static, primals, tangents = args
            out, tangent = jax.jvp(lambda value: fn(value, *static), primals, tangents)
            is_float = tangent.dtype != jax.dtypes.float0
            is_mean = is_float and bool(collectives.spread_axes(static[axes_at - 1]))
            return out, _FORWARD_ONLY.bind(tangent) if is_mean else tangent

        new.defjvp(derivative)
        return new

    return decorated


@not_transposed(2, axes_at=1)
def differentiated_once(value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns ``value`` unchanged; a gradient through it raises an error, unless all ``axes`` have size 1.

    A backward rule passes its result, which only a second gradient differentiates.
    """
    del axes
    return value


_FORWARD_ONLY = core.Primitive("forward_derivative_only")  # the identity; only second derivatives contain it


def _transposed(cotangent: Any, _: Any) -> NoReturn:
    raise ValueError(
        f"a gradient is taken of a gradient of split parameters, here of an array of shape {cotangent.shape} on this "
        "device: means over devices would be taken twice. Call full = gather_params(params, axis_name) first in the "
        "loss function, and take both gradients with respect to full; or take jax.jvp of jax.grad, which is right."
    )


_FORWARD_ONLY.def_impl(lambda tangent: tangent)
_FORWARD_ONLY.def_abstract_eval(lambda tangent: tangent)
ad.deflinear2(_FORWARD_ONLY, _transposed)
batching.primitive_batchers[_FORWARD_ONLY] = lambda operands, dims: (_FORWARD_ONLY.bind(*operands), dims[0])
mlir.register_lowering(_FORWARD_ONLY, lambda ctx, tangent: [tangent])
