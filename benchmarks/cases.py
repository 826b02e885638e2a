"""Training steps that the benchmarks compare, and their builders.

    build(size, CASES["ours"], shape) -> step, (state, batch, rng)          for a topology, or for local devices

A case is a line of ``CASES``: the algorithm, the mesh, whether XLA gets the options of ``compiler_options``, and the
options of the model. The algorithms:

  replicated   every leaf is replicated
  jit          ``baselines.jit_step``: jit and NamedSharding, the usual alternative to this library
  flat         ``baselines.plain_step``: FSDP by hand over one flat axis, gradients scattered in float32
  ours         this library

The meshes, on a torus with dims (x, y, ...), or on GPUs with dims (hosts, GPUs per host):

  flat         a single axis
  staged       one axis per dim
  hybrid       parameters replicated along the first dim, and split over the remaining dims (HSDP)
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

from benchmarks import baselines, limits
from benchmarks.decoder import SIZES as DECODERS
from benchmarks.decoder import DecoderSize, decoder
from benchmarks.large_models import SIZES as LARGE_SIZES
from benchmarks.large_models import Size, language_model
from benchmarks.limits import Counts
from benchmarks.models import BLOCKS, Attention, LanguageModel
from benchmarks.vision import SIZES as VISION
from benchmarks.vision import VisionSize, vision_transformer
from benchmarks.xla_flags import BEST_AHEAD, BEST_FOR_JIT, BEST_FOR_OURS
from xlstm_jax.accelerators import compiler_options
from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed import DeviceMeshManager, typed_kernel
from xlstm_jax.distributed.data_parallel.extensions.all_reduce import AllReduceGradients
from xlstm_jax.distributed.data_parallel.extensions.replicas import Replicas
from xlstm_jax.distributed.data_parallel.leaf import is_box, leaf_of, rebox
from xlstm_jax.distributed.data_parallel.policy import DEFAULT_MIN_WEIGHT_SIZE
from xlstm_jax.distributed.data_parallel.remat import remat_policy
from xlstm_jax.distributed.data_parallel.store import UNEVEN
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves, shardings
from xlstm_jax.distributed.data_parallel.wire.collectives import axes_entry, entry_axes
from xlstm_jax.distributed.optimizers.sharded_optimizer import optimizer_state_shardings
from xlstm_jax.forecast.hardware.chips import CHIPS
from xlstm_jax.forecast.hardware.topologies import Topology
from xlstm_jax.forecast.training import Workload
from xlstm_jax.forecast.training.fitting import default_meshes
from xlstm_jax.program_names import HOST_AXIS

# The large models; 1.3B with kernels of rank 3 and 4; a model with the vocabulary of Llama 3; a small model for
# experiments and tests; decoders; vision transformers.
OF_HIGHER_RANK, OF_LARGE_VOCABULARY = "1.3B_heads", "8B_128k"
SIZES: dict[str, Size] = LARGE_SIZES | {
    OF_HIGHER_RANK: dataclasses.replace(LARGE_SIZES["1.3B"], block="transformer_heads"),
    OF_LARGE_VOCABULARY: Size(4096, 32, 32, 128_256),
    "small": Size(256, 2, 2, 2048),
    **DECODERS,
    **VISION,
}
# Functions that create a workload by type of size; models other than the first are sharded from outside.
WORKLOADS = {Size: language_model, DecoderSize: decoder, VisionSize: vision_transformer}
REPLICA_AXIS = "dp"


@dataclass(frozen=True)
class Case:
    """Variant of building and compiling a step.

    Attributes:
      algorithm: "replicated", "jit", "flat" or "ours".
      mesh: "flat", "staged" or "hybrid".
      tuned: whether the step is compiled with ``compiler_options``.
      xla_options: further XLA options, added to ``compiler_options`` if tuned.
      options: options of ``training``.
      kernel: whether attention is a fused kernel, see ``attention_kernel``.
      width: whether each leaf is split along the model's width, as in MaxText, instead of its largest dim. ``jit`` with
        ``mesh="staged"`` splits two dims, over the axes of the torus.
      one_order: whether every leaf is gathered in the axis order of the mesh, to measure the benefit of the rotated
        order of the library.
    """

    algorithm: str
    mesh: str = "flat"
    tuned: bool = False
    xla_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    kernel: bool = False
    width: bool = False
    one_order: bool = False


REMAT = {"remat": True}
SUMMED = {"options": (AllReduceGradients(),)}
OURS = {"remat": True, "grad_scatter_dtype": jnp.bfloat16}  # full remat, communication in bfloat16
WITHIN_HOSTS = {"remat": remat_policy("nothing", gathered_over=HOST_AXIS)}
BY_PIECES = {"chunked_head": True, "by_pieces": True}
COPIES = Replicas(REPLICA_AXIS, reduce_dtype=jnp.bfloat16)
ZERO_1 = dataclasses.replace(COPIES, shard_optimizer_state=True)
CASES: dict[str, Case] = {
    "replicated": Case("replicated"),
    "jit": Case("jit", options=REMAT),
    "jit, options": Case("jit", tuned=True, options=REMAT),
    "jit, best options": Case("jit", xla_options=BEST_FOR_JIT, options=REMAT),
    "jit, width": Case("jit", options=REMAT, width=True),
    "jit, options, width": Case("jit", tuned=True, options=REMAT, width=True),
    "jit, options, two dims": Case("jit", "staged", tuned=True, options=REMAT),
    "jit, best options, width": Case("jit", xla_options=BEST_FOR_JIT, options=REMAT, width=True),
    "jit, best options, two dims": Case("jit", "staged", xla_options=BEST_FOR_JIT, options=REMAT),
    "jit, no remat": Case("jit"),
    "flat": Case("flat", options=REMAT),
    "flat, no remat": Case("flat"),
    "flat, HSDP": Case("flat", "hybrid", options=REMAT),
    "ours": Case("ours", "staged", options=OURS),
    "ours, options": Case("ours", "staged", tuned=True, options=OURS),
    "ours, best options": Case("ours", "staged", xla_options=BEST_FOR_OURS, options=OURS),
    "ours, best options, within hosts": Case("ours", "staged", xla_options=BEST_FOR_OURS, options=OURS | WITHIN_HOSTS),
    "ours, combined": Case("ours", "staged", xla_options=BEST_FOR_JIT, options=OURS),
    "ours, options, one axis": Case("ours", "flat", tuned=True, options=OURS),
    "ours, width": Case("ours", "staged", options=OURS, width=True),
    "ours, options, width": Case("ours", "staged", tuned=True, options=OURS, width=True),
    "ours, width, one axis": Case("ours", "flat", options=OURS, width=True),
    "ours, options, width, one axis": Case("ours", "flat", tuned=True, options=OURS, width=True),
    "ours, options, one axis, all-reduce": Case("ours", "flat", tuned=True, options=OURS | SUMMED),
    "ours, width, one axis, all-reduce": Case("ours", "flat", options=OURS | SUMMED, width=True),
    "ours, options, width, one axis, all-reduce": Case("ours", "flat", tuned=True, options=OURS | SUMMED, width=True),
    "ours, one axis": Case("ours", "flat", xla_options=BEST_FOR_OURS, options=OURS),
    "ours, one axis, combined": Case("ours", "flat", xla_options=BEST_FOR_JIT, options=OURS),
    "ours, ahead": Case("ours", "staged", xla_options=BEST_AHEAD, options=OURS | {"prefetch": True}),
    "ours, one order": Case("ours", "staged", options=OURS, one_order=True),
    "ours, float32": Case("ours", "staged", options=REMAT),
    "ours, chunked head": Case("ours", "staged", options=OURS | {"chunked_head": True}),
    "ours, head by pieces": Case("ours", "staged", options=OURS | BY_PIECES),
    "ours, options, chunked head": Case("ours", "staged", tuned=True, options=OURS | {"chunked_head": True}),
    "ours, options, head by pieces": Case("ours", "staged", tuned=True, options=OURS | BY_PIECES),
    "ours, dots": Case("ours", "staged", options=OURS | {"remat": remat_policy("dots")}),
    "ours, gathered again": Case("ours", "staged", options=OURS | {"remat": False, "reshard_after_forward": True}),
    "ours, no remat": Case("ours", "staged", options=OURS | {"remat": False}),
    "ours, HSDP": Case("ours", "hybrid", options=OURS | {"replicas": COPIES}),
    "ours, ZeRO-1": Case("ours", "hybrid", options=OURS | {"replicas": ZERO_1}),
}

# The same cases with fused attention, as used in practice.
OF_KERNEL = (
    "jit",
    "jit, options",
    "jit, best options",
    "jit, best options, width",
    "jit, best options, two dims",
    "jit, width",
    "jit, options, width",
    "jit, options, two dims",
    "ours",
    "ours, options",
    "ours, best options",
    "ours, combined",
)
OF_KERNEL += ("ours, best options, within hosts", "ours, one axis", "ours, one axis, combined", "ours, ahead")
OUR_LAYOUTS = tuple(
    name for name, case in CASES.items() if case.algorithm == "ours" and (case.width or "all-reduce" in name)
)
OF_KERNEL += ("ours, options, one axis", *OUR_LAYOUTS)
CASES |= {f"{name}, kernel": dataclasses.replace(CASES[name], kernel=True) for name in OF_KERNEL}

# Four times the scratch memory (VMEM) that XLA gives a product by default; v5e has 128 MiB.
MORE_VMEM = {"xla_tpu_scoped_vmem_limit_kib": 2**16}
CASES |= {
    name.replace(case, f"{case}, more VMEM"): dataclasses.replace(CASES[name], xla_options=MORE_VMEM)
    for case in (
        *("jit", "jit, options", "jit, width", "jit, options, width"),
        *("ours", "ours, options", "ours, options, one axis", *OUR_LAYOUTS),
    )
    for name in (case, f"{case}, kernel")
}

OTHER_LAYOUTS = ("jit, width", "jit, options, width", "jit, options, two dims", *OUR_LAYOUTS)
OF_HEADS = ("ours, head by pieces", "ours, options, chunked head", "ours, options, head by pieces")
OF_PEERS = OF_HEADS + OTHER_LAYOUTS
ON_TPUS = tuple(
    name for name, case in CASES.items() if not case.xla_options and not case.kernel and name not in OF_PEERS
)
ON_GPUS = ("jit", "jit, best options", "flat", "ours", "ours, best options", "ours, ahead", "ours, chunked head")
ON_GPUS += ("ours, HSDP",)

# Explanations of the words in case names, for the pictures.
WORDS = {
    "replicated": "everything whole on every device",
    "jit": "jit with shardings",
    "flat": "FSDP by hand over one axis of all devices, scattered in float32",
    "ours": "this library, one axis for each dim of the torus; of GPUs one across hosts, one within",
    "options": "with XLA's options that hide collectives",
    "best options": "with those with which it waits least",
    "combined": "with the same, and gathers and scatters of up to 128 MiB combined",
    "within hosts": "weights gathered again over the axis within a host alone",
    "one axis": "one axis of all devices in place of two",
    "ahead": "scan_layers, which gathers layers ahead itself",
    "width": "each leaf split along the width of the model, not its largest dim",
    "all-reduce": "gradients summed by an all-reduce, of which each device keeps its slice",
    "two dims": "each leaf split along two dims, over the axes of the torus",
    "more VMEM": "with 64 MiB of scratch memory for a product, not 16",
    "kernel": "attention of cuDNN on GPUs, flash attention on TPUs",
    "remat": "activations computed again",
    "no remat": "activations and gathered weights kept",
    "one order": "all leaves gathered in one order of the axes, not rotated",
    "float32": "gradients scattered in float32, not bfloat16",
    "chunked head": "the loss by chunks of the vocabulary",
    "head by pieces": "the loss by chunks of the vocabulary, each gathered by itself",
    "dots": "results of matrix products kept",
    "gathered again": "activations kept, weights gathered again",
    "HSDP": "copies along the first dim",
    "ZeRO-1": "copies, optimizer state split over them",
}


def names_in_words(names: Iterable[str], words: Mapping[str, str] = WORDS) -> str:
    """Explains the words in case names."""
    used = dict.fromkeys(word for name in names for word in name.split(", "))
    return "; ".join(f"{word}: {words[word]}" for word in used) + "."


# ------------------------------------------------------------------------------------------------------------- building


def mesh_axes(case: Case, shape: Sequence[int], *, gpus: bool = False) -> dict[str, int]:
    """Returns the axis sizes of a case, outermost first, for a torus ``shape`` or (hosts, GPUs per host).

    Raises:
      ValueError: a hybrid mesh needs a second dim, or a second host, for replicas.
    """
    staged, *others = default_meshes(Topology("", CHIPS["h100" if gpus else "v5e"], tuple(shape)))
    if case.mesh != "hybrid":
        return others[0] if others and case.mesh == "flat" else staged
    if not others:
        raise ValueError(f"copies along one dim, parameters split over the others: shape={tuple(shape)} has only one.")
    flat, hybrid, *_ = others
    if case.algorithm != "flat":
        return hybrid
    copies = hybrid[REPLICA_AXIS]
    return {REPLICA_AXIS: copies} | {axis: devices // copies for axis, devices in flat.items()}


def training(size: Size, **options: Any) -> Workload:
    """Creates the workload of a size; ``options`` are passed to the function in ``WORKLOADS``."""
    return WORKLOADS[type(size)](size, **options)


def exists(size: Size, case: Case) -> bool:
    """Whether a size supports a case: a model sharded from outside has no options that need changes in its source."""
    in_the_source = case.algorithm == "flat" or case.options.keys() & {"chunked_head", "prefetch"}
    return type(size) is Size or not in_the_source


def build(
    size: Size,
    case: Case,
    shape: Sequence[int],
    devices: Sequence[jax.Device] | None = None,
    *,
    gpus: bool = False,
    loop: bool = False,
) -> tuple[Any, tuple[PyTree, ...]]:
    """Builds the step of a case and its abstract arguments.

    Args:
      size: the sizes of the model.
      case: see ``CASES``.
      shape: shape of the torus, or (hosts, GPUs per host).
      devices: the local devices to run on, as many as the torus has; None for an abstract mesh, to compile for a
        topology.
      gpus: whether the devices are GPUs.
      loop: whether layers are in a Python loop instead of ``nn.scan``.
    """
    sizes = mesh_axes(case, shape, gpus=gpus)
    options = {"devices": math.prod(shape), "min_weight_size": threshold(size), **case.options}
    if case.kernel:
        options["attention"] = attention_kernel(size, gpus=gpus)
    if case.algorithm == "ours":
        options["shard_axes"] = tuple(axis for axis in sizes if axis != REPLICA_AXIS)
        if case.width:
            options["uneven"] = f"width {size.dim}"
            UNEVEN[options["uneven"]] = baselines.AlongWidth(size.dim)
    workload, mesh = training(size, **options), mesh_of(sizes, devices)
    workload = in_a_loop(workload) if loop else workload
    if case.algorithm in ("ours", "replicated"):
        step, (state, *rest) = workload.build_step(mesh if devices else sizes)
        return step, (_in_one_order(state, mesh) if case.one_order else state, *rest)
    if case.algorithm == "jit":
        split = {"split_dim": partial(baselines.split_width, size.dim)} if case.width else {}
        return baselines.jit_step(workload, mesh, threshold(size), kernel=case.kernel, **split)
    return baselines.plain_step(workload, mesh, threshold(size))


def _in_one_order(state: TrainState, mesh: Any) -> TrainState:
    """Splits each leaf of a state in the axis order of the mesh; the names of a box determine the order of gathers."""

    def reorder(leaf):
        if not is_box(leaf):
            return leaf
        ordered = [axes_entry(tuple(a for a in mesh.axis_names if a in entry_axes(e))) for e in leaf_of(leaf).names]
        return leaf.replace(names=tuple(ordered))

    def placed(leaf, place):
        value = leaf_of(leaf).value
        return rebox(leaf, jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place))

    params = map_leaves(reorder, state.params)
    places = optimizer_state_shardings(state.opt_state, params, mesh)
    return state.replace(
        params=map_leaves(placed, params, shardings(params, mesh)),
        opt_state=map_leaves(placed, state.opt_state, places),
    )


class LoopedModel(LanguageModel):
    """``LanguageModel`` with layers in a Python loop: ``blocks_0``, ``blocks_1``, ..."""

    def blocks(self, wrap, deterministic):
        block = wrap(BLOCKS[self.block])
        block = nn.remat(block, policy=None if self.remat is True else self.remat) if self.remat else block
        fields = (self.num_layers, self.num_heads, self.dropout, deterministic, self.dtype, self.constrain)
        layers = [block(*fields, name=f"blocks_{i}") for i in range(self.num_layers)]
        return lambda x: (functools.reduce(lambda x, layer: layer(x)[0], layers, x), None)


def attention_kernel(size: Size, *, gpus: bool) -> Attention:
    """Returns fused attention: cuDNN on GPUs, JAX's ``flash_attention`` on TPUs, with repeated key and value heads."""
    if gpus:
        return partial(jax.nn.dot_product_attention, is_causal=size.causal, implementation="cudnn")

    def flash(q, k, v):
        heads, width = q.shape[2:]
        k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
        by_head = (x.swapaxes(1, 2) for x in (q, k, v))
        return typed_kernel(flash_attention)(*by_head, causal=size.causal, sm_scale=width**-0.5).swapaxes(1, 2)

    return flash


