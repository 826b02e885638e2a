"""Leaves of a batch: checks for arrays of numbers, and padding of rows.

Padded rows are copies of real rows. Rows of zeros would make 0/0 in a norm or a standard deviation, whose gradient is
NaN even with weight 0: 0 times NaN is NaN. A process without rows of this batch copies a row of an earlier batch.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves_with_path, named_leaf
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key
from xlstm_jax.formatting import kind_of

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)
NO_NUMBERS = frozenset("OSUMm")  # kinds of NumPy dtypes that no device supports: objects, texts, dates
WIDEST_BYTES = {"f": 8, "c": 16}  # bytes of the widest supported number, by kind; some machines have wider NumPy dtypes


# --------------------------------------------------------------------------------------------------- arrays of numbers


def why_no_array(leaf: Any) -> str | None:
    """Returns None if a leaf of a batch is an array of numbers; otherwise the end of an error text.

    The text follows "... is": the kind of the leaf, why JAX does not take the leaf, and a cure. Python numbers, NumPy
    and JAX arrays and ``ShapeDtypeStruct`` count as arrays, unless their dtype has no numbers (texts, objects, dates).
    """
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array, whose mask JAX does not take. Pass leaf.filled(0), and the mask as a leaf beside it."
    if isinstance(leaf, ARRAYS):
        if has_numbers(getattr(leaf, "dtype", None)):
            return None
        return f"{kind_of(leaf)}, not of numbers. Leave it out, or encode it as numbers."
    if hasattr(leaf, "__jax_array__"):
        return f"a {type(leaf).__name__}, which wraps an array and is not one. Pass jnp.asarray of it."
    if dataclasses.is_dataclass(leaf):
        return (
            f"{kind_of(leaf)}, a dataclass in which JAX sees no arrays. Register it with "
            "jax.tree_util.register_dataclass, make it by flax.struct.dataclass, or pass a dict."
        )
    if hasattr(leaf, "__array__") or hasattr(leaf, "__dlpack__"):
        package = type(leaf).__module__.partition(".")[0]
        cure = "np.asarray" if hasattr(leaf, "__array__") else "np.from_dlpack"
        return f"a {type(leaf).__name__} of {package}, which JAX does not take. Pass {cure} of it."
    return f"{kind_of(leaf)}, not an array. Leave it out, or encode it as numbers."


def has_numbers(dtype: Any) -> bool:
    """Returns whether arrays of ``dtype`` can be on devices. True also for None (a Python number) and for PRNG keys.

    False for objects, texts, dates and records, and for floats wider than 64 bits (complex: 128 bits).
    """
    kind = getattr(dtype, "kind", None)
    # bfloat16 and similar dtypes have the kind of records.
    if kind in NO_NUMBERS or issubclass(getattr(dtype, "type", object), np.void):
        return False
    return kind not in WIDEST_BYTES or dtype.itemsize <= WIDEST_BYTES[kind]


def check_values(batch: PyTree) -> None:
    """Raises a ``TypeError`` unless each leaf of a batch is an array of numbers with values on this process.

    Refused are tracers, ``ShapeDtypeStruct``, arrays of other libraries or without numbers, arrays that are split over
    processes, and PRNG keys. A Python int beyond the integers of JAX raises a ``ValueError``.
    """
    for path, leaf in leaves_with_path(batch):
        where = named_leaf("batch", path)
        if isinstance(leaf, Tracer):
            raise TypeError(f"{where} is traced and has no values; call shard_batch outside of jit.")
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"{where} is a type without values; pass arrays, or call abstract_batch.")
        if reason := why_no_array(leaf):
            raise TypeError(f"{where} is {reason}")
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise TypeError(f"{where} is split over processes already; hand in the rows of this process.")
        if isinstance(leaf, jax.Array) and is_prng_key(leaf):
            raise TypeError(
                f"{where} has the dtype {leaf.dtype}, not of numbers. Pass jax.random.key_data of it, and in the loss "
                "function jax.random.wrap_key_data."
            )
        dtype = jax.dtypes.canonicalize_dtype(np.int64)
        if type(leaf) is int and not np.iinfo(dtype).min <= leaf <= np.iinfo(dtype).max:
            raise ValueError(f"{where} is {leaf}, which {dtype} does not hold. Pass it as a float.")


# ---------------------------------------------------------------------------------------------------------- padded rows

# By batch structure, a row of the first padded batch with such leaves on this process. At the end of an epoch a process
# may have no row left, and then pads with this row: other processes still have rows, and every process must join the
# step.
_a_row_of: dict[object, PyTree] = {}


def with_copies(batch: PyTree, rows: int, padded: int) -> PyTree:
    """Returns the batch of this process, of ``rows`` rows, with copies of its rows appended up to ``padded`` rows.

    Rows are repeated in turn, from the first on; scalars are unchanged. If ``rows`` is 0, every row is a copy of one
    row of an earlier batch with leaves of the same shapes and dtypes, which this process has kept. Arrays become NumPy
    arrays.

    Raises:
      ValueError: the batch has no rows, and this process has padded no batch with such leaves before.
    """
    structure = _structure(batch)
    if rows:
        if structure not in _a_row_of:
            _a_row_of[structure] = jax.tree.map(lambda leaf: np.array(leaf[:1]) if np.ndim(leaf) else None, batch)
        # On the host: on devices, every new number of rows would compile a program.
        taken = np.arange(padded) % rows
        return jax.tree.map(lambda leaf: np.asarray(leaf)[taken] if np.ndim(leaf) else leaf, batch)
    if structure not in _a_row_of:
        raise ValueError(
            f"process {jax.process_index()} hands in 0 rows, and rows that pad are copies of real rows: it has had "
            "none with such leaves before. Deal the rows out in turn, rows[jax.process_index() :: "
            "jax.process_count()], or pass any row, with a leaf of weights that is 0 for this row."
        )

    def repeated(path: str, leaf: Any) -> Any:
        return np.repeat(row_of[path], padded, axis=0) if np.ndim(leaf) else leaf

    row_of = dict(leaves_with_path(_a_row_of[structure]))
    return map_leaves_with_path(repeated, batch)


def _structure(batch: PyTree) -> object:
    """Returns a hashable key of a batch: the tree, and for each array the shape of a row and the dtype (scalars: None).

    A batch may be padded by rows of an earlier batch with the same key.
    """
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, tuple((np.shape(leaf)[1:], str(leaf.dtype)) if np.ndim(leaf) else None for leaf in leaves)
