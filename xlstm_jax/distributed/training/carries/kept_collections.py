"""Carry for ordinary collections of a model, such as the running statistics of ``nn.BatchNorm``."""

from typing import Self

from xlstm_jax.distributed.training.carries.carry import Inputs
from xlstm_jax.distributed.training.carries.collection_carry import CollectionCarry


class KeptCollections(CollectionCarry):
    """Carry for collections not taken by an earlier carry of the registry."""

    @classmethod
    def from_inputs(cls, inputs: Inputs) -> Self | None:
        left = inputs.collections
        return cls(left, inputs.axes, inputs.read_later) if left else None
