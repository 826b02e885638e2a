"""Forecasts of an 8 x 7B mixture on h100:8x8: this library compared with ``jit`` in the layout of MaxText.

    python -m benchmarks.maxtext_layout            some ten minutes of compilation; results/axes/maxtext_layout.json
    python -m benchmarks.maxtext_layout --redraw   table of the stored results

  ours   ``benchmarks.axes``: experts over "ep", every other leaf over both axes; rows sent by indices
  jit    global arrays and XLA's partitioner, with the parameter rules of MaxText's base.yml at 09d2025: for experts,
         the expert dim over "expert" and the embedding dim over "fsdp"; for every other leaf, the embedding dim over
         both axes. The batch is split over both axes. Rows are sent by products with one-hot masks, as MaxText does
         with a capacity

Both sides have 32 layers in a scan with remat, a capacity of 1.25 for each row of 8,192 tokens, attention of cuDNN,
AdamW in float32, and weights and activations in bfloat16. ``jit`` computes the loss from the full logits, as MaxText
does by default; this library by chunks of the vocabulary. Each side is compiled with each entry of ``OPTIONS``, and
``jit`` on each mesh of ``MESHES``; the fastest result counts.
"""

import argparse
import json
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from benchmarks.axes import CAPACITY, OUT, SIZES, TOP_K, Row, build
from benchmarks.cases import attention_kernel
from benchmarks.decoder import Decoder, DecoderSize
from benchmarks.large_models import next_token_loss
from benchmarks.xla_flags import BEST_FOR_JIT
from xlstm_jax.accelerators import compiler_options
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.forecast import CompileError, forecast, parse_topology
from xlstm_jax.forecast.hardware.cudnn import traced_for_chip
from xlstm_jax.forecast.training.workload import one_line_text
from xlstm_jax.formatting import format_bytes, format_mesh, rich_table

TOPOLOGY, CONTEXT = "h100:8x8", 8192
OURS = Row("8 x 7B", CONTEXT, TOPOLOGY, {"fsdp_host": 8, "ep": 8}, 64)
MESHES = ({"fsdp": 8, "expert": 8}, {"fsdp": 64, "expert": 1})
OPTIONS = {
    "the library's": compiler_options(parse_topology(TOPOLOGY).chip.device_kinds[0], shape=(8, 8)),
    "those of jit": BEST_FOR_JIT,
}
KEPT = OUT / "maxtext_layout.json"


class MaskedExperts(nn.Module):
    """Mixture with the two best experts per token of ``y[b, t, d]``; rows are dispatched by products with masks."""

    size: DecoderSize
    constrain: Any

    @nn.compact
    def __call__(self, y):
        c = self.size
        rows, length, _ = y.shape
        capacity = math.ceil(CAPACITY * TOP_K * length / c.experts)
        init = nn.initializers.lecun_normal(batch_axis=(0,))

        def kernel(name, *shape):
            return self.param(name, init, (c.experts, *shape)).astype(jnp.bfloat16)

        probabilities = nn.softmax(nn.Dense(c.experts, use_bias=False, name="router")(y.astype(jnp.float32)))
        weights, chosen = lax.top_k(probabilities, TOP_K)
        weights = weights / weights.sum(-1, keepdims=True)
        # The place of a choice is the number of earlier choices of the same expert, token by token.
        is_chosen = jax.nn.one_hot(chosen, c.experts, dtype=jnp.int32)  # [b, t, k, E]
        counted = jnp.cumsum(is_chosen.reshape(rows, -1, c.experts), axis=1).reshape(is_chosen.shape) - 1
        places = jnp.where(is_chosen > 0, counted, capacity)  # one_hot of the capacity, and of more, is 0
        masks = jax.nn.one_hot(places, capacity, dtype=jnp.bfloat16)  # [b, t, k, E, C]
        taken, weighted = masks.sum(2), jnp.einsum("btkec,btk->btec", masks, weights.astype(jnp.bfloat16))
        sent = self.constrain(jnp.einsum("btd,btec->ebcd", y, taken))
        hidden = nn.silu(jnp.einsum("ebcd,edh->ebch", sent, kernel("gate", c.dim, c.hidden)))
        hidden = hidden * jnp.einsum("ebcd,edh->ebch", sent, kernel("up", c.dim, c.hidden))
        results = self.constrain(jnp.einsum("ebch,ehd->ebcd", hidden, kernel("down", c.hidden, c.dim)))
        return jnp.einsum("ebcd,btec->btd", results, weighted)


