"""``shard_batch``: makes global arrays from the rows of each process; ``abstract_batch``: shapes and shardings."""

import weakref
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.policy import next_multiple
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves_with_path, named_leaf
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout, auto_mesh, batch_layout, check_mesh, num_shards
from xlstm_jax.distributed.device_mesh.batch_leaves import check_values, why_no_array, with_copies
from xlstm_jax.distributed.processes.devices import Device
from xlstm_jax.distributed.processes.same_everywhere import compare, entries_of
from xlstm_jax.explicit_axes import placed

PLAIN_NUMBERS = int, float, complex, np.generic
BATCH_TIMEOUT_S = 300.0  # Processes may open their data for minutes before the first batch.


def shard_batch(
    batch: PyTree,
    mesh: Mesh,
    batch_axes: AxisNames | None = None,
    *,
    batch_spec: PyTree | None = None,
    pad: bool | int = False,
    timeout_s: float = BATCH_TIMEOUT_S,
) -> PyTree:
    """Makes the global batch from the rows of each process; call it in every process, in the same order.

    The rows of a process go to its local devices, in order, without communication. Processes whose devices hold the
    same shards (as with a tensor-parallel axis that crosses hosts) must pass the same rows, and every process the same
    scalars. Several processes compare the first batch on a mesh, and each batch with new shapes or dtypes; processes
    wait for each other, for milliseconds if none is late. Further batches cost no communication.

    Args:
      batch: arrays [rows, ...] with the rows of this process, and scalars. Every leaf has the same number of rows.
        Every process has the same number of rows; with ``pad``, the same number after padding.
      mesh: the mesh.
      batch_axes: the axes that the rows are split over, outermost first.
      batch_spec: replaces ``batch_axes`` if further dims are split: a ``PartitionSpec``, as ``P(("dp", "fsdp"), "cp")``
        for tokens [b, t], or a tree of specs that is a prefix of the batch. Dim 0 is split over the same axes in every
        leaf. Each process passes unsplit rows, and its devices keep their parts.
      pad: True repeats rows of this process, from the first on, until the number of batch shards on the local devices
        (the number of local devices, without model parallelism) divides the number of rows. An integer, a multiple of
        this number of shards and equal in every process, repeats rows until this process has ``pad`` rows; so processes
        may pass different numbers of rows, down to 0 (at the end of an epoch: then a row of an earlier batch is
        repeated). A loss that ignores ``weight`` counts the copies, too (see docs/processes.md).
      timeout_s: seconds to wait for the other processes when batches are compared.
    Returns:
      The batch of global arrays [all rows, ...], split over ``batch_axes`` or by ``batch_spec``. With ``pad``,
      ``(batch, weight)``, where ``weight``, float32 [all rows], is 1 for a row that was passed in and 0 for a padded
      copy.
    Raises:
      ValueError: devices do not divide the rows or another dim, or leaves differ in their rows, on this process; a leaf
        has fewer dims than its spec, or the mesh lacks an axis; this process has no row to repeat, and had none before;
        or processes differ in shapes, dtypes, scalars, or rows that must be equal: then every process raises.
      TimeoutError: this process passes a new shape, and another process does not within ``timeout_s``.
      TypeError: a leaf is already a global array, is a tensor of another library, or has a dtype that devices do not
        support; a list of numbers, which JAX treats as scalars; a dataclass that is not registered as a pytree; or
        ``mesh`` is not a mesh.

    >>> batch = shard_batch({"x": np.ones((16, 3)), "lr": 0.1}, mesh, ("dp", "fsdp"))
    >>> batch["x"].shape, batch["x"].addressable_shards[0].data.shape
    ((16, 3), (2, 3))
    >>> batch, weight = shard_batch({"x": np.ones((14, 3))}, mesh, ("dp", "fsdp"), pad=True)
    >>> batch["x"].shape, weight.sum()
    ((16, 3), Array(14., dtype=float32))
    """
    check_mesh(mesh, devices=True)
    layout = batch_layout(mesh, batch_axes, batch_spec)
    axes = layout.row_axes
    shards_of = _shards_of_processes(mesh, axes)
    num_local = len(shards_of.get(jax.process_index(), ()))
    if not num_local:
        raise ValueError(f"process {jax.process_index()} has no device in the mesh {dict(mesh.shape)}.")
    # Processes pass equally many rows per shard, so each process can compute the global number of rows locally.
    rows = _common_rows(batch)
    padded = _padded_rows(rows, num_local, pad, axes)
    all_rows = padded // num_local * num_shards(mesh, axes)

    def to_global(leaf: PyTree, spec: PartitionSpec) -> jax.Array:
        if np.ndim(leaf) == 0:
            return jax.make_array_from_process_local_data(
                placed(NamedSharding(mesh, PartitionSpec())), np.asarray(leaf), ()
            )
        # In a dim whose local size is the global size, JAX cuts each device's part from the local array.
        shape = (all_rows, *np.shape(leaf)[1:])
        return jax.make_array_from_process_local_data(placed(NamedSharding(mesh, spec)), leaf, shape)

    specs = layout.specs(batch)
    # Compare before any array is made: with other shapes, processes would wait for each other forever in the next step.
    if len(shards_of) > 1:
        _agree_on_batch(batch, padded, mesh, layout, timeout_s)
    if pad is not False:
        batch = with_copies(batch, rows, padded)
    sharded = jax.tree.map(to_global, batch, specs)
    if pad is False:
        return sharded
    if padded > rows:
        new = [(weakref.ref(leaf), rows, padded) for _, leaf in leaves_with_path(sharded) if leaf.ndim]
        _padded[:] = [known for known in _padded if known[0]() is not None] + new
    return sharded, to_global((np.arange(padded) < rows).astype(np.float32), PartitionSpec(axes))


