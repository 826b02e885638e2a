"""Tests of the release script: changes every file that names the version; README of a wheel has no link to a file."""

import importlib.util
import re

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


def test_a_new_version_stands_wherever_the_old_one_did():
    texts = release.texts_of("7.8.9", "2030-01-02", ADDRESS)
    changed = {str(path.relative_to(ROOT)): text for path, text in texts.items()}
    assert changed.keys() >= {"README.md", "CITATION.cff", "CHANGELOG.md", "docs/start.md", "xlstm_jax/__init__.py"}
    old = re.escape(release.current_version())
    for name, text in changed.items():
        assert not re.search(rf"(xlstm_jax-|version: |__version__ = \"){old}\b", text), name
    assert '__version__ = "7.8.9"' in changed["xlstm_jax/__init__.py"]
    assert f"url = {ADDRESS}\n" in changed["setup.cfg"]


def test_changes_of_today_become_those_of_the_version():
    now = (ROOT / "CHANGELOG.md").read_text()
    text = release.texts_of("7.8.9", "2030-01-02")[ROOT / "CHANGELOG.md"]
    assert text == now.replace("## Unreleased\n", "## Unreleased\n\n## 7.8.9 - 2030-01-02\n")
    assert now.count("## Unreleased\n") == 1
    assert ROOT / "setup.cfg" not in release.texts_of("7.8.9", "2030-01-02")  # the URL stays


@pytest.mark.parametrize("version", ["0.3", "v0.3.0", release.current_version()])
def test_what_is_no_new_version_is_refused_before_anything_changes(version, monkeypatch):
    monkeypatch.setattr(release, "run", lambda *command: pytest.fail(f"ran {command}"))
    with pytest.raises(SystemExit, match="no new version"):
        release.prepare(type("Chosen", (), {"version": version, "url": ""}))


def test_every_link_of_readme_is_an_address_on_an_index():
    readme = (ROOT / "README.md").read_text()
    text = setup.for_an_index(readme, ADDRESS, "7.8.9")
    assert not RELATIVE.search(text) and len(RELATIVE.findall(readme)) >= 15
    assert f"]({ADDRESS}/blob/v7.8.9/docs/start.md)" in text
    assert f"]({ADDRESS}/raw/v7.8.9/benchmarks/results/by_devices/1.3B.png)" in text
    # Code is unchanged except for the installation.
    code = [re.findall(r"^```.*?^```$", one, re.MULTILINE | re.DOTALL) for one in (readme, text)]
    assert [a for a, b in zip(*code, strict=True) if a != b] == ["```bash\npip install -e .  # in a checkout\n```"]
    assert "\npip install xlstm_jax\n" in text


def test_without_an_address_links_are_their_words():
    text = setup.for_an_index((ROOT / "README.md").read_text(), "", "7.8.9")
    assert not RELATIVE.search(text)
    assert "\nStart · The full loop ·" in text and "1.3B.png" not in text
