"""Savings of an attention kernel in a step, forecast for absent devices; and tracing cost of ``typed_kernel``.

    python -m benchmarks.kernels                          compiles ten steps: five minutes of a core
    python -m benchmarks.kernels --topologies v5e:2x4     selected topologies; further stored results are kept
    python -m benchmarks.kernels --redraw                 tables of the stored results
    python -m benchmarks.kernels --tracing                counts the calls of tracing a step of 12 layers: a minute

The model is the decoder of ``decoder``: 4 layers of width 1024, 8 heads of 128 with 2 heads of keys, a vocabulary of
8192, AdamW, one sequence of 8192 tokens per device on 8 devices, with remat of every block. Two attentions are
compared: XLA's, ``jax.nn.dot_product_attention(implementation="xla")``, and ``attention`` of docs/kernels.md, which is
read from the page.
"""

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from rich.console import Console

from benchmarks.decoder import Block, DecoderSize, decoder, xla_attention
from benchmarks.large_models import inputs_of, next_token_loss
from benchmarks.models import Attention
from xlstm_jax.distributed import (
    DeviceMeshManager,
    abstract_batch,
    abstract_train_state,
    make_train_step,
    shard_modules,
    simulate_cpu_devices,
    typed_kernel,
)
from xlstm_jax.forecast import CompileError, Forecast, forecast, parse_topology
from xlstm_jax.formatting import rich_table

ROOT = Path(__file__).parents[1]
PAGE, OUT = ROOT / "docs" / "kernels.md", ROOT / "benchmarks" / "results" / "kernels"
TOPOLOGIES = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "h100:1x8", "b200:1x8")
SIZE, CONTEXT, DEVICES = DecoderSize(1024, 4, 8, 8192, hidden=2816, kv_heads=2), 8192, 8
XLA, KERNEL = "XLA's", "the page's"
GIB, MS = 2**30, 1e-3
Row = dict[str, Any]


def attention_of_the_page(platform: str) -> Attention:
    """Reads ``attention`` from docs/kernels.md, for the platform "tpu" or "gpu"."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {"jax": jax, "typed_kernel": typed_kernel}
    exec(next(block for block in blocks if "def attention(" in block), names)
    return functools.partial(names["attention"], platform=platform)


# ---------------------------------------------------------------------------------------------------- what a step costs


def forecast_of(topology: str, attention: Attention, size: DecoderSize = SIZE, context: int = CONTEXT) -> Forecast:
    """Forecasts a training step of the decoder."""
    workload = decoder(size, devices=DEVICES, shard_axes=("fsdp",), context=context, attention=attention)
    step, args = workload.build_step({"fsdp": DEVICES})
    return forecast(step, *args, topology=topology, tokens=DEVICES * context, compiler_options="auto")


def row_of(topology: str, name: str, **dims: Any) -> Row:
    """Returns the stored result of a step: seconds, bytes and FLOP per device and step; or the error."""
    platform = "tpu" if parse_topology(topology).chip.torus_axes else "gpu"
    try:
        found = forecast_of(topology, xla_attention if name == XLA else attention_of_the_page(platform), **dims)
    except (CompileError, ValueError, NotImplementedError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {
        "step_s": found.step_seconds,
        "least_s": found.step_time.least if found.step_time else None,
        "bytes": found.total_bytes,
        "available_bytes": found.available_bytes,
        "hbm_bytes": found.hbm_bytes.total if found.hbm_bytes else None,
        "flops": found.flops.total,
        "flops_in_pallas": sum(found.flops.in_kernels.values()),
        "scores_bytes": max(found.flops.scores_bytes.values(), default=0.0),
        "versions": found.versions,
    }


def table(kept: dict[str, dict[str, Row]]) -> Any:
    """Builds the table of every topology, for ``rich``."""
    rows = []
    for topology, of in kept.items():
        for name, row in of.items():
            if why := row.get("refused"):
                rows.append([topology, name, why, "", "", "", "", ""])
                continue
            flops = (row["flops"], row["flops_in_pallas"])
            held = (row["bytes"], row["scores_bytes"])
            rows.append(
                [topology, name, f"{row['step_s'] / MS:.1f}", f"{row['least_s'] / MS:.1f}"]
                + [f"{one / GIB:.2f}" for one in held]
                + [f"{row['hbm_bytes'] / 1e9:.1f}"]
                + [" / ".join(f"{one / 1e12:.2f}" for one in flops)]
            )
    titles = [
        "topology",
        "attention",
        "step, ms",
        "least, ms",
        "GiB held",
        "GiB of scores",
        "GB of HBM",
        "TFLOP / Pallas",
    ]
    return rich_table("A decoder with XLA's attention and with a kernel, of a device and step", titles, rows, left=2)


def page_rows(kept: dict[str, dict[str, Row]]) -> list[str]:
    """Formats the table rows of docs/kernels.md: values with XLA's attention, and in parentheses with the kernel."""
    rows = []
    for topology, of in kept.items():
        kernel = "splash" if parse_topology(topology).chip.torus_axes else "cuDNN"
        if why := of[KERNEL].get("refused"):
            rows.append(f"| {topology} | {kernel} | refused: {why} | | | | |")
            continue
        cells = [
            f"{of[XLA][key] / unit:.{digits}f} ({of[KERNEL][key] / unit:.{digits}f})"
            for key, unit, digits in (
                ("step_s", MS, 1),
                ("least_s", MS, 1),
                ("bytes", GIB, 2),
                ("hbm_bytes", 1e9, 0),
                ("flops", 1e12, 1),
            )
        ]
        rows.append(f"| {' | '.join([topology, kernel, *cells])} |")
    return rows


