"""FLOP counts agree with closed formulas and, where nothing loops, with XLA's own count."""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from tests.models import LanguageModel
from tests.support import equations, fsdp, mesh_of
from xlstm_jax.distributed import abstract_train_state, make_train_step
from xlstm_jax.forecast.cost.flops import count_flops


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def flops_of(fn, *args, num_devices=1):
    return count_flops(jax.jit(fn).trace(*args).jaxpr, num_devices)


def xla_flops(fn, *args):
    """XLA's own count; elementwise operations are in it."""
    return jax.jit(fn).lower(*args).cost_analysis()["flops"]


# ------------------------------------------------------------------------------------------------------ one operation


@pytest.mark.parametrize(
    "equation, a, b, want",
    [
        ("mk,kn->mn", (5, 7), (7, 3), 2 * 5 * 7 * 3),
        ("bhtd,bhsd->bhts", (2, 3, 5, 7), (2, 3, 4, 7), 2 * 2 * 3 * 5 * 4 * 7),
        ("abc,bca->", (2, 3, 4), (3, 4, 2), 2 * 2 * 3 * 4),
        ("i,j->ij", (5,), (7,), 2 * 5 * 7),
    ],
)
def test_count_flops_of_einsum_matches_the_formula_and_xla(equation, a, b, want):
    def fn(x, y):
        return jnp.einsum(equation, x, y)

    assert flops_of(fn, array(*a), array(*b)).total == want == xla_flops(fn, array(*a), array(*b))


