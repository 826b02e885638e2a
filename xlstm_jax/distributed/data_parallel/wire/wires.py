"""Wires: formats in which a gather sends the shards of a leaf.

[Note: path of a shard through a gather]
  stored     W[d_fsdp, f]                              each device keeps its shard
  sent       Wire.send(shard)                          the shard was cast to the gather dtype before
  arrived    all-gather of the sent arrays along dim Wire.along(d), in a stage per axis
  used       W[d, f] = Wire.receive(arrived)           unpacked once, after the last stage
  gradient   dW[d, f], reduce-scattered as if ``send`` and ``receive`` changed no value

Callers (the gather ``gather_array`` with its backward rule, the scan ``prefetch`` with gathers ahead, plans) use only
these methods and depend on no format. Formats that users select by ``gather_dtype`` are ``WireFormat``s in separate
files, with a row each in ``formats``. A feature computes wires from a module's state as an ``Extension`` of a unit.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import DType


class Wire(Protocol):
    """Format in which a gather sends a leaf's shards. A pytree: arrays of the format (a scale, say) are children.

    ``rounds_again``: True if sending a received value a second time rounds the value again.
    """

    rounds_again: ClassVar[bool]

    def send(self, shard: jax.Array) -> jax.Array:
        """Returns the array to send in place of the shard ``[..., d / N, ...]``."""
        ...

    def along(self, dim: int) -> int:
        """Returns the dim along which sent arrays are concatenated, for a leaf split along ``dim``."""
        ...

    def receive(self, arrived: jax.Array) -> jax.Array:
        """Returns the value ``[..., d, ...]`` from the sent arrays of N devices, concatenated in device order."""
        ...


@jax.tree_util.register_static
@dataclass(frozen=True)
class Unchanged:
    """Wire that sends shards unchanged."""

    rounds_again: ClassVar[bool] = False

    def send(self, shard: jax.Array) -> jax.Array:
        return shard

    def along(self, dim: int) -> int:
        return dim

    def receive(self, arrived: jax.Array) -> jax.Array:
        return arrived


class WireFormat:
    """Format for sending only, selected by ``gather_dtype``: a gathered value has the dtype of its leaf.

    Subclasses implement ``wire``, ``itemsize`` and ``nbytes``. A format that can also average gradients of copies
    sets ``averages = True`` and implements ``mean_of_terms`` and ``mean_error``.
    """

    averages: ClassVar[bool] = False

    def supports_dtype(self, dtype: DType) -> bool:
        """Returns whether values of this dtype are sent in the format; values of other dtypes are sent unchanged."""
        return bool(jnp.issubdtype(dtype, jnp.floating))

    def wire(self, shape: tuple[int, ...], dtype: DType, dim: int) -> Wire:
        """Returns the wire for shards of this shape and dtype, gathered along ``dim``."""
        raise NotImplementedError

    @property
    def itemsize(self) -> float:
        """Bytes sent per value, on average, in an array without padding."""
        raise NotImplementedError

    def nbytes(self, shape: tuple[int, ...], dim: int) -> int:
        """Returns the bytes that a device sends for a shard of this shape, gathered along ``dim``."""
        raise NotImplementedError

    def mean_of_terms(self, term: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Returns the sum of float32 terms over the devices of ``axes``: bitwise equal on these devices, also by type.

        Each device has divided its value by the number of devices, so the sum is a mean.
        """
        raise NotImplementedError

    def mean_error(self, terms: np.ndarray) -> np.ndarray:
        """Returns for each term the largest error of a single rounding."""
        raise NotImplementedError
