"""Trains a byte-level language model, fully sharded, on real text: ``python -m benchmarks.train_lm``.

    TrainConfig  -- prepare -->  Job(text, mesh, model)  -- run -->  Result, and a folder with metrics.csv and pictures

Mesh axes whose name begins with "fsdp" split parameters, gradients and optimizer state; every axis splits the batch.
``--replicated`` trains the same model from the same initial values on the same batches without sharding: the loss curve
is equal, the bytes per device differ.

``--generate N`` also continues N pieces of held-out text with a cache, on the sharded parameters.

Before training the bytes per device are measured on the live arrays, for each kind of state. At the end the model is
compared with a model of byte frequencies, and generates a sample text.

``--processes N`` starts N processes on this machine, which share its devices; a cluster launcher starts the same
program without the option. Checkpoints are saved to the folder of the run, or to ``--checkpoint-dir``. After an
interruption the same command with ``--resume`` continues from the newest sound checkpoint, with the losses of an
uninterrupted run.
"""

import argparse
import ctypes
import dataclasses
import functools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.panel import Panel
from rich.text import Text as RichText

from benchmarks.fitting import Run, begin, checkpointer_of, fit, keys, place
from benchmarks.generation import GATHER, make_generate
from benchmarks.job import METRICS, OPTIMIZERS, Job, TrainConfig, parse_mesh, prepare
from benchmarks.models import BLOCKS
from benchmarks.options import not_negative, positive
from benchmarks.report import comparison_table, draw_loss, draw_memory, memory_table
from benchmarks.run_log import RunLog, read_rows
from benchmarks.text import byte_frequency_loss, fixed_windows
from xlstm_jax.distributed import LoopGuard, NonFiniteError, ema_params
from xlstm_jax.distributed.checkpoint.checkpointer import CheckpointError

SAMPLE_PROMPT = "def "
SAMPLE_TEMPERATURE = 0.8
SAMPLING_S = 3600.0  # time limit of sampling, including compilation
EXIT_STOPPED = 75  # after SIGTERM, with a checkpoint: "try again" in sysexits.h
LAUNCHER = "TRAIN_LM_LAUNCHER"  # environment variable with its process id
PR_SET_PDEATHSIG = 1  # option of Linux's prctl
LEAVING_S = 30.0  # time that processes have to end after a process has failed


@dataclass(frozen=True)
class Result:
    """Result of a training run.

    ``rows`` are the rows of ``metrics.csv``, a dict per logged step; losses are in nats per byte. ``texts`` are pieces
    of held-out text, each with the continuation by the model.
    """

    rows: list[dict[str, float]]
    held_out_loss: float
    baseline: float
    sample: bytes
    memory: dict[str, dict[str, int]]
    out: Path
    params: Any = field(repr=False)
    texts: list[tuple[bytes, bytes]] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]


def train(config: TrainConfig, console: Console | None = None) -> Result | None:
    """Prepares and runs a training; ``console=None`` prints nothing. Raises the errors of ``prepare``."""
    return run(prepare(config), console or Console(quiet=True))


def run(job: Job, console: Console) -> Result | None:
    """Trains from the start, or from the newest checkpoint; returns None if SIGTERM stopped the run early."""
    config, out = job.config, Path(str(job.config.out))
    console = console if jax.process_index() == 0 else Console(quiet=True)
    with checkpointer_of(job) as checkpointer, LoopGuard(step_timeout_s=config.step_timeout) as guard:
        start = begin(job, checkpointer)
        memory = memory_per_device(job, start.state)
        if jax.process_index() == 0:
            out.mkdir(parents=True, exist_ok=True)
            write_config(out / "config.json", job, start.state)
        introduce(job, start, memory, console)
        resume_step = (int(start.position) or -1) if config.resume else None
        with RunLog(out, resume_step) as log:
            end, rows = fit(job, start, guard, checkpointer, log, console)
            if end.position < config.steps:
                console.print(how_to_go_on(config, int(end.position)), highlight=False, markup=False, soft_wrap=True)
                return None
        with guard.paused(SAMPLING_S), console.status("sampling"):
            params = ema_params(end.state.opt_state, end.state.params) if config.ema else end.state.params
            sample = generate(job, params, SAMPLE_PROMPT, keys(job)[2])
            texts = continued_texts(job, params, keys(job)[2])
    rows = read_rows(out) if jax.process_index() == 0 else rows
    baseline = byte_frequency_loss(job.text.train, job.text.held_out)
    held_out = rows[-1]["held_out_loss"] if rows else float("nan")
    result = Result(rows, held_out, baseline, sample, memory, out, end.state.params, texts)
    if jax.process_index() == 0:
        draw_loss(out / "loss.png", f"{config.model}, {job.layout}", rows, baseline)
        title = f"{config.model}, {parameter_count(end.state) / 1e6:.2f} M parameters"
        draw_memory(out / "memory.png", title, memory)
    conclude(result, console)
    return result


