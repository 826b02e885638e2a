"""An optimizer's update whose moments come from the host and go back, a few at a time.

Given moments on the host, XLA would bring in all of them before the first update, and a step would take as much of the
device's memory as without offload. So the update is traced once, as it is, and its equations are put in an order:

  0          what depends on no moment of the host: norms, counts, schedules
  1 ... K    groups of moments of one or several parameters, each with the equations that waited for these moments

The fetch of a group waits for the group before it (``optimization_barrier``): while group k is updated, k + 1 travels
in and k - 1 out, so that the device holds two groups, and the new values of one. (XLA's schedule for TPUs begins many
transfers of 1 MiB at once all the same: see docs/offload.md.) Whatever the transform is, the equations are the
same, and so is every value. A transform that couples moments of several parameters (Muon's rounds, a norm of the
updates) runs its coupled part in the phase of the last of these parameters.

A leaf larger than a group, such as layers that ``nn.scan`` has stacked, is updated in a loop over its leading dim, if
no axis splits that dim and the update is arithmetic on single elements; else the leaf comes in whole.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.remat import ARITHMETIC
from xlstm_jax.distributed.optimizers.offload import is_on_host
from xlstm_jax.private_names import core

ELEMENTWISE = frozenset(f"{ARITHMETIC} convert_element_type copy sharding_constraint".split())
SPREAD = "broadcast_in_dim"  # a scalar to an array, as jnp.where does it
FUNCTIONS = ("jit", "pjit")
UPDATE_SCOPE = "update"
BY_CALLER = -1  # the user of a result

GROUP_BYTES = 2**24  # of a device's memory: a transfer takes 1 ms, and schedules keep several on their way

_Atom = core.Var | core.Literal
_Eqns = list[core.JaxprEqn]
_Values = dict[core.Var, jax.Array]
_Carry = tuple[dict[int, jax.Array], _Values]  # of a loop over rows: moments by place, what else it computes


def streamed(
    update: Callable[[PyTree], tuple[PyTree, PyTree]],
    opt_state: PyTree,
    shardings: Callable[[PyTree], PyTree],
    owners: Callable[[], Sequence[str]],
) -> tuple[PyTree, PyTree]:
    """``update(opt_state)``, whose leaves on the host come to the device and go back in groups.

    Args:
      update: takes a state on the device and returns the next one, of the same structure, and anything else.
      opt_state: a state of which some leaves lie on the host; without any it is updated as it is.
      shardings: returns those of all leaves of a state.
      owners: returns for each leaf the name of the parameter that it belongs to; leaves of one owner come together.
    Returns:
      What ``update`` returns; leaves that were on the host are there again.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(opt_state)
    if not any(map(is_on_host, leaves)):
        return update(opt_state)
    described = zip(leaves, jax.tree.leaves(shardings(opt_state)), owners(), strict=True)
    moments = [_Moment(i, *facts) for i, facts in enumerate(described) if is_on_host(facts[0])]
    structure: list[Any] = []

    def on_device(*fetched: jax.Array) -> list[jax.Array]:
        there = dict(zip((moment.place for moment in moments), fetched, strict=True))
        updated = update(treedef.unflatten([there.get(i, leaf) for i, leaf in enumerate(leaves)]))
        flat, out_tree = jax.tree.flatten(updated)
        structure.append(out_tree)
        return flat

    abstract = [jax.ShapeDtypeStruct(moment.value.shape, moment.value.dtype) for moment in moments]
    # Leaves that are on the device are constants of the jaxpr, there from phase 0 on. The second tracing opens the
    # calls of jitted functions, such as jnp.where, whose equations must be ordered one by one.
    traced = jax.make_jaxpr(on_device)(*abstract)
    flat = jax.make_jaxpr(partial(_evaluated, traced))(*abstract)
    return jax.tree.unflatten(structure[0], _Streaming(flat, moments).outputs())


class _Moment(NamedTuple):
    """A leaf on the host: its place in the state, the array, its sharding, and the parameter that it belongs to."""

    place: int
    value: Any
    sharding: NamedSharding
    owner: str

    @property
    def bytes(self) -> int:
        """Of one device's shard."""
        return math.prod(self.sharding.shard_shape(self.value.shape)) * self.value.dtype.itemsize


def _grouped(moments: Sequence[_Moment]) -> list[list[_Moment]]:
    """Moments of one owner together, and of several owners up to ``GROUP_BYTES``."""
    by_owner: dict[str, list[_Moment]] = {}
    for moment in moments:
        by_owner.setdefault(moment.owner, []).append(moment)
    groups: list[list[_Moment]] = []
    for members in by_owner.values():
        if groups and sum(moment.bytes for moment in groups[-1] + members) <= GROUP_BYTES:
            groups[-1] += members
        else:
            groups.append(list(members))
    return groups


