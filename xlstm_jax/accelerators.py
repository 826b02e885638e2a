"""Facts about accelerators for trainings: XLA's options by kind of device, and answers for an absent device.

    make_train_step(..., compiler_options="auto")                 the options for the slice of the mesh
    jax.jit(step, compiler_options=compiler_options("TPU v5 lite", shape=(4, 4)))
    with absent_device("TPU v6 lite"): step.trace(...)            traces a step as for a device of this kind

By default XLA waits for most collectives of a training step: on v5p and v6e for every collective, on v5e except for
some gathers. XLA's options change this; the code of the step stays unchanged, and no option is set unless requested:

  devices    change by the options                                  result
  v5p, v6e   the SparseCores run collectives                        every collective is asynchronous
  v5e        gathers in a loop over layers begin a layer ahead      nearly every gather is asynchronous, no scatter
  all three  all-to-alls (of ``muon``, of experts) begin early      asynchronous; on v5e only on slices up to 4x4
  NVIDIA     four collectives may run at once (by default one)      steps wait for fewer collectives
             with ``chosen_by="forecast"``: eight, and gathers in a loop over layers begin a layer ahead

tpu7x has the options of v5p; for v4 no options are known.

``TPUS`` has the options of each TPU, each with the slices for which a program was compiled with the option (or, for
tpu7x, is assumed to compile): another slice may refuse an option. docs/compiler_options.md describes the effect of each
option on compiled programs.

A mesh without devices has no device kind. JAX needs a device for cuDNN's attention, ``jax.nn.dot_product_attention(...,
implementation="cudnn")``, in three places:

  tracing    queries the GPU at hand for cuDNN's version and compute capability     ``absent_device`` answers
  lowering   refuses a mesh without devices      ``absent_device`` lifts this: inside shard_map no device is needed
  export     refuses custom calls that are not known to be stable     the forecast compiles at once, without an export

``xlstm_jax.forecast`` imports this file; the tables of ``xlstm_jax.forecast`` have the figures that only a forecast
needs.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.private_names import cudnn_attention, dispatch

Shapes = tuple[tuple[int, ...], ...]  # shapes of slices


class Tpu(NamedTuple):
    """Facts about a TPU for trainings.

    Attributes:
      device_kinds: JAX's names for the TPU, as in ``device_kind``.
      torus_axes: number of torus axes.
      slices: shapes of the slices for rent, the largest last.
      xla_options: XLA's switches that make collectives asynchronous, each with the slices for which a program was
        compiled with the switch; None if no switch is known.
      devices_per_chip: number of devices that JAX counts on a chip.
    """

    device_kinds: tuple[str, ...]
    torus_axes: int
    slices: Shapes
    xla_options: Mapping[str, Shapes] | None = None
    devices_per_chip: int = 1


FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
CUBE = 4  # side of the cubes that form larger slices of v4, v5p and tpu7x


def slices_up_to(pod: tuple[int, ...]) -> Shapes:
    """Returns the shapes of a TPU's slices up to ``pod``, dims in ascending order: below a cube, then of full cubes.

    Below a cube of 4 x 4 x 4 chips the shapes are fixed. Each side of a larger slice is a multiple of 4, at most the
    side of ``pod``.

    >>> slices_up_to((4, 4, 8))[-3:]
    ((2, 4, 4), (4, 4, 4), (4, 4, 8))
    """
    # Optical switches join larger slices from full cubes, so each side is a multiple of a cube's side.
    of_cubes = product(*(range(CUBE, size + 1, CUBE) for size in pod))
    below = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
    return below + tuple(shape for shape in of_cubes if list(shape) == sorted(shape))


V4, V5P, TPU7X = slices_up_to((16, 16, 16)), slices_up_to((16, 16, 24)), slices_up_to((16, 16, 36))
# The similar option for reduce-scatters is left out: no scatter becomes asynchronous, and a step takes more memory.
ICI_PIPELINING = "xla_tpu_enable_ici_ag_pipelining"
ASYNC_ALL_TO_ALL = "xla_tpu_enable_async_all_to_all"
SPARSE_CORE_OPTIONS = (
    *(
        f"xla_tpu_enable_sparse_core_collective_offload_{kind}"
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    ),
    ASYNC_ALL_TO_ALL,
)
# On larger slices libtpu refuses the second option: "UNIMPLEMENTED: Async all-to-all not supported on limited ICI".
V5E_OPTIONS = {ICI_PIPELINING: FLAT, ASYNC_ALL_TO_ALL: ((1, 1), (2, 2), (2, 4), (4, 4))}

TPUS: dict[str, Tpu] = {
    "v4": Tpu(("TPU v4",), 3, V4),
    "v5e": Tpu(("TPU v5 lite", "TPU v5e"), 2, FLAT, V5E_OPTIONS),
    "v5p": Tpu(("TPU v5", "TPU v5p"), 3, V5P, dict.fromkeys(SPARSE_CORE_OPTIONS, V5P)),
    "v6e": Tpu(("TPU v6 lite", "TPU v6e"), 2, FLAT, dict.fromkeys(SPARSE_CORE_OPTIONS, FLAT)),
    # JAX counts each of the chip's two chiplets as a device. A program was compiled with the options on 2x2x1 and
    # 2x2x2; MaxText's recipes pass the first three on 4x4x4 and 4x8x8; for other slices they are assumed.
    "tpu7x": Tpu(("TPU7x",), 3, TPU7X, dict.fromkeys(SPARSE_CORE_OPTIONS, TPU7X), devices_per_chip=2),
}

# From this JAX release on, XLA's pipelining on GPUs has modes, and the options have other names.
PIPELINES_BY_MODE = (0, 11, 1)
# How the options for GPUs were chosen. Others measured tokens per second in JAX on GB200. Compared with one collective
# at once, experts gave 0.3 and 0.65 % more with four, 1.1 % fewer with eight (marin-community/marin#8279; the authors
# kept one for a model of 481B, which failed with four); ragged all-to-alls were 31.6 % faster with one (#8077). FSDP
# gave 2.35 % fewer with flags that pipeline collectives (#8054). Eight with pipelined gathers wait least by forecast;
# no card has confirmed that.
MEASUREMENT, FORECAST = "measurement", "forecast"
PARALLEL_COLLECTIVES = {MEASUREMENT: 4, FORECAST: 8}
AUTO = {"auto": MEASUREMENT, "forecast": FORECAST}  # strings that users pass as compiler_options
# Bytes up to which GPUs combine scatters; by default a step combines its last scatters, and waits for them.
SCATTER_COMBINE_BYTES = 2**20
GPUS, CPU = ("NVIDIA ", "Tesla "), "cpu"  # prefixes of the device kinds


def tpu_of(device_kind: str) -> Tpu | None:
    """Returns the TPU that JAX calls ``device_kind``; None for other devices and unknown TPUs.

    >>> tpu_of("TPU v6 lite").torus_axes, tpu_of("cpu")
    (2, None)
    """
    return next((tpu for tpu in TPUS.values() if device_kind in tpu.device_kinds), None)


# ------------------------------------------------------------------------------------------------------- XLA's options


def compiler_options(
    device_kind: str, *, shape: Sequence[int] | None = None, pipelined: bool = True, chosen_by: str = MEASUREMENT
) -> dict[str, Any]:
    """Returns the options for ``jax.jit(..., compiler_options=...)`` that make collectives asynchronous.

    >>> compiler_options("TPU v5 lite", shape=(4, 4))
    {'xla_tpu_enable_ici_ag_pipelining': True, 'xla_tpu_enable_async_all_to_all': True}
    >>> compiler_options("TPU v5 lite", shape=(16, 16))  # there the compiler refuses the second
    {'xla_tpu_enable_ici_ag_pipelining': True}

    Args:
      device_kind: value of ``jax.Device.device_kind``: "TPU v5 lite", "NVIDIA H100 80GB HBM3", "cpu".
      shape: slice of a TPU, as (16, 16): returns the options with which a program was compiled on this slice. None:
        the options that were compiled on every slice of the chip. The options for GPUs do not depend on the number of
        GPUs.
      pipelined: whether the compiler begins gathers in loops a layer ahead, if the options do so. False: for
        ``scan_layers``, which begins gathers a layer ahead, and scatters a layer later, without the compiler. GPUs
        with ``chosen_by="forecast"`` then combine scatters only up to 1 MiB, so that the last scatters begin early.
      chosen_by: GPUs: "measurement", the options that others measured on cards as the fastest: four collectives at
        once; or "forecast", the options with the least waiting in compiled programs, which no card has confirmed:
        eight collectives at once and pipelined gathers. TPUs have one set, chosen from compiled programs.
    Returns:
      A new dict, which the caller may change; {} for a CPU, where nothing is asynchronous, and for a slice on which
      no program was compiled with an option.
    Raises:
      ValueError: no options are known for this kind (the error lists the kinds with known options), or ``chosen_by``
        is unknown.
    """
    if chosen_by not in PARALLEL_COLLECTIVES:
        raise ValueError(f"chosen_by={chosen_by!r}: pass {MEASUREMENT!r}, as others measured, or {FORECAST!r}.")
    if device_kind == CPU:
        return {}
    if device_kind.startswith(GPUS):
        at_once = {"xla_gpu_experimental_parallel_collective_overlap_limit": PARALLEL_COLLECTIVES[chosen_by]}
        if chosen_by == MEASUREMENT:
            return at_once
        if not pipelined:
            return at_once | {"xla_gpu_reduce_scatter_combine_threshold_bytes": SCATTER_COMBINE_BYTES}
        if jax.__version_info__ >= PIPELINES_BY_MODE:
            return at_once | {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}
        return at_once | {"xla_gpu_enable_pipelined_all_gather": True}
    tpu = tpu_of(device_kind)
    if tpu is None or tpu.xla_options is None:
        kinds = sorted(kind for tpu in TPUS.values() if tpu.xla_options for kind in tpu.device_kinds)
        known = ", ".join(map(repr, [*kinds, f"{GPUS[0]}...", CPU]))
        raise ValueError(
            f"device_kind={device_kind!r}: no options are known for it, but for {known}. Leave compiler_options out, "
            "or pass a dict of options that you have tried on it."
        )
    # Without a slice an option must have been compiled on every slice of the chip.
    asked = set(tpu.slices if shape is None else [in_order(shape)])
    compiled = (name for name, slices in tpu.xla_options.items() if asked <= set(slices))
    # `scan_layers` already gathers ahead: with the compiler's pipelining in addition, a step waits longer.
    return {name: True for name in compiled if pipelined or name != ICI_PIPELINING}


def resolved(
    options: str | Mapping[str, Any] | None, device_kind: str, shape: Sequence[int] | None = None
) -> dict[str, Any] | None:
    """Converts a user's ``compiler_options`` to options for ``jax.jit(compiler_options=...)``.

    A dict is copied. "auto" becomes ``compiler_options(device_kind, shape=shape)``; "forecast" becomes the result of
    the same call with ``chosen_by="forecast"``. None, {} and known options that are empty (on a CPU) become None.

    Raises:
      ValueError: ``options`` is another string; or "auto" or "forecast", and no options are known for the kind.
    """
    if isinstance(options, str) and options in AUTO:
        return compiler_options(device_kind, shape=shape, chosen_by=AUTO[options]) or None
    if isinstance(options, str):
        raise ValueError(f"compiler_options={options!r}: pass a dict of XLA's options, 'auto', 'forecast' or None.")
    return dict(options or {}) or None


def resolved_on(mesh: Mesh | AbstractMesh | None, options: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Converts a user's ``compiler_options`` to options for ``jax.jit``, for the kind of a mesh's devices.

    Args:
      mesh: its devices are of one kind. None: the devices of the running program.
      options: a dict, which is copied; "auto" or "forecast": the options that ``compiler_options`` knows for the
        devices, with ``chosen_by`` "measurement" or "forecast"; None or {}: the result is None.
    Raises:
      ValueError: ``options`` is another string; or "auto" or "forecast", and the mesh is an ``AbstractMesh``, or no
        options are known for its devices.
    """
    if not isinstance(options, str) or options not in AUTO:
        return resolved(options, "")
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"compiler_options={options!r} needs devices, and this mesh is abstract. Pass "
            "compiler_options(device_kind, shape=...), or hand the options to forecast."
        )
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return resolved(options, device.device_kind, slice_shape(device))


