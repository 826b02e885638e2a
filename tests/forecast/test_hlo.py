"""Compiled programs are read as XLA wrote them: types, groups of devices, and how often each loop runs."""

import itertools
import re
from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.forecast.compiling.compile import compile_for_topology
from xlstm_jax.forecast.hlo.device_groups import axes_of_groups, replica_groups
from xlstm_jax.forecast.hlo.instruction import parse_instruction
from xlstm_jax.forecast.hlo.program import parse


def compiled_text(fn, *args):
    return jax.jit(fn).lower(*args).compile().as_text()


def loop_trips(program):
    """Trips of every loop body, largest last."""
    bodies = [
        i.callees_by_role["body"][0]
        for c in program.computations.values()
        for i in c.instructions
        if i.opcode == "while"
    ]
    return sorted(trips for computation, trips in program.executed() if computation.name in bodies)


def scan(length):
    return lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c) @ c, None), x, length=length)[0]


def nested(x):
    def outer(carry, _):
        return jax.lax.scan(lambda c, _: (jnp.sin(c) @ c, None), carry, length=5)[0] * 2, None

    return jax.lax.scan(outer, x, length=3)[0]


def counting(holds, start, step):
    """A loop whose counter steps from ``start`` as long as ``holds``."""
    return lambda x: jax.lax.while_loop(
        lambda s: holds(s[0]), lambda s: (s[0] + step, jnp.sin(s[1]) @ s[1]), (start, x)
    )[1]


LOOPS = {
    "scan": (scan(6), [6]),
    "two in a row": (lambda x: scan(4)(scan(6)(x)), [4, 6]),
    "nested": (nested, [3, 15]),
    "from 2 to 9": (lambda x: jax.lax.fori_loop(2, 9, lambda i, c: jnp.sin(c + i) @ c, x), [7]),
    "to a bound": (counting(lambda i: i <= 9, 0, 4), [3]),
    "to a bound exactly": (counting(lambda i: i <= 8, 0, 4), [3]),
    "down": (counting(lambda i: i > 0, 10, -3), [4]),
    "down to a bound": (counting(lambda i: i >= 0, 9, -3), [4]),
    "until equal": (counting(lambda i: i != 12, 0, 3), [4]),
    "down until equal": (counting(lambda i: i != 0, 7, -1), [7]),
    "from a shifted counter": (lambda x: jax.lax.fori_loop(-3, 4, lambda i, c: jnp.sin(c + i) @ c, x), [7]),
}


@pytest.mark.parametrize("name", LOOPS)
def test_parse_counts_trips_of_constant_length_loops_compiled_for_cpu(name):
    fn, want = LOOPS[name]
    program = parse(compiled_text(fn, jnp.ones((8, 8))))
    assert loop_trips(program) == want
    assert program.unknown_loops == ()


@pytest.mark.libtpu
def test_parse_counts_loop_trips_of_tpu_programs_without_a_compiler_trip_count():
    """Its compiler writes no known_trip_count."""
    whole = NamedSharding(DeviceMeshManager.create_abstract_mesh({"fsdp": 1}), P())
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=whole)
    fns, trips = zip(*LOOPS.values(), strict=True)
    text = compile_for_topology(jax.jit(lambda x: [fn(x + i) for i, fn in enumerate(fns)]), x, topology="v5e:1x1").hlo
    program = parse(text)
    assert "known_trip_count" not in text and program.unknown_loops == ()
    assert loop_trips(program) == sorted(itertools.chain.from_iterable(trips))

    away = jax.jit(counting(lambda i: i < 100, 3, -1))  # it ends where the counter overflows
    assert len(parse(compile_for_topology(away, x, topology="v5e:1x1").hlo).unknown_loops) == 1


def test_parse_counts_a_convergence_loop_once_and_lists_the_loop_as_unknown():
    fn = partial(jax.lax.while_loop, lambda x: jnp.max(x) > 1e-3, lambda x: jnp.sin(x) / 2)
    program = parse(compiled_text(fn, jnp.ones((8, 8))))
    assert loop_trips(program) == [1]
    (loop,) = program.unknown_loops
    assert loop.endswith("/while")


