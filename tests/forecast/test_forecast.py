"""Forecasts against what really runs: on the simulated devices byte for byte, for TPUs by the compiler's own sums."""

import dataclasses
import json
import os
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from tests.hardware.test_chips import on_torus
from tests.support import mesh_of
from xlstm_jax.distributed import (
    DeviceMeshManager,
    bytes_per_device,
    create_train_state,
    make_train_step,
    shard_batch,
    shard_module_params,
)
from xlstm_jax.forecast import Collective, Forecast, Roofline, forecast
from xlstm_jax.forecast.compiling.compile import compile_for_topology
from xlstm_jax.forecast.cost.collective_traffic import Overlap
from xlstm_jax.forecast.cost.schedule import with_waits
from xlstm_jax.forecast.training import Workload

AXES = ("dp", "fsdp")
LAYERS, WIDTH, ROWS = 3, 64, 16


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(4 * x.shape[-1], name="up")(x)
        return x + nn.Dense(x.shape[-1], name="down")(nn.gelu(y)), None


class Model(nn.Module):
    """Scanned blocks under a head, all wrapped over "fsdp", or not at all."""

    sharded: bool = True
    width: int = WIDTH

    @nn.compact
    def __call__(self, x):
        wrap = partial(shard_module_params, axis_name="fsdp", min_weight_size=2**10)
        wrap = wrap if self.sharded else lambda module: module
        blocks = nn.scan(
            nn.remat(wrap(Block), prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = blocks(name="blocks")(x)
        return wrap(nn.Dense)(32, name="head")(x)


def loss_fn(params, apply_fn, x, rng):
    del rng
    return (apply_fn({"params": params}, x) ** 2).mean()


def workload(rows=ROWS, **options):
    model = Model(**options)
    return Workload(model, optax.adam(1e-3), jax.ShapeDtypeStruct((rows, model.width), jnp.float32), loss_fn)


def live(mesh, model):
    """The step with real arguments on real (simulated) devices."""
    x = shard_batch(np.zeros((ROWS, WIDTH), np.float32), mesh, AXES)
    where = {"batch_axes": AXES, "allow_replicated": True}
    state = create_train_state(model, optax.adam(1e-3), mesh, jax.random.key(0), x, **where)
    return make_train_step(loss_fn, mesh, AXES, allow_replicated=True), (state, x, jax.random.key(1))


@cache
def on_cpu(sharded=True):
    """The forecast for the simulated devices, of abstract arguments."""
    mesh = mesh_of(2, 4)
    step, args = workload(sharded=sharded).build_step(mesh)
    return forecast(step, *args, topology=mesh, tokens=ROWS)


# ----------------------------------------------------------------------------------------------------- devices at hand


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
def test_forecast_argument_bytes_equal_bytes_of_live_arrays(sharded):
    _, args = live(mesh_of(2, 4), Model(sharded))
    # The key is no argument of the program, as nothing in this model is random.
    assert on_cpu(sharded).memory.argument_bytes == sum(bytes_per_device(arg) for arg in args[:2])
    assert on_cpu(sharded).axis_sizes == {"dp": 2, "fsdp": 4} and on_cpu(sharded).topology is None


def test_forecast_of_abstract_arguments_equals_forecast_of_live_arrays():
    step, args = live(mesh_of(2, 4), Model())
    assert same(forecast(step, *args), on_cpu())


def test_forecast_on_cpu_leaves_out_temporaries_and_explains_the_reason(tmp_path):
    found = on_cpu()
    assert found.fits is None and found.memory.temporary_bytes == 0 and found.step_seconds is None
    text = rendered(found.table())
    assert "not to be trusted" in " ".join(text.split()) and "temporaries (" not in text
    assert "blocks/up/kernel" in text and "all-gather" in text
    found.plot(tmp_path / "forecast.png")  # it says that there are no figures
    assert (tmp_path / "forecast.png").read_bytes()[:4] == b"\x89PNG"


def test_forecast_lists_gathers_of_a_sharded_leaf_in_forward_and_recompute():
    gathers = [c for c in on_cpu().collectives if c.kind == "all-gather" and "blocks/up/kernel" in c.leaves]
    assert {c.direction: c.count for c in gathers} == {"forward": LAYERS, "recompute": LAYERS}
    assert {c.payload_bytes for c in gathers} == {WIDTH * 4 * WIDTH * 4}
    assert {c.axes for c in gathers} == {("fsdp",)}
    # Guard: the gathers are those of the wrappers.
    assert {c.kind for c in on_cpu(sharded=False).collectives} == {"all-reduce"}


def test_forecast_flops_by_direction_match_the_layer_formula():
    per_row = LAYERS * 2 * (WIDTH * 4 * WIDTH) + WIDTH * 32
    blocks, head = LAYERS * 2 * (WIDTH * 4 * WIDTH), WIDTH * 32
    rows = ROWS // 8
    by_direction = on_cpu().flops.by_direction()
    assert by_direction["forward"] == 2 * rows * per_row
    assert by_direction["recompute"] == 2 * rows * blocks / 2  # of the last product of a block only its operands
    # The first block needs no gradient of its input, but it is one of a scan, where all are alike.
    assert by_direction["backward"] == 2 * rows * (2 * blocks + 2 * head)


def test_forecast_json_round_trip_keeps_all_fields_and_raises_for_format_1():
    assert Forecast.from_json(on_cpu().to_json()) == on_cpu()
    older = json.loads(on_cpu().to_json())
    older["memory"]["arguments"] = [{"name": "state.params['up']", "bytes": 4}]  # of release 0.3.0
    assert Forecast.from_json(json.dumps(older)) == on_cpu()
    with pytest.raises(ValueError, match=r"no forecast of format 2; make it anew"):
        Forecast.from_json('{"format": 1}')


def test_forecast_field_names_are_unchanged_within_format_2():
    """A name that changes is a new format."""
    names = """platform device_kind topology axis_sizes memory code_bytes available_bytes collectives flops cycles
        hbm_bytes tokens unknown_loops compile_seconds versions notes shared_flops roofline exposed_seconds host
        kernel_seconds expected_kernel_seconds pallas_seconds fills rematerialized"""
    assert [field.name for field in dataclasses.fields(Forecast)] == names.split()


# -------------------------------------------------------------------------------------------------- steps of all kinds


def plain(params, batch, train=True, *, mode="train", extra=None, key=None, raw_key=None, rate=0.1):
    """A user's step: nothing of this library, and arguments of all kinds."""
    del extra

    def loss(params):
        x = batch["x"] * jax.random.bernoulli(key, 0.9) if key is not None else batch["x"]
        x = x + jax.random.normal(raw_key, (WIDTH,)) if raw_key is not None else x
        return (jnp.tanh(x @ params["up"]) @ params["down"]).mean()

    if not (train and mode == "train"):
        return params
    return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params))


