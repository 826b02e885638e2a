"""Attention of cuDNN and kernels of Pallas: compiled for devices that are not there, and their work counted."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.forecast import CHIPS, forecast
from xlstm_jax.forecast.compiling.compile import compile_for_topology
from xlstm_jax.forecast.cost.clock import Cycles, Kernels
from xlstm_jax.forecast.cost.cycles import count_hbm_bytes
from xlstm_jax.forecast.cost.flops import count_flops
from xlstm_jax.forecast.cost.products import executed_flops, pallas_seconds, product_flops, unknown_calls
from xlstm_jax.forecast.hardware.cudnn import traced_for_chip
from xlstm_jax.forecast.hlo.program import parse

B, T, S, N, D = 4, 512, 256, 8, 64
H100 = CHIPS["h100"]


def attend(q, k, v, implementation="cudnn", **options):
    out = jax.nn.dot_product_attention(q, k, v, implementation=implementation, **options)
    return jnp.sum(out.astype(jnp.float32))


def arrays(mesh=None, features=D, heads=N):
    """Queries, keys and values of attention, split over the mesh."""
    place = NamedSharding(mesh, P("fsdp")) if mesh is not None else None
    shapes = [(B, T, N, features), (B, S, heads, features), (B, S, heads, features)]
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]


def flops_of(function, *args):
    with traced_for_chip(H100):
        return count_flops(jax.jit(function).trace(*args).jaxpr).total


@pytest.mark.parametrize("heads", [N, 2])
@pytest.mark.parametrize(
    "options, part",
    [({}, 1), ({"is_causal": True}, 1 / 2), ({"is_causal": True, "local_window_size": (31, 0)}, 32 / S)],
    ids=["full", "causal", "window"],
)
def test_count_flops_of_cudnn_attention_equals_the_equivalent_matrix_products(options, part, heads):
    args = arrays(heads=heads)
    plain = flops_of(partial(attend, implementation="xla"), *args)
    assert plain == 4 * B * N * T * S * D
    run = partial(attend, **options)
    assert flops_of(run, *args) == part * plain
    assert flops_of(jax.grad(run, (0, 1, 2)), *args) == (1 + 2.5) * part * plain


def test_traced_for_chip_checks_cudnn_attention_for_the_given_chip_within_the_context():
    run = jax.jit(partial(attend, scale=1.0))
    with traced_for_chip(CHIPS["a100"]), pytest.raises(NotImplementedError, match="head dim must be <= 128"):
        run.trace(*arrays(features=256))
    with traced_for_chip(H100):
        run.trace(*arrays(features=256))
    with pytest.raises(RuntimeError, match="cuDNN"):  # as before: nothing is left behind
        run.trace(*arrays(features=128))
    with traced_for_chip(CHIPS["v5e"]), pytest.raises(RuntimeError, match="cuDNN"):
        run.trace(*arrays(features=192))


def in_shard_map(loss, mesh):
    """A step that takes the gradient of attention on each device's rows."""
    gradients = jax.grad(loss, (0, 1, 2))
    return jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False))


