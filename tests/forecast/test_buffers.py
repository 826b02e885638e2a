"""Memory by module is read rightly from XLA's texts: against XLA's own sums, a plain recount, and excerpts by hand."""

import re
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

from tests.models import LanguageModel
from tests.support import fsdp, mesh_of
from xlstm_jax.distributed import abstract_train_state, make_train_step
from xlstm_jax.forecast.compiling.compile import compile_for_topology
from xlstm_jax.forecast.cost.memory import (
    _history,
    _live_bytes,
    _Operation,
    _stretches,
    _temporaries_at,
    _temporary,
    _timeline,
    _Value,
    memory_of_totals,
    operation_names,
    read_memory,
)
from xlstm_jax.forecast.hardware.chips import CHIPS
from xlstm_jax.forecast.hlo.program import parse

MIB = 2**20

# A loop writes gradients, in place, into a stack that its carry holds; the weights were cast before it, all at once.
# Two releases of the compiler write the flags in different orders.
ASSIGNMENT = r"""BufferAssignment:
allocation 0: size 512, page 0, thread-local:
 value: <2 add.5 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 268435456, page 0, output shape is |f32[64,1024,1024]|, maybe-live-out:
 value: <93 constant_dynamic-update-slice_fusion.2 @0> (size=268435456,offset=0): f32[64,1024,1024]{2,1,0:T(8,128)}
 value: <161 while.29{2} (phi) @0> (size=268435456,offset=0): f32[64,1024,1024]{2,1,0:T(8,128)}
allocation 2: size 268435456, page 0, parameter 0, shape |f32[64,1024,1024]| at ShapeIndex {}, maybe-live-out:
 value: <103 param.4 @0> (size=268435456,offset=0): f32[64,1024,1024]{2,1,0:T(8,128)}
allocation 3: size 32768, page 0, parameter 1, shape |f32[8,1024]| at ShapeIndex {}:
 value: <106 param.5 @0> (size=32768,offset=0): f32[8,1024]{1,0:T(8,128)}
allocation 4: size 4096, page 0, constant:
 value: <570 constant.270 @0> (size=4096,offset=0): u32[]
allocation 5: size 142672384, page 0, preallocated-temp:
 value: <36 add.29 @0> (size=512,offset=142606336): s32[]{:T(128)}
 value: <38 fusion.4{} @0> (size=512,offset=142606848): (f32[64,8,1024]{2,1,0:T(8,128)}, bf16[8,1024]{1,0:S(1)})
 value: <39 fusion.4{0} @0> (size=4194304,offset=138412032): f32[64,8,1024]{2,1,0:T(8,128)}
 value: <91 convolution.2 @0> (size=4194304,offset=134217728): f32[1,1024,1024]{2,1,0:T(8,128)}
 value: <92 all-reduce.2 @0> (size=4194304,offset=134217728): f32[1,1024,1024]{2,1,0:T(8,128)}
 value: <99 broadcast.7 @0> (size=32768,offset=134217728): f32[8,1024]{1,0:T(8,128)}
 value: <112 custom-call.1 @0> (size=4194304,offset=138412032): f32[64,8,1024]{2,1,0:T(8,128)}
 value: <116 convert.7 @0> (size=134217728,offset=0): bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)}
 value: <138 while.28{3} (phi) @0> (size=4194304,offset=138412032): f32[64,8,1024]{2,1,0:T(8,128)}
allocation 6: size 524288, color 1, page 0, preallocated-temp:
 value: <37 copy.28 @1> (size=131072,offset=0): bf16[8,1024]{1,0:T(8,128)(2,1)S(1)}
"""
ASSIGNMENT_EARLIER = ASSIGNMENT.replace(", page 0", "")

