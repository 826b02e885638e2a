"""Next-token losses computed in vocabulary chunks, without ever holding the full logits.

    hidden[..., d], kernel[d, V], labels[...]  -- chunked_cross_entropy -->  TokenLosses of [...]

Logits of t tokens, [t, V], and their gradient are the largest arrays of a step. This module computes c entries of V at
a time:
  forward    logits[..., c] -> running maximum, running sum of exponentials, label logit, likeliest entry
  backward   logits[..., c] again -> softmax minus label -> d hidden, a float32 sum over chunks; d kernel[:, c], at once

Forward saves only the log-normalizer for backward: a scalar per token. Backward computes the logits again, because the
kernel gradient is a sum over tokens weighted by cotangents that only backward has: four products instead of three.
The kernel gradient of a chunk is a single product over the tokens, summed in float32 and rounded once. Chunks of
tokens instead would read and write a float32 array of the kernel's size for every chunk.

If the kernel is split over a mesh axis along V (vocabulary parallel), each device reads its local part in chunks. The
devices then communicate four numbers per token (log-normalizer, label logit, largest logit and its entry), no logits.

If the kernel is sharded (FSDP), each chunk can be gathered just before use and its gradient reduce-scattered right
after: no device ever holds the unsharded kernel or its gradient. Backward gathers every chunk a second time.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jax import Array, lax
from jax.typing import DTypeLike

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.extensions.pieces import ReadsShards, pieces_of
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import common_dtype, promoting
from xlstm_jax.distributed.data_parallel.wire.communication import PrimalType, gradient_of_shard, shard_as_sent
from xlstm_jax.distributed.data_parallel.wire.pieces import Pieces
from xlstm_jax.distributed.data_parallel.wire.wrong_gradients import (
    check_one_gradient_of_one_batch,
    differentiated_once,
)
from xlstm_jax.distributed.model_parallel.activations import axis_devices, enter_split, gather_tokens, leave_split
from xlstm_jax.distributed.model_parallel.dense import column_products, split_param

Arrays = tuple[Array, ...]
DEFAULT_CHUNK_SIZE = 4096


class TokenLosses(NamedTuple):
    """Loss, log-normalizer and correctness per token: arrays ``[...]``, zero or False where the label is negative.

    >>> chunked_cross_entropy(jnp.ones((2, 4)), jnp.zeros((4, 9)), jnp.array([0, 3])).correct  # all equally likely
    Array([ True, False], dtype=bool)

    Attributes:
      loss: cross-entropy in nats, float32 (float64 for float64 inputs).
      log_normalizer: logsumexp of the logits, same dtype. Differentiable: ``1e-4 * log_normalizer**2`` is a z-loss.
      correct: whether the label is the likeliest entry; among equally likely entries the first counts.
    """

    loss: Array
    log_normalizer: Array
    correct: Array


def chunked_cross_entropy(
    hidden: Array,
    kernel: Array | Sharded,
    labels: Array,
    *,
    vocab_dim: int = 1,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    vocab_axis: str | None = None,
    sequence_dim: int | None = None,
    dtype: DTypeLike | None = None,
) -> TokenLosses:
    """Computes the cross-entropy of ``softmax(hidden @ kernel)`` per token, ``chunk_size`` logits of a token at a time.

    Equals ``optax.softmax_cross_entropy_with_integer_labels`` on float32 logits, to rounding. Products take the wider
    of the input dtypes and accumulate in float32; gradients have the dtypes of ``hidden`` and ``kernel``. Neither
    second derivatives nor forward mode are supported.

    >>> hidden, kernel, labels = jnp.ones((2, 4)), jnp.zeros((4, 1000)), jnp.array([3, -100])
    >>> chunked_cross_entropy(hidden, kernel, labels, chunk_size=100).loss  # log(1000), and a token that does not count
    Array([6.9077554, 0.       ], dtype=float32)

    Args:
      hidden: [..., d]. Leading dims are not flattened, so that ``jit`` may split them.
      kernel: [d, V], unsharded, as inside a module wrapped by ``shard_module_params``. Or the local shard in its box,
        as in ``state.params`` inside ``shard_map``: each chunk is then gathered just before its products, and its
        gradient reduce-scattered right after. Where chunks cannot be gathered (block formats, under ``vmap``), the
        kernel is gathered at once.
      labels: integers [...]. A negative label (-100 by custom) marks a token to ignore: its loss is 0 and it adds no
        gradient; divide the sum of losses by the number of labels >= 0. A label >= V gives the loss NaN.
      vocab_dim: the vocabulary dim of the kernel; 0 for the [V, d] table of an ``nn.Embed``.
      chunk_size: entries of V per chunk; need not divide V. A chunk takes about six bytes per logit.
      vocab_axis: mesh axis over which the kernel is split along V: ``kernel`` is the local part. The remaining
        arguments are replicated over this axis.
      sequence_dim: with ``vocab_axis``, the token dim along which ``hidden`` is split over that axis; labels and result
        cover the full sequence.
      dtype: dtype of the products; None for the wider of the dtypes of ``hidden`` and ``kernel``.
    Returns:
      ``TokenLosses`` with arrays [...], an entry for each label.
    Raises:
      ValueError: shapes do not match, the chunk size is not positive, or ``vocab_axis`` is not bound.
      TypeError: the labels are not integers.
    """
    kernel = kernel if isinstance(kernel, Sharded) and not vocab_axis else jnp.asarray(kernel)
    if kernel.ndim != 2 or vocab_dim not in (0, 1):
        raise ValueError(
            f"kernel of shape {kernel.shape} with {vocab_dim=}: it must be [d, V] with vocab_dim=1, or [V, d], an "
            "embedding's table, with vocab_dim=0."
        )
    read = pieces_of(kernel, vocab_dim, hidden, labels) if isinstance(kernel, Sharded) else None
    read = read or _as_one_piece(jnp.asarray(kernel), vocab_dim)
    return _token_losses(hidden, *read, labels, chunk_size, vocab_axis, sequence_dim, dtype)


def _as_one_piece(kernel: Array, vocab_dim: int) -> tuple[Array, Pieces]:
    """Returns (``kernel``, layout), for an unsharded kernel; the layout, a ``Pieces``, describes how chunks are read.

    ``vocab_dim`` is the dim of the kernel that is cut into chunks. Nothing is sent, neither here nor at the reads.
    """
    return kernel, Pieces(vocab_dim, kernel.shape, kernel.shape[vocab_dim])


@promoting
def _token_losses(
    hidden: Array,
    stored: Array,
    pieces: Pieces,
    labels: Array,
    chunk_size: int,
    vocab_axis: str | None,
    sequence_dim: int | None,
    dtype: DTypeLike | None,
) -> TokenLosses:
    """Returns the ``TokenLosses`` of ``labels`` [...], arrays [...], for a kernel that is a local shard or unsharded.

    ``stored`` is the array of the kernel as this device stores it, and ``pieces`` the layout by which chunks are
    gathered from ``stored``. Further arguments are as in ``chunked_cross_entropy``, which calls this function.
    """
    hidden, labels = jnp.asarray(hidden), jnp.asarray(labels)
    dtype = common_dtype(hidden.dtype, pieces.communication.dtypes(stored)[0]) if dtype is None else jnp.dtype(dtype)
    parts = axis_devices(vocab_axis, "chunked_cross_entropy") if vocab_axis else 1
    hidden = _entered(hidden.astype(dtype), vocab_axis, sequence_dim)
    _check(hidden, pieces, labels, chunk_size)
    # A sharded kernel is cast piece by piece, after each gather.
    stored = stored if pieces.axes else stored.astype(dtype)
    # Cast to varying outside the custom rule: its cotangents then vary like its inputs, and JAX transposes the cast
    # into the sum over devices. A shard is cast over its replica axes inside the rule, where their mean is taken.
    axes = frozenset(pieces.axes).union(pieces.copied_axes, *map(collectives.varying_axes, (hidden, stored, labels)))
    labels, size = labels.astype(common_dtype(labels.dtype, jnp.int32)), pieces.size
    first = collectives.axis_index((vocab_axis,)) * size if vocab_axis and parts > 1 else None
    # A label of another device's part matches no local entry, so its logit reads as 0: the sum over devices has it
    # once.
    own_labels = labels if first is None else labels - first
    hidden, own_labels = collectives.to_varying((hidden, own_labels), sorted(axes))
    stored = collectives.to_varying(stored, sorted(axes.difference(pieces.copied_axes)))
    losses = _differentiable_read(hidden, stored, own_labels, pieces, max(1, int(chunk_size) // pieces.parts))
    if vocab_axis and first is not None:
        losses = _over_all_parts(losses, first, vocab_axis)
    log_normalizer, label_logit, likeliest, _ = losses
    counts = labels >= 0
    # A label >= V is a data error (its logit was read as 0): return NaN to make it visible.
    loss = jnp.where(labels < size * parts, log_normalizer - label_logit, jnp.nan)
    return TokenLosses(jnp.where(counts, loss, 0), jnp.where(counts, log_normalizer, 0), counts & (likeliest == labels))


def _entered(hidden: Array, vocab_axis: str | None, sequence_dim: int | None) -> Array:
    """Returns the hidden states of all tokens, ready for products with the vocabulary entries of this device.

    Without ``vocab_axis`` returns ``hidden``. With ``vocab_axis`` alone returns ``hidden``, too, which must be
    replicated over the axis; the backward pass sums its gradient over the axis. With ``sequence_dim``, the token dim
    that the axis splits, returns the tokens gathered over the axis.

    Raises:
      ValueError: ``sequence_dim`` is given without ``vocab_axis``.
    """
    caller = "chunked_cross_entropy"
    if vocab_axis is None:
        if sequence_dim is not None:
            raise ValueError(
                f"{caller}: {sequence_dim=} is the dim of tokens that vocab_axis= splits, which is not given."
            )
        return hidden
    if sequence_dim is None:
        return enter_split(hidden, vocab_axis, caller=caller)
    return gather_tokens(hidden, sequence_dim, vocab_axis, caller=caller)


def _over_all_parts(losses: Arrays, first: Array, axis: str) -> Arrays:
    """Combines the results of ``_read_logits`` of all devices along ``axis``, each for the device's vocabulary entries.

    ``losses`` and the result are tuples (log-normalizer, label logit, index of the largest logit, the largest logit).
    The result is for the full vocabulary and is equal on each device. ``first`` is the index of the device's first
    entry in the full vocabulary. Log-normalizer and label logit are differentiable: gradients reach the terms of each
    device.
    """
    log_normalizer, label_logit, likeliest, largest = losses
    most = [lax.stop_gradient(log_normalizer), lax.stop_gradient(largest)]
    # Relative to the largest, so that no exponential overflows. The reference is a constant: its gradient cancels.
    reference, highest = collectives.all_reduce(["max", "max"], most, (axis,))
    total = leave_split(jnp.exp(log_normalizer - reference), axis)
    # Only devices that hold the global maximum propose an entry; among equal logits the first entry wins, as in argmax.
    entries = jnp.where(largest == highest, likeliest + first, jnp.iinfo(likeliest.dtype).max)
    (likeliest,) = collectives.all_reduce(["min"], [entries], (axis,))
    return reference + jnp.log(total), leave_split(label_logit, axis), likeliest, highest


def _check(hidden: Array, pieces: Pieces, labels: Array, chunk_size: int) -> None:
    """Raises if ``hidden``, the kernel of layout ``pieces``, ``labels`` and ``chunk_size`` do not fit each other.

    Raises:
      ValueError: shapes do not match, or ``chunk_size`` is not a positive integer.
      TypeError: the labels are not integers.
    """
    dim = pieces.shape[1 - pieces.piece_dim]
    if hidden.shape[-1:] != (dim,):
        raise ValueError(
            f"hidden of shape {hidden.shape} does not fit kernel of shape {pieces.shape} with "
            f"vocab_dim={pieces.piece_dim}: its last dim must be {dim}. (For a table [V, d] pass vocab_dim=0.)"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels of shape {labels.shape} do not fit hidden of shape {hidden.shape}: one for each token, "
            f"{hidden.shape[:-1]}, is needed."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels are {labels.dtype.name}, and must be integers, the index of each in the vocabulary.")
    if not isinstance(chunk_size, int | np.integer) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r} is not a positive number of entries of the vocabulary.")


@promoting
def _read_logits(hidden: Array, kernel: Array, labels: Array, pieces: Pieces, chunk_size: int) -> Arrays:
    """Returns (logsumexp, label logit, index of the largest logit, the largest logit) of each token, as arrays [...].

    The logits are those of ``hidden`` [..., d] with the vocabulary entries of ``kernel``, and exist chunk by chunk
    only. The label logit is 0 if the label is not among the entries.

    Args:
      hidden: the hidden states.
      kernel: the kernel as this device stores it: the local shard, or unsharded.
      labels: integers [...].
      pieces: the layout by which chunks are gathered from ``kernel``.
      chunk_size: number of entries per chunk and device.
    """
    wide, sent = common_dtype(hidden.dtype, jnp.float32), shard_as_sent(kernel, pieces.communication)

    def read(carry: PyTree, chunk: Array, start: Any, size: int) -> PyTree:
        largest, total, label_logit, likeliest = carry
        logits = _logits(hidden, chunk.astype(hidden.dtype), pieces, start, size)
        highest = logits.max(axis=-1)
        new = jnp.maximum(largest, highest)
        # Rescale the running sum from the old maximum to the new one, so that nothing overflows.
        total = total * jnp.exp(largest - new) + jnp.exp(logits - new[..., None]).sum(axis=-1)
        label_logit += jnp.where(_is_label(labels, pieces, start, size), logits, 0).sum(axis=-1)
        entry = pieces.entries(start, size, jnp.argmax(logits, axis=-1))
        # Among equal logits the first entry wins. Where several devices hold parts, a later chunk may hold an earlier
        # entry.
        is_first = (highest > largest) | ((highest == largest) & (entry < likeliest))
        return new, total, label_logit, jnp.where(is_first, entry, likeliest)

    zeros = jnp.zeros_like(labels, wide)
    # Derived from the labels, so that under check_vma the carry varies over the axes of the tokens.
    carry = (zeros - jnp.inf, zeros, zeros, jnp.zeros_like(labels, jnp.int32))
    largest, total, label_logit, likeliest = _over_chunks(read, carry, sent, pieces, chunk_size)
    return largest + jnp.log(total), label_logit, likeliest, largest


@promoting
def _read_logits_fwd(hidden: Array, kernel: Array, labels: Array, pieces: Pieces, chunk_size: int) -> tuple[Any, Any]:
    out = _read_logits(hidden, kernel, labels, pieces, chunk_size)
    return out, (hidden, kernel, labels, out[0])


@promoting
def _read_logits_bwd(pieces: Pieces, chunk_size: int, residuals: Arrays, cotangents: Arrays) -> tuple[Array, Any, None]:
    """Backward rule of ``_read_logits``: returns the gradients of ``hidden`` and ``kernel``, and None for the labels.

    ``residuals`` are (hidden, kernel, labels, log-normalizer), and ``cotangents`` those of the four results. The logits
    are computed again, chunk by chunk. The gradient of the kernel has the shape and dtype of the stored kernel (a local
    shard, if sharded), and is None for a frozen kernel.
    """
    hidden, kernel, labels, log_normalizer = residuals
    d_normalizer, d_label_logit, *_ = cotangents
    primal, sent = PrimalType.of(kernel), shard_as_sent(kernel, pieces.communication)
    check_one_gradient_of_one_batch(pieces.path, primal, d_normalizer, pieces.axes)
    wide, tokens = log_normalizer.dtype, tuple(range(hidden.ndim - 1))

    def add(carry: PyTree, chunk: Array, start: Any, size: int) -> PyTree:
        (d_hidden, d_kernel), chunk = carry, chunk.astype(hidden.dtype)
        # Recompute the logits chunk by chunk: saving them would cost the memory that the loop saves.
        softmax = jnp.exp(_logits(hidden, chunk, pieces, start, size) - log_normalizer[..., None])
        # d log_normalizer / d logits is the softmax; d label_logit / d logits is 1 at the label.
        of_label = jnp.where(_is_label(labels, pieces, start, size), d_label_logit[..., None], 0)
        d_logits = (softmax * d_normalizer[..., None] + of_label).astype(hidden.dtype)
        d_hidden += _product(d_logits, chunk, (d_logits.ndim - 1,), (pieces.piece_dim,), wide)
        if not pieces.trainable:
            return d_hidden, d_kernel
        factors = (hidden, d_logits) if pieces.piece_dim else (d_logits, hidden)
        d_chunk = pieces.scatter_gradient(_product(*factors, tokens, tokens, wide), primal).astype(d_kernel.dtype)
        return d_hidden, lax.dynamic_update_slice_in_dim(d_kernel, d_chunk, start, pieces.piece_dim)

    summed = pieces.communication.dtypes(kernel)[1] if pieces.axes else kernel.dtype
    carry = (jnp.zeros_like(hidden, wide), jnp.zeros_like(sent, summed) if pieces.trainable else None)
    d_hidden, d_kernel = _over_chunks(add, carry, sent, pieces, chunk_size)
    if pieces.trainable:
        d_kernel = gradient_of_shard(pieces.without_padding(d_kernel), pieces.communication, primal)
        d_kernel = differentiated_once(d_kernel, pieces.axes)
    return d_hidden.astype(hidden.dtype), d_kernel, None


_differentiable_read = jax.custom_vjp(_read_logits, nondiff_argnums=(3, 4))
_differentiable_read.defvjp(_read_logits_fwd, _read_logits_bwd)


def _over_chunks(
    fn: Callable[[PyTree, Array, Any, int], PyTree], carry: PyTree, sent: Array, pieces: Pieces, chunk_size: int
) -> PyTree:
    """Runs ``carry = fn(carry, chunk, start, size)`` over the chunks of a kernel in order; returns the last carry.

    ``sent`` is the local shard of the kernel in the gather dtype, and ``pieces`` the layout by which each chunk is
    gathered before its call. A chunk has the vocabulary entries ``start`` to ``start + size`` of each device's part.
    ``size`` is ``chunk_size``, in the last chunk possibly less.
    """
    count, left = divmod(pieces.entries_per_device, chunk_size)
    starts, end = jnp.arange(count, dtype=jnp.int32) * chunk_size, count * chunk_size

    def gathered(start: Any, size: int = chunk_size) -> Array:
        return pieces.gather_piece(sent, start, size)

    def ahead(state: PyTree, start: Any) -> tuple[PyTree, None]:
        # XLA overlaps communication only within a loop iteration: gather the next chunk while this one computes.
        carry, chunk = state
        return (fn(carry, chunk, start, chunk_size), gathered(start + chunk_size)), None

    if pieces.axes and count:
        (carry, chunk), _ = lax.scan(ahead, (carry, gathered(0)), starts[:-1])
        carry = fn(carry, chunk, end - chunk_size, chunk_size)
    elif count:
        carry, _ = lax.scan(lambda carry, start: (fn(carry, gathered(start), start, chunk_size), None), carry, starts)
    return fn(carry, gathered(end, left), end, left) if left else carry


def _logits(hidden: Array, chunk: Array, pieces: Pieces, start: Any, size: int) -> Array:
    """Returns the logits [..., c] of hidden [..., d] with a kernel chunk of c vocabulary entries, in float32 or wider.

    ``start`` and ``size`` are the chunk's first entry and number of entries in each device's part of the kernel, whose
    layout is ``pieces``. Logits of padding entries are -inf.
    """
    wide = common_dtype(hidden.dtype, jnp.float32)
    logits = _product(hidden, chunk, (hidden.ndim - 1,), (1 - pieces.piece_dim,), wide)
    if pieces.entries_per_device * pieces.parts == pieces.size:
        return logits
    return jnp.where(pieces.entries(start, size) < pieces.size, logits, -jnp.inf)


def _is_label(labels: Array, pieces: Pieces, start: Any, size: int) -> Array:
    """Returns a bool mask [..., c], True where an entry of a chunk of c vocabulary entries is the token's label.

    ``labels`` are [...]. ``start`` and ``size`` are the chunk's first entry and number of entries in each device's part
    of the kernel, whose layout is ``pieces``.
    """
    return labels[..., None] == pieces.entries(start, size)


def _product(a: Array, b: Array, dims_a: tuple[int, ...], dims_b: tuple[int, ...], dtype: DTypeLike) -> Array:
    return lax.dot_general(a, b, ((dims_a, dims_b), ((), ())), preferred_element_type=dtype)


# ------------------------------------------------------------------------------------------------------------ the layer


class LMHead(nn.Module, ReadsShards):
    """Output layer ``nn.Dense(features, use_bias=False)`` that can also compute losses without materialising logits.

    The parameter ``kernel[d, features]`` has the name and the initial values of ``nn.Dense``, so checkpoints are
    interchangeable. ``shard_module_params(LMHead, "fsdp")`` gathers the kernel for either method.

    >>> head, hidden, labels = LMHead(1000), jnp.ones((2, 5, 8)), jnp.zeros((2, 5), int)
    >>> variables = head.init(jax.random.key(0), hidden)
    >>> head.apply(variables, hidden, labels, method="losses").loss.shape
    (2, 5)

    Attributes:
      features: V, the vocabulary size.
      dtype: dtype of the products; None to promote hidden and kernel. ``param_dtype``, ``kernel_init``: as in
        ``nn.Dense``.
      chunk_size, vocab_axis, sequence_dim: see ``chunked_cross_entropy``. ``vocab_axis`` splits the kernel.
      by_pieces: whether ``losses`` of a wrapped head gathers a sharded kernel chunk by chunk. No device then holds the
        unsharded kernel or its gradient; the price is a second gather in backward.
    """

    read_by: ClassVar[dict[str, tuple[str, ...]]] = {"losses": ("_losses", "_operands")}

    features: int
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    chunk_size: int = DEFAULT_CHUNK_SIZE
    vocab_axis: str | None = None
    sequence_dim: int | None = None
    by_pieces: bool = False

    def __call__(self, hidden: Array) -> Array:
        """Returns logits [..., V] in ``dtype`` for hidden [..., d], for sampling.

        With ``vocab_axis`` the logits are those of the local vocabulary entries.
        """
        hidden, kernel = self._operands(hidden)
        if self.vocab_axis:
            return column_products(hidden, [kernel], self.vocab_axis, sequence_dim=self.sequence_dim)[0]
        return lax.dot_general(hidden, kernel, (((hidden.ndim - 1,), (0,)), ((), ())))

    def losses(self, hidden: Array, labels: Array) -> TokenLosses:
        """Returns the ``TokenLosses`` of labels [...] for hidden [..., d], for training: ``chunked_cross_entropy``."""
        hidden, kernel = self._operands(hidden)
        return self._losses(hidden, *_as_one_piece(kernel, 1), labels)

    @nn.nowrap
    def pieces(self) -> dict[str, tuple[int, int]]:
        """Returns {"kernel": (1, chunk size)}: the plan thus knows that dim 1 of the kernel is gathered in chunks.

        A chunk (also "piece") has ``chunk_size`` entries of the vocabulary. Returns {} if the field ``by_pieces`` is
        False: the kernel is then gathered at once.
        """
        return {"kernel": (1, self.chunk_size)} if self.by_pieces else {}

    @nn.nowrap
    def from_shards(
        self, method: str, shards: dict[str, Sharded], hidden: Any = None, labels: Any = None
    ) -> TokenLosses | None:
        """Returns the ``TokenLosses`` of ``labels`` [...] for hidden [..., d], with the kernel gathered chunk by chunk.

        Returns None if the kernel must be gathered first: without ``by_pieces``, with ``vocab_axis``, without
        ``labels``, or if the shapes do not fit or the kernel cannot be read in chunks. ``shards`` are the parameters by
        name, as local shards in their boxes. ``method`` is ignored: only ``losses`` reads shards.
        """
        del method
        kernel = shards.get("kernel") if self.by_pieces and not self.vocab_axis else None
        # A kernel of an unexpected shape is gathered: Linen then raises its error.
        if kernel is None or labels is None or kernel.shape != (np.shape(hidden)[-1], self.features):
            return None
        read = pieces_of(kernel, 1, hidden, labels, path="/".join((*self.path, "kernel")))
        return self._losses(hidden, *read, labels) if read else None

    def _losses(self, hidden: Array, stored: Array, pieces: Pieces, labels: Array) -> TokenLosses:
        return _token_losses(
            hidden, stored, pieces, labels, self.chunk_size, self.vocab_axis, self.sequence_dim, self.dtype
        )

    @nn.compact
    def _operands(self, hidden: Array) -> tuple[Array, Array]:
        shape = (hidden.shape[-1], self.features)
        if self.vocab_axis:
            kernel = split_param(
                self, "kernel", self.kernel_init, shape, self.param_dtype, dim=1, axis_name=self.vocab_axis
            )
        else:
            kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        hidden, kernel = promote_dtype(hidden, kernel, dtype=self.dtype)
        return hidden, kernel
