"""What is wrong with an argument is said in words that name argument, leaf, rule and cure; and what is right passes."""

import dataclasses
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

from tests.support import AXES, assert_same_params, data, fsdp, mean_loss, mesh_of, on_mesh
from xlstm_jax.distributed import (
    DeviceMeshManager,
    Replicas,
    accumulate_gradients,
    clip_by_global_norm,
    create_train_state,
    elementwise_only,
    init_sharded,
    make_eval_step,
    make_train_step,
    shard_module_params,
    skip_nonfinite,
    sync_gradients,
    unbox,
)
from xlstm_jax.distributed.metrics import WeightedMean
from xlstm_jax.distributed.plan.planning import plan_sharding
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
    """For what is traced or refused, and so not donated."""
    return new_state()


def trace(state=None, batch=BATCH, rng=KEY, *local, loss=mean_loss, mesh=MESH, **options):
    return make_train_step(loss, mesh, AXES, **options).trace(state or kept_state(), batch, rng, *local)


# ------------------------------------------------------------------------------------------------ a state and its mesh


@pytest.mark.parametrize("leaf", ["state/params/bias", "state/opt_state/0/count", "state/step", "rng"])
def test_a_state_on_another_mesh_than_the_step_is_refused_before_xla_sees_it(leaf):
    """XLA ends the process where the state's buffers are to be donated to a program for another mesh."""
    here, there = kept_state(), new_state(mesh_of(4, 2))
    rng = jax.device_put(KEY, jax.NamedSharding(mesh_of(4, 2), P())) if leaf == "rng" else KEY
    name = leaf.split("/")[1] if "/" in leaf else ""
    state = here.replace(**{name: getattr(there, name)}) if name else here
    rule = (
        rf"'{leaf}.*' lies on a mesh \{{'dp': 4, 'fsdp': 2\}}, and the step was made for a mesh \{{'dp': 2, 'fsdp': 4"
    )
    for take in ("trace", "lower", "__call__"):
        with pytest.raises(ValueError, match=rule + ".*restore into abstract_train_state"):
            getattr(make_train_step(mean_loss, MESH, AXES), take)(state, BATCH, rng)


def test_meshes_that_split_alike_are_one_and_a_batch_may_lie_on_any():
    only = DeviceMeshManager.create_device_mesh({"fsdp": 8})
    batches = [BATCH] + [DeviceMeshManager.shard_batch(BATCH, m, m.axis_names) for m in (mesh_of(4, 2), only)]
    state = create_train_state(MODEL, optax.sgd(0.1), only, KEY, BATCH["x"], batch_axes="fsdp")
    losses = [make_train_step(mean_loss, mesh_of(1, 8), AXES)(state, BATCH, KEY)[1]["loss"]]
    losses += [make_train_step(mean_loss, MESH, AXES)(new_state(), batch, KEY)[1]["loss"] for batch in batches]
    assert_allclose(losses, [losses[0]] * 4, rtol=1e-5)


@pytest.mark.parametrize("move, devices", [
    (lambda state: jax.device_put(jax.device_get(state), jax.devices()[0]), r"\[0\]"),
    (lambda state: new_state(DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4}, jax.devices()[::-1])), r"\[7,"),
], ids=["one", "reversed"])  # fmt: skip
def test_a_state_on_other_devices_is_refused(move, devices):
    with pytest.raises(ValueError, match=rf"state\['step'\] lies on the devices {devices}.* has \[0, 1, .*one mesh"):
        make_train_step(mean_loss, MESH, AXES)(move(kept_state()), BATCH, KEY)


@pytest.mark.parametrize("of", ["all", "params", "local", "batch"])
def test_what_was_donated_is_not_used_again(of):
    """Some releases of JAX end the process there."""
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


def test_a_step_is_a_jitted_function_still():
    step = make_train_step(mean_loss, MESH, AXES)
    assert isinstance(step, jax.stages.Wrapped) and step.__name__ == "step" and step._cache_size() == 0
    state, _ = step(new_state(), BATCH, KEY)
    step(state, BATCH, KEY)
    assert step._cache_size() == 1
    assert jax.eval_shape(step, state, BATCH, KEY)[1]["loss"].shape == ()  # its arguments are tracers there
    step.clear_cache()
    assert step._cache_size() == 0


# ------------------------------------------------------------------------------------------------- arguments of a step


@dataclasses.dataclass
class PlainBatch:
    x: jax.Array


