"""Moments of a training at which checks run, the table of checks, and ``CheckedStep``, the step that users call.

  run_checks(moment, context)   called where states, steps, gradients and evaluations are made
  CHECKS                        the rows (moment, function, page of docs/), registered by ``training.checks``
  CheckedStep                   the ``jax.jit`` function of a step, with checks before and after each call

A check raises for a certain mistake, warns of a possible mistake, and changes no number.
"""

import contextlib
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
from xlstm_jax.distributed.data_parallel.trees import paths_of_replicated, sharded_leaves
from xlstm_jax.distributed.data_parallel.wire.collectives import value_dtype
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout
from xlstm_jax.distributed.metrics.pure_metric import PureMetric
from xlstm_jax.distributed.optimizers.learning_rate import LearningRate
from xlstm_jax.distributed.optimizers.transforms import HOLDERS_OF_MASKS, Part, parts
from xlstm_jax.distributed.training.arguments import ARGUMENTS
from xlstm_jax.distributed.training.nan_inputs import DELETED, looks_for_nans, naming_nans
from xlstm_jax.distributed.training.varying import OPAQUE, Equations, read_equations
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
    "loss",  # after a loss function has returned, unless the type of the loss shows no mistake: LossOfDevice
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

    @property
    def replicated(self) -> list[str]:
        """The paths of the parameters that no axis splits; [] on a mesh of a single device."""
        return paths_of_replicated(self.params, self.mesh)

    @property
    def narrow(self) -> list[str]:
        """The paths of the trained parameters of 16 bits or less."""
        leaves = [(path, leaf) for path, leaf in sharded_leaves(self.params) if leaf.is_differentiable]
        return [path for path, leaf in leaves if value_dtype(leaf.value).itemsize <= 2]

    @property
    def with_mask(self) -> list[Part]:
        """The parts of the optimizer that may have a mask of weight decay."""
        return [part for part in parts(self.tx) if part.name in HOLDERS_OF_MASKS]


@dataclass(frozen=True)
class StepTrace:
    """Argument of checks while a step is traced: the arguments of ``make_train_step`` and of the step."""

    weighted: bool
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

    ``trace_again()`` traces loss and gradients once more, for checks that observe modules. ``axes_without_rows`` are
    the mesh axes of several devices over which the batch is not split.
    """

    step: StepTrace
    jaxpr: core.Jaxpr
    stacks: Stacks
    trace_again: Callable[[], None]
    axes_without_rows: frozenset[str]

    @property
    def replicated(self) -> list[str]:
        """The paths of the parameters of the state that no axis splits; [] on a mesh of a single device."""
        return paths_of_replicated(self.step.state.params, self.step.layout.mesh)


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
        jaxprs = [self.jaxpr.jaxpr]
        for jaxpr in jaxprs:  # those in the parameters of equations are added at the end
            for eqn in jaxpr.eqns:
                if eqn.primitive.name in BEYOND_TYPES or "_prim" in eqn.params:
                    return True
                if eqn.primitive.name == "shard_map" and not eqn.params.get("check_vma"):
                    return True
                if eqn.params:  # most equations have none
                    jaxprs += [inner for inner in core.jaxprs_in_params(eqn.params) if inner not in jaxprs]
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
    loss: Callable[..., Any]
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

    Attributes:
      is_irregular: not exactly the needed arguments are passed, by position.
      placements: for the moment "placed" the sharding of each leaf of the batch, None for a leaf without; () if no leaf
        is on a mesh.
    """

    step: JittedStep
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: dict[str, Any]
    is_irregular: bool
    placements: tuple[Any, ...] = ()
    error: Exception | None = None


class CallInProgram(NamedTuple):
    """Argument of checks of a call within a program of the user (``jax.jit``): the equations of the step."""

    jaxpr: Any


CHECKS: list[TrainingCheck] = []  # filled by ``checks``


