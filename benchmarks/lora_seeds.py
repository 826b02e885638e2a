"""Does LoRA on a quantised base reach the loss of LoRA on bfloat16? The job of ``wire_dtypes``, from the same seeds.

    python -m benchmarks.lora_seeds                ten minutes on the CPU
    python -m benchmarks.lora_seeds --redraw       the table from the JSON that is there

For each seed the training job's Transformer is trained on its text. These weights become the base, stored and gathered
in each dtype, and adapters are trained on the text in upper case, which the base has hardly seen. Held-out losses are
of upper case. They are compared with those of a bfloat16 base from the same seed; ± is the standard error over seeds.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import track

from benchmarks import fitting, models
from benchmarks.job import Job, prepare
from benchmarks.lora import LoRABlock, is_adapter
from benchmarks.wire_dtypes import CONFIG, OUT, SEEDS, SIMULATED_DEVICES, versions
from xlstm_jax.distributed import create_train_state, freeze_params, make_train_step
from xlstm_jax.distributed.processes import available_devices
from xlstm_jax.wording import rich_table

FILE = OUT / "lora_seeds.json"
BASE = "bfloat16"
DTYPES = (BASE, "int8", "int4")
RATE = 3e-3


def upper(job: Job) -> Job:
    """The job on its text in upper case."""
    text = job.text
    raised = {
        name: np.frombuffer(getattr(text, name).tobytes().upper(), np.uint8).astype(text.train.dtype)
        for name in ("train", "held_out")
    }
    return dataclasses.replace(job, text=dataclasses.replace(text, **raised))


def with_base(params: Any, base: Any) -> Any:
    """The tree of ``params`` with the leaves that ``base`` has."""
    if not isinstance(base, dict):
        return base
    return {name: with_base(leaf, base[name]) if name in base else leaf for name, leaf in params.items()}


def run(job: Job, steps: int, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """For each seed the held-out losses before adapters are trained, and after, by dtype of the base."""
    wrap = job.model.wrap
    adapted = job.model.clone(wrap=lambda cls: wrap(LoRABlock if cls is models.TransformerBlock else cls))
    loss = lambda *args: fitting.loss_fn(*args)[0]  # noqa: E731  one for all, so that a program is compiled once
    step = make_train_step(loss, job.mesh, job.batch_axes)
    tx, tokens = optax.adamw(RATE), np.zeros((job.config.batch_size, job.config.context), np.int32)
    evaluate, first = fitting.make_evaluate(upper(job)), {}
    for seed in seeds:
        here = dataclasses.replace(job, config=dataclasses.replace(job.config, seed=seed))
        base, _, _, rng = fitting.begin(here, None)
        base = first.setdefault("base", base).replace(params=base.params, opt_state=base.opt_state, step=base.step)
        for index in range(job.config.steps):
            base, _ = step(base, fitting.draw_batch(here, index), rng)
        whole = create_train_state(adapted, optax.identity(), job.mesh, rng, tokens, batch_axes=job.batch_axes)
        found = {"seed": seed, "base": float(evaluate(base))}
        for dtype in DTYPES:
            frozen = {"trainable": is_adapter, "frozen_dtype": dtype}
            state = create_train_state(adapted, tx, job.mesh, rng, tokens, batch_axes=job.batch_axes, **frozen)
            like = first.setdefault(dtype, state)
            params = jax.jit(partial(freeze_params, **frozen))(with_base(whole.params, base.params))
            state = state.replace(params=params, apply_fn=like.apply_fn, tx=like.tx)
            for index in range(steps):
                state, _ = step(state, fitting.draw_batch(upper(here), index), rng)
            found[dtype] = float(evaluate(state))
        yield found


def table(runs: Sequence[dict[str, Any]]) -> Any:
    """A row for each dtype of the base."""
    base = np.array([found[BASE] for found in runs])
    shown = rich_table("LoRA: held-out loss", ["base", "mean", f"beside {BASE}, same seed", "at most"])
    for dtype in DTYPES:
        loss = np.array([found[dtype] for found in runs])
        error, off = loss.std(ddof=1) / len(loss) ** 0.5, loss - base
        shift = f"{off.mean():+.4f} ± {off.std(ddof=1) / len(off) ** 0.5:.4f}" if dtype != BASE else ""
        shown.add_row(dtype, f"{loss.mean():.4f} ± {error:.4f}", shift, f"{np.abs(off).max():.4f}" if shift else "")
    untrained = np.array([found["base"] for found in runs])
    shown.add_row("no adapters", f"{untrained.mean():.4f}", "", "")
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("lora_seeds", description="LoRA on bases of several dtypes, over seeds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="at least two")
    parser.add_argument("--steps", type=int, default=100, help="of the adapters")
    parser.add_argument("--redraw", action="store_true", help="compute nothing; the table of what is there")
    parser.add_argument("--out", type=Path, default=FILE, help="the JSON file")
    options = parser.parse_args(arguments)
    if not options.redraw:
        available_devices(SIMULATED_DEVICES)  # before anything else has made JAX look for devices
        job = prepare(dataclasses.replace(CONFIG, mesh={"fsdp": SIMULATED_DEVICES}))
        rounds = track(run(job, options.steps, options.seeds), "training", total=len(options.seeds))
        found = {"runs": list(rounds), "steps": [CONFIG.steps, options.steps], "versions": versions()}
        options.out.write_text(json.dumps(found) + "\n")
    Console().print(table(json.loads(options.out.read_text())["runs"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
