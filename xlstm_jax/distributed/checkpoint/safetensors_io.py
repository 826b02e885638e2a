"""Parameters as safetensors files, the format in which models are passed on.

  export   one leaf after the other:  gather to the host of the first process -> write       a/b/kernel
  import   every device's share of every leaf:  read those bytes -> place

A file is a length (8 bytes, little-endian), a JSON header of that length that gives each tensor its dtype, shape and
place, and the values. What is larger than a limit is cut into several files, with an index of which tensor is where, as
Hugging Face names them::

  model.safetensors      or      model-00001-of-00002.safetensors, model-00002-of-00002.safetensors
                                 model.safetensors.index.json

Files are written under other names and renamed at the end, the one that makes the model complete last. They are written
here and not by the safetensors library, because that wants all tensors of a file in memory at once, and has no float8
for NumPy.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint.record import bare_leaves, boxed_as, check_placed, is_local
from xlstm_jax.distributed.data_parallel.boxes import map_leaves_with_path
from xlstm_jax.distributed.processes.together import fail_together
from xlstm_jax.distributed.wording import listed

DEFAULT_MAX_FILE_BYTES = 5 * 10**9
DEFAULT_NAME = "model.safetensors"
SUFFIX = ".safetensors"
_ALIGNMENT = 8  # of the values, which begin behind the header

_CODES = {
    "bool": "BOOL",
    **{f"{kind}int{bits}": f"{code}{bits}" for kind, code in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)},
    **{"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"},
    **{"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"},
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class _Tensor(NamedTuple):
    """Where a tensor lies."""

    file: Path
    offset: int  # from the beginning of the file
    shape: tuple[int, ...]
    dtype: np.dtype

    def values(self) -> np.ndarray:
        """The values, of which only those are read that are indexed."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)


def export_safetensors(
    params: PyTree, path: str | os.PathLike[str], *, max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
) -> None:
    """Writes parameters to safetensors files, whole, under the names that they have in the plain model.

    One leaf at a time is whole on the host of the first process, which writes; all processes must call it. (With
    several processes it is whole for a moment on every device, too, since that is how it gets there.)

    Args:
      params: a pytree of arrays, boxed or not, on any mesh. A tensor is called by its path, as ``blocks/mlp/kernel``.
      path: a folder, where ``model.safetensors`` is made, or a file ending in ``.safetensors``.
      max_file_bytes: values of more bytes go to several files, ``model-00001-of-00003.safetensors`` and so on, with an
        index. A leaf is never cut: a larger one has a file of its own.
    Raises:
      FileExistsError: there is such a model already.
      TypeError: a leaf has a dtype that the format does not know; names it.
      OSError: a file cannot be written; no model is there then.
    """
    leaves = bare_leaves(params)
    for name, leaf in leaves.items():
        if str(getattr(leaf, "dtype", type(leaf).__name__)) not in _CODES:
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise TypeError(f"'{name}' of type {kind} cannot be written to safetensors; it takes {sorted(_CODES)}.")
    target = _target(path)
    fail_together(lambda: _check_free(target), FileExistsError)
    files = _files(leaves, target, max_file_bytes)
    with _Writer(active=jax.process_index() == 0) as writer:
        for file, names in files.items():
            writer.begin(_hidden(file), {name: leaves[name] for name in names})
            for name in names:
                writer.write(_whole(leaves[name]))
        writer.finish(files, _index(files, leaves) if len(files) > 1 else None, _index_file(target))
        fail_together(writer.check, OSError)


def _target(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path if path.suffix == SUFFIX else path / DEFAULT_NAME


def _index_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.index.json")


def _hidden(file: Path) -> Path:
    return file.with_name(f".{file.name}.tmp")


def _check_free(target: Path) -> None:
    for file in (target, _index_file(target)):
        if file.exists():
            raise FileExistsError(f"{file} exists; remove it with its files, or choose another path")


def _files(leaves: Mapping[str, Any], target: Path, max_file_bytes: int) -> dict[Path, list[str]]:
    """Which tensors go to which file: in the order of the tree, a new file where one would be too large."""
    groups: list[list[str]] = []
    room = 0
    for name, leaf in leaves.items():
        if not groups or leaf.nbytes > room:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(name)
        room -= leaf.nbytes
    for names in groups:  # wide dtypes first, so that all are aligned
        names.sort(key=lambda name: (-leaves[name].dtype.itemsize, name))
    if len(groups) == 1:
        return {target: groups[0]}
    stem, count = target.name.removesuffix(SUFFIX), len(groups)
    return {target.with_name(f"{stem}-{i:05}-of-{count:05}{SUFFIX}"): names for i, names in enumerate(groups, start=1)}


def _index(files: Mapping[Path, list[str]], leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(leaf.nbytes for leaf in leaves.values())},
        "weight_map": {name: file.name for file, names in files.items() for name in names},
    }


