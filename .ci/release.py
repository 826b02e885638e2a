#!/usr/bin/env python3
"""Makes a release, in two commands, each of which leaves something to look at:

    make prepare-release VERSION=0.3.0 URL=https://...    version and changelog, as one commit
    make release                                          what an index gets, checked, in dist/VERSION/; and the tag

``URL`` is where the repository can be read, for the links of README on the index, and for the addresses of source,
documentation, changelog and issues in the metadata; once is enough, as setup.cfg keeps it. A release is built
from the commit, not from the folder: from a clean tree, by way of the sdist, whose wheel is then installed into a fresh
environment of each Python that is supported, checked there, and trains README's first example. Nothing is uploaded: the
command that would is the last line.
"""

import argparse
import configparser
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
DIST = TOP / "dist"
PYTHONS = ("3.11", "3.12", "3.13")
INSTALLED = "checkpoint"  # of the other extras it is tried whether their packages fit together
NUMBER = re.compile(r"\d+\.\d+\.\d+")
WHERE = "import sys, xlstm_jax.distributed; print(xlstm_jax.__file__)"


def run(*command, **options):
    """Runs it and returns what it printed; ends with its error."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=TOP, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def current_version():
    return re.search(r'__version__ = "(.*)"', (TOP / "xlstm_jax" / "__init__.py").read_text())[1]


# --------------------------------------------------------------------------------------------- prepare


def texts_of(version, today, url=""):
    """The files that name the version, with the new one: {path: text}."""
    old = current_version()
    pages = [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]
    names = {path: (f"xlstm_jax-{old}-py3", f"xlstm_jax-{version}-py3") for path in pages if "_build" not in path.parts}
    names |= {
        TOP / "xlstm_jax" / "__init__.py": (f'__version__ = "{old}"', f'__version__ = "{version}"'),
        TOP / "CITATION.cff": (f"version: {old}\n", f"version: {version}\n"),
        TOP / "CHANGELOG.md": ("## Unreleased\n", f"## Unreleased\n\n## {version} - {today}\n"),
    }
    found = {path: path.read_text().replace(*pair) for path, pair in names.items() if pair[0] in path.read_text()}
    if url:
        text = re.sub(r"^project_urls =\n    Source = .*\n", "", (TOP / "setup.cfg").read_text(), flags=re.MULTILINE)
        urls = f"project_urls =\n    Source = {url.rstrip('/')}\n"
        found[TOP / "setup.cfg"] = text.replace("[metadata]\n", f"[metadata]\n{urls}")
    return found


def prepare(chosen):
    if not NUMBER.fullmatch(chosen.version) or chosen.version == current_version():
        sys.exit(f"{chosen.version!r} is no new version in the form 1.2.3; the last is {current_version()}.")
    check_clean()
    if not unreleased():
        sys.exit("CHANGELOG.md has nothing under Unreleased: there is nothing to release.")
    texts = texts_of(chosen.version, datetime.date.today().isoformat(), chosen.url)
    for path, text in texts.items():
        path.write_text(text)
    try:
        run("git", "commit", "--quiet", "--message", f"Version {chosen.version}", "--", *texts)
    except SystemExit:  # such as a hook's refusal: the files are as before, and the command can be given again
        run("git", "restore", "--staged", "--worktree", "--", *texts)
        raise
    print(f"Committed version {chosen.version}. Look at it, run `make test-all`, then `make release`.")


# ----------------------------------------------------------------------------------------------- build


def check_clean():
    if changed := run("git", "status", "--porcelain"):
        sys.exit(f"a release is made of a commit, and the tree has changes beside it:\n{changed}")


def unreleased():
    """What the changelog has above the latest version."""
    return (TOP / "CHANGELOG.md").read_text().partition("## Unreleased\n")[2].partition("\n## ")[0].strip()


def check_version(version):
    """The changelog begins with this version, and no tag has it yet."""
    if unreleased():
        sys.exit(
            f"CHANGELOG.md has changes under Unreleased, which would be shipped as {version}. Run `make "
            f"prepare-release` with the next version, or, while v{version} has no tag, move them below it."
        )
    heads = re.findall(r"^## (.*)", (TOP / "CHANGELOG.md").read_text(), re.MULTILINE)
    latest = next(head for head in heads if head != "Unreleased")
    if not latest.startswith(f"{version} - "):
        sys.exit(
            f"CHANGELOG.md begins with {latest!r}, and the package is {version}: run `make prepare-release` first."
        )
    if run("git", "tag", "--list", f"v{version}"):
        sys.exit(f"the tag v{version} is there already: this version has been built, see {DIST.name}/{version}.")


def built(commit, folder):
    """The sdist of a commit, and the wheel of that sdist, in a folder that is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as source:
        archive = Path(source) / "commit.tar"
        run("git", "archive", "--output", archive, commit)
        shutil.unpack_archive(archive, Path(source) / "commit")
        run(sys.executable, "-m", "build", "--outdir", folder, Path(source) / "commit")
    run(sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir())
    (wheel,) = folder.glob("*.whl")
    return wheel


