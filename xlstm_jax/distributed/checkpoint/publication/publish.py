"""Publishes the weights of a trainer: every process writes its share of the tensors, then process 0 the index.

every process   receives its tensors one by one, and writes a file after every max_file_bytes of tensors
process 0       writes the index after the files of every process are on disk; the index publishes the version
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint.checkpointer import at_least_1
from xlstm_jax.distributed.checkpoint.publication.delta import encoded
from xlstm_jax.distributed.checkpoint.publication.files import (
    Index,
    delete_before,
    digest_of,
    file_name,
    read_indices,
    write_index,
    write_tensors,
)
from xlstm_jax.distributed.checkpoint.publication.follow import Chain
from xlstm_jax.distributed.checkpoint.publication.layout import Layout, Tensor, tensors_in_layout
from xlstm_jax.distributed.checkpoint.publication.writers import Source, assigned, received_in_rounds
from xlstm_jax.distributed.checkpoint.safetensors_io import (
    DEFAULT_MAX_FILE_BYTES,
    DEFAULT_NAME,
    TensorToWrite,
    grouped_by_bytes,
    tensors_to_write,
)
from xlstm_jax.distributed.checkpoint.tensor_names import NameMap
from xlstm_jax.distributed.processes.collective_errors import allgather_text, raise_on_all
from xlstm_jax.formatting import joined

FILES_OF_A_PROCESS = 8  # default number of files of a full version; a process has one file at a time in memory
MIN_SHARE_BYTES = 2**25  # smaller files would be too many to open


def publish(
    params: PyTree,
    directory: str | os.PathLike[str],
    *,
    since: int | None = None,
    names: NameMap | None = None,
    layout: Layout = (),
    max_file_bytes: int | None = None,
) -> int:
    """Writes parameters as the next version of a publication; every process writes its part. Returns the version.

    Every process must call this function. With ``since`` a delta is written: only the entries whose bits differ from
    version ``since``, for readers that call ``apply_publication``. Each process reads its tensors of version ``since``
    from the folder.

    Tensors are assigned to processes by bytes, in about equal shares. Each tensor is sent, unsharded, only to the
    process that writes the tensor. A process has in memory at most the tensors of one file (``max_file_bytes``) and one
    further tensor. A full version can be read by any reader of safetensors files with an index; a new full version
    replaces the previous full version atomically. Publishing a full version deletes old files, except the files of the
    previous full version and of the deltas after it, which readers may still be reading.

    Args:
      params: a pytree of arrays, boxed or not, on any mesh. The default tensor name is the path of the leaf.
      directory: a folder shared by the processes, for this publication alone.
      since: a version in the folder, not older than the newest full version. None writes a full version.
      names: a map from path patterns to tensor names and layouts, as in ``export_safetensors``; None: default names.
      layout: rules by which tensors are joined, divided, stacked, unstacked or repeated, under the names that ``names``
        gives: ``Joined``, ``Divided``, ``Stacked``, ``Unstacked``, ``Repeated``.
      max_file_bytes: maximum size of the files of a full version; a larger tensor gets a separate file. None: an eighth
        of the largest process's bytes, but not below 32 MiB and not above 5 GB. A delta has one file per process.
    Raises:
      FileExistsError: the folder has a file ``model.safetensors``, which readers would read instead of the index.
      TypeError: the format does not support the dtype of a leaf; or ``max_file_bytes`` is not an integer.
      ValueError: a leaf has an invalid name, no pattern in ``names`` matches a leaf, or two leaves have the same name;
        the folder does not have the version ``since``; the layout does not fit the tensors; or a file in the folder
        is damaged, or of another program; or ``max_file_bytes`` is below 1.
      OSError: a file cannot be written; the previous version stays published.
      ImportError: the package safetensors is not installed.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> publish({"kernel": np.ones((2, 3))}, folder), publish({"kernel": np.zeros((2, 3))}, folder)
    (1, 2)
    """
    if max_file_bytes is not None:
        max_file_bytes = at_least_1("max_file_bytes", max_file_bytes)
    directory = Path(directory)
    sources = tensors_to_write(params, names)
    tensors = tensors_in_layout(sources, layout)
    before = _from_process_0(lambda: _newest(directory, since))
    version = before["newest"] + 1
    nbytes = {name: tensor.nbytes for name, tensor in tensors.items()}
    by_process = assigned(nbytes, jax.process_count())
    if max_file_bytes is None:
        most = max(sum(nbytes[name] for name in some) for some in by_process)
        max_file_bytes = min(max(MIN_SHARE_BYTES, most // FILES_OF_A_PROCESS), DEFAULT_MAX_FILE_BYTES)
    files = [_files(version, process, some, tensors, max_file_bytes) for process, some in enumerate(by_process)]

    def write() -> dict[str, str]:
        arrays = _received(by_process, tensors, sources)
        try:
            if since is None:
                return _write_files(directory, files[jax.process_index()], arrays)
            return _write_delta(directory, version, since, arrays)
        finally:
            # Other processes still need the tensors that this process sends, even if a write has failed here.
            for _ in arrays:
                pass

    written = raise_on_all(write, (OSError, ImportError, ValueError))
    headers: dict[str, str] = {}
    for text in allgather_text(json.dumps(written), "publish"):
        headers |= json.loads(text)

    def commit_version() -> None:
        if jax.process_index() == 0:
            full = since is None
            weight_map = {name: file for some in files for file, names in some.items() for name in names}
            total_size = sum(nbytes.values())
            write_index(directory, Index(version, since, headers, weight_map if full else {}, total_size))
            if full:
                delete_before(directory, before["full"])

    raise_on_all(commit_version, OSError)
    return version


def _newest(directory: Path, since: int | None) -> dict[str, int]:
    """Returns ``{"newest": n, "full": m}`` for a folder: the numbers of the newest version and newest full version.

    Both are 0 in an empty folder. Creates a missing folder.

    Raises:
      FileExistsError: the folder has a file ``model.safetensors``.
      ValueError: version ``since`` is neither the newest full version nor a later delta; or an index is damaged.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if (single := directory / DEFAULT_NAME).exists():
        raise FileExistsError(f"{single} exists, and readers would take it for the publication; choose another folder.")
    versions = read_indices(directory)
    if since is not None and since not in versions:
        versions_text = f"the versions {joined(list(map(str, versions)))}" if versions else "no version"
        raise ValueError(
            f"since={since!r} cannot be built on: {directory} has {versions_text}. Publish a full version, without "
            "since."
        )
    return {"newest": max(versions, default=0), "full": min(versions, default=0)}


