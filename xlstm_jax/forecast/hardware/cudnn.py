"""Tracing for an absent chip, and export of cuDNN's attention; used before a step is compiled for a topology."""

from contextlib import AbstractContextManager

from jax import export

from xlstm_jax.accelerators import absent_device
from xlstm_jax.forecast.hardware.chips import Chip
from xlstm_jax.forecast.hardware.gpu_targets import compute_capability

# Custom calls of cuDNN's attention are not on export's list of stable calls. Here the same release compiles them right
# away, so they need not be stable.
_KINDS = [f"fmha{bias}Softmax{dropout}" for bias in ("", "ScaleBias") for dropout in ("", "Dropout")]
TARGETS = [f"__cudnn${kind}{way}{dtype}" for kind in _KINDS for way in ("", "Backward") for dtype in ("", "F8")]
ALLOWED = [export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]


def traced_for_chip(chip: Chip) -> AbstractContextManager[None]:
    """Returns a context in which JAX traces and lowers functions as if ``chip`` were the local device."""
    return absent_device(chip.device_kinds[0], None if chip.torus_axes else compute_capability(chip))
