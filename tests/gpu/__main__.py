"""Runs the GPU suite and writes ``benchmarks/results/gpu/<card>.json``: ``make test-gpu``.

    python -m tests.gpu                     at most ten minutes on the NVIDIA GPUs of this machine
    python -m tests.gpu --dry-run           the same program with tiny sizes on simulated CPU devices; a minute
    python -m tests.gpu --minutes 30        more time, for a slow machine

  measured   the results of ``measures``, in order of worth, each written as soon as it is known; failed expectations
             are printed, and the exit status is 1
  suite      tests of the normal suite that need one device, and parity, on the first card; last

What would begin after the time is listed as "left_out". JAX is imported only after a card is found, so that a machine
without a card needs no CUDA.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
OUT = ROOT / "benchmarks" / "results" / "gpu"
# Tests for one device. --noconftest turns off the eight simulated CPU devices.
SUITE = (
    "tests/gpu/test_on_card.py",
    "tests/data_parallel/test_parity.py",
    "tests/training/test_cross_entropy.py",
    "tests/forecast/test_flops.py",
)
MANY_DEVICES = "not (8- or 4x2 or 2x4 or 1x8 or missing_mean or shard_map or split_the_tokens or sharded_head)"
# JAX multiplies float32 in TF32 by default on GPUs, which exceeds the tolerances of the tests.
ENVIRONMENT = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
FIRST_CARD = {"CUDA_VISIBLE_DEVICES": "0"}
DRY_DEVICES = 4  # simulated
NO_CARD = "no NVIDIA GPU here: nothing was tested, and nothing has failed"
INSTALL = 'JAX does not see the card: pip install -U "jax[cuda12]" in the environment that runs this'


def card() -> str | None:
    """Returns the driver's name of the first GPU, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    asked = subprocess.run(query, capture_output=True, text=True)
    return asked.stdout.strip() or None if asked.returncode == 0 else None


def suite(seconds: float) -> dict[str, Any]:
    """Runs the suite in a separate process; returns the numbers of passed tests, failed tests, ...

    {"problem": ...} if it takes longer than ``seconds``.
    """
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", *SUITE, "-k", MANY_DEVICES]
    environment = os.environ | ENVIRONMENT | FIRST_CARD | {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    try:
        run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"problem": f"not done after {seconds:.0f} s"}
    print(run.stdout[-4000:])
    return {"exit code": run.returncode} | counted(run.stdout)


def counted(output: str) -> dict[str, int]:
    """The numbers in the last line of pytest."""
    last = (output.strip().splitlines() or [""])[-1]
    return {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("tests.gpu", description="Measurements and tests on the NVIDIA GPUs at hand.")
    new.add_argument("--dry-run", action="store_true", help="tiny sizes on simulated CPU devices: does it run?")
    new.add_argument("--minutes", type=float, default=10.0, help="time for everything (default: 10)")
    new.add_argument("--out", type=Path, default=OUT, help="folder of the JSON file")
    return new


def devices_of(name: str | None) -> Any:
    """Returns the GPUs of the machine, or simulated CPU devices without a card's name.

    Raises:
      RuntimeError: JAX does not see the card.
    """
    if name is None:
        from xlstm_jax.distributed import simulate_cpu_devices

        simulate_cpu_devices(DRY_DEVICES)
    import jax

    return jax.devices("cuda" if name else "cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    options, start = parser().parse_args(arguments), time.monotonic()
    name = None if options.dry_run else card()
    if name is None and not options.dry_run:
        print(NO_CARD)
        return 0
    if name:
        os.environ.update(ENVIRONMENT)
    try:
        devices = devices_of(name)
    except RuntimeError as error:
        print(f"{name}: {INSTALL} ({error})")
        return 1
    from tests.gpu.measures import DRY, ON_CARD, everything, failures

    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{re.sub(r'[^A-Za-z0-9]+', '_', devices[0].device_kind)}.json"

    def keep(found: dict[str, Any]) -> None:
        path.write_text(json.dumps(found, indent=1) + "\n")

    def left() -> float:
        return 60 * options.minutes - (time.monotonic() - start)

    found = everything(devices, DRY if options.dry_run else ON_CARD, left(), keep)
    if options.dry_run or left() <= 0:
        found["left_out"].append("suite")
    else:
        found["suite"] = suite(left())
    keep(found)
    print(path.read_text())
    failed = failures(found)
    print("\n".join(failed) or f"all holds on {devices[0].device_kind}; commit {path.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
