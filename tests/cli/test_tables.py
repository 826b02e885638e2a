"""Every table shows every cell in full, in terminals of 60 to 140 columns.

A cell of up to 24 characters stands on one line, with the table's gap or edge on both sides of it. A longer one may go
on in the next line, in the same column, where it has a space. Beside cells, headers and the title nothing is printed,
and no line is wider than the terminal. All of it holds for the output as a user sees it, not for how it is made.
"""

import ast
import dataclasses
import functools
import io
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table

from xlstm_jax.cli import doctor, self_test
from xlstm_jax.cli.example import training
from xlstm_jax.cli.self_test import Check
from xlstm_jax.distributed.optimizers.offload import NO_OFFLOAD, Offload
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.distributed.plan.table import LEFT_OUT
from xlstm_jax.forecast import CHIPS, Forecast, Range
from xlstm_jax.forecast.cost.collective_traffic import Collective, Overlap, Timing
from xlstm_jax.forecast.cost.flops import Flops, Work
from xlstm_jax.forecast.cost.memory import Memory, Moment, Temporary
from xlstm_jax.forecast.cost.roofline import Roofline
from xlstm_jax.forecast.forecasting import CPU_NOTE, GPU_NOTE, rates_note
from xlstm_jax.forecast.report import _array, owners_of
from xlstm_jax.forecast.training.fitting import Fit, Options, Trial
from xlstm_jax.forecast.training.linting.lint import Finding
from xlstm_jax.forecast.training.linting.lint import table as lint_table
from xlstm_jax.formatting import MIN_WIDTH, FirstFitting, format_milliseconds, rich_table

ROOT = Path(__file__).parents[2]
WIDTHS = [60, 80, 100, 140]


def shown(renderable, width):
    """The lines that a terminal of this width shows."""
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def tables_in(renderable):
    """The tables of a report; of those with fewer and fewer columns only the first, which has all."""
    if isinstance(renderable, Group):
        return [table for part in renderable.renderables for table in tables_in(part)]
    if isinstance(renderable, FirstFitting):
        return tables_in(renderable.tables[0])
    return [renderable] if isinstance(renderable, Table) else []


def plain(cell):
    return str(cell.renderable if isinstance(cell, Padding) else cell)


def cells_of(table):
    return [plain(cell) for column in table.columns for cell in column.cells if plain(cell)]


START, END = r"(?:(?<=^)|(?<=^ )|(?<=  ))", r"(?=  |$)"


def times_whole(lines, cell):
    """How often a cell stands on one line, with nothing beside it but gaps."""
    pattern = re.compile(f"{START}{re.escape(cell)}{END}")
    return sum(len(pattern.findall(line)) for line in lines)


def is_folded(lines, words, place=None):
    """Whether words stand one behind the other in a column: those of one line beside each other, the rest below."""
    if not words:
        return True
    for count in range(len(words), 0, -1):
        pattern = re.compile(f"{START}{re.escape(' '.join(words[:count]))}{END}")
        found = [(y, match.start()) for y, line in enumerate(lines) for match in pattern.finditer(line)]
        if any(is_folded(lines, words[count:], (y + 1, x)) for y, x in found if place in (None, (y, x))):
            return True
    return False


def missing(table, width):
    """The cells of a table that a terminal does not show, and what else is wrong with what it shows."""
    lines, cells = shown(table, width), cells_of(table)
    wrong = [
        f"{cell!r}: {seen} of {count}"
        for cell, count in Counter(cells).items()
        if len(cell) <= MIN_WIDTH and (seen := times_whole(lines, cell)) < count
    ]
    wrong += [repr(cell) for cell in cells if len(cell) > MIN_WIDTH and not is_folded(lines, cell.split())]
    texts = [*cells, *(str(column.header) for column in table.columns), str(table.title), str(table.caption or "")]
    known = {word for text in texts for word in text.split()}
    seen = {word for line in lines for word in line.split() if set(word) != {"\u2500"}}
    wrong += [f"too wide: {line!r}" for line in lines if len(line) > width]
    wrong += [f"{word!r} is not shown" for word in known - seen]
    return wrong + [f"{word!r} is in no cell" for word in seen - known]


