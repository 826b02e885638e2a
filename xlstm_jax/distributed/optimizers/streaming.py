"""Optimizer update that streams moments from the host to the device and back, leaf by leaf.

Given moments on the host, XLA would copy all moments to the device before the first update, and a step would take as
much device memory as without offload. So the update is traced once, and its equations are reordered:

  group 0          equations without moments on the host: norms, counts, schedules
  groups 1 ... K   a moment, or several small moments, and the equations whose last input is among these moments

An ``optimization_barrier`` delays the computation of a group until the new moments of the group before are on the host.
The equations are not changed, and JAX evaluates each once: for any transform, every value equals the value without
offload. If a transform couples moments of several parameters (Muon's rounds, a norm of the updates), the coupled
equations run after the transfer of the last of these moments.

The device needs memory for the moments of the largest parameter and for their new values. Small parameters are updated
first, which frees their gradients before the largest parameter is updated.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from xlstm_jax.common_types import Metrics, PyTree
from xlstm_jax.distributed.data_parallel.trees import is_on_host
from xlstm_jax.distributed.optimizers.sharded_optimizer import ShardedOptimizer, Trained, WrapperOfStates, owners
from xlstm_jax.private_names import core

JIT = ("jit", "pjit")  # the primitive of a jitted call, in new and old JAX
GROUP_BYTES = 2**24  # per device: a transfer takes 1 ms, and schedules overlap several

_Values = dict[core.Var, Any]


def with_streaming(optimizer: ShardedOptimizer, params: PyTree, mesh: Mesh | AbstractMesh) -> ShardedOptimizer:
    """Returns ``optimizer`` with an ``update`` that accepts an optimizer state with leaves in host memory.

    The new ``update`` copies these leaves to the device and back, group by group (``streamed``). ``params`` are the
    boxed parameters of the optimizer; their paths show which leaves of the state belong to a parameter. ``mesh`` is not
    read. The function is a ``Wrapper``, a function from a ``ShardedOptimizer`` to a changed ``ShardedOptimizer``.
    """
    del mesh

    def update(
        grads: PyTree, before: Trained, collections: Mapping[str, PyTree], **extra_args: PyTree
    ) -> tuple[Trained, Metrics]:
        def on_device(opt_state: PyTree) -> tuple[PyTree, tuple[Trained, Metrics]]:
            fetched = before._replace(opt_state=opt_state)
            after, metrics = optimizer.update(grads, fetched, collections, **extra_args)
            return after.opt_state, (after._replace(opt_state=None), metrics)

        # Without leaves on the host this is a call of `on_device`.
        opt_state, (after, metrics) = streamed(
            on_device, before.opt_state, optimizer.shardings, partial(owners, before.opt_state, params)
        )
        return after._replace(opt_state=opt_state), metrics

    return optimizer._replace(update=update)


STREAMED_STATES = WrapperOfStates(jax.memory.Space.Host, with_streaming)


def streamed(
    update: Callable[[PyTree], tuple[PyTree, PyTree]],
    opt_state: PyTree,
    shardings: Callable[[PyTree], PyTree],
    owners: Callable[[], Sequence[str]],
) -> tuple[PyTree, PyTree]:
    """Computes ``update(opt_state)`` for a state with leaves on the host, one group of these leaves after the other.

    ``update`` is traced once, and the traced equations run in groups: first the equations that need no leaf from the
    host; then, for each group of leaves, the equations whose last input is in this group. Each group copies leaves to
    the device, computes new values, and copies the new values back to the host. A barrier delays the computation of
    each group until the new values of the group before are on the host. Without the barrier XLA would copy all leaves
    to the device at once.

    Args:
      update: takes a state on the device and returns the next state, of the same structure, and any further result.
      opt_state: the state. If no leaf is on the host, the result is simply ``update(opt_state)``.
      shardings: takes ``opt_state``; returns the sharding of each leaf, in the tree of the state. The shardings give
        the bytes of a leaf per device.
      owners: takes nothing; returns for each leaf of ``opt_state``, in tree order, the path of its parameter. Leaves of
        a parameter are neighbours in the order of the copies. Called only if a leaf is on the host.
    Returns:
      The result of ``update``; leaves that were on the host are on the host again.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(opt_state)
    if not any(map(is_on_host, leaves)):
        return update(opt_state)
    described = zip(leaves, jax.tree.leaves(shardings(opt_state)), owners(), strict=True)
    moments = [_Moment(i, *facts) for i, facts in enumerate(described) if is_on_host(facts[0])]
    groups, structure = _grouped(moments), list[Any]()

    # Leaves on the device are constants of the jaxpr.
    def on_device(*fetched: jax.Array) -> list[jax.Array]:
        by_place = dict(zip((moment.place for moment in moments), fetched, strict=True))
        updated = update(treedef.unflatten([by_place.get(i, leaf) for i, leaf in enumerate(leaves)]))
        flat, out_tree = jax.tree.flatten(updated)
        structure.append(out_tree)
        return flat

    abstract = [jax.ShapeDtypeStruct(moment.value.shape, moment.value.dtype) for moment in moments]
    # The second trace inlines calls of jitted functions. Adam's bias correction is a single call for all parameters:
    # everything computed from its results, such as an average of the weights, would wait for all moments.
    closed = jax.make_jaxpr(partial(_inlined, jax.make_jaxpr(on_device)(*abstract)))(*abstract)
    jaxpr: Any = closed.jaxpr
    variables = dict(zip((moment.place for moment in moments), jaxpr.invars, strict=True))

    # An equation belongs to the group in which the last of its inputs arrives.
    arrival = dict.fromkeys(jaxpr.constvars, 0)
    arrival |= {variables[moment.place]: k for k, group in enumerate(groups, 1) for moment in group}
    eqns: dict[int, list[core.JaxprEqn]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        k = max((_arrival_of(x, arrival) for x in eqn.invars), default=0)
        arrival |= dict.fromkeys(eqn.outvars, k)
        eqns[k].append(eqn)
    new_in = {i: _arrival_of(jaxpr.outvars[i], arrival) for i in variables}

    # Each group in turn is copied in, computed and copied back.
    values: _Values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    stored: dict[int, jax.Array] = {}  # new moments on the host, by place
    before: list[int] = []  # the moments copied back last
    for k, group in enumerate([[], *groups]):
        on_devices = [jax.device_put(moment.value, jax.memory.Space.Device) for moment in group]
        if before:  # Without the barrier XLA would copy in all moments at once.
            on_devices, back = jax.lax.optimization_barrier((on_devices, [stored[i] for i in before]))
            stored |= zip(before, back, strict=True)
        values |= zip((variables[moment.place] for moment in group), on_devices, strict=True)
        values |= _evaluated(closed, eqns[k], values)
        new = {i: _read(values, jaxpr.outvars[i]) for i in variables if new_in[i] == k}
        stored |= {i: jax.device_put(value, jax.memory.Space.Host) for i, value in new.items()}
        # If the new values of a group need a later group, the group copies nothing back. The next group then waits for
        # the last group that did.
        before = list(new) or before
    out = [stored[i] if i in stored else _read(values, x) for i, x in enumerate(jaxpr.outvars)]
    return jax.tree.unflatten(structure[0], out)


class _Moment(NamedTuple):
    """Leaf of the state on the host: its index in the state, array, sharding, and the path of its parameter."""

    place: int
    value: Any
    sharding: NamedSharding
    owner: str

    @property
    def bytes(self) -> int:
        """Bytes of the shard that a device stores of the moment."""
        return math.prod(self.sharding.shard_shape(self.value.shape)) * self.value.dtype.itemsize


def _grouped(moments: Sequence[_Moment]) -> list[list[_Moment]]:
    """Groups moments (leaves of the state on the host) that are copied together: a large moment, or several small ones.

    A group of several moments has at most ``GROUP_BYTES`` per device. Parameters with the fewest bytes of moments come
    first; moments of a parameter are adjacent, in the order of ``moments``.
    """
    by_owner: dict[str, list[_Moment]] = defaultdict(list)
    for moment in moments:
        by_owner[moment.owner].append(moment)
    groups: list[list[_Moment]] = []
    for members in sorted(by_owner.values(), key=_bytes):
        for moment in members:
            if groups and _bytes([*groups[-1], moment]) <= GROUP_BYTES:
                groups[-1].append(moment)
            else:
                groups.append([moment])
    return groups


def _bytes(moments: Sequence[_Moment]) -> int:
    return sum(moment.bytes for moment in moments)


def _arrival_of(x: core.Var | core.Literal, arrival: dict[core.Var, int]) -> int:
    return 0 if isinstance(x, core.Literal) else arrival[x]


def _read(values: _Values, x: core.Var | core.Literal) -> Any:
    return x.val if isinstance(x, core.Literal) else values[x]


def _inlined(closed: Any, *arguments: jax.Array) -> list[Any]:
    """Returns the results of a closed jaxpr for ``arguments``, computed without calls of jitted functions.

    In place of each call, at any depth, the equations of the jitted function are evaluated.
    """
    names = (*closed.jaxpr.constvars, *closed.jaxpr.invars)
    values: _Values = dict(zip(names, (*closed.consts, *arguments), strict=True))
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name in JIT:
            results = _inlined(eqn.params["jaxpr"], *(_read(values, x) for x in eqn.invars))
            values |= zip(eqn.outvars, results, strict=True)
        else:
            values |= _evaluated(closed, [eqn], values)
    return [_read(values, x) for x in closed.jaxpr.outvars]


def _evaluated(closed: Any, eqns: Sequence[core.JaxprEqn], values: _Values) -> _Values:
    """Returns the results of some equations of the closed jaxpr ``closed``, by output variable.

    Args:
      closed: the jaxpr that has the equations.
      eqns: the equations, in order; a later equation may use results of an earlier equation.
      values: values by variable, with every other input of the equations.
    """
    made = [x for eqn in eqns for x in eqn.outvars if not isinstance(x, core.DropVar)]
    needed = {x: values[x] for eqn in eqns for x in eqn.invars if not isinstance(x, core.Literal) and x in values}
    part = closed.jaxpr.replace(constvars=[], invars=list(needed), outvars=made, eqns=list(eqns))
    results = core.jaxpr_as_fun(closed.replace(jaxpr=part, consts=[]))(*needed.values())
    return dict(zip(made, results, strict=True))