def _rows_at_once(group: Sequence[_Moment]) -> int:
    """How many entries of the leading dim come at once; 0 where the group comes whole."""
    (shape, *others), size = {moment.value.shape for moment in group}, sum(moment.bytes for moment in group)
    specs = [moment.sharding.spec for moment in group]
    # A slice of a split leading dim would lie on a few devices, and moments of several shapes have no common rows.
    if others or size <= GROUP_BYTES or not shape or shape[0] == 1 or any(spec and spec[0] for spec in specs):
        return 0
    layers = shape[0]
    return max((n for n in range(1, layers) if layers % n == 0 and n * size <= layers * GROUP_BYTES), default=1)


# ------------------------------------------------------------------------------------------------------- equations


def _variables(atoms: Sequence[_Atom]) -> list[core.Var]:
    """Inputs or outputs that are no literals."""
    return [x for x in atoms if not isinstance(x, core.Literal)]


def _shape(x: _Atom) -> Any:
    return getattr(x.aval, "shape", None)


def _read(values: Mapping[core.Var, jax.Array], x: _Atom) -> Any:
    return x.val if isinstance(x, core.Literal) else values[x]


def _results(eqn: core.JaxprEqn, values: Mapping[core.Var, jax.Array], rows: int | None = None) -> _Values:
    """The results of an equation; with ``rows`` of an elementwise equation on that many rows of each array."""
    operands = [_read(values, x) for x in eqn.invars]
    primitive, scope = eqn.primitive, str(eqn.source_info.name_stack)
    # As it was traced: in its context (its mesh, say) and under its name in profiles.
    with eqn.ctx.manager, jax.named_scope(scope or UPDATE_SCOPE):
        if rows and primitive.name == SPREAD:
            # The equation's own parameters have the shape of the whole array.
            results = jax.lax.broadcast(operands[0], (rows, *_shape(eqn.outvars[0])[1:]))
        else:
            results = primitive.bind(*operands, **primitive.get_bind_params(eqn.params))
    return dict(zip(eqn.outvars, results if primitive.multiple_results else [results], strict=True))


def _evaluated(closed: Any, *arguments: jax.Array) -> list[Any]:
    """The results of a jaxpr. Traced, it has the equations of jitted functions one by one in place of their calls."""
    names = (*closed.jaxpr.constvars, *closed.jaxpr.invars)
    values: _Values = dict(zip(names, (*closed.consts, *arguments), strict=True))
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name in FUNCTIONS:
            results = _evaluated(eqn.params["jaxpr"], *(_read(values, x) for x in eqn.invars))
            values |= zip(eqn.outvars, results, strict=True)
        else:
            values |= _results(eqn, values)
    return [_read(values, x) for x in closed.jaxpr.outvars]


def _is_elementwise(eqn: core.JaxprEqn, shape: tuple[int, ...] | None = None) -> bool:
    """Whether an equation computes an array (of this shape) element by element, from such arrays and scalars."""
    own = _shape(eqn.outvars[0]) if eqn.outvars else ()
    if not own or (shape is not None and own != shape):
        return False
    name, shapes = eqn.primitive.name, {_shape(x) for x in eqn.invars} - {()}
    return (name in ELEMENTWISE and shapes <= {own}) or (name == SPREAD and not shapes)


def _phases(jaxpr: core.Jaxpr, arrival: Mapping[core.Var, int]) -> tuple[dict[core.Var, int], dict[int, _Eqns]]:
    """The phase in which each value is there, and the equations of each phase, from the phase in which inputs arrive.

    An equation runs once its last input has arrived. Arithmetic on an array that only one later phase needs, such as a
    clipped gradient, waits for that phase: until then no memory holds the result.
    """
    phase: dict[core.Var, int] = dict.fromkeys(jaxpr.constvars, 0) | dict(arrival)
    arrived: list[int] = []
    for eqn in jaxpr.eqns:
        arrived.append(max((phase[x] for x in _variables(eqn.invars)), default=0))
        phase |= dict.fromkeys(eqn.outvars, arrived[-1])
    users: dict[core.Var, set[int]] = defaultdict(set, {x: {BY_CALLER} for x in _variables(jaxpr.outvars)})
    eqns: dict[int, _Eqns] = defaultdict(list)
    # Backwards: the phases of an equation's users are settled before its own.
    for eqn, own in zip(reversed(jaxpr.eqns), reversed(arrived), strict=True):
        needed = set[int]().union(*(users[x] for x in eqn.outvars))
        if _is_elementwise(eqn) and len(needed) == 1 and BY_CALLER not in needed:
            (own,) = needed
            phase |= dict.fromkeys(eqn.outvars, own)
        for x in _variables(eqn.invars):
            users[x].add(own)
        eqns[own].insert(0, eqn)
    return phase, eqns


# --------------------------------------------------------------------------------------------- the update in groups


