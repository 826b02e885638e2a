"""XLA's options that let collectives run while the cores compute, by kind of chip. Nothing is set unless asked for.

    make_train_step(..., compiler_options="auto")                 the options for the slice that the mesh lies on
    jax.jit(step, compiler_options=compiler_options("TPU v5 lite", shape=(4, 4)))

By default XLA waits for most collectives of a training step: on v5p and v6e for all of them, on v5e for all but some
gathers. These options change it; the code of the step stays as it is:

  v5p, v6e   the SparseCores run collectives by themselves          all bytes are asynchronous
  v5e        gathers in a loop over layers begin a layer ahead      nearly all gathers are; scatters are not
  all TPUs   all-to-alls (of ``muon``, of experts) begin early      they are; v5e: on slices of up to 4x4
  NVIDIA     several collectives may be under way at once (by default one), and gathers in a loop over layers begin a
             layer ahead                                            nearly nothing in the loops is waited for

The options of TPUs stand in the table of chips, each with the slices on which a program was compiled with it: another
slice may refuse an option. docs/compiler_options.md has what each option does to compiled programs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.distributed.hardware.chips import CHIPS, ICI_PIPELINING, chip_of
from xlstm_jax.distributed.hardware.topologies import in_order, slice_shape

# From this release of JAX on XLA's pipelining on GPUs has modes, and its options have other names.
PIPELINES_BY_MODE = (0, 11, 1)
# Collectives under way on a GPU: four do nearly as well, two do not.
AT_ONCE = 8
# Bytes up to which GPUs combine scatters; by default the last scatters of a step are combined, and waited for.
APART = 2**20
GPUS, CPU = ("NVIDIA ", "Tesla "), "cpu"  # what the kinds of all of them begin with


def compiler_options(device_kind: str, *, shape: Sequence[int] | None = None, pipelined: bool = True) -> dict[str, Any]:
    """The options for ``jax.jit(..., compiler_options=...)`` that make collectives asynchronous.

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
    chip = chip_of(device_kind)
    if chip is None or chip.xla_options is None:
        kinds = sorted(kind for chip in CHIPS.values() if chip.xla_options for kind in chip.device_kinds)
        known = ", ".join(map(repr, [*kinds, f"{GPUS[0]}...", CPU]))
        raise ValueError(
            f"device_kind={device_kind!r}: no options are known for it, but for {known}. Leave compiler_options out, "
            "or pass a dict of options that you have tried on it."
        )
    # Without a slice an option must have been compiled on every slice of the chip.
    asked = set(chip.slices if shape is None else [in_order(shape)])
    compiled = (name for name, slices in chip.xla_options.items() if asked <= set(slices))
    # `scan_layers` gathers ahead itself: with the compiler's pipelining as well, a step waits longer.
    return {name: True for name in compiled if pipelined or name != ICI_PIPELINING}


def resolved(
    options: str | Mapping[str, Any] | None, device_kind: str, shape: Sequence[int] | None = None
) -> dict[str, Any] | None:
    """What ``jax.jit`` and ``compile`` take for a user's choice: a dict, "auto" for ``compiler_options``, or None.

    Raises:
      ValueError: another string; or "auto", and a kind for which no options are known.
    """
    chosen = compiler_options(device_kind, shape=shape) if options == "auto" else options
    if isinstance(chosen, str):
        raise ValueError(f"compiler_options={chosen!r}: pass a dict of XLA's options, 'auto' or None.")
    return dict(chosen or {}) or None


def resolved_on(mesh: Mesh | AbstractMesh | None, options: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``resolved`` for the devices of a mesh and the slice that they belong to; without a mesh for the devices at hand.

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
