"""Zero-fills of TPU programs: arrays of zeros that the compiler makes to execute a gather as an all-reduce.

    zeros = broadcast(constant(0))                  the unsharded array, in HBM or VMEM: the fill
    local = dynamic-update-slice(zeros, shard)      the device's shard in its place
    all-reduce(local)                               the sum over the devices is the gathered array

libtpu estimates a fill at about a tenth of HBM's rate (0.28 TB/s on v5p, 0.17 on v6e), though a fill only writes. The
rule, for every program alike:

    A fill for an all-reduce in place of a gather takes its bytes / the bandwidth of HBM, if the compiler's estimate is
    longer. (VMEM is faster than HBM, so the rule does not underestimate a fill of VMEM.)

``Range.expected`` has the corrected time, ``Range.most`` the time of the compiler. The rule includes fills that the
compiler has fused with the update: the fusion writes the same bytes.
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
      count: number of executions.
      cycles: the compiler's estimate, summed over executions.
      written: bytes of zeros, summed over executions.

    >>> fills = Fills(count=2, cycles=2_000_000, written=4_000_000)
    >>> fills.excess_s(clock_hz=1e9, bandwidth=1e10)  # 2 ms by the compiler's cycles, 0.4 ms by HBM's bandwidth
    0.0016
    """

    count: int
    cycles: int
    written: int

    def excess_s(self, clock_hz: float, bandwidth: float) -> float:
        """Returns the seconds by which the compiler's estimate of the fills exceeds the time of their bytes; 0 or more.

        The estimate is ``cycles`` / ``clock_hz``, the time of the bytes ``written`` / ``bandwidth`` (bytes/s).
        """
        return excess_s(self.cycles / clock_hz, self.written, bandwidth)


def excess_s(seconds: float, written: float, bandwidth: float) -> float:
    """Returns the seconds by which an estimate, ``seconds``, exceeds the time of the written bytes; 0 or more.

    The time of the bytes is ``written`` / ``bandwidth`` (bytes/s).
    """
    return max(0.0, seconds - written / bandwidth)


def find_fills(program: Program) -> Fills:
    """Returns number, cycles and bytes of a step's zero-fills, summed over all executions on a device.

    A zero-fill makes an array of zeros, with which a TPU compiler executes a gather as an all-reduce. Fills within a
    loop count once per trip. Fills without an estimate of cycles are left out.
    """
    found = [(trips, fill) for trips, fill in _fills(program) if fill.estimated_cycles]
    return Fills(
        count=sum(trips for trips, _ in found),
        cycles=sum(trips * (fill.estimated_cycles or 0) for trips, fill in found),
        written=sum(trips * sum(shape.nbytes for shape in fill.shapes) for trips, fill in found),
    )


def _fills(program: Program) -> Iterator[tuple[int, Instruction]]:
    """Yields (trips, fill) for each instruction that fills an array with zeros to replace a gather by an all-reduce.

    The fill is a broadcast of 0, or the fusion around the broadcast; ``trips`` is the number of runs of the all-reduce
    in a step. Each fill is yielded once, even if two all-reduces read the array.
    """
    seen: set[tuple[str, str]] = set()
    for site in sites(program):
        if site.kind != "all-reduce":
            continue
        for name in _sent(program, site):
            fill = _fill_behind(program, site.computation, name)
            # Two collectives may read the same array, which is filled only once.
            if fill is not None and (site.computation.name, fill.name) not in seen:
                seen.add((site.computation.name, fill.name))
                yield site.trips, fill


def _sent(program: Program, site: Site) -> tuple[str, ...]:
    """Returns the names of the arrays that the collective at ``site`` sends, in order.

    A name is that of an instruction in ``site.computation``, the computation in whose schedule the collective runs.
    """
    if site.scheduled.operands:
        return site.scheduled.operands
    # A start on a TPU's SparseCore has no operands; the update between start and done has the arrays.
    users = (user for user, _ in site.computation.users.get(site.scheduled.name, ()))
    return tuple(name for user in users if user.opcode.endswith("-update") for name in user.operands[1:])


def _fill_behind(program: Program, computation: Computation, name: str) -> Instruction | None:
    """Returns the instruction that makes the zeros of an array that is zero except for the device's shard.

    ``name`` is the name of the array in ``computation``; copies are followed back. The result is a broadcast of 0, or
    the fusion that makes the zeros and inserts the shard at once. None for any other array.
    """
    at = computation.by_name[name]
    while at.opcode in _SAME_ARRAY:
        at = computation.by_name[at.operands[0]]
    if at.opcode == _UPDATE:
        return _zeros(computation, computation.by_name[at.operands[0]])
    if at.opcode != "fusion":
        return None
    # The fusion's result is the update of an operand, or of zeros made in the fusion.
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
    """Returns the broadcast of 0 that ``at`` is or copies; None if ``at`` makes any other array.

    ``at`` is an instruction of ``computation``; copies and bitcasts are followed back.
    """
    while at.opcode in _SAME_ARRAY:
        at = computation.by_name[at.operands[0]]
    if at.opcode != "broadcast":
        return None
    value = computation.by_name[at.operands[0]]
    is_zero = value.opcode == "constant" and value.operand_text.strip() in ("0", "-0", "0.0", "-0.0")
    return at if is_zero else None
