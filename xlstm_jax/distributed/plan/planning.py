"""The sharding plan: what is split, why not where it is not, and what each device keeps, from shapes alone.

    plan = plan_sharding(model, {"dp": 16, "fsdp": 256}, tokens, tx=optax.adamw(1e-3))
    plan.table()                                  everything, for people
    plan.explain("blocks/mlp/up/kernel")          one leaf in one sentence
    plan.check(max_bytes_per_device=16 * 2**30)   a refusal, for scripts
    plan.to_json(), plan.diff(other)              for the review of a change

``model.init`` is traced on a mesh without devices. Nothing is computed and nothing allocated: a model of 70 billion
parameters on 4096 devices takes seconds. Each decision is that of the wrapper which ``init`` runs through
(``choose_shard_dim``); what an optimizer keeps is read off ``tx.init``, and lies as ``optimizer_state_shardings`` says.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AbstractMesh

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.axes import as_axis_names, entry_axes
from xlstm_jax.distributed.data_parallel.boxes import (
    is_differentiable,
    leaf_axes,
    leaf_names,
    leaf_value,
    leaves_with_path,
    partition_specs,
    true_shape,
)
from xlstm_jax.distributed.data_parallel.communication import sent_bytes, value_dtype
from xlstm_jax.distributed.data_parallel.planned import Planned, planning_mesh
from xlstm_jax.distributed.data_parallel.reasons import (
    BoxedByModel,
    NoParameter,
    OfNoParameter,
    OfSeveral,
    Reason,
    Unwrapped,
)
from xlstm_jax.distributed.data_parallel.shard import ShardRule, plan_params
from xlstm_jax.distributed.data_parallel.shard_choice import DEFAULT_MIN_WEIGHT_SIZE, padded_size
from xlstm_jax.distributed.device_mesh.checks import check_no_explicit_mesh
from xlstm_jax.distributed.optimizers.state import optimizer_state_shardings, owner_of_state, stored_state, trainable
from xlstm_jax.distributed.plan.leaf_plan import OPTIMIZER, PARAMETERS, ByteCount, LeafPlan
from xlstm_jax.distributed.plan.sharding_plan import ShardingPlan
from xlstm_jax.distributed.wording import format_axes


def plan_sharding(
    model: nn.Module,
    axis_sizes: Mapping[str, int],
    *inputs: PyTree,
    axis_name: AxisNames | None = None,
    min_weight_size: int | None = None,
    tx: optax.GradientTransformation | None = None,
    rng: PyTree = None,
    **kwargs: Any,
) -> ShardingPlan:
    """What ``create_train_state`` would place on a mesh of this shape, without the mesh and without a value.

    A model whose modules are wrapped by ``shard_module_params`` is planned as it is: the wrappers decide. A model in
    which nothing is wrapped is planned as if ``shard_module_params(model, axis_name, min_weight_size)`` were around it.

    Args:
      model: a Linen module.
      axis_sizes: the axes of the mesh, outermost first, with their sizes: ``{"dp": 4, "fsdp": 64}``; ``mesh.shape``.
      *inputs: example inputs with global shapes, arrays or ``ShapeDtypeStruct``.
      axis_name: for a model without wrappers, the axes to split over; None: all of them.
      min_weight_size: for a model without wrappers, see ``shard_module_params``; None: its default.
      tx: an optax optimizer, whose state the plan then counts.
      rng: a key, or a dict of keys, as ``model.init`` takes it, arrays or abstract; None: any key.
      **kwargs: passed to ``model.init`` as they are, as ``train=False``.
    Returns:
      The plan.
    Raises:
      ValueError: a wrapper, a box or ``axis_name`` names an axis that there is not; axes do not divide the dim of a box
        that the model has made itself; or the model has wrappers and ``axis_name`` or ``min_weight_size`` is given.
    """
    sizes = _checked_sizes(axis_sizes)
    mesh = planning_mesh(sizes)
    variables = _planned_init(model, mesh, rng, inputs, kwargs)
    wrapped = any(isinstance(leaf, Planned) for _, leaf in leaves_with_path(variables))
    assumed = ""
    if wrapped:
        _check_not_given(axis_name=axis_name, min_weight_size=min_weight_size)
    else:
        axes = _checked_axes(axis_name, sizes)
        threshold = DEFAULT_MIN_WEIGHT_SIZE if min_weight_size is None else min_weight_size
        over = {axis: sizes[axis] for axis in axes}
        variables = variables | {PARAMETERS: plan_params(variables.get(PARAMETERS, {}), over, ShardRule.of(threshold))}
        assumed = f"shard_module_params({type(model).__name__}, {format_axes(axes)}, {threshold})"
    partition_specs(variables, mesh)  # refuses names that are no axes
    params = variables.pop(PARAMETERS, {})
    state, beside = _optimizer_rows(tx, params, mesh)
    rows = [_parameter_row(path, leaf, state.get(path, ByteCount()), sizes) for path, leaf in leaves_with_path(params)]
    rows += [
        _other_row(name, path, leaf, sizes) for name in variables for path, leaf in leaves_with_path(variables[name])
    ]
    return ShardingPlan(axis_sizes=sizes, assumed=assumed, rows=(*rows, *beside))


def _planned_init(model: nn.Module, mesh: AbstractMesh, rng: PyTree, inputs: PyTree, kwargs: dict[str, Any]) -> PyTree:
    """The variables of ``model.init`` without values, in boxes that carry the decisions of their wrappers."""
    check_no_explicit_mesh()

    def init(rng, inputs):
        with jax.sharding.use_abstract_mesh(mesh):
            return model.init(rng, *inputs, **kwargs)

    key = jax.eval_shape(lambda: jax.random.key(0)) if rng is None else rng
    return dict(jax.eval_shape(init, key, inputs))


def _checked_sizes(axis_sizes: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(axis_sizes, Mapping):
        raise TypeError(f"axis_sizes={axis_sizes!r} is no mapping; pass the sizes by axis, as {{'dp': 4, 'fsdp': 64}}.")
    as_axis_names(tuple(axis_sizes))
    for axis, size in axis_sizes.items():
        if not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"axis_sizes has {axis!r}: {size!r}, which is no number of devices; pass 1 or more.")
    return {axis: int(size) for axis, size in axis_sizes.items()}


def _checked_axes(axis_name: AxisNames | None, sizes: dict[str, int]) -> tuple[str, ...]:
    axes = tuple(sizes) if axis_name is None else as_axis_names(axis_name)
    if missing := [axis for axis in axes if axis not in sizes]:
        raise ValueError(
            f"axis_name={axis_name!r}: there is no axis {missing[0]!r} in axis_sizes={sizes}. Pass one of it."
        )
    return axes


def _check_not_given(**options: Any) -> None:
    if given := {name: value for name, value in options.items() if value is not None}:
        name, value = next(iter(given.items()))
        raise ValueError(
            f"{name}={value!r} is for models without wrappers, and modules of this one are wrapped by "
            f"shard_module_params, which decides. Leave {name} out, or change it where the modules are wrapped."
        )


# ---------------------------------------------------------------------------------------------------------------- rows


def _parameter_row(path: str, leaf: Any, optimizer: ByteCount, sizes: dict[str, int]) -> LeafPlan:
    value, names = leaf_value(leaf), leaf_names(leaf)
    parameters = _share(path, leaf, sizes)
    return LeafPlan(
        path=path,
        collection=PARAMETERS,
        shape=true_shape(leaf),
        dtype=str(value.dtype),
        names=names,
        parts=_parts(leaf_axes(leaf), sizes),
        reason=_reason(leaf),
        parameters=parameters,
        gradients=parameters if is_differentiable(leaf) else ByteCount(),
        optimizer=optimizer,
        **_gathering(leaf, sizes),
    )


def _other_row(collection: str, path: str, leaf: Any, sizes: dict[str, int]) -> LeafPlan:
    value = leaf_value(leaf)
    return LeafPlan(
        path=f"({collection}) {path}",
        collection=collection,
        shape=tuple(value.shape),
        dtype=str(value.dtype),
        names=leaf_names(leaf),
        parts=_parts(leaf_axes(leaf), sizes),
        reason=BoxedByModel(leaf_names(leaf)) if leaf_axes(leaf) else NoParameter(),
        use_shape=tuple(value.shape),
        other=_share(f"({collection}) {path}", leaf, sizes),
    )


def _parts(axes: tuple[str, ...], sizes: dict[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _share(path: str, leaf: Any, sizes: dict[str, int]) -> ByteCount:
    value = leaf_value(leaf)
    for dim, entry in enumerate(leaf_names(leaf)):
        if value.shape[dim] % (parts := _parts(entry_axes(entry), sizes)):
            raise ValueError(
                f"'{path}' of shape {tuple(value.shape)} is boxed as {leaf_names(leaf)}: {parts} parts do not divide "
                f"dim {dim} of size {value.shape[dim]}. Give the dim another size, or name another axis for it."
            )
    itemsize = value_dtype(value).itemsize
    stored = math.prod(value.shape) * itemsize  # with the padding of a dim that the axes do not divide
    return ByteCount(math.prod(true_shape(leaf)) * itemsize, stored // _parts(leaf_axes(leaf), sizes))


def _reason(leaf: Any) -> Reason:
    """The reason of what split the leaf; else that of the last refusal; several wrappers are told by their axes."""
    if not isinstance(leaf, Planned):
        return BoxedByModel(leaf_names(leaf)) if leaf_axes(leaf) else Unwrapped()
    deciding = {}
    for decision in leaf.decisions:
        settled = deciding.get(decision.axes)
        if settled is None or settled.choice.dim is None:
            deciding[decision.axes] = decision
    if len(deciding) == 1:
        return next(iter(deciding.values())).choice.reason
    return OfSeveral(tuple((format_axes(axes), decision.choice.reason) for axes, decision in deciding.items()))


def _gathering(leaf: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """The fields of a row that say what its wrapped module gathers."""
    shape = tuple(leaf_value(leaf).shape)
    decisions = leaf.decisions if isinstance(leaf, Planned) else ()
    splits = [decision for decision in decisions if decision.choice.dim is not None]
    gathered = {axis for decision in splits for axis in decision.axes}
    if _parts(tuple(gathered), sizes) == 1:
        return {"use_shape": decisions[-1].shape if decisions else shape}
    last = splits[-1]
    seen = {axis for entry in last.names for axis in entry_axes(entry)}
    # What no wrapper gathers (tensor parallel) stays split; what nn.scan or nn.vmap has added is used piece by piece.
    kept = _parts(tuple(seen - gathered), sizes)
    added = _parts(tuple(set(leaf_axes(leaf)) - seen), sizes)
    layers = math.prod(shape) // math.prod(last.shape) // added
    stored = list(last.shape)
    stored[last.choice.dim] = padded_size(stored[last.choice.dim], _parts(last.axes, sizes))
    calls = max(sum(split.axes == axes for split in splits) for axes in {split.axes for split in splits})
    return {
        "use_shape": last.shape,
        "uses": calls * layers,
        "gathered_bytes": sent_bytes(stored, last.gather_dtype) // kept,
        "gather_dtype": last.gather_dtype,
        "grad_scatter_dtype": last.grad_scatter_dtype,
    }


def _optimizer_rows(
    tx: optax.GradientTransformation | None, params: PyTree, mesh: AbstractMesh
) -> tuple[dict[str, ByteCount], list[LeafPlan]]:
    """Bytes of the optimizer's state by the parameter that they belong to, and rows for what belongs to none."""
    if tx is None:
        return {}, []
    opt_state = jax.eval_shape(lambda params: stored_state(tx.init(trainable(params)), params), params)
    places = dict(leaves_with_path(optimizer_state_shardings(opt_state, params, mesh)))
    paths = {path: path for path, _ in leaves_with_path(params)}
    of_params, beside = {}, []
    for path, leaf in leaves_with_path(opt_state):
        value = leaf_value(leaf)
        on_device = math.prod(places[path].shard_shape(value.shape))
        share = ByteCount(math.prod(true_shape(leaf)) * value.dtype.itemsize, on_device * value.dtype.itemsize)
        owner = owner_of_state(path, paths)
        if owner is None:
            beside.append(_state_row(path, value, share))
        else:
            of_params[owner] = of_params.get(owner, ByteCount()) + share
    return of_params, beside


def _state_row(path: str, value: Any, share: ByteCount) -> LeafPlan:
    shape = tuple(value.shape)
    return LeafPlan(
        path=f"({OPTIMIZER}) {path}",
        collection=OPTIMIZER,
        shape=shape,
        dtype=str(value.dtype),
        names=(None,) * len(shape),
        parts=1,
        reason=OfNoParameter(),
        use_shape=shape,
        optimizer=share,
    )
