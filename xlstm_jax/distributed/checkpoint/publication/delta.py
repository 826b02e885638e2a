"""Entries of a tensor that differ from the previous version, stored as tensors of a safetensors file.

  before    1.0  2.0  3.0  4.0  5.0  6.0
  after     1.0  2.5  3.0  4.0  5.0  6.5

  gaps:W    1, 3         number of unchanged entries before each changed entry, as integers of 8, 16 or 32 bits
  values:W  2.5, 6.5     the bits of the changed entries, as unsigned integers

A step changes few entries of weights in bfloat16, and the changed entries are scattered: if 2 % of the entries change,
three of four blocks of 64 entries contain a changed entry. So entries are stored singly and not in blocks. A gap that
is too large for the integers is split: some unchanged entries in the gap are stored like changed entries. A tensor
whose delta would be larger than the tensor is stored in full, as ``tensor:W``.

Bits are compared, not values: 0.0 and -0.0 differ, and a NaN equals itself.
"""

from collections.abc import Mapping

import numpy as np

GAPS, VALUES, WHOLE = "gaps:", "values:", "tensor:"
_GAP_BYTES = (1, 2, 4)


def encoded(name: str, before: np.ndarray | None, after: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors of a delta from ``before`` to ``after``, by name in the file; {} if all bits are equal.

    ``gaps:<name>`` has the number of unchanged entries before each changed entry, ``values:<name>`` the bits of the
    changed entries as unsigned integers. If ``after`` has no more bytes than both together, or if ``before`` is None,
    the result is ``{"tensor:<name>": after}``.

    Args:
      name: name of the tensor.
      before: the tensor of the previous version, with the shape and dtype of ``after``; None if the previous version
        has no tensor with this name, shape and dtype.
      after: the tensor of the new version.

    >>> encoded("w", np.zeros(100), np.eye(1, 100, 7)[0])["gaps:w"].tolist()
    [7]
    """
    if before is None:
        return {WHOLE + name: after}
    old, new = _bits(before), _bits(after)
    differs = old != new
    count = int(np.count_nonzero(differs))
    if not count:
        return {}
    # Each changed entry needs at least one byte for its gap. Checked before the positions are computed, because the
    # positions of many entries would need much memory.
    if count * (1 + new.itemsize) >= new.nbytes:
        return {WHOLE + name: after}
    gaps = np.diff(np.flatnonzero(differs), prepend=-1) - 1
    sizes = {width: (count + int(np.sum(gaps >> (8 * width)))) * (width + new.itemsize) for width in _GAP_BYTES}
    width = min(sizes, key=lambda width: sizes[width])
    if sizes[width] >= new.nbytes:
        return {WHOLE + name: after}
    stored = _split(gaps, width)
    return {GAPS + name: stored, VALUES + name: new[_positions(stored)]}


def applied(name: str, delta: Mapping[str, np.ndarray], before: np.ndarray | None) -> np.ndarray | None:
    """Returns the tensor ``name`` of the new version: ``before`` with the entries that a delta changes.

    The result is a new array; or ``before`` itself if the delta does not change the tensor; or None if the delta does
    not fit ``before``. A delta that has the full tensor needs no ``before``.

    Args:
      name: name of the tensor.
      delta: the tensors of the delta by name in the file, as ``gaps:<name>``, see ``encoded``.
      before: the tensor of the previous version; None if the previous version has no tensor ``name``.
    """
    if WHOLE + name in delta:
        return np.array(delta[WHOLE + name])
    if GAPS + name not in delta:
        return before
    gaps, values = delta[GAPS + name], delta.get(VALUES + name)
    if before is None or values is None or values.shape != gaps.shape:
        return None
    after = np.array(before, order="C")  # the flat view below must be of the same memory
    bits = _bits(after)
    positions = _positions(gaps)
    if values.dtype != bits.dtype or (gaps.size and positions[-1] >= bits.size):
        return None
    bits[positions] = values
    return after


def _bits(array: np.ndarray) -> np.ndarray:
    """Returns a flat view of the entries of an array as unsigned integers of the same width."""
    return array.reshape(-1).view(f"uint{8 * array.dtype.itemsize}")


def _split(gaps: np.ndarray, width: int) -> np.ndarray:
    """Returns ``gaps`` (numbers of unchanged entries) as unsigned integers of ``width`` bytes; larger gaps are split.

    With 1 byte a gap of 600 becomes 255, 255, 88: each 255 ends at an unchanged entry that is stored like a changed
    entry.
    """
    reach = 1 << (8 * width)  # number of entries from one of these unchanged entries to the next
    extra = gaps // reach
    stored = np.full(gaps.size + int(extra.sum()), reach - 1, f"uint{8 * width}")
    stored[np.cumsum(extra + 1) - 1] = gaps % reach
    return stored


def _positions(gaps: np.ndarray) -> np.ndarray:
    return np.cumsum(gaps.astype(np.int64) + 1) - 1
