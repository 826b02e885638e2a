"""The lock of a directory's writer: a second job is refused until the first has ended, however it ends.

The lock is ``flock``'s, which belongs to the open file and not to the process: a POSIX record lock goes as soon as the
process closes any descriptor of the file, that of a copy of the folder, say. On network file systems Linux turns it
into a lock on the server. Children made by ``fork`` get the open file too, so they close it: a data worker that
outlives its parent must not keep the directory locked.
"""

import errno
import fcntl
import os
import stat
import weakref
from typing import Any

from xlstm_jax.distributed.checkpoint.errors import CheckpointError

LOCK_FILE = ".writer"
_NAME_BYTES = 200  # of the writer's name that an error repeats


class DirectoryLock:
    """Locks a local directory from ``__init__`` to ``close``; without effect where the file system has no locks.

    Raises:
      CheckpointError: another job has it; says which. Or there is no regular file under the lock's name.
    """

    def __init__(self, directory: Any) -> None:
        self._path = os.path.join(directory, LOCK_FILE)
        self._file: int | None = _opened(self._path)
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
        _held.add(self)
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


_held: "weakref.WeakSet[DirectoryLock]" = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


def _opened(path: str) -> int:
    """The lock's file, which must be no link: the file that it leads to would be overwritten."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise _no_regular_file(path) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _no_regular_file(path)
    return file


def _no_regular_file(path: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a link or no regular file, and the writer's lock would be kept there. Remove it."
    )
