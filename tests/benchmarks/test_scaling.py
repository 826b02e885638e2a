"""The scaling benchmark: its rows follow from the formulas; its command leaves tables, a JSON file and a picture."""

import json

import pytest

from benchmarks import limits, scaling
from benchmarks.cases import SIZES, counts

SIZE = counts(SIZES["7B"])


def test_with_tokens_to_spare_products_bound_the_step_and_copies_do_not_help():
    rows = scaling.scale(SIZE, limits.NETWORKS["h100"], dict.fromkeys(scaling.CHIPS, 16_384.0))
    assert [row["chips"] for row in rows] == [2**power for power in range(3, 13)]
    assert {row["fsdp"]["bound"] for row in rows} == {"compute"} and scaling.takes_over(rows) is None


def test_hybrid_takes_over_where_the_network_bounds_the_step():
    rows = scaling.scale(SIZE, limits.NETWORKS["h100"], {n: 2**21 / n for n in scaling.CHIPS})
    at = scaling.takes_over(rows)
    (there,) = [row for row in rows if row["chips"] == at]
    assert there["fsdp"]["bound"] == "network" and there["hsdp"]["seconds"] < 0.98 * there["fsdp"]["seconds"]
    # 6 bytes of each parameter cross it with FSDP, 4 with HSDP.
    parts = [there[way]["parts"]["network"] for way in ("hsdp", "fsdp")]
    assert parts[0] / parts[1] == pytest.approx(4 / 6, rel=0.04)  # embedding and head are gathered once


def test_copies_that_do_not_fit_are_left_out():
    copies, found = scaling.best_hybrid(SIZE, limits.NETWORKS["v5e"], 16, 2048)
    assert copies == 2 and found.seconds > 0
    assert scaling.best_hybrid(SIZE, limits.NETWORKS["v5e"], 8, 2048) == (None, None)


def test_the_command_leaves_a_table_a_file_and_a_picture(tmp_path, capsys):
    assert scaling.main(["--sizes", "1.3B", "--chips", "v5e", "h100", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "1.3B on v5e, weak scaling" in out and "1.3B on h100, strong scaling: HSDP takes over from" in out
    told = json.loads((tmp_path / "1.3B.json").read_text())
    assert {"jax", "libtpu"} <= told["versions"].keys() and list(told["chips"]) == ["v5e", "h100"]
    assert (tmp_path / "1.3B.png").stat().st_size > 20_000
