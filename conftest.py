"""Eight simulated CPU devices for the whole suite, set up before JAX starts; and the names that doctests may use."""

import gc
import os
import signal
import sys
import zlib
from collections import Counter
from functools import cache
from pathlib import Path

from tests.xla_flags import SHORT_COMPILATION

os.environ.setdefault("XLA_FLAGS", SHORT_COMPILATION)

# A shell ignores SIGINT in what it runs in the background, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test reads what another has compiled, nor what the user has.
os.environ["XLSTM_JAX_CACHE_DIR"] = ""

import xlstm_jax  # noqa: F401  before JAX, so that CUDA's plugin is silent; isort: skip
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests import quick
from tests.compiled_once import keep_compiled_programs
from tests.cover import data
from tests.cover.record import Recorder, case_of
from xlstm_jax import distributed
from xlstm_jax.distributed import DeviceMeshManager, simulate_cpu_devices
from xlstm_jax.forecast.compiling.compile_process import check_compiler

TESTS = Path(__file__).parent / "tests"
BENCHMARKS = TESTS / "benchmarks"
NEWEST = jax.__version_info__ >= (0, 12)

# Tests marked with a name compile for such devices; what they need is in an extra.
PLATFORMS = {"libtpu": "tpu", "cuda_plugin": "cuda"}

SUMMARY_LENGTH = 600  # characters of the message of a failed test in pytest's summary

# The packages whose names doctests may use. The test of deletion takes some away.
FOLDERS = ("data_parallel", "device_mesh", "metrics", "model_parallel", "optimizers", "plan", "processes", "training")
FACES = [distributed, *(getattr(distributed, name) for name in FOLDERS if hasattr(distributed, name))]

simulate_cpu_devices(8)

keep_compiled_programs()


@cache
def _lacks_compiler(platform: str) -> str:
    """What of the platform's extra is not there, or does not fit together."""
    try:
        check_compiler(platform)
    except ImportError as error:
        return str(error)
    return ""


@pytest.hookimpl(tryfirst=True)  # before fixtures compile
def pytest_runtest_setup(item):
    """A test of a compiler that is not installed is skipped by its marker alone, so that none can forget to."""
    for marker, platform in PLATFORMS.items():
        if item.get_closest_marker(marker) and (lacks := _lacks_compiler(platform)):
            pytest.skip(lacks)


def pytest_addoption(parser):
    parser.addoption(
        "--part", metavar="K/N", default="1/1", help="run the K-th of N parts of the test files, drawn by their paths"
    )
    parser.addoption("--quick", action="store_true", help="run the tests that see every mutation: tests/quick.py")
    parser.addoption("--pairs", type=int, default=6, metavar="N", help="pairs of features that tests/exactness draws")
    parser.addoption(
        "--cell", action="append", default=[], metavar="CELL", help="of tests/exactness: 'copies + frozen @ 2x4-vma'"
    )
    parser.addoption("--rest", action="store_true", help="run the tests that --quick leaves out")
    parser.addoption("--record", metavar="FOLDER", help="record each test's seconds and lines: tests/cover/__init__.py")


def pytest_configure(config):
    if folder := config.getoption("record"):
        config.pluginmanager.register(Recorder(Path(folder).absolute()))


class Lacking(pytest.Item):
    """A test that fails because chosen cases are not there: of an error in a worker's collection xdist shows none."""

    def __init__(self, *, cases, **options):
        super().__init__(**options)
        self.cases = cases

    def runtest(self):
        pytest.fail(f"make test has chosen cases that are not there: {self.cases[:5]}. {data.REMAKE}", pytrace=False)


@pytest.hookimpl(tryfirst=True)  # before -m "not slow" chooses
def pytest_collection_modifyitems(session, config, items):
    """Keeps the test files of one part, and marks cases as slow.

    Of a test with the marker ``one_in(n)`` all cases but every n-th are slow; with an older JAX all but every n^2-th.
    Cases that were chosen for ``--quick`` are not.

    And what benchmarks have compiled for TPUs, which they do with the newest JAX.
    """
    part, parts = map(int, config.getoption("part").split("/"))

    def in_part(item):
        return zlib.crc32(str(item.path.relative_to(config.rootpath)).encode()) % parts == part % parts

    wants_quick = config.getoption("quick")
    is_split = wants_quick or config.getoption("rest")
    chosen_cases = data.chosen() if wants_quick else {}
    # Which cases there are can differ with an older JAX; and of a file of which one test is asked for, others lack.
    has_whole_files = NEWEST and not any("::" in arg for arg in config.args)
    lacking = quick.missing([item.nodeid for item in items]) if chosen_cases and has_whole_files else []

    def is_wanted(item):
        if is_split and quick.is_chosen(item.nodeid, quick.chosen()) != wants_quick:
            return False
        return in_part(item)

    config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
    items[:] = filter(is_wanted, items)
    if lacking:
        items.append(Lacking.from_parent(session, name="tests/cover/chosen.txt", cases=lacking))
    cases = Counter()
    for item in items:
        if marker := item.get_closest_marker("one_in"):
            test, (n,) = item.nodeid.partition("[")[0], marker.args
            # n has no factor in common with the numbers of values, so neither has its square: each value is tried.
            if cases[test] % (n if NEWEST else n**2) and case_of(item.nodeid) not in chosen_cases:
                item.add_marker("slow")
            cases[test] += 1
        if not NEWEST and item.get_closest_marker("libtpu") and BENCHMARKS in item.path.parents:
            item.add_marker("slow")


def pytest_ignore_collect(collection_path, config):
    """Doctests are those of the library: of tests/ nothing is imported but tests, as it holds scripts too.

    With ``--quick`` only the files of its tests are imported: half a minute less for each worker.
    """
    if collection_path.suffix != ".py":
        return None
    if collection_path.is_relative_to(TESTS) and not collection_path.name.startswith("test_"):
        return True
    if config.getoption("quick") and case_of(str(collection_path.relative_to(config.rootpath))) not in quick.files():
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Puts the message of a failure on a single line: pytest's summary shows the first line of a message only.

    The first line of NumPy's messages is empty, and a pattern that does not match stands three lines above the text.
    """
    del item, call
    report = yield
    if crash := getattr(report.longrepr, "reprcrash", None):
        crash.message = " | ".join(line.strip() for line in crash.message.splitlines() if line.strip())[:SUMMARY_LENGTH]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary():
    """Shows the messages of failures in full: without CI pytest cuts the lines of its summary to the width."""
    os.environ.setdefault("CI", "true")


def pytest_collection_finish(session):
    """Leaves what the imports have made out of garbage collections, and collects rarely: a twentieth of the time."""
    del session
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_sessionstart(session):
    """A suite about eight devices must not pass on one."""
    del session
    assert jax.device_count() == 8, f"the suite needs 8 simulated devices, JAX has {jax.device_count()}"


@pytest.fixture(autouse=True, scope="session")
def names_of_doctests(doctest_namespace):
    """What the examples in docstrings need not import."""
    public = {name: getattr(face, name) for face in FACES for name in face.__all__}
    mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})
    doctest_namespace |= public | {"jax": jax, "jnp": jnp, "np": np, "nn": nn, "optax": optax, "mesh": mesh}


@pytest.fixture(autouse=True)
def warnings_told_once_are_told_anew():
    """What a test is warned of, and so whether it passes, does not depend on the tests before it."""
    mistakes = sys.modules.get("xlstm_jax.distributed.training.mistakes")  # the test of deletion takes it away
    if mistakes:
        mistakes._warned.clear()
