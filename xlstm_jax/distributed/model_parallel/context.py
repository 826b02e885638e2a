"""Exact attention over a sequence that is split over devices, inside ``shard_map``.

Each of n devices along the axis "cp" has t of n * t tokens, and computes the attention of its queries. Three ways to
get the keys K[b, t, g, d] (g heads) and values:

  gather    K[b, t, g, d] -- all-gather -->  K[b, n t, g, d]     all keys on each device; any kernel that takes a mask
  ulysses   K[b, t, g, d] -- all-to-all -->  K[b, n t, g / n, d] all tokens of some heads; any kernel, n divides heads
  ring      K[b, t, g, d] -- n - 1 permutes, each overlapped with the products of the keys that arrived before;
                             the softmax is merged in float32

JAX differentiates gather and ulysses: the transpose of an all-gather is a reduce-scatter, and the transpose of an
all-to-all is an all-to-all. The ring has a custom backward rule. The rule stores query, key, value, segment ids,
result, and a single number for each query. In backward it sends keys, values and segment ids around the ring a second
time, with the gradients of keys and values.

Under a causal mask in the contiguous layout, the first device has almost no work and the last device the most. In the
zigzag layout (``sequence_layout``) all devices have equal work.
"""

import math
import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names, common_dtype, promoting
from xlstm_jax.distributed.model_parallel.sequence_layout import (
    CONTIGUOUS,
    ZIGZAG,
    check_even,
    layout_over,
    zigzag_order,
    zigzag_positions,
)
from xlstm_jax.program_names import UNBALANCED_SCOPE

Array = jax.Array
Kernel = Callable[..., Array]

BLOCK_SIZE = 512
HIDDEN = -1e30  # a logit hidden by the mask; finite, so that a difference of two is not NaN


@dataclass(frozen=True)
class _Options:
    """Options of a call of ``context_attention``; ``axes`` is () if no mesh axis is bound."""

    axes: tuple[str, ...]
    layout: str
    causal: bool
    window: tuple[int, int] | None
    scale: float
    block_size: int

    @property
    def devices(self) -> int:
        return collectives.axis_size(self.axes)

    @property
    def is_unbalanced(self) -> bool:
        """True for causal attention in the contiguous layout, on several devices and without a window; else False.

        In a ring the last device then has more work than the devices before, which wait for the last.
        """
        return self.causal and self.layout == CONTIGUOUS and self.window is None and self.devices > 1

    def positions(self, length: int) -> np.ndarray:
        """Returns the positions in the full sequence of each device's tokens, int [n, t]: row i for device i of n.

        ``length`` is t, the number of tokens on a device. The order is that of the layout, contiguous or zigzag.
        """
        total = self.devices * length
        order = zigzag_order(total, self.devices) if self.layout == ZIGZAG else np.arange(total)
        return order.reshape(-1, length)


# -------------------------------------------------------------------------------------- positions of a device's tokens


@promoting
def context_positions(length: int, axis: AxisNames = "cp", layout: str | None = None) -> Array:
    """Returns the positions of this device's tokens in the full sequence, for rotary or learned embeddings.

    >>> def positions(tokens):  # [b, t]; the mesh has 4 devices along "fsdp"
    ...     with in_layout(tokens, "zigzag", "fsdp"):  # in a ready step: make_train_step(..., layout="zigzag")
    ...         return context_positions(tokens.shape[1], "fsdp")
    >>> over_devices = jax.shard_map(positions, mesh=mesh, in_specs=jax.P(None, "fsdp"), out_specs=jax.P("fsdp"))
    >>> over_devices(jnp.zeros((1, 16))).reshape(4, 4)[0].tolist()
    [0, 1, 14, 15]

    If no mesh axis is bound, as in ``init``, the device has the full sequence: 0 to ``length`` - 1.

    Args:
      length: number of tokens on this device.
      axis, layout: as for ``context_attention``.
    Returns:
      int32 [length].
    Raises:
      ValueError: for the axis and the layout, as ``context_attention``; or ``length`` is odd in the zigzag layout.
    """
    axes = collectives.bound_or_none(as_axis_names(axis), caller="context_positions")
    layout = layout_over(axes, layout, "context_positions")
    if layout == ZIGZAG:
        check_even(length * collectives.axis_size(axes), collectives.axis_size(axes), "context_positions")
    return _local_positions(_Options(axes, layout, True, None, 1.0, BLOCK_SIZE), length)


