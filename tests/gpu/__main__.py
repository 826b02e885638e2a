"""Runs the GPU suite and writes ``benchmarks/results/gpu/<card>.json``: ``make test-gpu``.

    python -m tests.gpu                     some minutes on one NVIDIA GPU, the first of several

  suite      tests of the normal suite that need one device, and parity, on the card
  measured   the results of ``measures``; failed expectations are printed, and the exit status is 1

JAX is imported only after a card is found, so that a machine without a card needs no CUDA.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "0",
    "JAX_PLATFORMS": "cuda",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
NO_CARD = "no NVIDIA GPU here: nothing was tested, and nothing has failed"
INSTALL = 'JAX does not see the card: pip install -U "jax[cuda12]" in the environment that runs this'


def card() -> str | None:
    """Returns the driver's name of the first GPU, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    asked = subprocess.run(query, capture_output=True, text=True)
    return asked.stdout.strip() or None if asked.returncode == 0 else None


def suite() -> dict[str, int]:
    """Runs the suite in a separate process; returns the numbers of passed tests, failed tests, ..."""
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", *SUITE, "-k", MANY_DEVICES]
    environment = os.environ | ENVIRONMENT | {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    print(run.stdout[-4000:])
    return {"exit code": run.returncode} | counted(run.stdout)


def counted(output: str) -> dict[str, int]:
    """The numbers in the last line of pytest."""
    last = (output.strip().splitlines() or [""])[-1]
    return {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}


def main() -> int:
    name = card()
    if name is None:
        print(NO_CARD)
        return 0
    os.environ.update(ENVIRONMENT)
    import jax

    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        print(f"{name}: {INSTALL} ({error})")
        return 1
    from tests.gpu.measures import everything, failures

    found = {"suite": suite(), **everything(device)}
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{re.sub(r'[^A-Za-z0-9]+', '_', device.device_kind)}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path.read_text())
    failed = failures(found)
    print("\n".join(failed) or f"all holds on {device.device_kind}; commit {path.relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
