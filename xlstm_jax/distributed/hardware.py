"""Former location of ``xlstm_jax.forecast.hardware``; importing this module raises a ``ModuleNotFoundError``."""

raise ModuleNotFoundError(
    "xlstm_jax.distributed.hardware is xlstm_jax.forecast.hardware now; compiler_options is in xlstm_jax.distributed."
)
