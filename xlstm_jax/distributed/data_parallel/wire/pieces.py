"""Reads a split kernel in pieces. Each piece is gathered just before use, and the gradient is scattered right after.

A kernel [d, V] on N devices is read along V, s of a device's entries at a time:

  split along V   W[d, V_fsdp]  -- all-gather of s entries of each device  -->  [d, N s]
  split along d   W[d_fsdp, V]  -- all-gather of the same s entries of V   -->  [d, s]
  backward        the transpose: a reduce-scatter of each piece

The unsharded kernel and the unsharded gradient never exist. The gradient is the same as in ``communication``:
the mean over N, then over copies of the shard.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import (
    DEFAULT_COMMUNICATION,
    Communication,
    PrimalType,
    terms_to_scatter,
)
from xlstm_jax.program_names import GATHER_SCOPE


@dataclass(frozen=True)
class Pieces:
    """Layout of a matrix that is read in pieces.

    Attributes:
      piece_dim: the dim that is cut into pieces.
      shape: shape of the unsharded matrix, without padding.
      entries_per_device: the number of entries of dim ``piece_dim`` per device, including padding.
      dim: the split dim.
      axes: the axes of ``dim``; () for a replicated matrix: nothing is sent.
      communication: dtypes and copies.
      trainable: whether the matrix takes a gradient.
      path: path of the leaf, for errors.
    """

    piece_dim: int
    shape: tuple[int, ...]
    entries_per_device: int
    dim: int = 0
    axes: tuple[str, ...] = ()
    communication: Communication = DEFAULT_COMMUNICATION
    trainable: bool = True
    path: str = ""

    @property
    def size(self) -> int:
        """Number of entries of dim ``piece_dim`` of the unsharded matrix, without padding."""
        return self.shape[self.piece_dim]

    @property
    def copied_axes(self) -> tuple[str, ...]:
        """Mesh axes of size 2 or more along which devices hold copies of a shard of the matrix."""
        return collectives.spread_axes(self.communication.copied_axes)

    @property
    def parts(self) -> int:
        """Number of devices over which the dim ``piece_dim`` is split; 1 if another dim is the split dim."""
        return collectives.axis_size(self.axes) if self.dim == self.piece_dim else 1

    def entries(self, start: jax.Array | int, size: int, places: jax.Array | None = None) -> jax.Array:
        """Returns the positions of a gathered piece's entries along dim ``piece_dim`` of the unsharded matrix.

        Positions are int32 and count padding. If ``piece_dim`` is split, the gathered piece has the entries ``start``
        to ``start + size`` of each device's part, device by device: ``start`` 1 and ``size`` 2 give [1, 2, 6, 7] for
        two devices with 5 entries each. Otherwise the piece has the entries ``start`` to ``start + size`` of the
        matrix. ``places`` are indices within the gathered piece, and the result has their shape; None: all entries, in
        order. A position of ``self.size`` or more is padding.
        """
        places = jnp.arange(size * self.parts, dtype=jnp.int32) if places is None else places.astype(jnp.int32)
        return start + places if self.parts == 1 else places // size * self.entries_per_device + start + places % size

    def gather_piece(self, sent: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
        """Returns a piece of the matrix, gathered over ``axes``, the same on each device, in the dtype of ``sent``.

        ``sent`` is this device's shard, already cast to the gather dtype. The piece has the entries ``start`` to
        ``start + size`` of dim ``piece_dim``; if this dim is split, these entries of each device's part, device by
        device.
        """
        local = lax.dynamic_slice_in_dim(sent, start, size, self.piece_dim)
        with jax.named_scope(GATHER_SCOPE):
            return collectives.all_gather(local, self.dim, self.axes)

    def scatter_gradient(self, gradient: jax.Array, primal: PrimalType) -> jax.Array:
        """Returns the part of a piece's gradient for this device's shard: a reduce-scatter, a mean over ``axes``.

        ``gradient`` is this device's local gradient of the gathered piece, and ``primal`` has the type of the shard.
        The result is in the dtype of the sums; the caller averages over copies of the shard, and casts.
        """
        with jax.named_scope(GATHER_SCOPE):
            terms = terms_to_scatter(gradient, self.axes, self.communication, primal)
            return collectives.reduce_scatter(terms, self.dim, self.axes, self.communication.options)

    def without_padding(self, gradient: jax.Array) -> jax.Array:
        """Returns ``gradient``, of this device's shard, with zeros for the padding entries of dim ``piece_dim``.

        The gradient of padding may be NaN. If the dim has no padding, ``gradient`` is returned unchanged.
        """
        if self.entries_per_device * self.parts == self.size:
            return gradient
        first = collectives.axis_index(self.axes) * self.entries_per_device
        indices = first + lax.broadcasted_iota(jnp.int32, gradient.shape, self.piece_dim)
        return jnp.where(indices < self.size, gradient, 0)
