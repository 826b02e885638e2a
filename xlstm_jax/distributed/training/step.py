"""``make_train_step``: loss and gradients inside ``shard_map``, then the update of the state on global arrays.

``StepOptions.step`` is the function that is compiled. It traces ``accumulated`` (``accumulation``) under ``shard_map``,
and updates the state by ``updated_state``. The checks of ``moments`` run while the step is traced.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, overload

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from xlstm_jax.accelerators import resolved_on
from xlstm_jax.common_types import AxisNames, Metrics, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.extension import with_extensions
from xlstm_jax.distributed.data_parallel.modules import RECORDED_STACKS, Stacks
from xlstm_jax.distributed.data_parallel.wire.collectives import axis_index
from xlstm_jax.distributed.data_parallel.wire.communication import set_context
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout, auto_mesh, batch_layout
from xlstm_jax.distributed.metrics.pure_metric import Local, PureMetric
from xlstm_jax.distributed.optimizers.learning_rate import LearningRate, check_learning_rate, learning_rates
from xlstm_jax.distributed.optimizers.sharded_optimizer import trainable
from xlstm_jax.distributed.optimizers.transforms import GRAD, GRAD_FN, VALUE, VALUE_FN
from xlstm_jax.distributed.training.accumulation import DEFAULT_ACCUMULATION, Accumulation, accumulated
from xlstm_jax.distributed.training.arguments import (
    ExtraTrees,
    check_loss_fn,
    collections_of,
    frozen_trees,
    takes_key,
    without_key,
)
from xlstm_jax.distributed.training.at_params import gradients_at, loss_and_grads_at, loss_at
from xlstm_jax.distributed.training.batch_axes import StepOfState
from xlstm_jax.distributed.training.carries.carry import BatchResult
from xlstm_jax.distributed.training.constant_arrays import with_constants
from xlstm_jax.distributed.training.gradients import LossFunction, traced_call
from xlstm_jax.distributed.training.loss import LossFn, LossOutput
from xlstm_jax.distributed.training.moments import CheckedStep, Results, StepTrace, TracedStep, run_checks
from xlstm_jax.distributed.training.padded_rows import MarkedLoss, counting_padding
from xlstm_jax.distributed.training.single_axes import with_single_axes
from xlstm_jax.distributed.training.state import State, updated_state


class TrainStep(jax.stages.Wrapped, Protocol):
    """Type of the step that ``make_train_step`` returns: a ``jax.jit`` function with ``lower`` and ``trace``."""

    @overload
    def __call__(
        self, state: State, batch: PyTree, rng: jax.Array | None = None, /, *, extra_trees: ExtraTrees = None
    ) -> tuple[State, Metrics]: ...
    @overload
    def __call__(
        self, state: State, batch: PyTree, rng: jax.Array | None, local: Local, /, *, extra_trees: ExtraTrees = None
    ) -> tuple[State, Metrics, Local]: ...


def make_train_step(
    loss_fn: LossFn,
    mesh: Mesh | AbstractMesh,
    batch_axes: AxisNames | None = None,
    num_minibatches: int = 1,
    weighted: bool = False,
    check_vma: bool = True,
    *,
    batch_spec: PyTree | None = None,
    layout: str | None = None,
    has_aux: bool = False,
    metric: PureMetric | None = None,
    accumulation: str = DEFAULT_ACCUMULATION,
    learning_rate: LearningRate | None = None,
    compiler_options: str | Mapping[str, Any] | None = None,
    allow_replicated: bool = False,
) -> TrainStep:
    """Makes a compiled training step: gradients inside ``shard_map``, then the optimizer on global arrays.

    >>> loss_fn = lambda params, apply_fn, batch: jnp.mean(apply_fn({"params": params}, batch) ** 2)
    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> state = create_train_state(model, optax.adam(1e-3), mesh, jax.random.key(0), x)
    >>> state, metrics = make_train_step(loss_fn, mesh)(state, x)
    >>> int(state.step), sorted(metrics)
    (1, ['grad_norm', 'loss'])

    Args:
      loss_fn: ``loss_fn(params, apply_fn, batch, rng)`` on this device's shard of the batch, returning the mean loss,
        or ``(sum, weight)`` with ``weighted``; with ``has_aux`` a pair of the loss and a dict of numbers. If the state
        has collections (``batch_stats``), ``loss_fn(params, apply_fn, batch, rng, collections)`` returns a pair: the
        result above, and the updated collections, equal on every device; see docs/collections.md. A loss that draws
        nothing may leave ``rng`` out: ``loss_fn(params, apply_fn, batch)``, or with collections
        ``loss_fn(params, apply_fn, batch, collections)``.
      mesh: the mesh of the state.
      batch_axes: the axes over which the leading dim of the batch is split, outermost axis first. They must include the
        axes of the wrappers. None: every axis of the mesh, except the axes over which the model itself splits
        parameters; read off the first state that the step is called with.
      num_minibatches, weighted, accumulation: see ``accumulate_gradients``.
      batch_spec: replaces ``batch_axes`` if further dims of the batch are split: a ``PartitionSpec``, as
        ``P(("dp", "fsdp"), "cp")`` for tokens [b, t], or a tree of specs that is a prefix of the batch. Dim 0 holds the
        examples, and is split over the same axes in every leaf. Losses, weights and gradients are reduced over every
        axis of the spec; see docs/context_parallel.md.
      layout: how the tokens of a split sequence are distributed over devices while the step computes: "contiguous", or
        "zigzag", which balances the work of devices under a causal mask. Batches are in natural order all the same: the
        step permutes the split dims itself, and passes the layout to ``context_attention``, ``context_positions`` and
        similar functions. None: "zigzag" for a batch of ``to_zigzag``, else "contiguous".
      check_vma: passed to ``shard_map``.
      has_aux: adds the dict to the metrics. Its floats are averaged like the loss; use ``metrics.cells`` for another
        reduction, as ``{"tokens": Count.of(mask)}``. Integers raise: see ``accumulate_gradients``.
      metric: ``loss_fn`` then returns ``(loss, observed)``, and after every minibatch each device calls
        ``metric.update(local, **observed)`` on its local state, without communication. The step is then ``step(state,
        batch, rng, local) -> (state, metrics, local)``, with ``None`` as ``rng`` if the loss takes no key; create the
        first state with ``metric.empty(axes, mesh)`` for the axes of the batch, and read it with ``make_log_step``.
      learning_rate: adds the ``learning_rate`` of this update to the metrics. Pass the schedule of the optimizer, or
        for groups of parameters a dict of schedules by group name, reported as ``learning_rate/<name>``.
      compiler_options: XLA options for ``jax.jit``; None: XLA's defaults. "auto": the options that the function
        ``compiler_options`` returns for the mesh's chips and slice; "forecast": with ``chosen_by="forecast"``.
      allow_replicated: as for ``create_train_state``.
    Returns:
      ``step(state, batch, rng) -> (state, metrics)``, a ``jax.jit`` function, so that ``step.lower`` works. ``state``
      is donated and keeps its shardings. ``batch`` has global leaves [b, ...]; its scalars are passed to every device
      and minibatch (and must be equal in every process). ``rng`` is folded with step and device, so a single key serves
      the entire run and dropout differs everywhere; a loss without ``rng`` needs no key: ``step(state, batch)``.
      ``step(..., extra_trees={"teacher": params})`` passes further trees to ``loss_fn(params, apply_fn, batch, rng, *,
      teacher)`` by name: parameters of a second model, gathered as their boxes describe, without gradient and not
      donated. Metrics are ``loss`` and ``grad_norm``, the norm over every parameter before the optimizer, float32
      scalars; and the counters of skipped steps, if the optimizer counts them.
    Raises:
      ValueError: ``has_aux`` and ``metric`` together; ``batch_axes`` and ``batch_spec`` together, or an axis missing
        from the mesh. At the call: devices times minibatches do not divide a leaf of the batch, devices do not divide
        another dim of it, a leaf has fewer dims than its spec, or leaves have different numbers of examples; the state
        is on a mesh of other axes, belongs to another optimizer, or was donated before; a leaf of ``extra_trees`` is a
        shard without a box, or belongs to the donated state. Names the leaf and both numbers. Or processes disagree in
        their first batch (scalars, shapes, arrays that are not global): every process raises; if they pass equal rows
        as different parts of the batch, every process warns.
      TypeError: ``loss_fn`` is not a function. At the call: state, batch or rng has another type, ``loss_fn`` takes a
        key and there is no ``rng``, or the names of ``extra_trees`` are not the keyword arguments of ``loss_fn``.
    """
    mesh = auto_mesh(mesh)
    reads_axes = batch_axes is None and batch_spec is None  # off the first state
    of_batch = batch_layout(mesh, mesh.axis_names if reads_axes else batch_axes, batch_spec, layout)
    called = check_loss_fn(loss_fn)
    if learning_rate is not None:
        check_learning_rate(learning_rate)
    if has_aux and metric is not None:
        raise ValueError("has_aux and metric both say what loss_fn returns beside the loss; pass the metric alone.")
    # A metric is updated after each minibatch, so no observation outlives its minibatch.
    fold = None if metric is None else lambda local, observed: metric.update(local, **observed)

    def like(state: PyTree, batch: PyTree, rng: PyTree = None, local: PyTree = None, **_: PyTree) -> tuple[PyTree, ...]:
        """Returns, from the arguments of a step, those that its results replace: (state, spec of metrics[, local]).

        ``local``, the state of a metric, is returned if the step has a metric. Metrics replace no argument: a
        replicated ``PartitionSpec`` is in their place.
        """
        return (state, PartitionSpec()) if metric is None else (state, PartitionSpec(), local)

    def step_of(of_batch: BatchLayout) -> CheckedStep:
        options = StepOptions(
            loss=LossFunction(loss_fn, weighted, has_aux or metric is not None),
            accumulation=Accumulation(of_batch.axes, num_minibatches, accumulation, fold, read_later=True),
            layout=of_batch,
            check_vma=check_vma,
            metric=metric,
            learning_rate=learning_rate,
            allow_replicated=allow_replicated,
        )
        watched = replace(options, loss=MarkedLoss(options.loss.fn, options.loss.weighted, options.loss.has_aux))
        return CheckedStep(
            options.step,
            of_batch,
            arguments_replaced=like,
            counting=partial(counting_padding, watched.step, metric, of_batch.row_axes),
            needed=("state", *called.arguments[2:]),  # batch, and rng if the loss takes a key
            donate_argnums=0 if metric is None else (0, 3),
            compiler_options=None if compiler_options is None else resolved_on(mesh, compiler_options),
        )

    made = step_of(of_batch)
    return StepOfState(lambda axes: step_of(batch_layout(mesh, axes, tokens=layout)), mesh) if reads_axes else made


@dataclass(frozen=True, eq=False)
class StepOptions:
    """Options of ``make_train_step``, and the function to compile (``step``)."""

    loss: LossFunction
    accumulation: Accumulation
    layout: BatchLayout
    check_vma: bool
    metric: PureMetric | None
    learning_rate: LearningRate | None
    allow_replicated: bool

    def step(
        self,
        state: Any,
        batch: PyTree,
        rng: jax.Array | None = None,
        local: PyTree = None,
        *,
        extra_trees: ExtraTrees = None,
    ) -> tuple[Any, ...]:
        """Computes a training step on global arrays; the function that ``make_train_step`` compiles.

        Returns (new state, metrics), or with a metric (new state, metrics, new state of the metric).
        """
        if collections_of(state) and (options_of_state := self.of_state(state, rng)) is not self:
            return options_of_state.step(state, batch, rng, local, extra_trees=extra_trees)
        extra_trees = {} if extra_trees is None else extra_trees
        count, options = self.accumulation.num_minibatches, (self.metric, self.learning_rate, self.allow_replicated)
        trace = StepTrace(self.loss.weighted, self.layout, count, *options, state, batch, rng, local, extra_trees)
        run_checks("trace", trace)
        program = self.program(state, batch, rng, local, extra_trees)
        on_mesh, args = jax.shard_map(program.fn, **program.options), program.args
        with set_context(RECORDED_STACKS, Stacks()) as stacks:
            result, jaxpr = traced_call(on_mesh, args)

        def trace_again() -> None:
            def of_batch() -> BatchResult:  # a new program: JAX keeps the trace of the first
                again = self.program(state, batch, rng, local, extra_trees)
                return jax.shard_map(again.fn, **again.options)(*again.args)

            jax.eval_shape(of_batch)

        run_checks("results", Results(result, jaxpr, self.layout.mesh, self.accumulation.axes, collections_of(state)))
        without_rows = frozenset(
            {axis for axis, size in self.layout.mesh.shape.items() if size > 1} - {*self.layout.axes}
        )
        run_checks("traced", TracedStep(trace, jaxpr, stacks, trace_again, without_rows))
        return self.updated(state, result, lambda params: on_mesh(params, *args[1:]))

    def of_state(self, state: Any, rng: jax.Array | None) -> "StepOptions":
        """Returns the options for ``state``: ``self``, or a copy with a loss function that passes constant arrays on.

        A copy is returned if the state has a single collection, the constant arrays of an NNX model, and the user's
        loss function takes no collections (see ``constant_arrays``). ``rng`` is the key of the step, or None.
        """
        fn = with_constants(self.loss.fn, state, rng is not None, returns_pair=True)
        return self if fn is self.loss.fn else replace(self, loss=replace(self.loss, fn=fn))

    def updated(self, state: Any, result: BatchResult, of_params: Callable[[PyTree], BatchResult]) -> tuple[Any, ...]:
        """Updates ``state``; returns (new state, metrics), and with ``metric=`` also the new state of the metric.

        ``result`` has loss and gradients of the batch. ``of_params(params)`` computes loss and gradients of the batch
        at other parameters, for an optimizer that asks for them.
        """
        # Arrays are global: norms and optimizer moments are computed from unsharded leaves.
        gradients = [leaf.value for _, leaf in trees.sharded_leaves(result.grads) if leaf.is_differentiable]
        metrics = {"loss": result.loss, "grad_norm": trees.l2_norm(gradients)}
        grads, again = trainable(result.grads), partial(loss_and_grads_at, state.params, of_params)
        extra_args = {
            VALUE: result.loss,
            GRAD: grads,
            VALUE_FN: partial(loss_at, again),
            GRAD_FN: partial(gradients_at, again),
        }
        after, of_optimizer = updated_state(state, grads, self.layout.mesh, result.collections, **extra_args)
        metrics |= of_optimizer
        if self.learning_rate is not None:
            metrics |= learning_rates(self.learning_rate, state.opt_state, state.step)
        if self.metric is not None:
            return after, metrics, result.aux
        return after, metrics | (_checked_aux(result.aux, metrics) if self.loss.has_aux else {})

    def program(
        self, state: Any, batch: PyTree, rng: jax.Array | None, local: PyTree, extra_trees: Mapping[str, PyTree]
    ) -> "DeviceProgram":
        """Returns the program of a device, a function for loss and gradients of a batch, with arguments and options.

        The function takes this device's arrays (params, batch, key, local, collections, extra_trees) and returns a
        ``BatchResult``. ``local`` is the state of the metric on this device, None without a metric. ``extra_trees`` are
        further parameters that the loss reads and that the step does not train, by name.

        The arguments of ``program`` are those of the step: global arrays, whose values are not read. ``state`` has the
        parameters, the collections and ``apply_fn``. ``key`` is ``rng`` folded with the step number, or ``None`` if
        ``rng`` is ``None`` or the loss takes no key.
        """
        # `axes` are the batch axes; `replicated` is the spec of replicated values.
        mesh, axes, replicated = self.layout.mesh, self.accumulation.axes, PartitionSpec()
        collections, layout = collections_of(state), self.layout.of_batch(batch)
        # A single key serves the entire run: fold in the step here, the device index in on_device.
        draws = takes_key(self.loss.fn, rng, collections, extra_trees)
        key = None if rng is None or not draws else jax.random.fold_in(rng, state.step)
        specs, of_kept, of_extra_trees = [
            trees.partition_specs(tree, mesh) for tree in (state.params, collections, extra_trees)
        ]
        # Auxiliary numbers are replicated; each device has a local state of a metric.
        of_aux = replicated if self.metric is None else PartitionSpec(axes)

        def on_device(
            params: PyTree,
            batch: PyTree,
            rng: jax.Array | None,
            local: PyTree,
            collections: Mapping[str, PyTree],
            extra_trees: PyTree,
        ) -> BatchResult:
            rng = None if rng is None else jax.random.fold_in(rng, axis_index(axes))
            extra_trees = frozen_trees(extra_trees) if extra_trees else {}
            fn = without_key(self.loss.fn) if rng is None else self.loss.fn
            if collections or extra_trees:  # without these no module of Flax has statistics
                fn = with_extensions(fn)
            if 1 in [mesh.shape[axis] for axis in axes]:
                fn = with_single_axes(fn, axes)

            def loss_fn(params: PyTree, *rest: PyTree) -> LossOutput:
                return fn(params, state.apply_fn, *rest, **extra_trees)

            # Only now is known whether the state has collections: options are made before there is a state.
            loss = replace(self.loss, fn=loss_fn, has_collections=bool(collections))
            with layout.entered(batch) as batch:
                return accumulated(loss, params, batch, rng, self.accumulation, local, collections)

        in_specs = specs, layout.specs(batch, spread=True), replicated, of_aux, of_kept, of_extra_trees
        out_specs = BatchResult._make((replicated, of_aux, specs, of_kept))
        options = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs, "check_vma": self.check_vma}
        return DeviceProgram(on_device, (state.params, batch, key, local, collections, extra_trees), options)


class DeviceProgram(NamedTuple):
    """Function ``fn`` that each device runs on its rows of a batch, with arguments and options of ``jax.shard_map``.

    ``jax.shard_map(fn, **options)(*args)`` runs the function on all devices: ``args`` are global arrays, ``options``
    are mesh, ``in_specs``, ``out_specs`` and ``check_vma``.
    """

    fn: Callable[..., Any]
    args: tuple[PyTree, ...]
    options: Mapping[str, Any]


def _checked_aux(aux: Any, metrics: Metrics) -> Metrics:
    if not isinstance(aux, dict):
        raise TypeError(f"has_aux=True: loss_fn must return (loss, dict of numbers), not (loss, {type(aux).__name__}).")
    if taken := sorted(aux.keys() & metrics.keys()):
        raise ValueError(f"the auxiliary output has the name {taken[0]!r}, as has a metric of the step; rename it.")
    return aux
