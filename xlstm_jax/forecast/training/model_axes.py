"""Meshes with axes for split layers, sequences and experts, and estimates of a step's cost before compilation.

    model_meshes(topology, {"tp": 8, "cp": 4})   every mesh with 1, 2, 4, 8 devices along "tp", and 1, 2, 4 along "cp"
    estimate(call, links)                        bytes and seconds, from the jaxpr: a trace takes seconds, XLA a minute

An axis takes a full dim of the torus if a dim of its size exists, else a part of a dim. On GPUs the dim within a host
comes first, in the order of the limits, because "tp" sends in each layer. FSDP gets the rest of the dims.

The estimate counts arguments, matrix products, and the bytes of collectives inside of ``shard_map`` exactly, loops
multiplied out. Other memory is a guess (``cost.live_values``). The estimate assumes no overlap and ignores what the
compiler adds or saves: it ranks meshes, so that few must be compiled.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from xlstm_jax.equations import COLLECTIVES, named_axes, nbytes, nested_jaxprs
from xlstm_jax.forecast.compiling.compile import StepCall
from xlstm_jax.forecast.cost.collective_traffic import RAGGED, ring_bytes
from xlstm_jax.forecast.cost.flops import count_flops
from xlstm_jax.forecast.cost.live_values import live_bytes
from xlstm_jax.forecast.hardware.chips import peak_rate
from xlstm_jax.forecast.hardware.links import Links
from xlstm_jax.forecast.hardware.topologies import Topology
from xlstm_jax.formatting import format_bytes, format_mesh
from xlstm_jax.program_names import HOST_AXIS


def model_meshes(topology: Topology, limits: Mapping[str, int]) -> list[dict[str, int]]:
    """Returns every mesh on a topology with 1, 2, 4, ... devices along each axis of ``limits``, up to its limit.

    >>> from xlstm_jax.forecast import parse_topology
    >>> for mesh in model_meshes(parse_topology("h100:2x8"), {"tp": 8, "cp": 2}):
    ...     print(mesh)
    {'fsdp_host': 2, 'fsdp_device': 8, 'cp': 1, 'tp': 1}
    {'fsdp_host': 2, 'fsdp_device': 4, 'cp': 2, 'tp': 1}
    {'fsdp_host': 2, 'fsdp_device': 4, 'cp': 1, 'tp': 2}
    {'fsdp_host': 2, 'fsdp_device': 2, 'cp': 2, 'tp': 2}
    {'fsdp_host': 2, 'fsdp_device': 2, 'cp': 1, 'tp': 4}
    {'fsdp_host': 2, 'cp': 2, 'tp': 4}
    {'fsdp_host': 2, 'cp': 1, 'tp': 8}
    {'cp': 2, 'fsdp_device': 1, 'tp': 8}

    The size of the last axis in ``limits`` varies fastest. Sizes for which ``mesh_on`` finds no mesh are left out.

    Args:
      topology: the devices.
      limits: maximum number of devices along each axis, the largest traffic first: ``{"tp": 8, "cp": 16}``. "dp" uses
        the outermost dim, and splits only the batch.
    Raises:
      ValueError: a limit is not positive, or an axis has the name of an FSDP axis.
    """
    for axis, limit in limits.items():
        if axis.startswith("fsdp") or not isinstance(limit, int) or limit < 1:
            raise ValueError(
                f"model_axes={dict(limits)}: {axis!r} must not begin with 'fsdp' (FSDP gets the rest), and its "
                "limit must be a positive number of devices, as {'tp': 8}."
            )
    choices = [[2**i for i in range(limit.bit_length())] for limit in limits.values()]
    sizes = (dict(zip(limits, some, strict=True)) for some in itertools.product(*choices))
    laid = (mesh_on(topology, some) for some in sizes)
    return [mesh for mesh in laid if mesh is not None]


def mesh_on(topology: Topology, sizes: Mapping[str, int]) -> dict[str, int] | None:
    """Returns a mesh of the axes of ``sizes``, and of FSDP axes for the rest: {axis: size}, outermost axis first.

    An axis is laid within a dim of the torus or of (hosts, GPUs per host), in the order of ``sizes``: on a torus
    preferably over a full dim, else in the innermost dim with room, "dp" in the outermost. None if an axis fits into no
    dim. FSDP axes are: "fsdp" if the topology has one dim; else "fsdp_x", ... on a torus, "fsdp_host" and "fsdp_device"
    on GPUs.
    """
    gpus = topology.platform == "cuda"
    # The devices of a chip form the last dim, which is no ring.
    rings = (*topology.wraps, False)[: len(topology.dims)]
    named = "xyz"[: len(topology.shape)] + "c"
    dims = [
        (size, ring, letter) for size, ring, letter in zip(topology.dims, rings, named, strict=False) if size > 1
    ] or [(1, False, "x")]
    shape = [size for size, *_ in dims]
    left = list(shape)
    within: list[list[tuple[str, int]]] = [[] for _ in shape]
    for axis, size in sizes.items():
        # Inner dims first, which have faster links (NVLink on GPUs). "dp" sends least, and takes the outermost dim.
        order = range(len(shape)) if axis == "dp" else range(len(shape) - 1, -1, -1)
        fitting = [dim for dim in order if left[dim] % size == 0]
        # An axis over a full dim of a torus can use the links that close the ring.
        full_dims = [dim for dim in fitting if not gpus and left[dim] == size == shape[dim]]
        if not fitting:
            return None
        dim = (full_dims or fitting)[0]
        left[dim] //= size
        within[dim].insert(0, (axis, size))
    on_torus = [f"fsdp_{'core' if letter == 'c' else 'xyz'[dim]}" for dim, (*_, letter) in enumerate(dims)]
    names = ([HOST_AXIS, "fsdp_device"] if gpus else on_torus)[-len(shape) :]
    rest = [dim for dim in range(len(shape)) if left[dim] > 1] or [len(shape) - 1]
    mesh: dict[str, int] = {}
    for dim in range(len(shape)):
        parts = dict(within[dim])
        if "dp" in parts and not dims[dim][1]:
            # Without a closed ring, "dp" goes outside of the rest of its dim, which sends more. On a closed ring the
            # rest stays outside, so that it spans the full ring.
            mesh["dp"] = parts.pop("dp")
        if dim in rest:
            mesh["fsdp" if len(shape) == 1 else names[dim]] = left[dim]
        mesh |= parts
    return mesh


@dataclass(frozen=True)
class Estimate:
    """Rough cost of a step per device, from the jaxpr.

    Attributes:
      argument_bytes: parameters, optimizer state, batch.
      live_bytes: gradients, and the most bytes of intermediate values alive at a time.
      compute_s: time of matrix products, at the rate that the chip reaches.
      wire_s: time of collectives inside of ``shard_map`` by axes, each alone on its links.
    """

    argument_bytes: int
    live_bytes: int
    compute_s: float
    wire_s: Mapping[tuple[str, ...], float]

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.live_bytes

    @property
    def seconds(self) -> float:
        """Seconds of a step without overlap: the products, then the collectives of all axes."""
        return self.compute_s + sum(self.wire_s.values())

    def __str__(self) -> str:
        sent = ", ".join(f"{'+'.join(axes)} {seconds * 1e3:,.0f} ms" for axes, seconds in self.wire_s.items())
        return (
            f"{format_bytes(self.argument_bytes)} of arguments and {format_bytes(self.live_bytes)} computed; products "
            f"{self.compute_s * 1e3:,.0f} ms, links: {sent or 'nothing'}"
        )


def estimate(call: StepCall, links: Links) -> Estimate:
    """Estimates bytes and seconds of a step per device, from its jaxpr and the shardings of its arguments.

    Nothing is compiled. Arguments without a ``NamedSharding`` count as replicated. ``call`` is the step with its
    arguments; ``links`` are the links between the devices of the mesh.
    """
    jaxpr, devices = call.traced.jaxpr, math.prod(links.axis_sizes.values())
    reached = links.chip.reached
    flops = count_flops(jaxpr, devices).by_dtype()
    live, wire = 0, defaultdict[tuple[str, ...], float](float)
    for eqn, times in _equations(jaxpr):
        if eqn.primitive.name == "shard_map":
            # Gradients, the results, are alive when the optimizer begins.
            (of_device,) = nested_jaxprs(eqn)
            live = max(live, live_bytes(of_device) + sum(nbytes(v.aval) for v in of_device.outvars))
        elif eqn.primitive.name in COLLECTIVES:
            axes, sent = _sent(eqn, links.axis_sizes)
            if axes:
                wire[axes] += times * links.seconds(axes, sent)
    argument_bytes = 0
    for leaf in jax.tree.leaves(call.args):
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if isinstance(sharding, NamedSharding) else np.shape(leaf)
        argument_bytes += math.prod(shape) * leaf.dtype.itemsize
    return Estimate(
        argument_bytes=argument_bytes,
        live_bytes=live,
        compute_s=sum(count / peak_rate(reached, dtype) for dtype, count in flops.items()),
        wire_s=dict(sorted(wire.items(), key=lambda item: -item[1])),
    )


def _equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields (equation, runs in a step) for the equations of a jaxpr and of nested jaxprs.

    An equation comes before the equations nested in it. ``times`` is the number of runs of ``jaxpr``. A ``scan``
    multiplies by its length; a loop of unknown length counts once.
    """
    # `equations.all_equations` visits a shared jaxpr once: this walk counts each call.
    for eqn in jaxpr.eqns:
        yield eqn, times
        runs = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for part in nested_jaxprs(eqn):
            yield from _equations(part, runs)


