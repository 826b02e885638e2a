"""Tests of errors for gradients that a custom step averages too rarely or too often, and of what no error finds.

A step is ``jax.grad`` of a loss inside ``shard_map``, an ``average`` of the gradients, and ``apply_gradients``. Each
average is traced for models of Linen and NNX, with a scan over layers and remat, with and without minibatches.
"""

from fractions import Fraction
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests import nnx_models
from tests.support import AXES, FLOAT32_ROUNDING, Model, assert_same_params, fsdp, in_case, mesh_of, normal
from xlstm_jax.distributed import (
    TrainState,
    abstract_train_state,
    check_step,
    create_train_state,
    nnx_model,
    partition_specs,
    shard_modules,
    sync_gradients,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel.averages import wrong_averages_pass
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.training import varying_params
from xlstm_jax.distributed.training.checks.averaging import GradientMultiple, _check_sums, _Gradient, _relation
from xlstm_jax.origins import TracedValue

X = normal(0, (32, 8))
BATCH = {"x": X, "y": np.sin(np.arange(32 * 4, dtype=np.float32)).reshape(32, 4)}
RATE = 0.1

MODELS = {
    "linen": lambda: Model(fsdp),
    "linen with remat": lambda: Model(fsdp, remat=True),
    "linen in a loop": lambda: Model(fsdp, scan=False),
    "nnx": lambda: shard_modules(
        nnx_model(partial(nnx_models.Model, remat=True)), (nnx.Linear, nnx_models.Block), "fsdp", min_weight_size=32
    ),
    "replicated": lambda: Model(),
}


@cache
def state_of(model, dp=2, size=4):
    return create_train_state(
        MODELS[model](),
        optax.sgd(RATE),
        mesh_of(dp, size),
        jax.random.key(1),
        X,
        batch_axes=AXES,
        allow_replicated=True,
    )


@cache
def abstract_state_of(model, dp=2, size=4):
    """Returns the state of a model without values, to trace a step."""
    mesh, key = mesh_of(dp, size), jax.eval_shape(lambda: jax.random.key(1))
    return abstract_train_state(MODELS[model](), optax.sgd(RATE), mesh, key, X, batch_axes=AXES, allow_replicated=True)


def loss_fn(params, apply_fn, batch, rng=None):
    return jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)


def gradients(params, apply_fn, batch):
    return jax.value_and_grad(loss_fn)(params, apply_fn, batch)


def of_minibatches(params, apply_fn, batch):
    """Returns the loss and the gradients as means over two minibatches, by ``lax.scan``."""
    halves = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), batch)

    def add(sums, half):
        value, grads = gradients(params, apply_fn, half)
        return jax.tree.map(jnp.add, sums, grads), value

    sums, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), halves)
    return values.mean(), jax.tree.map(lambda leaf: leaf / 2, sums)


def of_local_params(params, apply_fn, batch):
    return gradients(varying_params(params, AXES), apply_fn, batch)


def of_library(params, apply_fn, batch):
    return value_and_grad(loss_fn, AXES)(params, apply_fn, batch)


def at_ascent(params, apply_fn, batch):
    """Returns the gradients at parameters that were moved along mean gradients (SAM), with a penalty in the loss."""
    _, first = of_library(params, apply_fn, batch)
    moved = jax.tree.map(lambda leaf, grad: leaf + 0.01 * grad, params, first)

    def penalised(params):
        return loss_fn(params, apply_fn, batch) + 1e-3 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    return jax.value_and_grad(penalised)(moved)


def apply_gradients(state, grads):
    return state.apply_gradients(grads=grads)


def step_with(average, state, *, of=gradients, check_vma=True, inside=False, update=apply_gradients):
    """Returns a custom step; ``inside``: the optimizer runs inside ``shard_map``, on shards."""
    specs = partition_specs(state.params, mesh := mesh_of_state(state))

    @jax.jit
    def step(state, batch, rng=None):
        def local(params, batch):
            value, grads = of(params, state.apply_fn, batch)
            grads = average(grads)
            after = update(state.replace(params=params), grads).params if inside else grads
            return jax.lax.pmean(value, AXES), after

        sharded = jax.shard_map(
            local, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(P(), specs), check_vma=check_vma
        )
        loss, found = sharded(state.params, batch)
        return (state.replace(params=found) if inside else update(state, found)), {"loss": loss}

    return step


def mesh_of_state(state):
    return state.step.sharding.mesh


def scaled(grads, by=0.5):
    return jax.tree.map(lambda leaf: leaf * by, grads)


