"""Byte-level language models in Flax Linen: an xLSTM and a Transformer with a shared skeleton.

    bytes[b, t] -- embedding --> x[b, t, d] -- one block, scanned over layers -->  norm, head  -->  logits[b, t, 256]

The block is chosen by name. The layers are an ``nn.scan``, so a parameter of the block W[d, f] is stacked to
W[layers, d, f] and XLA compiles a single block. Sharding is set by the field ``wrap``: a function from a module class
to a module class, applied to the embedding, the block and the head. ``wrap=None`` is the same model without sharding,
with the same parameter names, shapes and initial values.

The mLSTM (xLSTM, arXiv 2405.04517, section 2.3) keeps a matrix memory per head. With q[d], k[d], v[e], an exponential
input gate exp(i) and a forget gate f = sigmoid(f~), a step is

    C_t = f_t C_{t-1} + exp(i_t) k_t v_t^T                 memory[d, e]
    n_t = f_t n_{t-1} + exp(i_t) k_t                       normaliser[d]
    h_t = C_t^T q_t / max(|n_t^T q_t|, 1)                  output[e]

``chunkwise_mlstm`` computes chunks of steps with matrix products and passes only (C, n) from one chunk to the next.

With ``decode=True`` a model reads one step at a time, and stores the state for later steps in the collection "cache":
keys and values, or the memory (C, n, stabiliser) and the last steps of the convolution.

Arrays of size sequence x sequence, or sequence x vocabulary, are never stored: attention is computed by blocks of
queries, losses (``LanguageModel.losses``) by chunks of the vocabulary, and both are recomputed in the backward pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from xlstm_jax.distributed import scan_layers
from xlstm_jax.distributed.data_parallel.wire.running_loss import OVERWRITTEN
from xlstm_jax.distributed.training.cross_entropy import LMHead, TokenLosses

VOCAB_SIZE = 256
CHUNK_SIZE = 64
QUERY_BLOCK_SIZE = 256
CONV_WIDTH = 4
ROTARY_BASE = 10_000.0

ModuleWrapper = Callable[[type[nn.Module]], type[nn.Module]]
RematPolicy = Callable[..., Any]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q[b, t, h, d]; k, v[b, t, kv, d] -> [b, t, h, d]


def chunkwise_mlstm(q, k, v, i_gate, log_f, *, chunk_size: int = CHUNK_SIZE):
    """Computes the outputs of the mLSTM recurrence chunk by chunk.

    Shapes: ``q, k [b, h, t, d]``, ``v [b, h, t, e]``, input gate before the exponential ``i_gate [b, h, t]`` and
    logarithm of the forget gate ``log_f [b, h, t]``; returns ``[b, h, t, e]`` in the dtype of v. ``q`` or ``k`` must
    include the factor 1/sqrt(d). Gates and states are in float32 or wider. ``t`` need not be a multiple of
    ``chunk_size``: the recurrence is causal, so padding at the end does not change earlier steps.
    """
    return mlstm_from(None, q, k, v, i_gate, log_f, chunk_size=chunk_size)[1]


def mlstm_from(state, q, k, v, i_gate, log_f, *, chunk_size: int = CHUNK_SIZE):
    """Computes ``chunkwise_mlstm`` from the state of earlier steps, None at the start; returns ``(state, out)``."""
    length, dtype = q.shape[2], v.dtype
    # The normaliser n is the memory of a constant 1: as an extra column of v it needs no separate operation.
    v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    wide = jnp.promote_types(dtype, jnp.float32)
    inputs = [_chunks(x.astype(wide), chunk_size) for x in (q, k, v, i_gate, log_f)]
    empty = _empty_state(*inputs)
    state = empty if state is None else jax.tree.map(jnp.add, state, empty)  # the sum varies like the inputs
    state, h = jax.lax.scan(_mlstm_chunk, state, tuple(inputs))
    return state, _joined(h, length).astype(dtype)


def _chunks(x, chunk_size: int):
    """Splits into chunks, padded with zeros: [b, h, t, ...] -> [chunks, b, h, chunk_size, ...]."""
    padding = [(0, 0)] * x.ndim
    padding[2] = (0, -x.shape[2] % chunk_size)
    x = jnp.pad(x, padding)
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, chunk_size, *x.shape[3:]), 2, 0)


def _empty_state(q, k, v, i_gate, log_f):
    """Returns the memory and stabiliser before the first step: zeros.

    Computed as a sum over zero steps, because inside ``shard_map`` the carry of a scan must vary over the same mesh
    axes as the terms added to the carry, and ``jnp.zeros`` does not vary.
    """
    memory = jnp.einsum("bhtd,bhte->bhde", k[0, :, :, :0], v[0, :, :, :0])
    return memory, jnp.sum(i_gate[0, :, :, :0] + log_f[0, :, :, :0], axis=-1)


def _mlstm_chunk(state, inputs):
    """Computes a chunk: every step reads the memory of earlier chunks and the preceding steps of the chunk.

    Exponents are relative to m (the stabiliser), the maximum of the exponents so far and 0, the logarithm of the 1 in
    max(|n^T q|, 1). So no exponential overflows, with open or closed gates. m cancels in the quotient, so its gradient
    is stopped.
    """
    memory, m = state
    q, k, v, i_gate, log_f = inputs
    decay = jnp.cumsum(log_f, axis=-1)  # log of the product of forget gates since the chunk began
    causal = jnp.tril(jnp.ones((q.shape[2], q.shape[2]), bool))
    log_weight = decay[..., :, None] - decay[..., None, :] + i_gate[..., None, :]
    log_weight = jnp.where(causal, log_weight, -jnp.inf)
    log_past = decay + m[..., None]
    m_step = jax.lax.stop_gradient(jnp.maximum(jnp.maximum(log_past, log_weight.max(-1)), 0))

    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) * jnp.exp(log_weight - m_step[..., None])
    past = jnp.einsum("bhtd,bhde->bhte", q, memory) * jnp.exp(log_past - m_step)[..., None]
    summed = past + jnp.einsum("bhts,bhse->bhte", scores, v)
    h = summed[..., :-1] / jnp.maximum(jnp.abs(summed[..., -1:]), jnp.exp(-m_step)[..., None])

    # The chunk is added to the memory with the weights of its last step.
    k_weighted = k * jnp.exp(log_weight[..., -1, :] - m_step[..., -1:])[..., None]
    carried = jnp.exp(log_past[..., -1] - m_step[..., -1])[..., None, None] * memory
    return (carried + jnp.einsum("bhsd,bhse->bhde", k_weighted, v), m_step[..., -1]), h


def causal_conv(x, taps):
    """Sums each feature of ``x[b, t, d]`` over the last ``len(taps)`` steps with weights ``taps[w, d]``.

    Uses shifted products instead of ``nn.Conv`` with one group per feature, because the gradient of ``nn.Conv`` on CPU
    costs more than the rest of the block.
    """
    length, width = x.shape[1], len(taps)
    x = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    return sum(x[:, i : i + length] * taps[i] for i in range(width))


def rotary(x, base: float = ROTARY_BASE, steps=None):
    """Applies rotary positions to ``x[..., t, d]``, d even.

    Pairs of features are rotated by angles proportional to the step. ``steps[t]`` are 0, 1, ... by default.
    """
    half = x.shape[-1] // 2
    steps = jnp.arange(x.shape[-2]) if steps is None else steps
    angle = steps[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def causal_attention(q, k, v, block_size: int = QUERY_BLOCK_SIZE):
    """Computes causal softmax attention; q, k, v and the result are ``[b, h, t, d]``.

    The softmax is in float32 or wider. Scores are computed for ``block_size`` queries at a time, [b, h, block_size, t],
    and recomputed in the backward pass; ``block_size`` need not divide t. (With a custom rule, because the policy of an
    enclosing ``remat`` overrides a ``jax.checkpoint``.)
    """
    return _attention_fwd(q, k, v, block_size)[0]


def _attention_fwd(q, k, v, block_size):
    def attend(_, block):
        start, q = block
        weights = _attention_weights(q, k, start).astype(v.dtype)
        return None, jnp.einsum("bhts,bhsd->bhtd", weights, v)

    _, out = jax.lax.scan(attend, None, _query_blocks(block_size, q))
    return _joined(out, q.shape[2]), (q, k, v)


def _attention_bwd(block_size, kept, d_out):
    q, k, v = kept
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = partial(jnp.einsum, preferred_element_type=wide)

    def add(carry, block):
        (d_k, d_v), (start, q, d_out) = carry, block
        weights = _attention_weights(q, k, start)
        d_weights = product("bhtd,bhsd->bhts", d_out, v)
        d_scores = weights * (d_weights - jnp.sum(weights * d_weights, axis=-1, keepdims=True))
        d_scores = (d_scores * q.shape[-1] ** -0.5).astype(q.dtype)
        d_v += product("bhts,bhtd->bhsd", weights.astype(v.dtype), d_out)
        d_k += product("bhts,bhtd->bhsd", d_scores, q)
        return (d_k, d_v), jnp.einsum("bhts,bhsd->bhtd", d_scores, k)

    carry = jnp.zeros_like(k, wide), jnp.zeros_like(v, wide)
    (d_k, d_v), d_q = jax.lax.scan(add, carry, _query_blocks(block_size, q, d_out))
    return _joined(d_q, q.shape[2]), d_k.astype(k.dtype), d_v.astype(v.dtype)


causal_attention.defvjp(_attention_fwd, _attention_bwd)


def _query_blocks(block_size: int, *arrays):
    """Returns the first step of each block, and the arrays [b, h, t, d] split into blocks, padded with zeros."""
    size = min(block_size, arrays[0].shape[2])
    blocks = [_chunks(x, size) for x in arrays]
    return jnp.arange(len(blocks[0])) * size, *blocks


def _joined(blocks, length: int):
    """Joins blocks and removes padding: [blocks, b, h, c, d] -> [b, h, length, d]."""
    blocks = jnp.moveaxis(blocks, 0, 2)
    return blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1])[:, :, :length]


def _attention_weights(q, k, start):
    """Computes causal attention weights: [b, h, c, d], [b, h, t, d] -> [b, h, c, t]; q starts at step ``start``."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
    causal = start + jnp.arange(q.shape[2])[:, None] >= jnp.arange(k.shape[2])
    return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)


