"""Cache of compiler reports in a folder of the user, so that each program is compiled once.

  forecast, lint, fit --key of the request--> an entry: the compiler's texts --the installed library--> a Forecast

An entry holds only the compiler's texts, so a newer version of the library reads old entries anew. The entry's name is
the digest of all inputs of the compiler's process (see ``Pending.key``). Another program, option or version has
another name, so nothing needs to be invalidated. An entry begins with a digest of its name and its content. If the
digest does not match (damaged, cut off, renamed, another version), the entry is ignored and the program is compiled. A
digest does not prove who wrote the file: only regular files of this user, in a folder of this user, are read, and only
if no other user may write the file or the folder.

The folder may be removed at any time. Beyond ``max_bytes`` the entries that were not read for longest are removed.
"""

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

from xlstm_jax.formatting import one_line
from xlstm_jax.introspection import warn_user

FOLDER_VARIABLE = "XLSTM_JAX_CACHE_DIR"  # a folder; empty: no cache
MAX_CACHE_BYTES = 2**30
MAX_ENTRY_BYTES = 2**28  # uncompressed texts of one entry; the largest models so far have some MB, compressed to 1/9
SUFFIX = ".report"
DIGEST_BYTES = 32

Texts: TypeAlias = dict[str, str]  # texts that the child process wrote for one compilation, by name


@dataclass
class ReportCache:
    """A folder of compiler reports, with counts of hits and misses in this process.

    Attributes:
      folder: folder of the entries; created at the first write, for this user alone.
      max_bytes: limit for the sum of all entries; 1 GiB by default.
      hits: reports read from the folder.
      misses: programs that had to be compiled.
      problem: reason why the last report could not be stored, in a line; "" after success.
      warned: whether a warning was given; a single warning covers all unreadable entries.

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
        """Returns the compiler's texts stored under ``key``; None if the entry is missing or unusable.

        Counts the call as a hit or a miss. The first unusable entry (damaged, or writable by others) gives a warning.
        """
        path, texts = self._path(key), None
        try:
            texts = _unpacked(key, _content(path))
            # Mark the entry as read now: `_remove_oldest` sorts by this time.
            os.utime(path)
        except _UnusableError as error:
            if not self.warned:
                self.warned = True
                warn_user(
                    f"a compiled report was not read from {self.folder}: {error}. The program is compiled anew. "
                    "Further unusable reports are skipped without a warning.",
                )
        except OSError:  # no entry, or the folder is unreadable or read-only
            pass
        self.hits, self.misses = self.hits + (texts is not None), self.misses + (texts is None)
        return texts

    def write(self, key: str, texts: Texts) -> None:
        """Stores the compiler's texts under ``key``, atomically. A failure sets ``problem`` and raises nothing."""
        self.problem = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The folder may have existed before, with other permissions than `mkdir` sets.
            _check_owner(self.folder, os.stat(self.folder))
            _write_whole(self._path(key), _packed(key, texts))
            self._remove_oldest()
        except _UnusableError as error:
            self.problem = str(error)
        except OSError as error:
            self.problem = f"{self.folder}: {error.strerror or error}"

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _remove_oldest(self) -> None:
        """Removes the entries of the folder that were not read for longest, until the rest fits into ``max_bytes``."""
        entries = []
        for path in self.folder.glob(f"*{SUFFIX}"):  # includes temporary files of killed writers
            with contextlib.suppress(OSError):  # another process has just removed the file
                entries.append((path.stat().st_mtime, path.stat().st_size, path))
        # Newest first, so that the entries beyond the limit are the entries not read for longest.
        total = 0
        for _, size, path in sorted(entries, reverse=True):
            total += size
            if total > self.max_bytes:
                path.unlink(missing_ok=True)


def user_cache() -> ReportCache | None:
    """Returns the user's cache: $XLSTM_JAX_CACHE_DIR, else xlstm_jax below $XDG_CACHE_HOME or ~/.cache.

    Returns None if $XLSTM_JAX_CACHE_DIR is empty, or the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else "~/.cache"  # as the XDG specification says
    chosen = os.path.expanduser(os.environ.get(FOLDER_VARIABLE, f"{base}/xlstm_jax"))
    return ReportCache(Path(chosen).absolute()) if chosen and not chosen.startswith("~") else None


def chosen_cache(cache: bool | ReportCache) -> ReportCache | None:
    """Converts the argument ``cache`` of ``forecast`` to a cache: True to the user's folder, False to None (no cache).

    A ``ReportCache`` is returned unchanged. None also for True if the user has no folder (see ``user_cache``).
    """
    return user_cache() if cache is True else (cache or None)


class _UnusableError(Exception):
    """Reason why an entry or its folder is not used."""


def _unusable(reason: str) -> NoReturn:
    """Raises an ``_UnusableError`` with this reason, which ends the read or the write of a cache entry.

    ``ReportCache`` catches the error: the user sees a warning (read), or ``ReportCache.problem`` has the reason
    (write).
    """
    raise _UnusableError(reason) from None


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Raises an ``_UnusableError`` if a file or folder belongs to another user, or if group or others may write it.

    ``status`` is the result of ``os.stat`` for ``path``.
    """
    if status.st_uid != os.geteuid():
        _unusable(f"{path} belongs to another user (number {status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _unusable(f"others may write {path} (run chmod go-w on it if you trust its content)")


def _content(path: Path) -> bytes:
    """Returns the bytes of a cache entry, after checks that only this user can have written the file.

    Raises:
      _UnusableError: the file is no regular file, is larger than ``MAX_ENTRY_BYTES``, or the owner or the permissions
        of the file or of the folder are unsafe.
      OSError: the file is missing or unreadable.
    """
    _check_owner(path.parent, os.stat(path.parent))
    # `lstat` describes the path itself, not the target of a link.
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):  # a link may leave the folder; opening a pipe would wait for its writer
        _unusable(f"{path} is not a regular file")
    _check_owner(path, status)
    if status.st_size > MAX_ENTRY_BYTES:
        _unusable(f"{path} has {status.st_size} bytes, more than the {MAX_ENTRY_BYTES} that an entry may have")
    return path.read_bytes()


def _packed(key: str, texts: Texts) -> bytes:
    plain = json.dumps(texts).encode()
    if len(plain) > MAX_ENTRY_BYTES:
        _unusable(f"the report has {len(plain)} bytes, more than the {MAX_ENTRY_BYTES} that an entry may have")
    content = zlib.compress(plain, level=3)
    return _digest(key, content) + content


def _unpacked(key: str, data: bytes) -> Texts:
    """Returns the compiler's texts from ``data``, the bytes of the cache entry named ``key``.

    The bytes are a digest of name and content, followed by the content: compressed JSON.

    Raises:
      _UnusableError: the digest does not match; the content is cut off, or no dict of texts; or the JSON is larger than
        ``MAX_ENTRY_BYTES``.
    """
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if digest != _digest(key, content):
        _unusable("an entry does not have its digest: it is damaged, or of another version")
    unpacking = zlib.decompressobj()
    try:
        # The limit holds whatever the entry claims: a small file can inflate to gigabytes.
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
    """Returns the SHA-256 digest (32 bytes) of an entry's name and content, so that a renamed entry is refused."""
    return hashlib.sha256(key.encode() + content).digest()


def _write_whole(path: Path, data: bytes) -> None:
    """Writes ``data`` to the file ``path`` atomically: a reader sees the old file or the full new file.

    The data goes to a temporary file in the same folder, which is renamed, or removed after an error.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=SUFFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
