"""Options that hide collectives: accepted by the present compilers, each with an effect, by kind of chip."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.support import in_case
from xlstm_jax.accelerators import TPUS, compiler_options, resolved, slice_shape
from xlstm_jax.forecast import CHIPS
from xlstm_jax.forecast.compiling.compile_process import CHILD_ENVIRONMENT

ROOT = Path(__file__).parents[2]
LIMIT_S = 600  # for all programs of a topology, on a busy machine
ALL, NONE = "all", "none"

# Four scanned layers of FSDP over two mesh axes, by hand, the all-reduce of a whole weight's gradient, and two
# all-to-alls, each of which can run beside the other's products; compiled once for each set of options. It prints bytes
# on the wire by kind, and how many of them are asynchronous.
PROGRAM = """
import json, sys
from collections import defaultdict
import jax, jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from xlstm_jax.accelerators import compiler_options, slice_shape
from xlstm_jax.forecast.hlo.program import parse
from xlstm_jax.forecast.cost.collective_traffic import find_collectives
from xlstm_jax.distributed.device_mesh.topology import fsdp_layout

devices = topologies.get_topology_desc(sys.argv[1], "tpu").devices
array, axes = fsdp_layout(devices)
mesh = Mesh(array, axes, axis_types=(AxisType.Auto,) * len(axes))

@jax.custom_vjp
def gather(w):
    for axis in reversed(axes):
        w = lax.all_gather(w, axis, axis=0, tiled=True)
    return w

def scatter(_, ct):
    for axis in axes:
        ct = lax.psum_scatter(ct, axis, scatter_dimension=0, tiled=True)
    return (ct,)

gather.defvjp(lambda w: (gather(w), None), scatter)

def layer(x, w):
    w = gather(w)
    return x + jnp.sin(x @ w) @ w.T, None

def loss(params, x):
    x, _ = lax.scan(jax.checkpoint(layer, prevent_cse=False), x @ params[1], params[0])
    return jnp.mean(x.astype(jnp.float32) ** 2)

def exchanged(tokens):
    received = lax.all_to_all(tokens @ tokens, axes, 0, 0)
    return received @ received

def step(params, x, tokens):
    split, whole = jax.grad(loss)(params, x)
    return split, lax.psum(whole, axes), *map(exchanged, tokens)

def abstract(shape, spec):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

specs = (P(None, axes), P())
of_tokens = (P(axes), P(axes))
in_specs, out_specs = (specs, P(axes), of_tokens), (*specs, *of_tokens)
run = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
params = abstract((4, 256, 1024), specs[0]), abstract((256, 256), specs[1])
tokens = [abstract((mesh.size**2, 512, 512), P(axes))] * 2
lowered = jax.jit(run).lower(params, abstract((64 * mesh.size, 256), P(axes)), tuple(tokens))

def traffic(options):
    sums = defaultdict(lambda: [0, 0])
    for found in find_collectives(parse(lowered.compile(compiler_options=options).as_text()), dict(mesh.shape)):
        sums[found.kind][0] += found.wire_bytes_per_step
        sums[found.kind][1] += found.wire_bytes_per_step * found.asynchronous
    return sums

every = compiler_options(devices[0].device_kind, shape=slice_shape(devices[0]))
sets = {"none": {}, "all": every}
if sys.argv[2] == "each":
    sets |= {name: {other: value for other, value in every.items() if other != name} for name in every}
