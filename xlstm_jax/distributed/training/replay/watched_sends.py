"""Digests of the values that a device sends: a program of ``shard_map`` that also returns digests.

A collective spreads a wrong number from a device over the mesh, and the source of the number cannot be found after the
collective. So digests are taken of operands before the collective: the cotangent of a gathered weight before its
reduce-scatter, the gradient of a replicated leaf and the loss before their all-reduce, activations that a layer sends.

  program of a device   -->  jaxpr  -->  the same equations; each collective also adds a digest of its operands
                             results that were not sent, such as gradients of local shards, also add a digest

The rest of the library needs no code for digests: prefetched gathers, minibatches, experts and copies are equations of
the jaxpr. Equations inside ``scan``, ``remat``, branches and functions are entered; equations inside a ``while_loop``,
which has no gradient, are not.

A digest is the checksum of checkpoints, two uint32: one changed word always changes both. An operand is passed
through an ``optimization_barrier``, so that XLA computes the operand once, for the digest and for the collective. An
operand received from an earlier collective and sent on, as in the second stage of a reduce-scatter, is not the result
of this device alone, and has no digest.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint.checksums import checksum
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.training.step import DeviceProgram
from xlstm_jax.distributed.training.varying import followed_equation
from xlstm_jax.equations import COLLECTIVES, FUNCTIONS, all_equations, name_and_params, nested_jaxprs, scan_counts
from xlstm_jax.private_names import core

Labels = frozenset[str]
COMPUTED = "computed here"  # label of a value that this device computed, not only from received values
_ARGUMENTS = ("params", "batch", "rng", "metric", "collections", "extra_trees")


class _Value(NamedTuple):
    """An array with labels: ``COMPUTED``; names of sends, and paths of arguments, from which the array was computed.

    An argument that entered only through a send is not listed: its label was replaced by the name of the send.
    """

    array: Any
    labels: Labels


class _Send(NamedTuple):
    """The digest of an operand, uint32 [2], and the labels of the operand."""

    digest: jax.Array
    labels: Labels


def watched(program: DeviceProgram, axes: tuple[str, ...], note: Callable[[list[list[str]]], None]) -> DeviceProgram:
    """Returns a program that returns the result of ``program``, and digests of the values that each device sends.

    A send is a collective of the program, or a result that no collective sends. The digests are uint32 [n, sends, 2],
    with a digest (two words) for each of the n devices and each send, in the order of the program's equations.

    Args:
      program: the program of a device.
      axes: all axes of the program's mesh. The n devices are in the order of ``axes``, the first axis outermost.
      note: called when the program is traced, with a list of paths for each send, which errors name: the paths of the
        results that are computed from the send alone; without such a result (for the gather of a weight, say) the paths
        of the arguments from which this device computed the sent values.
    """

    def fn(*args: PyTree) -> tuple[PyTree, jax.Array]:
        closed, like = jax.make_jaxpr(program.fn, return_shape=True)(*args)
        watcher = _Watcher(axes)
        named = [(f"{name}/{path}", x) for name, arg in zip(_ARGUMENTS, args, strict=True) for path, x in _arrays(arg)]
        results = watcher.of_closed(closed, [_Value(x, Labels({COMPUTED, path})) for path, x in named])
        reached: dict[str, list[str]] = {}
        for (path, _), result in zip(_arrays(like), results, strict=True):
            # A result that was not sent also gets a digest. A result computed only from received values gets no digest,
            # since its rounding may differ from device to device.
            sends = [watcher.sent(result)] if COMPUTED in result.labels else result.labels
            for send in sends:
                reached.setdefault(send, []).append(path)
        operands = [sorted(send.labels - {COMPUTED}) for send in watcher.sends]
        note([reached.get(watcher.name(index), paths) for index, paths in enumerate(operands)])
        table = collectives.all_gather_equal(watcher.digests()[None], 0, axes)
        # By its type the table may still vary over axes of size 1.
        (table,) = collectives.psum([table], [tuple(set(axes) - set(collectives.spread_axes(axes)))])
        return jax.tree.unflatten(jax.tree.structure(like), [result.array for result in results]), table

    out_specs = (program.options["out_specs"], PartitionSpec())
    return program._replace(fn=fn, options={**program.options, "out_specs": out_specs})


def _arrays(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns a list of (path, array) for each array of a tree, in the order of ``jax.tree.leaves``.

    Arrays in a box have the path of the box.
    """
    return [(path, array) for path, leaf in trees.leaves_with_path(tree) for array in jax.tree.leaves(leaf)]


def _received(eqn: Any, labels: list[Labels]) -> list[Labels] | None:
    """Returns an empty set of labels for each result of a collective; ``None`` for any other equation.

    This is the argument ``look`` of ``followed_equation``; ``labels`` are the labels of the operands. A label names a
    value from which this device computed the operand. The results of a collective were received from other devices, so
    they have no label.
    """
    return [Labels()] * len(eqn.outvars) if eqn.primitive.name in COLLECTIVES else None


