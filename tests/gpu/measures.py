"""Measurements on cards, in order of worth; each takes the devices, so that all can run on simulated CPU devices.

option sets   time of a step under 1, 2, 4 and 8 collectives at once, with and without pipelined gathers, relative to
              XLA's defaults; on all devices. One device has no collectives: then only the cost of the options shows
step time     of the wrapped model, relative to the plain model and ``jit``
memory        the peak reported by the device, and the ``forecast`` for one GPU of the same kind
attention     forward and backward of cuDNN's kernel, relative to XLA's attention: time and memory
same text     the wrapped model compiles to the text of the plain model, on a mesh of one device
options       each of ``compiler_options`` is accepted by the installed compiler
training      tokens per second and MFU of the training job
"""

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks import memory, step_time
from benchmarks.cases import CASES, SIZES, build
from benchmarks.forecasts import forecast_case, installed_versions
from benchmarks.run_log import read_rows
from benchmarks.step_time_variants import CASES as STEP_CASES
from benchmarks.step_time_variants import MODELS, start_of, state_of
from benchmarks.step_time_variants import build as build_step
from tests.gpu.compiled_text import instructions
from xlstm_jax.accelerators import PIPELINES_BY_MODE, compiler_options
from xlstm_jax.forecast.hardware import chip_of

PLAIN, WRAPPED = "replicated", "ours"
COUNTED = ("small", "1.3B")  # models whose peak is measured, if they fit
TRAINING = "--model transformer --d-model 1024 --heads 16 --layers 12 --context 1024 --batch-size 16 --dtype bfloat16 \
--gather-dtype bfloat16 --remat --steps 60 --log-every 10 --eval-every 60 --checkpoint-every 0 --sample-bytes 0"
TRAINING_S = 900
TIME_RATIO, MEMORY_OFF = 1.05, 0.10  # at most so much longer; the forecast's peak off by at most so much
AT_ONCE = (1, 2, 4, 8)
OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
PIPELINED = (
    {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}
    if jax.__version_info__ >= PIPELINES_BY_MODE
    else {"xla_gpu_enable_pipelined_all_gather": True}
)
DEFAULTS = "XLA's defaults"
OPTION_SETS: dict[str, dict[str, Any]] = {DEFAULTS: {}} | {
    f"{n} at once{', gathers pipelined' * pipelined}": {OVERLAP: n} | (PIPELINED if pipelined else {})
    for pipelined in (False, True)
    for n in AT_ONCE
}


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements.

    Attributes:
      model: name of ``step_time_variants.MODELS``.
      rounds, steps: turns of each variant, and steps per turn.
      attention: rows, tokens, heads, width of a head.
      counted: models whose peak is measured.
      training: options of the training job.
    """

    model: str
    rounds: int
    steps: int
    attention: tuple[int, int, int, int]
    counted: tuple[str, ...]
    training: str


ON_CARD = Scale("medium", 10, 4, (4, 4096, 16, 128), COUNTED, TRAINING)
DRY = Scale("tiny", 2, 1, (1, 64, 2, 16), (), "--dry")  # without the training job, which takes minutes on a CPU


def everything(
    devices: Sequence[jax.Device], scale: Scale, seconds: float, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Makes the measurements in order of worth, and passes the results so far to ``keep`` after each.

    A measurement that raises is a result {"problem": ...}. Measurements that would begin after ``seconds`` are listed
    in "left_out".
    """
    card, start = devices[0], time.monotonic()
    found: dict[str, Any] = {
        "card": card.device_kind,
        "devices": len(devices),
        "dry_run": scale == DRY,
        "versions": installed_versions("jax-cuda12-plugin"),
        "left_out": [],
        "seconds": {},
    }
    made: dict[str, Callable[[], Any]] = {
        "option_sets": partial(option_sets, devices, scale),
        "step_time": partial(step_times, card, scale.model, scale.rounds),
        "memory": partial(memories, card, scale.counted),
        "attention": partial(attention, card, scale),
        "same_text": partial(same_text, card),
        "options": partial(options_accepted, card),
        "training": partial(training, scale.training),
    }
    for name, measure in made.items():
        begun = time.monotonic()
        if begun - start > seconds:
            found["left_out"].append(name)
            continue
        try:
            found[name] = measure()
        except Exception as error:  # the other answers are worth having
            found[name] = {"problem": f"{type(error).__name__}: {error}"[:1000]}
        found["seconds"][name] = time.monotonic() - begun
        keep(found)
    return found