def test_parse_lists_a_loop_bounded_by_an_argument_as_unknown():
    program = parse(compiled_text(lambda n, x: jax.lax.fori_loop(0, n, lambda i, c: c @ c, x), 3, jnp.ones((8, 8))))
    assert loop_trips(program) == [1] and len(program.unknown_loops) == 1


def test_parse_lists_an_inner_loop_of_varying_length_as_unknown():
    def fn(x):
        return jax.lax.fori_loop(0, 4, lambda i, c: jax.lax.fori_loop(0, i, lambda j, d: jnp.sin(d) @ d, c), x)

    program = parse(compiled_text(fn, jnp.ones((8, 8))))
    assert len(program.unknown_loops) == 1
    assert loop_trips(program) == [4, 4]


def test_executed_includes_all_branches_but_no_fusions_or_reducers():
    def fn(i, x):
        return jax.lax.switch(i, [jnp.sin, lambda x: x @ x, lambda x: jnp.cumsum(x, 0)], x).sum()

    program = parse(compiled_text(fn, 1, jnp.ones((8, 8))))
    executed = {computation.name: trips for computation, trips in program.executed()}
    conditional = next(i for c in program.computations.values() for i in c.instructions if i.opcode == "conditional")
    assert len(conditional.callees_by_role["branches"]) == 3
    branches = conditional.callees_by_role["branches"]
    assert {name: executed.get(name) for name in branches} == dict.fromkeys(branches, 1)
    inside = {
        name
        for computation in program.computations.values()
        for i in computation.instructions
        if i.opcode in ("fusion", "reduce")
        for names in i.callees_by_role.values()
        for name in names
    }
    assert inside and not inside & set(executed)


def test_schedule_of_gives_fusions_the_caller_schedule_and_loop_bodies_a_separate_schedule():
    program = parse(compiled_text(scan(3), jnp.ones((8, 8))))
    calls = [(c, i) for c in program.computations.values() for i in c.instructions]
    fused = {name: c.name for c, i in calls if i.opcode == "fusion" for name in i.called_names}
    (body,) = [i.callees_by_role["body"][0] for _, i in calls if i.opcode == "while"]
    assert body in fused.values()  # guard
    own = {name: name for name in (body, program.entry.name)}
    assert {name: program.schedule_of(program.computations[name]) for name in fused | own} == fused | own


def test_parse_keeps_instructions_in_the_order_of_the_text():
    text = compiled_text(lambda x: jnp.sin(x @ x) @ x, jnp.ones((8, 8)))
    entry = parse(text).entry
    lines = text[text.index("ENTRY") :].splitlines()[1:]
    assert [i.name for i in entry.instructions] == [
        re.search(r"%([\w.\-]+) =", line)[1] for line in lines if "=" in line
    ]
    assert entry.root is entry.instructions[-1] or entry.root.is_root


