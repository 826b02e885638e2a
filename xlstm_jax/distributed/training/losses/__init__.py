"""Losses that need a hand of their own: cross-entropy over a large vocabulary, and the head that computes it."""
