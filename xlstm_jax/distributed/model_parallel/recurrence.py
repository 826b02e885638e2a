"""The state of a recurrence before the first token of each device of a split sequence, inside ``shard_map``.

A linear recurrence h[s] = a[s] h[s - 1] + u[s] over the tokens of a device, with elementwise products, maps the state
before the tokens to the state after the tokens, h -> A h + U. A is the product of the a[s], and U the final state for a
zero initial state. The pair (A, U) is called a *step* here. Two steps in sequence are again a step: (A2, U2) after
(A1, U1) is (A2 A1, A2 U1 + U2). So the states at the borders of n devices need only ceil(log2(n)) + 1 exchanges among
all devices, not n sequential exchanges:

  every device   (A, U) of its t tokens, from a zero state
  scan           (A, U) of the devices before it, by doubling: of 1, then 2, then 4, ... devices
  every device   the state before its first token; then its tokens as on one device
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names
from xlstm_jax.distributed.model_parallel.sequence_layout import CONTIGUOUS, layout_over

Combine = Callable[[PyTree, PyTree], PyTree]


def recurrence_over_axis(
    decay: jax.Array,
    state: jax.Array,
    axis: AxisNames = "cp",
    *,
    initial: jax.Array | None = None,
    reverse: bool = False,
) -> jax.Array:
    """Returns the state of a linear recurrence before the first token of each device; values and gradients are exact.

    Call the function inside ``shard_map``, in either ``check_vma`` mode, with the sequence in natural order (not
    zigzag). If no mesh axis is bound, as in ``init``, the device has the full sequence, and ``initial`` is returned.
    Products are elementwise; for a decay that is a matrix use ``scan_over_axis``.

    >>> def states(a, u):  # h[s] = a[s] h[s - 1] + u[s] over a sequence that is split
    ...     step = lambda before, after: (before[0] * after[0], after[0] * before[1] + after[1])
    ...     products, own = jax.lax.associative_scan(step, (a, u))
    ...     return own + products * recurrence_over_axis(products[-1], own[-1], "fsdp")
    >>> split = jax.P("fsdp")
    >>> jax.shard_map(states, mesh=mesh, in_specs=split, out_specs=split)(jnp.full(8, 2.0), jnp.ones(8)).tolist()
    [1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 127.0, 255.0]

    Args:
      decay: the product of the decays of this device's tokens; broadcasts against ``state``.
      state: the state after this device's tokens, computed from a zero state before the first of them.
      axis: the mesh axis of the sequence, or a tuple of axes, outermost first.
      initial: the state before the first token of the sequence, of the shape of ``state``, replicated; None: zeros.
      reverse: run the recurrence from the last token to the first; the result is the state after the device's last
        token.
    Returns:
      A state of the shape and dtype of ``state``.
    Raises:
      ValueError: further axes are bound, but not this axis; ``decay`` or ``initial`` do not fit ``state``; or the step
        has a zigzag layout, or splits rows, not a sequence, over the axis.
    """
    initial = jnp.zeros_like(state) if initial is None else jnp.asarray(initial, state.dtype)
    sizes = zip(decay.shape[::-1], state.shape[::-1], strict=False)
    broadcasts = decay.ndim <= state.ndim and all(size in (1, of_state) for size, of_state in sizes)
    if initial.shape != state.shape or not broadcasts:
        raise ValueError(
            f"recurrence_over_axis: decay of shape {decay.shape} and initial of shape {initial.shape} do not fit a "
            f"state of {state.shape}. The decay must broadcast to it (with dims of 1 behind a decay for each head), "
            "and initial have its shape."
        )
    # A step with decay 1 that adds the initial state; the scan starts with it.
    first = jnp.ones_like(decay), initial
    # A decay of wider dtype widens the states between devices.
    step = decay, state
    return _scanned(_linear, step, axis, first, reverse, caller="recurrence_over_axis")[1].astype(state.dtype)


def _linear(before: PyTree, after: PyTree) -> PyTree:
    return before[0] * after[0], after[0] * before[1] + after[1]


def scan_over_axis(
    combine: Combine, step: PyTree, axis: AxisNames = "cp", *, first: PyTree, reverse: bool = False
) -> PyTree:
    """Combines the steps (maps from state to state) of all devices before this device, for any associative recurrence.

    >>> def largest_before(x):  # running maxima, which are the stabilizers of xLSTM's exponential gates
    ...     return scan_over_axis(jnp.maximum, x.max(), "fsdp", first=jnp.float32(-1))[None]
    >>> split = jax.P("fsdp")
    >>> x = jnp.array([0.0, 3.0, 1.0, 5.0, 2.0, 2.0, 9.0, 4.0])  # two values on each of 4 devices
    >>> jax.shard_map(largest_before, mesh=mesh, in_specs=split, out_specs=split)(x).tolist()
    [-1.0, 3.0, 5.0, 5.0]

    Args:
      combine: ``combine(before, after)`` returns the step equal to ``before`` followed by ``after``; associative.
      step: a tree, the combined step of this device's tokens.
      axis, reverse: as for ``recurrence_over_axis``.
      first: the step before the first device, with the structure, shapes and dtypes of ``step``; replicated.
    Returns:
      A tree like ``first``: ``first`` combined with the steps of all devices before this device, by ceil(log2(n)) + 1
      exchanges.
    Raises:
      ValueError: for the axis and the layout, as ``recurrence_over_axis``.
    """
    return _scanned(combine, step, axis, first, reverse, caller="scan_over_axis")


def _scanned(combine: Combine, step: PyTree, axis: AxisNames, first: PyTree, reverse: bool, caller: str) -> PyTree:
    """Returns ``first`` combined with the steps of all devices before this device; a tree like ``first``.

    A step is a map from state to state, as a tree; ``step`` is that of this device's tokens, and ``combine(before,
    after)`` joins two. With ``reverse`` the devices after this device count as before. Errors name the function
    ``caller``.
    """
    axes = collectives.bound_or_none(as_axis_names(axis), caller=caller)
    layout_over(axes, CONTIGUOUS, caller)
    n, index = collectives.axis_size(axes), collectives.axis_index(axes)
    if n == 1:
        return first
    first, step = collectives.to_varying((first, step), axes)
    # A reverse scan is a forward scan with devices counted from the end.
    rank, direction = (n - 1 - index, -1) if reverse else (index, 1)

    def compose_after(distance: int, step: PyTree) -> PyTree:
        arrived = collectives.shift(step, axes, direction * distance, ring=False)
        # Devices that receive nothing have zeros, whose gradient may not exist (logarithms): use the device's step
        # instead.
        before = _where(rank >= distance, arrived, step)
        return _where(rank >= distance, combine(before, step), step)

    step = _where(rank == 0, combine(first, step), step)
    for power in range((n - 1).bit_length()):
        step = compose_after(2**power, step)
    return _where(rank == 0, first, collectives.shift(step, axes, direction, ring=False))


def _where(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
