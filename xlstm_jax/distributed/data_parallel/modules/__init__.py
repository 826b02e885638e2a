"""Modules that gather their parameters where they run: of Linen and of NNX, by one description of both (``unit``)."""

from xlstm_jax.distributed.data_parallel.modules.linen_module import Stacks, is_nnx, noting_stacks

__all__ = ["Stacks", "is_nnx", "noting_stacks"]
