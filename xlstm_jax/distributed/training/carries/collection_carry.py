"""Carry for collections of the state: the loss function reads each collection and returns its next value."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import rebox
from xlstm_jax.distributed.training.carries.carry import BatchResult, Carry
from xlstm_jax.distributed.training.collections import updated_collections
from xlstm_jax.distributed.training.gradients import LocalResult, LossFunction


@dataclass(frozen=True)
class CollectionCarry(Carry):
    """Base class of carries whose state is ``collections`` of the model; other fields are as in ``Inputs``."""

    collections: Mapping[str, PyTree]
    axes: tuple[str, ...]
    read_later: bool

    def collection_names(self) -> Collection[str]:
        return self.collections.keys()

    def start(self) -> PyTree:
        return trees.readable(self.collections)

    def read(self, state: PyTree) -> Mapping[str, PyTree]:
        return state

    def next(self, state: PyTree, loss: LossFunction, args: tuple[PyTree, ...], local: LocalResult) -> PyTree:
        return updated_collections(loss, args, [*state], local.collections, self.axes, read_later=self.read_later)

    def finish(self, state: PyTree, result: BatchResult) -> BatchResult:
        # Restore the boxes of the training state, which `readable` replaced for the model.
        updated = trees.map_leaves(rebox, self.collections, trees.stored_values(state))
        return result._replace(collections={**result.collections, **updated})