# Padded leaves that are still alive: the leaf, its rows, and the rows with padding. References are weak, since a batch
# must not outlive its step. Used to warn of steps that ignore the weights.
_padded: list[tuple[weakref.ref[jax.Array], int, int]] = []


def padded_rows_of(leaf: PyTree) -> tuple[int, int] | None:
    """Returns (rows passed in, rows after padding), of this process, for an array padded by ``shard_batch``; else None.

    The array is found by identity: ``leaf`` is a leaf of the batch that ``shard_batch`` returned.
    """
    return next(((rows, padded) for ref, rows, padded in _padded if ref() is leaf), None)


def any_padded() -> bool:
    """Returns whether an array that ``shard_batch`` has padded in this process is still in use (not yet deleted)."""
    return bool(_padded) and any(ref() is not None for ref, *_ in _padded)


def abstract_batch(
    batch: PyTree,
    mesh: Mesh | AbstractMesh,
    batch_axes: AxisNames | None = None,
    *,
    batch_spec: PyTree | None = None,
) -> PyTree:
    """Returns a ``ShapeDtypeStruct`` with sharding for each leaf of a batch, to plan, forecast or compile a step.

    The tree has the shapes, dtypes and shardings of the arrays that ``shard_batch`` makes.

    Args:
      batch: arrays or ``ShapeDtypeStruct`` with global shapes [b, ...], and scalars.
      mesh: a mesh, with or without devices.
      batch_axes, batch_spec: the axes that dim 0 of each leaf is split over, or a ``PartitionSpec`` or a tree of specs;
        one of both, as for ``shard_batch``.
    Raises:
      ValueError: the axes do not divide a leaf's rows or another dim; names the leaf and both numbers.
      TypeError: as ``shard_batch``, for leaves that are not arrays.

    >>> batch = abstract_batch({"x": np.ones((16, 3))}, mesh, ("dp", "fsdp"))
    >>> batch["x"].shape, batch["x"].sharding.shard_shape((16, 3))
    ((16, 3), (2, 3))
    """
    layout = batch_layout(mesh, batch_axes, batch_spec)
    axes, mesh, shards = layout.row_axes, auto_mesh(mesh), num_shards(mesh, layout.row_axes)
    _check_containers(batch)

    def abstract(path: str, leaf: PyTree, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        if reason := why_no_array(leaf):
            raise TypeError(f"{named_leaf('batch', path)} is {reason}")
        shape, rows = np.shape(leaf), np.shape(leaf)[:1]
        if rows and rows[0] % shards:
            raise ValueError(
                f"batch['{path}'] of shape {shape} has {rows[0]} rows, which the {shards} devices over {axes} do not "
                f"divide. Take {next_multiple(rows[0], shards)} rows."
            )
        dtype = jax.eval_shape(lambda x: x, leaf).dtype  # the dtype inside a step: float32 for a Python float
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed(NamedSharding(mesh, spec)))

    return map_leaves_with_path(abstract, batch, layout.specs(batch))


