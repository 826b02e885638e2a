"""The command line: what each command says, in which form, with which exit code; and that errors are one line.

Most run in this process through ``main``, on eight simulated devices; a few run the installed script as a user would.
"""

import configparser
import dataclasses
import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import xlstm_jax
from tests.forecast.test_planner import Job
from tests.support import in_case
from xlstm_jax.cli import arguments, commands, doctor, self_test
from xlstm_jax.cli import command_line as cli
from xlstm_jax.cli.factory import VARIED, load_factory, settings_of
from xlstm_jax.cli.self_test import Check
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.distributed.plan.sharding_plan import ShardingPlan
from xlstm_jax.forecast import Forecast, Range
from xlstm_jax.forecast.compiling import compile_process
from xlstm_jax.forecast.cost.host import HostTraffic
from xlstm_jax.forecast.training import Workload, fitting
from xlstm_jax.forecast.training.fitting import Options
from xlstm_jax.formatting import how_to_install

ROOT = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).parent / "xlstm-jax"
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
ENVIRONMENT["TERM"] = "xterm"

TRAINING = """
from functools import partial

import jax, jax.numpy as jnp, optax
from flax import linen as nn
from xlstm_jax.distributed import shard_module_params, shard_modules
from xlstm_jax.forecast.training import Workload
from xlstm_jax.distributed.model_parallel import ColumnDense, RowDense

print("the user's module prints")
CALLS = []


class Model(nn.Module):
    axes: tuple
    threshold: int
    remat: bool
    width: int

    @nn.compact
    def __call__(self, x):
        Dense = partial(shard_module_params, axis_name=self.axes, min_weight_size=self.threshold)(nn.Dense)
        Dense = nn.remat(Dense) if self.remat else Dense
        return Dense(128, name="down")(nn.gelu(Dense(self.width, name="up")(x)))


def loss_fn(params, apply_fn, batch, rng):
    return jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)


def training(*, shard_axes=("fsdp",), min_weight_size=1024, remat=False, devices=8, width=256):
    CALLS.append(dict(shard_axes=shard_axes, min_weight_size=min_weight_size, remat=remat, devices=devices))
    rows = jax.ShapeDtypeStruct((2 * devices, 128), jnp.float32)
    batch = {"x": rows, "y": rows}
    return Workload(Model(shard_axes, min_weight_size, remat, width), optax.adamw(1e-3), batch, loss_fn, inputs=(rows,))


def fixed():
    CALLS.append({})
    return training()


def passes_on(devices=8, remat=False, **sharding):
    CALLS.append(dict(sharding, devices=devices, remat=remat))
    rows = jax.ShapeDtypeStruct((2 * devices, 128), jnp.float32)
    layers = nn.Sequential([nn.Dense(256), nn.gelu, nn.Dense(128)])
    model = shard_modules(layers, nn.Dense, **{"min_weight_size": 1024} | sharding)
    return Workload(model, optax.adamw(1e-3), {"x": rows, "y": rows}, loss_fn, inputs=(rows,))


def over_tp(axis_name, min_weight_size=16, **sharding):
    rows = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    model = nn.Sequential([ColumnDense(256), nn.gelu, RowDense(32)])
    model = shard_modules(model, (ColumnDense, RowDense), axis_name, min_weight_size, **sharding)
    batch, spec = {"x": rows, "y": rows}, jax.P(axis_name)
    return Workload(model, optax.adamw(1e-3), batch, loss_fn, inputs=(rows,), batch_spec=spec)


def plain():
    rows = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    return Workload(nn.Dense(128), optax.adamw(1e-3), {"x": rows, "y": rows}, loss_fn, inputs=(rows,))


def broken():
    return {}["missing"]


def wrong():
    return 3


def ends_the_process():
    raise SystemExit(0)


def needs(size):
    return training()


def fails_in_the_loss():
    def loss_fn(params, apply_fn, batch, rng):
        raise RuntimeError("in the loss")
    base = training()
    return Workload(base.model, base.tx, base.batch, loss_fn, inputs=base.inputs)


class Crooked(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ jnp.zeros((7, 128))


def of_a_wrong_shape():
    base = training()
    return Workload(Crooked(), base.tx, base.batch, loss_fn, inputs=base.inputs)


def of_a_wrong_value():
    def loss_fn(params, apply_fn, batch, rng):
        raise ValueError("my own complaint")
    base = training()
    return Workload(base.model, base.tx, base.batch, loss_fn, inputs=base.inputs)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("project")
    (path / "tiny_training.py").write_text(TRAINING)
    (path / "not_python.py").write_text("this is no Python\n")
    (path / "a_script.py").write_text("import sys\nsys.exit(0)\n")
    (path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    return path


@pytest.fixture
def command(folder, monkeypatch, capsys):
    """``command("plan --mesh fsdp=8") -> (exit code, stdout, stderr)``, in the folder that holds the factory."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))

    def run(line, factory="tiny_training:training"):
        words = shlex.split(line)
        code = cli.main([words[0], *(["--factory", factory] if factory else []), *words[1:]])
        return code, *capsys.readouterr()

    return run


def script(line, cwd=ROOT, timeout=300):
    """The installed script as a user runs it."""
    words = shlex.split(line)
    assert words[0] == "xlstm-jax" and SCRIPT.exists(), "install the package: pip install -e ."
    return subprocess.run(
        [SCRIPT, *words[1:]], cwd=cwd, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT
    )


