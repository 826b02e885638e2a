"""``matrix_dimensions``: finds the leaves with matrices of a linear map, from paths and shapes alone.

  kernel     2048 x 8192            a matrix
  kernel     24 x 2048 x 8192       24 matrices, if the module's norms or biases have a leading dim of 24, too
  kernel     2048 x 16 x 128        a matrix of 2048 x (16 x 128), if its bias is 16 x 128, the shape of the outputs
  embedding                         no matrix: a lookup table, not a linear map
  kernel with as many outputs as    no matrix: the output layer, if the modules of kernel and embedding are in the same
  the embedding has rows            module
  fewer than two dims               no matrix: a vector

A kernel of three or more dims in a module without bias and norms is undecided, and raises a ``ValueError``.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.trees import stored_shape
from xlstm_jax.formatting import kind_of, listed

# Flax's names of vectors, which have more dims in stacked layers, and a part of Flax's names of tables.
_VECTORS = ("bias", "scale")
_TABLE = "embed"
_KERNEL = "kernel"

Shape = tuple[int, ...]
Overrides = Mapping[str, MuonDimensionNumbers | None]


@dataclass(frozen=True)
class MatrixChoice:
    """Decision whether a leaf is updated as matrices, with the dims of a matrix and a reason.

    Attributes:
      path, shape: path of the leaf, and its global shape without padding.
      dims: the dims of a matrix's inputs and outputs; the remaining dims count matrices. None: the leaf is not a
        matrix.
      reason: reason for the decision, as text.
    """

    path: str
    shape: Shape
    dims: MuonDimensionNumbers | None
    reason: str

    @property
    def axes(self) -> tuple[Shape, Shape]:
        """(dims of the inputs, dims of the outputs) in the leaf, as non-negative numbers; only for a matrix."""
        assert self.dims is not None
        return normalized(self.dims, len(self.shape))

    @property
    def matrix(self) -> tuple[int, int]:
        """(number of inputs, number of outputs) of each matrix; only for a leaf with matrices."""
        inputs, outputs = (math.prod(self.shape[dim] for dim in dims) for dims in self.axes)
        return inputs, outputs

    @property
    def count(self) -> int:
        """Number of matrices in the leaf; 0 if the leaf is not a matrix."""
        return math.prod(self.shape) // math.prod(self.matrix) if self.dims else 0


def normalized(dims: MuonDimensionNumbers, ndim: int) -> tuple[Shape, Shape]:
    """Returns (dims of the inputs, dims of the outputs) of a leaf of ``ndim`` dims, as tuples of non-negative numbers.

    Numbers out of range are returned unchanged.

    >>> normalized(optax.contrib.MuonDimensionNumbers(-3, (-2, -1)), 3)
    ((0,), (1, 2))
    """
    each = ((dim,) if isinstance(dim, int) else tuple(dim) for dim in dims)
    # Dims out of range stay unchanged, for the error of `check_dims`.
    inputs, outputs = (tuple(dim % ndim if -ndim <= dim < ndim else dim for dim in side) for side in each)
    return inputs, outputs


def matrix_dimensions(overrides: Overrides | None = None) -> Callable[[PyTree], PyTree]:
    """Returns a function that finds the dims of each leaf's matrices, or None; the default of ``muon``.

    >>> layers = {"norm": {"scale": jnp.ones((3, 8))}, "up": {"kernel": jnp.ones((3, 8, 32))}}  # by nn.scan
    >>> found = matrix_dimensions({"w": None})({"layers": layers, "w": jnp.ones((8, 8))})
    >>> found["layers"]["up"]["kernel"], found["layers"]["norm"]["scale"], found["w"]
    (MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2,)), None, None)

    Args:
      overrides: by path, or by a pattern of paths (``*/query/kernel``), the dims of a leaf's matrix, or None for a leaf
        that is not a matrix. The first matching pattern decides.
    Returns:
      A function of the parameters (boxed or not, unsharded or shards) that returns a tree with an
      ``optax.contrib.MuonDimensionNumbers`` or None for each leaf. Dims not listed in the result count matrices.
    Raises:
      ValueError: (the function) a pattern matches no leaf; dims are out of range for the leaf; or the input dims of a
        kernel are unknown. Names the leaf, its shape and the cure.
    """

    def dimensions(params: PyTree) -> PyTree:
        chosen = choose_matrices(full_shapes(params), overrides)
        return trees.map_leaves_with_path(lambda path, leaf: chosen[path].dims, params)

    return dimensions


def full_shapes(tree: PyTree) -> dict[str, Shape]:
    """Returns the global shape of each leaf of a tree, without padding, by path.

    Inside ``shard_map``, where the values are shards, boxes lead from the shapes of shards to global shapes.
    """

    def shape(leaf: Sharded) -> Shape:
        stored = stored_shape(leaf)
        return leaf.store.shape(stored, [1] * len(stored))

    return {path: shape(leaf) for path, leaf in trees.sharded_leaves(tree)}


def choose_matrices(shapes: Mapping[str, Shape], overrides: Overrides | None = None) -> dict[str, MatrixChoice]:
    """Returns the decision whether each leaf is a matrix, with the dims and the reason: a ``MatrixChoice`` by path.

    ``shapes`` are the global shapes of the leaves, by path. ``overrides`` and errors are as for ``matrix_dimensions``.
    """
    overrides = _checked(overrides or {}, shapes)

    def choice(path: str, shape: Shape) -> MatrixChoice:
        given = [pattern for pattern in overrides if fnmatch.fnmatchcase(path, pattern)]
        if given:
            dims = overrides[given[0]]
            return MatrixChoice(path, shape, dims, f"given for {given[0]!r}")
        return MatrixChoice(path, shape, *_by_rule(path, shape, shapes))

    return {path: choice(path, shape) for path, shape in shapes.items()}


def _by_rule(path: str, shape: Shape, shapes: Mapping[str, Shape]) -> tuple[MuonDimensionNumbers | None, str]:
    """Returns the dims of a leaf's matrices, or None for a leaf without matrices; and the reason, as text.

    The decision is by names and shapes, without overrides: biases, scales, lookup tables, output layers and leaves with
    fewer than two dims have no matrices. A kernel of more than two dims has the dims of its bias as outputs. ``shapes``
    are the global shapes of all leaves, by path; ``shape`` is the shape of the leaf at ``path``.

    Raises:
      ValueError: a kernel has more than two dims in each layer and no bias.
    """
    name, ndim = _name(path), len(shape)
    if name in _VECTORS:
        return None, f"a {name} is a vector"
    if _is_table(path):
        return None, "a table that is looked up"
    stacked = _stacked_dims(path, shapes)
    layer_shape = shape[stacked:]
    if sum(size > 1 for size in layer_shape) < 2:
        return None, "a vector"
    # Flax puts the dims of the outputs last, and the bias has the shape of the outputs.
    bias = shapes.get(_sibling(path, "bias"), ())[stacked:]
    outputs = len(bias) if bias and bias == layer_shape[-len(bias) :] else 1
    if len(layer_shape) > 2 and name != _KERNEL:
        return None, f"of {len(layer_shape)} dims, and named {name!r}: nothing says which are inputs"
    if len(layer_shape) > 2 and not bias:
        raise ValueError(_unsettled(path, shape, stacked))
    split = ndim - outputs
    size = math.prod(shape[split:])
    # Muon's authors train embeddings and the output layer by AdamW, and so does `muon`.
    tables = [other for other in shapes if _is_table(other) and _names_above(other) == _names_above(path)]
    if same := [table for table in tables if len(shapes[table]) == 2 and shapes[table][0] == size]:
        return None, f"the output layer: {size} outputs, as {same[0]!r} has rows"
    why = (
        "a matrix"
        if len(layer_shape) == 2
        else f"its bias has {outputs} dim{'s' * (outputs > 1)}, which are its outputs"
    )
    why += ", one for each layer" * bool(stacked)
    return MuonDimensionNumbers(tuple(range(stacked, split)), tuple(range(split, ndim))), why


def _stacked_dims(path: str, shapes: Mapping[str, Shape]) -> int:
    """Returns how many leading dims of the leaf at ``path`` count layers; 0 for a leaf of a single layer.

    Dims count layers if every leaf of an enclosing module begins with them, and a vector of this module, such as the
    scale of a norm, has them in addition to a single dim. ``shapes`` are the global shapes of all leaves, by path.
    """
    parts, most = path.split("/"), 0
    for depth in range(len(parts)):
        within = [(p, s) for p, s in shapes.items() if p.split("/")[:depth] == parts[:depth]]
        for proof, vector in within:
            dims = len(vector) - 1
            if _shows_layer_dims(proof, vector, shapes) and all(shape[:dims] == vector[:dims] for _, shape in within):
                most = max(most, dims)
    return most


def _shows_layer_dims(path: str, shape: Shape, shapes: Mapping[str, Shape]) -> bool:
    """Returns whether a leaf is a bias or scale with a vector for each layer, [layers, features].

    False for a vector without layers, and for a bias of 16 x 128 beside a kernel of 2048 x 16 x 128, whose dims are all
    features. ``shape`` is the shape of the leaf; ``shapes`` are the shapes of all leaves, by path.
    """
    if _name(path) not in _VECTORS or len(shape) < 2:
        return False
    kernel = shapes.get(_sibling(path, _KERNEL))
    return kernel is None or kernel[: len(shape) - 1] == shape[:-1]


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _names_above(path: str) -> list[str]:
    """Returns the names in a leaf's path above the leaf's module: ["a"] for "a/dense/kernel", [] for "dense/kernel"."""
    return path.split("/")[:-2]


def _sibling(path: str, name: str) -> str:
    """Returns the path of the parameter ``name`` in the module of the leaf ``path``: "a/bias" beside "a/kernel"."""
    return f"{path.rpartition('/')[0]}/{name}".lstrip("/")


def _is_table(path: str) -> bool:
    return _TABLE in _name(path).lower()


def _unsettled(path: str, shape: Shape, stacked: int) -> str:
    """Returns the error text for a kernel with unknown input dims; the text has an override to pass.

    ``stacked`` is the number of leading dims that count layers.
    """
    outputs = tuple(range(stacked + 1, len(shape)))
    return (
        f"{path!r} of shape {shape} has {len(shape)} dims and no bias: which dims are inputs, outputs or layers is "
        "unknown. Pass muon(..., muon_weight_dimension_numbers=matrix_dimensions({"
        f"'{path}': MuonDimensionNumbers({stacked}, {outputs})}})), or None in its place, for AdamW."
    )


def _checked(overrides: Overrides, shapes: Mapping[str, Shape]) -> Overrides:
    """Returns ``overrides`` (dims of a matrix, by pattern of paths) unchanged, after checks against the leaves.

    ``shapes`` has the shape of each leaf, by path. Raises a ``ValueError`` if a pattern matches no leaf, or, like
    ``check_dims``, if dims do not fit a matching leaf.
    """
    for pattern, dims in overrides.items():
        fitting = fnmatch.filter(shapes, pattern)
        if not fitting:
            raise ValueError(
                f"matrix_dimensions: {pattern!r} fits none of the {len(shapes)} leaves, as {listed(list(shapes)[:3])}."
            )
        for path in fitting:
            check_dims(path, shapes[path], dims)
    return overrides


def check_dims(path: str, shape: Shape, dims: Any) -> None:
    """Raises an error if ``dims`` are not the dims of a matrix in the leaf at ``path``; None is accepted.

    Raises:
      TypeError: ``dims`` are not ``MuonDimensionNumbers``.
      ValueError: there is no input dim or no output dim, a dim is named twice, or a dim is out of range.
    """
    if dims is None:
        return
    if not isinstance(dims, MuonDimensionNumbers):
        raise TypeError(f"{path!r}: pass optax.contrib.MuonDimensionNumbers(inputs, outputs), not {kind_of(dims)}.")
    inputs, outputs = normalized(dims, len(shape))
    both = (*inputs, *outputs)
    if not (inputs and outputs) or len(set(both)) < len(both) or not set(both) <= set(range(len(shape))):
        raise ValueError(
            f"{path!r} of shape {shape} is labelled as a matrix with inputs along {inputs} and outputs along "
            f"{outputs}, and has the dims {tuple(range(len(shape)))}: name at least one dim for each, and none twice."
        )


def choices_of(muon_dims: Any, params: PyTree) -> dict[str, MatrixChoice]:
    """Returns the decision whether each leaf is a matrix, with its dims: a ``MatrixChoice`` by path.

    Args:
      muon_dims: None, for the rules of ``matrix_dimensions``; or a tree of ``MuonDimensionNumbers`` and None, a prefix
        of such a tree, or a function from parameters to such a tree.
      params: the parameters, boxed or not; also shards inside ``shard_map``.
    """
    shapes = full_shapes(params)
    if muon_dims is None:
        return choose_matrices(shapes)
    # JAX does not treat None as a leaf; in this tree None marks a leaf that is not a matrix.
    prefix, treedef = trees.flatten_with_path(muon_dims(params) if callable(muon_dims) else muon_dims, _is_dims)
    below: Sequence[Any] = treedef.flatten_up_to(params)
    each = [trees.map_leaves(lambda leaf, dims=dims: dims, sub) for (_, dims), sub in zip(prefix, below, strict=True)]
    with_paths, _ = trees.flatten_with_path(jax.tree.unflatten(treedef, each), _is_dims)
    choices = {}
    for path, dims in ((path, dims) for path, dims in with_paths if path in shapes):
        check_dims(path, shapes[path], dims)
        choices[path] = MatrixChoice(path, shapes[path], dims, "as given")
    return choices


def _is_dims(node: Any) -> bool:
    return node is None or isinstance(node, MuonDimensionNumbers)
