"""Tests of the peer benchmark: judged targets, the command in small, and the pages' statements about results."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.cases import CASES, SIZES, build
from tests.compiled_cases import compiled, kept_folder

ROOT = Path(peers.__file__).parents[1]
COMMITTED = json.loads((peers.OUT / "peers.json").read_text())
SIZE, TOPOLOGY, COMPARED = "mixture_small", "h100:2x4", ["jit, kernel", "ours, kernel"]


def row(step, waited, held, busiest=1.0):
    times = {"step_seconds": step, "compute_seconds": step - waited, "waited_seconds": waited}
    return {"case": "", **times, "wire_bytes": 1.0, "total_bytes": held, "busiest_over_mean": busiest}


def test_judged_counts_met_and_missed_targets_per_quantity():
    jit, ours = row(10.0, 2.0, 100), row(8.0, 1.0, 103, busiest=1.04)
    found = peers.judged(
        {"model": {"v5e:4x4": {"jit": jit, "ours": ours}}, "mixture_0.5B": {"v5e:4x4": {"jit": jit, "ours": ours}}}
    )
    assert {target: (one["met"], one["of"]) for target, one in found.items()} == {
        "step": (2, 2),
        "step, where jit waits": (2, 2),
        "waited": (1, 1),
        "busiest axis": (2, 2),
        "memory": (0, 2),
    }
    assert found["memory"]["missed"] == {"model on v5e:4x4": 1.03, "mixture_0.5B on v5e:4x4": 1.03}
    # If ``jit`` waits for less than 15 % of the step, the possible gain is the waiting time.
    hidden = peers.judged({"model": {"v5e:4x4": {"jit": row(10.0, 1.4, 100), "ours": row(9.5, 1.4, 100)}}})
    assert hidden["step, where jit waits"]["of"] == 0 and hidden["step"]["met"] == 1 and not hidden["waited"]["met"]
    slower = peers.judged({"model": {"v5e:4x4": {"jit": jit, "ours": row(10.1, 1.0, 100, busiest=1.06)}}})
    assert slower["step"]["missed"] and slower["step, where jit waits"]["missed"] and slower["busiest axis"]["missed"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = kept_folder(tmp_path_factory)
    compiled(folder, SIZE, TOPOLOGY, COMPARED)
    return folder


@pytest.mark.cuda_plugin
def test_peers_command_compares_jit_and_library_steps_with_a_kernel(kept, tmp_path, capsys):
    where = ["--topologies", TOPOLOGY, "--kept", str(kept), "--out", str(tmp_path), "--redraw"]
    assert peers.main(["--sizes", SIZE, "--cases", *COMPARED, *where]) == 0
    assert "jit / ours" in capsys.readouterr().out
    told = json.loads((tmp_path / "peers.json").read_text())
    found = told["models"][SIZE][TOPOLOGY]
    assert [found[side]["case"] for side in peers.SIDES] == COMPARED
    assert all(found[side]["step_seconds"] > found[side]["waited_seconds"] > 0 for side in peers.SIDES)
    assert told["targets"]["step"]["of"] == 1 and (tmp_path / "peers.png").stat().st_size > 10_000


def test_peers_parser_accepts_modified_sizes_and_exits_for_unknown_sizes_or_dims(monkeypatch, capsys):
    name = "decoder_small,layers=3,vocab_size=1000"
    monkeypatch.setitem(SIZES, name, None)  # restored after the test
    assert peers.parser().parse_args(["--sizes", SIZE, name]).sizes == [SIZE, name]
    assert SIZES[name] == dataclasses.replace(SIZES["decoder_small"], layers=3, vocab_size=1000)
    cases = "ours, kernel", "ours, options, kernel"
    assert peers.sides_of(name, "v6e:2x4")["ours"] == cases
    assert peers.sides_of(name, "v5e:2x4")["ours"] == (*cases, "ours, options, more VMEM, kernel")
    assert peers.sides_of("vit_L16", "v6e:2x4") == peers.ON_TPUS
    for wrong, told in {"decoder_2B": "is none of", "decoder_small,depth=3": "no dim", "1.3B,layers": "no dim"}.items():
        with pytest.raises(SystemExit):
            peers.parser().parse_args(["--sizes", wrong])
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("case", ["jit, kernel", "ours, kernel"])
def test_kernel_cases_of_jit_and_library_contain_flash_attention(case):
    step, args = build(SIZES["decoder_small"], CASES[case], (2, 2))
    assert step.trace(*args).lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") >= 3
    plain, args = build(SIZES["decoder_small"], CASES[case.removesuffix(", kernel")], (2, 2))  # guard: not without
    assert "tpu_custom_call" not in plain.trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def test_pages_have_the_peer_tables_of_committed_results():
    rows = COMMITTED["models"]
    assert json.loads(json.dumps(peers.judged(rows))) == COMMITTED["targets"]
    worse = copy.deepcopy(rows)  # guard: another figure is another table
    next(iter(next(iter(worse.values())).values()))["ours"]["step_seconds"] *= 1.5
    for (page, table), (_, other) in zip(peers.of_pages(rows), peers.of_pages(worse), strict=True):
        assert table in page.read_text(), "run: python -m benchmarks.peers --redraw"
        assert other not in page.read_text()


def test_committed_peer_rows_have_equal_kernels_and_versions_on_both_sides():
    assert set(COMMITTED["models"]) == set(peers.MODELS)
    for there in COMMITTED["models"].values():
        for pair in there.values():
            jit, ours = (CASES[pair[side]["case"]] for side in peers.SIDES)
            of_jit, of_ours = (pair[side]["versions"] for side in peers.SIDES)
            both = of_jit.keys() & of_ours.keys()  # older rows do not name the plugin's library
            assert jit.kernel == ours.kernel and {"jax", "jaxlib"} <= both
            assert {name: of_jit[name] for name in both} == {name: of_ours[name] for name in both}
