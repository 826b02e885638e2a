"""Tests of the mutations: texts match the source, and tests detect a sample. See docs/mutants.md."""

import ast
import subprocess
import sys

import pytest

from tests.mutants import drawn
from tests.mutants.catalogue import ROOT, Mutant, all_mutants

SOURCE = '''
import jax.numpy as jnp
def total(x: int, mesh_axis, row_axes):
    """A docstring of 1 line."""
    if x < 2 and not row_axes:
        raise ValueError(f"{x + 3} is no size")
    log(jnp.sum(x, 4))
    assert x > 5
    check(x, mesh_axis)
    value: jax.Array = jnp.mean(x, axis=0).astype(jnp.float32)
    return tuple(value)


def __repr__(self):
    return self.x == 6


AT_IMPORT = 7 == 8
'''


def test_all_mutations_match_the_present_library_source():
    mutants = all_mutants()
    for mutant in mutants:
        mutant.check()
    names = [mutant.name for mutant in mutants]
    assert len(set(names)) == len(names) >= 120
    assert sum(bool(mutant.stays) for mutant in mutants) <= 0.02 * len(mutants)


def test_mutated_raises_for_a_text_not_occurring_exactly_once():
    texts = {"before": ["x = 1"], "after": ["x = 2"], "tests": ["house/test_mutants.py"]}
    mutant = Mutant("xlstm_jax/distributed/x.py", "x is y", False, **texts)
    assert mutant.mutated("x = 1\n") == "x = 2\n"
    for source, count in (("x = 3", 0), ("x = 1\nx = 1", 2)):
        with pytest.raises(ValueError, match=rf"has the text 'x = 1' {count} times, and a mutation needs it once"):
            mutant.mutated(source)


def test_mutant_finds_a_function_moved_to_another_file():
    texts = {"before": ["axis % x.ndim"], "after": ["axis"]}
    moved = Mutant("xlstm_jax/distributed/gone.py", "nothing", False, "gather_array_with_mean_grads", **texts)
    assert moved.path == "xlstm_jax/distributed/data_parallel/wire/communication.py"
    texts = {"before": ["return"], "after": ["pass"]}
    source = "def f():\n    return 1\n\n\n@cache\ndef g():\n    return 1\n"
    assert Mutant("x.py", "g", False, "g", ["@cache"], ["@jit"]).mutated(source) == source.replace("@cache", "@jit")
    assert Mutant("x.py", "g", False, "g", **texts).mutated(source) == source[:-9] + "pass 1\n"
    assert Mutant("x.py", "f", False, "f", **texts).mutated(source).startswith("def f():\n    pass 1")


def test_short_mutation_run_detects_all_ten_mutations():
    command = [sys.executable, "-m", "tests.mutants", "--short", "--jobs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0 and "10 mutations, 10 seen, 0 not" in done.stdout, done.stdout + done.stderr


def test_mutations_of_a_source_cover_all_kinds_but_no_strings():
    """The drawn mutations of a short source equal a list written by hand: replaced text and replacement."""
    found = drawn.mutations_of("xlstm_jax/x.py", SOURCE)
    changes = {(mutant.kind, SOURCE[mutant.start : mutant.end].strip(), mutant.text.strip()) for mutant in found}
    assert changes == {
        ("compare", "<", "<="),
        ("bound", "2", "3"),
        ("bound", "2", "1"),
        ("logic", "and", "or"),
        ("logic", "not row_axes", "(row_axes)"),
        ("logic", "x < 2 and not row_axes", "not (x < 2 and not row_axes)"),
        ("axis", "row_axes", "mesh_axis"),
        ("axis", "mesh_axis", "row_axes"),
        ("call", "check(x, mesh_axis)", "pass"),
        ("swap", "x, mesh_axis", "mesh_axis, x"),
        ("axis", "0", "-1"),
        ("axis", "0", "1"),
        ("call", "jnp.mean(x, axis=0)", "(x)"),
        ("call", "jnp.mean(x, axis=0).astype(jnp.float32)", "(jnp.mean(x, axis=0))"),
        ("dtype", "float32", "bfloat16"),
        ("none", "tuple(value)", "None"),
    }
    assert {mutant.function for mutant in found} == {"total"}
    for mutant in found:
        lines = zip(SOURCE.splitlines(), mutant.mutated(SOURCE).splitlines(), strict=True)
        ((before, after),) = [(old.strip(), new.strip()) for old, new in lines if old != new]
        assert (before, after) == (mutant.before, mutant.after)


def test_draw_is_reproducible_by_seed_and_balanced_over_kinds():
    only = "distributed/metrics"
    functions = {
        (path.removeprefix("xlstm_jax/"), mutant.function)
        for path in drawn.files()
        if only in path
        for mutant in drawn.mutations_of(path, (ROOT / path).read_text())
    }
    some, counts = drawn.draw(16, 3, functions, only)
    assert some == drawn.draw(16, 3, functions, only)[0] != drawn.draw(16, 4, functions, only)[0]
    assert [mutant.kind for mutant in some] == [*drawn.KINDS, *drawn.KINDS]
    assert counts == {"entered": len(functions), "not entered": 0} and len(functions) > 100
    for mutant in some:
        ast.parse(mutant.mutated((ROOT / mutant.path).read_text()))
    assert not drawn.draw(16, 3, set(), only)[0]  # no test enters a function
    assert not any(path.startswith("xlstm_jax/cli/") for path in drawn.files())


SCRIPT = """
from tests.mutants import drawn
from tests.mutants.run import Run, outcomes

path, file = "xlstm_jax/distributed/device_mesh/meshes.py", "device_mesh/test_device_mesh.py"
of_file = drawn.mutations_of(path, (drawn.ROOT / path).read_text())
(mutant,) = [m for m in of_file if m.kind == "none" and m.function == "DeviceMeshManager.create_hsdp_mesh"]
seeing = f"{file}::test_meshes_with_fewer_devices_take_the_first_devices[hsdp]"
blind = f"{file}::test_simulate_cpu_devices_raises_for_a_call_after_jax_started"
absent = f"{file}::test_of_another_name"
for cases in [(absent, blind, seeing), (blind,), (absent,)]:
    (outcome,) = outcomes([Run((file,), mutant, cases)], 1)
    print(outcome.result, outcome.test == seeing)
# Files that import or read what is beside library and tests can be collected in the copy.
(outcome,) = outcomes([Run(("benchmarks/test_axes.py", "cli/test_cli.py"), None, (absent,))], 1)
print(outcome.result, outcome.test)
"""


def test_run_reports_detected_undetected_and_missing_cases_of_a_drawn_mutation():
    """``run`` reports detected, undetected and missing cases, in a process without JAX's threads, because it forks."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.split("\n") == ["failed True", "passed False", "empty False", "empty ", ""], done.stdout


def test_judged_survivors_are_current_mutations_with_a_reason():
    assert not list(drawn.stale(drawn.judged())), "correct or delete the stale entries of tests/mutants/judged.txt"
    assert not [entry for entry, reason in drawn.judged() if len(reason) <= 10], "these have no reason"
    path = "distributed/device_mesh/meshes.py"
    known = (path, "filled_sizes", "if len(wild) > 1 or True:", "if len(wild) >= 1 or True:")
    assert list(drawn.stale([(known, "of another source")])) == [f"{path}: filled_sizes: if len(wild) > 1 or True:"]
