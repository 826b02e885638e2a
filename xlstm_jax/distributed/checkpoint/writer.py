"""Exclusive writer of a checkpoint directory: a lock against a second job, and completion of the last save at exit.

Only one job, and one ``Checkpointer`` per process of the job, may write a directory. A ``flock`` lock rejects a second
job until the first job has ended, cleanly or not. The lock is bound to the open file instead of the process. (A process
loses a POSIX record lock as soon as it closes any descriptor of the file, for example after copying the folder. On
network file systems Linux turns ``flock`` into a lock on the server.)

A save runs in the background, up to a time limit that includes its commit. If the save fails, the next call raises a
``CheckpointError``. At the end of the program no call follows. So an exit function waits for the save. The function
runs early in the exit: late in the exit, Python 3.12 and newer no longer start the threads that orbax needs. If the
save fails, the exit function reports the lost step on stderr, and the exit code is 1.
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
from xlstm_jax.distributed.processes.collective_errors import cause_of, interruptions_go_on
from xlstm_jax.distributed.processes.exit import leave
from xlstm_jax.private_names import register_atexit

_COMMIT_GRACE_S = 1.0  # added to the limit, so that orbax raises its more detailed timeout error first
_LOOK_EVERY_S = 0.005
LOCK_FILE = ".writer"
_NAME_BYTES = 200  # read from the lock file, which names the job that holds the lock
_JUMP_S = 1.0  # a larger jump of the system clock is reported as the likely cause of a timeout


class Writer:
    """Writer of a checkpoint directory for a ``Checkpointer``: holds the lock, and supervises the running save.

    Args:
      directory: an existing directory.
      backend: storage of the steps; the writer opens and closes the backend.
      owner: the object that saves. While ``owner`` is alive, no second object of this process can write the directory.
      steps: the numbers of saved steps; this set is changed: ``save`` adds a step, and a failed save removes the step.
      locks: whether this process locks the directory for the job.
      timeout_s: time limit of a save in the background, including its commit and the removal of old steps.
    Raises:
      CheckpointError: a second object of this process, or a second job, writes the directory.
    """

    def __init__(
        self, directory: Directory, backend: Backend, owner: object, steps: set[int], timeout_s: float, *, locks: bool
    ) -> None:
        self.directory, self._backend, self._steps, self._timeout_s = directory, backend, steps, timeout_s
        self.is_open = False
        self._lock: DirectoryLock | None = None
        self._saving: int | None = None  # the step being saved
        self._begun = 0.0, 0.0  # start of the save: system clock, monotonic clock
        # Two paths to the same directory must not get two writers.
        self._key = real_path(directory)
        self._take_over(owner)
        if locks and not is_url(directory):
            self._lock = DirectoryLock(directory)
        _finish_at_exit()
        _writers[self._key] = (weakref.ref(owner), self)

    def _take_over(self, owner: object) -> None:
        """Closes an earlier writer of the same directory in this process, if there is one.

        Raises a ``CheckpointError`` if an object other than ``owner`` owns the earlier writer and is alive. An error of
        the earlier writer's last save is raised, too.
        """
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
        """Opens the backend: before the first save, and after steps were moved. Every process must call ``open``."""
        self._backend.open()
        self.is_open = True

    def save(self, step: int, arrays: Arrays, record: Callable[[], Json]) -> None:
        """Starts to save a step; returns when the buffers of ``arrays`` may be donated.

        ``arrays`` are by path. ``record`` is called in the background and returns the JSON record of the step.

        Raises:
          CheckpointError: the save cannot be started.
        """
        self._begun = time.time(), time.monotonic()
        with self._reporting_step(step):
            self._backend.save(step, arrays, record)
        self._saving = step
        self._steps.add(step)

    def wait(self) -> None:
        """Waits until the last save is on disk, up to its time limit; raises a ``CheckpointError`` if the save failed.

        Also checks that the path still leads to the locked directory, as ``check_place`` does.
        """
        if (step := self._saving) is not None:
            with self._reporting_step(step):
                self._wait_for_commit()
                # Reset before `wait` can raise: each failure is reported once, and the next save may try again.
                self._saving = None
                self._backend.wait()
            self._steps.add(step)
        self.check_place()

    @property
    def hangs(self) -> bool:
        """Whether the last save is still running after its time limit, for example in a rename that never returns."""
        return self._saving is not None and time.monotonic() >= self._deadline and self._backend.is_saving()

    def _wait_for_commit(self) -> None:
        # Polls, because the backend's `wait` would never return if a rename hangs.
        while self._backend.is_saving():
            if time.monotonic() >= self._deadline:
                raise TimeoutError(
                    f"it was not on disk within async_timeout_s={self._timeout_s:g} s, and writing, renaming or the "
                    "removal of old steps goes on; if the file system is slow, pass a larger async_timeout_s= to "
                    "Checkpointer"
                )
            time.sleep(_LOOK_EVERY_S)

    @property
    def _deadline(self) -> float:
        return self._begun[1] + self._timeout_s + _COMMIT_GRACE_S

    def check_place(self) -> None:
        """Raises a ``CheckpointError`` if the path of the directory no longer leads to the directory that is locked.

        A link may have been moved. Does nothing without a lock.
        """
        if self._lock is not None:
            self._lock.check_place()

    def check(self) -> None:
        """Raises a ``CheckpointError`` if the last save has ended and has failed; a failure is raised only once.

        Does nothing before the first save, and while a save is running.
        """
        if self._saving is not None and not self._backend.is_saving():
            self.wait()

    def close(self) -> None:
        """Waits for the last save, as ``wait`` does, closes the backend and unlocks the directory.

        The directory is unlocked even if the save has failed, but not if the save is still running after its time
        limit.
        """
        with ExitStack() as at_last:
            # Runs even if `wait` raises: a failed save must not leave the directory locked.
            at_last.callback(self._close_unless_it_hangs)
            self.wait()

    def _close_unless_it_hangs(self) -> None:
        """Closes the backend and unlocks the directory; does nothing if the last save hangs."""
        # A hanging save may still be committed. The directory stays locked, so that no second job writes to it.
        if self.hangs:
            return
        # Callbacks run in reverse order, even after an exception: the backend is closed before the lock is released.
        with ExitStack() as at_last:
            if self._lock is not None:
                at_last.callback(self._lock.close)
            at_last.callback(self._backend.close)
            if self._key in _writers and _writers[self._key][1] is self:
                del _writers[self._key]

    @contextmanager
    def _reporting_step(self, step: int) -> Iterator[None]:
        try:
            with interruptions_go_on():
                yield
        except Exception as error:
            self._steps.discard(step)
            message = f"saving step {step} to {self.directory} failed: {cause_of(error)}. {self._hints(error)}"
            raise CheckpointError(message + "Steps saved before it are untouched.") from error

    def _hints(self, error: Exception) -> str:
        """Returns hints for the error of a failed save, as sentences: a jump of the clock, the free space of the disk.

        The text is "" if there is nothing to say.
        """
        hints = ""
        # Orbax measures its timeout by the system clock.
        jump = time.time() - self._begun[0] - (time.monotonic() - self._begun[1])
        if isinstance(error, TimeoutError) and jump >= _JUMP_S:
            hints = f"The system's clock jumped ahead by {jump:.0f} s in the meantime; save again. "
        # If the disk is full, processes that finished their writes only see a timeout.
        if not is_url(self.directory) and Path(self.directory).exists():
            hints += f"The disk has {shutil.disk_usage(self.directory).free / 1e6:.1f} MB left. "
        return hints


# ------------------------------------------------------------------------------------------------------------ the lock


class DirectoryLock:
    """Lock of a local directory, from ``__init__`` to ``close``; has no effect if the file system has no locks.

    Raises:
      CheckpointError: a second job holds the lock (the error names the job); or the lock file is a link or a folder.
    """

    def __init__(self, directory: Directory) -> None:
        import fcntl  # not on Windows

        self._path = os.path.join(directory, LOCK_FILE)
        self._file: int | None = _open_lock_file(self._path)
        # Registered before locking: a fork in a different thread must find the lock and close the child's copy.
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
        # Written after locking: a rejected job must not overwrite the name of the job that holds the lock.
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def check_place(self) -> None:
        """Raises a ``CheckpointError`` if the path of the lock file has no file, or not the locked file."""
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


def _open_lock_file(path: str) -> int:
    """Opens the lock file for reading and writing, creates a missing file, and returns its file descriptor.

    Raises a ``CheckpointError`` if the path is a link, whose target would be overwritten, or is not a regular file.
    """
    # O_NONBLOCK: opening a pipe or a device of the same name must not block.
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

_writers: dict[str, tuple[weakref.ref[object], Writer]] = {}  # open writers and their owners, by directory
_lost: list[str] = []  # errors of saves that failed at exit


def _close_in_child() -> None:
    """Closes the lock files in a child process after ``fork``, and forgets the writers without closing them."""
    # A `flock` lock is held while any copy of the file is open: a child that outlives its parent would keep the lock.
    for lock in list(_open_locks):
        lock.close()
    _writers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@cache
def _finish_at_exit() -> None:
    """Registers ``_close_all``, which closes open writers, to run at the end of the program.

    The function runs before orbax's thread pools shut down. Only the first call has an effect.
    """
    # The function registered last is called first, and orbax registered its pools at import. Python has no public name
    # for `register_atexit`; functions of `atexit` run too late, after the pools have shut down.
    register_atexit(_close_all)


def _close_all() -> None:
    """Closes all writers at the exit of the process; writes errors of lost saves to stderr.

    Closing waits for running saves. The errors are kept in ``_lost`` for the exit code. If a save hangs, the process
    ends here, with exit code 1.
    """
    cure: list[str] = []
    for _, writer in list(_writers.values()):
        is_late = writer.hangs  # and its error has said so already
        try:
            writer.close()
        except BaseException as error:  # no caller is left to catch an error or a KeyboardInterrupt
            _lost.append(str(error) if isinstance(error, CheckpointError) else cause_of(error))
            if not is_late:
                cure = [
                    "The program ended before the save was on disk. Call Checkpointer.close, or use it in a with block."
                ]
    if _lost and sys.stderr is not None:
        with suppress(OSError, ValueError):  # the stream has no reader, or is closed
            sys.stderr.write("\n".join([*_lost, *cure, ""]))
    if any(writer.hangs for _, writer in _writers.values()):  # Python would wait for the hanging threads
        leave(1, "; ".join(_lost))


@atexit.register
def _exit_with_an_error() -> None:
    """Ends the process with exit code 1 if a save was lost; else does nothing."""
    # Only `os._exit` can change the exit code at this point. It skips the remaining exit functions; this function was
    # registered at import, so most exit functions have already run.
    if not _lost:
        return
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
