"""What a sharded step must hold, move and take at least: formulas of the model's sizes alone, nothing compiled.

  P = blocks + embedding + head + small        parameters; the small ones stay whole on every device
  N devices, t tokens on each, share(N) = (N - 1) / N
  g, r                                         bytes per element of what is gathered, of gradients that are scattered

  persistent bytes   (4 + 8) (P - small) / N + (4 + 8) small                               float32 parameters and Adam
  temporaries        2 L t d + max((blocks / L)(g + r) + 8 t d,  head (g + r) + 4 t V)     all is computed again
  sent per step      share(N) [g (2 blocks + embedding + head) + r (P - small) + 8 small]  blocks are gathered twice

Sent bytes are those of the ring algorithm, which needs the fewest. Hybrid sharding (HSDP) splits over F devices and has
R = N / F copies, whose gradients of P / F parameters are averaged besides: 2 share(R) r (P - small) / F.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BFLOAT16, FLOAT32 = 2, 4
ADAM_BYTES = 8  # two moments in float32
SMALL_BYTES = 2 * FLOAT32  # an all-reduce of float32 gradients sends each byte twice


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of a decoder-only Transformer, by when they are needed.

    Attributes:
      blocks, embedding, head: those that are split over devices; blocks of all layers together.
      small: those that stay whole, norms above all.
      layers, dim, vocab_size: L, d, V.
    """

    blocks: int
    embedding: int
    head: int
    small: int
    layers: int
    dim: int
    vocab_size: int

    @property
    def sharded(self) -> int:
        return self.blocks + self.embedding + self.head

    @property
    def total(self) -> int:
        return self.sharded + self.small


def share(parts: int) -> float:
    """The part of an array that a device does not have, where it is split into ``parts``."""
    return (parts - 1) / parts


# --------------------------------------------------------------------------------------------------------------- memory


def persistent_bytes(
    counts: Counts, parts: int, *, replicas: int = 1, param_bytes: int = FLOAT32, optimizer_bytes: int = ADAM_BYTES
) -> float:
    """Bytes between steps on one device: its share of parameters and optimizer state.

    Args:
      parts: devices over which parameters are split.
      replicas: copies over which the optimizer's state is split besides (ZeRO-1); 1 where it is not.
    """
    split = param_bytes / parts + optimizer_bytes / (parts * replicas)
    return split * counts.sharded + (param_bytes + optimizer_bytes) * counts.small


def temporary_bytes(
    counts: Counts, tokens: int, *, gather_bytes: int = BFLOAT16, scatter_bytes: int = BFLOAT16
) -> float:
    """The least temporaries with full recomputation, in bfloat16: inputs of all layers, and what one part needs.

    That part is a block (its weights, their gradients, its activations) or the head (likewise; logits of two bytes and
    their gradient), whichever is larger.
    """
    wire = gather_bytes + scatter_bytes
    kept = 2 * counts.layers * tokens * counts.dim
    block = counts.blocks / counts.layers * wire + 8 * tokens * counts.dim
    head = (counts.head or counts.embedding) * wire + 4 * tokens * counts.vocab_size  # a tied one is the embedding
    return kept + max(block, head)


def kept_gathered_bytes(counts: Counts, *, gather_bytes: int = BFLOAT16) -> int:
    """What a step holds more where gathered weights of the blocks are kept for the backward pass."""
    return gather_bytes * counts.blocks


# -------------------------------------------------------------------------------------------------------------- traffic


@dataclass(frozen=True)
class Communication:
    """Bytes that each device sends: in gathers, in scatters of gradients, between copies, of what is small."""

    gather: float
    scatter: float
    replicas: float
    small: float

    @property
    def total(self) -> float:
        return self.gather + self.scatter + self.replicas + self.small


def wire_bytes(
    counts: Counts,
    parts: int,
    *,
    replicas: int = 1,
    gather_bytes: int = BFLOAT16,
    scatter_bytes: int = BFLOAT16,
    reduce_bytes: int = BFLOAT16,
    reshard_after_forward: bool = True,
) -> Communication:
    """The fewest bytes that each device sends in a step.

    Args:
      parts: devices over which parameters are split.
      replicas: copies of these parts (HSDP).
      reduce_bytes: of an element in the reduction between copies.
      reshard_after_forward: blocks are gathered again in the backward pass.
    """
    gathered = (2 if reshard_after_forward else 1) * counts.blocks + counts.embedding + counts.head
    return Communication(
        gather=share(parts) * gather_bytes * gathered,
        scatter=share(parts) * scatter_bytes * counts.sharded,
        replicas=2 * share(replicas) * reduce_bytes * counts.sharded / parts,
        small=share(parts * replicas) * SMALL_BYTES * counts.small,
    )


def collective_counts(layers: int, *, axes: int = 1) -> dict[str, int]:
    """The fewest collectives of a step, a layer being one unit: one stage for each of ``axes``."""
    return {"all-gather": axes * (2 * layers + 2), "reduce-scatter": axes * (layers + 2), "all-reduce": 1}


def axis_bytes(payload: float, axis_sizes: Mapping[str, int]) -> dict[str, float]:
    """What each device sends along each axis in a gather (or scatter) of one stage per axis.

    Args:
      payload: bytes of the whole array.
      axis_sizes: outermost first. The innermost is gathered first, when only a part of the array is there.
    """
    sent, whole = {}, payload
    for axis, size in axis_sizes.items():
        sent[axis] = share(size) * whole
        whole /= size
    return sent


def busiest_axis_bytes(payload: float, sizes: Sequence[int]) -> float:
    """Along the busiest axis where the order is the same for every array: that is the outermost."""
    return max(axis_bytes(payload, dict(enumerate(sizes))).values())


def crossing_bytes(counts: Counts, domains: int, inside: int, *, scatter_bytes: int = BFLOAT16) -> float:
    """Returns what each device sends to other domains: its part of what its domain's ``inside`` devices send."""
    small = SMALL_BYTES * counts.small
    gathered = BFLOAT16 * (2 * counts.blocks + counts.embedding + counts.head)
    return share(domains) * (gathered + scatter_bytes * counts.sharded + small) / inside
