"""Safety of a bfloat16 reduce-scatter: error of the sum over many devices, and effect on a training.

    python -m benchmarks.wire_dtypes                  a few minutes on the CPU
    python -m benchmarks.wire_dtypes --steps 0        only the sums
    python -m benchmarks.wire_dtypes --redraw         tables and picture from the stored JSON

*Sums.* N devices hold gradients x_i, and the result is the mean. A ring passes a partial sum from device to device,
each device adds its value, and the partial sum is rounded to the communication dtype: N - 1 hops, N - 1 roundings. With
stages over a torus of a x b devices the number is (a - 1) + (b - 1). NumPy simulates the ring for N absent devices, and
compares it with the mean in float64. Bounds, relative to the mean of |x_i|, with u the unit roundoff and an additional
rounding of the first value:

  worst case   (hops + 1) u          every rounding in the same direction
  expected     sqrt(hops + 1) u      independent roundings (Higham and Mary, doi:10.1137/18M1226312)

The simulation is compared, bit by bit, with the results on 8 simulated devices.

*Training.* The Transformer of the training job on 8 simulated devices, with every matrix split, is trained with float32
and with bfloat16 gradient communication, from the same seeds. CPUs sum bfloat16 in float32 and round once; a ring of
``ppermute`` rounds as links do, and with fewer bits than bfloat16 its error on 8 devices equals the error of a flat
ring of 256. Trainings that differ in a rounding diverge, so the comparison includes float32 summed in a different order
(2 x 4), the spread over seeds, and a ring with a single bit, to show how much rounding a training tolerates.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import fitting
from benchmarks.forecasts import installed_versions
from benchmarks.job import Job, TrainConfig, prepare
from benchmarks.report import LETTERS, PAGE_DPI, PAGE_WIDTH, save
from benchmarks.ring_sums import DEVICES, KINDS, SHAPES, WIRE, gradients, reduced_mean, relative_error, sums
from xlstm_jax.distributed import DeviceMeshManager, make_train_step
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.processes import available_devices
from xlstm_jax.distributed.training.cross_entropy import LMHead
from xlstm_jax.formatting import rich_table

OUT = Path(__file__).parent / "results" / "wire_dtypes"
BFLOAT16_BITS = 7  # mantissa bits without the leading bit
SIMULATED_DEVICES = 8
SEEDS = (0, 1, 2, 3, 4)
CONFIG = TrainConfig(
    "transformer", d_model=64, layers=2, heads=2, context=64, batch_size=16, steps=200, min_weight_size=2**8
)
COLORS = {"float32": "#4c78a8", "bfloat16": "#e45756", "float16": "#f2a65a"}


# ---------------------------------------------------------------------------------------------------- simulated devices


def ring_reduce_scatter(value: jax.Array, dim: int, axes: Sequence[str], *, bits: int = BFLOAT16_BITS) -> jax.Array:
    """Computes ``collectives.reduce_scatter`` as links do, with rounding to ``bits`` mantissa bits at every ring hop.

    Applies only to bfloat16 values, which XLA's CPU backend would sum in float32; wider values are summed as usual.
    """
    if value.dtype != jnp.bfloat16:
        return _reduce_scatter(value, dim, axes)
    for axis in axes:
        if lax.axis_size(axis) > 1:
            value = _ring(value.astype(jnp.float32), dim, axis, bits)
    return value.astype(jnp.bfloat16)


_reduce_scatter = collectives.reduce_scatter


def _ring(value: jax.Array, dim: int, axis: str, bits: int) -> jax.Array:
    """Reduces and scatters in a ring: piece k starts at device k + 1, and is complete at device k."""
    devices, here = lax.axis_size(axis), lax.axis_index(axis)
    pieces = jnp.stack(jnp.split(value, devices, axis=dim))
    to_next = [(i, (i + 1) % devices) for i in range(devices)]

    def own(piece):
        return lax.dynamic_index_in_dim(pieces, piece % devices, keepdims=False)

    def rounded(x):  # XLA may optimise away a cast to bfloat16 and back
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits)

    sent = rounded(own(here - 1))
    for hop in range(1, devices):
        sent = rounded(lax.ppermute(sent, axis, to_next) + own(here - 1 - hop))
    return sent


def agreement() -> dict[str, float]:
    """Computes the fraction of values that are bitwise equal in simulation and on 8 devices; flat and 2 x 4."""
    found, x = {}, gradients("noisy", SIMULATED_DEVICES)
    for shape in ((SIMULATED_DEVICES,), (2, 4)):
        for dtype in WIRE:
            ring = ring_reduce_scatter if dtype == "bfloat16" else _reduce_scatter
            got = _on_devices(ring, x, dtype, shape)
            name = f"{dtype}, {' x '.join(map(str, shape))}"
            found[name] = float(np.mean(got == _expected(x, dtype, shape)))
    once = (x / np.float32(len(x))).astype(WIRE["bfloat16"]).astype(np.float32)
    once = functools.reduce(np.add, once).astype(WIRE["bfloat16"])
    found["bfloat16, psum_scatter: summed in float32"] = float(
        np.mean(_on_devices(_reduce_scatter, x, "bfloat16", (SIMULATED_DEVICES,)) == once)
    )
    return found


def _on_devices(reduce: Callable[..., jax.Array], x: np.ndarray, dtype: str, shape: Sequence[int]) -> np.ndarray:
    axes = tuple(f"axis_{i}" for i in range(len(shape)))
    mesh = DeviceMeshManager.create_device_mesh(
        dict(zip(axes, shape, strict=True)), devices=available_devices(SIMULATED_DEVICES)[:SIMULATED_DEVICES]
    )

    def on_device(row):
        return reduce((row[0] / len(x)).astype(WIRE[dtype]), 0, axes)

    split = PartitionSpec(axes)
    return np.asarray(jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=split, out_specs=split))(x))


def _expected(x: np.ndarray, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Simulates the mean in the order of addition: from the first device for ``psum_scatter``, the next for a ring."""
    if dtype != "bfloat16":
        return reduced_mean(x, dtype, shape)
    pieces = np.split(x, SIMULATED_DEVICES, axis=1)
    out = []
    for device, piece in enumerate(pieces):
        grid = piece.reshape(*shape, -1)
        for dim, place in enumerate(np.unravel_index(device, shape)):
            grid = np.roll(grid, -(place + 1), axis=dim)
        out.append(reduced_mean(grid.reshape(len(x), -1), dtype, shape))
    return np.concatenate(out)


