"""Checks and updates of a model's collections (``batch_stats``): variables beside the parameters.

  init    raises for values of single examples (a cache), and for sown values
  step    loss_fn(params, apply_fn, batch, rng, collections) -> (loss, updated)
          leaves of ``updated`` have the paths, shapes and dtypes of ``collections``, and are equal on every device

Equality is read off the equations (``varying``) before anything is computed: a value that each device computes from
its local examples raises. Devices must share the state: without this check, and with ``check_vma=False``, each device
would silently continue with a different value. ``check_vma=True`` does not find every case: types ignore the predicate
of a ``lax.cond`` or a loop.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded, rebox
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import value_dtype
from xlstm_jax.distributed.training.gradients import Loss
from xlstm_jax.distributed.training.varying import Axes, differing_args, differing_axes, with_name_for_reader
from xlstm_jax.formatting import kind_of, listed

OF_EXAMPLES = {"cache": "what decoding keeps", "intermediates": "activations", "perturbations": "activations"}


# ------------------------------------------------------------------------------------------------- of model.init


def check_kept(collections: Mapping[str, PyTree]) -> None:
    """Raises a ``ValueError`` if devices cannot share a collection returned by ``model.init``.

    Such are collections of single examples ("cache", "intermediates", "perturbations"), and tuples, which ``self.sow``
    leaves.
    """
    for name, collection in collections.items():
        rest = ["params", *(other for other in collections if other != name)]
        cure = f"Leave it out of the state: create_train_state(..., mutable={rest})."
        if name in OF_EXAMPLES:
            raise ValueError(
                f"the model's collection {name!r} holds {OF_EXAMPLES[name]} of single examples, and a training state "
                f"holds what all devices share. {cure}"
            )
        for path, leaf in trees.flatten_with_path(collection, tuple)[0]:
            if type(leaf) is tuple:
                raise ValueError(
                    f"'{name}/{path}' is a tuple, which is what self.sow leaves, and each step would append to it. "
                    f"{cure} In the loss function apply with mutable=[..., {name!r}], and return the other collections "
                    "alone. (Replace a tuple that was not sown by a dict.)"
                )


# --------------------------------------------------------------------------------------------- of a loss function


def updated_collections(
    loss: Callable[..., Loss],
    args: tuple[PyTree, ...],
    names: Sequence[str],
    updated: Any,
    axes: tuple[str, ...],
    *,
    read_later: bool,
) -> PyTree:
    """Returns a dict of the collections ``names`` after a call of the loss, with types that are equal on every device.

    Args:
      loss: ``loss(*args).collections`` are ``updated``.
      args: ``(params, minibatch, rng, collections)``; arrays of the minibatch, and the key, differ along ``axes``.
      names: names of the collections to return; a name missing from ``updated`` keeps its collection of ``args``.
      updated: the collections returned by the loss function.
      axes: the axes of the batch.
      read_later: whether the caller reads the equations of the traced step, and calls ``check_equal_collections``.
        Otherwise the loss is traced once more here, and the check runs here.
    Raises:
      TypeError, ValueError: ``updated`` has other leaves than the collections, or a leaf differs between devices.
    """
    new = _like_before(args[-1], updated, names)
    leaves = trees.sharded_leaves(new)
    of_types = [_differing_by_type(leaf) for _, leaf in leaves]
    if read_later:
        named = trees.map_values_with_path(lambda path, leaf: with_name_for_reader(path, leaf.value), new)
        return _equal_by_type(named, of_types)

    def again(*args: Any) -> list[Any]:
        return jax.tree.leaves(_like_before(args[-1], loss(*args).collections, names))

    if collectives.spread_axes(collectives.manual_axes()):
        axes_by_equations = differing_axes(again, args, differing_args(args, axes))
        differing = {path: of for (path, _), of in zip(leaves, axes_by_equations, strict=True)}
        check_equal_collections(differing, new, collectives.spread_axes(collectives.manual_axes()), axes)
    return _equal_by_type(new, of_types)


def check_equal_collections(
    differing: Mapping[str, Axes], collections: PyTree, spread: Sequence[str], axes: tuple[str, ...]
) -> None:
    """Raises a ``ValueError`` if a leaf of ``collections`` differs along an axis missing from its box.

    Args:
      differing: by path of a leaf, the axes along which the new value differs between devices, by the equations of a
        step.
      collections: the collections, for the axes of their boxes.
      spread: the mesh axes with more than one device; differences along other axes do not count.
      axes: the axes of the batch, for the cure in the error.
    """
    of_boxes = {path: Axes(leaf.axes) for path, leaf in trees.sharded_leaves(collections)}
    unexplained_axes = {path: (of - of_boxes[path]).intersection(spread) for path, of in differing.items()}
    if refused := {path: of for path, of in unexplained_axes.items() if of}:
        along = tuple(axis for axis in spread if any(axis in of for of in refused.values()))
        raise ValueError(
            f"the collections {listed(refused)} would differ from device to device along {along}, and a state holds "
            f"equal values on all devices. Pass nn.BatchNorm(..., axis_name={axes}), return pmean(updated, {axes}) of "
            f"jax.lax, or make the predicate of a branch equal by pmax(flag, {axes}): docs/collections.md."
        )


def _like_before(before: Mapping[str, PyTree], updated: Any, names: Sequence[str]) -> PyTree:
    """Returns a dict of the collections ``names``, with values of ``updated`` in the trees and boxes of ``before``.

    A collection missing from ``updated`` keeps its value of ``before``.

    Raises:
      TypeError: ``updated`` is no dict.
      ValueError: ``updated`` has a collection missing from ``before``, or leaves, shapes or dtypes unlike ``before``.
    """
    if not isinstance(updated, Mapping):
        raise TypeError(
            f"with collections: loss_fn must return a pair whose second part is a dict of updated collections, with "
            f"names of {sorted(before)}, not {kind_of(updated)}."
        )
    if unknown := sorted(updated.keys() - before.keys()):
        raise ValueError(
            f"loss_fn returned the collection {unknown[0]!r}, which the state does not have; it has {sorted(before)}. "
            "Return these alone: {name: updated[name] for name in collections}."
        )
    old = {path: leaf for path, leaf in trees.leaves_with_path(before) if path.partition("/")[0] in updated}
    new = dict(trees.leaves_with_path(updated))
    if unlike := sorted(old.keys() ^ new.keys()):
        verb = "did not return" if unlike[0] in old else "returned, and was not given,"
        raise ValueError(f"loss_fn {verb} '{unlike[0]}'. It returns all of a collection, or leaves it out unchanged.")

    def like(path: str, leaf: Any) -> Any:
        return _strongly_typed(path, leaf, new[path]) if path in new else leaf

    return trees.map_leaves_with_path(like, {name: before[name] for name in names})


def _strongly_typed(path: str, before: Any, updated: Any) -> Any:
    """Returns ``updated``, the new value of the leaf at ``path``, in the box of ``before`` and never with a weak type.

    A weak type (as of a Python number) would compile the step twice.

    Raises:
      ValueError: ``updated`` has another shape or dtype than ``before``.
    """
    old, new = trees.stored_values((before, updated))
    was, became = ((np.shape(value), jnp.result_type(value)) for value in (old, new))
    if was != became:
        raise ValueError(
            f"loss_fn made '{path}' {became[1]}{list(became[0])}, which was {was[1]}{list(was[0])}. A collection keeps "
            "its shapes and dtypes; leave a value with a row for each example out of the state."
        )
    return rebox(before, jnp.asarray(new, value_dtype(old)))


# ------------------------------------------------------------------------------------------ equal on all devices


def _differing_by_type(leaf: Sharded) -> Axes:
    """Returns the bound mesh axes over which a leaf varies by type, except the axes by which its box splits the leaf.

    Where types do not show variation (``check_vma=False``), every axis of more than one device counts as varying.
    """
    varying = collectives.varying_axes(leaf.value)

    def may_differ(axis: str) -> bool:
        return axis in varying if collectives.is_tracked(axis) else bool(collectives.spread_axes([axis]))

    return Axes(filter(may_differ, collectives.manual_axes())) - Axes(leaf.axes)


def _equal_by_type(new: PyTree, of_types: list[Axes]) -> PyTree:
    """Returns the tree ``new`` with the types of its leaves changed from varying to equal on every device.

    The values must be equal already. ``of_types`` has, for each leaf in the order of the tree, the axes over which the
    leaf varies by type. Under ``check_vma=True`` a maximum over these axes serves as the cast; otherwise the leaves are
    returned unchanged, and nothing is sent.
    """
    values, treedef = jax.tree.flatten(new)
    # JAX has no cast from varying to equal, so a maximum over equal values serves as the cast.
    tracked = [tuple(sorted(filter(collectives.is_tracked, axes))) for axes in of_types]
    for axes in sorted(set(tracked) - {()}):
        indices = [index for index, over in enumerate(tracked) if over == axes]
        sent = [values[i].astype(jnp.int32) if values[i].dtype == bool else values[i] for i in indices]
        for i, value in zip(indices, collectives.all_reduce(["max"] * len(sent), sent, axes), strict=True):
            values[i] = value.astype(values[i].dtype)
    return jax.tree.unflatten(treedef, values)
