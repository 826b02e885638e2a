"""Tests of ``packing=PackSmall(...)``: small leaves of a unit share collectives; results are those of leaves alone.

``tests/exactness`` compares a packed training, and pairs with other features, with one device.
"""

from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tests.support import (
    AXES,
    Model,
    assert_same_bits,
    assert_same_params,
    data,
    equations,
    fsdp,
    mean_loss,
    mesh_of,
    on_mesh,
    train_on_one_device,
)
from xlstm_jax.distributed import (
    PackSmall,
    Replicas,
    create_train_state,
    gather_params,
    make_train_step,
    nnx_model,
    partition_specs,
    plan_sharding,
    scan_layers,
    shard_modules,
    sync_gradients,
    unbox,
)
from xlstm_jax.distributed.data_parallel.extensions.packed import Columns, _parcel
from xlstm_jax.distributed.data_parallel.extensions.packing import ShardToSend, packed_gathers
from xlstm_jax.distributed.data_parallel.leaf import gather_leaf, leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_values, sharded_leaves
from xlstm_jax.distributed.data_parallel.wire.blocks import InBlocks
from xlstm_jax.distributed.data_parallel.wire.communication import DEFAULT_COMMUNICATION, set_context
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS, RunningLoss
from xlstm_jax.distributed.data_parallel.wire.wire import Unchanged
from xlstm_jax.forecast.hardware import CHIPS, packing_limit
from xlstm_jax.forecast.hardware.latency import TPU_LATENCY, Latency

BATCH, TX, KEY = data(), optax.adamw(1e-2), jax.random.key(0)
SENT = ("all_gather", "reduce_scatter")


class Layer(nn.Module):
    """Residual MLP of a prefetched scan, with two kernels and biases that are split, too."""

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(x))), None


class Prefetched(nn.Module):
    wrap: object

    @nn.compact
    def __call__(self, x):
        x, _ = scan_layers(self.wrap(Layer), 4)(name="layers")(nn.Dense(16)(x))
        return nn.Dense(4)(x)


class Twin(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.gelu, nnx.Linear(32, 4, rngs=rngs))

    def __call__(self, x):
        return self.mlp(self.first(x))


def of_nnx(wrap):
    return shard_modules(nnx_model(Twin), nnx.Sequential, **wrap.keywords)


LOOP = partial(Model, scan=False)
CASES = {  # model, options of the wrapper, of the state, of the step
    "loop": (LOOP, {}, {}, {}),
    "scan": (partial(Model, remat=True), {"gather_dtype": "bfloat16", "grad_scatter_dtype": "bfloat16"}, {}, {}),
    "prefetched": (Prefetched, {}, {}, {"num_minibatches": 2}),
    "prefetched in blocks": (Prefetched, {"gather_dtype": "int8"}, {"trainable": lambda path: "bias" not in path}, {}),
    "blocks": (LOOP, {"gather_dtype": "int8", "reshard_after_forward": True}, {}, {}),
    "copies": (LOOP, {"replicas": Replicas("dp"), "uneven": "pad"}, {}, {"num_minibatches": 2}),
    "frozen": (LOOP, {}, {"trainable": lambda path: "Dense_0" not in path, "frozen_dtype": "bfloat16"}, {}),
    "nnx": (of_nnx, {}, {}, {"num_minibatches": 2}),
}


def stepped(case, packing, check_vma, mesh=(2, 4)):
    """Returns the parameters before and after two steps, and the counts of collectives in the step."""
    make_model, wrapping, making, stepping = CASES[case]
    options = {"axis_name": "fsdp", "min_weight_size": 8} | wrapping
    model = make_model(fsdp(packing=packing, **options))
    state = create_train_state(model, TX, mesh_of(*mesh), KEY, BATCH["x"], batch_axes=AXES, **making)
    step = make_train_step(mean_loss, mesh_of(*mesh), AXES, check_vma=check_vma, **stepping)
    counts = Counter(e.primitive.name for _, e in equations(jax.make_jaxpr(step)(state, BATCH, KEY)))
    before = jax.device_get(unbox(state.params))
    for _ in range(2):
        state, _ = step(state, BATCH, KEY)
    return before, jax.device_get(unbox(state.params)), {name: counts[name] for name in SENT}