def _local_positions(options: _Options, length: int, back: int = 0) -> Array:
    """Returns the positions in the full sequence of this device's ``length`` tokens, int32 [length].

    The layout is that of ``options``. With ``back`` the positions are those of the tokens of another device, ``back``
    places before this device in the ring.
    """
    device, places = (
        (collectives.axis_index(options.axes) - back) % options.devices,
        jnp.arange(length, dtype=jnp.int32),
    )
    return (
        device * length + places if options.layout == CONTIGUOUS else zigzag_positions(device, options.devices, places)
    )


# ------------------------------------------------------------------------------------------------------ the attention


@promoting
def context_attention(
    query: Array,
    key: Array,
    value: Array,
    axis: AxisNames = "cp",
    *,
    causal: bool = True,
    impl: str = "gather",
    layout: str | None = None,
    window: int | tuple[int, int] | None = None,
    segment_ids: Array | None = None,
    scale: float | None = None,
    kernel: Kernel | None = None,
    block_size: int = BLOCK_SIZE,
) -> Array:
    """Computes attention over a sequence split over devices; values and gradients are the same as on one device.

    Call the function inside ``shard_map``, in either ``check_vma`` mode. If no mesh axis is bound, as in ``init``, the
    arguments are the full sequence in natural order, and the function is plain attention.

    >>> def attend(x):  # [b, t, heads, d], this device's tokens
    ...     return context_attention(x, x, x, "fsdp", impl="ring")
    >>> x = jax.random.normal(jax.random.key(0), (2, 16, 4, 8))
    >>> split = jax.P(None, "fsdp")
    >>> over_devices = jax.shard_map(attend, mesh=mesh, in_specs=split, out_specs=split)
    >>> bool(jnp.allclose(over_devices(x), jax.nn.dot_product_attention(x, x, x, is_causal=True), atol=1e-6))
    True

    Args:
      query: [b, t, h, d], this device's t tokens of n * t.
      key, value: [b, t, g, d], g divides h (grouped queries). In the ring, d of the value may differ from d of the key.
      axis: the mesh axis of the sequence, or a tuple of axes, outermost first.
      causal: each token attends to itself and to earlier tokens.
      impl: "gather": each device gathers the keys and values of all devices, and without a custom kernel also computes
        all logits of its queries at once. "ulysses": an all-to-all exchanges tokens for heads; sends the fewest bytes.
        The number n of devices must divide h, and key heads are copied if n does not divide g. "ring": keys and values
        are sent around a ring, so that no array in memory has more than t tokens.
      layout: None: the layout of the step, set by ``make_train_step(..., layout="zigzag")`` or ``in_layout``. Otherwise
        the layout must equal the step's. In zigzag the ring does half of the work; gather also computes masked logits,
        and gains nothing.
      window: number of visible tokens (to the left, to the right) in addition to the token itself, or an int for both
        sides; None: no limit.
      segment_ids: integers [b, t] of this device's tokens; a token attends to tokens of the same segment only. None: a
        single segment.
      scale: factor of the logits; None: 1 / sqrt(d).
      kernel: ``kernel(query, key, value, mask=, is_causal=, local_window_size=, scale=)``, for gather and ulysses, with
        the protocol of ``jax.nn.dot_product_attention`` (the default): ``mask`` is bool [b or 1, 1, queries, keys], or
        None. Ulysses passes ``is_causal`` and ``local_window_size``, and a mask for segments only. Gather passes
        causality, window and segments together in the mask.
      block_size: number of queries and keys in a block of the ring; rounded to the nearest size that divides t (in the
        zigzag layout t / 2).
    Returns:
      [b, t, h, d of the value], in the dtype of the query.
    Raises:
      ValueError: further axes are bound, but not this axis; shapes, heads or tokens do not fit; an option is invalid;
        the layout of the step differs from ``layout``; or the step splits rows, not a sequence, over the axis.
    """
    axes = collectives.bound_or_none(as_axis_names(axis), caller="context_attention")
    window_sides = (int(window), int(window)) if isinstance(window, int | np.integer) else window
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    options = _Options(axes, layout_over(axes, layout, "context_attention"), causal, window_sides, scale, block_size)
    _check(query, key, value, segment_ids, options, impl, kernel)
    # Cast here, outside of the ring's custom rule: the cotangents then vary over the same axes as the inputs.
    over = frozenset(collectives.spread_axes(axes)).union(*map(collectives.varying_axes, (query, key, value)))
    query, key, value, segment_ids = collectives.to_varying((query, key, value, segment_ids), sorted(over))
    if impl == "ring":
        with jax.named_scope(UNBALANCED_SCOPE) if options.is_unbalanced else nullcontext():
            return _ring(query, key, value, segment_ids, options)
    attention_impl = _by_gather if impl == "gather" else _by_ulysses
    return attention_impl(query, key, value, segment_ids, options, kernel or jax.nn.dot_product_attention).astype(
        query.dtype
    )


