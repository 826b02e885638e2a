"""Tests of optimizers: on shards, on unsharded matrices, and with state in host memory."""
