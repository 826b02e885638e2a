"""The state of a pure metric on a mesh: what each device has seen, and, after ``sync``, what all have.

``MetricAccumulator`` and ``StatefulMetric`` are built on it. A process adds its own values on its own devices, so that
it may do so alone. Only ``sync`` is a program that all processes must run.
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
from xlstm_jax.distributed.device_mesh.checks import auto_mesh, mesh_axes
from xlstm_jax.distributed.device_mesh.meshes import DeviceMeshManager
from xlstm_jax.distributed.metrics.layout import Cells, Layout, Vectors
from xlstm_jax.distributed.metrics.pure_metric import Local, PureMetric, Synced, sync_states
from xlstm_jax.distributed.processes.devices import Device

DEVICES_AXIS = "devices"
# Where a state moves: a device, its number among this process's devices, a mesh, or a platform, as "cpu".
Place = Device | Mesh | str | int
StateDict = dict[str, Any]  # nested dicts of arrays, by the names of states and cells


class MeshState:
    """The state of a pure metric on a mesh: ``local``, and ``synced`` where nothing was added since the last sync."""

    synced: Synced | None

    def __init__(self, metric: PureMetric, initial: Cells, mesh: Mesh | None, axes: AxisNames | None) -> None:
        self.metric = metric
        # NumPy arrays belong to no device: `to` may put the same initial value on another mesh.
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
        """n, the number of local values."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def is_synchronized(self) -> bool:
        """Whether nothing was added since the last ``sync``."""
        return self.synced is not None

    def reset(self) -> None:
        """Forgets everything but the initial value."""
        self._set_local(self._empty)

    def sync(self) -> None:
        """Fills the synchronized value by one collective over all devices; every process must call it."""
        sync_together([self])

    def add_own(self, seen: Vectors, on_all_processes: bool) -> None:
        """Merges what this process has seen into its first row. Process 0 merges what all have seen."""

        def with_row(x: jax.Array, row: jax.Array) -> jax.Array:
            # Assembled from shards: a program over the mesh would wait for the other processes.
            new = {shard.device: jax.device_put(row, shard.device) for shard in _first_shards(x)}
            shards = [new.get(shard.device, shard.data) for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

        # All processes pass the same global array, and each would add it to a row of its own.
        if not on_all_processes or jax.process_index() == 0:
            row = jax.tree.map(lambda x: _first_shards(x)[0].data, self.local.vectors)
            # On the devices of the first row alone: a program over the mesh would wait for the other processes.
            seen = jax.device_put(jax.tree.map(lambda x: x[None], seen), jax.tree.leaves(row)[0].sharding)
            merged = _merge(self.local.layout, row, seen)
            self._set_local(jax.tree.map(with_row, self.local.vectors, merged))
        self.synced = None

    def add_rows(self, rows: Vectors) -> None:
        """Merges [n, ...] row by row."""
        self._set_local(_merge(self.local.layout, self.local.vectors, jax.device_put(rows, self._split)))

    def add_batch(self, arguments: PyTree) -> None:
        """Updates every device's state with its shard of global arrays: (args, kwargs), split along their first dim."""
        self._set_local(_update(self.metric, self.mesh, self.local, arguments).vectors)

    def _set_local(self, vectors: Vectors) -> None:
        self.local, self.synced = Local(vectors, self._initial.layout, self.axes), None

    def of_this_process(self) -> Synced:
        """What the devices of this process have seen together; no other process takes part."""

        def own_rows(x: jax.Array) -> list[jax.Array]:  # [1, k] each, on the device of the first
            # By row number: along other axes of the mesh lie copies of a row, and one copy counts.
            rows = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
            return jax.device_put([rows[start] for start in sorted(rows)], _first_shards(x)[0].device)

        rows = {name: own_rows(x) for name, x in self.local.vectors.items()}
        return Synced(_merge_rows(self.local.layout, rows), self.local.layout)

    def to(self, device: Place) -> None:
        """Moves the state to one device, or to another mesh, over all its axes; no other process may hold local values.

        Where the number of devices changes, the local values are merged into the first.

        Args:
          device: a device or a mesh; an int, the number of a device among ``jax.local_devices()``; or a platform
            ("cpu", "gpu", "tpu"), of which it is the first device.
        Raises:
          ValueError: there is no such device, or other processes hold local values.
        """
        if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(self.local)):
            raise ValueError("to: other processes hold local values of this state; sync it, and take the value.")
        rows, synced = jax.tree.map(np.asarray, (self.local.vectors, self.synced))
        mesh = device if isinstance(device, Mesh) else Mesh(np.asarray([_device_of(device)]), (DEVICES_AXIS,))
        self._put_on(auto_mesh(mesh), mesh.axis_names)
        self._set_rows(rows, synced)

    def state_dict(self) -> StateDict:
        """``{"local", "synchronized", "is_synchronized"}``, nested dicts of arrays, to be saved with the model.

        Arrays are NumPy's where this process can read all of them, else global ``jax.Array``.
        """
        cells = {"local": self.local.cells, "synchronized": (self.synced or self._initial).cells}
        arrays = jax.tree.map(lambda x: np.asarray(x) if is_readable(x) else x, cells)
        return serialization.to_state_dict(arrays) | {"is_synchronized": self.is_synchronized}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Takes up a state that was saved on any number of devices; with another number, merged into the first.

        Raises:
          ValueError: entries, shapes or dtypes do not fit this state, which has not been changed then.
        """
        check_entries(state_dict, {"local", "synchronized", "is_synchronized"})
        cells = jax.eval_shape(self.metric.identity)
        rows = _restored(cells, state_dict["local"], "local", devices=True)
        synced = self.metric.state_of(_restored(cells, state_dict["synchronized"], "synchronized", devices=False))
        # All checks are above: a refused state dict leaves this state as it was.
        rows = jax.vmap(self.metric.state_of)(rows).vectors
        self._set_rows(rows, synced if state_dict["is_synchronized"] else None)

    def _set_rows(self, rows: Vectors, synced: Synced | None) -> None:
        """Takes up rows [m, ...]: one for each device where m is their number, else merged into the first."""
        if len(jax.tree.leaves(rows)[0]) == self.num_devices:
            self._set_local(jax.tree.map(self._put_rows, rows))
        else:
            merged = jax.tree.map(np.asarray, self._initial.layout.merge_rows(rows))
            self._set_local(self._from_first_row(merged))
        if synced is not None:
            self.synced = jax.device_put(synced, NamedSharding(self.mesh, PartitionSpec()))

    def _from_first_row(self, vectors: Vectors) -> Vectors:
        """[k] -> [n, k]: ``vectors`` on the first device, the identity on the others."""
        others = jax.tree.map(np.asarray, self.metric.state_of({}).vectors)
        rows = jax.tree.map(lambda x, zero: np.stack([x, *[zero] * (self.num_devices - 1)]), vectors, others)
        return jax.tree.map(self._put_rows, rows)

    def _put_rows(self, rows: ArrayLike) -> jax.Array:
        """Rows on their devices; no program runs for it, so that no process waits for another."""
        if not is_readable(rows):
            return jax.device_put(rows, self._split)
        rows = np.asarray(rows)
        return jax.make_array_from_callback(rows.shape, self._split, lambda index: rows[index])


def is_readable(x: object) -> bool:
    """Whether this process can read all of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def on_one_device(x: Any) -> Any:
    """An array that this process can read, on one of its devices, without waiting; other values as they are."""
    if not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1:
        return x
    # By a program: `jax.device_put` would wait until the array is computed.
    if not x.is_fully_replicated:
        x = _copying(cast(NamedSharding, x.sharding).mesh)(x)
    return x.addressable_data(0)


