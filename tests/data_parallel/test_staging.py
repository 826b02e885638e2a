"""Tests of gathers and scatters in stages over several axes, in an order that balances the load of the axes."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.support import equations, normal, on_mesh
from xlstm_jax.distributed import DeviceMeshManager, gather_params, shard_params, unbox
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.link_balance import balanced_orders
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.collectives import _matrix_shape, reduce_scatter

AXES = ("x", "y", "z")
TREE = {
    "a": normal(0, (16, 24)),
    "b": normal(1, (24, 3)),
    "c": normal(2, (5, 40)),
    "whole": normal(3, (5,)),
}
TRANSFORMER = {"query_key_value": 3, "out": 1, "up": 6, "down": 3}  # in d^2 values


def mesh():
    return DeviceMeshManager.create_device_mesh(dict.fromkeys(AXES, 2), jax.devices()[:8])


def busiest(sizes, orders, axis_sizes):
    """Returns the bytes over the busiest axis, by walking through the stages of each gather, and over all axes."""
    load = dict.fromkeys(axis_sizes, 0.0)
    for size, order in zip(sizes, orders, strict=True):
        piece = size / math.prod(axis_sizes.values())
        for axis in reversed(order):
            load[axis] += piece * (axis_sizes[axis] - 1)
            piece *= axis_sizes[axis]
    return max(load.values()), sum(load.values())


@pytest.mark.parametrize(
    "axis_sizes, at_most",
    [({"x": 16, "y": 16}, 0.6), ({"x": 4, "y": 4, "z": 8}, 0.7), ({"z": 8, "x": 4, "y": 4}, 0.7)],
    ids=str,
)
def test_balanced_orders_lower_the_bytes_of_the_busiest_axis_below_a_bound(axis_sizes, at_most):
    sizes = list(TRANSFORMER.values())
    orders = balanced_orders(sizes, [tuple(axis_sizes)] * len(sizes), axis_sizes)
    rotated, total = busiest(sizes, orders, axis_sizes)
    as_given, unrotated_total = busiest(sizes, [tuple(axis_sizes)] * len(sizes), axis_sizes)
    assert rotated <= at_most * as_given
    assert total == pytest.approx(unrotated_total)  # the bytes are the same in every order


def orders(sizes, axis_sizes, slow_axes=()):
    return balanced_orders(sizes, [tuple(axis_sizes)] * len(sizes), axis_sizes, slow_axes)


def test_balanced_orders_keep_the_given_order_for_the_largest_leaf_and_rotate_others():
    assert orders([1, 5, 1, 1], {"x": 4, "y": 4})[1] == ("x", "y")
    assert {order[0] for order in orders([1] * 6, dict.fromkeys(AXES, 2))} == set(AXES)
    assert orders([3], {"x": 4}) == [("x",)]
    assert orders([], {"x": 4}) == []


def test_balanced_orders_keep_inter_host_axes_innermost():
    found = orders([1] * 4, {"fsdp_host": 4, "x": 2, "y": 2}, ["fsdp_host"])
    assert {order[-1] for order in found} == {"fsdp_host"} and {order[0] for order in found} == {"x", "y"}
    assert orders([1, 1], {"host": 4, "device": 8}, ["host"]) == [("device", "host")] * 2
    assert orders([1], {"host": 4}, ["host"]) == [("host",)]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=str)
def test_staged_gather_over_three_axes_returns_the_full_leaf_bit_for_bit(dtype, check_vma):
    outermost = set()

    def there_and_back(tree):
        boxed = shard_params(tree, AXES, min_weight_size=8)
        outermost.update(leaf_of(leaf).axes[0] for _, leaf in leaves_with_path(boxed) if leaf_of(leaf).axes)
        whole = gather_params(boxed, AXES, gather_dtype=dtype)
        return jax.tree.map(lambda x: x[None], whole), jax.tree.map(lambda x: x[None], unbox(boxed))

    gathered, slices = on_mesh(there_and_back, mesh(), check_vma, P(), P(AXES))(TREE)
    for name, value in TREE.items():
        cast = value if name == "whole" else value.astype(dtype or value.dtype)
        np.testing.assert_array_equal(gathered[name], np.broadcast_to(cast, (8, *value.shape)))
    assert len(outermost) > 1  # guard: the orders do differ
    assert math.prod(slices["a"].shape[1:]) == TREE["a"].size // 8  # guard: the leaf needs a gather


@pytest.mark.parametrize("check_vma", [True, False])
def test_staged_gradient_scatter_equals_the_mean_up_to_rounding(check_vma):
    """A staged scatter is the mean up to three float32 roundings, one per stage, as any order of the sum."""
    weights = normal(9, (8,)) * 2.0 ** jnp.arange(8)

    def gradient(tree, weight):
        def loss(boxed):
            return weight[0] * sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(gather_params(boxed, AXES)))

        boxed = shard_params({k: v for k, v in tree.items() if k != "whole"}, AXES, min_weight_size=8)
        grads = jax.grad(loss)(boxed)
        whole = gather_params(grads, AXES)
        return jax.tree.map(lambda x: x[None], whole)

    got = on_mesh(gradient, mesh(), check_vma, (P(), P(AXES)), P(AXES))(TREE, weights)
    for name, found in got.items():
        want = np.cos(np.asarray(TREE[name], np.float64)) * np.mean(np.asarray(weights, np.float64))
        np.testing.assert_allclose(found[0], want, rtol=2e-6, atol=2e-6 * np.abs(weights).max() / 8)
        np.testing.assert_array_equal(found, np.broadcast_to(found[0], found.shape))
    assert not np.allclose(np.mean(weights), weights[0], rtol=0.1)  # guard: the devices do differ


SHAPES = [(16,), (3, 8), (16, 2, 3), (3, 16, 2), (64, 3, 2, 8), (2, 8, 3, 1, 2)]
EMPTY = [(0,), (0, 8, 3)]


@pytest.mark.parametrize("check_vma", [True, False])
def test_reduce_scatter_of_any_rank_is_bit_equal_to_psum_scatter_along_the_dim(check_vma):
    """A ``reduce_scatter`` of any rank is bit-equal to one collective per axis along the dim, in the array's dtype."""
    cases = [(shape, dim) for shape in SHAPES + EMPTY for dim, size in enumerate(shape) if size % 8 == 0]
    kinds = map(jnp.dtype, ["float32", "bfloat16", "int32", "float16"])
    dtypes = list(itertools.islice(itertools.cycle(kinds), len(cases)))
    random = np.random.default_rng(0)
    values = [(100 * random.normal(size=(8, *s))).astype(t) for (s, _), t in zip(cases, dtypes, strict=True)]

    def along_its_dim(value, dim):
        for axis in AXES if value.size else ():  # JAX itself scatters no array without values
            value = jax.lax.psum_scatter(value, axis, scatter_dimension=dim, tiled=True)
        return value

    def by(scatter):
        def on_each_device(values):
            return [scatter(value[0], dim)[None] for value, (_, dim) in zip(values, cases, strict=True)]

        return on_mesh(on_each_device, mesh(), check_vma, P(AXES), P(AXES))

    ours, theirs = by(partial(reduce_scatter, axes=AXES)), by(along_its_dim)
    for (shape, dim), dtype, got, want in zip(cases, dtypes, ours(values), theirs(values), strict=True):
        assert got.dtype == dtype and got.shape == (8, *shape[:dim], shape[dim] // 8, *shape[dim + 1 :])
        np.testing.assert_array_equal(got, want.reshape(got.shape))
    scatters = [e for _, e in equations(jax.make_jaxpr(ours)(values)) if e.primitive.name == "reduce_scatter"]
    assert [e.params["axis_name"] for e in scatters] == [(axis,) for axis in AXES] * len(cases)
    assert [e.invars[0].aval.dtype for e in scatters[:: len(AXES)]] == dtypes


@pytest.mark.parametrize(
    "shape", [*SHAPES, (4, 4096), (8, 3), (8, 128, 512), (512, 3, 8, 128), (9, 4096, 2), (3, 7), (13, 1), (16, 24)]
)
def test_matrix_shape_keeps_the_size_and_fills_the_rows_of_a_tile(shape):
    rows_and_columns = _matrix_shape(shape)
    assert math.prod(rows_and_columns) == math.prod(shape)
    if len(shape) == 2 and min(shape) >= 8:
        assert rows_and_columns == shape
    can_be = any(math.prod(shape) % c == 0 and math.prod(shape) // c >= 8 for c in range(8, 129))
    assert (rows_and_columns == shape) if not can_be else min(rows_and_columns) >= 8 and len(rows_and_columns) == 2


def test_gather_runs_per_axis_innermost_first_and_scatter_outermost_first():
    def gradient(tree):
        boxed = shard_params({"a": tree["a"]}, AXES, min_weight_size=8)
        return jax.grad(lambda boxed: jnp.sum(jnp.sin(gather_params(boxed, AXES)["a"])))(boxed)

    traced = jax.make_jaxpr(
        jax.shard_map(lambda t: leaf_of(gradient(t)["a"]).value[None], mesh=mesh(), in_specs=P(), out_specs=P(AXES))
    )(TREE)
    found = [(e.primitive.name, e.params["axis_name"]) for _, e in equations(traced) if "axis_name" in e.params]
    order = [(name, axis if isinstance(axis, str) else axis[0]) for name, axis in found]
    assert [axis for name, axis in order if name == "all_gather"] == ["z", "y", "x"]
    assert [axis for name, axis in order if name == "reduce_scatter"] == ["x", "y", "z"]


def test_init_inside_and_outside_shard_map_and_the_plan_choose_equal_names():
    from flax import linen as nn

    from xlstm_jax.distributed import init_sharded, plan_sharding, shard_module_params

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16, name="second")(nn.Dense(24, name="first")(x))

    x = jnp.ones((8, 8))
    model = shard_module_params(Two, AXES, min_weight_size=8)()
    outside = init_sharded(model, mesh(), jax.random.key(0), x, batch_axes=AXES)
    seen = {}

    def init(x):
        inside = model.init(jax.random.key(0), x)
        seen.update({path: leaf.names for path, leaf in leaves_with_path(inside)})
        return jax.tree.map(lambda v: v[None], unbox(inside))

    on_mesh(partial(init), mesh(), False, P(AXES), P(AXES)).lower(x)
    names = {path: leaf.names for path, leaf in leaves_with_path(outside)}
    plan = plan_sharding(model, dict.fromkeys(AXES, 2), x)
    assert names == seen == {f"params/{row.path}": row.names for row in plan.rows}
    assert len({leaf_of(leaf).axes[0] for _, leaf in leaves_with_path(outside)}) > 1  # guard: orders differ
