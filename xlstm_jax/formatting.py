"""Formats numbers, lists, paths, meshes and tables as text, for errors, reports and the command line."""

import copy
import dataclasses
import html
import io
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.jupyter import JUPYTER_HTML_FORMAT
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

Result = TypeVar("Result")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
TIMES = "\N{MULTIPLICATION SIGN}"
MIN_WIDTH = 24  # minimum characters per line when a column folds
EDGES, GAP, INDENT = 2, 2, 4  # widths in a table: both edges, gap between columns, indent of a row's further lines
MOST_BARS = 12  # bars in a notebook; a last line counts the rest
MIN_MILLISECONDS = 0.0005  # a shorter time is printed as 0
MAX_CELL = 10_000  # maximum characters of a cell, for measuring


def format_bytes(count: float) -> str:
    """Formats bytes in the unit that leaves at most three digits; 1,000 to 1,023 bytes have four.

    >>> format_bytes(1234567), format_bytes(1000 * 1024)
    ('1.18 MiB', '0.98 MiB')
    """
    power = min(max(int(math.log2(abs(count) or 1)) // 10, 0), len(UNITS) - 1)
    scaled = count / 1024**power
    # From 999.5 on, rounding gives four digits, as 1000 MiB: use the next unit.
    if power and abs(scaled) >= 999.5 and power + 1 < len(UNITS):
        power, scaled = power + 1, scaled / 1024
    digits = 0 if power == 0 or abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    text = f"{scaled:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {UNITS[power]}"


def is_unicode(text: str) -> bool:
    """Returns whether UTF-8 can encode a text: half of a surrogate pair, as "\\ud83d", has no bytes in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def format_fraction(fraction: float) -> str:
    """Formats a fraction as a percentage: whole percents from 10 % on, below with two significant digits.

    >>> format_fraction(0.0312), format_fraction(0.312)
    ('3.1%', '31%')
    """
    percent = 100 * fraction
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.2g}%"


def format_milliseconds(seconds: float) -> str:
    """Formats seconds as milliseconds: below 100 ms with three digits, above in whole ms; below 0.5 us as 0.

    >>> format_milliseconds(0.03567), format_milliseconds(2.06e-10), format_milliseconds(1.5)
    ('35.7 ms', '0 ms', '1,500 ms')
    """
    milliseconds = seconds * 1e3
    if abs(milliseconds) < MIN_MILLISECONDS:
        return "0 ms"
    return f"{milliseconds:.3g} ms" if abs(milliseconds) < 100 else f"{milliseconds:,.0f} ms"


def format_axes(axes: tuple[str, ...]) -> str:
    """Formats mesh axes as Python code: ("fsdp",) -> "'fsdp'"; ("dp", "fsdp") -> "('dp', 'fsdp')"."""
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Formats a mesh for the command line: {"dp": 4, "fsdp": 64} -> "dp=4,fsdp=64"."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def listed(names: Iterable[str], shown: int = 3) -> str:
    """Formats the first names in quotes, with the number of remaining names.

    >>> listed(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(map(repr, names[:shown])) + more


def joined(names: Sequence[str], word: str = "and") -> str:
    """Joins one or more names: ["a", "b", "c"] -> "a, b and c"; ``word`` stands before the last name."""
    return f" {word} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def named_values(values: Mapping[str, object]) -> str:
    """Formats values as arguments in code: {"a": 1, "b": "x"} -> "a=1, b='x'"."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def kind_of(value: Any) -> str:
    """Describes a value for an error about its kind, in a few words whatever the value's size.

    >>> kind_of(None), kind_of("bf16"), kind_of((1, 2)), kind_of({"x": 1}), kind_of(kind_of), kind_of(dict)
    ('None', "'bf16'", 'a tuple of 2', "a dict of 'x'", 'the function kind_of', 'the class dict')
    """
    name: str | None = getattr(value, "__name__", None)
    if isinstance(value, type) or (name and callable(getattr(value, "__call__", None))):  # noqa: B004 (keeps its type)
        return f"the {'class' if isinstance(value, type) else 'function'} {name}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{list(value.shape)}"
    if value is None or isinstance(value, str | bool | int | float | complex):
        return shortened(repr(value), 60)
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {listed(value)}" if value else "an empty dict"
    plain = isinstance(value, tuple | list | set | frozenset) and not hasattr(value, "_fields")
    size = f" of {len(value)}" if plain else ""
    return f"{'an' if type(value).__name__[0] in 'AEIOUaeio' else 'a'} {type(value).__name__}{size}"


def one_line(text: object) -> str:
    """Returns a text, such as an error's message, in a line: line breaks and repeated spaces become single spaces."""
    return " ".join(str(text).split())


def parse_json_as(text: str, expected: str, convert: Callable[[Any], Result]) -> Result:
    """Parses JSON and returns ``convert`` of the parsed data.

    ``expected`` names the content with its article, as "a forecast", for errors.

    >>> parse_json_as("[[1]]", "a number", lambda data: data["value"])
    Traceback (most recent call last):
      ...
    ValueError: this is not a number as the library writes it: list indices must be integers or slices, not str.

    Raises:
      ValueError: the text is not JSON; ``convert`` raised a KeyError, TypeError, AttributeError, IndexError or
        RecursionError; or ``convert`` raised a ``ValueError``, which passes unchanged.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not {expected}, because it is not JSON: {one_line(error)}.") from None
    try:
        return convert(data)
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else one_line(error)
        raise ValueError(f"this is not {expected} as the library writes it: {reason}.") from error


def how_to_install(extra: str) -> str:
    """Returns the command to install an extra of setup.cfg; the library is not on any package index.

    >>> how_to_install("forecast")
    'pip install -e ".[forecast]" in a checkout, or pip install "FILE.whl[forecast]" with a wheel of the library'
    """
    return f'pip install -e ".[{extra}]" in a checkout, or pip install "FILE.whl[{extra}]" with a wheel of the library'


def shortened(text: str, limit: int, middle: str = " ... ") -> str:
    """Returns the text; if longer than ``limit`` characters, only the beginning and the end, joined by ``middle``.

    Beginning and end have ``limit // 2`` characters each.
    """
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}{middle}{text[-half:]}"


def path_pattern(path: str) -> str:
    """Replaces the first number before a slash by a star: the common path of a leaf in several equal layers.

    >>> path_pattern("block_7/Dense_1/kernel")
    'block_*/Dense_1/kernel'
    """
    return re.sub(r"\d+(?=/)", "*", path, count=1)


class FoldingTable(Table):
    """A ``rich`` table that shows every cell in full on any terminal width.

    If a row is too wide, headers and cells of more than 24 characters fold at spaces. If the row is still too wide, it
    continues in further lines, indented, under a header of as many lines:

      collective  for                direction
          per step  sent per device  async
      ────────────────────────────────────────
      all-gather  blocks/up/kernel   forward
                24          765 MiB   100%

    Words break only if longer than the terminal's width. Texts are shown unchanged: brackets, as in "jax[tpu]", are
    not ``rich`` markup.
    """

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Adds a row with a cell for each argument; strings become texts without markup.

        ``options`` are further arguments of ``rich.table.Table.add_row``, such as ``style``.
        """
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _lines(self.columns, console, options)
        widths = [width for line in lines for width in line.values()]
        each = zip(self.columns, widths, strict=True)
        columns = [dataclasses.replace(column, width=width, no_wrap=False) for column, width in each]
        # A copy, because the table may be drawn again at another width.
        drawn = copy.copy(self)
        if len(lines) == 1:
            drawn.columns = columns
        else:  # a single column, each of whose cells holds a row in several lines
            drawn.columns, drawn.rows = [], []
            headers = [dataclasses.replace(column, vertical="bottom") for column in columns]
            drawn.add_column(_in_lines([column.header for column in columns], headers, lines))
            for row, *cells in zip(self.rows, *(column.cells for column in columns), strict=True):
                drawn.add_row(_in_lines(cells, columns, lines), style=row.style, end_section=row.end_section)
        yield from Table.__rich_console__(drawn, console, options)


class FirstFitting:
    """Draws the first of several tables whose rows fit into a line each; the first table if no table fits.

    The tables show the same rows, each in fewer columns than the table before.
    """

    def __init__(self, *tables: Table) -> None:
        self.tables = tables

    def chosen(self, console: Console, options: ConsoleOptions) -> Table:
        """Returns the first table whose rows fit into a line each at the width of ``options``; else the first table."""
        fitting = (table for table in self.tables if len(_lines(table.columns, console, options)) == 1)
        return next(fitting, self.tables[0])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.chosen(console, options)


def _lines(columns: Sequence[Column], console: Console, options: ConsoleOptions) -> list[dict[int, int]]:
    """Returns the columns on each line of a row, with their widths: [{index of a column: characters}].

    A single line if the columns fit side by side, with folded headers or cells if necessary. Else as many columns on
    each line as fit, in order.
    """
    room, unlimited = options.max_width - EDGES, options.update(width=MAX_CELL)
    unfolded, folded, least = {}, {}, {}  # nothing folded; headers folded; cells, too
    for i, column in enumerate(columns):
        header = Measurement.get(console, unlimited, column.header)
        cells = [Measurement.get(console, unlimited, cell) for cell in column.cells]
        folded[i] = max([header.minimum, *(cell.maximum for cell in cells)])
        unfolded[i] = max(header.maximum, folded[i])
        least[i] = max([header.minimum, *(max(cell.minimum, min(cell.maximum, MIN_WIDTH)) for cell in cells)])
    if sum(least.values()) + GAP * (len(columns) - 1) <= room:
        return [_narrowed(_narrowed(unfolded, folded, room), least, room)]
    # Several lines per row leave enough room: headers of number columns are not folded.
    least = {i: min(unfolded[i] if columns[i].no_wrap else least[i], room - INDENT) for i in least}
    lines: list[dict[int, int]] = [{}]
    for i, width in least.items():
        if lines[-1] and sum(lines[-1].values()) + GAP * len(lines[-1]) + width > room - INDENT * (len(lines) > 1):
            lines.append({})
        lines[-1][i] = width
    return [_narrowed({i: unfolded[i] for i in line}, line, room - INDENT * (0 not in line)) for line in lines]


def _narrowed(widths: Mapping[int, int], least: Mapping[int, int], room: int) -> dict[int, int]:
    """Returns the widths of a line's columns, reduced until the line fits into ``room`` characters.

    Widths are by index of the column. The widest column is narrowed first. No column becomes narrower than in
    ``least``, even if the line then does not fit.
    """
    widths = dict(widths)
    while sum(widths.values()) + GAP * (len(widths) - 1) > room and (
        wide := [i for i in widths if widths[i] > least[i]]
    ):
        # One character at a time, so that columns of equal width stay nearly equal.
        widths[max(wide, key=lambda i: widths[i])] -= 1
    return widths


def _in_lines(cells: Sequence[RenderableType], columns: Sequence[Column], lines: Sequence[Mapping[int, int]]) -> Group:
    """Returns the cells of a row arranged in several lines, for ``rich``; a line with only empty cells is left out.

    Args:
      cells, columns: a cell for each column, and the columns with their widths.
      lines: for each line a mapping whose keys are the indices of the columns on the line; values are not read.
    """
    parts = []
    for inside in lines:
        grid = Table.grid(*(columns[i].copy() for i in inside), padding=(0, GAP, 0, 0))
        grid.add_row(*(cells[i] for i in inside))
        if any(cells[i] for i in inside):
            parts.append(Padding(grid, (0, 0, 0, INDENT * (0 not in inside))))
    return Group(*parts)


def rich_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[RenderableType]] = (),
    *,
    left: int = 1,
    right: int = 0,
    **options: Any,
) -> Table:
    """Returns a table with text in the first ``left`` and last ``right`` columns, and right-aligned numbers between.

    ``options`` are arguments of ``rich.table.Table``, such as ``caption``.
    """
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True} | options
    table = FoldingTable(title=Text(title, "table.title"), title_justify="left", **look)
    for i, column in enumerate(columns):
        if left <= i < len(columns) - right:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def plain_text(shown: RenderableType) -> str:
    """Renders ``shown``, such as a table of ``rich``, to text without colours, as wide as the terminal.

    The width is 80 columns without a terminal. Lines have no spaces at the end.
    """
    width = shutil.get_terminal_size(fallback=(80, 24)).columns
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False, force_terminal=False)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


