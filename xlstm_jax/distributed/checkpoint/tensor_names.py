"""Mapping between the leaves of a tree and the tensors of a file with different names and layouts (Hugging Face).

A name map has regular expressions for leaf paths as keys, and tensor names (and layouts) as values:

    {"embed/embedding": "model.embed_tokens.weight",
     r"layer_(\\d+)/(q|k|v)/kernel": Stored(r"model.layers.\\1.self_attn.\\2_proj.weight", "d h w -> (h w) d"),
     r"blocks/(up|down)/kernel": Stored(r"model.layers.{layer}.mlp.\\1_proj.weight", "i o -> o i")}

The first pattern that matches the full path is used. Groups of the pattern are inserted into the name (``\\1``), with
dots for slashes. A name with ``{layer}`` denotes several tensors, one per layer of a scan; the layers are the first dim
of the leaf. The second argument of ``Stored`` maps the dims of the leaf (without layers) to the dims of the tensor, in
the notation of einops; without it the dims are equal.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from xlstm_jax.formatting import listed

LAYER = "{layer}"


@dataclass(frozen=True)
class Stored:
    """Name and layout of the tensor of a leaf in a file.

    Attributes:
      name: the tensor name; may contain groups of the pattern and ``{layer}``, see the module docstring.
      dims: the dims of the leaf and of the tensor, as ``"d h w -> (h w) d"``; or a tuple of such strings, for leaves of
        different ranks. A leaf whose rank has no string in the tuple keeps its dims.

    >>> Stored("head.weight", "i o -> o i")
    Stored(name='head.weight', dims='i o -> o i')
    """

    name: str
    dims: str | tuple[str, ...] = ()


NameMap = Mapping[str, "str | Stored"]

# Models of Hugging Face's transformers (Llama, Mistral, Gemma, GPT-2, BERT, ViT, ...), from Flax parameters to PyTorch
# tensors. Output features are the last dim of a kernel and the first dim of a weight; the window dims of a convolution
# are first in a kernel and last in a weight.
TRANSFORMERS: NameMap = {
    r"(.+)/kernel": Stored(r"\1.weight", ("i o -> o i", "x i o -> o i x", "y x i o -> o i y x")),
    r"(.+)/(?:scale|embedding)": r"\1.weight",
    r"(.+)": r"\1",
}


class StoredAt(NamedTuple):
    """Names of a leaf's tensors in a file (one, or one per layer if ``in_layers``), and the conversion of dims."""

    tensors: tuple[str, ...]
    in_layers: bool
    shape: tuple[int, ...]  # shape of each tensor
    to_tensor: Callable[[Any], Any]  # leaf, or one layer of the leaf, to tensor
    to_leaf: Callable[[Any], Any]  # inverse of to_tensor; both return views if the tensor is contiguous


def stored_at(path: str, shape: tuple[int, ...], names: NameMap | None) -> StoredAt:
    """Returns the tensors of a leaf in a file: their names, their shape, and functions that convert between the dims.

    ``path`` and ``shape`` are the path and the global shape of the leaf. The first pattern of ``names`` that matches
    the full path gives names and dims; a name with ``{layer}`` stands for a tensor per index of the leaf's first dim.
    Without a name map (None) the leaf is a single tensor with the path as its name and the same dims.

    Raises:
      ValueError: no pattern matches the full path, a name has an unknown group or ``{layer}`` for a scalar, or the dims
        do not fit the rank of the leaf; names the leaf.
    """
    if names is None:
        return StoredAt((path,), False, shape, _same, _same)
    matched, stored = next(
        ((match, stored) for pattern, stored in names.items() if (match := compiled("names", pattern).fullmatch(path))),
        (None, ""),
    )
    if matched is None:
        raise ValueError(f"no pattern of names is all of the path '{path}'; it has {listed(sorted(names))}.")
    stored = stored if isinstance(stored, Stored) else Stored(stored)
    groups = [(group or "").replace("/", ".") for group in matched.groups()]
    wrong = [digit for digit in re.findall(r"\\(.)", stored.name) if digit not in map(str, range(1, len(groups) + 1))]
    if wrong or (LAYER in stored.name and not shape):
        raise ValueError(
            f"the name {stored.name!r} does not fit '{path}' of shape {shape}: its pattern has {len(groups)} groups, "
            f"\\1 the first, and {LAYER} stands for the first dim of a leaf."
        )
    # Not `matched.expand(name)`: groups have dots for slashes, and an unmatched group is "".
    name = re.sub(r"\\(\d)", lambda digit: groups[int(digit[1]) - 1], stored.name)
    in_layers = LAYER in name
    tensors = tuple(name.replace(LAYER, str(layer)) for layer in range(shape[0])) if in_layers else (name,)
    return StoredAt(tensors, in_layers, *_layout(path, shape[in_layers:], stored.dims))


