"""Tests of argument errors: the text names argument, leaf, rule and cure; correct arguments pass."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

from tests.support import AXES, assert_same_params, data, fsdp, in_case, mean_loss, mesh_of, on_mesh
from xlstm_jax.distributed import (
    DeviceMeshManager,
    clip_by_global_norm,
    create_train_state,
    elementwise_only,
    make_train_step,
    skip_nonfinite,
    sync_gradients,
    unbox,
)
from xlstm_jax.distributed.metrics import WeightedMean
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.distributed.training.arguments import (
    EVAL_FN,
    LOSS_FN,
    LOSS_FN_WITHOUT_KEY,
    check_loss_fn,
    check_mesh_of,
    check_takes,
    takes_key,
    without_key,
)
from xlstm_jax.distributed.training.nan_inputs import naming_nans
from xlstm_jax.forecast import forecast
from xlstm_jax.forecast.training import Workload
from xlstm_jax.forecast.training.linting.lint import lint

KEY, BATCH, MESH = jax.random.key(0), data(), mesh_of(2, 4)
MODEL, PLAIN = fsdp(nn.Dense)(4), nn.Dense(4)


def new_state(mesh=MESH, tx=None):
    tx = tx or optax.adam(1e-2)
    return create_train_state(MODEL, tx, mesh, KEY, BATCH["x"], batch_axes=AXES)


@cache
def kept_state():
    """Returns a shared state for calls that only trace or raise, and so donate nothing."""
    return new_state()


def trace(state=None, batch=BATCH, rng=KEY, *local, loss=mean_loss, mesh=MESH, **options):
    return make_train_step(loss, mesh, AXES, **options).trace(state or kept_state(), batch, rng, *local)


# ------------------------------------------------------------------------------------------------ a state and its mesh


@pytest.mark.parametrize("leaf", ["state/params/bias", "state/opt_state/0/count", "state/step", "rng"])
def test_train_step_raises_for_a_state_or_rng_on_another_mesh(leaf):
    """A state on another mesh raises; XLA would abort the process on donating buffers to a program of another mesh."""
    here, there = kept_state(), new_state(mesh_of(4, 2))
    rng = jax.device_put(KEY, jax.NamedSharding(mesh_of(4, 2), P())) if leaf == "rng" else KEY
    name = leaf.split("/")[1] if "/" in leaf else ""
    state = here.replace(**{name: getattr(there, name)}) if name else here
    rule = (
        rf"'{leaf}.*' lies on a mesh \{{'dp': 4, 'fsdp': 2\}}, and the step was made for a mesh \{{'dp': 2, 'fsdp': 4"
    )
    for take in ("trace", "lower", "__call__"):
        with in_case(take=take), pytest.raises(ValueError, match=rule + ".*restore into abstract_train_state"):
            getattr(make_train_step(mean_loss, MESH, AXES), take)(state, BATCH, rng)


def test_traced_array_on_another_mesh_raises_and_on_the_mesh_of_the_step_does_not():
    for mesh in (MESH, mesh_of(4, 2)):
        on_it = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(mesh, P("fsdp")))
        with in_case(mesh=mesh):
            trace = lambda: jax.jit(lambda x: check_mesh_of({"state": x}, MESH)).trace(on_it)  # noqa: B023, E731
            if mesh == MESH:
                trace()
                continue
            with pytest.raises(ValueError, match=r"'state' lies on a mesh \{'dp': 4, 'fsdp': 2\}, .*a mesh \{'dp': 2"):
                trace()


def test_train_step_accepts_equivalent_meshes_and_a_batch_on_any_mesh():
    only = DeviceMeshManager.create_device_mesh({"fsdp": 8})
    batches = [BATCH] + [DeviceMeshManager.shard_batch(BATCH, m, m.axis_names) for m in (mesh_of(4, 2), only)]
    state = create_train_state(MODEL, optax.sgd(0.1), only, KEY, BATCH["x"], batch_axes="fsdp")
    losses = [make_train_step(mean_loss, mesh_of(1, 8), AXES)(state, BATCH, KEY)[1]["loss"]]
    losses += [make_train_step(mean_loss, MESH, AXES)(new_state(), batch, KEY)[1]["loss"] for batch in batches]
    assert_allclose(losses, [losses[0]] * 4, rtol=1e-5)


def test_meshes_of_a_state_and_a_step_are_compared_without_axes_of_size_1():
    only, x = DeviceMeshManager.create_device_mesh({"fsdp": 8}), np.ones(8, np.float32)

    def checked_in_a_step_of(mesh):
        return jax.eval_shape(lambda w: check_mesh_of({"state": {"w": w}}, mesh), on_only)

    on_only = jax.device_put(x, jax.NamedSharding(only, P("fsdp")))
    for mesh in (only, mesh_of(1, 8)):
        checked_in_a_step_of(mesh)
    with pytest.raises(ValueError, match=r"'state/w' lies on a mesh {'fsdp': 8}, and .* {'dp': 4, 'fsdp': 2}"):
        checked_in_a_step_of(mesh_of(4, 2))


@pytest.mark.parametrize("move, devices", [
    (lambda state: jax.device_put(jax.device_get(state), jax.devices()[0]), r"\[0\]"),
    (lambda state: new_state(DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4}, jax.devices()[::-1])), r"\[7,"),
], ids=["one", "reversed"])  # fmt: skip
def test_train_step_raises_for_a_state_on_other_devices(move, devices):
    with pytest.raises(ValueError, match=rf"state\['step'\] lies on the devices {devices}.* has \[0, 1, .*one mesh"):
        make_train_step(mean_loss, MESH, AXES)(move(kept_state()), BATCH, KEY)


@pytest.mark.parametrize("of", ["all", "params", "local", "batch"])
def test_train_step_raises_for_a_donated_or_deleted_argument(of):
    """A donated argument raises an error on a second use, where some releases of JAX abort the process."""
    metric = WeightedMean() if of == "local" else None
    local = [metric.empty(AXES, MESH)] if metric else []
    loss = (lambda *args: (mean_loss(*args), {"values": mean_loss(*args)})) if metric else mean_loss
    step = make_train_step(loss, MESH, AXES, metric=metric)
    before, batch = new_state(), jax.tree.map(jnp.copy, BATCH)
    after, *_ = step(before, batch, KEY, *local)
    if of == "batch":
        batch["y"].delete()
    state = {"all": before, "params": after.replace(params=before.params)}.get(of, after)
    name = {"local": "local", "batch": r"batch\['y'\]"}.get(of, "state")
    cure = "deleted: it was donated" if of == "batch" else rf"handed to .*before.*jax.tree.map\(jnp.copy, {name}\)"
    if of == "batch" and jax.__version_info__ < (0, 11):
        return  # JAX ends the process, and to look at every array would cost as much as to call the step
    with pytest.raises(ValueError, match=rf"{name} was .*{cure}"):
        step(state, batch, KEY, *local)


def test_train_step_keeps_the_interface_of_a_jitted_function():
    step = make_train_step(mean_loss, MESH, AXES)
    assert isinstance(step, jax.stages.Wrapped) and step.__name__ == "step" and step._cache_size() == 0
    state, _ = step(new_state(), BATCH, KEY)
    step(state, BATCH, KEY)
    assert step._cache_size() == 1
    assert jax.eval_shape(step, state, BATCH, KEY)[1]["loss"].shape == ()  # the arguments are tracers
    step.clear_cache()
    assert step._cache_size() == 0


# ------------------------------------------------------------------------------------------------- arguments of a step


def test_guard_train_step_traces_with_valid_arguments():
    """Guard of the tests below: correct arguments trace."""
    trace()
    trace(rng=jax.random.PRNGKey(0))
    trace(batch=(BATCH["x"], {"t": 0.5}), loss=lambda p, f, b, r: jnp.mean(f({"params": p}, b[0])) * b[1]["t"])
    trace(batch=None, loss=lambda p, f, b, r: jnp.mean(f({"params": p}, jax.random.normal(r, (2, 8)))))


def test_naming_nans_raises_for_a_nan_with_leaf_and_index():
    """``naming_nans`` replaces JAX's ``RecursionError`` by the leaf and index of a NaN or infinity."""
    bad = {"x": np.float32([[0, 1], [2, np.nan]]), "y": np.float32([np.inf])}
    for looks, of_first in (
        (jax.debug_nans, r"jax_debug_nans: batch\['x'\] of shape \(2, 2\) holds NaN at index \(1, 1\)"),
        (jax.debug_infs, r"jax_debug_infs: batch\['y'\] of shape \(1,\) holds infinity at index \(0,\)"),
    ):
        with looks(True), pytest.raises(ValueError, match=of_first), naming_nans({"batch": bad}):
            raise RecursionError
    with pytest.raises(RecursionError), naming_nans({"batch": bad}):  # guard: JAX does not look
        raise RecursionError


