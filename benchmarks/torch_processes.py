"""PyTorch training processes that are started once and controlled by pipes.

    with torch_processes(8, params, heads, tokens) as (run, version):
        loss = run("FSDP2", 3)                           three steps; afterwards the processes wait again

The processes take turns with computations in this process. Each process has a single thread, communicates by gloo on
this machine (``torch_fsdp``), and ends with the ``with`` block, even after an error. If this process is killed, the
processes reach the end of their input and exit.
"""

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MISSING = "torch is not installed. pip install -e .[torch]"
LIFETIME_S = 3600
START_TIMEOUT_S = 300  # eight processes that import torch on two busy cores
ANSWER_TIMEOUT_S = 300
ERROR_LINES = 5

Run = Callable[[str, int], float]


def is_installed() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


@contextlib.contextmanager
def torch_processes(
    count: int, params: Mapping[str, np.ndarray], heads: int, tokens: np.ndarray, *, lifetime_s: float = LIFETIME_S
) -> Iterator[tuple[Run, str]]:
    """Starts the processes, and ends them after the block.

    Args:
      count: the number of processes; each process trains on its part of the rows of ``tokens``.
      params: parameters of the Flax Transformer, path -> array, with stacked layers.
      heads: attention heads of the model.
      tokens: [rows, length], equal in every step.
      lifetime_s: time limit after which a process exits.
    Returns:
      ``run(case, steps)``, which returns the loss of the last step, and the version of PyTorch.
    Raises:
      RuntimeError: a process has ended; contains the last lines of its stderr.
      TimeoutError: a process does not respond.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        np.savez(folder / "start.npz", heads=heads, tokens=tokens, **params)
        children = [_start(stack, folder, rank, count, lifetime_s) for rank in range(count)]

        def run(case, steps):
            for child in children:
                _ask(child, {"case": case, "steps": steps})
            return _answers(children, folder, ANSWER_TIMEOUT_S)[0]["loss"]

        yield run, _answers(children, folder, START_TIMEOUT_S)[0]["torch"]


def _start(stack: contextlib.ExitStack, folder: Path, rank: int, count: int, lifetime_s: float) -> subprocess.Popen:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = os.environ | threads | {"GLOO_SOCKET_IFNAME": _loopback(), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.torch_fsdp", str(folder), str(rank), str(count), str(lifetime_s)]
    errors = stack.enter_context(open(folder / f"errors_{rank}", "wb"))
    root, pipe = Path(__file__).parents[1], subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=environment, cwd=root, bufsize=0)
    stack.callback(_end, child)
    return child


def _loopback() -> str:
    return "lo" if sys.platform.startswith("linux") else "lo0"


def _end(child: subprocess.Popen) -> None:
    child.kill()  # the process has no results to save
    child.wait()
    child.stdin.close()
    child.stdout.close()


def _ask(child: subprocess.Popen, what: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the process has ended; `_answer` raises
        child.stdin.write((json.dumps(what) + "\n").encode())


def _answers(children: Sequence[subprocess.Popen], folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Reads a line from each process, in order."""
    deadline, waiting, found = time.monotonic() + timeout_s, dict(enumerate(children)), {}
    while waiting:
        ready, _, _ = select.select([c.stdout for c in waiting.values()], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"processes {list(waiting)} of {len(children)} did not answer within {timeout_s:g} s.")
        for rank in [rank for rank, child in waiting.items() if child.stdout in ready]:
            found[rank] = _answer(rank, waiting.pop(rank), folder)
    return [found[rank] for rank in range(len(children))]


def _answer(rank: int, child: subprocess.Popen, folder: Path) -> dict[str, Any]:
    if line := child.stdout.readline():
        return json.loads(line)
    lines = (folder / f"errors_{rank}").read_text(errors="replace").strip().splitlines()[-ERROR_LINES:]
    raise RuntimeError(f"process {rank} of PyTorch has ended with exit code {child.wait()}: {' | '.join(lines)}")
