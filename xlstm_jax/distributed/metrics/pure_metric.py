"""Metrics as pure functions over frozen states, for use inside the training step.

  metric = WeightedMean()                             the metric: a frozen description, no state
  local  = metric.empty(axes)                         Local:  per-device state, nothing observed
  local  = metric.update(local, losses, weight=mask)          adds the shard of this device; never communicates
  synced = metric.sync(local)                         Synced: merged over devices; one collective, if small
  value  = metric.compute(synced)                     the value of a state

A ``Local`` has one value per device. Every array of a ``Local`` has a leading device dim: of size n outside of
``shard_map``, split over the axes that the batch is split over, and of size 1 inside. So ``PartitionSpec(axes)`` is the
spec of every array of the state:

      dp=0      dp=1      dp=2      dp=3        Local,  [4, ...], PartitionSpec("dp")
    [ 1.5 ]   [ 0.2 ]   [ 3.0 ]   [ 0.0 ]       each device adds to its row
        \\________\\________/________/
               one collective                   sync, on log steps only
                     |
                  [ 4.7 ]                       Synced, [...], PartitionSpec(): replicated

The axes are declared once, in ``empty``. Along declared axes every device counts. Along other axes (tensor parallel)
devices observe equal batches, which count once, in both ``check_vma`` modes. The two states have different types:
``compute`` takes a ``Synced``, and ``compute_local`` takes a ``Local``.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names
from xlstm_jax.distributed.device_mesh.batch_layout import auto_mesh, mesh_axes
from xlstm_jax.distributed.metrics.layout import Cells, Layout, Vectors
from xlstm_jax.explicit_axes import on_auto_axes, on_set_mesh, placed

# Maximum number of bytes that a device receives in a sync by gathering: at 10 GB/s their transfer takes as long as the
# start of a further collective.
GATHER_BYTES = 2**18

State = TypeVar("State", bound="_State")


class _State(struct.PyTreeNode):
    vectors: Vectors
    layout: Layout = struct.field(pytree_node=False)

    @property
    def cells(self) -> Cells:
        """Accumulators of the state, in the structure of ``PureMetric.identity``: a cell or nested dicts of cells.

        The arrays of a ``Local`` state have a leading device dim, [n, ...]; the arrays of a ``Synced`` state do not,
        [...].
        """
        return self.layout.unpack(self.vectors)


class Local(_State):
    """State of a metric with a value for each device along ``axes``; not yet merged over devices.

    Every array has a leading device dim: of size n, the number of devices along ``axes``, outside of ``shard_map``, and
    of size 1 inside.

    >>> from xlstm_jax.distributed.metrics import Sum
    >>> Sum().empty(("dp", "fsdp"), mesh).cells.value
    Array([0., 0., 0., 0., 0., 0., 0., 0.], dtype=float32)
    """

    axes: tuple[str, ...] = struct.field(pytree_node=False)


class Synced(_State):
    """State of a metric merged over devices by ``PureMetric.sync``; every array is replicated.

    >>> from xlstm_jax.distributed.metrics import Sum
    >>> Sum().sync(Sum().update(Sum().empty(), jnp.ones(3))).cells.value
    Array(3., dtype=float32)
    """


class PureMetric(ABC):
    """Base class of metrics without internal state. A subclass implements ``identity``, ``observe`` and ``result``.

    >>> from xlstm_jax.distributed.metrics.cells import Count, Total
    >>> class MeanSquare(PureMetric):
    ...     def identity(self):
    ...         return {"total": Total.identity(), "count": Count.identity()}
    ...     def observe(self, values):
    ...         return {"total": Total.of(values**2), "count": Count.of(values.size)}
    ...     def result(self, cells):
    ...         return cells["total"].value / jnp.maximum(cells["count"].value, 1)
    >>> metric = MeanSquare()
    >>> metric.compute(metric.sync(metric.update(metric.empty(), jnp.array([1.0, 3.0]))))
    Array(5., dtype=float32)
    """

    @abstractmethod
    def identity(self) -> Cells:
        """Returns the neutral cells: an accumulator from the module ``cells``, or a (nested) dict of accumulators."""

    @abstractmethod
    def observe(self, *args: Any, **kwargs: Any) -> Cells:
        """Reduces one batch, the arguments, to accumulators in the structure of ``identity``.

        A dict may omit entries, which the batch then leaves unchanged.
        """

    @abstractmethod
    def result(self, cells: Cells) -> PyTree:
        """Computes the metric's value from the accumulators of a state: an array or a dict of arrays.

        The neutral state must have a defined value, not NaN.
        """

    def empty(self, axes: AxisNames = (), mesh: Mesh | None = None) -> Local:
        """Returns the state without any batch: the neutral accumulators of ``identity`` on every device.

        Args:
          axes: every mesh axis that the batch is split over. Without axes the state is for a single device, or for
            global arrays under plain ``jit``.
          mesh: the mesh to put the state on, outside of ``shard_map``; None inside, where the axes are bound.
        Raises:
          ValueError: an axis is neither bound nor an axis of ``mesh``.
        """
        axes = as_axis_names(axes) if axes else ()
        if mesh is not None:
            return self.as_local(self.state_of({}), axes, mesh)
        collectives.check_bound(axes, caller="empty (outside of shard_map it needs mesh=)")
        nothing = self.state_of({})
        # Typed as varying from the start, as after `update`: the carry of a `scan` over batches must keep its type.
        return Local(collectives.to_varying(_row(nothing.vectors), axes), nothing.layout, axes)

    def update(self, state: Local, *args: Any, **kwargs: Any) -> Local:
        """Returns the state of this device with a batch added; never communicates.

        Args:
          state: the state of this device, from ``empty`` or the previous ``update``; its buffers may be donated.
          *args, **kwargs: the arguments of ``observe``: the shard of the batch on this device. Every device observes a
            Python number.
        Raises:
          TypeError: the state is synchronized, not local; or a type of cell differs from ``identity``.
          ValueError: the state holds the values of several devices (outside of ``shard_map``), or belongs to a
            different metric; or the types of the batch show that the batch varies along an axis that ``empty`` did not
            declare, or does not vary along a declared axis.
        """
        _check_local(state, "update")
        self._check_own(state)
        _check_one_device(state)
        self.check_observed((args, kwargs), state.axes)
        seen = state.layout.pack(self.observe(*args, **kwargs), self.identity())
        merged = state.layout.merge(state.vectors, _row(seen))

        def typed(new: jax.Array, old: jax.Array) -> jax.Array:
            # A merged array may vary over fewer axes (a constant over none); the carry of a `scan` must keep its type.
            return collectives.to_varying(new, sorted(collectives.varying_axes(old)))

        return state.replace(vectors=jax.tree.map(typed, merged, state.vectors))

    def merge(self, a: State, b: State) -> State:
        """Merges two states, device by device; associative and commutative, and ``empty`` is neutral.

        Raises:
          TypeError: one state is local and the other is synchronized.
          ValueError: two local states have different axes, or a state belongs to a different metric.
        """
        if type(a) is not type(b):
            raise TypeError(f"merge of {type(a).__name__} and {type(b).__name__}: sync the local one first.")
        if isinstance(a, Local) and isinstance(b, Local) and a.axes != b.axes:
            raise ValueError(f"merge of states over the axes {a.axes} and {b.axes}.")
        for state in (a, b):
            self._check_own(state)
        return a.replace(vectors=a.layout.merge(a.vectors, b.vectors))

    def sync(self, state: Local) -> Synced:
        """Merges the states of all devices, inside ``shard_map`` or ``pmap``.

        A small state is gathered by one collective, and every device merges the gathered rows at full precision. If a
        device would receive more than ``GATHER_BYTES``, the state takes one all-reduce per (operation, dtype) instead;
        the sums then have float32 precision where devices hold values of very different size. The local state stays
        usable. Put several metrics into a ``Compose`` to synchronize them at once.

        Raises:
          TypeError: the state is synchronized already.
          ValueError: the axes of the state are not bound, or the state holds the values of several devices.
        """
        _check_local(state, "sync")
        return sync_states([state])[0]

    def compute(self, state: Synced) -> PyTree:
        """Computes the value of a synchronized state.

        Raises:
          TypeError: the state is local, and so holds the value of a single device.
          ValueError: the state belongs to a different metric.
        """
        if not isinstance(state, Synced):
            raise TypeError(
                f"compute got a {type(state).__name__}, but takes a synchronized state: call sync(state) first, or "
                "compute_local(state) for the value per device."
            )
        self._check_own(state)
        return self.result(state.cells)

    def compute_local(self, state: Local) -> PyTree:
        """Computes the value of each device, without ``sync``: [n, ...], or [1, ...] inside ``shard_map``.

        Raises:
          TypeError: the state is synchronized, not local.
          ValueError: the state belongs to a different metric.
        """
        _check_local(state, "compute_local")
        self._check_own(state)
        return jax.vmap(self.result)(state.cells)

    def state_of(self, cells: Cells) -> Synced:
        """Returns a ``Synced`` state of ``cells``, accumulators; cells missing from a dict are those of ``identity``.

        Nothing is sent. The cells are used as given: ``observe(batch)`` gives the state of a batch, {} the neutral
        state.

        Raises:
          ValueError: a cell is not in ``identity``, or its shape differs.
          TypeError: the type of a cell differs from ``identity``.
        """
        identity = self.identity()
        layout = Layout(identity)
        return Synced(layout.pack(cells, identity), layout)

    def as_local(self, state: Synced, axes: AxisNames, mesh: Mesh) -> Local:
        """Converts a synchronized state to a local state: ``state`` on the first device, neutral on other devices.

        Use ``as_local`` to resume from a checkpoint on any number of devices: save ``sync(local)``, restore the
        synchronized state, and convert it by ``as_local``. Call the method outside of ``shard_map``.

        Raises:
          ValueError: the state belongs to a different metric, or an axis is not an axis of ``mesh``.
        """
        self._check_own(state)
        axes, mesh = mesh_axes(mesh, axes, "axes"), auto_mesh(mesh)
        # The restored state may be on devices outside of this mesh, which a jitted function rejects.
        vectors = jax.device_put(state.vectors, placed(NamedSharding(mesh, PartitionSpec())))
        rows = on_set_mesh(_on_first_device(vectors, self.state_of({}).vectors, mesh, axes))
        return Local(rows, state.layout, axes)

    def check_observed(self, observed: PyTree, axes: tuple[str, ...]) -> None:
        """Raises a ``ValueError`` unless the batch ``observed`` varies, by its types, along ``axes`` and no other axis.

        ``axes`` are the axes declared in ``empty``. If the batch varies along an undeclared axis, only one device along
        this axis would count. If the batch is equal along a declared axis, equal values would count several times. A
        batch whose types vary along no axis passes, because types then give no information. A metric that divides by
        the number of devices with equal values overrides this method.
        """
        arrays = [x for x in jax.tree.leaves(observed) if isinstance(x, jax.Array)]
        varying = frozenset[str]().union(*(collectives.varying_axes(x) for x in arrays))
        for axis in sorted(varying - set(axes)):
            if collectives.axis_size([axis]) > 1:
                raise ValueError(
                    f"the batch differs along {axis!r}, but the state was declared over {axes}, so only one of "
                    f"{collectives.axis_size([axis])} devices would count. Begin with empty({(*axes, axis)})."
                )
        # If no array varies, `check_vma` is off or the batch is a constant, and types carry no information.
        for axis in axes if varying else ():
            if axis not in varying and collectives.is_bound(axis) and collectives.axis_size([axis]) > 1:
                raise ValueError(
                    f"the batch is the same along {axis!r}, over which the state was declared: it would count "
                    f"{collectives.axis_size([axis])} times. Declare only the axes along which it differs: empty("
                    f"{tuple(a for a in axes if a != axis)})."
                )

    def _check_own(self, state: _State) -> None:
        # Abstract: outside of jit `compute` would otherwise allocate the arrays of a state just for the comparison.
        layout = Layout(jax.eval_shape(self.identity))
        if state.layout != layout:
            raise ValueError(
                f"the state is that of another metric, or of other shapes: the state has the {state.layout}, and this "
                f"metric the {layout}. Pass a state from this metric's empty or state_of."
            )


def _check_local(state: object, caller: str) -> None:
    if not isinstance(state, Local):
        hint = " Convert it with as_local." if isinstance(state, Synced) else " Begin with empty(axes)."
        raise TypeError(f"{caller} takes a Local state, not {type(state).__name__}.{hint}")


def _row(vectors: Vectors) -> Vectors:
    """Returns vectors with a leading device dim of size 1, as in the state of one device: [k] -> [1, k]."""
    return jax.tree.map(lambda x: x[None], vectors)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _on_first_device(vectors: Vectors, nothing: Vectors, mesh: Mesh, axes: tuple[str, ...]) -> Vectors:
    """Returns global vectors [n, k]: ``vectors`` [k] on the first device, ``nothing`` [k] on the other devices.

    ``nothing`` has the vectors of the neutral state. The result is split along dim 0 over ``axes``, which have n
    devices.
    """

    # The identity on other devices: the restored state counts once for any number of devices.
    def place(vectors: Vectors, nothing: Vectors) -> Vectors:
        first = jnp.arange(math.prod(mesh.shape[axis] for axis in axes))[:, None] == 0
        rows = jax.tree.map(lambda x, zero: jnp.where(first, x, zero), vectors, nothing)
        return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec(axes)))

    return on_auto_axes(place, mesh)(vectors, nothing)


def sync_states(states: list[Local]) -> list[Synced]:
    """Returns each of several local states merged over the devices, in order; all states share the collectives.

    Call the function inside ``shard_map``. All states have the same axes. The states are gathered by one collective or,
    if a device would receive more than ``GATHER_BYTES``, merged by an all-reduce per (operation, dtype). Raises a
    ``ValueError`` if the axes are not bound, or if a state holds the values of several devices.
    """
    axes = states[0].axes
    collectives.check_bound(axes, caller="sync")
    for state in states:
        _check_one_device(state)
    local = [Synced(jax.tree.map(lambda x: x[0], state.vectors), state.layout) for state in states]
    leaves, structure = jax.tree.flatten(local)
    # Gathered rows merge as pairs (high, low), at full precision, but a device receives the rows of every device.
    if axes and collectives.axis_size(axes) * sum(leaf.nbytes for leaf in leaves) <= GATHER_BYTES:
        gathered = jax.tree.unflatten(structure, collectives.all_gather_stacked(leaves, axes))
        return [state.replace(vectors=state.layout.merge_rows(state.vectors)) for state in gathered]
    groups = [state.layout.groups_of(state.vectors) for state in local]
    merged = iter(all_reduce_cells([cell for some in groups for cell in some.values()], axes))
    after = [{group: next(merged) for group in some} for some in groups]
    return [state.replace(vectors=state.layout.vectors_of(some)) for state, some in zip(local, after, strict=True)]


def all_reduce_cells(cells: list[Any], axes: tuple[str, ...]) -> list[Any]:
    """Returns each of ``cells`` (accumulators, such as ``Total``) merged over the devices of ``axes``, in order.

    Call the function inside ``shard_map``. All cells share one collective per (operation, dtype), for the operations
    sum, max and min.
    """
    # A collective adds numbers, not pairs: each cell is split into arrays whose plain sums are exact.
    pieces = [cell.pieces() for cell in cells]
    flat = [piece for of_cell in pieces for piece in of_cell]
    reduced = iter(collectives.all_reduce([op for op, _ in flat], [value for _, value in flat], axes))
    return [cell.from_pieces([next(reduced) for _ in parts]) for cell, parts in zip(cells, pieces, strict=True)]


def _check_one_device(state: Local) -> None:
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(state.vectors)}
    if rows - {1}:
        raise ValueError(
            f"the state holds the values of {max(rows)} devices. Call this inside shard_map, with "
            f"PartitionSpec({state.axes}) as the spec of the state; it then holds one."
        )


def make_log_step(metric: PureMetric, mesh: Mesh, axes: AxisNames) -> Callable[[Local], tuple[PyTree, Local]]:
    """Returns a jitted function for log steps: ``log_step(local) -> (values, empty local)``.

    ``log_step`` synchronizes the state, computes the values and returns an empty state. The state, from
    ``metric.empty(axes, mesh)``, is donated. The values are replicated. Read the values one log interval later, so
    that the device does not wait for the host: see ``docs/howto/log.md``. An axis that is not in ``mesh`` raises a
    ``ValueError``.

    >>> from xlstm_jax.distributed.metrics import Sum
    >>> log_step = make_log_step(Sum(), mesh, ("dp", "fsdp"))
    >>> value, local = log_step(Sum().empty(("dp", "fsdp"), mesh))
    >>> float(value)
    0.0
    """
    split, mesh = PartitionSpec(mesh_axes(mesh, axes, "axes")), auto_mesh(mesh)

    def values(local: Local) -> PyTree:
        return metric.compute(metric.sync(local))

    def log_step(local: Local) -> tuple[PyTree, Local]:
        computed = jax.shard_map(values, mesh=mesh, in_specs=split, out_specs=PartitionSpec())(local)
        # Created inside the program, so that the buffers of the donated argument are reused.
        return computed, metric.empty(axes, mesh)

    return jax.jit(on_auto_axes(log_step, mesh, like=lambda local: (PartitionSpec(), local)), donate_argnums=0)
