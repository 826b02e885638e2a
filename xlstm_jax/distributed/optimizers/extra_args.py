"""Extra arguments of an optimizer's update, and a check that a training step can provide the arguments.

A training step has four extra arguments (``make_train_step`` makes them, on global arrays):

  value        the loss                                                             polyak_sgd, momo, reduce_on_plateau
  grad         the gradients before any transform                                   line searches
  value_fn     the loss of this batch for other parameters                          line searches, lbfgs
  grad_fn      the gradients of this batch for other parameters, (params, index)    sam(opaque_mode=True)

Optax requires every transform with extra arguments to accept and ignore unneeded arguments (``**extra_args``). Some
transforms of optax, such as ``optax.contrib.sam``, and many custom transforms do not.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import optax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.optimizers import optax_introspection
from xlstm_jax.distributed.optimizers.optax_introspection import around_lookahead
from xlstm_jax.formatting import joined

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


def taking_extra_args(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Makes a transform that passes on only the extra arguments that ``tx`` accepts.

    Replaces ``optax.with_extra_args_support``, which passes either all extra arguments or none.

    >>> own = lambda updates, state, params=None, *, scale=2.0: (jax.tree.map(lambda u: scale * u, updates), state)
    >>> tx = optax.chain(optax.GradientTransformationExtraArgs(optax.init_empty_state, own), optax.sgd(0.1))
    >>> updates, state = taking_extra_args(tx).update(jnp.ones(2), tx.init(jnp.ones(2)), value=1.0, scale=3.0)
    >>> updates
    Array([-0.3, -0.3], dtype=float32)
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any) -> tuple[PyTree, PyTree]:
        takes = _parameters(tx.update)
        passed = extra_args if takes is None else {name: x for name, x in extra_args.items() if _may_take(takes, name)}
        passed = dict(passed)
        while True:
            try:
                return tx.update(updates, state, params, **passed)
            except TypeError as error:
                # Transforms within `tx` (links of a chain, the transform in MultiSteps) have signatures that `tx` does
                # not show: call them, and drop the arguments that they reject.
                refused = UNEXPECTED.search(str(error)) or UNCONSUMED.search(str(error))
                if refused is None or refused[1] not in passed:
                    raise _with_names(error, extra_args, passed) from error
                if refused[1] == VALUE and any(part.name == "skip_nonfinite" for part in optax_introspection.parts(tx)):
                    raise ValueError(
                        "a transform beside skip_nonfinite takes no value=, so skip_nonfinite would not see the loss. "
                        "Put it around the whole optimizer: skip_nonfinite(optax.chain(...))."
                    ) from error
                del passed[refused[1]]

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _may_take(takes: list[inspect.Parameter], name: str) -> bool:
    """Returns whether a function with the parameters ``takes`` accepts a keyword argument of this name."""
    for parameter in takes:
        if parameter.kind is VAR_KEYWORD or (
            parameter.name == name and parameter.kind is not parameter.POSITIONAL_ONLY
        ):
            return True
    return False


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # no signature, such as for a built-in function
        return None


def _with_names(error: TypeError, extra_args: dict[str, Any], passed: dict[str, Any]) -> TypeError:
    """Returns the error to raise in place of a ``TypeError`` of an update: names a missing extra argument, if any."""
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


def check_callable(tx: optax.GradientTransformation, caller: str) -> list[optax_introspection.Part]:
    """Checks, before tracing, that a step can call the optimizer; returns the transforms within (``Part``).

    Raises:
      ValueError: a transform, at any depth, needs an argument that a step does not have; names both. Or
        ``optax.lookahead`` is inside a transform that does not pass its pairs of parameters on.
    """
    transforms = optax_introspection.parts(tx)
    for part in transforms:
        if part.name in REFUSED and part.made_by.startswith("optax"):
            raise ValueError(f"{caller}: optax's {part.name} {REFUSED[part.name]}.")
        if needed := _required(part.update):
            raise ValueError(f"{caller}: {_needs_more(part.name, joined([f'{name}=' for name in needed]))}")
    if optax_introspection.LOOKAHEAD in {part.name for part in transforms} and (around := around_lookahead(tx)):
        raise ValueError(
            f"{caller}: optax.lookahead stands in {around}, which does not pass on the pairs of fast and slow "
            f"parameters that it needs. Write {around}(with_slow_params(optax.lookahead(...)), ...), from "
            "xlstm_jax.distributed.optimizers."
        )
    return transforms


def _required(update: Callable[..., Any] | None) -> list[str]:
    """Returns the names of arguments that ``update`` requires and that neither optax nor a step provides."""
    further = (_parameters(update) or [])[NUM_USUAL_ARGS:] if update else []
    named = [parameter for parameter in further if parameter.kind not in (VAR_POSITIONAL, VAR_KEYWORD)]
    return [p.name for p in named if p.default is p.empty and p.name not in STEP_EXTRA_ARGS]
