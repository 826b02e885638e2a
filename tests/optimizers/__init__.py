"""Optimizers on shards, on whole matrices, and with their state in host memory."""