class Foreign:
    """An array of another library."""

    shape, dtype, __array__ = (16,), "torch.float32", None


def test_the_arguments_that_are_right_trace():
    """Guard of what follows."""
    trace()
    trace(rng=jax.random.PRNGKey(0))
    trace(batch=(BATCH["x"], {"t": 0.5}), loss=lambda p, f, b, r: jnp.mean(f({"params": p}, b[0])) * b[1]["t"])
    trace(batch=None, loss=lambda p, f, b, r: jnp.mean(f({"params": p}, jax.random.normal(r, (2, 8)))))


@pytest.mark.parametrize("batch, error, rule", [
    (PlainBatch(BATCH["x"]), TypeError, "batch is a PlainBatch, a dataclass .*register_dataclass"),
    ({"x": PlainBatch(1)}, TypeError, r"batch\['x'\] is a PlainBatch, a dataclass"),
    (BATCH | {"name": "train"}, TypeError, r"batch\['name'\] is 'train', not an array. Leave it out"),
    (BATCH | {"t": np.array(["a"] * 16)}, TypeError, r"batch\['t'\] is an array <U1\[16\], not of numbers"),
    (BATCH | {"t": Foreign()}, TypeError, r"batch\['t'\] is a Foreign of tests, .*np.asarray"),
    (BATCH | {"ids": [1] * 16}, ValueError, r"batch\['ids'\] is a list or tuple of 16 numbers.*np.asarray"),
    (BATCH | {"x": np.ones((16, 8)).tolist()}, ValueError, r"batch\['x/0'\] is a list or tuple of 8 numbers"),
    ((1, 2.0), ValueError, "batch is a list or tuple of 2 numbers"),
    (BATCH | {"y": jnp.ones((32, 4))}, ValueError,
        r"\['y'\] of shape \(32, 4\) holds 32 examples, but batch\['weight'\] of shape \(16,\) holds 16.*same exam"),
], ids=lambda x: None if isinstance(x, str | type) else type(x).__name__)  # fmt: skip
def test_a_batch_that_is_none(batch, error, rule):
    with pytest.raises(error, match=rule):
        trace(batch=batch)


def test_the_batch_of_a_device_is_looked_at_too():
    def local(x):
        return accumulate_gradients(lambda p, b, r: p * jnp.mean(b[0]), jnp.ones(()), (x, x[:1]), None, AXES)[0]

    with pytest.raises(ValueError, match=r"batch\['1'\] of shape \(1, 8\) holds 1 examples, but batch\['0'\]"):
        on_mesh(local, MESH, True, P(AXES), P())(BATCH["x"])


def test_a_nan_in_an_argument_is_named_where_jax_looks_for_one():
    """JAX itself ends in a ``RecursionError`` there."""
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


def test_a_nan_that_reaches_no_result_is_no_error():
    """As of labels that are missing, which the loss leaves out."""

    def labelled(params, apply_fn, batch, rng):
        y = jnp.where(jnp.isnan(batch["labels"]), 0, batch["labels"])
        return mean_loss(params, apply_fn, batch | {"y": y}, rng)

    labels = np.array(BATCH["y"])
    labels[5] = np.nan
    with jax.debug_nans(True):
        _, metrics = make_train_step(labelled, MESH, AXES)(kept_state(), BATCH | {"labels": labels}, KEY)
        assert np.isfinite(float(metrics["loss"]))


@pytest.mark.parametrize("rng, what", [
    (42, r"an array int32\[\]"), (None, "None"), (jax.random.split(KEY, 3), r"an array key<fry>\[3\]"),
    (jnp.ones(2), r"an array float32\[2\]"), (jnp.uint32(3), r"an array uint32\[\]"),
], ids=str)  # fmt: skip
def test_a_key_that_is_none(rng, what):
    with pytest.raises(TypeError, match=rf"rng is {what}, where step\(state, batch, rng\) takes a key: .*key\(seed\)"):
        trace(rng=rng)


@pytest.mark.parametrize("args, rule", [
    ((BATCH, "state", KEY), "its state is a dict of 'weight', 'x', 'y', not a TrainState.*has no 'step'"),
    (("state", KEY, BATCH), r"rng\['weight'\] is an array float32\[16\]"),
    ((("state", {}), BATCH, KEY), r"its state is a tuple of 2, .*state, metrics = step\(state, batch, rng\)"),
], ids=["batch first", "rng first", "a pair"])  # fmt: skip
def test_arguments_in_another_order(args, rule):
    args = jax.tree.map(lambda x: kept_state() if isinstance(x, str) else x, args)
    with pytest.raises(TypeError, match=rule):
        make_train_step(mean_loss, MESH, AXES).trace(*args)


