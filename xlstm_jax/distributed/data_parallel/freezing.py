"""Frozen parameters, as of a base model under an adapter: no gradient, and optionally storage in fewer bits.

  W[d_fsdp, f]  -- freeze_params -->  W in a box with trainable=False, in the requested dtype
  forward       gathered like any leaf, in the stored dtype or in ``gather_dtype``
  backward      gathered again if weights are not kept; no gradient, no reduce-scatter, no all-reduce
  optimizer     ignores frozen parameters: no moments, no contribution to norms

These properties follow from the box's ``trainable``, read by ``Sharded.is_differentiable``.
"""

from collections.abc import Callable
from functools import partial
from types import EllipsisType
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.typing import DTypeLike

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded, frozen
from xlstm_jax.distributed.data_parallel.wire.dtypes import cast_dtype, dtype_name
from xlstm_jax.formatting import kind_of

LeafPredicate = Callable[[str], Any]
# The argument ``trainable`` of a function that has the model: a predicate, or a selection of another form.
Trainable = LeafPredicate | Callable[..., Any] | tuple[Any, ...] | list[Any] | EllipsisType
NARROWEST_BITS = 16


@runtime_checkable
class SelectsLeaves(Protocol):
    """Protocol of a model that takes further forms of selections of its parameters: filters of NNX."""

    def leaf_predicate(self, selection: Any) -> LeafPredicate:
        """Returns a function from a leaf's path, as "blocks/0/kernel", to whether ``selection`` selects the leaf."""
        ...


def freeze_params(
    params: PyTree, trainable: LeafPredicate | None = None, *, frozen_dtype: DTypeLike | None = None
) -> PyTree:
    """Freezes parameters: a frozen leaf has no gradient and no optimizer state, and is stored in ``frozen_dtype``.

    ``create_train_state`` freezes during initialisation, given the same arguments. Use this function for parameters
    from elsewhere: a checkpoint, or a merge of two trees.

    >>> params = {"base": {"kernel": jnp.ones((8, 4))}, "lora": {"a": jnp.ones((8, 2))}}
    >>> found = freeze_params(params, lambda path: path.startswith("lora/"), frozen_dtype="bfloat16")
    >>> found["base"]["kernel"].trainable, found["base"]["kernel"].value.dtype, found["lora"]["a"].dtype
    (False, dtype(bfloat16), dtype('float32'))

    Args:
      params: arrays, boxed if split; inside or outside of ``jit``. Integers and PRNG keys take no gradient
        anyway, and stay unchanged.
      trainable: a function of a leaf's path, as "blocks/attention/kernel"; a leaf is frozen if the function returns
        False. Leaves that are already frozen stay frozen; ``None`` freezes no further leaf. For a filter of NNX pass
        ``model.leaf_predicate(filter)``.
      frozen_dtype: the dtype in which frozen leaves are stored; ``None``: unchanged. A floating dtype of 16 bits or
        more. Leaves are gathered in this dtype, unless the leaf has a ``gather_dtype``. (A base in 8 or 4 bits:
        docs/howto/quantised_base.md.)
    Returns:
      The tree, with frozen leaves, split or replicated, in boxes with ``trainable=False``; other leaves are unchanged.
    Raises:
      TypeError: ``trainable`` is not a function, or ``frozen_dtype`` is not a dtype.
      ValueError: ``frozen_dtype`` is given and no leaf is frozen; or ``frozen_dtype`` does not fit a leaf (named).
    """
    # A class, as ``nnx.LoRAParam``, is callable, and its instances are true.
    if trainable is not None and (not callable(trainable) or isinstance(trainable, type)):
        raise TypeError(
            f"trainable is {kind_of(trainable)}; pass a predicate of a leaf's path, as lambda path: 'lora' in path. "
            "For a filter of NNX pass model.leaf_predicate(filter), with the model of nnx_model."
        )
    dtype = dtype_name(frozen_dtype, "frozen_dtype")
    if dtype and jnp.finfo(dtype).bits < NARROWEST_BITS:
        raise ValueError(
            f"frozen_dtype={dtype!r} has {jnp.finfo(dtype).bits} bits, which without scales most weights do not fit. "
            "Pass 'bfloat16'."
        )

    def freeze(path: str, leaf: Any) -> Any:
        return frozen(leaf) if trainable is not None and not trainable(path) else leaf

    # Leaves frozen here and leaves frozen by their wrapper (trainable=False) are stored alike.
    frozen_params = trees.map_values_with_path(
        partial(stored_frozen, dtype=dtype), trees.map_leaves_with_path(freeze, params)
    )
    leaves = trees.sharded_leaves(frozen_params)
    if dtype and leaves and all(leaf.trainable for _, leaf in leaves):
        raise ValueError(
            f"frozen_dtype={dtype!r} is for frozen parameters, and none of {len(leaves)} is frozen. Pass trainable=, "
            "a predicate of a leaf's path that is false for frozen leaves, or leave frozen_dtype out."
        )
    return frozen_params


def stored_frozen(path: str, leaf: Sharded, dtype: str | None) -> Any:
    """Returns the array in the box of ``leaf``: cast to ``dtype`` if the leaf is frozen, else unchanged.

    With ``dtype=None`` every array is unchanged. Integers keep their dtype. ``path`` names the leaf in the error.

    Raises:
      ValueError: the leaf is complex and ``dtype`` is real, or the other way round; or ``dtype`` is no floating dtype.
    """
    if dtype is None or leaf.trainable:
        return leaf.value
    return leaf.value.astype(cast_dtype(leaf.value, dtype, "frozen_dtype", path))


def with_frozen(
    model: object, variables: PyTree, trainable: Trainable | None, frozen_dtype: DTypeLike | None
) -> PyTree:
    """Returns ``variables``, with "params" replaced by ``freeze_params(params, trainable, frozen_dtype=frozen_dtype)``.

    Leaves for which ``trainable`` is false are then frozen. If both options are ``None``, the variables are returned
    unchanged. If the model is a ``SelectsLeaves`` (NNX), ``trainable`` may be a filter of NNX, which the model converts
    to a predicate of a leaf's path.
    """
    if trainable is None and frozen_dtype is None:
        return variables
    is_trainable: Any = trainable
    if trainable is not None and isinstance(model, SelectsLeaves):
        is_trainable = model.leaf_predicate(trainable)
    return {**variables, "params": freeze_params(variables.get("params", {}), is_trainable, frozen_dtype=frozen_dtype)}
