"""Moments of a training at which checks run, the table of checks, and ``CheckedStep``, the step that users call.

  run_checks(moment, context)   called where states, steps, gradients and evaluations are made
  CHECKS                        the rows (moment, function, page of docs/), registered by ``training.checks``
  CheckedStep                   the ``jax.jit`` function of a step, with checks before and after each call

A check raises for a certain mistake, warns of a possible mistake, and changes no number.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from xlstm_jax.common_types import Model, PyTree
from xlstm_jax.distributed.data_parallel.modules import Stacks
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout
from xlstm_jax.distributed.metrics.pure_metric import PureMetric
from xlstm_jax.distributed.optimizers.learning_rate import LearningRate
from xlstm_jax.distributed.training.arguments import ARGUMENTS
from xlstm_jax.distributed.training.loss import Loss, LossFunction
from xlstm_jax.distributed.training.nan_inputs import DELETED, looks_for_nans, naming_nans
from xlstm_jax.distributed.training.varying import OPAQUE, Equations, read_equations
from xlstm_jax.equations import all_equations
from xlstm_jax.explicit_axes import on_auto_axes, on_set_mesh, outside_set_mesh, typed_like
from xlstm_jax.introspection import TWO_MESHES
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
    # The context of the next six moments is a JittedCall. "names", "new call" and "placed" run for the first call of a
    # kind: calls of a kind have the same argument names, and batches with the same structure and placement.
    "names",  # when a step, its ``lower`` or a similar method is called
    "call",  # when a step is called
    "new call",  # when a step is called
    "placed",  # before the arguments are passed to JAX
    "refused",  # after JAX has raised an error
    "returned",  # after the call has returned
    "in a program",  # after a call was traced in a program of the user, under explicit axes: CallInProgram
    "update",  # when ``apply_gradients`` of a state is called: AppliedGradients
    "failure",  # after JAX has raised an error inside a loss function: the exception
]


class TrainingCheck(NamedTuple):
    """Row of the table: a function, the moment at which the function is called, and the page of docs/ with details.

    Attributes:
      reads: attributes of the context that the function takes, as "step.extra_trees"; () to take the context itself.
      needs: attribute of the context; if the attribute is empty or None, the check is not called.
      unless: attribute of the context, an option of the user; if the attribute is true, the check is not called.
    """

    moment: Moment
    run_check: Callable[..., None]
    page: str
    reads: tuple[str, ...] = ()
    needs: str = ""
    unless: str = ""


class NewModel(NamedTuple):
    """Argument of checks before initialisation: the model, the mesh and the keys."""

    model: Model
    mesh: Mesh | AbstractMesh
    rng: PyTree
    in_several_processes: bool


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


# Equations of which types do not prove enough: predicates, writes to references, and hidden programs.
BEYOND_TYPES = {"cond", "while", "swap", "addupdate", *OPAQUE}


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

    @property
    def unproved(self) -> bool:
        """True if JAX's types do not prove that results without an axis in their specs are equal along the axis.

        Types prove it if every ``shard_map`` of the program has ``check_vma=True``, and no equation depends on a
        predicate or writes to a reference, of which types say nothing.
        """
        for eqn in all_equations(self.jaxpr.jaxpr.eqns):
            if eqn.primitive.name in BEYOND_TYPES or "_prim" in eqn.params:
                return True
            if eqn.primitive.name == "shard_map" and not eqn.params.get("check_vma"):
                return True
        return False

    @cached_property
    def equations(self) -> Equations:
        """The mesh axes along which each result differs between devices, read off the equations, as ``Equations``.

        Values that ``with_name_for_reader`` has named are included, by name.
        """
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
    """Argument of checks of a call: the step, arguments as passed and by name, and JAX's error, if raised.

    ``is_irregular``: not exactly the needed arguments are passed, by position.
    """

    step: JittedStep
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: dict[str, Any]
    is_irregular: bool
    error: Exception | None = None

    @property
    def placements(self) -> tuple[Any, ...]:
        """The sharding of each leaf of the batch, None for a leaf without; () if no leaf is on a mesh."""
        shardings = tuple(map(sharding_of, jax.tree.leaves(self.named.get("batch"))))
        return shardings if [s for s in shardings if isinstance(s, NamedSharding)] else ()


class CallInProgram(NamedTuple):
    """Argument of checks of a call within a program of the user (``jax.jit``): the equations of the step."""

    jaxpr: Any


def sharding_of(leaf: Any) -> Any:
    """Returns the sharding of a leaf; None for a tracer, and for a leaf without a sharding, such as a NumPy array."""
    return None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)


CHECKS: list[TrainingCheck] = []  # filled by ``checks``


def checks_at(moment: Moment) -> list[TrainingCheck]:
    """Returns the registered checks that run at ``moment``, such as "trace", in the order of the table ``CHECKS``."""
    return [check for check in CHECKS if check.moment == moment]


def run_checks(moment: Moment, context: Any) -> None:
    """Runs the registered checks of ``moment``, such as "trace", in the order of the table ``CHECKS``.

    ``context`` is the object that the checks of the moment read: for "trace" a ``StepTrace``. A check may raise or
    warn.
    """
    run_rows(checks_at(moment), context)


def run_rows(checks: Sequence[TrainingCheck], context: Any) -> None:
    """Runs ``checks`` in order, except checks that do not apply to ``context``, an object with facts on a step, say.

    A check does not apply if the attribute of the context that its field ``needs`` names is empty or None, or if the
    attribute that its field ``unless`` names is true. The function of a check is called with the attributes that its
    field ``reads`` lists; with the context itself if there are none.
    """
    for check in checks:
        if check.needs and not attrgetter(check.needs)(context):
            continue
        if check.unless and attrgetter(check.unless)(context):
            continue
        check.run_check(*([attrgetter(name)(context) for name in check.reads] or [context]))


# ------------------------------------------------------------------------------------------------------ calls of a step


class CheckedStep:
    """Compiled step that checks each call; errors name the argument and leaf at fault.

    Provides the methods of a ``jax.jit`` function: ``lower``, ``trace``, ``eval_shape``, ``clear_cache``.

    Args:
      step: the function to compile.
      layout: the layout of its batch, with the mesh of the step.
      arguments: names of the function's arguments by position.
      arguments_replaced: function of the arguments that returns the arguments that the results replace; see ``like`` of
        ``on_auto_axes``.
      needed: names of the arguments without which a call is refused; None: the arguments without a default.
      counting: ``counting(batch, args, kwargs)`` returns the names of results that ignore the weights of padded rows,
        by kind; see ``counting_padding``.
      options: options of ``jax.jit``.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        layout: BatchLayout,
        arguments: tuple[str, ...] = ARGUMENTS,
        *,
        arguments_replaced: Callable[..., PyTree],
        counting: Callable[[PyTree, tuple[Any, ...], dict[str, Any]], dict[str, list[str]]],
        needed: tuple[str, ...] | None = None,
        **options: Any,
    ):
        functools.update_wrapper(self, step)
        self.options = options
        self._arguments_replaced = arguments_replaced
        self.jitted = jax.jit(on_auto_axes(step, layout.mesh, like=arguments_replaced), **options)
        takes = inspect.signature(step).parameters
        if needed is None:
            needed = tuple(name for name in arguments if takes[name].default is inspect.Parameter.empty)
        donated = [arguments[index] for index in np.atleast_1d(options["donate_argnums"])]
        self._step = JittedStep(layout, arguments, needed, donated, counting, set())
        self._known: set[object] = set()  # the kinds of the calls so far
        self._runs_outside = False  # True: runs as if no mesh with explicit axes were set
        self._before_each, self._after_each = checks_at("call"), checks_at("returned")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.checked_call(self.jitted, *args, **kwargs)

    def checked_call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function`` in place of the compiled step, with the checks of a call of the step; returns its result.

        ``args`` and ``kwargs`` are those of the call. Raises what a check or ``function`` raises; an error of JAX about
        an argument is replaced by an error that names the argument.
        """
        call = self._call(args, kwargs)
        explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
        function = self._where_it_compiles(function) if explicit else function
        # Most checks depend on the kind of a call alone, and a training makes calls of a single kind.
        kind = _kind_of(call, explicit)
        if is_new := kind not in self._known:
            run_checks("names", call)
        run_rows(self._before_each, call)
        if is_new:
            run_checks("new call", call)
        if looks_for_nans():
            # Exclude metrics and moments: a maximum starts at minus infinity.
            params = getattr(call.named.get("state"), "params", None)
            with naming_nans({"batch": call.named.get("batch"), "state.params": params}):
                returned = self._run(call, function, explicit=explicit, is_new=is_new)
        else:
            returned = self._run(call, function, explicit=explicit, is_new=is_new)
        if is_new:
            self._known.add(kind)
        run_rows(self._after_each, call)
        return returned

    def _where_it_compiles(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls ``function`` under the set mesh, or without a mesh if JAX cannot compile there.

        The set mesh is the mesh of ``jax.set_mesh``. Once JAX has refused to compile under it, this and all later calls
        of the step run as if no mesh were set. JAX compiles no callback that returns values (``jax.pure_callback``) in
        a program whose arguments are on explicit axes.
        """

        def called(*args: Any, **kwargs: Any) -> Any:
            if not self._runs_outside:
                try:
                    return function(*args, **kwargs)
                except ValueError as error:  # before the program runs and donates
                    if TWO_MESHES not in str(error):
                        raise
                    self._runs_outside = True
            return outside_set_mesh(function)(*args, **kwargs)

        return called

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._run(self._new_call(args, kwargs), self.jitted.lower)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._run(self._new_call(args, kwargs), self.jitted.trace)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._new_call(args, kwargs), self.jitted.eval_shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` looks these up before `jitted` is set
            raise AttributeError(name)
        return getattr(self.jitted, name)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JittedCall:
        """Returns the ``JittedCall`` of these arguments: as passed, and by name. Names are not checked."""
        named = dict(zip(self._step.arguments, args, strict=False)) | kwargs
        return JittedCall(self._step, args, kwargs, named, bool(kwargs) or len(args) != len(self._step.needed))

    def _new_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JittedCall:
        """Returns the ``JittedCall`` of these arguments, after a check that their names are those of the step.

        Raises:
          TypeError: a needed argument is missing, or an argument is unknown, passed twice, or beyond the last.
        """
        call = self._call(args, kwargs)
        run_checks("names", call)
        return call

    def _run(
        self, call: JittedCall, function: Callable[..., Any], *, explicit: bool = False, is_new: bool = True
    ) -> Any:
        """Returns the result of ``function`` for the arguments of ``call``.

        Where JAX raises, the error is replaced by one that names the argument at fault, if the argument is found. If
        ``explicit`` (the set mesh has explicit axes), arguments and results are placed on the set mesh. If ``is_new``,
        the placement of the batch is checked before.
        """
        if explicit:
            args, kwargs = on_set_mesh((call.args, call.kwargs))
            call = call._replace(args=args, kwargs=kwargs)
        if is_new:
            run_checks("placed", call)
        try:
            returned = function(*call.args, **call.kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            # A step that JAX repeats to find a NaN has donated its arguments itself: `naming_nans` says so.
            if not (DELETED in str(error) and looks_for_nans()):
                run_checks("refused", call._replace(error=error))
            raise
        if not explicit:
            return returned
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(returned)):
            run_checks("in a program", CallInProgram(self.jitted.trace(*call.args, **call.kwargs).jaxpr))
            # Within a user's program results keep the types of the step; on mixed axes these name no sharding.
            return typed_like(returned, self._arguments_replaced(*call.args, **call.kwargs))
        return on_set_mesh(returned)


def _kind_of(call: JittedCall, explicit: bool) -> tuple[Any, ...]:
    """Returns a hashable key of a call: two calls with equal keys need the checks of new calls only once.

    The key has number and names of the arguments, the structure and shardings of the batch, the type of
    ``extra_trees``, and, if ``explicit`` (the set mesh has explicit axes), the set mesh.
    """
    leaves, structure = jax.tree.flatten(call.named.get("batch"))
    # Comparing shardings is faster than reading their specs.
    shardings = tuple(map(sharding_of, leaves))
    mesh = jax.sharding.get_abstract_mesh() if explicit else None
    return len(call.args), tuple(call.kwargs), type(call.kwargs.get("extra_trees")), structure, shardings, mesh
