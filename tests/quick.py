"""The tests that see every mutation of the catalogue, enter nearly every function, and hold the promises.

``make test`` runs them. A test is in the set if the measurement has chosen it (``tests/cover/chosen.txt``, case by
case), if ``PROMISES`` names it, or if a mutation names it that the measurement does not know. ``make test-all`` runs
all tests.

    pytest --quick                    this set
    python -m tests.quick             what the set has: tests by folder, and the promises
"""

from collections import Counter
from collections.abc import Collection
from functools import cache

from tests.cover import data
from tests.mutants.catalogue import all_mutants

# What README promises, and neither a line nor a mutation of the library shows: pages, commands, installation.
PROMISES = {
    "exactness/test_exactness.py::test_training_is_that_of_one_device[plain @ 2x4-vma]": "a model trains",
    "exactness/test_exactness.py::test_a_difference_names_the_leaf_and_how_to_repeat_it": "a difference is seen",
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
    seen = data.read_seen()
    named = {test for mutant in all_mutants() if mutant.name not in seen for test in mutant.tests}
    return set(data.chosen()) | named | set(PROMISES)


@cache
def files() -> set[str]:
    """Returns the files of the set below ``tests/``, and those of the library whose examples are in it."""
    return {test.partition("::")[0] for test in chosen()}


def missing(nodeids: Collection[str]) -> list[str]:
    """Returns the chosen cases that are not among the tests of the files that were collected."""
    cases = {nodeid.removeprefix("tests/") for nodeid in nodeids}
    collected = {case.partition("::")[0] for case in cases}
    return sorted(case for case in set(data.chosen()) - cases if case.partition("::")[0] in collected)


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
    print(f"{sum(data.chosen().values()):4.0f}  processor seconds of the {len(data.chosen())} measured cases")


if __name__ == "__main__":
    main()
