"""A scan over layers that gathers the weights of later layers while a layer computes, forward and backward.

If weights are gathered in two stages (over the axis across hosts, then within a host), iteration i runs:

  forward    layer i computes                     |  stage 2 of layer i + 1  |  stage 1 of layer i + 2
  backward   layer i is recomputed and            |  stage 2 of layer i - 1  |  stage 1 of layer i - 2
             differentiated                       |  the gradient of layer i + 1 is scattered

The entries of a line do not depend on each other, so the compiler can run each collective in parallel with a layer's
matrix products. Shards are sent in the dtypes of the leaf's ``Communication``. No gather is wasted: the first and the
last iterations run outside of the loop.

The forward pass keeps each layer's input and no weights. A plain scan with gathered weights in its carry would keep the
weights of every layer; hence the entire loop has a custom derivative (``jax.custom_vjp``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.common_types import PyTree, Scalar
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded, as_gathered, path_in_model, shard_to_gather
from xlstm_jax.distributed.data_parallel.shared_collectives import Parcel, SplitShard, parcels
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry, axes_entry, entry_axes
from xlstm_jax.distributed.data_parallel.wire.communication import (
    Communication,
    PrimalType,
    gradient_of_shard,
    set_context,
    shard_as_sent,
    terms_to_scatter,
)
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS, RunningLoss
from xlstm_jax.distributed.data_parallel.wire.wire import Wire
from xlstm_jax.distributed.data_parallel.wire.wrong_gradients import (
    check_one_gradient_of_one_batch,
    differentiated_once,
)
from xlstm_jax.program_names import GATHER_SCOPE

Layer = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
Arrays = list[Any]  # ``None`` for the gradient of integers


class Route(NamedTuple):
    """Description of the gather of a stacked leaf in each layer: along ``dim``, over ``axes`` (outermost first).

    ``names_left`` has the axes that still split each dim afterwards; ``communication`` has the dtypes.
    """

    dim: int
    axes: tuple[str, ...]
    names_left: tuple[AxisEntry, ...]  # of the gathered value
    communication: Communication
    path: str

    @property
    def stages(self) -> tuple[str, ...]:
        """Axes in the order of the all-gathers, innermost first, one axis for each stage; without axes of size 1."""
        return tuple(reversed(collectives.spread_axes(self.axes)))


def leaves_of_layer(stacked: PyTree) -> list[tuple[str, Sharded]]:
    """Returns (path, leaf) for the leaves of a single layer: ``Sharded`` boxes with a ``ShapeDtypeStruct`` as value.

    ``stacked`` has leaves [layers, ...] in boxes that name a layer's dims; the result has their shapes without the
    layer dim, in tree order.
    """
    return trees.sharded_leaves(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked))


def route_of(path: str, leaf: Sharded, module: tuple[str, ...] | None = None) -> Route | None:
    """Returns how the leaf of a layer is gathered, or ``None`` if no bound axis of size 2 or more splits the leaf.

    A ``Route`` has the dim and the axes of the gather, the axes that still split each dim afterwards, and the
    communication options.

    Args:
      path: the leaf's path in the module.
      leaf: the shard of one layer in its box.
      module: the module's path in the model, for errors; ``None``: ``path`` is the path in the model.
    Raises:
      ValueError: the leaf is gathered along several dims, or an axis that stays split lies inside a gathered axis.
    """
    names = leaf.names
    gathered = set(filter(collectives.is_bound, leaf.gathered_axes))
    dims = [dim for dim, entry in enumerate(names) if gathered.intersection(entry_axes(entry))]
    if not collectives.spread_axes(sorted(gathered)):
        return None
    split_axes = entry_axes(names[dims[0]])
    first = next(i for i, axis in enumerate(split_axes) if axis in gathered)
    if len(dims) > 1 or not gathered.issuperset(split_axes[first:]):
        raise ValueError(
            f"'{path_in_model(module, path)}' is split as {names}, and gathered over {sorted(gathered)}: layers are "
            "gathered ahead only if these axes split one dim, and are its innermost axes. Pass prefetch=False, or "
            "write nn.scan(nn.remat(...))."
        )
    left = (*names[: dims[0]], axes_entry(split_axes[:first]), *names[dims[0] + 1 :])
    return Route(dims[0], split_axes[first:], left, leaf.communication, path_in_model(module, path))


def prefetched_scan(
    layer: Layer,
    stacked: PyTree,
    carry: PyTree,
    per_layer: PyTree,
    shared: PyTree,
    module: tuple[str, ...] | None,
) -> tuple[PyTree, PyTree]:
    """Runs ``lax.scan`` over layers whose weights are gathered ahead; inside ``shard_map``.

    Frozen leaves are gathered like other leaves, and not differentiated.

    Args:
      layer: ``layer(weights, carry, inputs, shared)``, which returns (carry, outputs); ``weights`` have the form that
        ``gather_params`` returns. The function must not use arrays that are not arguments.
      stacked: leaves [layers, ...], at least one leaf split; their boxes name a layer's dims.
      carry: the carry of the first layer; arrays of any dtype.
      per_layer: leaves [layers, ...]: inputs of each layer, random keys for example.
      shared: input of every layer.
      module: the path of the scan in the model, for leaf names in errors.
    Returns:
      The last carry, and outputs with a leading layer dim. The gradient equals the gradient of a scan over
      ``jax.checkpoint`` (without kept values) of the layer and the layer's gather.
    """
    leaves, (_, structure) = trees.sharded_leaves(stacked), trees.flatten_with_path(stacked)
    of_layer = leaves_of_layer(stacked)
    routes = [route_of(path, leaf, module) for path, leaf in of_layer]
    values = [
        shard_to_gather(leaf, route.axes, path) if route else leaf.value
        for (path, leaf), route in zip(leaves, routes, strict=True)
    ]
    boxes = [leaf.replace(value=None) for _, leaf in of_layer]
    found = zip(routes, boxes, map(PrimalType.of, values), strict=True)
    entries, values = _sent_together([_Leaf(*leaf, (place,)) for place, leaf in enumerate(found)], values)
    # The rule of a custom_vjp differentiates only its arguments: all arrays are arguments, everything else is static.
    scan = _Scan(layer, structure, entries)
    return scan.differentiable()(values, jax.tree.map(jnp.asarray, carry), per_layer, shared)


class _Leaf(NamedTuple):
    """Stacked leaf: the gather if it is split (else ``None``), the box of a layer, the types of the stacked shards.

    ``places`` has the position among the leaves of a layer. Leaves that are sent together are one ``_Leaf`` with a
    ``parcel``, and the leaves as ``members``; its value is the list of their stacked shards.
    """

    route: Any  # a ``Route``; ``None`` if the leaf is not split
    box: Sharded  # without a value
    stacked: PrimalType
    places: tuple[int, ...]
    parcel: Parcel | None = None
    members: tuple[Any, ...] = ()  # of ``_Leaf``

    @property
    def wire(self) -> Wire:
        """Format in which a layer's shard, the result of ``shard``, is sent. Only for split leaves and parcels."""
        if self.parcel:
            return self.parcel.wire
        return self.route.communication.wire(self.of_layer, self.route.dim, self.route.axes)

    @property
    def of_layer(self) -> PrimalType:
        """Type (shape, dtype, varying axes) of a layer's shard: ``stacked`` without the layer dim."""
        return replace(self.stacked, shape=self.stacked.shape[1:])

    def shard(self, value: Any) -> jax.Array:
        """Returns the array to send for ``value``, a layer's shard: ``value`` itself, or a packed array [1, s].

        For a parcel (leaves that are sent together) ``value`` is a list with the shard of each member, and the result
        has the s values of all shards.
        """
        return self.parcel.pack(value) if self.parcel else value

    def gradients(self, gradient: jax.Array) -> Any:
        """Returns the gradient of a layer's shard from ``gradient``, the gradient of the array that ``shard`` returns.

        The result is an array; for a parcel (leaves that are sent together) a list with an array for each member.
        """
        return self.parcel.unpack(gradient) if self.parcel else gradient

    def weights(self, value: jax.Array) -> list[Any]:
        """Returns a list of the weights of one layer in ``value``, the gathered array of this leaf.

        The list has a single weight; for a parcel (leaves that are sent together) a weight for each of ``members``, in
        order. A weight is a bare array without padding; or in a box, if axes still split the weight.
        """
        arrays = self.parcel.unpack(value) if self.parcel else [value]
        return [
            as_gathered(
                leaf.box.replace(value=array), array, leaf.route.names_left, leaf.route.axes, leaf.route.communication
            )
            for leaf, array in zip(self.members or (self,), arrays, strict=True)
        ]


