"""Runs every model in both modes, and writes the table of docs/any_model.md: ``python -m tests.third_party.table``.

The rows are kept in outcomes.json beside this file. A test compares the table on the page with them.
"""

import json
from dataclasses import asdict
from pathlib import Path

import flax
import jax
from rich.progress import track

from tests.third_party import catalogue, compare

HERE = Path(__file__).parent
KEPT, PAGE = HERE / "outcomes.json", HERE.parent.parent / "docs" / "any_model.md"
BEGIN, END = "<!-- table of models -->\n", "<!-- end of the table -->\n"
HEAD = ["model", "`check_vma`", "same start", "gradients", "three AdamW steps", "split", "gathers, scatters"]


def row(name: str, check_vma: bool, outcome: compare.Outcome) -> list[str]:
    return [
        name,
        str(check_vma),
        "every bit" if outcome.same_bits else "no",
        f"{outcome.gradients:.0e}",
        f"{outcome.steps:.0e}",
        f"{outcome.split} of {outcome.leaves}",
        f"{outcome.gathers}, {outcome.scatters}",
    ]


def table(kept: dict) -> str:
    """The kept outcomes in Markdown."""
    rows = [
        row(name, mode == "True", compare.Outcome(**of))
        for name, modes in kept["models"].items()
        for mode, of in modes.items()
    ]
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    versions = ", ".join(f"{package} {version}" for package, version in kept["versions"].items())
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\nMade with {versions}.\n"


def on_page(page: str) -> str:
    """The part of the page that the table is."""
    return page.partition(BEGIN)[2].partition(END)[0]


def run() -> dict:
    import diffusers
    import transformers

    packages = {"JAX": jax, "Flax": flax, "transformers": transformers, "diffusers": diffusers}
    names = track(catalogue.CASES, description="models")
    return {
        "versions": {name: package.__version__ for name, package in packages.items()},
        "models": {
            name: {str(mode): asdict(compare.outcome_of(name, mode)) for mode in (True, False)} for name in names
        },
    }


if __name__ == "__main__":
    KEPT.write_text(json.dumps(run(), indent=1) + "\n")
    page = PAGE.read_text()
    PAGE.write_text(page.replace(on_page(page), table(json.loads(KEPT.read_text()))))
