"""Compares a model sharded from outside with one device: values, gradients, AdamW steps, collectives."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.support import AXES, as_called, mesh_of
from tests.third_party.catalogue import CASES, Case
from xlstm_jax.distributed import create_train_state, make_train_step, shard_modules, unbox
from xlstm_jax.distributed.data_parallel.leaf import is_box
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path

# Adam divides by the root of the second moment: without eps, a gradient that is pure rounding would be a full step.
TX = optax.adamw(1e-2, eps=1e-4)
STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """Largest differences from one device, relative to each leaf's largest entry; and counts of collectives."""

    same_bits: bool
    gradients: float
    steps: float
    split: int
    leaves: int
    gathers: int
    scatters: int


def outcome_of(name: str, check_vma: bool) -> Outcome:
    """Returns the outcome of a model of the catalogue."""
    case, like = _reference(name)
    return sharded(case, check_vma, like)


def has_gradient(name: str, check_vma: bool) -> bool:
    """Returns whether this JAX differentiates a model; 0.12 lacks exact GELU under ``check_vma=True``."""
    return not (check_vma and jax.__version_info__ >= (0, 12) and CASES[name]().exact_gelu)


@cache
def _reference(name: str) -> tuple[Case, Any]:
    case = CASES[name]()
    return case, on_one_device(case)


def loss_of(case: Case) -> Any:
    """Returns the mean squared distance of the outputs from fixed targets: every output has a gradient."""

    def distance(result: Any) -> jax.Array:
        output = case.output(result).astype(jnp.float32)
        return jnp.mean((output - jnp.cos(jnp.arange(output[0].size)).reshape(output.shape[1:])) ** 2)

    def loss(params: Any, apply_fn: Any, batch: Any, rng: Any, collections: Any = None) -> Any:
        del rng
        if not collections:
            return distance(apply_fn({"params": params}, *batch))
        result, updated = apply_fn({"params": params, **collections}, *batch, mutable=list(collections))
        return distance(result), updated

    return loss


def on_one_device(case: Case) -> tuple[Any, Any, Any]:
    """Returns (initial parameters, gradients of the first step, parameters after ``STEPS``), without any mesh."""
    loss = loss_of(case)
    variables = dict(jax.jit(case.model.init)(jax.random.key(0), *case.inputs))
    start = params = variables.pop("params")

    @jax.jit
    def step(params: Any, collections: Any, opt_state: Any) -> Any:
        grads = jax.grad(loss, has_aux=bool(collections))(params, case.model.apply, case.inputs, None, collections)
        grads, collections = grads if collections else (grads, collections)
        updates, opt_state = TX.update(grads, opt_state, params)
        return grads, optax.apply_updates(params, updates), collections, opt_state

    opt_state, seen = TX.init(params), []
    for _ in range(STEPS):
        grads, params, variables, opt_state = step(params, variables, opt_state)
        seen.append(grads)
    return start, seen[0], params


def sharded(case: Case, check_vma: bool, like: tuple[Any, Any, Any]) -> Outcome:
    """Returns the results of the model sharded from outside, on a mesh of 2 x 2 devices."""
    mesh, (start, first, last) = mesh_of(2, 2), like
    model = shard_modules(case.on_mesh or case.model, case.where, "fsdp", min_weight_size=64)
    state = create_train_state(model, with_kept_gradients(), mesh, jax.random.key(0), *case.inputs, batch_axes=AXES)
    same_bits = all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), unbox(state.params), start)))
    leaves = leaves_with_path(state.params)
    step = make_train_step(loss_of(case), mesh, AXES, check_vma=check_vma)
    text = as_called(step.lower(state, case.inputs, jax.random.key(1)).as_text())
    distances = []
    for _ in range(STEPS):
        state, _ = step(state, case.inputs, jax.random.key(1))
        distances.append(difference(state.opt_state[0], first))
    return Outcome(
        same_bits=same_bits,
        gradients=distances[0],
        steps=difference(state.params, last),
        split=sum(is_box(leaf) for _, leaf in leaves),
        leaves=len(leaves),
        gathers=text.count("stablehlo.all_gather"),
        scatters=text.count("stablehlo.reduce_scatter"),
    )


def with_kept_gradients() -> optax.GradientTransformation:
    """Returns ``TX`` with the gradients of the last step in the state."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, state, params=None: (grads, grads)
    )
    return optax.chain(keep, TX)


def difference(got: Any, want: Any) -> float:
    """Returns the largest difference of any leaf, relative to its largest entry (the tree's, if the leaf vanishes)."""
    got, want = (jax.tree.map(lambda x: np.asarray(x, np.float64), unbox(tree)) for tree in (got, want))
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))

    def of_leaf(g: np.ndarray, w: np.ndarray) -> float:
        largest = np.abs(w).max()
        return float(np.abs(g - w).max() / (largest if largest > 1e-6 * scale else scale))

    return max(jax.tree.leaves(jax.tree.map(of_leaf, got, want)))
