# ruff: noqa: E501
"""Every collective of a step is counted once: how often, how many bytes, over which axes, for which module."""

import dataclasses
import math
import re
from collections import Counter
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support import AXES, Model, data, fsdp, mean_loss, mesh_of
from xlstm_jax.distributed import abstract_train_state, make_train_step
from xlstm_jax.distributed.data_parallel.leaf import is_box, leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.forecast.compiling.compile import compile_for_topology
from xlstm_jax.forecast.cost.collective_traffic import find_collectives, ring_bytes
from xlstm_jax.forecast.hlo.op_names import common_path
from xlstm_jax.forecast.hlo.program import parse

SIZES = {"dp": 2, "fsdp": 4}
SCANNED = 3  # blocks of support.Model, in a scan or a loop


def loss_fn(params, apply_fn, batch, rng=None):
    return mean_loss(params, apply_fn, batch, rng)


def compiled_step(model, *, tx=None, loss=loss_fn, **options):
    """(text of the compiled step, the abstract training state) on a 2 x 4 mesh."""
    mesh, batch = mesh_of(2, 4), jax.eval_shape(lambda: data(32))
    where = {"batch_axes": AXES, "allow_replicated": True}
    state = abstract_train_state(model, tx or optax.sgd(1e-3), mesh, jax.random.key(0), batch["x"], **where)
    step = make_train_step(loss, mesh, **where, **options)
    rng = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    return step.lower(state, batch, rng).compile().as_text(), state


@cache
def rematerialized():
    return compiled_step(Model(wrap=fsdp(), scan=True, remat=True))


def rows(text, **wanted):
    found = find_collectives(parse(text), SIZES)
    return [c for c in found if all(getattr(c, name) == value for name, value in wanted.items())]


def params_of(state):
    """(path, global shape, whether it is split, whether the layers' scan has stacked it)."""
    for path, leaf in leaves_with_path(state.params):
        shape = leaf_of(leaf).value.shape
        yield path, shape, is_box(leaf) and "fsdp" in leaf_of(leaf).axes, path.startswith("blocks/")


# -------------------------------------------------------------------------------- exact counts, against closed formulas


def test_all_gathers_of_a_scanned_remat_model_are_counted_per_leaf_and_layer():
    """One per leaf and layer in forward, one in backward where the layer is computed again; four bytes a value."""
    text, state = rematerialized()
    want = Counter()
    for path, shape, split, stacked in params_of(state):
        if split:
            payload, count = 4 * math.prod(shape) // (SCANNED if stacked else 1), SCANNED if stacked else 1
            for direction in ("forward", "recompute") if stacked else ("forward",):
                want[path, path.rpartition("/")[0], direction, count, payload, payload * 3 / 4] += 1
    assert len(want) == 8  # guard: three leaves in the blocks, twice, and two outside
    gathers = rows(text, kind="all-gather")
    got = Counter((*c.leaves, c.module, c.direction, c.count, c.payload_bytes, c.wire_bytes) for c in gathers)
    assert got == want
    assert {(c.dtype, c.axes, c.group_size, c.asynchronous, c.stands_for) for c in gathers} == {
        ("f32", ("fsdp",), 4, False, None)
    }


