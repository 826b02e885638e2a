"""Former location of ``xlstm_jax.forecast``; importing this module raises a ``ModuleNotFoundError``."""

raise ModuleNotFoundError(
    "xlstm_jax.distributed.forecast is xlstm_jax.forecast now; "
    "Workload, fit, lint and dispatch are in xlstm_jax.forecast.training."
)
