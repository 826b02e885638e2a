"""Tests of private names of JAX and Flax: one file, each with the expected behaviour, and bounded releases.

If a new release removes a name or changes its behaviour, the failing test gives the name, and its message the release:
the release of the environment; the last release with the name is the upper bound for setup.cfg.
"""

import ast
import configparser
import inspect
import re
import subprocess
import sys
import threading

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from tests.house.test_docs import ROOT
from tests.house.test_layers import FILES, PACKAGE
from tests.support import mesh_of
from xlstm_jax import private_names as names

RELEASE = f"JAX {jax.__version__}, Flax {flax.__version__}"
NO_PROMISE = re.compile(r"(jax|flax|optax|orbax)(\.\w+)*\._\w+|jax\.(extend|interpreters)\b")
DOCUMENTED = {"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"}  # by Python, and so public
THE_FILE = PACKAGE / "private_names.py"


def imports_without_promise(tree):
    for node in ast.walk(tree):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (
            f"{module}.{alias.name}"
            for module in modules
            for alias in node.names
            if NO_PROMISE.match(f"{module}.{alias.name}")
        )


def names_of_others(tree, own):
    """Yields attributes with one leading ``_`` that no file of the library defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and node.attr not in own | DOCUMENTED:
            yield node.attr


def defined(tree):
    """Yields the names that the library defines: functions, fields, and assigned attributes and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def test_private_names_of_jax_and_flax_are_used_in_a_single_file():
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    own = {name for tree in trees.values() for name in defined(tree)}
    found = {
        str(path.relative_to(PACKAGE)): list(others)
        for path, tree in trees.items()
        if path != THE_FILE and (others := {*imports_without_promise(tree), *names_of_others(tree, own)})
    }
    assert not found
    assert len(list(imports_without_promise(trees[THE_FILE]))) >= 10  # guard: the search finds names
    assert {"_global_interceptor_stack", "_register_atexit"} <= set(names_of_others(trees[THE_FILE], own))


def test_version_bounds_of_setup_cfg_equal_the_bounds_in_the_error_message():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = dict(line.split(" ", 1) for line in config["options"]["install_requires"].split("\n") if " " in line)
    text = THE_FILE.read_text()
    for package, installed in (("jax", jax.__version__), ("flax", flax.__version__)):
        assert f"'{package}{wanted[package].replace(' ', '')}'" in text
        low, high = re.findall(r"[\d.]+", wanted[package])
        assert as_numbers(low) <= as_numbers(installed) < as_numbers(high), package


def as_numbers(version):
    return [int(part) for part in version.split(".")[:3]]


