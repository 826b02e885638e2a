"""Tests of Flax's fp8 products: scales and histories, whose gradient is the next value, equal one device.

Kernels are quantised before the gather, bit-equal to one device.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from tests.support import AXES, assert_each_leaf, fsdp, in_case, mesh_of, normal, on_mesh, plain
from xlstm_jax.distributed import (
    TrainState,
    abstract_train_state,
    check_step,
    create_train_state,
    freeze_params,
    make_train_step,
    nnx_model,
    plan_sharding,
    shard_modules,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.checkpoint import Checkpointer
from xlstm_jax.distributed.data_parallel.extensions import fp8_products
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.running_loss import OVERWRITTEN
from xlstm_jax.distributed.device_mesh.batch_layout import batch_layout
from xlstm_jax.distributed.training.gradients import LossFunction
from xlstm_jax.distributed.training.step_check.one_device import OneDevice
from xlstm_jax.forecast import forecast

# In ten steps with these inputs no value lies so near the middle between two numbers of fp8 that rounding decides.
X = np.asarray(jax.random.normal(jax.random.key(1), (16, 16))) * np.float32(1 + np.arange(16) % 5)[:, None]
KEY = jax.random.key(2)
STEPS = 10
NARROW = "float8_e4m3fn"

OPS = [partial(op, amax_history_length=4) for op in (nn.Fp8DirectDotGeneralOp, nn.Fp8DotGeneralOp)]


class Layer(nn.Module):
    op: object
    dtype: object = None

    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(16, dot_general_cls=self.op, dtype=self.dtype)(x)), None


class Fp8(nn.Module):
    wrap: object = plain
    op: object = OPS[0]
    layers: int = 0  # in a scan, and computed again
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        if self.layers:
            axes = {"params": 0, OVERWRITTEN: 0}
            layer = nn.scan(nn.remat(self.wrap(Layer)), axes, split_rngs={"params": True}, length=self.layers)
            x, _ = layer(self.op, self.dtype, name="layers")(x, None)
        dense = partial(self.wrap(nn.Dense), dot_general_cls=self.op, dtype=self.dtype)
        return dense(4)(nn.tanh(dense(32)(x)))


def loss_fn(params, apply_fn, x, rng, collections):
    out, updated = apply_fn({"params": params, **collections}, x, mutable=list(collections))
    return jnp.mean((out - x[:, :4]) ** 2), updated


def on_one_device(tx, minibatches, op, layers=0, start=None):
    """Runs ten steps of the plain model with the overwriting of Flax's ``TrainState``."""
    model = Fp8(op=op, layers=layers)
    variables = start or model.init(jax.random.key(0), X)
    params, scales = variables["params"], variables[OVERWRITTEN]
    opt_state = tx.init(params)

    def loss(params, scales, x):
        return loss_fn(params, model.apply, x, None, {OVERWRITTEN: scales})[0]

    @jax.jit
    def step(params, scales, opt_state):
        total = jax.tree.map(jnp.zeros_like, params)
        for part in range(minibatches):
            rows = X.reshape(8, minibatches, -1, 16)[:, part].reshape(-1, 16)  # the rows of each device
            grads, scales = jax.grad(loss, (0, 1))(params, scales, rows)
            total = jax.tree.map(lambda sum_, g: sum_ + g / minibatches, total, grads)
        updates, opt_state = tx.update(total, opt_state, params)
        return optax.apply_updates(params, updates), scales, opt_state

    kept = []
    for _ in range(STEPS):
        params, scales, opt_state = step(params, scales, opt_state)
        kept.append((params, scales))
    return kept


def assert_alike(state, params, scales):
    # The same rounding to fp8 on both sides: 8 devices change scales by a power of two alone.
    assert_each_leaf(partial(np.testing.assert_allclose, rtol=1e-5), state.collections[OVERWRITTEN], scales)
    assert_each_leaf(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), unbox(state.params), params)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
