"""Table of checks on states, steps, losses and gradients of a training, by the moment at which each runs.

A row has a moment, a function, a page of docs/, and the parts of the moment's context that the function takes;
``moments.run_checks`` calls the functions of a moment. Without any row the compiled programs are the same, and this
folder can be deleted.
"""

from functools import partial

from xlstm_jax.distributed.optimizers.transforms import check_optimizer
from xlstm_jax.distributed.training.arguments import (
    PADDING,
    check_batch,
    check_call,
    check_eval_takes,
    check_evaluated,
    check_keys,
    check_model,
    check_shapes,
)
from xlstm_jax.distributed.training.checks import (
    calls,
    replicated_parameters,  # noqa: F401  # registers the reasons of a plan
)
from xlstm_jax.distributed.training.checks.averaging import AVERAGED_ONCE
from xlstm_jax.distributed.training.checks.collections import COLLECTIONS_OF_STATE, EQUAL_COLLECTIONS
from xlstm_jax.distributed.training.checks.jax_errors import raise_with_cure
from xlstm_jax.distributed.training.checks.loss_axes import check_axes
from xlstm_jax.distributed.training.equal_results import check_equal_results
from xlstm_jax.distributed.training.first_batch import compare_keys
from xlstm_jax.distributed.training.mistakes import (
    warn_of_averages,
    warn_of_equal_weights,
    warn_of_gathered_stacks,
    warn_of_idle_axes,
    warn_of_masks,
    warn_of_narrow_params,
    warn_of_other_schedule,
    warn_of_replicated,
    warn_of_replicated_trees,
)
from xlstm_jax.distributed.training.moments import CHECKS, TrainingCheck
from xlstm_jax.distributed.training.varying import check_branches

MISTAKES, ERRORS = "mistakes.md", "troubleshooting.md"
CHECKS[:] = [
    TrainingCheck(
        "optimizer", partial(check_optimizer, caller="create_train_state", makes_pairs=True), "optimizers.md"
    ),
    TrainingCheck("model", check_model, ERRORS, reads=("model",)),
    TrainingCheck("model", partial(check_keys, taker="model.init"), ERRORS, reads=("rng",)),
    TrainingCheck("shapes", check_shapes, ERRORS, reads=("variables", "mesh")),
    TrainingCheck("values", compare_keys, "processes.md", reads=("rng", "mesh"), needs="in_several_processes"),
    COLLECTIONS_OF_STATE,
    TrainingCheck("state", warn_of_narrow_params, "optimizers.md", reads=("params", "narrow"), needs="narrow"),
    TrainingCheck("state", warn_of_masks, "optimizers.md", reads=("with_mask", "params"), needs="with_mask"),
    TrainingCheck("state", warn_of_replicated, MISTAKES, needs="replicated", unless="allow_replicated"),
    TrainingCheck(
        "state",
        warn_of_gathered_stacks,
        MISTAKES,
        reads=("stacks", "mesh"),
        needs="stacks.layers",
        unless="allow_replicated",
    ),
    TrainingCheck("trace", check_call, ERRORS, reads=("state", "rng", "local", "layout.mesh", "metric", "extra_trees")),
    TrainingCheck(
        "trace", partial(check_optimizer, caller="the step", makes_pairs=False), "optimizers.md", reads=("state.tx",)
    ),
    TrainingCheck("trace", check_batch, ERRORS, reads=("batch", "layout", "num_minibatches")),
    TrainingCheck(
        "trace of an evaluation", check_evaluated, ERRORS, reads=("state", "local", "extra_trees", "layout.mesh")
    ),
    TrainingCheck("trace of an evaluation", partial(check_batch, padding=PADDING), ERRORS, reads=("batch", "layout")),
    TrainingCheck("trace of an evaluation", check_eval_takes, ERRORS, reads=("eval_fn", "state", "extra_trees")),
    TrainingCheck("loss", check_axes, ERRORS, reads=("value", "axes", "quantity")),
    TrainingCheck(
        "gradient",
        check_branches,
        ERRORS,
        reads=("gathered_in_branches", "loss", "args", "axes"),
        needs="gathered_in_branches",
    ),
    TrainingCheck(
        "aux", warn_of_averages, MISTAKES, reads=("paths", "num_minibatches", "weighted", "jaxpr"), needs="paths"
    ),
    EQUAL_COLLECTIONS,
    TrainingCheck("results", check_equal_results, ERRORS, needs="unproved"),
    TrainingCheck("traced", warn_of_equal_weights, MISTAKES, reads=("step.state.tx",), needs="step.weighted"),
    TrainingCheck(
        "traced",
        warn_of_other_schedule,
        MISTAKES,
        reads=("step.state.tx", "step.learning_rate"),
        needs="step.learning_rate",
    ),
    TrainingCheck(
        "traced",
        warn_of_idle_axes,
        MISTAKES,
        reads=("axes_without_rows", "step.layout", "step.state", "step.extra_trees", "jaxpr"),
        needs="axes_without_rows",
    ),
    TrainingCheck("traced", warn_of_replicated, MISTAKES, needs="replicated", unless="step.allow_replicated"),
    TrainingCheck(
        "traced",
        warn_of_gathered_stacks,
        MISTAKES,
        reads=("stacks", "step.layout.mesh"),
        needs="stacks.layers",
        unless="step.allow_replicated",
    ),
    TrainingCheck(
        "traced",
        warn_of_replicated_trees,
        MISTAKES,
        reads=("step.extra_trees", "step.layout.mesh"),
        needs="step.extra_trees",
        unless="step.allow_replicated",
    ),
    TrainingCheck("names", calls.check_names, ERRORS, needs="is_irregular"),
    TrainingCheck("call", calls.check_others_of_call, ERRORS, needs="kwargs"),
    TrainingCheck("call", calls.check_donated, ERRORS),
    TrainingCheck("new call", calls.compare_first_batch, "processes.md"),
    TrainingCheck("placed", calls.check_placed, ERRORS, needs="placements"),
    TrainingCheck("refused", calls.raise_for_leaf, ERRORS),
    TrainingCheck("returned", calls.warn_of_padded_call, MISTAKES),
    TrainingCheck("in a program", calls.check_callbacks, ERRORS),
    AVERAGED_ONCE,
    TrainingCheck("failure", raise_with_cure, ERRORS),
]
