"""A replayed step finds every flipped bit that changes loss or gradient, names the device, and keeps the state."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from tests import replay_trials
from tests.flipped_bits import ALWAYS, ONCE_FIRST, ONCE_SECOND, SITES, Faults, FaultyModel
from tests.ports import reserved_port
from tests.support import AXES, Model, bits_equal, fsdp, in_case, mean_loss, mesh_of, normal
from xlstm_jax.distributed import (
    LoopGuard,
    ReplayError,
    ReplicaError,
    TrainState,
    abstract_train_state,
    check_replicas,
    create_train_state,
    gather_params,
    make_eval_step,
    make_train_step,
    nnx_model,
    replayed,
    shard_modules,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.trees import path_string
from xlstm_jax.distributed.metrics import WeightedMean
from xlstm_jax.distributed.resilience import DisagreementError
from xlstm_jax.distributed.training.replay.replayed_step import ReplayedStep, rolled_mesh
from xlstm_jax.distributed.training.replay.watched_sends import watched
from xlstm_jax.distributed.training.step import DeviceProgram

DEVICES = 4
KEY = jax.random.key(3)


class NnxDense(nnx.Module):
    def __init__(self, faults, rngs):
        self.kernel = nnx.Param(rngs.params.normal((8, 16)))
        self.bias = nnx.Param(rngs.params.normal((16,)))
        self.faults = nnx.static(faults)

    def __call__(self, x):
        return self.faults.activation(jnp.tanh(x @ self.faults.weight(self.kernel[...]) + self.bias[...]))


class NnxModel(nnx.Module):
    def __init__(self, faults, rngs):
        self.first, self.second = NnxDense(faults, rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(self.first(x))


def faulty_step(faults):
    mesh = mesh_of(1, DEVICES)

    def loss(params, apply_fn, batch, rng):
        x = batch + 0.1 * jax.random.normal(rng, batch.shape)
        return jnp.mean(apply_fn({"params": params}, x) ** 2)

    x = normal(1, (16, 8))
    state = create_train_state(FaultyModel(faults), optax.adam(1e-2), mesh, KEY, x, batch_axes=AXES)
    return make_train_step(loss, mesh, AXES, check_vma=False), state, x


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def test_replayed_step_finds_each_effective_bit_flip_and_names_the_device():
    faults = Faults()
    plain, state, x = faulty_step(faults)
    step = replayed(plain, every=1)
    faults.watch(step)
    clean = step(copied(state), x, KEY)
    rng, found, exact, without_effect = np.random.default_rng(0), 0, 0, 0
    for trial in range(120):
        when, site = (ONCE_FIRST, ONCE_SECOND, ALWAYS)[trial % 3], SITES[trial // 3 % 4]
        device = int(rng.integers(DEVICES))
        faults.set(when, device, site, int(rng.integers(1024)), int(rng.integers(32)))
        given = copied(state)
        try:
            after = step(given, x, KEY)
        except ReplayError as error:
            found += 1
            exact += [suspect.id for suspect in error.devices] == [device]
            assert device in [suspect.id for suspect in error.devices], (when, site)
            assert when == ALWAYS or len(error.devices) == 1, (when, site)
            assert error.processes == [0] and all(path.startswith(("grads/", "loss")) for path in error.leaves)
            assert bits_equal(given, state)  # the state is alive, and unchanged
        else:
            without_effect += 1
            assert bits_equal(after, clean), (when, site)
    print(f"{found} found, {exact} with one device named, {without_effect} without effect")
    assert found >= 100 and exact >= found - 5
    faults.none()
    for trial in range(20):
        state, _ = step(state, x + trial, KEY)  # no alarm


@pytest.mark.parametrize("shape, axes", [((1, 4), AXES), ((2, 2), AXES), ((2, 4), ("dp",)), ((2, 4), AXES)], ids=str)
def test_second_run_has_another_device_in_each_place(shape, axes):
    """No two places have the same two devices in both runs: the place that differs names the device that is wrong.

    Devices move along the largest of the axes, so that the links of its rings stay in use; along an axis of two they
    would change places in pairs, and therefore move over all places.
    """
    mesh = mesh_of(*shape)
    rolled = rolled_mesh(mesh, axes)
    assert rolled.axis_names == mesh.axis_names and rolled.shape == mesh.shape
    # The ids of the devices in the first and in the second run, by place.
    places = list(zip(*(devices.device_ids.ravel().tolist() for devices in (mesh, rolled)), strict=True))
    assert {second for _, second in places} == {first for first, _ in places}
    assert not [first for first, second in places if first == second], f"the same device in both runs: {places}"
    assert len({frozenset(pair) for pair in places}) == len(places), f"two places have the same devices: {places}"
    if max(mesh.shape[axis] for axis in axes) > 2:  # along "fsdp", the second dim
        rings, rolled_rings = ([set(ids) for ids in devices.device_ids.tolist()] for devices in (mesh, rolled))
        assert rolled_rings == rings, "devices have left their ring"


def test_replayed_step_updates_as_the_plain_step_and_replays_every_kth_call():
    plain, state, x = faulty_step(Faults())
    step, other = replayed(plain, every=3), copied(state)
    for call in range(1, 7):
        (state, metrics), (other, wanted) = step(state, x, KEY), plain(other, x, KEY)
        assert step.replays == call // 3
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-6)
    wanted_leaves = jax.tree_util.tree_leaves_with_path(other.params)
    for (path, want), got in zip(wanted_leaves, jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=path_string(path))


def loss_without_key(params, apply_fn, batch):
    return jnp.mean(apply_fn({"params": params}, batch) ** 2)


@pytest.mark.parametrize("system", ["linen", "nnx"])
def test_steps_without_batch_axes_and_losses_without_a_key_are_replayed(system):
    faults, x, mesh = Faults(), normal(1, (16, 8)), mesh_of(2, 4)
    model = FaultyModel(faults)
    if system == "nnx":
        model = shard_modules(nnx_model(lambda rngs: NnxModel(faults, rngs)), (NnxDense, nnx.Linear), "fsdp", 64)
    state = create_train_state(model, optax.adam(1e-2), mesh, KEY, x)
    plain = make_train_step(loss_without_key, mesh, check_vma=False)
    step, other = replayed(plain, every=2), copied(state)
    assert step.replays == 0
    for call in range(1, 5):
        (state, metrics), (other, wanted) = step(state, x), plain(other, x)
        assert step.replays == call // 2
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-6)
    for got, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    faults.watch(step)
    faults.set(ALWAYS, 6, "cotangent", 3, 22)
    faults.devices = [0] * 8
    state, _ = step(state, x)
    with pytest.raises(ReplayError, match="device 6 of process 0 computed other bits") as raised:
        step(state, x)
    assert "grads/first/kernel" in {path.removesuffix("/value") for path in raised.value.leaves}


def test_replayed_step_without_batch_axes_updates_a_split_parameter_as_by_hand():
    mesh, x = mesh_of(1, 2), np.float32([[1, 2], [3, 6]])
    start = jax.device_put(np.float32([7, 8]), jax.NamedSharding(mesh, P("fsdp")))
    state = TrainState.create(apply_fn=None, params={"w": Sharded(start, ("fsdp",))}, tx=optax.sgd(0.5))

    def loss(params, apply_fn, batch):
        return jnp.mean(batch @ gather_params(params, "fsdp")["w"])

    step = replayed(make_train_step(loss, mesh), every=1)
    after, metrics = step(state, x)
    assert step.replays == 1 and float(metrics["loss"]) == (7 + 16 + 21 + 48) / 2
    assert after.params["w"].value.tolist() == [7 - 0.5 * 2, 8 - 0.5 * 4]
    with pytest.raises(ValueError, match="was handed to a step before"):
        step(state, x)


def test_replayed_step_runs_the_checks_of_each_call():
    mesh, x = mesh_of(2, 4), jnp.ones((16, 8))
    state = create_train_state(fsdp(nn.Dense)(8), optax.sgd(0.1), mesh, KEY, x)
    step = replayed(make_train_step(loss_without_key, mesh), every=1)
    with pytest.raises(TypeError, match=r"step\(state, batch\) was called without 'batch'"):
        step(state)
    step(state, x)
    with pytest.raises(ValueError, match="was handed to a step before"):
        step(state, x)


def test_replayed_step_under_explicit_axes_matches_the_plain_step():
    mesh, x = jax.make_mesh((2, 4), AXES), jnp.ones((16, 8))
    with jax.set_mesh(mesh):
        state = create_train_state(fsdp(nn.Dense)(8), optax.adam(1e-2), mesh, KEY, x)
        plain = make_train_step(loss_without_key, mesh)
        step, other = replayed(plain, every=2), copied(state)
        for _ in range(4):
            (state, _), (other, _) = step(state, x), plain(other, x)
    assert step.replays == 2
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert got.sharding == want.sharding
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_replay_programs_compile_all_products_of_the_step():
    plain, state, x = faulty_step(Faults())
    step = replayed(plain, every=1)
    args = state.replace(opt_state=()), x, KEY, None, {}
    texts = [run.jitted.lower(*run.on_this_mesh(args)).compile().as_text() for run in step.runs]
    products = [text.count(" dot(") for text in texts]
    assert products == [5, 5]  # two of the forward pass, two of the kernels' gradients, one of the activations


def test_replayed_step_warns_of_a_nondeterministic_program_without_an_error():
    mesh, x = mesh_of(1, DEVICES), jnp.ones((16, 8))

    def loss(params, apply_fn, batch, rng):
        noise = io_callback(lambda: np.float32(np.random.default_rng().normal()), jax.ShapeDtypeStruct((), jnp.float32))
        return jnp.mean((apply_fn({"params": params}, batch) - noise) ** 2)

    state = create_train_state(fsdp(nn.Dense)(8), optax.sgd(0.1), mesh, KEY, x, batch_axes=AXES)
    step = replayed(make_train_step(loss, mesh, AXES, check_vma=False), every=1)
    with pytest.warns(UserWarning, match="this backend does not repeat this program"):
        state, _ = step(state, x, KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = step(state, x, KEY)
    assert (int(state.step), step.replays) == (2, 1)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("options", [{}, {"remat": True}, {"scan": False}], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
def test_replayed_step_computes_a_digest_of_each_gradient_leaf_and_the_loss(check_vma, options, minibatches):
    mesh, batch = mesh_of(2, 4), {"x": jnp.ones((32, 8)), "y": jnp.ones((32, 4))}
    state = create_train_state(Model(fsdp, **options), optax.sgd(0.1), mesh, KEY, batch["x"], batch_axes=AXES)
    step = replayed(make_train_step(mean_loss, mesh, AXES, minibatches, check_vma=check_vma), every=1)
    leaves = digests_of(step, state, batch)
    paths = {"/".join(str(key.key) for key in path if hasattr(key, "key")) for path, _ in paths_of(state.params)}
    assert {path for of_send in leaves for path in of_send if not path.startswith("params/")} == {
        "loss",
        *(f"grads/{path}" for path in paths),
    }
    # Each gradient is looked at before it is reduced: by itself, and once, as the second axis sends what was received.
    assert sorted(path for of_send in leaves if of_send[0].startswith("grads/") for path in of_send) == sorted(
        f"grads/{path}" for path in paths
    )


def test_value_that_was_received_and_is_sent_on_has_no_digest():
    def fn(params, batch, *rest):
        of_rows = lax.psum(jnp.sum(params["w"] * batch), "fsdp")
        return {"loss": lax.psum(of_rows, "dp"), "again": lax.psum(of_rows + batch[0], "dp")}

    args, noted = ({"w": np.float32(2)}, np.ones(8, np.float32), None, None, {}, {}), []
    specs = (P(), P(AXES), P(), P(), P(), P())
    options = {"mesh": mesh_of(2, 4), "in_specs": specs, "out_specs": P(), "check_vma": False}
    program = watched(DeviceProgram(fn, args, options), AXES, noted.extend)
    jax.eval_shape(jax.shard_map(program.fn, **program.options), *args)
    assert noted == [["loss"], ["again"]]  # the sum over "fsdp", and the sum over "dp" of what was added here


def paths_of(params):
    return jax.tree_util.tree_flatten_with_path(params)[0]


def digests_of(step, state, batch):
    """The paths of each send, from a trace."""
    run = step.runs[0]
    run.jitted.eval_shape(state.replace(opt_state=()), batch, KEY, None, {})
    return run.leaves


def test_replayed_step_on_a_single_device_raises_for_a_differing_run():
    calls = []

    def second_is_wrong():
        calls.append(1)
        return np.float32(1 + (len(calls) == 2))

    def loss(params, apply_fn, batch, rng):
        scale = io_callback(
            lambda: np.float32(1 + (calls.append(1) or len(calls) == 2)), jax.ShapeDtypeStruct((), jnp.float32)
        )
        return jnp.mean((apply_fn({"params": params}, batch) * scale) ** 2)

    mesh, x = mesh_of(1, 1), jnp.ones((16, 8))
    state = create_train_state(fsdp(nn.Dense)(8), optax.sgd(0.1), mesh, KEY, x, batch_axes=AXES)
    with pytest.raises(ReplayError, match="of 1 devices, device 0 of process 0 computed other bits") as raised:
        replayed(make_train_step(loss, mesh, AXES, check_vma=False), every=1)(state, x, KEY)
    assert_a_report(raised.value)


def with_digests(digests, every=1):
    """Returns a replayed step whose runs return the given digests, and the list of what was called.

    The digests are of the first and the second run in turn. Instead of a step there is a function that only returns
    its arguments, and the update returns the state.
    """
    calls, mesh, returned = [], mesh_of(1, DEVICES), iter(digests)

    class StandIn:
        def __call__(self, *args):
            calls.append("plain")
            return args

        def eval_shape(self, *args):
            calls.append("traced")

        def checked_call(self, function, *args):
            calls.append("checked")
            return function(*args)

    class RunOf:
        def __init__(self, mesh):
            self.mesh, self.leaves = mesh, [["grads/kernel"]]

        def __call__(self, *args):
            calls.append("run" if jax.sharding.get_abstract_mesh().empty else "run under the set mesh")
            return "result", np.asarray(next(returned), np.uint32)

    step = ReplayedStep(StandIn(), mesh, every)
    step.runs = [RunOf(mesh), RunOf(rolled_mesh(mesh, AXES))]
    step._update = lambda state, result, *args: (state, result)
    return step, calls


STATE = SimpleNamespace(replace=lambda **fields: None)
RIGHT = np.zeros((DEVICES, 1, 2))


def test_every_kth_call_is_replayed_with_its_checks_and_outside_the_set_mesh():
    step, calls = with_digests([RIGHT] * 2, every=2)
    with jax.set_mesh(jax.make_mesh((1, DEVICES), AXES)):
        step(STATE, "batch")
        assert calls == ["plain"]
        assert step(STATE, "batch") == (STATE, "result")
    assert calls[1:] == ["traced", "checked", "run", "run"] and step.replays == 1


def test_digests_that_differ_on_a_device_raise_and_name_the_device():
    wrong = RIGHT.copy()
    wrong[2] = 1
    step, _ = with_digests([wrong, RIGHT, RIGHT, RIGHT])
    with pytest.raises(ReplayError, match="of 4 devices, device 2 of process 0 computed other bits"):
        step(STATE, "batch")


def test_digests_that_no_run_repeats_warn_and_end_the_replays():
    step, calls = with_digests(RIGHT + n for n in range(4))
    with pytest.warns(UserWarning, match="this backend does not repeat this program"):
        step(STATE, "batch")
    step(STATE, "batch")
    assert calls.count("run") == 4 and calls[-1] == "plain"


def test_digests_that_one_of_the_two_programs_repeats_raise():
    """The first program never repeats its bits and the second always: the program is not one that no run repeats."""
    step, _ = with_digests([RIGHT + 1, RIGHT, RIGHT + 2, RIGHT])
    with pytest.raises(ReplayError, match="of 4 devices"):
        step(STATE, "batch")


def test_runs_of_a_replay_donate_nothing():
    mesh, x = mesh_of(1, 2), jax.ShapeDtypeStruct((2, 4), jnp.float32)
    state = abstract_train_state(nn.Dense(2), optax.sgd(0.1), mesh, KEY, x, batch_axes=AXES, allow_replicated=True)
    step = replayed(make_train_step(loss_without_key, mesh, AXES, allow_replicated=True))
    traced = step.runs[0].jitted.trace(state.replace(opt_state=()), x, None, None, {})
    assert not any(leaf.donated for leaf in jax.tree.leaves(traced.args_info))


REPORT = r"(?P<found>[^']+): (?P<leaves>('[^']+'[^;]*; )*('[^']+'.*|\.\.\.))\. (?P<cure>[A-Z].+)\."


def assert_a_report(error):
    """The one report of devices that disagree: found, leaf by leaf, cure."""
    assert isinstance(error, DisagreementError)
    match = re.fullmatch(REPORT, str(error))
    assert match and [f"'{path}'" in match["leaves"] for path in error.leaves] == [True] * len(error.leaves), str(error)
    assert error.processes == [0] and error.devices


def test_check_replicas_raises_the_report_of_a_replay_and_loop_guard_passes_it_on():
    unequal = jax.shard_map(
        lambda: jax.lax.axis_index("dp"), mesh=mesh_of(2, 4), in_specs=(), out_specs=P(), check_vma=False
    )()
    with pytest.raises(ReplicaError) as raised, LoopGuard():
        check_replicas({"layer": {"w": unequal, "b": jnp.ones(3)}})
    assert_a_report(raised.value)
    assert raised.value.leaves == ["layer/w"]


def test_replayed_step_on_two_processes_names_the_faulty_device_on_both():
    port = str(reserved_port())
    command, root = [sys.executable, "-m", "tests.replay_process"], Path(__file__).parents[2]
    started = [
        subprocess.Popen([*command, str(rank), "2", port], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    ended = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    found = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    wrong = found[1]["own"][1]
    for of_process in found:
        assert (of_process["steps"], of_process["replays"]) == (3, 3)
        assert of_process["named"]["devices"] == [wrong] and of_process["named"]["processes"] == [1]
        assert set(of_process["named"]["leaves"]) == {"grads/kernel", "grads/bias", "loss"}


def test_replayed_raises_for_invalid_step_every_or_abstract_mesh():
    plain, *_ = faulty_step(Faults())
    with pytest.raises(TypeError, match="replayed takes a step of make_train_step"):
        replayed(jax.jit(lambda state, batch, rng: (state, {})))
    with pytest.raises(ValueError, match="every=0: a replay in every how many calls"):
        replayed(plain, every=0)
    for axes in (AXES, None):
        abstract = make_train_step(mean_loss, mesh_of(1, DEVICES).abstract_mesh, axes)
        with in_case(axes=axes), pytest.raises(ValueError, match="the mesh of the step is abstract"):
            replayed(abstract)
    of_state = make_train_step(mean_loss, mesh_of(1, DEVICES))
    with pytest.raises(ValueError, match="every=-1: a replay in every how many calls"):
        replayed(of_state, every=-1)
    evaluation = make_eval_step(lambda params, apply_fn, batch: {}, mesh_of(1, DEVICES), metric=WeightedMean())
    for other in (evaluation, replayed(of_state)):
        with in_case(other=other), pytest.raises(TypeError, match="replayed takes a step of make_train_step"):
            replayed(other)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", sorted(replay_trials.CASES))
def test_faults_of_other_kinds_are_found_and_the_device_is_named(model):
    """Stuck bits, scaled and lost entries, exchanged rows; in masks, collectives, collections and metrics, too."""
    found = replay_trials.trials(model, 9, seed=1)
    assert found["which"] == [] and found["found"] >= 7, found  # guard: a fault without effect is not found
