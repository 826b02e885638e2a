"""Norms of gradients, parameters and updates of each leaf, kept in the optimizer's state.

  squares of each leaf     summed on each device over its shard
  stack of 3 x leaves      summed over devices: inside ``shard_map`` with a collective for each set of axes
  state.norms              float32[3, leaves], read by ``leaf_norms``

The ratio of a leaf's update to its parameter shows a learning rate that is too large or too small for the leaf, and a
gradient that grows shows the layer where a loss diverges. Norms are of full leaves: equal to those of a single device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.trees import sum_of_squares
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.optimizers.lookahead import as_inner
from xlstm_jax.distributed.optimizers.norms import axes_of_values
from xlstm_jax.distributed.optimizers.sharded_optimizer import states_of
from xlstm_jax.distributed.optimizers.transforms import PASSING_ON, check_transform

KINDS = ("gradients", "parameters", "updates")


class LeafNormsState(NamedTuple):
    """State of ``with_leaf_norms``: state of the inner optimizer; norms, float32[3, leaves]; update count, int32."""

    inner_state: PyTree
    norms: jax.Array
    num_updates: jax.Array


def with_leaf_norms(tx: optax.GradientTransformation, every: int = 1) -> optax.GradientTransformationExtraArgs:
    """Adds norms of each leaf to an optimizer's state: of gradients, parameters and updates.

    The optimizer's updates are unchanged. Works on global arrays (``make_train_step``) and inside ``shard_map``;
    ``leaf_norms`` reads the norms.

    >>> tx, params = with_leaf_norms(optax.sgd(0.5)), {"w": jnp.full(4, 2.0)}
    >>> _, state = tx.update({"w": jnp.ones(4)}, tx.init(params), params)
    >>> {kind: float(norms["w"]) for kind, norms in leaf_norms(state, params).items()}
    {'gradients': 2.0, 'parameters': 4.0, 'updates': 1.0}

    Args:
      tx: any optax optimizer. Norms of gradients are of the gradients that ``with_leaf_norms`` gets: before clipping
        if clipping is inside ``tx``. Put only transforms that skip steps, as ``optax.MultiSteps``, around it.
      every: norms are computed at the first update and at each ``every``-th update after the first; in between, the
        state keeps the last norms. Each computation reads gradients, parameters and updates once.
    Returns:
      The optimizer. Norms of parameters are of the parameters before the update.
    Raises:
      TypeError: ``tx`` is not a transform.
      ValueError: ``every`` is no positive integer; ``update`` was called without parameters; or (inside ``shard_map``)
        as ``global_norm``.
    """
    check_transform(tx, "with_leaf_norms")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"with_leaf_norms: every={every!r}; pass the number of updates between norms, 1 or more.")
    inner = as_inner(tx)

    def init(params: PyTree) -> LeafNormsState:
        count = len(trees.differentiable(params))
        return LeafNormsState(inner.init(params), jnp.zeros((len(KINDS), count)), jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree) -> tuple[PyTree, PyTree]:
        if params is None:
            raise ValueError("with_leaf_norms: update needs the parameters: tx.update(grads, state, params).")
        new_updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        norms = jax.lax.cond(
            state.num_updates % every == 0,
            _norms,
            lambda _: state.norms,
            (updates, params, new_updates),
        )
        return new_updates, LeafNormsState(inner_state, norms, jnp.asarray(optax.safe_increment(state.num_updates)))

    return optax.GradientTransformationExtraArgs(init, update)


def leaf_norms(opt_state: PyTree, params: PyTree) -> dict[str, dict[str, jax.Array]]:
    """Returns the norms of ``with_leaf_norms`` by kind and by path of the leaf.

    >>> params = {"dense": {"kernel": jnp.ones((2, 2))}}
    >>> leaf_norms(with_leaf_norms(optax.adam(1e-3)).init(params), params)["gradients"]  # zeros before an update
    {'dense/kernel': Array(0., dtype=float32)}

    Args:
      opt_state: the state of an optimizer, with ``with_leaf_norms`` at any depth.
      params: the parameters of the same training state, boxed if split.
    Returns:
      ``{"gradients", "parameters", "updates"}``, each a dict of float32 scalars by path, as "dense/kernel". Frozen
      leaves and leaves that are not floats have no norm.
    Raises:
      ValueError: ``opt_state`` has no norms, or several; or norms of another number of leaves than ``params`` has.
    """
    states = states_of(opt_state, LeafNormsState)
    if len(states) != 1:
        raise ValueError(
            f"leaf_norms: the optimizer's state holds norms of {len(states)} optimizers, where one is needed. Put "
            "with_leaf_norms(tx) around the whole optimizer."
        )
    paths = [path for path, leaf in trees.sharded_leaves(params) if leaf.is_differentiable]
    if states[0].norms.shape != (len(KINDS), len(paths)):
        raise ValueError(
            f"leaf_norms: the optimizer's state holds norms of {states[0].norms.shape[1]} leaves, and the parameters "
            f"have {len(paths)} that are trained. Pass the parameters of the same training state."
        )
    return {kind: dict(zip(paths, row, strict=True)) for kind, row in zip(KINDS, states[0].norms, strict=True)}


def _norms(of_kinds: Sequence[PyTree]) -> jax.Array:
    """Returns L2 norms, float32 [trees, leaves], equal on every device.

    ``of_kinds`` has trees of the same leaves: gradients, parameters, updates. Columns are the float leaves that are not
    frozen, in tree order. Inside ``shard_map`` norms are of full leaves, by a collective for each set of axes.
    """
    by_axes: dict[frozenset[str], dict[int, list[jax.Array]]] = {}
    for tree in of_kinds:
        leaves = [(path, leaf) for path, leaf in trees.sharded_leaves(tree) if leaf.is_differentiable]
        for number, (path, leaf) in enumerate(leaves):
            axes = axes_of_values(path, leaf, "with_leaf_norms")
            by_axes.setdefault(axes, {}).setdefault(number, []).append(sum_of_squares(leaf.value).astype(jnp.float32))
    if not by_axes:
        return jnp.zeros((len(of_kinds), 0))
    stacks = [jnp.stack([jnp.stack(squares) for squares in of_set.values()], axis=1) for of_set in by_axes.values()]
    sums = collectives.psum(stacks, tuple(tuple(sorted(axes)) for axes in by_axes))
    order = [number for of_set in by_axes.values() for number in of_set]
    return jnp.sqrt(jnp.concatenate(sums, axis=1)[:, np.argsort(order)])


PASSING_ON.add("with_leaf_norms")
