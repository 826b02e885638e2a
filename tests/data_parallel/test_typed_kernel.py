"""Tests of third-party kernels under types: exact, and lowered for TPUs in full steps with gradients."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from tests.support import AXES, mesh_of, normal, on_mesh
from xlstm_jax.distributed import (
    DeviceMeshManager,
    abstract_batch,
    abstract_train_state,
    create_train_state,
    make_train_step,
    shard_modules,
    typed_kernel,
)
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path

P = jax.P
TOKENS, HEADS, WIDTH = 128, 2, 128


def plain_attention(q, k, v):
    """Returns causal attention of [rows, heads, tokens, width], in float32."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)


def splash_attention(q, k, v, interpret=False):
    mask = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))] * HEADS)
    kernel = splash.make_splash_mha_single_device(mask, interpret=interpret)
    return jax.vmap(kernel)(q, k, v)


KERNELS = {"flash": partial(flash_attention, causal=True), "splash": splash_attention}
# Two ways to interpret kernels: the context in which a program runs, and the kernel's option.
INTERPRETED = {
    "flash": (pltpu.force_tpu_interpret_mode, KERNELS["flash"]),
    "splash": (nullcontext, partial(splash_attention, interpret=True)),
}


class Layer(nn.Module):
    attention: Callable

    @nn.compact
    def __call__(self, x, _):
        qkv = nn.DenseGeneral((3, HEADS, WIDTH), name="qkv")(x)
        q, k, v = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))
        mixed = self.attention(q / WIDTH, k, v).swapaxes(1, 2)
        return x + nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(mixed), None


class Model(nn.Module):
    attention: Callable
    in_scan: bool = False

    @nn.compact
    def __call__(self, x):
        if not self.in_scan:  # interpreted kernels call back to the host, which fails in Flax's scan
            return Layer(self.attention, name="layers")(x, None)[0]
        layer = nn.remat(Layer, prevent_cse=False)
        stack = nn.scan(layer, length=2, variable_axes={"params": 0}, split_rngs={"params": True})
        return stack(self.attention, name="layers")(x, None)[0]


def loss_fn(params, apply_fn, x, rng):
    return jnp.mean((apply_fn({"params": params}, x) - 1) ** 2)


def wrapped(attention, **options):
    return shard_modules(Model(attention, **options), nn.DenseGeneral, "fsdp", 2**8)


@pytest.fixture(scope="module")
def x():
    return normal(0, (8, TOKENS, 16))