def spec_of(path: str, shape: tuple[int, ...], c: DecoderSize) -> P:
    """Returns the partition spec of a parameter by the rules of MaxText; norms and the router stay replicated."""
    of_experts = any(f"experts/{name}" in path for name in ("gate", "up", "down"))
    if len(shape) < 2 or math.prod(shape) < 2**20:
        return P()
    embedding = shape.index(c.dim)
    entries: list[Any] = [None] * len(shape)
    entries[embedding] = "fsdp" if of_experts else ("fsdp", "expert")
    if of_experts:
        entries[1] = "expert"
    return P(*entries)


def build_jit(sizes: dict[str, int]) -> tuple[Any, tuple[Any, ...]]:
    """Builds the step of ``jit`` and its abstract arguments."""
    mesh, c = DeviceMeshManager.create_abstract_mesh(sizes), SIZES[OURS.size]
    place, both = partial(NamedSharding, mesh), P(("fsdp", "expert"))

    def held(spec: P) -> Any:
        return lambda x: lax.with_sharding_constraint(x, place(spec))

    kernel = jax.shard_map(attention_kernel(c, gpus=True), mesh=mesh, in_specs=both, out_specs=both, check_vma=False)
    mixture = partial(MaskedExperts, constrain=held(P("expert", "fsdp")))
    model = Decoder(c, kernel, constrain=held(both), mixture=mixture)
    tokens = jax.ShapeDtypeStruct((OURS.rows, CONTEXT + 1), jnp.int32)

    def init(rng: jax.Array) -> TrainState:
        params = model.init(rng, jnp.zeros((OURS.rows, CONTEXT), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-4))

    def placed(path: Any, leaf: Any) -> Any:
        spec = spec_of(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, c)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place(spec))

    with traced_for_chip(parse_topology(TOPOLOGY).chip):
        shapes = jax.eval_shape(init, jax.random.key(0))
    state = jax.tree_util.tree_map_with_path(placed, shapes)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)

    def step(state: TrainState, batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(next_token_loss)(state.params, state.apply_fn, batch, None)
        return state.apply_gradients(grads=grads), loss

    batch = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=place(both))
    return jax.jit(step, donate_argnums=0, out_shardings=(places, place(P()))), (state, batch)


def row_of(side: str, sizes: dict[str, int], options: str, step: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Compiles a step, and returns the stored result."""
    row: dict[str, Any] = {"side": side, "mesh": format_mesh(sizes), "options": options}
    try:
        found = forecast(step, *args, topology=TOPOLOGY, compiler_options=OPTIONS[options], tokens=OURS.rows * CONTEXT)
    except (CompileError, ValueError) as error:
        return row | {"problem": one_line_text(error)[:300]}
    figures = {"step_s": found.step_seconds, "exposed_s": found.exposed_seconds, "bytes": found.total_bytes}
    return row | figures | {"fits": found.fits, "wire_bytes": found.wire_bytes, "flops": found.flops.total}


def table(kept: list[dict[str, Any]]) -> Any:
    """Builds the table with a row per compilation."""
    rows = []
    for one in kept:
        cells = ["refused", "", "", ""]
        if "problem" not in one:
            cells = [f"{one['step_s']:.2f}", f"{one['exposed_s']:.2f}"]
            cells += [format_bytes(one["wire_bytes"]), format_bytes(one["bytes"])]
        rows.append([one["side"], one["mesh"], one["options"], *cells])
    columns = ["", "mesh", "XLA's options", "step, s", "waits, s", "sent by a device", "memory"]
    return rich_table(f"8 x 7B, 8,192 tokens on each of 64 devices of {TOPOLOGY}", columns, rows, left=3)


def main(argv: Any = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--redraw", action="store_true", help="show what is kept, and compute nothing")
    if not parser.parse_args(argv).redraw:
        kept: list[dict[str, Any]] = []
        for side, sizes in (("ours", OURS.mesh), *(("jit", sizes) for sizes in MESHES)):
            step, args = build(OURS) if side == "ours" else build_jit(dict(sizes))
            for options in OPTIONS:
                kept.append(row_of(side, dict(sizes), options, step, args))
                KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    Console(width=140).print(table(json.loads(KEPT.read_text())))


if __name__ == "__main__":
    main()
