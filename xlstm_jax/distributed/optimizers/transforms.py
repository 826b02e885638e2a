"""Optax transforms as a training step calls them: the parts of a transform, and the extra arguments of its update.

*Parts.* optax.adamw(schedule, mask=mask)  ->  chain(scale_by_adam, masked(add_decayed_weights), scale_by_schedule)

Optax has no list of parts, so this module reads the closures of optax's functions. The names appear in errors, warnings
and records; no computed value depends on them.

*Extra arguments.* A training step has four (``make_train_step`` makes them, on global arrays):

  value        the loss                                                             polyak_sgd, momo, reduce_on_plateau
  grad         the gradients before any transform                                   line searches
  value_fn     the loss of this batch for other parameters                          line searches, lbfgs
  grad_fn      the gradients of this batch for other parameters, (params, index)    sam(opaque_mode=True)

Optax requires every transform with extra arguments to accept and ignore unneeded arguments (``**extra_args``). Some
transforms of optax, such as ``optax.contrib.sam``, and many custom transforms do not.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import is_box
from xlstm_jax.formatting import joined, kind_of
from xlstm_jax.introspection import closure

# ------------------------------------------------------------------------------------------------- parts of a transform


def check_transform(tx: Any, caller: str) -> None:
    """Raises a ``TypeError`` if ``tx`` is not an optax transform: an object with functions ``init`` and ``update``.

    ``caller``, a public function, begins the error.
    """
    if isinstance(tx, type) or not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        called = f"Call it: {tx.__name__}(...) returns one" if hasattr(tx, "__name__") else "As optax.adamw(1e-3)"
        raise TypeError(f"{caller}: tx is {kind_of(tx)}, and no optimizer with init and update. {called}.")


TRANSFORMS: tuple[type[Any], ...] = (optax.GradientTransformation, optax.MultiSteps)
LOOKAHEAD, WITH_SLOW_PARAMS = "lookahead", "with_slow_params"
# Transforms that pass their parameters on unchanged, so that a lookahead inside gets its pairs.
HANDS_ON_PAIRS = frozenset({"chain", "named_chain", "inject_hyperparams", "inject_stateful_hyperparams"})


# Transforms that may hide the transform inside from a trial of few steps: MultiSteps emits an update after some steps,
# and a condition may hold late. Modules of the library add their transforms to this set and to ``PASSING_ON``.
WITHHOLDING = {"MultiSteps", "conditionally_transform", "conditionally_mask"}
CHAINS = frozenset({"chain", "named_chain"})
PASSING_ON = {*CHAINS}  # transforms that pass the full tree on to the transforms inside, in every step
# Checks of an optimizer that has a certain part, by the name of the part; filled by the modules of the transforms. A
# function of the optimizer, which raises a ``ValueError``.
CHECKS_OF_PARTS: dict[str, Callable[[optax.GradientTransformation], None]] = {}
HOLDERS_OF_MASKS = frozenset({"masked", "inject_hyperparams"})  # parts that may have a mask of weight decay


class Part(NamedTuple):
    """Description of an optax transform, as a part of an optimizer.

    Attributes:
      name: the function that made the transform, as "scale_by_adam".
      closure_values: the closure variables of the transform's ``update``, by name; for a method ``update`` the
        attributes of its object.
      tx: the transform; None for a factory, which ``inject_hyperparams`` calls in each update.
      made_by: the name of the module with the transform's ``update``, or with the factory.
      within: the parts directly inside: a factory, the links of a chain, and transforms in ``closure_values``.
    """

    name: str
    closure_values: dict[str, Any]
    tx: optax.GradientTransformation | None
    made_by: str
    within: "list[Part]"


def parts(tx: optax.GradientTransformation) -> list[Part]:
    """Returns a ``Part`` (description) for an optax transform and for each transform within, at any depth.

    The outermost transform is first. A ``Part`` has the name of the function that made the transform, and the values in
    the closure of ``update``.
    """
    global _last_read
    # Several checks read the parts of one optimizer: before its state is made, and in each trace of a step.
    if _last_read is not None and _last_read[0] is tx:
        return _last_read[1]
    owner = getattr(tx.update, "__self__", None)  # the update is a method: MultiSteps
    closure_values = dict(vars(owner)) if hasattr(owner, "__dict__") else closure(tx.update)
    if isinstance(closure_values.get("tx"), TRANSFORMS):  # a transform wrapped by with_extra_args_support
        return parts(closure_values["tx"])
    # Optax returns closures: "scale_by_adam.<locals>.update_fn" begins with the factory's name.
    name = getattr(tx.update, "__qualname__", type(tx.update).__name__).split(".")[0]
    part = Part(name, closure_values, tx, getattr(tx.update, "__module__", ""), [])
    found = [part]
    # A factory, such as `optax.adamw`, that `inject_hyperparams` calls in each update; perhaps in a `partial`.
    factory: Any = closure_values.get("inner_factory")
    factory = getattr(factory, "func", factory)
    if hasattr(factory, "__name__"):
        part.within.append(Part(factory.__name__, {}, None, getattr(factory, "__module__", ""), []))
        found += part.within
    # A variable of any name (`inner`, `adv_optimizer`) may have a transform, in nested lists, tuples and dicts, too. A
    # chain has the functions of its links in two variables, which have these names in no other transform of optax.
    waiting = [*reversed(closure_values.values())]
    inits, updates = closure(tx.init).get("init_fns"), closure_values.get("update_fns")
    if inits and updates:
        waiting += map(optax.GradientTransformation, reversed(inits), reversed(updates))
    while waiting:
        value = waiting.pop()
        if isinstance(value, TRANSFORMS):  # a transform is a tuple, too
            below = parts(value)
            part.within.append(below[0])
            found += below
        elif isinstance(value, Mapping | list | tuple):
            waiting += reversed([*value.values()] if isinstance(value, Mapping) else value)
    _last_read = tx, found
    return found


_last_read: tuple[optax.GradientTransformation, list[Part]] | None = None


def links(tx: optax.GradientTransformation) -> list[optax.GradientTransformation]:
    """Returns the list of transforms in an ``optax.chain``, nested chains flattened; [tx] for any other transform."""
    part = parts(tx)[0]
    if not part.closure_values.get("update_fns"):
        return [tx]
    return [link for below in part.within if below.tx is not None for link in links(below.tx)]


def name_of(tx: optax.GradientTransformation, flags: bool = False) -> str:
    """Returns the name of the function that made a transform, with inner transforms: ``masked(scale_by_trust_ratio)``.

    With ``flags`` the result also has the options that are True: ``scale_by_adam(nesterov)`` for NAdam.
    """
    part = parts(tx)[0]
    inside = [name_of(inner, flags) for inner in _inside(part)]
    inside += [factory.name for factory in part.within if factory.tx is None]
    inside += sorted(name for name, value in part.closure_values.items() if value is True) if flags else []
    return f"{part.name}({', '.join(inside)})" if inside else part.name


def sees_pairs(tx: optax.GradientTransformation) -> bool:
    """Returns whether ``tx`` takes pairs (``optax.LookaheadParams``: fast and slow weights) in place of parameters.

    True for ``optax.lookahead``, and for a chain or ``inject_hyperparams`` with ``optax.lookahead`` inside, at any
    depth.
    """
    return LOOKAHEAD in [part.name for part in parts(tx)] and _takes_pairs(parts(tx)[0])


def _takes_pairs(part: Part) -> bool:
    return part.name == LOOKAHEAD or (part.name in HANDS_ON_PAIRS and any(map(_takes_pairs, part.within)))


def _around_lookahead(part: Part) -> str | None:
    """Returns the name, as "masked", of a transform around ``optax.lookahead`` that passes no pairs of weights on.

    Returns None without such a transform: ``part`` has no ``optax.lookahead``, or only chains or ``with_slow_params``
    around ``optax.lookahead``.
    """
    if part.name == WITH_SLOW_PARAMS or _takes_pairs(part):
        return None
    if any(map(_takes_pairs, part.within)):
        return part.name
    return next(filter(None, map(_around_lookahead, part.within)), None)


def schedules(of_parts: Iterable[Part]) -> list[Callable[[Any], Any]]:
    """Returns the factors by which an optimizer multiplies updates, each as a function of the number of updates so far.

    ``of_parts`` are the parts of the optimizer. Schedules, also of a learning rate in ``inject_hyperparams``, come
    first, in the order of the parts; then constant factors. Returns [] for parts without a schedule, even with constant
    factors.
    """
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
    """Returns for each parameter, by path, whether the mask of an optimizer's part applies weight decay to it.

    The result is None if the part has no mask of weight decay, or if the mask is a function that raises for shapes in
    place of arrays.

    Args:
      part: a part of the optimizer, from ``parts``.
      params: the tree of parameters without boxes, with a shape in place of each array.
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


