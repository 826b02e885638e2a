"""Compilation of a step for a topology: read from the cache, or run in a child process.

  Pending  --start-->            a cache entry, or a child process with a temporary folder
           --is_done, result-->  ``finish`` applied to the compiler's texts
           --close-->            the child is killed if still running, and the folder is removed

Only ``result`` waits, so several steps can compile at once (see ``side_by_side``). The module uses no threads, so an
interrupt ends every compilation.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar

from xlstm_jax.forecast.compiling import child as compile_child
from xlstm_jax.forecast.compiling.report_cache import ReportCache, Texts
from xlstm_jax.formatting import how_to_install, one_line

# Without these variables libtpu queries the cloud for its slice, and takes a lock. Any accelerator type works, since
# the topology overrides it. JAX's compilation cache is off: a program read from that cache would write no texts.
CHILD_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
FOR_ANOTHER_BACKEND = "XLA_FLAGS"  # libtpu ends the process at an unknown flag
OF_THE_COMPILER = ("JAX_", "LIBTPU_", "TPU_", "XLA_")  # prefixes of variables that may change the compiled program

# The compilers. TPU: libtpu. GPU: JAX's CUDA plugin and its runtime, both of jaxlib's version, and ptxas and libdevice
# of NVIDIA's compiler. The CUDA libraries (2 GB) are needed to run a program, not to compile it.
EXPORTER = "flatbuffers"  # jax.export serializes with this package
PLUGIN = "jax-cuda12-plugin"
OF_JAXLIB = (PLUGIN, "jax-cuda12-pjrt")  # released with jaxlib, under the same version
COMPILERS = {  # platform: (device, extra that installs the compiler, packages of the compiler)
    "tpu": ("TPU", "forecast", ("libtpu",)),
    "cuda": ("GPU", "forecast-gpu", (*OF_JAXLIB, "nvidia-cuda-nvcc-cu12")),
}

RESULT = "result.json"
# Beginnings of compiler errors for a program that does not fit. Each has other causes too (a kernel's scratch memory,
# an invalid program), so a forecast accepts the error as "too large" only if the program exceeds the chip's memory.
TOO_LARGE = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT: Invalid TPU program.")
POLL_S = 0.02
COMPILE_TIMEOUT_S = 1800.0

T = TypeVar("T")
U = TypeVar("U")


def check_compiler(platform: str) -> list[str]:
    """Checks that the compiler for a platform is installed; returns the packages that determine its output.

    Args:
      platform: "tpu" or "cuda", as ``Topology.platform``.
    Returns:
      "jax", "jaxlib" and the packages of the compiler, such as "libtpu", by their names on PyPI.
    Raises:
      ImportError: a package (or flatbuffers, for the export) is missing, or plugin and jaxlib differ in version.
    """
    device, extra, packages = COMPILERS[platform]
    if missing := [name for name in (*packages, EXPORTER) if installed_version(name) is None]:
        raise ImportError(
            f"compiling for a {device} topology needs {' and '.join(missing)}, on a machine without {device}s too: "
            f"{how_to_install(extra)}."
        )
    jaxlib = version("jaxlib")
    if others := [f"{name} {version(name)}" for name in packages if name in OF_JAXLIB and version(name) != jaxlib]:
        wanted = " ".join(f"{name}=={jaxlib}" for name in OF_JAXLIB)
        raise ImportError(
            f"{' and '.join(others)} cannot compile with jaxlib {jaxlib}; their versions must be the same: "
            f"pip install {wanted}."
        )
    return ["jax", "jaxlib", *packages]


def installed_version(name: str) -> str | None:
    """Returns the installed version of the package called ``name`` on PyPI; None if the package is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


class CompileError(RuntimeError):
    """The compiler refused the step, for another reason than memory. The message quotes the compiler, in one line.

    >>> str(CompileError("v5e:2x4: the compiler refused the step: unsupported operation"))
    'v5e:2x4: the compiler refused the step: unsupported operation'
    """


