"""Gather of a dim over some of the axes that split the dim, as of a leaf that is also split by the model itself.

On a 2x4 mesh with the axes "tp" and "fsdp", device (i, j) holds part 4 i + j of a dim that is split over both. A gather
over "fsdp" leaves half i of the dim. A gather over "tp" leaves parts j and 4 + j, which are not adjacent.
"""

from collections.abc import Collection

from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry, axes_entry


def partial_stages(
    split_axes: tuple[str, ...], axes: Collection[str]
) -> tuple[list[tuple[str, ...]], tuple[str, ...], AxisEntry]:
    """Returns the gathers by which a dim split over ``split_axes`` becomes split over the axes not in ``axes`` alone.

    ``split_axes`` are outermost first; one or more are in ``axes``. Returns (stages, kept, entry):
      stages: the axes of each gather, in the order of the gathers. Axes of a stage that are not in ``axes`` are
        gathered as well, because they lie inside a gathered axis.
      kept: the axes that are gathered although they are not in ``axes``. After the stages this device's part along
        these axes is to be cut out.
      entry: the entry of a ``PartitionSpec`` (None, a name or a tuple) with the axes that split the dim in the end.
    """
    first = next(i for i, axis in enumerate(split_axes) if axis in axes)
    outer, inner = split_axes[:first], split_axes[first:]
    kept = tuple(axis for axis in inner if axis not in axes)
    return [(axis,) for axis in reversed(inner)] if kept else [inner], kept, axes_entry(outer + kept)


def rounded_twice_error(
    path: str, gather_dtype: str | None, split_axes: tuple[str, ...], axes: Collection[str], kept: tuple[str, ...]
) -> ValueError:
    """Returns the ``ValueError`` for a leaf in a format that rounds values again in each stage of ``partial_stages``.

    ``path`` is the path of the leaf, or "". ``kept`` are the axes that stay split inside a gathered axis.
    """
    return ValueError(
        f"gather_dtype={gather_dtype}: {f'{path!r}' if path else 'a parameter'} is split over {split_axes}, and "
        f"gathered over {sorted(axes)}: {kept} stays split inside a gathered axis, so values would be rounded more "
        "than once. Put the axes that stay split first, or pass a floating dtype."
    )