def plain_args(mesh, sharded=True):
    def leaf(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)) if sharded else None)

    params = {"up": leaf((WIDTH, 4 * WIDTH), None, "fsdp"), "down": leaf((4 * WIDTH, WIDTH), "fsdp")}
    return params, {"x": leaf((ROWS, WIDTH), AXES)}


def plain_shardings(mesh):
    return jax.tree.map(lambda leaf: leaf.sharding, plain_args(mesh))


def same(one, other):
    return (one.collectives, one.flops, one.memory) == (other.collectives, other.flops, other.memory)


@pytest.mark.parametrize(
    "step, more, kwargs, idle",
    [
        (jax.jit(plain, static_argnums=2), (True,), None, (False,)),
        (jax.jit(plain, static_argnames=("train", "mode")), (), {"mode": "train"}, ()),
        (jax.jit(partial(plain, mode="train"), static_argnums=2), (), {"extra": None}, ()),
    ],
    ids=["by position", "by keyword", "partial"],
)
def test_forecast_is_the_same_for_static_arguments_by_position_keyword_or_partial(step, more, kwargs, idle):
    args = plain_args(mesh_of(2, 4))
    found = forecast(step, *args, *more, kwargs=kwargs)
    assert same(found, forecast(jax.jit(plain, static_argnums=2), *args)) and found.flops.total and found.collectives
    if idle:  # guard: the static argument decides
        assert not forecast(step, *args, *idle).flops.total


def test_forecast_reads_shardings_from_jit_in_shardings():
    mesh = mesh_of(2, 4)
    by_jit = jax.jit(plain, in_shardings=plain_shardings(mesh), out_shardings=plain_shardings(mesh)[0])
    found = forecast(by_jit, *plain_args(mesh, sharded=False), topology=mesh)
    by_leaf = forecast(jax.jit(plain, out_shardings=plain_shardings(mesh)[0]), *plain_args(mesh))
    assert same(found, by_leaf) and found.axis_sizes == {"dp": 2, "fsdp": 4} and found.collectives
    assert not unplaced_notes(found)


