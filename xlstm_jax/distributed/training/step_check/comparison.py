"""Comparison of a step's gradients with the correct ones, leaf by leaf, with bounds for rounding.

A leaf is correct if the norm of the difference is at most the sum of

  64 eps(float32)       of the leaf's norm: sums in another order. (eps(float64) if every leaf is float64.)
  4 eps(float32)        of the average norm of a leaf of its size: for gradients that are 0 up to rounding
  8 x a shake           the change of the reference when parameters and inputs are multiplied by 1 + u eps, with u in
                        (-1, 1) and eps of the narrowest dtype of the computation; measured only if needed
  the wire              the rounding by the dtype of a reduce-scatter, or by the format of sums over replicas

A larger difference is not rounding. The ratio of the leaf then suggests the cause: a number of devices, or another
value.

For steps that draw from unknown keys, means over many keys are compared. Both means have a standard error. Least
squares split the mean of the step into a multiple of the mean of one device, and a rest. The number of keys is doubled
until ``SURE`` standard errors of both are less than half the way from 1 to the nearest ratio that is a number of
devices, 1/2.

  right         each ratio is within SURE standard errors of 1, and each rest within SURE standard errors of 0
  wrong         a ratio or a rest is outside
  cannot tell   standard errors are still larger after MOST_KEYS keys
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.wire.collectives import value_dtype, wide_dtype
from xlstm_jax.distributed.training.step_check.one_device import Reference
from xlstm_jax.formatting import format_axes

ORDER_EPS, NEAR_ZERO_EPS, SHAKEN = 64, 4, 8
NO_RATIO = 1e-9  # tolerance of a leaf whose gradient is only rounding
FEWEST_KEYS, MOST_KEYS, SURE = 8, 256, 6.0
NEAREST_RATIO = 0.5  # the ratio nearest to 1 that is a number of devices, or its inverse

Sample = Callable[[int], tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]


class LeafCheck(NamedTuple):
    """Comparison of a leaf of the parameters: the step's gradient is ``ratio`` times the correct one, plus a rest.

    ``error`` is the norm of the rest relative to the correct gradient; ``tolerance`` is the part of ``error``, and of
    the ratio's distance from 1, that rounding explains. ``axes`` split the leaf. ``copies_differ`` is True if devices
    that should hold equal values do not; ``differ_along`` are the axes along which they differ.
    """

    path: str
    axes: tuple[str, ...]
    ratio: float
    error: float
    tolerance: float
    copies_differ: bool = False
    differ_along: tuple[str, ...] = ()

    @property
    def is_only_rounding(self) -> bool:
        """Returns whether the correct gradient is 0 up to rounding.

        ``ratio`` is then 1 if the step's gradient is also 0 up to rounding, else infinite.
        """
        return self.tolerance == NO_RATIO

    @property
    def is_equal(self) -> bool:
        return math.hypot(self.ratio - 1, self.error) <= self.tolerance


Gradients = Mapping[str, np.ndarray]


def flat(grads: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the values of each leaf as a float64 vector, by path.

    n complex values become 2 n reals, first the real parts, then the imaginary parts.
    """

    def values(leaf: Any) -> np.ndarray:
        of_leaf = np.asarray(leaf).ravel()
        of_leaf = np.concatenate([np.real(of_leaf), np.imag(of_leaf)]) if np.iscomplexobj(of_leaf) else of_leaf
        return of_leaf.astype(np.float64)

    return {path: values(leaf) for path, leaf in grads.items()}


def compare_leaves(
    got: Gradients,
    expected: Gradients,
    axes: Mapping[str, tuple[str, ...]],
    wire: Mapping[str, float],
    perturbed: Callable[[], Gradients],
    eps: float,
) -> list[LeafCheck]:
    """Returns a ``LeafCheck`` for each leaf of ``expected``, in the same order.

    Args:
      got, expected: the values of the step and of the reference: a vector for each path, see ``flat``.
      axes: the mesh axes that split each leaf, by path; copied to the result.
      wire: norms to add to the tolerance, by path, such as of the rounding by communication in a narrow dtype.
      perturbed: computes ``expected`` from slightly perturbed inputs, a bound for rounding; called only if needed.
      eps: eps of float32, or of float64 if every leaf is float64.
    """
    # A gradient near 0 is a sum of terms that cancel: its rounding error depends on the size of other gradients.
    total = math.sqrt(sum(float(leaf @ leaf) for leaf in expected.values()))
    typical = total / math.sqrt(sum(leaf.size for leaf in expected.values()) or 1)
    norms = {path: float(np.linalg.norm(leaf)) for path, leaf in expected.items()}
    known = {
        path: ORDER_EPS * eps * norms[path] + NEAR_ZERO_EPS * eps * typical * math.sqrt(leaf.size) + wire.get(path, 0.0)
        for path, leaf in expected.items()
    }
    if any(not np.linalg.norm(got[path] - expected[path]) <= known[path] for path in expected):
        # Only if the cheap bound does not explain the difference: this computes the loss once more.
        again = perturbed()
        known = {path: known[path] + SHAKEN * float(np.linalg.norm(again[path] - expected[path])) for path in expected}
    return [
        _compared(path, axes.get(path, ()), got[path], expected[path], norms[path], known[path]) for path in expected
    ]