def _header(leaves: Mapping[str, Any]) -> bytes:
    entries, end = {}, 0
    for name, leaf in leaves.items():
        begin, end = end, end + leaf.nbytes
        code = _CODES[str(leaf.dtype)]
        entries[name] = {"dtype": code, "shape": list(leaf.shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _whole(leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array):
        return np.ascontiguousarray(leaf)
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return np.ascontiguousarray(multihost_utils.process_allgather(leaf, tiled=True))
    # An array keeps what NumPy has read of it. This one goes away, while the leaf stays, and with it would the model.
    shards = [shard.data for shard in leaf.addressable_shards]
    return np.ascontiguousarray(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards))


class _Writer:
    """Writes on one process. An error is kept until ``check``: other processes count on this one for every leaf."""

    def __init__(self, active: bool) -> None:
        self.active, self.error, self.file = active, None, None
        self.begun: list[Path] = []

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *failure: Any) -> None:
        if self.file is not None:
            self.file.close()
        for path in self.begun:  # what was not renamed
            path.unlink(missing_ok=True)

    def begin(self, path: Path, leaves: Mapping[str, Any]) -> None:
        self._try(lambda: self._open(path, _header(leaves)))

    def write(self, values: np.ndarray) -> None:
        self._try(lambda: self.file.write(values.reshape(-1).view(np.uint8).data))

    def finish(self, files: Mapping[Path, Any], index: dict[str, Any] | None, index_file: Path) -> None:
        """Renames what was written; the index comes last."""
        if index is not None:
            self._try(lambda: self._open(_hidden(index_file), json.dumps(index, indent=2, sort_keys=True).encode()))
        self._try(self._close)
        for file in [*files, *([index_file] if index is not None else [])]:
            self._try(lambda file=file: os.replace(_hidden(file), file))

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def _try(self, work: Any) -> None:
        if self.active and self.error is None:
            try:
                work()
            except OSError as error:
                self.error = error

    def _open(self, path: Path, content: bytes) -> None:
        self._close()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.begun.append(path)
        self.file = open(path, "wb")
        self.file.write(content)

    def _close(self) -> None:
        if self.file is not None:
            file, self.file = self.file, None
            with file:
                file.flush()
                os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------------------- reading


def import_safetensors(path: str | os.PathLike[str], abstract_params: PyTree) -> PyTree:
    """Reads parameters from safetensors files, every device its own share of them.

    Args:
      path: as in ``export_safetensors``; a model in several files is found by its index. All processes must be able to
        read it.
      abstract_params: a tree of arrays, or of ``ShapeDtypeStruct`` with shardings, boxed where it is split (such as
        ``abstract_train_state(...).params``).
    Returns:
      The parameters, in the shardings and boxes of ``abstract_params``.
    Raises:
      ValueError: names are missing or left over, a shape or dtype is another, or a file is damaged; says which.
      FileNotFoundError: there is no such model.
    """
    likes = bare_leaves(abstract_params)
    check_placed(likes)
    tensors = _tensors(_target(path))
    _check_fits(tensors, likes, path)
    values = {name: _placed(tensors[name].values(), like) for name, like in likes.items()}
    return map_leaves_with_path(lambda name, like: boxed_as(like, values[name]), abstract_params)


def _tensors(target: Path) -> dict[str, _Tensor]:
    index = _index_file(target)
    if target.exists():
        return _tensors_of(target)
    if not index.exists():
        raise FileNotFoundError(f"there is no {target}, and no {index.name} beside it.")
    where = _weight_map(index)
    found = {name: tensor for file in set(where.values()) for name, tensor in _tensors_of(index.parent / file).items()}
    wrong = sorted(name for name in where if name not in found or found[name].file.name != where[name])
    if wrong or found.keys() - where.keys():
        raise ValueError(f"{index} does not fit its files: see {listed(wrong or sorted(found.keys() - where.keys()))}.")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        where = json.loads(index.read_text())["weight_map"]
        assert all(isinstance(file, str) and Path(file).name == file for file in where.values())
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{index} is not the index of a model in several safetensors files.") from error
    return where


def _tensors_of(file: Path) -> dict[str, _Tensor]:
    """What a file's header says of its tensors, checked against the length of the file."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length <= size - 8 else None
        header.pop("__metadata__", None)
        tensors = {name: _tensor(file, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged, or no safetensors file: its header cannot be read.") from error
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset != end:
            raise ValueError(f"{file} is damaged: '{name}' begins at byte {tensor.offset}, and should at {end}.")
        end += math.prod(tensor.shape) * tensor.dtype.itemsize
    if end != size:
        raise ValueError(f"{file} is damaged: it has {size} bytes, and its header says {end}.")
    return tensors


def _tensor(file: Path, start: int, entry: dict[str, Any]) -> _Tensor:
    begin, end = entry["data_offsets"]
    tensor = _Tensor(file, start + begin, tuple(map(int, entry["shape"])), jnp.dtype(_DTYPES[entry["dtype"]]))
    if end - begin != math.prod(tensor.shape) * tensor.dtype.itemsize:
        raise ValueError("a tensor's place is not as large as its shape")
    return tensor


def _check_fits(tensors: Mapping[str, _Tensor], likes: Mapping[str, Any], path: Any) -> None:
    missing, extra = sorted(likes.keys() - tensors.keys()), sorted(tensors.keys() - likes.keys())
    if missing or extra:
        parts = [f"it has no {listed(missing)}"] if missing else []
        parts += [f"it has {listed(extra)}, which the parameters have not"] if extra else []
        raise ValueError(f"{path} does not fit the parameters: {'; and '.join(parts)}.")
    for name, like in likes.items():
        tensor = tensors[name]
        shape, dtype = np.shape(like), getattr(like, "dtype", type(like).__name__)
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise ValueError(
                f"{path} does not fit the parameters: '{name}' is {tensor.dtype}{list(tensor.shape)} in the file, and "
                f"{dtype}{list(shape)} in abstract_params."
            )


def _placed(values: np.ndarray, like: Any) -> Any:
    """Copies: the file may change or go away afterwards."""
    if isinstance(like, np.ndarray | np.generic):
        return np.array(values)
    if getattr(like, "sharding", None) is None or (is_local(like) and not getattr(like, "committed", True)):
        return jnp.array(values)
    return jax.make_array_from_callback(values.shape, like.sharding, lambda index: np.array(values[index]))
