"""Conversions between arrays with explicit types, outside of the library's programs, and axes of type ``Auto`` inside.

On a mesh with explicit axes (the default of ``jax.make_mesh``) the type of an array contains its sharding, and JAX
refuses to combine types of two meshes. Programs of this library (``shard_map``, optimizers on global arrays) are
written for ``Auto`` axes, where the type of an array contains no sharding:

  outside    f32[16@fsdp, 4]    -- on_auto_axes -->    f32[16, 4]    inside, under the same mesh with Auto axes
             f32[16@fsdp, 4]    <--  typed_like  --    f32[16, 4]    results that replace an argument get its type
             f32[16@fsdp, 4]    <--    placed    --    f32[16, 4]    new arrays are placed on the set mesh

The *set mesh* is the mesh of ``jax.set_mesh``. The conversions change only types: no values are moved or copied.
Without explicit types no equation is added. ``outside_set_mesh`` converts arguments and results of functions that call
several programs on arrays with values.
"""

import functools
import inspect
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree

AnyMesh = TypeVar("AnyMesh", bound=Mesh | AbstractMesh)
Function = TypeVar("Function", bound=Callable[..., Any])


def with_auto_axes(mesh: AnyMesh) -> AnyMesh:
    """Returns the mesh with each axis of type ``Auto``."""
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))  # pyright: ignore[reportReturnType]


def placed(shardings: PyTree) -> PyTree:
    """Returns a tree of shardings, moved to the set mesh (``jax.set_mesh``) if the set mesh has explicit axes.

    A sharding is unchanged if no mesh with explicit axes is set, or if the set mesh has other axes or sizes.

    >>> split = NamedSharding(mesh, PartitionSpec("fsdp"))
    >>> placed(split) == split
    True
    >>> with jax.set_mesh(jax.make_mesh((2, 4), ("dp", "fsdp"))):
    ...     placed(split).mesh.axis_types[0].name
    'Explicit'
    """
    around = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in around.axis_types:
        return shardings
    return jax.tree.map(lambda sharding: _placed(sharding, around), shardings)


@functools.lru_cache(maxsize=4096)  # called for each leaf of a state, at each step
def _placed(sharding: NamedSharding, around: AbstractMesh) -> NamedSharding:
    if dict(around.shape) != dict(sharding.mesh.shape):
        return sharding
    kinds = dict(zip(around.axis_names, around.axis_types, strict=True))
    types = tuple(kinds[axis] for axis in sharding.mesh.axis_names)
    return sharding.update(mesh=sharding.mesh.update(axis_types=types))


def on_auto_axes(
    function: Callable[..., Any],
    mesh: Mesh | AbstractMesh | None = None,
    *,
    like: Callable[..., PyTree] | None = None,
    on_mixed_axes: bool = False,
) -> Callable[..., Any]:
    """Returns a wrapper of ``function`` that takes arrays on axes of any type, and calls ``function`` on ``Auto`` axes.

    If the set mesh or the type of an array argument has explicit axes, the wrapper removes the shardings from the types
    of the arguments and calls ``function`` under the mesh with each axis of type ``Auto``. Otherwise the wrapper only
    calls ``function``.

    Args:
      function: a function traced by ``jax.jit``, or called on global arrays.
      mesh: the mesh for ``function``; None: the mesh with explicit axes, as found.
      like: a function of the same arguments that returns the arguments to be replaced by the results; the results get
        the types of these arguments, see ``typed_like``. None: the types of results contain no sharding;
        ``jax.jit(out_shardings=...)`` places the results.
      on_mixed_axes: with ``like``: whether results on a mesh of explicit and Auto axes get types, too. False for the
        results of a program, which ``on_set_mesh`` places.
    """

    @functools.wraps(function)
    def converted(*args: Any, **kwargs: Any) -> Any:
        arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.Array)]
        meshes = [jax.sharding.get_abstract_mesh(), *[jax.typeof(array).sharding.mesh for array in arrays]]
        explicit = [around for around in dict.fromkeys(meshes) if AxisType.Explicit in around.axis_types]
        if not explicit:
            return function(*args, **kwargs)
        inside = with_auto_axes(explicit[0] if mesh is None else mesh.abstract_mesh)
        with jax.sharding.use_abstract_mesh(inside):
            auto_args, auto_kwargs = jax.tree.map(_with_auto_type, (args, kwargs))
            results = function(*auto_args, **auto_kwargs)
        return results if like is None else typed_like(results, like(*args, **kwargs), on_mixed_axes=on_mixed_axes)

    return converted


