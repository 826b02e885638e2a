"""The training state on a mesh: initialised, abstract, and updated. Only this file knows Flax's ``TrainState``."""

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
from jax import Array
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from xlstm_jax.accelerators import absent_device
from xlstm_jax.common_types import AxisNames, Metrics, Model, PyTree
from xlstm_jax.distributed.data_parallel import placement, trees
from xlstm_jax.distributed.data_parallel.extension import arranged
from xlstm_jax.distributed.data_parallel.freezing import Trainable, with_frozen
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_box, split_by_model, true_value
from xlstm_jax.distributed.data_parallel.modules import noting_stacks
from xlstm_jax.distributed.data_parallel.unconstrained_boxes import boxes_without_constraints
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.dtypes import value_dtype
from xlstm_jax.distributed.device_mesh.batch_layout import num_shards
from xlstm_jax.distributed.device_mesh.checks import auto_mesh, mesh_axes
from xlstm_jax.distributed.optimizers.extra_args import GRAD, GRAD_FN, VALUE, VALUE_FN, taking_extra_args
from xlstm_jax.distributed.optimizers.lookahead import with_plain_params
from xlstm_jax.distributed.optimizers.sharded_optimizer import ON_DEVICES, Placement, Trained, sharded_optimizer
from xlstm_jax.distributed.optimizers.state import given_state, trainable
from xlstm_jax.distributed.training.arguments import collections_of, why_not_its_state
from xlstm_jax.distributed.training.moments import CreatedState, NewModel, NewVariables, run_checks
from xlstm_jax.wording import TIMES, Bar, format_bytes, notebook_html, rich_table

PARTS = ("params", "opt_state", "collections")
FlaxTrainState = train_state.TrainState
State = TypeVar("State", bound=FlaxTrainState)  # ours, Flax's own, or a subclass of either


class TrainState(FlaxTrainState):
    """Flax's ``TrainState``, with the collections that the model keeps beside its parameters.

    ``collections`` is all that ``model.init`` returned beside "params", as ``{"batch_stats": ...}``: equal on all
    devices, apart from leaves in boxes. For most models it is empty, and a plain Flax ``TrainState`` does as well.

    ``sees_boxes`` says of the optimizer's state that ``create`` made it of parameters in boxes, so that its moments
    have these boxes. ``create_train_state`` and updates on global arrays make states that follow ``ShardedOptimizer``.

    >>> state = TrainState.create(apply_fn=nn.Dense(4).apply, params={}, tx=optax.sgd(0.1))
    >>> state.collections, state.replace(collections={"batch_stats": {"mean": 0.0}}).collections
    ({}, {'batch_stats': {'mean': 0.0}})
    >>> state.replace(params={"kernel": jnp.ones((16, 32))})
    <TrainState at step 0: params 2 KiB, 2 KiB per device, leaves: 1>
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**{"repr": False} | options)  # else each dataclass writes its fields in full

    def __repr__(self) -> str:  # in full, a state has thousands of characters
        title, rows = _title_and_rows(self)
        parts = [f"{part} {total}, {of_device} per device, leaves: {leaves}" for part, leaves, total, of_device in rows]
        return f"<{title}: {'; '.join(parts) or 'nothing'}>"

    def _repr_html_(self) -> str:
        title, rows = _title_and_rows(self)
        table = rich_table(title, ["part", "leaves", "bytes", "per device"], rows)
        return notebook_html(table, "What each device keeps, by leaf", _bars(self))

    # Keyword-only, so that a subclass may have fields without a default after it.
    collections: Mapping[str, PyTree] = struct.field(default_factory=dict, kw_only=True)
    sees_boxes: bool = struct.field(default=False, pytree_node=False, kw_only=True)

    @classmethod
    def create(
        cls, *, apply_fn: Callable[..., Any], params: PyTree, tx: optax.GradientTransformation, **fields: Any
    ) -> "TrainState":
        """As Flax's, but the optimizer does not see frozen parameters."""
        if not isinstance(params, optax.LookaheadParams):
            tx = with_plain_params(tx)
        # Flax's `create` calls tx.init on what it gets, so the frozen leaves come back afterwards.
        state: TrainState = super().create(apply_fn=apply_fn, params=trees.without_frozen(params), tx=tx, **fields)
        in_boxes = any(is_box(leaf) for _, leaf in trees.leaves_with_path(state.opt_state))
        return state.replace(params=params, sees_boxes=in_boxes)

    def apply_gradients(self, *, grads: PyTree, **kwargs: Any) -> Self:
        """As Flax's, for gradients with or without boxes: those that ``value_and_grad`` returns, say.

        Outside of ``shard_map`` the optimizer sees global arrays without boxes and padding, as in ``make_train_step``:
        all of optax is exact there. Inside, and with a state that was made of boxed parameters, it sees what it is
        given: see ``elementwise_only``.
        """
        mesh = _mesh_of(self.params)
        if mesh is None or self.sees_boxes or collectives.manual_axes():
            return super().apply_gradients(grads=grads, **kwargs)

        def gradient(leaf: Sharded, grad: Any) -> Any:
            """Without box and padding, as the optimizer sees it; None for a leaf that takes no gradient."""
            return true_value(leaf.replace(value=trees.stored_values(grad))) if leaf.is_differentiable else None

        bare = trees.map_sharded(gradient, self.params, grads)
        return _replaced(self, _updated(self, bare, mesh, {})[0]).replace(**kwargs)