LIVE_RANGE = """HloLiveRange (max 10):
  InstructionSequence:
    0:param.4
    1:param.5
    2:custom-call.1
    3:add.29
    4:fusion.4
    5:while.28
    6:convert.7
    7:broadcast.7
    8:convolution.2
    9:all-reduce.2
    10:constant_dynamic-update-slice_fusion.2
  BufferLiveRange:
    param.4{}:0-11
    param.5{}:0-11
    custom-call.1{}:2-4
    add.29{}:3-11
    copy.28{}:3-4
    fusion.4{}:4-5
    fusion.4{0}:4-5
    while.28{3}:5-11
    convert.7{}:6-11
    broadcast.7{}:7-8
    convolution.2{}:8-9
    all-reduce.2{}:9-10
    constant_dynamic-update-slice_fusion.2{}:10-11
  Live ranges at 9 (peak):
    convert.7{}: 134217728 bytes (cumulative: 134217728 bytes)
"""
OP_NAMES = {
    "param.4": "state.params['blocks']['kernel'].value",
    "fusion.4": "jit(step)/jvp(M)/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice",
    "add.29": "jit(step)/jvp(M)/while/body/closed_call/blocks/add",
    "convolution.2": "jit(step)/transpose(jvp(M))/while/body/closed_call/checkpoint/blocks/up/dot_general",
    "all-reduce.2": "jit(step)/transpose(jvp(M))/while/body/closed_call/checkpoint/blocks/up/dot_general",
}


@pytest.mark.parametrize("assignment", [ASSIGNMENT, ASSIGNMENT_EARLIER], ids=["page", "no page"])
def test_read_memory_of_a_handwritten_excerpt_gives_sizes_temporaries_and_timeline(assignment):
    found = read_memory(assignment, LIVE_RANGE, OP_NAMES)
    assert (found.argument_bytes, found.alias_bytes) == (256 * MIB + 32768, 256 * MIB)
    assert (found.output_bytes, found.constant_bytes, found.temporary_bytes) == (256 * MIB, 4096, 142672384)
    assert found.total_bytes == 2 * 256 * MIB + 32768 + 4096 + 142672384
    # The cast weights, the stack of activations, the product that becomes its sum in place (once), a counter.
    assert found.peak_live_bytes == 128 * MIB + 4 * MIB + 4 * MIB + 512
    assert [(t.bytes, t.instruction, t.path, t.direction) for t in found.temporaries] == [
        (128 * MIB, "convert.7", "", "other"),
        (4 * MIB, "convolution.2", "blocks/up", "backward"),
        (4 * MIB, "fusion.4", "blocks", "forward"),
        (512, "add.29", "blocks", "forward"),
    ]
    assert found.by_module() == {"": 128 * MIB, "blocks/up": 4 * MIB, "blocks": 4 * MIB + 512}
    stack = found.temporaries[2]
    assert (stack.first, stack.last, stack.shape) == (2, 11, "f32[64,8,1024]")
    assert found.timeline[0].live_bytes == 0
    assert max(moment.live_bytes for moment in found.timeline) == found.peak_live_bytes
    assert [moment.point for moment in found.timeline] == list(range(12))
    assert (found.timeline[5].path, found.timeline[9].path) == ("blocks", "blocks/up")
    assert found.resident_peak_bytes == found.peak_live_bytes  # nothing comes from the host
    with_host_buffer = read_memory(assignment, LIVE_RANGE, OP_NAMES, host_buffers={"convert.7{}"})
    assert with_host_buffer.resident_peak_bytes == found.peak_live_bytes - 128 * MIB


def test_timeline_of_a_single_point_is_the_peak():
    found = read_memory(ASSIGNMENT, LIVE_RANGE, OP_NAMES, points=1)
    assert [(moment.point, moment.live_bytes) for moment in found.timeline] == [
        (found.peak_point, found.peak_live_bytes)
    ]
    assert found.peak_point in (8, 9)  # the product, or its sum in place


