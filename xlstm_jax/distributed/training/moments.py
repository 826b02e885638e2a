"""Table of the checks of a training, the moments at which checks run, and the types of their arguments.

  run_checks(moment, context)   called where states, steps, gradients and evaluations are made
  CHECKS                        the rows (moment, function, page of docs/), registered by ``training.checks``

A check raises for a certain mistake, warns of a possible mistake, and changes no number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.common_types import Model, PyTree
from xlstm_jax.distributed.data_parallel.modules import Stacks
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout
from xlstm_jax.distributed.metrics.pure_metric import PureMetric
from xlstm_jax.distributed.optimizers.learning_rate import LearningRate
from xlstm_jax.distributed.training.loss import Loss, LossFunction
from xlstm_jax.distributed.training.varying import Equations, read_equations
from xlstm_jax.private_names import core

Moment = Literal[
    "optimizer",  # before a state is created: its optax transform
    "model",  # before a model is traced for initialisation: NewModel
    "shapes",  # after its variables were traced: NewVariables
    "values",  # before the variables are computed: NewModel
    "state",  # after the parameters of a new state were computed: CreatedState
    "trace",  # when JAX begins to trace a step: StepTrace
    "trace of an evaluation",  # when JAX begins to trace an evaluation: EvaluationTrace
    "loss",  # after a loss function has returned: LossOfDevice
    "gradient",  # after the loss of a minibatch was differentiated: Differentiated
    "aux",  # before auxiliary numbers are averaged: Averaged
    "results",  # after the ``shard_map`` of a step or an evaluation was traced: Results
    "traced",  # after the ``shard_map`` of a step was traced: TracedStep
    # JittedCall, in this and the five below. Of calls of a step "names", "new call" and "placed" have the first of each
    # kind alone: with these names of arguments, and a batch with this structure and placement.
    "names",  # when a step, its ``lower`` or a similar method is called
    "call",  # when a step is called
    "new call",  # when a step is called
    "placed",  # before the arguments are passed to JAX
    "refused",  # after JAX has raised an error
    "returned",  # after the call has returned
    "update",  # when ``apply_gradients`` of a state is called: AppliedGradients
    "failure",  # after JAX has raised an error inside a loss function: the exception
]


class TrainingCheck(NamedTuple):
    """Check in the table: ``run_check(context)`` is called at ``moment``; ``page`` of docs/ has the details.

    ``needs`` names an attribute of the context, as "step.extra_trees", without which (empty, None) the check has
    nothing to look at, and is not called.
    """

    moment: Moment
    run_check: Callable[[Any], None]
    page: str
    needs: str = ""


class NewModel(NamedTuple):
    """Argument of checks before initialisation: the model, the mesh and the keys."""

    model: Model
    mesh: Mesh | AbstractMesh
    rng: PyTree


class NewVariables(NamedTuple):
    """Argument of checks of new variables: abstract and boxed, by collection; and their mesh."""

    variables: Mapping[str, PyTree]
    mesh: Mesh | AbstractMesh


class CreatedState(NamedTuple):
    """Argument of checks of a new state: the arguments of ``create_train_state``, and the variables it has made.

    ``stacks`` are stacks of layers that a wrapped module gathers at once.
    """

    model: Model
    tx: optax.GradientTransformation
    mesh: Mesh | AbstractMesh
    rng: PyTree
    inputs: tuple[PyTree, ...]
    kwargs: Mapping[str, Any]
    params: PyTree
    collections: Mapping[str, PyTree]
    stacks: Stacks
    allow_replicated: bool


@dataclass(frozen=True)
class StepTrace:
    """Argument of checks while a step is traced: the arguments of ``make_train_step`` and of the step."""

    loss: LossFunction
    layout: BatchLayout
    num_minibatches: int
    metric: PureMetric | None
    learning_rate: LearningRate | None
    allow_replicated: bool
    state: Any
    batch: PyTree
    rng: PyTree
    local: PyTree
    extra_trees: Mapping[str, PyTree]

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        return self.layout.mesh


@dataclass(frozen=True)
class TracedStep:
    """Argument of checks after the trace of a step's loss and gradients: the jaxpr, and layers gathered at once.

    ``trace_again()`` traces loss and gradients once more, for checks that observe modules.
    """

    step: StepTrace
    jaxpr: core.Jaxpr
    stacks: Stacks
    trace_again: Callable[[], None]


class EvaluationTrace(NamedTuple):
    """Argument of checks while an evaluation is traced: the arguments of ``make_eval_step`` and of the step."""

    eval_fn: Callable[..., Any]
    layout: BatchLayout
    state: Any
    batch: PyTree
    local: PyTree
    extra_trees: Mapping[str, PyTree]


@dataclass(frozen=True)
class Results:
    """Argument of checks of the results of a traced ``shard_map``.

    ``axes`` are the axes of the batch, ``collections`` those of the state.
    """

    results: PyTree
    jaxpr: core.Jaxpr
    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    collections: Mapping[str, PyTree]

    @cached_property
    def equations(self) -> Equations:
        """Returns the axes along which results, and values named by ``varying.marked``, differ between devices."""
        return read_equations(self.jaxpr)


class LossOfDevice(NamedTuple):
    """Argument of checks of a device's loss, or weight, before reduction; ``quantity`` is its name for errors."""

    value: jax.Array
    axes: tuple[str, ...]
    quantity: str


class Differentiated(NamedTuple):
    """Argument of checks of a differentiated ``loss(*args)``, with the paths of leaves gathered in a ``lax.cond``."""

    gathered_in_branches: Sequence[str]
    loss: Callable[..., Loss]
    args: tuple[PyTree, ...]
    axes: tuple[str, ...]


class Averaged(NamedTuple):
    """Argument of checks of auxiliary floats, at ``paths``, averaged over minibatches of all devices.

    ``jaxpr()`` returns the equations whose results are these floats.
    """

    paths: tuple[str, ...]
    num_minibatches: int
    weighted: bool
    jaxpr: Callable[[], Any]


class AppliedGradients(NamedTuple):
    """Argument of checks of the gradients that ``apply_gradients`` was called with, for these parameters."""

    params: PyTree
    grads: PyTree


class JittedStep(NamedTuple):
    """Facts on a compiled step for checks of its calls: layout of the batch, names of arguments by position.

    Attributes:
      needed: the arguments without a default.
      donated: the arguments whose buffers a call donates.
      counting: returns the names of results that ignore the weights of padded rows; see ``counting_padding``.
      checked_inputs: cache of inputs that later calls need not check again.
    """

    layout: BatchLayout
    arguments: tuple[str, ...]
    needed: tuple[str, ...]
    donated: Sequence[str]
    counting: Callable[[PyTree, tuple[Any, ...], dict[str, Any]], dict[str, list[str]]]
    checked_inputs: set[object]


class JittedCall(NamedTuple):
    """Argument of checks of a call: the step, arguments as passed and by name, and JAX's error, if raised."""

    step: JittedStep
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: dict[str, Any]
    error: Exception | None = None


CHECKS: list[TrainingCheck] = []  # filled by ``checks``


def checks_at(moment: Moment) -> list[TrainingCheck]:
    """Returns the checks of a moment in the order of the table."""
    return [check for check in CHECKS if check.moment == moment]


def run_checks(moment: Moment, context: Any) -> None:
    """Runs the checks of a moment."""
    run_rows(checks_at(moment), context)


def run_rows(checks: Sequence[TrainingCheck], context: Any) -> None:
    """Runs checks that have something to look at in the context."""
    for check in checks:
        if not check.needs or attrgetter(check.needs)(context):
            check.run_check(context)