def _mesh_of(params: PyTree) -> Mesh | AbstractMesh | None:
    """The mesh that boxed parameters lie on, by their values or, where these are traced, by their types."""
    values = [trees.stored_values(leaf) for _, leaf in trees.leaves_with_path(params) if is_box(leaf)]
    shardings = [getattr(jax.typeof(x) if isinstance(x, Tracer) else x, "sharding", None) for x in values]
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding) and not s.mesh.empty), None)


def init_sharded(
    model: Model,
    mesh: Mesh | AbstractMesh,
    rng: PyTree,
    *inputs: PyTree,
    batch_axes: AxisNames,
    trainable: Trainable | None = None,
    frozen_dtype: DTypeLike | None = None,
    **kwargs: Any,
) -> PyTree:
    """Initialises a model whose modules are wrapped; every device computes only the shards that it keeps.

    For every mesh the values are those of ``jax.jit(plain_model.init)`` on one device: the same random bits, and floats
    to within 2 or 3 units in the last place (XLA may compile a function such as ``erf_inv`` otherwise for a shard). An
    initializer that factors a matrix (``orthogonal``) is the exception: each device computes the whole leaf, and it
    agrees to rounding.

    >>> model = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16)
    >>> params = init_sharded(model, mesh, jax.random.key(0), jnp.ones((8, 32)), batch_axes=("dp", "fsdp"))["params"]
    >>> params["kernel"].names, params["kernel"].value.shape, params["kernel"].value.addressable_shards[0].data.shape
    (('fsdp', None), (32, 16), (8, 16))

    Args:
      model: a module with ``shard_module_params`` around it or its parts. Parts that are not wrapped stay whole.
      mesh: the mesh, with the axes that the wrappers name.
      rng: a key, or a dict of keys, as ``model.init`` takes it.
      *inputs: example inputs with global shapes, the same in every process; split over ``batch_axes`` where their
        leading dim divides.
      batch_axes: the axes that the batch is split over.
      trainable, frozen_dtype: which parameters are frozen, beside those that wrappers have frozen, and the dtype in
        which these are stored: see ``freeze_params``. Values are those of ``model.init``, cast by the device that
        computes them.
      **kwargs: passed to ``model.init`` as they are, as ``train=False``.
    Returns:
      The variables: global arrays on the mesh, boxed where they are split.
    Raises:
      ValueError: a wrapper or a box names an axis that the mesh does not have; or as ``freeze_params``. Or processes
        have different keys: all raise it.
      TypeError: as ``freeze_params``.
    """
    freezing: dict[str, Any] = {"trainable": trainable, "frozen_dtype": frozen_dtype}
    init = jitted_init(model, mesh, rng, *inputs, batch_axes=batch_axes, **freezing, **kwargs)
    run_checks("values", NewModel(model, mesh, rng))
    # jit does not split NumPy arrays over devices of several processes.
    return init(rng, jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, inputs))


