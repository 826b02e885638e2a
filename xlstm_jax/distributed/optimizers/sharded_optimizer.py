"""``ShardedOptimizer``: an optax transform bound to boxed parameters and their mesh.

  tx.init, tx.update                      on arrays without boxes, as on one device
  sharded_optimizer(tx, params, mesh)     on the parts of a training state, on global arrays:
    init(params)                            the initial state of the optimizer, as stored
    update(grads, before, collections)      the parts after an update, in their boxes and places
    shardings(opt_state)                    the sharding of each leaf of a state

An update converts between the arrays of optax and the stored state. The functions of this module, in order of calls:

  trainable, given_state -> tx.update -> stored_state, with_trainable

An optimizer gets arrays without boxes and without padding, so that a norm is the norm of the parameters, and a factored
moment covers its unsharded matrix. The state of a parameter is padded and split over devices like the parameter. A
transform with a custom layout for a leaf of its state puts a ``StateBox`` around the leaf. A transform that needs to
know how its arrays are split calls ``parameter_layout()``: optax passes arrays alone.

A wrapper takes a ``ShardedOptimizer`` and returns a changed ``ShardedOptimizer``. Wrappers add features that an optax
transform cannot have, such as storage of moments on the host, or changes of more than parameters. Each wrapper is in a
separate file. ``WRAPPERS`` registers the wrappers of every optimizer. ``WRAPPERS_OF_STATES`` registers wrappers that
apply only if the optimizer's state has a certain class of node, or a leaf in a certain memory. ``sharded_optimizer``
takes further wrappers.
"""

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import default_registry

from xlstm_jax.common_types import Metrics, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_box, leaf_of, rebox, stored_value, true_value
from xlstm_jax.distributed.data_parallel.policy import choose_shard_dim
from xlstm_jax.distributed.data_parallel.wire.collectives import axes_entry, entry_axes, value_dtype
from xlstm_jax.distributed.data_parallel.wire.communication import set_context
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.distributed.optimizers.transforms import call_update

# -------------------------------------------------------------------------------- arrays of optax, and the stored state

State = TypeVar("State", bound=tuple[Any, ...])


class StateBox(Sharded, repr=False):
    """Box that an optax transform puts around a leaf of its state, to split the leaf over the axes that the box names.

    ``tx.update`` gets the leaf in the box.
    """


def is_state_box(leaf: PyTree) -> bool:
    """Returns whether a leaf of an optimizer's state is in a ``StateBox``, a box from an optax transform."""
    return isinstance(leaf, StateBox)


def owner_of_state(path: str, params: Mapping[str, Any]) -> Any | None:
    """Returns the entry of ``params`` to which the leaf at ``path`` in an optimizer's state belongs; else None.

    The keys of ``params`` are full paths. The longest key that is a suffix of ``path``, compared name by name, is
    chosen: ``0/mu/dense/kernel`` belongs to ``dense/kernel``, not to ``kernel``. For a step counter the result is None.
    If the parameters are a single leaf, with the key ".", every leaf belongs to it.
    """
    parts = path.split("/")
    # Longest first: `mu/a/kernel` belongs to `a/kernel`, even with another `kernel` at the top. "." is the path of a
    # tree that is a single leaf.
    for start in range(len(parts)):
        if (ending := "/".join(parts[start:])) in params:
            return params[ending]
    return params.get(".")


def owners(opt_state: PyTree, params: PyTree) -> list[str]:
    """Returns for each leaf of an optimizer's state, in tree order, the path of the parameter that the leaf belongs to.

    For a leaf without a parameter, such as a count, the entry is the path of the leaf itself.
    """
    paths = {path: path for path, _ in trees.leaves_with_path(params)}
    return [owner_of_state(path, paths) or path for path, _ in trees.leaves_with_path(opt_state)]


def states_of(opt_state: PyTree, state_type: type[State]) -> list[State]:
    """Returns all instances of ``state_type``, as ``SkipNonfiniteState``, at any depth of an optimizer's state.

    Instances inside other instances are included, after the outer instances. The result is [] without instances.
    """

    def is_it(node: Any) -> bool:
        return isinstance(node, state_type)

    states = [node for _, node in trees.flatten_with_path(opt_state, is_it)[0] if is_it(node)]
    return states + [state for outer in states for state in states_of(tuple(outer), state_type)]


