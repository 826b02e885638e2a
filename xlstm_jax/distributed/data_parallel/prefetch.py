"""A scan over layers that gathers the weights of layers to come while a layer computes, forward and backward.

With weights that are gathered in two stages (over the axis across hosts, then within a host), in iteration i:

  forward    layer i computes                     |  stage 2 of layer i + 1  |  stage 1 of layer i + 2
  backward   layer i is computed again            |  stage 2 of layer i - 1  |  stage 1 of layer i - 2
             and differentiated                   |  the gradient of layer i + 1 is scattered

The entries of one line do not depend on each other, so the compiler can run each collective beside the products of a
layer. Shards travel in the dtypes of ``gather_array``. No weight is gathered without use: the first and the last
iterations stand outside of the loop.

The forward pass keeps each layer's input and no weights. A plain scan that carries gathered weights would keep the
weights of every layer; hence the whole loop has its own derivative (``jax.custom_vjp``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import as_gathered, is_box, leaf_of, rebox, shard_to_gather
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, axes_entry, entry_axes
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.distributed.data_parallel.wire.gather_array import (
    GATHER_SCOPE,
    Primal,
    check_one_gradient_of_one_batch,
    gradient_of_shard,
    packing_of,
    shard_as_sent,
    terms_to_scatter,
)
from xlstm_jax.distributed.data_parallel.wire.packing import Packing
from xlstm_jax.distributed.data_parallel.wire.tracing import path_in_model

Layer = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
Arrays = list[Any]  # None for the gradient of integers


class Route(NamedTuple):
    """How the shards of a leaf travel in each layer: along one dim, one stage for each axis, outermost first."""

    dim: int
    axes: tuple[str, ...]
    names_left: tuple[AxisEntry, ...]  # of the gathered value
    how: Communication
    path: str

    @property
    def stages(self) -> tuple[str, ...]:
        """The axes in the order in which they are gathered."""
        return tuple(reversed(collectives.spread_axes(self.axes)))


def route_of(path: str, leaf: Any) -> Route | None:
    """The route of a leaf in a box for one layer; None where no axis splits it that is bound here.

    Raises:
      ValueError: the leaf travels along several dims, or holds an axis to keep inside of one to gather.
    """
    names, found = tuple(leaf.names) if is_box(leaf) else (), leaf_of(leaf)
    gathered = set(filter(collectives.is_bound, found.gathered_axes))
    dims = [dim for dim, entry in enumerate(names) if gathered.intersection(entry_axes(entry))]
    if not collectives.spread_axes(sorted(gathered)):
        return None
    held = entry_axes(names[dims[0]])
    first = next(i for i, axis in enumerate(held) if axis in gathered)
    if len(dims) > 1 or not gathered.issuperset(held[first:]):
        raise ValueError(
            f"'{path_in_model(path)}' is split as {names}, and gathered over {sorted(gathered)}: layers are gathered "
            "ahead only where one dim is split over these axes, and no axis that stays lies inside of them. Pass "
            "prefetch=False, or write nn.scan(nn.remat(...)) there."
        )
    left = (*names[: dims[0]], axes_entry(held[:first]), *names[dims[0] + 1 :])
    return Route(dims[0], held[first:], left, found.communication, path_in_model(path))


def prefetched_scan(
    layer: Layer, stacked: PyTree, carry: PyTree, per_layer: PyTree, shared: PyTree
) -> tuple[PyTree, PyTree]:
    """``lax.scan`` over layers whose weights are gathered ahead; inside ``shard_map``.

    Frozen leaves are gathered as all others, and not differentiated.

    Args:
      layer: ``layer(weights, carry, inputs, shared)``, which returns (carry, outputs); ``weights`` as
        ``gather_params`` returns them. All that it computes with must be among its arguments.
      stacked: leaves [layers, ...], at least one of them split; their boxes name the dims of one layer.
      carry: what the first layer gets; arrays of any dtype.
      per_layer: leaves [layers, ...]: inputs of each layer, its random keys, say.
      shared: what every layer gets.
    Returns:
      The last carry, and outputs with a layer dim in front. The gradient is that of a scan of ``jax.checkpoint`` of the
      layer with its gather, which keeps nothing.
    """
    leaves = trees.leaves_with_path(stacked)
    empty = [rebox(leaf, None) if is_box(leaf) else None for _, leaf in leaves]
    structure = jax.tree.structure(trees.map_leaves(lambda leaf: 0, stacked))
    routes = [route_of(*leaf) for leaf in leaves]
    found = zip(leaves, routes, strict=True)
    values = [
        shard_to_gather(leaf, route.axes, path) if route else leaf_of(leaf).value for (path, leaf), route in found
    ]
    scan = _Scan(layer, routes, empty, structure, list(map(Primal.of, values)))
    return scan.differentiable()(values, jax.tree.map(jnp.asarray, carry), per_layer, shared)


@dataclass(frozen=True)
class _Scan:
    """The two passes. ``values`` are those of the stacked leaves; ``ahead`` what is gathered of layers to come.

    ``ahead[s]`` holds the split leaves of one layer after s + 1 stages, the last ones whole; None past either end.
    """

    layer: Layer
    routes: Sequence[Route | None]  # of each leaf
    empty: Sequence[Any]  # boxes of one layer, without values
    structure: Any
    primals: Sequence[Primal]  # of the stacked leaves

    @property
    def length(self) -> int:
        return self.primals[0].shape[0]

    @property
    def depth(self) -> int:
        """The stages of the leaf that has most; so many layers are on their way."""
        return max(len(route.stages) for route in self.routes if route)

    @property
    def packings(self) -> list[Packing | None]:
        """How each split leaf of a layer is packed."""

        def packing(route: Route, stacked: Primal) -> Packing | None:
            return packing_of(replace(stacked, shape=stacked.shape[1:]), route.dim, route.axes, route.how)

        return list(map(packing, *self._of_split()))

    def differentiable(self) -> Callable[..., tuple[PyTree, PyTree]]:
        run = jax.custom_vjp(lambda *args: self.forward(*args)[0])
        run.defvjp(self.forward, self.backward)
        return run

    # ------------------------------------------------------------------------------------------------------- one layer

    def compute(self, split: Arrays, whole: Arrays, carry: PyTree, inputs: PyTree, shared: PyTree) -> Any:
        """A layer from its gathered leaves, padding included, and from those that were never split."""
        of_split, of_whole = iter(trees.stored_values(split)), iter(trees.stored_values(whole))
        leaves = [
            self._gathered(next(of_split), route, box) if route else next(of_whole)
            for route, box in zip(self.routes, self.empty, strict=True)
        ]
        return self.layer(jax.tree.unflatten(self.structure, leaves), carry, inputs, shared)

    def _gathered(self, value: jax.Array, route: Route, box: Any) -> Any:
        return as_gathered(rebox(box, value), value, route.names_left, route.axes, route.how)

    def shards(self, values: Arrays, index: Any) -> Arrays:
        """What a layer's split leaves send."""
        found = zip(values, self.routes, strict=True)
        sent = [shard_as_sent(_at(value, index), route.how) for value, route in found if route]
        return [p.pack(shard) if p else shard for p, shard in zip(self.packings, sent, strict=True)]

    def arrived(self, ahead: list[Arrays | None]) -> Arrays:
        """The whole leaves of the layer that comes next; until here they stay packed."""
        return [p.unpack(value) if p else value for p, value in zip(self.packings, ahead[-1] or (), strict=True)]

    def whole(self, values: Arrays, index: Any) -> Arrays:
        return [_at(value, index) for value, route in zip(values, self.routes, strict=True) if not route]

    def to_differentiate(self, arrays: Arrays, is_among: Callable[[Route | None], bool] = lambda route: True) -> Arrays:
        """Arrays of those leaves whose route ``is_among`` them; frozen ones in their boxes, which take no gradient."""
        among = [box for box, route in zip(self.empty, self.routes, strict=True) if is_among(route)]
        found = zip(arrays, among, strict=True)
        return [value if leaf_of(box).trainable else rebox(box, value) for value, box in found]

    def advance(self, ahead: list[Arrays | None], shards: Arrays | None) -> list[Arrays | None]:
        """Each layer that is on its way goes one stage on, and the ``shards`` of another one set out."""
        with jax.named_scope(GATHER_SCOPE):
            return [self._stage(stage, arrays) for stage, arrays in enumerate([shards, *ahead[:-1]])]

    def _stage(self, stage: int, arrays: Arrays | None) -> Arrays | None:
        def gather(value: jax.Array, route: Route, packing: Packing | None) -> jax.Array:
            # A leaf of fewer stages sets out later, so that it is whole no sooner.
            axes = route.stages[max(0, stage - self.depth + len(route.stages)) :][:1]
            axes = axes if stage >= self.depth - len(route.stages) else ()
            return collectives.all_gather(value, 0 if packing else route.dim, axes)

        routes, _ = self._of_split()
        return arrays and list(map(gather, arrays, routes, self.packings))

    def set_out(self, values: Arrays, order: Sequence[int]) -> list[Arrays | None]:
        """What is on its way before the first iteration, which computes layer ``order[0]``."""
        ahead: list[Arrays | None] = [None] * self.depth
        for position in range(self.depth):
            ahead = self.advance(ahead, self.shards(values, order[position]) if position < len(order) else None)
        return ahead

    # --------------------------------------------------------------------------------------------------------- forward

    def forward(self, values: Arrays, carry: PyTree, per_layer: PyTree, shared: PyTree) -> tuple[Any, Any]:
        def step(index: Any, state: Any, *, goes_on: bool = True) -> Any:
            carry, ahead, kept, outputs = state
            further = self.advance(ahead, self.shards(values, index + self.depth) if goes_on else None)
            new, out = self.compute(
                self.arrived(ahead), self.whole(values, index), carry, _at(per_layer, index), shared
            )
            return new, further, _put(kept, index, carry), _put(outputs, index, out)

        ahead = self.set_out(values, range(self.length))
        one = jax.eval_shape(self.compute, self.arrived(ahead), self.whole(values, 0), carry, _at(per_layer, 0), shared)
        kept = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.length, *jnp.shape(x))), carry)
        outputs = jax.tree.map(partial(_zeros, self.length), one[1])
        in_loop = max(0, self.length - self.depth)
        state = _loop(in_loop, lambda i: i, step, (carry, ahead, kept, outputs))
        for index in range(in_loop, self.length):
            state = step(index, state, goes_on=False)
        carry, _, kept, outputs = state
        return (carry, outputs), (values, kept, per_layer, shared)

    # -------------------------------------------------------------------------------------------------------- backward

    def backward(self, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        values, kept, per_layer, shared = residuals
        d_carry, d_outputs = jax.tree.map(_unless_float0, cotangents)
        self._check(jax.tree.leaves((d_carry, d_outputs)))

        def step(index: Any, state: Any, *, is_first: bool = False, goes_on: bool = True) -> Any:
            d_carry, ahead, pending, (d_values, d_per_layer, d_shared) = state
            further = self.advance(ahead, self.shards(values, index - self.depth) if goes_on else None)
            d_values = d_values if is_first else self.scatter(d_values, index + 1, pending)
            # Gathered beside what is computed again; a compiler that is free puts it off until scatters are under way.
            d_carry, further = _together(d_carry, further)
            split = self.to_differentiate(self.arrived(ahead), bool)
            whole = self.to_differentiate(self.whole(values, index), lambda route: not route)
            args = split, whole, _at(kept, index), _at(per_layer, index), shared
            d_split, d_whole, d_carry, d_inputs, d_more = _pull(self.compute, args, (d_carry, _at(d_outputs, index)))
            d_values = self._put_whole(d_values, index, d_whole)
            grads = d_values, _put(d_per_layer, index, d_inputs), jax.tree.map(jnp.add, d_shared, d_more)
            return d_carry, further, self.terms(d_split), grads

        start = self.to_differentiate(values), per_layer, shared
        grads = tuple(trees.map_leaves(_zeros_like_floats, tree) for tree in start)
        state = (d_carry, self.set_out(values, range(self.length)[::-1]), None, grads)
        last = self.length - 1
        state = step(last, state, is_first=True, goes_on=last >= self.depth)
        in_loop = max(0, last - self.depth)
        state = _loop(in_loop, lambda i: last - 1 - i, step, state)
        for index in range(last - 1 - in_loop, -1, -1):
            state = step(index, state, goes_on=False)
        d_carry, _, pending, (d_values, d_per_layer, d_shared) = state
        return self.scatter(d_values, 0, pending), d_carry, d_per_layer, d_shared

    def terms(self, grads: Arrays) -> Arrays:
        """This device's terms of the mean gradients of a layer's split leaves, which the next iteration scatters."""
        of_leaves = zip(grads, *self._of_split(), strict=True)
        return [
            None if grad is None else terms_to_scatter(grad, route.axes, route.how, primal)
            for grad, route, primal in of_leaves
        ]

    def scatter(self, d_values: Arrays, index: Any, terms: Arrays) -> Arrays:
        """The gradients of all layers, with those of one from their terms."""

        def scatter(term: Any, route: Route, primal: Primal) -> Any:
            if term is None:
                return None
            return gradient_of_shard(collectives.reduce_scatter(term, route.dim, route.axes), route.how, primal)

        done = iter([scatter(*leaf) for leaf in zip(terms, *self._of_split(), strict=True)])
        found = zip(d_values, self.routes, strict=True)
        return [_put(grads, index, next(done)) if route else grads for grads, route in found]

    def _put_whole(self, d_values: Arrays, index: Any, grads: Arrays) -> Arrays:
        left, found = iter(grads), zip(d_values, self.routes, strict=True)
        return [grads if route else _put(grads, index, next(left)) for grads, route in found]

    def _of_split(self) -> tuple[list[Route], list[Primal]]:
        pairs = [(r, p) for r, p in zip(self.routes, self.primals, strict=True) if r]
        return [route for route, _ in pairs], [primal for _, primal in pairs]

    def _check(self, cotangents: Arrays) -> None:
        for route, primal in zip(*self._of_split(), strict=True):
            for cotangent in cotangents:
                check_one_gradient_of_one_batch(route.path, primal, cotangent, route.axes)


def _loop(count: int, index_of: Callable[[Any], Any], step: Callable[[Any, Any], Any], state: Any) -> Any:
    """``count`` steps in a loop; of none the compiler sees nothing."""
    return lax.fori_loop(0, count, lambda i, state: step(index_of(i), state), state) if count else state


def _together(first: PyTree, second: PyTree) -> tuple[PyTree, PyTree]:
    """The same values: what reads ``first`` waits for ``second``, too.

    In JAX 0.10 a barrier makes all vary over the axes of any; what would get another type, as over axes of size 1, is
    passed by it.
    """

    def same_type(after: jax.Array, before: jax.Array) -> jax.Array:
        return after if collectives.varying_axes(after) == collectives.varying_axes(before) else before

    return jax.tree.map(same_type, lax.optimization_barrier((first, second)), (first, second))


def _pull(run: Callable[..., Any], args: tuple[Any, ...], cotangents: PyTree) -> tuple[Any, ...]:
    """The gradients of ``run`` by each of ``args``. Leaves without gradient are None, there and in ``cotangents``."""
    live, put_back = trees.split_differentiable(args)
    _, pull = jax.vjp(lambda live: trees.split_differentiable(run(*put_back(live)))[0], live)
    (grads,) = pull(jax.tree.leaves(cotangents))
    return put_back(grads, rest=lambda leaf: None)


def _at(tree: PyTree, index: Any) -> PyTree:
    """What a layer has of leaves [layers, ...]."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _put(stacked: PyTree, index: Any, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, index, 0), stacked, tree)


def _zeros(length: int, abstract: Any) -> jax.Array:
    """[length, ...] for what ``jax.eval_shape`` found."""
    zeros = collectives.zeros_of_type(abstract, abstract.dtype)
    return jnp.broadcast_to(zeros, (length, *abstract.shape))


def _zeros_like_floats(leaf: Any) -> jax.Array | None:
    return collectives.zeros_of_type(jax.typeof(leaf), leaf.dtype) if leaf_of(leaf).is_differentiable else None


def _unless_float0(cotangent: Any) -> Any:
    return None if cotangent.dtype == jax.dtypes.float0 else cotangent