@cache
def _shards_of_processes(mesh: Mesh, axes: tuple[str, ...]) -> dict[int, frozenset[int]]:
    """Returns a dict from process index to the indices of the batch shards on the devices of the process.

    The shards are those of dim 0, split over ``axes``: index 0 to n - 1 in row order. Processes have equal sets if
    their devices hold copies of the same shards.

    Raises:
      ValueError: two processes have different numbers of shards, or have some but not all shards in common.
    """
    shards = num_shards(mesh, axes)
    held: dict[int, frozenset[int]] = {}
    shard_of: Mapping[Device, Any] = NamedSharding(mesh, PartitionSpec(axes)).devices_indices_map((shards,))
    for device, (shard,) in shard_of.items():
        held[device.process_index] = held.get(device.process_index, frozenset()) | {shard.start or 0}
    # Each shard may belong to one set only: otherwise the rows of two processes would overlap in part.
    different = set(held.values())
    if len(set(map(len, different))) > 1 or sum(map(len, different)) > shards:
        numbers = {process: sorted(indices) for process, indices in held.items()}
        raise ValueError(
            f"of the {shards} shards of a batch over {axes}, processes hold {numbers}: no number of rows for each "
            "process fits. Make the mesh by create_device_mesh without devices; it keeps shards of a process together."
        )
    return held


