"""Checks the mesh of a step, and describes the split of a batch over the mesh: ``BatchLayout``.

  batch_axes=("dp", "fsdp")                  tokens[b, t] -> [b / n, t]        every leaf by its examples
  batch_spec=P(("dp", "fsdp"), "cp")         tokens[b, t] -> [b / n, t / c]    and each example over "cp"
  batch_spec={"tokens": P("dp", "cp"), "label": P("dp")}                       leaf by leaf; a prefix of the batch

Dim 0 of every leaf counts examples, and is split over the same axes in every leaf, ``row_axes``. Scalars are
replicated. Losses, weights and gradients are reduced over ``axes``, the axes that split any dim. The ready-made steps,
``shard_batch``, ``abstract_batch`` and the comparison of a step with one device use a ``BatchLayout``.

Batches come in natural order, with contiguous tokens on each device. A step with another layout (zigzag) first permutes
the tokens (``entered``), along the dims split by its specs.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.policy import next_multiple
from xlstm_jax.distributed.data_parallel.trees import (
    flatten_with_path,
    leaves_with_path,
    named_leaf,
    path_string,
    spread_spec,
)
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names, entry_axes
from xlstm_jax.distributed.model_parallel.sequence_layout import (
    CONTIGUOUS,
    ZIGZAG,
    ReorderedTokens,
    SequenceLayout,
    check_even,
    check_layout,
    check_reordered,
    exchanged,
    layout_context,
    reordered,
    zigzag_order,
)
from xlstm_jax.explicit_axes import with_auto_axes
from xlstm_jax.formatting import kind_of, listed, shortened

# ------------------------------------------------------------------------------------------------------------- the mesh

SHOWN_CHARS = 100  # length of the wrong argument in an error
USUAL_AXES = {1: ("fsdp",), 2: ("dp", "fsdp")}

AnyMesh = TypeVar("AnyMesh", bound=Mesh | AbstractMesh)


def auto_types(names: Sequence[str]) -> tuple[AxisType, ...]:
    """Returns a tuple with ``AxisType.Auto`` for each of the axis ``names``."""
    return (AxisType.Auto,) * len(names)


def auto_mesh(mesh: AnyMesh) -> AnyMesh:
    """Returns the mesh with each axis of type ``Auto``.

    >>> explicit = jax.make_mesh((2, 4), ("dp", "fsdp"))
    >>> explicit == mesh, auto_mesh(explicit) == mesh  # which is Auto
    (False, True)

    Raises:
      TypeError: ``mesh`` is not a mesh; names its type, and the call that makes a mesh.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        check_mesh(mesh)
    return mesh if set(mesh.axis_types) == {AxisType.Auto} else with_auto_axes(mesh)


def check_mesh(mesh: object, *, devices: bool = False) -> None:
    """Raises a ``TypeError`` unless ``mesh`` is a mesh; with ``devices`` it must have devices, too.

    The error shows how to make a mesh.

    >>> check_mesh(mesh)
    """
    if isinstance(mesh, Mesh) or (isinstance(mesh, AbstractMesh) and not devices):
        return
    # Typical mistakes are sizes, devices, shardings, and the function that makes a mesh: the error shows the argument.
    rule = "a mesh is a jax.sharding.Mesh: devices in an array whose dims have names"
    if isinstance(mesh, AbstractMesh):
        kind = "an AbstractMesh, which has no devices"
    else:
        kind = "None" if mesh is None else f"a {getattr(mesh, '__name__', type(mesh).__name__)}"
    shown = "" if mesh is None else f"={shortened(str(mesh), SHOWN_CHARS)}"
    raise TypeError(f"mesh{shown} is {kind}; {rule}. {_how_to_make(mesh)}")


