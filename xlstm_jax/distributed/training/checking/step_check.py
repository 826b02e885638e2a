"""``check_step``: one step on the mesh against one device that sees the whole batch, and what the difference says.

A step that averages wrongly still trains, only worse, and no type shows it. But its gradients are then the right ones
times a number of devices, and which leaves and which number tell the mistake:

  whole leaves, 8 x          summed over the 8 devices: nobody divided what JAX sums under check_vma=True
  whole leaves, 1/8 x        divided twice
  all leaves, loss, 1/8 x    the loss is a sum over examples, or was divided by the global batch
  no multiple                each device kept its own, or shards of different leaves were averaged
"""

import itertools
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import boxes, trees
from xlstm_jax.distributed.device_mesh.checks import auto_mesh
from xlstm_jax.distributed.optimizers.state import owner_of_state, trainable
from xlstm_jax.distributed.training.checking.collections import copies_differ, drifting, readable
from xlstm_jax.distributed.training.gradients import LossOutput
from xlstm_jax.distributed.training.state import FlaxTrainState, State, collections_of, sharded_opt_state
from xlstm_jax.wording import format_axes, format_mesh, listed

DEFAULT_TOLERANCE = 0.05  # a wrong factor is 2 or more; bfloat16 compute rounds to 0.01 or so
# Parts of the root mean square of all gradients: a leaf below the first may be off by the second. The gradient of the
# bias of attention's keys is 0 but for rounding, which is of any direction; in bfloat16 that was 0.002 to 0.01 of it.
SMALL, ROUNDING = 0.1, 0.01
_LINES = textwrap.TextWrapper(80, initial_indent="  - ", subsequent_indent="    ", break_long_words=False)
_FIRST_MOMENTS = {"mu", "trace"}  # how optax calls them


LOSS_ARGS = 4  # params, apply_fn, batch, rng; and then collections


class StepLoss(NamedTuple):
    """The loss of a step, and what it returns; ``make_train_step`` leaves one on its step, for ``check_step``."""

    loss_fn: Callable[..., LossOutput]
    weighted: bool
    has_aux: bool

    def mean(self, *args: Any) -> jax.Array:
        """The loss alone, of one device that has the whole batch; ``args`` end with collections, if there are any."""
        out: Any = self.loss_fn(*args)
        out = out[0] if len(args) > LOSS_ARGS else out
        out = out[0] if self.has_aux else out
        return out[0] / out[1] if self.weighted else out


class LeafCheck(NamedTuple):
    """One leaf of the parameters: what the step made of it is ``ratio`` times the right value, to ``error``.

    ``axes`` are those that split it, ``error`` the norm of what is left over, relative to what is right.
    ``copies_differ``: devices that should hold the same hold different values.
    """

    path: str
    axes: tuple[str, ...]
    ratio: float
    error: float
    copies_differ: bool


@dataclass(frozen=True)
class StepCheck:
    """What ``check_step`` found; ``str`` says it in words, and ``ok`` is whether nothing is wrong.

    ``compared`` is what the leaves are the ratios of: "gradients"; or "updates", with the optimizer's first moments
    where it keeps them, of a step that keeps its optimizer to itself. ``loss_ratio`` is None where the step returns no
    metric "loss". ``noise`` is by how much gradients on one device differ between two keys (dropout), relatively.

    >>> StepCheck("gradients", {"fsdp": 8}, (), 0.125, 0.0, findings=("the loss is 1/8 x that of one device",)).ok
    False
    """

    compared: str
    mesh: dict[str, int]
    leaves: tuple[LeafCheck, ...]
    loss_ratio: float | None
    noise: float
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        title = f"{self.compared} of {len(self.leaves)} leaves on the mesh {format_mesh(self.mesh)}, against one device"
        if self.findings:
            return "\n".join([f"{title}: WRONG", *map(_LINES.fill, self.findings)])
        worst = max(self.leaves, key=lambda leaf: abs(leaf.ratio - 1))
        of = f", of '{worst.path}'" if f"{worst.ratio:.6g}" != "1" else ""  # which one is then a matter of rounding
        return f"{title}: right\n  worst factor {worst.ratio:.6g}{of}; noise between keys {self.noise:.1g}"


