"""Each rule of the lint fires on a program that has the defect, compiled, and is silent on the one that has not."""

import contextlib
import dataclasses
import io
import math
import pickle
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.support import AXES, mesh_of
from xlstm_jax.distributed import (
    DeviceMeshManager,
    abstract_train_state,
    gather_params,
    make_train_step,
    muon,
    partition_specs,
    shard_module_params,
    sync_gradients,
)
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, rebox
from xlstm_jax.distributed.data_parallel.trees import map_leaves
from xlstm_jax.distributed.device_mesh.batches import abstract_batch
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.forecast import CHIPS, Forecast, Roofline, forecast
from xlstm_jax.forecast.cost.collective_traffic import ACTIVATIONS
from xlstm_jax.forecast.cost.flops import Flops, Work
from xlstm_jax.forecast.training import Workload
from xlstm_jax.forecast.training.linting import product_rules, split_rules
from xlstm_jax.forecast.training.linting.lint import Finding, LintError, findings_of, lint, raise_if, table
from xlstm_jax.forecast.training.linting.product_rules import wide_products
from xlstm_jax.forecast.training.linting.rules import MIN_KEPT_BYTES, RULES, _narrower
from xlstm_jax.forecast.training.linting.step import Step, shared_name

SIZES = {"dp": 2, "fsdp": 4}
WIDTH, HIDDEN, LAYERS = 256, 1024, 3
LAYER = WIDTH * HIDDEN * 2  # bytes of a kernel of one layer in bfloat16
BATCH = jax.ShapeDtypeStruct((128, WIDTH), jnp.bfloat16)
SCAN = partial(nn.scan, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
KERNELS = ["blocks/down/kernel", "blocks/up/kernel"]


def wrap(target, axis_name="fsdp", gather_dtype=jnp.bfloat16, min_weight_size=2**10):
    return shard_module_params(target, axis_name, min_weight_size, gather_dtype=gather_dtype)


class Block(nn.Module):
    """A residual MLP, with a vector that backward does not read, and one that stays whole."""

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.RMSNorm(name="norm")(x)
        y = nn.gelu(nn.Dense(HIDDEN, name="up", dtype=jnp.bfloat16)(y))
        return x + nn.Dense(WIDTH, use_bias=False, name="down", dtype=jnp.bfloat16)(y), None


def rematerialized(wrap):
    return SCAN(nn.remat(wrap(Block)))


def kept(wrap):
    return SCAN(wrap(Block))


def rematerialized_inside(wrap):
    return SCAN(wrap(nn.remat(Block)))


def loop_inside(wrap):
    return wrap(SCAN(Block))


def bare(wrap):
    del wrap
    return SCAN(nn.remat(Block))


class Model(nn.Module):
    """Scanned blocks between two wrapped layers."""

    layers: Callable = rematerialized
    wrap: Callable = wrap

    @nn.compact
    def __call__(self, x):
        dense = partial(self.wrap(nn.Dense), WIDTH, use_bias=False, dtype=jnp.bfloat16)
        x, _ = self.layers(self.wrap)(name="blocks")(dense(name="first")(x), None)
        return dense(name="last")(x)


def mean_square(params, apply_fn, batch, rng=None):
    del rng
    return jnp.mean(apply_fn({"params": params}, batch).astype(jnp.float32) ** 2)


def compiled(model, mesh, loss=mean_square, topology=None, batch=BATCH, **options) -> Forecast:
    """The forecast of a training step on a mesh of simulated devices, or on one without devices for a topology."""
    axes, rng = tuple(mesh.shape), jax.eval_shape(lambda: jax.random.key(0))
    state = abstract_train_state(model, optax.sgd(1e-3), mesh, rng, batch, batch_axes=axes, allow_replicated=True)
    step = make_train_step(loss, mesh, axes, allow_replicated=True, **options)
    return forecast(step, state, abstract_batch(batch, mesh, axes), rng, topology=topology)


@cache
def cached(model=None, **options) -> Forecast:
    return compiled(model or Model(), mesh_of(2, 4), **options)


def plan_of(model=None, sizes=SIZES):
    return plan_sharding(model or Model(), sizes, BATCH)


def found(findings: list[Finding], rule: str) -> list[str]:
    """Where a rule has found something; it found nothing else."""
    assert {finding.rule for finding in findings} <= {rule}, findings
    return sorted(name for finding in findings for name in finding.where.split(", "))


def each(rule, forecast, plan) -> list[Finding]:
    """What a rule finds, before findings of one cause become one."""
    return findings_of(RULES[rule], Step(forecast, plan, num_minibatches=1, keep_gathered=False))


# ------------------------------------------------------------------------------------------------------- nothing to say


def test_lint_of_a_well_made_step_has_no_findings():
    assert lint(cached(), plan_of()) == []
    assert sum(c.kind == "all-gather" for c in cached().collectives) >= 6  # guard: there was something to look at


def test_lint_of_a_well_made_step_without_check_vma_has_no_findings():
    assert lint(cached(check_vma=False), plan_of()) == []


def test_lint_of_staged_gathers_over_two_axes_has_no_findings():
    model = Model(wrap=partial(wrap, axis_name=AXES))
    forecast = cached(model)
    assert {c.axes for c in forecast.collectives if c.kind == "all-gather"} == {("dp",), ("fsdp",)}  # guard
    assert lint(forecast, plan_of(model)) == []


# -------------------------------------------------------------------------------------------------------- each one rule


def test_lint_repeated_gather_fires_for_a_model_called_twice():
    def twice(params, apply_fn, batch, rng=None):
        return mean_square(params, apply_fn, apply_fn({"params": params}, batch), rng)

    findings = lint(cached(loss=twice), plan_of())
    assert set(found(findings, "repeated-gather")) >= {"blocks/up/kernel", "blocks/down/kernel"}
    of_all = next(finding for finding in findings if "blocks/up/kernel" in finding.where)
    several = each("repeated-gather", cached(loss=twice), plan_of())
    assert of_all.bytes == sum(one.bytes for one in several if one.where in of_all.where.split(", "))
    finding = next(finding for finding in several if finding.where == "blocks/up/kernel")
    assert f"gathered {4 * LAYERS} times in a step, where 1 x {LAYERS} uses need {2 * LAYERS}" in finding.text
    # Half of the gathers, three quarters of each over the wire; the CPU sends float32.
    assert finding.bytes == 2 * LAYERS * 2 * LAYER * 3 // 4


def test_lint_repeated_gather_fires_for_minibatches_unless_num_minibatches_is_given():
    forecast = cached(num_minibatches=2)
    assert lint(forecast, plan_of(), num_minibatches=2) == []
    assert set(found(lint(forecast, plan_of()), "repeated-gather")) >= {"blocks/up/kernel", "blocks/down/kernel"}


def test_lint_repeated_gather_fires_for_a_gathered_leaf_replicated_in_the_plan():
    model = Model(wrap=partial(wrap, min_weight_size=2**17))
    findings = lint(cached(), plan_of(model))
    (last,) = [finding for finding in findings if "last/kernel" in finding.where]
    assert last.rule == "repeated-gather" and "1 x 0 uses need 0" in last.text
    assert "make the plan of the model" in last.cure


def test_lint_wide_gather_fires_for_float32_where_float16_was_requested():
    """In float16, which the CPU backend sends as it is."""
    narrow = Model(wrap=partial(wrap, gather_dtype=jnp.float16))
    wide = Model(wrap=partial(wrap, gather_dtype=jnp.float32))
    assert lint(cached(narrow), plan_of(narrow)) == []
    findings = lint(cached(wide), plan_of(narrow))
    where = found(findings, "wide-gather")
    assert where == ["blocks/down/kernel", "blocks/up/bias", "blocks/up/kernel", "first/kernel", "last/kernel"]
    assert len(findings) == 1 and "likewise" in findings[0].text  # all of one cause, with the numbers of the largest
    (up,) = [f for f in each("wide-gather", cached(wide), plan_of(narrow)) if f.where == "blocks/up/kernel"]
    assert up.bytes == 2 * LAYERS * LAYER * 3 // 4 and "is gathered as f32, but its wrapper requests float16" in up.text


def test_lint_wide_gather_fires_for_float16_where_int8_was_requested():
    packed = Model(wrap=partial(wrap, gather_dtype="int8"))
    wide = Model(wrap=partial(wrap, gather_dtype=jnp.float16))
    finding = next(f for f in lint(cached(wide), plan_of(packed)) if "blocks/up/kernel" in f.where)
    assert "is gathered as f16, but its wrapper requests int8" in finding.text and finding.rule == "wide-gather"


def test_lint_has_no_findings_for_a_narrower_gather_than_requested():
    narrow = Model(wrap=partial(wrap, gather_dtype=jnp.float16))
    wide = Model(wrap=partial(wrap, gather_dtype=jnp.float32))
    assert lint(cached(narrow), plan_of(wide)) == []


def test_lint_wide_gather_ignores_bfloat16_widened_by_the_cpu_backend():
    (gather,) = [c for c in cached().collectives if c.leaves == ("first/kernel",)]
    assert gather.dtype == "f32" and plan_of().row("first/kernel").gather_dtype == "bfloat16"
    assert "wide-gather" not in {finding.rule for finding in lint(cached(), plan_of())}


@pytest.mark.parametrize("planned", [rematerialized, loop_inside], ids=lambda layers: layers.__name__)
def test_lint_hoisted_gather_fires_for_a_gather_of_all_layers_before_the_loop(planned):
    """Whether the plan is of a model whose loop is around the wrapper, or of the one that was compiled."""
    findings = lint(cached(Model(layers=loop_inside)), plan_of(Model(layers=planned)))
    where = found(findings, "hoisted-gather")
    assert where == KERNELS  # the bias is small
    assert not [finding.text for finding in findings if f"gathered for {LAYERS} layers at once" not in finding.text]
    assert {finding.bytes for finding in findings} == {
        len(KERNELS) * (LAYERS - 1) * 2 * LAYER
    }  # float32 on this backend
    assert "nn.scan(nn.remat(shard_module_params(" in findings[0].cure


def test_wide_products_are_those_of_modules_in_float32_in_a_model_with_most_flop_in_bfloat16():
    def found(**flops):  # by the name of a module, or of the loss: FLOP in bfloat16 and in float32
        work = [
            Work("" if name == "loss" else name, "forward", dtype, count)
            for name, counts in flops.items()
            for dtype, count in zip(("bfloat16", "float32"), counts, strict=True)
        ]
        of_step = SimpleNamespace(flops=Flops(tuple(work), (), ()), chip=None)
        return [defect.where for defect in wide_products(SimpleNamespace(forecast=of_step))]

    assert found(up=(90, 0), down=(4, 6)) == ["down"]
    assert found(layer_0=(40, 5), layer_1=(40, 5)) == ["layer_*"]
    assert found(up=(990, 0), router=(0, 9), loss=(0, 90)) == []  # less than 1 %, and work of no module
    assert found(up=(4, 6)) == []  # a model of float32


def test_lint_has_no_findings_for_vmap_experts_gathered_together():
    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x):
            expert = nn.vmap(
                wrap(nn.Dense), variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=4
            )
            return expert(HIDDEN, name="experts", use_bias=False, dtype=jnp.bfloat16)(x).sum(axis=0)

    forecast, plan = cached(Experts()), plan_of(Experts())
    (gather,) = [c for c in forecast.collectives if c.kind == "all-gather"]
    assert gather.payload_bytes == 4 * 2 * LAYER > MIN_KEPT_BYTES and plan.row("experts/kernel").uses == 4  # guard
    assert lint(forecast, plan) == []


