"""Renames leaves of a model, and converts between layers of a Python loop and layers of a scan.

    block_0/up/kernel[d, f], block_1/..., block_2/...  -- stack_layers -->  blocks/up/kernel[3, d, f]
                                                      <-- unstack_layers --

Layers in a Python loop have separate parameters; ``nn.scan`` keeps the parameters of the layers in a single leaf, with
a leading layer dim. On a mesh the layer dim is not split: each device stacks its shards, without communication. A box
gains or loses the entry for the layer dim, and is unchanged otherwise.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from flax.traverse_util import unflatten_dict
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import is_box, leaf_of
from xlstm_jax.distributed.data_parallel.wire.collectives import entry_axes
from xlstm_jax.formatting import kind_of, listed

NUMBER = "{}"  # placeholder in the layer name of a loop
WHOLE_LAYER_DIM = {meta.PARTITION_NAME: None}
SHOWN_NAMES = 8

Entries = dict[str, Any]


def rename_leaves(tree: PyTree, names: Mapping[str, str]) -> dict[str, Any]:
    """Renames paths of leaves, so that the parameters of a model get the names of another model.

    >>> linen = {"Dense_0": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "Dense_1": {"kernel": jnp.ones((3, 2))}}
    >>> nnx = rename_leaves(linen, {"Dense_0": "up", "Dense_1": "mlp/down"})
    >>> jax.tree.map(jnp.shape, nnx)
    {'mlp': {'down': {'kernel': (3, 2)}}, 'up': {'bias': (3,), 'kernel': (2, 3)}}

    Args:
      tree: nested dicts; a box is one leaf.
      names: from the beginning of a path (one or more complete names) to its replacement. The longest matching
        beginning applies; paths without a match stay. ``{new: old for old, new in names.items()}`` is the inverse.
    Raises:
      ValueError: two leaves would get the same path, or a name matches no leaf.
    """
    renamed: dict[str, Any] = {}
    used: set[str] = set()
    for path, leaf in trees.leaves_with_path(tree):
        fitting = [name for name in names if path == name or path.startswith(f"{name}/")]
        old = max(fitting, key=len, default="")
        new = names[old] + path[len(old) :] if fitting else path
        if new in renamed:
            raise ValueError(f"'{path}' would lie at '{new}', where another leaf lies; choose another name.")
        used |= set(fitting)
        renamed[new] = leaf
    if unused := sorted(names.keys() - used):
        paths = ", ".join(path for path, _ in trees.leaves_with_path(tree))
        raise ValueError(f"no path begins with {unused[0]!r}; the paths are {paths}.")
    return unflatten_dict(renamed, sep="/")


# --------------------------------------------------------------------------------------- layers of a loop and of a scan


def stack_layers(tree: PyTree, layer_names: str, stacked_name: str) -> PyTree:
    """Stacks layers of a loop to layers of a scan: leaves of ``block_0``, ``block_1``, ... are stacked in ``blocks``.

    Layers are stacked anywhere in the tree: in parameters, in the moments of an optimizer, in a ``TrainState`` (whose
    ``apply_fn`` stays unchanged), in the abstract target of a restore.

    >>> params = {"block_0": {"w": jnp.zeros((4, 2))}, "block_1": {"w": jnp.ones((4, 2))}, "head": jnp.ones(2)}
    >>> stacked = stack_layers(params, "block_{}", "blocks")
    >>> stacked["blocks"]["w"].shape, sorted(stacked)
    ((2, 4, 2), ['blocks', 'head'])

    Args:
      tree: arrays, NumPy arrays or ``ShapeDtypeStruct``, boxed or not, in dicts within any containers. Global arrays
        stay split in the same way; a device holds its shards of the old and of the new leaves.
      layer_names: the layers' name with ``{}`` for their numbers, from 0 on, as "block_{}".
      stacked_name: the name of the scan.
    Returns:
      The tree with leaves [layers, ...] under ``stacked_name``. The remaining leaves are the same arrays in both trees:
      a step that takes one tree as a donated argument also deletes these arrays of the other tree.
    Raises:
      ValueError: the tree has no such layer, or a layer is missing; layers differ in structure, shape, dtype or box
        (names the leaf); or ``stacked_name`` exists already.
      TypeError: a name is not a string, or ``layer_names`` does not contain ``{}`` exactly once.

    An optimizer's state is stacked correctly if it has an entry per entry of a parameter (SGD, Adam, Lion), and
    incorrectly if it contains a norm or a factor of an entire parameter.
    """
    pattern = _pattern(layer_names)
    _check_name(stacked_name)

    def stacked(node: Mapping[str, Any]) -> tuple[Sequence[str], Entries]:
        names = _layers_in(node, pattern)
        return list(names.values()), {stacked_name: _stacked({n: node[name] for n, name in names.items()}, layer_names)}

    return _with_other_entries(tree, lambda node: bool(_layers_in(node, pattern)), stacked, layer_names.format(0))


def unstack_layers(tree: PyTree, stacked_name: str, layer_names: str) -> PyTree:
    """Unstacks layers of a scan to layers of a loop, anywhere in the tree: the inverse of ``stack_layers``.

    >>> params = {"blocks": {"w": jnp.ones((2, 4, 2))}, "head": jnp.ones(2)}
    >>> jax.tree.map(jnp.shape, unstack_layers(params, "blocks", "block_{}"))
    {'block_0': {'w': (4, 2)}, 'block_1': {'w': (4, 2)}, 'head': (2,)}

    Args:
      tree: arrays, NumPy arrays or ``ShapeDtypeStruct``, boxed or not, in dicts within any containers; the leaves under
        ``stacked_name`` are [layers, ...].
      stacked_name: the name of the scan.
      layer_names: the layers' name with ``{}`` for their numbers, from 0 on, as "block_{}".
    Raises:
      ValueError: ``stacked_name`` does not exist; its leaves differ in the size of dim 0, or a leaf has no dim; a box
        splits the layer dim; or the name of a layer exists already.
      TypeError: a name is not a string, or ``layer_names`` does not contain ``{}`` exactly once.
    """
    _pattern(layer_names)
    _check_name(stacked_name)

    def unstacked(node: Mapping[str, Any]) -> tuple[Sequence[str], Entries]:
        layers = _unstacked(node[stacked_name], stacked_name)
        return [stacked_name], {layer_names.format(number): layer for number, layer in enumerate(layers)}

    return _with_other_entries(tree, lambda node: stacked_name in node, unstacked, stacked_name)


def _with_other_entries(
    tree: PyTree,
    concerns: Callable[[Mapping[str, Any]], bool],
    replaced: Callable[[Mapping[str, Any]], tuple[Sequence[str], Entries]],
    wanted: str,
) -> PyTree:
    """Returns the tree with some entries replaced in each dict for which ``concerns(dict)`` is true, at any depth.

    Args:
      tree: dicts within any containers; a box is a leaf.
      concerns: returns whether entries of a dict are to be replaced.
      replaced: returns, for such a dict, the names of the entries to remove, and the new entries by name.
      wanted: the name that the error calls missing.
    Raises:
      ValueError: ``concerns`` is false for every dict; or a new entry has the name of an entry that stays.
    """
    seen: set[str] = set()
    replacements: list[Entries] = []

    def is_concerned(node: Any) -> bool:
        if not isinstance(node, Mapping):
            return False
        seen.update(map(str, node))
        return concerns(node)

    def is_leaf(node: Any) -> bool:
        return is_box(node) or is_concerned(node)

    def replace(node: Any) -> Any:
        if not is_concerned(node):
            return node
        old, new = replaced(node)
        replacements.append(new)
        rest = {
            name: trees.map_leaves(replace, child, one_leaf=is_leaf) for name, child in node.items() if name not in old
        }
        if taken := sorted(rest.keys() & new.keys()):
            raise ValueError(f"beside {min(old)!r} there is {taken[0]!r} already; choose another name.")
        return type(node)(rest | new)

    renamed = trees.map_leaves(replace, tree, one_leaf=is_leaf)
    if not replacements:
        raise ValueError(f"the tree has no {wanted!r}; its names are {listed(sorted(seen), shown=SHOWN_NAMES)}.")
    return renamed


def _pattern(layer_names: str) -> re.Pattern[str]:
    _check_name(layer_names)
    if layer_names.count(NUMBER) != 1:
        raise TypeError(f"{layer_names=} has not one {NUMBER} for the number of a layer, as 'block_{NUMBER}' has.")
    before, after = map(re.escape, layer_names.split(NUMBER))
    # Without leading zeros: block_01 and block_1 would be two layers with the same number.
    return re.compile(f"{before}(0|[1-9][0-9]*){after}")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(
            f"a name of layers is a string, not {kind_of(name)}: stack_layers(tree, 'block_{NUMBER}', 'blocks'), "
            f"unstack_layers(tree, 'blocks', 'block_{NUMBER}')."
        )


def _layers_in(node: Mapping[str, Any], pattern: re.Pattern[str]) -> dict[int, str]:
    """Returns the keys of a dict that are names of layers, by layer number: {0: "block_0", 1: "block_1"}.

    Group 1 of ``pattern``, which a whole key must match, is the number.
    """
    matches = (pattern.fullmatch(name) for name in node if isinstance(name, str))
    return {int(match[1]): match[0] for match in matches if match}


# ------------------------------------------------------------------------------------------------------- to one leaf


def _stacked(layers: dict[int, PyTree], layer_names: str) -> PyTree:
    """Returns one tree with leaves [layers, ...], stacked from the trees of the layers in the order of their numbers.

    ``layers`` has the tree of each layer by its number. ``layer_names`` is the pattern of the layers' names for errors,
    as "block_{}".

    Raises:
      ValueError: a number from 0 to the largest is missing, or layers differ in structure, shape, dtype or box.
    """
    if missing := sorted(set(range(max(layers))) - set(layers)):
        existing = listed([layer_names.format(number) for number in sorted(layers)], shown=SHOWN_NAMES)
        raise ValueError(f"{layer_names.format(missing[0])!r} is missing among the layers {existing}.")
    in_order = [layers[number] for number in range(len(layers))]
    # As text, which the error quotes.
    described = [{path: _described(leaf) for path, leaf in trees.leaves_with_path(layer)} for layer in in_order]
    for number, other in enumerate(described):
        for path in sorted(described[0].keys() | other.keys()):
            first, other_layer = (leaves.get(path, "not there") for leaves in (described[0], other))
            if first != other_layer:
                raise ValueError(
                    f"'{layer_names.format(0)}/{path}' is {first}, and '{layer_names.format(number)}/{path}' is "
                    f"{other_layer}: the layers of a scan are all alike."
                )
    return trees.map_leaves(_stacked_leaf, *in_order)


def _described(leaf: Any) -> str:
    """Returns a text of the properties in which layers must agree to be stacked: dtype, shape, whether frozen, box.

    As "float32[4, 2]". The text is compared between layers, and quoted in errors.
    """
    box = leaf_of(leaf)
    value = box.value
    text = f"{getattr(value, 'dtype', type(value).__name__)}{list(np.shape(value))}"
    text += "" if box.trainable else ", frozen,"
    if is_box(leaf):
        stored = "" if box.stores_value else f" that stores {box.true_shape}"
        text += f"{stored} in a {type(leaf).__name__} of {box.names}, {box.communication}"
    return text


def _stacked_leaf(*layers: Any) -> Any:
    """Returns a leaf [layers, ...]: the same leaf of each layer, in order, stacked along a new dim 0.

    On a mesh each device stacks its shards, and nothing is sent. In a box, the layer dim is not split.
    """
    values = trees.stored_values(layers)
    # A spec without any axis is P(), as jit reports it: else a second call would compile again.
    value = _on_shards(_stack, lambda spec: PartitionSpec(None, *spec) if any(spec) else PartitionSpec(), *values)
    is_boxed = isinstance(layers[0], meta.AxisMetadata)
    return layers[0].add_axis(0, WHOLE_LAYER_DIM).replace_boxed(value) if is_boxed else value


def _stack(*layers: Any) -> Any:
    return np.stack(layers) if all(isinstance(x, np.ndarray) for x in layers) else jnp.stack(layers)


# ------------------------------------------------------------------------------------------------------ and back again


def _unstacked(tree: PyTree, stacked_name: str) -> list[PyTree]:
    """Returns a list with a tree for each layer, in order, from a tree with leaves [layers, ...].

    ``stacked_name`` is the name of the stacked layers for errors.

    Raises:
      ValueError: leaves differ in the size of dim 0, a leaf has no dim, or a box splits dim 0.
    """
    leaves, treedef = trees.flatten_with_path(tree)
    read = trees.sharded_leaves(tree)
    first = next((np.shape(leaf.value)[:1] for _, leaf in read), ())
    for (path, leaf), (_, box) in zip(leaves, read, strict=True):
        described = f"'{stacked_name}/{path}' is {_described(leaf)}"
        if not first or np.shape(box.value)[:1] != first:
            raise ValueError(
                f"{described}, and '{stacked_name}/{leaves[0][0]}' is {_described(leaves[0][1])}: dim 0 of all leaves "
                "of a scan is the layer dim, and must have one size."
            )
        if entry_axes(box.names[0]):
            raise ValueError(f"{described}: its layers lie on different devices. Use a box that does not split dim 0.")
    return list(map(treedef.unflatten, zip(*(_layers_of_leaf(leaf) for _, leaf in leaves), strict=True)))


def _layers_of_leaf(leaf: Any) -> list[Any]:
    layers: list[Any] = _on_shards(_split, lambda spec: PartitionSpec(*spec[1:]), trees.stored_values(leaf))
    if isinstance(leaf, meta.AxisMetadata):
        layers = [leaf.remove_axis(0, WHOLE_LAYER_DIM).replace_boxed(layer) for layer in layers]
    return layers


def _split(stacked: Any) -> list[Any]:
    return [stacked[number] for number in range(len(stacked))]


# ---------------------------------------------------------------------------------------------------------- on a mesh


def _on_shards(fn: Callable[..., Any], respec: Callable[[PartitionSpec], PartitionSpec], *values: Any) -> Any:
    """Returns ``fn(*values)``. For arrays on a mesh, each device computes ``fn`` on its shards.

    ``respec`` returns the ``PartitionSpec`` of each result for the spec of the first value. For ``ShapeDtypeStruct``
    values the results are ``ShapeDtypeStruct``, and nothing is computed; for tracers the compiler chooses the
    shardings.
    """
    # Inside `jit` the compiler chooses shardings: a tracer's sharding cannot be read.
    sharding = None if isinstance(values[0], Tracer) else getattr(values[0], "sharding", None)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, respec(sharding.spec))
    if isinstance(values[0], jax.ShapeDtypeStruct):
        abstract = jax.eval_shape(fn, *values)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract)
    return _jitted(fn, sharding)(*values) if isinstance(sharding, NamedSharding) else fn(*values)


# Cached: a new `jax.jit` for each leaf would compile for each leaf.
@functools.cache
def _jitted(fn: Callable[..., Any], sharding: NamedSharding) -> Callable[..., Any]:
    return jax.jit(fn, out_shardings=sharding)