def test_temporaries_of_several_allocations_do_not_share_bytes():
    of_counter = " value: <36 add.29 @0> (size=512,offset=142606336): s32[]{:T(128)}\n"
    first_bytes = of_counter.replace("offset=142606336", "offset=0")
    beside = ASSIGNMENT.replace(of_counter, "") + f"allocation 7: size 512, page 0, preallocated-temp:\n{first_bytes}"
    one, two, shared = (
        read_memory(text, LIVE_RANGE, OP_NAMES).peak_live_bytes
        for text in (ASSIGNMENT, beside, ASSIGNMENT.replace(of_counter, first_bytes))
    )
    assert two == one == shared + 512  # guard: at the same offset of one allocation they share


def test_bytes_by_module_are_listed_with_the_largest_first():
    found = read_memory(ASSIGNMENT, LIVE_RANGE, OP_NAMES | {"convert.7": OP_NAMES["all-reduce.2"]})
    assert list(found.by_module().items()) == [("blocks/up", 132 * MIB), ("blocks", 4 * MIB + 512)]


def test_memory_of_totals_counts_outputs_that_overwrite_an_argument_once():
    found = memory_of_totals({"argument": 100, "output": 70, "alias": 60, "temp": 5})
    assert (found.argument_bytes, found.alias_bytes, found.output_bytes, found.temporary_bytes) == (100, 60, 10, 5)
    assert found.total_bytes == 115


def test_read_memory_counts_overlapping_temporaries_once_for_the_larger():
    """In place, an operation may write into a part of what it reads last: both are live while it runs."""
    inside = " value: <93 slice.1 @0> (size=2097152,offset=135266304): f32[1,512,1024]{2,1,0:T(8,128)}\n"
    assignment = ASSIGNMENT.replace("allocation 6", inside + "allocation 6")
    found = read_memory(assignment, LIVE_RANGE.replace("  Live ranges", "    slice.1{}:8-9\n  Live ranges"), OP_NAMES)
    assert found.peak_live_bytes == read_memory(ASSIGNMENT, LIVE_RANGE, OP_NAMES).peak_live_bytes
    assert "slice.1" not in {temporary.instruction for temporary in found.temporaries}
    assert sum(temporary.bytes for temporary in found.temporaries) == found.peak_live_bytes


def value(name, start, stop, first, last):
    return _Value(name, "{}", f"f32[{stop - start}]", start, stop, first, last)


def test_buffer_is_described_by_a_named_value_that_lives_at_the_point():
    operations = {"named": _Operation("a/b", "a"), "alone": _Operation("b"), "later": _Operation("c/d", "c")}

    def described(*history, point=5):
        found = _temporary(7, history, point, operations)
        assert (found.bytes, found.first, found.last) == (
            7,
            min(h.first for h in history),
            max(h.last for h in history),
        )
        return found.instruction

    alone, later, unnamed = value("alone", 0, 4, 2, 5), value("later", 0, 4, 6, 9), value("unnamed", 0, 4, 5, 6)
    assert described(later, alone) == described(alone, later) == "alone"  # named, and live at its last point
    assert described(unnamed, later) == described(later, unnamed, point=6) == "later"
    assert described(later, alone, point=6) == described(later, unnamed, alone, point=2 + 4) == "later"
    assert described(later, alone, point=2) == "alone"  # live at its first point
    assert described(alone, later, point=20) == described(later, alone, point=20) == "later"  # of a module
    assert described(unnamed, alone, point=20) == "alone"
    found = _temporary(7, [unnamed], 5, operations)
    assert (found.op_name, found.path, found.shape) == ("", "", "f32[4]")


