"""Introspection of optax transforms: the names of the parts, and the values in their closures.

  optax.adamw(schedule, mask=mask)  ->  chain(scale_by_adam, masked(add_decayed_weights), scale_by_schedule)

Optax has no list of parts, so this module reads the closures of optax's functions. The results appear in errors,
warnings and records; no computed value depends on them.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.formatting import kind_of
from xlstm_jax.introspection import closure


def check_transform(tx: Any, caller: str) -> None:
    """Raises a ``TypeError`` if ``tx`` is not an optax transform: a pair of functions ``init`` and ``update``."""
    if isinstance(tx, type) or not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        called = f"Call it: {tx.__name__}(...) returns one" if hasattr(tx, "__name__") else "As optax.adamw(1e-3)"
        raise TypeError(f"{caller}: tx is {kind_of(tx)}, and no optimizer with init and update. {called}.")


LOOKAHEAD, WITH_SLOW_PARAMS = "lookahead", "with_slow_params"
# Transforms that pass their parameters on unchanged, so that a lookahead inside gets its pairs.
HANDS_ON_PAIRS = frozenset({"chain", "named_chain", "inject_hyperparams", "inject_stateful_hyperparams"})


HOLDERS_OF_MASKS = frozenset({"masked", "inject_hyperparams"})  # parts that may have a mask of weight decay


class Part(NamedTuple):
    """Part of a transform: the name of the function that made the part, and the values in its closure by name.

    ``update`` is None for a factory that ``inject_hyperparams`` calls in each update; ``made_by`` is the module.
    """

    name: str
    closure_values: dict[str, Any]
    update: Callable[..., Any] | None
    made_by: str


def links(tx: optax.GradientTransformation) -> list[optax.GradientTransformation]:
    """Returns the list of transforms in an ``optax.chain``, nested chains flattened; [tx] for any other transform."""
    # In optax only `chain` closes over variables of these names.
    inits, updates = closure(tx.init).get("init_fns"), closure(tx.update).get("update_fns")
    if not (inits and updates):
        return [tx]
    return [link for pair in zip(inits, updates, strict=True) for link in links(optax.GradientTransformation(*pair))]


def name_of(tx: optax.GradientTransformation, flags: bool = False) -> str:
    """Returns the name of the function that made a transform, with inner transforms: ``masked(scale_by_trust_ratio)``.

    With ``flags`` also the options of a part that are True, such as for NAdam: ``scale_by_adam(nesterov)``.
    """
    closure_values = _held(tx)
    if _is_transform(closure_values.get("tx")):  # a transform wrapped by with_extra_args_support
        return name_of(closure_values["tx"], flags)
    inside = [name_of(part, flags) for part in _inside(tx, closure_values)]
    factory = _factory_name(closure_values)
    inside += [factory] if factory else []
    inside += sorted(name for name, value in closure_values.items() if value is True) if flags else []
    own_name = _own_name(tx)
    return f"{own_name}({', '.join(inside)})" if inside else own_name


def parts(tx: optax.GradientTransformation) -> list[Part]:
    """Returns a ``Part`` for a transform and for each transform within, outermost first."""
    global _last_read
    # Several checks read the parts of one optimizer: before its state is made, and in each trace of a step.
    if _last_read is None or _last_read[0] is not tx:
        _last_read = tx, _parts(tx)
    return _last_read[1]


_last_read: tuple[optax.GradientTransformation, list[Part]] | None = None


def _parts(tx: optax.GradientTransformation) -> list[Part]:
    closure_values = _held(tx)
    if _is_transform(closure_values.get("tx")):
        return _parts(closure_values["tx"])
    result = [Part(_own_name(tx), closure_values, tx.update, getattr(tx.update, "__module__", ""))]
    if name := _factory_name(closure_values):
        result.append(Part(name, {}, None, getattr(_factory(closure_values), "__module__", "")))
    for part in _within(tx, closure_values):
        result += _parts(part)
    return result


def sees_pairs(tx: optax.GradientTransformation) -> bool:
    """Returns whether a transform needs pairs (fast, slow weights): ``optax.lookahead``, or a chain with it."""
    if LOOKAHEAD not in [part.name for part in parts(tx)]:
        return False
    closure_values = _held(tx)
    if _is_transform(closure_values.get("tx")):
        return sees_pairs(closure_values["tx"])
    name = _own_name(tx)
    if LOOKAHEAD in (name, _factory_name(closure_values)):
        return True
    return name in HANDS_ON_PAIRS and any(map(sees_pairs, _within(tx, closure_values)))


def around_lookahead(tx: optax.GradientTransformation) -> str | None:
    """Returns the name of a transform around ``optax.lookahead`` that does not pass pairs of weights on, or None."""
    closure_values = _held(tx)
    if _is_transform(closure_values.get("tx")):
        return around_lookahead(closure_values["tx"])
    if _own_name(tx) == WITH_SLOW_PARAMS or sees_pairs(tx):
        return None
    within = _within(tx, closure_values)
    if any(map(sees_pairs, within)):
        return _own_name(tx)
    return next(filter(None, map(around_lookahead, within)), None)


def after_average(tx: optax.GradientTransformation) -> str | None:
    """Returns the name of the transform after a ``with_ema`` in a chain, at any depth, or None."""
    for link, following in itertools.pairwise(links(tx)):
        if any(part.name == "with_ema" for part in parts(link)) and name_of(following) != "identity":
            return name_of(following)
    return next(filter(None, map(after_average, _inside(tx, _held(tx)))), None)


def schedules(of_parts: Iterable[Part]) -> list[Callable[[Any], Any]]:
    """Returns factors of updates as functions of the update count: schedules, then constants; [] if all constant."""
    result: list[Callable[[Any], Any]] = []
    factors: list[Any] = []
    for part in of_parts:
        # `optax.scale_by_learning_rate` is `scale_by_schedule` for a function and `scale` for a number.
        if part.name == "scale_by_schedule":
            result.append(part.closure_values["step_size_fn"])
        elif part.name == "scale" and isinstance(part.closure_values.get("step_size"), int | float):
            factors.append(optax.constant_schedule(part.closure_values["step_size"]))
        if injected := part.closure_values.get("sched_hps", {}).get("learning_rate"):
            result.append(injected.schedule_fn)
    return result + factors if result else []


def decay_mask(part: Part, params: PyTree) -> dict[str, bool] | None:
    """Returns, by path, whether the mask of weight decay of a part of an optimizer includes a parameter.

    ``params`` has shapes without boxes. None: the part has no mask of weight decay, or the mask raises for shapes.
    """
    mask = part.closure_values.get("mask")
    if part.name == "inject_hyperparams":  # keeps the mask among the arguments that are not numbers
        mask = part.closure_values.get("other_hps", {}).get("mask")
    elif part.name != "masked" or name_of(part.closure_values["inner"]) != "add_decayed_weights":
        return None
    if mask is None:
        return None
    try:
        tree = mask(params) if callable(mask) else mask
        taken = jax.tree.map(lambda takes, below: jax.tree.map(lambda _: bool(takes), below), tree, params)
    # The user's function may raise anything on bare shapes. Optax calls it later with values, and shows its error then.
    except Exception:
        return None
    return dict(trees.leaves_with_path(taken))


def _own_name(tx: optax.GradientTransformation) -> str:
    # Optax returns closures: "scale_by_adam.<locals>.update_fn" begins with the factory's name.
    return getattr(tx.update, "__qualname__", type(tx.update).__name__).split(".")[0]


def _factory(closure_values: Mapping[str, Any]) -> Any:
    """Returns the factory that ``inject_hyperparams`` calls; for a ``functools.partial`` its function."""
    made = closure_values.get("inner_factory")
    return getattr(made, "func", made)


def _factory_name(closure_values: Mapping[str, Any]) -> str | None:
    return getattr(_factory(closure_values), "__name__", None)


def _within(tx: optax.GradientTransformation, closure_values: Mapping[str, Any]) -> list[optax.GradientTransformation]:
    """Returns all transforms that a transform contains, under any name: ``inner``, ``adv_optimizer``."""
    transforms = [link for link in links(tx) if link is not tx]
    for value in closure_values.values():
        transforms += _transforms_of(value)
    return transforms


def _transforms_of(value: Any) -> list[optax.GradientTransformation]:
    """Returns the transforms in a value: the value itself, or entries of lists, tuples and dicts."""
    # A transform is a tuple, too.
    if _is_transform(value):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tx for item in value for tx in _transforms_of(item)] if isinstance(value, list | tuple) else []


def _inside(tx: optax.GradientTransformation, closure_values: Mapping[str, Any]) -> list[optax.GradientTransformation]:
    """Returns the transforms to which a transform passes updates: ``inner``, ``transforms``, links of a chain."""
    # `inner` of masked and wrappers, `_opt` of MultiSteps, `transforms` of partition; links of a chain.
    several = closure_values.get("transforms")
    inside = [
        closure_values.get("inner"),
        closure_values.get("_opt"),
        *(several.values() if isinstance(several, Mapping) else ()),
    ]
    return [part for part in [*inside, *(link for link in links(tx) if link is not tx)] if _is_transform(part)]


def _is_transform(value: Any) -> bool:
    return isinstance(value, optax.GradientTransformation | optax.MultiSteps)


def _held(tx: optax.GradientTransformation) -> dict[str, Any]:
    """Returns by name the closure variables of ``tx.update``, or the attributes if it is a method."""
    owner = getattr(tx.update, "__self__", None)  # the update is a method: MultiSteps
    return dict(vars(owner)) if hasattr(owner, "__dict__") else closure(tx.update)
