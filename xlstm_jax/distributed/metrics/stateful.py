"""Metrics with an internal state, for code outside of the training step: evaluation loops, counters, custom metrics.

A program on n devices has n local values, one per device, stored as one array with a leading device dim that is split
over the mesh; row i is on device i::

                     device 0   device 1   device 2   device 3
  MetricAccumulator(jnp.float32(0))
      local   [4]      0.0        0.0        0.0        0.0
  update(5.0)                                                    a number: added on the first device of the process
      local   [4]      5.0        0.0        0.0        0.0
  update(per_device), per_device [4] = 1 2 3 4                   one value per device: added row by row
      local   [4]      6.0        2.0        3.0        4.0      <- local_values: an array [4]
                      15.0                                       <- value, before sync: the total of this process
  sync()                                                         one collective over the devices of every process
      synchronized    15.0       15.0       15.0       15.0      <- value, after sync: the total of every process

So a number counts once per process, for any number of devices; with two processes, each process adds the number that
it passes. ``update`` never communicates and never blocks, even if the value is still being computed. A process may
update while other processes do not.
"""

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.policy import next_multiple
from xlstm_jax.distributed.metrics.cells import Count, Maximum, Minimum, Total
from xlstm_jax.distributed.metrics.layout import Cells, Vectors
from xlstm_jax.distributed.metrics.mesh_state import (
    MeshState,
    Place,
    StateDict,
    check_entries,
    is_readable,
    on_one_device,
    sync_together,
)
from xlstm_jax.distributed.metrics.pure_metric import Local, PureMetric, Synced
from xlstm_jax.explicit_axes import outside_set_mesh

Value = TypeVar("Value")  # return type of Metric.compute


class MetricReduceOp(enum.StrEnum):
    """Operation that merges values: sum, max or min.

    "mean" is rejected, because means over different counts cannot be merged: accumulate a sum and a weight.

    >>> MetricAccumulator(-jnp.inf, MetricReduceOp.max).reduce_op == "max"
    True
    """

    sum = "sum"
    max = "max"
    min = "min"

    @classmethod
    def _missing_(cls, value: object) -> "MetricReduceOp":
        if value in ("mean", "avg", "average"):
            raise ValueError(
                f"reduce_op={value!r} cannot be merged: the mean of means is not the mean if counts differ. Accumulate "
                "the sum of values times weights and the sum of weights, and divide in compute, as WeightedMean does."
            )
        raise ValueError(f"reduce_op={value!r} is none of {', '.join(repr(str(op)) for op in cls)}.")


