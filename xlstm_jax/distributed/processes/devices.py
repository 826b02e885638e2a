"""Simulated CPU devices, for a single process or several, and the choice of available devices."""

import contextlib
import glob
import os
import pkgutil
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Protocol

import jax

ACCELERATOR_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia*", "/dev/kfd", "/dev/dxg")  # TPU, NVIDIA, AMD, WSL
PLUGINS_OF_FILES = {"xla_cuda12", "xla_cuda13"}  # plugins whose accelerators have such files
THREADS_PER_DEVICE = 4  # threads of XLA's CPU client, which limit the number of programs in flight


class Device(Protocol):
    """Attributes of a ``jax.Device`` used in this library; JAX does not annotate the class."""

    id: int
    process_index: int
    platform: str
    device_kind: str
    coords: Sequence[int]  # on TPUs only
    core_on_chip: int  # on TPUs only


def simulate_cpu_devices(num_devices: int = 8) -> None:
    """Makes JAX run on ``num_devices`` devices simulated on the CPU. Call the function before any use of JAX devices.

    In a run of several processes each process gets ``num_devices``; call the function before
    ``initialize_distributed``. The number overrides ``--xla_force_host_platform_device_count`` in XLA_FLAGS; further
    flags in XLA_FLAGS keep their effect.

    Sets the environment variable NPROC unless it is set: XLA's CPU client reads its number of threads only from NPROC,
    when the devices start. Child processes inherit the variable.

    Raises:
      RuntimeError: JAX has already started its devices, with another number or on another platform.
      ValueError: the number is not positive.

    >>> simulate_cpu_devices(8)  # at the top of a program
    >>> jax.device_count()
    8
    """
    if num_devices < 1:
        raise ValueError(f"simulate_cpu_devices({num_devices}): the number of devices is positive.")
    try:
        jax.config.update("jax_platforms", "cpu")
        _set_cpu_devices(num_devices)
    except RuntimeError as error:
        # JAX rejects the setting once devices have started, even if their number is equal.
        if jax.default_backend() == "cpu" and jax.local_device_count() == num_devices:
            return
        raise RuntimeError(
            f"simulate_cpu_devices({num_devices}) came too late: JAX already runs on {jax.local_device_count()} "
            f"{jax.default_backend()} device(s). Call it before the first use of jax.devices() or of an array."
        ) from error


def available_devices(simulated: int = 8) -> list[Device]:
    """Returns the accelerators; on a machine without accelerators ``simulated`` CPU devices.

    If JAX has started its devices before this call, returns these devices (``jax.devices()``). For programs without a
    preferred platform; programs on CPU devices call ``simulate_cpu_devices``. On a machine without any accelerator
    ``jax_platforms`` becomes "cpu": libtpu and the CUDA plugin may be installed only to compile for other machines, and
    would search for a device and complain.

    >>> len(available_devices())
    8
    """
    # Only JAX can list the accelerators, and listing starts the devices, including the CPU's: so set the number of CPU
    # devices first, needed or not.
    nproc = os.environ.get("NPROC")
    with contextlib.suppress(RuntimeError):  # JAX runs already
        _set_cpu_devices(simulated)
        if not jax.config.jax_platforms and _has_only_cpus():
            jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()
    if nproc is None:
        os.environ.pop("NPROC", None)  # the client has read it
    return devices


def _has_only_cpus() -> bool:
    """Returns whether the machine has no device file of an accelerator, and no JAX plugin for devices without a file.

    Device files are files of TPUs and GPUs, in /dev. The CUDA plugins need a device file, and do not count.
    """
    files = any(glob.glob(pattern) for pattern in ACCELERATOR_FILES)
    return not (files or _plugins() - PLUGINS_OF_FILES)


def _plugins() -> set[str]:
    """Returns the names of JAX's installed plugins: modules of the package ``jax_plugins``, and entry points.

    Entry points of installed packages count if their group is "jax_plugins".
    """
    package = find_spec("jax_plugins")
    folders = package.submodule_search_locations if package else None
    modules = {module.name for module in pkgutil.iter_modules(folders)} if folders else set()
    return modules | {entry.name for entry in metadata.entry_points(group="jax_plugins")}


def _set_cpu_devices(count: int) -> None:
    """Sets the number of CPU devices to ``count``, and NPROC, unless set, to 4 threads of XLA's client per device.

    A collective occupies a thread per device until every device has arrived. By default the client has as many threads
    as devices (or as cores, if more). Two programs in flight can then each get some of the threads and wait forever for
    the remaining threads; observed on JAX 0.10 in two of five runs of 400 steps. Raises a ``RuntimeError`` if JAX has
    started its devices.
    """
    jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(THREADS_PER_DEVICE * count))
