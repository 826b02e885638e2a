"""Tests of lookups that send rows instead of a split table, if rows have fewer bytes: equal to one device."""

import math
import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tests.support import FLOAT32_ROUNDING, assert_each_leaf, equations, fsdp, integers, normal, on_mesh
from xlstm_jax.distributed import (
    DeviceMeshManager,
    Replicas,
    create_train_state,
    make_train_step,
    nnx_model,
    partition_specs,
    plan_sharding,
    shard_modules,
    unbox,
)
from xlstm_jax.distributed.data_parallel.modules.nnx_module import is_flax_lookup
from xlstm_jax.distributed.data_parallel.wire.communication import DEFAULT_COMMUNICATION, Communication
from xlstm_jax.distributed.data_parallel.wire.lookup import LANES, RowLookup, _in_one, by_rows, look_up

V, D = 32, 12
MESHES = {"one axis": {"fsdp": 8}, "two": {"x": 2, "y": 4}, "copies": {"dp": 2, "fsdp": 4}}
# Many tokens are equal, some are negative (count from the end), and one token is out of range.
TOKENS = integers(0, (16, 5), 0, V)
TOKENS[:, 1], TOKENS[4, 2], TOKENS[9, 3] = 3, -2, V


@pytest.fixture(scope="module")
def mesh_of():
    return {name: DeviceMeshManager.create_device_mesh(sizes) for name, sizes in MESHES.items()}


def lookup_of(dim, outer, group, true=(V, D), stored=(V, D), communication=DEFAULT_COMMUNICATION):
    sizes = {"x": 2, "y": 4, "fsdp": 8}
    counts = (int(np.prod([sizes[axis] for axis in axes])) for axes in (outer, group))
    return RowLookup(true, stored, dim, outer, group, *counts, communication)


# ------------------------------------------------------------------------------------------------ lookups in an array


LOOKUPS = {
    "vocabulary": lookup_of(0, (), ("fsdp",)),
    "columns that 8 does not divide": lookup_of(0, (), ("x", "y")),
    "vocabulary, padded": lookup_of(0, (), ("fsdp",), true=(V - 3, D)),
    "vocabulary, over an outer axis": lookup_of(0, ("x",), ("y",)),
    "vocabulary, the other order": lookup_of(0, ("y",), ("x",)),
    "features": lookup_of(1, (), ("fsdp",), true=(V, D), stored=(V, 16)),
    "features, over an outer axis": lookup_of(1, ("x",), ("y",), true=(V, D), stored=(V, 16)),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("case", LOOKUPS)
def test_look_up_rows_and_table_gradient_match_a_single_device(case, check_vma, mesh_of):
    lookup = LOOKUPS[case]
    axes = (*lookup.outer, *lookup.group)
    mesh = mesh_of["one axis" if axes == ("fsdp",) else "two"]
    true, stored = lookup.shape, lookup.stored
    table = jax.random.normal(jax.random.key(1), true)
    weight = normal(2, (*TOKENS.shape, D))
    padded = jnp.pad(table, [(0, full - size) for full, size in zip(stored, true, strict=True)])
    tokens = TOKENS.copy()
    tokens[9, 3] = 0  # out of range: the row is NaN, with gradient 0

    def loss(shard, tokens, weight):
        return (look_up(shard, tokens, lookup) * weight).sum()

    split = jax.P(axes) if lookup.dim == 0 else jax.P(None, axes)
    rows = on_mesh(partial(look_up, lookup=lookup), mesh, check_vma, (split, jax.P(axes)), jax.P(axes))
    got = rows(padded, TOKENS)
    want = jnp.take(table, TOKENS, axis=0)
    np.testing.assert_array_equal(got, want)
    assert np.isnan(got).any(axis=-1).sum() >= 1 and not np.isnan(got).all()  # guard: the out-of-range token

    grad = on_mesh(jax.grad(loss), mesh, check_vma, (split, jax.P(axes), jax.P(axes)), split)(padded, tokens, weight)
    whole = jax.grad(lambda table: (jnp.take(table, tokens, axis=0) * weight).sum() / 8)(table)
    np.testing.assert_allclose(grad[: true[0], : true[1]], whole, rtol=FLOAT32_ROUNDING, atol=1e-6)
    assert np.abs(whole).max() > 0.1  # guard


def test_padding_of_a_table_is_not_looked_up(mesh_of):
    """The last true row is row -1, and an index of the padding is out of range: its row is NaN."""
    lookup = lookup_of(0, (), ("fsdp",), true=(5, 8), stored=(8, 8))
    padded = np.arange(64, dtype=np.float32).reshape(8, 8)
    tokens = np.int32([0, 4, -1, -5, 5, 6, 7, 3])
    rows = on_mesh(partial(look_up, lookup=lookup), mesh_of["one axis"], True, (jax.P("fsdp"),) * 2, jax.P("fsdp"))
    want = np.where((tokens < 5)[:, None], padded[tokens % 5], np.nan)
    np.testing.assert_array_equal(rows(padded, tokens), want)


def test_columns_of_a_group_join_in_the_order_of_the_table():
    """Of 24 columns over x = 2, y = 4 a device along y has columns 3 y to 3 y + 2, and the same 12 further on."""
    lookup = lookup_of(1, ("x",), ("y",), stored=(V, 24))
    parts = np.array([[[*range(3 * y, 3 * y + 3), *range(12 + 3 * y, 15 + 3 * y)]] for y in range(4)])
    np.testing.assert_array_equal(_in_one(parts, lookup), [np.arange(24)])


def test_gradient_of_looked_up_rows_is_the_mean_over_devices():
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 2}, devices=jax.devices()[:2])
    lookup = RowLookup((4, 2), (4, 2), 0, (), ("fsdp",), 1, 2, DEFAULT_COMMUNICATION)

    def gradient(shard, tokens, weight):
        return jax.grad(lambda shard: (look_up(shard, tokens, lookup) * weight).sum())(shard)

    split = jax.P("fsdp")
    weight = np.arange(8, dtype=np.float32).reshape(4, 2)
    grad = on_mesh(gradient, mesh, True, split, split)(np.zeros((4, 2), np.float32), np.array([3, 0, 3, 1]), weight)
    assert grad.tolist() == [[1, 1.5], [3, 3.5], [0, 0], [2, 3]]


