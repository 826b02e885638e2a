"""Follows the versions of a publication: reads the files of a full version, and applies later deltas.

indices         full 3 <- delta 4 <- delta 5 <- delta 6        each delta names the version that it applies to
arrays of 4     have the digests of version 4: deltas 5 and 6 are applied; the result must have the digests of version 6
arrays of 2     refused: arrays of version 3, 4 or 5 are needed
no arrays       version 3 is read, then deltas 4, 5 and 6 are applied
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xlstm_jax.distributed.checkpoint.publication.delta import GAPS, VALUES, WHOLE, applied
from xlstm_jax.distributed.checkpoint.publication.files import Index, digest_of, index_file, read_files, read_indices
from xlstm_jax.distributed.checkpoint.safetensors_io import StoredTensor
from xlstm_jax.formatting import joined, listed


class Published(NamedTuple):
    """A version of a publication; the result of ``apply_publication``.

    Attributes:
      version: number of the version.
      arrays: the tensors of the version, by name.

    >>> Published(3, {"w": np.zeros(1)}).version
    3
    """

    version: int
    arrays: dict[str, np.ndarray]


class VersionNeededError(ValueError):
    """Raised by ``apply_publication`` if the newest version is a delta that cannot be applied to the passed arrays.

    Attributes:
      needed: number of the version that the newest delta applies to.

    >>> VersionNeededError("version 4 applies to version 3", 3).needed
    3
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


def latest_version(directory: str | os.PathLike[str]) -> int:
    """Returns the number of the newest version in a folder that ``publish`` writes; 0 before the first version.

    >>> latest_version("no_such_folder")
    0
    """
    return max(read_indices(Path(directory)), default=0)


def apply_publication(arrays: Mapping[str, np.ndarray], directory: str | os.PathLike[str]) -> Published:
    """Updates arrays to the newest version in a folder that ``publish`` writes; or reads that version from the start.

    Every tensor is checked by its digest before the call returns. The passed arrays are not changed, and are still
    valid after an error.

    Args:
      arrays: tensors by name, as returned by an earlier call; or {} to read every tensor.
      directory: the folder.
    Returns:
      The number of the newest version, and its tensors. Unchanged tensors are the passed arrays, not copies.
    Raises:
      VersionNeededError: the newest version is a delta, and the arrays are of no version that the delta builds on; the
        error names these versions. Call again with {}.
      ValueError: a file is damaged; names the file.
      FileNotFoundError: no version is published; or a file is missing.

    >>> apply_publication({}, "no_such_folder")
    Traceback (most recent call last):
    FileNotFoundError: no version is published in no_such_folder.
    """
    directory = Path(directory)
    indices = read_indices(directory)
    if not indices:
        raise FileNotFoundError(f"no version is published in {directory}.")
    newest = max(indices)
    with suppress(FileNotFoundError):
        return Published(newest, Chain(directory, indices, newest).arrays_from(arrays))
    # A file is missing: the trainer has published a newer version meanwhile, and has deleted the files of this version;
    # or the file is lost, and the second attempt below raises the error.
    if latest_version(directory) != newest:
        return apply_publication(arrays, directory)
    return Published(newest, Chain(directory, indices, newest).arrays_from(arrays))


class _Step(NamedTuple):
    """A version of a chain: its index, the digests of all tensors, and the tensors in its files."""

    in_index: Index
    digests: dict[str, str]
    stored: dict[str, StoredTensor]

    def values(self, name: str) -> np.ndarray:
        tensor = self.stored[name]
        return tensor.values().view(tensor.dtype)

    def delta_of(self, name: str) -> dict[str, np.ndarray]:
        return {key: self.values(key) for kind in (GAPS, VALUES, WHOLE) if (key := kind + name) in self.stored}


class Chain:
    """A full version and the deltas that lead from it to a newer version.

    Args:
      directory: the folder of the publication.
      indices: the indices of the versions in the folder, by version.
      version: the newest version of the chain.
    Raises:
      FileNotFoundError: an index or a file of the chain is missing.
      ValueError: a file of the chain is damaged.
    """

    def __init__(self, directory: Path, indices: Mapping[int, Index], version: int) -> None:
        self._directory = directory
        self._steps: list[_Step] = []
        since: int | None = version
        while since is not None:
            if since not in indices:
                raise FileNotFoundError(
                    f"{index_file(directory, since)} is missing, on which version {version} builds. Publish a full "
                    "version."
                )
            headers, digests = read_files(directory, indices[since])
            stored = {name: tensor for header in headers.values() for name, tensor in header.tensors.items()}
            self._steps.insert(0, _Step(indices[since], digests, stored))
            since = indices[since].since

    @property
    def version(self) -> int:
        return self._steps[-1].in_index.version

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the tensors of the chain's newest version, by name: SHA-256 of dtype, shape and bytes."""
        return self._steps[-1].digests

    def array(self, name: str) -> np.ndarray:
        """Returns the values of the tensor ``name`` in the newest version of the chain (a full version and its deltas).

        Raises:
          ValueError: the SHA-256 of the tensor in the files is not the digest that the files give for the tensor.
        """
        return self._checked(name, self._from(0, name, None))

    def arrays_from(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the tensors of the newest version of the chain, by name.

        ``arrays`` are the tensors of a version of the chain, or {} to start at the full version. Unchanged tensors are
        returned as passed.

        Raises:
          VersionNeededError: ``arrays`` are of no version of the chain, and the newest version is a delta.
          ValueError: a tensor in the files is damaged.
        """
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        digests = {name: digest_of(array) for name, array in arrays.items()}
        start = self._steps_in(digests)
        result = {}
        for name, digest in self.digests.items():
            array = self._from(start, name, arrays.get(name))
            same = array is arrays.get(name) and digests.get(name) == digest
            result[name] = arrays[name] if same else self._checked(name, array)
        return result

    def _steps_in(self, digests: Mapping[str, str]) -> int:
        """Returns the position in the chain of the first version to apply to arrays with ``digests``, by tensor name.

        If the arrays are of version i of the chain (the full version is 0), the position is i + 1: the length of the
        chain for the newest version. Otherwise 0, the full version is read: for no arrays, and for a chain without
        deltas.

        Raises a ``VersionNeededError`` for arrays of no version of a chain with deltas.
        """
        for position in reversed(range(len(self._steps))):
            if digests == self._steps[position].digests:
                return position + 1
        # A full version is read without an earlier version, so the passed arrays do not matter.
        if not digests or len(self._steps) == 1:
            return 0
        needed = [step.in_index.version for step in self._steps[:-1]]
        raise VersionNeededError(
            f"version {self.version} in {self._directory} applies to version {needed[-1]}, and the arrays are of no "
            f"version that leads to it: {joined(list(map(str, needed)), 'or')}. Pass the arrays of one of these, or "
            "{} to read all of them.",
            needed[-1],
        )

    def _from(self, start: int, name: str, array: np.ndarray | None) -> np.ndarray | None:
        for step in self._steps[start:]:
            if step.in_index.since is None:
                array = np.array(step.values(name)) if name in step.stored else None
            else:
                array = applied(name, step.delta_of(name), array)
        return array

    def _checked(self, name: str, array: np.ndarray | None) -> np.ndarray:
        if array is None or digest_of(array) != self.digests[name]:
            keys = [name, *[kind + name for kind in (GAPS, VALUES, WHOLE)]]
            files = {step.stored[key].file.name for step in self._steps for key in keys if key in step.stored}
            raise ValueError(
                f"'{name}' of version {self.version} in {self._directory} is damaged, in {listed(sorted(files))}. "
                "Publish a full version again."
            )
        return array