def _inside(part: Part) -> list[optax.GradientTransformation]:
    """Returns the transforms to which a transform passes updates, only a level deep; [] for a simple transform.

    The transforms are the links of a chain, the transform inside ``masked`` or another wrapper, or the transforms of
    ``partition``.
    """
    # `inner` of masked and wrappers, `_opt` of MultiSteps, `transforms` of partition; links of a chain.
    values = part.closure_values
    several = values.get("transforms")
    inside = [values.get("inner"), values.get("_opt"), *(several.values() if isinstance(several, Mapping) else ())]
    if part.tx is not None and values.get("update_fns"):
        inside += links(part.tx)
    return [inner for inner in inside if isinstance(inner, TRANSFORMS)]


# ------------------------------------------------------------------------------------------------------ extra arguments

VALUE, GRAD, VALUE_FN, GRAD_FN = "value", "grad", "value_fn", "grad_fn"
STEP_EXTRA_ARGS = (VALUE, GRAD, VALUE_FN, GRAD_FN)
VAR_POSITIONAL, VAR_KEYWORD = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
NUM_USUAL_ARGS = 3  # gradients, state and parameters

# the wording of Python's errors
UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")
# The wording of optax's line searches, which pass unknown arguments on to `value_fn`.
UNCONSUMED = re.compile(r"These arguments were not consumed by `value_fn`: \['(\w+)'")
MISSING = re.compile(r"([\w.<>]+)\(\) missing \d+ required (?:keyword-only|positional) arguments?: (.*)")

