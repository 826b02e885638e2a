"""Tests of parity with one device: gradients and ten AdamW steps, over every mesh and option.

The reference runs on one device without collectives. In float32 both do the same sums in another order, so the results
agree to 1e-5 of a leaf's largest entry. A gather in bfloat16 rounds each device's gradient to 8 bits before the mean:
the reference does likewise, share by share, and an entry at the border of two roundings may then fall to either side,
one bfloat16 unit (2^-8) in one share out of N.
"""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import FLOAT32_ROUNDING, Model, assert_same_params, data, fsdp, mean_loss
from xlstm_jax.distributed import DeviceMeshManager, create_train_state, make_train_step, unbox
from xlstm_jax.distributed.data_parallel.leaf import is_box, leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves

MESHES = {
    "8": {"fsdp": 8},
    "4x2": {"dp": 4, "fsdp": 2},
    "2x4": {"dp": 2, "fsdp": 4},
    "1x8": {"dp": 1, "fsdp": 8},
    "1": {"fsdp": 1},
}
STEPS, LEARNING_RATE = 10, 1e-3
BATCH = data()


def keep_gradients():
    """Returns an optax transform that passes gradients through and keeps the last gradients as state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda updates, state, params=None: (updates, updates)
    )


def optimizer():
    return optax.chain(keep_gradients(), optax.adamw(LEARNING_RATE))


def train(step, state):
    """Returns the gradients of the first step, all losses, and the last parameters."""
    losses = []
    for index in range(STEPS):
        state, metrics = step(state, BATCH, jax.random.key(0))
        losses.append(float(metrics["loss"]))
        if index == 0:
            grads = jax.device_get(state.opt_state[0])
    return grads, losses, jax.device_get(unbox(state.params))


@cache
def reference(scan: bool, cast: frozenset, shares: int):
    """Trains on one device: plain modules, a loop over shares of the batch, leaves in ``cast`` rounded to bf16."""
    model, tx = Model(scan=scan), optimizer()
    params = jax.jit(model.init)(jax.random.key(0), BATCH["x"])["params"]

    def rounded(path, leaf):
        return leaf.astype(jnp.bfloat16) if jax.tree_util.keystr(path, simple=True, separator="/") in cast else leaf

    def loss(params, share):
        return mean_loss(jax.tree_util.tree_map_with_path(rounded, params), model.apply, share)

    # Rounding happens where the gather is: on the gradient of each share, before the mean.
    gradient_of_share = jax.jit(jax.value_and_grad(loss))
    parts = [jax.tree.map(lambda x, i=i: jnp.split(x, shares)[i], BATCH) for i in range(shares)]

    @jax.jit
    def update(params, opt_state, grads):
        grads = jax.tree.map(lambda *g: sum(g) / shares, *grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return grads, optax.apply_updates(params, updates), opt_state

    opt_state, losses = tx.init(params), []
    for index in range(STEPS):
        values, grads = zip(*[gradient_of_share(params, part) for part in parts], strict=True)
        grads, params, opt_state = update(params, opt_state, grads)
        losses.append(float(sum(values)) / shares)
        if index == 0:
            first = grads
    return jax.device_get(first), losses, jax.device_get(params)


OPTIONS = (("vma", "no_vma"), ("loop", "scan"), ("keep", "remat"), ("fp32", "bf16"))
# Two trainings on each mesh; each option has one value in the first training and the other value in the second,
# chosen so that any two options occur in all four combinations.
VALUES = ("0110", "0011", "0101", "0000", "1000")
CASES = [
    (mesh_shape, *(option[(int(value) + other) % 2] for option, value in zip(OPTIONS, values, strict=True)))
    for mesh_shape, values in zip(MESHES, VALUES, strict=True)
    for other in (0, 1)
]


def test_parity_cases_cover_all_four_combinations_of_any_two_options():
    for first, second in itertools.combinations(range(1, 1 + len(OPTIONS)), 2):
        assert len({(case[first], case[second]) for case in CASES}) == 4


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mesh_shape, vma, blocks, backward, gathered", CASES)
def test_sharded_training_matches_a_single_device_for_each_parity_case(mesh_shape, vma, blocks, backward, gathered):
    scan, gather_dtype = blocks == "scan", jnp.bfloat16 if gathered == "bf16" else None
    shape = MESHES[mesh_shape]
    devices = int(np.prod(list(shape.values())))
    mesh = DeviceMeshManager.create_device_mesh(shape, devices=jax.devices()[:devices])
    model = Model(fsdp(gather_dtype=gather_dtype), scan, remat=backward == "remat")
    state = create_train_state(model, optimizer(), mesh, jax.random.key(0), BATCH["x"], batch_axes=tuple(shape))
    boxed = frozenset(path for path, leaf in leaves_with_path(state.params) if is_box(leaf))
    assert len(boxed) >= 5 and all(
        leaf_of(leaf).axes == ("fsdp",) for _, leaf in leaves_with_path(state.params) if is_box(leaf)
    )

    got = train(make_train_step(mean_loss, mesh, tuple(shape), check_vma=vma == "vma"), state)
    want = reference(scan, boxed if gather_dtype else frozenset(), devices if gather_dtype else 1)

    rounding = FLOAT32_ROUNDING if gather_dtype is None else 2.0**-8 / devices + FLOAT32_ROUNDING
    assert_same_params(got[0], want[0], rounding)
    np.testing.assert_allclose(got[1], want[1], rtol=max(rounding / 10, 2e-6))
    # A step moves an entry by at most the learning rate, with the relative error of the gradient.
    assert_same_params(
        got[2], want[2], FLOAT32_ROUNDING if gather_dtype is None else STEPS * LEARNING_RATE * rounding * 4
    )


def test_guard_parity_comparison_fails_for_a_missing_mean_or_bfloat16_weights():
    """Guard: the comparison sees gradients of a single share, and gradients of weights in bfloat16."""
    first, _, _ = reference(True, frozenset(), 1)
    model = Model()
    params = jax.jit(model.init)(jax.random.key(0), BATCH["x"])["params"]
    share = jax.tree.map(lambda x: x[:2], BATCH)
    with pytest.raises(AssertionError, match="off by"):
        assert_same_params(jax.grad(mean_loss)(params, model.apply, share), first, tolerance=0.1)
    with pytest.raises(AssertionError, match="off by"):
        narrow = map_leaves(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
        assert_same_params(jax.grad(mean_loss)(narrow, model.apply, BATCH), first)
