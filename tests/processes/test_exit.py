"""Whatever ends one process ends all of them soon, each with an exit code of ours; real processes over loopback."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from tests.ports import reserved_port
from tests.processes.test_processes import ROOT
from tests.processes.test_store import Store
from xlstm_jax.distributed.processes import exit as exits
from xlstm_jax.distributed.resilience import EXIT_FAILED

LIMIT_S = 240  # of a test that hangs
LEAVING_S = 3  # promised after an exception: docs/resilience.md


@pytest.fixture
def run(tmp_path):
    """Starts processes; kills what is left of them."""
    running = []

    def start(mode, count):
        port, command = reserved_port(), [sys.executable, "-m", "tests.leaving_process", mode]
        for rank in range(count):
            arguments = [*command, str(rank), str(count), str(port), str(tmp_path / "run"), str(time.time())]
            running.append(
                subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        return running

    yield start
    for process in running:
        process.kill()
        process.wait()


def line_of(process, word):
    """Reads lines up to one that begins with the word; a process that does not print it in time is killed."""
    kill = threading.Timer(LIMIT_S, process.kill)
    kill.start()
    try:
        for line in process.stdout:
            if line.startswith(word):
                return line.split()
    finally:
        kill.cancel()
    raise AssertionError(f"no line {word!r}; errors: {process.stderr.read()[-3000:]}")


def time_after(processes, word):
    """Returns when the last process wrote the word, and the seconds that it had run by then.

    To start takes a process many times the work that it takes to end, and both take longer on a slow or busy machine:
    the seconds of the start bound those of the end.
    """
    lines = [line_of(process, word) for process in processes]
    return max((float(at), float(ran)) for _, at, ran in lines)


def ended(processes):
    """Exit codes and what was written to stderr, of each."""
    errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    return [process.returncode for process in processes], errors


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode, count", [("timeout", 2), ("timeout, first", 4)])
def test_timeout_error_naming_a_stuck_peer_ends_all_processes(run, mode, count):
    """The stuck one too, which sleeps in Python."""
    processes = run(mode, count)
    joined, start_s = time_after(processes, "JOINED")
    codes, errors = ended(processes)
    assert time.time() - joined < 1 + LEAVING_S + start_s, codes  # peer_timeout_s, and then
    assert codes == [EXIT_FAILED] * count, "\n".join(error[-1500:] for error in errors)
    stuck = 0 if "first" in mode else count - 1
    assert any(f"TimeoutError: process {stuck} did not come to look for the newest step" in text for text in errors)
    assert "has left with exit code 13: TimeoutError: process" in errors[stuck]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["exception", "guard, first"])
def test_exception_in_a_process_ends_the_peers_with_the_error_text(run, mode):
    processes = run(mode, 2)
    joined, start_s = time_after(processes, "JOINED")
    codes, errors = ended(processes)
    assert time.time() - joined < LEAVING_S + start_s and codes == [EXIT_FAILED] * 2, errors
    peer = errors[1 if "first" in mode else 0]
    assert "has left with exit code 13: OSError: the data are gone. Process" in peer


ALONE = """
import sys, threading
from types import SimpleNamespace
import jax
from xlstm_jax.distributed.processes import exit
from xlstm_jax.private_names import job

heard_of_peer, printed_own_error = threading.Event(), threading.Event()


def pause(seconds):
    heard_of_peer.set()
    printed_own_error.wait(60)


def print_error(*error):
    sys.__excepthook__(*error)
    printed_own_error.set()


