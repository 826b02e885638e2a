"""Training on sharded parameters: the model's start, its gradients, and a ready-made step.

  init_sharded          values of the plain model's init, each device computing the slices that it keeps
  value_and_grad        inside shard_map: loss and gradient of the mean over all devices, right in both check_vma modes
  accumulate_gradients  the same over minibatches, one after the other
  create_train_state    init_sharded, and an optimizer state that is split like the parameters
  make_train_step       gradients inside shard_map, the optimizer outside of it in the same jit

The optimizer sees global arrays without boxes. A norm is then the norm, a factored moment sees its whole matrix, and any
optax transform does on shards what it does on one device; XLA adds the few scalars or rows that must travel for it.

Weighting. A loss is the mean over this device's examples, and the gradient the mean over devices of its gradient. Where
devices hold different weights (tokens), the loss function returns (sum, weight) instead. With W the weight on all N
devices, each differentiates sum * N / W: the mean of that over devices is the global weighted mean, and every number that
is scattered stays of the size of a mean. Minibatches j combine as sum_j W_j g_j / sum_j W_j.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, Metrics, PyTree
from xlstm_jax.distributed import collectives
from xlstm_jax.distributed.data_parallel import sync_gradients
from xlstm_jax.distributed.device_mesh import auto_mesh, mesh_axes
from xlstm_jax.distributed.partitioning import (
    as_axis_names,
    axes_entry,
    choose_shard_dim,
    is_differentiable,
    leaf_axes,
    leaf_spec,
    leaf_value,
    leaves_with_path,
    map_leaves,
    map_leaves_with_path,
    partition_specs,
    rebox,
    shardings,
    split_differentiable,
)

LossFn = Callable[..., Any]


# ------------------------------------------------------------------------------------------------------ initialisation


def init_sharded(
    model: nn.Module, mesh: Mesh, rng: PyTree, *inputs: PyTree, batch_axes: AxisNames, **kwargs: Any
) -> PyTree:
    """Initialises a model whose modules are wrapped, every device computing only the slices that it keeps.

    For every mesh the values are those of ``jax.jit(plain_model.init)`` on one device: the same random bits, and floats
    to within 2 units in the last place (XLA may compile a function such as ``erf_inv`` otherwise for a slice).

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


def fold_rng_over_axis(rng: jax.Array, axis_name: AxisNames) -> jax.Array:
    """A key that differs from device to device along the axes, for dropout and the like; inside ``shard_map``.

    Raises:
      ValueError: an axis is not bound; lists those that are.
    """
    axes = as_axis_names(axis_name)
    collectives.check_bound(axes, caller="fold_rng_over_axis")
    return jax.random.fold_in(rng, collectives.axis_index(axes))


# ----------------------------------------------------------------------------------------------------------- gradients


class _Share(NamedTuple):
    """What one device has of one minibatch: ``loss`` and ``grads`` whose mean over devices is the minibatch's.

    ``grads`` is a list, of the leaves that take a gradient. ``aux`` is as the loss function returned it; ``scale`` is
    the factor that made the loss out of the function's first output, and ``weight`` the minibatch's global weight.
    """

    loss: jax.Array
    grads: list[Any]
    aux: PyTree
    scale: jax.Array | float
    weight: jax.Array | float


