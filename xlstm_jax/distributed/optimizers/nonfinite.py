"""Skips steps with a non-finite loss or gradient, by the same decision on all devices.

  ok = isfinite(loss) and all(isfinite(gradients))   an "and" over all shards: the same bit on every device
  ok       the optimizer's update and new state
  not ok   parameters, the optimizer's state and the model's collections stay, bit for bit; two counters increase

The host (``resilience.LoopGuard``) reads the counters a step late, and ends the run after too many skipped steps. A bad
update is never applied. (``optax.apply_if_finite`` applies bad updates after its limit, ignores the loss, keeps the
collections of the bad batch, copies all moments in from the host at once, and inside ``shard_map`` decides separately
on each device: ``tests/optimizers/test_beside_optax.py``.)
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.common_types import Metrics, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.optimizers.lookahead import as_inner
from xlstm_jax.distributed.optimizers.norms import check_averaged
from xlstm_jax.distributed.optimizers.sharded_optimizer import ShardedOptimizer, Trained, WrapperOfStates, states_of
from xlstm_jax.distributed.optimizers.transforms import VALUE, WITHHOLDING, check_transform
from xlstm_jax.program_names import SKIPPED_IN_A_ROW, SKIPPED_STEPS


class SkipNonfiniteState(NamedTuple):
    """State of ``skip_nonfinite``: state of the inner optimizer; int32 counts of steps skipped in all, and in a row."""

    inner_state: PyTree
    skipped_steps: jax.Array
    skipped_in_a_row: jax.Array


def skip_nonfinite(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer skip each step with a non-finite loss or gradient.

    A skipped step leaves parameters and the optimizer's state unchanged, bit for bit, on all devices alike. Works on
    global arrays (``make_train_step`` runs the optimizer there, and passes the loss) and inside ``shard_map``.

    >>> tx, params = skip_nonfinite(optax.sgd(1.0)), jnp.ones(2)
    >>> updates, state = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(params))
    >>> optax.apply_updates(params, updates)
    Array([1., 1.], dtype=float32)

    Args:
      tx: any optax optimizer, the full chain: transforms outside of ``skip_nonfinite`` get the bad gradients.
    Returns:
      The optimizer. Its ``update`` takes the loss as the extra argument ``value``, as in optax; without ``value`` only
      gradients are checked. ``skip_counts`` reads the counters.
    Raises:
      TypeError: ``tx`` is not a transform.
      ValueError: (in ``update``, under ``check_vma=True``) a gradient was not averaged over all axes; or an update
        changes the tree of the inner state.
    """
    check_transform(tx, "skip_nonfinite")
    inner = as_inner(tx)

    def init(params: PyTree) -> SkipNonfiniteState:
        return SkipNonfiniteState(inner.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree) -> tuple[PyTree, PyTree]:
        check_averaged(updates, params, "skip_nonfinite")
        # Checked before the inner update, which may clip an infinite gradient to a finite one.
        ok = _all_finite(updates, extra_args.get("value"))
        new_updates, new_inner = inner.update(updates, state.inner_state, params, **extra_args)
        before: Any = jax.tree.structure(state.inner_state)
        if jax.tree.structure(new_inner) != before:
            raise ValueError(
                "skip_nonfinite: the optimizer's state has another tree after an update than before it, such as with "
                "optax.monitor, so a skipped step cannot restore it. Put that transform outside: "
                "optax.chain(optax.monitor(...), skip_nonfinite(tx))."
            )
        new_state = SkipNonfiniteState(
            jax.tree.map(lambda new, old: jnp.where(ok, new, old), new_inner, state.inner_state),
            jnp.where(ok, state.skipped_steps, optax.safe_increment(state.skipped_steps)),
            jnp.where(ok, 0, optax.safe_increment(state.skipped_in_a_row)),
        )
        # x + -0.0 is x, even for x = -0.0; x + 0.0 would turn -0.0 into 0.0. (Hardware may round subnormal numbers to
        # 0.)
        return jax.tree.map(lambda new: jnp.where(ok, new, -jnp.zeros_like(new)), new_updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def skip_counts(opt_state: PyTree) -> Metrics:
    """Returns the counters of ``skip_nonfinite`` in an optimizer's state, as metrics.

    >>> skip_counts(skip_nonfinite(optax.sgd(1.0)).init(jnp.ones(2)))["skipped_steps"]
    Array(0, dtype=int32)

    Args:
      opt_state: the state of an optimizer, with ``skip_nonfinite`` at any depth.
    Returns:
      ``{"skipped_steps", "skipped_in_a_row"}``, int32 scalars; {} without ``skip_nonfinite``.
    Raises:
      ValueError: the optimizer contains ``skip_nonfinite`` several times. Each would decide for a part of the
        parameters, so a step could be applied in part.
    """
    states = states_of(opt_state, SkipNonfiniteState)
    if len(states) > 1:
        raise ValueError(
            f"skip_nonfinite stands in this optimizer {len(states)} times, and each would decide for a part "
            "of the gradients. Put one around the optimizer: skip_nonfinite(optax.chain(...)), or optax.partition(...)."
        )
    return {name: getattr(state, name) for state in states for name in (SKIPPED_STEPS, SKIPPED_IN_A_ROW)}


def with_skipped_collections(
    optimizer: ShardedOptimizer, params: PyTree, mesh: Mesh | AbstractMesh
) -> ShardedOptimizer:
    """Returns ``optimizer`` with an ``update`` for states with ``skip_nonfinite``.

    If a step is skipped, the new ``update`` leaves the collections of the model (such as batch statistics) as before
    the step. A step that would make a finite statistic non-finite is skipped, too. The metrics get the counts of
    skipped steps (``skip_counts``). ``params`` and ``mesh`` are not read. The function is a ``Wrapper``: it takes a
    ``ShardedOptimizer`` and returns a changed optimizer.
    """
    del params, mesh

    def update(
        grads: PyTree, before: Trained, collections: Mapping[str, PyTree], **extra_args: PyTree
    ) -> tuple[Trained, Metrics]:
        skip_counts(before.opt_state)  # raises if the state has several counters
        if collections and VALUE in extra_args:
            extra_args[VALUE] = _nan_where_spoiled(extra_args[VALUE], before.collections, collections)
        after, metrics = optimizer.update(grads, before, collections, **extra_args)
        counts = skip_counts(after.opt_state)
        if collections:
            applied = counts[SKIPPED_IN_A_ROW] == 0
            new_collections = jax.tree.map(partial(jnp.where, applied), after.collections, before.collections)
            after = after._replace(collections=new_collections)
        return after, metrics | counts

    return optimizer._replace(update=update)


SKIPPING_STATES = WrapperOfStates(SkipNonfiniteState, with_skipped_collections)


def _nan_where_spoiled(loss: jax.Array, before: Mapping[str, PyTree], after: Mapping[str, PyTree]) -> jax.Array:
    """Returns ``loss``; or NaN, so that the step is skipped, if the step would make a finite statistic non-finite.

    ``before`` and ``after`` are the collections (such as batch statistics) before and after the step. Sums of squares
    overflow before the loss: the variance is then infinite, activations divided by the variance are 0, and the loss is
    finite.
    """
    # Integers and keys are always finite.
    pairs = zip(trees.differentiable(before), trees.differentiable(after), strict=True)
    spoiled = [jnp.any(jnp.isfinite(old.value) & ~jnp.isfinite(new.value)) for old, new in pairs]
    return jnp.where(jnp.any(jnp.stack([jnp.zeros((), bool), *spoiled])), jnp.nan, loss)


def _all_finite(gradients: PyTree, loss: jax.Array | None) -> jax.Array:
    """Returns whether loss and gradients are finite on all devices, bool [], equal on every device.

    ``loss`` may be None. Frozen leaves, and leaves that are not floats, are ignored.
    """
    looked_at = trees.differentiable((gradients, loss))
    bad = jnp.any(jnp.stack([jnp.zeros((), bool), *(jnp.any(~jnp.isfinite(leaf.value)) for leaf in looked_at)]))
    # An "or" over devices. With decisions from local shards devices would drift apart. The axes of the boxes may also
    # be bound by a `vmap`, in which `elementwise_only` tries a transform.
    named = {axis for leaf in looked_at for axis in leaf.axes}
    if axes := collectives.manual_axes() or tuple(sorted(filter(collectives.is_bound, named))):
        (count,) = collectives.all_reduce(["max"], [bad.astype(jnp.int32)], axes)
        return count == 0
    return ~bad


WITHHOLDING.add("skip_nonfinite")  # it drops the updates of a NaN