def cast(grads):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), grads)


def clipped(grads):
    return jax.tree.map(lambda leaf: jnp.clip(leaf, -1e-3, 1e-3), grads)


sync = partial(sync_gradients, axis_names=AXES)
FORGOTTEN = {
    "no average": lambda grads: grads,
    "scaled, not averaged": scaled,
    "over dp alone": lambda grads: sync_gradients(grads, "dp"),
    # What lax.pmean does to a replicated leaf: a sum over equal values, divided by their number.
    "pmean of replicated leaves": lambda grads: jax.tree.map(
        lambda leaf: jax.lax.pmean(leaf, tuple(axis for axis in AXES if axis not in varying(leaf)) or "dp"), grads
    ),
}
DOUBLED = {
    "scaled": lambda grads: sync(scaled(sync(grads))),
    "cast": lambda grads: sync(cast(sync(grads))),
    "clipped": lambda grads: sync(clipped(sync(grads))),
    "carried": lambda grads: sync(jax.lax.scan(lambda sums, _: (scaled(sums), None), sync(grads), length=2)[0]),
    "added to a sum": lambda grads: sync(jax.tree.map(jnp.add, sync(grads), grads)),
}
RIGHT = {
    "once": sync,
    "twice, unchanged": lambda grads: sync(sync(grads)),
    "axis after axis": lambda grads: sync_gradients(sync_gradients(grads, "dp"), "fsdp"),
    "axis after axis, scaled": lambda grads: scaled(sync_gradients(scaled(sync_gradients(grads, "dp")), "fsdp"), 2),
}
SUMMED = (
    r"apply_gradients: JAX has summed the gradient of '\w.*' over \('fsdp',\), and the gather has averaged that of '"
)
TWICE = r"sync_gradients: '\w.*' of shape .* was averaged over \('dp', 'fsdp'\) by an earlier sync_gradients"


def varying(leaf):
    aval = jax.typeof(leaf)
    return aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma


def trace(step, state):
    jax.eval_shape(step, state, BATCH)


@pytest.mark.parametrize(
    ("of", "inside"), [(gradients, False), (of_minibatches, True)], ids=["batch-outside", "minibatches-inside"]
)
@pytest.mark.parametrize("average", FORGOTTEN)
@pytest.mark.parametrize("model", ["linen with remat", "nnx"])
def test_apply_gradients_raises_for_sums_beside_means_and_names_the_leaf(model, average, of, inside):
    state = abstract_state_of(model)
    with pytest.raises(ValueError, match=SUMMED):
        trace(step_with(FORGOTTEN[average], state, of=of, inside=inside), state)


def test_mean_over_equal_gradients_is_as_large_as_their_sum_was():
    """``pmean`` of a replicated gradient, which JAX has summed, leaves the sum."""
    found = []

    def local(w, x):
        grad = jax.grad(lambda w: jnp.sum(w * x))(w)
        found.extend(_relation(TracedValue(value)) for value in (grad, jax.lax.pmean(grad, "fsdp")))
        return grad

    split = jax.shard_map(local, mesh=mesh_of(1, 4), in_specs=(P(), P("fsdp")), out_specs=P())
    jax.eval_shape(split, *[jax.ShapeDtypeStruct((4,), jnp.float32)] * 2)
    assert [of.factor for of in found] == [1, 1] and found[1].summed == {"fsdp"}


def test_sum_beside_a_mean_raises_unless_both_have_other_factors():
    split = Sharded(np.ones(4, np.float32), ("fsdp",))
    mean = _Gradient("up", split, None, GradientMultiple(Fraction(1), Fraction(1), frozenset(), frozenset({"fsdp"})))

    def check(factor):
        relation = GradientMultiple(factor, factor, frozenset(), frozenset())
        _check_sums(_Gradient("scale", Sharded(np.ones(4, np.float32), ()), None, relation), [mean])

    check(Fraction(1, 4))
    with pytest.raises(ValueError, match=r"JAX has summed the gradient of 'scale' over \('fsdp',\), .* of 'up'"):
        check(Fraction(1))


@pytest.mark.parametrize("change", DOUBLED)
@pytest.mark.parametrize(
    ("model", "of"),
    [("linen", gradients), ("nnx", of_minibatches), ("replicated", at_ascent)],
    ids=["linen-batch", "nnx-minibatches", "replicated-ascent"],
)
def test_sync_gradients_raises_for_an_average_that_was_changed(model, change, of):
    state = abstract_state_of(model)
    with pytest.raises(ValueError, match=TWICE):
        trace(step_with(DOUBLED[change], state, of=of), state)


