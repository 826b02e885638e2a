"""Records for a plan what wrapped modules decide: on a mesh without devices they box every leaf with their decisions.

A plan traces ``model.init`` under ``planning_mesh``. There ``shard_module_params`` puts every leaf into a ``Planned``
box, whether it would split the leaf or not. The box travels to the end of ``init`` as the box of a split leaf does:
through ``nn.scan`` and ``nn.vmap``, which add a dim, and through further wrappers, which add decisions. So everything
in a plan was decided by the code that decides in training, on the shapes that it sees there.
"""

from typing import Any, NamedTuple

import jax
from flax import struct
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from xlstm_jax.distributed.data_parallel.dim_names import reader
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_box, leaf_of, true_value
from xlstm_jax.distributed.data_parallel.policy import ShardChoice
from xlstm_jax.distributed.data_parallel.store import AS_IT_IS
from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, axes_entry, entry_axes

_NO_DEVICE = AbstractDevice(device_kind="planned", num_cores=None, platform="planned")


def planning_mesh(axis_sizes: dict[str, int]) -> AbstractMesh:
    """The mesh under which wrapped modules plan; to be set with ``jax.sharding.use_abstract_mesh``."""
    # The name of its devices marks it, and makes it unequal to every real mesh. JAX keeps traced functions by mesh, and
    # would otherwise use in an initialisation what was traced for a plan.
    types = (AxisType.Auto,) * len(axis_sizes)
    return AbstractMesh(tuple(axis_sizes.values()), tuple(axis_sizes), axis_types=types, abstract_device=_NO_DEVICE)


def is_planning() -> bool:
    """Whether modules run under a ``planning_mesh``."""
    return jax.sharding.get_abstract_mesh().abstract_device == _NO_DEVICE


class Decision(NamedTuple):
    """One wrapper's choice for a leaf.

    ``shape`` is the leaf's shape as that wrapper saw it (within ``nn.scan``, of a single layer); ``names`` are the
    leaf's names after the choice. The dtypes are those in which the leaf travels.
    """

    axes: tuple[str, ...]
    choice: ShardChoice
    shape: tuple[int, ...]
    names: tuple[AxisEntry, ...]
    gather_dtype: str
    grad_scatter_dtype: str


class _Decisions(tuple[Decision, ...]):
    """Decisions that all compare as equal."""

    # They are part of a tree's structure. JAX wants it to be equal in all branches of a `cond`; decisions may differ.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Decisions)

    def __hash__(self) -> int:
        return hash(_Decisions)


class Planned(Sharded, repr=False):
    """The box of a leaf in a plan, split or whole. ``decisions`` are those of all wrappers that saw it, in their order.

    ``stands_for`` is the class of the box that the leaf has when the model is initialised; None if it has no box.
    """

    decisions: tuple[Decision, ...] = struct.field(default=_Decisions(), pytree_node=False)
    stands_for: type[Any] | None = struct.field(default=None, pytree_node=False)

    @classmethod
    def of(cls, leaf: Any, boxed: Any, decision: Decision) -> "Planned":
        """A box for ``leaf`` with this decision added; ``boxed`` is the leaf as the decision makes it."""
        # A leaf that stays whole gets a box, too: it carries the decision to the end of init.
        before = leaf if isinstance(leaf, Planned) else None
        was, box = leaf_of(leaf), leaf_of(boxed)
        is_boxed = decision.choice.dim is not None or not box.trainable
        own = boxed if reader().has_rules_for(leaf) else leaf
        stands_for = before.stands_for if before else type(own) if is_box(own) else None
        return cls(
            box.value,
            box.names,
            communication=box.communication,
            store=box.store,
            unit_depth=was.unit_depth,
            trainable=box.trainable,
            marks=was.marks,
            decisions=_Decisions((*(before.decisions if before else ()), decision)),
            stands_for=Sharded if is_boxed else stands_for,
        )

    def gathered(self, axes: tuple[str, ...]) -> "Planned":
        """The leaf as a wrapper over ``axes`` hands it to its module: no longer split over ``axes``."""
        # Split by this wrapper, or by the model over no other axes: else it is for another wrapper to gather.
        ours = any(decision.axes == axes and decision.choice.dim is not None for decision in self.decisions)
        if not ours and not set(self.axes) <= set(axes):
            return self
        kept = (tuple(axis for axis in entry_axes(entry) if axis not in axes) for entry in self.names)
        stored = tuple(map(axes_entry, kept))
        names = self.store.of_value(stored)
        stands_for = self.stands_for if any(names) else None
        return self.replace(value=true_value(self), store=AS_IT_IS, names=names, stands_for=stands_for)

    def _get_partition_name(self, params: dict[Any, Any]) -> str | None:  # type: ignore[override]  # Flax: no None
        # Only a box takes a name for the layer dim that is added to it; a leaf without a box takes none.
        return None if self.stands_for is None else self.stands_for._get_partition_name(self, params)
