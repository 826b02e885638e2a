"""The ready-made step: ``accumulate_gradients`` inside ``shard_map``, and then ``updated_state`` on global arrays."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, overload

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from xlstm_jax.common_types import AxisNames, Metrics, PyTree
from xlstm_jax.distributed.data_parallel import placement
from xlstm_jax.distributed.data_parallel.modules.unit import Stacks, noting_stacks
from xlstm_jax.distributed.device_mesh.checks import auto_mesh, check_no_explicit_mesh, mesh_axes
from xlstm_jax.distributed.hardware.xla_options import resolved_on
from xlstm_jax.distributed.metrics.pure_metric import Local, PureMetric
from xlstm_jax.distributed.optimizers.learning_rate import LearningRate, check_learning_rate, learning_rates
from xlstm_jax.distributed.optimizers.nonfinite import skip_counts
from xlstm_jax.distributed.optimizers.norms import global_norm
from xlstm_jax.distributed.optimizers.state import trainable, with_trainable
from xlstm_jax.distributed.training.accumulation import accumulate_gradients, check_options
from xlstm_jax.distributed.training.checking.arguments import CheckedStep, check_batch, check_call, check_loss_fn
from xlstm_jax.distributed.training.checking.collections import check_takes_collections
from xlstm_jax.distributed.training.checking.comparing.one_device import StepLoss
from xlstm_jax.distributed.training.checking.mistakes import warn_of_idle_axes, warn_of_options
from xlstm_jax.distributed.training.checking.whole_params import warn_if_nothing_is_split, warn_of_gathered_stacks
from xlstm_jax.distributed.training.gradients import LossOutput, fold_rng_over_axis
from xlstm_jax.distributed.training.state import State, collections_of, updated_state
from xlstm_jax.distributed.training.strategies import DEFAULT_ACCUMULATION

ApplyFn = Callable[..., PyTree]


class LossOfParams(Protocol):
    """The loss of this device's shard of the batch."""

    def __call__(self, params: PyTree, apply_fn: ApplyFn, batch: PyTree, rng: jax.Array, /) -> LossOutput: ...


class LossWithCollections(Protocol):
    """The same of a model that keeps collections beside its parameters, and those that it has updated."""

    def __call__(
        self, params: PyTree, apply_fn: ApplyFn, batch: PyTree, rng: jax.Array, collections: PyTree, /
    ) -> tuple[LossOutput, PyTree]: ...


LossFn = LossOfParams | LossWithCollections  # what ``make_train_step`` takes


class TrainStep(jax.stages.Wrapped, Protocol):
    """What ``make_train_step`` returns: a ``jax.jit`` function, which has ``lower`` and ``trace``."""

    @overload
    def __call__(self, state: State, batch: PyTree, rng: jax.Array, /) -> tuple[State, Metrics]: ...
    @overload
    def __call__(
        self, state: State, batch: PyTree, rng: jax.Array, local: Local, /
    ) -> tuple[State, Metrics, Local]: ...


