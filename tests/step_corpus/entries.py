"""Entry of the corpus, its setting (mesh, model, state), and the reference on one device.

An entry is a training step in a user's style, labelled right or wrong. ``error_of`` proves the label without
``check_step``: at dropout 0, with a rate of 1 and plain gradient descent, the step moves each parameter by its
gradient, compared with the gradient of the plain model on one device with the global batch.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from tests.step_corpus.models import LINEN, NNX, WITHOUT_DROPOUT, batch_of, inputs_of
from xlstm_jax.distributed import DeviceMeshManager, Replicas, create_train_state, nnx_model, shard_modules, unbox
from xlstm_jax.distributed.training.arguments import collections_of

RATES = (0.0, 0.1, 0.5, 0.8)
MESHES = {  # shape, axes of the parameters, axes of the batch, options of the wrapper
    "fsdp": ({"fsdp": 8}, "fsdp", ("fsdp",), {}),
    "dp_fsdp": ({"dp": 2, "fsdp": 4}, "fsdp", ("dp", "fsdp"), {}),
    "tuple": ({"x": 2, "y": 4}, ("x", "y"), ("x", "y"), {}),
    "copies": ({"dp": 2, "fsdp": 4}, "fsdp", ("dp", "fsdp"), {"replicas": Replicas("dp")}),
    "split": ({"fsdp": 4, "tp": 2}, "fsdp", ("fsdp",), {}),
    "experts": ({"fsdp": 4, "ep": 2}, "fsdp", ("fsdp", "ep"), {}),
    "sequence": ({"fsdp": 2, "cp": 4}, "fsdp", ("fsdp", "cp"), {}),
}
GRADIENT_IS_UPDATE = optax.sgd(1.0)


class Setting(NamedTuple):
    """A cell of the matrix; ``tx`` replaces the entry's optimizer."""

    dropout: float
    check_vma: bool
    api: str  # "linen" or "nnx"
    tx: optax.GradientTransformation | None = None

    def __str__(self) -> str:
        return f"{self.api}, dropout {self.dropout}, check_vma={self.check_vma}"


