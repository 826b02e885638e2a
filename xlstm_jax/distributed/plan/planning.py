"""``plan_sharding``: traces ``model.init`` for shapes, and makes a row from each leaf's box (``nn.Partitioned``)."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from xlstm_jax.accelerators import absent_device
from xlstm_jax.common_types import AxisNames, Model, PyTree
from xlstm_jax.distributed.data_parallel.boxes import boxes_without_constraints
from xlstm_jax.distributed.data_parallel.extension import PartialGather, avoids_gather, recording_parts, reorder_axes
from xlstm_jax.distributed.data_parallel.freezing import Trainable, with_frozen
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.planned import Decision, PlannedLeaf, plan_params, planning_mesh
from xlstm_jax.distributed.data_parallel.policy import DEFAULT_MIN_WEIGHT_SIZE, ShardPolicy, next_multiple
from xlstm_jax.distributed.data_parallel.reasons import (
    BoxedByModel,
    NoParameter,
    OfNoParameter,
    OfSeveral,
    Reason,
    Unwrapped,
)
from xlstm_jax.distributed.data_parallel.shard import with_unit
from xlstm_jax.distributed.data_parallel.trees import (
    check_divides,
    leaves_with_path,
    partition_specs,
    sharded_leaves,
    with_mesh_names,
)
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names, entry_axes, value_dtype
from xlstm_jax.distributed.data_parallel.wire.formats import sent_bytes
from xlstm_jax.distributed.optimizers.sharded_optimizer import ON_DEVICES, Placement, owner_of_state, sharded_optimizer
from xlstm_jax.distributed.optimizers.sharded_optimizer import trainable as trainable_leaves
from xlstm_jax.distributed.plan.init_errors import init_error, init_failure, is_library_error
from xlstm_jax.distributed.plan.leaf_plan import NO_BYTES, OPTIMIZER, PARAMETERS, ByteCount, LeafPlan
from xlstm_jax.distributed.plan.section import SECTIONS, noting
from xlstm_jax.distributed.plan.sharding_plan import ShardingPlan
from xlstm_jax.explicit_axes import outside_set_mesh
from xlstm_jax.formatting import format_axes
from xlstm_jax.program_names import HOST_MEMORY


@outside_set_mesh
def plan_sharding(
    model: Model,
    axis_sizes: Mapping[str, int],
    *inputs: PyTree,
    axis_name: AxisNames | None = None,
    min_weight_size: int | None = None,
    tx: optax.GradientTransformation | None = None,
    rng: PyTree = None,
    trainable: Trainable | None = None,
    frozen_dtype: DTypeLike | None = None,
    offload: Placement = ON_DEVICES,
    **kwargs: Any,
) -> ShardingPlan:
    """Plans how ``create_train_state`` shards parameters and optimizer state on a mesh; needs no devices.

    >>> plan = plan_sharding(nn.Dense(256), {"dp": 2, "fsdp": 4}, jnp.ones((8, 1024)), axis_name="fsdp")
    >>> for row in plan.rows:
    ...     print(row.path, row.names, row.reason)
    bias (None,) 256 values are fewer than min_weight_size=262144
    kernel ('fsdp', None) dim 0 of size 1024 is the largest that 4 divides

    In a model with modules wrapped by ``shard_module_params`` the wrappers decide. A model without wrappers is
    planned as ``shard_module_params(model, axis_name, min_weight_size)``.

    Args:
      model: a Linen module, or a model of ``nnx_model``.
      axis_sizes: the axes of the mesh, outermost first, with their sizes: ``{"dp": 4, "fsdp": 64}``, or ``mesh.shape``.
      *inputs: example inputs of the model with global shapes, arrays or ``ShapeDtypeStruct``: the arrays in the loss's
        call of the model, such as ``tokens[:, :-1]``, not the batch.
      axis_name: for a model without wrappers, the axes to split over; None: every axis.
      min_weight_size: for a model without wrappers, see ``shard_module_params``; None: the default there.
      tx: an optax optimizer, whose state the plan then counts.
      rng: a key, or a dict of keys, as for ``model.init``, arrays or abstract; None: any key.
      trainable, frozen_dtype, offload: which parameters are trained, the dtype of the others, and the optimizer state
        in host memory; as for ``create_train_state``.
      **kwargs: further arguments of ``model.init``, such as ``train=False``.
    Returns:
      A plan with a row for each leaf: the sharding, its reason, and the bytes per device.
    Raises:
      ValueError: a size in ``axis_sizes`` is not a positive integer; a wrapper, a box or ``axis_name`` names an unknown
        axis; the axes do not divide the dim of a box made by the model; ``axis_name`` or ``min_weight_size`` is given
        for a model with wrappers; or ``model.init`` fails on the inputs (``InitError``).
      TypeError: ``axis_sizes`` is not a mapping.
    """
    sizes = _checked_sizes(axis_sizes)
    mesh = planning_mesh(sizes)
    sections = [section() for section in SECTIONS]
    # Calls of modules are recorded, since parameters show neither how a head reads its kernel nor most entries of the
    # sections.
    with noting(sections), recording_parts() as parts:
        freeze = partial(with_frozen, model, trainable=trainable, frozen_dtype=frozen_dtype)
        variables = _planned_init(model, mesh, rng, inputs, kwargs, freeze)
        variables, assumed = _decided(model, variables, axis_name, min_weight_size, sizes)
        partition_specs(variables, mesh)  # raises for names that are not mesh axes
        # The order in which training gathers over several axes.
        params = reorder_axes(variables.pop(PARAMETERS, {}), sizes)
        of_params, other_rows = _optimizer_rows(tx, params, mesh, offload)
    if tx is not None:  # outside: sections would note the matrices of this trace, too
        bare = jax.eval_shape(trainable_leaves, params)
        for section in sections:
            section.optimizer(tx, bare)
    rows = []
    for path, leaf in sharded_leaves(params):
        stored = _bytes_of(path, leaf, sizes)
        # A gradient has the bytes and the sharding of its parameter.
        fields = {"parameters": stored, "gradients": stored if leaf.is_differentiable else NO_BYTES, **of_params[path]}
        fields |= _gathering(path, leaf, sizes, parts.get(path)) | {"trainable": leaf.trainable}
        rows.append(_row(path, PARAMETERS, leaf, _reason(leaf), sizes, **fields))
    # Further collections (batch_stats) are replicated, unless the model boxes them.
    for collection, path, leaf in [(name, *entry) for name in variables for entry in sharded_leaves(variables[name])]:
        path = f"({collection}) {path}"
        reason = BoxedByModel(leaf.names) if leaf.axes else NoParameter()
        rows.append(_row(path, collection, leaf, reason, sizes, other=_bytes_of(path, leaf, sizes)))
    entries = {section.name: section.entries(sizes, rows) for section in sections}
    within = {section.role: section.axes_within(entries[section.name]) for section in sections if section.role}
    roles = _roles(params, within, sizes)
    return ShardingPlan(sizes, assumed, (*rows, *other_rows), roles=roles, **entries)


def _roles(
    params: PyTree, within: Mapping[str, Mapping[str, tuple[str, ...]]], sizes: dict[str, int]
) -> dict[str, tuple[str, ...]]:
    """Returns how parameters use each mesh axis: {axis: roles}, with () for an axis without a role.

    Roles: "fsdp": parameters are gathered over the axis; "tensor": the model splits layers over the axis. ``within``
    adds the roles of the plan's sections (features such as experts): {role: {path prefix of parameters: axes}}. For
    parameters below a prefix these axes do not count as "tensor". ``sizes`` has every axis of the mesh, in the order of
    the result.
    """
    leaves = sharded_leaves(params)
    gathered = {axis for _, leaf in leaves for axis in _gathered_axes(leaf)}
    of_sections = {begin: axes for by_path in within.values() for begin, axes in by_path.items()}
    of_layers: set[str] = set()
    for path, leaf in leaves:  # an axis may split both layers and experts
        model_axes = set(leaf.axes) - set(_gathered_axes(leaf))
        of_layers |= model_axes.difference(*(axes for begin, axes in of_sections.items() if path.startswith(begin)))
    # An axis may have several roles: the same devices split weights of one layer and experts of the next.
    by_role = {"fsdp": gathered, "tensor": of_layers}
    by_role |= {role: {axis for axes in by_path.values() for axis in axes} for role, by_path in within.items()}
    return {axis: tuple(role for role, axes in by_role.items() if axis in axes) for axis in sizes}


def _planned_init(
    model: Model,
    mesh: AbstractMesh,
    rng: PyTree,
    inputs: PyTree,
    kwargs: dict[str, Any],
    freeze: Callable[[PyTree], PyTree],
) -> PyTree:
    """Returns the variables of ``model.init`` as shapes, in boxes that record the decisions of the wrappers.

    A wrapper (``shard_module_params``) decides how to split each parameter of a module. Nothing is computed.

    Args:
      model, rng, inputs, kwargs: the call is ``model.init(rng, *inputs, **kwargs)``; None as ``rng``: any key.
      mesh: the abstract mesh on which wrapped modules decide how to split.
      freeze: puts frozen leaves into boxes, and returns the variables.
    Raises:
      InitError: without the mesh ``model.init`` fails on these inputs, too, with the same type of error, which the
        library did not raise. Any other error passes unchanged.
    """

    def init(rng: PyTree, inputs: PyTree) -> PyTree:
        with jax.sharding.use_abstract_mesh(mesh), boxes_without_constraints():
            return freeze(with_mesh_names(model.init(rng, *inputs, **kwargs)))

    # Nothing is computed, so an abstract key is enough.
    key = jax.eval_shape(lambda: jax.random.key(0)) if rng is None else rng
    try:
        # cuDNN attention queries the local GPU for its features. A plan needs shapes alone, which are the same on any
        # GPU.
        with absent_device():
            return dict(jax.eval_shape(init, key, inputs))
    except Exception as error:
        # Wrappers, axis names and frozen leaves raise errors with a cure. An error of the inputs is raised by the
        # plain model, too, without mesh and boxes.
        if (plain := init_failure(model, inputs, kwargs)) is None or type(plain) is not type(error):
            raise
        if is_library_error(plain):
            raise
        raise init_error(model, inputs, kwargs, error) from error


def _checked_sizes(axis_sizes: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(axis_sizes, Mapping):
        raise TypeError(f"axis_sizes={axis_sizes!r} is no mapping; pass the sizes by axis, as {{'dp': 4, 'fsdp': 64}}.")
    as_axis_names(tuple(axis_sizes))
    for axis, size in axis_sizes.items():
        if not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"axis_sizes has {axis!r}: {size!r}, which is no number of devices; pass 1 or more.")
    return {axis: int(size) for axis, size in axis_sizes.items()}


def _decided(
    model: Model, variables: PyTree, axis_name: AxisNames | None, min_weight_size: int | None, sizes: dict[str, int]
) -> tuple[PyTree, str]:
    """Returns (variables in boxes that record how to split each leaf, the wrapper assumed for a plain model as text).

    For a model with wrappers (``shard_module_params``) the boxes exist already: ``variables`` are unchanged, and the
    text is "". For a plain model this function decides, by ``axis_name`` (None: every axis) and ``min_weight_size``
    (None: the default), and the text is the call of the wrapper: "shard_module_params(Dense, 'fsdp', 262144)".

    Raises:
      ValueError: ``axis_name`` or ``min_weight_size`` is given for a model with wrappers, or an axis is unknown.
    """
    if any(isinstance(leaf, PlannedLeaf) for _, leaf in leaves_with_path(variables)):
        options = {"axis_name": axis_name, "min_weight_size": min_weight_size}
        if name := next((name for name, value in options.items() if value is not None), None):
            raise ValueError(
                f"{name}={options[name]!r} is for models without wrappers, and this model has modules wrapped by "
                f"shard_module_params. Leave {name} out, or set it in the call of shard_module_params."
            )
        return variables, ""
    axes = tuple(sizes) if axis_name is None else as_axis_names(axis_name)
    if missing := [axis for axis in axes if axis not in sizes]:
        raise ValueError(f"{axis_name=}: there is no axis {missing[0]!r} in axis_sizes={sizes}. Pass one of these.")
    policy = ShardPolicy(axes, DEFAULT_MIN_WEIGHT_SIZE if min_weight_size is None else min_weight_size)
    over, params = {axis: sizes[axis] for axis in axes}, {PARAMETERS: variables.get(PARAMETERS, {})}
    assumed = f"shard_module_params({type(model).__name__}, {format_axes(axes)}, {policy.min_weight_size})"
    return variables | with_unit(plan_params(params, over, policy), params), assumed


def _gathered_axes(leaf: Sharded) -> set[str]:
    """Returns the mesh axes over which wrappers gather the leaf, without the model's axes (such as tensor parallel)."""
    if not isinstance(leaf, PlannedLeaf):
        return set(leaf.gathered_axes)
    return {axis for decision in leaf.decisions if decision.choice.dim is not None for axis in decision.axes}


