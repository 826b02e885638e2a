"""Argument checks of steps and of initialisation; errors name argument, leaf, rule and cure.

The checks run while JAX traces: shapes and meshes are part of the types, so calls of a compiled step pay nothing.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import frozen, is_box, split_by_model
from xlstm_jax.distributed.data_parallel.modules import other_system
from xlstm_jax.distributed.data_parallel.trees import named_leaf
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout
from xlstm_jax.distributed.device_mesh.batch_leaves import why_no_array
from xlstm_jax.distributed.metrics.pure_metric import Local
from xlstm_jax.formatting import kind_of
from xlstm_jax.introspection import accepts_call

STEP = "a step takes (state, batch, rng)"
NAME_OF_KEY = re.compile(r"rng|key|^_*$")  # found in the name of an argument that is a random key
STATE_FIELDS = ("step", "apply_fn", "params", "tx", "opt_state", "replace")
ARGUMENTS = ("state", "batch", "rng", "local")  # of a training step
DONATED = ("state", "local")  # whose memory a step takes over
ARGUMENT_HINTS = {  # values to pass to a step, by argument name
    "state": "the state that create_train_state makes, or the last one that the step returned",
    "batch": "arrays [rows, ...], as shard_batch returns them",
    "rng": "a key, jax.random.key(0); it may be the same in all steps. A loss_fn(params, apply_fn, batch) needs none",
    "local": "the state of the metric: metric.empty(batch_axes, mesh), or the last one that the step returned",
}
ExtraTrees = Mapping[str, PyTree] | None  # further trees of a step, passed to the loss function by name
WEIGHTED = "weighted=True"  # cure for padded rows of a training batch
PADDING = "which shard_batch(..., pad=True) returns"  # cure for padded rows of an evaluation batch


# -------------------------------------------------------------------------------------------------- model, loss and key


@dataclasses.dataclass(frozen=True)
class UserFunction:
    """Description, for errors, of a user's function that a step calls with ``arguments`` (and collections, if any).

    Error texts end with ``with_collections`` if the state has collections and the function takes none, and with
    ``hint_without_collections`` in the reverse case.
    """

    name: str
    arguments: tuple[str, ...]
    with_collections: str
    hint_without_collections: str

    def call_text(self, *further: str) -> str:
        """Returns the call of the user's function as source text, such as "loss_fn(params, apply_fn, batch, rng)".

        The text has the name and the arguments of this description, and at the end the names ``further``. Errors show
        it.
        """
        return f"{self.name}({', '.join([*self.arguments, *further])})"


LOSS_FN = UserFunction(
    "loss_fn",
    ("params", "apply_fn", "batch", "rng"),
    "which returns a pair of what it returns now and the updated collections: out, updated = apply_fn("
    "{'params': params, **collections}, x, mutable=list(collections))",
    "Make it with create_train_state, or TrainState.create(..., collections=...) of xlstm_jax.distributed (Flax's own "
    "TrainState has no such field); for a model without them leave the argument out",
)
LOSS_FN_WITHOUT_KEY = dataclasses.replace(LOSS_FN, arguments=LOSS_FN.arguments[:-1])
EVAL_FN = UserFunction(
    "eval_fn",
    ("params", "apply_fn", "batch"),
    "with apply_fn({'params': params, **collections}, ...)",
    "Leave the argument out, or evaluate a state that has them, as create_train_state makes it",
)


def check_loss_fn(loss_fn: Any, taker: str = "make_train_step", called: UserFunction = LOSS_FN) -> UserFunction:
    """Raises a ``TypeError`` unless ``loss_fn`` is a function that accepts the positional arguments of a step's call.

    Also accepted are a function with a further last argument, for collections, and a loss function without the key, the
    last of the arguments. A function without a signature passes. A model, a mesh or a class raises.

    Args:
      loss_fn: the user's function.
      taker: the name, for errors, of the function to which the user passed ``loss_fn``.
      called: describes the call: the name of the function and its arguments, such as (params, apply_fn, batch, rng).
    Returns:
      ``LOSS_FN_WITHOUT_KEY`` for a loss function that a step can call without a key, by its signature: for (params,
      apply_fn, batch), also with a key that has a default, for (params, apply_fn, batch, collections), and for a
      function without a signature. Else ``called``, as for (params, apply_fn, batch, rng): a fourth argument is a key
      if its name contains "rng" or "key", or consists of underscores.
    """
    if not callable(loss_fn) or hasattr(loss_fn, "apply") or isinstance(loss_fn, Mesh | AbstractMesh | type):
        is_model = hasattr(loss_fn, "apply")
        cure = "write a function that calls apply_fn" if is_model else "pass (loss_fn, mesh, batch_axes)"
        raise TypeError(f"{taker} takes first a function {called.call_text()}, not {kind_of(loss_fn)}; {cure}.")
    count, may_draw = len(called.arguments), called is LOSS_FN
    # A loss that draws nothing takes no key.
    if may_draw and accepts_call(loss_fn, count - 1):
        return LOSS_FN_WITHOUT_KEY
    # Collections come last: the name shows which of both the fourth argument of a loss is.
    if accepts_call(loss_fn, count):
        draws = not may_draw or NAME_OF_KEY.search([*inspect.signature(loss_fn).parameters][count - 1])
        return called if draws else LOSS_FN_WITHOUT_KEY
    if accepts_call(loss_fn, count + 1):
        return called
    raise TypeError(
        f"{taker} calls {called.call_text()}, with {count} arguments in this order, and the {called.name} that it was "
        f"given is {kind_of(loss_fn)}{inspect.signature(loss_fn)}. Arguments that it does not need may be called _."
    )


def takes_key(loss_fn: Callable[..., Any], rng: PyTree, collections: Mapping[str, PyTree], extra_trees: Any) -> bool:
    """Returns whether a step passes its key ``rng`` to ``loss_fn``, by the signature of ``loss_fn``.

    False if ``rng`` is None, or if ``loss_fn`` accepts only a call without a key: such a loss draws nothing, and the
    key of the step is ignored. For a function without a signature: whether ``rng`` is given.

    Args:
      loss_fn: the user's function.
      rng: the key that the step was called with, or None.
      collections: the collections of the state; if there are any, they are a further positional argument.
      extra_trees: dict of further trees, passed as keyword arguments.
    Raises:
      TypeError: ``loss_fn`` requires a key, and ``rng`` is None; or ``loss_fn`` accepts neither the call with the key
        nor the call without: see ``check_takes``.
    """
    count, further = len(LOSS_FN_WITHOUT_KEY.arguments), bool(collections)
    if rng is not None and accepts_call(loss_fn, count + 1 + further, extra_trees):
        return True

    # The call with a key does not fit, or there is no key. If the names of the trees are wrong, `check_takes` reports
    # them: the calls are then compared as if the names were right.
    with_key, without = [accepts_call(loss_fn, count + key + further, extra_trees) for key in (1, 0)]
    if not with_key and not without:
        with_key, without = [accepts_call(loss_fn, count + key + further) for key in (1, 0)]
    # With collections in the state, (params, apply_fn, batch, rng) is a function that lacks the collections.
    lacks = further and without and not with_key
    lacks = lacks and NAME_OF_KEY.search([*inspect.signature(loss_fn).parameters][count]) is not None
    if rng is None and (lacks or (with_key and not without)):
        raise TypeError(
            f"the loss function takes a key as argument {count + 1}, and the step was given none: {kind_of(loss_fn)}"
            f"{inspect.signature(loss_fn)}. Pass a key, step(state, batch, jax.random.key(0)), or write "
            f"{LOSS_FN_WITHOUT_KEY.call_text()}, which draws nothing."
        )
    draws = rng is not None and (with_key or lacks or not without)
    check_takes(loss_fn, LOSS_FN if draws else LOSS_FN_WITHOUT_KEY, collections, extra_trees)
    return draws


def without_key(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss function with the arguments of ``LOSS_FN`` that calls ``loss_fn`` without the key.

    The arguments are (params, apply_fn, batch, rng, *collections, **extra_trees).
    """

    def loss(params: PyTree, apply_fn: Any, batch: PyTree, rng: PyTree, *rest: Any, **extra_trees: Any) -> Any:
        del rng
        return loss_fn(params, apply_fn, batch, *rest, **extra_trees)

    return loss


