"""An optimizer's update whose moments come from the host and go back, a few at a time.

Given moments on the host, XLA would bring in all of them before the first update, and a step would take as much of the
device's memory as without offload. So the update is traced once, as it is, and its equations are put in an order:

  0          what depends on no moment of the host: norms, counts, schedules
  1 ... K    groups of moments of one or several parameters, and in each phase all that its moments were missing for

The fetch of a group waits for the group before it (``optimization_barrier``): while group k is updated, k + 1 travels
in and k - 1 out, so that the device holds two groups, and the new values of one. (XLA's schedule for TPUs begins many
transfers of 1 MiB at once all the same: see docs/offload.md.) Whatever the transform is, the equations are the
same, and so is every value. A transform that couples moments of several parameters (Muon's rounds, a norm of the
updates) runs its coupled part in the phase of the last of these parameters.

A leaf larger than a group, such as layers that ``nn.scan`` has stacked, is updated in a loop over its leading dim, if
no axis splits that dim and the update is arithmetic on single elements; else the leaf comes in whole.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.remat import ARITHMETIC
from xlstm_jax.distributed.optimizers.offload import is_on_host

ELEMENTWISE = frozenset(f"{ARITHMETIC} convert_element_type copy sharding_constraint".split())
SPREAD = "broadcast_in_dim"  # a scalar to an array, as jnp.where does it
FUNCTIONS = ("jit", "pjit")
UPDATE_SCOPE = "update"
BY_CALLER = -1  # the user of a result

Number = int  # of a value in a program
Operand = Any  # a number, or a literal

GROUP_BYTES = 2**24  # of a device's memory: a transfer takes 1 ms, and schedules keep several on their way

_Carry = tuple[dict[int, Any], dict[Number, Any]]  # of a loop over rows: moments by place, what else it computes


class Op(NamedTuple):
    """An equation between values that have numbers."""

    eqn: core.JaxprEqn
    operands: tuple[Operand, ...]
    results: tuple[Number, ...]

    @property
    def numbers(self) -> list[Number]:
        return [x for x in self.operands if isinstance(x, Number)]

    @property
    def result(self) -> Any:
        """The type of its first result; None where it has none."""
        return self.eqn.outvars[0].aval if self.results else None

    def is_elementwise(self, shape: tuple[int, ...] | None = None) -> bool:
        """Whether its result is an array, of this shape, each element made of those in its place and of scalars."""
        own = tuple(self.result.shape) if self.results else ()
        if not own or (shape is not None and own != shape):
            return False
        name, shapes = self.eqn.primitive.name, {getattr(x.aval, "shape", None) for x in self.eqn.invars} - {()}
        return (name in ELEMENTWISE and shapes <= {own}) or (name == SPREAD and not shapes)

    def run(self, values: Mapping[Number, Any], rows: int | None = None) -> dict[Number, Any]:
        """The results by their numbers; of an elementwise one also where ``values`` are so many rows of each."""
        operands = [values[x] if isinstance(x, Number) else x.val for x in self.operands]
        primitive, scope = self.eqn.primitive, str(self.eqn.source_info.name_stack)
        with self.eqn.ctx.manager, jax.named_scope(scope or UPDATE_SCOPE):
            if rows and primitive.name == SPREAD:
                results = jax.lax.broadcast(operands[0], (rows, *self.result.shape[1:]))
            else:
                results = primitive.bind(*operands, **primitive.get_bind_params(self.eqn.params))
        return dict(zip(self.results, results if primitive.multiple_results else [results], strict=True))


@dataclass
class TracedUpdate:
    """A function as a list of operations.

    Attributes:
      count: what gives values their numbers.
      given: what it is computed from beside its arguments, by number.
      inputs, outputs: the arguments and the results.
    """

    count: Iterator[Number] = field(default_factory=itertools.count)
    ops: list[Op] = field(default_factory=list)
    given: dict[Number, Any] = field(default_factory=dict)
    inputs: list[Number] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)

    @classmethod
    def of(cls, closed: Any) -> "TracedUpdate":
        """Of what ``jax.make_jaxpr`` returns."""
        program = cls()
        program.inputs = [next(program.count) for _ in closed.jaxpr.invars]
        program.outputs = program._add(closed, program.inputs)
        return program

    def _add(self, closed: Any, operands: Sequence[Operand]) -> list[Operand]:
        """Adds the equations of a jaxpr, those of functions in it one by one; returns its results."""
        numbers: dict[Any, Operand] = dict(zip(closed.jaxpr.invars, operands, strict=True))
        for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            numbers[var] = next(self.count)
            self.given[numbers[var]] = const
        for eqn in closed.jaxpr.eqns:
            own = [_read(numbers, x) for x in eqn.invars]
            if eqn.primitive.name in FUNCTIONS:
                results = self._add(eqn.params["jaxpr"], own)
            else:
                results = [next(self.count) for _ in eqn.outvars]
                self.ops.append(Op(eqn, tuple(own), tuple(results)))
            numbers.update(zip(eqn.outvars, results, strict=True))
        return [_read(numbers, x) for x in closed.jaxpr.outvars]

    def phases(self, arrival: Mapping[Number, int]) -> tuple[dict[Number, int], dict[int, list[Op]]]:
        """When each value is there, and what is computed in each phase, where inputs arrive one after the other.

        An operation runs once its last input has arrived. It runs later if it is arithmetic on an array that only one
        later phase needs, such as a clipped gradient: until then no memory holds the result.
        """
        phase, by_op = dict.fromkeys(self.given, 0) | dict(arrival), [0] * len(self.ops)
        for i, op in enumerate(self.ops):
            by_op[i] = max((phase[x] for x in op.numbers), default=0)
            phase |= dict.fromkeys(op.results, by_op[i])
        users: dict[Number, set[int]] = defaultdict(set)
        for x in self.outputs:
            if isinstance(x, Number):
                users[x].add(BY_CALLER)
        for i, op in reversed(list(enumerate(self.ops))):
            needed = set[int]().union(*(users[x] for x in op.results))
            if op.is_elementwise() and len(needed) == 1 and BY_CALLER not in needed:
                (by_op[i],) = needed
                phase |= dict.fromkeys(op.results, by_op[i])
            for x in op.numbers:
                users[x].add(by_op[i])
        ops: dict[int, list[Op]] = defaultdict(list)
        for k, op in zip(by_op, self.ops, strict=True):
            ops[k].append(op)
        return phase, ops


def _read(numbers: Mapping[Any, Operand], x: Any) -> Operand:
    return x if isinstance(x, core.Literal) else numbers[x]


# ------------------------------------------------------------------------------------------------- the update in groups


def streamed(
    update: Callable[[PyTree], tuple[PyTree, PyTree]], opt_state: PyTree, shardings: PyTree, owners: Sequence[str]
) -> tuple[PyTree, PyTree]:
    """``update(opt_state)``, whose leaves on the host come to the device and go back in groups.

    Args:
      update: takes a state on the device and returns the next one, of the same structure, and anything else.
      opt_state: a state of which some leaves lie on the host; without any it is updated as it is.
      shardings: of all its leaves.
      owners: for each leaf the name of the parameter that it belongs to; leaves of one owner come together.
    Returns:
      What ``update`` returns; leaves that were on the host are there again.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(opt_state)
    described = zip(leaves, jax.tree.leaves(shardings), owners, strict=True)
    moments = [_Moment(i, *facts) for i, facts in enumerate(described) if is_on_host(facts[0])]
    if not moments:
        return update(opt_state)
    structure: list[Any] = []

    def on_device(*fetched: jax.Array) -> list[jax.Array]:
        there = dict(zip((moment.place for moment in moments), fetched, strict=True))
        updated = update(treedef.unflatten([there.get(i, leaf) for i, leaf in enumerate(leaves)]))
        flat, out_tree = jax.tree.flatten(updated)
        structure.append(out_tree)
        return flat

    abstract = [jax.ShapeDtypeStruct(moment.value.shape, moment.value.dtype) for moment in moments]
    program = TracedUpdate.of(jax.make_jaxpr(on_device)(*abstract))
    return jax.tree.unflatten(structure[0], _Streaming(program, moments).outputs())


