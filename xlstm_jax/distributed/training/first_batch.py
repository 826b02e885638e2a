"""Compares inputs between processes: the key of the initial parameters, and the first batch of a step.

No device notices if processes disagree here: each would continue with a different value of a replicated input, or every
process would train on the same rows. So processes compare once, through the key-value store, without devices:

  key, scalars, process-local arrays   must be equal, else every process raises a ``ValueError``
  shapes, dtypes, shardings            must be equal, else every process raises
  rows of global arrays                must be equal where processes hold copies of the same rows, else every process
                                       raises; where they hold different rows, equal values make every process warn
"""

import json
from collections.abc import Mapping

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key
from xlstm_jax.distributed.processes.same_everywhere import compare, entries_of
from xlstm_jax.distributed.processes.store import PEER_TIMEOUT_S, KeyValueStore, by_text, digest, exchange_in, named
from xlstm_jax.introspection import warn_user

KEY = "key of the initial parameters"
BATCH = "first batch of a step"


def compare_keys(rng: PyTree, mesh: Mesh | AbstractMesh) -> None:
    """Raises a ``ValueError`` in every process of the mesh if ``rng``, a key or a dict of keys, differs between them.

    Returns at once if there is a single process, or if ``rng`` is traced or abstract.
    """
    if len(processes := _processes(mesh, rng)) > 1:
        compare(entries_of({"rng": rng}), KEY, jax.process_index(), processes, PEER_TIMEOUT_S)


def compare_batches(batch: PyTree, mesh: Mesh | AbstractMesh) -> None:
    """Compares the batch between the processes of the mesh; returns at once for a single process.

    Shapes, dtypes, shardings, scalars and process-local arrays must be equal in all processes. Rows of global arrays
    must be equal where processes hold copies of the same rows. If processes hold equal values as different rows, every
    process warns.

    Raises:
      ValueError: the batch differs where it must not; raised in every process, names leaf, values and processes.
      TimeoutError: a process did not arrive; names it.
    """
    if len(processes := _processes(mesh, batch)) < 2:
        return
    leaves, me = dict(trees.leaves_with_path(batch)), jax.process_index()
    arrays = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, jax.Array)}
    # Arrays over several processes may hold different rows in each. The rest must be equal everywhere.
    rows = {path: x for path, x in arrays.items() if not (x.is_fully_addressable or x.is_fully_replicated)}
    entries = entries_of({path: leaf for path, leaf in leaves.items() if path not in rows})
    entries |= {path: f"{leaf.dtype}{list(leaf.shape)}, {leaf.sharding}" for path, leaf in rows.items()}
    compare(entries, BATCH, me, processes, PEER_TIMEOUT_S)
    replies = exchange_in(
        KeyValueStore("batch", me, processes), _rows_here(rows), f"compare the {BATCH}", PEER_TIMEOUT_S
    )
    of_process = dict(zip(processes, map(json.loads, replies), strict=True))
    for same in by_text([where for where, _, _ in of_process.values()], processes).values():
        if len({of_process[process][1] for process in same}) > 1:
            raise ValueError(
                f"{named(same)} hold the same rows of the {BATCH}, as copies, and hand in different values. Pass "
                "equal rows in processes whose devices share a shard of the batch; see shard_batch."
            )
    # Rows of a data set differ, so equal values are a mistake there. Rows without variation (zeros of a test) are
    # skipped.
    contents = {process: content for process, (_, content, vary) in of_process.items() if vary}
    for same in by_text([*contents.values()], [*contents]).values():
        if len({of_process[process][0] for process in same}) > 1:
            warn_user(
                f"{named(same)} hand in equal rows as different parts of the {BATCH}: every example counts as "
                "often as there are such processes. Let each read its own part of the data, by jax.process_index().",
            )


def _processes(mesh: Mesh | AbstractMesh, tree: PyTree) -> list[int]:
    """Returns the sorted indices of the processes of the mesh, which must compare the values of ``tree``.

    Returns [] if nothing can be compared: the mesh has devices of one process or is abstract, ``jax.distributed`` is
    not initialised, or a leaf of ``tree`` is traced or abstract.
    """
    processes = [] if isinstance(mesh, AbstractMesh) else sorted({d.process_index for d in mesh.devices.flat})
    # Devices of a compile-only topology name processes that do not run.
    if len(processes) < 2 or not jax.distributed.is_initialized():
        return []
    return [] if any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree)) else processes


def _rows_here(rows: Mapping[str, jax.Array]) -> str:
    """Returns a JSON text ``[places, values, vary]`` about this process's rows of a batch, for comparison.

    ``rows`` are global arrays by path. ``places`` is a digest of the paths and global indices of this process's shards,
    ``values`` a digest of their contents, and ``vary`` is whether any two rows of a shard differ.
    """
    where, contents, vary = [], [], False
    for path, leaf in rows.items():
        values = jax.random.key_data(leaf) if is_prng_key(leaf) else leaf
        shards = {str(shard.index): shard.data for shard in values.addressable_shards}
        for index, shard in sorted(shards.items()):
            content = np.asarray(shard)
            where.append([path, index])
            contents.append(digest(content.tobytes()))
            # Identical rows (zeros of a test) prove nothing: equal digests are then not a mistake.
            flat = content.reshape(len(content), -1) if len(content) > 1 else content.reshape(-1, 1)
            vary = vary or bool(np.any(flat != flat[:1]))
    return json.dumps([digest(json.dumps(where)), digest(json.dumps(contents)), vary])
