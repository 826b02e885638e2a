"""Lets one job, and one ``Checkpointer`` of its processes, write a directory, and sees its last save to the end.

A second job is refused until the first has ended, however it ends: by a lock of ``flock``, which belongs to the open
file and not to the process. (A process loses a POSIX record lock as soon as it closes any descriptor of the file, after
copying the folder, say. On network file systems Linux turns ``flock`` into a lock on the server.)

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
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from xlstm_jax.distributed.checkpoint.backend import Arrays, Backend, Directory, Json
from xlstm_jax.distributed.checkpoint.errors import CheckpointError
from xlstm_jax.distributed.checkpoint.steps import is_url, real_path
from xlstm_jax.distributed.processes.leaving import leave
from xlstm_jax.distributed.processes.together import cause_of, interruptions_go_on
from xlstm_jax.private_names import register_atexit

_COMMIT_GRACE_S = 1.0  # beyond the limit: orbax's own error, which says more, comes within it
_LOOK_EVERY_S = 0.005
LOCK_FILE = ".writer"
_NAME_BYTES = 200  # of the lock's file, which names the job that holds it
_JUMP_S = 1.0  # if the system's clock jumped further, the jump is taken for the cause of a timeout


class Writer:
    """The directory's lock, and the save that is under way in the backend.

    Args:
      directory: it exists.
      backend: stores the steps; the writer opens and closes it.
      owner: the object that saves. While it lives, no other object of this process can write the directory.
      steps: numbers of saved steps; ``save`` adds a step, and a failure takes it away again.
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
        self._begun = 0.0, 0.0  # when that save began: by the system's clock, and by the monotonic clock
        # Two paths may lead to one directory, and must not get two writers.
        self._key = real_path(directory)
        self._take_over(owner)
        if locks and not is_url(directory):
            self._lock = DirectoryLock(directory)
        _finish_at_exit()
        _writers[self._key] = (weakref.ref(owner), self)

    def _take_over(self, owner: object) -> None:
        """Closes the writer of an owner that is gone; raises if another owner lives."""
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
                # Before an error can come: each failure is told once, and the next save may try again.
                self._saving = None
                self._backend.wait()
            self._steps.add(step)
        self.check_place()

    @property
    def hangs(self) -> bool:
        """Whether the last save goes on beyond its limit, as when a file system does not answer to a rename."""
        return self._saving is not None and time.monotonic() >= self._deadline and self._backend.is_saving()

    def _wait_for_commit(self) -> None:
        # Not by the backend's `wait`: it would wait without end for a rename that hangs.
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
        """Raises a ``CheckpointError`` if the path no longer leads to the locked directory: a link was moved, say."""
        if self._lock is not None:
            self._lock.check_place()

    def check(self) -> None:
        """Raises a ``CheckpointError`` if the last save has failed by now; does not wait."""
        if self._saving is not None and not self._backend.is_saving():
            self.wait()

    def close(self) -> None:
        """Waits for the last save, as ``wait`` does, and unlocks the directory."""
        with ExitStack() as at_last:
            # Also if `wait` raises: a failed save must not leave the directory locked.
            at_last.callback(self._close_unless_it_hangs)
            self.wait()

    def _close_unless_it_hangs(self) -> None:
        """Closes the backend and unlocks the directory; does nothing if the last save hangs."""
        # A save that hangs may still be committed. The directory stays locked, so that no other job writes there.
        if self.hangs:
            return
        # Callbacks run in reverse, each whatever the other raises: the backend is closed before the lock is released.
        with ExitStack() as at_last:
            if self._lock is not None:
                at_last.callback(self._lock.close)
            at_last.callback(self._backend.close)
            if self._key in _writers and _writers[self._key][1] is self:
                del _writers[self._key]

    @contextmanager
    def _failing_as(self, step: int) -> Iterator[None]:
        try:
            with interruptions_go_on():
                yield
        except Exception as error:
            self._steps.discard(step)
            message = f"saving step {step} to {self.directory} failed: {cause_of(error)}. {self._hints(error)}"
            raise CheckpointError(message + "Steps saved before it are untouched.") from error

    def _hints(self, error: Exception) -> str:
        """What may have made a save fail, and does not show in its error."""
        hints = ""
        # Orbax measures its timeout by the system's clock.
        jump = time.time() - self._begun[0] - (time.monotonic() - self._begun[1])
        if isinstance(error, TimeoutError) and jump >= _JUMP_S:
            hints = f"The system's clock jumped ahead by {jump:.0f} s in the meantime; save again. "
        # Of a full disk the processes that could write see a timeout only.
        if not is_url(self.directory) and Path(self.directory).exists():
            hints += f"The disk has {shutil.disk_usage(self.directory).free / 1e6:.1f} MB left. "
        return hints


# ------------------------------------------------------------------------------------------------------------ the lock


class DirectoryLock:
    """Locks a local directory from ``__init__`` to ``close``; has no effect if the file system has no locks.

    Raises:
      CheckpointError: another job has locked it; says which. Or a link or folder has the name of the lock's file.
    """

    def __init__(self, directory: Directory) -> None:
        import fcntl  # not on Windows

        self._path = os.path.join(directory, LOCK_FILE)
        self._file: int | None = _opened(self._path)
        # Before it locks: another thread may fork a child right after, which would inherit the lock for good.
        _open_locks.add(self)
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
        # Once it is locked: a job that was refused must not overwrite the name of the job that holds the lock.
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def check_place(self) -> None:
        """Raises a ``CheckpointError`` if the path leads to another file than the locked file by now."""
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
    """Opens the lock's file; refuses a link, since the file that it leads to would be overwritten."""
    # O_NONBLOCK: a pipe or a device under this name must not be waited for.
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
    """In a child made by ``fork``: closes its copies of the locks' files, and forgets the writers."""
    # A lock of `flock` holds as long as any copy of its file is open: a child that outlives its parent would keep it.
    for lock in list(_open_locks):
        lock.close()
    _writers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


@cache
def _finish_at_exit() -> None:
    """Has the open writers closed at the end of the program, before the pools of threads with which orbax writes."""
    # Functions that are registered last are called first, and orbax registered its pools when it was imported. Python
    # has no public name for `register_atexit`; functions of `atexit` are called too late, when the pools are gone.
    register_atexit(_close_all)


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
    """Makes the exit code 1 if a save was lost."""
    # Python has no other way to change the exit code so late. `os._exit` skips the exit functions that would follow;
    # this function was registered at an import, so that most others have been called.
    if not _lost:
        return
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
