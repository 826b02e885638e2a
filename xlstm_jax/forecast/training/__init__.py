"""Forecasts of trainings with ``xlstm_jax.distributed``: the options that fit, and a step beside its plan.

workload     a training that is not run: model, optimizer, abstract batch; builds a step on any mesh
fitting      the search: meshes, remat, minibatches, offload; ``model_axes`` estimates meshes of split models
linting      what a compiled step does that its plan does not need
dispatch     what mixtures of experts send
"""

from xlstm_jax.forecast.training.dispatch import Dispatch, dispatch
from xlstm_jax.forecast.training.fitting import Fit, Options, fit
from xlstm_jax.forecast.training.linting.lint import Finding, LintError, lint
from xlstm_jax.forecast.training.workload import Workload

__all__ = ["Dispatch", "Finding", "Fit", "LintError", "Options", "Workload", "dispatch", "fit", "lint"]