# What a TPU writes: no known_trip_count, the bound in the condition, the step in the body.
TPU_LOOPS = """HloModule jit_step, is_scheduled=true, num_partitions=8

%inner_body (wide.param.4: (s32[], bf16[8,128], s32[])) -> (s32[], bf16[8,128], s32[]) {
  %constant.180.clone..sunk = s32[]{:T(128)} constant(1)
  %wide.param.4 = CARRY parameter(0)
  %gte.1 = s32[]{:T(128)} get-tuple-element(%wide.param.4), index=0
  %copy.22 = s32[]{:T(128)S(6)} copy(%gte.1)
  %add.269 = s32[]{:T(128)} add(%copy.22, %constant.180.clone..sunk), metadata={op_name="jit(step)/while/body/add"}
  %gte.2 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.4), index=1
  %gte.3 = s32[]{:T(128)} get-tuple-element(%wide.param.4), index=2
  ROOT %tuple.71 = CARRY tuple(%add.269, %gte.2, %gte.3)
}

%inner_condition (wide.param.1: (s32[], bf16[8,128], s32[])) -> pred[] {
  %wide.param.1 = CARRY parameter(0)
  %constant.12 = s32[]{:T(128)} constant(6)
  %gte.4 = s32[]{:T(128)} get-tuple-element(%wide.param.1), index=0
  ROOT %lt.12 = pred[]{:T(512)} compare(%gte.4, %constant.12), direction=LT
}

%outer_body (param.7: (s32[], bf16[8,128], s32[])) -> (s32[], bf16[8,128], s32[]) {
  %constant.9 = s32[]{:T(128)} constant(0)
  %constant.10 = s32[]{:T(128)} constant(1)
  %param.7 = CARRY parameter(0)
  %gte.6 = s32[]{:T(128)} get-tuple-element(%param.7), index=0
  %gte.7 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%param.7), index=1
  %gte.8 = s32[]{:T(128)} get-tuple-element(%param.7), index=2
  %tuple.8 = CARRY tuple(%constant.9, %gte.7, %gte.8)
  %while.30 = CARRY while(%tuple.8), condition=%inner_condition, body=%inner_body
  %gte.9 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%while.30), index=1
  %add.11 = s32[]{:T(128)} add(%gte.6, %constant.10)
  ROOT %tuple.9 = CARRY tuple(%add.11, %gte.9, %gte.8)
}

%outer_condition (param.8: (s32[], bf16[8,128], s32[])) -> pred[] {
  %constant.161.clone.1 = s32[]{:T(128)} constant(3), metadata={op_name="jit(step)/shard_map" stack_frame_id=5}
  %param.8 = CARRY parameter(0)
  %gte.10 = s32[]{:T(128)} get-tuple-element(%param.8), index=0
  ROOT %lt.13 = pred[]{:T(512)} compare(%gte.10, %constant.161.clone.1), direction=LT
}

ENTRY %main (param.9: bf16[8,128]) -> bf16[8,128] {
  %constant.1 = s32[]{:T(128)} constant(0)
  %constant.2 = s32[]{:T(128)} constant(6)
  %param.9 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="batch[\\'x\\']"}
  %copy.74 = s32[]{:T(128)} copy(%constant.1)
  %copy-start = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, bf16[8,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%param.9)
  %copy-done = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %tuple.80 = CARRY tuple(%copy.74, %copy-done, /*index=2*/%constant.2)
  %while.31 = CARRY while(%tuple.80), condition=%outer_condition, body=%outer_body
  ROOT %element = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%while.31), index=1
}
"""
TPU_LOOPS = TPU_LOOPS.replace(
    "CARRY", "(s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, /*index=2*/s32[]{:T(128)})"
)


def test_parse_counts_tpu_loop_trips_through_copies_of_the_counter():
    program = parse(TPU_LOOPS)
    executed = {computation.name: trips for computation, trips in program.executed()}
    assert executed == {
        "main": 1,
        "outer_body": 3,
        "outer_condition": 3,
        "inner_body": 18,
        "inner_condition": 18,
    }
    assert program.num_partitions == 8
    assert program.entry.by_name["param.9"].op_name == "batch['x']"


def test_parse_reads_short_tuple_elements_like_get_tuple_element():
    """Newer compilers' dumps leave get-tuple-element out: ``%while.30#1``."""
    elements = dict(re.findall(r"  %(gte\.\d+) = .* get-tuple-element\((%[\w.\-]+)\), index=\d+", TPU_LOOPS))
    indices = dict(re.findall(r"  %(gte\.\d+) = .* get-tuple-element\(.*\), index=(\d+)", TPU_LOOPS))
    short = re.sub(r"  %gte\.\d+ = .*\n", "", TPU_LOOPS)
    for name, of in elements.items():
        short = re.sub(rf"%{re.escape(name)}\b", f"{of}#{indices[name]}", short)
    assert "get-tuple-element" in TPU_LOOPS and "%gte" not in short and "%while.30#1" in short
    program, full = parse(short), parse(TPU_LOOPS)
    assert [(c.name, n) for c, n in program.executed()] == [(c.name, n) for c, n in full.executed()]
    got, want = (p.computations["outer_body"].by_name[name] for p, name in ((program, "while.30#1"), (full, "gte.9")))
    assert (got.opcode, got.shapes, got.operands, got.tuple_index) == (
        want.opcode,
        want.shapes,
        want.operands,
        want.tuple_index,
    )


