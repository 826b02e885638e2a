"""Plans: the decisions of ``shard_params``, made without values.

``model.init`` is traced under ``planning_mesh``, a mesh without devices. Under this mesh ``shard_module_params`` puts
every leaf into a ``PlannedLeaf`` box, including leaves that stay replicated. The box passes through the rest of
``init`` as the box of a split leaf does: ``nn.scan`` and ``nn.vmap`` add a dim, further wrappers add decisions. So
every decision in a plan is made by the code that decides in training, from the shapes in training.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.boxes import reader
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_box, leaf_of, true_value
from xlstm_jax.distributed.data_parallel.policy import ShardChoice, ShardPolicy
from xlstm_jax.distributed.data_parallel.shard import box_params, choice_of
from xlstm_jax.distributed.data_parallel.store import UNCHANGED_STORE
from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry, axes_entry, entry_axes, value_dtype

PLANNED_DEVICE = AbstractDevice(device_kind="planned", num_cores=None, platform="planned")


def planning_mesh(axis_sizes: dict[str, int]) -> AbstractMesh:
    """Returns a mesh without devices under which wrapped modules plan, for ``jax.sharding.use_abstract_mesh``.

    ``axis_sizes`` has the axes in order, with their sizes. The mesh is unequal to every real mesh.
    """
    # The device name marks the mesh, and makes it unequal to every real mesh. JAX caches traced functions by mesh, and
    # would otherwise reuse a function traced for a plan in an initialisation.
    types = (AxisType.Auto,) * len(axis_sizes)
    return AbstractMesh(tuple(axis_sizes.values()), tuple(axis_sizes), axis_types=types, abstract_device=PLANNED_DEVICE)


class Decision(NamedTuple):
    """Decision of one wrapped module on a leaf: whether and along which dim the leaf is split.

    ``shape`` is the leaf's shape in that wrapper (within ``nn.scan``, of a single layer); ``names`` are the leaf's
    names after the choice. The dtypes are the gather dtype and the reduce-scatter dtype.
    """

    axes: tuple[str, ...]
    choice: ShardChoice
    shape: tuple[int, ...]
    names: tuple[AxisEntry, ...]
    gather_dtype: str
    grad_scatter_dtype: str


class _Decisions(tuple[Decision, ...]):
    """Tuple of decisions; all instances compare as equal."""

    # Decisions are part of a tree's structure, which JAX requires to be equal in all branches of a `cond`.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Decisions)

    def __hash__(self) -> int:
        return hash(_Decisions)


class PlannedLeaf(Sharded, repr=False):
    """Box of a leaf in a plan, split or not. ``decisions``: an entry per wrapper of the leaf, in call order.

    ``box_type`` is the class of the box that the leaf has when the model is initialised; ``None`` without a box.
    """

    decisions: tuple[Decision, ...] = struct.field(default=_Decisions(), pytree_node=False)
    box_type: type[Any] | None = struct.field(default=None, pytree_node=False)

    @classmethod
    def of(cls, leaf: Any, boxed: Any, decision: Decision) -> "PlannedLeaf":
        """Returns ``boxed`` as a ``PlannedLeaf`` with the decisions that ``leaf`` has, followed by ``decision``.

        Args:
          leaf: the leaf before the wrapper's decision: a bare value, a box, or a ``PlannedLeaf`` with earlier
            decisions.
          boxed: the same leaf after the decision, as ``box_params`` returns it.
          decision: whether and how the wrapper splits the leaf.
        """
        # A leaf that is not split is boxed, too: the box carries the decision to the end of init.
        before = leaf if isinstance(leaf, PlannedLeaf) else None
        was, box = leaf_of(leaf), leaf_of(boxed)
        is_boxed = decision.choice.dim is not None or not box.trainable
        original = boxed if reader().has_rules_for(leaf) else leaf
        box_type = before.box_type if before else type(original) if is_box(original) else None
        return cls(
            box.value,
            box.names,
            communication=box.communication,
            store=box.store,
            unit_depth=was.unit_depth,
            trainable=box.trainable,
            marks=was.marks | box.marks,
            decisions=_Decisions((*(before.decisions if before else ()), decision)),
            box_type=Sharded if is_boxed else box_type,
        )

    def gathered(self, axes: tuple[str, ...]) -> "PlannedLeaf":
        """Returns the leaf in the form in which a wrapped module reads the leaf after a gather over ``axes``.

        Nothing is gathered: the value of a plan is global. Padding is removed from the value, ``axes`` from the names.
        The leaf is returned unchanged if another wrapper gathers it: if no decision over ``axes`` has split the leaf,
        and an axis that is not in ``axes`` splits it.
        """
        # Gathered here if this wrapper split the leaf, or if only ``axes`` split it; else another wrapper gathers it.
        is_split_over_axes = any(
            decision.axes == axes and decision.choice.dim is not None for decision in self.decisions
        )
        if not is_split_over_axes and not set(self.axes) <= set(axes):
            return self
        remaining = (tuple(axis for axis in entry_axes(entry) if axis not in axes) for entry in self.names)
        stored = tuple(map(axes_entry, remaining))
        names = self.store.of_value(stored)
        box_type = self.box_type if any(names) else None
        return self.replace(value=true_value(self), store=UNCHANGED_STORE, names=names, box_type=box_type)

    def _get_partition_name(self, params: dict[Any, Any]) -> str | None:  # type: ignore[override]  # Flax: no None
        # A box records a name for an added layer dim; a leaf without a box records none.
        return None if self.box_type is None else self.box_type._get_partition_name(self, params)


def plan_params(
    params: PyTree,
    axis_sizes: dict[str, int],
    policy: ShardPolicy,
    wires: Mapping[str, str] = MappingProxyType({}),
) -> PyTree:
    """Returns the tree with each leaf in a ``PlannedLeaf`` box, with the decision of ``shard_params`` on the leaf.

    Args:
      params: global or abstract arrays, bare or in boxes, which may have earlier decisions.
      axis_sizes: the axes to split over, outermost first, with their sizes.
      policy: the options of the wrapped module that decides.
      wires: by path, the names of the formats of leaves that extensions send otherwise than ``policy`` says.
    Raises:
      ValueError: a dtype does not fit a leaf that would be gathered; names the leaf.
    """

    def plan(path: str, leaf: Any, boxed: Any) -> PlannedLeaf:
        box = leaf_of(leaf)
        value, choice = box.value, choice_of(box, axis_sizes, policy)
        gathered, summed = (str(value_dtype(value)),) * 2
        if choice.dim is not None:
            gathered, summed = map(str, map(jnp.dtype, policy.communication.dtypes(value, path)))
            gathered = policy.communication.format_of(value) or gathered
            gathered = wires.get(path, gathered)
        # Names after the split: the next wrapper sees that the dim is taken.
        split = leaf_of(boxed)
        names = split.store.of_value(split.names)
        return PlannedLeaf.of(
            leaf, boxed, Decision(tuple(axis_sizes), choice, np.shape(value), names, gathered, summed)
        )

    return trees.map_leaves_with_path(plan, params, box_params(params, axis_sizes, policy))
