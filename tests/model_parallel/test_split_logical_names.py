"""Tests of ``split_modules`` for Linen models whose dims have logical names; the reference is one device.

Neighbours: layers in a scan, a stack of ``nn.vmap``, a layer made in ``setup``, experts, padding, copies (HSDP), frozen
parameters, and gathers in blocks of 8 bits.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests.support import KEPT, assert_same_params, integers, normal, train_on_one_device
from xlstm_jax.distributed import (
    DeviceMeshManager,
    Replicas,
    create_train_state,
    make_train_step,
    shard_modules,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel.leaf import SPLIT_BY_RULES, Sharded, gather_leaf, leaf_of
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import DEFAULT_COMMUNICATION
from xlstm_jax.distributed.model_parallel import Experts, split_modules

ADAM = optax.adam(1e-2)
KEY, VOCAB, WIDTH = jax.random.key(0), 32, 16
# The rules of Flax's examples name the axis of the layers, and axes that the mesh lacks; "kv" has no rule.
RULES = (("embed", "fsdp"), ("mlp", "tp"), ("heads", ("tensor", "tp")), ("vocab", "tp"), ("batch", "fsdp"))
WITHOUT_TP = (("embed", "fsdp"), ("mlp", None), ("heads", None), ("vocab", None))
SPLIT = {"embed": "vocabulary", "up|query": "column", "down|out": "row"}
PAIR = {"up": "column", "down": "row"}
X = normal(1, (8, WIDTH)) * np.float32(1 + np.arange(8))[:, None]
TOKENS = integers(1, (8, 6), 0, VOCAB)


def named(*names, init=None):
    return nn.with_logical_partitioning(init or nn.initializers.lecun_normal(), names)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        bias = nn.initializers.normal()
        h = nn.Dense(32, kernel_init=named("embed", "mlp"), bias_init=named("mlp", init=bias), name="up")(x)
        h = nn.with_logical_constraint(nn.gelu(h), ("batch", "mlp"))
        return x + nn.Dense(WIDTH, kernel_init=named("mlp", "embed"), bias_init=named("embed", init=bias), name="down")(
            h
        )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        heads = {"kernel_init": named("embed", "heads", "kv"), "use_bias": False}
        h = jnp.tanh(nn.DenseGeneral((4, 8), name="query", **heads)(nn.RMSNorm()(x)))
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), kernel_init=named("heads", "kv", "embed"), name="out")(h)
        return Mlp(name="mlp")(x), None


class Decoder(nn.Module):
    """Tied head, and blocks in a scan over layers, whose dim has a logical name, too."""

    @nn.compact
    def __call__(self, tokens):
        table = named("vocab", "embed", init=nn.initializers.normal(1.0))
        embed = nn.Embed(VOCAB, WIDTH, embedding_init=table, name="embed")
        x = embed(tokens)
        layers = {"length": 2, "metadata_params": {nn.PARTITION_NAME: "layers"}}
        scanned = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, **layers)
        return embed.attend(scanned(name="blocks")(x, None)[0])


def cross_entropy(params, apply_fn, tokens, rng=None):
    del rng
    logits = apply_fn({"params": params}, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, (7 * tokens + 1) % VOCAB).mean()


def squared(params, apply_fn, x, rng=None):
    del rng
    return jnp.mean((apply_fn({"params": params}, x) - x[:, ::-1]) ** 2)


def mesh_of(**sizes):
    return DeviceMeshManager.create_device_mesh(sizes)


@cache
def one_device(model, loss, tx, steps):
    batch = TOKENS if loss is cross_entropy else X
    params = unbox(jax.jit(model.init)(KEY, batch)["params"])
    return params, *train_on_one_device(model, tx, params, loss, batch, steps)


@pytest.mark.parametrize("uneven, rules", [("pad", RULES), ("replicate", WITHOUT_TP)])
@pytest.mark.parametrize("check_vma", [True, False])
def test_split_model_with_logical_names_trains_as_on_one_device(check_vma, uneven, rules):
    """Rules are in force while the state is made, and not in the step, as in a script."""
    mesh = mesh_of(fsdp=4, tp=2)
    model = split_modules(shard_modules(Decoder(), min_weight_size=32, uneven=uneven), SPLIT)
    with nn.logical_axis_rules(rules):
        state = create_train_state(model, ADAM, mesh, KEY, TOKENS)
    step, losses = make_train_step(cross_entropy, mesh, check_vma=check_vma), []
    for _ in range(2):
        state, metrics = step(state, TOKENS, KEY)
        losses.append(float(metrics["loss"]))
    _, want, _, wanted = one_device(Decoder(), cross_entropy, ADAM, 2)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_same_params(state.params, want)
    blocks = state.params["blocks"]
    for leaf, names in [
        (state.params["embed"]["embedding"], ("tp", "fsdp")),
        (blocks["query"]["kernel"], (None, "fsdp", "tp", None)),
        (blocks["out"]["kernel"], (None, "tp", None, "fsdp")),
        (blocks["mlp"]["up"]["kernel"], (None, "fsdp", "tp")),
        (blocks["mlp"]["down"]["kernel"], (None, "tp", "fsdp")),
    ]:
        assert (leaf.names, leaf.model_axes) == (names, ("tp",))


class NamedAsTheAxis(nn.Module):
    """A logical name that is also the name of the split axis, and for which the rules name no axis."""

    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(32, kernel_init=named("tp", "mlp"), name="up")(x))
        return nn.Dense(WIDTH, kernel_init=named("mlp", "tp"), name="down")(h)


def test_logical_name_may_be_the_name_of_the_split_axis():
    mesh = mesh_of(fsdp=4, tp=2)
    with nn.logical_axis_rules((("tp", None), ("mlp", "tp"))):
        state = create_train_state(split_modules(NamedAsTheAxis(), PAIR), ADAM, mesh, KEY, X)
    assert state.params["up"]["kernel"].names == (None, "tp")
    state, metrics = make_train_step(squared, mesh)(state, X, KEY)
    _, want, _, wanted = one_device(NamedAsTheAxis(), squared, ADAM, 1)
    np.testing.assert_allclose([float(metrics["loss"])], wanted, rtol=1e-5)
    assert_same_params(state.params, want)


def test_split_layers_read_their_shards_without_regard_to_names_of_initialisers():
    """Rules are in force only while parameters are made: then "tp" is a logical name, and later it is the axis."""
    layers = {"up": ((WIDTH, 32), jax.P(None, "tp")), "down": ((32, WIDTH), jax.P("tp"))}
    params, specs = {}, {}
    for name, (shape, spec) in layers.items():
        params[name] = {"kernel": np.ones(shape, np.float32), "bias": np.ones(shape[1], np.float32)}
        specs[name] = {"kernel": spec, "bias": jax.P(*spec[1:])}
    apply = partial(split_modules(NamedAsTheAxis(), PAIR).apply)
    run = jax.shard_map(
        lambda params, x: apply({"params": params}, x),
        mesh=mesh_of(fsdp=1, tp=2), in_specs=(specs, jax.P()), out_specs=jax.P(),
    )  # fmt: skip
    assert jax.eval_shape(run, params, X).shape == X.shape


class Setup(nn.Module):
    def setup(self):
        self.up = nn.Dense(32, kernel_init=named("embed", "mlp"))
        self.down = nn.Dense(WIDTH, kernel_init=named("mlp", "embed"))

    def __call__(self, x):
        return x + self.down(nn.gelu(self.up(x)))


class Vmapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": None, "axis_size": 3}
        return nn.vmap(Mlp, **over, metadata_params={nn.PARTITION_NAME: "copies"})(name="stack")(x).mean(0)


class LeftOut(nn.Module):
    """A pair of layers that is split, and a pair that is not, whose dims the rules map to the axis of the split."""

    @nn.compact
    def __call__(self, x):
        return Mlp(name="other")(Mlp(name="mlp")(x))


class WithExperts(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Mlp(name="mlp")(x) + Experts(Mlp(), 4, 2, axis="dp", batch_axes=("dp", "fsdp"), capacity_factor=None)(x)


# The model, options of shard_modules, rules, and the tolerance. Some rules name further axes than that of the unit.
NEIGHBOURS = {
    "setup": (Setup(), {}, RULES, 1e-5),
    "left out": (LeftOut(), {}, RULES, 1e-5),
    "vmap": (Vmapped(), {}, RULES, 1e-5),
    "experts": (WithExperts(), {}, (("embed", ("dp", "fsdp")), ("mlp", "tp")), 1e-5),
    "copies": (Mlp(), {"replicas": Replicas("dp")}, RULES, 1e-5),
    "another axis": (Mlp(), {}, (("embed", "dp"), ("mlp", "tp")), 1e-5),
    "blocks": (Mlp(), {"gather_dtype": "int8"}, RULES, 0.05),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_of_split_layers_with_logical_names_have_the_gradients_of_one_device(name, check_vma):
    plain, options, rules, tolerance = NEIGHBOURS[name]
    mesh = mesh_of(dp=2, fsdp=2, tp=2) if name in ("copies", "another axis", "experts") else mesh_of(fsdp=4, tp=2)
    split = {"mlp/up": "column", "mlp/down": "row"} if name == "left out" else PAIR
    model = split_modules(shard_modules(plain, axis_name="fsdp", min_weight_size=32, **options), split)
    axes = mesh.axis_names[:-1]
    with nn.logical_axis_rules(rules):
        state = create_train_state(model, KEPT, mesh, KEY, X, batch_axes=axes, allow_replicated=True)
    start, _, want, wanted = one_device(plain, squared, KEPT, 1)
    assert_same_params(state.params, start, 1e-6)
    step = make_train_step(squared, mesh, axes, check_vma=check_vma, allow_replicated=True)
    state, metrics = step(state, X, KEY)
    np.testing.assert_allclose(metrics["loss"], wanted[0], rtol=tolerance)
    assert_same_params(state.opt_state, want, tolerance)
    axes_of = [leaf_of(leaf).axes for leaf in jax.tree.leaves(state.params, is_leaf=lambda x: hasattr(x, "names"))]
    assert any("tp" in axes and len(axes) > 1 for axes in axes_of)  # guard: a kernel is split over both


def test_parameter_that_rules_split_is_equal_by_its_type_along_an_axis_of_no_batch():
    """A layer that the split leaves out reads the same values along "tp", where its rows are the same, too."""
    types = {}

    def loss(params, x):
        for marks in (frozenset(), frozenset({SPLIT_BY_RULES})):
            full = gather_leaf(params["w"].replace(marks=marks), ("fsdp", "tp"), DEFAULT_COMMUNICATION)
            types[len(marks)] = collectives.varying_axes(full)
        return jnp.mean(x @ full)

    spec = {"w": Sharded(jax.P("fsdp", "tp"), ("fsdp", "tp"))}
    run = jax.shard_map(
        lambda params, x: value_and_grad(partial(loss, x=x), "fsdp")(params),
        mesh=mesh_of(fsdp=4, tp=2), in_specs=(spec, jax.P("fsdp")), out_specs=(jax.P(), spec),
    )  # fmt: skip
    jax.eval_shape(run, {"w": Sharded(np.ones((16, 16), np.float32), ("fsdp", "tp"))}, X)
    assert "tp" in types[0] and "tp" not in types[1]


def test_frozen_split_layer_with_logical_names_keeps_its_values():
    mesh = mesh_of(fsdp=4, tp=2)
    model = split_modules(shard_modules(Mlp(), min_weight_size=32), PAIR)
    with nn.logical_axis_rules(RULES):
        state = create_train_state(model, ADAM, mesh, KEY, X, trainable=lambda path: "up" not in path)
    state, _ = make_train_step(squared, mesh)(state, X, KEY)
    start, want, _, _ = one_device(Mlp(), squared, ADAM, 1)
    assert_same_params(state.params["up"], start["up"])
    assert_same_params(state.params["down"], want["down"])


@pytest.mark.parametrize(
    "rules, match",
    [
        ((("embed", None), ("mlp", "fsdp")), r"'layers_0/kernel' is split along dim 1 over 'tp' .* \(None, 'fsdp'\)"),
        ((("embed", "tp"), ("mlp", None)), r"'layers_0/kernel' is split along dim 1 over 'tp' .* \('tp', None\)"),
        ((), r"layers_0/kernel' is boxed with names \('embed', 'tp'\).*under nn\.logical_axis_rules"),
    ],
    ids=["another axis", "another dim", "no rules"],
)
def test_rules_that_contradict_the_split_are_refused_by_the_path(rules, match):
    model = split_modules(nn.Sequential([nn.Dense(32, kernel_init=named("embed", "mlp"))]), {"layers_0": "column"})
    with nn.logical_axis_rules(rules), pytest.raises(ValueError, match=match):
        create_train_state(model, KEPT, mesh_of(fsdp=4, tp=2), KEY, X, batch_axes="fsdp", allow_replicated=True)


class Scale(nn.Module):
    """Two values, of which each feature takes the sum."""

    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", named("norm", init=nn.initializers.ones), (2,)).sum()


class WithScale(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = Scale(name="scale")(nn.Dense(32, kernel_init=named("embed", "mlp"), name="up")(x))
        return x + nn.Dense(WIDTH, kernel_init=named("mlp", "embed"), name="down")(h)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("inside", [{}, {"scale": "inside"}], ids=["not named", "inside"])
def test_parameter_between_split_layers_whose_rule_names_the_axis_is_exact_or_refused(inside, check_vma):
    mesh = mesh_of(fsdp=4, tp=2)
    model = split_modules(shard_modules(WithScale(), min_weight_size=2), PAIR | inside)
    with nn.logical_axis_rules((*RULES, ("norm", "tp"))):
        state = create_train_state(model, KEPT, mesh, KEY, X, batch_axes="fsdp", allow_replicated=True)
    step = make_train_step(squared, mesh, "fsdp", check_vma=check_vma, allow_replicated=True)
    if check_vma or not inside:
        with pytest.raises(ValueError, match=r"'scale' \(Scale\) (runs on features|has replicated)"):
            step(state, X, KEY)
        return
    _, _, want, wanted = one_device(WithScale(), squared, KEPT, 1)
    state, metrics = step(state, X, KEY)
    np.testing.assert_allclose(metrics["loss"], wanted[0], rtol=1e-5)
    assert_same_params(state.opt_state, want)
