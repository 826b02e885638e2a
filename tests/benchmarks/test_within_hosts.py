"""Tests of the comparison of weights gathered again within a host alone."""

import json

import pytest

from benchmarks import within_hosts
from benchmarks.cases import CASES

ROWS = json.loads((within_hosts.OUT / "rows.json").read_text())


def test_cases_differ_in_the_policy_of_remat_alone():
    both, within = (CASES[name] for name in within_hosts.CASES.values())
    assert {**within.options, "remat": True} == both.options and within.options["remat"] is not True
    assert (within.algorithm, within.mesh, within.xla_options, within.kernel) == (
        both.algorithm,
        both.mesh,
        both.xla_options,
        both.kernel,
    )


@pytest.mark.parametrize("model", ROWS)
def test_stored_rows_send_a_third_fewer_bytes_between_hosts(model):
    """Of three transfers of the weights (gather, gather again, reduce-scatter) two are left, with one dtype for all."""
    both, within = (ROWS[model][name]["nic_bytes"] for name in within_hosts.CASES)
    assert within / both == pytest.approx(2 / 3, abs=0.05)


def test_redraw_prints_the_stored_rows(capsys, tmp_path):
    for path in within_hosts.OUT.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    assert within_hosts.main(["--redraw", "--out", str(tmp_path)]) == 0
    assert "within a host" in capsys.readouterr().out
    assert json.loads((tmp_path / "rows.json").read_text()) == ROWS
