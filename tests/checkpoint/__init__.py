"""Tests of checkpoints on disk: written, read and rejected files."""
