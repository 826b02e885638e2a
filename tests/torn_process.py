"""Publications by processes that are killed: ``python -m tests.torn_process FOLDER COUNT SEED HITS MOST``.

Prints a line of JSON with the kills. Each job forks COUNT processes, which publish version after version over loopback:
full versions and deltas, as drawn. One of them, or all, are killed by SIGKILL, at a drawn byte of a drawn file or at a
drawn moment; the others live on for a drawn time. Then the folder must have the version before, or the one that was
being published; and the next job goes on. A reader follows all versions from the first to the last in a process of its
own. Kills are drawn until HITS of them have left a file that is written in part, but at most MOST.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import safetensors
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.ports import reserved_port
from xlstm_jax.distributed import DeviceMeshManager, initialize_distributed, simulate_cpu_devices
from xlstm_jax.distributed.checkpoint import VersionNeededError, apply_publication, latest_version, publish

FOLDER, COUNT, SEED, HITS, MOST = Path(sys.argv[1]), *map(int, sys.argv[2:6])
INDEX = "model.safetensors.index.json"
TENSORS, ROWS = 6 * COUNT, 512  # of 2 MB each, so that a full version has two files for each process
MAX_FILE_BYTES = 3 * ROWS * 1024 * 4
JOBS = 1000  # versions of a job: the number of a job times this, and the version, are what tensors are drawn from


def tensors_of(number: int) -> dict[str, np.ndarray]:
    """Returns what job ``number // JOBS`` publishes as version ``number % JOBS``: no two have a tensor in common."""
    rng = np.random.default_rng(number)
    base = rng.random((ROWS, 1024), np.float32)
    # Of half of the tensors few entries differ from version to version, so that deltas have gaps and whole tensors.
    tensors = {"number": np.array([number], np.int32)}
    for i in range(TENSORS):
        tensor = base + np.float32(i) if i // COUNT % 2 else np.full_like(base, i)
        tensor[::64, ::64] = number
        tensors[f"w{i:02}"] = tensor
    return tensors


def number_of(arrays: dict[str, np.ndarray]) -> int:
    """Returns the number that all tensors were drawn from; raises if there is none."""
    number = int(arrays["number"][0])
    want = tensors_of(number)
    assert want.keys() == arrays.keys(), sorted(arrays)
    wrong = [name for name in want if want[name].tobytes() != np.asarray(arrays[name]).tobytes()]
    assert not wrong, f"{wrong} are not of {number}"
    return number


def drawn(*seed: int) -> np.random.Generator:
    return np.random.default_rng([SEED, COUNT, *seed])


# ------------------------------------------------------------------------------------------------------- the processes


def forked(work: Callable[[], object], output: int | None = None) -> int:
    """Runs ``work`` in a process of its own; returns the id of the process."""
    if child := os.fork():
        return child
    code = 1
    try:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        if output is not None:
            os.dup2(output, 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def publisher(job: int, rank: int, port: int, versions: int, acknowledged: int) -> None:
    """Publishes versions of a job, and writes a line for each that has been published."""
    simulate_cpu_devices(4 // COUNT)
    initialize_distributed(f"127.0.0.1:{port}", COUNT, rank)
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 4})

    def put(values: np.ndarray) -> jax.Array:
        split = NamedSharding(mesh, P("fsdp" if values.size > 1 else None))
        return jax.make_array_from_callback(values.shape, split, lambda index: values[index])

    before = latest_version(FOLDER)
    for version in range(before + 1, before + 1 + versions):
        number = job * JOBS + version
        params = {name: put(values) for name, values in tensors_of(number).items()}
        os.write(acknowledged, f"begins {version}\n".encode())
        since = version - 1 if is_delta(job, version) else None
        published = publish(params, FOLDER, since=since, max_file_bytes=MAX_FILE_BYTES)
        assert published == version, f"publish returned {published} instead of {version}"
        os.write(acknowledged, f"published {version}\n".encode())


def is_delta(job: int, version: int) -> bool:
    return version > 1 and job <= MOST and bool(drawn(job, version).integers(2))


def reader(last: int) -> None:
    """Follows the publication until the job ``last`` has published; the number of a version never falls."""
    arrays: dict[str, np.ndarray] = {}
    number = 0
    while number // JOBS < last:
        try:
            version, arrays = apply_publication(arrays, FOLDER)
        except VersionNeededError:
            arrays = {}
            continue
        read = number_of(arrays)
        assert read >= number and read % JOBS == version, f"version {version} has the number {read}, after {number}"
        number = read
        time.sleep(0.02)


# ----------------------------------------------------------------------------------------------------------- the kills


