"""Tests of the wheel: works in a fresh environment without checkout and extras."""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import xlstm_jax
from tests.house.test_docs import ROOT
from tests.support import blocks_of
from xlstm_jax.cli import arguments, doctor

SOURCES = ("pyproject.toml", "setup.cfg", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md")
EXTRAS = {extra: (doctor.extras() or {})[extra] for extra in ("forecast",)}  # Flax needs orbax
WHERE = "import sys, xlstm_jax; print(xlstm_jax.__file__); print(*sys.path, sep='\\n')"


def run(command, cwd, **environment):
    """Runs a command without access to the checkout; returns stdout."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds the wheel from a copy, because setuptools leaves files in the checkout and picks up earlier builds."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "xlstm_jax", folder / "xlstm_jax", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder / "dist"]
    run([sys.executable, "-m", "pip", "wheel", *options, "."], folder)
    (path,) = (folder / "dist").glob("*.whl")
    return path


def link_dependencies(folder):
    """Links the installed packages into a folder, except the extras and paths to the checkout."""
    left_out = {top for names in [["xlstm_jax"], *EXTRAS.values()] for name in names for top in installed_by(name)}
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name not in left_out:
            (folder / path.name).symlink_to(path)


def installed_by(name):
    """Returns the files and folders of a package in site-packages."""
    try:
        return {path.parts[0] for path in importlib.metadata.distribution(name).files}
    except importlib.metadata.PackageNotFoundError:
        return set()


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Returns the folder of a fresh environment with the wheel and links to its dependencies."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    link_dependencies(folder / "dependencies")
    (site_packages / "dependencies.pth").write_text(f"{folder / 'dependencies'}\n")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--ignore-installed"]
    run([sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", *options, wheel], folder)
    return folder


def test_wheel_contains_exactly_the_library_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    library = {str(path.relative_to(ROOT)) for path in (ROOT / "xlstm_jax").rglob("*.py")} | {"xlstm_jax/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == library


def test_wheel_description_has_no_relative_links(wheel):
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "Description-Content-Type: text/markdown\n" in text and "\n# xlstm_jax\n" in text
    assert "pip install xlstm_jax\n" in text and not re.search(r"\]\((?!https?:|#)", text)


def test_fresh_environment_imports_the_installed_library(environment, tmp_path):
    module, *path = run([environment / "bin" / "python", "-c", WHERE], tmp_path).splitlines()
    assert Path(module).is_relative_to(environment)
    assert str(ROOT) not in path and str(environment / "dependencies") in path


def test_first_readme_example_runs_with_the_installed_wheel(environment, tmp_path):
    (tmp_path / "example.py").write_text(blocks_of(ROOT / "README.md")[0])
    assert "loss" in run([environment / "bin" / "python", "-W", "error", "example.py"], tmp_path)


def test_doctor_command_of_the_wheel_reports_missing_extras(environment, tmp_path):
    found = json.loads(run([environment / "bin" / "xlstm-jax", "doctor", "--json"], tmp_path))
    assert found["missing"].items() >= EXTRAS.items() and "checkpoint" not in found["missing"]
    assert found["versions"]["xlstm_jax"] == xlstm_jax.__version__
    assert len(found["checks"]) >= 8 and not [check for check in found["checks"] if not check["ok"]]
    assert found["tested_on"] == "8 simulated CPU devices" or "x" in found["tested_on"]


def test_plan_help_example_runs_without_a_checkout(environment, tmp_path):
    command = [environment / "bin" / "xlstm-jax", *shlex.split(arguments.EXAMPLES["plan"])[1:]]
    assert "blocks" in run(command, tmp_path)


def test_forecast_for_tpus_without_extras_states_the_install_command(environment, tmp_path):
    (tmp_path / "train.py").write_text(blocks_of(ROOT / "docs" / "cli.md")[0])
    command = [environment / "bin" / "xlstm-jax", "forecast", "--factory", "train:training", "--topology", "v5e:2x4"]
    with pytest.raises(AssertionError, match=r'pip install "FILE.whl\[forecast\]" with a wheel'):
        run(command, tmp_path)
