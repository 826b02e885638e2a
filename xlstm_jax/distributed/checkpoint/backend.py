"""Interface between a ``Checkpointer`` and the storage library that writes the steps, such as orbax.

  Checkpointer   decides which step is due, checks soundness and tree, and keeps the processes in agreement
  Backend        stores bytes: arrays by path and a record (JSON) per step, in <directory>/<step>/

The library has one backend, ``OrbaxBackend``. For different storage write a class with the methods of ``Backend`` and
pass the class: ``Checkpointer(directory, backend=MyBackend)``. tests/checkpoint/test_backend.py has an example that
stores NumPy files.

Reading a step that is missing or damaged must raise a ``ValueError`` or an ``OSError``. System errors (no memory, no
answer from a server; see ``errors``) may be raised unchanged.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

Directory = Any  # an ``etils.epath.Path``: a local folder, or the URL of an object store
Json = Any  # a value that ``json.loads`` returns
Arrays = Mapping[str, Any]  # by path: a ``jax.Array``, or a NumPy array, equal in all processes, that process 0 writes


class Backend(Protocol):
    """Storage of the steps below a directory.

    Every process creates a backend, and every process must call ``open`` and ``save`` together.
    """

    record_file: str
    """Path of the record's JSON file, relative to the folder of a step."""

    def open(self) -> None:
        """Prepares to write: removes incomplete steps of a killed job, and lists the directory.

        Called before the first save, and again after step folders were moved away. Reading works without ``open``.
        """

    def check_dtypes(self, arrays: Arrays) -> None:
        """Raises a ``TypeError`` if the backend cannot store the dtype of an array; names the path of the array."""

    def save(self, step: int, arrays: Arrays, record: Callable[[], Json]) -> None:
        """Starts to write a step; returns when the buffers of ``arrays`` may be donated.

        Every array has at least one entry. Each process calls ``record`` in the background during the save, and
        process 0 writes the returned JSON value as the record of the step. The commit of a step must be atomic.
        """

    def is_saving(self) -> bool:
        """Whether the last save is still running, including its commit and the removal of old steps."""
        ...

    def wait(self) -> None:
        """Waits until the last save is on disk; raises the error of a failed save."""

    def close(self) -> None:
        """Releases the resources of ``open``; does nothing if ``open`` was not called."""

    def latest_step(self) -> int | None:
        """Returns the number of the newest step, found by ``open`` or saved since; None if no step exists."""

    def steps(self) -> list[int]:
        """Returns the numbers of the committed (completely written) steps, in any order.

        Called only if the directory is a URL: the library lists local folders without the backend.
        """
        ...

    def read_record(self, step: int) -> Json:
        """Returns the record of a step: the JSON value that ``record`` returned during ``save``."""

    def read_arrays(self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """Returns the arrays of a step at the paths of ``wanted``, by path; does not wait for other processes.

        A struct with a ``sharding`` is read shard by shard onto the devices; a struct without ``sharding`` is read in
        full into a NumPy array.
        """
        ...


MakeBackend = Callable[[Directory, int | None, int], Backend]
"""Constructor of a backend: directory, number of steps to keep (None keeps every step), time limit of a save in s."""