class _Watcher:
    """Interpreter of a jaxpr inside ``shard_map``; ``sends`` grows in the order of the equations.

    Names of sends begin with ``prefix``, which differs in an inner jaxpr, because its inputs are labelled with the
    names of outer sends.
    """

    def __init__(self, axes: tuple[str, ...], prefix: str = "send ") -> None:
        self.axes, self._prefix = axes, prefix
        self.sends: list[_Send] = []
        self._sending: dict[int, bool] = {}

    def name(self, index: int) -> str:
        """Returns the name of ``sends[index]``, such as "send 3": the label of values computed from the sent value."""
        return f"{self._prefix}{index}"

    def _inner(self) -> "_Watcher":
        return _Watcher(self.axes, f"{self.name(len(self.sends))}.")

    def digests(self) -> jax.Array:
        """Returns the digests of all sends that were added so far, in order: uint32 [sends, 2]."""
        return jnp.stack([send.digest for send in self.sends])

    def sent(self, value: _Value) -> str:
        """Adds the digest of ``value``, which this device computed, to ``sends``.

        Returns the name of the send, the label of values that are computed from ``value`` after the send.
        """
        return self._add(checksum(value.array), value.labels)

    def _add(self, digest: jax.Array, labels: Labels) -> str:
        self.sends.append(_Send(collectives.to_varying(digest, collectives.spread_axes(self.axes)), labels))
        return self.name(len(self.sends) - 1)

    def of_closed(self, closed: Any, values: Sequence[_Value]) -> list[_Value]:
        """Evaluates a jaxpr on ``values``, and adds a digest for each collective to ``sends``; returns its results.

        ``closed`` is a closed or an open jaxpr. ``values`` has a ``_Value`` (array, and labels that name the values
        from which the array was computed) for each argument; the list of results has a ``_Value`` for each result.
        Constants have no labels. Operands that were received from other devices, and not changed here, get no digest.
        """
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        inputs = [*[_Value(const, Labels()) for const in consts], *values]
        env: dict[Any, _Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val, Labels()) if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._of_equation(eqn, [*map(read, eqn.invars)]), strict=True))
        return [*map(read, jaxpr.outvars)]

    def _of_equation(self, eqn: Any, values: list[_Value]) -> list[_Value]:
        name, params = name_and_params(eqn)
        if name in COLLECTIVES:
            return self._of_collective(eqn, values)
        if self._sends(eqn):
            if name == "scan":
                return self._of_scan(eqn, values)
            if name == "cond":
                return self._of_cond(eqn, values)
            if name in ("remat2", "checkpoint") and params is eqn.params:
                return self._of_remat(eqn, values)
            # Includes a jax.checkpoint under jax_remat3: XLA may then merge the recomputation with the first pass.
            if name in (*FUNCTIONS, "remat2"):
                return self.of_closed(params.get("jaxpr", params.get("call_jaxpr")), values)
        return _with_labels(_results(eqn, eqn.params, values), [Labels().union(*(x.labels for x in values))])

    def _sends(self, eqn: Any) -> bool:
        """Returns whether a jaxpr inside ``eqn`` (of a scan, a function, ...) has a collective, at any level."""
        if id(eqn) not in self._sending:
            inner = [inner_eqn for jaxpr in nested_jaxprs(eqn) for inner_eqn in jaxpr.eqns]
            self._sending[id(eqn)] = any(inner_eqn.primitive.name in COLLECTIVES for inner_eqn in all_equations(inner))
        return self._sending[id(eqn)]

    def _of_collective(self, eqn: Any, values: list[_Value]) -> list[_Value]:
        # The barrier keeps XLA from computing the operand a second time for its digest.
        operands = lax.optimization_barrier([value.array for value in values])
        values = [_Value(operand, value.labels) for operand, value in zip(operands, values, strict=True)]
        labels = [Labels({self.sent(x)}) if COMPUTED in x.labels else x.labels for x in values]
        together = [Labels().union(*labels)]
        return _with_labels(_results(eqn, eqn.params, values), labels if len(labels) == len(eqn.outvars) else together)

    def _of_remat(self, eqn: Any, values: list[_Value]) -> list[_Value]:
        # The equation itself with more results, because only a remat equation keeps XLA from merging the recomputation
        # with the first pass.
        inner, results = self._inner(), list[_Value]()

        def fn(*arrays: Any) -> tuple[list[Any], list[jax.Array]]:
            inputs = [_Value(array, value.labels) for array, value in zip(arrays, values, strict=True)]
            results[:] = inner.of_closed(eqn.params["jaxpr"], inputs)
            return [result.array for result in results], [send.digest for send in inner.sends]

        closed = jax.make_jaxpr(fn)(*(value.array for value in values))
        jaxpr = closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
        consts = [_Value(const, Labels()) for const in closed.consts]
        arrays = _results(eqn, eqn.params | {"jaxpr": jaxpr}, [*consts, *values])
        return self._with_inner_sends(
            inner, arrays[len(results) :], arrays[: len(results)], [x.labels for x in results]
        )

    def _of_scan(self, eqn: Any, values: list[_Value]) -> list[_Value]:
        params, (num_consts, num_carry) = eqn.params, scan_counts(eqn.params)
        after = num_consts + num_carry
        # A carry computed on this device in any round gets the label COMPUTED in each round.
        computed = followed_equation(eqn, [value.labels & {COMPUTED} for value in values], _received)[:num_carry]
        labels = [value.labels for value in values]
        labels[num_consts:after] = [x | more for x, more in zip(labels[num_consts:after], computed, strict=True)]
        inner, results = self._inner(), list[_Value]()

        def body(carry: list[Any], rest: list[Any]) -> tuple[list[Any], Any]:
            arrays = [*[value.array for value in values[:num_consts]], *carry, *rest]
            inner.sends.clear()  # JAX may trace a body twice
            results[:] = inner.of_closed(params["jaxpr"], [*map(_Value, arrays, labels)])
            out = [result.array for result in results]
            return out[:num_carry], (out[num_carry:], [send.digest for send in inner.sends])

        start, rest = ([value.array for value in part] for part in (values[num_consts:after], values[after:]))
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, (stacked, digests) = lax.scan(body, start, rest, **options)
        # An odd factor is invertible modulo 2^32: one changed digest changes the sum.
        odd = (2 * jnp.arange(params["length"], dtype=jnp.uint32) + 1)[:, None]
        digests = [jnp.sum(of_rounds * odd, 0, dtype=jnp.uint32) for of_rounds in digests]
        result_labels = [x.labels for x in results]
        result_labels[:num_carry] = [
            x | more for x, more in zip(result_labels[:num_carry], labels[num_consts:after], strict=True)
        ]
        return self._with_inner_sends(inner, digests, [*carry, *stacked], result_labels)

    def _of_cond(self, eqn: Any, values: list[_Value]) -> list[_Value]:
        index, *operands = values
        outcomes: list[tuple[list[_Send], list[_Value]]] = []

        def of_branch(branch: Any) -> Callable[..., tuple[list[Any], jax.Array]]:
            def fn(*arrays: Any) -> tuple[list[Any], jax.Array]:
                inner = self._inner()
                inputs = [_Value(array, value.labels) for array, value in zip(arrays, operands, strict=True)]
                results = inner.of_closed(branch, inputs)
                outcomes.append((inner.sends, results))
                # One digest for all sends of a branch, since the number of sends differs between branches.
                digest = checksum(inner.digests()) if inner.sends else jnp.zeros(2, jnp.uint32)
                return [result.array for result in results], collectives.to_varying(
                    digest, collectives.spread_axes(self.axes)
                )

            return fn

        branches = [of_branch(branch) for branch in eqn.params["branches"]]
        arrays, digest = lax.switch(index.array, branches, *(value.array for value in operands))
        send = Labels({self._add(digest, Labels().union(*(of.labels for sends, _ in outcomes for of in sends)))})
        computed = followed_equation(eqn, [value.labels & {COMPUTED} for value in values], _received)
        return _with_labels(arrays, [send | labels for labels in computed])

    def _with_inner_sends(
        self, inner: "_Watcher", digests: Sequence[jax.Array], arrays: Sequence[Any], labels: Sequence[Labels]
    ) -> list[_Value]:
        """Adds the sends of an inner jaxpr to ``sends``; returns the results of its equation with labels.

        Args:
          inner: the watcher of the inner jaxpr, for the labels of its sends.
          digests: for each send of ``inner`` the digest, as a result of the equation.
          arrays: the results of the equation.
          labels: the labels of each result within the inner jaxpr; names of sends of ``inner`` are replaced by the
            names of the sends added here.
        """
        names = {
            inner.name(index): self._add(digest, send.labels)
            for index, (send, digest) in enumerate(zip(inner.sends, digests, strict=True))
        }
        return _with_labels(arrays, [Labels(names.get(name, name) for name in of) for of in labels])


def _results(eqn: Any, params: dict[str, Any], values: Sequence[_Value]) -> list[Any]:
    """Runs the primitive of ``eqn`` on the arrays of ``values``, with parameters ``params``; returns its results.

    The results are a list of arrays without labels, also for a primitive with a single result.
    """
    outputs = eqn.primitive.bind(*(value.array for value in values), **eqn.primitive.get_bind_params(params))
    return outputs if eqn.primitive.multiple_results else [outputs]


def _with_labels(arrays: Sequence[Any], labels: Sequence[Labels]) -> list[_Value]:
    """Returns a ``_Value`` (array and labels) for each of ``arrays``, in order.

    Labels are names of the values from which an array was computed. ``labels`` has a set of labels for each array, or a
    single set for all arrays.
    """
    return [*map(_Value, arrays, labels if len(labels) == len(arrays) else [*labels] * len(arrays))]
