"""The tests that see every mutation of the catalogue, and touch every promise of README: `make test`.

A test is in the set if a mutation names it (``tests/mutants/*.txt``: the named tests are run against the mutation, and
one of them must fail), or if ``PROMISES`` names it. ``make test-all`` runs all tests.

    pytest --quick                    this set
    python -m tests.quick             what the set has: tests by folder, and the promises
"""

from collections import Counter
from functools import cache

from tests.mutants.catalogue import all_mutants

# What README promises, and a mutation of the library does not show: pages, commands, installation.
PROMISES = {
    "exactness/test_exactness.py": "each feature, and six pairs, train as one device does",
    "house/test_layers.py": "a file imports only from the layers below it",
    "house/test_public_names.py": "public names stay importable",
    "house/test_readme.py": "README's own examples",
    "house/test_mutants.py::test_the_mutations_are_of_the_library_as_it_is": "each mutation is one",
    "house/test_troubleshooting.py": "each error is on its page",
    "training/test_lowered_text.py": "a step lowers to the program that it lowered to",
    "errors/test_errors.py": "each mistake gets its error, and each error has a row or a reason",
}


@cache
def chosen() -> set[str]:
    """Returns the tests of the set below ``tests/``: files, functions, and single cases with their parameters."""
    return {test for mutant in all_mutants() for test in mutant.tests} | set(PROMISES)


@cache
def files() -> set[str]:
    """Returns the files of the set below ``tests/``."""
    return {test.partition("::")[0] for test in chosen()}


def is_chosen(nodeid: str, tests: set[str]) -> bool:
    """Returns whether a test of pytest's, such as ``tests/plan/test_plan.py::test_name[case]``, is in the set.

    >>> is_chosen("tests/plan/test_plan.py::test_name[case]", {"plan/test_plan.py::test_name"})
    True
    >>> is_chosen("tests/plan/test_plan.py::test_name[case]", {"plan/test_plan.py::test_name[other]"})
    False
    """
    test = nodeid.removeprefix("tests/")
    return bool({test, test.partition("[")[0], test.partition("::")[0]} & tests)


def main() -> None:
    tests = chosen()
    for folder, count in sorted(Counter(test.partition("/")[0] for test in tests).items()):
        print(f"{count:4}  {folder}")
    print(f"{len(tests):4}  in all, of which {len(PROMISES)} are files of promises")


if __name__ == "__main__":
    main()
