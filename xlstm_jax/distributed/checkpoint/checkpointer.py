"""Checkpoints that outlive the mesh they were written on, and are read only if they are what was written.

  save      state  -- no boxes -->  arrays by path, in shards   <directory>/<step>/state     (orbax, in the background)
                   -- checksums, computed on the devices  -->   <directory>/<step>/leaves    (JSON)
  restore   each device reads its own share of each leaf, as the target is split; checksums of what was read are
            compared with those that were saved; boxes are put where the target has them

The newest step that is sound is taken. One that is damaged is passed over with a warning, on all processes together:
they tell each other after every stage what went wrong, so that none waits where another has given up. A step that is
sound but holds another tree is not damage but a mistake, and raises at once.

Nothing is written or moved by a process that only reads. With the first ``save`` a job becomes the directory's writer:
it takes the lock, clears what a killed job left half written, and moves damaged steps out of the way.
"""

import json
import operator
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint import record as checkpoint_leaves
from xlstm_jax.distributed.checkpoint.orbax_io import _check_dtypes, _orbax, _read_arrays, _read_record, _save_args
from xlstm_jax.distributed.data_parallel.boxes import map_leaves_with_path
from xlstm_jax.distributed.processes.together import allgather_text, cause_of, fail_together
from xlstm_jax.distributed.wording import listed

