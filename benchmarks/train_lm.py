"""Trains a byte-level language model, fully sharded, on real text: ``python -m benchmarks.train_lm``.

    TrainConfig  -- prepare -->  Job(text, mesh, model)  -- run -->  Result, and a folder with metrics.csv and pictures

The mesh decides how. Axes whose name begins with "fsdp" split parameters, gradients and optimizer state; every axis
splits the batch. ``--replicated`` trains the same model from the same initial values on the same batches without
wrapping anything: the loss curve is the same, the bytes per device are not.

Before training the bytes that each kind of state takes on one device are read off the live arrays; at the end the
model is compared with one that knows only the frequency of bytes, and writes some text of its own.

Metrics cost no waiting. The step adds to a state on each device; every ``--log-every`` steps it is reduced over devices
and emptied, and its values are read when those of the next time are due.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text as RichText

from benchmarks.models import BLOCKS, LanguageModel
from benchmarks.report import comparison_table, draw_loss, draw_memory, memory_table
from benchmarks.text import Text, byte_frequency_loss, fixed_windows, load_text, random_windows
from xlstm_jax.distributed import (
    DeviceMeshManager,
    available_devices,
    create_train_state,
    make_train_step,
    partition_specs,
    shard_module_params,
)
from xlstm_jax.distributed.metrics import (
    Compose,
    MetricLogger,
    Perplexity,
    StatefulMetric,
    Sum,
    Throughput,
    WeightedMean,
    make_log_step,
)

SIMULATED_DEVICES = 8
SHARD_AXIS_PREFIX = "fsdp"
HELD_OUT_WINDOWS = 128
WARM_UP_SHARE = 0.05
FINAL_LR_SHARE = 0.05
MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.01
ADAM_B2 = 0.95
SAMPLE_PROMPT = "def "
SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True)
class TrainConfig:
    """What a run is made of; ``mesh=None`` is all devices on one axis "fsdp", ``out=None`` a new folder in runs/."""

    model: str = "xlstm"
    mesh: dict[str, int] | None = None
    data: tuple[str, ...] = ()
    replicated: bool = False
    steps: int = 1300
    batch_size: int = 8
    context: int = 128
    d_model: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0
    lr: float = 5e-3
    num_minibatches: int = 1
    dtype: str = "float32"
    gather_dtype: str | None = None
    min_weight_size: int = 2**12
    remat: bool = False
    seed: int = 0
    out: str | None = None
    sample_bytes: int = 300
    log_every: int = 10
    eval_every: int = 130


@dataclass(frozen=True)
class Job:
    """A config with everything that can be wrong with it checked."""

    config: TrainConfig
    text: Text
    mesh: Mesh
    model: LanguageModel

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return self.mesh.axis_names

    @property
    def layout(self) -> str:
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return f"replicated, {mesh}" if self.config.replicated else f"sharded, {mesh}"


@dataclass(frozen=True)
class Result:
    """``rows`` has what ``metrics.csv`` has, a dict for every logged step; losses are in nats per byte."""

    rows: list[dict[str, float]]
    held_out_loss: float
    baseline: float
    sample: bytes
    memory: dict[str, dict[str, int]]
    out: Path
    params: Any = field(repr=False)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]


# --------------------------------------------------------------------------------------------------------------- checks


def prepare(config: TrainConfig) -> Job:
    """Checks the config, reads the text, and makes the mesh and the (not yet initialised) model.

    Raises:
        ValueError: in one line, which option is wrong and what to give instead.
    """
    if config.d_model % (2 * config.heads):
        raise ValueError(f"--d-model {config.d_model}: must be a multiple of 2 * --heads = {2 * config.heads}.")
    if config.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    mesh = make_mesh(config.mesh)
    parts = mesh.size * config.num_minibatches
    if config.batch_size % parts:
        raise ValueError(
            f"--batch-size {config.batch_size}: {mesh.size} devices * {config.num_minibatches} minibatches = {parts} do"
            f" not divide it. Take {-(-config.batch_size // parts) * parts}."
        )
    text = load_text(config.data)
    for data in (text.train, text.held_out):
        fixed_windows(data, 1, config.context)
    return Job(config, text, mesh, make_model(config, mesh))


def parse_mesh(text: str) -> dict[str, int]:
    """ "dp=2,fsdp=4" -> {"dp": 2, "fsdp": 4}"""
    shape = {}
    for item in text.split(","):
        axis, _, size = item.partition("=")
        if not axis or axis in shape or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{text!r}: {item!r} is not a new axis with a positive size. Write it as dp=2,fsdp=4."
            )
        shape[axis] = int(size)
    return shape


def make_mesh(shape: dict[str, int] | None) -> Mesh:
    """The mesh over the first devices; where there are only CPUs, over simulated ones."""
    wanted = math.prod((shape or {}).values()) if shape else None
    devices = available_devices(wanted or SIMULATED_DEVICES)
    shape = shape or {SHARD_AXIS_PREFIX: len(devices)}
    if math.prod(shape.values()) > len(devices):
        raise ValueError(f"--mesh {shape}: takes {wanted} devices, and there are {len(devices)}. Take smaller axes.")
    return DeviceMeshManager.create_device_mesh(shape, devices=devices[:wanted])


def make_model(config: TrainConfig, mesh: Mesh) -> LanguageModel:
    axes = tuple(axis for axis in mesh.axis_names if axis.startswith(SHARD_AXIS_PREFIX))
    if not axes and not config.replicated:
        raise ValueError(
            f"--mesh {dict(mesh.shape)}: no axis named {SHARD_AXIS_PREFIX}... to split parameters over. Add"
            f" {SHARD_AXIS_PREFIX}=N, or give --replicated."
        )
    wrap = functools.partial(
        shard_module_params, axis_name=axes, min_weight_size=config.min_weight_size, gather_dtype=config.gather_dtype
    )
    return LanguageModel(
        block=config.model,
        dim=config.d_model,
        num_layers=config.layers,
        num_heads=config.heads,
        dropout=config.dropout,
        remat=config.remat,
        wrap=None if config.replicated else wrap,
        dtype=jnp.dtype(config.dtype),
    )


# ------------------------------------------------------------------------------------------------------------- training


def train(config: TrainConfig, console: Console | None = None) -> Result:
    """Prepares and runs a training; ``console=None`` shows nothing. Raises as ``prepare`` does."""
    return run(prepare(config), console or Console(quiet=True))


def run(job: Job, console: Console) -> Result:
    config = job.config
    out = Path(config.out or f"runs/{config.model}-{time.strftime('%Y%m%d-%H%M%S')}")
    out.mkdir(parents=True, exist_ok=True)
    init_key, step_key, sample_key = jax.random.split(jax.random.key(config.seed), 3)
    tokens = jnp.zeros((config.batch_size, config.context), jnp.int32)
    state = create_train_state(job.model, optimizer(config), job.mesh, init_key, tokens, batch_axes=job.batch_axes)
    memory = memory_per_device(job, state)
    write_config(out / "config.json", job, state)
    introduce(job, state, memory, console)

    with MetricLogger(out) as logger:
        state, rows = fit(job, state, step_key, console, logger)
    with console.status("sampling"):
        sample = generate(job.model, state.params, SAMPLE_PROMPT, config, sample_key) if config.sample_bytes else b""
    baseline = byte_frequency_loss(job.text.train, job.text.held_out)
    result = Result(rows, rows[-1]["held_out_loss"], baseline, sample, memory, out, state.params)
    draw_loss(out / "loss.png", f"{config.model}, {job.layout}", rows, baseline)
    draw_memory(out / "memory.png", f"{config.model}, {parameter_count(state) / 1e6:.2f} M parameters", memory)
    conclude(result, console)
    return result


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    warm_up = max(1, round(config.steps * WARM_UP_SHARE))
    schedule = optax.warmup_cosine_decay_schedule(
        config.lr / warm_up, config.lr, warm_up, max(config.steps, warm_up + 1), config.lr * FINAL_LR_SHARE
    )
    return optax.chain(
        optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adamw(schedule, b2=ADAM_B2, weight_decay=WEIGHT_DECAY)
    )


def byte_losses(
    apply_fn: Callable[..., jax.Array], params: Any, windows: jax.Array, **kwargs: Any
) -> tuple[jax.Array, jax.Array]:
    """Nats of each byte given those before it in its window, ``windows[b, t + 1] -> [b, t]``, and whether it was the
    likeliest."""
    windows = windows.astype(jnp.int32)
    logits, bytes_ = apply_fn({"params": params}, windows[:, :-1], **kwargs), windows[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, bytes_), jnp.argmax(logits, axis=-1) == bytes_


def train_metric() -> Compose:
    """What the step adds to, on each device; of the steps since the last row."""
    means = {"loss": WeightedMean(), "perplexity": Perplexity(), "accuracy": WeightedMean()}
    return Compose(means | {"tokens": Sum(jnp.int32)})


def loss_fn(
    params: Any, apply_fn: Callable[..., jax.Array], batch: jax.Array, rng: jax.Array
) -> tuple[jax.Array, dict[str, Any]]:
    losses, right = byte_losses(apply_fn, params, batch, train=True, rngs={"dropout": rng})
    return losses.mean(), {"loss": losses, "perplexity": losses, "accuracy": right, "tokens": losses.size}


def make_evaluate(job: Job, state: TrainState) -> Callable[[Any], jax.Array]:
    """``evaluate(params)``: mean loss on fixed held-out windows, the same for every mesh; padding has weight 0."""
    padded = -(-HELD_OUT_WINDOWS // job.mesh.size) * job.mesh.size
    windows = fixed_windows(job.text.held_out, HELD_OUT_WINDOWS, job.config.context)
    windows = _place(job, np.pad(windows, ((0, padded - HELD_OUT_WINDOWS), (0, 0))))
    weight = _place(job, np.arange(padded) < HELD_OUT_WINDOWS)
    mean = StatefulMetric(WeightedMean(), job.mesh)
    batch_spec = PartitionSpec(job.batch_axes)
    losses = jax.jit(
        jax.shard_map(
            functools.partial(byte_losses, job.model.apply),
            mesh=job.mesh,
            in_specs=(partition_specs(state.params, job.mesh), batch_spec),
            out_specs=batch_spec,
        )
    )

    def evaluate(params):
        mean.reset()
        mean.update(losses(params, windows)[0], weight)
        mean.sync()
        return mean.compute()

    return evaluate


def fit(
    job: Job, state: TrainState, rng: jax.Array, console: Console, logger: MetricLogger
) -> tuple[TrainState, list[dict[str, float]]]:
    """All steps, under a progress bar. The last row always has a held-out loss.

    Raises:
        FloatingPointError: a loss that is no number; says at which step.
    """
    config, metric = job.config, train_metric()
    step = make_train_step(loss_fn, job.mesh, job.batch_axes, config.num_minibatches, metric=metric)
    log_step = make_log_step(metric, job.mesh, job.batch_axes)
    evaluate, local = make_evaluate(job, state), metric.empty(job.batch_axes, job.mesh)
    with console.status("compiling"):
        step = step.lower(state, _batch(job, 0), rng, local).compile()
        evaluate(state.params).block_until_ready()
    speed, rows = _Speed(job), []
    with _progress(console) as progress:
        task = progress.add_task("training", total=config.steps, loss=math.nan, speed=math.nan, held_out=math.nan)
        for index in range(config.steps):
            state, metrics, local = step(state, _batch(job, index), rng, local)
            progress.update(task, advance=1)
            last, due = index + 1 == config.steps, (index + 1) % config.eval_every == 0
            if not (last or due or (index + 1) % config.log_every == 0):
                continue
            row, local = log_step(local)
            row |= {"grad_norm": metrics["grad_norm"]} | speed.row(index + 1)
            row |= {"held_out_loss": evaluate(state.params)} if last or due else {}
            logger.log(index + 1, row)
            rows.append({"step": index + 1} | row)
            if len(rows) > 1:
                _show(progress, task, rows[-2])  # which has arrived: the logger has just written it
    _show(progress, task, rows[-1])
    return state, jax.tree.map(float, rows)


class _Speed:
    """Tokens per second of the interval before the last, which is over: no one waits for the last to end."""

    def __init__(self, job: Job) -> None:
        self._metric = StatefulMetric(Throughput(jax.process_count()), job.mesh)
        self._tokens_per_step = job.config.batch_size * job.config.context // jax.process_count()
        self._start = self._time = time.perf_counter()
        self._steps: tuple[int, ...] = ()

    def row(self, step: int) -> dict[str, Any]:
        now = time.perf_counter()
        row = {"seconds": now - self._start}
        if len(self._steps) > 1:
            self._metric.reset()
            self._metric.update((self._steps[-1] - self._steps[-2]) * self._tokens_per_step, now - self._time)
            self._metric.sync()
            row["tokens_per_s"] = self._metric.compute()
        self._steps, self._time = (*self._steps[-1:], step), now
        return row


def _show(progress: Progress, task: Any, row: dict[str, Any]) -> None:
    """A row that has arrived on the progress bar.

    Raises:
        FloatingPointError: its loss is no number.
    """
    loss = float(row["loss"])
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at step {row['step']}; take a smaller --lr.")
    names = {"speed": "tokens_per_s", "held_out": "held_out_loss"}
    shown = {field: float(row[name]) for field, name in names.items() if name in row}
    progress.update(task, loss=loss, **shown)


def _batch(job: Job, index: int) -> jax.Array:
    config = job.config
    return _place(job, random_windows(job.text.train, config.batch_size, config.context, (config.seed, index)))


def _place(job: Job, windows: np.ndarray) -> jax.Array:
    return jax.device_put(windows, NamedSharding(job.mesh, PartitionSpec(job.batch_axes)))


def generate(model: LanguageModel, params: Any, prompt: str, config: TrainConfig, rng: jax.Array) -> bytes:
    """Draws bytes one by one after the prompt, each from the model's view of the last ``context`` bytes.

    Outside ``shard_map`` the sharded parameters are global arrays, and the wrapped model is the plain one.
    """
    start = np.frombuffer(prompt.encode(), np.uint8)[-config.context :]
    window = jnp.zeros(config.context, jnp.int32).at[: len(start)].set(start)

    def draw(carry, key):
        window, filled = carry
        logits = model.apply({"params": params}, window[None])[0, filled - 1]
        byte = jax.random.categorical(key, logits / SAMPLE_TEMPERATURE)
        full = filled == config.context
        window = jnp.where(full, jnp.roll(window, -1), window)
        filled = jnp.where(full, filled - 1, filled)
        return (window.at[filled].set(byte), filled + 1), byte.astype(jnp.uint8)

    keys = jax.random.split(rng, config.sample_bytes)
    _, drawn = jax.jit(lambda window, keys: jax.lax.scan(draw, (window, len(start)), keys))(window, keys)
    return prompt.encode() + np.asarray(drawn).tobytes()


# ------------------------------------------------------------------------------------------------------------ reporting


def memory_per_device(job: Job, state: TrainState) -> dict[str, dict[str, int]]:
    """Bytes of each kind of state on one device: as this run holds it, and as a whole copy.

    Gradients live only within a step, with the shapes, dtypes and places of the parameters.
    """
    kinds = {"parameters": state.params, "gradients": state.params, "optimizer state": state.opt_state}
    here = {kind: _bytes_on(job.mesh.local_devices[0], tree) for kind, tree in kinds.items()}
    whole = {kind: sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for kind, tree in kinds.items()}
    return {job.layout: here, "a whole copy": whole}


def _bytes_on(device: jax.Device, tree: Any) -> int:
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def parameter_count(state: TrainState) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))


def write_config(path: Path, job: Job, state: TrainState) -> None:
    """The options, with what the defaults turned out to be, and where the run took place."""
    facts = {
        "mesh": dict(job.mesh.shape),
        "out": str(path.parent),
        "parameters": parameter_count(state),
        "text": job.text.summary,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "flax": flax.__version__,
    }
    path.write_text(json.dumps(dataclasses.asdict(job.config) | facts, indent=2) + "\n")


def introduce(job: Job, state: TrainState, memory: dict[str, dict[str, int]], console: Console) -> None:
    device = jax.devices()[0]
    console.print(
        f"{job.config.model}: {parameter_count(state):,} parameters, {job.layout}, on {job.mesh.size} {device.platform}"
        f" devices ({device.device_kind})",
        highlight=False,
    )
    console.print(job.text.summary, highlight=False, markup=False)
    console.print(memory_table(memory))


def conclude(result: Result, console: Console) -> None:
    if result.sample:
        shown = RichText(result.sample.decode("utf-8", errors="replace"))
        console.print(Panel(shown, title="a sample", title_align="left"))
    console.print(comparison_table(result.held_out_loss, result.baseline))
    console.print(
        f"metrics.csv, metrics.jsonl, loss.png, memory.png and config.json are in {result.out}", highlight=False
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("held-out {task.fields[held_out]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )


# --------------------------------------------------------------------------------------------------------- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    new = _Parser("train_lm", description="Trains a byte-level language model, fully sharded, on real text.")
    default = TrainConfig()

    def option(name: str, help: str, type: Callable[[str], Any] = _positive, **kwargs: Any) -> None:
        value = getattr(default, name[2:].replace("-", "_"))
        shown = "" if value in (None, ()) else f" (default: {value})"
        new.add_argument(name, type=type, default=value, help=help + shown, **kwargs)

    option("--model", "the kind of block", str, choices=sorted(BLOCKS))
    option("--mesh", "axes and sizes, as dp=2,fsdp=4; by default all devices on fsdp", parse_mesh, metavar="AXES")
    option("--data", "text files or folders; by default Python's standard library", str, nargs="+", metavar="PATH")
    new.add_argument("--replicated", action="store_true", help="a whole copy of everything on every device")
    option("--steps", "optimizer steps")
    option("--batch-size", "windows per step, on all devices together")
    option("--context", "bytes per window")
    option("--d-model", "width of the residual stream")
    option("--layers", "number of blocks")
    option("--heads", "heads per block")
    option("--dropout", "share of each block's output that is dropped", float)
    option("--lr", "peak learning rate, after a warm-up and before a cosine decay", float)
    option("--num-minibatches", "parts of a device's batch, one after the other")
    option("--dtype", "dtype of the computation", str, choices=["float32", "bfloat16", "float64"])
    option("--gather-dtype", "dtype of weights on the wire", str, choices=["float32", "bfloat16", "float16"])
    option("--min-weight-size", "parameters with fewer values stay whole")
    new.add_argument("--remat", action="store_true", help="compute a block's activations again in the backward pass")
    option("--seed", "of initial values, batches and the sample", int)
    option("--out", "folder for what the run leaves; by default a new one in runs/", str, metavar="FOLDER")
    option("--sample-bytes", "length of the sample at the end; 0 for none", int)
    option("--log-every", "steps between rows of metrics.csv")
    option("--eval-every", "steps between held-out losses")
    return new


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer.")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    options = vars(parser().parse_args(arguments))
    config = TrainConfig(**options | {"data": tuple(options["data"])})
    try:
        job = prepare(config)
    except ValueError as error:
        return _fail(error, 2)
    try:
        run(job, Console())
    except FileExistsError as error:
        return _fail(error, 2)
    except FloatingPointError as error:
        return _fail(error, 1)
    return 0


def _fail(error: Exception, code: int) -> int:
    print(f"train_lm: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
