"""Time of a training step on the local devices: this library compared with ``jit``, plain FSDP and PyTorch's FSDP2.

    python -m benchmarks.step_time                               some four minutes on two cores
    python -m benchmarks.step_time --model tiny --rounds 5 --cases jit ours
    python -m benchmarks.step_time --redraw                      table and picture of the last results
    python -m benchmarks.step_time --dtype bfloat16              computed, gathered and scattered in bfloat16
    python -m benchmarks.step_time --model decoder --cases "jit, remat" "ours, remat"    sharded from outside

Without accelerators the devices are eight simulated CPU devices, and PyTorch runs as eight processes with one thread
each, connected by gloo. Every case starts with the same parameters and trains on the same batch; the losses before and
after the first step must agree before anything is timed. Then the cases take turns, so that other load on the machine
affects every case alike: in each round every case runs a few steps, each round starts with a different case, and every
second round runs in reverse order. A waiting case does not slow down the running case.

  of X          median over rounds of the time of a case relative to the time of X in the same round
  tokens/s      total over devices, from the median time

Results are written to ``<out>/<model>.json`` and ``<out>/<model>.png``. The aim, on simulated devices: at most 0.9 x
the time of ``jit``, which gathers weights again in the backward pass, as "ours, gathered again" does.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.cases import WORDS, names_in_words
from benchmarks.forecasts import installed_versions
from benchmarks.options import positive
from benchmarks.report import (
    ACCENT,
    BEHIND,
    LETTERS,
    LETTERS_IN_A_LINE,
    NUMBER,
    PAGE_DPI,
    PAGE_WIDTH,
    QUIET,
    STRONG,
    save,
)
from benchmarks.step_time_variants import CASES, MODELS, TORCH_CASES, Model, Start, start_of, started
from benchmarks.torch_processes import MISSING, is_installed, torch_processes
from xlstm_jax.distributed.processes import available_devices
from xlstm_jax.formatting import rich_table

OUT = Path(__file__).parent / "results" / "step_time"
SIMULATED_DEVICES = 8
STEP_WORDS = WORDS | {
    "ours": "this library, over one axis",
    "FSDP2": "PyTorch's, between processes on the same cores",
    "weights kept": "from forward to backward",
}
BASES = ("jit", "replicated", "FSDP2")  # cases that ratios are relative to
SHORT = {"replicated": "repl."}  # to fit 80 columns
AIM, AIM_OF = 0.9, "jit"
ROUNDS, STEPS = 15, 2
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # relative tolerance of the losses of two steps
CUT = 4  # end of the axis of a plot, relative to the median bar, so that a long bar does not hide short bars
QUARTILES = (0.25, 0.5, 0.75)

Run = Callable[[int], float]


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(
    model: Model, cases: Sequence[str], rounds: int, steps: int, progress: Progress, *, devices: Any = None
) -> dict[str, Any]:
    """Builds the cases, checks that their losses agree, and times them in turn.

    Args:
      model: the model to train.
      cases: names of ``CASES`` and ``TORCH_CASES``.
      rounds, steps: turns of every case, and steps per turn.
      progress: a progress bar that shows a task.
      devices: the devices to run on; None for the local devices.
    Returns:
      The content of the JSON file.
    Raises:
      ValueError: the losses of cases differ, or no case can run.
      RuntimeError, TimeoutError: a PyTorch process has ended, or does not respond.
    """
    devices, load = list(devices or available_devices(SIMULATED_DEVICES)), os.getloadavg()[0]
    start, left_out = start_of(model, len(devices)), {}
    task = progress.add_task("", total=len(cases) * (1 + rounds))

    def tell(what, done=1):
        progress.update(task, description=what, advance=done)

    with contextlib.ExitStack() as stack:
        runs = dict(_runs(model, cases, devices, start, stack, left_out, tell))
        losses = {case: [run(1), run(1)] for case, run in runs.items()}
        check_same_losses(losses, TOLERANCE[np.dtype(model.dtype).name])
        seconds = take_turns(runs, rounds, steps, tell)
    tokens = start.tokens.shape[0] * model.context
    return {
        "versions": installed_versions() | ({"torch": version("torch")} if runs.keys() & set(TORCH_CASES) else {}),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "cores": os.cpu_count(),
        "load_before": load,
        "model": _described(model, start),
        "rounds": rounds,
        "steps": steps,
        "tokens_per_step": tokens,
        "cases": {case: _of_case(case, seconds, tokens) | {"losses": losses[case]} for case in runs},
        "left_out": left_out,
    }


def _runs(
    model: Model,
    cases: Sequence[str],
    devices: Sequence[Any],
    start: Start,
    stack: contextlib.ExitStack,
    left_out: dict[str, str],
    tell: Callable[..., None],
) -> Iterator[tuple[str, Run]]:
    """Yields the cases that can run, with their run functions; adds reasons for other cases to ``left_out``."""
    left_out |= {case: why for case in cases if (why := model.init_failure(case))}
    cases = [case for case in cases if case not in left_out]
    for case in (case for case in cases if case in CASES):
        tell(f"compiling {case}")
        try:
            yield case, started(model, CASES[case], devices, start)
        except ValueError as error:
            left_out[case] = " ".join(str(error).split())
    if not (chosen := [case for case in cases if case in TORCH_CASES]):
        return
    tell("starting PyTorch", len(chosen))
    if devices[0].platform != "cpu" or not is_installed():
        others = f"its processes run on the CPU, the other cases on {devices[0].device_kind}"
        left_out |= dict.fromkeys(chosen, MISSING if devices[0].platform == "cpu" else others)
        return
    arguments = (len(devices), start.params, model.size.heads, start.tokens)
    run, _ = stack.enter_context(torch_processes(*arguments))
    yield from ((case, lambda steps, case=case: run(case, steps)) for case in chosen)


def check_same_losses(losses: dict[str, list[float]], tolerance: float) -> None:
    """Raises a ``ValueError`` if the losses of cases, before and after the first step, differ."""
    if not losses:
        raise ValueError("no case is left to run.")
    first, expected = next(iter(losses.items()))
    for case, found in losses.items():
        if not np.allclose(found, expected, rtol=tolerance):
            raise ValueError(
                f"{case} does other work than {first}: its losses before and after the first step are {found}, those "
                f"of {first} are {expected}; they may differ by {tolerance:g} of them."
            )


def take_turns(runs: dict[str, Run], rounds: int, steps: int, tell: Callable[..., None]) -> dict[str, np.ndarray]:
    """Runs the cases in turn; returns the seconds per step of each case, by round."""
    names, seconds = list(runs), {case: np.zeros(rounds) for case in runs}
    for number in range(rounds):
        begin = number % len(names)
        order = names[begin:] + names[:begin]
        for case in order if number % 2 == 0 else reversed(order):
            tell(f"round {number + 1} of {rounds}: {case}")
            before = time.perf_counter()
            runs[case](steps)
            seconds[case][number] = (time.perf_counter() - before) / steps
    return seconds


def _of_case(case: str, seconds: dict[str, np.ndarray], tokens: int) -> dict[str, Any]:
    mine = seconds[case]
    return {
        "ratios": {f"time over {base}": _quartiles(mine / seconds[base]) for base in bases_of(seconds)},
        "tokens_per_second": tokens / float(np.median(mine)),
        "seconds_per_step": _quartiles(mine) | {"rounds": mine.tolist()},
    }


def bases_of(cases: Collection[str]) -> list[str]:
    """Returns the cases that ratios are relative to; ``jit, remat`` replaces a missing ``jit``."""
    bases = [base for base in BASES if base in cases]
    return bases if "jit" in bases or "jit, remat" not in cases else ["jit, remat", *bases]


def _quartiles(values: np.ndarray) -> dict[str, float]:
    return dict(zip(("low", "median", "high"), map(float, np.quantile(values, QUARTILES)), strict=True))


def _described(model: Model, start: Start) -> dict[str, Any]:
    sizes = vars(model.size) | {"context": model.context, "sequences_per_device": model.rows}
    return sizes | {
        "dtype": np.dtype(model.dtype).name,
        "parameters": sum(leaf.size for leaf in start.params.values()),
    }


# ----------------------------------------------------------------------------------------------------- tables, pictures


def title_of(name: str, found: dict[str, Any]) -> str:
    """Formats model, devices and setting in a line."""
    sizes = found["model"]
    return (
        f"{name}, {sizes['parameters'] / 1e6:.3g}M parameters, {found['tokens_per_step']:,} tokens a step, "
        f"{sizes['dtype']}, on {found['devices']} ({found['cores']} cores)"
    )


def table(name: str, found: dict[str, Any]) -> Any:
    """Builds the table of times: ratios first, with the quartiles of the first ratio, which show the noise."""
    bases = bases_of(found["cases"])
    rows = [[case, *_cells(one, bases)] for case, one in found["cases"].items()]
    columns = ["case", *(f"of {SHORT.get(base, base)}" for base in bases), "tokens/s", "ms"]
    columns[2:2] = ["quartiles"] * bool(bases)
    return rich_table(title_of(name, found), columns, rows)


def _cells(one: dict[str, Any], bases: Sequence[str]) -> list[str]:
    ratios = [one["ratios"][f"time over {base}"] for base in bases]
    cells = [f"{ratio['median']:.2f}" for ratio in ratios]
    cells[1:1] = [f"{ratio['low']:.2f}-{ratio['high']:.2f}" for ratio in ratios[:1]]
    return [*cells, f"{one['tokens_per_second']:,.0f}", f"{one['seconds_per_step']['median'] * 1e3:,.1f}"]


def remarks(found: dict[str, Any]) -> list[str]:
    """Lists the cases that meet the aim, and the reasons for cases that are left out."""
    lines = [f"{case} is left out: {why}" for case, why in found["left_out"].items()]
    ours = {case: one["ratios"] for case, one in found["cases"].items() if case.startswith("ours")}
    if not ours or AIM_OF not in found["cases"]:
        return lines
    times = {case: ratios[f"time over {AIM_OF}"]["median"] for case, ratios in ours.items()}
    told = "; ".join(f"{case}: {time:.2f}, {'met' if time <= AIM else 'not met'}" for case, time in times.items())
    return [f"aim, at most {AIM} x the time of {AIM_OF}: {told}", *lines]


def draw(path: Path, name: str, found: dict[str, Any]) -> None:
    """Draws the time relative to the base case with quartiles (left), and tokens per second (right)."""
    cases = found["cases"]
    words = textwrap.wrap(names_in_words(cases, STEP_WORDS), LETTERS_IN_A_LINE)
    figure = Figure(
        figsize=(PAGE_WIDTH, 1.6 + 0.3 * len(cases) + 0.18 * len(words)), dpi=PAGE_DPI, layout="constrained"
    )
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.3, 1))
    base = next(iter(bases_of(cases)), None)
    if base:
        _bars(left, cases, [one["ratios"][f"time over {base}"] for one in cases.values()], "{:.2f}")
        left.axvline(1, color="#888888", lw=1)
        left.set_title(f"time of a step, over that of {base}", loc="left", fontsize=10)
    if base == AIM_OF:
        left.axvline(AIM, color=ACCENT, ls="--", lw=1.2, label=f"aim {AIM}")
        left.legend(frameon=False, fontsize=LETTERS, loc="upper left", bbox_to_anchor=(0, -0.06))
    tokens = [{"median": one["tokens_per_second"]} for one in cases.values()]
    _bars(right, cases, tokens, "{:,.0f}")
    right.set_title("tokens per second", loc="left", fontsize=10)
    left.invert_yaxis()
    figure.suptitle(title_of(name, found), x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.supxlabel("\n".join(words), x=0.01, ha="left", fontsize=LETTERS, color="#444444")
    save(figure, path)


def _bars(axes: Any, cases: dict[str, Any], values: Sequence[dict[str, float]], form: str) -> None:
    middle = np.array([value["median"] for value in values])
    around = [np.abs([value.get(end, value["median"]) for value in values] - middle) for end in ("low", "high")]
    colors = [STRONG if case.startswith("ours") else "#f2a65a" if case in TORCH_CASES else QUIET for case in cases]
    axes.barh(list(cases), middle, color=colors, xerr=around, error_kw={"ecolor": "#555555", "elinewidth": 1})
    limit = min(max(middle), CUT * float(np.median(middle)))
    for place, (value, low, high) in enumerate(zip(middle, middle - around[0], middle + around[1], strict=True)):
        beyond = low > limit
        options = {"color": "white", "ha": "right"} if beyond else {"ha": "left", "bbox": BEHIND}
        x, shift = (1.2 * limit, -4) if beyond else (min(high, 1.08 * limit), 4)
        text = form.format(value) + (" ▸" if beyond else "")
        axes.annotate(text, (x, place), (shift, 0), textcoords="offset points", **NUMBER, **options)
    axes.set_xlim(0, 1.2 * limit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=LETTERS)


# ----------------------------------------------------------------------------------------------------------------- runs


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("step_time", description="Time of a training step on the devices at hand.")
    all_cases = [*CASES, *TORCH_CASES]
    new.add_argument("--model", choices=MODELS, help="default: small on CPU devices, medium on accelerators")
    new.add_argument("--cases", nargs="+", choices=all_cases, default=all_cases, help="see step_time_variants.py")
    new.add_argument("--rounds", type=positive, default=ROUNDS, help=f"turns of every case (default: {ROUNDS})")
    new.add_argument("--steps", type=positive, default=STEPS, help=f"steps in a turn (default: {STEPS})")
    new.add_argument("--out", type=Path, default=OUT, help="folder of the JSON file and the picture")
    new.add_argument("--dtype", choices=TOLERANCE, help="of computation and wire (default: that of the model)")
    new.add_argument("--redraw", action="store_true", help="run nothing; table and picture of what is kept")
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    console, start = Console(), time.monotonic()
    name = options.model or ("small" if available_devices(SIMULATED_DEVICES)[0].platform == "cpu" else "medium")
    model = MODELS[name]
    if options.dtype:
        name, model = f"{name}_{options.dtype}", dataclasses.replace(model, dtype=jnp.dtype(options.dtype))
    kept = options.out / f"{name}.json"
    try:
        found = _kept(kept) if options.redraw else _measured(model, options, console)
    except (ValueError, RuntimeError, TimeoutError) as error:
        Console(stderr=True).print(f"step_time: error: {error}", highlight=False)
        return 2
    console.print(table(name, found))
    for line in remarks(found):
        console.print(line, highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found, indent=1) + "\n")
    draw(kept.with_suffix(".png"), name, found)
    console.print(f"{options.out}, after {time.monotonic() - start:.0f} s", highlight=False)
    return 0


def _kept(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"--redraw: there is no {path}; run without it first.")
    return json.loads(path.read_text())


def _measured(model: Model, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    columns = (SpinnerColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        return measure(model, options.cases, options.rounds, options.steps, progress)


if __name__ == "__main__":
    sys.exit(main())
