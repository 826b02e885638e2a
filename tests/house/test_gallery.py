"""Tests of the gallery: each program trains, the first step equals one device, and the page shows the program."""

import importlib.util
import runpy
import struct
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest

import xlstm_jax.distributed
from xlstm_jax.distributed import check_step, make_train_step

DOCS = Path(__file__).parents[2] / "docs"
GALLERY = DOCS / "gallery"
PROGRAMS = sorted(file.stem for file in GALLERY.glob("*.py") if file.stem != "shared")
STEPS = {"diffusion": 60, "gan": 100, "long_context": 80, "mamba": 40, "ppo": 8}  # slow learners need more steps
FEW = 20


def writer():
    spec = importlib.util.spec_from_file_location("write_gallery", DOCS / "write_gallery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gallery_page_shows_every_program_by_docstring():
    written = writer()
    assert sorted(written.ORDER) == PROGRAMS and len(PROGRAMS) >= 12
    assert (GALLERY / "index.md").read_text() == written.page(), "run: python docs/write_gallery.py --page"
    pages = written.pages()
    for one in written.programs():
        assert f"literalinclude}} ../gallery/{one.file}.py" in pages[f"gallery_{one.file}"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_gallery_program_is_short_and_the_picture_is_small(name):
    lines = (GALLERY / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 88
    picture = (GALLERY / f"{name}.png").read_bytes()
    assert len(picture) < 40 * 2**10
    assert struct.unpack(">2I", picture[16:24]) == (691, 432)  # all pictures have one size


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "graph" else pytest.mark.slow) for n in PROGRAMS])
def test_gallery_program_trains_and_passes_check_step_at_the_first_step(name, tmp_path, monkeypatch):
    """Every step of a program passes ``check_step`` once; the test sets only the number of steps."""
    checks, losses = [], []

    def watched(*args, **options):
        step, own = make_train_step(*args, **options), []
        losses.append(own)

        def call(state, batch, rng, **others):
            if not own:
                checks.append(check_step(step, state, batch, rng, **others))
            state, metrics = step(state, batch, rng, **others)
            own.append(float(metrics["loss"]))
            return state, metrics

        return call

    few = STEPS.get(name, FEW)
    monkeypatch.setattr(xlstm_jax.distributed, "make_train_step", watched)
    monkeypatch.setenv("GALLERY_STEPS", str(few))
    monkeypatch.syspath_prepend(GALLERY)
    monkeypatch.chdir(tmp_path)
    with matplotlib.rc_context():
        end = runpy.run_path(str(GALLERY / f"{name}.py"))
    sys.modules.pop("shared")  # a common name must not stay imported

    assert [check.verdict for check in checks] == ["right"] * len(losses), "\n".join(map(str, checks))
    assert max(abs(check.loss_ratio - 1) for check in checks) < 1e-5
    assert not [number for number, own in enumerate(losses, 1) if not own], "these steps of the page never ran"
    assert (tmp_path / f"{name}.png").exists()
    if name == "ppo":  # each loss is on new pushes
        assert end["lives"][-1] > 1.5 * end["lives"][0]
    elif name == "gan":  # losses of a game do not decrease; far points become near points
        assert end["off"] < 0.2
    else:
        first = losses[0][:few]
        assert np.mean(first[-5:]) < 0.97 * np.mean(first[:5]), first
