"""A replayed step finds every flipped bit that changes loss or gradient, names the device, and keeps the state."""

import json
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

from tests.support import AXES, Model, fsdp, mean_loss, mesh_of
from xlstm_jax.distributed import ReplayError, create_train_state, make_train_step, replayed
from xlstm_jax.distributed.data_parallel.trees import path_string
from xlstm_jax.distributed.resilience import DisagreementError

DEVICES = 4
KEY = jax.random.key(3)
SITES = ("activation", "weight", "cotangent", "gradient")
ONCE_FIRST, ONCE_SECOND, ALWAYS = "once in the first run", "once in the second run", "always"


class Faults:
    """Decides on the host, in each run of each device, whether a bit is flipped, and which.

    Runs alternate between the mesh and the mesh on which place p stands on the device of place p - 1.
    """

    def __init__(self):
        self.lock, self.calls = threading.Lock(), 0
        self.none()

    def none(self):
        self.when, self.device, self.fault = None, 0, (0, 0, 0)
        self.calls = 0

    def set(self, when, device, site, index, bit):
        self.calls, self.when, self.device, self.fault = 0, when, device, (SITES.index(site), index, bit)

    def __call__(self, place):
        with self.lock:
            run = self.calls // DEVICES
            self.calls += 1
        device = int(place) if run % 2 == 0 else (int(place) - 1) % DEVICES
        hit = self.when == ALWAYS or run == {ONCE_FIRST: 0, ONCE_SECOND: 1}.get(self.when)
        return np.array([hit and device == self.device, *self.fault], np.int32)


def flipped(x, fault, site):
    """The array with one bit flipped, if the fault is of this site."""
    active, at, index, bit = fault
    flat = jax.lax.bitcast_convert_type(x, jnp.uint32).ravel()
    mask = jnp.where((active == 1) & (at == SITES.index(site)), jnp.uint32(1) << bit.astype(jnp.uint32), 0)
    flat = flat.at[index % flat.size].set(flat[index % flat.size] ^ mask.astype(jnp.uint32))
    return jax.lax.bitcast_convert_type(flat.reshape(x.shape), x.dtype)


def make_site(forward, backward):
    """The identity, with a flip of its value and a flip of its cotangent."""

    @jax.custom_vjp
    def site(x, fault):
        return flipped(x, fault, forward)

    def fwd(x, fault):
        return site(x, fault), fault

    def bwd(fault, cotangent):
        return flipped(cotangent, fault, backward), np.zeros(fault.shape, jax.dtypes.float0)

    site.defvjp(fwd, bwd)
    return site


of_activation, of_weight = make_site("activation", "cotangent"), make_site("weight", "gradient")


class FaultyDense(nn.Module):
    @nn.compact
    def __call__(self, x, fault):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], 16))
        bias = self.param("bias", nn.initializers.zeros, (16,))
        return of_activation(jnp.tanh(x @ of_weight(kernel, fault) + bias), fault)


class FaultyModel(nn.Module):
    @nn.compact
    def __call__(self, x, fault=None):
        fault = jnp.zeros(4, jnp.int32) if fault is None else fault
        x = fsdp(FaultyDense, min_weight_size=64)(name="first")(x, fault)
        return fsdp(nn.Dense, min_weight_size=64)(8, name="second")(x)


def faulty_step(faults):
    mesh = mesh_of(1, DEVICES)

    def loss(params, apply_fn, batch, rng):
        fault = io_callback(faults, jax.ShapeDtypeStruct((4,), jnp.int32), jax.lax.axis_index("fsdp"))
        x = batch + 0.1 * jax.random.normal(rng, batch.shape)
        return jnp.mean(apply_fn({"params": params}, x, fault) ** 2)

    x = jax.random.normal(jax.random.key(1), (16, 8))
    state = create_train_state(FaultyModel(), optax.adam(1e-2), mesh, KEY, x, batch_axes=AXES)
    return make_train_step(loss, mesh, AXES, check_vma=False), state, x


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def bits_equal(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def test_replayed_step_finds_each_effective_bit_flip_and_names_the_device():
    faults = Faults()
    plain, state, x = faulty_step(faults)
    step = replayed(plain, every=1)
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


def test_replay_programs_compile_all_products_of_the_step():
    plain, state, x = faulty_step(Faults())
    step = replayed(plain, every=1)
    args = state.replace(opt_state=()), x, KEY, None, {}
    texts = [run.jitted.lower(*run.moved(args)).compile().as_text() for run in step.runs]
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
    assert isinstance(raised.value, DisagreementError)  # as a ReplicaError


def test_replayed_step_on_two_processes_names_the_faulty_device_on_both():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
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
    abstract = make_train_step(mean_loss, mesh_of(1, DEVICES).abstract_mesh, AXES)
    with pytest.raises(ValueError, match="the mesh of the step is abstract"):
        replayed(abstract)
