"""The order of a split sequence's tokens on the devices: set once, and read by each layer that mixes tokens.

  contiguous   0 1 2 3 4 5 6 7    two devices: under a causal mask the second has most of the unmasked pairs
  zigzag       0 1 6 7 2 3 4 5    device i of n has chunks i and 2n - 1 - i of 2n, an early and a late chunk

A batch comes in natural order. If a step has another layout, devices exchange chunks at the start of the step
(``in_layout``), and a context stores the layout while the step is traced: ``context_attention``, ``context_positions``
and the recurrences read the context. Data reordered before the step are ``ReorderedTokens`` leaves, not arrays, and
store their layout.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.trees import named_leaf
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS
from xlstm_jax.formatting import format_axes

LAYOUTS = CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"


# --------------------------------------------------------------------------------------------------------- the order


def zigzag_positions(device: Any, devices: int, places: Any) -> Any:
    """Returns the positions in the full sequence of the tokens of one device, or of several, in the zigzag layout.

    The sequence has 2n chunks of t / 2 tokens; device i has chunk i and chunk 2n - 1 - i. The result is [t] for a
    ``device`` of shape [], and [n, t] for [n, 1].

    Args:
      device: index of the device along the axis of the sequence, or an array of indices.
      devices: the number n of devices.
      places: array 0 to t - 1, the indices of the tokens on a device.
    """
    half = len(places) // 2
    is_second = places >= half
    return places + (device + is_second * (2 * devices - 2 - 2 * device)) * half


def zigzag_order(length: int, devices: int) -> np.ndarray:
    """Returns the indices in natural order of a zigzag sequence's tokens, [length], the tokens of device 0 first.

    Device i of n has chunks i and 2n - 1 - i of 2n. For 8 tokens on two devices the order is 0 1 6 7 2 3 4 5, so
    ``tokens[zigzag_order(8, 2)]`` are the tokens in zigzag. On a single device the order is 0, 1, 2, ...

    Raises:
      ValueError: the tokens do not divide into two chunks of equal size for each of several devices.
    """
    if devices == 1:
        return np.arange(length)
    check_even(length, devices)
    return zigzag_positions(np.arange(devices)[:, None], devices, np.arange(length // devices)).ravel()


def check_layout(layout: str | None) -> None:
    """Raises a ``ValueError`` if ``layout`` is not in ``LAYOUTS``; None is allowed."""
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: pass 'contiguous' or 'zigzag', an order of tokens; see in_layout.")


def check_even(length: int, devices: int, named: str = "to_zigzag") -> None:
    """Raises a ``ValueError`` if a sequence does not divide into two chunks of equal size for each of the devices.

    ``length`` counts the tokens of all ``devices``. The error begins with ``named``, the function or the array.
    """
    if length % (2 * devices):
        raise ValueError(
            f"{named}: {length} tokens do not divide into the {2 * devices} chunks of the zigzag layout on {devices} "
            f"devices, two for each. Pad the sequence to {-(-length // (2 * devices)) * 2 * devices} tokens."
        )


# --------------------------------------------------------------------------------------------------- data in a layout


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["layout", "devices", "dim"])
@dataclass(frozen=True, eq=False)
class ReorderedTokens:
    """Array whose tokens were put into a layout before the step, with the layout. In JAX a pytree with a single leaf.

    ``to_zigzag`` makes ``ReorderedTokens`` leaves. A ready step accepts them beside arrays in natural order, without an
    exchange. In a custom ``shard_map``, ``in_layout`` returns the arrays. Data reordered by hand must also be wrapped:

    >>> ReorderedTokens(np.array([[0, 1, 6, 7, 2, 3, 4, 5]]), "zigzag", devices=2).shape
    (1, 8)

    Attributes:
      value: the array, global or of a device.
      layout: "zigzag".
      devices: number of devices along the axis of the sequence.
      dim: the dim of the sequence.
    """

    value: Any
    layout: str
    devices: int
    dim: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.value)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    def _no_array(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"an array of shape {self.shape} in {self.layout} order is used as an array in natural order. Pass it to a "
            "ready step unchanged, or enter in_layout(batch, 'zigzag', 'cp') in a custom shard_map. from_zigzag(...) "
            "restores natural order; .value is the array in this order."
        )

    # Functions of arrays call one of these methods, and would compute with tokens in the wrong order.
    __jax_array__ = __array__ = __getitem__ = __iter__ = _no_array


def in_natural_order(batch: PyTree) -> PyTree:
    """Returns a global batch with its ``ReorderedTokens`` leaves replaced by arrays in natural order.

    Further leaves are unchanged.
    """

    def natural(leaf: Any) -> Any:
        if not isinstance(leaf, ReorderedTokens):
            return leaf
        return reordered(leaf.value, np.argsort(zigzag_order(leaf.shape[leaf.dim], leaf.devices)), leaf.dim)

    return trees.map_leaves(natural, batch, one_leaf=lambda node: isinstance(node, ReorderedTokens))


def reordered(array: Any, order: np.ndarray, dim: int) -> Any:
    """Returns ``array`` with the entries of dim ``dim`` reordered: index i of the result has entry ``order[i]``."""
    return array[(slice(None),) * (dim % np.ndim(array)) + (order,)]


# ----------------------------------------------------------------------------------------------- the layout of the step


@dataclass(frozen=True)
class SequenceLayout:
    """Split of the batch in the step that is being traced, by axes of more than one device.

    Attributes:
      layout: of the tokens, an element of ``LAYOUTS``.
      axes: the axes that split a dim other than the rows, outermost first.
      row_axes: the axes that split rows.
    """

    layout: str
    axes: tuple[str, ...]
    row_axes: tuple[str, ...] = ()


# ``with layout_context(sequence)`` sets the layout of the step for layers traced inside; ``layout_over`` reads it.
# JAX retraces a function if this value changes: the cached trace of an inner `jit` or `scan` has the old layout.
layout_context = jax.make_user_context(default_value=None)


def layout_over(axes: tuple[str, ...], requested: str | None, caller: str) -> str:
    """Returns the layout, "contiguous" or "zigzag", of the tokens on the devices along ``axes``, which are bound.

    Args:
      axes: the axes over which ``caller`` exchanges tokens.
      requested: the layout in the user's call, or the layout that ``caller`` needs; None: the layout of the step.
      caller: the public function, for the errors.
    Raises:
      ValueError: the layout of the step differs from ``requested``; the zigzag layout of the step is over other axes;
        the step splits rows, not a sequence, over the axes; or ``requested`` is "zigzag" outside of step and
        ``in_layout``.
    """
    check_layout(requested)
    axes = collectives.spread_axes(axes)
    # On a single device the sequence is in natural order.
    if not axes:
        return CONTIGUOUS
    current: SequenceLayout | None = layout_context.value
    # No errors in the reference of `check_step`, which need only be right: the trace of the step itself raises.
    if RUNNING_LOSS.get().is_reference:
        return current.layout if current is not None and current.axes == axes else CONTIGUOUS
    over = format_axes(axes)
    if current is None:
        if requested == ZIGZAG:
            raise ValueError(
                f"{caller}: layout='zigzag', and nothing says that the tokens over {over} are laid out so. Make the "
                f"step with make_train_step(..., layout='zigzag'); in a shard_map of your own: with in_layout(batch, "
                f"'zigzag', {over}) as batch."
            )
        return CONTIGUOUS
    if of_rows := [axis for axis in axes if axis in current.row_axes]:
        rest = tuple(axis for axis in current.row_axes if axis not in axes)
        raise ValueError(
            f"{caller} over {over}: the step splits rows of its batch over {format_axes(current.row_axes)}, so devices "
            f"along {of_rows[0]!r} have different examples, not parts of a sequence. Split the sequence there, by "
            f"batch_spec=P({format_axes(rest) if rest else None}, {over}) in place of batch_axes, for tokens [b, t]."
        )
    layout = current.layout if set(axes) & set(current.axes) else CONTIGUOUS
    if requested is not None and requested != layout:
        raise ValueError(
            f"{caller} is {_named(requested, caller)}, and the tokens of this step lie {layout} over {over}. "
            + _cure(requested, caller)
        )
    if layout == ZIGZAG and axes != current.axes:
        raise ValueError(
            f"{caller} over {over}: the tokens of this step are laid out in zigzag over {format_axes(current.axes)}. "
            f"Pass axis={format_axes(current.axes)}, or make the step with layout='contiguous'."
        )
    return layout


def _named(layout: str, caller: str) -> str:
    return f"given layout={layout!r}" if caller.startswith("context") else f"of tokens that lie {layout}"


def _cure(layout: str, caller: str) -> str:
    if not caller.startswith("context"):
        return "Make the step with layout='contiguous', and pass batches in natural order."
    return (
        "Leave layout= out here, and set the layout of the step: make_train_step(..., layout="
        f"{layout!r}), which reorders a batch in natural order."
    )


# ----------------------------------------------------------------------------------------------- a layout within a step


@contextlib.contextmanager
def in_layout(batch: PyTree, layout: str = ZIGZAG, axis: AxisNames = "cp", *, dim: int = 1) -> Iterator[PyTree]:
    """Reorders this device's tokens in a custom ``shard_map``, and sets the layout for layers called in the context.

    Ready steps need no call: ``make_train_step(..., layout="zigzag")``.

    >>> def positions(tokens):  # [b, t], contiguous
    ...     with in_layout(tokens, "zigzag", "fsdp") as tokens:
    ...         return tokens, context_positions(tokens.shape[1], "fsdp")[None]
    >>> split = jax.P(None, "fsdp")  # the mesh has 4 devices along "fsdp"
    >>> tokens, places = jax.shard_map(positions, mesh=mesh, in_specs=split, out_specs=split)(jnp.arange(16)[None])
    >>> tokens[0, :4].tolist(), bool((tokens == places).all())
    ([0, 1, 14, 15], True)

    Args:
      batch: a tree of arrays with an entry for each token of this device; leaves without dim ``dim`` stay unchanged.
        Arrays are contiguous, in natural order. ``ReorderedTokens`` leaves must have this layout, and return as arrays.
      layout: "zigzag" or "contiguous".
      axis: the mesh axis of the sequence, or a tuple of axes, outermost first.
      dim: the dim of the sequence.
    Yields:
      The batch in this layout; for zigzag on several devices after two exchanges, of half a device's tokens each, for
      each dtype.
    Raises:
      ValueError: an unknown layout; other axes are bound, but not ``axis``; a ``ReorderedTokens`` leaf with another
        layout or for another number of devices; tokens that do not divide into two chunks on each device; or leaves
        with different numbers of tokens.
    """
    check_layout(layout)
    axes = collectives.bound_or_none(as_axis_names(axis), caller="in_layout")
    devices = collectives.axis_size(axes)
    leaves, treedef = trees.flatten_with_path(batch, one_leaf=ReorderedTokens)
    places: list[int | None] = []
    lengths: dict[str, int] = {}
    for path, leaf in leaves:
        has_tokens = -np.ndim(leaf) <= dim < np.ndim(leaf)
        if isinstance(leaf, ReorderedTokens):
            check_reordered(named_leaf("batch", path), leaf, layout, devices, format_axes(axes) if axes else "no axis")
        elif has_tokens:
            lengths[path] = leaf.shape[dim]
        places.append(dim if has_tokens and not isinstance(leaf, ReorderedTokens) else None)
    for path, length in lengths.items():
        if length != (of_first := next(iter(lengths.values()))):
            raise ValueError(
                f"in_layout: {named_leaf('batch', path)} has {length} entries along dim {dim}, and "
                f"'{next(iter(lengths))}' {of_first} tokens. Pass only arrays with an entry for each token."
            )
        if layout == ZIGZAG and devices > 1:
            check_even(length * devices, devices, f"in_layout: {named_leaf('batch', path)}")
    values = [leaf.value if isinstance(leaf, ReorderedTokens) else leaf for _, leaf in leaves]
    spread = collectives.spread_axes(axes)
    if layout == ZIGZAG:
        values = exchanged(values, places, spread)
    with layout_context(SequenceLayout(layout, spread)):
        yield jax.tree.unflatten(treedef, values)


def check_reordered(name: str, leaf: ReorderedTokens, layout: str, devices: int, axes: str) -> None:
    """Raises a ``ValueError`` if ``leaf``, tokens that were reordered before the step, does not fit the step.

    The leaf fits if it was reordered for ``layout`` and for ``devices``, the number of devices over which its dim of
    tokens is split. On a single device a leaf that was reordered for a single device fits any layout. ``name`` and
    ``axes`` (as text) are for the error.
    """
    if leaf.devices == devices == 1:
        return
    if devices == 1:
        raise ValueError(
            f"{name} of shape {leaf.shape} is laid out in {leaf.layout} for {leaf.devices} devices, and its dim "
            f"{leaf.dim} is not split ({axes}). Split the sequence, as by batch_spec=P('fsdp', 'cp'), or pass "
            f"natural order: from_zigzag(batch, {leaf.devices})."
        )
    if leaf.devices != devices:
        raise ValueError(
            f"{name} of shape {leaf.shape} is laid out in {leaf.layout} for {leaf.devices} devices, and {devices} "
            f"split its dim {leaf.dim} ({axes}). Pass it in natural order, or use to_zigzag(batch, {devices})."
        )
    if leaf.layout != layout:
        raise ValueError(
            f"{name} of shape {leaf.shape} is laid out in {leaf.layout}, and the layout here is layout={layout!r}. "
            f"Pass layout={leaf.layout!r}, or natural order: from_zigzag(batch, {leaf.devices})."
        )


def exchanged(values: Sequence[Any], dims: Sequence[int | None], axes: tuple[str, ...]) -> list[Any]:
    """Exchanges this device's contiguous tokens for its zigzag tokens; returns ``values`` with the new tokens.

    ``dims`` has the token dim of each value; a value with dim None is unchanged, and so are all values on a single
    device along ``axes``, the axes of the sequence.

    Before, a device has chunks 2 i and 2 i + 1 of the sequence. Each chunk is sent to its device in the zigzag layout,
    with an exchange for the even chunks and an exchange for the odd chunks of all values of a dtype.
    """
    chosen = [at for at, dim in enumerate(dims) if dim is not None]
    n = collectives.axis_size(axes)
    if n == 1 or not chosen:
        return list(values)
    chosen_dims = [dim for dim in dims if dim is not None]
    moved = [jnp.moveaxis(values[at], dim, 0) for at, dim in zip(chosen, chosen_dims, strict=True)]
    halves = [x.reshape(2, x.shape[0] // 2, *x.shape[1:]) for x in moved]
    arrived = []
    for which in range(2):
        chunks = [2 * device + which for device in range(n)]
        targets = [(device, min(chunk, 2 * n - 1 - chunk)) for device, chunk in enumerate(chunks)]
        arrived.append(collectives.permute([x[which] for x in halves], axes, targets))
    # Chunk d of device d is even on even devices; the second chunk, 2 n - 1 - d, is then odd.
    is_even = collectives.axis_index(axes) % 2 == 0
    out = list(values)
    for at, dim, even, odd in zip(chosen, chosen_dims, *arrived, strict=True):
        first, second = jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)
        out[at] = jnp.moveaxis(jnp.concatenate([first, second]), 0, dim)
    return out
