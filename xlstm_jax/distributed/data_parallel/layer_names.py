"""Names of leading (layer) dims of a leaf, which a box of one layer does not have: added, and left out."""

from typing import Any

import numpy as np
from flax.core import meta

from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_box


def with_layer_names(leaf: Any) -> Any:
    """Returns a boxed leaf with ``None`` in front of its names, once for each leading (layer) dim without a name.

    The box of [layers, d, f] with the names (None, "fsdp") gets (None, None, "fsdp"). A bare leaf is unchanged.
    """
    if not isinstance(leaf, meta.Partitioned):
        return leaf
    layers = (None,) * (np.ndim(leaf.value) - len(leaf.names))
    stores = {}
    if isinstance(leaf, Sharded):
        store = leaf.store
        for _ in layers:
            store = store.with_dim(0)
        stores = {"store": store}
    return leaf.replace(names=layers + tuple(leaf.names), **stores)


def with_last_names(leaf: Any, ndim: int) -> Any:
    """Returns a boxed leaf with only the last ``ndim`` names: without the names of leading layer dims.

    The names (None, None, "fsdp") become (None, "fsdp") for ``ndim`` 2. The value is unchanged, as is a bare leaf.
    """
    return leaf.replace(names=tuple(leaf.names)[-ndim:]) if is_box(leaf) else leaf
