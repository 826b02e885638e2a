"""The wheel, installed into a fresh environment without the checkout, is all that a user needs."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_docs import ROOT, python_blocks

SOURCES = ("pyproject.toml", "setup.cfg", "setup.py", "README.md", "LICENSE", "MANIFEST.in")
# Each user of the environment under test has the dependencies of this one. Of this one's .pth files, among them the one
# that leads an editable install to the checkout, none is read: only site-packages itself are processed.
DEPENDENCIES = sysconfig.get_path("purelib")
WHERE = "import sys, xlstm_jax; print(xlstm_jax.__file__); print(*sys.path, sep='\\n')"


def run(command, cwd, **environment):
    """Runs it without anything that leads Python to the checkout; returns stdout."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: in the checkout, setuptools would leave its files and find those of earlier builds."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "xlstm_jax", folder / "xlstm_jax", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder / "dist"]
    run([sys.executable, "-m", "pip", "wheel", *options, "."], folder)
    (path,) = (folder / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The folder of a fresh environment with the wheel, in which Python's and the dependencies' packages are found."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--ignore-installed"]
    run([sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", *options, wheel], folder)
    return folder


def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    library = {str(path.relative_to(ROOT)) for path in (ROOT / "xlstm_jax").rglob("*.py")} | {"xlstm_jax/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == library


def test_what_is_imported_is_the_installed_library(environment, tmp_path):
    module, *path = run([environment / "bin" / "python", "-c", WHERE], tmp_path).splitlines()
    assert Path(module).is_relative_to(environment)
    assert str(ROOT) not in path and DEPENDENCIES in path


def test_the_first_example_runs(environment, tmp_path):
    (tmp_path / "example.py").write_text(python_blocks(ROOT / "README.md")[0])
    assert "loss" in run([environment / "bin" / "python", "-W", "error", "example.py"], tmp_path)


def test_the_doctor_runs_and_says_which_extras_are_missing(environment, tmp_path):
    found = json.loads(run([environment / "bin" / "xlstm-jax", "doctor", "--json"], tmp_path))
    assert all(check["ok"] for check in found["checks"]) and len(found["checks"]) >= 8
