"""``Checkpointer``: checkpoints that can be restored onto a different mesh, verified by checksums.

  save      state  -- without boxes -->  arrays by path, in shards   <directory>/<step>/state    (orbax, in background)
                   -- checksums of the shards -->                    <directory>/<step>/leaves   (JSON, in background)
  restore   each device reads its shards of each leaf, in the sharding of the target; checksums of the restored arrays
            are compared with the saved checksums; each leaf gets the box of the target

``restore`` reads the newest sound step, and skips damaged steps with a warning, with the same outcome in every process
(``raise_on_all``). A sound step with a different tree is a mistake of the caller, and raises immediately.

A job that only reads changes nothing in the directory. At the first ``save`` the job becomes the ``Writer`` of the
directory: it takes the lock, removes incomplete steps of a killed job, and renames damaged steps.
"""

import json
import operator
import os
from collections.abc import Callable, Mapping
from typing import Self, TypeVar

import jax
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint import record, steps
from xlstm_jax.distributed.checkpoint.backend import Arrays, Json, MakeBackend
from xlstm_jax.distributed.checkpoint.checksums import SavedSums, checksum_each
from xlstm_jax.distributed.checkpoint.errors import CheckpointError, read_on_all_processes
from xlstm_jax.distributed.checkpoint.orbax_backend import OrbaxBackend
from xlstm_jax.distributed.checkpoint.writer import Writer
from xlstm_jax.distributed.data_parallel.trees import check_alive
from xlstm_jax.distributed.processes.collective_errors import allgather_text, interruptions_go_on, raise_on_all
from xlstm_jax.distributed.processes.store import PEER_TIMEOUT_S
from xlstm_jax.formatting import listed
from xlstm_jax.introspection import warn_user

DEFAULT_SAVE_INTERVAL_STEPS = 1
DEFAULT_MAX_TO_KEEP = 3
DEFAULT_ASYNC_TIMEOUT_S = 60
_MISTAKES = ValueError, TypeError  # mistakes of the caller, perhaps in a single process
Result = TypeVar("Result")
_read_from: set[str] = set()  # real paths of directories from which this process has restored


