"""Metrics into files without stalling the device: JSON lines, a CSV table, and TensorBoard's event files.

``float(loss)`` in a training loop waits until the device has caught up; the device then waits for the host to dispatch
the next step. A ``MetricLogger`` reads a value one interval later, when it has long arrived:
  log(10, metrics)   starts the copies of step 10 to the host
  log(20, metrics)   starts the copies of step 20, then writes the row of step 10
  close()            writes the row of step 20

``metrics.jsonl`` is the record, and the only file that is ever read. ``metrics.csv`` holds the same rows as a table,
which is made anew from the record when a run goes on, and when a metric comes up that has no column yet. A row is
handed to the operating system as it is written, so a killed process loses at most the pending row. Text after the last
line break of the record is a line that a kill cut short.

A float becomes the shortest decimal that reads back to it in its own dtype: 0.1 in float32 is written 0.1, not
0.10000000149011612.
"""

import csv
import io
import json
import math
import operator
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from xlstm_jax.common_types import PyTree
from xlstm_jax.wording import is_unicode, shortened

CSV_NAME = "metrics.csv"
JSONL_NAME = "metrics.jsonl"
STEP = "step"
LINE_SHOWN = 500  # characters of a line in an error

Number = int | float
Row = Mapping[str, Number | list[Number]]  # NaN and infinities are read back as strings
Held = jax.Array | Number | list[Number]


class MetricLogger:
    """Writes metrics to ``metrics.csv``, ``metrics.jsonl`` and TensorBoard's event files, one interval late.

    Process 0 writes; elsewhere ``log`` checks its arguments and does nothing else. So every process makes a logger in
    the same way, after ``jax.distributed.initialize``. A ``with`` block writes the pending row also where an exception
    leaves it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, MetricLogger(folder, tensorboard=False) as logger:
    ...     logger.log(10, {"loss": jnp.float32(0.1), "eval": {"recall": 0.9}})
    ...     logger.flush()
    ...     (Path(folder) / "metrics.jsonl").read_text().strip()
    '{"step": 10, "loss": 0.1, "eval/recall": 0.9}'

    Args:
      folder: where the files go, on a file system; made if it is not there.
      tensorboard: None writes event files where tensorboardX can be imported; True demands it; False never does.
        tensorboardX buffers event files: they are finished after ``close``, not after a kill.
      resume_step: the last step whose row stays in the files that are there; later rows are dropped, as is a line that
        a kill cut short. A job that passes the step that it has restored, or -1 without a restored step, can be killed
        and started again at any time.
    Raises:
      FileExistsError: the folder holds metrics, and ``resume_step`` is not given.
      ImportError: ``tensorboard=True`` without tensorboardX.
      ValueError: ``metrics.jsonl`` has a line, not its last, that no logger wrote; or only ``metrics.csv`` is there; or
        ``folder`` is a URL.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, tensorboard: bool | None = None, resume_step: int | None = None
    ) -> None:
        # One slash, since Path("gs://bucket") has only one left.
        if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(folder)):
            raise ValueError(
                f"folder={os.fspath(folder)!r} is a URL: rows are appended to files, which an object store does not "
                "have. Log to a folder of this machine, or of a file system that mounts the store, and copy it as the "
                "run ends."
            )
        self._last_step = None if resume_step is None else _checked_step("resume_step", resume_step)
        self._pending: tuple[int, dict[str, Held]] | None = None
        self._closed = False
        is_first = jax.process_index() == 0
        self._files = _RunFiles(Path(folder), tensorboard, self._last_step) if is_first else None

    def log(self, step: int, metrics: Mapping[str, PyTree]) -> None:
        """Takes the metrics of one step without waiting for them, and writes the row of the previous call.

        Args:
          step: larger than at the call before, and than ``resume_step``.
          metrics: scalars or 1-D arrays (JAX, NumPy or Python numbers; a bool counts as 0 or 1) by name, in nested
            mappings of any depth. Keys are strings, joined with "/"; the values of a 1-D array are a list in JSON, and
            ``name/0``, ``name/1`` in CSV and TensorBoard.
        Raises:
          TypeError: something that is not such a number, or a key that is no string; says where.
          ValueError: a step that does not increase; a name that is taken, or has half of a surrogate pair; an array
            that was deleted, or of which this process cannot read all; or the logger is closed. A call that is refused
            changes nothing. Where an array of the previous row was deleted, that row is lost, and this one is held.
        """
        if self._closed:
            raise ValueError(f"log({step!r}, ...) on a closed MetricLogger. Log inside the with block, before close().")
        step = _checked_step(STEP, step)
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"step={step} after step {self._last_step}: steps increase strictly, one row each. Merge the metrics "
                "of a step into one call (of a run that goes on, resume_step counts as logged)."
            )
        held = _flattened(metrics)
        if self._files is None:
            self._last_step = step
            return
        # Begins the copies now, so that they have arrived when the row is written one call later.
        for value in held.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self._last_step = step
        self._write_pending(following=(step, held))

    def flush(self) -> None:
        """Writes the pending row, waiting for its values if need be."""
        if not self._closed:
            self._write_pending()
            if self._files is not None:
                self._files.flush()

    def close(self) -> None:
        """Writes the pending row and closes the files, whatever becomes of the row. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            if self._files is not None:
                stack.callback(self._files.close)
            self._write_pending()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, traceback
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            # Callers handle the error of the block by its type, so the block's error goes on, with a note.
            error.add_note(f"MetricLogger could not write its last row: {failure}")

    def _write_pending(self, following: tuple[int, dict[str, Held]] | None = None) -> None:
        """Writes the pending row, and holds the following row in its place."""
        # In this order: an error about the pending row must not cost the following row, too.
        pending, self._pending = self._pending, following
        if pending is not None and self._files is not None:
            step, held = pending
            self._files.write(step, {name: _read(name, step, value) for name, value in held.items()})


