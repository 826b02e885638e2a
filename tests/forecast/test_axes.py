"""Axes by their roles: what travels along each, who owns which expert, and what an imbalance of experts would cost."""

import dataclasses
import math
import re
from functools import cache
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from xlstm_jax.distributed import (
    DeviceMeshManager,
    abstract_batch,
    abstract_train_state,
    make_train_step,
    partition_specs,
    plan_sharding,
    shard_modules,
    value_and_grad,
)
from xlstm_jax.distributed.model_parallel import (
    Experts,
    SwiGLU,
    context_attention,
    in_layout,
    join_tokens,
    on_split_input,
    split_tokens,
)
from xlstm_jax.distributed.plan import ShardingPlan
from xlstm_jax.distributed.plan.expert_plan import ExpertPlan
from xlstm_jax.forecast import CHIPS, AxisTraffic, forecast, parse_topology
from xlstm_jax.forecast.compiling.compile import StepCall
from xlstm_jax.forecast.cost.axis_traffic import axis_traffic
from xlstm_jax.forecast.cost.clock import Cycles
from xlstm_jax.forecast.cost.collective_traffic import NO_OVERLAP, Collective
from xlstm_jax.forecast.cost.cycles import count_hbm_bytes
from xlstm_jax.forecast.cost.flops import Flops, Work
from xlstm_jax.forecast.cost.live_values import live_bytes
from xlstm_jax.forecast.hardware.links import Links
from xlstm_jax.forecast.hlo.program import parse
from xlstm_jax.forecast.training import dispatch, fit, lint
from xlstm_jax.forecast.training.linting.expert_rules import uneven_experts
from xlstm_jax.forecast.training.linting.lint import findings_of
from xlstm_jax.forecast.training.linting.rules import RULES
from xlstm_jax.forecast.training.linting.step import Step
from xlstm_jax.forecast.training.model_axes import Estimate, estimate, links_of_mesh, mesh_on, model_meshes, ranked

SIZES = {"fsdp": 2, "ep": 2, "tp": 2}
WIDTH, ROWS, TOKENS, EXPERTS, TOP_K = 16, 8, 4, 4, 2


class Expert(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1], use_bias=False)(nn.gelu(nn.Dense(32, use_bias=False)(x)))


class Model(nn.Module):
    """An MLP over "tp", with a norm on split tokens, and a mixture over "ep"."""

    capacity: float | None = None

    @nn.compact
    def __call__(self, x):
        x = split_tokens(x, 1, "tp")
        x = on_split_input(nn.RMSNorm, "tp")(name="norm")(x)
        x = x + SwiGLU(32, name="mlp", sequence_dim=1)(x)
        options = {"num_experts": EXPERTS, "top_k": TOP_K, "capacity_factor": self.capacity}
        return join_tokens(x + Experts(Expert(), axis="ep", **options, name="mixture")(x), 1, "tp")


def built(capacity=None):
    """(step, arguments): gradients on simulated devices; tokens are split over "tp", too."""
    mesh = DeviceMeshManager.create_device_mesh(SIZES)
    model = shard_modules(Model(capacity), (SwiGLU, Experts), "fsdp", 64)
    x = jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), jnp.float32)
    state = abstract_train_state(model, optax.sgd(0.1), mesh, jax.random.key(0), x, batch_axes=("fsdp", "ep"))
    specs, split = partition_specs(state.params, mesh), P(("fsdp", "ep"))

    def gradients(params, x):
        loss = lambda params: (model.apply({"params": params}, x) ** 2).mean()  # noqa: E731
        return value_and_grad(loss, ("fsdp", "ep"))(params)

    step = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=(specs, split), out_specs=(P(), specs)))
    return step, (state.params, placed(x, mesh, split))


@cache
def planned(capacity=None):
    x = jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), jnp.float32)
    return plan_sharding(shard_modules(Model(capacity), (SwiGLU, Experts), "fsdp", 64), SIZES, x)


@cache
def compiled(capacity=None):
    """(forecast, plan)"""
    step, args = built(capacity)
    return forecast(step, *args, tokens=ROWS * TOKENS), planned(capacity)


# ----------------------------------------------------------------------------------------- what travels along each axis


