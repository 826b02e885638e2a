"""Who writes a directory: one ``Checkpointer`` of a process, and one job; and what becomes of its last save.

A second job is refused until the first has ended, however it ends: by a lock of ``flock``, which belongs to the open
file and not to the process. (A POSIX record lock goes as soon as the process closes any descriptor of the file, that of
a copy of the folder, say. On network file systems Linux turns ``flock`` into a lock on the server.)

A save goes on in the background, up to a time limit that includes its commit. If it fails, the next call raises. At the
end of the program there is no next call: the exit waits for the save, at a point where orbax can still start threads
(after it, Python 3.12 starts none). If the save fails there, the exit says which step is lost, and the exit code is 1.
"""

import atexit
import errno
import logging
import os
import shutil
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from xlstm_jax.distributed.checkpoint.backend import Arrays, Backend, Directory, Json
from xlstm_jax.distributed.checkpoint.errors import CheckpointError
from xlstm_jax.distributed.checkpoint.steps import is_url
from xlstm_jax.distributed.processes.leaving import leave
from xlstm_jax.distributed.processes.together import cause_of

_COMMIT_GRACE_S = 1.0  # beyond the limit, in which orbax's own error comes
_LOOK_EVERY_S = 0.005
LOCK_FILE = ".writer"
_NAME_BYTES = 200  # of the writer's name that an error repeats
_JUMP_S = 1.0  # of the clock, beyond which it is the cause of a timeout


class Writer:
    """The directory's lock, and the save that is under way in the backend.

    Args:
      directory: it exists.
      backend: stores the steps; the writer opens and closes it.
      owner: the object that saves with it. While that lives, no other object of this process can write the directory.
      steps: numbers of saved steps; ``save`` adds to them, and a failure takes away again.
      locks: whether this process locks the directory for the job.
      timeout_s: how long a save may take in the background, its commit and the removal of old steps included.
    Raises:
      CheckpointError: another object of this process, or another job, writes there.
    """

    def __init__(
        self, directory: Directory, backend: Backend, owner: object, steps: set[int], timeout_s: float, *, locks: bool
    ) -> None:
        self.directory, self._backend, self._steps, self._timeout_s = directory, backend, steps, timeout_s
        self.is_open = False
        self._lock: DirectoryLock | None = None
        self._saving: int | None = None  # the step
        self._begun = 0.0, 0.0  # of that save: by the clock, and by one that never jumps
        self._key = str(directory) if is_url(directory) else os.path.realpath(directory)
        self._take_over(owner)
        if locks and not is_url(directory):
            self._lock = DirectoryLock(directory)
        _finish_at_exit()
        _writers[self._key] = (weakref.ref(owner), self)

    def _take_over(self, owner: object) -> None:
        """Finishes for an object that is gone; refuses where it is not."""
        if self._key not in _writers:
            return
        other, writer = _writers[self._key]
        if other() is not None and other() is not owner:
            raise CheckpointError(
                f"another Checkpointer of this process writes checkpoints in {self.directory}. Save with that one, "
                "close it first, or use another directory."
            )
        writer.close()

    def open(self) -> None:
        """Lets the backend look at the directory, before the first save and when steps were moved; all processes."""
        self._backend.open()
        self.is_open = True

    def save(self, step: int, arrays: Arrays, record: Callable[[], Json]) -> None:
        """Starts to save a step; returns when its buffers may be donated."""
        self._begun = time.time(), time.monotonic()
        with self._failing_as(step):
            self._backend.save(step, arrays, record)
        self._saving = step
        self._steps.add(step)

    def wait(self) -> None:
        """Waits until the last save is on disk, no longer than its limit; raises a ``CheckpointError`` if it failed."""
        if (step := self._saving) is not None:
            with self._failing_as(step):
                self._wait_for_commit()
                self._saving = None  # before an error can come: each failure is told once
                self._backend.wait()
            self._steps.add(step)
        self.check_place()

    @property
    def hangs(self) -> bool:
        """Whether the last save has passed its limit, and goes on: a rename on a file system that does not answer."""
        return self._saving is not None and time.monotonic() >= self._deadline and self._backend.is_saving()

    def _wait_for_commit(self) -> None:
        while self._backend.is_saving():
            if time.monotonic() >= self._deadline:
                raise TimeoutError(
                    f"it was not on disk within async_timeout_s={self._timeout_s:g} s, and writing, renaming or the "
                    "removal of old steps goes on"
                )
            time.sleep(_LOOK_EVERY_S)

    @property
    def _deadline(self) -> float:
        return self._begun[1] + self._timeout_s + _COMMIT_GRACE_S

    def check_place(self) -> None:
        """Raises a ``CheckpointError`` if the directory is another by now: a link to it was moved, say."""
        if self._lock is not None:
            self._lock.check_place()

    def check(self) -> None:
        """Raises a ``CheckpointError`` if the last save has failed by now; does not wait."""
        if self._saving is not None and not self._backend.is_saving():
            self.wait()

    def close(self) -> None:
        """Waits for the last save, as ``wait`` does, and unlocks the directory."""
        with ExitStack() as at_last:
            at_last.callback(self._close_unless_it_hangs)
            self.wait()

    def _close_unless_it_hangs(self) -> None:
        """What hangs may still be committed: the directory stays locked until that, or the end of the process."""
        if self.hangs:
            return
        with ExitStack() as at_last:
            if self._lock is not None:
                at_last.callback(self._lock.close)
            at_last.callback(self._backend.close)
            if self._key in _writers and _writers[self._key][1] is self:
                del _writers[self._key]

    @contextmanager
    def _failing_as(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._steps.discard(step)
            hints = self._clock_jump(error) + self._space_left()
            message = f"saving step {step} to {self.directory} failed: {cause_of(error)}. {hints}"
            raise CheckpointError(message + "Steps saved before it are untouched.") from error

    def _clock_jump(self, error: Exception) -> str:
        """A hint where orbax's timer, which runs by the clock, was not to be trusted."""
        passed, really = time.time() - self._begun[0], time.monotonic() - self._begun[1]
        if not isinstance(error, TimeoutError) or passed - really < _JUMP_S:
            return ""
        return f"The system's clock jumped ahead by {passed - really:.0f} s in the meantime; save again. "

    def _space_left(self) -> str:
        """A hint for a full disk: the processes that could write see a timeout only."""
        if is_url(self.directory) or not Path(self.directory).exists():
            return ""
        return f"The disk has {shutil.disk_usage(self.directory).free / 1e6:.1f} MB left. "


# ------------------------------------------------------------------------------------------------------------ the lock


class DirectoryLock:
    """Locks a local directory from ``__init__`` to ``close``; without effect where the file system has no locks.

    Raises:
      CheckpointError: another job has it; says which. Or there is no regular file under the lock's name.
    """

    def __init__(self, directory: Directory) -> None:
        import fcntl  # not on Windows

        self._path = os.path.join(directory, LOCK_FILE)
        self._file: int | None = _opened(self._path)
        _open_locks.add(self)  # before it locks: another thread may fork a child right after
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            writer = os.pread(self._file, _NAME_BYTES, 0).decode(errors="replace").strip() or "it left no name"
            self.close()
            raise CheckpointError(
                f"another job writes checkpoints in {directory}: {writer}. Stop it, or use another directory."
            ) from None
        except OSError:  # this file system has no locks
            pass
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def check_place(self) -> None:
        """Raises a ``CheckpointError`` where the path leads to another file by now than the one that is locked."""
        try:
            held = os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._file or 0))
        except (FileNotFoundError, NotADirectoryError):
            held = False
        if not held:
            raise CheckpointError(
                f"{os.path.dirname(self._path)} is no longer the folder that this job writes and has locked: a link "
                "was moved, or the folder or its lock was removed. Steps saved before are where it led; undo that, or "
                "close this Checkpointer and make another."
            )

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        _open_locks.discard(self)


