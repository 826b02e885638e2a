"""Lets a loss leave out the collection of constant arrays: tables that an NNX model keeps without a variable.

A module of NNX may hold a bare array, as ``self.position_ids = jnp.arange(16)[None]``. The array is a part of the
model's variables, in the collection "arrays", and no call of the model changes it. So a loss function need not take and
return it as it takes and returns statistics:

  loss_fn(params, apply_fn, batch)                      apply_fn adds the arrays of the state
  loss_fn(params, apply_fn, batch, collections)         as with other collections
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.modules import OF_ARRAYS, ShardsItself
from xlstm_jax.distributed.training.arguments import NAME_OF_KEY, collections_of

BEFORE_KEY = 3  # arguments of a loss before the key: params, apply_fn, batch


def with_constants(fn: Callable[..., Any], state: Any, has_key: bool, *, returns_pair: bool) -> Callable[..., Any]:
    """Returns a loss or evaluation function that takes the collections of ``state`` as last argument and calls ``fn``.

    In this call ``apply_fn`` adds the collections to the variables. ``fn`` itself is returned if the state has other
    collections than the constant arrays of an NNX model, or none, or if ``fn`` takes collections or has no signature.

    Args:
      fn: ``fn(params, apply_fn, batch)``, or ``fn(params, apply_fn, batch, rng)``.
      state: the state of a step.
      has_key: whether the step was given a key; a function with an optional key argument then receives the key.
      returns_pair: whether the new function returns the pair of the result of ``fn`` and the unchanged collections (for
        a loss), or the result alone.
    """
    model = getattr(state.apply_fn, "__self__", None) if hasattr(state, "apply_fn") else None
    if collections_of(state).keys() != {OF_ARRAYS} or not isinstance(model, ShardsItself):
        return fn
    try:
        takes = inspect.signature(fn)
    except (TypeError, ValueError):  # some functions, written in C, say, have no signature
        return fn
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [parameter for parameter in takes.parameters.values() if parameter.kind in kinds]
    with_key = len(given) == BEFORE_KEY + 1 and NAME_OF_KEY.search(given[-1].name) is not None
    others = [parameter for parameter in takes.parameters.values() if parameter.kind not in kinds]
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in others):
        return fn
    if len(given) != BEFORE_KEY and not with_key:
        return fn
    draws = with_key and (has_key or given[-1].default is inspect.Parameter.empty)

    @wraps(fn)
    def with_collections(params: PyTree, apply_fn: Any, batch: PyTree, *rest: Any, **extra_trees: Any) -> Any:
        *key, collections = rest
        result = fn(params, partial(_applied, apply_fn, collections), batch, *key, **extra_trees)
        return (result, collections) if returns_pair else result

    first = [parameter.replace(default=inspect.Parameter.empty) for parameter in given[: BEFORE_KEY + draws]]
    last = inspect.Parameter("collections", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    with_collections.__signature__ = takes.replace(parameters=[*first, last, *others])  # type: ignore[attr-defined]
    return with_collections


def _applied(
    apply_fn: Callable[..., Any],
    collections: Mapping[str, PyTree],
    variables: Mapping[str, PyTree],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Returns ``apply_fn({**collections, **variables}, *args, **kwargs)``: adds the collections to the variables."""
    return apply_fn({**collections, **variables}, *args, **kwargs)