def _how_to_make(mesh: object) -> str:
    """Returns a sentence for an error about a wrong argument ``mesh``: how to make a mesh from this argument.

    For a ``NamedSharding`` the sentence is: pass ``sharding.mesh``. For other values the sentence has a call of
    ``create_device_mesh``: with the axis sizes in ``mesh`` (an ``AbstractMesh``, or sizes with or without names), with
    the devices in ``mesh`` along a single axis, or for any other value with the example {'fsdp': -1}.
    """
    if isinstance(mesh, jax.sharding.NamedSharding):
        return "Pass the mesh of this sharding, as sharding.mesh."
    shape, rest = "{'fsdp': -1}", ""
    if isinstance(mesh, AbstractMesh | Mapping):
        shape = str(dict(mesh.shape if isinstance(mesh, AbstractMesh) else mesh))
    elif isinstance(mesh, np.ndarray | Sequence) and np.size(mesh) and isinstance(np.ravel(mesh)[0], jax.Device):
        shape, rest = f"{{'fsdp': {np.size(mesh)}}}", ", devices"
    elif (named := with_usual_names(mesh)) is not None:
        shape = str(named)
    return f"Make one by DeviceMeshManager.create_device_mesh({shape}{rest})."


def with_usual_names(sizes: Any) -> dict[str, int] | None:
    """Returns sizes without names as a dict with usual axis names; None unless ``sizes`` is an int or ints.

    8 -> {"fsdp": 8}, (2, 4) -> {"dp": 2, "fsdp": 4}; three or more sizes get the names "axis_0", "axis_1", ...
    """
    values: list[Any] = list(sizes) if isinstance(sizes, list | tuple) else [sizes]
    # Compare types: isinstance(True, int) is True.
    if not values or not all(type(size) is int for size in values):
        return None
    return dict(zip(USUAL_AXES.get(len(values), [f"axis_{i}" for i in range(len(values))]), values, strict=True))


