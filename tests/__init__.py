import xlstm_jax  # noqa: F401 - before JAX in the processes that tests start: some compare stderr with nothing
