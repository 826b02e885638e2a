"""What a wrapped module refuses where it is entered: values that are no shards, and layers that would read shards."""

from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.core import Tracer

from xlstm_jax.distributed.data_parallel import collectives
from xlstm_jax.distributed.data_parallel.boxes import leaf_axes, leaf_value, leaves_with_path
from xlstm_jax.distributed.data_parallel.gather_array import path_in_model

READERS = (nn.WeightNorm, nn.SpectralNorm)  # layers of Flax that compute from the parameters of another


def check_not_inside_reader(module: nn.Module) -> None:
    """Raises where a layer that reads parameters stands around a wrapped module: it would take norms of shards.

    Boxes would get into the names of its own parameters, too. Flax keeps the modules that are being called to itself.
    """
    for caller in nn.module._context.module_stack:
        if isinstance(caller, READERS):
            kind, layer = type(caller).__name__, type(module).__name__
            raise ValueError(
                f"'{'/'.join(module.path)}' is wrapped by shard_module_params, and nn.{kind} stands around it: that "
                "would take norms of shards, and name its own parameters after their boxes. Wrap a module that has "
                f"both inside, and call nn.{kind}(nn.{layer}(...)) of the plain class there."
            )


def check_shards(variables: Any, axes: tuple[str, ...]) -> None:
    """Raises where a leaf that a box splits over ``axes`` is a global array: it did not come through the ``shard_map``.

    Those of an outer ``jit`` are traced, and their types get lost in a scan of Linen; see ``whole_value_gathered``.
    """
    for path, leaf in leaves_with_path(variables):
        if isinstance(leaf_value(leaf), jax.Array) and not isinstance(leaf_value(leaf), Tracer) and _split(leaf, axes):
            raise _closed_over(path_in_model(path), leaf, axes)


def whole_value_gathered(module: nn.Module, axes: tuple[str, ...], error: Exception) -> ValueError | None:
    """What to raise in place of Linen's error about a shape that a leaf had before it was gathered; None of others."""
    for path, leaf in leaves_with_path(module.variables.get("params", {})):
        if _split(leaf, axes) and f"generate shape {np.shape(leaf_value(leaf))}," in str(error):
            return _closed_over("/".join((*module.path, path)), leaf, axes)
    return None


def _split(leaf: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    return collectives.spread_axes([axis for axis in leaf_axes(leaf) if axis in axes])


def _closed_over(path: str, leaf: Any, axes: tuple[str, ...]) -> ValueError:
    shape = np.shape(leaf_value(leaf))
    return ValueError(
        f"'{path}' is split over {_split(leaf, axes)} by its box, and its value of shape {shape} is whole on each "
        "device: a function inside shard_map closes over it, where it must be passed in to be a shard. Parameters that "
        "a loss does not train (LoRA) belong into state.params, too: there apply jax.lax.stop_gradient to them, and "
        "give them optax.set_to_zero() by optax.multi_transform."
    )
