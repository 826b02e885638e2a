"""Features that extend the units of a model, one file each, registered here by one line each.

To remove a feature, delete its line and its file.
"""

from xlstm_jax.distributed.data_parallel.extension import EXTENSIONS
from xlstm_jax.distributed.data_parallel.extensions import padding  # noqa: F401  # a store and a mode of ``uneven``
from xlstm_jax.distributed.data_parallel.extensions.fp8_products import Fp8Products
from xlstm_jax.distributed.data_parallel.extensions.nnx_rows import NnxRowLookups
from xlstm_jax.distributed.data_parallel.extensions.pieces import PieceReaders
from xlstm_jax.distributed.data_parallel.extensions.recurrent_carries import RecurrentCarries
from xlstm_jax.distributed.data_parallel.extensions.rows import RowLookups
from xlstm_jax.distributed.data_parallel.link_balance import LinkBalance

EXTENSIONS[:] = [
    Fp8Products,
    RecurrentCarries,
    RowLookups,
    NnxRowLookups,
    PieceReaders,
    LinkBalance,
]
