"""Features of units, in a file each; every line of the list below registers a feature.

To remove a feature, delete the line and the file.
"""

from xlstm_jax.deferred import import_with_nnx
from xlstm_jax.distributed.data_parallel.extension import register
from xlstm_jax.distributed.data_parallel.extensions import (  # noqa: F401  # these register themselves
    logical_names,  # a reader of names of dims
    padding,  # a store, and a mode of ``uneven``
)
from xlstm_jax.distributed.data_parallel.extensions.fp8_products import Fp8Products
from xlstm_jax.distributed.data_parallel.extensions.masked_statistics import MaskedStatistics
from xlstm_jax.distributed.data_parallel.extensions.packing import PackedGathers
from xlstm_jax.distributed.data_parallel.extensions.pieces import PieceReaders
from xlstm_jax.distributed.data_parallel.extensions.recurrent_carries import RecurrentCarries
from xlstm_jax.distributed.data_parallel.extensions.rows import RowLookups
from xlstm_jax.distributed.data_parallel.link_balance import LinkBalance

register(
    [
        Fp8Products,
        RecurrentCarries,
        RowLookups,
        PieceReaders,
        LinkBalance,
        PackedGathers,
        MaskedStatistics,
    ]
)
# These register themselves.
import_with_nnx("xlstm_jax.distributed.data_parallel.extensions.nnx_rows")
import_with_nnx("xlstm_jax.distributed.data_parallel.extensions.nnx_masked_statistics")
