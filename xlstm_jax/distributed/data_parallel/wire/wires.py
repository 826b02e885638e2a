"""Wires: how the shards of one leaf travel in a gather.

[Note: what travels]
  stored     W[d_fsdp, f]                              each device keeps its shard
  sent       Wire.send of the shard                    the shard was cast to the dtype of the gather before
  arrived    all-gather of what was sent, along the dim Wire.along(d), one stage for each axis
  used       W[d, f], Wire.receive of what arrived     unpacked once, behind the last stage
  gradient   dW[d, f], reduce-scattered as if ``send`` and ``receive`` changed no value

The gather and its backward rule (``gather_array``), the scan that gathers ahead (``prefetch``) and plans call these
methods and know no format. A format that users name by ``gather_dtype`` is a ``WireFormat`` in a file of its own, with
one row in ``formats``. A feature that computes a wire from a module's state is an ``Extension`` of a unit.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import DType


class Wire(Protocol):
    """The way of one leaf over the links. A pytree: arrays that it computes with, a scale say, are its children.

    ``rounds_again`` says whether a value that has arrived is rounded again when it is sent a second time.
    """

    rounds_again: ClassVar[bool]

    def send(self, shard: jax.Array) -> jax.Array:
        """Returns the array that a device sends in place of its shard ``[..., d / N, ...]``."""
        ...

    def along(self, dim: int) -> int:
        """Returns the dim along which sent arrays are put together, for shards that are along ``dim``."""
        ...

    def receive(self, arrived: jax.Array) -> jax.Array:
        """Returns the value ``[..., d, ...]``, from the arrays of N devices, put together in the order of devices."""
        ...


@jax.tree_util.register_static
@dataclass(frozen=True)
class AsItIs:
    """The wire of a shard that is sent unchanged."""

    rounds_again: ClassVar[bool] = False

    def send(self, shard: jax.Array) -> jax.Array:
        return shard

    def along(self, dim: int) -> int:
        return dim

    def receive(self, arrived: jax.Array) -> jax.Array:
        return arrived


class WireFormat:
    """A format for transport alone, which ``gather_dtype`` names: a gathered value has the dtype of its leaf.

    Subclasses write ``wire``, ``itemsize`` and ``nbytes``. A format in which gradients of copies can be averaged, and
    which ``Replicas(reduce_dtype=...)`` takes, also has ``averages = True``, ``mean_of_terms`` and ``mean_error``.
    """

    averages: ClassVar[bool] = False

    def takes(self, dtype: DType) -> bool:
        """Returns whether values of a dtype are sent in this format; others are sent as they are."""
        return bool(jnp.issubdtype(dtype, jnp.floating))

    def wire(self, shape: tuple[int, ...], dtype: DType, dim: int) -> Wire:
        """Returns the wire of shards of this shape and dtype, which are gathered along ``dim``."""
        raise NotImplementedError

    @property
    def itemsize(self) -> float:
        """Bytes that are sent for one value, on average, in an array without padding."""
        raise NotImplementedError

    def nbytes(self, shape: tuple[int, ...], dim: int) -> int:
        """Returns the bytes that a device sends for a shard of this shape, which is gathered along ``dim``."""
        raise NotImplementedError

    def mean_of_terms(self, term: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Returns the sum of float32 terms over the devices of ``axes``, equal on all of them bit by bit, and by type.

        The terms are those of a mean: each device has divided its value by the number of devices.
        """
        raise NotImplementedError

    def mean_error(self, terms: np.ndarray) -> np.ndarray:
        """Returns how far one rounding of each of these terms may lie from the term, at most."""
        raise NotImplementedError