def test_axis_traffic_splits_wire_bytes_into_weights_and_activations():
    found, _ = compiled()
    traffic = {one.axes: one for one in found.axis_traffic}
    assert traffic["fsdp",].weights > 0 and traffic["fsdp",].activations == 0
    of_router = WIDTH * EXPERTS * 4  # whole parameters are averaged over "ep", an axis of the batch
    assert traffic["ep",].activations > 0 and traffic["ep",].weights < 10 * of_router
    tp = traffic["tp",]  # weights: gradients of the norm and of the mixture, which are whole along it
    assert tp.activations > 0 and tp.weights > 0 and tp.other == 0
    assert sum(one.wire_bytes for one in found.axis_traffic) == found.wire_bytes
    assert "Bytes that a device sends" in str(found)


def test_averages_of_gradients_of_replicated_leaves_count_as_weights():
    one = Collective("a", "all-reduce", None, 1, "f32", 8, 8.0, 2, ("ep",), "jit(f)/shard_map/psum", (), (), "forward",
                     False)  # fmt: skip
    of_gradients = dataclasses.replace(one, op_name="jit(f)/shard_map/sync_gradients/psum")
    of_optimizer = dataclasses.replace(one, op_name="jit(f)/psum")
    gathered = dataclasses.replace(one, leaves=("up/kernel",))
    (found,) = axis_traffic([of_gradients, one, of_optimizer, gathered, gathered])
    assert (found.weights, found.activations, found.other) == (24.0, 8.0, 8.0)


def test_axis_traffic_sums_bytes_and_hidden_fraction_of_collectives_per_axis():
    one = Collective("a", "collective-permute", None, 4, "f32", 8, 8.0, 2, ("cp",), "jit(f)/shard_map/ppermute",
                     (), (), "forward", True, NO_OVERLAP, alone_s=0.5, exposed_s=0.1)  # fmt: skip
    outside = dataclasses.replace(one, op_name="jit(f)/add", axes=("dp",), alone_s=None, exposed_s=None)
    found = {traffic.axes: traffic for traffic in axis_traffic((one, outside))}
    assert found["cp",] == AxisTraffic(("cp",), 4, 0.0, 32.0, 0.0, 2.0, 0.4)
    assert found["cp",].hidden_fraction == pytest.approx(0.8)
    assert found["dp",].other == 32.0 and found["dp",].hidden_fraction is None
    behind_others = dataclasses.replace(one, exposed_s=0.9)  # waits for earlier collectives, too
    assert axis_traffic([behind_others])[0].hidden_fraction == 0.0


def test_axis_traffic_lists_the_largest_first_and_no_time_if_that_of_one_is_unknown():
    one = Collective("a", "collective-permute", None, 1, "f32", 8, 8.0, 2, ("cp",), "jit(f)/shard_map/ppermute",
                     (), (), "forward", True, NO_OVERLAP, alone_s=0.5, exposed_s=0.1)  # fmt: skip
    of_one_device = dataclasses.replace(one, axes=(), wire_bytes=0.0)
    unknown = dataclasses.replace(one, alone_s=None, exposed_s=None)
    large = dataclasses.replace(one, axes=("fsdp",), count=9, alone_s=0.0, exposed_s=0.0)
    found = axis_traffic([one, of_one_device, unknown, large])
    assert [(traffic.axes, traffic.wire_bytes, traffic.executions) for traffic in found] == [
        (("fsdp",), 72.0, 9),
        (("cp",), 16.0, 2),
    ]
    assert [(traffic.seconds, traffic.waited_s) for traffic in found] == [(0.0, 0.0), (None, None)]
    assert [traffic.hidden_fraction for traffic in found] == [None, None]  # of no time there is no fraction


LOOP = """\
HloModule jit_f, is_scheduled=true

%body (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one), backend_config={"estimated_cycles":"70"}
  ROOT %t = (s32[]) tuple(%next)
}

%cond (q: (s32[])) -> pred[] {
  %q = (s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%j, %n), direction=LT
}

ENTRY %main (a: s32[]) -> (s32[]) {
  %zero = s32[] constant(0)
  %init = (s32[]) tuple(%zero)
  ROOT %loop = (s32[]) while(%init), condition=%cond, body=%body
}
"""