def jitted_init(
    model: Model,
    mesh: Mesh | AbstractMesh,
    rng: PyTree,
    *inputs: PyTree,
    batch_axes: AxisNames,
    trainable: Trainable | None = None,
    frozen_dtype: DTypeLike | None = None,
    **kwargs: Any,
) -> jax.stages.Wrapped:
    """The ``jax.jit`` function of ``(rng, inputs)`` that ``init_sharded`` calls, to be lowered and looked at.

    >>> rng, x = jax.random.key(0), jnp.ones((8, 32))
    >>> jitted_init(nn.Dense(16), mesh, rng, x, batch_axes="dp").lower(rng, (x,)).out_info["params"]["kernel"].shape
    (32, 16)
    """
    run_checks("model", NewModel(model, mesh, rng))
    mesh = auto_mesh(mesh)
    axes = mesh_axes(mesh, batch_axes, "batch_axes")

    def init(rng: PyTree, inputs: tuple[PyTree, ...]) -> PyTree:
        # Wrapped modules see the sizes of the axes here, and box global values accordingly.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), boxes_without_constraints():
            variables = trees.with_mesh_names(model.init(rng, *inputs, **kwargs))
            if "params" in variables:
                variables = {**variables, "params": trees.map_leaves(split_by_model, variables["params"])}
            variables = with_frozen(variables, trainable, frozen_dtype)
            if "params" in variables:
                variables = {**variables, "params": arranged(variables["params"], dict(mesh.shape))}
            return variables

    def input_sharding(x: Any) -> NamedSharding:
        splits = np.ndim(x) > 0 and np.shape(x)[0] % num_shards(mesh, axes) == 0
        return NamedSharding(mesh, PartitionSpec(axes) if splits else PartitionSpec())

    given = (NamedSharding(mesh, PartitionSpec()), jax.tree.map(input_sharding, inputs))
    made = jax.eval_shape(init, rng, inputs)
    out = placement.shardings(made, mesh)
    run_checks("shapes", NewVariables(made, mesh))
    return jax.jit(init, in_shardings=given, out_shardings=out)


