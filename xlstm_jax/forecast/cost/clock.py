"""Simulated clock of a schedule: the time of each instruction, and the schedule's wait for each transfer.

    an instruction        advances the clock by the instruction's time
    start of a transfer   occupies the transfer's links as soon as they are free: first come, first served
    end of a transfer     the clock waits for the rest; a synchronous transfer starts and ends at the same position

On TPUs the compiler estimates the cycles of each instruction. On GPUs each kernel takes the chip's roofline:

    kernel                max(FLOP / peak rate of its dtype, bytes of HBM / bandwidth)
    loop                  time of the body x trips; a conditional takes the time of the longest branch
    collective            zero: kernels overlap the collective, or the schedule waits

Pallas kernels and unknown custom calls (``products``) count only their bytes. With published rates (``Chip``) the
result is the least time, with reached rates (``Chip.reached``) the expected time.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar

from xlstm_jax.forecast.cost.cycles import CONTROL, moved_by
from xlstm_jax.forecast.cost.products import operand_shapes, product_flops
from xlstm_jax.forecast.hardware.chips import Chip, peak_rate
from xlstm_jax.forecast.hlo.instruction import COLLECTIVES, Instruction
from xlstm_jax.forecast.hlo.program import Computation, Program
from xlstm_jax.forecast.hlo.text import jax_name_of


@dataclass(frozen=True)
class Transfer:
    """Bytes sent over links while a schedule runs; a link carries a single transfer at a time.

    Attributes:
      start, end: positions in the schedule, equal if the schedule waits for the transfer.
      links: names of the links in use.
      seconds: time of the transfer without competition for the links.
    """

    start: int
    end: int
    links: tuple[str, ...]
    seconds: float


def waits(run: Sequence[float], transfers: Sequence[Transfer]) -> list[float]:
    """Simulates a schedule, and returns for each transfer the seconds that the schedule waits at the transfer's end.

    The result has the order of ``transfers``.

    >>> waits([1.0, 1.0, 0.0], [Transfer(0, 2, ("out",), 3.0), Transfer(1, 1, ("in",), 0.5)])
    [0.5, 0.5]

    Args:
      run: seconds of each instruction, in scheduled order.
      transfers: transfers over links, each from the instruction at index ``start`` of ``run`` to the instruction at
        index ``end``, which waits for the transfer. A link carries one transfer at a time: a transfer begins when each
        of its links is free.
    """
    starts, ends = defaultdict(list), defaultdict(list)
    for number, transfer in enumerate(transfers):
        starts[transfer.start].append(number)
        ends[transfer.end].append(number)
    # The clock; when each link is free again; when each transfer ends; how long the schedule waited for each.
    now, free, done, waited = 0.0, defaultdict[str, float](float), {}, [0.0] * len(transfers)
    for position, seconds in enumerate(run):
        # Starts before ends: a synchronous transfer has both at one position.
        for number in starts[position]:
            transfer = transfers[number]
            done[number] = max([now, *(free[link] for link in transfer.links)]) + transfer.seconds
            free.update(dict.fromkeys(transfer.links, done[number]))
        for number in ends[position]:
            waited[number] = max(0.0, done[number] - now)
            now += waited[number]
        now += seconds
    return waited


# ------------------------------------------------------------------------------------- how long each instruction runs


@dataclass(frozen=True)
class Duration:
    """A time in seconds or cycles: the total, and ``products``, the part in kernels with a matrix product."""

    total: float = 0.0
    products: float = 0.0

    def __add__(self, other: "Duration") -> "Duration":
        return Duration(self.total + other.total, self.products + other.products)

    def __mul__(self, times: float) -> "Duration":
        return Duration(self.total * times, self.products * times)


@dataclass(frozen=True)
class Durations(ABC):
    """Times of a program's instructions, including called computations.

    A loop takes the time of the body x trips. A conditional takes the time of the longest branch. ``_duration`` returns
    the time of an instruction without calls.
    """

    program: Program
    _known: dict[str, Duration] = field(default_factory=dict, repr=False, kw_only=True)

    # Opcodes of instructions whose time is that of the computations they call.
    CALLING_OPCODES: ClassVar[Set[str]] = CONTROL

    @property
    def total(self) -> float:
        """Time of a step in seconds or cycles, if instructions run one after the other; loops multiplied out."""
        return self._of_computation(self.program.entry.name).total

    def duration_of(self, computation: Computation, instruction: Instruction) -> Duration:
        """Returns the time of a single execution of ``instruction``: the total, and the part in matrix products.

        The unit is that of the subclass: cycles for ``Cycles``, seconds for ``Kernels``. A loop takes the time of body
        and condition x trips, a conditional the time of the longest branch, a call (for ``Kernels`` also an
        asynchronous start) the time of the called computation. ``computation`` contains the instruction: names are
        unique only within a computation.
        """
        if instruction.opcode not in self.CALLING_OPCODES:
            return self._duration(computation, instruction)
        callee_times = [self._of_computation(name) for name in instruction.called_names]
        if instruction.opcode == "conditional":
            return max(callee_times, key=lambda branch: branch.total)
        # The condition of a loop runs with each trip, as the body does; a call has a single trip.
        return sum(callee_times, Duration()) * self.program.trips_of(computation, instruction)

    def _of_computation(self, name: str) -> Duration:
        # Layers share computations, so the sum of each computation is cached.
        if name not in self._known:
            computation = self.program.computations[name]
            each = (self.duration_of(computation, instruction) for instruction in computation.instructions)
            self._known[name] = sum(each, Duration())
        return self._known[name]

    @abstractmethod
    def _duration(self, computation: Computation, instruction: Instruction) -> Duration: ...


class Cycles(Durations):
    """Cycles estimated by the compiler (TPUs); collectives and Pallas kernels have no estimate and count as 0.

    The program must be parsed from a text written after code generation: ``compiled.as_text()``, or the file
    ``*after_codegen.txt`` of ``xla_dump_to``. Earlier texts have no estimates.
    """

    def _duration(self, computation: Computation, instruction: Instruction) -> Duration:
        return Duration(instruction.estimated_cycles or 0)


@dataclass(frozen=True)
class Kernels(Durations):
    """Seconds of the kernels of a program on a GPU."""

    chip: Chip

    # On a GPU an asynchronously started computation takes kernel time of the GPU. On a TPU it runs in parallel with the
    # schedule and takes none of the schedule's time.
    CALLING_OPCODES = CONTROL | {"call-start", "async-start"}

    def _duration(self, computation: Computation, instruction: Instruction) -> Duration:
        if not instruction.is_work or instruction.opcode in COLLECTIVES:
            return Duration()
        # A fusion is one kernel, even with several products: the products run one after the other, in parallel with the
        # kernel's memory traffic.
        products = sum(
            flops / peak_rate(self.chip, jax_name_of(operand_shapes(within, inner)[0].dtype))
            for within, inner in self.program.with_fused(computation, instruction)
            if (flops := product_flops(within, inner))
        )
        memory = sum(moved_by(self.program, computation, instruction)) / self.chip.hbm_bandwidth
        seconds = max(products, memory)
        return Duration(seconds, seconds if products else 0.0)