def make_train_step(
    loss_fn: LossFn,
    mesh: Mesh | AbstractMesh,
    batch_axes: AxisNames,
    num_minibatches: int = 1,
    weighted: bool = False,
    check_vma: bool = True,
    *,
    has_aux: bool = False,
    metric: PureMetric | None = None,
    accumulation: str = DEFAULT_ACCUMULATION,
    learning_rate: LearningRate = False,
    compiler_options: str | Mapping[str, Any] | None = None,
    whole_ok: bool = False,
) -> TrainStep:
    """The training step: forward and backward inside ``shard_map``, the optimizer outside, all in one ``jit``.

    >>> loss_fn = lambda params, apply_fn, batch, rng: jnp.mean(apply_fn({"params": params}, batch) ** 2)
    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> state = create_train_state(model, optax.adam(1e-3), mesh, jax.random.key(0), x, batch_axes=("dp", "fsdp"))
    >>> state, metrics = make_train_step(loss_fn, mesh, ("dp", "fsdp"))(state, x, jax.random.key(1))
    >>> int(state.step), sorted(metrics)
    (1, ['grad_norm', 'loss'])

    Args:
      loss_fn: ``loss_fn(params, apply_fn, batch, rng)`` on this device's shard of the batch, returning the mean loss,
        or ``(sum, weight)`` with ``weighted``; with ``has_aux`` a pair of that and a dict of numbers. Where the state
        has collections (``batch_stats``), ``loss_fn(params, apply_fn, batch, rng, collections)``, returning a pair of
        all that and the updated ones, equal on all devices; see docs/collections.md.
      mesh: the mesh of the state.
      batch_axes: all the axes that the batch is split over; its leading dim is, the first axis outermost. The axes of
        the wrappers must be among them.
      num_minibatches, weighted, accumulation: see ``accumulate_gradients``.
      check_vma: passed to ``shard_map``.
      has_aux: the dict joins the metrics. Floats in it are averaged like the loss; ``metrics.cells`` say otherwise, as
        ``{"tokens": Count.of(mask)}``, and integers are refused: see ``accumulate_gradients``.
      metric: ``loss_fn`` then returns ``(loss, observed)``, and after every minibatch each device calls
        ``metric.update(local, **observed)`` on its own state, without communication. The step is then ``step(state,
        batch, rng, local) -> (state, metrics, local)``; begin with ``metric.empty(batch_axes, mesh)``, read with
        ``make_log_step``.
      learning_rate: adds ``learning_rate``, that of this update, to the metrics. Pass the schedule of the optimizer;
        for groups of parameters a dict of schedules by their names, which gives ``learning_rate/<name>``; or True, for
        what ``optax.inject_hyperparams`` keeps in the optimizer's state.
      compiler_options: XLA's, for ``jax.jit``; "auto": those of ``compiler_options`` for the mesh's chips and slice.
      whole_ok: as for ``create_train_state``.
    Returns:
      ``step(state, batch, rng) -> (state, metrics)``, a ``jax.jit`` function, so that ``step.lower`` works. ``state``
      is donated and keeps its shardings; ``batch`` has global leaves [b, ...], and scalars that every device and
      minibatch gets (of several processes each hands in the same); ``rng`` is folded with the step and the device, so
      one key serves a whole run and dropout differs everywhere. Metrics are ``loss`` and ``grad_norm``, the norm over
      all parameters before the optimizer, float32 scalars; and the counters of ``skip_nonfinite``, if any.
    Raises:
      ValueError: ``has_aux`` and ``metric`` together; or (at the call) devices times minibatches do not divide a leaf
        of the batch, or leaves have different numbers of examples; the state lies on a mesh of other axes, belongs to
        another optimizer, or was used already. Names the leaf and both numbers. Or processes differ in what must be
        the same in their first batch (scalars, shapes, arrays that are no global ones): all raise it, and where they
        hand in equal rows as different ones all warn.
      TypeError: ``loss_fn`` is no function; or (at the call) state, batch or rng is something else.
    """
    mesh = auto_mesh(mesh)
    axes = mesh_axes(mesh, batch_axes, "batch_axes")
    check_loss_fn(loss_fn)
    check_options(num_minibatches, accumulation)
    check_learning_rate(learning_rate)
    if has_aux and metric is not None:
        raise ValueError("has_aux and metric both say what loss_fn returns beside the loss; a metric averages, too.")
    has_second = has_aux or metric is not None
    options: dict[str, Any] = {"num_minibatches": num_minibatches, "accumulation": accumulation, "weighted": weighted}
    options["has_aux"] = has_second
    if metric is not None:
        options["fold_aux"] = lambda local, observed: metric.update(local, **observed)
    split = placement.batch_spec(axes, mesh)
    whole, of_aux = PartitionSpec(), PartitionSpec() if metric is None else PartitionSpec(axes)

    def step(state: Any, batch: PyTree, rng: jax.Array, local: PyTree = None) -> tuple[Any, ...]:
        check_no_explicit_mesh()
        check_call(state, rng, local, mesh, metric)
        _check_batch(batch, {axis: mesh.shape[axis] for axis in axes}, num_minibatches)
        collections = collections_of(state)
        check_takes_collections(loss_fn, collections)
        specs, of_kept = (placement.partition_specs(tree, mesh) for tree in (state.params, collections))
        of_batch = jax.tree.map(lambda leaf: split if leaf.ndim else whole, batch)
        in_specs, out_specs = (specs, of_batch, whole, of_aux, of_kept), ((whole, of_aux), specs, of_kept)
        on_mesh = partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
        loss_and_grads = on_mesh(partial(_on_device, loss_fn, state.apply_fn, axes, options))
        rest = (batch, jax.random.fold_in(rng, state.step), local, collections)
        with noting_stacks() as stacks:
            (loss, aux), grads, collections = loss_and_grads(state.params, *rest)
        jaxpr = partial(jax.make_jaxpr(loss_and_grads), state.params, *rest)
        _warn_of(state, jaxpr, stacks, mesh, axes, weighted=weighted, learning_rate=learning_rate, whole_ok=whole_ok)
        metrics = {"loss": loss, "grad_norm": global_norm(grads)}
        value_fn = _value_fn(state.params, lambda params: loss_and_grads(params, *rest))
        before, state = state, updated_state(state, grads, loss, value_fn, mesh, collections)
        metrics |= skip_counts(state.opt_state)
        metrics |= learning_rates(learning_rate, before.opt_state, state.opt_state, before.step)
        if metric is not None:
            return state, metrics, aux
        return state, metrics | (_checked_aux(aux, metrics) if has_aux else {})

    step.loss = StepLoss(loss_fn, weighted, has_second, axes, num_minibatches)  # type: ignore[attr-defined]  # for check_step
    donated = 0 if metric is None else (0, 3)
    return CheckedStep(step, mesh, donate_argnums=donated, compiler_options=resolved_on(mesh, compiler_options))