WITHOUT = """
import jax, {module} as module
del module.{name}
try:
    import xlstm_jax.distributed
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "module, name",
    [("jax._src.config", "_check_vma"), ("flax.linen.module", "_global_interceptor_stack")],
    ids=["JAX", "Flax"],
)
def test_import_error_for_a_missing_private_name_states_both_versions(module, name):
    code = WITHOUT.format(module=module, name=name)
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert name in said and jax.__version__ in said and flax.__version__ in said
    assert "pip install 'jax>=" in said


# ----------------------------------------------------------------------------- behaviour of each name in this release


@pytest.mark.parametrize("check_vma", [True, False])
def test_types_are_checked_reads_and_switches_check_vma(check_vma):
    seen = []

    def body(x):
        seen.append(names.types_are_checked.value)
        with names.types_are_checked(False):
            seen.append(names.types_are_checked.value)
        return x

    spec = jax.P("fsdp")
    mapped = jax.shard_map(body, mesh=mesh_of(1, 8), in_specs=spec, out_specs=spec, check_vma=check_vma)
    jax.eval_shape(mapped, jnp.ones(8))
    assert seen == [check_vma, False], RELEASE


def test_traceback_in_locations_limit_leaves_no_frames_in_a_program():
    def text():
        lowered = jax.jit(lambda x: jnp.sin(x) * 2).lower(jnp.ones(4))
        return lowered.as_text(debug_info=True)

    assert __file__.rsplit("/", 1)[1] in text()
    with names.traceback_in_locations_limit(0):
        assert __file__.rsplit("/", 1)[1] not in text(), RELEASE


def test_jax_distributed_job_has_the_used_fields_and_client_methods():
    fields = {"client", "coordinator_address", "num_processes", "process_id"}
    assert not [field for field in sorted(fields) if not hasattr(names.job, field)], RELEASE
    client = jax._src.lib._jax.DistributedRuntimeClient
    methods = "key_value_set key_value_increment blocking_key_value_get key_value_dir_get key_value_delete".split()
    assert not [method for method in methods if not hasattr(client, method)], RELEASE


def test_cluster_env_auto_detect_takes_six_parameters():
    detect = names.ClusterEnv.auto_detect_unset_distributed_params
    assert len(inspect.signature(detect).parameters) == 6, RELEASE


def test_cudnn_attention_module_has_the_overridden_device_checks():
    asked = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
    assert not [name for name in asked if not callable(getattr(names.cudnn_attention, name, None))], RELEASE
    waiting = {primitive.name for primitive in names.dispatch.prim_requires_devices_during_lowering}
    assert any(name.startswith("dot_product_att") for name in waiting), RELEASE


def test_linen_callers_and_interceptors_list_running_modules_and_interceptors():
    seen = []

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen.append(([type(one).__name__ for one in names.linen_callers() if one], list(names.linen_interceptors)))
            return nn.Dense(3)(x)

    def watch(method, args, kwargs, context):
        return method(*args, **kwargs)

    with nn.intercept_methods(watch):
        jax.eval_shape(Outer().init, jax.random.key(0), jnp.ones(3))
    assert seen == [(["Outer"], [watch])], RELEASE
    assert not list(names.linen_interceptors)


def test_in_shardings_of_returns_the_in_shardings_of_jit():
    mesh = mesh_of(1, 8)
    split, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("fsdp",), ()))
    traced = jax.jit(lambda x, y: (x, y), in_shardings=(split, whole)).trace(jnp.ones(8), jnp.ones(3))
    assert names.in_shardings_of(traced) == (split, whole), RELEASE


def test_register_atexit_functions_run_before_python_joins_threads():
    assert names.register_atexit is threading._register_atexit
    code = "import threading; threading._register_atexit(print, 'first'); threading.Thread(target=print).start()"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["first"]


def test_jaxpr_classes_support_reading_and_rebuilding_programs():
    """The classes read a program, its second equation runs as a program by itself, and nested programs are found."""
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) * 2.0)(jnp.float32(1))
    jaxpr = closed.jaxpr
    assert isinstance(jaxpr, names.core.Jaxpr), RELEASE
    assert [type(eqn) for eqn in jaxpr.eqns] == [names.core.JaxprEqn] * 2, RELEASE
    product = jaxpr.eqns[1]
    assert product.primitive is names.mul_p, RELEASE
    assert [type(atom) for atom in product.invars] == [names.core.Var, names.core.Literal], RELEASE
    assert issubclass(names.core.DropVar, names.core.Var), RELEASE  # a result that no equation reads
    part = jaxpr.replace(constvars=[], invars=product.invars[:1], outvars=product.outvars, eqns=[product])
    doubled = names.core.jaxpr_as_fun(closed.replace(jaxpr=part, consts=[]))
    assert doubled(jnp.float32(3)) == [6], RELEASE
    jitted = jax.make_jaxpr(jax.jit(jnp.sin))(jnp.float32(1)).jaxpr.eqns[0]
    nested = [[eqn.primitive.name for eqn in inner.eqns] for inner in names.core.jaxprs_in_params(jitted.params)]
    assert nested == [["sin"]], RELEASE
    assert callable(names.mlir.register_lowering) and callable(names.mlir.lower_fun), RELEASE
    assert callable(names.batching.primitive_batchers.__setitem__), RELEASE
    assert callable(names.ad.deflinear2), RELEASE


def test_batch_tracer_is_the_class_of_arrays_under_vmap_and_of_no_others():
    seen = []
    jax.vmap(lambda x, y: seen.extend([x, y]), (0, None))(jnp.ones(2), 1.0)
    jax.jit(seen.append)(1.0)
    assert [isinstance(x, names.BatchTracer) for x in seen] == [True, False, False], RELEASE


def test_define_prng_impl_takes_the_used_parameters():
    takes = inspect.signature(names.define_prng_impl).parameters
    assert {"key_shape", "seed", "split", "random_bits", "fold_in", "name", "tag"} <= set(takes), RELEASE


def test_orbax_json_handler_saves_by_the_overridden_save_fn():
    ocp = pytest.importorskip("orbax.checkpoint")
    assert inspect.iscoroutinefunction(ocp.JsonCheckpointHandler._save_fn), "orbax has changed a private name"