def value_and_grad(
    loss_fn: LossFn, axis_names: AxisNames, has_aux: bool = False, *, weighted: bool = False
) -> Callable[..., Any]:
    """``jax.value_and_grad`` of the loss over all devices; for use inside ``shard_map``, in either ``check_vma`` mode.

    Parameters are cast to varying before they are differentiated, so that JAX adds no sum of its own; what is split
    comes back scattered, and what is whole is averaged once. Do not call ``sync_gradients`` on the result.

    Args:
      loss_fn: ``loss_fn(params, *args, **kwargs)`` -> the mean loss over this device's batch, a real scalar. With
        ``weighted``: ``(sum, weight)``, the weighted sum of losses on this device and the sum of its weights, which may
        be 0 on some devices. With ``has_aux`` a pair of that and anything.
      axis_names: all the axes that the batch is split over.
      has_aux: as in ``jax.value_and_grad``; the auxiliary output is returned as this device computed it.
      weighted: see ``loss_fn``.
    Returns:
      A function of the arguments of ``loss_fn`` that returns ``(loss, grads)``, or ``((loss, aux), grads)``: the loss,
      equal on all devices, and gradients boxed like ``params``. The gradient of the global weighted mean is 0, and so
      is the loss, where the weight is 0 everywhere. Leaves that are no floats have gradients of dtype float0.
    Raises:
      ValueError: an axis is not bound; or the type of the loss or weight shows that it was reduced over an axis
        already. (Without types, under ``check_vma=False``, a loss averaged by ``pmean`` gives the same result.)
    """
    axes = as_axis_names(axis_names)

    def value_and_grad_fn(params, *args, **kwargs):
        collectives.check_bound(axes, caller="value_and_grad")
        share = _share(loss_fn, axes, has_aux, weighted, params, *args, **kwargs)
        (loss,) = collectives.pmean([share.loss], [axes])
        grads = _synced(params, share.grads, axes)
        return ((loss, share.aux), grads) if has_aux else (loss, grads)

    return value_and_grad_fn


def _share(loss_fn, axes, has_aux, weighted, params, *args, **kwargs) -> _Share:
    live, put_back = split_differentiable(params)

    def scaled_loss(live):
        out = loss_fn(put_back(live), *args, **kwargs)
        out, aux = out if has_aux else (out, None)
        loss, scale, weight = _scaled(out, axes) if weighted else (out, 1, 1)
        _check_not_reduced(loss, axes, "the loss")
        return loss, (aux, scale, weight)

    live = collectives.to_varying(live, [axis for axis in axes if collectives.axis_size([axis]) > 1])
    (loss, (aux, scale, weight)), grads = jax.value_and_grad(scaled_loss, has_aux=True)(live)
    return _Share(loss, grads, aux, scale, weight)


