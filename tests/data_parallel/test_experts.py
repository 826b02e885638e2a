"""Tests of experts that the model splits over a batch axis: gradients equal the gradients on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.support import FLOAT32_ROUNDING, KEPT, normal
from xlstm_jax.distributed import (
    DeviceMeshManager,
    Replicas,
    accumulate_gradients,
    create_train_state,
    gather_params,
    make_train_step,
    nnx_model,
    partition_specs,
    shard_module_params,
    shard_modules,
    sync_gradients,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of

EXPERTS, DIM, HIDDEN = 4, 6, 8
AXES = ("dp", "fsdp", "ep")
X = normal(1, (32, DIM)) * np.float32(1 + np.arange(32) % 3)[:, None]
WEIGHTS = (jnp.arange(32) % 4 / 2).astype(jnp.float32)


class MoE(nn.Module):
    """Experts split over "ep"; the tokens of a group go to all devices of the group, and the results return."""

    names: tuple = ("ep", None, None)

    @nn.compact
    def __call__(self, x):
        parts = lax.axis_size("ep") if "ep" in jax.sharding.get_abstract_mesh().manual_axes and self.names else 1
        init = nn.initializers.lecun_normal(batch_axis=0)
        init = nn.with_partitioning(init, self.names) if self.names else init
        up = self.param("up", init, (EXPERTS // parts, DIM, HIDDEN))
        down = self.param("down", init, (EXPERTS // parts, HIDDEN, DIM))
        chances = nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="gate")(x))
        chosen = jax.nn.one_hot(chances.argmax(-1), EXPERTS) * chances
        if parts > 1:
            x, chosen = (lax.all_gather(a, "ep", axis=0, tiled=True) for a in (x, chosen))
            chosen = lax.dynamic_slice_in_dim(chosen, lax.axis_index("ep") * up.shape[0], up.shape[0], 1)
        y = jnp.einsum("enh,ehd,ne->nd", nn.gelu(jnp.einsum("nd,edh->enh", x, up)), down, chosen)
        return lax.psum_scatter(y, "ep", scatter_dimension=0, tiled=True) if parts > 1 else y


def loss_fn(params, apply_fn, x, rng):
    return jnp.mean((apply_fn({"params": params}, x) - x) ** 2)


def weighted_loss(params, apply_fn, batch, rng):
    x, weight = batch
    return jnp.sum(jnp.mean((apply_fn({"params": params}, x) - x) ** 2, -1) * weight), jnp.sum(weight)


@pytest.fixture(scope="module")
def mesh():
    return DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 2, "ep": 2})


PLAIN = MoE(names=())


@pytest.fixture(scope="module")
def params():
    return PLAIN.init(jax.random.key(0), X)["params"]


def wrapped(**options):
    return shard_module_params(MoE, "fsdp", **{"min_weight_size": 8, **options})()


def state_of(model, mesh, tx=KEPT):
    return create_train_state(model, tx, mesh, jax.random.key(0), X, batch_axes=AXES, allow_replicated=True)


def close(got, want):
    for path, leaf in jax.tree_util.tree_leaves_with_path(want):
        found = got
        for key in path:
            found = found[key.key]
        np.testing.assert_allclose(found, leaf, rtol=0, atol=FLOAT32_ROUNDING * np.abs(leaf).max(), err_msg=str(path))


READY = {
    "split": (wrapped(), {}),
    "not wrapped": (MoE(), {}),
    "whole": (wrapped(min_weight_size=10**9), {}),
    "padded": (wrapped(uneven="pad", min_weight_size=0), {}),
    "copies": (wrapped(replicas=Replicas("dp")), {}),
    "copies along ep, too": (wrapped(replicas=Replicas(("dp", "ep"))), {}),
    "minibatches": (wrapped(), {"num_minibatches": 2}),
    "minibatches, reduced once": (wrapped(), {"num_minibatches": 2, "accumulation": "reduce_once"}),
    "copies reduced once": (
        wrapped(replicas=Replicas("dp")),
        {"num_minibatches": 2, "accumulation": "reduce_replicas_once"},
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case, check_vma", [("split", False), *zip(READY, [True, True, False] * 3, strict=True)])
def test_make_train_step_gradients_of_experts_match_a_single_device(case, check_vma, mesh, params):
    model, options = READY[case]
    step = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma, allow_replicated=True, **options)
    state, metrics = step(state_of(model, mesh), X, jax.random.key(2))
    loss, want = jax.value_and_grad(loss_fn)(params, PLAIN.apply, X, None)
    close(unbox(state.opt_state), want)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=FLOAT32_ROUNDING)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_weighted_and_clipped_step_with_experts_matches_a_single_device(check_vma, mesh, params):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    step = make_train_step(weighted_loss, mesh, AXES, weighted=True, check_vma=check_vma, allow_replicated=True)
    state, _ = step(state_of(wrapped(), mesh, tx), (X, WEIGHTS), jax.random.key(2))

    def of_one(params):
        total, weight = weighted_loss(params, PLAIN.apply, (X, WEIGHTS), None)
        return total / weight

    grads = jax.grad(of_one)(params)
    assert np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads))) > 0.2  # guard: gradients are clipped
    want = optax.apply_updates(params, tx.update(grads, tx.init(params))[0])
    close(unbox(state.params), want)


def by_hand(loss, params, x):
    """Returns gradients by ``jax.grad`` and ``sync_gradients``."""
    value, grads = jax.value_and_grad(loss)(params, x)
    return lax.pmean(value, AXES), sync_gradients(grads, AXES)


def by_minibatches(loss, params, x):
    return accumulate_gradients(lambda p, x, rng: loss(p, x), params, x, None, AXES, 2)


WAYS = {"by hand": by_hand, "ready": lambda loss, *args: value_and_grad(loss, AXES)(*args), "several": by_minibatches}


OWN = [("by hand", True), ("by hand", False), ("ready", True), ("several", False)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way, check_vma", OWN)
@pytest.mark.parametrize("model", [wrapped(), MoE()], ids=["wrapped", "plain"])
def test_custom_step_gradients_of_experts_match_a_single_device(model, way, check_vma, mesh, params):
    state = state_of(model, mesh)
    specs = partition_specs(state.params, mesh)
    loss = lambda params, x: loss_fn(params, model.apply, x, None)  # noqa: E731
    step = jax.shard_map(
        partial(WAYS[way], loss), mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(P(), specs), check_vma=check_vma
    )
    _, grads = jax.jit(step)(state.params, X)
    close(unbox(grads), jax.grad(loss_fn)(params, PLAIN.apply, X, None))


def with_summed_gradient(params, apply_fn, x, rng):
    """Loss that calls ``gather_params`` for leaves whose axes the model has named."""
    whole = gather_params(params, ("ep", "fsdp"))
    return jnp.mean((PLAIN.apply({"params": whole}, x) - x) ** 2)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_gradients_of_experts_gathered_by_the_loss_match_a_single_device(check_vma, mesh, params):
    step = make_train_step(with_summed_gradient, mesh, AXES, check_vma=check_vma, allow_replicated=True)
    state, _ = step(state_of(MoE(), mesh), X, jax.random.key(2))
    close(unbox(state.opt_state), jax.grad(loss_fn)(params, PLAIN.apply, X, None))


def test_gradient_of_a_gather_over_an_axis_of_the_model_and_another_axis_is_that_of_one_device(mesh):
    w, x = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(64, dtype=np.float32).reshape(16, 4)
    box = Sharded(w, ("ep", "fsdp"), model_axes=("ep",))

    def on_device(box, x):
        return value_and_grad(lambda box: jnp.mean(x @ gather_params(box, ("ep", "fsdp"))), AXES)(box)[1]

    step = jax.shard_map(on_device, mesh=mesh, in_specs=(P("ep", "fsdp"), P(AXES)), out_specs=P("ep", "fsdp"))
    np.testing.assert_allclose(jax.jit(step)(box, x).value, np.tile(x.mean(0)[:, None] / 2, 2), rtol=1e-6)


def test_sync_gradients_raises_for_experts_gathered_by_hand_in_the_loss(mesh):
    state = state_of(MoE(), mesh)
    specs = partition_specs(state.params, mesh)
    loss = lambda params, x: with_summed_gradient(params, None, x, None)  # noqa: E731
    step = jax.shard_map(partial(by_hand, loss), mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(P(), specs))
    with pytest.raises(ValueError, match=r"model itself splits '(up|down)' over .*by training.value_and_grad"):
        jax.jit(step)(state.params, X)


def test_leaf_named_with_the_wrapper_axis_by_the_model_is_not_treated_as_expert(mesh, params):
    """A wrapper over "fsdp" accepts a model that names "fsdp" itself, as models written for jit do."""
    model = shard_module_params(partial(Gathered, names=(None, "fsdp", None)), "fsdp", min_weight_size=8)()
    state = state_of(model, mesh)
    assert state.params["up"].names == (None, "fsdp", None) and state.params["up"].model_axes == ()
    state, _ = make_train_step(loss_fn, mesh, AXES)(state, X, jax.random.key(2))
    close(unbox(state.opt_state), jax.grad(loss_fn)(params, PLAIN.apply, X, None))


class Gathered(nn.Module):
    """``MoE`` with gathered experts: each device computes all experts."""

    names: tuple

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(batch_axis=0), self.names)
        up, down = self.param("up", init, (EXPERTS, DIM, HIDDEN)), self.param("down", init, (EXPERTS, HIDDEN, DIM))
        chances = nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="gate")(x))
        chosen = jax.nn.one_hot(chances.argmax(-1), EXPERTS) * chances
        return jnp.einsum("enh,ehd,ne->nd", nn.gelu(jnp.einsum("nd,edh->enh", x, up)), down, chosen)


class NNXMoE(nnx.Module):
    """NNX version of ``MoE``; the metadata of the parameters name the axis."""

    def __init__(self, rngs, names=("ep", None, None)):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        named = {"sharding_names": names} if names else {}
        self.up = nnx.Param(init(rngs.params(), (EXPERTS, DIM, HIDDEN)), **named)
        self.down = nnx.Param(init(rngs.params(), (EXPERTS, HIDDEN, DIM)), **named)
        self.gate = nnx.Linear(DIM, EXPERTS, use_bias=False, rngs=rngs)

    def __call__(self, x):
        up, down = self.up[...], self.down[...]
        chances = nnx.softmax(self.gate(x))
        chosen = jax.nn.one_hot(chances.argmax(-1), EXPERTS) * chances
        inside = up.shape[0] < EXPERTS
        if inside:
            x, chosen = (lax.all_gather(a, "ep", axis=0, tiled=True) for a in (x, chosen))
            chosen = lax.dynamic_slice_in_dim(chosen, lax.axis_index("ep") * up.shape[0], up.shape[0], 1)
        y = jnp.einsum("enh,ehd,ne->nd", nn.gelu(jnp.einsum("nd,edh->enh", x, up)), down, chosen)
        return lax.psum_scatter(y, "ep", scatter_dimension=0, tiled=True) if inside else y


@pytest.mark.filterwarnings("ignore:'sharding_names' is deprecated")
@pytest.mark.parametrize("threshold", [8, 10**9], ids=["split", "whole"])
def test_gradients_of_nnx_experts_match_a_single_device(threshold, mesh):
    plain = nnx_model(partial(NNXMoE, names=()))
    model = shard_modules(nnx_model(NNXMoE), lambda path, module: path == "", "fsdp", threshold)
    step = make_train_step(loss_fn, mesh, AXES, allow_replicated=True)
    state, _ = step(state_of(model, mesh), X, jax.random.key(2))
    close(unbox(state.opt_state), jax.grad(loss_fn)(plain.init(jax.random.key(0), X)["params"], plain.apply, X, None))


def test_guard_expert_gradients_are_doubled_without_model_axes(mesh, params, monkeypatch):
    from xlstm_jax.distributed.training import gradients

    state = state_of(wrapped(), mesh)
    monkeypatch.setattr(gradients, "leaf_of", lambda leaf: leaf_of(leaf).replace(model_axes=()))
    state, _ = make_train_step(loss_fn, mesh, AXES, check_vma=False)(state, X, jax.random.key(2))
    want = jax.grad(loss_fn)(params, PLAIN.apply, X, None)
    np.testing.assert_allclose(unbox(state.opt_state)["up"], 2 * want["up"], rtol=1e-4, atol=1e-6)
