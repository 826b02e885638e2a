"""Tests of the decoder split over several axes: no device has unsharded logits, and small cases build."""

import math

import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import axes, maxtext_layout
from benchmarks.axes import SIZES, Cell, Row, build, considered
from tests.support import equations

SIDES = "ours", "jit"


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tp": 4}, {"fsdp": 4, "cp": 2}], ids=str)
def test_no_array_of_a_256k_vocabulary_step_is_as_large_as_unsharded_logits(mesh):
    """No array of the step, in any dtype, is as large as a device's unsharded logits."""
    row = Row("256k", 16_384, "h100:1x8", mesh, rows=mesh["fsdp"], ring=True)
    step, args = build(row)
    tokens = row.rows * row.context // math.prod(row.sizes[axis] for axis in row.token_axes)
    vocabulary = SIZES[row.size].vocab_size
    inside = [v.aval for name, eqn in equations(step.trace(*args).jaxpr) for v in eqn.outvars if "shard_map" in name]
    assert inside
    largest = max(value.size for value in inside if tokens in value.shape)
    assert largest < tokens * vocabulary / row.sizes["tp"] / 8


@pytest.mark.parametrize("size, limits", [("small", {"tp": 2, "cp": 2}), ("small mixture", {"ep": 4})], ids=str)
def test_considered_estimates_every_mesh_of_a_small_model(size, limits):
    found = considered(Cell(size, 2048, 2048, limits), "h100:2x4", 0)
    assert len(found) == math.prod(limit.bit_length() for limit in limits.values())
    assert all(one.estimate for one in found), [str(one) for one in found]
    split = next(one for one in found if all(one.mesh[axis] > 1 for axis in limits))
    assert {axis for over in split.estimate.wire_s for axis in over} >= set(limits)


def test_stored_cells_json_has_every_model_and_topology():
    kept = axes.json.loads((axes.OUT / "cells.json").read_text())
    assert {(name, topology) for name, found in kept.items() for topology in found} == {
        (cell.name, topology) for cell in axes.CELLS for topology in axes.TOPOLOGIES
    }


def test_stored_targets_json_has_a_row_for_each_target():
    kept = [(one["name"], one["topology"]) for one in axes.json.loads((axes.OUT / "targets.json").read_text())]
    assert kept == [(row.name, row.topology) for row in axes.TARGETS]


def test_stored_estimates_are_within_a_fifth_of_compiled_steps():
    """Estimates of bytes and seconds are within a fifth of a compiled step, for at least one cell of every model.

    The estimate ignores the schedule for bytes, and any overlap for seconds.
    """
    kept = axes.json.loads((axes.OUT / "cells.json").read_text())
    best = {(name, place): found["best"][0] for name, of_model in kept.items() for place, found in of_model.items()}
    compiled = {key: one for key, one in best.items() if "bytes" in one.get("forecast", {})}
    assert {name for name, _ in compiled} == {cell.name for cell in axes.CELLS}
    for key, one in compiled.items():
        guess, made = one["estimate"], one["forecast"]
        assert guess["argument_bytes"] + guess["live_bytes"] == pytest.approx(made["bytes"], rel=0.2), key
        assert guess["compute_s"] + sum(guess["wire_s"].values()) == pytest.approx(made["step_s"], rel=0.2), key


def test_stated_step_time_and_flops_of_a_mixture_over_jit_match_stored_results():
    """Recorded results agree with the changelog (step time beside ``jit``) and the page (share of masked products)."""
    kept = axes.json.loads(maxtext_layout.KEPT.read_text())
    ours, jit = (min((one for one in kept if one["side"] == side), key=lambda one: one["step_s"]) for side in SIDES)
    assert ours["step_s"] / jit["step_s"] == pytest.approx(0.77, abs=0.005)
    assert 1 - ours["flops"] / jit["flops"] == pytest.approx(1 / 5, abs=0.02)


def test_jit_mixture_baseline_has_the_maxtext_parameter_layout():
    _, (state, batch) = maxtext_layout.build_jit({"fsdp": 8, "expert": 8})
    of_block = state.params["blocks"]
    assert of_block["experts"]["up"].sharding.spec == P(None, "expert", "fsdp", None)
    assert of_block["query"]["kernel"].sharding.spec == P(None, ("fsdp", "expert"), None, None)
    assert state.params["head"]["kernel"].sharding.shard_shape((4096, 32_000)) == (64, 32_000)
    assert batch.sharding.spec == P(("fsdp", "expert"))
