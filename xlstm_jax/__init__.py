"""Fully sharded data parallelism for Flax Linen inside ``jax.shard_map``; see ``xlstm_jax.distributed``."""

from xlstm_jax.quiet_import import load_cuda_plugin_quietly

__version__ = "0.3.0"

load_cuda_plugin_quietly()
