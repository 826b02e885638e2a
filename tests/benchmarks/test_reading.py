"""Tests of reading peers: options become numbers alike for every peer, and bytes equal an independent count."""

import math
import re
from collections import defaultdict

import jax
import pytest

from benchmarks import forecasts
from benchmarks.cases import CASES, SIZES, build, mesh_axes, options_of
from xlstm_jax.forecast import CompileError, forecast, parse_topology
from xlstm_jax.forecast.compiling.compile import StepCall, compile_here
from xlstm_jax.forecast.cost.flops import count_flops
from xlstm_jax.forecast.forecasting import read

PEERS = ("jit", "flat", "ours")  # jit with shardings, FSDP by hand, the library
BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}
# Bytes that each device sends in a ring of n, from the bytes of the result.
RING = {
    "all-gather": lambda size, n: size * (n - 1) / n,
    "reduce-scatter": lambda size, n: size * (n - 1),
    "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
    "all-to-all": lambda size, n: size * (n - 1) / n,
    "collective-permute": lambda size, n: size,
}
LINE = re.compile(rf"= (.*?) ({'|'.join(RING)})\(")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")
OF_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?: *\{(.*?)\})?")


def group_size(line):
    """Returns the number of devices of a collective's group, in each notation of XLA."""
    if found := LISTED.search(line):
        return len(found[1].split(","))
    if found := IOTA.search(line):
        return int(found[1])
    found = OF_MESH.search(line)
    sizes = dict(axis.split("=") for axis in found[1].split(","))
    axes = found[2].split(",") if found[2] else sizes  # without axes: the full mesh
    return math.prod(int(sizes[axis]) for axis in axes)


def counted(text):
    """Returns the bytes that a device sends, by kind, for a program without loops."""
    sent = dict.fromkeys(RING, 0.0)
    for found in filter(None, map(LINE.search, text.splitlines())):
        kind, arrays = found[2], ARRAY.findall(found[1])
        size = sum(BYTES[dtype] * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in arrays)
        sent[kind] += RING[kind](size, group_size(found.string))
    return {kind: size for kind, size in sent.items() if size}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("peer", PEERS)
def test_read_gives_collective_bytes_of_a_peer_equal_to_an_independent_count(peer):
    step, args = build(SIZES["small"], CASES[peer], (2, 4), jax.devices(), loop=True)
    compiled = compile_here(StepCall(step, args))
    found, want = read(compiled, count_flops(step.trace(*args).jaxpr)), counted(compiled.hlo)
    got: dict[str, float] = defaultdict(float)
    for collective in found.collectives:
        got[collective.kind] += collective.wire_bytes_per_step
    got = {kind: size for kind, size in got.items() if size}
    assert got == pytest.approx(want, rel=1e-9) and sum(want.values()) > 1e6
    mesh = mesh_axes(CASES[peer], (2, 4))
    assert found.axis_sizes == mesh and len(mesh) == (2 if peer == "ours" else 1)


def test_forecast_case_calls_forecast_with_the_same_options_for_every_peer(monkeypatch):
    asked = []

    def record(step, *args, **options):
        asked.append(options)
        raise CompileError("refused")

    assert forecasts.forecast is forecast
    monkeypatch.setattr(forecasts, "forecast", record)
    for peer in PEERS:
        row = forecasts.forecast_case(SIZES["small"], CASES[peer], "v5e:2x4")
        assert row.keys() == {"program", "problem"} and row["problem"] == "refused"
    assert asked == [asked[0]] * len(PEERS) and asked[0]["topology"] == "v5e:2x4"


def test_options_of_a_slice_are_equal_for_jit_and_library_cases():
    for topology in ("v5e:4x4", "v5e:16x16", "v6e:16x16"):
        place = parse_topology(topology)
        theirs, ours = (options_of(CASES[f"{peer}, options"], place) for peer in ("jit", "ours"))
        assert theirs == ours and ("xla_tpu_enable_async_all_to_all" in ours) == (topology != "v5e:16x16")
        assert options_of(CASES["jit"], place) is options_of(CASES["ours"], place) is None
        more = {"xla_tpu_scoped_vmem_limit_kib": 65536}
        assert options_of(CASES["jit, more VMEM"], place) == more
        assert options_of(CASES["ours, options, more VMEM, kernel"], place) == ours | more
