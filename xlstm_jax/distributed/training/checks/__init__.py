"""Table of checks on states, steps, losses and gradients of a training, by the moment at which each runs.

Each row has a moment and a function; ``moments.run_checks`` calls the functions of a moment. Without any row the
compiled programs are the same, and this folder can be deleted.
"""

from functools import partial

import jax
import optax

from xlstm_jax.distributed.data_parallel.placement import check_divides
from xlstm_jax.distributed.data_parallel.trees import sharded_leaves
from xlstm_jax.distributed.optimizers.optax_introspection import check_transform
from xlstm_jax.distributed.training.arguments import (
    EVAL_FN,
    LOSS_FN,
    LOSS_FN_WITHOUT_KEY,
    PADDING,
    check_call,
    check_evaluated,
    check_global_batch,
    check_keys,
    check_mesh_of,
    check_model,
    check_takes,
    collections_of,
    takes_key,
)
from xlstm_jax.distributed.training.checks import calls
from xlstm_jax.distributed.training.checks.averaging import AVERAGED_ONCE
from xlstm_jax.distributed.training.checks.collections import COLLECTIONS_OF_STATE, EQUAL_COLLECTIONS
from xlstm_jax.distributed.training.checks.jax_errors import raise_with_cure
from xlstm_jax.distributed.training.checks.replicated_parameters import REPLICATED_PARAMETERS
from xlstm_jax.distributed.training.equal_results import check_axes, check_equal_results, types_prove_equal
from xlstm_jax.distributed.training.first_batch import compare_keys
from xlstm_jax.distributed.training.mistakes import (
    check_optimizer,
    check_optimizer_of_step,
    facts_of_step,
    warn_of_averages,
    warn_of_gathered_stacks,
    warn_of_idle_axes,
    warn_of_optimizer,
    warn_of_options,
    warn_of_replicated,
    warn_of_replicated_trees,
)
from xlstm_jax.distributed.training.moments import (
    CHECKS,
    Averaged,
    CreatedState,
    Differentiated,
    EvaluationTrace,
    LossOfDevice,
    NewModel,
    NewVariables,
    Results,
    StepTrace,
    TracedStep,
    TrainingCheck,
)
from xlstm_jax.distributed.training.varying import check_branches


def _optimizer_of_state(tx: optax.GradientTransformation) -> None:
    check_transform(tx, "create_train_state")
    check_optimizer(tx, "create_train_state")


def _model(context: NewModel) -> None:
    check_model(context.model)


def _keys(context: NewModel) -> None:
    check_keys(context.rng, "model.init")


def _dims_of_shards(context: NewVariables) -> None:
    for name, tree in context.variables.items():
        for path, leaf in sharded_leaves(tree):
            check_divides(path if name == "params" else f"({name}) {path}", leaf, context.mesh.shape)


def _equal_keys(context: NewModel) -> None:
    if jax.process_count() > 1:
        compare_keys(context.rng, context.mesh)


def _optimizer_of_parameters(context: CreatedState) -> None:
    warn_of_optimizer(context.tx, context.params)


def _gathered_stacks_of_state(context: CreatedState) -> None:
    if not context.allow_replicated:
        warn_of_gathered_stacks(context.stacks, context.mesh)


def _arguments(context: StepTrace) -> None:
    check_call(context.state, context.rng, context.local, context.mesh, context.metric, context.extra_trees)


def _optimizer(context: StepTrace) -> None:
    check_optimizer_of_step(context.state.tx)


def _rows(context: StepTrace) -> None:
    check_global_batch(context.batch, context.layout, context.num_minibatches)


def _loss_function(context: StepTrace) -> None:
    collections = collections_of(context.state)
    draws = takes_key(context.loss.fn, context.rng, collections, context.extra_trees)
    check_takes(context.loss.fn, LOSS_FN if draws else LOSS_FN_WITHOUT_KEY, collections, context.extra_trees)


def _evaluated(context: EvaluationTrace) -> None:
    check_evaluated(context.state, context.local)


def _meshes_of_evaluation(context: EvaluationTrace) -> None:
    state = {"params": context.state.params, "collections": collections_of(context.state)}
    check_mesh_of({"state": state, "local": context.local, "extra_trees": context.extra_trees}, context.layout.mesh)


def _rows_of_evaluation(context: EvaluationTrace) -> None:
    check_global_batch(context.batch, context.layout, padding=PADDING)