def made_once(tables):
    """A function that returns the tables of a name, which ``tables[name]()`` makes when they are first asked for."""
    return functools.cache(lambda name: tables_in(tables[name]()))


def assert_shown_in_full(tables, width):
    """That there are tables with cells, and that no cell of any lacks a part."""
    assert tables and all(cells_of(table) for table in tables)
    assert not [wrong for table in tables for wrong in missing(table, width)]


# ---------------------------------------------------------------------------------------------------------- the tables

LONG_PATH = "decoder/layers_*/attention/query/kernel"
WHY = "the compiler refuses it: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 31.25G of 15.75G hbm."


def of_a_plan():
    some = training()
    return plan_sharding(some.model, {"dp": 4, "fsdp": 64}, *some.init_inputs, tx=some.tx).table()


def of_a_forecast():
    return forecast_of_a_tpu().table()


def of_a_forecast_of_gpus():
    """With numbers as long as they come: many collectives, on both networks."""
    found = forecast_of_a_tpu()
    times = Timing(("NVLink", "network"), 1.5 * 2**30, 0.1234, 0.000567, 0.1239, 0.1228, 0.1834, "Tree LL128")
    alone = dataclasses.replace(times, networks=("NVLink",), nic_bytes=0.0)
    beside = dataclasses.replace(found.collectives[0].overlapped, seconds=0.0000213, product_seconds=0.0)
    first, *others = (dataclasses.replace(c, overlapped=beside, timing=alone) for c in found.collectives)
    collectives = (dataclasses.replace(first, timing=times), *others)
    gpus = {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3", "topology": "h100:32x8", "cycles": None}
    times = {"kernel_seconds": 0.0746, "expected_kernel_seconds": 0.1046}
    notes = (GPU_NOTE, rates_note(CHIPS["h100"]))
    return dataclasses.replace(found, **gpus, collectives=collectives, notes=notes, **times).table()


def collective(kind, modules, axes=("fsdp",), **more):
    known = {"count": 2048, "dtype": "f32", "payload_bytes": 2**31, "wire_bytes": 2.99 * 2**30, "group_size": 8}
    known |= {"stands_for": None, "op_name": "", "leaves": (), "direction": "backward", "asynchronous": False}
    known |= {"alone_s": 0.0123, "exposed_s": 0.0012}
    return Collective(name=kind, kind=kind, modules=modules, axes=axes, **known | more)


def forecast_of_a_tpu():
    """One that a TPU may have: names as long as a user's, several arrays in one collective."""
    beside = Overlap(("decoder/layers", "head"), 0, cycles=12345678)
    gather = {"leaves": (LONG_PATH,), "asynchronous": True, "overlapped": beside, "direction": "forward"}
    collectives = (
        collective("all-gather", ("",), ("fsdp_x",), **gather),
        collective("all-reduce", ("decoder/layers/mlp/up",), stands_for="reduce-scatter"),
        collective("reduce-scatter", ("embed",), ("dp", "fsdp_x", "fsdp_y"), count=12, dtype="bf16"),
    )
    shapes = ["f32[12,1,1,8,1024,1024]", "bf16[2048,32000]", *(f"f32[{n},1024]" for n in range(20))]
    temporaries = tuple(
        Temporary(2**28 // (i + 1), shape, "fusion", "", "decoder/layers", "forward", 0, 1)
        for i, shape in enumerate(shapes)
    )
    return Forecast(
        platform="tpu",
        device_kind="TPU v5 lite",
        topology="v5e:16x16",
        axis_sizes={"fsdp": 8},
        memory=Memory(2**30 + 5, 324, 48, 2**31, 12345, temporaries=temporaries),
        code_bytes=0,
        available_bytes=16 * 2**30,
        collectives=collectives,
        flops=Flops((Work("", "forward", "float32", 2048.0), Work("", "backward", "float32", 2048.0)), (), ()),
        cycles=115877905,
        hbm_bytes=None,
        tokens=None,
        unknown_loops=("jit(step)/shard_map/jvp()/while",),
        compile_seconds=0.5,
        versions={},
        notes=(CPU_NOTE,),
        shared_flops=0.0,
        roofline=Roofline(0.0627, 0.0218, 1.0607, 1.24e13, 16.6 * 2**30, 10.2 * 2**30),
        exposed_seconds=0.0518,
    )


def of_lint():
    """The sentences are those of rules."""
    cure = "Pass gather_dtype=bfloat16 to the shard_module_params around it in the step too, and compute in it."
    text = "travels as f32, where its wrapper asked for bfloat16: 1.49 GiB per device and step instead of 765 MiB."
    return lint_table(
        [
            Finding("all-reduce-of-shards", f"{LONG_PATH}, head/kernel, embed/embedding", text, cure, 10**9),
            Finding("wide-gather", "head/kernel", text, cure, 2**20),
        ]
    )


def of_fit():
    mesh, times = {"fsdp_x": 16, "fsdp_y": 16}, Range(0.0215, 0.0373, 0.0412)
    figures = SimpleNamespace(total_bytes=2**30 + 2**27, step_seconds=times.expected, step_time=times, has_margin=True)
    best = Trial(Options(mesh, keep_gathered=False), figures, fits=True)
    large = Trial(Options({"dp": 16, "fsdp_y": 16}, remat=True, num_minibatches=64), figures, fits=False)
    failed = Trial(Options({"fsdp": 256}), None, fits=False, problem=WHY)
    return Fit("v5e:16x16", 14 * 2**30, (best, large, failed)).table()


def of_doctor():
    """With a self-test that failed by an exception, and without a single extra."""
    names = self_test.Check("make_train_step, 3 steps of AdamW, check_vma=False", "2.1e-06", "at most 1e-04", True)
    versions = {"python": "3.11.7", "jax": "0.10.2", "jax-cuda13-plugin": None}
    everything = doctor.missing_extras({extra: ["nowhere"] for extra in doctor.USES})
    found = doctor.Diagnosis(versions, everything, "", "8 devices", (names, Check("JAX starts", WHY, "", False)))
    return Group(*found.tables())


TABLES = {
    "plan": of_a_plan,
    "forecast": of_a_forecast,
    "forecast of GPUs": of_a_forecast_of_gpus,
    "lint": of_lint,
    "fit": of_fit,
    "doctor": of_doctor,
}


made = made_once(TABLES)


def test_collectives_table_puts_a_collective_of_unknown_wait_last_without_time():
    found = forecast_of_a_tpu()
    first, *others = found.collectives
    collectives = (dataclasses.replace(first, alone_s=None, exposed_s=None), *others)
    tables = tables_in(dataclasses.replace(found, collectives=collectives).table())
    (table,) = [table for table in tables if "Waits for collectives" in str(table.title)]
    kinds, *_, waited = ([plain(cell) for cell in column.cells] for column in table.columns)
    assert kinds[-1] == "all-gather" and waited[-1] == "" and all(waited[:-1])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TABLES)
def test_every_cell_of_every_table_is_shown_in_full(name, width):
    assert_shown_in_full(made(name), width)


@pytest.mark.parametrize("offload", [NO_OFFLOAD, Offload()], ids=["on the device", "offload"])
@pytest.mark.parametrize("width", [80, 90, 100, 110, 140])
def test_plan_table_has_a_single_line_per_leaf_from_80_columns(width, offload):
    some = training()
    plan = plan_sharding(some.model, {"dp": 4, "fsdp": 64}, *some.init_inputs, tx=some.tx, offload=offload)
    leaves = plan.table().renderables[0]
    drawn = leaves.chosen(Console(width=width), Console(width=width).options)
    lines, (every, *_) = shown(leaves, width), leaves.tables
    assert not missing(drawn, width)
    rows = list(zip(*([plain(cell) for cell in column.cells] for column in drawn.columns), strict=True))
    assert len(rows) > 10 and any("12×4096×1024" in cell for row in rows for cell in row)  # guard
    in_lines = {" ".join(line.split()) for line in lines}
    assert not [row for row in rows if " ".join(" ".join(row).split()) not in in_lines]
    if left := left_out(every, drawn):
        assert f"A wider terminal also shows: {', '.join(left)}." in " ".join(" ".join(lines).split())
    assert left if width == 80 else width < 140 or not left


def left_out(every, drawn):
    """The columns that a plan leaves out, the first one first."""
    shown_columns = {str(column.header) for column in drawn.columns}
    return [
        name
        for name in ("decays", *LEFT_OUT)
        if name in {str(column.header) for column in every.columns} - shown_columns
    ]


def test_plan_table_in_a_narrow_terminal_has_all_columns():
    leaves = of_a_plan().renderables[0]
    assert leaves.chosen(Console(width=60), Console(width=60).options) is leaves.tables[0]
    assert leaves.chosen(Console(width=80), Console(width=80).options) is not leaves.tables[0]  # guard


def test_format_milliseconds_shows_negligible_times_as_0_ms():
    """2.06e-07 ms stood in a table of waits."""
    assert [format_milliseconds(seconds) for seconds in (2.06e-10, 4.9e-7, -1e-9, 0.0)] == ["0 ms"] * 4
    assert [format_milliseconds(seconds) for seconds in (6e-7, 0.000567, 0.0999, 0.1, 1.5)] == [
        "0.0006 ms",
        "0.567 ms",
        "99.9 ms",
        "100 ms",
        "1,500 ms",
    ]
    found = forecast_of_a_tpu()
    beside = dataclasses.replace(found.collectives[0].overlapped, seconds=2.06e-13)
    some = (dataclasses.replace(found.collectives[0], overlapped=beside), *found.collectives[1:])
    lines = "\n".join(shown(dataclasses.replace(found, collectives=some).table(), 140))
    assert not re.search(r"e-\d+ ms", lines) and " 0 ms" in lines


@pytest.mark.parametrize("width", [20, 30, 41, 53, 67, 79, 121])
def test_rich_table_shows_random_rows_in_full_at_any_width(width):
    """Down to terminals of 20 columns, whose words still fit."""
    random = np.random.default_rng(width)
    words = ["a", "of", "22", "MiB", "4.5", "per", "device", "fsdp_x=16", "kernel/up"]
    for columns in range(1, 9):
        rows = [[" ".join(random.choice(words, random.integers(0, 9))) for _ in range(columns)] for _ in range(4)]
        rows = [[cell if len(cell) > MIN_WIDTH or len(cell) < 14 else cell[:5].strip() for cell in row] for row in rows]
        left = int(random.integers(0, columns + 1))
        headers = [" ".join(random.choice(words, random.integers(1, 4))) for _ in range(columns)]
        assert not missing(rich_table("Some", headers, rows, left=left, right=columns - left), width), (columns, rows)


def test_rich_table_folds_headers_before_cells():
    cell = "the schedule waits for it likewise"
    table = rich_table("", ["weights", "a long header of several words", "bytes"], [[cell, "few", "22 MiB"]], left=2)
    lines = shown(table, 60)
    assert times_whole(lines, cell) == 1
    assert times_whole(lines, "a long header of several words") == 0  # guard: something had to fold


def test_rich_table_breaks_a_word_longer_than_the_terminal_without_loss():
    word = "0123456789" * 9
    lines = shown(rich_table("", ["path", "bytes"], [[word, "22 MiB"]]), 40)
    assert word in "".join(line.strip() for line in lines) and times_whole(lines, "22 MiB") == 1


def test_missing_detects_cells_cut_by_plain_rich_tables():
    """``rich`` alone cuts numbers and breaks words."""
    alone = Table(title="Cut", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("leaf", "sent per device", "gathered"):
        alone.add_column(name, no_wrap=name != "leaf")
    alone.add_row("blocks/attention/kernel", "22 MiB", "4.5 MiB")
    assert not missing(alone, 80)
    assert "'4.5 MiB': 0 of 1" in missing(alone, 25)
    assert any("is in no cell" in wrong for wrong in missing(alone, 25))


@pytest.mark.parametrize(
    "leaves, modules, said",
    [
        (("blocks/up/kernel",), ("blocks/up",), "blocks/up/kernel"),
        (("a/kernel", "b/kernel"), ("a", "b"), "2 leaves together: a/kernel, b/kernel"),
        (tuple("abcde"), ("",) * 5, "5 leaves together: a, b, c, ..."),
        ((), ("blocks/up", "blocks/down"), "blocks"),
        ((), ("blocks/up", "head", "head"), "2 modules together"),
        ((), ("",), "(no module)"),
    ],
)
def test_collectives_table_names_leaves_and_modules_sent_together(leaves, modules, said):
    together = collective("all-gather", modules, leaves=leaves)
    (row,) = cells_of(tables_in(dataclasses.replace(forecast_of_a_tpu(), collectives=(together,)).table())[3])[2:3]
    assert row == said


def schedule(*stretches):
    """A timeline of (module, direction, moments)."""
    moments = [(path, direction) for path, direction, count in stretches for _ in range(count)]
    return tuple(Moment(point, 2**30, path, direction) for point, (path, direction) in enumerate(moments))


def test_module_labels_of_the_memory_plot_do_not_overlap(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    outside, ahead, back = ("", "other", 3), ("blocks/up", "forward", 12), ("blocks/up", "backward", 12)
    timeline = schedule(
        *(("embed", "forward", 10), outside, ahead, outside, ahead, ("embed", "forward", 1), ("head", "forward", 4)),
        *(("a_name_without_room_for_it", "backward", 9), outside, ("blocks/up", "recompute", 3), back, outside),
        *(back, ("embed", "backward", 9), ("", "other", 20)),
    )
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, dpi: figures.append(figure))
    found = forecast_of_a_tpu()
    dataclasses.replace(found, memory=dataclasses.replace(found.memory, timeline=timeline)).plot(tmp_path / "a.png")
    figures[0].draw_without_rendering()
    texts = sorted(figures[0].axes[0].texts, key=lambda text: text.xy[0])
    assert [text.get_text() for text in texts] == ["embed", "blocks", "blocks", "outside of modules"]
    boxes = [text.get_window_extent() for text in texts]
    pairs = [(left.x1, right.x0) for left, right in pairwise(boxes)]
    assert not [(end, start) for end, start in pairs if end >= start], "labels overlap"


def test_owners_of_gives_moments_without_module_to_the_preceding_module():
    timeline = schedule(("a/b", "forward", 1), ("", "other", 2), ("a/b", "backward", 1), ("", "other", 1))
    assert owners_of(timeline) == [("a", "forward")] * 3 + [("a", "backward"), ("", "other")]


def test_array_text_of_a_tuple_states_the_number_of_arrays():
    assert _array("f32[12,1,1024]") == "f32[12,1,1024]"
    loop = "(s32[], bf16[1,2048,2048], /*index=2*/f32[24,2048]{1,0:T(8,128)}, (f32[2,2], u32[]))"
    assert _array(loop) == "tuple of 4 arrays"


@pytest.mark.parametrize("folder", ["xlstm_jax", "benchmarks", "tests/faults"])
def test_only_the_formatting_module_creates_rich_tables(folder):
    """``rich``'s own would cut what does not fit."""
    calls = {
        path.stem
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Table", "Table.grid")
    }
    assert calls <= {"formatting"}
