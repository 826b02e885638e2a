"""``make_eval_step``: forward pass on each device's shard of a batch, accumulated into the state of a metric.

    state, batch  -- gather, forward -->  observed  -- metric.update -->  local      on each device, no reduction

Parameters stay sharded and are gathered module by module as in training; nothing is saved for a backward pass. Each
device stores the metric state of its local rows. At the end ``make_log_step`` reduces it with one collective.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from xlstm_jax.accelerators import resolved_on
from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.boxes import boxes_without_constraints
from xlstm_jax.distributed.data_parallel.extension import with_extensions
from xlstm_jax.distributed.data_parallel.trees import readable
from xlstm_jax.distributed.data_parallel.wire.communication import set_context
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS, RunningLoss
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout, auto_mesh, batch_layout
from xlstm_jax.distributed.metrics.pure_metric import Local, PureMetric
from xlstm_jax.distributed.training.arguments import (
    EVAL_FN,
    ExtraTrees,
    check_loss_fn,
    collections_of,
    frozen_trees,
)
from xlstm_jax.distributed.training.batch_axes import StepOfState
from xlstm_jax.distributed.training.constant_arrays import with_constants
from xlstm_jax.distributed.training.gradients import explained, traced_call
from xlstm_jax.distributed.training.loss import ApplyFn
from xlstm_jax.distributed.training.moments import CheckedStep, EvaluationTrace, Results, run_checks
from xlstm_jax.distributed.training.padded_rows import OBSERVED, counting_padding, with_names
from xlstm_jax.distributed.training.single_axes import with_single_axes
from xlstm_jax.formatting import kind_of

ARGUMENTS = ("state", "batch", "local")


class EvalFn(Protocol):
    """Protocol of the user's function for ``make_eval_step``: returns observations (values, weights) of local rows.

    Collections of the state come last; further trees are passed by name.
    """

    def __call__(
        self, params: PyTree, apply_fn: ApplyFn, batch: PyTree, /, *collections: Any, **extra_trees: Any
    ) -> Mapping[str, Any]: ...


class EvalStep(jax.stages.Wrapped, Protocol):
    """Type of the step that ``make_eval_step`` returns: a ``jax.jit`` function with ``lower`` and ``trace``."""

    def __call__(self, state: Any, batch: PyTree, local: Local, /, *, extra_trees: ExtraTrees = None) -> Local: ...


def make_eval_step(
    eval_fn: EvalFn,
    mesh: Mesh | AbstractMesh,
    batch_axes: AxisNames | None = None,
    *,
    metric: PureMetric,
    batch_spec: PyTree | None = None,
    layout: str | None = None,
    check_vma: bool = True,
    compiler_options: str | Mapping[str, Any] | None = None,
) -> EvalStep:
    """Makes an evaluation step: a forward pass on the sharded training state, whose results update a metric.

    >>> from xlstm_jax.distributed.metrics import WeightedMean, make_log_step
    >>> def eval_fn(params, apply_fn, batch):
    ...     return {"values": apply_fn({"params": params}, batch["x"]).mean(-1), "weight": batch["weight"]}
    >>> model, axes = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), ("dp", "fsdp")
    >>> state = create_train_state(model, optax.sgd(0.1), mesh, jax.random.key(0), jnp.ones((8, 32)), batch_axes=axes)
    >>> metric = WeightedMean()
    >>> step, local = make_eval_step(eval_fn, mesh, axes, metric=metric), metric.empty(axes, mesh)
    >>> for rows in 16, 5:  # the last batch has fewer rows; it is padded, with weight 0
    ...     batch, weight = shard_batch({"x": np.zeros((rows, 32))}, mesh, axes, pad=16)
    ...     local = step(state, batch | {"weight": weight}, local)
    >>> float(make_log_step(metric, mesh, axes)(local)[0])
    0.0

    A split parameter is gathered once, where its module runs. Nothing is reduced over devices. To evaluate averaged
    parameters, pass ``state.replace(params=average)``. An average kept by the optimizer has the boxes and shardings of
    the parameters, so the step is not compiled again.

    Args:
      eval_fn: ``eval_fn(params, apply_fn, batch)`` on this device's shard of the batch, returning a dict of keyword
        arguments for ``metric.update``: values per row and the weights of the rows, rather than means. If
        ``state.collections`` is not empty, ``eval_fn(params, apply_fn, batch, collections)``. Trees passed as
        ``step(..., extra_trees={"teacher": params})`` arrive by name: ``eval_fn(params, apply_fn, batch, *, teacher)``.
      mesh, batch_axes, batch_spec, layout, check_vma, compiler_options: as in ``make_train_step``.
      metric: updated on each device with the local observations, without communication. Combine several metrics in a
        ``Compose``.
    Returns:
      ``step(state, batch, local) -> local``, a ``jax.jit`` function. ``state`` is a ``TrainState`` or any object with
      ``params`` and ``apply_fn``, and is not donated. ``batch`` is as in a training step. ``local`` is donated: create
      the first with ``metric.empty(batch_axes, mesh)``, and read the last with ``make_log_step``.
    Raises:
      ValueError: (at the call) the devices do not divide a leaf of the batch, or leaves have different numbers of rows;
        state or ``local`` are on a mesh of other axes, or were donated to an earlier step. Names leaf and both numbers.
      TypeError: ``eval_fn`` is not a function, ``metric`` not a ``PureMetric``; or (at the call) the state has no
        parameters, or ``eval_fn`` did not return a dict, or its keyword arguments do not match ``extra_trees``.
    """
    mesh = auto_mesh(mesh)
    reads_axes = batch_axes is None and batch_spec is None  # off the first state
    of_batch = batch_layout(mesh, mesh.axis_names if reads_axes else batch_axes, batch_spec, layout)
    check_loss_fn(eval_fn, "make_eval_step", EVAL_FN)
    if not isinstance(metric, PureMetric):
        raise TypeError(f"metric={kind_of(metric)} is no PureMetric; pass WeightedMean(), or several as a Compose.")

    def step_of(of_batch: BatchLayout) -> CheckedStep:
        evaluation = _Evaluation(eval_fn, metric, of_batch, check_vma)
        watched = replace(evaluation, is_watched=True)
        return CheckedStep(
            evaluation.step,
            of_batch,
            ARGUMENTS,
            arguments_replaced=lambda state, batch, local, **_: local,
            counting=partial(counting_padding, watched.step, metric, of_batch.row_axes),
            donate_argnums=ARGUMENTS.index("local"),
            compiler_options=resolved_on(mesh, compiler_options),
        )

    made = step_of(of_batch)
    return StepOfState(lambda axes: step_of(batch_layout(mesh, axes, tokens=layout)), mesh) if reads_axes else made


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """Options of ``make_eval_step``, and the step to compile (``step``).

    With ``is_watched`` (for the analysis of padded rows) observations get names in the jaxpr.
    """

    eval_fn: Callable[..., Any]
    metric: PureMetric
    layout: BatchLayout
    check_vma: bool
    is_watched: bool = False

    def step(self, state: Any, batch: PyTree, local: Local, *, extra_trees: ExtraTrees = None) -> Local:
        """Runs the checks of an evaluation, and updates the metric state of each device with the device's rows.

        Returns the new metric state, of the structure of ``local``. ``make_eval_step`` compiles this function;
        arguments are those of the step: global arrays, outside ``shard_map``.
        """
        eval_fn = with_constants(self.eval_fn, state, False, returns_pair=False)
        if eval_fn is not self.eval_fn:
            return replace(self, eval_fn=eval_fn).step(state, batch, local, extra_trees=extra_trees)
        extra_trees = {} if extra_trees is None else extra_trees
        trace = EvaluationTrace(self.eval_fn, self.layout, state, batch, local, extra_trees)
        run_checks("trace of an evaluation", trace)
        variables = {"params": state.params, "collections": collections_of(state), "extra_trees": extra_trees}
        # Each device has a local metric state, so the state is split over every axis of the batch.
        mesh, of_local = self.layout.mesh, PartitionSpec(self.layout.axes)
        layout = self.layout.of_batch(batch)
        in_specs = (trees.partition_specs(variables, mesh), layout.specs(batch, spread=True), of_local)
        on_device = partial(self._on_device, state.apply_fn, layout)
        on_mesh = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=of_local, check_vma=self.check_vma)
        returned, jaxpr = traced_call(on_mesh, (variables, batch, local))
        run_checks("results", Results(returned, jaxpr, mesh, self.layout.axes, {}))
        return returned

    def _on_device(
        self, apply_fn: ApplyFn, layout: BatchLayout, variables: dict[str, PyTree], batch: PyTree, local: Local
    ) -> Local:
        """Returns the metric state ``local`` of this device, updated with the device's rows of ``batch``.

        Runs inside ``shard_map``. ``apply_fn`` is the model's, ``layout`` is the layout of the batch, and ``variables``
        is a dict with the trees "params", "collections" and "extra_trees".
        """
        with layout.entered(batch) as batch:
            return self._observed(apply_fn, variables, batch, local)

    def _observed(self, apply_fn: ApplyFn, variables: dict[str, PyTree], batch: PyTree, local: Local) -> Local:
        """Calls ``eval_fn`` on ``batch``, this device's rows; returns ``local`` updated with its observations.

        ``variables`` is a dict with the trees "params", "collections" and "extra_trees".

        Raises:
          TypeError: ``eval_fn`` did not return a dict.
        """
        # eval_fn of a state without collections takes one argument fewer.
        collections = (readable(variables["collections"]),) if variables["collections"] else ()
        # With check_vma=False, layers look up the axes of the batch here, as in training.
        running = RunningLoss(evaluated_axes=self.layout.axes)
        with explained(), set_context(RUNNING_LOSS, running), boxes_without_constraints():
            observed = with_single_axes(with_extensions(self.eval_fn), self.layout.axes)(
                variables["params"], apply_fn, batch, *collections, **frozen_trees(variables["extra_trees"])
            )
        if not isinstance(observed, Mapping):
            raise TypeError(
                f"eval_fn returned {kind_of(observed)}, and a dict of the arguments of metric.update is expected, as "
                "{'values': losses, 'weight': batch['weight']}."
            )
        if self.is_watched:
            observed = with_names(dict(observed), OBSERVED)
        return self.metric.update(local, **observed)