def unplaced_notes(found):
    return [note for note in found.notes if "has no sharding" in note]


@pytest.mark.parametrize("kind", [np.zeros, jnp.zeros, jax.ShapeDtypeStruct], ids=["numpy", "jax", "abstract"])
def test_forecast_notes_a_leaf_without_sharding_among_sharded_leaves(kind):
    params, batch = plain_args(mesh_of(2, 4))
    small = {"key": jax.random.key(0), "raw_key": jax.random.PRNGKey(0), "rate": 0.1}
    assert not unplaced_notes(forecast(jax.jit(plain), params, batch, kwargs=small))
    (note,) = unplaced_notes(forecast(jax.jit(plain), params, {"x": kind((ROWS, WIDTH), np.float32)}, kwargs=small))
    assert note.startswith("Argument 1/x has no sharding") and "abstract_batch and shard_batch" in note


def test_forecast_notes_only_arguments_without_sharding_in_jit_in_shardings():
    mesh = mesh_of(2, 4)
    places = plain_shardings(mesh)
    step = jax.jit(plain, in_shardings=(places[0], None), static_argnums=2)
    (note,) = unplaced_notes(forecast(step, *plain_args(mesh, sharded=False)))
    assert "Argument 1/x has" in note
    # On one device there is one place.
    assert not forecast(jax.jit(lambda x: x + 1), jnp.zeros((8, 8))).notes[1:]


# ------------------------------------------------------------------------------------------------------------- refusals


def test_forecast_raises_for_an_argument_on_another_mesh_than_jit_in_shardings():
    one, other = mesh_of(2, 4), mesh_of(4, 2)
    step = jax.jit(plain, in_shardings=(plain_shardings(one)[0], None))
    with pytest.raises(
        ValueError, match=r"argument 1/x lies on the mesh \{'dp': 4.*, but argument params\['down'\] on"
    ):
        forecast(step, plain_args(one, sharded=False)[0], plain_args(other)[1])


@pytest.mark.libtpu
@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.debug.print("{}", x.sum()),
        lambda x: jax.experimental.io_callback(np.asarray, jax.ShapeDtypeStruct((), x.dtype), x.sum()),
    ],
    ids=["debug.print", "io_callback"],
)
def test_forecast_for_a_topology_raises_for_python_callbacks(call):

    def step(params, batch):
        call(batch["x"])
        return plain(params, batch)

    args = plain_args(mesh_of(2, 4))
    with pytest.raises(
        ValueError, match=r"calls back into Python, by jax\.debug\.print.*Leave the call out of the step"
    ):
        forecast(jax.jit(step), *args, topology="v5e:2x4")


def test_workload_build_step_raises_for_a_batch_of_several_leaves_without_model_input():
    batch = {"tokens": jax.ShapeDtypeStruct((8, 4), jnp.int32), "weight": jax.ShapeDtypeStruct((8,), jnp.float32)}
    training = Workload(Model(), optax.adam(1e-3), batch, loss_fn)
    with pytest.raises(ValueError, match=r"leaves \['tokens', 'weight'\]: which of them does model.init take\?"):
        training.build_step({"fsdp": 8})
    assert training.tokens == 32


def test_workload_build_step_raises_for_a_batch_not_divisible_by_the_mesh():
    with pytest.raises(
        ValueError, match=r"batch\['.'\] of shape \(12, 64\) has 12 rows, which the 8 devices .* 16 rows"
    ):
        workload(rows=12).build_step({"fsdp": 8})


@pytest.mark.parametrize("shape", [{}, {"fsdp": 0}, {"fsdp": 2.0}], ids=str)
def test_create_abstract_mesh_raises_for_missing_zero_or_float_axis_sizes(shape):
    with pytest.raises(ValueError, match="name axes with positive sizes"):
        DeviceMeshManager.create_abstract_mesh(shape)


# --------------------------------------------------------------------------------------------- TPUs that are not there


@pytest.fixture(scope="module")
def on_v5e():
    """The sharded and the replicated model on eight chips."""
    pytest.importorskip("libtpu")
    found, environment = {}, dict(os.environ)
    for sharded in (True, False):
        training = workload(rows=64, sharded=sharded, width=512)
        step, args = training.build_step({"dp": 2, "fsdp": 4})
        found[sharded] = forecast(step, *args, topology="v5e:2x4", tokens=training.tokens)
    assert "libtpu.so" not in Path("/proc/self/maps").read_text()  # the child alone has loaded it
    assert dict(os.environ) == environment and jax.default_backend() == "cpu"
    return found


