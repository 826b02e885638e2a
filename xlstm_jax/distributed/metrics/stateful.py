"""Metrics that keep their own state, for code outside of the training step: evaluation loops, counters, your own.

A program that drives n devices has n local values, one per device. They live split over the mesh, as one array with a
leading device dim; row i lies on device i::

                     device 0   device 1   device 2   device 3
  MetricAccumulator(jnp.float32(0))
      local   [4]      0.0        0.0        0.0        0.0
  update(5.0)                                                    a number of this process: its first device has it
      local   [4]      5.0        0.0        0.0        0.0
  update(per_device), per_device [4] = 1 2 3 4                   one value per device: each adds its own
      local   [4]      6.0        2.0        3.0        4.0      <- local_values: an array [4]
                      15.0                                       <- value, before sync: what this process has seen
  sync()                                                         one collective over all devices of all processes
      synchronized    15.0       15.0       15.0       15.0      <- value, after sync: what all have

So a number counts once, whatever the number of devices; each of two processes adds its own number. ``update`` never
communicates and waits for nothing: a value may still be in computation. A process may update while the others do not.
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

Value = TypeVar("Value")  # what the compute of a metric returns


class MetricReduceOp(enum.StrEnum):
    """How values are merged. There is no mean: means over different counts cannot be merged; keep a sum and a weight.

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
                f"reduce_op={value!r} cannot be merged: the mean of means is not the mean where counts differ. "
                "Keep two sums, of values times weights and of weights, and divide in compute, as WeightedMean does."
            )
        raise ValueError(f"reduce_op={value!r} is none of {', '.join(repr(str(op)) for op in cls)}.")


