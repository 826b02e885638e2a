"""Answers to what JAX asks a GPU before it traces attention of cuDNN, where that GPU is not there.

jax.nn.dot_product_attention(..., implementation="cudnn")
  tracing    asks the GPU at hand for cuDNN's version and its compute capability    answered by the chip's target
  lowering   refuses a mesh without devices                                         not needed inside shard_map
  export     refuses custom calls that it does not know to be stable                this release compiles at once
"""

import contextlib
from collections.abc import Iterator

from jax import export

from xlstm_jax.distributed.hardware.chips import Chip
from xlstm_jax.distributed.hardware.gpu_targets import CUDNN, compute_capability
from xlstm_jax.distributed.hardware.traced_for import traced_for
from xlstm_jax.private_names import cudnn_attention, dispatch

_KINDS = [f"fmha{bias}Softmax{dropout}" for bias in ("", "ScaleBias") for dropout in ("", "Dropout")]
TARGETS = [f"__cudnn${kind}{way}{dtype}" for kind in _KINDS for way in ("", "Backward") for dtype in ("", "F8")]
ALLOWED = [export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]


@contextlib.contextmanager
def answered_for(chip: Chip | None) -> Iterator[None]:
    """A context in which JAX traces and lowers cuDNN's attention as on this chip; with None as on any GPU.

    For a TPU nothing of cuDNN's changes, and ``chip_of_mesh`` says this chip.
    """
    if chip is not None and chip.torus_axes:
        with traced_for(chip.name):
            yield
        return
    has = compute_capability(chip) if chip else None
    answers = {
        "check_cudnn_version": lambda: CUDNN,
        # Without a chip only shapes are wanted, and they are the same at any capability.
        "check_compute_capability": lambda capability: has is None or has >= _pair(capability),
        "is_cuda_compute_capability_equal": lambda capability: has == _pair(capability),
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
