"""Texts that compilers for absent chips have written, kept so that a test reads a program and compiles nothing.

    python -m tests.forecast.kept      compiles the programs anew, and writes their texts into ``kept/``

A test module with kept programs has ``KEPT``: by name what forecasts each program with a cache. Its quick tests pass
``KeptTexts`` as the cache, which is read whichever release of JAX and of the compiler is installed. A slow test
compiles each program, and compares it by ``assert_kept_is_compiled``.
"""

import gzip
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from xlstm_jax.forecast import Forecast, ReportCache
from xlstm_jax.forecast.compiling.compile_process import RESULT
from xlstm_jax.forecast.compiling.report_cache import Texts

FOLDER = Path(__file__).parent / "kept"
MODULES = ("test_lint_gpu", "test_needless_offload")

Programs: TypeAlias = dict[str, Callable[[ReportCache], Forecast]]


class KeptTexts(ReportCache):
    """The texts of one program, passed as ``cache=`` where the program would be compiled."""

    def __init__(self, name: str) -> None:
        super().__init__(FOLDER)
        self.file = FOLDER / f"{name}.json.gz"

    def read(self, key: str) -> Texts:
        del key  # of another release, too
        return json.loads(gzip.decompress(self.file.read_bytes()))


class NewTexts(ReportCache):
    """The texts of a program that is compiled now, in ``texts``."""

    def __init__(self) -> None:
        super().__init__(FOLDER)
        self.texts: Texts = {}

    def read(self, key: str) -> None:
        del key

    def write(self, key: str, texts: Texts) -> None:
        del key
        self.texts = texts


def assert_kept_is_compiled(name: str, programs: Programs) -> None:
    """Compiles a program: for any release it has the kept arguments, and for the same release it is the kept text."""
    kept, new = KeptTexts(name), NewTexts()
    was, found = (programs[name](cache) for cache in (kept, new))
    remake = f"{name} is another program now: python -m tests.forecast.kept"
    assert was.memory.argument_bytes == found.memory.argument_bytes > 0, (
        f"{remake} ({was.memory} in place of {found.memory})"
    )
    texts = kept.read("")
    if _versions(texts) == _versions(new.texts):
        assert was.memory == found.memory and texts["hlo"] == new.texts["hlo"], remake


def _versions(texts: Texts) -> dict[str, str]:
    return json.loads(texts[RESULT])["versions"]


def main() -> None:
    for module in MODULES:
        for name, forecast_with in importlib.import_module(f"tests.forecast.{module}").KEPT.items():
            forecast_with(new := NewTexts())
            file = KeptTexts(name).file
            file.write_bytes(gzip.compress(json.dumps(new.texts).encode(), mtime=0))
            print(f"{file.name}: {file.stat().st_size / 1024:.0f} KiB, {_versions(new.texts)}")


if __name__ == "__main__":
    main()
