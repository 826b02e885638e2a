"""``optax.lookahead`` with its slow weights in the optimizer's state.

  params          the fast weights, for which gradients are computed
  state.slow      the slow weights, a leaf for each parameter
  tx.update       gets both as ``optax.LookaheadParams(fast, slow)``, and returns updates of both

Optax needs the pair in place of the parameters, with gradients of the fast weights. Here parameters keep their tree,
for models, evaluations and checkpoints. The slow weights are split and padded like the parameters.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.wire.collectives import value_dtype
from xlstm_jax.distributed.optimizers.sharded_optimizer import as_parameters, states_of
from xlstm_jax.distributed.optimizers.transforms import check_transform, sees_pairs, taking_extra_args


class WithSlowParamsState(NamedTuple):
    """State of ``with_slow_params``: state of the inner optimizer; the slow weights, a leaf for each parameter."""

    inner_state: PyTree
    slow: PyTree


def with_slow_params(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps the slow weights of ``optax.lookahead`` in the optimizer's state, so that parameters are plain, not pairs.

    ``create_train_state`` applies this wrapper if ``tx`` is ``optax.lookahead``, or a chain with ``optax.lookahead``.
    Within another transform apply the wrapper by hand: ``optax.MultiSteps(with_slow_params(optax.lookahead(...)), 4)``.

    >>> tx, params = with_slow_params(optax.lookahead(optax.sgd(1.0), sync_period=1, slow_step_size=0.5)), jnp.ones(2)
    >>> updates, state = tx.update(jnp.ones(2), tx.init(params), params)
    >>> optax.apply_updates(params, updates), slow_params(state, params)  # halfway from 1 to 0
    (Array([0.5, 0.5], dtype=float32), Array([0.5, 0.5], dtype=float32))

    Args:
      tx: ``optax.lookahead(...)``, or an ``optax.chain`` with ``optax.lookahead``, whose transforms all get pairs.
    Returns:
      The optimizer of plain parameters, for global arrays and for use inside ``shard_map``.
    Raises:
      TypeError: ``tx`` is not a transform.
      ValueError: ``tx`` has no ``optax.lookahead``; or ``update`` was called without parameters.
    """
    check_transform(tx, "with_slow_params")
    if not sees_pairs(tx):
        raise ValueError(
            "with_slow_params: tx is neither optax.lookahead nor an optax.chain with it, so it has no slow weights. "
            "Put with_slow_params directly around optax.lookahead(...), and other transforms around both."
        )
    inner = taking_extra_args(tx)

    def init(params: PyTree) -> WithSlowParamsState:
        # jnp.array copies: a step donates parameters and state, and JAX donates no buffer twice.
        slow = jax.tree.map(lambda p: jnp.array(p, value_dtype(p)), params)
        return WithSlowParamsState(inner.init(optax.LookaheadParams(fast=params, slow=slow)), slow)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree) -> tuple[PyTree, PyTree]:
        if params is None:
            raise ValueError(
                "with_slow_params: update needs the parameters, the fast weights: tx.update(grads, state, params)."
            )
        pair = optax.LookaheadParams(fast=params, slow=state.slow)
        both: Any
        both, inner_state = inner.update(updates, state.inner_state, pair, **extra_args)
        return both.fast, WithSlowParamsState(inner_state, optax.apply_updates(state.slow, both.slow))

    return optax.GradientTransformationExtraArgs(init, update)


def with_plain_params(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns ``tx`` as an optimizer of plain parameters: ``with_slow_params(tx)`` if needed, else ``tx`` itself.

    Needed for ``optax.lookahead``, and for a chain with ``optax.lookahead``, which take pairs of fast and slow weights.
    """
    return with_slow_params(tx) if sees_pairs(tx) else tx


def as_inner(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns ``tx`` in the form in which the library's transforms call an inner transform.

    The result takes plain parameters, not pairs of fast and slow weights, and accepts any extra argument of ``update``:
    arguments that ``tx`` does not accept are dropped.
    """
    return taking_extra_args(with_plain_params(tx))


def slow_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the slow weights of ``optax.lookahead`` as parameters, for evaluation, export and generation.

    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> tx, axes = optax.lookahead(optax.adam(1e-3), sync_period=6, slow_step_size=0.5), ("dp", "fsdp")
    >>> state = create_train_state(model, tx, mesh, jax.random.key(0), x, batch_axes=axes)
    >>> slow_params(state.opt_state, state.params)["kernel"].names
    ('fsdp', None)

    Args:
      opt_state: the state of an optimizer with ``optax.lookahead`` inside.
      params: the parameters of the same training state, boxed if split.
    Returns:
      The slow weights in the boxes and places of ``params``, in new buffers. Frozen leaves come from ``params``.
    Raises:
      ValueError: ``opt_state`` has no slow weights, or has them several times; or a shape differs from the parameter's.
    """
    slow_trees = [state.slow for state in states_of(opt_state, WithSlowParamsState)]
    if len(slow_trees) != 1:
        raise ValueError(
            f"slow_params: the optimizer's state holds slow weights {len(slow_trees)} times, where they are needed "
            "once. Pass the opt_state of a state that create_train_state has made with optax.lookahead(...), or of "
            "with_slow_params(optax.lookahead(...))."
        )
    return as_parameters(slow_trees[0], params, "slow_params")
