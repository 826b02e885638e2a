"""Selection of the quick tests: they detect every mutation, enter nearly every function, and check the promises.

``make test`` runs the quick tests. A test is quick if the coverage measurement has chosen it (case by case, in
``tests/cover/chosen.txt``), if ``tests/cover/short.txt`` or ``PROMISES`` names the test, or if a mutation that was not
measured names the test. ``make test-all`` runs every test.

    pytest --quick                    runs the quick tests
    python -m tests.quick             prints the number of tests by folder, and the promises
"""

from collections import Counter
from collections.abc import Collection
from functools import cache

from tests.cover import data
from tests.mutants.catalogue import all_mutants

# Cells of tests/exactness that train end to end, where most quick tests are of single functions.
TRAINED = {
    "plain @ 2x4-vma": "a model trains",
    "minibatches @ 8x1-no_vma": "minibatches add up to the batch",
    "weighted @ 2x4-no_vma": "a sum and a weight are a mean over all devices",
    "checkpoint @ 2x4-vma": "a training goes on from a checkpoint on another mesh",
    "nnx @ 2x4-vma": "a model of NNX trains",
    "split layers @ 2x4-no_vma": "tensor parallelism trains",
    "experts @ 2x4-no_vma": "expert parallelism trains",
    "context @ 1x8-no_vma": "context parallelism trains",
}
# What README promises, and neither a line nor a mutation of the library shows: pages, commands, installation.
PROMISES = {
    **{
        f"exactness/test_exactness.py::test_quick_cells_match_a_single_device[{cell}]": TRAINED[cell]
        for cell in TRAINED
    },
    "exactness/test_exactness.py::test_check_error_names_the_leaf_and_the_command_to_repeat": "a difference is seen",
    "house/test_imports.py": "an import of the library imports no NNX",
    "house/test_layers.py": "a file imports only from the layers below it",
    "house/test_public_names.py": "public names stay importable",
    "house/test_readme.py": "README's figures and commands",
    "house/test_mutants.py::test_all_mutations_match_the_present_library_source": "each mutation is one",
    "house/test_troubleshooting.py": "each error is on its page",
    "training/test_lowered_text.py": "a step lowers to the program that it lowered to",
    "errors/test_errors.py": "each mistake gets its error, and each error has a row or a reason",
}


@cache
def chosen() -> set[str]:
    """Returns the quick tests below ``tests/``: files, functions, and single cases with their parameters."""
    seen = data.read_seen()
    named = {test for mutant in all_mutants() if mutant.name not in seen for test in mutant.tests}
    return set(data.chosen()) | named | set(PROMISES)


@cache
def files() -> set[str]:
    """Returns the files of the quick tests below ``tests/``, and the library files with quick doctests."""
    return {test.partition("::")[0] for test in chosen()}


def missing(nodeids: Collection[str]) -> list[str]:
    """Returns the chosen cases that are missing from the collected tests of the collected files."""
    cases = {nodeid.removeprefix("tests/") for nodeid in nodeids}
    collected = {case.partition("::")[0] for case in cases}
    return sorted(case for case in set(data.chosen()) - cases if case.partition("::")[0] in collected)


def is_chosen(nodeid: str, tests: set[str]) -> bool:
    """Returns whether a pytest node id, such as ``tests/plan/test_plan.py::test_name[case]``, is in ``tests``.

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