def test_a_state_of_a_metric_without_one_and_the_reverse():
    with pytest.raises(ValueError, match="metric=None, and its step was given local=an array"):
        trace(None, BATCH, KEY, jnp.ones(8))
    with pytest.raises(ValueError, match=r"metric=WeightedMean.*was given local=None"):
        trace(metric=WeightedMean())


def test_the_state_of_another_optimizer():
    trace(kept_state().replace(tx=optax.adam(1e-3)))  # guard: an optimizer that keeps the same may go on
    for tx, rule in [(optax.sgd(0.1, momentum=0.9), r"its leaf '0/count' is of shape \(\), and tx.init makes none"),
                     (optax.adamw(1e-3), "its leaves are in another tree")]:  # fmt: skip
        with pytest.raises(ValueError, match=f"not a state of state.tx for state.params: {rule}"):
            trace(kept_state().replace(tx=tx))
    other = optax.adam(1e-2).init({"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)})
    with pytest.raises(ValueError, match=r"'0/mu/kernel' is of shape \(3, 4\), and tx.init makes of shape \(8, 4\)"):
        trace(kept_state().replace(opt_state=other))


def test_an_error_of_the_optimizer_itself_is_left_as_it_is():
    def update(*args, **extra):
        raise KeyError("mine")

    state = kept_state()
    with pytest.raises(KeyError, match="mine"):
        trace(state.replace(tx=optax.GradientTransformationExtraArgs(state.tx.init, update)))


# ---------------------------------------------------------------------------------------------------- losses and models


@pytest.mark.parametrize("out, options, rule", [
    (lambda loss: None, {}, "loss_fn returned None .*end with a return"),
    (lambda loss: loss + 1j, {}, "a loss of dtype complex64; only a real float"),
    (lambda loss: jnp.int32(loss), {}, "a loss of dtype int32; only a real float"),
    (lambda loss: loss[None], {}, r"loss_fn returned float32\[1\].* where a scalar loss is expected"),
    (lambda loss: loss, {"weighted": True}, r"must return \(sum, weight\), not an array float32\[\]"),
    (lambda loss: loss, {"has_aux": True}, r"must return \(loss, aux\), not an array float32\[\]"),
    (lambda loss: (loss, 1, 2), {"has_aux": True}, r"must return \(loss, aux\), not a tuple of 3"),
    (lambda loss: (loss, {}), {}, "A pair .loss, aux. needs has_aux=True"),
])  # fmt: skip
def test_what_a_loss_function_returns(out, options, rule):
    with pytest.raises(TypeError, match=rule):
        trace(loss=lambda *args: out(mean_loss(*args)), **options)


@pytest.mark.parametrize("loss_fn, rule", [
    (None, "not None; pass"), (MESH, r"not a Mesh; pass \(loss_fn, mesh, batch_axes\)"),
    (PLAIN, "not a Dense; write a function that calls apply_fn"), (nn.Dense, "not the class Dense"),
], ids=str)  # fmt: skip
def test_a_loss_function_that_is_none(loss_fn, rule):
    with pytest.raises(TypeError, match=rf"make_train_step takes first a function loss_fn\(.*{rule}"):
        make_train_step(loss_fn, MESH, AXES)


class OfNnx(nnx.Module):
    """A module of Flax's other kind."""


def test_what_create_train_state_takes():
    create = partial(create_train_state, batch_axes=AXES)
    for model, rule in [(nn.Dense, r"the class Dense; pass an instance of it, Dense\(...\)"),
                        (optax.sgd(1.0), r"a GradientTransformation\w*, which has no init and apply.*\(model, tx, me"),
                        (OfNnx(), r"an OfNnx of flax.nnx, .*; pass nnx_model\(make\)")]:  # fmt: skip
        with pytest.raises(TypeError, match=f"the model is {rule}"):
            create(model, optax.sgd(1.0), MESH, KEY, BATCH["x"])
        with pytest.raises(TypeError, match=f"the model is {rule}"):
            init_sharded(model, MESH, KEY, BATCH["x"], batch_axes=AXES)
    for rng in (0, None, {"params": 0}):
        with pytest.raises(TypeError, match=r"where model.init takes a key: pass jax.random.key"):
            create(PLAIN, optax.sgd(1.0), MESH, rng, BATCH["x"])


@pytest.mark.parametrize("take", [partial(create_train_state, PLAIN, mesh=MESH, rng=KEY, batch_axes=AXES),
                                  elementwise_only, skip_nonfinite], ids=["state", "guard", "skip"])  # fmt: skip
@pytest.mark.parametrize("tx, rule", [
    (None, "tx is None, .*optax.adamw"), (optax.adam, r"tx is the function adam, .*Call it: adam\(...\)"),
    (1e-3, "tx is 0.001"), (PLAIN, "tx is a Dense"), (optax.constant_schedule(1.0), "tx is the function"),
], ids=["none", "uncalled", "number", "model", "schedule"])  # fmt: skip
def test_an_optimizer_that_is_none(take, tx, rule):
    with pytest.raises(TypeError, match=rule):
        take(tx=tx)


# ---------------------------------------------------------------------------------------------------------- the wrapper


@pytest.mark.parametrize("target, rule", [
    (OfNnx, r"the class OfNnx of flax.nnx. Pass nnx_model\(.*\) to shard_modules"),
    (OfNnx(), "an OfNnx of flax.nnx"),
    (Foreign, "the class Foreign"), ({"kernel": 1}, "a dict of 'kernel'"), ("fsdp", "'fsdp'"),
], ids=["nnx", "nnx instance", "class", "dict", "swapped"])  # fmt: skip
def test_only_linen_modules_are_wrapped(target, rule):
    with pytest.raises(TypeError, match=rf"takes a Linen module, its class or a function of one, not {rule}"):
        shard_module_params(target, "fsdp")


@pytest.mark.parametrize("options, error, rule", [
    ({"gather_dtype": "bf16"}, TypeError, "gather_dtype='bf16' is no dtype; write gather_dtype='bfloat16' or jnp.bf"),
    ({"grad_scatter_dtype": "fp16"}, TypeError, "grad_scatter_dtype='fp16' is no dtype; .*='float16'"),
    ({"gather_dtype": nn.Dense}, TypeError, "gather_dtype=<class .* is no dtype"),
    ({"gather_dtype": "fp8"}, TypeError, "gather_dtype='fp8' is no dtype; write gather_dtype='float8_e4m3fn'"),
    ({"gather_dtype": jnp.int16}, ValueError, "gather_dtype=int16: parameters .* are floats.*'bfloat16', or 'int8', "),
    ({"grad_scatter_dtype": "int8"}, ValueError, "grad_scatter_dtype=int8: int8 travels in blocks .* cannot add up"),
    ({"grad_scatter_dtype": bool}, ValueError, "grad_scatter_dtype=bool: "),
    ({"min_weight_size": -1}, ValueError, "min_weight_size=-1 is negative; 0 splits every leaf"),
    ({"min_weight_size": float("nan")}, TypeError, "min_weight_size=nan is not a number of values; pass an int"),
    ({"min_weight_size": 2.0**18}, TypeError, "min_weight_size=262144.0 is not"),
    ({"min_weight_size": True}, TypeError, "min_weight_size=True is not"),
    ({"reshard_after_forward": "no"}, TypeError, "reshard_after_forward='no' is not True or False"),
], ids=str)  # fmt: skip
def test_options_of_the_wrapper(options, error, rule):
    with pytest.raises(error, match=rule):
        shard_module_params(nn.Dense, "fsdp", **options)


def test_the_dtype_of_copies():
    with pytest.raises(TypeError, match="reduce_dtype='bf16' is no dtype; write reduce_dtype='bfloat16'"):
        Replicas("dp", reduce_dtype="bf16")
    with pytest.raises(ValueError, match="reduce_dtype=uint8: "):
        Replicas("dp", reduce_dtype="uint8")


# ----------------------------------------------------------------------------------------------- numbers and averages


@pytest.mark.parametrize("bad", [-1.0, 0, float("nan"), np.float32(-1), jnp.float32(-1)], ids=str)
def test_clipping_to_a_norm_that_is_none_would_turn_gradients_round(bad):
    with pytest.raises(ValueError, match=r"max_norm=\S+; it must be more than 0. .*float\('inf'\)"):
        clip_by_global_norm(bad)


@pytest.mark.parametrize("bad", [None, "1", {"w": 1.0}, jnp.ones(2)], ids=str)
def test_clipping_to_what_is_no_number(bad):
    with pytest.raises(TypeError, match=r"clip_by_global_norm: max_norm is .* where one number is needed"):
        clip_by_global_norm(bad)


def test_a_norm_that_is_infinite_or_traced_clips():
    grads = jnp.array([3.0, 4.0])
    assert_allclose(clip_by_global_norm(float("inf")).update(grads, None)[0], grads)
    tx = optax.inject_hyperparams(clip_by_global_norm)(max_norm=optax.constant_schedule(1.0))
    assert_allclose(jax.jit(tx.update)(grads, tx.init(grads))[0], grads / 5, rtol=1e-6)


@pytest.mark.parametrize("tx, name", [
    (elementwise_only(optax.adam(1e-3)), "elementwise_only"), (skip_nonfinite(optax.adam(1e-3)), "skip_nonfinite"),
    (clip_by_global_norm(1.0), "global_norm"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
@pytest.mark.parametrize("over", [None, "fsdp", AXES], ids=str)
def test_a_gradient_that_was_not_averaged_is_named_where_an_optimizer_sees_it(over, tx, name):
    """Under ``check_vma=True``; a weight cast to varying has a gradient that JAX does not sum."""

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
    rule += f".*sync_gradients over {axes} is miss"
    with pytest.raises(ValueError, match=rule + ".*too few axes"):
        run(BATCH["x"])


def test_where_no_optimizer_of_ours_sees_it_jax_says_what_the_page_quotes():
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
def test_scalars_of_a_batch_are_given_to_every_device_and_minibatch(placed, count, check_vma):
    batch = BATCH | {"t": 0.5, "epoch": np.int32(3)}
    state = new_state(tx=optax.sgd(0.1))
    params = jax.device_get(unbox(state.params))
    want, grads = jax.value_and_grad(mean_loss)(params, PLAIN.apply, BATCH)
    given = DeviceMeshManager.shard_batch(batch, MESH, AXES) if placed else batch
    state, metrics = make_train_step(scaled_loss, MESH, AXES, count, check_vma=check_vma)(state, given, KEY)
    assert_allclose(metrics["loss"], want * 0.5 + 3, rtol=1e-5)
    assert_same_params(state.params, jax.tree.map(lambda p, g: p - 0.1 * 0.5 * g, params, grads))


def test_a_step_with_scalars_is_forecast_and_linted():
    batch = BATCH | {"t": 0.5, "epoch": np.int32(3)}
    training = Workload(MODEL, optax.sgd(0.1), batch, scaled_loss, inputs=(BATCH["x"],))
    step, args = training.build_step(MESH, num_minibatches=2)
    assert args[1]["t"].sharding.spec == P()
    found = forecast(step, *args)
    assert {c.kind for c in found.collectives} >= {"all-gather", "reduce-scatter"}
    assert not lint(found, plan_sharding(MODEL, MESH.shape, BATCH["x"]), num_minibatches=2)


STEP = make_train_step(mean_loss, MESH, AXES)
EVALUATION = make_eval_step(lambda params, apply_fn, batch: {"values": batch["x"]}, MESH, AXES, metric=WeightedMean())


@pytest.mark.parametrize("call, says", [
    (lambda state: STEP(state, BATCH), r"^step\(state, batch, rng\) was called without 'rng'. Pass a key"),
    (lambda state: STEP.lower(state), r"^step\(state, batch, rng\) was called without 'batch'"),
    (lambda state: STEP.eval_shape(state, BATCH), "was called without 'rng'"),
    (lambda state: STEP(state, BATCH, KEY, key=KEY), "^step.* has no argument 'key'"),
    (lambda state: STEP(state, BATCH, KEY, None, state), "^step.* was called with 5 arguments. .*others="),
    (lambda state: STEP(state, BATCH, KEY, rng=KEY), "^step.* was given 'rng' twice"),
    (lambda state: EVALUATION(state, BATCH), r"^step\(state, batch, local\) was called without 'local'.*metric.empty"),
    (lambda state: EVALUATION(state, BATCH, KEY), "its local is an array key<fry>.*metric.empty"),
])  # fmt: skip
def test_a_call_with_other_arguments_names_those_of_the_step(call, says):
    with pytest.raises(TypeError, match=says):
        call(kept_state())
