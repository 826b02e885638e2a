"""Training state on a mesh: initialisation, abstract shapes, updates. Only this file imports Flax's ``TrainState``."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training import train_state
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from xlstm_jax.accelerators import absent_device
from xlstm_jax.common_types import AxisNames, Metrics, Model, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.boxes import boxes_without_constraints
from xlstm_jax.distributed.data_parallel.extension import reorder_axes
from xlstm_jax.distributed.data_parallel.freezing import Trainable, with_frozen
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_box, true_value
from xlstm_jax.distributed.data_parallel.modules import RECORDED_STACKS, Stacks
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import value_dtype
from xlstm_jax.distributed.data_parallel.wire.communication import set_context
from xlstm_jax.distributed.device_mesh.batch_layout import auto_mesh, check_mesh, mesh_axes, num_shards
from xlstm_jax.distributed.optimizers.lookahead import with_slow_params
from xlstm_jax.distributed.optimizers.sharded_optimizer import (
    ON_DEVICES,
    Placement,
    Trained,
    given_state,
    sharded_optimizer,
    trainable,
)
from xlstm_jax.distributed.optimizers.transforms import sees_pairs, taking_extra_args
from xlstm_jax.distributed.training.arguments import collections_of, why_not_its_state
from xlstm_jax.distributed.training.batch_axes import default_batch_axes
from xlstm_jax.distributed.training.moments import AppliedGradients, CreatedState, NewModel, NewVariables, run_checks
from xlstm_jax.explicit_axes import (
    on_auto_axes,
    outside_set_mesh,
    placed,
    sharding_of_input,
    splits_over_both_types,
    with_auto_axes,
)
from xlstm_jax.formatting import TIMES, Bar, format_bytes, notebook_html, rich_table

PARTS = ("params", "opt_state", "collections")
FlaxTrainState = train_state.TrainState
State = TypeVar("State", bound=FlaxTrainState)  # ours, Flax's own, or a subclass of either


class TrainState(FlaxTrainState):
    """Flax's ``TrainState`` with a field for the model's collections beside "params".

    ``collections`` contains everything that ``model.init`` returned except "params", as ``{"batch_stats": ...}``, equal
    on every device apart from boxed leaves. Most models have no collections; then a plain Flax ``TrainState`` works as
    well.

    ``sees_boxes`` is True if ``create`` initialised the optimizer from boxed parameters, so that its moments have the
    same boxes. ``create_train_state`` and updates on global arrays make states in the layout of ``ShardedOptimizer``
    instead.

    >>> state = TrainState.create(apply_fn=nn.Dense(4).apply, params={}, tx=optax.sgd(0.1))
    >>> state.collections, state.replace(collections={"batch_stats": {"mean": 0.0}}).collections
    ({}, {'batch_stats': {'mean': 0.0}})
    >>> state.replace(params={"kernel": jnp.ones((16, 32))})
    <TrainState at step 0: params 2 KiB, 2 KiB per device, leaves: 1>
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**{"repr": False} | options)  # else each dataclass prints its fields in full

    def __repr__(self) -> str:  # printing every array would take thousands of characters
        title, rows = _title_and_rows(self)
        parts = [f"{part} {total}, {of_device} per device, leaves: {leaves}" for part, leaves, total, of_device in rows]
        return f"<{title}: {'; '.join(parts) or 'nothing'}>"

    def _repr_html_(self) -> str:
        title, rows = _title_and_rows(self)
        table = rich_table(title, ["part", "leaves", "bytes", "per device"], rows)
        return notebook_html(table, "Bytes stored on each device, by leaf", _bars(self))

    # Keyword-only, so that a subclass may have fields without a default after it.
    collections: Mapping[str, PyTree] = struct.field(default_factory=dict, kw_only=True)
    sees_boxes: bool = struct.field(default=False, pytree_node=False, kw_only=True)

    @classmethod
    def create(
        cls, *, apply_fn: Callable[..., Any], params: PyTree, tx: optax.GradientTransformation, **fields: Any
    ) -> "TrainState":
        """Creates the state as Flax's ``create`` does, but hides frozen parameters from the optimizer.

        Frozen parameters are in ``state.params``, and have no moments. The slow weights of ``optax.lookahead`` are
        added to the optimizer's state.
        """
        if not isinstance(params, optax.LookaheadParams) and sees_pairs(tx):
            tx = with_slow_params(tx)
        # Flax's `create` calls tx.init on its params argument, so pass it no frozen leaves and restore them afterwards.
        state: TrainState = super().create(apply_fn=apply_fn, params=trees.without_frozen(params), tx=tx, **fields)
        in_boxes = any(is_box(leaf) for _, leaf in trees.leaves_with_path(state.opt_state))
        return state.replace(params=params, sees_boxes=in_boxes)

    def apply_gradients(self, *, grads: PyTree, **kwargs: Any) -> Self:
        """Returns the updated state, as Flax's ``apply_gradients``; gradients may be boxed, as from ``value_and_grad``.

        Outside ``shard_map`` the optimizer receives global arrays without boxes and padding, as in ``make_train_step``,
        so every optax transform is exact. Inside ``shard_map``, and for a state created from boxed parameters, the
        optimizer receives the gradients as passed: see ``elementwise_only``.

        Raises:
          ValueError: while the step is traced, if types and equations prove that gradients were not averaged over
            devices, or that shards were averaged with each other; names a leaf (see docs/howto/own_step.md).
        """
        run_checks("update", AppliedGradients(self.params, grads))
        mesh = _mesh_of(self.params)
        if mesh is None or self.sees_boxes or collectives.manual_axes():
            return super().apply_gradients(grads=grads, **kwargs)
        mesh = with_auto_axes(mesh)

        def gradient(leaf: Sharded, grad: Any) -> Any:
            """Returns ``grad`` without box and padding, for the optimizer; None for a non-differentiable ``leaf``."""
            return true_value(leaf.replace(value=trees.stored_values(grad))) if leaf.is_differentiable else None

        def updated(state: Self, grads: PyTree) -> Self:
            bare = trees.map_sharded(gradient, state.params, grads)
            return updated_state(state, bare, mesh, {})[0]

        # A dim over axes of both types would be gathered over its Auto axes by a type, which names explicit axes alone.
        named = [leaf.names for _, leaf in trees.sharded_leaves(self.params)]
        typed = on_auto_axes(
            updated, mesh, like=lambda state, grads: state, on_mixed_axes=not any(map(splits_over_both_types, named))
        )
        return typed(self, grads).replace(**kwargs)