def test_bytes_in_use_count_shared_bytes_once_from_first_to_last_point():
    values = [value("a", 0, 8, 1, 3), value("b", 4, 16, 3, 4), value("c", 4, 8, 0, 0)]
    widths, places = _stretches(values)
    assert widths.tolist() == [4, 4, 8] and places == [slice(0, 2), slice(1, 3), slice(1, 2)]
    assert _live_bytes(values, 6).tolist() == [4, 8, 8, 16, 12, 0]
    assert _live_bytes([value("large", 0, 2**33, 0, 1)], 2).tolist() == [2**33] * 2
    buffers = _temporaries_at(3, values, {})
    assert [(b.instruction, b.bytes) for b in buffers] == [("b", 12), ("a", 4)]
    assert [(b.instruction, b.bytes) for b in _temporaries_at(0, values, {})] == [("c", 4)]
    assert _temporaries_at(5, values, {}) == ()
    inside = [value("outer", 0, 8, 0, 1), value("inner", 2, 4, 0, 1), value("same", 0, 8, 1, 2)]
    assert [(b.instruction, b.bytes, b.last) for b in _temporaries_at(0, inside, {})] == [("outer", 8, 2)]


def test_history_of_a_buffer_follows_values_whose_ranges_touch():
    chain = [value("c", 0, 4, 5, 7), value("a", 0, 4, 1, 3), value("b", 0, 4, 3, 5), value("d", 0, 4, 8, 9)]
    for point, want in ((1, "abc"), (3, "abc"), (7, "abc"), (8, "d"), (9, "d"), (0, ""), (10, "")):
        assert sorted(live.instruction for live in _history(chain, point)) == list(want), point


def test_timeline_names_the_module_of_the_last_known_instruction():
    live, operations = np.array([1, 5, 3, 9, 2]), {"x": _Operation("m/x", "m", "forward"), "y": _Operation("y")}
    schedule = ["", "x", "", "y", "x"]
    every = _timeline(live, schedule, operations, 9)
    assert [(m.point, m.live_bytes, m.path) for m in every] == [
        (0, 1, ""),
        (1, 5, "m"),
        (2, 3, "m"),
        (3, 9, ""),
        (4, 2, "m"),
    ]
    assert every[1].direction == every[2].direction == "forward" != every[0].direction
    assert [(m.point, m.live_bytes) for m in _timeline(live, schedule, operations, 2)] == [(1, 5), (3, 9)]


def test_read_memory_timeline_with_few_points_keeps_the_peak():
    found = read_memory(ASSIGNMENT, LIVE_RANGE, OP_NAMES, points=3)
    assert len(found.timeline) == 3
    assert max(moment.live_bytes for moment in found.timeline) == found.peak_live_bytes


def test_read_memory_raises_for_text_of_another_kind():
    with pytest.raises(ValueError, match=r"This is no buffer assignment of XLA.*HloModule jit_f"):
        read_memory("HloModule jit_f", LIVE_RANGE, {})
    with pytest.raises(ValueError, match=r"This is no live-range text of XLA.*BufferAssignment"):
        read_memory(ASSIGNMENT, ASSIGNMENT, {})


def test_read_memory_raises_for_texts_of_two_programs():
    other = LIVE_RANGE.replace("    convert.7{}:6-11\n", "")
    with pytest.raises(
        ValueError, match=r"a temporary convert.7\{\} of 134217728 bytes, which is not among the 12 values"
    ):
        read_memory(ASSIGNMENT, other, {})


# ---------------------------------------------------------------------------------------------------- real programs


def compiled(lowered, folder):
    """The compiled program, its two texts, and the name of each instruction."""
    program = lowered.compile(compiler_options={"xla_dump_to": str(folder)})
    texts = [
        next(folder.glob(f"*after_optimizations-{name}.txt")).read_text()
        for name in ("buffer-assignment", "live-range")
    ]
    return program, *texts, operation_names(parse(program.as_text()))


def recount(assignment, live_range):
    """Bytes of temporaries in use at each point, byte ranges united one by one: slow, and without anything shared."""
    start = assignment.index("preallocated-temp")
    temporaries = assignment[start : assignment.find("allocation", start)]
    ranges = {name: (int(a), int(b)) for name, a, b in re.findall(r"^    (\S+):(\d+)-(\d+)$", live_range, re.M)}
    values = []
    for name, index, size, offset in re.findall(r"<\d+ ([^ {]+)(\S*) .*?\(size=(\d+),offset=(\d+)\)", temporaries):
        values.append((int(offset), int(offset) + int(size), *ranges[name + (index or "{}")]))
    used = []
    for point in range(max(last for *_, last in values) + 1):
        total, end = 0, 0
        for begin, stop, first, last in sorted(values):
            if first <= point <= last:
                total += max(0, stop - max(begin, end))
                end = max(end, stop)
        used.append(total)
    return used


