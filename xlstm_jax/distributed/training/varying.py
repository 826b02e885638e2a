"""Analysis of a jaxpr: along which mesh axes do the results of a function differ between devices?

The types of ``check_vma=True`` are more cautious: every value computed from a gathered parameter varies by type; and
without ``check_vma`` there are no types. This analysis only reads equations: nothing is computed or communicated.

  most equations           results differ along the axes along which an input differs
  psum, all_gather         results are equal along the axes of the equation, for any inputs
  axis_index, and further  results differ along the axes of the equation
    equations with an axis
  loops, branches          the analysis enters them, and repeats a loop's body until no further result differs. If the
                           predicate of a branch or of a loop differs, every result differs
  shard_map                inputs differ along the axes of their specs; the axes of output specs form one array

Results of unknown equations count as differing: callers may then reject too much, never too little. A model may also
reduce by hand, by a ring of ``ppermute``, by sums over groups, or in a kernel with communication. Such a result may be
equal, but no equation proves this. So the axes of the result get the mark "by hand", and ``Equations.of_results`` omits
marked axes.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import entry_axes
from xlstm_jax.equations import COLLECTIVES, all_equations, name_and_params, named_axes, scan_counts
from xlstm_jax.private_names import core

Axes = frozenset[str]

# Equations whose results are equal along the axes of the equation, and equations of hand-written communication.
_EQUALS = {name for name, kind in COLLECTIVES.items() if kind in ("all-reduce", "all-gather", "collective-broadcast")}
_BY_HAND = {
    name for name, kind in COLLECTIVES.items() if kind in ("collective-permute", "all-to-all", "ragged-all-to-all")
}
_CASTS = {"pvary", "pcast"}  # casts of the type only
_AS_THEY_ARE = {*_CASTS, "optimization_barrier"}  # equations that return each operand unchanged
OPAQUE = {"pallas_call", "ffi_call", "call_exported", "core_map"}  # programs that no jaxpr shows
_HAND = " by hand"  # suffix of an axis over which a value was computed by hand-written communication or partial sums
_MARK = "equal on all devices: "
_OTHER_PARAMS = KeyError, AttributeError, ValueError  # raised if another JAX release describes an equation differently
_CALLS = {"jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}


class Equations(NamedTuple):
    """Result of ``read_equations``: axes along which values of a traced program differ between devices.

    ``of_results`` has a set of axes per result, without axes over which the result was communicated by hand.
    ``of_marked`` has a set of axes per name that the program gave to a value by ``with_name_for_reader``.
    ``of_branches`` are the axes along which devices may take different branches (or stop a loop at different rounds)
    although a branch has a collective over the axis.
    """

    of_results: list[Axes]
    of_marked: dict[str, Axes]
    of_branches: Axes


def with_name_for_reader(name: str, value: jax.Array) -> jax.Array:
    """Returns ``value`` unchanged, with a name in the jaxpr.

    ``read_equations`` then reports the axes along which the value differs, under ``name``, in ``Equations.of_marked``.
    """
    return checkpoint_name(value, f"{_MARK}{name}")


def read_equations(closed: Any) -> Equations:
    """Returns, as ``Equations``, the mesh axes along which each result of a program differs between devices.

    The axes of values that the program has named by ``with_name_for_reader`` are included, by name. ``closed`` is the
    closed jaxpr of a program around ``shard_map``. The arguments of the program are global arrays and count as equal;
    inside ``shard_map`` an argument differs along the axes of its spec.
    """
    reader = _Reader()
    jaxpr = closed.jaxpr
    of_results = reader.of_jaxpr(jaxpr, [Axes()] * len(jaxpr.constvars), [Axes()] * len(jaxpr.invars))
    of_marked = {name: _named(axes) for name, axes in reader.of_marked.items()}
    return Equations([*map(_without_hand, of_results)], of_marked, reader.waiting)


def differing_axes(fn: Callable[..., list[Any]], args: Sequence[Any], of_args: Sequence[Axes]) -> list[Axes]:
    """Returns, for each array of the list ``fn(*args)``, the mesh axes along which the array differs between devices.

    ``fn`` is traced, not run. ``of_args`` has the axes along which each leaf of ``args`` differs. If ``fn`` closes over
    an array of an outer trace, the array differs along the axes of its type. Along an axis that types do not track
    (``check_vma=False``) the array counts as differing if any of ``args`` differs along the axis.
    """
    return _read(fn, args, of_args)[0]


def propagate_labels(
    closed: Any, of_inputs: Sequence[Axes], rule: Callable[[Any, list[Axes]], list[Axes] | None]
) -> list[Axes]:
    """Propagates sets of labels (any strings) from inputs to results of a jaxpr, as ``read_equations`` does for axes.

    Returns the labels of each result; ``of_inputs`` has the labels of each input.
    ``rule(equation, labels of the equation's inputs)`` is called for each equation, and returns the labels of the
    equation's results, or None: then the default rule applies. By the default rule each result of an equation gets the
    labels of all inputs. An equation with mesh axes also adds the names of these axes as labels (``axis_index``), or
    removes them (``psum``, ``all_gather``). Loops, branches and calls are entered.
    """
    return _Reader(rule).of_jaxpr(closed.jaxpr, [Axes()] * len(closed.consts), list(of_inputs))


def followed_equation(
    eqn: Any, of_inputs: Sequence[Axes], look: Callable[[Any, list[Axes]], list[Axes] | None]
) -> list[Axes]:
    """Returns the labels (sets of any strings) of each result of an equation; ``of_inputs`` has the labels per input.

    ``look(equation, labels of its inputs)`` returns the labels of the results, or None for the default rule of
    ``propagate_labels``: each result gets the labels of all inputs, and mesh axes of the equation are added or removed
    as labels. ``look`` is called for the equation first. After None, ``look`` is also called for each equation inside,
    such as the equations in the body of a scan.
    """
    return _Reader(look).of_equation(eqn, list(of_inputs))


def _read(fn: Callable[..., list[Any]], args: Sequence[Any], of_args: Sequence[Axes]) -> tuple[list[Axes], Axes]:
    """Traces ``fn(*args)`` and returns (mesh axes along which each result differs, axes of collectives at risk).

    An axis is at risk if a collective over the axis is in a branch of ``cond`` or in a loop, and devices along the axis
    may choose different branches, or stop at different rounds. ``of_args`` has, for each leaf of ``args`` in order, the
    axes along which the leaf differs.
    """
    closed = jax.make_jaxpr(fn)(*args)
    everywhere = Axes().union(*of_args)
    manual = collectives.manual_axes()
    tracked = Axes(axis for axis in everywhere if axis in manual and collectives.is_tracked(axis))

    def of_const(const: Any) -> Axes:
        return (everywhere - tracked) | collectives.varying_axes(const) if isinstance(const, Tracer) else Axes()

    reader = _Reader()
    of_results = reader.of_jaxpr(closed.jaxpr, [*map(of_const, closed.consts)], list(of_args))
    return [*map(_named, of_results)], reader.parted


def _named(axes: Axes) -> Axes:
    """Returns the names of axes in ``axes``, without marks.

    A mark "AXIS by hand" stands beside the name of an axis over which the value was communicated by hand, such as in a
    ring: {"fsdp", "fsdp by hand"} gives {"fsdp"}.
    """
    return Axes(axis for axis in axes if not axis.endswith(_HAND))


def _without_hand(axes: Axes) -> Axes:
    """Returns ``axes`` without marks, and without axes that have the mark of communication by hand."""
    return _named(Axes(axis for axis in axes if axis + _HAND not in axes))


class _Reader:
    """Interpreter of a jaxpr that computes, for each value, the axes along which devices differ.

    ``parted`` collects axes along which devices may take different branches, where a branch has an equation over the
    axis. Branches are those of ``cond`` and ``switch``, and further iterations of a ``while_loop``. ``waiting`` has the
    axes of ``parted`` for which the equation is a collective, and no predicate was communicated by hand. ``of_marked``
    has the axes of marked values by name.

    ``_known`` caches the results of inner jaxprs: equal layers of a model share the jaxpr of a function, and nested
    loops read the same jaxpr in each round.
    """

    def __init__(self, look: Callable[[Any, list[Axes]], list[Axes] | None] | None = None) -> None:
        self._look = look
        self.parted = Axes()
        self.waiting = Axes()
        self.of_marked: dict[str, Axes] = {}
        self._known: dict[tuple[int, tuple[Axes, ...]], list[Axes]] = {}

    def of_jaxpr(self, jaxpr: core.Jaxpr, consts: list[Axes], inputs: list[Axes]) -> list[Axes]:
        """Returns, for each result of a jaxpr, the mesh axes along which the result differs between devices.

        ``consts`` and ``inputs`` have the axes along which each constant and each input differs.
        """
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        for eqn in jaxpr.eqns:
            # A reference (jax.new_ref) may receive any of the inputs; later reads return it.
            inputs = [Axes() if isinstance(atom, core.Literal) else env[atom] for atom in eqn.invars]
            if eqn.effects:  # only equations with effects write to references
                for ref in _references(eqn):
                    env[ref] = all_named_axes([eqn]).union(*inputs)
            env.update(zip(eqn.outvars, self.of_equation(eqn, inputs), strict=True))
        return [Axes() if isinstance(atom, core.Literal) else env[atom] for atom in jaxpr.outvars]

    def _of_inner(self, closed: Any, inputs: list[Axes]) -> list[Axes]:
        """Returns, for each result of a jaxpr within an equation, the mesh axes along which the result differs.

        ``inputs`` has the axes along which each input differs. ``closed`` is a closed or an open jaxpr. Its constants
        count as equal on every device.
        """
        jaxpr = getattr(closed, "jaxpr", closed)
        key = id(jaxpr), tuple(inputs)  # ids stay unique: the outermost jaxpr keeps inner jaxprs alive
        if key not in self._known:
            self._known[key] = self.of_jaxpr(jaxpr, [Axes()] * len(jaxpr.constvars), inputs)
        return self._known[key]

    def of_equation(self, eqn: Any, inputs: list[Axes]) -> list[Axes]:
        """Returns, for each result of an equation, the mesh axes along which the result differs between devices.

        ``inputs`` has the axes along which each operand differs. If the reader has a function ``look`` and
        ``look(eqn, inputs)`` is not None, its value is the result.
        """
        name, params = name_and_params(eqn) if "_prim" in eqn.params else (eqn.primitive.name, eqn.params)
        if self._look is not None and (seen := self._look(eqn, inputs)) is not None:
            return seen
        if name in _AS_THEY_ARE:
            return inputs
        if name == "name":
            self._note_marked(params["name"], *inputs)
            return inputs
        if name in _EQUALS or name in _BY_HAND:
            return self._of_collective(eqn, inputs)
        if name in _READ_THROUGH:
            with suppress(*_OTHER_PARAMS):
                return _READ_THROUGH[name](self, params, inputs)
        of_all = (all_named_axes([eqn]) if params else Axes()).union(*inputs)
        if name in OPAQUE:
            of_all |= {axis + _HAND for axis in _named(of_all)}
        return [of_all] * len(eqn.outvars)

    def _of_collective(self, eqn: Any, inputs: list[Axes]) -> list[Axes]:
        over = named_axes(eqn)
        by_hand = Axes(axis + _HAND for axis in over)
        # With axis_index_groups, a sum is equal only within each group.
        if eqn.primitive.name in _EQUALS and eqn.params.get("axis_index_groups") is None:
            return [axes.difference(over, by_hand) for axes in inputs]
        return [by_hand.union(over, *inputs)] * len(eqn.outvars)

    def _of_call(self, params: dict[str, Any], inputs: list[Axes]) -> list[Axes]:
        return self._of_inner(params["jaxpr" if "jaxpr" in params else "call_jaxpr"], inputs)

    def _of_scan(self, params: dict[str, Any], inputs: list[Axes]) -> list[Axes]:
        num_consts, num_carry = scan_counts(params)
        after = num_consts + num_carry
        consts, carry, rest = inputs[:num_consts], inputs[num_consts:after], inputs[after:]
        # Sets of axes only grow from round to round, so the loop terminates.
        while True:
            results = self._of_inner(params["jaxpr"], [*consts, *carry, *rest])
            before, carry = carry, _joined(carry, results[: len(carry)])
            if carry == before:
                return [*carry, *results[len(carry) :]]

    def _of_while(self, params: dict[str, Any], inputs: list[Axes]) -> list[Axes]:
        """Returns, for each result of a ``while_loop``, the mesh axes along which the result differs between devices.

        ``params`` are those of the equation. ``inputs`` has the axes of each operand: constants of the predicate,
        constants of the body, first carry. The body is read again until the axes of the carry no longer grow.
        """
        of_cond, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = inputs[of_body:]
        # Devices that stop after different numbers of rounds end with different carries.
        while True:
            (ends,) = self._of_inner(params["cond_jaxpr"], [*inputs[:of_cond], *carry])
            results = self._of_inner(params["body_jaxpr"], [*inputs[of_cond:of_body], *carry])
            before, carry = carry, _joined(carry, results, [ends] * len(carry))
            if carry == before:
                self._note_choice(ends, params["cond_jaxpr"], params["body_jaxpr"])
                return carry

    def _of_cond(self, params: dict[str, Any], inputs: list[Axes]) -> list[Axes]:
        chosen_by, *operands = inputs
        self._note_choice(chosen_by, *params["branches"])
        # If devices choose different branches, every result differs, whatever the branches compute.
        branches = [self._of_inner(branch, operands) for branch in params["branches"]]
        return _joined(*branches, [chosen_by] * len(branches[0]))

    def _of_shard_map(self, params: dict[str, Any], inputs: list[Axes]) -> list[Axes]:
        entering = [axes | _axes_of(spec) for axes, spec in zip(inputs, params["in_specs"], strict=True)]
        leaving = self._of_inner(params["jaxpr"], entering)
        # Outside, the shards along the axes of the spec form one array.
        return [
            axes.difference(over, (axis + _HAND for axis in over))
            for axes, over in zip(leaving, map(_axes_of, params["out_specs"]), strict=True)
        ]

    def _note_marked(self, name: str, axes: Axes) -> None:
        """Adds ``axes`` to the axes of a value in ``of_marked``, if ``with_name_for_reader`` has named the value.

        ``name`` is the name in an equation "name" of the jaxpr; other names are ignored.
        """
        if name.startswith(_MARK):
            path = name.removeprefix(_MARK)
            self.of_marked[path] = self.of_marked.get(path, Axes()) | axes

    def _note_choice(self, by: Axes, *jaxprs: Any) -> None:
        """Adds to ``parted`` and ``waiting`` the axes in ``by`` over which a collective in ``jaxprs`` communicates.

        ``jaxprs`` are the branches of a ``cond``, or predicate and body of a loop. ``by`` are the axes along which the
        predicate differs: devices along these axes may choose different branches, or stop at different rounds.
        """
        eqns = [eqn for jaxpr in jaxprs for eqn in jaxpr.eqns] if by else []
        self.parted |= by & all_named_axes(eqns)
        collective = [eqn for eqn in all_equations(eqns) if eqn.primitive.name in COLLECTIVES]
        self.waiting |= _without_hand(by) & Axes().union(*map(named_axes, collective))


# Methods of the reader for equations that contain jaxprs, by the name of the primitive.
_READ_THROUGH: dict[str, Callable[[_Reader, dict[str, Any], list[Axes]], list[Axes]]] = {
    **dict.fromkeys(_CALLS, _Reader._of_call),
    "scan": _Reader._of_scan,
    "while": _Reader._of_while,
    "cond": _Reader._of_cond,
    "shard_map": _Reader._of_shard_map,
}


def _references(eqn: Any) -> list[Any]:
    """Returns the operands of an equation that are mutable arrays (``jax.new_ref``), as variables of the jaxpr."""
    return [var for var in eqn.invars if hasattr(var.aval, "inner_aval")]


def _axes_of(spec: PartitionSpec) -> Axes:
    """Returns the axes that a ``PartitionSpec`` names."""
    return Axes().union(*map(entry_axes, spec))


def _joined(*of_values: list[Axes]) -> list[Axes]:
    return [Axes().union(*axes) for axes in zip(*of_values, strict=True)]


def all_named_axes(eqns: Iterable[Any]) -> Axes:
    """Returns the mesh axes that equations and their nested equations name, except in casts (``pvary``, ``pcast``)."""
    return Axes().union(*[named_axes(eqn) for eqn in all_equations(eqns) if eqn.primitive.name not in _CASTS])


# ------------------------------------------------------------------------------------------------- of a loss function


def check_branches(
    paths: Sequence[str], loss_fn: Callable[..., Any], args: tuple[Any, ...], axes: tuple[str, ...]
) -> None:
    """Raises if a leaf is gathered in a branch (``lax.cond``) or loop that only some devices may take.

    Some devices would wait for the gather, or gather other weights.

    Args:
      paths: the leaves gathered in a branch, one or more; the first is named in the error.
      loss_fn, args: the loss function, which is traced, and its arguments, as for ``differing_args``.
      axes: the axes of the batch.
    Raises:
      ValueError: the predicate of a branch differs along an axis of a gather in the branch.
    """
    _, parted = _read(lambda *args: jax.tree.leaves(loss_fn(*args)), args, differing_args(args, axes))
    if over := tuple(axis for axis in collectives.manual_axes() if axis in parted):
        raise ValueError(
            f"'{paths[0]}' is gathered in a branch (lax.cond, nn.cond, switch or while_loop) that devices along {over} "
            "may take differently, and a gather needs all devices. Make the predicate equal on all devices, by "
            f"pmax(flag, {over}) of jax.lax, or wrap the module around the branch."
        )


def differing_args(args: tuple[PyTree, ...], axes: tuple[str, ...]) -> list[Axes]:
    """Returns the mesh axes along which each leaf of ``args`` differs between devices, in the order of the leaves.

    ``args`` are (params, minibatch, rng), and possibly collections. Parameters and collections differ along the axes of
    their boxes. Arrays of the minibatch and keys differ along each of ``axes``, the axes of the batch, that has several
    devices. Scalars of the minibatch differ along no axis.
    """
    params, minibatch, rng, *collections = args
    spread = Axes(collectives.spread_axes(axes))
    of_params, of_collections = (
        [Axes(leaf.axes) for _, leaf in trees.sharded_leaves(tree)] for tree in (params, collections)
    )
    of_minibatch = [spread if np.ndim(leaf) else Axes() for leaf in jax.tree.leaves(minibatch)]
    return [*of_params, *of_minibatch, *[spread] * len(jax.tree.leaves(rng)), *of_collections]
