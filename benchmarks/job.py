"""Training job: its options, and the checked text, mesh and model built from the options.

TrainConfig  -- prepare -->  Job(config, text, mesh, model)
"""

import argparse
import dataclasses
import functools
import math
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import benchmarks
import xlstm_jax
from benchmarks.models import LanguageModel
from benchmarks.text import Text, fixed_windows, load_text
from xlstm_jax.distributed import DeviceMeshManager, assert_same_everywhere, initialize_distributed, shard_module_params
from xlstm_jax.distributed.processes import available_devices
from xlstm_jax.distributed.processes.collective_errors import allgather_text

SIMULATED_DEVICES = 8
SHARD_AXIS_PREFIX = "fsdp"
OPTIMIZERS = ("adamw", "muon")
CHECKPOINTS, METRICS = "steps", "metrics"  # folders below --checkpoint-dir


@dataclass(frozen=True)
class TrainConfig:
    """Options of a run.

    ``mesh=None`` puts every device on an axis "fsdp". ``out=None`` is a new folder in runs/, or ``metrics`` in the
    checkpoint folder. ``checkpoint_dir=None`` is the folder ``out``. ``checkpoint_every=0`` disables checkpoints.
    """

    model: str = "xlstm"
    mesh: dict[str, int] | None = None
    data: tuple[str, ...] = ()
    replicated: bool = False
    steps: int = 250
    batch_size: int = 8
    context: int = 128
    d_model: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0
    optimizer: str = "adamw"
    lr: float = 5e-3
    ema: float = 0.0
    num_minibatches: int = 1
    dtype: str = "float32"
    gather_dtype: str | None = None
    min_weight_size: int = 2**12
    remat: bool = False
    seed: int = 0
    out: str | None = None
    sample_bytes: int = 300
    generate: int = 0
    generate_gather: str = "each_token"
    log_every: int = 10
    eval_every: int = 25
    checkpoint_dir: str | None = None
    checkpoint_every: int = 100
    resume: bool = False
    step_timeout: int = 600
    start_timeout: int = 60
    processes: int = 1
    coordinator: str | None = None
    process_id: int | None = None


@dataclass(frozen=True)
class Job:
    """Checked config with its text, mesh and model."""

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


# --------------------------------------------------------------------------------------------------------------- checks


def prepare(config: TrainConfig) -> Job:
    """Checks the config, reads the text, and creates the mesh and the model (not yet initialised).

    With several processes, joins the processes and compares their config, text and code.

    Raises:
        ValueError: an option is invalid (names the option and a valid value), or processes differ (names the
            difference).
    """
    text = _agreed_text(config)
    if config.d_model % (2 * config.heads):
        raise ValueError(f"--d-model {config.d_model}: must be a multiple of 2 * --heads = {2 * config.heads}.")
    if not 0 <= config.ema < 1:
        raise ValueError(f"--ema {config.ema}: a decay is at least 0, for no average, and less than 1. Take 0.999.")
    if config.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    mesh = make_mesh(config.mesh, config.processes)
    parts = mesh.size * config.num_minibatches
    if config.batch_size % parts:
        raise ValueError(
            f"--batch-size {config.batch_size}: {mesh.size} devices * {config.num_minibatches} minibatches = {parts} do"
            f" not divide it. Take {-(-config.batch_size // parts) * parts}."
        )
    return Job(_with_folders(config), text, mesh, make_model(config, mesh))


def parse_mesh(text: str) -> dict[str, int]:
    """Parses a mesh shape: "dp=2,fsdp=4" -> {"dp": 2, "fsdp": 4}."""
    shape = {}
    for item in text.split(","):
        axis, _, size = item.partition("=")
        if not axis or axis in shape or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{text!r}: {item!r} is not a new axis with a positive size. Write it as dp=2,fsdp=4."
            )
        shape[axis] = int(size)
    return shape


