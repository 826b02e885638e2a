"""A place that has moved: ``xlstm_jax.forecast``."""

raise ModuleNotFoundError(
    "xlstm_jax.distributed.forecast is xlstm_jax.forecast now; "
    "Workload, fit, lint and dispatch are in xlstm_jax.forecast.training."
)
