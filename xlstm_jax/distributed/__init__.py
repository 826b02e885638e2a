"""The public face of the library: everything that a training script needs, by its name."""

from xlstm_jax.distributed.data_parallel import (
    gather_array_with_mean_grads,
    gather_params,
    shard_module_params,
    shard_params,
    sync_gradients,
)
from xlstm_jax.distributed.device_mesh import DeviceMeshManager, available_devices, simulate_cpu_devices
from xlstm_jax.distributed.gradients import accumulate_gradients, fold_rng_over_axis, value_and_grad
from xlstm_jax.distributed.optimizers import clip_by_global_norm, elementwise_only, global_norm
from xlstm_jax.distributed.partitioning import box_like, bytes_per_device, partition_specs, shardings, unbox
from xlstm_jax.distributed.training import create_train_state, init_sharded, make_train_step

__all__ = [
    "DeviceMeshManager",
    "accumulate_gradients",
    "available_devices",
    "box_like",
    "bytes_per_device",
    "clip_by_global_norm",
    "create_train_state",
    "elementwise_only",
    "fold_rng_over_axis",
    "gather_array_with_mean_grads",
    "gather_params",
    "global_norm",
    "init_sharded",
    "make_train_step",
    "partition_specs",
    "shard_module_params",
    "shard_params",
    "shardings",
    "simulate_cpu_devices",
    "sync_gradients",
    "unbox",
    "value_and_grad",
]