_open_locks: set[DirectoryLock] = set()


def _opened(path: str) -> int:
    """The lock's file, which must be no link: the file that it leads to would be overwritten."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    raise CheckpointError(f"{path} is a link or no regular file, and the writer's lock would be kept there. Remove it.")


# ----------------------------------------------------------------------------------------------- the end of the program

_writers: dict[str, tuple[weakref.ref[object], Writer]] = {}  # by directory; all that are not closed
_lost: list[str] = []  # at the exit


def _leave_to_the_parent() -> None:
    """A child made by ``fork`` has the locks' open files too. One that outlives its parent must not keep them."""
    for lock in list(_open_locks):
        lock.close()
    _writers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


@cache
def _finish_at_exit() -> None:
    """Has the open writers closed at the end of the program, before the pools of threads that orbax writes with."""
    # Those that are registered last are called first, and orbax has registered its pools when it was imported. Python
    # has no public name for it; atexit's own functions are called when the pools are gone.
    threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _close_all() -> None:
    for _, writer in list(_writers.values()):
        try:
            writer.close()
        except BaseException as error:  # nobody is left to catch it, nor a KeyboardInterrupt
            _lost.append(str(error) if isinstance(error, CheckpointError) else cause_of(error))
    cure = "The program ended before the save was on disk. Call Checkpointer.close, or use it in a with block."
    if _lost and sys.stderr is not None:
        with suppress(OSError, ValueError):  # of a stream that nobody reads, or that is closed
            sys.stderr.write("\n".join([*_lost, cure, ""]))
    if any(writer.hangs for _, writer in _writers.values()):  # Python would wait for its threads.
        leave(1, "; ".join(_lost))


@atexit.register
def _exit_with_an_error() -> None:
    """Makes the exit code 1 where a save was lost. It was registered early, so it is called after most others."""
    if not _lost:
        return
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
