"""Places at which a compiled program executes collectives.

Compilers write the same collective in several forms. Each form counts as one collective:
    all-reduce(x)                                           the schedule waits for the result
    all-gather-start(x) ... all-gather-done                 the instructions between overlap the collective
    call-start(x), to_apply=... ... call-done               start and done on a TPU's SparseCore; also async-start
    fusion async-collective-start ... fusion ... -done      a TPU sends pieces during each fusion in between
    fusion {dynamic-slice(all-reduce(x))}                   a TPU's reduce-scatter
    all-reduce(dynamic-update-slice(zeros, x))              a TPU's replacement of an all-gather: twice the bytes
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from xlstm_jax.forecast.hlo.dataflow import Value
from xlstm_jax.forecast.hlo.instruction import COLLECTIVES, Instruction
from xlstm_jax.forecast.hlo.program import Computation, Program

_ASYNC_FUSION = re.compile(r'custom_call_target="AsyncCollective(Start|Done)"')
_IS_SYNC = re.compile(r'"is_sync":\s*true')  # GPU compilers write even synchronous collectives as start and done
_CHAIN = re.compile(r'chain_id="(\d+)"')


@dataclass(frozen=True)
class Site:
    """Place in a schedule at which a collective is executed, once per trip.

    Attributes:
      trips: trips of ``computation``, the computation with the schedule.
      scheduled: instruction in the schedule at which the collective starts.
      kind: executed operation.
      inner, inner_computation: the collective instruction and the surrounding computation, either ``computation`` or a
        called computation.
      overlapped_instructions: instructions scheduled during the collective; None if the schedule waits.
    """

    computation: Computation
    trips: int
    scheduled: Instruction
    kind: str
    inner: Instruction
    inner_computation: Computation
    overlapped_instructions: tuple[Instruction, ...] | None

    @property
    def own_names(self) -> tuple[str, ...]:
        """JAX's names (``op_name``) of the operations behind the collective; () without names.

        The names come from the collective instruction (``inner``), or else from the fusion or call around the
        collective (``scheduled``). A TPU compiler drops the names when it replaces a collective by another.
        """
        return self.inner.op_names or self.scheduled.op_names

    @cached_property
    def arrays(self) -> tuple[Value, ...]:
        """Arrays that the collective sends, as a ``Value`` each: operands of ``inner``, in order, without tokens.

        For a ragged-all-to-all the buffer of received rows, offsets and sizes are operands and count, too.
        """
        return tuple(
            Value(self.inner_computation, name)
            for name in self.inner.operands
            if self.inner_computation.by_name[name].type_text != "token[]"
        )

    def result(self, position: int) -> Value:
        """Returns the array into which the collective turns ``arrays[position]``, as a ``Value`` of the program.

        A ``Value`` is the result of an instruction, or an element of a result that is a tuple. For a collective of
        several arrays the result is a tuple, and element ``position`` is returned; for a single array, the full result.
        """
        return Value(self.inner_computation, self.inner.name, (position,) if len(self.arrays) > 1 else ())

    @property
    def span(self) -> tuple[int, int]:
        """Indices (start, end) of the collective in the schedule, ``computation.instructions``.

        ``start`` is the index of the instruction that starts the collective. For a synchronous collective, for which
        the schedule waits, ``end`` equals ``start``. Otherwise ``end`` is start + 1 + the number of overlapped
        instructions. This is the index of the collective's end if the overlapped instructions follow the start without
        a gap.
        """
        start = self.computation.position[self.scheduled.name]
        return start, start if self.overlapped_instructions is None else start + 1 + len(self.overlapped_instructions)


def sites(program: Program) -> Iterator[Site]:
    """Yields a ``Site`` for each place in the program's schedules that executes a collective.

    Sites of a caller come before sites of the computations that the caller runs; within a computation, sites are in
    scheduled order. A collective in the body of a loop is yielded once; ``Site.trips`` has the runs in a step.
    """
    for computation, trips in program.schedules():
        for instruction in computation.instructions:
            yield from _sites_at(program, computation, trips, instruction)


def _sites_at(program: Program, computation: Computation, trips: int, at: Instruction) -> Iterator[Site]:
    """Yields a ``Site`` for each collective that the instruction ``at`` of ``computation`` starts or executes.

    The collective is ``at`` itself, or lies in the fusion or in the asynchronous call that ``at`` runs; any other
    instruction yields nothing. A collective spread over a chain of fusions (TPUs) is yielded once, at the first fusion
    of the chain; the further fusions of the chain yield nothing. An all-reduce in a fusion that slices the local shard
    from the result gets the kind "reduce-scatter". ``trips`` is the number of runs of ``computation`` in a step.
    """
    if at.opcode.removesuffix("-start") in COLLECTIVES:
        collectives = [(computation, at)]
    elif at.opcode in ("fusion", "async-start", "call-start"):
        collectives = list(_collectives_in(program, at))
    else:
        return
    during = None
    if collectives and at.opcode.endswith("-start") and not _IS_SYNC.search(at.attributes):
        during = computation.instructions[computation.position[at.name] + 1 : end_of(computation, at)]
    role = _role_in_chain(program, at) if collectives and at.opcode == "fusion" else None
    if role == "start":  # the chain counts once, at the start
        during, collectives = _during_chain(program, computation, at, _chain(collectives[0][1])), collectives[:1]
    elif role is not None:
        return
    for within, inner in collectives:
        kind = inner.opcode.removesuffix("-start")
        users = within.users.get(inner.name, ())
        # A TPU compiler writes a reduce-scatter as a fusion that slices the local shard from an all-reduce.
        is_sliced = users and all(user.opcode == "dynamic-slice" and position == 0 for user, position in users)
        if at.opcode == "fusion" and role is None and kind == "all-reduce" and is_sliced:
            kind = "reduce-scatter"
        yield Site(computation, trips, at, kind, inner, within, during)


def _collectives_in(program: Program, caller: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """Yields (computation, collective instruction) for each collective in the computations that ``caller`` calls.

    ``caller`` is an instruction, such as a fusion. The computation is the one that contains the collective. Fusions and
    calls nested in the called computations are searched, too. Order: as in the text of each computation.
    """
    for name in caller.called_names:
        for instruction in program.computations[name].instructions:
            if instruction.opcode.removesuffix("-start") in COLLECTIVES:
                yield program.computations[name], instruction
            elif instruction.opcode in ("fusion", "call"):
                yield from _collectives_in(program, instruction)


def _chain(inner: Instruction) -> str | None:
    match = _CHAIN.search(inner.attributes)
    return match[1] if match else None


def _role_in_chain(program: Program, fusion: Instruction) -> str | None:
    """Returns the role of a fusion in a collective that a TPU spreads over a chain of fusions, each sending a piece.

    "start" and "done": the fusion begins or ends the collective. "middle": the fusion sends a piece beside other work.
    None: the fusion belongs to no chain.
    """
    for name in fusion.callees_by_role.get("calls", ()):
        for instruction in program.computations[name].instructions:
            # Start and done contain a custom call; the fusions between contain only the chain's number.
            if match := _ASYNC_FUSION.search(instruction.attributes):
                return match[1].lower()
    return "middle" if any(_chain(inner) is not None for _, inner in _collectives_in(program, fusion)) else None


def end_of(computation: Computation, start: Instruction) -> int:
    """Returns the index in ``computation.instructions`` of the ``-done`` that ends an asynchronous operation.

    ``start`` is the operation's ``-start`` instruction, or an ``-update`` between start and done.
    """
    # Updates may lie between start and done; each update reads the previous one.
    users = (user for user, _ in computation.users[start.name])
    end = next(user for user in users if user.opcode.endswith(("-update", "-done")))
    return computation.position[end.name] if end.opcode.endswith("-done") else end_of(computation, end)


def _during_chain(
    program: Program, computation: Computation, start: Instruction, chain: str | None
) -> tuple[Instruction, ...]:
    """Returns the fusions in the middle of a collective that a TPU spreads over a chain of fusions, in scheduled order.

    Each of these fusions sends a piece of the collective beside its work. ``start`` is the chain's first fusion,
    ``chain`` the chain's id in the compiled text. The last fusion, which waits for the rest, is left out.
    """
    middle = []
    for instruction in itertools.islice(computation.instructions, computation.position[start.name] + 1, None):
        if instruction.opcode == "fusion" and chain in {_chain(i) for _, i in _collectives_in(program, instruction)}:
            # The fusion at the end of the chain waits for the rest and overlaps nothing.
            if _role_in_chain(program, instruction) != "middle":
                break
            middle.append(instruction)
    return tuple(middle)
