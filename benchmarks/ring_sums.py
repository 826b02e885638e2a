"""Mean over many devices in ring order, with rounding at every hop: error against float64, and bounds.

NumPy simulates N absent devices; ``wire_dtypes`` explains the purpose, and shows the results.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

WIRE = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
DEVICES = 256
SHAPES = {"256": (DEVICES,), "16 x 16": (16, 16)}
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
VALUES = 4096
SCALES = tuple(10.0**power for power in range(-9, 7))


def gradients(kind: str, devices: int, values: int = VALUES, scale: float = 1.0) -> np.ndarray:
    """Creates gradient-like values [devices, values] in float32, a row per device."""
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(devices, values))
    kinds = {
        "agreeing": 1 + 0.3 * normal,
        "noisy": rng.normal(size=values) + 10 * normal,
        "heavy tails": rng.standard_t(2.5, size=(devices, values)),
        "no signal": normal,
    }
    return (scale * kinds[kind]).astype(np.float32)


KINDS = {
    "agreeing": "1 + 0.3 n: all devices agree",
    "noisy": "n' + 10 n: n' the same on all devices",
    "heavy tails": "Student's t with 2.5 degrees of freedom",
    "no signal": "n: the mean vanishes but for chance",
}


def reduced_mean(x: np.ndarray, dtype: str, shape: Sequence[int], *, divide: str = "before") -> np.ndarray:
    """Computes the mean of ``x[devices, values]`` in ring order, stage by stage, with rounding to ``dtype`` per hop.

    Args:
      x: values in float32.
      dtype: the dtype of communication, a key of ``WIRE``.
      shape: number of devices per stage; the first stage is reduced first.
      divide: "before" the sum, in float32, as the library does; or "after".
    Returns:
      [values] in ``dtype``; in float32 if divided after the sum.
    """
    wire, devices = WIRE[dtype], np.float32(len(x))
    with np.errstate(over="ignore", invalid="ignore"):
        sent = (x / devices if divide == "before" else x).astype(wire)
        for stage in shape:
            first, *others = sent.reshape(stage, -1, x.shape[-1])
            # A float32 addition followed by rounding equals rounding of the exact sum, as in hardware.
            sent = functools.reduce(
                lambda a, b: (a.astype(np.float32) + b.astype(np.float32)).astype(wire), others, first
            )
    total = sent.reshape(-1)
    return total if divide == "before" else total.astype(np.float32) / devices


def relative_error(x: np.ndarray, got: np.ndarray) -> float:
    """Computes the relative error of a mean vector against float64, in the Euclidean norm; infinite if not finite."""
    want, got = x.mean(axis=0, dtype=np.float64), got.astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want)) if np.isfinite(got).all() else math.inf


def chance(x: np.ndarray) -> float:
    """Computes the relative standard error of the mean over N devices: the sampling noise of the data."""
    wide = x.astype(np.float64)
    return float(np.linalg.norm(wide.std(axis=0) / np.sqrt(len(x))) / np.linalg.norm(wide.mean(axis=0)))


def bounds(x: np.ndarray, dtype: str, shape: Sequence[int]) -> tuple[float, float]:
    """Computes the (worst case, expected) relative error; see the docstring of ``wire_dtypes``."""
    unit = 2.0 ** -(ml_dtypes.finfo(WIRE[dtype]).nmant + 1)
    roundings = sum(stage - 1 for stage in shape) + 1
    wide = x.astype(np.float64)
    condition = np.linalg.norm(np.abs(wide).mean(axis=0)) / np.linalg.norm(wide.mean(axis=0))
    return roundings * unit * condition, math.sqrt(roundings) * unit * condition


def sums() -> dict[str, Any]:
    """Computes the errors of means by kind of values, by number of devices, and by scale of the values."""
    by_kind = []
    for kind in KINDS:
        x = gradients(kind, DEVICES)
        for shape_name, shape in SHAPES.items():
            for dtype in WIRE:
                worst, expected = bounds(x, dtype, shape)
                error = relative_error(x, reduced_mean(x, dtype, shape))
                row = {"values": kind, "shape": shape_name, "dtype": dtype, "error": error, "chance": chance(x)}
                by_kind.append(row | {"worst case": worst, "expected": expected})
    return {"by values": by_kind, "by devices": _by_devices(), "by scale": _by_scale()}


def _by_devices(kind: str = "noisy") -> list[dict[str, Any]]:
    rows = []
    for devices in SIZES:
        x, side = gradients(kind, devices), math.isqrt(devices)
        shapes = {"flat ring": (devices,)} | ({"staged": (side, side)} if side**2 == devices else {})
        for name, shape in shapes.items():
            for dtype in WIRE:
                error = relative_error(x, reduced_mean(x, dtype, shape))
                row = {"devices": devices, "shape": name, "dtype": dtype, "error": error}
                rows.append(row | {"expected": bounds(x, dtype, shape)[1]})
    return rows


def _by_scale(kind: str = "noisy") -> list[dict[str, Any]]:
    """Computes the errors of float16 and bfloat16 by the scale of gradients, with underflow and overflow.

    An infinite error is stored as None.
    """
    rows = []
    for scale in SCALES:
        x = gradients(kind, DEVICES, scale=scale / 10)  # standard deviation `scale`
        for dtype in ("float16", "bfloat16"):
            for divide in ("before", "after"):
                error = relative_error(x, reduced_mean(x, dtype, (DEVICES,), divide=divide))
                row = {"scale": scale, "dtype": dtype, "divide": divide}
                rows.append(row | {"error": error if math.isfinite(error) else None})
    return rows