def _sent(eqn: Any, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], float]:
    """Returns (mesh axes of more than one device, bytes that each device sends) for the equation of a collective.

    The bytes are for one execution of the ring algorithm. ``sizes`` has the size of each mesh axis.
    """
    kind = COLLECTIVES[eqn.primitive.name]
    axes = tuple(axis for axis in named_axes(eqn) if sizes.get(axis, 1) > 1)
    # The payload of a gather is its result. In a ragged exchange the smaller of operand and result has no padding: the
    # operand on the way to the experts, the result on the way back.
    sizes_of = [nbytes(v.aval) for v in (eqn.outvars if kind == "all-gather" else eqn.invars)]
    payload = min(sizes_of[:2]) if kind == RAGGED else sum(sizes_of)
    return axes, ring_bytes(kind, payload, math.prod(sizes[axis] for axis in axes))


def links_of_mesh(topology: Topology, mesh: Mapping[str, int]) -> Links:
    """Returns the links between the devices of a mesh that is laid on a topology in order.

    Device i of the flattened mesh is device i of the flattened dims of the topology. ``mesh`` has the sizes by axis,
    outermost first.
    """
    shape = (*(*topology.shape, 1, 1)[:3], topology.chip.devices_per_chip)
    coords = np.stack(np.unravel_index(np.arange(math.prod(mesh.values())), shape)[:3], axis=1).tolist()
    return Links(topology.chip, dict(mesh), topology, coords if topology.chip.torus_axes else ())


