"""Tests of block-quantized floats: the loss of a round trip, the wire format, and the effect on training."""

import math
from collections import Counter, defaultdict
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.support import (
    AXES,
    Model,
    assert_same_params,
    data,
    equations,
    fsdp,
    mean_loss,
    mesh_of,
    on_mesh,
    plain,
)
from xlstm_jax.distributed import (
    Replicas,
    abstract_train_state,
    create_train_state,
    init_sharded,
    make_train_step,
    partition_specs,
    plan_sharding,
    scan_layers,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, true_value
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves, map_leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.blocks import Blocks, InBlocks, matrix_of_parts
from xlstm_jax.distributed.data_parallel.wire.collectives import varying_axes
from xlstm_jax.distributed.data_parallel.wire.communication import gather_array_with_mean_grads
from xlstm_jax.distributed.data_parallel.wire.copies import mean_over_copies
from xlstm_jax.distributed.data_parallel.wire.formats import sent_bytes
from xlstm_jax.distributed.data_parallel.wire.quantized import (
    BLOCK_SIZE,
    FORMATS,
    pack,
    packed_size,
    unpack,
)
from xlstm_jax.forecast.compiling.compile import compile_for_topology
from xlstm_jax.forecast.cost.collective_traffic import find_collectives
from xlstm_jax.forecast.hlo.program import parse
from xlstm_jax.program_names import BLOCK_FORMATS, PACK_SCOPES

FLOAT32_STEPS = 1 + 1e-5  # a quotient and two products in float32, each off by 2^-24 of itself
MOST_OF_BFLOAT16 = 0.52
every_format = pytest.mark.parametrize("format_name", FORMATS)
both_modes = pytest.mark.parametrize("check_vma", [True, False])


def test_pack_scopes_appear_in_lowered_text_of_each_block_format():
    assert tuple(FORMATS) == BLOCK_FORMATS
    text = ""
    for name in FORMATS:
        text += (
            jax.jit(lambda x, name=name: unpack(pack(x, name), name, 64, jnp.float32))
            .lower(jnp.ones((4, 64)))
            .as_text(debug_info=True)
        )
    assert not [scope for scope in PACK_SCOPES if f"/{scope}/" not in text]
    assert "/pack_other/" not in text  # guard


def values(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@partial(jax.jit, static_argnums=1)
def round_trip(x, format_name):
    return unpack(pack(x, format_name), format_name, x.shape[-1], jnp.float32)


def largest_of_blocks(x):
    """Returns for each value of each row the largest absolute value of its block, by a loop."""
    out = np.zeros(x.shape)
    for row, out_row in zip(np.abs(x).reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1]), strict=True):
        for start in range(0, len(row), BLOCK_SIZE):
            out_row[start : start + BLOCK_SIZE] = row[start : start + BLOCK_SIZE].max()
    return out


# ------------------------------------------------------------------------------------------------------------- rounding


