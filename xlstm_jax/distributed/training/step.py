"""Training on sharded parameters: the model's start, its gradients, and a ready-made step.

  init_sharded          values of the plain model's init, each device computing the slices that it keeps
  value_and_grad        inside shard_map: loss and gradient of the mean over all devices (in ``gradients``)
  accumulate_gradients  the same over minibatches, one after the other
  create_train_state    init_sharded, and an optimizer state that is split like the parameters
  abstract_train_state  the same without a value: what a checkpoint is restored into
  make_train_step       gradients inside shard_map, the optimizer outside of it in the same jit

The optimizer sees global arrays without boxes. A norm is then the norm, a factored moment sees its whole matrix, and
any optax transform does on shards what it does on one device; XLA adds the few scalars or rows that must travel for it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from xlstm_jax.common_types import AxisNames, Metrics, PyTree
from xlstm_jax.distributed.data_parallel.boxes import leaves_with_path, partition_specs
from xlstm_jax.distributed.device_mesh.checks import auto_mesh, check_no_explicit_mesh, mesh_axes
from xlstm_jax.distributed.hardware.xla_options import resolved
from xlstm_jax.distributed.metrics.pure_metric import PureMetric
from xlstm_jax.distributed.optimizers.nonfinite import skip_counts
from xlstm_jax.distributed.optimizers.norms import global_norm
from xlstm_jax.distributed.optimizers.state import apply_updates, trainable, with_trainable
from xlstm_jax.distributed.training.accumulation import (
    ACCUMULATION,
    accumulate_gradients,
    check_accumulation,
    check_count,
    check_divides,
)
from xlstm_jax.distributed.training.gradients import LossFn, fold_rng_over_axis


def make_train_step(
    loss_fn: LossFn,
    mesh: Mesh,
    batch_axes: AxisNames,
    num_minibatches: int = 1,
    weighted: bool = False,
    check_vma: bool = True,
    *,
    has_aux: bool = False,
    metric: PureMetric | None = None,
    accumulation: str = ACCUMULATION[0],
    compiler_options: str | Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The training step: forward and backward inside ``shard_map``, the optimizer outside, all in one ``jit``.

    Args:
      loss_fn: ``loss_fn(params, apply_fn, batch, rng)`` on this device's part of the batch, returning the mean loss, or
        ``(sum, weight)`` with ``weighted``; with ``has_aux`` a pair of that and a dict of numbers.
      mesh: the mesh of the state.
      batch_axes: all the axes that the batch is split over; its leading dim is, the first axis outermost. The axes of
        the wrappers must be among them.
      num_minibatches: m parts of each device's batch, one after the other; see ``accumulate_gradients``.
      weighted: see ``value_and_grad``.
      check_vma: passed to ``shard_map``.
      has_aux: the dict is averaged like the loss and joins the metrics.
      metric: takes in what ``loss_fn`` returns beside the loss, which then is ``(loss, observed)``: ``observed`` are
        the keyword arguments of ``metric.update``, called after every minibatch on this device's part, and communicates
        nothing. The step takes and returns the metric's ``Local`` state as its last: ``step(state, batch, rng, local)
        -> (state, metrics, local)``; begin with ``metric.empty(batch_axes, mesh)``, read with ``make_log_step``.
      accumulation: when gradients of minibatches are reduced; see ``accumulate_gradients``.
      compiler_options: XLA's, for ``jax.jit``; "auto": those of ``compiler_options(device_kind)`` for the mesh's chips,
        which hide collectives behind computation. None: XLA's defaults.
    Returns:
      ``step(state, batch, rng) -> (state, metrics)``, a ``jax.jit`` function, so that ``step.lower`` works. ``state``
      is donated and comes back with the sharding that ``create_train_state`` gave it; ``batch`` has global leaves [b,
      ...]; ``rng`` is folded with the step and the device, so one key serves a whole run and dropout differs
      everywhere. Metrics are ``loss`` and ``grad_norm``, the norm over all parameters before the optimizer, float32
      scalars; and the counters of ``skip_nonfinite``, where the optimizer has it around it.
    Raises:
      ValueError: ``has_aux`` and ``metric`` together; or (at the call) devices or minibatches do not divide the batch:
        names the leaf and both numbers.
    """
    mesh = auto_mesh(mesh)
    axes = mesh_axes(mesh, batch_axes, "batch_axes")
    check_count(num_minibatches)
    check_accumulation(accumulation)
    if has_aux and metric is not None:
        raise ValueError("has_aux and metric both say what loss_fn returns beside the loss; a metric averages, too.")
    options = {"num_minibatches": num_minibatches, "accumulation": accumulation, "weighted": weighted}
    options["has_aux"] = has_aux or metric is not None
    loss_and_grads = _loss_and_grads_on(mesh, loss_fn, axes, check_vma, options, metric)

    def step(state, batch, rng, local=None):
        check_no_explicit_mesh()
        _check_batch(batch, {axis: mesh.shape[axis] for axis in axes}, num_minibatches)
        rest = (state.apply_fn, batch, jax.random.fold_in(rng, state.step), local)
        (loss, aux), grads = loss_and_grads(state.params, *rest)
        metrics = {"loss": loss, "grad_norm": global_norm(grads)}
        value_fn = _value_fn(state.params, lambda params: loss_and_grads(params, *rest))
        state = apply_updates(state, grads, loss, value_fn, mesh)
        metrics |= skip_counts(state.opt_state)
        if metric is not None:
            return state, metrics, aux
        return state, metrics | (_checked_aux(aux, metrics) if has_aux else {})

    return jax.jit(
        step, donate_argnums=0 if metric is None else (0, 3), compiler_options=_options_of(mesh, compiler_options)
    )


