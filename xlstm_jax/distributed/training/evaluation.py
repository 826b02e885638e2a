"""``make_eval_step``: forward only, on each device's shard of a batch, into the state of a metric.

    state, batch  -- gather, forward -->  observed  -- metric.update -->  local      on each device, no reduction

Parameters stay sharded, and are gathered module by module as in training; nothing is kept for a backward pass. Each
device keeps the state of the metric over its own rows. At the end ``make_log_step`` reduces it with one collective.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from xlstm_jax.accelerators import resolved_on
from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import placement
from xlstm_jax.distributed.data_parallel.trees import readable
from xlstm_jax.distributed.data_parallel.unconstrained_boxes import boxes_without_constraints
from xlstm_jax.distributed.data_parallel.wire.tracing import RunningLoss, inside_loss
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout, batch_layout
from xlstm_jax.distributed.device_mesh.checks import auto_mesh
from xlstm_jax.distributed.metrics.pure_metric import Local, PureMetric
from xlstm_jax.distributed.training.arguments import (
    EVAL_FN,
    Others,
    check_loss_fn,
    collections_of,
    frozen_trees,
)
from xlstm_jax.distributed.training.checked_step import CheckedStep
from xlstm_jax.distributed.training.gradients import explained, traced_call
from xlstm_jax.distributed.training.loss import ApplyFn
from xlstm_jax.distributed.training.moments import EvaluationTrace, Results, run_checks
from xlstm_jax.distributed.training.padded_rows import OBSERVED, counting_padding, with_names
from xlstm_jax.wording import kind_of

ARGUMENTS = ("state", "batch", "local")


class EvalFn(Protocol):
    """What is observed of this device's shard of a batch; collections of the state come last, further trees by name."""

    def __call__(
        self, params: PyTree, apply_fn: ApplyFn, batch: PyTree, /, *collections: Any, **others: Any
    ) -> Mapping[str, Any]: ...


class EvalStep(jax.stages.Wrapped, Protocol):
    """What ``make_eval_step`` returns: a ``jax.jit`` function, which has ``lower`` and ``trace``."""

    def __call__(self, state: Any, batch: PyTree, local: Local, /, *, others: Others = None) -> Local: ...


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
    """The step of an evaluation, on the state of a training as it is: forward inside ``shard_map``, in one ``jit``.

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

    A split parameter is gathered once, where its module runs. Nothing is reduced over devices. To evaluate an average
    of the parameters, pass ``state.replace(params=average)``. An average of ``ema_params`` has the boxes and shardings
    of the parameters: nothing is compiled anew.

    Args:
      eval_fn: ``eval_fn(params, apply_fn, batch)`` on this device's shard of the batch, returning a dict of the keyword
        arguments of ``metric.update``: one value for each row, and the weights of the rows, rather than means. Where
        ``state.collections`` is not empty, ``eval_fn(params, apply_fn, batch, collections)``. Trees that are handed in
        as ``step(..., others={"teacher": params})`` it takes by name, ``eval_fn(params, apply_fn, batch, *, teacher)``.
      mesh, batch_axes, batch_spec, layout, check_vma, compiler_options: as of ``make_train_step``.
      metric: takes in what each device has observed, without communication. Several metrics are a ``Compose``.
    Returns:
      ``step(state, batch, local) -> local``, a ``jax.jit`` function. ``state`` is a ``TrainState``, or anything else
      with ``params`` and ``apply_fn``; it is not donated. ``batch`` is as of a training step. ``local`` is donated:
      begin with ``metric.empty(batch_axes, mesh)``, read with ``make_log_step``.
    Raises:
      ValueError: (at the call) the devices do not divide a leaf of the batch, or leaves have different numbers of rows;
        state or ``local`` lie on a mesh of other axes, or a step before has taken them over. Names leaf and both
        numbers.
      TypeError: ``eval_fn`` is no function, ``metric`` no ``PureMetric``; or (at the call) the state has no parameters,
        or ``eval_fn`` returned no dict, or takes other names than ``others`` has.
    """
    mesh = auto_mesh(mesh)
    of_batch = batch_layout(mesh, batch_axes, batch_spec, layout)
    check_loss_fn(eval_fn, "make_eval_step", EVAL_FN)
    if not isinstance(metric, PureMetric):
        raise TypeError(f"metric={kind_of(metric)} is no PureMetric; pass WeightedMean(), or several as a Compose.")
    evaluation = _Evaluation(eval_fn, metric, of_batch, check_vma)
    watched = replace(evaluation, is_watched=True)
    return CheckedStep(
        evaluation.step,
        of_batch,
        ARGUMENTS,
        counting=partial(counting_padding, watched.step, metric, of_batch.row_axes),
        donate_argnums=ARGUMENTS.index("local"),
        compiler_options=resolved_on(mesh, compiler_options),
    )


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """What ``make_eval_step`` was given; ``step`` is the function that it compiles.

    Where it ``is_watched``, what the metric observes has names in the equations of the step.
    """

    eval_fn: Callable[..., Any]
    metric: PureMetric
    layout: BatchLayout
    check_vma: bool
    is_watched: bool = False

    def step(self, state: Any, batch: PyTree, local: Local, *, others: Others = None) -> Local:
        others = {} if others is None else others
        trace = EvaluationTrace(self.eval_fn, self.layout, state, batch, local, others)
        run_checks("trace of an evaluation", trace)
        variables = {"params": state.params, "collections": collections_of(state), "others": others}
        # Each device has its own state of the metric, so that state is split over all axes of the batch.
        mesh, of_local = self.layout.mesh, PartitionSpec(self.layout.axes)
        layout = self.layout.of_batch(batch)
        in_specs = (placement.partition_specs(variables, mesh), layout.in_specs(batch), of_local)
        on_device = partial(self._on_device, state.apply_fn, layout)
        on_mesh = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=of_local, check_vma=self.check_vma)
        returned, jaxpr = traced_call(on_mesh, (variables, batch, local))
        run_checks("results", Results(returned, jaxpr, mesh, self.layout.axes, {}))
        return returned

    def _on_device(
        self, apply_fn: ApplyFn, layout: BatchLayout, variables: dict[str, PyTree], batch: PyTree, local: Local
    ) -> Local:
        """What runs inside ``shard_map``."""
        with layout.entered(batch) as batch:
            return self._observed(apply_fn, variables, batch, local)

    def _observed(self, apply_fn: ApplyFn, variables: dict[str, PyTree], batch: PyTree, local: Local) -> Local:
        """The state of the metric after this device's part of the batch."""
        # A function for states without collections takes one argument fewer.
        collections = (readable(variables["collections"]),) if variables["collections"] else ()
        # Without types a layer asks here which axes split the batch, as it asks in training.
        with explained(), inside_loss(RunningLoss(evaluated_axes=self.layout.axes)), boxes_without_constraints():
            observed = self.eval_fn(
                variables["params"], apply_fn, batch, *collections, **frozen_trees(variables["others"])
            )
        if not isinstance(observed, Mapping):
            raise TypeError(
                f"eval_fn returned {kind_of(observed)}, and a dict of the arguments of metric.update is expected, as "
                "{'values': losses, 'weight': batch['weight']}."
            )
        if self.is_watched:
            observed = with_names(dict(observed), OBSERVED)
        return self.metric.update(local, **observed)
