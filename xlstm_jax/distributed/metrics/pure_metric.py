"""Metrics as pure functions over frozen states, for use inside the training step.

  metric = WeightedMean()                             the metric: a frozen description, no state
  local  = metric.empty(axes)                         Local:  what each device has seen so far
  local  = metric.update(local, losses, weight=mask)          ... and what it sees now; never communicates
  synced = metric.sync(local)                         Synced: what all have seen; one collective, if small
  value  = metric.compute(synced)                     the value of a state

A ``Local`` is one value per device. Every array in it has a leading device dim: n outside of ``shard_map``, split over
the axes that the batch is split over, and 1 inside. So ``PartitionSpec(axes)`` is the spec of the whole state:

      dp=0      dp=1      dp=2      dp=3        Local,  [4, ...], PartitionSpec("dp")
    [ 1.5 ]   [ 0.2 ]   [ 3.0 ]   [ 0.0 ]       each device adds to its own
        \\________\\________/________/
               one collective                   sync, on log steps only
                     |
                  [ 4.7 ]                       Synced, [...], PartitionSpec(): equal everywhere

The axes are declared once, in ``empty``. Along them every device counts; along other axes (tensor parallel) devices see
equal batches, which count once, in both ``check_vma`` modes. The two states have two types: ``compute`` takes a
``Synced``, and only ``compute_local`` reads a ``Local``.
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
from xlstm_jax.distributed.data_parallel.wire.axes import as_axis_names
from xlstm_jax.distributed.device_mesh.checks import auto_mesh, mesh_axes
from xlstm_jax.distributed.metrics.layout import Cells, Layout, Vectors

# What a device may receive in one sync: at 10 GB/s it takes as long as another collective would to begin.
GATHER_BYTES = 2**18

State = TypeVar("State", bound="_State")


class _State(struct.PyTreeNode):
    vectors: Vectors
    layout: Layout = struct.field(pytree_node=False)

    @property
    def cells(self) -> Cells:
        """The cells by the names of ``PureMetric.identity``: [...], or [n, ...] of a ``Local``."""
        return self.layout.unpack(self.vectors)


class Local(_State):
    """What each device along ``axes`` has seen; every array has a leading device dim, 1 inside of ``shard_map``.

    >>> from xlstm_jax.distributed.metrics import Sum
    >>> Sum().empty(("dp", "fsdp"), mesh).cells.value
    Array([0., 0., 0., 0., 0., 0., 0., 0.], dtype=float32)
    """

    axes: tuple[str, ...] = struct.field(pytree_node=False)


class Synced(_State):
    """What all devices have seen together; the same on each of them.

    >>> from xlstm_jax.distributed.metrics import Sum
    >>> Sum().sync(Sum().update(Sum().empty(), jnp.ones(3))).cells.value
    Array(3., dtype=float32)
    """


class PureMetric(ABC):
    """A metric, without a state. A subclass gives ``identity``, ``observe`` and ``result``; the rest follows from them.

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
        """The state of nothing: one of ``cells``, or a dict of them, nested or not."""

    @abstractmethod
    def observe(self, *args: Any, **kwargs: Any) -> Cells:
        """The state of one batch alone, with the structure of ``identity``; a dict may leave entries out."""

    @abstractmethod
    def result(self, cells: Cells) -> PyTree:
        """The value of a state: an array or a dict of arrays. The state of nothing has a declared value, not NaN."""

    def empty(self, axes: AxisNames = (), mesh: Mesh | None = None) -> Local:
        """The state of nothing on every device.

        Args:
          axes: all the mesh axes that the batch is split over. Without axes the state is that of a single device, or
            of global arrays under plain ``jit``.
          mesh: outside of ``shard_map``, the mesh to put it on; not given inside, where the axes are bound.
        Raises:
          ValueError: the axes are neither bound nor on a mesh that was given.
        """
        axes = as_axis_names(axes) if axes else ()
        if mesh is not None:
            return self.as_local(self.state_of({}), axes, mesh)
        collectives.check_bound(axes, caller="empty (outside of shard_map it needs mesh=)")
        nothing = self.state_of({})
        # Typed as varying from the start, as after `update`: a `scan` over batches carries one type.
        return Local(collectives.to_varying(_row(nothing.vectors), axes), nothing.layout, axes)

    def update(self, state: Local, *args: Any, **kwargs: Any) -> Local:
        """Adds a batch to this device's state; never communicates.

        Args:
          state: this device's, from ``empty`` or the previous ``update``; its buffers may be donated.
          *args, **kwargs: what the metric observes: this device's shard of the batch. A Python number is observed by
            each device.
        Raises:
          ValueError: the state holds several devices' values (outside of ``shard_map``); or the batch differs along an
            axis that ``empty`` did not declare, or is the same along a declared axis, as its types show.
        """
        _check_local(state, "update")
        self._check_own(state)
        _check_one_device(state)
        self.check_observed((args, kwargs), state.axes)
        seen = state.layout.pack(self.observe(*args, **kwargs), self.identity())
        merged = state.layout.merge(state.vectors, _row(seen))

        def typed(new: jax.Array, old: jax.Array) -> jax.Array:
            # What was merged may vary over fewer axes (a constant over none), and a `scan` wants its carry's type kept.
            return collectives.to_varying(new, sorted(collectives.varying_axes(old)))

        return state.replace(vectors=jax.tree.map(typed, merged, state.vectors))

    def merge(self, a: State, b: State) -> State:
        """What both states have seen, device by device; associative and commutative, with ``empty`` neutral.

        Both states are local, over the same axes, or both are synchronized.
        """
        if type(a) is not type(b):
            raise TypeError(f"merge of {type(a).__name__} and {type(b).__name__}: sync the local one first.")
        if isinstance(a, Local) and isinstance(b, Local) and a.axes != b.axes:
            raise ValueError(f"merge of states over the axes {a.axes} and {b.axes}.")
        for state in (a, b):
            self._check_own(state)
        return a.replace(vectors=a.layout.merge(a.vectors, b.vectors))

    def sync(self, state: Local) -> Synced:
        """What all devices have seen, inside ``shard_map`` or ``pmap``.

        A small state is gathered by one collective, and every device merges all rows at full precision. A state of
        which a device would receive more than ``GATHER_BYTES`` takes one all-reduce per (operation, dtype); its sums
        have the precision of float32 where devices hold values of very different size. The local state stays usable.
        Several metrics are synchronized at once as a ``Compose``.

        Raises:
          ValueError: the axes of the state are not bound here.
        """
        _check_local(state, "sync")
        return sync_states([state])[0]

    def compute(self, state: Synced) -> PyTree:
        """The value of a synchronized state; a ``TypeError`` for a local state, which holds one device's value."""
        if not isinstance(state, Synced):
            raise TypeError(
                f"compute got a {type(state).__name__}, but takes a synchronized state: sync(state) first, or "
                "compute_local(state) for each device's own value."
            )
        self._check_own(state)
        return self.result(state.cells)

    def compute_local(self, state: Local) -> PyTree:
        """Each device's own value, with a leading device dim: [n, ...], or [1, ...] inside ``shard_map``."""
        _check_local(state, "compute_local")
        self._check_own(state)
        return jax.vmap(self.result)(state.cells)

    def state_of(self, cells: Cells) -> Synced:
        """The state that holds these cells; a cell that the dict leaves out is the identity.

        Raises:
          ValueError: a cell that ``identity`` does not have, or of another shape.
          TypeError: a cell of another type.
        """
        identity = self.identity()
        layout = Layout(identity)
        return Synced(layout.pack(cells, identity), layout)

    def as_local(self, state: Synced, axes: AxisNames, mesh: Mesh) -> Local:
        """A local state that goes on from a synchronized one: the first device has it, the others have seen nothing.

        So a run goes on from a checkpoint on any number of devices: save ``sync(local)``, restore it, and call this.
        """
        self._check_own(state)
        axes, mesh = mesh_axes(mesh, axes, "axes"), auto_mesh(mesh)
        # The restored state may lie on other devices than this mesh has, which a jitted function refuses.
        vectors = jax.device_put(state.vectors, NamedSharding(mesh, PartitionSpec()))
        return Local(_on_first_device(vectors, self.state_of({}).vectors, mesh, axes), state.layout, axes)

    def check_observed(self, observed: PyTree, axes: tuple[str, ...]) -> None:
        """Raises where the types of ``observed`` show that devices would be counted wrongly.

        A metric that divides by the number of devices with equal values overrides this.
        """
        arrays = [x for x in jax.tree.leaves(observed) if isinstance(x, jax.Array)]
        varying = frozenset[str]().union(*(collectives.varying_axes(x) for x in arrays))
        for axis in sorted(varying - set(axes)):
            if collectives.axis_size([axis]) > 1:
                raise ValueError(
                    f"the batch differs along {axis!r}, but the state was declared over {axes}, so only one of "
                    f"{collectives.axis_size([axis])} devices would count. Begin with empty({(*axes, axis)})."
                )
        # Where nothing varies, `check_vma` is off or the batch is a constant: types tell nothing then.
        for axis in axes if varying else ():
            if axis not in varying and collectives.is_bound(axis) and collectives.axis_size([axis]) > 1:
                raise ValueError(
                    f"the batch is the same along {axis!r}, over which the state was declared: it would count "
                    f"{collectives.axis_size([axis])} times. Declare only the axes along which it differs: empty("
                    f"{tuple(a for a in axes if a != axis)})."
                )

    def _check_own(self, state: _State) -> None:
        # Abstract: `compute` outside of jit would otherwise make the arrays of a state for a comparison.
        layout = Layout(jax.eval_shape(self.identity))
        if state.layout != layout:
            raise ValueError(
                f"the state is that of another metric, or of other shapes: it has the {state.layout}, and this metric "
                f"the {layout}."
            )