@pytest.mark.parametrize("layers", [kept, rematerialized_inside], ids=lambda layers: layers.__name__)
def test_lint_kept_gathered_fires_for_gathered_weights_kept_for_backward(layers):
    model = Model(layers=layers)
    findings = lint(cached(model), plan_of(model))
    assert found(findings, "kept-gathered") == KERNELS
    assert {finding.bytes for finding in findings} == {len(KERNELS) * LAYERS * LAYER}
    assert f"{LAYERS} layers of 512 KiB live from one to the other: 1.5 MiB per device" in findings[0].text
    assert lint(cached(model), plan_of(model), keep_gathered=True) == []


def test_lint_all_reduce_of_shards_fires_for_gradients_of_gathered_weights():
    """A step that differentiates with respect to gathered weights: everything of it is correct, and dear."""
    model, mesh = Model(), mesh_of(2, 4)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    state = abstract_train_state(model, optax.sgd(1e-3), mesh, rng, BATCH, batch_axes=AXES)
    specs, unwrapped = partition_specs(state.params, mesh), Model(layers=bare, wrap=lambda cls: cls)

    def per_device(params, x):
        gathered = gather_params(params, "fsdp")
        grads = sync_gradients(jax.grad(mean_square)(gathered, unwrapped.apply, x), AXES)
        return map_leaves(updated, params, grads)

    def updated(leaf, grad):
        value, names = leaf_of(leaf).value, leaf_of(leaf).names
        if "fsdp" not in names:
            return value - grad
        dim = names.index("fsdp")
        start = lax.axis_index("fsdp") * value.shape[dim]
        return rebox(leaf, value - lax.dynamic_slice_in_dim(grad, start, value.shape[dim], dim))

    placed = {"mesh": mesh, "in_specs": (specs, P(AXES)), "out_specs": specs, "check_vma": False}
    step = jax.jit(lambda state, x: state.replace(params=jax.shard_map(per_device, **placed)(state.params, x)))
    findings = lint(forecast(step, state, abstract_batch(BATCH, mesh, AXES)), plan_of())
    (finding,) = [finding for finding in findings if finding.rule == "all-reduce-of-shards"]
    names = ["blocks/down/kernel", "blocks/up/kernel", "first/kernel"]
    assert not [name for name in (*names, "2 more") if name not in finding.where]
    kernels = 2 * LAYERS * WIDTH * HIDDEN + 2 * WIDTH * WIDTH
    assert finding.bytes == 7 * 4 * (kernels + LAYERS * HIDDEN) // 8  # half of 2 x 7/8, in float32
    assert {f.rule for f in findings} == {"all-reduce-of-shards", "hoisted-gather"}


