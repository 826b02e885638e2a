"""Lower limits of memory and communication of a sharded step, from formulas in the sizes of the model.

  P = blocks + embedding + head + small        parameters; small parameters stay replicated
  N devices, t tokens per device, share(N) = (N - 1) / N
  g, r                                         bytes per element of gathered parameters, of scattered gradients

  persistent bytes   (4 + 8) (P - small) / N + (4 + 8) small                               float32 parameters and Adam
  temporaries        2 L t d + max((blocks / L)(g + r) + 8 t d,  head (g + r) + 4 t V)     full remat
  sent per step      share(N) [g (2 blocks + embedding + head) + r (P - small) + 8 small]  blocks are gathered twice

Sent bytes are for the ring algorithm, which sends the least. Hybrid sharding (HSDP) splits over F devices with
R = N / F replicas; averaging the gradients of P / F parameters over replicas adds 2 share(R) r (P - small) / F.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BFLOAT16, FLOAT32 = 2, 4
ADAM_BYTES = 8  # two moments in float32
SMALL_BYTES = 2 * FLOAT32  # an all-reduce of float32 gradients sends each byte twice


@dataclass(frozen=True)
class Counts:
    """Parameter counts of a decoder-only Transformer, by part.

    Attributes:
      blocks, embedding, head: parameters split over devices; ``blocks`` is the sum over layers.
      small: replicated parameters, mainly norms.
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
    """Returns the fraction of an array that a device does not store if the array is split into ``parts``."""
    return (parts - 1) / parts


# --------------------------------------------------------------------------------------------------------------- memory


def persistent_bytes(
    counts: Counts, parts: int, *, replicas: int = 1, param_bytes: int = FLOAT32, optimizer_bytes: int = ADAM_BYTES
) -> float:
    """Computes the bytes per device between steps: shards of parameters and optimizer state.

    Args:
      parts: number of devices over which parameters are split.
      replicas: number of replicas over which the optimizer state is also split (ZeRO-1); 1 without ZeRO-1.
    """
    split = param_bytes / parts + optimizer_bytes / (parts * replicas)
    return split * counts.sharded + (param_bytes + optimizer_bytes) * counts.small


def temporary_bytes(
    counts: Counts, tokens: int, *, gather_bytes: int = BFLOAT16, scatter_bytes: int = BFLOAT16
) -> float:
    """Computes the least temporary bytes with full remat in bfloat16: layer inputs plus the larger of block and head.

    A block needs weights, gradients of the weights, and activations; the head needs weights, gradients of the weights,
    and logits of two bytes with their gradient.
    """
    wire = gather_bytes + scatter_bytes
    kept = 2 * counts.layers * tokens * counts.dim
    block = counts.blocks / counts.layers * wire + 8 * tokens * counts.dim
    head = (counts.head or counts.embedding) * wire + 4 * tokens * counts.vocab_size  # a tied head is the embedding
    return kept + max(block, head)


def kept_gathered_bytes(counts: Counts, *, gather_bytes: int = BFLOAT16) -> int:
    """Computes the extra bytes of a step that keeps the gathered weights of blocks for the backward pass."""
    return gather_bytes * counts.blocks


# -------------------------------------------------------------------------------------------------------------- traffic


@dataclass(frozen=True)
class Communication:
    """Bytes that each device sends in gathers, gradient scatters, reductions over replicas, and small all-reduces."""

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
    """Computes the least bytes that each device sends in a step.

    Args:
      parts: number of devices over which parameters are split.
      replicas: number of replicas of the shards (HSDP).
      reduce_bytes: bytes per element in the reduction over replicas.
      reshard_after_forward: whether blocks are gathered again in the backward pass.
    """
    gathered = (2 if reshard_after_forward else 1) * counts.blocks + counts.embedding + counts.head
    return Communication(
        gather=share(parts) * gather_bytes * gathered,
        scatter=share(parts) * scatter_bytes * counts.sharded,
        replicas=2 * share(replicas) * reduce_bytes * counts.sharded / parts,
        small=share(parts * replicas) * SMALL_BYTES * counts.small,
    )


def collective_counts(layers: int, *, axes: int = 1) -> dict[str, int]:
    """Computes the least number of collectives of a step, with one unit per layer and one stage per axis."""
    return {"all-gather": axes * (2 * layers + 2), "reduce-scatter": axes * (layers + 2), "all-reduce": 1}


def axis_bytes(payload: float, axis_sizes: Mapping[str, int]) -> dict[str, float]:
    """Computes the bytes that each device sends along each axis in a gather (or scatter) with one stage per axis.

    Args:
      payload: bytes of the unsharded array.
      axis_sizes: outermost first. The innermost axis is gathered first, when the gathered part is smallest.
    """
    sent, gathered = {}, payload
    for axis, size in axis_sizes.items():
        sent[axis] = share(size) * gathered
        gathered /= size
    return sent


def busiest_axis_bytes(payload: float, sizes: Sequence[int]) -> float:
    """Computes the bytes along the busiest axis if every array has the same axis order; the outermost axis."""
    return max(axis_bytes(payload, dict(enumerate(sizes))).values())


def crossing_bytes(counts: Counts, domains: int, inside: int, *, scatter_bytes: int = BFLOAT16) -> float:
    """Computes the bytes per device sent to other domains: a domain's traffic divided by its ``inside`` devices."""
    small = SMALL_BYTES * counts.small
    gathered = BFLOAT16 * (2 * counts.blocks + counts.embedding + counts.head)
    return share(domains) * (gathered + scatter_bytes * counts.sharded + small) / inside