def in_a_loop(workload: Workload) -> Workload:
    """Returns a workload with the layers in a Python loop."""
    model = workload.model
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.name not in ("parent", "name")}
    return dataclasses.replace(workload, model=LoopedModel(**fields))


def mesh_of(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Any:
    """Creates a mesh of ``devices``, or an abstract mesh if ``devices`` is None."""
    if devices is None:
        return DeviceMeshManager.create_abstract_mesh(sizes)
    return DeviceMeshManager.create_device_mesh(dict(sizes), devices=list(devices))


def threshold(size: Size) -> int:
    """Returns ``min_weight_size``: the default, or a smaller value that splits the matrices of a small model."""
    return min(DEFAULT_MIN_WEIGHT_SIZE, size.dim**2)


def options_of(case: Case, place: Topology) -> dict[str, Any] | None:
    """Returns the XLA options of a case; None without options."""
    if not case.tuned:
        return dict(case.xla_options) or None
    return {**compiler_options(place.chip.device_kinds[0], shape=place.shape, chosen_by="forecast"), **case.xla_options}


@functools.cache
def counts(size: Size) -> Counts:
    """Counts the parameters of the model by part: blocks, embedding, head, and small leaves."""
    workload = training(size, devices=1)
    shapes = jax.eval_shape(workload.model.init, jax.random.key(0), *workload.init_inputs)["params"]
    found = dict.fromkeys(("blocks", "embed", "head", "small"), 0)
    for path, leaf in leaves_with_path(shapes):
        top = path.split("/")[0]
        part = top.partition("_")[0]  # blocks_7, where layers are a loop
        # Layers are stacked, and each layer is split separately.
        each = leaf.size // size.layers if top == "blocks" else leaf.size
        found[part if each >= threshold(size) else "small"] += leaf.size
    blocks, embedding, head, small = found.values()
    return Counts(blocks, embedding, head, small, size.layers, size.dim, size.vocab_size)


def limit(size: Size, devices: int) -> limits.Communication:
    """Returns the least bytes that FSDP over ``devices`` sends per step in bfloat16, the reference for every case."""
    return limits.wire_bytes(counts(size), devices)


def device_shape(devices: int) -> tuple[int, ...]:
    """Returns the shape of the local devices: two dims for an even number above 2, else one dim."""
    return (2, devices // 2) if devices > 2 and devices % 2 == 0 else (devices,)
