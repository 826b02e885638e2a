"""Tests of ``split_modules`` for NNX models: two steps equal those of the plain NNX module on one device.

The reference is the unsplit module under ``nnx.Optimizer``, without the library.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tests.support import assert_same_params, integers, normal
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_train_state,
    init_sharded,
    make_train_step,
    nnx_model,
    partition_specs,
    shard_modules,
)
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.model_parallel import split_modules
from xlstm_jax.distributed.model_parallel.nnx_splitting import _local_value

WIDTH, VOCAB = 16, 32
# Rounding grows to 4e-6 of a bias in two steps with these tokens, with those of seed 1 or 4 to 1e-4.
TOKENS = integers(2, (8, 6), 0, VOCAB)
X = normal(2, (8, 6, WIDTH)) * np.float32(1 + np.arange(8) % 3)[:, None, None]
TX = optax.sgd(0.1, momentum=0.9)
KEY = jax.random.key(0)


class Block(nnx.Module):
    """Attention with norms of queries and keys, a feed-forward layer with a norm within, and heads made by hand."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, normalize_qk=True, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, use_bias=False, rngs=rngs)
        self.side = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.heads = nnx.LinearGeneral(WIDTH, (4, 8), rngs=rngs)
        self.head_norm = nnx.RMSNorm(8, rngs=rngs)
        self.join = nnx.LinearGeneral((4, 8), WIDTH, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        x = x + self.join(jnp.tanh(self.head_norm(self.heads(x))))
        h = nnx.gelu(self.up(x))
        return x + self.side(x) + self.down(h)  # `side` runs between the two, and is whole


class Net(nnx.Module):
    def __init__(self, rngs, scan):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        make = nnx.vmap(Block) if scan else lambda rngs: nnx.List([Block(rngs) for _ in range(2)])
        self.blocks = make(rngs.split(2) if scan else rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.scan = scan

    def __call__(self, tokens):
        x = self.embed(tokens)
        run = nnx.remat(lambda x, block: block(x))
        if self.scan:
            x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = run(x, block)
        return self.head(x) + self.embed.attend(x)


SPLIT = {
    "embed|head": "vocabulary",
    "query|key|value|heads|up": "column",
    "attention/out|join|down": "row",
    "query_ln|key_ln|head_norm": "inside",
    "side": "replicated",
}


def cross_entropy(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1)).mean()


def loss_fn(params, apply_fn, tokens, rng):
    return cross_entropy(apply_fn({"params": params}, tokens), tokens)


def trained_on_one_device(make, loss, batch, steps=2):
    module = make(nnx.Rngs(KEY))
    start = jax.tree.map(jnp.copy, nnx_model(make).unbind(module)["params"])
    optimizer = nnx.Optimizer(module, TX, wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer, batch):
        value, grads = nnx.value_and_grad(lambda module: loss(module(batch), batch))(module)
        optimizer.update(module, grads)
        return value

    losses = [step(module, optimizer, batch) for _ in range(steps)]
    return start, losses, nnx_model(make).unbind(module)["params"]


def mesh_of(**sizes):
    count = int(np.prod(list(sizes.values())))
    return DeviceMeshManager.create_device_mesh(sizes, devices=jax.devices()[:count])


def trained_on_a_mesh(model, mesh, loss_fn, batch, check_vma, steps=2):
    state = create_train_state(model, TX, mesh, KEY, batch, batch_axes="fsdp", allow_replicated=True)
    step, losses = make_train_step(loss_fn, mesh, "fsdp", check_vma=check_vma, allow_replicated=True), []
    for _ in range(steps):
        state, metrics = step(state, batch, jax.random.key(3))
        losses.append(metrics["loss"])
    return state, losses


@pytest.mark.one_in(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("scan, units_first", [(True, True), (False, False)], ids=["scan", "loop"])
def test_a_model_that_is_split_from_outside_trains_as_on_one_device(scan, units_first, check_vma):
    mesh, make = mesh_of(fsdp=2, tp=2), partial(Net, scan=scan)
    units = lambda path, module: path in ("blocks", "embed", "head") or isinstance(module, Block)  # noqa: E731
    if units_first:
        model = split_modules(shard_modules(nnx_model(make), units, "fsdp", 32), SPLIT)
    else:
        model = shard_modules(split_modules(nnx_model(make), SPLIT), units, "fsdp", 32)
    state, losses = trained_on_a_mesh(model, mesh, loss_fn, TOKENS, check_vma)
    start, wanted, want = trained_on_one_device(make, cross_entropy, TOKENS)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_same_params(state.params, want)
    assert np.abs(start["head"]["kernel"] - want["head"]["kernel"]).max() > 1e-3  # guard: there was a step
    block = state.params["blocks"] if scan else state.params["blocks"]["1"]
    layer = (None,) * scan
    for leaf, names in [
        (block["attention"]["query"]["kernel"], (*layer, "fsdp", "tp", None)),
        (block["attention"]["out"]["kernel"], (*layer, "tp", None, "fsdp")),
        (block["up"]["kernel"], (*layer, "fsdp", "tp")),
        (block["up"]["bias"], (*layer, "tp")),
        (state.params["embed"]["embedding"], ("tp", "fsdp")),
        (state.params["head"]["kernel"], ("fsdp", "tp")),
    ]:
        assert leaf.names == names
    part = block["down"]["kernel"].value.addressable_shards[0].data.shape
    assert np.prod(part) == np.prod(block["down"]["kernel"].value.shape) / 4  # guard: both axes split


def test_split_dims_of_stacked_layers_are_counted_behind_the_dim_of_layers():
    model = split_modules(nnx_model(partial(Net, scan=True)), SPLIT)
    made = jax.eval_shape(lambda: init_sharded(model, mesh_of(fsdp=2, tp=2), KEY, TOKENS, batch_axes="fsdp"))
    block = made["params"]["blocks"]
    assert block["attention"]["query"]["kernel"].names == (None, None, "tp", None)
    assert block["attention"]["out"]["kernel"].names == (None, "tp", None, None)
    assert block["up"]["kernel"].names == (None, None, "tp") and block["up"]["bias"].names == (None, "tp")
    assert made["params"]["head"]["kernel"].names == (None, "tp")


class Pair(nnx.Module):
    """Two layers with dropout, or a norm, in between."""

    def __init__(self, rngs, between=None):
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)
        self.between = between(rngs) if between else None

    def __call__(self, x):
        h = jnp.tanh(self.up(x))
        return self.down(self.between(h) if self.between else h)


PAIR = {"up": "column", "down": "row"}


def squared(outputs, batch):
    return jnp.mean((outputs - batch[..., ::-1]) ** 2)


def pair_loss(params, apply_fn, x, rng):
    return squared(apply_fn({"params": params}, x, rngs=rng), x)


def split_pair(split, between=None, make=None, check_vma=True, mesh=None):
    make = make or partial(Pair, between=between)
    return trained_on_a_mesh(
        split_modules(nnx_model(make), split), mesh or mesh_of(fsdp=1, tp=2), pair_loss, X, check_vma, steps=1
    )


class Scale(nnx.Module):
    """A scale of all heads, with features that are split: works for any number of features."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return x * self.weight


# -------------------------------------------------------------------------------------------- beside names of the model

RULES = (("embed", "fsdp"), ("mlp", None), ("heads", ("tensor", "fsdp_transpose")), ("vocab", "tp"), ("head_dim", None))


class Named(nnx.Module):
    """Dims have logical names, or mesh axes; ``by`` is where the names stand, and their rules."""

    def __init__(self, rngs, by):
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=self.named(by, "vocab", "embed"), rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        kernel = {"kernel_init": self.named(by, "embed", "mlp"), "bias_init": self.named(by, "mlp", of_bias=True)}
        self.up = nnx.Linear(WIDTH, 32, rngs=rngs, **kernel)
        self.down = nnx.Linear(32, WIDTH, use_bias=False, kernel_init=self.named(by, "mlp", "embed"), rngs=rngs)
        heads = {"kernel_init": self.named(by, "embed", "heads", "head_dim")}
        self.query = nnx.LinearGeneral(WIDTH, (4, 8), use_bias=False, rngs=rngs, **heads)
        names = ("heads", "head_dim", "embed")
        self.out = nnx.LinearGeneral((4, 8), WIDTH, axis=(-2, -1), kernel_init=self.named(by, *names), rngs=rngs)

    def named(self, by, *names, of_bias=False):
        init = nnx.initializers.zeros_init() if of_bias else nnx.initializers.lecun_normal()
        if by == "axes":  # the names of mesh axes in their place
            names = tuple({"embed": "fsdp", "vocab": "tp"}.get(name) for name in names)
        rules = {"sharding_rules": RULES} if by == "rules of variables" else {}
        return nnx.with_partitioning(init, names, **rules)

    def __call__(self, tokens):
        x = self.norm(self.embed(tokens))
        x = x + self.out(jnp.tanh(self.query(x)))
        x = x + self.down(nnx.gelu(self.up(x)))
        return self.embed.attend(x)


BY, UNITS = ("rules of variables", "rules in force", "axes"), ("before", "after", "none")
NAMED_SPLIT = {"embed": "vocabulary", "up|query": "column", "down|out": "row"}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("by, units", [(by, units) for by in BY for units in UNITS if (by, units) != ("axes", "none")])
def test_a_split_model_whose_dims_have_names_trains_as_on_one_device(by, units, check_vma):
    """Names that rules map to axes are gathered, and the dims of ``split_modules`` stay split."""
    make = partial(Named, by=by)
    model = nnx_model(make)
    if units == "before":
        model = shard_modules(model, min_weight_size=32)
    model = split_modules(model, NAMED_SPLIT)
    if units == "after":
        model = shard_modules(model, min_weight_size=32)
    mesh = mesh_of(fsdp=2, tp=2)
    with nn.logical_axis_rules(RULES if by == "rules in force" else ()):
        state, losses = trained_on_a_mesh(model, mesh, loss_fn, TOKENS, check_vma)
    with nnx.use_eager_sharding(False):  # names are no axes of the one device
        _, wanted, want = trained_on_one_device(make, cross_entropy, TOKENS)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_same_params(state.params, want)
    for path, names in {
        "embed/embedding": ("tp", "fsdp"),
        "up/kernel": ("fsdp", "tp"),
        "up/bias": ("tp",),
        "down/kernel": ("tp", "fsdp"),
        "query/kernel": ("fsdp", "tp", None),
        "out/kernel": ("tp", None, "fsdp"),
    }.items():
        layer, name = path.split("/")
        assert state.params[layer][name].names == names, path
        assert leaf_of(state.params[layer][name]).model_axes == ("tp",), path


def test_names_that_rules_map_to_the_axis_of_another_dim_are_refused():
    def init(split, rules):
        def make(rngs):
            kernel = nnx.with_partitioning(nnx.initializers.ones, ("a", "b"), sharding_rules=rules)
            return nnx.Sequential(nnx.Linear(WIDTH, 32, kernel_init=kernel, rngs=rngs))

        model = split_modules(nnx_model(make), {"layers/0": split})
        params = init_sharded(model, mesh_of(fsdp=2, tp=2), KEY, batch_axes="fsdp")["params"]
        return params["layers"]["0"]["kernel"].names

    assert init("column", (("a", None), ("b", "tp"))) == (None, "tp")  # the same axis
    assert init("column", (("a", "fsdp"), ("b", ("absent", "tp")))) == ("fsdp", "tp")
    assert init("row", (("a", None), ("b", "fsdp"))) == ("tp", "fsdp")
    with pytest.raises(
        ValueError, match=r"'layers/\*/kernel' is split along dim 1 over 'tp' .* by their rules \('tp', None\)"
    ):
        init("column", (("a", "tp"), ("b", None)))
    with pytest.raises(
        ValueError, match=r"'layers/\*/kernel' is split along dim 1 .* by their rules \(None, 'fsdp'\).*leave dim 1"
    ):
        init("column", (("a", None), ("b", "fsdp")))


class NamedScale(nnx.Module):
    """Two values, of which each feature takes the sum; rules split the dim over the axis of the split layers."""

    def __init__(self, rngs):
        del rngs
        self.weight = nnx.Param(jnp.ones(2), out_sharding=("norm",), sharding_rules=(("norm", "tp"),))

    def __call__(self, x):
        return x * self.weight[...].sum()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("inside", [{}, {"between": "inside"}], ids=["not named", "inside"])
def test_parameter_between_split_layers_whose_rule_names_the_axis_is_exact_or_refused(inside, check_vma):
    if check_vma or not inside:
        with pytest.raises(ValueError, match=r"'between' \(NamedScale\) (runs on features|has replicated)"):
            split_pair(PAIR | inside, NamedScale, check_vma=check_vma)
        return
    state, losses = split_pair(PAIR | inside, NamedScale, check_vma=check_vma)
    with nnx.use_eager_sharding(False):
        _, wanted, want = trained_on_one_device(partial(Pair, between=NamedScale), squared, X, steps=1)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_same_params(state.params, want)


# --------------------------------------------------------------------------------------------- between the split layers


def test_gradients_of_an_inside_module_are_summed_and_without_it_refused():
    for check_vma in (True, False):
        _, wanted, want = trained_on_one_device(partial(Pair, between=Scale), squared, X, steps=1)
        state, losses = split_pair(PAIR | {"between": "inside"}, Scale, check_vma=check_vma)
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
        assert_same_params(state.params, want)
    with pytest.raises(
        ValueError, match=r"'between' \(Scale\) (runs on features|has replicated) parameters, .* after 'up' .*'inside'"
    ):
        split_pair(PAIR, Scale, check_vma=False)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_a_scale_inside_sums_the_products_with_the_features_of_all_devices(check_vma):
    class Scaled(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(2, 4, kernel_init=nnx.initializers.ones, use_bias=False, rngs=rngs)
            self.between = Scale(rngs)

        def __call__(self, x):
            return self.between(self.up(x))

    model, x = split_modules(nnx_model(Scaled), {"up": "column", "between": "inside"}), np.float32([[1, 2], [3, 4]])
    params = {"up": {"kernel": np.ones((2, 4), np.float32)}, "between": {"weight": np.float32(1)}}
    specs = {"up": {"kernel": jax.P(None, "tp")}, "between": {"weight": jax.P()}}

    def gradient(params, x):
        return jax.grad(lambda params: model.apply({"params": params}, x).sum())(params)["between"]["weight"]

    run = jax.shard_map(gradient, mesh=mesh_of(tp=2), in_specs=(specs, jax.P()), out_specs=jax.P(), check_vma=check_vma)
    assert float(jax.jit(run)(params, x)) == 4 * x.sum()


@pytest.mark.parametrize("check_vma", [True, False])
def test_dropout_inside_differs_by_device(check_vma):
    """Both halves of the features are equal, so equal masks would give equal halves."""

    class Mask(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, 64, kernel_init=nnx.initializers.ones, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.up(x))

    mesh, x = mesh_of(tp=2), jnp.ones((4, WIDTH))
    for kind, equal in ({"drop": "inside"}, False), ({}, True):
        model = split_modules(nnx_model(Mask), {"up": "column"} | kind)
        variables = model.init(KEY)
        specs = partition_specs(variables, mesh)
        run = jax.shard_map(
            partial(model.apply, rngs=KEY),
            mesh=mesh, in_specs=(specs, jax.P()), out_specs=jax.P(None, "tp"), check_vma=check_vma,
        )  # fmt: skip
        dropped = np.asarray(jax.jit(run)(variables, x)) == 0
        assert (dropped[:, :32] == dropped[:, 32:]).all() == equal and 0.3 < dropped.mean() < 0.7


def test_keys_of_a_module_inside_differ_by_device():
    def drawn(key):
        return jax.random.key_data(_local_value(nnx.RngKey(key, tag="dropout"), key, SimpleNamespace(axis_name="tp")))

    run = jax.shard_map(drawn, mesh=mesh_of(tp=2), in_specs=jax.P(), out_specs=jax.P("tp"), check_vma=False)
    first, second = np.split(np.asarray(jax.jit(run)(KEY)), 2)
    assert (first != second).any()


def test_layers_that_are_no_pair_are_refused_by_their_names():
    def three(rngs):
        sizes = ((WIDTH, 32), (32, 32), (32, WIDTH))
        return nnx.Sequential(*(nnx.Linear(*size, rngs=rngs) for size in sizes))

    with pytest.raises(ValueError, match=r"'down' is split by rows, and its input of shape .* all 32 features"):
        split_pair({"down": "row"})
    with pytest.raises(ValueError, match=r"'up' is split by rows, .*Split the layer before"):
        split_pair({"up": "row", "down": "column"})
    with pytest.raises(ValueError, match=r"'down' is split by columns, and runs on what 'up' returned.*by 'row'"):
        split_pair({"up|down": "column"})
    with pytest.raises(ValueError, match=r"'layers/\*' is not split, and runs on what 'layers/\*' returned"):
        split_pair({"layers/0": "column", "layers/2": "row"}, make=three)


def test_what_cannot_be_split_is_refused():
    class Others(nnx.Module):
        def __init__(self, rngs):
            self.einsum = nnx.Einsum("btd,df->btf", (WIDTH, 32), (32,), rngs=rngs)
            self.lora = nnx.LoRALinear(WIDTH, 32, lora_rank=2, rngs=rngs)
            self.custom = nnx.Linear(WIDTH, 32, dot_general=lambda *args, **how: None, rngs=rngs)
            self.batched = nnx.LinearGeneral(WIDTH, 4, batch_axis={0: 8}, rngs=rngs)
            self.named = nnx.Linear(WIDTH, 32, kernel_metadata={"out_sharding": ("tp", None)}, rngs=rngs)
            self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
            self.odd = nnx.Linear(WIDTH, 33, rngs=rngs)
            self.fused = nnx.LinearGeneral(WIDTH, (3, 4, 8), rngs=rngs)

        def __call__(self, x):
            return self.odd(x)

    def split(kinds):
        return split_modules(nnx_model(Others), kinds)

    with pytest.raises(ValueError, match=r"'einsum' is of the class Einsum, and 'column' is for 'nnx.Linear'"):
        split({"einsum": "column"})
    with pytest.raises(ValueError, match=r"'lora' is of the class LoRALinear"):
        split({"lora": "row"})
    with pytest.raises(ValueError, match=r"'embed' is of the class Embed, and 'column'"):
        split({"embed": "column"})
    with pytest.raises(ValueError, match=r"'custom' has dot_general=.* product of Flax"):
        split({"custom": "column"})
    with pytest.raises(ValueError, match=r"'batched' has batch_axis=\{0: 8\}"):
        split({"batched": "column"})
    with pytest.raises(ValueError, match=r"'embedding' matches none of the dense layers of Others: "):
        split({"embedding": "vocabulary"})
    with pytest.raises(ValueError, match=r"'odd' is split already"):
        split_modules(split({"odd": "column"}), {"odd": "row"})
    with pytest.raises(ValueError, match=r"'named/kernel' is split along dim 1 .* metadata are \('tp', None\)"):
        split({"named": "column"}).init(KEY)
    with pytest.raises(ValueError, match=r"'odd' has 33 features \(or heads\), which the 2 devices along 'tp'"):
        create_train_state(
            shard_modules(split({"odd": "column"}), nnx.Linear, "fsdp"),
            TX,
            mesh_of(fsdp=2, tp=2),
            KEY,
            X,
            batch_axes="fsdp",
        )