def _mesh_of(params: PyTree) -> Mesh | AbstractMesh | None:
    """Returns the mesh of the first boxed parameter that has one: that of its sharding, or of its type if traced.

    None if no boxed parameter has a ``NamedSharding``, as for arrays on a single device.
    """
    values = [trees.stored_values(leaf) for _, leaf in trees.leaves_with_path(params) if is_box(leaf)]
    shardings = [getattr(jax.typeof(x) if isinstance(x, Tracer) else x, "sharding", None) for x in values]
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding) and not s.mesh.empty), None)


@outside_set_mesh
def init_sharded(
    model: Model,
    mesh: Mesh | AbstractMesh,
    rng: PyTree,
    *inputs: PyTree,
    batch_axes: AxisNames | None = None,
    trainable: Trainable | None = None,
    frozen_dtype: DTypeLike | None = None,
    **kwargs: Any,
) -> PyTree:
    """Initialises a model with wrapped modules; every device computes only the shards that it stores.

    On every mesh the values equal those of ``jax.jit(plain_model.init)`` on one device: the same random bits, and
    floats to within 2 or 3 units in the last place (XLA may compile functions such as ``erf_inv`` differently for a
    shard). Initializers that factor a matrix (``orthogonal``) are the exception: each device computes the full leaf,
    and values agree to rounding.

    >>> model = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16)
    >>> params = init_sharded(model, mesh, jax.random.key(0), jnp.ones((8, 32)), batch_axes=("dp", "fsdp"))["params"]
    >>> params["kernel"].names, params["kernel"].value.shape, params["kernel"].value.addressable_shards[0].data.shape
    (('fsdp', None), (32, 16), (8, 16))

    Args:
      model: a module with ``shard_module_params`` around it or its parts. Parameters of unwrapped parts stay
        replicated.
      mesh: the mesh, with the axes that the wrappers name.
      rng: a key or a dict of keys, as for ``model.init``.
      *inputs: example inputs with global shapes, the same in every process; split over ``batch_axes`` if these axes
        divide the leading dim.
      batch_axes: the axes that the batch is split over. None: every axis of the mesh, except the axes over which the
        model itself splits parameters (see ``default_batch_axes``).
      trainable, frozen_dtype: predicate of the trainable parameters (wrappers may freeze more; for an NNX model also a
        filter of NNX, as ``nnx.LoRAParam``), and the dtype in which frozen ones are stored: see ``freeze_params``.
        Values come from ``model.init``, cast by the device that computes them.
      **kwargs: passed to ``model.init`` unchanged, as ``train=False``.
    Returns:
      The variables: global arrays on the mesh, boxed where they are split.
    Raises:
      ValueError: a wrapper or a box names an axis that the mesh does not have; or as ``freeze_params``. Or processes
        pass different keys: every process raises.
      TypeError: the mesh has no devices, and the call is not traced; or as ``freeze_params``.
    """
    freezing: dict[str, Any] = {"trainable": trainable, "frozen_dtype": frozen_dtype}
    # jit cannot split NumPy arrays over devices of several processes.
    leaves, structure = jax.tree.flatten(inputs)
    inputs = jax.tree.unflatten(structure, [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in leaves])
    init = jitted_init(model, mesh, rng, *inputs, batch_axes=batch_axes, **freezing, **kwargs)
    run_checks("values", NewModel(model, mesh, rng, jax.process_count() > 1))
    try:
        return init(rng, inputs)
    except ValueError:
        check_mesh(mesh, devices=True)  # raises for an ``AbstractMesh``: no device computes the values
        raise


