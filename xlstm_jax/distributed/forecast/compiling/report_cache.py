"""What a compiler said of a program, kept in a folder of the user's, so that the same program is compiled once.

  forecast, lint, fit --key of the request--> an entry: the compiler's texts --the library of today--> a Forecast

An entry holds the compiler's own texts and nothing that this library makes of them, so a newer library reads them anew.
Its name is the digest of all that the compiler's process is given (see ``CompileRequest``), so another program, option
or version has another name: there is nothing to invalidate. An entry begins with a digest of its name and its content;
where that does not hold (damaged, cut off, renamed, of another version) it is no entry, and the program is compiled.

The folder may be removed at any time. Beyond ``max_bytes`` the entries that were not read for longest go.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

FOLDER_VARIABLE = "XLSTM_JAX_CACHE_DIR"  # a folder; empty: nothing is kept
MAX_CACHE_BYTES = 2**30
SUFFIX = ".report"
DIGEST_BYTES = 32

Texts: TypeAlias = dict[str, str]  # of one compilation: by name what the child process wrote


@dataclass
class ReportCache:
    """A folder of compiled reports, and what became of it in this process.

    Attributes:
      folder: where entries lie; made when the first is written, for this user alone.
      max_bytes: of all entries together; 1 GiB by default.
      hits: how many reports came from the folder.
      misses: how many programs had to be compiled.
      problem: why the last report could not be kept, in a line; "" where nothing was wrong.

    >>> import tempfile
    >>> cache = ReportCache(Path(tempfile.mkdtemp()))
    >>> cache.write("0" * 64, {"hlo": "HloModule step"})
    >>> cache.read("0" * 64), cache.read("1" * 64), cache.hits, cache.misses
    ({'hlo': 'HloModule step'}, None, 1, 1)
    """

    folder: Path
    max_bytes: int = MAX_CACHE_BYTES
    hits: int = 0
    misses: int = 0
    problem: str = ""

    def read(self, key: str) -> Texts | None:
        """The texts of an entry; None where there is none, or none that is sound."""
        path = self._path(key)
        try:
            found = _unpacked(key, path.read_bytes())
        except OSError:  # none is there, or the folder cannot be read: then it is compiled
            found = None
        self.hits, self.misses = self.hits + (found is not None), self.misses + (found is None)
        if found is not None:
            with contextlib.suppress(OSError):  # the folder may be one that only reads
                os.utime(path)
        return found

    def write(self, key: str, texts: Texts) -> None:
        """Keeps the texts, whole or not at all; where that fails, ``problem`` says why, and nothing is raised."""
        self.problem = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_whole(self._path(key), _packed(key, texts))
            self._remove_oldest()
        except OSError as error:
            self.problem = f"{self.folder}: {error.strerror or error}"

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _remove_oldest(self) -> None:
        """Removes what was not read for longest, until the rest is within ``max_bytes``."""
        entries = sorted(_sized(self.folder), reverse=True)
        total = 0
        for _, size, path in entries:
            total += size
            if total > self.max_bytes:
                path.unlink(missing_ok=True)


def user_cache() -> ReportCache | None:
    """The user's: in $XLSTM_JAX_CACHE_DIR, else in xlstm_jax below $XDG_CACHE_HOME or ~/.cache.

    None where the first is empty, or the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else "~/.cache"  # as the XDG specification says
    chosen = os.path.expanduser(os.environ.get(FOLDER_VARIABLE, f"{base}/xlstm_jax"))
    return ReportCache(Path(chosen).absolute()) if chosen and not chosen.startswith("~") else None


def chosen_cache(cache: bool | ReportCache) -> ReportCache | None:
    """What a user's argument ``cache`` stands for: True is the user's own folder, False is none."""
    return user_cache() if cache is True else (cache or None)


def _packed(key: str, texts: Texts) -> bytes:
    content = zlib.compress(json.dumps(texts).encode(), level=3)
    return _digest(key, content) + content


def _unpacked(key: str, data: bytes) -> Texts | None:
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return json.loads(zlib.decompress(content)) if digest == _digest(key, content) else None


def _digest(key: str, content: bytes) -> bytes:
    """Of the content and of the name that it goes by: an entry under another's name is not that other one."""
    return hashlib.sha256(key.encode() + content).digest()


def _write_whole(path: Path, data: bytes) -> None:
    """Writes beside the path and then renames, so that a reader sees the old file, or the new one, or none."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=SUFFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _sized(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """When each entry was last read, its bytes, its path; those of writers that were killed among them."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):  # another process has just removed it
            status = path.stat()
            yield status.st_mtime, status.st_size, path
