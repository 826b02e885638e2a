"""Folders of steps on the disks of hosts, and their way from one disk to another.

  sender     key, where to, sizes of the files; the files     -- TCP -->   receiver   writes, renames, answers "ok"

Every process receives on a free port of its host. The port, the key and the address go to the other processes through
the store of the job. A connection without the key is closed; JAX's own connections between processes have no key.
"""

import hmac
import json
import os
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from xlstm_jax.distributed.processes.together import cause_of
from xlstm_jax.private_names import job

RECORD, SHARDS = FILES = "record.json", "shards.zip"  # of a step
UNFINISHED = ".unfinished"
_HEADER_BYTES = 10_000
_PIECE_BYTES = 2**20
_TO = re.compile(r"\w+/[\w-]+/\w+/\d+")  # from the root of the receiver


def steps_of(folder: Path) -> list[int]:
    """The numbers of the steps in a folder."""
    return sorted(int(path.parent.name) for path in folder.glob(f"*/{RECORD}") if path.parent.name.isdecimal())


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write files to, which gets its name at the end, when all files are on disk."""
    unfinished = path.with_name(path.name + UNFINISHED)
    for old in (path, unfinished):
        shutil.rmtree(old, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for written in (*unfinished.iterdir(), unfinished):
            _sync(written)
        unfinished.rename(path)
    except BaseException:  # a full disk must not stay full
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def keep_newest(folder: Path, count: int | None) -> None:
    for step in steps_of(folder)[:-count] if count else []:
        shutil.rmtree(folder / str(step))


class Receiver:
    """Writes folders that other processes send below ``root``, and keeps the newest ``kept`` steps of each.

    Attributes:
      address: host, port and key, for ``send``.
    """

    def __init__(self, root: Path, kept: int, timeout_s: float) -> None:
        self._root, self._kept, self._timeout_s, self._key = root, kept, timeout_s, secrets.token_hex(16)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self.address = [_own_host(), self._socket.getsockname()[1], self._key]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):  # macOS: not connected
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        connection.settimeout(self._timeout_s)
        with connection, connection.makefile("rb") as stream:
            try:
                header = json.loads(stream.readline(_HEADER_BYTES))
                if not hmac.compare_digest(str(header["key"]), self._key):
                    return
                self._store(header, stream)
                answer = "ok"
            except Exception as error:
                answer = cause_of(error)
                while stream.read(_PIECE_BYTES):  # the sender reads no answer before it has sent all
                    pass
            connection.sendall(answer.encode())

    def _store(self, header: dict[str, Any], stream: BinaryIO) -> None:
        if not _TO.fullmatch(header["to"]):
            raise ValueError(f"{header['to']!r} is no folder of a step")
        with new_folder(self._root / header["to"]) as folder:
            for name, size in zip(FILES, header["sizes"], strict=True):
                with (folder / name).open("wb") as file:
                    while left := size - file.tell():
                        piece = stream.read(min(left, _PIECE_BYTES))
                        if not piece:
                            raise EOFError(f"{name} ended {left} bytes early")
                        file.write(piece)
        keep_newest((self._root / header["to"]).parent, self._kept)


def send(folder: Path, address: list[Any], to: str, timeout_s: float) -> None:
    """Sends a folder of a step to the ``Receiver`` at ``address``; returns when it is on disk there.

    Raises:
      OSError: it did not get there; says why.
    """
    host, port, key = address
    sizes = [(folder / name).stat().st_size for name in FILES]
    with socket.create_connection((host, port), timeout_s) as connection:
        connection.sendall(json.dumps({"key": key, "to": to, "sizes": sizes}).encode() + b"\n")
        for name in FILES:
            with (folder / name).open("rb") as file:
                connection.sendfile(file)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            answer = stream.read().decode()
    if answer != "ok":
        raise OSError(f"{folder} could not be copied to {host}: {answer or 'it closed the connection'}")


def _own_host() -> str:
    """The address by which other processes reach this host."""
    host, _, port = (job.coordinator_address or "localhost:1").rpartition(":")
    host = host.strip("[]")
    if not job.process_id:  # the others know it by this name
        return host
    # Nothing is sent: the system only says from which of its addresses it would be.
    family, kind, *_, to = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(to)
        return str(probe.getsockname()[0])