@pytest.mark.parametrize(
    "left, right, dtype",
    [
        ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e4m3fn", "float8_e5m2"),  # a gradient and a weight
        ("int8", "int8", "int8"),
        ("float8_e4m3fn", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_count_flops_assigns_a_product_to_the_wider_operand_dtype(left, right, dtype):
    def fn(x, y):
        return lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    for args in ((left, right), (right, left))[: 1 + (left[:5] != right[:5])]:
        assert flops_of(fn, *(array(8, 8, dtype=kind) for kind in args)).by_dtype() == {dtype: ONE}


@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
@pytest.mark.parametrize("kind, dtype", [("Fp8DirectDotGeneralOp", "float8"), ("Fp8DotGeneralOp", "bfloat16")])
def test_count_flops_of_flax_fp8_ops_is_float8_only_for_direct_products(kind, dtype):
    layer = nn.Dense(16, dtype=jnp.bfloat16, dot_general_cls=getattr(nn, kind))
    x = array(32, 8, dtype=jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    loss = jax.grad(lambda v, x: (layer.apply(v, x).astype(jnp.float32) ** 2).sum(), allow_int=True)
    counted = flops_of(loss, variables, x)
    assert counted.total == 2 * 2 * 32 * 8 * 16  # forward, and the gradient of the weight
    assert not [name for name in counted.by_dtype() if not name.startswith(dtype)]


def test_scores_bytes_of_attention_count_the_softmax_scores_per_device():
    """Those of which a softmax is taken that weighs values; on one device."""

    def attention(q, k, v):
        return jax.nn.dot_product_attention(q, k, v)

    def under_cond(q, k, v):  # the other branch has more FLOP, and alone is counted
        wide = lambda: jnp.tile(v, (1, 1, 1, 40)) @ jnp.ones((640, 16), v.dtype) @ jnp.ones((16, 16), v.dtype)  # noqa: E731
        return lax.cond(q[0, 0, 0, 0] > 0, lambda: attention(q, k, v), wide)

    q = array(4, 64, 2, 16, dtype=jnp.bfloat16)
    for again in (attention, jax.checkpoint(attention), under_cond):
        loss = lambda *args, fn=again: (fn(*args).astype(jnp.float32) ** 2).sum()  # noqa: E731
        assert flops_of(jax.grad(loss), q, q, q).scores_bytes == {"": 4 * 2 * 64 * 64 * 4}  # float32
    assert flops_of(attention, q, q, q, num_devices=4).scores_bytes == {"": 2 * 64 * 64 * 4}


def test_scores_bytes_per_step_count_each_layer_of_a_scan():
    def layers(q, length):
        return lax.scan(lambda x, _: (jax.nn.dot_product_attention(x, x, x), None), q, length=length)[0]

    q = array(4, 64, 2, 16, dtype=jnp.bfloat16)
    for length in (1, 3):
        found = flops_of(partial(layers, length=length), q)
        assert found.scores_bytes == {"": 4 * 2 * 64 * 64 * 4}
        assert found.scores_bytes_per_step == {"": length * 4 * 2 * 64 * 64 * 4}


def mlstm(q, k, v, gates):
    """In its parallel form: the exponential is that of gates."""
    scores = q @ k.mT * jnp.exp(gates[:, :, None] - gates[:, None, :])
    return scores / jnp.abs(scores.sum(-1, keepdims=True)) @ v


def experts(x, w, out):
    hidden = jnp.einsum("emd,edf->emf", x, w)
    return jnp.einsum("emf,efd->emd", hidden * jnp.tanh(jnp.log1p(jnp.exp(hidden))), out)  # mish


def heads(x, w):
    """Logits of several heads, without those of the labels: their gradient is a softmax that is multiplied on."""
    return jax.nn.logsumexp(jnp.einsum("htd,hdv->htv", x, w), axis=-1)


WIDE, NARROW = array(4, 64, 16), array(4, 16, 64)


@pytest.mark.parametrize(
    "fn, args",
    [(mlstm, (WIDE, WIDE, WIDE, array(4, 64))), (experts, (WIDE, NARROW, WIDE)), (heads, (WIDE, NARROW))],
)
def test_scores_bytes_are_empty_for_mlstm_experts_and_logit_heads(fn, args):
    loss = lambda *args: (fn(*args) ** 2).sum()  # noqa: E731
    assert flops_of(jax.grad(loss, (0, 1)), *args).scores_bytes == {}


CONVOLUTIONS = {
    "same": ((3, 3, 8, 16), {"window_strides": (1, 1), "padding": "SAME"}),
    "strided": ((3, 3, 8, 16), {"window_strides": (2, 2), "padding": "SAME"}),
    "grouped": ((3, 3, 2, 16), {"window_strides": (2, 1), "padding": "VALID", "feature_group_count": 4}),
    "depthwise": ((4, 4, 1, 8), {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 8}),
    "batch_groups": ((3, 3, 8, 16), {"window_strides": (1, 1), "padding": "SAME", "batch_group_count": 4}),
    "dilated": (
        (3, 3, 8, 16),
        {"window_strides": (1, 1), "padding": ((2, 1), (1, 3)), "lhs_dilation": (2, 3), "rhs_dilation": (2, 1)},
    ),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_count_flops_of_convolutions_and_gradients_matches_xla(case):
    kernel, options = CONVOLUTIONS[case]

    def fn(x, w):
        return lax.conv_general_dilated(x, w, **options, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    args = array(4, 9, 11, 8), array(*kernel)
    counted = flops_of(fn, *args).total
    assert counted == xla_flops(fn, *args) > 0
    if case != "batch_groups":  # XLA counts the gradient of these otherwise than it counts them

        def gradient(x, w):
            return jax.grad(lambda x, w: fn(x, w).sum(), (0, 1))(x, w)

        assert flops_of(gradient, *args).total == xla_flops(gradient, *args) == 2 * counted


def test_count_flops_of_ragged_dot_counts_each_row_once():
    args = array(32, 16), array(4, 16, 8), array(4, dtype=jnp.int32)
    assert flops_of(lax.ragged_dot, *args).total == 2 * 32 * 16 * 8
    gradient = jax.grad(lambda x, w, sizes: lax.ragged_dot(x, w, sizes).sum(), (0, 1))
    assert flops_of(gradient, *args).total == 2 * (2 * 32 * 16 * 8)  # the value itself is needed by nobody


# ------------------------------------------------------------------------------------------------------- control flow

ONE = 2 * 8 * 8 * 8  # a product of two 8 x 8


def test_count_flops_multiplies_nested_scans_by_length():
    def fn(x):
        return lax.scan(lambda c, _: (c @ x, lax.scan(lambda d, _: (d @ x, None), c, length=3)[0]), x, length=5)

    assert flops_of(fn, array(8, 8)).total == 5 * (1 + 3) * ONE
    assert xla_flops(fn, array(8, 8)) < 5 * ONE  # guard: the compiler's count is no substitute


def test_count_flops_counts_an_unbounded_while_loop_once_and_names_the_loop():
    def fn(x):
        with jax.named_scope("solver"):
            return lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ c, x)

    flops = flops_of(fn, array(8, 8))
    assert flops.total == ONE
    assert flops.unknown_loops == ("jit(step)/solver/while",)
    assert flops_of(lambda x: lax.fori_loop(0, 7, lambda i, c: c @ c, x), array(8, 8)).unknown_loops == ()
    assert (
        flops_of(lambda x: lax.while_loop(lambda c: c.sum() < 1, lambda c: c + 1, x), array(8, 8)).unknown_loops == ()
    )


def test_count_flops_of_a_switch_takes_the_largest_branch():
    def fn(i, x):
        return lax.switch(i, [lambda x: x, lambda x: x @ x @ x, lambda x: x @ x], x)

    assert flops_of(fn, array(dtype=jnp.int32), array(8, 8)).total == 2 * ONE


def test_count_flops_counts_custom_derivatives_and_nested_jit_once():
    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (square(x), x), lambda x, g: (g @ x.T + x.T @ g,))

    @jax.custom_jvp
    def twice(x):
        return square(x) @ x

    twice.defjvp(lambda primals, tangents: (twice(*primals), tangents[0] @ primals[0]))
    assert flops_of(jax.jit(square), array(8, 8)).total == ONE
    assert flops_of(twice, array(8, 8)).total == 2 * ONE
    assert flops_of(jax.value_and_grad(lambda x: square(x).sum()), array(8, 8)).total == 3 * ONE


def test_count_flops_of_a_pallas_kernel_multiplies_by_grid_cells():
    def kernel(x, y, out):
        out[...] = x[...] @ y[...]

    def fn(x, y):
        row, block = pl.BlockSpec((8, 16), lambda i, j: (i, 0)), pl.BlockSpec((8, 8), lambda i, j: (i, j))
        column = pl.BlockSpec((16, 8), lambda i, j: (0, j))
        shape = jax.ShapeDtypeStruct((32, 24), jnp.float32)
        return pl.pallas_call(kernel, shape, grid=(4, 3), in_specs=[row, column], out_specs=block, interpret=True)(x, y)

    assert flops_of(fn, array(32, 16), array(16, 24)).total == 2 * 32 * 16 * 24


def test_count_flops_names_opaque_operations_such_as_cholesky():
    flops = flops_of(lambda x: jnp.linalg.cholesky(x) @ x, array(8, 8))
    assert flops.total == ONE
    assert [name.split("/")[-1] for name in flops.opaque] == ["cholesky"]


def test_count_flops_leaves_out_dead_code():
    def fn(x):
        del_me = jnp.tanh(x @ x) @ x
        del del_me
        return x @ x

    assert flops_of(fn, array(8, 8)).total == ONE


@pytest.mark.parametrize("dp, fsdp_size", [(1, 8), (2, 4)])
def test_count_flops_is_per_device_inside_shard_map_and_divided_by_devices_outside(dp, fsdp_size):
    mesh = mesh_of(dp, fsdp_size)

    def fn(x):
        inside = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))(x)
        return inside, x @ x.T

    rows = 64 // fsdp_size
    want = 2 * rows * 8 * rows + 2 * 64 * 8 * 64 / 8
    assert flops_of(fn, array(64, 8), num_devices=8).total == want

    def partly(x):  # manual over one axis, automatic over the other
        spec = P("fsdp")
        return jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"fsdp"})(x)

    assert flops_of(partly, array(64, 8), num_devices=8).total == 2 * rows * 8 * rows / dp


