"""The sizes of mesh axes for a number of devices: what fits, what nearly fits, and which axes cross slow links."""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

SHAPES_SHOWN = 3
SHAPES_TRIED = 100_000  # to find the nearest


def is_size(size: Any) -> bool:
    """Whether it is a positive integer, which a bool is not."""
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and int(size) >= 1


def filled_sizes(shape: dict[str, int], count: int) -> tuple[int, ...]:
    """The sizes with -1 replaced, for ``count`` devices or, without a -1, for the first of them.

    Raises:
      ValueError: there are fewer devices, or -1 has no size that takes all; names the nearest shapes that fit.
    """
    wild = [name for name, size in shape.items() if size == -1]
    if len(wild) > 1 or not all(is_size(size) or size == -1 for size in shape.values()):
        raise ValueError(f"mesh_shape={shape}: a size is a positive integer, and at most one of them -1.")
    known = math.prod(size for size in shape.values() if size != -1)
    if known > count or (wild and count % known):
        nearest = ", ".join(str(dict(zip(shape, sizes, strict=True))) for sizes in _nearest(shape.values(), count))
        raise ValueError(
            f"mesh_shape={shape} takes {known} devices{' or a multiple' if wild else ''}, but there are {count}. "
            f"Nearest shapes that fit: {nearest}; or try it on simulate_cpu_devices({known})."
        )
    return tuple(int(count // known if size == -1 else size) for size in shape.values())


def _nearest(sizes: Collection[int], count: int) -> list[tuple[int, ...]]:
    """The shapes of ``count`` devices that are closest to ``sizes``, by the factors between them; -1 is any size."""

    def distance(shape: tuple[int, ...]) -> float:
        return sum(abs(math.log(new / old)) for new, old in zip(shape, sizes, strict=True) if old != -1)

    return sorted(itertools.islice(_factorizations(count, len(sizes)), SHAPES_TRIED), key=distance)[:SHAPES_SHOWN]


def _factorizations(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``count`` as a product of ``parts`` factors, in order."""
    if parts == 1:
        yield (count,)
        return
    for first in (divisor for divisor in range(1, count + 1) if count % divisor == 0):
        for rest in _factorizations(count // first, parts - 1):
            yield (first, *rest)


def crossing_sizes(sizes: Sequence[int], units: int) -> tuple[int, ...]:
    """The factor of each size by which the axis crosses units; the first axes cross as far as they can."""
    outer = []
    for size in sizes:
        outer.append(math.gcd(size, units))
        units //= outer[-1]
    assert units == 1  # the units divide the product of the sizes, so each prime of the units divides a size
    return tuple(outer)
