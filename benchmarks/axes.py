"""Comparison of meshes with several model axes (tp, cp, ep) for decoders on absent devices.

    python -m benchmarks.axes                          estimates of every mesh, from jaxprs: some ten minutes
    python -m benchmarks.axes --compile 1              also forecasts of the best mesh per cell: an hour of compilation
    python -m benchmarks.axes --targets                forecasts of single rows: long contexts, rings
    python -m benchmarks.axes --redraw                 tables of the stored results

    cell --model_meshes--> rows --estimate--> ranked --build, compile--> Forecast --> results/axes/*.json

The model is the decoder of ``decoder``, built from the layers of ``model_parallel``: heads, hidden features and the
vocabulary are split over "tp", and the tokens between blocks as well, with rings; the sequence is split over "cp";
experts are split over "ep", with a capacity of 1.25. Every axis except "tp" splits the batch, and every batch axis
except "dp" splits the parameters. Blocks are rematerialized, communication is in bfloat16, AdamW has float32 moments,
and the loss is computed by chunks of the vocabulary. Attention is a kernel on full sequences, from cuDNN or JAX's flash
attention for TPUs; over "cp" tokens are exchanged for heads. A row with ``ring=True`` has the blocks of ring attention
instead; a forecast counts every block, including the half that a causal mask skips. On GPUs the losses of the router
are omitted from a mixture.

  size            layers x d   heads, of keys   hidden       vocabulary   parameters
  8B              32 x 4096    32, 8            14,336       128,256      8.03e9
  8 x 7B          32 x 4096    32, 8            8 x 14,336   32,000       46.7e9, of which a token sees 12.9e9
  70B             80 x 8192    64, 8            28,672       128,256      70.6e9
  256k            2 x 4096     32, 8            14,336       262,144      2.6e9
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from rich.console import Console

from benchmarks.cases import attention_kernel
from benchmarks.decoder import SIZES as DECODERS
from benchmarks.decoder import DecoderSize
from benchmarks.published import LLAMA3_70B
from xlstm_jax.accelerators import compiler_options
from xlstm_jax.distributed import DeviceMeshManager, partition_specs, shard_modules, value_and_grad
from xlstm_jax.distributed.model_parallel import (
    Experts,
    ReorderedTokens,
    SplitAttention,
    SplitEmbed,
    SwiGLU,
    context_attention,
    context_positions,
    in_layout,
    on_split_input,
)
from xlstm_jax.distributed.training.cross_entropy import LMHead
from xlstm_jax.distributed.training.state import abstract_train_state
from xlstm_jax.forecast import CompileError, Forecast, forecast, parse_topology
from xlstm_jax.forecast.compiling.compile import StepCall
from xlstm_jax.forecast.cost.axis_traffic import axis_traffic
from xlstm_jax.forecast.training.model_axes import (
    Considered,
    Estimate,
    estimate,
    links_of_mesh,
    model_meshes,
    ranked,
)
from xlstm_jax.forecast.training.workload import one_line_text
from xlstm_jax.formatting import format_bytes, format_mesh, rich_table

OUT = Path(__file__).parent / "results" / "axes"
MIXTURE = DecoderSize(4096, 32, 32, 32_000, hidden=14_336, kv_heads=8, tied=False, rotary_base=1e6, experts=8)
SIZES = {
    "8B": DECODERS["llama3.1_8B"],
    "8 x 7B": MIXTURE,
    "70B": LLAMA3_70B,
    "256k": dataclasses.replace(DECODERS["llama3.1_8B"], layers=2, vocab_size=262_144),
    "small": dataclasses.replace(DECODERS["decoder_small"], tied=False),
    "small mixture": dataclasses.replace(DECODERS["decoder_small"], tied=False, experts=8),
}
TOP_K = 2
CAPACITY = 1.25
TP, CP, EP = "tp", "cp", "ep"


@dataclass(frozen=True)
class Row:
    """Training step to compile.

    Attributes:
      size: a key of ``SIZES``.
      context: tokens per sequence.
      topology: the devices to compile for.
      mesh: axis sizes, outermost first; "tp", "cp" and "ep" are model axes, the remaining axes split only the batch.
      rows: sequences in the global batch.
      tp_ring: whether products over "tp" run in rings.
      ring: whether attention is ring attention in the zigzag layout, even without "cp"; otherwise a kernel.
    """

    size: str
    context: int
    topology: str
    mesh: Mapping[str, int]
    rows: int
    tp_ring: bool = True
    ring: bool = False

    @property
    def name(self) -> str:
        attention = ", ring" if self.ring else ""
        return f"{self.size} at {self.context // 1024}k, {self.rows} sequences, {format_mesh(self.mesh)}{attention}"

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the axis sizes of the mesh, with size 1 for missing model axes."""
        return {**self.mesh, **{axis: 1 for axis in (EP, CP, TP) if axis not in self.mesh}}

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Returns the axes that split the rows of the batch."""
        return tuple(axis for axis in self.sizes if axis not in (TP, CP))

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Returns the axes along which tokens differ: the row axes and the sequence axis."""
        return (*self.row_axes, CP)

    def shard_axes(self, *, experts: bool) -> tuple[str, ...]:
        """Returns the axes over which parameters are split and gathered; experts exclude "ep", which splits experts."""
        return tuple(axis for axis in self.token_axes if axis != "dp" and not (experts and axis == EP))


