"""Registry of carries: kinds of state that a device passes from a minibatch to the next, each kind in a separate file.

To remove a kind, delete its file and its line; batches then run without the state of this kind.
"""

from xlstm_jax.distributed.training.carries.carry import Carry, Inputs
from xlstm_jax.distributed.training.carries.kept_collections import KeptCollections
from xlstm_jax.distributed.training.carries.metric_state import MetricState
from xlstm_jax.distributed.training.carries.overwritten_scales import OverwrittenScales

CARRIES: list[type[Carry]] = [
    OverwrittenScales,
    KeptCollections,  # must be the last collection carry: takes the collections that remain
    MetricState,
]


def carries_of(inputs: Inputs) -> list[Carry]:
    """Returns the carries of a batch: of each class in ``CARRIES``, in order, an instance if ``inputs`` has its state.

    A carry passes state from a minibatch to the next: collections of the model, or the state of a metric. Each
    collection goes to the first class that takes the collection. Raises an ``AssertionError`` if no class takes a
    collection, or the state of the metric.
    """
    carries: list[Carry] = []
    left = dict(inputs.collections)
    for kind in CARRIES:
        if (carry := kind.from_inputs(inputs._replace(collections=left))) is not None:
            carries.append(carry)
            left = {name: tree for name, tree in left.items() if name not in carry.collection_names()}
    # Unclaimed collections would not reach the loss function; unclaimed observations would be averaged.
    assert not left, f"no carry takes the collections {sorted(left)}"
    assert inputs.fold_aux is None or any(carry.takes_aux for carry in carries), "no carry takes the metric"
    return carries
