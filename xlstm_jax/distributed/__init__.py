"""Public names of the library that training needs, in groups.

  devices          create_fsdp_mesh, DeviceMeshManager, initialize_distributed, simulate_cpu_devices,
                   assert_same_everywhere, shard_batch, abstract_batch
  wrapped modules  shard_module_params, shard_modules, scan_layers, nnx_model, Replicas, PackSmall, freeze_params,
                   remat_policy, BLOCK_INPUT, typed_kernel, compiler_options
  trees of shards  shard_params, gather_params, sync_gradients, partition_specs, shardings, unbox, bytes_per_device
  training         TrainState, init_sharded, create_train_state, abstract_train_state, make_train_step, make_eval_step,
                   check_step, value_and_grad, accumulate_gradients, fold_rng_over_axis, create_nnx_module,
                   nnx_value_and_grad
  losses           chunked_cross_entropy, LMHead
  optimizers       muon, with_ema, ema_params, Offload, global_norm, clip_by_global_norm, elementwise_only,
                   skip_nonfinite, skip_counts
  plans            plan_sharding
  checkpoints      Checkpointer, CheckpointError, export_safetensors, import_safetensors
  faults           LoopGuard, NonFiniteError, check_replicas, ReplicaError, replayed, ReplayError

Metrics are in ``xlstm_jax.distributed.metrics``; forecasts in ``xlstm_jax.forecast``, fits and the lint in
``xlstm_jax.forecast.training``.
Less common names are in the subpackages ``checkpoint``, ``data_parallel``, ``device_mesh``, ``model_parallel``,
``optimizers``, ``plan``, ``processes``, ``resilience`` and ``training``.
"""

from typing import TYPE_CHECKING

from xlstm_jax.accelerators import compiler_options
from xlstm_jax.deferred import names_when_used
from xlstm_jax.distributed.data_parallel import (
    BLOCK_INPUT,
    PackSmall,
    Replicas,
    bytes_per_device,
    freeze_params,
    gather_params,
    partition_specs,
    remat_policy,
    scan_layers,
    shard_module_params,
    shard_modules,
    shard_params,
    shardings,
    sync_gradients,
    typed_kernel,
    unbox,
)
from xlstm_jax.distributed.device_mesh import DeviceMeshManager, abstract_batch, create_fsdp_mesh, shard_batch
from xlstm_jax.distributed.optimizers import (
    Offload,
    clip_by_global_norm,
    elementwise_only,
    ema_params,
    global_norm,
    muon,
    skip_counts,
    skip_nonfinite,
    with_ema,
)
from xlstm_jax.distributed.plan import plan_sharding
from xlstm_jax.distributed.processes import assert_same_everywhere, initialize_distributed, simulate_cpu_devices
from xlstm_jax.distributed.training import (
    LMHead,
    TrainState,
    abstract_train_state,
    accumulate_gradients,
    chunked_cross_entropy,
    create_train_state,
    fold_rng_over_axis,
    init_sharded,
    make_eval_step,
    make_train_step,
    value_and_grad,
)

if TYPE_CHECKING:
    from xlstm_jax.distributed.checkpoint import Checkpointer, CheckpointError, export_safetensors, import_safetensors
    from xlstm_jax.distributed.data_parallel import nnx_model
    from xlstm_jax.distributed.resilience import LoopGuard, NonFiniteError, ReplicaError, check_replicas
    from xlstm_jax.distributed.training import (
        ReplayError,
        check_step,
        create_nnx_module,
        nnx_value_and_grad,
        replayed,
    )
else:  # names that many programs do not use
    __getattr__ = names_when_used(
        __name__,
        {
            "checkpoint": "xlstm_jax.distributed.checkpoint",
            "Checkpointer": "xlstm_jax.distributed.checkpoint",
            "CheckpointError": "xlstm_jax.distributed.checkpoint",
            "export_safetensors": "xlstm_jax.distributed.checkpoint",
            "import_safetensors": "xlstm_jax.distributed.checkpoint",
            "nnx_model": "xlstm_jax.distributed.data_parallel.modules.nnx_model",
            "create_nnx_module": "xlstm_jax.distributed.training.nnx_gradients",
            "nnx_value_and_grad": "xlstm_jax.distributed.training.nnx_gradients",
            "resilience": "xlstm_jax.distributed.resilience",
            "LoopGuard": "xlstm_jax.distributed.resilience",
            "NonFiniteError": "xlstm_jax.distributed.resilience",
            "ReplicaError": "xlstm_jax.distributed.resilience",
            "check_replicas": "xlstm_jax.distributed.resilience",
            "check_step": "xlstm_jax.distributed.training.step_check.check",
            "replayed": "xlstm_jax.distributed.training.replay.replayed_step",
            "ReplayError": "xlstm_jax.distributed.training.replay.replayed_step",
        },
    )

__all__ = [  # noqa: RUF022 (in groups)
    # devices
    "create_fsdp_mesh",
    "DeviceMeshManager",
    "initialize_distributed",
    "simulate_cpu_devices",
    "assert_same_everywhere",
    "shard_batch",
    "abstract_batch",
    # wrapped modules
    "shard_module_params",
    "shard_modules",
    "scan_layers",
    "nnx_model",
    "Replicas",
    "PackSmall",
    "freeze_params",
    "remat_policy",
    "BLOCK_INPUT",
    "typed_kernel",
    "compiler_options",
    # trees of shards
    "shard_params",
    "gather_params",
    "sync_gradients",
    "partition_specs",
    "shardings",
    "unbox",
    "bytes_per_device",
    # training
    "TrainState",
    "init_sharded",
    "create_train_state",
    "abstract_train_state",
    "make_train_step",
    "make_eval_step",
    "check_step",
    "value_and_grad",
    "accumulate_gradients",
    "fold_rng_over_axis",
    "create_nnx_module",
    "nnx_value_and_grad",
    # losses
    "chunked_cross_entropy",
    "LMHead",
    # optimizers
    "muon",
    "with_ema",
    "ema_params",
    "Offload",
    "global_norm",
    "clip_by_global_norm",
    "elementwise_only",
    "skip_nonfinite",
    "skip_counts",
    # plans
    "plan_sharding",
    # checkpoints
    "Checkpointer",
    "CheckpointError",
    "export_safetensors",
    "import_safetensors",
    # faults
    "LoopGuard",
    "NonFiniteError",
    "check_replicas",
    "ReplicaError",
    "replayed",
    "ReplayError",
]

_PACKAGES = [
    "checkpoint",
    "data_parallel",
    "device_mesh",
    "metrics",
    "model_parallel",
    "optimizers",
    "plan",
    "processes",
    "resilience",
    "training",
]


def __dir__() -> list[str]:
    """Lists the public names and the subpackages."""
    return [*__all__, *_PACKAGES]
