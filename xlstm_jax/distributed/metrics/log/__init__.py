"""Writes metrics to files: JSON lines, a CSV table, and TensorBoard."""
