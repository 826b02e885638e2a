"""Tests of the layers: folders import earlier folders only, and each public name has one definition."""

import ast
import re
import sys
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.measures import FOREIGN, module_of, names_imported, parsed

PACKAGE = Path(__file__).parents[2] / "xlstm_jax"

ORDER = """common_types, deferred, private_names, quiet_import, program_names
    < formatting, equations, accelerators, introspection, explicit_axes
    < origins < data_parallel < processes, optimizers, model_parallel < device_mesh, checkpoint
    < metrics, plan, resilience < training < forecast < cli"""
LEVEL = {name.strip(): level for level, names in enumerate(ORDER.split("<")) for name in names.split(",")}
EXAMPLE = PACKAGE / "cli" / "example.py"  # written as a user's program, with the names that users import
FILES = sorted(set(PACKAGE.rglob("*.py")) - {EXAMPLE})


MODULES = {module_of(path): path for path in FILES}
FACES = ["xlstm_jax", "xlstm_jax.distributed"]  # modules that collect names of all folders


def folder_of(module):
    """Returns the folder of a module, as named in ``ORDER``."""
    return re.sub(r"^xlstm_jax\.(distributed\.)?", "", module).split(".")[0]


@cache
def names_of(path):
    """Returns the names that a file of the library imports."""
    return list(names_imported(path.read_text()))


def library_modules(names):
    """Returns the modules of the library among imported names."""
    names = [name for name in names if name.startswith("xlstm_jax")]
    return [name if name in MODULES else name.rpartition(".")[0] for name in names]


def imported(module):
    """Returns the library modules that a module imports."""
    return library_modules(names_of(MODULES[module]))


def test_modules_import_only_from_earlier_layers():
    wrong = {}
    for module in MODULES.keys() - set(FACES):
        own = folder_of(module)
        others = {folder_of(name) for name in imported(module)} - {own, "xlstm_jax"}
        assert {own, *others} <= LEVEL.keys(), f"add {sorted({own, *others} - LEVEL.keys())} to ORDER of {__file__}"
        if later := sorted(other for other in others if LEVEL[other] >= LEVEL[own]):
            wrong[module] = later
    assert not wrong, f"modules that import from later folders: {wrong}; the order is {' '.join(ORDER.split())}"


OF_ANY_PROGRAM = [name for name in MODULES if re.match(r"xlstm_jax\.forecast(?!\.training)", name)]


def test_forecast_modules_for_any_program_do_not_import_distributed():
    assert not [module for module in OF_ANY_PROGRAM if any("distributed" in name for name in imported(module))]
    assert len(OF_ANY_PROGRAM) > 30  # guard
    assert any("distributed" in name for name in imported("xlstm_jax.forecast.training.workload"))


def test_library_modules_have_no_import_cycles():
    graph = {module: set(imported(module)) - {module} for module in MODULES}
    list(TopologicalSorter(graph).static_order())


def test_imported_detects_an_upward_import_between_layers():
    source = "from xlstm_jax.distributed.training import step\nfrom xlstm_jax.distributed.plan.table import plan_table"
    assert [folder_of(name) for name in library_modules(names_imported(source))] == ["training", "plan"]
    assert LEVEL["training"] > LEVEL["plan"] > LEVEL["data_parallel"] > LEVEL["formatting"]


def definitions(path):
    """Returns the names of a file's top-level functions and classes."""
    kinds = ast.FunctionDef | ast.ClassDef
    return [node.name for node in parsed(path.read_text()).body if isinstance(node, kinds)]


# Functions that scripts run; and the metric's public all_gather, which gathers dictionaries.
SAID_TWICE = {"main", "all_gather"}


def test_no_public_name_is_defined_twice():
    where = defaultdict(list)
    for module, path in MODULES.items():
        for name in definitions(path):
            where[name].append(module)
    twice = {name: modules for name, modules in where.items() if len(modules) > 1 and not name.startswith("_")}
    assert not twice.keys() - SAID_TWICE, twice


