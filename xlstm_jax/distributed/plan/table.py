"""A sharding plan as tables for people: leaves by module, largest first; then replicated leaves, with the reasons."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from xlstm_jax.distributed.data_parallel.wire.collectives import entry_axes
from xlstm_jax.distributed.plan.leaf_plan import PARAMETERS, ByteCount, LeafPlan
from xlstm_jax.distributed.plan.section import SECTIONS
from xlstm_jax.formatting import TIMES, Bar, FirstFitting, format_bytes, format_fraction, path_pattern, rich_table

HOST = "on its host"  # only with offload
COLUMNS = ("leaf", "shape", "split", "in all", "per device", "its gradient", "optimizer state", HOST, "gathered")
NO_COLUMNS: Mapping[str, Mapping[str, str]] = {}  # a table without the columns of sections
# Columns that a narrow terminal leaves out, in this order, to keep each leaf in one line. The summary under the table
# has the sums of the first three.
LEFT_OUT = ("its gradient", "optimizer state", HOST, "in all")


@dataclass(frozen=True)
class Line:
    """Line of the plan's table: the row of a leaf, and the number of leaves that share the line.

    ``path`` is relative to ``module``; both have ``*`` in place of the numbers that differ between the leaves.
    """

    module: str
    path: str
    row: LeafPlan
    count: int
    section_cells: tuple[str, ...] = ()  # the cells of the sections' columns

    def bytes_of(self, kind: str) -> ByteCount:
        total, per_device = getattr(self.row, kind)
        return ByteCount(total * self.count, per_device * self.count)

    @property
    def all_bytes(self) -> ByteCount:
        return self.bytes_of("all_bytes")

    @property
    def name(self) -> str:
        return f"{self.module}/{self.path}".lstrip("/") + _times(self.count)


def plan_table(plan: Any) -> Any:
    """Returns the tables of a ``ShardingPlan`` as a ``rich`` group; called by ``ShardingPlan.table``.

    In order: the leaves by module, a summary, the replicated leaves with reasons, and a table per section (experts,
    say).
    """
    columns = _section_columns(plan)
    lines = _lines(plan.rows, columns)
    other = f", other collections {format_bytes(plan.other.per_device)}" if plan.other.total else ""
    host = format_bytes(plan.host.per_device)
    on_host = f"Its host keeps {host} of optimizer state for it.\n" if plan.host.total else ""
    summary = (
        f"Each device keeps {format_bytes(plan.bytes_per_device)}: parameters "
        f"{format_bytes(plan.parameters.per_device)}, gradients {format_bytes(plan.gradients.per_device)}, optimizer "
        f"{format_bytes(plan.optimizer.per_device)}{other}; activations and gathered weights come on top.\n{on_host}"
        f"{format_fraction(plan.replicated_fraction)} of the parameters' bytes are replicated on every device.\n"
    )
    shown: list[RenderableType] = [_leaves_table(plan, lines, list(columns)), Text(summary)]
    replicated = [line for line in lines if line.row.collection == PARAMETERS and line.row.parts == 1]
    if replicated and plan.devices > 1:
        replicated.sort(key=lambda line: -line.all_bytes.per_device)
        rows = [[line.name, format_bytes(line.all_bytes.per_device), str(line.row.reason)] for line in replicated]
        title = "Replicated leaves, and why; bytes with gradient and optimizer state"
        shown.append(rich_table(title, ["leaf", "per device", "reason"], rows, right=1))
    # Sections in reverse order: the model's before the optimizer's.
    tables = [kind.table(entries) for kind in reversed(SECTIONS) if (entries := getattr(plan, kind.name))]
    return Group(*shown, *(table for table in tables if table is not None))


def plan_bars(plan: Any) -> list[Bar]:
    """Returns the bars of a ``ShardingPlan`` for a notebook: a bar for each line of the plan's table, largest first.

    A line stands for a leaf, or for equal leaves of several layers. The size of a bar is the bytes per device of these
    leaves, with gradients and optimizer state. The bar of replicated leaves warns (``Bar.warns``), if the plan has
    several devices.
    """
    is_replicated = {line: line.row.parts == 1 and plan.devices > 1 for line in _lines(plan.rows)}
    ordered = sorted(is_replicated, key=lambda line: -line.all_bytes.per_device)
    sizes = [(line, line.all_bytes.per_device) for line in ordered]
    return [
        Bar(line.name, size, format_bytes(size) + ", replicated" * is_replicated[line], is_replicated[line])
        for line, size in sizes
    ]


def _section_columns(plan: Any) -> dict[str, Mapping[str, str]]:
    """Returns the columns that sections add to the plan's table: {column: {path of a leaf: text of the cell}}.

    A section without a column, or without entries in this plan, is left out.
    """
    return {
        kind.column: kind.cells(getattr(plan, kind.name))
        for kind in SECTIONS
        if kind.column and getattr(plan, kind.name)
    }


def _lines(rows: Iterable[LeafPlan], columns: Mapping[str, Mapping[str, str]] = NO_COLUMNS) -> list[Line]:
    """Returns the lines of a table: rows with equal fields share a line if their paths differ only in the first number.

    ``rows`` are the rows of a plan. ``columns`` has the cells of further columns, {name: {path of a leaf: text}}; rows
    that share a line also have equal cells. The lines are in the order of their first rows.
    """
    alike: dict[Any, list[LeafPlan]] = {}
    for row in rows:
        module = None if row.gathered_with is None else path_pattern(f"{row.gathered_with}/")
        # Two rows are alike if all fields except the paths are equal, and the cells of the sections.
        same = dataclasses.replace(row, path="", gathered_with=module)
        section_cells = tuple(cells.get(row.path, "") for cells in columns.values())
        alike.setdefault((path_pattern(row.path), same, section_cells), []).append(row)
    named = [(key[0] if len(group) > 1 else group[0].path, group, key[2]) for key, group in alike.items()]
    depth = _module_depth([path for path, group, _ in named if group[0].collection == PARAMETERS])
    return [Line(*_module_and_leaf(path, group[0], depth), group[0], len(group), cells) for path, group, cells in named]


def _module_depth(paths: list[str]) -> int:
    """Returns how many leading parts of each path name the module in the table.

    One more than the number of parts that all paths share, so that the table has several modules: 2 for
    ["net/a/kernel", "net/b/kernel"].
    """
    parents = [path.split("/")[:-1] for path in paths]
    shared = 0
    # Otherwise a model within a wrapper, or a single top module, would be the only module of the table.
    while parents and all(len(p) > shared + 1 for p in parents) and len({p[shared] for p in parents}) == 1:
        shared += 1
    return shared + 1


def _module_and_leaf(path: str, row: LeafPlan, depth: int) -> tuple[str, str]:
    if row.collection != PARAMETERS:
        collection, leaf = path.split(" ", 1)
        return collection, leaf
    parts = path.split("/")
    # The last part of the path is always the name of the leaf.
    cut = min(depth, len(parts) - 1)
    return "/".join(parts[:cut]), "/".join(parts[cut:])


def _leaves_table(plan: Any, lines: list[Line], of_sections: list[str]) -> FirstFitting:
    """Returns the table of leaves as a ``FirstFitting``: tables with fewer and fewer columns, the widest first.

    ``rich`` draws the first of these tables whose rows fit into a line of the terminal. Left out first are
    ``of_sections``, the names of the columns that sections of the plan add (on experts, say); then the columns of
    ``LEFT_OUT``, in order. ``lines`` are the lines of the table.
    """
    names = [name for name in COLUMNS if name != HOST or plan.host.total] + of_sections
    optional = of_sections + [name for name in LEFT_OUT if name in names]
    return FirstFitting(*(_leaves(plan, lines, names, optional[:count]) for count in range(len(optional) + 1)))


def _leaves(plan: Any, lines: list[Line], names: list[str], left_out: list[str]) -> Any:
    """Returns the table of leaves as a ``rich`` table, without the columns ``left_out``, which its caption names.

    Each module has a row with the sums over its leaves, and a row for each of ``lines`` (a leaf, or equal leaves).
    Modules and, within a module, leaves are sorted by total bytes, largest first; the last row is the total. ``names``
    are the names of every column, in order.
    """
    mesh, shown = ", ".join(f"{axis} {size}" for axis, size in plan.axis_sizes.items()), _Columns(names, left_out)
    captions = [f"No module is wrapped; planned as {plan.assumed}."] if plan.assumed else []
    captions += [f"A wider terminal also shows: {', '.join(left_out)}."] if left_out else []
    table = rich_table(
        f"Sharding plan: {plan.devices} device{'s' * (plan.devices > 1)} ({mesh})",
        shown.shown_cells(names),
        left=3,
        caption="".join(f"{text}\n" for text in captions) or None,  # ends with an empty line
        caption_justify="left",
    )
    modules: dict[str, list[Line]] = {}
    empty = [""] * (1 + len(lines[0].section_cells) if lines else 1)  # "gathered", and the columns of the sections
    for line in sorted(lines, key=lambda line: -line.all_bytes.total):
        modules.setdefault(line.module, []).append(line)
    for module in sorted(modules, key=lambda name: -sum(line.all_bytes.total for line in modules[name])):
        table.add_row(
            *shown.shown_cells([module or "(top)", "", "", *_sums(modules[module], HOST in names), *empty]),
            style="bold",
        )
        for line in modules[module]:
            table.add_row(*shown.shown_cells(_cells(line, HOST in names)))
        table.add_section()
    table.add_row(*shown.shown_cells(["total", "", "", *_sums(lines, HOST in names), *empty]), style="bold")
    return table


class _Columns(NamedTuple):
    """Columns of a table, and columns that are not shown."""

    names: list[str]
    left_out: list[str]

    def shown_cells(self, cells: Sequence[Any]) -> list[Any]:
        """Returns the cells of a row without the columns in ``left_out``; ``cells`` has a cell for each column."""
        return [cell for name, cell in zip(self.names, cells, strict=True) if name not in self.left_out]


def _sums(lines: list[Line], offloads: bool) -> list[str]:
    """Returns the cells of a row with the sums over lines of the plan's table, as text: "1 MiB", or "" for 0 bytes.

    In order: total bytes of the values (parameters and further collections), then bytes per device of the values, of
    the gradients, of the optimizer state, and, if ``offloads``, of the optimizer state in host memory.
    """
    values = [line.bytes_of("parameters") + line.bytes_of("other") for line in lines]
    kinds = ["gradients", "optimizer", *["host"] * offloads]
    per_device = [sum(line.bytes_of(kind).per_device for line in lines) for kind in kinds]
    counts = [sum(v.total for v in values), sum(v.per_device for v in values), *per_device]
    return [format_bytes(count) if count else "" for count in counts]


def _cells(line: Line, offloads: bool) -> list[Any]:
    """Returns the cells of the row for a line of the plan's table, one for each column, in order.

    The cells are the leaf's path, dtype and shape, split dims, bytes, gather, and the cells of sections. ``offloads``:
    whether the table has the column for optimizer state in host memory.
    """
    row = line.row
    name = Padding(line.path + _times(line.count), (0, 0, 0, 2))
    split = " ".join(f"{dim}:{'+'.join(entry_axes(row.names[dim]))}" for dim in row.dims)
    gathered = f"{format_bytes(row.gathered_bytes)}{_times(row.uses * line.count)}" if row.uses else ""
    if row.row_bytes:
        gathered += ", or rows"
    if row.piece_bytes:
        gathered += f", or {format_bytes(row.piece_bytes)} at a time"
    # Leaves gathered by the model itself stay in memory until the model returns.
    if row.gathered_with == "" and line.module:
        gathered += " (top)"
    shape, (total, per_device, gradient, *state) = TIMES.join(map(str, row.shape)) or "scalar", _sums([line], offloads)
    cells = [total, per_device, gradient if row.trainable else "frozen", *state]
    return [name, f"{_short(row.dtype)} {shape}", split or "no", *cells, gathered, *line.section_cells]


def _times(count: int) -> str:
    return f" {TIMES}{count}" if count > 1 else ""


def _short(dtype: str) -> str:
    """Returns a dtype in the spelling of compiled programs: ``float32`` -> ``f32``, ``bfloat16`` -> ``bf16``."""
    return re.sub("float|uint|int|complex", lambda name: name[0][0], dtype, count=1)
