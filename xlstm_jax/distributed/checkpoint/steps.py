"""Listing of the steps in a checkpoint directory: a local folder or the URL of an object store.

  30/              step 30, if the record in the folder has the number 30
  30/, empty       step 30 is lost; likewise if 30 is a broken link
  5/, record 30    a folder that was renamed, copied or linked; step 30 is lost unless a folder 30/ exists as well

A restore of the newest step must not silently continue from step 20 because the folder of step 30 was renamed. So the
number in each record is compared with the folder name. An object store cannot rename folders, so there only folder
names are read.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from xlstm_jax.distributed.checkpoint.backend import Backend, Directory
from xlstm_jax.distributed.checkpoint.record import check_number, saved_as

EMPTY = "its folder is empty"
NO_FOLDER = "it is a link that leads to no folder"


def is_url(directory: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(directory)


def real_path(directory: str | os.PathLike[str]) -> str:
    """Returns the path of a directory with links resolved; a URL is returned unchanged."""
    return os.fspath(directory) if is_url(directory) else os.path.realpath(directory)


def directory_path(directory: str | os.PathLike[str]) -> Directory:
    """Converts a directory to an ``etils.epath.Path``, the path class of orbax; a local path becomes absolute.

    Creates no folder.

    Raises:
      ValueError: the directory is ""; the scheme of a URL is unknown; a link in a local path leads nowhere; or a local
        path is, or is below, a file.
    """
    from etils import epath  # a dependency of orbax; untyped

    if not os.fspath(directory):
        raise ValueError("the directory of the checkpoints is ''; name a folder ('.' for the working directory).")
    if is_url(directory):
        try:
            return epath.Path(directory)
        except KeyError as error:
            known = "gs://, s3:// and az://"
            raise ValueError(
                f"the directory {os.fspath(directory)!r} has the scheme {error.args[0]!r}, which orbax does not know. "
                f"It takes {known}; name a local folder by its path."
            ) from None
    path = Path(os.path.abspath(directory))
    for link in (path, *path.parents):
        # An unmounted disk leaves a broken link. The run would find no steps, and silently start from scratch.
        if link.is_symlink() and not link.exists():
            raise ValueError(
                f"the directory {path} is not to be found: {link} is a link to {os.readlink(link)}, which leads "
                "nowhere. Mount what it leads to, or mend or remove the link."
            )
    inside = next(parent for parent in (path, *path.parents) if parent.exists())
    if not inside.is_dir():
        where = "is" if inside == path else f"lies beneath {inside}, which is"
        raise ValueError(f"the directory {path} {where} a file, and can hold no checkpoints. Name another folder.")
    return epath.Path(path)


class StepFolder(NamedTuple):
    """Folder of a step.

    Attributes:
      saved_as: the step number in the record; the number in the folder name if the record cannot be read.
      problem: the reason why the step must not be restored; "" without a known problem.
    """

    saved_as: int
    problem: str = ""


def steps_in(directory: Directory, backend: Backend, *, read_records: bool) -> dict[int, StepFolder]:
    """Returns the step folders in a checkpoint directory, by the number in the folder name; {} without a directory.

    Other names, such as "30.damaged", are skipped. An empty folder, or a link that leads nowhere, has a ``problem``.
    With ``read_records`` the record in each folder is read, too: if the step number in the record differs from the
    name, ``problem`` says so, and ``saved_as`` is the number in the record. For a URL ``backend`` lists the numbers,
    and no record is read.
    """
    if is_url(directory):
        return {number: StepFolder(number) for number in backend.steps()}
    folders = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(directory):
            # The library never writes a name such as "007"; an incomplete step has a suffix.
            if name.isdecimal() and name == str(int(name)):
                folders[int(name)] = _folder(Path(directory, name), backend.record_file if read_records else "")
    return {number: folder for number, folder in folders.items() if folder is not None}


def _folder(path: Path, record_file: str) -> StepFolder | None:
    """Returns the ``StepFolder`` of a local folder whose name is a step number: number in the record, and a problem.

    The problem is a text if the folder is empty, is a broken link, or has a record with a different step number.
    Returns None if ``path`` is a file or does not exist (a concurrent job may remove the folder).

    Args:
      path: the folder, as ``checkpoints/30``.
      record_file: path of the JSON record within the folder. With "" no record is read, and ``saved_as`` is the number
        in the name; likewise if the record cannot be read.
    """
    number, record = int(path.name), path / record_file  # the folder itself if record_file is ""
    if not os.path.isdir(path):
        return StepFolder(number, NO_FOLDER) if path.is_symlink() else None
    try:
        if not any(path.iterdir()):
            return StepFolder(number, EMPTY)
    except FileNotFoundError:
        return None
    saved = number
    # An unreadable record is ignored here: a restore reads the record again and classifies damage and system errors.
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(record.read_bytes()) if record.is_file() else None
        saved = number if (recorded := saved_as(content)) is None else recorded
    try:
        check_number(saved, number)
    except ValueError as error:
        return StepFolder(saved, str(error))
    return StepFolder(saved)


def check_file(path: Directory) -> None:
    """Raises a ``ValueError`` if a local path exists and is neither a file nor a folder."""
    # Opening a pipe would wait for a writer forever, and reading a device may never end.
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"{path} is no regular file.")


def check_files(folder: Directory) -> None:
    """Raises a ``ValueError`` if a local step folder contains, at any depth, a pipe, a device or a socket."""
    for parent, _, names in os.walk(folder):
        for name in names:
            check_file(os.path.join(parent, name))


def newest(steps: Mapping[int, StepFolder]) -> int | None:
    return max((number for number, folder in steps.items() if not folder.problem), default=None)


def lost_after(steps: Mapping[int, StepFolder], number: int) -> dict[int, str]:
    """Returns the problem, as text, of each step folder above ``number`` that has a problem, by the number in its name.

    A folder is above ``number`` if its name or the step number in its record is greater. ``steps`` is from
    ``steps_in``.
    """
    problems = {name: folder.problem for name, folder in steps.items() if max(name, folder.saved_as) > number}
    return {name: problem for name, problem in problems.items() if problem}


def clear(directory: Directory, backend: Backend, damaged: set[int]) -> None:
    """Prepares a directory for writing: removes empty step folders, and renames damaged steps and broken links.

    Step 30 is renamed to ``30.damaged``, or to ``30.damaged-2`` and so on if this name exists. ``damaged`` has the
    numbers of the steps that a restore has found damaged.
    """
    # Renamed, not removed: damage may be repaired by hand, and mounting a disk repairs a link.
    for number, step_folder in steps_in(directory, backend, read_records=False).items():
        folder = directory / str(number)
        if step_folder.problem == EMPTY and not os.path.islink(folder):
            folder.rmdir()
        elif step_folder.problem or number in damaged:
            free = (directory / f"{number}.damaged{count}" for count in ("", *(f"-{i}" for i in range(2, 1000))))
            folder.rename(next(path for path in free if not os.path.lexists(path)))