@pytest.mark.parametrize(
    "start, bound, step, direction, trips",
    [
        (0, 6, 1, "LT", 6),
        (0, 6, 4, "LT", 2),
        (0, 6, 2, "LE", 4),
        (0, 6, 2, "NE", 3),
        (0, 6, 4, "NE", None),  # it steps over its bound
        (6, 0, -1, "GT", 6),
        (6, 0, -2, "GE", 4),
        (6, 6, 1, "LT", 0),
        (0, 6, -1, "LT", None),  # it counts away from its bound
    ],
)
def test_parse_counts_trips_for_any_counter_start_bound_step_and_comparison(start, bound, step, direction, trips):
    text = TPU_LOOPS.replace(
        "%constant.9 = s32[]{:T(128)} constant(0)", f"%constant.9 = s32[]{{:T(128)}} constant({start})"
    )
    text = text.replace(
        "%constant.12 = s32[]{:T(128)} constant(6)", f"%constant.12 = s32[]{{:T(128)}} constant({bound})"
    )
    text = text.replace("clone..sunk = s32[]{:T(128)} constant(1)", f"clone..sunk = s32[]{{:T(128)}} constant({step})")
    program = parse(text.replace("%constant.12), direction=LT", f"%constant.12), direction={direction}"))
    runs = {computation.name: n for computation, n in program.executed()}
    assert runs["inner_body"] == 3 * (1 if trips is None else trips)
    assert program.unknown_loops == (("while.30",) if trips is None else ())


def test_parse_lists_a_loop_with_a_doubled_counter_as_unknown():
    doubled = TPU_LOOPS.replace("add(%copy.22, %constant.180.clone..sunk)", "add(%copy.22, %copy.22)")
    program = parse(doubled)
    assert program.unknown_loops == ("while.30",)
    assert {c.name: n for c, n in program.executed()}["inner_body"] == 3


def test_parse_instruction_cuts_a_line_at_the_parentheses_of_its_operands():
    call = "  ROOT %f.1 = (f32[2]{0:T(8)}, s32[]) fusion(f32[2] %a(x).2, %b.3), kind=kLoop, calls=%g"
    found = parse_instruction(call)
    assert (found.name, found.opcode, found.is_root) == ("f.1", "fusion", True)
    assert found.type_text == "(f32[2]{0:T(8)}, s32[])" and found.operand_text == "f32[2] %a(x).2, %b.3"
    assert found.attributes == ", kind=kLoop, calls=%g" and found.called_names == ("g",)
    found = parse_instruction("  c = s32[] constant(7)")
    assert (found.name, found.operand_text, found.attributes, found.is_root) == ("c", "7", "", False)
    assert parse_instruction("ENTRY %main (x: f32[]) -> f32[] {") is None
    with pytest.raises(ValueError, match="no opcode in this line of HLO text: '%a = f32'"):
        parse_instruction("  %a = f32")
    with pytest.raises(ValueError, match="a parenthesis is left open in this line of HLO text: '%a = f32"):
        parse_instruction("  %a = f32[] add((%b, %c)")