@pytest.mark.cuda_plugin
def test_cudnn_attention_compiles_without_a_gpu_and_kernel_flops_match_the_formula():
    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": 2})
    step, args = in_shard_map(partial(attend, is_causal=True), mesh), arrays(mesh)
    compiled = compile_for_topology(step, *args, topology="h100:1x2")
    program, want = parse(compiled.hlo), 3.5 * 4 * (B // 2) * N * T * S * D / 2
    assert executed_flops(program, lambda _: True) == want
    kernels = Kernels(program, H100)
    calls = [i for i in program.entry.instructions if "__cudnn$fmha" in i.attributes]
    products = [kernels.duration_of(program.entry, call).products for call in calls]
    assert len(calls) == 2 and sum(products) >= want / H100.peak_flops["bfloat16"]
    found = forecast(step, *args, topology="h100:1x2")
    assert found.flops.total == want and not any("counted as nothing" in note for note in found.notes)


@pytest.mark.cuda_plugin
def test_forecast_raises_for_cudnn_attention_outside_shard_map():
    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": 2})
    with pytest.raises(ValueError, match="cuDNN's attention outside of shard_map"):
        forecast(jax.jit(attend), *arrays(mesh), topology="h100:1x2")


@pytest.mark.libtpu
def test_pallas_kernels_on_tpus_take_at_least_the_roofline_time():
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": 4})
    shape = (4, 2, 256, 128)

    def splash(q, k, v):
        masks = [splash_attention_mask.CausalMask((256, 256))] * 2
        mask = splash_attention_mask.MultiHeadMask(masks)
        kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
        return jnp.sum(jax.vmap(kernel)(q, k, v).astype(jnp.float32))

    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    step = in_shard_map(splash, mesh)
    program = parse(compile_for_topology(step, x, x, x, topology="v5e:2x2").hlo)
    # What a kernel says of itself has line breaks, and one of its lines begins as the end of a computation does.
    calls = [i for i in program.entry.instructions if "tpu_custom_call" in i.attributes]
    assert len(calls) == 3 and program.entry.instructions[-1].is_root
    assert [call.estimated_cycles for call in calls] == [None] * 3
    found = forecast(step, x, x, x, topology="v5e:2x2")
    in_kernels = sum(found.flops.in_kernels.values())
    assert in_kernels >= 3.5 * 4 * 2 * 256**2 * 128 / 2  # both passes of a causal mask, and what is not skipped
    assert found.pallas_seconds >= in_kernels / CHIPS["v5e"].peak_flops["bfloat16"]
    assert found.cycle_seconds == Cycles(program).total / CHIPS["v5e"].clock_hz + found.pallas_seconds


def product_of(dtype, topology, **kinds):
    """The forecast of 4096 x 4096 x 4096 multiply-adds on each device."""
    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": 4})
    rows, whole = (NamedSharding(mesh, spec) for spec in (P("fsdp"), P()))
    x = jax.ShapeDtypeStruct((4 * 4096, 4096), dtype, sharding=rows)
    w = jax.ShapeDtypeStruct((4096, 4096), dtype, sharding=whole)
    product = partial(jax.lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), **kinds)
    placed = {"mesh": mesh, "in_specs": (P("fsdp"), P()), "out_specs": P("fsdp")}
    return forecast(jax.jit(jax.shard_map(product, **placed)), x, w, topology=topology)


@pytest.mark.slow
@pytest.mark.libtpu
def test_libtpu_cycles_of_int8_and_float8_products_match_v5e_peak_rates():
    wide = product_of("bfloat16", "v5e:2x2")
    int8 = product_of("int8", "v5e:2x2", preferred_element_type=jnp.int32)
    float8 = product_of("float8_e4m3fn", "v5e:2x2", preferred_element_type=jnp.bfloat16)
    assert int8.roofline.compute_s == wide.roofline.compute_s / 2 and int8.cycles == pytest.approx(wide.cycles / 2, 0.1)
    assert float8.roofline.compute_s == wide.roofline.compute_s and float8.cycles == pytest.approx(wide.cycles, 0.1)


@pytest.mark.slow
@pytest.mark.cuda_plugin
@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
def test_h100_runs_flax_direct_fp8_products_in_float8_and_others_in_bfloat16():
    """Of the others XLA drops the rounding to fp8, so their program has no array of eight bits."""
    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": 2})
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))

    def compiled(kind):
        layer = nn.Dense(1024, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=kind)
        shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
        whole = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P())), shapes
        )
        loss = jax.grad(lambda v, x: jnp.sum(layer.apply(v, x).astype(jnp.float32) ** 2), allow_int=True)
        placed = {"mesh": mesh, "in_specs": (P(), P("fsdp")), "out_specs": P(), "check_vma": False}
        step = jax.jit(jax.shard_map(loss, **placed))
        return parse(compile_for_topology(step, whole, x, topology="h100:1x2").hlo)

    def rate(program):
        """The FLOP per second of a step, were memory infinitely fast."""
        kernels = Kernels(program, dataclasses.replace(H100, hbm_bandwidth=1e30))
        return executed_flops(program, lambda _: True) / kernels.total

    assert rate(compiled(nn.Fp8DirectDotGeneralOp)) == pytest.approx(H100.peak_flops["float8"])
    assert rate(compiled(nn.Fp8DotGeneralOp)) == pytest.approx(H100.peak_flops["bfloat16"])


UNKNOWN = """\
HloModule jit_step, is_scheduled=true, num_partitions=2

ENTRY %main.1 (x.1: f32[64,64]) -> f32[64,64] {
  %x.1 = f32[64,64]{1,0} parameter(0)
  %mine.1 = f32[64,64]{1,0} custom-call(%x.1), custom_call_target="my_kernel", metadata={op_name="jit(step)/ffi_call"}
  %sort.1 = f32[64,64]{1,0} custom-call(%mine.1), custom_call_target="__cub$DeviceRadixSort"
  ROOT %add.1 = f32[64,64]{1,0} add(%sort.1, %x.1)
}
"""