def _row(path: str, collection: str, leaf: Sharded, reason: Reason, sizes: dict[str, int], **fields: Any) -> LeafPlan:
    """Returns the row of a leaf in the plan, a ``LeafPlan``.

    Shape, dtype, and mesh axes of each dim are read from ``leaf``, a box around an abstract array. The number of shards
    is the product of the ``sizes`` (of the mesh axes) over which the box splits the leaf. ``fields`` are further fields
    of the row, such as bytes; without ``use_shape`` in ``fields``, it is the leaf's shape.
    """
    shape = leaf.true_shape
    fields.setdefault("use_shape", shape)
    return LeafPlan(
        path=path,
        collection=collection,
        shape=shape,
        dtype=str(leaf.value.dtype),
        names=leaf.store.of_value(leaf.names),
        parts=_count(leaf.axes, sizes),
        reason=reason,
        **fields,
    )


def _count(axes: Iterable[str], sizes: dict[str, int]) -> int:
    """Returns the number of devices along the axes: the product of their ``sizes``."""
    return math.prod(sizes[axis] for axis in axes)


def _bytes_of(path: str, leaf: Sharded, sizes: dict[str, int]) -> ByteCount:
    value = leaf.value
    check_divides(path, leaf, sizes)
    itemsize = value_dtype(value).itemsize
    # ``per_device`` counts the stored array, with padding; ``total`` counts the model's array.
    stored = math.prod(value.shape) * itemsize  # with the padding of a dim that the axes do not divide
    return ByteCount(math.prod(leaf.true_shape) * itemsize, stored // _count(leaf.axes, sizes))


def _reason(leaf: Sharded) -> Reason:
    """Returns why a leaf is split or, for a leaf that no wrapper split, why the last wrapper refused: a ``Reason``.

    If wrappers over different axes (``shard_module_params``) saw the leaf: an ``OfSeveral`` with a reason for each
    tuple of axes. If no wrapper saw the leaf: a reason that says that the model boxed the leaf, or that no module is
    wrapped.
    """
    if not isinstance(leaf, PlannedLeaf):
        return BoxedByModel(leaf.names) if leaf.axes else Unwrapped()
    deciding: dict[tuple[str, ...], Decision] = {}
    for decision in leaf.decisions:
        # Among nested wrappers over the same axes, the first to split the leaf decides; the rest find the leaf split.
        settled = deciding.get(decision.axes)
        if settled is None or settled.choice.dim is None:
            deciding[decision.axes] = decision
    if len(deciding) == 1:
        return next(iter(deciding.values())).choice.reason
    return OfSeveral(tuple((format_axes(axes), decision.choice.reason) for axes, decision in deciding.items()))


def _gathering(path: str, leaf: Sharded, sizes: dict[str, int], part: PartialGather | None) -> dict[str, Any]:
    """Returns the fields of ``LeafPlan`` about gathers of the leaf at ``path``, {name of the field: value}.

    Fields: shape in the module, gathers in a forward pass, bytes of a gather, of a row and of a piece, dtypes of
    communication, and the module that gathers. For a leaf that is not gathered, only ``use_shape``. ``part`` is None,
    or the request of a module (such as the head of a language model) to gather the leaf in pieces along a dim.
    ``sizes`` are the sizes of the mesh axes.
    """
    shape = tuple(leaf.value.shape)
    decisions = leaf.decisions if isinstance(leaf, PlannedLeaf) else ()
    splits = [(decision, dim) for decision in decisions if (dim := decision.choice.dim) is not None]
    gathered = {axis for decision, _ in splits for axis in decision.axes}
    if _count(gathered, sizes) == 1:
        return {"use_shape": decisions[-1].shape if decisions else shape}
    last, dim = splits[-1]
    seen = {axis for entry in last.names for axis in entry_axes(entry)}
    # nn.scan and nn.vmap add leading dims, and each use gathers a single entry along these dims (a layer).
    added = _count(set(leaf.axes) - seen, sizes)
    stored = list(last.shape)
    # A gather sends the stored array, padding included.
    stored[dim] = next_multiple(stored[dim], _count(last.axes, sizes))
    layers = math.prod(shape) // math.prod(stored) // added
    # Dims that no wrapper gathers (tensor parallel) stay split.
    shard = [size // _count(entry_axes(entry), sizes) for size, entry in zip(stored, last.names, strict=True)]
    dtype = last.gather_dtype if leaf.trainable else leaf.communication.sent_as(leaf.value)
    sent = _count(seen & gathered, sizes) * sent_bytes(shard, dim, dtype)
    return {
        "use_shape": last.shape,
        "uses": max(Counter(decision.axes for decision, _ in splits).values()) * layers,
        "gathered_bytes": sent,
        "row_bytes": sent // last.shape[0] if avoids_gather(leaf) else 0,
        "piece_bytes": sent * _piece_size(leaf, part, last, sizes) // stored[part.along] if part else 0,
        "gather_dtype": dtype,
        "grad_scatter_dtype": last.grad_scatter_dtype if leaf.trainable else None,
        "gathered_with": "/".join(path.split("/")[: -leaf.unit_depth]) if leaf.unit_depth else None,
    }


def _piece_size(box: Sharded, part: PartialGather, last: Decision, sizes: dict[str, int]) -> int:
    """Returns how many entries of dim ``part.along`` of the kernel ``box`` a single gather of a piece returns.

    A piece is a part of the kernel. The result is the largest multiple of n that is at most ``part.entries``, or n if
    ``part.entries`` is smaller, but at most the size of the dim; n is the number of devices that split the dim. 0 if
    the kernel cannot be gathered in pieces, but only at once. ``last`` is the decision of the wrapper that split the
    kernel last; ``sizes`` are the sizes of the mesh axes.
    """
    along = part.along
    # A gather by an outer module, or by several wrappers, returns the unsharded kernel.
    if box.unit_depth != 1 or not set(box.axes) <= set(last.axes) or not part.may_be_sent(box):
        return 0
    parts = _count(entry_axes(box.names[along]), sizes)
    return min(max(1, part.entries // parts) * parts, box.value.shape[along])


def _optimizer_rows(
    tx: optax.GradientTransformation | None, params: PyTree, mesh: AbstractMesh, offload: Placement
) -> tuple[Mapping[str, Mapping[str, ByteCount]], list[LeafPlan]]:
    """Returns (bytes of optimizer state of each parameter, plan rows for state that belongs to no parameter).

    The first result is {path of the parameter: {"optimizer": bytes in device memory, "host": bytes in host memory}},
    and reads as {} for a parameter without state. A row is for state such as a step count. Without an optimizer (``tx``
    None) both results are empty. ``params`` are boxed parameters; ``offload`` chooses the state in host memory.
    """
    of_params: dict[str, dict[str, ByteCount]] = defaultdict(lambda: defaultdict(ByteCount))
    other_rows: list[LeafPlan] = []
    if tx is None:
        return of_params, other_rows
    optimizer = sharded_optimizer(tx, params, mesh, offload.wrap)
    opt_state = jax.eval_shape(optimizer.init, params)
    shardings = dict(leaves_with_path(optimizer.shardings(opt_state)))
    paths = {path: path for path, _ in leaves_with_path(params)}
    for path, leaf in sharded_leaves(opt_state):
        # The shardings of training, with copies and offload applied.
        value, sharding = leaf.value, shardings[path]
        stored = math.prod(sharding.shard_shape(value.shape)) * value.dtype.itemsize
        nbytes = ByteCount(math.prod(leaf.true_shape) * value.dtype.itemsize, stored)
        owner = owner_of_state(path, paths)
        if owner is None:
            replicated = Sharded(value, (None,) * value.ndim)
            other_rows.append(
                _row(f"({OPTIMIZER}) {path}", OPTIMIZER, replicated, OfNoParameter(), {}, optimizer=nbytes)
            )
        else:
            of_params[owner]["host" if sharding.memory_kind == HOST_MEMORY else "optimizer"] += nbytes
    return of_params, other_rows
