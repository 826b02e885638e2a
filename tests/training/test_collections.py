"""Tests of collections: state and step treat batch statistics as one device with the global batch.

Values that devices would compute from local examples alone raise an error before the step runs, in both ``check_vma``
modes.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import PartitionSpec as P

from tests.support import (
    AXES,
    Block,
    assert_same_bits,
    assert_same_params,
    data,
    differing_leaves,
    fsdp,
    mesh_of,
    on_mesh,
    plain,
)
from xlstm_jax.distributed import (
    Checkpointer,
    ReplicaError,
    Replicas,
    TrainState,
    abstract_train_state,
    bytes_per_device,
    check_replicas,
    check_step,
    create_train_state,
    export_safetensors,
    import_safetensors,
    make_train_step,
    partition_specs,
    plan_sharding,
    skip_nonfinite,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel import box_like
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.training.varying import differing_axes
from xlstm_jax.forecast import forecast
from xlstm_jax.forecast.training import Workload, lint

KEY, BATCH, TX = jax.random.key(0), data(), optax.sgd(0.1)
BOTH_MODES = pytest.mark.parametrize("check_vma", [True, False])
STATS = "batch_stats/BatchNorm_0"


class Net(nn.Module):
    """Batch statistics between two layers; ``axis_name`` is BatchNorm's."""

    axis_name: Any = AXES
    wrap: Any = plain

    @nn.compact
    def __call__(self, x):
        x = self.wrap(nn.Dense)(16)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.5, axis_name=self.axis_name)(x)
        return self.wrap(nn.Dense)(4)(nn.gelu(x))


def loss_fn(params, apply_fn, batch, rng, collections):
    del rng
    out, updated = apply_fn({"params": params, **collections}, batch["x"], mutable=list(collections))
    return jnp.mean((out - batch["y"]) ** 2), updated


def state_of(model, tx=TX, mesh=None, create=create_train_state, **options):
    return create(model, tx, mesh or mesh_of(2, 4), KEY, BATCH["x"], batch_axes=AXES, **options)


def traced(loss, model=None, state=None, **options):
    """Traces a step on an abstract state."""
    state = state_of(model or Net(wrap=fsdp()), create=abstract_train_state) if state is None else state
    return make_train_step(loss, mesh_of(2, 4), AXES, **options).trace(state, BATCH, KEY)


def on_one_device(model):
    """Returns a function of (params, batch, collections): the loss, and the updated collections."""
    return jax.jit(lambda params, batch, kept: loss_fn(params, model.apply, batch, None, kept))


def one_step(collections, model):
    """Returns (parameters, collections) after a step on one device."""
    params = jax.jit(model.init)(KEY, BATCH["x"])["params"]
    loss_and_grads = jax.jit(jax.value_and_grad(on_one_device(model), has_aux=True))
    (_, updated), grads = loss_and_grads(params, BATCH, collections)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), updated


# ------------------------------------------------------------------------------------------- equal on all devices


@BOTH_MODES
def test_train_step_raises_for_batch_norm_statistics_not_reduced_over_batch_axes(check_vma):
    cure = r"nn.BatchNorm\(..., axis_name=\('dp', 'fsdp'\)\).* pmean\(updated, .*docs/collections.md"
    with pytest.raises(ValueError, match=rf"'{STATS}/mean', '{STATS}/var' would .* along \('dp', 'fsdp'\).*{cure}"):
        traced(loss_fn, Net(None, fsdp()), check_vma=check_vma)
    with pytest.raises(ValueError, match=rf"along \('fsdp',\).*{cure}"):
        traced(loss_fn, Net("dp", fsdp()), check_vma=check_vma, num_minibatches=2)


class Stack(nn.Module):
    """A scan over wrapped layers with batch statistics, recomputed in the backward pass."""

    wrap: Any

    @nn.compact
    def __call__(self, x):
        stacked = {"params": 0, "batch_stats": 0}
        layers = nn.scan(nn.remat(self.wrap(Layer)), variable_axes=stacked, split_rngs={"params": True}, length=2)
        return layers()(x, None)[0][:, :4]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.BatchNorm(use_running_average=False, axis_name=AXES)(nn.Dense(8)(x)), None


@pytest.mark.parametrize("check_vma, axis_name", [(True, AXES), (False, "fsdp")])
def test_train_step_accepts_global_batch_statistics_in_scanned_layers(check_vma, axis_name):
    """Global batch statistics pass in a scan with gathers over all batch axes, as ``nn.scan`` drops types."""
    traced(loss_fn, Stack(fsdp(axis_name=axis_name)), check_vma=check_vma)


