"""A training of the matrix: ``Case``, run on a mesh and on one device without any, and what both come to.

``of_one_device`` is the reference: the plain model under ``jax.value_and_grad``, plain optax, no mesh, no collective,
and nothing of the library but its models, which are the plain ones there. ``trained`` is the library. Each takes two
steps, and ``compare`` looks at the loss, the gradients, the parameters, the optimizer's state, the collections and the
average of the weights after either.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from tests.exactness.model import PLAIN, Net, Parts, Twin, batch, is_unit, is_unit_of_twin
from tests.support import FLOAT32_ROUNDING, KEPT, equations, fsdp
from xlstm_jax.distributed import (
    Checkpointer,
    DeviceMeshManager,
    TrainState,
    create_train_state,
    ema_params,
    make_train_step,
    nnx_model,
    shard_modules,
    unbox,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of, true_value
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves, path_string
from xlstm_jax.distributed.data_parallel.wire.running_loss import OVERWRITTEN
from xlstm_jax.equations import name_and_params

KEY, STEPS, DECAY = jax.random.key(0), 2, 0.5
RULES = (("embed", "fsdp"),)  # of logical names; the others have no rule
# With a small epsilon an entry whose gradient is rounding would move by the whole learning rate, up or down. With one
# that is as large as gradients are, a step errs by no more than the learning rate times the error of the gradient.
ADAMW = optax.adamw(0.1, eps=1.0)


@dataclass(frozen=True)
class Case:
    """What is trained, and how; the default is the plain case.

    Attributes:
      parts: of the model.
      framework: "linen", or "nnx" for the twin.
      outside: whether modules are wrapped from outside.
      wrapping, making, stepping: options of the wrappers, of ``create_train_state`` and of ``make_train_step``.
      axes: the axes of the mesh beside "dp" and "fsdp", with their sizes.
      tx: an optax transform for one device; ``on_mesh_tx`` is the same for the mesh, where it is another.
      around: transforms around ``tx`` on the mesh alone, outermost last, by name.
      weighted: whether the loss is (sum, weight).
      spoiled: whether a step with a NaN in the batch comes between the two steps, which must change nothing.
      saved: whether the state is saved after the first step and restored on a mesh of half the devices.
    """

    parts: Parts = PLAIN
    framework: str = "linen"
    outside: bool = False
    wrapping: Mapping[str, Any] = field(default_factory=dict)
    making: Mapping[str, Any] = field(default_factory=dict)
    stepping: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    tx: optax.GradientTransformation = ADAMW
    on_mesh_tx: optax.GradientTransformation | None = None
    around: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    weighted: bool = False
    spoiled: bool = False
    saved: bool = False

    def but(self, **changes: Any) -> "Case":
        """This case with changes; those of ``parts`` and of mappings come beside what is there."""
        whole = {}
        for name, value in changes.items():
            old = getattr(self, name)
            if name == "parts":
                whole[name] = replace(old, **value)
            else:
                whole[name] = {**old, **value} if isinstance(old, Mapping) else value
        return replace(self, **whole)


def decisions(changes: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """What a row decides, as (field, name within it, value): two rows that decide one thing differently are no pair.

    >>> list(decisions({"wrapping": {"uneven": "pad"}, "weighted": True}))
    [('wrapping', 'uneven', 'pad'), ('weighted', '', True)]
    """
    for name, value in changes.items():
        if isinstance(value, Mapping):
            yield from ((name, inner, decided) for inner, decided in value.items())
        else:
            yield name, "", value


# ---------------------------------------------------------------------------------------------------------- the moments


@dataclass
class Moment:
    """What there is after a step: trees of NumPy arrays, without boxes and padding."""

    loss: float
    norm: float
    gradients: Any
    params: Any
    moments: Any
    collections: Any
    average: Any = None


def loss_of(weighted: bool, errors: jax.Array, of_batch: Mapping[str, jax.Array]) -> Any:
    errors = errors * of_batch["factor"]
    if weighted:
        return jnp.sum(errors * of_batch["weight"]), jnp.sum(of_batch["weight"])
    return jnp.mean(errors)


def on_host(tree: Any) -> Any:
    return map_leaves(true_value, jax.device_get(tree))


# ------------------------------------------------------------------------------------------------------- on one device


@cache
def start(parts: Parts, framework: str) -> Any:
    """The variables that a training begins with, of the plain model."""
    model = Net(parts) if framework == "linen" else nnx_model(partial(Twin, parts=parts))
    variables = unbox(jax.jit(model.init)(KEY, batch()))
    return jax.tree.map(np.asarray, variables)


@cache
def _step_of_one_device(
    parts: Parts,
    framework: str,
    tx: optax.GradientTransformation,
    weighted: bool,
    trainable: Callable[[str], bool] | None,
    frozen_dtype: str | None,
) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], Any]]:
    """A step on one device, what it begins with, and a function that puts frozen leaves beside trained ones."""
    variables = dict(start(parts, framework))
    params, kept = variables.pop("params"), variables
    # The twin's parameters have the paths of the Linen model, which computes the reference of both.
    model = Net(parts)
    is_trained = jax.tree_util.tree_map_with_path(
        lambda path, _: trainable is None or trainable(path_string(path)), params
    )
    frozen = jax.tree.map(lambda yes, p: None if yes else p.astype(frozen_dtype or p.dtype), is_trained, params)
    trained = jax.tree.map(lambda yes, p: p if yes else None, is_trained, params)
    overwritten = {name: tree for name, tree in kept.items() if name == OVERWRITTEN}
    updated = {name: tree for name, tree in kept.items() if name != OVERWRITTEN}

    def merge(trained):
        return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None)

    @jax.jit
    def step(trained, overwritten, updated, opt_state, average, of_batch):
        def loss_fn(trained, overwritten):
            variables = {"params": merge(trained), **overwritten, **updated}
            if updated:
                errors, new = model.apply(variables, of_batch, mutable=list(updated))
            else:
                errors, new = model.apply(variables, of_batch), {}
            loss = loss_of(weighted, errors, of_batch)
            return loss[0] / loss[1] if weighted else loss, new

        (loss, new), (grads, over) = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(trained, overwritten)
        updates, opt_state = tx.update(grads, opt_state, trained)
        trained = optax.apply_updates(trained, updates)
        average = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * p, average, trained)
        return (trained, over, new, opt_state, average), loss, grads

    return step, (trained, overwritten, updated, tx.init(trained), trained), merge


@cache
def _of_one_device(rows: tuple[int, ...], *what: Any) -> list[Moment]:
    step, carry, merge = _step_of_one_device(*what)
    of_batch = {name: leaf[np.asarray(rows)] for name, leaf in batch().items()}
    found = []
    for _ in range(STEPS):
        carry, loss, grads = step(*carry, of_batch)
        params, overwritten, updated, opt_state, average = carry
        squares = sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(grads))
        kept = {**overwritten, **updated}
        both = merge(params), opt_state, kept, merge(average)
        found.append(Moment(float(loss), float(np.sqrt(squares)), grads, *both))
    return found


def of_one_device(case: Case, rows: tuple[int, ...] | None = None) -> list[Moment]:
    """The reference, on the whole batch, or on a batch of some of its rows."""
    rows = tuple(range(len(batch()["x"]))) if rows is None else rows
    frozen = case.making.get("trainable"), case.making.get("frozen_dtype")
    return _of_one_device(rows, case.parts, case.framework, case.tx, case.weighted, *frozen)


# ----------------------------------------------------------------------------------------------------------- on a mesh


@cache
def mesh_of(shape: tuple[tuple[str, int], ...], kind: str = "") -> jax.sharding.Mesh:
    """The mesh of these sizes; ``kind`` gives the types of its axes: "explicit", "mixed" or, as without it, "auto"."""
    sizes = dict(shape)
    mesh = DeviceMeshManager.create_device_mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    types = {
        "explicit": [AxisType.Explicit] * len(sizes),
        "mixed": [AxisType.Auto, AxisType.Explicit, *[AxisType.Auto] * 9],
    }
    return mesh.update(axis_types=tuple(types[kind][: len(sizes)])) if kind in types else mesh


def set_mesh(sizes: Mapping[str, int], kind: str) -> AbstractContextManager[Any]:
    """The context of ``jax.set_mesh`` for a mesh of this kind; without a kind no mesh is set."""
    return jax.set_mesh(mesh_of(tuple(sizes.items()), kind)) if kind else nullcontext()


def mesh_sizes(column: str, axes: Mapping[str, int]) -> dict[str, int]:
    """The mesh of a column for a case with further axes; eight devices in all.

    >>> mesh_sizes("2x4", {}), mesh_sizes("2x4", {"tp": 2}), mesh_sizes("2x4", {"tp": 2, "cp": 2})
    ({'dp': 2, 'fsdp': 4}, {'dp': 2, 'fsdp': 2, 'tp': 2}, {'dp': 1, 'fsdp': 2, 'tp': 2, 'cp': 2})
    """
    left = 8 // int(np.prod(list(axes.values())))
    share = {"1x8": left, "2x4": max(left // 2, 2), "8x1": 1}[column]
    return {"dp": left // share, "fsdp": share, **axes}


@dataclass
class Trained:
    """A training on a mesh: its first state and the trace of its step, of which guards read, and its moments."""

    state: Any
    traced: Any
    moments: list[Moment]
    meshes: list[dict[str, int]] = field(default_factory=list)

    @property
    def leaves(self) -> list[Sharded]:
        """The parameters as they are stored."""
        return [leaf_of(leaf) for _, leaf in leaves_with_path(self.state.params)]

    @property
    def found(self) -> list[tuple[tuple[str, ...], Any]]:
        """The equations of the step, each with the primitives that it is within."""
        return equations(self.traced.jaxpr)

    def sent(self, collective: str) -> list[Any]:
        """The types of what collectives of a kind send, scalars left out."""
        named = [e for _, e in self.found if e.primitive.name.startswith(collective)]
        return [v.aval for e in named for v in e.invars if v.aval.shape]

    def calls(self, primitive: str) -> int:
        return sum(name_and_params(e)[0] == primitive for _, e in self.found)


def transform(case: Case) -> Any:
    tx = case.tx if case.on_mesh_tx is None else case.on_mesh_tx
    for name in sorted(case.around):  # "average" is within "skipping"
        tx = case.around[name](tx)
    return optax.chain(KEPT, tx)


def model_on_mesh(case: Case, batch_axes: tuple[str, ...]) -> Any:
    wrap = partial(fsdp, **{"min_weight_size": 16, **case.wrapping})
    stats = batch_axes if case.parts.norm == "batch" else None
    if case.framework == "nnx":
        options = {"axis_name": "fsdp", "min_weight_size": 16, **case.wrapping}
        return shard_modules(nnx_model(partial(Twin, parts=case.parts)), is_unit_of_twin, **options)
    if case.outside:
        options = {"axis_name": "fsdp", "min_weight_size": 16, **case.wrapping}
        return shard_modules(Net(case.parts, stats_axes=stats), is_unit, **options)
    return Net(case.parts, wrap, stats)


def program(case: Case, sizes: Mapping[str, int], check_vma: bool, kind: str = "") -> tuple[Callable[..., Any], Any]:
    """A function that makes the first state, by ``create_train_state`` or its like, and the step."""
    mesh = mesh_of(tuple(sizes.items()), kind)
    rows = tuple(axis for axis in ("dp", "fsdp", "ep") if axis in sizes)
    axes = (*rows, "cp") if "cp" in sizes else rows
    model = model_on_mesh(case, axes)
    kept = set(start(case.parts, case.framework)) - {"params"}

    def loss_fn(params, apply_fn, of_batch, rng):
        return loss_of(case.weighted, apply_fn({"params": params}, of_batch), of_batch)

    def loss_with_collections(params, apply_fn, of_batch, rng, collections):
        errors, updated = apply_fn({"params": params, **collections}, of_batch, mutable=list(collections))
        return loss_of(case.weighted, errors, of_batch), updated

    def create(make=create_train_state):
        with nn.logical_axis_rules(RULES) if case.parts.named else nullcontext():
            return make(
                model, transform(case), mesh, KEY, batch(), batch_axes=rows, allow_replicated=True, **case.making
            )

    split = {"batch_spec": jax.P(rows, "cp"), "layout": "zigzag"} if "cp" in sizes else {"batch_axes": rows}
    how = {"weighted": case.weighted, "check_vma": check_vma, "allow_replicated": True, **split, **case.stepping}
    return create, make_train_step(loss_with_collections if kept else loss_fn, mesh, **how)


def trained(case: Case, column: str, check_vma: bool, kind: str = "") -> Trained:
    """Two steps on the mesh of a column; with a kind the mesh is set, and its axes are of this kind."""
    sizes = mesh_sizes(column, case.axes)
    batch(), start(case.parts, case.framework)  # kept for all columns, and so made without a mesh
    with ExitStack() as around:
        around.enter_context(set_mesh(sizes, kind))
        create, step = program(case, sizes, check_vma, kind)
        state: TrainState = create()
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        result = Trained(first, step.trace(state, batch(), KEY), [])
        for index in range(STEPS):
            if index and case.spoiled:
                factor = np.array(batch()["factor"])
                factor[0, 0] = np.nan
                state, _ = step(state, {**batch(), "factor": factor}, KEY)
            if index and case.saved:
                with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
                    checkpointer.save(1, state)
                    checkpointer.wait()
                    around.close()
                    around.enter_context(set_mesh(halved(sizes), kind))
                    create, step = program(case, halved(sizes), check_vma, kind)
                    state = checkpointer.restore(create())
            state, metrics = step(state, batch(), KEY)
            result.meshes.append(dict(state.step.sharding.mesh.shape))
            result.moments.append(moment(case, state, metrics))
    return result


def moment(case: Case, state: Any, metrics: Mapping[str, Any]) -> Moment:
    gradients, moments = state.opt_state
    averaged = "average" in case.around
    average = ema_params(moments, state.params) if averaged else None
    for _ in case.around:
        moments = moments.inner_state
    return Moment(
        float(metrics["loss"]),
        float(metrics["grad_norm"]),
        *map(on_host, (gradients, state.params, moments, state.collections)),
        average=on_host(average) if averaged else None,
    )


def halved(sizes: Mapping[str, int]) -> dict[str, int]:
    axis = max(("dp", "fsdp"), key=lambda axis: sizes[axis])
    return {**sizes, axis: sizes[axis] // 2}


# ---------------------------------------------------------------------------------------------------------- comparison


def compare(got: list[Moment], want: list[Moment], tolerance: float = FLOAT32_ROUNDING) -> None:
    """Raises an ``AssertionError`` that names the first leaf that is further off than ``tolerance`` of its largest."""
    assert len(got) == len(want) == STEPS, f"{len(got)} and {len(want)} steps were recorded, not {STEPS}"
    for number, (g, w) in enumerate(zip(got, want, strict=True), 1):
        after = f"after step {number} "
        for name in ("loss", "norm"):
            _compare_leaf(f"{after}the {name}", getattr(g, name), getattr(w, name), 0.0, tolerance)
        for name in ("gradients", "params", "moments", "collections", "average"):
            if getattr(g, name) is not None:
                # Moments hold squares of gradients, which err twice as much.
                allowed = 2 * tolerance if name == "moments" else tolerance
                compare_trees(f"{after}the {name}", getattr(g, name), getattr(w, name), allowed)


def compare_trees(what: str, got: Any, want: Any, tolerance: float) -> None:
    # Boxes that the optimizer has put around matrices are no part of the tree.
    got, want = (
        {path_string(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (got, want)
    )
    missing = sorted(got.keys() ^ want.keys())
    assert not missing, f"{what} have other leaves than on one device: {missing[:4]}"
    scale = max((np.abs(np.asarray(leaf, np.float64)).max(initial=0) for leaf in want.values()), default=0.0)
    for path, leaf in want.items():
        _compare_leaf(f"{what} of {path}", got[path], leaf, scale, tolerance)


def _compare_leaf(what: str, got: Any, want: Any, scale: float, tolerance: float) -> None:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what} have shape {got.shape}, on one device {want.shape}"
    # A leaf whose true value vanishes is rounding alone, and compared at the scale of the tree.
    largest = np.abs(want).max(initial=0)
    largest = largest if largest > 1e-6 * scale else scale
    worst = np.abs(got - want).max(initial=0)
    if not worst <= tolerance * largest:
        raise AssertionError(f"{what}: off by {worst:.3g}, where {tolerance:.0e} of {largest:.3g} is allowed")
