"""What README says beside peers is what the benchmarks wrote, in its table and in its picture."""

import json
import re
import sys

from tests.test_docs import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import draw_peers  # docs/ is no package

README = (ROOT / "README.md").read_text()


def test_its_table_and_its_picture_have_the_numbers_of_the_results():
    assert draw_peers.table() in README, "run: python docs/draw_peers.py"
    assert draw_peers.table().encode() in (ROOT / "docs" / "images" / "peers.png").read_bytes()


def test_its_times_of_a_step_are_those_of_the_results():
    cases = json.loads((draw_peers.RESULTS / "step_time" / "small.json").read_text())["cases"]
    ours, fsdp2 = (cases[name]["ratios"]["time over jit"]["median"] for name in ("ours, gathered again", "FSDP2"))
    words = " ".join(README.split())
    assert f"takes {ours:.2f} of the time of `jit`, and PyTorch's FSDP2 {fsdp2:.2f}" in words


def test_it_names_the_version():
    version = re.search(r'__version__ = "(.*)"', (ROOT / "xlstm_jax" / "__init__.py").read_text())[1]
    assert f"xlstm_jax-{version}-py3-none-any.whl" in README
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