def _compared(
    path: str, axes: tuple[str, ...], got: np.ndarray, right: np.ndarray, norm: float, allowed: float
) -> LeafCheck:
    """Returns the comparison of a leaf's gradient ``got`` with the correct gradient ``right``, as ratio and rest.

    The ratio is a least-squares fit of ``got`` by ``right``; the rest is a norm, relative to ``norm``, the norm of
    ``right``. If ``norm`` is at most ``allowed``, the correct gradient is only rounding: the rest is then 0, and the
    ratio is 1 if the norm of ``got`` is at most 2 ``allowed``, else infinite.

    Args:
      path, axes: path of the leaf, and the mesh axes that split the leaf.
      allowed: the norm of a difference that rounding explains.
    """
    size = float(np.linalg.norm(got))
    if norm <= allowed:
        return LeafCheck(path, axes, 1.0 if size <= 2 * allowed else math.inf, 0.0, NO_RATIO)
    # A factor (summed, divided) shows in the ratio, an error of direction in the rest.
    ratio = float(got @ right) / norm**2
    left = float(np.linalg.norm(got - ratio * right)) / norm
    return LeafCheck(path, axes, ratio, left, allowed / norm)


def same_number(actual: float, expected: float, perturbed: Callable[[], float], eps: float) -> tuple[bool, float]:
    """Returns (whether the loss ``actual`` equals ``expected`` up to rounding, the tolerance relative to ``expected``).

    Allowed are 64 ``eps`` of ``expected``; if exceeded, in addition 8 times the change of ``perturbed()``, the expected
    loss from slightly perturbed inputs. If ``expected`` is 0, the returned tolerance is 0.
    """
    allowed = ORDER_EPS * eps * abs(expected)
    if not abs(actual - expected) <= allowed:
        allowed += SHAKEN * abs(perturbed() - expected)
    return abs(actual - expected) <= allowed, allowed / abs(expected) if expected else 0.0


def of_wire(params: PyTree, reference: Reference) -> dict[str, float]:
    """Returns, by path, a bound for the rounding error (a norm) of gradients that are sent in a narrow dtype.

    Counted are the dtype of the leaf and the dtype of its reduce-scatter, each only if narrower than 32 bits; the bound
    is 0 without a narrow dtype. A leaf that has no gradient in ``reference`` is left out. Each term of a sum over
    devices, and each partial sum, is rounded by at most half a unit in the last place. A term is assumed to be as large
    as ``reference.sizes``, the absolute gradient averaged over devices. For a mean over replicas in a narrow format,
    the rounding error of this format is added.
    """
    bounds = {}
    for path, box in trees.sharded_leaves(params):
        if path not in reference.sizes:
            continue
        size = np.abs(np.asarray(reference.sizes[path], np.float64)).ravel()
        dtypes = [value_dtype(box.value).name, box.communication.grad_scatter_dtype if box.axes else None]
        wide = wide_dtype(value_dtype(box.value))
        narrow = (float(jnp.finfo(d).eps) for d in dtypes if d and jnp.finfo(d).bits < jnp.finfo(wide).bits)
        bounds[path] = 4 * sum(narrow) * float(np.linalg.norm(size))
        if copies := box.communication.replicas:
            bounds[path] += copies.rounding(size, wide)
    return bounds


