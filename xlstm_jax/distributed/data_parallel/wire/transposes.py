"""Pairs of collectives that are each other's transposes, for split layers and experts.

  function    forward                                backward
  equal_in    x unchanged                            sum of the gradients of all devices
  summed      sum of the terms of all devices        the gradient unchanged
  local_part    each device keeps its part             all-gather of the parts
  all_parts   all-gather of the parts                each device keeps its part
  send_rows   rows to their destination devices      send_back
  send_back   rows back to their source devices      send_rows

With types JAX transposes its collectives to the right-hand column. Without types JAX transposes a sum to another sum,
so the pairs are written out here. The functions do not check arguments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from xlstm_jax.accelerators import kind_of_mesh, tpu_of
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import promoting


def linear(forward: Callable[..., Array], transpose: Callable[..., Array]) -> Callable[..., Array]:
    """Returns a function f(x, *args) that computes ``forward(x, *args)``, with the gradient ``transpose(d_y, *args)``.

    ``forward`` is linear in the array ``x``, and the gradient is with respect to ``x`` only. The gradient of the
    gradient is ``forward`` again. Arrays in ``args`` have no gradient; other entries of ``args`` are static (hashable).
    """

    def apply(x: Array, *args: Any) -> Array:
        arrays = {i: value for i, value in enumerate(args) if isinstance(value, Array)}
        static = tuple(None if i in arrays else value for i, value in enumerate(args))
        # Cast here, outside of the rule: cotangents then vary as inputs do.
        over = frozenset().union(*map(collectives.varying_axes, (x, *arrays.values())))
        return _linear(forward, transpose, static, *collectives.to_varying((x, arrays), sorted(over)))

    return apply


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _linear(forward: Any, transpose: Any, static: tuple[Any, ...], x: Array, arrays: dict[int, Array]) -> Any:
    return forward(x, *(arrays.get(i, value) for i, value in enumerate(static)))


def _linear_fwd(forward: Any, transpose: Any, static: tuple[Any, ...], x: Array, arrays: dict[int, Array]) -> Any:
    return _linear(forward, transpose, static, x, arrays), arrays


def _linear_bwd(forward: Any, transpose: Any, static: tuple[Any, ...], arrays: dict[int, Array], d_y: Array) -> Any:
    return _linear(transpose, forward, static, d_y, arrays), None


_linear.defvjp(_linear_fwd, _linear_bwd)


def _identity(x: Array, axes: tuple[str, ...]) -> Array:
    return x


equal_in = linear(_identity, collectives.all_reduce_sum)  # (x, axes)
summed = linear(collectives.all_reduce_sum, _identity)
local_part = linear(collectives.local_shard, collectives.all_gather_equal)  # (x, dim, axes)
all_parts = linear(collectives.all_gather_equal, collectives.local_shard)


# -------------------------------------------------------------------------------------------- rows, grouped by device

# Of a device's rows, ordered by destination, ``counts[i]`` go to device i. ``received_counts[i]`` rows come from device
# i, to the places from i x max_rows_per_pair on. Sending and sending back are transposes of each other.


class Exchange(NamedTuple):
    """Options of ``send_rows``: the axes, the most rows from a device to a device, the rows r of a device."""

    axes: tuple[str, ...]
    max_rows_per_pair: int
    length: int  # r


def has_ragged_all_to_all() -> bool:
    """Returns whether the current mesh has devices with a reliable ragged all-to-all: TPUs other than v5e.

    On v5e the collective fails for 16 x 16 devices. CPUs have no ragged all-to-all. XLA compiles the collective for
    GPUs, but latency hiding has spoiled the first backward pass, and XLA crashes beyond 32 devices (JAX 0.11;
    marin-community/marin#8081, openxla/xla#47283). The option that prevents the first error applies to the entire
    program, so the library does not set the option. Where this function returns False, devices send all places, with
    zeros in places without a row.
    """
    tpu = tpu_of(kind_of_mesh(jax.sharding.get_abstract_mesh()) or "")
    return tpu is not None and "TPU v5 lite" not in tpu.device_kinds


@promoting
def _sent(rows: Array, counts: Array, received_counts: Array, exchange: Exchange) -> Array:
    """Sends this device's ``rows`` [r, d] to the p devices along ``exchange.axes``, and returns the rows that arrive.

    The rows are ordered by destination: the first ``counts[0]`` rows go to device 0, the next ``counts[1]`` to device
    1, and so on. Further rows are not sent. The result is [p m, d] with m = ``exchange.max_rows_per_pair``: the
    ``received_counts[i]`` rows from device i are at i m and after, in their order. Other places are zeros.
    """
    devices, max_rows = len(counts), exchange.max_rows_per_pair
    if has_ragged_all_to_all():
        places = jnp.full_like(counts, max_rows) * collectives.axis_index(exchange.axes)
        out = jnp.zeros_like(rows, shape=(devices * max_rows, *rows.shape[1:]))
        return collectives.ragged_all_to_all(
            rows, out, (starts_of(counts), counts), (places, received_counts), exchange.axes
        )
    place = jnp.arange(max_rows)
    index = jnp.minimum(starts_of(counts)[:, None] + place, exchange.length - 1)
    parts = jnp.where((place < counts[:, None])[..., None], rows[index], 0)
    return collectives.all_to_all(parts, exchange.axes).reshape(devices * max_rows, -1)


@promoting
def _sent_back(results: Array, counts: Array, received_counts: Array, exchange: Exchange) -> Array:
    """Sends ``results``, one for each row that this device has received by ``_sent``, back to the devices of the rows.

    ``results`` is [p m, d] for p devices and m = ``exchange.max_rows_per_pair``: the ``received_counts[i]`` results at
    i m and after go to device i. ``counts[i]`` results come back from device i. Returns [r, d] with r =
    ``exchange.length``, in the order of this device's rows before ``_sent``; zeros for rows that were not sent.
    """
    devices, max_rows = len(counts), exchange.max_rows_per_pair
    if has_ragged_all_to_all():
        starts, places = max_rows * jnp.arange(devices), collectives.all_to_all(starts_of(counts), exchange.axes)
        out = jnp.zeros_like(results, shape=(exchange.length, *results.shape[1:]))
        return collectives.ragged_all_to_all(results, out, (starts, received_counts), (places, counts), exchange.axes)
    back = collectives.all_to_all(results.reshape(devices, max_rows, -1), exchange.axes)
    row = jnp.arange(exchange.length)
    device = (row[:, None] >= jnp.cumsum(counts)).sum(1)  # p for a row that was not sent
    sender = jnp.minimum(device, devices - 1)
    rows = back[sender, jnp.minimum(row - starts_of(counts)[sender], max_rows - 1)]
    return jnp.where((device < devices)[:, None], rows, 0)


send_rows, send_back = linear(_sent, _sent_back), linear(_sent_back, _sent)


def starts_of(sizes: Array) -> Array:
    """Returns the index of the first row of each group, for consecutive groups of ``sizes`` rows.

    For example, sizes [2, 0, 3] give [0, 2, 2].
    """
    return jnp.cumsum(sizes) - sizes