def test_sync_gradients_raises_for_a_scaled_average_and_not_for_the_same_average():
    def local(grad, by):
        average = sync_gradients({"w": grad}, "fsdp")["w"]
        return sync_gradients({"w": average if by is None else by * average}, "fsdp")

    def traced(by):
        run = jax.shard_map(partial(local, by=by), mesh=mesh_of(1, 4), in_specs=P(), out_specs=P())
        return jax.eval_shape(run, jax.ShapeDtypeStruct((4,), jnp.float32))

    assert traced(None)["w"].shape == (4,)
    with pytest.raises(ValueError, match=r"sync_gradients: 'w' of shape \(4,\) was averaged over \('fsdp',\)"):
        traced(0.5)


def test_gradient_at_parameters_that_an_average_has_moved_is_no_average():
    def local(w, x):
        square = lambda w: jnp.sum(w**2 * x)  # noqa: E731
        first = sync_gradients({"w": jax.grad(square)(w)}, "fsdp")["w"]
        return sync_gradients({"w": jax.grad(square)(w + first)}, "fsdp")

    split = jax.shard_map(local, mesh=mesh_of(1, 4), in_specs=(P(), P("fsdp")), out_specs=P())
    assert jax.eval_shape(split, *[jax.ShapeDtypeStruct((4,), jnp.float32)] * 2)["w"].shape == (4,)


def test_sync_gradients_raises_for_changed_gradients_of_value_and_grad():
    state = abstract_state_of("linen")
    with pytest.raises(ValueError, match=TWICE):
        trace(step_with(lambda grads: sync(scaled(grads)), state, of=of_library), state)


@pytest.mark.parametrize(
    ("average", "over"),
    [("no average", "dp', 'fsdp"), ("over dp alone", "fsdp"), ("over fsdp alone", "dp")],
)
@pytest.mark.parametrize("model", ["nnx", "replicated"])
def test_apply_gradients_raises_without_types_for_gradients_that_differ_between_devices(model, average, over):
    """Under ``check_vma=False`` the check reads the equations of the ``shard_map``."""
    averages = FORGOTTEN | {"over fsdp alone": lambda grads: sync_gradients(grads, "fsdp")}
    state = abstract_state_of(model)
    with pytest.raises(ValueError, match=rf"the gradient of '\w.*' differs between devices along \('{over}'"):
        trace(step_with(averages[average], state, check_vma=False), state)


def mean_of_shards(grads):
    return jax.tree.map(lambda leaf: jax.lax.pmean(leaf, "fsdp") if "fsdp" in varying(leaf) else leaf, sync(grads))


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
def test_apply_gradients_raises_for_a_mean_of_shards_with_each_other(check_vma, inside):
    state = abstract_state_of("linen")
    average = mean_of_shards if check_vma else partial(jax.lax.pmean, axis_name=AXES)
    step = step_with(average, state, check_vma=check_vma, inside=inside)
    with pytest.raises(ValueError, match=r"the gradient of '.*kernel' was averaged over \('fsdp',\), axes that split"):
        trace(step, state)


def on_one_device():
    """Returns the parameters of the Linen model after an SGD step on one device, by the plain model."""
    params = jax.device_put(unbox(state_of("linen with remat").params), jax.devices()[0])
    grads = jax.jit(jax.grad(loss_fn), static_argnums=1)(params, Model().apply, BATCH)
    return jax.tree.map(lambda leaf, grad: leaf - RATE * grad, params, grads)


OF = {"batch": gradients, "minibatches": of_minibatches, "varying": of_local_params, "library": of_library}
RIGHT_STEPS = [
    *[(average, way, True) for average in RIGHT for way in OF if way != "library" or "scaled" not in average],
    *[(average, "minibatches", False) for average in RIGHT],
]


@pytest.mark.parametrize(("average", "of", "check_vma"), RIGHT_STEPS)
def test_right_step_is_traced_without_an_error(average, of, check_vma):
    state = abstract_state_of("linen with remat")
    trace(step_with(RIGHT[average], state, of=OF[of], check_vma=check_vma), state)


@pytest.mark.parametrize(("average", "of", "check_vma"), RIGHT_STEPS)
def test_right_step_raises_nothing_and_equals_one_device(average, of, check_vma):
    of = OF[of]
    state = state_of("linen with remat")
    after, _ = step_with(RIGHT[average], state, of=of, check_vma=check_vma)(state, BATCH)
    assert_same_params(unbox(after.params), on_one_device(), FLOAT32_ROUNDING)
    with wrong_averages_pass():  # guard: twice the gradient makes other parameters
        wrong, _ = step_with(lambda grads: scaled(sync(grads), 2), state, of=of, check_vma=check_vma)(state, BATCH)
    with pytest.raises(AssertionError):
        assert_same_params(unbox(wrong.params), on_one_device(), FLOAT32_ROUNDING)