def typed_like(results: PyTree, like: PyTree, *, on_mixed_axes: bool = True) -> PyTree:
    """Returns results of a function on ``Auto`` axes, with shardings in their types, as arrays on explicit axes have.

    The results are unchanged if no mesh has explicit axes, or if any of the arguments in ``like`` is in host memory.

    Args:
      results: the results, of types without a sharding.
      like: the source of the types: the arguments to be replaced by the results, paired with the results in leaf order;
        or a ``PartitionSpec`` on the set mesh for every result. A tuple has an entry of either kind for each entry of
        the tuple of results.
      on_mixed_axes: whether results on a mesh of explicit and Auto axes get a sharding in their types. If False, only
        results whose entry of ``like`` is the spec ``P()`` do. The type of a dim may name only some of the dim's axes
        there, and XLA gathers the dim over the remaining axes.
    """
    if type(like) is tuple:
        return tuple(
            [typed_like(one, of_one, on_mixed_axes=on_mixed_axes) for one, of_one in zip(results, like, strict=False)]
        )
    leaves, structure = jax.tree.flatten(results)
    if isinstance(like, PartitionSpec):
        around = jax.sharding.get_abstract_mesh()
        if AxisType.Explicit not in around.axis_types:
            return results
        # A spec names explicit axes alone.
        types = dict(zip(around.axis_names, around.axis_types, strict=True))
        explicit = [[axis for axis in _axes_of(entry) if types[axis] == AxisType.Explicit] for entry in like]
        shardings = [NamedSharding(around, PartitionSpec(*[tuple(axes) or None for axes in explicit]))] * len(leaves)
        on_mixed_axes = on_mixed_axes or not any(like)
    else:
        # Leaves are paired by order, not by structure, because a step may change static fields of a state.
        arguments = jax.tree.leaves(like)
        # JAX 0.12 pairs donated arguments with typed results by bytes alone, and refuses to run if one of a pair is in
        # host memory. Without types XLA makes the pairs, and `on_set_mesh` places the results after the call.
        if any(map(_is_on_host, arguments)):
            return results
        shardings = [jax.typeof(argument).sharding for argument in arguments]
    typed = [_with_type(leaf, sharding, on_mixed_axes) for leaf, sharding in zip(leaves, shardings, strict=False)]
    return jax.tree.unflatten(structure, typed)


def splits_over_both_types(spec: Iterable[Any]) -> bool:
    """Returns whether any entry of a spec (the axes of a dim) has explicit axes and axes of another type.

    The types are the types of the axes of the set mesh.
    """
    around = jax.sharding.get_abstract_mesh()
    types = dict(zip(around.axis_names, around.axis_types, strict=True))
    kinds = [{types.get(axis) == AxisType.Explicit for axis in _axes_of(entry)} for entry in spec]
    return any(len(found) > 1 for found in kinds)


def unsplit_over(x: Any, axes: Container[str]) -> Any:
    """Returns an array without ``axes`` in its type: gathered over the explicit axes in ``axes``, else unchanged.

    >>> with jax.set_mesh(jax.make_mesh((2, 4), ("dp", "fsdp"))):
    ...     x = jax.sharding.reshard(jax.numpy.ones((8, 4)), PartitionSpec("fsdp", "dp"))
    ...     jax.typeof(unsplit_over(x, ["fsdp"]))
    ShapedArray(float32[8,4@dp])
    """
    sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    # The type names only explicit axes.
    entries = list(map(_axes_of, sharding.spec))
    left = [tuple(axis for axis in entry if axis not in axes) for entry in entries]
    return x if left == entries else jax.sharding.reshard(x, PartitionSpec(*(entry or None for entry in left)))


