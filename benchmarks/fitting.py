"""Training loop of a job, guarded against faults: ``fit(job, ...)``.

Life of a run:
  begin     from step 0, or from the newest sound checkpoint: parameters, optimizer, metrics, rng, position in the data
  a step    one batch, determined by seed and step number; each device updates its metric state
  a row     every --log-every steps: metrics reduced over devices, written when the next row is due
  a save    every --checkpoint-every steps, at the end, and after SIGTERM: committed in the background

After a save the run continues from the saved state, including the metric state, exactly as a restored run does. So a
run that was killed and restarted has the same losses as an uninterrupted run, bit for bit.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.job import CHECKPOINTS, Job, TrainConfig
from benchmarks.run_log import RunLog
from benchmarks.text import fixed_windows, random_windows
from xlstm_jax.distributed import (
    LoopGuard,
    check_replicas,
    create_train_state,
    ema_params,
    make_eval_step,
    make_train_step,
    muon,
    shard_batch,
    skip_nonfinite,
    with_ema,
)
from xlstm_jax.distributed.checkpoint.checkpointer import Checkpointer
from xlstm_jax.distributed.metrics import (
    Compose,
    Local,
    Perplexity,
    StatefulMetric,
    Sum,
    Synced,
    Throughput,
    WeightedMean,
    make_log_step,
)
from xlstm_jax.distributed.training.state import abstract_train_state
from xlstm_jax.forecast.cost.flops import count_flops
from xlstm_jax.forecast.hardware import chip_of
from xlstm_jax.forecast.hardware.chips import peak_rate

HELD_OUT_WINDOWS = 128
WARM_UP_SHARE = 0.05
FINAL_LR_SHARE = 0.05
MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.01
ADAM_B2 = 0.95
ADAMW_RMS = 0.2  # RMS of AdamW updates, relative to the learning rate
KEEP_CHECKPOINTS = 3
SAVE_TIMEOUT_S = 60
FIRST_SAVE_S = 600.0  # time limit of the first save, which compiles
SHOWN = {"loss": ".3f", "held_out_loss": ".3f", "tokens_per_s": ",.0f"}  # formats of values on the progress bar


class Run(NamedTuple):
    """Content of a checkpoint: train state, metric state, number of the next batch, and rng."""

    state: TrainState
    metrics: Synced
    position: Any
    rng: jax.Array


# ------------------------------------------------------------------------------------------------ the model's training


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    warm_up = max(1, round(config.steps * WARM_UP_SHARE))
    schedule = optax.warmup_cosine_decay_schedule(
        config.lr / warm_up, config.lr, warm_up, max(config.steps, warm_up + 1), config.lr * FINAL_LR_SHARE
    )
    if config.optimizer == "muon":  # with steps as large as those of AdamW, so that one learning rate serves both
        decay = {"weight_decay": WEIGHT_DECAY, "adam_weight_decay": WEIGHT_DECAY}
        tx = muon(schedule, **decay, adam_b2=ADAM_B2, consistent_rms=ADAMW_RMS)
    else:
        tx = optax.adamw(schedule, b2=ADAM_B2, weight_decay=WEIGHT_DECAY)
    tx = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), tx)
    return skip_nonfinite(with_ema(tx, partial(warmed_up_decay, config.ema)) if config.ema else tx)


def warmed_up_decay(decay: float, count: jax.Array) -> jax.Array:
    """Returns the decay of the average after ``count`` steps, smaller at first to forget the initial weights."""
    return jnp.minimum(decay, (1 + count) / (10 + count))


def byte_losses(
    apply_fn: Callable[..., Any],
    params: Any,
    windows: jax.Array,
    collections: Mapping[str, Any] = MappingProxyType({}),
    **kwargs: Any,
) -> tuple[jax.Array, jax.Array]:
    """Computes losses and hits per byte: ``windows[b, t + 1] -> [b, t]``.

    The loss is in nats, given the preceding bytes of the window; a hit is a byte that was predicted as the most likely.
    """
    windows = windows.astype(jnp.int32)
    found = apply_fn({"params": params, **collections}, windows[:, :-1], windows[:, 1:], method="losses", **kwargs)
    return found.loss, found.correct


def train_metric() -> Compose:
    """Returns the metrics that the step accumulates on each device, from one row of the log to the next."""
    means = {"loss": WeightedMean(), "perplexity": Perplexity(), "accuracy": WeightedMean()}
    return Compose(means | {"tokens": Sum(jnp.int32)})


def loss_fn(
    params: Any, apply_fn: Callable[..., Any], batch: jax.Array, rng: jax.Array
) -> tuple[jax.Array, dict[str, Any]]:
    losses, right = byte_losses(apply_fn, params, batch, train=True, rngs={"dropout": rng})
    return losses.mean(), {"loss": losses, "perplexity": losses, "accuracy": right, "tokens": losses.size}


def held_out_losses(
    params: Any, apply_fn: Callable[..., Any], batch: dict[str, jax.Array], *collections: Mapping[str, Any]
) -> dict[str, jax.Array]:
    return {"values": byte_losses(apply_fn, params, batch["windows"], *collections)[0], "weight": batch["weight"]}


def make_evaluate(job: Job) -> Callable[[TrainState], jax.Array]:
    """Returns ``evaluate(state)``, the mean loss on fixed held-out windows, equal for every mesh.

    Padding has weight 0.
    """
    padded = -(-HELD_OUT_WINDOWS // job.mesh.size) * job.mesh.size
    windows = fixed_windows(job.text.held_out, HELD_OUT_WINDOWS, job.config.context)
    windows = place(job, np.pad(windows, ((0, padded - HELD_OUT_WINDOWS), (0, 0))))
    batch = {"windows": windows, "weight": place(job, (np.arange(padded) < HELD_OUT_WINDOWS))}
    mean = WeightedMean()
    eval_step = make_eval_step(held_out_losses, job.mesh, job.batch_axes, metric=mean)
    log_step = make_log_step(mean, job.mesh, job.batch_axes)
    return lambda state: log_step(eval_step(state, batch, mean.empty(job.batch_axes, job.mesh)))[0]


def draw_batch(job: Job, index: int) -> jax.Array:
    config = job.config
    return place(job, random_windows(job.text.train, config.batch_size, config.context, (config.seed, index)))


def place(job: Job, rows: np.ndarray) -> jax.Array:
    """Puts global rows on the mesh; every process computes the global rows, and passes its local part."""
    own = len(rows) // jax.process_count()
    return shard_batch(rows[own * jax.process_index() :][:own], job.mesh, job.batch_axes)


# ---------------------------------------------------------------------------------------------------------- checkpoints


@contextmanager
def checkpointer_of(job: Job) -> Iterator[Checkpointer | None]:
    """Opens the checkpointer of a job; yields None if the job has no checkpoint folder."""
    config = job.config
    if config.checkpoint_dir is None:
        yield None
        return
    folder, timeout_s = Path(config.checkpoint_dir, CHECKPOINTS), min(config.step_timeout, SAVE_TIMEOUT_S)
    with Checkpointer(
        folder,
        config.checkpoint_every,
        KEEP_CHECKPOINTS,
        async_timeout_s=timeout_s,
        peer_timeout_s=max(config.step_timeout, config.start_timeout),
    ) as checkpointer:
        yield checkpointer


def begin(job: Job, checkpointer: Checkpointer | None) -> Run:
    """Returns a new run, or with ``resume`` the run in the newest sound checkpoint."""
    init_key, step_key, _ = keys(job)
    tokens = jax.ShapeDtypeStruct((job.config.batch_size, job.config.context), jnp.int32)
    where = {"batch_axes": job.batch_axes, "allow_replicated": job.config.replicated}
    if job.config.resume and checkpointer.latest_step() is not None:
        state = abstract_train_state(job.model, optimizer(job.config), job.mesh, init_key, tokens, **where)
        whole = NamedSharding(job.mesh, PartitionSpec())
        metrics = jax.eval_shape(lambda: train_metric().state_of({}))
        metrics, rng = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
            (metrics, jax.eval_shape(lambda: step_key)),
        )
        return Run(*checkpointer.restore(tuple(Run(state, metrics, 0, rng))))
    tokens = jnp.zeros(tokens.shape, tokens.dtype)
    state = create_train_state(job.model, optimizer(job.config), job.mesh, init_key, tokens, **where)
    return Run(state, train_metric().state_of({}), 0, step_key)


def keys(job: Job) -> jax.Array:
    """Returns the keys of the initial values, the steps, and the sample."""
    return jax.random.split(jax.random.key(job.config.seed), 3)


# ---------------------------------------------------------------------------------------------------------------- steps


class Programs(NamedTuple):
    """Compiled functions of a job."""

    step: Callable[..., tuple[TrainState, dict[str, jax.Array], Local]]
    log_step: Callable[[Local], tuple[dict[str, jax.Array], Local]]
    sync: Callable[[Local], Synced]
    evaluate: Callable[[Any], jax.Array]
    flops: float  # model FLOP per step and device, without recomputation


def traced_step(job: Job, run: Run) -> tuple[jax.stages.Traced, float]:
    """Traces the step; returns the traced step and its model FLOP, as in ``Programs.flops``."""
    metric, mesh, axes = train_metric(), job.mesh, job.batch_axes
    options = {"metric": metric, "allow_replicated": job.config.replicated}
    step = make_train_step(loss_fn, mesh, axes, job.config.num_minibatches, **options)
    traced = step.trace(run.state, draw_batch(job, 0), run.rng, metric.empty(axes, mesh))
    flops = count_flops(traced.jaxpr, mesh.size).by_direction()
    return traced, sum(flops.values()) - flops.get("recompute", 0.0)


def compile_programs(job: Job, run: Run) -> Programs:
    metric, mesh, axes = train_metric(), job.mesh, job.batch_axes
    sync = jax.shard_map(metric.sync, mesh=mesh, in_specs=PartitionSpec(axes), out_specs=PartitionSpec())
    evaluate = make_evaluate(job)
    traced, flops = traced_step(job, run)
    evaluate(run.state).block_until_ready()
    return Programs(traced.lower().compile(), make_log_step(metric, mesh, axes), jax.jit(sync), evaluate, flops)


def fit(
    job: Job, run: Run, guard: LoopGuard, checkpointer: Checkpointer | None, log: RunLog, console: Console
) -> tuple[Run, list[dict[str, float]]]:
    """Runs the remaining steps with a progress bar; stops early after SIGTERM.

    Returns the run and the rows of the log; the row of the last step has a held-out loss.

    Raises:
      NonFiniteError: too many consecutive losses or gradients are not finite; names the step.
    """
    config = job.config
    with console.status("compiling"):
        programs = compile_programs(job, run)
    state, local = run.state, train_metric().as_local(run.metrics, job.batch_axes, job.mesh)
    speed, rows, position, saved = _Speed(job, programs.flops), [], int(run.position), False
    with _progress(console) as progress:
        task = progress.add_task("training", total=config.steps, completed=position, **dict.fromkeys(SHOWN, "…"))
        while position < config.steps:
            state, metrics, local = programs.step(state, draw_batch(job, position), run.rng, local)
            position += 1
            progress.update(task, advance=1)
            guard.step_done(position, metrics)
            stop, last = guard.should_stop(position), position == config.steps
            due = last or position % config.eval_every == 0
            if due or position % config.log_every == 0:
                row, local = programs.log_step(local)
                row |= {"grad_norm": metrics["grad_norm"]} | speed.row(position)
                row |= held_out_row(programs, state, config.ema > 0) if due else {}
                log.write(position, row)
                rows.append({"step": position} | row)
                _show(progress, task, rows)
            if checkpointer and (stop or last or position % config.checkpoint_every == 0):
                # The first save compiles; the time of a save does not count as time of a step.
                with guard.paused(config.step_timeout if saved else max(config.step_timeout, FIRST_SAVE_S)):
                    run, saved = Run(state, programs.sync(local), position, run.rng), True
                    local = train_metric().as_local(run.metrics, job.batch_axes, job.mesh)
                    check_replicas(state)  # the checkpoint has only one replica
                    log.flush()  # so that rows before the checkpoint are not lost with this process
                    checkpointer.save(position, tuple(run), force=stop or last)
            if stop:
                break
        if checkpointer:
            checkpointer.wait()
    return run._replace(state=state, position=position), jax.tree.map(float, rows)


def held_out_row(programs: Programs, state: TrainState, with_average: bool) -> dict[str, jax.Array]:
    row = {"held_out_loss": programs.evaluate(state)}
    if with_average:
        average = state.replace(params=ema_params(state.opt_state, state.params))
        row["averaged_held_out_loss"] = programs.evaluate(average)
    return row


class _Speed:
    """Tokens per second of the second-last log interval, which has ended, so that the host does not wait.

    Also "mfu" if the peak rate of the chip is known: model FLOPs utilization, the fraction of the peak rate.
    """

    def __init__(self, job: Job, flops: float) -> None:
        chip, tokens = chip_of(job.mesh.devices.flat[0].device_kind), job.config.batch_size * job.config.context
        self._mfu_per_token = flops / (tokens * peak_rate(chip, job.config.dtype)) if chip else None
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
            row |= {"mfu": row["tokens_per_s"] * self._mfu_per_token} if self._mfu_per_token else {}
        self._steps, self._time = (*self._steps[-1:], step), now
        return row


def _show(progress: Progress, task: Any, rows: list[dict[str, Any]]) -> None:
    """Shows the second-last row on the progress bar, which is on the host because the log has just written it."""
    if len(rows) < 2:
        return
    row = rows[-2]
    progress.update(task, **{name: f"{float(row[name]):{form}}" for name, form in SHOWN.items() if name in row})


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("held-out {task.fields[held_out_loss]}"),
        TextColumn("{task.fields[tokens_per_s]} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