@pytest.fixture(scope="module")
def expected(x):
    """Returns loss and gradients of the plain formula on one device."""
    model = Model(plain_attention)
    params = model.init(jax.random.key(1), x)["params"]
    return jax.value_and_grad(loss_fn)(params, model.apply, x, None)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_step_with_an_interpreted_typed_kernel_matches_the_plain_formula(kernel, check_vma, x, expected):
    """An interpreted kernel equals the formula up to rounding: the float32 sums of the softmax differ in order only."""
    loss, grads = expected
    context, attention = INTERPRETED[kernel]
    step = make_train_step(loss_fn, mesh_of(2, 4), AXES, check_vma=check_vma)
    with context():
        model = wrapped(typed_kernel(attention))
        state = create_train_state(model, optax.sgd(1.0), mesh_of(2, 4), jax.random.key(1), x, batch_axes=AXES)
        before = jax.tree.map(np.asarray, state.params)
        after, metrics = step(state, x, jax.random.key(2))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    found = jax.tree.map(lambda a, b: a - np.asarray(b), before, after.params)
    for (path, want), leaf in zip(leaves_with_path(grads), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(leaf, want, atol=1e-5 * np.abs(want).max() + 1e-7, err_msg=path)


@pytest.mark.parametrize("kernel", KERNELS)
def test_train_step_with_a_typed_kernel_lowers_for_tpu_and_raises_without(kernel):
    x = jax.ShapeDtypeStruct((8, TOKENS, 16), jnp.float32)

    def lowered(attention):
        args = (wrapped(attention, in_scan=True), optax.adamw(1e-3), mesh_of(2, 4), jax.random.key(0), x)
        state = abstract_train_state(*args, batch_axes=AXES)
        step = make_train_step(loss_fn, mesh_of(2, 4), AXES)
        return step.trace(state, x, jax.random.key(1)).lower(lowering_platforms=("tpu",)).as_text()

    assert lowered(typed_kernel(KERNELS[kernel])).count("tpu_custom_call") >= 3  # forward, and two of the gradient
    with pytest.raises(ValueError, match=r"module 'layers' calls a Pallas kernel.* typed_kernel\(kernel\)"):
        lowered(KERNELS[kernel])  # guard


def test_typed_gmm_and_paged_attention_kernels_lower_for_tpu():
    """A ragged product with its gradient, and paged attention without gradients, lower for TPUs."""

    def text_of_gradient(argnum, kernel):
        loss = lambda rows, weights, sizes: kernel(rows, weights, sizes).astype(jnp.float32).sum()  # noqa: E731
        rows, weights = jnp.zeros((2048, 256), jnp.bfloat16), jnp.zeros((4, 256, 256), jnp.bfloat16)
        specs = (P("fsdp"), P(), P())
        over = on_mesh(jax.grad(loss, argnums=argnum), mesh_of(1, 8), True, specs, specs[argnum])
        return over.trace(rows, weights, jnp.full(4, 64)).lower(lowering_platforms=("tpu",)).as_text()

    texts = {name: text_of_gradient(argnum, typed_kernel(gmm)) for argnum, name in enumerate(("rows", "weights"))}
    assert {name: "tpu_custom_call" in text for name, text in texts.items()} == {"rows": True, "weights": True}
    # Devices have different rows: only the gradient of the replicated weights is summed over devices.
    assert {name: "all_reduce" in text for name, text in texts.items()} == {"rows": False, "weights": True}
    with pytest.raises(Exception, match=r"vma|vary"):
        text_of_gradient(1, gmm)  # guard: the kernel alone gives no types

    def decode(q, pages, lengths, indices):
        return typed_kernel(partial(paged_attention, pages_per_compute_block=4))(q, pages, pages, lengths, indices)

    q, pages = jnp.zeros((16, 8, 128), jnp.bfloat16), jnp.zeros((8, 64, 16, 128), jnp.bfloat16)
    over = on_mesh(decode, mesh_of(1, 8), True, (P("fsdp"), P(), P("fsdp"), P("fsdp")), P("fsdp"))
    args = (q, pages, jnp.full(16, 16), jnp.zeros((16, 4), jnp.int32))
    assert "tpu_custom_call" in over.trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def scaled(x, weight, flag=2.0):
    """Returns ``flag * x * weight`` by a Pallas kernel with a custom gradient; ``x`` [n, 8], ``weight`` [8]."""

    def kernel(a, b, out):
        out[...] = flag * a[...] * b[...]

    def run(a, b):
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(a.shape, a.dtype), interpret=True)(a, b)

    product = jax.custom_vjp(lambda x, w: run(x, jnp.broadcast_to(w, x.shape)))
    product.defvjp(
        lambda x, w: (product(x, w), (x, w)),
        lambda kept, g: (run(g, jnp.broadcast_to(kept[1], g.shape)), run(g, kept[0]).sum(0)),
    )
    return product(x, weight)


@pytest.mark.parametrize("check_vma", [True, False])
def test_typed_kernel_sums_the_gradient_of_a_replicated_weight(check_vma):
    """The gradient of a replicated weight is summed as in the plain formula; without types each device has a part."""
    x, weight = normal(0, (16, 8)), jnp.arange(8.0)

    def gradient(fn):
        def total(x, weight):
            own = jax.grad(lambda weight: (fn(x, weight) ** 2).sum())(weight)
            return own if check_vma else jax.lax.psum(own, "fsdp")

        return on_mesh(total, mesh_of(1, 8), check_vma, (P("fsdp"), P()), P())(x, weight)

    np.testing.assert_allclose(gradient(typed_kernel(scaled)), gradient(lambda x, w: 2 * x * w), rtol=1e-6)


