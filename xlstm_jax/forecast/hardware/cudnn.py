"""Tracing and export of a program for a chip that is not there."""

from contextlib import AbstractContextManager

from jax import export

from xlstm_jax.accelerators import absent_device
from xlstm_jax.forecast.hardware.chips import Chip
from xlstm_jax.forecast.hardware.gpu_targets import compute_capability

# Custom calls of cuDNN's attention, which export does not know to be stable. This release compiles them at once.
_KINDS = [f"fmha{bias}Softmax{dropout}" for bias in ("", "ScaleBias") for dropout in ("", "Dropout")]
TARGETS = [f"__cudnn${kind}{way}{dtype}" for kind in _KINDS for way in ("", "Backward") for dtype in ("", "F8")]
ALLOWED = [export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]


def answered_for(chip: Chip) -> AbstractContextManager[None]:
    """Returns a context in which JAX traces and lowers as on this chip."""
    return absent_device(chip.device_kinds[0], None if chip.torus_axes else compute_capability(chip))
