"""The moments of a training at which checks run, the arguments of the checks, and the table of checks.

  run_checks(moment, context)   a line in the algorithms: the step, the state, gradients, evaluation
  CHECKS                        the rows (moment, function, page of docs/), which ``training.checks`` registers

A check raises an error where something is wrong, warns where it may be meant, and changes no number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    "optimizer",  # a state is about to be created: its optax transform
    "model",  # a model is about to be traced, to be initialised: NewModel
    "shapes",  # the shapes of its variables are known: NewVariables
    "values",  # the values are about to be computed: NewModel
    "state",  # the parameters of a new state are there: CreatedState
    "trace",  # JAX begins to trace a step: StepTrace
    "trace of an evaluation",  # the same of an evaluation: EvaluationTrace
    "loss",  # a loss function has returned: LossOfDevice
    "gradient",  # the loss of a minibatch was differentiated: Differentiated
    "aux",  # numbers beside the loss are about to be averaged: Averaged
    "results",  # the ``shard_map`` of a step or of an evaluation was traced: Results
    "traced",  # the same of a step, with all its arguments: TracedStep
    "names",  # a step is called, or its ``lower`` and the like: JittedCall, as of the four below
    "call",  # a step is called
    "placed",  # the arguments are about to be handed to JAX
    "refused",  # JAX has raised an error
    "returned",  # the call has returned
    "failure",  # JAX has refused what a loss function does: the exception
]


class TrainingCheck(NamedTuple):
    """One row: ``looks`` is called at the moment, and ``page`` is the page of docs/ that has more."""

    moment: Moment
    looks: Callable[[Any], None]
    page: str


class NewModel(NamedTuple):
    """A model, and the mesh and the keys that it is initialised with."""

    model: Model
    mesh: Mesh | AbstractMesh
    rng: PyTree


class NewVariables(NamedTuple):
    """The variables of a model, abstract and boxed, by collection, and the mesh that they will lie on."""

    variables: Mapping[str, PyTree]
    mesh: Mesh | AbstractMesh


class CreatedState(NamedTuple):
    """The arguments of ``create_train_state``, its parameters and other collections.

    ``stacks`` are stacks of layers that a unit gathers at once.
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
    whole_ok: bool


@dataclass(frozen=True)
class StepTrace:
    """The arguments of a step and of its maker, while JAX traces."""

    loss: LossFunction
    layout: BatchLayout
    num_minibatches: int
    metric: PureMetric | None
    learning_rate: LearningRate | None
    whole_ok: bool
    state: Any
    batch: PyTree
    rng: PyTree
    local: PyTree
    others: Mapping[str, PyTree]

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        return self.layout.mesh


@dataclass(frozen=True)
class TracedStep:
    """A step whose loss and gradients were traced: the equations, and stacks of layers that are gathered at once.

    ``trace_again()`` traces loss and gradients once more, for checks that must watch modules.
    """

    step: StepTrace
    jaxpr: core.Jaxpr
    stacks: Stacks
    trace_again: Callable[[], None]


class EvaluationTrace(NamedTuple):
    """The arguments of an evaluation, while JAX traces."""

    eval_fn: Callable[..., Any]
    layout: BatchLayout
    state: Any
    batch: PyTree
    local: PyTree
    others: Mapping[str, PyTree]


@dataclass(frozen=True)
class Results:
    """The results of a ``shard_map``, its equations, the axes of the batch and the collections of the state."""

    results: PyTree
    jaxpr: core.Jaxpr
    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    collections: Mapping[str, PyTree]

    @cached_property
    def equations(self) -> Equations:
        """The axes along which results and marked values differ, read off the equations."""
        return read_equations(self.jaxpr)


class LossOfDevice(NamedTuple):
    """A loss, or a weight, of this device; ``what`` names it."""

    value: jax.Array
    axes: tuple[str, ...]
    what: str


class Differentiated(NamedTuple):
    """A call ``loss(*args)`` that was differentiated, and the paths of leaves that it gathers in a branch."""

    gathered_in_branches: Sequence[str]
    loss: Callable[..., Loss]
    args: tuple[PyTree, ...]
    axes: tuple[str, ...]


class Averaged(NamedTuple):
    """Floats beside the loss, at ``paths``, which are averaged over ``over`` minibatches of devices.

    ``jaxpr()`` has the equations of which these floats are the results.
    """

    paths: tuple[str, ...]
    over: int
    weighted: bool
    jaxpr: Callable[[], Any]


class JittedStep(NamedTuple):
    """A step that is called: the layout of its batch, and the names of its arguments by place.

    Attributes:
      needed: the arguments without a default.
      donated: the arguments whose memory a call takes over.
      counting: the names of values that count rows which only pad; see ``counting_padding``.
      seen: what needs no second look in later calls.
    """

    layout: BatchLayout
    arguments: tuple[str, ...]
    needed: tuple[str, ...]
    donated: Sequence[str]
    counting: Callable[[PyTree, tuple[Any, ...], dict[str, Any]], dict[str, list[str]]]
    seen: set[object]


class JittedCall(NamedTuple):
    """A call of a step: its arguments, as they came and by name, and the error that JAX has raised."""

    step: JittedStep
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: dict[str, Any]
    error: Exception | None = None


CHECKS: list[TrainingCheck] = []  # filled by ``checks``


def run_checks(moment: Moment, context: Any) -> None:
    """Runs the checks of a moment in the order of the table."""
    for check in CHECKS:
        if check.moment == moment:
            check.looks(context)