DEFAULT_SAVE_INTERVAL_STEPS = 1
DEFAULT_MAX_TO_KEEP = 3
DEFAULT_ASYNC_TIMEOUT_S = 60
_LOCK_FILE = ".writer"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read; says which step, and what is wrong with it."""


class Checkpointer:
    """Saves and restores states in a directory, one folder for each step.

    All processes make it with the same arguments, and call each of its methods together. Use it in a ``with`` block, or
    call ``close``.

    Args:
      directory: a local path, or a URL that orbax understands (``gs://...``). It must be one directory for all
        processes.
      save_interval_steps: ``save`` writes the steps that this divides, and passes over others.
      max_to_keep: the newest steps to keep; None keeps all. Falling back to an older step takes at least 2.
      async_timeout_s: how long a save may take in the background, before it fails on all processes.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_interval_steps: int = DEFAULT_SAVE_INTERVAL_STEPS,
        max_to_keep: int | None = DEFAULT_MAX_TO_KEEP,
        async_timeout_s: int = DEFAULT_ASYNC_TIMEOUT_S,
    ) -> None:
        for name, value in [
            ("save_interval_steps", save_interval_steps),
            ("max_to_keep", max_to_keep),
            ("async_timeout_s", async_timeout_s),
        ]:
            if not (value is None and name == "max_to_keep") and not value >= 1:
                raise ValueError(f"{name}={value!r} must be at least 1.")
        is_url = "://" in os.fspath(directory)
        self._steps_format = _orbax().step.standard_name_format()
        from etils import epath  # which orbax brings along

        self.directory = epath.Path(directory if is_url else os.path.abspath(directory))
        self.save_interval_steps, self.max_to_keep = save_interval_steps, max_to_keep
        self.async_timeout_s = async_timeout_s
        self._manager: Any = None  # opened by the first save
        self._lock: Any = None
        self._saving: int | None = None
        self._own_steps: set[int] = set()  # saved or restored here
        self._damaged: set[int] = set()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def latest_step(self) -> int | None:
        """The newest step in the directory, as the first process sees it; whether it is sound, ``restore`` says.

        Raises:
          CheckpointError: there are folders of steps, and all of them are empty, which no job leaves behind.
        """
        steps, folders = json.loads(allgather_text(json.dumps([self._steps_here(), self._folders()]))[0])
        if folders and not steps:
            raise CheckpointError(
                f"the steps {sorted(folders)} in {self.directory} are empty folders: their files are lost. Remove "
                "them to start anew."
            )
        return max(steps, default=None)

    # ------------------------------------------------------------------------------------------------------------ save

    def save(self, step: int, state: PyTree, *, force: bool = False) -> bool:
        """Starts to save a state; returns when its buffers may be donated, while files are still being written.

        Args:
          step: its number, greater than all in the directory.
          state: any pytree of arrays, NumPy arrays, Python numbers and PRNG keys, boxed or not. Of a leaf that is no
            global array (see ``checkpoint_leaves``) the first process saves its own, and all must have the same.
          force: also where ``save_interval_steps`` does not divide ``step``.
        Returns:
          Whether it is being saved: False where it is not due, or has been saved or restored here before.
        Raises:
          CheckpointError: this save, or the one before, failed; or another job writes in the directory.
          ValueError: the directory holds a newer step; or processes hold different values of a local leaf.
          TypeError: a leaf is something else than numbers.
        """
        step = operator.index(step)
        if not force and step % self.save_interval_steps:
            return False
        self.wait()
        self._become_writer()
        if not self._is_new(step):
            return False
        leaves = checkpoint_leaves.bare_leaves(state)
        arrays = checkpoint_leaves.stored_arrays(leaves)
        _check_dtypes(arrays)
        record = checkpoint_leaves.record_of(leaves, arrays)
        self._check_same_everywhere(record, arrays)
        with self._failing_as(step):
            self._manager.save(step, args=_save_args(arrays, record), force=True)
        self._saving = step
        self._own_steps.add(step)
        return True

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
          CheckpointError: it failed; says which step, and why.
        """
        self._finish(self._manager)

    def close(self) -> None:
        """Waits for the last save, and gives the directory free.

        Raises:
          CheckpointError: that save failed.
        """
        (manager, self._manager), (lock, self._lock) = (self._manager, None), (self._lock, None)
        with ExitStack() as at_last:
            for resource in (lock, manager):
                if resource is not None:
                    at_last.callback(resource.close)
            self._finish(manager)

    def _finish(self, manager: Any) -> None:
        step, self._saving = self._saving, None
        if step is not None:
            with self._failing_as(step):
                manager.wait_until_finished()

    @contextmanager
    def _failing_as(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._own_steps.discard(step)
            raise CheckpointError(
                f"saving step {step} to {self.directory} failed: {cause_of(error)}. {self._space_left()}Steps saved "
                "before it are untouched."
            ) from error

    def _space_left(self) -> str:
        """A hint for a full disk, which other processes see as a timeout only."""
        if "://" in os.fspath(self.directory) or not self.directory.exists():
            return ""
        return f"The disk has {shutil.disk_usage(self.directory).free / 1e6:.1f} MB left. "

    def _is_new(self, step: int) -> bool:
        newest = self._manager.latest_step()
        if newest is None or step > newest:
            return True
        if step in self._own_steps:
            return False
        raise ValueError(
            f"step {step} cannot be saved to {self.directory}, which holds step {newest} already. Restore it and go "
            "on from there, move the newer steps away, or use another directory."
        )

    def _check_same_everywhere(self, record: checkpoint_leaves.Record, arrays: dict[str, Any]) -> None:
        """Only the first process's local leaves are written, so all must have the same."""
        local = {path: record[path] for path, array in arrays.items() if not isinstance(array, jax.Array)}
        if jax.process_count() == 1 or not local:
            return
        everyone = [json.loads(text) for text in allgather_text(json.dumps(local))]
        for process, other in enumerate(everyone):
            unlike = sorted(
                path for path in other.keys() | everyone[0].keys() if other.get(path) != everyone[0].get(path)
            )
            if unlike:
                raise ValueError(
                    f"{listed(unlike)}: processes 0 and {process} have different values, and only "
                    "one would be saved. Save what differs as a global array, with "
                    "jax.make_array_from_process_local_data, one row for each process."
                )

    # --------------------------------------------------------------------------------------------------------- restore

    def restore(self, abstract_state: PyTree, step: int | None = None) -> PyTree:
        """Reads a state into the structure, shardings and boxes of another, which may be abstract.

        Args:
          abstract_state: of ``ShapeDtypeStruct`` with shardings (see ``abstract_train_state``), or a state of arrays.
            Every leaf comes back as the kind that it has there: placed as it is, a NumPy array, a Python number, a PRNG
            key. What is no leaf (``apply_fn``, ``tx``) is taken from it.
          step: the one to restore; None: the newest that is sound, with a warning where that is not the newest.
        Returns:
          The state, bit for bit as it was saved.
        Raises:
          CheckpointError: there is no such step, or it (with None: every step) is damaged; says what is.
          ValueError: a step is sound but of another tree: names the leaf, and both shapes or dtypes.
        """
        self.wait()
        likes = checkpoint_leaves.bare_leaves(abstract_state)
        checkpoint_leaves.check_placed(likes)
        problems: dict[int, str] = {}
        for candidate in self._candidates(step):
            try:
                restored = self._read(candidate, likes)
            except CheckpointError as error:
                problems[candidate] = str(error)
                continue
            self._own_steps.add(candidate)
            self._report(problems | (self._empty_after(candidate) if step is None else {}), candidate)
            return _boxed_as(abstract_state, restored)
        told = "; ".join(f"step {number} is damaged: {problem}" for number, problem in problems.items())
        raise CheckpointError(f"no sound checkpoint in {self.directory}: {told}. Nothing was restored.")

    def _candidates(self, step: int | None) -> list[int]:
        """The steps to try, newest first."""
        steps = self._steps()
        if not steps:
            raise CheckpointError(f"{self.directory} holds no checkpoint; nothing was restored.")
        if step is None:
            return sorted(steps, reverse=True)
        if operator.index(step) not in steps:
            raise CheckpointError(f"{self.directory} has no step {step}; it holds {sorted(steps)}.")
        return [operator.index(step)]

    def _report(self, problems: dict[int, str], restored: int) -> None:
        self._damaged |= problems.keys()
        for step, problem in problems.items():
            warnings.warn(
                f"step {step} in {self.directory} is damaged and was passed over: {problem}. Restored step {restored} "
                "instead. (The next save moves the damaged one out of the way.)",
                stacklevel=3,
            )

    def _read(self, step: int, likes: dict[str, Any]) -> dict[str, Any]:
        """The leaves of one step, checked; raises ``CheckpointError`` on all processes if it does on one."""
        folder = self.directory / str(step)
        record = fail_together(lambda: _read_record(folder / "leaves"), CheckpointError)
        checkpoint_leaves.check_fits(record, likes, f"step {step} in {self.directory}")
        arrays = fail_together(lambda: _read_arrays(folder / "state", record, likes), CheckpointError)
        fail_together(lambda: checkpoint_leaves.check_sound(record, arrays), CheckpointError)
        return {path: checkpoint_leaves.as_like(arrays[path], record[path], like, path) for path, like in likes.items()}

    # ------------------------------------------------------------------------------------------------------- directory

    def _steps(self) -> list[int]:
        """Steps that are committed, as the first process sees them; an empty folder is none."""
        return json.loads(allgather_text(json.dumps(self._steps_here()))[0])

    def _steps_here(self) -> list[int]:
        return [step for step in self._folders() if any((self.directory / str(step)).iterdir())]

    def _empty_after(self, step: int) -> dict[int, str]:
        return {
            other: "its folder is empty" for other in set(self._folders()) - set(self._steps_here()) if other > step
        }

    def _folders(self) -> list[int]:
        """Of steps that are committed, or look like it."""
        if not self.directory.exists():
            return []
        return [entry.step for entry in self._steps_format.find_all(self.directory)]

    def _become_writer(self) -> None:
        """Opens the directory for writing, or again after a restore has found damaged steps."""
        if self._manager is not None and not self._damaged:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        fail_together(self._lock_and_clear if jax.process_index() == 0 else lambda: None, CheckpointError)
        self._damaged.clear()
        if self._manager is not None:
            self._manager.reload()
            return
        ocp = _orbax()
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                save_interval_steps=self.save_interval_steps,
                max_to_keep=self.max_to_keep,
                cleanup_tmp_directories=True,
                lightweight_initialize=True,
                async_options=ocp.options.AsyncOptions(timeout_secs=self.async_timeout_s),
            ),
        )

    def _lock_and_clear(self) -> None:
        if self._lock is None:
            self._lock = _writer_lock(self.directory)
        for step in self._folders():
            folder = self.directory / str(step)
            if not any(folder.iterdir()):
                folder.rmdir()
            elif step in self._damaged:
                folder.rename(_free_name(self.directory / f"{step}.damaged"))


def _boxed_as(state: PyTree, leaves: dict[str, Any]) -> PyTree:
    return map_leaves_with_path(lambda path, like: checkpoint_leaves.boxed_as(like, leaves[path]), state)


def _free_name(path: Any) -> Any:
    others = (path.parent / f"{path.name}-{i}" for i in range(2, 1000))
    return path if not path.exists() else next(other for other in others if not other.exists())


def _writer_lock(directory: Any) -> Any:
    """Locks the directory for this process; the kernel gives it free when the process ends, however it does.

    On file systems without locks (object stores, some network file systems) two jobs go unnoticed.
    """
    if "://" in os.fspath(directory):
        return None
    import fcntl

    file = open(directory / _LOCK_FILE, "a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        with file:
            file.seek(0)
            writer = file.read().strip() or "it left no name"
        raise CheckpointError(
            f"another job writes checkpoints in {directory}: {writer}. Stop it, or use another directory."
        ) from None
    except OSError:  # this file system has no locks
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    file.flush()
    return file
