"""Batches over a mesh: one global array from the rows that each process has read; or its shape alone."""

import math
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.boxes import leaves_with_path, map_leaves_with_path
from xlstm_jax.distributed.data_parallel.shard_choice import padded_size
from xlstm_jax.distributed.device_mesh.checks import auto_mesh, mesh_axes
from xlstm_jax.distributed.processes.agreement import compare, entries_of

NUMBERS = frozenset("biufcV")  # kinds of dtype; bfloat16 and the like are V, PRNG keys have none
BATCH_TIMEOUT_S = 300.0  # Processes may open their data for minutes before the first batch.

# -------------------------------------------------------------------------------------------------------------- batches


def shard_batch(
    batch: PyTree, mesh: Mesh, batch_axes: AxisNames, *, pad: bool | int = False, timeout_s: float = BATCH_TIMEOUT_S
) -> PyTree:
    """The global batch from the rows that each process hands in; call it in all processes, in the same order.

    The rows of a process go to its own devices, in their order; nothing travels. Processes whose devices hold the same
    part of the batch (the batch axes do not tell them apart, as with an axis of model parallelism over hosts) must hand
    in the same rows. Scalars are replicated and must be the same everywhere.

    In a run of several processes the first batch, and each that differs in shape or dtype from the last, is compared:
    all processes wait for each other, some milliseconds if they are on time. Other batches cost no communication.

    Args:
      batch: arrays [rows, ...], the same number of rows in every leaf and every process, and scalars.
      mesh: the mesh.
      batch_axes: the axes that the batch is split over, outermost first.
      pad: True appends rows of zeros until this process's devices divide the rows; a number appends them up to that
        many rows, which allows processes to hand in different numbers of rows, down to none (the end of an epoch).
      timeout_s: how long to wait for processes that do not bring a new batch too.
    Returns:
      The batch of global arrays [all rows, ...], split over ``batch_axes``. With ``pad``, ``(batch, weight)``, where
      ``weight``, float32 [all rows], is 1 for a row that was handed in and 0 for one that was appended.
    Raises:
      ValueError: devices do not divide the rows, or leaves differ in them, on this process; or processes differ in
        shapes, dtypes, or rows that they share, and all of them raise.
      TimeoutError: this process brings a new shape, others do not.
      TypeError: a leaf is a global array already, or has a dtype that devices do not have.
    """
    axes = mesh_axes(mesh, batch_axes, "batch_axes")
    place, blocks = NamedSharding(mesh, PartitionSpec(axes)), _blocks_of_processes(mesh, axes)
    here = len(blocks.get(jax.process_index(), ()))
    if not here:
        raise ValueError(f"process {jax.process_index()} has no device in the mesh {dict(mesh.shape)}.")
    rows = _common_rows(batch)
    padded = _padded_rows(rows, here, pad, axes)
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def to_global(path, leaf):
        if np.ndim(leaf) == 0:
            return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec()), np.asarray(leaf), ())
        shape = (padded // here * parts, *np.shape(leaf)[1:])
        return jax.make_array_from_process_local_data(place, _with_rows(leaf, padded), shape)

    if len(blocks) > 1:
        _agree_on_batch(batch, padded, mesh, axes, timeout_s)
    sharded = map_leaves_with_path(to_global, batch)
    return sharded if pad is False else (sharded, to_global("", (np.arange(padded) < rows).astype(np.float32)))


def abstract_batch(batch: PyTree, mesh: Mesh | AbstractMesh, batch_axes: AxisNames) -> PyTree:
    """What ``shard_batch`` would return, without values: a batch to plan, forecast or compile a step with.

    Args:
      batch: arrays or ``ShapeDtypeStruct`` with global shapes [b, ...], and scalars.
      mesh: a mesh, which need not have devices.
      batch_axes: the axes that the batch is split over, outermost first.
    Returns:
      ``ShapeDtypeStruct`` with shardings.
    Raises:
      ValueError: the axes do not divide a leaf's rows; names the leaf and both numbers.
    """
    axes, mesh = mesh_axes(mesh, batch_axes, "batch_axes"), auto_mesh(mesh)
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def place(path, leaf):
        shape, rows = np.shape(leaf), np.shape(leaf)[:1]
        if rows and rows[0] % parts:
            raise ValueError(
                f"batch['{path}'] of shape {shape} has {rows[0]} rows, which the {parts} devices over {axes} do not "
                f"divide. Take {padded_size(rows[0], parts)} rows."
            )
        spec = PartitionSpec(axes) if rows else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, _dtype(leaf), sharding=NamedSharding(mesh, spec))

    return map_leaves_with_path(place, batch)


