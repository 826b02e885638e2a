"""Devices simulated on the CPU, in one process or in several."""

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
PLUGINS_OF_FILES = {"xla_cuda12", "xla_cuda13"}  # plugins for accelerators that have such files
THREADS_PER_DEVICE = 4  # of XLA's CPU client: so many programs can be in flight


class Device(Protocol):
    """The attributes of a ``jax.Device`` that this library reads; JAX gives the class no types."""

    id: int
    process_index: int
    platform: str
    device_kind: str
    coords: Sequence[int]  # TPUs alone have it
    core_on_chip: int  # TPUs alone have it


def simulate_cpu_devices(num_devices: int = 8) -> None:
    """Makes JAX run on ``num_devices`` devices simulated on the CPU. Call it before anything asks JAX for a device.

    In a run of several processes each process gets ``num_devices``; call it before ``initialize_distributed``. The
    number prevails over ``--xla_force_host_platform_device_count`` in XLA_FLAGS, whose other flags keep their effect.

    It sets the environment variable NPROC unless it is set: XLA's CPU client reads the number of its threads only from
    there, when the devices start. Child processes inherit the variable.

    Raises:
      RuntimeError: JAX has already started its devices, in another number or on another platform.
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
        # JAX refuses the setting once devices have started, also if it is the number that they have.
        if jax.default_backend() == "cpu" and jax.local_device_count() == num_devices:
            return
        raise RuntimeError(
            f"simulate_cpu_devices({num_devices}) came too late: JAX already runs on {jax.local_device_count()} "
            f"{jax.default_backend()} device(s). Call it before the first use of jax.devices() or of an array."
        ) from error


def available_devices(simulated: int = 8) -> list[Device]:
    """The accelerators; if there are none, ``simulated`` CPU devices, or the devices with which JAX runs already.

    For programs that run on any device; a program that wants CPUs in any case calls ``simulate_cpu_devices``. On a
    machine that can have no accelerator ``jax_platforms`` becomes "cpu": libtpu and the plugin for CUDA may be there
    only to compile for devices elsewhere, and would look for a device and complain.

    >>> len(available_devices())
    8
    """
    # Only JAX can say which accelerators there are, and asking starts the devices, the CPU's too: so their number is
    # set first, needed or not.
    nproc = os.environ.get("NPROC")
    with contextlib.suppress(RuntimeError):  # JAX runs already
        _set_cpu_devices(simulated)
        if not jax.config.jax_platforms and _has_cpus_alone():
            jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()
    if nproc is None:
        os.environ.pop("NPROC", None)  # the client has read it
    return devices


def _has_cpus_alone() -> bool:
    """Whether there is no file of an accelerator, and no plugin for JAX that may reach one without a file."""
    files = any(glob.glob(pattern) for pattern in ACCELERATOR_FILES)
    return not (files or _plugins() - PLUGINS_OF_FILES)


def _plugins() -> set[str]:
    """JAX's plugins: modules of the package ``jax_plugins``, and entry points of the group of this name."""
    package = find_spec("jax_plugins")
    folders = package.submodule_search_locations if package else None
    modules = {module.name for module in pkgutil.iter_modules(folders)} if folders else set()
    return modules | {entry.name for entry in metadata.entry_points(group="jax_plugins")}


def _set_cpu_devices(count: int) -> None:
    """Sets the number of CPU devices, and gives XLA's CPU client threads enough to run several programs on each.

    A collective holds one thread for each device until all devices have come. By default the client has as many threads
    as devices (or cores, if there are more). Two programs in flight can then each get threads for some of their devices
    and wait for ever for the threads of the other; seen on JAX 0.10 in two of five runs of 400 steps.
    """
    jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(THREADS_PER_DEVICE * count))