def loss_of(params, apply_fn, batch, rng):
    del rng
    return jnp.mean(apply_fn({"params": params}, batch) ** 2)


def lowered_step(model, batch, mesh, tx, batch_axes=("dp", "fsdp")):
    state = abstract_train_state(
        model, tx, mesh, jax.random.key(0), batch, batch_axes=batch_axes, allow_replicated=True
    )
    step = make_train_step(loss_of, mesh, batch_axes=batch_axes, allow_replicated=True)
    return step, (state, batch, jax.ShapeDtypeStruct((), jax.random.key(0).dtype))


def test_read_memory_of_a_training_step_matches_xla_memory_analysis(tmp_path):
    """On CPU, where nothing is padded, XLA's statistics are those of the same buffers."""
    model = LanguageModel("transformer", dim=32, num_layers=3, num_heads=2, remat=True, wrap=fsdp)
    batch = jax.ShapeDtypeStruct((16, 64), jnp.int32)
    step, args = lowered_step(model, batch, mesh_of(2, 4), optax.adamw(0.1))
    program, assignment, live_range, names = compiled(step.lower(*args), tmp_path)
    found, stats = read_memory(assignment, live_range, names), program.memory_analysis()

    assert found.argument_bytes == stats.argument_size_in_bytes
    assert found.alias_bytes == stats.alias_size_in_bytes > 0
    assert found.output_bytes == stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert found.temporary_bytes == stats.temp_size_in_bytes > 0

    used = recount(assignment, live_range)
    assert found.peak_live_bytes == max(used) <= found.temporary_bytes
    assert used[found.peak_point] == max(used)
    assert sum(t.bytes for t in found.temporaries) == found.peak_live_bytes == sum(found.by_module().values())
    sizes = [temporary.bytes for temporary in found.temporaries]
    assert sizes == sorted(sizes, reverse=True)
    assert not [t for t in found.temporaries if not t.first <= found.peak_point <= t.last], f"{found.peak_point=}"
    assert len(found.timeline) <= 400
    within = [moment for moment in found.timeline if moment.point < len(used)]
    assert within and not [(moment, used[moment.point]) for moment in within if moment.live_bytes != used[moment.point]]
    assert {"embed", "blocks/up", "head"} <= {moment.path for moment in found.timeline}


class Widths(nn.Module):
    """Two branches, of which one keeps a wide activation for its gradient."""

    wide: str

    @nn.compact
    def __call__(self, x):
        for name in ("one", "other"):
            h = nn.Dense(8192 if name == self.wide else 8, name=f"{name}_up")(x)
            # A sort is fused with nothing: its result is a buffer.
            x = x + nn.Dense(8, name=f"{name}_down")(Sorted(name=f"{name}_sort")(h))
        return x


class Sorted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sort(x, axis=-1)


@pytest.mark.parametrize("wide", ["one", "other"])
def test_read_memory_attributes_the_largest_temporaries_to_the_wide_module(tmp_path, wide):
    model, batch = Widths(wide), jax.ShapeDtypeStruct((512, 8), jnp.float32)
    step, args = lowered_step(model, batch, mesh_of(1, 8), optax.sgd(0.1))
    _, assignment, live_range, names = compiled(step.lower(*args), tmp_path)
    found = read_memory(assignment, live_range, names)
    activation = 512 // 8 * 8192 * 4
    largest = found.temporaries[0]
    assert largest.bytes >= activation
    assert largest.path.startswith(wide)
    share = sum(size for path, size in found.by_module().items() if path.startswith(wide))
    assert share > 0.8 * found.peak_live_bytes