def _check_local(state: object, caller: str) -> None:
    if not isinstance(state, Local):
        hint = " Take it up again with as_local." if isinstance(state, Synced) else " Begin with empty(axes)."
        raise TypeError(f"{caller} takes a Local state, not {type(state).__name__}.{hint}")


def _row(vectors: Vectors) -> Vectors:
    """[k] -> [1, k]"""
    return jax.tree.map(lambda x: x[None], vectors)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _on_first_device(vectors: Vectors, nothing: Vectors, mesh: Mesh, axes: tuple[str, ...]) -> Vectors:
    """[k] -> [n, k]: ``vectors`` on the first device, ``nothing`` on the others."""
    # The identity elsewhere: the restored state counts once, however many devices there are now.
    first = jnp.arange(math.prod(mesh.shape[axis] for axis in axes))[:, None] == 0
    rows = jax.tree.map(lambda x, zero: jnp.where(first, x, zero), vectors, nothing)
    return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec(axes)))


def sync_states(states: list[Local]) -> list[Synced]:
    """``PureMetric.sync`` of several states over the same axes, in the same collectives."""
    axes = states[0].axes
    collectives.check_bound(axes, caller="sync")
    for state in states:
        _check_one_device(state)
    own = [Synced(jax.tree.map(lambda x: x[0], state.vectors), state.layout) for state in states]
    leaves, structure = jax.tree.flatten(own)
    # Gathered rows merge as pairs (high, low), at full precision, but arrive from all devices.
    if axes and collectives.axis_size(axes) * sum(leaf.nbytes for leaf in leaves) <= GATHER_BYTES:
        gathered = jax.tree.unflatten(structure, collectives.all_gather_stacked(leaves, axes))
        return [state.replace(vectors=state.layout.merge_rows(state.vectors)) for state in gathered]
    groups = [state.layout.groups_of(state.vectors) for state in own]
    merged = iter(all_reduce_cells([cell for some in groups for cell in some.values()], axes))
    after = [{group: next(merged) for group in some} for some in groups]
    return [state.replace(vectors=state.layout.vectors_of(some)) for state, some in zip(own, after, strict=True)]


