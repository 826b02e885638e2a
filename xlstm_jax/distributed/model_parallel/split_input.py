"""Modules with replicated parameters and an input that is split over an axis, along tokens or heads.

Examples: a norm between layers with ``sequence_dim``, or a norm of queries within split heads. The gradient of a
parameter is the sum of the devices' terms, each from the device's tokens or heads. Dropout must drop different values
on each device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
from flax import linen as nn
from jax import Array

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.modules.linen_module import MapOfLeaves
from xlstm_jax.distributed.data_parallel.trees import map_values
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.model_parallel.activations import axis_devices, enter_split
from xlstm_jax.formatting import kind_of

Target = TypeVar("Target", bound=Callable[..., nn.Module])
_MARK = "_on_split_input"


def on_split_input(target: Target, axis_name: str) -> Target:
    """Returns a module class as ``target``, for an input that is split over the axis; the parameters are replicated.

    The gradients of the parameters are summed over the axis. Random keys that the module draws (``nn.Dropout``) differ
    by device. The class keeps its name, and outside ``shard_map`` acts as the plain class.

    Under ``check_vma=True`` JAX sums such gradients. Under ``check_vma=False`` a norm on split tokens that is not
    wrapped has wrong gradients; a comparison with one device detects this.

    >>> norm = on_split_input(nn.LayerNorm, "tp")()
    >>> norm.init_with_output(jax.random.key(0), jnp.ones((2, 8)))[0].shape
    (2, 8)

    Args:
      target: a Linen module class, or a ``functools.partial`` of a class, which is returned as a partial.
      axis_name: the mesh axis.
    Raises:
      TypeError: the target is not a class of Linen modules.
    """
    if isinstance(target, partial):
        again: Any = partial(on_split_input(target.func, axis_name), *target.args, **target.keywords)
        return again
    if not (isinstance(target, type) and issubclass(target, nn.Module)):
        raise TypeError(f"on_split_input takes a class of Linen modules, as nn.LayerNorm, not {kind_of(target)}.")

    def make_rng(self: nn.Module, name: str = "params") -> Array:
        key = target.make_rng(self, name)
        if name == "params" or axis_devices(axis_name, "on_split_input") == 1:
            return key
        return jax.random.fold_in(key, collectives.axis_index((axis_name,)))

    # Methods run on a module of the lifted class, so the lifted class must draw the keys.
    drawing: Any = type(target.__name__, (target,), {"__module__": target.__module__})
    drawing.__init__, drawing.make_rng = target.__init__, make_rng
    setattr(drawing, _MARK, axis_name)
    new: Any = nn.map_variables(
        drawing, "params", MapOfLeaves(_entered, axis_name), lambda params: params, mutable=True
    )
    for name in ("__name__", "__qualname__", "__module__", "__init__"):
        setattr(new, name, getattr(target, name))
    return new


def is_on_split_input(cls: type[nn.Module]) -> bool:
    """Returns whether ``on_split_input`` has made the class ``cls``, or a class from which ``cls`` inherits.

    True also for the inner class that ``nn.map_variables`` wraps, and whose methods run.
    """
    return hasattr(cls, _MARK)


def _entered(axis_name: str, params: PyTree) -> PyTree:
    # The values stay unchanged; backward sums the gradients of all devices' tokens or heads.
    def enter(leaf: Sharded) -> Any:
        if not leaf.is_differentiable:
            return leaf.value
        with jax.named_scope("sync_gradients"):  # a gradient is sent, not an activation
            return enter_split(leaf.value, axis_name, caller="on_split_input")

    return map_values(enter, params)
