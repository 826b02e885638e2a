"""Layers split over a model axis (tensor, sequence, context or expert parallel), in addition to parameter sharding.

dense            products split by columns or rows (tensor parallel), and tokens split between products (sequence
                 parallel)
attention        attention with split heads
embedding        an embedding with a split vocabulary
splitting        splits dense layers of a model without an edit of the model
nnx_splitting    splits layers of an NNX model
split_input      norms and dropout on split tokens or heads
activations      how activations enter and leave split layers, and how tokens are split between such layers
context          attention over a split sequence: keys are gathered, exchanged for heads, or sent around a ring
sequence_layout  the order of a split sequence's tokens on the devices, stored in a single place
recurrence       the state of a recurrence before the first token of each device of a split sequence
experts          a mixture of experts, split over devices: tokens are sent to the experts and back
router           the choice of experts for each token, and the losses that balance the choices

Life of a column-split kernel W[d, f] on the axes "fsdp" and "tp" (f_tp: dim f is split over "tp"):
  init      W[d, f]            -- on any number of devices --   the same values, in a box that names "tp"
  between   W[d_fsdp, f_tp]    a device stores its shard of both splits, see ``shard_module_params``
  forward   W[d, f_tp]         gathered over "fsdp" alone; the product with x[b, t, d] is y[b, t, f_tp]
  backward  dW[d_fsdp, f_tp]   the mean over "fsdp"; along "tp" each device has the gradient of its columns
"""

from xlstm_jax.deferred import import_with_nnx
from xlstm_jax.distributed.model_parallel.activations import (
    enter_split,
    gather_tokens,
    join_tokens,
    leave_split,
    scatter_tokens,
    split_tokens,
)
from xlstm_jax.distributed.model_parallel.attention import SplitAttention
from xlstm_jax.distributed.model_parallel.context import context_attention, context_positions
from xlstm_jax.distributed.model_parallel.dense import ColumnDense, RowDense, SwiGLU, columns_of, split_param
from xlstm_jax.distributed.model_parallel.embedding import SplitEmbed
from xlstm_jax.distributed.model_parallel.experts import (
    Experts,
    apply_by_group,
    mix_experts,
    mix_experts_with_capacity,
)
from xlstm_jax.distributed.model_parallel.recurrence import recurrence_over_axis, scan_over_axis
from xlstm_jax.distributed.model_parallel.router import Routing, load_balancing_loss, route_tokens, router_z_loss
from xlstm_jax.distributed.model_parallel.sequence_layout import ReorderedTokens, in_layout
from xlstm_jax.distributed.model_parallel.split_input import on_split_input
from xlstm_jax.distributed.model_parallel.splitting import split_modules

import_with_nnx("xlstm_jax.distributed.model_parallel.nnx_splitting")  # registers itself in ``SPLITTERS``

__all__ = [
    "ColumnDense",
    "Experts",
    "ReorderedTokens",
    "Routing",
    "RowDense",
    "SplitAttention",
    "SplitEmbed",
    "SwiGLU",
    "apply_by_group",
    "columns_of",
    "context_attention",
    "context_positions",
    "enter_split",
    "gather_tokens",
    "in_layout",
    "join_tokens",
    "leave_split",
    "load_balancing_loss",
    "mix_experts",
    "mix_experts_with_capacity",
    "on_split_input",
    "recurrence_over_axis",
    "route_tokens",
    "router_z_loss",
    "scan_over_axis",
    "scatter_tokens",
    "split_modules",
    "split_param",
    "split_tokens",
]
