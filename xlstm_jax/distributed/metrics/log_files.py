"""The files behind ``MetricLogger``: JSON lines, a CSV table, and TensorBoard's event files.

``metrics.jsonl`` is the record, and the only file that is ever read. ``metrics.csv`` is the same rows as a table. It is
made anew from the record where a run is resumed, and where a name comes up that has no column yet. A file is replaced
at one stroke or appended to by whole lines, so what follows its last line break is a line that a kill cut short.
"""

import csv
import importlib
import io
import json
import math
import operator
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from xlstm_jax.wording import shortened

CSV_NAME = "metrics.csv"
JSONL_NAME = "metrics.jsonl"
STEP = "step"

MAX_NAME_CHARS = 1000  # Readers of CSV take no more than 131,072 in a cell, and TensorBoard shows a name on a line.
LINE_SHOWN = 500  # characters of a line in an error
FORMULA = re.compile(r"'*[=+@-]")  # what a spreadsheet computes, behind the apostrophes that already keep one from that

Number = int | float
Row = Mapping[str, Number | list[Number]]  # what is not finite is read back as a string


class Sink(Protocol):
    """Where the rows of a run go."""

    def write(self, step: int, row: Row) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def columns_of(name: str, value: Any) -> list[str]:
    """One column for a scalar; one for each entry of a 1-D array or list."""
    return [f"{name}/{index}" for index in range(len(value))] if np.ndim(value) else [name]


def check_name(name: str) -> None:
    """Refuses a name that would break the files' lines, or that their readers would not take."""
    # TensorBoard drops a slash that nothing stands before.
    if not all(part and part.isprintable() for part in name.split("/")):
        raise ValueError(
            f"metrics has the key {shortened(name, 80)!r}: a name is printable and no part of it is empty."
        )
    if len(name) > MAX_NAME_CHARS:
        raise ValueError(
            f"metrics has the key {shortened(name, 80)!r} of {len(name)} characters: a name has at most "
            f"{MAX_NAME_CHARS}. Shorten it."
        )


def open_sinks(folder: Path, tensorboard: bool | None, resume_step: int | None) -> list[Sink]:
    """The sinks in the order in which a row is to be written. All refusals come before the folder is made."""
    open_events = None if tensorboard is False else _find_tensorboard(demanded=bool(tensorboard))
    table, record = folder / CSV_NAME, folder / JSONL_NAME
    present = [path for path in (table, record) if path.exists()]
    if present and resume_step is None:
        raise FileExistsError(
            f"{present[0]} holds the metrics of a run. Choose another folder, or pass resume_step= to go on with it: "
            "the last step whose row stays (-1 keeps none)."
        )
    if present == [table]:
        raise ValueError(
            f"{table} is there without {JSONL_NAME}, which a MetricLogger writes first and reads to resume a run. "
            "Choose another folder, or move the table away."
        )
    rows = {step: row for step, row in _read_rows(record).items() if resume_step is not None and step <= resume_step}
    folder.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [_JsonLines(record, rows), _Csv(table, record)]
    return [*sinks, open_events(folder, resume_step)] if open_events else sinks


class _TextFile:
    """A file that gets every row as soon as it is written."""

    _file: TextIO

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _JsonLines(_TextFile):
    """One JSON object a line; names that a step does not have are absent."""

    def __init__(self, path: Path, rows: Mapping[int, Row]) -> None:
        self._file = _replace(path, "".join(_json_line(step, row) for step, row in rows.items()))

    def write(self, step: int, row: Row) -> None:
        self._file.write(_json_line(step, row))
        self.flush()


class _Csv(_TextFile):
    """A table whose columns stand in the order in which they came up; what a step does not have is left empty.

    A name that a spreadsheet would compute, as "=1+1", has an apostrophe before it in the header.
    """

    def __init__(self, path: Path, record: Path) -> None:
        self._path, self._record = path, record
        self._begin()

    def _begin(self) -> None:
        """Writes the table of all rows in the record."""
        rows = [{STEP: step} | _by_column(row) for step, row in _read_rows(self._record).items()]
        self._columns = dict.fromkeys([STEP, *(name for row in rows for name in row)])
        text = io.StringIO()
        self._writer(text).writerow({name: "'" * bool(FORMULA.match(name)) + name for name in self._columns})
        self._writer(text).writerows(rows)
        self._file = _replace(self._path, text.getvalue())

    def write(self, step: int, row: Row) -> None:
        cells = {STEP: step} | _by_column(row)
        if cells.keys() <= self._columns.keys():
            self._writer(self._file).writerow(cells)
            self.flush()
        else:
            with self._file:  # closes the table without the new columns; the record has this row already
                self._begin()

    def _writer(self, file: TextIO) -> "csv.DictWriter[str]":
        return csv.DictWriter(file, self._columns, lineterminator="\n")


