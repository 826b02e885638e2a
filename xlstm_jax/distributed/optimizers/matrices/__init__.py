"""Optimizers that need whole matrices: each device owns some of the matrices, receives them whole, and updates them.

  shards of the momentum of M matrices          [M, d, f / n] on each of n devices
    -- all-to-all -->  whole matrices            [M / n, d, f]
    -- Newton-Schulz, or any other rule -->      [M / n, d, f]     no communication within
    -- all-to-all -->  shards of the updates     [M, d, f / n]

What is done element by element (momentum, weight decay, learning rate) stays on the shards.

  dimensions      which leaves are matrices, and along which dims: from paths and shapes alone
  groups          which matrices travel together, and which devices own them
  layout          how the leaves of a tree are split: inside ``shard_map`` by their boxes, outside as the step says
  owners          the two all-to-alls
  whole_matrices  any rule of optax
  muon            Muon, with AdamW for the rest
"""