def test_check_replicas_finds_statistics_wrongly_declared_as_replicated():
    """``check_replicas`` finds statistics that a custom step wrongly declares as replicated."""
    model, mesh = Net(None, fsdp()), mesh_of(2, 4)
    state = state_of(model)

    def on_device(params, collections, batch):
        loss = lambda params: loss_fn(params, model.apply, batch, None, collections)  # noqa: E731
        (value, updated), grads = value_and_grad(loss, AXES, has_aux=True)(params)
        return value, grads, updated

    def own_step(state, batch, rng):
        specs = partition_specs(state.params, mesh)
        run = on_mesh(on_device, mesh, False, (specs, P(), P(AXES)), (P(), specs, P()))
        loss, grads, collections = run(state.params, state.collections, batch)
        updates, opt_state = state.tx.update(unbox(grads), state.opt_state)
        params = box_like(optax.apply_updates(unbox(state.params), updates), state.params)
        return state.replace(params=params, opt_state=opt_state, collections=collections), {"loss": loss}

    check_replicas(state)
    with pytest.raises(ReplicaError, match=rf"2 of \d+ leaves .*'collections/{STATS}/mean'"):
        check_replicas(own_step(state, BATCH, KEY)[0])
    found = check_step(own_step, state, BATCH, KEY, loss_fn=loss_fn)
    assert any(f"'{STATS}/mean', '{STATS}/var' are not the same on all" in finding for finding in found.findings)


def test_check_step_accepts_global_batch_norm_statistics():
    found = check_step(make_train_step(loss_fn, mesh_of(2, 4), AXES), state_of(Net(wrap=fsdp())), BATCH, KEY)
    assert found.ok and found.compared == "gradients", str(found)


def test_loss_may_average_per_device_statistics_with_pmean():
    def averaged(*args):
        loss, updated = loss_fn(*args)
        return loss, jax.lax.pmean(updated, AXES)

    model = Net(None, fsdp())
    state, _ = make_train_step(averaged, mesh_of(2, 4), AXES, check_vma=False)(state_of(model), BATCH, KEY)
    traced(averaged, model)
    start = dict(jax.jit(Net().init)(KEY, BATCH["x"]))
    shares = [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], BATCH) for i in range(8)]
    alone = on_one_device(Net(None))
    of_shares = [alone(start["params"], share, _kept(start))[1] for share in shares]
    assert_same_params(dict(state.collections), jax.tree.map(lambda *x: sum(x) / 8, *of_shares))
    whole = loss_fn(start["params"], Net(None).apply, BATCH, None, _kept(start))[1]
    assert not np.allclose(
        *(tree["batch_stats"]["BatchNorm_0"]["var"] for tree in (state.collections, whole)), rtol=0.1
    )


def _kept(variables):
    return {name: collection for name, collection in variables.items() if name != "params"}


class Spectral(nn.Module):
    """Spectral normalisation: a collection derived from a gathered weight."""

    @nn.compact
    def __call__(self, x):
        return nn.SpectralNorm(nn.Dense(16))(x, update_stats=True)


class Counting(nn.Module):
    """Collections that are equal on all devices: derived from weights (replicated and gathered), a count, and a key."""

    wrap: Any = plain

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (8,))
        count = self.variable("seen", "count", lambda: jnp.int32(0))
        mean = self.variable("seen", "mean", lambda: 0.0)  # weakly typed: must not cause a second compilation
        large = self.variable("seen", "large", lambda: jnp.array(False))
        key = self.variable("keys", "key", lambda: jax.random.key(3))
        if not self.is_initializing():
            count.value += 1
            mean.value = 0.5 * mean.value + 0.5 * jnp.mean(scale)
            large.value = jnp.sum(scale) > 1
            key.value = jax.random.split(key.value)[0]
        return self.wrap(Spectral)()(x * scale)[:, :4]


def test_collections_computed_from_parameters_counts_and_keys_stay_equal():
    mesh, state = mesh_of(2, 4), state_of(Counting(fsdp()))
    step = make_train_step(loss_fn, mesh, AXES)
    collections = _kept(jax.jit(Counting().init)(KEY, BATCH["x"]))
    params, want = one_step(collections, Counting())
    _, want = on_one_device(Counting())(params, BATCH, want)
    for _ in range(2):
        state, _ = step(state, BATCH, KEY)
    got = dict(state.collections)
    assert_same_bits(got.pop("keys"), want.pop("keys"))
    assert_same_params(got, want)
    assert got["seen"]["count"] == 2 and got["seen"]["count"].dtype == jnp.int32 and got["seen"]["large"]
    assert step._cache_size() == 1
    check_replicas(state)
    traced(loss_fn, Counting(fsdp()), check_vma=False, num_minibatches=2)


