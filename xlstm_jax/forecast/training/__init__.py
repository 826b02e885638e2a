"""Forecasts of trainings with ``xlstm_jax.distributed``: finds options that fit, and compares a step with its plan.

workload     describes a training without running the training: model, optimizer, abstract batch; builds steps on meshes
fitting      searches meshes, remat, minibatches, offload; ``model_axes`` estimates meshes of split models
linting      finds costs of a compiled step beyond its plan
dispatch     computes the traffic of mixtures of experts
"""

from xlstm_jax.forecast.training.dispatch import Dispatch, dispatch
from xlstm_jax.forecast.training.fitting import Fit, Options, fit
from xlstm_jax.forecast.training.linting.lint import Finding, LintError, lint
from xlstm_jax.forecast.training.workload import Workload

__all__ = ["Dispatch", "Finding", "Fit", "LintError", "Options", "Workload", "dispatch", "fit", "lint"]