def test_typed_kernel_has_exact_gradients_in_vmap_scan_and_remat():
    x, weight = normal(0, (16, 3, 8)), jnp.arange(8.0)

    def loss(fn, x, weight):
        many = jax.vmap(fn, in_axes=(1, None), out_axes=1)
        body = jax.checkpoint(lambda x, _: (jnp.sin(many(x, weight)), None))
        return jax.lax.scan(body, x, None, length=2)[0].sum()

    def gradients(fn):
        return on_mesh(
            jax.grad(partial(loss, fn), argnums=(0, 1)), mesh_of(1, 8), True, (P("fsdp"), P()), (P("fsdp"), P())
        )(x, weight)

    found = gradients(lambda x, w: typed_kernel(scaled)(x, w, flag=0.5))
    for a, b in zip(found, gradients(lambda x, w: 0.5 * x * w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_typed_kernel_has_exact_gradients_of_arrays_in_the_closure():
    """Arrays closed over by a kernel in a scan body get gradients, although JAX traces the body twice."""
    x, weight = normal(0, (16, 8)), jnp.arange(8.0)

    def gradients(product):
        def loss(x, w):
            def body(x, _):
                masked = jnp.where(jnp.arange(8) < 5, w, 0)  # made where the kernel is, as splash attention's masks are
                return product(x, masked), None

            return (jax.lax.scan(jax.checkpoint(body), x, None, length=2)[0] ** 2).sum()

        specs = (P("fsdp"), P())
        over = jax.jit(on_mesh(jax.grad(loss, argnums=(0, 1)), mesh_of(1, 8), True, specs, specs))
        assert len(jax.tree.leaves(over.lower(x, weight).in_avals)) == 2  # guard: no array outlives its trace
        return over(x, weight)

    found = gradients(lambda x, w: typed_kernel(lambda x: scaled(x, w))(x))
    for a, b in zip(found, gradients(lambda x, w: 2 * x * w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_typed_kernel_lowering_raises_for_a_kernel_of_another_platform():
    q = jax.ShapeDtypeStruct((8, HEADS, TOKENS, WIDTH), jnp.float32)
    over = on_mesh(typed_kernel(KERNELS["flash"]), mesh_of(1, 8), True, (P("fsdp"),) * 3, P("fsdp"))
    with pytest.raises(
        ValueError, match=r"typed_kernel: flash_attention cannot be lowered for cpu: Only interpret mode .* by platform"
    ):
        jax.jit(over).trace(q, q, q).lower(lowering_platforms=("cpu",))


def test_typed_kernel_casts_arguments_varying_over_different_axes():
    """Rows over both axes and weights over "dp" alone have exact gradients."""
    x, weight = normal(0, (16, 8)), jnp.arange(16.0)

    def gradients(fn):
        specs = (P(AXES), P("dp"))
        grad = jax.grad(lambda x, w: (fn(x, w) ** 2).sum(), argnums=(0, 1))
        return on_mesh(grad, mesh_of(2, 4), True, specs, specs)(x, weight)

    for found, want in zip(gradients(typed_kernel(scaled)), gradients(lambda x, w: 2 * x * w), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5)


def test_typed_kernel_outside_shard_map_calls_the_plain_function():
    seen = []
    typed_kernel(lambda x: seen.append(type(x)) or x)(np.ones(3))
    assert seen == [np.ndarray]


def fused_norm(x):
    """Returns ``x / |x|`` along the last dim, by a kernel with a custom gradient."""

    def kernel(a, out):
        out[...] = a[...] / jnp.sqrt((a[...] ** 2).sum(-1, keepdims=True) + 1e-6)

    formula = lambda x: x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    norm = jax.custom_vjp(lambda x: pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x))
    norm.defvjp(lambda x: (norm(x), x), lambda x, g: jax.vjp(formula, x)[1](g))
    return norm(x)


def fused_cross_entropy(logits, labels):
    """Returns the losses of ``logits[n, c]`` and ``labels[n]``; the kernel also makes the gradient for backward."""

    def kernel(a, label, loss, grad):
        shifted = a[...] - a[...].max(-1, keepdims=True)
        log_p = shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))
        right = label[...][:, None] == jax.lax.broadcasted_iota(jnp.int32, a.shape, 1)
        loss[...], grad[...] = -(log_p * right).sum(-1), jnp.exp(log_p) - right

    def run(logits, labels):
        shapes = [jax.ShapeDtypeStruct(shape, logits.dtype) for shape in (labels.shape, logits.shape)]
        return pl.pallas_call(kernel, shapes, interpret=True)(logits, labels)

    loss = jax.custom_vjp(lambda logits, labels: run(logits, labels)[0])
    loss.defvjp(run, lambda grad, g: (g[:, None] * grad, None))
    return loss(logits, labels)


@pytest.mark.parametrize("check_vma", [True, False])
def test_step_with_typed_norm_and_loss_kernels_matches_the_formulas(check_vma):
    class Classifier(nn.Module):
        norm: Callable
        loss: Callable

        @nn.compact
        def __call__(self, batch):
            x, labels = batch
            logits = nn.Dense(8, name="head")(4 * self.norm(nn.Dense(64, name="in")(x)))
            return self.loss(logits, labels)

    def loss_fn(params, apply_fn, batch, rng):
        return apply_fn({"params": params}, batch).mean()

    batch = normal(0, (16, 16)), jnp.arange(16) % 8
    formula = lambda x: x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    plain = Classifier(formula, optax.softmax_cross_entropy_with_integer_labels)
    params = plain.init(jax.random.key(1), batch)["params"]
    want, grads = jax.value_and_grad(loss_fn)(params, plain.apply, batch, None)

    model = Classifier(typed_kernel(fused_norm), typed_kernel(fused_cross_entropy))
    mesh, model = mesh_of(2, 4), shard_modules(model, nn.Dense, "fsdp", 2**6)
    state = create_train_state(
        model, optax.sgd(1.0), mesh, jax.random.key(1), batch, batch_axes=AXES, allow_replicated=True
    )
    before = jax.tree.map(np.asarray, state.params)
    step = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma, allow_replicated=True)
    after, metrics = step(state, batch, jax.random.key(2))
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-6)
    found = jax.tree.map(lambda a, b: a - np.asarray(b), before, after.params)
    for (path, grad), leaf in zip(leaves_with_path(grads), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(leaf, grad, rtol=1e-5, atol=1e-6, err_msg=path)
        assert np.abs(grad).max() > 1e-4, path  # guard


class NormFirst(nn.Module):
    """Layer that begins with a kernel: in a scan the kernel is traced before any value varies."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(x.shape[-1])(typed_kernel(fused_norm)(x)), None


@pytest.mark.parametrize("dp, fsdp", [(1, 1), (2, 4)])
def test_typed_kernel_on_replicated_input_in_a_scan_has_equal_losses_in_both_vma_modes(dp, fsdp):
    stack = nn.scan(NormFirst, length=2, variable_axes={"params": 0}, split_rngs={"params": True})()
    x = normal(0, (8, 16))

    def loss_fn(params, apply_fn, x, rng):
        return jnp.mean((apply_fn({"params": params}, x, None)[0] - 1) ** 2)

    losses = {}
    for check_vma in (True, False):
        mesh, model = mesh_of(dp, fsdp), shard_modules(stack, nn.Dense, "fsdp", 2**6)
        state = create_train_state(
            model, optax.sgd(0.5), mesh, jax.random.key(1), x, None, batch_axes=AXES, allow_replicated=True
        )
        step = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma, allow_replicated=True)
        losses[check_vma] = []
        for _ in range(2):
            state, metrics = step(state, x, jax.random.key(2))
            losses[check_vma].append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-6)


class OfTokamax(nn.Module):
    """Attention, a product of experts and the loss of a head, each by a Tokamax kernel for TPUs."""

    wrap: Callable
    loss: bool

    @nn.compact
    def __call__(self, x):
        tokamax = pytest.importorskip("tokamax")
        qkv = nn.DenseGeneral((3, HEADS, WIDTH), dtype=jnp.bfloat16, name="qkv")(x)
        attend = partial(tokamax.dot_product_attention, is_causal=True, implementation="mosaic_tpu")
        mixed = self.wrap(attend)(*(qkv[:, :, i] for i in range(3)))
        rows = mixed.reshape(-1, HEADS * WIDTH)
        init = nn.initializers.lecun_normal()
        experts = self.param("experts", init, (4, HEADS * WIDTH, 256)).astype(jnp.bfloat16)
        product = partial(tokamax.ragged_dot, implementation="mosaic_tpu")
        rows = self.wrap(product)(rows, experts, jnp.full(4, rows.shape[0] // 4, jnp.int32))
        if not self.loss:
            return rows
        head = self.param("head", init, (256, 2048)).astype(jnp.bfloat16)
        loss = partial(tokamax.linear_softmax_cross_entropy_loss, implementation="mosaic_tpu")
        return self.wrap(loss)(rows, jnp.zeros(rows.shape[0], jnp.int32), head)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [False, True], ids=["attention and experts", "loss too"])
def test_train_step_with_typed_tokamax_kernels_lowers_for_tpu(monkeypatch, loss):
    """Steps with tokamax kernels lower for TPUs: the mesh names an absent device, and tokamax's device check is off."""
    pytest.importorskip("tokamax")
    from absl import flags
    from tokamax._src.ops.attention import api as attention
    from tokamax._src.ops.linear_softmax_cross_entropy_loss import api as cross_entropy
    from tokamax._src.ops.ragged_dot import api as ragged

    for api in (attention, cross_entropy, ragged):
        kernel = api.IMPLEMENTATIONS["mosaic_tpu"]
        for one in (kernel, kernel.vjp):
            if hasattr(one, "supported_on"):
                monkeypatch.setattr(type(one), "supported_on", lambda *_: True)
    flags.FLAGS(["pytest"])  # the kernels read the flags
    device = jax.sharding.AbstractDevice("TPU v5e", 1, "tpu")
    mesh = DeviceMeshManager.create_abstract_mesh({"dp": 2, "fsdp": 4}).update(abstract_device=device)
    x, rng = jax.ShapeDtypeStruct((16, 1024, 64), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))

    def lowered(wrap):
        model = shard_modules(OfTokamax(wrap, loss), nn.DenseGeneral, "fsdp", 2**8)
        state = abstract_train_state(model, optax.sgd(0.1), mesh, rng, x, batch_axes=AXES, allow_replicated=True)
        step = make_train_step(loss_fn, mesh, AXES, allow_replicated=True)
        traced = step.trace(state, abstract_batch(x, mesh, AXES), rng)
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    assert lowered(typed_kernel).count("tpu_custom_call") >= 2 + 3 + 2 * loss
    with pytest.raises(ValueError, match=r"calls a Pallas kernel.* typed_kernel\(kernel\)"):
        lowered(lambda kernel: kernel)  # guard
