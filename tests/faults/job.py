"""The training job as the fault suite runs it: small, in real processes, with a fault on demand.

As a program it is one process of the job, ``python -m tests.faults.job FAULT STEP ARGUMENTS...``: the options of
``benchmarks.train_lm``, and what goes wrong when the batch of step STEP is asked for:

  none        nothing
  stuck       the reader of the data never returns, and Python goes on, as with a dead network disk
  exception   the reader of the data raises
"""

import csv
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.run_log import TABLE, read_rows
from tests.ports import reserved_port

ROOT = Path(__file__).parents[2]
COMPILED_ONCE = {  # All jobs of a suite run the same programs; JAX compiles each of them once.
    "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="compiled-")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
STEPS, SAVE_EVERY = 60, 6
CORPUS = "the quick brown fox jumps over the lazy dog; " * 40
SIZES = (
    f"--model transformer --batch-size 4 --context 16 --d-model 16 --layers 1 --heads 2 --min-weight-size 64 "
    f"--steps {STEPS} --sample-bytes 0 --log-every 1 --eval-every {STEPS} --checkpoint-every {SAVE_EVERY} "
    "--mesh fsdp=4 --resume"
)
PACE_S = 0.03  # of a step, so that a fault can strike between two
STARTING_S = 600.0  # of a job that hangs; on a machine that does nothing else a whole job takes some 15
AGREEING = "comparing with the other processes at"
OWN_COLUMNS = ("seconds", "tokens_per_s")  # of metrics.csv, which no two runs share


@dataclass
class Processes:
    """The processes of one job."""

    children: list[subprocess.Popen]
    folder: Path
    launched: float  # in seconds of the wall clock

    def kill(self, victims: list[int]) -> None:
        for victim in victims:
            self.children[victim].kill()

    def wait_gone(self, timeout_s: float) -> float:
        """Waits until every process has ended, and returns the seconds that took."""
        start = time.monotonic()
        for child in self.children:
            child.wait(timeout=max(0.01, timeout_s - (time.monotonic() - start)))
        return time.monotonic() - start

    def codes(self) -> list[int]:
        return [child.returncode for child in self.children]

    def stderr(self, process: int) -> str:
        return (self.folder / f"stderr{process}").read_text()

    def wait_for(self, condition, timeout_s: float = STARTING_S) -> bool:
        """Waits for a condition; False where the processes have all ended before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if all(child.poll() is not None for child in self.children):
                return condition()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s} s; the processes said:\n{self.stderr(0)[-3000:]}")
            time.sleep(0.005)
        return True


@contextmanager
def started(
    folder: Path,
    processes: int,
    *options: str,
    fault="none",
    at=0,
    on=(),
    checkpoints=None,
    per_process=None,
    folder_of=None,
):
    """The job, in ``processes`` processes which share 4 devices; those of ``on`` have the fault. Leaves none behind.

    ``per_process`` gives some of them options of their own, ``folder_of`` another copy of the code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (corpus := folder / "corpus.txt").write_text(CORPUS)
    port = reserved_port()
    children, launched = [], time.time()
    for process in range(processes):
        what = (fault, str(at)) if process in on else ("none", "0")
        joining = ["--processes", processes, "--coordinator", f"127.0.0.1:{port}", "--process-id", process]
        arguments = [*SIZES.split(), "--data", corpus, "--checkpoint-dir", checkpoints or folder / "run", *options]
        arguments += joining if processes > 1 else []
        arguments += (per_process or {}).get(process, [])
        with (folder / f"stderr{process}").open("w") as stderr, (folder / f"stdout{process}").open("a") as stdout:
            children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.faults.job", *what, *map(str, arguments)],
                    cwd=(folder_of or {}).get(process, ROOT),
                    stdout=stdout,
                    stderr=stderr,
                    env=os.environ | COMPILED_ONCE,
                )
            )
    try:
        yield Processes(children, folder, launched)
    finally:
        for child in children:
            child.kill()
            child.wait()


def steps_done(folder: Path) -> int:
    """The last step with a row; the row of a step is written when the next one is due."""
    metrics = folder / "run/metrics"
    rows = read_rows(metrics) if (metrics / TABLE).exists() else []
    return int(rows[-1]["step"]) if rows else 0


def committed(folder: Path) -> int:
    """The newest step that is on disk as a whole."""
    steps = [int(path.name) for path in (folder / "run/steps").glob("*") if path.name.isdecimal()]
    return max(steps, default=0)


def saves_under_way(folder: Path) -> set[str]:
    """The folders of saves that are not committed; those of a killed job stay until the next one saves."""
    return {path.name for path in (folder / "run/steps").glob("*") if "tmp" in path.name}


def final_state(folder: Path) -> dict:
    """What the job ended with: checksums of all leaves of its last checkpoint, and all rows but for times."""
    (leaves,) = (folder / f"run/steps/{STEPS}").rglob("leaves/metadata") or [None]
    with (folder / "run/metrics/metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if k not in OWN_COLUMNS} for row in csv.DictReader(file)]
    return {"leaves": json.loads(leaves.read_text()), "rows": rows}


def last_arrival(processes: Processes) -> float:
    """Returns when the last process began to compare what it starts with, in seconds of the wall clock."""
    texts = [processes.stderr(process) for process in range(len(processes.children))]
    return max(float(text.split(AGREEING)[1].split()[0]) for text in texts)


def limit_s(promised_s: float, processes: Processes) -> float:
    """Returns the promised seconds, and as many as the processes took to start.

    To start takes a process many times the work that it takes to end, and both take longer on a slow or busy machine.
    """
    return promised_s + last_arrival(processes) - processes.launched


def random_victims(rng: random.Random, processes: int) -> list[int]:
    """One, or all."""
    return list(range(processes)) if rng.random() < 0.3 else [rng.randrange(processes)]


def main(fault: str, step: str, *arguments: str) -> int:
    from benchmarks import fitting, train_lm
    from benchmarks import job as benchmarks_job

    read, agree = fitting.random_windows, benchmarks_job.assert_same_everywhere

    def timed_agree(value):
        print(f"{AGREEING} {time.time()}", file=sys.stderr, flush=True)
        agree(value)

    def faulty(data, count, context, seed):
        if fault != "none" and seed[1] == int(step):
            print(f"FAULT {fault}", file=sys.stderr, flush=True)
            if fault == "stuck":
                time.sleep(3600)
            raise OSError("the disk with the data is gone")
        time.sleep(PACE_S)
        return read(data, count, context, seed)

    fitting.random_windows, benchmarks_job.assert_same_everywhere = faulty, timed_agree
    return train_lm.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
