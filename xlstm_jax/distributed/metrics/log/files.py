"""The files behind ``MetricLogger``: where rows are written, and how they are read again to go on with a run.

A sink has ``write(step, values)``, ``flush()`` and ``close()``. There are JSON lines, a CSV table that widens as names
come up, and TensorBoard's event files by tensorboardX or clu. A file is replaced at one stroke or appended to by whole
lines; what follows its last line break is a line that a kill cut short.
"""

import csv
import io
import json
import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

CSV_NAME = "metrics.csv"
JSONL_NAME = "metrics.jsonl"
STEP = "step"

Number = int | float
Values = dict[str, Number | list[Number]]
Cells = dict[str, Number | str]


def columns_of(name: str, value: Any) -> list[str]:
    """One column for a scalar; one for each entry of a 1-D array or list."""
    return [f"{name}/{index}" for index in range(len(value))] if np.ndim(value) else [name]


def open_sinks(folder: Path, tensorboard: bool | None, resume_step: int | None) -> list[Any]:
    """Where rows go, in this order. All that can be refused is, before the folder is made."""
    open_events = None if tensorboard is False else _find_tensorboard(demanded=bool(tensorboard))
    csv_path, jsonl_path = folder / CSV_NAME, folder / JSONL_NAME
    present = [path for path in (csv_path, jsonl_path) if path.exists()]
    if present and resume_step is None:
        raise FileExistsError(
            f"{present[0]} holds the metrics of a run. Choose another folder, or pass resume_step= to go on with it: "
            "the last step whose row stays (-1 keeps none)."
        )
    columns, cells = _read_csv(csv_path)
    rows = _read_rows(jsonl_path, _complete_lines(jsonl_path), _parse_json)
    rows = {step: values for step, values in rows.items() if step <= resume_step}
    # A kill between the two writes leaves a row that only metrics.jsonl has.
    cells = {step: _cells(values) for step, values in rows.items()} | {
        step: row for step, row in cells.items() if step <= resume_step
    }
    folder.mkdir(parents=True, exist_ok=True)
    sinks = [_JsonLines(jsonl_path, rows), _Csv(csv_path, columns, dict(sorted(cells.items())))]
    return [*sinks, open_events(folder, resume_step)] if open_events else sinks


class _JsonLines:
    """One JSON object a line; names that a step does not have are absent."""

    def __init__(self, path: Path, rows: Mapping[int, Values]) -> None:
        self._file = _replace(path, "".join(_json_line(step, values) for step, values in rows.items()))

    def write(self, step: int, values: Values) -> None:
        self._file.write(_json_line(step, values))
        self._file.flush()

    def flush(self) -> None:
        """Every row is flushed as it is written."""

    def close(self) -> None:
        self._file.close()


class _Csv:
    """A table whose columns stand in the order in which they came up; what a step does not have is left empty."""

    def __init__(self, path: Path, columns: Iterable[str], rows: Mapping[int, Cells]) -> None:
        self._path = path
        self._columns = dict.fromkeys([STEP, *columns, *(name for row in rows.values() for name in row)])
        lines = [self._line({STEP: step} | row) for step, row in rows.items()]
        self._file = _replace(path, "".join([_csv_line(self._columns), *lines]))

    def write(self, step: int, values: Values) -> None:
        cells = {STEP: step} | _cells(values)
        new = [name for name in cells if name not in self._columns]
        if new:
            self._widen(new)
        self._file.write(self._line(cells))
        self._file.flush()

    def flush(self) -> None:
        """Every row is flushed as it is written."""

    def close(self) -> None:
        self._file.close()

    def _widen(self, new: list[str]) -> None:
        """New columns come last, so the rows that are there only get as many empty cells."""
        self._columns |= dict.fromkeys(new)
        rows = (line + "," * len(new) + "\n" for line in _complete_lines(self._path)[1:])
        wider = _replace(self._path, "".join([_csv_line(self._columns), *rows]))
        self._file.close()
        self._file = wider

    def _line(self, cells: Cells) -> str:
        return _csv_line(cells.get(name, "") for name in self._columns)


class _TensorboardX:
    """Event files by tensorboardX."""

    def __init__(self, summary_writer: Callable, folder: Path, resume_step: int | None) -> None:
        # Event files of one second would have one name and overwrite each other but for the suffix.
        options = {"filename_suffix": f".{time.time_ns()}"}
        if resume_step is not None:
            options["purge_step"] = resume_step + 1  # hides the rows that are dropped here and trained again
        self._writer = summary_writer(str(folder), **options)
        self.flush, self.close = self._writer.flush, self._writer.close

    def write(self, step: int, values: Values) -> None:
        for name, value in _cells(values).items():
            self._writer.add_scalar(name, value, step)


