"""A place that has moved: ``xlstm_jax.forecast.hardware``."""

raise ModuleNotFoundError(
    "xlstm_jax.distributed.hardware is xlstm_jax.forecast.hardware now; compiler_options is in xlstm_jax.distributed."
)
