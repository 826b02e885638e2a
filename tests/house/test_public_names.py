"""Tests of old names and paths: importable from their place in 0.1, or with the new place of 0.2."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import xlstm_jax.distributed

API = Path(__file__).parents[2] / "docs" / "api.md"

PUBLIC_IN_0_1 = {
    "xlstm_jax.distributed": """
        CheckpointError Checkpointer DeviceMeshManager LMHead LoopGuard NonFiniteError ReplicaError Replicas
        abstract_batch abstract_train_state accumulate_gradients assert_same_everywhere bytes_per_device check_replicas
        chunked_cross_entropy clip_by_global_norm compiler_options create_train_state elementwise_only
        export_safetensors fold_rng_over_axis gather_params global_norm
        import_safetensors init_sharded initialize_distributed make_train_step partition_specs plan_sharding
        remat_policy shard_batch shard_module_params shard_params shardings simulate_cpu_devices skip_counts
        skip_nonfinite sync_gradients unbox value_and_grad""",
    "xlstm_jax.distributed.data_parallel": """
        gather_array_with_mean_grads gather_params shard_module_params shard_params sync_gradients""",
    "xlstm_jax.distributed.metrics": """
        Accuracy Binary BinnedRanking Compose ConfusionMatrix Count DistributedMetrics FBeta GlobalNorm
        Local Max Maximum Metric MetricAccumulator MetricReduceOp Min Minimum Multiclass
        Multilabel Perplexity Precision PureMetric Recall StatefulMetric Sum Synced Throughput Total
        WeightedMean all_gather collect_from_devices make_log_step reduce_custom reduce_custom_collective
        reduce_max reduce_max_collective reduce_mean reduce_mean_collective reduce_min reduce_min_collective
        reduce_sum reduce_sum_collective""",
    "xlstm_jax.distributed.device_mesh": """
        DeviceMeshManager abstract_batch auto_mesh available_devices mesh_axes
        shard_batch simulate_cpu_devices""",
    "xlstm_jax.distributed.training": """
        abstract_train_state accumulate_gradients create_train_state fold_rng_over_axis init_sharded
        jitted_init make_train_step optimizer_state_shardings value_and_grad""",
    "xlstm_jax.distributed.plan": "Difference LeafPlan ShardingPlan Share plan_sharding",
    "xlstm_jax.distributed.checkpoint": "CheckpointError Checkpointer export_safetensors import_safetensors",
    "xlstm_jax.distributed.resilience": """
        EXIT_FAILED EXIT_HUNG LoopGuard NonFiniteError ReplicaError check_replicas skip_counts
        skip_nonfinite""",
    "xlstm_jax.forecast": "CHIPS Chip Collective CompileError Forecast Roofline Topology forecast parse_topology",
    "xlstm_jax.forecast.training": "Finding Fit LintError Options Workload fit lint",
}


@pytest.mark.parametrize("path", PUBLIC_IN_0_1)
def test_public_names_of_release_0_1_are_still_importable(path):
    module = importlib.import_module(path)
    assert not [name for name in PUBLIC_IN_0_1[path].split() if not hasattr(module, name)]


@pytest.mark.parametrize("path", PUBLIC_IN_0_1)
def test_module_all_lists_existing_unique_names(path):
    module = importlib.import_module(path)
    assert len(set(module.__all__)) == len(module.__all__)
    assert not [name for name in module.__all__ if not hasattr(module, name)]


def test_distributed_package_exports_at_most_60_names_and_no_metric():
    assert len(xlstm_jax.distributed.__all__) <= 60
    assert not set(xlstm_jax.distributed.__all__) & set(xlstm_jax.distributed.metrics.__all__)


def test_import_raises_for_an_unknown_name_of_distributed():
    with pytest.raises(ImportError, match="cannot import name 'make_train_steps'"):
        from xlstm_jax.distributed import make_train_steps  # noqa: F401


def test_source_docstring_and_reference_have_the_same_groups_of_public_names():
    face = xlstm_jax.distributed
    source = Path(face.__file__).read_text().split("__all__ = [")[1].split("]\n")[0]
    in_source = re.split(r"^    # (.+)$", source, flags=re.MULTILINE)[1:]
    groups = dict(zip(in_source[::2], [re.findall(r"\w+", names) for names in in_source[1::2]], strict=True))
    assert [name for names in groups.values() for name in names] == face.__all__

    in_help = re.split(r"^  (\w[\w ]*\w)  +", face.__doc__.split("\n\n")[1], flags=re.MULTILINE)[1:]
    assert dict(zip(in_help[::2], [re.findall(r"\w+", names) for names in in_help[1::2]], strict=True)) == groups

    section = API.read_text().split("## `xlstm_jax.distributed`\n")[1].split("\n## ")[0]
    in_reference = re.split(r"^### (.+)$", section, flags=re.MULTILINE)[1:]
    tables = [re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) for table in in_reference[1::2]]
    assert dict(zip(map(str.lower, in_reference[::2]), tables, strict=True)) == groups

    assert {"checkpoint", "model_parallel", "resilience"} <= set(dir(face))
    assert not [name for name in dir(face) if not hasattr(face, name)]
    packages = re.split("Less common names are in the subpackages ", face.__doc__)[1]
    assert set(dir(face)) == {*face.__all__, *re.findall(r"``(\w+)``", packages), "metrics"}


@pytest.mark.parametrize("name", ["forecast", "hardware"])
def test_import_raises_for_modules_moved_out_of_distributed(name):
    """It was one that raised, so ``from xlstm_jax.distributed import forecast`` passed mypy and pyright."""
    folder = Path(xlstm_jax.distributed.__file__).parent
    assert not list(folder.glob(f"{name}*")) and name not in dir(xlstm_jax.distributed)
    assert (folder.parent / "forecast" / "__init__.py").exists()  # guard
    with pytest.raises(ModuleNotFoundError, match=f"No module named 'xlstm_jax.distributed.{name}'"):
        importlib.import_module(f"xlstm_jax.distributed.{name}")


def test_packages_define_no_module_level_getattr_for_type_checkers():
    """A module with ``__getattr__`` would have any name, for a type checker."""
    for path in (xlstm_jax.__file__, xlstm_jax.distributed.__file__):
        tree = ast.parse(Path(path).read_text())
        assert not [node for node in tree.body if getattr(node, "name", "") == "__getattr__"]


def test_compiler_options_is_a_function_and_not_a_module():
    """``compiler_options`` is a function and no module; with both names, importing the module returned the function."""
    import xlstm_jax.distributed

    assert callable(xlstm_jax.distributed.compiler_options)
    with pytest.raises(ModuleNotFoundError, match="compiler_options"):
        importlib.import_module("xlstm_jax.distributed.compiler_options")
