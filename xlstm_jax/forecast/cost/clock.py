"""The clock of a schedule: how long each instruction runs, and how long the schedule waits for what travels beside it.

    an instruction        the clock goes on by the time that it runs
    start of a transfer   the transfer takes its links as soon as they are free: who starts first is served first
    end of a transfer     the clock waits for what is left; of a synchronous transfer the end comes with the start

TPUs' compiler estimates the cycles of an instruction. On GPUs each kernel takes the roofline of its chip:

    kernel                max(FLOP / peak rate of its dtype, bytes of HBM / bandwidth)
    loop                  that of its body, as often as it runs; of a conditional the longest branch
    collective            nothing: it runs beside, or is waited for

Kernels of Pallas and custom calls that nobody knows (``products``) count with their bytes alone. By the rates that are
published (``Chip``) this is the least time; by those that are reached (``Chip.reached``) the one that is expected.
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
    """Bytes that travel over links while a schedule runs; a link carries one transfer at a time.

    Attributes:
      start, end: positions in the schedule, the same where the schedule waits for it.
      links: names of what it travels over.
      seconds: that it takes, alone.
    """

    start: int
    end: int
    links: tuple[str, ...]
    seconds: float


def waits(run: Sequence[float], transfers: Sequence[Transfer]) -> list[float]:
    """How long a schedule waits for each transfer, in seconds; ``run`` is how long each instruction runs.

    >>> waits([1.0, 1.0, 0.0], [Transfer(0, 2, ("out",), 3.0), Transfer(1, 1, ("in",), 0.5)])
    [0.5, 0.5]
    """
    starts, ends = defaultdict(list), defaultdict(list)
    for number, transfer in enumerate(transfers):
        starts[transfer.start].append(number)
        ends[transfer.end].append(number)
    # The clock; when each link is free again; when each transfer ends; how long each was waited for.
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
class Spent:
    """A time, in seconds or cycles: in all, and the part in kernels that hold a matrix product."""

    total: float = 0.0
    products: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.total + other.total, self.products + other.products)

    def __mul__(self, times: float) -> "Spent":
        return Spent(self.total * times, self.products * times)


@dataclass(frozen=True)
class Durations(ABC):
    """What the instructions of a program take, with all that they call; ``_alone`` says it of one that calls nothing.

    A loop takes its body's time as often as it runs, a conditional that of its longest branch.
    """

    program: Program
    _known: dict[str, Spent] = field(default_factory=dict, repr=False, kw_only=True)

    called_in_line: ClassVar[Set[str]] = CONTROL

    @property
    def total(self) -> float:
        """All instructions of a step, one after the other."""
        return self._of_computation(self.program.entry.name).total

    def of(self, computation: Computation, instruction: Instruction) -> Spent:
        """One execution of an instruction."""
        if instruction.opcode not in self.called_in_line:
            return self._alone(computation, instruction)
        called = [self._of_computation(name) for name in instruction.all_called]
        if instruction.opcode == "conditional":
            return max(called, key=lambda branch: branch.total)
        # The condition of a loop runs with each trip, as the body does.
        return sum(called, Spent()) * self.program.trips_of(computation, instruction)

    def _of_computation(self, name: str) -> Spent:
        # Layers share computations, so each is added up once, however often it is called.
        if name not in self._known:
            computation = self.program.computations[name]
            each = (self.of(computation, instruction) for instruction in computation.instructions)
            self._known[name] = sum(each, Spent())
        return self._known[name]

    @abstractmethod
    def _alone(self, computation: Computation, instruction: Instruction) -> Spent: ...


class Cycles(Durations):
    """The compiler's estimates (TPUs); collectives and kernels of Pallas have none and count as 0.

    The program must be parsed from ``compiled.as_text()``: files that ``xla_dump_to`` writes before code generation
    have no estimates yet.
    """

    def _alone(self, computation: Computation, instruction: Instruction) -> Spent:
        return Spent(instruction.estimated_cycles or 0)


@dataclass(frozen=True)
class Kernels(Durations):
    """The seconds of the kernels of a program on a GPU."""

    chip: Chip

    # A GPU's own streams run what these start; a TPU's start runs beside the schedule and takes none of its time.
    called_in_line = CONTROL | {"call-start", "async-start"}

    def _alone(self, computation: Computation, instruction: Instruction) -> Spent:
        if not instruction.is_work or instruction.opcode in COLLECTIVES:
            return Spent()
        # A fusion is one kernel, also where it holds several products: they run one after the other, while its memory
        # moves.
        products = sum(
            flops / peak_rate(self.chip, jax_name_of(operand_shapes(within, inner)[0].dtype))
            for within, inner in self.program.with_fused(computation, instruction)
            if (flops := product_flops(within, inner))
        )
        memory = sum(moved_by(self.program, computation, instruction)) / self.chip.hbm_bandwidth
        seconds = max(products, memory)
        return Spent(seconds, seconds if products else 0.0)