def test_gradient_of_repeated_rows_is_summed_in_float32(mesh_of):
    communication = Communication.of("bfloat16", "bfloat16")
    lookup, tokens = lookup_of(0, (), ("fsdp",), communication=communication), jnp.zeros((8, 400), int)

    def loss(shard, tokens):
        return look_up(shard, tokens, lookup).astype(jnp.float32).sum()

    grad = on_mesh(jax.grad(loss), mesh_of["one axis"], True, (jax.P("fsdp"), jax.P("fsdp")), jax.P("fsdp"))
    np.testing.assert_array_equal(grad(jnp.zeros((V, D)), tokens)[0], np.full(D, 400.0))  # a bfloat16 sum stops at 256


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_rows_travel_in_the_narrow_dtype_and_are_summed_in_float32(dtype):
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 2}, devices=jax.devices()[:2])
    lookup = RowLookup((4, 2), (4, 2), 0, (), ("fsdp",), 1, 2, Communication.of(None, dtype))

    def gradient(shard, tokens):
        return jax.grad(lambda shard: look_up(shard, tokens, lookup).sum())(shard)

    run = on_mesh(gradient, mesh, True, jax.P("fsdp"), jax.P("fsdp"))
    program = equations(jax.make_jaxpr(run)(np.zeros((4, 2), np.float32), np.zeros(4, np.int32)))
    names = ("all_to_all", "scatter-add")
    found = {name: [eqn.invars[0].aval.dtype for _, eqn in program if name in eqn.primitive.name] for name in names}
    # Forward columns and rows, backward rows and columns.
    assert found == {"all_to_all": [np.float32, np.float32, dtype, dtype], "scatter-add": [np.float32]}


def test_gradient_of_rows_is_divided_before_it_is_sent_in_float16(mesh_of):
    lookup = lookup_of(0, (), ("fsdp",), communication=Communication.of(None, "float16"))

    def loss(shard, tokens):
        return 98304 * look_up(shard, tokens, lookup).sum()

    grad = on_mesh(jax.grad(loss), mesh_of["one axis"], True, (jax.P("fsdp"), jax.P("fsdp")), jax.P("fsdp"))
    arguments = jnp.zeros((V, D)), jnp.arange(8)[:, None]
    eqns = [eqn for _, eqn in equations(jax.make_jaxpr(grad)(*arguments))]
    sent = [eqn.invars[0].aval.dtype.name for eqn in eqns if eqn.primitive.name == "all_to_all"]
    assert sent.count("float16") == 2, "gradients of rows, and then of columns, are sent in float16"
    got = grad(*arguments)
    np.testing.assert_array_equal(
        got[:8], np.full((8, D), 12288.0), "98304 is infinite in float16, an eighth of it is not"
    )