def _sent_together(leaves: list[_Leaf], values: Arrays) -> tuple[list[_Leaf], list[Any]]:
    """Returns (leaves, values), in which leaves that are sent together are combined to one leaf, a parcel.

    The combined leaves come last; the value of a combined leaf is the list of the values of its members. The other
    leaves are unchanged. ``values[i]``, the stacked shards [layers, ...], belongs to ``leaves[i]``, in arguments and
    results.
    """
    routes = {place: leaf.route for place, leaf in enumerate(leaves) if leaf.route}
    found = parcels(
        {
            place: SplitShard(leaf.of_layer, route.dim, route.axes, route.communication, leaf.box.trainable)
            for place, route in routes.items()
            if jnp.issubdtype((leaf := leaves[place]).stacked.dtype, jnp.floating)
        }
    )
    together = {place for parcel in found for place in parcel.members}
    entries = [leaf for leaf in leaves if leaf.places[0] not in together]
    kept: list[Any] = [value for place, value in enumerate(values) if place not in together]
    for parcel in found:
        members = tuple(leaves[place] for place in parcel.members)
        route, stacked = members[0].route, members[0].stacked
        size = sum(math.prod(leaf.of_layer.shape) for leaf in members)
        paths = ", ".join(leaf.route.path for leaf in members)
        entries.append(
            _Leaf(
                Route(0, collectives.spread_axes(route.axes), (None, None), route.communication, paths),
                Sharded(None, (None, None), trainable=members[0].box.trainable),
                replace(stacked, shape=(stacked.shape[0], 1, size)),
                parcel.members,
                parcel,
                members,
            )
        )
        kept.append([values[place] for place in parcel.members])
    return entries, kept