@pytest.mark.libtpu
def test_forecast_for_v5e_without_a_tpu_reports_memory_and_fit(on_v5e):
    sharded, replicated = on_v5e[True], on_v5e[False]
    assert sharded.device_kind == "TPU v5 lite" and sharded.fits and "libtpu" in sharded.versions
    assert sharded.available_bytes == 15.75 * 2**30
    # What is split lies in a quarter of the bytes; tiles of 8 x 128 make the small leaves larger than their values.
    weights = LAYERS * 2 * 512 * 2048 * 4 * 3
    assert replicated.memory.argument_bytes - sharded.memory.argument_bytes == pytest.approx(0.75 * weights, rel=0.02)
    assert sharded.memory.peak_live_bytes <= sharded.memory.temporary_bytes


@pytest.mark.libtpu
def test_forecast_memory_for_v5e_matches_compiler_memory_analysis(on_v5e):
    step, args = workload(rows=64, width=512).build_step({"dp": 2, "fsdp": 4})
    stats = compile_for_topology(step, *args, topology="v5e:2x4").memory
    memory = on_v5e[True].memory
    assert memory.argument_bytes == stats["argument"]
    assert memory.temporary_bytes <= stats["temp"]  # which counts them twice
    if stats["total_allocation"] is not None:
        assert memory.total_bytes == pytest.approx(stats["total_allocation"], rel=0.01)


@pytest.mark.libtpu
def test_forecast_for_v5e_maps_collectives_to_leaves_and_bounds_the_step_time(on_v5e):
    sharded, replicated = on_v5e[True], on_v5e[False]
    gathered = {leaf: c.count for c in sharded.collectives if c.direction == "forward" for leaf in c.leaves}
    assert gathered["blocks/up/kernel"] == gathered["blocks/down/kernel"] == LAYERS
    assert {c.kind for c in replicated.collectives} == {"all-reduce"}
    for found in (sharded, replicated):
        roofline = found.roofline
        assert roofline.compute_s > 0 and roofline.seconds <= found.step_seconds
        assert found.cycle_seconds > roofline.compute_s / 4 and found.roofline.ridge_tokens > 0
        assert 0 <= found.asynchronous_fraction <= 1 and not found.unknown_loops
    assert sharded.flops == replicated.flops


@pytest.mark.libtpu
def test_forecast_table_for_v5e_names_modules_and_plot_writes_a_png(on_v5e, tmp_path):
    text = " ".join(rendered(on_v5e[True].table()).split())
    for words in (
        "fits:",
        "blocks/up/kernel",
        "Largest temporaries",
        "the compiler's estimate",
        "tokens per device",
    ):
        assert words in text, words
    on_v5e[True].plot(tmp_path / "forecast.png")
    assert (tmp_path / "forecast.png").stat().st_size > 10_000
    assert Forecast.from_json(on_v5e[True].to_json()) == on_v5e[True]


@pytest.mark.libtpu
def test_forecast_of_a_step_beyond_hbm_reports_does_not_fit_with_temporaries():
    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": 4})
    place = NamedSharding(mesh, P())
    w = jax.ShapeDtypeStruct((24, 8192, 8192), jnp.float32, sharding=place)  # 6 GiB, and as much of gradients
    x = jax.ShapeDtypeStruct((64, 8192), jnp.float32, sharding=place)

    def loss(w, x):
        with jax.named_scope("tower"):
            return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)[0].sum()

    step = jax.jit(lambda w, x: (w - jax.grad(loss)(w, x), w))
    found = forecast(step, w, x, topology="v5e:2x2")
    assert found.fits is False and found.total_bytes > 15.75 * 2**30
    assert sum(t.bytes for t in found.memory.temporaries) == found.memory.peak_live_bytes
    assert "DOES NOT FIT" in rendered(found.table()) and "DOES NOT FIT" in str(found)


@pytest.mark.libtpu
def test_forecast_for_a_topology_accepts_static_donated_key_and_numpy_arguments():
    step = jax.jit(plain, static_argnums=2, static_argnames="mode", donate_argnums=0)
    params, batch = plain_args(mesh_of(2, 4))
    keys = {"key": jax.random.key(0), "raw_key": jax.random.PRNGKey(0)}
    kwargs = {"mode": "train", "extra": None, "rate": 0.1} | keys
    args = params, batch | {"weight": np.zeros(ROWS, np.float32)}, True
    here, there = (forecast(step, *args, kwargs=kwargs, topology=topology) for topology in (None, "v5e:2x4"))
    assert there.flops == here.flops and there.axis_sizes == here.axis_sizes
    # The two donated matrices and no other argument; a TPU pads rows to 128 values.
    assert here.memory.alias_bytes == 2 * WIDTH * WIDTH * 4
    assert there.memory.alias_bytes == 2 * WIDTH * 128 * 4
    assert [note[:23] for note in unplaced_notes(there)] == ["Argument 1/weight has n"]