# ----------------------------------------------------------------------------------------------------------- a training


def bits_like(devices: int) -> int:
    """Returns the mantissa bits for which a ring of 8 has about the error of a bfloat16 ring of ``devices``."""
    few, many = (gradients("noisy", n) for n in (SIMULATED_DEVICES, devices))
    factor = relative_error(many, reduced_mean(many, "bfloat16", (devices,))) / relative_error(
        few, reduced_mean(few, "bfloat16", (SIMULATED_DEVICES,))
    )
    return BFLOAT16_BITS - round(math.log2(factor))


class Training(NamedTuple):
    """Variant of a training.

    ``options`` are for ``shard_module_params``, and ``edges`` replaces them for embedding and head. With ``bits``
    gradients are reduced by a rounding ring. ``product`` is the ``dot_general_cls`` of the projections.
    """

    mesh: dict[str, int]
    options: Mapping[str, Any] = MappingProxyType({})
    bits: int | None = None
    product: Any = None
    edges: Mapping[str, Any] | None = None


def trainings() -> dict[str, Training]:
    """Returns the trainings by name; the first training is the baseline."""
    flat, narrow, few = {"fsdp": SIMULATED_DEVICES}, {"grad_scatter_dtype": jnp.bfloat16}, bits_like(DEVICES)
    return {
        "float32": Training(flat),
        "float32, other order": Training({"fsdp_x": 2, "fsdp_y": SIMULATED_DEVICES // 2}),
        "bfloat16, ring of 8": Training(flat, narrow, BFLOAT16_BITS),
        f"{few} bits, like a ring of {DEVICES}": Training(flat, narrow, few),
        "1 bit": Training(flat, narrow, 1),
    }


def train(config: TrainConfig, training: Training, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Trains from each seed; yields the losses of the steps and the final held-out loss."""
    job = _with_options(prepare(dataclasses.replace(config, mesh=training.mesh)), training)
    step, evaluate, first = make_train_step(_loss, job.mesh, job.batch_axes), None, None
    for seed in seeds:
        job = dataclasses.replace(job, config=dataclasses.replace(job.config, seed=seed))
        state, _, _, rng = fitting.begin(job, None)
        first, evaluate = first or state, evaluate or fitting.make_evaluate(job)
        # One program for every seed: jit compares the functions in a state by identity.
        state, losses = state.replace(apply_fn=first.apply_fn, tx=first.tx), []
        with _rings(training.bits):
            for index in range(config.steps):
                state, metrics = step(state, fitting.draw_batch(job, index), rng)
                losses.append(metrics["loss"])
        yield {"seed": seed, "losses": [float(x) for x in losses], "held_out": float(evaluate(state))}


def _with_options(job: Job, training: Training) -> Job:
    given, edges = job.model.wrap, training.options if training.edges is None else training.edges

    def wrap(module: type[nn.Module]) -> type[nn.Module]:
        options = edges if issubclass(module, nn.Embed | LMHead) else training.options
        return given.func(module, **given.keywords | dict(options))

    return dataclasses.replace(job, model=job.model.clone(wrap=wrap, product=training.product))


def _loss(params: Any, apply_fn: Callable[..., Any], batch: jax.Array, rng: jax.Array, *collections: Any) -> Any:
    losses, _ = fitting.byte_losses(apply_fn, params, batch, *collections, train=True, rngs={"dropout": rng})
    return (losses.mean(), {}) if collections else losses.mean()


@contextmanager
def _rings(bits: int | None) -> Iterator[None]:
    """Replaces the reduce-scatter of the library by a ring that rounds at every hop, within the context."""
    if bits is None:
        yield
        return
    with mock.patch.object(collectives, "reduce_scatter", functools.partial(ring_reduce_scatter, bits=bits)):
        yield


def compared(runs: dict[str, list[dict]], base: str = "float32") -> list[dict[str, Any]]:
    """Compares held-out losses with ``base`` from the same seed; returns rows with the spread over seeds."""
    of_base = np.array([run["held_out"] for run in runs[base]])
    rows = []
    for name, found in runs.items():
        held_out = np.array([run["held_out"] for run in found])
        off = held_out - of_base
        row = {"training": name, "held-out loss": held_out.mean(), "spread of seeds": np.ptp(held_out)}
        row |= {"mean difference": off.mean(), "largest difference": np.abs(off).max()}
        row |= {"standard error": off.std(ddof=1) / math.sqrt(len(off))}
        rows.append({key: value if isinstance(value, str) else float(value) for key, value in row.items()})
    return rows


# ----------------------------------------------------------------------------------------------------- tables, pictures


def tables(found: dict[str, Any]) -> Iterator[Any]:
    columns = ["values", "over", "chance", "bf16", "fp16", "fp32", "likely", "worst"]
    rows = [_sum_row(values, shape, found["sums"]["by values"]) for values in KINDS for shape in SHAPES]
    yield rich_table(
        f"Mean over {DEVICES} devices: relative error by dtype on the wire",
        columns,
        rows,
        left=2,
    )
    yield rich_table(
        "Simulation and 8 simulated devices",
        ["sum", "values equal"],
        [[name, f"{share:.1%}"] for name, share in found["agreement"].items()],
    )
    if found["training"]:
        columns = ["gradients", "of spread", "loss", "spread", "off by, mean", "at most"]
        yield rich_table(
            f"{found['steps']} steps, {len(found['runs']['float32'])} seeds: held-out loss by gradients on the wire",
            columns,
            [_training_row(row, found["training"][0]["spread of seeds"]) for row in found["training"]],
        )


def _sum_row(values: str, shape: str, rows: list[dict[str, Any]]) -> list[str]:
    by_dtype = {row["dtype"]: row for row in rows if (row["values"], row["shape"]) == (values, shape)}
    narrow = by_dtype["bfloat16"]
    errors = [by_dtype[dtype]["error"] for dtype in ("bfloat16", "float16", "float32")] + [
        narrow["expected"],
        narrow["worst case"],
    ]
    return [values, shape, f"{narrow['error'] / narrow['chance']:.1%}", *(f"{error:.0e}" for error in errors)]


def _training_row(row: dict[str, Any], spread: float) -> list[str]:
    return [
        row["training"],
        f"{row['largest difference'] / spread:.1%}",
        f"{row['held-out loss']:.4f}",
        f"{row['spread of seeds']:.4f}",
        f"{row['mean difference']:+.4f} ± {row['standard error']:.4f}",
        f"{row['largest difference']:.4f}",
    ]


def draw(path: Path, found: dict[str, Any]) -> None:
    """Draws errors by number of devices and by scale, and the distance of the loss curves from float32."""
    figure = Figure(figsize=(PAGE_WIDTH, 5), dpi=PAGE_DPI, layout="constrained")
    by_devices, by_scale, curves = figure.subplots(1, 3)
    _draw_devices(by_devices, found["sums"]["by devices"])
    _draw_scales(by_scale, found["sums"]["by scale"])
    _draw_training(curves, found)
    save(figure, path)


def _draw_devices(axes: Any, rows: list[dict[str, Any]]) -> None:
    for dtype, color in COLORS.items():
        for shape, style in {"flat ring": "o-", "staged": "s--"}.items():
            there = [row for row in rows if row["dtype"] == dtype and row["shape"] == shape]
            xs, ys = [row["devices"] for row in there], [row["error"] for row in there]
            label = f"{dtype}, {'one ring' if shape == 'flat ring' else 'staged, a square'}"
            axes.plot(xs, ys, style, color=color, ms=4, lw=1.5, label=label)
        flat = [row for row in rows if row["dtype"] == dtype and row["shape"] == "flat ring"]
        expected = [row["expected"] for row in flat]
        label = "sqrt(hops + 1) u, one ring" if dtype == "float16" else None
        axes.plot([row["devices"] for row in flat], expected, ":", color="#888888", lw=1, label=label)
    axes.set_xscale("log", base=2)
    _axes(axes, "Error of the mean of noisy gradients", "devices", "relative error")


def _draw_scales(axes: Any, rows: list[dict[str, Any]]) -> None:
    for dtype in ("float16", "bfloat16"):
        for divide, style in {"before": "o-", "after": "s--"}.items():
            there = [row for row in rows if row["dtype"] == dtype and row["divide"] == divide]
            finite = [row for row in there if row["error"] is not None]
            xs, ys = [row["scale"] for row in finite], [row["error"] for row in finite]
            axes.plot(xs, ys, style, color=COLORS[dtype], ms=4, lw=1.5, label=f"{dtype}, divided {divide}")
            if len(finite) < len(there):
                shift = (2, 8) if divide == "before" else (20, 20)
                text = f"{divide}: overflow ▸"
                axes.annotate(text, (xs[-1], ys[-1]), shift, textcoords="offset points", ha="right", fontsize=8)
    axes.set_xscale("log")
    _axes(
        axes, f"Mean over {DEVICES} devices by size of gradients", "standard deviation of a gradient", "relative error"
    )


def _draw_training(axes: Any, found: dict[str, Any]) -> None:
    if not found["training"]:
        axes.set_axis_off()
        return
    base = np.array([run["losses"] for run in found["runs"]["float32"]])
    colors = dict(zip(found["runs"], ("#4c78a8", "#72b7b2", "#e45756", "#b279a2", "#9d755d"), strict=True))
    seeds = np.abs(base - base.mean(axis=0)).mean(axis=0)
    axes.plot(_smooth(seeds), color=colors["float32"], lw=1.5, label="float32: seeds among each other")
    for name, runs in list(found["runs"].items())[1:]:
        off = np.abs(np.array([run["losses"] for run in runs]) - base).mean(axis=0)
        axes.plot(_smooth(off), color=colors[name], lw=1.5, label=name)
    _axes(axes, "Loss beside float32 from the same seed", "step", "mean distance, nats per byte")


def _smooth(values: np.ndarray, width: int = 10) -> np.ndarray:
    return np.convolve(values, np.ones(width) / width, mode="valid") if len(values) > width else values


def _axes(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_yscale("log")
    axes.set_title(title, loc="left", fontsize=LETTERS)
    axes.set_xlabel(x, fontsize=LETTERS)
    axes.set_ylabel(y, fontsize=LETTERS)
    axes.tick_params(labelsize=LETTERS)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", lw=0.8)
    axes.legend(fontsize=LETTERS, frameon=False, loc="upper left", bbox_to_anchor=(-0.05, -0.14))  # beside no line


# ----------------------------------------------------------------------------------------------------------------- runs


def compute(config: TrainConfig, seeds: Sequence[int], progress: Progress) -> dict[str, Any]:
    """Computes sums, agreement and trainings; returns the content of the JSON file."""
    task = progress.add_task("sums over devices that are not there", total=1 + len(seeds) * len(trainings()))
    available_devices(SIMULATED_DEVICES)  # before JAX initialises its devices
    found = {"sums": sums(), "agreement": agreement(), "steps": config.steps, "runs": {}, "training": []}
    progress.advance(task)
    for name, training in trainings().items() if config.steps else ():
        found["runs"][name] = []
        progress.update(task, description=name)
        for run in train(config, training, seeds):
            found["runs"][name].append(run)
            progress.advance(task)
    if found["runs"]:
        found["training"] = compared(found["runs"])
    return found | {"config": dataclasses.asdict(config), "versions": versions()}


def versions() -> dict[str, str]:
    return installed_versions() | {"numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__}


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("wire_dtypes", description="When a bfloat16 reduce-scatter is safe.")
    new.add_argument("--steps", type=int, default=CONFIG.steps, help="of each training; 0: none")
    new.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="at least two")
    new.add_argument("--data", nargs="+", default=[], help="text to train on; by default Python's standard library")
    new.add_argument("--out", type=Path, default=OUT, help="folder of the JSON file and the picture")
    new.add_argument("--redraw", action="store_true", help="compute nothing; tables and picture of what is there")
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parser().parse_args(arguments), Console()
    path = options.out / "wire_dtypes.json"
    if options.redraw:
        found = json.loads(path.read_text())
    else:
        config = dataclasses.replace(CONFIG, steps=options.steps, data=tuple(options.data))
        columns = (SpinnerColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            found = compute(config, options.seeds, progress)
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found) + "\n")
    for table in tables(found):
        console.print(table)
    draw(options.out / "wire_dtypes.png", found)
    console.print(f"{options.out}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