def test_train_step_under_debug_nans_raises_for_a_nan_with_the_argument_name():
    """Under ``jax.debug_nans`` a step names the argument with a NaN; JAX alone raises a ``RecursionError``."""
    step, bad = make_train_step(mean_loss, MESH, AXES), np.array(BATCH["x"])
    bad[5, 2] = np.nan
    params = jax.tree.map(lambda leaf: leaf.at[..., 1].set(np.nan), kept_state().params)
    with jax.debug_nans(True):
        with pytest.raises(ValueError, match=r"jax_debug_nans: batch\['x'\] of shape .* holds NaN at index \(5, 2\)"):
            step(kept_state(), BATCH | {"x": jax.device_put(bad, jax.NamedSharding(MESH, P(AXES)))}, KEY)
        with pytest.raises(ValueError, match=r"state\.params\['.*'\] of shape .* holds NaN"):
            step(kept_state().replace(params=params), BATCH, KEY)
    with jax.debug_infs(True), pytest.raises(ValueError, match=r"jax_debug_infs: .* holds infinity"):
        step(kept_state(), BATCH | {"y": np.full_like(BATCH["y"], np.inf)}, KEY)


def test_compiled_step_under_debug_nans_names_the_argument_or_says_that_the_step_makes_the_nan():
    """JAX repeats a compiled step, whose arguments are donated by then; the error must not be about the donation."""

    def root(params, apply_fn, batch, rng):
        return mean_loss(params, apply_fn, batch, rng) + jnp.mean(jnp.sqrt(batch["y"]))

    step, bad = make_train_step(root, MESH, AXES), np.array(BATCH["x"])
    bad[5, 2] = np.nan
    good = BATCH | {"y": np.ones_like(BATCH["y"])}
    state, _ = step(jax.tree.map(jnp.copy, kept_state()), good, KEY)  # compiles
    with jax.debug_nans(True):
        with pytest.raises(ValueError, match=r"jax_debug_nans: batch\['x'\] of shape .* holds NaN at index \(5, 2\)"):
            step(jax.tree.map(jnp.copy, state), good | {"x": bad}, KEY)
        with pytest.raises(FloatingPointError, match=r"the step makes a NaN .* on one device, docs/howto/find_a_nan"):
            step(jax.tree.map(jnp.copy, state), good | {"y": -good["y"]}, KEY)
        step(state, good, KEY)
        with pytest.raises(ValueError, match=r"state.* was handed to a step before"):
            step(state, good, KEY)  # guard: a donated state is still named


