"""Tells damage to a step, after which a restore takes an older step, from errors of the system, which end the restore.

Damage is an error that intact files cannot cause: a file is missing or cut, values do not have their checksum. An error
of the system says nothing about the files: no file descriptor is free, a server does not answer, memory is full. A step
that could not be read because of the system is neither passed over nor moved away.
"""

import errno
import re
from collections.abc import Callable
from typing import TypeVar

from xlstm_jax.distributed.processes.together import cause_of, fail_together

# The numbers of an OSError that mean damage: a file is not there, or is something else; or the system was passed a
# wrong length or offset that stood in a damaged file.
_OF_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EOVERFLOW, errno.EFBIG, errno.ENAMETOOLONG}
_OF_DAMAGE |= {errno.ELOOP}  # links that lead to each other
# TensorStore raises a ValueError and XLA a RuntimeError, whose texts begin with one of Abseil's status codes.
_STATUS_OF_SYSTEM = re.compile(
    r"\s*(RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|ABORTED|CANCELLED)\b"
)
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # as TensorStore writes it
Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read; says which step, and what is wrong with it.

    >>> try:
    ...     Checkpointer("no_such_folder").restore({"step": 0})
    ... except CheckpointError:
    ...     "start anew"
    'start anew'
    """


class _SystemError(Exception):
    """An error of the system, in this process."""


def is_of_the_system(error: BaseException) -> bool:
    """Whether an error of reading files, or a cause of it, is of the system and says nothing about the files."""
    if error.__cause__ is not None and is_of_the_system(error.__cause__):
        return True
    text = str(error)
    if isinstance(error, MemoryError | TimeoutError) or "can't start new thread" in text:
        return True
    if isinstance(error, OSError):
        # An OSError without a number comes from a library, about the content of a file.
        return error.errno is not None and error.errno not in _OF_DAMAGE
    if numbers := _OS_ERROR.findall(text):
        return any(int(number) not in _OF_DAMAGE for number in numbers)
    return bool(_STATUS_OF_SYSTEM.match(text))


def read_together(work: Callable[[], Result], where: str, what: str, timeout_s: float) -> Result:
    """The result of ``work``, which reads files. All processes call this function; if ``work`` fails in one, all raise.

    Raises:
      OSError: an error of the system in one process, whatever the others report; names ``where``.
      CheckpointError: else, damage.
      TimeoutError: a process has not done its work within ``timeout_s`` of this one; says which.
    """

    def read() -> Result:
        try:
            return work()
        except Exception as error:
            kind = _SystemError if is_of_the_system(error) else CheckpointError
            raise kind(cause_of(error)) from error

    try:
        # The last kind of these wins. A storage that fails may look like damage in one process and like an error of the
        # system in another; if damage won, an older step would be taken although the newest is sound.
        return fail_together(read, (CheckpointError, _SystemError), what, timeout_s)
    except _SystemError as error:
        raise OSError(
            f"{where} could not be read: {error}. That is an error of the system and no damage, so no older step was "
            "tried. Try again when the system is well; or restore an older step by its number."
        ) from error
