"""Tests of the table of rates of safetensors files, on a small file."""

import json

from benchmarks import safetensors_speed


def test_safetensors_speed_command_measures_and_prints_all_rates(capsys, tmp_path):
    out = tmp_path / "rates.json"
    assert safetensors_speed.main(["--mebibytes", "1", "--repeats", "1", "--out", str(out)]) == 0
    rates = json.loads(out.read_text())["GB/s, processor s / GB"]
    shown = capsys.readouterr().out
    assert len(rates) == 6
    for name, (rate, processor) in rates.items():
        assert rate > 0 and processor > 0
        assert f"{rate:.2f}" in next(line for line in shown.splitlines() if name in line)
