"""A step whose loss or gradient is not finite is skipped, by one decision for all devices.

The gradients g, the loss l and the state s of the optimizer are global arrays. One bit is computed from all of them:

  ok = isfinite(l) and all(isfinite(g))        an "and" over all shards: the same bit on every device
  ok      update, s'                           the optimizer's own
  not ok  no update, s                         parameters and inner state stay, bit for bit; two counters go up

Who gives up after too many of them is the host (``resilience.LoopGuard``), which reads the counters one step late. Bad
updates are never applied. (``optax.apply_if_finite`` applies them after its limit, does not look at the loss, and
inside ``shard_map`` decides on every device by itself.)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from xlstm_jax.common_types import Metrics, PyTree
from xlstm_jax.distributed.data_parallel import collectives
from xlstm_jax.distributed.data_parallel.boxes import is_differentiable

SKIPPED_STEPS = "skipped_steps"
SKIPPED_IN_A_ROW = "skipped_in_a_row"


class SkipNonfiniteState(NamedTuple):
    """The inner optimizer's state; how many steps were skipped in all, and how many since the last good one: int32."""

    inner_state: PyTree
    skipped_steps: jax.Array
    skipped_in_a_row: jax.Array


def skip_nonfinite(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Lets an optimizer pass over the steps in which the loss or an entry of a gradient is not finite.

    Such a step leaves parameters and the optimizer's state as they are, bit for bit, on all devices alike. For global
    arrays (``make_train_step`` runs the optimizer on these, and hands it the loss) and for use inside ``shard_map``.

    Args:
      tx: any optax optimizer, the whole chain: what stands outside of this one sees the bad gradients.
    Returns:
      The optimizer. Its ``update`` takes the loss as the extra argument ``value``, which optax's other transforms that
      look at the loss take, too; without it only gradients are looked at. ``skip_counts`` reads its counters.
    """
    inner = optax.with_extra_args_support(tx)

    def init(params):
        return SkipNonfiniteState(inner.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, **extra_args):
        ok = _all_finite(updates, extra_args.get("value"))
        new_updates, new_inner = inner.update(updates, state.inner_state, params, **extra_args)
        new_state = SkipNonfiniteState(
            jax.tree.map(lambda new, old: jnp.where(ok, new, old), new_inner, state.inner_state),
            jnp.where(ok, state.skipped_steps, optax.safe_increment(state.skipped_steps)),
            jnp.where(ok, 0, optax.safe_increment(state.skipped_in_a_row)),
        )
        return jax.tree.map(lambda new: jnp.where(ok, new, _nothing_to_add(new)), new_updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def skip_counts(opt_state: PyTree) -> Metrics:
    """The counters of ``skip_nonfinite`` in an optimizer's state, as metrics.

    Args:
      opt_state: the state of an optimizer that has ``skip_nonfinite`` around it, or anywhere in it.
    Returns:
      ``{"skipped_steps", "skipped_in_a_row"}``, int32 scalars; an empty dict where no ``skip_nonfinite`` is there.
    Raises:
      ValueError: there are several: each decides for its own part of the parameters, and a step is half applied.
    """
    found = {name: _fields(opt_state, name) for name in (SKIPPED_STEPS, SKIPPED_IN_A_ROW)}
    number = len(found[SKIPPED_STEPS])
    if number > 1:
        raise ValueError(
            f"skip_nonfinite stands in this optimizer {number} times, and each of them would decide for its own "
            "gradients. Put one around the whole: skip_nonfinite(optax.chain(...)), or optax.partition(...)."
        )
    return {name: values[0] for name, values in found.items() if values}


def _fields(opt_state: PyTree, name: str) -> list[jax.Array]:
    def is_ours(path, _):
        return getattr(path[-1], "tuple_name", None) == SkipNonfiniteState.__name__

    return [value for _, value in optax.tree.get_all_with_path(opt_state, name, filtering=is_ours)]


def _all_finite(gradients: PyTree, loss: Any) -> jax.Array:
    """One bool for all devices: by XLA's own reductions on global arrays, by a collective inside ``shard_map``."""
    looked_at = [leaf for leaf in jax.tree.leaves((gradients, loss)) if is_differentiable(leaf)]
    bad = jnp.any(jnp.stack([jnp.zeros((), bool), *(jnp.any(~jnp.isfinite(leaf)) for leaf in looked_at)]))
    if axes := collectives.manual_axes():
        (bad,) = collectives.all_reduce(["max"], [bad.astype(jnp.int32)], axes)
    return bad == 0


def _nothing_to_add(update: jax.Array) -> jax.Array:
    """What changes no bit of a parameter: x + -0.0 is x, also for x = -0.0, which + 0.0 would make 0.0.

    (But for subnormal numbers, where the hardware takes them for 0 in every addition.)
    """
    return -jnp.zeros_like(update)
