"""Metrics on many devices, their states and their files."""