def how_to_go_on(config: TrainConfig, step: int) -> str:
    """Describes where SIGTERM stopped a run, and the options to continue the run."""
    stopped = f"stopped after step {step} by SIGTERM"
    if config.checkpoint_dir is None:
        return (
            f"{stopped}, and with --checkpoint-every 0 these {step} steps are lost. Leave that option out: checkpoints "
            "then go to the run's folder."
        )
    options = [] if config.checkpoint_dir == config.out else ["--checkpoint-dir", config.checkpoint_dir]
    own_out = config.out != str(Path(config.checkpoint_dir, METRICS))
    options += ["--out", str(config.out)] if own_out else []
    return f"{stopped}; go on with {shlex.join(options)} --resume"


def generate(job: Job, params: Any, prompt: str, rng: jax.Array) -> bytes:
    """Samples bytes one by one after the prompt, each given the last ``context`` bytes.

    Outside ``shard_map`` the sharded parameters are global arrays, and the wrapped model acts as the plain model.
    """
    context, count = job.config.context, job.config.sample_bytes
    if not count:
        return b""
    start = np.frombuffer(prompt.encode(), np.uint8)[-context:]
    window = np.zeros(context, np.int32)
    window[: len(start)] = start

    def draw(params, carry, key):
        window, filled = carry
        logits = job.model.apply({"params": params}, window[None])[0, filled - 1]
        byte = jax.random.categorical(key, logits / SAMPLE_TEMPERATURE)
        full = filled == context
        window = jnp.where(full, jnp.roll(window, -1), window)
        filled = jnp.where(full, filled - 1, filled)
        return (window.at[filled].set(byte), filled + 1), byte.astype(jnp.uint8)

    def sample(params, window, rng):
        keys = jax.random.split(rng, count)
        return jax.lax.scan(functools.partial(draw, params), (window, len(start)), keys)[1]

    everywhere = NamedSharding(job.mesh, PartitionSpec())
    drawn = jax.jit(sample, out_shardings=everywhere)(params, window, rng)
    return prompt.encode() + np.asarray(drawn).tobytes()


def continued_texts(job: Job, params: Any, rng: jax.Array) -> list[tuple[bytes, bytes]]:
    """Continues ``--generate`` windows of held-out text; returns (first half of the window, continuation) pairs.

    Inside ``shard_map`` each device generates its texts up to ``context`` bytes; ``--generate-gather`` sets when
    weights are gathered.
    """
    config, half = job.config, job.config.context // 2
    if not config.generate:
        return []
    rows = -(-config.generate // job.mesh.size) * job.mesh.size
    prompts = fixed_windows(job.text.held_out, rows, config.context)[:, :half].astype(np.int32)
    model = job.model.clone(decode=True, remat=False)
    options = {"gather": config.generate_gather, "temperature": SAMPLE_TEMPERATURE}
    write = make_generate(model, job.mesh, job.batch_axes, config.context, **options)
    everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(job.mesh, PartitionSpec()))
    written = np.asarray(everywhere(write(params, place(job, prompts), rng))).astype(np.uint8)[: config.generate]
    return [(row[:half].tobytes(), row[half:].tobytes()) for row in written]


# ------------------------------------------------------------------------------------------------------------ reporting