class _Moment(NamedTuple):
    """A leaf on the host: its place in the state, the array, its sharding, and the parameter that it belongs to."""

    place: int
    value: Any
    sharding: NamedSharding
    owner: str

    @property
    def bytes(self) -> int:
        """Of one device's shard."""
        return math.prod(self.sharding.shard_shape(self.value.shape)) * self.value.dtype.itemsize


def _grouped(moments: Sequence[_Moment]) -> list[list[_Moment]]:
    """Moments of one owner together, and of several owners up to ``GROUP_BYTES``."""
    by_owner: dict[str, list[_Moment]] = {}
    for moment in moments:
        by_owner.setdefault(moment.owner, []).append(moment)
    groups: list[list[_Moment]] = []
    for members in by_owner.values():
        if groups and sum(moment.bytes for moment in groups[-1] + members) <= GROUP_BYTES:
            groups[-1] += members
        else:
            groups.append(list(members))
    return groups


def _rows_at_once(group: Sequence[_Moment]) -> int:
    """How many entries of the leading dim come at once; 0 where the group comes whole."""
    (shape, *others), size = {moment.value.shape for moment in group}, sum(moment.bytes for moment in group)
    specs = [moment.sharding.spec for moment in group]
    if others or size <= GROUP_BYTES or not shape or shape[0] == 1 or any(spec and spec[0] for spec in specs):
        return 0
    layers = shape[0]
    return max((n for n in range(1, layers) if layers % n == 0 and n * size <= layers * GROUP_BYTES), default=1)


