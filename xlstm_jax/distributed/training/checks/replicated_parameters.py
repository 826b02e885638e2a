"""Reasons for the warning of replicated parameters in a new state: from a sharding plan of the model."""

from xlstm_jax.distributed.data_parallel.modules.holders import recording_holders
from xlstm_jax.distributed.data_parallel.reasons import Unwrapped
from xlstm_jax.distributed.plan.leaf_plan import PARAMETERS
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.distributed.training.mistakes import FACTS, ModelFacts
from xlstm_jax.distributed.training.moments import CreatedState


def facts_of_plan(context: CreatedState) -> ModelFacts:
    """Returns facts about the model of a new state, by a sharding plan of the model, which traces the model.

    ``context`` has the arguments of ``create_train_state``. In the ``ModelFacts``, ``reasons`` maps the path of each
    parameter to the reason why it is split or replicated, and ``holders`` the path of each module to the name of its
    class.
    """
    with recording_holders(context.model) as holders:
        plan = plan_sharding(context.model, context.mesh.shape, *context.inputs, rng=context.rng, **context.kwargs)
    of_params = [row for row in plan.rows if row.collection == PARAMETERS]
    reasons = {row.path: Unwrapped() if plan.assumed else row.reason for row in of_params}
    return ModelFacts(reasons, holders)


FACTS[CreatedState] = facts_of_plan
