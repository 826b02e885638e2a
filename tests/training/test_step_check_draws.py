"""Tests of ``check_step`` for losses that draw: exact at any dropout, and failing if the checker is broken."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.support import AXES, data, fsdp, mesh_of
from xlstm_jax.distributed import (
    Replicas,
    check_step,
    create_train_state,
    fold_rng_over_axis,
    make_train_step,
    partition_specs,
    value_and_grad,
)
from xlstm_jax.distributed.training.step_check import check as checker
from xlstm_jax.distributed.training.step_check import comparison, one_device
from xlstm_jax.distributed.training.step_check.comparison import Multiple
from xlstm_jax.distributed.training.step_check.draws import CHOICES, constant_key, constant_like, folded, is_key, traced

KEY, BATCH = jax.random.key(0), data()


class Net(nn.Module):
    rate: float = 0.5
    wrap: object = fsdp()

    @nn.compact
    def __call__(self, x):
        h = nn.tanh(self.wrap(nn.Dense)(16)(nn.Dropout(self.rate, deterministic=False)(x)))
        return self.wrap(nn.Dense)(4)(nn.Dropout(self.rate, deterministic=False)(h))


def loss_by(reduce):
    def loss(params, apply_fn, batch, rng):
        out = apply_fn({"params": params}, batch["x"], rngs={"dropout": rng})
        return reduce(jnp.mean((out - batch["y"]) ** 2, -1))

    return loss


def state_of(model=None):
    keys = {"params": KEY, "dropout": KEY}
    return create_train_state(model or Net(), optax.sgd(0.1), mesh_of(2, 4), keys, BATCH["x"], batch_axes=AXES)


def check(loss, state=None, **options):
    return check_step(make_train_step(loss, mesh_of(2, 4), AXES, **options), state or state_of(), BATCH, KEY)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rate, minibatches", [(0.1, 1), (0.8, 2)])
def test_check_step_with_dropout_accepts_a_mean_and_gives_the_exact_ratio_of_a_sum(rate, minibatches):
    state = state_of(Net(rate))
    right = check(loss_by(jnp.mean), state, num_minibatches=minibatches)
    assert right.verdict == "right", str(right)
    assert max(abs(leaf.ratio - 1) for leaf in right.leaves) < 1e-5 and abs(right.loss_ratio - 1) < 1e-5
    wrong = check(loss_by(jnp.sum), state, num_minibatches=minibatches)
    assert wrong.verdict == "wrong" and "it is a sum over examples" in " ".join(str(wrong).split())
    np.testing.assert_allclose([leaf.ratio for leaf in wrong.leaves], 1 / 8 / minibatches, rtol=1e-5)


def test_guard_check_step_with_other_dropout_keys_than_the_devices_is_wrong(monkeypatch):
    monkeypatch.setattr(one_device, "_key_of", lambda rng, *at: jax.random.fold_in(rng, 7))
    found = check(loss_by(jnp.mean))
    assert found.verdict == "wrong" and "no multiple of the right ones" in " ".join(str(found).split())


@pytest.mark.slow
def test_guard_check_step_without_slice_comparison_accepts_a_sum_loss(monkeypatch):
    equal = lambda self, key, mean, whole, *rest: (Multiple("equal"), [leaf_of(path) for path in mean.grads], [])  # noqa: E731
    leaf_of = lambda path: comparison.LeafCheck(path, (), 1.0, 0.0, 0.0)  # noqa: E731
    monkeypatch.setattr(checker.Comparison, "objective", equal)
    assert check(loss_by(jnp.sum)).verdict == "right"


def test_check_step_judges_random_draws_by_row_position_exactly():
    """Draws by row position, as stratified times of diffusion models, are judged exactly."""

    def loss(params, apply_fn, batch, rng, reduce=jnp.mean):
        count = len(batch["x"])
        t = (jax.random.uniform(rng) + jnp.arange(count) / count) % 1
        return reduce(jnp.mean((apply_fn({"params": params}, batch["x"] * t[:, None]) - batch["y"]) ** 2, -1))

    state = state_of(nn.Sequential([fsdp(nn.Dense)(16), nn.tanh, fsdp(nn.Dense)(4)]))
    assert check(loss, state).verdict == "right"
    found = check(lambda *args: loss(*args, reduce=jnp.sum), state)
    assert found.verdict == "wrong" and "it is a sum over examples" in " ".join(str(found).split())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("reduce", [lambda x: x[:-1].mean(), jnp.max], ids=["without the last row", "the worst row"])
def test_check_step_does_not_mistake_row_weights_for_draws_by_position(reduce):
    found = check(loss_by(reduce))
    assert found.verdict == "wrong" and "no mean over rows" in " ".join(str(found).split())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options", [{"gather_dtype": "int8"}, {"gather_dtype": "bfloat16", "grad_scatter_dtype": "bfloat16"}], ids=str
)
def test_check_step_accepts_rounding_of_int8_and_bfloat16_communication(options):
    """``check_step`` compares weights as gathered; narrow sums may err by rounding, far below any factor."""
    wrap = fsdp(replicas=Replicas("dp", reduce_dtype="int8"), **options)
    state = state_of(Net(wrap=wrap))
    found = check(loss_by(jnp.mean), state)
    assert found.verdict == "right", str(found)
    assert max(leaf.tolerance for leaf in found.leaves) < 0.2  # guard: a sum over 8 devices exceeds 0.2 by far


# ------------------------------------------------------------------------------------------------------ custom steps


def own_step(key_of, factor=1.0):
    state = state_of()
    specs = partition_specs(state.params, mesh_of(2, 4))

    @jax.jit
    def step(state, batch, rng):
        def local(params, batch, rng, count):
            loss = lambda params: loss_by(jnp.mean)(params, state.apply_fn, batch, key_of(rng, count))  # noqa: E731
            value, grads = value_and_grad(loss, AXES)(params)
            return value, jax.tree.map(lambda g: factor * g, grads)

        on_mesh = jax.shard_map(local, mesh=mesh_of(2, 4), in_specs=(specs, P(AXES), P(), P()), out_specs=(P(), specs))
        value, grads = on_mesh(state.params, batch, rng, state.step)
        return state.apply_gradients(grads=grads), {"loss": value}

    return step, state


def by_index(rng, count):
    return jax.random.split(rng, 8)[lax.axis_index(AXES)]


def of_its_own(rng, count):
    return fold_rng_over_axis(jax.random.fold_in(jax.random.key(3), count), AXES)


@pytest.mark.parametrize("factor, verdict", [(1.0, "right"), (0.125, "wrong")])
def test_check_step_compares_a_custom_step_exactly_for_any_use_of_the_key(factor, verdict):
    step, state = own_step(by_index, factor)
    found = check_step(step, state, BATCH, KEY, loss_fn=loss_by(jnp.mean))
    assert found.verdict == verdict, str(found)
    np.testing.assert_allclose([leaf.ratio for leaf in found.leaves], factor, rtol=1e-5)


def test_check_step_of_untraceable_keys_leaves_the_verdict_open_instead_of_right(monkeypatch):
    """With few keys the means are too uncertain: the verdict is "cannot tell", and names the missing input."""
    monkeypatch.setattr(comparison, "MOST_KEYS", 8)
    step, state = own_step(of_its_own)
    found = check_step(step, state, BATCH, KEY, loss_fn=loss_by(jnp.mean))
    assert found.verdict == "cannot tell" and not found.ok and "For a verdict" in " ".join(str(found).split())


def test_check_step_by_means_over_keys_detects_a_reported_loss_of_twice_the_objective(monkeypatch):
    monkeypatch.setattr(comparison, "MOST_KEYS", 8)
    loss = lambda params, apply_fn, x, rng: jnp.mean(apply_fn({"params": params}, x))  # noqa: E731
    state = create_train_state(
        nn.Dense(1, use_bias=False), optax.sgd(0.1), mesh_of(1, 1), KEY, jnp.ones((2, 2)), batch_axes=AXES
    )

    @jax.jit
    def step(state, x, rng):
        assert rng.dtype == KEY.dtype  # no constant key: the checker must compare means over keys
        value, grads = jax.value_and_grad(loss)(state.params, state.apply_fn, x, rng)
        return state.apply_gradients(grads=grads), {"loss": 2 * value}

    found = check_step(step, state, jnp.ones((2, 2)), KEY, loss_fn=loss)
    assert found.verdict == "wrong" and found.loss_ratio == pytest.approx(2), str(found)
    assert [leaf.ratio for leaf in found.leaves] == pytest.approx([1])


def test_means_over_keys_compare_the_loss_beside_the_gradients(monkeypatch):
    """The runs are stand-ins: loss and gradient are 3 for each key, and the step reports twice the loss."""
    three = np.float32(3)

    class Moved:
        def __init__(self, step, state, step_args, one_device):
            assert state == "advanced"

        def observed(self, rng, expected):
            values = {"w": jax.device_put(three[None])}
            return SimpleNamespace(loss=SimpleNamespace(value=6.0), observed_values=values, of_gradients=dict)

    expected = SimpleNamespace(loss=three, grads={"w": three[None]})
    one_device = SimpleNamespace(on_full_batch=lambda rng: expected, tree=dict, loss=SimpleNamespace(weighted=False))
    state = SimpleNamespace(step=0, replace=lambda step: "advanced")
    itself = SimpleNamespace(step=None, state=state, step_args=(None, None), one_device=one_device)
    itself.axes, itself.axis_sizes, itself.of_leaves = {"w": ()}, {}, lambda *args: []
    itself.checked = lambda findings, seen, method, leaves, ratio: (findings, ratio, [leaf.ratio for leaf in leaves])
    by_many_keys = checker.Comparison.by_many_keys
    monkeypatch.setattr(checker, "Comparison", Moved)
    monkeypatch.setattr(checker, "folded", lambda rng, i: i)
    findings, ratio, of_leaves = by_many_keys(itself, "a test")
    assert len(findings) == 1 and ratio == pytest.approx(2) and of_leaves == pytest.approx([1])


def sample_of(factor, rest, noise):
    rng = np.random.default_rng(0)
    right, beside = np.eye(16)[0] * 4, np.eye(16)[1] * 4

    def sample(i):
        del i
        one, ours = (scale * noise * rng.normal(size=16) for scale in (1, factor))
        return {"w": factor * right + rest * beside + ours}, {"w": right + one}

    return sample


@pytest.mark.parametrize(
    "factor, rest, noise, known, equal",
    [(1, 0, 1.0, True, True), (0.125, 0, 1.0, True, False), (1, 1, 0.5, True, False), (1, 0, 1e3, False, None)],
)
def test_ratios_over_keys_are_known_unless_the_noise_is_too_large(factor, rest, noise, known, equal):
    found, count = comparison.ratios(sample_of(factor, rest, noise))
    ratio = found["w"]
    assert ratio.is_known == known and (known or count == comparison.MOST_KEYS)
    if known:
        assert (np.hypot(ratio.value - 1, ratio.relative_residual) <= ratio.allowed) == equal, ratio


def test_ratio_is_known_if_noise_explains_at_most_half_of_the_nearest_ratio():
    # A ratio of two devices is off by 0.5 from 1: noise of 0.25 on either side could not be told apart.
    known = [comparison.Ratio(1.0, 0.0, allowed).is_known for allowed in (0.24, 0.25, 0.26)]
    assert known == [True, True, False], f"known with noise of 0.24, 0.25 and 0.26: {known}"


def test_constant_key_draws_equal_values_for_any_shape_fold_or_split():
    for u in CHOICES:
        key = constant_key(u)
        for own in (
            key,
            jax.random.fold_in(key, 3),
            *jax.random.split(key, 2),
            jax.vmap(jax.random.split)(key[None])[0],
        ):
            draws = jax.random.uniform(own if own.ndim == 0 else own[0], (5,))
            np.testing.assert_allclose(draws, u, atol=1e-6)
    np.testing.assert_array_equal(jax.random.permutation(constant_key(), 9), np.arange(9))
    assert np.isfinite(jax.random.gamma(constant_key(CHOICES[2]), 0.3, (4,))).all()  # rejects, and ends
    assert jax.random.poisson(jax.random.key(0), 3.0) >= 0


def test_keys_of_a_step_are_typed_keys_and_old_style_keys_of_two_words():
    tree = {
        "typed": KEY,
        "old": jax.random.PRNGKey(3),
        "words": jnp.zeros(3, jnp.uint32),
        "small": jnp.zeros(2, jnp.uint16),
    }
    assert {name for name, leaf in tree.items() if is_key(leaf)} == {"typed", "old"}
    assert not is_key("a text")
    found = folded(tree, 5)
    np.testing.assert_array_equal(found["old"], jax.random.fold_in(jax.random.PRNGKey(3), 5))
    assert found["typed"] == jax.random.fold_in(KEY, 5) and found["words"] is tree["words"]


def test_traced_detects_draws_from_the_given_key_and_from_other_keys():
    other = jax.random.key(1)
    draw = lambda key, x: x + jax.random.normal(key, x.shape)  # noqa: E731
    mine, x = constant_like({"dropout": KEY})["dropout"], jnp.ones(3)
    assert traced(jax.make_jaxpr(draw)(mine, x))[:2] == (True, False)
    assert traced(jax.make_jaxpr(lambda key, x: draw(other, draw(key, x)))(mine, x))[:2] == (True, True)
    assert traced(jax.make_jaxpr(lambda key, x: x)(mine, x))[:2] == (False, False)
