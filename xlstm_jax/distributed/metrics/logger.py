"""Metrics into files without stalling the device: CSV, JSON lines, and TensorBoard where it can be had.

``float(loss)`` in a training loop waits until the device has caught up; the device then waits for the host to dispatch
the next step. A ``MetricLogger`` reads a value one interval later, when it has long arrived:
  log(10, metrics)   starts the copies of step 10 to the host
  log(20, metrics)   starts those of step 20, then writes the row of step 10
  close()            writes the row of step 20
A row is handed to the operating system as it is written (``metrics.jsonl`` before ``metrics.csv``), so a killed process
loses at most the one that was pending.

Life of a value: checked and named (``_flatten``, before anything is held or written), held until the next call, read as
Python numbers (``_read``), written by each sink. A float becomes the shortest decimal that reads back to it in its own
dtype: 0.1 in float32 is written 0.1, not 0.10000000149011612.

A run that goes on (``resume_step``) keeps the lines that were written to their end; what one file lacks of the other's
rows is the trace of a kill, and the table is given it back.
"""

import csv
import io
import json
import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import PyTree

CSV_NAME = "metrics.csv"
JSONL_NAME = "metrics.jsonl"
STEP = "step"

Number = int | float
Values = dict[str, Number | list[Number]]
Cells = dict[str, Number | str]


class MetricLogger:
    """Writes metrics to ``metrics.csv``, ``metrics.jsonl`` and TensorBoard's event files, one interval late.

    Process 0 writes; elsewhere ``log`` checks its arguments and does nothing else. So every process makes its logger
    alike, after ``jax.distributed.initialize``. Usable in a ``with`` block, which writes the pending row also where it
    is left by an exception.

    Args:
      folder: where the files go; made if it is not there.
      tensorboard: None writes event files where tensorboardX or clu (with tensorflow) can be imported; True demands
        it; False never does. Event files are buffered by that package: they are whole after ``close``, not after a
        kill.
      resume_step: goes on with the files that are there. It is the last step whose row stays: later ones are dropped,
        as is a line that a kill cut short. A job that passes the step it has restored, and -1 where it has restored
        none, can be killed and started again at any time.
    Raises:
      FileExistsError: the folder holds metrics, and ``resume_step`` is not given.
      ImportError: ``tensorboard=True`` without a package that writes event files.
      ValueError: a file to go on with has a line, not its last, that no logger wrote.
    """

    def __init__(
        self, folder: str | os.PathLike, *, tensorboard: bool | None = None, resume_step: int | None = None
    ) -> None:
        self._last_step = None if resume_step is None else _checked_step("resume_step", resume_step)
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._closed = False
        # A step at or before resume_step is refused on every process, not on the one that read the rows.
        self._sinks = _open_sinks(Path(folder), tensorboard, self._last_step) if jax.process_index() == 0 else []

    def log(self, step: int, metrics: Mapping[str, PyTree]) -> None:
        """Takes the metrics of one step without waiting for them, and writes the row of the previous call.

        Args:
          step: larger than at the call before, and than ``resume_step``.
          metrics: scalars or 1-D arrays (JAX, NumPy or Python numbers; a bool counts as 0 or 1) by name, nested as
            liked. Keys are joined with "/"; the values of a 1-D array are a list in JSON, and ``name/0``, ``name/1``
            in CSV and TensorBoard.
        Raises:
          TypeError: something that is not such a number; says where.
          ValueError: a step that does not increase; a name that is empty, taken or not printable; an array that was
            deleted, or that this process cannot read whole; or the logger is closed. A call that is refused changes
            nothing. Where it is the previous row that cannot be read, that one is lost, and this one is held.
        """
        if self._closed:
            raise ValueError(f"log({step!r}, ...) on a closed MetricLogger. Log inside the with block, before close().")
        step = _checked_step(STEP, step)
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"step={step} after step {self._last_step}: steps increase strictly, one row each. Merge the metrics "
                "of a step into one call (of a run that goes on, resume_step counts as logged)."
            )
        held = _flatten(metrics)
        self._last_step = step
        if not self._sinks:
            return
        for value in held.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self._write_pending(following=(step, held))

    def flush(self) -> None:
        """Writes the pending row, waiting for its values if need be."""
        if self._closed:
            return
        self._write_pending()
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Writes the pending row and closes the files, whatever becomes of the row. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
            self._write_pending()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        del kind, traceback
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            # What went wrong in the block is the news; callers may tell kinds of it apart.
            error.add_note(f"MetricLogger could not write its last row: {failure}")

    def _write_pending(self, following: tuple[int, dict[str, Any]] | None = None) -> None:
        """Writes the pending row. The one that follows is held first: an error about this one does not cost both."""
        pending, self._pending = self._pending, following
        if pending is None:
            return
        step, held = pending
        values = {name: _read(name, step, value) for name, value in held.items()}
        for sink in self._sinks:
            sink.write(step, values)


