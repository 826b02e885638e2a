"""Modules of Linen and NNX that gather their parameters to run, with a shared description of both in ``unit``."""

from xlstm_jax.distributed.data_parallel.modules.linen_module import Stacks, is_nnx, recording_stacks

__all__ = ["Stacks", "is_nnx", "recording_stacks"]
