"""Several steps compiled at once, as many as this machine has room for.

One compilation keeps 1.7 cores busy and takes a gigabyte of memory or several. So there are half as many of them as
cores (on 2 cores, 2 at once took 52 s where one after the other took 47), and a further one starts only where memory
for it is left.
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

CHILD_BYTES = 2 * 2**30  # of a step of some 0.2 billion parameters with scanned layers, 0.7 GiB
CORES_OF_ONE = 2
CGROUP = Path("/sys/fs/cgroup")

T = TypeVar("T", bound="Pending[Any] | None")
W = TypeVar("W")


def side_by_side(jobs: Iterable[tuple[T, W]], limit: Callable[[], int]) -> Generator[tuple[T, W], None, None]:
    """Starts jobs while others run, and yields each when it is done, in the order in which they came.

    Args:
      jobs: each with what belongs to it; made one after the other, while those before it run. None: nothing to do.
      limit: how many may run at once, asked before each start; one may always.
    """
    under_way: deque[tuple[T, W]] = deque()

    def limit_reached() -> bool:
        # At least one may run, even where the limit is 0 (no memory is left).
        running = sum(not _is_done(job) for job, _ in under_way)
        return running > 0 and running >= limit()

    try:
        # The next job is made while those before it compile: tracing it takes this process some seconds.
        for job, what in jobs:
            while job is not None and limit_reached():
                time.sleep(POLL_S)
            under_way.append((job, what))
            if job is not None:
                job.start()
            while under_way and _is_done(under_way[0][0]):
                yield under_way.popleft()
        while under_way:
            while not _is_done(under_way[0][0]):
                time.sleep(POLL_S)
            yield under_way.popleft()
    finally:
        for job, _ in under_way:  # of an interrupt, or where the caller stops
            if job is not None:
                job.close()


def _is_done(job: "Pending[Any] | None") -> bool:
    return job is None or job.is_done()


def room_for_jobs() -> int:
    """How many compilations this machine can run at once: by its cores, and by the memory that is free now."""
    # What compilers took so far in this search is the best guess at what the next will take.
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 2**10  # of those that have ended
    free = free_bytes()
    for_cores = max(1, len(os.sched_getaffinity(0)) // CORES_OF_ONE)
    return for_cores if free is None else max(1, min(for_cores, free // max(CHILD_BYTES, largest)))


def free_bytes() -> int | None:
    """Memory that processes may still take, by the system and by this process's group; None where it is not told."""
    told = re.search(r"^MemAvailable: +(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    limit, used = (_text(CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    # What files take is given back when it is asked for.
    cached = re.search(r"^inactive_file (\d+)$", _text(CGROUP / "memory.stat"), re.MULTILINE)
    free = [int(told[1]) * 2**10] if told else []
    free += [int(limit) - int(used) + int(cached[1])] if limit.isdigit() and used.isdigit() and cached else []
    return min(free, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
