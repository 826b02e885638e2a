"""The sharding plan: how each leaf is split, why a leaf is not split, and the bytes per device, from shapes alone.

    plan = plan_sharding(model, {"dp": 16, "fsdp": 256}, tokens, tx=optax.adamw(1e-3))
    plan.table()                                  the full plan, for people
    plan.explain("blocks/mlp/up/kernel")          the plan of a single leaf, as a sentence
    plan.check(max_bytes_per_device=16 * 2**30)   raises if a limit is exceeded, for scripts
    plan.to_json(), plan.diff(other)              for the review of a change

``model.init`` is traced on an abstract mesh: nothing is computed or allocated, so a model of 70 billion parameters on
4096 devices takes seconds. Wrapped modules call ``choose_shard_dim`` in this trace as they do in training. The
optimizer state comes from ``tx.init``, and the sharding of the state from ``optimizer_state_shardings``.
"""

from xlstm_jax.distributed.plan.decay_plan import DecaySection
from xlstm_jax.distributed.plan.expert_plan import ExpertSection
from xlstm_jax.distributed.plan.leaf_plan import ByteCount, LeafPlan
from xlstm_jax.distributed.plan.leaf_plan import ByteCount as Share  # noqa: F401  # the name it had in 0.1
from xlstm_jax.distributed.plan.matrix_plan import MatrixSection
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.distributed.plan.section import SECTIONS
from xlstm_jax.distributed.plan.sharding_plan import Difference, ShardingPlan
from xlstm_jax.distributed.plan.unit_plan import UnitSection

# The sections of a plan beside the rows: a line and a file for each.
SECTIONS[:] = [
    MatrixSection,
    ExpertSection,
    UnitSection,
    DecaySection,
]

__all__ = ["ByteCount", "Difference", "LeafPlan", "ShardingPlan", "plan_sharding"]
