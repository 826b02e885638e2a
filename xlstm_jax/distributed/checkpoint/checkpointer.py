"""Checkpoints that outlive the mesh they were written on, and are read only if they are what was written.

  save      state  -- without boxes -->  arrays by path, in shards   <directory>/<step>/state    (orbax, in background)
                   -- checksums, computed on the devices -->         <directory>/<step>/leaves   (JSON)
  restore   each device reads its shards of each leaf, as the target is split; checksums of what was read are compared
            with those that were saved; each leaf gets the box that it has in the target

``restore`` takes the newest step that is sound, and passes over a damaged one with a warning, in all processes together
(``fail_together``). A step that is sound but holds another tree is a mistake of the caller, and raises at once.

A job that only reads changes nothing in the directory. With its first ``save`` it becomes the directory's writer: it
takes the lock, clears what a killed job left half written, and moves damaged steps out of the way.
"""

import json
import operator
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Self

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint import record
from xlstm_jax.distributed.checkpoint.orbax_io import check_dtypes, orbax, read_arrays, read_record, save_args
from xlstm_jax.distributed.processes.store import PEER_TIMEOUT_S
from xlstm_jax.distributed.processes.together import allgather_text, cause_of, fail_together
from xlstm_jax.wording import listed

DEFAULT_SAVE_INTERVAL_STEPS = 1
DEFAULT_MAX_TO_KEEP = 3
DEFAULT_ASYNC_TIMEOUT_S = 60
_LOCK_FILE = ".writer"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read; says which step, and what is wrong with it.

    >>> try:
    ...     Checkpointer("no_such_folder").restore({"step": 0})
    ... except CheckpointError:
    ...     "start anew"
    'start anew'
    """


class Checkpointer:
    """Saves and restores states in a directory, one folder for each step.

    All processes make it with the same arguments, and call each of its methods together. Use it in a ``with`` block, or
    call ``close``.

    Args:
      directory: a local path, or a URL that orbax understands (``gs://...``); the same directory in all processes.
      save_interval_steps: ``save`` writes the steps that this divides, and passes over others.
      max_to_keep: the newest steps to keep; None keeps all. Falling back to an older step takes at least 2.
      async_timeout_s: how long a save may take in the background, before it fails on all processes.
      peer_timeout_s: how long to wait, in each method, for a process that is alive but does not come; ``TimeoutError``
        then says which. A process that reads its shards so much slower than another is taken for one.

    >>> import tempfile
    >>> with Checkpointer(tempfile.mkdtemp()) as checkpointer:
    ...     checkpointer.save(100, {"w": np.ones(3), "step": 100})
    ...     checkpointer.restore({"w": np.zeros(3), "step": 0})
    True
    {'step': 100, 'w': array([1., 1., 1.])}
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_interval_steps: int = DEFAULT_SAVE_INTERVAL_STEPS,
        max_to_keep: int | None = DEFAULT_MAX_TO_KEEP,
        async_timeout_s: int = DEFAULT_ASYNC_TIMEOUT_S,
        *,
        peer_timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        limits: dict[str, float] = {"save_interval_steps": save_interval_steps, "async_timeout_s": async_timeout_s}
        limits["peer_timeout_s"] = peer_timeout_s
        for name, value in (limits if max_to_keep is None else limits | {"max_to_keep": max_to_keep}).items():
            if value < 1:
                raise ValueError(f"{name}={value!r} must be at least 1.")
        self._steps_format = orbax().step.standard_name_format()
        from etils import epath  # which orbax brings along; it has no types

        self.directory: Any = epath.Path(directory if _is_url(directory) else os.path.abspath(directory))
        self.save_interval_steps, self.max_to_keep = save_interval_steps, max_to_keep
        self.async_timeout_s, self.peer_timeout_s = async_timeout_s, peer_timeout_s
        self._manager: Any = None  # orbax's; opened by the first save
        self._lock: IO[str] | None = None
        self._saving: int | None = None  # the step
        self._own_steps: set[int] = set()  # saved or restored here
        self._damaged: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest_step(self) -> int | None:
        """The newest step in the directory, as process 0 sees it; only ``restore`` finds out whether it is sound.

        Folders of steps that are all empty raise a ``CheckpointError``: their files are lost.
        """
        folders = self._folders_of_process_0()
        if folders and not any(folders.values()):
            where = f"the steps {sorted(folders)} in {self.directory} are empty folders"
            raise CheckpointError(f"{where}: their files are lost. Remove them to start anew.")
        return max((step for step, has_files in folders.items() if has_files), default=None)

    def save(self, step: int, state: PyTree, *, force: bool = False) -> bool:
        """Starts to save a state; returns when its buffers may be donated, while files are still being written.

        Args:
          step: its number, greater than all in the directory.
          state: any pytree of arrays, NumPy arrays, Python numbers and PRNG keys, boxed or not. Process 0 saves the
            local leaves (those that are no global arrays), which must be the same in all processes.
          force: save also where ``save_interval_steps`` does not divide ``step``.
        Returns:
          Whether it is being saved: False where it is not due, or was saved or restored by this object before.
        Raises:
          CheckpointError: this save, or the one before, failed; or another job writes in the directory.
          ValueError: the directory holds a newer step; or processes hold different values of a local leaf.
          TypeError: a leaf is something else than numbers.
          TimeoutError: a process did not come to save this step within ``peer_timeout_s``.
        """
        step = operator.index(step)
        if not force and step % self.save_interval_steps:
            return False
        allgather_text(
            "", f"save step {step}", self.peer_timeout_s
        )  # what follows waits for ever for who does not come
        self.wait()
        self._become_writer()
        if not self._is_new(step):
            return False
        leaves = record.bare_leaves(state)
        arrays = record.stored_arrays(leaves)
        check_dtypes(arrays)
        entries = record.record_of(leaves, arrays)
        self._check_same_everywhere(entries, arrays)
        with self._failing_as(step):
            self._manager.save(step, args=save_args(arrays, entries), force=True)
        self._saving = step
        self._own_steps.add(step)
        return True

    def wait(self) -> None:
        """Waits until the last save is on disk; raises a ``CheckpointError`` if it failed."""
        step, self._saving = self._saving, None
        if step is not None:
            with self._failing_as(step):
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save, as ``wait`` does, and unlocks the directory."""
        with ExitStack() as at_last:
            for resource in filter(None, (self._lock, self._manager)):
                at_last.callback(resource.close)
            at_last.callback(vars(self).update, _lock=None, _manager=None)
            self.wait()

    @contextmanager
    def _failing_as(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._own_steps.discard(step)
            message = f"saving step {step} to {self.directory} failed: {cause_of(error)}. {self._space_left()}"
            raise CheckpointError(message + "Steps saved before it are untouched.") from error

    def _space_left(self) -> str:
        """A hint for a full disk: the processes that could write see a timeout only."""
        if _is_url(self.directory) or not self.directory.exists():
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

    def _check_same_everywhere(self, entries: record.Record, arrays: dict[str, Any]) -> None:
        """Checks that all processes have the same local leaves, since only those of process 0 are written."""
        local = {path: entries[path] for path, array in arrays.items() if not isinstance(array, jax.Array)}
        if jax.process_count() == 1 or not local:
            return
        first, *others = [json.loads(text) for text in allgather_text(json.dumps(local))]
        for process, other in enumerate(others, start=1):
            unlike = sorted(path for path in other.keys() | first.keys() if other.get(path) != first.get(path))
            if unlike:
                raise ValueError(
                    f"{listed(unlike)}: processes 0 and {process} have different values, and only "
                    "one would be saved. Save what differs as a global array, with "
                    "jax.make_array_from_process_local_data, one row for each process."
                )

    def restore(self, abstract_state: PyTree, step: int | None = None) -> PyTree:
        """Reads a state, bit for bit as it was saved, into the structure, shardings and boxes of another.

        Args:
          abstract_state: the target: ``ShapeDtypeStruct`` with shardings (see ``abstract_train_state``), or a state of
            arrays. Every leaf comes back as what it is there: an array with that sharding, a NumPy array, a Python
            number, a PRNG key. What is no leaf (``apply_fn``, ``tx``) is taken from the target.
          step: the step to restore; None: the newest that is sound, with a warning if that is not the newest.
        Raises:
          CheckpointError: there is no such step, or it (with None: every step) is damaged; says what is.
          ValueError: a step is sound but holds another tree; names the leaf, and both shapes or dtypes. Or processes
            restore different steps. (All of these are raised in all processes.)
          TimeoutError: a process did not come, or did not finish reading, within ``peer_timeout_s`` of another.
        """
        self.wait()
        what = f"restore {'the newest step' if step is None else f'step {step}'}"
        mistakes = ValueError, TypeError  # of the caller, perhaps in one process alone
        likes = fail_together(lambda: _leaves_of_target(abstract_state), mistakes, what, self.peer_timeout_s)
        problems: dict[int, str] = {}
        for candidate in self._candidates(step):
            try:
                restored = self._read(candidate, likes)
            except CheckpointError as error:
                problems[candidate] = str(error)
                continue
            self._own_steps.add(candidate)
            if step is None:
                folders = self._folders().items()
                problems |= {n: "its folder is empty" for n, has_files in folders if n > candidate and not has_files}
            self._report(problems, candidate)
            return record.boxed_like(abstract_state, restored)
        causes = "; ".join(f"step {number} is damaged: {problem}" for number, problem in problems.items())
        raise CheckpointError(f"no sound checkpoint in {self.directory}: {causes}. Nothing was restored.")

    def _candidates(self, step: int | None) -> list[int]:
        """The steps to try, newest first."""
        steps = [step for step, has_files in self._folders_of_process_0().items() if has_files]
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
        """The leaves of one step, checked; raises ``CheckpointError`` in all processes if it does in one."""
        folder, where = self.directory / str(step), f"step {step} in {self.directory}"
        vote = f"read step {step}", self.peer_timeout_s
        entries = fail_together(lambda: read_record(folder / "leaves"), CheckpointError, *vote)
        fail_together(lambda: record.check_fits(entries, likes, where), ValueError, *vote)
        arrays = fail_together(lambda: read_arrays(folder / "state", entries, likes), CheckpointError, *vote)
        fail_together(lambda: record.check_sound(entries, arrays), CheckpointError, *vote)
        return {path: record.as_like(arrays[path], entries[path], like, path) for path, like in likes.items()}

    def _folders_of_process_0(self) -> dict[int, bool]:
        """``_folders`` as process 0 sees them; a file system may show each process something else."""
        seen = json.dumps([*self._folders().items()])
        return dict(json.loads(allgather_text(seen, "list the steps of a checkpoint", self.peer_timeout_s)[0]))

    def _folders(self) -> dict[int, bool]:
        """The folders that are called like a committed step, by its number; and whether they hold anything."""
        if not self.directory.exists():
            return {}
        steps = [entry.step for entry in self._steps_format.find_all(self.directory)]
        return {step: any((self.directory / str(step)).iterdir()) for step in steps}

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
        options = orbax().CheckpointManagerOptions(
            save_interval_steps=self.save_interval_steps,
            max_to_keep=self.max_to_keep,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
            async_options=orbax().options.AsyncOptions(timeout_secs=self.async_timeout_s),
        )
        self._manager = orbax().CheckpointManager(self.directory, options=options)

    def _lock_and_clear(self) -> None:
        if self._lock is None:
            self._lock = _writer_lock(self.directory)
        for step, has_files in self._folders().items():
            folder = self.directory / str(step)
            if not has_files:
                folder.rmdir()
            elif step in self._damaged:
                folder.rename(_free_name(self.directory / f"{step}.damaged"))


def _leaves_of_target(abstract_state: PyTree) -> dict[str, Any]:
    likes = record.bare_leaves(abstract_state)
    record.check_placed(likes)
    return likes


def _is_url(directory: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(directory)


def _free_name(path: Path) -> Path:
    names = [path.name, *(f"{path.name}-{i}" for i in range(2, 1000))]
    return next(free for name in names if not (free := path.with_name(name)).exists())


def _writer_lock(directory: Path) -> IO[str] | None:
    """Locks the directory until this process ends, however it does; where the file system has locks."""
    if _is_url(directory):
        return None
    import fcntl

    file = open(directory / _LOCK_FILE, "a+")  # it stays open as long as the lock is held
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
