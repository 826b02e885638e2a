"""Checks of the arguments in each call of a compiled step; ``CheckedStep`` runs the checks.

before   argument names; donated buffers (some JAX releases end the process on reuse); the first batch, compared between
         processes; the placement of the batch
failure  the leaf that JAX rejected before tracing
after    whether padded rows were counted; callbacks of a step in a program of the user
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import is_box, leaf_of
from xlstm_jax.distributed.data_parallel.trees import named_leaf
from xlstm_jax.distributed.device_mesh.batch_leaves import why_no_array
from xlstm_jax.distributed.device_mesh.batches import any_padded, padded_rows_of
from xlstm_jax.distributed.training.arguments import ARGUMENT_HINTS, DONATED
from xlstm_jax.distributed.training.first_batch import compare_batches
from xlstm_jax.distributed.training.mistakes import warn_of_padding
from xlstm_jax.distributed.training.moments import CallInProgram, JittedCall
from xlstm_jax.equations import all_equations
from xlstm_jax.formatting import kind_of

RETURNING_CALLBACKS = {"pure_callback", "io_callback"}  # names of primitives


def check_names(call: JittedCall) -> None:
    """Raises a ``TypeError`` if the call of a step does not have the arguments of the step.

    The call lacks a needed argument, has an unknown argument or too many, passes an argument twice, or passes as
    ``extra_trees`` something other than a dict.
    """
    step, args, kwargs = call.step, call.args, call.kwargs
    written = f"step({', '.join(step.needed)})"
    by_place = step.arguments[: len(args)]
    for name in step.needed:
        if name not in by_place and name not in kwargs:
            raise TypeError(f"{written} was called without {name!r}. Pass {ARGUMENT_HINTS[name]}.")
    unknown = [name for name in kwargs if name not in step.arguments and name != "extra_trees"]
    rest = "Further trees come by name, as extra_trees={'teacher': params}, and all else in the batch."
    if unknown:
        raise TypeError(f"{written} has no argument {unknown[0]!r}. {rest}")
    if len(args) > len(step.arguments):
        raise TypeError(f"{written} was called with {len(args)} arguments. {rest}")
    if twice := [name for name in by_place if name in kwargs]:
        raise TypeError(f"{written} was given {twice[0]!r} twice, by its place and by its name. Pass it once.")
    if (extra_trees := call.named.get("extra_trees")) is not None and not isinstance(extra_trees, Mapping):
        raise TypeError(
            f"extra_trees is {kind_of(extra_trees)}; pass a dict of trees by the names that the function takes them "
            "by, as step(..., extra_trees={'teacher': teacher_state.params})."
        )


def check_others_of_call(call: JittedCall) -> None:
    """Raises a ``ValueError`` if a leaf of the call's ``extra_trees`` has lost its box, or is donated by the same call.

    A leaf has lost its box if its array is split and not in a box. A call without ``extra_trees`` passes.
    """
    if call.named.get("extra_trees"):
        _check_extra_trees(call.named["extra_trees"], [call.named.get(name) for name in call.step.donated])


def check_donated(call: JittedCall) -> None:
    """Raises a ``ValueError`` if the call's state, or state of a metric, was donated to an earlier step.

    Only sample arrays of both are checked, since a step donates entire trees.
    """
    for name in DONATED:
        if name in call.named and any(map(_is_deleted, _some_leaves(name, call.named[name]))):
            raise _deleted(name, name)


def compare_first_batch(call: JittedCall) -> None:
    """Compares the batch of a step's first call between the processes of the mesh, which wait for each other here.

    Later calls of the step are not compared. A batch with leaves that are not arrays is not compared: the call fails
    later. Warns if processes pass equal rows as different parts of the batch.

    Raises:
      ValueError: in every process: values that must be equal differ (shapes, dtypes, shardings, scalars, process-local
        arrays, copies of the same rows).
      TimeoutError: a process did not arrive.
    """
    if "compared" not in call.step.checked_inputs and "batch" in call.named:
        # Leaves that are not arrays are named after the call has failed.
        if not any(map(why_no_array, jax.tree.leaves(call.named["batch"]))):
            compare_batches(call.named["batch"], call.step.layout.mesh)
        call.step.checked_inputs.add("compared")


def check_placed(call: JittedCall) -> None:
    """Raises a ``ValueError`` if an array of the call's batch has other dims split than the layout of the step.

    Splits of dim 0, the rows, are not compared.
    """
    batch, shardings = call.named["batch"], call.placements
    for path, leaf, axes in call.step.layout.misplaced(batch, shardings):
        raise ValueError(
            f"{named_leaf('batch', path)} of shape {np.shape(leaf)} is placed as {leaf.sharding.spec}, which "
            f"splits another dim than that of examples over {axes}; the step reads it split over {call.step.layout}. "
            "Place it by shard_batch, or pass NumPy arrays; to split a sequence, pass batch_spec=P(('dp', 'fsdp'), "
            "'cp'), say, to both."
        )


def raise_for_leaf(call: JittedCall) -> None:
    """Raises an error that names the leaf of the call's arguments for which JAX has raised ``call.error``.

    A ``TypeError`` for a leaf that is no array, a ``ValueError`` for an array that is deleted or on other devices than
    the step's mesh. Returns if no leaf is found to be at fault.
    """
    # Run only after a failure: checking every leaf takes as long as a call.
    mesh = call.step.layout.mesh if "incompatible devices" in str(call.error) else None
    if cause := next(_errors_in(call.named, mesh), None):
        raise cause from None


def check_callbacks(call: CallInProgram) -> None:
    """Raises a ``ValueError`` if a step in a user's program with explicit axes has a callback that returns values.

    ``call`` has the jaxpr of the step. The callbacks are ``jax.pure_callback`` and ``io_callback``, which JAX does not
    compile in such a program.
    """
    found = sorted(RETURNING_CALLBACKS & {eqn.primitive.name for eqn in all_equations(call.jaxpr.eqns)})
    if found:
        raise ValueError(
            f"the step contains {found[0]}, and is called inside a jax.jit of yours under a set mesh with explicit "
            "axes: JAX compiles callbacks that return values in no such program. Call the step outside of jax.jit, set "
            "a mesh of AxisType.Auto axes, or use jax.debug.callback, which returns nothing."
        )


def warn_of_padded_call(call: JittedCall) -> None:
    """Warns if results of the called step count padded rows like real rows.

    Padded rows are the copies of weight 0 that ``shard_batch(..., pad=...)`` appends; a batch without padded rows is
    not analysed. A step is analysed once for each structure of a batch, with its shapes and padded leaves.
    """
    if not any_padded():
        return
    batch = call.named.get("batch")
    leaves, treedef = jax.tree.flatten(batch)
    padded = tuple((np.shape(leaf), padded_rows_of(leaf) is not None) for leaf in leaves)
    if any(is_padded for _, is_padded in padded) and ("padded", treedef, padded) not in call.step.checked_inputs:
        call.step.checked_inputs.add(("padded", treedef, padded))
        warn_of_padding(batch, call.step.counting(batch, call.args, call.kwargs))


def _some_leaves(name: str, argument: Any) -> Iterable[Any]:
    """Returns a few arrays of a step's argument, which show whether the argument was donated.

    ``name`` is the name of the argument. For "state": (step number, first parameter), with None if the state lacks one.
    For other names: a list of the first leaf, or [] without leaves. A step donates entire trees, and checking every
    leaf takes too long.
    """
    if name != "state":
        return jax.tree.leaves(argument)[:1]
    first = getattr(argument, "params", None)
    while isinstance(first, dict) and first:  # flattening the tree would take as long as a call, too
        first = next(iter(first.values()))
    return getattr(argument, "step", None), getattr(first, "value", first)  # of a box its value


def _check_extra_trees(extra_trees: PyTree, donated: PyTree) -> None:
    """Raises a ``ValueError`` if a leaf of ``extra_trees`` has lost its box, or is an array object of ``donated``, too.

    ``donated`` are the arguments whose memory the call takes over. A leaf has lost its box if its array is split and
    not in a box. Some JAX releases end the process if a call donates an array that the call also reads.
    """
    # Compare identities, since copies of equal values are fine. Every array is alive here, so ids are unique.
    taken = {id(x) for x in jax.tree.leaves(donated) if isinstance(x, jax.Array) and not isinstance(x, Tracer)}
    for path, leaf in trees.leaves_with_path(extra_trees):
        value, where = leaf_of(leaf).value if is_box(leaf) else leaf, named_leaf("extra_trees", path)
        if id(value) in taken:
            raise ValueError(
                f"{where} is a leaf of the state too, and a step takes over the memory of its state. Pass a copy: "
                "jax.tree.map(jnp.copy, state.params). (ema_params returns a copy.)"
            )
        its = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        if not is_box(leaf) and isinstance(its, NamedSharding) and not its.is_fully_replicated:
            raise ValueError(
                f"{where} of shape {np.shape(leaf)} has no box and is split as {its.spec}: every device would gather "
                "all of it before the step. Pass params in boxes, as from create_train_state and init_sharded; "
                "box_like(tree, params) puts boxes back. Of a state pass state.params alone."
            )


def _is_deleted(leaf: Any) -> bool:
    """Returns whether an array was donated (its buffers are deleted); False for tracers and other objects.

    (``isinstance(leaf, jax.Array)`` would take a microsecond.)
    """
    is_deleted = getattr(leaf, "is_deleted", None)
    return is_deleted is not None and not isinstance(leaf, Tracer) and is_deleted()


def _errors_in(arguments: dict[str, Any], mesh: Mesh | AbstractMesh | None) -> Iterator[Exception]:
    """Yields an exception, which is not raised, for each leaf of a call that JAX rejects.

    A ``TypeError`` for a leaf that is no array of numbers, a ``ValueError`` for a deleted array. With ``mesh`` also a
    ``ValueError`` for each committed array on other devices than those of the mesh, or in another order. ``arguments``
    are the arguments of the call by name.
    """
    for name, argument in arguments.items():
        for path, leaf in trees.leaves_with_path(argument):
            # `leaf_of` reads dims, which only arrays have.
            value, where = leaf_of(leaf).value if is_box(leaf) else leaf, named_leaf(name, path)
            if reason := why_no_array(value):
                yield TypeError(f"{where} is {reason}")
            elif isinstance(value, jax.Array) and not isinstance(value, Tracer):
                if value.is_deleted():
                    yield _deleted(name, where)
                elif isinstance(mesh, Mesh) and value.committed and _ids_of(value) != _ids(mesh.devices.flat):
                    yield ValueError(
                        f"{where} lies on the devices {_ids_of(value)}, and the mesh of the step has "
                        f"{_ids(mesh.devices.flat)}, in this order. Make state and step with one mesh, and "
                        "batches by shard_batch on it, or of NumPy arrays."
                    )


def _deleted(name: str, where: str) -> ValueError:
    """Returns the ``ValueError`` for an array that is deleted, because an earlier call has taken over its memory.

    ``name`` is the argument of the step, such as "state", and decides the cure in the message; ``where`` is the name of
    the leaf for the message.
    """
    if name in DONATED:
        return ValueError(
            f"{where} was handed to a step before, which donates its {name}. Go on with the {name} that it returned; "
            f"to use a {name} twice, pass a copy: jax.tree.map(jnp.copy, {name})."
        )
    if name == "extra_trees":
        return ValueError(
            f"{where} was deleted: a step has taken over the state that it belonged to. Pass the params of the newest "
            "state of that model, or a copy made before the step: jax.tree.map(jnp.copy, state.params)."
        )
    return ValueError(f"{where} was deleted: it was donated to a function (donate_argnums). Pass another array.")


def _ids_of(value: jax.Array) -> list[int]:
    """Returns the ids of an array's devices, in the order of its mesh; sorted if the array is on no mesh."""
    if isinstance(value.sharding, NamedSharding) and isinstance(value.sharding.mesh, Mesh):
        return _ids(value.sharding.mesh.devices.flat)
    return sorted(_ids(value.sharding.device_set))


def _ids(devices: Any) -> list[int]:
    return [device.id for device in devices]
