"""Converts names of mesh axes between the forms that users write, tuples, and entries of a box's ``names``."""

from collections.abc import Sequence

import jax

from xlstm_jax.common_types import AxisNames

AxisEntry = None | str | tuple[str, ...]


def size_if_bound(axis: str) -> int:
    """Returns the number of devices along a bound axis (inside ``shard_map``, say); 1 for an unbound axis."""
    try:
        return jax.lax.axis_size(axis)
    except NameError:  # JAX's error of an axis that is not bound
        return 1


def as_axis_names(axis_name: AxisNames) -> tuple[str, ...]:
    """Returns an axis, or a sequence of axes, as a tuple of axes; a string is the name of a single axis.

    Raises:
      ValueError: no axis, a repeated axis, a non-string entry, or a set (sets have no order).
    """
    if isinstance(axis_name, set | frozenset):
        raise ValueError(f"axis_name={axis_name!r}: a set has no order, and axes do; pass a tuple, outermost first.")
    # A value of another type becomes a name, so that the check below raises and shows the value.
    names = (axis_name,) if isinstance(axis_name, str) or not isinstance(axis_name, Sequence) else tuple(axis_name)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"axis_name={axis_name!r} names no mesh axis; pass one, as 'fsdp', or several, as ('dp', 'fsdp')."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name={axis_name!r} names an axis twice; name each mesh axis once.")
    return names


def entry_axes(entry: AxisEntry) -> tuple[str, ...]:
    """Returns the axes of an entry of ``names``: ``None`` -> (), ``"a"`` -> ("a",), ``("a", "b")`` -> unchanged."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_entry(axes: tuple[str, ...]) -> AxisEntry:
    """Returns the shortest entry for these axes: the inverse of ``entry_axes``."""
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else axes
