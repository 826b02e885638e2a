"""The rule that chooses units where ``shard_modules`` gets none: what it chooses, and how much of a model is split."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.support import Model, fsdp, plain
from xlstm_jax.distributed import nnx_model, plan_sharding, shard_modules
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.modules.default_units import SeenModule, default_units
from xlstm_jax.distributed.data_parallel.modules.linen_units_by_rule import _with_units
from xlstm_jax.distributed.plan import ShardingPlan

MESH = {"fsdp": 8}
TOKENS = jax.ShapeDtypeStruct((8, 64), jnp.int32)


class Block(nn.Module):
    """Of a decoder; the mask is left out, as no value depends on it here."""

    heads: int

    @nn.compact
    def __call__(self, x, _=None):
        width = x.shape[-1]
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))), None


class Gpt(nn.Module):
    """GPT-2 small by default, with two layers; a scan or a loop over them."""

    width: int = 768
    heads: int = 12
    vocab: int = 50257
    scan: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.width, name="wte")(tokens)
        x = x + self.param("wpe", nn.initializers.normal(), (1024, self.width))[: tokens.shape[-1]]
        if self.scan:
            layers = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = layers(self.heads, name="h")(x, None)
        else:
            for i in range(2):
                x, _ = Block(self.heads, name=f"h_{i}")(x)
        return nn.Dense(self.vocab, name="head")(nn.LayerNorm()(x))


class Bottleneck(nn.Module):
    filters: int
    stride: int

    @nn.compact
    def __call__(self, x):
        y = nn.relu(nn.BatchNorm(False)(nn.Conv(self.filters, (1, 1), use_bias=False)(x)))
        y = nn.relu(nn.BatchNorm(False)(nn.Conv(self.filters, (3, 3), self.stride, use_bias=False)(y)))
        y = nn.BatchNorm(False)(nn.Conv(4 * self.filters, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = nn.BatchNorm(False)(nn.Conv(4 * self.filters, (1, 1), self.stride, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(False)(nn.Conv(64, (7, 7), 2, use_bias=False)(x)))
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                x = Bottleneck(64 * 2**stage, 2 if block == 0 and stage else 1)(x)
        return nn.Dense(1000)(x.mean((1, 2)))


class NnxBlock(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class NnxDecoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(32000, 512, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(512, rngs) for _ in range(2)])
        self.head = nnx.Linear(512, 32000, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Lstm(nn.Module):
    """A language model with recurrent layers."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(10000, 512)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(512))(x)
        return nn.Dense(10000)(x)


IMAGES = jax.ShapeDtypeStruct((8, 64, 64, 3), jnp.float32)
USUAL = {
    "GPT-2": (Gpt(), TOKENS),
    "GPT-2, scan": (Gpt(scan=True), TOKENS),
    "ResNet-50": (ResNet50(), IMAGES),
    "NNX decoder": (nnx_model(NnxDecoder), TOKENS),
    "LSTM": (Lstm(), TOKENS),
}


@pytest.mark.parametrize("model, inputs", USUAL.values(), ids=USUAL)
def test_default_units_shard_at_least_95_percent_of_the_bytes_of_common_models(model, inputs):
    plan = plan_sharding(shard_modules(model), MESH, inputs)
    assert plan.replicated_fraction < 0.05
    assert plan.parameters.per_device < 0.05 * plan.parameters.total + plan.parameters.total / 8
    # Every leaf that is split is gathered by a unit, and no unit gathers more than an embedding or a head has.
    assert {row.gathered_with for row in plan.rows if row.parts > 1} >= {unit.path for unit in plan.units}
    limit = 0.45 * plan.parameters.total
    assert not {unit.path: unit.gathered_bytes for unit in plan.units if unit.gathered_bytes >= limit}, f"{limit=}"


UNITS = {
    "GPT-2": {"wte", "h_0", "h_1", "head", ""},
    "GPT-2, scan": {"wte", "h", "head", ""},
    "NNX decoder": {"embed", "blocks/0", "blocks/1", "head"},
}


@pytest.mark.parametrize("name", UNITS)
def test_plan_lists_each_default_unit_with_the_reason_for_the_choice(name):
    model, inputs = USUAL[name]
    plan = plan_sharding(shard_modules(model), MESH, inputs)
    reasons = {unit.path: unit.reason for unit in plan.units}
    assert set(reasons) == UNITS[name]
    kinds = {"h_0": "one of 2 blocks of a loop", "h": "layer of a scan", "wte": "embedding", "embed": "embedding"}
    kinds |= {"blocks/0": "one of 2 blocks of a loop", "head": "owns parameters outside of blocks"}
    assert {path: reason for path, reason in reasons.items() if path in kinds} == {
        path: kind for path, kind in kinds.items() if path in reasons
    }
    text = " ".join(str(plan).split())
    assert "Modules that gather their parameters together, and why" in text and "embedding" in text
    assert ShardingPlan.from_json(plan.to_json()).units == plan.units


