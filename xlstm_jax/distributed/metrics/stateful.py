"""Metrics that keep their own state, for code outside of the training step: evaluation loops, counters, custom metrics.

A program that drives n devices has n local values, one per device. They live split over the mesh, as one array with a
leading device dim; row i lies on device i::

                     device 0   device 1   device 2   device 3
  MetricAccumulator(jnp.float32(0))
      local   [4]      0.0        0.0        0.0        0.0
  update(5.0)                                                    a number of this process: its first device has it
      local   [4]      5.0        0.0        0.0        0.0
  update(per_device), per_device [4] = 1 2 3 4                   one value per device: each adds its own
      local   [4]      6.0        2.0        3.0        4.0      <- value, before sync: an array [4]
  sync()                                                         one all-reduce over all devices of all processes
      synchronized    15.0       15.0       15.0       15.0      <- value, after sync: an array []

So a number counts once, in one process as in several; with two processes each gives its own. ``update`` never
communicates, and of what a process owns it does not need the other processes to call it as well.
"""

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.device_mesh import DeviceMeshManager, auto_mesh, mesh_axes
from xlstm_jax.distributed.metrics.monoids import Count, Maximum, Minimum, Total
from xlstm_jax.distributed.metrics.states import Cells, Local, PureMetric, Synced, merge_cells, sync_states

DEVICES_AXIS = "devices"


class MetricReduceOp(enum.StrEnum):
    """How values are merged. There is no mean: means of unequal shares cannot be merged; keep a sum and a weight."""

    sum = "sum"
    max = "max"
    min = "min"

    @classmethod
    def _missing_(cls, value: object) -> "MetricReduceOp":
        if value in ("mean", "avg", "average"):
            raise ValueError(
                f"reduce_op={value!r} cannot be merged: the mean of means is not the mean where shares are unequal. "
                "Keep two sums, of values times weights and of weights, and divide in compute, as WeightedMean does."
            )
        raise ValueError(f"reduce_op={value!r} is none of {', '.join(repr(str(op)) for op in cls)}.")