def interpreter(version):
    """The Python of this version in PATH, or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")]:
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    sys.exit(f"there is no Python {version}, on which a release must be tried (or --pythons ...).")


def first_example():
    return re.search(r"^```python\n(.*?)^```$", (TOP / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]


def extras():
    config = configparser.ConfigParser(interpolation=None)
    config.read(TOP / "setup.cfg")
    return [extra for extra in config["options.extras_require"] if extra not in INSTALLED.split(",")]


def smoke(wheel, version, interpreter):
    """Installs the wheel into a fresh environment, and trains there, far from the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "venv"
        run(interpreter, "-m", "venv", environment)
        python = environment / "bin" / "python"
        outside = {"cwd": folder, "env": {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}}

        def inside(*arguments):
            done = subprocess.run([python, *map(str, arguments)], capture_output=True, text=True, **outside)
            if done.returncode:
                sys.exit(f"Python {version}, {' '.join(map(str, arguments))}:\n{done.stdout}{done.stderr}")
            return done.stdout.strip()

        inside("-m", "pip", "install", "--quiet", f"{wheel}[{INSTALLED}]")
        inside("-m", "pip", "check")
        if not Path(inside("-c", WHERE)).is_relative_to(environment):
            sys.exit(f"Python {version} imports xlstm_jax from elsewhere than its environment")
        (Path(folder) / "example.py").write_text(first_example())
        said = inside("-W", "error", "example.py")
        jax = inside("-c", "import jax; print(jax.__version__)")
        print(
            f"Python {version}, JAX {jax}: installs with [{INSTALLED}], pip check is clean, trains: {said}", flush=True
        )
        for extra in extras():
            inside("-m", "pip", "install", "--quiet", "--dry-run", f"{wheel}[{extra}]")
        print(f"    and its packages fit those of {', '.join(extras())}", flush=True)


def build(chosen):
    version, commit = current_version(), run("git", "rev-parse", "HEAD")
    check_clean()
    check_version(version)
    pythons = {python: interpreter(python) for python in chosen.pythons}  # before minutes of building
    wheel = built(commit, DIST / version)
    for python, path in pythons.items():
        smoke(wheel, python, path)
    run("git", "tag", "--annotate", f"v{version}", "--message", f"Version {version}", commit)
    print(f"Tagged v{version}. What is left is yours to decide:\n")
    branch, files = run("git", "branch", "--show-current"), (DIST / version).relative_to(TOP)
    print(f"    git push origin {branch} v{version} && {Path(sys.executable)} -m twine upload {files}/*")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("prepare")
    first.add_argument("version")
    first.add_argument("--url", default="", help="where the repository can be read")
    first.set_defaults(do=prepare)
    second = commands.add_parser("build")
    second.add_argument("--pythons", nargs="+", default=PYTHONS)
    second.set_defaults(do=build)
    chosen = parser.parse_args()
    chosen.do(chosen)


if __name__ == "__main__":
    main()
