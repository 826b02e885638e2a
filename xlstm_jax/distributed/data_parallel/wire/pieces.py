"""A split kernel read by pieces: each is gathered just before it is used, and its gradient scattered right after.

A kernel [d, V] on N devices is read along V, s of the entries that a device holds at a time:

  split along V   W[d, V_fsdp]  -- all-gather of s entries of each device  -->  [d, N s]
  split along d   W[d_fsdp, V]  -- all-gather of the same s entries of V   -->  [d, s]
  backward        the transpose: a reduce-scatter of each piece

Neither the whole kernel nor its whole gradient is ever there. The gradient is that of a gather (``gather_array``): the
mean over N, then over copies of the shard.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import DEFAULT_COMMUNICATION, Communication
from xlstm_jax.distributed.data_parallel.wire.gather_array import Primal, terms_to_scatter
from xlstm_jax.program_names import GATHER_SCOPE


@dataclass(frozen=True)
class Pieces:
    """How a matrix is read by pieces.

    Attributes:
      along: the dim that pieces are parts of.
      shape: of the whole matrix, without padding.
      held: the entries of this dim that a device holds, padding included.
      dim: the dim that is split.
      axes: over which it is split; () for a matrix that is whole: then nothing travels.
      how: dtypes and copies.
      trainable: whether it takes a gradient.
      path: of the leaf, for errors.
    """

    along: int
    shape: tuple[int, ...]
    held: int
    dim: int = 0
    axes: tuple[str, ...] = ()
    how: Communication = DEFAULT_COMMUNICATION
    trainable: bool = True
    path: str = ""

    @property
    def size(self) -> int:
        """The entries of this dim on all devices, without padding."""
        return self.shape[self.along]

    @property
    def copied_axes(self) -> tuple[str, ...]:
        """The axes along which there is more than one copy of a shard."""
        return collectives.spread_axes(self.how.copied_axes)

    @property
    def parts(self) -> int:
        """The number of devices that have entries of their own."""
        return collectives.axis_size(self.axes) if self.dim == self.along else 1

    def entries(self, start: jax.Array | int, size: int, at: jax.Array | None = None) -> jax.Array:
        """The entries of the dim that stand at the places ``at`` of a piece, or at all of its places; int32.

        The piece has ``size`` entries of each device, from ``start`` on of those that it holds.
        """
        at = jnp.arange(size * self.parts, dtype=jnp.int32) if at is None else at.astype(jnp.int32)
        return start + at if self.parts == 1 else at // size * self.held + start + at % size

    def gathered(self, sent: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
        """A piece, of what ``shard_as_sent`` has made of the shard."""
        own = lax.dynamic_slice_in_dim(sent, start, size, self.along)
        with jax.named_scope(GATHER_SCOPE):
            return collectives.all_gather(own, self.dim, self.axes)

    def scattered(self, gradient: jax.Array, primal: Primal) -> jax.Array:
        """The transpose of ``gathered``: this device's part of the mean, for ``gradient_of_shard``."""
        with jax.named_scope(GATHER_SCOPE):
            terms = terms_to_scatter(gradient, self.axes, self.how, primal)
            return collectives.reduce_scatter(terms, self.dim, self.axes)

    def without_padding(self, gradient: jax.Array) -> jax.Array:
        """The gradient of this device's shard, with zeros in the padding: there it is NaN where the loss is NaN."""
        if self.held * self.parts == self.size:
            return gradient
        first = collectives.axis_index(self.axes) * self.held
        own = first + lax.broadcasted_iota(jnp.int32, gradient.shape, self.along)
        return jnp.where(own < self.size, gradient, 0)
