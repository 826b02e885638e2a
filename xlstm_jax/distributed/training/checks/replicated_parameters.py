"""Check of a new state that warns of replicated parameters; the reasons come from a sharding plan of the model."""

from xlstm_jax.distributed.data_parallel.modules.holders import recording_holders
from xlstm_jax.distributed.data_parallel.reasons import Unwrapped
from xlstm_jax.distributed.plan.leaf_plan import PARAMETERS
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.distributed.training.mistakes import ModelFacts, warn_of_replicated
from xlstm_jax.distributed.training.moments import CreatedState, TrainingCheck


def warn_of_replicated_state(context: CreatedState) -> None:
    """Warns if no parameter of a new state is split, or if at least 5 % of their bytes are not."""
    if not context.allow_replicated:
        warn_of_replicated(context.params, context.mesh, lambda: facts_of_plan(context))


def facts_of_plan(context: CreatedState) -> ModelFacts:
    """Returns the reasons why wrappers split or replicate each parameter, and the module classes, by path."""
    with recording_holders(context.model) as holders:
        plan = plan_sharding(context.model, context.mesh.shape, *context.inputs, rng=context.rng, **context.kwargs)
    of_params = [row for row in plan.rows if row.collection == PARAMETERS]
    reasons = {row.path: Unwrapped() if plan.assumed else row.reason for row in of_params}
    return ModelFacts(reasons, holders)


REPLICATED_PARAMETERS = TrainingCheck("state", warn_of_replicated_state, "mistakes.md")