@dataclass(frozen=True)
class _Entrywise(PureMetric):
    """Values of one shape and dtype, merged entry by entry. Equal metrics share compiled functions."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    operation: MetricReduceOp

    def identity(self) -> Cells:
        if self.operation is MetricReduceOp.sum:
            return self._sum.identity(self.shape)
        return self._extremum.identity(self.shape, self.dtype)

    def observe(self, values: ArrayLike) -> Cells:
        cell = self._sum if self.operation is MetricReduceOp.sum else self._extremum
        return cell.of(jnp.broadcast_to(jnp.asarray(values, self.dtype), self.shape), keep=len(self.shape))

    @property
    def _sum(self) -> type[Count] | type[Total]:
        return Count if jnp.issubdtype(self.dtype, jnp.integer) else Total

    @property
    def _extremum(self) -> type[Maximum]:
        return Maximum if self.operation is MetricReduceOp.max else Minimum

    def result(self, cells: Cells) -> jax.Array:
        if isinstance(cells, Count):
            # The low limb is the sum modulo 2^32, all that 32 bits hold; `_checked` refuses a sum that needs more.
            return (cells.value if self.dtype.itemsize == 8 else cells.low).astype(self.dtype)
        return cells.value.astype(self.dtype)


class MetricAccumulator(MeshState):
    """A value that is accumulated without communication, and reduced over devices and processes by ``sync``.

    The module's docstring shows what "local" means. Sums are kept compensated (floats) or in 64 bits (integers), so
    that they neither stop at 2^24 nor wrap unseen.

    >>> total = MetricAccumulator(jnp.float32(0))
    >>> total.update(5)  # a number counts once
    >>> total.update(jnp.arange(8.0))  # one value for each of 8 devices
    >>> total.sync()
    >>> float(total.value)
    33.0
    """

    def __init__(
        self,
        initial_value: ArrayLike,
        reduce_op: MetricReduceOp | str = MetricReduceOp.sum,
        *,
        mesh: Mesh | None = None,
        axes: AxisNames | None = None,
    ) -> None:
        """
        Args:
          initial_value: an array or number, which gives the accumulator its shape and dtype. It counts once, whatever
            the number of devices: 0 for a sum, -inf for a maximum.
          reduce_op: "sum", "max" or "min", for updates and for ``sync``.
          mesh: the devices that have a local value each; all devices of all processes by default.
          axes: the axes of the mesh along which devices count; all by default. Along other axes they hold equal values.
        Raises:
          ValueError: ``reduce_op`` is "mean", which cannot be merged, or unknown.
          TypeError: a sum of bools, or a dtype that is no number.
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

    def update(self, value: ArrayLike) -> None:
        """Merges a value into the local values; never communicates, nor waits for a value that is being computed.

        Args:
          value: a number, or an array of the accumulator's shape, which counts once as this process's value. (A global
            array that is equal on all devices of several processes counts once in all.) Or one value for each device,
            [n, *shape]. Every operation takes numbers and bools.
        Raises:
          ValueError: another shape.
          TypeError: a dtype that the accumulator's cannot hold, such as a float for an integer.
        """
        _check_holds(self.dtype, value)
        shape = np.shape(value)
        if shape == (self.num_devices, *self.shape):
            self.add_rows(_observe_rows(self.metric, self._seen(value)))
        elif shape in (self.shape, ()):
            if not is_readable(value):
                raise ValueError(f"a value of shape {shape} lies on several processes; pass one per device, [n, ...].")
            # Readable here, but with copies on other processes: they all pass this array, and it counts once.
            on_all_processes = isinstance(value, jax.Array) and not value.is_fully_addressable
            seen = on_one_device(self._seen(value))
            self.add_own(_observe_batch_on_device(self.metric, ((seen,), {})), on_all_processes)
        else:
            raise ValueError(
                f"update got a value of shape {shape}; the accumulator's is {self.shape}. Pass a number or an array of "
                f"that shape, or {(self.num_devices, *self.shape)}: one for each of the {self.num_devices} devices."
            )

    def _seen(self, value: ArrayLike) -> jax.Array | np.ndarray:
        """The value as it is observed: a host value in the accumulator's dtype."""
        # Cast by NumPy: jit would first cut a host value of 64 bits to 32.
        return value if isinstance(value, jax.Array) else np.asarray(value).astype(self.dtype)

    @property
    def value(self) -> jax.Array:
        """[*shape] in the accumulator's dtype: the synchronized value if in sync, else this process's own value.

        The initial value counts in the value of the first process.

        Raises:
          OverflowError: an integer sum is outside of its dtype.
        """
        return self._checked((self.synced or self.of_this_process()).cells)

    @property
    def local_values(self) -> jax.Array:
        """[n, *shape]: what each device has seen since the last ``reset``, in the accumulator's dtype.

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
            "Begin with a float32, or read the Sum of an integer, which is exact to 64 bits."
        )


def _check_holds(dtype: DTypeLike, value: ArrayLike) -> None:
    if _rank(jnp.result_type(value)) > _rank(dtype):
        raise TypeError(
            f"update got {jnp.result_type(value)}, which an accumulator of {dtype} cannot hold; begin with an initial "
            "value of a dtype that can."
        )
    if jnp.issubdtype(dtype, jnp.integer) and not isinstance(value, jax.Array) and np.size(value):
        bounds = jnp.iinfo(dtype)
        if np.min(value) < bounds.min or np.max(value) > bounds.max:
            raise OverflowError(f"update got {value}, beyond the accumulator's {dtype} ({bounds.min} to {bounds.max}).")


# Each kind of dtype holds the values of the kinds before it.
RANKS: tuple[DTypeLike, ...] = (jnp.bool_, jnp.integer, jnp.floating)


def _rank(dtype: DTypeLike) -> int:
    return next((rank for rank, parent in enumerate(RANKS) if jnp.issubdtype(dtype, parent)), len(RANKS))


@functools.partial(jax.jit, static_argnums=0)
def _observe_rows(metric: PureMetric, value: jax.Array) -> Vectors:
    return jax.vmap(lambda row: metric.state_of(metric.observe(row)).vectors)(value)


class Metric(ABC, Generic[Value]):
    """A metric with a state of its own, ``Metric[T]`` where ``compute`` returns a ``T``.

    A subclass makes accumulators (or other metrics) its attributes, alone or in lists, tuples and dicts. ``sync``,
    ``reset``, ``to``, ``state_dict`` and ``load_state_dict`` reach all of them.

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
        """Adds a batch to the local state; never communicates."""

    @abstractmethod
    def compute(self) -> Value:
        """The value of the metric; after ``sync`` the value of all devices and processes."""

    def sync(self) -> None:
        """Synchronizes all states in the same collectives, as ``PureMetric.sync``; every process must call it."""
        sync_together([state for _, state in self._states()])

    def reset(self) -> None:
        """Forgets everything but the initial values."""
        for _, state in self._states():
            state.reset()

    def to(self, device: Place) -> None:
        """Moves all states to one device, or to another mesh; see ``MetricAccumulator.to``."""
        for _, state in self._states():
            state.to(device)

    def state_dict(self) -> StateDict:
        """The states by the names of their attributes, as nested dicts of arrays."""
        return {name: state.state_dict() for name, state in self._states()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Takes up what ``state_dict`` returned, also on another number of devices; see ``MetricAccumulator``."""
        states = dict(self._states())
        check_entries(state_dict, states)
        for name, state in states.items():
            state.load_state_dict(state_dict[name])

    def _states(self) -> Iterator[tuple[str, MeshState]]:
        # States and metrics are no pytrees to JAX, so they come out as leaves, also of lists and dicts.
        for path, value in jax.tree_util.tree_leaves_with_path(vars(self)):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if isinstance(value, MeshState):
                yield name, value
            elif isinstance(value, Metric):
                yield from ((f"{name}/{inner}", state) for inner, state in value._states())


class StatefulMetric(Metric[PyTree]):
    """Any metric of the catalogue with a state of its own; ``mesh`` and ``axes`` as for ``MetricAccumulator``.

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

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Adds a batch; never communicates, nor waits for arrays that are being computed.

        Of global arrays that are split over devices every device adds its shard along the first dim. Other values
        (numbers, NumPy arrays, arrays of one device), of any length, are this process's and count once; so does an
        array that is equal on all devices.

        Raises:
          ValueError: the number of devices does not divide the first dim of global arrays.
        """
        arguments = (args, kwargs)
        arrays = [x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)]
        # JAX calls an array on one device fully replicated, too: that one is this process's.
        if any(not x.is_fully_replicated for x in arrays):
            count = self.state.num_devices
            for shape in (np.shape(x) for x in jax.tree.leaves(arguments)):
                if shape and shape[0] % count:
                    raise ValueError(
                        f"update got an array of shape {shape}, whose first dim {count} devices do not divide. Pad it "
                        f"to {next_multiple(shape[0], count)} rows with weight 0."
                    )
            self.state.add_batch(arguments)
            return
        on_all_processes = any(not x.is_fully_addressable for x in arrays)
        observe = _observe_batch_on_device if arrays else _observe_batch
        self.state.add_own(observe(self.metric, jax.tree.map(on_one_device, arguments)), on_all_processes)

    def compute(self) -> PyTree:
        """The value of all that all devices have seen, computed under ``jit``.

        Raises:
          RuntimeError: something was added since the last ``sync``.
        """
        if self.state.synced is None:
            raise RuntimeError("compute reads the value of all devices: sync() first, or compute_local() for each.")
        return _compute(self.metric, self.state.synced)

    def compute_local(self) -> PyTree:
        """Each device's own value, [n, ...]."""
        return _compute(self.metric, self.state.local)


def _observe_batch(metric: PureMetric, arguments: PyTree) -> Vectors:
    args, kwargs = arguments
    return metric.state_of(metric.observe(*args, **kwargs)).vectors


# One program: of many small ones each would wait for the one before. Python numbers alone are observed without jit,
# which refuses integers beyond its 32 bits.
_observe_batch_on_device = jax.jit(_observe_batch, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _compute(metric: PureMetric, state: Local | Synced) -> PyTree:
    return metric.compute(state) if isinstance(state, Synced) else metric.compute_local(state)