def check_step(
    step: Callable[..., Any],
    state: FlaxTrainState,
    batch: PyTree,
    rng: jax.Array,
    *rest: Any,
    loss_fn: Callable[..., LossOutput] | None = None,
    weighted: bool = False,
    has_aux: bool = False,
    tolerance: float = DEFAULT_TOLERANCE,
) -> StepCheck:
    """Runs one step on the mesh, and compares its gradients with those of one device on the whole batch.

    Use it once, on a small model and batch, for a step of your own or after a change. The state is not changed, nor
    donated. One device holds the whole model and batch meanwhile; all devices must belong to this process.

    >>> loss_fn = lambda params, apply_fn, batch, rng: jnp.sum(apply_fn({"params": params}, batch) ** 2)  # not a mean
    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> state = create_train_state(model, optax.adam(1e-3), mesh, jax.random.key(0), x, batch_axes=("dp", "fsdp"))
    >>> found = check_step(make_train_step(loss_fn, mesh, ("dp", "fsdp")), state, x, jax.random.key(1))
    >>> found.ok, [(leaf.path, round(leaf.ratio, 3)) for leaf in found.leaves]
    (False, [('bias', 0.125), ('kernel', 0.125)])

    Args:
      step: ``step(state, batch, rng, *rest) -> (state, metrics, ...)``, of ``make_train_step`` or your own.
      state: a ``TrainState``, on a mesh.
      batch: a batch with global leaves, as the step takes it.
      rng: a key, as the step takes it. Draws differ between mesh and device: with dropout gradients are compared within
        the noise between two keys.
      loss_fn: ``loss_fn(params, apply_fn, batch, rng)``, what the step is to minimise, the mean over whatever batch it
        is given; None: that of ``make_train_step``. It takes and returns collections where the state has some.
      weighted, has_aux: what ``loss_fn`` returns, as for ``make_train_step``; not used where it is None.
      tolerance: a relative difference up to which values are equal.
    Returns:
      A ``StepCheck``.
    Raises:
      ValueError: ``loss_fn`` is missing, the parameters are not on a mesh, or not all in this process.
    """
    reference = _reference(step) if loss_fn is None else StepLoss(loss_fn, weighted, has_aux)
    mesh = _mesh_of(state.params)
    on_one_device = _on_one_device(reference, state, batch, mesh)
    loss, grads = on_one_device(rng)
    noise = _distance(on_one_device(jax.random.fold_in(rng, 1))[1], grads)
    seen = _of_step(step, state, (batch, rng, *rest), grads, mesh)
    leaves = tuple(_compared(seen, state.params, mesh))
    loss_ratio = float(seen.metrics["loss"]) / loss if loss and "loss" in seen.metrics else None
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    findings = [*_findings(leaves, seen.what, loss_ratio, sizes, tolerance + 3 * noise), *drifting(seen.collections)]
    return StepCheck(seen.what, dict(mesh.shape), leaves, loss_ratio, noise, tuple(findings))


def _reference(step: Callable[..., Any]) -> StepLoss:
    reference = getattr(getattr(step, "__wrapped__", step), "loss", None)
    if not isinstance(reference, StepLoss):
        raise ValueError(
            "check_step: this step is not of make_train_step. Pass loss_fn=, a loss_fn(params, apply_fn, batch, rng) "
            "that returns the mean loss over the batch that it is given."
        )
    return reference


def _mesh_of(params: PyTree) -> Mesh:
    for path, leaf in trees.leaves_with_path(params):
        sharding = getattr(boxes.leaf_value(leaf), "sharding", None)
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"check_step: '{path}' is on no mesh ({sharding}). Make the state with create_train_state."
            )
        if not sharding.is_fully_addressable:
            raise ValueError(
                f"check_step: '{path}' is on devices of several processes, and is compared whole on one. Check the "
                "step in one process: on its own devices, or on simulate_cpu_devices(8) with a small model."
            )
        if isinstance(sharding.mesh, Mesh):
            return auto_mesh(sharding.mesh)
    raise ValueError("check_step: state.params has no leaves.")


def _on_one_device(
    reference: StepLoss, state: Any, batch: PyTree, mesh: Mesh
) -> Callable[[jax.Array], tuple[float, PyTree]]:
    """A function of the key: the loss, and its gradients as the optimizer sees them.

    It runs on a mesh with the same axes and one device, for losses that ask for an axis; nothing is communicated.
    """
    one = Mesh(mesh.devices.flat[:1].reshape((1,) * mesh.devices.ndim), mesh.axis_names, axis_types=mesh.axis_types)
    whole = NamedSharding(one, PartitionSpec())
    params, batch, kept = jax.device_put((state.params, batch, collections_of(state)), whole)
    kept = (readable(kept),) if kept else ()
    live, put_back = trees.split_differentiable(params)

    def loss(live: list[Any], batch: PyTree, rng: jax.Array, *kept: PyTree) -> jax.Array:
        return reference.mean(put_back(live), state.apply_fn, batch, rng, *kept)

    run = jax.shard_map(jax.value_and_grad(loss), mesh=one, in_specs=whole.spec, out_specs=whole.spec, check_vma=False)
    jitted = jax.jit(run)

    def on_one_device(rng: jax.Array) -> tuple[float, PyTree]:
        value, grads = jitted(live, batch, jax.device_put(rng, whole), *kept)
        return float(value), trainable(put_back(grads))

    return on_one_device