def _from_process_0(work: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Runs ``work`` in process 0 and returns its result in every process; an error is raised in every process.

    Every process must call this function. Other processes may see an older state of the folder, and so do not run
    ``work``.
    """
    errors = ValueError, FileExistsError, OSError
    result = raise_on_all(lambda: work() if jax.process_index() == 0 else {}, errors, "publish")
    return json.loads(allgather_text(json.dumps(result), "publish")[0])


def _files(
    version: int, process: int, names: list[str], tensors: Mapping[str, Tensor], max_file_bytes: int
) -> dict[str, list[str]]:
    """Divides the tensors ``names`` of a process into files of a full version; returns the names in each file.

    The result is by file name. Tensors keep their order. A file has at most ``max_file_bytes`` of values, or a single
    larger tensor. ``tensors`` has the description of each tensor, by name. ``version`` and ``process`` are parts of the
    file names.
    """
    groups = grouped_by_bytes({name: tensors[name].nbytes for name in names}, max_file_bytes)
    return {file_name(version, process, number, delta=False): group for number, group in enumerate(groups)}


def _received(
    by_process: list[list[str]], tensors: Mapping[str, Tensor], sources: Mapping[str, TensorToWrite]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, values) of each tensor that this process writes, unsharded, in the layout of the file.

    The order is that of ``by_process`` for this process. Every process must exhaust the iterator, which runs
    collectives.

    Args:
      by_process: for each process the names of the tensors that the process writes, in the order of writing.
      tensors: for each name the tensor of the file, described as parts of the model's tensors.
      sources: the model's tensors, by name.
    """
    to_send = [
        [(source, Source(*sources[source].to_gather())) for name in some for source in tensors[name].sources()]
        for some in by_process
    ]
    received = received_in_rounds(to_send)
    arrays = (sources[name].place.to_tensor(sources[name].read(array)) for name, array in received)
    for name in by_process[jax.process_index()]:
        yield name, np.ascontiguousarray(tensors[name].assembled(arrays)).reshape(tensors[name].shape)
    for _ in arrays:  # rounds in which only other processes receive tensors
        pass


def _write_files(
    directory: Path, files: Mapping[str, list[str]], arrays: Iterator[tuple[str, np.ndarray]]
) -> dict[str, str]:
    """Writes this process's files of a full version; returns the SHA-256 of each file's header, by file name.

    Args:
      directory: the folder of the publication.
      files: the names of the tensors of each file, by file name.
      arrays: (name, values) of the tensors, in the order of ``files``.
    """
    written = {}
    for file, names in files.items():
        group = dict(next(arrays) for _ in names)
        digests = {name: digest_of(array) for name, array in group.items()}
        written[file] = write_tensors(directory / file, group, digests)
        del group  # before the tensors of the next file arrive
    return written


def _write_delta(directory: Path, version: int, since: int, arrays: Iterator[tuple[str, np.ndarray]]) -> dict[str, str]:
    """Writes the entries of this process's tensors that have changed since version ``since``, as a single file.

    Args:
      directory: the folder of the publication, which also has the files of version ``since``.
      version: number of the new version.
      since: number of the version to compare with.
      arrays: (name, values) of each tensor that this process writes.
    Returns:
      A dict with one entry: the SHA-256 of the file's header, by file name.
    """
    base = Chain(directory, read_indices(directory), since)
    delta: dict[str, np.ndarray] = {}
    digests: dict[str, str] = {}
    for name, array in arrays:
        digests[name] = digest_of(array)
        if digests[name] != base.digests.get(name):
            before = base.array(name) if name in base.digests else None
            fits = before is not None and (before.shape, before.dtype) == (array.shape, array.dtype)
            delta |= encoded(name, before if fits else None, array)
    file = file_name(version, jax.process_index(), 0, delta=True)
    return {file: write_tensors(directory / file, delta, digests)}
