"""Fully sharded data parallelism for Flax Linen inside ``jax.shard_map``; see ``xlstm_jax.distributed``.

Packages: ``distributed`` for training, ``forecast`` for predictions of memory, traffic and time, ``cli`` for the
command ``xlstm-jax``.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from xlstm_jax.quiet_import import load_cuda_plugin_quietly

__version__ = "0.3.0"
__all__ = ["__version__"]

load_cuda_plugin_quietly()

_PACKAGES = ("cli", "distributed", "forecast")


def __dir__() -> list[str]:
    """Returns the names of the version and of the packages, whether the packages are imported or not."""
    return [*__all__, *_PACKAGES]


# Type checkers would take any name for an attribute of a module that has this function.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> ModuleType:
        """Imports the package ``name`` when it is first read as an attribute, and returns the package.

        So ``import xlstm_jax`` alone imports no package, and is quick.

        Raises:
          AttributeError: ``name`` is none of the packages "cli", "distributed" and "forecast".
        """
        if name in _PACKAGES:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
