"""Tests of the optimizer benchmark in small: removed costs, table, and pictures."""

import io

import jax
import pytest
from rich.console import Console

from benchmarks import optimizers
from xlstm_jax.forecast import CompileError

FIGURES = {"wire_bytes": 100.0, "flops": 1e12, "temporary_bytes": 2**30, "compile_seconds": 10.0, "all_to_alls": 0}
FOUND = {
    "adamw": FIGURES,
    "muon, optax": FIGURES | {"wire_bytes": 2100.0, "flops": 3e12},
    "muon": FIGURES | {"wire_bytes": 120.0, "flops": 1.2e12, "all_to_alls": 6},
    "adafactor": {"problem": "it does not fit"},
}


def test_more_than_adamw_subtracts_the_adamw_figure():
    assert optimizers.more_than_adamw(FOUND, "wire_bytes") == {"adamw": 0.0, "muon, optax": 2000.0, "muon": 20.0}
    assert optimizers.more_than_adamw(FOUND, "temporary_bytes")["muon"] == 2**30


def test_optimizer_table_shows_ratios_to_optax_and_problems_and_draw_writes_a_picture(tmp_path):
    console = Console(width=140, file=io.StringIO())
    console.print(optimizers.table("v5e:2x4", FOUND))
    shown = console.file.getvalue()
    assert "1/100" in shown and "1/10 " in shown and "it does not fit" in shown and "20.0%" in shown
    optimizers.draw(tmp_path / "one.png", "small", {"v5e:2x4": FOUND})
    assert (tmp_path / "one.png").stat().st_size > 5_000


def test_optimizers_command_draws_loss_curves_of_several_runs(tmp_path):
    for name, loss in {"adamw": 2.0, "muon": 1.5}.items():
        (tmp_path / name).mkdir()
        rows = "".join(f"{step},{loss - step / 100}\n" for step in (10, 20))
        (tmp_path / name / "metrics.csv").write_text(f"step,held_out_loss\n{rows}")
    losses = [f"{name}={tmp_path / name}" for name in ("adamw", "muon")]
    assert optimizers.main(["--losses", *losses, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "losses.png").stat().st_size > 5_000


@pytest.mark.parametrize("case", optimizers.CASES)
def test_every_benchmark_optimizer_initialises_and_updates_scanned_params(case):
    tx = optimizers.CASES[case]()
    params = {"layers": {"norm": {"scale": jax.ShapeDtypeStruct((2, 8), "float32")}}}
    params["layers"]["up"] = {"kernel": jax.ShapeDtypeStruct((2, 8, 16), "float32")}
    _, state = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    assert jax.tree.leaves(state)


def test_measured_reports_a_refused_program_only_as_a_problem(monkeypatch):
    def compiled(size, case, topology):
        raise CompileError("UNIMPLEMENTED: not on this slice")

    monkeypatch.setattr(optimizers, "compiled", compiled)
    found = optimizers.measured("small", ["muon"], "v5e:16x16")
    assert list(found) == ["adamw", "muon"] and all(row.keys() == {"problem"} for row in found.values())
    assert "UNIMPLEMENTED: not on this slice" in found["muon"]["problem"]