def test_by_rows_chooses_the_lookup_with_the_fewest_bytes_or_none():
    vocabulary, features, tokens, word = 32768, 2048, 2048, 4  # values and indices have 4 bytes
    sizes = {"index_bytes": word, "table_bytes": word, "row_bytes": word}
    table = (vocabulary, features)
    choose = partial(by_rows, table, table, 0, communication=DEFAULT_COMMUNICATION, **sizes)

    # Two axes: a group over both would leave 2048 / 256 = 8 columns per device, fewer than the lanes of a TPU.
    two = choose([("x", 16), ("y", 16)], tokens=tokens)
    assert (two.outer, two.group, two.width) == (("x",), ("y",), LANES)

    # One axis: the lookup sends a shard of the table, and for each token a row and an index to each device.
    devices = 8
    one = choose([("fsdp", devices)], tokens=tokens)
    assert (one.outer, one.group) == ((), ("fsdp",))
    table_bytes, token_bytes = vocabulary * features * word, (features + devices) * word
    to_others = 1 - 1 / devices  # a device keeps its own part
    looked_up, gathered = to_others * (table_bytes / devices + tokens * token_bytes), to_others * table_bytes
    assert one.sent_bytes(tokens, **sizes) == looked_up < gathered

    # Break-even: table_bytes / devices + tokens * token_bytes = table_bytes.
    break_even = table_bytes * (1 - 1 / devices) / token_bytes
    assert choose([("fsdp", devices)], tokens=math.floor(break_even)) is not None, f"{break_even=}"
    assert choose([("fsdp", devices)], tokens=math.ceil(break_even)) is None, f"{break_even=}"


def test_by_rows_prefers_groups_that_fill_lanes_and_send_less_than_a_gather():
    def group_of(shape, axis_sizes, tokens, stored=None):
        bytes_of = {"index_bytes": 1, "table_bytes": 1, "row_bytes": 1}
        found = by_rows(shape, stored or shape, 0, axis_sizes, DEFAULT_COMMUNICATION, tokens=tokens, **bytes_of)
        return found and found.group

    two = [("x", 2), ("y", 16)]
    assert group_of((64, 32 * LANES), two, tokens=1) == ("x", "y"), "exactly as many columns as lanes fill them"
    assert group_of((64, 32 * LANES), two, tokens=60) == ("y",), "more tokens: a smaller group sends fewer rows"
    assert group_of((64, 64), two, tokens=1) == ("y",), "no group fills the lanes: the innermost axis alone"
    # 8 devices, 16 rows of 8 values: a lookup sends 7/8 (16 + 16 tokens) bytes, a gather 7/8 of 128.
    assert group_of((16, 8), [("x", 8)], tokens=6) == ("x",)
    assert group_of((16, 8), [("x", 8)], tokens=7) is None, "a lookup that sends as much as a gather saves nothing"
    assert group_of((9, 8), [("x", 8)], tokens=6, stored=(16, 8)) == ("x",), "a gather sends the padding, too"


# -------------------------------------------------------------------------------------------------------------- models


class Untied(nn.Module):
    """``embed`` makes the embedding of this shape; each of 8 devices has 10 tokens."""

    embed: type[nn.Module] = nn.Embed
    dtype: type | None = None
    shape: tuple[int, int] = (64, 24)

    @nn.compact
    def __call__(self, tokens):
        x = self.embed(*self.shape, dtype=self.dtype, name="embed")(tokens % self.shape[0])
        return nn.Dense(64, name="head")(nn.tanh(x))


class Step(nn.Module):
    @nn.compact
    def __call__(self, carry, tokens):
        return carry, Untied(name="net")(tokens)


class Scanned(nn.Module):
    """A lookup in a scan over the tokens' second dim, under ``nn.remat``."""

    @nn.compact
    def __call__(self, tokens):
        over_tokens = {"in_axes": 1, "out_axes": 1, "variable_broadcast": "params", "split_rngs": {"params": False}}
        return nn.scan(nn.remat(Step), **over_tokens)(name="steps")((), tokens)[1]


BATCH = integers(3, (16, 5), 0, 64)


def loss_fn(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch).mean()


def trained(model, mesh, check_vma=True, **options):
    """Returns the step and the state."""
    axes = tuple(mesh.shape)
    state = create_train_state(model, optax.sgd(0.5), mesh, jax.random.key(1), BATCH, batch_axes=axes)
    step = make_train_step(loss_fn, mesh, axes, check_vma=check_vma, **options)
    return step, state


