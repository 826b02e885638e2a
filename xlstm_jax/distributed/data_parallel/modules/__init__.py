"""Wrappers of Linen and NNX modules that gather parameters while a method runs; ``unit`` has the parts for both."""

from xlstm_jax.distributed.data_parallel.modules.linen_module import RECORDED_STACKS, Stacks, is_nnx
from xlstm_jax.distributed.data_parallel.modules.unit import OF_ARRAYS, ShardsItself

__all__ = ["OF_ARRAYS", "RECORDED_STACKS", "ShardsItself", "Stacks", "is_nnx"]