class _Clu:
    """Event files by clu, that is by tensorflow. Rows of a former run stay in the files that it wrote."""

    def __init__(self, summary_writer: Callable, folder: Path, resume_step: int | None) -> None:
        del resume_step
        self._writer = summary_writer(str(folder))
        self.flush, self.close = self._writer.flush, self._writer.close

    def write(self, step: int, values: Values) -> None:
        self._writer.write_scalars(step, _cells(values))


def _import_tensorboardx() -> Callable:
    from tensorboardX import SummaryWriter

    return partial(_TensorboardX, SummaryWriter)


def _import_clu() -> Callable:
    from clu.metric_writers import SummaryWriter

    return partial(_Clu, SummaryWriter)


def _find_tensorboard(demanded: bool) -> Callable | None:
    """Makes the sink of event files; None where nothing can write them."""
    reasons = []
    for load in (_import_tensorboardx, _import_clu):
        try:
            return load()
        except Exception as error:  # tensorflow beside a protobuf or NumPy of another age fails with any error
            reasons.append(f"{type(error).__name__}: {error}")
    if demanded:
        raise ImportError(
            f"tensorboard=True, but neither tensorboardX ({reasons[0]}) nor clu ({reasons[1]}) can be imported. "
            "Run `pip install tensorboardX`, or leave tensorboard=None to go without."
        )
    return None


def _cells(values: Mapping[str, Any]) -> Cells:
    cells = {}
    for name, value in values.items():
        entries = value if isinstance(value, list) else [value]
        cells.update(zip(columns_of(name, value), entries, strict=True))
    return cells


def _csv_line(cells: Iterable[Number | str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _json_line(step: int, values: Values) -> str:
    row = {STEP: step} | {name: _json_value(value) for name, value in values.items()}
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _json_value(value: Any) -> Any:
    """JSON has no word for what is not finite: "nan", "inf" and "-inf" stand for it."""
    if isinstance(value, list):
        return [_json_value(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, text: str) -> TextIO:
    """Puts a file with ``text`` in the place of the old one, at one stroke, and opens it to append."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # some file systems order the new name before the new bytes
    os.replace(temporary, path)
    return path.open("a", newline="", encoding="utf-8")


def _complete_lines(path: Path) -> list[str]:
    """The lines that were written to their end; a kill may have cut the last one short, within a character even."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1].decode("utf-8").split("\n")[:-1]


def _read_csv(path: Path) -> tuple[list[str], dict[int, Cells]]:
    """The columns but the step's, and the cells that are not empty by step."""
    header, *lines = _complete_lines(path) or [STEP]
    names = next(csv.reader([header]), [])
    if names[:1] != [STEP]:
        raise ValueError(
            f"{path} begins with {header!r}: the header that a MetricLogger writes begins with {STEP!r}. Choose "
            "another folder, or move the file away."
        )
    return names[1:], _read_rows(path, lines, partial(_parse_csv, names))


def _read_rows(path: Path, lines: Iterable[str], parse: Callable[[str], tuple[int, Any]]) -> dict[int, Any]:
    """Rows by step, in the order of the file."""
    rows: dict[int, Any] = {}
    for line in lines:
        try:
            step, row = parse(line)
            if step <= next(reversed(rows), -math.inf):
                raise ValueError(f"step {step} after step {next(reversed(rows))}")
        except (ValueError, TypeError, KeyError, AttributeError, csv.Error) as error:
            raise ValueError(
                f"{path} has the line {line!r}, which no MetricLogger wrote there ({error}). Mend or remove the line, "
                "or choose another folder."
            ) from error
        rows[step] = row
    return rows


def _parse_csv(names: list[str], line: str) -> tuple[int, Cells]:
    cells = next(csv.reader([line]), [])
    if len(cells) != len(names):
        raise ValueError(f"{len(cells)} cells under {len(names)} columns")
    step, *rest = cells
    return int(step), {name: cell for name, cell in zip(names[1:], rest, strict=True) if cell}


def _parse_json(line: str) -> tuple[int, Values]:
    row = json.loads(line)
    return operator.index(row.pop(STEP)), row
