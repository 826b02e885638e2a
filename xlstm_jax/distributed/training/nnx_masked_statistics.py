"""Statistics of an ``nnx.BatchNorm`` over the unmasked rows of all devices, for ``nnx_value_and_grad``.

  mean of the rows x[b] with mask m[b], of which each device has a part:  sum(m x) / sum(m), both sums over all devices

Flax averages the means of the devices instead. This is another number if a device has fewer unmasked rows than another
device, and NaN if a device has none.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from xlstm_jax.distributed.data_parallel.modules.nnx_module import subclass_of
from xlstm_jax.distributed.data_parallel.wire import collectives


def count_unmasked_rows(norm: nnx.BatchNorm) -> None:
    """Replaces the class of ``norm``, in place, so that statistics under a mask are those of the rows of all devices.

    The devices are those along ``norm.axis_name``. Calls without a mask, or with running averages, do not change. A
    subclass with its own ``__call__`` is left as it is.
    """
    if inspect.unwrap(type(norm).__call__) is nnx.BatchNorm.__call__:
        object.__setattr__(norm, "__class__", _counting_type(type(norm)))


@functools.cache
def _counting_type(cls: type[nnx.BatchNorm]) -> Any:
    @functools.wraps(cls.__call__)
    def call(self: Any, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        running = self.use_running_average if use_running_average is None else use_running_average
        if mask is None or running is None or running:
            return cls.__call__(self, x, use_running_average, mask=mask)
        return _normalised(self, x, mask)

    return subclass_of(cls, {"__call__": call})


def _normalised(norm: Any, x: jax.Array, mask: Any) -> jax.Array:
    """Returns ``x`` normalised by the statistics of its unmasked rows on all devices; updates the running averages.

    ``mask`` is of a shape that broadcasts to the shape of ``x``; True: the entry counts. The result has the shape of
    ``x``, and the dtype that ``nnx.BatchNorm`` returns.
    """
    axis = norm.axis if isinstance(norm.axis, tuple) else (norm.axis,)
    features = {dim % x.ndim for dim in axis}
    dims = tuple(dim for dim in range(x.ndim) if dim not in features)
    scale, bias = (None if leaf is None else leaf[...] for leaf in (norm.scale, norm.bias))
    x, _, _, scale, bias = norm.promote_dtype((x, norm.mean[...], norm.var[...], scale, bias), dtype=norm.dtype)
    # As Flax: statistics in float32 or wider, and in this dtype until the result.
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    counted = jnp.broadcast_to(mask, x.shape)

    def means(*values: jax.Array) -> list[jax.Array]:
        sums = [jnp.sum(value, dims, keepdims=True, where=counted) for value in values]
        count = jnp.sum(counted, dims, keepdims=True, dtype=sums[0].dtype)
        *sums, count = collectives.all_reduce(["sum"] * (len(sums) + 1), [*sums, count], norm.axis_name)
        return [total / count for total in sums]

    def square(value: jax.Array) -> jax.Array:
        return jnp.real(value * jnp.conj(value))

    if norm.use_fast_variance:
        mean, mean_of_squares = means(wide, square(wide))
        var = jnp.maximum(0.0, mean_of_squares - square(mean))
    else:
        (mean,) = means(wide)
        (var,) = means(square(wide - mean))
    for average, new in ((norm.mean, mean), (norm.var, var)):
        average[...] = norm.momentum * average[...] + (1 - norm.momentum) * new.reshape(average.shape)
    factor = lax.rsqrt(var + norm.epsilon)
    of_features = mean.shape  # 1 in each dim of rows
    result = (wide - mean) * (factor if scale is None else factor * scale.reshape(of_features))
    return (result if bias is None else result + bias.reshape(of_features)).astype(x.dtype)
