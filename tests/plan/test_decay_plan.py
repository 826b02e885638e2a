"""The plan's column of weight decay says what optax does to parameters without a gradient."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from rich.console import Console

from xlstm_jax.distributed import muon, nnx_model, plan_sharding, shard_modules
from xlstm_jax.distributed.plan import ShardingPlan
from xlstm_jax.distributed.plan.decay_plan import decay_plans
from xlstm_jax.distributed.plan.uniform_arrays import (
    FINITE,
    MAX_LOOPS,
    UNKNOWN,
    _number,
    _same,
    evaluate,
    uniform_value,
)

PARAMS = {"kernel": jnp.full((16, 8), 1.5), "bias": jnp.full((8,), -0.5), "table": jnp.full((64, 4), 0.25)}
WARMUP = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


TRANSFORMS = {
    "adamw": optax.adamw(1e-3),
    "adam": optax.adam(1e-3),
    "sgd with momentum": optax.sgd(0.1, momentum=0.9),
    "mask by rank, after warm-up": optax.adamw(WARMUP, weight_decay=0.1, mask=matrices),
    "mask by size": optax.adamw(1e-3, mask=lambda tree: jax.tree.map(lambda p: p.size > 200, tree)),
    "mask as a tree": optax.adamw(1e-3, mask={"kernel": False, "bias": False, "table": True}),
    "after clipping": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=matrices)),
    "injected": optax.inject_hyperparams(optax.adamw, static_args=("mask",))(WARMUP, weight_decay=0.1, mask=matrices),
    # Without static_args optax takes the mask for a schedule, and nothing decays.
    "injected mask": optax.inject_hyperparams(optax.adamw)(WARMUP, weight_decay=0.1, mask=matrices),
    "every eighth step": optax.MultiSteps(optax.adamw(1e-2, mask=matrices), 8),
    "lion": optax.lion(1e-3, mask=matrices),
    "lamb": optax.lamb(1e-2, weight_decay=0.1, mask=matrices),
    "adafactor": optax.adafactor(1e-2, weight_decay_rate=1e-2, weight_decay_mask=matrices),
    "muon": optax.contrib.muon(1e-2, weight_decay=0.1),
    "partition": optax.partition(
        {"a": optax.adamw(1e-2), "b": optax.adam(1e-2)}, {"kernel": "a", "bias": "b", "table": "b"}
    ),
    "L2 of plain SGD": optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(0.1)),
}


def decaying(tx):
    return {path: plan.decays for plan in decay_plans(tx, PARAMS) for path in plan.leaves}


def of_optax(tx):
    """Runs the optimizer with gradients of 0: "yes" for a leaf whose size has become smaller."""
    state, params, zeros = tx.init(PARAMS), PARAMS, jax.tree.map(jnp.zeros_like, PARAMS)
    for _ in range(10):
        updates, state = tx.update(zeros, state, params)
        params = optax.apply_updates(params, updates)
    return {name: "yes" if np.abs(params[name]).max() < np.abs(PARAMS[name]).max() else "no" for name in PARAMS}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_decay_plan_says_what_optax_does_without_a_gradient(name):
    assert decaying(TRANSFORMS[name]) == of_optax(TRANSFORMS[name])


def test_guard_transforms_decay_some_leaves_and_others_not():
    found = {name: tuple(decaying(tx).values()) for name, tx in TRANSFORMS.items()}
    assert set(found["mask by size"]) == {"yes", "no"} and set(found["adam"]) == {"no"}
    assert set(found["injected mask"]) == {"no"} and set(found["injected"]) == {"yes", "no"}


@pytest.mark.parametrize(
    "tx, reason",
    [
        (optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-3)), "not proportional to the parameter"),
        (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adamw(1e-3)), "cannot be evaluated"),
        (optax.adamw(optax.piecewise_constant_schedule(0.0, {})), "no update in the first 32 steps"),
        (optax.polyak_sgd(), "tx.update raised TypeError"),
    ],
    ids=["L2 before Adam", "noise", "never", "extra arguments"],
)
def test_decay_plan_cannot_tell_and_says_why(tx, reason):
    (plan,) = decay_plans(tx, PARAMS)
    assert plan.decays == "?" and reason in plan.reason
    text = str(plan_sharding(nn.Dense(8), {"fsdp": 8}, jnp.ones((8, 16)), min_weight_size=16, tx=tx))
    assert "Leaves whose weight decay is unknown" in text and reason in " ".join(text.split())


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for index in range(3):
            x = nn.LayerNorm(name=f"norm_{index}")(nn.Dense(512, name=f"up_{index}")(x))
        return x


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.List([nnx.Linear(512, 512, rngs=rngs) for _ in range(3)])
        self.norm = nnx.List([nnx.LayerNorm(512, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for up, norm in zip(self.up, self.norm, strict=True):
            x = norm(up(x))
        return x


MODELS = {
    "linen": (Linen(), {"up_0/kernel": "yes", "norm_2/scale": "no"}),
    "nnx": (
        shard_modules(nnx_model(Nnx), nnx.Linear, "fsdp", min_weight_size=512),
        {"up/0/kernel": "yes", "norm/2/scale": "no"},
    ),
}


def text_of(plan, width):
    console = Console(width=width)
    with console.capture() as captured:
        console.print(plan.table())
    return captured.get()


@pytest.mark.parametrize("name", MODELS)
def test_plan_has_a_column_of_weight_decay_that_narrow_terminals_leave_out(name):
    model, want = MODELS[name]
    x, tx = jnp.ones((8, 512)), optax.adamw(WARMUP, mask=matrices)
    plan = plan_sharding(model, {"dp": 2, "fsdp": 4}, x, tx=tx)
    found = {path: entry.decays for entry in plan.decay for path in entry.leaves}
    assert want.items() <= found.items() and len(found) == 12
    wide, narrow = text_of(plan, 160), text_of(plan, 80)
    kernels = [line for line in wide.splitlines() if "kernel" in line]
    assert "decays" in wide and {line.split()[-1] for line in kernels} == {"yes"}
    assert "A wider terminal also shows: decays" in narrow
    assert sum("kernel" in line for line in narrow.splitlines()) == len(kernels)  # a leaf is a line
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert not plan_sharding(model, {"dp": 2, "fsdp": 4}, x).decay


def test_optimizer_is_traced_for_weight_decay_when_a_plan_is_read_not_when_it_is_made():
    traced = []

    def update(updates, state, params=None):
        traced.append(params)
        return optax.adamw(1e-3).update(updates, state, params)

    tx = optax.GradientTransformation(optax.adamw(1e-3).init, update)
    plan = plan_sharding(Linen(), {"fsdp": 8}, jnp.ones((8, 512)), tx=tx)
    assert plan.optimizer.total and not traced
    assert plan.decay[0].decays == "yes" and len(traced) == 1
    assert "yes" in text_of(plan, 160) and pickle.loads(pickle.dumps(plan)) == plan and len(traced) == 1


def test_leaves_that_decay_differently_have_lines_of_their_own():
    def first_alone(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "up_0" in str(path), params)

    plan = plan_sharding(Linen(), {"fsdp": 8}, jnp.ones((8, 512)), tx=optax.adamw(1e-3, mask=first_alone))
    cells = [line.split()[-1] for line in text_of(plan, 160).splitlines() if "f32 512×512" in line]
    assert sorted(cells) == ["no", "yes"]


def test_frozen_parameters_have_no_weight_decay_in_the_plan():
    plan = plan_sharding(
        Linen(), {"fsdp": 8}, jnp.ones((8, 512)), tx=optax.adamw(1e-3), trainable=lambda path: "up_1" not in path
    )
    leaves = [path for entry in plan.decay for path in entry.leaves]
    assert "up_0/kernel" in leaves and "up_1/kernel" not in leaves


def test_plan_cannot_tell_the_weight_decay_of_the_librarys_muon():
    plan = plan_sharding(Linen(), {"fsdp": 8}, jnp.ones((8, 512)), tx=muon(1e-2, weight_decay=0.1))
    found = {path: entry.decays for entry in plan.decay for path in entry.leaves}
    # The program of the orthogonalisation cannot be evaluated on uniform arrays: the plan says so.
    assert (found["up_0/kernel"], found["up_0/bias"]) == ("?", "no")
    assert "cannot be evaluated" in next(entry.reason for entry in plan.decay if entry.decays == "?")


def test_nnx_filters_make_masks_whose_decay_the_plan_shows():
    model = MODELS["nnx"][0]
    mask = model.leaf_mask(nnx.Not(nnx.Any(nnx.PathContains("norm"), nnx.PathContains("bias"))))
    plan = plan_sharding(model, {"fsdp": 8}, jnp.ones((8, 512)), tx=optax.adamw(1e-3, mask=mask))
    found = {path: entry.decays for entry in plan.decay for path in entry.leaves}
    assert {path for path, decays in found.items() if decays == "yes"} == {f"up/{index}/kernel" for index in range(3)}
    assert set(found.values()) == {"yes", "no"}


@pytest.mark.parametrize(
    "update, decays, reason",
    [
        (lambda g, p: -0.1 * g - 0.01 * p, "yes", ""),
        (lambda g, p: -0.1 * g, "no", ""),
        (lambda g, p: -0.1 * g + 0.01 * p, "?", "is not proportional"),  # grows
        (lambda g, p: -0.1 * g - 0.01 * p**2, "?", "is not proportional"),
        (lambda g, p: -0.1 * g - 0.01 * jnp.sign(p), "?", "is not proportional"),
        (lambda g, p: -0.1 * g - 0.01 * jnp.sort(p), "?", "cannot be evaluated"),
        (lambda g, p: 0 * g, "?", "no update in the first 32 steps"),
    ],
    ids=["decay", "none", "growth", "square", "sign", "sorted", "nothing"],
)
def test_decay_is_an_update_towards_0_in_proportion_to_the_parameter(update, decays, reason):
    tx = optax.stateless(lambda updates, params: jax.tree.map(update, updates, params))
    (found,) = decay_plans(tx, {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32)})
    assert (found.decays, found.leaves) == (decays, ("w",)) and reason in found.reason


def test_decay_that_begins_after_some_steps_is_found_by_the_state_of_the_optimizer():
    schedule = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(0.1)], [5])
    (found,) = decay_plans(optax.adamw(schedule), {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32)})
    assert found.decays == "yes"


X, W, N = (jax.ShapeDtypeStruct(*kind) for kind in (((4, 8), jnp.float32), ((8, 3), jnp.float32), ((), jnp.int32)))
ARANGE = np.arange(8.0, dtype=np.float32)


@pytest.mark.parametrize(
    "function, arguments, want",
    [
        (lambda x: jax.lax.clamp(0.0, x, 1.0), {-3.0: X}, 0),
        (lambda x: jax.lax.clamp(0.0, x, 1.0), {0.25: X}, 0.25),
        (lambda x: jax.lax.clamp(0.0, x, 1.0), {7.0: X}, 1),
        (lambda x: x.sum(0), {0.5: X}, 4 * 0.5),
        (lambda x, w: x @ w, {0.5: X, 3.0: W}, 8 * 0.5 * 3),
        (lambda n: jax.lax.div(n, 4), {-7: N}, -1),
        (lambda n: jax.lax.rem(n, 4), {-7: N}, -3),
        (lambda n: jax.lax.switch(n, [lambda: 5.0, lambda: 6.0, lambda: 8.0]), {9: N}, 8),
        (lambda n: jax.lax.switch(n, [lambda: 5.0, lambda: 6.0, lambda: 8.0]), {-9: N}, 5),
        (lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, length=MAX_LOOPS)[0], {0.5: X}, 0.5 + MAX_LOOPS),
        (lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, length=MAX_LOOPS + 1)[0], {0.5: X}, UNKNOWN),
        (lambda x: jax.lax.scan(lambda c, _: (c + 1, x), x, length=3)[1], {0.5: X}, 0.5),
        (lambda x: jax.lax.scan(lambda c, _: (c + 1, c), x, length=3)[1], {0.5: X}, UNKNOWN),  # 0.5, 1.5, 2.5
        (lambda x, w: jax.lax.while_loop(lambda c: c < x[0, 0], lambda c: c + w[0, 0], 0.0), {10.0: X, 3.0: W}, 12),
        (lambda x: jnp.logical_not(x > 0), {0.5: X}, False),
        (lambda n: ~n, {5: N}, UNKNOWN),
        (lambda x: x * np.float32([3]), {0.5: X}, 1.5),
        (lambda x: x * ARANGE, {0.0: X}, 0),
        (lambda x: x * ARANGE, {2.0: X}, UNKNOWN),
        (lambda x: x * np.where(ARANGE > 6, np.inf, ARANGE).astype(np.float32), {0.0: X}, UNKNOWN),  # 0 times infinity
        (lambda x: x[0, 0] * jnp.concatenate([ARANGE, 1 / x[0]]), {0.0: X}, UNKNOWN),
    ],
)
def test_evaluate_of_single_operations_by_hand(function, arguments, want):
    closed = jax.make_jaxpr(function)(*arguments.values())
    values = [value if isinstance(value, int) else np.float64(value) for value in arguments]
    (found,) = evaluate(closed.jaxpr, closed.consts, values)
    assert found is UNKNOWN if want is UNKNOWN else found == want


def test_evaluate_returns_the_values_of_programs_on_uniform_arrays():
    def program(x, n):
        y = jax.lax.scan(lambda carry, _: (carry * 2, carry), x, length=3)[0]
        z = jax.lax.while_loop(lambda a: a[0] < 10, lambda a: (a[0] + 1, a[1] + 0.5), (n, x))[1]
        w = jax.lax.cond(n > 3, lambda x: x + 1, lambda x: x - 1, x)
        return y, z, w, x @ x.T, jnp.sum(x, 0), jnp.where(x > 0, x, 0) ** 3 / 2, n // 4, jnp.linalg.norm(x)

    x, n = jnp.full((4, 8), 0.25), jnp.int32(7)
    closed = jax.make_jaxpr(program)(x, n)
    got = evaluate(closed.jaxpr, closed.consts, [np.float64(0.25), 7])
    for value, want in zip(got, jax.tree.leaves(program(x, n)), strict=True):
        np.testing.assert_allclose(np.full(want.shape, value), want, rtol=1e-6)

    uneven = jax.make_jaxpr(lambda x: (x * jnp.arange(8.0), x * np.arange(8.0), 0 * np.arange(8.0), x))(x)
    assert evaluate(uneven.jaxpr, uneven.consts, [np.float64(2)])[:2] == [UNKNOWN, UNKNOWN]
    zero = jax.make_jaxpr(lambda x: x * np.arange(8.0))(x)
    assert evaluate(zero.jaxpr, zero.consts, [np.float64(0)]) == [0] and repr(FINITE) == "FINITE"


def test_numbers_of_uniform_arrays_are_in_double_precision():
    cube = jax.make_jaxpr(lambda x, y: (x / y, x**3, x.astype(jnp.bfloat16)))(X, X)
    x, y = np.float64(1 + 1e-12), np.float64(3)
    assert evaluate(cube.jaxpr, cube.consts, [x, y]) == [x / 3, x * x * x, x]
    sixth = jax.make_jaxpr(lambda n: jax.lax.integer_pow(n, 4))(N)
    assert evaluate(sixth.jaxpr, sixth.consts, [-211]) == [211**4] and 211**4 > 2**24  # guard
    quotient = jax.make_jaxpr(lambda n, m: jax.lax.div(n, m))(N, N)
    assert evaluate(quotient.jaxpr, quotient.consts, [-(2**24) - 3, 1]) == [-(2**24) - 3]
    assert evaluate(quotient.jaxpr, quotient.consts, [3, 0]) == [UNKNOWN]


@pytest.mark.parametrize(
    "array, want",
    [
        (np.full((2, 3), 7, np.int8), 7),
        (np.full(3, True), True),
        (np.full(3, 0.1, np.float64), np.float64(0.1)),
        (jnp.full(2, 1.5, jnp.bfloat16), np.float64(1.5)),
        (np.array([1e300, -1e300]), FINITE),
        (jnp.array([1, 2], jnp.bfloat16), FINITE),
        (np.array([1.0, np.inf]), UNKNOWN),
        (np.zeros((0, 2)), UNKNOWN),
        (np.zeros(2, np.complex64), UNKNOWN),
        (jax.random.key(0), UNKNOWN),
    ],
)
def test_uniform_value_is_a_bool_an_int_or_a_float_of_64_bits(array, want):
    found = uniform_value(array)
    assert found is want if want in (FINITE, UNKNOWN) else (found, type(found)) == (want, type(want))


def test_number_of_a_dtype_and_the_common_value_of_several_arrays():
    numbers = [(_number(np.float32(2.5), dtype)) for dtype in (np.bool_, np.int32, np.float16, jnp.bfloat16)]
    assert numbers == [True, 2, 2.5, 2.5] and [type(n) for n in numbers] == [bool, int, np.float64, np.float64]
    assert _number(np.inf, np.int32) is UNKNOWN and _number(np.inf, np.float32) == np.inf
    assert _same([2, 2.0]) == 2 and _same([2, 3]) is UNKNOWN
    assert _same([FINITE, FINITE]) is FINITE and _same([FINITE, 2]) is _same([FINITE, UNKNOWN]) is UNKNOWN
