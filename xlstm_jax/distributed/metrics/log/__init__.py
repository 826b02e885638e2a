"""Metrics on their way out: CSV, JSON lines and TensorBoard."""
