"""Units: modules that gather all their parameters to run. This file has the parts shared by module libraries.

  select   ``as_predicate``: chooses the units of a model; ``public_methods``: lists the methods that enter a unit
  enter    ``entered``: names the unit in profiles, and the unit's input; ``gather_here``: gathers the parameters
  leave    ``shard_here``: splits the parameters that an initialisation has made

A module library is described by a ``ModuleSystem``, and has a file that calls the functions here: ``linen_module``,
``nnx_module``. Such a file does the following; variables are {"params": {...}}, with the paths of the module:
  choose   ``as_predicate(where, system)`` for each module of the model; inner units before the modules around them
  init     ``shard_here(policy, variables)`` when a unit has made its parameters
  run      ``entered(system, name, run, module, args, kwargs)`` for each method in ``public_methods``: ``run`` calls
           ``gather_here`` and then the method on the gathered parameters. ``dropping.dropping(run, ...)`` adds the
           option to gather again in the backward pass
  extend   the hooks of ``extension`` that the file supports: ``computed_from_shards``, ``arguments_from`` and
           ``initialising`` around a method, and the argument ``extensions`` of ``gather_here``. A hook that is left
           out has no effect on modules of the library

Entering and leaving depend on where the module runs:
  inside shard_map        values are shards: gathered on entry, and split after init
  under jax.set_mesh      values are global: init adds boxes, apply strips the boxes, XLA adds the communication
  anywhere else           values are global and bare: the module is the plain module
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.extension import COLLECTIONS, Extension, check_paths, named_wires
from xlstm_jax.distributed.data_parallel.leaf import (
    BOXES,
    SPLIT_BY_RULES,
    Sharded,
    full_value_error,
    gather_leaf,
    is_box,
    is_gathered_here,
    leaf_of,
    path_in_model,
    read_value,
)
from xlstm_jax.distributed.data_parallel.planned import PLANNED_DEVICE, PlannedLeaf, plan_params
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.shard import box_params, box_shards, with_unit
from xlstm_jax.distributed.data_parallel.shared_collectives import gathers
from xlstm_jax.distributed.data_parallel.trees import (
    flatten_with_path,
    leaves_with_path,
    map_leaves_with_path,
    sharded_leaves,
)
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.explicit_axes import unsplit_over
from xlstm_jax.formatting import kind_of
from xlstm_jax.program_names import BLOCK_INPUT, GATHER_SCOPE

OF_ARRAYS = "arrays"  # the collection of arrays that a module of NNX holds without a variable around them
Method = Callable[..., Any]
Predicate = Callable[[str, Any], Any]


@dataclass(frozen=True)
class ModuleSystem:
    """Description of a module library (Linen, NNX), for the functions of this file.

    Attributes:
      module_class: base class of all modules of the library. Public methods of this class itself enter no unit.
      checkpoint: the library's ``jax.checkpoint`` for a function of (module, arrays), if it differs from JAX's.
      is_method: returns whether an attribute of a class is a method that may enter a unit.
      objects: classes of arguments that pass through transformations unchanged, even if a class is a pytree.
    """

    module_class: type[Any]
    checkpoint: Callable[..., Method] = jax.checkpoint
    is_method: Callable[[Any], bool] = inspect.isfunction
    objects: tuple[type[Any], ...] = ()


# ------------------------------------------------------------------------------------------------------------- select


def as_predicate(where: Any, system: ModuleSystem) -> Predicate:
    """Returns ``where`` of ``shard_modules`` as a function of (path, module) that is true for the chosen modules.

    A class or tuple of classes chooses their instances. A function is returned unchanged. ``system`` describes the
    module library (Linen or NNX), whose module classes are allowed.

    Raises:
      TypeError: ``where`` is not a module class, a tuple of module classes or a function.
    """
    # Classes first: a class is callable, too.
    classes = where if isinstance(where, tuple) else (where,)
    if classes and all(isinstance(cls, type) and issubclass(cls, system.module_class) for cls in classes):
        return lambda _, module: isinstance(module, classes)
    if callable(where) and not isinstance(where, (type, system.module_class)):
        return where
    raise TypeError(
        f"where is {kind_of(where)}: pass a module class (nn.Dense, nnx.Linear) or a tuple of them, a predicate of "
        "(path, module), as lambda path, module: path.startswith('h/'), or, of a Linen model, "
        "larger_than(size), or, of an NNX model, a filter of modules (nnx.All, nnx.PathContains)."
    )


def public_methods(cls: type[Any], system: ModuleSystem) -> list[str]:
    """Returns the names, sorted, of the methods in which a unit of class ``cls`` gathers its parameters.

    These are ``__call__`` and the public methods. Names that the base class of the module library (``nn.Module``,
    ``nnx.Module``) defines are left out.
    """
    return [name for name, _ in inspect.getmembers_static(cls, system.is_method) if is_public(name, system)]


def is_public(method: str, system: ModuleSystem) -> bool:
    """Returns whether a method name is ``__call__``, or a public name that the module library does not define."""
    return method == "__call__" or not (method.startswith("_") or hasattr(system.module_class, method))


# -------------------------------------------------------------------------------------------------------------- enter


def running(axes: tuple[str, ...]) -> Literal["manual", "global", "plain"]:
    """Returns how a wrapped module with parameters split over ``axes`` runs: "manual", "global" or "plain".

    "manual": all axes are bound, as inside ``shard_map``. "global": no axis is bound, and the mesh of ``jax.set_mesh``
    has all axes. "plain": no axis is bound, and no mesh is set.

    Raises:
      ValueError: no case fits: some axes are bound and others are not, or the mesh lacks an axis.
    """
    unbound = [axis for axis in axes if not collectives.is_bound(axis)]
    if not unbound:
        return "manual"
    mesh = jax.sharding.get_abstract_mesh()
    if len(unbound) == len(axes) and mesh.shape.keys() >= set(axes):
        return "global"
    if mesh.empty:
        return "plain"
    # No mode fits: some axes are bound and others are not, or the mesh lacks an axis.
    if mesh.manual_axes:
        raise ValueError(collectives.unbound_message(unbound[0], "shard_module_params"))
    raise _no_axis(next((axis for axis in unbound if axis not in mesh.shape), unbound[0]))


def _no_axis(axis: str) -> ValueError:
    mesh = jax.sharding.get_abstract_mesh()
    where = "axis_sizes" if mesh.abstract_device == PLANNED_DEVICE else "the mesh that jax.set_mesh has set"
    bound = tuple(mesh.shape)
    return ValueError(f"shard_module_params: {axis!r} is not an axis of {where}, which has {bound}. Pass one of them.")


def entered(system: ModuleSystem, name: str, run: Method, module: Any, args: Any, kwargs: Any) -> Any:
    """Returns ``run(module, *args, **kwargs)``, called under ``jax.named_scope(f"{name}.sharded")``.

    ``run`` is a method of the unit ``module`` that gathers the parameters first: profiles and forecasts show the gather
    under this scope. Before, ``named_input`` names the input, so that remat policies can keep the input.
    """
    args, kwargs = named_input(system, args, kwargs)
    with jax.named_scope(f"{name}.sharded"):
        return run(module, *args, **kwargs)


def named_input(system: ModuleSystem, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns (args, kwargs) of a unit's method; float arrays in the first argument have the name BLOCK_INPUT.

    The name is given by ``checkpoint_name``, so that remat policies can keep the arrays. Without positional arguments,
    floats in each keyword argument are named. Later arguments, such as a mask, are often shared by the layers: keeping
    a copy per layer would take more memory.
    """
    first, rest = (args[:1], args[1:]) if args else (kwargs, ())
    # A box among the arguments is a parameter, and a library object is not an activation.
    one_leaf = (lambda node: isinstance(node, (*BOXES, *system.objects))) if system.objects else is_box
    leaves, treedef = flatten_with_path(first, one_leaf)
    named = [
        checkpoint_name(x, BLOCK_INPUT) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact) else x
        for _, x in leaves
    ]
    first = jax.tree.unflatten(treedef, named)
    return (first + rest, kwargs) if args else (args, first)


