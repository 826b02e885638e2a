"""Fully sharded data parallelism for Linen modules, used inside ``shard_map``.

Life of a parameter W[d, f] on mesh axis "fsdp" of size N (d_fsdp: dim d is split over that axis):
  init      W[d, f]       -- shard_params  -->  W[d_fsdp, f]    each device keeps its slice, in a box with its names
  forward   W[d_fsdp, f]  -- gather_params -->  W[d, f]         all-gather, dropped after use
  backward  dW[d, f]      -- its transpose -->  dW[d_fsdp, f]   reduce-scatter, mean over N
Leaves that stay whole are averaged by ``sync_gradients``. ``shard_module_params`` puts all of it around a module.

The method is ZeRO-3 (arXiv:1910.02054), known as FSDP (arXiv:2304.11277).
"""

from xlstm_jax.distributed.data_parallel.boxes import box_like, bytes_per_device, partition_specs, shardings, unbox
from xlstm_jax.distributed.data_parallel.communication import Replicas
from xlstm_jax.distributed.data_parallel.gather import gather_array_with_mean_grads, gather_params, sync_gradients
from xlstm_jax.distributed.data_parallel.linen import shard_module_params
from xlstm_jax.distributed.data_parallel.remat import remat_policy
from xlstm_jax.distributed.data_parallel.shard import shard_params

__all__ = [
    "Replicas",
    "box_like",
    "bytes_per_device",
    "gather_array_with_mean_grads",
    "gather_params",
    "partition_specs",
    "remat_policy",
    "shard_module_params",
    "shard_params",
    "shardings",
    "sync_gradients",
    "unbox",
]
