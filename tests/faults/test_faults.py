"""One fault at a time, struck into the training job: how long until every process is gone, and what is lost."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults import job
from tests.faults.report import record

GONE_S = 3.0  # after a death or an exception
TIMEOUT_S = 5  # of a step and a save, here
TOLD_S = 5.0
DISK_BYTES = 400_000  # of a disk that two or three checkpoints fill


@pytest.fixture(scope="module")
def undisturbed_of(tmp_path_factory):
    """``undisturbed_of(processes)``: how the job ends that is left alone."""

    @functools.cache
    def run(processes):
        folder = tmp_path_factory.mktemp("undisturbed")
        with job.started(folder, processes) as running:
            running.wait_gone(job.STARTING_S)
            assert running.codes() == [0] * processes, running.stderr(0)
        return job.final_state(folder)

    return run


@pytest.fixture
def undisturbed(undisturbed_of):
    return undisturbed_of(2)


def goes_on(folder, processes, want):
    """The same command again, without a fault, ends as the undisturbed run did."""
    with job.started(folder, processes) as again:
        again.wait_gone(job.STARTING_S)
        assert again.codes() == [0] * processes, again.stderr(0)
    got = job.final_state(folder)
    assert got["rows"] == want["rows"] and got["leaves"] == want["leaves"]


@pytest.mark.parametrize("fault, promised_s", [("exception", GONE_S), ("stuck", TIMEOUT_S + 2)])
@pytest.mark.parametrize("victim", [0, 1])
def test_fault_in_a_single_process_ends_all_processes_in_time(fault, promised_s, victim, undisturbed, tmp_path):
    at = job.SAVE_EVERY * 2 + 3
    with job.started(tmp_path, 2, "--step-timeout", TIMEOUT_S, fault=fault, at=at, on=(victim,)) as processes:
        assert processes.wait_for(lambda: f"FAULT {fault}" in processes.stderr(victim))
        gone = processes.wait_gone(job.STARTING_S)
        assert 0 not in processes.codes()
        said, longest = processes.stderr(victim), job.limit_s(promised_s, processes)
    if fault == "exception":
        assert "the disk with the data is gone" in said
    else:
        assert "in faulty" in said  # the stack of the thread that hangs
    assert gone <= longest
    lost = at - job.committed(tmp_path)
    assert lost <= 2 * job.SAVE_EVERY
    goes_on(tmp_path, 2, undisturbed)
    record(f"{fault} in process {victim}", 1, gone, f"{lost} steps", "bit-equal")


@pytest.mark.parametrize("processes, victim", [(2, 0), (2, 1), (1, 0)])
def test_sigterm_commits_a_checkpoint_on_all_processes_and_loses_nothing(processes, victim, undisturbed_of, tmp_path):
    with job.started(tmp_path, processes) as running:
        assert running.wait_for(lambda: job.steps_done(tmp_path) >= 8)
        before, start = job.steps_done(tmp_path), time.monotonic()
        running.children[victim].send_signal(signal.SIGTERM)
        running.wait_gone(job.STARTING_S)
        gone = time.monotonic() - start
        assert running.codes() == [75] * processes, running.stderr(0)
        shown = (tmp_path / "stdout0").read_text()
    stopped = job.committed(tmp_path)
    assert before <= stopped < job.STEPS  # guard: it did not just run to its end
    assert f"stopped after step {stopped} by SIGTERM; go on with --checkpoint-dir {tmp_path / 'run'} --resume" in shown
    goes_on(tmp_path, processes, undisturbed_of(processes))
    assert f"going on after step {stopped}" in (tmp_path / "stdout0").read_text()
    record(f"SIGTERM to process {victim} of {processes}", 1, gone, "0 steps", "bit-equal")


def test_killed_launcher_ends_all_processes_with_a_checkpoint(tmp_path):
    (tmp_path / "corpus.txt").write_text(job.CORPUS)
    options = ["--data", tmp_path / "corpus.txt", "--checkpoint-dir", tmp_path / "run", "--steps", 100_000]
    command = [sys.executable, "-m", "benchmarks.train_lm", *job.SIZES.split(), *map(str, options), "--processes", "2"]
    with (tmp_path / "said").open("w") as said:
        launcher = subprocess.Popen(command, cwd=job.ROOT, stdout=said, stderr=said, env=os.environ | job.COMPILED_ONCE)
    try:
        deadline = time.monotonic() + job.STARTING_S
        while job.steps_done(tmp_path) < 8:
            assert launcher.poll() is None and time.monotonic() < deadline, (tmp_path / "said").read_text()
            time.sleep(0.02)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert len(children) == 2
    finally:
        launcher.kill()
        launcher.wait()
    start = time.monotonic()
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() - start < job.STARTING_S
        time.sleep(0.02)
    gone = time.monotonic() - start
    assert job.committed(tmp_path) >= 8
    record("kill -9 of the launcher", 1, gone, "0 steps", "a checkpoint")


@pytest.mark.parametrize("processes", [1, 4])
def test_job_resumes_with_another_number_of_processes(processes, undisturbed, tmp_path):
    with job.started(tmp_path, 2) as running:
        assert running.wait_for(lambda: job.steps_done(tmp_path) >= 8)
        running.children[0].send_signal(signal.SIGTERM)
        running.wait_gone(job.STARTING_S)
    stopped = job.committed(tmp_path)
    with job.started(tmp_path, processes) as again:
        again.wait_gone(job.STARTING_S)
        assert again.codes() == [0] * processes, again.stderr(0)
    assert f"going on after step {stopped}" in (tmp_path / "stdout0").read_text()
    rows, want = job.final_state(tmp_path)["rows"], undisturbed["rows"]
    assert rows[:stopped] == want[:stopped]
    # Sums of other processes run in another order; training magnifies a difference of 1e-7 to some 1e-5 by then.
    assert [float(row["loss"]) for row in rows] == pytest.approx([float(row["loss"]) for row in want], rel=1e-4)
    record("another number of processes", 1, None, "0 steps", "equal but for rounding")


@contextmanager
def small_disk(folder, size):
    """A file system of its own on ``folder``; skips where this user may not mount one."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk_ends_the_job_with_the_reason_and_keeps_the_last_good_step(undisturbed, tmp_path):
    options = ("--step-timeout", TIMEOUT_S, "--out", tmp_path / "run/metrics")
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        with job.started(tmp_path, 2, *options, checkpoints=disk) as processes:
            assert processes.wait_for(lambda: any(path.name.isdecimal() for path in (disk / "steps").glob("*")))
            (disk / "filler").write_bytes(b"0" * (shutil.disk_usage(disk).free))
            start = time.monotonic()
            processes.wait_gone(job.STARTING_S)
            gone = time.monotonic() - start
            assert 0 not in processes.codes()
            said, longest = processes.stderr(0) + processes.stderr(1), job.limit_s(TIMEOUT_S + 2, processes)
        assert "no space left" in said.lower() or "resource_exhausted" in said.lower(), said[-3000:]
        (disk / "filler").unlink()
        shutil.copytree(disk / "steps", tmp_path / "run/steps")
    assert gone <= longest
    lost = job.steps_done(tmp_path) - job.committed(tmp_path)
    goes_on(tmp_path, 2, undisturbed)
    record("disk full", 1, gone, f"{lost} steps", "bit-equal")