def compiled(option: str, pattern: str) -> re.Pattern[str]:
    """Returns the compiled regular expression ``pattern``, which a user has passed as the argument ``option``.

    Raises:
      ValueError: the pattern is not a regular expression; names the argument.
      TypeError: the pattern is not a text; names the argument.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{option}: {pattern!r} is no regular expression ({error}). Write \\ before a bracket or another special "
            "character that is meant literally."
        ) from None
    except TypeError:
        raise TypeError(f"{option}: {pattern!r} is a {type(pattern).__name__}; a pattern is a text.") from None


def _same(array: Any) -> Any:
    return array


def _layout(path: str, shape: tuple[int, ...], dims: str | tuple[str, ...]) -> tuple[Any, Any, Any]:
    """Returns the shape of the tensor for a leaf, a function from leaf to tensor, and the inverse function.

    For a leaf [2, 3, 4] and ``dims`` "d h w -> (h w) d" the shape is (12, 2), and the functions transpose and reshape
    arrays. If ``dims`` is a tuple without a string for the rank of the leaf, or is (), the dims stay.

    Args:
      path: names the leaf in errors.
      shape: shape of the leaf, without the dim of layers if each layer is a tensor.
      dims: the dims of leaf and tensor in the notation of einops, or a tuple of such strings for different ranks.
    Raises:
      ValueError: the string does not name each dim of the leaf once.
    """
    texts = [dims] if isinstance(dims, str) else list(dims)
    by_rank = {len(text.partition("->")[0].split()): text for text in texts}
    # Several texts are alternatives by rank; a bias keeps its dims. A single text must fit the leaf: a different rank
    # raises below.
    if not texts or (not isinstance(dims, str) and len(shape) not in by_rank):
        return shape, _same, _same
    text = by_rank.get(len(shape), texts[0])
    before, _, after = (part.strip() for part in text.partition("->"))
    of_leaf, flat = before.split(), re.sub(r"[()]", " ", after).split()
    nested = re.sub(r"\([^()]*\)", "", after)
    if (
        any(bracket in nested for bracket in "()")
        or len(of_leaf) != len(shape)
        or len(set(of_leaf)) != len(of_leaf)
        or sorted(of_leaf) != sorted(flat)
    ):
        raise ValueError(
            f"'{path}' of shape {shape} does not have the dims of '{text}', which names each of them once."
        )
    sizes = dict(zip(of_leaf, shape, strict=True))
    groups = [group.split() for group in re.findall(r"\(([^)]*)\)|(\S+)", after) for group in group if group]
    tensor = tuple(int(np.prod([sizes[name] for name in group])) for group in groups)
    order, back = [of_leaf.index(name) for name in flat], [flat.index(name) for name in of_leaf]
    apart = tuple(sizes[name] for name in flat)
    return (
        tensor,
        lambda leaf: leaf.transpose(order).reshape(tensor),
        lambda array: array.reshape(apart).transpose(back),
    )


class StoredPart(NamedTuple):
    """Tensor of a file with its dims in the order of the leaf; ``converted`` casts entries to the leaf's dtype."""

    values: Any
    converted: Callable[[np.ndarray], np.ndarray]

    def read(self, index: Any) -> np.ndarray:
        return self.converted(np.asarray(self.values[index]))


class StoredLeaf:
    """Leaf in a file, with the indexing of an array in the shape of the leaf; reads only the indexed entries.

    ``parts`` has one tensor per layer if ``in_layers``, else a single tensor.
    """

    def __init__(self, parts: list[StoredPart], in_layers: bool):
        self._parts, self._in_layers = parts, in_layers
        shape = parts[0].values.shape
        self.shape = (len(parts), *shape) if in_layers else shape

    def __getitem__(self, index: Any) -> Any:
        if not self._in_layers:
            return self._parts[0].read(index)
        index = index if isinstance(index, tuple) else (index,)
        layers = self._parts[index[0]] if index else self._parts
        return np.stack([layer.read(index[1:]) for layer in layers])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self[...] if not self._in_layers else self[()], dtype)
