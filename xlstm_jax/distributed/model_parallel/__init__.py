"""Layers that are split over a mesh axis of their own, beside the sharding of their parameters.

context      attention over a sequence that is split: keys are gathered, exchanged for heads, or sent round
recurrence   the state that a recurrence brings to each device of such a sequence
experts      a mixture of experts, each device having some: tokens travel to them and back
"""

from xlstm_jax.distributed.model_parallel.context import (
    context_attention,
    context_positions,
    from_zigzag,
    to_zigzag,
)
from xlstm_jax.distributed.model_parallel.experts import (
    Experts,
    Routing,
    apply_by_group,
    load_balancing_loss,
    mix_experts,
    mix_experts_with_capacity,
    route_tokens,
    router_z_loss,
)
from xlstm_jax.distributed.model_parallel.recurrence import recurrence_over_axis, scan_over_axis

__all__ = [
    "Experts",
    "Routing",
    "apply_by_group",
    "context_attention",
    "context_positions",
    "from_zigzag",
    "load_balancing_loss",
    "mix_experts",
    "mix_experts_with_capacity",
    "recurrence_over_axis",
    "route_tokens",
    "router_z_loss",
    "scan_over_axis",
    "to_zigzag",
]
