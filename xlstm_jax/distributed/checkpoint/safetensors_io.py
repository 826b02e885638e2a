"""Export and import of parameters as safetensors files, the common format for publishing models.

  export   leaf by leaf:  gather to the hosts -> process 0 writes
  import   leaf by leaf:  each device reads the bytes of its shard from the file; the host adds zeros to padded leaves

A model above a size limit is written to several files, with an index that maps each tensor to its file. File names are
as in Hugging Face models::

  model.safetensors      or      model-00001-of-00002.safetensors, model-00002-of-00002.safetensors
                                 model.safetensors.index.json

Files are written under hidden names and renamed at the end, the index last: after a crash no reader finds a partial
model.

A file consists of a length (8 bytes, little-endian), a JSON header of this length with the dtype, the shape and the
offsets of each tensor, and the values. The header is written and read here, because the safetensors library needs every
tensor of a file in memory at once, and has no float8 for NumPy. A file may come from an untrusted source. So a header
is read only from a regular file, up to a maximum length, as UTF-8, with unique names and integer sizes; and no memory
is allocated according to sizes in a header.
"""

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint.backend import Json
from xlstm_jax.distributed.checkpoint.checkpointer import at_least_1
from xlstm_jax.distributed.checkpoint.record import (
    Leaves,
    bare_leaves,
    boxed_like,
    names_problem,
    read_like,
    target_leaves,
    unpadded,
)
from xlstm_jax.distributed.checkpoint.tensor_names import NameMap, StoredAt, StoredLeaf, StoredPart, compiled, stored_at
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.store import Store
from xlstm_jax.distributed.processes.collective_errors import raise_on_all
from xlstm_jax.explicit_axes import outside_set_mesh
from xlstm_jax.formatting import is_unicode, listed

DEFAULT_MAX_FILE_BYTES = 5 * 10**9
DEFAULT_NAME = "model.safetensors"
READERS = 4  # number of threads that read leaves ahead, and maximum number of leaves that are read but not placed
SUFFIX = ".safetensors"
METADATA = "__metadata__"  # the only name in a header that is not a tensor
REASON_CHARS = 200  # maximum length of a nested error message
_WRONG_JSON = ValueError, KeyError, TypeError, AttributeError, RecursionError
MAX_JSON_BYTES = 100_000_000  # limit for a header, equal to the limit of the safetensors library, and for an index
MAX_DIMS = 64  # limit of NumPy
Result = TypeVar("Result")
_ALIGNMENT = 8  # alignment of the values after the header, in bytes

