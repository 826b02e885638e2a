"""Wrappers of Linen and NNX modules that gather parameters while a method runs; ``unit`` has the parts for both."""

from xlstm_jax.distributed.data_parallel.modules.linen_module import Stacks, is_nnx, recording_stacks
from xlstm_jax.distributed.data_parallel.modules.unit import OF_ARRAYS, ShardsItself

__all__ = ["OF_ARRAYS", "ShardsItself", "Stacks", "is_nnx", "recording_stacks"]