def as_parameters(state: PyTree, params: PyTree, caller: str) -> PyTree:
    """Returns weights from an optimizer's state, in the boxes, dtypes and places of ``params`` and in new buffers.

    ``state`` is a tree of weights with the paths of ``params``; a leaf missing there (frozen) is copied from
    ``params``. ``caller`` is the public function, for the ``ValueError`` if a shape differs.
    """
    by_path = dict(trees.sharded_leaves(state))

    def as_parameter(path: str, leaf: Sharded) -> PyTree:
        value, mean = leaf.value, by_path.get(path, leaf).value
        if np.shape(mean) != np.shape(value):
            raise ValueError(
                f"{caller}: what the optimizer keeps of '{path}' has the shape {np.shape(mean)}, and the parameter "
                f"{np.shape(value)}. Pass the opt_state and the params of the same training state, in their boxes."
            )
        # The state may be in host memory (`Offload`) while its parameter is not. Tracers have no place.
        is_placed = isinstance(value, jax.Array) and not isinstance(value, Tracer)
        placed = jax.device_put(mean, value.sharding) if is_placed else mean
        return jnp.array(placed, value_dtype(value))

    return trees.map_values_with_path(as_parameter, params)


def trainable(tree: PyTree) -> PyTree:
    """Returns the tree of parameters or gradients for optax: arrays without boxes and padding.

    A leaf that is not trained (frozen, or not a float) becomes None.
    """
    leaves, structure = trees.flatten_with_path(tree)
    boxes = [leaf_of(leaf) for _, leaf in leaves]
    return jax.tree.unflatten(structure, [true_value(box) if box.is_differentiable else None for box in boxes])


def with_trainable(tree: PyTree, values: PyTree) -> PyTree:
    """Returns ``tree`` with new ``values`` of its trained leaves, in the boxes and with the padding of these leaves.

    ``values`` is a tree as ``trainable`` returns it: arrays without boxes and padding, and None for leaves that are not
    trained, which stay unchanged in the result.
    """
    trainable, put_back = trees.split_differentiable(tree)
    values = jax.tree.leaves(values)
    return put_back([rebox(p, stored_value(p, value)) for p, value in zip(trainable, values, strict=True)])


def stored_state(opt_state: PyTree, params: PyTree) -> PyTree:
    """Converts the state that optax returned to the stored form: a moment gets the padding and box of its parameter.

    ``params`` are the parameters in their boxes. Leaves whose parameter is not padded, whose shape differs from the
    parameter's, or without a parameter stay as they are.
    """
    by_path = dict(trees.sharded_leaves(params))

    def stored(path: str, leaf: PyTree) -> PyTree:
        owner = owner_of_state(path, by_path)
        if owner is None or owner.stores_value or np.shape(leaf) != owner.true_shape:
            return leaf
        return rebox(owner, stored_value(owner, leaf))

    return trees.map_leaves_with_path(stored, opt_state)


def given_state(opt_state: PyTree) -> PyTree:
    """Converts an optimizer's state as stored to the form for ``tx.update``: moments lose their boxes and padding.

    A leaf in a ``StateBox``, a box that the transform itself put around the leaf, stays in the box.
    """
    leaves, structure = trees.flatten_with_path(opt_state)
    given = [true_value(leaf) if is_box(leaf) and not is_state_box(leaf) else leaf for _, leaf in leaves]
    return jax.tree.unflatten(structure, given)


