"""Benchmarks of the library against the alternatives of a user, and an example training job."""

import xlstm_jax  # noqa: F401 - before JAX, so that CUDA's plugin is silent: see quiet_import
