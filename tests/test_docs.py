"""Every example in README and docs runs as a reader would run it, and every public name is documented."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import xlstm_jax.distributed
import xlstm_jax.distributed.forecast
import xlstm_jax.distributed.metrics
import xlstm_jax.distributed.metrics.cells

ROOT = Path(__file__).parent.parent
FACES = [
    xlstm_jax.distributed,
    xlstm_jax.distributed.forecast,
    xlstm_jax.distributed.metrics,
    xlstm_jax.distributed.metrics.cells,
]
PUBLIC = [(face, name) for face in FACES for name in face.__all__]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_the_examples_of_a_page_run_one_after_the_other_in_a_fresh_process(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(python_blocks(page)))
    # -P keeps the checkout off the path: what runs is what was installed.
    done = subprocess.run([sys.executable, "-W", "error", "-P", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_public_name_has_its_line_and_every_line_a_name():
    documented = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(name for _, name in PUBLIC)


@pytest.mark.parametrize("face, name", PUBLIC, ids=lambda value: value if isinstance(value, str) else "")
def test_every_public_name_has_a_docstring(face, name):
    assert len(getattr(face, name).__doc__ or "") > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