def jitted_init(
    model: Model,
    mesh: Mesh | AbstractMesh,
    rng: PyTree,
    *inputs: PyTree,
    batch_axes: AxisNames | None = None,
    trainable: Trainable | None = None,
    frozen_dtype: DTypeLike | None = None,
    **kwargs: Any,
) -> jax.stages.Wrapped:
    """Returns the ``jax.jit`` function of ``(rng, inputs)`` that ``init_sharded`` calls, for lowering and inspection.

    Arguments and errors are as for ``init_sharded``; ``rng`` and inputs may be ``ShapeDtypeStruct``.

    >>> rng, x = jax.random.key(0), jnp.ones((8, 32))
    >>> jitted_init(nn.Dense(16), mesh, rng, x, batch_axes="dp").lower(rng, (x,)).out_info["params"]["kernel"].shape
    (32, 16)
    """
    run_checks("model", NewModel(model, mesh, rng, jax.process_count() > 1))
    mesh = auto_mesh(mesh)
    given_axes = None if batch_axes is None else mesh_axes(mesh, batch_axes, "batch_axes")

    def init(rng: PyTree, inputs: tuple[PyTree, ...]) -> PyTree:
        # Wrapped modules read the axis sizes from this mesh, and box global values accordingly.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), boxes_without_constraints():
            variables = trees.with_mesh_names(model.init(rng, *inputs, **kwargs))
            if trainable is not None or frozen_dtype is not None:
                variables = with_frozen(model, variables, trainable, frozen_dtype)
            if "params" in variables and len(mesh.shape) > 1:
                variables = {**variables, "params": reorder_axes(variables["params"], dict(mesh.shape))}
            return variables

    init = on_auto_axes(init, mesh)
    made = jax.eval_shape(init, rng, inputs)
    out = placed(trees.shardings(made, mesh))
    run_checks("shapes", NewVariables(made, mesh))
    axes = default_batch_axes(made.get("params", {}), mesh) if given_axes is None else given_axes
    # Each input is split along its leading dim, if the devices divide the dim.
    devices, (leaves, structure) = num_shards(mesh, axes), jax.tree.flatten(inputs)
    replicated, split = [placed(NamedSharding(mesh, spec)) for spec in (PartitionSpec(), PartitionSpec(axes))]
    splits = [np.ndim(x) > 0 and np.shape(x)[0] % devices == 0 for x in leaves]
    each = [sharding_of_input(x, split if fits else replicated) for x, fits in zip(leaves, splits, strict=True)]
    return jax.jit(init, in_shardings=(replicated, jax.tree.unflatten(structure, each)), out_shardings=out)


