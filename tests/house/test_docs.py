"""Tests of the pages: examples run as a reader would run them, named files exist, public names have a page."""

import ast
import importlib
import json
import re
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import xlstm_jax.distributed
import xlstm_jax.distributed.metrics
import xlstm_jax.distributed.metrics.cells
import xlstm_jax.forecast
import xlstm_jax.forecast.training
from tests.house.test_layers import ORDER
from tests.optimizer_cases import CASES, RIGHT
from tests.support import blocks_of
from xlstm_jax.forecast.training.linting.rules import RULES

ROOT = Path(__file__).parents[2]
FACES = [
    xlstm_jax.distributed,
    xlstm_jax.forecast,
    xlstm_jax.forecast.training,
    xlstm_jax.distributed.metrics,
    xlstm_jax.distributed.metrics.cells,
]
SECTIONS = re.split(r"^## `([\w.]+)`$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)[1:]
PUBLIC = [
    (module, name)
    for module, tables in zip(SECTIONS[::2], SECTIONS[1::2], strict=True)
    for name in re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE)
]
OF_THE_SITE = {"index.md", "contributing.md", "changelog.md", "benchmarks.md"}  # see docs/conf.py
WRITTEN = [page for page in (ROOT / "docs").rglob("*.md") if not {"_build", "reference", "contents"} & set(page.parts)]
DOCS = [page for page in WRITTEN if page.name not in OF_THE_SITE]
ABOVE = [*ROOT.glob("[A-Z]*.md"), ROOT / "benchmarks" / "README.md"]
PAGES = sorted([*ABOVE, *DOCS])
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def name_of(page):
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# Programs of docs/ run in `make docs`.
@pytest.mark.parametrize("page", [page for page in ABOVE if blocks_of(page)], ids=name_of)
def test_examples_of_a_page_run_in_order_in_a_fresh_process(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks_of(page)))
    # -P keeps the checkout off the path: the installed package runs.
    done = subprocess.run([sys.executable, "-W", "error", "-P", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_api_page_lists_every_public_name_exactly_once():
    assert {(face.__name__, name) for face in FACES for name in face.__all__} <= set(PUBLIC)
    assert len({name for _, name in PUBLIC}) == len(PUBLIC)
    assert not [name for module, name in PUBLIC if name not in importlib.import_module(module).__all__]


@pytest.mark.parametrize("module, name", PUBLIC, ids=[name for _, name in PUBLIC])
def test_every_public_name_has_a_docstring_with_an_example(module, name):
    """Every public name has an example, which runs as a doctest."""
    public = getattr(importlib.import_module(module), name)
    assert len(public.__doc__ or "") > 40
    assert ">>> " in public.__doc__ or not callable(public)


# ---------------------------------------------------------------------------------------------------- names on a page


def anchors(page):
    """Returns the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_of_a_page_point_to_existing_files_and_anchors(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), f"links to {target}"
        if anchor and there.name not in OF_THE_SITE:  # the build checks site pages
            assert anchor in anchors(there), f"links to {target}#{anchor}"


def found_file(path):
    """Returns the file of a path relative to the repository, the library or the tests."""
    bases = (ROOT, ROOT / "xlstm_jax" / "distributed", ROOT / "xlstm_jax", ROOT / "tests")
    return next((base / path for base in bases if (base / path).exists()), None)


def resolve(dotted):
    """Returns the module or attribute of this name; else raises."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        parent, _, name = dotted.rpartition(".")
        return getattr(resolve(parent), name)


@each_page
def test_modules_names_and_files_mentioned_on_a_page_exist(page):
    text = page.read_text()
    for dotted in set(re.findall(r"(?<![\w./-])xlstm_jax\.[\w.]*\w", text)):
        resolve(dotted)
    for module in set(re.findall(r"(?<![\w./-])benchmarks\.(\w+)", text)):
        assert (ROOT / "benchmarks" / f"{module}.py").exists(), module
    for path in set(re.findall(r"(?<![\w./:-])\w+(?:/[\w.-]+)*/[\w-]+\.(?:py|md|png|json|toml|cfg)\b", text)):
        assert found_file(path) or (page.parent / path).exists(), path


def imported_names():
    """Returns (program, module, name) for each library import in programs of the pages and of docs/."""
    programs = [*(ROOT / "docs" / "gallery").glob("*.py"), *(ROOT / "docs" / "examples").glob("*.py")]
    texts = {name_of(file): file.read_text() for file in programs}
    for page in PAGES:
        for i, block in enumerate(re.findall(r"^```py\w*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)):
            texts[f"{name_of(page)}[{i}]"] = block
    for where, text in texts.items():
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError:  # part of a program
            continue
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xlstm_jax"):
                yield from ((where, node.module, alias.name) for alias in node.names)


def test_library_imports_in_page_programs_exist_without_deprecation():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # a moved name still imports for a release
        found = sorted(set(imported_names()))
        missing = [one for one in found if one[2] != "*" and not hasattr(importlib.import_module(one[1]), one[2])]
    assert len(found) > 500 and not missing


def test_names_placed_in_files_by_the_architecture_page_exist():
    places = re.findall(r"`(\w+)` in `([\w/.]+)`", ARCHITECTURE.read_text())
    assert len(places) >= 20
    for name, path in places:
        assert re.search(rf"\b{name}\b", found_file(path).read_text()), f"{name} in {path}"


def test_table_of_typical_changes_names_existing_folders_and_at_most_three_files():
    """The table of typical changes names existing folders and at most three files per change."""
    section = ARCHITECTURE.read_text().split("\n## Typical changes\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| `([\w/]+)` \| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE)
    assert len(rows) == 13
    for folder, files in rows:
        touched = files.split(", ")
        assert found_file(folder).is_dir() and len(touched) <= 3
        assert all(file == "a new file" or found_file(file.strip("`")).is_file() for file in touched), files


def test_architecture_page_and_layers_picture_have_the_folder_order():
    text, picture = ARCHITECTURE.read_text(), ROOT / "docs" / "images" / "layers.png"
    assert " ".join(ORDER.split()) in " ".join(text.split())
    layers = [[name.strip() for name in names.split(",")] for names in ORDER.split("<")]
    assert str(layers).encode() in picture.read_bytes(), "run: python docs/draw_layers.py"
    for name in (name for names in layers for name in names):
        assert re.search(rf"^ +{name}(/|\.py) +\w", text, re.MULTILINE), f"the tree has no line for {name}"


def test_readme_is_at_most_80_columns_wide():
    """README fits a terminal of 80 columns; the lines of the diff are those of the tutorial, which may be longer."""
    text = re.sub(r"^```diff\n.*?^```$", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not [line for line in text.splitlines() if len(line) > 80]


def test_no_page_installs_the_library_by_name_from_an_index():
    wrong = re.compile(r"install\s+(-\S+\s+)*['\"]?xlstm[-_]jax(?!-\d)")
    assert wrong.search("pip install xlstm_jax[forecast]")  # guard
    assert not [path for path in [*PAGES, *(ROOT / "xlstm_jax").rglob("*.py")] if wrong.search(path.read_text())]


def test_every_page_is_in_the_contents_of_the_site():
    contents = (ROOT / "docs" / "index.md").read_text()
    entries = {re.sub(r".*<(.*)>", r"\1", line) for line in contents.splitlines()}
    assert {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in DOCS} <= entries
    assert {page.removesuffix(".md") for page in OF_THE_SITE} - {"index"} <= entries


PICTURES = sorted([*(ROOT / "docs" / "images").glob("*.png"), *(ROOT / "benchmarks" / "results").rglob("*.png")])


@pytest.mark.parametrize("picture", PICTURES, ids=name_of)
def test_picture_has_at_most_1400_pixels_for_legible_letters(picture):
    """A picture has at most 1400 x 1400 pixels: on a page of 830 pixels, letters stay above 0.6 of their size."""
    width, height = struct.unpack(">2I", picture.read_bytes()[16:24])
    assert 800 <= width <= 1400 and height <= 1400, f"{width} x {height}"


def test_pages_list_every_lint_rule_and_the_number_of_optax_configurations():
    lint_page, optimizers_page = ((ROOT / "docs" / name).read_text() for name in ("lint.md", "optimizers.md"))
    assert re.findall(r"^\| `([\w-]+)` \|", lint_page, re.MULTILINE) == list(RULES)
    right = sum(case.on_shards == RIGHT for case in CASES)
    assert f"Of the {len(CASES)} optax configurations {right} are right on shards" in optimizers_page
    for page in (optimizers_page, (ROOT / "docs" / "readme.md").read_text()):
        assert set(re.findall(r"(\d+) optax configurations", page)) == {str(len(CASES))}


def test_readme_and_index_show_the_diff_of_the_tutorial():
    """README and the first page show the changed lines of the tutorial, whose two scripts the site runs."""
    names = ("docs/tutorials/plain_script.md", "README.md", "docs/index.md")
    wanted, *shown = (blocks_of(ROOT / name, "diff")[0].splitlines() for name in names)
    for lines in shown:
        assert [line for line in lines if line[0] in "+-"] == [line for line in wanted if line[0] in "+-"]


INDEX = ROOT / "docs" / "_build" / "html" / "searchindex.js"


@pytest.mark.skipif(not INDEX.exists(), reason="make docs has not built the site")
@pytest.mark.parametrize(
    "asked, page",
    [
        ("NaN", "howto/find_a_nan"),
        ("out of memory", "howto/out_of_memory"),
        ("OOM", "howto/out_of_memory"),
        ("bfloat16", "dtypes"),
        ("contrastive", "howto/contrastive"),
        ("EMA", "averaging"),
        ("resume", "howto/stop_and_resume"),
        ("multi-host", "tutorials/machines"),
        ("multi host", "tutorials/machines"),
        ("convert checkpoint", "howto/export"),
        ("learning rate", "training"),
        ("dropout", "training"),
        ("slow", "howto/slow_step"),
        ("weight decay", "howto/weight_decay"),
    ],
)
def test_site_search_ranks_the_answering_page_first(asked, page):
    """A search for a term finds its page first: only a main index entry equal to the query scores 100."""
    index = json.loads(re.fullmatch(r"Search\.setIndex\((.*)\);?\s*", INDEX.read_text(), re.DOTALL)[1])
    found = index["indexentries"][asked.lower()]
    assert [index["docnames"][number] for number, _, main in found if main] == [page]


sys.path.insert(0, str(ROOT / "docs"))

from implied_pages import KEYWORDS, groups_of_pages, public_names  # noqa: E402  # docs/ is no package


def test_keywords_point_to_existing_pages_and_are_unique():
    assert {page for page in KEYWORDS if not (ROOT / "docs" / f"{page}.md").exists()} == set()
    words = [word.lower() for words in KEYWORDS.values() for word in words]
    assert len(words) == len(set(words))


def test_the_sidebar_has_at_most_40_entries_on_each_page():
    """The sidebar, with the page groups and the pages of the current group, has at most 40 entries."""
    groups = groups_of_pages()
    assert len(groups) >= 10 and len(groups) + max(len(pages) for _, pages in groups) <= 40


def test_broken_links_finds_missing_anchors_and_pages(tmp_path):
    anchors = pytest.importorskip("anchors", exc_type=ImportError)  # imports Sphinx
    (tmp_path / "a.html").write_text('<p id="x"><a href="#x"><a href="#y"><a href="b.html#z"><a href="https://c#d">')
    (tmp_path / "b.html").write_text('<h1 id="z"><a href="a.html#x"><a href="a.html#w"><a href="c.html">')
    broken = anchors.broken_links(sorted(tmp_path.glob("*.html")))
    assert [(page.name, link) for page, link in broken] == [
        ("a.html", "#y"),
        ("b.html", "a.html#w"),
        ("b.html", "c.html"),
    ]


def test_mend_links_back_points_source_pages_to_the_public_module_of_each_name():
    """Source pages link to each name's public module; Sphinx uses one module per file."""
    anchors = pytest.importorskip("anchors", exc_type=ImportError)
    faces = {name: module for module, name, _ in public_names()}
    assert faces["TokenLosses"] != faces["LMHead"]  # guard
    link = '<a href="../../reference/TokenLosses.html#{}.TokenLosses.loss">'
    context = {"body": link.format(faces["LMHead"])}
    anchors.mend_links_back(None, "_modules/xlstm_jax/distributed/training/cross_entropy", "", context, None)
    assert context["body"] == link.format(faces["TokenLosses"])
