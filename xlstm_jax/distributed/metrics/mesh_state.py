"""State of a pure metric on a mesh: local values per device and, after ``sync``, the merged value.

``MetricAccumulator`` and ``StatefulMetric`` are built on ``MeshState``. A process adds values on its local devices, so
a process may update while other processes do not. Only ``sync`` is a program that every process must run.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.device_mesh.batch_layout import auto_mesh, mesh_axes
from xlstm_jax.distributed.device_mesh.meshes import DeviceMeshManager
from xlstm_jax.distributed.metrics.layout import Cells, Layout, Vectors
from xlstm_jax.distributed.metrics.pure_metric import Local, PureMetric, Synced, sync_states
from xlstm_jax.distributed.processes.devices import Device
from xlstm_jax.explicit_axes import outside_set_mesh

DEVICES_AXIS = "devices"
# Target of ``to``: a device, an index into ``jax.local_devices()``, a mesh, or a platform such as "cpu".
Place = Device | Mesh | str | int
StateDict = dict[str, Any]  # nested dicts of arrays, by the names of states and cells


class MeshState:
    """State of a pure metric on a mesh: ``local`` per device, ``synced`` merged by ``sync`` (None after an update)."""

    synced: Synced | None

    @outside_set_mesh
    def __init__(self, metric: PureMetric, initial: Cells, mesh: Mesh | None, axes: AxisNames | None) -> None:
        self.metric = metric
        # NumPy arrays are not bound to a device: `to` may put the same initial value on a different mesh.
        self._initial: Synced = jax.tree.map(np.asarray, metric.state_of(initial))
        mesh = DeviceMeshManager.create_device_mesh({DEVICES_AXIS: -1}) if mesh is None else auto_mesh(mesh)
        self._put_on(mesh, mesh.axis_names if axes is None else mesh_axes(mesh, axes, "axes"))
        self.reset()

    def _put_on(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.mesh, self.axes = mesh, axes
        self._split = NamedSharding(mesh, PartitionSpec(axes))
        self._empty = self._from_first_row(self._initial.vectors)

    @property
    def num_devices(self) -> int:
        """Number n of local values: the number of devices along ``axes``. (Devices along other axes hold copies.)"""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def is_synchronized(self) -> bool:
        """Whether ``sync`` was called after the last update."""
        return self.synced is not None

    def reset(self) -> None:
        """Resets the state to the initial value."""
        self._set_local(self._empty)

    def sync(self) -> None:
        """Sets ``synced`` to the merge of all local values over the mesh; every process must call ``sync``."""
        sync_together([self])

    def add_local(self, new_cells: Vectors, on_all_processes: bool) -> None:
        """Adds a new value of this process to the state: merges it into the first local value of this process.

        ``new_cells`` are the accumulators of the new value, packed into vectors [k] by vector name. With
        ``on_all_processes`` every process passes the same global array, and only process 0 merges. Other processes are
        not waited for. The state then counts as not synchronized.
        """

        def with_row(x: jax.Array, row: jax.Array) -> jax.Array:
            # Assembled from shards: a program over the mesh would wait for the other processes.
            new = {shard.device: jax.device_put(row, shard.device) for shard in _first_shards(x)}
            shards = [new.get(shard.device, shard.data) for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

        # A global array that every process passes must be added to one row only.
        if not on_all_processes or jax.process_index() == 0:
            row = jax.tree.map(lambda x: _first_shards(x)[0].data, self.local.vectors)
            # Only on the devices of the first row: a program over the mesh would wait for the other processes.
            new_cells = jax.device_put(jax.tree.map(lambda x: x[None], new_cells), jax.tree.leaves(row)[0].sharding)
            merged = _merge(self.local.layout, row, new_cells)
            self._set_local(jax.tree.map(with_row, self.local.vectors, merged))
        self.synced = None

    def add_rows(self, rows: Vectors) -> None:
        """Merges n new values into the local values of the n devices: row i of ``rows`` on device i.

        ``rows`` are the accumulators of the new values, packed into vectors [n, k] by vector name.
        """
        self._set_local(_merge(self.local.layout, self.local.vectors, jax.device_put(rows, self._split)))

    def add_batch(self, arguments: PyTree) -> None:
        """Updates the local value of each device by ``self.metric``, which observes the device's shard of a batch.

        ``arguments`` is a pair (args, kwargs), the arguments of the metric's ``observe``. Arrays are split along dim 0;
        every device observes each scalar.
        """
        self._set_local(_update(self.metric, self.mesh, self.local, arguments).vectors)

    def _set_local(self, vectors: Vectors) -> None:
        self.local, self.synced = Local(vectors, self._initial.layout, self.axes), None

    def of_this_process(self) -> Synced:
        """Returns the merged local values of the devices of this process as a ``Synced`` state, without communication.

        The state itself is unchanged. A local value that several devices hold as copies counts once.
        """

        def local_rows(x: jax.Array) -> list[jax.Array]:  # [1, k] each, on the device of the first row
            # By row number: a row is replicated along the remaining mesh axes, and counts once.
            rows = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
            return jax.device_put([rows[start] for start in sorted(rows)], _first_shards(x)[0].device)

        rows = {name: local_rows(x) for name, x in self.local.vectors.items()}
        return Synced(_merge_rows(self.local.layout, rows), self.local.layout)

    @outside_set_mesh
    def to(self, device: Place) -> None:
        """Moves the state to a single device, or to a different mesh, which then has a local value on every device.

        If the number of devices changes, the local values are merged into the value of the first device.

        Args:
          device: a device or a mesh; an int, the index of a device in ``jax.local_devices()``; or a platform ("cpu",
            "gpu", "tpu") for its first local device, or a platform with an index ("cpu:1").
        Raises:
          ValueError: this process has no such device, or other processes hold local values.
        """
        if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(self.local)):
            raise ValueError("to: other processes hold local values of this state; sync it, and take the value.")
        rows, synced = jax.tree.map(np.asarray, (self.local.vectors, self.synced))
        mesh = device if isinstance(device, Mesh) else Mesh(np.asarray([_device_of(device)]), (DEVICES_AXIS,))
        self._put_on(auto_mesh(mesh), mesh.axis_names)
        self._set_rows(rows, synced)

    @outside_set_mesh
    def state_dict(self) -> StateDict:
        """Returns the entries "local", "synchronized" (nested dicts of arrays) and "is_synchronized" (a bool), to save.

        "local" has the cells of each device, [n, ...]; "synchronized" has the merged cells, or the initial cells if the
        state is not synchronized. An array is a NumPy array if this process can read every entry, otherwise a global
        ``jax.Array``.
        """
        cells = {"local": self.local.cells, "synchronized": (self.synced or self._initial).cells}
        arrays = jax.tree.map(lambda x: np.asarray(x) if is_readable(x) else x, cells)
        return serialization.to_state_dict(arrays) | {"is_synchronized": self.is_synchronized}

    @outside_set_mesh
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a saved state, the result of ``state_dict``.

        If the number of devices has changed, the local values are merged into the value of the first device.

        Raises:
          ValueError: entries, shapes or dtypes do not fit this state. The state is then unchanged.
        """
        check_entries(state_dict, {"local", "synchronized", "is_synchronized"})
        cells = jax.eval_shape(self.metric.identity)
        rows = _from_saved(cells, state_dict["local"], "local", devices=True)
        synced = self.metric.state_of(_from_saved(cells, state_dict["synchronized"], "synchronized", devices=False))
        # Every check is above, so a rejected state dict leaves this state unchanged.
        rows = jax.vmap(self.metric.state_of)(rows).vectors
        self._set_rows(rows, synced if state_dict["is_synchronized"] else None)

    def _set_rows(self, rows: Vectors, synced: Synced | None) -> None:
        """Sets the local values to ``rows``, and the synchronized state to ``synced``, copied to every device.

        ``rows`` are the accumulators of m devices, packed into vectors [m, k] by vector name. If m is the present
        number of devices, row i becomes the value of device i. Otherwise the m rows are merged into the value of the
        first device. ``synced`` None: the state is not synchronized.
        """
        if len(jax.tree.leaves(rows)[0]) == self.num_devices:
            self._set_local(jax.tree.map(self._put_rows, rows))
        else:
            merged = jax.tree.map(np.asarray, self._initial.layout.merge_rows(rows))
            self._set_local(self._from_first_row(merged))
        if synced is not None:
            self.synced = jax.device_put(synced, NamedSharding(self.mesh, PartitionSpec()))

    def _from_first_row(self, vectors: Vectors) -> Vectors:
        """Returns global vectors [n, k] for n devices: ``vectors`` [k] on the first device, neutral elsewhere.

        The vectors are packed accumulators, by vector name; row i is on device i. The neutral state has no batch.
        """
        others = jax.tree.map(np.asarray, self.metric.state_of({}).vectors)
        rows = jax.tree.map(lambda x, zero: np.stack([x, *[zero] * (self.num_devices - 1)]), vectors, others)
        return jax.tree.map(self._put_rows, rows)

    def _put_rows(self, rows: ArrayLike) -> jax.Array:
        """Returns ``rows`` [n, ...], equal in every process, as a global array with row i on device i.

        An array that this process can read is put without running a program, so that no process waits for a different
        process.
        """
        if not is_readable(rows):
            return jax.device_put(rows, self._split)
        rows = np.asarray(rows)
        return jax.make_array_from_callback(rows.shape, self._split, lambda index: rows[index])


