"""Log of a training run in ``metrics.csv`` and TensorBoard event files, written one interval late.

``float(loss)`` right after a step waits until the device has computed the loss, and the device then waits for the host
to dispatch the next step. So a row is written together with the next row, when its values are already on the host:
  write(10, row)   starts the host transfer of row 10
  write(20, row)   starts the host transfer of row 20, and writes row 10
  close()          writes row 20

``docs/howto/log.md`` shows the technique in twenty lines for a simpler loop.
"""

import csv
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
from tensorboardX import SummaryWriter

TABLE = "metrics.csv"
MEANS = "loss perplexity accuracy tokens grad_norm"
COLUMNS = f"step seconds {MEANS} tokens_per_s mfu held_out_loss averaged_held_out_loss".split()


class RunLog:
    """Writer of a row per call, only in process 0.

    Args:
      folder: folder of the log; created if missing.
      resume_step: the last step to keep in an existing table; later rows are removed, because they will be recomputed.
    Raises:
      FileExistsError: the folder has a table, and ``resume_step`` is None.
    """

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        self._pending: dict[str, Any] | None = None
        self._table, self._events = None, None
        if jax.process_index() != 0:
            return
        path = folder / TABLE
        if path.exists() and resume_step is None:
            raise FileExistsError(f"{path} holds the metrics of a run. Choose another folder, or go on by --resume.")
        kept = [row for row in read_rows(folder) if row["step"] <= resume_step] if path.exists() else []
        folder.mkdir(parents=True, exist_ok=True)
        # The table is replaced atomically, so that a kill leaves either the old or the new table.
        temporary = path.with_suffix(".tmp")
        self._table = temporary.open("w", newline="")
        self._rows = csv.DictWriter(self._table, COLUMNS, lineterminator="\n")
        self._rows.writeheader()
        self._rows.writerows(kept)
        self._table.flush()
        os.replace(temporary, path)
        # TensorBoard hides events of earlier files from ``purge_step`` on. The suffix distinguishes files of the same
        # second.
        purge_step = None if resume_step is None else resume_step + 1
        suffix = f".{time.time_ns()}"
        self._events = SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=suffix)

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Starts the host transfer of a row, and writes the row of the preceding call."""
        for value in row.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self.flush()
        self._pending = {"step": step} | dict(row)

    def flush(self) -> None:
        """Writes the pending row, and waits for its values if necessary."""
        pending, self._pending = self._pending, None
        if pending is None or self._table is None or self._events is None:
            return
        step = pending.pop("step")
        values = {name: float(value) for name, value in pending.items()}
        self._rows.writerow({"step": step} | values)
        self._table.flush()  # to the operating system, so that a killed process loses only the pending row
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes the pending row, and closes the files."""
        self.flush()
        if self._table is not None and self._events is not None:
            self._table.close()
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_rows(folder: Path) -> list[dict[str, float]]:
    """Reads the rows of a run, including rows before a resume; skips a line that was truncated by a kill."""
    text = (folder / TABLE).read_text()
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    found = [{name: float(value) for name, value in row.items() if value} for row in rows]
    return [row | {"step": int(row["step"])} for row in found]
