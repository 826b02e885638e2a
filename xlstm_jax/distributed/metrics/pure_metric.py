"""Metrics as pure functions over frozen states, for use inside the training step.

  metric = WeightedMean()                             what is measured: a frozen description, no state
  local  = metric.empty(axes)                         Local:  what each device has seen so far
  local  = metric.update(local, losses, weight=mask)          ... and what it sees now; never communicates
  synced = metric.sync(local)                         Synced: what all have seen; one collective, if small
  value  = metric.compute(synced)

A ``Local`` is one value per device. Every array in it has a leading device dim: n outside of ``shard_map``, split over
the axes that the batch is split over, and 1 inside. So ``PartitionSpec(axes)`` is the spec of the whole state:

      dp=0      dp=1      dp=2      dp=3        Local,  [4, ...], PartitionSpec("dp")
    [ 1.5 ]   [ 0.2 ]   [ 3.0 ]   [ 0.0 ]       each device adds to its own
        \\________\\________/________/
               one collective                   sync, on log steps only
                     |
                  [ 4.7 ]                       Synced, [...], PartitionSpec(): equal everywhere

The axes are declared once, in ``empty``. Along them every device counts; along others (tensor parallel) devices see the
same and it counts once, in both ``check_vma`` modes. The two states have two types, and only ``compute_local`` reads
the first.

A new metric says what the state of nothing is, what the state of one batch is, and what a state means::

    class MeanSquare(PureMetric):
        def identity(self):
            return {"total": Total.identity(), "count": Count.identity()}

        def observe(self, values):
            return {"total": Total.of(values**2), "count": Count.of(values.size)}

        def result(self, state):
            return state["total"].value / jnp.maximum(state["count"].value, 1)
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import collectives
from xlstm_jax.distributed.data_parallel.axes import as_axis_names
from xlstm_jax.distributed.device_mesh.checks import auto_mesh, mesh_axes
from xlstm_jax.distributed.metrics.layout import Cells, Layout, Vectors

# A device may receive so much in one sync: at 10 GB/s it takes as long as another collective would to begin.
GATHER_BYTES = 2**18


@struct.dataclass
class Local:
    """What each device along ``axes`` has seen; every array has a leading device dim, 1 inside of ``shard_map``."""

    vectors: Vectors
    layout: Layout = struct.field(pytree_node=False)
    axes: tuple[str, ...] = struct.field(pytree_node=False)

    @property
    def cells(self) -> Cells:
        """The cells by the names of ``PureMetric.identity``, [n, ...]."""
        return self.layout.unpack(self.vectors)


@struct.dataclass
class Synced:
    """What all devices have seen together; the same on each of them."""

    vectors: Vectors
    layout: Layout = struct.field(pytree_node=False)

    @property
    def cells(self) -> Cells:
        """The cells by the names of ``PureMetric.identity``."""
        return self.layout.unpack(self.vectors)


class PureMetric(ABC):
    """What is measured. A subclass gives ``identity``, ``observe`` and ``result``; the rest follows from them."""

    @abstractmethod
    def identity(self) -> Cells:
        """The state of nothing: a cell of ``monoids``, or a dict of such, nested or not."""

    @abstractmethod
    def observe(self, *args: Any, **kwargs: Any) -> Cells:
        """The state of one batch alone, with the structure of ``identity``; a dict may leave entries out."""

    @abstractmethod
    def result(self, cells: Cells) -> PyTree:
        """What a state means: an array or a dict of arrays; a declared value, no NaN, for the state of nothing."""

    def empty(self, axes: AxisNames = (), mesh: Mesh | None = None) -> Local:
        """The state of nothing on every device.

        Args:
          axes: the mesh axes that the batch is split over, all that are to be counted. Without axes the state is that
            of a single device, or of global arrays under plain ``jit``.
          mesh: outside of ``shard_map``, the mesh to place it on; not given inside, where the axes are bound.
        Raises:
          ValueError: the axes are neither bound nor on a mesh that was given.
        """
        axes = as_axis_names(axes) if axes else ()
        if mesh is not None:
            return self.as_local(self.state_of({}), axes, mesh)
        collectives.check_bound(axes, caller="empty (outside of shard_map it needs mesh=)")
        nothing = self.state_of({})
        return Local(collectives.to_varying(_row(nothing.vectors), axes), nothing.layout, axes)

    def update(self, state: Local, *args: Any, **kwargs: Any) -> Local:
        """Adds a batch to this device's state; never communicates.

        Args:
          state: this device's, from ``empty`` or the previous ``update``; its buffers may be donated.
          *args, **kwargs: what the metric observes: this device's part of the batch. A Python number is what each
            device observes.
        Raises:
          TypeError: the state is no ``Local``.
          ValueError: the state holds several devices' values (outside of ``shard_map``); or the types of what is
            observed show that it differs along an axis that was not declared in ``empty``, or is the same along one
            that was.
        """
        self._check_local(state, "update")
        self._check_own(state)
        _check_one_device(state)
        self.check_observed((args, kwargs), state.axes)
        seen = state.layout.pack(self.observe(*args, **kwargs), self.identity())
        merged = state.layout.merge(state.vectors, _row(seen))
        return state.replace(vectors=jax.tree.map(_typed_like, merged, state.vectors))

    def merge(self, a: Local | Synced, b: Local | Synced) -> Local | Synced:
        """What both have seen, device by device; associative and commutative, with ``empty`` neutral.

        Raises:
          TypeError: one state is local and the other synchronized.
          ValueError: they were declared over different axes.
        """
        if type(a) is not type(b):
            raise TypeError(f"merge of {type(a).__name__} and {type(b).__name__}: sync the local one first.")
        if isinstance(a, Local) and a.axes != b.axes:
            raise ValueError(f"merge of states over the axes {a.axes} and {b.axes}.")
        for state in (a, b):
            self._check_own(state)
        return a.replace(vectors=a.layout.merge(a.vectors, b.vectors))

    def sync(self, state: Local) -> Synced:
        """What all devices have seen, inside ``shard_map`` or ``pmap``.

        A state of which each device receives no more than ``GATHER_BYTES`` is gathered by one collective, and every
        device merges all rows, at full precision. A larger one takes one all-reduce per (operation, dtype), and its
        sums have the precision of float32 where devices hold values of very different size. The local state is as good
        as before. Several metrics are synchronized at once as a ``Compose``.

        Raises:
          TypeError: the state is no ``Local``.
          ValueError: its axes are not bound here.
        """
        self._check_local(state, "sync")
        return sync_states([state])[0]

    def compute(self, state: Synced) -> PyTree:
        """The value of a synchronized state.

        Raises:
          TypeError: the state is local, i.e. one device's.
        """
        if not isinstance(state, Synced):
            raise TypeError(
                f"compute got a {type(state).__name__}, and reads synchronized states: sync(state) first, or "
                "compute_local(state) for every device's own value."
            )
        self._check_own(state)
        return self.result(state.cells)

    def compute_local(self, state: Local) -> PyTree:
        """Each device's own value, with a leading device dim: [n, ...], or [1, ...] inside ``shard_map``."""
        self._check_local(state, "compute_local")
        self._check_own(state)
        return jax.vmap(self.result)(state.cells)

    def state_of(self, cells: Cells) -> Synced:
        """The state that holds these cells; what a dict leaves out is the identity's, as all of ``{}`` is.

        Raises:
          ValueError: a cell that ``identity`` does not have, or of another shape.
          TypeError: a cell of another type.
        """
        identity = self.identity()
        layout = Layout(identity)
        return Synced(layout.pack(cells, identity), layout)

    def as_local(self, state: Synced, axes: AxisNames, mesh: Mesh) -> Local:
        """Takes a synchronized state up again: the first device has it, the others have seen nothing.

        So a run goes on from a checkpoint on any number of devices: save ``sync(local)``, restore it, and call this.
        """
        axes, mesh = mesh_axes(mesh, axes, "axes"), auto_mesh(mesh)
        self._check_own(state)
        vectors = jax.device_put(state.vectors, NamedSharding(mesh, PartitionSpec()))
        return Local(_first_row_on(mesh, axes)(self.state_of({}), vectors), state.layout, axes)

    def check_observed(self, observed: PyTree, axes: tuple[str, ...]) -> None:
        """Raises where the types of what is observed show that devices would be counted wrongly.

        A metric that counts what is the same along an axis by itself makes this do nothing.
        """
        check_declared(observed, axes)

    def _check_local(self, state: Any, caller: str) -> None:
        if not isinstance(state, Local):
            hint = " Take it up again with as_local." if isinstance(state, Synced) else " Begin with empty(axes)."
            raise TypeError(f"{caller} takes a Local state, not {type(state).__name__}.{hint}")

    def _check_own(self, state: Local | Synced) -> None:
        layout = Layout(jax.eval_shape(self.identity))
        if state.layout != layout:
            raise ValueError(
                f"the state is that of another metric, or of other shapes: it has the {state.layout}, and this metric "
                f"the {layout}."
            )