@pytest.mark.libtpu
def test_forecast_reads_jit_in_shardings_on_explicit_mesh_axes():
    mesh = jax.sharding.AbstractMesh((2, 4), AXES, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    places = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXES))
    step = jax.jit(lambda w, x: jnp.tanh(x @ w).sum(), in_shardings=places)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 128), (64, 256))]
    found = forecast(step, *shapes, topology="v5e:2x4")
    assert found.axis_sizes == {"dp": 2, "fsdp": 4} and [c.axes for c in found.collectives] == [AXES]
    assert found.memory.argument_bytes == 256 * 128 * 4 + 64 * 256 * 4 // 8  # the rows are split


@pytest.mark.libtpu
def test_compile_for_topology_raises_for_a_compilation_beyond_timeout_s():
    step, args = workload().build_step({"fsdp": 4})
    with pytest.raises(TimeoutError, match=r"longer than timeout_s=0.*Scan the layers"):
        compile_for_topology(step, *args, topology="v5e:2x2", timeout_s=0.3)


# ----------------------------------------------------------------------------------------------------- times by hand


def collective(*, seconds, axes=("x",), count=1, cycles=None, asynchronous=False):
    """A gather that takes so many seconds alone, on a dim of v5e that is a ring: 9e10 bytes/s."""
    overlapped = Overlap(("up",), 1, cycles) if asynchronous else Overlap((), 0, None)
    return Collective(
        name="g", kind="all-gather", stands_for=None, count=count, dtype="bf16", payload_bytes=1, group_size=16,
        wire_bytes=9e10 * seconds, axes=axes, op_name="", modules=("up",), leaves=(), direction="forward",
        asynchronous=asynchronous, overlapped=overlapped,
    )  # fmt: skip


@pytest.mark.parametrize(
    "gather, exposed",
    [
        (collective(seconds=0.1, count=3), 0.1),
        (collective(seconds=0.1, axes=None), 0.05),  # unknown groups: over the links of both dims
        (collective(seconds=0.1, asynchronous=True, cycles=1.5e9 * 0.04), 0.06),  # 40 ms of it are covered
        (collective(seconds=0.1, asynchronous=True, cycles=1.5e9), 0.0),
        (collective(seconds=0.1, asynchronous=True), 0.0),  # no cycles are known of what runs beside
        (collective(seconds=0.1, asynchronous=True, cycles=0), 0.1),
    ],
    ids=["waited for", "unknown groups", "partly hidden", "hidden", "hidden by something", "beside nothing"],
)
def test_with_waits_counts_only_collective_time_not_hidden_by_other_work(gather, exposed):
    links = on_torus("v5e:16x16", {"x": 16}, {"y": 16})
    assert with_waits(links, gather).exposed_s == pytest.approx(exposed)


def test_forecast_step_seconds_add_compute_and_exposed_time_with_links_as_lower_bound():
    roofline = Roofline(compute_s=0.2, memory_s=0.1, wire_s=0.3, flops=1.0, hbm_bytes=1.0, wire_bytes=1.0)
    known = {"topology": "v5e:16x16", "roofline": roofline, "cycles": int(0.4 * 1.5e9), "platform": "tpu"}
    found = dataclasses.replace(on_cpu(), **known, exposed_seconds=0.05)
    assert found.cycle_seconds == pytest.approx(0.4) and found.step_seconds == pytest.approx(0.45)
    assert found.step_time == pytest.approx((0.3, 0.45, 0.45))  # at least what the links take
    assert json.loads(found.to_json())["step_time"] == found.step_time._asdict()
    # Where compute by its peak rate takes longer than the cycles say, it counts; and links have the last word.
    assert dataclasses.replace(found, cycles=None).step_seconds == pytest.approx(0.3)
    slow = dataclasses.replace(roofline, compute_s=0.6)
    assert dataclasses.replace(found, roofline=slow).step_seconds == pytest.approx(0.65)


def rendered(renderable):
    console = Console(width=160, record=True, file=open(os.devnull, "w"))
    with console.file:
        console.print(renderable)
        return console.export_text()