def optimizer_state_shardings(opt_state: PyTree, params: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Returns the shardings of an optimizer's state: each leaf is split like its parameter.

    With ZeRO-1 a leaf is also split over the axes along which its parameter has copies. A leaf with a shape unlike its
    parameter's (a factored moment, a history) is split over the parameter's axes along the largest dim that these axes
    divide; without such a dim it is replicated. A leaf without a parameter is replicated. A leaf in a ``StateBox`` is
    split over the axes that the box names. The values of an update do not depend on the shardings.

    >>> params = {"w": nn.Partitioned(jnp.ones((8, 2)), names=("fsdp", None))}
    >>> opt_state = optax.sgd(0.1, momentum=0.9).init(unbox(params))
    >>> optimizer_state_shardings(opt_state, params, mesh)[0].trace["w"].spec
    P('fsdp',)

    Args:
      opt_state: arrays or ``ShapeDtypeStruct``, without boxes or as stored.
      params: boxed parameters, arrays or abstract.
      mesh: the mesh whose axes the boxes name.
    Returns:
      A tree with a ``NamedSharding`` for every leaf of ``opt_state``.
    """
    # For each parameter the leaf, and the spec of its stored values, without axes of size 1: moments share the spec.
    by_path = {path: (leaf, trees.spread_spec(leaf.names, mesh)) for path, leaf in trees.sharded_leaves(params)}
    leaves, structure = trees.flatten_with_path(opt_state)
    shardings = []
    for path, leaf in leaves:
        if isinstance(leaf, StateBox):
            shardings.append(NamedSharding(mesh, trees.spread_spec(leaf_of(leaf).names, mesh)))
            continue
        owner, spec = owner_of_state(path, by_path) or (None, PartitionSpec())
        if owner is not None and any(owner.names):
            shape, copies = np.shape(leaf.value if is_box(leaf) else leaf), owner.communication.replicas
            if shape != np.shape(owner.value):
                spec = _spec_of_other_shape(shape, owner, mesh)
            elif copies and copies.splits_optimizer_state:
                spec = _split_further(spec, shape, copies, mesh)
        shardings.append(NamedSharding(mesh, spec))
    return jax.tree.unflatten(structure, shardings)


def _spec_of_other_shape(shape: tuple[int, ...], owner: Sharded, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the spec of a leaf of the optimizer's state whose ``shape`` differs from the shape of its parameter.

    The leaf is split over all axes of the parameter, ``owner``, along the largest dim that these axes divide. If the
    axes divide no dim, the leaf is replicated.
    """
    sizes = {axis: mesh.shape[axis] for axis in owner.axes if mesh.shape[axis] > 1}
    # No minimum size: the threshold avoids gathers of small parameters, and state is never gathered.
    dim = choose_shard_dim(shape, (None,) * len(shape), sizes, min_weight_size=0).dim
    return PartitionSpec(*[None] * dim, axes_entry(tuple(sizes))) if sizes and dim is not None else PartitionSpec()


def _split_further(
    spec: PartitionSpec, shape: tuple[int, ...], copies: Copies, mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Returns ``spec`` with a dim also split over the axes along which the parameter has copies (ZeRO-1).

    The dim is the dim with the largest shard among dims whose shards the number of copies divides. Without such a dim,
    or with a single copy, ``spec`` is returned unchanged.

    Args:
      spec: how the parameter splits the leaf of the optimizer's state.
      shape: the global shape of this leaf.
      copies: description of the parameter's copies; only the field ``axes`` is read, the axes along which devices have
        copies of a shard.
      mesh: the mesh of the axes.
    """
    axes = tuple(axis for axis in copies.axes if mesh.shape[axis] > 1)
    entries = [entry_axes(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    # Local sizes: the copies divide the dims after the parameter's axes.
    local_shape = [size // math.prod(mesh.shape[a] for a in entry) for size, entry in zip(shape, entries, strict=True)]
    fitting = [dim for dim, size in enumerate(local_shape) if size % math.prod(mesh.shape[a] for a in axes) == 0]
    if not axes or not fitting:
        return spec
    dim = max(fitting, key=lambda dim: local_shape[dim])
    entries[dim] += axes
    return PartitionSpec(*map(axes_entry, entries))


# -------------------------------------------------------------------------------------------------------- the optimizer


class Trained(NamedTuple):
    """Parts of a training state that an update replaces.

    Attributes:
      step: number of updates.
      params: the parameters, in their boxes.
      opt_state: the optimizer's state, as stored.
      collections: the model's collections beside the parameters; {} if the update must not change the collections.
    """

    step: jax.Array | int
    params: PyTree
    opt_state: PyTree
    collections: Mapping[str, PyTree]


class Update(Protocol):
    """Type of ``ShardedOptimizer.update``."""

    def __call__(
        self, grads: PyTree, before: Trained, collections: Mapping[str, PyTree], **extra_args: PyTree
    ) -> tuple[Trained, Metrics]: ...


class ShardedOptimizer(NamedTuple):
    """Optimizer of boxed parameters on a mesh. Its functions are called while a program on global arrays is traced.

    Attributes:
      init: takes the parameters; returns the initial state, as stored.
      update: takes gradients without boxes and padding (``trainable``), the parts before the update,
        the collections that the step computed, and the extra arguments of optax (``optimizers.transforms``). Returns
        the parts after the update, and metrics of the step.
      shardings: takes a state as stored, arrays or abstract; returns a ``NamedSharding`` for each leaf.
    """

    init: Callable[[PyTree], PyTree]
    update: Update
    shardings: Callable[[PyTree], PyTree]


# Takes an optimizer, its parameters, and the mesh.
Wrapper = Callable[[ShardedOptimizer, PyTree, Mesh | AbstractMesh], ShardedOptimizer]


class Placement:
    """Choice of the memory that stores an optimizer's state: device memory here, host memory in ``Offload``.

    Attributes:
      wrap: None for device memory. In a subclass a wrapper: a method that returns a copy of an optimizer whose function
        ``shardings`` places leaves of the state elsewhere, as ``Offload`` in host memory.
    """

    wrap: Any = None  # a ``Wrapper`` where a subclass has one


ON_DEVICES = Placement()


class WrapperOfStates(NamedTuple):
    """Wrapper of ``update`` that is applied only to states with a certain node or a leaf in a certain memory.

    Attributes:
      needs: the class of the node, such as ``SkipNonfiniteState``, or the memory of the leaf.
      wrap: the wrapper.
    """

    needs: object
    wrap: Wrapper


# Registries; the first entry is the innermost wrapper. ``WRAPPERS_OF_STATES`` are around ``WRAPPERS``.
WRAPPERS: list[Wrapper] = []
WRAPPERS_OF_STATES: list[WrapperOfStates] = []  # filled by ``optimizers``


@dataclass(eq=False)
class ParameterLayout:
    """Layout of global parameters: the mesh, boxed parameters by path, and specs of their optimizer state.

    Parameters and specs are computed on the first access: transforms that do not read the layout pay nothing.
    """

    mesh: Mesh | AbstractMesh
    _tree: PyTree
    _shardings: Callable[[PyTree], PyTree]

    @cached_property
    def params(self) -> Mapping[str, Sharded]:
        return dict(trees.sharded_leaves(self._tree))

    @cached_property
    def specs(self) -> Mapping[str, PartitionSpec]:
        # Gradients, updates and moments have the shapes of the parameters, and the sharding of a state of this shape.
        return {path: sharding.spec for path, sharding in trees.leaves_with_path(self._shardings(self._tree))}


# A context variable, since optax's transforms (such as `chain`) between the step, which has the layout, and `muon` do
# not pass a layout on.
_LAYOUT: ContextVar[ParameterLayout | None] = ContextVar("layout of the parameters that are optimized", default=None)


def parameter_layout() -> ParameterLayout | None:
    """Returns the layout (mesh, boxes and specs) of the parameters that are being optimized.

    The result is None unless ``init`` or ``update`` of a ``ShardedOptimizer`` is running.
    """
    return _LAYOUT.get()


def sharded_optimizer(
    tx: optax.GradientTransformation, params: PyTree, mesh: Mesh | AbstractMesh, *wrappers: Wrapper | None
) -> ShardedOptimizer:
    """Makes a ``ShardedOptimizer`` (init, update and state shardings for boxed parameters) from an optax transform.

    Args:
      tx: the transform.
      params: boxed parameters, arrays or abstract: only boxes, shapes and dtypes are read.
      mesh: the mesh of the parameters.
      *wrappers: functions that take a ``ShardedOptimizer``, ``params`` and ``mesh`` and return a changed optimizer;
        applied in order, the last outermost, after the wrappers of the lists ``WRAPPERS`` and ``WRAPPERS_OF_STATES``.
        None changes nothing.
    """
    # The optimizer without wrappers.
    shardings = partial(optimizer_state_shardings, params=params, mesh=mesh)
    layout = ParameterLayout(mesh, params, shardings)
    padded = [path for path, leaf in trees.sharded_leaves(params) if not leaf.stores_value]

    def init(params: PyTree) -> PyTree:
        with set_context(_LAYOUT, layout):
            opt_state = tx.init(trainable(params))
        return stored_state(opt_state, params) if padded else opt_state

    def plain_update(
        grads: PyTree, before: Trained, collections: Mapping[str, PyTree], **extra_args: PyTree
    ) -> tuple[Trained, Metrics]:
        bare = trainable(before.params)
        with set_context(_LAYOUT, layout):
            updates, opt_state = call_update(tx, grads, given_state(before.opt_state), bare, **extra_args)
        opt_state = stored_state(opt_state, before.params) if padded else opt_state
        new_params = with_trainable(before.params, optax.apply_updates(bare, updates))
        after = Trained(
            step=before.step + 1,
            params=jax.lax.with_sharding_constraint(new_params, trees.shardings(params, mesh)),
            # Shardings of the new state, whose tree may differ from the initial state's: optax.monitor starts without
            # measures.
            opt_state=jax.lax.with_sharding_constraint(opt_state, shardings(opt_state)),
            collections=collections,
        )
        return after, {}

    # Wrappers of every optimizer.
    of_any_state = ShardedOptimizer(init, plain_update, shardings)
    for wrap in WRAPPERS:
        of_any_state = wrap(of_any_state, params, mesh)

    def update(
        grads: PyTree, before: Trained, collections: Mapping[str, PyTree], **extra_args: PyTree
    ) -> tuple[Trained, Metrics]:
        # Wrappers of this state: found are the classes of its nodes, as SkipNonfiniteState, and the memories (of type
        # jax.memory.Space) of its arrays.
        found: set[object] = set()
        waiting = [before.opt_state]
        while waiting:
            node = waiting.pop()
            if (below := default_registry.flatten_one_level(node)) is not None:
                found.add(type(node))
                waiting += below[0]
            elif isinstance(node, jax.Array):
                found.add(jax.typeof(node).memory_space)
        of_this_state = of_any_state
        for needs, wrap in WRAPPERS_OF_STATES:
            if needs in found:
                of_this_state = wrap(of_this_state, params, mesh)
        return of_this_state.update(grads, before, collections, **extra_args)

    optimizer = of_any_state._replace(update=update)
    for wrapper in filter(None, wrappers):
        optimizer = wrapper(optimizer, params, mesh)
    return optimizer