# ----------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "text, want",
    [("dp=4,fsdp=64", {"dp": 4, "fsdp": 64}), ("fsdp=-1", {"fsdp": -1}), ("dp = 2, fsdp = 4", {"dp": 2, "fsdp": 4})],
)
def test_parse_mesh_reads_axis_names_and_sizes(text, want):
    assert arguments.parse_mesh(text) == want and list(arguments.parse_mesh(text)) == list(want)


@pytest.mark.parametrize(
    "text, want",
    [
        ("1024", 1024),
        ("14GiB", 14 * 2**30),
        ("14GB", 14 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("2k", 2000),
        ("7ti", 7 * 2**40),
    ],
)
def test_parse_bytes_reads_numbers_with_units(text, want):
    assert arguments.parse_bytes(text) == want


def test_parse_setting_accepts_literals_and_raises_for_other_text():
    assert arguments.parse_setting("axes=('a', 'b')") == ("axes", ("a", "b"))
    for text in ("remat=true", "remat", "x=open('f')"):
        with in_case(text=text), pytest.raises(ArgumentTypeError, match="is not name=value with a Python literal"):
            arguments.parse_setting(text)


# ---------------------------------------------------------------------------------------------------------- the factory


def test_factory_receives_only_declared_options(command):
    assert command("plan --mesh dp=2,fsdp_x=2,fsdp_y=2 --set remat=True")[0] == 0
    assert command("plan --mesh fsdp=8", "tiny_training:fixed")[0] == 0
    calls = sys.modules["tiny_training"].CALLS
    assert calls[-3] == {"shard_axes": ("fsdp_x", "fsdp_y"), "min_weight_size": 1024, "remat": True, "devices": 8}
    assert calls[-2] == {}


def test_set_option_overrides_the_default_factory_argument(command):
    code, out, _ = command("plan --mesh dp=2,fsdp=4 --set \"shard_axes=('dp',)\" --json")
    assert code == 0 and ShardingPlan.from_json(out).row("up/kernel").axes == ("dp",)


LONG = "9" * 400
SHAPE, VALUE = (
    f"(tiny_training.py, line {TRAINING[: TRAINING.index(text)].count(chr(10)) + 1}"
    for text in ("return x @ jnp.zeros", 'raise ValueError("my own')
)
# Of each error: the numbers or names that it must give, and the cure.
ERRORS = {
    "plan --mesh dp=4,fsdp=32 --topology v5e:16x16": ("training", "takes 128 devices, but v5e:16x16 has 256", "-1"),
    "plan --mesh dp=3,fsdp=-1 --topology v5e:2x4": ("training", "dp=3 does not divide 8", "1, 2, 4, 8 do"),
    "plan --mesh dp=3,x=2,fsdp=-1 --topology v5e:2x4": ("training", "dp*x = 6 does not divide 8", "1, 2, 4, 8 do"),
    "plan --mesh dp=3,fsdp=4 --topology v5e:2x4": ("training", "takes 12 devices", "as dp=-1,fsdp=4"),
    "plan --mesh dp=4,fspd=64": (
        "training",
        "no axis begins with fsdp",
        "as dp=4,fsdp=64, or pass --set \"shard_axes=('fspd',)\"",
    ),
    "forecast --mesh data=2,model=4": (
        "training",
        "would split nothing",
        '--set "shard_axes=()" for a replicated run',
    ),
    "lint --mesh data=8": ("training", "no axis begins with fsdp", "as fsdp=8"),
    "fit --topology v5e:2x4 --mesh fsdp=8 --model-axes tp=2": (
        "training",
        "meshes and model_axes both say",
        "pass one of them",
    ),
    "fit --topology v5e:2x4 --mesh data=8": ("training", "no axis begins with fsdp", "as fsdp=8"),
    "plan --mesh fsdp=-1": ("training", "-1 stands for the rest of a topology", "pass --topology"),
    "plan --set remat=True": ("training", "how many devices", "Pass --mesh"),
    "plan --mesh fsdp=8 --nonsense": ("training", "unrecognized arguments: --nonsense", "--help"),
    "plan --mesh fsdp": ("training", "argument --mesh: 'fsdp' is not axis=size", "as dp=4,fsdp=64"),
    "plan --mesh fsdp=8 --set layers=3": ("training", "has no argument of this name; it has shard_axes", "Declare it"),
    "plan --mesh fsdp=8 --set min_weight_sise=3": (
        "training",
        "it has shard_axes, min_weight_size, remat, devices, width",
        "Did you mean min_weight_size?",
    ),
    "plan --mesh fsdp=8 --set reshard_after=True": (
        "passes_on",
        "as to shard_modules, which has axis_name, min_weight_size",
        "Did you mean reshard_after_forward?",
    ),
    "plan --mesh fsdp=8 --set =3": ("training", "'=3' is not name=value", "layers=24"),
    "plan --mesh fsdp=8 --set width=1 --set width=2": ("training", "width was given before, as 1", "give it once"),
    "plan --mesh fsdp=8 --set nothing=1": ("passes_on", "has devices, remat, and passes others on", "Declare it"),
    "plan --mesh fsdp=8 --explain up/kernl": ("training", "nearest are", "up/kernel"),
    "plan --mesh fsdp=8 --diff tiny_training.py": (
        "training",
        "is not what `xlstm-jax plan --json` writes",
        "--json > ",
    ),
    "plan --mesh fsdp=8 --diff nowhere.json": ("training", "No such file", "plan ... --json > nowhere.json`"),
    "forecast --topology v9:2x2": ("training", "topology='v9:2x2'", "For 256 chips"),
    "forecast --mesh fsdp=8 --minibatches 0": ("training", "'0' is no positive number", "--help"),
    "forecast --mesh fsdp=8 --compiler-options all": ("training", "'all'", "auto"),
    "forecast --mesh fsdp=8 --minibatches 3": ("training", "num_minibatches=3", "16"),
    "lint --mesh fsdp=8 --rules exposed": ("training", "no rule 'exposed'", "exposed-collective"),
    "fit --budget 3": ("training", "required: --topology", "--help"),
    "plan --mesh fsdp=2": ("trainign", "has no function 'trainign'", "training"),
    "plan --mesh fsdp=4": ("broken", "broken() raised KeyError: 'missing'", "tiny_training.py, line"),
    "plan --mesh fsdp=8": ("wrong", "wrong() returned int", "return xlstm_jax.forecast.training.Workload"),
    "plan --mesh fsdp=1": ("needs", "missing 1 required positional argument: 'size'", "size"),
    "forecast --mesh fsdp=8": ("fails_in_the_loss", "RuntimeError: in the loss", "tiny_training.py, line"),
    "plan --mesh dp=1,fsdp=8": ("of_a_wrong_shape", "TypeError: ", f"{SHAPE}); --traceback"),
    "forecast --mesh dp=1,fsdp=8": ("of_a_wrong_shape", "TypeError: ", f"{SHAPE}); --traceback"),
    "lint --mesh dp=1,fsdp=8": ("of_a_wrong_value", "ValueError: my own complaint", f"{VALUE}); --traceback"),
    "fit --topology v5e:2x4": ("of_a_wrong_shape", "no forecast of the first options", f"{SHAPE})"),
    "fit --topology v5e:2x4 --budget 0.1": ("training", "budget_bytes=0", "None for all"),
    "plan --mesh dp=1,fsdp=2": ("ends_the_process", "SystemExit: 0 (tiny_training.py, line", "or return"),
    "plan --mesh fsdp=8 --diff deep.json": ("training", "maximum recursion depth", "--json > deep.json`"),
    "plan --mesh fsdp=8 --max-bytes-per-device nan": ("training", "'nan' is no number of bytes", "14GiB"),
    **{
        f"plan --mesh fsdp=8 --max-replicated-fraction={text}": ("training", f"{text!r} is no number", "0.02 for 2%")
        for text in ("nan", "inf", "-0.1", "2%")
    },
    f"plan --mesh fsdp={LONG}": ("training", "... 999", "sizes up to 1,000,000,000"),
    f"forecast --mesh fsdp=8 --minibatches {LONG}": ("training", "... 999", "up to 1,000,000,000"),
    f"plan --mesh fsdp=8 --max-bytes-per-device {LONG}": ("training", "... 999", "up to 8 EiB"),
    f"plan --mesh fsdp=8 --set width={'(' * 3000}": ("training", "... (((", "Python literal"),
}


@pytest.mark.parametrize("line", ERRORS)
def test_command_error_is_a_single_line_with_the_cure_and_exit_code_2(line, command):
    function, what, cure = ERRORS[line]
    code, out, err = command(line, f"tiny_training:{function}")
    err = re.sub(r"the user's module prints\n|xlstm-jax: \S+ has no argument for .*\n", "", err)
    assert (code, out) == (2, "")
    assert err.startswith("xlstm-jax: error: ") and err.count("\n") == 1 and what in err and cure in err
    assert len(err) < 600


@pytest.mark.parametrize(
    "factory, what",
    [
        ("nowhere:training", "no module 'nowhere'"),
        ("tiny_training", "is not package.module:function"),
        ("tiny_training.py:training", "Write tiny_training:training."),
        ("./tiny_training.py", "Write tiny_training:function."),
        ("some/where/train.py:training", "Write some.where.train:training."),
        ("../other/train.py:training", "Run the command in ../other, and write train:training."),
        ("not_python:f", "importing not_python raised SyntaxError"),
        ("a_script:f", "your code ended the process: SystemExit: 0 (a_script.py, line 2)"),
    ],
)
def test_unimportable_factory_gives_a_single_line_error_and_exit_code_2(factory, what, command):
    code, out, err = command("plan --mesh fsdp=8", factory)
    assert (code, out, err.count("\n")) == (2, "", 1) and what in err


def test_plan_accepts_a_shard_axis_of_another_name_and_forecast_notes_an_unwrapped_model(command):
    assert command("plan --mesh data=2,model=4 --set \"shard_axes=('model',)\"")[0] == 0
    code, _, err = command("forecast --mesh dp=2,fsdp=4", "tiny_training:plain")
    assert code == 0 and "no module is wrapped by shard_module_params, so nothing is split" in err
    assert "no module is wrapped" not in command("forecast --mesh dp=2,fsdp=4")[2]  # guard


@pytest.mark.parametrize(
    "batch, want",
    [
        ({"x": ((8, 4), jnp.int32), "y": ((8, 6), jnp.int32)}, 48),
        ({"x": ((8, 4, 3), jnp.int32), "y": ((8,), jnp.int32)}, 32),
        ({"x": ((2, 8, 4), jnp.uint16), "y": ((64, 64), jnp.float32)}, 16),
        ({"x": ((8, 64), jnp.float32), "y": ((8,), jnp.int32)}, 8),
        ({"x": ((), jnp.int32)}, 0),
    ],
    ids=["largest", "more dims", "floats do not count", "rows", "none"],
)
def test_workload_tokens_are_the_first_two_dims_of_the_largest_integer_leaf_or_num_tokens(batch, want):
    leaves = {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in batch.items()}
    workload = Workload(None, None, leaves, None)
    assert workload.tokens == want
    assert dataclasses.replace(workload, num_tokens=7).tokens == 7


def test_version_option_prints_the_package_version(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"xlstm-jax {xlstm_jax.__version__}\n"


def test_traceback_option_prints_the_traceback_of_an_error(command):
    code, _, err = command("plan --mesh fsdp=4 --traceback", "tiny_training:broken")
    assert code == 2 and 'return {}["missing"]' in err and err.splitlines()[-1].startswith("xlstm-jax: error: ")


def test_error_line_shortens_a_long_error_and_mentions_traceback():
    line = cli.error_line(ValueError("a" * 5000))
    assert len(line) < 1.1 * cli.MAX_ERROR and "--traceback shows all of it" in line


# -------------------------------------------------------------------------------------------------------------- plan


def test_plan_command_output_equals_plan_sharding(command, folder):
    code, out, err = command("plan --mesh dp=2,fsdp=4 --json")
    workload = load_factory("tiny_training:training").workload({"dp": 2, "fsdp": 4}, {})
    want = plan_sharding(workload.model, {"dp": 2, "fsdp": 4}, *workload.init_inputs, tx=workload.tx)
    assert code == 0 and ShardingPlan.from_json(out) == want
    assert want.row("up/kernel").parts == 4  # guard: there is something to plan
    code, out, err = command("plan --mesh dp=2,fsdp=4")
    assert (code, err) == (0, "") and "up/kernel"[-6:] in out and "Sharding plan: 8 devices (dp 2, fsdp 4)" in out


def test_offload_option_moves_optimizer_state_to_the_host_in_the_plan(command):
    plan = ShardingPlan.from_json(command("plan --mesh dp=2,fsdp=4 --json --offload")[1])
    without = ShardingPlan.from_json(command("plan --mesh dp=2,fsdp=4 --json")[1])
    assert plan.host.total > 0 == without.host.total and plan.bytes_per_device < without.bytes_per_device
    assert command("forecast --mesh dp=2,fsdp=4 --offload")[0] == 0


def test_default_mesh_of_plan_follows_topology_and_factory(command):
    staged = json.loads(command("plan --topology v5e:16x16 --json")[1])
    assert staged["axis_sizes"] == {"fsdp_x": 16, "fsdp_y": 16}
    flat = json.loads(command("plan --topology v5e:2x4 --json", "tiny_training:fixed")[1])
    assert flat["axis_sizes"] == {"fsdp": 8}
    filled = json.loads(command("plan --topology v5e:16x16 --mesh dp=4,fsdp=-1 --json")[1])
    assert filled["axis_sizes"] == {"dp": 4, "fsdp": 64}


def test_plan_explain_describes_the_sharding_of_a_leaf(command):
    code, out, _ = command("plan --mesh fsdp=8 --explain up/kernel")
    assert code == 0 and "is split along dim 1 over 'fsdp' into 8 shards" in " ".join(out.split())


@pytest.mark.parametrize(
    "limit, message",
    [("--max-replicated-fraction 0", "max_replicated_fraction=0"), ("--max-bytes-per-device 4KiB", "allows 4 KiB")],
    ids=["replicated fraction", "bytes"],
)
def test_plan_command_exits_with_1_if_a_limit_is_exceeded(limit, message, command):
    code, out, err = command(f"plan --mesh fsdp=8 {limit} --json")
    err = err.replace("the user's module prints\n", "")  # printed by the first import of the module in this process
    assert (code, err.count("\n")) == (1, 1) and message in err, err
    assert ShardingPlan.from_json(out).row("up/kernel").parts == 8
    code, _, err = command("plan --mesh fsdp=8 --max-replicated-fraction 0.5 --max-bytes-per-device 1GiB")
    assert code == 0, err


def test_plan_diff_lists_changed_leaves_and_exits_with_1(command, folder):
    (folder / "old.json").write_text(command("plan --mesh fsdp=8 --json")[1])
    code, out, _ = command("plan --mesh fsdp=8 --diff old.json")
    assert code == 0 and "No difference" in out
    code, out, err = command("plan --mesh fsdp=8 --set width=512 --diff old.json")
    assert code == 1 and "up/kernel:\n  shape: (128, 256) -> (128, 512)" in out and "differences from old.json" in err
    code, out, _ = command("plan --mesh fsdp=8 --set width=512 --diff old.json --json")
    assert code == 1 and "up/kernel" in {difference["path"] for difference in json.loads(out)}


# ---------------------------------------------------------------------------------------------------- forecast and lint


def test_forecast_command_without_topology_uses_simulated_cpu_devices(command):
    code, out, _ = command("forecast --mesh dp=2,fsdp=4 --minibatches 2 --json")
    found = Forecast.from_json(out)
    assert (code, found.platform, found.axis_sizes) == (0, "cpu", {"dp": 2, "fsdp": 4})
    gathers = [c for c in found.collectives if c.kind == "all-gather" and "up/kernel" in c.leaves]
    assert gathers and gathers[0].axes == ("fsdp",)
    assert "Compiled for CPU" in command("forecast --mesh dp=2,fsdp=4")[1]


def test_forecast_command_with_out_writes_a_png_picture(command, folder):
    assert command("forecast --mesh fsdp=8 --out picture.png")[0] == 0
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_lint_command_exits_with_1_for_findings_and_with_0_otherwise(command):
    assert command("lint --mesh fsdp=8")[:2] == (0, "No findings.\n")
    whole = "lint --mesh fsdp=8 --set width=4096 --set min_weight_size=1000000"
    code, out, err = command(f"{whole} --json")
    (finding,) = json.loads(out)
    assert code == 1 and finding["rule"] == "replicated-leaf" and finding["where"] == "down/kernel, up/kernel"
    assert "1 finding." in err
    code, out, _ = command(whole)
    assert code == 1 and "replicated-leaf" in out and "Lower min_weight_size" in " ".join(out.split())
    assert command(f"{whole} --rules wide-gather,hoisted-gather")[0] == 0


def test_lint_command_exits_with_1_for_a_model_without_wrapped_modules(command):
    code, _, err = command("lint --mesh fsdp=8", "tiny_training:plain")
    assert code == 1 and "no module is wrapped" in err


@pytest.mark.libtpu
def test_forecast_command_for_a_tpu_topology_reports_fit_and_step_time(command):
    code, out, _ = command("forecast --topology v5e:2x4 --json")
    found = Forecast.from_json(out)
    assert (code, found.platform, found.topology) == (0, "tpu", "v5e:2x4") and found.fits
    assert found.axis_sizes == {"fsdp_x": 2, "fsdp_y": 4} and found.wire_bytes > 0 and found.step_seconds > 0


@pytest.mark.cuda_plugin
def test_forecast_command_for_gpus_lays_a_mesh_axis_across_hosts(command):
    code, out, _ = command("forecast --topology h200:2x4 --json")
    found = Forecast.from_json(out)
    assert (code, found.platform, found.topology) == (0, "gpu", "h200:2x4") and found.fits
    assert found.axis_sizes == {"fsdp_host": 2, "fsdp_device": 4} and found.wire_bytes > 0
    _, out, _ = command("forecast --topology h200:2x4 --json --compiler-options auto")
    assert Forecast.from_json(out).collectives != found.collectives


@pytest.mark.libtpu
def test_forecast_and_lint_commands_share_the_cached_compilation(command, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XLSTM_JAX_CACHE_DIR", str(tmp_path / "kept"))
    line = "forecast --topology v5e:2x2 --json"
    _, compiled, err = command(line)
    assert f"compiled programs are stored in {tmp_path / 'kept'}; --no-cache stores nothing." in err
    # There is no compiler now, for those that have none to ask; the next is a process of its own.
    monkeypatch.setattr(compile_process.sys, "executable", "/bin/false")
    code, _, err = command("lint --topology v5e:2x2")
    assert code != 2 and f"the program had been compiled before and came from {tmp_path / 'kept'}; --no-cache" in err
    words = [SCRIPT, *shlex.split(f"{line} --factory tiny_training:training")]
    environment = dict(os.environ) | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == compiled and "had been compiled before" in done.stderr
    for other in (f"{line} --no-cache", f"{line} --minibatches 2", f"{line} --set width=512"):
        code, _, err = command(other)
        assert code == 2 and "the compiler's process ended with exit code 1" in err, other


FIT_ON_ONE_MESH = "fit --topology v5e:2x2 --mesh dp=2,fsdp=2"
STEP_BYTES, BYTES_TO_HOST = 2**20, 2**14  # with offload a step takes 1008 KiB in place of 1 MiB


@pytest.fixture
def forecasts_by_formula(monkeypatch):
    """Replaces the compiler of ``fit`` by a formula; returns a list that gets (topology, mesh) of each forecast.

    Steps are built and traced, and each takes ``STEP_BYTES``, less ``BYTES_TO_HOST`` if its moments are on the host.
    The third result is as from a cache, without a compile time. For a search with real bytes see
    forecast/test_planner.py.
    """
    asked = []

    def by_formula(call):
        asked.append((call.topology.name, call.axis_sizes))
        moments = jax.tree.leaves(call.args[0].opt_state)
        on_host = any(leaf.sharding.memory_kind == "pinned_host" for leaf in moments)
        host = HostTraffic(2**10, 2**10, 2**10, 1e-3, 1e-3) if on_host else None  # 1 KiB
        total_bytes = STEP_BYTES - BYTES_TO_HOST * on_host
        times = {"step_seconds": 1.0, "step_time": Range(0.5, 1.0, 1.25), "has_margin": True}
        memory = SimpleNamespace(argument_bytes=0)
        figures = SimpleNamespace(total_bytes=total_bytes, memory=memory, host=host, **times)
        program = (call.traced.jaxpr.pretty_print(), on_host)
        return Job(lambda: figures, seconds=None if len(asked) == 3 else 12.3, key=program)

    monkeypatch.setattr(fitting, "begin_forecast", by_formula)
    return asked


def printed_forecast_arguments(out):
    """Parses the command ``xlstm-jax forecast ...`` at the end of the output of ``fit``."""
    line = out[out.rindex("xlstm-jax forecast") :].replace("\\\n", " ")
    return arguments.make_parser().parse_args(shlex.split(line)[1:])


def test_fit_command_reports_no_fit_and_skips_options_without_a_factory_argument(command, forecasts_by_formula):
    code, out, err = command(f"{FIT_ON_ONE_MESH} --json --budget 900KiB")  # less than a step takes, with offload too
    found = json.loads(out)
    assert code == 1 and "nothing fits into 900 KiB" in err and found["budget_bytes"] == 900 * 2**10
    assert forecasts_by_formula, "no step was forecast"
    assert not [asked for asked in forecasts_by_formula if asked != ("v5e:2x2", {"dp": 2, "fsdp": 2})]
    # The factory cannot gather weights again, so these trials are the program with kept weights.
    note = "xlstm-jax: tiny_training:training has no argument for weights gathered again: these keep the factory's"
    lines = [line for line in err.splitlines() if line != "the user's module prints"]
    assert lines[0].startswith(note)
    gathered_again = [trial for trial in found["trials"] if not trial["keep_gathered"] and not trial["remat"]]
    same = "the same program as one before: build_step, or the model, ignores the varied option"
    assert {trial["problem"] for trial in gathered_again} == {same}


def test_fit_command_prints_a_line_for_each_trial(command, forecasts_by_formula):
    _, out, err = command(f"{FIT_ON_ONE_MESH} --json --budget 900KiB")
    # No terminal is here, so a plain line remains of each trial, and nothing else.
    lines = [line for line in err.splitlines() if "trial" in line]
    trial, mesh = "xlstm-jax: trial", "dp=2,fsdp=2, weights"
    assert lines[0] == f"{trial} 1: {mesh} kept: 1 MiB, compiled in 12 s"
    assert lines[1].startswith(f"{trial} 2: {mesh} gathered again: the same program as one before")
    assert lines[2] == f"{trial} 3: {mesh} gathered again, remat: 1 MiB, from the cache"
    assert len(lines) == len(json.loads(out)["trials"])


def test_fit_command_exits_with_0_and_prints_the_forecast_command_of_a_fitting_step(command, forecasts_by_formula):
    code, out, err = command(f"{FIT_ON_ONE_MESH} --json --budget 1MiB")
    assert code == 0 and json.loads(out)["trials"][0]["fits"] and "nothing fits" not in err
    _, out, _ = command(f"{FIT_ON_ONE_MESH} --budget 1MiB --set width=512")
    args = printed_forecast_arguments(out)
    assert (args.command, args.factory, args.mesh) == ("forecast", "tiny_training:training", {"dp": 2, "fsdp": 2})
    assert dict(args.set) == {"min_weight_size": 2**18, "remat": False, "width": 512}  # what the factory declares
    assert not args.offload


def test_fit_command_reports_offload_if_no_step_fits_without_offload(command, forecasts_by_formula):
    # 1010 KiB: less than the 1024 KiB of a step, more than its 1008 KiB with offload.
    code, out, err = command(f"{FIT_ON_ONE_MESH} --budget 1010KiB --set min_weight_size=1024")
    assert code == 0 and "Nothing fits without offload. With it 1 KiB of" in " ".join(out.split())
    assert "weights kept, offload: 0.98 MiB" in err  # 1008 KiB
    assert printed_forecast_arguments(out).offload


def test_fit_command_with_model_axes_tries_meshes_and_prints_the_batch_spec(command, monkeypatch):
    def by_formula(call):
        times = {"step_seconds": 1.0 / call.axis_sizes["tp"], "step_time": Range(0.5, 1.0, 1.25), "has_margin": True}
        figures = SimpleNamespace(total_bytes=1, memory=SimpleNamespace(argument_bytes=0), host=None, **times)
        return Job(lambda: figures, key=call.traced.jaxpr.pretty_print())

    monkeypatch.setattr(fitting, "begin_forecast", by_formula)
    code, out, err = command("fit --topology v5e:2x2 --model-axes tp=2", "tiny_training:over_tp")
    assert code == 0 and "fsdp_x=2,fsdp_y=2,tp=1, weights kept" in err and "tp=2, weights kept" in err
    said = " ".join(out.split())
    assert "Of 2 meshes 0 would not fit" in said and "the fastest of these that fits" in said
    assert "batch_spec=jax.P('fsdp_x')," in said or "batch_spec=jax.P(('fsdp_x', 'fsdp_y'))," in said


def test_factory_with_sharding_keywords_receives_all_varied_options(command, monkeypatch):
    code, out, _ = command("plan --topology v5e:2x4 --json", "tiny_training:passes_on")
    module = sys.modules["tiny_training"]
    assert code == 0 and module.CALLS[-1] == {"axis_name": ("fsdp_x", "fsdp_y"), "devices": 8, "remat": False}
    found = ShardingPlan.from_json(out)
    assert found.axis_sizes == {"fsdp_x": 2, "fsdp_y": 4} and any(row.parts == 8 for row in found.rows)  # guard
    factory = load_factory("tiny_training:passes_on")
    assert factory.fixed_options == [] and load_factory("tiny_training:fixed").fixed_options == list(VARIED)
    again = Options({"dp": 2, "fsdp": 4}, 2**12, keep_gathered=False)
    told = {"axis_name": ("fsdp",), "min_weight_size": 2**12, "reshard_after_forward": True, "remat": False}
    assert factory.arguments(settings_of(again), {}) == told
    rematerialized = factory.arguments(settings_of(dataclasses.replace(again, remat=True)), {"replicas": None})
    assert rematerialized == told | {"remat": True, "reshard_after_forward": False, "replicas": None}
    code, _, err = command("plan --mesh data=2", "tiny_training:passes_on")
    assert code == 2 and "axis_name=('data',)" in err


@pytest.mark.parametrize("line", ["fit --topology v5e:2x4", "lint --topology v5e:2x4"])
def test_fit_and_lint_commands_warn_of_a_factory_without_shard_axes_before_compiling(line, command, monkeypatch):
    def refuse(*args, **options):
        raise ValueError("it would be compiled now")

    monkeypatch.setattr(fitting, "begin_forecast", refuse)
    monkeypatch.setattr(commands, "forecast", refuse)
    told = "has no argument for the axes to split over"
    _, _, err = command(line, "tiny_training:fixed")
    assert f"tiny_training:fixed {told}" in err and err.index(told) < err.index("it would be compiled now")
    assert told not in command(line)[2] and told not in command(line, "tiny_training:passes_on")[2]


def test_fit_command_compiles_once_for_options_unused_by_the_factory(command, monkeypatch):
    compiled = []

    def by_formula(call):
        memory = SimpleNamespace(argument_bytes=0)
        times = {"step_seconds": 1.0, "step_time": Range(0.5, 1.0, 1.25), "has_margin": True}

        def run():
            compiled.append(call)
            return SimpleNamespace(total_bytes=1, memory=memory, host=None, **times)

        return Job(run, key="the same")

    monkeypatch.setattr(fitting, "begin_forecast", by_formula)
    _, out, _ = command("fit --topology v5e:2x2 --mesh fsdp=4 --json", "tiny_training:passes_on")
    best, *others = json.loads(out)["trials"]
    assert best["fits"] and others and len(compiled) == 1
    assert not [one["problem"] for one in others if "the same program as one before" not in one["problem"]]


# ------------------------------------------------------------------------------------------------- what pages quote


def quoted(page):
    """(command, the lines that it prints) of each block that begins with a command; "..." stands for further lines."""
    for block in re.findall(r"^```text\n\$ (.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL):
        line, _, printed = re.sub(r" \\\n +", " ", block).partition("\n")
        yield line, [line for line in printed.splitlines() if line.strip() and line != "..." and line != " ..."]


QUOTED = [
    pytest.param(page, line, printed, id=f"{page}, {line.split()[1]}")
    for page in ("docs/results.md", "docs/cli.md")
    for line, printed in quoted(page)
    if line.split()[1] == "plan" or printed[0].startswith("xlstm-jax: error")
]


@pytest.mark.parametrize("page, line, printed", QUOTED)
def test_command_output_quoted_on_pages_matches_printed_output(page, line, printed, tmp_path, monkeypatch, capsys):
    """The commands of results run in the folder of their program, at 80 columns; docs/cli.md's in a folder alone."""
    alone = page == "docs/results.md"
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    program = next(block for block in blocks if "def training" in block)
    if alone:
        (tmp_path / "train.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.setenv("COLUMNS", "80" if alone else "120")
    cli.main(shlex.split(line)[1:])
    out, err = capsys.readouterr()
    shown = iter([text.rstrip() for text in (out + err).splitlines()])
    assert printed
    for text in printed:  # in this order: `in` consumes the iterator
        assert text.rstrip() in shown, f"{line} does not print, after the lines quoted before it: {text}"


def test_commands_quoted_on_pages_parse_without_error():
    assert {page.values[0] for page in QUOTED} == {"docs/results.md", "docs/cli.md"}
    for page, wanted in {"README.md": ["forecast"], "docs/results.md": list(arguments.EXAMPLES)}.items():
        lines = re.findall(r"^xlstm-jax .+", (ROOT / page).read_text().replace("\\\n", ""), re.MULTILINE)
        assert [arguments.make_parser().parse_args(shlex.split(line)[1:]).command for line in lines] == wanted


# -------------------------------------------------------------------------------------------------------- progress


def test_progress_is_shown_only_on_a_terminal(folder, command):
    command("plan --mesh fsdp=8")  # imports the user's module, which prints
    assert command("plan --mesh fsdp=8")[2] == ""
    ours, theirs = pty.openpty()
    line = [SCRIPT, *shlex.split("lint --factory tiny_training:training --mesh fsdp=8 --json")]
    done = subprocess.run(line, cwd=folder, stdout=subprocess.PIPE, stderr=theirs, timeout=300, env=ENVIRONMENT)
    os.close(theirs)
    shown = os.read(ours, 2**16).decode()
    os.close(ours)
    assert json.loads(done.stdout) == [] and "compiling for simulated CPU devices" in shown and "0:00:0" in shown


# ---------------------------------------------------------------------------------------------------------- the script


@pytest.mark.libtpu
def test_sigterm_ends_the_compiling_child_process(folder, tmp_path):
    line = [SCRIPT, *shlex.split("forecast --factory tiny_training:training --topology v5e:2x2 --set width=8192")]
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(line, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: children_in(tmp_path))
    assert process.poll() is None
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not children_in(tmp_path) and not list(tmp_path.glob("xlstm_jax_*"))


def children_in(folder):
    """Processes whose command line names a path in this folder."""
    lines = [read_or_nothing(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [line for line in lines if str(folder).encode() in line]


def read_or_nothing(path):
    try:
        return path.read_bytes()
    except OSError:  # ended since it was listed
        return b""


def wait_until(condition, timeout_s=120):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["plan", pytest.param("lint", marks=pytest.mark.slow)])
def test_help_example_runs_in_an_empty_folder(name, tmp_path):
    text = script(f"xlstm-jax {name} --help").stdout
    pasted = re.search(r"Example:\n  (xlstm-jax .+(?<=\\)\n.+)\n", text)[1]
    example = re.sub(r" \\\n +", " ", pasted)
    assert example == arguments.EXAMPLES[name]
    done = script(f"{example} --json", cwd=tmp_path)
    assert done.returncode in ((0, 1) if name == "lint" else (0,)), done.stderr
    assert json.loads(done.stdout)


@pytest.mark.parametrize("name", arguments.EXAMPLES)
def test_every_command_has_an_example_accepted_by_the_parser(name):
    args = arguments.make_parser().parse_args(shlex.split(arguments.EXAMPLES[name])[1:])
    assert args.command == name
    # The package has the file, and no folder of a checkout is needed.
    assert name == "doctor" or args.factory.startswith("xlstm_jax.")


def test_call_without_arguments_prints_help_and_exits_with_2(capsys):
    """As git does: people read the help, and a script that loses its arguments stops."""
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--help"])
    assert out == capsys.readouterr().out and err == "" and "Search for the fastest options" in out


VERB = re.compile(
    r"(print|import|pass|compile|take|set|search|accumulate|keep|explain|fail|draw|limit|report|show|find|predict)\b"
)


def test_help_texts_begin_with_a_verb_and_name_the_default():
    for name, spec in arguments.COMMANDS.items():
        assert VERB.match(spec.text.lower()) and len(spec.text) <= 64, name  # one line of 80 columns
        for option in ("--json", "--traceback", *spec.options):
            text = (arguments.OPTIONS[option] | arguments.VARIANTS.get((name, option), {}))["help"]
            assert VERB.match(text) and text.endswith(")"), text
            assert "(default: " in text or "(required)" in text, text
            assert "; " not in text.replace("; may be repeated", "") and ". " not in text, text  # one sentence
    used = {option for spec in arguments.COMMANDS.values() for option in spec.options}
    assert used | {"--json", "--traceback"} == set(arguments.OPTIONS)  # guard


@pytest.mark.parametrize("words", [[], *([name] for name in arguments.EXAMPLES)], ids=str)
def test_help_of_every_command_fits_80_columns(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main([*words, "--help"])
    assert not [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]


def test_the_script_keeps_stdout_for_json_and_errors_for_stderr(folder):
    done = script("xlstm-jax plan --factory tiny_training:training --mesh fsdp=8 --json", cwd=folder)
    assert done.returncode == 0 and ShardingPlan.from_json(done.stdout) and "prints" in done.stderr
    done = script("xlstm-jax plan --factory tiny_training:training", cwd=folder)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


# -------------------------------------------------------------------------------------------------------------- doctor


def test_doctor_extras_equal_the_extras_of_setup_cfg():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    written = config["options.extras_require"]
    found = doctor.extras()
    assert list(found) == list(doctor.USES) == list(written)
    for extra, names in found.items():
        lines = written[extra].replace("jax[tpu]", "libtpu").replace("jax[cuda12-local]", "jax-cuda12-plugin")
        lines = lines.split("\n")
        assert set(names) == {re.split(r"[ \[]", line)[0] for line in lines if line and not line.startswith("#")}


def test_doctor_table_lists_missing_packages_and_the_install_command():
    assert doctor.missing_extras({"one": ("jax",), "two": ("jax", "no-such-package")}) == {"two": ["no-such-package"]}
    found = doctor.Diagnosis(doctor.installed(), {"checkpoint": ["orbax-checkpoint"]}, "", "8 devices", ())
    out = io.StringIO()
    for part in found.tables():
        cli.console(file=out, width=cli.WIDTH).print(part)
    assert re.search(r"\[checkpoint\] .* lacks orbax-checkpoint", out.getvalue())
    assert f"To install an extra: {how_to_install('NAME')}." in " ".join(out.getvalue().split())


def test_doctor_without_metadata_reports_unknown_extras_and_skips_compilers(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    missing = doctor.missing_extras(doctor.extras())
    assert missing is None and doctor.available_compilers(missing) == []
    assert doctor.available_compilers({}) == list(doctor.TOPOLOGIES)  # guard: with all installed it compiles
    found = doctor.Diagnosis(doctor.installed(), missing, "", "8 devices", ())
    out = io.StringIO()
    for part in found.tables():
        cli.console(file=out, width=120).print(part)
    assert out.getvalue().count("not known: the library runs uninstalled") == len(doctor.USES)
    assert "To install" not in out.getvalue() and json.loads(found.to_json())["missing"] is None


def test_doctor_skips_an_extra_present_only_in_the_installed_version(monkeypatch):
    lines = ["numpy", "orbax-checkpoint; extra == 'checkpoint'", "other; extra == 'of-another-version'"]
    monkeypatch.setattr(doctor, "installed_version", lambda name: "0.1")
    monkeypatch.setattr(doctor, "requires", lambda name: lines)
    assert doctor.extras() == {extra: [] for extra in doctor.USES} | {"checkpoint": ["orbax-checkpoint"]}


def test_self_test_within_fails_for_deviating_values_and_nan():
    want = {"a": [1.0, 2.0], "b": [1e-3, 0.0]}
    assert self_test.within("same", want, want).ok
    assert not self_test.within("off", {"a": [1.0, 2.001], "b": [1e-3, 0.0]}, want).ok
    assert not self_test.within("small leaf off", {"a": [1.0, 2.0], "b": [1.1e-3, 0.0]}, want).ok
    assert not self_test.within("nan", {"a": [1.0, 2.0], "b": [float("nan"), 0.0]}, want).ok


def test_doctor_child_without_start_or_beyond_timeout_is_a_failed_check():
    found = doctor.run_child("devices", dict(os.environ) | {"JAX_PLATFORMS": "nonsense"})
    (check,) = doctor._checks("JAX starts", found)
    assert not check.ok and "nonsense" in check.measured
    assert "did not end within" in doctor.run_child("simulated", dict(os.environ), timeout_s=0.1)["error"]


def test_doctor_refuses_for_a_failed_check_and_not_for_a_missing_extra(monkeypatch):
    failed = self_test.within("gradients", {"a": [1.0]}, {"a": [2.0]})
    some = doctor.Diagnosis({}, {"checkpoint": ["orbax-checkpoint"]}, "", "", (failed, Check("values", "0", "1", True)))
    for found, refusals in ((some, ("failed: gradients.",)), (dataclasses.replace(some, checks=some.checks[1:]), ())):
        monkeypatch.setattr(commands, "examine", lambda say, found=found: found)
        assert commands.run_doctor(None, print).refusals == refusals
