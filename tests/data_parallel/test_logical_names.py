"""Tests of models with logical names (MaxText, T5X, Flax's lm1b): unedited, with the results of one device."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import partitioning

from tests.support import AXES, KEPT, assert_same_params, fsdp, mesh_of, normal, on_mesh, plain
from xlstm_jax.distributed import (
    DeviceMeshManager,
    abstract_train_state,
    create_train_state,
    init_sharded,
    make_train_step,
    nnx_model,
    partition_specs,
    plan_sharding,
    shard_modules,
    unbox,
)
from xlstm_jax.distributed.data_parallel.leaf import leaf_of

# The rule of "mlp" names an axis that this mesh lacks; "in" and "layers" have no rule.
RULES = (("batch", "fsdp"), ("embed", "fsdp"), ("mlp", "tensor"), ("heads", None))
X = normal(1, (8, 8)) * np.float32(1 + np.arange(8))[:, None]


def named(*names, init=None):
    return nn.with_logical_partitioning(init or nn.initializers.lecun_normal(), names)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        bias = named("mlp", init=nn.initializers.normal())
        h = nn.Dense(32, kernel_init=named("embed", "mlp"), bias_init=bias)(x)
        h = nn.with_logical_constraint(nn.gelu(h), ("batch", "mlp"))
        return x + nn.Dense(16, kernel_init=named("mlp", "embed"))(h), None


class Model(nn.Module):
    wrap: object = plain

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, kernel_init=named("in", "embed"), name="first")(x)
        layers = {"length": 2, "metadata_params": {nn.PARTITION_NAME: "layers"}}
        scanned = nn.scan(self.wrap(Block), variable_axes={"params": 0}, split_rngs={"params": True}, **layers)
        x, _ = scanned(name="blocks")(x, None)
        return nn.with_logical_constraint(x, ("batch", "embed"))


def loss_fn(params, apply_fn, x, rng):
    del rng
    return jnp.mean((apply_fn({"params": params}, x)[:, :8] - x) ** 2)


@cache
def one_device():
    params = unbox(jax.jit(Model().init)(jax.random.key(0), X)["params"])
    return params, jax.jit(jax.grad(loss_fn), static_argnums=1)(params, Model().apply, X, None)


@pytest.mark.parametrize("wrap, check_vma", [(fsdp, True), (plain, False)], ids=["wrapped", "plain"])
def test_a_model_with_logical_names_trains_as_on_one_device(wrap, check_vma):
    """Training with logical names equals one device, also with the rules active in the step: constraints are no-ops."""
    mesh = mesh_of(2, 4)
    with nn.logical_axis_rules(RULES):
        state = create_train_state(
            Model(wrap), KEPT, mesh, jax.random.key(0), X, batch_axes=AXES, allow_replicated=True
        )
    names = jax.tree.map(lambda leaf: leaf_of(leaf).names, state.params, is_leaf=lambda leaf: hasattr(leaf, "names"))
    assert names["blocks"]["Dense_0"]["kernel"] == (None, "fsdp", None)  # only the axis of "embed"
    assert names["first"]["kernel"] == (None, "fsdp")
    start, want = one_device()
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), unbox(state.params), start)
    step = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma, allow_replicated=True)
    state, _ = step(state, X, jax.random.key(0))
    assert_same_params(state.opt_state, want)
    with nn.logical_axis_rules(RULES):
        make_train_step(loss_fn, mesh, AXES, check_vma=check_vma, allow_replicated=True)(state, X, jax.random.key(0))


@pytest.mark.parametrize("check_vma", [True, False])
def test_unit_gathers_parameters_that_rules_split_over_other_axes_than_those_of_the_unit(check_vma):
    """The module of the rules computes with unsharded parameters, as the compiler would let it."""
    mesh, start = mesh_of(2, 4), one_device()[0]
    with nn.logical_axis_rules((("embed", "fsdp"), ("mlp", "dp"))):
        state = create_train_state(Model(fsdp), KEPT, mesh, jax.random.key(0), X, batch_axes=AXES)
    block = state.params["blocks"]
    assert block["Dense_0"]["kernel"].names == (None, "fsdp", "dp") and block["Dense_0"]["bias"].axes == ("dp",)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), unbox(state.params), start)
    state, _ = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma)(state, X, jax.random.key(0))
    assert_same_params(state.opt_state, one_device()[1])


def test_module_of_a_unit_reads_unsharded_kernels_that_rules_split_over_the_axis_of_the_unit_and_another():
    mesh, model = mesh_of(2, 4), fsdp(nn.Dense)(32, kernel_init=named("embed", "mlp"), use_bias=False)
    with nn.logical_axis_rules((("embed", "fsdp"), ("mlp", "dp"))):
        params = abstract_train_state(model, KEPT, mesh, jax.random.key(0), X, batch_axes=AXES).params
    assert params["kernel"].names == ("fsdp", "dp")
    specs = {"kernel": params["kernel"].replace(value=jax.P("fsdp", "dp"))}
    run = on_mesh(lambda params, x: model.apply({"params": params}, x), mesh, True, (specs, jax.P(AXES)), jax.P(AXES))
    assert jax.eval_shape(run, params, X).shape == (8, 32)


def test_plan_resolves_logical_names_and_init_sharded_raises_without_axis_rules():
    with nn.logical_axis_rules(RULES):
        plan = plan_sharding(Model(fsdp), {"dp": 2, "fsdp": 4}, X)
    rows = {row.path: row.names for row in plan.rows}
    assert rows["blocks/Dense_0/kernel"] == (None, "fsdp", None) and rows["first/kernel"] == (None, "fsdp")
    with pytest.raises(
        ValueError,
        match=r"boxed with names .* and no 'mlp'.*initialise a model with logical names under nn\.logical_axis_rules",
    ):
        init_sharded(Block(), mesh_of(2, 4), jax.random.key(0), jnp.ones((8, 16)), batch_axes=AXES)


class WithMean(nn.Module):
    """Keeps the mean of the input in a collection whose dims have logical names."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(16, kernel_init=named("in", "embed"))(x)
        mean = self.variable("stats", "mean", named("embed", init=lambda key, shape: jnp.zeros(shape)), None, (16,))
        return y - mean.value


