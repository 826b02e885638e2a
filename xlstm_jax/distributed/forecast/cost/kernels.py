"""The time of what a GPU's schedule runs: each kernel at the roofline of its chip.

    kernel                              max(FLOP / peak rate of its dtype, bytes of HBM / bandwidth)
    loop                                that of its body, as often as it runs; of a conditional the longest branch
    collective                          nothing: it runs beside, or is waited for

Kernels of Pallas and custom calls that nobody knows (``products``) count with their bytes alone.
By the rates that are published (``Chip``) this is the least time; by those that are reached (``Chip.reached``) the one
that is expected. TPUs need none of this, as their compiler estimates cycles.
"""

from dataclasses import dataclass, field

from xlstm_jax.distributed.forecast.cost.cycles import moved_by
from xlstm_jax.distributed.forecast.cost.products import operand_shapes, product_flops
from xlstm_jax.distributed.forecast.hlo.instruction import COLLECTIVES, Instruction
from xlstm_jax.distributed.forecast.hlo.program import Computation, Program
from xlstm_jax.distributed.forecast.hlo.text import jax_name_of
from xlstm_jax.distributed.hardware.chips import Chip, peak_rate


@dataclass(frozen=True)
class Seconds:
    """The time of something that runs: in all, and of it the kernels that hold a matrix product."""

    total: float = 0.0
    products: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.total + other.total, self.products + other.products)

    def __sub__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.total - other.total, self.products - other.products)

    def times(self, count: int) -> "Seconds":
        return Seconds(self.total * count, self.products * count)


@dataclass(frozen=True)
class Kernels:
    """The kernels of a program on a chip."""

    program: Program
    chip: Chip
    _known: dict[str, Seconds] = field(default_factory=dict, repr=False)

    def seconds_of(self, computation: Computation, instruction: Instruction) -> Seconds:
        """The least time of one execution, with all that it calls."""
        opcode = instruction.opcode
        if opcode == "while":
            trips = self.program.trips_of(computation, instruction)
            return sum((self._all_of(name) for name in _called(instruction)), Seconds()).times(trips)
        if opcode == "conditional":
            return max((self._all_of(name) for name in _called(instruction)), key=lambda branch: branch.total)
        if opcode in ("call", "call-start", "async-start"):
            return sum((self._all_of(name) for name in _called(instruction)), Seconds())
        if not instruction.is_work or opcode in COLLECTIVES:
            return Seconds()
        return self._kernel(computation, instruction)

    def _all_of(self, name: str) -> Seconds:
        """The time of a computation that is scheduled."""
        if name not in self._known:
            computation = self.program.computations[name]
            times = (self.seconds_of(computation, instruction) for instruction in computation.instructions)
            self._known[name] = sum(times, Seconds())
        return self._known[name]

    def _kernel(self, computation: Computation, instruction: Instruction) -> Seconds:
        """The roofline of a kernel: its matrix products at their peak rates, its bytes at HBM's bandwidth."""
        products = sum(
            flops / peak_rate(self.chip, jax_name_of(operand_shapes(within, inner)[0].dtype))
            for within, inner in self.program.with_fused(computation, instruction)
            if (flops := product_flops(within, inner))
        )
        memory = sum(moved_by(self.program, computation, instruction)) / self.chip.hbm_bandwidth
        seconds = max(products, memory)
        return Seconds(seconds, seconds if products else 0.0)


def _called(instruction: Instruction) -> list[str]:
    return [name for names in instruction.called.values() for name in names]