class _TensorboardX:
    """Event files by tensorboardX."""

    def __init__(self, summary_writer: Callable[..., Any], folder: Path, resume_step: int | None) -> None:
        # Event files of one second would have one name and overwrite each other but for the suffix. The purge hides
        # the rows that are dropped here and trained again.
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = summary_writer(str(folder), filename_suffix=f".{time.time_ns()}", purge_step=purge_step)
        self.flush, self.close = self._writer.flush, self._writer.close

    def write(self, step: int, row: Row) -> None:
        for name, value in _by_column(row).items():
            self._writer.add_scalar(name, value, step)


class _Clu:
    """Event files by clu, that is by tensorflow. Rows of a former run stay in the files that it wrote."""

    def __init__(self, summary_writer: Callable[..., Any], folder: Path, resume_step: int | None) -> None:
        del resume_step
        self._writer = summary_writer(str(folder))
        self.flush, self.close = self._writer.flush, self._writer.close

    def write(self, step: int, row: Row) -> None:
        self._writer.write_scalars(step, _by_column(row))


def _find_tensorboard(demanded: bool) -> Callable[[Path, int | None], Sink] | None:
    """Makes the sink of event files; None where nothing can write them."""
    reasons = []
    for package, sink in (("tensorboardX", _TensorboardX), ("clu.metric_writers", _Clu)):
        try:
            return partial(sink, importlib.import_module(package).SummaryWriter)
        except Exception as error:  # tensorflow beside a protobuf or NumPy of another age fails with any error
            reasons.append(f"{type(error).__name__}: {error}")
    if demanded:
        raise ImportError(
            f"tensorboard=True, but neither tensorboardX ({reasons[0]}) nor clu ({reasons[1]}) can be imported. "
            "Run `pip install tensorboardX`, or leave tensorboard=None to go without."
        )
    return None


def _by_column(row: Row) -> dict[str, Number]:
    """The scalars of a row by their columns."""
    cells: dict[str, Number] = {}
    for name, value in row.items():
        cells.update(zip(columns_of(name, value), value if isinstance(value, list) else [value], strict=True))
    return cells


def _json_line(step: int, row: Row) -> str:
    values = {STEP: step} | {name: _json_value(value) for name, value in row.items()}
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


def _json_value(value: Any) -> Any:
    """JSON has no word for what is not finite: "nan", "inf" and "-inf" stand for it."""
    if isinstance(value, list):
        return [_json_value(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, text: str) -> TextIO:
    """Puts a file with ``text`` in the place of the old one, at one stroke, and leaves it open to append."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed here
    # A new file, or an error: nothing is written through a link that somebody has put there.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
    file = open(descriptor, "a", newline="", encoding="utf-8")
    with ExitStack() as at_failure:
        at_failure.callback(file.close)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # some file systems order the new name before the new bytes
        os.replace(temporary, path)
        at_failure.pop_all()
    return file


def _read_rows(path: Path) -> dict[int, Row]:
    """Rows by step, in the order of the file, of the lines that were written to their end."""
    data = path.read_bytes() if path.exists() else b""
    rows: dict[int, Row] = {}
    for line in data[: data.rfind(b"\n") + 1].decode("utf-8").split("\n")[:-1]:  # a kill may cut within a character
        try:
            row = json.loads(line)
            step = operator.index(row.pop(STEP))
            if step <= next(reversed(rows), -math.inf):
                raise ValueError(f"step {step} after step {next(reversed(rows))}")
            for name in row:
                check_name(name)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} has the line {shortened(line, LINE_SHOWN)!r}, which no MetricLogger wrote there ({error}). "
                "Mend or remove the line, or choose another folder."
            ) from error
        rows[step] = row
    return rows