def test_collection_beside_params_stays_replicated_despite_logical_names():
    def loss(params, apply_fn, x, rng, collections):
        del rng
        y, updated = apply_fn({"params": params, **collections}, x, mutable=list(collections))
        return jnp.mean(y**2), updated

    mesh = mesh_of(2, 4)
    with nn.logical_axis_rules(RULES):
        state = create_train_state(WithMean(), KEPT, mesh, jax.random.key(0), X, batch_axes=AXES, allow_replicated=True)
    assert state.collections["stats"]["mean"].shape == (16,) and state.collections["stats"]["mean"].is_fully_replicated
    assert leaf_of(state.params["Dense_0"]["kernel"]).names == (None, "fsdp")  # guard: the kernel is split
    _, metrics = make_train_step(loss, mesh, AXES, allow_replicated=True)(state, X, jax.random.key(0))
    assert np.isfinite(metrics["loss"])


class Attention(nn.Module):
    """Flax layers that initialise a flat matrix in a box with the names of the kernel."""

    @nn.compact
    def __call__(self, x, _=None):
        heads = named("heads", "kv", init=nn.initializers.normal())
        kernels = {"kernel_init": named("embed", "heads", "kv"), "bias_init": heads}
        return x + nn.MultiHeadDotProductAttention(4, out_kernel_init=named("heads", "kv", "embed"), **kernels)(x), None


class Layers(nn.Module):
    wrap: object = plain

    @nn.compact
    def __call__(self, x):
        layers = {"length": 2, "metadata_params": {nn.PARTITION_NAME: "layers"}}
        scanned = nn.scan(self.wrap(Attention), variable_axes={"params": 0}, split_rngs={"params": True}, **layers)
        x, _ = scanned(name="blocks")(x[:, None] * jnp.arange(1.0, 3.0)[:, None], None)
        # A layer of the same kind, with a box of mesh-axis names that splits no dim.
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, None, None))
        return nn.DenseGeneral((2, 4), kernel_init=init, use_bias=False)(x).mean(1).reshape(-1, 8)