def test_unknown_calls_names_an_unrecognised_custom_call_with_the_share_of_bytes():
    program = parse(UNKNOWN)
    (note,) = unknown_calls(program, count_hbm_bytes(program))
    assert note.startswith("Custom call 'my_kernel', 1 in a step: its work is unknown and counts as zero")
    assert "29% of the bytes" in note  # 2 of 2 + 2 + 3 arrays


IN_A_LOOP = """HloModule f, is_scheduled=true

%body (c: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %c = (s32[], f32[1000]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[1000] get-tuple-element(%c), index=1
  %y = f32[1000] custom-call(%x), custom_call_target="TARGET"
  ROOT %t = (s32[], f32[1000]) tuple(%i, %y)
}

%condition (c.1: (s32[], f32[1000])) -> pred[] {
  %c.1 = (s32[], f32[1000]) parameter(0)
  ROOT %always = pred[] constant(true)
}

ENTRY %main (a: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %a = (s32[], f32[1000]) parameter(0)
  ROOT %w = (s32[], f32[1000]) while(%a), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
}
"""


def test_unknown_calls_counts_a_custom_call_in_a_loop_with_each_trip():
    program = parse(IN_A_LOOP.replace("TARGET", "my_kernel"))
    (note,) = unknown_calls(program, count_hbm_bytes(program))
    assert note.startswith("Custom call 'my_kernel', 6 in a step")
    assert "moves 100% of the bytes" in note


def test_pallas_seconds_are_the_larger_of_the_products_and_the_bytes_of_kernels_without_cycles():
    """In six trips a kernel reads and writes 1000 floats."""
    chip = CHIPS["v5e"]
    program = parse(IN_A_LOOP.replace("TARGET", "tpu_custom_call"))
    moving = 6 * 2 * 4000 / chip.hbm_bandwidth
    few, many = (SimpleNamespace(in_kernels={"bfloat16": n * moving * chip.peak_flops["bfloat16"]}) for n in (0.5, 3))
    assert pallas_seconds(program, few, chip) == pytest.approx(moving)
    assert pallas_seconds(program, many, chip) == pytest.approx(3 * moving)
    known = IN_A_LOOP.replace('"TARGET"', '"tpu_custom_call", backend_config={"estimated_cycles":"7"}')
    assert pallas_seconds(parse(known), many, chip) is None  # XLA's own


ATTENTION = """HloModule f, is_scheduled=true

ENTRY %main (q: bf16[2,3,5,64], k: bf16[2,3,7,64], v: bf16[2,3,7,32]) -> bf16[2,3,5,32] {
  %q = bf16[2,3,5,64] parameter(0)
  %k = bf16[2,3,7,64] parameter(1)
  %v = bf16[2,3,7,32] parameter(2)
  ROOT %o = bf16[2,3,5,32] custom-call(%q, %k, %v), custom_call_target="__cudnn$fmhaSoftmax", backend_config={\
"cudnn_fmha_backend_config":{SCORES"mask_type":"NO_MASK","sliding_window_length":0}}
}
"""
SCORES = '"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","3","5","7"]},'


@pytest.mark.parametrize(
    "changes, flops",
    [
        ({}, 2 * (2 * 3) * (5 * 7) * (64 + 32)),
        ({"NO_MASK": "CAUSAL"}, (2 * 3) * (5 * 7) * (64 + 32)),
        ({'length":0': 'length":2'}, 2 * (2 * 3) * (5 * 2) * (64 + 32)),
        ({"fmhaSoftmax": "fmhaSoftmaxBackward"}, 5 * (2 * 3) * (5 * 7) * (64 + 32)),
        ({SCORES: "", "fmhaSoftmax": "fmhaSoftmaxF8"}, 0),  # fp8 has another format
    ],
    ids=["full", "causal", "window", "backward", "fp8"],
)
def test_flops_of_a_call_of_cudnn_attention_follow_scores_mask_window_and_direction(changes, flops):
    text = ATTENTION.replace("SCORES", SCORES)
    for before, after in changes.items():
        text = text.replace(before, after)
    program = parse(text)
    assert product_flops(program.entry, program.entry.root) == flops