def _axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the axes of an entry of a spec as a tuple: () for None, ("fsdp",) for "fsdp"."""
    return entry if isinstance(entry, tuple) else (entry,) * (entry is not None)


def sharding_of_input(x: Any, sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding with which a program takes ``x``: ``sharding``, or the sharding that ``x`` has already.

    The sharding of ``x`` is returned if its mesh has the same axes and sizes as the mesh of ``sharding``, and if ``x``
    is split in another way. Also required: the array is committed, or, for a tracer, the mesh has explicit axes. In any
    other case the result is ``sharding``. The reason: under ``jax.set_mesh`` every new array is on the set mesh, and
    ``jax.jit(in_shardings=...)`` does not move such an array.
    """
    if isinstance(x, Tracer):
        its = jax.typeof(x).sharding
        is_there = AxisType.Explicit in its.mesh.axis_types
    else:
        its = getattr(x, "sharding", None)
        is_there = getattr(x, "committed", True)
    if (
        not isinstance(its, NamedSharding)
        or not is_there
        or dict(its.mesh.shape) != dict(sharding.mesh.shape)
        or its.is_equivalent_to(sharding, np.ndim(x))
    ):
        return sharding
    return its


def on_set_mesh(tree: PyTree) -> PyTree:
    """Returns the tree with its arrays on the set mesh, if this mesh has explicit axes; else unchanged.

    The memory of the arrays is shared, not copied. An array on a mesh of different axes is placed on the set mesh only
    if the array is replicated over the same devices. Leaves that are not on a mesh are unchanged.
    """
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return tree
    return jax.tree.map(_on_set_mesh, tree)


def _on_set_mesh(leaf: Any) -> Any:
    """Returns an array with a sharding on the set mesh that splits the array as before, into the same shards.

    Unchanged if the leaf is not on a mesh. Also unchanged if the set mesh has other axes or sizes than the array's
    mesh, except for an array replicated over the same devices. Called only under a set mesh with explicit axes.
    """
    if not _is_on_mesh(leaf):
        return leaf
    sharding = placed(leaf.sharding)
    if AxisType.Explicit not in sharding.mesh.axis_types and _is_replicated_on(around := _set_mesh(), sharding):
        sharding = NamedSharding(around, PartitionSpec())
    # Programs return specs with an entry for each dim, and in JAX 0.12 an empty spec for replicated arrays. Arguments
    # get specs in the same form, because the second step would compile again after a different spec.
    if AxisType.Explicit in sharding.mesh.axis_types:
        entries = [*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec))] if any(sharding.spec) else []
        sharding = sharding.update(spec=PartitionSpec(*entries))
    return _moved(leaf, sharding)


def _is_replicated_on(mesh: Mesh | None, sharding: NamedSharding) -> TypeGuard[Mesh]:
    """Returns whether the sharding replicates arrays over exactly the devices of ``mesh``, in the same order.

    The memory of such an array can be shared with an array on ``mesh``. False without a mesh.
    """
    own_mesh = sharding.mesh
    same = mesh is not None and isinstance(own_mesh, Mesh) and list(own_mesh.devices.flat) == list(mesh.devices.flat)
    return same and sharding.is_fully_replicated