def test_cycles_of_a_loop_beside_a_collective_include_all_trips():
    program = parse(LOOP)
    loop = program.entry.by_name["loop"]
    assert Cycles(program).duration_of(program.entry, loop).total == 5 * 70
    assert loop.estimated_cycles is None  # guard: the compiler has none for the loop itself


BRANCHES = """\
HloModule jit_f, is_scheduled=true

%short (p: f32[1024]) -> f32[1024] {
  %p = f32[1024] parameter(0)
  ROOT %one = f32[1024] negate(%p), backend_config={"estimated_cycles":"30"}
}

%long (q: f32[1024]) -> f32[1024] {
  %q = f32[1024] parameter(0)
  ROOT %other = f32[1024] negate(%q), backend_config={"estimated_cycles":"100"}
}

ENTRY %main (w: pred[], a: f32[1024]) -> f32[1024] {
  %w = pred[] parameter(0)
  %a = f32[1024] parameter(1)
  ROOT %if = f32[1024] conditional(%w, %a, %a), true_computation=%short, false_computation=%long
}
"""


def test_conditional_counts_cycles_of_the_longest_branch_and_bytes_of_all_branches():
    program = parse(BRANCHES)
    assert Cycles(program).total == 100
    assert count_hbm_bytes(program).total == 2 * 2 * 1024 * 4  # both branches read and write their array


# -------------------------------------------------------------------------------------------- roles, and who owns what


def test_plan_sharding_reports_axis_roles_and_expert_owners():
    plan = planned()
    assert plan.roles == {"fsdp": ("fsdp",), "ep": ("experts",), "tp": ("tensor",)}
    (mixture,) = plan.experts
    assert (mixture.path, mixture.axes, mixture.devices, mixture.layers) == ("mixture", ("ep",), 2, 1)
    assert [list(mixture.experts_of(device)) for device in range(2)] == [[0, 1], [2, 3]]
    assert [mixture.owner(expert) for expert in range(EXPERTS)] == [0, 0, 1, 1]
    assert mixture.expert_size == 2 * WIDTH * 32 and mixture.expert_bytes == 4 * mixture.expert_size
    assert "2 on each of 2 devices along 'ep'" in str(plan)
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_plan_sharding_counts_scanned_experts_per_layer():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            return x + Experts(Expert(), EXPERTS, TOP_K, name="mixture")(x), None

    layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=EXPERTS)
    plan = plan_sharding(layers(), {"fsdp": 2, "ep": 4}, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32))
    (mixture,) = plan.experts
    assert (mixture.layers, mixture.per_device, mixture.expert_size) == (EXPERTS, 1, 2 * WIDTH * 32)


# ------------------------------------------------------------------------------------------ dispatch, and its imbalance


def test_dispatch_wire_bytes_equal_the_sum_of_all_to_alls():
    found, plan = compiled()
    (sent,) = dispatch(found, plan, imbalance=1.5)
    of_kind = [one for one in found.collectives if one.kind == "all-to-all"]
    assert sent.wire_bytes == sum(one.wire_bytes_per_step for one in of_kind) > 0
    # Each device may have to send all k = 2 choices to the one other device, which has 2 of 4 experts.
    assert sent.experts.padding == 2 and sent.ideal_bytes == sent.wire_bytes / 2
    assert sent.expert_s is None and sent.dropped_fraction == 0  # CPUs have no rate
    with pytest.raises(ValueError, match=r"imbalance=0\.9: the busiest device has as many rows as the mean at least"):
        dispatch(found, plan, 0.9)


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.parametrize("topology, least, most", [("v5p:2x2x2", 1, 1.1), ("v5e:2x4", 3, 4.1)])
def test_dispatch_without_capacity_is_ragged_on_v5p_and_padded_on_v5e(topology, least, most):
    """The ideal: of each device's choices 7 in 8 go to another one and back, and gradients of results there."""
    mesh = DeviceMeshManager.create_abstract_mesh({"ep": 8})
    model, x = Experts(Expert(), 8, TOP_K, name="mixture"), jax.ShapeDtypeStruct((8 * 256, 128), jnp.float32)
    state = abstract_train_state(model, optax.sgd(0.1), mesh, jax.random.key(0), x, batch_axes="ep")
    step = make_train_step(lambda p, apply, x, rng: jnp.mean(apply({"params": p}, x) ** 2), mesh, "ep")
    batch, rng = abstract_batch(x, mesh, "ep"), jax.eval_shape(lambda: jax.random.key(0))
    found = forecast(step, state, batch, rng, topology=topology, cache=False)
    (sent,) = dispatch(found, plan_sharding(model, {"ep": 8}, x))
    ideal = 3 * (256 * TOP_K) * 128 * 4 * 7 / 8
    # Padded, 4 x; the compiler of v5e sends one of the three in bfloat16.
    assert least * ideal <= sent.wire_bytes <= most * ideal
    assert sent.is_ragged == (least == 1) and sent.padding == (1 if sent.is_ragged else 4)


