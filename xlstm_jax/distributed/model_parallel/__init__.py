"""Layers that are split over a mesh axis of their own, beside the sharding of their parameters.

dense            products split by columns or rows (tensor parallel), tokens between them split (sequence parallel)
attention        attention, its heads split
embedding        an embedding, its vocabulary split
splitting        dense layers of a model split from outside
split_input      norms and dropout on tokens, or heads, of which each device has its share
activations      how activations enter split layers, leave them, and are split between them
context          attention over a sequence that is split: keys are gathered, exchanged for heads, or sent round
sequence_layout  in which order the tokens of such a sequence lie on devices, said once for all that look at others
recurrence       the state that a recurrence brings to each device of such a sequence
experts          a mixture of experts, each device having some: tokens travel to them and back
router           which experts each token goes to, and the losses that keep the choices even

Life of a column-split kernel W[d, f] on the axes "fsdp" and "tp" (f_tp: dim f is split over "tp"):
  init      W[d, f]            -- on one device or many --   the same values, in a box that names "tp"
  between   W[d_fsdp, f_tp]    a device keeps its share of both splits, as ``shard_module_params`` says
  forward   W[d, f_tp]         gathered over "fsdp" alone; the product with x[b, t, d] is y[b, t, f_tp]
  backward  dW[d_fsdp, f_tp]   the mean over "fsdp"; along "tp" each device has the gradient of its own columns
"""

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
from xlstm_jax.distributed.model_parallel.sequence_layout import LaidOut, in_layout
from xlstm_jax.distributed.model_parallel.split_input import on_split_input
from xlstm_jax.distributed.model_parallel.splitting import split_modules

__all__ = [
    "ColumnDense",
    "Experts",
    "LaidOut",
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