@pytest.mark.parametrize("wrap, check_vma", [(fsdp, True), (plain, False)], ids=["wrapped", "plain"])
def test_attention_of_flax_with_logical_names_trains_as_on_one_device(wrap, check_vma):
    mesh = mesh_of(2, 4)
    with nn.logical_axis_rules(RULES):
        state = create_train_state(
            Layers(wrap), KEPT, mesh, jax.random.key(0), X, batch_axes=AXES, allow_replicated=True
        )
    kernel = leaf_of(state.params["blocks"]["MultiHeadDotProductAttention_0"]["query"]["kernel"])
    assert kernel.names == (None, "fsdp", None, None) and kernel.value.shape == (2, 8, 4, 2)
    start = unbox(jax.jit(Layers().init)(jax.random.key(0), X)["params"])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), unbox(state.params), start)
    want = jax.jit(jax.grad(loss_fn), static_argnums=1)(start, Layers().apply, X, None)
    state, _ = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma, allow_replicated=True)(
        state, X, jax.random.key(0)
    )
    assert_same_params(state.opt_state, want)


def test_dense_general_with_boxed_kernel_initialises_on_a_mesh():
    """``nn.DenseGeneral`` with a box of three names around a matrix initialises in a mesh, where Flax alone raises."""
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("fsdp", None, None))
    layer = nn.DenseGeneral((2, 4), kernel_init=init, use_bias=False)
    options = {"batch_axes": AXES, "allow_replicated": True}
    state = abstract_train_state(layer, KEPT, mesh_of(2, 4), jax.random.key(0), X, **options)
    kernel = leaf_of(state.params["kernel"])
    assert kernel.names == ("fsdp", None, None) and kernel.value.shape == (8, 2, 4)
    assert kernel.value.sharding.shard_shape((8, 2, 4)) == (2, 2, 4)
    with jax.set_mesh(mesh_of(2, 4)), pytest.raises(ValueError, match="rank"):  # guard: Flax alone cannot
        jax.eval_shape(layer.init, jax.random.key(0), X)


def test_init_sharded_raises_for_logical_names_with_axes_not_dividing_a_dim():
    with nn.logical_axis_rules((("heads", ("dp", "fsdp")),)):
        match = r"key/bias' of shape \(4, 2\) is boxed as .*: 8 shards do not divide dim 0 of size 4"
        with pytest.raises(ValueError, match=match):
            init_sharded(Attention(), mesh_of(2, 4), jax.random.key(0), jnp.ones((8, 2, 8)), batch_axes=AXES)


class InTheStyleOfT5X(nn.Module):
    """Module with the logical names in a collection beside the parameters."""

    @nn.compact
    def __call__(self, x):
        kernel = partitioning.param_with_axes("w", nn.initializers.normal(), (8, 8), axes=("embed", "mlp"))
        return partitioning.with_sharding_constraint(x @ kernel, ("batch", "mlp"))


class ScanInTheStyleOfT5X(nn.Module):
    inner: object = InTheStyleOfT5X

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            inner: object

            @nn.compact
            def __call__(self, x, _):
                return x + self.inner()(x), None

        over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2, "axis_name": "layers"}
        return partitioning.scan_with_axes(Layer, **over)(self.inner, name="blocks")(x, None)[0]


def test_logical_names_of_linen_and_nnx_leaves_become_mesh_axes():
    class Heads(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "heads", "kv"))
            self.up = nnx.LinearGeneral(8, (4, 2), kernel_init=init, rngs=rngs)

    def names(model, *path):
        def made():
            key, options = jax.random.key(0), {"batch_axes": AXES, "allow_replicated": True}
            return create_train_state(model, KEPT, mesh_of(2, 4), key, X, **options).params

        with nn.logical_axis_rules(RULES):
            params = jax.eval_shape(made)
        for name in path:
            params = params[name]
        return leaf_of(params).names

    # A further collection, and names in NNX variables; "kv" has no rule.
    assert "fsdp" in names(ScanInTheStyleOfT5X(), "blocks", "InTheStyleOfT5X_0", "w")
    assert names(nnx_model(Heads), "up", "kernel") == ("fsdp", None, None)


