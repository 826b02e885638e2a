"""Files of a publication, in a folder that all processes share.

  model.safetensors.index.json                  index of the newest full version, in the format of Hugging Face:
                                                "weight_map" maps the name of each tensor to the name of its file
  model-00000003-00001-00000.safetensors        first file of process 1 of version 3
  model-00000004.delta.json                     index of version 4, a delta
  model-00000004-00001-00000.delta              changed entries of the tensors of process 1, in safetensors format

A file is written in a hidden folder, ``.model-00000003-00001-00000.safetensors.tmp``, and renamed after the file is on
disk. No file name is used for two versions, and an index is renamed to its name after all files of the version are on
disk. So a reader of an index either finds every file of the version, or gets an error if the version was deleted.

Damage is found by a chain of SHA-256 digests: the index contains a digest of itself and a digest of the header of each
file; the metadata of each header contains the digests of tensors. Every index, also the index of a delta, leads to the
digests of all tensors.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xlstm_jax.distributed.checkpoint.backend import Json
from xlstm_jax.distributed.checkpoint.safetensors_io import (
    DEFAULT_NAME,
    MAX_JSON_BYTES,
    Header,
    hidden_file,
    index_file_of,
    open_regular,
    parse_json,
    read_header,
)
from xlstm_jax.formatting import how_to_install

DIGESTS = "digests"  # key in the metadata of a file; the value is JSON with the digest of each tensor by name
_DELTA_INDEX = re.compile(r"model-(\d{8,})\.delta\.json")
_FILE = re.compile(r"\.?model-(\d{8,})(?:-\d{5,}-\d{5,})?\.(?:safetensors|delta|delta\.json)(?:\.tmp)?")
_BLOCK_BYTES = 1 << 24


class Index(NamedTuple):
    """Index of a version.

    Attributes:
      version: number of the version.
      since: the version that a delta applies to; None for a full version.
      files: SHA-256 of the header of each file, by file name.
      weight_map: file name of each tensor of a full version.
      total_size: bytes of all tensors.
    """

    version: int
    since: int | None
    files: dict[str, str]
    weight_map: dict[str, str]
    total_size: int


def file_name(version: int, process: int, number: int, delta: bool) -> str:
    return f"model-{version:08}-{process:05}-{number:05}.{'delta' if delta else 'safetensors'}"


def index_file(directory: Path, index_version: int | None) -> Path:
    """Returns the path of the index of the delta with the number ``index_version``; None: of the newest full version.

    An index is a JSON file that lists the files of a version.
    """
    if index_version is None:
        return index_file_of(directory / DEFAULT_NAME)
    return directory / f"model-{index_version:08}.delta.json"


def digest_of(array: np.ndarray) -> str:
    """Returns the SHA-256 of dtype, shape and bytes of an array, in hexadecimal digits."""
    digest = hashlib.sha256(f"{array.dtype.name} {array.shape}".encode())
    # Block by block, so that the digest needs only one block of memory beyond the array.
    bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, bits.size, _BLOCK_BYTES):
        digest.update(bits[start : start + _BLOCK_BYTES])
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------- writing


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], digests: Mapping[str, str]) -> str:
    """Writes a safetensors file, atomically; returns the SHA-256 of its header.

    Args:
      path: the file.
      tensors: values by name.
      digests: digests of tensors by name, from ``digest_of``, written to the metadata of the header.
    Raises:
      OSError: the file cannot be written.
      ImportError: the package safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ImportError(f"publications are written with safetensors: {how_to_install('publish')}.") from error
    # The safetensors library first writes a file with a random name beside the target. So the target is in a hidden
    # folder that contains no other file: if the writer is killed, a later publication deletes the folder.
    hidden = hidden_file(path)
    _delete(hidden)
    hidden.mkdir()
    try:
        written = hidden / path.name
        save_file(dict(tensors), written, metadata={"format": "pt", DIGESTS: json.dumps(digests)})
        # The safetensors library makes the file readable by its owner only.
        written.chmod(hidden.stat().st_mode & 0o666)
        _sync(written)
        sha256 = read_header(written).sha256
        os.replace(written, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        _delete(hidden)
    return sha256


def write_index(directory: Path, index: Index) -> None:
    """Writes the index of a version to ``directory``, atomically; readers find the version from then on.

    All files of the version must be in the folder before. The index of a full version replaces the index of the
    previous full version.
    """
    metadata: Json = {"total_size": index.total_size, "version": index.version, "files": index.files}
    content: Json = {"metadata": metadata}
    if index.since is None:
        content["weight_map"] = index.weight_map
    else:
        metadata["since"] = index.since
    metadata["sha256"] = _sha256_of_index(content)
    path = index_file(directory, None if index.since is None else index.version)
    hidden_file(path).write_text(json.dumps(content, indent=2, sort_keys=True))
    _sync(hidden_file(path))
    # The names of the files must be on disk before the name of the index.
    _sync(directory)
    os.replace(hidden_file(path), path)
    _sync(directory)


def delete_before(directory: Path, version: int) -> None:
    """Deletes the files of versions below ``version``, including unfinished files of writers that were killed."""
    for path in directory.iterdir():
        if (match := _FILE.fullmatch(path.name)) and int(match[1]) < version:
            _delete(path)


def _delete(path: Path) -> None:
    """Deletes a file, or a folder with its files; does nothing if the path does not exist."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _sha256_of_index(content: Json) -> str:
    metadata = {key: value for key, value in content["metadata"].items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content | {"metadata": metadata}, sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------------- reading


def read_indices(directory: Path) -> dict[int, Index]:
    """Returns the index of the newest full version, and of each later delta: {version: index}, ascending.

    An index lists the files of a version. {} before the first version.

    Raises:
      ValueError: an index is damaged, or was not written by ``publish``.
    """
    full = index_file(directory, None)
    if not full.exists():
        return {}
    # Deltas are listed before the full index is read: if a trainer publishes a full version in between, this version is
    # newer than the listed deltas, and the deltas are skipped.
    names = [path.name for path in directory.iterdir()]
    indices = [_read_index(full)]
    versions = sorted(int(match[1]) for name in names if (match := _DELTA_INDEX.fullmatch(name)))
    for version in versions:
        if version > indices[0].version:
            with suppress(FileNotFoundError):  # deleted meanwhile by the publication of a newer full version
                indices.append(_read_index(index_file(directory, version)))
    return {index.version: index for index in indices}


def _read_index(path: Path) -> Index:
    with open_regular(path) as file:
        text = file.read(MAX_JSON_BYTES)
    index: Index | None
    try:
        content = parse_json(text)
        metadata = content["metadata"]
        result = Index(
            metadata["version"],
            metadata.get("since"),
            metadata["files"],
            content.get("weight_map", {}),
            metadata["total_size"],
        )
        in_this_folder = all(Path(name).name == name for name in result.files)
        ends = result.since is None or result.since < result.version
        index = result if metadata["sha256"] == _sha256_of_index(content) and in_this_folder and ends else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        index = None
    if index is None:
        raise ValueError(f"{path} is damaged, or no index that `publish` wrote. Publish a full version again.")
    return index


def read_files(directory: Path, index: Index) -> tuple[dict[str, Header], dict[str, str]]:
    """Returns the headers of the files of a version, by file name, and the digests of all tensors, by tensor name.

    The digests are read from the headers. For a delta they include unchanged tensors, of which the files have no
    values.

    Raises:
      FileNotFoundError: a file has been deleted.
      ValueError: a header is damaged.
    """
    headers: dict[str, Header] = {}
    digests: dict[str, str] = {}
    for name, sha256 in index.files.items():
        headers[name] = header = read_header(directory / name)
        if header.sha256 != sha256:
            raise ValueError(f"{directory / name} is damaged: its header is not that of version {index.version}.")
        digests |= json.loads(header.metadata[DIGESTS])
    return headers, digests