def memory_per_device(job: Job, state: TrainState) -> dict[str, dict[str, int]]:
    """Computes the bytes of each kind of state on one device: in this run, and replicated.

    Gradients exist only within a step, with the shapes, dtypes and shardings of the parameters.
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
    """Writes the options with resolved defaults, and facts about the model, the text and the machine."""
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


def introduce(job: Job, start: Run, memory: dict[str, dict[str, int]], console: Console) -> None:
    device, processes = jax.devices()[0], jax.process_count()
    console.print(
        f"{job.config.model}: {parameter_count(start.state):,} parameters, {job.layout}, on {job.mesh.size} "
        f"{device.platform} devices ({device.device_kind})" + f" of {processes} processes" * (processes > 1),
        highlight=False,
    )
    if start.position:
        console.print(f"going on after step {start.position}", highlight=False)
    console.print(job.text.summary, highlight=False, markup=False)
    console.print(memory_table(memory))


def conclude(result: Result, console: Console) -> None:
    if result.sample:
        shown = RichText(result.sample.decode("utf-8", errors="replace"))
        console.print(Panel(shown, title="a sample", title_align="left"))
    for prompt, text in result.texts:
        shown = RichText(prompt.decode("utf-8", errors="replace"), style="dim")
        shown.append(text.decode("utf-8", errors="replace"), style="not dim bold")
        console.print(Panel(shown, title="held-out text, and how the model goes on", title_align="left"))
    console.print(comparison_table(result.held_out_loss, result.baseline))
    if speeds := [row["tokens_per_s"] for row in result.rows if "tokens_per_s" in row]:
        console.print(speed_in_words(speeds, [row["mfu"] for row in result.rows if "mfu" in row]), highlight=False)
    console.print(f"metrics.csv, loss.png, memory.png and config.json are in {result.out}", highlight=False)


def speed_in_words(tokens_per_s: Sequence[float], mfu: Sequence[float]) -> str:
    """Formats the median rate, and the median MFU if the peak of the chip is known."""
    share = f", {np.median(mfu):.1%} of the chips' peak (MFU)" if mfu else ""
    return f"{np.median(tokens_per_s):,.0f} tokens/s{share}"


# --------------------------------------------------------------------------------------------------------- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    new = _Parser("train_lm", description="Trains a byte-level language model, fully sharded, on real text.")
    default = TrainConfig()

    def option(name: str, help: str, type: Callable[[str], Any] = positive, **kwargs: Any) -> None:
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
    option("--optimizer", "what trains matrices; all else is trained by AdamW", str, choices=OPTIMIZERS)
    option("--lr", "peak learning rate, after a warm-up and before a cosine decay", float)
    option("--ema", "decay of an average of the weights, which is evaluated too, and writes; 0 for none", float)
    option("--num-minibatches", "parts of a device's batch, one after the other")
    option("--dtype", "dtype of the computation", str, choices=["float32", "bfloat16", "float64"])
    option("--gather-dtype", "dtype of weights on the wire", str, choices=["float32", "bfloat16", "float16"])
    option("--min-weight-size", "parameters with fewer values stay whole")
    new.add_argument("--remat", action="store_true", help="compute a block's activations again in the backward pass")
    option("--seed", "of initial values, batches and the sample", int)
    option("--out", "folder for what the run leaves; by default a new one in runs/", str, metavar="FOLDER")
    option("--sample-bytes", "length of the sample at the end; 0 for none", int)
    option("--generate", "pieces of held-out text to go on with at the end, with a cache", not_negative, metavar="N")
    option("--generate-gather", "when that gathers weights", str, choices=GATHER)
    option(
        "--checkpoint-dir", "folder for checkpoints, which all processes see; by default --out", str, metavar="FOLDER"
    )
    option("--checkpoint-every", "steps between checkpoints; 0 for none", not_negative)
    new.add_argument("--resume", action="store_true", help="go on from the newest good checkpoint, if there is one")
    option("--step-timeout", "seconds after which a step that hangs ends the process; the first may take an hour")
    option("--start-timeout", "seconds to wait for the other processes at the start")
    option("--processes", "how many; alone, it starts them on the CPU of this machine")
    option("--coordinator", "where process 0 is reached, if no cluster tells", str, metavar="HOST:PORT")
    option("--process-id", "which process this is, if no cluster tells", int, metavar="I")
    option("--log-every", "steps between rows of metrics.csv")
    option("--eval-every", "steps between held-out losses")
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = vars(parser().parse_args(arguments))
    config = TrainConfig(**options | {"data": tuple(options["data"])})
    if config.processes > 1 and config.process_id is None:
        return spawn(arguments, config.processes)
    _end_with_launcher()
    try:
        job = prepare(config)
    except (ValueError, TimeoutError) as error:
        return _fail(error, 2)
    try:
        return 0 if run(job, Console()) is not None else EXIT_STOPPED
    except FileExistsError as error:
        return _fail(error, 2)
    except ImportError as error:  # orbax, needed for checkpoints
        return _fail(f"{error} (or give --checkpoint-every 0)", 2)
    except (CheckpointError, NonFiniteError, OSError) as error:  # OSError: a system error while reading a checkpoint
        return _fail(error, 1)


def spawn(arguments: Sequence[str], processes: int) -> int:
    """Runs the same command as N processes on the CPU, connected over loopback; only process 0 prints.

    SIGTERM is forwarded to the processes. On Linux the processes also receive SIGTERM if this process is killed.

    Returns:
      0, or the exit status of a failed process, 128 + n after signal n.
    """
    children: list[subprocess.Popen] = []
    signal.signal(signal.SIGTERM, lambda *_: [child.terminate() for child in children])
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.train_lm", *map(str, arguments), "--coordinator", address]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", LAUNCHER: str(os.getpid())}
    try:
        for i in range(processes):
            stdout = None if i == 0 else subprocess.DEVNULL
            children.append(subprocess.Popen([*command, "--process-id", str(i)], stdout=stdout, env=environment))
        return _wait(children)
    finally:
        for child in children:
            child.kill()


def _end_with_launcher() -> None:
    """Requests SIGTERM from the Linux kernel for the time when the process that called ``spawn`` ends or is killed."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):  # the launcher has already ended
        os.kill(os.getpid(), signal.SIGTERM)


def _wait(children: list[subprocess.Popen]) -> int:
    """Waits for the processes, at most ``LEAVING_S`` after the first failure; returns the exit status."""
    failed, deadline = 0, float("inf")
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
        codes = [child.returncode for child in children if child.returncode]
        if codes and not failed:
            failed, deadline = codes[0], time.monotonic() + LEAVING_S
    failed = failed or next((child.returncode for child in children if child.returncode), 0)
    return failed if failed >= 0 else 128 - failed


def _fail(error: Exception | str, code: int) -> int:
    print(f"train_lm: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