def _by_gather(
    query: Array, key: Array, value: Array, segments: Array | None, options: _Options, kernel: Kernel
) -> Array:
    length = query.shape[1]
    key, value = (collectives.all_gather(x, 1, options.axes) for x in (key, value))
    all_segments = None if segments is None else collectives.all_gather(segments, 1, options.axes)
    places = _local_positions(options, length), jnp.asarray(options.positions(length).ravel(), jnp.int32)
    # The mask contains all conditions, because the options of a kernel assume keys and queries of equal positions.
    mask = _visible(options, *places, segments, all_segments)
    return kernel(query, key, value, mask=mask, is_causal=False, local_window_size=None, scale=options.scale)


def _by_ulysses(
    query: Array, key: Array, value: Array, segments: Array | None, options: _Options, kernel: Kernel
) -> Array:
    """Returns attention [b, t, h, e] of this device's tokens, computed by ``kernel`` on all tokens of h / n heads.

    An all-to-all of query, key and value gives each device all tokens of some heads, in natural order; an all-to-all of
    the result returns to this device's tokens of all heads. Key heads are copied until n devices divide their number.
    The arguments are as in ``context_attention``; ``segments`` are the segment ids of this device's tokens, or None.
    """
    n, length, groups = options.devices, query.shape[1], query.shape[2] // key.shape[2]
    # The fewest copies of each key head for which all devices get the same number, along with the matching query heads.
    copies = next(c for c in range(1, groups + 1) if groups % c == 0 and key.shape[2] * c % n == 0)
    # Natural order, which the causal mask and the window of the kernel assume.
    order = options.positions(length).ravel()
    natural = np.argsort(order)

    def whole_sequence(x: Array) -> Array:  # [b, t, h, d] -> [b, n t, h / n, d]
        pieces = jnp.moveaxis(x.reshape(*x.shape[:2], n, -1, x.shape[3]), 2, 0)
        parts = jnp.moveaxis(collectives.all_to_all(pieces, options.axes), 0, 1)
        return _in_order(parts.reshape(x.shape[0], n * length, -1, x.shape[3]), natural)

    def local_tokens(x: Array) -> Array:  # the inverse of whole_sequence
        parts = _in_order(x, order).reshape(x.shape[0], n, length, *x.shape[2:])
        pieces = collectives.all_to_all(jnp.moveaxis(parts, 1, 0), options.axes)
        return jnp.moveaxis(pieces, 0, 2).reshape(x.shape[0], length, -1, x.shape[3])

    query, key, value = map(whole_sequence, (query, *(jnp.repeat(x, copies, axis=2) for x in (key, value))))
    mask = None
    if segments is not None:
        segments = _in_order(collectives.all_gather(segments, 1, options.axes), natural)
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    kernel_options = {
        "mask": mask,
        "is_causal": options.causal,
        "local_window_size": options.window,
        "scale": options.scale,
    }
    return local_tokens(kernel(query, key, value, **kernel_options))


