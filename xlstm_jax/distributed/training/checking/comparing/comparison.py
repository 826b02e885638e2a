"""Gradients beside those that they should be, leaf by leaf, and how far rounding may have moved them.

A leaf is as it should be where the norm of the difference is below the sum of

  64 eps(float32)       of its own norm: sums in another order. (eps(float64) for such leaves.)
  4 eps(float32)        of what a leaf of its size has on average: one whose gradient is 0 but for rounding
  8 x what shaking does the reference again, all parameters and inputs times 1 + u eps, u in (-1, 1), eps that of the
                        narrowest dtype that it computes in: measured where the first two do not suffice
  the wire              what the dtype of a reduce-scatter, or the format of copies' sums, may round

Whatever is beyond it is no rounding. What it is, the ratio tells: a number of devices, or none.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.wire.communication import value_dtype, wide_dtype
from xlstm_jax.distributed.data_parallel.wire.quantized import BLOCK_SIZE, FORMATS
from xlstm_jax.distributed.training.checking.comparing.one_device import Found
from xlstm_jax.wording import format_axes

ORDER_EPS, NEAR_ZERO_EPS, SHAKEN = 64, 4, 8
NO_RATIO = 1e-9  # the tolerance of a leaf that is no more than rounding
PACKED_TWICE = 2  # terms, and their mean


class LeafCheck(NamedTuple):
    """One leaf of the parameters: what the step made of it is ``ratio`` times the right value, to ``error``.

    ``axes`` are those that split it, ``error`` the norm of what is left over, relative to what is right, and
    ``tolerance`` what rounding explains of that, and of the ratio's distance from 1. ``copies_differ``: devices that
    should hold the same hold different values.
    """

    path: str
    axes: tuple[str, ...]
    ratio: float
    error: float
    tolerance: float
    copies_differ: bool = False

    @property
    def is_only_rounding(self) -> bool:
        """Whether what is right is itself no more than rounding, so that there is no ratio."""
        return self.tolerance == NO_RATIO

    @property
    def is_equal(self) -> bool:
        return math.hypot(self.ratio - 1, self.error) <= self.tolerance


Gradients = Mapping[str, np.ndarray]


def flat(grads: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All values of each leaf in float64, complex ones as pairs."""

    def values(leaf: Any) -> np.ndarray:
        of_leaf = np.asarray(leaf).ravel()
        of_leaf = np.concatenate([np.real(of_leaf), np.imag(of_leaf)]) if np.iscomplexobj(of_leaf) else of_leaf
        return of_leaf.astype(np.float64)

    return {path: values(leaf) for path, leaf in grads.items()}


def compare_leaves(
    got: Gradients,
    right: Gradients,
    axes: Mapping[str, tuple[str, ...]],
    wire: Mapping[str, float],
    shaken: Callable[[], Gradients],
    eps: float,
) -> list[LeafCheck]:
    """One ``LeafCheck`` for each leaf of ``right``.

    ``wire`` is what the communication of a leaf may round, as a norm; ``shaken`` what ``right`` is after a shake, asked
    for where it matters; ``eps`` that of float32, or of float64 where all is.
    """
    total = math.sqrt(sum(float(leaf @ leaf) for leaf in right.values()))
    typical = total / math.sqrt(sum(leaf.size for leaf in right.values()) or 1)
    norms = {path: float(np.linalg.norm(leaf)) for path, leaf in right.items()}
    known = {
        path: ORDER_EPS * eps * norms[path] + NEAR_ZERO_EPS * eps * typical * math.sqrt(leaf.size) + wire.get(path, 0.0)
        for path, leaf in right.items()
    }
    if any(not np.linalg.norm(got[path] - right[path]) <= known[path] for path in right):
        again = shaken()
        known = {path: known[path] + SHAKEN * float(np.linalg.norm(again[path] - right[path])) for path in right}
    return [_compared(path, axes.get(path, ()), got[path], right[path], norms[path], known[path]) for path in right]