def test_dispatch_imbalance_costs_time_without_capacity_and_drops_tokens_with_capacity():
    (found, plan), capped = compiled(), planned(1.25)
    found = dataclasses.replace(found, topology="h100:1x8", axis_sizes=SIZES)
    (sent,) = dispatch(found, plan, imbalance=1.5)
    rows = ROWS * TOKENS * TOP_K * 2 / 8  # devices along "tp" share tokens, or compute the same
    flops = rows * 8 * sent.experts.expert_size
    reached = found.chip.reached.peak_flops["float32"]
    assert sent.imbalance_s == pytest.approx(0.5 * flops / reached)
    (sent,) = dispatch(found, capped, imbalance=2.5)
    assert sent.imbalance_s == 0 and sent.dropped_fraction == pytest.approx(0.5)
    assert sent.experts.padding == 1.25 and "drops 50%" in str(sent)


# ------------------------------------------------------------------------------------------------------------ the lint


def found_by(rule, step):
    return [finding.where for finding in findings_of(RULES[rule], step)]


def test_lint_uneven_experts_fires_for_padding_dropped_choices_and_waiting():
    (found, plan), (bounded, capped) = compiled(), compiled(1.25)
    rule = "uneven-experts"
    found, bounded = (  # in so small a step all else is most of the traffic
        dataclasses.replace(one, collectives=tuple(c for c in one.collectives if c.kind == "all-to-all"))
        for one in (found, bounded)
    )
    assert found_by(rule, Step(found, plan, 1, False)) == ["mixture"]
    assert found_by(rule, Step(bounded, capped, 1, False)) == []
    (finding,) = findings_of(RULES[rule], Step(bounded, capped, 1, False, imbalance=2.5))
    assert "drops 50% of the choices of its busiest device" in finding.text
    assert [one.rule for one in lint(found, plan)].count(rule) == 1
    slow = dataclasses.replace(found, topology="h100:1x8", tokens=2**40)
    texts = [one.text for one in findings_of(RULES[rule], Step(slow, plan, 1, False, imbalance=2.0))]
    assert any("waits for its busiest device" in text for text in texts)


def test_experts_are_uneven_by_padding_by_waiting_and_by_dropped_choices_above_their_thresholds():
    """An exchange of 100 bytes for 8 experts on 8 devices, of which a token chooses 2: there is room for all 8."""
    sent = Collective("a", "all-to-all", None, 3, "f32", 8, 100.0, 8, ("ep",), "jit(f)/shard_map/all_to_all",
                      ("moe/up",), (), "forward", True, NO_OVERLAP)  # fmt: skip
    elsewhere = dataclasses.replace(sent, modules=("other",)), dataclasses.replace(sent, kind="all-gather")
    tokens, size = 2**20, 10**6
    products_s = tokens * 2 / 8 * 8 * size / CHIPS["h100"].reached.peak_flops["bfloat16"]

    def step_of(imbalance, capacity=None, seconds=4 * products_s, chip=CHIPS["h100"]):
        experts = ExpertPlan(
            "moe", 8, 2, capacity, ("ep",), devices=8, layers=1, expert_bytes=4 * size, expert_size=size
        )
        plan = SimpleNamespace(experts=(experts,), axis_sizes={"ep": 8}, roles={"ep": ("experts",)})
        flops = Flops((Work("moe", "forward", "bfloat16", 1.0),), (), ())
        of_step = {"collectives": (sent, *elsewhere), "wire_bytes": 900.0, "flops": flops}
        found = SimpleNamespace(**of_step, chip=chip, tokens=tokens, devices=8)
        return SimpleNamespace(forecast=found, plan=plan, imbalance=imbalance, seconds=seconds)

    def texts(*args, **options):
        return [
            re.search(r"sends 300 B|waits|drops \d+%", defect.text)[0]
            for defect in uneven_experts(step_of(*args, **options))
        ]

    even = step_of(1.0)
    (exchange,) = dispatch(even.forecast, even.plan, 1.5)
    assert exchange.wire_bytes == 300 and exchange.ideal_bytes == 75
    assert exchange.imbalance_s == pytest.approx(0.5 * products_s) and exchange.dropped_fraction == 0
    assert texts(1.0) == ["sends 300 B"] and texts(1.5) == ["sends 300 B", "waits"]
    assert texts(1.5, seconds=20 * products_s) == texts(1.5, chip=None) == ["sends 300 B"]
    assert texts(1.25, 1.25) == texts(1.3, 1.25) == [] and texts(2.5, 1.25) == ["drops 50%"]


