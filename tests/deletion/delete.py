"""Removes a feature's files, and imports of the files, from a copy of the tree."""

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

from tests.deletion.features import Feature
from tests.measures import module_of

ROOT = Path(__file__).parents[2]
LIBRARY = "xlstm_jax/distributed"
# Files beside the faces that hold registries: a row is a line with a name that the file imports.
REGISTRIES = (
    "xlstm_jax/distributed/data_parallel/wire/formats.py",
    "xlstm_jax/forecast/training/linting/rules.py",
)
COPIED = ("xlstm_jax", "tests", "benchmarks", "docs", "README.md", "conftest.py", "pyproject.toml", "setup.cfg")


def copy_tree(to: Path) -> None:
    """Copies the files tracked by git to a new folder."""
    listed = subprocess.run(["git", "ls-files", *COPIED], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def delete(feature: Feature, tree: Path) -> tuple[int, list[str]]:
    """Deletes the feature; returns the number of deleted lines, and the library files that still import the feature."""
    gone, lines = set(), 0
    for name in feature.files:
        path = tree / os.path.normpath(f"{LIBRARY}/{name}")
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            lines += len(file.read_text().splitlines())
            gone.add(module_of(file, tree))
            file.unlink()
        gone.add(module_of(path, tree))
        if path.is_dir():
            shutil.rmtree(path)
    # Faces import from each other: a name removed from a face is removed from faces that import the name.
    lost: dict[str, set[str]] = {}
    faces = [*(tree / "xlstm_jax").rglob("__init__.py"), *(tree / name for name in REGISTRIES)]
    faces = sorted((face for face in faces if face.exists()), key=lambda file: -len(file.parts))
    changed = True
    while changed:
        changed = False
        for face in faces:
            names = without(face, gone, lost)
            if names:
                lines += len(names)
                lost.setdefault(module_of(face, tree), set()).update(names)
                changed = True
    left = [file for file in sorted((tree / "xlstm_jax").rglob("*.py")) if missing(file, gone, lost)]
    # Tests and benchmarks that name the feature, and then those that import from them.
    users = [*(tree / "tests").rglob("*.py"), *(tree / "benchmarks").rglob("*.py")]
    while importing := [file for file in users if missing(file, gone, lost)]:
        for file in importing:
            gone.add(module_of(file, tree))
            users.remove(file)
            file.unlink()
    return lines, [str(file.relative_to(tree)) for file in left]


def is_gone(module: str, name: str, gone: Collection[str], lost: dict[str, set[str]]) -> bool:
    """Returns whether ``from module import name`` names removed code."""
    return module in gone or f"{module}.{name}" in gone or name in lost.get(module, ())


def missing(file: Path, gone: Collection[str], lost: dict[str, set[str]]) -> list[ast.stmt]:
    """Returns the import statements of a file that name removed code."""
    found: list[ast.stmt] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if any(is_gone(node.module, alias.name, gone, lost) for alias in node.names):
                found.append(node)
        elif isinstance(node, ast.Import) and {alias.name for alias in node.names} & set(gone):
            found.append(node)
    return found


def without(face: Path, gone: Collection[str], lost: dict[str, set[str]]) -> set[str]:
    """Rewrites a face without imports of removed code; returns the names that the face no longer has."""
    statements = missing(face, gone, lost)
    # Faces import some names when they are first read, by a row with the module: ``"nnx_model": "xlstm_jax...."``.
    when_used = re.compile(rf'^ *(?:"(\w+)": |\w+\()"({"|".join(map(re.escape, gone))})"(,|\).*)\n', flags=re.M)
    text = face.read_text()
    if not statements and not when_used.search(text):
        return set()
    lines = text.splitlines(keepends=True)
    names: set[str] = set()
    for node in sorted(statements, key=lambda node: -node.lineno):
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        bad = [alias for alias in node.names if is_gone(node.module or "", alias.name, gone, lost)]
        names |= {alias.asname or alias.name for alias in bad}
        node.names = [alias for alias in node.names if alias not in bad]
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [f"{indent}{ast.unparse(node)}\n"] if node.names else []
    # Rows of registries and of ``__all__`` have separate lines, or commas in between.
    rest = "".join(lines)
    names |= {row[1] for row in when_used.finditer(rest) if row[1]}
    rest = when_used.sub("", rest)
    rest = re.sub(r"^if TYPE_CHECKING:\nelse:", "if not TYPE_CHECKING:", rest, flags=re.M)
    for name in names:
        rest = re.sub(rf'^\s*"?\b{name}\b"?,\s*(#.*)?\n', "", rest, flags=re.M)
        rest = re.sub(rf'^\s*"[^"\n]*": {name}\(.*\),\n', "", rest, flags=re.M)
        rest = re.sub(rf'"{name}", |, "{name}"(?=\])|\["{name}"\]|\b{name}, |, {name}\b(?=[\])])', "", rest)
    face.write_text(rest)
    return names