def _checked_step(argument: str, step: Any) -> int:
    if isinstance(step, jax.Array | bool | np.bool_):
        raise TypeError(
            f"{argument}={step!r}: a step is a host integer; reading an array would wait for the device. Count steps "
            "in the training loop."
        )
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"{argument}={step!r} is a {type(step).__name__}; a step is an integer.") from None


def _flatten(metrics: Mapping[str, PyTree]) -> dict[str, Any]:
    """Values by their joined names, all checked."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is a {type(metrics).__name__}; pass a dict, as {{'loss': loss}}.")
    held, taken = {}, {STEP}
    for name, value in _named(metrics):
        held[name] = value = _checked(name, value)
        columns = {name, *_columns(name, value)}
        if columns & taken:
            raise ValueError(
                f"metrics gives {min(columns & taken)!r} a second meaning: the step has the column {STEP!r}, nested "
                "keys are joined with '/', and a 1-D array takes name/0, name/1 and so on. Rename one of them."
            )
        taken |= columns
    return held


def _named(metrics: Mapping[str, PyTree], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(f"metrics has the key {prefix}{key!r}, a {type(key).__name__}; keys are strings.")
        # A line break in a name would break the files' lines; TensorBoard drops a slash that nothing stands before.
        if not all(part and part.isprintable() for part in key.split("/")):
            raise ValueError(f"metrics has the key {prefix + key!r}: a name is printable and no part of it is empty.")
        if isinstance(value, Mapping):
            yield from _named(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


def _columns(name: str, value: Any) -> list[str]:
    """One column for a scalar; one for each entry of a 1-D array or list."""
    return [f"{name}/{index}" for index in range(len(value))] if np.ndim(value) else [name]


def _checked(name: str, value: Any) -> Any:
    """What is held of a value: a ``jax.Array`` as it is; all else as numbers, since NumPy arrays may be overwritten."""
    if isinstance(value, int | float) and not isinstance(value, np.generic):
        return int(value) if isinstance(value, int) else float(value)
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"metrics[{name!r}] is a {type(value).__name__}: a value is a number or a 1-D array of numbers. Leave it "
            "out, or turn it into an array (jnp.stack, np.asarray)."
        )
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"metrics[{name!r}] is traced: log is called inside jit. Return the metrics, and log outside.")
    if not any(jnp.issubdtype(value.dtype, kind) for kind in (np.floating, np.integer, np.bool_)):
        raise TypeError(f"metrics[{name!r}] has dtype {value.dtype}: values are real numbers. Leave it out, or cast.")
    if value.ndim > 1:
        raise TypeError(
            f"metrics[{name!r}] has shape {value.shape}, {value.ndim} dims: a value has at most one. Reduce it, or "
            "give each row a name."
        )
    if not isinstance(value, jax.Array):
        return _numbers(np.asarray(value))
    _check_readable(name, value)
    return value


def _check_readable(name: str, value: jax.Array) -> None:
    if value.is_deleted():
        raise ValueError(
            f"metrics[{name!r}] is a deleted array: it was donated to a jitted function, most likely. Log what the "
            "function returns instead."
        )
    here = value.is_fully_replicated and value.sharding.addressable_devices
    if not (here or value.is_fully_addressable):
        raise ValueError(
            f"metrics[{name!r}], {value.dtype} of shape {value.shape}, lies with {value.sharding} partly on other "
            "processes, so this one cannot read it. Reduce it over the mesh in the jitted step (pmean, psum), or "
            "replicate it with out_shardings of PartitionSpec()."
        )


def _read(name: str, step: int, value: Any) -> Number | list[Number]:
    """What is held, as Python numbers."""
    if not isinstance(value, jax.Array):
        return value
    if value.is_deleted():
        raise ValueError(
            f"metrics[{name!r}] of step {step} was deleted before its row was written, one interval later: it was "
            "donated to a jitted function, most likely. The row is lost. Log arrays that are not passed on to a "
            "donated argument, or call flush() before they are."
        )
    return _numbers(np.asarray(value))


def _numbers(array: np.ndarray) -> Number | list[Number]:
    return [_number(entry) for entry in array] if array.ndim else _number(array[()])


def _number(entry: Any) -> Number:
    """A Python number whose ``repr`` is the shortest decimal that reads back to ``entry``."""
    if not jnp.issubdtype(entry.dtype, np.floating):
        return int(entry)
    # NumPy prints its own floats that way. bfloat16 and 8-bit floats print six digits; float32 holds them exactly.
    return float(str(entry if isinstance(entry, np.floating) else np.float32(entry)))


def _open_sinks(folder: Path, tensorboard: bool | None, resume_step: int | None) -> list[Any]:
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
        cells.update(zip(_columns(name, value), entries, strict=True))
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