@pytest.mark.parametrize(
    "check_vma, op, minibatches",
    [(True, OPS[0], 1), (False, OPS[0], 2), (True, OPS[1], 1)],
    ids=["direct", "minibatches", "qdq"],
)
def test_fp8_scales_after_each_of_ten_steps_match_a_single_device(check_vma, op, minibatches):
    tx, mesh = optax.sgd(0.05), mesh_of(2, 4)
    state = create_train_state(Fp8(fsdp, op), tx, mesh, jax.random.key(0), X, batch_axes=AXES)
    step = make_train_step(loss_fn, mesh, AXES, minibatches, check_vma=check_vma)
    start = jax.device_get(state.collections[OVERWRITTEN])
    for params, scales in on_one_device(tx, minibatches, op):
        state, _ = step(state, X, jax.random.key(2))
        assert_alike(state, params, scales)
    same = jax.tree.map(np.array_equal, start, jax.device_get(state.collections[OVERWRITTEN]))
    assert not [path for path, is_same in leaves_with_path(same) if is_same]  # guard: every scale changes


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kernels_gathered_in_fp8_train_as_on_a_single_device(check_vma, tmp_path):
    """Kernels gathered in fp8 train as on one device: in a scan, remat, minibatches, and after a checkpoint.

    Parameters and scales are compared after each of ten steps; the checkpoint is after the fifth.
    """
    # Kernels have 128 values or more, and are split; biases have at most 32, and are not.
    tx, mesh, wrap = optax.sgd(0.02), mesh_of(2, 4), fsdp(gather_dtype=NARROW, min_weight_size=64)
    state = create_train_state(Fp8(wrap, layers=2), tx, mesh, jax.random.key(0), X, batch_axes=AXES)
    step = make_train_step(loss_fn, mesh, AXES, num_minibatches=2, check_vma=check_vma)
    assert gathers(step.lower(state, X, KEY)) == {"ui8"}  # guard: the bytes of fp8, and nothing else
    for index, (params, scales) in enumerate(on_one_device(tx, minibatches=2, op=OPS[0], layers=2)):
        if index == STEPS // 2:
            with Checkpointer(tmp_path) as checkpointer:
                checkpointer.save(index, state)
                state = checkpointer.restore(jax.tree.map(jnp.zeros_like, state))
        state, _ = step(state, X, KEY)
        with in_case(step=index + 1):
            assert_alike(state, params, scales)


def gathers(lowered):
    """Returns the dtypes of all gathers."""
    return set(re.findall(r"stablehlo.all_gather.* -> tensor<[0-9x]+x(\w+)>", lowered.as_text()))


class Own(nn.Module):
    """A layer with a custom product of ``of(kernel)``."""

    of: Any = lambda kernel: kernel
    times: int = 1

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(0.1), (16, 4))
        products = [nn.Fp8Einsum(amax_history_length=4) for _ in range(self.times)]
        return sum(product("bi,io->bo", x, self.of(kernel)) for product in products)


class Reads(nn.Module):
    """Flax's layer under a transformation that changes or passes its kernel."""

    how: str

    @nn.compact
    def __call__(self, x):
        options = {"use_bias": False, "dot_general_cls": OPS[0]}
        if self.how == "norm":
            return nn.WeightNorm(nn.Dense(4, **options))(x)
        if self.how == "map":
            double, init = partial(jax.tree.map, lambda w: 2 * w), self.is_initializing()
            return nn.map_variables(nn.Dense, "params", double, init=init)(4, **options)(x)
        if self.how == "twice":
            layer = nn.Dense(16, **options)
            return layer(layer(x))[:, :4]
        return nn.remat(nn.Dense)(4, **options)(x)


MODELS = {
    "layers": (partial(Fp8, layers=2), {"wrap": partial(fsdp, min_weight_size=64)}),
    "einsum": (lambda wrap: wrap(Own)(), {"wrap": fsdp}),
}


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["layers", pytest.param("einsum", marks=pytest.mark.slow)])
def test_fp8_products_with_fp8_gathers_are_bit_equal_to_float32_gathers(model, check_vma):
    mesh, (make, options) = mesh_of(2, 4), MODELS[model]
    ended = []
    for gather_dtype, dtypes in ((NARROW, {"ui8"}), (None, {"f32"})):
        wrapped = make(options["wrap"](gather_dtype=gather_dtype))
        state = create_train_state(wrapped, optax.sgd(0.05), mesh, jax.random.key(0), X, batch_axes=AXES)
        step = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma)
        assert gathers(step.lower(state, X, jax.random.key(2))) == dtypes  # guard
        for _ in range(3):
            state, _ = step(state, X, jax.random.key(2))
        ended.append(jax.device_get((unbox(state.params), state.collections)))
    assert_each_leaf(np.testing.assert_array_equal, *ended)