def _options_of(mesh: Mesh, options: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if options == "auto" and isinstance(mesh, AbstractMesh):
        raise ValueError(
            "compiler_options='auto' needs devices, and this mesh is abstract. Pass "
            "compiler_options(device_kind), or hand the options to forecast."
        )
    return resolved(options, "" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].device_kind)


def _loss_and_grads_on(
    mesh: Mesh,
    loss_fn: LossFn,
    axes: tuple[str, ...],
    check_vma: bool,
    options: dict[str, Any],
    metric: PureMetric | None,
) -> Callable[..., Any]:
    """``accumulate_gradients`` as a function of global arrays.

    Returns:
      ``(params, apply_fn, batch, rng, local) -> ((loss, aux), grads)``; ``aux`` is None where the loss function has
      none, and the new state of the metric where there is one.
    """
    split = PartitionSpec(tuple(axis for axis in axes if mesh.shape[axis] > 1))  # see partitioning.leaf_spec
    fold = None if metric is None else lambda local, observed: metric.update(local, **observed)
    aux_spec = PartitionSpec() if metric is None else PartitionSpec(axes)

    def loss_and_grads(params, apply_fn, batch, rng, local):
        def per_device(params, batch, rng, local):
            def loss(params, minibatch, rng):
                return loss_fn(params, apply_fn, minibatch, rng)

            rng = fold_rng_over_axis(rng, axes)
            loss, grads = accumulate_gradients(loss, params, batch, rng, axes, fold_aux=fold, carry=local, **options)
            return (loss if options["has_aux"] else (loss, None)), grads

        specs = partition_specs(params, mesh)
        places = {
            "in_specs": (specs, split, PartitionSpec(), aux_spec),
            "out_specs": ((PartitionSpec(), aux_spec), specs),
        }
        return jax.shard_map(per_device, mesh=mesh, check_vma=check_vma, **places)(params, batch, rng, local)

    return loss_and_grads


def _checked_aux(aux: Any, metrics: Metrics) -> Metrics:
    if not isinstance(aux, dict):
        raise TypeError(
            f"has_aux=True: loss_fn must return (loss, dict of numbers), its second is {type(aux).__name__}."
        )
    if taken := sorted(aux.keys() & metrics.keys()):
        raise ValueError(
            f"the auxiliary output has the name {taken[0]!r}, which the step's own metrics have; rename it."
        )
    return aux


def _check_batch(batch: PyTree, axis_sizes: dict[str, int], num_minibatches: int) -> None:
    devices = math.prod(axis_sizes.values())
    divisor = f"the mesh of {axis_sizes}, {devices} devices"
    if num_minibatches > 1:
        divisor += f" times num_minibatches={num_minibatches}, {devices * num_minibatches} parts in all,"
    for path, leaf in leaves_with_path(batch):
        check_divides(f"batch['{path}']", np.shape(leaf), devices * num_minibatches, divisor)


def _value_fn(like: PyTree, loss_and_grads: Callable[[PyTree], Any]) -> Callable[[PyTree], jax.Array]:
    """The loss as a function of what the optimizer sees, for those that search along a line (L-BFGS).

    It carries its gradient as a rule of its own. Differentiated from outside, ``shard_map`` would hand each device 1/N
    of the cotangent, and the means inside would divide by N once more.
    """

    def both(params):
        (loss, _), grads = loss_and_grads(with_trainable(like, params))
        return loss, trainable(grads)

    @jax.custom_vjp
    def value(params):
        return both(params)[0]

    value.defvjp(both, lambda grads, cotangent: (jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), grads),))
    return value
