"""What surrounds the steps of a training under ``jax.set_mesh``: a loop, replays, publications, functions of the host.

Each kind of mesh is set as a context and globally; the reference is the same program without a mesh that is set, or one
device.
"""

import contextlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

from tests.flipped_bits import ALWAYS, Faults, FaultyModel
from tests.mesh_types import HOW, MESHES, MODELS, TX, Linen, has_types_of, mesh_called, set_globally
from tests.support import AXES, assert_same_bits, bits, data, mean_loss, normal, train_on_one_device, unbox
from xlstm_jax.distributed import (
    LoopGuard,
    ReplayError,
    check_replicas,
    create_train_state,
    make_eval_step,
    make_train_step,
    replayed,
    shard_batch,
)
from xlstm_jax.distributed.checkpoint import Joined, Stored, apply_publication, import_in_layout, publish
from xlstm_jax.distributed.data_parallel.trees import path_string
from xlstm_jax.distributed.metrics import WeightedMean, make_log_step

KEY, STEPS = jax.random.key(0), 4
FIRST = [("explicit", "context"), ("explicit fsdp", "global")]
OTHERS = [("explicit dp", "context"), ("auto", "context"), ("explicit", "global"), ("explicit fsdp", "context")]
EACH_MESH = [*FIRST, *[pytest.param(*mesh, marks=pytest.mark.slow) for mesh in OTHERS]]


def batch():
    return jax.device_get(data())


# ---------------------------------------------------------------------------------------- a loop, replays, publications


def guarded(model, mesh, folder):
    """Trains with a guard and replays; publishes after each step, and follows the publication."""
    state = create_train_state(model, TX, mesh, KEY, batch()["x"])
    step = replayed(make_train_step(mean_loss, mesh), every=2)
    losses, arrays, version = [], {}, None
    with LoopGuard() as guard:
        for number in range(1, STEPS + 1):
            state, metrics = step(state, shard_batch(batch(), mesh, AXES), KEY)
            guard.step_done(number, metrics)
            assert not guard.should_stop(number)
            with guard.paused(timeout_s=60):
                check_replicas(state)
                version = publish(state.params, folder, since=version)
                _, arrays = apply_publication(arrays, folder)
            losses.append(float(metrics["loss"]))
    assert step.replays == STEPS // 2 and version == STEPS
    return state, losses, arrays


