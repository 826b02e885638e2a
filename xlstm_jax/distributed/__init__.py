"""The public face of the library: everything that a training script needs, by its name."""

from xlstm_jax.distributed.checkpoint import Checkpointer, CheckpointError, export_safetensors, import_safetensors
from xlstm_jax.distributed.data_parallel import (
    Replicas,
    box_like,
    bytes_per_device,
    gather_array_with_mean_grads,
    gather_params,
    partition_specs,
    remat_policy,
    shard_module_params,
    shard_params,
    shardings,
    sync_gradients,
    unbox,
)
from xlstm_jax.distributed.device_mesh import DeviceMeshManager, abstract_batch, shard_batch
from xlstm_jax.distributed.hardware import compiler_options
from xlstm_jax.distributed.optimizers import (
    clip_by_global_norm,
    elementwise_only,
    global_norm,
    skip_counts,
    skip_nonfinite,
)
from xlstm_jax.distributed.plan import ShardingPlan, plan_sharding
from xlstm_jax.distributed.processes import (
    assert_same_everywhere,
    available_devices,
    initialize_distributed,
    simulate_cpu_devices,
)
from xlstm_jax.distributed.resilience import LoopGuard, NonFiniteError, ReplicaError, check_replicas
from xlstm_jax.distributed.training import (
    LMHead,
    TokenLosses,
    abstract_train_state,
    accumulate_gradients,
    chunked_cross_entropy,
    create_train_state,
    fold_rng_over_axis,
    init_sharded,
    make_train_step,
    value_and_grad,
)

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DeviceMeshManager",
    "LMHead",
    "LoopGuard",
    "NonFiniteError",
    "ReplicaError",
    "Replicas",
    "ShardingPlan",
    "TokenLosses",
    "abstract_batch",
    "abstract_train_state",
    "accumulate_gradients",
    "assert_same_everywhere",
    "available_devices",
    "box_like",
    "bytes_per_device",
    "check_replicas",
    "chunked_cross_entropy",
    "clip_by_global_norm",
    "compiler_options",
    "create_train_state",
    "elementwise_only",
    "export_safetensors",
    "fold_rng_over_axis",
    "gather_array_with_mean_grads",
    "gather_params",
    "global_norm",
    "import_safetensors",
    "init_sharded",
    "initialize_distributed",
    "make_train_step",
    "partition_specs",
    "plan_sharding",
    "remat_policy",
    "shard_batch",
    "shard_module_params",
    "shard_params",
    "shardings",
    "simulate_cpu_devices",
    "skip_counts",
    "skip_nonfinite",
    "sync_gradients",
    "unbox",
    "value_and_grad",
]
