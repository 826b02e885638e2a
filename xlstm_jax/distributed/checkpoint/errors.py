"""Damage to a step, after which a restore takes an older step, told from errors of the system, which end the restore.

Damage is what an intact file cannot give: a file that is missing or cut, values that do not have their checksum. A
process without a free file descriptor, a server that does not answer or a full memory say nothing about the files: a
step that cannot be read for such a reason is neither passed over nor moved away.
"""

import errno
import re
from collections.abc import Callable
from typing import TypeVar

from xlstm_jax.distributed.processes.together import cause_of, fail_together

# Of OSError: what is not there, or is something else; and what wrong lengths and offsets in a damaged file lead to.
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


class OtherVersionError(ValueError):
    """A step is sound, and this version does not read what wrote it."""


class _SystemError(Exception):
    """An error of the system, in this process."""


def is_of_the_system(error: BaseException) -> bool:
    """Whether an error while files were read, or a cause of it, is one of the system, and says nothing about them."""
    if error.__cause__ is not None and is_of_the_system(error.__cause__):
        return True
    text = str(error)
    if isinstance(error, MemoryError | TimeoutError) or "can't start new thread" in text:
        return True
    if isinstance(error, OSError):
        return error.errno is not None and error.errno not in _OF_DAMAGE
    if numbers := _OS_ERROR.findall(text):
        return any(int(number) not in _OF_DAMAGE for number in numbers)
    return bool(_STATUS_OF_SYSTEM.match(text))


def read_together(work: Callable[[], Result], where: str, what: str, timeout_s: float) -> Result:
    """``work``, which reads files, in all processes, as ``what`` says: if it fails in one, all raise.

    Raises:
      OSError: an error of the system in one process, whatever the others report; names ``where``.
      OtherVersionError: else, the step is of another version. CheckpointError: else, damage.
      TimeoutError: a process has not done its work within ``timeout_s`` of this one; says which.
    """

    def read() -> Result:
        try:
            return work()
        except OtherVersionError:
            raise
        except Exception as error:
            kind = _SystemError if is_of_the_system(error) else CheckpointError
            raise kind(cause_of(error)) from error

    try:
        # In rising order: a storage that fails may look like damage in one process and like itself in another.
        return fail_together(read, (CheckpointError, OtherVersionError, _SystemError), what, timeout_s)
    except _SystemError as error:
        raise OSError(
            f"{where} could not be read: {error}. That is an error of the system and no damage, so no older step was "
            "tried. Try again when the system is well; or restore an older step by its number."
        ) from error
