"""Statistics of normalisations under a mask: of the unmasked entries of all devices, as on a single device.

  mean of the rows x[b] with mask m[b], of which each device has a part:  sum(m x) / sum(m), both sums over all devices

Flax averages the means of the devices instead. This is another number if a device has fewer unmasked rows than another
device, and NaN if a device has none.

While a loss or evaluation function runs, the calls of ``nn.BatchNorm`` with a mask are intercepted: the statistics take
the place of the running averages, and Flax normalises by these. Then the new running averages are stored. Only a
BatchNorm with ``axis_name`` changes, and only where these axes are bound. The other normalisations of Flax, whose means
Flax averages alike, are refused with a mask and ``axis_name``: with features on one device they need no ``axis_name``.
"""

import inspect
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from xlstm_jax.distributed.data_parallel.extension import Extension, register
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names

STATISTICS = "batch_stats"  # collection of the running averages "mean" and "var"
REFUSED = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm)


@register
class MaskedStatistics(Extension):
    """Lets each ``nn.BatchNorm`` in a loss or evaluation function count the unmasked rows of all devices.

    A call of another normalisation that would average the means of devices under a mask raises an error, in these
    functions and in every unit. (A step without collections enters no ``around_models``.)
    """

    modules = REFUSED

    def around_models(self) -> AbstractContextManager[None]:
        return nn.intercept_methods(_intercept)

    def changed_arguments(
        self, module: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if method == "__call__" and kwargs.get("mask") is not None:
            _refuse(module, type(module).__call__)
        return args, kwargs


def unmasked_statistics(x: jax.Array, mask: Any, norm: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (mean, variance) of the unmasked entries of ``x`` on all devices, of size 1 in the dims of rows.

    Sums are computed in the dtype of ``x``.

    Args:
      x: the input of this device.
      mask: of a shape that broadcasts to the shape of ``x``; True: the entry counts.
      norm: the BatchNorm, of Linen or NNX: ``axis`` are the dims of features, ``axis_name`` the axes of the devices.
    """
    axis = norm.axis if isinstance(norm.axis, tuple | list) else (norm.axis,)
    features = {dim % x.ndim for dim in axis}
    dims = tuple(dim for dim in range(x.ndim) if dim not in features)
    axes, of_mesh = as_axis_names(norm.axis_name), collectives.manual_axes()
    of_devices, of_vmap = [name for name in axes if name in of_mesh], [name for name in axes if name not in of_mesh]
    counted = jnp.broadcast_to(jnp.asarray(mask, bool), x.shape)

    def means(*values: jax.Array) -> list[jax.Array]:
        sums = [jnp.sum(value, dims, keepdims=True, where=counted) for value in values]
        count = jnp.sum(counted, dims, keepdims=True, dtype=sums[-1].dtype)
        totals = collectives.all_reduce(["sum"] * (len(sums) + 1), [*sums, count], of_devices)
        # Also of size 1: only a sum makes the values equal along the axis of a vmap.
        *sums, count = [collectives.all_reduce_sum(x, of_vmap) for x in totals] if of_vmap else totals
        return [total / count for total in sums]

    def square(value: jax.Array) -> jax.Array:
        return jnp.real(value * jnp.conj(value))

    if norm.use_fast_variance:
        mean, mean_of_squares = means(x, square(x))
        return mean, jnp.maximum(0.0, mean_of_squares - square(mean))
    (mean,) = means(x)
    (var,) = means(square(x - mean))
    return mean, var


def averages_means(norm: Any, use_running_average: bool | None) -> bool:
    """Returns whether Flax averages the means of devices in a call of ``norm``, a BatchNorm of Linen or NNX.

    ``use_running_average`` is the flag of the call, or of the module if the call has none. Returns False without
    ``axis_name``, outside of ``shard_map``, and for ``axis_index_groups``, which have separate statistics.
    """
    if use_running_average is None or use_running_average:
        return False
    return norm.axis_index_groups is None and bool(_bound_axes(norm))


def refuse_means_of_means(norm: Any, name: str) -> None:
    """Raises if Flax would average the means of several devices in a masked call of ``norm``, of Linen or NNX.

    ``norm`` is a normalisation without running averages, as LayerNorm; ``name`` names it in the error.

    Raises:
      ValueError: ``norm`` has an ``axis_name`` along which there are two devices or more.
    """
    axes = _bound_axes(norm)
    if axes and (devices := collectives.axis_size(axes)) > 1:
        raise ValueError(
            f"{name} has axis_name={norm.axis_name!r} and is called with a mask: Flax averages the means of these "
            f"{devices} devices, which is another number if they have different numbers of unmasked entries, and NaN "
            "if one has none. Leave axis_name out if each device has all features of its rows; for split features "
            "compute the statistics by psum of jax.lax, of the sums and of the counts."
        )


def _bound_axes(norm: Any) -> tuple[str, ...]:
    """Returns the axes in ``axis_name`` of ``norm``; () if there are none, or if one is not bound here."""
    axes = () if norm.axis_name is None else as_axis_names(norm.axis_name)
    return axes if all(map(collectives.is_bound, axes)) else ()


def _intercept(method: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """Returns the result of ``method``; a masked ``nn.BatchNorm`` normalises by the unmasked rows of all devices.

    This is an interceptor for ``nn.intercept_methods``. In a subclass of BatchNorm with another ``__call__`` the calls
    of the parent's are changed. Masked calls of other normalisations are refused (``refuse_means_of_means``), likewise.
    """
    # The mask first: it is passed by name, and few modules take one.
    module = context.module
    if kwargs.get("mask") is None or not isinstance(module, (nn.BatchNorm, *REFUSED)):
        return method(*args, **kwargs)
    called: Any = context.orig_method
    if isinstance(module, nn.BatchNorm):
        is_flax = inspect.unwrap(called.func) is inspect.unwrap(nn.BatchNorm.__call__)
        return _normalised(module, method, *args, **kwargs) if is_flax else method(*args, **kwargs)
    _refuse(module, called.func)
    return method(*args, **kwargs)


def _refuse(module: nn.Module, called: Any) -> None:
    """Raises as ``refuse_means_of_means`` if ``called``, a function of ``module``, is one of ``REFUSED`` in Flax."""
    if any(inspect.unwrap(called) is inspect.unwrap(cls.__call__) for cls in REFUSED):
        at = f" at '{'/'.join(module.path)}'" if module.path else ""
        refuse_means_of_means(module, f"nn.{type(module).__name__}{at}")


def _normalised(
    norm: nn.BatchNorm, method: Any, x: Any, use_running_average: bool | None = None, *, mask: Any
) -> jax.Array:
    """Returns the result of ``norm`` for ``x``, by statistics of the unmasked rows of all devices.

    ``method`` is the bound ``__call__`` of ``norm``, and further arguments are those of the call. The running averages
    of ``norm`` are updated.
    """
    before: dict[str, Any] = {name: norm.get_variable(STATISTICS, name) for name in ("mean", "var")}
    flag = norm.use_running_average
    is_ready = not norm.is_initializing() and all(value is not None for value in before.values())
    is_twice = flag is not None and use_running_average is not None  # which Flax refuses
    if not is_ready or is_twice or not averages_means(norm, use_running_average if flag is None else flag):
        return method(x, use_running_average, mask=mask)
    x = jnp.asarray(x)
    dtype = x.dtype if norm.dtype is None else norm.dtype
    wide = x.astype(jnp.promote_types(dtype, jnp.float32) if norm.force_float32_reductions else dtype)
    statistics = unmasked_statistics(wide, mask, norm)
    for name, new in zip(before, statistics, strict=True):
        norm.put_variable(STATISTICS, name, new.reshape(before[name].shape))
    # Fields of a module are frozen, and Linen refuses the argument beside the field.
    object.__setattr__(norm, "use_running_average", True)
    try:
        result = method(x)
    finally:
        object.__setattr__(norm, "use_running_average", flag)
    for name, new in zip(before, statistics, strict=True):
        average = norm.momentum * before[name] + (1 - norm.momentum) * new.reshape(before[name].shape)
        norm.put_variable(STATISTICS, name, average)
    return result
