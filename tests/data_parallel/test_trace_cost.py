"""Tests of the costs before and between steps, measured as counts, because times vary.

Equal layers of a Python loop share the functions that gather weights and scatter gradients. A call of a step runs a
fixed number of functions of the library, independent of the size of the state, and one function per box.
"""

import re
import sys
from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import xlstm_jax
from tests.support import AXES, mesh_of
from xlstm_jax.distributed import create_train_state, make_train_step, shard_modules
from xlstm_jax.distributed.data_parallel import gather_array_with_mean_grads
from xlstm_jax.distributed.data_parallel.leaf import is_box
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.equations import all_equations

KINDS = ("all_gather", "reduce_scatter")
LIBRARY = xlstm_jax.__path__[0]
MAKES_A_BOX = "_of_parts"


class Loop(nn.Module):
    """Layers in a Python loop, with kernels of rank 2 or 3."""

    layers: int
    general: bool = False

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            up = nn.DenseGeneral((4, 16), name=f"up_{i}") if self.general else nn.Dense(64, name=f"up_{i}")
            down = nn.DenseGeneral(32, (-2, -1), name=f"down_{i}") if self.general else nn.Dense(32, name=f"down_{i}")
            x = x + down(nn.relu(up(x)))
        return x


def loss_fn(params, apply_fn, batch, rng):
    return jnp.mean(apply_fn({"params": params}, batch) ** 2)


@cache
def step_of(layers, general=False, made_by=lambda make: make()):
    """Returns a step of the sharded model, and its arguments; ``jax.eval_shape`` makes the shapes of a state."""
    model, mesh, x = Loop(layers, general), mesh_of(2, 4), jnp.ones((8, 32))
    model = shard_modules(model, (nn.Dense, nn.DenseGeneral), AXES, 2**8)
    state = made_by(lambda: create_train_state(model, optax.sgd(0.1), mesh, jax.random.key(0), x, batch_axes=AXES))
    return make_train_step(loss_fn, mesh, AXES), (state, x, jax.random.key(0))


@cache
def plain_step_of(layers, general=False):
    """Returns a step on global arrays, and its arguments."""
    model, x = Loop(layers, general), jnp.ones((8, 32))
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))

    def step(state, batch, rng):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch, rng)
        return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    return jax.jit(step), (state, x, jax.random.key(0))


@cache
def equations_of_step(make, layers, general):
    """Returns the number of equations that JAX has traced; equations of a shared function count once."""
    step, args = make(layers, general)
    return len(list(all_equations(step.trace(*args).jaxpr.eqns)))


@pytest.mark.parametrize("general", [False, True])
def test_equal_layers_share_lowered_gather_and_scatter_functions(general):
    few, many = (
        {kind: len(re.findall(rf'"stablehlo.{kind}"', step.lower(*args).as_text())) for kind in KINDS}
        for step, args in (step_of(layers, general, jax.eval_shape) for layers in (2, 3))
    )
    assert few == many
    assert not [kind for kind, count in few.items() if count == 0]  # guard


@pytest.mark.parametrize("general", [False, True])
def test_sharded_layer_adds_at_most_20_percent_more_equations_than_a_plain_layer(general):
    ours, plain = (
        equations_of_step(make, 10, general) - equations_of_step(make, 7, general) for make in (step_of, plain_step_of)
    )
    assert ours <= 1.2 * plain, (ours, plain)


def test_gradient_products_have_an_optimization_barrier_on_cpu_only():
    """A barrier stops XLA from transposing bfloat16 products, whose transposed form has no CPU kernels."""

    def grad(shard, x):
        return jax.grad(lambda shard: jnp.sum(x @ gather_array_with_mean_grads(shard, 0, "fsdp")))(shard)

    spec = jax.P("fsdp")
    step = jax.jit(jax.shard_map(grad, mesh=mesh_of(1, 8), in_specs=(spec, spec), out_specs=spec))
    traced = step.trace(jnp.ones((64, 32), jnp.bfloat16), jnp.ones((16, 64), jnp.bfloat16))
    on_cpu, on_tpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "tpu"))
    assert "optimization_barrier" in on_cpu
    assert "optimization_barrier" not in on_tpu


def calls_of_a_step(layers):
    """Returns the names of the library functions that a call of a step runs."""
    step, (state, x, rng) = step_of(layers)
    state, called = jax.tree.map(jnp.copy, state), []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            called.append(frame.f_code.co_name)

    for _ in range(3):
        called.clear()
        sys.setprofile(note)
        try:
            state, _ = step(state, x, rng)
        finally:
            sys.setprofile(None)
    return called


def boxes_of(tree):
    return [leaf for _, leaf in leaves_with_path(tree) if is_box(leaf)]


def test_step_call_runs_a_fixed_number_of_python_functions_for_any_state_size():
    few, many = ([name for name in calls_of_a_step(layers) if name != MAKES_A_BOX] for layers in (2, 5))
    assert few == many
    # Four of these walk the table of checks, and four look for a mesh with explicit axes.
    assert 0 < len(many) <= 28, many


def test_step_call_creates_each_box_exactly_once():
    _, (state, _, _) = step_of(5)
    assert calls_of_a_step(5).count(MAKES_A_BOX) == len(boxes_of(state)) > 5


def test_step_returns_boxes_with_the_identical_field_objects():
    """A step returns the same field objects of boxes, so that the next call compares them by identity."""
    step, (state, x, rng) = step_of(2)
    after, _ = step(jax.tree.map(jnp.copy, state), x, rng)
    pairs = [(vars(a), vars(b)) for a, b in zip(*(boxes_of(tree) for tree in (state, after)), strict=True)]
    assert not [i for i, (a, b) in enumerate(pairs) if a is not b], "these boxes have other objects as fields"
    assert len(pairs) > 2  # guard