def compiler_message(where: str, error: object, options: Mapping[str, Any] | None) -> str:
    """Formats a compiler's message about a step in one line, with the compiler options that may have caused it.

    >>> compiler_message("v5e:8x8", "UNIMPLEMENTED: not supported", {"xla_tpu_option": True})
    "v5e:8x8, given {'xla_tpu_option': True}: UNIMPLEMENTED: not supported"
    """
    given = f", given {dict(options)}" if options else ""
    return f"{where}{given}: {one_line(error)}"


def may_be_too_large(error: str) -> bool:
    """Returns whether a compiler's error message may mean that the program is too large for the device's memory.

    Other problems, such as an invalid program, can cause the same messages.
    """
    return any(words in error for words in TOO_LARGE)


def child_environment() -> dict[str, str]:
    """Returns the environment variables of the child process that compiles: those of this process, with changes.

    ``XLA_FLAGS`` is left out. Variables that let libtpu work without a TPU, set the backend to CPU and turn off JAX's
    compilation cache are added.
    """
    return {name: value for name, value in os.environ.items() if name != FOR_ANOTHER_BACKEND} | CHILD_ENVIRONMENT


def _versions(packages: Sequence[str]) -> dict[str, str]:
    return {name: version(name) for name in packages}


@dataclass
class Pending(Generic[T]):
    """A compilation that is planned, running or done.

    The compiler's texts depend only on ``step``, ``settings`` and the compiler's binaries.

    Attributes:
      step: serialized StableHLO.
      settings: topology, mesh, options, donated arguments, and the compiler's packages.
      finish: converts the compiler's texts to the result; may raise a ``CompileError``.
      cache: cache to read first and to write after compiling; None: no cache.
      timeout_s: time limit of the child.
      seconds: time from the child's start to the call of ``result`` or, if later, the child's end; None before, and for
        a result from the cache.
    """

    step: bytes
    settings: Mapping[str, Any]
    finish: Callable[[Texts], T]
    cache: ReportCache | None = None
    timeout_s: float = COMPILE_TIMEOUT_S
    seconds: float | None = None
    _texts: Texts | None = None
    _started: float = 0.0
    _child: "subprocess.Popen[bytes] | None" = None
    _folder: "tempfile.TemporaryDirectory[str] | None" = field(default=None, repr=False)

    @functools.cached_property
    def key(self) -> str:
        """Digest (SHA-256, hex digits) of everything that determines the compiler's texts; the name of the cache entry.

        The digest is of the step, its settings, the compiler's environment variables, and the identity of the compiler.
        The identity is the versions of the packages, the text of the program that runs in the child process, and, if
        ``TPU_LIBRARY_PATH`` names a libtpu, the path, size and date of this file.
        """
        # TPU_LIBRARY_PATH may select another libtpu, which the version of the package does not describe.
        library = os.environ.get("TPU_LIBRARY_PATH")
        status = os.stat(library) if library and os.path.exists(library) else None
        rest = {
            "settings": self.settings,
            "environment": {k: v for k, v in child_environment().items() if k.startswith(OF_THE_COMPILER)},
            "versions": _versions(self.settings["packages"]),
            "library": (library, status.st_size, status.st_mtime_ns) if status else None,
            "child": Path(compile_child.__file__).read_text(),
        }
        digest = hashlib.sha256(self.step).digest()
        return hashlib.sha256(digest + json.dumps(rest, sort_keys=True).encode()).hexdigest()

    def then(self, more: Callable[[T], U]) -> "Pending[U]":
        """Returns a compilation of the same step, not yet started, whose result is ``more(result)``."""
        finish = self.finish
        return Pending(self.step, self.settings, lambda texts: more(finish(texts)), self.cache, self.timeout_s)

    def start(self) -> "Pending[T]":
        """Reads the compiler's texts from the cache; without an entry, starts a child process that compiles.

        Does not wait for the child. Returns ``self``.
        """
        self._started = time.monotonic()
        self._texts = self.cache.read(self.key) if self.cache else None
        if self._texts is None:
            self._folder = tempfile.TemporaryDirectory(prefix="xlstm_jax_forecast_")
            folder = Path(self._folder.name)
            (folder / "step.bin").write_bytes(self.step)
            (folder / "request.json").write_text(json.dumps(self.settings))
            # -P keeps the folder of the child's program, which holds library modules, off sys.path.
            command = [sys.executable, "-P", compile_child.__file__, str(folder)]
            with open(folder / "log", "wb") as log:
                # The child watches its stdin, and so ends when this process ends for any reason.
                self._child = subprocess.Popen(
                    command, env=child_environment(), stdin=subprocess.PIPE, stdout=log, stderr=log
                )
        return self

    def is_done(self) -> bool:
        """Returns whether ``result`` would return, or raise, without waiting; called after ``start``.

        True for a result from the cache, if the child has ended, and if the child is past its time limit.
        """
        # A child past its time limit counts as done; `result` then raises TimeoutError.
        is_late = time.monotonic() - self._started > self.timeout_s
        return is_late or self._child is None or self._child.poll() is not None

    def result(self) -> T:
        """Waits until the started compilation ends; returns ``finish(texts)``, the result made of the compiler's texts.

        If the compiler would repeat a new outcome, its texts are written to the cache. At the end, also after an error,
        a running child process is killed.

        Raises:
          CompileError: the compiler refused the step.
          TimeoutError: the compilation took longer than ``timeout_s``.
        """
        try:
            while not self.is_done():
                time.sleep(POLL_S)
            texts = self._texts if self._child is None else self._compiled(self._child)
            assert texts is not None, "start comes before result"
            made = self.finish(texts)
            if self._child is not None:
                self.seconds = time.monotonic() - self._started
                if self.cache is not None and _is_final(texts, self.settings["packages"]):
                    self.cache.write(self.key, texts)
            return made
        finally:
            self.close()

    def close(self) -> None:
        """Kills the child process that compiles if it still runs, and removes its temporary folder."""
        if self._child is not None:
            with self._child:  # closes the child's stdin, and waits
                self._child.kill()
        if self._folder is not None:
            self._folder.cleanup()

    def _compiled(self, child: "subprocess.Popen[bytes]") -> Texts:
        """Returns the texts, by name, that a child process has written; called when the child has ended or is too late.

        The names are "result.json" (the child's result), "hlo" (the scheduled program), "buffers" and "live_ranges".
        XLA's texts are left out if the compiler has not written them.

        Raises:
          TimeoutError: the child still runs.
          CompileError: the child ended without a result, for example by a crash; quotes the end of its log.
        """
        assert self._folder is not None
        folder = Path(self._folder.name)
        if child.poll() is None:
            raise TimeoutError(
                f"compiling for the topology took longer than timeout_s={self.timeout_s:.0f}. Scan the layers "
                "(nn.scan), which compiles one of them, or give it more time."
            )
        if not (folder / RESULT).exists():
            end = (folder / "log").read_text(errors="replace")[-2000:]
            raise CompileError(f"the compiler's process ended with exit code {child.returncode}:\n{end}")
        texts = {
            RESULT: (folder / RESULT).read_text(),
            # On TPUs the text after code generation has the compiler's cycles; a program that does not fit may not
            # reach this stage. GPUs have no such text.
            "hlo": _dumped(folder, "codegen") or _dumped(folder, "optimizations"),
            "buffers": _dumped(folder, "optimizations-buffer-assignment"),
            "live_ranges": _dumped(folder, "optimizations-live-range"),
        }
        return {name: text for name, text in texts.items() if text is not None}


def _dumped(folder: Path, name: str) -> str | None:
    paths = list((folder / "dump").glob(f"*[._]after_{name}.txt"))
    assert len(paths) <= 1, paths  # the child compiles one program
    return paths[0].read_text() if paths else None


def _is_final(texts: Texts, packages: Sequence[str]) -> bool:
    """Returns whether an outcome may be stored in the cache, because the compiler would repeat it.

    The step must have compiled, or be refused as too large. An outcome is not final if the child's versions of the
    packages differ from the installed versions, which the cache key holds: another version was installed while the
    child started.

    Args:
      texts: texts of the child, with its result.
      packages: names of the packages that determine the compiler's output.
    """
    result = json.loads(texts[RESULT])
    error = result["error"] if result["versions"] == _versions(packages) else "compiled by another version"
    return error is None or may_be_too_large(error)