# ----------------------------------------------------------------------------------------------- what it takes to trace

LAYERS = 12
TRACED = DecoderSize(256, LAYERS, 2, 512, hidden=512, kv_heads=1)
# Traced variants: (attention is a kernel, kernel is wrapped, check_vma).
VARIANTS = {
    "formula": (False, False, False),
    "formula, types": (False, False, True),
    "kernel": (True, False, False),
    "kernel, wrapped": (True, True, False),
    "kernel, wrapped, types": (True, True, True),
}


class InALoop(nn.Module):
    """Decoder with layers in a Python loop, so that each layer traces its kernel separately."""

    attention: Attention

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(TRACED.vocab_size, TRACED.dim, dtype=jnp.bfloat16, name="embed")
        x = embed(tokens)
        for i in range(LAYERS):
            x, _ = Block(TRACED, self.attention, name=f"block_{i}")(x)
        return embed.attend(x).astype(jnp.float32)


def flash(q: jax.Array, k: jax.Array, v: jax.Array, wrap: Callable[..., Any]) -> jax.Array:
    """Computes JAX's flash attention, with keys and values repeated to the number of query heads."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    by_head = (x.swapaxes(1, 2) for x in (q / q.shape[-1] ** 0.5, k, v))
    return wrap(flash_attention)(*by_head, causal=True).swapaxes(1, 2)


def tracer(kernel: bool, wrapped: bool, check_vma: bool) -> Callable[[], int]:
    """Returns a function that traces the step of a decoder without caches.

    The function returns the number of Python and C calls, because seconds vary by a tenth on a busy machine, and calls
    do not.
    """
    attention = functools.partial(flash, wrap=typed_kernel if wrapped else lambda fn: fn) if kernel else xla_attention
    mesh, rng = DeviceMeshManager.create_abstract_mesh({"fsdp": DEVICES}), jax.eval_shape(lambda: jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((DEVICES, 257), jnp.int32)
    model = shard_modules(InALoop(attention), (Block, nn.Embed), "fsdp", 2**10)
    state = abstract_train_state(
        model, optax.adamw(1e-3), mesh, rng, inputs_of(tokens), batch_axes="fsdp", allow_replicated=True
    )
    batch = abstract_batch(tokens, mesh, "fsdp")

    def calls() -> int:
        step, count = make_train_step(next_token_loss, mesh, "fsdp", check_vma=check_vma, allow_replicated=True), [0]

        def counted(frame: Any, event: str, arg: Any) -> None:
            count[0] += event in ("call", "c_call")

        jax.clear_caches()
        sys.setprofile(counted)
        try:
            step.trace(state, batch, rng)
        finally:
            sys.setprofile(None)
        return count[0]

    return calls


def trace_calls() -> Row:
    """Counts the calls of each variant, and the fraction that the wrapper adds to the calls of the bare kernel.

    Types add calls to the tracing of any model, even without a kernel; the calls that types add to the formula are
    subtracted.
    """
    calls = {}
    for name, variant in VARIANTS.items():
        trace = tracer(*variant)
        trace()  # excludes work that is done once per process
        calls[name] = trace()
    bare = calls["kernel"]
    types = calls["formula, types"] - calls["formula"]
    adds = {
        "without types": (calls["kernel, wrapped"] - bare) / bare,
        "with types": (calls["kernel, wrapped, types"] - types - bare) / bare,
    }
    return {"layers": LAYERS, "calls": calls, "adds": adds, "jax": jax.__version__}


def tracing_table(kept: Row) -> Any:
    """Builds the table of tracing calls, for ``rich``."""
    rows = [[name, f"{calls:,}"] for name, calls in kept["calls"].items()]
    rows += [[f"the wrapper adds, {name}", f"{part:.1%}"] for name, part in kept["adds"].items()]
    return rich_table(f"Tracing a step of {kept['layers']} layers", ["", "calls"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES)
    parser.add_argument("--tracing", action="store_true", help="count the calls of tracing a step instead")
    parser.add_argument("--redraw", action="store_true", help="show what is kept, and compute nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    of_steps, of_tracing = options.out / "kernels.json", options.out / "tracing.json"
    if options.tracing and not options.redraw:
        of_tracing.write_text(json.dumps(trace_calls(), indent=1) + "\n")
    elif not options.redraw:
        kept = json.loads(of_steps.read_text()) if of_steps.exists() else {}
        for topology in options.topologies:
            kept[topology] = {name: row_of(topology, name) for name in (XLA, KERNEL)}
            kept = {name: kept[name] for name in dict.fromkeys((*TOPOLOGIES, topology)) if name in kept}
            of_steps.write_text(json.dumps(kept, indent=1) + "\n")
    for path, show in ((of_steps, table), (of_tracing, tracing_table)):
        if path.exists():
            Console().print(show(json.loads(path.read_text())))


if __name__ == "__main__":
    simulate_cpu_devices(DEVICES)
    main()
