"""``learning_rates``: reports the learning rate of an update in the metrics of a step.

A schedule is called with the optimizer's count of updates, which excludes skipped steps. A rate that is not a schedule,
set by the program in the state of ``optax.inject_hyperparams``, is read from that state by the program.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

from xlstm_jax.common_types import Metrics, PyTree
from xlstm_jax.formatting import kind_of

LEARNING_RATE = "learning_rate"
# The states that count the updates of a schedule: in a chain, and within `optax.inject_hyperparams`.
COUNTED_BY = ("ScaleByScheduleState", "WrappedScheduleState")
Schedule = Callable[[Any], Any]
LearningRate = Schedule | Mapping[str, Schedule]


def check_learning_rate(source: LearningRate | None) -> None:
    """Raises a ``TypeError`` unless ``source`` is None, a function, or a non-empty dict whose values are functions.

    The functions are schedules: they return a learning rate for a count of updates.
    """
    schedules = list(source.values()) if isinstance(source, Mapping) else [source]
    if source is not None and not (schedules and all(map(callable, schedules))):
        raise TypeError(
            f"learning_rate is {kind_of(source)}: pass the schedule of the optimizer, or a dict of one for each group "
            "of parameters. What optax.inject_hyperparams keeps is read after the step, as "
            "jnp.copy(state.opt_state.hyperparams['learning_rate'])."
        )


def learning_rates(source: LearningRate | None, before: PyTree, step: jax.Array | int) -> Metrics:
    """Returns a dict with the learning rate of an update, for the metrics of a step.

    >>> tx = optax.sgd(optax.linear_schedule(1.0, 0.0, transition_steps=10))
    >>> learning_rates(optax.linear_schedule(1.0, 0.0, transition_steps=10), tx.init(jnp.ones(2)), 0)
    {'learning_rate': Array(1., dtype=float32)}

    Args:
      source: the optimizer's schedule, or a dict of schedules by group of parameters; None for no metric.
      before: the optimizer's state before the update. A schedule is called with the count of updates of the first
        schedule in ``before`` (for a dict: of the first schedule below the name of the group).
      step: number of updates; a schedule is called with ``step`` if ``before`` contains no count of a schedule.
    Returns:
      ``{"learning_rate": rate}``; for a dict ``{"learning_rate/<group>": rate, ...}``; {} for None. Each rate is a
      float32 scalar.
    """
    if source is None:
        return {}
    # Match by type: a parameter may be called "count", too, as a dict entry in the moments.
    matches: Any = optax.tree.get_all_with_path(
        before, "count", filtering=lambda path, _: getattr(path[-1], "tuple_name", None) in COUNTED_BY
    )
    # The keys of the dicts above each count (a group, for example).
    counts = [([str(part.key) for part in path if isinstance(part, DictKey)], count) for path, count in matches]

    def at_count(schedule: Schedule, group: str | None) -> jax.Array:
        of_group = [count for names, count in counts if group in names]
        count = next(iter(of_group + [count for _, count in counts]), step)
        with jax.numpy_dtype_promotion("standard"):  # schedules of optax mix ints and floats
            return jnp.asarray(schedule(count), jnp.float32)

    if isinstance(source, Mapping):
        return {f"{LEARNING_RATE}/{group}": at_count(schedule, group) for group, schedule in source.items()}
    return {LEARNING_RATE: at_count(source, None)}