@lru_cache
def _blocks_of_processes(mesh: Mesh, axes: tuple[str, ...]) -> dict[int, frozenset[int]]:
    """Which of the equal parts of the batch each process's devices hold.

    Raises:
      ValueError: processes hold different numbers of parts, or share some and not others.
    """
    parts, blocks = math.prod(mesh.shape[axis] for axis in axes), {}
    for device, (part,) in NamedSharding(mesh, PartitionSpec(axes)).devices_indices_map((parts,)).items():
        blocks[device.process_index] = blocks.get(device.process_index, frozenset()) | {part.start or 0}
    kinds = set(blocks.values())
    if len({len(kind) for kind in kinds}) > 1 or sum(map(len, kinds)) > parts:
        held = {process: sorted(block) for process, block in blocks.items()}
        raise ValueError(
            f"of the {parts} parts of a batch over {axes}, processes hold {held}: there is no number of rows for each "
            "process that fits. Make the mesh with create_device_mesh without devices, which keeps parts together."
        )
    return blocks


def _common_rows(batch: PyTree) -> int:
    """The leading dim of all leaves that have one."""
    shapes = {}
    for path, leaf in leaves_with_path(batch):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise TypeError(f"batch['{path}'] is split over processes already; hand in the rows of this process.")
        if getattr(_dtype(leaf), "kind", None) not in NUMBERS:
            raise TypeError(f"batch['{path}'] has the dtype {_dtype(leaf)}, not of numbers; leave it out or encode it.")
        shapes |= {path: np.shape(leaf)} if np.ndim(leaf) else {}
    if not shapes:
        raise ValueError("the batch has no leaf with rows; hand in arrays [rows, ...].")
    first, shape = next(iter(shapes.items()))
    for path, other in shapes.items():
        if other[0] != shape[0]:
            raise ValueError(
                f"batch['{path}'] of shape {other} has {other[0]} rows, but batch['{first}'] of shape {shape} has "
                f"{shape[0]}. All leaves have the rows of the same examples; what has no rows is a scalar."
            )
    return shape[0]


def _padded_rows(rows: int, here: int, pad: bool | int, axes: tuple[str, ...]) -> int:
    """How many rows this process's devices get, ``here`` being the parts that they hold."""
    where = f"process {jax.process_index()}, whose devices hold {here} part(s) of the batch over {axes}"
    if pad is not True and pad is not False:
        if pad < max(rows, 1) or pad % here:
            raise ValueError(f"pad={pad} rows for {rows} rows on {where}: at least as many, and a multiple of {here}.")
        return int(pad)
    up = max(padded_size(rows, here), here)
    if pad is False and up != rows:
        down = f"{rows // here * here} or " if rows > here else ""
        raise ValueError(
            f"{here} does not divide the {rows} rows of the batch on {where}. Hand in {down}{up} rows, or pass "
            "pad=True, which appends rows of weight 0."
        )
    return up


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _with_rows(leaf: Any, rows: int) -> Any:
    missing = rows - len(leaf)
    return np.pad(np.asarray(leaf), [(0, missing)] + [(0, 0)] * (np.ndim(leaf) - 1)) if missing else leaf


class _Batches:
    """What this process has handed in: how many batches, and the shapes of the last."""

    count = 0
    last: Any = None


def _agree_on_batch(batch: PyTree, rows: int, mesh: Mesh, axes: tuple[str, ...], timeout_s: float) -> None:
    """Compares shapes between processes where they changed; and the values of those that hold the same rows.

    Raises:
      ValueError: they differ.
    """
    if not jax.distributed.is_initialized():
        raise RuntimeError("the mesh spans processes that have not joined; call initialize_distributed at the start.")
    leaves = leaves_with_path(batch)
    shapes = {path: f"{_dtype(leaf)} {['rows', *np.shape(leaf)[1:]] if np.ndim(leaf) else []}" for path, leaf in leaves}
    _Batches.count += 1
    if _Batches.last == (mesh, axes, rows, shapes):
        return
    _Batches.last = None  # where this raises, the next one is compared again
    scalars = {path: text for path, leaf in leaves if np.ndim(leaf) == 0 for text in entries_of(leaf).values()}
    entries = {
        "rows for each process": str(rows),
        **shapes,
        **scalars,
        "mesh": f"{dict(mesh.shape)}, split over {axes}",
    }
    blocks, me = _blocks_of_processes(mesh, axes), jax.process_index()
    what = "batch of a new shape"
    compare({**entries, "number of the batch": str(_Batches.count)}, what, me, sorted(blocks), timeout_s)
    sharing = sorted(process for process, block in blocks.items() if block == blocks[me])
    if len(sharing) > 1:
        what = f"batch of processes that hold the same rows ({axes} do not tell them apart)"
        compare(entries_of(batch), what, me, sharing, timeout_s)
    _Batches.last = (mesh, axes, rows, shapes)
