"""The sizes of mesh axes, from the number of devices: what fits, what nearly does, and which axes cross slow links.

Pure functions of numbers; ``device_mesh`` asks them and does the rest.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

SHAPES_SHOWN = 3
SHAPES_TRIED = 100_000  # to find the nearest


def filled_sizes(shape: dict[str, int], count: int) -> tuple[int, ...]:
    """The sizes with -1 replaced.

    Raises:
      ValueError: they do not multiply to ``count``; says both, and the nearest shapes that do.
    """
    wild = [name for name, size in shape.items() if size == -1]
    bad = {
        name: size
        for name, size in shape.items()
        if name not in wild and (not isinstance(size, int | np.integer) or size < 1)
    }
    if bad or len(wild) > 1:
        raise ValueError(f"mesh_shape={shape}: a size is a positive integer, and at most one of them -1.")
    known = math.prod(size for size in shape.values() if size != -1)
    if count % known or (not wild and known != count):
        fewer = f"; or pass devices=jax.devices()[:{known}]" if not wild and known < count else ""
        nearest = ", ".join(
            str(dict(zip(shape, sizes, strict=True))) for sizes in _nearest(tuple(shape.values()), count)
        )
        raise ValueError(
            f"mesh_shape={shape} takes {known} devices{' or a multiple' if wild else ''}, but there are {count}. "
            f"Nearest shapes that fit: {nearest}{fewer}; or try it on simulate_cpu_devices({known})."
        )
    return tuple(int(count // known if size == -1 else size) for size in shape.values())


def _nearest(sizes: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """The shapes of ``count`` devices that are closest to ``sizes``, by the factors between them; -1 is any size."""

    def distance(shape):
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
    """The part of each axis that crosses between units: the first axes cross as far as they divide the units."""
    outer = []
    for size in sizes:
        outer.append(math.gcd(size, units))
        units //= outer[-1]
    assert units == 1  # the units divide the product of the sizes, so each of their primes found its place
    return tuple(outer)
