"""Tests of the release script: changes every file that names the version; README of a wheel has no link to a file."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys

import pytest

from tests.house.test_docs import ROOT

ADDRESS = "https://example.org/xlstm_jax"
RELATIVE = re.compile(r"\]\((?!https?:|#)")


def of_file(path):
    """Returns a script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem + "_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release, setup = of_file(ROOT / ".ci" / "release.py"), of_file(ROOT / "setup.py")


def test_release_texts_replace_the_old_version_in_every_file():
    texts = release.texts_of("7.8.9", "2030-01-02", ADDRESS)
    changed = {str(path.relative_to(ROOT)): text for path, text in texts.items()}
    assert changed.keys() >= {"README.md", "CITATION.cff", "CHANGELOG.md", "docs/start.md", "xlstm_jax/__init__.py"}
    old = re.escape(release.current_version())
    for name, text in changed.items():
        assert not re.search(rf"(xlstm_jax-|version: |__version__ = \"){old}\b", text), name
    assert '__version__ = "7.8.9"' in changed["xlstm_jax/__init__.py"]
    assert changed["setup.cfg"].count("project_urls") == changed["setup.cfg"].count(ADDRESS) == 1


def test_release_texts_replace_an_earlier_project_address(tmp_path, monkeypatch):
    for name in ("README.md", "CITATION.cff", "CHANGELOG.md", "xlstm_jax/__init__.py", "setup.cfg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(release, "TOP", tmp_path)
    for address in ("https://old.example.org/x", f"{ADDRESS}/"):
        (tmp_path / "setup.cfg").write_text(release.texts_of("7.8.9", "2030-01-02", address)[tmp_path / "setup.cfg"])
    text = (tmp_path / "setup.cfg").read_text()
    assert f"project_urls =\n    Source = {ADDRESS}\nname" in text and "old.example.org" not in text


@pytest.mark.parametrize("address", [ADDRESS, ""])
def test_package_metadata_has_each_project_url_once(address, tmp_path):
    """Made of a copy, as an index reads them; without an address there is none, and no guess."""
    shutil.copytree(ROOT / "xlstm_jax", tmp_path / "xlstm_jax", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    text = release.texts_of("7.8.9", "2030-01-02", address).get(ROOT / "setup.cfg", (ROOT / "setup.cfg").read_text())
    (tmp_path / "setup.cfg").write_text(text)
    made = [sys.executable, "-W", "ignore", "setup.py", "--quiet", "egg_info"]
    done = subprocess.run(made, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    urls = dict(line.split(", ", 1) for line in found.metadata.get_all("Project-URL") or [])
    assert urls == setup.project_urls(address) and "Home-page" not in found.metadata
    assert list(urls) == (["Documentation", "Source", "Changelog", "Issues"] if address else [])
    assert len(set(urls.values())) == len(urls)
    assert not {name: url for name, url in urls.items() if not url.startswith(ADDRESS)}


def test_release_texts_move_unreleased_changes_under_the_new_version():
    now = (ROOT / "CHANGELOG.md").read_text()
    text = release.texts_of("7.8.9", "2030-01-02")[ROOT / "CHANGELOG.md"]
    assert text == now.replace("## Unreleased\n", "## Unreleased\n\n## 7.8.9 - 2030-01-02\n")
    assert now.count("## Unreleased\n") == 1
    assert ROOT / "setup.cfg" not in release.texts_of("7.8.9", "2030-01-02")  # the URL stays


@pytest.mark.parametrize("version", ["0.3", "v0.3.0", release.current_version()])
def test_release_prepare_raises_for_an_invalid_or_current_version_before_any_change(version, monkeypatch):
    monkeypatch.setattr(release, "run", lambda *command: pytest.fail(f"ran {command}"))
    with pytest.raises(SystemExit, match="no new version"):
        release.prepare(type("Chosen", (), {"version": version, "url": ""}))


def test_for_an_index_turns_every_readme_link_into_an_absolute_address():
    readme = (ROOT / "README.md").read_text()
    text = setup.for_an_index(readme, ADDRESS, "7.8.9")
    assert not RELATIVE.search(text) and len(RELATIVE.findall(readme)) >= 15
    assert f"]({ADDRESS}/blob/v7.8.9/docs/start.md)" in text
    assert f"]({ADDRESS}/raw/v7.8.9/benchmarks/results/by_devices/1.3B.png)" in text
    # Code is unchanged except for the installation.
    code = [re.findall(r"^```.*?^```$", one, re.MULTILINE | re.DOTALL) for one in (readme, text)]
    assert [a for a, b in zip(*code, strict=True) if a != b] == ["```bash\npip install -e .  # in a checkout\n```"]
    assert "\npip install xlstm_jax\n" in text


def test_for_an_index_without_address_replaces_links_by_link_text():
    text = setup.for_an_index((ROOT / "README.md").read_text(), "", "7.8.9")
    assert not RELATIVE.search(text)
    assert "\nStart · The full loop ·" in text and "1.3B.png" not in text