def create_train_state(
    model: Model,
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    rng: PyTree,
    *inputs: PyTree,
    batch_axes: AxisNames,
    whole_ok: bool = False,
    trainable: Trainable | None = None,
    frozen_dtype: DTypeLike | None = None,
    offload: Placement = ON_DEVICES,
    **kwargs: Any,
) -> TrainState:
    """A Flax ``TrainState`` on the mesh: parameters by ``init_sharded``, the optimizer's moments split like them.

    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> state = create_train_state(model, optax.adam(1e-3), mesh, jax.random.key(0), x, batch_axes=("dp", "fsdp"))
    >>> state.opt_state[0].mu["kernel"].sharding.spec == state.params["kernel"].value.sharding.spec
    True

    Args:
      model, mesh, rng, *inputs, batch_axes, trainable, frozen_dtype, **kwargs: see ``init_sharded``.
      tx: any optax optimizer but those that docs/optimizers.md names as refused. It is initialised on the parameters
        without boxes, as global arrays. The slow weights of ``optax.lookahead`` lie in its state: see ``slow_params``.
      whole_ok: do not warn where no parameter is split, or 5 % of their bytes are not, or where a wrapper gathers all
        layers of a scan at once.
      offload: what lies in the memory of the host; steps read it off the state, and need no option for it.
    Returns:
      ``TrainState(step=0, apply_fn=model.apply, params, tx, opt_state, collections)``: ``params`` boxed where they are
      split, ``opt_state`` split like the parameters, and boxed only where these are padded; ``collections`` all else
      that ``model.init`` made, as ``{"batch_stats": ...}``, whole on every device unless the model has boxed it.
    Raises:
      ValueError: a collection is of single examples (a cache), or holds what the model has sown; names it, and how to
        leave it out. Or a transform within ``tx`` needs what no step has; names both.
    """
    run_checks("optimizer", tx)
    tx = with_plain_params(tx)
    mesh = auto_mesh(mesh)
    # Layers that a wrapper would gather at once show only while the model is initialised.
    with noting_stacks() as stacks:
        freezing: dict[str, Any] = {"trainable": trainable, "frozen_dtype": frozen_dtype}
        variables = dict(init_sharded(model, mesh, rng, *inputs, batch_axes=batch_axes, **freezing, **kwargs))
    params = variables.pop("params", {})
    run_checks("state", CreatedState(model, tx, mesh, rng, inputs, kwargs, params, variables, stacks, whole_ok))
    # On the mesh from the beginning: a step returns it there, and another sharding would compile the second step again.
    step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, PartitionSpec()))
    opt_state = sharded_opt_state(tx, params, mesh, offload)
    # Strongly typed, as a step returns them: after a weak type the second step would compile again.
    kept = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), variables)
    return TrainState(step=step, apply_fn=model.apply, params=params, tx=tx, opt_state=opt_state, collections=kept)


def sharded_opt_state(
    tx: optax.GradientTransformation, params: PyTree, mesh: Mesh | AbstractMesh, offload: Placement = ON_DEVICES
) -> PyTree:
    """Returns the first state of an optimizer, split over the mesh like the parameters that it belongs to."""
    optimizer = sharded_optimizer(tx, params, mesh, offload.wrap)

    def init(params: PyTree) -> PyTree:
        # Copies, because a step donates each buffer once, and some optimizers keep the parameters themselves. Strongly
        # typed, because a step returns strong types: after a weak type the second step would compile again.
        return jax.tree.map(lambda x: jnp.array(x, x.dtype), optimizer.init(params))

    # The shapes of the state are known only once tx.init was traced; where each leaf lies follows from them.
    out = optimizer.shardings(jax.eval_shape(init, params))
    return jax.jit(init, out_shardings=out)(params)