def test_parcel_of_shards_in_blocks_has_columns_of_values_and_of_sent_bytes():
    def shard(shape, dim, wire):
        return ShardToSend(shape, jnp.dtype(jnp.float32), dim, wire, 0.0, None)

    shapes = {"a": ((4, 64), 1), "b": ((3, 2), 0)}
    alone = _parcel({key: shard(*place, Unchanged()) for key, place in shapes.items()})
    assert alone.members == ("a", "b") and isinstance(alone.wire, Unchanged)
    assert (alone.columns.shapes, alone.columns.dims) == (((4, 64), (3, 2)), (1, 0))
    blocks = InBlocks("int8", (3, 2), jnp.float32, 0)
    mixed = _parcel({"a": shard(*shapes["a"], Unchanged()), "b": shard(*shapes["b"], blocks)})
    assert mixed.members == ("a", "b") and mixed.columns == alone.columns and mixed.wire.wires == (Unchanged(), blocks)
    sent = jax.eval_shape(blocks.send, jax.ShapeDtypeStruct((3, 2), jnp.float32))
    assert sent.size == blocks.sent_bytes  # guard
    assert (mixed.wire.sent.shapes, mixed.wire.sent.dims) == (((4, 64), sent.shape), (1, 0))


@pytest.mark.parametrize("case", CASES)
def test_packed_step_equals_step_of_leaves_alone(case):
    check_vma = list(CASES).index(case) % 2 == 0  # ``tests/exactness`` has both modes
    before, alone, most = stepped(case, None, check_vma)
    _, packed, fewer = stepped(case, PackSmall(), check_vma)
    assert_same_params(packed, alone)  # XLA fuses some sums otherwise: the last bit of a sum may differ
    # Guards: something was packed, and the steps did train.
    assert all(fewer[name] < most[name] for name in SENT), f"packed {fewer}, alone {most}"
    assert not np.allclose(jax.tree.leaves(before)[-1], jax.tree.leaves(packed)[-1])


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_packed_step_is_the_step_of_one_device(check_vma):
    before, packed, _ = stepped("loop", PackSmall(), check_vma)
    want, *_ = train_on_one_device(LOOP(), TX, before, mean_loss, BATCH, 2)
    assert_same_params(packed, want)


# ---------------------------------------------------------------------------------------------------- what is packed


@cache
def state_over(axes, packing, reshard=False):
    """Returns the shapes and boxes of a state, for tests that only trace."""
    return jax.eval_shape(lambda: new_state(axes, packing, reshard))


def new_state(axes, packing, reshard=False):
    wrap = fsdp(axis_name=axes, min_weight_size=8, packing=packing, reshard_after_forward=reshard)
    return create_train_state(LOOP(wrap), TX, mesh_of(2, 4), KEY, BATCH["x"], batch_axes=AXES)


@pytest.mark.parametrize("axes", [("fsdp",), ("dp", "fsdp")], ids=len)
def test_packed_unit_has_one_collective_for_each_axis_and_pass(axes):
    def counts(packing):
        step = make_train_step(mean_loss, mesh_of(2, 4), AXES)
        found = equations(jax.make_jaxpr(step)(state_over(axes, packing), BATCH, KEY))
        return Counter(e.primitive.name for _, e in found)

    units, packed, alone = 5, counts(PackSmall()), counts(None)
    assert [packed[name] for name in SENT] == [units * len(axes)] * 2
    assert alone["all_gather"] == len(
        [leaf for _, leaf in leaves_with_path(state_over(axes, None).params) if leaf_of(leaf).axes]
    ) * len(axes)


