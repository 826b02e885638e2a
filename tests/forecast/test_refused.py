"""What the compiler refuses has no forecast: not a figure of it, whatever the compiler wrote before."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.cli import commands
from xlstm_jax.cli.command_line import main
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.forecast import CompileError, forecast, forecasting, parse_topology
from xlstm_jax.forecast.compiling.compile import _read_texts
from xlstm_jax.forecast.cost.flops import count_flops
from xlstm_jax.forecast.training import Workload

ALL_TO_ALL = {"xla_tpu_enable_async_all_to_all": True}
WHY = "UNIMPLEMENTED: Async all-to-all not supported on limited ICI"
ON = parse_topology("v5e:2x2")
SETTINGS = {"axes": {"fsdp": 4}, "options": ALL_TO_ALL}


def exchange(devices):
    """A step with two all-to-alls, each of which can run beside the other's products."""
    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": devices})

    def each(x):
        received = lax.all_to_all(x @ x, "fsdp", 0, 0)
        return received @ received

    def both(x, y):
        return each(x), each(y)

    run = jax.shard_map(both, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
    x = jax.ShapeDtypeStruct((devices**2, 128, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    return jax.jit(run), x, x


def training():
    """For the command line: it is never compiled."""

    def loss_fn(params, apply_fn, batch, rng):
        return jnp.mean(apply_fn({"params": params}, batch) ** 2)

    return Workload(nn.Dense(8), optax.sgd(0.1), jax.ShapeDtypeStruct((8, 8), jnp.float32), loss_fn)


def told(error, **texts):
    """The texts of a child process whose compiler has said this."""
    result = {
        "error": error,
        "device_kind": "TPU v5 lite",
        "memory": None,
        "seconds": 1.0,
        "coords": [],
        "versions": {},
    }
    return {"result.json": json.dumps(result)} | texts


DUMPED = {"hlo": "HloModule step", "buffers": "BufferAssignment:"}


@pytest.mark.parametrize("texts", [DUMPED, {}], ids=["dumped", "nothing dumped"])
def test_read_texts_raises_for_a_refused_program_despite_dumped_texts(texts):
    with pytest.raises(CompileError, match=f"refuses the step for v5e:2x2, given .*all_to_all.*: {WHY}$"):
        _read_texts(told(WHY, **texts), ON, SETTINGS, ())
    assert _read_texts(told(None, **DUMPED), ON, SETTINGS, ()).hlo == DUMPED["hlo"]  # guard: it is the error


@pytest.mark.parametrize("error", ["RESOURCE_EXHAUSTED: Ran out of memory", "INVALID_ARGUMENT: Invalid TPU program."])
def test_out_of_memory_error_gives_fits_false_for_a_large_step_and_raises_for_a_small_step(error):
    """Compilers write these errors also for other memories, or an invalid program: the planned bytes decide.

    A step of more bytes than the chip has does not fit. A smaller step would fit, so the error has another reason.
    """
    found = _read_texts(told(error, **DUMPED), ON, SETTINGS, ())
    assert error in found.too_large
    flops = count_flops(jax.make_jaxpr(lambda x: x)(1.0), 1)
    text = jax.jit(lambda x: x + 1).lower(jnp.ones(8)).compile().as_text()
    refused = dataclasses.replace(found, hlo=text, buffers=None)  # a program to parse, whose bytes are given below

    def taking(memory_bytes, program=refused):
        return forecasting.read(dataclasses.replace(program, memory={"argument": memory_bytes}), flops)

    available = ON.chip.usable_hbm_bytes
    assert taking(available + 1).fits is False
    with pytest.raises(CompileError, match=f"refuses the step for v5e:2x2, given .*: {re.escape(error)}"):
        taking(available)
    assert taking(available, dataclasses.replace(refused, too_large=None)).fits is True  # guard: it is the error


@pytest.mark.libtpu
def test_forecast_raises_for_refused_compiler_options_and_accepts_auto_options():
    step, *args = exchange(32)
    with pytest.raises(CompileError, match=f"refuses the step for v5e:4x8, given .*: {WHY}"):
        forecast(step, *args, topology="v5e:4x8", compiler_options=ALL_TO_ALL)
    found = forecast(step, *args, topology="v5e:4x8", compiler_options="auto").collectives
    assert {one.kind for one in found} == {"all-to-all"} and not any(one.asynchronous for one in found)


@pytest.mark.parametrize("name", ["forecast", "lint"])
def test_forecast_and_lint_commands_print_a_compile_error_in_a_line_and_exit_with_2(name, monkeypatch, capsys):
    def refuses(*args, **kwargs):
        raise CompileError(f"the compiler refuses the step for {WHY}\n\nand more")

    monkeypatch.setattr(commands, "forecast", refuses)
    factory = "tests.forecast.test_refused:training"
    assert main([name, "--factory", factory, "--topology", "v5e:2x2", "--mesh", "fsdp=4"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and WHY in err and "and more" in err