class Sent(NamedTuple):
    """How a step sends a table: the gathers of the full table, and the all-to-alls."""

    gathers: int
    all_to_alls: int


# A lookup sends its rows forward and their gradients backward, each by an all-to-all. If the vocabulary is split, the
# table's columns and their gradient take an all-to-all, too; if the features are split, devices hold the columns.
GATHERED_TABLE = Sent(gathers=1, all_to_alls=0)
ROWS_OF_SPLIT_VOCABULARY = Sent(gathers=0, all_to_alls=4)
ROWS_OF_SPLIT_FEATURES = Sent(gathers=0, all_to_alls=2)
ROWS_OF_FROZEN_TABLE = Sent(gathers=0, all_to_alls=2)  # split by vocabulary: columns and rows, both forward only


def tables_sent(step, state, size=64 * 24):
    """Counts, in the lowered step, the gathers of the full table of ``size`` values, and the all-to-alls."""
    text = step.lower(state, BATCH, jax.random.key(2)).as_text()
    results = re.findall(r"stablehlo\.all_gather.* -> tensor<((?:\d+x)+)\w+>", text)
    gathered = [math.prod(map(int, dims.split("x")[:-1])) for dims in results]
    return Sent(gathered.count(size), text.count("stablehlo.all_to_all"))


def assert_as_on_one_device(step, state, plain, tolerance=FLOAT32_ROUNDING):
    before = jax.tree.map(np.array, unbox(state.params))
    want = jax.grad(lambda params: loss_fn(params, plain.apply, BATCH, None))(before)
    after = jax.tree.map(np.array, unbox(step(state, BATCH, jax.random.key(2))[0].params))
    got = jax.tree.map(lambda a, b: 2 * (a - b), before, after)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))
    close = partial(np.testing.assert_allclose, rtol=tolerance, atol=max(tolerance * scale, 5e-7))
    assert_each_leaf(close, got, want)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(want)) > 1e-4  # guard


