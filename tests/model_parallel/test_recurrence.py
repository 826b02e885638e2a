"""Tests of recurrences over a split sequence: states and gradients equal one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.support import FLOAT32_ROUNDING, equations, normal
from xlstm_jax.distributed import DeviceMeshManager, value_and_grad
from xlstm_jax.distributed.model_parallel.recurrence import recurrence_over_axis, scan_over_axis

TOKENS, SIZE = 24, 3
DECAY = np.random.default_rng(0).uniform(0.5, 1, (TOKENS, 1)).astype(np.float32)
UPDATE, INITIAL = normal(1, (TOKENS, SIZE)), np.arange(1, 1 + SIZE, dtype=np.float32)


def mesh_of_sequence(devices):
    return DeviceMeshManager.create_device_mesh({"cp": devices}, devices=jax.devices()[:devices])


def one_after_the_other(decay, update, initial, reverse=False):
    def step(state, token):
        state = token[0] * state + token[1]
        return state, state

    return lax.scan(step, initial, (decay, update), reverse=reverse)[1]


def split_states(decay, update, initial, reverse=False):
    """Returns the states of local tokens: scanned from a zero state, plus the decayed state of earlier devices."""

    def combine(before, after):
        return before[0] * after[0], after[0] * before[1] + after[1]

    decays, states = lax.associative_scan(combine, (decay, update), reverse=reverse)
    last = 0 if reverse else -1
    arrived = recurrence_over_axis(decays[last], states[last], initial=initial, reverse=reverse)
    return states + decays * arrived


SPECS = P("cp"), P("cp"), P()


# Over 6 devices the last round combines devices at a distance of 4, which is more than half of the axis.
@pytest.mark.parametrize("devices, check_vma, reverse", [(4, True, False), (6, False, True), (8, False, False)])
def test_recurrence_states_and_gradients_match_a_single_device(devices, check_vma, reverse):
    mesh = mesh_of_sequence(devices)

    def loss(states):
        return jnp.mean(states**2 * (1 + jnp.arange(SIZE)))

    def local(params, decay, update):
        states = split_states(decay, update, params, reverse)
        return loss(states), states

    step = value_and_grad(local, "cp", has_aux=True)
    split = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("cp"), P("cp")), out_specs=((P(), P("cp")), P()), check_vma=check_vma
    )
    (value, states), grad = jax.jit(split)(INITIAL, DECAY, UPDATE)
    want = one_after_the_other(DECAY, UPDATE, INITIAL, reverse)
    np.testing.assert_allclose(states, want, rtol=FLOAT32_ROUNDING, atol=FLOAT32_ROUNDING)
    np.testing.assert_allclose(value, loss(want), rtol=FLOAT32_ROUNDING)
    of_one = jax.grad(lambda initial: loss(one_after_the_other(DECAY, UPDATE, initial, reverse)))(INITIAL)
    np.testing.assert_allclose(grad, of_one, rtol=FLOAT32_ROUNDING)


def test_scan_over_six_devices_combines_the_steps_before_a_device_in_order():
    """A step appends the digit of its device to a number, at first 9; a reverse scan begins with the last device."""
    mesh, first = mesh_of_sequence(6), (np.int32(10), np.int32(9))

    def append(before, after):
        return before[0] * after[0], before[1] * after[0] + after[1]

    def numbers(digit):
        step = jnp.int32(10), digit[0]
        found = [scan_over_axis(append, step, first=first, reverse=reverse)[1] for reverse in (False, True)]
        return jnp.stack(found)[:, None]

    split = jax.shard_map(numbers, mesh=mesh, in_specs=P("cp"), out_specs=P(None, "cp"))
    found = jax.jit(split)(np.arange(6, dtype=np.int32))
    assert found.tolist() == [[9, 90, 901, 9012, 90123, 901234], [954321, 95432, 9543, 954, 95, 9]]


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_recurrence_gradients_of_decays_and_updates_match_a_single_device(check_vma):
    split = jax.shard_map(
        split_states, mesh=mesh_of_sequence(4), in_specs=SPECS, out_specs=P("cp"), check_vma=check_vma
    )

    def loss(fn, decay, update):
        return jnp.sum(fn(decay, update, INITIAL) ** 2)

    got = jax.jit(jax.grad(lambda *arrays: loss(split, *arrays), (0, 1)))(DECAY, UPDATE)
    want = jax.jit(jax.grad(lambda *arrays: loss(one_after_the_other, *arrays), (0, 1)))(DECAY, UPDATE)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=FLOAT32_ROUNDING * np.abs(w).max())
    # guard: states differ without the state of earlier devices
    alone = one_after_the_other(DECAY[6:], UPDATE[6:], jnp.zeros(SIZE))
    assert np.abs(alone - one_after_the_other(DECAY, UPDATE, INITIAL)[6:]).max() > 0.1


def stabilized(before, after):
    """Combines steps of an exponential gate: log decay, largest exponent so far, state over its exponential."""
    (decay_1, largest_1, state_1), (decay_2, largest_2, state_2) = before, after
    largest = jnp.maximum(largest_1 + decay_2, largest_2)
    state = jnp.exp(largest_1 + decay_2 - largest) * state_1 + jnp.exp(largest_2 - largest) * state_2
    return decay_1 + decay_2, largest, state


def test_scan_over_axis_combines_stabilized_xlstm_steps():
    """``scan_over_axis`` combines xLSTM steps with exponents of hundreds, which float32 needs a stabilizer for."""
    log_decay, exponent = jnp.log(DECAY[:, 0]), 200 * jnp.sin(jnp.arange(TOKENS))
    none = jnp.zeros(()), jnp.float32(-1e30), jnp.zeros(())

    def local(log_decay, exponent, update):
        own = lax.associative_scan(lambda a, b: jax.vmap(stabilized)(a, b), (log_decay, exponent, update))
        before = scan_over_axis(stabilized, jax.tree.map(lambda x: x[-1], own), "cp", first=none)
        return jax.vmap(lambda after: stabilized(before, after))(own)

    split = jax.shard_map(local, mesh=mesh_of_sequence(4), in_specs=P("cp"), out_specs=P("cp"))
    inputs = log_decay, exponent, UPDATE[:, 0]
    want = lax.associative_scan(lambda a, b: jax.vmap(stabilized)(a, b), inputs)
    for g, w in zip(jax.jit(split)(*inputs), want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_gradients_through_scan_over_axis_are_finite_where_nothing_arrives():
    """The first devices receive zeros from nobody; the gradient of a logarithm at zero must not enter the sum."""

    def product(before, after):
        return jnp.exp(jnp.log(before * after))

    def local(x):
        return scan_over_axis(product, x[0], "cp", first=jnp.float32(1))[None]

    split = jax.shard_map(local, mesh=mesh_of_sequence(3), in_specs=P("cp"), out_specs=P("cp"))
    got = jax.jit(jax.grad(lambda x: split(x).sum()))(jnp.array([2.0, 3.0, 5.0]))
    want = [1 + 3, 2, 0]  # of 1 + x[0] + x[0] x[1]
    np.testing.assert_allclose(got, want, rtol=1e-5, err_msg="devices to which nothing was sent have another gradient")


def test_decay_of_more_dims_than_the_state_is_refused():
    with pytest.raises(ValueError, match=r"decay of shape \(1, 3\) and initial of shape \(3,\) do not fit"):
        recurrence_over_axis(jnp.ones((1, 3)), jnp.ones(3))


def test_recurrence_takes_logarithmically_many_ppermutes():
    split = jax.shard_map(split_states, mesh=mesh_of_sequence(8), in_specs=SPECS, out_specs=P("cp"), check_vma=False)
    found = [eqn.primitive.name for _, eqn in equations(jax.make_jaxpr(split)(DECAY, UPDATE, INITIAL))]
    assert found.count("ppermute") == 2 * (3 + 1)  # decays and states; by 1, 2, 4, and to the next device


def test_recurrence_keeps_the_state_dtype_with_a_wider_decay():
    local = lambda decay, state: recurrence_over_axis(decay[-1], state[-1].astype(jnp.bfloat16))  # noqa: E731
    split = jax.shard_map(local, mesh=mesh_of_sequence(2), in_specs=P("cp"), out_specs=P("cp"))
    assert jax.eval_shape(split, DECAY, UPDATE).dtype == jax.eval_shape(local, DECAY, UPDATE).dtype == jnp.bfloat16


def test_recurrence_outside_shard_map_runs_on_the_unsharded_sequence():
    got, want = (jax.jit(fn)(DECAY, UPDATE, INITIAL) for fn in (split_states, one_after_the_other))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
