"""Cells of metric states: accumulators that merge in any order and grouping without losing counts.

  Total     sum of floats       pair (high, low): the rounding error of every addition is kept and added to the next
  Count     sum of integers     two 32-bit limbs of one 64-bit integer
  Maximum   largest value
  Minimum   smallest value

``X.identity(shape)`` is the neutral cell. ``X.of(values, weight)`` reduces observed values to a cell, over every dim
except the last ``keep`` dims. ``a.merge(b)`` combines two cells, and ``a.value`` is the accumulated value. A cell too
large to gather from every device is merged by plain all-reduces: ``pieces`` splits the cell into arrays to be summed
or maximized, and ``from_pieces`` builds a cell from the reduced arrays.

A float32 sum stops at 2^24 = 16 777 216, where adding 1 changes nothing. An int32 wraps at 2^31: half an hour of
tokens on a larger cluster. With ``jax_enable_x64`` floats are float64, also in pairs.

Error of a ``Total``: merging is commutative to the bit. Each merge is off by at most 3 u^2 (|a| + |b|), u = 2^-24: the
high parts are added by Knuth's two-sum and the low parts are added to its error ("SloppyDWPlusDW" of Joldes, Muller
and Popescu, "Tight and rigorous error bounds for basic building blocks of double-word arithmetic", 2017). The relative
error of the value is u, from rounding to float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import ArrayLike, DTypeLike

__all__ = ["Count", "Maximum", "Minimum", "Total"]

Pieces = list[tuple[str, jax.Array]]  # (operation of the all-reduce: "sum", "max" or "min"; array)

HALF_LIMB = 16
HALF_LIMB_MASK = 0xFFFF
# Number of low significand bits to clear for the upper half: 24 = 12 + 12 bits, 53 = 26 + 27 bits.
_LOW_BITS = {np.dtype(np.float32): (jnp.uint32, 12), np.dtype(np.float64): (jnp.uint64, 27)}


def wide_float() -> np.dtype:
    """Returns the dtype in which metrics accumulate floats: float32, or float64 with ``jax_enable_x64``."""
    return jax.dtypes.canonicalize_dtype(jnp.float64)


def loses_parts(given: DTypeLike, dtype: DTypeLike) -> bool:
    """Returns whether a cast from ``given`` to ``dtype`` drops fractions (to integers or bools) or imaginary parts."""
    kinds = jnp.complexfloating, jnp.inexact
    return any(jnp.issubdtype(given, kind) and not jnp.issubdtype(dtype, kind) for kind in kinds)


def as_wide_floats(values: ArrayLike) -> jax.Array:
    """Returns ``values`` as an array of floats in which metrics accumulate (``wide_float``), without a gradient.

    Raises a ``TypeError`` for complex values, whose imaginary parts a cast would drop.
    """
    values = jnp.asarray(values)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        raise TypeError(
            f"a metric of real numbers got an array of dtype {values.dtype}, shape {values.shape}: its imaginary parts "
            "would be lost. Pass jnp.abs(x), x.real or x.imag."
        )
    # A metric may be observed inside a loss function; no gradient may flow through its merges.
    return lax.stop_gradient(values.astype(wide_float()))


def masked(values: jax.Array, weight: jax.Array, empty: ArrayLike) -> jax.Array:
    """Returns ``values`` with ``empty`` where ``weight`` is 0, because padding may contain anything, NaN included.

    ``weight`` broadcasts with ``values``. Values of another weight are unchanged, not multiplied.
    """
    return jnp.where(weight != 0, values, empty)


def like_rows(weight: ArrayLike, values: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Returns ``weight`` with dims of size 1 appended, so that it broadcasts over the trailing dims of ``values``.

    For values [b, t, d] a weight [b] becomes [b, 1, 1], and a scalar becomes [1, 1, 1].

    Raises:
      ValueError: the shape of ``weight`` is not a prefix of the shape of ``values``.
    """
    weight = jnp.asarray(weight)
    if weight.shape != values.shape[: weight.ndim]:
        raise ValueError(
            f"weight of shape {weight.shape} does not fit values of shape {values.shape}: it has one number for all, "
            f"or the leading dims of the values, such as {values.shape[:1]}."
        )
    return weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))