def run_checks(moment: Moment, context: Any, table: Sequence[TrainingCheck] | None = None) -> None:
    """Runs the registered checks of ``moment``, such as "trace", in the order of the table ``CHECKS``.

    ``context`` is the object that the checks of the moment read: for "trace" a ``StepTrace``. A check may raise or
    warn. The function of a check is called with the attributes that its field ``reads`` lists; with the context itself
    if there are none. ``table`` has the checks to choose from; None: ``CHECKS``.
    """
    for check in CHECKS if table is None else table:
        if check.moment != moment:
            continue
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
        self._checks_of_each_call = [check for check in CHECKS if check.moment in ("call", "returned")]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.checked_call(self.jitted, *args, **kwargs)

    def checked_call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function`` in place of the compiled step, with the checks of a call of the step; returns its result.

        ``args`` and ``kwargs`` are those of the call. Raises what a check or ``function`` raises; an error of JAX about
        an argument is replaced by an error that names the argument.
        """
        return self._run(function, args, kwargs, is_call=True)

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
        return self._run(self.jitted.lower, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._run(self.jitted.trace, args, kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.jitted.eval_shape, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` looks these up before `jitted` is set
            raise AttributeError(name)
        return getattr(self.jitted, name)

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_call: bool = False
    ) -> Any:
        """Returns ``function(*args, **kwargs)``, with the checks of the names and of the placement of the batch before.

        Where JAX raises, the error is replaced by one that names the argument at fault, if the argument is found. If
        ``is_call`` (a call of the step, not ``lower``, say), the further checks of a call run before and after, and if
        the set mesh has explicit axes, arguments and results are placed on the set mesh.

        Raises:
          TypeError: a needed argument is missing, or an argument is unknown, passed twice, or beyond the last.
        """
        # Describe the call for the checks. Names are not checked yet.
        named = dict(zip(self._step.arguments, args, strict=False)) | kwargs
        leaves, structure = jax.tree.flatten(named.get("batch"))
        shardings = tuple([None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None) for leaf in leaves])
        is_irregular = bool(kwargs) or len(args) != len(self._step.needed)
        call = JittedCall(self._step, args, kwargs, named, is_irregular)

        # Most checks depend on the kind of a call alone, and a training makes calls of a single kind: of one number and
        # one set of names of arguments, one structure and placement of batches, and under one mesh with explicit axes.
        # Comparing shardings is faster than reading their specs.
        set_mesh = jax.sharding.get_abstract_mesh()
        explicit = is_call and AxisType.Explicit in set_mesh.axis_types
        mesh = set_mesh if explicit else None
        kind = len(args), tuple(kwargs), type(kwargs.get("extra_trees")), structure, shardings, mesh
        is_new = not is_call or kind not in self._known
        if is_new:
            run_checks("names", call)
        if is_call:
            run_checks("call", call, self._checks_of_each_call)
            if is_new:
                run_checks("new call", call)

        # Under the options of JAX that look for NaNs, an error names the argument that has one. Exclude metrics and
        # moments: a maximum starts at minus infinity.
        nans_are_named: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if is_call and looks_for_nans():
            params = getattr(named.get("state"), "params", None)
            nans_are_named = naming_nans({"batch": named.get("batch"), "state.params": params})
        with nans_are_named:
            if explicit:
                function = self._where_it_compiles(function)
                args, kwargs = on_set_mesh((args, kwargs))
            if is_new:
                are_placed = [sharding for sharding in shardings if isinstance(sharding, NamedSharding)]
                run_checks("placed", call._replace(placements=shardings if are_placed else ()))
            try:
                returned = function(*args, **kwargs)
            except (TypeError, ValueError, RuntimeError) as error:
                # A step that JAX repeats to find a NaN has donated its arguments itself: `naming_nans` says so.
                if not (DELETED in str(error) and looks_for_nans()):
                    run_checks("refused", call._replace(error=error))
                raise
            if explicit and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(returned)):
                run_checks("in a program", CallInProgram(self.jitted.trace(*args, **kwargs).jaxpr))
                # Within a user's program results keep the types of the step; on mixed axes these name no sharding.
                returned = typed_like(returned, self._arguments_replaced(*args, **kwargs))
            elif explicit:
                returned = on_set_mesh(returned)

        if is_call:
            self._known.add(kind)
            run_checks("returned", call, self._checks_of_each_call)
        return returned
