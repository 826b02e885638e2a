"""Collectives in pairs, each of which is the transpose of the other: what split layers and experts send.

  function    forward                                backward
  equal_in    x as it is                             gradients of all devices, summed
  summed      terms of all devices, summed           the gradient as it is
  own_part    each device keeps its part             all parts, gathered
  all_parts   all parts, gathered                    each device keeps its part
  send_rows   rows to the devices that they are for  send_back
  send_back   from these devices to where they were  send_rows

With types JAX transposes its own collectives to the right-hand column. Without types it takes the transpose of a sum
for another sum, so the pairs are written out here. They check nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from xlstm_jax.accelerators import kind_of_mesh, tpu_of
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.dtypes import promoting


def linear(forward: Callable[..., Array], transpose: Callable[..., Array]) -> Callable[..., Array]:
    """``forward(x, *how)``, linear in the array ``x``, whose gradient is ``transpose(d_y, *how)``.

    Arrays in ``how`` have no gradient; all else there is static.
    """

    def apply(x: Array, *how: Any) -> Array:
        arrays = {i: value for i, value in enumerate(how) if isinstance(value, Array)}
        static = tuple(None if i in arrays else value for i, value in enumerate(how))
        # Cast here, outside of the rule: cotangents then vary as the inputs do.
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


def _as_it_is(x: Array, axes: tuple[str, ...]) -> Array:
    return x


equal_in = linear(_as_it_is, collectives.all_reduce_sum)  # (x, axes)
summed = linear(collectives.all_reduce_sum, _as_it_is)
own_part = linear(collectives.own_shard, collectives.all_gather_equal)  # (x, dim, axes)
all_parts = linear(collectives.all_gather_equal, collectives.own_shard)


# ------------------------------------------------------------------------------------------------------ rows, by device

# Of the rows of a device ``counts[i]`` go to device i, one after the other; ``coming[i]`` come from it, to the places
# from i x most on. There and back are transposes of each other.


class Exchange(NamedTuple):
    axes: tuple[str, ...]
    most: int
    length: int  # r


def rows_travel_alone() -> bool:
    """Whether the devices of the mesh have a ragged all-to-all to rely on: TPUs, but v5e, whose 16 x 16 refuses it.

    CPUs have none. XLA compiles that of GPUs, but its latency hiding has spoiled the first backward pass, and it
    crashes beyond 32 devices (JAX 0.11; marin-community/marin#8081, openxla/xla#47283): the option that would prevent
    it is of the whole program, and not ours to set. Elsewhere all places are sent, those without a row as zeros.
    """
    tpu = tpu_of(kind_of_mesh(jax.sharding.get_abstract_mesh()) or "")
    return tpu is not None and "TPU v5 lite" not in tpu.device_kinds


@promoting
def _sent(rows: Array, counts: Array, coming: Array, how: Exchange) -> Array:
    """[r, d] -> [p most, d]; zeros in places without a row."""
    devices, most = len(counts), how.most
    if rows_travel_alone():
        places = jnp.full_like(counts, most) * collectives.axis_index(how.axes)
        out = jnp.zeros_like(rows, shape=(devices * most, *rows.shape[1:]))
        return collectives.ragged_all_to_all(rows, out, (starts_of(counts), counts), (places, coming), how.axes)
    place = jnp.arange(most)
    index = jnp.minimum(starts_of(counts)[:, None] + place, how.length - 1)
    parts = jnp.where((place < counts[:, None])[..., None], rows[index], 0)
    return collectives.all_to_all(parts, how.axes).reshape(devices * most, -1)


@promoting
def _sent_back(results: Array, counts: Array, coming: Array, how: Exchange) -> Array:
    """[p most, d] -> [r, d]; zeros for rows that went nowhere."""
    devices, most = len(counts), how.most
    if rows_travel_alone():
        here, places = most * jnp.arange(devices), collectives.all_to_all(starts_of(counts), how.axes)
        out = jnp.zeros_like(results, shape=(how.length, *results.shape[1:]))
        return collectives.ragged_all_to_all(results, out, (here, coming), (places, counts), how.axes)
    back = collectives.all_to_all(results.reshape(devices, most, -1), how.axes)
    row = jnp.arange(how.length)
    device = (row[:, None] >= jnp.cumsum(counts)).sum(1)  # p of a row that went nowhere
    own = jnp.minimum(device, devices - 1)
    rows = back[own, jnp.minimum(row - starts_of(counts)[own], most - 1)]
    return jnp.where((device < devices)[:, None], rows, 0)


send_rows, send_back = linear(_sent, _sent_back), linear(_sent_back, _sent)


def starts_of(sizes: Array) -> Array:
    """Where each of some groups of rows begins, which lie one after the other."""
    return jnp.cumsum(sizes) - sizes
