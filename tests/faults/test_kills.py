"""Random ``kill -9`` of the training job: it ends as if nothing had happened.

A job is started, killed at a random moment of a random kind, and started again, until it is done; then the next job. At
the end of each, parameters, optimizer, metrics, rng and place in the data, and every row of metrics.csv, are compared
with those of a job that was left alone, bit for bit.
"""

import math
import random
import time

import pytest

from tests.faults import job
from tests.faults.report import record

ROUNDS = {2: 34, 4: 16}  # by the number of processes
PHASES = ("start-up", "step", "save")
GONE_S = 3.0
START_TIMEOUT_S = 15  # who is left before all have joined waits that long for the others; longer on a slow machine


@pytest.fixture(scope="module", params=[2, 4], ids=["2x2", "4x1"])
def undisturbed(request, tmp_path_factory):
    """Returns the number of processes, how the job ends that is left alone, and a timeout for its start."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with job.started(folder, request.param) as processes:
        processes.wait_gone(job.STARTING_S)
        assert processes.codes() == [0] * request.param, processes.stderr(0)
        start_s = job.last_arrival(processes) - processes.launched
    return request.param, job.final_state(folder), max(START_TIMEOUT_S, math.ceil(start_s))


def moment(phase, rng, folder):
    """A condition that becomes true at a random moment of the phase."""
    if phase == "start-up":
        strike = time.monotonic() + rng.uniform(0.0, 6.0)
        return lambda: time.monotonic() > strike
    first = job.steps_done(folder)
    if phase == "step":
        target = first + rng.randrange(1, job.SAVE_EVERY * 2)
        return lambda: job.steps_done(folder) >= target
    seen, delay, before = [], rng.uniform(0, 0.05), job.saves_under_way(folder)  # left there by an earlier kill

    def in_a_save():
        if job.saves_under_way(folder) - before:
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() > seen[0] + delay

    return in_a_save


def test_job_killed_at_random_resumes_to_the_undisturbed_result(undisturbed, tmp_path):
    number, want, start_timeout_s = undisturbed
    kill_until_done(number, want, ROUNDS[number], tmp_path, start_timeout_s=start_timeout_s)


def kill_until_done(number, want, wanted_rounds, tmp_path, phases=PHASES, start_timeout_s=START_TIMEOUT_S):
    """Jobs of ``number`` processes, killed ``wanted_rounds`` times in all, each of which has to end as ``want``."""
    rng, rounds, jobs, gone, lost, saves = random.Random(number), 0, 0, {phase: [] for phase in PHASES}, [], []
    while rounds < wanted_rounds:
        folder = tmp_path / f"job{jobs}"
        jobs += 1
        while True:
            with job.started(folder, number, "--start-timeout", start_timeout_s) as processes:
                killed = rounds < wanted_rounds and processes.wait_for(
                    moment(phases[rounds % len(phases)], rng, folder)
                )
                if killed and any(child.poll() is None for child in processes.children):
                    victims = job.random_victims(rng, number)
                    processes.kill(victims)
                    phase = phases[rounds % len(phases)]
                    gone[phase].append(processes.wait_gone(job.STARTING_S))
                    assert phase == "start-up" or gone[phase][-1] <= job.limit_s(GONE_S, processes)
                    lost.append(job.steps_done(folder) - job.committed(folder))
                    saves.append(job.steps_done(folder) // job.SAVE_EVERY - job.committed(folder) // job.SAVE_EVERY)
                    rounds += 1
                    continue
                processes.wait_gone(job.STARTING_S)
                assert processes.codes() == [0] * number, processes.stderr(0)
                break
        got = job.final_state(folder)
        assert got["rows"] == want["rows"]
        assert got["leaves"] == want["leaves"]
    what = f"kill -9, {number} processes x {4 // number} devices"
    for phase in PHASES:
        if gone[phase]:
            record(f"{what}, in a {phase}", len(gone[phase]), max(gone[phase]), f"{max(lost)} steps", "bit-equal")
    assert max(saves) <= 1  # the one that was under way


def test_comparison_of_final_states_detects_another_seed(tmp_path, undisturbed):
    """Guard of the comparison above."""
    number, want, _ = undisturbed
    if number != 2:
        pytest.skip("once is enough")
    with job.started(tmp_path, number, "--seed", "1") as processes:
        processes.wait_gone(job.STARTING_S)
    got = job.final_state(tmp_path)
    assert got["rows"] != want["rows"] and got["leaves"] != want["leaves"]
