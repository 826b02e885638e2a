"""The table of rates of safetensors files, on a small file."""

from benchmarks import safetensors_speed


def test_all_rates_are_measured_and_shown(capsys):
    assert safetensors_speed.main(["--mebibytes", "1", "--repeats", "1"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*safetensors_speed.READS, *safetensors_speed.WRITES))