def placed(tree, mesh, spec):
    sharding = jax.NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


@cache
def attention(layout, **options):
    mesh = DeviceMeshManager.create_device_mesh({"cp": 4}, devices=jax.devices()[:4])

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)[:, :, None]
            return context_attention(x, x, x, "cp", impl="ring", **options)

    model, x = Attention(), jax.ShapeDtypeStruct((2, 16, 8), jnp.float32)
    params, split = jax.eval_shape(model.init, jax.random.key(0), x), P(None, "cp")

    def gradient(params, x):
        with in_layout(x, layout) as x:
            return jax.grad(lambda params: model.apply(params, x).sum())(params)

    step = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(P(), split), out_specs=P(), check_vma=False))
    args = [placed(params, mesh, P()), placed(x, mesh, split)]
    return Step(forecast(step, *args), plan_sharding(model, {"cp": 4}, x), 1, False)


def test_lint_unbalanced_sequence_fires_for_causal_attention_in_contiguous_layout():
    (finding,) = findings_of(RULES["unbalanced-sequence"], attention("contiguous"))
    assert "over 4 devices" in finding.text and "1.75 times the mean" in finding.text
    assert "layout='zigzag'" in finding.cure and "unbalanced_ring" not in finding.where
    assert found_by("unbalanced-sequence", attention("zigzag")) == []
    assert found_by("unbalanced-sequence", attention("contiguous", causal=False)) == []


# ------------------------------------------------------------------------------- meshes, and what a step costs on each


def test_estimate_matches_wire_seconds_and_argument_bytes_of_the_compiled_step():
    """Of the axes that nothing but activations use; the compiler merges and drops small collectives of gradients."""
    found, _ = compiled()
    step, args = built()
    links = Links(CHIPS["h100"], SIZES)
    guess = estimate(StepCall(step, args), links)
    for one in found.axis_traffic:
        if one.axes in (("tp",), ("ep",)):
            assert guess.wire_s[one.axes] == pytest.approx(links.seconds(one.axes, one.wire_bytes), rel=0.35)
    assert guess.argument_bytes == found.memory.argument_bytes
    assert guess.seconds == guess.compute_s + sum(guess.wire_s.values())


def test_estimate_adds_the_collectives_of_each_trip_of_a_loop():
    def sums(x):
        once = jax.lax.psum(x, "ep")
        return jax.lax.scan(lambda x, _: (jax.lax.psum(x, "ep"), None), once, None, length=3)[0]

    mesh, links = DeviceMeshManager.create_abstract_mesh({"ep": 8}), Links(CHIPS["h100"], {"ep": 8})
    step = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))
    wire = estimate(StepCall(step, [jax.ShapeDtypeStruct((8 * 128, 32), jnp.float32)]), links).wire_s
    assert wire["ep",] == pytest.approx(4 * links.seconds(("ep",), 2 * 128 * 32 * 4 * 7 / 8))


def test_estimate_counts_ragged_all_to_all_rows_without_padding_in_both_directions():
    """128 rows go into places for 1,024, and come back out of them."""

    def send(operand, out, *places):
        return jax.lax.ragged_all_to_all(operand, out, *places, axis_name="ep")

    def there_and_back(rows, where):
        return send(send(rows, jnp.zeros((1024, 32)), *[where] * 4), jnp.zeros_like(rows), *[where] * 4)

    mesh = DeviceMeshManager.create_abstract_mesh({"ep": 8})
    step = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((8 * 128, 32), jnp.float32), ((64,), jnp.int32))]
    links = Links(CHIPS["h100"], {"ep": 8})
    sent = 128 * 32 * 4 * 7 / 8
    wire = estimate(StepCall(step, args), links).wire_s
    assert wire["ep",] == pytest.approx(2 * links.seconds(("ep",), sent))