def check_takes(
    function: Callable[..., Any], called: UserFunction, collections: Mapping[str, PyTree], extra_trees: Any
) -> None:
    """Raises a ``TypeError`` if ``function`` does not accept the call that a step makes.

    The call passes by position the arguments that ``called`` lists, such as (params, apply_fn, batch), and then the
    dict ``collections`` of the state, unless this is empty. The entries of ``extra_trees`` are keyword arguments. A
    function without a signature passes.
    """
    count, further = len(called.arguments), bool(collections)
    if accepts_call(function, count + further, extra_trees):
        return
    _check_names(inspect.signature(function), called, collections, extra_trees)
    if not accepts_call(function, count + (not further), extra_trees):
        return
    if collections:
        raise TypeError(
            f"the state has the collections {sorted(collections)}, and {called.name} takes {count} arguments. Write "
            f"{called.call_text('collections')}, {called.with_collections}."
        )
    raise TypeError(
        f"{called.name} takes collections as argument {count + 1}, and the state has none. "
        f"{called.hint_without_collections}."
    )


def check_eval_takes(eval_fn: Callable[..., Any], state: Any, extra_trees: Any) -> None:
    """Raises a ``TypeError`` if ``eval_fn`` does not accept the call that an evaluation makes; see ``check_takes``.

    The arguments are (params, apply_fn, batch), the collections of ``state`` if there are any, and the dict
    ``extra_trees`` by name.
    """
    check_takes(eval_fn, EVAL_FN, collections_of(state), extra_trees)