class Large(nn.Module):
    """Layers that stay whole, each for a reason of its own."""

    min_weight_size: int = 2**10

    @nn.compact
    def __call__(self, x):
        x = wrap(nn.Dense, min_weight_size=self.min_weight_size)(1022, name="wrapped")(x)
        x = wrap(nn.Dense)(1021, use_bias=False, name="odd")(x)
        return nn.Dense(2 * WIDTH, name="bare")(x)


def test_lint_replicated_leaf_fires_for_large_indivisible_or_unwrapped_leaves():
    forecast = cached(Large())
    odd, bare = sorted(lint(forecast, plan_of(Large())), key=lambda finding: finding.where, reverse=True)
    assert (odd.rule, odd.where, bare.rule, bare.where) == (
        "replicated-leaf",
        "odd/kernel",
        "replicated-leaf",
        "bare/kernel",
    )
    assert odd.cure == "Pass uneven='pad', or give its dim of 1022 the size 1024, which 4 divides."
    assert odd.bytes == 2 * 1022 * 1021 * 4 and "on each of 8 devices (4 divides no free dim" in odd.text
    assert bare.bytes == 2 * 1021 * 2 * WIDTH * 4 and "shard_module_params around the module" in bare.cure


def test_lint_replicated_leaf_fires_for_a_min_weight_size_above_the_kernels():
    model = Model(wrap=partial(wrap, min_weight_size=2**20))
    findings = lint(cached(model), plan_of(model))
    assert found(findings, "replicated-leaf") == KERNELS
    assert findings[0].cure == f"Lower min_weight_size to {WIDTH * HIDDEN} or less."


@pytest.mark.parametrize("tx, is_found", [(optax.contrib.muon(0.1), True), (muon(0.1), False)], ids=["optax", "ours"])
def test_lint_shared_and_repeated_products_fire_for_optax_muon_and_not_for_library_muon(tx, is_found):
    rows, columns, devices = 512, 1024, 8  # of the kernel
    model, x = shard_module_params(nn.Dense, "fsdp")(columns), jax.ShapeDtypeStruct((64, rows), jnp.float32)
    mesh = mesh_of(1, devices)
    step, args = Workload(model, tx, x, mean_square).build_step(mesh)
    findings = lint(forecast(step, *args), plan_sharding(model, mesh.shape, x))
    shared, repeated = (
        [f for f in findings if f.rule == rule] for rule in ("shared-matrix-product", "repeated-product")
    )
    assert bool(shared) == bool(repeated) == is_found
    if is_found:
        # One of Newton-Schulz's 5 iterations has the Gram matrix of the kernel, its square, and its product with the
        # kernel. The compiler distributes the first and the last over the devices; all repeat the square.
        iterations, float32_bytes = 5, 4
        assert shared[0].bytes > iterations * rows * rows * float32_bytes  # each Gram matrix is all-reduced
        square, gram_or_product = 2 * rows**3, 2 * rows * rows * columns  # FLOP
        fair_share = iterations * (square + 2 * gram_or_product) / devices
        done = iterations * (square + 2 * gram_or_product / devices)
        assert f"does {done:.3g} FLOP" in repeated[0].text
        assert f"is {fair_share:.3g}: {done / fair_share:.3g} times" in repeated[0].text
        # With an owner for each of n < 8 matrices, a device does at most 1 / n of the work; now it does
        # done / (devices * fair_share) of it.
        least_matrices = math.floor(devices * fair_share / done) + 1
        assert f"from {least_matrices} matrices of a shape on" in repeated[0].cure
        for finding in (*shared, *repeated):
            assert "xlstm_jax.distributed.muon" in finding.cure, finding.rule


class Mixed(nn.Module):
    """A block of bfloat16, a layer whose result alone is float32, and one that is float32."""

    wide: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = wrap(Block)(name="block")(x)[0]
        sums = partial(lax.dot_general, preferred_element_type=jnp.float32)
        x = wrap(nn.Dense)(WIDTH, dtype=jnp.bfloat16, dot_general=sums, name="sums")(x).astype(jnp.bfloat16)
        return wrap(nn.Dense)(WIDTH, dtype=self.wide, name="wide")(x)


