"""What travels between the memory of the host and the device in a step, and how long the schedule waits for it.

A link has two ways, each of which carries one transfer after the other at the published rate. What is started
asynchronously travels beside what the schedule has until it is done, as far as the compiler estimates cycles for that
(TPUs); a GPU's kernel that reads the host's memory by itself waits for every byte.
"""

from collections import defaultdict
from dataclasses import dataclass

from xlstm_jax.distributed.forecast.cost.cycles import moved_by, scheduled
from xlstm_jax.distributed.forecast.hlo.instruction import HOST, Instruction
from xlstm_jax.distributed.forecast.hlo.program import Computation, Program
from xlstm_jax.distributed.hardware.chips import Chip

IN, OUT = range(2)  # the ways of the link


@dataclass(frozen=True)
class HostTraffic:
    """What one device of a step has on its host.

    Attributes:
      stored_bytes: of its arguments, those that lie there.
      to_device_bytes, to_host_bytes: what travels in a step.
      seconds: what that takes, one way after the other.
      waited_s: how long the schedule waits for it.
    """

    stored_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    seconds: float
    waited_s: float

    @property
    def moved_bytes(self) -> int:
        """What travels in a step, there and back."""
        return self.to_device_bytes + self.to_host_bytes

    @property
    def hidden_fraction(self) -> float:
        """How much of ``seconds`` nothing waits for, as the two ways or the device are busy meanwhile: 0 to 1."""
        return max(0.0, 1 - self.waited_s / self.seconds) if self.seconds else 0.0


def host_traffic(program: Program, chip: Chip) -> HostTraffic | None:
    """What travels to the host and back; None where nothing lies there."""
    arguments = program.entry.parameters.values()
    stored = sum(shape.nbytes for argument in arguments for shape in argument.shapes if shape.space == HOST)
    moved, waited = [0, 0], 0.0
    schedules: dict[str, tuple[Computation, int]] = {c.name: (c, trips) for c, trips, _ in scheduled(program)}
    for computation, trips in schedules.values():
        own, wait = _of_schedule(program, computation, chip)
        moved = [all_ + trips * part for all_, part in zip(moved, own, strict=True)]
        waited += trips * wait
    if not (stored or any(moved)):
        return None
    return HostTraffic(stored, moved[IN], moved[OUT], sum(moved) / chip.host_bandwidth, waited)


def visitors(program: Program) -> frozenset[str]:
    """What in the device's memory comes from the host or leaves for it, by the names of live ranges: "fusion.3{1}"."""
    found: set[str] = set()
    for computation, _, instruction in scheduled(program):
        moved = moved_by(program, computation, instruction, HOST)
        if moved[IN]:
            found |= {f"{instruction.name}{{0}}", f"{instruction.name}{{}}"}
        if moved[OUT]:
            found |= {_range_name(computation.by_name[name]) for name in instruction.operands}
    return frozenset(found)


def _range_name(value: Instruction) -> str:
    """An array by what has made it; an element of a tuple by the maker of the tuple."""
    if value.opcode == "get-tuple-element":
        return f"{value.operands[0]}{{{value.tuple_index}}}"
    return f"{value.name}{{}}"


def _of_schedule(program: Program, computation: Computation, chip: Chip) -> tuple[list[int], float]:
    """What one run of a computation moves, (in, out), and how long it waits."""
    now, waited, moved = 0.0, 0.0, [0, 0]
    free, ends = [0.0, 0.0], defaultdict[str, float](float)  # when each way is free; when each transfer ends
    for instruction in computation.instructions:
        own = moved_by(program, computation, instruction, HOST)
        for way in (IN, OUT):
            if own[way]:
                moved[way] += own[way]
                free[way] = max(now, free[way]) + own[way] / chip.host_bandwidth
                ends[instruction.name] = max(ends[instruction.name], free[way])
        started = instruction.opcode.endswith("-start")
        awaited = instruction.operands[:1] if instruction.opcode.endswith("-done") else (instruction.name,)
        wait = 0.0 if started else max((ends[name] - now for name in awaited if name in ends), default=0.0)
        waited += max(0.0, wait)
        now += max(0.0, wait) + (instruction.estimated_cycles or 0) / (chip.clock_hz or 1.0)
    return moved, waited