def _split_heads(x, num_heads: int):
    """Splits the heads: [b, t, h * d] -> [b, h, t, d]."""
    return x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)


def _merge_heads(x):
    """Merges the heads: [b, h, t, d] -> [b, t, h * d]."""
    x = x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1)


def dtypes(dtype: Any) -> dict[str, Any]:
    """Returns the dtypes of a Linen module: ``dtype``, and ``param_dtype`` float32 (float64 for ``dtype`` float64)."""
    return {"dtype": dtype, "param_dtype": jnp.promote_types(dtype, jnp.float32)}


class Block(nn.Module):
    """Base class of the blocks: fields, and projections from and to the residual stream.

    A block returns ``(x, None)``, the (carry, output) pair of ``nn.scan``.
    """

    num_layers: int
    num_heads: int
    dropout: float = 0.0
    deterministic: bool = True
    dtype: Any = jnp.float32
    constrain: Callable[[jax.Array], jax.Array] | None = None
    decode: bool = False
    attention: Attention | None = None  # attention of the Transformer; None for ``causal_attention``
    product: Any = None  # the ``dot_general_cls`` of projections, for example Flax's fp8

    @property
    def dtypes(self):
        return dtypes(self.dtype)

    def norm(self, name: str, x):
        return nn.RMSNorm(**self.dtypes, name=name)(x)

    def project(self, name: str, features: int, x):
        return nn.Dense(features, use_bias=False, **self.dtypes, dot_general_cls=self.product, name=name)(x)

    def add(self, name: str, residual, x, dense: Callable[..., nn.Module] = nn.Dense):
        """Adds the projection of ``x`` to ``residual``; the initial scale decreases with the number of layers."""
        start = nn.initializers.variance_scaling(0.5 / self.num_layers, "fan_in", "truncated_normal")
        options = {**self.dtypes, "kernel_init": start, "dot_general_cls": self.product, "name": name}
        x = dense(residual.shape[-1], use_bias=False, **options)(x)
        x = residual + nn.Dropout(self.dropout, deterministic=self.deterministic)(x)
        return self.constrain(x) if self.constrain else x

    def cached(self, name: str, start: Callable[[], Any]):
        """Returns a cache variable, and whether it existed before: ``init`` creates it without a decoding step."""
        was_there = self.has_variable("cache", name)
        return self.variable("cache", name, start), was_there


