"""Tests of user-defined wrappers of ``ShardedOptimizer``: each is a few lines, and updates stay exact.

rounded    keeps moments in bfloat16
cautious   divides gradients by a factor in the optimizer's state, which doubles after each rise of the loss
measured   adds the norm of the gradients that the optimizer sees to the metrics of a step
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.support import AXES, assert_each_leaf, assert_same_params, data, fsdp, mean_loss, mesh_of, plain
from xlstm_jax.distributed import (
    DeviceMeshManager,
    Replicas,
    TrainState,
    abstract_train_state,
    create_train_state,
    make_train_step,
    unbox,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.distributed.optimizers.sharded_optimizer import (
    WRAPPERS,
    Trained,
    WrapperOfStates,
    optimizer_state_shardings,
    sharded_optimizer,
)

STEPS = 5


def cast(opt_state, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, opt_state)


def rounded(optimizer, params, mesh):
    del params, mesh

    def init(params):
        return cast(optimizer.init(params), jnp.bfloat16)

    def update(grads, before, collections, **extra_args):
        wide = before._replace(opt_state=cast(before.opt_state, jnp.float32))
        after, metrics = optimizer.update(grads, wide, collections, **extra_args)
        return after._replace(opt_state=cast(after.opt_state, jnp.bfloat16)), metrics

    return optimizer._replace(init=init, update=update)


def cautious(optimizer, params, mesh):
    del params, mesh

    def init(params):
        return jnp.ones(()), jnp.full((), jnp.inf), optimizer.init(params)

    def update(grads, before, collections, value, **extra_args):
        factor, last, inner = before.opt_state
        factor = factor * jnp.where(value > last, 2.0, 1.0)
        smaller = jax.tree.map(lambda g: g / factor, grads)
        after, metrics = optimizer.update(
            smaller, before._replace(opt_state=inner), collections, value=value, **extra_args
        )
        return after._replace(opt_state=(factor, value, after.opt_state)), metrics

    return optimizer._replace(init=init, update=update)


def measured(optimizer, params, mesh):
    del params, mesh

    def update(grads, before, collections, **extra_args):
        after, metrics = optimizer.update(grads, before, collections, **extra_args)
        return after, metrics | {"seen_norm": optax.tree.norm(grads)}

    return optimizer._replace(update=update)


@pytest.fixture
def registry():
    """Yields the registry of wrappers, and restores the registry after the test."""
    before = list(WRAPPERS)
    yield WRAPPERS
    WRAPPERS[:] = before


class TwoLayers(nn.Module):
    """Kernels split by rows, a padded bias, and a replicated bias."""

    wrap: object = plain

    @nn.compact
    def __call__(self, x):
        return self.wrap(nn.Dense)(4, name="down")(nn.tanh(self.wrap(nn.Dense)(18, name="up")(x)))


def padded(cls):
    return fsdp(cls, min_weight_size=16, uneven="pad")


def started(tx, create=create_train_state, wrap=padded):
    return create(TwoLayers(wrap), tx, mesh_of(2, 4), jax.random.key(0), data()["x"], batch_axes=AXES)


def one_device():
    return jax.jit(TwoLayers().init)(jax.random.key(0), data()["x"])["params"]


# ------------------------------------------------------------------------------------------------ user-defined wrappers


def test_bfloat16_moments_wrapper_is_bit_equal_to_a_single_device(registry):
    # Powers of two and integer gradients, so that float32 is exact in any order of XLA.
    tx = optax.sgd(2.0**-10, momentum=0.5)
    registry.insert(0, rounded)  # the innermost
    state = started(tx)
    params = jax.device_put(unbox(state.params), jax.devices()[0])
    exact, moments, wide = params, cast(tx.init(params), jnp.bfloat16), tx.init(params)
    update = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for seed in range(STEPS):
        rng = np.random.default_rng(seed)
        grads = jax.tree.map(lambda p, rng=rng: jnp.asarray(rng.integers(-999, 999, p.shape), jnp.float32), params)
        state = update(state, grads)
        updates, new = tx.update(grads, cast(moments, jnp.float32), params)
        params, moments = optax.apply_updates(params, updates), cast(new, jnp.bfloat16)
        updates, wide = tx.update(grads, wide, exact)
        exact = optax.apply_updates(exact, updates)
    assert_each_leaf(np.testing.assert_array_equal, unbox(state.params), params)
    assert_each_leaf(np.testing.assert_array_equal, unbox(state.opt_state), moments)
    trace = state.opt_state[0].trace["up"]["bias"].value
    assert trace.dtype == jnp.bfloat16 and trace.shape == (20,)  # padded, and split, as in float32
    assert trace.sharding.spec == state.params["up"]["bias"].value.sharding.spec
    # Guard: float32 moments give other parameters.
    assert not np.array_equal(exact["up"]["kernel"], params["up"]["kernel"])


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
def test_wrapper_with_a_gradient_scale_in_the_state_matches_a_single_device(registry, check_vma):
    registry[:] = [*registry, cautious, measured]
    tx = optax.chain(optax.clip_by_global_norm(2.0), optax.sgd(5.0))
    state, params = started(tx), one_device()
    step = make_train_step(mean_loss, mesh_of(2, 4), AXES, check_vma=check_vma)
    of_loss = jax.jit(jax.value_and_grad(lambda p: mean_loss(p, TwoLayers().apply, data())))
    opt_state, factor, last = tx.init(params), 1.0, np.inf
    for _ in range(STEPS):
        state, metrics = step(state, data(), jax.random.key(1))
        value, grads = of_loss(params)
        factor, last = factor * (2 if value > last else 1), value
        smaller = jax.tree.map(lambda g, factor=factor: g / factor, grads)
        updates, opt_state = tx.update(smaller, opt_state, params)
        params = optax.apply_updates(params, updates)
        # The outermost wrapper sees unchanged gradients.
        np.testing.assert_allclose(metrics["seen_norm"], optax.tree.norm(grads), rtol=1e-4)
        np.testing.assert_allclose(metrics["grad_norm"], metrics["seen_norm"], rtol=1e-6)
    assert_same_params(state.params, params, 1e-4)
    assert float(state.opt_state[0]) == factor > 1  # guard: the loss has risen
    assert int(state.step) == STEPS
    assert step._cache_size() == 1, "a later step was compiled again"


def test_step_without_wrappers_matches_a_single_device(registry):
    registry.clear()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(0.05, min_dim_size_to_factor=4))
    state, params = started(tx), one_device()
    step = make_train_step(mean_loss, mesh_of(2, 4), AXES)
    of_loss, opt_state = jax.jit(jax.grad(lambda p: mean_loss(p, TwoLayers().apply, data()))), tx.init(params)
    for _ in range(STEPS):
        state, _ = step(state, data(), jax.random.key(1))
        updates, opt_state = tx.update(of_loss(params), opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_same_params(state.params, params, 1e-4)


# -------------------------------------------------------------------------------------- placement and origin of states


@pytest.mark.parametrize("tx", [optax.adafactor(0.1), optax.adam(0.1)], ids=["adafactor", "adam"])
def test_shardings_match_the_placement_of_the_optimizer_state(tx):
    state = started(tx)
    optimizer = sharded_optimizer(tx, state.params, mesh_of(2, 4))
    abstract = jax.eval_shape(optimizer.init, state.params)
    assert jax.tree.structure(abstract) == jax.tree.structure(state.opt_state)
    wanted = jax.tree.leaves(optimizer.shardings(abstract))
    assert [x.sharding for x in jax.tree.leaves(state.opt_state)] == wanted
    of_shapes = started(tx, abstract_train_state).opt_state
    assert [x.sharding for x in jax.tree.leaves(of_shapes)] == wanted
    assert len({sharding.spec for sharding in wanted}) > 1  # guard


def test_sees_boxes_is_correct_for_created_unboxed_and_stepped_states():
    """``sees_boxes`` is right, also if all parameters are padded and moments have boxes like padded moments."""

    def alike(cls):
        return fsdp(cls, min_weight_size=1, uneven="pad")

    made = started(optax.adam(0.1), wrap=alike)
    kept = {"apply_fn": made.apply_fn, "tx": made.tx}
    created = TrainState.create(params=made.params, **kept)
    assert created.sees_boxes and not made.sees_boxes
    assert not TrainState.create(params=unbox(made.params), **kept).sees_boxes
    stepped, _ = make_train_step(mean_loss, mesh_of(2, 4), AXES)(created, data(), jax.random.key(1))
    assert not stepped.sees_boxes  # moments are stored as by create_train_state


def test_wrapper_of_states_runs_only_for_states_with_its_kind_of_node(monkeypatch):
    seen = []

    def counted(optimizer, params, mesh):
        seen.append(optimizer)
        return optimizer

    module = "xlstm_jax.distributed.optimizers.sharded_optimizer.WRAPPERS_OF_STATES"
    monkeypatch.setattr(module, [WrapperOfStates(optax.TraceState, counted)])
    params = {"kernel": jnp.ones((8, 2))}
    for tx, calls in ((optax.sgd(0.1), 0), (optax.sgd(0.1, momentum=0.9), 1)):
        optimizer = sharded_optimizer(tx, params, mesh_of(1, 8))
        before = Trained(0, params, optimizer.init(params), {})
        jax.jit(lambda grads, of=optimizer, before=before: of.update(grads, before, {})[0].params)(params)
        assert len(seen) == calls


@pytest.mark.parametrize(
    "shape, names, spec",
    [
        ((8, 24), ("fsdp", None), P("fsdp", "dp")),  # shards of 2 and 24
        ((48, 24), ("fsdp", None), P("fsdp", "dp")),  # shards of 12 and 24
        ((48, 24), (None, "fsdp"), P("dp", "fsdp")),
        ((48, 8), ("fsdp", None), P(("fsdp", "dp"), None)),  # 3 copies divide the shards of 12
        ((16, 20), ("fsdp", None), P("fsdp")),  # they divide neither 4 nor 20
        ((20, 9), ("fsdp", None), P("fsdp", "dp")),
    ],
    ids=str,
)
def test_state_of_three_copies_is_split_along_the_largest_shard_that_they_divide(shape, names, spec):
    mesh = DeviceMeshManager.create_abstract_mesh({"dp": 3, "fsdp": 4, "tp": 1})
    for axes in ("dp", ("tp", "dp")):  # an axis of one device has no copies
        copies = Communication(replicas=Replicas(axes, shard_optimizer_state=True))
        params = {"w": Sharded(jax.ShapeDtypeStruct(shape, jnp.float32), names, communication=copies)}
        moments = {"mu": {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}}
        assert optimizer_state_shardings(moments, params, mesh)["mu"]["w"].spec == spec
