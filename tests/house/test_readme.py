"""Tests of README and the page of results: figures equal the kept results, and CI runs the commands."""

import json
import re
import statistics
from collections import Counter

import pytest

from tests.house.test_docs import ROOT

README = (ROOT / "README.md").read_text()
ENDS = ["v5e:2x2", "v5e:16x16"]  # 4 and 256 chips


def loaded(name):
    return json.loads((ROOT / name).read_text())


def figures_said(page, sentence):
    """Returns what the groups of ``sentence``, a pattern, match on a page, for example of "takes ([\\d.]+) s"."""
    found = re.search(sentence, " ".join((ROOT / page).read_text().split()))
    assert found, f"{page} has no such sentence: {sentence!r}. If it was reworded, reword the pattern in this test."
    return list(found.groups())


def peers():
    """[(topology, {"jit": row, "ours": row})] of four models on five clusters."""
    models = loaded("benchmarks/results/peers/peers.json")["models"]
    return [(topology, pair) for rows in models.values() for topology, pair in rows.items()]


def test_readme_step_times_equal_stored_results():
    ratios = [
        loaded("benchmarks/results/step_time/small.json")["cases"][case]["ratios"]["time over jit"]
        for case in ("ours", "FSDP2")
    ]
    said = figures_said(
        "README.md", r"takes ([\d.]+) \(quartiles ([\d.]+) to ([\d.]+)\).* FSDP2 ([\d.]+) \(([\d.]+) to ([\d.]+)\)"
    )
    assert said == [f"{ratio[part]:.2f}" for ratio in ratios for part in ("median", "low", "high")]


def test_readme_figures_of_third_party_models_equal_stored_outcomes():
    models, error = figures_said("README.md", r"(\d+) unedited models of .* within ([\d.e-]+) in float32")
    runs = {name: run["models"] for name, run in loaded("tests/third_party/outcomes.json").items()}
    assert {name: len(found) for name, found in runs.items()} == dict.fromkeys(runs, int(models))
    outcomes = {
        f"{model}, check_vma={check_vma}, in {name}": found[check_vma]
        for name, models_of_run in runs.items()
        for model, found in models_of_run.items()
        for check_vma in ("True", "False")
        if found[check_vma]
    }
    assert not [case for case, outcome in outcomes.items() if not outcome["same_bits"]]
    # The page's error is the largest of all cases, rounded up.
    assert 0.9 * float(error) < max(outcome["gradients"] for outcome in outcomes.values()) <= float(error)


def test_readme_memory_by_devices_equals_stored_results():
    rows = loaded("benchmarks/results/by_devices/1.3B.json")
    replicated, *shards = (
        rows[topology][case]["bytes"]["total"] / 2**30
        for case, topologies in {"replicated": ["v5e:16x16"], "ours": ENDS, "jit": ENDS}.items()
        for topology in topologies
    )
    number = r"([\d.]+)"
    said = figures_said(
        "README.md",
        f"{number} GiB replicated; with the library {number} GiB on 4 chips and {number} on 256, "
        f"with `jit` and shardings {number} and {number}",
    )
    assert said == [f"{size:.2f}" for size in (replicated, *shards)]


def test_results_page_states_cases_behind_jit_as_in_stored_results():
    pairs = [(topology.partition(":")[0], pair) for topology, pair in peers()]

    def behind(what):
        """Returns the number of models by chip, for which this library has a larger value than ``jit``."""
        return Counter(chip for chip, pair in pairs if pair["ours"][what] > pair["jit"][what])

    *by_chip, memory, rows = figures_said(
        "docs/results.md",
        r"behind in the expected step on v5e with (\w+) of the models, on v5p with (\w+) and on v6e with (\w+), in "
        r"waiting on v5e with (\w+), on v5p with (\w+) and on v6e with (\w+), and in memory in (\d+) of (\d+) rows: "
        r"all rows of h100:4x8 and h100:32x8, and the vision transformer on v6e",
    )
    in_words = {"one": 1, "two": 2, "three": 3, "all": 4}  # of four models
    numbers = [in_words.get(word, word) for word in by_chip]
    assert behind("step_seconds") == dict(zip(("v5e", "v5p", "v6e"), numbers[:3], strict=True))
    assert behind("waited_seconds") == dict(zip(("v5e", "v5p", "v6e"), numbers[3:], strict=True))
    assert behind("total_bytes") == {"h100": sum(chip == "h100" for chip, _ in pairs), "v6e": 1}
    assert behind("total_bytes").total() == int(memory) and int(rows) == len(pairs)


