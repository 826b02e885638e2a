"""Tests of the memory that ``benchmarks.publications`` measures."""

import pytest

from benchmarks import publications


@pytest.mark.parametrize("padded", [False, True])
def test_publish_holds_a_single_file_and_a_round_of_tensors_in_host_memory(padded):
    """64 leaves of 4 MB, in files of 32 MiB; NumPy reports what it allocates, and the system what devices hold as well.

    A padded leaf that was unsharded on the devices would take 8 MB of the process, and all of them 537 MB.
    """
    for process in publications.measured(2, 256, 0, padded):
        assert process["MB written"] == 134
        # What a store has read lies in memory of JAX, which NumPy does not report.
        assert (0 if padded else 32) <= process["MB of arrays"] <= 34 + 2 * 4.3, process
        assert process["MB of process"] <= 34 + 30 * 4.3, process
