"""The decoder that is split over several axes: its logits are never whole, and small rows of it are built."""

import math

import pytest

from benchmarks import axes
from benchmarks.axes import SIZES, Cell, Row, build, considered
from tests.support import equations


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tp": 4}, {"fsdp": 4, "cp": 2}], ids=str)
def test_logits_of_256k_entries_are_never_whole(mesh):
    """No array of the step is as large as one device's logits would be, in any dtype."""
    row = Row("256k", 16_384, "h100:1x8", mesh, rows=mesh["fsdp"], ring=True)
    step, args = build(row)
    tokens = row.rows * row.context // math.prod(row.sizes[axis] for axis in row.token_axes)
    vocabulary = SIZES[row.size].vocab_size
    inside = [v.aval for name, eqn in equations(step.trace(*args).jaxpr) for v in eqn.outvars if "shard_map" in name]
    assert inside
    largest = max(value.size for value in inside if tokens in value.shape)
    assert largest < tokens * vocabulary / row.sizes["tp"] / 8


@pytest.mark.parametrize("size, limits", [("small", {"tp": 2, "cp": 2}), ("small mixture", {"ep": 4})], ids=str)
def test_meshes_of_a_small_model_are_estimated(size, limits):
    found = considered(Cell(size, 2048, 2048, limits), "h100:2x4", 0)
    assert len(found) == math.prod(limit.bit_length() for limit in limits.values())
    assert all(one.estimate for one in found), [str(one) for one in found]
    split = next(one for one in found if all(one.mesh[axis] > 1 for axis in limits))
    assert {axis for over in split.estimate.wire_s for axis in over} >= set(limits)


def test_what_is_kept_has_every_model_and_topology():
    kept = axes.json.loads((axes.OUT / "cells.json").read_text())
    assert {(name, topology) for name, found in kept.items() for topology in found} == {
        (cell.name, topology) for cell in axes.CELLS for topology in axes.TOPOLOGIES
    }
