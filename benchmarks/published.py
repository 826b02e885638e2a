"""Published measurements of training runs, and forecasts for the same model, batch, and devices.

    python -m benchmarks.published                       every run; half an hour of compilation, results are stored
    python -m benchmarks.published --runs "8B, 8 H100"   selected runs
    python -m benchmarks.published --redraw              table and picture of stored results, without compiling
    python -m benchmarks.published --waiting             the runs that have no stored forecast yet

    Run --build, compile--> Forecast --expected / published--> results/published/runs.json

Every run shards its parameters. Runs with JAX use ``jit``, on TPUs split along the width dim of the model, as in
MaxText and MinText. Runs with PyTorch use FSDP2, which is modelled by ``jit`` along the largest dim of each leaf. The
efficiencies of ``CHIPS`` were fitted to the runs marked ``fixed``; the remaining runs test the efficiencies. Runs of
the dict ``LATER`` got their roles by a rule, before any of them was forecast: in the order of the dict every second run
may fix a constant, the others test the result. A run without a stored forecast is listed as waiting, and tests nothing.
For a run on hardware that differs from the data sheet of the chip, ``hardware`` has the changed values used in the
forecast.

Flash attention, used in every run on GPUs and in one run on TPUs, is counted by a formula: the compiled step contains a
substitute that reads and writes the same arrays, and the time of the attention products is added at the rate of the
other products.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import baselines
from benchmarks.decoder import SIZES, DecoderSize, decoder, xla_attention
from benchmarks.report import QUIET, STRONG
from benchmarks.xla_flags import BEST_FOR_JIT
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.forecast import parse_topology
from xlstm_jax.forecast.compiling.compile import compile_for_topology
from xlstm_jax.forecast.compiling.report_cache import user_cache
from xlstm_jax.forecast.cost.flops import count_flops
from xlstm_jax.forecast.cost.time_range import Range
from xlstm_jax.forecast.forecasting import read
from xlstm_jax.forecast.hardware.chips import Chip
from xlstm_jax.forecast.training import Workload
from xlstm_jax.program_names import HOST_MEMORY

OUT = Path(__file__).parent / "results" / "published"
TITAN = "https://github.com/pytorch/torchtitan/blob/31a17bf/benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md"
KEMPNER = (
    "https://github.com/KempnerInstitute/KempnerForge/blob/9f3f03a/benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md"
)
FMS = "https://github.com/foundation-model-stack/fms-fsdp"
MINTEXT = "https://github.com/bzantium/mintext/blob/a0442ce/progress.md"
A3 = "https://github.com/AI-Hypercomputer/maxtext/tree/30cd40a/MaxText/configs/a3/llama_2_7b"
V5E = "https://github.com/AI-Hypercomputer/maxtext/tree/0ed7bd5/MaxText/configs/v5e"
RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/blob/c8cfe2f/training"
IRONWOOD, TRILLIUM = f"{RECIPES}/ironwood/README.md", f"{RECIPES}/trillium"
GPU_RECIPES = "https://github.com/AI-Hypercomputer/gpu-recipes/tree/2e1fd5e/training/a3ultra"
TOOLBOX = "https://github.com/NVIDIA/JAX-Toolbox/tree/bcbbfa5/rosetta/rosetta/projects/maxtext"
MIN_WEIGHT_SIZE = 2**18  # smaller leaves are replicated
LEARNING_RATE = 3e-4  # as of ``decoder``; no time depends on it
BACKWARD_OF_FLASH = 2.5  # relative to the forward pass: five products instead of two, as scores are recomputed

LLAMA2_7B = DecoderSize(4096, 32, 32, 32_000, hidden=11_008, kv_heads=32, tied=False)
LLAMA2_13B = DecoderSize(5120, 40, 40, 32_000, hidden=13_824, kv_heads=40, tied=False)
LLAMA3_70B = DecoderSize(8192, 80, 64, 128_256, hidden=28_672, kv_heads=8, tied=False)
MAXTEXT_32B = DecoderSize(8192, 32, 64, 32_000, hidden=28_672, kv_heads=64)
LLAMA3_405B = DecoderSize(16_384, 126, 128, 128_256, hidden=53_248, kv_heads=8, tied=False)
LLAMA_34B = DecoderSize(8192, 48, 64, 32_000, hidden=22_016, kv_heads=8, tied=False)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Published measurement.

    Attributes:
      size: the sizes of the model.
      topology: the devices of the run.
      moment: dtype of AdamW's first moment; None: that of the weights.
      products: dtype of matrix products, "bfloat16" or "float8".
      rows, context: sequences per device and step, and tokens per sequence.
      seconds: the measured time of a step.
      source: URL of the publication.
      said: the measurement in the words of the source.
      remat: "full"; "dots", which saves matrix products; None; a key of ``AGAIN``; or a key of ``KEPT_BY_NAME``, whose
        activations are kept on the device or the host.
      flash: whether attention was a fused kernel.
      weights: dtype of the parameters.
      fixed: whether the efficiency of the chip was fitted to the run.
      hardware: fields of the chip that differ from the data sheet.
      note: effects that the forecast leaves out.
      cannot: why the run has no forecast; "" if it can have one.
    """

    size: DecoderSize
    topology: str
    rows: int
    context: int
    seconds: float
    source: str
    said: str
    remat: str | None = "full"
    flash: bool = True
    weights: Any = jnp.float32
    fixed: bool = False
    hardware: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    moment: Any = None
    products: str = "bfloat16"
    cannot: str = ""

    @property
    def chip(self) -> Chip:
        return dataclasses.replace(parse_topology(self.topology).chip, **self.hardware)


