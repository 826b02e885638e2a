"""Tests of the writer of a directory: a lock, reports of failed saves, a final wait; I/O errors are no damage."""

import fcntl
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.support import in_case
from xlstm_jax.distributed.checkpoint import steps, writer
from xlstm_jax.distributed.checkpoint.checkpointer import Checkpointer, CheckpointError
from xlstm_jax.distributed.checkpoint.checksums import SavedSums
from xlstm_jax.distributed.checkpoint.errors import read_on_all_processes
from xlstm_jax.distributed.checkpoint.orbax_backend import OrbaxBackend
from xlstm_jax.distributed.processes import collective_errors

ROOT = Path(__file__).parents[2]
SMALL, LARGE = {"w": np.arange(3)}, {"w": np.random.default_rng(0).normal(size=(100, 1000))}
ZEROS = {"w": np.zeros(3, int)}
LIMIT_S = 120  # of what hangs


def spawn(*args):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint_process", *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line_of(process):
    """Returns the next line of the output of a process, which is killed if it prints none."""
    kill = threading.Timer(LIMIT_S, process.kill)
    kill.start()
    try:
        return process.stdout.readline()
    finally:
        kill.cancel()


def wait_until(is_so, what):
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s until {what}"
        time.sleep(0.01)


def steps_in(folder):
    return {path.name for path in folder.iterdir() if path.is_dir()}


@contextmanager
def limited(what, soft):
    """Lowers a resource limit of this process inside the ``with`` block."""
    limits = resource.getrlimit(what)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(what, (soft, limits[1]))
        yield
    finally:
        resource.setrlimit(what, limits)
        signal.signal(signal.SIGXFSZ, old)


# ---------------------------------------------------------------------------------------------- reports of failed saves


@pytest.mark.parametrize(
    "told_by",
    [
        lambda checkpointer: checkpointer.wait(),
        lambda checkpointer: checkpointer.save(21, SMALL),  # not due
        lambda checkpointer: checkpointer.save(30, SMALL),
        lambda checkpointer: checkpointer.latest_step(),
        lambda checkpointer: checkpointer.restore(ZEROS),
        lambda checkpointer: checkpointer.close(),
    ],
    ids=["wait", "save, not due", "save", "latest_step", "restore", "close"],
)
def test_next_call_raises_for_a_failed_save_and_only_once(told_by, tmp_path):
    """The next call reports a failed save, once; a limit of 10 kB per file emulates a full disk."""
    with Checkpointer(tmp_path, 10) as checkpointer:
        checkpointer.save(10, SMALL)
        checkpointer.wait()
        with limited(resource.RLIMIT_FSIZE, 10_000):
            checkpointer.save(20, LARGE)
            wait_until(lambda: not checkpointer._backend.is_saving(), "the save has failed")
        with pytest.raises(CheckpointError, match=r"saving step 20 to .* failed: .*File too large.* MB left"):
            told_by(checkpointer)
        assert not checkpointer.save(21, SMALL) and checkpointer.latest_step() == 10
        assert checkpointer.save(20, LARGE)  # the disk has room again
    with Checkpointer(tmp_path) as checkpointer:
        assert np.array_equal(checkpointer.restore(LARGE)["w"], LARGE["w"])


def test_wait_raises_for_a_save_timeout_and_reports_the_clock_jump(tmp_path, monkeypatch):
    """A clock that jumps by an hour during a save is named as the cause of the timeout."""
    real, jumps = time.time, []

    def clock():
        thread = threading.current_thread()
        jumps.extend([3600] if thread.name == "async_save" else [])
        return real() + (sum(jumps) if thread.name == "async_save" or thread is threading.main_thread() else 0)

    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(time, "time", clock)
        checkpointer.save(1, SMALL)
        with pytest.raises(
            CheckpointError, match=r"step 1 .* TimeoutError.*clock jumped ahead by \d{4,} s.*save again"
        ):
            checkpointer.wait()


