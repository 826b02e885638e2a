"""Tests of optimizer state in host memory: placement changes, and all values are bit-equal."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tests import support
from tests.support import AXES, assert_same_bits, data, equations, fsdp, mean_loss, mesh_of, normal, weighted_loss
from xlstm_jax.distributed import (
    BLOCK_INPUT,
    Checkpointer,
    Offload,
    Replicas,
    abstract_train_state,
    create_train_state,
    ema_params,
    init_sharded,
    make_train_step,
    muon,
    nnx_model,
    partition_specs,
    remat_policy,
    shard_batch,
    shard_modules,
    skip_nonfinite,
    sync_gradients,
    with_ema,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.modules.linen_module import LINEN
from xlstm_jax.distributed.data_parallel.modules.unit import named_input
from xlstm_jax.distributed.data_parallel.trees import path_string
from xlstm_jax.distributed.optimizers import offload, sharded_optimizer, streaming
from xlstm_jax.distributed.optimizers.sharded_optimizer import optimizer_state_shardings
from xlstm_jax.distributed.optimizers.streaming import streamed

ON_DEVICE, ON_HOST = Offload(optimizer_state=False), Offload()
ADAMW = optax.adamw(optax.cosine_decay_schedule(1e-2, 9))
CLIPPED = skip_nonfinite(with_ema(optax.chain(optax.clip_by_global_norm(0.1), ADAMW), 0.99))


class Layer(nn.Module):
    """Layer of a scan, stacked to W[2, 16, 16]."""

    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(16)(nn.tanh(x)), None


class Model(nn.Module):
    wrap: Callable

    @nn.compact
    def __call__(self, x):
        x = self.wrap(nn.Dense)(16)(x)
        layers = nn.scan(self.wrap(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(4)(layers()(x, None)[0])


@pytest.fixture(autouse=True)
def a_leaf_at_a_time(monkeypatch):
    """Makes each moment a group; by default the moments of small models form a single group."""
    monkeypatch.setattr(streaming, "GROUP_BYTES", 1)


def kinds(tree):
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


def state_of(tx, offload, wrap=fsdp, create=create_train_state):
    return create(Model(wrap), tx, mesh_of(2, 4), jax.random.key(0), data()["x"], batch_axes=AXES, offload=offload)


def trained(state, step, batches):
    for i, batch in enumerate(batches):
        state, metrics = step(state, shard_batch(batch, mesh_of(2, 4), AXES), jax.random.key(i))
    return state, metrics


ZERO1 = partial(fsdp, replicas=Replicas("dp", shard_optimizer_state=True))
CASES = {
    "clipped, averaged, of two minibatches, one step skipped": (
        CLIPPED,
        fsdp,
        weighted_loss,
        True,
        (2, True),
        "reduce_once",
    ),
    "hsdp with zero1": (optax.adamw(1e-2), ZERO1, mean_loss, False, (2, False), "reduce_replicas_once"),
    "muon": (muon(1e-2), fsdp, mean_loss, True, (1, False), "reduce_each"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tx, wrap, loss, check_vma, options, accumulation", CASES.values(), ids=CASES)
def test_offloaded_steps_are_bit_equal_to_steps_without_offload(tx, wrap, loss, check_vma, options, accumulation):
    batches = [data(seed=1), data(seed=2), data(seed=3)]
    if tx is CLIPPED:
        batches[1]["x"] = jnp.asarray(batches[1]["x"]).at[0].set(jnp.nan)
    step = make_train_step(loss, mesh_of(2, 4), AXES, *options, check_vma, accumulation=accumulation)
    first = state_of(tx, ON_HOST, wrap)
    before = kinds(first.opt_state)
    got, got_metrics = trained(first, step, batches)
    want, want_metrics = trained(state_of(tx, ON_DEVICE, wrap), step, batches)
    assert_same_bits((got, got_metrics), (want, want_metrics))
    assert kinds(got.opt_state) == before and "pinned_host" in before and "device" in before
    assert set(kinds(want.opt_state)) == {"device"}  # guard: the two placements differ
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(first.opt_state)
    moved = [one for one, kind in zip(paths_and_leaves, before, strict=True) if kind == "pinned_host"]
    assert not [path_string(path) for path, leaf in moved if not leaf.is_deleted()]  # donated


def test_offload_keeps_small_or_replicated_leaves_in_device_memory():
    state = state_of(optax.adam(1e-2), ON_HOST)
    mu = state.opt_state[0].mu
    assert kinds(mu["Dense_0"]) == ["device", "pinned_host"]  # a replicated bias of 16 values
    assert kinds(state.opt_state[0].count) == ["device"] and set(kinds(state.params)) == {"device"}
    averaged = state_of(with_ema(optax.sgd(1e-2), 0.99), ON_HOST)
    assert kinds(averaged.opt_state.ema["Dense_0"]) == ["device", "pinned_host"]
    assert kinds(ema_params(averaged.opt_state, averaged.params)["Dense_0"]) == ["device", "device"]


def test_only_moments_of_split_parameters_go_to_the_host():
    split, whole = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(8, 4), (16,)])
    params = {"split": Sharded(split, ("fsdp", None)), "whole": whole}
    opt_state = {"mu": {"split": split, "whole": whole}, "count": jax.ShapeDtypeStruct((), jnp.int32)}
    shardings = optimizer_state_shardings(opt_state, params, mesh_of(2, 4))
    found = offload.on_host(shardings, opt_state, params)
    on = {path_string(path): leaf.memory_kind for path, leaf in jax.tree.leaves_with_path(found)}
    assert [path for path, kind in on.items() if kind == "pinned_host"] == ["mu/split"] and len(on) == 3


def test_abstract_train_state_has_the_offloaded_shardings_of_the_real_state():
    real = state_of(CLIPPED, ON_HOST)
    abstract = state_of(CLIPPED, ON_HOST, create=abstract_train_state)
    assert [x.sharding for x in jax.tree.leaves(abstract)] == [x.sharding for x in jax.tree.leaves(real)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("after", [ON_HOST, ON_DEVICE], ids=["stays", "comes back"])
def test_checkpoint_restores_into_host_or_device_memory(tmp_path, after):
    before = ON_HOST if after == ON_DEVICE else ON_DEVICE
    step = make_train_step(mean_loss, mesh_of(2, 4), AXES)
    tx = optax.adamw(1e-2)
    saved, _ = trained(state_of(tx, before), step, [data()])
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        checkpoints.wait()
        target = state_of(tx, after, create=abstract_train_state)
        restored = checkpoints.restore(target)
        assert kinds(restored.opt_state) == kinds(target.opt_state)
    assert_same_bits(restored, saved)
    got, want = (trained(state, step, [data(seed=2)])[0] for state in (restored, saved))
    assert_same_bits(got.params, want.params)


def test_train_step_raises_for_a_state_of_another_optimizer():
    state = state_of(optax.adam(0.1), ON_HOST).replace(tx=optax.sgd(0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"state.opt_state is not a state of state.tx .*: its leaf '0/"):
        make_train_step(mean_loss, mesh_of(2, 4), AXES)(state, data(), jax.random.key(1))


def in_16_bits(optimizer, params, mesh):
    """Wraps an optimizer to store moments in bfloat16."""
    del params, mesh

    def cast(opt_state, dtype):
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, opt_state)

    def update(grads, before, collections, **extra_args):
        wide = before._replace(opt_state=cast(before.opt_state, jnp.float32))
        after, metrics = optimizer.update(grads, wide, collections, **extra_args)
        return after._replace(opt_state=cast(after.opt_state, jnp.bfloat16)), metrics

    return optimizer._replace(init=lambda params: cast(optimizer.init(params), jnp.bfloat16), update=update)


def test_inner_bfloat16_wrapper_stores_moments_in_host_memory(monkeypatch):
    monkeypatch.setattr(sharded_optimizer, "WRAPPERS", [in_16_bits, *sharded_optimizer.WRAPPERS])
    step, batches = make_train_step(mean_loss, mesh_of(2, 4), AXES), [data(seed=1), data(seed=2)]
    got, want = (trained(state_of(optax.adam(1e-2), offload), step, batches)[0] for offload in (ON_HOST, ON_DEVICE))
    assert_same_bits(got, want)
    assert "pinned_host" in kinds(got.opt_state) and set(kinds(want.opt_state)) == {"device"}
    assert got.opt_state[0].mu["Dense_0"]["kernel"].dtype == jnp.bfloat16


# ------------------------------------------------------------------------------------------- the order of the equations

COUPLED = {
    "by a norm of gradients": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "by a norm of updates": optax.chain(optax.adam(0.1), optax.clip_by_global_norm(0.1)),
    "by a norm of each leaf": optax.lamb(0.1),
    "by a branch over all": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "with a whole leaf's sign": optax.chain(optax.lion(0.1), optax.normalize_by_update_norm()),
}


def on_one_device(tx, on_host):
    """Returns parameters, state (arrays on the host if ``on_host``) and gradients of ``tx``, and an update function."""
    params = {"a": jnp.arange(12.0).reshape(4, 3), "b": jnp.ones((2, 5)), "c": jnp.float32(2)}
    sharding = jax.NamedSharding(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P())
    params = jax.device_put(params, sharding)
    state = jax.device_put(tx.init(params), sharding)
    host = sharding.with_memory_kind("pinned_host")
    placed = jax.tree.map(lambda x: jax.device_put(x, host if on_host and x.ndim else sharding), state)
    owners = [str(leaf.shape) for leaf in jax.tree.leaves(state)]

    def update(params, state, grads):
        def next_state(state):
            updates, state = tx.update(grads, state, params)
            return state, optax.apply_updates(params, updates)

        return streamed(next_state, state, partial(jax.tree.map, lambda _: sharding), lambda: owners)

    return params, placed, jax.tree.map(lambda p: jnp.sin(p + 1), params), update


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tx", COUPLED.values(), ids=COUPLED)
def test_offloaded_transforms_with_coupled_leaves_are_bit_equal_to_device_memory(tx):
    found = []
    for on_host in (True, False):
        params, state, grads, update = on_one_device(tx, on_host)
        step = jax.jit(update)
        for _ in range(2):
            state, params = step(params, state, grads)
        found.append((state, params))
    assert_same_bits(*found)
    assert kinds(found[0][0]).count("pinned_host") >= 2


def fetches(tx, group_bytes, monkeypatch):
    """Returns the bytes of each fetch of moments, in order, and the number of barriers in between."""
    monkeypatch.setattr(streaming, "GROUP_BYTES", group_bytes)
    params, state, grads, update = on_one_device(tx, True)
    found = [eqn for _, eqn in equations(jax.make_jaxpr(update)(params, state, grads))]
    come = [eqn.invars[0].aval for eqn in found if eqn.primitive.name == "device_put" and _comes_from_host(eqn)]
    return [4 * x.size for x in come], sum(eqn.primitive.name == "optimization_barrier" for eqn in found)


def _comes_from_host(eqn):
    return eqn.invars[0].aval.memory_space == jax.memory.Space.Host


def test_host_moments_arrive_smallest_parameter_first_and_in_groups_when_small(monkeypatch):
    adam, come = optax.adam(0.1), [40, 40, 48, 48]  # "b", and "a" (first in the parameters)
    assert fetches(adam, 1, monkeypatch) == (come, 3)
    assert fetches(adam, 2 * 40, monkeypatch) == (come, 2)  # both moments of "b" at once
    assert fetches(adam, 2**20, monkeypatch) == (come, 0)
    assert fetches(optax.lamb(0.1), 1, monkeypatch) == (come, 3)
    assert fetches(COUPLED["by a branch over all"], 1, monkeypatch)[1] == 0  # all arrive before the first leaves


def test_optimization_barriers_make_each_host_moment_wait_for_the_previous(monkeypatch):
    monkeypatch.setattr(streaming, "GROUP_BYTES", 1)
    params, state, grads, update = on_one_device(optax.adam(0.1), True)
    jaxpr = jax.make_jaxpr(update)(params, state, grads).jaxpr
    puts = {x: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "device_put" for x in eqn.outvars}
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    kinds_of = [[_comes_from_host(puts[x]) for x in eqn.invars] for eqn in barriers]
    assert kinds_of == [[True, False]] * 3  # a moment arrives, its new value leaves
    # Only operations behind the barrier use a fetched moment.
    come = [x for x, eqn in puts.items() if _comes_from_host(eqn)]
    used = [x for eqn in jaxpr.eqns if eqn not in barriers for x in eqn.invars if x in come]
    assert set(used) == {come[0]}


def average_first(tx):
    """Returns ``with_ema`` with the average stored before the moments, which the new average depends on."""
    averaged = with_ema(tx, 0.99)

    def update(updates, state, params):
        updates, new = averaged.update(
            updates, averaged.init(params)._replace(ema=state[0], inner_state=state[1]), params
        )
        return updates, (new.ema, new.inner_state)

    return optax.GradientTransformation(lambda p: (averaged.init(p).ema, tx.init(p)), update)


def test_host_moment_with_a_late_new_value_keeps_the_chain_of_barriers(monkeypatch):
    come, barriers = fetches(average_first(optax.adam(0.1)), 1, monkeypatch)
    assert come == [40] * 3 + [48] * 3
    assert barriers == 4  # all but the first two, which wait for no transfer


def test_new_moment_returns_to_host_before_the_next_arrives_with_jitted_bias_correction(monkeypatch):
    """Each new moment leaves before the next arrives, although Adam's jitted bias correction uses all parameters."""
    monkeypatch.setattr(streaming, "GROUP_BYTES", 1)
    params, state, grads, update = on_one_device(with_ema(optax.adam(0.1), 0.99), True)
    jaxpr = jax.make_jaxpr(update)(params, state, grads).jaxpr
    assert [_comes_from_host(eqn) for eqn in jaxpr.eqns if eqn.primitive.name == "device_put"] == [True, False] * 6