class _Seen(NamedTuple):
    """What a step made of each leaf by its path: ``got``, which should be ``right``."""

    what: str
    got: dict[str, jax.Array]
    right: dict[str, jax.Array]
    metrics: dict[str, Any]
    collections: PyTree


def _of_step(step: Callable[..., Any], state: Any, given: PyTree, grads: PyTree, mesh: Mesh) -> _Seen:
    """Runs the step with an optimizer that keeps the gradients; where the step does not take it, with its own."""
    keeping = state.replace(tx=_KEEP_GRADIENTS, opt_state=sharded_opt_state(_KEEP_GRADIENTS, state.params, mesh))
    try:
        after, metrics = _run(step, keeping, given)
    except (TypeError, ValueError, AttributeError):  # an optimizer, or specs of the state, that are the step's own
        return _of_own_optimizer(step, state, given, grads)
    got, right = _by_path(_as_seen(after.opt_state)), _by_path(grads)
    if got.keys() == right.keys() and any(np.any(leaf) for leaf in got.values()):
        return _Seen("gradients", got, right, metrics, collections_of(after))
    return _of_own_optimizer(step, state, given, grads)


def _of_own_optimizer(step: Callable[..., Any], state: Any, given: PyTree, grads: PyTree) -> _Seen:
    """Runs the step as it is, and compares first moments where the optimizer has them, else updates."""
    # What the optimizer remembers begins at 0, so that it is all of this step.
    fresh = state.replace(
        opt_state=jax.tree.map(
            lambda x: jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x, state.opt_state
        )
    )
    after, metrics = _run(step, fresh, given)
    kept = collections_of(after)
    before, one_device = trainable(fresh.params), jax.tree.leaves(grads)[0].sharding
    params, opt_state = jax.device_put((before, _as_seen(fresh.opt_state)), one_device)
    updates, opt_state = optax.with_extra_args_support(state.tx).update(grads, opt_state, params)
    if right := _first_moments(opt_state, params):
        return _Seen("first moments", _first_moments(_as_seen(after.opt_state), params), right, metrics, kept)
    moved = jax.tree.map(jnp.subtract, trainable(after.params), before)
    return _Seen("updates", _by_path(moved), _by_path(updates), metrics, kept)


def _run(step: Callable[..., Any], state: State, given: PyTree) -> tuple[State, dict[str, Any]]:
    """State and metrics after the step, which may donate all that it is given."""
    after, metrics, *_ = step(*jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, (state, *given)))
    if not isinstance(metrics, dict):
        metrics = {"loss": metrics} if np.shape(metrics) == () else {}
    return after, metrics


