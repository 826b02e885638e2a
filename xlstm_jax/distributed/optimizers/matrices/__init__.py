"""Optimizers that need unsharded matrices: each device receives and updates a share of the matrices, unsharded.

  shards of the momentum of M matrices          [M, d, f / n] on each of n devices
    -- all-to-all -->  unsharded matrices        [M / n, d, f]
    -- Newton-Schulz, or any optax rule -->      [M / n, d, f]     without communication
    -- all-to-all -->  shards of the updates     [M, d, f / n]

Elementwise operations (momentum, weight decay, learning rate) stay on the shards.

  dimensions      finds the leaves with matrices, and the dims of the matrices, from paths and shapes alone
  groups          groups matrices to send together, and assigns owner devices
  layout          returns the split of the leaves of a tree: inside ``shard_map`` from boxes, outside from the step
  owners          the two all-to-alls
  unsharded_matrices  applies any optax rule
  muon            Muon, with AdamW for further leaves
"""
