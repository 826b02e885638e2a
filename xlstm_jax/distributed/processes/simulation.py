"""Devices that are simulated on the CPU, with or without other processes."""

import os

import jax

THREADS_PER_DEVICE = 4  # of XLA's CPU client, in simulation; as many programs can be in flight


def simulate_cpu_devices(num_devices: int = 8) -> None:
    """Makes JAX run on ``num_devices`` devices simulated on the CPU. Call it before anything asks JAX for a device.

    In a run of several processes this is the number of each; call it before ``initialize_distributed``. The number
    prevails over ``--xla_force_host_platform_device_count`` in XLA_FLAGS, whose other flags keep their effect.

    Raises:
      RuntimeError: JAX has already started its backend, with another number of devices or on another platform.
      ValueError: not a positive number.
    """
    if num_devices < 1:
        raise ValueError(f"simulate_cpu_devices({num_devices}): the number of devices is positive.")
    try:
        jax.config.update("jax_platforms", "cpu")
        _set_cpu_devices(num_devices)
    except RuntimeError as error:
        if jax.default_backend() == "cpu" and jax.local_device_count() == num_devices:
            return
        raise RuntimeError(
            f"simulate_cpu_devices({num_devices}) came too late: JAX already runs on {jax.local_device_count()} "
            f"{jax.default_backend()} device(s). Call it before the first use of jax.devices() or of an array."
        ) from error


def available_devices(simulated: int = 8) -> list[jax.Device]:
    """The accelerators; where there are none, ``simulated`` CPU devices, or those with which JAX runs already.

    For programs that take what there is; ``simulate_cpu_devices`` is for those that want CPUs in any case. Only JAX can
    say whether there is an accelerator, and asking starts the backend, so the number of CPU devices is set first.
    """
    try:
        _set_cpu_devices(simulated)
    except RuntimeError:
        pass  # It runs already.
    return jax.devices()


def _set_cpu_devices(count: int) -> None:
    """Sets the number of CPU devices, and gives XLA's CPU client threads enough to run several programs on each.

    A collective holds a thread per device until all have come. The client has as many threads as devices (or cores, if
    there are more), so programs that are in flight together, each waiting with some of its devices for threads that the
    others hold, wait for ever; seen on JAX 0.10 in two of five runs of 400 steps that were not waited for. The client
    takes the number of its threads from NPROC, where that is set.
    """
    jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(THREADS_PER_DEVICE * count))