def _keep(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
    del state, params, extra
    return jax.tree.map(jnp.zeros_like, updates), updates


_KEEP_GRADIENTS = optax.GradientTransformationExtraArgs(lambda params: jax.tree.map(jnp.zeros_like, params), _keep)


def _as_seen(opt_state: PyTree) -> PyTree:
    return trees.map_leaves(boxes.true_value, opt_state)


def _by_path(tree: PyTree) -> dict[str, jax.Array]:
    return dict(trees.leaves_with_path(tree))


def _first_moments(opt_state: PyTree, params: PyTree) -> dict[str, jax.Array]:
    """The first moments in an optimizer's state, by the paths of their parameters."""
    paths = {path: path for path in _by_path(params)}
    moments = {path: leaf for path, leaf in _by_path(opt_state).items() if _FIRST_MOMENTS & set(path.split("/"))}
    return {str(owner_of_state(path, paths)): leaf for path, leaf in moments.items()}


def _compared(seen: _Seen, params: PyTree, mesh: Mesh) -> Iterator[LeafCheck]:
    right = {path: _flat(leaf) for path, leaf in seen.right.items()}
    everything = np.concatenate([*right.values(), np.zeros(1)])
    typical = float(np.sqrt(np.mean(everything**2)))
    for path, leaf in trees.leaves_with_path(params):
        if path in right:
            axes = tuple(axis for axis in boxes.leaf_axes(leaf) if mesh.shape[axis] > 1)
            ratio, error = _ratio(_flat(seen.got[path]), right[path], typical)
            yield LeafCheck(path, axes, ratio, error, copies_differ(seen.got[path]))


def _flat(leaf: jax.Array) -> np.ndarray:
    """All values in float64, complex ones as pairs."""
    values = np.asarray(leaf).ravel()
    return np.concatenate([np.real(values), np.imag(values)]).astype(np.float64)


def _ratio(got: np.ndarray, right: np.ndarray, typical: float) -> tuple[float, float]:
    """The factor between them by least squares, and the norm of what is left over, relative to that of ``right``.

    (1, 0) where both are small beside ``typical``, the root mean square of all gradients, and differ by rounding.
    """
    size, scale = float(np.linalg.norm(right)), typical * math.sqrt(right.size)
    if size <= SMALL * scale and float(np.linalg.norm(got - right)) <= ROUNDING * scale:
        return 1.0, 0.0
    ratio = float(got @ right) / size**2 if size else 1.0
    return ratio, float(np.linalg.norm(got - ratio * right)) / (size * abs(ratio) or 1.0)


def _distance(a: PyTree, b: PyTree) -> float:
    """The norm of the difference, relative to that of ``b``."""
    difference, size = optax.tree.norm(jax.tree.map(jnp.subtract, a, b)), optax.tree.norm(b)
    return float(difference / size) if size else 0.0


def _findings(
    leaves: tuple[LeafCheck, ...], what: str, loss_ratio: float | None, sizes: dict[str, int], tolerance: float
) -> Iterator[str]:
    """What is wrong and its likely cause, once for all leaves that have the same fault."""
    of_loss = Multiple.of(1.0 if loss_ratio is None else loss_ratio, sizes, tolerance)
    if of_loss.kind != "equal":
        yield f"the loss is {of_loss.times} that of one device: {_LOSS_CAUSES[of_loss.kind].format(of_loss.axes)}"
    faults: dict[str, list[LeafCheck]] = defaultdict(list)
    for leaf in leaves:
        if cause := _cause(leaf, Multiple.of(leaf.ratio, sizes, tolerance), of_loss, tolerance):
            faults[cause].append(leaf)
    for cause, some in faults.items():
        leaves_are = f"{len(some)} leaves" if len(some) > 1 else "1 leaf"
        yield f"{what} of {leaves_are} ({listed(leaf.path for leaf in some)}) are {cause}"


class Multiple(NamedTuple):
    """A ratio read as a number of devices, those along ``axes``, or as 1 over it."""

    kind: str  # "equal", "summed", "divided", "other"
    times: str = "1 x"
    axes: str = ""

    @classmethod
    def of(cls, ratio: float, sizes: dict[str, int], tolerance: float) -> "Multiple":
        if abs(ratio - 1) <= tolerance:
            return cls("equal")
        for axes in itertools.chain.from_iterable(itertools.combinations(sizes, n + 1) for n in range(len(sizes))):
            devices = math.prod(sizes[axis] for axis in axes)
            if abs(ratio / devices - 1) <= tolerance:
                return cls("summed", f"{devices} x", format_axes(axes))
            if abs(ratio * devices - 1) <= tolerance:
                return cls("divided", f"1/{devices} x", format_axes(axes))
        return cls("other", f"{ratio:.3g} x")


_LOSS_CAUSES = {
    "summed": "it is summed over {0} (by psum?). Return this device's own mean.",
    "divided": "it is a sum over examples, or was divided by the global batch. Return the mean over the batch that "
    "loss_fn is given, or (sum, weight) with weighted=True.",
    "other": "the step minimises another mean. Where examples have weights (masks), return (sum, weight) with "
    "weighted=True.",
}


def _cause(leaf: LeafCheck, multiple: Multiple, of_loss: Multiple, tolerance: float) -> str:
    if leaf.copies_differ:
        return (
            "not the same on all devices that should hold the same: averaged over too few axes, or not at all. Call "
            "sync_gradients over all axes of the batch, or use value_and_grad."
        )
    if leaf.error > tolerance:
        return (
            "no multiple of the right ones: the step saw another batch or another mean, or averaged leaves that are "
            "split over devices with each other (by pmean). Use value_and_grad, or sync_gradients."
        )
    if multiple.kind == "equal":
        return ""
    times = f"{multiple.times} the right ones: "
    if multiple == of_loss:
        return times + "as the loss is."
    if multiple.kind == "summed":
        return (
            f"{times}summed over {multiple.axes}. JAX sums the gradient of what is whole on all devices "
            "(check_vma=True). Call sync_gradients once over all axes of the batch, or use value_and_grad."
        )
    if multiple.kind == "divided":
        return (
            f"{times}divided once more over {multiple.axes}. Call sync_gradients once, not on what value_and_grad or "
            "another sync_gradients returned; and return the loss of this device, without pmean."
        )
    return times + "which is no number of devices. Does the step scale its loss, or clip gradients itself?"
