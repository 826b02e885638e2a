"""Tests of README and the page of results: figures equal the kept results, and CI runs the commands."""

import json
import re
from collections import Counter

from tests.house.test_docs import ROOT

README = (ROOT / "README.md").read_text()
WORDS = " ".join(README.split())
ENDS = ["v5e:2x2", "v5e:16x16"]  # 4 and 256 chips


def loaded(name):
    return json.loads((ROOT / name).read_text())


def peers():
    """[(topology, {"jit": row, "ours": row})] of four models on five clusters."""
    models = loaded("benchmarks/results/peers/peers.json")["models"]
    return [(topology, pair) for rows in models.values() for topology, pair in rows.items()]


def test_readme_step_times_equal_stored_results():
    ratios = [
        loaded("benchmarks/results/step_time/small.json")["cases"][case]["ratios"]["time over jit"]
        for case in ("ours", "FSDP2")
    ]
    said = re.search(
        r"takes ([\d.]+) \(quartiles ([\d.]+) to ([\d.]+)\).* FSDP2 ([\d.]+) \(([\d.]+) to ([\d.]+)\)",
        WORDS,
    )
    assert list(said.groups()) == [f"{ratio[part]:.2f}" for ratio in ratios for part in ("median", "low", "high")]


def test_readme_comparison_with_jit_equals_stored_results():
    said = re.search(
        r"take ([\d.]+) to ([\d.]+) of the step time of `jit` with shardings \(less in (\d+) of (\d+) cases\) "
        r"and ([\d.]+) to ([\d.]+) of its peak memory \(less in (\d+)\)",
        WORDS,
    ).groups()
    step, memory = (
        [pair["ours"][what] / pair["jit"][what] for _, pair in peers()] for what in ("step_seconds", "total_bytes")
    )
    wanted = [f"{min(step):.2f}", f"{max(step):.2f}", sum(x < 1 for x in step), len(step)]
    wanted += [f"{min(memory):.2f}", f"{max(memory):.2f}", sum(x < 1 for x in memory)]
    assert list(said) == [str(value) for value in wanted]


def test_readme_figures_of_third_party_models_equal_stored_outcomes():
    models, error = re.search(r"(\d+) unedited models of .* within ([\d.e-]+) in float32", WORDS).groups()
    runs = [run["models"] for run in loaded("tests/third_party/outcomes.json").values()]
    modes = [found[mode] for one in runs for found in one.values() for mode in ("True", "False") if found[mode]]
    assert {len(one) for one in runs} == {int(models)} and all(mode["same_bits"] for mode in modes)
    assert 0.9 * float(error) < max(mode["gradients"] for mode in modes) <= float(error)


def test_readme_memory_by_devices_equals_stored_results():
    rows = loaded("benchmarks/results/by_devices/1.3B.json")
    replicated, *shards = (
        rows[topology][case]["bytes"]["total"] / 2**30
        for case, topologies in {"replicated": ["v5e:16x16"], "ours": ENDS, "jit": ENDS}.items()
        for topology in topologies
    )
    number = r"([\d.]+)"
    said = re.search(
        f"{number} GiB replicated; with the library {number} GiB on 4 chips and {number} on 256, "
        f"with `jit` and shardings {number} and {number}",
        WORDS,
    )
    assert list(said.groups()) == [f"{size:.2f}" for size in (replicated, *shards)]


def test_results_page_states_cases_behind_jit_as_in_stored_results():
    page = " ".join((ROOT / "docs" / "results.md").read_text().split())
    pairs = [(topology.partition(":")[0], pair) for topology, pair in peers()]

    def behind(what):
        chips = Counter(chip for chip, pair in pairs if pair["ours"][what] > pair["jit"][what])
        return {chip: {1: "one", 2: "two", 3: "three", 4: "all"}[count] for chip, count in chips.items()}

    memory = Counter(chip for chip, pair in pairs if pair["ours"]["total_bytes"] > pair["jit"]["total_bytes"])
    [(models, on_v5p, on_v5e, on_v6e, count)] = re.findall(
        r"behind on v5e with (\w+) of the models, in waiting on v5p with (\w+), on v5e with (\w+) and on v6e with (\w+)"
        rf", and in memory in (\d+) of {len(pairs)} rows",
        page,
    )
    assert behind("step_seconds") == {"v5e": models}
    assert behind("waited_seconds") == {"v5p": on_v5p, "v5e": on_v5e, "v6e": on_v6e}
    assert memory == {"h100": int(count)} and int(count) == sum(chip == "h100" for chip, _ in pairs)


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
