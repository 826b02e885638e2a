"""The interface between a ``Checkpointer`` and the storage library that writes its steps, such as orbax.

  Checkpointer   which step is due, sound, of the same tree; that all processes do and raise the same
  Backend        the bytes: arrays by path and a record (JSON) for each step, in <directory>/<step>/

This library has one backend, ``OrbaxBackend``. To store steps otherwise, write a class with the methods of ``Backend``
and pass it, ``Checkpointer(directory, backend=MyBackend)``; tests/checkpoint/test_backend.py stores NumPy's files so.

A step that is missing or damaged raises a ``ValueError`` or an ``OSError`` when it is read. An error of the system (no
memory, no answer from a server; see ``errors``) may be raised as it comes.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

Directory = Any  # an ``etils.epath.Path``: a local folder, or the URL of an object store
Json = Any  # as ``json.loads`` returns it
Arrays = Mapping[str, Any]  # by path: a ``jax.Array``, or a NumPy array that all processes have and process 0 writes


class Backend(Protocol):
    """Stores the steps below one directory. All processes make one, and call ``open`` and ``save`` together."""

    record_file: str
    """Where in the folder of a step the JSON of its record lies."""

    def open(self) -> None:
        """Prepares to write: removes what a killed job left half written, and looks at the directory.

        Called before the first save, and again when folders of steps were moved away. Reading needs no ``open``.
        """

    def check_dtypes(self, arrays: Arrays) -> None:
        """Raises a ``TypeError`` that names the array whose dtype cannot be stored."""

    def save(self, step: int, arrays: Arrays, record: Callable[[], Json]) -> None:
        """Starts to write a step; returns when the arrays' buffers may be donated.

        No array is empty. ``record`` is called in each process while the save goes on in the background; process 0
        writes the JSON that it returns. A step is there whole or not at all.
        """

    def is_saving(self) -> bool:
        """Whether the last save still goes on, its commit and the removal of old steps included."""
        ...

    def wait(self) -> None:
        """Waits until the last save is on disk; raises whatever made it fail."""

    def close(self) -> None:
        """Ends what ``open`` began, if it was called."""

    def latest_step(self) -> int | None:
        """The newest step, as ``open`` and the saves since have found it."""

    def steps(self) -> list[int]:
        """All committed steps in a directory that is a URL; local folders are listed without the backend."""
        ...

    def read_record(self, step: int) -> Json:
        """The JSON that was written as the record of a step."""

    def read_arrays(self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """The wanted arrays of a step; no process waits for another.

        With a ``sharding`` each device reads its shard; without one the process reads the array whole, into NumPy.
        """
        ...


MakeBackend = Callable[[Directory, int | None, int], Backend]
"""Makes a backend from the directory, the number of steps to keep (None: all), and the seconds that a save may take."""