def unfinished(rank: int, version: int, old: set[str]) -> dict[str, float]:
    """Returns which part of each file that a process has not finished is on disk, without those of ``old`` jobs."""
    parts = {}
    for folder in FOLDER.glob(f".model-{version:08}-{rank:05}-*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            for file in folder.glob(".tmp*"):
                found = file.stat()
                # The library gives a file its size first: blocks show what has been written.
                if file.name not in old and found.st_size:
                    parts[f"{folder.name} {file.name}"] = found.st_blocks * 512 / found.st_size
    return parts


class Job:
    """The processes of a job, and the versions that they have begun and published."""

    def __init__(self, number: int, versions: int) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        port = reserved_port()
        with open(FOLDER.with_name(f"{FOLDER.name}-{number}.log"), "wb") as log:
            self.ranks = [
                forked(lambda rank=rank: publisher(number, rank, port, versions, writer), log.fileno())
                for rank in range(COUNT)
            ]
        os.close(writer)
        self.begun, self.published = [0] * 2

    def read(self) -> None:
        """Reads what processes have written so far."""
        while select.select([self.reader], [], [], 0)[0]:
            lines = os.read(self.reader, 1 << 16).decode().splitlines()
            if not lines:
                break
            for line in lines:
                event, version = line.split()
                if event == "begins":
                    self.begun = max(self.begun, int(version))
                else:
                    self.published = max(self.published, int(version))

    def ended(self) -> list[int]:
        """Waits for the processes; returns their exit codes, negative for signals."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.ranks]


def killed(number: int) -> dict[str, object]:
    """Starts a job, kills it within one of its versions, and reads the folder."""
    rng = drawn(number)
    before = latest_version(FOLDER)
    # In the first job a version must be there before the kill.
    version = before + int(rng.integers(1, 3)) + (before == 0)
    victim, everyone = int(rng.integers(COUNT)), bool(rng.integers(3) == 0)
    file, part = int(rng.integers(2)) if not is_delta(number, version) else 0, float(rng.random())
    at_moment, moment_s, others_live_s = bool(rng.integers(5) == 0), float(rng.random()) * 0.3, float(rng.random()) / 2
    old = {file.name for file in FOLDER.glob(".model-*/.tmp*")}
    job, limit = Job(number, 5), time.monotonic() + 120
    begun_at = None
    while True:
        if job.begun < version:
            time.sleep(2e-3)
        if time.monotonic() > limit:
            raise TimeoutError(f"job {number} has begun version {job.begun}, and not {version}")
        job.read()
        if job.begun > version:
            break  # too late
        if job.begun == version:
            begun_at = begun_at or time.monotonic()
            if at_moment and time.monotonic() - begun_at >= moment_s:
                break
            parts = unfinished(victim, version, old)
            time.sleep(1e-4)
            if not at_moment and any(f"-{file:05}." in name and done >= part for name, done in parts.items()):
                break
    for rank, pid in enumerate(job.ranks):
        if everyone or rank == victim:
            os.kill(pid, signal.SIGKILL)
    time.sleep(others_live_s)
    torn = {rank: unfinished(rank, version, old) for rank in range(COUNT)}
    for pid in job.ranks:
        os.kill(pid, signal.SIGKILL)
    codes = job.ended()
    job.read()
    # The index may have its name already, when a process is killed before it returns.
    read = apply_publication({}, FOLDER)
    of_job = number_of(read.arrays) // JOBS
    versions = f"version {read.version} of job {of_job} was read, after version {before}; job {number} began version "
    versions += f"{job.begun} and published version {job.published}"
    assert read.version in (job.published, job.begun) or (read.version == before and not job.published), versions
    assert number_of(read.arrays) % JOBS == read.version, versions
    assert of_job == number if read.version > before else of_job < number, versions
    check_safetensors()
    return {
        "version": version,
        "delta": is_delta(number, version),
        "within a write": bool(torn[victim]),
        "parts": torn,
        "at": moment_s if at_moment else [file, part],
        "victim": "all" if everyone else victim,
        "codes": codes,
        "read": read.version,
    }


def check_safetensors() -> None:
    """Reads the newest full version by its index, as other libraries do."""
    weight_map = json.loads((FOLDER / INDEX).read_text())["weight_map"]
    arrays = {}
    for file in set(weight_map.values()):
        with safetensors.safe_open(FOLDER / file, "np") as opened:
            arrays |= {name: opened.get_tensor(name) for name in weight_map if weight_map[name] == file}
    assert arrays.keys() == weight_map.keys(), f"the files have {sorted(arrays)}, and the index {sorted(weight_map)}"
    number_of(arrays)


def main() -> dict[str, object]:
    begun, kills = time.monotonic(), []
    # The last job publishes full versions alone, so that nothing is left of those that were killed.
    last = MOST + 1
    FOLDER.mkdir()
    # Whoever watches the writers must run as soon as they have written, on a busy machine, too.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    first = Job(0, 1)
    codes = first.ended()
    assert codes == [0] * COUNT, f"the first job ended with the codes {codes}"
    follower = forked(lambda: reader(last))
    while len(kills) < MOST and sum(bool(kill["within a write"]) for kill in kills) < HITS:
        kills.append(killed(len(kills) + 1))
    final = Job(last, 3)
    codes = final.ended()
    final.read()
    followed = os.waitstatus_to_exitcode(os.waitpid(follower, 0)[1])
    left = sorted(path.name for path in FOLDER.iterdir() if path.name.startswith("."))
    return {
        "kills": kills,
        "last": [codes, final.published, number_of(apply_publication({}, FOLDER).arrays)],
        "reader": followed,
        "left": left,
        "s": round(time.monotonic() - begun, 1),
    }


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
