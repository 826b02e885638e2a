"""Tests of third-party modules and losses: wrapped unchanged, or an error that names the module and the cure."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from tests.support import (
    AXES,
    FLOAT32_ROUNDING,
    Model,
    assert_same_params,
    data,
    fsdp,
    mean_loss,
    mesh_of,
    on_mesh,
    plain,
)
from xlstm_jax.distributed import (
    create_train_state,
    gather_params,
    init_sharded,
    make_train_step,
    partition_specs,
    shard_modules,
    sync_gradients,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path

BATCH = data()
X = BATCH["x"]
MESH = mesh_of(2, 4)


def initialised(model, **kwargs):
    return init_sharded(model, MESH, jax.random.key(0), X, batch_axes=AXES, **kwargs)


# ---------------------------------------------------------------------------------------- functions that make modules


def make_layer(config, name=None):
    return nn.Dense(config["features"], name=name)


class MadeInACompactMethod(nn.Module):
    make: Any

    @nn.compact
    def __call__(self, x):
        x = self.make({"features": 32}, name="first")(x)
        return self.make(config={"features": 4})(self.make({"features": 16})(x))


class MadeInSetup(nn.Module):
    make: Any

    def setup(self):
        self.first, self.rest = self.make({"features": 32}), [self.make({"features": 4})]

    def __call__(self, x):
        return self.rest[0](self.first(x))


@pytest.mark.parametrize("net", [MadeInACompactMethod, MadeInSetup])
def test_wrapped_module_factory_makes_sharded_modules_with_equal_parameter_names(net):
    variables = initialised(net(fsdp(make_layer)))
    assert_same_params(variables, net(make_layer).init(jax.random.key(0), X))
    split = [path for path, leaf in leaves_with_path(variables) if any(leaf_of(leaf).names)]
    assert len(split) >= len(variables["params"])  # the kernel of each layer, at least


def test_wrapped_module_factory_called_outside_a_module_returns_a_sharded_module():
    make = fsdp(functools.partial(make_layer, name="named"))
    assert make({"features": 32}) == make(config={"features": 32})
    assert initialised(make({"features": 32}))["params"]["kernel"].names == (None, "fsdp")


# ------------------------------------------------------------------------ decorated classes, remat, norms of parameters


def registers_config(cls):
    """Stores the arguments beside the fields, as model libraries do."""
    plain_init = cls.__init__

    @functools.wraps(plain_init)
    def init(self, *args, **kwargs):
        plain_init(self, *args, **kwargs)
        object.__setattr__(self, "config", dict(kwargs))

    cls.__init__ = init
    return cls


@registers_config
class Configured(nn.Module):
    features: int = 8

    def setup(self):
        self.dense = nn.Dense(self.config["features"])

    def __call__(self, x):
        return self.dense(x)


@pytest.mark.parametrize(
    "make",
    [lambda: fsdp(Configured)(features=16), lambda: fsdp(Configured(features=16), reshard_after_forward=True)],
    ids=["class", "instance"],
)
def test_wrapper_keeps_a_decorated_init_of_the_class(make):
    variables = initialised(make())
    assert_same_params(variables, Configured(features=16).init(jax.random.key(0), X))
    assert any(leaf_of(variables["params"]["dense"]["kernel"]).names)


class Flagged(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        return nn.Dense(32)(x) if deterministic else x


class Calls(nn.Module):
    layer: Any
    by_keyword: bool

    @nn.compact
    def __call__(self, x):
        layer = self.layer(name="layer")
        return layer(x, deterministic=True) if self.by_keyword else layer(x, True)


def outcome(layer, by_keyword):
    """Returns the shapes of the parameters, or the type of the error."""
    try:
        return jax.eval_shape(lambda: unbox(initialised(Calls(layer, by_keyword))))
    except (ValueError, jax.errors.TracerBoolConversionError) as error:
        return type(error)


@pytest.mark.parametrize("static", [1, 2])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_nn_remat_with_static_argnums_treats_wrapped_and_plain_classes_alike(by_keyword, static):
    want = outcome(nn.remat(Flagged, static_argnums=static), by_keyword)
    assert (want not in (ValueError, jax.errors.TracerBoolConversionError)) == (static == 2 and not by_keyword)
    assert outcome(nn.remat(fsdp(Flagged), static_argnums=static), by_keyword) == want
    assert outcome(fsdp(nn.remat(Flagged, static_argnums=static)), by_keyword) == want


class Reparametrised(nn.Module):
    kind: Any
    wrap: Any = plain

    @nn.compact
    def __call__(self, x):
        options = {"update_stats": False} if self.kind is nn.SpectralNorm else {}
        return self.kind(self.wrap(nn.Dense)(16))(x, **options)


@pytest.mark.parametrize("kind", [nn.WeightNorm, nn.SpectralNorm])
def test_weight_norm_around_a_wrapped_layer_raises_and_inside_a_wrapped_module_works(kind):
    around = Reparametrised(kind, fsdp)
    with pytest.raises(ValueError, match=rf"'Dense_0' is wrapped .*, and nn.{kind.__name__} stands around it"):
        initialised(around)
    want = Reparametrised(kind).init(jax.random.key(0), X)
    assert jax.tree.structure(around.init(jax.random.key(0), X)) == jax.tree.structure(want)  # off the mesh: plain
    variables = initialised(fsdp(Reparametrised)(kind))
    assert jax.tree.structure(unbox(variables)) == jax.tree.structure(want)
    assert any(leaf_of(variables["params"]["Dense_0"]["kernel"]).names)


# ------------------------------------------------------------------------------------------------ untrained parameters


class Adapted(nn.Module):
    """A frozen base and a trained head."""

    wrap: Any = plain

    @nn.compact
    def __call__(self, x):
        return self.wrap(nn.Dense)(4, name="head")(nn.gelu(self.wrap(nn.Dense)(16, name="base")(x)))


def state_of(params, tx):
    return TrainState.create(apply_fn=Adapted(fsdp).apply, params=jax.tree.map(jnp.copy, params), tx=tx)


@pytest.mark.parametrize("check_vma", [True, False])
def test_loss_closing_over_sharded_parameters_raises_with_the_leaf_path(check_vma):
    params = initialised(Adapted(fsdp))["params"]

    def loss_fn(head, apply_fn, batch, rng):
        return mean_loss({"base": params["base"], **head}, apply_fn, batch, rng)

    step = make_train_step(loss_fn, MESH, AXES, check_vma=check_vma)
    state = state_of({"head": params["head"]}, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"'base/kernel' is split over \('fsdp',\) by its box.* is unsharded"):
        step.lower(state, BATCH, jax.random.key(0))
    # Leaves that an outer jit has traced are recognised by the shape that Linen finds.
    in_jit = jax.jit(lambda params: on_mesh(lambda x: Adapted(fsdp).apply(params, x), MESH, check_vma, P(), P())(X))
    with pytest.raises(ValueError, match=r"'base/kernel' is split over .*closes over it.*docs/frozen"):
        in_jit.lower({"params": params})
    # Also for a model sharded from outside, and where a leaf is read without its module.
    outside = shard_modules(Adapted(), nn.Dense, "fsdp", min_weight_size=8)
    in_jit = jax.jit(lambda params: on_mesh(lambda x: outside.apply(params, x), MESH, check_vma, P(), P())(X))
    with pytest.raises(ValueError, match=r"'base/kernel' is split over .*closes over it"):
        in_jit.lower({"params": params})
    with pytest.raises(ValueError, match=r"'base/kernel' is split over .*closes over it"):
        jax.eval_shape(on_mesh(lambda x: outside.apply({"params": params}, x), MESH, check_vma, P(), P()), X)
    kernel = params["base"]["kernel"]
    with pytest.raises(ValueError, match=r"a parameter that is read is split over \('fsdp',\) .* is unsharded"):
        jax.eval_shape(on_mesh(lambda x: jnp.sum(kernel.T) + x, MESH, check_vma, P(), P()), X)


def test_multi_transform_with_stop_gradient_trains_the_head_as_a_single_device():
    params = initialised(Adapted(fsdp))["params"]
    want, start = unbox(params), unbox(params)
    labels = {"base": "frozen", "head": "trained"}
    tx = optax.multi_transform({"trained": optax.adam(0.1), "frozen": optax.set_to_zero()}, labels)

    def loss_fn(params, apply_fn, batch, rng):
        return mean_loss({**params, "base": jax.lax.stop_gradient(params["base"])}, apply_fn, batch, rng)

    state = create_train_state(Adapted(fsdp), tx, MESH, jax.random.key(0), X, batch_axes=AXES)
    step = make_train_step(loss_fn, MESH, AXES)
    opt_state = optax.adam(0.1).init(want["head"])
    for _ in range(3):
        state, _ = step(state, BATCH, jax.random.key(0))
        grads = jax.grad(mean_loss)(want, Adapted().apply, BATCH)
        updates, opt_state = optax.adam(0.1).update(grads["head"], opt_state)
        want = {**want, "head": optax.apply_updates(want["head"], updates)}
    assert_same_params(state.params, want)
    assert not np.allclose(want["head"]["kernel"], start["head"]["kernel"], atol=0.1)  # guard: the head trains
    moments = [np.shape(leaf) for leaf in jax.tree.leaves(state.opt_state) if np.ndim(leaf)]
    assert (16, 4) in moments and (8, 16) not in moments  # of the head alone


# --------------------------------------------------------------------------------------------- gradients inside a loss


def squared_error(params, x, y):
    return jnp.mean((Adapted(fsdp).apply({"params": params}, x) - y) ** 2)


def gradient_on_mesh(loss, params, check_vma, by_hand=False):
    """Returns the gradient of ``loss(params, x, y)`` over all devices; with ``by_hand`` the loss returns gradients."""
    specs = partition_specs(params, MESH)

    def gradient(params, x, y):
        return sync_gradients(loss(params, x, y), AXES) if by_hand else value_and_grad(loss, AXES)(params, x, y)[1]

    return on_mesh(gradient, MESH, check_vma, (specs, P(AXES), P(AXES)), specs)


def norm_of(tree):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def clipped_for_each_example(params, x, y):
    """Returns the mean over examples of gradients clipped to a norm below 1, as in private training."""

    def clipped(x, y):
        grads = jax.grad(squared_error)(params, x[None], y[None])
        return jax.tree.map(lambda g: g / (1 + norm_of(grads)), grads)

    return jax.tree.map(lambda g: g.mean(0), jax.vmap(clipped)(x, y))


@pytest.mark.parametrize("check_vma", [True, False])
def test_parameter_gradient_inside_a_loss_raises_with_the_leaf_path(check_vma):
    params = initialised(Adapted(fsdp))["params"]

    def penalised(params, x, y):
        return norm_of(jax.grad(squared_error)(params, x, y))

    where = r"the gradient of 'head/kernel', of shape \(4, 4\) on this device, is taken in a loss function"
    with pytest.raises(ValueError, match=where + r".*gather_params\(params, axis_name\)"):
        jax.eval_shape(gradient_on_mesh(penalised, params, check_vma), params, X, BATCH["y"])
    with pytest.raises(ValueError, match=r"the gradient of .* is taken under vmap, for each example"):
        jax.eval_shape(
            gradient_on_mesh(clipped_for_each_example, params, check_vma, by_hand=True), params, X, BATCH["y"]
        )


class Looked(nn.Module):
    """Reads an embedding, whose rows are looked up, for a batch of floats."""

    wrap: Any = plain

    @nn.compact
    def __call__(self, x):
        rows = self.wrap(nn.Embed)(64, x.shape[-1], name="table")((3 * x[:, 0]).astype(jnp.int32) % 64)
        return jnp.tanh(rows + x) * jnp.tanh(x + self.param("bias", nn.initializers.ones, (x.shape[-1],)))


TWICE = {
    "layers": lambda wrap: Adapted(wrap),
    "scan and remat": lambda wrap: Model(wrap, remat=wrap is not plain),
    "lookup": Looked,
}


def squared_outputs(model):
    return lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2)


def after_step(loss, inner):
    """Returns the loss after a step by the gradients ``inner(loss)``, as in meta-learning."""

    def adapted(params, x):
        return loss(jax.tree.map(lambda p, g: p - 0.1 * g, params, inner(loss)(params, x)), x)

    return adapted


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", TWICE)
def test_gradient_of_a_gradient_raises_in_a_step_and_is_exact_on_one_device_and_forward(name, check_vma):
    model = TWICE[name](fsdp)
    params = initialised(model)["params"]
    mean = lambda grads: sync_gradients(grads, AXES)  # noqa: E731

    def in_step(mesh, params, gradient):
        specs = partition_specs(params, mesh)
        return on_mesh(gradient, mesh, check_vma, (specs, P(AXES)), specs)

    loss = squared_outputs(model)
    by_grad = lambda loss: lambda params, x: mean(jax.grad(loss)(params, x))  # noqa: E731
    by_jitted = lambda loss: lambda params, x: mean(jax.jit(jax.grad(loss))(params, x))  # noqa: E731
    by_value_and_grad = lambda loss: lambda params, x: value_and_grad(loss, AXES)(params, x)[1]  # noqa: E731
    for inner in (by_grad, by_jitted, by_value_and_grad):
        twice = lambda params, x, inner=inner: mean(jax.grad(after_step(loss, inner))(params, x))  # noqa: E731
        with pytest.raises(ValueError, match=r"a gradient is taken of a gradient of split parameters.*gather_params\("):
            jax.eval_shape(in_step(MESH, params, twice), params, X)

    # The forward derivative of the gradient, along the parameters, is that of one device.
    plain_loss, values = squared_outputs(TWICE[name](plain)), unbox(params)
    forward = lambda params, x: mean(jax.jvp(lambda p: jax.grad(loss)(p, x), (params,), (params,))[1])  # noqa: E731
    want = jax.jvp(lambda p: jax.grad(plain_loss)(p, X), (values,), (values,))[1]
    assert_same_params(in_step(MESH, params, forward)(params, X), want, tolerance=4 * FLOAT32_ROUNDING)

    # Axes of one device take no mean.
    one = mesh_of(1, 1)
    alone = init_sharded(model, one, jax.random.key(0), X, batch_axes=AXES)["params"]
    twice = lambda params, x: mean(jax.grad(after_step(loss, by_grad))(params, x))  # noqa: E731
    want = jax.grad(after_step(plain_loss, jax.grad))(values, X)
    assert_same_params(in_step(one, alone, twice)(alone, X), want, tolerance=4 * FLOAT32_ROUNDING)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_taken_around_shard_map_raises_for_split_leaves_with_the_leaf_path(check_vma, jitted):
    """JAX's rule for ``shard_map`` expects sums over devices, and a gather's gradient is a mean."""
    params = initialised(Adapted(fsdp))["params"]

    def around(mesh, params):
        local = jax.jit(squared_error) if jitted else squared_error
        mean_of = lambda params, x, y: jax.lax.pmean(local(params, x, y), AXES)  # noqa: E731
        in_specs = (partition_specs(params, mesh), P(AXES), P(AXES))
        loss = jax.shard_map(mean_of, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=check_vma)
        return jax.grad(loss)(params, X, BATCH["y"])

    of_kernel = r"the gradient of 'head/kernel', of shape \(4, 4\) on this device, is taken from outside of shard_map"
    with pytest.raises(ValueError, match=of_kernel + r": it would be 1/4 of the gradient.*value_and_grad\("):
        jax.eval_shape(functools.partial(around, MESH), params)
    # Replicated parameters have no gather: here, and on a mesh that splits nothing, the gradient is right.
    want = jax.grad(squared_error)(unbox(params), X, BATCH["y"])
    assert_same_params(around(MESH, unbox(params)), want)
    single = mesh_of(8, 1)
    replicated = init_sharded(Adapted(fsdp), single, jax.random.key(0), X, batch_axes=AXES)["params"]
    assert_same_params(around(single, replicated), want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_per_example_gradients_of_gathered_parameters_inside_a_loss_are_exact(check_vma):
    params = initialised(Adapted(fsdp))["params"]

    def private(params, x, y):
        whole = gather_params(params, "fsdp")
        grads = clipped_for_each_example(jax.lax.stop_gradient(whole), x, y)
        return sum(map(jnp.vdot, jax.tree.leaves(whole), jax.tree.leaves(grads)))

    got = gradient_on_mesh(private, params, check_vma)(params, X, BATCH["y"])
    want = clipped_for_each_example(unbox(params), X, BATCH["y"])
    assert_same_params(got, want)
    unclipped = jax.grad(squared_error)(unbox(params), X, BATCH["y"])
    assert not np.allclose(unclipped["head"]["kernel"], want["head"]["kernel"], rtol=0.1)  # guard: the clip acts


def test_input_gradient_penalty_inside_a_loss_has_exact_gradients():
    """A gradient penalty through rematerialised blocks in a scan has exact gradients."""
    params = initialised(Model(fsdp, remat=True))["params"]

    def penalty(wrap, params, x, y):
        del y

        def of_input(x):
            return jnp.sum(Model(wrap, remat=wrap is not plain).apply({"params": params}, x) ** 2)

        return jnp.mean(jax.grad(of_input)(x) ** 2)

    got = gradient_on_mesh(functools.partial(penalty, fsdp), params, True)(params, X, BATCH["y"])
    want = jax.grad(functools.partial(penalty, plain))(unbox(params), X, BATCH["y"])
    assert_same_params(got, want, tolerance=4 * FLOAT32_ROUNDING)  # of sums of squares, differentiated twice


class Ensemble(nn.Module):
    wrap: Any = plain
    shared: bool = False

    @nn.compact
    def __call__(self, x):
        axes, split = ({"params": None}, False) if self.shared else ({"params": 0}, True)
        layers = nn.vmap(self.wrap(nn.Dense), variable_axes=axes, split_rngs={"params": split}, axis_size=3)
        return layers(4)(jnp.stack([x, 2 * x, 3 * x])).sum(0)


@pytest.mark.parametrize("shared", [True, False])
def test_vmapped_layers_are_not_mistaken_for_per_example_gradients(shared):
    model, of_one = Ensemble(fsdp, shared), Ensemble(plain, shared)
    params = initialised(model)["params"]

    def loss(model, params, x, y):
        return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

    got = gradient_on_mesh(functools.partial(loss, model), params, True)(params, X, BATCH["y"])
    assert_same_params(got, jax.grad(functools.partial(loss, of_one))(unbox(params), X, BATCH["y"]))


# ------------------------------------------------------------------------------------- derivatives that JAX cannot type


class ExactGelu(nn.Module):
    wrap: Any = plain
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        h = nn.gelu(self.wrap(nn.Dense)(16)(x).astype(self.dtype), approximate=False)
        return self.wrap(nn.Dense)(4)(h.astype(jnp.float32))


def has_typed_erf():
    """Returns whether this JAX differentiates erf under ``check_vma=True`` (0.12.0 does not)."""
    try:
        jax.eval_shape(on_mesh(jax.grad(lambda x: jax.lax.erf(x).sum()), MESH, True, P(AXES), P(AXES)), X)
    except ValueError:
        return False
    return True


def test_exact_gelu_trains_or_raises_with_remedies_if_jax_lacks_typed_erf():
    state = create_train_state(ExactGelu(fsdp), optax.sgd(0.1), MESH, jax.random.key(0), X, batch_axes=AXES)
    want = unbox(state.params)
    typed = make_train_step(mean_loss, MESH, AXES)
    if has_typed_erf():
        typed.lower(state, BATCH, jax.random.key(0))
    else:
        with pytest.raises(ValueError, match=r"exact gelu, erf and erfc .*check_vma=False.*approximate=True.*bfloat16"):
            typed.lower(state, BATCH, jax.random.key(0))
    in_bfloat16 = state.replace(apply_fn=ExactGelu(fsdp, jnp.bfloat16).apply)
    typed.lower(in_bfloat16, BATCH, jax.random.key(0))  # one of the cures
    grads = jax.grad(mean_loss)(want, ExactGelu().apply, BATCH)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, want, grads)
    state, _ = make_train_step(mean_loss, MESH, AXES, check_vma=False)(state, BATCH, jax.random.key(0))  # another
    assert_same_params(state.params, want)
