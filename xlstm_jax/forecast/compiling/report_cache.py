"""What a compiler said of a program, kept in a folder of the user's, so that the same program is compiled once.

  forecast, lint, fit --key of the request--> an entry: the compiler's texts --the library of today--> a Forecast

An entry holds the compiler's own texts and nothing that this library makes of them, so a newer library reads them anew.
Its name is the digest of all that the compiler's process is given (see ``Pending.key``), so another program, option
or version has another name: there is nothing to invalidate. An entry begins with a digest of its name and its content;
where that does not hold (damaged, cut off, renamed, of another version) it is no entry, and the program is compiled.
A digest does not say who wrote: only regular files of this user, in a folder of this user, are read, and neither if
others may write there.

The folder may be removed at any time. Beyond ``max_bytes`` the entries that were not read for longest go.
"""

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

from xlstm_jax.wording import one_line

FOLDER_VARIABLE = "XLSTM_JAX_CACHE_DIR"  # a folder; empty: nothing is kept
MAX_CACHE_BYTES = 2**30
MAX_ENTRY_BYTES = 2**28  # of one entry's texts; those of the largest models so far have some MB, and compress to 1/9
SUFFIX = ".report"
DIGEST_BYTES = 32

Texts: TypeAlias = dict[str, str]  # of one compilation: by name what the child process wrote


@dataclass
class ReportCache:
    """A folder of compiled reports, and how often this process found one there.

    Attributes:
      folder: where entries lie; made when the first is written, for this user alone.
      max_bytes: of all entries together; 1 GiB by default.
      hits: how many reports came from the folder.
      misses: how many programs had to be compiled.
      problem: why the last report could not be kept, in a line; "" where nothing was wrong.
      warned: whether a warning was given; one tells of all that could not be read.

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
    warned: bool = False

    def read(self, key: str) -> Texts | None:
        """The texts of an entry; None where there is none, or none that is sound."""
        path, texts = self._path(key), None
        try:
            texts = _unpacked(key, _content(path))
            # Read just now: `_remove_oldest` goes by this time.
            os.utime(path)
        except _UnusableError as error:
            if not self.warned:
                self.warned = True
                warnings.warn(
                    f"a compiled report was not read from {self.folder}: {error}. The program is compiled anew, as are "
                    "others there of which the same is true.",
                    stacklevel=2,
                )
        except OSError:  # none is there, or the folder cannot be read, or is one that only reads
            pass
        self.hits, self.misses = self.hits + (texts is not None), self.misses + (texts is None)
        return texts

    def write(self, key: str, texts: Texts) -> None:
        """Keeps the texts, whole or not at all; where that fails, ``problem`` says why, and nothing is raised."""
        self.problem = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The folder may have been there before, with other rights than `mkdir` would give.
            _check_ours_alone(self.folder, os.stat(self.folder))
            _write_whole(self._path(key), _packed(key, texts))
            self._remove_oldest()
        except _UnusableError as error:
            self.problem = str(error)
        except OSError as error:
            self.problem = f"{self.folder}: {error.strerror or error}"

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _remove_oldest(self) -> None:
        """Removes what was not read for longest, until the rest is within ``max_bytes``."""
        entries = []
        for path in self.folder.glob(f"*{SUFFIX}"):  # those of writers that were killed among them
            with contextlib.suppress(OSError):  # another process has just removed it
                entries.append((path.stat().st_mtime, path.stat().st_size, path))
        # The newest first: what lies beyond the limit is what was not read for longest.
        total = 0
        for _, size, path in sorted(entries, reverse=True):
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


class _UnusableError(Exception):
    """Why an entry, or its folder, is not used."""


def _unusable(reason: str) -> NoReturn:
    """Ends the reading or writing of an entry. Users see the reason in a warning or in ``problem``, not as an error."""
    raise _UnusableError(reason) from None


def _check_ours_alone(path: Path, status: os.stat_result) -> None:
    """Refuses a file or folder that another user owns or may write."""
    if status.st_uid != os.geteuid():
        _unusable(f"{path} belongs to another user (number {status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _unusable(f"others may write {path} (run chmod go-w on it, if you trust what it holds)")


def _content(path: Path) -> bytes:
    """The bytes of a regular file that this user alone may write, in a folder where nobody else can exchange it."""
    _check_ours_alone(path.parent, os.stat(path.parent))
    # Of the path itself, not of what a link leads to.
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):  # a link leads elsewhere, and an open of a pipe would wait for its writer
        _unusable(f"{path} is no regular file")
    _check_ours_alone(path, status)
    if status.st_size > MAX_ENTRY_BYTES:
        _unusable(f"{path} has {status.st_size} bytes, more than the {MAX_ENTRY_BYTES} that an entry may")
    return path.read_bytes()


def _packed(key: str, texts: Texts) -> bytes:
    plain = json.dumps(texts).encode()
    if len(plain) > MAX_ENTRY_BYTES:
        _unusable(f"the report has {len(plain)} bytes, more than the {MAX_ENTRY_BYTES} that an entry may")
    content = zlib.compress(plain, level=3)
    return _digest(key, content) + content


def _unpacked(key: str, data: bytes) -> Texts:
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if digest != _digest(key, content):
        _unusable("an entry does not have its digest: it is damaged, or of another version")
    unpacking = zlib.decompressobj()
    try:
        # At most so many bytes, whatever the entry claims: a small one can inflate to gigabytes.
        plain = unpacking.decompress(content, MAX_ENTRY_BYTES)
        texts = json.loads(plain) if unpacking.eof else None
    except (zlib.error, ValueError, RecursionError) as error:
        _unusable(f"an entry has its digest, and holds no texts ({one_line(error)})")
    if not unpacking.eof:
        _unusable(f"an entry is cut off, or inflates to more than {MAX_ENTRY_BYTES} bytes")
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        _unusable("an entry has its digest, and holds no texts")
    return texts


def _digest(key: str, content: bytes) -> bytes:
    """A digest of the content and of the entry's name, so that a renamed entry is refused."""
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