def _check_names(
    takes: inspect.Signature, called: UserFunction, collections: Mapping[str, PyTree], extra_trees: Any
) -> None:
    """Raises a ``TypeError`` if names of ``extra_trees`` do not match the keyword arguments of the signature ``takes``.

    Raised if ``extra_trees`` lacks a required keyword-only argument, or has a name that is no argument of the function.
    A step fills some arguments by position, and these do not count: the arguments that ``called`` lists, such as
    (params, apply_fn, batch), and the argument after them if there are ``collections``.
    """
    count, every = len(called.arguments) + bool(collections), [*takes.parameters.values()]
    required = [p.name for p in every if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if missing := [name for name in required if name not in extra_trees]:
        raise TypeError(
            f"{called.name} takes {missing[0]!r} by name, and the step was not given it: "
            f"step(..., extra_trees={{{missing[0]!r}: tree}})."
        )
    # Exclude arguments that the step fills by position: a tree of such a name would be passed twice.
    further = {
        parameter.name for i, parameter in enumerate(every) if parameter.kind is parameter.KEYWORD_ONLY or i >= count
    }
    unknown = [name for name in extra_trees if name not in further]
    if unknown and inspect.Parameter.VAR_KEYWORD not in [parameter.kind for parameter in every]:
        written = called.call_text(*["collections"] * bool(collections), "*", unknown[0])
        raise TypeError(
            f"the step was given extra_trees with the name {unknown[0]!r}, and {called.name} takes "
            f"{sorted(further) or 'no further trees'}. Write {written}."
        )


def check_model(model: object) -> None:
    """Raises a ``TypeError`` unless ``model`` is an object with ``init`` and ``apply``."""
    if isinstance(model, type):
        raise TypeError(f"the model is {kind_of(model)}; pass an instance of it, {model.__name__}(...).")
    if not (hasattr(model, "init") and hasattr(model, "apply")):
        if system := other_system(model):
            raise TypeError(
                f"the model is {kind_of(model)} of {system.package}, which has no init and apply; pass "
                f"{system.passed_as}, with a function that makes the model."
            )
        raise TypeError(
            f"the model is {kind_of(model)}, which has no init and apply as a Linen module does. The arguments are "
            "(model, tx, mesh, rng, *inputs) of create_train_state, (model, mesh, rng, *inputs) of init_sharded."
        )


def check_keys(rng: PyTree, taker: str, single: bool = False) -> None:
    """Raises a ``TypeError`` unless ``rng`` is a key or a dict of keys; with ``single`` an array of keys raises, too.

    A key is an array of dtype key, or an old-style uint32[2]. ``taker`` names the function that takes the key.
    """
    for path, leaf in trees.leaves_with_path(rng) or [(".", rng)]:
        dtype, ndim = getattr(leaf, "dtype", None), getattr(leaf, "ndim", 0)
        key_ndim = 0 if dtype is not None and is_prng_key(leaf) else 1  # an old-style key is uint32[2]
        if (key_ndim and dtype != np.uint32) or ndim < key_ndim or (single and ndim > key_ndim):
            name, seed = named_leaf("rng", path), leaf if isinstance(leaf, int) else "seed"
            raise TypeError(f"{name} is {kind_of(leaf)}, where {taker} takes a key: pass jax.random.key({seed}).")


def check_shapes(variables: Mapping[str, PyTree], mesh: Mesh | AbstractMesh) -> None:
    """Raises a ``ValueError`` if a box splits a dim over mesh axes whose number of devices does not divide the dim.

    ``variables`` are the freshly initialised variables: a tree with boxes for each collection ("params" and further),
    by name.
    """
    for name, tree in variables.items():
        for path, leaf in trees.sharded_leaves(tree):
            trees.check_divides(path if name == "params" else f"({name}) {path}", leaf, mesh.shape)


# ----------------------------------------------------------------------------------------------- the state and its mesh


def collections_of(state: Any) -> Mapping[str, PyTree]:
    """Returns the collections of a state; {} for a plain Flax ``TrainState``."""
    return getattr(state, "collections", {})


def frozen_trees(extra_trees: Mapping[str, PyTree]) -> Mapping[str, PyTree]:
    """Returns ``extra_trees``, further trees of a step by name, as a loss function receives them: without gradients.

    Boxed leaves stay boxed, and are marked as frozen; leaves without a box pass ``jax.lax.stop_gradient``.
    """

    def still(leaf: Any) -> Any:
        return frozen(split_by_model(leaf)) if is_box(leaf) else jax.lax.stop_gradient(leaf)

    return trees.map_leaves(still, extra_trees)


def check_call(
    state: Any, rng: PyTree, local: PyTree, mesh: Mesh | AbstractMesh, metric: object | None, extra_trees: PyTree
) -> None:
    """Checks the arguments of a step except the batch, during tracing; ``local`` is the state of ``metric``.

    Raises:
      TypeError: the state is not a ``TrainState``, or ``rng`` is not a single key.
      RuntimeError: the state was donated; only in a call without ``jax.jit``.
      ValueError: a leaf is on a mesh with other axes than the step's mesh; XLA would end the process, or return the
        leaf with another sharding. (A batch may be on any mesh of the same devices: it is not donated.) Or ``local`` is
        passed without a metric, or is missing with a metric.
    """
    if rng is not None:
        check_keys(rng, "step(state, batch, rng)", single=True)
    if missing := [name for name in STATE_FIELDS if not hasattr(state, name)]:
        raise TypeError(
            f"{STEP}, and its state is {kind_of(state)}, not a TrainState: it has no {missing[0]!r}. "
            "create_train_state makes one; a step returns a pair, state, metrics = step(state, batch, rng)."
        )
    # JAX repeats a step without jit to find a NaN, also on donated arrays, and JAX 0.10 then reads freed memory. The
    # text begins as the text of JAX, ``nan_inputs.DELETED``.
    if isinstance(state.step, jax.Array) and not isinstance(state.step, Tracer) and state.step.is_deleted():
        raise RuntimeError(
            "Array has been deleted: state.step was donated to an earlier call of the step; pass a state in memory."
        )
    of_state = {name: getattr(state, name) for name in ("step", "params", "opt_state")}
    of_state["collections"] = collections_of(state)
    check_mesh_of({"state": of_state, "rng": rng, "local": local, "extra_trees": extra_trees}, mesh)
    if (local is None) != (metric is None):
        raise ValueError(f"make_train_step has {metric=}, and its step was given local={kind_of(local)}.")


def check_evaluated(state: Any, local: PyTree, extra_trees: PyTree, mesh: Mesh | AbstractMesh) -> None:
    """Checks the arguments of an evaluation step except the batch, during tracing.

    Args:
      state: the ``TrainState``.
      local: the state of the metric, on each device.
      extra_trees: further parameters that the evaluation function reads, by name.
      mesh: the mesh of the evaluation.
    Raises:
      TypeError: ``state`` has no params or apply_fn, or ``local`` is not the state of a metric.
      ValueError: a leaf of ``state``, ``local`` or ``extra_trees`` is on a mesh with other axes than ``mesh``.
    """
    if missing := [name for name in ("params", "apply_fn") if not hasattr(state, name)]:
        raise TypeError(
            f"an evaluation takes (state, batch, local), and its state is {kind_of(state)}, which has no "
            f"{missing[0]!r}. Pass the TrainState; to evaluate other parameters, state.replace(params=...)."
        )
    if not isinstance(local, Local):
        raise TypeError(
            f"an evaluation takes (state, batch, local), and its local is {kind_of(local)}, not the state of a "
            "metric. Pass metric.empty(batch_axes, mesh), or the last one that the step returned."
        )
    of_state = {"params": state.params, "collections": collections_of(state)}
    check_mesh_of({"state": of_state, "local": local, "extra_trees": extra_trees}, mesh)


def check_mesh_of(arguments: dict[str, PyTree], mesh: Mesh | AbstractMesh) -> None:
    """Raises a ``ValueError`` if a traced array in ``arguments`` is on a mesh with other axes than the step's ``mesh``.

    Compared are names, sizes and order of axes of more than one device.
    """
    # Axes of size 1 split nothing, so ignore them; the order of the remaining axes matters.
    spread_sizes = [(axis, size) for axis, size in mesh.shape.items() if size > 1]
    for path, leaf in trees.sharded_leaves(arguments):
        leaf_mesh = jax.typeof(leaf.value).sharding.mesh
        if not leaf_mesh.empty and [(axis, size) for axis, size in leaf_mesh.shape.items() if size > 1] != spread_sizes:
            raise ValueError(
                f"'{path}' lies on a mesh {dict(leaf_mesh.shape)}, and the step was made for a mesh "
                f"{dict(mesh.shape)}. Use one mesh for the state, shard_batch and the step; to move a state to another "
                "mesh, save it, and restore into abstract_train_state on that mesh."
            )


def why_not_its_state(tx: optax.GradientTransformation, opt_state: PyTree, params: PyTree) -> str | None:
    """Returns a text, why ``opt_state`` cannot be a state of the optimizer ``tx`` for ``params``; None if it can.

    ``params`` have no boxes. Compared with ``tx.init(params)`` are the paths and shapes of leaves, then the tree
    structure.
    """
    # Compare shapes first: users look for the path of a leaf. Trees with equal leaves may still differ in structure.
    made: Any = jax.eval_shape(tx.init, params)
    expected_shapes, actual_shapes = (
        {path: np.shape(leaf) for path, leaf in trees.leaves_with_path(tree)} for tree in (made, opt_state)
    )
    different = sorted(
        path
        for path in expected_shapes.keys() | actual_shapes.keys()
        if expected_shapes.get(path) != actual_shapes.get(path)
    )
    if not different and str(jax.tree.structure(made)) == str(jax.tree.structure(opt_state)):
        return None
    reason = "its leaves are in another tree than tx.init makes"
    if different:
        path = different[0]
        has, needs = (f"of shape {of[path]}" if path in of else "none" for of in (actual_shapes, expected_shapes))
        reason = f"its leaf '{path}' is {has}, and tx.init makes {needs}"
    return (
        f"state.opt_state is not a state of state.tx for state.params: {reason}. After a change of the "
        "optimizer or the parameters, or after freezing some, make a new state with create_train_state, and put the "
        "trained parameters into it by state.replace(params=...); or use TrainState.create."
    )


# ------------------------------------------------------------------------------------------------------------ the batch


def check_batch(batch: PyTree, layout: BatchLayout | None, num_minibatches: int = 1, padding: str = WEIGHTED) -> None:
    """Checks the leaves of a batch: rows [b, ...] of the same b examples, or scalars, which are not split.

    Devices times minibatches must divide the rows.

    Args:
      batch: a global batch, or with ``layout=None`` the batch of a device.
      layout: splits the rows over the devices along some axes.
      num_minibatches: number of minibatches of each device.
      padding: description, for errors, of how the caller passes weight 0 for padded rows.
    Raises:
      ValueError: leaves have different numbers of rows, or no rows, or a number of rows that does not divide; a leaf is
        a parameter in a box; or a list contains numbers. Names the path and both numbers.
      TypeError: a leaf is not an array of numbers.
    """
    count, divisor = num_minibatches, f"{num_minibatches=}"
    if layout is not None:
        sizes = {axis: layout.mesh.shape[axis] for axis in layout.row_axes}
        count *= math.prod(sizes.values())
        divisor = f"the mesh of {sizes}, {count // num_minibatches} devices"
        if num_minibatches > 1:
            divisor += f" times {num_minibatches=}, {count} minibatches in all,"
    leaves = trees.leaves_with_path(batch)
    for path, leaf in leaves:
        if is_box(leaf):
            name = path.partition("/")[0]
            raise ValueError(
                f"{named_leaf('batch', path)} is a parameter in a box, split as {leaf.names}, and a batch "
                "is split by its rows. Pass parameters of a second model (a teacher, a reference) by name: "
                f"step(..., extra_trees={{'{name}': params}}), for loss_fn(params, apply_fn, batch, rng, *, {name})."
            )
        if not isinstance(leaf, jax.Array) and (reason := why_no_array(leaf)):
            raise TypeError(f"{named_leaf('batch', path)} is {reason}")
    rows = [(path, np.shape(leaf)) for path, leaf in leaves if np.ndim(leaf)]
    if len(rows) < len(leaves):
        _check_no_list_of_numbers(batch)
    for path, shape in rows:
        examples, rest, (first_path, first_shape) = shape[0], shape[0] % count, rows[0]
        if examples == first_shape[0] and examples > 0 and not rest:
            continue
        name = named_leaf("batch", path)
        if examples != first_shape[0]:
            raise ValueError(
                f"{name} of shape {shape} holds {examples} examples, but {named_leaf('batch', first_path)} of shape "
                f"{first_shape} holds {first_shape[0]}. All leaves of a batch have the rows of the same examples; what "
                "has none is a scalar."
            )
        if examples == 0:
            raise ValueError(f"{name} of shape {shape} holds no examples; the mean over none is not a number.")
        raise ValueError(
            f"{name} of shape {shape} holds {examples} examples, which {divisor} does not divide; the last {rest} "
            f"would be dropped. Pad the batch to {examples - rest + count} examples (with weight 0, "
            f"{padding}), or choose a divisor of {examples}."
        )


def _check_no_list_of_numbers(batch: PyTree) -> None:
    """Raises a ``ValueError`` if a list or tuple in the batch has only numbers: JAX would replicate each number."""
    # Group leaves by the path of their list: a list with an array, or with a tree as an entry, is an ordinary tree.
    by_list: dict[tuple[Any, ...], list[Any]] = {}
    with_trees: set[tuple[Any, ...]] = set()
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        with_trees.update(path[:depth] for depth in range(len(path) - 1))
        if path and isinstance(path[-1], jax.tree_util.SequenceKey):
            by_list.setdefault(path[:-1], []).append(leaf)
    for path, leaves in by_list.items():
        if path not in with_trees and not any(map(np.ndim, leaves)):
            raise ValueError(
                f"{named_leaf('batch', trees.path_string(path))} is a list or tuple of {len(leaves)} numbers, which to "
                "JAX are as many leaves. One value for each example: pass np.asarray(...). Scalars that all devices "
                "get: give them names, as {'temperature': 0.5}."
            )