# ---------------------------------------------------------------------------------------------------------- the values


def _checked_step(argument: str, step: object) -> int:
    if isinstance(step, bool) or not isinstance(step, int | np.integer):
        raise TypeError(
            f"{argument}={step!r} is a {type(step).__name__}; a step is an integer of the host (reading an array would "
            "wait for the device). Count steps in the training loop."
        )
    return int(step)


def _flattened(metrics: Mapping[str, PyTree]) -> dict[str, Held]:
    """Values by their joined names, all checked."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is a {type(metrics).__name__}; pass a dict, as {{'loss': loss}}.")
    held, taken = {}, {STEP}
    for name, value in _named(metrics):
        held[name] = _held(name, value)
        columns = {name, *_columns(name, held[name])}
        if columns & taken:
            raise ValueError(
                f"metrics gives {min(columns & taken)!r} a second meaning: the step has the column {STEP!r}, nested "
                "keys are joined with '/', and a 1-D array takes name/0, name/1 and so on. Rename one of them."
            )
        taken |= columns
    return held


def _named(metrics: Mapping[str, PyTree], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by their joined names."""
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(
                f"metrics has the key {prefix}{key!r} of type {type(key).__name__}: keys are strings. Use str(key)."
            )
        name = prefix + key
        if not is_unicode(name):
            raise ValueError(
                f"metrics has the key {name!r}, which is not Unicode (half of a surrogate pair), so no file takes it. "
                "Rename it."
            )
        if isinstance(value, Mapping):
            yield from _named(value, f"{name}/")
        else:
            yield name, value


def _held(name: str, value: Any) -> Held:
    """The value, checked: a ``jax.Array`` as it is, any other as numbers."""
    # NumPy arrays are read now: the caller may overwrite them before the row is written.
    if isinstance(value, int | float) and not isinstance(value, np.generic):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Tracer):
        raise TypeError(f"metrics[{name!r}] is traced: log is called inside jit. Return the metrics, and log outside.")
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    is_real = is_array and any(jnp.issubdtype(value.dtype, kind) for kind in (np.floating, np.integer, np.bool_))
    if not is_real or value.ndim > 1:
        what = f"{value.dtype}{list(value.shape)}" if is_array else type(value).__name__
        raise TypeError(
            f"metrics[{name!r}] is a {what}: a value is a real number or a 1-D array of real numbers. Reduce it, cast "
            "it, turn it into an array (jnp.stack, np.asarray), or leave it out."
        )
    if not isinstance(value, jax.Array):
        return _numbers(np.asarray(value))
    if value.is_deleted():
        raise ValueError(
            f"metrics[{name!r}] is a deleted array: it was donated to a jitted function, most likely. Log what the "
            "function returns instead."
        )
    if not (value.is_fully_addressable or (value.is_fully_replicated and value.sharding.addressable_devices)):
        raise ValueError(
            f"metrics[{name!r}], {value.dtype} of shape {value.shape}, lies with {value.sharding} partly on other "
            "processes, so this one cannot read it. Reduce it over the mesh in the jitted step (pmean, psum), or "
            "replicate it with out_shardings of PartitionSpec()."
        )
    return value


def _read(name: str, step: int, value: Held) -> Number | list[Number]:
    """The held value as Python numbers."""
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
    # NumPy prints its own floats so. bfloat16 and 8-bit floats print six digits, but are exact in float32, which prints
    # its shortest decimal.
    return float(str(entry if isinstance(entry, np.floating) else np.float32(entry)))


# ----------------------------------------------------------------------------------------------------------- the files