def by_tokens(rows: int, context: int, per_second: float) -> float:
    """Computes the seconds of a step from tokens per second and device."""
    return rows * context / per_second


META = {"hbm_bandwidth": 2.4e12}
META_NOTE = "500 W instead of 700 W per GPU (not modelled)"
LLAMA_8B, LLAMA_1B = SIZES["llama3.1_8B"], SIZES["llama3.2_1B"]
RUNS = {
    "Llama 2 7B, 8 H100, MaxText": Run(
        size=LLAMA2_7B, topology="h100:1x8", rows=4, context=4096, seconds=1.561, remat="dots", source=A3, fixed=True,
        said="492 TFLOP/s: 768 TFLOP a step, 6 x parameters x tokens and 12 x layers x d x tokens x context",
    ),
    "Llama 3.1 8B, 8 H100, torchtitan": Run(
        size=LLAMA_8B, topology="h100:1x8", rows=2, context=8192, seconds=by_tokens(2, 8192, 6667), source=TITAN,
        remat="every second product", said="6,667 tokens/s, FSDP and torch.compile", hardware=META, note=META_NOTE,
    ),
    "Llama 3.1 8B, 128 H100, torchtitan": Run(
        size=LLAMA_8B, topology="h100:16x8", rows=2, context=8192, seconds=by_tokens(2, 8192, 6514), source=TITAN,
        remat="every second product", said="6,514 tokens/s, FSDP and torch.compile", hardware=META, note=META_NOTE,
    ),
    "Llama 34B, 96 H100, fms-fsdp": Run(
        size=LLAMA_34B, topology="h100:16x8", rows=2, context=4096, seconds=by_tokens(2, 4096, 1550), source=FMS,
        said="1,550 tokens/s, FSDP, full recomputation", hardware={"network_bandwidth": 1.25e10},
        note="800 Gb/s of network, assumed per host; forecast for 128 GPUs, as 96 divides no dim of the model",
    ),
    "Llama 3 8B, 4 H200, KempnerForge": Run(
        size=LLAMA_8B, topology="h200:1x4", rows=4, context=4096, seconds=3.36 / 2, source=KEMPNER,
        said="3.36 s, FSDP and torch.compile, full recomputation, two minibatches of 4 sequences",
        note="one minibatch; published: half of a step with two minibatches and one update",
    ),
    "Llama 2 13B, 64 A100, torchtitan": Run(
        size=LLAMA2_13B, topology="a100:8x8", rows=2, context=4096, seconds=by_tokens(2, 4096, 2162), remat=None,
        source=TITAN_A100, said="2,162 tokens/s, FSDP, no recomputation", fixed=True,
    ),
    "Llama 3 8B, 64 A100, torchtitan": Run(
        size=LLAMA_8B, topology="a100:8x8", rows=1, context=8192, seconds=by_tokens(1, 8192, 2973), source=TITAN_A100,
        remat="every second product", said="2,973 tokens/s, FSDP", fixed=True,
    ),
    "Llama 3 70B, 64 A100, torchtitan": Run(
        size=LLAMA3_70B, topology="a100:8x8", rows=1, context=8192, seconds=by_tokens(1, 8192, 331), source=TITAN_A100,
        said="331 tokens/s, FSDP, full recomputation",
    ),
    "Llama 34B, 128 A100, fms-fsdp": Run(
        size=LLAMA_34B, topology="a100:16x8", rows=2, context=4096, seconds=by_tokens(2, 4096, 700), source=FMS,
        said="700 tokens/s, FSDP, full recomputation", hardware={"network_bandwidth": 6.25e9},
        note="400 Gb/s of network, assumed per host",
    ),
    "Llama 3.2 1B, 8 v6e, MinText": Run(
        size=LLAMA_1B, topology="v6e:2x4", rows=4, context=2048, seconds=0.478, source=MINTEXT, flash=False,
        weights=jnp.bfloat16, said="0.478 s, jax.nn.dot_product_attention",
    ),
    "Llama 3.2 1B, 8 v6e, MaxText": Run(
        size=LLAMA_1B, topology="v6e:2x4", rows=4, context=2048, seconds=0.343, source=MINTEXT,
        weights=jnp.bfloat16, said="0.343 s, splash attention",
    ),
    "32B, 256 v5e, MaxText": Run(
        size=MAXTEXT_32B, topology="v5e:16x16", rows=4, context=2048, seconds=12.09, source=V5E,
        said="132 TFLOP/s: 1,596 TFLOP a step, 6 x parameters x tokens and 12 x layers x d x tokens x context",
    ),
}  # fmt: skip

