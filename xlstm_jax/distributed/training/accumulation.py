"""``accumulate_gradients``: loss and gradient of a batch, computed minibatch by minibatch, inside ``shard_map``.

weights        the parameters, or the parameters gathered once, depending on the strategy
minibatch j    the loss, its weight W_j, and its gradient g_j with respect to the weights
mean           sum_j W_j g_j / sum_j W_j, in float32 or wider: ``mean_over``, a loop over minibatches
gradients      made from the mean by the strategy; gradients of replicated leaves are then averaged over devices

Three strategies choose when gradients are reduced over devices; the results are equal. Bytes sent per step, for m
minibatches and P bytes of split parameters that are sent in float32:

  "reduce_each"           m * 3P                 two gathers, one reduce-scatter; memory: as for one minibatch
  "reduce_once"           2P                     one gather, one reduce-scatter (in float32); memory: unsharded weights
                                                 and float32 gradients on every device
  "reduce_replicas_once"  m * 3P, and the reduction over replicas of the shards once instead of m times

A reference on one device uses the same loop, for slices (device, minibatch) of a batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import AxisNames, PyTree, Scalar
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.averages import remember_gradients
from xlstm_jax.distributed.data_parallel.extension import with_extensions
from xlstm_jax.distributed.data_parallel.leaf import Sharded, frozen, is_library_box, leaf_of, split_by_model
from xlstm_jax.distributed.data_parallel.shard import gather_params
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import value_dtype, wide_dtype
from xlstm_jax.distributed.data_parallel.wire.copies import mean_over_copies
from xlstm_jax.distributed.data_parallel.wire.dtypes import dtype_name
from xlstm_jax.distributed.training.arguments import check_batch
from xlstm_jax.distributed.training.auxiliary import Auxiliary
from xlstm_jax.distributed.training.carries import carries_of
from xlstm_jax.distributed.training.carries.carry import BatchResult, Inputs
from xlstm_jax.distributed.training.gradients import LossFunction, averaged, local_result, varying_leaves
from xlstm_jax.distributed.training.loss import MinibatchLossFn
from xlstm_jax.distributed.training.moments import Averaged, Differentiated, run_checks

# ---------------------------------------------------------------------------------------------------------- minibatches


def split_rows(batch: PyTree, count: int) -> PyTree:
    """Returns the batch with each leaf [b, ...] reshaped to [m, b / m, ...], m being ``count``; scalars stay unchanged.

    The order of the rows is kept: ``leaf[i]`` has the rows from i b / m up to (i + 1) b / m, excluded. ``count`` must
    divide b.
    """
    leaves, structure = jax.tree.flatten(batch)
    shapes = [(count, np.shape(x)[0] // count, *np.shape(x)[1:]) if np.ndim(x) else () for x in leaves]
    parts = [jnp.reshape(x, shape) if shape else x for x, shape in zip(leaves, shapes, strict=True)]
    return jax.tree.unflatten(structure, parts)


def rows_at(parts: PyTree, index: Scalar) -> PyTree:
    """Returns the minibatch at ``index``: for each leaf [m, b / m, ...] of ``parts`` the rows ``leaf[index]``.

    ``parts`` is the result of ``split_rows(batch, m)``. Scalars stay unchanged.
    """
    leaves, structure = jax.tree.flatten(parts)
    return jax.tree.unflatten(structure, [x[index] if np.ndim(x) else x for x in leaves])


class MinibatchResult(NamedTuple):
    """Result of a minibatch on one device, or the mean over the minibatches.

    Attributes:
      values: numbers to average over minibatches by ``weight``; the means have the dtypes of the numbers.
      grads: gradients, averaged likewise; the means stay in float32 or wider.
      weight: the weight of the minibatch.
      carries: the states for the next minibatch.
      stacked: arrays that are not averaged. ``mean_over`` stacks them over minibatches along a leading dim.
    """

    values: PyTree
    grads: PyTree
    weight: Scalar
    carries: PyTree
    stacked: PyTree = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Partial:
    """Running sums over minibatches: of weight times (values, grads), in float32 or wider.

    ``carries`` are the states after the last of these minibatches.
    """

    sums: PyTree
    weight: jax.Array
    carries: PyTree

    def __add__(self, result: MinibatchResult) -> "Partial":
        """Returns the running sums (a ``Partial``) with a further minibatch added, whose ``result`` is given.

        ``sums`` grow by ``result.weight`` times (values, gradients) of ``result``, and ``weight`` by ``result.weight``.
        The carries, states that pass from minibatch to minibatch, become those of ``result``.
        """

        def add(total: jax.Array, x: jax.Array) -> jax.Array:
            return total + x.astype(total.dtype) * jnp.asarray(result.weight, total.dtype)

        sums = jax.tree.map(add, self.sums, (result.values, result.grads))
        return Partial(sums, self.weight + result.weight, result.carries)

    def mean(self) -> PyTree:
        """Returns the pair (values, gradients), each a weighted mean over the minibatches added so far.

        The dtypes are those of the sums. If the total weight is 0, the means are 0.
        """
        # With total weight 0 the sums are 0: dividing by 1 returns 0 instead of NaN.
        weight = jnp.where(self.weight != 0, self.weight, 1)
        return jax.tree.map(lambda total: total / weight.astype(total.dtype), self.sums)


def mean_over(on_minibatch: Callable[[Scalar, PyTree], MinibatchResult], count: int, start: PyTree) -> MinibatchResult:
    """Runs ``on_minibatch(index, carries)`` for each index from 0 to ``count`` - 1, and averages the results by weight.

    The first minibatch receives the carries ``start``, each later minibatch those of the previous result. In the
    returned ``MinibatchResult``, ``values`` and ``grads`` are weighted means, ``weight`` is the sum of the weights,
    ``carries`` are those of the last minibatch, and ``stacked`` has a new leading dim over minibatches. A single
    minibatch runs without a loop, so that the compiler sees a plain step; its result is returned unchanged.
    """
    if count == 1:
        return on_minibatch(0, start)
    # The scan needs the types of the sums, including the axes over which they vary, before it starts.
    like = jax.eval_shape(on_minibatch, jnp.int32(0), start)
    sums, weight = jax.tree.map(
        lambda x: collectives.zeros_of_type(x, wide_dtype(x.dtype)), ((like.values, like.grads), like.weight)
    )

    def add(total: Partial, index: jax.Array) -> tuple[Partial, PyTree]:
        result = on_minibatch(index, total.carries)
        return total + result, result.stacked

    total, each = jax.lax.scan(add, Partial(sums, weight, start), jnp.arange(count, dtype=jnp.int32))
    values, grads = total.mean()
    values = jax.tree.map(lambda mean, x: mean.astype(x.dtype), values, like.values)
    return MinibatchResult(values, grads, total.weight, total.carries, each)


# ----------------------------------------------------------------------------------------------------------- strategies


class ReduceEach:
    """Strategy in which every minibatch gathers the parameters and reduce-scatters their gradients."""

    def weights(self, params: PyTree, axes: tuple[str, ...]) -> PyTree:
        """Returns the tree that the loss of each minibatch receives; gradients are taken with respect to this tree.

        Here the tree is ``params`` itself; a strategy may return other weights, such as gathered parameters. ``axes``
        are the axes of the batch.
        """
        return params

    def gradients(self, mean_grads: list[Any], params: PyTree, axes: tuple[str, ...]) -> list[Any]:
        """Converts gradients with respect to ``weights(params, axes)`` into gradients with respect to ``params``.

        ``mean_grads``, averaged over minibatches, and the result are lists with an entry for each differentiable leaf
        of ``params``, in the order of the tree. The result is in the boxes and dtypes of the parameters. Gradients of
        replicated leaves are not yet averaged over devices.
        """
        return _as_gradients_of(trees.split_differentiable(params)[0], mean_grads)


class ReduceOnce(ReduceEach):
    """Strategy that gathers parameters before the first minibatch and reduce-scatters gradients after the last."""

    def weights(self, params: PyTree, axes: tuple[str, ...]) -> PyTree:
        def still_frozen(leaf: Sharded, full: Any) -> Any:
            return full if leaf.trainable else frozen(full)

        return trees.map_sharded(still_frozen, params, _gathered(params, axes))

    def gradients(self, mean_grads: list[Any], params: PyTree, axes: tuple[str, ...]) -> list[Any]:
        trainable = varying_leaves(trees.split_differentiable(params)[0], axes)
        # Gather in the dtype of summed gradients, so that the transpose does not narrow the gradients.
        dtypes = [wide_dtype(leaf.communication.dtypes(leaf.value)[0]) for leaf in trees.differentiable(params)]
        wide = [
            with_communication(x, gather_dtype=dtype_name(dtype)) for x, dtype in zip(trainable, dtypes, strict=True)
        ]
        # A gather is linear: its transpose, taken at any values, maps gradients of weights to gradients of shards.
        weights, transpose = jax.vjp(lambda live: _gathered(live, axes), wide)
        (grads,) = transpose(_as_gradients_of(weights, mean_grads))
        return _as_gradients_of(trainable, grads)


class ReduceReplicasOnce(ReduceEach):
    """Strategy in which every minibatch gathers and reduce-scatters within a group of devices that has one copy.

    Gradients are averaged over the groups that hold copies of the shards once, after the last minibatch. ``weights``
    raises a ValueError if no parameter has copies.
    """

    def weights(self, params: PyTree, axes: tuple[str, ...]) -> PyTree:
        if not any(leaf.communication.copied_axes for leaf in trees.differentiable(params)):
            raise ValueError(
                "accumulation='reduce_replicas_once': no parameter has copies of its shards. Wrap with "
                "shard_module_params(..., replicas=Replicas('dp')), or use accumulation='reduce_each'."
            )
        # Without replicas in the boxes, the reduce-scatter of a minibatch ends at the local shard.
        return trees.map_leaves(lambda leaf: with_communication(leaf, replicas=None), params)

    def gradients(self, mean_grads: list[Any], params: PyTree, axes: tuple[str, ...]) -> list[Any]:
        copies = [leaf.communication.replicas for leaf in trees.differentiable(params)]
        values = trees.stored_values(mean_grads)
        means = [mean_over_copies(g, over) if over else g for g, over in zip(values, copies, strict=True)]
        return super().gradients(means, params, axes)


DEFAULT_ACCUMULATION = "reduce_each"
STRATEGIES: dict[str, ReduceEach] = {
    DEFAULT_ACCUMULATION: ReduceEach(),
    "reduce_once": ReduceOnce(),
    "reduce_replicas_once": ReduceReplicasOnce(),
}


def _as_gradients_of(leaves: list[Any], grads: list[Any]) -> list[Any]:
    """Returns the values of ``grads``, cast to the dtypes of ``leaves``, and in the boxes of ``leaves``.

    Both lists have the same order, and so has the result; a leaf without a box gets a bare array.
    """
    return trees.map_values(lambda leaf, grad: grad.astype(value_dtype(leaf.value)), leaves, trees.stored_values(grads))


def _gathered(params: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the tree ``params`` with each leaf gathered over those of ``axes`` that split the leaf.

    A gathered leaf has no box, unless further axes split the leaf. Axes over which the model itself splits a leaf
    (tensor parallel) are not gathered. Leaves that ``axes`` do not split are returned unchanged.
    """

    def gather(leaf: Any) -> Any:
        over = tuple(axis for axis in axes if axis in leaf_of(leaf).gathered_axes)
        return gather_params(leaf, over) if over else leaf

    return trees.map_leaves(gather, params)


