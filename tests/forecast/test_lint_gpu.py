"""The lint's rules about GPUs: each fires on a step that is compiled for them, and its cure, applied, silences it."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from tests.forecast.kept import KeptTexts, assert_kept_is_compiled
from xlstm_jax.accelerators import compiler_options
from xlstm_jax.distributed import DeviceMeshManager, abstract_train_state, make_train_step, shard_module_params
from xlstm_jax.distributed.device_mesh.batches import abstract_batch
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.forecast import CHIPS, Forecast, forecast
from xlstm_jax.forecast.training.linting.lint import lint

pytestmark = pytest.mark.cuda_plugin
TOPOLOGY = "h100:2x4"
STAGED = (("fsdp_host", 2), ("fsdp_device", 4))


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.gelu(nn.Dense(4 * self.width, use_bias=False, name="up", dtype=jnp.bfloat16)(x))
        return x + nn.Dense(self.width, use_bias=False, name="down", dtype=jnp.bfloat16)(y), None


class Model(nn.Module):
    width: int
    axis_name: tuple
    min_weight_size: int

    @nn.compact
    def __call__(self, x):
        block = shard_module_params(
            Block, self.axis_name, self.min_weight_size, gather_dtype=jnp.bfloat16, grad_scatter_dtype=jnp.bfloat16
        )
        layers = nn.scan(nn.remat(block), variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return layers(self.width, name="blocks")(x, None)[0]


def mean_square(params, apply_fn, batch, rng=None):
    del rng
    return jnp.mean(apply_fn({"params": params}, batch).astype(jnp.float32) ** 2)


@cache
def findings(width, tokens, sizes=STAGED, min_weight_size=2**10, options=()):
    """(findings, forecast) of a step on two hosts of four GPUs; of ``WAITING`` by its kept text."""
    is_kept = (width, tokens, sizes, min_weight_size, options) == (*WAITING.values(), STAGED, 2**10, ())
    kept = KeptTexts("waiting") if is_kept else False
    plan, found = forecast_of(width, tokens, sizes, min_weight_size, options, kept)
    return lint(found, plan), found


def forecast_of(width, tokens, sizes=STAGED, min_weight_size=2**10, options=(), cache=False):
    sizes = dict(sizes)
    model, axes = Model(width, tuple(sizes), min_weight_size), tuple(sizes)
    batch, mesh = jax.ShapeDtypeStruct((8 * tokens, width), jnp.bfloat16), DeviceMeshManager.create_abstract_mesh(sizes)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    state = abstract_train_state(model, optax.sgd(1e-3), mesh, rng, batch, batch_axes=axes, allow_replicated=True)
    step = make_train_step(mean_square, mesh, axes, allow_replicated=True)
    args = (state, abstract_batch(batch, mesh, axes), rng)
    found = forecast(step, *args, topology=TOPOLOGY, compiler_options=dict(options), cache=cache)
    return plan_sharding(model, sizes, batch), found


def of_rule(found, rule):
    return [finding for finding in found[0] if finding.rule == rule]


WAITING = {"width": 1024, "tokens": 8192}
KEPT = {"waiting": lambda cache: forecast_of(**WAITING, cache=cache)[1]}
BYTES = 2 * 1024 * 4096 * 2  # of the two kernels of a layer in bfloat16
PASSES = 3 * 4  # forward, again in backward, and the scatter, of 4 layers


@pytest.mark.slow
def test_stored_texts_of_the_waiting_step_equal_fresh_compiler_output():
    assert_kept_is_compiled("waiting", KEPT)


def test_forecast_nic_and_nvlink_bytes_match_the_stages_of_the_gathers():
    """A gather has two stages: a GPU gets a quarter of the kernels from both hosts, then the quarters of its host.

    By the ring algorithm a GPU sends 1/2 of what the first stage results in, and 3/4 of what the second results in.
    """
    _, found = findings(**WAITING)
    hosts, gpus = (size for _, size in STAGED)
    quarter = BYTES / gpus
    between_hosts, within_host = quarter * (1 - 1 / hosts), BYTES * (1 - 1 / gpus)
    assert found.nic_bytes == pytest.approx(PASSES * between_hosts, rel=1e-6)  # two scalars are averaged, too
    assert found.nvlink_bytes == pytest.approx(PASSES * within_host, rel=1e-6)
    over = {(c.axes, c.timing.networks) for c in found.collectives if c.kind != "all-reduce"}
    assert over == {(("fsdp_host",), ("network",)), (("fsdp_device",), ("NVLink",))}
    assert "Not validated on hardware" in " ".join(found.notes)


def test_forecast_step_time_adds_kernel_seconds_and_exposed_seconds():
    _, found = findings(**WAITING)
    assert found.kernel_seconds >= found.roofline.compute_s > 0
    assert found.flops.total / CHIPS["h100"].peak_flops["bfloat16"] == pytest.approx(found.roofline.compute_s)
    assert found.expected_kernel_seconds > found.kernel_seconds and 0 < found.exposed_bandwidth_seconds
    least = found.kernel_seconds + found.exposed_bandwidth_seconds
    expected = found.expected_kernel_seconds + found.exposed_seconds
    waited = sum(c.count * max(c.timing.latency_s, c.timing.waited_s) for c in found.collectives)
    assert found.step_time == pytest.approx((least, expected, found.expected_kernel_seconds + waited))
    assert found.step_seconds == found.step_time.expected > found.step_time.least
    assert 0 <= found.hidden_fraction <= found.beside_products_fraction <= 1
    assert Forecast.from_json(found.to_json()) == found


@pytest.mark.slow
def test_compiler_options_for_gpus_reduce_exposed_collective_time():
    options = compiler_options(CHIPS["h100"].device_kinds[0], chosen_by="forecast")
    before, after = findings(**WAITING), findings(**WAITING, options=tuple(options.items()))
    waiting = of_rule(before, "exposed-collective")
    assert waiting and not [f.cure for f in waiting if "compiler_options='auto'" not in f.cure]
    assert after[1].exposed_seconds < 0.8 * before[1].exposed_seconds
    assert {f.rule for f in before[0]} == {"exposed-collective"}  # guard: the step is well made otherwise
    for name in options:  # each of them is worth something
        others = tuple((other, value) for other, value in options.items() if other != name)
        assert findings(**WAITING, options=others)[1].exposed_seconds > 1.02 * after[1].exposed_seconds, name


def test_lint_hosts_last_fires_for_mesh_axes_not_named_as_host_axes():
    by_other_names, staged = findings(**WAITING, sizes=(("a", 2), ("b", 4))), findings(**WAITING)
    (last,) = of_rule(by_other_names, "hosts-last")
    assert last.where == "blocks/down/kernel, blocks/up/kernel"
    assert "fsdp_host" in last.cure and not of_rule(staged, "hosts-last")

    # Between two hosts, a device sends half of what it gathers. Gathered within the host of 4 GPUs first, it gathers
    # the full kernels between hosts; the quarter of a GPU would do.
    layers, gathers, scatters, hosts, gpus = 4, 2, 1, 2, 4  # gathered forward and in backward, gradients scattered
    wasted_once = layers * BYTES * (1 - 1 / hosts) * (1 - 1 / gpus)
    assert last.bytes == pytest.approx(gathers * wasted_once, rel=1e-3)  # the rule counts gathers only
    saved = by_other_names[1].nic_bytes - staged[1].nic_bytes
    assert saved == pytest.approx((gathers + scatters) * wasted_once, rel=1e-3)


@pytest.mark.slow
def test_lint_small_collectives_fires_until_min_weight_size_replicates_small_leaves():
    split, whole = findings(64, 128), findings(64, 128, min_weight_size=2**20)
    small = of_rule(split, "small-collectives")
    assert {axis for finding in small for axis in finding.where.split(", ")} == {"fsdp_host", "fsdp_device"}
    assert not [finding.cure for finding in small if "min_weight_size" not in finding.cure]
    assert not of_rule(whole, "small-collectives")
    assert whole[1].exposed_seconds < split[1].exposed_seconds / 5