@pytest.mark.parametrize(
    "what, differing, named",
    [
        ("configuration", ["--lr", "0.001"], "lr"),
        ("seed", ["--seed", "1"], "seed"),
        ("batch size, which its devices do not divide,", ["--batch-size", "6"], "batch_size"),
        ("text", ["--data", "nowhere"], "nowhere"),
    ],
)
def test_processes_with_different_settings_exit_promptly_with_the_difference(what, differing, named, tmp_path):
    with job.started(tmp_path, 2, per_process={1: differing}) as processes:
        processes.wait_gone(job.STARTING_S)
        took = time.time() - job.last_arrival(processes)
        assert processes.codes() == [2, 2]
        for process in (0, 1):
            assert named in processes.stderr(process) and "process" in processes.stderr(process)
    assert not (tmp_path / "run/metrics").exists()
    assert took <= job.limit_s(TOLD_S, processes)
    record(f"another {what} in process 1", 1, took, "", "refused, with its name")


def test_process_with_different_code_is_reported_by_all_processes(tmp_path):
    """A copy of the packages with one more comment, as after a deployment that reached some hosts only."""
    copy = tmp_path / "copy"
    for package in ("benchmarks", "xlstm_jax", "tests"):
        shutil.copytree(job.ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "xlstm_jax/common_types.py").open("a") as file:
        file.write("# another version\n")
    with job.started(tmp_path, 2, folder_of={1: copy}) as processes:
        processes.wait_gone(job.STARTING_S)
        took = time.time() - job.last_arrival(processes)
        assert processes.codes() == [2, 2]
        for process in (0, 1):
            assert "common_types" in processes.stderr(process), process
    assert took <= job.limit_s(TOLD_S, processes)
    record("other code in process 1", 1, took, "", "refused, with the file")


def test_undisturbed_job_has_a_single_metrics_row_per_step(undisturbed):
    """Guard of all comparisons of rows: there are as many as steps."""
    assert [int(row["step"]) for row in undisturbed["rows"]] == list(range(1, job.STEPS + 1))