@pytest.mark.parametrize("name", ["linen", "nnx", pytest.param("padded", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind, how", EACH_MESH)
def test_guarded_loop_with_replays_and_publications_matches_a_single_device(kind, how, name, tmp_path):
    model, plain_model = MODELS[name]
    mesh = mesh_called(kind)
    with HOW[how](mesh):
        state, losses, arrays = guarded(model, mesh, tmp_path)
        assert has_types_of(kind, state)
    params = jax.jit(plain_model.init)(KEY, batch()["x"])["params"]
    want, _, wanted = train_on_one_device(plain_model, TX, params, mean_loss, data(), STEPS)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for path, value in jax.tree.leaves_with_path(jax.device_get(unbox(want))):
        np.testing.assert_allclose(arrays[path_string(path)], value, rtol=1e-5, atol=1e-6)
    assert abs(losses[0] - losses[-1]) > 1e-3 * losses[0]  # guard: the versions differ


@pytest.mark.parametrize("kind, how", EACH_MESH)
def test_publications_in_another_layout_are_followed_and_read_under_a_set_mesh(kind, how, tmp_path):
    """Stacked layers, transposed and joined for the reader; read back as arrays of the types of the parameters."""
    names = {r"blocks/(\w+)": Stored(r"layers.{layer}.\1", "i o -> o i"), r"(\w+)": r"\1"}
    layout = [Joined((r"(.+)\.query", r"\1.key"), r"\1.query_key")]
    mesh = mesh_called(kind)
    rng = np.random.default_rng(0)
    blocks = {part: rng.normal(size=(3, 8, 4)).astype(np.float32) for part in ("query", "key")}
    values = {"blocks": blocks, "embed": np.arange(32.0, dtype=np.float32).reshape(8, 4)}
    with HOW[how](mesh):
        specs = {"blocks": dict.fromkeys(blocks, jax.P(None, "fsdp", "dp")), "embed": jax.P(AXES)}
        params = jax.tree.map(lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)), values, specs)
        assert publish(params, tmp_path, names=names, layout=layout) == 1
        read = import_in_layout(tmp_path, params, layout, names=names)
        assert_same_bits(read, values)
        assert jax.tree.map(jax.typeof, read) == jax.tree.map(jax.typeof, params)
        halved = jax.tree.map(lambda x: x / 2, params)
        assert publish(halved, tmp_path, since=1, names=names, layout=layout) == 2
        version, arrays = apply_publication({}, tmp_path)
    assert version == 2 and arrays["layers.1.query_key"].shape == (8, 8)
    np.testing.assert_array_equal(arrays["layers.1.query_key"][:4], blocks["query"][1].T / 2)
    np.testing.assert_array_equal(arrays["embed"], values["embed"] / 2)


# --------------------------------------------------------------------------------------------------- a device that errs


@pytest.mark.parametrize("kind, how", EACH_MESH)
def test_replay_under_a_set_mesh_names_the_faulty_device_and_keeps_the_state(kind, how):
    def loss(params, apply_fn, batch, rng):
        return jnp.mean(apply_fn({"params": params}, batch + 0.1 * jax.random.normal(rng, batch.shape)) ** 2)

    mesh, faults = mesh_called(kind), Faults()
    with HOW[how](mesh):
        x = np.asarray(jax.device_get(normal(1, (16, 8))))
        state = create_train_state(FaultyModel(faults), optax.adam(1e-2), mesh, KEY, x)
        step = replayed(make_train_step(loss, mesh, check_vma=False), every=2)
        state, _ = step(state, x, KEY)
        faults.watch(step)
        faults.set(ALWAYS, 6, "cotangent", 3, 22)
        faults.devices = [0] * 8
        before = bits(state)
        with LoopGuard() as guard, pytest.raises(ReplayError, match="device 6 of process 0 computed other bits"):
            guard.step_done(1)
            step(state, x, KEY)
        assert_same_bits(state, before)  # alive, and unchanged
        faults.none()
        state, _ = step(state, x, KEY)
        assert int(state.step) == 2


# ------------------------------------------------------------------------------------------------ functions of the host

CALLBACKS = {
    "debug": lambda x, seen: jax.debug.callback(seen.append, x),
    "pure": lambda x, seen: jax.pure_callback(lambda x: np.float32(x), jax.ShapeDtypeStruct((), jnp.float32), x),
    "io": lambda x, seen: io_callback(
        lambda x: np.float32(seen.append(x) or x), jax.ShapeDtypeStruct((), jnp.float32), x
    ),
}


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("kind", ["explicit", "explicit fsdp", "auto"])
def test_loss_with_a_function_of_the_host_trains_and_evaluates_under_a_set_mesh(kind, name):
    def loss(params, apply_fn, batch):
        value = mean_loss(params, apply_fn, batch)
        measured = CALLBACKS[name](jax.lax.stop_gradient(value), seen)
        return value if measured is None else value + 0.5 * jax.lax.stop_gradient(measured)

    def errors(params, apply_fn, batch):
        return {"values": loss(params, apply_fn, batch)[None], "weight": jnp.ones(1)}

    seen, mesh, model, metric = [], mesh_called(kind), MODELS["linen"][0], WeightedMean()
    with jax.set_mesh(mesh):
        state = create_train_state(model, TX, mesh, KEY, batch()["x"])
        step, losses = make_train_step(loss, mesh), []
        value = make_eval_step(errors, mesh, metric=metric)(state, batch(), metric.empty(AXES, mesh))
        held_out = float(make_log_step(metric, mesh, AXES)(value)[0])
        for _ in range(3):
            state, metrics = step(state, batch())
            losses.append(float(metrics["loss"]))
        assert has_types_of(kind, state)
    assert step.jitted._cache_size() <= 2  # under the mesh, where JAX refuses, and outside of it
    params = jax.jit(Linen().init)(KEY, batch()["x"])["params"]
    _, _, wanted = train_on_one_device(Linen(), TX, params, mean_loss, data(), 3)
    factor = 1 if name == "debug" else 1.5
    np.testing.assert_allclose([held_out, *losses], np.multiply([wanted[0], *wanted], factor), rtol=1e-5)
    assert bool(seen) == (name != "pure")


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("where", ["loss", "program"])
@pytest.mark.parametrize("kind", ["explicit", "explicit fsdp", "auto"])
def test_function_of_the_host_in_a_program_around_the_step_trains_or_is_refused(kind, where, name):
    """JAX refuses callbacks that return values, if explicit axes and axes of type Auto are in one program."""
    seen, mesh = [], mesh_called(kind)

    def loss(params, apply_fn, batch):
        value = mean_loss(params, apply_fn, batch)
        measured = CALLBACKS[name](jax.lax.stop_gradient(value), seen) if where == "loss" else None
        return value if measured is None else value + 0 * jax.lax.stop_gradient(measured)

    with jax.set_mesh(mesh):
        state, step = create_train_state(MODELS["linen"][0], TX, mesh, KEY, batch()["x"]), make_train_step(loss, mesh)

        @jax.jit
        def program(state, batch):
            state, metrics = step(state, batch)
            measured = CALLBACKS[name](metrics["loss"], seen) if where == "program" else None
            return state, metrics["loss"] if measured is None else measured

        if name != "debug" and kind != "auto":
            ours = f"{name}_callback, and is called inside a jax.jit of yours .*Call the step outside of jax.jit"
            with pytest.raises(ValueError, match=ours if where == "loss" else "mesh should be the same"):
                program(state, batch())
            return
        losses = []
        for _ in range(2):
            state, loss_of_step = program(state, batch())
            losses.append(float(loss_of_step))
    params = jax.jit(Linen().init)(KEY, batch()["x"])["params"]
    np.testing.assert_allclose(losses, train_on_one_device(Linen(), TX, params, mean_loss, data(), 2)[2], rtol=1e-5)
    assert bool(seen) == (name != "pure")


# ------------------------------------------------------------------------------------------------- the page with a loop

PAGE = Path(__file__).parents[2] / "docs" / "examples" / "whole_loop.py"
MESH = 'mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})\n'


def of_page(kind, tmp_path):
    """Runs the program of docs/tutorials/whole_loop.md, one line of which is another; returns the rows of metrics."""
    program = PAGE.read_text().partition("# ---- Plot")[0]
    assert program.count(MESH) == 1 and program.count("STEPS, EVERY = 60, 20") == 1
    types = None if kind is None else MESHES[kind][2]
    if types is not None:
        program = program.replace(MESH, "mesh = jax.make_mesh((2, 4), ('dp', 'fsdp'), axis_types=types)\n")
    program = program.replace("STEPS, EVERY = 60, 20", "STEPS, EVERY = 24, 8").replace("sigterm_at=30", "sigterm_at=11")
    names = {"types": types, "__name__": "page"}
    with contextlib.redirect_stdout(None):
        if types is None:
            exec(program, names)
        else:
            # The mesh is set once it is made, for all that follows.
            first, after = program.split('AXES = ("dp", "fsdp")', 1)
            exec(first, names)
            with set_globally(names["mesh"]):
                exec('AXES = ("dp", "fsdp")' + after, names)
    rows, of_whole = names["rows"], names["of_whole"]
    assert rows == of_whole, "the run that was stopped and resumed has other metrics"
    leaves = zip(jax.tree.leaves(names["whole"]), jax.tree.leaves(names["continued"]), strict=True)
    assert all(np.array_equal(a, b) for a, b in leaves)
    return rows


@pytest.fixture(scope="module")
def rows_without_a_set_mesh(tmp_path_factory):
    return of_page(None, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    "kind", ["explicit", *[pytest.param(kind, marks=pytest.mark.slow) for kind in ("explicit fsdp", "auto")]]
)
def test_the_loop_of_the_tutorial_stops_resumes_and_evaluates_alike_under_a_set_mesh(
    kind, tmp_path, rows_without_a_set_mesh
):
    rows = of_page(kind, tmp_path)
    assert len(rows) == len(rows_without_a_set_mesh) == 3
    for row, want in zip(rows, rows_without_a_set_mesh, strict=True):
        flat, wanted = (jax.tree.leaves_with_path(json.loads(json.dumps(one))) for one in (row, want))
        for (path, value), (_, of_want) in zip(flat, wanted, strict=True):
            np.testing.assert_allclose(value, of_want, rtol=1e-5, err_msg=path_string(path))
