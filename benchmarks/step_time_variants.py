"""Cases of ``step_time``: builders of the steps for the local devices, started from the same parameters.

    started(model, CASES["jit"], devices, start) -> run            run(3) takes three steps and returns the last loss

The cases correspond to the cases of ``cases``, with two differences. Computation, gathers and reduce-scatters use the
dtype of the ``Model``: float32 on CPU devices, where narrower dtypes are slow. And parameters are split over a single
axis (except for HSDP), because the links of simulated devices, and of the GPUs of a host, have no torus shape.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import baselines
from benchmarks.cases import REPLICA_AXIS, Case, device_shape, mesh_axes, mesh_of, threshold
from benchmarks.decoder import SIZES as DECODERS
from benchmarks.decoder import DecoderSize, decoder
from benchmarks.large_models import Size, language_model
from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed import Replicas
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, rebox
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves
from xlstm_jax.forecast.training import Workload

REMAT = {"remat": True}
TORCH_CASES = ("FSDP2", "FSDP2, weights kept")
NOT_BY_HAND = "FSDP by hand wraps modules in their source, and the decoder is one that is sharded from outside."
RESHARD = {"reshard_after_forward": True}
CASES: dict[str, Case] = {
    "replicated": Case("replicated"),
    "jit": Case("jit"),
    "jit, remat": Case("jit", options=REMAT),
    "flat": Case("flat"),
    "flat, remat": Case("flat", options=REMAT),
    "ours": Case("ours"),
    "ours, gathered again": Case("ours", options=RESHARD),
    "ours, remat": Case("ours", options=REMAT),
    "ours, HSDP": Case("ours", "hybrid", options={"replicas": Replicas(REPLICA_AXIS)}),
}


@dataclass(frozen=True)
class Model:
    """Model to train: sizes, tokens per sequence, sequences per device, dtype of computation and communication."""

    size: Size
    context: int
    rows: int
    dtype: Any = jnp.float32

    def init_failure(self, case: str) -> str | None:
        """Returns the reason why the model does not support a case; None for a supported case."""
        if not isinstance(self.size, DecoderSize):
            return None
        if case in TORCH_CASES:
            return "PyTorch has the Transformer alone"
        return NOT_BY_HAND if CASES[case].algorithm == "flat" else None


MODELS = {
    "decoder": Model(DECODERS["decoder_small"], 256, 1),
    "tiny": Model(Size(64, 2, 2, 256), 32, 1),
    "small": Model(Size(256, 4, 4, 2048), 256, 1),
    "medium": Model(Size(1024, 12, 16, 32_768), 2048, 1, jnp.bfloat16),
}


@dataclass(frozen=True)
class Start:
    """Common start of the cases: unsharded parameters, path -> array, and a batch."""

    params: dict[str, np.ndarray]
    tokens: np.ndarray


def start_of(model: Model, devices: int) -> Start:
    """Creates the start of a model, equal for every call."""
    plain = workload(model, devices).model
    example = jnp.zeros((1, model.context), jnp.int32)
    params = jax.jit(plain.init)(jax.random.key(0), example)["params"]
    rows, vocab_size = model.rows * devices, model.size.vocab_size
    tokens = np.random.default_rng(0).integers(vocab_size, size=(rows, model.context + 1), dtype=np.int32)
    return Start({path: np.asarray(leaf) for path, leaf in leaves_with_path(params)}, tokens)


def workload(model: Model, devices: int, **options: Any) -> Workload:
    """Creates the workload of a model; ``options`` are passed to ``language_model`` or ``decoder``."""
    options = {"min_weight_size": threshold(model.size), "gather_dtype": model.dtype} | options
    if isinstance(model.size, DecoderSize):
        sizes = {"devices": devices, "rows": model.rows, "context": model.context, "dtype": model.dtype}
        return decoder(model.size, **sizes, remat=options.pop("remat", False), **options)
    large = language_model(model.size, devices=devices, **options)
    tokens = jax.ShapeDtypeStruct((model.rows * devices, model.context + 1), jnp.int32)
    return dataclasses.replace(large, model=large.model.clone(dtype=model.dtype), batch=tokens)


def build(model: Model, case: Case, devices: Sequence[jax.Device]) -> tuple[Any, tuple[PyTree, ...]]:
    """Builds the step of a case and its abstract arguments.

    Raises:
      ValueError: the case has no mesh for the number of devices, or cannot shard the model.
    """
    sizes = mesh_axes(case, device_shape(len(devices)))
    mesh, options = mesh_of(sizes, devices), dict(case.options)
    if case.algorithm == "ours":
        options["shard_axes"] = tuple(axis for axis in sizes if axis != REPLICA_AXIS)
    training = workload(model, len(devices), **options)
    if case.algorithm in ("ours", "replicated"):
        return training.build_step(mesh)
    if case.algorithm == "jit":
        return baselines.jit_step(training, mesh, threshold(model.size))
    if isinstance(model.size, DecoderSize):
        raise ValueError(NOT_BY_HAND)
    (axis,) = mesh.axis_names
    return baselines.plain_step(training, mesh, threshold(model.size), axis=axis, gather_dtype=model.dtype)


def started(model: Model, case: Case, devices: Sequence[jax.Device], start: Start) -> Callable[[int], float]:
    """Compiles a case and puts its state on the devices; returns a function that runs steps and waits for them.

    Raises:
      ValueError: see ``build``.
    """
    step, (state, batch, _) = build(model, case, devices)
    state, batch = state_of(state, start.params), jax.device_put(start.tokens, batch.sharding)
    rng = jax.random.key(0)
    compiled = step.lower(state, batch, rng).compile()

    def run(steps):
        nonlocal state
        for _ in range(steps):
            state, metrics = compiled(state, batch, rng)
        jax.block_until_ready((state, metrics))
        return float(metrics["loss"])

    return run


def state_of(abstract: PyTree, params: Mapping[str, np.ndarray]) -> PyTree:
    """Fills an abstract state with parameters, and with zeros elsewhere, the initial state of AdamW."""

    def placed(leaf, value):
        like = leaf_of(leaf).value
        return rebox(leaf, jax.device_put(np.asarray(value, like.dtype), like.sharding))

    def zeros(leaf):
        return placed(leaf, np.zeros(leaf_of(leaf).value.shape))

    values = iter([params[path] for path, _ in leaves_with_path(abstract.params)])
    return abstract.replace(
        step=zeros(abstract.step),
        params=map_leaves(lambda leaf: placed(leaf, next(values)), abstract.params),
        opt_state=map_leaves(zeros, abstract.opt_state),
    )
