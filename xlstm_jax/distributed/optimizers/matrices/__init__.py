"""Optimizers that need whole matrices, on shards: each device becomes the owner of some, and updates these alone.

  shards of the momentum of M matrices          [M, d, f / n] on each of n devices
    -- all-to-all -->  whole matrices            [M / n, d, f]
    -- Newton-Schulz, or any other rule -->      [M / n, d, f]     no communication within
    -- all-to-all -->  shards of the updates     [M, d, f / n]

What is done element by element (momentum, weight decay, learning rate) stays on the shards.

  dimensions   which leaves are matrices, and along which dims: from paths and shapes alone
  groups       which matrices travel together, and which devices own them
  owners       the two all-to-alls
  hook         any rule of optax
  momentum     Muon, with AdamW for the rest
"""
