"""Within which transformations of JAX and Flax this code runs: read off the stack, as no trace tells.

All that is asked here is asked while a model is traced, never in a step.
"""

import functools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from flax.core import lift

# Functions of JAX, with the files that they are in.
BRANCHES = {
    "cond": "conditionals.py",
    "_cond": "conditionals.py",
    "switch": "conditionals.py",
    "_switch": "conditionals.py",
    "while_loop": "loops.py",
}


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def inside_branch() -> bool:
    """Whether this code is traced as a branch of ``lax.cond`` or ``lax.switch``, or within ``lax.while_loop``."""
    found = ((frame.f_code.co_filename, BRANCHES.get(frame.f_code.co_name)) for frame in _frames())
    return any(file is not None and path.endswith(file) for path, file in found)


def inside_map_variables(ours: Any) -> bool:
    """Whether this code runs within an ``nn.map_variables`` that maps by another function than ``ours``.

    ``nn.WeightNorm`` and ``nn.SpectralNorm`` are made of it.
    """
    for frame in _frames():
        if frame.f_code.co_filename == lift.__file__ and "map_in_fn" in frame.f_code.co_freevars:
            mapped = frame.f_locals["map_in_fn"]
            if not (isinstance(mapped, functools.partial) and mapped.func is ours):
                return True
    return False
