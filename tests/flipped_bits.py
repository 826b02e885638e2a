"""Single flipped bits in what a device computes, in chosen runs of a replayed step.

The callback of a fault gets its place in the mesh from the program, and knows by the run which device has this place.
A callback is as pure as the run: it may stand in a scan, under ``remat`` and in an expert, and be called any number of
times.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.support import fsdp
from xlstm_jax.distributed.training.replay.replayed_step import ReplayedStep, Run

SITES = ("activation", "weight", "cotangent", "gradient")
ONCE_FIRST, ONCE_SECOND, ALWAYS = "once in the first run", "once in the second run", "always"
RUNS = {ONCE_FIRST: (0,), ONCE_SECOND: (1,), ALWAYS: (0, 1, 2, 3)}  # of a replay and of its repetition


class Faults:
    """Decides on the host, in each run of each device, whether a bit is flipped, and which."""

    def __init__(self) -> None:
        self.devices: list[int] = []  # ids by place, of the run in progress
        self.none()

    def none(self) -> None:
        self.runs, self.run, self.device, self.fault = (), -1, 0, (0, 0, 0)

    def set(self, when: str, device: int, site: str, index: int, bit: int) -> None:
        self.runs, self.run, self.device, self.fault = RUNS[when], -1, device, (SITES.index(site), index, bit)

    def watch(self, step: ReplayedStep) -> None:
        """Makes the runs of a step count themselves."""
        step.runs[:] = [CountedRun(self, run) for run in step.runs]

    def of_place(self, place: Any) -> np.ndarray:
        places = np.ravel(place)
        hit = [self.run in self.runs and self.devices[int(one)] == self.device for one in places]
        found = np.array([[one, *self.fault] for one in hit], np.int32)
        return found.reshape(*np.shape(place), 1 + len(self.fault))

    def fault_here(self) -> jax.Array:
        """Returns the fault of this device as int32, for ``flipped`` [4]; none outside of ``shard_map``."""
        axes = jax.sharding.get_abstract_mesh().manual_axes
        if not axes:
            return jnp.zeros(1 + len(self.fault), jnp.int32)
        shape = jax.ShapeDtypeStruct((1 + len(self.fault),), jnp.int32)
        return jax.pure_callback(self.of_place, shape, jax.lax.axis_index(axes), vmap_method="expand_dims")

    def activation(self, x: jax.Array) -> jax.Array:
        """Returns ``x``, of which a bit may be flipped, as may be one of its cotangent."""
        return _of_activation(x, self.fault_here())

    def weight(self, w: jax.Array) -> jax.Array:
        """Returns ``w``, of which a bit may be flipped, as may be one of its gradient."""
        return _of_weight(w, self.fault_here())


class CountedRun:
    """A run of a replayed step that counts itself in the faults."""

    def __init__(self, faults: Faults, run: Run) -> None:
        self._faults, self._run = faults, run

    def __call__(self, *args: Any) -> Any:
        self._faults.run += 1
        self._faults.devices = [device.id for device in np.ravel(self._run.mesh.devices)]
        return jax.block_until_ready(self._run(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


def flipped(x: jax.Array, fault: jax.Array, site: str) -> jax.Array:
    """Returns the array with one bit flipped, if the fault is of this site."""
    active, at, index, bit = fault
    bits = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
    flat = jax.lax.bitcast_convert_type(x, bits).ravel()
    mask = jnp.where((active == 1) & (at == SITES.index(site)), jnp.uint32(1) << bit.astype(jnp.uint32), 0)
    flat = flat.at[index % flat.size].set(flat[index % flat.size] ^ mask.astype(bits))
    return jax.lax.bitcast_convert_type(flat.reshape(x.shape), x.dtype)


def make_site(forward: str, backward: str, corrupt: Callable[..., Any] = flipped) -> Any:
    """Returns the identity of (x, fault), with a fault in its value and a fault in its cotangent.

    ``corrupt(x, fault, site)`` returns ``x`` with the fault, if the fault is at that site.
    """

    @jax.custom_vjp
    def site(x, fault):
        return corrupt(x, fault, forward)

    def fwd(x, fault):
        return site(x, fault), fault

    def bwd(fault, cotangent):
        return corrupt(cotangent, fault, backward), np.zeros(fault.shape, jax.dtypes.float0)

    site.defvjp(fwd, bwd)
    return site


_of_activation, _of_weight = make_site("activation", "cotangent"), make_site("weight", "gradient")


class FaultyDense(nn.Module):
    """Dense layer with the tangent, whose gathered kernel and result may have a flipped bit."""

    width: int
    faults: Faults

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.width))
        bias = self.param("bias", nn.initializers.normal(0.5), (self.width,))
        return self.faults.activation(jnp.tanh(x @ self.faults.weight(kernel) + bias))


class FaultyModel(nn.Module):
    """Two sharded layers, of which the first has the faults."""

    faults: Faults

    @nn.compact
    def __call__(self, x):
        x = fsdp(FaultyDense, min_weight_size=64)(16, self.faults, name="first")(x)
        return fsdp(nn.Dense, min_weight_size=64)(8, name="second")(x)
