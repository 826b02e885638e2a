"""Optimizers for sharded parameters.

``training.make_train_step`` runs the optimizer on global arrays, where every optax transform computes what it computes
on one device. Inside ``shard_map`` an optimizer sees shards. For an elementwise one (AdamW, Lion) that makes no
difference. One that looks across a leaf or the tree (a norm, a factored moment, a matrix sign) computes something else
on every device, without an error, and leaves that should stay equal on all devices drift apart.

  global_norm           the norm of the whole tree from its shards, one collective for each set of axes
  clip_by_global_norm   optax's clipping with that norm
  elementwise_only      a guard around any transform: tries it on a small tree, whole and in shards, and refuses it
                        where the two differ
  muon                  Muon, with AdamW for the rest: each device updates whole matrices of its own; anywhere
  on_whole_matrices     any rule of optax that needs whole matrices, run on them as ``muon`` runs its own
  matrix_dimensions     which leaves these two update as matrices, and along which dims
  with_ema              keeps an average of the weights (EMA) in the optimizer's state; anywhere
  with_slow_params      keeps the slow weights of optax.lookahead in the optimizer's state; slow_params reads them
  Offload               which parts of a training state lie in host memory
  skip_nonfinite        passes over steps whose loss or gradient is not finite, on all devices alike; anywhere

``sharded_optimizer`` makes a ``ShardedOptimizer`` from any transform: init, update and shardings of a state on a mesh.
Features of its update stand in files beside it, and a line of ``WRAPPERS`` here registers each. Remove a line and its
file, and updates do without the feature.
"""

from xlstm_jax.distributed.optimizers.elementwise import elementwise_only
from xlstm_jax.distributed.optimizers.ema import ema_params, with_ema
from xlstm_jax.distributed.optimizers.lookahead import slow_params, with_slow_params
from xlstm_jax.distributed.optimizers.matrices.dimensions import matrix_dimensions
from xlstm_jax.distributed.optimizers.matrices.layout import with_layout
from xlstm_jax.distributed.optimizers.matrices.muon import muon
from xlstm_jax.distributed.optimizers.matrices.whole_matrices import on_whole_matrices
from xlstm_jax.distributed.optimizers.nonfinite import skip_counts, skip_nonfinite, with_skipped_collections
from xlstm_jax.distributed.optimizers.norms import clip_by_global_norm, global_norm
from xlstm_jax.distributed.optimizers.offload import Offload
from xlstm_jax.distributed.optimizers.sharded_optimizer import WRAPPERS
from xlstm_jax.distributed.optimizers.state import optimizer_state_shardings
from xlstm_jax.distributed.optimizers.streaming import with_streaming

WRAPPERS[:] = [
    with_layout,
    with_streaming,
    with_skipped_collections,
]

__all__ = [
    "Offload",
    "clip_by_global_norm",
    "elementwise_only",
    "ema_params",
    "global_norm",
    "matrix_dimensions",
    "muon",
    "on_whole_matrices",
    "optimizer_state_shardings",
    "skip_counts",
    "skip_nonfinite",
    "slow_params",
    "with_ema",
    "with_slow_params",
]
