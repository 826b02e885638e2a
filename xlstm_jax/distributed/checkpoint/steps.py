"""Which steps a directory holds, and which of its folders are not the steps that their names say.

  30/              a step, as far as its name and the number in its record say
  30/, empty       step 30 is lost, and so it is where 30 is a link that leads to no folder
  5/, of step 30   a folder that was renamed, copied or linked: step 30, if no other folder holds it, is not found

A restore of the newest step must not go on from step 20 in silence because step 30 has another name. So the number in
each record is read, whatever the folder is called. Object stores rename no folders; there the names are enough.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from xlstm_jax.distributed.checkpoint.backend import Backend
from xlstm_jax.distributed.checkpoint.directory import is_url
from xlstm_jax.distributed.checkpoint.record import check_number, saved_as

EMPTY = "its folder is empty"
NO_FOLDER = "it is a link that leads to no folder"


class StepFolder(NamedTuple):
    """A folder: ``problem`` is why it is no step to restore, "" where nothing is known against it.

    ``saved_as`` is the number of the step in its record; without one, the number that is its name.
    """

    saved_as: int
    problem: str = ""

    @property
    def may_be_read(self) -> bool:
        return not self.problem


def steps_in(directory: Any, backend: Backend, *, read_records: bool) -> dict[int, StepFolder]:
    """The folders that are called like a committed step, by that number; tells renamed ones by their records."""
    if is_url(directory):
        return dict(_listed(directory, backend.steps()))
    with suppress(FileNotFoundError, NotADirectoryError):
        numbers = [int(name) for name in os.listdir(directory) if _is_number(name)]
        return dict(_listed(directory, numbers, backend.record_file if read_records else ""))
    return {}


def _is_number(name: str) -> bool:
    return name.isdecimal() and name == str(int(name))


def _listed(directory: Any, numbers: list[int], record_file: str = "") -> Iterator[tuple[int, StepFolder]]:
    """Reads the record of each step where that file is named."""
    for number in numbers:
        folder = directory / str(number)
        if not is_url(directory) and not os.path.isdir(folder):
            if os.path.islink(folder):
                yield number, StepFolder(number, NO_FOLDER)
            continue
        with suppress(FileNotFoundError):  # a job that writes beside this one has removed it by now
            if not any(folder.iterdir()):
                yield number, StepFolder(number, EMPTY)
            else:
                yield number, _by_record(Path(folder) / record_file, number) if record_file else StepFolder(number)


def _by_record(path: Path, name: int) -> StepFolder:
    """What the record says of the step's number; what else is wrong with it a restore finds out."""
    number = None
    with suppress(OSError, ValueError, RecursionError):
        number = saved_as(json.loads(path.read_bytes())) if path.is_file() else None
    if number is None:
        return StepFolder(name)
    try:
        check_number(number, name)
    except ValueError as error:
        return StepFolder(number, str(error))
    return StepFolder(name)


def newest(steps: Mapping[int, StepFolder]) -> int | None:
    return max((number for number, found in steps.items() if found.may_be_read), default=None)


def lost_after(steps: Mapping[int, StepFolder], number: int) -> dict[int, str]:
    """What is wrong with the folders of steps later than ``number``, by their names."""
    problems = {name: found.problem for name, found in steps.items() if max(name, found.saved_as) > number}
    return {name: problem for name, problem in problems.items() if problem}


def clear(directory: Any, backend: Backend, damaged: set[int]) -> None:
    """Removes empty folders, and moves out of the way the ``damaged`` and links that lead nowhere."""
    for number, found in steps_in(directory, backend, read_records=False).items():
        folder = directory / str(number)
        if found.problem == EMPTY and not os.path.islink(folder):
            folder.rmdir()
        elif found.problem or number in damaged:
            folder.rename(_free_name(directory / f"{number}.damaged"))


def _free_name(path: Any) -> Any:
    names = [path.name, *(f"{path.name}-{i}" for i in range(2, 1000))]
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))