@pytest.mark.one_in(2)
@every_format
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(
    size=st.sampled_from([3, 200]),
    seed=st.integers(0, 2**16),
    exponents=st.integers(-30, 30),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_pack_and_unpack_round_trip_is_within_the_error_bound_of_the_format(format_name, size, seed, exponents, dtype):
    x = jnp.asarray(values((3, size), seed) ** 3 * 10.0**exponents, dtype)
    exact = np.asarray(x, np.float64)
    bound = FORMATS[format_name].error_bound(exact, largest_of_blocks(exact))
    assert np.all(np.abs(np.asarray(round_trip(x, format_name)) - exact) <= bound * FLOAT32_STEPS)


@every_format
def test_error_bound_of_each_format_is_tight(format_name):
    x = values((8, 512))
    share = np.abs(round_trip(x, format_name) - x) / FORMATS[format_name].error_bound(x, largest_of_blocks(x))
    assert 0.9 < share.max() <= FLOAT32_STEPS


@every_format
def test_packing_an_unpacked_array_again_changes_nothing(format_name):
    once = round_trip(values((4, 256)), format_name)
    np.testing.assert_array_equal(round_trip(once, format_name), once)


@every_format
def test_packing_keeps_zeros_and_spreads_nan_and_inf_only_within_the_block(format_name):
    smallest = FORMATS[format_name].smallest
    x = np.zeros(6 * BLOCK_SIZE, np.float32)
    x[70], x[140], x[200:256], x[256:320], x[330] = np.nan, -np.inf, smallest / 2, 2 * smallest, 1e38
    y = np.asarray(round_trip(jnp.asarray(x), format_name)).reshape(6, BLOCK_SIZE)
    assert np.isnan(y[[1, 2]]).all() and np.isfinite(y[[0, 3, 4, 5]]).all()
    assert not y[[0, 3]].any() and (y[4] > smallest).all() and y[5, 10] == pytest.approx(1e38, rel=1e-2)


@every_format
def test_packed_row_has_packed_size_bytes_for_each_format(format_name):
    for size in (1, 2, 50, 64, 1000, 4096):
        rows = jax.ShapeDtypeStruct((2, size), jnp.bfloat16)
        packed = jax.eval_shape(partial(pack, format_name=format_name), rows)
        assert (packed.shape, packed.dtype) == ((2, packed_size(size)), jnp.uint8)
    assert packed_size(4096) <= MOST_OF_BFLOAT16 * 2 * 4096


# -------------------------------------------------------------------------------------------------------------- gathers


@pytest.mark.parametrize("shape", [(8, 256), (128, 6), (3, 5, 64), (40,)], ids=str)
@pytest.mark.parametrize("format_name", ["int8", "float8_e4m3fn"])
def test_in_blocks_receive_concatenates_unpacked_shards_along_the_dim(format_name, shape):
    dim = len(shape) - 1 if shape[0] == 3 else 0
    shards = [values(shape, seed) for seed in range(2)]
    packing = InBlocks(format_name, shape, jnp.float32, dim)
    packed = jax.jit(lambda shards: [packing.send(shard) for shard in shards])(shards)
    assert {p.size for p in packed} == {packing.sent_bytes}
    scales = 2 * -(-math.prod(shape) // BLOCK_SIZE)
    assert packing.sent_bytes <= math.prod(shape) + scales + BLOCK_SIZE
    got = jax.jit(packing.receive)(np.concatenate(packed))
    want = np.concatenate(shards, dim)
    bound = FORMATS[format_name].error_bound(want, np.abs(want).max())
    assert got.shape == want.shape and np.all(np.abs(got - want) <= bound * FLOAT32_STEPS)


@pytest.mark.parametrize("dim, check_vma", [(0, True), (1, False)])
def test_staged_int8_gather_rounds_once_and_has_the_gradient_at_the_gathered_weights(dim, check_vma):
    """A gather in several stages rounds once, bit-equal to one stage over one axis, and keeps the dtype bfloat16."""
    w, x = jnp.asarray(values((128, 64)), jnp.bfloat16), jnp.asarray(values((8, 128), 1))
    spec = P(AXES) if dim == 0 else P(None, AXES)

    def loss(w, x):
        return jnp.mean(jnp.sin(x @ w))

    def on_device(shard, x):
        def of_shard(shard):
            whole = gather_array_with_mean_grads(shard, dim, AXES, "int8")
            return loss(whole, x), whole

        grad, whole = jax.grad(of_shard, has_aux=True)(shard)
        return grad, whole[None]

    run = on_mesh(on_device, mesh_of(2, 4), check_vma, (spec, P(AXES)), (spec, P(AXES)))
    grad, (whole, *others) = run(w, x)
    assert not [device for device, other in enumerate(others, 1) if not (other == whole).all()]
    assert whole.dtype == grad.dtype == jnp.bfloat16
    packing = InBlocks("int8", (16, 64) if dim == 0 else (128, 8), jnp.bfloat16, dim)
    want = packing.receive(jnp.concatenate([packing.send(part) for part in jnp.split(w, 8, dim)]))
    np.testing.assert_array_equal(whole, want)
    reference = jax.grad(loss)(whole, x)
    # Each of 8 devices rounds its gradient to bfloat16, and so does the reference: two half units of 2^-8.
    np.testing.assert_allclose(*(np.asarray(g, np.float32) for g in (grad, reference)), rtol=2**-7, atol=1e-4)
    assert not np.array_equal(whole, w)  # guard: something was rounded


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(x))), None