CODES = (
    {f"{kind}int{bits}": f"{code}{bits}" for kind, code in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)}
    | {"bool": "BOOL", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64"}
    | {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
    | {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}
)
_DTYPES = {code: dtype for dtype, code in CODES.items()}


def export_safetensors(
    params: PyTree,
    path: str | os.PathLike[str],
    *,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    names: NameMap | None = None,
) -> None:
    """Writes unsharded parameters to safetensors files, under the names of the plain model or mapped by ``names``.

    Every process must call this function; process 0 writes. One leaf at a time is unsharded in the memory of each host
    and, in a run of several processes, of each device.

    Args:
      params: a pytree of arrays, boxed or not, on any mesh. The default tensor name is the path of the leaf, as
        ``blocks/mlp/kernel``.
      path: a folder, for the file ``model.safetensors`` in the folder; or a file ending in ``.safetensors``.
      max_file_bytes: above this size the values are split into several files, ``model-00001-of-00003.safetensors`` and
        so on, with an index. A leaf is never split: a larger leaf gets a separate file.
      names: a map from path patterns to tensor names and layouts, if the reader expects different ones:
        ``{r"(.+)/kernel": Stored(r"\\1.weight", "i o -> o i"), ...}``. ``TRANSFORMERS`` is the map for Hugging Face
        models.
    Raises:
      FileExistsError: a model exists at ``path``.
      TypeError: the format does not support the dtype of a leaf (the error names the leaf); or ``max_file_bytes`` is
        not an integer.
      ValueError: a leaf has an invalid name (``__metadata__``, half a surrogate pair), no pattern in ``names`` matches
        a leaf, or two leaves have the same name; or ``max_file_bytes`` is below 1.
      OSError: a file cannot be written. No model exists at ``path`` afterwards.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> export_safetensors({"mlp": {"kernel": np.ones((2, 3))}}, folder)
    >>> import_safetensors(folder, {"mlp": {"kernel": np.zeros((2, 3))}})["mlp"]["kernel"].tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    max_file_bytes = at_least_1("max_file_bytes", max_file_bytes)
    leaves = tensors_to_write(params, names)
    target = _target(path)

    def check_free() -> None:
        for file in (target, index_file_of(target)):
            if file.exists():
                raise FileExistsError(f"{file} exists; remove it with its files, or choose another path")

    raise_on_all(check_free, FileExistsError)
    files = _files(leaves, target, max_file_bytes)
    # A generator: each leaf is gathered when it is written, and its memory is reused for the next leaf.
    arrays = (leaves[name].values() for names in files.values() for name in names)

    def write() -> None:
        try:
            if jax.process_index() == 0:
                _write_files(files, leaves, arrays, index_file_of(target))
        finally:
            # A gather is a collective. Every process gathers every leaf, so process 0 must gather the remaining leaves
            # even if a write failed.
            for _ in arrays:
                pass

    raise_on_all(write, OSError)


def tensors_to_write(params: PyTree, names: NameMap | None) -> dict[str, "TensorToWrite"]:
    """Returns a ``TensorToWrite`` (leaf, layer, layout in the file) for each tensor, by the tensor's name.

    ``names`` maps paths of leaves to tensor names; with None the name is the path of the leaf.

    Raises:
      TypeError: the format does not support the dtype of a leaf.
      ValueError: a name is invalid, no pattern of ``names`` matches a leaf, or two tensors have the same name.
    """
    tensors = _as_stored(bare_leaves(params, _to_be_read), names)
    for name, tensor in tensors.items():
        if name == METADATA:
            raise ValueError(
                f"'{name}' is the name of the metadata in a safetensors file, and no tensor's; rename the leaf."
            )
        if not is_unicode(name):
            raise ValueError(f"the leaf {name!r} has a name that is not Unicode (half of a pair); rename it.")
        if str(dtype := _dtype_or_type(tensor)) not in CODES:
            raise TypeError(f"'{name}' of type {dtype} cannot be written to safetensors; it takes {sorted(CODES)}.")
    return tensors


class TensorToWrite(NamedTuple):
    """Tensor to write: the leaf, the layer of the leaf (None for the full leaf), and the layout of the tensor."""

    leaf: Any
    place: StoredAt
    layer: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    @property
    def dtype(self) -> Any:
        return _dtype_or_type(self.leaf)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.leaf.dtype.itemsize

    def values(self) -> np.ndarray:
        """Returns the unsharded tensor in the layout of the file, gathered from all devices that have shards.

        Every process must call ``values``, because the gather is a collective.
        """
        leaf, layer = self.to_gather()
        values = self.read(_whole(leaf, layer))
        return np.ascontiguousarray(self.place.to_tensor(values))

    def to_gather(self) -> tuple[Any, int | None]:
        """Returns (array to gather, layer to gather); the array is as stored on the devices, with padding.

        The layer is an index along the first dim of the array; None means every layer.
        """
        if not isinstance(self.leaf, LeafInStore):
            return self.leaf, self.layer
        return self.leaf.stored, self.layer if self.leaf.has_layers_first else None

    def read(self, gathered: np.ndarray) -> np.ndarray:
        """Returns the values of the leaf, or only of ``self.layer`` if not None, on the host, without padding.

        ``gathered`` is the unsharded array of ``to_gather``; only the layer of this array if ``to_gather`` returns a
        layer. The dims are those of the leaf, not those of the tensor in the file.
        """
        return self.leaf.read(gathered, self.layer) if isinstance(self.leaf, LeafInStore) else gathered


class LeafInStore:
    """Leaf whose stored array differs from its value (padded, for example); has the shape and dtype of the value.

    In an export the stored array is gathered, and the host converts the array to the value. In an import the host
    converts each device's part of the value to the stored form. A conversion on the devices would replicate the leaf on
    each device.
    """

    def __init__(self, leaf: Sharded) -> None:
        self.stored, self.dtype, self.shape = leaf.value, np.dtype(leaf.value.dtype), leaf.true_shape
        self._store = leaf.store

    @property
    def has_layers_first(self) -> bool:
        """Whether dim 0 of the leaf in the model, along which layers are stacked, is also dim 0 of the stored array.

        If so, a single layer can be gathered.
        """
        return self._store.order(len(self.shape))[0] == 0

    def placed(self, value: Any) -> Callable[[], Any]:
        """Reads the parts of the leaf that devices of this process store; returns a function that places the parts.

        ``value`` has the shape of the leaf without padding and the indexing of an array, such as a tensor in a file.
        The returned function takes no arguments and returns the stored (padded, for example) global array.
        """
        return read_like(ValueInStore(value, self._store, self.stored.shape), self.stored)

    def read(self, gathered: np.ndarray, layer: int | None) -> np.ndarray:
        """Returns the value of the leaf, or of a single layer, without padding, as a NumPy array on the host.

        ``gathered`` is the unsharded stored array; or the unsharded stored array of the layer, if ``layer`` is a number
        and ``has_layers_first`` is True.
        """
        of_layer = layer is not None and self.has_layers_first
        store = self._store.without_dim(0) if of_layer else self._store
        value = _read_on_host(store, gathered)
        return value if layer is None or of_layer else value[layer]


class ValueInStore:
    """Storage form of a value, with the indexing of an array; converts only the indexed entries of the value."""

    def __init__(self, value: Any, store: Store, shape: tuple[int, ...]) -> None:
        self._value, self._store, self.shape = value, store, shape

    def __getitem__(self, part: Any) -> np.ndarray:
        return self._store.written_part(self._value, self.shape, part)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self[(slice(None),) * len(self.shape)], dtype)


def import_targets(abstract_params: PyTree) -> Leaves:
    """Returns the leaves to import into, by path: arrays or abstract arrays, without boxes and padding.

    A leaf that is stored padded (or in another form that the host can write in parts), and that has a sharding, is
    returned as a ``LeafInStore``, which converts each device's part on the host.

    Raises:
      TypeError: a leaf is not numeric.
      ValueError: an abstract leaf has no sharding in a run with several devices; a sharding does not divide the shape
        of a leaf; there are no leaves; or two leaves have the same name on disk.
    """

    def to_be_written(leaf: Sharded) -> Any:
        is_placed = getattr(leaf.value, "sharding", None) is not None
        return LeafInStore(leaf) if leaf.store.writes_parts and is_placed else unpadded(leaf)

    return target_leaves(abstract_params, to_be_written)


def _to_be_read(leaf: Sharded) -> Any:
    return leaf.value if leaf.stores_value or not isinstance(leaf.value, jax.Array) else LeafInStore(leaf)


@outside_set_mesh
def _read_on_host(store: Store, gathered: np.ndarray) -> np.ndarray:
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        device = jax.local_devices()[0]
    with jax.default_device(device):
        return np.asarray(store.read(jnp.asarray(gathered), (False,) * gathered.ndim))


def _as_stored(leaves: Leaves, names: NameMap | None) -> dict[str, TensorToWrite]:
    """Returns a ``TensorToWrite`` (leaf, layer, layout in the file) by tensor name, in the order of the leaves.

    ``leaves`` are by path. The map ``names`` gives the tensor name of each path; with None the name is the path. A name
    with ``{layer}`` stands for a tensor per layer, that is, per index of the leaf's first dim.

    Raises:
      ValueError: two tensors have the same name, or no pattern of ``names`` matches a path.
    """
    to_write: dict[str, TensorToWrite] = {}
    paths: dict[str, str] = {}
    for path, leaf in leaves.items():
        place = stored_at(path, np.shape(leaf), names)
        for layer, name in enumerate(place.tensors):
            if name in to_write:
                raise ValueError(
                    f"'{path}' and '{paths[name]}' would both be the tensor '{name}'; leave one of them out, or give "
                    "them different names."
                )
            to_write[name], paths[name] = TensorToWrite(leaf, place, layer if place.in_layers else None), path
    return to_write


def _dtype_or_type(leaf: Any) -> Any:
    return getattr(leaf, "dtype", type(leaf).__name__)


def _target(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path if path.suffix == SUFFIX else path / DEFAULT_NAME


def index_file_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.index.json")


def hidden_file(file: Path) -> Path:
    """Returns the path under which a file is written before its rename, as ``folder/.model.safetensors.tmp``."""
    return file.with_name(f".{file.name}.tmp")


def grouped_by_bytes(nbytes: Mapping[str, int], max_file_bytes: int) -> list[list[str]]:
    """Divides tensor names, in order, into groups of at most ``max_file_bytes``; a larger tensor gets a separate group.

    ``nbytes`` has the bytes of each tensor, by name.
    """
    groups: list[list[str]] = []
    bytes_left = 0
    for name, size in nbytes.items():
        if not groups or size > bytes_left:
            groups.append([])
            bytes_left = max_file_bytes
        groups[-1].append(name)
        bytes_left -= size
    return groups


def _files(leaves: Mapping[str, TensorToWrite], target: Path, max_file_bytes: int) -> dict[Path, list[str]]:
    """Divides tensors into files; returns the names of the tensors in each file, by path of the file.

    The only file is ``target`` if all tensors are within ``max_file_bytes``; otherwise the files are numbered, as
    ``model-00001-of-00002.safetensors``. A file has consecutive tensors of ``leaves``, which are by name. Within a file
    the names are in the order of the values: largest item size first, then alphabetical.
    """
    groups = grouped_by_bytes({name: leaf.nbytes for name, leaf in leaves.items()}, max_file_bytes)
    # Wide dtypes first: each tensor then starts at a multiple of its item size, as memory-mapping readers require.
    for names in groups:
        names.sort(key=lambda name: (-leaves[name].dtype.itemsize, name))
    if len(groups) == 1:
        return {target: groups[0]}
    stem, count = target.name.removesuffix(SUFFIX), len(groups)
    return {target.with_name(f"{stem}-{i:05}-of-{count:05}{SUFFIX}"): names for i, names in enumerate(groups, start=1)}


@outside_set_mesh  # indexing and gathering an array run programs on the array's mesh, not on the set mesh
def _whole(leaf: Any, layer: int | None) -> np.ndarray:
    """Returns a leaf as an unsharded NumPy array; with a ``layer`` only this index along the first dim of the leaf.

    If other processes hold shards, the array is gathered: then every process must call this function.
    """
    leaf = leaf if layer is None else leaf[layer]
    if not isinstance(leaf, jax.Array):
        return np.ascontiguousarray(leaf)
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return np.ascontiguousarray(multihost_utils.process_allgather(leaf, tiled=True))
    shards = {str(shard.index): shard for shard in leaf.addressable_shards}
    if len(shards) == 1:
        return to_host(next(iter(shards.values())).data)
    array = np.empty(leaf.shape, leaf.dtype)
    for shard in shards.values():
        array[shard.index] = to_host(shard.data)
    return array


def to_host(shard: jax.Array) -> np.ndarray:
    # `np.asarray(shard)` would be cached in the shard: after an export the full model would be in host memory. Here the
    # cache belongs to a new jax.Array of the same buffer, and is freed after the write.
    return np.asarray(jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard]))


def _write_files(
    files: Mapping[Path, list[str]], leaves: Mapping[str, TensorToWrite], arrays: Iterator[np.ndarray], index_file: Path
) -> None:
    """Writes safetensors files under hidden names and, after the last write, renames them; the index is renamed last.

    After an error no hidden file is left.

    Args:
      files: the names of the tensors of each file, by path of the file.
      leaves: descriptions of the tensors, by name.
      arrays: the values of the tensors, in the order of ``files``.
      index_file: path of the index, a JSON file that maps tensors to files; written if there are several files.
    """
    weight_map = {name: file.name for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": sum(leaf.nbytes for leaf in leaves.values())}, "weight_map": weight_map}
    written = [*files, index_file] if len(files) > 1 else [*files]
    try:
        # The first loop writes, the second renames: a full disk raises before any file has its final name.
        for file, names in files.items():
            with _new_file(hidden_file(file)) as opened, ThreadPoolExecutor(1) as syncing:
                opened.write(_header_of({name: leaves[name] for name in names}))
                synced: Future[None] | None = None
                for _ in names:
                    # As bytes, because Python cannot write the buffers of bfloat16 and float8 arrays.
                    opened.write(next(arrays).reshape(-1).view(np.uint8).data)
                    # Syncs to disk while the next leaf is gathered; a single sync at the end would take longer.
                    if synced is None or synced.done():
                        _ = synced and synced.result()  # raises the error of a failed sync
                        synced = syncing.submit(os.fsync, opened.fileno())
                _ = synced and synced.result()
        if index_file in written:
            with _new_file(hidden_file(index_file)) as opened:
                opened.write(json.dumps(index, indent=2, sort_keys=True).encode())
        # Readers look for the index: until the index is renamed, last, they find no model.
        for file in written:
            os.replace(hidden_file(file), file)
    finally:
        for file in written:
            hidden_file(file).unlink(missing_ok=True)


def _header_of(leaves: Mapping[str, TensorToWrite]) -> bytes:
    """Returns the first bytes of a safetensors file: the length of the header, and the header in JSON.

    The header has dtype, shape and offsets of each tensor. ``leaves`` has the tensors by name, in the order of the
    file.
    """
    entries, end = {}, 0
    for name, leaf in leaves.items():
        begin, end = end, end + leaf.nbytes
        code = CODES[str(leaf.dtype)]
        entries[name] = {"dtype": code, "shape": list(leaf.shape), "data_offsets": [begin, end]}
    text = json.dumps({METADATA: {"format": "pt"}} | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # left by a killed job, or a link to a different file
    with open(path, "xb") as file:
        yield file
        file.flush()
        # Before the rename: after a crash a file system may have the new name without the bytes.
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------------------- reading


def import_safetensors(
    path: str | os.PathLike[str], abstract_params: PyTree, *, names: NameMap | None = None, ignore: str = ""
) -> PyTree:
    """Reads parameters from safetensors files; each device reads only its shards.

    Args:
      path: as in ``export_safetensors``; a model in several files is found by its index. Every process reads the files.
      abstract_params: a tree of arrays, or of ``ShapeDtypeStruct`` with shardings, boxed where leaves are split (such
        as ``abstract_train_state(...).params``). The result has the same shardings and boxes.
      names: as in ``export_safetensors``. Two leaves may read the same tensor (tied weights).
      ignore: a regular expression; tensors whose full name matches are skipped, as
        ``r".*\\.rotary_emb\\.inv_freq"``. "" skips no tensor.
    Raises:
      ValueError: names are missing or left over; a shape differs; a dtype differs (a float may be read into a wider
        float dtype that represents each value exactly); a pattern is not a regular expression; a tensor is in two
        files; or a file is damaged. The error names the leaf, tensor or file.
      FileNotFoundError: no model exists at ``path``.

    >>> import_safetensors("no_such_folder", {"kernel": np.zeros((2, 3))})
    Traceback (most recent call last):
    FileNotFoundError: there is no no_such_folder/model.safetensors, and no model.safetensors.index.json beside it.
    """
    return placed_parameters(stored_tensors(path, ignore), abstract_params, names, path)


def stored_tensors(path: str | os.PathLike[str], ignore: str = "") -> "dict[str, StoredTensor]":
    """Returns file, offset, shape and dtype of each tensor in the model at ``path``, by tensor name; reads no values.

    Leaves out each tensor whose full name the regular expression ``ignore`` matches; "" leaves out no tensor.

    Raises:
      FileNotFoundError: no model exists at ``path``.
      ValueError: a file or the index is damaged; a tensor is in two files; or ``ignore`` is not a regular expression.
    """
    # "" skips no tensor; as a pattern it would match a tensor with an empty name.
    ignored = compiled("ignore", ignore).fullmatch if ignore else lambda name: None
    return {name: tensor for name, tensor in _tensors(_target(path)).items() if not ignored(name)}


def placed_parameters(
    tensors: "Mapping[str, ReadableTensor]",
    abstract_params: PyTree,
    names: NameMap | None,
    path: str | os.PathLike[str],
) -> PyTree:
    """Reads the parameters that are stored in ``tensors``; returns them in the tree, shardings and boxes of a target.

    Args:
      tensors: the tensors of the files, by name.
      abstract_params: the target: arrays or ``ShapeDtypeStruct`` with shardings, boxed where leaves are split.
      names: maps leaves to tensor names and layouts; None: the name is the path of the leaf.
      path: names the model in errors.
    Raises:
      ValueError: names, shapes or dtypes of tensors and leaves do not fit.
    """
    likes = import_targets(abstract_params)
    places = {leaf: stored_at(leaf, np.shape(like), names) for leaf, like in likes.items()}
    _check_fits(tensors, likes, places, path)

    def read(leaf: str) -> Callable[[], Any]:
        place, like = places[leaf], likes[leaf]
        stored = [tensors[name] for name in place.tensors]
        parts = [
            StoredPart(place.to_leaf(tensor.values()), partial(tensor.converted, name, _dtype_or_type(like)))
            for name, tensor in zip(place.tensors, stored, strict=True)
        ]
        values = StoredLeaf(parts, place.in_layers)
        return like.placed(values) if isinstance(like, LeafInStore) else read_like(values, like)

    leaves = (place() for place in _ahead(read, likes))
    in_store = {path for path, like in likes.items() if isinstance(like, LeafInStore)}
    return boxed_like(abstract_params, dict(zip(likes, leaves, strict=True)), in_store)


def _ahead(read: Callable[[str], Result], leaves: Iterable[str]) -> Iterator[Result]:
    """Yields ``read(leaf)`` for each path in ``leaves``, in order; threads read up to ``READERS`` leaves ahead."""
    with ThreadPoolExecutor(READERS) as readers:
        waiting: deque[Future[Result]] = deque()
        for leaf in leaves:
            waiting.append(readers.submit(read, leaf))
            if len(waiting) == READERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class ReadableTensor(Protocol):
    """Protocol of tensors whose values can be read by index: ``StoredTensor``, or a class made of several of them."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def values(self) -> np.ndarray: ...

    def converted(self, name: str, dtype: Any, values: np.ndarray) -> np.ndarray: ...


class StoredTensor(NamedTuple):
    """Position, shape and dtype of a tensor in a file."""

    file: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    dtype: np.dtype

    def values(self) -> np.ndarray:
        """Returns the values of this tensor as a memory map of its file, so that only indexed entries are read.

        Booleans are uint8.
        """
        dtype = np.dtype(np.uint8) if self.dtype == np.bool_ else self.dtype
        if not math.prod(self.shape):  # NumPy cannot map an empty range
            return np.zeros(self.shape, dtype)
        return np.memmap(self.file, dtype, "r", self.offset, self.shape)

    def converted(self, name: str, dtype: Any, values: np.ndarray) -> np.ndarray:
        """Casts ``values``, entries of this tensor as read from the file, to ``dtype``; copies only if necessary.

        Booleans are read as uint8: raises a ``ValueError`` for a boolean that is neither 0 nor 1. ``name`` names the
        tensor in the error.
        """
        if self.dtype == np.bool_ and (wrong := values[values > 1]).size:
            raise ValueError(
                f"{self.file} is damaged: '{name}' is BOOL and has the byte {wrong.flat[0]}, and a boolean is 0 or 1. "
                "Write the file again, or export the tensor as U8."
            )
        with np.errstate(invalid="ignore"):  # a signaling NaN is a NaN
            return values.astype(dtype, copy=False)


def _tensors(target: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of the model at ``target`` by name: from this file, or from the files of the index beside it.

    Raises:
      FileNotFoundError: neither the file nor its index exists.
      ValueError: index and files differ, or a tensor is in two files.
    """
    index = index_file_of(target)
    if target.exists():
        return read_header(target).tensors
    if not index.exists():
        raise FileNotFoundError(f"there is no {target}, and no {index.name} beside it.")
    where = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(where.values())):
        for name, tensor in read_header(index.parent / file).tensors.items():
            if name in tensors:
                raise ValueError(
                    f"{index} does not fit its files: the tensor '{name}' lies in {tensors[name].file.name} and in "
                    f"{file}, perhaps with other values. Remove one of the two files from the index, or write the "
                    "model again."
                )
            tensors[name] = tensor
    wrong = sorted(name for name in where if name not in tensors or tensors[name].file.name != where[name])
    if wrong or tensors.keys() - where.keys():
        raise ValueError(
            f"{index} does not fit its files: see {listed(wrong or sorted(tensors.keys() - where.keys()))}."
        )
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Returns the file name of each tensor, by tensor name, from the index of a model in several files.

    Raises a ``ValueError`` for an invalid index. An index is also invalid if it names a file outside of its folder.
    """
    wrong = f"{index} is not the index of a model in several safetensors files."
    with open_regular(index) as file:
        try:
            where: dict[str, str] = parse_json(file.read(MAX_JSON_BYTES))["weight_map"]
            in_this_folder = all(isinstance(file, str) and Path(file).name == file for file in where.values())
        except _WRONG_JSON as error:
            raise ValueError(wrong) from error
    if not in_this_folder:
        raise ValueError(wrong)
    return where


def open_regular(path: Path) -> BinaryIO:
    if path.exists() and not path.is_file():  # opening a pipe would wait without end, and a device may have no end
        raise ValueError(f"{path} is no regular file.")
    return path.open("rb")


def parse_json(content: bytes) -> Json:
    """Parses JSON in UTF-8; raises a ``ValueError`` if the JSON is invalid, or if an object repeats a name.

    Readers would resolve a repeated name differently.
    """

    def without_duplicates(pairs: list[tuple[str, Json]]) -> Json:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            raise ValueError("a name stands in it twice")
        return entries

    return json.loads(content.decode(), object_pairs_hook=without_duplicates)


class Header(NamedTuple):
    """Header of a file: its tensors by name, its metadata, and the SHA-256 of its bytes."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    sha256: str


def read_header(path: Path) -> Header:
    """Returns the header of a safetensors file: tensors by name, metadata, and SHA-256 of the header; reads no values.

    Raises:
      ValueError: the file is not regular; the header is invalid; or the tensors overlap, or do not cover every byte
        after the header.
    """
    with open_regular(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        try:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(size - 8, MAX_JSON_BYTES):
                raise ValueError(f"it would have {length} bytes, which are more than the file's, or {MAX_JSON_BYTES}")
            text = opened.read(length)
            header = parse_json(text)
            metadata = header.pop(METADATA, None) or {}
            tensors = {name: _tensor(path, 8 + length, entry) for name, entry in header.items()}
        except _WRONG_JSON as error:
            reason = f"{type(error).__name__}: {str(error)[:REASON_CHARS]}"
            raise ValueError(
                f"{path} is damaged, or no safetensors file: its header cannot be read ({reason})."
            ) from error
    # Tensors must be contiguous: overlapping tensors could need more memory than the file size, and a gap could hide
    # other content.
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset != end:
            raise ValueError(f"{path} is damaged: '{name}' begins at byte {tensor.offset}, and should at {end}.")
        end += math.prod(tensor.shape) * tensor.dtype.itemsize
    if end != size:
        raise ValueError(f"{path} is damaged: it has {size} bytes, and its header says {end}.")
    return Header(tensors, metadata, hashlib.sha256(text).hexdigest())


def _tensor(path: Path, start: int, entry: dict[str, Any]) -> StoredTensor:
    """Converts the header entry of a tensor to a ``StoredTensor``.

    Raises a ``ValueError`` for an invalid size, dtype or offset, and a ``KeyError`` for a missing key.

    Args:
      path: the file.
      start: position of the first value in the file, in bytes; offsets in the entry count from there.
      entry: the entry: ``{"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}``.
    """
    begin, end = entry["data_offsets"]
    for size in (begin, end, *entry["shape"]):
        # `type`, because True is an instance of int; the bound, because NumPy sizes have 64 bits.
        if type(size) is not int or not 0 <= size < 2**63:
            raise ValueError(f"{size!r} is no size")
    if len(entry["shape"]) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(entry['shape'])} dims")
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"a tensor has the dtype {entry['dtype']!r}, and those that can be read are {sorted(_DTYPES)}")
    tensor = StoredTensor(path, start + begin, tuple(entry["shape"]), jnp.dtype(_DTYPES[entry["dtype"]]))
    if end - begin != math.prod(tensor.shape) * tensor.dtype.itemsize:
        raise ValueError("the offsets of a tensor do not fit its shape")
    return tensor


def _holds(wanted: Any, stored: np.dtype) -> bool:
    """Returns whether the dtype ``wanted`` represents every value of ``stored``: equal dtypes, or a wider float."""
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (wanted, stored))
    return wanted == stored or (floats and _holds_floats(np.dtype(wanted), stored))


@lru_cache
def _holds_floats(wanted: np.dtype, stored: np.dtype) -> bool:
    if wanted.itemsize <= stored.itemsize or stored.itemsize > 2:
        return wanted.itemsize > stored.itemsize
    # JAX does not promote float8. There are at most 65,536 values: each value is tried, NaN and infinities included.
    values = np.arange(2 ** (8 * stored.itemsize), dtype=f"uint{8 * stored.itemsize}").view(stored)
    with np.errstate(all="ignore"):
        want, got = values.astype(np.float64), values.astype(wanted).astype(np.float64)
    return np.array_equal(want, got, equal_nan=True)


def _check_fits(
    tensors: Mapping[str, ReadableTensor], likes: Leaves, places: Mapping[str, StoredAt], path: object
) -> None:
    """Raises a ``ValueError`` if names, shapes or dtypes of stored tensors do not fit the leaves to import into.

    A tensor fits if its dtype is the leaf's dtype, or a float that the leaf's dtype represents exactly.

    Args:
      tensors: the tensors of the files, by name.
      likes: the leaves of the target, by path.
      places: tensor names and tensor shape of each leaf, by path.
      path: names the model in the error.
    """
    needed = {name for place in places.values() for name in place.tensors}
    if problem := names_problem(tensors.keys(), needed, "the parameters have"):
        raise ValueError(f"{path} does not fit the parameters: {problem}.")
    for leaf, place in places.items():
        dtype = _dtype_or_type(likes[leaf])
        for name in place.tensors:
            tensor, in_file = tensors[name], "in the file" if name == leaf else f"as '{name}' in the file"
            if tensor.shape != place.shape or not _holds(dtype, tensor.dtype):
                raise ValueError(
                    f"{path} does not fit the parameters: '{leaf}' is {tensor.dtype}{list(tensor.shape)} {in_file}, "
                    f"and {dtype}{list(place.shape)} in abstract_params."
                )
