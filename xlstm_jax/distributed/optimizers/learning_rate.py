"""The learning rate of an update, for the metrics of its step.

True        read out of the optimizer's state, where ``optax.inject_hyperparams`` keeps it
a schedule  called with the optimizer's own count of updates, in which a skipped step does not count
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

from xlstm_jax.common_types import Metrics, PyTree
from xlstm_jax.wording import kind_of

LEARNING_RATE = "learning_rate"
Schedule = Callable[[Any], Any]
LearningRate = bool | Schedule | Mapping[str, Schedule]


def check_learning_rate(source: Any) -> None:
    """Raises a ``TypeError`` where ``source`` is no ``LearningRate``."""
    schedules = list(source.values()) if isinstance(source, Mapping) else [source]
    if not isinstance(source, bool) and not (schedules and all(map(callable, schedules))):
        raise TypeError(
            f"learning_rate is {kind_of(source)}: pass the schedule of the optimizer, a dict of one for each group of "
            "parameters, or True for what optax.inject_hyperparams keeps in the optimizer's state."
        )


def learning_rates(source: LearningRate, before: PyTree, after: PyTree, step: Any) -> Metrics:
    """The learning rate of the update between two states of an optimizer, by its name among metrics.

    >>> tx = optax.sgd(optax.linear_schedule(1.0, 0.0, transition_steps=10))
    >>> state = tx.init(jnp.ones(2))
    >>> learning_rates(optax.linear_schedule(1.0, 0.0, transition_steps=10), state, state, 0)
    {'learning_rate': Array(1., dtype=float32)}

    Args:
      source: as ``make_train_step`` takes it; False for no metric.
      before, after: the states. A schedule is called with the count of the first schedule in ``before`` (in a dict, of
        the first below the group's name), or with ``step`` if the optimizer has no schedule.
    Returns:
      ``learning_rate``, or ``learning_rate/<group>`` for each of several; float32 scalars.
    Raises:
      ValueError: ``source`` is True, and no ``optax.inject_hyperparams`` is in the optimizer.
    """
    # `inject_hyperparams` stores the rate that an update has used, so the state after it has the rate; a schedule's
    # rate is that of the count before.
    if not callable(source) and not isinstance(source, Mapping):
        return _injected(after) if source else {}
    # A parameter may be called "count", too, and is a dict's entry in the moments.
    counts = _found(before, "count", lambda path: getattr(path[-1], "tuple_name", None) == "ScaleByScheduleState")

    def at_count(schedule: Schedule, group: str | None) -> jax.Array:
        of_group = [count for names, count in counts if group in names]
        count = next(iter(of_group + [count for _, count in counts]), step)
        with jax.numpy_dtype_promotion("standard"):  # schedules of optax mix ints and floats
            return jnp.asarray(schedule(count), jnp.float32)

    if isinstance(source, Mapping):
        return {f"{LEARNING_RATE}/{group}": at_count(schedule, group) for group, schedule in source.items()}
    return {LEARNING_RATE: at_count(source, None)}


def _injected(opt_state: PyTree) -> Metrics:
    found = _found(
        opt_state, LEARNING_RATE, lambda path: [getattr(key, "name", None) for key in path[-2:-1]] == ["hyperparams"]
    )
    if not found:
        raise ValueError(
            "learning_rate=True reads what optax.inject_hyperparams keeps, and this optimizer's state has none of it. "
            "Build it as optax.inject_hyperparams(optax.adamw)(learning_rate=schedule), or pass the schedule itself, "
            "make_train_step(..., learning_rate=schedule)."
        )
    if len(found) == 1:
        return {LEARNING_RATE: found[0][1]}
    names = ["/".join(names[:-1]) for names, _ in found]
    # Groups in a tuple have no names, and a metric's name must be its own: numbers take their place.
    unique = names if len(set(names)) == len(names) else list(map(str, range(len(names))))
    return {f"{LEARNING_RATE}/{name}": value for name, (_, value) in zip(unique, found, strict=True)}


def _found(opt_state: PyTree, name: str, is_it: Callable[[Any], bool]) -> list[tuple[list[str], jax.Array]]:
    """The values of that name in the state, each with the keys of the dicts on the way to it (a group, say)."""
    found: Any = optax.tree.get_all_with_path(opt_state, name, filtering=lambda path, _: is_it(path))
    return [([str(part.key) for part in path if isinstance(part, DictKey)], value) for path, value in found]
