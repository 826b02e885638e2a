"""Checkpoints on disk: what is written, read and refused."""