def all_reduce_cells(cells: list[Any], axes: tuple[str, ...]) -> list[Any]:
    """The cells merged over devices, inside ``shard_map``; one collective per (operation, dtype) for all."""
    # A collective adds numbers, not pairs: each cell is taken apart into arrays of which plain sums are exact.
    pieces = [cell.pieces() for cell in cells]
    flat = [piece for of_cell in pieces for piece in of_cell]
    reduced = iter(collectives.all_reduce([op for op, _ in flat], [value for _, value in flat], axes))
    return [cell.from_pieces([next(reduced) for _ in own]) for cell, own in zip(cells, pieces, strict=True)]


def _check_one_device(state: Local) -> None:
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(state.vectors)}
    if rows - {1}:
        raise ValueError(
            f"the state holds the values of {max(rows)} devices. Call this inside shard_map, with "
            f"PartitionSpec({state.axes}) as the spec of the state; it then holds one."
        )


def make_log_step(metric: PureMetric, mesh: Mesh, axes: AxisNames) -> Callable[[Local], tuple[PyTree, Local]]:
    """A jitted function for log steps: ``log_step(local) -> (values, empty local)``.

    It syncs, computes and empties. The state, of ``metric.empty(axes, mesh)``, is donated. The values are equal on all
    devices. Read them an interval later, so that the device does not wait for the host: ``docs/howto/log.md``.

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
        # Made within the program, whose donated argument has buffers of just these shapes.
        return computed, metric.empty(axes, mesh)

    return jax.jit(log_step, donate_argnums=0)