def _compared(
    path: str, axes: tuple[str, ...], got: np.ndarray, right: np.ndarray, norm: float, allowed: float
) -> LeafCheck:
    """By least squares. Ratio 1 and error 0 where what is right is itself no more than rounding, and so is ``got``."""
    size = float(np.linalg.norm(got))
    if norm <= allowed:
        return LeafCheck(path, axes, 1.0 if size <= 2 * allowed else math.inf, 0.0, NO_RATIO)
    ratio = float(got @ right) / norm**2
    left = float(np.linalg.norm(got - ratio * right)) / norm
    return LeafCheck(path, axes, ratio, left, allowed / norm)


def same_number(got: float, right: float, shaken: Callable[[], float], eps: float) -> tuple[bool, float]:
    """Whether a loss is the right one to rounding, and how far rounding may have moved it, relatively."""
    allowed = ORDER_EPS * eps * abs(right)
    if not abs(got - right) <= allowed:
        allowed += SHAKEN * abs(shaken() - right)
    return abs(got - right) <= allowed, allowed / abs(right) if right else 0.0


def of_wire(params: PyTree, found: Found) -> dict[str, float]:
    """For each leaf whose gradient travels narrowly, the norm of what that may round: at most half a last place for
    each term and each sum of N, of terms as large as those of the devices are on average; in blocks, half the distance
    of two codes for the terms and for their mean."""
    bounds = {}
    for path, leaf in trees.leaves_with_path(params):
        if path not in found.sizes:
            continue
        how, size = leaf_of(leaf).communication, np.abs(np.asarray(found.sizes[path], np.float64)).ravel()
        bound = _rounding(value_dtype(leaf_of(leaf).value).name, leaf) * float(np.linalg.norm(size))
        if how.grad_scatter_dtype and leaf_of(leaf).axes:
            bound += _rounding(how.grad_scatter_dtype, leaf) * float(np.linalg.norm(size))
        narrow = how.replicas.reduce_dtype if how.replicas else None
        if narrow in FORMATS:
            blocks = np.pad(size, (0, -size.size % BLOCK_SIZE)).reshape(-1, BLOCK_SIZE)
            largest = blocks.max(-1, keepdims=True)
            # Errors are spread evenly up to half a distance. A device's term may be larger than the mean of all.
            half = FORMATS[str(narrow)].error_bound(blocks, 2 * largest)
            bound += PACKED_TWICE / math.sqrt(3) * float(np.linalg.norm(half))
        elif narrow:
            bound += _rounding(str(narrow), leaf) * float(np.linalg.norm(size))
        if bound:
            bounds[path] = bound
    return bounds


def _rounding(dtype: str, leaf: Any) -> float:
    if jnp.finfo(dtype).bits >= jnp.finfo(wide_dtype(value_dtype(leaf_of(leaf).value))).bits:
        return 0.0
    return float(jnp.finfo(dtype).eps) * 4


class Multiple(NamedTuple):
    """A ratio read as a number of devices, those along ``axes``, or as 1 over it."""

    kind: str  # "equal", "summed", "divided", "other"
    times: str = "1 x"
    axes: str = ""

    @classmethod
    def of(cls, ratio: float, sizes: dict[str, int], tolerance: float) -> "Multiple":
        """``sizes`` are those of the axes, and of whatever else splits a batch (``num_minibatches``)."""
        if abs(ratio - 1) <= tolerance:
            return cls("equal")
        for axes in _subsets(sizes):
            devices = math.prod(sizes[axis] for axis in axes)
            if abs(ratio / devices - 1) <= tolerance:
                return cls("summed", f"{devices} x", format_axes(axes))
            if abs(ratio * devices - 1) <= tolerance:
                return cls("divided", f"1/{devices} x", format_axes(axes))
        return cls("other", f"{ratio:.3g} x")


def _subsets(sizes: dict[str, int]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(sizes, n + 1) for n in range(len(sizes)))