def test_default_units_gather_a_scanned_layer_alone_and_not_the_stack():
    plan = plan_sharding(shard_modules(Gpt(scan=True)), MESH, TOKENS)
    row = plan.row("h/Dense_0/kernel")
    assert (row.gathered_with, row.uses, row.use_shape) == ("h", 2, (3072, 768))


def test_plan_lists_no_default_units_for_modules_chosen_by_hand():
    assert not plan_sharding(shard_modules(Model(plain), nn.Dense, "fsdp"), MESH, jnp.ones((8, 8))).units


def test_default_units_skip_modules_inside_a_module_wrapped_by_the_model():
    """The rule takes nothing of a module that the model has wrapped, and splits the rest."""

    class Half(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64, name="rest")(fsdp(Mlp)(name="mlp")(x))

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64)(nn.Dense(64)(x))

    plan = plan_sharding(shard_modules(Half(), min_weight_size=32), MESH, jnp.ones((8, 64)))
    gathered = {row.path: row.gathered_with for row in plan.rows if row.path.endswith("kernel")}
    assert gathered == {"mlp/Dense_0/kernel": "mlp", "mlp/Dense_1/kernel": "mlp", "rest/kernel": "rest"}


# ------------------------------------------------------------------------------------------------------------- the rule

OUTER, LEAF = SeenModule(nn.Module, owns=False), SeenModule(nn.Dense, owns=True)


@pytest.mark.parametrize("modules, units", [
    # two alike, but not of a loop: their names have no number
    ({"": OUTER, "up": OUTER, "up/a": LEAF, "down": OUTER, "down/a": LEAF}, {"up/a", "down/a"}),
    # one block alone is none of a loop
    ({"": OUTER, "h_0": OUTER, "h_0/a": LEAF}, {"h_0/a"}),
    # layers of an MLP are alike, and no blocks
    ({"": OUTER, "d_0": LEAF, "d_1": LEAF}, {"d_0", "d_1"}),
    # another class is another loop
    ({"": OUTER, "h_0": OUTER, "h_0/a": LEAF, "h_1": SeenModule(nn.Dense, False), "h_1/a": LEAF}, {"h_0/a", "h_1/a"}),
    # stages of blocks: the innermost gather, and the stage the rest of it
    ({"": OUTER} | {f"s_{i}": OUTER for i in (0, 1)} | {f"s_{i}/h_{j}": OUTER for i in (0, 1) for j in (0, 1)}
     | {f"s_{i}/h_{j}/a": LEAF for i in (0, 1) for j in (0, 1)},
     {"s_0", "s_1", "s_0/h_0", "s_0/h_1", "s_1/h_0", "s_1/h_1"}),
    # a cell and all within is gathered by the loop around it
    ({"": OUTER, "rnn": OUTER, "rnn/cell": SeenModule(nn.Dense, True, is_cell=True), "rnn/cell/a": LEAF}, {"rnn"}),
    # an embedding in a block stays alone
    ({"": OUTER, "h": SeenModule(nn.Module, False, is_layer=True), "h/e": SeenModule(nn.Embed, True, True),
      "h/a": LEAF},
     {"h", "h/e"}),
    # the model owns a table, and only that
    ({"": SeenModule(nn.Module, True), "d": LEAF}, {"", "d"}),
], ids=["no number", "one", "layers", "classes", "stages", "cell", "embedding", "top"])  # fmt: skip
def test_default_units_returns_the_expected_module_paths(modules, units):
    assert set(default_units(modules)) == units


def test_depth_below_its_unit_is_set_in_the_box_of_each_named_parameter_alone():
    box = Sharded(jnp.ones((8, 2)), ("fsdp", None), unit_depth=1)
    layer = {"mlp": {"kernel": box, "bias": jnp.ones(2)}, "head": box}
    depths = {"h_0/mlp/kernel": 2, "h_0/mlp/bias": 2}
    found = _with_units(depths, {"params": {"h_0": layer}})["params"]["h_0"]
    assert found["mlp"]["kernel"].unit_depth == 2 and found["mlp"]["kernel"].names == box.names
    assert found["head"].unit_depth == 1 and found["mlp"]["bias"] is layer["mlp"]["bias"]
