"""The mean over many devices as rings compute it, rounding at every hop: its error against float64, and bounds.

NumPy does what N devices would do that are not there; ``wire_dtypes`` says why, and shows the results.
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
    """Gradient-like values [devices, values] in float32: each row is what one device has before the mean is taken."""
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
    """The mean of ``x[devices, values]`` as rings compute it, stage after stage, every hop rounding to ``dtype``.

    Args:
      x: in float32.
      dtype: on the wire, a key of ``WIRE``.
      shape: devices of each stage, the one that is reduced first in front.
      divide: "before" the sum, in float32, as the library does; or "after".
    Returns:
      [values] in ``dtype``, but for the division after, in float32.
    """
    wire, devices = WIRE[dtype], np.float32(len(x))
    with np.errstate(over="ignore", invalid="ignore"):
        sent = (x / devices if divide == "before" else x).astype(wire)
        for stage in shape:
            first, *others = sent.reshape(stage, -1, x.shape[-1])
            # One addition is exact to float32, so that rounding it is rounding the exact sum: what hardware does.
            sent = functools.reduce(
                lambda a, b: (a.astype(np.float32) + b.astype(np.float32)).astype(wire), others, first
            )
    total = sent.reshape(-1)
    return total if divide == "before" else total.astype(np.float32) / devices


def relative_error(x: np.ndarray, got: np.ndarray) -> float:
    """Of the mean vector, in the Euclidean norm, against float64; infinite where a value is not finite."""
    want, got = x.mean(axis=0, dtype=np.float64), got.astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want)) if np.isfinite(got).all() else math.inf


def chance(x: np.ndarray) -> float:
    """By how much the mean of N devices is off that of infinitely many, relative to it: what the data themselves do."""
    wide = x.astype(np.float64)
    return float(np.linalg.norm(wide.std(axis=0) / np.sqrt(len(x))) / np.linalg.norm(wide.mean(axis=0)))


def bounds(x: np.ndarray, dtype: str, shape: Sequence[int]) -> tuple[float, float]:
    """(worst case, expected) relative error; see the top of this file."""
    unit = 2.0 ** -(ml_dtypes.finfo(WIRE[dtype]).nmant + 1)
    roundings = sum(stage - 1 for stage in shape) + 1
    wide = x.astype(np.float64)
    condition = np.linalg.norm(np.abs(wide).mean(axis=0)) / np.linalg.norm(wide.mean(axis=0))
    return roundings * unit * condition, math.sqrt(roundings) * unit * condition


def sums() -> dict[str, Any]:
    """All errors of means: by values, by number of devices, and of float16 by scale."""
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
                told = {"devices": devices, "shape": name, "dtype": dtype, "error": error}
                rows.append(told | {"expected": bounds(x, dtype, shape)[1]})
    return rows


def _by_scale(kind: str = "noisy") -> list[dict[str, Any]]:
    """Rounding in float16 and bfloat16 by the size of the gradients: small ones underflow, sums of large ones overflow.

    An infinite error is given as None.
    """
    rows = []
    for scale in SCALES:
        x = gradients(kind, DEVICES, scale=scale / 10)  # of that standard deviation
        for dtype in ("float16", "bfloat16"):
            for divide in ("before", "after"):
                error = relative_error(x, reduced_mean(x, dtype, (DEVICES,), divide=divide))
                told = {"scale": scale, "dtype": dtype, "divide": divide}
                rows.append(told | {"error": error if math.isfinite(error) else None})
    return rows