class Layers(nn.Module):
    """A rematerialised scan and a scan that gathers layers ahead."""

    wrap: Any

    @nn.compact
    def __call__(self, x):
        layer, over = self.wrap(Layer), {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(nn.remat(layer), length=2, **over)(name="blocks")(self.wrap(nn.Dense)(16)(x), None)
        return self.wrap(nn.Dense)(4)(scan_layers(layer, 2)(name="blocks_ahead")(x, None)[0])


class Padded(nn.Module):
    """Dense layers with dims that no axis divides."""

    wrap: Any

    @nn.compact
    def __call__(self, x):
        return self.wrap(nn.Dense)(4)(nn.gelu(self.wrap(nn.Dense)(13)(x[:, :7])))


def as_they_arrive(params, count, format_name):
    """Returns float32 parameters after quantization in ``count`` shards, each layer packed separately."""

    def one(value, dim):
        shards = jnp.split(value, count, dim)
        packing = InBlocks(format_name, shards[0].shape, jnp.float32, dim)
        return packing.receive(jnp.concatenate([packing.send(shard) for shard in shards]))

    def arrived(path, leaf):
        dims = [dim for dim, entry in enumerate(leaf_of(leaf).names) if entry]
        if not dims:
            return leaf
        layers = path.startswith("params/blocks")
        value = leaf_of(leaf).value
        whole = jnp.stack([one(v, dims[0] - 1) for v in value]) if layers else one(value, dims[0])
        return true_value(leaf.replace(value=whole))

    return map_leaves_with_path(arrived, params)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "cls, by, check_vma", [(Layers, "wrapper", True), (Layers, "wrapper", False), (Padded, "reading", True)]
)
def test_int8_gather_gradients_match_a_single_device_at_the_rounded_weights(cls, by, check_vma):
    batch, mesh = {k: v for k, v in data().items() if k != "weight"}, mesh_of(2, 4)
    wrap = fsdp(gather_dtype="int8", uneven="pad")
    params = init_sharded(cls(wrap), mesh, jax.random.key(0), batch["x"], batch_axes=AXES)
    model = cls(wrap if by == "wrapper" else plain)
    specs = partition_specs(params, mesh)
    loss = lambda params, batch: jnp.mean((model.apply(params, batch["x"]) - batch["y"]) ** 2)  # noqa: E731
    run = on_mesh(value_and_grad(loss, AXES), mesh, check_vma, (specs, P(AXES)), (P(), specs))
    got = run(params, batch)
    one_device = lambda p: jnp.mean((cls(plain).apply(p, batch["x"]) - batch["y"]) ** 2)  # noqa: E731
    params = jax.device_get(params)
    want = jax.jit(lambda p: jax.value_and_grad(one_device)(as_they_arrive(p, 4, "int8")))(params)
    assert float(got[0]) == pytest.approx(float(want[0]), rel=1e-5)
    assert_same_params(map_leaves(true_value, got[1]), want[1])
    exact = jax.jit(lambda p: one_device(map_leaves(true_value, p)))(params)
    assert not np.allclose(got[0], exact, rtol=1e-5)  # guard: the comparison sees the rounding


@cache
def programme():
    """Returns the collectives of the traced step as (name, shape, dtype) of each operand, without scalars."""
    mesh, batch = mesh_of(2, 4), data()
    wrap = fsdp(gather_dtype="int8", replicas=Replicas("dp", reduce_dtype="int8"))
    state = abstract_train_state(
        Model(wrap, remat=True), optax.sgd(1.0), mesh, jax.random.key(0), batch["x"], batch_axes=AXES
    )
    found = equations(jax.make_jaxpr(make_train_step(mean_loss, mesh, AXES))(state, batch, jax.random.key(0)))
    found = [e for _, e in found if {"axis_name", "axes"} & e.params.keys()]
    return [(e.primitive.name, v.aval.shape, str(v.aval.dtype)) for e in found for v in e.invars if v.aval.shape]


