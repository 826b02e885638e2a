"""Leaves of a batch: which of them are arrays of numbers, and their rows repeated to more rows.

Rows that pad are copies of real rows. Rows of zeros would make 0/0 of a norm or a standard deviation, whose gradient is
NaN under weight 0, too: 0 times NaN is NaN. A process without rows of this batch takes a row that it handed in before.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves_with_path, named_leaf
from xlstm_jax.distributed.data_parallel.wire.dtypes import is_prng_key
from xlstm_jax.wording import kind_of

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)
NO_NUMBERS = frozenset("OSUMm")  # kinds of NumPy's dtypes that no device has: objects, texts, dates
WIDEST_BYTES = {"f": 8, "c": 16}  # of a number, by kind; NumPy has wider ones on some machines


# --------------------------------------------------------------------------------------------------- arrays of numbers


def why_no_array(leaf: Any) -> str | None:
    """What a leaf is that is no array of numbers, and the cure; None of an array of numbers."""
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array, whose mask JAX does not take. Pass leaf.filled(0), and the mask as a leaf beside it."
    if isinstance(leaf, ARRAYS):
        if has_numbers(getattr(leaf, "dtype", None)):
            return None
        return f"{kind_of(leaf)}, not of numbers. Leave it out, or encode it as numbers."
    if hasattr(leaf, "__jax_array__"):
        return f"a {type(leaf).__name__}, which has an array and is none. Pass jnp.asarray of it."
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
    """Whether a dtype is one of numbers that devices have. None, as of a Python number, and that of a key count."""
    kind = getattr(dtype, "kind", None)
    # bfloat16 and the like have the kind of records.
    if kind in NO_NUMBERS or issubclass(getattr(dtype, "type", object), np.void):
        return False
    return kind not in WIDEST_BYTES or dtype.itemsize <= WIDEST_BYTES[kind]


def check_values(batch: PyTree) -> None:
    """Raises a ``TypeError`` where a leaf of a batch is no array of numbers with values that this process has."""
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


# -------------------------------------------------------------------------------------------------------- rows that pad

# A row of the first batch of each structure that this process has handed in to be padded. At the end of an epoch a
# process may have no row left, and then pads with this one: other processes have rows, and a step for all of them.
_a_row_of: dict[object, PyTree] = {}


def with_copies(batch: PyTree, rows: int, padded: int) -> PyTree:
    """The batch with its rows repeated in turn, from the first row on, until there are ``padded`` rows.

    Raises:
      ValueError: the batch has no rows, and this process has padded none with such leaves before.
    """
    structure = _structure(batch)
    if rows:
        if structure not in _a_row_of:
            _a_row_of[structure] = jax.tree.map(lambda leaf: np.array(leaf[:1]) if np.ndim(leaf) else None, batch)
        # On the host: on devices every other number of rows would compile a program.
        taken = np.arange(padded) % rows
        return jax.tree.map(lambda leaf: np.asarray(leaf)[taken] if np.ndim(leaf) else leaf, batch)
    if structure not in _a_row_of:
        raise ValueError(
            f"process {jax.process_index()} hands in 0 rows, and rows that pad are copies of real rows, of which it "
            "has handed in none with such leaves before. Deal the rows out in turn, rows[jax.process_index() :: "
            "jax.process_count()], or hand in any row, with a leaf of weights beside it that is 0 for this row."
        )

    def repeated(path: str, leaf: Any) -> Any:
        return np.repeat(kept[path], padded, axis=0) if np.ndim(leaf) else leaf

    kept = dict(leaves_with_path(_a_row_of[structure]))
    return map_leaves_with_path(repeated, batch)


def _structure(batch: PyTree) -> object:
    """Of a batch all but its rows and its values: what two batches share whose rows may stand in for each other."""
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, tuple((np.shape(leaf)[1:], str(leaf.dtype)) if np.ndim(leaf) else None for leaf in leaves)