# ---------------------------------------------------------------------------------------------------------- models


class MLP(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        return layer(name="second")(layer(name="first")(x))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(16, name="down")(nn.tanh(nn.Dense(64, name="up")(x)))


@pytest.mark.parametrize("remat", [False, True])
def test_count_flops_of_training_is_six_per_weight_and_token_plus_recompute_with_remat(remat):
    """Of the first layer no input gradient is asked for; of a recomputed block the last product is not needed again."""
    tokens, weights = 32, 16 * 64
    model, x = MLP(remat), array(tokens, 16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    loss = jax.value_and_grad(lambda params, x: (model.apply(params, x) ** 2).mean())
    flops = flops_of(loss, params, x)
    layers, per_layer = 2, 2 * weights  # up and down
    assert flops.by_direction()["forward"] == layers * 2 * per_layer * tokens
    assert flops.by_direction()["backward"] == layers * 4 * per_layer * tokens - 2 * weights * tokens
    assert flops.by_direction().get("recompute", 0) == (layers * 2 * weights * tokens if remat else 0)
    assert set(flops.by_module()) == {"first/up", "first/down", "second/up", "second/down"}
    assert math.isclose(sum(flops.by_module().values()), flops.total)
    # XLA counts elementwise work too: some FLOP for each value, against 2 x 16 and 2 x 64 for each of a product.
    assert flops.total < xla_flops(loss, params, x) < 1.2 * flops.total


class Nested(nn.Module):
    """Rematerialized layers inside of what is, or is not, a scan or rematerialized itself."""

    kind: str

    @nn.compact
    def __call__(self, x):
        scanned = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        stack = {
            "plain": Stack,
            "remat": nn.remat(Stack),
            "scan": nn.scan(Stack, **scanned),
            "scan_remat": nn.scan(nn.remat(Stack), **scanned),
        }[self.kind]
        return nn.Dense(3, name="head")(stack(name="stack")(x, None)[0])


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.remat(Layer)(name="inner")(x), None


@pytest.mark.parametrize("kind", ["plain", "remat", "scan", "scan_remat"])
def test_flops_by_module_keeps_module_paths_below_remat_and_scan(kind):
    model, x = Nested(kind), array(32, 16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params, x):
        with jax.named_scope("loss"):
            return (model.apply(params, x) ** 2).mean()

    flops = flops_of(jax.value_and_grad(loss), params, x)
    assert flops.by_module().keys() == {"stack/inner/up", "stack/inner/down", "head"}
    assert flops.by_direction()["recompute"] > 0


def tokens_loss(params, apply_fn, batch, rng):
    del rng
    return jnp.mean(apply_fn({"params": params}, batch) ** 2)


@pytest.mark.parametrize("remat", [False, True])
def test_count_flops_of_a_transformer_step_on_an_abstract_mesh_matches_the_formula(remat):
    """6 P t + 12 L s d t, over all of them a device's share; with remat also the forward of what is needed again."""
    d, layers, s, vocab, batch, devices = 64, 3, 128, 256, 16, 8
    mesh = AbstractMesh((2, 4), ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    model = LanguageModel("transformer", d, layers, 2, remat=remat, wrap=fsdp, dtype=jnp.bfloat16)
    tokens = array(batch, s, dtype=jnp.int32)
    state = abstract_train_state(model, optax.adamw(0.1), mesh, jax.random.key(0), tokens, batch_axes=("dp", "fsdp"))
    step = make_train_step(tokens_loss, mesh, batch_axes=("dp", "fsdp"))
    traced = step.trace(state, tokens, jax.ShapeDtypeStruct((), jax.random.key(0).dtype))
    flops = count_flops(traced.jaxpr, devices)

    t = batch * s / devices
    weights = {"query_key_value": 3 * d * d, "attention_out": d * d, "up": 6 * d * d, "down": 3 * d * d}
    attention = 4 * s * d * t * layers  # scores and what they weigh; nothing is saved by causality
    forward = 2 * t * (layers * sum(weights.values()) + d * vocab) + attention
    again = 2 * t * layers * (sum(weights.values()) - weights["down"]) + attention
    want = {"forward": forward, "backward": 2 * forward} | ({"recompute": again} if remat else {})
    assert flops.by_direction() == want
    modules = {f"blocks/{name}": layers * size * 2 * t * 3 for name, size in weights.items()}
    modules |= {"head": d * vocab * 2 * t * 3, "blocks": 3 * attention}
    if not remat:
        assert flops.by_module() == modules
    assert flops.by_module().keys() == modules.keys()
    assert flops.by_dtype() == {"bfloat16": flops.total}
    assert (flops.unknown_loops, flops.opaque) == ((), ())


def test_count_flops_is_independent_of_the_number_of_minibatches():
    mesh = AbstractMesh((2, 4), ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    model = LanguageModel("recurrent", 32, 2, 2, wrap=fsdp)
    tokens = array(32, 64, dtype=jnp.int32)
    state = abstract_train_state(model, optax.sgd(0.1), mesh, jax.random.key(0), tokens, batch_axes=("dp", "fsdp"))
    rng = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    found = {}
    for n in (1, 4):
        step = make_train_step(tokens_loss, mesh, batch_axes=("dp", "fsdp"), num_minibatches=n)
        jaxpr = step.trace(state, tokens, rng).jaxpr
        lengths = {eqn.params["length"] for _, eqn in equations(jaxpr) if eqn.primitive.name == "scan"}
        assert (4 in lengths) == (n == 4), f"guard: {n} minibatches, loops of {lengths}"
        found[n] = count_flops(jaxpr, 8)
    assert found[1].by_module() == found[4].by_module()
    assert found[1].by_direction() == found[4].by_direction()
    assert found[1].total == found[4].total > 0
