"""Errors of forecasts and of the command xlstm-jax; nothing is compiled for a topology."""

import sys
import tempfile
import types
import warnings
from functools import cache
from pathlib import Path

import optax

import xlstm_jax
from tests.errors.shared import AXES, DeviceMeshManager, P, create, jax, jnp, mean_loss, mesh_of, nn
from tests.errors.table import Section
from xlstm_jax.accelerators import compiler_options, resolved, resolved_on
from xlstm_jax.cli import arguments, commands
from xlstm_jax.cli.factory import FactoryError, load_factory
from xlstm_jax.distributed.plan import ShardingPlan, plan_sharding
from xlstm_jax.forecast import Forecast, forecast
from xlstm_jax.forecast.compiling.compile import CompileError
from xlstm_jax.forecast.compiling.report_cache import ReportCache
from xlstm_jax.forecast.cost.memory import read_memory
from xlstm_jax.forecast.hardware.topologies import parse_topology
from xlstm_jax.forecast.hlo.device_groups import replica_groups
from xlstm_jax.forecast.hlo.instruction import parse_instruction
from xlstm_jax.forecast.hlo.program import parse
from xlstm_jax.forecast.training import Workload, dispatch, fit, lint
from xlstm_jax.forecast.training.linting.lint import raise_if
from xlstm_jax.forecast.training.model_axes import model_meshes

forecasts, command, imports, wordings = map(
    Section, ["Forecast, fit and lint", "The command xlstm-jax", "Imports", "Forecast, fit and lint"]
)
X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def workload(batch=X, **options):
    return Workload(
        nn.Dense(8), optax.sgd(1e-3), batch, lambda p, apply_fn, x, rng: apply_fn({"params": p}, x).mean(), **options
    )


def built(mesh, topology=None, **options):
    """Returns a forecast of a step on a mesh."""

    def call():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            step, args = workload().build_step(mesh)
        forecast(step, *args, topology=topology, **options)

    return call


def two_meshes():
    shards = [jax.NamedSharding(mesh, P(AXES)) for mesh in (mesh_of(2, 4), mesh_of(4, 2))]
    forecast(jax.jit(lambda x, y: (x, y)), *[jax.ShapeDtypeStruct((8,), jnp.float32, sharding=one) for one in shards])


def without_mesh(topology=None):
    body = jax.shard_map(lambda x: x + 1, mesh=mesh_of(2, 4), in_specs=P(AXES), out_specs=P(AXES))
    return lambda: forecast(jax.jit(body), jax.ShapeDtypeStruct((64,), jnp.float32), topology=topology)


def refused(options):
    def call():
        forecast(jax.jit(lambda x: x + 1), jnp.ones(3), compiler_options=options)

    return call


def broken(options):
    return {}["missing"]


def unused(options):
    raise AssertionError


def fitted(topology="v5e:2x2", *args, build=unused, **options):
    return lambda: fit(build, topology, *args, **options)