def slice_shape(device: Any) -> tuple[int, ...] | None:
    """Returns the shape of the TPU slice that contains ``device``, even if a mesh uses part of the slice.

    In the order of ``in_order``, with an entry per axis of the torus: (4, 4) for a slice v5e-16. None for GPUs, CPUs
    and unknown TPUs.
    """
    tpu = tpu_of(device.device_kind)
    if tpu is None:
        return None
    # Slices joined by a network share a client, and coordinates start anew in each slice.
    number = getattr(device, "slice_index", None)
    others = [other for other in device.client.devices() if getattr(other, "slice_index", None) == number]
    spans = [1 + max(column) - min(column) for column in zip(*(other.coords for other in others), strict=True)]
    return in_order(spans)[: tpu.torus_axes]


def in_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of a slice as in its name: dims ascend, and dims of size 1 come last.

    >>> in_order((1, 2, 2))
    (2, 2, 1)
    """
    return tuple(sorted(shape, key=lambda size: (size == 1, size)))


# ------------------------------------------------------------------------------------------------- an absent device

# The device kind for which a step is traced. The kind is part of the keys of JAX's caches: a step traced for one kind
# is traced anew for another kind, and for devices at hand.
_traced_for = jax.make_user_context(None)
CUDNN = 90800  # cuDNN version of an absent GPU: 9.8, in JAX's encoding


def kind_of_mesh(mesh: AbstractMesh) -> str | None:
    """Returns the ``device_kind`` of a mesh's devices; for a mesh without devices, the kind set by ``absent_device``.

    None if the mesh has no devices, and no ``absent_device`` context with the name of a TPU is active.
    """
    # Devices at hand come first, because they run the traced step.
    device = getattr(mesh, "abstract_device", None)
    return device.device_kind if device else _traced_for.value


@contextlib.contextmanager
def absent_device(device_kind: str | None = None, capability: tuple[int, int] | None = None) -> Iterator[None]:
    """Makes JAX trace and lower as on a device of this kind, within the context.

    Args:
      device_kind: JAX's name of the device. A TPU: ``kind_of_mesh`` returns this kind. A GPU, an unknown name or None:
        only cuDNN's attention is traced as on a GPU.
      capability: compute capability of a GPU, as (9, 0), for tracing cuDNN's attention; None: any GPU, which is enough
        for shapes.
    """
    if device_kind is not None and tpu_of(device_kind):
        with _traced_for(device_kind):
            yield
        return
    answers = {
        "check_cudnn_version": lambda: CUDNN,
        # Without a capability only shapes are needed, which do not depend on the capability.
        "check_compute_capability": lambda wanted: capability is None or capability >= _pair(wanted),
        "is_cuda_compute_capability_equal": lambda wanted: capability == _pair(wanted),
    }
    before = {name: getattr(cudnn_attention, name) for name in answers}
    lowered = dispatch.prim_requires_devices_during_lowering
    needs_devices = {primitive for primitive in lowered if primitive.name.startswith("dot_product_att")}
    try:
        for name, answer in answers.items():
            setattr(cudnn_attention, name, answer)
        # Only attention primitives are exempt: other primitives still refuse a mesh without devices.
        dispatch.prim_requires_devices_during_lowering -= needs_devices
        yield
    finally:
        for name, function in before.items():
            setattr(cudnn_attention, name, function)
        dispatch.prim_requires_devices_during_lowering |= needs_devices


def _pair(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))