@outside_set_mesh
def create_train_state(
    model: Model,
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    rng: PyTree,
    *inputs: PyTree,
    batch_axes: AxisNames | None = None,
    allow_replicated: bool = False,
    trainable: Trainable | None = None,
    frozen_dtype: DTypeLike | None = None,
    offload: Placement = ON_DEVICES,
    **kwargs: Any,
) -> TrainState:
    """Creates a Flax ``TrainState`` on the mesh: parameters by ``init_sharded``, optimizer moments split alike.

    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> state = create_train_state(model, optax.adam(1e-3), mesh, jax.random.key(0), x, batch_axes=("dp", "fsdp"))
    >>> state.opt_state[0].mu["kernel"].sharding.spec == state.params["kernel"].value.sharding.spec
    True

    Args:
      model, mesh, rng, *inputs, batch_axes, trainable, frozen_dtype, **kwargs: see ``init_sharded``.
      tx: any optax optimizer except those that docs/optimizers.md lists as refused. Its state is initialised from the
        parameters as global arrays without boxes. The slow weights of ``optax.lookahead`` are stored in this state: see
        ``slow_params``.
      allow_replicated: suppresses the warnings about replicated parameters (no parameter is split, or at least 5 % of
        the bytes are not) and about a wrapper that gathers every layer of a scan at once.
      offload: an ``Offload`` stores the optimizer's state in host memory; by default nothing is in host memory. Steps
        read the memory off the state, and need no option.
    Returns:
      ``TrainState(step=0, apply_fn=model.apply, params, tx, opt_state, collections)``: ``params`` boxed where split,
      ``opt_state`` split like the parameters and boxed only where these are padded; ``collections`` holds the remaining
      output of ``model.init``, as ``{"batch_stats": ...}``, replicated unless the model has boxed it.
    Raises:
      ValueError: a collection depends on single examples (a cache) or contains sown values; names the collection and
        how to leave it out. Or a transform within ``tx`` needs something that no step provides; names both.
    """
    run_checks("optimizer", tx)
    tx = with_slow_params(tx) if sees_pairs(tx) else tx
    mesh = auto_mesh(mesh)
    # A wrapper that gathers several layers at once is noticed only while the model is initialised.
    with set_context(RECORDED_STACKS, Stacks()) as stacks:
        freezing: dict[str, Any] = {"trainable": trainable, "frozen_dtype": frozen_dtype}
        variables = dict(init_sharded(model, mesh, rng, *inputs, batch_axes=batch_axes, **freezing, **kwargs))
    params = variables.pop("params", {})
    run_checks("state", CreatedState(model, tx, mesh, rng, inputs, kwargs, params, variables, stacks, allow_replicated))
    # Place the step counter on the mesh now: a step returns it there, and another sharding would compile step 2 again.
    step = jax.device_put(jnp.zeros((), jnp.int32), placed(NamedSharding(mesh, PartitionSpec())))
    opt_state = sharded_opt_state(tx, params, mesh, offload)
    # Strong types, as a step returns them: after a weak type the second step would compile again.
    strong = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), variables)
    return TrainState(step=step, apply_fn=model.apply, params=params, tx=tx, opt_state=opt_state, collections=strong)