def mesh_axes(mesh: Mesh | AbstractMesh, axis_names: AxisNames, argument: str) -> tuple[str, ...]:
    """Returns ``axis_names`` as a tuple, after a check that the mesh has these axes.

    ``argument`` is the name of the caller's argument, for errors.

    >>> mesh_axes(mesh, "fsdp", "batch_axes")
    ('fsdp',)

    Raises:
      TypeError: ``mesh`` is not a mesh.
      ValueError: the mesh lacks an axis; names ``argument``. Or ``axis_names`` is empty, repeats a name, or contains
        something other than names; the error calls the argument ``axis_name``.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        check_mesh(mesh)
    axes = as_axis_names(axis_names)
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"{argument}={axis_names!r}: the mesh has no axis {missing[0]!r}; its axes are {dict(mesh.shape)}. "
            "Pass those that the batch is split over."
        )
    return axes


# ------------------------------------------------------------------------------------------------------------ the batch


@dataclass(frozen=True, eq=False)
class BatchLayout:
    """Description of how each leaf of a batch is split over a mesh, with methods that apply it to a batch.

    Attributes:
      mesh: the mesh.
      axes: the axes that split any dim of a leaf, in the order of the specs.
      row_axes: the axes that split dim 0.
      spec: a ``PartitionSpec``, or a tree of them that is a prefix of the batch.
      sequence: for layers that exchange tokens between devices (attention): the order of the tokens, and the axes that
        split tokens (other dims than dim 0) and rows, without axes of size 1.
      tokens: the token layout of a step, "contiguous" or "zigzag"; None to take it from the batch, see ``of_batch``;
        in ``sequence`` "contiguous" is in place of None.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    row_axes: tuple[str, ...]
    spec: PyTree
    sequence: SequenceLayout
    tokens: str | None = None

    def __str__(self) -> str:
        return str(self.axes if self.axes == self.row_axes else self.spec)

    def specs(self, batch: PyTree, *, spread: bool = False) -> PyTree:
        """Returns a tree like ``batch`` with the ``PartitionSpec`` of each leaf, after checks of the shapes.

        A scalar has ``PartitionSpec()``. The size of dim 0 is not checked, because on a host it is the number of rows
        of the process. With ``spread`` the specs omit axes of size 1, which split nothing, as ``in_specs`` for
        ``shard_map``.

        Raises:
          ValueError: the specs are no prefix of the batch, a leaf has fewer dims than its spec, or the axes of a dim do
            not divide it; names the leaf and both numbers.
        """
        leaves, treedef = jax.tree_util.tree_flatten_with_path(batch)
        by_leaf = [self.spec] * len(leaves) if isinstance(self.spec, PartitionSpec) else self._by_leaf(batch)
        specs: list[PartitionSpec] = []
        for (path, leaf), spec in zip(leaves, by_leaf, strict=True):
            shape = np.shape(leaf)
            if not shape:
                specs.append(PartitionSpec())
                continue
            if not len(spec):
                raise ValueError(
                    f"{named_leaf('batch', path_string(path))} of shape {shape} has the spec {spec}, which splits "
                    f"nothing, and dim 0 of a batch holds examples, split over {self.row_axes}. Split its dim 0 "
                    "likewise; pass a value that all devices need as a scalar, or in the collections of the state."
                )
            if len(spec) > len(shape):
                raise ValueError(
                    f"{named_leaf('batch', path_string(path))} of shape {shape} has {len(shape)} dims, and its spec "
                    f"{spec} is of {len(spec)}. Give each leaf a spec of its own, as batch_spec={{'tokens': P('dp', "
                    "'cp'), 'label': P('dp')}."
                )
            # Skip dim 0: `check_batch` compares the rows, and on a host dim 0 has only the rows of the process.
            for dim in range(1, len(spec)):
                if shape[dim] % (count := num_shards(self.mesh, entry_axes(spec[dim]))):
                    raise ValueError(
                        f"{named_leaf('batch', path_string(path))} of shape {shape} has the spec {spec}: the {count} "
                        f"devices over {entry_axes(spec[dim])} do not divide dim {dim} of size {shape[dim]}. Pad it to "
                        f"{next_multiple(shape[dim], count)} (tokens of weight 0, weighted=True), or split another dim."
                    )
            specs.append(spread_spec(spec, self.mesh) if spread else spec)
        return jax.tree.unflatten(treedef, specs)

    def part(self, batch: PyTree, device: Any) -> PyTree:
        """Returns the part of a global batch for one device: a tree like ``batch`` with the device's shards.

        ``device``, an int or a traced integer, is the row-major index of the device over ``self.axes``. Dims are cut by
        the specs of the layout; scalars are unchanged. Raises a ``ValueError`` if the layout does not fit the shapes.
        """
        places: dict[str, Any] = {}
        # The last axis varies fastest over the devices.
        for axis in reversed(self.axes):
            places[axis], device = device % self.mesh.shape[axis], device // self.mesh.shape[axis]

        def local(leaf: Any, spec: PartitionSpec) -> Any:
            for dim, entry in enumerate(spec):
                # The indices along the axes of a dim are digits of the position, outermost axis first.
                place = 0
                for axis in entry_axes(entry):
                    place = place * self.mesh.shape[axis] + places[axis]
                size = np.shape(leaf)[dim] // num_shards(self.mesh, entry_axes(entry))
                leaf = jax.lax.dynamic_slice_in_dim(leaf, place * size, size, dim)
            return leaf

        return jax.tree.map(local, batch, self.specs(batch))

    def of_batch(self, batch: PyTree) -> "BatchLayout":
        """Returns the layout with its token order ``tokens`` set: "contiguous" or "zigzag", after checks of the batch.

        A token order that is set already stays. None becomes "zigzag" if a leaf of the batch is a ``ReorderedTokens``
        (an array whose tokens were brought into zigzag order for 2 or more devices), else "contiguous".

        Raises:
          ValueError: a leaf has a different token order, or was reordered for a different number of devices; or twice
            the number of devices does not divide the length of a sequence.
        """
        leaves = flatten_with_path(batch, one_leaf=ReorderedTokens)[0]
        before_step = [leaf for _, leaf in leaves if isinstance(leaf, ReorderedTokens)]
        in_zigzag = [leaf for leaf in before_step if leaf.devices > 1]
        tokens = self.tokens or (ZIGZAG if in_zigzag else CONTIGUOUS)
        layout = replace(self, tokens=tokens, sequence=replace(self.sequence, layout=tokens))
        if tokens == CONTIGUOUS and not before_step:
            return layout
        for (path, leaf), spec in zip(leaves, self._by_leaf(batch), strict=True):
            if isinstance(leaf, ReorderedTokens):
                entry = dict(enumerate(spec)).get(leaf.dim % leaf.ndim)
                split = f"its spec is {spec}"
                check_reordered(
                    named_leaf("batch", path), leaf, tokens, num_shards(self.mesh, entry_axes(entry)), split
                )
        devices = num_shards(self.mesh, layout.sequence.axes)
        if tokens == ZIGZAG and devices > 1:
            for (path, leaf), dim in zip(leaves, layout._token_dims(batch), strict=True):
                if dim is not None:
                    check_even(np.shape(leaf)[dim], devices, f"{named_leaf('batch', path)} of shape {np.shape(leaf)}")
        return layout

    @contextlib.contextmanager
    def entered(self, batch: PyTree) -> Iterator[PyTree]:
        """Context manager for use inside ``shard_map``: yields this device's ``batch`` in token order ``self.tokens``.

        ``batch`` has this device's shards. For "zigzag" the tokens of leaves in natural order are exchanged between
        devices; ``ReorderedTokens`` leaves are in zigzag order already. The yielded tree has plain arrays. Layers
        called inside the context can read the token order.
        """
        leaves, treedef = flatten_with_path(batch, one_leaf=ReorderedTokens)
        values = [leaf.value if isinstance(leaf, ReorderedTokens) else leaf for _, leaf in leaves]
        if self.tokens == ZIGZAG:
            dims = [
                None if isinstance(leaf, ReorderedTokens) else dim
                for (_, leaf), dim in zip(leaves, self._token_dims(batch), strict=True)
            ]
            values = exchanged(values, dims, self.sequence.axes)
        with layout_context(self.sequence):
            yield jax.tree.unflatten(treedef, values)

    def reorder(self, batch: PyTree) -> PyTree:
        """Returns a global ``batch``, plain arrays in natural order, with tokens moved into the order of the step.

        If ``self.tokens`` is "zigzag", the token dim of each leaf is permuted; leaves without tokens are unchanged. For
        another order the batch is returned unchanged.
        """
        if self.tokens != ZIGZAG:
            return batch
        devices = num_shards(self.mesh, self.sequence.axes)
        leaves, treedef = jax.tree.flatten(batch)
        ordered = [
            leaf if dim is None else reordered(leaf, zigzag_order(leaf.shape[dim], devices), dim)
            for leaf, dim in zip(leaves, self._token_dims(batch), strict=True)
        ]
        return jax.tree.unflatten(treedef, ordered)

    def _token_dims(self, batch: PyTree) -> list[int | None]:
        """Returns the token dim of each leaf, in the order of ``jax.tree.leaves``, or None for a leaf without tokens.

        The token dim is the dim, other than dim 0, that the leaf's spec splits over exactly the axes
        ``self.sequence.axes``.
        """
        token_dims = []
        for spec in self._by_leaf(batch):
            dims = [dim for dim, axes in _columns(spec, self.mesh).items() if axes == self.sequence.axes]
            token_dims.append(dims[0] if dims else None)
        return token_dims

    def misplaced(self, batch: PyTree, shardings: Sequence[Any]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
        """Yields (path, leaf, axes) for each leaf whose dims after dim 0 are split differently from the layout.

        ``shardings`` has the current sharding of each leaf, in the order of the leaves; ``axes`` are the axes of this
        sharding that split these dims. A leaf that is on no mesh, or split along dim 0 alone, is not yielded.
        """
        # Most batches are on no mesh, or split by rows alone: then the specs are not needed.
        leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
        splits = [_columns(its.spec, its.mesh) if isinstance(its, NamedSharding) else {} for its in shardings]
        specs = self._by_leaf(batch) if any(splits) else [PartitionSpec()] * len(leaves)
        for (path, leaf), split, spec in zip(leaves, splits, specs, strict=True):
            if split and split != _columns(spec, self.mesh):
                yield path_string(path), leaf, tuple(axis for axes in split.values() for axis in axes)

    def _by_leaf(self, batch: PyTree) -> list[PartitionSpec]:
        """Returns the layout's spec for each leaf of the batch, in the order of ``jax.tree.leaves``; checks no shapes.

        Raises a ``ValueError`` if the tree of specs is no prefix of the batch.
        """
        # JAX's errors concern tree structures, and name no leaf.
        try:
            return jax.tree.leaves(jax.tree.broadcast(self.spec, batch))
        except (ValueError, TypeError, KeyError):
            in_spec, in_batch = ([path for path, _ in leaves_with_path(tree)] for tree in (self.spec, batch))
            raise ValueError(
                f"batch_spec has specs at {listed(in_spec)}, and the batch has leaves at {listed(in_batch)}: the specs "
                "must be a prefix of the batch. Give each leaf its spec, or one PartitionSpec for all of them."
            ) from None


def batch_layout(
    mesh: Mesh | AbstractMesh,
    batch_axes: AxisNames | None,
    batch_spec: PyTree | None = None,
    tokens: str | None = None,
) -> BatchLayout:
    """Returns the ``BatchLayout``, the split of a batch over the mesh, for a user's ``batch_axes`` or ``batch_spec``.

    ``batch_axes`` split dim 0 of each leaf; ``batch_spec`` is a ``PartitionSpec`` or a tree of specs. ``tokens`` is the
    ``layout`` of the step, "contiguous" or "zigzag"; None: to be taken from the batch.

    Raises:
      ValueError: both or neither is given; specs name an axis that the mesh lacks, an axis twice, or no axis at all; or
        they split dim 0 of two leaves over different axes; or ``tokens`` is "zigzag", and the number of dims that are
        split as a sequence is not 1.
      TypeError: ``batch_spec`` contains something other than a ``PartitionSpec``, or ``mesh`` is not a mesh.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        check_mesh(mesh)
    if tokens is not None:
        check_layout(tokens)
    if isinstance(batch_axes, PartitionSpec) or (batch_axes is None) == (batch_spec is None):
        raise ValueError(
            f"{batch_axes=} and {batch_spec=}: pass one of them. batch_axes are the names of the axes over which the "
            "examples of a batch are split, ('dp', 'fsdp'); batch_spec is a PartitionSpec of all dims of its leaves, "
            "P(('dp', 'fsdp'), 'cp'), or a tree of them."
        )
    if batch_spec is None:
        axes = of_rows = mesh_axes(mesh, batch_axes or (), "batch_axes")
        spec, columns = PartitionSpec(axes), []
    else:
        specs = {path: _named(path, spec, mesh) for path, spec in leaves_with_path(batch_spec)}
        axes = tuple(dict.fromkeys(axis for entries in specs.values() for entry in entries for axis in entry))
        if not axes:
            raise ValueError(f"batch_spec={batch_spec} splits nothing; name an axis, as P('fsdp') or P('fsdp', 'cp').")
        # Rows of different leaves belong to the same examples, and share one weight per row.
        rows = {path: entries[0] for path, entries in specs.items() if entries}
        first = next(iter(rows))
        for path, of_rows in rows.items():
            if of_rows != rows[first]:
                raise ValueError(
                    f"batch_spec splits dim 0, the examples, over {rows[first]} at '{first}' and over {of_rows} at "
                    f"'{path}': the leaves of a device would have different examples. Split dim 0 of all leaves over "
                    "the same axes; a leaf with an entry for each token has examples before tokens, [b, t]."
                )
        of_rows, spec = rows[first], batch_spec
        columns = list(dict.fromkeys([entry for entries in specs.values() for entry in entries[1:] if entry]))
    if tokens == ZIGZAG:
        check_one_sequence(columns, f"{batch_axes=}" if batch_spec is None else f"batch_spec={batch_spec}")
    of_tokens = [axis for axis in axes if axis not in of_rows]
    spread = [tuple([axis for axis in split if mesh.shape[axis] > 1]) for split in (of_tokens, of_rows)]
    return BatchLayout(mesh, axes, of_rows, spec, SequenceLayout(tokens or CONTIGUOUS, *spread), tokens)


def check_one_sequence(columns: list[tuple[str, ...]], argument: str) -> None:
    """Raises a ``ValueError``, for zigzag tokens, unless dims other than dim 0 are split over a single tuple of axes.

    ``columns`` has the distinct tuples of axes that split such dims; ``argument`` is the user's argument, for the
    error.
    """
    if len(columns) != 1:
        dims_text = f"other dims over {' and over '.join(map(str, columns))}" if columns else "no sequence"
        raise ValueError(
            f"layout='zigzag', and {argument} splits {dims_text}; the tokens of one sequence are laid out, over the "
            "axes that split it. Pass batch_spec=P(('dp', 'fsdp'), 'cp'), say, of tokens [b, t]."
        )


def num_shards(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    """Returns the number of shards of a dim that is split over ``axes``: the product of the axis sizes; 1 for ()."""
    return math.prod([mesh.shape[axis] for axis in axes])


def _named(path: str, spec: Any, mesh: Mesh | AbstractMesh) -> tuple[tuple[str, ...], ...]:
    """Returns, for each dim, the axes in ``spec``, a leaf's entry of a user's ``batch_spec``.

    P(("a", "b"), None) gives (("a", "b"), ()). Raises a ``TypeError`` unless ``spec`` is a ``PartitionSpec`` of names
    and None, and a ``ValueError`` if the mesh lacks an axis, or if an axis splits two dims. ``path`` names the leaf in
    errors.
    """
    name = named_leaf("batch_spec", path)
    if not isinstance(spec, PartitionSpec) or PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise TypeError(
            f"{name} is {kind_of(spec) if not isinstance(spec, PartitionSpec) else spec}, and a PartitionSpec of names "
            "of axes and None is needed: P(('dp', 'fsdp'), 'cp'), with P = jax.sharding.PartitionSpec."
        )
    entries = tuple(map(entry_axes, spec))
    # `shard_map` rejects both of the following too, but names neither the argument nor the leaf.
    axes = [axis for entry in entries for axis in entry]
    if missing := [axis for axis in axes if axis not in mesh.shape]:
        raise ValueError(
            f"{name}={spec}: the mesh has no axis {missing[0]!r}; its axes are {dict(mesh.shape)}. Name one of these."
        )
    if twice := [axis for axis in axes if axes.count(axis) > 1]:
        raise ValueError(f"{name}={spec} names the axis {twice[0]!r} twice; an axis splits one dim of a leaf.")
    return entries


def _columns(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> dict[int, tuple[str, ...]]:
    """Returns the split of dims other than dim 0: a dict from dim to the axes of size 2 or more that split the dim.

    Dims that no such axis splits are left out. On a mesh with "cp" of size 2, P("dp", "cp") gives {1: ("cp",)}.
    """
    columns = {}
    for dim, entry in enumerate(spec):
        names = () if entry is PartitionSpec.UNCONSTRAINED else entry_axes(entry)
        if dim and (axes := tuple(axis for axis in names if mesh.shape[axis] > 1)):
            columns[dim] = axes
    return columns
