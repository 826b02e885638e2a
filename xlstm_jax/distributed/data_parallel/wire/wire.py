"""``Wire``: the format in which a gather sends a leaf's shards; ``WireFormat``: a format that users select by name.

  sent       Wire.send(shard)                          the shard was cast to the gather dtype before
  arrived    all-gather of the sent arrays along dim Wire.along(d), in a stage per axis
  used       W[d, f] = Wire.receive(arrived)           unpacked once, after the last stage

``communication`` has the gather, which uses only these methods. A new format is a subclass of ``WireFormat`` in a file
of its own, with a row in ``formats``. A feature computes wires from a module's state as an ``Extension`` of a unit.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import DType


class Wire(Protocol):
    """Format in which a gather sends a leaf's shards. A pytree: arrays of the format (a scale, say) are children.

    ``send`` must be a pure function of the shard: a gather may run again in the backward pass. ``rounds_again``: True
    if sending a received value a second time rounds the value again. A gather over some axes of a dim, one by one,
    would then round values twice, and raises.
    """

    rounds_again: ClassVar[bool]

    def send(self, shard: jax.Array) -> jax.Array:
        """Returns the array to send in place of ``shard``, such as 8-bit codes of its values.

        ``shard`` is this device's shard of a leaf, [..., d / N, ...] for a dim d that is split over N devices, already
        cast to the gather dtype.
        """
        ...

    def along(self, dim: int) -> int:
        """Returns the dim along which the gather concatenates the sent arrays, for a leaf that is split along ``dim``.

        The result may differ from ``dim`` if ``send`` reshapes the shard.
        """
        ...

    def receive(self, arrived: jax.Array) -> jax.Array:
        """Returns the gathered value [..., d, ...], in the gather dtype, from the sent arrays of N devices.

        ``arrived`` has the results of ``send``, concatenated in device order along the dim that ``along`` returns. The
        split dim has N times the size of a shard.
        """
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
    """Choice that users name in ``gather_dtype``: makes the ``Wire`` of each leaf. Gathered values have their dtype.

    Subclasses implement ``wire``, ``itemsize`` and ``nbytes``. A format that can also average gradients of copies
    sets ``averages = True`` and implements ``mean_of_terms`` and ``mean_error``.
    """

    averages: ClassVar[bool] = False

    def supports_dtype(self, dtype: DType) -> bool:
        """Returns whether shards of this dtype can be sent in the format. A leaf of another floating dtype is an error.

        Integers, bools and PRNG keys are sent unchanged. Here True for real floats only; a subclass may override the
        method.
        """
        return bool(jnp.issubdtype(dtype, jnp.floating))

    def wire(self, shape: tuple[int, ...], dtype: DType, dim: int) -> Wire:
        """Returns the ``Wire``, which packs and unpacks shards of this shape and dtype in a gather along ``dim``.

        Abstract.
        """
        raise NotImplementedError

    @property
    def itemsize(self) -> float:
        """Bytes sent per value, on average, in an array without padding. Abstract."""
        raise NotImplementedError

    def nbytes(self, shape: tuple[int, ...], dim: int) -> int:
        """Returns the number of bytes of one shard of this shape, as sent in a gather along ``dim``. Abstract."""
        raise NotImplementedError

    def mean_of_terms(self, term: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Returns the sum of the devices' float32 ``term`` over the mesh ``axes``, sent in this format. Abstract.

        Each device has divided its value by the number of devices, so the sum is a mean. The result is bitwise equal on
        these devices, and equal by type.
        """
        raise NotImplementedError

    def mean_error(self, terms: np.ndarray) -> np.ndarray:
        """Returns the largest error of a single rounding to this format, for each entry of ``terms``. Abstract.

        ``terms`` is a vector with the absolute values of a gradient's entries. The result may have another shape, such
        as [blocks, block size], and further entries for padding: the caller takes its L2 norm.
        """
        raise NotImplementedError


WIRE_FORMATS: dict[str, WireFormat] = {}  # by the names that users pass; filled by ``formats``