def _row(vectors: Vectors) -> Vectors:
    """[k] -> [1, k]"""
    return jax.tree.map(lambda x: x[None], vectors)


def _rows(state: Synced, mesh: Mesh, axes: tuple[str, ...]) -> Vectors:
    """[k] -> [n, k], the same for every device."""
    count = math.prod(mesh.shape[axis] for axis in axes)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), state.vectors)


@functools.lru_cache(maxsize=128)
def _first_row_on(mesh: Mesh, axes: tuple[str, ...]) -> Callable[[Synced, Vectors], Vectors]:
    """The program that puts vectors on the first device and an empty state on the others; one for all checkpoints."""

    def place(nothing, vectors):
        return jax.tree.map(lambda rows, x: rows.at[0].set(x), _rows(nothing, mesh, axes), vectors)

    return jax.jit(place, out_shardings=NamedSharding(mesh, PartitionSpec(axes)))


def sync_states(states: Sequence[Local]) -> list[Synced]:
    """``PureMetric.sync`` of several states over the same axes, in the same collectives.

    Raises:
      ValueError: the axes differ, or are not bound.
    """
    axes = {state.axes for state in states}
    if len(axes) != 1:
        raise ValueError(f"the states were declared over different axes, {sorted(axes)}; sync them one by one.")
    collectives.check_bound(state_axes := axes.pop(), caller="sync")
    for state in states:
        _check_one_device(state)
    own = [Synced(jax.tree.map(lambda x: x[0], state.vectors), state.layout) for state in states]
    if state_axes and _bytes_to_gather(own, state_axes) <= GATHER_BYTES:
        return _gather_and_merge(own, state_axes)
    return _all_reduce(own, state_axes)


