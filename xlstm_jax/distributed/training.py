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
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, Metrics, PyTree
from xlstm_jax.distributed.compiler_options import resolved
from xlstm_jax.distributed.device_mesh import auto_mesh, check_no_explicit_mesh, mesh_axes
from xlstm_jax.distributed.gradients import (
    ACCUMULATION,
    LossFn,
    accumulate_gradients,
    check_accumulation,
    check_count,
    check_divides,
    fold_rng_over_axis,
    value_and_grad,
)
from xlstm_jax.distributed.metrics.states import PureMetric
from xlstm_jax.distributed.nonfinite import skip_counts
from xlstm_jax.distributed.optimizer_state import (
    apply_updates,
    optimizer_state_shardings,
    own_copy,
    stored_state,
    trainable,
    with_trainable,
)
from xlstm_jax.distributed.optimizers import global_norm
from xlstm_jax.distributed.partitioning import (
    leaf_value,
    leaves_with_path,
    map_leaves,
    partition_specs,
    rebox,
    shardings,
)

__all__ = [
    "abstract_train_state",
    "accumulate_gradients",
    "create_train_state",
    "fold_rng_over_axis",
    "init_sharded",
    "jitted_init",
    "make_train_step",
    "optimizer_state_shardings",
    "value_and_grad",
]

# ------------------------------------------------------------------------------------------------------ initialisation


def init_sharded(
    model: nn.Module, mesh: Mesh, rng: PyTree, *inputs: PyTree, batch_axes: AxisNames, **kwargs: Any
) -> PyTree:
    """Initialises a model whose modules are wrapped, every device computing only the slices that it keeps.

    For every mesh the values are those of ``jax.jit(plain_model.init)`` on one device: the same random bits, and floats
    to within 2 units in the last place (XLA may compile a function such as ``erf_inv`` otherwise for a slice; seen on
    CPU: 3 units where a device's rows have 3 to 5 values, none at all on JAX 0.10). An initializer that factors a
    matrix (``orthogonal``) is the exception: it needs the whole leaf, and rounds as it will.

    Args:
      model: a Linen module with ``shard_module_params`` around it or its parts. Unwrapped parts stay replicated.
      mesh: the mesh, with the axes that the wrappers name.
      rng: a key, or a dict of keys, as ``model.init`` takes it.
      *inputs: example inputs with global shapes; split over ``batch_axes`` where their leading dim divides.
      batch_axes: the axes that the batch is split over.
      **kwargs: passed to ``model.init`` as they are, as ``train=False``.
    Returns:
      The variables: global arrays on the mesh, boxed where they are split.
    Raises:
      ValueError: a wrapper or a box names an axis that the mesh does not have.
    """
    return jitted_init(model, mesh, rng, *inputs, batch_axes=batch_axes, **kwargs)(rng, inputs)


def jitted_init(
    model: nn.Module, mesh: Mesh, rng: PyTree, *inputs: PyTree, batch_axes: AxisNames, **kwargs: Any
) -> Any:
    """The ``jax.jit`` function of ``(rng, inputs)`` that ``init_sharded`` calls, to be lowered and looked at."""
    check_no_explicit_mesh()
    mesh = auto_mesh(mesh)
    axes = mesh_axes(mesh, batch_axes, "batch_axes")

    def init(rng, inputs):
        # Wrapped modules see the sizes of the axes here, and box global values accordingly.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return model.init(rng, *inputs, **kwargs)

    placed = (NamedSharding(mesh, PartitionSpec()), jax.tree.map(lambda x: _input_sharding(x, mesh, axes), inputs))
    out = shardings(jax.eval_shape(init, rng, inputs), mesh)
    return jax.jit(init, in_shardings=placed, out_shardings=out)


def _input_sharding(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> NamedSharding:
    parts = math.prod(mesh.shape[axis] for axis in axes)
    splits = np.ndim(x) > 0 and np.shape(x)[0] % parts == 0
    return NamedSharding(mesh, PartitionSpec(axes) if splits else PartitionSpec())


# ------------------------------------------------------------------------------------------------------ the ready step


def create_train_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    rng: PyTree,
    *inputs: PyTree,
    batch_axes: AxisNames,
    **kwargs: Any,
) -> TrainState:
    """A Flax ``TrainState`` on the mesh: parameters by ``init_sharded``, the optimizer's moments split like them.

    Args:
      model, mesh, rng, *inputs, batch_axes, **kwargs: see ``init_sharded``.
      tx: any optax optimizer. It is initialised on the parameters without boxes, as global arrays.
    Returns:
      ``TrainState(step=0, apply_fn=model.apply, params, tx, opt_state)``: ``params`` boxed where they are split,
      ``opt_state`` bare, every leaf of it split like the parameter that it belongs to, and boxed only where that is
      padded.
    Raises:
      ValueError: the model has other variable collections than "params", which a ``TrainState`` has no place for.
    """
    mesh = auto_mesh(mesh)
    variables = dict(init_sharded(model, mesh, rng, *inputs, batch_axes=batch_axes, **kwargs))
    params = variables.pop("params", {})
    if variables:
        raise ValueError(
            f"the model has the variable collections {sorted(variables)} beside 'params', which a TrainState does not "
            "carry. Initialise with init_sharded, and write the step with value_and_grad and has_aux=True, which "
            "returns the updated collections."
        )

    def init(params):
        return stored_state(jax.tree.map(own_copy, tx.init(trainable(params))), params)

    out = optimizer_state_shardings(jax.eval_shape(init, params), params, mesh)
    step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, PartitionSpec()))
    opt_state = jax.jit(init, out_shardings=out)(params)
    return TrainState(step=step, apply_fn=model.apply, params=params, tx=tx, opt_state=opt_state)


def abstract_train_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    rng: PyTree,
    *inputs: PyTree,
    batch_axes: AxisNames,
    **kwargs: Any,
) -> TrainState:
    """What ``create_train_state`` would return, without allocating it: the target of a restore.

    Args:
      model, tx, mesh, rng, *inputs, batch_axes, **kwargs: see ``create_train_state``. ``rng`` and the inputs may be
        ``ShapeDtypeStruct``.
    Returns:
      The ``TrainState`` of ``ShapeDtypeStruct`` with shardings, boxed where parameters are split.
    Raises:
      ValueError: as ``create_train_state``.
    """
    mesh = auto_mesh(mesh)

    def create(rng, inputs):
        return create_train_state(model, tx, mesh, rng, *inputs, batch_axes=batch_axes, **kwargs)

    state = jax.eval_shape(create, rng, inputs)
    places = state.replace(
        step=NamedSharding(mesh, PartitionSpec()),
        params=shardings(state.params, mesh),
        opt_state=optimizer_state_shardings(state.opt_state, state.params, mesh),
    )

    def placed(leaf, place):
        value = leaf_value(leaf)
        return rebox(leaf, jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place))

    return map_leaves(placed, state, places)


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
