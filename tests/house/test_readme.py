"""Tests of README: the comparison with peers equals the benchmark results (tests/benchmarks checks the table)."""

import json
import re
from collections import Counter

from tests.house.test_docs import ROOT

README = (ROOT / "README.md").read_text()


def test_its_times_of_a_step_are_those_of_the_results():
    cases = json.loads((ROOT / "benchmarks/results/step_time/small.json").read_text())["cases"]
    words = " ".join(README.split())
    for name in ("ours", "ours, gathered again", "ours, remat", "jit, remat", "FSDP2", "FSDP2, weights kept"):
        found = cases[name]["ratios"]["time over jit"]
        assert "{median:.2f} ({low:.2f} to {high:.2f})".format(**found) in words, name


def test_where_it_is_behind_is_as_the_results_have_it():
    rows = json.loads((ROOT / "benchmarks/results/peers/peers.json").read_text())["models"]
    pairs = [(topology.partition(":")[0], pair) for there in rows.values() for topology, pair in there.items()]

    def behind(what):
        chips = Counter(chip for chip, pair in pairs if pair["ours"][what] > pair["jit"][what])
        return {chip: {1: "one", 2: "two", 3: "three", len(rows): "all"}[count] for chip, count in chips.items()}

    memory = sum(pair["ours"]["total_bytes"] > pair["jit"]["total_bytes"] for _, pair in pairs)
    words = " ".join(README.split())
    [(models, on_v5p, on_v5e, on_v6e, count)] = re.findall(
        r"behind on v5e with (\w+) of the models, in waiting on v5p with (\w+), on v5e with (\w+) and on v6e with (\w+)"
        rf", and in memory in (\d+) of {len(pairs)} rows",
        words,
    )
    assert behind("step_seconds") == {"v5e": models}
    assert behind("waited_seconds") == {"v5p": on_v5p, "v5e": on_v5e, "v6e": on_v6e}
    assert int(count) == memory


def test_it_names_the_version():
    version = re.search(r'__version__ = "(.*)"', (ROOT / "xlstm_jax" / "__init__.py").read_text())[1]
    pages = [README, *(page.read_text() for page in (ROOT / "docs").glob("**/*.md") if "_build" not in page.parts)]
    assert {name for page in pages for name in re.findall(r"xlstm_jax-([\d.]+)-py3", page)} == {version}
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_ci_runs_the_commands_of_readme_on_both_ends():
    """CI runs the make targets of README on both ends of JAX; `make docs-serve` counts as `make docs`."""
    wanted = {f"make {name.removesuffix('-serve')}" for name in re.findall(r"^make ([\w-]+) +#", README, re.MULTILINE)}
    script = (ROOT / ".ci" / "run").read_text()
    assert wanted == {"make docs", "make train", "make test", "make check"}
    both = [line.split() for line in script.splitlines() if line.strip().startswith("make ")]
    newest = {f"make {target}" for line in both if any("VENV=.venv-newest" in word for word in line) for target in line}
    default = {f"make {target}" for line in both if not any("VENV=" in word for word in line) for target in line}
    assert wanted <= newest
    assert {"make train", "make test"} <= default