def outside_set_mesh(function: Function, inside: str | None = None) -> Function:
    """Decorator: returns a wrapper that calls ``function`` without a set mesh, and then places the results.

    The arguments are on their meshes with ``Auto`` axes during the call; the results are placed on the set mesh as by
    ``on_set_mesh``. Without a set mesh, and during a trace, the wrapper only calls ``function``. ``inside`` is the name
    of an argument of ``function``, a function that is still called under the set mesh; None: no argument.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if jax.sharding.get_abstract_mesh().empty or (around := _set_mesh()) is None:
            return function(*args, **kwargs)
        if inside is not None:
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.arguments[inside] = _under(around, bound.arguments[inside])
            args, kwargs = bound.args, bound.kwargs
        with jax.set_mesh(None):
            results = function(*_on_auto_mesh(args), **_on_auto_mesh(kwargs))
        return on_set_mesh(results)

    return called  # type: ignore[return-value]


def outside_other_mesh(tree: PyTree) -> AbstractContextManager[Any]:
    """Returns a context without a set mesh, if a leaf of the tree is on a mesh of another size than the set mesh.

    The size of a mesh is its number of devices. In other cases the context changes nothing. JAX cannot trace a program
    for 64 devices under a set mesh of 8 devices.
    """
    around = _set_mesh()
    sizes = {leaf.sharding.mesh.size for leaf in jax.tree.leaves(tree) if _is_on_mesh(leaf)}
    return jax.set_mesh(None) if around is not None and sizes - {around.size} else nullcontext()


def _set_mesh() -> Mesh | None:
    """Returns the mesh that ``jax.set_mesh`` has set; None if no mesh is set, or while JAX traces a function."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # while tracing, where the mesh cannot be changed
        return None
    return None if mesh.empty else mesh


def _under(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper that calls ``function`` while ``mesh`` is the set mesh (``jax.set_mesh``).

    Before the call the arrays of the arguments are moved to ``mesh`` (``on_set_mesh``). Afterwards the arrays of the
    results are moved to meshes with axes of type ``Auto``.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with jax.set_mesh(mesh):
            results = function(*on_set_mesh(args), **on_set_mesh(kwargs))
        return _on_auto_mesh(results)

    return called


def _on_auto_mesh(tree: PyTree) -> PyTree:
    """Returns the tree with its arrays on their meshes with each axis of type ``Auto``; memory is shared, not copied.

    Tracers, and leaves that are not on a mesh, are unchanged.
    """

    def on_auto_mesh(leaf: Any) -> Any:
        if not _is_on_mesh(leaf):
            return leaf
        return _moved(leaf, leaf.sharding.update(mesh=with_auto_axes(leaf.sharding.mesh)))

    return jax.tree.map(on_auto_mesh, tree)


def _is_on_mesh(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not isinstance(leaf, Tracer)
    return is_array and isinstance(leaf.sharding, NamedSharding)


def _moved(leaf: Any, sharding: NamedSharding) -> Any:
    if sharding == leaf.sharding:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    if leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    # device_put cannot move arrays on several processes to a mesh with different types. The devices are the same.
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards, dtype=leaf.dtype)


def _mesh_of(leaf: Any) -> AbstractMesh:
    """Returns the mesh of an array's type; an empty mesh if ``leaf`` is not an array."""
    return jax.typeof(leaf).sharding.mesh if isinstance(leaf, jax.Array) else AbstractMesh((), ())


def _with_auto_type(leaf: Any) -> Any:
    # Called under the mesh with Auto axes, where a spec without names leaves the sharding to XLA, without a copy.
    if AxisType.Explicit not in _mesh_of(leaf).axis_types:
        return leaf
    return jax.sharding.reshard(leaf, PartitionSpec(*[None] * np.ndim(leaf)))


def _is_on_host(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _with_type(leaf: Any, sharding: NamedSharding, on_mixed_axes: bool) -> Any:
    """Returns the traced array ``leaf`` with ``sharding`` in its type if the mesh of ``sharding`` has explicit axes.

    Unchanged without explicit axes; also if the mesh has axes of type ``Auto``, too, and ``on_mixed_axes`` is False.
    """
    types = sharding.mesh.axis_types
    if AxisType.Explicit not in types or (AxisType.Auto in types and not on_mixed_axes):
        return leaf
    return jax.sharding.reshard(leaf, NamedSharding(sharding.mesh.abstract_mesh, sharding.spec))