# ---------------------------------------------------------------------------------------------------------- the model


def rotary(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Applies rotary embeddings to ``x[b, t, h, d]``: rotates pairs of features by angles proportional to position."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * base ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """Attention with heads split over "tp" and the sequence over "cp", exchanged for heads or in a zigzag ring."""

    size: DecoderSize
    row: Row

    @nn.compact
    def __call__(self, x):
        c, row = self.size, self.row

        kernel = attention_kernel(c, gpus=not parse_topology(row.topology).chip.torus_axes)

        def attend(q, k, v):
            how = {"impl": "ring", "block_size": 1024} if row.ring else {"impl": "ulysses"}
            positions = context_positions(q.shape[1], CP)
            q, k = (rotary(x, positions, c.rotary_base) for x in (q, k))
            # Outside of shard_map only shapes of global arrays are needed, which the plain formula gives.
            inside = not row.ring and jax.sharding.get_abstract_mesh().manual_axes
            return context_attention(q, k, v, CP, **how, kernel=(lambda *qkv, **_: kernel(*qkv)) if inside else None)

        heads = {"num_heads": c.heads, "num_kv_heads": c.kv_heads, "head_dim": c.dim // c.heads}
        return SplitAttention(**heads, attention_fn=attend, **tokens_split(row), name="heads")(x)


class Expert(nn.Module):
    """SwiGLU on the rows of an expert."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        gate, up = (nn.Dense(self.hidden, use_bias=False, dtype=jnp.bfloat16, name=name)(x) for name in ("gate", "up"))
        return nn.Dense(x.shape[-1], use_bias=False, dtype=jnp.bfloat16, name="down")(nn.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm attention, then pre-norm SwiGLU or a mixture; returns ``(x, None)``, as ``nn.scan`` requires."""

    size: DecoderSize
    row: Row

    @nn.compact
    def __call__(self, x, _=None):
        c, row = self.size, self.row
        norm = partial(on_split_input(nn.RMSNorm, TP), dtype=jnp.bfloat16)
        x = x + Attention(c, row, name="attention")(norm(name="attention_norm")(x))
        y = norm(name="mlp_norm")(x)
        if c.experts:
            options = {"num_experts": c.experts, "top_k": TOP_K, "normalize": True, "capacity_factor": CAPACITY}
            return x + Experts(Expert(c.hidden), axis=EP, **options, name="experts")(y), None
        return x + SwiGLU(c.hidden, **tokens_split(row), name="mlp")(y), None


class Decoder(nn.Module):
    """Decoder that returns the losses of the next tokens, ``labels[b, t]``, for ``tokens[b, t]``, with local t."""

    size: DecoderSize
    row: Row

    @nn.compact
    def __call__(self, tokens, labels):
        c = self.size
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0, "losses": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=c.layers,
        )
        x = SplitEmbed(c.vocab_size, c.dim, dtype=jnp.bfloat16, axis_name=TP, sequence_dim=1, name="embed")(tokens)
        x, _ = layers(c, self.row, name="blocks")(x, None)
        x = on_split_input(nn.RMSNorm, TP)(dtype=jnp.bfloat16, name="norm")(x)
        head = LMHead(c.vocab_size, dtype=jnp.bfloat16, vocab_axis=TP, sequence_dim=1, name="head")
        return head.losses(x, labels).loss


def tokens_split(row: Row) -> dict[str, Any]:
    """Returns the options of layers over "tp" with split tokens, sent in a ring beside the products."""
    return {"axis_name": TP, "sequence_dim": 1, "ring": row.tp_ring and row.sizes[TP] > 1, "dtype": jnp.bfloat16}


def sharded(row: Row) -> nn.Module:
    """Builds the sharded model of a row; each part of a block gathers its parameters."""
    options = {"gather_dtype": jnp.bfloat16, "grad_scatter_dtype": jnp.bfloat16}
    model: nn.Module = Decoder(SIZES[row.size], row)
    if SIZES[row.size].experts:
        model = shard_modules(model, Experts, row.shard_axes(experts=True), **options)
    parts = (SplitAttention, SwiGLU, SplitEmbed, LMHead)
    return shard_modules(model, parts, row.shard_axes(experts=False), **options)


def build(row: Row) -> tuple[Any, tuple[Any, ...]]:
    """Builds the step of a row and its abstract arguments: gradients in ``shard_map``, AdamW outside."""
    mesh = DeviceMeshManager.create_abstract_mesh(row.sizes)
    model, tx = sharded(row), optax.adamw(3e-4)
    tokens = jax.ShapeDtypeStruct((row.rows, row.context), jnp.int32)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    state = abstract_train_state(model, tx, mesh, rng, tokens, tokens, batch_axes=row.row_axes, allow_replicated=True)
    split, specs = jax.P(row.row_axes, CP), partition_specs(state.params, mesh)
    on_tpus = parse_topology(row.topology).chip.torus_axes > 0

    def of_device(params, tokens, labels):
        def loss(params):
            losses, sown = model.apply({"params": params}, tokens, labels, mutable=["losses", "intermediates"])
            # Compiling ahead of time for 64 GPUs, XLA fails at a sum of 8 numbers, such as the router fractions.
            routers = jax.tree.leaves(sown.get("losses", {})) if on_tpus else []
            return losses.mean() + 0.01 * sum(map(jnp.mean, routers))

        return value_and_grad(loss, row.token_axes)(params)

    def in_its_layout(params, tokens, labels):
        batch = tokens, labels
        if row.ring:
            # The batch is laid out before the step, so the step exchanges no tokens.
            batch = tuple(ReorderedTokens(x, "zigzag", row.sizes[CP]) for x in batch)
        with in_layout(batch, "zigzag" if row.ring else "contiguous", CP) as batch:
            return of_device(params, *batch)

    gradients = jax.shard_map(
        in_its_layout, mesh=mesh, in_specs=(specs, split, split), out_specs=(jax.P(), specs), check_vma=False
    )

    def step(state, tokens, labels):
        loss, grads = gradients(state.params, tokens, labels)
        return state.apply_gradients(grads=grads), loss

    placed = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=jax.NamedSharding(mesh, split))
    return jax.jit(step, donate_argnums=0), (state, placed, placed)


# ------------------------------------------------------------------------------------------- which axes for which model


@dataclass(frozen=True)
class Cell:
    """Model whose meshes are compared: ``tokens`` per device and step, and ``limits``, maximum sizes of model axes."""

    size: str
    context: int
    tokens: int
    limits: Mapping[str, int]

    @property
    def name(self) -> str:
        return f"{self.size} at {self.context // 1024}k"

    def row(self, topology: str, mesh: Mapping[str, int]) -> Row:
        return Row(self.size, self.context, topology, mesh, self.tokens * math.prod(mesh.values()) // self.context)


CELLS = (
    Cell("8B", 8192, 8192, {TP: 8}),
    Cell("8B", 131_072, 16_384, {TP: 8, CP: 16}),
    Cell("8 x 7B", 8192, 8192, {EP: 8}),
    Cell("70B", 8192, 8192, {TP: 8}),
)
TOPOLOGIES = ("h100:8x8", "v5p:4x4x8", "v6e:16x16")
LONG = 131_072
TARGETS = tuple(
    Row("8B", context, topology, mesh, rows, ring=ring)
    for context, mesh, rows, ring, topologies in (
        (LONG, {CP: 8}, 1, False, ("v5p:2x2x2", "h100:1x8")),
        (LONG, {CP: 8}, 1, True, ("v5p:2x2x2", "h100:1x8")),
        (LONG, {"fsdp": 8}, 8, False, ("v5p:2x2x2", "h100:1x8")),
        (2 * LONG, {CP: 8}, 1, False, ("h100:1x8",)),
        (2 * LONG, {"fsdp": 8}, 8, False, ("h100:1x8",)),
        (8192, {"fsdp": 2, TP: 4}, 4, False, ("v5p:2x2x2", "h100:1x8")),
        (8192, {"fsdp": 4, TP: 2}, 8, False, ("h100:1x8",)),
    )
    for topology in topologies
)


def considered(cell: Cell, topology: str, compile_best: int) -> list[Considered]:
    """Estimates every mesh of a cell; returns the meshes ranked by their estimates, best first."""
    place, found = parse_topology(topology), []
    for mesh in model_meshes(place, cell.limits):
        try:
            step, args = build(cell.row(topology, mesh))
            call = StepCall(step, args, topology=place)
            found.append((mesh, estimate(call, links_of_mesh(place, cell.row(topology, mesh).sizes))))
        except ValueError as error:
            found.append((mesh, one_line_text(error)))
    return ranked(found, place.chip.usable_hbm_bytes, compile_best)


def forecast_of(row: Row) -> Forecast:
    """Forecasts a row, with the library's compiler options for the chip."""
    place = parse_topology(row.topology)
    step, args = build(row)
    options = compiler_options(place.chip.device_kinds[0], shape=place.shape, chosen_by="forecast")
    return forecast(step, *args, topology=row.topology, tokens=row.rows * row.context, compiler_options=options)


def summary(found: Forecast) -> dict[str, Any]:
    """Converts a forecast to the stored result: bytes and seconds, per device and step."""
    permutes = [one for one in found.collectives if one.kind == "collective-permute"]
    return {
        "fits": found.fits,
        "bytes": found.total_bytes,
        "available_bytes": found.available_bytes,
        "step_s": found.step_seconds,
        "least_s": found.step_time.least if found.step_time else None,
        "exposed_s": found.exposed_seconds,
        "axes": [_of_axes(traffic) for traffic in found.axis_traffic],
        "rings": [_of_axes(traffic) for traffic in axis_traffic(permutes)],
        "rings_by_module": {
            module: [_of_axes(traffic) for traffic in axis_traffic(one for one in permutes if one.module == module)]
            for module in sorted({one.module for one in permutes})
        },
        "versions": found.versions,
    }


def _of_axes(traffic: Any) -> dict[str, Any]:
    return dataclasses.asdict(traffic) | {"hidden_fraction": traffic.hidden_fraction}


def kept_estimate(guess: Estimate | None) -> dict[str, Any] | None:
    """Converts an estimate to the stored format."""
    if guess is None:
        return None
    wire = {"+".join(axes): seconds for axes, seconds in guess.wire_s.items()}
    return {"argument_bytes": guess.argument_bytes, "live_bytes": guess.live_bytes} | {
        "compute_s": guess.compute_s,
        "wire_s": wire,
    }


def tried(row: Row) -> dict[str, Any]:
    """Returns the summary of the forecast of a row, or the problem if the compilation fails."""
    try:
        return summary(forecast_of(row))
    except CompileError as error:
        return {"problem": one_line_text(error)[:300]}


def cells_table(kept: Mapping[str, Any]) -> Any:
    """Builds the table with a row per cell and topology: the best mesh, its bytes and times, and its forecast."""
    rows = []
    for name, by_topology in kept.items():
        for topology, found in by_topology.items():
            best = found["best"][0]
            guess, made = best["estimate"], best.get("forecast") or {}
            wire = ", ".join(f"{axes} {seconds * 1e3:,.0f}" for axes, seconds in guess["wire_s"].items())
            size = format_bytes(guess["argument_bytes"] + guess["live_bytes"])
            compiled = f"{format_bytes(made['bytes'])}, {made['step_s']:.2f} s" if "bytes" in made else ""
            fitting = f"{found['fitting']} of {found['meshes']}"
            cells = [name, topology, format_mesh(best["mesh"]), size, f"{guess['compute_s'] * 1e3:,.0f}", wire]
            rows.append([*cells, fitting, compiled])
    columns = [
        "model",
        "devices",
        "mesh",
        "bytes",
        "products, ms",
        "links, ms",
        "meshes that fit",
        "compiled",
    ]
    return rich_table("Which axes for which model", columns, rows, left=3)


def targets_table(kept: Sequence[Mapping[str, Any]]) -> Any:
    """Builds the table of ``TARGETS``: whether each row fits, and the hidden fraction of its rings."""
    rows = []
    for one in kept:
        made = one["forecast"]
        if "problem" in made:
            rows.append([one["name"], one["topology"], "", "refused", "", ""])
            continue
        rings = ", ".join(f"{'+'.join(ring['axes'])} {ring['hidden_fraction']:.0%}" for ring in made["rings"])
        size = f"{format_bytes(made['bytes'])} of {format_bytes(made['available_bytes'])}"
        rows.append(
            [one["name"], one["topology"], size, "yes" if made["fits"] else "no", f"{made['step_s']:.2f} s", rings]
        )
    return rich_table("Targets", ["row", "devices", "bytes", "fits", "step", "rings hidden"], rows, left=2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", type=int, default=0, help="how many meshes of each cell to compile")
    parser.add_argument("--targets", action="store_true", help="compile the rows of TARGETS instead")
    parser.add_argument("--rows", nargs="+", default=(), help="of --targets: those whose names have all these texts")
    parser.add_argument("--topologies", nargs="+", default=(*TOPOLOGIES, "h100:1x8", "v5p:2x2x2"))
    parser.add_argument("--cells", nargs="+", default=[cell.name for cell in CELLS])
    parser.add_argument("--redraw", action="store_true", help="show what is kept, and compute nothing")
    options = parser.parse_args(argv)
    console, of_cells, of_targets = Console(), OUT / "cells.json", OUT / "targets.json"
    OUT.mkdir(parents=True, exist_ok=True)
    if options.targets and not options.redraw:
        rows = {(row.name, row.topology): row for row in TARGETS}
        before = json.loads(of_targets.read_text()) if of_targets.exists() else []
        made = {key: one for one in before if (key := (one["name"], one["topology"])) in rows}
        for key, row in rows.items():
            if row.topology in options.topologies and all(text in row.name for text in options.rows):
                made[key] = {"name": row.name, "topology": row.topology, "forecast": tried(row)}
                kept = list(made.values())
                of_targets.write_text(json.dumps(kept, indent=1) + "\n")
    elif not options.redraw:
        kept = json.loads(of_cells.read_text()) if of_cells.exists() else {}
        for cell in (cell for cell in CELLS if cell.name in options.cells):
            for topology in (place for place in TOPOLOGIES if place in options.topologies):
                found, of_model = of_cell(cell, topology, options.compile), kept.setdefault(cell.name, {})
                keep_forecasts(found, of_model.get(topology, {}))
                of_model[topology] = found
                of_cells.write_text(json.dumps(kept, indent=1) + "\n")
    for path, table in ((of_cells, cells_table), (of_targets, targets_table)):
        if path.exists():
            console.print(table(json.loads(path.read_text())))


def of_cell(cell: Cell, topology: str, compile_best: int) -> dict[str, Any]:
    """Returns the stored result of a cell on a topology: the three best meshes, and the ranking of every mesh.

    The first ``compile_best`` meshes are also compiled.
    """
    found = considered(cell, topology, compile_best)
    budget = parse_topology(topology).chip.usable_hbm_bytes
    known = [one for one in found if one.estimate]
    best = [{"mesh": dict(one.mesh), "estimate": kept_estimate(one.estimate)} for one in known[:3]]
    for one, entry in zip(known[:compile_best], best, strict=False):
        entry["forecast"] = tried(cell.row(topology, one.mesh))
    return {
        "best": best,
        "meshes": len(found),
        "fitting": sum(one.estimate is not None and one.estimate.total_bytes <= budget for one in found),
        "considered": [str(one) for one in found],
    }


def keep_forecasts(found: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Copies forecasts of an earlier run to new estimates of the same meshes."""
    made = {format_mesh(one["mesh"]): one["forecast"] for one in before.get("best", []) if "forecast" in one}
    for one in found["best"]:
        if "forecast" not in one and format_mesh(one["mesh"]) in made:
            one["forecast"] = made[format_mesh(one["mesh"])]


if __name__ == "__main__":
    main()