# Test runs that move with a choice made after their first forecasts were seen: the bandwidth of a network by the number
# of hosts (runs on several hosts of GPUs), the dim that ``jit`` splits (TPUs), and 128 GPUs for the run on 96.
SEEN = {
    "Llama 3.1 8B, 128 H100, torchtitan",
    "Llama 34B, 96 H100, fms-fsdp",
    "Llama 3 70B, 64 A100, torchtitan",
    "Llama 34B, 128 A100, fms-fsdp",
    "Llama 3.2 1B, 8 v6e, MinText",
    "Llama 3.2 1B, 8 v6e, MaxText",
    "32B, 256 v5e, MaxText",
}
V6E_HOST, HOST_QKV, HOST_QKVO = (
    "activations in host memory",
    "input, q, k, v on the host",
    "input, q, k, v, out on the host",
)
FLOAT8 = "float8 products: benchmarks/decoder.py has none"
UNREAD = "the recipe's recomputation was not read: its configuration (MaxText at 3eb77db) was not at hand"
COPIES = "two copies of the parameters, over halves of the hosts (dcn_data_parallelism=2); the program here splits them"
LLAMA3_8B_V6E = {"size": LLAMA_8B, "context": 8192, "remat": HOST_QKVO, "note": V6E_HOST}
LLAMA3_70B_V6E = {"size": LLAMA3_70B, "context": 8192, "remat": HOST_QKV, "note": V6E_HOST}
LLAMA3_70B_7X = {
    "size": LLAMA3_70B,
    "rows": 2,
    "context": 8192,
    "remat": "input, q, k, v, context kept",
    "moment": jnp.bfloat16,
}
LLAMA3_405B_7X = {
    "size": LLAMA3_405B, "rows": 3, "context": 8192, "moment": jnp.bfloat16,
    "remat": "k, v kept, input and MLP's output on the host",
}  # fmt: skip
_LATER = {
    "Llama 3.1 8B, 8 v6e, MaxText": Run(
        **LLAMA3_8B_V6E, topology="v6e:2x4", rows=3, seconds=3.443, source=f"{TRILLIUM}/Llama3.1-8B-MaxText/v6e-8",
        said="3.443 s, 413 TFLOP/s",
    ),
    "Llama 3.1 8B, 32 v6e, MaxText": Run(
        **LLAMA3_8B_V6E, topology="v6e:4x8", rows=3, seconds=3.495, source=f"{TRILLIUM}/Llama3.1-8B-MaxText/v6e-32",
        said="3.495 s, 407 TFLOP/s",
    ),
    "Llama 3.1 8B, 16 v6e, MaxText": Run(
        **LLAMA3_8B_V6E, topology="v6e:4x4", rows=3, seconds=3.393, source=f"{TRILLIUM}/Llama3.1-8B-MaxText/v6e-16",
        said="3.393 s, 419 TFLOP/s",
    ),
    "Llama 3.1 8B, 256 v6e, MaxText": Run(
        **LLAMA3_8B_V6E, topology="v6e:16x16", rows=4, seconds=4.546,
        source=f"{TRILLIUM}/Llama3.1-8B-MaxText/v6e-256", said="4.546 s, 417 TFLOP/s",
    ),
    "Llama 3.1 70B, 64 v6e, MaxText": Run(
        **LLAMA3_70B_V6E, topology="v6e:8x8", rows=2, seconds=18.688,
        source=f"{TRILLIUM}/Llama3.1-70B-MaxText/v6e-64", said="18.688 s, 422 TFLOP/s",
    ),
    "Llama 3.1 70B, 128 v6e, MaxText": Run(
        **LLAMA3_70B_V6E, topology="v6e:8x16", rows=4, seconds=34.786,
        source=f"{TRILLIUM}/Llama3.1-70B-MaxText/v6e-128", said="34.786 s, 453 TFLOP/s",
    ),
    "Llama 3.1 70B, 256 v6e, MaxText": Run(
        **LLAMA3_70B_V6E, topology="v6e:16x16", rows=5, seconds=42.656,
        source=f"{TRILLIUM}/Llama3.1-70B-MaxText/v6e-256", said="42.656 s, 462 TFLOP/s",
    ),
    "Llama 3.1 70B, 64 TPU7x, MaxText": Run(
        **LLAMA3_70B_7X, topology="tpu7x:4x4x4", seconds=12.20, source=IRONWOOD, said="12.20 s, 1,207 TFLOP/s per chip",
    ),
    "Llama 3.1 70B, 256 TPU7x, MaxText": Run(
        **LLAMA3_70B_7X, topology="tpu7x:4x8x8", seconds=12.27, source=IRONWOOD, said="12.27 s, 1,200 TFLOP/s per chip",
    ),
    "Llama 3.1 405B, 256 TPU7x, MaxText": Run(
        **LLAMA3_405B_7X, topology="tpu7x:4x8x8", seconds=98.34, source=IRONWOOD,
        said="98.34 s, 1,261 TFLOP/s per chip",
    ),
    "Llama 3.1 70B in float8, 64 TPU7x, MaxText": Run(
        **LLAMA3_70B_7X, topology="tpu7x:4x4x4", seconds=7.93, source=IRONWOOD, products="float8", cannot=FLOAT8,
        said="7.93 s, 1,854 TFLOP/s per chip",
    ),
    "Llama 3.1 70B in float8, 256 TPU7x, MaxText": Run(
        **LLAMA3_70B_7X, topology="tpu7x:4x8x8", seconds=7.95, source=IRONWOOD, products="float8", cannot=FLOAT8,
        said="7.95 s, 1,851 TFLOP/s per chip",
    ),
    "Llama 3.1 405B in float8, 256 TPU7x, MaxText": Run(
        **LLAMA3_405B_7X, topology="tpu7x:4x8x8", seconds=64.37, source=IRONWOOD, products="float8", cannot=FLOAT8,
        said="64.37 s, 1,927 TFLOP/s per chip",
    ),
    "Llama 3.1 405B, 512 v5p, MaxText": Run(
        size=LLAMA3_405B, topology="v5p:8x8x8", rows=2, context=8192, seconds=131.474, cannot=UNREAD,
        source=f"{RECIPES}/v5p/Llama3.1-405B-MaxText", said="131.474 s, 315 TFLOP/s; 2 rows from total_weights",
    ),
    "Llama 3.1 70B, 256 H200, MaxText": Run(
        size=LLAMA3_70B, topology="h200:32x8", rows=2, context=8192, seconds=15.52, source=GPU_RECIPES, cannot=COPIES,
        remat="q, k, v, context, out kept",
        said="15.52 s, 508 TFLOP/s; 2 rows from the FLOP of a step",
    ),
    "Llama 2 7B, 8 H100, JAX-Toolbox": Run(
        size=LLAMA2_7B, topology="h100:1x8", rows=2, context=4096, seconds=0.721, source=TOOLBOX, remat="dots",
        said="0.721 s, FSDP", note="their layers in a loop (scan_layers=false), here in a scan",
    ),
}  # fmt: skip
# By rule, before any of these was forecast: the first, third, ... may fix a constant, the others test the result.
LATER = {name: dataclasses.replace(run, fixed=place % 2 == 0) for place, (name, run) in enumerate(_LATER.items())}
RUNS |= LATER


