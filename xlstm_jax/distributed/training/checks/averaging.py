"""Check of gradients in a user-written step: each leaf must be averaged over devices exactly once.

The gather of a split leaf averages its gradient over the axes of the gather. The gradient of a replicated leaf is
summed by JAX (under ``check_vma=True``) or not reduced. So before ``sync_gradients`` the gradients of a tree are of two
kinds, and the check compares kinds, by types and by the equations between the backward pass and the optimizer:

  type          after the backward pass: equal along an axis, so JAX has summed; or varying along the axis
  multiple      the factor of the following equations: 1/8 by ``sync_gradients``, 1/4 by 4 minibatches
  a mistake     a sum and a mean with the same multiple: for every loss, the sum or the mean is wrong

A scale of the loss is no mistake, because the scale changes both kinds alike. If all gradients of a tree are sums over
an axis, no type shows whether the loss contains the mean, and the check passes. A multiplication by an unknown number
(a clipping) hides the leaf from the check. ``check_step`` compares numbers, and finds mistakes that this check passes.

Under ``check_vma=False`` gradients have no such types. The check then follows the axes along which devices differ
through the equations of the ``shard_map``, as ``equal_results`` does for steps of ``make_train_step``.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jax.core import Tracer

from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.averages import wrong_averages_raise
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.training.moments import AppliedGradients, TrainingCheck
from xlstm_jax.distributed.training.varying import followed_equation
from xlstm_jax.equations import named_axes
from xlstm_jax.origins import ProducingEquation, TracedValue, inside, is_gradient

# Equations whose results have the values of the operands, in a new shape, layout, dtype or type.
_UNCHANGED = {
    *("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy", "copy_p", "name"),
    *("pvary", "pcast", "reduced_vary_cast", "preduced", "optimization_barrier", "sharding_constraint", "reshard"),
}
_SUMS = {"psum", "psum_invariant"}


class GradientMultiple(NamedTuple):
    """Relation of a gradient to the result of the backward pass: the result times ``factor``, summed over ``summed``.

    A mean over 4 devices is a sum times 1/4. ``by_sync``: the part of ``factor`` that ``sync_gradients`` contributed.
    ``varying``: axes over which the result of the backward pass varies by type.
    """

    factor: Fraction
    by_sync: Fraction
    summed: frozenset[str]
    varying: frozenset[str]


class _Gradient(NamedTuple):
    """Gradient of the leaf at ``path``, traced, with the leaf and the relation to the backward pass."""

    path: str
    leaf: Sharded
    value: TracedValue
    relation: "Relation"


ZERO = "zero"  # the relation of zeros, such as the first carry of a loop over minibatches, to any gradient
Relation = GradientMultiple | str | None  # None: unknown


def _relation(value: TracedValue) -> Relation:
    """Returns how a traced gradient was computed from the result of the backward pass (``jax.grad``).

    Reads the equations between both. A ``GradientMultiple`` (factor, axes of sums) if the gradient is a known multiple
    of the result, or a known multiple of the result's sum over devices, and the backward pass is inside ``shard_map``;
    ``ZERO`` if the gradient is a literal 0; None if the relation is unknown.
    """
    if value.number is not None:
        return ZERO if value.number == 0 else None
    if (made := value.made()) is None:
        return None
    if is_gradient(value):
        is_local = bool(value.aval.sharding.mesh.manual_axes)
        return (
            GradientMultiple(Fraction(1), Fraction(1), frozenset(), collectives.varying_axes_of_type(value.aval))
            if is_local
            else None
        )
    name, operands = made.eqn.primitive.name, made.operands
    if name in _UNCHANGED:
        return _relation(operands[made.number])
    if name in ("add", "add_any", "sub"):
        return _of_both(*map(_relation, operands))
    if name in ("mul", "div"):
        return _scaled(made)
    if name in _SUMS:
        return _summed(made)
    within = inside(made)
    return None if within is None else _relation(within)


def _of_both(one: Relation, other: Relation) -> Relation:
    if one in (ZERO, other):
        return other
    return one if other == ZERO else None


def _scaled(made: ProducingEquation) -> Relation:
    name, (one, other) = made.eqn.primitive.name, made.operands
    if (number := _number(other)) is None and name == "mul":
        one, number = other, _number(one)
    of = _relation(one) if number else None
    if not isinstance(of, GradientMultiple) or number is None:
        return of
    return _times(of, Fraction(number) if name == "mul" else 1 / Fraction(number), made)


def _times(multiple: GradientMultiple, factor: Fraction, made: ProducingEquation) -> GradientMultiple:
    is_of_sync = "sync_gradients" in str(made.eqn.source_info.name_stack)
    return multiple._replace(factor=multiple.factor * factor, by_sync=multiple.by_sync * (factor if is_of_sync else 1))


def _number(value: TracedValue) -> float | None:
    """Returns the number that a traced value has in every entry, as a float: a literal, possibly cast or broadcast.

    Returns None if the value is no such literal, or is not finite.
    """
    while value.number is None:
        made = value.made()
        if made is None or made.eqn.primitive.name not in _UNCHANGED or is_gradient(value):
            return None
        value = made.operands[made.number]
    return value.number if np.isfinite(value.number) else None


def _summed(made: ProducingEquation) -> Relation:
    operand, axes = made.operands[made.number], named_axes(made.eqn)
    relation = _relation(operand)
    if not isinstance(relation, GradientMultiple) or made.eqn.params.get("axis_index_groups") is not None:
        return relation if relation == ZERO else None
    shape = operand.aval.sharding.mesh.shape
    # A sum over devices with equal values multiplies the relation by the number of devices.
    count = int(np.prod([shape[axis] for axis in axes], dtype=int))
    return _times(relation, Fraction(count), made)._replace(summed=relation.summed.union(axes))


def _shard_map_of(value: TracedValue) -> ProducingEquation | None:
    """Returns the ``shard_map`` equation of which a traced gradient is a result, with the index of this result.

    Walks back through equations with a single operand of the gradient's shape; None if no ``shard_map`` is found so.
    """
    while made := value.made():
        if made.eqn.primitive.name == "shard_map":
            return made
        alike = [operand for operand in made.operands if np.shape(operand.aval) == np.shape(value.aval)]
        if len(alike) != 1:
            return None
        (value,) = alike
    return None


def check_averaged_once(applied: AppliedGradients) -> None:
    """Raises if the equations of a step prove that gradients were not averaged over devices, or averaged wrongly.

    ``applied`` has the traced gradients and the parameters with which the user called ``apply_gradients``. Gradients
    that are not traced pass; and inside the context ``wrong_averages_pass`` nothing is checked.

    Raises:
      ValueError: over an axis, the gradient of a replicated leaf is a sum and the gradient of a split leaf a mean; or
        different shards of a leaf were averaged; or a gradient differs along an axis over which its spec replicates the
        gradient. Names the leaf, the axes and the cure.
    """
    if not wrong_averages_raise():
        return
    grads = list(_traced_gradients(applied))
    known = [grad for grad in grads if isinstance(grad.relation, GradientMultiple)]
    for grad in known:
        _check_shards(grad)
    split = [grad for grad in known if grad.leaf.gathered_axes]
    for grad in known:
        _check_sums(grad, split)
    for grad in grads:
        _check_equal(grad)


def _traced_gradients(applied: AppliedGradients) -> Iterator[_Gradient]:
    grads = dict(trees.sharded_leaves(applied.grads))
    for path, leaf in trees.sharded_leaves(applied.params):
        grad = grads[path].value if path in grads else None
        if leaf.is_differentiable and isinstance(grad, Tracer):
            value = TracedValue(grad)
            yield _Gradient(path, leaf, value, _relation(value))


def _check_shards(grad: _Gradient) -> None:
    """Raises a ``ValueError`` if the gradient of a split leaf was summed over axes that split the leaf.

    ``grad`` has the leaf, and the relation of its gradient to the backward pass, which must be known. Such a sum adds
    the gradients of different shards to each other, although the gather of the leaf has averaged already.
    """
    assert isinstance(grad.relation, GradientMultiple)
    if over := tuple(axis for axis in grad.leaf.gathered_axes if axis in grad.relation.summed):
        raise ValueError(
            f"apply_gradients: the gradient of '{grad.path}' was averaged over {over}, axes that split the leaf: its "
            "shards were added to each other, and the gather had averaged already. Call sync_gradients on all "
            "gradients in place of pmean, or use value_and_grad."
        )


def _check_sums(grad: _Gradient, split: list[_Gradient]) -> None:
    """Raises a ``ValueError`` if ``grad`` is a sum over an axis over which a gradient in ``split`` is a mean.

    ``grad`` has a leaf, and the known relation of its gradient to the backward pass. ``split`` are gradients of split
    leaves, which the gather averages. A pair of gradients with different factors since the backward pass is not
    compared, because the user's program then scales some leaves on purpose.
    """
    of = grad.relation
    assert isinstance(of, GradientMultiple)
    for other in split:
        mean = other.relation
        assert isinstance(mean, GradientMultiple)
        axes = [axis for axis in other.leaf.gathered_axes if axis in mean.varying]
        # If only the factors by sync_gradients differ, the program scales some leaves on purpose.
        is_alike = (of.factor, of.by_sync) == (mean.factor, mean.by_sync)
        if is_alike and (over := tuple(axis for axis in axes if axis not in of.varying)):
            raise ValueError(
                f"apply_gradients: JAX has summed the gradient of '{grad.path}' over {over}, and the gather has "
                f"averaged that of '{other.path}': one of both is wrong by the number of devices. Call sync_gradients "
                "once over all axes of the batch and of the gathers, or use value_and_grad."
            )


def _check_equal(grad: _Gradient) -> None:
    """Raises a ``ValueError`` if a gradient differs between devices along an axis that its ``out_specs`` do not name.

    Checks gradients that a ``shard_map`` with ``check_vma=False`` returned, by the equations of the ``shard_map``;
    other gradients pass.
    """
    made = _shard_map_of(grad.value)
    if made is None or made.eqn.params.get("check_vma", True):
        return
    eqn, mesh = made.eqn, made.eqn.params["mesh"].shape
    differs = followed_equation(eqn, [frozenset()] * len(eqn.invars), lambda eqn, inputs: None)[made.number]
    # Axes of values that the user's code communicated have a second mark: no equation proves that these values differ.
    over = tuple(
        axis for axis, size in mesh.items() if size > 1 and axis in differs and f"{axis} by hand" not in differs
    )
    if over:
        raise ValueError(
            f"apply_gradients: the gradient of '{grad.path}' differs between devices along {over}, and the out_specs "
            "of the shard_map declare it equal. Call sync_gradients once over all axes of batch and gathers; "
            "scale by norms of this library (clip_by_global_norm), not by norms of shards."
        )


AVERAGED_ONCE = TrainingCheck("update", check_averaged_once, "howto/own_step.md")