class Codes(nn.Module):
    """Decaying codes, split over an axis by a box of the model."""

    @nn.compact
    def __call__(self, x):
        box = nn.with_partitioning(lambda: jnp.arange(32.0).reshape(8, 4), ("fsdp", None))
        codes = self.variable("codes", "table", box)
        if not self.is_initializing():
            assert codes.value.shape == (2, 4)  # of this device
            codes.value = codes.value / 2
        return fsdp(nn.Dense)(4)(x)


@BOTH_MODES
def test_collection_leaf_boxed_by_the_model_stays_sharded(check_vma):
    state = state_of(Codes())
    before = jax.tree.map(lambda x: x.sharding, state)
    state, _ = make_train_step(loss_fn, mesh_of(2, 4), AXES, check_vma=check_vma)(state, BATCH, KEY)
    assert jax.tree.map(lambda x: x.sharding, state) == before
    table = state.collections["codes"]["table"]
    assert type(table) is nn.Partitioned and table.names == ("fsdp", None)
    assert np.array_equal(table.value, np.arange(32.0).reshape(8, 4) / 2)


# ----------------------------------------------------------------------------------------------------- minibatches


@pytest.mark.one_in(2)
@pytest.mark.parametrize("accumulation, check_vma", [
    ("reduce_each", True), ("reduce_once", False), ("reduce_replicas_once", True),
])  # fmt: skip
def test_minibatches_pass_collections_on_as_a_single_device_does(accumulation, check_vma):
    """Minibatches pass collections on as on one device, where minibatch j has row j of every device."""

    def weighted(params, apply_fn, batch, rng, collections):
        out, updated = apply_fn({"params": params, **collections}, batch["x"], mutable=list(collections))
        error = jnp.mean((out - batch["y"]) ** 2, axis=-1)
        return ((jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"])), {"error": jnp.mean(error)}), updated

    wrap = fsdp(replicas=Replicas("dp")) if accumulation == "reduce_replicas_once" else fsdp()
    options = {"num_minibatches": 2, "accumulation": accumulation, "weighted": True, "has_aux": True}
    step = make_train_step(weighted, mesh_of(2, 4), AXES, check_vma=check_vma, **options)
    state, metrics = step(state_of(Net(wrap=wrap)), BATCH, KEY)

    start = dict(jax.jit(Net().init)(KEY, BATCH["x"]))

    def reference(params):
        kept, total = _kept(start), 0.0
        for j in range(2):
            rows = jax.tree.map(lambda x, j=j: x[j::2], BATCH)
            ((error, _), _), kept = weighted(params, Net(None).apply, rows, None, kept)
            total = total + error
        return total / BATCH["weight"].sum(), kept

    (loss, kept), grads = jax.jit(jax.value_and_grad(reference, has_aux=True))(start["params"])
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert_same_params(dict(state.collections), kept)
    assert_same_params(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, start["params"], grads))


# -------------------------------------------------------------------------------------------- steps that are skipped


def test_skip_nonfinite_leaves_collections_unchanged_for_a_skipped_step():
    state = state_of(Net(wrap=fsdp()), skip_nonfinite(optax.adam(0.1)))
    step = make_train_step(loss_fn, mesh_of(2, 4), AXES)
    state, _ = step(state, BATCH, KEY)
    held = jax.tree.map(np.asarray, (state.params, state.collections))
    nan = BATCH | {"x": BATCH["x"].copy()}
    nan["x"][3, 0] = np.nan
    # Squares overflow to an infinite variance; dividing gives 0, and loss and gradients are finite.
    large = BATCH | {"x": jnp.where(jnp.arange(16) % 2, 1e20, -1e20)[:, None] * jnp.ones(8)}
    for bad, count in [(nan, 1), (large, 2)]:
        state, metrics = step(state, bad, KEY)
        assert metrics["skipped_steps"] == count and np.isfinite(metrics["loss"]) == (count == 2)
        assert_same_bits((state.params, state.collections), held)
    state, metrics = step(state, BATCH, KEY)
    assert metrics["skipped_in_a_row"] == 0
    assert differing_leaves(state.collections, held[1]), "a good step must change the collections"


# --------------------------------------------------------------------------------------- results of the loss function


def _updated(change):
    """Returns a loss function with ``change(updated collections)`` as collections."""

    def changed(*args):
        loss, updated = loss_fn(*args)
        return loss, change(updated)

    return changed


def test_collection_omitted_by_the_loss_stays_unchanged():
    state = state_of(Net(wrap=fsdp()))
    held = jax.tree.map(np.asarray, state.collections)
    state, _ = make_train_step(_updated(lambda _: {}), mesh_of(2, 4), AXES)(state, BATCH, KEY)
    assert_same_bits(state.collections, held)


# ---------------------------------------------------------------------------------------------------- fields of a state


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Net(wrap=fsdp())(x)
        self.sow("losses", "size", jnp.sum(x**2))
        return x


def test_train_state_raises_for_cache_and_sown_collections_unless_excluded_by_mutable():
    decoder = nn.MultiHeadDotProductAttention(num_heads=2, decode=True)
    with pytest.raises(ValueError, match=r"'cache' holds what decoding keeps of single .*mutable=\['params'\]"):
        state_of(decoder, create=abstract_train_state)
    with pytest.raises(ValueError, match=r"'losses/size' is a tuple, .* mutable=\['params', 'batch_stats'\]"):
        state_of(Sowing(), create=abstract_train_state)
    state = state_of(Sowing(), create=abstract_train_state, mutable=["params", "batch_stats"])
    assert set(state.collections) == {"batch_stats"}

    def with_sown(params, apply_fn, batch, rng, collections):
        variables = {"params": params, **collections}
        out, updated = apply_fn(variables, batch["x"], mutable=[*collections, "losses"])
        (size,) = updated.pop("losses")["size"]
        return jnp.mean((out - batch["y"]) ** 2) + 0.1 * size, updated

    traced(with_sown, state=state)


def test_abstract_state_and_plan_match_the_collections_of_the_real_state():
    model = Net(wrap=fsdp())
    state, abstract = state_of(model), state_of(model, create=abstract_train_state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), (state.params, state.collections)) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), (abstract.params, abstract.collections)
    )
    plan = plan_sharding(model, {"dp": 2, "fsdp": 4}, BATCH["x"])
    assert plan.other.per_device == bytes_per_device(state.collections) == 2 * 16 * 4
    row = plan.row("(batch_stats) BatchNorm_0/mean")
    assert row.parts == 1 and str(row.reason) == "only parameters are split"