def test_history_records_the_largest_magnitude_and_the_next_scale_is_that_of_the_history():
    history, shard, after = jnp.float32([1, 4, 3, 2]), jnp.float32([-7, 5]), jnp.float32([0, 1, 4, 3])
    ((grad,), same) = jax.vjp(lambda history: fp8_products.recording(history, shard), history)[1](after), history
    np.testing.assert_array_equal(grad, [7, 1, 4, 3])
    np.testing.assert_array_equal(fp8_products.recording(history, shard), same)
    largest = float(jnp.finfo(NARROW).max)
    np.testing.assert_allclose(fp8_products.next_scale(jnp.ones(1), history), [4 / largest])


def trains_last(path):
    return path.startswith("Dense_0")


@pytest.mark.parametrize("minibatches", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", [(2, 4), pytest.param((1, 8), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_frozen_fp8_kernels_stored_in_bfloat16_train_as_with_gathers_of_stored_values(check_vma, mesh, minibatches):
    """The product computes in float32, and rounds the stored values in float32, wherever the kernel is rounded."""
    mesh, ended, gathered = mesh_of(*mesh), [], []
    for gather_dtype in (NARROW, None):
        model = Fp8(fsdp(gather_dtype=gather_dtype, min_weight_size=64))
        frozen = {"trainable": trains_last, "frozen_dtype": "bfloat16"}
        state = create_train_state(
            model, optax.sgd(0.05), mesh, jax.random.key(0), X, batch_axes=AXES, allow_replicated=True, **frozen
        )
        assert unbox(state.params)["Dense_1"]["kernel"].dtype == jnp.bfloat16
        step = make_train_step(loss_fn, mesh, AXES, minibatches, check_vma=check_vma, allow_replicated=True)
        gathered.append(re.findall(r" all-gather(?:-start)?\(", step.lower(state, X, KEY).compile().as_text()))
        for _ in range(3):
            state, _ = step(state, X, KEY)
        ended.append(jax.device_get((unbox(state.params), state.collections)))
    assert_each_leaf(np.testing.assert_array_equal, *ended)
    # Quantised in two dtypes, and sent in one: XLA removes the gather that nothing reads.
    assert len(gathered[0]) == len(gathered[1]) > 0


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_frozen_fp8_kernels_match_a_single_device(check_vma):
    model, mesh, tx = Fp8(fsdp), mesh_of(2, 4), optax.sgd(0.05)
    state = create_train_state(model, tx, mesh, jax.random.key(0), X, batch_axes=AXES, trainable=trains_last)
    step = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma)
    start = {"params": jax.device_get(unbox(state.params)), **jax.device_get(state.collections)}
    only_last = optax.multi_transform({True: tx, False: optax.set_to_zero()}, {"Dense_0": True, "Dense_1": False})
    for params, scales in on_one_device(only_last, 1, OPS[0], start=start):
        state, _ = step(state, X, KEY)
        assert_alike(state, params, scales)


def lowered(model, loss=loss_fn, **options):
    """Returns the lowered step of a model, without values."""
    mesh = mesh_of(2, 4)
    state = abstract_train_state(model, optax.sgd(0.05), mesh, jax.random.key(0), X, batch_axes=AXES)
    return make_train_step(loss, mesh, AXES, **options).lower(state, X, jax.random.key(2))


REFUSED = {kind: lambda wrap, kind=kind: wrap(Reads)(kind) for kind in ("norm", "map", "remat", "twice")}
REFUSED |= {"own": lambda wrap: wrap(Own)(lambda kernel: kernel / 2), "function": lambda wrap: Function(wrap)}


class Function(nn.Module):
    wrap: Any

    @nn.compact
    def __call__(self, x):
        return self.wrap(lambda module, x: Reads.__call__(module, x))(Reads("norm", name="reads"), x)


@pytest.mark.parametrize("kind", REFUSED)
def test_train_step_raises_for_an_fp8_gathered_kernel_changed_before_the_product(kind):
    with pytest.raises(ValueError, match=r"kernel' is gathered in float8_e4m3fn, rounded .* receives another array"):
        lowered(REFUSED[kind](fsdp(gather_dtype=NARROW)))