# --------------------------------------------------------------------------------------------------------- the forecast


def in_place_of_flash(q, k, v):
    """Replaces attention by an operation that reads and writes the same arrays, without matrix products."""
    return q + jnp.repeat(k + v, q.shape[2] // k.shape[2], axis=2)


def flash_flops(run: Run) -> float:
    """Computes the FLOP of causal attention per step and device, for half of the pairs of positions."""
    forward = 2 * run.rows * run.context**2 * run.size.dim * run.size.layers  # two products, halved
    # Without its output, kept as "context", the forward pass of attention runs again.
    again = run.remat == "full" or (run.remat in KEPT_BY_NAME and "context" not in KEPT_BY_NAME[run.remat][0])
    return forward * (1 + BACKWARD_OF_FLASH + again)


# Indices of the recomputed products of a block (query, key, value, out, gate, up, down) in torchtitan's selective
# recomputation by operation.
AGAIN = {"every second product": (1, 3, 5)}


# MaxText's remat_policy "custom": names of activations kept on the device, and in host memory.
QKV, INPUT, OUT_PROJ = ("query_proj", "key_proj", "value_proj"), "decoder_layer_input", "out_proj"
KEPT_BY_NAME = {
    "input, q, k, v, context kept": ((INPUT, *QKV, "context"), ()),
    "q, k, v, context, out kept": ((*QKV, "context", OUT_PROJ), ()),
    "q, k, v, out kept, input on the host": ((*QKV, OUT_PROJ), (INPUT,)),
    "input, q, k, v on the host": ((), (INPUT, *QKV)),
    "input, q, k, v, out on the host": ((), (INPUT, *QKV, OUT_PROJ)),
    "k, v kept, input and MLP's output on the host": (QKV[1:], (INPUT, "mlpwo")),
}


class SavesProducts:
    """``nn.remat`` policy that saves the products of a block except the products ``again``, counted in call order."""

    def __init__(self, again: Sequence[int]) -> None:
        self.again, self.seen = again, 0

    def __call__(self, primitive, *_, **__) -> bool:
        if primitive.name != "dot_general":
            return False
        self.seen += 1
        return (self.seen - 1) % 7 not in self.again


def policy(remat: str | None) -> Any:
    if remat in KEPT_BY_NAME:
        on_device, on_host = KEPT_BY_NAME[remat]
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(on_device),
            names_which_can_be_offloaded=list(on_host),
            offload_src="device",
            offload_dst=HOST_MEMORY,
        )
    named = {None: False, "full": True, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    return SavesProducts(AGAIN[remat]) if remat in AGAIN else named[remat]


@dataclass(frozen=True)
class Narrow:
    """Model with parameters stored in ``dtype``."""

    model: Any
    dtype: Any

    def init(self, *args: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(self.dtype), self.model.init(*args))

    def clone(self, **fields: Any) -> "Narrow":
        return dataclasses.replace(self, model=self.model.clone(**fields))

    @property
    def apply(self) -> Any:
        return self.model.apply


def workload(run: Run) -> Workload:
    devices = parse_topology(run.topology).num_devices
    options = {"rows": run.rows, "context": run.context, "remat": policy(run.remat)}
    options["attention"] = in_place_of_flash if run.flash else xla_attention
    made = decoder(run.size, devices=devices, **options)
    tx = made.tx if run.moment is None else optax.adamw(LEARNING_RATE, mu_dtype=run.moment)
    return dataclasses.replace(made, model=Narrow(made.model, run.weights), tx=tx)


def forecast_of(run: Run) -> dict[str, Any]:
    """Returns the forecast times of a step, in seconds, and their components.

    Raises:
      ValueError: the run cannot be forecast; the error has the reason.
    """
    if run.cannot:
        raise ValueError(f"this run has no forecast: {run.cannot}.")
    topology = parse_topology(run.topology)
    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": topology.num_devices})
    on_gpus = topology.platform == "cuda"
    split = {} if on_gpus else {"split_dim": partial(baselines.split_width, run.size.dim)}
    step, args = baselines.jit_step(workload(run), mesh, MIN_WEIGHT_SIZE, **split)
    options = BEST_FOR_JIT if on_gpus else None
    compiled = compile_for_topology(step, *args, topology=run.topology, compiler_options=options, cache=user_cache())
    compiled = dataclasses.replace(compiled, topology=dataclasses.replace(topology, chip=run.chip))
    found = read(compiled, count_flops(step.trace(*args).jaxpr, compiled.devices), run.rows * run.context)
    assert found.step_time is not None
    flops = flash_flops(run) if run.flash else 0.0
    rates = [chip.peak_flops["bfloat16"] for chip in (run.chip, run.chip.reached, run.chip.reached)]
    attention = Range(*(flops / rate for rate in rates))
    step_s = [known + more for known, more in zip(found.step_time, attention, strict=True)]
    return {
        "step_seconds": dict(zip(Range._fields, step_s, strict=True)),
        "attention_seconds": attention._asdict(),
        "kernel_seconds": {"least": found.kernel_seconds, "expected": found.expected_kernel_seconds},
        "cycle_seconds": found.cycle_seconds,
        "waited_seconds": {"least": found.exposed_bandwidth_seconds, "expected": found.exposed_seconds},
        "compute_seconds": found.roofline.compute_s,
        "memory_seconds": found.roofline.memory_s,
        "flops": found.flops.by_direction(),
        "hbm_bytes": found.hbm_bytes.total,
        "wire_bytes": found.wire_bytes,
        "total_bytes": found.total_bytes,
        "compile_seconds": found.compile_seconds,
        "versions": found.versions,
    }


# ------------------------------------------------------------------------------------------------------ what is shown

KEPT = OUT / "runs.json"
# Runs whose forecast is further off than ``CLOSE``, with what is known of the reason, as on the page.
OUTSIDE = {
    "Llama 3.1 8B, 32 v6e, MaxText": "of the 10.8 s expected, 8.1 s are XLA's cycles, and for 2.4 s the step waits for "
    "activations on their way to the host and back",
    "Llama 3.1 8B, 8 v6e, MaxText": "of the 7.2 s expected, 4.6 s are XLA's cycles and 2.4 s are this wait",
}
CLOSE = 1.3  # target for the factor between forecast and measurement


def ratio(run: Run, found: Mapping[str, Any], end: str = "expected") -> float:
    """Returns forecast time / published time; the forecast is too optimistic below 1."""
    return found["step_seconds"][end] / run.seconds


def table(kept: Mapping[str, Any]) -> str:
    """Formats the stored runs as a Markdown table."""
    columns = ("run", "published", "least", "expected", "expected / published", "role")
    rows = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |"]
    for name, found in kept.items():
        run, ends = RUNS[name], ("least", "expected")
        least, expected = (f"{1e3 * found['step_seconds'][end]:,.0f} ms" for end in ends)
        named = f"[{name}]({run.source})"
        role = "calibration" if run.fixed else "test, seen" if name in SEEN else "test"
        cells = [named, f"{1e3 * run.seconds:,.0f} ms", least, expected, f"{ratio(run, found):.2f}", role]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def settings(kept: Mapping[str, Any]) -> str:
    """Formats the setting of each run, and the differences of the forecast, as a Markdown table."""
    columns = ("run", "batch per device", "remat", "published", "difference of the forecast")
    rows = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |"]
    for name in kept:
        run = RUNS[name]
        named = [f"{value / 1e9:,.4g} GB/s of {key.split('_')[0]}" for key, value in run.hardware.items()]
        differs = "; ".join([*named, *([run.note] if run.note else [])])
        cells = [
            name,
            f"{run.rows} x {run.context:,}",
            run.remat or "none",
            run.said,
            differs or "none known",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def waiting(kept: Mapping[str, Any]) -> str:
    """Formats the runs without a stored forecast as a Markdown table; these runs test nothing yet."""
    columns = ("run", "published", "batch per device", "remat", "role", "why there is no forecast")
    rows = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |"]
    for name, run in RUNS.items():
        if name not in kept:
            named, role = f"[{name}]({run.source})", "calibration" if run.fixed else "test"
            batch, why = f"{run.rows} x {run.context:,}", run.cannot or "not forecast yet"
            recomputed = "" if run.cannot == UNREAD else run.remat or "none"
            rows.append(f"| {' | '.join([named, run.said, batch, recomputed, role, why])} |")
    return "\n".join(rows)


def draw(kept: Mapping[str, Any], path: Path) -> None:
    """Draws a bar from the least to the expected time of each run, relative to the published time."""
    figure = Figure(figsize=(8.5, 0.46 * len(kept) + 1.3), layout="constrained")
    axes = figure.subplots()
    for place, (name, found) in enumerate(kept.items()):
        run = RUNS[name]
        least, expected = ratio(run, found, "least"), ratio(run, found)
        color = QUIET if run.fixed else STRONG
        axes.barh(place, expected - least, left=least, height=0.34, color=QUIET, alpha=0.5)
        axes.plot(expected, place, "o", color=color, ms=8, mec=STRONG)
        axes.plot(least, place, "|", color=STRONG, ms=11, mew=2)
        text = {"va": "center", "fontsize": 8, "bbox": {"fc": "white", "ec": "none", "pad": 0.4}}
        axes.annotate(f"{expected:.2f}", (expected, place), (9, 0), textcoords="offset points", **text)
    axes.axvspan(1 / CLOSE, CLOSE, color="#54a24b", alpha=0.12, label=f"within {CLOSE} x of what was published")
    axes.axvline(1.0, color="black", lw=1)
    axes.plot([], [], "o", color=STRONG, label="expected")
    axes.plot([], [], "o", color=QUIET, mec=STRONG, label="expected, calibration run")
    axes.plot([], [], "|", color=STRONG, ms=11, mew=2, label="least, by published rates alone")
    axes.set(yticks=range(len(kept)), xlabel="forecast / published time of a step", xlim=(0.3, 1.75))
    axes.set_yticklabels(list(kept), fontsize=8)
    axes.invert_yaxis()
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.4, -0.16), ncols=2, frameon=False)
    FigureCanvasAgg(figure).print_png(path)


def keep(made: Mapping[str, Any]) -> dict[str, Any]:
    """Adds results to the stored results, in the order of ``RUNS``; writes and returns the stored results."""
    kept = (json.loads(KEPT.read_text()) if KEPT.exists() else {}) | dict(made)
    kept = {name: kept[name] for name in RUNS if name in kept}
    OUT.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    return kept


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", nargs="*", default=list(RUNS), help="names, or how they begin")
    parser.add_argument("--waiting", action="store_true", help="list the runs without a forecast; compile nothing")
    parser.add_argument("--redraw", action="store_true", help="table and picture of what is kept; compile nothing")
    args = parser.parse_args(arguments)
    if args.waiting:
        print(waiting(keep({})))
        return
    for name, run in RUNS.items():
        if not args.redraw and not run.cannot and name.startswith(tuple(args.runs)):
            keep({name: forecast_of(run)})
    kept = keep({})
    print(table(kept), settings(kept), sep="\n\n")
    draw(kept, OUT / "runs.png")


if __name__ == "__main__":
    main(sys.argv[1:])