@dataclass(frozen=True)
class Considered:
    """A mesh of the search: its estimate (None without a step), whether the search compiles it, and the reason."""

    mesh: Mapping[str, int]
    estimate: Estimate | None
    compiled: bool
    reason: str

    def __str__(self) -> str:
        return f"{format_mesh(self.mesh)}: {self.reason}"


def ranked(estimates: Sequence[tuple[dict[str, int], Estimate | str]], budget: float, count: int) -> list[Considered]:
    """Returns a ``Considered`` for each mesh, the most promising first; the first ``count`` are marked as compiled.

    Meshes that fit into ``budget`` by their estimate come first, the fastest first; then meshes that do not fit, the
    smallest first; then meshes without a step, which are never compiled.

    Args:
      estimates: (mesh, estimate), or (mesh, reason why no step could be built).
      budget: bytes of memory of a device.
      count: number of meshes to compile.
    """

    def key(pair: tuple[dict[str, int], Estimate | str]) -> tuple[float, ...]:
        _, known = pair
        if isinstance(known, str):
            return 2, 0.0
        return (0, known.seconds) if known.total_bytes <= budget else (1, known.total_bytes)

    # A mesh without a step is never compiled, even if fewer than `count` meshes remain.
    ordered, considered = sorted(estimates, key=key), []
    for place, (mesh, known) in enumerate(ordered):
        compiled = place < count and not isinstance(known, str)
        if isinstance(known, str):
            considered.append(Considered(mesh, None, False, known))
            continue
        why = "compiled" if compiled else "not compiled, as others are faster by their estimates"
        if known.total_bytes > budget:
            why = f"{'compiled, though' if compiled else 'not compiled:'} it would not fit by its estimate"
        considered.append(Considered(mesh, known, compiled, f"{why}; {known}"))
    return considered
