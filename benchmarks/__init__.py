"""What the library costs against what a user would pick instead, and the training job that shows it at work."""

import xlstm_jax  # noqa: F401 - before JAX, so that CUDA's plugin is silent: see quiet_import