def is_readable(x: object) -> bool:
    """Returns whether this process can read every entry of ``x``: True for any value other than a ``jax.Array``.

    A ``jax.Array`` is readable if all its devices belong to this process, or if it is fully replicated.
    """
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def on_one_device(x: Any) -> Any:
    """Returns a ``jax.Array`` of several devices as an array on a single local device; other values unchanged.

    The array must be readable by this process. The function does not wait for the array to be computed.
    """
    if not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1:
        return x
    # By a jitted copy: `jax.device_put` would wait until the array is computed.
    if not x.is_fully_replicated:
        x = _copying(cast(NamedSharding, x.sharding).mesh)(x)
    return x.addressable_data(0)


@functools.cache
def _copying(mesh: Mesh | AbstractMesh) -> Any:
    # Cached, because jit compiles again for each new lambda.
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _device_of(place: Device | str | int) -> Device:
    """Returns the local device that ``place`` names; a device is returned unchanged.

    ``place`` is an index into ``jax.local_devices()`` (1), a platform ("cpu") for its first local device, or a platform
    with an index ("cpu:1"). Raises a ``ValueError`` if this process has no such device.
    """
    if not isinstance(place, str | int):
        return place
    platform, _, number = place.partition(":") if isinstance(place, str) else ("", "", str(place))
    try:
        return jax.local_devices(backend=platform or None)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        available = sorted({f"{device.platform}:{i}" for i, device in enumerate(jax.local_devices())})
        raise ValueError(f"to({place!r}): this process has no such device, but {', '.join(available)}.") from error


