"""The cells of metric states: values that are merged, in any order and grouping, without losing count.

  Total     sum of floats       pair (high, low): the rounding error of every addition is kept and added to the next
  Count     sum of integers     two 32-bit limbs of one 64-bit integer
  Maximum   largest value
  Minimum   smallest value

``X.identity(shape)`` is the cell of nothing. ``X.of(values, weight)`` is the cell of observed values, reduced over all
dims, or over all but the last ``keep``. ``a.merge(b)`` is the cell of both, and ``a.value`` its value. Cells that
are too large to be gathered from all devices are merged by plain all-reduces: of ``pieces``, arrays to be summed or
maximized, from whose results ``from_pieces`` makes a cell.

Why not a float32: it stops at 2^24 = 16 777 216, where adding 1 changes nothing. An int32 wraps at 2^31, half an hour
of tokens on a larger cluster. Where x64 is on, floats are float64, still in pairs.

Error of a Total: merging is commutative to the bit; each merge is off by at most 3 u^2 (|a| + |b|), u = 2^-24 (Knuth's
two-sum of the high parts, to which the low parts are added: "SloppyDWPlusDW" of Joldes, Muller and Popescu, "Tight and
rigorous error bounds for basic building blocks of double-word arithmetic", 2017). Its value is off by u, the rounding
to float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import ArrayLike, DTypeLike

__all__ = ["Count", "Maximum", "Minimum", "Total"]

Pieces = list[tuple[str, jax.Array]]  # each with the operation of its all-reduce: "sum", "max" or "min"

HALF_LIMB = 16
HALF_LIMB_MASK = 0xFFFF
# Low bits of a significand that are cleared to halve it: 24 = 12 + 12 bits, 53 = 26 + 27 bits.
_LOW_BITS = {np.dtype(np.float32): (jnp.uint32, 12), np.dtype(np.float64): (jnp.uint64, 27)}


def wide_float() -> np.dtype:
    """float32, or float64 where ``jax_enable_x64`` is on."""
    return jax.dtypes.canonicalize_dtype(jnp.float64)


def masked(values: jax.Array, weight: jax.Array, empty: ArrayLike) -> jax.Array:
    """``values`` where the weight is not 0, else ``empty``: padding may hold anything, NaN included."""
    return jnp.where(weight != 0, values, empty)


def like_rows(weight: ArrayLike, values: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """The weight with dims of size 1 appended, so that it broadcasts over the dims that it does not have."""
    weight = jnp.asarray(weight)
    if weight.shape != values.shape[: weight.ndim]:
        raise ValueError(
            f"weight of shape {weight.shape} does not fit values of shape {values.shape}: it has one number for all, "
            f"or the leading dims of the values, such as {values.shape[:1]}."
        )
    return weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))


class Cell(ABC):
    """Arrays of one shape, which are merged entry by entry."""

    @classmethod
    @abstractmethod
    def identity(cls, shape: tuple[int, ...] = ()) -> Self:
        """The cell of nothing: merged with another cell, it gives the other cell."""

    def merged(self, dims: tuple[int, ...]) -> Self:
        """All entries along ``dims`` merged into one, by one ``lax.reduce`` over all arrays of the cell."""
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
    """A sum of floats as the pair high + low, arrays of one shape. Infinities and NaN show in the value.

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
        """The sum of ``values * weight`` over all dims but the last ``keep``; the weight has the leading dims."""
        # A metric may be observed within a loss, but is no part of it: no gradient goes through its merges.
        values = lax.stop_gradient(jnp.asarray(values).astype(wide_float()))
        if weight is not None:
            weight = like_rows(weight, values).astype(values.dtype)
            values = masked(values * weight, weight, 0)
        return cls._plain(values).merged(tuple(range(values.ndim - keep)))

    @classmethod
    def of_halves(cls, weights: jax.Array, add: Callable[[jax.Array], jax.Array]) -> "Total":
        """The sum of weights by ``add``, a plain sum or scatter-add, which gets their upper and their lower halves.

        Much cheaper than ``of`` where each weight goes into one of many sums. Exact for up to 2^12 weights of similar
        size in one sum, and for up to 2^24 weights of 0 or 1.
        """
        # A half has 12 of the 24 bits of a float32, which leaves 12 for carries.
        upper, lower = halves(weights.astype(wide_float()))
        return cls._plain(add(upper)).merge(cls._plain(add(lower)))

    @classmethod
    def _plain(cls, values: jax.Array) -> "Total":
        return cls(values, jnp.zeros_like(values))

    def merge(self, other: "Total") -> "Total":
        # Knuth's two-sum: no branch on which is larger. XLA does not reassociate floats, so it survives compilation.
        high = self.high + other.high
        other_part = high - self.high
        lost = (self.high - (high - other_part)) + (other.high - other_part)  # high + lost is the exact sum
        lost = lost + (self.low + other.low)
        rounded = high + lost
        finite = jnp.isfinite(rounded)  # of an infinite sum, inf - inf would make NaN
        return Total(jnp.where(finite, rounded, high), jnp.where(finite, lost - (rounded - high), 0))

    @property
    def value(self) -> jax.Array:
        return self.high + self.low

    def pieces(self) -> Pieces:
        # A half of 12 bits leaves the sum over 2^12 devices of similar size exact. `low` is 2^-24 of the value at most,
        # so the rounding of its own sum does not show.
        return [("sum", half) for half in halves(self.high)] + [("sum", self.low)]

    def from_pieces(self, pieces: list[jax.Array]) -> "Total":
        upper, lower, low = (self._plain(piece) for piece in pieces)
        return upper.merge(lower).merge(low)


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(upper, lower) with upper + lower = x, each with half of its significant bits, so that many add up exactly."""
    # With low bits cleared, upper has the exponent of x, so x - upper is exact: the bits that were cleared.
    # Of NaN and infinity only x itself is right: cleared bits would turn NaN into inf, and inf - inf is NaN.
    unsigned, bits = _LOW_BITS[np.dtype(x.dtype)]
    integer = lax.bitcast_convert_type(x, unsigned)
    upper = lax.bitcast_convert_type((integer >> bits) << bits, x.dtype)
    upper = jnp.where(jnp.isfinite(x), upper, x)
    return upper, jnp.where(jnp.isfinite(x), x - upper, 0)


@struct.dataclass
class Count(Cell):
    """A sum of integers as the 64-bit integer high * 2^32 + low in two's complement; uint32 arrays of one shape.

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
        """The sum of integers or bools over all dims but the last ``keep``; ``weight`` 0 leaves a row out.

        Raises:
          TypeError: values or weight are floats, which a count of integers would cut off.
        """
        for what, x in (("values", values), ("weight", weight)):
            if x is not None and jnp.issubdtype(dtype := jnp.result_type(x), jnp.inexact):
                raise TypeError(f"a count of integers got {what} of dtype {dtype}; use a sum of floats.")
        cells = cls._split(values)
        if weight is not None:
            cells = cells._times(like_rows(weight, cells.low))
        return cells.merged(tuple(range(cells.low.ndim - keep)))

    @classmethod
    def _split(cls, values: ArrayLike) -> "Count":
        # A Python integer has any size, while JAX would cut it to 32 bits where x64 is off.
        if isinstance(values, int) and not isinstance(values, bool):
            return cls(jnp.uint32((values >> 32) & 0xFFFFFFFF), jnp.uint32(values & 0xFFFFFFFF))
        values = jnp.asarray(values)
        if values.dtype == bool:
            values = values.astype(jnp.uint32)
        if values.dtype.itemsize == 8:
            return cls((values >> 32).astype(jnp.uint32), values.astype(jnp.uint32))
        # Two's complement: the high limb of a negative number has all bits set.
        sign = jnp.where(values < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
        return cls(sign, values.astype(jnp.uint32))

    def _times(self, weight: jax.Array) -> "Count":
        """Rows times an integer weight in 0..65535; a mask is 0 or 1."""
        # A quarter of 16 bits times a weight of 16 bits fits into 32.
        return self.from_pieces([quarter * weight.astype(jnp.uint32) for _, quarter in self.pieces()])

    def merge(self, other: "Count") -> "Count":
        low = self.low + other.low
        # An unsigned sum that has wrapped is smaller than each of its terms.
        carry = (low < self.low).astype(jnp.uint32)
        return Count(self.high + other.high + carry, low)

    @property
    def value(self) -> jax.Array:
        """int64 where x64 is on; else float32, exact up to 2^24 and rounded beyond. See ``exact``."""
        if wide_float() == jnp.float64:
            return (self.high.astype(jnp.int64) << 32) | self.low.astype(jnp.int64)
        # Of a small negative number both limbs are near 2^32: the sign is taken out before they are rounded.
        negative = self.high >> 31 == 1
        size = Count(~self.high, ~self.low).merge(Count._split(1))
        high, low = (jnp.where(negative, a, b) for a, b in ((size.high, self.high), (size.low, self.low)))
        number = high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)
        return jnp.where(negative, -number, number)

    def exact(self) -> np.ndarray:
        """The integers themselves, int64, on the host."""
        high, low = np.asarray(self.high).astype(np.int64), np.asarray(self.low).astype(np.int64)
        return (high << 32) | low

    def pieces(self) -> Pieces:
        # Four quarters of 16 bits, the lowest first: their sums over up to 65 536 devices stay below 2^32.
        limbs = (self.low, self.high)
        return [("sum", half) for limb in limbs for half in (limb & HALF_LIMB_MASK, limb >> HALF_LIMB)]

    def from_pieces(self, pieces: list[jax.Array]) -> "Count":
        carry, digits = jnp.uint32(0), []
        for quarter in pieces:
            # A quarter may have all 32 bits set, so the carry is added to its lower half.
            low = (quarter & HALF_LIMB_MASK) + (carry & HALF_LIMB_MASK)
            digits.append(low & HALF_LIMB_MASK)
            carry = (quarter >> HALF_LIMB) + (carry >> HALF_LIMB) + (low >> HALF_LIMB)
        return Count(digits[2] | digits[3] << HALF_LIMB, digits[0] | digits[1] << HALF_LIMB)


@struct.dataclass
class Maximum(Cell):
    """The largest value in its own dtype; -inf, the dtype's minimum, or False where there was none. NaN stays NaN.

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
        """The extremum over all dims but the last ``keep``; rows with weight 0 are left out."""
        values = jnp.asarray(values)
        neutral = jnp.asarray(cls._neutral(values.dtype), values.dtype)
        if weight is not None:
            values = masked(values, like_rows(weight, values), neutral)
        # `initial` makes an empty batch the identity, where a reduction without it raises.
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
        # All-reduces take numbers: True and False travel as 1 and 0.
        value = self.value.astype(jnp.int32) if self.value.dtype == bool else self.value
        return [(self.operation, value)]

    def from_pieces(self, pieces: list[jax.Array]) -> Self:
        return type(self)(pieces[0].astype(self.value.dtype))


@struct.dataclass
class Minimum(Maximum):
    """The smallest value in its own dtype; +inf, the dtype's maximum, or True where there was none.

    >>> float(Minimum.of(jnp.array([-3.0, 5.0])).value)
    -3.0
    """

    operation = "min"