RIGHT_BY_HAND = {
    "divided by hand": lambda grads: jax.tree.map(lambda leaf: leaf / (2 if "fsdp" in varying(leaf) else 8), grads),
    "scaled by subtree": lambda grads: sync(grads) | {"Dense_0": scaled(sync(grads)["Dense_0"], 0.25)},
    "clipped by value": lambda grads: clipped(sync(grads)),
    "zeros for a subtree": lambda grads: sync(grads) | {"Dense_0": jax.tree.map(jnp.zeros_like, grads["Dense_0"])},
}


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("average", RIGHT_BY_HAND)
def test_apply_gradients_accepts_averages_and_scales_by_hand(average, inside):
    state = abstract_state_of("linen")
    trace(step_with(RIGHT_BY_HAND[average], state, inside=inside), state)


@pytest.mark.parametrize("of", [at_ascent, of_library, of_local_params], ids=["ascent", "library", "varying"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
def test_apply_gradients_accepts_gradients_of_several_passes(of, check_vma):
    state = abstract_state_of("linen")
    trace(step_with(sync, state, of=of, check_vma=check_vma), state)


def test_apply_gradients_accepts_a_mean_by_hand_without_types():
    """No equation shows what a ring of ``ppermute`` computes: nothing proves that devices differ."""

    def mean(leaf):
        for axis, size in {"dp": 2, "fsdp": 4}.items():
            rings = [[(i, (i + by) % size) for i in range(size)] for by in range(1, size)]
            leaf = sum((jax.lax.ppermute(leaf, axis, ring) for ring in rings), start=leaf) / size
        return leaf

    state = abstract_state_of("replicated")
    trace(step_with(lambda grads: jax.tree.map(mean, grads), state, check_vma=False), state)


@pytest.mark.parametrize(("dp", "size"), [(8, 1), (1, 1)])
def test_apply_gradients_accepts_axes_of_one_device(dp, size):
    """Along an axis of one device a sum is a mean: nothing is forgotten."""
    state = abstract_state_of("linen", dp, size)
    trace(step_with(lambda grads: sync_gradients(grads, "dp"), state), state)
    trace(step_with(lambda grads: grads, state), state)


def test_apply_gradients_accepts_an_optimizer_around_shard_map_with_clipping_and_minibatches():
    def update(state, grads):
        clip = optax.clip_by_global_norm(1e-3)
        return state.apply_gradients(grads=clip.update(grads, clip.init(grads))[0])

    state = abstract_state_of("linen")
    trace(step_with(sync, state, of=of_minibatches, update=update), state)


def test_apply_gradients_outside_shard_map_updates_a_split_leaf_of_a_global_array():
    start = jax.device_put(np.float32([7, 8]), jax.NamedSharding(mesh_of(1, 2), P("fsdp")))
    state = TrainState.create(apply_fn=None, params={"w": Sharded(start, ("fsdp",))}, tx=optax.sgd(0.5))
    after = jax.jit(lambda state: state.apply_gradients(grads=state.params))(state)
    assert int(after.step) == 1 and after.params["w"].names == ("fsdp",)
    assert after.params["w"].value.tolist() == [3.5, 4]


# ------------------------------------------------------------------------------- what the types pass, check_step finds


def again_in_a_scan(grads):
    """Calls ``sync_gradients`` again in a scan: the first carry of the scan does not show that it is an average."""
    return jax.lax.scan(lambda grads, _: (sync(grads), None), sync(grads), None, length=1)[0]


PASSED = {
    "replicated, no average": ("replicated", lambda grads: grads),
    "over fsdp alone": ("linen", lambda grads: sync_gradients(grads, "fsdp")),
    "doubled in a scan": ("linen", again_in_a_scan),
    "a sum over devices": ("linen", lambda grads: scaled(sync(grads), 8)),
}


@pytest.mark.parametrize("mistake", PASSED)
def test_mistake_that_passes_the_types_is_found_by_check_step(mistake):
    model, average = PASSED[mistake]
    state = state_of(model)
    step = step_with(average, state)
    trace(step, state)
    found = check_step(step, state, BATCH, jax.random.key(2), loss_fn=loss_fn)
    assert found.verdict == "wrong", found


@pytest.mark.parametrize("model", ["linen", "replicated"])
@pytest.mark.parametrize("average", ["no average", "over fsdp alone"])
def test_varying_params_make_each_forgotten_average_a_type_error(average, model):
    """The step is traced only for the type of its results, which JAX checks: the error names the leaf's spec."""
    averages = {"no average": lambda grads: grads, "over fsdp alone": lambda grads: sync_gradients(grads, "fsdp")}
    state = abstract_state_of(model)
    with pytest.raises(ValueError, match=r"out_specs which require replication.*(\n.*)*varying over"):
        trace(step_with(averages[average], state, of=of_local_params), state)
    trace(step_with(averages[average], state_of("replicated")), state_of("replicated"))  # guard: without the cast


@pytest.mark.parametrize("average", ["no average", "over dp alone"])
def test_check_step_measures_a_forgotten_average_without_an_error(average):
    state = state_of("linen")
    found = check_step(step_with(FORGOTTEN[average], state), state, BATCH, jax.random.key(2), loss_fn=loss_fn)
    assert found.verdict == "wrong"
    assert any(abs(leaf.ratio - 4) < 1e-3 or abs(leaf.ratio - 8) < 1e-3 for leaf in found.leaves), found


# ------------------------------------------------------------------------------------------ the cost, and JAX's types


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
@pytest.mark.parametrize("model", ["linen with remat", "nnx"])
def test_custom_step_lowers_to_the_same_text_without_the_checks(model, check_vma):
    state = state_of(model)
    texts = [step_with(sync, state, of=of_minibatches, check_vma=check_vma).lower(state, BATCH).as_text()]
    with wrong_averages_pass():
        texts.append(step_with(sync, state, of=of_minibatches, check_vma=check_vma).lower(state, BATCH).as_text())
    assert texts[0] == texts[1]
    assert "all_reduce" in texts[0]  # guard


class Layers(nn.Module):
    """Scan over layers, without wrappers."""

    @nn.compact
    def __call__(self, x):
        def layer(dense, x, _):
            return dense(x), None

        return nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(nn.Dense(8), x, None)[
            0
        ]


REFUSED_BY_JAX = {
    "scan": (Layers, r"dynamic_update_slice operand and update must be unreduced along the same axes"),
    "weight norm": (lambda: nn.WeightNorm(nn.Dense(8)), r"Inputs cannot be replicated on the same axes"),
}


@pytest.mark.parametrize("model", REFUSED_BY_JAX)
def test_reduced_types_of_jax_refuse_a_model_that_varying_types_train(model):
    """Watch: where JAX takes these models, ``varying_params`` may cast to "reduced". docs/howto/own_step.md says so."""
    make, words = REFUSED_BY_JAX[model]
    plain = make()
    params = plain.init(jax.random.key(0), X)["params"]

    def local_grads(cast, params, x):
        loss = lambda params: jnp.mean((plain.apply({"params": params}, x) - 1) ** 2)  # noqa: E731
        grads = jax.grad(loss)(cast(params))
        return jax.tree.map(lambda grad: jax.lax.psum(grad, AXES) / 8, grads)

    def of(cast):
        specs = {"in_specs": (P(), P(AXES)), "out_specs": P()}
        return jax.jit(jax.shard_map(partial(local_grads, cast), mesh=mesh_of(2, 4), **specs))(params, X)

    with pytest.raises(Exception, match=words):
        of(lambda params: jax.tree.map(lambda leaf: jax.lax.pcast(leaf, AXES, to="reduced"), params))
    found = of(lambda params: varying_params(params, AXES))
    want = jax.grad(lambda params: jnp.mean((plain.apply({"params": params}, X) - 1) ** 2))(params)
    assert_same_params(found, want, FLOAT32_ROUNDING)


def test_changed_average_over_few_devices_raises_and_over_one_device_is_the_gradient():
    def twice(w, x):
        grads = sync_gradients(jax.grad(lambda w: jnp.mean(w * x))(w), "dp")
        return sync_gradients(2 * grads, "dp")

    def on(count):
        return jax.shard_map(twice, mesh=mesh_of(count, 1), in_specs=(P(), P("dp")), out_specs=P())

    w, x = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)
    for devices in (2, 8):
        with (
            in_case(devices=devices),
            pytest.raises(ValueError, match=r"was averaged over \('dp',\) by an earlier sync_gradients"),
        ):
            jax.eval_shape(on(devices), w, x)
    assert jax.eval_shape(on(1), w, x).shape == ()