def test_calls_raise_for_a_commit_beyond_async_timeout_until_the_rename_ends(tmp_path, monkeypatch):
    """A commit that exceeds ``async_timeout_s`` raises until the rename ends; the directory stays locked."""
    ends, rename, begun = threading.Event(), os.rename, time.monotonic()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, SMALL)
    # Longer than five saves without a hanging commit take on this machine.
    timeout_s = 1 + math.ceil(5 * (time.monotonic() - begun))
    with Checkpointer(tmp_path, async_timeout_s=timeout_s) as checkpointer, ExitStack() as before_close:
        before_close.callback(ends.set)
        monkeypatch.setattr(os, "rename", lambda *args, **kwargs: (ends.wait(600), rename(*args, **kwargs))[1])
        begun = time.monotonic()
        checkpointer.save(2, SMALL)
        for ask in (checkpointer.wait, lambda: checkpointer.save(3, SMALL), lambda: checkpointer.restore(ZEROS)):
            with (
                in_case(ask=ask),
                pytest.raises(
                    CheckpointError, match=rf"saving step 2 .*not on disk within async_timeout_s={timeout_s} s.*goes on"
                ),
            ):
                ask()
        # No call waited for the rename, which ends below; on a slow machine each call may take longer.
        assert time.monotonic() - begun > timeout_s
        assert checkpointer._backend.is_saving() and not may_write(tmp_path)
        ends.set()
        wait_until(lambda: not checkpointer._backend.is_saving(), "the rename has ended")
        checkpointer.wait()  # the step is on disk
        assert not checkpointer.save(2, SMALL) and checkpointer.save(3, SMALL)
    assert steps_in(tmp_path) == {"1", "2", "3"} and may_write(tmp_path)


@pytest.mark.slow
def test_program_with_a_hanging_commit_exits_with_1_and_reports_the_timeout(tmp_path):
    code, output, errors = ended("hangs", tmp_path)
    assert "saving at the end: True" in output  # guard
    assert code == 1 and steps_in(tmp_path) >= {"1"} and "2" not in steps_in(tmp_path)
    assert f"saving step 2 to {tmp_path} failed: TimeoutError: it was not on disk" in errors


# -------------------------------------------------------------------------------------------------- end of the program


def ended(mode, folder):
    process = spawn(mode, folder)
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, output, errors


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 starts no threads at its end")
def test_program_exit_without_close_finishes_the_save(tmp_path):
    code, output, errors = ended("ends", tmp_path)
    assert (code, errors[-500:]) == (0, "")
    assert "saving at the end: True" in output  # guard: the save was not complete before the program ended
    with Checkpointer(tmp_path) as checkpointer:
        np.testing.assert_array_equal(checkpointer.restore({"w": np.zeros(200_000, int)}, 2)["w"], np.arange(200_000))


def test_program_with_a_failed_last_save_exits_with_1_and_reports_the_error(tmp_path):
    code, _, errors = ended("fails", tmp_path)
    assert code == 1 and steps_in(tmp_path) >= {"1"}
    assert f"saving step 2 to {tmp_path} failed: " in errors and "File too large" in errors
    assert errors.endswith("Call Checkpointer.close, or use it in a with block.\n")


# ------------------------------------------------------------------------------------------------------------- the lock


def test_save_raises_for_a_directory_locked_by_another_process_until_the_process_ends(tmp_path):
    first, child = spawn("writer", tmp_path), None
    try:
        told = line_of(first)
        assert told.startswith("saved"), first.stderr.read()[-3000:]
        child = int(told.split()[1])
        with Checkpointer(tmp_path) as checkpointer:
            assert np.array_equal(checkpointer.restore(ZEROS)["w"], [0, 1, 2])  # reading is free
            with pytest.raises(CheckpointError, match=rf"another job writes .*: process {first.pid} on .*\. Stop it"):
                checkpointer.save(2, SMALL)
            first.kill()  # while a forked child of the first process lives on
            first.wait(LIMIT_S)  # all files of the process are closed, the lock file among them
            assert checkpointer.save(2, SMALL)
        os.kill(child, 0)  # guard: the child is alive
    finally:
        first.kill()
        if child:
            os.kill(child, signal.SIGKILL)
        first.communicate(timeout=30)


