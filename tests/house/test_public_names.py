"""Names and paths that users may have written stay importable, from where they were in 0.1."""

import importlib

import pytest

PUBLIC_IN_0_1 = {
    "xlstm_jax.distributed": """
        CheckpointError Checkpointer DeviceMeshManager LMHead LoopGuard NonFiniteError ReplicaError Replicas
        ShardingPlan TokenLosses abstract_batch abstract_train_state accumulate_gradients
        assert_same_everywhere available_devices box_like bytes_per_device check_replicas
        chunked_cross_entropy clip_by_global_norm compiler_options create_train_state elementwise_only
        export_safetensors fold_rng_over_axis gather_array_with_mean_grads gather_params global_norm
        import_safetensors init_sharded initialize_distributed make_train_step partition_specs plan_sharding
        remat_policy shard_batch shard_module_params shard_params shardings simulate_cpu_devices skip_counts
        skip_nonfinite sync_gradients unbox value_and_grad""",
    "xlstm_jax.distributed.data_parallel": """
        gather_array_with_mean_grads gather_params shard_module_params shard_params sync_gradients""",
    "xlstm_jax.distributed.metrics": """
        Accuracy Binary BinnedRanking Compose ConfusionMatrix Count DistributedMetrics FBeta GlobalNorm
        Local Max Maximum Metric MetricAccumulator MetricLogger MetricReduceOp Min Minimum Multiclass
        Multilabel Perplexity Precision PureMetric Recall StatefulMetric Sum Synced Throughput Total
        WeightedMean all_gather collect_from_devices make_log_step reduce_custom reduce_custom_collective
        reduce_max reduce_max_collective reduce_mean reduce_mean_collective reduce_min reduce_min_collective
        reduce_sum reduce_sum_collective""",
    "xlstm_jax.distributed.device_mesh": """
        DeviceMeshManager abstract_batch auto_mesh available_devices check_no_explicit_mesh mesh_axes
        shard_batch simulate_cpu_devices""",
    "xlstm_jax.distributed.training": """
        abstract_train_state accumulate_gradients create_train_state fold_rng_over_axis init_sharded
        jitted_init make_train_step optimizer_state_shardings value_and_grad""",
    "xlstm_jax.distributed.plan": "Difference LeafPlan ShardingPlan Share plan_sharding",
    "xlstm_jax.distributed.checkpoint": "CheckpointError Checkpointer export_safetensors import_safetensors",
    "xlstm_jax.distributed.resilience": """
        EXIT_FAILED EXIT_HUNG LoopGuard NonFiniteError ReplicaError check_replicas skip_counts
        skip_nonfinite""",
    "xlstm_jax.distributed.forecast": """
        CHIPS Chip Collective CompileError Finding Fit Forecast LintError Options Roofline Topology Workload
        fit forecast lint parse_topology""",
}


@pytest.mark.parametrize("path", PUBLIC_IN_0_1)
def test_what_was_public_still_is(path):
    module = importlib.import_module(path)
    assert not [name for name in PUBLIC_IN_0_1[path].split() if not hasattr(module, name)]


@pytest.mark.parametrize("path", PUBLIC_IN_0_1)
def test_all_lists_what_there_is(path):
    module = importlib.import_module(path)
    assert len(set(module.__all__)) == len(module.__all__)
    assert not [name for name in module.__all__ if not hasattr(module, name)]


def test_the_metrics_have_their_names_in_the_public_face_too():
    face, metrics = (importlib.import_module(f"xlstm_jax.distributed{part}") for part in ("", ".metrics"))
    assert not [name for name in metrics.__all__ if getattr(face, name, None) is not getattr(metrics, name)]
    assert set(metrics.__all__) < set(face.__all__)


def test_the_name_of_the_options_is_the_function_and_no_module():
    """It was both, and importing the module gave the function."""
    import xlstm_jax.distributed

    assert callable(xlstm_jax.distributed.compiler_options)
    with pytest.raises(ModuleNotFoundError, match="compiler_options"):
        importlib.import_module("xlstm_jax.distributed.compiler_options")