@cache
def small():
    """Returns a forecast on the available devices and a plan."""
    mesh = create({"fsdp": 2}, jax.devices()[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        step, args = workload().build_step(mesh)
    return forecast(step, *args), plan_sharding(nn.Dense(8), {"fsdp": 2}, X)


def linted(**options):
    def call():
        found, plan = small()
        lint(found, options.pop("plan", plan), **options)

    return call


def damaged():
    with tempfile.TemporaryDirectory() as folder:
        kept = ReportCache(Path(folder) / "kept")
        kept.write("0" * 64, {"hlo": "text"})
        (entry,) = kept.folder.iterdir()
        entry.write_bytes(entry.read_bytes()[:-1])
        kept.read("0" * 64)


def module(**names):
    """Makes an importable module ``of_errors``."""
    made = types.ModuleType("of_errors")
    vars(made).update(names)
    sys.modules["of_errors"] = made


def factory(function, **chosen):
    def call():
        module(training=function)
        load_factory("of_errors:training").workload({"fsdp": 2}, chosen)

    return call


def passes_on(axis_name=None, **sharding):
    return mean_loss(**sharding)


def written(text):
    """Returns a call that loads a factory from a module with this text."""

    def call():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "written_for_errors.py").write_text(text)
            sys.path.insert(0, folder)
            try:
                load_factory("written_for_errors:training")
            finally:
                sys.path.remove(folder)
                sys.modules.pop("written_for_errors", None)

    return call


ASSIGNMENT, RANGES = "BufferAssignment:\n", "HloLiveRange"
PLAN, REPORT = ("a plan", ShardingPlan.from_json, 3), ("a forecast", Forecast.from_json, 2)
NO_PLANS = [
    ("deep", "[" * 100_000, "this is not …, because it is not JSON"),
    ("empty", "", "this is not …, because it is not JSON"),
    ("long-number", '{"format": ' + "9" * 5000 + "}", "this is not …, because it is not JSON"),
    ("no-fields", '{"format": NUMBER}', "this is not … as the library writes it"),
    ("other-types", '{"format": NUMBER, "leaves": [], "unknown_loops": 3}', "this is not … as the library writes it"),
]
ROWS = [
    # ----- topologies
    *[
        forecasts(
            f"topology-{name or 'blank'}",
            lambda name=name: parse_topology(name),
            ValueError,
            "topology=…",
            "is not <chip>:<shape> with a chip among v4, v5e, v5p, v6e, tpu7x (TPUs), a100, h100, h200, b200, gb200, "
            "b300, gb300 (GPUs)",
            "'v5e:16x16'",
        )
        for name in ["v5e", "v5e-256", "v7:2x2", "v100:1x8", "h100", "h100:32*8", "", "v5e:16x16 "]
    ],
    *[
        forecasts(
            f"topology-{name}",
            lambda name=name: parse_topology(name),
            ValueError,
            "topology=…",
            "no such slice of v",
            "There are 1x1, 2x2, ",
        )
        for name in ["v5e:3x3", "v5e:16x32", "v6e:4x4x4", "v5e:0x0"]
    ],
    *[
        forecasts(
            f"topology-{name}",
            lambda name=name: parse_topology(name),
            ValueError,
            "topology=…",
            "no such slice of v",
            "There are 2x2x1, ",
            "multiples of 4 ",
            " as 4x4x8",
        )
        for name in ["v5p:4x4", "v5p:8x4x4", "v4:16x16x20", "v5p:4x4x6", "v4:0x4x4"]
    ],
    *[
        forecasts(f"topology-{name}", lambda name=name: parse_topology(name), ValueError, "topology=…", says)
        for name, says in [
            ("h100:0x8", "'h100:0x8' is not hosts x GPUs of each, "),
            ("h200:4x0", "NVLink joins 1 to 8 h200"),
            ("b200:2x16", "NVLink joins 1 to 8 b200. For 4 hosts"),
            ("a100:2x2x2", "is not hosts x GPUs of each"),
            ("gb200:2x80", "is not NVLink domains x GPUs of each, of which NVLink joins 1 to 72 gb200"),
        ]
    ],
    # ----- the step
    forecasts(
        "forecast-no-jit",
        lambda: forecast(lambda x: x, 1.0),
        TypeError,
        "step must be a jax.jit function",
        "pass jax.jit(step)",
    ),
    forecasts(
        "forecast-mesh-of-another-size",
        built({"dp": 2, "fsdp": 4}, "v5e:4x4"),
        ValueError,
        "the step's mesh",
        "mesh {'dp': 2, 'fsdp': 4} has 8 devices, but topology='v5e:4x4' has 16",
    ),
    forecasts(
        "forecast-topology",
        built({"dp": 2, "fsdp": 4}, "v9:4x4"),
        ValueError,
        "topology=…",
        "topology='v9:4x4' is not <chip>:<shape>",
    ),
    forecasts(
        "forecast-another-mesh",
        built(mesh_of(2, 4), mesh_of(8, 1)),
        ValueError,
        "topology is the mesh",
        "is the mesh {'dp': 8, 'fsdp': 1}, but the arguments lie on {'dp': 2",
    ),
    forecasts(
        "forecast-two-meshes",
        two_meshes,
        ValueError,
        "argument … lies on the mesh",
        "but argument 1 on {'dp': 4, 'fsdp': 2}",
    ),
    forecasts(
        "forecast-no-mesh",
        without_mesh(),
        ValueError,
        "the step runs on",
        "runs on 8 devices, but its arguments lie on no mesh. Give ",
        "NamedShardings",
    ),
    forecasts(
        "forecast-no-mesh-of-a-topology",
        without_mesh("v5e:2x4"),
        ValueError,
        "topology=…",
        "'v5e:2x4' has 8 devices, but the arguments lie on no mesh. Give",
    ),
    forecasts(
        "forecast-no-devices",
        built({"dp": 2, "fsdp": 4}),
        ValueError,
        "the arguments lie on the abstract mesh",
        "abstract mesh {'dp': 2, 'fsdp': 4}, which has no devices. Give a topology",
    ),
    forecasts(
        "forecast-option",
        refused({"xla_gpu_no_such_option": True}),
        CompileError,
        "the compiler refuses the step",
        "xla_gpu_no_such_option",
    ),
    forecasts(
        "forecast-batch-of-two",
        lambda: workload(
            {"tokens": jax.ShapeDtypeStruct((8, 4), jnp.int32), "weight": jax.ShapeDtypeStruct((8,), jnp.float32)}
        ).build_step({"fsdp": 8}),
        ValueError,
        "the batch has the leaves",
        "leaves ['tokens', 'weight']: which of them does model.init take?",
    ),
    # ----- options of compilers
    *[
        forecasts(
            f"options-of-{kind or 'nothing'}".replace(" ", "-"),
            lambda kind=kind: compiler_options(kind),
            ValueError,
            "device_kind=…",
            f"device_kind='{kind}': no options are known for it, but for 'TPU v5', ",
            "'NVIDIA ...', 'cpu'. Leave",
        )
        for kind in ["TPU v4", "H100", "v5e", ""]
    ],
    forecasts(
        "options-as-text", lambda: resolved("best", "cpu"), ValueError, "compiler_options=…", "compiler_options='best'"
    ),
    forecasts(
        "options-chosen-by",
        lambda: compiler_options("NVIDIA H100", chosen_by="me"),
        ValueError,
        "chosen_by=…",
        "chosen_by='me': pass 'measurement', as others measured, or 'forecast'",
    ),
    forecasts(
        "options-without-devices",
        lambda: resolved_on(DeviceMeshManager.create_abstract_mesh({"fsdp": 8}), "auto"),
        ValueError,
        "compiler_options=…",
        "this mesh is abstract",
    ),
    # ----- fit
    forecasts(
        "fit-topology", fitted("v5e:3x3"), ValueError, "topology=…", "topology='v5e:3x3': there is no such slice"
    ),
    *[
        forecasts(
            f"fit-budget-{name}",
            fitted("v5e:2x2", bad),
            ValueError,
            "budget_bytes=…",
            f"budget_bytes={bad!r}: nothing fits",
            "None for all that v5e has, ",
        )
        for name, bad in [("zero", 0), ("negative", -1), ("nan", float("nan")), ("text", "16GiB")]
    ],
    forecasts("fit-jobs", fitted(jobs=0), ValueError, "jobs=…", "jobs=0: at least 1 must run at once"),
    forecasts("fit-no-meshes", fitted(meshes=[]), ValueError, "meshes is empty"),
    forecasts(
        "fit-meshes-and-axes",
        fitted(meshes=[{"fsdp": 4}], model_axes={"tp": 2}),
        ValueError,
        "meshes and model_axes both say",
    ),
    forecasts(
        "fit-axes-of-fsdp",
        lambda: list(model_meshes(parse_topology("v5e:2x2"), {"fsdp": 2})),
        ValueError,
        "model_axes=…",
        "'fsdp' must not begin with 'fsdp'",
    ),
    forecasts(
        "fit-first-fails",
        fitted(build=broken, meshes=[{"fsdp": 4}]),
        ValueError,
        "no forecast of the first options",
        "KeyError: 'missing'",
        "errors/forecast.py, line",
    ),
    forecasts(
        "fit-none-can-be-built",
        fitted(build=lambda _: (jax.jit(lambda x: x / (1 // 0)), (1.0,)), model_axes={"tp": 1}),
        ValueError,
        "no step can be built on any mesh",
        "ZeroDivisionError",
    ),
    # ----- lint
    forecasts(
        "lint-mesh",
        linted(plan=plan_sharding(nn.Dense(8), {"fsdp": 4}, X)),
        ValueError,
        "the forecast is of the mesh",
        "mesh {'fsdp': 2}, the plan of {'fsdp': 4}",
    ),
    forecasts(
        "lint-minibatches",
        linted(num_minibatches=0),
        ValueError,
        "num_minibatches=… must be",
        "num_minibatches=0 must be 1 or more",
    ),
    forecasts(
        "lint-rule",
        lambda: raise_if([], rules=["kept"]),
        ValueError,
        "rules: there is no rule",
        "no rule 'kept'; there are repeated-gather, wide-gather",
    ),
    forecasts(
        "dispatch-imbalance",
        lambda: dispatch(*small(), imbalance=0.5),
        ValueError,
        "imbalance=…: the busiest device",
        "imbalance=0.5",
    ),
    forecasts("cache-damaged", damaged, UserWarning, "a compiled report was not read from", "does not have its digest"),
    # ----- what is read
    forecasts(
        "json-format",
        lambda: Forecast.from_json('{"format": 1}'),
        ValueError,
        "this is no forecast of format",
        "no forecast of format 2; make it anew",
    ),
    *[
        forecasts(
            f"json-{kind[0][2:]}-{name}",
            lambda kind=kind, text=text: kind[1](text.replace("NUMBER", str(kind[2]))),
            ValueError,
            words,
            f"this is not {kind[0]}",
        )
        for kind in (PLAN, REPORT)
        for name, text, words in NO_PLANS
    ],
    forecasts(
        "memory-no-assignment",
        lambda: read_memory("HloModule jit_f", "", {}),
        ValueError,
        "This is no buffer assignment",
        "HloModule jit_f",
    ),
    forecasts(
        "hlo-dtype",
        lambda: parse_instruction("  %x = q7[2]{0} copy(%y)").shapes,
        ValueError,
        "HLO text holds",
        "the dtype 'q7'",
    ),
    forecasts(
        "hlo-groups",
        lambda: replica_groups("channel_id=1, replica_groups=<everyone>, dimensions={0}"),
        ValueError,
        "these groups of devices",
        "form that is not known here: 'replica_groups=<everyone>",
    ),
    forecasts("hlo-no-opcode", lambda: parse_instruction("  %x = f32[2]{0} ???"), ValueError, "no opcode in"),
    forecasts("hlo-open", lambda: parse_instruction("  %x = f32[2]{0} copy(%y"), ValueError, "a parenthesis is left"),
    forecasts("hlo-stable", lambda: parse("module @jit_f {}"), ValueError, "not the text of a compiled"),
    forecasts(
        "hlo-not-scheduled",
        lambda: parse("HloModule jit_f\n\nENTRY %main {\n}\n"),
        ValueError,
        "not the text of a compiled",
        "is_scheduled=true",
    ),
    forecasts(
        "hlo-no-entry", lambda: parse("HloModule jit_f, is_scheduled=true\n"), ValueError, "…: the text has no ENTRY"
    ),
    forecasts(
        "hlo-cut-off",
        lambda: parse(
            "HloModule jit_f, is_scheduled=true\n\nENTRY %main (x: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n"
        ),
        ValueError,
        "the HLO text ends",
        "inside of the computation 'main'",
    ),
    # ----- the command
    *[
        command(
            f"command-mesh-{i}",
            lambda text=text: arguments.parse_mesh(text),
            arguments.argparse.ArgumentTypeError,
            "… is not axis=size",
        )
        for i, text in enumerate(["", "fsdp", "fsdp=", "fsdp=0", "fsdp=-2", "fsdp=2,fsdp=4", "dp=-1,fsdp=-1", "a b=2"])
    ],
    *[
        command(
            f"command-bytes-{i}",
            lambda text=text: arguments.parse_bytes(text),
            arguments.argparse.ArgumentTypeError,
            "… is no number",
            "write 14GiB",
        )
        for i, text in enumerate(["", "GiB", "-1", "14 GiBs", "14iB", "0"])
    ],
    *[
        command(
            f"command-setting-{i}",
            lambda text=text: arguments.parse_setting(text),
            arguments.argparse.ArgumentTypeError,
            "… is not name=value",
            "with a Python literal",
        )
        for i, text in enumerate(["remat=true", "remat", "x=open('f')"])
    ],
    command(
        "command-fraction",
        lambda: arguments.parse_fraction("2"),
        arguments.argparse.ArgumentTypeError,
        "… is no number",
        "write 0.02 for 2%",
    ),
    command(
        "command-count",
        lambda: arguments.parse_count("0"),
        arguments.argparse.ArgumentTypeError,
        "… is no positive number",
    ),
    command(
        "command-parser",
        lambda: arguments.Parser("xlstm-jax").parse_args(["--nope"]),
        ValueError,
        "…; see … --help",
        "--nope",
    ),
    command(
        "factory-a-path",
        lambda: load_factory("here/train.py:training"),
        FactoryError,
        "--factory",
        "is a path, not package.module:function",
    ),
    command(
        "factory-no-function-named",
        lambda: load_factory("train"),
        FactoryError,
        "--factory",
        "is not package.module:function",
    ),
    command(
        "factory-no-module",
        lambda: load_factory("no_such_module_here:training"),
        FactoryError,
        "--factory",
        "there is no module 'no_such_module_here'",
    ),
    command(
        "factory-no-function",
        lambda: load_factory("tests.support:training"),
        FactoryError,
        "--factory",
        "tests.support has no function 'training'",
    ),
    command("factory-raises", factory(lambda mesh=1: 1 // 0), FactoryError, "… raised …", "ZeroDivisionError"),
    command("factory-returns", factory(lambda: 3), FactoryError, "… returned …; return", "returned int; return"),
    command(
        "factory-no-argument",
        factory(lambda: 3, layers=2),
        FactoryError,
        "--set …=...: … has no argument",
        "--set layers=...",
    ),
    command(
        "factory-passes-on",
        factory(passes_on, layers=2),
        FactoryError,
        "--set …=...: … has no argument",
        "and passes others on, as to shard_modules, which has axis_name",
    ),
    command(
        "factory-import-raises",
        written("1 / 0"),
        FactoryError,
        "--factory",
        "importing written_for_errors raised ZeroDivisionError",
    ),
    command(
        "factory-import-misses",
        written("import no_such_package_here"),
        FactoryError,
        "--factory",
        "is it installed here?",
    ),
    command(
        "command-lint-rule",
        lambda: commands.run_lint(types.SimpleNamespace(rules=["kept"]), print),
        ValueError,
        "--rules: there is no rule",
        "no rule 'kept'",
    ),
    command(
        "command-diff-missing",
        lambda: commands._read_plan("no/such/plan.json"),
        ValueError,
        "--diff …",
        "No such file or directory",
    ),
    command(
        "command-diff-no-plan",
        lambda: commands._read_plan(__file__),
        ValueError,
        "--diff …",
        "is not what `xlstm-jax plan --json` writes",
    ),
    command(
        "command-no-axis-of-fsdp",
        lambda: commands._check_shard_axes({"tp": 2}, load_factory("xlstm_jax.cli.example:training"), {}),
        ValueError,
        "--mesh …",
        "no axis begins with fsdp",
    ),
    command(
        "command-no-mesh",
        lambda: commands._mesh(types.SimpleNamespace(mesh=None, topology=None), None),
        ValueError,
        "how many devices?",
    ),
    command(
        "command-wild-mesh",
        lambda: commands._mesh(types.SimpleNamespace(mesh={"fsdp": -1}, topology=None), None),
        ValueError,
        "--mesh …",
        "-1 stands for the rest of a topology",
    ),
    command(
        "command-mesh-of-another-size",
        lambda: commands._filled({"fsdp": 3}, parse_topology("v5e:2x2")),
        ValueError,
        "--mesh …",
        "takes 3 devices, but v5e:2x2 has 4",
    ),
    # ----- imports
    imports(
        "import-unknown",
        lambda: xlstm_jax.hardware,
        AttributeError,
        "module … has no attribute",
        "has no attribute 'hardware'",
    ),
]