def may_write(folder):
    """Returns whether another process could lock the folder."""
    try:
        writer.DirectoryLock(folder).close()
    except CheckpointError:
        return False
    return True


def test_writer_lock_survives_a_copy_of_the_directory_and_a_second_reader(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, SMALL)
        checkpointer.wait()
        shutil.copytree(tmp_path / "run", tmp_path / "backup")
        assert (tmp_path / "run" / ".writer").read_text().startswith(f"process {os.getpid()} on ")
        assert not may_write(tmp_path / "run") and may_write(tmp_path / "backup")
        with Checkpointer(tmp_path / "run") as other:
            with pytest.raises(CheckpointError, match=r"another Checkpointer of this process writes .*close it first"):
                other.save(2, SMALL)
            assert np.array_equal(other.restore(ZEROS)["w"], [0, 1, 2])
        assert not may_write(tmp_path / "run")
        assert checkpointer.save(2, SMALL)
    assert may_write(tmp_path / "run") and steps_in(tmp_path / "run") == {"1", "2"}


class ForkedError(Exception):
    pass


def test_child_forked_while_the_lock_is_taken_or_released_closes_the_lock_file(tmp_path, monkeypatch):
    """A child forked while the lock is taken or released closes the lock; this process runs the fork handler."""

    def forked_at_once(file, _):
        locked = os.fstat(file)
        writer._close_in_child()
        with suppress(OSError):  # raised if the number is free; another thread may have opened a file with the number
            assert not os.path.samestat(os.fstat(file), locked)
        raise ForkedError

    def forked_meanwhile():
        assert not may_write(tmp_path)  # guard
        writer._close_in_child()
        assert may_write(tmp_path)
        raise ForkedError

    with monkeypatch.context() as taking, pytest.raises(ForkedError):
        taking.setattr(fcntl, "flock", forked_at_once)
        writer.DirectoryLock(tmp_path)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, SMALL)
    checkpointer.wait()
    real = checkpointer._backend.close
    monkeypatch.setattr(checkpointer._backend, "close", forked_meanwhile)
    with pytest.raises(ForkedError):
        checkpointer.close()
    real()


def test_new_checkpointer_waits_for_the_save_of_a_discarded_checkpointer(tmp_path, monkeypatch):
    """A new ``Checkpointer`` waits for the save of a discarded one, as in a notebook cell that runs twice."""
    waits, wait_for_commit, held = [], writer.Writer._wait_for_commit, []

    def go_on_and_wait(of_writer):
        waits.append(of_writer._backend.is_saving())
        held[0].set()
        wait_for_commit(of_writer)

    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as slow:  # the first save goes on only when somebody waits for it
        slow.setattr(SavedSums, "begin", lambda self: held.append(self._begun))
        checkpointer.save(1, LARGE)
    monkeypatch.setattr(writer.Writer, "_wait_for_commit", go_on_and_wait)
    try:
        checkpointer = Checkpointer(tmp_path)
        assert checkpointer.save(2, LARGE)
        checkpointer.close()
    finally:
        held[0].set()
    assert waits[0] is True and steps_in(tmp_path) == {"1", "2"} and may_write(tmp_path)


@pytest.mark.parametrize(
    "plant", [lambda path: path.symlink_to("precious"), os.mkfifo, os.mkdir], ids=["link", "pipe", "folder"]
)
def test_save_raises_for_a_link_pipe_or_folder_at_the_lock_path(plant, tmp_path):
    (tmp_path / "precious").write_text("mine")
    plant(tmp_path / ".writer")
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match=r"\.writer is a link or no regular file.*Remove it"):
            checkpointer.save(1, SMALL)
        assert (tmp_path / "precious").read_text() == "mine"
        shutil.rmtree(tmp_path / ".writer") if (tmp_path / ".writer").is_dir() else (tmp_path / ".writer").unlink()
        assert checkpointer.save(1, SMALL)


def moved_link(where):
    (where / "run").unlink()
    (where / "run").symlink_to("other")


def replaced_folder(where):
    (where / "one").rename(where / "away")
    (where / "one").mkdir()