def gather_here(
    policy: ShardPolicy,
    variables: PyTree,
    module: tuple[str, ...] | None = None,
    extensions: Sequence[Extension] = (),
) -> PyTree:
    """Returns the variables of a unit (wrapped module) as the module reads them: gathered, without boxes.

    Inside ``shard_map`` each split leaf is gathered over the axes of the unit; a gather is differentiable, and its
    backward pass scatters the gradient. Under ``jax.set_mesh`` and elsewhere leaves are global arrays, and only boxes
    and padding are removed. Two kinds of leaves stay in boxes: leaves of units inside this module, and leaves that are
    also split over an axis outside of the unit ("tp", say). Leaves without a box are unchanged.

    Args:
      policy: the options of the unit.
      variables: collections of the module, including "params".
      module: the path of a Linen module in the model, for leaf names in errors.
      extensions: extensions of the unit, which may choose wires (formats of sent shards), and replace leaves.
    Raises:
      ValueError: a leaf is a global array where a shard was expected; or the ``shard_map`` or the mesh lacks an axis of
        the unit (``running``); or an extension returns a wire or a replacement for a path that no leaf has.
    """
    is_manual = running(policy.axes) == "manual"
    # The box of a leaf names its copies: ``filled_from`` fills the None from the box.
    communication = replace(policy.communication, replicas=None)
    # Extensions may send leaves in other formats, replace leaves, or gather leaves together. Elsewhere nothing is sent.
    extensions = extensions if is_manual else ()
    wires = {
        path: (extension, wire)
        for extension in extensions
        if "wires" in extension.hooks
        for path, wire in extension.wires(policy, variables, module or ()).items()
    }
    replaced = {
        path: read
        for extension in extensions
        if "value_replacements" in extension.hooks
        for path, read in extension.value_replacements().items()
    }
    if wires or replaced:
        check_paths(extensions, [*wires, *replaced], [path for path, _ in leaves_with_path(variables)])
    together: Mapping[str, Callable[[], Any]] = {}
    if is_manual and communication.options:
        to_gather = {
            stored: (path_in_model(module, stored), box)
            for stored, box in sharded_leaves(variables)
            if stored not in replaced and stored not in wires and is_gathered_here(stored, box) and box.axes
        }
        together = gathers(to_gather, policy.axes, communication)

    def as_module_reads(stored: str, leaf: Any) -> Any:
        box = leaf_of(leaf)
        if stored in replaced:
            return replaced[stored](box)
        if not is_box(leaf) or not is_gathered_here(stored, box):
            return leaf
        if not is_manual and isinstance(box, PlannedLeaf):
            return box.gathered(policy.axes)
        if not is_manual:
            # A global array is only unboxed. A box over other axes stays for the wrapper over those axes.
            return unsplit_over(read_value(box), policy.axes) if all(map(policy.has_axis, box.axes)) else leaf
        # A concrete global array was not passed through the shard_map. Global arrays of an outer jit are tracers, whose
        # types get lost in a scan of Linen; ``linen_module`` recognises those by their shapes.
        path, value = path_in_model(module, stored), box.value
        if isinstance(value, jax.Array) and not isinstance(value, Tracer) and split_over(box, policy.axes):
            raise closed_over_error(path, box, policy.axes)
        extension, wire = wires.get(stored, (None, None))
        axes = _with_axes_of_rules(policy, box) if SPLIT_BY_RULES in box.marks else policy.axes
        full = gather_leaf(box, axes, communication, path, wire, together.get(stored))
        if extension is not None:
            extension.on_gathered(stored, full)
        return full

    with jax.named_scope(GATHER_SCOPE) if is_manual else nullcontext():
        return map_leaves_with_path(as_module_reads, variables)