def make_mesh(shape: dict[str, int] | None, processes: int) -> Mesh:
    """Creates the mesh over the first devices; on CPUs over simulated devices, equally many per process."""
    simulated = math.prod((shape or {}).values()) if shape else SIMULATED_DEVICES
    if simulated % processes:
        raise ValueError(f"--processes {processes}: they cannot share {simulated} devices equally. Take a divisor.")
    devices = available_devices(simulated // processes)
    processes = jax.process_count()  # from the cluster environment if --processes was not given
    shape = shape or {SHARD_AXIS_PREFIX: len(devices)}
    size = math.prod(shape.values())
    if size > len(devices):
        raise ValueError(f"--mesh {shape}: takes {size} devices, and there are {len(devices)}. Take smaller axes.")
    if size == len(devices):
        return DeviceMeshManager.create_device_mesh(shape)
    if processes > 1:
        raise ValueError(f"--mesh {shape}: takes {size} of {len(devices)} devices, and several processes take all.")
    return DeviceMeshManager.create_device_mesh(shape, devices=devices[:size])


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


def _agreed_text(config: TrainConfig) -> Text:
    """Joins the other processes, reads the text, and compares options, text and code between processes.

    An error in a single process is part of the comparison, so that every process raises instead of waiting.
    """
    place = (config.coordinator, config.processes, config.process_id) if config.processes > 1 else ()
    # A pause within the limits of the guard must not count as a dead process.
    heartbeat_s = max(config.start_timeout, config.step_timeout)
    initialize_distributed(*place, initialization_timeout_s=config.start_timeout, heartbeat_timeout_s=heartbeat_s)
    text, problem = None, None
    try:
        _check_checkpoints(config)
        text = _checked_text(config)
    except (ValueError, OSError) as error:
        problem = error
    assert_same_everywhere(_what_must_agree(config, text, problem))
    if problem is not None:
        raise problem
    return text


def _checked_text(config: TrainConfig) -> Text:
    text = load_text(config.data)
    for data in (text.train, text.held_out):
        fixed_windows(data, 1, config.context)
    return text


def _with_folders(config: TrainConfig) -> TrainConfig:
    """Fills in folders that the config leaves open; every process uses the checkpoint folder of process 0."""
    new = f"runs/{config.model}-{time.strftime('%Y%m%d-%H%M%S')}"
    chosen = allgather_text(config.checkpoint_dir or config.out or new, "choose the folder of the run")[0]
    out = config.out or (str(Path(config.checkpoint_dir, METRICS)) if config.checkpoint_dir else chosen)
    return dataclasses.replace(config, out=out, checkpoint_dir=chosen if config.checkpoint_every else None)


def _check_checkpoints(config: TrainConfig) -> None:
    folders = {"--checkpoint-dir": config.checkpoint_dir, "--out": config.out}
    for option, folder in folders.items():
        if "://" in (folder or ""):
            raise ValueError(f"{option} {folder}: is a URL. Give a folder of a file system that mounts it.")
    option, folder = next(((name, at) for name, at in folders.items() if at is not None), ("", None))
    if config.resume and not config.checkpoint_every:
        raise ValueError("--resume: needs checkpoints, and --checkpoint-every 0 keeps none. Leave one of them out.")
    if config.resume and folder is None:
        raise ValueError("--resume: from which checkpoints? Give --checkpoint-dir, or --out, as the run that stopped.")
    if folder is None or config.resume:
        return
    if any(Path(folder, CHECKPOINTS).glob("[0-9]*")):
        raise ValueError(
            f"{option} {folder}: holds the checkpoints of a run. Go on with it by --resume, or take another folder."
        )


def _what_must_agree(config: TrainConfig, text: Text | None, problem: Exception | None) -> dict[str, Any]:
    """Returns the options, text and code that processes must share to train the same model without deadlocks."""
    options = dataclasses.asdict(config)
    for own in ("process_id", "out"):
        options.pop(own)
    found = str(problem) if text is None else [zlib.crc32(data.tobytes()) for data in (text.train, text.held_out)]
    return {"options": options, "text": found, "code": [benchmarks, xlstm_jax]}
