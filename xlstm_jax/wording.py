"""Numbers, lists, paths, meshes and tables as people read them."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
TIMES = "\N{MULTIPLICATION SIGN}"
MIN_WIDTH = 12  # of columns of text, which numbers would squeeze out of a narrow terminal


def format_bytes(count: float) -> str:
    """Three digits, in the largest unit of which there is one.

    >>> format_bytes(1234567)
    '1.18 MiB'
    """
    power = min(max(int(math.log2(abs(count) or 1)) // 10, 0), len(UNITS) - 1)
    scaled = count / 1024**power
    if power and abs(scaled) >= 999.5 and power + 1 < len(UNITS):
        power, scaled = power + 1, scaled / 1024
    digits = 0 if power == 0 or abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    text = f"{scaled:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {UNITS[power]}"


def format_fraction(fraction: float) -> str:
    """Two digits, however small.

    >>> format_fraction(0.0312)
    '3.1%'
    """
    percent = 100 * fraction
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.2g}%"


def format_axes(axes: tuple[str, ...]) -> str:
    """As one writes it in code: ("fsdp",) -> "'fsdp'"; ("dp", "fsdp") -> "('dp', 'fsdp')"."""
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


def format_mesh(sizes: Mapping[str, int]) -> str:
    """As the command line takes it: {"dp": 4, "fsdp": 64} -> "dp=4,fsdp=64"."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def listed(names: Iterable[str], shown: int = 3) -> str:
    """The first names in quotes, and how many there are more.

    >>> listed(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(map(repr, names[:shown])) + more


def joined(names: Sequence[str]) -> str:
    """["a", "b", "c"] -> "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def named_values(values: Mapping[str, object]) -> str:
    """As one writes arguments: {"a": 1, "b": "x"} -> "a=1, b='x'"."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def kind_of(value: Any) -> str:
    """What a value is, for an error about its kind: short, whatever it holds.

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
    """A text, such as that of an error, without line breaks."""
    return " ".join(str(text).split())


def shortened(text: str, limit: int, middle: str = " ... ") -> str:
    """A text of more than ``limit`` characters, cut down to its beginning and its end."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}{middle}{text[-half:]}"


def path_pattern(path: str) -> str:
    """The path with a star for its first number: the name that the same leaf has in each of several equal layers.

    >>> path_pattern("block_7/Dense_1/kernel")
    'block_*/Dense_1/kernel'
    """
    return re.sub(r"\d+(?=/)", "*", path, count=1)


def rich_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    left: int = 1,
    min_width: int = MIN_WIDTH,
    **options: Any,
) -> Table:
    """A table whose first ``left`` columns are text, and the others numbers, to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, **options)
    for column in columns[:left]:
        table.add_column(column, overflow="fold", min_width=min_width)
    for column in columns[left:]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