def _on_device(
    loss_fn: Callable[..., LossOutput],
    apply_fn: ApplyFn,
    axes: tuple[str, ...],
    options: Mapping[str, Any],
    params: PyTree,
    batch: PyTree,
    rng: jax.Array,
    local: PyTree,
    collections: Mapping[str, PyTree],
) -> tuple[tuple[Any, Any], PyTree, PyTree]:
    """What runs inside ``shard_map``: ((loss, what else the loss function returns), gradients, collections)."""

    def loss(params: PyTree, *rest: PyTree) -> Any:
        return loss_fn(params, apply_fn, *rest)

    rng, given = fold_rng_over_axis(rng, axes), {"carry": local, "collections": collections}
    found, grads, *updated = accumulate_gradients(loss, params, batch, rng, axes, **given, **options)
    return (found if options["has_aux"] else (found, None)), grads, updated[0] if updated else collections


def _warn_of(
    state: Any,
    jaxpr: Callable[[], Any],
    stacks: Stacks,
    mesh: Mesh | AbstractMesh,
    axes: tuple[str, ...],
    *,
    weighted: bool,
    learning_rate: LearningRate,
    whole_ok: bool,
) -> None:
    """Tells of what runs and is hardly meant; ``jaxpr()`` is that of loss and gradients."""
    warn_of_options(state.tx, weighted, learning_rate)
    warn_of_idle_axes(mesh, axes, (state.params, collections_of(state)), jaxpr)
    if not whole_ok:
        warn_if_nothing_is_split(state.params, mesh)
        warn_of_gathered_stacks(stacks, mesh)


def _check_batch(batch: PyTree, axis_sizes: dict[str, int], num_minibatches: int) -> None:
    devices = math.prod(axis_sizes.values())
    divisor = f"the mesh of {axis_sizes}, {devices} devices"
    if num_minibatches > 1:
        divisor += f" times {num_minibatches=}, {devices * num_minibatches} minibatches in all,"
    check_batch(batch, devices * num_minibatches, divisor)


def _checked_aux(aux: Any, metrics: Metrics) -> Metrics:
    if not isinstance(aux, dict):
        raise TypeError(f"has_aux=True: loss_fn must return (loss, dict of numbers), not (loss, {type(aux).__name__}).")
    if taken := sorted(aux.keys() & metrics.keys()):
        raise ValueError(f"the auxiliary output has the name {taken[0]!r}, as has a metric of the step; rename it.")
    return aux


def _value_fn(like: PyTree, loss_and_grads: Callable[[PyTree], Any]) -> Callable[[PyTree], jax.Array]:
    """The loss as a function of what the optimizer sees, for those that search along a line (L-BFGS).

    It has a gradient rule of its own: differentiated from outside, ``shard_map`` would hand each device 1/N of the
    cotangent, and the means inside would divide by N once more.
    """

    def forward(params: PyTree) -> tuple[jax.Array, PyTree]:
        (loss, _), grads, _ = loss_and_grads(with_trainable(like, params))
        return loss, trainable(grads)

    def backward(grads: PyTree, cotangent: jax.Array) -> tuple[PyTree]:
        return (jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), grads),)

    @jax.custom_vjp
    def value(params: PyTree) -> jax.Array:
        return forward(params)[0]

    value.defvjp(forward, backward)
    return value
