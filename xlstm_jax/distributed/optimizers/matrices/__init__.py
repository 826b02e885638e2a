"""Optimizers that need unsharded matrices: each device receives some of the matrices unsharded, and updates these.

  shards of the momentum of M matrices          [M, d, f / n] on each of n devices
    -- all-to-all -->  unsharded matrices        [M / n, d, f]
    -- Newton-Schulz, or any other rule -->      [M / n, d, f]     without communication
    -- all-to-all -->  shards of the updates     [M, d, f / n]

Elementwise operations (momentum, weight decay, learning rate) stay on the shards.

  dimensions      the leaves that are matrices, and their dims: from paths and shapes alone
  groups          the matrices that are sent together, and their owner devices
  layout          the split of the leaves of a tree: inside ``shard_map`` by boxes, outside from the step
  owners          the two all-to-alls
  unsharded_matrices  any optax rule
  muon            Muon, with AdamW for further leaves
"""