def test_pages_give_no_time_of_the_comparison_with_jit_without_its_range():
    """A sentence that gives a ratio of the table says "expected" or gives a range."""
    held = {f"{pair['ours']['step_seconds'] / pair['jit']['step_seconds']:.2f}" for _, pair in peers()}
    section = (ROOT / "docs/results.md").read_text().partition("## Four models")[2].partition("\n## ")[0]
    prose = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
    for sentence in re.split(r"(?<=[.:])\s", " ".join(prose.split())):
        named = re.findall(r"\b[01]\.\d\d\b", sentence)
        assert not (set(named) & held) or " to " in sentence or "expected" in sentence, sentence
    for column in ("least", "most", "lowest to highest", "collectives"):
        assert column in section, f"the table of docs/results.md has no column {column!r}."


PAGES_WITH_TIMES = (
    "compiler_options prefetch gpu cross_entropy remat lint howto/slow_step quantized offload howto/out_of_memory "
    "howto/which_axes kernels results cli tutorials/forecasting"
).split()


@pytest.mark.parametrize("page", PAGES_WITH_TIMES)
def test_page_with_forecast_times_links_to_the_definition_of_their_range(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert "forecast.md#the-time-of-a-step" in text, f"docs/{page}.md gives times of forecasts without their range."


def test_forecast_page_states_the_compile_times_of_the_stored_tpu_programs():
    stored = [loaded(path.relative_to(ROOT)) for path in (ROOT / "benchmarks/results/forecasts").glob("*_v[56]*.json")]
    seconds = [one["compile_seconds"] for cases in stored for one in cases.values() if "compile_seconds" in one]
    said = figures_said(
        "docs/forecast.md",
        r"for TPUs took (\d+) s \(median of (\d+) programs; (\d+) of them a minute or less, the longest ([\d,]+) s\)",
    )
    short = sum(one <= 60 for one in seconds)
    want = [f"{statistics.median(seconds):.0f}", f"{len(seconds)}", f"{short}", f"{max(seconds):,.0f}"]
    assert said == want


def test_readme_pages_and_citation_name_the_current_version():
    version = re.search(r'__version__ = "(.*)"', (ROOT / "xlstm_jax" / "__init__.py").read_text())[1]
    pages = [README, *(page.read_text() for page in (ROOT / "docs").glob("**/*.md") if "_build" not in page.parts)]
    assert {name for page in pages for name in re.findall(r"xlstm_jax-([\d.]+)-py3", page)} == {version}
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_ci_runs_the_documented_make_targets_with_default_and_newest_jax():
    """CI runs the make targets of docs/readme.md on both ends of JAX; `make docs-serve` counts as `make docs`."""
    page = (ROOT / "docs" / "readme.md").read_text()
    wanted = {f"make {name.removesuffix('-serve')}" for name in re.findall(r"^make ([\w-]+) +#", page, re.MULTILINE)}
    script = (ROOT / ".ci" / "run").read_text()
    assert wanted == {"make docs", "make train", "make test", "make check"}
    both = [line.split() for line in script.splitlines() if line.strip().startswith("make ")]
    newest = {f"make {target}" for line in both if any("VENV=.venv-newest" in word for word in line) for target in line}
    default = {f"make {target}" for line in both if not any("VENV=" in word for word in line) for target in line}
    assert wanted <= newest
    assert {"make train", "make test"} <= default