@pytest.mark.parametrize("tx", [optax.adam(0.1), COUPLED["by a norm of updates"]], ids=["adam", "coupled"])
def test_offloaded_update_evaluates_each_equation_once(tx, monkeypatch):
    monkeypatch.setattr(streaming, "GROUP_BYTES", 1)

    def names(on_host):
        params, state, grads, update = on_one_device(tx, on_host)
        found = [eqn.primitive.name for _, eqn in equations(jax.make_jaxpr(update)(params, state, grads))]
        return sorted(name for name in found if name not in ("device_put", "jit", "optimization_barrier"))

    assert names(True) == names(False) and "sqrt" in names(True)


# ------------------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("base", ["nothing", "dots"])
def test_remat_policy_offload_stores_activations_on_the_host_with_equal_gradients(base):
    def layer(x, w):
        return jnp.tanh(checkpoint_name(x, "block_input") @ w), None

    def loss(w, policy):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), jnp.ones((4, 8)), w)[0] ** 2)

    w = normal(0, (3, 8, 8))
    grad = jax.jit(jax.grad(loss), static_argnums=1)
    offloads, keeps = remat_policy(base, offload=["block_input"]), remat_policy(base)
    np.testing.assert_array_equal(grad(w, offloads), grad(w, keeps))

    def on_host(policy):
        found = equations(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(w, policy))
        return sum(x.aval.memory_space == jax.memory.Space.Host for _, eqn in found for x in eqn.outvars)

    assert on_host(offloads) > 0 and on_host(keeps) == 0