class MeshState:
    """A pure metric's state on a mesh: what each device has seen, and what all have, if in sync."""

    def __init__(self, metric: PureMetric, initial: Cells, mesh: Mesh | None, axes: AxisNames | None) -> None:
        self.metric, self._initial = metric, jax.tree.map(np.asarray, initial)
        mesh = DeviceMeshManager.create_device_mesh({DEVICES_AXIS: -1}) if mesh is None else auto_mesh(mesh)
        self._place_on(mesh, mesh.axis_names if axes is None else mesh_axes(mesh, axes, "axes"))
        self.reset()

    def _place_on(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.mesh, self.axes = mesh, axes
        self._rows = NamedSharding(mesh, PartitionSpec(axes))
        self._empty = self._from_first_row(self._initial)

    @property
    def num_devices(self) -> int:
        """n, the number of local values."""
        return int(np.prod([self.mesh.shape[axis] for axis in self.axes], dtype=int))

    @property
    def is_synchronized(self) -> bool:
        """Whether nothing was added since the last ``sync``."""
        return self.synced is not None

    def reset(self) -> None:
        """Forgets everything but the initial value."""
        self.local, self.synced = Local(self._empty, self.axes), None

    def sync(self) -> None:
        """Fills the synchronized value by one all-reduce over all devices; every process must call it."""
        sync_together([self])

    def add_own(self, cells: Cells, whole_mesh: bool = False) -> None:
        """Merges what this process has seen into its first row; with ``whole_mesh``, what all have, counted once."""
        if not whole_mesh or jax.process_index() == 0:
            self._set_local(_merge_into_first_row(self.local.cells, cells))
        self.synced = None

    def add_rows(self, cells: Cells) -> None:
        """Merges cells with a leading device dim, row by row."""
        self._set_local(_merge_rows(self.local.cells, jax.device_put(cells, self._rows)))

    def add_batch(self, arguments: PyTree) -> None:
        """Updates every device's state with its part of global arrays: (args, kwargs), split along their first dim."""
        specs = jax.tree.map(lambda x: PartitionSpec(self.axes) if np.ndim(x) else PartitionSpec(), arguments)
        leaves, structure = jax.tree.flatten(specs)
        step = _update_on(self.metric, self.mesh, self.axes, structure, tuple(leaves))
        self._set_local(step(self.local, arguments).cells)

    def _set_local(self, cells: Cells) -> None:
        self.local, self.synced = Local(cells, self.axes), None

    def to(self, device: jax.Device | Mesh) -> None:
        """Moves the state to one device, or to another mesh, over all its axes.

        Where the number of devices changes, the local values are merged into the first.

        Raises:
          ValueError: other processes hold a part of it.
        """
        rows = self._host_rows(self.local.cells, "to")
        synced = self.synced and jax.tree.map(np.asarray, self.synced.cells)
        mesh = device if isinstance(device, Mesh) else Mesh(np.asarray([device]), (DEVICES_AXIS,))
        self._place_on(auto_mesh(mesh), mesh.axis_names)
        self._set_local(self._from_rows(rows))
        self.synced = synced and Synced(jax.device_put(synced, NamedSharding(self.mesh, PartitionSpec())))

    def state_dict(self) -> dict[str, Any]:
        """``{"local", "synchronized", "is_synchronized"}``, nested dicts of arrays, to be saved with the model.

        Arrays are NumPy's where this process holds all of them, else global ``jax.Array``.
        """
        synced = self.synced.cells if self.is_synchronized else self._initial
        cells = {"local": self.local.cells, "synchronized": synced}
        arrays = jax.tree.map(lambda x: np.asarray(x) if _is_readable(x) else x, cells)
        return serialization.to_state_dict(arrays) | {"is_synchronized": self.is_synchronized}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up a state that was saved on any number of devices; with another number, merged into the first.

        Raises:
          ValueError: entries, shapes or dtypes are not those of this state; nothing has been changed then.
        """
        _check_entries(state_dict, {"local", "synchronized", "is_synchronized"})
        rows = _restored(self._empty, state_dict["local"], "local", dims=1)
        synced = _restored(self._initial, state_dict["synchronized"], "synchronized", dims=0)
        self._set_local(self._from_rows(rows))
        if bool(state_dict["is_synchronized"]):
            self.synced = Synced(jax.device_put(synced, NamedSharding(self.mesh, PartitionSpec())))

    def _host_rows(self, cells: Cells, caller: str) -> Cells:
        if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(cells)):
            raise ValueError(f"{caller}: other processes hold a part of this state; sync it, and take the value.")
        return jax.tree.map(np.asarray, cells)

    def _from_rows(self, rows: Cells) -> Cells:
        """Rows [m, ...] as the local state: row by row where m is the number of devices, else merged into the first."""
        count = len(jax.tree.leaves(rows)[0])
        if count != self.num_devices:
            each = [jax.tree.map(lambda x, i=i: x[i], rows) for i in range(count)]
            return self._from_first_row(jax.tree.map(np.asarray, functools.reduce(merge_cells, each)))
        return jax.tree.map(self._placed, rows)

    def _from_first_row(self, cells: Cells) -> Cells:
        """[...] -> [n, ...]: ``cells`` on the first device, the identity on the others."""
        others = jax.tree.map(np.asarray, self.metric.identity())
        repeat = self.num_devices - 1
        rows = jax.tree.map(lambda x, zero: np.stack([x, *[zero.astype(x.dtype)] * repeat]), cells, others)
        return jax.tree.map(self._placed, rows)

    def _placed(self, rows: Any) -> jax.Array:
        """Rows on their devices; no program runs for it, so that no process waits for another."""
        if not _is_readable(rows):
            return jax.device_put(rows, self._rows)
        rows = np.asarray(rows)
        return jax.make_array_from_callback(rows.shape, self._rows, lambda index: rows[index])


def _is_readable(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def _check_entries(given: dict[str, Any], wanted: set[str]) -> None:
    if given.keys() != wanted:
        raise ValueError(f"the state dict has the entries {sorted(given)}, and should have {sorted(wanted)}.")


def _restored(like: Cells, saved: Any, name: str, dims: int) -> Cells:
    """The saved arrays in the cells of ``like``, checked; ``dims`` leading dims may differ in size."""
    try:
        cells = serialization.from_state_dict(like, saved)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"state dict[{name!r}] is not the state of such a metric: {error}") from error
    for want, got in zip(jax.tree.leaves(like), jax.tree.leaves(cells), strict=True):
        if np.ndim(got) != np.ndim(want) or np.shape(got)[dims:] != want.shape[dims:] or got.dtype != want.dtype:
            raise ValueError(
                f"state dict[{name!r}] has an array of shape {np.shape(got)} and dtype {getattr(got, 'dtype', None)}; "
                f"this metric's has shape {want.shape} and dtype {want.dtype}."
            )
    return cells


@jax.jit
def _merge_rows(a: Cells, b: Cells) -> Cells:
    return merge_cells(a, b)


def _merge_into_first_row(cells: Cells, seen: Cells) -> Cells:
    """Merges ``seen`` into the first row that this process holds, on that row's devices alone."""
    row = jax.tree.map(lambda x: _first_shards(x)[0].data, cells)
    home = _first_shards(jax.tree.leaves(cells)[0])[0].device
    merged = _merge_rows(row, jax.device_put(seen, home))
    return jax.tree.map(_with_first_row, cells, merged)


def _first_shards(x: jax.Array) -> list[Any]:
    """The shards of the first row of this process; more than one where other mesh axes repeat it."""
    first = min(shard.index[0].start or 0 for shard in x.addressable_shards)
    return [shard for shard in x.addressable_shards if (shard.index[0].start or 0) == first]


def _with_first_row(x: jax.Array, row: jax.Array) -> jax.Array:
    new = {shard.device: jax.device_put(row, shard.device) for shard in _first_shards(x)}
    parts = [new.get(shard.device, shard.data) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


@functools.lru_cache(maxsize=128)
def _update_on(metric: PureMetric, mesh: Mesh, axes: tuple[str, ...], structure: Any, specs: tuple) -> Callable:
    split = PartitionSpec(axes)

    def update(local, arguments):
        args, kwargs = arguments
        return metric.update(local, *args, **kwargs)

    return jax.jit(
        jax.shard_map(update, mesh=mesh, in_specs=(split, jax.tree.unflatten(structure, specs)), out_specs=split)
    )


@functools.lru_cache(maxsize=128)
def _sync_on(mesh: Mesh, axes: tuple[str, ...]) -> Callable[[list[Local]], list[Synced]]:
    places = {"in_specs": PartitionSpec(axes), "out_specs": PartitionSpec()}
    return jax.jit(jax.shard_map(sync_states, mesh=mesh, **places))


def sync_together(states: Sequence[MeshState]) -> None:
    """``sync`` of several states at once: one collective per (operation, dtype) for all that share mesh and axes."""
    groups: dict[Any, list[MeshState]] = {}
    for state in states:
        groups.setdefault((state.mesh, state.axes), []).append(state)
    for (mesh, axes), group in groups.items():
        for state, synced in zip(group, _sync_on(mesh, axes)([state.local for state in group]), strict=True):
            state.synced = synced


# --------------------------------------------------------------------------------------------------------- accumulators


class _Values(PureMetric):
    """Values of one shape and dtype, merged entry by entry."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, operation: MetricReduceOp) -> None:
        self.shape, self.dtype, self.operation = shape, dtype, operation

    def identity(self) -> Cells:
        if self.operation is MetricReduceOp.sum:
            return self._kind().identity(self.shape)
        return self._kind().identity(self.shape, self.dtype)

    def observe(self, values: Any) -> Cells:
        return self._kind().of(jnp.asarray(values, self.dtype), keep=np.ndim(values))

    def result(self, cells: Cells) -> jax.Array:
        if isinstance(cells, Count):
            return (cells.value if self.dtype.itemsize == 8 else cells.low).astype(self.dtype)
        return cells.value.astype(self.dtype)

    def _kind(self) -> Any:
        if self.operation is MetricReduceOp.sum:
            return Count if jnp.issubdtype(self.dtype, jnp.integer) else Total
        return Maximum if self.operation is MetricReduceOp.max else Minimum


class MetricAccumulator(MeshState):
    """A value that is accumulated without communication, and reduced over devices and processes by ``sync``.

    The module's docstring shows what "local" means. Sums are kept compensated (floats) or in 64 bits (integers), so
    that they neither stop at 2^24 nor wrap unseen.
    """

    def __init__(
        self,
        initial_value: jax.typing.ArrayLike,
        reduce_op: MetricReduceOp | str = MetricReduceOp.sum,
        *,
        mesh: Mesh | None = None,
        axes: AxisNames | None = None,
    ) -> None:
        """
        Args:
          initial_value: an array or number, whose shape and dtype are those of the value. It counts once, whatever the
            number of devices: 0 for a sum, -inf for a maximum.
          reduce_op: "sum", "max" or "min", for updates and for ``sync``.
          mesh: the devices that have a local value each; all devices of all processes by default.
          axes: the axes of the mesh that are to be counted; all by default. Along others devices hold the same.
        Raises:
          ValueError: ``reduce_op`` is "mean", which cannot be merged, or unknown.
          TypeError: a sum of bools, or a dtype that is no number.
        """
        self.reduce_op = MetricReduceOp(reduce_op)
        initial = jnp.asarray(initial_value)
        self.shape, self.dtype = initial.shape, initial.dtype
        _check_dtype(self.dtype, self.reduce_op)
        metric = _Values(self.shape, self.dtype, self.reduce_op)
        super().__init__(metric, metric.observe(initial), mesh, axes)

    def update(self, value: jax.typing.ArrayLike) -> None:
        """Merges a value into the local copy; never communicates. ``value`` is the local copy from then on.

        Args:
          value: of the accumulator's shape, or a number: seen by this process, and counted once. (A global array that
            is the same on all devices of several processes counts once in all.) Or one for each device, [n, *shape].
            Numbers and bools do for every operation.
        Raises:
          ValueError: another shape.
          TypeError: a dtype that the accumulator's cannot hold, such as a float for an integer.
        """
        _check_holds(self.dtype, value)
        shape = np.shape(value)
        if shape == (self.num_devices, *self.shape) and self.num_devices:
            self.add_rows(_observe_rows(self.metric, value))
        elif shape in (self.shape, ()):
            value, whole_mesh = _own(value)
            self.add_own(self.metric.observe(np.broadcast_to(np.asarray(value), self.shape)), whole_mesh)
        else:
            raise ValueError(
                f"update got a value of shape {shape}; the accumulator's is {self.shape}. Pass a number or an array of "
                f"that shape, or {(self.num_devices, *self.shape)}: one for each of the {self.num_devices} devices."
            )

    @property
    def value(self) -> jax.Array:
        """The synchronized value [*shape] if in sync, else the local ones [n, *shape], in the accumulator's dtype.

        Raises:
          OverflowError: an integer sum is outside of its dtype.
        """
        cells = self.synced.cells if self.is_synchronized else self.local.cells
        if isinstance(cells, Count):
            self._check_fits(cells)
        return self.metric.result(cells)

    def _check_fits(self, cells: Count) -> None:
        if self.dtype.itemsize == 8 or not _is_readable(cells.low):
            return
        exact, bounds = cells.exact(), jnp.iinfo(self.dtype)
        if np.any((exact < bounds.min) | (exact > bounds.max)):
            raise OverflowError(
                f"the sum is {exact}, beyond the {self.dtype} of the initial value ({bounds.min} to {bounds.max}). "
                "Begin with a float32, or read the Sum of an integer, which is exact to 64 bits."
            )


def _check_dtype(dtype: Any, operation: MetricReduceOp) -> None:
    if _kind_rank(dtype) == _kind_rank(bool) and operation is MetricReduceOp.sum:
        raise TypeError("a sum of bool is True after the first True; begin with jnp.int32(0) to count.")
    if _kind_rank(dtype) > _kind_rank(jnp.float32):
        raise TypeError(f"an accumulator of dtype {dtype} has no {operation}; use an integer or a float.")


def _check_holds(dtype: Any, value: Any) -> None:
    if _kind_rank(jnp.result_type(value)) > _kind_rank(dtype):
        raise TypeError(
            f"update got {jnp.result_type(value)}, which an accumulator of {dtype} cannot hold; begin with an initial "
            "value of that kind."
        )
    if jnp.issubdtype(dtype, jnp.integer) and not isinstance(value, jax.Array) and np.size(value):
        bounds = jnp.iinfo(dtype)
        if np.min(value) < bounds.min or np.max(value) > bounds.max:
            raise OverflowError(f"update got {value}, beyond the accumulator's {dtype} ({bounds.min} to {bounds.max}).")


def _kind_rank(dtype: Any) -> int:
    kinds = (jnp.bool_, jnp.integer, jnp.floating)
    return next((rank for rank, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


@functools.partial(jax.jit, static_argnums=0)
def _observe_rows(metric: PureMetric, value: jax.Array) -> Cells:
    return metric.observe(value)


def _own(value: Any) -> tuple[Any, bool]:
    """The value on this process, and whether it is one that all processes share."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        if not value.is_fully_replicated:
            raise ValueError(
                f"a value of shape {value.shape} lies on several processes; pass one per device, [n, ...]."
            )
        return value.addressable_data(0), True
    return value, False


# -------------------------------------------------------------------------------------------------------- the interface


class Metric(ABC):
    """A metric with a state of its own. A subclass makes accumulators (or other metrics) its attributes::

        class MaxMetric(Metric):
            def __init__(self):
                self.largest = MetricAccumulator(-jnp.inf, "max")

            def update(self, value):
                self.largest.update(value)

            def compute(self):
                return self.largest.value

    ``sync``, ``reset``, ``to``, ``state_dict`` and ``load_state_dict`` reach all of them, also those in lists, tuples
    and dicts.
    """

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Adds a batch to the local state; never communicates."""

    @abstractmethod
    def compute(self) -> PyTree:
        """The value of the metric; after ``sync`` that of all devices and processes."""

    def sync(self) -> None:
        """Synchronizes all states, one collective per (operation, dtype); every process must call it."""
        sync_together([state for _, state in self._states()])

    def reset(self) -> None:
        """Forgets everything but the initial values."""
        for _, state in self._states():
            state.reset()

    def to(self, device: jax.Device | Mesh) -> None:
        """Moves all states to one device, or to another mesh; see ``MetricAccumulator.to``."""
        for _, state in self._states():
            state.to(device)

    def state_dict(self) -> dict[str, Any]:
        """The states by the names of their attributes, as nested dicts of arrays."""
        return {name: state.state_dict() for name, state in self._states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what ``state_dict`` returned, also on another number of devices.

        Raises:
          ValueError: the names, shapes or dtypes are not those of this metric.
        """
        states = dict(self._states())
        _check_entries(state_dict, set(states))
        for name, state in states.items():
            state.load_state_dict(state_dict[name])

    def _states(self) -> Iterator[tuple[str, MeshState]]:
        return _states_in(vars(self), "")


def _states_in(value: Any, path: str) -> Iterator[tuple[str, MeshState]]:
    if isinstance(value, MeshState):
        yield path, value
    elif isinstance(value, Metric):
        yield from _states_in(vars(value), path)
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from _states_in(item, f"{path}/{name}" if path else str(name))


class StatefulMetric(Metric):
    """Any metric of the catalogue with a state of its own: ``StatefulMetric(WeightedMean(), mesh)``."""

    def __init__(self, metric: PureMetric, mesh: Mesh | None = None, axes: AxisNames | None = None) -> None:
        """``mesh`` and ``axes`` as for ``MetricAccumulator``; ``metric`` is hashable, as frozen dataclasses are."""
        self.metric = metric
        self.state = MeshState(metric, metric.identity(), mesh, axes)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Adds a batch; never communicates.

        Global arrays that are split over devices are split over the axes along their first dim, and every device adds
        its part. Anything else (numbers, NumPy arrays, arrays of one device) is what this process has seen, of any
        length, and is counted once; so is an array that is the same on all devices.

        Raises:
          ValueError: the number of devices does not divide the first dim of global arrays.
        """
        arguments = (args, kwargs)
        arrays = [x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)]
        if any(not x.is_fully_replicated for x in arrays):
            _check_divides(arguments, self.state.num_devices)
            self.state.add_batch(arguments)
            return
        whole_mesh = any(not x.is_fully_addressable for x in arrays)
        args, kwargs = jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, arguments)
        self.state.add_own(self.metric.update(self.metric.empty(), *args, **kwargs).cells, whole_mesh)

    def compute(self) -> PyTree:
        """The value of everything that all devices have seen.

        Raises:
          RuntimeError: something was added since the last ``sync``.
        """
        if not self.state.is_synchronized:
            raise RuntimeError("compute reads what all devices have seen: sync() first, or compute_local() for each's.")
        return self.metric.compute(self.state.synced)

    def compute_local(self) -> PyTree:
        """Each device's own value, [n, ...]."""
        return self.metric.compute_local(self.state.local)


def _check_divides(arguments: PyTree, count: int) -> None:
    for x in jax.tree.leaves(arguments):
        if np.ndim(x) and np.shape(x)[0] % count:
            raise ValueError(
                f"update got an array of shape {np.shape(x)}, whose first dim {count} devices do not divide. Pad it to "
                f"{-(-np.shape(x)[0] // count) * count} rows with weight 0."
            )
