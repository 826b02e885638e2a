"""Fully sharded data parallelism for Flax Linen inside ``jax.shard_map``; see ``xlstm_jax.distributed``."""

__version__ = "0.2.0"