def test_mesh_on_places_model_axes_on_torus_dims_or_within_a_host():
    def laid(topology, **sizes):
        return mesh_on(parse_topology(topology), sizes)

    assert laid("v5p:4x4x8", tp=8) == {"fsdp_x": 4, "fsdp_y": 4, "tp": 8}
    assert laid("v5p:4x4x8", tp=4, cp=8) == {"fsdp_x": 4, "tp": 4, "cp": 8}
    assert laid("v6e:16x16", tp=4) == {"fsdp_x": 16, "fsdp_y": 4, "tp": 4}
    assert laid("h100:4x8", tp=8, cp=2) == {"fsdp_host": 2, "cp": 2, "tp": 8}
    assert laid("h100:4x8", tp=16) is None
    assert laid("h100:4x8", dp=4, tp=8) == {"dp": 4, "fsdp_device": 1, "tp": 8}
    meshes = model_meshes(parse_topology("h100:4x8"), {"tp": 8, "cp": 4})
    assert meshes and not [mesh for mesh in meshes if math.prod(mesh.values()) != 32]
    with pytest.raises(ValueError, match="'fsdp' must not begin with 'fsdp'"):
        model_meshes(parse_topology("h100:4x8"), {"fsdp": 2})


@pytest.mark.parametrize(
    "topology, mesh, per_second",
    [
        ("v5e:8x8", {"dp": 2, "fsdp_x": 4, "fsdp_y": 8}, 45e9),
        ("v5e:16x16", {"fsdp_x": 8, "dp": 2, "fsdp_y": 16}, 45e9),
        ("v6e:16x16", {"fsdp_x": 8, "dp": 2, "fsdp_y": 16}, 90e9),
        ("v5p:8x8x8", {"fsdp_x": 4, "dp": 2, "fsdp_y": 8, "fsdp_z": 8}, 90e9),
        ("h100:4x8", {"dp": 2, "fsdp_host": 2, "fsdp_device": 8}, None),
    ],
)
def test_model_meshes_with_dp_leave_the_fastest_links_to_fsdp(topology, mesh, per_second):
    """Around FSDP's axis on a line; within it on a closed ring, of which it would be half otherwise."""
    place = parse_topology(topology)
    (found,) = [mesh for mesh in model_meshes(place, {"dp": 2}) if "dp" in mesh and mesh["dp"] == 2]
    assert list(found.items()) == list(mesh.items())
    if per_second:
        assert 1e9 / links_of_mesh(place, found).seconds(("fsdp_x",), 1e9) == pytest.approx(per_second)


def test_live_bytes_counts_each_value_from_creation_to_last_use():
    """Of a chain of products two results at a time; beside a loop's result a product within it, and its tanh."""
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))

    def live(function):
        return live_bytes(jax.make_jaxpr(function)(x, w).jaxpr) / x.nbytes

    def looped(x, w):
        return jnp.sin(jax.lax.scan(lambda x, _: (jnp.tanh(x @ w) @ w, None), x, None, length=3)[0])

    assert live(lambda x, w: jnp.sin(x @ w @ w @ w @ w)) == 2
    assert live(lambda x, w: jnp.sin(x) + jnp.cos(x)) == 0
    assert live(looped) == 3
    assert live(lambda x, w: ((first := x @ w) @ w @ w + first).sum()) == 3


def test_live_bytes_of_a_branch_are_those_of_the_branch_with_the_most():
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    chains = [lambda x: (x @ w).sum(), lambda x: (x @ w @ w @ w).sum()]
    program = jax.make_jaxpr(lambda i, x: jax.lax.switch(i, chains, x))(0, x)
    assert live_bytes(program.jaxpr) // x.nbytes == 2  # and a few bytes of the index


