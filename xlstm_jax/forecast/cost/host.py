"""What travels between the memory of the host and the device in a step, and how long the schedule waits for it.

A link has two ways, each of which carries one transfer after the other at the published rate. What is started
asynchronously travels while the schedule runs what stands before its end, for as long as the compiler estimates in
cycles (TPUs); a GPU's kernel that reads the host's memory by itself waits for every byte.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from xlstm_jax.forecast.cost.clock import Transfer, waits
from xlstm_jax.forecast.cost.cycles import moved_by, scheduled
from xlstm_jax.forecast.hardware.chips import Chip
from xlstm_jax.forecast.hlo.collective_sites import end_of
from xlstm_jax.forecast.hlo.instruction import HOST
from xlstm_jax.forecast.hlo.program import Computation, Program

IN, OUT = range(2)
WAYS = "to the device", "to the host"  # of the link


@dataclass(frozen=True)
class HostTraffic:
    """What a step stores in the memory of the host and transfers, for one device.

    Attributes:
      stored_bytes: the part of the step's arguments that lies in the memory of the host.
      to_device_bytes, to_host_bytes: what travels in a step.
      seconds: that the transfers take, one after the other.
      waited_s: how long the schedule waits for them.
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
        """The part of ``seconds`` that nothing waits for, as both ways carry at once or the device computes: 0 to 1."""
        return max(0.0, 1 - self.waited_s / self.seconds) if self.seconds else 0.0


def host_traffic(program: Program, chip: Chip) -> HostTraffic | None:
    """What travels to the host and back; None where nothing lies there."""
    arguments = program.entry.parameters.values()
    # A compiled program says by the memory space of an argument where it lies.
    stored = sum(shape.nbytes for argument in arguments for shape in argument.shapes if shape.space == HOST)
    moved, waited_s = [0, 0], 0.0
    for computation, trips in program.schedules():
        # Compilers for GPUs estimate no cycles: beside instructions that take no time every transfer is waited for.
        run = [(i.estimated_cycles or 0) / (chip.clock_hz or 1.0) for i in computation.instructions]
        transfers = list(_transfers(program, computation, chip))
        waited_s += trips * sum(waits(run, [transfer for *_, transfer in transfers]))
        for way, nbytes, _ in transfers:
            moved[way] += trips * nbytes
    if not (stored or any(moved)):
        return None
    return HostTraffic(stored, moved[IN], moved[OUT], sum(moved) / chip.host_bandwidth, waited_s)


def _transfers(program: Program, computation: Computation, chip: Chip) -> Iterator[tuple[int, int, Transfer]]:
    """What one run of a computation moves to the host and back: the way, the bytes, and when they travel."""
    for position, instruction in enumerate(computation.instructions):
        for way, nbytes in enumerate(moved_by(program, computation, instruction, HOST)):
            if nbytes:
                # What ends at a later `-done` travels beside all that stands between; any other transfer ends where it
                # begins.
                end = end_of(computation, instruction) if instruction.opcode.endswith("-start") else position
                yield way, nbytes, Transfer(position, end, (WAYS[way],), nbytes / chip.host_bandwidth)


def host_buffers(program: Program) -> frozenset[str]:
    """The buffers of the device that hold what comes from the host or leaves for it, by their names in live ranges.

    A name is that of the instruction and the element of its result: "fusion.3{1}".
    """
    names: set[str] = set()
    for computation, _, instruction in scheduled(program):
        moved = moved_by(program, computation, instruction, HOST)
        if moved[IN]:
            # What starts a copy results in (copy, original, context), any other in the copy alone.
            names |= {f"{instruction.name}{{0}}", f"{instruction.name}{{}}"}
        for value in map(computation.by_name.__getitem__, instruction.operands if moved[OUT] else ()):
            # An element of a tuple is known by what has made the tuple.
            is_element = value.opcode == "get-tuple-element"
            names.add(f"{value.operands[0]}{{{value.tuple_index}}}" if is_element else f"{value.name}{{}}")
    return frozenset(names)
