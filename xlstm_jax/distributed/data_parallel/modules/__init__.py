"""Wrappers of Linen and NNX modules that gather parameters while a method runs; ``unit`` has the parts for both."""

from xlstm_jax.distributed.data_parallel.modules.nnx_errors import NNX_MODULES
from xlstm_jax.distributed.data_parallel.modules.other_systems import OTHER_SYSTEMS, ShardsItself, other_system
from xlstm_jax.distributed.data_parallel.modules.stacks import RECORDED_STACKS, Stacks
from xlstm_jax.distributed.data_parallel.modules.unit import OF_ARRAYS

__all__ = ["OF_ARRAYS", "RECORDED_STACKS", "ShardsItself", "Stacks", "other_system"]

OTHER_SYSTEMS[:] = [
    NNX_MODULES,
]
