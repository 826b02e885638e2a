"""Whether traffic in blocks of 8 or 4 bits pays: the time of the bytes that it saves beside that of packing them.

  saved      what bfloat16 would send more, over the same links at their published rates
  packing    what is scheduled of ``pack`` and ``unpack``: the compiler's cycles (TPUs), or bytes at HBM's bandwidth

Both are times of the operations alone, with nothing beside them. A matrix product that unpacks its operand does not
count, as the part that unpacking takes of it is not known. A cast that the compiler fuses with the packing counts.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from xlstm_jax.distributed.data_parallel.wire.quantized import PACK_SCOPES, sent_itemsize
from xlstm_jax.distributed.forecast.cost.collective_traffic import Collective
from xlstm_jax.distributed.forecast.cost.cycles import scheduled
from xlstm_jax.distributed.forecast.cost.kernels import Kernels
from xlstm_jax.distributed.forecast.cost.schedule import axes_of
from xlstm_jax.distributed.forecast.hlo.collective_sites import Site, sites
from xlstm_jax.distributed.forecast.hlo.dataflow import Value, downstream, upstream
from xlstm_jax.distributed.forecast.hlo.program import Program
from xlstm_jax.distributed.hardware.links import Links

PACKED_DTYPE = "u8"  # as compilers write it
_SCOPE = re.compile("|".join(f"\\b{scope}\\b" for scope in PACK_SCOPES))


@dataclass(frozen=True)
class PackedOver:
    """What each device sends in packed form over some mesh axes in a step, and what that saves.

    Attributes:
      axes: of the mesh.
      sent_bytes, bfloat16_bytes: what is sent, and what would be in bfloat16.
      saved_s: what the difference takes over their links.
    """

    axes: tuple[str, ...]
    sent_bytes: float
    bfloat16_bytes: float
    saved_s: float


@dataclass(frozen=True)
class PackedTraffic:
    """All that a step sends packed, and how long packing and unpacking take.

    >>> slow = PackedOver(("dp",), sent_bytes=5e8, bfloat16_bytes=1e9, saved_s=0.01)
    >>> PackedTraffic((slow,), packing_s=0.002).pays
    True
    """

    over: tuple[PackedOver, ...]
    packing_s: float

    @property
    def saved_s(self) -> float:
        """The time of all bytes that are not sent."""
        return sum(part.saved_s for part in self.over)

    @property
    def pays(self) -> bool:
        """Whether more time is saved than packing takes."""
        return self.saved_s > self.packing_s


def packed_traffic(program: Program, collectives: Iterable[Collective], links: Links) -> PackedTraffic | None:
    """What is sent packed; None where nothing is."""
    wider = {site.scheduled.name: ratio for site in sites(program) if (ratio := _times_bfloat16(program, site))}
    sums: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for collective in collectives:
        if collective.dtype == PACKED_DTYPE and collective.name in wider:
            over_axes, sent = sums[axes_of(links, collective)], collective.wire_bytes_per_step
            over_axes[0] += sent
            over_axes[1] += sent * wider[collective.name]
    over = [PackedOver(axes, sent, wide, links.seconds(axes, wide - sent)) for axes, (sent, wide) in sums.items()]
    return PackedTraffic(tuple(over), _packing_seconds(program, links)) if over else None


def _times_bfloat16(program: Program, site: Site) -> float | None:
    """How many times its bytes bfloat16 would send of the arrays of a collective; None if one is not packed."""
    arrays = [Value(site.within, name) for name in site.inner.operands]
    sent = [sum(shape.nbytes for shape in array.instruction.shapes) for array in arrays]
    formats = [_format_of(program, site, i, array) for i, array in enumerate(arrays)]
    if not arrays or not all(formats):
        return None
    values = sum(count / sent_itemsize(name) for count, name in zip(sent, formats, strict=True) if name)
    return values * sent_itemsize("bfloat16") / sum(sent)


def _format_of(program: Program, site: Site, position: int, array: Value) -> str | None:
    """The format of a packed array, by the scope that packs it, or unpacks it if it is stored packed; else None."""
    if not any(shape.dtype == PACKED_DTYPE for shape in array.instruction.shapes):
        return None
    result = Value(site.within, site.inner.name, (position,) if len(site.inner.operands) > 1 else ())
    near = itertools.chain(upstream(program, array), downstream(program, result))
    names = itertools.chain([array.instruction.op_name], (other.instruction.op_name for other in near))
    return next((PACK_SCOPES[scope[0]] for name in names if (scope := _SCOPE.search(name))), None)


def _packing_seconds(program: Program, links: Links) -> float:
    kernels, seconds = Kernels(program, links.chip), 0.0
    for computation, trips, instruction in scheduled(program):
        if instruction.is_work and any(
            _SCOPE.search(inner.op_name) for _, inner in program.with_fused(computation, instruction)
        ):
            by_roofline = kernels.seconds_of(computation, instruction)
            cycles, clock_hz = instruction.estimated_cycles, links.chip.clock_hz
            alone = cycles / clock_hz if cycles is not None and clock_hz else by_roofline.total
            seconds += 0.0 if by_roofline.products else trips * alone
    return seconds
