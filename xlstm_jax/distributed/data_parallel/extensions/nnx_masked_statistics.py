"""Statistics of ``nnx.BatchNorm`` under a mask: of the unmasked rows of all devices (see ``masked_statistics``).

A BatchNorm of a model that is about to run gets a subclass of its class, whose call computes these statistics. Other
normalisations get a subclass that refuses masked calls if Flax would average the means of devices.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from xlstm_jax.distributed.data_parallel.extension import Extension, register
from xlstm_jax.distributed.data_parallel.extensions.masked_statistics import (
    averages_means,
    refuse_means_of_means,
    unmasked_statistics,
)
from xlstm_jax.distributed.data_parallel.modules.nnx_module import subclass_of


@register
class NnxMaskedStatistics(Extension):
    """Lets each ``nnx.BatchNorm`` of a model count the unmasked rows of all devices; other normalisations refuse masks.

    Modules without ``axis_name`` stay unchanged.
    """

    modules = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm)

    def change_module(self, module: Any) -> None:
        if module.axis_name is not None:
            cls: Any = type(module)
            base: Any = next(base for base in self.modules if isinstance(module, base))
            object.__setattr__(module, "__class__", _checked_type(cls, base))


def _counting(plain: Any) -> Any:
    """Returns a method that calls ``plain``, a ``__call__`` of ``nnx.BatchNorm``; with a mask it counts unmasked rows.

    Calls without a mask, or with running averages, are those of ``plain``.
    """

    @functools.wraps(plain)
    def call(self: Any, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        running = self.use_running_average if use_running_average is None else use_running_average
        if mask is None or not averages_means(self, running):
            return plain(self, x, use_running_average, mask=mask)
        return _normalised(self, x, mask)

    return call


def _refusing(plain: Any) -> Any:
    """Returns a method that calls ``plain``, the ``__call__`` of a normalisation of NNX other than BatchNorm.

    With a mask the method raises an error if Flax would average the means of several devices.
    """

    @functools.wraps(plain)
    def call(self: Any, x: Any, mask: Any = None) -> Any:
        if mask is not None:
            refuse_means_of_means(self, f"nnx.{type(self).__name__}")
        return plain(self, x, mask=mask)

    return call


@functools.cache
def _checked_type(cls: Any, base: Any) -> Any:
    """Returns a subclass of ``cls`` with the same name, in which the call of ``base`` counts, or refuses, under a mask.

    ``base`` is the normalisation of NNX from which ``cls`` derives: ``nnx.BatchNorm`` counts unmasked rows.
    """
    changed = _counting if base is nnx.BatchNorm else _refusing
    # A unit's call wraps the function, not a name. Split variables are gathered when they are read.
    if inspect.unwrap(cls.__call__) is base.__call__:
        return subclass_of(cls, {"__call__": changed(cls.__call__)})
    # After ``cls`` in the order of classes: ``super().__call__`` of the user's class finds this class.
    return subclass_of(cls, {}, subclass_of(base, {"__call__": changed(base.__call__)}))


def _normalised(norm: Any, x: jax.Array, mask: Any) -> jax.Array:
    """Returns ``x`` normalised by the statistics of its unmasked rows on all devices; updates the running averages.

    ``mask`` is of a shape that broadcasts to the shape of ``x``; True: the entry counts. The result has the shape of
    ``x``, and the dtype that ``nnx.BatchNorm`` returns.
    """
    scale, bias = (None if leaf is None else leaf[...] for leaf in (norm.scale, norm.bias))
    x, _, _, scale, bias = norm.promote_dtype((x, norm.mean[...], norm.var[...], scale, bias), dtype=norm.dtype)
    # As Flax: statistics in float32 or wider, and in this dtype until the result.
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean, var = unmasked_statistics(wide, mask, norm)
    for average, new in ((norm.mean, mean), (norm.var, var)):
        average[...] = norm.momentum * average[...] + (1 - norm.momentum) * new.reshape(average.shape)
    factor = lax.rsqrt(var + norm.epsilon)
    of_features = mean.shape  # 1 in each dim of rows
    result = (wide - mean) * (factor if scale is None else factor * scale.reshape(of_features))
    return (result if bias is None else result + bias.reshape(of_features)).astype(x.dtype)