class Multiple(NamedTuple):
    """Interpretation of a ratio: as the number of devices along ``axes``, as its inverse, or as no such number."""

    kind: str  # "equal", "summed", "divided", "other"
    times: str = "1 x"
    axes: str = ""
    axis_names: tuple[str, ...] = ()

    @property
    def is_count(self) -> bool:
        """Returns whether the ratio is a number of devices or minibatches above 1, or the inverse of such a number."""
        return self.kind in ("summed", "divided")

    @classmethod
    def of(cls, ratio: float, sizes: dict[str, int], tolerance: float) -> "Multiple":
        """Returns the interpretation of ``ratio``, the value of a step over the correct value.

        "equal" for 1; "summed" for the product of some of ``sizes``; "divided" for the inverse; else "other". ``sizes``
        are the sizes of mesh axes by name, and the number of minibatches as "num_minibatches". ``tolerance`` is
        relative.
        """
        if abs(ratio - 1) <= tolerance:
            return cls("equal")
        subsets = (itertools.combinations(sizes, count) for count in range(1, len(sizes) + 1))
        for axes in itertools.chain.from_iterable(subsets):
            devices = math.prod(sizes[axis] for axis in axes)
            if abs(ratio / devices - 1) <= tolerance:
                return cls("summed", f"{devices} x", format_axes(axes), axes)
            if abs(ratio * devices - 1) <= tolerance:
                return cls("divided", f"1/{devices} x", format_axes(axes), axes)
        rounded = f"{ratio:.3g}"
        return cls("other", f"{ratio:.6g} x" if rounded == "1" else f"{rounded} x")


# ------------------------------------------------------------------------------------------------- means over many keys


class Ratio(NamedTuple):
    """Result over many keys: the mean of a step is ``value`` times the mean of one device, plus ``relative_residual``.

    ``allowed`` is the part of both that noise explains: ``SURE`` standard errors.
    """

    value: float
    relative_residual: float
    allowed: float

    @property
    def is_known(self) -> bool:
        return self.allowed <= NEAREST_RATIO / 2


def ratios(sample: Sample) -> tuple[dict[str, Ratio], int]:
    """Calls ``sample(i)`` for keys i = 1, 2, ... until the ratio of step to reference is known for each leaf.

    ``sample(i)`` returns (values of the step, values of a single device), both as {path: vector}, computed with key i.
    The ratios are computed after 8, 16, ... 256 keys; known is a ratio with a small uncertainty. Returns ({path: ratio
    of the means over keys}, number of keys). After 256 keys the calls end, and some ratios may be unknown.
    """
    actual, expected = defaultdict[str, list[np.ndarray]](list), defaultdict[str, list[np.ndarray]](list)
    by_path: dict[str, Ratio] = {}
    count = 0
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for count in bar.track(range(1, MOST_KEYS + 1), description="check_step, keys"):
            for so_far, new in zip((actual, expected), sample(count), strict=True):
                for path, values in new.items():
                    so_far[path].append(values)
            if count >= FEWEST_KEYS and count & (count - 1) == 0:
                by_path = {path: _ratio(np.array(actual[path]), np.array(expected[path])) for path in expected}
                if all(ratio.is_known for ratio in by_path.values()):
                    break
    return by_path, count


def _ratio(actual: np.ndarray, expected: np.ndarray) -> Ratio:
    """Returns the ratio of the mean of ``actual`` over keys to the mean of ``expected``, with residual and uncertainty.

    Both arrays have the shape [keys, values], for a single leaf. The values of each half of the keys are projected onto
    the mean of ``expected`` over the other half. If ``expected`` is 0 the ratio is 1 or infinite; NaN with an infinite
    uncertainty if noise hides the mean of ``expected``.
    """
    # The noise of the halves is independent. Projected onto itself, a mean would count its noise as signal, and the
    # ratio would be too small.
    half, count = len(expected) // 2, len(expected)
    if not expected.any():
        return Ratio(1.0 if not actual.any() else math.inf, 0.0, 0.0)
    halves = (slice(half), slice(half, None)), (slice(half, None), slice(half))
    along = [
        (actual[this] @ expected[other].mean(0), expected[this] @ expected[other].mean(0)) for this, other in halves
    ]
    a, b = (np.concatenate(parts) for parts in zip(*along, strict=True))
    size = b.mean()  # the squared norm of the mean of one device
    if size <= 0:
        return Ratio(math.nan, 0.0, math.inf)
    value = float(a.mean() / size)
    # The variance of the quotient a / b of two means, to first order.
    error = math.sqrt((a.var(ddof=1) + value**2 * b.var(ddof=1)) / count) / size
    differences = actual - value * expected
    rest = float(differences[:half].mean(0) @ differences[half:].mean(0)) / size
    noise = float(differences.var(0, ddof=1).sum()) / half / size / math.sqrt(min(differences.shape[1], count))
    allowed = max(SURE * error, math.sqrt(SURE * noise) * abs(value), 1e-6)
    return Ratio(value, math.sqrt(max(rest, 0.0)), allowed)
