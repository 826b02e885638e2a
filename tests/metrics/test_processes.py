"""Tests of the three interfaces of metrics in two real processes with two devices each, over loopback."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.ports import reserved_port

ROOT = Path(__file__).parents[2]
VALUES = np.arange(1, 13, dtype=np.float64) ** 2
WEIGHTS = np.array([1, 2, 0, 0, 0, 0, 1, 1, 3, 0, 0, 5], np.float64)
PER_DEVICE = VALUES.reshape(4, 3).sum(1)
MEAN = np.average(VALUES, weights=WEIGHTS)


@pytest.fixture(scope="module")
def printed():
    port = reserved_port()
    commands = [[sys.executable, "-m", "tests.metric_process", str(rank), str(port)] for rank in range(2)]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        done = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(error[-3000:] for _, error in done)
    return [json.loads(output.splitlines()[-1]) for output, _ in done]


WANT = {
    "shard_map True": [VALUES.sum(), 144, MEAN, *PER_DEVICE],
    "shard_map False": [VALUES.sum(), 144, MEAN, *PER_DEVICE],
    "jit": [VALUES.mean()],
    "pmap": [MEAN, MEAN],
    "state": [MEAN, 2 * 6, 144],
    "stateful": [(np.dot(VALUES, WEIGHTS) + 3 * (1 + 4)) / (WEIGHTS.sum() + 3 * 2), 6 + 3, 144],
    "accumulators": [100 + 3 * 1 + 7 * 2 + VALUES.sum(), -5, *VALUES.reshape(4, 3)[:, :2].sum(0)],
}


@pytest.mark.parametrize("name", WANT)
def test_metrics_in_both_processes_cover_all_four_devices(printed, name):
    for process in printed:
        np.testing.assert_allclose(process[name], WANT[name], rtol=1e-6)
