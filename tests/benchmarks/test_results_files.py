"""Tests of the files of benchmarks/results: each is read by a page, or linked from one."""

import pytest

from tests.house.test_docs import ROOT

RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.suffix in (".json", ".png"))


def texts():
    """Returns the text of every page."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"]
    return "\n".join(page.read_text() for page in pages if "_build" not in page.parts)


def is_read(name, pages):
    """Whether a page links the file or its folder, or loads the file."""
    loaded, folder = f'load("{name.removesuffix(".json")}")', f"results/{name.split('/')[0]}/`"
    return f"results/{name}" in pages or loaded in pages or folder in pages


def test_each_file_of_results_is_read_by_a_page():
    pages = texts()
    assert len(FILES) > 40  # guard: the search finds files
    assert not [name for name in FILES if not is_read(name, pages)], "link the file from the page of its numbers"


@pytest.mark.parametrize(
    ("pages", "read"),
    [
        ('`load("memory/7B")`', True),
        ("[JSON](results/memory/7B.json)", True),
        ("`results/memory/` holds", True),
        ('`load("memory/7B_gpus")`, [picture](results/memory/7B.png)', False),
    ],
    ids=str,
)
def test_file_is_read_where_a_page_links_it_its_folder_or_loads_it(pages, read):
    assert is_read("memory/7B.json", pages) is read
