"""The sharding plan: what is split, why not where it is not, and what each device keeps, from shapes alone.

    plan = plan_sharding(model, {"dp": 16, "fsdp": 256}, tokens, tx=optax.adamw(1e-3))
    plan.table()                                  everything, for people
    plan.explain("blocks/mlp/up/kernel")          one leaf in one sentence
    plan.check(max_bytes_per_device=16 * 2**30)   a refusal, for scripts
    plan.to_json(), plan.diff(other)              for the review of a change

``model.init`` is traced on a mesh without devices. Nothing is computed and nothing allocated: a model of 70 billion
parameters on 4096 devices takes seconds. Wrapped modules decide in this ``init`` as they do in training, by
``choose_shard_dim``. The optimizer's state comes from ``tx.init``; ``optimizer_state_shardings`` says how it is split.
"""

from xlstm_jax.distributed.plan.expert_plan import ExpertSection
from xlstm_jax.distributed.plan.leaf_plan import ByteCount, LeafPlan
from xlstm_jax.distributed.plan.leaf_plan import ByteCount as Share  # noqa: F401  # the name it had in 0.1
from xlstm_jax.distributed.plan.matrix_plan import MatrixSection
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.distributed.plan.section import SECTIONS
from xlstm_jax.distributed.plan.sharding_plan import Difference, ShardingPlan

# What plans say beside their rows: a line and a file for each section.
SECTIONS[:] = [
    MatrixSection,
    ExpertSection,
]

__all__ = ["ByteCount", "Difference", "LeafPlan", "ShardingPlan", "plan_sharding"]