# ---------------------------------------------------------------------------------------------- the gradient of a batch


def accumulate_gradients(
    loss_fn: MinibatchLossFn,
    params: PyTree,
    batch: PyTree,
    rng: jax.Array | None,
    axis_names: AxisNames,
    num_minibatches: int = 1,
    *,
    accumulation: str = DEFAULT_ACCUMULATION,
    has_aux: bool = False,
    weighted: bool = False,
    collections: Mapping[str, PyTree] | None = None,
) -> tuple[Any, ...]:
    """Computes the exact loss and gradient of a batch by minibatches, inside ``shard_map``.

    Minibatches may differ in weight.

    >>> loss_fn = lambda w, minibatch, rng: jnp.mean(w * minibatch)
    >>> step = lambda w, x: accumulate_gradients(loss_fn, w, x, None, "fsdp", num_minibatches=2)
    >>> over_devices = jax.shard_map(step, mesh=mesh, in_specs=(jax.P(), jax.P("fsdp")), out_specs=jax.P())
    >>> over_devices(jnp.float32(2), jnp.arange(8.0))  # of all 8 values, one for each minibatch of a device
    (Array(7., dtype=float32), Array(3.5, dtype=float32))

    Args:
      loss_fn: ``loss_fn(params, minibatch, rng)`` with the return value described in ``value_and_grad``.
      params, axis_names, weighted: as in ``value_and_grad``.
      batch: leaves [b, ...] with b the number of examples on this device; scalars are passed to every minibatch.
      rng: a key, folded with the minibatch index if num_minibatches > 1; None is passed on.
      num_minibatches: m, which must divide b.
      accumulation: when to reduce gradients over devices; the result is the same. "reduce_each": in every minibatch.
        "reduce_once": gathers parameters before the first minibatch and reduces gradients after the last, so a step
        sends each parameter and each gradient once, but each device holds the unsharded weights and their float32
        gradients.
        "reduce_replicas_once": in every minibatch, but over replicas of the shards after the last.
      has_aux: whether the loss function also returns a tree of numbers. Floats and bools are averaged over minibatches
        and devices like the loss; with ``weighted`` they are sums, divided by the global weight. A cell
        (``metrics.Count``, ``Total``, ``Maximum``, ``Minimum``) is merged instead, and its value returned:
        ``{"tokens": Count.of(mask)}``.
      collections: non-parameter variables, as ``{"batch_stats": ...}``, equal on every device. The loss function is
        then ``loss_fn(params, minibatch, rng, collections)`` and returns a pair: the result described above, and the
        updated collections, which are passed to the next minibatch. A collection missing from the update keeps its
        value. The gradient of "_overwrite_with_gradient" (scales of Flax's fp8 products) is its next value, the maximum
        over devices.
    Returns:
      ``(loss, grads)``, or ``((loss, aux), grads)``: equal on every device, apart from split leaves. Collections come
      third, ``(loss, grads, collections)``.
    Raises:
      ValueError: m does not divide b, or leaves differ in b (names leaf and both numbers); ``accumulation`` is unknown
        or does not fit the parameters ("reduce_once" needs boxes with a gather dtype, "reduce_replicas_once" needs
        replicas); or a collection would differ between devices or has changed its shape.
      TypeError: the auxiliary output has an integer, which cannot be averaged meaningfully; names the leaf.
    """
    axes = collectives.bound_axes(axis_names, caller="accumulate_gradients")
    options = Accumulation(axes, num_minibatches, accumulation)
    check_batch(batch, None, num_minibatches)
    loss = LossFunction(with_extensions(loss_fn), weighted, has_aux, bool(collections))
    result = accumulated(loss, params, batch, rng, options, None, collections or {})
    remember_gradients(result.grads, axes)
    value = (result.loss, result.aux) if has_aux else result.loss
    return (value, result.grads, result.collections) if collections else (value, result.grads)


