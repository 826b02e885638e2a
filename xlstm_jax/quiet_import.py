"""Filter for stderr messages of JAX 0.10's CUDA plugin on machines without a GPU.

The extra ``forecast-gpu`` installs the plugin for compiling. On JAX 0.10 each library of the plugin writes "Could not
find cuda drivers" when loaded: three as ``jax`` is imported, one as JAX starts its devices. The messages come from
C++, before any option is read, so no variable turns them off. If this module loads the libraries first, with the
message filtered, they stay silent afterwards. A program that imports JAX before this package has already printed three
messages, and is spared the last.
"""

import contextlib
import ctypes
import glob
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files, version

NOISY_RELEASE = "0.10."  # JAX 0.12 is silent
PLUGIN, RUNTIME = "jax-cuda12-plugin", "jax-cuda12-pjrt"
GPU_FILES = ("/dev/nvidia*", "/dev/dxg")  # Linux, WSL
NOISE = (b"Could not find cuda drivers", b"All log messages before absl::InitializeLog()")
STDERR = 2


def load_cuda_plugin_quietly() -> None:
    """Loads the libraries of JAX's CUDA plugin if they would print messages, without these messages.

    Otherwise (no plugin, a silent release, or a GPU at hand) does nothing, and does not import JAX.
    """
    try:
        is_noisy = version(PLUGIN).startswith(NOISY_RELEASE)
    except PackageNotFoundError:
        return
    if not is_noisy or any(map(glob.glob, GPU_FILES)):
        return
    # OSError: the program has closed stderr.
    with contextlib.suppress(OSError, PackageNotFoundError), stderr_without(NOISE):
        import_module("jax")
        for path in files(RUNTIME) or ():
            if path.suffix == ".so":
                ctypes.CDLL(str(path.locate()))


@contextlib.contextmanager
def stderr_without(noise: Sequence[bytes]) -> Iterator[None]:
    """Buffers this process's stderr, including C++ output, and writes it at the end of the context, without some lines.

    A line that contains any of ``noise`` is dropped.
    """
    _flush()
    stderr = os.dup(STDERR)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), STDERR)
        try:
            yield
        finally:
            _flush()
            os.dup2(stderr, STDERR)
            os.close(stderr)
            captured.seek(0)
            for line in captured:
                if not any(part in line for part in noise):
                    os.write(STDERR, line)


def _flush() -> None:
    if sys.stderr is not None:  # None in a program started without stderr
        sys.stderr.flush()