def check_entries(saved: StateDict, expected: Iterable[str]) -> None:
    """Raises a ``ValueError`` unless the keys of ``saved`` are exactly the names in ``expected``, in any order."""
    if saved.keys() != set(expected):
        raise ValueError(f"the state dict has the entries {sorted(saved)}, and should have {sorted(expected)}.")


def _from_saved(like: Cells, saved: Any, name: str, *, devices: bool) -> Cells:
    """Returns ``saved``, an entry of a state dict, as cells in the structure of ``like`` (abstract cells).

    With ``devices`` the saved arrays have a leading device dim of any size, which is kept. Raises a ``ValueError`` with
    ``name``, the entry of the state dict, if structure, shapes or dtypes differ from ``like``.
    """
    try:
        cells = serialization.from_state_dict(like, saved)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"state dict[{name!r}] is not the state of such a metric: {error}") from error
    for want, got in zip(jax.tree.leaves(like), jax.tree.leaves(cells), strict=True):
        # A state dict from text (JSON, YAML) has Python numbers, which have no dtype.
        shape, dtype = np.shape(got), getattr(got, "dtype", None)
        # `devices` counts as 0 or 1 leading dims, of any size: the number of devices may have changed.
        expected_shape = (*shape[:devices], *want.shape)
        if shape != expected_shape or len(shape) != devices + len(want.shape) or dtype != want.dtype:
            raise ValueError(
                f"state dict[{name!r}] has an array of shape {shape} and dtype {dtype}; "
                f"this metric's has shape {expected_shape} and dtype {want.dtype}."
            )
    return cells


@functools.partial(jax.jit, static_argnums=0)
def _merge(layout: Layout, a: Vectors, b: Vectors) -> Vectors:
    return layout.merge(a, b)


@functools.partial(jax.jit, static_argnums=0)
def _merge_rows(layout: Layout, rows: dict[str, list[jax.Array]]) -> Vectors:
    return layout.merge_rows({name: jnp.concatenate(some) for name, some in rows.items()})


def _first_shards(x: jax.Array) -> list[jax.Shard]:
    """Returns the shards of ``x``, split along dim 0, with the lowest row index among the shards of this process.

    The list has several shards if further mesh axes replicate the row over devices of this process.
    """
    first = min(shard.index[0].start or 0 for shard in x.addressable_shards)
    return [shard for shard in x.addressable_shards if (shard.index[0].start or 0) == first]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _update(metric: PureMetric, mesh: Mesh, local: Local, arguments: PyTree) -> Local:
    split = PartitionSpec(local.axes)
    # A scalar has no dim to split, so every device observes it.
    specs = jax.tree.map(lambda x: split if np.ndim(x) else PartitionSpec(), arguments)

    def update(local: Local, arguments: PyTree) -> Local:
        args, kwargs = arguments
        return metric.update(local, *args, **kwargs)

    return jax.shard_map(update, mesh=mesh, in_specs=(split, specs), out_specs=split)(local, arguments)


@functools.partial(jax.jit, static_argnums=0)
def _sync(mesh: Mesh, states: list[Local]) -> list[Synced]:
    split = PartitionSpec(states[0].axes)
    return jax.shard_map(sync_states, mesh=mesh, in_specs=split, out_specs=PartitionSpec())(states)


@outside_set_mesh
def sync_together(states: Sequence[MeshState]) -> None:
    """Synchronizes several states: sets ``synced`` of each to the merge of its local values over all devices.

    States with equal mesh and axes share collectives. Every process must call the function with the same states.
    """
    groups: dict[tuple[Mesh, tuple[str, ...]], list[MeshState]] = {}
    for state in states:
        # A program runs on a single mesh, and a collective over a single set of axes.
        groups.setdefault((state.mesh, state.axes), []).append(state)
    for (mesh, _), group in groups.items():
        for state, synced in zip(group, _sync(mesh, [state.local for state in group]), strict=True):
            state.synced = synced