def _with_axes_of_rules(policy: ShardPolicy, box: Sharded) -> tuple[str, ...]:
    """Returns the mesh axes over which to gather the leaf in ``box``, which rules for logical names have split.

    These are the axes of the unit, then the bound axes in ``box.gathered_axes`` that the unit does not have.
    """
    others = [axis for axis in box.gathered_axes if not policy.has_axis(axis) and collectives.is_bound(axis)]
    return (*policy.axes, *others)


def split_over(leaf: Sharded, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes among ``axes`` that split the leaf, by its box, and that have two or more devices."""
    return collectives.spread_axes([axis for axis in leaf.axes if axis in axes])


def closed_over_error(path: str, leaf: Sharded, axes: tuple[str, ...]) -> ValueError:
    """Returns a ``ValueError``: the leaf at ``path`` has a full array in a box with axes, where a shard was expected.

    This occurs when a function under ``shard_map`` closes over variables instead of taking them as arguments.
    """
    return full_value_error(f"'{path}'", np.shape(leaf.value), split_over(leaf, axes))


# -------------------------------------------------------------------------------------------------------------- leave


def shard_here(policy: ShardPolicy, variables: PyTree) -> PyTree:
    """Returns the variables that a unit's ``init`` has made, with the large enough leaves split and boxed.

    The boxes record that this unit gathers the leaves. Inside ``shard_map`` each device keeps its shard. Under
    ``jax.set_mesh`` the values stay global, in boxes with axis names; for a plan, every leaf gets a box with the
    decision. Elsewhere the variables are returned unchanged, as are the replicated collections that extensions read.

    Raises:
      ValueError: the mesh lacks an axis of the unit or of ``replicas``; or only some axes of the unit are bound.
    """
    unsharded = {name: tree for name, tree in variables.items() if name in COLLECTIONS}
    variables = {name: tree for name, tree in variables.items() if name not in COLLECTIONS}
    mode, mesh = running(policy.axes), jax.sharding.get_abstract_mesh()
    if mode == "plain" or not jax.tree.leaves(variables):
        return variables | unsharded
    if mode == "manual":
        return with_unit(box_shards(variables, policy), variables) | unsharded
    copies = policy.communication.replicas
    if copies and (missing := [axis for axis in copies.axes if axis not in mesh.shape]):
        raise _no_axis(missing[0])
    sizes = {axis: mesh.shape[axis] for axis in policy.axes}
    if mesh.abstract_device == PLANNED_DEVICE:
        names = named_wires(unsharded, lambda path: policy.communication)
        return with_unit(plan_params(variables, sizes, policy, names), variables) | unsharded
    return with_unit(box_params(variables, sizes, policy), variables) | unsharded
