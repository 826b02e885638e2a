"""Filters of NNX (``nnx.PathContains``, ``nnx.All``, a class, ...) as selections of modules and of parameters.

  shard_modules(model, nnx.All(nnx.Linear, nnx.PathContains("mlp")), "fsdp")    filter called with (path, module)
  create_train_state(model, ..., trainable=nnx.LoRAParam)                       filter called with (path, variable)
  optax.adamw(1e-3, mask=model.leaf_mask(nnx.Not(nnx.PathContains("norm"))))    filter called with (path, variable)

A filter receives a path as NNX does, as a tuple of names and numbers. The other selections of this library are
functions of a path as text, as "blocks/0/kernel".
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from flax.nnx import filterlib

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.freezing import LeafPredicate
from xlstm_jax.distributed.data_parallel.trees import map_leaves_with_path
from xlstm_jax.formatting import kind_of, listed

FILTERS = (
    *(filterlib.WithTag, filterlib.PathContains, filterlib.PathIn, filterlib.OfType),
    *(filterlib.All, filterlib.Any, filterlib.Not, filterlib.Everything, filterlib.Nothing),
)


def is_filter(selection: object) -> bool:
    """Returns whether a selection is a filter of NNX, rather than a function of a path as text.

    Filters are a class, an instance of a filter class such as ``nnx.PathContains``, ``...``, and a tuple or list with
    an entry. Functions and texts, which NNX accepts as filters, too, have another meaning here, and give False; both
    may be part of a filter, as in ``nnx.Any(function)``.
    """
    if isinstance(selection, tuple | list):
        return len(selection) > 0
    return selection is ... or isinstance(selection, (*FILTERS, type))


def modules_taken(selection: Any, modules: Mapping[str, tuple[tuple[Any, ...], Any]]) -> list[str]:
    """Returns the paths, as text, of the modules that an NNX filter selects, in the order of ``modules``.

    Args:
      selection: the filter.
      modules: (path as a tuple of names and numbers, module) for each path as text, as "blocks/0".
    """
    takes = filterlib.to_predicate(selection)
    return [name for name, (path, module) in modules.items() if takes(path, module)]


def leaf_predicate(selection: Any, variables: Mapping[str, tuple[tuple[Any, ...], Any]]) -> LeafPredicate:
    """Returns a function from the path of a parameter, as "blocks/0/kernel", to whether the parameter is selected.

    Args:
      selection: an NNX filter of (path, variable); or a predicate of a path as text, which is returned unchanged.
      variables: the model's parameters: (path as a tuple of names and numbers, variable) for each path as text.
    Raises:
      TypeError: the selection is neither a filter nor a function.
      ValueError: the filter selects no parameter, and is not ``nnx.Nothing()`` (or False), which selects none.
    """
    if not is_filter(selection):
        if not callable(selection):
            raise TypeError(
                f"the selection of parameters is {kind_of(selection)}; pass a filter of NNX, as nnx.LoRAParam or "
                "nnx.PathContains('lora'), or a predicate of a leaf's path, as lambda path: 'lora' in path."
            )
        return selection
    takes = filterlib.to_predicate(selection)
    taken = {name for name, (path, variable) in variables.items() if takes(path, variable)}
    if not taken and not isinstance(takes, filterlib.Nothing):
        raise ValueError(
            f"the filter {selection!r} selects none of the parameters: {listed(sorted(variables), 12)}. A filter "
            "receives a path as a tuple, as ('blocks', 0, 'kernel'), and a variable."
        )
    return taken.__contains__


def leaf_mask(predicate: LeafPredicate) -> Callable[[PyTree], PyTree]:
    """Returns a function for ``mask=`` of optax, from parameters to a tree of ``predicate(path)`` for each parameter.

    ``predicate`` gets the path of a parameter as text, as "blocks/0/kernel". The parameters are a tree of arrays or
    boxes, or an ``nnx.State`` of variables, as ``nnx.Optimizer`` passes; the result has the same structure.
    """

    def mask(params: PyTree) -> PyTree:
        if isinstance(params, nnx.State):
            return nnx.map_state(lambda path, _: predicate("/".join(map(str, path))), params)
        return map_leaves_with_path(lambda path, _: predicate(path), params)

    return mask