@pytest.mark.parametrize(
    "text, want",
    [
        ("f32[6,1024,10]{2,1,0:T(8,128)}", [("f32", (6, 1024, 10), 0, 245760)]),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", [("bf16", (8, 128), 1, 2048)]),
        ("s32[]{:T(128)S(6)}", [("s32", (), 6, 4)]),
        ("pred[3]{0}", [("pred", (3,), 0, 3)]),
        ("f8e4m3fn[4,4]{1,0}", [("f8e4m3fn", (4, 4), 0, 16)]),
        ("s4[10]{0:T(256)E(4)}", [("s4", (10,), 0, 5)]),
        ("s4[10]{0}", [("s4", (10,), 0, 10)]),
        ("f32[<=16,2]{1,0}", [("f32", (16, 2), 0, 128)]),
        ("token[]", [("token", (), 0, 0)]),
        (
            "((f32[8]{0:T(128)}), f32[2]{0:T(128)S(1)}, /*index=2*/u32[]{:S(2)})",
            [("f32", (8,), 0, 32), ("f32", (2,), 1, 8), ("u32", (), 2, 4)],
        ),
    ],
)
def test_parse_instruction_reads_dtype_dims_memory_space_and_bytes_of_a_type(text, want):
    instruction = parse_instruction(f'  %x.1 = {text} custom-call(%a, /*index=1*/%b-c.2), custom_call_target="f(%d)"')
    assert [(s.dtype, s.dims, s.space, s.nbytes) for s in instruction.shapes] == want
    assert (instruction.name, instruction.opcode, instruction.operands) == ("x.1", "custom-call", ("a", "b-c.2"))


@pytest.mark.parametrize(
    "text, want",
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", ((0, 1), (2, 3))),
        ("replica_groups={}, to_apply=%add", ()),
        ("replica_groups=[2,4]<=[8], x", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['dp'=2,'fsdp'=4] {'fsdp'}, x", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['dp'=2,'fsdp'=4] {'dp'}, x", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['dp'=2,'fsdp'=2] {'dp','fsdp'}, x", ((0, 1, 2, 3),)),
        (
            "replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=1,'axis_3'=2], device_ids=([2,4]T(1,0)) {'axis_1'}, x",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        ("replica_groups=mesh['a'=8] {'a':(1)2}, x", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=8] {'a':(4)2}, x", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("dimensions={0}", ()),
    ],
)
def test_replica_groups_reads_every_notation_of_device_groups(text, want):
    assert replica_groups(text) == want


AXES = {"a": 2, "b": 1, "c": 2, "d": 2}
SUBSETS = [axes for n in (1, 2, 3) for axes in combinations(("a", "c", "d"), n)]


@pytest.mark.parametrize("axes", SUBSETS, ids=str)
def test_axes_of_groups_finds_the_mesh_axes_of_a_psum(axes):
    mesh = DeviceMeshManager.create_device_mesh(AXES)
    fn = jax.shard_map(
        lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=P(tuple(AXES)), out_specs=P(), check_vma=False
    )
    program = parse(compiled_text(fn, jnp.ones((8, 4))))
    reduce = next(i for i in program.entry.instructions if i.opcode == "all-reduce")
    assert axes_of_groups(reduce.groups, AXES) == axes
    assert [len(group) for group in reduce.groups] == [2 ** len(axes)] * (8 // 2 ** len(axes))
    ids = np.arange(8).reshape(2, 1, 2, 2)  # and the groups themselves, one index per axis that is not reduced
    kept = [slice(None) if axis in axes else 0 for axis in AXES]
    assert set(ids[tuple(kept)].ravel().tolist()) in [set(group) for group in reduce.groups]


def test_axes_of_groups_returns_none_for_groups_along_no_mesh_axis():
    assert axes_of_groups(((0, 1), (2, 3)), {"dp": 2, "fsdp": 2}) == ("fsdp",)
    assert axes_of_groups(((0, 3), (1, 2)), {"dp": 2, "fsdp": 2}) is None
    assert axes_of_groups(((0,), (1,)), {"dp": 2}) == ()


def test_replica_groups_joins_source_target_pairs_of_rings_and_chains():
    chains = "source_target_pairs={{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}"
    assert replica_groups(chains) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert replica_groups("source_target_pairs={{0,4},{4,0},{1,5},{5,1}}, metadata={a}") == ((0, 4), (1, 5))
    assert replica_groups("source_target_pairs={}, metadata={{a}}") == ((0,),)