@pytest.mark.parametrize("where", [None, InTheStyleOfT5X], ids=["plain", "sharded"])
def test_logical_names_in_a_params_axes_collection_shard_the_parameters(where):
    model, mesh = ScanInTheStyleOfT5X(), mesh_of(2, 4)
    made = model if where is None else shard_modules(model, where, "fsdp", min_weight_size=8)
    with nn.logical_axis_rules(RULES):
        state = create_train_state(made, KEPT, mesh, jax.random.key(0), X, batch_axes=AXES, allow_replicated=True)
    assert not state.collections and leaf_of(state.params["blocks"]["InTheStyleOfT5X_0"]["w"]).axes == ("fsdp",)
    start = jax.jit(model.init)(jax.random.key(0), X)["params"]
    want = jax.jit(jax.grad(loss_fn), static_argnums=1)(start, model.apply, X, None)
    state, _ = make_train_step(loss_fn, mesh, AXES, allow_replicated=True)(state, X, jax.random.key(0))
    assert_same_params(state.opt_state, want)


def test_logical_names_of_nnx_variables_are_mapped_by_the_axis_rules():
    class Heads(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "heads", "kv"))
            self.up = nnx.LinearGeneral(8, (4, 2), kernel_init=init, rngs=rngs)

        def __call__(self, x):
            return self.up(x).reshape(-1, 8)

    model, mesh = nnx_model(Heads), mesh_of(2, 4)
    sharded = shard_modules(model, nnx.LinearGeneral, "fsdp", min_weight_size=8)
    start = {
        "up": {"kernel": unbox(model.init(jax.random.key(0))["params"]["up"]["kernel"]), "bias": jnp.zeros((4, 2))}
    }
    want = jax.jit(jax.grad(loss_fn), static_argnums=1)(start, model.apply, X, None)
    for made in (model, sharded):  # "kv" has no rule
        with nn.logical_axis_rules(RULES):
            state = create_train_state(made, KEPT, mesh, jax.random.key(0), X, batch_axes=AXES, allow_replicated=True)
        assert leaf_of(state.params["up"]["kernel"]).names == ("fsdp", None, None)
        state, _ = make_train_step(loss_fn, mesh, AXES, allow_replicated=True)(state, X, jax.random.key(0))
        assert_same_params(state.opt_state, want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_nnx_variables_split_by_rules_over_other_axes_than_those_of_their_unit_are_gathered(check_vma):
    """A unit over "data" gathers kernels whose rules also split "mlp" over "model": losses and gradients are right.

    The layers read unsharded kernels, although the unit names only the axis "data".
    """

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            def kernel(*names):
                init = nnx.initializers.lecun_normal()
                return nnx.with_partitioning(init, names, sharding_rules=(("embed", None), ("mlp", "model")))

            self.up = nnx.Linear(8, 16, kernel_init=kernel("embed", "mlp"), rngs=rngs)
            self.down = nnx.Linear(16, 8, kernel_init=kernel("mlp", "embed"), rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    mesh = DeviceMeshManager.create_device_mesh({"data": 2, "model": 4})
    model = nnx_model(Mlp)
    start = unbox(model.init(jax.random.key(0))["params"])
    want_loss, want_grads = jax.jit(jax.value_and_grad(loss_fn), static_argnums=1)(start, model.apply, X, None)
    sharded = shard_modules(model, nnx.Linear, "data", min_weight_size=8)
    state = create_train_state(sharded, KEPT, mesh, jax.random.key(0), X)
    names = {name: state.params[name]["kernel"].names for name in ("up", "down")}
    assert names == {"up": ("data", "model"), "down": ("model", "data")}  # guard: split over both axes
    state, metrics = make_train_step(loss_fn, mesh, check_vma=check_vma)(state, X, jax.random.key(0))
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-5, err_msg="loss")
    assert_same_params(state.opt_state, want_grads)  # ``KEPT`` keeps the gradients as its state


def test_partition_specs_maps_logical_names_to_axes_of_the_given_mesh():
    """``partition_specs`` maps logical names to axes of its mesh, also for a plain init without a set mesh."""
    with nn.logical_axis_rules((("a", "fsdp"), ("b", "other"))):
        params = nn.Dense(8, kernel_init=named("a", "b")).init(jax.random.key(0), jnp.ones((2, 8)))
        assert partition_specs(params, mesh_of(2, 4))["params"]["kernel"] == jax.P("fsdp")