@dataclass(frozen=True)
class _Entrywise(PureMetric):
    """Metric of arrays with fixed shape and dtype, merged entry by entry. Equal metrics share compiled functions."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    operation: MetricReduceOp

    def identity(self) -> Cells:
        if self.operation is MetricReduceOp.sum:
            return self._sum.identity(self.shape)
        return self._extremum.identity(self.shape, self.dtype)

    def observe(self, values: ArrayLike) -> Cells:
        cell = self._sum if self.operation is MetricReduceOp.sum else self._extremum
        # A count has 64 bits: a cast to a narrow dtype would wrap a value before it is counted.
        values = jnp.asarray(values, None if cell is Count else self.dtype)
        return cell.of(jnp.broadcast_to(values, self.shape), keep=len(self.shape))

    @property
    def _sum(self) -> type[Count] | type[Total]:
        return Count if jnp.issubdtype(self.dtype, jnp.integer) else Total

    @property
    def _extremum(self) -> type[Maximum]:
        return Maximum if self.operation is MetricReduceOp.max else Minimum

    def result(self, cells: Cells) -> jax.Array:
        if isinstance(cells, Count):
            # The low limb is the sum modulo 2^32; `_checked` raises if the sum needs more than 32 bits.
            return (cells.value if self.dtype.itemsize == 8 else cells.low).astype(self.dtype)
        return cells.value.astype(self.dtype)


class MetricAccumulator(MeshState):
    """Accumulator with a local value on each device: ``update`` adds without communication, ``sync`` reduces.

    ``update`` changes the local values of this process; ``sync`` reduces the local values over every device and
    process. (The module docstring has an example.) Float sums are compensated, so a sum does not stop at 2^24. Integer
    sums have 64 bits; reading a sum outside of the accumulator dtype raises an ``OverflowError``.

    >>> total = MetricAccumulator(jnp.float32(0))
    >>> total.update(5)  # a number counts once
    >>> total.update(jnp.arange(8.0))  # one value for each of 8 devices
    >>> total.sync()
    >>> float(total.value)
    33.0
    """

    @outside_set_mesh
    def __init__(
        self,
        initial_value: ArrayLike,
        reduce_op: MetricReduceOp | str = MetricReduceOp.sum,
        *,
        mesh: Mesh | None = None,
        axes: AxisNames | None = None,
    ) -> None:
        """Creates an accumulator with the shape and dtype of ``initial_value``.

        Args:
          initial_value: an array or number, such as 0 for a sum or -inf for a maximum. The initial value counts once,
            for any number of devices.
          reduce_op: "sum", "max" or "min", for updates and for ``sync``.
          mesh: the devices with a local value each; by default the devices of every process.
          axes: the mesh axes along which devices have separate local values; by default every axis. Along the remaining
            axes devices hold copies of a local value, which count once.
        Raises:
          ValueError: ``reduce_op`` is unknown, or is "mean".
          TypeError: a sum of bools, or a dtype other than bool, integer and float, such as complex64.
        """
        self.reduce_op = MetricReduceOp(reduce_op)
        initial = jnp.asarray(initial_value)
        self.shape, self.dtype = initial.shape, initial.dtype
        if jnp.issubdtype(self.dtype, jnp.bool_) and self.reduce_op is MetricReduceOp.sum:
            raise TypeError("a sum of bool is True after the first True; begin with jnp.int32(0) to count.")
        if _rank(self.dtype) == len(RANKS):
            raise TypeError(f"an accumulator of dtype {self.dtype} has no {self.reduce_op}; use an integer or a float.")
        metric = _Entrywise(self.shape, self.dtype, self.reduce_op)
        super().__init__(metric, metric.observe(initial), mesh, axes)

    @outside_set_mesh
    def update(self, value: ArrayLike) -> None:
        """Merges a value into the local values; never communicates, and never waits for pending computations.

        Args:
          value: a number or an array of shape ``self.shape``, which counts once for this process; or one value per
            device, [n, *shape]. (A global array that is replicated over several processes counts once in total.)
            Bools are accepted by every operation.
        Raises:
          ValueError: the shape does not fit, or an array of shape ``self.shape`` is split over several processes.
          TypeError: the accumulator dtype cannot hold the dtype of ``value``, such as a float for an integer; or, for
            "max" and "min", an array on devices with a wider integer dtype.
          OverflowError: an integer of ``value`` on the host is outside of the accumulator dtype.
        """
        _check_holds(self.dtype, value, self.reduce_op)
        shape = np.shape(value)
        if shape == (self.num_devices, *self.shape):
            self.add_rows(_observe_rows(self.metric, self._seen(value)))
        elif shape in (self.shape, ()):
            if not is_readable(value):
                raise ValueError(f"a value of shape {shape} is split over processes; pass one per device, [n, ...].")
            # Readable here, but replicated over processes: every process passes the same array, which counts once.
            on_all_processes = isinstance(value, jax.Array) and not value.is_fully_addressable
            seen = on_one_device(self._seen(value))
            self.add_local(_observe_batch_on_device(self.metric, ((seen,), {})), on_all_processes)
        else:
            raise ValueError(
                f"update got a value of shape {shape}; the accumulator's is {self.shape}. Pass a number or an array of "
                f"that shape, or {(self.num_devices, *self.shape)}: one for each of the {self.num_devices} devices."
            )

    def _seen(self, value: ArrayLike) -> jax.Array | np.ndarray:
        """Returns ``value`` as a NumPy array in the accumulator dtype; a ``jax.Array`` is returned unchanged."""
        # Cast by NumPy: jit would first truncate a host value of 64 bits to 32 bits.
        return value if isinstance(value, jax.Array) else np.asarray(value).astype(self.dtype)

    @property
    @outside_set_mesh
    def value(self) -> jax.Array:
        """Returns the synchronized value, or the value of this process if there was no ``sync`` since the last update.

        The value has the shape and dtype of the initial value. Before ``sync`` the initial value is contained only in
        the value of the process with the first device.

        Raises:
          OverflowError: an integer sum is outside of its dtype.
        """
        return self._checked((self.synced or self.of_this_process()).cells)

    @property
    @outside_set_mesh
    def local_values(self) -> jax.Array:
        """Returns the value per device since the last ``reset``, [n, *shape], in the accumulator dtype.

        Raises:
          OverflowError: an integer sum is outside of its dtype.
        """
        return self._checked(self.local.cells)

    def _checked(self, cells: Cells) -> jax.Array:
        if isinstance(cells, Count) and self.dtype.itemsize < 8 and is_readable(cells.low):
            _check_fits(cells.exact(), self.dtype)
        return self.metric.result(cells)


def _check_fits(sums: np.ndarray, dtype: DTypeLike) -> None:
    bounds = jnp.iinfo(dtype)
    if (beyond := sums[(sums < bounds.min) | (sums > bounds.max)]).size:
        raise OverflowError(
            f"the sum is {beyond[0]}, beyond the {dtype} of the initial value ({bounds.min} to {bounds.max}). "
            "Begin with a float32, or use StatefulMetric(Sum(jnp.int32)), exact to 64 bits."
        )


def _check_holds(dtype: DTypeLike, value: ArrayLike, operation: MetricReduceOp) -> None:
    given = jnp.result_type(value)
    # A sum of integers is counted in 64 bits, and checked when it is read; an extremum is kept in the dtype. The values
    # of an array on devices are not known here.
    is_cut = operation is not MetricReduceOp.sum and isinstance(value, jax.Array) and jnp.issubdtype(given, jnp.integer)
    if _rank(given) > _rank(dtype) or (is_cut and not np.can_cast(given, dtype) and _rank(dtype) == _rank(given)):
        raise TypeError(
            f"update got {given}, which an accumulator of {dtype} cannot hold; begin with an initial "
            "value of a dtype that can."
        )
    if jnp.issubdtype(dtype, jnp.integer) and not isinstance(value, jax.Array) and np.size(value):
        bounds = jnp.iinfo(dtype)
        if np.min(value) < bounds.min or np.max(value) > bounds.max:
            raise OverflowError(f"update got {value}, beyond the accumulator's {dtype} ({bounds.min} to {bounds.max}).")


# Kinds of dtypes; each kind can hold the values of the preceding kinds.
RANKS: tuple[DTypeLike, ...] = (jnp.bool_, jnp.integer, jnp.floating)


def _rank(dtype: DTypeLike) -> int:
    return next((rank for rank, parent in enumerate(RANKS) if jnp.issubdtype(dtype, parent)), len(RANKS))


@functools.partial(jax.jit, static_argnums=0)
def _observe_rows(metric: PureMetric, value: jax.Array) -> Vectors:
    return jax.vmap(lambda row: metric.state_of(metric.observe(row)).vectors)(value)


class Metric(ABC, Generic[Value]):
    """Base class of metrics with an internal state; ``Metric[T]`` if ``compute`` returns a ``T``.

    A subclass stores accumulators (or nested metrics) as attributes, bare or in lists, tuples and dicts. ``sync``,
    ``reset``, ``to``, ``state_dict`` and ``load_state_dict`` apply to every accumulator.

    >>> class MaxMetric(Metric):
    ...     def __init__(self):
    ...         self.largest = MetricAccumulator(-jnp.inf, "max")
    ...     def update(self, value):
    ...         self.largest.update(value)
    ...     def compute(self):
    ...         return self.largest.value
    >>> metric = MaxMetric()
    >>> metric.update(-3)
    >>> metric.sync()
    >>> float(metric.compute())
    -3.0
    """

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Adds a batch, the arguments, to the local values of the accumulators; never communicates. Abstract."""

    @abstractmethod
    def compute(self) -> Value:
        """Computes the metric's value from the accumulators: after ``sync`` the value over every device and process.

        Abstract.
        """

    def sync(self) -> None:
        """Merges the local states of all accumulators over devices and processes; every process must call ``sync``.

        ``compute`` then returns the value over all devices. The local states are kept: you may call ``update`` again,
        and a further ``sync`` merges all values since ``reset``, each once.
        """
        sync_together([state for _, state in self._states()])

    def reset(self) -> None:
        """Sets every accumulator, and every nested metric, to its initial value."""
        for _, state in self._states():
            state.reset()

    def to(self, device: Place) -> None:
        """Moves the states to a single device or to a different mesh, which then has a local value on every device.

        ``device`` is a device, a mesh, an index into ``jax.local_devices()``, or a platform such as "cpu" or "cpu:1".
        Raises a ``ValueError`` if this process has no such device, or if other processes hold local values.
        """
        for _, state in self._states():
            state.to(device)

    def state_dict(self) -> StateDict:
        """Returns the state of each accumulator by attribute path, such as "losses" or "losses/0".

        A state consists of nested dicts of arrays.
        """
        return {name: state.state_dict() for name, state in self._states()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads the result of ``state_dict``, also if saved on a different number of devices.

        Raises:
          ValueError: names, entries, shapes or dtypes do not fit this metric. If only a later accumulator does not fit,
            the accumulators before it are already loaded.
        """
        states = dict(self._states())
        check_entries(state_dict, states)
        for name, state in states.items():
            state.load_state_dict(state_dict[name])

    def _states(self) -> Iterator[tuple[str, MeshState]]:
        # States and metrics are not registered as pytrees, so JAX returns them as leaves, also inside lists and dicts.
        for path, value in jax.tree_util.tree_leaves_with_path(vars(self)):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if isinstance(value, MeshState):
                yield name, value
            elif isinstance(value, Metric):
                yield from ((f"{name}/{inner}", state) for inner, state in value._states())


class StatefulMetric(Metric[PyTree]):
    """Wrapper that gives a pure metric an internal state; ``mesh`` and ``axes`` are as for ``MetricAccumulator``.

    >>> from xlstm_jax.distributed.metrics import WeightedMean
    >>> mean = StatefulMetric(WeightedMean())
    >>> mean.update(np.array([1.0, 4.0]), weight=np.array([3, 1]))
    >>> mean.sync()
    >>> float(mean.compute())
    1.75
    """

    def __init__(self, metric: PureMetric, mesh: Mesh | None = None, axes: AxisNames | None = None) -> None:
        self.metric = metric  # hashable, as frozen dataclasses are
        self.state = MeshState(metric, metric.identity(), mesh, axes)

    @outside_set_mesh
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Adds a batch; never communicates, and never waits for pending computations.

        If an array of the batch is split over devices, every device adds its shard of each array along the first dim,
        and every device observes each scalar. Otherwise the batch (numbers, NumPy arrays, single-device or replicated
        arrays, of any length) counts once for this process; a batch with an array that is replicated over several
        processes counts once in total.

        Raises:
          ValueError: an array is split over devices, and the number of devices does not divide a first dim.
          OverflowError: an array is split over devices, and a NumPy integer needs more bits than JAX's integers have.
        """
        arguments = (args, kwargs)
        leaves = jax.tree.leaves(arguments)
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        is_wide = any(map(_is_wide, leaves))
        # JAX reports a single-device array as fully replicated, too; it counts once for this process.
        if any(not x.is_fully_replicated for x in arrays):
            count = self.state.num_devices
            if is_wide:
                raise OverflowError(
                    "update got a NumPy integer beyond 32 bits beside an array that is split over devices, on which it "
                    "would be truncated. Update with it separately, or enable jax_enable_x64."
                )
            for shape in map(np.shape, leaves):
                if shape and shape[0] % count:
                    raise ValueError(
                        f"update got an array of shape {shape}, whose first dim {count} devices do not divide. Pad it "
                        f"to {next_multiple(shape[0], count)} rows with weight 0."
                    )
            self.state.add_batch(arguments)
            return
        on_all_processes = any(not x.is_fully_addressable for x in arrays)
        observe = _observe_batch_on_device if arrays and not is_wide else _observe_batch
        self.state.add_local(observe(self.metric, jax.tree.map(on_one_device, arguments)), on_all_processes)

    @outside_set_mesh
    def compute(self) -> PyTree:
        """Computes the value over every device from the synchronized state, under ``jit``.

        Raises:
          RuntimeError: the state is not synchronized: there was no ``sync`` since the last batch or ``reset``.
        """
        if self.state.synced is None:
            raise RuntimeError("compute reads the value of all devices: sync() first, or compute_local() for each.")
        return _compute(self.metric, self.state.synced)

    @outside_set_mesh
    def compute_local(self) -> PyTree:
        """Computes the value of each device from the batches that this device has observed, without ``sync``.

        The arrays of the value have a leading dim of the n devices, [n, ...].
        """
        return _compute(self.metric, self.state.local)


def _observe_batch(metric: PureMetric, arguments: PyTree) -> Vectors:
    args, kwargs = arguments
    return metric.state_of(metric.observe(*args, **kwargs)).vectors


def _is_wide(leaf: Any) -> bool:
    """Returns whether ``leaf`` has a NumPy integer beyond the integers of JAX, to which ``jit`` would truncate it."""
    if not isinstance(leaf, np.ndarray | np.integer) or leaf.dtype.kind not in "iu" or not leaf.size:
        return False
    # Values are read only if the dtype could hold a wider one: this runs at every update.
    if (dtype := jax.dtypes.canonicalize_dtype(leaf.dtype)) == leaf.dtype:
        return False
    bounds = jnp.iinfo(dtype)
    return bool(np.min(leaf) < bounds.min or np.max(leaf) > bounds.max)


# A single program, because each of many small programs would wait for the preceding program. A batch without arrays is
# observed without jit, which rejects Python integers above 32 bits.
_observe_batch_on_device = jax.jit(_observe_batch, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _compute(metric: PureMetric, state: Local | Synced) -> PyTree:
    return metric.compute(state) if isinstance(state, Synced) else metric.compute_local(state)
