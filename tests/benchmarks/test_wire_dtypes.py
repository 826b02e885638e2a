"""Tests of the wire-dtype benchmark in small: its rings round as real rings, and the command writes its files."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import wire_dtypes
from benchmarks.ring_sums import KINDS, WIRE, bounds, gradients, reduced_mean, relative_error
from benchmarks.wire_dtypes import BFLOAT16_BITS, Training

TINY = dataclasses.replace(
    wire_dtypes.CONFIG, model="transformer", d_model=16, context=16, layers=1, batch_size=8, steps=3, min_weight_size=64
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", WIRE)
def test_reduction_errors_are_below_bounds_and_smaller_for_staged_reductions(kind, dtype):
    x = gradients(kind, 256)
    flat, staged = (relative_error(x, reduced_mean(x, dtype, shape)) for shape in ((256,), (16, 16)))
    assert 0 < staged < 0.5 * flat
    for shape, error in (((256,), flat), ((16, 16), staged)):
        worst, expected = bounds(x, dtype, shape)
        assert error < expected < worst


def test_simulated_sum_of_two_gradients_is_the_rounded_exact_sum():
    """Guard of the simulation: a float32 sum of two numbers is the rounded exact sum."""
    x = gradients("no signal", 2)
    for dtype in ("bfloat16", "float16"):
        narrow = (x / 2).astype(WIRE[dtype])
        exact = narrow.astype(np.float64).sum(axis=0).astype(narrow.dtype)
        np.testing.assert_array_equal(reduced_mean(x, dtype, (2,)), exact)


def test_float16_mean_overflows_only_with_division_after_the_sum():
    x = gradients("agreeing", 256, scale=1e3)
    assert relative_error(x, reduced_mean(x, "float16", (256,))) < 1e-2
    assert relative_error(x, reduced_mean(x, "float16", (256,), divide="after")) == np.inf


@pytest.mark.slow
def test_training_with_narrow_gradients_stays_near_float32_training_but_differs(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat. " * 400)
    config, mesh = dataclasses.replace(TINY, data=(str(path),)), {"fsdp": 8}
    runs = {
        name: list(wire_dtypes.train(config, Training(mesh, options, bits), seeds=(0, 1)))
        for name, options, bits in [
            ("float32", {}, BFLOAT16_BITS),  # a ring has nothing to narrow
            ("2 bits", {"grad_scatter_dtype": jnp.bfloat16}, 2),
        ]
    }
    rows = {row["training"]: row for row in wire_dtypes.compared(runs)}
    assert 0 < rows["2 bits"]["largest difference"] < rows["float32"]["spread of seeds"] + 0.1
    assert rows["float32"]["spread of seeds"] > 0  # guard: seeds do differ


def test_wire_dtypes_command_prints_tables_and_writes_json_and_picture(tmp_path, capsys):
    """The command writes tables, a file and a picture; its simulation is bit-equal to 8 simulated devices."""
    assert wire_dtypes.main(["--steps", "0", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "Mean over 256 devices" in out and "heavy tails" in out and "100.0%" in out
    found = json.loads((tmp_path / "wire_dtypes.json").read_text())
    assert len(found["agreement"]) == 7 and set(found["agreement"].values()) == {1.0}
    assert {"jax", "numpy", "ml_dtypes"} <= found["versions"].keys()
    assert (tmp_path / "wire_dtypes.png").read_bytes().startswith(b"\x89PNG")


def test_wire_dtypes_redraw_prints_and_draws_stored_results(tmp_path, capsys):
    kept = (wire_dtypes.OUT / "wire_dtypes.json").read_text()
    (tmp_path / "wire_dtypes.json").write_text(kept)
    assert wire_dtypes.main(["--redraw", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "held-out loss by gradients on the wire" in out and list(json.loads(kept)["runs"]) == list(
        wire_dtypes.trainings()
    )
    assert (tmp_path / "wire_dtypes.png").stat().st_size > 50_000