def test_reduce_scatters_of_a_scanned_model_are_counted_per_leaf_and_layer():
    """One per leaf and layer, of the module that the gradient belongs to."""
    text, state = rematerialized()
    want = Counter(
        (path.rpartition("/")[0], SCANNED if stacked else 1, 4 * math.prod(shape) // (SCANNED if stacked else 1))
        for path, shape, split, stacked in params_of(state)
        if split
    )
    scatters = rows(text, kind="reduce-scatter")
    assert Counter((c.module, c.count, c.payload_bytes) for c in scatters) == want
    assert {(c.direction, c.axes, c.wire_bytes / c.payload_bytes) for c in scatters} == {("backward", ("fsdp",), 0.75)}


def test_all_reduces_average_shards_over_dp_and_replicated_leaves_over_both_axes():
    text, state = rematerialized()
    shards = sum(4 * math.prod(shape) // 4 for _, shape, split, _ in params_of(state) if split)
    whole = sum(4 * math.prod(shape) for _, shape, split, _ in params_of(state) if not split)
    over_dp, over_both = (rows(text, kind="all-reduce", direction="backward", axes=axes) for axes in (("dp",), AXES))
    assert [c.payload_bytes for c in over_dp] == [shards]
    assert [c.payload_bytes for c in over_both] == [whole + 4]  # the loss travels with them
    assert over_dp[0].wire_bytes == shards * 2 * 1 / 2 and over_both[0].wire_bytes == (whole + 4) * 2 * 7 / 8
    assert over_dp[0].count == over_both[0].count == 1
    assert set(over_both[0].modules) > {"Dense_0", "blocks/LayerNorm_0"} and over_both[0].module == ""


def test_find_collectives_lists_every_collective_of_the_text_once():
    text, _ = rematerialized()
    told = [c.name for c in find_collectives(parse(text), SIZES)]
    assert len(told) == len(set(told))
    assert set(told) == set(re.findall(r"%([\w.\-]+) = .* (?:all-gather|all-reduce|reduce-scatter)\(", text))


def test_minibatches_multiply_the_counts_of_gathers_and_scatters():
    text, _ = compiled_step(Model(wrap=fsdp(), scan=True, remat=True), num_minibatches=2)
    assert {c.count for c in rows(text, kind="all-gather", module="blocks/Dense_0")} == {2 * SCANNED}
    assert {c.count for c in rows(text, kind="reduce-scatter", module="blocks/Dense_0")} == {2 * SCANNED}


def test_find_collectives_counts_twice_the_gathers_for_a_model_called_twice():
    """Guard of the counts above: other programs have others."""

    def twice(params, apply_fn, batch, rng=None):
        y = apply_fn({"params": params}, batch["x"])
        again = apply_fn({"params": params}, jnp.concatenate([y, y], axis=-1))
        return jnp.mean((again - batch["y"]) ** 2)

    def gathers(text):
        return sum(c.count for c in rows(text, kind="all-gather", module="blocks/Dense_1", direction="forward"))

    text, _ = compiled_step(Model(wrap=fsdp(), scan=True, remat=True), loss=twice)
    assert (gathers(rematerialized()[0]), gathers(text)) == (SCANNED, 2 * SCANNED)


def test_wrapper_around_the_scan_gives_a_single_gather_of_all_layers():
    """Wrapped the other way around: once, of three times the bytes; its leaf and module stay those of the blocks."""

    class Outside(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=SCANNED)
            return fsdp(layers)(name="blocks")(x, None)[0][:, :4]

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(nn.Dense(8, name="up")(x)), None

    text, _ = compiled_step(Outside())
    (gather,) = [c for c in rows(text, kind="all-gather") if c.leaves == ("blocks/up/kernel",)]
    assert (gather.count, gather.payload_bytes, gather.module) == (1, SCANNED * 8 * 8 * 4, "blocks/up")


@pytest.mark.parametrize("scan", [True, False])
def test_find_collectives_finds_the_module_without_argument_names(scan):
    """Usually a gather has the module of its parameter, by the name of the argument in the program's text.

    Without this name the module is that of the operation that reads the gathered array: in a fusion, or behind a
    loop's tuple.
    """
    text, _ = rematerialized() if scan else compiled_step(Model(wrap=fsdp(), scan=False))
    nameless = re.sub(r'op_name="state\.params[^"]*"', 'op_name=""', text)
    by_arguments, by_readers = rows(text, kind="all-gather"), rows(nameless, kind="all-gather")
    without_leaf = [[not c.leaves for c in gathers] for gathers in (by_arguments, by_readers)]
    assert not any(without_leaf[0]) and all(without_leaf[1])  # guard: the names of arguments are gone
    assert [(c.name, c.modules) for c in by_readers] == [(c.name, c.modules) for c in by_arguments]
    blocks = ["blocks"] if scan else [f"block_{i}" for i in range(SCANNED)]
    dense = {f"{parent}Dense_{i}" for parent in ("", *(f"{block}/" for block in blocks)) for i in range(2)}
    assert {c.module for c in by_readers} == dense


# ------------------------------------------------------------------------------------------- kinds, bytes, axes, errors


def text_of(fn, axes=SIZES):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    spec = P(tuple(axes))
    fn = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(fn).lower(jax.ShapeDtypeStruct((64, 4), jnp.float32)).compile().as_text()


LOCAL = 64 // 8 * 4 * 4  # bytes on each device
KINDS = {
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "fsdp", 0, 0, tiled=True), LOCAL, 0.75 * LOCAL, ("fsdp",)),
    "collective-permute": (
        lambda x: jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]),
        LOCAL,
        LOCAL,
        ("fsdp",),
    ),
    "all-reduce": (lambda x: jax.lax.psum(x, AXES), LOCAL, 2 * 7 / 8 * LOCAL, AXES),
    "all-gather": (lambda x: jax.lax.all_gather(x, "dp", tiled=True)[:8], 2 * LOCAL, LOCAL, ("dp",)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_find_collectives_gives_payload_wire_bytes_and_axes_of_each_kind(kind):
    fn, payload, wire, axes = KINDS[kind]
    (c,) = rows(text_of(fn))
    assert (c.kind, c.payload_bytes, c.wire_bytes, c.axes, c.dtype) == (kind, payload, wire, axes, "f32")
    assert c.wire_bytes_per_step == c.wire_bytes and c.direction == "other"


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("kind, rounds", [("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)])
def test_ring_bytes_equal_a_count_piece_by_piece_around_the_ring(kind, rounds, n):
    """Counted piece by piece: in each of n - 1 steps of a round a device sends one of n pieces on."""
    pieces = [sum(1 for _ in range(n - 1)) for _ in range(rounds)]
    assert ring_bytes(kind, 64, n) == sum(pieces) * 64 // n


def test_find_collectives_gives_no_axes_for_groups_along_no_mesh_axis():
    (c,) = find_collectives(parse(text_of(KINDS["all-to-all"][0])), {"a": 4, "b": 2})
    assert c.axes is None and c.group_size == 4


def test_find_collectives_raises_for_a_mesh_of_another_size():
    with pytest.raises(ValueError, match=r"\{'dp': 2, 'fsdp': 2\} has 4 devices, .* compiled for 8"):
        find_collectives(parse(rematerialized()[0]), {"dp": 2, "fsdp": 2})


RAGGED = """\
HloModule jit_f, is_scheduled=true, num_partitions=2

ENTRY %main (x: bf16[16,8], n: s32[2]) -> bf16[24,8] {
  %x = bf16[16,8]{1,0} parameter(0)
  %n = s32[2]{0} parameter(1)
  %out = bf16[24,8]{1,0} broadcast(%x), dimensions={}
  ROOT %sent = bf16[24,8]{1,0} ragged-all-to-all(%x, %out, %n, %n, %n, %n), replica_groups={{0,1}}
}
"""


def test_ragged_all_to_all_payload_leaves_out_the_offsets():
    (sent,) = find_collectives(parse(RAGGED), {"ep": 2})
    assert (sent.dtype, sent.payload_bytes) == ("bf16", 16 * 8 * 2)


def test_find_collectives_counts_collectives_in_a_loop_of_unknown_length_once():
    def until_small(x):
        return jax.lax.while_loop(lambda y: y[0, 0] > 1, lambda y: jax.lax.psum(y, "dp") / 4, x)

    program = parse(text_of(until_small))
    assert [(c.kind, c.count) for c in find_collectives(program, SIZES)] == [("all-reduce", 1)]
    assert len(program.unknown_loops) == 1


@pytest.mark.parametrize(
    "paths, want", [(["a/b", "a/c"], "a"), (["a/b", "a/b"], "a/b"), (["ab", "ac"], ""), ([], ""), (["a", ""], "")]
)
def test_common_path_is_the_longest_prefix_of_complete_path_components(paths, want):
    assert common_path(paths) == want


# ----------------------------------------------------------------- what compilers for TPU and GPU write, in excerpts
# Cut from what libtpu wrote for a scanned, rematerialized MLP; shapes, names of operations and attributes are its own.

NAMES = 'metadata={op_name="jit(step)/shard_map/'
BACKWARD = NAMES + "transpose(jvp(M))/while/body/closed_call/checkpoint/"


def tpu(computations, entry, devices=8):
    return (
        f"HloModule jit_step, is_scheduled=true, num_partitions={devices}\n\n{computations}\n"
        f"ENTRY %main (p: bf16[1]) -> bf16[1] {{\n{entry}}}\n"
    ).replace("BACKWARD", BACKWARD)


CHAINED = """
%inner.start (param_0.1: bf16[1,1024,1024]) -> (bf16[1,1024,1024], bf16[1,4096,1024], u32[]) {
  %param_0.1 = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.29 = bf16[1,4096,1024]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.1), channel_id=6, GROUPS
  ROOT %custom-call.2 = (bf16[1,1024,1024]{2,1,0:S(1)}, bf16[1,4096,1024]{2,1,0:S(1)}, u32[]{:S(2)}) custom-call(%all-gather.29), custom_call_target="AsyncCollectiveStart"
}

%inner.middle (param_0.2: bf16[1,1024,1024], param_1.2: bf16[8,128]) -> (bf16[8,128], bf16[1,4096,1024]) {
  %param_0.2 = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_1.2 = bf16[8,128]{1,0} parameter(1)
  %all-gather.31 = bf16[1,4096,1024]{2,1,0:T(8,128)(2,1)S(1)} all-gather(%param_0.2), channel_id=6, GROUPS
  %convolution.47 = bf16[8,128]{1,0} negate(%param_1.2), BACKWARDrematted_computation/blocks/up/dot_general"}
  ROOT %tuple.77 = (bf16[8,128]{1,0}, bf16[1,4096,1024]{2,1,0:S(1)}) tuple(%convolution.47, %all-gather.31)
}

%inner.done (param_0.3: bf16[1,1024,1024], param_1.3: bf16[1,4096,1024]) -> bf16[1,4096,1024] {
  %param_0.3 = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_1.3 = bf16[1,4096,1024]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  %all-gather.35 = bf16[1,4096,1024]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.3), channel_id=6, GROUPS
  ROOT %custom-call.4 = bf16[1,4096,1024]{2,1,0:S(1)} custom-call(%param_0.3, %param_1.3, %all-gather.35), custom_call_target="AsyncCollectiveDone"
}
""".replace(
    "GROUPS",
    'replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}, frontend_attributes={chain_id="0"}, '
    'BACKWARDrematted_computation/gather_params/all_gather"}',
)
CHAINED_ENTRY = """
  %p.0 = f32[1,1024,1024]{2,1,0} parameter(0), metadata={op_name="state.params[\\'blocks\\'][\\'down\\'][\\'kernel\\'].value"}
  %p.1 = bf16[8,128]{1,0} parameter(1), metadata={op_name="batch[\\'x\\']"}
  %convert.1 = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)S(1)} convert(%p.0)
  %async-collective-start = (bf16[1,1024,1024]{2,1,0:S(1)}, bf16[1,4096,1024]{2,1,0:S(1)}, u32[]{:S(2)}) fusion(%convert.1), kind=kCustom, calls=%inner.start
  %gte.0 = bf16[1,1024,1024]{2,1,0:S(1)} get-tuple-element(%async-collective-start), index=0
  %between = bf16[8,128]{1,0} negate(%p.1), BACKWARDrematted_computation/blocks/other/neg"}, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %fusion.138 = (bf16[8,128]{1,0}, bf16[1,4096,1024]{2,1,0:S(1)}) fusion(%gte.0, %between), kind=kOutput, calls=%inner.middle, BACKWARDrematted_computation/blocks/up/dot_general"}, backend_config={"window_config":{"estimated_cycles":"75981"}}
  %gte.1 = bf16[8,128]{1,0} get-tuple-element(%fusion.138), index=0
  %gte.2 = bf16[1,4096,1024]{2,1,0:S(1)} get-tuple-element(%fusion.138), index=1
  %async-collective-done = bf16[1,4096,1024]{2,1,0:S(1)} fusion(%gte.0, %gte.2), kind=kCustom, calls=%inner.done
  ROOT %fusion.134 = bf16[8,128]{1,0} multiply(%gte.1, %async-collective-done), BACKWARDblocks/down/dot_general"}
"""


def test_gather_spread_over_fusions_counts_once_and_overlaps_fusions_in_between():
    (c,) = rows(tpu(CHAINED, CHAINED_ENTRY))
    assert (c.kind, c.count, c.payload_bytes, c.dtype, c.axes) == ("all-gather", 1, 4096 * 1024 * 2, "bf16", ("fsdp",))
    assert (c.leaves, c.module, c.direction) == (("blocks/down/kernel",), "blocks/down", "recompute")
    assert c.asynchronous
    assert (c.overlapped.modules, c.overlapped.instructions, c.overlapped.cycles) == (("blocks/up",), 1, 75981)


def test_second_gather_stage_after_an_asynchronous_first_stage_has_the_same_leaf():
    """Not the module that happens to read it first, which may be another one's."""
    stage = (
        "  %all-gather.60 = bf16[1,4096,2048]{2,1,0} all-gather(%async-collective-done), channel_id=7, "
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={2}, "
        'BACKWARDrematted_computation/gather_params/all_gather"}\n'
        '  %other = bf16[1,4096,2048]{2,1,0} negate(%all-gather.60), BACKWARDblocks/o/dot_general"}\n  ROOT'
    )
    first, second = rows(tpu(CHAINED, CHAINED_ENTRY.replace("  ROOT", stage)))
    assert (first.axes, second.axes, second.payload_bytes) == (("fsdp",), ("dp",), 4096 * 2048 * 2)
    assert (second.leaves, second.module) == (("blocks/down/kernel",), "blocks/down")


SCATTERED = """
%region_5.5.clone (reduce_scatter.28: bf16[], reduce_scatter.29: bf16[]) -> bf16[] {
  %reduce_scatter.29 = bf16[]{:T(256)} parameter(1), metadata={op_name="transpose(jvp(M))/while/body/closed_call/checkpoint/gather_params/reduce_scatter"}
  %reduce_scatter.28 = bf16[]{:T(256)} parameter(0), metadata={op_name="transpose(jvp(M))/while/body/closed_call/checkpoint/gather_params/reduce_scatter"}
  ROOT %add.159 = bf16[]{:T(256)} add(%reduce_scatter.28, %reduce_scatter.29)
}

%all-reduce-scatter.clone.1 (input.2: bf16[4096,1024]) -> bf16[1032,1024] {
  %input.2 = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %constant.280 = bf16[] constant(0)
  %pad.2 = bf16[4128,1024]{1,0:T(8,128)(2,1)} pad(%input.2, %constant.280), padding=0_32x0_0
  %all-reduce.8 = bf16[4128,1024]{1,0:T(8,128)(2,1)} all-reduce(%pad.2), channel_id=9, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%region_5.5.clone, frontend_attributes={from-cross-replica-sharding="true"}
  %constant.283 = u32[] constant(0)
  ROOT %dynamic-slice.12 = bf16[1032,1024]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%all-reduce.8, %constant.283, %constant.283), dynamic_slice_sizes={1032,1024}
}
"""
SCATTERED_ENTRY = """
  %p.0 = bf16[8,128]{1,0} parameter(0)
  %fusion.143 = bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)} broadcast(%p.0), BACKWARDblocks/down/dot_general"}
  %fusion.136 = bf16[1032,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%fusion.143), kind=kCustom, calls=%all-reduce-scatter.clone.1
  %slice.2 = bf16[24,1024]{1,0:T(8,128)(2,1)S(1)} slice(%fusion.136), slice={[1008:1032], [0:1024]}
  %collective-permute-start = (bf16[24,1024]{1,0:S(1)}, bf16[24,1024]{1,0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%slice.2), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}
  %fusion.135 = bf16[8,128]{1,0} negate(%p.0), BACKWARDblocks/up/dot_general"}
  %collective-permute-done = bf16[24,1024]{1,0:T(8,128)(2,1)S(1)} collective-permute-done(%collective-permute-start)
  ROOT %concatenate.2 = bf16[1056,1024]{1,0:T(8,128)(2,1)S(1)} concatenate(%collective-permute-done, %fusion.136), dimensions={0}
"""


def test_fusion_of_all_reduce_and_slice_counts_as_a_reduce_scatter():
    scatter, permute = rows(tpu(SCATTERED, SCATTERED_ENTRY))
    payload = 4128 * 1024 * 2  # padded, as it travels
    assert (scatter.kind, scatter.stands_for, scatter.payload_bytes) == ("reduce-scatter", None, payload)
    assert (scatter.wire_bytes, scatter.module, scatter.direction) == (payload * 3 / 4, "blocks/down", "backward")
    assert not scatter.asynchronous
    assert (permute.kind, permute.payload_bytes, permute.axes) == ("collective-permute", 24 * 1024 * 2, ("fsdp",))
    assert permute.asynchronous and permute.overlapped.modules == ("blocks/up",)


def test_all_reduce_sliced_outside_the_fusion_stands_for_a_reduce_scatter():
    """On a square torus: twice the bytes of the scatter that was asked for, several in one."""
    reducer = SCATTERED[: SCATTERED.index("%all-reduce-scatter")]
    entry = """
  %p.0 = bf16[8,128]{1,0} parameter(0)
  %fusion.1 = bf16[4096,1024]{1,0:S(1)} broadcast(%p.0), BACKWARDblocks/down/dot_general"}
  %fusion.2 = bf16[1024,4096]{1,0:S(1)} broadcast(%p.0), BACKWARDblocks/up/dot_general"}
  %all-reduce.8 = (bf16[4096,1024]{1,0:S(1)}, bf16[1024,4096]{1,0:S(1)}) all-reduce(%fusion.1, %fusion.2), channel_id=9, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%region_5.5.clone
  ROOT %get-tuple-element.309 = bf16[4096,1024]{1,0:S(1)} get-tuple-element(%all-reduce.8), index=0
"""
    (c,) = rows(tpu(reducer, entry))
    assert (c.kind, c.stands_for, c.direction) == ("all-reduce", "reduce-scatter", "backward")
    assert (c.payload_bytes, c.wire_bytes) == (2 * 4096 * 1024 * 2, 2 * 3 / 4 * 2 * 4096 * 1024 * 2)
    assert (c.modules, c.module) == (("blocks/down", "blocks/up"), "blocks")


PLACED = """
%add.3 (x.3: bf16[], y.3: bf16[]) -> bf16[] {
  %y.3 = bf16[]{:T(256)} parameter(1)
  %x.3 = bf16[]{:T(256)} parameter(0)
  ROOT %add.164 = bf16[]{:T(256)} add(%x.3, %y.3)
}
"""
PLACED_ENTRY = """
  %p.0 = bf16[1,1024,1024]{2,1,0} parameter(0), metadata={op_name="state.params[\\'blocks\\'][\\'up\\'][\\'kernel\\'].value"}
  %constant.276 = bf16[]{:T(256)} constant(0)
  %constant.278 = u32[]{:T(128)} constant(0)
  %convert.1 = bf16[1,1024,1024]{2,1,0} convert(%p.0), BACKWARDrematted_computation/gather_params/convert_element_type"}
  %broadcast.113 = bf16[1,1024,4096]{2,1,0} broadcast(%constant.276), dimensions={}
  %dynamic-update-slice.13 = bf16[1,1024,4096]{2,1,0} dynamic-update-slice(%broadcast.113, %convert.1, %constant.278, %constant.278, %constant.278)
  %copy-start.1 = (bf16[1,1024,4096]{2,1,0:S(1)}, bf16[1,1024,4096]{2,1,0}, u32[]{:S(2)}) copy-start(%dynamic-update-slice.13)
  %copy-done.1 = bf16[1,1024,4096]{2,1,0:S(1)} copy-done(%copy-start.1)
  %all-reduce.17 = bf16[1,1024,4096]{2,1,0} all-reduce(%copy-done.1), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%add.3
  ROOT %fusion.133 = bf16[8,128]{1,0} negate(%all-reduce.17), BACKWARDrematted_computation/blocks/up/dot_general"}
"""


def test_all_reduce_of_shards_padded_with_zeros_stands_for_an_all_gather():
    (c,) = rows(tpu(PLACED, PLACED_ENTRY))
    assert (c.kind, c.stands_for, c.direction) == ("all-reduce", "all-gather", "recompute")
    assert (c.leaves, c.module) == (("blocks/up/kernel",), "blocks/up")
    assert (c.payload_bytes, c.wire_bytes) == (1024 * 4096 * 2, 2 * 3 / 4 * 1024 * 4096 * 2)


def test_all_reduce_of_shards_padded_with_nonzeros_stands_for_no_all_gather():
    other = PLACED_ENTRY.replace("bf16[]{:T(256)} constant(0)", "bf16[]{:T(256)} constant(1)")
    (c,) = rows(tpu(PLACED, other))
    assert (c.kind, c.stands_for, c.leaves) == ("all-reduce", None, ())


SPARSECORE = """
%called_computation.3 (param_0.279: bf16[1,1024,64], param_1.287: token[]) -> bf16[1,1024,256] {
  %param_1.287 = token[] parameter(1)
  %param_0.279 = bf16[1,1024,64]{1,2,0:T(8,128)(2,1)} parameter(0), backend_config={"flag_configs":[]}
  ROOT %all-gather.54 = bf16[1,1024,256]{1,2,0:T(8,128)(2,1)} all-gather(%param_0.279), channel_id=4, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={2}, use_global_device_ids=true, metadata={op_name="jit(step)/shard_map/jvp(M)/while/body/closed_call/gather_params/all_gather" stack_frame_id=113}
}, execution_thread="sparsecore"
"""
SPARSECORE_ENTRY = """
  %p.0 = bf16[1,1024,64]{2,1,0} parameter(0), metadata={op_name="state.params[\\'blocks\\'][\\'up\\'][\\'kernel\\'].value"}
  %p.1 = bf16[8,128]{1,0} parameter(1)
  %prepare_start = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %prepare_done = token[] custom-call(%prepare_start), custom_call_target="PrepareAsyncCallDone"
  %all-gather.55.cloned.1.call-start = ((bf16[1,1024,64]{1,2,0}, token[]), bf16[1,1024,256]{1,2,0}) call-start(%p.0, %prepare_done), async_execution_thread="sparsecore", to_apply=%called_computation.3, metadata={op_name="jit(step)/shard_map/jvp(M)/while/body/closed_call/gather_params/all_gather"}
  %prepare_start.2 = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %fusion.9 = bf16[8,128]{1,0} negate(%p.1), metadata={op_name="jit(step)/shard_map/jvp(M)/while/body/closed_call/blocks/down/dot_general"}, backend_config={"window_config":{"estimated_cycles":"45110"}}
  %all-gather.55.cloned.1.call-done = bf16[1,1024,256]{1,2,0} call-done(%all-gather.55.cloned.1.call-start), metadata={op_name="jit(step)/shard_map/jvp(M)/while/body/closed_call/gather_params/all_gather"}
  ROOT %fusion.10 = bf16[8,128]{1,0} multiply(%fusion.9, %all-gather.55.cloned.1.call-done), metadata={op_name="jit(step)/shard_map/jvp(M)/while/body/closed_call/blocks/up/dot_general"}
"""


@pytest.mark.parametrize("nameless", [False, True])
def test_sparsecore_all_gather_is_asynchronous_and_overlaps_the_schedule(nameless):
    entry = SPARSECORE_ENTRY.replace("state.params", "p") if nameless else SPARSECORE_ENTRY
    (c,) = rows(tpu(SPARSECORE, entry))
    assert (c.kind, c.count, c.payload_bytes, c.module) == ("all-gather", 1, 1024 * 256 * 2, "blocks/up")
    assert c.leaves == (() if nameless else ("blocks/up/kernel",))
    assert c.asynchronous and c.direction == "forward"
    assert (c.overlapped.modules, c.overlapped.instructions, c.overlapped.cycles) == (("blocks/down",), 1, 45110)


LOOP_BESIDE = """
%body (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[]) tuple(%next)
}

%cond (q: (s32[])) -> pred[] {
  %q = (s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant(TRIPS)
  ROOT %lt = pred[] compare(%j, %n), direction=LT
}
"""
LOOP_CALLED = """  %zero = s32[] constant(0)
  %init = (s32[]) tuple(%zero)
  %loop = (s32[]) while(%init), condition=%cond, body=%body
"""


@pytest.mark.parametrize("trips, cycles", [(0, 0), (5, None)])
def test_overlapped_cycles_are_zero_for_a_loop_without_trips_and_unknown_otherwise(trips, cycles):
    """And may be behind one that runs, of which the compiler says nothing."""
    lines = SPARSECORE_ENTRY.replace("multiply(%fusion.9", "multiply(%p.1").splitlines(keepends=True)
    entry = "".join(LOOP_CALLED if "%fusion.9 =" in line else line for line in lines)
    (c,) = rows(tpu(SPARSECORE + LOOP_BESIDE.replace("TRIPS", str(trips)), entry))
    assert c.asynchronous and (c.overlapped.instructions, c.overlapped.cycles) == (1, cycles)


@pytest.mark.parametrize("estimate, cycles", [('"estimated_cycles":"0"', 0), ("", None)])
def test_overlapped_cycles_distinguish_an_estimate_of_zero_from_no_estimate(estimate, cycles):
    entry = SPARSECORE_ENTRY.replace('"estimated_cycles":"45110"', estimate)
    (c,) = rows(tpu(SPARSECORE, entry))
    assert (c.overlapped.instructions, c.overlapped.cycles) == (1, cycles)


def test_sparsecore_all_gather_in_a_nested_call_counts_once():
    """What runs there may itself call the computation that holds the collective."""
    wrapped = """
%wrapped.1 (param_0.280: bf16[1,1024,64], param_1.288: token[]) -> bf16[1,1024,256] {
  %param_1.288 = token[] parameter(1)
  %param_0.280 = bf16[1,1024,64]{1,2,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.55.cloned.1 = bf16[1,1024,256]{1,2,0:T(8,128)(2,1)} call(%param_0.280, %param_1.288), to_apply=%called_computation.3
}, execution_thread="sparsecore"
"""
    entry = SPARSECORE_ENTRY.replace("to_apply=%called_computation.3", "to_apply=%wrapped.1")
    (c,) = rows(tpu(SPARSECORE + wrapped, entry))
    assert (c.kind, c.count, c.asynchronous) == ("all-gather", 1, True)


def test_async_start_without_operands_gives_a_collective_without_leaves():
    """After code generation a program may start what it offloads so, as here the lookup of an embedding."""
    computation = """
%async_computation.1 (param_0: bf16[8,128], param_1: s32[8]) -> bf16[8,128] {
  %param_0 = bf16[8,128]{1,0} parameter(0)
  %param_1 = s32[8]{0} parameter(1)
  %gather.1 = bf16[8,128]{1,0} gather(%param_0, %param_1)
  ROOT %all-reduce.9 = bf16[8,128]{1,0} all-reduce(%gather.1), channel_id=4, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true
}, execution_thread="sparsecore"
"""
    entry = """
  %start = ((), (), (s32[1]{0:S(2)})) async-start(), async_execution_thread="sparsecore", calls=%async_computation.1
  ROOT %done = bf16[8,128]{1,0} async-done(%start)
"""
    (c,) = rows(tpu(computation, entry))
    assert (c.kind, c.leaves, c.module, c.asynchronous) == ("all-reduce", (), "", True)


GPU_ENTRY = """
  %p.0 = f32[256,64]{1,0} parameter(0), metadata={op_name="params[\\'up\\'][\\'kernel\\']"}
  %all-gather-start = (f32[256,64]{1,0}, f32[1024,64]{1,0}) all-gather-start(%p.0), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(step)/shard_map/jvp(M)/gather_params/all_gather"}, backend_config={"collective_backend_config":{"is_sync":false}}
  %loop_fusion = f32[256,64]{1,0} negate(%p.0), metadata={op_name="jit(step)/shard_map/jvp(M)/down/neg"}
  %all-gather-done = f32[1024,64]{1,0} all-gather-done(%all-gather-start)
  %reduce-scatter-start = ((f32[1024,64]{1,0}), f32[256,64]{1,0}) reduce-scatter-start(%all-gather-done), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, to_apply=%add.3, metadata={op_name="jit(step)/shard_map/transpose(jvp(M))/up/reduce_scatter"}, backend_config={"collective_backend_config":{"is_sync":true}}
  ROOT %reduce-scatter-done = f32[256,64]{1,0} reduce-scatter-done(%reduce-scatter-start)
"""


def test_gpu_start_done_pairs_are_asynchronous_unless_marked_is_sync():
    gather, scatter = rows(tpu(PLACED, GPU_ENTRY))
    assert (gather.kind, gather.payload_bytes, gather.axes) == ("all-gather", 1024 * 64 * 4, ("fsdp",))
    assert gather.asynchronous and gather.overlapped.modules == ("down",) and gather.leaves == ("up/kernel",)
    assert (scatter.kind, scatter.payload_bytes, scatter.axes) == ("reduce-scatter", 1024 * 64 * 4, ("dp",))
    assert not scatter.asynchronous and scatter.module == "up"


STAGED_TOGETHER = """
  %p.0 = f32[64,8]{1,0} parameter(0), metadata={op_name="params[\\'up\\'][\\'kernel\\']"}
  %p.1 = f32[32,8]{1,0} parameter(1), metadata={op_name="params[\\'down\\'][\\'kernel\\']"}
  %start.1 = ((f32[64,8]{1,0}, f32[32,8]{1,0}), (f32[128,8]{1,0}, f32[64,8]{1,0})) all-gather-start(%p.0, %p.1), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, use_global_device_ids=true
  %done.1 = (f32[128,8]{1,0}, f32[64,8]{1,0}) all-gather-done(%start.1)
  %up = f32[128,8]{1,0} get-tuple-element(%done.1), index=0
  %down = f32[64,8]{1,0} get-tuple-element(%done.1), index=1
  %gather.2 = f32[512,8]{1,0} all-gather(%up), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true
  %gather.3 = f32[256,8]{1,0} all-gather(%down), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true
  ROOT %t = (f32[512,8]{1,0}, f32[256,8]{1,0}) tuple(%gather.2, %gather.3)
"""


def test_leaves_gathered_together_in_the_first_stage_are_separate_in_the_second_stage():
    first, up, down = rows(tpu("", STAGED_TOGETHER))
    assert (first.axes, first.leaves) == (("dp",), ("up/kernel", "down/kernel"))
    assert (up.axes, up.leaves, down.leaves) == (("fsdp",), ("up/kernel",), ("down/kernel",))


# ------------------------------------------------------------------------------------------------- with libtpu itself


def collectives_on_tpu(topology, sizes):
    """Collectives of six scanned, rematerialized blocks, wide enough for the compiler's usual choices."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            y = nn.Dense(4096, use_bias=False, name="up", dtype=jnp.bfloat16)(x)
            return x + nn.Dense(1024, use_bias=False, name="down", dtype=jnp.bfloat16)(nn.gelu(y)), None

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = nn.remat(fsdp(Block, gather_dtype=jnp.bfloat16, grad_scatter_dtype=jnp.bfloat16), prevent_cse=False)
            layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=6)
            return layers(name="blocks")(x, None)[0]

    def loss(params, apply_fn, batch, rng=None):
        return jnp.mean(apply_fn({"params": params}, batch) ** 2)

    axes = tuple(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), axes)
    batch = jax.ShapeDtypeStruct((8 * math.prod(sizes.values()), 128, 1024), jnp.bfloat16)
    state = abstract_train_state(Mlp(), optax.sgd(1e-3), mesh, jax.random.key(0), batch, batch_axes=axes)
    rng = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    step = make_train_step(loss, mesh, batch_axes=axes)
    return find_collectives(parse(compile_for_topology(step, state, batch, rng, topology=topology).hlo), sizes)


@pytest.mark.slow
@pytest.mark.libtpu
def test_rectangular_torus_step_has_all_gathers_and_reduce_scatters():
    found = collectives_on_tpu("v5e:2x4", {"dp": 2, "fsdp": 4})
    payload = 4096 * 1024 * 2
    gathers = [c for c in found if c.kind == "all-gather"]
    assert Counter((c.module, c.direction) for c in gathers) == Counter(
        {(f"blocks/{name}", direction): 1 for name in ("up", "down") for direction in ("forward", "recompute")}
    )
    assert {(c.count, c.payload_bytes, c.dtype, c.axes) for c in gathers} == {(6, payload, "bf16", ("fsdp",))}
    scatters = [c for c in found if c.kind == "reduce-scatter"]
    assert sorted((c.module, c.count) for c in scatters) == [("blocks/down", 6), ("blocks/up", 6)]
    assert not [c for c in scatters if not payload <= c.payload_bytes <= 1.01 * payload], f"{payload=}"
    assert any(c.asynchronous and c.overlapped.instructions for c in found)
    assert not [c for c in found if c.stands_for]


@pytest.mark.libtpu
def test_square_torus_step_has_all_reduces_in_place_of_reduce_scatters():
    found = collectives_on_tpu("v5e:4x4", {"fsdp": 16})
    stands = [c for c in found if c.stands_for == "reduce-scatter"]
    assert sum(c.count * c.payload_bytes for c in stands) == 6 * 2 * 4096 * 1024 * 2
    assert {c.direction for c in stands} == {"backward"} and not [c for c in found if c.kind == "reduce-scatter"]
    assert {module for c in stands for module in c.modules} == {"blocks/up", "blocks/down"}


def test_collective_dataclass_converts_to_plain_data_by_asdict():
    row = dataclasses.asdict(rows(rematerialized()[0], kind="all-gather")[0])
    nothing = {"modules": (), "instructions": 0}
    assert row["overlapped"] == nothing | dict.fromkeys(("cycles", "seconds", "product_seconds"))
