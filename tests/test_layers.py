"""A file imports only from files of lower layers, never sideways, never up; and only some files do certain things."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "xlstm_jax"

LAYERS = [
    {"common_types"},
    {"partitioning", "chips", "names", "device_groups", "compile_child"},
    {"agreement", "flops", "hlo_instruction", "mesh_shapes", "processes", "remat", "shard_choice"},
    {"torus_mesh"},
    {"checksums", "collectives", "device_mesh", "hlo", "log_files", "plan_boxes", "plan_leaves", "votes", "watchdog"}
    | {"topology"},
    {"monoids", "parameters", "packing", "plan_table", "reductions", "logger", "replicas", "checkpoint_leaves"}
    | {"collective_sites", "cross_entropy", "cycles", "dataflow", "report"},
    {"buffers", "compiler_options", "data_parallel", "distributed_metrics", "safetensors_files", "traffic"}
    | {"sharding_plan", "states"},
    {"aggregation", "checkpoint", "optimizer_state", "estimate", "mesh_state"},
    {"classification", "linted", "stateful"},
    {"ranking"},
    {"gradients", "nonfinite", "optimizers"},
    {"training", "resilience"},
    {"plan", "lint_rules", "self_test", "workload"},
    {"doctor", "factory", "findings", "planner"},
    {"commands"},
    {"cli"},
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def imported(source):
    """The library's own modules that a file imports, by their last name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("xlstm_jax")):
            module = (node.module or "").split(".")[-1]
            yield from [module] if module in LAYER else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from [alias.name.split(".")[-1] for alias in node.names if alias.name.startswith("xlstm_jax")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_imports_only_from_lower_layers(path):
    assert path.stem in LAYER, f"{path.stem} has no layer: add it to the list in this test and to the design"
    upward = {name for name in imported(path.read_text()) if LAYER[name] >= LAYER[path.stem]}
    assert not upward, f"{path.stem} imports {sorted(upward)} from its own layer or above; move what they share down"


def test_the_check_sees_an_upward_import():
    assert set(
        imported("from xlstm_jax.distributed.training import x\nfrom xlstm_jax.distributed import collectives")
    ) == {
        "training",
        "collectives",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_collectives_prints_and_boxed_walks_stand_in_one_place(path):
    source = path.read_text()
    if path.stem != "collectives":
        assert not re.search(r"lax\.(psum|pmean|pmax|pmin|all_gather|psum_scatter|all_to_all|ppermute|pcast)\b", source)
    if path.stem != "partitioning":
        assert "is_leaf=" not in source
    if path.stem != "cli":
        assert not re.search(r"^[^#]*\bprint\(", source, re.MULTILINE)


def test_the_package_itself_imports_nothing():
    assert "import" not in (PACKAGE / "__init__.py").read_text()