def abstract_train_state(
    model: Model,
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    rng: PyTree,
    *inputs: PyTree,
    batch_axes: AxisNames,
    offload: Placement = ON_DEVICES,
    **kwargs: Any,
) -> TrainState:
    """What ``create_train_state`` would return, without allocating it: the target of a restore.

    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> state = abstract_train_state(model, optax.adam(1e-3), mesh, jax.random.key(0), x, batch_axes=("dp", "fsdp"))
    >>> type(state.params["kernel"].value), state.params["kernel"].value.sharding.spec
    (<class 'jax.ShapeDtypeStruct'>, P('fsdp',))

    Arguments and errors are those of ``create_train_state``; ``rng`` and inputs may be ``ShapeDtypeStruct``, the mesh
    without devices. Leaves are ``ShapeDtypeStruct`` with shardings, boxed where parameters are split.
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
        params=placement.shardings(state.params, mesh),
        opt_state=optimizer.shardings(state.opt_state),
        collections=placement.shardings(state.collections, mesh),
    )
    return trees.map_values(with_sharding, state, of_state)


def updated_state(
    state: State,
    grads: PyTree,
    loss: Array,
    value_fn: Callable[[PyTree], Array],
    grad_fn: Callable[..., PyTree],
    mesh: Mesh | AbstractMesh,
    collections: Mapping[str, PyTree],
) -> tuple[State, Metrics]:
    """Returns the state after the optimizer's update on global arrays, in the same boxes and places, and its metrics.

    ``value_fn`` and ``grad_fn`` compute loss and gradients of the batch at other parameters, for line searches and SAM.
    """
    grads = trainable(grads)
    given = {VALUE: loss, GRAD: grads, VALUE_FN: value_fn, GRAD_FN: grad_fn}
    after, metrics = _updated(state, grads, mesh, collections, **given)
    updated = _replaced(state, after)
    if not collections:
        return updated, metrics
    shardings = placement.shardings(after.collections, mesh)
    return updated.replace(collections=jax.lax.with_sharding_constraint(after.collections, shardings)), metrics


def _replaced(state: State, after: Trained) -> State:
    """Returns the state with the parts that an update on global arrays has made, but for collections."""
    stored: dict[str, Any] = {"sees_boxes": False} if isinstance(state, TrainState) else {}
    return state.replace(step=after.step, params=after.params, opt_state=after.opt_state, **stored)


def _updated(
    state: FlaxTrainState,
    grads: PyTree,
    mesh: Mesh | AbstractMesh,
    collections: Mapping[str, PyTree],
    **extra_args: PyTree,
) -> tuple[Trained, Metrics]:
    """Returns what an update by ``grads``, which have no boxes and no padding, makes of the parts of a state."""
    optimizer = sharded_optimizer(state.tx, state.params, mesh)
    before = Trained(state.step, state.params, state.opt_state, collections_of(state))
    try:
        return optimizer.update(grads, before, collections, **extra_args)
    except Exception:  # an optimizer that gets the state of another may raise anything
        # Of shapes alone: nothing is computed from leaves in the memory of the host.
        stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), value_dtype(x)), state.opt_state)
        given, tx = jax.eval_shape(given_state, stored), taking_extra_args(state.tx)
        if reason := why_not_its_state(tx, given, trainable(state.params)):
            raise ValueError(reason) from None
        raise


# ---------------------------------------------------------------------------------------------------- as people read it


def _title_and_rows(state: Any) -> tuple[str, list[list[str]]]:
    """The step; and of each part that is not empty the name, the number of its leaves, bytes in all and per device."""
    rows = []
    for name in PARTS:
        if leaves := [leaf.value for _, leaf in trees.sharded_leaves(getattr(state, name))]:
            counts = zip(*map(_bytes, leaves), strict=True)  # of all leaves: in all, and per device
            rows.append([name, str(len(leaves)), *(format_bytes(sum(count)) for count in counts)])
    # An abstract state, a traced one and one that a step has taken over have no number to show.
    known = not isinstance(state.step, Tracer) and not (isinstance(state.step, jax.Array) and state.step.is_deleted())
    known = known and hasattr(state.step, "__int__")
    return f"{type(state).__name__} {f'at step {int(state.step)}' if known else 'without values'}", rows


def _bars(state: Any) -> list[Bar]:
    """A bar for each leaf, or for those of several layers that are of one size: the largest first."""
    alike: dict[tuple[str, int], list[str]] = defaultdict(list)
    for part in PARTS:
        for path, leaf in trees.sharded_leaves(getattr(state, part)):
            _, size = _bytes(leaf.value)
            pattern = re.sub(r"(?<=_)\d+(?=/)", "*", path, count=1)  # in front there may be the number of a transform
            alike[f"{part} {pattern}", size].append(f"{part} {path}")
    named = [
        (paths[0] if len(paths) == 1 else f"{name} {TIMES}{len(paths)}", size * len(paths))
        for (name, size), paths in alike.items()
    ]
    return [Bar(name, size, format_bytes(size)) for name, size in sorted(named, key=lambda both: -both[1])]


def _bytes(value: PyTree) -> tuple[int, int]:
    """Returns the bytes of an array, and those that a device has of it, also on a mesh without devices."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return 0, 0
    sharding = None if isinstance(value, Tracer) else getattr(value, "sharding", None)
    shard = value.shape if sharding is None else sharding.shard_shape(value.shape)
    itemsize = value_dtype(value).itemsize
    return math.prod(value.shape) * itemsize, math.prod(shard) * itemsize
