"""The benchmarks in small, and the figures that are kept."""