def test_forecast_and_lint_count_the_bytes_of_collections():
    model, mesh = Net(wrap=fsdp()), mesh_of(2, 4)
    step, args = Workload(model, TX, BATCH, loss_fn, inputs=(BATCH["x"],)).build_step(mesh)
    found, plan = forecast(step, *args), plan_sharding(model, mesh.shape, BATCH["x"])
    rest = bytes_per_device([BATCH["x"], BATCH["y"]]) // 8 + 4  # and the number of the step; key and weights go unused
    assert found.memory.argument_bytes == plan.parameters.per_device + plan.other.per_device + rest
    assert plan.other.per_device == 2 * 16 * 4
    assert lint(found, plan) == []


def test_checkpoint_with_collections_restores_on_another_mesh_fully_or_in_parts(tmp_path):
    model = Net(wrap=fsdp())
    state, _ = make_train_step(loss_fn, mesh_of(2, 4), AXES)(state_of(model), BATCH, KEY)
    target = state_of(model, mesh=mesh_of(1, 2), create=abstract_train_state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        restored = checkpointer.restore(target)
        statistics = checkpointer.restore_params(target.collections, path="collections")
        params = checkpointer.restore_params(target.params)
    variables = {"params": state.params, **state.collections}
    export_safetensors(variables, tmp_path)
    assert_same_bits(import_safetensors(tmp_path, variables), variables)
    held = jax.tree.map(np.asarray, (state.params, state.collections))
    assert_same_bits((restored.params, restored.collections), held)
    assert_same_bits((params, statistics), held)
    assert restored.collections["batch_stats"]["BatchNorm_0"]["mean"].sharding.mesh.shape["fsdp"] == 2


class WithSlowParams(TrainState):
    slow: Any  # a field without default after a field with default


def test_flax_train_state_and_subclasses_train_and_checkpoint_unchanged(tmp_path):
    """A plain Flax state trains and checkpoints like a state of the library; a subclass keeps its fields."""
    ours = state_of(Block(8), allow_replicated=True)
    fields = {name: getattr(ours, name) for name in ("step", "apply_fn", "params", "tx", "opt_state")}
    flaxs = train_state.TrainState(**fields)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, flaxs)
        assert_same_bits(checkpointer.restore(ours).params, flaxs.params)

    def loss(params, apply_fn, batch, rng):
        return jnp.mean(apply_fn({"params": params}, batch["x"])[0] ** 2)

    step = make_train_step(loss, mesh_of(2, 4), AXES, allow_replicated=True)
    assert type(step.eval_shape(flaxs, BATCH, KEY)[0]) is train_state.TrainState
    slow = step.eval_shape(WithSlowParams(**fields, slow=fields["params"]), BATCH, KEY)[0]
    assert jax.tree.structure(slow.slow) == jax.tree.structure(fields["params"]) and slow.collections == {}