class Case(NamedTuple):
    """Arguments of ``check_step(step, state, batch, rng, *rest, **kwargs)``."""

    step: Callable[..., Any]
    state: Any
    batch: Any
    rng: jax.Array
    kwargs: dict[str, Any]
    rest: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A training step, and the expected verdict.

    ``names`` occurs in the text about a wrong step, ``refused`` in the error of a step that does not run. ``truth`` is
    the intended loss on one device; None: the loss of the step. ``tolerance`` is for gradients of a right step; a
    wrong step errs by ten times more.
    """

    name: str
    kind: str
    verdict: str
    make: Callable[["Entry", Setting], Case]
    loss: Callable[..., Any]
    model: str = "mlp"
    mesh: str = "dp_fsdp"
    names: str = ""
    refused: str = ""
    truth: Callable[..., Any] | None = None
    tx: optax.GradientTransformation | None = None  # where the optimizer is part of the entry
    options: dict[str, Any] = field(default_factory=dict)  # of make_train_step
    wrap: dict[str, Any] = field(default_factory=dict)  # of shard_modules
    trainable: Callable[[str], bool] | None = None
    check_vma: tuple[bool, ...] = (True, False)
    nnx: bool = True  # also with the NNX twin, if the model has a twin
    without_draws: Callable[..., Any] | None = None  # the loss with fixed noise instead of draws
    tolerance: float = 1e-3

    @property
    def title(self) -> str:
        return f"{self.kind} / {self.name}"

    @property
    def is_own(self) -> bool:
        return self.kind.startswith("own")

    def settings(self) -> list[Setting]:
        rates = RATES[:1] if self.model in WITHOUT_DROPOUT else RATES
        apis = ("linen", "nnx") if self.nnx and self.model in NNX else ("linen",)
        return [Setting(rate, vma, api) for api in apis for vma in self.check_vma for rate in rates]

    def allowed(self, setting: Setting) -> set[str]:
        """Returns the acceptable verdicts: label, expected error, "cannot tell" for custom steps with random draws."""
        random = self.is_own and (self.without_draws is not None or setting.dropout > 0)
        return {self.verdict, *(["refused"] * bool(self.refused)), *(["cannot tell"] * random)}

    def is_proved(self, check_vma: bool, api: str) -> bool:
        """Returns whether the step without dropout is as labelled; a step that the library rejects is wrong."""
        try:
            error = error_of(self, check_vma, api)
        except (ValueError, TypeError) as raised:
            return self.is_refused_by(raised)
        return error <= self.tolerance if self.verdict == "right" else not error < 10 * self.tolerance

    def is_refused_by(self, error: Exception) -> bool:
        return bool(self.refused and re.search(self.refused, str(error)))

    def is_named_by(self, finding: str) -> bool:
        return bool(re.search(self.names, finding, re.IGNORECASE))

    def build(self, dropout: float, check_vma: bool, api: str = "linen") -> Case:
        return self.make(self, Setting(dropout, check_vma, api))

    @property
    def axes(self) -> tuple[str, ...]:
        return MESHES[self.mesh][2]

    def state(self, setting: Setting) -> Any:
        tx = self.tx or setting.tx or ADAMW
        return _state(self.model, self.mesh, setting.dropout, setting.api, tx, tuple(self.wrap.items()), self.trainable)


ADAMW = optax.adamw(1e-3)


@cache
def mesh_of(name: str) -> Mesh:
    return DeviceMeshManager.create_device_mesh(MESHES[name][0])


@cache
def batch_on_mesh(model: str) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.asarray, batch_of(model))


def plain_model(model: str, dropout: float, api: str, axes: Any = None) -> Any:
    """Returns the model without sharding."""
    if api == "nnx":
        return nnx_model(partial(NNX[model], rate=dropout))
    return LINEN[model](dropout, axes) if model == "stats" else LINEN[model](dropout)


@cache
def _state(model: str, mesh: str, dropout: float, api: str, tx: Any, wrap: tuple[Any, ...], trainable: Any) -> Any:
    _, axis_name, axes, options = MESHES[mesh]
    plain = plain_model(model, dropout, api, axes)
    # This model makes boxed parameters; modules of other models are wrapped.
    whole = model == "split_experts"
    units = lambda path, _: (path == "") == whole and "/" not in path  # noqa: E731
    sharded = shard_modules(plain, units, axis_name, min_weight_size=64, **(options | dict(wrap)))
    how: dict[str, Any] = {"batch_axes": axes, "allow_replicated": True} | (
        {"trainable": trainable} if trainable else {}
    )
    inputs = inputs_of(model, batch_on_mesh(model))
    return create_train_state(sharded, tx, mesh_of(mesh), jax.random.key(3), *inputs, **how)


# --------------------------------------------------------------------------------------------------- one device


def on_one_device(entry: Entry, setting: Setting) -> tuple[float, Any]:
    """Returns the intended loss and its gradients, of the plain model on one device with the global batch.

    The mesh has the entry's axes with one device along each, for losses that use an axis.
    """
    mesh, state = mesh_of(entry.mesh), entry.state(setting)
    apply_fn = plain_model(entry.model, 0.0, setting.api, entry.axes).apply
    one = Mesh(mesh.devices.flat[:1].reshape((1,) * mesh.devices.ndim), mesh.axis_names)
    params, kept = jax.tree.map(np.asarray, unbox((state.params, dict(collections_of(state)))))
    out_of = entry.truth or entry.loss

    def loss(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        out = out_of(params, apply_fn, batch, rng, *([kept] if kept else []))
        out = out[0] if kept else out
        out = out[0] if entry.truth is None and (entry.options.keys() & {"has_aux", "metric"}) else out
        return out[0] / out[1] if isinstance(out, tuple) else out

    run = jax.shard_map(
        jax.value_and_grad(loss), mesh=one, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    if entry.trainable is not None:
        raise_frozen = partial(jax.tree_util.tree_map_with_path, partial(_zero_if_frozen, entry.trainable))
    else:
        raise_frozen = lambda grads: grads  # noqa: E731
    value, grads = jax.jit(run)(params, jax.tree.map(np.asarray, batch_on_mesh(entry.model)), jax.random.key(5))
    return float(value), raise_frozen(grads)


def _zero_if_frozen(trainable: Callable[[str], bool], path: Any, grad: jax.Array) -> jax.Array:
    return grad if trainable("/".join(str(key.key) for key in path)) else jnp.zeros_like(grad)


def error_of(entry: Entry, check_vma: bool, api: str) -> float:
    """Returns the error of the step at dropout 0: of gradients (updates, if the step has an optimizer) and loss."""
    setting = Setting(0.0, check_vma, api, GRADIENT_IS_UPDATE)
    if entry.without_draws is not None:
        entry = replace(entry, loss=entry.without_draws, without_draws=None)
    case = entry.make(entry, setting)
    copied = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, (case.state, case.batch, case.rest))
    state, metrics, *_ = case.step(copied[0], copied[1], case.rng, *copied[2])
    value, grads = on_one_device(entry, setting)
    before = jax.tree.map(np.asarray, unbox(case.state.params))
    if entry.trainable is None:
        tx = optax.with_extra_args_support(case.state.tx)
        updates, moments = jax.device_get(tx.update(grads, tx.init(before), before))
    else:
        updates, moments = jax.tree.map(jnp.negative, grads), ()
    moved = jax.tree.map(lambda new, old: true_copies(new) - old, unbox(state.params), before)
    errors = differences(moved, updates)
    if entry.is_own and entry.tx:  # Adam's first update is the same for any multiple of the gradients
        errors += differences(jax.tree.map(true_copies, unbox(state.opt_state)), moments)
    metrics = metrics if isinstance(metrics, dict) else {"loss": metrics} if np.shape(metrics) == () else {}
    if "loss" in metrics:
        errors.append(abs(float(metrics["loss"]) - value) / max(abs(value), 1e-6))
    return max(errors)


def differences(got: Any, want: Any) -> list[float]:
    """Returns each leaf's largest difference, relative to its largest entry (at least 1/1000 of the tree's)."""
    want = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(want)]
    largest = [float(np.abs(leaf).max()) for leaf in want]
    scales = [max(own, 1e-3 * max(largest), 1e-30) for own in largest] if want else []
    pairs = zip(jax.tree.leaves(got), want, scales, strict=True)
    return [float(np.abs(leaf - other).max() / scale) for leaf, other, scale in pairs]


def true_copies(x: jax.Array) -> np.ndarray:
    """Returns the value on the host; infinite if copies on devices differ."""
    seen: dict[Any, np.ndarray] = {}
    for shard in x.addressable_shards:
        other = seen.setdefault(str(shard.index), np.asarray(shard.data))
        if not np.allclose(other, shard.data, rtol=1e-5, atol=1e-7):
            return np.full(x.shape, np.inf)
    return np.asarray(x)