def _forget_bias(key, shape, dtype=jnp.float32):
    """Initialises forget gates to sigmoid(2) ... sigmoid(6) over heads: memories of some 8 to 400 bytes."""
    del key
    return jnp.linspace(2.0, 6.0, shape[0], dtype=dtype)


class XLSTMBlock(Block):
    """mLSTM block of figure 11 of the paper: project up, convolve, mLSTM, norm per head, gate, project down."""

    @nn.compact
    def __call__(self, x):
        width, heads, stored = 2 * x.shape[-1], self.num_heads, self.dtypes["param_dtype"]
        u, gate = jnp.split(self.project("up", 2 * width, self.norm("norm", x)), 2, axis=-1)
        taps = self.param(
            "conv", nn.initializers.variance_scaling(1.0, "fan_in", "normal"), (CONV_WIDTH, width), stored
        )
        mixed = nn.silu(self.convolve(u, taps.astype(self.dtype)))
        q, k = jnp.split(self.project("query_key", width, mixed), 2, axis=-1)
        v = self.project("value", width, u)
        k = k * (k.shape[-1] // heads) ** -0.5
        q, k, v = (_split_heads(y, heads) for y in (q, k, v))
        h = self.recur(q, k, v, *self.gates(mixed))
        h = nn.RMSNorm(use_scale=False, **self.dtypes, name="head_norm")(h)
        scale = self.param("head_scale", nn.initializers.ones, (width,), stored)
        skip = self.param("skip", nn.initializers.ones, (width,), stored)
        h = _merge_heads(h) * scale + mixed * skip
        return self.add("down", x, (h * nn.silu(gate)).astype(self.dtype)), None

    def convolve(self, u, taps):
        """Computes ``causal_conv``; with ``decode`` it continues from the steps in the cache."""
        if not self.decode:
            return causal_conv(u, taps)
        last, goes_on = self.cached("conv", lambda: jnp.zeros_like(u[:, : CONV_WIDTH - 1]))
        window = jnp.concatenate([last.value, u], axis=1)
        if goes_on:
            last.value = window[:, 1 - CONV_WIDTH :]
        return causal_conv(window, taps)[:, -u.shape[1] :]

    def recur(self, q, k, v, i_gate, log_f):
        """Computes ``chunkwise_mlstm``; with ``decode`` it continues from the memory in the cache."""
        if not self.decode:
            return chunkwise_mlstm(q, k, v, i_gate, log_f, chunk_size=CHUNK_SIZE)
        step = partial(mlstm_from, chunk_size=1)
        after, _ = jax.eval_shape(partial(step, None), q, k, v, i_gate, log_f)
        memory, goes_on = self.cached("memory", lambda: jax.tree.map(jnp.zeros_like, after))
        if not goes_on:
            return v
        memory.value, h = step(memory.value, q, k, v, i_gate, log_f)
        return h

    def gates(self, x):
        """Returns the input gate before the exponential and the log of the forget gate, [b, h, t], at least float32."""
        wide = dtypes(jnp.promote_types(x.dtype, jnp.float32))
        gate = partial(nn.Dense, self.num_heads, kernel_init=nn.initializers.zeros, **wide)
        i_gate = gate(name="input_gate")(x)
        f_gate = gate(name="forget_gate", bias_init=_forget_bias)(x)
        return i_gate.swapaxes(1, 2), nn.log_sigmoid(f_gate).swapaxes(1, 2)


class TransformerBlock(Block):
    """Pre-norm attention with rotary positions, then a gated MLP."""

    @nn.compact
    def __call__(self, x):
        q, k, v = self.project_to_heads("query_key_value", self.norm("attention_norm", x))
        x = self.add_heads("attention_out", x, self.attend(q, k, v))
        gate, y = jnp.split(self.project("up", 6 * x.shape[-1], self.norm("mlp_norm", x)), 2, axis=-1)
        return self.add("down", x, nn.silu(gate) * y), None

    def attend(self, q, k, v):
        """Computes attention with rotary positions; with ``decode`` over the steps in the cache and the new step."""
        if not self.decode:
            q, k = rotary(q), rotary(k)
            if self.attention is None:
                return causal_attention(q, k, v)
            return self.attention(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)
        seen, goes_on = self.cached("seen", lambda: (jnp.zeros_like(k), jnp.zeros_like(v), jnp.int32(0)))
        if not goes_on:
            return v
        keys, values, step = seen.value
        q, k = (rotary(x, steps=step[None]) for x in (q, k))
        keys, values = (jax.lax.dynamic_update_slice_in_dim(*xs, step, 2) for xs in ((keys, k), (values, v)))
        seen.value = keys, values, step + 1
        return jnp.einsum("bhts,bhsd->bhtd", _attention_weights(q, keys, step).astype(v.dtype), values)

    def project_to_heads(self, name: str, x):
        """Projects to three arrays ``[b, h, t, d]`` with a single matrix."""
        return (_split_heads(y, self.num_heads) for y in jnp.split(self.project(name, 3 * x.shape[-1], x), 3, axis=-1))

    def add_heads(self, name: str, residual, x):
        """Adds the projection of ``x[b, h, t, d]`` to ``residual``."""
        return self.add(name, residual, _merge_heads(x))


class TransformerHeadsBlock(TransformerBlock):
    """``TransformerBlock`` with heads as kernel dims, ``[f, 3, h, d]`` and ``[h, d, f]``, as in Flax's attention."""

    def project_to_heads(self, name: str, x):
        heads = 3, self.num_heads, x.shape[-1] // self.num_heads
        dense = nn.DenseGeneral(heads, use_bias=False, **self.dtypes, dot_general_cls=self.product, name=name)
        return jnp.einsum("btnhd->nbhtd", dense(x))

    def add_heads(self, name: str, residual, x):
        return self.add(name, residual, x.swapaxes(1, 2), partial(nn.DenseGeneral, axis=(-2, -1)))


BLOCKS: dict[str, type[Block]] = {
    "xlstm": XLSTMBlock,
    "transformer": TransformerBlock,
    "transformer_heads": TransformerHeadsBlock,
}


class LanguageModel(nn.Module):
    """Language model: next-token logits for ``tokens[b, t]``, float32 ``[b, t, vocab_size]``; by default for bytes.

    For training, ``losses`` returns the losses of labels without storing the logits.

    ``block`` is a key of ``BLOCKS``; ``dim`` must be a multiple of ``2 * num_heads``. ``wrap`` is applied to the
    classes of the embedding, the block and the head. With ``remat=True`` the activations of a block, including gathered
    weights, are recomputed in the backward pass; a policy of ``nn.remat`` recomputes the values that it does not save.
    ``constrain`` is applied to the residual stream, to set its sharding under ``jit`` without ``shard_map``.
    ``train=True`` needs a "dropout" key if ``dropout`` is above 0. With ``decode=True`` the model takes ``tokens[b,
    1]`` per call, and a cache from ``init`` on ``tokens[b, t]`` for t tokens. With ``prefetch=True`` the layers are
    ``scan_layers``, which recomputes each layer. ``attention`` replaces ``causal_attention`` in the Transformer;
    ``product`` is the ``dot_general_cls`` of the projections in blocks. ``by_pieces`` is an option of the head.
    """

    block: str
    dim: int
    num_layers: int
    num_heads: int
    dropout: float = 0.0
    remat: bool | RematPolicy = False
    wrap: ModuleWrapper | None = None
    dtype: Any = jnp.float32
    vocab_size: int = VOCAB_SIZE
    constrain: Callable[[jax.Array], jax.Array] | None = None
    decode: bool = False
    prefetch: bool = False
    attention: Attention | None = None
    product: Any = None
    by_pieces: bool = False

    def __call__(self, tokens, *, train: bool = False):
        x, head = self._hidden_and_head(tokens, train)
        return head(x).astype(jnp.promote_types(self.dtype, jnp.float32))

    def losses(self, tokens, labels, *, train: bool = False) -> TokenLosses:
        """Returns the losses of ``labels[b, t]``, the tokens that follow ``tokens[b, t]``."""
        x, head = self._hidden_and_head(tokens, train)
        return head.losses(x, labels)

    @nn.compact
    def _hidden_and_head(self, tokens, train: bool):
        wrap = self.wrap or (lambda module: module)
        x = wrap(nn.Embed)(self.vocab_size, self.dim, **dtypes(self.dtype), name="embed")(tokens)
        x = self.constrain(x) if self.constrain else x
        x, _ = self.blocks(wrap, deterministic=not train)(x)
        x = nn.RMSNorm(**dtypes(self.dtype), name="final_norm")(x)
        start = nn.initializers.normal(0.1 * self.dim**-0.5)  # near the uniform guess, ln(vocab_size) nats
        options = {"kernel_init": start, "by_pieces": self.by_pieces, "name": "head"}
        return x, wrap(LMHead)(self.vocab_size, **dtypes(self.dtype), **options)

    def blocks(self, wrap: ModuleWrapper, deterministic: bool) -> nn.Module:
        """Returns the stacked layers as a module; the parameters of layer l are index l of every leaf."""
        block = wrap(BLOCKS[self.block])
        options = self.dropout, deterministic, self.dtype, self.constrain, self.decode, self.attention, self.product
        if self.prefetch and not self.decode:
            return scan_layers(block, self.num_layers)(self.num_layers, self.num_heads, *options, name="blocks")
        if self.remat:
            policy = None if self.remat is True else self.remat
            # In a scan XLA cannot merge recomputation across iterations, so CSE need not be prevented.
            block = nn.remat(block, prevent_cse=False, policy=policy)
        layers = nn.scan(
            block,
            variable_axes={"params": 0, "cache": 0, OVERWRITTEN: 0},
            split_rngs={"params": True, "dropout": True},
            length=self.num_layers,
        )
        return layers(self.num_layers, self.num_heads, *options, name="blocks")
