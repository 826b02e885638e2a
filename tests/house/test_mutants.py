"""Mutations of the library: their texts are those of today, and the few that run here are seen. See docs/mutants.md."""

import subprocess
import sys

import pytest

from tests.mutants.catalogue import ROOT, Mutant, all_mutants


def test_the_mutations_are_of_the_library_as_it_is():
    mutants = all_mutants()
    for mutant in mutants:
        mutant.check()
    names = [mutant.name for mutant in mutants]
    assert len(set(names)) == len(names) >= 120
    assert sum(bool(mutant.stays) for mutant in mutants) <= 0.02 * len(mutants)


def test_a_mutation_that_fits_no_more_says_so():
    mutant = Mutant("xlstm_jax/distributed/x.py", "x is y", False, ["x = 1"], ["x = 2"], ["house/test_mutants.py"])
    assert mutant.mutated("x = 1\n") == "x = 2\n"
    for source, count in (("x = 3", 0), ("x = 1\nx = 1", 2)):
        with pytest.raises(ValueError, match=rf"has the text 'x = 1' {count} times, and a mutation needs it once"):
            mutant.mutated(source)


def test_ten_mutations_are_seen():
    command = [sys.executable, "-m", "tests.mutants", "--short", "--jobs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0 and "10 mutations, 10 seen, 0 not" in done.stdout, done.stdout + done.stderr