class Checkpointer:
    """Saves and restores of states in a directory, one folder per step.

    Every process must create the ``Checkpointer`` with equal arguments and call each method together. Use a ``with``
    block, or call ``close``. (A program that exits without ``close`` waits for the last save.)

    Args:
      directory: a local path, or a URL that orbax supports (``gs://...``); the same directory in every process.
      save_interval_steps: ``save`` writes a step if this number divides the step, and skips other steps.
      max_to_keep: the number of newest steps to keep; None keeps every step. Falling back to an older step needs at
        least 2.
      async_timeout_s: time limit of a save in the background, in integer seconds, including its commit and the removal
        of old steps. After the limit the save has failed in every process: the next call raises a ``CheckpointError``.
      peer_timeout_s: seconds to wait, in each method, for a process that is alive but does not arrive; the
        ``TimeoutError`` then names the process. In a restore, a process that finishes reading later than another
        process by more than this time counts as missing.
      backend: the class that stores steps; see ``xlstm_jax.distributed.checkpoint.backend``.
    Raises:
      ValueError: a number is below 1, or folders cannot be created at ``directory``.
      TypeError: a number is not an integer.

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
        backend: MakeBackend = OrbaxBackend,
    ) -> None:
        self.save_interval_steps = at_least_1("save_interval_steps", save_interval_steps)
        self.max_to_keep = None if max_to_keep is None else at_least_1("max_to_keep", max_to_keep)
        self.async_timeout_s = at_least_1("async_timeout_s", async_timeout_s)
        if not peer_timeout_s >= 1:
            raise ValueError(f"peer_timeout_s={peer_timeout_s!r} must be at least 1.")
        self.peer_timeout_s = peer_timeout_s
        self.directory = steps.directory_path(directory)
        self._backend = backend(self.directory, self.max_to_keep, self.async_timeout_s)
        self._writer: Writer | None = None  # created by the first save
        self._place = ""  # real path of the directory in process 0, exchanged at the first save
        self._own_steps: set[int] = set()  # saved or restored by this object
        self._damaged: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest_step(self) -> int | None:
        """Returns the number of the newest step in the directory; None if the directory contains no steps.

        Process 0 lists the directory, and every process returns this result. The content of the step is not checked.
        Warns about later steps that are lost: an empty folder, a broken link, a renamed folder.

        Raises:
          CheckpointError: every step in the directory is lost, or a save has failed in the background.
        """
        self._together(lambda: self._check(place=True), CheckpointError, "look for the newest step")
        folders = self._steps_of_process_0()
        newest = steps.newest(folders)
        if folders and newest is None:
            raise CheckpointError(
                f"no sound checkpoint in {self.directory}: {_lost_text(folders)}. Remove them to start anew."
            )
        if newest is not None and (lost := steps.lost_after(folders, newest)):
            warn_user(f"step {newest} is the newest in {self.directory} that may be restored: {_damage(lost)}.")
        return newest

    def save(self, step: int, state: PyTree, *, force: bool = False) -> bool:
        """Starts to save a state; returns when its buffers may be donated, while files are still being written.

        Args:
          step: the step number, at least 0 and greater than the newest step in the directory.
          state: any pytree of arrays, NumPy arrays, Python numbers and PRNG keys, boxed or not. Process 0 saves the
            local leaves (leaves that are not global arrays), which must be equal in every process.
          force: save even if ``save_interval_steps`` does not divide ``step``.
        Returns:
          True if the step is being saved; False if the step is not due, or this object has already saved or restored
          the step.
        Raises:
          CheckpointError: this save or the preceding save failed (also raised if this step is not due); or a second
            job, or a second object of this process, writes the directory.
          ValueError: ``step`` is negative; the directory has this step or a newer one, and this object has neither
            saved nor restored ``step``; the newest step has a different tree and this process has not restored from the
            directory; or a local leaf differs between processes.
          TypeError: a leaf is not numeric.
          TimeoutError: a process did not call ``save`` for this step within ``peer_timeout_s``.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step={step} is negative; steps are numbered from 0.")
        if not force and step % self.save_interval_steps:
            self._check()
            return False
        check_alive(state, f"save of step {step}")
        # The calls below would wait forever for a missing process; this exchange has a time limit.
        self._together(self.wait, CheckpointError, f"save step {step}")
        # Before `_is_new`, which reads the newest step from the backend and needs an open backend.
        writer = self._become_writer()
        if not self._is_new(step):
            return False
        leaves = record.bare_leaves(state)
        arrays = record.stored_arrays(leaves)
        self._backend.check_dtypes(arrays)
        # Copied, because the caller may overwrite a NumPy array during the save.
        local = {path: np.array(array) for path, array in arrays.items() if not isinstance(array, jax.Array)}
        local_sums = checksum_each(local)
        described = record.record_without_sums(leaves, state)
        self._check_same_everywhere(record.with_sums(described, local_sums))
        self._check_same_experiment(described)
        placed = {path: array for path, array in arrays.items() if path not in local}
        # Captures the bits before the save: after `save` returns the caller may donate the buffers.
        sums = SavedSums(placed, self.async_timeout_s, self._place)

        def content() -> Json:
            return record.to_json(record.with_sums(described, local_sums | sums.result()), step)

        try:
            # Orbax rejects empty arrays; only the record stores their shapes.
            writer.save(step, {path: array for path, array in {**arrays, **local}.items() if array.size}, content)
        finally:
            # Also after a failure: a background thread may already be waiting in `content`, and would wait forever.
            sums.begin()
        return True

    def wait(self) -> None:
        """Waits until the last save is on disk; raises a ``CheckpointError`` if the save failed."""
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Waits for the last save, as ``wait`` does, and unlocks the directory."""
        if (writer := self._writer) is not None:
            self._writer = None
            writer.close()

    def _check(self, *, place: bool = False) -> None:
        if self._writer is not None:
            self._writer.check()
            if place:
                self._writer.check_place()

    def _is_new(self, step: int) -> bool:
        newest = self._backend.latest_step()
        if newest is None or step > newest:
            return True
        if step in self._own_steps:
            return False
        raise ValueError(
            f"step {step} cannot be saved to {self.directory}, which holds step {newest} already. Restore it and go "
            "on from there, move the newer steps away, or use another directory."
        )

    def _check_same_experiment(self, entries: record.Record) -> None:
        """Raises a ``ValueError`` if the state to save and the newest step in the directory are different trees.

        Trees are different if paths, shapes or dtypes differ. ``entries`` is the record of the state to save. Every
        process must call this method, because the processes wait for each other and raise together.

        Nothing is compared if the directory has no steps, if this ``Checkpointer`` has saved or restored the newest
        step, or if the record of the newest step cannot be read. Nothing is compared either if any ``Checkpointer`` of
        this process has restored from the directory: a restored run continues, and may change the tree.
        """
        newest = self._backend.latest_step()
        if newest is None or newest in self._own_steps or steps.real_path(self.directory) in _read_from:
            return

        def check() -> None:
            try:
                newest_record = self._read_record(newest)
            except (ValueError, OSError):  # damage must not prevent a new run from saving; `restore` reports damage
                return
            record.check_same_tree(entries, newest_record, f"step {newest} in {self.directory}")

        self._together(check, _MISTAKES, "compare a state with the newest step")

    def _check_same_everywhere(self, local: record.Record) -> None:
        """Raises a ``ValueError`` if a local leaf (no global array) has different values in two processes.

        ``local`` has shape, dtype and checksum of each local leaf of this process, by path. Every process must call
        this method, because processes exchange these entries. Different values are an error because only process 0
        writes.
        """
        if jax.process_count() == 1 or not local:
            return
        first, *others = [
            json.loads(text) for text in allgather_text(json.dumps(local), "compare local leaves", self.peer_timeout_s)
        ]
        for process, other in enumerate(others, start=1):
            unlike = sorted(path for path in other.keys() | first.keys() if other.get(path) != first.get(path))
            if unlike:
                raise ValueError(
                    f"{listed(unlike)}: processes 0 and {process} have different values, and only "
                    "one would be saved. Save different values as a global array with one row per process, made by "
                    "jax.make_array_from_process_local_data."
                )

    def restore(self, abstract_state: PyTree, step: int | None = None) -> PyTree:
        """Restores a state, bit for bit, into the structure, shardings and boxes of a target.

        Warns if the state was saved with a different optimizer of the same shapes.

        Args:
          abstract_state: the target: ``ShapeDtypeStruct`` with shardings (see ``abstract_train_state``), or a state of
            arrays. Each leaf is restored as the type of the target leaf: an array with the same sharding, a NumPy
            array, a Python number, a PRNG key. Fields without leaves (``apply_fn``, ``tx``) are taken from the target.
          step: the step to restore; None restores the newest sound step, with a warning if newer steps are damaged.
        Raises:
          CheckpointError: the step does not exist, or the step (with None: every step) is damaged; names the damage.
          ValueError: a sound step has a different tree; names the leaf, and both shapes or dtypes. Or processes
            were called with different values of ``step``. (Both are raised in every process.)
          OSError: the system could not read a step (too many open files, no answer from a server); the step is not
            damaged.
          TimeoutError: a process did not arrive, or did not finish reading, within ``peer_timeout_s`` of another.
        """
        with interruptions_go_on():
            restored, entries, number = self._newest_intact(abstract_state, step, lambda *_: "")
        record.warn_if_other_optimizer(f"step {number} in {self.directory}", entries, abstract_state)
        self._own_steps.add(number)
        _read_from.add(steps.real_path(self.directory))
        return record.boxed_like(abstract_state, restored)

    def restore_params(self, abstract_params: PyTree, step: int | None = None, *, path: str | None = None) -> PyTree:
        """Restores only the parameters of a state, saved with any optimizer, for evaluation or to start a new run.

        The optimizer state is not read. The parameters are checked as ``restore`` checks a state.

        Args:
          abstract_params: the target: parameters of the plain or of a sharded model, arrays or ``ShapeDtypeStruct``
            with shardings. (``abstract_train_state(model, optax.identity(), ...).params`` needs no memory.)
          step: the step to restore; None restores the newest sound step, with a warning if newer steps are damaged.
          path: path of the parameters in the saved state, as ``"train/params"``. None searches for the parameters: a
            part called ``params``, or the saved state itself if the state consists of the parameters.
        Raises:
          CheckpointError, OSError, TimeoutError: as ``restore``.
          ValueError: a sound step has different parameters, or several parts called ``params``; names them.

        >>> import tempfile
        >>> with Checkpointer(tempfile.mkdtemp()) as checkpointer:
        ...     checkpointer.save(100, {"params": {"w": np.ones(3)}, "opt_state": {"w": np.zeros(3)}})
        ...     checkpointer.restore_params({"w": np.zeros(3)})
        True
        {'w': array([1., 1., 1.])}
        """

        def part_of(entries: record.Record, where: str) -> str:
            return record.part_of(entries, where, names=record.bare_leaves(abstract_params).keys(), path=path)

        with interruptions_go_on():
            restored, *_ = self._newest_intact(abstract_params, step, part_of, "the parameters of ")
        _read_from.add(steps.real_path(self.directory))
        return record.boxed_like(abstract_params, restored)

    def _newest_intact(
        self, target: PyTree, step: int | None, part_of: Callable[[record.Record, str], str], part: str = ""
    ) -> tuple[record.Leaves, record.Record, int]:
        """Reads the leaves of ``step``, or, if ``step`` is None, of the newest undamaged step.

        Warns about each damaged newer step. Every process must call this method, and every process reads the same step.

        Args:
          target: the tree to restore, whose leaves give shapes, dtypes and shardings.
          step: number of the step, or None.
          part_of: takes the record of a step and the name of the step in errors; returns the path prefix of the part of
            the saved state to read, as ``"params/"``; "" for the full state.
          part: the part in errors, as ``"the parameters of "``; "" for the full state.
        Returns:
          The restored leaves by path of ``target``, the record entries of the part, and the number of the step.
        Raises:
          CheckpointError: there is no step to read, or every step to read is damaged.
          ValueError: an undamaged step does not fit ``target``.
        """
        action = f"restore {part}{'the newest step' if step is None else f'step {step}'}"
        self._together(self.wait, CheckpointError, action)
        likes = self._together(lambda: record.target_leaves(target), _MISTAKES, action)
        problems: dict[int, str] = {}
        # Every process uses the listing of process 0; with local listings processes could read different steps.
        folders = self._steps_of_process_0()
        for candidate in self._candidates(step, folders):
            try:
                restored, entries = self._read(candidate, likes, part_of)
            except CheckpointError as error:
                problems[candidate] = str(error)
                continue
            problems |= steps.lost_after(folders, candidate) if step is None else {}
            self._damaged |= problems.keys()
            for number, problem in problems.items():
                warn_user(
                    f"step {number} in {self.directory} is damaged and was passed over: {problem}. Restored step "
                    f"{candidate} instead. (The next save renames the folder of step {number}.)",
                )
            return restored, entries, candidate
        raise CheckpointError(f"no sound checkpoint in {self.directory}: {_damage(problems)}. Nothing was restored.")

    def _candidates(self, step: int | None, folders: Mapping[int, steps.StepFolder]) -> list[int]:
        """Returns the numbers of the steps to try, newest first.

        The result is ``[step]``; if ``step`` is None, the numbers of all steps without a known problem. ``folders`` has
        the listed step folders by number.

        Raises:
          CheckpointError: no step is without a problem; or the folder of ``step`` does not exist or has a problem.
            Names the problems.
        """
        sound, lost = sorted((n for n in folders if not folders[n].problem), reverse=True), _lost_text(folders)
        if step is None and sound:
            return sound
        if step is not None and operator.index(step) in sound:
            return [operator.index(step)]
        if lost and (step is None or step in folders):
            raise CheckpointError(f"no sound checkpoint in {self.directory}: {lost}. Nothing was restored.")
        if not sound:
            raise CheckpointError(f"{self.directory} holds no checkpoint; nothing was restored.")
        rest = f" ({lost})" if lost else ""
        raise CheckpointError(f"{self.directory} has no step {step}; it holds {sorted(sound)}{rest}.")

    def _read(
        self, step: int, likes: record.Leaves, part_of: Callable[[record.Record, str], str]
    ) -> tuple[record.Leaves, record.Record]:
        """Reads and checks a part of the state in a step; returns (restored leaves, record entries).

        Restored leaves are by path in ``likes``, each of the type of its leaf in ``likes``. Record entries (shape,
        dtype, checksum) are of the part, by path in the saved state. Every process must call this method. An error in
        one process is raised in every process: a ``CheckpointError`` if the step is damaged, a ``ValueError`` if the
        step does not fit ``likes``, an ``OSError`` for a system error.

        Args:
          step: number of the step.
          likes: leaves of the target by path, which give shapes, dtypes and shardings.
          part_of: takes the record of the step and the name of the step in errors; returns the path prefix of the part.
        """
        where, reads = f"step {step} in {self.directory}", f"read step {step}"
        everything = self._read_on_all_processes(lambda: self._read_record(step), where, reads)

        def part() -> tuple[record.Record, record.Leaves]:
            begin = part_of(everything, where)
            entries = {path: entry for path, entry in everything.items() if path.startswith(begin)}
            wanted = {f"{begin}{path}": like for path, like in likes.items()}
            record.check_fits(entries, wanted, where)
            return entries, wanted

        entries, wanted = self._together(part, _MISTAKES, reads)
        # Reading and checking are separate exchanges: checksums are programs with collectives, in which the processes
        # would wait for a process that could not read its shards.
        arrays = self._read_on_all_processes(lambda: self._read_arrays(step, entries, wanted), where, reads)
        self._read_on_all_processes(lambda: record.check_sound(entries, arrays), where, reads)
        leaves = (record.as_like(arrays[at], entries[at], like, at) for at, like in wanted.items())
        return dict(zip(likes, leaves, strict=True)), entries

    def _read_record(self, step: int) -> record.Record:
        """Returns the record of a step: shape, dtype and checksum of each leaf, by path.

        Before, each process checks that the record of a local folder is a regular file, and process 0 checks every file
        of the folder. Raises a ``ValueError`` for a file that is not regular or a damaged record.
        """
        if not steps.is_url(self.directory):
            folder = self.directory / str(step)
            steps.check_file(folder / self._backend.record_file)
            # Process 0 checks the remaining files for every process: a large job has many files.
            if jax.process_index() == 0:
                steps.check_files(folder)
        try:
            return record.from_json(self._backend.read_record(step), step)
        except ValueError as error:
            file = self.directory / str(step) / self._backend.record_file
            raise ValueError(f"{file} cannot be read: {error}") from None

    def _read_arrays(self, step: int, entries: record.Record, likes: record.Leaves) -> Arrays:
        """Returns the stored arrays of a step by path: an array for each entry of the record ``entries``.

        ``likes`` has the leaves of the target, by path in ``entries``. The result is a ``jax.Array`` in the sharding of
        its leaf, or a NumPy array with all values if each process reads the full leaf (``record.reads_full_array``). An
        array of size 0, such as shape [0, 3], is not stored, and is created here.
        """
        structs = record.read_structs(entries, likes)
        empty = {path: np.zeros(struct.shape, struct.dtype) for path, struct in structs.items() if not struct.size}
        wanted = {path: struct for path, struct in structs.items() if struct.size}
        return {**empty, **self._backend.read_arrays(step, wanted)}

    def _steps_of_process_0(self) -> dict[int, steps.StepFolder]:
        """Returns a ``StepFolder`` for each step, by the number in the folder name, as process 0 lists the directory.

        A ``StepFolder`` has the step number in the record, and a problem. Every process must call this method. On
        network file systems, which cache, the listings of the processes may differ.
        """

        def listing() -> str:
            if jax.process_index() != 0:
                return "[]"
            return json.dumps([*steps.steps_in(self.directory, self._backend, read_records=True).items()])

        action = "list the steps of a checkpoint"
        text = allgather_text(
            self._read_on_all_processes(listing, str(self.directory), action), action, self.peer_timeout_s
        )[0]
        return {number: steps.StepFolder(*fields) for number, fields in json.loads(text)}

    def _together(
        self, work: Callable[[], Result], failure: type[Exception] | tuple[type[Exception], ...], action: str
    ) -> Result:
        return raise_on_all(work, failure, action, self.peer_timeout_s)

    def _read_on_all_processes(self, work: Callable[[], Result], where: str, action: str) -> Result:
        return read_on_all_processes(work, where, action, self.peer_timeout_s)

    def _become_writer(self) -> Writer:
        """Returns the ``Writer`` of the directory (holds the lock, and runs saves), locked and opened, for ``save``.

        Every process must call this method. In the first call, and after a restore has found damaged steps, process 0
        creates and locks the directory, removes empty step folders and renames damaged steps; then every process opens
        the backend. Other calls return the same writer. Raises a ``CheckpointError`` if a second job or object writes
        the directory.
        """
        if self._writer is not None and self._writer.is_open and not self._damaged:
            return self._writer

        def locked_and_cleared() -> Writer:
            self.directory.mkdir(parents=True, exist_ok=True)
            is_first = jax.process_index() == 0
            if self._writer is None:
                limit = self.async_timeout_s
                self._writer = Writer(self.directory, self._backend, self, self._own_steps, limit, locks=is_first)
            if is_first:
                steps.clear(self.directory, self._backend, self._damaged)
            return self._writer

        # Order: lock, clear, open the backend. Only the holder of the lock may move or remove folders; and orbax lists
        # the steps at opening, so a step must not be moved away afterwards.
        writer = self._together(locked_and_cleared, CheckpointError, "open a directory of checkpoints for writing")
        self._damaged.clear()
        # The path of the directory may differ between processes, because of a local link or mount.
        place = steps.real_path(self.directory)
        self._place = allgather_text(place, "name a directory of checkpoints", self.peer_timeout_s)[0]
        writer.open()
        return writer


def at_least_1(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, and must be a whole number.") from None
    if number < 1:
        raise ValueError(f"{name}={value!r} must be at least 1.")
    return number


def _damage(problems: Mapping[int, str]) -> str:
    return "; ".join(f"step {number} is damaged: {problem}" for number, problem in problems.items())


def _lost_text(folders: Mapping[int, steps.StepFolder]) -> str:
    return _damage({number: lost.problem for number, lost in sorted(folders.items(), reverse=True) if lost.problem})
