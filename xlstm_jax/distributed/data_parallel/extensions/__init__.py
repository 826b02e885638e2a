"""Features of units, in a file each. A line below imports the file, which registers the feature.

To remove a feature, delete its line here, its file, and the names that packages export from the file.
"""

from xlstm_jax.deferred import import_with_nnx
from xlstm_jax.distributed.data_parallel import link_balance  # noqa: F401
from xlstm_jax.distributed.data_parallel.extensions import (  # noqa: F401
    fp8_products,
    logical_names,
    masked_statistics,
    packing,
    padding,
    pieces,
    recurrent_carries,
    rows,
)

import_with_nnx("xlstm_jax.distributed.data_parallel.extensions.nnx_rows")
import_with_nnx("xlstm_jax.distributed.data_parallel.extensions.nnx_masked_statistics")
