"""Tests of the benchmarks in small, and of the recorded figures."""