class _Streaming:
    """A run of the equations: the values so far, and the moments that were written back last."""

    def __init__(self, closed: Any, moments: Sequence[_Moment]):
        self.outvars, self.groups = closed.jaxpr.outvars, _grouped(moments)
        self.var = dict(zip((moment.place for moment in moments), closed.jaxpr.invars, strict=True))
        arrival = {self.var[moment.place]: k for k, group in enumerate(self.groups, 1) for moment in group}
        self.phase, self.eqns = _phases(closed.jaxpr, arrival)
        self.values: _Values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self.stored: dict[int, jax.Array] = {}
        self.before: list[int] = []  # what the phase before this one has stored

    def outputs(self) -> list[Any]:
        """Runs it; returns what the update returns, moments on the host."""
        self._run(0)
        for k, group in enumerate(self.groups, 1):
            rows = _rows_at_once(group)
            if rows and self._is_by_element(k, group):
                self._run_in_rows(k, group, rows)
                continue
            there = [jax.device_put(moment.value, jax.memory.Space.Device) for moment in group]
            self.values |= zip((self.var[moment.place] for moment in group), self._after_before(there), strict=True)
            self._run(k)
        outvars = enumerate(self.outvars)
        return [self.stored[i] if i in self.var else _read(self.values, x) for i, x in outvars]

    def _run(self, k: int) -> None:
        for eqn in self.eqns[k]:
            self.values |= _results(eqn, self.values)
        self.before = self._computed(k)
        self.stored |= {i: _to_host(_read(self.values, self.outvars[i])) for i in self.before}

    def _computed(self, k: int) -> list[int]:
        """The places of the moments whose next values phase ``k`` computes."""
        outvars = {i: self.outvars[i] for i in self.var}
        return [i for i, x in outvars.items() if (0 if isinstance(x, core.Literal) else self.phase[x]) == k]

    def _after_before(self, arrays: list[Any]) -> list[Any]:
        """The arrays, held back until the moments of the phase before are on the host."""
        # XLA would begin all fetches at once. The barrier makes these wait for the write-backs before them.
        arrays, stored = jax.lax.optimization_barrier((arrays, [self.stored[i] for i in self.before]))
        self.stored |= dict(zip(self.before, stored, strict=True))
        return arrays

    # --------------------------------------------------------------------------------------- a large leaf, row by row

    def _is_by_element(self, k: int, group: Sequence[_Moment]) -> bool:
        """Whether a phase is elementwise throughout, and computes the next moments of its own group and no others."""
        computed = {x for eqn in self.eqns[k] for x in eqn.outvars}
        return (
            all(_is_elementwise(eqn, group[0].value.shape) for eqn in self.eqns[k])
            and set(self._computed(k)) == {moment.place for moment in group}
            and all(self.outvars[moment.place] in computed for moment in group)
        )

    def _buffers(self, k: int, shape: tuple[int, ...]) -> dict[Any, core.Var | None]:
        """The values that a phase computes for others or the caller, each with an operand to overwrite, or None."""
        # The next value of a parameter overwrites the parameter, whose buffer was donated to the step. An update ends
        # with parameter + update, so the operand that is used last comes first.
        used = {x for j, eqns in self.eqns.items() if j != k for eqn in eqns for x in _variables(eqn.invars)}
        used |= {x for i, x in enumerate(self.outvars) if i not in self.var and not isinstance(x, core.Literal)}
        operands = [x for eqn in reversed(self.eqns[k]) for x in _variables(eqn.invars) if x in self.values]
        computed: list[Any] = [x for eqn in reversed(self.eqns[k]) for x in eqn.outvars if x in used]
        buffers: dict[Any, core.Var | None] = {}
        for x in computed:
            fitting = [y for y in operands if (self.values[y].shape, self.values[y].dtype) == (shape, x.aval.dtype)]
            buffers[x] = next((y for y in fitting if y not in buffers.values()), None)
        return buffers

    def _run_in_rows(self, k: int, group: Sequence[_Moment], rows: int) -> None:
        shape, eqns = group[0].value.shape, self.eqns[k]
        buffers = self._buffers(k, shape)
        # Read from the carry, which replaces it row by row: outside of the carry the loop would keep a second copy.
        kept = {y: x for x, y in buffers.items() if y is not None}
        operands = {x for eqn in eqns for x in _variables(eqn.invars) if x in self.values}

        def body(i: jax.Array, carry: _Carry) -> _Carry:
            cut = partial(jax.lax.dynamic_slice_in_dim, start_index=i * rows, slice_size=rows)
            put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * rows, axis=0)
            host, device = carry
            local = {x: device[kept[x]] if x in kept else self.values[x] for x in operands}
            local = {x: cut(value) if value.shape == shape else value for x, value in local.items()}
            local |= {self.var[j]: jax.device_put(cut(host[j]), jax.memory.Space.Device) for j in host}
            for eqn in eqns:
                local |= _results(eqn, local, rows)
            new = {j: _to_host(local[self.outvars[j]]) for j in host}
            return {j: put(host[j], new[j]) for j in host}, {x: put(device[x], local[x]) for x in device}

        places = [moment.place for moment in group]
        host = dict(zip(places, self._after_before([moment.value for moment in group]), strict=True))
        # Zeros, which the loop overwrites row by row, where no operand's buffer is free.
        device = {x: jnp.zeros(shape, x.aval.dtype) if y is None else self.values[y] for x, y in buffers.items()}
        host, device = jax.lax.fori_loop(0, shape[0] // rows, body, (host, device))
        self.stored |= host
        self.values |= device
        self.before = places


def _to_host(array: jax.Array) -> jax.Array:
    return jax.device_put(array, jax.memory.Space.Host)