def test_wider_gather_dtypes_need_no_fp8_product_of_the_kernel():
    wide, as_stored = (lowered(wrap(Reads)("norm")) for wrap in (fsdp(gather_dtype="float32"), fsdp()))
    assert wide.as_text() == as_stored.as_text()
    assert gathers(lowered(Fp8(fsdp(gather_dtype="bfloat16")))) == {"bf16"}


@pytest.mark.slow
def test_fp8_kernels_with_two_products_or_reduce_once_are_gathered_in_blocks(monkeypatch):
    jax.clear_caches()  # drop traces of earlier tests
    monkeypatch.setattr(
        fp8_products, "quantised", lambda *_: pytest.fail("a kernel was quantised as its product rounds")
    )
    assert gathers(lowered(fsdp(gather_dtype=NARROW)(Own)(times=2))) == {"ui8"}
    once = {"num_minibatches": 2, "accumulation": "reduce_once"}
    assert gathers(lowered(Fp8(fsdp(gather_dtype=NARROW)), **once)) == {"ui8"}
    with pytest.raises(pytest.fail.Exception):  # guard
        lowered(fsdp(gather_dtype=NARROW)(Own)())


def test_plan_counts_a_single_byte_per_value_of_an_fp8_gathered_kernel():
    plan = plan_sharding(Fp8(fsdp(gather_dtype=NARROW), layers=2), {"dp": 2, "fsdp": 4}, X)
    sent = {row.path: (row.gathered_bytes, row.gather_dtype) for row in plan.rows if row.uses}
    assert sent["Dense_1/kernel"] == (16 * 32, "float8_e4m3fn of its product")
    assert sent["layers/Dense_0/kernel"] == (16 * 16, "float8_e4m3fn of its product")
    assert sent["Dense_1/bias"][1] == NARROW
    assert not [path for path in sent if "history" in path]


def test_value_and_grad_raises_for_fp8_scales_without_an_update_rule():
    model, mesh = Fp8(fsdp), mesh_of(2, 4)
    state = create_train_state(model, optax.sgd(0.05), mesh, jax.random.key(0), X, batch_axes=AXES)

    def grads(params, x):
        loss = lambda params, x: loss_fn(params, model.apply, x, None, state.collections)[0]  # noqa: E731
        return value_and_grad(loss, AXES)(params, x)[1]

    specs = jax.tree.map(lambda x: x.sharding.spec, state.params)
    with pytest.raises(ValueError, match=r"'Dense_1/kernel' has .* would stay as they are"):
        on_mesh(grads, mesh, True, (specs, jax.P(AXES)), specs).lower(state.params, X)


def test_fp8_teacher_in_extra_trees_lowers_without_training_the_scales():
    """A teacher in fp8 is not trained; ``freeze_params`` distinguishes bare replicated kernels from a student's."""
    mesh = mesh_of(2, 4)
    teacher, student = (
        create_train_state(model, optax.sgd(0.1), mesh, jax.random.key(0), X, batch_axes=AXES)
        for model in (Fp8(fsdp), fsdp(nn.Dense)(4))
    )

    def loss(params, apply_fn, x, rng, *, teacher):
        return jnp.mean((apply_fn({"params": params}, x) - Fp8(fsdp).apply(teacher, x)) ** 2)

    step = make_train_step(loss, mesh, AXES)
    for params in (teacher.params, freeze_params(teacher.params, lambda path: False)):
        others = {"teacher": {"params": params, **teacher.collections}}
        assert "all_gather" in step.lower(student, X, jax.random.key(2), extra_trees=others).as_text()


def test_train_step_raises_for_an_fp8_scale_split_over_devices():
    model, mesh = Fp8(fsdp(gather_dtype=NARROW)), mesh_of(2, 4)
    state = create_train_state(model, optax.sgd(0.05), mesh, jax.random.key(0), X, batch_axes=AXES)
    scale = state.collections[OVERWRITTEN]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
    scale["kernel_scale"] = Sharded(jnp.ones(4), ("fsdp",))
    step = make_train_step(loss_fn, mesh, AXES)
    with pytest.raises(ValueError, match=r"'Dense_0/kernel' has a scale that is split over \('fsdp',\)"):
        step.lower(state, X, jax.random.key(2))