# -------------------------------------------------------------------------------------------------- equations of a loss


def _scanned(x, w):
    """Scan whose second value differs along "fsdp" from the first turn on, and the third from the next turn on."""

    def turn(carry, _):
        a, b, c = carry
        return (x.sum() + a, jax.lax.psum(a, "dp") + jax.lax.axis_index("fsdp"), b + c), a

    start = collectives.to_varying(w.sum(), ["fsdp"])
    return jax.lax.scan(turn, (x.sum(), start, start), None, length=4)


def _while(x, w):
    """Loop in which the first value decides how often the second is incremented."""
    start = x.sum(), 0 * x.sum() + w.sum()
    return jax.lax.while_loop(lambda values: values[0] < 3, lambda values: (values[0] + x.sum(), values[1] + 1), start)


@jax.custom_vjp
def _summed(x):
    return jax.lax.psum(x, "dp")


_summed.defvjp(lambda x: (_summed(x), None), lambda _, g: (g,))

FUNCTIONS = {
    "products": lambda x, w: (x @ w, w * 2, 1.0),
    "sums": lambda x, w: (jax.lax.psum(x, AXES), jax.lax.pmean(x, "dp"), jax.lax.pmax(x, "fsdp")),
    "index": lambda x, w: (w.sum() + jax.lax.axis_index("dp"), jax.lax.ppermute(x, "dp", [(0, 1), (1, 0)])),
    "scan": _scanned,
    "while": _while,
    "cond": lambda x, w: jax.lax.cond(
        jax.lax.psum(x.sum(), "fsdp") > 0, lambda: x.sum() * 0, lambda: 0 * x.sum() + 1.0
    ),
    "remat": lambda x, w: jax.checkpoint(lambda x: jax.lax.pmean(jnp.sin(x), AXES) * w[0])(x),
    "custom rules": lambda x, w: (_summed(x), nn.relu(w), jax.jit(nn.gelu)(jax.lax.psum(x, AXES))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_differing_axes_from_equations_equal_the_varying_axes_of_types(name):
    """``differing_axes`` reads the same axes from equations as types show, with and without ``check_vma``."""
    found = {}

    def on_device(check_vma, x, w):
        fn = lambda x, w: jax.tree.leaves(FUNCTIONS[name](x, w))  # noqa: E731
        found[check_vma] = differing_axes(fn, (x, w), [frozenset(AXES), frozenset()])
        found["types"] = [collectives.varying_axes(leaf) for leaf in fn(x, w)] if check_vma else found["types"]

    for check_vma in (True, False):
        run = on_mesh(partial(on_device, check_vma), mesh_of(2, 4), check_vma, (P(AXES), P()), P())
        jax.eval_shape(run, jnp.ones((8, 8)), jnp.ones(8))
    assert found[True] == found["types"] == found[False]


def test_differing_axes_of_cond_include_the_axes_of_the_predicate():
    def branch(which, x):
        return [jax.lax.cond(which > 0, lambda x: x + 1, lambda x: x - 1, x)]

    assert differing_axes(branch, (1.0, 2.0), [frozenset({"dp"}), frozenset()]) == [{"dp"}]
    assert differing_axes(branch, (1.0, 2.0), [frozenset(), frozenset()]) == [set()]


def test_differing_axes_treats_results_of_unknown_equations_as_differing():
    """Values of unknown equations count as differing: a sum over groups, an outer trace, an unknown primitive."""

    def on_device(x, w):
        group_sum = partial(jax.lax.psum, axis_name="fsdp", axis_index_groups=[[0, 1], [2, 3]])
        fn = lambda w: [group_sum(w), w + x.sum(), unknown_call(w), jax.lax.all_gather(w, "fsdp")]  # noqa: E731
        found.extend(differing_axes(fn, (w,), [frozenset({"fsdp"})]))

    def unknown_call(w):
        return jax.custom_derivatives.linear_call(lambda _, w: w * jax.lax.axis_index("dp"), lambda _, g: g, (), w)

    found = []
    jax.eval_shape(on_mesh(on_device, mesh_of(2, 4), False, (P(AXES), P()), P()), jnp.ones((8, 8)), jnp.ones(8))
    assert found == [{"fsdp"}, {"fsdp"}, set(AXES), frozenset()]