def _in_order(values: Array, order: np.ndarray) -> Array:
    """Returns ``values[:, order]``; for the order 0, 1, 2, ... returns ``values`` without a copy."""
    return values if (np.diff(order) == 1).all() else values[:, order]


def _visible(
    options: _Options, of_queries: Array, of_keys: Array, query_segments: Array | None, key_segments: Array | None
) -> Array | None:
    """Returns the mask, bool [b or 1, 1, queries, keys], True where a query sees a key; None if nothing is masked.

    ``of_queries`` [queries] and ``of_keys`` [keys] are positions in the full sequence. Causality and window compare
    positions. Segment ids [b, queries] and [b, keys] must be equal; None: all tokens are of one segment.
    """
    ahead = of_keys[None, None, None, :] - of_queries[None, None, :, None]
    conditions = [ahead <= 0] if options.causal else []
    if options.window:
        left, right = options.window
        conditions += [ahead >= -left, ahead <= right]
    if query_segments is not None and key_segments is not None:
        conditions.append(query_segments[:, None, :, None] == key_segments[:, None, None, :])
    return reduce(operator.and_, conditions) if conditions else None


def _any_visible(options: _Options, of_queries: Array, of_keys: Array) -> Array:
    """Returns a bool [], False if no query of a block may attend to any key of a block, by their positions.

    ``of_queries`` and ``of_keys`` are the positions of the blocks. Causality and window count, segments do not. A True
    may be wrong, as the blocks' least and greatest positions alone are compared; a False is never wrong.
    """
    # Uses the ends of the blocks alone: a masked block costs four comparisons, and no product.
    nearest, farthest = of_keys.min() - of_queries.max(), of_keys.max() - of_queries.min()
    left, right = options.window or (math.inf, math.inf)
    right = min(right, 0) if options.causal else right
    return (nearest <= right) & (farthest >= -left)


# ----------------------------------------------------------------------------------------------------------- the ring

# Shapes in blocks: queries [nq, b, g, r, c, d], where r query heads share a key head; keys and values [nk, b, g, c, d];
# positions [nq, c], segment ids [nq, b, c]. ``of_queries`` is (positions, segment ids) of the queries, in blocks.


@promoting
def _ring(query: Array, key: Array, value: Array, segments: Array | None, options: _Options) -> Array:
    return _ring_fwd(query, key, value, segments, options)[0]


@promoting
def _ring_fwd(
    query: Array, key: Array, value: Array, segments: Array | None, options: _Options
) -> tuple[Array, PyTree]:
    """Forward rule of ``_ring``: computes attention while keys and values go around the ring.

    The arguments are this device's tokens: query [b, t, h, d], key [b, t, g, d], value [b, t, g, e], and segment ids
    [b, t] or None. Returns the result [b, t, h, e] for this device's tokens, in the dtype of the query, and the
    residuals: query, key, value, segment ids, result, and for each query the logsumexp of its logits (in blocks).
    """
    blocks, of_queries, arrived = _in_blocks(query, key, value, segments, options)
    wide = common_dtype(query.dtype, jnp.float32)
    # All three start as zeros derived from the queries, to vary over the same devices: a scan keeps its carry's type.
    zeros = jnp.zeros_like(blocks[..., 0], wide)
    state = zeros + HIDDEN, zeros, jnp.zeros((*zeros.shape, value.shape[-1]), wide) + zeros[..., None]
    for step in range(steps := _steps(options, query.shape[1])):
        # Sent before the products, which do not use the keys that arrive: the compiler may overlap both.
        coming = collectives.shift(arrived, options.axes) if step < steps - 1 else arrived
        state = _merge(options, state, blocks, of_queries, arrived, _positions_in_blocks(options, query, step))
        arrived = coming
    largest, total, out = state
    normalizer = largest + jnp.log(total)
    out = _from_blocks(out / total[..., None]).astype(query.dtype)
    return out, (query, key, value, segments, out, normalizer)