class _RunFiles:
    """The files of a run, open to append. All refusals come before the folder is made."""

    def __init__(self, folder: Path, tensorboard: bool | None, resume_step: int | None) -> None:
        event_writer = None if tensorboard is False else _event_writer(demanded=bool(tensorboard))
        self._record_path, self._table_path = folder / JSONL_NAME, folder / CSV_NAME
        present = [path for path in (self._table_path, self._record_path) if path.exists()]
        if present and resume_step is None:
            raise FileExistsError(
                f"{present[0]} holds the metrics of a run. Choose another folder, or pass resume_step= to go on with "
                "it: the last step whose row stays (-1 keeps none)."
            )
        if present == [self._table_path]:
            raise ValueError(
                f"{self._table_path} is there without {JSONL_NAME}, which a MetricLogger writes first and reads to "
                "resume a run. Choose another folder, or move the table away."
            )
        rows = _read_rows(self._record_path)
        # Rows after `resume_step` are trained again, and each step has one row.
        kept = [_json_line(step, row) for step, row in rows.items() if resume_step is not None and step <= resume_step]
        folder.mkdir(parents=True, exist_ok=True)
        self._record = _replaced(self._record_path, "".join(kept))
        self._table, self._columns = self._new_table()
        # Event files of one second would have one name and overwrite each other but for the suffix. The purge hides
        # the rows that are dropped here and trained again.
        purge, suffix = None if resume_step is None else resume_step + 1, f".{time.time_ns()}"
        self._events: Any = event_writer and event_writer(str(folder), filename_suffix=suffix, purge_step=purge)

    def write(self, step: int, row: Row) -> None:
        # The record comes first, so that a kill leaves no row in the table that the record does not have.
        self._record.write(_json_line(step, row))
        self._record.flush()
        cells = _by_column(row)
        if cells.keys() <= self._columns.keys():
            csv.DictWriter(self._table, self._columns, lineterminator="\n").writerow({STEP: step} | cells)
            self._table.flush()
        else:
            # Made of the record, which has this row already. The old table stays in use if writing the new one fails.
            old = self._table
            self._table, self._columns = self._new_table()
            old.close()
        for name, value in cells.items() if self._events else ():
            self._events.add_scalar(name, value, step)

    def flush(self) -> None:
        if self._events:
            self._events.flush()

    def close(self) -> None:
        with ExitStack() as stack:
            for file in filter(None, (self._record, self._table, self._events)):
                stack.callback(file.close)

    def _new_table(self) -> tuple[TextIO, dict[str, None]]:
        """The table of all rows in the record, and its columns in the order in which they came up."""
        rows = [{STEP: step} | _by_column(row) for step, row in _read_rows(self._record_path).items()]
        columns = dict.fromkeys([STEP, *(name for row in rows for name in row)])
        text = io.StringIO()
        # Python 3.11 and 3.12 leave a carriage return without the quotes that its readers need.
        has_returns = any("\r" in name for name in columns)
        header = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL if has_returns else csv.QUOTE_MINIMAL)
        header.writerow(columns)
        csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
        return _replaced(self._table_path, text.getvalue()), columns


def _event_writer(demanded: bool) -> Any:
    """tensorboardX's class; None where it cannot be imported."""
    try:
        from tensorboardX import SummaryWriter
    except Exception as error:  # beside a protobuf or NumPy of another age it fails with any error
        if demanded:
            raise ImportError(
                f"tensorboard=True, but tensorboardX cannot be imported ({type(error).__name__}: {error}). Run `pip "
                "install tensorboardX`, or leave tensorboard=None to go without."
            ) from error
        return None
    return SummaryWriter


def _columns(name: str, value: Any) -> list[str]:
    """One column for a scalar; one for each entry of a 1-D array or list."""
    return [f"{name}/{index}" for index in range(len(value))] if np.ndim(value) else [name]


def _by_column(row: Row) -> dict[str, Number]:
    """The scalars of a row by their columns."""
    cells: dict[str, Number] = {}
    for name, value in row.items():
        cells.update(zip(_columns(name, value), value if isinstance(value, list) else [value], strict=True))
    return cells


def _json_line(step: int, row: Row) -> str:
    """A row as JSON, which has no NaN and no infinities: the strings "nan", "inf" and "-inf" stand for them."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(entry) for entry in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    values = {STEP: step} | {name: plain(value) for name, value in row.items()}
    return json.dumps(values, allow_nan=False) + "\n"


def _replaced(path: Path, text: str) -> TextIO:
    """Puts a file with ``text`` in the place of the old one, at one stroke, and leaves it open to append."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed here, or a link into another file
    file = temporary.open("x", newline="", encoding="utf-8")
    with ExitStack() as at_failure:
        at_failure.callback(file.close)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # some file systems order the new name before the new bytes
        os.replace(temporary, path)
        at_failure.pop_all()
    return file


def _read_rows(path: Path) -> dict[int, Row]:
    """Rows by step, in the order of the file; a last line without a line break is dropped."""
    data = path.read_bytes() if path.exists() else b""
    rows: dict[int, Row] = {}
    # Split as bytes: a kill may have cut the last line within a character.
    for line in data.split(b"\n")[:-1]:
        try:
            row = json.loads(line.decode())
            step = operator.index(row.pop(STEP))
            if step <= next(reversed(rows), -math.inf):
                raise ValueError(f"step {step} after step {next(reversed(rows))}")
            # JSON may hold half of a surrogate pair, which the UTF-8 table cannot: raises UnicodeEncodeError.
            "".join(row).encode()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} has the line {shortened(line.decode(errors='replace'), LINE_SHOWN)!r}, which no MetricLogger "
                f"wrote there ({error}). Mend or remove the line, or choose another folder."
            ) from error
        rows[step] = row
    return rows