@dataclass(frozen=True)
class _Scan:
    """Forward and backward pass of the scan. Lists have an entry per stacked leaf, ``None`` for leaves of another kind.

    ``values`` are the stacked leaves. ``ahead`` holds weights of later layers: ``ahead[s]`` has the split leaves of one
    layer after s + 1 stages, the last entry fully gathered leaves. Entries past either end of the scan are ``None``.
    """

    layer: Layer
    structure: Any
    leaves: Sequence[_Leaf]
    loss: RunningLoss = field(default_factory=RUNNING_LOSS.get)

    @property
    def length(self) -> int:
        return self.leaves[0].stacked.shape[0]

    @property
    def depth(self) -> int:
        """Number of layers that are gathered ahead: the largest number of gather stages (axes) of any leaf."""
        return max(len(leaf.route.stages) for leaf in self.leaves if leaf.route)

    def differentiable(self) -> Callable[..., tuple[PyTree, PyTree]]:
        run = jax.custom_vjp(lambda *args: self.forward(*args)[0])
        run.defvjp(self.forward, self.backward)
        return run

    # ------------------------------------------------------------------------------------------------------- one layer

    def compute(self, split: Arrays, replicated: Arrays, carry: PyTree, inputs: PyTree, shared: PyTree) -> Any:
        """Returns the (carry, outputs) of one layer, a call of the user's layer with the layer's weights.

        The weights are without padding; a weight that further axes split (tensor parallel) is in a box.

        Args:
          split: a list with the gathered array, with padding, of each split leaf; ``None`` for other leaves.
          replicated: a list with the array of each leaf that is not split; ``None`` for split leaves. A frozen array
            may be in a box, here and in ``split``.
          carry, inputs, shared: the arguments of the layer after the weights.
        """
        split, replicated = trees.stored_values(split), trees.stored_values(replicated)
        by_place = {
            place: weight
            for leaf, value, full in zip(self.leaves, split, replicated, strict=True)
            for place, weight in zip(leaf.places, leaf.weights(value) if leaf.route else [full], strict=True)
        }
        weights = [by_place[place] for place in sorted(by_place)]
        # The backward pass calls this after the loss function has returned; modules may read the loss (``Experts``).
        with set_context(RUNNING_LOSS, self.loss):
            return self.layer(jax.tree.unflatten(self.structure, weights), carry, inputs, shared)

    def shards(self, values: Arrays, index: Scalar) -> Arrays:
        """Returns the shards of layer ``index`` of the stacked ``values``, each in the format in which it is sent.

        The list has an entry for each leaf of the scan: ``None`` for leaves that are not split.
        """
        sent = self._of_split(
            lambda leaf, value: shard_as_sent(leaf.shard(_at(value, index)), leaf.route.communication), values
        )
        return self._of_split(lambda leaf, shard: leaf.wire.send(shard), sent)

    def arrived(self, ahead: list[Arrays | None]) -> Arrays:
        """Returns the unsharded weights of the layer that computes next, from the last entry of ``ahead``.

        ``ahead`` has an entry for each gather stage. The last entry is a layer after all stages: a list with an array
        for each leaf. The result has the same form, with each array converted from the format in which shards are sent
        (8-bit codes, say) back to values. Padding stays. The entry of a leaf that is not split is ``None``.
        """
        return self._of_split(lambda leaf, arrived: leaf.wire.receive(arrived), ahead[-1] or [])

    def replicated_leaves(self, values: Arrays, index: Scalar) -> Arrays:
        """Returns the arrays of layer ``index`` of the stacked ``values``, for leaves that are not split.

        The list has an entry for each leaf of the scan: ``None`` for split leaves.
        """
        return [None if leaf.route else _at(value, index) for leaf, value in zip(self.leaves, values, strict=True)]

    def to_differentiate(self, arrays: Arrays) -> Arrays:
        """Returns the list ``arrays``, with the arrays of frozen leaves put into boxes, which take no gradient.

        ``arrays`` has an array, or ``None``, for each leaf of the scan; other entries are unchanged.
        """

        def boxed(box: Sharded, arrays: Any) -> Any:
            return jax.tree.map(lambda array: box.replace(value=array), arrays)

        return [
            array if array is None or leaf.box.trainable else boxed(leaf.box, array)
            for leaf, array in zip(self.leaves, arrays, strict=True)
        ]

    def advance(self, ahead: list[Arrays | None], shards: Arrays | None) -> list[Arrays | None]:
        """Runs one more stage (all-gather over an axis) of the gather of each layer in ``ahead``, and returns the list.

        ``ahead[s]`` is a list of arrays, one for each leaf, of a layer after s + 1 stages. Entry 0 of the result is
        ``shards`` after the first stage; entry s is ``ahead[s - 1]`` after a further stage. The last entry of
        ``ahead``, a fully gathered layer, is dropped. ``None`` stands for no layer, in ``ahead`` and as ``shards`` past
        the end of the scan.
        """

        def gather(stage: int, leaf: _Leaf, value: jax.Array) -> jax.Array:
            # A leaf with fewer stages starts later, so that it is not fully gathered earlier than necessary.
            own_stage = stage - self.depth + len(leaf.route.stages)
            axes = leaf.route.stages[own_stage : own_stage + 1] if own_stage >= 0 else ()
            return collectives.all_gather(value, leaf.wire.along(leaf.route.dim), axes)

        with jax.named_scope(GATHER_SCOPE):
            stages = enumerate([shards, *ahead[:-1]])
            return [arrays and self._of_split(partial(gather, stage), arrays) for stage, arrays in stages]

    def first_gathers(self, values: Arrays, order: Sequence[int]) -> list[Arrays | None]:
        """Starts the gathers of the first ``depth`` layers to compute, and returns ``ahead`` for the first iteration.

        ``ahead`` is a list with an entry for each gather stage. For two stages: [the second layer after one stage, the
        first layer after both stages, fully gathered]. An entry is a list of arrays, one for each leaf; ``None`` if the
        scan has too few layers. ``order`` has the indices of the layers in the order of computation, ``values`` are the
        stacked shards.
        """
        ahead: list[Arrays | None] = [None] * self.depth
        # A scan of few layers runs out of layers for the first stages: their entries are ``None``.
        for position in range(self.depth):
            ahead = self.advance(ahead, self.shards(values, order[position]) if position < len(order) else None)
        return ahead

    def _of_split(self, fn: Callable[[Any, Any], Any], arrays: Arrays) -> Arrays:
        """Returns a list with ``fn(leaf, array)`` for each split leaf that has an array, and ``None`` for other leaves.

        ``arrays`` has an array, or ``None``, for each leaf of the scan.
        """
        pairs = zip(self.leaves, arrays, strict=True)
        return [None if leaf.route is None or array is None else fn(leaf, array) for leaf, array in pairs]

    # --------------------------------------------------------------------------------------------------------- forward

    def forward(self, values: Arrays, carry: PyTree, per_layer: PyTree, shared: PyTree) -> tuple[Any, Any]:
        """Runs the layers, gathering later layers' weights ahead; returns ((last carry, stacked outputs), residuals).

        The residuals are the argument of ``backward``. The arguments are those of ``prefetched_scan``; ``values`` is a
        list with the stacked shards [layers, ...] of each leaf.
        """

        def step(index: Scalar, state: Any, *, goes_on: bool = True) -> Any:
            carry, ahead, carries, outputs = state
            further = self.advance(ahead, self.shards(values, index + self.depth) if goes_on else None)
            args = self.arrived(ahead), self.replicated_leaves(values, index), carry, _at(per_layer, index), shared
            new, out = self.compute(*args)
            return new, further, _put(carries, index, carry), _put(outputs, index, out)

        ahead = self.first_gathers(values, range(self.length))
        args = self.arrived(ahead), self.replicated_leaves(values, 0), carry, _at(per_layer, 0), shared
        zeros = jax.tree.map(lambda x: collectives.zeros_of_type(x, x.dtype), jax.eval_shape(self.compute, *args)[1])
        # Made from the carry itself, so that the types vary over the same axes.
        stacked = lambda x: jnp.broadcast_to(x, (self.length, *jnp.shape(x)))  # noqa: E731
        all_carries, outputs = jax.tree.map(stacked, (carry, zeros))
        in_loop = max(0, self.length - self.depth)
        state = _loop(in_loop, lambda i: i, step, (carry, ahead, all_carries, outputs))
        for index in range(in_loop, self.length):
            state = step(index, state, goes_on=False)
        carry, _, all_carries, outputs = state
        return (carry, outputs), (values, all_carries, per_layer, shared)

    # -------------------------------------------------------------------------------------------------------- backward

    def backward(self, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        """Runs the layers from last to first, and returns the cotangents of the arguments of ``forward``, in order.

        While a layer computes, the weights of the next layers to run (earlier in the model) are gathered, and the
        gradient of the layer that ran before is scattered. ``residuals`` are from ``forward``, ``cotangents`` are of
        its first result, (last carry, stacked outputs). Leaves without gradient have ``None``.
        """
        values, carries, per_layer, shared = residuals
        # Gradients of integers have dtype float0, which no loop can carry.
        d_carry, d_outputs = jax.tree.map(lambda d: None if d.dtype == jax.dtypes.float0 else d, cotangents)
        for leaf in self.leaves:
            for cotangent in jax.tree.leaves((d_carry, d_outputs)) if leaf.route else ():
                check_one_gradient_of_one_batch(leaf.route.path, leaf.stacked, cotangent, leaf.route.axes)

        def step(index: Scalar, state: Any, *, is_first: bool = False, goes_on: bool = True) -> Any:
            d_carry, ahead, pending, (d_values, d_per_layer, d_shared) = state
            further = self.advance(ahead, self.shards(values, index - self.depth) if goes_on else None)
            # In the first iteration there is no gradient of a later layer to scatter.
            d_values = d_values if is_first else self.scatter(d_values, index + 1, pending)
            # Gathers run in parallel with the recomputation; without the barrier a compiler may delay them to the
            # scatters.
            d_carry, further = _together(d_carry, further)
            split, replicated = map(self.to_differentiate, (self.arrived(ahead), self.replicated_leaves(values, index)))
            args = split, replicated, _at(carries, index), _at(per_layer, index), shared
            d_split, d_whole, d_carry, d_inputs, d_more = _gradients_of_args(
                self.compute, args, (d_carry, _at(d_outputs, index))
            )
            d_values = [
                so_far if leaf.route else _put(so_far, index, grad)
                for leaf, so_far, grad in zip(self.leaves, d_values, d_whole, strict=True)
            ]
            grads = d_values, _put(d_per_layer, index, d_inputs), jax.tree.map(jnp.add, d_shared, d_more)
            return d_carry, further, self.terms(d_split), grads

        start = self.to_differentiate(values), per_layer, shared
        grads = tuple(trees.map_sharded(_zeros_like_floats, tree) for tree in start)
        state = (d_carry, self.first_gathers(values, range(self.length)[::-1]), None, grads)
        last = self.length - 1
        state = step(last, state, is_first=True, goes_on=last >= self.depth)
        in_loop = max(0, last - self.depth)
        state = _loop(in_loop, lambda i: last - 1 - i, step, state)
        for index in range(last - 1 - in_loop, -1, -1):
            state = step(index, state, goes_on=False)
        d_carry, _, pending, (d_values, d_per_layer, d_shared) = state
        return self.scatter(d_values, 0, pending), d_carry, d_per_layer, d_shared

    def terms(self, grads: Arrays) -> Arrays:
        """Returns a list with the input of the reduce-scatter for each split leaf of a layer, and ``None`` for others.

        ``grads`` is a list of the gradients of the gathered arrays. Each is divided by the number of devices, and cast
        to the dtype of the sum. The next iteration runs the reduce-scatters.
        """
        return self._of_split(
            lambda leaf, grad: terms_to_scatter(grad, leaf.route.axes, leaf.route.communication, leaf.stacked), grads
        )

    def scatter(self, d_values: Arrays, index: Scalar, terms: Arrays) -> Arrays:
        """Returns the list ``d_values``, with the gradients of layer ``index`` written into the arrays of split leaves.

        ``d_values`` has the stacked gradients [layers, ...] of each leaf. The gradients of the layer's shards are made
        here, by a reduce-scatter of ``terms``, which the method ``terms`` has returned for the layer. Leaves that are
        not split are unchanged.
        """

        def scattered(leaf: _Leaf, term: jax.Array) -> Any:
            route = leaf.route
            shard = collectives.reduce_scatter(term, route.dim, route.axes, route.communication.options)
            grad = gradient_of_shard(shard, route.communication, leaf.stacked)
            return leaf.gradients(differentiated_once(grad, route.axes))

        done = self._of_split(scattered, terms)
        pairs = zip(d_values, done, strict=True)
        return [so_far if grad is None else _put(so_far, index, grad) for so_far, grad in pairs]


def _loop(count: int, index_of: Callable[[Scalar], Scalar], step: Callable[[Any, Any], Any], state: Any) -> Any:
    """Returns the state after ``count`` steps of a loop: step i is ``state = step(index_of(i), state)``, i from 0.

    With ``count`` 0 no loop is compiled.
    """
    return lax.fori_loop(0, count, lambda i, state: step(index_of(i), state), state) if count else state


def _together(first: PyTree, second: PyTree) -> tuple[PyTree, PyTree]:
    """Returns both trees behind a barrier: a computation that reads ``first`` waits for ``second``, too.

    In JAX 0.10 a barrier makes its outputs vary over the axes of any input. An array whose type would change (over axes
    of size 1, say) bypasses the barrier.
    """

    def same_type(after: jax.Array, before: jax.Array) -> jax.Array:
        return after if collectives.varying_axes(after) == collectives.varying_axes(before) else before

    return jax.tree.map(same_type, lax.optimization_barrier((first, second)), (first, second))


def _gradients_of_args(run: Callable[..., Any], args: tuple[Any, ...], cotangents: PyTree) -> tuple[Any, ...]:
    """Returns the gradient of each argument of ``run(*args)``, as trees like ``args``, given cotangents of the results.

    ``cotangents`` has an entry for each differentiable result. Leaves without gradient (integers, frozen leaves in
    boxes) have ``None``.
    """
    # Boxes of frozen leaves are among the arguments, and mark their leaves as not differentiable.
    differentiable, put_back = trees.split_differentiable(args)
    _, pull = jax.vjp(lambda live: trees.split_differentiable(run(*put_back(live)))[0], differentiable)
    (grads,) = pull(jax.tree.leaves(cotangents))
    return put_back(grads, fill_other=lambda leaf: None)


def _at(tree: PyTree, index: Scalar) -> PyTree:
    """Returns a tree like ``tree`` with entry ``index`` of dim 0 of each leaf: a layer of leaves [layers, ...]."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _put(stacked: PyTree, index: Scalar, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, index, 0), stacked, tree)


def _zeros_like_floats(leaf: Sharded) -> jax.Array | None:
    value = leaf.value
    return collectives.zeros_of_type(jax.typeof(value), value.dtype) if leaf.is_differentiable else None