def test_leaf_of_below_bytes_or_more_is_sent_alone():
    # Kernels [16, 32] and [32, 16] of float32 have 2,048 bytes, scales and biases at most 128.
    step = make_train_step(mean_loss, mesh_of(2, 4), AXES)

    def sizes(below):
        found = equations(jax.make_jaxpr(step)(state_over(("fsdp",), PackSmall(below)), BATCH, KEY))
        return Counter(e.invars[0].aval.size for _, e in found if e.primitive.name == "all_gather")

    assert sizes(2048)[512 // 4] == 2 * 3, "two kernels in each of three blocks are sent alone"
    assert not sizes(2049)[512 // 4], "kernels below the bytes are packed"


def test_leaves_below_the_limit_alone_are_packed():
    assert [PackSmall(2048).packs_leaf_of(size) for size in (0, 2047, 2048, 10**6)] == [True, True, False, False]


def test_packed_leaves_of_a_unit_have_one_order_of_axes_in_state_and_plan():
    def orders(params):
        found = {}
        for path, leaf in leaves_with_path(params):
            if leaf_of(leaf).axes:
                found.setdefault(path.split("/")[0], set()).add(leaf_of(leaf).axes)
        return found

    packed = orders(state_over(AXES, PackSmall()).params)
    assert all(len(found) == 1 for found in packed.values()), packed
    # Guards: leaves that are sent alone have two orders, and so have the layers of packed leaves: links are balanced.
    assert any(len(found) > 1 for found in orders(state_over(AXES, None).params).values())
    assert len(set.union(*packed.values())) == 2
    wrap = fsdp(axis_name=AXES, min_weight_size=8, packing=PackSmall())
    plan = plan_sharding(LOOP(wrap), {"dp": 2, "fsdp": 4}, BATCH["x"])
    state = {path: leaf_of(leaf).names for path, leaf in leaves_with_path(state_over(AXES, PackSmall()).params)}
    assert {row.path: row.names for row in plan.rows if row.parts > 1} == {
        path: names for path, names in state.items() if any(names)
    }


def test_frozen_leaves_are_packed_apart_and_have_no_scatter():
    make_model, _, making, _ = CASES["frozen"]
    making = {"trainable": making["trainable"]}  # in one dtype and of one type, which keep nothing apart
    wrap = fsdp(min_weight_size=8, packing=PackSmall())
    state = create_train_state(make_model(wrap), TX, mesh_of(2, 4), KEY, BATCH["x"], batch_axes=AXES, **making)
    found = equations(
        jax.make_jaxpr(make_train_step(mean_loss, mesh_of(2, 4), AXES, check_vma=False))(state, BATCH, KEY)
    )
    sent = {name: sum(e.invars[0].aval.size for _, e in found if e.primitive.name == name) for name in SENT}
    trained = [leaf_of(leaf) for _, leaf in leaves_with_path(state.params) if leaf_of(leaf).axes]
    assert sent["reduce_scatter"] == sum(leaf.value.size for leaf in trained if leaf.trainable)
    assert 4 * sent["all_gather"] == sum(leaf.value.size for leaf in trained)


def test_leaf_that_the_loss_has_gathered_is_not_packed_again():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            unit = fsdp(Both, min_weight_size=8, packing=PackSmall())()
            return unit.out(unit(tokens))

    class Both(nn.Module):
        def setup(self):
            self.table = nn.Embed(16, 8)
            self.dense = nn.Dense(8)

        def __call__(self, tokens):
            return self.dense(self.table(tokens))

        def out(self, x):
            return self.table.attend(x)

    tokens = jnp.arange(16)[:, None] % 16

    def loss(params, apply_fn, batch, rng):
        return jnp.mean(apply_fn({"params": params}, batch) ** 2)

    state = create_train_state(Tied(), TX, mesh_of(2, 4), KEY, tokens, batch_axes=AXES)
    found = equations(jax.make_jaxpr(make_train_step(loss, mesh_of(2, 4), AXES))(state, tokens, KEY))
    assert [sum(e.primitive.name == name for _, e in found) for name in SENT] == [1, 1]


def test_gather_params_packs_the_leaves_of_each_unit():
    def counted(packing):
        params, mesh = new_state(("fsdp",), packing).params, mesh_of(2, 4)
        gather = on_mesh(
            lambda params: gather_params(params, "fsdp"), mesh, False, (partition_specs(params, mesh),), jax.P()
        )
        found = equations(jax.make_jaxpr(gather)(params))
        return unbox(gather(params)), sum(e.primitive.name == "all_gather" for _, e in found)

    (packed, fewer), (alone, most) = counted(PackSmall()), counted(None)
    assert_same_bits(packed, alone)
    assert fewer == 5 < most, f"one gather for each of five units, not {fewer}"


@pytest.mark.parametrize("packing, gathers", [(PackSmall(), 2), (None, 4)], ids=["packed", "alone"])
def test_gather_params_has_one_gather_for_each_packed_unit(packing, gathers):
    """Two units, each with a kernel and a bias."""
    dense = fsdp(nn.Dense, packing=packing, min_weight_size=2)
    model = nn.Sequential([dense(16), dense(8)])

    def run(x):
        return gather_params(model.init(KEY, x)["params"], "fsdp")

    over = on_mesh(run, mesh_of(1, 8), False, jax.P("fsdp"), jax.P())
    found = equations(jax.make_jaxpr(over)(jnp.ones((8, 8))))
    assert sum(eqn.primitive.name == "all_gather" for _, eqn in found) == gathers


def test_leaf_that_was_gathered_alone_before_is_left_out_of_the_parcel():
    params = state_over(("fsdp",), PackSmall()).params["block_0"]
    mesh, found = mesh_of(2, 4), []

    def on_device(params):
        leaves = {path: (path, leaf) for path, leaf in sharded_leaves(params)}
        first = next(path for path, (_, leaf) in leaves.items() if leaf.axes)
        with set_context(RUNNING_LOSS, RunningLoss(axes=AXES)):
            found.append(set(packed_gathers(leaves, ("fsdp",), DEFAULT_COMMUNICATION)))
            gather_leaf(leaves[first][1], ("fsdp",), DEFAULT_COMMUNICATION, first)
            found.append(set(packed_gathers(leaves, ("fsdp",), DEFAULT_COMMUNICATION)))
        return first

    def shape(params):
        found.append(on_device(params))
        return jnp.zeros(())

    jax.eval_shape(on_mesh(shape, mesh, False, (partition_specs(params, mesh),), jax.P()), params)
    before, after, first = found
    assert first in before and after == before - {first}, f"{first} is packed again: {after}"


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_packed_gradient_equals_gradient_of_leaves_alone_to_the_bit(check_vma):
    # Sums of small integers are exact, in any order.
    x = jnp.arange(16 * 8).reshape(16, 8) % 5 - 2.0

    class Linear(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="up")(x) @ self.param("down", nn.initializers.ones, (8, 4))

    def gradient(packing):
        model = fsdp(Linear, min_weight_size=8, packing=packing)()
        params = create_train_state(model, TX, mesh_of(2, 4), KEY, x, batch_axes=AXES).params
        params = map_values(lambda leaf: jnp.round(8 * leaf.value), params)
        specs = partition_specs(params, mesh_of(2, 4))

        def of_device(params, x):
            return sync_gradients(jax.grad(lambda p: jnp.sum(model.apply({"params": p}, x)))(params), AXES)

        return unbox(on_mesh(of_device, mesh_of(2, 4), check_vma, (specs, jax.P(AXES)), specs)(params, x))

    alone = gradient(None)
    assert_same_bits(gradient(PackSmall()), alone)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(alone))  # guard


def test_columns_join_and_split_are_inverse_along_every_dim():
    whole = [jnp.arange(24.0).reshape(4, 6), jnp.arange(48.0).reshape(2, 8, 3), jnp.arange(4.0)]
    dims = (0, 1, 0)
    parts = [jnp.split(array, 2, dim) for array, dim in zip(whole, dims, strict=True)]
    shards = list(zip(*parts, strict=True))
    columns = Columns.of([(shard.shape, dim) for shard, dim in zip(shards[0], dims, strict=True)])
    arrived = jnp.concatenate([columns.join(of_device) for of_device in shards])
    assert_same_bits(columns.split(arrived), whole)
    assert_same_bits(columns.join(whole), arrived)


def test_columns_of_a_packed_array_return_to_their_dims():
    """Two shards of arrays [2, 3], split along dim 1, and [2]: the rows of the packed array are the shards."""
    whole = [np.arange(12.0).reshape(2, 6), np.array([30.0, 31.0, 32.0, 33.0])]
    packed = np.array([[0, 6, 1, 7, 2, 8, 30, 31], [3, 9, 4, 10, 5, 11, 32, 33]], np.float32)
    columns = Columns(((2, 3), (2,)), (1, 0))
    for got, want in zip(jax.jit(columns.split)(packed), whole, strict=True):
        np.testing.assert_array_equal(got, want)


# ------------------------------------------------------------------------------------------------------- when it pays


def test_packing_limit_is_the_bytes_whose_copy_takes_as_long_as_the_latency():
    chip, sizes = CHIPS["v5e"], {"fsdp_x": 4, "fsdp_y": 8}
    latency = (5e-6 + 2 * 1e-6) + (5e-6 + 4 * 1e-6)
    assert packing_limit(chip, sizes) == int(latency * chip.hbm_bandwidth / 2)
    assert packing_limit(chip, sizes, launch_s=0, hop_s=0) == 0
    assert packing_limit(chip, {"dp": 1}) == 0


def test_packing_limit_has_the_latency_of_the_chip_unless_another_is_passed(monkeypatch):
    chip, sizes = CHIPS["v5e"], {"fsdp": 8}
    monkeypatch.setitem(TPU_LATENCY, "v5e", Latency(start_s=1e-6, hop_s=2e-6))
    assert packing_limit(chip, sizes) == int(9e-6 * chip.hbm_bandwidth / 2)
    assert packing_limit(chip, sizes, launch_s=3e-6) == int(11e-6 * chip.hbm_bandwidth / 2)
    assert packing_limit(chip, sizes, hop_s=0) == int(1e-6 * chip.hbm_bandwidth / 2)


def test_packing_limit_of_an_axis_over_several_dims_makes_the_hops_of_each():
    chip = CHIPS["v5p"]
    sizes = {"fsdp_xy": (4, 8), "fsdp_z": 4}
    assert packing_limit(chip, sizes) == int(((5e-6 + 6e-6) + (5e-6 + 2e-6)) * chip.hbm_bandwidth / 2)
    assert packing_limit(chip, {"fsdp": (4, 8)}) == 0  # over a single axis XLA combines collectives
    assert packing_limit(chip, {"fsdp": (8,)}) == packing_limit(chip, {"fsdp": 8}) > 0


def test_packing_limit_is_zero_on_gpus_whose_compiler_combines_collectives():
    assert packing_limit(CHIPS["h100"], {"fsdp": 8}) == 0
