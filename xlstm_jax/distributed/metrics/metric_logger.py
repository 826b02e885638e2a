"""Metrics into files without stalling the device: CSV, JSON lines, and TensorBoard where it can be had.

``float(loss)`` in a training loop waits until the device has caught up; the device then waits for the host to dispatch
the next step. A ``MetricLogger`` reads a value one interval later, when it has long arrived:
  log(10, metrics)   starts the copies of step 10 to the host
  log(20, metrics)   starts those of step 20, then writes the row of step 10
  close()            writes the row of step 20
A row is handed to the operating system as it is written (``metrics.jsonl`` before ``metrics.csv``), so a killed process
loses at most the one that was pending.

A float becomes the shortest decimal that reads back to it in its own dtype: 0.1 in float32 is written 0.1, not
0.10000000149011612.
"""

import operator
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.metrics.log_files import STEP, Number, Sink, check_name, columns_of, open_sinks

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
      tensorboard: None writes event files where tensorboardX or clu (with tensorflow) can be imported; True demands
        it; False never does. That package buffers event files: they are finished after ``close``, not after a kill.
      resume_step: goes on with the files that are there. It is the last step whose row stays: later ones are dropped,
        as is a line that a kill cut short. ``metrics.csv`` is made anew from ``metrics.jsonl``. A job that passes the
        step it has restored, and -1 where it has restored none, can be killed and started again at any time.
    Raises:
      FileExistsError: the folder holds metrics, and ``resume_step`` is not given.
      ImportError: ``tensorboard=True`` without a package that writes event files.
      ValueError: ``metrics.jsonl`` has a line, not its last, that no logger wrote; or only ``metrics.csv`` is there; or
        ``folder`` is a URL.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, tensorboard: bool | None = None, resume_step: int | None = None
    ) -> None:
        _check_local(folder)
        self._last_step = None if resume_step is None else _checked_step("resume_step", resume_step)
        self._pending: tuple[int, dict[str, Held]] | None = None
        self._closed = False
        self._sinks: list[Sink] = []
        if jax.process_index() == 0:
            self._sinks = open_sinks(Path(folder), tensorboard, self._last_step)

    def log(self, step: int, metrics: Mapping[str, PyTree]) -> None:
        """Takes the metrics of one step without waiting for them, and writes the row of the previous call.

        Args:
          step: larger than at the call before, and than ``resume_step``.
          metrics: scalars or 1-D arrays (JAX, NumPy or Python numbers; a bool counts as 0 or 1) by name, in nested
            dicts of any depth. Keys are joined with "/"; the values of a 1-D array are a list in JSON, and ``name/0``,
            ``name/1`` in CSV and TensorBoard.
        Raises:
          TypeError: something that is not such a number; says where.
          ValueError: a step that does not increase; a name that is empty, taken or not printable; an array that was
            deleted, or of which this process cannot read all; or the logger is closed. A call that is refused changes
            nothing. Where the previous row cannot be read, that row is lost, and this one is held.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, traceback
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            # Callers handle the error of the block by its type, so it is the one that goes on.
            error.add_note(f"MetricLogger could not write its last row: {failure}")

    def _write_pending(self, following: tuple[int, dict[str, Held]] | None = None) -> None:
        """Writes the pending row. The following row is held first: an error about the one does not cost both."""
        pending, self._pending = self._pending, following
        if pending is None:
            return
        step, held = pending
        values = {name: _read(name, step, value) for name, value in held.items()}
        for sink in self._sinks:
            sink.write(step, values)


def _check_local(folder: str | os.PathLike[str]) -> None:
    """Refuses a URL, which ``Path`` would take for a folder called "gs:" in the working directory."""
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(folder)):  # Path("gs://bucket") has one slash left
        raise ValueError(
            f"folder={os.fspath(folder)!r} is a URL: rows are appended to files, which an object store does not have. "
            "Log to a folder of this machine, or of a file system that mounts the store, and copy it as the run ends."
        )


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


def _flatten(metrics: Mapping[str, PyTree]) -> dict[str, Held]:
    """Values by their joined names, all checked."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is a {type(metrics).__name__}; pass a dict, as {{'loss': loss}}.")
    held, taken = {}, {STEP}
    for name, value in _named(metrics):
        held[name] = _checked(name, value)
        columns = {name, *columns_of(name, held[name])}
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
            raise TypeError(f"metrics has the key {prefix}{key!r}, a {type(key).__name__}; keys are strings.")
        check_name(prefix + key)
        if isinstance(value, Mapping):
            yield from _named(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


def _checked(name: str, value: Any) -> Held:
    """What is held of a value: a ``jax.Array`` as it is; all else as numbers, since NumPy arrays may be overwritten."""
    if isinstance(value, int | float) and not isinstance(value, np.generic):
        return int(value) if isinstance(value, int) else float(value)
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"metrics[{name!r}] is a {type(value).__name__}: a value is a number or a 1-D array of numbers. Leave it "
            "out, or turn it into an array (jnp.stack, np.asarray)."
        )
    if isinstance(value, Tracer):
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


def _read(name: str, step: int, value: Held) -> Number | list[Number]:
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


def _numbers(array: np.ndarray[Any, Any]) -> Number | list[Number]:
    return [_number(entry) for entry in array] if array.ndim else _number(array[()])


def _number(entry: Any) -> Number:
    """A Python number whose ``repr`` is the shortest decimal that reads back to ``entry``."""
    if not jnp.issubdtype(entry.dtype, np.floating):
        return int(entry)
    # NumPy prints its own floats that way. bfloat16 and 8-bit floats print six digits; float32 holds them exactly.
    return float(str(entry if isinstance(entry, np.floating) else np.float32(entry)))