def sharded_opt_state(
    tx: optax.GradientTransformation, params: PyTree, mesh: Mesh | AbstractMesh, offload: Placement = ON_DEVICES
) -> PyTree:
    """Returns the initial state of the optimizer ``tx`` as global arrays, split over the mesh like the parameters.

    ``params`` are boxed global arrays. ``offload`` says which memory stores the state: device memory by default.
    """
    optimizer = sharded_optimizer(tx, params, mesh, offload.wrap)

    def init(params: PyTree) -> PyTree:
        # Copy, because a step donates each buffer once, and some optimizers store the parameters themselves. Cast to
        # strong types, as a step returns them: after a weak type the second step would compile again.
        leaves, structure = jax.tree.flatten(optimizer.init(params))
        return jax.tree.unflatten(structure, [jnp.array(x, x.dtype) for x in leaves])

    # Only a trace of tx.init shows the shapes of the state; the sharding of each leaf follows from the shapes.
    init = on_auto_axes(init, mesh)
    out = placed(optimizer.shardings(jax.eval_shape(init, params)))
    return jax.jit(init, out_shardings=out)(params)


@outside_set_mesh
def abstract_train_state(
    model: Model,
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    rng: PyTree,
    *inputs: PyTree,
    batch_axes: AxisNames | None = None,
    offload: Placement = ON_DEVICES,
    **kwargs: Any,
) -> TrainState:
    """Returns a state of shapes with shardings, without arrays, for the result of ``create_train_state``.

    A restore of a checkpoint takes the abstract state as its target.

    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> state = abstract_train_state(model, optax.adam(1e-3), mesh, jax.random.key(0), x, batch_axes=("dp", "fsdp"))
    >>> type(state.params["kernel"].value), state.params["kernel"].value.sharding.spec
    (<class 'jax.ShapeDtypeStruct'>, P('fsdp',))

    Arguments and errors are as for ``create_train_state``; ``rng`` and inputs may be ``ShapeDtypeStruct``, the mesh may
    have no devices. Leaves are ``ShapeDtypeStruct`` with shardings, boxed where parameters are split.
    """
    mesh = auto_mesh(mesh)

    def create(rng: PyTree, inputs: tuple[PyTree, ...]) -> TrainState:
        return create_train_state(model, tx, mesh, rng, *inputs, batch_axes=batch_axes, **kwargs)

    def with_sharding(leaf: Sharded, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(leaf.value.shape, leaf.value.dtype, sharding=sharding)

    with absent_device():
        state = jax.eval_shape(create, rng, inputs)
    optimizer = sharded_optimizer(state.tx, state.params, mesh, offload.wrap)
    of_state = state.replace(
        step=NamedSharding(mesh, PartitionSpec()),
        params=trees.shardings(state.params, mesh),
        opt_state=optimizer.shardings(state.opt_state),
        collections=trees.shardings(state.collections, mesh),
    )
    return trees.map_values(with_sharding, state, of_state)


def updated_state(
    state: State, grads: PyTree, mesh: Mesh | AbstractMesh, collections: Mapping[str, PyTree], **extra_args: PyTree
) -> tuple[State, Metrics]:
    """Runs the optimizer on global arrays, outside ``shard_map``. Returns (new state, metrics of the optimizer).

    The metrics are a dict of numbers by name. The new state has the boxes and shardings of ``state``.

    Args:
      state: the state before the update.
      grads: the mean gradients without boxes and padding; None for leaves that are not trained.
      mesh: the mesh of the state.
      collections: replace the collections of the state; {}: they are unchanged.
      extra_args: further keyword arguments of the optimizer's update, such as the loss.
    Raises:
      ValueError: ``state.opt_state`` is no state of ``state.tx``.
    """
    optimizer = sharded_optimizer(state.tx, state.params, mesh)
    before = Trained(state.step, state.params, state.opt_state, collections_of(state))
    try:
        after, metrics = optimizer.update(grads, before, collections, **extra_args)
    except Exception:  # an optimizer that receives another optimizer's state may raise anything
        # Compare shapes alone, so that no leaf in host memory is read.
        stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), value_dtype(x)), state.opt_state)
        given, tx = jax.eval_shape(given_state, stored), taking_extra_args(state.tx)
        if reason := why_not_its_state(tx, given, trainable(state.params)):
            raise ValueError(reason) from None
        raise
    fields: dict[str, Any] = {"step": after.step, "params": after.params, "opt_state": after.opt_state}
    if isinstance(state, TrainState):
        fields["sees_boxes"] = False  # the new moments have no boxes (``nn.Partitioned``)
    if collections:
        shardings = trees.shardings(after.collections, mesh)
        fields["collections"] = jax.lax.with_sharding_constraint(after.collections, shardings)
    return state.replace(**fields), metrics