def _scaled(out: Any, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sum, weight) -> (sum * N / W, N / W, W), W being the weight on all devices."""
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"weighted=True: loss_fn must return (sum, weight), not {type(out).__name__}.")
    total, weight = out
    if isinstance(weight, jax.core.Tracer):
        _check_not_reduced(weight, axes, "the weight")
    local = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    spread = [axis for axis in axes if collectives.axis_size([axis]) > 1]
    (weight,) = collectives.psum([collectives.to_varying(local, spread)], [axes])
    scale = jnp.where(weight > 0, collectives.axis_size(axes) / jnp.where(weight > 0, weight, 1), 0)
    return total * scale.astype(jnp.result_type(total)), scale, weight


def _check_not_reduced(value: jax.Array, axes: tuple[str, ...], what: str) -> None:
    """Raises where the type of ``value`` shows that it is the same on all devices along one of the axes."""
    for axis in axes:
        tracked = collectives.axis_size([axis]) > 1 and collectives.is_tracked(axis)
        if tracked and axis not in collectives.varying_axes(value):
            raise ValueError(
                f"{what} that loss_fn returned does not vary over {axis!r} (its type is {jax.typeof(value)}): it was "
                "reduced over that axis already, or does not depend on parameters and batch at all. Return this "
                "device's own value; it is averaged over the axes here. (A constant weight: pass it as a Python number.)"
            )


def _synced(params: PyTree, grads: list[Any], axes: tuple[str, ...]) -> PyTree:
    """Gradients averaged over devices in the tree of ``params``, with float0 for leaves that take none."""
    _, put_back = split_differentiable(params)
    return put_back(sync_gradients(grads, axes), rest=_no_gradient)


def _no_gradient(leaf: Any) -> Any:
    return rebox(leaf, np.zeros(np.shape(leaf_value(leaf)), jax.dtypes.float0))


def accumulate_gradients(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    rng: jax.Array | None,
    axis_names: AxisNames,
    num_minibatches: int = 1,
    *,
    has_aux: bool = False,
    weighted: bool = False,
) -> tuple[Any, PyTree]:
    """Loss and gradient of the whole batch, computed on one minibatch after the other; inside ``shard_map``.

    Equal to the gradient of the full batch, also where minibatches hold different weights. Each minibatch gathers and
    scatters the split parameters anew, so that memory stays that of one; whole ones are averaged once, at the end.

    Args:
      loss_fn: ``loss_fn(params, minibatch, rng)``, returning what ``value_and_grad`` asks for.
      params: the parameters, boxed where they are split.
      batch: leaves [b, ...], b being the number of examples on this device.
      rng: a key, folded with the index of the minibatch where there are several; None is passed on.
      axis_names: all the axes that the batch is split over.
      num_minibatches: m, which must divide b.
      has_aux: the auxiliary output is then a tree of numbers, averaged like the loss: over minibatches and devices, and
        with ``weighted`` as sums over the global weight.
      weighted: as in ``value_and_grad``.
    Returns:
      ``(loss, grads)``, or ``((loss, aux), grads)``, equal on all devices but for what is split.
    Raises:
      ValueError: m does not divide b; names the leaf and both numbers, so that no example is dropped in silence.
    """
    axes = as_axis_names(axis_names)
    collectives.check_bound(axes, caller="accumulate_gradients")
    minibatches = split_batch(batch, num_minibatches)

    def part(index):
        minibatch = jax.tree.map(lambda x: x[index], minibatches)
        folded = rng if rng is None or num_minibatches == 1 else jax.random.fold_in(rng, index)
        share = _share(loss_fn, axes, has_aux, weighted, params, minibatch, folded)
        aux = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32) * share.scale, share.aux)
        # The loss varies over all axes; so must what is summed with it, for the carry of the scan to keep its type.
        sums = collectives.to_varying((share.loss.astype(jnp.float32), aux), _spread(axes))
        return jax.tree.map(lambda x: x * _like(share.weight, x), (sums, share.grads)), jnp.float32(share.weight)

    total, weight = _sum_over(part, num_minibatches)
    (loss, aux), grads = jax.tree.map(lambda x: x / _like(jnp.where(weight > 0, weight, 1), x), total)
    loss, *aux_leaves = collectives.pmean([loss, *jax.tree.leaves(aux)], [axes] * (1 + len(jax.tree.leaves(aux))))
    grads = _synced(params, grads, axes)
    return ((loss, jax.tree.unflatten(jax.tree.structure(aux), aux_leaves)), grads) if has_aux else (loss, grads)


def _like(factor: Any, x: jax.Array) -> Any:
    """A real factor in the precision of ``x``, which must not be widened by it."""
    return factor if isinstance(factor, int) else factor.astype(jnp.finfo(x.dtype).dtype)


def _spread(axes: tuple[str, ...]) -> list[str]:
    return [axis for axis in axes if collectives.axis_size([axis]) > 1]


def _sum_over(part: Callable[[Any], PyTree], count: int) -> PyTree:
    """``part(0) + ... + part(count - 1)`` by ``lax.scan``."""
    if count == 1:
        return part(0)

    def add(total, index):
        return jax.tree.map(jnp.add, total, part(index)), None

    zeros = jax.tree.map(collectives.zeros_of_type, jax.eval_shape(part, jnp.int32(0)))
    return jax.lax.scan(add, zeros, jnp.arange(count, dtype=jnp.int32))[0]


def split_batch(batch: PyTree, num_minibatches: int) -> PyTree:
    """Reshapes every leaf [b, ...] to [m, b / m, ...], index i being minibatch i in the original order.

    Raises:
      ValueError: names the first leaf that ``num_minibatches`` does not divide.
    """

    def split(path, x):
        check_divides(f"batch['{path}']", np.shape(x), num_minibatches, f"num_minibatches={num_minibatches}")
        return jnp.reshape(x, (num_minibatches, x.shape[0] // num_minibatches, *x.shape[1:]))

    return map_leaves_with_path(split, batch)


def check_divides(name: str, shape: tuple[int, ...], parts: int, divisor: str) -> None:
    """Raises a ``ValueError`` with name, both numbers and cure, where ``parts`` does not divide the leading dim."""
    if not shape:
        raise ValueError(f"{name} is a scalar; every leaf of a batch has the examples as its leading dim.")
    if parts < 1:
        raise ValueError(f"{divisor}: give a positive number.")
    examples, rest = shape[0], shape[0] % parts
    if rest:
        raise ValueError(
            f"{name} of shape {shape} holds {examples} examples, which {divisor} does not divide; the last {rest} would "
            f"be dropped. Pad the batch to {examples - rest + parts} examples (with weight 0, weighted=True), or choose "
            f"a divisor of {examples}."
        )


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
      ``opt_state`` bare, every leaf of it split like the parameter that it belongs to.
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
        # Optimizers that keep the parameters themselves need buffers of their own: the state is donated as a whole.
        return jax.tree.map(jnp.copy, tx.init(_trainable(params)))

    out = optimizer_state_shardings(jax.eval_shape(init, params), params, mesh)
    step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, PartitionSpec()))
    opt_state = jax.jit(init, out_shardings=out)(params)
    return TrainState(step=step, apply_fn=model.apply, params=params, tx=tx, opt_state=opt_state)


def _trainable(tree: PyTree) -> PyTree:
    """The tree as an optimizer sees it: bare values, and None for what takes no gradient."""
    return map_leaves(lambda leaf: leaf_value(leaf) if is_differentiable(leaf) else None, tree)


def optimizer_state_shardings(opt_state: PyTree, params: PyTree, mesh: Mesh) -> PyTree:
    """Where an optimizer's state lies: each leaf like the parameter whose path its own path ends with.

    A leaf of another shape than its parameter's (a factored moment, a history) is split over the same axes along the
    largest dim that they divide; what belongs to no parameter is replicated. The values do not depend on it.

    Args:
      opt_state: arrays or ``ShapeDtypeStruct``, without boxes.
      params: boxed parameters, arrays or abstract.
    Returns:
      A ``NamedSharding`` for every leaf of ``opt_state``.
    """
    by_path = dict(leaves_with_path(params))

    def sharding(path, leaf):
        parts = path.split("/")
        owner = next((by_path[p] for i in range(len(parts)) if (p := "/".join(parts[i:])) in by_path), by_path.get("."))
        return NamedSharding(mesh, _state_spec(leaf, owner, mesh))

    return map_leaves_with_path(sharding, opt_state)


def _state_spec(leaf: Any, owner: Any, mesh: Mesh) -> PartitionSpec:
    if owner is None or not leaf_axes(owner):
        return PartitionSpec()
    if np.shape(leaf) == np.shape(leaf_value(owner)):
        return leaf_spec(owner, mesh)
    sizes = {axis: mesh.shape[axis] for axis in leaf_axes(owner) if mesh.shape[axis] > 1}
    dim = choose_shard_dim(np.shape(leaf), (None,) * np.ndim(leaf), sizes, min_weight_size=0).dim
    return PartitionSpec(*[None] * dim, axes_entry(tuple(sizes))) if sizes and dim is not None else PartitionSpec()


def make_train_step(
    loss_fn: LossFn,
    mesh: Mesh,
    batch_axes: AxisNames,
    num_minibatches: int = 1,
    weighted: bool = False,
    check_vma: bool = True,
    *,
    has_aux: bool = False,
) -> Callable[[TrainState, PyTree, jax.Array], tuple[TrainState, Metrics]]:
    """The training step: forward and backward inside ``shard_map``, the optimizer outside, all in one ``jit``.

    Args:
      loss_fn: ``loss_fn(params, apply_fn, batch, rng)`` on this device's part of the batch, returning the mean loss, or
        ``(sum, weight)`` with ``weighted``; with ``has_aux`` a pair of that and a dict of numbers.
      mesh: the mesh of the state.
      batch_axes: all the axes that the batch is split over; its leading dim is, the first axis outermost.
      num_minibatches: m parts of each device's batch, one after the other; see ``accumulate_gradients``.
      weighted: see ``value_and_grad``.
      check_vma: passed to ``shard_map``.
      has_aux: the dict is averaged like the loss and joins the metrics.
    Returns:
      ``step(state, batch, rng) -> (state, metrics)``, a ``jax.jit`` function, so that ``step.lower`` works. ``state`` is
      donated and comes back with the sharding that ``create_train_state`` gave it; ``batch`` has global leaves [b, ...];
      ``rng`` is folded with the step and the device, so one key serves a whole run and dropout differs everywhere.
      Metrics are ``loss`` and ``grad_norm``, the norm over all parameters before the optimizer, float32 scalars.
    Raises:
      ValueError: (at the call) devices or minibatches do not divide the batch; names the leaf and both numbers.
    """
    mesh = auto_mesh(mesh)
    axes = mesh_axes(mesh, batch_axes, "batch_axes")
    split = tuple(axis for axis in axes if mesh.shape[axis] > 1)  # see partitioning.leaf_spec

    def loss_and_grads(state, params, batch, rng):
        def local(params, batch, rng):
            def loss(params, minibatch, rng):
                return loss_fn(params, state.apply_fn, minibatch, rng)

            rng = fold_rng_over_axis(rng, axes)
            return accumulate_gradients(
                loss, params, batch, rng, axes, num_minibatches, has_aux=has_aux, weighted=weighted
            )

        specs = partition_specs(params, mesh)
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, PartitionSpec(split), PartitionSpec()),
            out_specs=(PartitionSpec(), specs),
            check_vma=check_vma,
        )(params, batch, rng)

    def step(state, batch, rng):
        _check_batch(batch, {axis: mesh.shape[axis] for axis in axes}, num_minibatches)
        rng = jax.random.fold_in(rng, state.step)
        loss, grads = loss_and_grads(state, state.params, batch, rng)
        loss, aux = loss if has_aux else (loss, {})
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(_trainable(grads)).astype(jnp.float32), **aux}
        value_fn = _value_fn(state.params, lambda params: loss_and_grads(state, params, batch, rng), has_aux)
        return _apply_updates(state, grads, loss, value_fn, mesh), metrics

    return jax.jit(step, donate_argnums=0)


def _check_batch(batch: PyTree, axis_sizes: dict[str, int], num_minibatches: int) -> None:
    devices = math.prod(axis_sizes.values())
    divisor = f"the mesh of {axis_sizes}, {devices} devices"
    if num_minibatches > 1:
        divisor += f" times num_minibatches={num_minibatches}, {devices * num_minibatches} parts in all,"
    for path, leaf in leaves_with_path(batch):
        check_divides(f"batch['{path}']", np.shape(leaf), devices * num_minibatches, divisor)


def _value_fn(like: PyTree, loss_and_grads: Callable[[PyTree], Any], has_aux: bool) -> Callable[[PyTree], jax.Array]:
    """The loss as a function of what the optimizer sees, for those that search along a line (L-BFGS).

    It carries its gradient as a rule of its own. Differentiated from outside, ``shard_map`` would hand each device 1/N of
    the cotangent, and the means inside would divide by N once more.
    """
    _, put_back = split_differentiable(like)
    boxes, _ = split_differentiable(like)

    def both(params):
        values = jax.tree.leaves(params)
        loss, grads = loss_and_grads(put_back([rebox(box, value) for box, value in zip(boxes, values, strict=True)]))
        return (loss[0] if has_aux else loss), _trainable(grads)

    @jax.custom_vjp
    def value(params):
        return both(params)[0]

    value.defvjp(both, lambda grads, cotangent: (jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), grads),))
    return value


def _apply_updates(state: TrainState, grads: PyTree, loss: jax.Array, value_fn: Any, mesh: Mesh) -> TrainState:
    """The optimizer's update on global arrays, put back into the places and boxes of the state."""
    params, grads = _trainable(state.params), _trainable(grads)
    tx = optax.with_extra_args_support(state.tx)
    updates, opt_state = tx.update(grads, state.opt_state, params, value=loss, grad=grads, value_fn=value_fn)
    boxes, put_back = split_differentiable(state.params)
    values = jax.tree.leaves(optax.apply_updates(params, updates))
    new_params = put_back([rebox(box, value) for box, value in zip(boxes, values, strict=True)])
    return state.replace(
        step=state.step + 1,
        params=jax.lax.with_sharding_constraint(new_params, shardings(new_params, mesh)),
        opt_state=jax.lax.with_sharding_constraint(
            opt_state, optimizer_state_shardings(opt_state, state.params, mesh)
        ),
    )