COLLECTIVE = r"lax\.(psum|pmean|pmax|pmin|all_gather|psum_scatter|all_to_all|ppermute|pcast)\b"


def test_collectives_prints_and_is_leaf_walks_occur_only_in_designated_modules():
    wrong = []
    for path in FILES:
        source = path.read_text()
        for number, line in enumerate(source.splitlines(), 1):
            if path.stem != "collectives" and re.search(COLLECTIVE, line):
                wrong.append(f"{path}:{number}: use the functions of collectives.py in place of {line.strip()}")
            if path.stem != "trees" and "is_leaf=" in line:
                wrong.append(f"{path}:{number}: use the walks of trees.py in place of {line.strip()}")
        if "cli" not in path.parts and re.search(r"\bprint\b", source):
            names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
            wrong += [f"{path}:{node.lineno}: a library does not print" for node in names if node.id == "print"]
    assert not wrong, "\n".join(wrong)


# The modules that import Linen or NNX, by file name; the keys say what belongs in a list.
IMPORT_LINEN = {
    "wraps or lifts modules (data_parallel/modules)": {
        "holders",
        "linen_class",
        "linen_errors",
        "linen_module",
        "linen_units_by_rule",
        "scan_layers",
        "shard_modules",
    },
    "handles one kind of Linen layer (data_parallel/extensions)": {
        "fp8_products",
        "logical_names",
        "masked_statistics",
        "pieces",
        "recurrent_carries",
        "rows",
    },
    "is a layer that is split over an axis (model_parallel)": {
        "attention",
        "dense",
        "embedding",
        "experts",
        "split_input",
        "splitting",
    },
    "reads a class, a box or a private name of Linen": {"introspection", "private_names", "boxes"},
    "defines a model or a layer that is not split": {"cross_entropy", "self_test"},
}
IMPORT_NNX = {
    "wraps or converts modules (data_parallel/modules)": {"nnx_filters", "nnx_model", "nnx_module"},
    "splits layers over an axis (model_parallel)": {"nnx_splitting"},
    "differentiates modules (training)": {"nnx_gradients"},
    "handles one kind of NNX layer (data_parallel/extensions)": {"nnx_masked_statistics", "nnx_rows"},
    "is itself an NNX module": {"data_parallel_methods", "distributed_metrics"},
}


def assert_imported_by(library, lists, cure):
    """Asserts that the modules of ``lists`` import the library, and no others."""
    found, listed = who_imports(library), set().union(*lists.values())
    assert not found - listed, (
        f"{sorted(found - listed)} import {library}: {cure}; if that is impossible, add the module to the list of "
        f"tests/house/test_layers.py whose key is true of it: {'; '.join(lists)}"
    )
    assert not listed - found, f"{sorted(listed - found)} import {library} no longer: remove them from their list"


def test_only_designated_modules_import_flax_linen():
    """Only modules that lift Linen modules import Linen; other code uses boxes, or a model's ``init`` and ``apply``."""
    assert_imported_by("flax.linen", IMPORT_LINEN, "use boxes, or a model's init and apply")


def test_only_introspection_reads_frames_and_closures_of_other_libraries():
    found = {path.stem: reads for path in FILES if (reads := FOREIGN.findall(path.read_text()))}
    assert found.keys() == {"introspection"}, found


def test_only_designated_modules_import_flax_nnx():
    assert_imported_by("flax.nnx", IMPORT_NNX, "use a model's init and apply")


def who_imports(name):
    """Returns the names of files that import from a module."""
    return {path.stem for path in FILES if any(i.startswith(name) for i in names_of(path))}


def test_package_init_imports_only_the_quiet_cuda_plugin_loader():
    names = list(names_imported((PACKAGE / "__init__.py").read_text()))
    assert [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names] == [
        "xlstm_jax.quiet_import.load_cuda_plugin_quietly"
    ]


def test_command_line_example_imports_only_public_names():
    names = [name for name in names_imported(EXAMPLE.read_text()) if name.startswith("xlstm_jax")]
    assert names == ["xlstm_jax.distributed.shard_module_params", "xlstm_jax.forecast.training.Workload"]
