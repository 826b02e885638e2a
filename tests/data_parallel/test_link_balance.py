"""Tests of the balance of torus links: orders of axes are chosen by bytes, so that each axis carries the same load."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests.support import FLOAT32_ROUNDING, bytes_by_axis, normal
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_train_state,
    make_train_step,
    plan_sharding,
    shard_module_params,
    shard_modules,
    unbox,
)
from xlstm_jax.distributed.data_parallel import link_balance
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.collectives import entry_axes
from xlstm_jax.distributed.data_parallel.wire.communication import Communication


def test_axis_orders_of_equal_layers_balance_the_bytes_per_mesh_axis():
    # One matrix in each of four layers: with the same order for all, one axis would carry nearly all bytes.
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(4):
                x = nn.Dense(256, name=f"layer_{i}")(x)
            return x

    model = shard_module_params(Layers, ("x", "y"), min_weight_size=64)()
    plan = plan_sharding(model, {"x": 4, "y": 4}, jnp.ones((8, 256)))
    load = bytes_by_axis(plan, {"x": 4, "y": 4})
    assert max(load.values()) <= 1.05 * np.mean(list(load.values()))


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i, width in enumerate((64, 128, 32, 32, 16)):
            x = nn.tanh(nn.Dense(width, name=f"layer_{i}")(x))
        return x


def trained(model, mesh, axes):
    """Returns initial parameters, the names of their boxes, and the parameters after a step."""

    def loss(params, apply_fn, batch, rng):
        return jnp.mean(apply_fn({"params": params}, batch) ** 2)

    x = normal(0, (8, 32))
    state = create_train_state(
        model, optax.sgd(1.0), mesh, jax.random.key(1), x, batch_axes=axes, allow_replicated=True
    )
    names = {path: leaf_of(leaf).names for path, leaf in leaves_with_path(state.params)}
    before = jax.tree.map(np.array, unbox(state.params))
    after = make_train_step(loss, mesh, axes)(state, x, jax.random.key(2))[0]
    return before, names, jax.tree.map(np.array, unbox(after.params))


def test_plan_and_state_agree_on_axis_orders_and_training_matches_a_single_device():
    sizes = {"fsdp_x": 2, "fsdp_y": 4}
    sharded = shard_modules(Perceptron(), nn.Dense, tuple(sizes), min_weight_size=2**8)
    before, names, after = trained(sharded, DeviceMeshManager.create_device_mesh(sizes), tuple(sizes))
    plan = plan_sharding(sharded, sizes, jnp.ones((8, 32)))
    assert {row.path: row.names for row in plan.rows} == names
    assert {axes[0] for entries in names.values() for axes in map(entry_axes, entries) if axes} == set(sizes)

    one = DeviceMeshManager.create_device_mesh({"one": 1}, devices=jax.devices()[:1])
    plain_before, _, plain_after = trained(Perceptron(), one, "one")
    jax.tree.map(partial(np.testing.assert_allclose, rtol=FLOAT32_ROUNDING, atol=1e-7), before, plain_before)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=FLOAT32_ROUNDING, atol=1e-6), after, plain_after)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, after)
    assert min(jax.tree.leaves(moved)) > 1e-4  # guard: each leaf has moved by far more than the tolerance


class OfTokens(nn.Module):
    """A table far larger than both layers together; with ``tied`` the table is also the head."""

    tied: bool

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(1024, 32, name="embed")
        x = embed(tokens)
        x = x + nn.Dense(32, name="down")(nn.tanh(nn.Dense(64, name="up")(x)))
        return embed.attend(x) if self.tied else x


@pytest.mark.parametrize("planned", [True, False], ids=["plan", "state"])
@pytest.mark.parametrize("tied", [False, True], ids=["looked up", "tied"])
def test_embedding_looked_up_by_rows_is_ignored_in_the_balance_of_axes(tied, planned):
    sizes, tokens = {"x": 2, "y": 2}, jnp.zeros((8, 4), jnp.int32)
    model = shard_modules(OfTokens(tied), (nn.Dense, nn.Embed), tuple(sizes), min_weight_size=2**8)
    if planned:
        names = {row.path: row.names for row in plan_sharding(model, sizes, tokens).rows}
    else:
        mesh = DeviceMeshManager.create_device_mesh(sizes, devices=jax.devices()[:4])
        state = create_train_state(
            model, optax.sgd(1.0), mesh, jax.random.key(1), tokens, batch_axes=("x", "y"), allow_replicated=True
        )
        names = {path: leaf_of(leaf).names for path, leaf in leaves_with_path(state.params)}
    outermost = {entry_axes(next(filter(None, names[f"{name}/kernel"])))[0] for name in ("up", "down")}
    # A gathered table takes one axis, both layers the other axis.
    assert len(outermost) == (1 if tied else 2)


def test_balanced_over_model_keeps_the_place_of_model_axes_and_inter_host_axes():
    size, names = (64, 64), ("tp", None)
    leaf = link_balance.leaf_of(nn.Partitioned(np.zeros(size), names)).replace(model_axes=("tp",))
    how = Communication(inter_host_axes=("host",))
    leaf = leaf.replace(names=(("tp", "x", "host", "y"), None), communication=how)
    tree = {f"w{i}": leaf for i in range(4)}
    found = link_balance.balanced_over_model(tree, {"host": 2, "x": 2, "y": 2, "tp": 2})
    assert {leaf.names[0] for leaf in found.values()} == {("tp", "x", "y", "host"), ("tp", "y", "x", "host")}


def test_inter_host_axes_are_innermost_in_all_names_and_raise_for_an_unknown_axis():
    sizes = {"pod": 2, "x": 2, "y": 2}

    def innermost(**options):
        model = shard_modules(Perceptron(), nn.Dense, tuple(sizes), min_weight_size=2**8, **options)
        rows = plan_sharding(model, sizes, jnp.ones((8, 32))).rows
        return {entry[-1] for row in rows for entry in row.names if entry}

    assert innermost(inter_host_axes="pod") == {"pod"}
    assert innermost() != {"pod"}  # guard
    with pytest.raises(ValueError, match=r"inter_host_axes=\('host',\) has 'host', which is none of axis_name"):
        innermost(inter_host_axes="host")


def test_communication_or_else_keeps_inter_host_axes_if_the_call_sets_none():
    how = Communication(gather_dtype="bfloat16", inter_host_axes=("host",))
    assert Communication().filled_from(how) == how
    assert how.filled_from(Communication(grad_scatter_dtype="float32")).inter_host_axes == ("host",)


@pytest.mark.parametrize("count, orders", [(1, 0), (3, 6), (6, 720), (8, 336)])
def test_balanced_orders_tries_few_orders_of_many_axes_and_balances_the_traffic(monkeypatch, count, orders):
    """``balanced_orders`` tries few orders of many axes: all 40,320 orders of eight axes took seconds per leaf."""
    axis_sizes = {f"axis_{i}": 2 for i in range(count)}
    tried, traffic = [], link_balance._traffic
    monkeypatch.setattr(link_balance, "_traffic", lambda *args: tried.append(args[1]) or traffic(*args))
    sizes = [1e6 * (1 + i % 7) for i in range(20)]
    found = link_balance.balanced_orders(sizes, [tuple(axis_sizes)] * 20, axis_sizes)
    assert len(set(tried)) == orders
    load = dict.fromkeys(axis_sizes, 0.0)
    for size, order in zip(sizes, found, strict=True):
        assert sorted(order) == sorted(axis_sizes)
        for axis, sent in traffic(size, order, axis_sizes).items():
            load[axis] += sent
    assert max(load.values()) <= 1.05 * np.mean(list(load.values()))


# ------------------------------------------------------------------------------------------------- numbers by hand


def test_outermost_axis_carries_most_bytes_of_a_gather():
    sizes = {"x": 2, "y": 4, "z": 3}
    assert link_balance._traffic(96, ("x", "y", "z"), sizes) == {"x": 48, "y": 36, "z": 8}
    assert link_balance._traffic(96, ("z", "y"), sizes) == {"z": 64, "y": 24}


def test_axis_orders_of_unequal_axes_are_chosen_from_the_largest_leaf_on():
    """Of 64 bytes x carries 32 and y 24; 24 bytes more make (y, x) 35 and 42, and 8 more (x, y) 39 and 45."""
    sizes = {"x": 2, "y": 4, "slow": 2}
    orders = link_balance.balanced_orders([8, 64, 24], [("slow", "x", "y")] * 3, sizes, ("slow",))
    assert orders == [("x", "y", "slow"), ("x", "y", "slow"), ("y", "x", "slow")]


@pytest.mark.parametrize("axes, expected", [("abcdef", "fedcba"), ("abcdefg", "gfeabcd")])
def test_all_orders_of_six_axes_are_tried_and_three_places_of_seven(axes, expected):
    orders = link_balance.balanced_orders([2**20, 2**20], [tuple(axes)] * 2, dict.fromkeys(axes, 2))
    assert orders == [tuple(axes), tuple(expected)]


def test_slow_axes_do_not_count_in_the_balance_of_layers_that_share_orders():
    leaves = {f"block_{i}/{name}": (64, 0, ("slow", "x", "y")) for i in range(2) for name in "ab"}
    sizes = {"slow": 2, "x": 2, "y": 2}
    orders = link_balance._shared_orders(leaves, {path: path for path in leaves}, sizes, {"slow"})
    assert orders["block_0/a"] == orders["block_1/a"] == ("x", "y", "slow")
    assert orders["block_0/b"] == orders["block_1/b"] == ("y", "x", "slow")


def test_frozen_leaves_count_their_gather_alone_in_the_balance():
    box = Sharded(jnp.zeros((4, 6)), ("fsdp", None))
    bytes_of = {trainable: link_balance._sent_bytes(box.replace(trainable=trainable)) for trainable in (True, False)}
    assert bytes_of == {True: 2 * 4 * 24, False: 4 * 24}, "gather and scatter of 24 values in float32; the gather alone"
