"""The header of a safetensors file, written and read: which tensors a file holds, and where.

A file holds a length (8 bytes, little-endian), a JSON header of that length with the dtype, the shape and the offsets
of each tensor, and the values. A file may come from anybody. So a header is read only from a regular file, up to a
length, as UTF-8, with each name once and whole numbers as sizes; and nothing is allocated by what it says.
"""

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

METADATA = "__metadata__"  # the name under which a header keeps other things than tensors
REASON_CHARS = 200  # of an error in an error
MAX_JSON_BYTES = 100_000_000  # of a header, as the safetensors library has it, and of an index
MAX_DIMS = 64  # as NumPy has it
_ALIGNMENT = 8  # of the values, which begin behind the header

CODES = (
    {f"{kind}int{bits}": f"{code}{bits}" for kind, code in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)}
    | {"bool": "BOOL", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64"}
    | {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
    | {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}
)
_DTYPES = {code: dtype for dtype, code in CODES.items()}


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: Path
    offset: int  # from the beginning of the file
    shape: tuple[int, ...]
    dtype: np.dtype

    def values(self) -> np.ndarray:
        """The values, mapped into memory: only those that are indexed are read."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)


def header_of(leaves: Mapping[str, Any]) -> bytes:
    """The length and the header of a file with these tensors, in this order."""
    entries, end = {}, 0
    for name, leaf in leaves.items():
        begin, end = end, end + leaf.nbytes
        code = CODES[str(leaf.dtype)]
        entries[name] = {"dtype": code, "shape": list(leaf.shape), "data_offsets": [begin, end]}
    text = json.dumps({METADATA: {"format": "pt"}} | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def check_tensor_name(name: str) -> None:
    """Refuses what no reader takes as the name of a tensor."""
    if name == METADATA:
        raise ValueError(
            f"'{name}' is the name of the metadata in a safetensors file, and no tensor's; rename the leaf."
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the leaf {name!r} has a name that is not Unicode (half of a pair); rename it.") from None


# ------------------------------------------------------------------------------------------------------------- reading


def open_file(path: Path) -> BinaryIO:
    """A regular file, opened to be read; a pipe or a device would be waited for without end."""

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ValueError(f"{path} is no regular file.")
        return descriptor

    return open(path, "rb", opener=opener)


def json_object(content: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8; a ``ValueError`` where a name stands twice, or for anything else."""
    try:
        value = json.loads(content.decode(), object_pairs_hook=_once_each)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def tensors_of(path: Path) -> dict[str, StoredTensor]:
    """What a file's header says of its tensors, checked against the length of the file."""
    with open_file(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        try:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(size - 8, MAX_JSON_BYTES):
                raise ValueError(f"it would have {length} bytes, which are more than the file's, or {MAX_JSON_BYTES}")
            header = json_object(opened.read(length))
            header.pop(METADATA, None)
            tensors = {name: _tensor(path, 8 + length, entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {str(error)[:REASON_CHARS]}"
            raise ValueError(
                f"{path} is damaged, or no safetensors file: its header cannot be read ({reason})."
            ) from error
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset != end:
            raise ValueError(f"{path} is damaged: '{name}' begins at byte {tensor.offset}, and should at {end}.")
        end += math.prod(tensor.shape) * tensor.dtype.itemsize
    if end != size:
        raise ValueError(f"{path} is damaged: it has {size} bytes, and its header says {end}.")
    return tensors


def _tensor(path: Path, start: int, entry: dict[str, Any]) -> StoredTensor:
    begin, end = map(_size, entry["data_offsets"])
    shape = tuple(map(_size, entry["shape"]))
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} dims")
    tensor = StoredTensor(path, start + begin, shape, jnp.dtype(_DTYPES[entry["dtype"]]))
    if end - begin != math.prod(tensor.shape) * tensor.dtype.itemsize:
        raise ValueError("the offsets of a tensor do not fit its shape")
    return tensor


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no size")
    return value