def test_int8_gathers_and_replica_means_send_uint8_only():
    gathers = [dtype for name, _, dtype in programme() if name.startswith("all_gather")]
    sums = [shape for name, shape, _ in programme() if name.startswith("psum")]
    exchanged = [dtype for name, _, dtype in programme() if name == "all_to_all"]
    assert len(gathers) >= 8 + 5 and set(gathers) == {"uint8"}  # guard: of weights, and of means
    assert len(exchanged) == 5 and set(exchanged) == {"uint8"}
    assert max(map(math.prod, sums)) < 64  # biases and norms, which stay replicated


def test_plan_gathered_bytes_match_the_traced_int8_gathers():
    batch = jax.eval_shape(lambda: data()["x"])
    rows = plan_sharding(Model(fsdp(gather_dtype="int8"), remat=True), {"dp": 2, "fsdp": 4}, batch).rows
    want = [row.gathered_bytes // 4 for row in rows for _ in range(2 if "blocks" in row.path else 1) if row.uses]
    got = [math.prod(shape) for name, shape, _ in programme() if name == "all_gather"]
    assert Counter(got) >= Counter(want) and {row.gather_dtype for row in rows if row.uses} == {"int8"}


# ---------------------------------------------------------------------------------------------------- means over copies


@both_modes
@pytest.mark.parametrize("shape", [(8, 128), (3, 5)], ids=str)
def test_int8_mean_over_copies_is_bit_equal_on_all_replicas_and_within_the_bound(shape, check_vma):
    grads = values((4, *shape)) * np.array([1, 2, 3, 10], np.float32)[:, None, None]
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def mean(grads):
        out = mean_over_copies(grads[0], Replicas(("a", "b"), reduce_dtype="int8"), ("a", "b"))
        assert not varying_axes(out)
        return out[None] + 0 * grads  # once from each device

    got = np.asarray(on_mesh(mean, mesh, check_vma, P(("a", "b")), P(("a", "b")))(grads))
    assert (got == got[0]).all() and np.any(got[0] != grads.mean(0))
    # The part of each copy is rounded by the largest value on any device, and the mean once more.
    bounds = [FORMATS["int8"].error_bound(0, np.abs(each).max()) for each in (*(grads / 4), got[0])]
    assert np.abs(got[0] - grads.astype(np.float64).mean(0)).max() <= sum(bounds) * FLOAT32_STEPS


@cache
def losses_without_a_mesh():
    step = make_train_step(mean_loss, mesh_of(1, 1), AXES)
    return trained(step, Padded(plain), mesh_of(1, 1))[0]


def trained(step, model, mesh):
    state = create_train_state(model, optax.adam(1e-2), mesh, jax.random.key(0), data()["x"], batch_axes=AXES)
    losses = []
    for _ in range(4):
        state, metrics = step(state, data(), jax.random.key(0))
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.mark.one_in(2)
@pytest.mark.parametrize("accumulation, check_vma", [("reduce_each", True), ("reduce_replicas_once", False)])
def test_replicas_stay_bit_equal_in_training_with_int8_reduce_dtype(accumulation, check_vma):
    mesh, wrap = mesh_of(4, 2), fsdp(uneven="pad", replicas=Replicas("dp", reduce_dtype="int8"))
    minibatches = {"num_minibatches": 1 if accumulation == "reduce_each" else 2, "accumulation": accumulation}
    step = make_train_step(mean_loss, mesh, AXES, check_vma=check_vma, **minibatches)
    losses, state = trained(step, Padded(wrap), mesh)
    np.testing.assert_allclose(losses, losses_without_a_mesh(), rtol=1e-2)
    assert not np.allclose(losses, losses_without_a_mesh(), rtol=1e-5)  # guard: something was rounded
    for path, leaf in leaves_with_path(state.params):
        copies = defaultdict(list)
        for shard in leaf_of(leaf).value.addressable_shards:
            copies[str(shard.index)].append(np.asarray(shard.data))
        for index, (first, *others) in copies.items():
            assert others, f"{path} has a single copy of {index}"
            assert all((other == first).all() for other in others), f"the copies of {path}, {index}, differ"


# ---------------------------------------------------------------------------------------------------- compiled programs


WEIGHT = 512, 1024


SIZES = {"dp": 2, "fsdp": 4}


def compiled(topology):
    """Compiles a program that gathers a weight, and reduces its gradient over copies, in each format."""
    mesh = jax.sharding.AbstractMesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def gradients(weights, x):
        def loss(weights):
            outputs = [
                x @ gather_array_with_mean_grads(w, 0, "fsdp", dtype, replicas=Replicas("dp", dtype))
                for w, dtype in zip(weights, FORMATS, strict=True)
            ]
            return sum(jnp.sum(y**2) for y in outputs)

        return jax.grad(loss)(weights)

    def abstract(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))

    args = (abstract(WEIGHT, P("fsdp")),) * len(FORMATS), abstract((64, WEIGHT[0]), P(AXES))
    step = jax.shard_map(gradients, mesh=mesh, in_specs=(P("fsdp"), P(AXES)), out_specs=P("fsdp"), check_vma=False)
    return compile_for_topology(jax.jit(step), *args, topology=topology, cache=None)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v5e:2x4", marks=pytest.mark.libtpu),
        pytest.param("v5p:2x2x2", marks=[pytest.mark.libtpu, pytest.mark.slow]),
        pytest.param("h100:1x8", marks=pytest.mark.cuda_plugin),
    ],
)
def test_compiled_program_sends_the_bytes_predicted_by_sent_bytes(topology):
    found, program = defaultdict(float), compiled(topology)
    parsed = parse(program.hlo)
    collectives = [c for c in find_collectives(parsed, SIZES) if "reduce-scatter" not in (c.kind, c.stands_for)]
    for collective in collectives:
        found[collective.axes, collective.dtype] += collective.wire_bytes
    shard = math.prod(WEIGHT) // 4
    sent = {name: sent_bytes((WEIGHT[0] // 4, WEIGHT[1]), 0, name) for name in FORMATS}
    assert found == {(("fsdp",), "u8"): 3 * sum(sent.values()), (("dp",), "u8"): sum(sent.values())}
    assert not {name: size for name, size in sent.items() if size > MOST_OF_BFLOAT16 * 2 * shard}


@pytest.mark.parametrize(
    "shape, count, expected",
    [
        ((8, 4, 64), 8, (8, 256)),
        ((8, 4, 64), 16, (32, 64)),
        ((8, 4, 64), 3, (3, 683)),  # no leading dims that 3 divides
        ((9, 128), 3, (9, 128)),
        ((9, 100), 3, (3, 300)),  # rows of 100 would need 28 of padding
        ((9, 12700), 3, (9, 12700)),  # 36 of padding are less than 1/128
        ((6,), 4, (4, 2)),
        ((0, 64), 4, (4, 0)),
        ((2, 64), 1, (2, 64)),
    ],
    ids=str,
)
def test_values_are_packed_in_rows_that_the_devices_divide(shape, count, expected):
    assert matrix_of_parts(shape, count) == expected


@pytest.mark.parametrize("format_name", FORMATS)
def test_error_of_a_mean_follows_from_the_largest_value_of_each_block(format_name):
    terms = np.random.default_rng(0).uniform(size=100).astype(np.float32)
    got = Blocks(format_name).mean_error(terms)
    for block in (slice(0, 64), slice(64, 100)):
        want = FORMATS[format_name].error_bound(terms[block], 2 * terms[block].max())
        np.testing.assert_allclose(got.ravel()[block], want, rtol=1e-6)
