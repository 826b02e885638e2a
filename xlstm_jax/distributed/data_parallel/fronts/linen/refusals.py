"""What a wrapped module refuses where it is entered: values that are no shards, and layers that would read shards."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from flax import linen as nn
from flax.errors import ScopeParamShapeError

from xlstm_jax.distributed.data_parallel.fronts.entering import closed_over, running, split_over
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.tracing import inside_module

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


def refused_in_map(path: str, by_policy: bool) -> list[str]:
    """No unit at ``path``, within an ``nn.map_variables`` of the model: that would map shards, weight norm by hand say.

    A policy leaves its parameters to the module around it, which gathers them before.

    Raises:
      ValueError: the module was chosen by its class, or by a predicate.
    """
    if by_policy:
        return []
    outer = path.rpartition("/")[0]
    raise ValueError(
        f"shard_modules: '{path}' runs within an nn.map_variables of the model (nn.WeightNorm and nn.SpectralNorm are "
        "made of it), which would compute from shards what it is to compute from whole parameters. Choose the module "
        f"around it, which gathers before: where=lambda path, module: path == {outer!r}, or larger_than(size)."
    )


@contextmanager
def named_in_errors(module: nn.Module, axes: tuple[str, ...]) -> Iterator[None]:
    """While the module gathers: errors name its leaves by their path, and Linen's of a whole value says what it is."""
    with inside_module(module.path):
        try:
            yield
        except ScopeParamShapeError as error:
            if running(axes) == "manual" and (reason := _whole_value_gathered(module, axes, error)):
                raise reason from None
            raise


def _whole_value_gathered(module: nn.Module, axes: tuple[str, ...], error: Exception) -> ValueError | None:
    """What to raise in place of Linen's error about a shape that a leaf had before it was gathered; None of others."""
    for path, leaf in leaves_with_path(module.variables.get("params", {})):
        if split_over(leaf, axes) and f"generate shape {np.shape(leaf_of(leaf).value)}," in str(error):
            return closed_over("/".join((*module.path, path)), leaf, axes)
    return None
