"""Forecasts of trainings with ``xlstm_jax.distributed``: options that fit, and a step compared with its plan.

workload     a training that is not run: model, optimizer, abstract batch; builds a step on any mesh
fitting      the search: meshes, remat, minibatches, offload; ``model_axes`` estimates meshes of split models
linting      costs of a compiled step that its plan does not need
dispatch     traffic of mixtures of experts
"""

from xlstm_jax.forecast.training.dispatch import Dispatch, dispatch
from xlstm_jax.forecast.training.fitting import Fit, Options, fit
from xlstm_jax.forecast.training.linting.lint import Finding, LintError, lint
from xlstm_jax.forecast.training.workload import Workload

__all__ = ["Dispatch", "Finding", "Fit", "LintError", "Options", "Workload", "dispatch", "fit", "lint"]
