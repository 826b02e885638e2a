"""What both files of targets ask: the large models, each case compiled once."""

import functools
import os
from pathlib import Path

import pytest

from benchmarks import memory, traffic
from tests.compiled_cases import compiled


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """``found(size, topology, case, ...)``: (of memory, of traffic), each case compiled once."""
    kept = Path(os.environ.get("KEPT") or tmp_path_factory.mktemp("kept"))

    @functools.cache
    def of(size, topology, *cases):
        there = compiled(kept, size, topology, cases)
        chosen = {case: there[case] for case in cases}
        return tuple(module.measured(size, topology, chosen)["cases"] for module in (memory, traffic))

    return of
