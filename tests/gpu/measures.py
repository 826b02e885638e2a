"""Measurements on a card; each function takes the device, so that all except memory can run on a CPU.

same text    the wrapped model compiles to the text of the plain model, on a mesh of one device
step time    of the wrapped model, relative to the plain model
memory       the peak reported by the device, and the ``forecast`` for one GPU of the same kind
options      each of ``compiler_options`` is accepted by the installed compiler
training     tokens per second and MFU of the training job
"""

import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

from benchmarks import memory, step_time
from benchmarks.cases import CASES, SIZES, build
from benchmarks.forecasts import forecast_case, installed_versions
from benchmarks.run_log import read_rows
from benchmarks.step_time_variants import MODELS
from tests.gpu.compiled_text import instructions
from xlstm_jax.accelerators import compiler_options
from xlstm_jax.forecast.hardware import chip_of

PLAIN, WRAPPED = "replicated", "ours"
COUNTED = ("small", "1.3B")  # models whose peak is measured, if they fit
TRAINING = "--model transformer --d-model 1024 --heads 16 --layers 12 --context 1024 --batch-size 16 --dtype bfloat16 \
--gather-dtype bfloat16 --remat --steps 60 --log-every 10 --eval-every 60 --checkpoint-every 0 --sample-bytes 0"
TRAINING_S = 900
TIME_RATIO, MEMORY_OFF = 1.05, 0.10  # at most so much longer; the forecast's peak off by at most so much


def everything(device: jax.Device) -> dict[str, Any]:
    """Returns all measurements as JSON values."""
    return {
        "card": device.device_kind,
        "versions": installed_versions("jax-cuda12-plugin"),
        "same_text": same_text(device),
        "step_time": step_times(device),
        "memory": memories(device),
        "options": options_accepted(device),
        "training": training(),
    }


def same_text(device: jax.Device) -> dict[str, int]:
    """Returns the number of instructions of the plain model's step, and of different lines in the wrapped one."""
    plain = instructions(CASES[PLAIN], device)
    wrapped = instructions(dataclasses.replace(CASES[WRAPPED], options={"remat": False}), device)
    return {"instructions": len(plain), "differing": len(set(plain) ^ set(wrapped)) + abs(len(plain) - len(wrapped))}


def step_times(device: jax.Device, model: str = "medium", rounds: int = 10) -> dict[str, Any]:
    """Returns ``benchmarks.step_time`` of the wrapped model, the plain model, and ``jit``."""
    with Progress(console=Console(quiet=True)) as progress:
        return step_time.measure(MODELS[model], [PLAIN, WRAPPED, "jit"], rounds, 4, progress, devices=[device])


def memories(device: jax.Device) -> dict[str, Any]:
    """Returns forecast and reported bytes of each model that fits.

    The result is empty for a card outside of the table of chips, because such a card has no forecast.
    """
    chip, found = chip_of(device.device_kind), {}
    if chip is None:
        return found
    for name in COUNTED:
        forecast = forecast_case(SIZES[name], CASES[WRAPPED], f"{chip.name}:1x1")
        if forecast["fits"]:
            counted = memory.on_devices([name], [WRAPPED], Console(quiet=True))[name][WRAPPED]
            found[name] = {"forecast_bytes": forecast["bytes"]["total"], **counted}
    return found


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


def training(options: str = TRAINING) -> dict[str, float]:
    """Runs the training job in a separate process; returns its last row, with tokens per second and MFU."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        command = [sys.executable, "-m", "benchmarks.train_lm", *options.split(), "--out", str(out)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=TRAINING_S)
        if run.returncode:
            return {"exit code": run.returncode, "problem": run.stderr[-1000:]}
        return read_rows(out)[-1]


def failures(found: dict[str, Any]) -> list[str]:
    """Returns the failed expectations, one line each."""
    failed = [f"suite: {found['suite']}"] if found["suite"]["exit code"] else []
    if found["same_text"]["differing"]:
        failed.append(f"compiled text: {found['same_text']}")
    ratio = found["step_time"]["cases"][WRAPPED]["ratios"][f"time over {PLAIN}"]["median"]
    if ratio > TIME_RATIO:
        failed.append(f"step time: {ratio:.3f} x that of the plain model, at most {TIME_RATIO}")
    for name, one in found["memory"].items():
        if "problem" in one:
            failed.append(f"memory of {name}: {one['problem']}")
        elif abs(off := one["forecast_bytes"] / one["peak_bytes"] - 1) > MEMORY_OFF:
            failed.append(f"memory of {name}: the forecast is off by {off:+.0%}")
    failed += [f"option {name}: {said}" for name, said in found["options"].items() if said != "accepted"]
    return failed + ([f"training: {found['training']['problem']}"] if "problem" in found["training"] else [])