def _bytes_to_gather(states: list[Synced], axes: tuple[str, ...]) -> int:
    """What one device receives if all send it theirs."""
    return collectives.axis_size(axes) * sum(leaf.nbytes for leaf in jax.tree.leaves(states))


def _gather_and_merge(states: list[Synced], axes: tuple[str, ...]) -> list[Synced]:
    """One collective for all; every device merges what it has received."""
    leaves, structure = jax.tree.flatten(states)
    gathered = jax.tree.unflatten(structure, collectives.all_gather_stacked(leaves, axes))
    return [state.replace(vectors=state.layout.merge_rows(state.vectors)) for state in gathered]


def _all_reduce(states: list[Synced], axes: tuple[str, ...]) -> list[Synced]:
    """One collective per (operation, dtype), on the pieces that a plain all-reduce merges."""
    kinds = [state.layout.kinds_of(state.vectors) for state in states]
    pieces = [piece for some in kinds for cell in some.values() for piece in cell.pieces()]
    reduced = iter(collectives.all_reduce([op for op, _ in pieces], [value for _, value in pieces], axes))

    def whole(cell):
        return cell.from_pieces([next(reduced) for _ in cell.pieces()])

    merged = [{kind: whole(cell) for kind, cell in some.items()} for some in kinds]
    return [state.replace(vectors=state.layout.vectors_of(some)) for state, some in zip(states, merged, strict=True)]


def _check_one_device(state: Local) -> None:
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(state.vectors)}
    if rows - {1}:
        raise ValueError(
            f"the state holds the values of {max(rows)} devices. Call this inside shard_map, with "
            f"PartitionSpec({state.axes}) as the spec of the state; it then holds one."
        )


def check_declared(observed: PyTree, axes: tuple[str, ...]) -> None:
    """Raises where types show that devices would be counted wrongly; says nothing where types do not tell."""
    arrays = [x for x in jax.tree.leaves(observed) if isinstance(x, jax.Array)]
    varying = frozenset().union(*(collectives.varying_axes(x) for x in arrays))
    for axis in sorted(varying - set(axes)):
        if collectives.axis_size([axis]) > 1:
            raise ValueError(
                f"what is observed differs along {axis!r}, but the state was declared over {axes}, so only one of "
                f"{collectives.axis_size([axis])} devices would count. Begin with empty({(*axes, axis)})."
            )
    for axis in axes if varying else ():
        if axis not in varying and collectives.is_bound(axis) and collectives.axis_size([axis]) > 1:
            raise ValueError(
                f"what is observed is the same along {axis!r}, over which the state was declared: it would count "
                f"{collectives.axis_size([axis])} times. Declare only the axes that it differs along: empty("
                f"{tuple(a for a in axes if a != axis)})."
            )


def _typed_like(new: jax.Array, old: jax.Array) -> jax.Array:
    """The same type as before, also where a constant was merged, so that a ``scan`` can carry the state."""
    return collectives.to_varying(new, sorted(collectives.varying_axes(old)))


# -------------------------------------------------------------------------------------------------------- on log steps


def make_log_step(metric: PureMetric, mesh: Mesh, axes: AxisNames) -> Callable[[Local], tuple[PyTree, Local]]:
    """The function to call on log steps: ``log_step(local) -> (values, empty local)``, a ``jax.jit`` function.

    Args:
      metric, axes: as in ``metric.empty(axes, mesh)``.
      mesh: the mesh of the state.
    Returns:
      A function that syncs, computes and empties. The state is donated. The values are equal on all devices and need
      not be waited for; hand them to ``MetricLogger``.
    """
    axes, mesh = mesh_axes(mesh, axes, "axes"), auto_mesh(mesh)
    split = PartitionSpec(axes)

    def values(local):
        return metric.compute(metric.sync(local))

    def log_step(local):
        computed = jax.shard_map(values, mesh=mesh, in_specs=split, out_specs=PartitionSpec())(local)
        zeros = _rows(metric.state_of({}), mesh, axes)
        empty = jax.lax.with_sharding_constraint(zeros, NamedSharding(mesh, split))
        return computed, local.replace(vectors=empty)

    return jax.jit(log_step, donate_argnums=0)