PER_EXAMPLE = (
    "takes a gradient for every example, and a step has the mean over all of them. Clip and add noise without it, by "
    "optax.clip_by_global_norm and optax.add_noise, which is no differential privacy; or call it in a step of your own "
    "on jax.vmap(jax.grad(loss), (None, 0)) of one device"
)
# Transforms of optax that need arguments unknown to a step, with the reason. docs/optimizers.md lists them.
REFUSED = {
    "differentially_private_aggregate": PER_EXAMPLE,
    "dpsgd": PER_EXAMPLE,
    "process": PER_EXAMPLE,  # of optax.experimental.aggregating
    "hutchinson_estimator_diag_hessian": (
        "differentiates the loss (obj_fn) twice, and the gather of a parameter has a first derivative only. Pass "
        "sophia(..., hessian_diagonal_fn=tx) with a transform that estimates the diagonal from gradients, as "
        "optax.stateless(lambda grads, params: jax.tree.map(jnp.square, grads)), or take optax.adamw"
    ),
}


def call_update(
    tx: optax.GradientTransformation, updates: PyTree, state: PyTree, params: PyTree = None, /, **extra_args: Any
) -> tuple[PyTree, PyTree]:
    """Calls ``tx.update`` with only those extra arguments that ``tx`` accepts; returns (updates, new state).

    The first extra arguments to go are those that the signature of ``tx.update`` lacks, then those that a transform
    within ``tx`` rejects.

    Raises:
      TypeError: an argument is missing in the call of a transform; names both.
      ValueError: a transform beside ``skip_nonfinite`` rejects ``value``, the loss.
    """
    takes, passed = _parameters(tx.update), dict(extra_args)
    if takes is not None and VAR_KEYWORD not in [parameter.kind for parameter in takes]:
        names = {parameter.name for parameter in takes if parameter.kind is not parameter.POSITIONAL_ONLY}
        passed = {name: x for name, x in extra_args.items() if name in names}
    while True:
        try:
            return tx.update(updates, state, params, **passed)
        except TypeError as error:
            # Transforms within `tx` (links of a chain, the transform in MultiSteps) have signatures that `tx` does not
            # show: call them, and drop the arguments that they reject.
            refused = UNEXPECTED.search(str(error)) or UNCONSUMED.search(str(error))
            if refused is None or refused[1] not in passed:
                raise _with_names(error, extra_args, passed) from error
            if refused[1] == VALUE and any(part.name == "skip_nonfinite" for part in parts(tx)):
                raise ValueError(
                    "a transform beside skip_nonfinite takes no value=, so skip_nonfinite would not see the loss. "
                    "Put it around the whole optimizer: skip_nonfinite(optax.chain(...))."
                ) from error
            del passed[refused[1]]


