"""Optimizers for sharded parameters.

``training.make_train_step`` runs the optimizer on global arrays, where every optax transform gives the result of a
single device. Inside ``shard_map`` an optimizer works on shards. Elementwise transforms (AdamW, Lion) give the same
result there. A transform that combines elements of a leaf or of the tree (a norm, a factored moment, a matrix sign)
gives a different result on each device, without an error, and replicated leaves drift apart.

For use inside ``shard_map``, on boxed shards:
  global_norm            the norm of the full tree from its shards, with a collective for each set of axes
  clip_by_global_norm    optax's clipping, by the norm of the full tree
  elementwise_only       a guard for any transform: compares runs on a small tree, unsharded and in shards

For both, global arrays and shards inside ``shard_map``:
  muon                   Muon, with AdamW for leaves that are not matrices: each device updates some unsharded matrices
  on_unsharded_matrices  any optax rule for a single matrix, run in the same way
  matrix_dimensions      the leaves that ``muon`` and ``on_unsharded_matrices`` update as matrices, and their dims
  with_ema               keeps an average of the weights (EMA) in the optimizer state; ``ema_params`` reads the average
  with_leaf_norms        keeps norms of each leaf's gradient, parameter and update; ``leaf_norms`` reads the norms
  with_slow_params       keeps the slow weights of optax.lookahead in the optimizer state; ``slow_params`` reads them
  skip_nonfinite         skips steps with a non-finite loss or gradient, by the same decision on every device

For states of ``create_train_state``:
  Offload                the parts of a training state to keep in host memory

``sharded_optimizer`` makes a ``ShardedOptimizer`` from any transform: init, update and shardings of a state on a mesh.
Optional features of its update are in separate files, each registered by a line of ``WRAPPERS_OF_STATES`` here. Remove
the line and the file to remove the feature.
"""

from xlstm_jax.distributed.optimizers.elementwise import elementwise_only
from xlstm_jax.distributed.optimizers.ema import ema_params, with_ema
from xlstm_jax.distributed.optimizers.leaf_norms import leaf_norms, with_leaf_norms
from xlstm_jax.distributed.optimizers.lookahead import slow_params, with_slow_params
from xlstm_jax.distributed.optimizers.matrices.dimensions import matrix_dimensions
from xlstm_jax.distributed.optimizers.matrices.muon import muon
from xlstm_jax.distributed.optimizers.matrices.unsharded_matrices import on_unsharded_matrices
from xlstm_jax.distributed.optimizers.nonfinite import (
    SKIPPING_STATES,
    skip_counts,
    skip_nonfinite,
)
from xlstm_jax.distributed.optimizers.norms import clip_by_global_norm, global_norm
from xlstm_jax.distributed.optimizers.offload import Offload
from xlstm_jax.distributed.optimizers.sharded_optimizer import WRAPPERS_OF_STATES, optimizer_state_shardings
from xlstm_jax.distributed.optimizers.streaming import STREAMED_STATES

WRAPPERS_OF_STATES[:] = [
    STREAMED_STATES,
    SKIPPING_STATES,
]

__all__ = [
    "Offload",
    "clip_by_global_norm",
    "elementwise_only",
    "ema_params",
    "global_norm",
    "leaf_norms",
    "matrix_dimensions",
    "muon",
    "on_unsharded_matrices",
    "optimizer_state_shardings",
    "skip_counts",
    "skip_nonfinite",
    "slow_params",
    "with_ema",
    "with_leaf_norms",
    "with_slow_params",
]