def option_sets(devices: Sequence[jax.Device], scale: Scale) -> dict[str, Any]:
    """Returns for each set of options: seconds of a step, the ratio to XLA's defaults, temporary bytes, collectives.

    The sets take turns. A set that the compiler refuses has a "problem" instead.
    """
    model, found, runs = MODELS[scale.model], {}, {}
    step, (state, batch, _) = build_step(model, STEP_CASES["ours, remat"], devices)
    start, key = start_of(model, len(devices)), jax.random.key(0)
    batch = jax.device_put(start.tokens, batch.sharding)
    lowered = step.lower(state, batch, key)
    for name, options in OPTION_SETS.items():
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            found[name] = {"problem": str(error).splitlines()[0]}
            continue
        counted = compiled.memory_analysis()
        found[name] = {
            "temporary_bytes": None if counted is None else counted.temp_size_in_bytes,
            "collectives": collectives_in(compiled.as_text()),
        }
        runs[name] = _turns_of(compiled, state_of(state, start.params), batch, key)
    for run in runs.values():
        run(2)  # warm up
    seconds = step_time.take_turns(runs, scale.rounds, scale.steps, lambda *_: None)
    for name, taken in seconds.items():
        ratio = float(np.median(taken / seconds[DEFAULTS])) if DEFAULTS in seconds else None
        found[name] |= {"seconds": float(np.median(taken)), "ratio": ratio}
    return {"devices": len(devices), "sets": found}


def collectives_in(text: str) -> int:
    """Counts the collectives in a compiled text, asynchronous or not; a loop's body counts once."""
    kinds = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    return sum(text.count(f" {kind}{form}(") for kind in kinds for form in ("", "-start"))


def _turns_of(compiled: Any, state: Any, *args: Any) -> Callable[[int], float]:
    def run(steps: int) -> float:
        nonlocal state
        for _ in range(steps):
            state, metrics = compiled(state, *args)
        return float(jax.block_until_ready(metrics["loss"]))

    return run


def step_times(device: jax.Device, model: str = "medium", rounds: int = 10) -> dict[str, Any]:
    """Returns ``benchmarks.step_time`` of the wrapped model, the plain model, and ``jit``."""
    with Progress(console=Console(quiet=True)) as progress:
        return step_time.measure(MODELS[model], [PLAIN, WRAPPED, "jit"], rounds, 4, progress, devices=[device])


def memories(device: jax.Device, counted: Sequence[str] = COUNTED) -> dict[str, Any]:
    """Returns forecast and reported bytes of each model that fits.

    The result is empty for a card outside of the table of chips, because such a card has no forecast.
    """
    chip, found = chip_of(device.device_kind), {}
    if chip is None:
        return found
    for name in counted:
        forecast = forecast_case(SIZES[name], CASES[WRAPPED], f"{chip.name}:1x1")
        if forecast["fits"]:
            reported = memory.on_devices([name], [WRAPPED], Console(quiet=True))[name][WRAPPED]
            found[name] = {"forecast_bytes": forecast["bytes"]["total"], **reported}
    return found


