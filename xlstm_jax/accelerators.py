"""Training's facts about accelerators: XLA's options by kind of device, and answers for a device that is not there.

    make_train_step(..., compiler_options="auto")                 the options for the slice that the mesh lies on
    jax.jit(step, compiler_options=compiler_options("TPU v5 lite", shape=(4, 4)))
    with absent_device("TPU v6 lite"): step.trace(...)            traces a step as for a device of this kind

By default XLA waits for most collectives of a training step: on v5p and v6e for all of them, on v5e for all but some
gathers. XLA's options change that; the code of the step stays as it is, and nothing is set unless asked for:

  v5p, v6e   the SparseCores run collectives by themselves          all bytes are asynchronous
  v5e        gathers in a loop over layers begin a layer ahead      nearly all gathers are; scatters are not
  all TPUs   all-to-alls (of ``muon``, of experts) begin early      they are; v5e: on slices of up to 4x4
  NVIDIA     several collectives may be under way at once (by default one), and gathers in a loop over layers begin a
             layer ahead                                            nearly nothing in the loops is waited for

``TPUS`` has the options of each TPU, each option with the slices on which a program was compiled with it: another
slice may refuse an option. docs/compiler_options.md has what each option does to compiled programs.

A mesh without devices cannot be asked what its devices are. JAX asks all the same: attention of cuDNN,
``jax.nn.dot_product_attention(..., implementation="cudnn")``, asks three times:

  tracing    asks the GPU at hand for cuDNN's version and its compute capability    ``absent_device`` answers
  lowering   refuses a mesh without devices                                         not needed inside shard_map
  export     refuses custom calls that it does not know to be stable                the forecast compiles at once

``xlstm_jax.forecast`` reads this file; its own tables have what only a forecast needs.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.private_names import cudnn_attention, dispatch

Shapes = tuple[tuple[int, ...], ...]  # of slices


class Tpu(NamedTuple):
    """A TPU as training knows it.

    Attributes:
      device_kinds: the names that JAX gives it, in ``device_kind``.
      torus_axes: how many axes the torus has.
      slices: shapes of the slices that can be rented, the largest one last.
      xla_options: XLA's switches that make collectives asynchronous, each with the slices on which a program was
        compiled with it; None where none are known.
    """

    device_kinds: tuple[str, ...]
    torus_axes: int
    slices: Shapes
    xla_options: Mapping[str, Shapes] | None = None


FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
CUBE = 4  # the side of the cubes that larger slices of v4 and v5p are made of


def slices_up_to(pod: tuple[int, ...]) -> Shapes:
    """Returns slices of less than a cube; then of whole cubes, sides in ascending order, up to the pod.

    >>> slices_up_to((4, 4, 8))[-3:]
    ((2, 4, 4), (4, 4, 4), (4, 4, 8))
    """
    # Larger slices are joined by optical switches between whole cubes, so each side is a multiple of a cube's.
    of_cubes = product(*(range(CUBE, size + 1, CUBE) for size in pod))
    below = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
    return below + tuple(shape for shape in of_cubes if list(shape) == sorted(shape))


V4, V5P = slices_up_to((16, 16, 16)), slices_up_to((16, 16, 24))
# The same option for reduce-scatters is left out: no scatter becomes asynchronous, and a step takes more memory.
ICI_PIPELINING = "xla_tpu_enable_ici_ag_pipelining"
ASYNC_ALL_TO_ALL = "xla_tpu_enable_async_all_to_all"
SPARSE_CORE_OPTIONS = (
    *(
        f"xla_tpu_enable_sparse_core_collective_offload_{kind}"
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    ),
    ASYNC_ALL_TO_ALL,
)
# On the larger slices libtpu refuses it: "UNIMPLEMENTED: Async all-to-all not supported on limited ICI".
V5E_OPTIONS = {ICI_PIPELINING: FLAT, ASYNC_ALL_TO_ALL: ((1, 1), (2, 2), (2, 4), (4, 4))}

TPUS: dict[str, Tpu] = {
    "v4": Tpu(("TPU v4",), 3, V4),
    "v5e": Tpu(("TPU v5 lite", "TPU v5e"), 2, FLAT, V5E_OPTIONS),
    "v5p": Tpu(("TPU v5", "TPU v5p"), 3, V5P, dict.fromkeys(SPARSE_CORE_OPTIONS, V5P)),
    "v6e": Tpu(("TPU v6 lite", "TPU v6e"), 2, FLAT, dict.fromkeys(SPARSE_CORE_OPTIONS, FLAT)),
}

# From this release of JAX on XLA's pipelining on GPUs has modes, and its options have other names.
PIPELINES_BY_MODE = (0, 11, 1)
# Collectives under way on a GPU: four do nearly as well, two do not.
AT_ONCE = 8
# Bytes up to which GPUs combine scatters; by default the last scatters of a step are combined, and waited for.
APART = 2**20
GPUS, CPU = ("NVIDIA ", "Tesla "), "cpu"  # the beginnings of all their kinds


def tpu_of(device_kind: str) -> Tpu | None:
    """Returns the TPU that JAX calls ``device_kind``; None for other devices and unknown TPUs.

    >>> tpu_of("TPU v6 lite").torus_axes, tpu_of("cpu")
    (2, None)
    """
    return next((tpu for tpu in TPUS.values() if device_kind in tpu.device_kinds), None)


# ------------------------------------------------------------------------------------------------------- XLA's options


def compiler_options(device_kind: str, *, shape: Sequence[int] | None = None, pipelined: bool = True) -> dict[str, Any]:
    """Returns the options for ``jax.jit(..., compiler_options=...)`` that make collectives asynchronous.

    >>> compiler_options("TPU v5 lite", shape=(4, 4))
    {'xla_tpu_enable_ici_ag_pipelining': True, 'xla_tpu_enable_async_all_to_all': True}
    >>> compiler_options("TPU v5 lite", shape=(16, 16))  # there the compiler refuses the second
    {'xla_tpu_enable_ici_ag_pipelining': True}

    Args:
      device_kind: as ``jax.Device.device_kind`` names it: "TPU v5 lite", "NVIDIA H100 80GB HBM3", "cpu".
      shape: the slice of a TPU, as (16, 16): the options with which a program was compiled on that slice. None: those
        that were compiled on every slice of the chip. GPUs have the same options whatever their number.
      pipelined: whether the compiler begins gathers in loops a layer ahead. False: for ``scan_layers``, which does so
        itself, and scatters a layer later.
    Returns:
      A new dict, which the caller may change; {} for a CPU, on which nothing is asynchronous.
    Raises:
      ValueError: no options are known for this kind; lists the kinds for which they are.
    """
    if device_kind == CPU:
        return {}
    if device_kind.startswith(GPUS):
        at_once = {"xla_gpu_experimental_parallel_collective_overlap_limit": AT_ONCE}
        if not pipelined:
            return at_once | {"xla_gpu_reduce_scatter_combine_threshold_bytes": APART}
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
    # `scan_layers` gathers ahead itself: with the compiler's pipelining as well, a step waits longer.
    return {name: True for name in compiled if pipelined or name != ICI_PIPELINING}


def resolved(
    options: str | Mapping[str, Any] | None, device_kind: str, shape: Sequence[int] | None = None
) -> dict[str, Any] | None:
    """Returns options as ``jax.jit`` takes them: from a dict, from "auto" for ``compiler_options``, or None.

    Raises:
      ValueError: another string; or "auto", and a kind for which no options are known.
    """
    chosen = compiler_options(device_kind, shape=shape) if options == "auto" else options
    if isinstance(chosen, str):
        raise ValueError(f"compiler_options={chosen!r}: pass a dict of XLA's options, 'auto' or None.")
    return dict(chosen or {}) or None


def resolved_on(mesh: Mesh | AbstractMesh | None, options: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns ``resolved`` for the devices of a mesh and their slice; without a mesh for the devices at hand.

    Raises:
      ValueError: as of ``resolved``; or "auto", and the mesh has no devices.
    """
    if options != "auto":
        return resolved(options, "")
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            "compiler_options='auto' needs devices, and this mesh is abstract. Pass compiler_options(device_kind, "
            "shape=...), or hand the options to forecast."
        )
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return resolved(options, device.device_kind, slice_shape(device))