def taking_extra_args(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Makes a transform that passes on only the extra arguments that ``tx`` accepts, as ``call_update`` does.

    Replaces ``optax.with_extra_args_support``, which passes either all extra arguments or none.

    >>> own = lambda updates, state, params=None, *, scale=2.0: (jax.tree.map(lambda u: scale * u, updates), state)
    >>> tx = optax.chain(optax.GradientTransformationExtraArgs(optax.init_empty_state, own), optax.sgd(0.1))
    >>> updates, state = taking_extra_args(tx).update(jnp.ones(2), tx.init(jnp.ones(2)), value=1.0, scale=3.0)
    >>> updates
    Array([-0.3, -0.3], dtype=float32)
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any) -> tuple[PyTree, PyTree]:
        return call_update(tx, updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # no signature, such as for a built-in function
        return None


def _with_names(error: TypeError, extra_args: dict[str, Any], passed: dict[str, Any]) -> TypeError:
    """Returns the error to raise in place of a ``TypeError`` that the update of an optimizer has raised.

    If Python's text says that arguments are missing, the result names these arguments and a cure. Any other error, or
    an error in a call without extra arguments, is returned unchanged.

    Args:
      error: the error.
      extra_args: the extra arguments of the call, by name.
      passed: the extra arguments that were left in the last attempt, without arguments that a transform has rejected.
    """
    missing = MISSING.search(str(error))
    if missing is None or not extra_args:
        return error
    all_names = re.findall(r"'(\w+)'", missing[2])
    names = [name for name in all_names if name not in passed]
    who, needed = missing[1].partition(".")[0], joined([f"{name}=" for name in names or all_names])
    if not names:
        # Optax passes extra arguments to a GradientTransformationExtraArgs only.
        return TypeError(
            f"{who}, a part of the optimizer, needs {needed}, and optax hands it no extra arguments. Make it by "
            "optax.GradientTransformationExtraArgs(init, update) in place of optax.GradientTransformation, and let "
            "what stands around it take **extra_args."
        )
    if set(names) & extra_args.keys():
        return TypeError(
            f"{who}, a part of the optimizer, needs {needed}, and another part takes no argument of that name: "
            "neither can be called. Let the update of the other part take **extra_args, as optax asks of it."
        )
    return TypeError(_needs_more(who, needed))


def _needs_more(who: str, needed: str) -> str:
    return (
        f"the update of {who} needs {needed}, and a training step has "
        f"{joined([f'{name}=' for name in STEP_EXTRA_ARGS])}. "
        "Give the argument a default, or keep its value in the optimizer's state (optax.inject_hyperparams), and set "
        "it there between steps."
    )


def check_optimizer(tx: optax.GradientTransformation, caller: str, *, makes_pairs: bool) -> None:
    """Checks, before tracing, that a training step can call the optimizer ``tx``. ``caller`` begins the text of errors.

    With ``makes_pairs`` the caller replaces an ``optax.lookahead``, which takes pairs of fast and slow parameters, by
    ``with_slow_params``; without, such an optimizer raises.

    Raises:
      TypeError: ``tx`` is not an optax transform.
      ValueError: a transform, at any depth, is one of the transforms of optax in ``REFUSED``, or needs an argument that
        a step does not have; names both. Or ``optax.lookahead`` is inside a transform that does not pass its pairs of
        parameters on; a mask or labels are a tree with boxes, although optimizers receive parameters without boxes; or
        a check in ``CHECKS_OF_PARTS`` raises.
    """
    check_transform(tx, caller)
    transforms = parts(tx)
    for part in transforms:
        if part.name in CHECKS_OF_PARTS:
            CHECKS_OF_PARTS[part.name](tx)
        if part.name in REFUSED and part.made_by.startswith("optax"):
            raise ValueError(f"{caller}: optax's {part.name} {REFUSED[part.name]}.")
        # Arguments that the update requires, and that neither optax nor a step provides.
        further = (_parameters(part.tx.update) or [])[NUM_USUAL_ARGS:] if part.tx is not None else []
        named = [parameter for parameter in further if parameter.kind not in (VAR_POSITIONAL, VAR_KEYWORD)]
        if needed := [p.name for p in named if p.default is p.empty and p.name not in STEP_EXTRA_ARGS]:
            raise ValueError(f"{caller}: {_needs_more(part.name, joined([f'{name}=' for name in needed]))}")
        for argument in ("mask", "param_labels"):
            tree = part.closure_values.get(argument)
            for path, leaf in [] if tree is None or callable(tree) else trees.leaves_with_path(tree):
                if is_box(leaf):
                    raise ValueError(
                        f"the {argument} of optax.{part.name} has '{path}' in a box, {tuple(leaf.names)}, and an "
                        "optimizer sees parameters without boxes. Pass a function of parameters, lambda params: "
                        f"jax.tree.map(..., params), or unbox the tree: {argument}=unbox(tree)."
                    )
    if LOOKAHEAD not in {part.name for part in transforms}:
        return
    if around := _around_lookahead(transforms[0]):
        raise ValueError(
            f"{caller}: optax.lookahead stands in {around}, which does not pass on the pairs of fast and slow "
            f"parameters that it needs. Write {around}(with_slow_params(optax.lookahead(...)), ...), from "
            "xlstm_jax.distributed.optimizers."
        )
    if not makes_pairs and sees_pairs(tx):
        raise ValueError(
            "the step: state.tx is optax.lookahead, which needs pairs of fast and slow parameters, and state.params "
            "is a single tree. Make the state with create_train_state(model, optax.lookahead(...), ...), or pass "
            "tx=with_slow_params(optax.lookahead(...))."
        )
