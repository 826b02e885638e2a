"""Quick tests of the fault suite (in full: ``make test-faults``): the training job is killed, and restarted."""

import pytest

from tests.faults import job
from tests.faults.test_kills import kill_until_done


@pytest.mark.slow
def test_job_killed_in_a_step_resumes_to_the_undisturbed_result(tmp_path):
    with job.started(tmp_path / "undisturbed", 2) as processes:
        processes.wait_gone(job.STARTING_S)
        assert processes.codes() == [0, 0], processes.stderr(0)
    want = job.final_state(tmp_path / "undisturbed")
    assert [int(row["step"]) for row in want["rows"]] == list(range(1, job.STEPS + 1))
    kill_until_done(2, want, 1, tmp_path, phases=["step"])