def attention(device: jax.Device, scale: Scale) -> dict[str, Any]:
    """Returns for each implementation of causal attention the seconds of forward and backward pass, and memory.

    Also the largest difference of the gradient to that of XLA's attention, relative to its largest value. An
    implementation that the device refuses has a "problem".
    """
    shape, rng = scale.attention, np.random.default_rng(0)
    q, k, v = (jax.device_put(rng.standard_normal(shape).astype(jnp.bfloat16), device) for _ in range(3))
    found: dict[str, Any] = {}
    runs: dict[str, Callable[[int], Any]] = {}
    of_xla = None
    for name in ("xla", "cudnn"):

        def loss(q, k, v, name=name):
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=name)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        try:
            compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile()
            grads = np.asarray(compiled(q, k, v)[0], np.float32)
        except Exception as error:  # JAX raises RuntimeError, NotImplementedError or ValueError without cuDNN
            found[name] = {"problem": f"{type(error).__name__}: {error}"[:300]}
            continue
        of_xla = grads if of_xla is None else of_xla
        counted = compiled.memory_analysis()
        found[name] = {
            "temporary_bytes": None if counted is None else counted.temp_size_in_bytes,
            "difference": float(np.abs(grads - of_xla).max() / np.abs(of_xla).max()),
        }

        def run(steps: int, compiled=compiled) -> None:
            for _ in range(steps):
                result = compiled(q, k, v)
            jax.block_until_ready(result)

        runs[name] = run
    for name, taken in step_time.take_turns(runs, scale.rounds, 10, lambda *_: None).items():
        found[name]["seconds"] = float(np.median(taken))
    return {"shape": list(shape), "implementations": found}


def same_text(device: jax.Device) -> dict[str, int]:
    """Returns the number of instructions of the plain model's step, and of different lines in the wrapped one."""
    plain = instructions(CASES[PLAIN], device)
    wrapped = instructions(dataclasses.replace(CASES[WRAPPED], options={"remat": False}), device)
    return {"instructions": len(plain), "differing": len(set(plain) ^ set(wrapped)) + abs(len(plain) - len(wrapped))}


def options_accepted(device: jax.Device) -> dict[str, str]:
    """Returns for each option, alone on a small step, "accepted" or the compiler's error."""
    found = {}
    step, args = build(SIZES["small"], CASES[WRAPPED], (1,), [device])
    lowered = step.lower(*args)
    for name, value in compiler_options(device.device_kind, chosen_by="forecast").items():
        try:
            lowered.compile(compiler_options={name: value})
            found[name] = "accepted"
        except jax.errors.JaxRuntimeError as error:
            found[name] = str(error).splitlines()[0]
    return found


def training(options: str = TRAINING) -> dict[str, Any]:
    """Runs the training job in a separate process; returns its last row, with tokens per second and MFU.

    {} for the options of a dry run.
    """
    if options == DRY.training:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        command = [sys.executable, "-m", "benchmarks.train_lm", *options.split(), "--out", str(out)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=TRAINING_S)
        if run.returncode:
            return {"exit code": run.returncode, "problem": run.stderr[-1000:]}
        return read_rows(out)[-1]


def failures(found: dict[str, Any]) -> list[str]:
    """Returns the failed expectations, one line each; a measurement that was left out fails nothing.

    A dry run fails only by a measurement that raised: figures of tiny sizes on a CPU are no answers.
    """
    raised = [f"{name}: {one['problem']}" for name, one in found.items() if isinstance(one, dict) and "problem" in one]
    return raised if found.get("dry_run") else [*raised, *_failures(found)]


def _failures(found: dict[str, Any]) -> Iterator[str]:
    if found.get("suite", {}).get("exit code"):
        yield f"suite: {found['suite']}"
    if found.get("same_text", {}).get("differing"):
        yield f"compiled text: {found['same_text']}"
    if "cases" in found.get("step_time", {}):
        ratio = found["step_time"]["cases"][WRAPPED]["ratios"][f"time over {PLAIN}"]["median"]
        if ratio > TIME_RATIO:
            yield f"step time: {ratio:.3f} x that of the plain model, at most {TIME_RATIO}"
    for name, one in found.get("memory", {}).items():
        if not isinstance(one, dict):
            continue
        if "problem" in one:
            yield f"memory of {name}: {one['problem']}"
        elif abs(off := one["forecast_bytes"] / one["peak_bytes"] - 1) > MEMORY_OFF:
            yield f"memory of {name}: the forecast is off by {off:+.0%}"
    for name, said in found.get("options", {}).items():
        if said != "accepted" and name != "problem":
            yield f"option {name}: {said}"