def test_lint_wide_product_fires_for_float32_layers_of_a_bfloat16_model():
    sums, wide = sorted(each("wide-product", cached(Mixed()), plan_of(Mixed())), key=lambda finding: finding.where)
    assert (sums.where, wide.where, sums.bytes, wide.bytes) == ("sums", "wide", 0, 0)
    assert "multiplies in float32" in wide.text and "Give the module dtype=jnp.bfloat16" in wide.cure
    product = 2 * BATCH.shape[0] // 8 * WIDTH * WIDTH
    assert f"{3 * product:.3g} FLOP per device" in wide.text
    assert f"{2 * product:.3g} FLOP per device" in sums.text and "Only its backward pass is wide" in sums.cure
    assert "Each operand of float32 takes twice the bytes" in sums.text
    narrow = each("wide-product", cached(Mixed(jnp.bfloat16)), plan_of(Mixed()))
    assert [finding.where for finding in narrow] == ["sums"]


def test_lint_wide_product_ignores_bfloat16_products_of_the_optimizer():
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)

    class Root(nn.Module):
        @nn.compact
        def __call__(self, x):
            return wrap(nn.Dense, gather_dtype=None)(256, name="dense")(x)

    def iterate(updates, _):
        x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), updates)
        for _ in range(5):
            x = jax.tree.map(lambda x: x @ x.T @ x if x.ndim == 2 else x, x)
        return x

    mesh = mesh_of(1, 8)
    step, args = Workload(Root(), optax.stateless(iterate), x, mean_square).build_step(mesh)
    found = forecast(step, *args)
    assert found.flops.by_dtype()["bfloat16"] > 0.9 * found.flops.total  # guard: of Newton-Schulz
    assert found.flops.by_module()["dense"] > product_rules.MIN_WIDE_FRACTION * found.flops.total
    assert not each("wide-product", found, plan_sharding(Root(), mesh.shape, x))


def test_lint_wide_product_takes_the_share_of_the_products_of_modules():
    """Of 6 parts of float32 the model has most, whatever the optimizer, without a path, multiplies in bfloat16."""

    def found(of_optimizer, of_modules):
        work = [("up", "float32", 6e9), ("", "bfloat16", of_optimizer), ("down", "bfloat16", of_modules)]
        flops = Flops(tuple(Work(path, "forward", dtype, count) for path, dtype, count in work), (), ())
        return [defect.where for defect in RULES["wide-product"].find(by_hand(flops=flops))]

    assert found(of_optimizer=90e9, of_modules=4e9) == []
    assert found(of_optimizer=4e9, of_modules=90e9) == ["up"]


