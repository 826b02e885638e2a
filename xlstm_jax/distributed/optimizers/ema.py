"""Exponential moving average (EMA) of the weights, kept in the optimizer's state.

  updates = tx.update(...)                                  the optimizer's updates, unchanged
  average += (1 - decay) * (params + updates - average)     elementwise, at least in float32

The average is part of the optimizer's state: split and padded like the parameters, and saved in checkpoints. A step
skipped by ``skip_nonfinite`` does not change the average. No communication. (``optax.ema`` averages updates.)
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.wire.collectives import value_dtype, wide_dtype
from xlstm_jax.distributed.optimizers.lookahead import as_inner
from xlstm_jax.distributed.optimizers.sharded_optimizer import as_parameters, states_of
from xlstm_jax.distributed.optimizers.transforms import (
    CHECKS_OF_PARTS,
    PASSING_ON,
    check_transform,
    links,
    name_of,
    parts,
)
from xlstm_jax.formatting import kind_of


class WithEmaState(NamedTuple):
    """State of ``with_ema``: state of the inner optimizer; the average, a leaf per parameter; update count, int32."""

    inner_state: PyTree
    ema: PyTree
    num_updates: jax.Array


def with_ema(tx: optax.GradientTransformation, decay: optax.ScalarOrSchedule) -> optax.GradientTransformationExtraArgs:
    """Adds an average of the weights to an optimizer: after each update ``decay * average + (1 - decay) * weights``.

    The average starts at the parameters, and changes no update. Works on global arrays (``make_train_step``) and inside
    ``shard_map``; ``ema_params`` reads the average.

    >>> tx, params = with_ema(optax.sgd(1.0), 0.9), jnp.ones(2)
    >>> updates, state = tx.update(jnp.ones(2), tx.init(params), params)
    >>> optax.apply_updates(params, updates), ema_params(state, params)
    (Array([0., 0.], dtype=float32), Array([0.9, 0.9], dtype=float32))

    Args:
      tx: any optax optimizer, the full chain: the average excludes transforms outside of ``with_ema``. Put only
        ``skip_nonfinite`` and ``optax.MultiSteps`` around ``with_ema``, so that the average counts the updates that are
        applied.
      decay: from 0 to less than 1, or a function of the number of earlier updates: for a warm-up of the decay ``lambda
        count: jnp.minimum(0.999, (1 + count) / (10 + count))``; for the mean of all weights so far ``lambda count:
        count / (count + 1)``.
    Returns:
      The optimizer. The average of float16 and bfloat16 parameters is float32: in bfloat16 an average with a decay of
        0.999 would not move, since a thousandth of the distance is less than half a unit in the last place.
    Raises:
      ValueError: ``decay`` is a number out of range; or ``update`` was called without parameters.
      TypeError: ``tx`` is not a transform, or ``decay`` neither a number nor a function.
    """
    check_transform(tx, "with_ema")
    _check_decay(decay)
    inner = as_inner(tx)

    def init(params: PyTree) -> WithEmaState:
        # jnp.array copies: a step donates both parameters and average, and JAX donates no buffer twice.
        average = jax.tree.map(lambda p: jnp.array(p, wide_dtype(value_dtype(p))), params)
        return WithEmaState(inner.init(params), average, jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree) -> tuple[PyTree, PyTree]:
        if params is None:
            raise ValueError("with_ema: update needs the parameters, to average them: tx.update(grads, state, params).")
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        weight = 1 - (decay(state.num_updates) if callable(decay) else decay)

        def moved(average: Any, new: Any) -> jax.Array:
            wide = new.astype(average.dtype)
            # Round as the stored weights. XLA removes a cast to bfloat16 and back, but keeps reduce_precision.
            if new.dtype != average.dtype:
                wide = jax.lax.reduce_precision(wide, jnp.finfo(new.dtype).nexp, jnp.finfo(new.dtype).nmant)
            # A schedule's value may have another dtype than a float64 average.
            share = weight if isinstance(weight, int | float) else jnp.asarray(weight, jnp.finfo(average.dtype).dtype)
            # Written as a step towards the weights: constant weights leave the average unchanged, to the bit.
            return (average + share * (wide - average)).astype(average.dtype)

        average = jax.tree.map(moved, state.ema, optax.apply_updates(params, updates))
        return updates, WithEmaState(inner_state, average, jnp.asarray(optax.safe_increment(state.num_updates)))

    return optax.GradientTransformationExtraArgs(init, update)


def ema_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the average of ``with_ema`` as parameters, for evaluation, export and generation.

    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> tx, axes = with_ema(optax.adam(1e-3), 0.999), ("dp", "fsdp")
    >>> state = create_train_state(model, tx, mesh, jax.random.key(0), x, batch_axes=axes)
    >>> to_evaluate = state.replace(params=ema_params(state.opt_state, state.params))
    >>> to_evaluate.params["kernel"].names
    ('fsdp', None)

    Args:
      opt_state: the state of an optimizer with ``with_ema`` inside.
      params: the parameters of the same training state, boxed if split.
    Returns:
      The average in the boxes, dtypes and places of ``params``, in new buffers, so that training may go on with its
      state. Frozen leaves come from ``params``.
    Raises:
      ValueError: ``opt_state`` has no average, or several; or a shape differs from the parameter's.
    """
    averages = [state.ema for state in states_of(opt_state, WithEmaState)]
    if len(averages) != 1:
        raise ValueError(
            f"ema_params: the optimizer's state holds {len(averages)} averages of weights, where one is needed. Put "
            "with_ema(tx, decay) around the whole optimizer, with skip_nonfinite around that."
        )
    return as_parameters(averages[0], params, "ema_params")


def _check_decay(decay: Any) -> None:
    if callable(decay):
        return
    if np.shape(decay) != () or not isinstance(decay, int | float | np.number | jax.Array):
        raise TypeError(f"with_ema: decay is {kind_of(decay)}; pass a number, as 0.999, or a function of the count.")
    if not isinstance(decay, Tracer) and not 0 <= decay < 1:
        raise ValueError(
            f"with_ema: decay={decay}; it must be at least 0 and less than 1. At 1 the average would stay at the first "
            "weights. 0.999 averages over some 1000 updates."
        )


def check_average_is_last(tx: optax.GradientTransformation) -> None:
    """Raises a ``ValueError`` if another transform follows ``with_ema`` in an ``optax.chain``; names the transform.

    Chains are searched at any depth of ``tx``. ``optax.identity`` may follow.
    """
    chains = [part.tx for part in parts(tx) if part.tx is not None]
    for link, following in itertools.chain.from_iterable(itertools.pairwise(links(chain)) for chain in chains):
        if "with_ema" in [part.name for part in parts(link)] and name_of(following) != "identity":
            raise ValueError(
                f"with_ema stands in an optax.chain before {name_of(following)}, which changes the updates once more: "
                "it would average weights that no step has. Put it around the whole: with_ema(optax.chain(...), decay)."
            )


CHECKS_OF_PARTS["with_ema"] = check_average_is_last
PASSING_ON.add("with_ema")