def weighted_loss(params, apply_fn, x, rng, collections):
    """Weighted loss with rows of zeros as padding. Devices differ in weight."""
    out, updated = apply_fn({"params": params, **collections}, x, mutable=list(collections))
    # Numbers, not booleans: XLA makes a select of a product with a converted boolean, and a select hides 0 * inf.
    weights = jnp.max(jnp.abs(x), -1)
    return (jnp.sum(weights * jnp.mean((out - x[:, :4]) ** 2, -1)), jnp.sum(weights)), updated


PADDED = np.where(np.arange(16)[:, None] < 8, X, 0)  # four of the eight devices have padding only
MORE = 3 * normal(3, (48, 16))


@pytest.mark.parametrize(
    "wrap, loss, x, num_minibatches",
    [
        (fsdp, loss_fn, X, 1),
        (fsdp, weighted_loss, PADDED, 1),
        (fsdp(gather_dtype=NARROW), loss_fn, X, 1),
        (fsdp, loss_fn, MORE, 3),
        (fsdp, weighted_loss, np.where(np.arange(16)[:, None] % 2, 0, X), 2),
        # Of the six rows of each device the third and fourth, the second minibatch, are padding.
        (fsdp(gather_dtype=NARROW), weighted_loss, np.where((np.arange(48) % 6 // 2 == 1)[:, None], 0, MORE), 3),
    ],
    ids=["mean", "padding", "kernels that products round", "minibatches", "a minibatch of padding", "all together"],
)
def test_check_step_uses_fp8_scales_of_the_global_mean(wrap, loss, x, num_minibatches):
    """``check_step`` uses scales of the global mean: gradients of local means are eight times larger, and clipped.

    Scales change between minibatches. Factors of terms are those of the step: fp8 rounds other factors otherwise.
    """
    state = create_train_state(Fp8(wrap), optax.sgd(0.05), mesh_of(2, 4), jax.random.key(0), x, batch_axes=AXES)
    weighted = loss is weighted_loss
    step = make_train_step(loss, mesh_of(2, 4), AXES, weighted=weighted, num_minibatches=num_minibatches)
    state, _ = step(state, x, jax.random.key(2))
    found = check_step(step, state, x, jax.random.key(2))
    assert found.verdict == "right", found


@jax.custom_vjp
def scaled(y, scale):
    """Returns ``y * scale``; the gradient by ``scale`` is its next value, 1 + the largest gradient of an output."""
    return y * scale


scaled.defvjp(lambda y, scale: (y * scale, scale), lambda scale, grads: (grads * scale, 1 + jnp.max(jnp.abs(grads))))


def test_reference_of_scales_uses_gradients_of_terms_of_the_mean_over_devices_minibatch_by_minibatch():
    """The first of three minibatches has rows of weight 0 alone: its gradients are 0, and the next scale is 1."""
    mesh, minibatches = mesh_of(1, 2), 3
    params = {"w": jax.device_put(np.float32(3), NamedSharding(mesh, jax.P()))}
    fields = {"params": params, "collections": {OVERWRITTEN: {"scale": np.float32(2)}}}
    state = TrainState.create(apply_fn=None, tx=optax.sgd(0.1), **fields)
    x = np.float32([[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]])  # by device, minibatch and row
    weight = np.float32([[[0, 0], [1, 4], [2, 1]], [[0, 0], [1, 2], [3, 2]]])
    batch = {"x": x.ravel(), "weight": weight.ravel()}

    def loss(params, apply_fn, batch, rng, collections):
        out = scaled(params["w"] * batch["x"], collections[OVERWRITTEN]["scale"])
        return (jnp.sum(batch["weight"] * out), jnp.sum(batch["weight"])), collections

    one_device = OneDevice(LossFunction(loss, True), batch_layout(mesh, AXES), minibatches, state, batch, mesh)
    found = one_device.slices(KEY)

    scale, scales, slope = 2.0, [], 0.0
    for part in range(minibatches):
        slope += scale * np.sum(weight[:, part] * x[:, part]) / np.sum(weight)
        scale = 1 + np.max(weight[:, part]) / (np.sum(weight[:, part]) or 1)
        scales.append(scale)
    assert scales == [1, 1.5, 1.375]
    assert found.loss == pytest.approx(3 * slope, rel=1e-6) and float(found.grads["w"]) == pytest.approx(slope, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v5e:2x4", marks=pytest.mark.libtpu),
        pytest.param("v6e:2x4", marks=pytest.mark.libtpu),
        pytest.param("h100:1x8", marks=pytest.mark.cuda_plugin),
    ],
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_compiled_fp8_steps_gather_half_the_bytes_of_bfloat16(check_vma, topology):
    mesh, x = jax.sharding.AbstractMesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2), jnp.ones((256, 16))
    sent = []
    for op in (None, OPS[0]):
        gather_dtype = NARROW if op else "bfloat16"
        model = Fp8(fsdp(gather_dtype=gather_dtype, min_weight_size=64), op, dtype=jnp.bfloat16)
        state = abstract_train_state(model, optax.sgd(0.05), mesh, jax.random.key(0), x, batch_axes=AXES)
        step = make_train_step(loss_fn if op else without_collections, mesh, AXES, check_vma=check_vma)
        found = forecast(step, state, x, jax.random.key(1), topology=topology).collectives
        gathers = [sent for sent in found if sent.kind == "all-gather"]
        assert {gather.dtype for gather in gathers} == {"u8" if op else "bf16"}
        sent.append(sum(gather.wire_bytes_per_step for gather in gathers))
    assert sent[0] == 2 * sent[1] > 0


def without_collections(params, apply_fn, x, rng):
    return loss_fn(params, apply_fn, x, rng, {})[0]


@pytest.mark.parametrize("gather_dtype", [NARROW, pytest.param(None, marks=pytest.mark.slow)])
def test_frozen_fp8_kernels_in_an_nnx_model_match_a_single_device(gather_dtype):
    """Products of Linen layers in an NNX model, of which one kernel is frozen; NNX itself has no fp8 products."""
    linen = shard_modules(Fp8(), nn.Dense, "fsdp", 64, gather_dtype)
    model = nnx_model(lambda rngs: nnx.bridge.lazy_init(nnx.bridge.ToNNX(linen, rngs=rngs), X))
    tx, mesh = optax.sgd(0.05), mesh_of(2, 4)
    trainable = {"trainable": nnx.PathContains("Dense_0")}
    state = create_train_state(model, tx, mesh, jax.random.key(0), X, batch_axes=AXES, **trainable)
    assert not state.params["Dense_1"]["kernel"].trainable and leaf_of(state.params["Dense_0"]["kernel"]).trainable

    def loss(params, apply_fn, x, rng, collections):
        return loss_fn(params, partial(apply_fn, rngs={"default": rng}), x, rng, collections)

    start = {"params": jax.device_get(unbox(state.params)), **jax.device_get(state.collections)}
    step = make_train_step(loss, mesh, AXES)
    only_last = optax.multi_transform({True: tx, False: optax.set_to_zero()}, {"Dense_0": True, "Dense_1": False})
    for params, scales in on_one_device(only_last, 1, OPS[0], start=start):
        state, _ = step(state, X, jax.random.key(2))
        assert_alike(state, params, scales)
    kernels = [np.asarray(unbox(state.params)[name]["kernel"]) for name in ("Dense_0", "Dense_1")]
    changed = [not np.array_equal(k, start["params"][f"Dense_{i}"]["kernel"]) for i, k in enumerate(kernels)]
    assert changed == [True, False]  # guard


@pytest.mark.slow
def test_fp8_scales_in_an_nnx_model_match_a_single_device():
    linen = shard_modules(Fp8(), nn.Dense, "fsdp", 64, NARROW)
    model = nnx_model(lambda rngs: nnx.bridge.lazy_init(nnx.bridge.ToNNX(linen, rngs=rngs), X))
    tx, mesh = optax.sgd(0.05), mesh_of(2, 4)
    state = create_train_state(model, tx, mesh, jax.random.key(0), X, batch_axes=AXES)

    def loss(params, apply_fn, x, rng, collections):
        return loss_fn(params, partial(apply_fn, rngs={"default": rng}), x, rng, collections)

    start = {"params": jax.device_get(unbox(state.params)), **jax.device_get(state.collections)}
    step = make_train_step(loss, mesh, AXES)
    assert gathers(step.lower(state, X, jax.random.key(2))) == {"ui8"}
    for params, scales in on_one_device(tx, 1, OPS[0], start=start):
        state, _ = step(state, X, jax.random.key(2))
        assert_alike(state, params, scales)