@dataclass(frozen=True)
class Accumulation:
    """Options of ``accumulate_gradients``, and of a step, for the loop over minibatches.

    With ``fold_aux`` the auxiliary output is not averaged: after every minibatch ``state = fold_aux(state, aux)`` runs
    on this device alone (the state of a metric). The state varies over the axes by type, and its types must not change.
    With ``read_later`` the caller checks that collections are equal on every device: see ``updated_collections``.
    """

    axes: tuple[str, ...]
    num_minibatches: int
    strategy: str
    fold_aux: Callable[[PyTree, PyTree], PyTree] | None = None
    read_later: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.num_minibatches, int | np.integer) or self.num_minibatches < 1:
            raise ValueError(f"num_minibatches={self.num_minibatches!r} is not a positive integer.")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"accumulation={self.strategy!r} is none of {tuple(STRATEGIES)}.")


def accumulated(
    loss: LossFunction,
    params: PyTree,
    batch: PyTree,
    rng: jax.Array | None,
    options: Accumulation,
    metric_state: PyTree,
    collections: Mapping[str, PyTree],
) -> BatchResult:
    """Returns the loss and the gradients of a batch, computed minibatch by minibatch and averaged over devices.

    The ``BatchResult`` has also the auxiliary output (or the new metric state) and the updated collections.
    ``accumulate_gradients`` and the steps call this function, inside ``shard_map``.

    Args:
      loss: the loss function, called with (params, minibatch, key) and the collections, if any.
      params: the parameters, boxed where they are split.
      batch: this device's rows.
      rng: a key, or None; folded with the minibatch index if there are several minibatches.
      options: the number of minibatches, the strategy, and the axes of the batch.
      metric_state: the state of a metric on this device; None without a metric.
      collections: the collections of the state by name; {} if there are none.
    """
    axes, count = options.axes, options.num_minibatches
    strategy = STRATEGIES[options.strategy]
    boxed = trees.map_leaves(split_by_model, params)
    weights = boxed if count == 1 else strategy.weights(boxed, axes)
    minibatches = split_rows(batch, count)

    # State passed between minibatches: collections, scales of fp8 products, the state of a metric.
    has_state = collections or options.fold_aux is not None
    inputs = Inputs(axes, collections, metric_state, options.fold_aux, options.read_later)
    carries = carries_of(inputs) if has_state else []
    differentiate = local_result
    for carry in carries:
        differentiate = carry.differentiating(differentiate)
    averages_aux = loss.has_aux and not [carry for carry in carries if carry.takes_aux]

    def on_minibatch(index: Scalar, states: tuple[PyTree, ...]) -> MinibatchResult:
        # A single minibatch must draw the same numbers as a batch without minibatches.
        key = rng if rng is None or count == 1 else jax.random.fold_in(rng, index)
        rest = [rows_at(minibatches, index), key]
        if loss.has_collections:
            each = zip(carries, states, strict=True)
            rest.append({name: tree for carry, state in each for name, tree in carry.read(state).items()})

        # Local loss and gradients, and the states for the next minibatch.
        local = differentiate(loss, weights, axes, *rest)
        args = (weights, *rest)
        run_checks("gradient", Differentiated(local.gathered_in_branches, loss, args, axes))
        each = zip(carries, states, strict=True)
        states = tuple([carry.next(state, loss, args, local) for carry, state in each])

        # Auxiliary numbers: means are averaged like the loss, cells are merged.
        aux = None
        if averages_aux:
            aux = Auxiliary.of(local.aux).scaled(local.scale)
            floats = lambda weights: Auxiliary.of(loss(weights, *rest).aux).means  # noqa: E731
            averaged_over = collectives.axis_size(axes) * count
            equations = lambda: jax.make_jaxpr(floats)(weights)  # noqa: E731
            run_checks("aux", Averaged(aux.mean_paths, averaged_over, loss.weighted, equations))

        # A scan sums these values and needs a fixed carry type: cast them to vary over all axes.
        mean, aux = collectives.to_varying((local.loss, aux), collectives.spread_axes(axes))
        means, cells = ([], None) if aux is None else (aux.means, aux.replace(means=[]))
        return MinibatchResult((mean, means), local.grads, local.weight, states, cells)

    start = tuple([carry.start() for carry in carries])
    mean_result = on_minibatch(0, start) if count == 1 else mean_over(on_minibatch, count, start)

    # Reduce over devices: loss and auxiliary numbers first, then the gradients.
    mean, means = mean_result.values
    if (aux := mean_result.stacked) is None:
        (mean,) = collectives.pmean([mean], [axes])
    else:
        aux = aux.merged() if count > 1 else aux
        mean, aux = aux.replace(means=means).over_devices(mean, axes)
    # A single minibatch was differentiated by the parameters: its gradients have their boxes and dtypes.
    grads = mean_result.grads if count == 1 else strategy.gradients(mean_result.grads, boxed, axes)
    result = BatchResult(mean, aux, averaged(grads, params, axes), {})
    for carry, state in zip(carries, mean_result.carries, strict=True):
        result = carry.finish(state, result)
    return result


def with_communication(leaf: Any, **fields: Any) -> Any:
    """Returns the leaf, in a box in which some fields of the communication options have new values.

    The fields are given by name, as ``with_communication(leaf, of_layers=True)``. The value and the other options stay.
    A leaf that is not in a box of the library is returned unchanged.
    """
    return leaf.replace(communication=replace(leaf_of(leaf).communication, **fields)) if is_library_box(leaf) else leaf