class JaxsAttention(nn.Module):
    """A layer, and ``jax.nn.dot_product_attention`` of 32 tokens, all of bfloat16."""

    @nn.compact
    def __call__(self, x):
        x = wrap(nn.Dense)(WIDTH, dtype=jnp.bfloat16, name="dense")(x).reshape(-1, 32, 2, WIDTH // 2)
        with jax.named_scope("attention"):
            return jax.nn.dot_product_attention(x, x, x).reshape(-1, WIDTH)


def test_lint_wide_product_advises_a_kernel_for_dot_product_attention():
    batch = jax.ShapeDtypeStruct((8 * 32, WIDTH), jnp.bfloat16)
    step, plan = compiled(JaxsAttention(), mesh_of(2, 4), batch=batch), plan_of(JaxsAttention())
    (finding,) = each("wide-product", step, plan)
    assert (
        finding.where == "attention"
        and "jax.nn.dot_product_attention uses this argument internally: use a kernel" in finding.cure
    )


class Attentive(nn.Module):
    """Attention over 32 tokens, of 2 heads with 16 features each."""

    @nn.compact
    def __call__(self, x):
        attention = wrap(nn.MultiHeadDotProductAttention)(2, qkv_features=32, dtype=jnp.bfloat16, name="attention")
        return attention(x.reshape(-1, 32, WIDTH)).reshape(x.shape)


def test_lint_held_scores_fires_for_attention_scores_above_min_scores_bytes(monkeypatch):
    batch = jax.ShapeDtypeStruct((8 * 32, WIDTH), jnp.bfloat16)
    step, plan = compiled(Attentive(), mesh_of(2, 4), batch=batch), plan_of(Attentive())
    assert not each("held-scores", step, plan)
    monkeypatch.setattr(product_rules, "MIN_SCORES_BYTES", 2 * 32 * 32)
    (finding,) = each("held-scores", step, plan)
    assert (finding.where, finding.bytes) == ("attention", 2 * 32 * 32 * 2)
    assert "docs/kernels.md" in finding.cure and "4 KiB per device" in finding.text


def for_a_chip(forecast, *, memory_s=0.01, compute_s=0.1, exposed_s=0.0, total_bytes=None, topology="h100:1x8"):
    """The forecast of a step on CPU devices, as if for a chip of known figures: seconds by published rates."""
    hbm_bytes = memory_s * CHIPS[topology.split(":")[0]].hbm_bandwidth
    bounds = Roofline(compute_s, memory_s, 0.0, forecast.flops.total, hbm_bytes, 0.0)
    known = {"topology": topology, "roofline": bounds, "exposed_seconds": exposed_s, "code_bytes": 0}
    if total_bytes is not None:
        known["memory"] = dataclasses.replace(forecast.memory, temporary_bytes=total_bytes - forecast.total_bytes)
    return dataclasses.replace(forecast, available_bytes=80 * 10**9, **known)


class Uniform(nn.Module):
    """Layers that all compute in one dtype."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        dense = partial(wrap(nn.Dense, gather_dtype=self.dtype), WIDTH, dtype=self.dtype)
        return dense(name="second")(nn.gelu(dense(name="first")(x)))


def test_lint_float32_model_fires_only_for_an_all_float32_model_on_a_known_chip():
    wide, narrow = Uniform(jnp.float32), Uniform(jnp.bfloat16)
    (finding,) = each("float32-model", for_a_chip(cached(wide)), plan_of(wide))
    assert finding.where == "the model" and "100% of its products have operands of float32" in finding.text
    # Twice the rate in bfloat16: 989 and 494.5 TFLOP/s, and half of the bytes that gathers send.
    flops = cached(wide).flops.total
    assert flops / 494.5e12 * 1e3 < 0.0005 and "and take" not in finding.text  # too short to be a cost
    sent = sum(c.wire_bytes_per_step for c in cached(wide).collectives if c.leaves)
    assert sent and finding.bytes == round(sent / 2) and "sends 384 KiB of float32 weights" in finding.text
    assert "dtype=jnp.bfloat16 to the modules" in finding.cure and "gather_dtype=jnp.bfloat16" in finding.cure
    assert each("float32-model", for_a_chip(cached(narrow)), plan_of(narrow)) == []
    assert each("float32-model", for_a_chip(cached(Mixed())), plan_of(Mixed())) == []  # a layer alone: wide-product
    assert each("float32-model", cached(wide), plan_of(wide)) == []  # of CPU devices: the chip is not known


def by_hand(**known):
    """The step of a forecast with figures by hand, on a chip of known figures, and of no plan's bytes."""
    none = SimpleNamespace(per_device=0)
    plan = SimpleNamespace(parameters=none, gradients=none, optimizer=none)
    known = {"chip": CHIPS["h100"], "collectives": (), "total_bytes": 10**9, "available_bytes": None} | known
    return Step(SimpleNamespace(**known), plan, num_minibatches=1, keep_gathered=False)


def test_lint_float32_model_counts_the_share_of_products_and_half_of_the_float32_weights_sent():
    def found(wide, narrow):
        work = (Work("up", "forward", "float32", wide), Work("down", "forward", "bfloat16", narrow))
        gathers = [
            SimpleNamespace(leaves=leaves, dtype=dtype, wire_bytes_per_step=sent)
            for leaves, dtype, sent in [(("up",), "f32", 600.0), (("down",), "bf16", 70.0), ((), "f32", 8.0)]
        ]
        return list(RULES["float32-model"].find(by_hand(flops=Flops(work, (), ()), collectives=gathers)))

    (defect,) = found(wide=6e9, narrow=4e9)
    assert "60% of its products have operands of float32" in defect.text and defect.bytes == 300
    assert found(wide=4e9, narrow=6e9) == [], "half of the products or less are a layer, not the model"


@pytest.mark.parametrize("chip, times", [("h100", "take 2.02 ms at the peak rate, in bfloat16 1.01 ms"), ("v5e", "")])
def test_lint_float32_model_states_time_only_on_chips_with_a_faster_bfloat16_rate(chip, times):
    step = for_a_chip(cached(Uniform(jnp.float32)), topology=f"{chip}:1x8")
    work = tuple(dataclasses.replace(one, flops=1e12 / len(step.flops.work)) for one in step.flops.work)
    step = dataclasses.replace(step, flops=dataclasses.replace(step.flops, work=work))
    (finding,) = each("float32-model", step, plan_of(Uniform(jnp.float32)))
    assert times in finding.text and ("peak rate" in finding.text) == bool(times)


@cache
def attentive(model=None):
    batch = jax.ShapeDtypeStruct((8 * 32, WIDTH), jnp.bfloat16)
    return compiled(model or Attentive(), mesh_of(2, 4), batch=batch)


def test_lint_held_scores_fires_by_share_of_step_memory():
    scores = 2 * 32 * 32 * 2
    few = for_a_chip(attentive(), total_bytes=10**9)
    most = for_a_chip(attentive(), total_bytes=10 * scores)
    assert each("held-scores", few, plan_of(Attentive())) == []
    (finding,) = each("held-scores", most, plan_of(Attentive()))
    assert finding.bytes == scores and "The array is 10% of the step's memory" in finding.text


def test_lint_held_scores_fires_by_memory_where_scores_take_no_time():
    flops = Flops((), (), (), scores_bytes={"attention": 6e7}, scores_bytes_per_step={"attention": 1.0})
    find = RULES["held-scores"].find
    (defect,) = find(by_hand(flops=flops, step_seconds=1.0))
    assert defect.bytes == 6e7 and "6% of the step's memory" in defect.text
    assert list(find(by_hand(flops=flops, step_seconds=1.0, total_bytes=10**10))) == []  # guard: 0.6%


def test_lint_held_scores_fires_by_time_where_scores_take_no_memory():
    """A tenth of the bytes that 80% of the bandwidth moves in a second."""
    moved = 0.1 * 0.8 * CHIPS["h100"].hbm_bandwidth / product_rules.SCORES_PASSES
    flops = Flops((), (), (), scores_bytes={"attention": 1.0}, scores_bytes_per_step={"attention": moved})
    find = RULES["held-scores"].find
    (defect,) = find(by_hand(flops=flops, step_seconds=1.0))
    assert "10% of the step." in defect.text
    assert list(find(by_hand(flops=flops, step_seconds=10.0))) == []  # guard: 1%


def test_lint_held_scores_fires_by_share_of_step_time():
    moved = product_rules.SCORES_PASSES * 2 * 32 * 32 * 2
    seconds = moved / (0.8 * CHIPS["h100"].hbm_bandwidth)
    long, short = (
        for_a_chip(attentive(), memory_s=0.0, compute_s=times * seconds, total_bytes=10**9) for times in (25, 5)
    )
    assert each("held-scores", long, plan_of(Attentive())) == []
    (finding,) = each("held-scores", short, plan_of(Attentive()))
    assert "32 KiB of scores, read and written in a step," in finding.text and "20% of the step." in finding.text


class Layers(nn.Module):
    """Two layers of attention, in a loop or in a scan."""

    scanned: bool

    @nn.compact
    def __call__(self, x):
        if self.scanned:
            layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            return layers(name="layers")(x, None)[0]
        for i in range(2):
            x = Layer(name=f"layer_{i}")(x, None)[0]
        return x


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Attentive(name="inner")(x), None


@pytest.mark.parametrize("scanned", [True, False])
def test_lint_held_scores_merges_scores_of_all_layers_into_a_single_finding(scanned):
    step = for_a_chip(attentive(Layers(scanned)), total_bytes=2 * 32 * 32 * 2)
    (finding,) = each("held-scores", step, plan_of(Layers(scanned)))
    assert "64 KiB of scores" in finding.text and finding.bytes == 2 * 32 * 32 * 2
    assert finding.where == ("layers/inner/attention" if scanned else "layer_*/inner/attention")


def test_lint_memory_bound_fires_only_for_hbm_time_above_product_and_wait_time():
    """Seconds of products at 55% of the rate and of bytes at 80% of the bandwidth are compared."""
    bound = for_a_chip(cached(), memory_s=0.08, compute_s=0.0275)
    (finding,) = each("memory-bound", bound, plan_of())
    assert finding.where == "the step" and "bound by memory, not by arithmetic" in finding.text
    assert "which takes 100 ms; the matrix products take 50 ms." in finding.text
    assert finding.bytes == round(0.08 * CHIPS["h100"].hbm_bandwidth) and "chunked_cross_entropy" in finding.cure
    for other in (
        for_a_chip(cached(), memory_s=0.08, compute_s=0.06),  # products take longer
        for_a_chip(cached(), memory_s=0.08, compute_s=0.0275, exposed_s=0.2),  # most of it waits for collectives
        cached(),  # CPU devices
    ):
        assert each("memory-bound", other, plan_of()) == []


@pytest.mark.parametrize(
    "compute_s, step_s, fires",
    [(0.0275, 0.15, True), (0.06, 0.15, False), (0.0275, 0.25, False)],
    ids=["memory", "products", "waits"],
)
def test_lint_memory_bound_compares_times_at_reached_rates(compute_s, step_s, fires):
    """80 ms of bytes at 80% of the bandwidth are 100 ms; 27.5 and 60 ms of products at 55% are 50 and 109 ms."""
    bounds = Roofline(compute_s, 0.08, 0.0, 1.0, 0.08 * CHIPS["h100"].hbm_bandwidth, 0.0)
    step = by_hand(roofline=bounds, step_seconds=step_s, flops=Flops((Work("up", "forward", "bfloat16", 1.0),), (), ()))
    found = list(RULES["memory-bound"].find(step))
    assert len(found) == fires
    assert not fires or "which takes 100 ms; the matrix products take 50 ms." in found[0].text


@pytest.mark.parametrize("direction", ["recompute", "backward"])
@pytest.mark.parametrize("used", [7e8, 8e8], ids=["0.7", "0.8"])
def test_lint_memory_bound_advises_to_recompute_less_below_the_share_of_used_memory(used, direction):
    bounds = Roofline(0.0, 0.08, 0.0, 1.0, 0.08 * CHIPS["h100"].hbm_bandwidth, 0.0)
    flops = Flops((Work("up", direction, "bfloat16", 1.0),), (), ())
    step = by_hand(roofline=bounds, step_seconds=0.1, flops=flops, total_bytes=used, available_bytes=10**9)
    (defect,) = RULES["memory-bound"].find(step)
    assert ("Recompute less" in defect.cure) == (used == 7e8 and direction == "recompute")


def test_lint_memory_bound_advises_less_recomputation_only_where_memory_is_free():
    for used, free in ((10**8, True), (78 * 10**9, False)):
        (finding,) = each("memory-bound", for_a_chip(cached(), memory_s=1.0, total_bytes=used), plan_of())
        assert ("stay free" in finding.text + finding.cure and "Recompute less" in finding.cure) == free, finding.cure
        assert free or "Recompute" not in finding.text + finding.cure


def test_lint_memory_bound_advice_follows_the_source_of_the_bytes():
    def cure_of(forecast, model):
        (finding,) = each("memory-bound", forecast, plan_of(model))
        return finding.text + finding.cure

    wide, narrow = Uniform(jnp.float32), Uniform(jnp.bfloat16)
    assert "100% of the products are float32" in cure_of(for_a_chip(cached(wide), memory_s=1.0), wide)
    assert "float32" not in cure_of(for_a_chip(cached(narrow), memory_s=1.0), narrow)

    few_bytes = 3 * plan_of(narrow).parameters.per_device / CHIPS["h100"].hbm_bandwidth
    of_update = cure_of(for_a_chip(cached(narrow), memory_s=few_bytes, compute_s=0.0), narrow)
    # SGD reads parameters and gradients, and writes parameters: all of these bytes.
    assert "The optimizer's update is 100% of the bytes" in of_update and "more tokens" in of_update
    assert "more tokens" not in cure_of(for_a_chip(cached(narrow), memory_s=1.0), narrow)  # guard

    with_all = for_a_chip(cached(Model(layers=kept)), memory_s=1.0, total_bytes=10**8)
    assert "Recompute" not in cure_of(with_all, None)

    some = 16 * 2 * 32 * 32 * 2 / CHIPS["h100"].hbm_bandwidth
    attention = for_a_chip(attentive(), memory_s=some, compute_s=0.0)
    assert "Attention scores are 50% of the bytes or more" in cure_of(attention, Attentive())


class Decoder(nn.Module):
    """A small GPT, all of one dtype."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            attention = wrap(nn.MultiHeadDotProductAttention, gather_dtype=self.dtype)
            x = x + attention(8, dtype=self.dtype, name=f"attention_{i}")(nn.LayerNorm(dtype=self.dtype)(x))
            h = nn.gelu(wrap(nn.Dense, gather_dtype=self.dtype)(4 * WIDTH, dtype=self.dtype, name=f"up_{i}")(x))
            x = x + wrap(nn.Dense, gather_dtype=self.dtype)(WIDTH, dtype=self.dtype, name=f"down_{i}")(h)
        return x


@pytest.mark.cuda_plugin
def test_lint_of_a_float32_gpt_on_gpus_finds_dtype_scores_and_memory_costs():
    """It had one finding, of 64 MiB, in a step of 550 ms."""
    batch = jax.ShapeDtypeStruct((8 * 4, 512, WIDTH), jnp.float32)
    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": 8})
    model = Decoder(jnp.float32)
    step = compiled(model, mesh, batch=batch, topology="h100:1x8")
    findings = lint(step, plan_sharding(model, {"fsdp": 8}, batch))
    assert {finding.rule for finding in findings} >= {"float32-model", "held-scores", "memory-bound"}
    (bound,) = [finding for finding in findings if finding.rule == "memory-bound"]
    assert "100% of the products are float32" in bound.text and "Attention scores are" in bound.text


@pytest.mark.cuda_plugin
def test_lint_of_large_bfloat16_products_on_gpus_has_no_dtype_scores_or_memory_findings():
    class Large(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = partial(wrap(nn.Dense), use_bias=False, dtype=jnp.bfloat16)
            return dense(4096, name="second")(dense(16384, name="first")(x))

    batch, mesh = jax.ShapeDtypeStruct((8 * 8192, 4096), jnp.bfloat16), {"fsdp": 8}
    step = compiled(Large(), DeviceMeshManager.create_abstract_mesh(mesh), batch=batch, topology="h100:1x8")
    findings = lint(step, plan_sharding(Large(), mesh, batch))
    assert not {"float32-model", "held-scores", "memory-bound"} & {finding.rule for finding in findings}


# -------------------------------------------------------------------------------------- what only a TPU's compiler does


@pytest.fixture(scope="module")
def on_a_square_torus():
    """(forecast, plan) of two wrapped layers, one after the other, over one flat axis of a 4 x 4 torus."""
    pytest.importorskip("libtpu")

    class Unrolled(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = x + wrap(nn.Dense)(2048, use_bias=False, dtype=jnp.bfloat16, name=f"layer_{i}")(x)
            return x

    sizes, batch = {"fsdp": 16}, jax.ShapeDtypeStruct((16 * 64, 2048), jnp.bfloat16)
    mesh = DeviceMeshManager.create_abstract_mesh(sizes)
    step = compiled(Unrolled(), mesh, batch=batch, topology="v5e:4x4")
    return step, plan_sharding(Unrolled(), sizes, batch)


@pytest.mark.libtpu
def test_lint_all_reduce_of_shards_fires_on_a_square_torus_with_a_flat_axis(on_a_square_torus):
    forecast, plan = on_a_square_torus
    (finding,) = [f for f in lint(forecast, plan) if f.rule == "all-reduce-of-shards"]
    assert finding.where == "layer_*" and "axis_name the tuple" in finding.cure
    assert finding.bytes == sum(c.wire_bytes_per_step for c in forecast.collectives if c.stands_for) / 2
    assert finding.bytes >= 2 * 15 / 16 * 2048 * 2048 * 4  # both gradients in float32, half of twice
    assert "pass grad_scatter_dtype=jnp.bfloat16 to shard_module_params" in finding.cure


@pytest.mark.libtpu
def test_lint_exposed_collective_fires_for_waits_on_a_square_torus(on_a_square_torus):
    forecast, plan = on_a_square_torus
    findings = [f for f in lint(forecast, plan) if f.rule == "exposed-collective"]
    waited = {c.name for c in forecast.collectives if c.exposed_s}
    assert findings and waited  # guard: this compiler does wait
    assert sum(f.bytes for f in findings) <= sum(
        c.wire_bytes_per_step for c in forecast.collectives if c.name in waited
    )
    assert not [finding.text for finding in findings if "of the step's traffic." not in finding.text]
    of_gathers = [f for f in findings if "for its all-gather" in f.text]
    assert of_gathers and not any("grad_scatter_dtype" in f.cure for f in of_gathers)


@pytest.mark.parametrize(
    "waits, named",
    [
        ({"a": 0.02, "b": 0.021, "c": 0.015, "d": 0.005}, ["a", "b", "c"]),  # 6.1 % of the step, none of them 5
        ({"a": 0.02, "b": 0.021, "d": 0.005}, []),  # 4.6 %
        ({f"{name}_module": 0.004 for name in "abcdefghijklmn"} | {"o": 0.006}, ["o"]),
        ({"a": 0.0}, []),
    ],
    ids=["several", "too little", "many short ones", "hidden"],
)
def test_lint_exposed_collective_sums_waits_of_several_modules(waits, named):
    gather = next(c for c in cached().collectives if c.kind == "all-gather")
    each_one = {"count": 1, "alone_s": 0.1, "timing": None}
    collectives = [
        dataclasses.replace(gather, leaves=(f"{name}/kernel",), exposed_s=seconds, **each_one)
        for name, seconds in waits.items()
    ]
    known = {"collectives": collectives, "step_seconds": 1.0, "wire_bytes": 1e9, "chip": CHIPS["v5e"]}
    findings = findings_of(
        RULES["exposed-collective"], Step(SimpleNamespace(on_gpus=False, **known), plan_of(), 1, False)
    )
    assert [finding.where for finding in findings] == [f"{name}/kernel" for name in named]
    cure = "'auto' to make_train_step, or compiler_options(device_kind) to a"
    assert not [finding.cure for finding in findings if cure not in finding.cure]


def test_lint_advises_grad_scatter_dtype_for_a_float32_reduce_scatter():
    scatter = next(c for c in cached(Model(layers=kept)).collectives if c.kind == "reduce-scatter")
    narrow = dataclasses.replace(scatter, dtype="bf16")
    assert "pass grad_scatter_dtype=jnp.bfloat16 to shard_module_params" in _narrower([scatter])
    assert (scatter.dtype, _narrower([narrow])) == ("f32", "")


@pytest.mark.libtpu
def test_lint_merges_findings_of_equal_layers_into_a_single_finding(on_a_square_torus):
    (finding,) = [f for f in lint(*on_a_square_torus) if f.rule == "kept-gathered"]
    assert (finding.where, finding.bytes) == ("layer_*/kernel", 2 * 2048 * 2048 * 2)


# --------------------------------------------------------------------------------------------------- what to do with it


def kept_findings() -> tuple[list[Finding], Any]:
    model = Model(layers=kept)
    return lint(cached(model), plan_of(model)), model


def test_lint_of_a_forecast_loaded_from_json_has_the_same_findings():
    findings, model = kept_findings()
    assert lint(Forecast.from_json(cached(model).to_json()), plan_of(model)) == findings != []


def test_raise_if_lists_all_findings():
    findings, _ = kept_findings()
    with pytest.raises(
        LintError, match=r"(?s)1 finding\nkept-gathered: blocks/\w+/kernel, blocks/\w+/kernel: .*or put nn.remat"
    ) as raised:
        lint.raise_if(findings)
    assert raised.value.findings == tuple(findings) and isinstance(raised.value, ValueError)
    assert not [str(finding) for finding in findings if str(finding) not in str(raised.value)]


def test_lint_error_of_another_process_has_the_same_text_findings_and_notes():
    error = LintError([Finding("wide-gather", "head/kernel", "travels as f32.", "Pass gather_dtype.", bytes=2**20)])
    error.add_note("in the step of layer 3")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and str(copy).startswith("1 finding\nwide-gather: head/kernel")
    assert copy.findings == error.findings and copy.__notes__ == ["in the step of layer 3"]


def test_raise_if_considers_only_the_named_rules_and_raises_for_unknown_rules():
    findings, _ = kept_findings()
    raise_if([])
    raise_if(findings, rules=["wide-gather", "repeated-gather"])
    with pytest.raises(LintError, match="kept-gathered"):
        raise_if(findings, rules=["kept-gathered"])
    with pytest.raises(ValueError, match=r"no rule 'kept'; there are repeated-gather, wide-gather"):
        raise_if(findings, rules=["kept"])


def test_lint_table_has_a_row_for_each_finding():
    from rich.console import Console

    findings, _ = kept_findings()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        Console(width=200).print(table(findings))
    assert "1 finding" in out.getvalue()
    assert not [text for text in [*KERNELS, "kept-gathered", "3 MiB"] if text not in out.getvalue()]


def test_lint_raises_for_a_plan_of_another_model():
    with pytest.raises(
        ValueError, match=r"(?s)gathers 'first/kernel'.*has none of these leaves; its parameters are 'bare/bias'"
    ):
        lint(cached(), plan_of(Large()))


def test_leaf_of_one_row_keeps_its_path_and_those_of_several_share_a_pattern():
    rows = [SimpleNamespace(path=f"block_{i}/up/kernel") for i in (3, 4)]
    assert (shared_name(rows[:1]), shared_name(rows)) == ("block_3/up/kernel", "block_*/up/kernel")


# --------------------------------------------------------------------------------------------- rules of split sequences


def traffic_of(seconds, hidden=None, waited=None):
    return SimpleNamespace(
        axes=("tp",), seconds=seconds, hidden_fraction=hidden, waited_s=waited, executions=4, wire_bytes=2**20
    )


def step_of(*collectives, seconds=2.0, roles=None):
    of_axes = {"tp": ("tensor",), "dp": ("batch",)} if roles is None else roles
    forecasted = SimpleNamespace(collectives=collectives)
    return SimpleNamespace(forecast=forecasted, plan=SimpleNamespace(roles=of_axes), seconds=seconds)


def sent(kind="all-reduce", axes=("dp", "tp"), carries=ACTIVATIONS, networks=(split_rules.NETWORK,), **fields):
    timing = None if networks is None else SimpleNamespace(networks=networks)
    return SimpleNamespace(kind=kind, axes=axes, carries=carries, timing=timing, **fields)


def test_lint_split_across_hosts_fires_from_a_twentieth_of_the_step_on(monkeypatch):
    chosen = []

    def traffic(collectives, seconds=0.1):
        chosen.append(list(collectives))
        return [traffic_of(seconds)] if chosen[-1] else []

    monkeypatch.setattr(split_rules, "axis_traffic", traffic)
    crossing = sent()
    others = [
        sent(axes=("dp",)),
        sent(axes=None),
        sent(carries="weights"),
        sent(networks=None),
        sent(networks=("other",)),
    ]
    (defect,) = split_rules.split_across_hosts(step_of(crossing, *others))
    assert chosen == [[crossing]] and defect.bytes == 2**20 and "tp" in defect.where
    assert "4 collectives of activations take 100 ms of a step over the network" in defect.text
    for seconds, count in ((0.0999, 0), (None, 0), (0.11, 1)):
        monkeypatch.setattr(split_rules, "axis_traffic", lambda _, seconds=seconds: [traffic_of(seconds)])
        assert len(list(split_rules.split_across_hosts(step_of(crossing)))) == count, seconds


@pytest.mark.parametrize(
    "hidden, waited, fires",
    [
        (0.89, 0.1, True),
        (0.9, 0.1, False),
        (0.0, 0.1, True),
        (0.5, 0.0999, False),
        (None, 1.0, False),
        (0.5, None, False),
    ],
)
def test_lint_exposed_rings_fires_for_rings_hidden_below_nine_tenths_and_waits(hidden, waited, fires, monkeypatch):
    chosen = []

    def traffic(collectives):
        chosen.extend(collectives)
        return [traffic_of(0.5, hidden, waited)]

    monkeypatch.setattr(split_rules, "axis_traffic", traffic)
    ring = sent("collective-permute")
    found = list(split_rules.exposed_rings(step_of(ring, sent(), sent("collective-permute", carries="weights"))))
    assert chosen == [ring] and len(found) == fires
    assert not found or "4 permutes take 500 ms of a step, which waits 100 ms" in found[0].text


def test_lint_unbalanced_sequences_names_each_module_once_with_the_work_of_the_last_device():
    scope = split_rules.UNBALANCED_SCOPE
    ring = [
        sent(op_name=f"a/{scope}/x", module="a", name="p.1", group_size=4),
        sent(op_name=f"a/{scope}/y", module="a", name="p.2", group_size=2),
        sent(op_name=f"{scope}/z", module="", name="p.3", group_size=2),
        sent(op_name="b/other", module="b", name="p.4", group_size=4),
    ]
    found = list(split_rules.unbalanced_sequences(step_of(*ring)))
    assert [(defect.where, defect.bytes) for defect in found] == [("a", 0), ("p.3", 0)]
    assert "over 4 devices" in found[0].text and "computes 1.75 times the mean" in found[0].text
    assert "over 2 devices" in found[1].text and "computes 1.5 times the mean" in found[1].text