print(json.dumps({name: traffic(options) for name, options in sets.items()}))  # two at a time crash libtpu 0.0.42
"""


def traffic(topology, leave_out="none"):
    """For each set of options (none, all, all but the one that names it): {kind: (bytes, asynchronous bytes)}."""
    pytest.importorskip("libtpu")
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | CHILD_ENVIRONMENT
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, topology, leave_out],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=LIMIT_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def share(found, *kinds):
    """The asynchronous share of the bytes, of some kinds or all."""
    rows = [row for kind, row in found.items() if not kinds or kind in kinds]
    return sum(hidden for _, hidden in rows) / sum(sent for sent, _ in rows)


def all_become_asynchronous(found):
    assert share(found[ALL]) >= 0.99
    assert share(found[NONE]) <= 0.05  # guard: it is the options that do it


@pytest.mark.slow
@pytest.mark.libtpu
def test_compiler_options_on_v6e_make_all_collective_bytes_asynchronous():
    all_become_asynchronous(traffic("v6e:2x4"))


@pytest.mark.slow
@pytest.mark.libtpu
def test_compiler_options_on_v5p_each_make_a_single_collective_kind_asynchronous():
    found = traffic("v5p:2x2x1", "each")
    all_become_asynchronous(found)
    kinds = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
    assert len(found) == 2 + len(kinds), "an option that is not tested"
    for kind in kinds:
        (without,) = (one for name, one in found.items() if name.endswith(kind.replace("-", "_")))
        assert {name: share(without, name) for name in kinds} == dict.fromkeys(kinds, 1) | {kind: 0}


@pytest.mark.libtpu
def test_compiler_options_on_v5e_make_gathers_in_a_loop_and_all_to_alls_asynchronous():
    found = traffic("v5e:2x4")
    assert share(found[ALL], "all-gather") >= 0.7 > 0.1 >= share(found[NONE], "all-gather")
    assert share(found[ALL], "all-to-all") == 1 > 0 == share(found[NONE], "all-to-all")
    assert len(compiler_options("TPU v5 lite", shape=(2, 4))) == 2, "an option that is not tested"


# --------------------------------------------------------------------------------------------------------------- kinds


LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"


@pytest.mark.parametrize("pipelined", [True, False])
def test_gpu_options_by_default_are_the_measured_four_at_once_without_pipelining(pipelined):
    assert compiler_options("NVIDIA GB200", pipelined=pipelined) == {LIMIT: 4}
    assert resolved("auto", "NVIDIA GB200") == {LIMIT: 4}
    ours = resolved("forecast", "NVIDIA GB200")
    assert ours == compiler_options("NVIDIA GB200", chosen_by="forecast") and ours[LIMIT] == 8 and len(ours) == 2
    assert resolved("forecast", "TPU v6 lite", (4, 4)) == resolved("auto", "TPU v6 lite", (4, 4))


def test_xla_accepts_gpu_compiler_options_and_raises_for_wrong_names_or_values():
    """XLA refuses a name, or a value, that it does not know, also on a CPU, where these have no effect."""
    options = compiler_options("NVIDIA H100 80GB HBM3", chosen_by="forecast")
    assert jax.jit(lambda x: x + 1, compiler_options=options)(jnp.ones(())) == 2
    for wrong in ({"xla_gpu_enable_pipelined_everything": True}, dict.fromkeys(options, "sideways")):
        with in_case(wrong=wrong), pytest.raises(Exception, match=r"No such compile option|is not a valid"):
            jax.jit(lambda x: x + 1, compiler_options=wrong)(jnp.ones(()))


def test_compiler_options_are_equal_for_all_device_kinds_of_a_chip_and_empty_for_cpu():
    by_chip = {}
    for chip in CHIPS.values():
        for kind in chip.device_kinds:
            by_chip.setdefault(chip.name, {})[kind] = compiler_options(kind) if chip.name != "v4" else None
    answers = {name: next(iter(by_kind.values())) for name, by_kind in by_chip.items()}
    for name, by_kind in by_chip.items():
        assert by_kind == dict.fromkeys(by_kind, answers[name]), name
    assert answers["v5p"] == answers["v6e"] != answers["v5e"] != answers["h100"] == answers["h200"]
    assert compiler_options(jax.devices()[0].device_kind) == {}


def test_compiler_options_without_pipelining_leave_out_all_gather_pipelining():
    def left_out(kind):
        every, without = (compiler_options(kind, pipelined=some, chosen_by="forecast") for some in (True, False))
        return sorted(every.keys() - without.keys())

    assert ["all_gather" in name for name in left_out("NVIDIA H100 80GB HBM3")] == [True]
    assert left_out("TPU v5 lite") == ["xla_tpu_enable_ici_ag_pipelining"]
    assert left_out("TPU v5p") == []  # SparseCores run gathers by themselves


ALL_TO_ALL = "xla_tpu_enable_async_all_to_all"


def test_compiler_options_contain_only_options_listed_for_the_slice():
    def has_all_to_all(kind, shape):
        return ALL_TO_ALL in compiler_options(kind, shape=shape)

    assert has_all_to_all("TPU v5 lite", (4, 4)) and has_all_to_all("TPU v5 lite", (4, 2))
    assert not [shape for shape in [(4, 8), (8, 8), (8, 16), (16, 16)] if has_all_to_all("TPU v5 lite", shape)]
    assert not has_all_to_all("TPU v5 lite", None)  # a slice that nobody names may be one that refuses it
    assert has_all_to_all("TPU v6 lite", (16, 16)) and has_all_to_all("TPU v6 lite", None)
    assert compiler_options("TPU v6 lite", shape=(3, 5)) == {}  # nobody has compiled for it


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e"])
def test_xla_options_list_only_existing_slices(name):
    for slices in TPUS[name].xla_options.values():
        assert set(slices) <= set(TPUS[name].slices) and len(slices) == len(set(slices)) > 3


class Tpu:
    """A TPU among others, as JAX shows it."""

    device_kind, slice_index = "TPU v5 lite", 0

    def __init__(self, coords, client):
        self.coords, self.client = coords, client


def test_slice_shape_is_computed_from_coordinates_of_all_client_devices():
    others = []
    client = types.SimpleNamespace(devices=lambda: others)
    others += [Tpu((x, y, 0), client) for y in range(16) for x in range(8)]
    assert slice_shape(others[0]) == (8, 16) and slice_shape(jax.devices()[0]) is None
    del others[8:]
    assert slice_shape(others[0]) == (8, 1)  # guard: it is the coordinates that tell


def test_compiler_options_returns_a_fresh_dict_on_every_call():
    compiler_options("TPU v6 lite").clear()
    assert len(compiler_options("TPU v6 lite")) == 4
