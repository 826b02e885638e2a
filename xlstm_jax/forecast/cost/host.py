"""Traffic between host memory and device in a step, and the schedule's wait for the transfers.

The host link has two directions. In each direction transfers run sequentially at the published rate. An asynchronous
transfer overlaps the instructions between start and end, for the time estimated by the compiler in cycles (TPUs). A
GPU kernel with operands in host memory waits for every byte.
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
WAYS = "to the device", "to the host"  # directions of the link


@dataclass(frozen=True)
class HostTraffic:
    """Bytes stored in host memory and transferred in a step, per device.

    Attributes:
      stored_bytes: bytes of the step's arguments in host memory.
      to_device_bytes, to_host_bytes: bytes transferred in a step.
      seconds: time of the transfers in sequence.
      waited_s: wait of the schedule for the transfers.
    """

    stored_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    seconds: float
    waited_s: float

    @property
    def moved_bytes(self) -> int:
        """Bytes transferred in a step, both directions."""
        return self.to_device_bytes + self.to_host_bytes

    @property
    def hidden_fraction(self) -> float:
        """Fraction of ``seconds``, 0 to 1, hidden by compute or by transfers in the opposite direction.

        0 without transfers.
        """
        return max(0.0, 1 - self.waited_s / self.seconds) if self.seconds else 0.0


def host_traffic(program: Program, chip: Chip) -> HostTraffic | None:
    """Returns a step's transfers between host memory and device: bytes, seconds at the host link's rate, wait.

    None if the program has no argument in host memory and transfers nothing. ``chip`` gives the rate of the host link,
    and the clock for the time of the instructions that overlap a transfer.
    """
    arguments = program.entry.parameters.values()
    # The memory space of an argument shows whether it is in host memory.
    stored = sum(shape.nbytes for argument in arguments for shape in argument.shapes if shape.space == HOST)
    moved, waited_s = [0, 0], 0.0
    for computation, trips in program.schedules():
        # GPU compilers estimate no cycles: the instructions then take no time and hide no transfer.
        run = [(i.estimated_cycles or 0) / (chip.clock_hz or 1.0) for i in computation.instructions]
        transfers = list(_transfers(program, computation, chip))
        waited_s += trips * sum(waits(run, [transfer for *_, transfer in transfers]))
        for way, nbytes, _ in transfers:
            moved[way] += trips * nbytes
    if not (stored or any(moved)):
        return None
    return HostTraffic(stored, moved[IN], moved[OUT], sum(moved) / chip.host_bandwidth, waited_s)


def _transfers(program: Program, computation: Computation, chip: Chip) -> Iterator[tuple[int, int, Transfer]]:
    """Yields (direction, bytes, transfer) for each host transfer in a single run of a computation, in scheduled order.

    The direction is ``IN`` (host memory to device) or ``OUT``. The ``Transfer`` has start and end (indices of
    ``computation.instructions``), the link of the direction, and the seconds at the host link's rate of ``chip``. An
    instruction that transfers both ways is yielded twice.
    """
    for position, instruction in enumerate(computation.instructions):
        for way, nbytes in enumerate(moved_by(program, computation, instruction, HOST)):
            if nbytes:
                # A `-start` overlaps the instructions up to its `-done`; any other transfer ends where it starts.
                end = end_of(computation, instruction) if instruction.opcode.endswith("-start") else position
                yield way, nbytes, Transfer(position, end, (WAYS[way],), nbytes / chip.host_bandwidth)


def host_buffers(program: Program) -> frozenset[str]:
    """Returns the names of the values in device memory that are received from the host, or sent to the host.

    The names are as in XLA's text of live ranges: instruction and element of the result, "fusion.3{1}". A received
    value is listed as "name{0}" and as "name{}", because the form depends on the instruction.
    """
    names: set[str] = set()
    for computation, _, instruction in scheduled(program):
        moved = moved_by(program, computation, instruction, HOST)
        if moved[IN]:
            # A copy-start results in (copy, original, context), any other instruction in the copy alone.
            names |= {f"{instruction.name}{{0}}", f"{instruction.name}{{}}"}
        for value in map(computation.by_name.__getitem__, instruction.operands if moved[OUT] else ()):
            # Live ranges name an element of a tuple after the producer of the tuple.
            is_element = value.opcode == "get-tuple-element"
            names.add(f"{value.operands[0]}{{{value.tuple_index}}}" if is_element else f"{value.name}{{}}")
    return frozenset(names)