class Cell(ABC):
    """Base class of accumulators (cells): arrays of equal shape, such as the sums per class, merged entry by entry."""

    @classmethod
    @abstractmethod
    def identity(cls, shape: tuple[int, ...] = ()) -> Self:
        """Returns the neutral cell, whose arrays have this shape: ``identity(shape).merge(cell)`` is ``cell``."""

    def merged(self, dims: tuple[int, ...]) -> Self:
        """Returns the cell with the entries along ``dims`` of its arrays merged, without these dims; ``self`` for ().

        The merge (sum, maximum or minimum) is a single ``lax.reduce`` over the arrays of the cell.
        """
        if not dims:
            return self
        # XLA reduces in any order, and `merge` allows it: commutative to the bit, associative up to rounding.
        leaves, structure = jax.tree.flatten(self)

        def merge(a: list[jax.Array], b: list[jax.Array]) -> tuple[jax.Array, ...]:
            both = jax.tree.unflatten(structure, a).merge(jax.tree.unflatten(structure, b))
            return tuple(jax.tree.leaves(both))

        return jax.tree.unflatten(structure, lax.reduce(leaves, jax.tree.leaves(self._nothing()), merge, dims))

    def _nothing(self) -> Self:
        return self.identity()


@struct.dataclass
class Total(Cell):
    """Sum of floats as the pair high + low of equal shape. Infinities and NaN propagate to the value.

    >>> total = Total.of(2.0**24)
    >>> float(total.merge(Total.of(1.0)).merge(Total.of(1.0)).value)  # a float32 would stay at 16777216
    16777218.0
    """

    high: jax.Array
    low: jax.Array

    @classmethod
    def identity(cls, shape: tuple[int, ...] = ()) -> "Total":
        return cls(jnp.zeros(shape, wide_float()), jnp.zeros(shape, wide_float()))

    @classmethod
    def of(cls, values: ArrayLike, weight: ArrayLike | None = None, *, keep: int = 0) -> "Total":
        """Returns the sum of ``values * weight`` over every dim except the last ``keep``, as a pair (high, low).

        Sums are in float32 (float64 with x64), without a gradient. ``weight`` has the leading dims of ``values``, or is
        a scalar; None: 1. A value of weight 0 is ignored, NaN included.

        Raises:
          ValueError: the shape of ``weight`` is not a prefix of the shape of ``values``.
          TypeError: values or weights are complex, and a cast to floats would drop their imaginary parts.
        """
        values = as_wide_floats(values)
        if weight is not None:
            weight = as_wide_floats(like_rows(weight, values))
            values = masked(values * weight, weight, 0)
        return cls._plain(values).merged(tuple(range(values.ndim - keep)))

    @classmethod
    def of_halves(cls, weights: jax.Array, add: Callable[[jax.Array], jax.Array]) -> "Total":
        """Returns the sums ``add(weights)`` as a ``Total``; ``add`` is a plain sum, or a scatter-add, of its argument.

        ``add`` is called for the upper and for the lower half of the significand of each weight (``halves``), and both
        results are merged to pairs (high, low). Much cheaper than ``of`` for a histogram, where each weight is added to
        a single bin of many. Exact for up to 2^12 weights of similar size per sum, and for up to 2^24 weights of 0 or
        1.
        """
        # A half has 12 of the 24 bits of a float32; the other 12 bits are free for carries.
        upper, lower = halves(weights.astype(wide_float()))
        return cls._plain(add(upper)).merge(cls._plain(add(lower)))

    @classmethod
    def _plain(cls, values: jax.Array) -> "Total":
        return cls(values, jnp.zeros_like(values))

    def merge(self, other: "Total") -> "Total":
        # Knuth's two-sum needs no branch on the larger term. XLA does not reassociate floats, so it stays intact.
        high = self.high + other.high
        other_part = high - self.high
        lost = (self.high - (high - other_part)) + (other.high - other_part)  # high + lost is the exact sum
        lost = lost + (self.low + other.low)
        rounded = high + lost
        finite = jnp.isfinite(rounded)  # in an infinite sum, inf - inf would be NaN
        return Total(jnp.where(finite, rounded, high), jnp.where(finite, lost - (rounded - high), 0))

    @property
    def value(self) -> jax.Array:
        return self.high + self.low

    def pieces(self) -> Pieces:
        # Halves of 12 bits sum exactly over 2^12 devices with values of similar size. `low` is at most 2^-24 of the
        # value, so the rounding of the summed `low` is negligible.
        return [("sum", half) for half in halves(self.high)] + [("sum", self.low)]

    def from_pieces(self, pieces: list[jax.Array]) -> "Total":
        upper, lower, low = (self._plain(piece) for piece in pieces)
        return upper.merge(lower).merge(low)


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits x into (upper, lower), x = upper + lower, with half of the significand each, for exact sums of many x.

    Both have the shape and dtype of x. An inf or a NaN stays in ``upper``, with 0 in ``lower``.
    """
    # `upper` keeps the exponent of x, so x - upper is exact: the value of the cleared bits.
    # NaN and infinity stay in `upper` unchanged: clearing bits would turn NaN into inf, and inf - inf is NaN.
    unsigned, bits = _LOW_BITS[np.dtype(x.dtype)]
    integer = lax.bitcast_convert_type(x, unsigned)
    upper = lax.bitcast_convert_type((integer >> bits) << bits, x.dtype)
    upper = jnp.where(jnp.isfinite(x), upper, x)
    return upper, jnp.where(jnp.isfinite(x), x - upper, 0)


@struct.dataclass
class Count(Cell):
    """Sum of integers as the 64-bit integer high * 2^32 + low in two's complement; uint32 arrays of equal shape.

    >>> int(Count.of(2**31 - 1).merge(Count.of(1)).exact())  # an int32 would wrap
    2147483648
    """

    high: jax.Array
    low: jax.Array

    @classmethod
    def identity(cls, shape: tuple[int, ...] = ()) -> "Count":
        return cls(jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32))

    @classmethod
    def of(cls, values: ArrayLike, weight: ArrayLike | None = None, *, keep: int = 0) -> "Count":
        """Sums integers or bools, times ``weight``, over every dim except the last ``keep``: returns a ``Count``.

        Args:
          values: integers or bools of any shape.
          weight: integers in 0..65535, a scalar or with the leading dims of ``values``; 0 excludes a row. None: 1.
          keep: the number of last dims that the result keeps.
        Raises:
          TypeError: values or weights are floats, which a count of integers would truncate.
          ValueError: the shape of ``weight`` is not a prefix of the shape of ``values``.
        """
        for argument, x in (("values", values), ("weight", weight)):
            if x is not None and jnp.issubdtype(dtype := jnp.result_type(x), jnp.inexact):
                raise TypeError(f"a count of integers got {argument} of dtype {dtype}; use a sum of floats.")
        cells = cls._split(values)
        if weight is not None:
            cells = cells._times(like_rows(weight, cells.low))
        return cells.merged(tuple(range(cells.low.ndim - keep)))

    @classmethod
    def _split(cls, values: ArrayLike) -> "Count":
        """Returns the integers ``values`` as a ``Count`` of equal shape, each as a 64-bit integer; nothing is summed.

        ``high`` has the upper and ``low`` the lower 32 bits of each integer, in two's complement. A bool counts as 0 or
        1.
        """
        # A Python integer has arbitrary size; without x64 JAX would truncate it to 32 bits.
        if isinstance(values, int) and not isinstance(values, bool):
            return cls(jnp.uint32((values >> 32) & 0xFFFFFFFF), jnp.uint32(values & 0xFFFFFFFF))
        # So would a NumPy array or number of 64 bits, without an error.
        if isinstance(values, np.ndarray | np.integer) and values.dtype.kind in "iu" and values.dtype.itemsize == 8:
            wide: np.ndarray[Any, np.dtype[Any]] = np.asarray(values)
            high, low = ((half & 0xFFFFFFFF).astype(np.uint32) for half in (wide >> 32, wide))
            return cls(jnp.asarray(high), jnp.asarray(low))
        values = jnp.asarray(values)
        if values.dtype == bool:
            values = values.astype(jnp.uint32)
        if values.dtype.itemsize == 8:
            return cls((values >> 32).astype(jnp.uint32), values.astype(jnp.uint32))
        # Two's complement: the high limb of a negative number has all bits set.
        sign = jnp.where(values < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
        return cls(sign, values.astype(jnp.uint32))

    def _times(self, weight: jax.Array) -> "Count":
        """Returns a ``Count`` with each integer times ``weight``, integers in 0..65535 that broadcast to the cell."""
        # A quarter of 16 bits times a weight of 16 bits fits into 32 bits.
        return self.from_pieces([quarter * weight.astype(jnp.uint32) for _, quarter in self.pieces()])

    def merge(self, other: "Count") -> "Count":
        low = self.low + other.low
        # A wrapped unsigned sum is smaller than either term.
        carry = (low < self.low).astype(jnp.uint32)
        return Count(self.high + other.high + carry, low)

    @property
    def value(self) -> jax.Array:
        """Returns the sums in the shape of the cell: int64 with x64, otherwise float32, rounded above 2^24.

        For exact sums see ``exact``.
        """
        if wide_float() == jnp.float64:
            return (self.high.astype(jnp.int64) << 32) | self.low.astype(jnp.int64)
        # Both limbs of a small negative number are near 2^32, so the sign is removed before rounding to float32.
        negative = self.high >> 31 == 1
        size = Count(~self.high, ~self.low).merge(Count._split(1))
        high, low = (jnp.where(negative, a, b) for a, b in ((size.high, self.high), (size.low, self.low)))
        number = high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)
        return jnp.where(negative, -number, number)

    def exact(self) -> np.ndarray:
        """Returns the exact integers as a NumPy int64 array in the shape of the cell; not for use under ``jit``."""
        high, low = np.asarray(self.high).astype(np.int64), np.asarray(self.low).astype(np.int64)
        return (high << 32) | low

    def pieces(self) -> Pieces:
        # Four quarters of 16 bits, lowest first: the sum of a quarter over up to 65 536 devices stays below 2^32.
        limbs = (self.low, self.high)
        return [("sum", half) for limb in limbs for half in (limb & HALF_LIMB_MASK, limb >> HALF_LIMB)]

    def from_pieces(self, pieces: list[jax.Array]) -> "Count":
        carry, digits = jnp.uint32(0), []
        for quarter in pieces:
            # A summed quarter may use all 32 bits, so the carry is added to its lower half.
            low = (quarter & HALF_LIMB_MASK) + (carry & HALF_LIMB_MASK)
            digits.append(low & HALF_LIMB_MASK)
            carry = (quarter >> HALF_LIMB) + (carry >> HALF_LIMB) + (low >> HALF_LIMB)
        return Count(digits[2] | digits[3] << HALF_LIMB, digits[0] | digits[1] << HALF_LIMB)


@struct.dataclass
class Maximum(Cell):
    """Largest value, in the dtype of the values. NaN stays NaN.

    Before any value is observed: -inf, the minimum of an integer dtype, or False.

    >>> float(Maximum.of(jnp.array([-3.0, 5.0]), weight=jnp.array([1, 0])).value)
    -3.0
    """

    value: jax.Array

    operation = "max"

    @classmethod
    def identity(cls, shape: tuple[int, ...] = (), dtype: DTypeLike | None = None) -> Self:
        return cls(jnp.full(shape, cls._neutral(dtype or wide_float()), dtype or wide_float()))

    @classmethod
    def of(cls, values: ArrayLike, weight: ArrayLike | None = None, *, keep: int = 0) -> Self:
        """Returns a cell with the largest (``Minimum``: smallest) value over every dim except the last ``keep``.

        ``weight`` has the leading dims of ``values``, or is a scalar; another shape raises a ``ValueError``. Values of
        weight 0 are left out; None: every value counts. Without any value the result is the neutral cell, such as -inf.
        """
        values = jnp.asarray(values)
        neutral = jnp.asarray(cls._neutral(values.dtype), values.dtype)
        if weight is not None:
            values = masked(values, like_rows(weight, values), neutral)
        # With `initial` an empty batch gives the identity; without it the reduction raises.
        reduce = jnp.max if cls.operation == "max" else jnp.min
        return cls(reduce(values, axis=tuple(range(values.ndim - keep)), initial=neutral))

    def _nothing(self) -> Self:
        return self.identity(dtype=self.value.dtype)

    @classmethod
    def _neutral(cls, dtype: DTypeLike) -> float:
        largest = cls.operation == "min"
        if jnp.issubdtype(dtype, jnp.floating):
            return jnp.inf if largest else -jnp.inf
        if jnp.issubdtype(dtype, jnp.bool_):
            return largest
        return jnp.iinfo(dtype).max if largest else jnp.iinfo(dtype).min

    def merge(self, other: Self) -> Self:
        merge = jnp.maximum if self.operation == "max" else jnp.minimum
        return type(self)(merge(self.value, other.value.astype(self.value.dtype)))

    def pieces(self) -> Pieces:
        # All-reduces take numbers: bools are sent as 1 and 0.
        value = self.value.astype(jnp.int32) if self.value.dtype == bool else self.value
        return [(self.operation, value)]

    def from_pieces(self, pieces: list[jax.Array]) -> Self:
        return type(self)(pieces[0].astype(self.value.dtype))


@struct.dataclass
class Minimum(Maximum):
    """Smallest value, in the dtype of the values. NaN stays NaN.

    Before any value is observed: +inf, the maximum of an integer dtype, or True.

    >>> float(Minimum.of(jnp.array([-3.0, 5.0])).value)
    -3.0
    """

    operation = "min"