# ---------------------------------------------------------------------------------------------------- as people read it


def _title_and_rows(state: Any) -> tuple[str, list[list[str]]]:
    """Returns (title, rows) of a printed summary of ``state``: "TrainState at step 3", and the rows of a table.

    A row is a list of texts, [part, number of leaves, total bytes, bytes per device], for each of "params", "opt_state"
    and "collections" that has leaves. Without a known step the title is "TrainState without values".
    """
    rows = []
    for name in PARTS:
        if leaves := [leaf.value for _, leaf in trees.sharded_leaves(getattr(state, name))]:
            counts = zip(*map(_bytes, leaves), strict=True)  # over leaves: total, and per device
            rows.append([name, str(len(leaves)), *(format_bytes(sum(count)) for count in counts)])
    # The step has no value in an abstract or traced state, or after a step has donated its buffer.
    known = not isinstance(state.step, Tracer) and not (isinstance(state.step, jax.Array) and state.step.is_deleted())
    known = known and hasattr(state.step, "__int__")
    return f"{type(state).__name__} {f'at step {int(state.step)}' if known else 'without values'}", rows


def _bars(state: Any) -> list[Bar]:
    """Returns a bar for each leaf of ``state``, with its bytes per device, for a chart in notebooks; largest first.

    Leaves of equal size whose paths differ by the number of a layer alone share a bar, of their sum.
    """
    alike: dict[tuple[str, int], list[str]] = defaultdict(list)
    for part in PARTS:
        for path, leaf in trees.sharded_leaves(getattr(state, part)):
            _, size = _bytes(leaf.value)
            pattern = re.sub(r"(?<=_)\d+(?=/)", "*", path, count=1)  # the path may begin with a transform's number
            alike[f"{part} {pattern}", size].append(f"{part} {path}")
    named = [
        (paths[0] if len(paths) == 1 else f"{name} {TIMES}{len(paths)}", size * len(paths))
        for (name, size), paths in alike.items()
    ]
    return [Bar(name, size, format_bytes(size)) for name, size in sorted(named, key=lambda both: -both[1])]


def _bytes(value: PyTree) -> tuple[int, int]:
    """Returns (bytes of the global array, bytes on a device) of an array, also of an abstract array.

    Both are equal for an array without a sharding. Returns (0, 0) for a value without shape or dtype.
    """
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return 0, 0
    sharding = None if isinstance(value, Tracer) else getattr(value, "sharding", None)
    shard = value.shape if sharding is None else sharding.shard_shape(value.shape)
    itemsize = value_dtype(value).itemsize
    return math.prod(value.shape) * itemsize, math.prod(shard) * itemsize
