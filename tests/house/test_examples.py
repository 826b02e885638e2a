"""Tests of docs/examples/: each program is the code of its tutorial, and the full loop runs as a file."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import blocks_of

DOCS = Path(__file__).parents[2] / "docs"
FILES = sorted((DOCS / "examples").glob("*.py"))


def writer(name="write_examples"):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_programs_equal_the_output_of_write_examples():
    written = writer().examples()
    assert sorted(written) == FILES and len(FILES) >= 3
    for file, text in written.items():
        assert file.read_text() == text, "run: python docs/write_examples.py"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_example_program_has_all_code_blocks_of_the_tutorial_in_order(file):
    blocks = "\n".join(blocks_of(DOCS / "tutorials" / f"{file.stem}.md"))
    docstring, *program = ast.parse(file.read_text()).body
    assert ast.unparse(ast.Module(program, [])) == ast.unparse(ast.parse(blocks))
    assert f"docs/tutorials/{file.stem}.md" in docstring.value.value


def test_full_loop_example_stops_on_sigterm_and_continues_with_the_same_bits(tmp_path):
    command = [sys.executable, "-W", "error", "-P", DOCS / "examples" / "whole_loop.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "SIGTERM: saved step 30\ncontinues after step 30\n" in done.stdout
    assert "same bits: True\nsame rows: True\n" in done.stdout


NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def test_notebooks_equal_the_output_of_write_notebooks():
    written = writer("write_notebooks").notebooks()
    assert sorted(written) == NOTEBOOKS and len(NOTEBOOKS) == 5
    for file, text in written.items():
        assert file.read_text() == text, "run: python docs/write_notebooks.py"


@pytest.mark.parametrize(
    "file", [pytest.param(f, marks=[] if f.stem == "plain_script" else pytest.mark.slow, id=f.stem) for f in NOTEBOOKS]
)
def test_a_notebook_runs_and_shows_tables(file, tmp_path):
    """A notebook runs in a separate kernel, from a folder without the library, and shows tables."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(file, 4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs and not [output for output in outputs if output.output_type == "error"]
    assert any("</pre>" in output.get("data", {}).get("text/html", "") for output in outputs)
