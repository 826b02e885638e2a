"""Errors of reading a checkpoint, classified as damage or as system errors.

Damage is an error that intact files cannot cause: a file is missing or truncated, or values do not match their
checksum. After damage, a restore falls back to an older step. A system error says nothing about the files: no file
descriptor is free, a server does not answer, memory is full. A system error ends the restore; the step is neither
skipped nor moved away.
"""

import errno
import re
from collections.abc import Callable
from typing import TypeVar

from xlstm_jax.distributed.processes.collective_errors import cause_of, raise_on_all

# OSError numbers that mean damage: a file is missing or is not a regular file, or a damaged file contained a wrong
# length or offset that was passed to the system.
_OF_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EOVERFLOW, errno.EFBIG, errno.ENAMETOOLONG}
_OF_DAMAGE |= {errno.ELOOP}  # cyclic links
# TensorStore raises a ValueError and XLA a RuntimeError; the texts begin with a status code of Abseil.
_STATUS_OF_SYSTEM = re.compile(
    r"\s*(RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|ABORTED|CANCELLED)\b"
)
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # as TensorStore writes it
Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """Raised if a step cannot be written, or if no step can be restored; names the steps and their problems.

    >>> try:
    ...     Checkpointer("no_such_folder").restore({"step": 0})
    ... except CheckpointError:
    ...     "start anew"
    'start anew'
    """


class _SystemError(Exception):
    """Marks a system error of this process, to distinguish it from damage."""


def is_of_the_system(error: BaseException) -> bool:
    """Returns whether an error of reading files is a system error; False for damage.

    System errors say nothing about the files: a ``MemoryError`` or ``TimeoutError``, a thread that cannot be started,
    an ``OSError`` with a number such as EMFILE (too many open files), a status such as UNAVAILABLE at the start of the
    text. Damage is any other error, such as a missing file or a ``ValueError`` for wrong content. The result is also
    True if the ``__cause__`` of the error, at any depth, is a system error.
    """
    if error.__cause__ is not None and is_of_the_system(error.__cause__):
        return True
    text = str(error)
    if isinstance(error, MemoryError | TimeoutError) or "can't start new thread" in text:
        return True
    if isinstance(error, OSError):
        # An OSError without a number was raised by a library, not by the system, and is about the content of a file.
        return error.errno is not None and error.errno not in _OF_DAMAGE
    if numbers := _OS_ERROR.findall(text):
        return any(int(number) not in _OF_DAMAGE for number in numbers)
    return bool(_STATUS_OF_SYSTEM.match(text))


def read_on_all_processes(work: Callable[[], Result], where: str, action: str, timeout_s: float) -> Result:
    """Calls ``work``, which reads files, and returns its result; raises in every process if any process fails.

    Every process must call this function, and gets the result of its call of ``work``. An error of ``work`` is either a
    system error, by ``is_of_the_system``, or else damage of the files. In errors ``where`` names the source, as "step 3
    in /checkpoints", and ``action`` the work that a process did not finish, as "read step 3".

    Raises:
      OSError: ``work`` had a system error in at least one process; names ``where``. Takes precedence over damage.
      CheckpointError: ``work`` found damage, and no process had a system error.
      TimeoutError: a process did not finish within ``timeout_s`` of this process; names the process.
    """

    def read() -> Result:
        try:
            return work()
        except Exception as error:
            kind = _SystemError if is_of_the_system(error) else CheckpointError
            raise kind(cause_of(error)) from error

    try:
        # The last kind in the tuple takes precedence. Failing storage may look like damage in one process and like a
        # system error in another; with damage first, an older step would be restored although the newest is sound.
        return raise_on_all(read, (CheckpointError, _SystemError), action, timeout_s)
    except _SystemError as error:
        raise OSError(
            f"{where} could not be read: {error}. That is an error of the system and no damage, so no older step was "
            "tried. Try again when the system works, or restore an older step by its number."
        ) from error