def slice_shape(device: Any) -> tuple[int, ...] | None:
    """Returns the shape of a TPU's slice, also where a mesh takes a part of it; None for GPUs, CPUs, unknown TPUs."""
    tpu = tpu_of(device.device_kind)
    if tpu is None:
        return None
    # Slices that a network joins share one client, and their coordinates begin anew in each.
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


# ------------------------------------------------------------------------------------- a device that is not there

# The kind of the device that a step is traced for. It is part of the keys of JAX's caches: a step that was traced for
# one kind is traced anew for another one, and for devices at hand.
_traced_for = jax.make_user_context(None)
CUDNN = 90800  # the version that answers: 9.8, as JAX counts it


def kind_of_mesh(mesh: AbstractMesh) -> str | None:
    """Returns the ``device_kind`` of a mesh's devices, or of ``absent_device``; None where neither is there."""
    # Devices at hand come first: what is traced for them, they run.
    device = getattr(mesh, "abstract_device", None)
    return device.device_kind if device else _traced_for.value


@contextlib.contextmanager
def absent_device(device_kind: str | None = None, capability: tuple[int, int] | None = None) -> Iterator[None]:
    """Lets JAX trace and lower as on a device of this kind, within the context.

    Args:
      device_kind: as JAX names it. A TPU: ``kind_of_mesh`` returns it. None, or a GPU: attention of cuDNN is traced.
      capability: of a GPU, as (9, 0): attention of cuDNN is traced as on this GPU; None: as on any GPU, which is
        enough for shapes.
    """
    if device_kind is not None and tpu_of(device_kind):
        with _traced_for(device_kind):
            yield
        return
    answers = {
        "check_cudnn_version": lambda: CUDNN,
        # Without a GPU only shapes are wanted, and they are the same at any capability.
        "check_compute_capability": lambda wanted: capability is None or capability >= _pair(wanted),
        "is_cuda_compute_capability_equal": lambda wanted: capability == _pair(wanted),
    }
    before = {name: getattr(cudnn_attention, name) for name in answers}
    lowered = dispatch.prim_requires_devices_during_lowering
    needs_devices = {primitive for primitive in lowered if primitive.name.startswith("dot_product_att")}
    try:
        for name, answer in answers.items():
            setattr(cudnn_attention, name, answer)
        # Only the primitives of attention: others still refuse a mesh without devices.
        dispatch.prim_requires_devices_during_lowering -= needs_devices
        yield
    finally:
        for name, function in before.items():
            setattr(cudnn_attention, name, function)
        dispatch.prim_requires_devices_during_lowering |= needs_devices


def _pair(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))
