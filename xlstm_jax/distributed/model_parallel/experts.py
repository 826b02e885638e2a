"""Mixture of experts, with the experts split over devices: tokens are sent to their experts, and the results back.

Life of the n tokens X[n, d] of a device. Each token is routed to k of E experts; each of p devices along "ep" has E / p
experts:
  route      X[n, d] -- router -->  logits[n, E] -- top k -->  experts[n, k], weights[n, k]
  dispatch   X[n, d] -- sorted by expert, all-to-all -->  the rows of all p devices for this device's experts
  compute    each expert on its rows, grouped
  combine    -- all-to-all, unsorted -->  Y[n, k, d] -- weighted sum -->  Y[n, d]

Without a capacity no token is dropped: a device has room for p n min(k, E / p) rows, the most that can be sent to a
device, and computes only the rows that arrive. The result is the same as on one device. With a capacity an expert
accepts C rows of each group of rows, and the result is the same as on one device that cuts its rows into the same
groups.

The axis of experts may be an axis of the batch: each device has different tokens, and the gradient of an expert, a sum
over the tokens of all devices, is divided like any gradient (``sync_gradients``). If the tokens are instead replicated
along the axis, each device sends a part of the tokens to their experts, and the results are gathered.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.layer_names import with_layer_names
from xlstm_jax.distributed.data_parallel.leaf import SPLIT_BY_RULES, is_box, leaf_of, split_by_model
from xlstm_jax.distributed.data_parallel.modules.linen_module import apart_from_model
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import (
    as_axis_names,
    axes_entry,
    common_dtype,
    entry_axes,
    promoting,
)
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS
from xlstm_jax.distributed.data_parallel.wire.transposes import (
    Exchange,
    all_parts,
    local_part,
    send_back,
    send_rows,
    starts_of,
)
from xlstm_jax.distributed.model_parallel.router import Routing, load_balancing_loss, route_tokens, router_z_loss

Array = jax.Array
Expert = Callable[[PyTree, Array], Array]  # (the parameters of one expert, rows [m, d]) -> rows [m, e]

BLOCK_SIZE = 128  # rows that an expert computes at a time


# ------------------------------------------------------------------------------------------------ experts on their rows


def apply_by_group(expert: Expert, params: PyTree, rows: Array, sizes: Array, block_size: int = BLOCK_SIZE) -> Array:
    """Applies each expert to its rows, which are sorted by expert.

    An expert takes ``block_size`` rows at a time, in a loop over its rows: rows after all groups cost nothing. The last
    block of an expert may extend into the next groups, so up to ``block_size`` - 1 rows of each expert are computed in
    vain. The backward pass recomputes each expert, like ``nn.remat``. Runs on a single device, without collectives.

    >>> double_or_triple, rows = jnp.array([2.0, 3.0]), jnp.ones((4, 1))
    >>> apply_by_group(lambda factor, rows: factor * rows, double_or_triple, rows, jnp.array([1, 2])).ravel().tolist()
    [2.0, 3.0, 3.0, 0.0]

    Args:
      expert: ``expert(params of an expert, rows [m, d])`` -> [m, e], each row independently.
      params: the parameters of the experts, stacked along a leading dim of experts.
      rows: [r, d], sorted by expert.
      sizes: integers [experts], the number of rows of each expert; their sum is at most r.
      block_size: at least 1.
    Returns:
      [r, e]; rows after all groups are 0.
    Raises:
      ValueError: ``block_size`` is below 1.
    """
    if block_size < 1:
        raise ValueError(f"apply_by_group: block_size={block_size} must be a positive number of rows.")
    # Cast here, outside of the custom rule: the cotangents then vary over the same axes as the inputs, and no sum over
    # devices runs within a loop whose length differs by device. Do not cast to axes over which only parameters vary:
    # along those axes the expert itself is split (tensor parallel), and takes rows that are replicated by their type.
    axes = collectives.varying_axes(rows) | collectives.varying_axes(sizes)
    params, rows, sizes = collectives.to_varying((params, rows, sizes.astype(jnp.int32)), sorted(axes))
    return _by_group(params, rows, sizes, expert, min(block_size, max(len(rows), 1)))


def _by_group(params: PyTree, rows: Array, sizes: Array, expert: Expert, block: int) -> Array:
    return _by_group_fwd(params, rows, sizes, expert, block)[0]


def _by_group_fwd(params: PyTree, rows: Array, sizes: Array, expert: Expert, block: int) -> tuple[Array, PyTree]:
    """Forward rule of ``_by_group``: applies expert i to its ``sizes[i]`` rows, ``block`` rows at a time.

    The rows [r, d] are sorted by expert, and ``params`` are stacked along a leading dim of experts. Returns the results
    [r, e], 0 in the rows after all groups, and the residuals ``(params, rows, sizes)``.
    """
    padded = _with_block(rows, block)

    def of_one_group(out: Array, group: Any) -> tuple[Array, None]:
        of_one, start, size = group

        # The last block of a group extends into the next groups, which then overwrite their rows.
        def of_one_block(i: Array, out: Array) -> Array:
            at = start + i * block
            computed = expert(of_one, lax.dynamic_slice_in_dim(padded, at, block))
            return lax.dynamic_update_slice_in_dim(out, computed, at, 0)

        return lax.fori_loop(0, -(-size // block), of_one_block, out), None

    like = jax.eval_shape(expert, jax.tree.map(lambda x: x[0], params), padded[:block])
    # Results vary over the axes of the rows, and over further axes if a split expert returns different features on each
    # device.
    out = collectives.zeros_of_type(like.update(shape=(len(padded), *like.shape[1:])), like.dtype)
    out = collectives.to_varying(out, collectives.varying_axes(rows))
    out, _ = lax.scan(of_one_group, out, (params, starts_of(sizes), sizes))
    return _up_to(sizes, out[: len(rows)]), (params, rows, sizes)


def _by_group_bwd(expert: Expert, block: int, residuals: PyTree, d_out: Array) -> tuple[PyTree, Array, None]:
    """Backward rule of ``_by_group``: returns the gradients of params and rows, and None for the sizes.

    ``d_out`` [r, e] is the gradient of the results, and ``residuals`` are (params, rows, sizes). The experts are
    computed again, ``block`` rows at a time. The gradients have the shapes and dtypes of params and rows; rows after
    all groups have the gradient 0.
    """
    params, rows, sizes = residuals
    padded, d_out = _with_block(rows, block), _with_block(_up_to(sizes, d_out), block)

    def of_one_group(d_rows: Array, group: Any) -> tuple[Array, PyTree]:
        of_one, start, size = group

        def of_one_block(i: Array, sums: Any) -> Any:
            d_rows, d_params = sums
            at = start + i * block
            in_group = at + jnp.arange(block) < start + size
            coming = _where_rows(in_group, lax.dynamic_slice_in_dim(d_out, at, block), 0)
            # The derivative at rows of another expert may be infinite (a norm of zeros), and 0 times infinity is NaN.
            taken = lax.dynamic_slice_in_dim(padded, at, block)
            _, backward = jax.vjp(expert, of_one, _where_rows(in_group, taken, taken[:1]))
            of_params, of_rows = backward(coming)
            d_params = jax.tree.map(lambda total, x: total + x.astype(total.dtype), d_params, of_params)
            return lax.dynamic_update_slice_in_dim(d_rows, of_rows, at, 0), d_params

        # In float32: a sum over many blocks in a narrow dtype would stop growing.
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, common_dtype(x.dtype, jnp.float32)), of_one)
        d_rows, d_params = lax.fori_loop(0, -(-size // block), of_one_block, (d_rows, zeros))
        return d_rows, jax.tree.map(lambda total, x: total.astype(x.dtype), d_params, of_one)

    d_rows, d_params = lax.scan(of_one_group, jnp.zeros_like(padded), (params, starts_of(sizes), sizes))
    return d_params, _up_to(sizes, d_rows[: len(rows)]), None


# A custom rule: JAX does not differentiate loops whose number of iterations is known only at run time.
_by_group = jax.custom_vjp(_by_group, nondiff_argnums=(3, 4))
_by_group.defvjp(_by_group_fwd, _by_group_bwd)


def _with_block(rows: Array, block: int) -> Array:
    # Pad with a block of zeros: JAX shifts a slice that ends beyond the array, and would return different rows.
    return jnp.concatenate([rows, jnp.zeros_like(rows[:1], shape=(block, *rows.shape[1:]))])


def _up_to(sizes: Array, rows: Array) -> Array:
    # Set rows after all groups to zeros: no expert has computed these rows.
    return _where_rows(jnp.arange(len(rows)) < sizes.sum(), rows, 0)


def _where_rows(condition: Array, rows: Array, other: Array | float) -> Array:
    return jnp.where(condition.reshape(-1, *(1,) * (rows.ndim - 1)), rows, other)


# ------------------------------------------------------------------------------------------------- dispatch and combine


def mix_experts(
    expert: Expert,
    params: PyTree,
    rows: Array,
    routing: Routing,
    axes: AxisNames | tuple[()] = (),
    *,
    block_size: int = BLOCK_SIZE,
) -> Array:
    """Applies each token's experts, on the devices of the experts, and sums the weighted results; drops no token.

    >>> factors = jnp.array([[10.0], [20.0]])  # two experts; the tokens go to one each
    >>> routing = Routing(jnp.array([[1], [0]]), jnp.ones((2, 1)), jnp.zeros((2, 2)))
    >>> mix_experts(lambda factor, rows: factor * rows, factors, jnp.ones((2, 1)), routing).ravel().tolist()
    [20.0, 10.0]

    Args:
      expert, block_size: as for ``apply_by_group``.
      params: the parameters of this device's E / p experts, stacked along a leading dim; p devices along ``axes``.
      rows: [n, d], this device's tokens.
      routing: experts and weights of ``rows``. The k choices of a token are distinct numbers of experts, from 0 to
        E - 1 on every device. The result of a token with invalid choices is NaN.
      axes: the axes that experts are split over, outermost first; () if each device has all experts.
    Returns:
      [n, e], in the dtype of the experts' results.
    Raises:
      ValueError: the devices do not divide the experts.
    """
    axes = as_axis_names(axes) if axes else ()
    experts, k = routing.logits.shape[1], routing.experts.shape[1]
    _check_experts_divide(experts, axes, "mix_experts")
    # Invalid choices are sorted after all experts, and so take no place of valid rows.
    chosen = jnp.where(_fits(routing)[:, None], routing.experts, experts).ravel()
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.zeros(experts, jnp.int32).at[chosen].add(1)
    own_experts = partial(apply_by_group, expert, params, block_size=block_size)
    sent = jnp.asarray(rows)[order // k]  # choice c belongs to token c // k
    if collectives.spread_axes(axes):
        most = len(rows) * min(k, experts // collectives.axis_size(axes))
        results = _exchanged(own_experts, sent, sizes, axes, most)
    else:
        results = own_experts(sent, sizes)
    return _combined(results[jnp.argsort(order)].reshape(*routing.weights.shape, -1), routing)


def _check_experts_divide(experts: int, axes: tuple[str, ...], caller: str) -> None:
    if experts % (devices := collectives.axis_size(axes)):
        raise ValueError(
            f"{caller}: {experts} experts do not divide over the {devices} devices along {axes}. Take a multiple of "
            f"{devices} experts, or {math.gcd(experts, devices)} devices for them."
        )


@promoting
def _fits(routing: Routing) -> Array:
    """Returns a mask bool [n]: True for a token whose k chosen experts are distinct numbers from 0 to E - 1."""
    chosen, others = routing.experts, ~jnp.eye(routing.experts.shape[1], dtype=bool)
    twice = ((chosen[:, :, None] == chosen[:, None, :]) & others).any((1, 2))
    return ~twice & ((chosen >= 0) & (chosen < routing.logits.shape[1])).all(1)


@promoting
def _combined(results: Array, routing: Routing) -> Array:
    """Returns for each token the sum of its k experts' results times the weights of ``routing``: [n, k, e] -> [n, e].

    The result of a token is NaN if its choices are not distinct numbers from 0 to E - 1.
    """
    # NaN, not 0: a router with invalid choices must not look like a router that drops tokens.
    sums = jnp.einsum("nke,nk->ne", results, routing.weights.astype(results.dtype))
    return _where_rows(_fits(routing), sums, jnp.nan)


def _exchanged(
    own_experts: Callable[[Array, Array], Array], rows: Array, sizes: Array, axes: tuple[str, ...], most: int
) -> Array:
    """Returns the experts' results [r, e] for this device's rows [r, d], each computed on the device of its expert.

    The rows are sorted by expert, and the results are in the order of the rows. Devices exchange the counts of rows by
    device and expert, then the rows, then the results.

    Args:
      own_experts: ``own_experts(rows, sizes)`` applies the E / p experts of this device to rows sorted by expert.
      rows: this device's rows, for the experts of all devices.
      sizes: integers [E], how many of ``rows`` are for each expert.
      axes: the axes that the experts are split over, p devices.
      most: an upper bound of the rows that a device sends to another device; the receiver has room for as many rows of
        each device.
    """
    # The receiver needs the expert of each row to sort the rows by expert.
    sent = sizes.reshape(collectives.axis_size(axes), -1)  # [p, E / p]
    arrived_sizes = collectives.all_to_all(sent, axes)
    counts = sent.sum(1)
    exchanged = counts, arrived_sizes.sum(1), Exchange(axes, most, len(rows))
    arrived = send_rows(rows, *exchanged)
    # [p, most]: the expert of each row that arrives; empty places get an index after all experts.
    place = jnp.arange(most)[None, :, None]
    expert = (place >= jnp.cumsum(arrived_sizes, axis=1)[:, None, :]).sum(-1)
    order = jnp.argsort(expert.ravel(), stable=True)
    results = own_experts(arrived[order], arrived_sizes.sum(0))[jnp.argsort(order)]
    return send_back(results, *exchanged)


def mix_experts_with_capacity(
    expert: Expert,
    params: PyTree,
    rows: Array,
    routing: Routing,
    axes: AxisNames | tuple[()] = (),
    *,
    capacity_factor: float,
    row_groups: int = 1,
    row_weights: Array | None = None,
) -> tuple[Array, Array]:
    """Computes ``mix_experts`` with a limit of C = ceil(capacity_factor k m / E) rows per expert and group of m rows.

    The n rows are cut into ``row_groups`` groups of m rows. In each group an expert accepts the first C rows that chose
    the expert: all first choices before all second choices, each in row order. Further choices are dropped, and add
    nothing to their tokens. Groups contain rows of one device only. So N devices with different rows and
    ``row_groups=1`` compute the same as a single device with the rows of all devices and ``row_groups=N``.

    >>> routing = Routing(jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1)), jnp.zeros((4, 2)))  # all to the first of 2
    >>> one = lambda factor, rows: factor * rows
    >>> result, dropped = mix_experts_with_capacity(
    ...     one, jnp.ones((2, 1)), jnp.ones((4, 1)), routing, capacity_factor=1.0
    ... )
    >>> result.ravel().tolist(), float(dropped)
    ([1.0, 1.0, 0.0, 0.0], 0.5)

    Args:
      expert, params, rows, routing, axes: as for ``mix_experts``.
      capacity_factor, row_groups: determine C and m, see above; m = n / ``row_groups``.
      row_weights: [n]; rows of weight 0 (padding) take no places, and have the result 0.
    Returns:
      [n, e], and the fraction of this device's choices that were dropped, without padding, float32 [].
    Raises:
      ValueError: as ``mix_experts``; or the groups do not divide the rows, or the capacity is below 1.
    """
    axes = as_axis_names(axes) if axes else ()
    experts, k = routing.logits.shape[1], routing.experts.shape[1]
    _check_experts_divide(experts, axes, "mix_experts_with_capacity")
    if len(rows) % row_groups:
        raise ValueError(
            f"row_groups={row_groups} does not divide the {len(rows)} rows of this device. Capacities are counted in "
            f"each group, so all must have the same size: take a divisor of {len(rows)}."
        )
    capacity = math.ceil(capacity_factor * k * (len(rows) // row_groups) / experts)
    if capacity < 1:
        raise ValueError(
            f"capacity_factor={capacity_factor!r} leaves no row to an expert; it must be positive, 1.25, say."
        )
    counts = jnp.ones(len(rows), bool) if row_weights is None else row_weights != 0
    grouped = rows.reshape(row_groups, -1, rows.shape[1])
    # Padding and invalid choices are sorted after all experts.
    chosen = jnp.where((counts & _fits(routing))[:, None], routing.experts, experts).reshape(row_groups, -1, k)
    sources, places = jax.vmap(partial(_slots, experts=experts, capacity=capacity))(chosen)
    sent = jax.vmap(lambda rows, sources: rows[sources])(grouped, sources)
    # [groups, E, C, d] -> [E, groups C, d]
    sent = jnp.moveaxis(sent, 0, 1).reshape(experts, row_groups * capacity, -1)
    results = _exchanged_slots(jax.vmap(expert), params, sent, axes)
    results = jnp.moveaxis(results.reshape(experts, row_groups, capacity, -1), 1, 0)
    taken = (places < capacity) & (chosen < experts)
    place = jnp.minimum(places, capacity - 1)
    back = jax.vmap(lambda results, chosen, place: results[chosen, place])(results, chosen, place)
    back = jnp.where(taken[..., None], back, 0).reshape(*routing.weights.shape, -1)
    choices = k * counts.sum(dtype=jnp.float32)
    return _combined(back, routing), (choices - taken.sum(dtype=jnp.float32)) / jnp.maximum(choices, 1)


@promoting
def _slots(chosen: Array, *, experts: int, capacity: int) -> tuple[Array, Array]:
    """Assigns the choices of one group of n rows to slots: each of E = ``experts`` experts has C = ``capacity`` slots.

    ``chosen`` [n, k] are the experts that each row chose, the first choice first. An entry E means that the row does
    not count; the entry takes no slot. First choices of all rows take slots before second choices, each in row order.

    Returns:
      A pair. The index of the row in each slot, [E, C]; an empty slot has the index of some other row. And for each
      choice its place among the choices of the same expert, [n, k]; a choice with a place from C on is dropped.
    """
    n, k = chosen.shape
    by_rank = chosen.T.ravel()  # first choices first
    order = jnp.argsort(by_rank, stable=True)
    sizes = jnp.zeros(experts, jnp.int32).at[by_rank].add(1)
    starts, slot = starts_of(sizes), jnp.arange(capacity)
    # An empty slot gets the first row that counts; its result is not read. Zeros would fail: the derivative of an
    # expert there may be infinite (a norm), and 0 times infinity is NaN.
    sources = order[jnp.where(slot < sizes[:, None], starts[:, None] + slot, 0)] % n
    places = jnp.argsort(order) - starts[by_rank]
    return sources, places.reshape(k, n).T


def _exchanged_slots(experts: Expert, params: PyTree, slots: Array, axes: tuple[str, ...]) -> Array:
    """Computes the rows in the slots of all E experts, on the devices of the experts: [E, C, d] -> [E, C, e].

    ``slots`` has this device's C rows for each expert. ``experts(params, rows [E / p, p C, d])`` applies the experts of
    this device, whose parameters ``params`` are, to the rows that the p devices along ``axes`` sent. Two all-to-alls
    send the rows and return the results.
    """
    devices = collectives.axis_size(axes)
    count, capacity, size = slots.shape
    arrived = collectives.all_to_all(slots.reshape(devices, -1, capacity, size), axes)
    local_slots = jnp.moveaxis(arrived, 0, 1).reshape(count // devices, devices * capacity, size)
    results = experts(params, local_slots).reshape(count // devices, devices, capacity, -1)
    return collectives.all_to_all(jnp.moveaxis(results, 1, 0), axes).reshape(count, capacity, -1)


# ---------------------------------------------------------------------------------------------------------- the module


class Experts(nn.Module):
    """Mixture of ``num_experts`` modules, each with parameters of its own; each token goes to ``top_k`` of them.

    >>> class MLP(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         x = nn.gelu(nn.Dense(32)(x))
    ...         return nn.Dense(8)(x)
    >>> mixture = Experts(MLP(), num_experts=4, top_k=2, axis=None)
    >>> params = mixture.init(jax.random.key(0), jnp.ones((2, 3, 8)))["params"]
    >>> jax.tree.map(jnp.shape, params)["experts"]["Dense_0"], params["router"]["kernel"].shape
    ({'bias': (4, 32), 'kernel': (4, 8, 32)}, (8, 4))

    Inside ``shard_map``, in either ``check_vma`` mode, each device has ``num_experts`` / p experts over the p
    devices of ``axis``, and tokens are sent. Outside, as in ``init``, a device has all experts. Parameters, names
    and results are the same as on one device. Wrap the module (``shard_module_params(Experts, "fsdp")``) to split
    each expert over further axes.

    The router's losses are sown into the collection "losses" as "load_balance" and "router_z", and the fraction of
    dropped choices into "intermediates" as "dropped"; ``init`` sows nothing. See ``load_balancing_loss``.

    Attributes:
      module: the expert, which maps rows [m, d] to [m, e], each row independently. It may have parameters, but no
        further collections (BatchNorm), and draws no random keys (dropout).
      num_experts, top_k: number of experts E, and of experts for each token, 1 to E.
      axis: the mesh axis, or axes, that experts are split over; None: each device has all experts.
      shared: a module applied to all tokens; its result is added.
      capacity_factor: None: no token is dropped. A number: see ``mix_experts_with_capacity``.
      row_groups: with ``capacity_factor``, the number of groups into which the rows of this device are cut. On a single
        device pass N to get the result of N devices.
      normalize: divide the weights of each token's experts by their sum.
      batch_axes: all axes along which tokens differ. None: under ``check_vma=True`` the axes in the tokens' type, under
        ``check_vma=False`` the batch axes of ``value_and_grad`` or of the ready step. Under ``check_vma=False`` the
        argument is required in a custom step, and if ``axis`` is not a batch axis.
      block_size: number of rows that an expert computes at a time, without a capacity.
    """

    module: nn.Module
    num_experts: int
    top_k: int
    axis: AxisNames | None = "ep"
    shared: nn.Module | None = None
    capacity_factor: float | None = None
    row_groups: int = 1
    normalize: bool = False
    batch_axes: AxisNames | None = None
    block_size: int = BLOCK_SIZE

    @nn.compact
    def __call__(self, x: Array, row_weights: Array | None = None) -> Array:
        """Routes each token to ``top_k`` experts, and sums the weighted results: [..., d] -> [..., e].

        Tokens with ``row_weights`` [...] of 0 neither count in the router's losses nor take places of a capacity.

        Raises:
          ValueError: the devices do not divide the experts or the shared tokens; ``batch_axes`` contradicts the types
            or the step, or is missing; the parameters are of another number of experts; or as
            ``mix_experts_with_capacity``.
        """
        rows = x.reshape(-1, x.shape[-1])
        axes = () if self.axis is None else collectives.bound_or_none(as_axis_names(self.axis), caller="Experts")
        shared_axes = self._shared_axes(rows, axes)
        self._check_divides(rows, axes, shared_axes)
        logits = nn.Dense(self.num_experts, use_bias=False, dtype=jnp.float32, name="router")(rows)
        routing = route_tokens(logits, self.top_k, normalize=self.normalize)
        weights = None if row_weights is None else row_weights.ravel()
        self._sow_losses(routing, weights)
        params = self._params(axes, rows)
        local = rows, routing.weights, routing.logits
        if shared_axes:  # local_part has no forward-mode derivative, so call it only if needed
            local = jax.tree.map(lambda x: local_part(x, 0, shared_axes), local)
        chosen, weights = jax.tree.map(lambda x: collectives.local_shard(x, 0, shared_axes), (routing.experts, weights))
        out = self._apply_to_local_tokens(params, local[0], Routing(chosen, *local[1:]), weights, axes, shared_axes)
        out = all_parts(out, 0, shared_axes) if shared_axes else out
        if self.shared is not None:
            out = out + self.shared(rows)
        return out.reshape(*x.shape[:-1], -1)

    def _apply_to_local_tokens(
        self,
        params: PyTree,
        rows: Array,
        routing: Routing,
        weights: Array | None,
        axes: tuple[str, ...],
        shared_axes: tuple[str, ...],
    ) -> Array:
        """Applies to each of this device's tokens the chosen experts: rows [n, d] -> weighted sums [n, e].

        Devices exchange tokens if experts are split over ``axes``. With a capacity, the fraction of dropped choices is
        sown as "dropped", over all devices along ``shared_axes``, which compute different tokens of a replicated input.

        Args:
          params: the parameters of this device's experts, stacked along a leading dim.
          rows: this device's tokens.
          routing: chosen experts and weights of ``rows``.
          weights: [n], 0 for padding; None: no padding.
          axes, shared_axes: the axes over which experts are split, and those of them along which tokens are replicated.
        """
        module = self.module.clone(parent=None, name=None)

        def expert(params: PyTree, rows: Array) -> Array:
            with apart_from_model():
                return cast(Array, module.apply({"params": params}, rows))

        if self.capacity_factor is None:
            return mix_experts(expert, params, rows, routing, axes, block_size=self.block_size)
        mixed = partial(mix_experts_with_capacity, expert, params, rows, routing, axes, row_weights=weights)
        out, dropped = mixed(capacity_factor=self.capacity_factor, row_groups=self.row_groups)
        if not self.is_initializing():
            # Report the dropped fraction over all devices that share these tokens.
            counted = jnp.float32(len(rows)) if weights is None else jnp.sum(weights != 0, dtype=jnp.float32)
            sums = collectives.to_varying([dropped * counted, counted], shared_axes)
            dropped, counted = collectives.psum(sums, [shared_axes, shared_axes])
            self.sow("intermediates", "dropped", dropped / jnp.maximum(counted, 1))
        return out

    def _sow_losses(self, routing: Routing, weights: Array | None) -> None:
        # Values sown in `init` would become part of the state.
        if self.is_initializing():
            return
        bound = collectives.spread_axes(collectives.manual_axes())
        balance = load_balancing_loss(routing, self._token_axes(routing.logits, bound), weights)
        self.sow("losses", "load_balance", balance)
        self.sow("losses", "router_z", router_z_loss(routing, weights))

    def _token_axes(self, rows: Array, among: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the axes in ``among`` along which devices have different tokens, in the order of ``among``.

        The field ``batch_axes`` names these axes. If the field is None, they are the axes along which the type of
        ``rows`` varies under ``check_vma=True``, and under ``check_vma=False`` the batch axes of the step (all of
        ``among`` if unknown).

        Raises:
          ValueError: the field ``batch_axes`` contradicts the type of ``rows``.
        """
        varying = collectives.varying_axes(rows)
        tracked = [axis for axis in among if collectives.type_shows_varying(axis, rows)]
        if self.batch_axes is None:
            batch_axes = tuple(varying) if tracked else RUNNING_LOSS.get().batch_axes or among
        else:
            batch_axes = as_axis_names(self.batch_axes)
        differ = tuple(axis for axis in among if axis in batch_axes)
        for axis in tracked:
            if (axis in differ) != (axis in varying):
                has = "differ" if axis not in differ else "are the same"
                raise ValueError(
                    f"Experts(batch_axes={self.batch_axes!r}): by their type, {jax.typeof(rows)}, tokens {has} along "
                    f"{axis!r}. Name all axes of the batch and no others, or leave batch_axes= out."
                )
        return differ

    def _shared_axes(self, rows: Array, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the axes in ``axes`` along which tokens are replicated, so that devices divide the tokens.

        ``axes`` are the axes of the experts, and ``rows`` the tokens. Axes of a single device are left out.

        Raises:
          ValueError: the field ``batch_axes`` is missing under ``check_vma=False``, or contradicts types or step.
        """
        spread = collectives.spread_axes(axes)
        for axis in spread:
            if not collectives.is_tracked(axis):
                self._check_batch_axes(axis)
        differ = self._token_axes(rows, spread)
        return tuple(axis for axis in spread if axis not in differ)

    def _check_batch_axes(self, axis: str) -> None:
        """Raises a ``ValueError`` if the field ``batch_axes`` does not settle whether tokens differ along ``axis``.

        Called under ``check_vma=False``, where types do not show the axes. The field is None, and ``axis`` is no batch
        axis of the running step; or field and step disagree on ``axis``. Nothing is raised in the reference computation
        of ``check_step``.
        """
        loss = RUNNING_LOSS.get()
        of_step = loss.batch_axes
        if loss.is_reference:  # the reference treats tokens as different along all axes, which only adds work
            return
        if self.batch_axes is None and axis not in of_step:
            known = f"the step's batch is split over {of_step}" if of_step else "the step names no batch axes"
            raise ValueError(
                f"Experts(axis={self.axis!r}): under check_vma=False types do not show whether tokens differ along "
                f"{axis!r}, and {known}. Pass batch_axes= with all axes along which tokens differ; if {axis!r} is one "
                "of them, average gradients over it."
            )
        differ = self.batch_axes is None or axis in as_axis_names(self.batch_axes)
        if of_step and differ != (axis in of_step):
            raise ValueError(
                f"Experts(batch_axes={self.batch_axes!r}): the step's batch is split over {of_step}, and the gradients "
                f"of the router would be wrong along {axis!r}. Pass the axes of the step's batch. For tokens split by "
                "sequence parallelism call join_tokens before, or use check_vma=True."
            )

    def _check_divides(self, rows: Array, axes: tuple[str, ...], shared_axes: tuple[str, ...]) -> None:
        _check_experts_divide(self.num_experts, axes, "Experts")
        if len(rows) % (devices := collectives.axis_size(shared_axes)):
            raise ValueError(
                f"Experts: the {len(rows)} tokens of a device do not divide over the {devices} devices along "
                f"{shared_axes}, which share these tokens. Pad the batch, or split it over that axis."
            )

    def _params(self, axes: tuple[str, ...], rows: Array) -> PyTree:
        """Returns the parameters of this device's experts as arrays, stacked along a leading dim of E / p experts.

        ``axes`` are the bound axes that experts are split over, p devices. In ``init`` the parameters are created, for
        the features of ``rows``, and stored in boxes. Later the stored parameters are read, and gathered over further
        axes if their boxes name such axes.

        Raises:
          ValueError: the stored parameters are of another number of experts.
        """
        if not self.has_variable("params", "experts"):
            return self.param("experts", self._init_experts, axes, rows)
        params = nn.meta.unbox(self.get_variable("params", "experts"))
        needed = self.num_experts // collectives.axis_size(axes)
        if lengths := {len(leaf) for leaf in jax.tree.leaves(params)} - {needed}:
            raise ValueError(
                f"Experts: a device has parameters of {max(lengths)} experts, where {needed} are needed, "
                f"{self.num_experts} over {axes or 'one device'}. Use the num_experts of init, leave the experts' axis "
                "out of the axis_name of the wrapper, and pass parameters into shard_map with "
                "in_specs=partition_specs(params, mesh)."
            )
        return params

    def _init_experts(self, rng: Array, axes: tuple[str, ...], rows: Array) -> PyTree:
        """Returns new, boxed parameters of this device's experts, stacked along a leading dim.

        Each expert has a separate key; the values are the same on any number of devices. ``axes`` are the bound axes
        that experts are split over, and ``rows`` give the number of features. The boxes of the parameters name the
        experts' axes for the leading dim. Without an experts' axis (``axis=None``) parameters without a box remain
        plain arrays.
        """
        # Each device makes all keys and keeps its shard: the same values on any number of devices.
        keys = collectives.local_shard(jax.random.split(rng, self.num_experts), 0, axes)
        module, row = self.module.clone(parent=None, name=None), jnp.zeros_like(rows[:1])
        with apart_from_model():
            params = jax.vmap(lambda key: module.init(key, row)["params"])(keys)
        over = () if self.axis is None else as_axis_names(self.axis)

        def boxed(leaf: Any) -> Any:
            if not over and not is_box(leaf):
                return leaf
            box = leaf_of(split_by_model(with_layer_names(leaf)))
            # Of two dims that rules map to one axis, the first is split, as in Flax: here the dim of experts.
            by_rules = over if SPLIT_BY_RULES in box.marks else ()
            others = [tuple(axis for axis in entry_axes(entry) if axis not in by_rules) for entry in box.names[1:]]
            names = axes_entry(over), *map(axes_entry, others)
            # unit_depth=0: wrapped modules within the expert gather nothing, as the parameters are gathered when read
            # here.
            return box.replace(names=names, model_axes=over + box.model_axes, unit_depth=0)

        return trees.map_leaves(boxed, params)
