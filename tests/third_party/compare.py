"""One model, sharded from outside, beside the same model on one device: values, gradients, AdamW steps, collectives."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.support import mesh_of
from tests.third_party.catalogue import CASES, Case
from xlstm_jax.distributed import create_train_state, make_train_step, shard_modules, unbox
from xlstm_jax.distributed.data_parallel.boxes import is_box, leaves_with_path

# Adam divides by the root of the second moment: without this a gradient that is rounding alone would be a whole step.
TX = optax.adamw(1e-2, eps=1e-4)
STEPS = 3
AXES = ("dp", "fsdp")


@dataclass(frozen=True)
class Outcome:
    """Largest differences from one device, each over the largest entry of its leaf; and what was split and sent."""

    same_bits: bool
    gradients: float
    steps: float
    split: int
    leaves: int
    gathers: int
    scatters: int


def outcome_of(name: str, check_vma: bool) -> Outcome:
    """The outcome of a model of the catalogue."""
    case, like = _reference(name)
    return sharded(case, shard_modules(case.model, case.where, "fsdp", min_weight_size=64), check_vma, like)


@cache
def _reference(name: str) -> tuple[Case, Any]:
    case = CASES[name]()
    return case, on_one_device(case)


def loss_of(case: Case) -> Any:
    """Mean squared distance of the outputs from fixed targets: every output has a gradient."""

    def loss(params: Any, apply_fn: Any, batch: Any, rng: Any) -> jax.Array:
        del rng
        output = case.output(apply_fn({"params": params}, *batch, **case.kwargs)).astype(jnp.float32)
        return jnp.mean((output - jnp.cos(jnp.arange(output[0].size)).reshape(output.shape[1:])) ** 2)

    return loss


def on_one_device(case: Case) -> tuple[Any, Any, Any]:
    """(parameters at the start, gradients of the first step, parameters after ``STEPS``), without any mesh."""
    loss = loss_of(case)
    params = jax.jit(lambda key: case.model.init(key, *case.inputs, **case.kwargs))(jax.random.key(0))["params"]

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        grads = jax.grad(loss)(params, case.model.apply, case.inputs, None)
        updates, opt_state = TX.update(grads, opt_state, params)
        return grads, optax.apply_updates(params, updates), opt_state

    start, opt_state, first = params, TX.init(params), None
    for _ in range(STEPS):
        grads, params, opt_state = step(params, opt_state)
        first = grads if first is None else first
    return start, first, params


def sharded(case: Case, model: Any, check_vma: bool, like: tuple[Any, Any, Any]) -> Outcome:
    """The same training of ``model``, which is the case's sharded from outside, on a mesh of 2 x 2 devices."""
    mesh, (start, first, last) = mesh_of(2, 2), like
    state = create_train_state(
        model, with_kept_gradients(), mesh, jax.random.key(0), *case.inputs, batch_axes=AXES, **case.kwargs
    )
    same_bits = all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), unbox(state.params), start)))
    leaves = leaves_with_path(state.params)
    step = make_train_step(loss_of(case), mesh, AXES, check_vma=check_vma)
    text = step.lower(state, case.inputs, jax.random.key(1)).as_text()
    for index in range(STEPS):
        state, _ = step(state, case.inputs, jax.random.key(1))
        if index == 0:
            gradients = difference(state.opt_state[0], first)
    return Outcome(
        same_bits=same_bits,
        gradients=gradients,
        steps=difference(state.params, last),
        split=sum(is_box(leaf) for _, leaf in leaves),
        leaves=len(leaves),
        gathers=text.count("stablehlo.all_gather"),
        scatters=text.count("stablehlo.reduce_scatter"),
    )


def with_kept_gradients() -> optax.GradientTransformation:
    """``TX``, with the gradients of the last step in its state."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, state, params=None: (grads, grads)
    )
    return optax.chain(keep, TX)


def difference(got: Any, want: Any) -> float:
    """The largest of all leaves' largest differences, over a leaf's largest entry (the tree's, where that vanishes)."""
    got, want = (jax.tree.map(lambda x: np.asarray(x, np.float64), unbox(tree)) for tree in (got, want))
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))

    def of_leaf(g: np.ndarray, w: np.ndarray) -> float:
        largest = np.abs(w).max()
        return float(np.abs(g - w).max() / (largest if largest > 1e-6 * scale else scale))

    return max(jax.tree.leaves(jax.tree.map(of_leaf, got, want)))