@pytest.mark.parametrize("change", [moved_link, replaced_folder])
def test_calls_raise_for_a_directory_replaced_after_the_writer_locked_the_original(change, tmp_path):
    (tmp_path / "one").mkdir()
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    with Checkpointer(tmp_path / "other") as checkpointer:
        checkpointer.save(1, {"w": np.arange(3)})
    (tmp_path / "run").symlink_to("one")
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.save(2, SMALL)
    checkpointer.wait()
    change(tmp_path)
    asked = (lambda: checkpointer.save(3, SMALL), checkpointer.latest_step, lambda: checkpointer.restore(ZEROS))
    for ask in (*asked, checkpointer.wait, checkpointer.close):
        with (
            in_case(ask=ask),
            pytest.raises(CheckpointError, match=r"run is no longer the folder that this job writes and has locked"),
        ):
            ask()
    assert "3" not in steps_in(tmp_path / "other")


# ----------------------------------------------------------------------------------------------------------- I/O errors


SHORTAGES = {
    "ESTALE": OSError(116, "Stale file handle"),
    "EIO": OSError(5, "Input/output error"),
    "memory": MemoryError(),
    "threads": RuntimeError("can't start new thread"),
    "time": TimeoutError(),
    "tensorstore": ValueError('UNAVAILABLE: Error reading "w/0" in OCDBT database'),
    "tensorstore's number": ValueError("INTERNAL: Error reading: Input/output error [os_error_code='5']"),
    "device": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes"),
}
DAMAGES = {
    "gone": FileNotFoundError(2, "No such file or directory"),
    "cut": ValueError('DATA_LOSS: Error reading "w/0"'),
    "tensorstore's number": ValueError("NOT_FOUND: Error opening: No such file or directory [os_error_code='2']"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, SMALL)
        checkpointer.save(2, SMALL)
    return folder


@pytest.fixture
def two_steps(written, tmp_path):
    return shutil.copytree(written, tmp_path / "run")


@pytest.fixture
def failing_once(monkeypatch):
    """Returns a function that makes the next read of arrays raise an error."""
    read_arrays = OrbaxBackend.read_arrays

    def fail(error):
        def read(*args):
            monkeypatch.setattr(OrbaxBackend, "read_arrays", read_arrays)
            raise error

        monkeypatch.setattr(OrbaxBackend, "read_arrays", read)

    return fail


@pytest.mark.parametrize("error", SHORTAGES.values(), ids=SHORTAGES)
def test_restore_raises_os_error_for_io_failures_and_keeps_the_step(error, two_steps, failing_once):
    with Checkpointer(two_steps) as checkpointer:
        failing_once(error)
        with pytest.raises(OSError, match=r"step 2 in .* could not be read: .*error of the system and no damage"):
            checkpointer.restore(ZEROS)
        assert np.array_equal(checkpointer.restore(ZEROS)["w"], [0, 1, 2])  # without a warning
        checkpointer.save(3, SMALL)
    assert steps_in(two_steps) == {"1", "2", "3"}


@pytest.mark.parametrize("error", DAMAGES.values(), ids=DAMAGES)
def test_restore_warns_of_damaged_data_and_save_moves_the_step_aside(error, two_steps, failing_once):
    """Guard of the test above: damage is no I/O error."""
    with Checkpointer(two_steps) as checkpointer:
        failing_once(error)
        with pytest.warns(match="step 2 in .* is damaged"):
            checkpointer.restore(ZEROS)
        checkpointer.save(2, SMALL)
    assert steps_in(two_steps) == {"1", "2", "2.damaged"}


def test_os_error_in_a_process_takes_precedence_over_damage_in_another_process(monkeypatch):
    """A failing storage that gives process 0 a short read and process 1 an OS error counts as an OS error."""

    def read(error, *others):
        def work():
            raise error

        monkeypatch.setattr(collective_errors, "allgather_text", lambda text, *_: told.append(text) or [text, *others])
        read_on_all_processes(work, "step 2", "read step 2", 1)

    told = []
    with pytest.raises(OSError, match=r"step 2 could not be read: OSError"):
        read(SHORTAGES["EIO"])
    with pytest.raises(OSError, match=r"process 0: ValueError: DATA_LOSS.*; process 1: OSError.* no damage"):
        read(DAMAGES["cut"], told[0])
    with pytest.raises(CheckpointError, match="process 0: ValueError: DATA_LOSS"):  # guard
        read(DAMAGES["cut"], "null")


def test_restore_raises_os_error_without_free_file_descriptors(two_steps):
    with Checkpointer(two_steps) as checkpointer:
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        with limited(resource.RLIMIT_NOFILE, free), pytest.raises(OSError, match=r"Too many open files.*no damage"):
            checkpointer.restore(ZEROS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpointer.restore(ZEROS)


def test_step_removed_between_listing_and_reading_is_ignored(two_steps, monkeypatch):
    with Checkpointer(two_steps) as checkpointer:
        listdir, lists_step_3 = os.listdir, []

        def before_the_removal(path="."):
            if Path(path) != two_steps:  # other threads list other folders
                return listdir(path)
            lists_step_3.append(path)
            return [*listdir(path), "3"]

        monkeypatch.setattr(steps.os, "listdir", before_the_removal)
        assert checkpointer.latest_step() == 2
        assert np.array_equal(checkpointer.restore(ZEROS)["w"], [0, 1, 2])
        assert len(lists_step_3) >= 2  # guard


# ----------------------------------------------------------------------------------------------------- strays and links


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def in_the_way(folder, name):
    (folder / "other").write_text("a file")
    pipe(folder / "pipe")
    makes = {
        "folder": lambda path: (path / "old" / "12").mkdir(parents=True),
        "file": lambda path: path.write_text("no step"),
        "pipe": pipe,
        "link to a step": lambda path: path.symlink_to("2"),
        "link to a file": lambda path: path.symlink_to("other"),
        "link to a pipe": lambda path: path.symlink_to("pipe"),
    }
    for number, (kind, make) in enumerate(makes.items()):
        path = folder / name.format(number)
        make(path)
        yield kind, path


@pytest.mark.parametrize("name", ["notes{}", "001{}", "-{}", "1{}.orbax-checkpoint-tmp", "1{}.damaged", "\u0661{}"])
def test_directory_entries_without_the_name_of_a_step_are_ignored(name, tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, SMALL)
        checkpointer.wait()
        strays = dict(in_the_way(tmp_path, name))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert checkpointer.latest_step() == 2
            assert np.array_equal(checkpointer.restore(ZEROS)["w"], SMALL["w"])
            assert checkpointer.save(3, SMALL)
            checkpointer.wait()
    with Checkpointer(tmp_path) as checkpointer:  # looks at the folder anew
        assert checkpointer.save(4, SMALL)
    lost = {kind: path for kind, path in strays.items() if not os.path.lexists(path)}
    assert not {kind: path for kind, path in lost.items() if not path.name.endswith("-tmp")}


def test_directory_entries_named_like_a_step_are_ignored_or_reported_as_damaged(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, SMALL)
        checkpointer.wait()
        strays = dict(in_the_way(tmp_path, "1{}"))
        with pytest.warns(match="is damaged") as caught:
            assert np.array_equal(checkpointer.restore(ZEROS)["w"], SMALL["w"])
        said = " ".join(str(warning.message) for warning in caught)
        named = {kind for kind, path in strays.items() if f"step {path.name} in" in said}
        assert named == {"folder", "link to a step", "link to a file", "link to a pipe"}
        assert checkpointer.save(20, SMALL)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() == 20


@pytest.mark.parametrize("what", ["leaves/metadata", "state/manifest.ocdbt", "state/d/more"])
def test_named_pipe_inside_a_step_is_reported_as_damage_without_blocking(what, tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, SMALL)
        checkpointer.save(2, SMALL)
        checkpointer.wait()
        pipe(tmp_path / "2" / what)
        with pytest.warns(match=f"step 2 in .* is damaged and was passed over: .*{what} is no regular file"):
            assert np.array_equal(checkpointer.restore(ZEROS)["w"], SMALL["w"])


def test_restore_through_a_symlink_allows_a_changed_state_in_the_link_target(tmp_path):
    (tmp_path / "latest").symlink_to("run")
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, SMALL)
    with Checkpointer(tmp_path / "run") as other, pytest.raises(ValueError, match="is of another state than the one"):
        other.save(2, SMALL | {"more": 1})  # guard
    with Checkpointer(tmp_path / "latest") as checkpointer:
        assert checkpointer.latest_step() == 1 and np.array_equal(checkpointer.restore(ZEROS)["w"], SMALL["w"])
    with Checkpointer(tmp_path / "run") as checkpointer:  # the run goes on from the state restored by the link
        assert checkpointer.save(2, SMALL | {"more": 1})


def test_second_checkpointer_removes_no_files_of_a_save_in_progress(tmp_path, monkeypatch):
    held = []
    with Checkpointer(tmp_path) as training:
        training.save(1, SMALL)
        training.wait()
        with monkeypatch.context() as slow:
            slow.setattr(SavedSums, "begin", lambda self: held.append(self._begun))
            training.save(2, SMALL)
        # Orbax makes the folder of the save in progress in the background.
        wait_until(lambda: any("tmp" in name for name in os.listdir(tmp_path)), "a folder of the save is there")
        before = {path.name for path in tmp_path.iterdir()}
        with Checkpointer(tmp_path) as evaluation:
            assert evaluation.latest_step() == 1
            for read in (evaluation.restore, evaluation.restore_params):
                assert np.array_equal(read(ZEROS)["w"], SMALL["w"])
            with pytest.raises(CheckpointError, match="another Checkpointer of this process writes"):
                evaluation.save(3, SMALL)
        assert {path.name for path in tmp_path.iterdir()} == before
        assert training._backend.is_saving()  # guard
        held[0].set()
        training.wait()
        assert training.latest_step() == 2


def test_save_hangs_if_it_runs_on_at_its_limit_with_a_second_of_grace(monkeypatch):
    now, is_saving = [0.0], [True]
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    saving = object.__new__(writer.Writer)
    backend = SimpleNamespace(is_saving=lambda: is_saving[0])
    vars(saving).update(_saving=3, _begun=(0.0, 100.0), _timeout_s=10.0, _backend=backend)
    found = []
    for now[0], saving._saving, is_saving[0] in (
        (110.9, 3, True),
        (111.0, 3, True),
        (111.0, 0, True),  # step 0 is a step
        (200.0, None, True),
        (200.0, 3, False),
    ):
        found.append(saving.hangs)
    assert found == [False, True, True, False, False]


def test_pipes_at_any_depth_of_a_step_are_found_and_regular_files_and_folders_are_not(tmp_path, monkeypatch):
    (tmp_path / "30" / "a" / "b").mkdir(parents=True)
    (tmp_path / "30" / "a" / "file").write_text("")
    steps.check_files(tmp_path / "30")
    steps.check_files(tmp_path / "nothing")
    os.mkfifo(tmp_path / "30" / "a" / "b" / "pipe")
    with pytest.raises(ValueError, match=r"30/a/b/pipe is no regular file\."):
        steps.check_files(tmp_path / "30")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^30/a/b/pipe is no regular file\."):
        steps.check_files("30")
    for path in (tmp_path, tmp_path / "30" / "a" / "file", tmp_path / "nothing"):
        steps.check_file(path)


def test_newest_step_has_no_problem_and_lost_steps_are_above_by_name_or_record():
    folders = {
        3: steps.StepFolder(3),
        7: steps.StepFolder(7),
        5: steps.StepFolder(9, "renamed"),
        8: steps.StepFolder(8),
    }
    folders[9] = steps.StepFolder(2, "empty")
    assert steps.newest(folders) == 8 and steps.newest({5: folders[5]}) is None and steps.newest({}) is None
    assert steps.lost_after(folders, 8) == {5: "renamed", 9: "empty"}
    assert steps.lost_after(folders, 9) == {} and steps.lost_after(folders, 1) == {5: "renamed", 9: "empty"}