def test_train_step_under_debug_nans_accepts_a_nan_masked_by_the_loss():
    """A NaN in missing labels, which the loss masks, passes under ``jax.debug_nans``."""

    def labelled(params, apply_fn, batch, rng):
        y = jnp.where(jnp.isnan(batch["labels"]), 0, batch["labels"])
        return mean_loss(params, apply_fn, batch | {"y": y}, rng)

    labels = np.array(BATCH["y"])
    labels[5] = np.nan
    with jax.debug_nans(True):
        _, metrics = make_train_step(labelled, MESH, AXES)(kept_state(), BATCH | {"labels": labels}, KEY)
        assert np.isfinite(float(metrics["loss"]))


def test_train_step_raises_for_the_state_of_another_optimizer():
    trace(kept_state().replace(tx=optax.adam(1e-3)))  # guard: an optimizer with equal state passes
    for tx, rule in [(optax.sgd(0.1, momentum=0.9), r"its leaf '0/count' is of shape \(\), and tx.init makes none"),
                     (optax.adamw(1e-3), "its leaves are in another tree")]:  # fmt: skip
        with pytest.raises(ValueError, match=f"not a state of state.tx for state.params: {rule}"):
            trace(kept_state().replace(tx=tx))
    other = optax.adam(1e-2).init({"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)})
    with pytest.raises(ValueError, match=r"'0/mu/kernel' is of shape \(3, 4\), and tx.init makes of shape \(8, 4\)"):
        trace(kept_state().replace(opt_state=other))


def test_train_step_passes_on_an_error_raised_by_the_optimizer():
    def update(*args, **extra):
        raise KeyError("mine")

    state = kept_state()
    with pytest.raises(KeyError, match="mine"):
        trace(state.replace(tx=optax.GradientTransformationExtraArgs(state.tx.init, update)))


# ---------------------------------------------------------------------------------------------------- losses and models


# ---------------------------------------------------------------------------------------------------------- the wrapper


# ----------------------------------------------------------------------------------------------- numbers and averages


def test_clip_by_global_norm_accepts_an_infinite_or_traced_max_norm():
    grads = jnp.array([3.0, 4.0])
    assert_allclose(clip_by_global_norm(float("inf")).update(grads, None)[0], grads)
    tx = optax.inject_hyperparams(clip_by_global_norm)(max_norm=optax.constant_schedule(1.0))
    assert_allclose(jax.jit(tx.update)(grads, tx.init(grads))[0], grads / 5, rtol=1e-6)


@pytest.mark.parametrize("tx, name", [
    (elementwise_only(optax.adam(1e-3)), "elementwise_only"), (skip_nonfinite(optax.adam(1e-3)), "skip_nonfinite"),
    (clip_by_global_norm(1.0), "global_norm"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
@pytest.mark.parametrize("over", [None, "fsdp", AXES], ids=str)
def test_library_optimizers_raise_for_a_gradient_without_sync_gradients(over, tx, name):
    """Optimizers reject unaveraged gradients under types: JAX sums no gradient of a weight cast to varying."""

    def local(x):
        w = {"w": jnp.ones(8)}
        grads = jax.grad(lambda w: jnp.mean(x @ w["w"]))(jax.lax.pcast(w, AXES, to="varying"))
        grads = grads if over is None else sync_gradients(grads, over)
        return tx.update(grads, tx.init(w), w)[0]

    run = on_mesh(local, MESH, True, P(AXES), P())
    if over == AXES:
        run(BATCH["x"])  # guard
        return
    axes = "'dp', 'fsdp'" if over is None else "'dp'"
    rule = rf"{name}: 'w' of shape \(8,\) differs between devices along {axes}, but it is in no box"
    rule += ".*Call sync_gradients once"
    with pytest.raises(ValueError, match=rule):
        run(BATCH["x"])


def test_plain_optax_update_raises_for_a_missing_sync_with_the_documented_jax_error():
    def local_step(x):
        w = jnp.ones(8)
        grad = jax.grad(lambda w: jnp.mean(x @ w))(jax.lax.pcast(w, AXES, to="varying"))
        return optax.apply_updates(w, sync_gradients(grad, "fsdp"))

    quoted = r"was given out_specs which require replication[\s\S]* inferred to be possibly varying over \{dp\}"
    with pytest.raises(ValueError, match=quoted):
        on_mesh(local_step, MESH, True, P(AXES), P())(BATCH["x"])


# ------------------------------------------------------------------------------------------------------------- scalars


def scaled_loss(params, apply_fn, batch, rng=None):
    assert jnp.ndim(batch["t"]) == 0 and len(batch["x"]) < 16
    return mean_loss(params, apply_fn, batch) * batch["t"] + batch["epoch"]


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("placed", [False, True], ids=["numbers", "shard_batch"])
def test_scalars_in_a_batch_reach_every_device_and_minibatch(placed, count, check_vma):
    batch = BATCH | {"t": 0.5, "epoch": np.int32(3)}
    state = new_state(tx=optax.sgd(0.1))
    params = jax.device_get(unbox(state.params))
    want, grads = jax.value_and_grad(mean_loss)(params, PLAIN.apply, BATCH)
    given = DeviceMeshManager.shard_batch(batch, MESH, AXES) if placed else batch
    state, metrics = make_train_step(scaled_loss, MESH, AXES, count, check_vma=check_vma)(state, given, KEY)
    assert_allclose(metrics["loss"], want * 0.5 + 3, rtol=1e-5)
    assert_same_params(state.params, jax.tree.map(lambda p, g: p - 0.1 * 0.5 * g, params, grads))


def test_batch_accepts_a_list_of_a_number_and_a_tree_but_no_list_of_numbers():
    def loss(params, apply_fn, batch, rng=None):
        scale, rest = batch["extra"]
        return mean_loss(params, apply_fn, batch) * scale + rest["x"].mean()

    batch = BATCH | {"extra": [0.5, {"x": BATCH["x"]}]}
    _, metrics = make_train_step(loss, MESH, AXES)(new_state(tx=optax.sgd(0.1)), batch, KEY)
    want = 0.5 * mean_loss(jax.device_get(unbox(new_state().params)), PLAIN.apply, BATCH) + BATCH["x"].mean()
    assert_allclose(metrics["loss"], want, rtol=1e-5)
    with pytest.raises(ValueError, match=r"batch\['extra/0'\] is a list or tuple of 2 numbers"):  # guard
        make_train_step(loss, MESH, AXES).lower(new_state(), BATCH | {"extra": [[0.5, 1.0], {"x": BATCH["x"]}]}, KEY)


def test_forecast_and_lint_accept_a_step_with_scalars_in_the_batch():
    batch = BATCH | {"t": 0.5, "epoch": np.int32(3)}
    training = Workload(MODEL, optax.sgd(0.1), batch, scaled_loss, inputs=(BATCH["x"],))
    step, args = training.build_step(MESH, num_minibatches=2)
    assert args[1]["t"].sharding.spec == P()
    found = forecast(step, *args)
    assert {c.kind for c in found.collectives} >= {"all-gather", "reduce-scatter"}
    assert not lint(found, plan_sharding(MODEL, MESH.shape, BATCH["x"]), num_minibatches=2)


# ------------------------------------------------------------------------------------------- signatures of functions


@pytest.mark.parametrize(
    "loss_fn, draws",
    [
        (lambda params, apply_fn, batch: 0, False),
        (lambda params, apply_fn, batch, rng: 0, True),
        (lambda params, apply_fn, batch, rng=None: 0, False),
        (lambda params, apply_fn, batch, my_key: 0, True),
        (lambda params, apply_fn, batch, _: 0, True),
        (lambda params, apply_fn, batch, collections: 0, False),
        (lambda params, apply_fn, batch, rng, collections: 0, True),
        (lambda *args: 0, False),
    ],
)
def test_loss_with_and_without_a_key_is_told_by_its_signature(loss_fn, draws):
    assert check_loss_fn(loss_fn) is (LOSS_FN if draws else LOSS_FN_WITHOUT_KEY)
    for called in (EVAL_FN, LOSS_FN_WITHOUT_KEY):
        if not draws:
            assert check_loss_fn(loss_fn, "evaluate", called) is called


@pytest.mark.parametrize(
    "loss_fn, cure",
    [
        (nn.Dense(2), "not a Dense.*; write a function that calls apply_fn"),
        (mesh_of(1, 1), r"not a Mesh.*; pass \(loss_fn, mesh, batch_axes\)"),
        (nn.Dense, "; write a function that calls apply_fn"),
        (dict, r"; pass \(loss_fn, mesh, batch_axes\)"),
        (None, r"; pass \(loss_fn, mesh, batch_axes\)"),
        (lambda params, batch: 0, r"with 4 arguments in this order, and the loss_fn that it was\s+given is"),
        (lambda a, b, c, d, e, f: 0, "with 4 arguments in this order"),
    ],
    ids=["model", "mesh", "class of a model", "class", "None", "two arguments", "six arguments"],
)
def test_loss_that_a_step_cannot_call_raises_with_its_cure(loss_fn, cure):
    with pytest.raises(TypeError, match=cure):
        check_loss_fn(loss_fn)


def test_step_passes_its_key_to_a_loss_that_takes_one():
    plain, keyed = (lambda params, apply_fn, batch: 0), (lambda params, apply_fn, batch, rng: 0)
    optional = lambda params, apply_fn, batch, rng=None: 0  # noqa: E731
    with_collections = lambda params, apply_fn, batch, rng, collections: 0  # noqa: E731
    key, some = jax.random.key(0), {"batch_stats": {}}
    assert [takes_key(fn, key, {}, {}) for fn in (plain, keyed, optional)] == [False, True, True]
    assert not takes_key(plain, None, {}, {}) and not takes_key(optional, None, {}, {})
    assert takes_key(with_collections, key, some, {})
    assert not takes_key(lambda params, apply_fn, batch, collections: 0, key, some, {})
    for fn, collections, message in (
        (keyed, {}, "the loss function takes a key as argument 4, and the step was given none"),
        (with_collections, some, "the loss function takes a key as argument 4, and the step was given none"),
        (keyed, some, "the loss function takes a key as argument 4, and the step was given none"),
    ):
        with in_case(collections=collections), pytest.raises(TypeError, match=message):
            takes_key(fn, None, collections, {})
    with pytest.raises(
        TypeError, match=r"the state has the collections \['batch_stats'\], and loss_fn takes 4 arguments"
    ):
        takes_key(keyed, key, some, {})
    with pytest.raises(TypeError, match="loss_fn takes collections as argument 5, and the state has none"):
        takes_key(with_collections, key, {}, {})


def test_names_of_further_trees_match_the_keyword_arguments():
    def loss(params, apply_fn, batch, *, teacher, other=None):
        del params, apply_fn, batch, teacher, other

    check_takes(loss, LOSS_FN_WITHOUT_KEY, {}, {"teacher": 1})
    check_takes(loss, LOSS_FN_WITHOUT_KEY, {}, {"teacher": 1, "other": 2})
    with pytest.raises(TypeError, match="loss_fn takes 'teacher' by name, and the step was not given it"):
        check_takes(loss, LOSS_FN_WITHOUT_KEY, {}, {"other": 2})
    with pytest.raises(TypeError, match=r"with the name 'student', and loss_fn takes\s+\['other', 'teacher'\]\. Write"):
        check_takes(loss, LOSS_FN_WITHOUT_KEY, {}, {"teacher": 1, "student": 2})
    with pytest.raises(TypeError, match="with the name 'batch', and loss_fn takes no further trees"):
        check_takes(lambda params, apply_fn, batch: 0, LOSS_FN_WITHOUT_KEY, {}, {"batch": 2})
    check_takes(lambda params, apply_fn, batch, **trees: 0, LOSS_FN_WITHOUT_KEY, {}, {"any": 2})
    seen = without_key(lambda *args, **trees: (args, trees))(1, 2, 3, "rng", "collections", teacher=4)
    assert seen == ((1, 2, 3, "collections"), {"teacher": 4})
    assert LOSS_FN.call_text() == "loss_fn(params, apply_fn, batch, rng)" and "batch, x)" in EVAL_FN.call_text("x")