@pytest.mark.parametrize("check_vma, scan, kept", [(True, True, 1), (False, False, 3)], ids=["scan", "loop"])
def test_offload_of_block_input_moves_the_input_of_each_wrapped_block_to_the_host(check_vma, scan, kept):
    batch, mesh = data(), mesh_of(1, 2)

    def model(offload):
        block = partial(nn.remat, policy=remat_policy("nothing", offload=offload))
        return support.Model(lambda cls: block(fsdp(cls)) if cls is support.Block else fsdp(cls), scan)

    params = init_sharded(model([]), mesh, jax.random.key(0), batch["x"], batch_axes=AXES)["params"]
    specs = partition_specs(params, mesh)

    def gradient(offload):
        def grads(params, batch):
            return sync_gradients(jax.grad(mean_loss)(params, model(offload).apply, batch), AXES)

        mapped = jax.shard_map(grads, mesh=mesh, in_specs=(specs, jax.P(AXES)), out_specs=specs, check_vma=check_vma)
        traced = jax.jit(mapped).trace(params, batch)
        puts = [eqn for _, eqn in equations(traced.jaxpr) if eqn.primitive.name == "device_put"]
        found = [x.aval for eqn in puts for x in eqn.outvars]
        return traced, [x.shape for x in found if x.memory_space == jax.memory.Space.Host]

    (offloads, on_host), (keeps, nothing) = gradient([BLOCK_INPUT]), gradient([])
    assert on_host == [(8, 16)] * kept and not nothing  # of 16 examples a device has 8
    if scan:
        assert_same_bits(*(traced.lower().compile()(params, batch) for traced in (offloads, keeps)))


