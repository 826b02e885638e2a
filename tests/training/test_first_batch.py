"""Tests with several processes that compare, once, the parameter key and the first batch."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.processes.test_processes import raised, run
from xlstm_jax.distributed.training import first_batch


@pytest.fixture(scope="module")
def training():
    return run("train", 2)


@pytest.fixture(scope="module")
def four():
    return run("train", 4)


def test_keys_are_compared_between_the_processes_of_the_mesh(monkeypatch):
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(process_index=process) for process in (0, 0, 3, 1)]))
    compared = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(first_batch, "compare", lambda *args: compared.append(args))
    key = jax.random.key(0)
    first_batch.compare_keys(key, mesh)
    first_batch.compare_keys(jax.eval_shape(lambda: key), mesh)  # while tracing
    first_batch.compare_keys(key, SimpleNamespace(devices=mesh.devices[:2]))  # one process
    ((entries, what, _, processes, _),) = compared
    assert (entries.keys(), what, processes) == ({"rng"}, first_batch.KEY, [0, 1, 3])


def test_all_processes_raise_for_different_initial_keys(training):
    raised(
        training,
        "seeds",
        r"the key of the initial parameters differs .*\n  'rng' is key<fry>.* on process 0, but .* 1$",
    )


def test_first_batch_check_warns_of_equal_rows_on_two_processes(training):
    for process in training:
        for fine in ("own rows", "ones", "raw"):
            assert process[fine]["result"] == []
        (told,) = process["equal rows"]["result"]
        assert told.startswith("processes 0, 1 hand in equal rows as different parts of the first batch")


@pytest.mark.slow
def test_first_batch_check_on_four_processes_accepts_copies_and_finds_unlike_copies(four):
    raised(four, "seeds", r"'rng' is .* on process 0, but .* on process 1, but .* on process 2, but .* on process 3$")
    raised(four, "unlike copies", r"processes 0, 1 hold the same rows of the first batch of a step, as copies")
    for process in four:
        assert process["own rows"]["result"] == []  # processes 0 and 1 have the same rows
        (told,) = process["equal rows"]["result"]
        assert told.startswith("processes 0, 1, 2, 3 hand in equal rows")


@pytest.mark.parametrize(
    "name, message",
    [
        ("scalar", r"'scale' is float32\[\] \(0.0\), sha256 \w+ on process 0, but float32\[\] \(1.0\)"),
        ("raw, other values", r"'x' is float32\[12, 3\] \(0.0, .* on process 0, but float32\[12, 3\] \(1.0, "),
        ("raw, other shape", r"'x' is float32\[12, 3\] .* on process 0, but float32\[10, 3\]"),
        ("raw, other dtype", r"'x' is float64\[12, 3\] .* on process 0, but int64\[12, 3\]"),
    ],
)
def test_all_processes_raise_for_a_first_batch_differing_between_processes(training, name, message):
    raised(training, name, rf"^ValueError: the first batch of a step differs between processes:\n  {message}")