def test_ranked_puts_meshes_within_the_memory_budget_first():
    def guess(size, seconds):
        return Estimate(size, 0, seconds, {})

    found = [({"tp": 1}, guess(90, 1.0)), ({"tp": 2}, guess(40, 3.0)), ({"tp": 4}, guess(20, 2.0)), ({"tp": 8}, "no")]
    order = ranked(found, budget=50, count=2)
    assert [one.mesh["tp"] for one in order] == [4, 2, 1, 8]
    assert [one.compiled for one in order] == [True, True, False, False]
    assert "would not fit" in order[2].reason and order[3].reason == "no"


# --------------------------------------------------------------------------------------------------- compiled for GPUs


class MLP(nn.Module):
    """Its features are split over "tp", its products in rings."""

    width: int

    @nn.compact
    def __call__(self, x):
        how = {"dtype": jnp.bfloat16, "sequence_dim": 1, "ring": True}
        for i in range(2):
            x = x + SwiGLU(2 * self.width, name=f"mlp_{i}", **how)(x)
        return x


def mlp_step(sizes, rows_axis, width, tokens, rows):
    """(model, batch, step, arguments) of gradients on a mesh without devices."""
    mesh = DeviceMeshManager.create_abstract_mesh(sizes)
    model, x = MLP(width), jax.ShapeDtypeStruct((rows, tokens, width), jnp.bfloat16)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    state = abstract_train_state(model, optax.sgd(0.1), mesh, rng, x, batch_axes=rows_axis, allow_replicated=True)
    specs, split = partition_specs(state.params, mesh), P(rows_axis, "tp")

    def gradient(params, x):
        return jax.grad(lambda params: model.apply({"params": params}, x).astype(jnp.float32).sum())(params)

    step = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(specs, split), out_specs=specs, check_vma=False))
    return model, x, step, (state.params, placed(x, mesh, split))


@cache
def on_gpus(sizes, width, tokens):
    """Two hosts of four GPUs."""
    sizes = dict(sizes)
    model, x, step, args = mlp_step(sizes, "dp", width, tokens, sizes["dp"])
    plan = plan_sharding(model, sizes, x, axis_name="dp")
    return Step(forecast(step, *args, topology="h100:2x4"), plan, 1, False)


@pytest.mark.slow
@pytest.mark.cuda_plugin
def test_fit_with_model_axes_chooses_the_fastest_mesh_and_explains_the_choice():
    def build(options):
        rows_axis = next(axis for axis in options.mesh if axis.startswith("fsdp"))
        return mlp_step(options.mesh, rows_axis, 512, 1024, 8)[2:]

    found = fit(build, "h100:1x8", model_axes={"tp": 4}, jobs=1)
    assert {one.mesh["tp"] for one in found.considered} == {1, 2, 4}
    assert found.best.options.mesh in [dict(one.mesh) for one in found.considered if one.compiled]
    assert "is the fastest of these that fits" in found.why_mesh and found.why_mesh.startswith(
        "Of 3 meshes 0 would not"
    )
    with pytest.raises(ValueError, match="meshes and model_axes both say"):
        fit(build, "h100:1x8", meshes=[{"fsdp": 8}], model_axes={"tp": 4})


WITHIN, ACROSS = (("dp", 2), ("tp", 4)), (("tp", 4), ("dp", 2))


@pytest.mark.cuda_plugin
def test_lint_split_across_hosts_fires_only_for_a_model_axis_across_hosts():
    (finding,) = findings_of(RULES["split-across-hosts"], on_gpus(ACROSS, 1024, 8192))
    assert finding.where == "'tp'" and "over the network" in finding.text and finding.bytes > 0
    assert found_by("split-across-hosts", on_gpus(WITHIN, 1024, 8192)) == []


@pytest.mark.cuda_plugin
def test_lint_exposed_ring_fires_across_hosts_and_not_within_a_host():
    """Over the network a piece travels longer than a small product takes; a large product hides it within a host."""
    (finding,) = findings_of(RULES["exposed-ring"], on_gpus(ACROSS, 1024, 8192))
    assert finding.where == "'tp'" and "permutes take" in finding.text
    (traffic,) = [one for one in on_gpus(WITHIN, 8192, 32768).forecast.axis_traffic if one.axes == ("tp",)]
    assert traffic.hidden_fraction > 0.8
    assert found_by("exposed-ring", on_gpus(WITHIN, 8192, 32768)) == []
