"""Whatever ends one process ends all of them soon, each with an exit code of ours; real processes over loopback."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.processes.test_processes import ROOT, free_port
from xlstm_jax.distributed.resilience import EXIT_FAILED

LIMIT_S = 240  # of a test that hangs
LEAVING_S = 3  # promised after an exception: docs/resilience.md


@pytest.fixture
def run(tmp_path):
    """Starts processes; kills what is left of them."""
    running = []

    def start(mode, count):
        port, command = free_port(), [sys.executable, "-m", "tests.leaving_process", mode]
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
    """Reads lines up to one that begins with the word."""
    for line in process.stdout:
        if line.startswith(word):
            return line.split()
    raise AssertionError(process.stderr.read()[-3000:])


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
import time, jax
from xlstm_jax.distributed.processes import exit
from xlstm_jax.private_names import job

jax.distributed.initialize("127.0.0.1:{port}", 1, 0)
exit._start_listening()
exit._post(job.client, [0], "process 1 has left with exit code 13: OSError: the data are gone")
time.sleep(0.3)
raise OSError("my data are gone, too")
"""


def test_process_prints_the_local_error_before_the_error_of_a_peer():
    """A process alone, in whose store the reason of another stands."""
    command = [sys.executable, "-c", ALONE.format(port=free_port())]
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
    processes = run("pause", 2)
    for process in processes:
        line_of(process, "STEP")
    processes[1].send_signal(signal.SIGSTOP)
    time.sleep(12)
    processes[1].send_signal(signal.SIGCONT)
    codes, errors = ended(processes)
    assert codes == [0, 0], errors