@promoting
def _ring_bwd(options: _Options, residuals: PyTree, d_out: Array) -> tuple[Array, Array, Array, None]:
    """Backward rule of ``_ring``: returns the gradients of query, key and value, and None for the segment ids.

    ``d_out`` is the gradient of the result, and ``residuals`` are as ``_ring_fwd`` returns them. The gradients have the
    shapes and dtypes of query, key and value. Keys, values and their gradients go around the ring; logits are
    recomputed, and the logsumexp in the residuals makes them a softmax.
    """
    query, key, value, segments, out, normalizer = residuals
    blocks, of_queries, arrived = _in_blocks(query, key, value, segments, options)
    wide = normalizer.dtype
    d_out_blocks = _query_blocks(d_out, key.shape[2], options)
    # The softmax gradient subtracts sum_keys p (dO V^T), which equals the sum of O * dO over the features, so it needs
    # no key.
    correction = (_query_blocks(out, key.shape[2], options).astype(wide) * d_out_blocks.astype(wide)).sum(-1)
    of_result = d_out_blocks, normalizer, correction
    d_query, *d_arrived = (jnp.zeros_like(x, wide) for x in (blocks, *arrived[:2]))
    for step in range(steps := _steps(options, query.shape[1])):
        coming = collectives.shift(arrived, options.axes) if step < steps - 1 else arrived
        places = _positions_in_blocks(options, query, step)
        # The gradients of the current keys arrive while the new terms are computed.
        before = collectives.shift(d_arrived, options.axes) if step else d_arrived
        d_query, terms = _merge_gradients(options, d_query, blocks, of_queries, of_result, arrived, places)
        d_arrived = jax.tree.map(jnp.add, before, list(terms))
        arrived = coming
    # The gradients are ``steps`` - 1 places away from the device of their keys; a single permute returns them.
    d_key, d_value = collectives.shift(d_arrived, options.axes, 1 - steps)
    shapes = zip((d_query, d_key[:, :, :, None], d_value[:, :, :, None]), (query, key, value), strict=True)
    return *(_from_blocks(x).astype(like.dtype) for x, like in shapes), None  # type: ignore[return-value]


# A custom rule, since JAX would keep the logits of all blocks of all steps for the backward pass.
_ring = jax.custom_vjp(_ring, nondiff_argnums=(4,))
_ring.defvjp(_ring_fwd, _ring_bwd)


def _steps(options: _Options, length: int) -> int:
    """Returns the number of ring steps: the number of devices, this device included, whose keys a device needs.

    With a causal window in the contiguous layout these are this device and as many devices before as the window reaches
    back; otherwise all n devices. ``length`` is the number of tokens on a device.
    """
    # In zigzag, tokens before a device's second chunk are also on devices after this device.
    if options.causal and options.window and options.layout == CONTIGUOUS:
        return min(options.devices, 1 + math.ceil(options.window[0] / length))
    return options.devices


def _block_length(options: _Options, length: int) -> int:
    """Returns the number of tokens in a block: the divisor of ``length`` nearest to the option ``block_size``.

    Nearest is by ratio. ``length`` is the number of tokens on a device. In zigzag the result divides half of
    ``length``, as the halves of a device are not adjacent.
    """
    length = length // 2 if options.layout == ZIGZAG else length
    # A divisor, so that no block needs padding and a mask for the padding.
    divisors = [size for size in range(1, length + 1) if length % size == 0]
    return min(divisors, key=lambda size: abs(math.log(size / options.block_size)))


def _in_blocks(
    query: Array, key: Array, value: Array, segments: Array | None, options: _Options
) -> tuple[Array, Any, Any]:
    """Cuts this device's query, key, value and segment ids into blocks of tokens for ``_ring``.

    Returns (queries, (positions of the queries, segment ids), (keys, values, segment ids)). With n blocks of c tokens
    and g groups of r heads, queries are [n, b, g, r, c, d], keys and values [n, b, g, c, d], positions [n, c] and
    segment ids [n, b, c]; segment ids remain None if ``segments`` is None.
    """
    length = query.shape[1]
    if segments is not None:
        segments = jnp.moveaxis(segments.reshape(len(segments), -1, _block_length(options, length)), 1, 0)
    keys, values = (_query_blocks(x, x.shape[2], options)[:, :, :, 0] for x in (key, value))
    of_queries = _positions_in_blocks(options, query, 0), segments
    return _query_blocks(query, key.shape[2], options), of_queries, (keys, values, segments)


