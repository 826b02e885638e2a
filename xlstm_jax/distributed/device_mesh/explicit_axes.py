"""Arrays with explicit types outside of the library's programs, and axes of type ``Auto`` inside.

On a mesh with explicit axes (the default of ``jax.make_mesh``) the type of an array contains its sharding, and JAX
refuses to combine types of two meshes. Programs here (``shard_map``, optimizers on global arrays) are written for
``Auto`` axes, where the type of an array contains no sharding:

  outside    f32[16@fsdp, 4]    -- on_auto_axes -->    f32[16, 4]    inside, under the same mesh with Auto axes
             f32[16@fsdp, 4]    <-- typed_like  --     f32[16, 4]    results in place of an argument have its type
             f32[16@fsdp, 4]    <--   placed    --     f32[16, 4]    new arrays are placed on the mesh that is set

Both conversions change types alone: nothing is moved or copied. Without explicit types nothing here adds an equation.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.device_mesh.checks import auto_mesh


def has_explicit_axes(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether an axis of the mesh is explicit."""
    return AxisType.Explicit in mesh.axis_types


def placed(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding on the mesh that ``jax.set_mesh`` has set with explicit axes; else the sharding unchanged.

    A mesh of other axes leaves the sharding unchanged, too.

    >>> split = NamedSharding(mesh, PartitionSpec("fsdp"))
    >>> placed(split) == split
    True
    >>> with jax.set_mesh(jax.make_mesh((2, 4), ("dp", "fsdp"))):
    ...     placed(split).mesh.axis_types
    (AxisType.Explicit, AxisType.Explicit)
    """
    return _placed(sharding, jax.sharding.get_abstract_mesh())


@functools.lru_cache(maxsize=4096)  # a step asks for each leaf of its state
def _placed(sharding: NamedSharding, around: AbstractMesh) -> NamedSharding:
    if not has_explicit_axes(around) or dict(around.shape) != dict(sharding.mesh.shape):
        return sharding
    kinds = dict(zip(around.axis_names, around.axis_types, strict=True))
    return sharding.update(mesh=sharding.mesh.update(axis_types=tuple(kinds[axis] for axis in sharding.mesh.axis_names)))


def on_auto_axes(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, like: Callable[..., PyTree] | None = None
) -> Callable[..., Any]:
    """Returns ``function`` for arguments of any mesh types; ``function`` runs on axes of type ``Auto``.

    Args:
      function: a function that is traced by ``jax.jit``, or called on global arrays.
      mesh: the mesh of the function.
      like: function of the same arguments that returns, as a prefix of the results, the arguments that they replace,
        and None for replicated results; see ``typed_like``. None: results are returned as they are.
    """
    inside = auto_mesh(mesh).abstract_mesh

    @functools.wraps(function)
    def converted(*args: Any, **kwargs: Any) -> Any:
        around = jax.sharding.get_abstract_mesh()
        if not (has_explicit_axes(around) or any(map(_is_explicit, jax.tree.leaves((args, kwargs))))):
            return function(*args, **kwargs)
        with jax.sharding.use_abstract_mesh(inside):
            auto_args, auto_kwargs = jax.tree.map(_with_auto_type, (args, kwargs))
            results = function(*auto_args, **auto_kwargs)
        return results if like is None else typed_like(results, like(*args, **kwargs), mesh)

    return converted


def typed_like(results: PyTree, like: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Returns results of ``on_auto_axes`` with the types of the arguments that they replace.

    Args:
      results: the results, of types without a sharding.
      like: the arguments that the results replace, leaf by leaf; None for results that are replicated: these are placed
        on the mesh that is set. A tuple gives one of both for each entry of the tuple of results.
      mesh: the mesh of the results.
    """
    if type(like) is tuple:
        return tuple(typed_like(result, part, mesh) for result, part in zip(results, like, strict=True))
    leaves, structure = jax.tree.flatten(results)
    if like is None:
        shardings = [placed(NamedSharding(auto_mesh(mesh), PartitionSpec()))] * len(leaves)
    else:
        # By order and not by structure: a step may change static fields of a state.
        shardings = [jax.typeof(leaf).sharding for leaf in jax.tree.leaves(like)]
    typed = [_with_type(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
    return jax.tree.unflatten(structure, typed)


def sharding_of_input(x: Any, wanted: NamedSharding) -> NamedSharding:
    """Returns ``wanted``, or the sharding of ``x`` if ``x`` already is on this mesh in another way.

    Under ``jax.set_mesh`` every new array is on the mesh, and ``jax.jit(in_shardings=...)`` moves no such array.
    """
    if isinstance(x, jax.core.Tracer):
        its = jax.typeof(x).sharding
        is_there = has_explicit_axes(its.mesh)
    else:
        its = getattr(x, "sharding", None)
        is_there = isinstance(its, NamedSharding) and getattr(x, "committed", True)
    if not is_there or dict(its.mesh.shape) != dict(wanted.mesh.shape) or its.is_equivalent_to(wanted, np.ndim(x)):
        return wanted
    return its


def on_set_mesh(tree: PyTree) -> PyTree:
    """Returns the tree with arrays of another mesh type placed on the explicit mesh that is set, without copies."""
    if not has_explicit_axes(jax.sharding.get_abstract_mesh()):
        return tree
    return jax.tree.map(_moved, tree)


def _moved(leaf: Any) -> Any:
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return leaf
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding) or (there := placed(sharding)) == sharding:
        return leaf
    return jax.device_put(leaf, there)


def _is_explicit(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and has_explicit_axes(jax.typeof(leaf).sharding.mesh)


def _with_auto_type(leaf: Any) -> Any:
    # Under the mesh with Auto axes: there a spec without names leaves the sharding to XLA, and means no copy.
    return jax.sharding.reshard(leaf, PartitionSpec(*[None] * np.ndim(leaf))) if _is_explicit(leaf) else leaf


def _with_type(leaf: Any, sharding: NamedSharding) -> Any:
    # A type on a mesh of explicit and Auto axes may name a part of the axes of a dim alone, and XLA would gather the dim
    # over the others. Results on such a mesh keep their type, and `on_set_mesh` moves them after the call.
    if set(sharding.mesh.axis_types) != {AxisType.Explicit}:
        return leaf
    return jax.sharding.reshard(leaf, NamedSharding(sharding.mesh.abstract_mesh, sharding.spec))
