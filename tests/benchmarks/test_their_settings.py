"""Tests of the comparison in MaxText's settings: both sides train the model and the batch of the recipe."""

import dataclasses
import math

import jax
import pytest

from benchmarks import their_settings
from benchmarks.decoder import SIZES
from benchmarks.their_settings import KEPT, SETTINGS, SIDES, cells, main, ratio, step_of, stored
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.forecast import parse_topology

# A model whose leaves of 512 x 512 and more are split, as those of the 8B model are.
SMALL = dataclasses.replace(SIZES["decoder_small"], dim=1024, heads=8, vocab_size=2048, hidden=2048, tied=False)


def small(topology="v6e:2x4"):
    return dataclasses.replace(SETTINGS["v6e:16x16"], size=SMALL, topology=topology, rows=2, context=16)


def sharded_leaves(args):
    return {path: leaf_of(leaf).value.sharding.spec for path, leaf in leaves_with_path(args[0].params)}


def test_settings_are_those_of_the_recipe():
    for topology, run in SETTINGS.items():
        assert (run.size, run.rows, run.context, run.remat) == (SIZES["llama3.1_8B"], 4, 8192, "full")
        assert run.topology == topology and parse_topology(topology).num_devices in (64, 256)


def test_both_sides_have_the_same_batch_and_parameters_and_jit_splits_the_width():
    built = {side: step_of(small(), side)[1] for side in SIDES}
    batches = {side: jax.tree.leaves(args[1])[0].shape for side, args in built.items()}
    assert set(batches.values()) == {(2 * 8, 17)}
    shapes = [{path: leaf.shape for path, leaf in leaves_with_path(args[0].params)} for args in built.values()]
    assert shapes[0] == shapes[1]
    jit = sharded_leaves(built["jit"])
    for name, spec in (("gate", (None, "fsdp")), ("down", (None, None, "fsdp")), ("out", (None, None, None, "fsdp"))):
        assert tuple(jit[f"blocks/{name}/kernel"]) == spec, name  # the first dim is that of the scan
    ours = sharded_leaves(built["ours"])
    assert {axis for spec in ours.values() for entry in spec if entry for axis in entry} == {"fsdp_x", "fsdp_y"}


def test_both_sides_have_the_same_products_but_for_what_a_shard_computes():
    flops = {}
    for side in SIDES:
        step, args = step_of(small(), side)
        flops[side] = their_settings.count_flops(step.trace(*args).jaxpr, 8).total
    assert flops["ours"] == pytest.approx(flops["jit"], rel=1e-3)
    more = dataclasses.replace(small(), rows=4)
    step, args = step_of(more, "jit")  # guard: the count depends on the batch
    assert their_settings.count_flops(step.trace(*args).jaxpr, 8).total == pytest.approx(2 * flops["jit"], rel=0.01)


def test_table_has_published_time_both_sides_and_the_range_of_the_ratio():
    row = {"waited_range": {"expected": 0.1}, "collectives": 40, "wire_bytes": 3e9, "total_bytes": 2**30}
    row |= {"available_bytes": 2**31}
    rows = {
        "jit": row | {"step_range": {"least": 2.0, "expected": 4.0, "most": 5.0}},
        "ours": row | {"step_range": {"least": 2.2, "expected": 3.0, "most": 5.0}},
    }
    assert ratio(rows).lowest == 0.75 and ratio(rows).highest == pytest.approx(1.1)
    lines = cells("v6e:16x16", rows)
    assert [line[1] for line in lines] == ["published", "jit", "ours", "ours / jit"] and lines[0][3] == "4.546"
    assert cells("v5p:4x4x4", {})[0][3] == "not published" and ratio({}) is None
    assert cells("v5p:4x4x4", {})[1][3] == "not compiled yet"
    assert cells("v5p:4x4x4", {"jit": {"problem": "no memory"}})[1][3] == "no memory"


def test_stored_rows_are_of_the_settings_and_the_command_prints_them(capsys):
    kept = stored()
    assert KEPT.exists() and set(kept) <= set(SETTINGS)
    for sides in kept.values():
        for row in sides.values():
            assert "problem" in row or row["step_range"]["least"] < row["step_range"]["expected"]
            assert "problem" in row or math.isfinite(row["wire_bytes"])
    assert main(["--redraw"]) == 0
    assert "4.546" in capsys.readouterr().out