def _positions_in_blocks(options: _Options, query: Array, step: int) -> Array:
    """Returns the positions, in the full sequence, of the keys that a device has in step ``step`` of the ring.

    int32 [blocks, tokens of a block]: attention is computed block by block. In step 0 a device has the keys of its
    local tokens, in step i the keys of the device i places before in the ring. ``query`` [b, t, h, d] gives the number
    of local tokens. An optimization barrier on ``query`` and positions keeps XLA from computing positions and masks
    ahead of the step.
    """
    # Masks depend on positions alone. In a loop over layers, JAX would compute the masks of all blocks ahead of the
    # loop, as masks need no activation, and keep them: as much memory as all logits.
    length = query.shape[1]
    positions, _ = lax.optimization_barrier((_local_positions(options, length, step), query[:1, :1, :1, :1]))
    return positions.reshape(-1, _block_length(options, length))


def _query_blocks(x: Array, groups: int, options: _Options) -> Array:
    """Splits t tokens into n blocks of c, and h heads into ``groups`` of r: [b, t, h, d] -> [n, b, groups, r, c, d]."""
    batch, length, heads, size = x.shape
    blocks = x.reshape(batch, -1, _block_length(options, length), groups, heads // groups, size)
    return jnp.transpose(blocks, (1, 0, 3, 4, 2, 5))


def _from_blocks(x: Array) -> Array:
    """Joins n blocks of c tokens to t tokens, g groups of r heads to h heads: [n, b, g, r, c, d] -> [b, t, h, d]."""
    count, batch, groups, shared, length, size = x.shape
    return jnp.transpose(x, (1, 0, 4, 2, 3, 5)).reshape(batch, count * length, groups * shared, size)


def _merge(options: _Options, state: PyTree, queries: Array, of_queries: Any, arrived: Any, places: Array) -> PyTree:
    """Adds the keys and values that a device has in a ring step to the softmax of its queries; returns the new state.

    The state of the running softmax is, for each query, (largest logit, sum of exponentials, sum of weighted values),
    in blocks. Pairs of blocks with only masked logits are skipped.

    Args:
      options: the options of the attention.
      state: the state before.
      queries: the queries, in blocks.
      of_queries: (positions, segment ids) of the queries, in blocks.
      arrived: (keys, values, segment ids) that the device has in this step, in blocks.
      places: the positions of these keys, in blocks.
    """
    keys, values, key_segments = arrived

    def of_one_block(_: None, block: Any) -> tuple[None, PyTree]:
        state, query, (position, segment) = block

        def add(state: PyTree, block: Any) -> tuple[PyTree, None]:
            key, value, key_position, key_segment = block
            attend = partial(_attend, options, query, key, value, (position, key_position, segment, key_segment))
            return lax.cond(_any_visible(options, position, key_position), attend, lambda state: state, state), None

        return None, lax.scan(add, state, (keys, values, places, key_segments))[0]

    return lax.scan(of_one_block, None, (state, queries, of_queries))[1]


def _attend(options: _Options, query: Array, key: Array, value: Array, places: Any, state: PyTree) -> PyTree:
    """Adds a block of keys and values to the running softmax of a block of queries; returns the new state.

    The state is, for each query, (largest logit, sum of exponentials, sum of weighted values), with exponentials
    relative to the largest logit. ``places`` is (query positions, key positions, query segment ids, key segment ids).
    """
    largest, total, out = state
    logits, mask = _logits(options, query, key, places)
    # Scale old and new terms to the larger of the two exponents, so that neither overflows.
    new = jnp.maximum(largest, logits.max(-1))
    weights = jnp.exp(logits - new[..., None])
    if mask is not None:  # while a query has met masked keys only, these exponentials are 1
        weights = jnp.where(mask, weights, 0)
    shrink = jnp.exp(largest - new)
    more = _product("bgrqk,bgkd->bgrqd", weights.astype(value.dtype), value)
    return new, total * shrink + weights.sum(-1), out * shrink[..., None] + more


def _logits(options: _Options, query: Array, key: Array, places: Any) -> tuple[Array, Array | None]:
    """Returns (logits [b, g, r, queries, keys], mask [b or 1, 1, 1, queries, keys]) of a block of queries and of keys.

    The bool mask is True where a query sees a key; elsewhere logits are ``HIDDEN``. The mask is None if neither options
    nor segment ids mask anything. ``places`` is (query positions, key positions, query segment ids, key segment ids).
    """
    mask = _visible(options, *places)
    mask = None if mask is None else mask[:, None]
    logits = _product("bgrqd,bgkd->bgrqk", query, key) * options.scale
    return (logits if mask is None else jnp.where(mask, logits, HIDDEN)), mask


def _merge_gradients(
    options: _Options, d_query: Array, queries: Array, of_queries: Any, of_result: Any, arrived: Any, places: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Adds the terms of the keys that a device has in a ring step to ``d_query``, the gradient of its queries.

    Returns (new gradient of the queries, (gradient of these keys, gradient of these values)), all in blocks; the latter
    two have the terms of this device's queries alone. Pairs of blocks with only masked logits are skipped.

    Args:
      options: the options of the attention.
      d_query: the gradient of the queries before.
      queries: the queries, in blocks.
      of_queries: (positions, segment ids) of the queries, in blocks.
      of_result: for each query (gradient dO of the result O, logsumexp of the logits, sum of O * dO over features).
      arrived: (keys, values, segment ids) that the device has in this step, in blocks.
      places: the positions of these keys, in blocks.
    """
    keys, values, key_segments = arrived

    def of_one_block(d_keys: PyTree, block: Any) -> tuple[PyTree, Array]:
        d_query, query, (position, segment), result = block

        def add(d_query: Array, block: Any) -> tuple[Array, PyTree]:
            key, value, key_position, key_segment, d_key = block
            terms = partial(_terms, options, query, key, value, (position, key_position, segment, key_segment), result)
            seen = _any_visible(options, position, key_position)
            return lax.cond(seen, terms, lambda *sums: sums, d_query, d_key)

        d_query, d_keys = lax.scan(add, d_query, (keys, values, places, key_segments, d_keys))
        return d_keys, d_query

    d_keys = jnp.zeros_like(keys, d_query.dtype), jnp.zeros_like(values, d_query.dtype)
    d_keys, d_query = lax.scan(of_one_block, d_keys, (d_query, queries, of_queries, of_result))
    return d_query, d_keys


def _terms(
    options: _Options, query: Array, key: Array, value: Array, places: Any, result: Any, d_query: Array, d_keys: Any
) -> tuple[Array, tuple[Array, Array]]:
    """Adds the terms of a block of queries and a block of keys to their gradients; returns (d_query, (d_key, d_value)).

    With p the softmax, O the result and D the sum of O * dO over features: dV = p^T dO, dS = scale * p (dO V^T - D), dQ
    = dS K, dK = dS^T Q. ``result`` is (dO, logsumexp of the logits, D) of the queries. ``places`` is (query positions,
    key positions, query segment ids, key segment ids). ``d_query`` and ``d_keys``, a pair (d_key, d_value), are the
    gradients before.
    """
    (d_out, normalizer, correction), (d_key, d_value) = result, d_keys
    # Recompute the softmax from the single number kept for each query; masked logits give 0.
    logits, _ = _logits(options, query, key, places)
    softmax = jnp.exp(logits - normalizer[..., None])
    d_value += _product("bgrqk,bgrqd->bgkd", softmax.astype(value.dtype), d_out.astype(value.dtype))
    d_logits = softmax * (_product("bgrqd,bgkd->bgrqk", d_out, value) - correction[..., None]) * options.scale
    d_logits = d_logits.astype(query.dtype)  # matrix units multiply narrow operands, and add in float32
    d_key += _product("bgrqk,bgrqd->bgkd", d_logits, query)
    return d_query + _product("bgrqk,bgkd->bgrqd", d_logits, key), (d_key, d_value)


def _product(dims: str, a: Array, b: Array) -> Array:
    """Returns ``jnp.einsum(dims, a, b)``, accumulated and returned in float32, or in a wider dtype of the operands."""
    wide = common_dtype(a.dtype, b.dtype, jnp.float32)
    return jnp.einsum(dims, a, b, preferred_element_type=wide)


# -------------------------------------------------------------------------------------------------- checks of arguments


def _check(
    query: Array, key: Array, value: Array, segments: Array | None, options: _Options, impl: str, kernel: Kernel | None
) -> None:
    """Raises a ``ValueError`` if arguments of ``context_attention`` do not fit each other or the number of devices.

    Checked are shapes, ``impl``, kernel, window, block size, the divisions of tokens and heads by devices, and by types
    (under ``check_vma=True``) that query, key and value differ along the axes of the sequence.
    """
    if impl not in ("gather", "ulysses", "ring"):
        raise ValueError(f"impl={impl!r}: context_attention has 'gather', 'ulysses' and 'ring'.")
    _check_shapes(query, key, value, segments)
    if options.layout == ZIGZAG:
        check_even(query.shape[1] * options.devices, options.devices, "context_attention")
    if impl == "ring" and kernel is not None:
        raise ValueError(
            "kernel= with impl='ring': the ring merges softmaxes block by block, which needs more than a kernel's "
            "results. Leave kernel= out, or pass impl='ulysses' (or 'gather'), which calls the kernel on full rows."
        )
    if options.window is not None and min(options.window) < 0:
        raise ValueError(
            f"window={options.window}: how many tokens a token sees to its left and right must be 0 or more each."
        )
    if options.block_size < 1:
        raise ValueError(f"context_attention: block_size={options.block_size} must be a positive number of tokens.")
    if impl == "ulysses" and (heads := query.shape[2]) % options.devices:
        raise ValueError(
            f"impl='ulysses': the {heads} query heads do not divide over the {options.devices} devices along "
            f"{options.axes}. Take impl='ring' or 'gather', or {math.gcd(heads, options.devices)} devices for the "
            "sequence."
        )
    for name, array in {"query": query, "key": key, "value": value}.items():
        for axis in collectives.spread_axes(options.axes):
            if collectives.type_shows_varying(axis, array) and axis not in collectives.varying_axes(array):
                raise ValueError(
                    f"context_attention: the {name} does not vary over {axis!r} (its type is {jax.typeof(array)}): all "
                    "devices have the same tokens. Split the sequence over that axis, as in_specs=P('fsdp', 'cp') of a "
                    "batch [b, t] does, or name the axis that splits it."
                )


def _check_shapes(query: Array, key: Array, value: Array, segments: Array | None) -> None:
    """Raises a ``ValueError`` if the shapes of query, key, value and segments do not fit.

    They must be [b, t, h, d], [b, t, g, d], [b, t, g, e] and [b, t], and g must divide h. ``segments`` may be None.
    """
    shapes = query.shape, key.shape, value.shape
    fit = all(len(shape) == 4 for shape in shapes) and query.shape[:2] == key.shape[:2] == value.shape[:2]
    if not (fit and key.shape[2] == value.shape[2] and query.shape[3] == key.shape[3]):
        raise ValueError(
            f"query, key and value have the shapes {shapes[0]}, {shapes[1]}, {shapes[2]}: they must be [b, t, h, d], "
            "[b, t, g, d] and [b, t, g, e], with the same tokens t of one sequence on this device."
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} query heads do not divide into groups for {key.shape[2]} key heads. The number "
            "of key heads must divide the number of query heads."
        )
    if segments is not None and segments.shape != query.shape[:2]:
        raise ValueError(
            f"segment_ids of shape {segments.shape} do not fit a query of shape {query.shape}: one integer for each of "
            f"this device's tokens, {query.shape[:2]}, is needed."
        )
