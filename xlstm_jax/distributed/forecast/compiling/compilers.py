"""The compilers for devices that need not be there: which packages each of them is, and whether these are installed.

tpu    libtpu
cuda   JAX's plugin for CUDA with its runtime, both of jaxlib's version, and ptxas and libdevice of NVIDIA's compiler.
       CUDA's own libraries, 2 GB of them, are needed to run a program, but not to compile one.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from xlstm_jax.wording import how_to_install

EXPORTER = "flatbuffers"  # what jax.export writes with
PLUGIN, PTXAS = "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"
OF_JAXLIB = (PLUGIN, "jax-cuda12-pjrt")  # released with jaxlib, under its version


def check_compiler(platform: str) -> list[str]:
    """The packages that a program compiled for a platform follows from, all of them installed.

    Args:
      platform: "tpu" or "cuda", as ``Topology.platform``.
    Raises:
      ImportError: one is not installed, or the plugin is of another version than jaxlib.
    """
    if platform == "tpu":
        _check_installed(platform, [name for name in ("libtpu", EXPORTER) if find_spec(name) is None])
        return ["jax", "jaxlib", "libtpu"]
    _check_installed(platform, [name for name in (*OF_JAXLIB, PTXAS, EXPORTER) if _version(name) is None])
    jaxlib = version("jaxlib")
    if others := [f"{name} {version(name)}" for name in OF_JAXLIB if version(name) != jaxlib]:
        wanted = " ".join(f"{name}=={jaxlib}" for name in OF_JAXLIB)
        raise ImportError(
            f"{' and '.join(others)} cannot compile with jaxlib {jaxlib}; their versions must be the same: "
            f"pip install {wanted}."
        )
    return ["jax", "jaxlib", PLUGIN, PTXAS]


def _check_installed(platform: str, missing: list[str]) -> None:
    device, extra = {"tpu": ("TPU", "forecast"), "cuda": ("GPU", "forecast-gpu")}[platform]
    if missing:
        raise ImportError(
            f"compiling for a {device} topology needs {' and '.join(missing)}, on a machine without {device}s too: "
            f"{how_to_install(extra)}."
        )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
