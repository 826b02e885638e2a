"""Zero-fills of TPU programs: arrays of zeros that the compiler makes to execute a gather as an all-reduce.

    zeros = broadcast(constant(0))                  the unsharded array, in HBM or VMEM: the fill
    own   = dynamic-update-slice(zeros, shard)      the device's shard in its place
    all-reduce(own)                                 the sum over the devices is the gathered array

libtpu estimates such a fill at about a tenth of HBM's rate (0.28 TB/s on v5p, 0.17 on v6e), though a fill does
nothing but write. The rule, for every program alike:

    A fill of an array of an all-reduce that stands for a gather takes its bytes / the bandwidth of HBM, where the
    compiler's estimate is longer. (VMEM is faster than HBM, so the rule does not flatter a fill of VMEM.)

``Range.expected`` has the corrected time, ``Range.most`` the compiler's. A fill that the compiler has merged with the
update into one fusion counts as well: the fusion writes the same bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from xlstm_jax.forecast.hlo.collective_sites import Site, sites
from xlstm_jax.forecast.hlo.instruction import Instruction
from xlstm_jax.forecast.hlo.program import Computation, Program

_SAME_ARRAY = {"bitcast", "copy", "copy-start", "copy-done"}
_UPDATE = "dynamic-update-slice"


@dataclass(frozen=True)
class Fills:
    """Zero-fills of a step, on a single device.

    Attributes:
      count: executions.
      cycles: the compiler's estimate, summed.
      written: bytes of zeros.

    >>> fills = Fills(count=2, cycles=2_000_000, written=4_000_000)
    >>> fills.excess_s(clock_hz=1e9, bandwidth=1e10)  # 2 ms by the compiler's cycles, 0.4 ms by HBM's bandwidth
    0.0016
    """

    count: int
    cycles: int
    written: int

    def excess_s(self, clock_hz: float, bandwidth: float) -> float:
        """Returns the seconds by which the compiler's estimate exceeds the time of the bytes; never negative."""
        return excess_s(self.cycles / clock_hz, self.written, bandwidth)


def excess_s(seconds: float, written: float, bandwidth: float) -> float:
    """Returns the seconds by which an estimate exceeds bytes / bandwidth; never negative."""
    return max(0.0, seconds - written / bandwidth)


def find_fills(program: Program) -> Fills:
    """Returns the sum of a step's zero-fills; a loop's fills count once for each trip."""
    found = [(trips, fill) for trips, fill in _fills(program) if fill.estimated_cycles]
    return Fills(
        count=sum(trips for trips, _ in found),
        cycles=sum(trips * (fill.estimated_cycles or 0) for trips, fill in found),
        written=sum(trips * sum(shape.nbytes for shape in fill.shapes) for trips, fill in found),
    )


def _fills(program: Program) -> Iterator[tuple[int, Instruction]]:
    """Yields (trips, fill) for each array of an all-reduce that is zero except for the device's shard."""
    seen: set[tuple[str, str]] = set()
    for site in sites(program):
        if site.kind != "all-reduce":
            continue
        for name in _sent(program, site):
            fill = _fill_behind(program, site.computation, name)
            # Two collectives may read an array, which is filled once.
            if fill is not None and (site.computation.name, fill.name) not in seen:
                seen.add((site.computation.name, fill.name))
                yield site.trips, fill


def _sent(program: Program, site: Site) -> tuple[str, ...]:
    """Returns the names of the arrays in the schedule that a collective sends."""
    if site.scheduled.operands:
        return site.scheduled.operands
    # A TPU's SparseCore is started without operands; the update between start and done has the arrays.
    users = (user for user, _ in site.computation.users.get(site.scheduled.name, ()))
    return tuple(name for user in users if user.opcode.endswith("-update") for name in user.operands[1:])


def _fill_behind(program: Program, computation: Computation, name: str) -> Instruction | None:
    """Returns the instruction that filled an array with zeros before the device's shard was written into it."""
    at = computation.by_name[name]
    while at.opcode in _SAME_ARRAY:
        at = computation.by_name[at.operands[0]]
    if at.opcode == _UPDATE:
        return _zeros(computation, computation.by_name[at.operands[0]])
    if at.opcode != "fusion":
        return None
    # The update is the fusion's result: in place of an operand, or of zeros that the fusion makes.
    callee = program.computations[at.callees_by_role["calls"][0]]
    update = callee.root
    while update.opcode == "bitcast":
        update = callee.by_name[update.operands[0]]
    if update.opcode != _UPDATE:
        return None
    base = callee.by_name[update.operands[0]]
    while base.opcode == "bitcast":
        base = callee.by_name[base.operands[0]]
    if base.opcode == "parameter":
        return _zeros(computation, computation.by_name[at.operands[base.tuple_index]])
    return at if _zeros(callee, base) is not None else None


def _zeros(computation: Computation, at: Instruction) -> Instruction | None:
    """Returns the broadcast of 0 behind an array; None for other arrays."""
    while at.opcode in _SAME_ARRAY:
        at = computation.by_name[at.operands[0]]
    if at.opcode != "broadcast":
        return None
    value = computation.by_name[at.operands[0]]
    is_zero = value.opcode == "constant" and value.operand_text.strip() in ("0", "-0", "0.0", "-0.0")
    return at if is_zero else None
