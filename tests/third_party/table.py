"""Runs every model in both modes, and writes the table of docs/any_model.md: ``python -m tests.third_party.table``.

outcomes.json in this folder has the outcomes of the last run per release of JAX; the table shows the larger error. A
test compares the table on the page with the file.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import flax
import jax
from rich.progress import track

from tests.third_party import catalogue, compare

HERE = Path(__file__).parent
KEPT, PAGE = HERE / "outcomes.json", HERE.parent.parent / "docs" / "any_model.md"
BEGIN, END = "<!-- table of models -->\n", "<!-- end of the table -->\n"
HEAD = ["model", "units", "`check_vma`", "same start", "gradients", "three AdamW steps", "split", "gathers, scatters"]
Outcomes = Mapping[str, Mapping[str, Any]]


def row(name: str, mode: str, releases: list[Outcomes]) -> list[str]:
    """Returns the row of a model in one mode for all releases of JAX, with a mark if a release rejects the model."""
    found = [models[name][mode] for models in releases]
    seen = [outcome for outcome in found if outcome]
    counts = {(o["split"], o["leaves"], o["gathers"], o["scatters"]) for o in seen}
    assert len(counts) == 1, f"{name}: releases of JAX differ in {counts}"
    ((split, leaves, gathers, scatters),) = counts
    return [
        name,
        releases[0][name]["units"],
        mode if len(seen) == len(found) else f"{mode} [1]",
        "every bit" if all(o["same_bits"] for o in seen) else "no",
        f"{max(o['gradients'] for o in seen):.0e}",
        f"{max(o['steps'] for o in seen):.0e}",
        f"{split} of {leaves}",
        f"{gathers}, {scatters}",
    ]


def table(kept: Mapping[str, Any]) -> str:
    """Returns the recorded outcomes in Markdown."""
    releases = [run["models"] for run in kept.values()]
    rows = [row(name, mode, releases) for name in releases[0] for mode in ("True", "False")]
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    runs = "; ".join(
        ", ".join(f"{name} {version}" for name, version in run["versions"].items()) for run in kept.values()
    )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\nMade with {runs}.\n"


def on_page(page: str) -> str:
    """Returns the table's part of the page."""
    return page.partition(BEGIN)[2].partition(END)[0]


def run() -> dict[str, Any]:
    """Returns the outcomes of all models on this release of JAX; None if JAX lacks a model's gradient."""
    import diffusers
    import transformers

    packages = {"JAX": jax, "Flax": flax, "transformers": transformers, "diffusers": diffusers}
    return {
        "versions": {name: package.__version__ for name, package in packages.items()},
        "models": {name: of_model(name) for name in track(catalogue.CASES, description="models")},
    }


def of_model(name: str) -> dict[str, Any]:
    where = catalogue.CASES[name]().where
    units = ", ".join(cls.__name__ for cls in (where if isinstance(where, tuple) else (where,)))
    outcomes = {str(mode): compare.outcome_of(name, mode) for mode in (True, False) if compare.has_gradient(name, mode)}
    return {"units": units, "True": None} | {mode: asdict(outcome) for mode, outcome in outcomes.items()}


if __name__ == "__main__":
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept[f"JAX {'.'.join(jax.__version__.split('.')[:2])}"] = run()
    KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    page = PAGE.read_text()
    PAGE.write_text(page.replace(BEGIN + on_page(page), BEGIN + table(json.loads(KEPT.read_text()))))