CASES = {
    "one axis": ("one axis", "fsdp", {}, (64, 24)),
    "two axes": ("two", ("x", "y"), {}, (64, 24)),
    "copies": ("copies", "fsdp", {"replicas": Replicas("dp")}, (64, 24)),
    "an axis of the batch": ("copies", "fsdp", {}, (63, 24)),
    "gathered again": ("one axis", "fsdp", {"reshard_after_forward": True}, (64, 24)),
    "padded": ("one axis", "fsdp", {"uneven": "pad"}, (61, 21)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_linen_embedding_looked_up_by_rows_trains_as_on_a_single_device(case, check_vma, mesh_of):
    mesh, axes, options, shape = CASES[case]
    model = shard_modules(Untied(shape=shape), nn.Embed, axes, min_weight_size=64, **options)
    step, state = trained(model, mesh_of[mesh], check_vma)
    # The 4 devices along "fsdp" do not divide 63 rows, so this table is split along its features.
    want = ROWS_OF_SPLIT_FEATURES if shape[0] == 63 else ROWS_OF_SPLIT_VOCABULARY
    assert tables_sent(step, state, shape[0] * shape[1]) == want
    assert_as_on_one_device(step, state, Untied(shape=shape))


class UntiedNnx(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(64, 24, rngs=rngs), nnx.Linear(24, 64, rngs=rngs)

    def __call__(self, tokens):
        return self.head(nnx.tanh(self.embed(tokens)))


class TiedNnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 24, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(nnx.tanh(self.embed(tokens)))


class ScaledParam(nnx.Param):
    """A parameter that changes its value when it is read."""

    def get_value(self, **index):
        return 3 * super().get_value(**index)


class ScaledNnx(UntiedNnx):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.embed.embedding = ScaledParam(self.embed.embedding.get_value())


class DoubledNnx(nnx.Embed):
    def __call__(self, tokens):
        return 2 * super().__call__(tokens)


class NamedNnx(nnx.Embed):
    """Has the methods of ``nnx.Embed``."""


@pytest.mark.parametrize(
    "cls, method, expected",
    [
        (nnx.Embed, "__call__", True),
        (NamedNnx, "__call__", True),
        (nnx.Embed, "attend", False),
        (DoubledNnx, "__call__", False),
        (nnx.Linear, "__call__", False),
    ],
)
def test_lookup_of_nnx_is_the_call_of_an_embedding_that_does_not_override_the_call(cls, method, expected):
    assert is_flax_lookup(cls, method) is expected


@pytest.mark.parametrize(
    "make, sent",
    [(UntiedNnx, ROWS_OF_SPLIT_VOCABULARY), (TiedNnx, GATHERED_TABLE), (ScaledNnx, GATHERED_TABLE)],
)
def test_nnx_embedding_looked_up_by_rows_trains_as_on_a_single_device(make, sent, mesh_of):
    model = shard_modules(nnx_model(make), nnx.Embed, "fsdp", min_weight_size=64)
    step, state = trained(model, mesh_of["one axis"])
    assert tables_sent(step, state) == sent
    assert_as_on_one_device(step, state, nnx_model(make))


def test_plan_lists_row_bytes_for_untied_but_not_for_tied_embeddings():
    tables = {}
    for name, plain in {"untied": Untied(), "tied": Tied()}.items():
        model = shard_modules(plain, nn.Embed, "fsdp", min_weight_size=64)
        tables[name] = plan_sharding(model, {"fsdp": 8}, BATCH).row("embed/embedding")
    assert tables["untied"].row_bytes == 24 * 4 and tables["tied"].row_bytes == 0
    assert "or looks up rows of 96 B" in tables["untied"].sentence(8)
    assert "rows" not in tables["tied"].sentence(8)


def test_wrapped_embed_class_looks_up_rows_instead_of_a_table_gather(mesh_of):
    model = Untied(fsdp(nn.Embed))
    step, state = trained(model, mesh_of["one axis"])
    assert tables_sent(step, state) == ROWS_OF_SPLIT_VOCABULARY
    assert_as_on_one_device(step, state, Untied())


@pytest.mark.parametrize("tokens, sends_rows", [(10, True), (100, False)])
def test_wrapped_embed_sends_rows_for_few_tokens_of_a_device(tokens, sends_rows, mesh_of):
    """Each of 8 devices looks up 10 or 100 rows of a table of 64; a gather sends no row by an all-to-all."""
    model, axis = fsdp(nn.Embed)(64, 24), jax.P("fsdp")
    batch = jnp.zeros((8, tokens), jnp.int32)
    first = on_mesh(lambda batch: model.init(jax.random.key(0), batch), mesh_of["one axis"], False, axis, axis)
    lookup = on_mesh(model.apply, mesh_of["one axis"], True, axis, axis)
    table = jax.eval_shape(first, batch)
    found = equations(jax.make_jaxpr(lookup)(table, batch))
    assert jax.eval_shape(lookup, table, batch).shape == (8, tokens, 24)
    assert ("all_to_all" in {eqn.primitive.name for _, eqn in found}) == sends_rows


def test_row_lookup_in_a_scan_with_remat_and_minibatches_matches_a_single_device(mesh_of):
    model = shard_modules(Scanned(), nn.Embed, "fsdp", min_weight_size=64)
    step, state = trained(model, mesh_of["one axis"], num_minibatches=2)
    assert tables_sent(step, state).gathers == 0
    assert_as_on_one_device(step, state, Scanned())


def test_row_lookup_with_a_bfloat16_embed_matches_a_single_device(mesh_of):
    model = shard_modules(Untied(dtype=jnp.bfloat16), nn.Embed, "fsdp", min_weight_size=64)
    step, state = trained(model, mesh_of["one axis"])
    assert tables_sent(step, state) == ROWS_OF_SPLIT_VOCABULARY
    assert_as_on_one_device(step, state, Untied(dtype=jnp.bfloat16), tolerance=0.02)


def test_frozen_embedding_looked_up_by_rows_stays_unchanged_without_gradient(mesh_of):
    model = shard_modules(Untied(), nn.Embed, "fsdp", min_weight_size=64, trainable=False)
    step, state = trained(model, mesh_of["one axis"])
    assert tables_sent(step, state) == ROWS_OF_FROZEN_TABLE
    before = np.array(state.params["embed"]["embedding"].value)
    want = loss_fn(jax.tree.map(np.array, unbox(state.params)), Untied().apply, BATCH, None)
    after, metrics = step(state, BATCH, jax.random.key(2))
    np.testing.assert_array_equal(after.params["embed"]["embedding"].value, before)
    np.testing.assert_allclose(metrics["loss"], want, rtol=FLOAT32_ROUNDING)


class Reversed(nn.Embed):
    """An embedding with an overridden lookup."""

    def __call__(self, tokens):
        return super().__call__(self.num_embeddings - 1 - tokens)


class Scaled(nn.Embed):
    """An embedding whose setup changes the table that Flax's lookup reads."""

    def setup(self):
        super().setup()
        self.embedding = 3 * self.embedding


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(64, 24, name="embed")
        return embed.attend(nn.tanh(nn.Dense(24, name="dense")(embed(tokens))))


GATHERED = {
    "a head reads the table": (Tied(), 64 * 24),
    "fewer rows than tokens": (Untied(shape=(8, 24)), 8 * 24),
    "a lookup of the user's": (Untied(Reversed), 64 * 24),
    "a setup of the user's": (Untied(Scaled), 64 * 24),
}


@pytest.mark.parametrize("case", GATHERED)
def test_embedding_table_is_gathered_where_row_lookup_is_costlier_or_impossible(case, mesh_of):
    plain, size = GATHERED[case]
    model = shard_modules(plain, nn.Embed, "fsdp", min_weight_size=64)
    step, state = trained(model, mesh_of["one axis"])
    assert tables_sent(step, state, size) == GATHERED_TABLE
    assert_as_on_one_device(step, state, plain)


def test_capture_intermediates_records_rows_of_a_wrapped_embed(mesh_of):
    mesh, model = mesh_of["one axis"], Untied(fsdp(nn.Embed))
    _, state = trained(model, mesh)

    def captured(params, tokens):
        _, found = model.apply({"params": params}, tokens, capture_intermediates=True, mutable=["intermediates"])
        return found["intermediates"]["embed"]["__call__"][0]

    run = on_mesh(captured, mesh, True, (partition_specs(state.params, mesh), jax.P("fsdp")), jax.P("fsdp"))
    want = np.array(unbox(state.params)["embed"]["embedding"])[np.array(BATCH)]
    np.testing.assert_array_equal(run(state.params, BATCH), want)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_tokens_of_a_narrow_integer_dtype_have_exact_gradients(dtype, mesh_of):
    """Gradients are exact for tokens of a narrow dtype, although the table has more rows than the dtype can count."""
    table = normal(1, (512, D))
    tokens = integers(2, (16, 5), 0, 100)
    lookup = lookup_of(0, (), ("fsdp",), true=(512, D), stored=(512, D))

    def loss(shard, tokens):
        return (look_up(shard, tokens, lookup) ** 2).sum()

    over = on_mesh(jax.grad(loss), mesh_of["one axis"], True, (jax.P("fsdp"), jax.P("fsdp")), jax.P("fsdp"))
    expected = over(table, tokens)
    assert np.array_equal(over(table, tokens.astype(dtype)), expected) and np.any(expected)


def test_row_lookup_gradient_is_unchanged_by_a_replica_axis_of_size_1(mesh_of):
    """An axis of copies with one device changes nothing in a custom step, whose tokens vary over the axis by type."""
    mesh = DeviceMeshManager.create_device_mesh({"dp": 1, "fsdp": 8})
    lookup = lookup_of(0, (), ("fsdp",), communication=Communication(replicas=Replicas("dp")))
    table, spec = normal(1, (V, D)), jax.P(("dp", "fsdp"))

    tokens = TOKENS.copy()
    tokens[9, 3] = 0

    def gradient(lookup, mesh, spec):
        loss = partial(lambda lookup, shard, tokens: (look_up(shard, tokens, lookup) ** 2).sum(), lookup)
        return on_mesh(jax.grad(loss), mesh, True, (jax.P("fsdp"), spec), jax.P("fsdp"))(table, tokens)

    without = gradient(lookup_of(0, (), ("fsdp",)), mesh_of["one axis"], jax.P("fsdp"))
    np.testing.assert_allclose(gradient(lookup, mesh, spec), without, rtol=1e-6)


class Twice(nn.Module):
    """Two streams of tokens, looked up in the same table."""

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(64, 24, name="embed")
        return nn.Dense(4, name="head")(table(tokens) + table(tokens[:, ::-1]))


def test_embedding_looked_up_twice_in_a_forward_pass_has_no_row_lookup_mark(mesh_of):
    mesh = mesh_of["one axis"]
    model = shard_modules(Twice(), nn.Embed, "fsdp", 2)
    tokens = jnp.zeros((16, 2), jnp.int32)
    state = create_train_state(model, optax.sgd(0.1), mesh, jax.random.key(0), tokens, batch_axes="fsdp")
    assert not state.params["embed"]["embedding"].marks