def _eval_function(context: EvaluationTrace) -> None:
    check_takes(context.eval_fn, EVAL_FN, collections_of(context.state), context.extra_trees)


def _axes_of_loss(context: LossOfDevice) -> None:
    check_axes(context.value, context.axes, context.quantity)


def _branches(context: Differentiated) -> None:
    check_branches(context.gathered_in_branches, context.loss, context.args, context.axes)


def _averages(context: Averaged) -> None:
    warn_of_averages(context.paths, context.num_minibatches, context.weighted, context.jaxpr)


def _equal_results(context: Results) -> None:
    if not types_prove_equal(context.jaxpr.jaxpr):
        check_equal_results(context.results, context.equations, context.mesh)


def _options(context: TracedStep) -> None:
    warn_of_options(context.step.state.tx, context.step.loss.weighted, context.step.learning_rate)


def _idle_axes(context: TracedStep) -> None:
    state = context.step.state
    trees = (state.params, collections_of(state), context.step.extra_trees)
    warn_of_idle_axes(context.step.mesh, context.step.layout.axes, trees, context.jaxpr)


def _replicated(context: TracedStep) -> None:
    if not context.step.allow_replicated:
        look = partial(facts_of_step, context.step.state.apply_fn, context.trace_again)
        warn_of_replicated(context.step.state.params, context.step.mesh, look)


def _gathered_stacks(context: TracedStep) -> None:
    if not context.step.allow_replicated:
        warn_of_gathered_stacks(context.stacks, context.step.mesh)


def _replicated_trees(context: TracedStep) -> None:
    if not context.step.allow_replicated:
        warn_of_replicated_trees(context.step.extra_trees, context.step.mesh)


MISTAKES, ERRORS = "mistakes.md", "troubleshooting.md"
CHECKS[:] = [
    TrainingCheck("optimizer", _optimizer_of_state, "optimizers.md"),
    TrainingCheck("model", _model, ERRORS),
    TrainingCheck("model", _keys, ERRORS),
    TrainingCheck("shapes", _dims_of_shards, ERRORS),
    TrainingCheck("values", _equal_keys, "processes.md"),
    COLLECTIONS_OF_STATE,
    TrainingCheck("state", _optimizer_of_parameters, "optimizers.md"),
    REPLICATED_PARAMETERS,
    TrainingCheck("state", _gathered_stacks_of_state, MISTAKES, needs="stacks.layers"),
    TrainingCheck("trace", _arguments, ERRORS),
    TrainingCheck("trace", _optimizer, "optimizers.md"),
    TrainingCheck("trace", _rows, ERRORS),
    TrainingCheck("trace", _loss_function, ERRORS),
    TrainingCheck("trace of an evaluation", _evaluated, ERRORS),
    TrainingCheck("trace of an evaluation", _meshes_of_evaluation, ERRORS),
    TrainingCheck("trace of an evaluation", _rows_of_evaluation, ERRORS),
    TrainingCheck("trace of an evaluation", _eval_function, ERRORS),
    TrainingCheck("loss", _axes_of_loss, ERRORS),
    TrainingCheck("gradient", _branches, ERRORS, needs="gathered_in_branches"),
    TrainingCheck("aux", _averages, MISTAKES, needs="paths"),
    EQUAL_COLLECTIONS,
    TrainingCheck("results", _equal_results, ERRORS),
    TrainingCheck("traced", _options, MISTAKES),
    TrainingCheck("traced", _idle_axes, MISTAKES),
    TrainingCheck("traced", _replicated, MISTAKES),
    TrainingCheck("traced", _gathered_stacks, MISTAKES, needs="stacks.layers"),
    TrainingCheck("traced", _replicated_trees, MISTAKES, needs="step.extra_trees"),
    TrainingCheck("names", calls.check_names, ERRORS),
    TrainingCheck("call", calls.check_others_of_call, ERRORS, needs="kwargs"),
    TrainingCheck("call", calls.check_donated, ERRORS),
    TrainingCheck("new call", calls.compare_first_batch, "processes.md"),
    TrainingCheck("placed", calls.check_placed, ERRORS),
    TrainingCheck("refused", calls.raise_for_leaf, ERRORS),
    TrainingCheck("returned", calls.warn_of_padded_call, MISTAKES),
    AVERAGED_ONCE,
    TrainingCheck("failure", raise_with_cure, ERRORS),
]
