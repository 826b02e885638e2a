"""Parallel compilation of several steps, as many as this machine has room for.

A compilation keeps 1.7 cores busy and takes a gigabyte of memory or more. Therefore at most half as many compilations
run as the machine has cores (on 2 cores, 2 in parallel took 52 s, sequentially 47 s), and another starts only if
enough memory is free.
"""

import os
import re
import resource
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, TypeVar

from xlstm_jax.forecast.compiling.compile_process import POLL_S, Pending

CHILD_BYTES = 2 * 2**30  # a step of some 0.2 billion parameters with scanned layers takes 0.7 GiB
CORES_OF_ONE = 2
CGROUP = Path("/sys/fs/cgroup")

T = TypeVar("T", bound="Pending[Any] | None")
W = TypeVar("W")


def side_by_side(jobs: Iterable[tuple[T, W]], limit: Callable[[], int]) -> Generator[tuple[T, W], None, None]:
    """Runs compilations in parallel, up to a limit, and yields each finished (job, label) in the order of ``jobs``.

    The caller calls ``job.result()``. If the caller stops early, all jobs that are not yet yielded are closed.

    Args:
      jobs: pairs of a job and a label; each pair is made while the jobs before it run. A job of None needs no work.
      limit: returns how many jobs may run at once, called before each start; at least a single job always may.
    """
    under_way: deque[tuple[T, W]] = deque()

    def limit_reached() -> bool:
        # At least one may run, even where the limit is 0 (no memory is left).
        running = sum(not _is_done(job) for job, _ in under_way)
        return running > 0 and running >= limit()

    try:
        # The next job is made while the previous jobs compile: tracing takes this process some seconds.
        for job, label in jobs:
            while job is not None and limit_reached():
                time.sleep(POLL_S)
            under_way.append((job, label))
            if job is not None:
                job.start()
            while under_way and _is_done(under_way[0][0]):
                yield under_way.popleft()
        while under_way:
            while not _is_done(under_way[0][0]):
                time.sleep(POLL_S)
            yield under_way.popleft()
    finally:
        for job, _ in under_way:  # left after an interrupt, or if the caller stops
            if job is not None:
                job.close()


def _is_done(job: "Pending[Any] | None") -> bool:
    return job is None or job.is_done()


def room_for_jobs() -> int:
    """Returns how many compilations this machine can run at once, by its cores and its free memory; at least 1.

    A compilation is assumed to need two cores, and 2 GiB or, if larger, the peak memory of the largest child process
    that has ended. If the free memory is unknown, only the cores count.
    """
    # The peak memory of the compilers so far is the best estimate for the next compiler.
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 2**10  # children that have ended
    free = free_bytes()
    for_cores = max(1, len(os.sched_getaffinity(0)) // CORES_OF_ONE)
    return for_cores if free is None else max(1, min(for_cores, free // max(CHILD_BYTES, largest)))


def free_bytes() -> int | None:
    """Returns the bytes of memory that processes may still take; None if unknown.

    The system gives a number, and the cgroup of this process gives a number if it has a limit; the smaller number
    counts.
    """
    available = re.search(r"^MemAvailable: +(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    limit, used = (_text(CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    # The kernel frees memory of cached files on demand.
    cached = re.search(r"^inactive_file (\d+)$", _text(CGROUP / "memory.stat"), re.MULTILINE)
    free = [int(available[1]) * 2**10] if available else []
    free += [int(limit) - int(used) + int(cached[1])] if limit.isdigit() and used.isdigit() and cached else []
    return min(free, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