def test_read_memory_reports_zero_bytes_for_a_program_without_temporaries(tmp_path):
    _, assignment, live_range, names = compiled(
        jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((64,), jnp.float32)), tmp_path
    )
    found = read_memory(assignment, live_range, names)
    assert (found.argument_bytes, found.output_bytes, found.temporary_bytes, found.temporaries) == (256, 256, 0, ())


@pytest.mark.libtpu
def test_read_memory_of_a_tpu_step_matches_compiler_sums_and_names_modules():
    """Tiled arrays of whole tiles take their own bytes, so a device's share of the state is known beforehand."""
    mesh = AbstractMesh((1, 4), ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    model, tokens = Blocks(wrap=fsdp), 8192
    batch = jax.ShapeDtypeStruct((4 * tokens, 1024), jnp.bfloat16)
    step, args = lowered_step(model, batch, mesh, optax.adamw(0.1))
    result = compile_for_topology(step, *args, topology="v5e:2x2")
    found = read_memory(result.buffers, result.live_ranges, operation_names(parse(result.hlo)))

    state = 3 * 2 * 4 * 1024 * 2048 * 4 // 4  # weights and two moments: up and down of 4 layers, float32, a quarter
    rest = found.argument_bytes - state - tokens * 1024 * 2
    assert 0 <= rest <= 64 * 1024  # counters and the key, padded
    assert found.argument_bytes == result.memory["argument"]
    assert found.alias_bytes == pytest.approx(state, rel=0.001)
    assert found.alias_bytes == result.memory["alias"]
    assert found.output_bytes == result.memory["output"] - result.memory["alias"]
    assert sum(t.bytes for t in found.temporaries) == found.peak_live_bytes <= found.temporary_bytes
    assert max(recount(result.buffers[result.buffers.index("color 1") :], result.live_ranges)) > 0  # VMEM, left out
    large = [t for t in found.temporaries if t.bytes >= MIB]
    # Nothing is left without a module, but for the loss's own gradient, where the schedule has it live at the peak.
    assert {t.path for t in large if "jvp()" not in t.op_name} == {"blocks", "blocks/up", "blocks/down"}
    hidden = tokens * 2048 * 2
    assert [(t.bytes, t.direction) for t in large][:2] == [(hidden, "recompute"), (hidden, "backward")]
    assert found.total_bytes < CHIPS["v5e"].usable_hbm_bytes


class Blocks(nn.Module):
    wrap: Callable

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(nn.remat(self.wrap(MLP)), variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return layers(name="blocks")(x, None)[0]


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.Dense(2048, use_bias=False, dtype=jnp.bfloat16, name="up")(x)
        return x + nn.Dense(x.shape[-1], use_bias=False, dtype=jnp.bfloat16, name="down")(nn.gelu(h)), None


HLO = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,8]{1,0})->f32[8,8]{1,0}}

ENTRY %main.5 (param.1: f32[8,8]) -> f32[8,8] {
  %param.1 = f32[8,8]{1,0} parameter(0), metadata={op_name="state.params['head']['kernel']"}
  %convert.7 = bf16[8,8]{1,0} convert(%param.1)
  %dot.1 = f32[8,8]{1,0} dot(%convert.7, %convert.7), metadata={op_name="jit(step)/M/head/dot_general"}
  %copy-start.1 = (f32[8,8]{1,0}, f32[8,8]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%dot.1)
  ROOT %copy-done.1 = f32[8,8]{1,0} copy-done(%copy-start.1)
}
"""


def test_operation_names_gives_inserted_instructions_the_name_of_the_source_operation():
    kernel, product = "state.params['head']['kernel']", "jit(step)/M/head/dot_general"
    assert operation_names(parse(HLO)) == {
        "param.1": kernel,
        "convert.7": kernel,
        "dot.1": product,
        "copy-start.1": product,
        "copy-done.1": product,
    }