@functools.cache
def _copying(mesh: Mesh | AbstractMesh) -> Any:
    # Cached, since jit compiles anew for each new lambda.
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _device_of(place: Device | str | int) -> Device:
    """The device for a device, a number among this process's, or a platform with or without a number ("cpu:1")."""
    if not isinstance(place, str | int):
        return place
    platform, _, number = place.partition(":") if isinstance(place, str) else ("", "", str(place))
    try:
        return jax.local_devices(backend=platform or None)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        there = sorted({f"{device.platform}:{i}" for i, device in enumerate(jax.local_devices())})
        raise ValueError(f"to({place!r}): this process has no such device, but {', '.join(there)}.") from error


def check_entries(given: StateDict, wanted: Iterable[str]) -> None:
    """Raises a ValueError where a state dict does not have exactly the entries ``wanted``."""
    if given.keys() != set(wanted):
        raise ValueError(f"the state dict has the entries {sorted(given)}, and should have {sorted(wanted)}.")


def _restored(like: Cells, saved: Any, name: str, *, devices: bool) -> Cells:
    """The saved arrays in the cells of ``like``, checked; with ``devices`` each has a leading device dim."""
    try:
        cells = serialization.from_state_dict(like, saved)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"state dict[{name!r}] is not the state of such a metric: {error}") from error
    for want, got in zip(jax.tree.leaves(like), jax.tree.leaves(cells), strict=True):
        # A state dict that went through text (JSON, YAML) has Python numbers, which have no dtype.
        shape, dtype = np.shape(got), getattr(got, "dtype", None)
        # `devices` counts as 0 or 1 leading dims, of any size: the state may come from another number of devices.
        wanted = (*shape[:devices], *want.shape)
        if shape != wanted or len(shape) != devices + len(want.shape) or dtype != want.dtype:
            raise ValueError(
                f"state dict[{name!r}] has an array of shape {shape} and dtype {dtype}; "
                f"this metric's has shape {wanted} and dtype {want.dtype}."
            )
    return cells


@functools.partial(jax.jit, static_argnums=0)
def _merge(layout: Layout, a: Vectors, b: Vectors) -> Vectors:
    return layout.merge(a, b)


@functools.partial(jax.jit, static_argnums=0)
def _merge_rows(layout: Layout, rows: dict[str, list[jax.Array]]) -> Vectors:
    return layout.merge_rows({name: jnp.concatenate(some) for name, some in rows.items()})


def _first_shards(x: jax.Array) -> list[jax.Shard]:
    """The shards of the first row of this process; more than one where other mesh axes repeat it."""
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


def sync_together(states: Sequence[MeshState]) -> None:
    """``sync`` of several states, in the same collectives for all that share mesh and axes."""
    groups: dict[tuple[Mesh, tuple[str, ...]], list[MeshState]] = {}
    for state in states:
        # A program runs on one mesh, and one collective over one set of axes.
        groups.setdefault((state.mesh, state.axes), []).append(state)
    for (mesh, _), group in groups.items():
        for state, synced in zip(group, _sync(mesh, [state.local for state in group]), strict=True):
            state.synced = synced