exit.time, sys.excepthook = SimpleNamespace(sleep=pause), print_error
jax.distributed.initialize("127.0.0.1:{port}", 1, 0)
exit._start_listening()
exit._post(job.client, [0], "process 1 has left with exit code 13: OSError: the data are gone")
heard_of_peer.wait(60)
raise OSError("my data are gone, too")
"""


def test_process_prints_the_local_error_before_the_error_of_a_peer():
    """A process alone, in whose store the reason of another stands.

    The listening thread pauses before it prints this reason. Here the pause ends when the local error is printed, so
    that the test does not depend on the speed of the machine.
    """
    command = [sys.executable, "-c", ALONE.format(port=reserved_port())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    own, other = (done.stderr.find(text) for text in ("OSError: my data are gone, too", "OSError: the data are gone"))
    assert done.returncode == EXIT_FAILED and 0 <= own < other, done.stderr


def test_process_failing_shortly_after_a_peer_prints_the_local_error(run):
    codes, errors = ended(run("exception, both, first", 2))
    assert codes == [EXIT_FAILED] * 2 and "OSError: my data are gone, too" in errors[1]


def test_program_with_an_explicit_shutdown_exits_with_0(run):
    """Four processes, of which one in four ended with SIGABRT when the thread that waits for peers was not joined."""
    codes, errors = ended(run("shutdown", 4))
    assert codes == [0] * 4, "\n".join(error[-1500:] for error in errors)


def test_ctrl_c_to_a_single_process_ends_all_processes(run):
    processes = run("interrupt", 2)
    _, start_s = time_after(processes, "JOINED")
    processes[0].send_signal(signal.SIGINT)
    begun = time.monotonic()
    codes, _ = ended(processes)
    assert codes == [130, EXIT_FAILED] and time.monotonic() - begun < LEAVING_S + start_s


def test_hanging_checkpoint_commit_ends_all_processes(run, tmp_path):
    processes = run("save", 2)
    saved, start_s = time_after(processes, "SAVED")
    codes, errors = ended(processes)
    assert time.time() - saved < 2 + LEAVING_S + start_s and set(codes) <= {1, EXIT_FAILED}, (codes, errors)
    assert any(
        "saving step 2 to" in text and "it was not on disk within async_timeout_s=2 s" in text for text in errors
    )
    assert sorted(name for name in os.listdir(tmp_path / "run") if name.isdigit()) == ["1"]


@pytest.mark.slow
def test_process_pause_below_the_step_timeout_ends_no_process(run):
    """Twelve seconds, stopped: more than the heartbeat of ten seconds that once ended such a job."""
    stopped_s = 12
    processes = run("pause", 2)
    for process in processes:
        line_of(process, "STEP")
    processes[1].send_signal(signal.SIGSTOP)
    time.sleep(stopped_s)
    assert [process.poll() for process in processes] == [None, None]  # guard: both were in the midst of their steps
    processes[1].send_signal(signal.SIGCONT)
    codes, errors = ended(processes)
    assert codes == [0, 0], errors


# ------------------------------------------------------------- one process, and a store in memory instead of the others


class Left(BaseException):
    """In place of the end of the process."""


class Job:
    """Process of a job of three, whose store is in memory."""

    def __init__(self, process_id):
        self.client, self.process_id, self.num_processes = Store(), process_id, 3

    @property
    def reasons(self):
        """The text posted for each process."""
        return {int(key.rpartition("/")[2]): text for key, text in self.client.texts.items()}


@pytest.fixture
def job_of(monkeypatch):
    """Returns a function that makes this process the one with an index; the process leaves by raising ``Left``."""

    def left(code):
        raise Left(code)

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", left)
    monkeypatch.setattr(exits, "OWN_ERROR_S", 0)
    monkeypatch.setattr(exits, "COORDINATOR_GRACE_S", 0)

    def start(process_id):
        job = Job(process_id)
        monkeypatch.setattr(exits, "job", job)
        return job

    return start


def code_of(work, *args):
    with pytest.raises(Left) as left:
        work(*args)
    return left.value.args[0]


def test_leaving_process_tells_every_other_process_its_reason_on_one_line(job_of):
    job = job_of(1)
    assert code_of(exits.leave, 13, "OSError: the data\n are gone.") == 13
    told = "process 1 has left with exit code 13: OSError: the data are gone"
    assert job.reasons == {0: told, 2: told}


def test_process_that_leaves_without_a_reason_tells_the_others_nothing(job_of):
    job = job_of(1)
    assert code_of(exits.leave, 0) == 0 and job.reasons == {}


def test_first_of_several_leaving_processes_gives_the_reason(job_of):
    job = job_of(1)
    exits._post(job.client, [0], "process 2 has left")
    code_of(exits.leave, 13, "an error")
    assert job.reasons[0] == "process 2 has left" and "an error" in job.reasons[2]


@pytest.mark.parametrize("process_id, waits", [(0, 1), (2, 0)])
def test_only_process_0_which_has_the_store_waits_before_it_leaves(job_of, monkeypatch, process_id, waits):
    job_of(process_id)
    slept = []
    monkeypatch.setattr(exits, "COORDINATOR_GRACE_S", 1.5)
    monkeypatch.setattr(exits, "time", SimpleNamespace(sleep=slept.append))  # other threads sleep by the real module
    code_of(exits.leave, 13, "an error")
    assert slept == [1.5] * waits


def test_process_that_is_told_a_reason_prints_it_and_leaves_after_waits_that_have_timed_out(job_of, capfd):
    job, answers = job_of(2), iter([jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED"), "process 1 has left"])

    def get(key, wait_ms):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    job.client.blocking_key_value_get = get
    assert code_of(exits._listen, job.client, 2) == EXIT_FAILED
    assert capfd.readouterr().err == "\nprocess 1 has left. Process 2 ends with it.\n"


def test_process_that_is_told_a_reason_first_gives_its_main_thread_time_to_print_an_error(job_of, monkeypatch, capfd):
    job = job_of(2)
    exits._post(job.client, [2], "process 1 has left")
    monkeypatch.setattr(exits, "OWN_ERROR_S", 0.75)
    sleep = lambda seconds: os.write(2, f"An error, printed within {seconds} s.".encode())  # noqa: E731
    monkeypatch.setattr(exits, "time", SimpleNamespace(sleep=sleep))  # other threads sleep by the real module
    assert code_of(exits._listen, job.client, 2) == EXIT_FAILED
    own, _, other = capfd.readouterr().err.partition("\n")
    assert own == "An error, printed within 0.75 s." and other.startswith("process 1 has left.")


def test_listening_ends_without_leaving_if_the_text_is_empty_or_the_store_is_gone(job_of):
    job, asked = job_of(2), []
    exits._post(job.client, [2], "")
    exits._listen(job.client, 2)

    def gone(key, wait_ms):
        if asked:
            raise Left("asked a store again that is gone")  # without end, would this be an error of the store
        asked.append(key)
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: the service is gone")

    job.client.blocking_key_value_get = gone
    exits._listen(job.client, 2)
    assert len(asked) == 1  # guard


@pytest.mark.parametrize("error, code", [(ValueError("no rows"), EXIT_FAILED), (KeyboardInterrupt("stop"), 130)])
def test_program_that_ends_by_an_exception_leaves_with_its_text(job_of, monkeypatch, error, code):
    job = job_of(1)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert code_of(exits._at_the_end, threading.current_thread()) == code
    assert job.reasons[0].endswith(f"exit code {code}: {type(error).__name__}: {error}")


def test_program_that_ends_without_an_exception_ends_only_its_own_thread(job_of, monkeypatch):
    job = job_of(1)
    monkeypatch.delattr(sys, "last_value", raising=False)
    listener = threading.Thread(target=exits._listen, args=(job.client, 1))
    listener.start()
    exits._at_the_end(listener)
    assert not listener.is_alive() and job.reasons == {1: ""}


def test_work_in_time_ends_with_its_errors_or_at_its_limit():
    done, never = [], threading.Event()
    exits.in_time(lambda: done.append(1), 10)
    exits.in_time(lambda: done[2], 10)
    begun = time.monotonic()
    exits.in_time(lambda: never.wait(10), 0.05)
    never.set()
    assert done == [1] and time.monotonic() - begun < 5
