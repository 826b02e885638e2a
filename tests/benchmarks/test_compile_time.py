"""Tests of the compile-time benchmark in small: the timed phases, and the printed table."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compile_time
from benchmarks.cases import SIZES, in_a_loop
from benchmarks.large_models import Size, language_model

SMALL = ["--size", "small", "--layers", "2", "--chips", "8", "--rounds", "2"]


def test_trace_seconds_traces_each_case_anew_in_every_round():
    traced = []

    def make():
        def step(x):
            traced.append("step")
            return x + 1

        return jax.jit(step), (jnp.zeros(3),)

    found = compile_time.trace_seconds({"one": make, "other": make}, rounds=3)
    assert len(traced) == 2 * (3 + 1)  # the first turn warms up
    for name, seconds in found.items():
        assert seconds.shape == (3,) and (seconds > 0).all(), name


def test_layers_in_a_python_loop_compute_the_same_as_the_scan():
    size = Size(16, 2, 2, 32)
    scanned = language_model(size, devices=1).model
    looped = in_a_loop(language_model(size, devices=1)).model
    tokens = jax.random.randint(jax.random.key(0), (1, 12), 0, 32)
    params = scanned.init(jax.random.key(1), tokens)["params"]
    stacked = params.pop("blocks")
    layers = {f"blocks_{i}": jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(2)}
    want = scanned.apply({"params": params | {"blocks": stacked}}, tokens)
    got = looped.apply({"params": params | layers}, tokens)
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)  # in bfloat16
    swapped = looped.apply({"params": params | dict(zip(layers, reversed(layers.values()), strict=True))}, tokens)
    assert not np.allclose(swapped, want, rtol=0.02, atol=0.02)  # guard: layers differ


def test_compile_time_plan_has_all_depths_on_few_chips_and_all_chips_at_middle_depth():
    points = compile_time.plan([4, 12, 24], [8, 64], loops=True)
    scans = [(p["layers"], p["chips"]) for p in points if not p["loop"]]
    assert scans == [(4, 8), (12, 8), (24, 8), (12, 64)]
    assert [(p["layers"], p["chips"]) for p in points if p["loop"]] == [(4, 8), (12, 8)]


def test_compile_time_command_without_compiling_writes_and_prints_trace_ratios(tmp_path, capsys):
    assert compile_time.main([*SMALL, "--cases", "--out", str(tmp_path)]) == 0
    assert "2 layers in a loop, 8 chips" in capsys.readouterr().out
    told = json.loads((tmp_path / "small.json").read_text())
    assert [row["loop"] for row in told["tracing"]] == [False, True] and told["compiling"] == []
    for row in told["tracing"]:
        assert row["ratio"] > 0  # a time: the aim is tested where nothing else runs


@pytest.mark.slow
@pytest.mark.libtpu
def test_compile_time_of_a_small_model_is_measured_and_drawn(tmp_path, capsys):
    found = {"tracing": [], "compiling": []}
    point = {"layers": 2, "chips": 8, "loop": False}
    found["compiling"] = [point | {"case": "ours"} | compile_time.compiling(SIZES["small"], 8, False, "ours")]
    found["tracing"] = [point | {"ratio": 1.1, "seconds": {compile_time.WRAPPED: 1.1, compile_time.PLAIN: 1.0}}]
    (row,) = found["compiling"]
    assert row["compile_seconds"] > row["trace_seconds"] > 0 and "libtpu" in row["versions"]
    compile_time.draw(tmp_path / "small.png", "small", found)
    assert (tmp_path / "small.png").stat().st_size > 10_000