def _check_containers(value: Any, path: str = "batch") -> None:
    """Raises a ``TypeError`` for containers that JAX would not interpret as intended, anywhere in a batch.

    Refused are a list of Python numbers, which JAX takes for scalars instead of rows, and a dataclass that is not
    registered as a pytree. ``path`` is the expression for ``value`` in the error, as "batch['x']".
    """
    if isinstance(value, Mapping):
        for key, child in value.items():
            _check_containers(child, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        if isinstance(value, list) and value and all(isinstance(number, PLAIN_NUMBERS) for number in value):
            raise TypeError(
                f"{path} is a list of {len(value)} Python numbers, which JAX takes for {len(value)} scalars; rows are "
                f"the entries of an array. Pass np.asarray({path})."
            )
        for index, child in enumerate(value):
            _check_containers(child, f"{path}[{index}]")
    # A dataclass that is not registered is a leaf to JAX.
    elif is_dataclass(value) and any(leaf is value for leaf in jax.tree.leaves(value)):
        name = type(value).__name__
        raise TypeError(
            f"{path} is a {name}, a dataclass that JAX does not know; a batch is made of arrays in dicts, tuples and "
            f"registered dataclasses. Write @jax.tree_util.register_dataclass above {name}, or pass vars({path})."
        )


def _common_rows(batch: PyTree) -> int:
    """Returns the number of rows of this process's batch: the size of dim 0, equal in all leaves but scalars.

    Raises a ``ValueError`` if no leaf has rows, or if leaves differ in their numbers of rows; and a ``TypeError`` for
    leaves or containers that are no arrays of numbers (see ``check_values``).
    """
    _check_containers(batch)
    shapes: dict[str, tuple[int, ...]] = {}
    check_values(batch)
    for path, leaf in leaves_with_path(batch):
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


def _padded_rows(rows: int, num_local: int, pad: bool | int, axes: tuple[str, ...]) -> int:
    """Returns the number of rows that this process passes on, after padding of its ``rows`` rows.

    ``num_local`` is the number of batch shards on the devices of this process. ``pad`` True: the next multiple of
    ``num_local``, at least ``num_local``. An integer: ``pad`` itself; raises a ``ValueError`` unless it is a multiple
    of ``num_local`` and at least ``rows`` and 1. False: ``rows``; raises a ``ValueError`` if ``rows`` is 0 or no
    multiple of ``num_local``. ``axes`` split the rows, and are named in errors.
    """
    where = f"process {jax.process_index()}, whose devices hold {num_local} shard(s) of the batch over {axes}"
    if pad is not True and pad is not False:
        if pad < max(rows, 1) or pad % num_local:
            raise ValueError(
                f"pad={pad} rows for {rows} rows on {where}: at least as many, and a multiple of {num_local}."
            )
        return int(pad)
    # At least one row per shard: a process may have none left, but its devices must take part.
    up = max(next_multiple(rows, num_local), num_local)
    if pad is False and up != rows:
        down = f"{rows // num_local * num_local} or " if rows > num_local else ""
        raise ValueError(
            f"{num_local} does not divide the {rows} rows of the batch on {where}. Hand in {down}{up} rows, or pass "
            "pad=True, which repeats rows with weight 0."
        )
    return up


def _dtype(leaf: PyTree) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


# By mesh: the number of batches that this process has passed, and the layout of the last one. The devices of a mesh
# belong to one job, whose processes use the mesh in the same order.
_batches_seen: dict[Mesh, tuple[int, object]] = {}


def _agree_on_batch(batch: PyTree, rows: int, mesh: Mesh, layout: BatchLayout, timeout_s: float) -> None:
    """Compares a batch of new shapes or dtypes between processes; if batches differ, each raises a ``ValueError``.

    Every process of the mesh calls the function with the batch of this process. Shapes, dtypes, scalars, ``rows`` (of
    this process, with padding) and ``layout`` are compared between all processes; values between processes with the
    same shards. If shapes, dtypes, ``rows`` and ``layout`` are those of the last batch on this mesh, nothing is
    compared. Waits up to ``timeout_s`` seconds for other processes, then raises a ``TimeoutError``. Raises a
    ``RuntimeError`` if the processes have not joined a job.
    """
    if not jax.distributed.is_initialized():
        raise RuntimeError("the mesh spans processes that have not joined; call initialize_distributed at the start.")
    leaves, axes, split = leaves_with_path(batch), layout.row_axes, str(layout)
    shapes = {path: f"{_dtype(leaf)} {['rows', *np.shape(leaf)[1:]] if np.ndim(leaf) else []}" for path, leaf in leaves}
    (count, last), of_this = _batches_seen.get(mesh, (0, None)), (split, rows, shapes)
    number = count + 1
    if last == of_this:
        _batches_seen[mesh] = number, of_this
        return
    _batches_seen[mesh] = number, None  # if the comparison raises, the next batch is compared again
    # Compare scalars by value, too: each process puts its value on its devices, where it counts as replicated.
    scalars = {path: text for path, leaf in leaves if np.ndim(leaf) == 0 for text in entries_of(leaf).values()}
    entries = {"rows for each process": str(rows)} | shapes | scalars
    entries |= {"mesh": f"{dict(mesh.shape)}, split over {split}", "number of the batch": str(number)}
    shards_of_processes, me = _shards_of_processes(mesh, axes), jax.process_index()
    compare(entries, "batch of a new shape", me, sorted(shards_of_processes), timeout_s)
    sharing = sorted(process for process, shards in shards_of_processes.items() if shards == shards_of_processes[me])
    if len(sharing) > 1:
        compare(entries_of(batch), f"batch of processes with the same shards over {axes}", me, sharing, timeout_s)
    _batches_seen[mesh] = number, of_this
