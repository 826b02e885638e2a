"""Real text as bytes: collected from files, split into training and held-out files, drawn as windows.

    files  -- load_text -->  Text(train, held_out: uint8[bytes])  -- random_windows -->  uint8[batch, context + 1]

The default is the source of Python's standard library, which is available on every machine. Complete files are held
out, chosen by a hash of their relative path, and exact copies of a file count once, so that held-out text does not
occur in the training text. A zero byte ends every file.

The baseline for a language model is a byte-frequency model, which ignores the order of bytes.
"""

import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELD_OUT_SHARE = 0.05
FEW_FILES = 20  # with fewer files, a single file is more than HELD_OUT_SHARE of the text
FOLDERS_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})
END_OF_FILE = b"\0"


@dataclass(frozen=True)
class Text:
    """Training bytes and held-out bytes; ``summary`` describes their source."""

    train: np.ndarray
    held_out: np.ndarray
    summary: str


def load_text(paths: Sequence[str | Path] = ()) -> Text:
    """Reads the text under ``paths`` (files and folders) or, without paths, the sources of the standard library.

    With ``FEW_FILES`` or more files, a fraction ``HELD_OUT_SHARE`` of the files is held out; with fewer files, the last
    ``HELD_OUT_SHARE`` of the bytes of each file. Hidden files and files without UTF-8 text in a folder are skipped.

    Raises:
        ValueError: a path does not exist, a named file is not text, or no text is found.
    """
    files = list(_collect(paths) if paths else _standard_library())
    where = ", ".join(map(str, paths)) or "Python's standard library"
    if not files:
        raise ValueError(f"--data {where}: no text in it. Name a file, or a folder that holds UTF-8 text files.")
    files = _without_copies(files)
    train, held_out, held_out_is = _split(files)
    summary = (
        f"{where}: {len(files)} files; {len(train) / 1e6:.1f} MB to train on,"
        f" {len(held_out) / 1e6:.2f} MB held out ({held_out_is})"
    )
    return Text(_as_array(train), _as_array(held_out), summary)


def random_windows(data: np.ndarray, count: int, context: int, seed: Sequence[int]) -> np.ndarray:
    """Draws windows with random starts, determined by the seed: ``[count, context + 1]`` bytes."""
    last = _last_start(data, context)
    starts = np.random.default_rng(seed).integers(0, last, count, endpoint=True)
    return data[starts[:, None] + np.arange(context + 1)]


def fixed_windows(data: np.ndarray, count: int, context: int) -> np.ndarray:
    """Returns windows with evenly spaced starts, from the first to the last possible byte: ``[count, context + 1]``."""
    starts = np.linspace(0, _last_start(data, context), count).astype(np.int64)
    return data[starts[:, None] + np.arange(context + 1)]


def byte_frequency_loss(train: np.ndarray, held_out: np.ndarray) -> float:
    """Computes the cross-entropy, in nats per byte, of ``held_out`` under (add-one) byte frequencies of ``train``."""
    counts = np.bincount(train, minlength=256) + 1.0
    log_frequency = np.log(counts / counts.sum())
    return -float(np.bincount(held_out, minlength=256) @ log_frequency) / len(held_out)


def _standard_library() -> Iterator[tuple[str, bytes]]:
    folder = Path(sysconfig.get_path("stdlib"))
    return ((name, content) for name, content in _folder(folder) if name.endswith(".py"))


def _collect(paths: Sequence[str | Path]) -> Iterator[tuple[str, bytes]]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from ((f"{path.name}/{name}", content) for name, content in _folder(path))
        elif path.is_file():
            content = path.read_bytes()
            if not _is_text(content):
                raise ValueError(f"--data {path}: not UTF-8 text. Convert it, or name another file.")
            yield str(path), content
        else:
            raise ValueError(f"--data {path}: no such file or folder. Check the spelling; paths start at {Path.cwd()}.")


def _folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yields relative path and content of the text files below ``folder``, in sorted order."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if FOLDERS_LEFT_OUT.intersection(parts) or any(part.startswith(".") for part in parts) or not path.is_file():
            continue
        content = path.read_bytes()
        if _is_text(content):
            yield "/".join(parts), content


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return bool(content) and END_OF_FILE not in content


def _without_copies(files: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    first_name = {content: name for name, content in reversed(files)}
    return [(name, content) for content, name in reversed(first_name.items())]


def _split(files: Sequence[tuple[str, bytes]]) -> tuple[bytes, bytes, str]:
    """Returns training bytes, held-out bytes, and a description of the held-out bytes."""
    if len(files) < FEW_FILES:
        cuts = [round(len(content) * (1 - HELD_OUT_SHARE)) for _, content in files]
        train = _joined(content[:cut] for cut, (_, content) in zip(cuts, files, strict=True))
        held_out = _joined(content[cut:] for cut, (_, content) in zip(cuts, files, strict=True))
        return train, held_out, "the end of each file"
    by_hash = sorted(range(len(files)), key=lambda i: zlib.crc32(files[i][0].encode()))
    chosen = set(by_hash[: round(len(files) * HELD_OUT_SHARE)])
    train = _joined(content for i, (_, content) in enumerate(files) if i not in chosen)
    held_out = _joined(content for i, (_, content) in enumerate(files) if i in chosen)
    return train, held_out, f"{len(chosen)} whole files"


def _joined(contents: Iterable[bytes]) -> bytes:
    return b"".join(content + END_OF_FILE for content in contents)


def _as_array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, dtype=np.uint8)


def _last_start(data: np.ndarray, context: int) -> int:
    if len(data) <= context:
        raise ValueError(
            f"a window of context={context} needs {context + 1} bytes, and this text has {len(data)}."
            " Give more text with --data, or a smaller --context."
        )
    return len(data) - context - 1