def test_sharded_nnx_module_names_the_block_input():
    unit = shard_modules(nnx_model(lambda rngs: nnx.Linear(8, 8, rngs=rngs)), nnx.Linear, "fsdp", min_weight_size=32)
    mesh = mesh_of(1, 2)
    params = init_sharded(unit, mesh, jax.random.key(0), jnp.ones((4, 8)), batch_axes=AXES)["params"]
    in_specs = (partition_specs(params, mesh), jax.P(AXES))
    apply = jax.shard_map(
        lambda p, x: unit.apply({"params": p}, x), mesh=mesh, in_specs=in_specs, out_specs=jax.P(AXES)
    )
    found = equations(jax.make_jaxpr(apply)(params, jnp.ones((4, 8))))
    assert [eqn.params["name"] for _, eqn in found if eqn.primitive.name == "name"] == [BLOCK_INPUT]


def test_named_input_names_the_first_positional_or_all_keyword_floats():
    (x, mask), by_keyword = (jnp.ones(2), jnp.ones(2)), {"y": jnp.ones(2), "index": jnp.arange(2)}
    calls = {
        "first": ((x, mask), by_keyword),
        "keywords": ((), by_keyword),
        "no floats": ((by_keyword["index"], x), {}),
    }
    counts = {}
    for name, call in calls.items():
        found = equations(jax.make_jaxpr(lambda call: named_input(LINEN, *call))(call))
        counts[name] = sum(eqn.primitive.name == "name" for _, eqn in found)
    assert counts == {"first": 1, "keywords": 1, "no floats": 0}


def test_remat_policy_raises_for_offload_as_a_string():
    with pytest.raises(TypeError, match=r"offload='block_input' is one string; pass the names in a list"):
        remat_policy(offload="block_input")
    assert remat_policy("dots", offload=["a"]) is remat_policy("dots", offload=("a",))