class Bar(NamedTuple):
    """A bar in a notebook: ``size`` is the length relative to other bars, ``text`` the value in words."""

    label: str
    size: float
    text: str
    warns: bool = False  # drawn in orange


def notebook_html(shown: RenderableType, title: str, bars: Sequence[Bar]) -> str:
    """Returns HTML for a class's ``_repr_html_``: bars under a title, and then the rendering of ``shown``.

    At most ``MOST_BARS`` bars are drawn, in order; a last line counts the rest. Without bars the title is left out.
    Text keeps the notebook's colour, light or dark. A label is above its bar, so neither needs a fixed width.
    """
    longest = max((bar.size for bar in bars), default=0.0) or 1.0
    lines = [_TITLE.format(html.escape(title))] if bars else []
    for bar in bars[:MOST_BARS]:
        colour, percent = "#e2803a" if bar.warns else "#3f87d0", 100 * bar.size / longest
        label, text = html.escape(bar.label), html.escape(bar.text)
        lines.append(_BAR.format(label=label, text=text, colour=colour, percent=percent))
    lines += [_TITLE.format(f"and {len(bars) - MOST_BARS} more")] if len(bars) > MOST_BARS else []
    # Notebooks drop style sheets, so colours are inline in the tags.
    console = Console(file=io.StringIO(), width=120, record=True, force_jupyter=False)
    console.print(shown)
    table = console.export_html(inline_styles=True, code_format=JUPYTER_HTML_FORMAT)
    return f'<div style="max-width:44em">{"".join(lines)}</div>{table}'


_TITLE = '<div style="margin:0.5em 0;font-style:italic">{}</div>'
_BAR = """\
<div style="display:flex;flex-wrap:wrap;justify-content:space-between;column-gap:1em;font-size:0.9em;margin-top:0.3em">
<span style="font-family:monospace;overflow-wrap:anywhere">{label}</span><span>{text}</span></div>
<div style="background:rgba(127,127,127,0.25);height:0.45em;border-radius:0.2em">
<div style="background:{colour};width:{percent:.3g}%;height:100%;border-radius:0.2em"></div></div>"""