def _upstream(x: Number, makers: Mapping[Number, Op]) -> list[Number]:
    """What a value is computed from, the nearest first."""
    queue = [x]
    for y in queue:  # goes on to what it appends
        queue += [z for z in (makers[y].numbers if y in makers else ()) if z not in queue]
    return queue


class _Streaming:
    """A program that is being run: the values so far, and which moments were written back last."""

    def __init__(self, program: TracedUpdate, moments: Sequence[_Moment]):
        self.program, self.groups = program, _grouped(moments)
        self.number = dict(zip((moment.place for moment in moments), program.inputs, strict=True))
        arrival = {self.number[moment.place]: k for k, group in enumerate(self.groups, 1) for moment in group}
        self.phase, self.ops = program.phases(arrival)
        self.values: dict[Number, Any] = dict(program.given)
        self.stored: dict[int, Any] = {}
        self.before: list[int] = []  # what the phase before this one has stored

    def outputs(self) -> list[Any]:
        """Runs it; returns what the update returns, moments on the host."""
        self._run(self.ops[0])
        self._store(0)
        for k, group in enumerate(self.groups, 1):
            rows = _rows_at_once(group)
            if rows and self._is_by_element(k, group):
                self._run_in_rows(k, group, rows)
            else:
                self._run_whole(k, group)
        outputs = enumerate(self.program.outputs)
        return [self.stored[i] if i in self.number else self._value(x) for i, x in outputs]

    def _value(self, x: Operand) -> Any:
        return self.values[x] if isinstance(x, Number) else x.val

    def _run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self.values |= op.run(self.values)

    def _phase_of(self, x: Operand) -> int:
        return self.phase[x] if isinstance(x, Number) else 0

    def _store(self, k: int) -> None:
        """Sends the moments to the host that phase ``k`` has computed."""
        places = [i for i in self.number if self._phase_of(self.program.outputs[i]) == k]
        self.stored |= {i: jax.device_put(self._value(self.program.outputs[i]), jax.memory.Space.Host) for i in places}
        self.before = places

    def _after_those_before(self, arrays: list[Any]) -> list[Any]:
        """The arrays, which are used once the moments of the phase before are on the host."""
        arrays, stored = jax.lax.optimization_barrier((arrays, [self.stored[i] for i in self.before]))
        self.stored |= dict(zip(self.before, stored, strict=True))
        return arrays

    def _run_whole(self, k: int, group: Sequence[_Moment]) -> None:
        fetched = self._after_those_before([jax.device_put(moment.value, jax.memory.Space.Device) for moment in group])
        self.values |= dict(zip((self.number[moment.place] for moment in group), fetched, strict=True))
        self._run(self.ops[k])
        self._store(k)

    # --------------------------------------------------------------------------------------- a large leaf, row by row

    def _is_by_element(self, k: int, group: Sequence[_Moment]) -> bool:
        """Whether a phase computes each element from those in its place, and all moments of its group."""
        shape = group[0].value.shape
        stored = {i for i in self.number if self._phase_of(self.program.outputs[i]) == k}
        computed = {x for op in self.ops[k] for x in op.results}
        return (
            all(op.is_elementwise(shape) for op in self.ops[k])
            and stored == {moment.place for moment in group}
            and all(self.program.outputs[i] in computed for i in stored)
        )

    def _escaping(self, k: int) -> list[Number]:
        """What a phase computes that other phases use, or the caller."""
        used = {x for j, ops in self.ops.items() if j != k for op in ops for x in op.numbers}
        used |= {x for i, x in enumerate(self.program.outputs) if i not in self.number and isinstance(x, Number)}
        return [x for op in self.ops[k] for x in op.results if x in used]

    def _buffers(self, k: int, shape: tuple[int, ...]) -> dict[Number, Number | None]:
        """For each value that leaves a phase, an operand of the same shape and dtype that it may overwrite; or None.

        The next value of a parameter overwrites the parameter, whose buffer was donated to the step.
        """
        makers = {x: op for op in self.ops[k] for x in op.results}
        buffers: dict[Number, Number | None] = {}
        for x in self._escaping(k):
            form = (shape, makers[x].result.dtype)
            near = [y for y in _upstream(x, makers) if y in self.values]
            fitting = [y for y in near if (self.values[y].shape, self.values[y].dtype) == form]
            buffers[x] = next((y for y in fitting if y not in buffers.values()), None)
        return buffers

    def _run_in_rows(self, k: int, group: Sequence[_Moment], rows: int) -> None:
        shape, ops = group[0].value.shape, self.ops[k]
        buffers = self._buffers(k, shape)
        kept = {y: x for x, y in buffers.items() if y is not None}
        moments = {moment.place: self.number[moment.place] for moment in group}
        operands = {x for op in ops for x in op.numbers if x in self.values}
        dtypes = {x: op.result.dtype for op in ops for x in op.results}

        def body(i: jax.Array, carry: _Carry) -> _Carry:
            cut = partial(jax.lax.dynamic_slice_in_dim, start_index=i * rows, slice_size=rows)
            put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * rows, axis=0)
            host, device = carry
            local = {x: device[kept[x]] if x in kept else self.values[x] for x in operands}
            local = {x: cut(value) if value.shape == shape else value for x, value in local.items()}
            local |= {x: jax.device_put(cut(host[j]), jax.memory.Space.Device) for j, x in moments.items()}
            for op in ops:
                local |= op.run(local, rows)
            new = {j: jax.device_put(local[self.program.outputs[j]], jax.memory.Space.Host) for j in host}
            return {j: put(host[j], new[j]) for j in host}, {x: put(device[x], local[x]) for x in device}

        host = dict(zip(moments, self._after_those_before([moment.value for moment in group]), strict=True))
        device = {x: jnp.zeros(shape, dtypes[x]) if y is None else self.values[y] for x, y in buffers.items()}
        host, device = jax.lax.fori_loop(0, shape[0] // rows, body, (host, device))
        self.stored |= host
        self.values |= device
        self.before = list(host)
