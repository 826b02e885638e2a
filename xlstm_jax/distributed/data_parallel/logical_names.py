"""Logical names of dims, by which models in the style of MaxText, T5X and Flax's examples describe sharding.

    kernel_init = nn.with_logical_partitioning(init, ("embed", "mlp"))          names of a parameter's dims
    param_with_axes("kernel", init, shape, axes=("embed", "mlp"))               the same in flax.linen.partitioning
    with nn.logical_axis_rules((("embed", "fsdp"), ("mlp", None))): ...         mesh axis that splits each name

Names are interpreted as in Flax, except that axes missing from the mesh split nothing. The rules at the
initialisation of the model apply.

Under a mesh, Flax constrains the value of a box whenever the box is read. Some layers read a box before its value has
the shape of the names: ``nn.DenseGeneral`` initialises a flat matrix, in a box with the names of the kernel, and
reshapes the matrix. JAX refuses this constraint (and inside ``shard_map`` any constraint along a manual axis). So
initialisers of a model make boxes here that are read without a constraint.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta
from flax.core.spmd import composite_rules
from flax.linen.partitioning import AxisMetadata
from flax.linen.spmd import logical_to_mesh_axes

from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, axes_entry, entry_axes


def is_logical(leaf: Any) -> bool:
    """Returns whether ``leaf`` is in a box of logical names with rules; without rules the names are mesh axes."""
    return isinstance(leaf, nn.LogicallyPartitioned) and bool(leaf.rules or nn.get_logical_axis_rules())


@contextmanager
def rules_of_mesh() -> Iterator[None]:
    """Restricts rules to axes of the current mesh inside the context; inside ``shard_map`` rules are removed.

    Boxes that initialisers of Linen modules make inside the context are read without a constraint.
    """
    # Flax constrains parameters and activations by the rules. JAX refuses a constraint along an axis that is not in the
    # mesh, and along a manual axis.
    mesh = jax.sharding.get_abstract_mesh()
    rules = () if mesh.manual_axes else nn.get_logical_axis_rules()
    known = [(name, _there(entry, mesh.shape)) for name, entry in rules]
    with nn.logical_axis_rules(known), nn.intercept_methods(_boxing_without_constraints):
        yield


# ------------------------------------------------------------------------------------------- boxes without constraints


class _Named(meta.Partitioned[Any]):
    """Box of mesh axes as ``nn.with_partitioning`` makes it, but read without a constraint."""

    def unbox(self, apply_constraint: bool = True) -> Any:
        del apply_constraint
        return self.value


class _LogicallyNamed(nn.LogicallyPartitioned):
    """Box of logical names as Flax makes it, but read without a constraint."""

    def unbox(self, apply_constraint: bool = True) -> Any:
        del apply_constraint
        return self.value


_WITHOUT_CONSTRAINTS: dict[type[Any], type[Any]] = {
    nn.Partitioned: _Named,
    nn.LogicallyPartitioned: _LogicallyNamed,
}
_AS_FLAX_HAS_IT = {ours: flax for flax, ours in _WITHOUT_CONSTRAINTS.items()}


def as_flax_has_it(leaf: Any) -> Any:
    """Returns ``leaf`` in Flax's box class if it is in a box without constraints, else unchanged."""
    return _in_box_of(leaf, _AS_FLAX_HAS_IT)


def _in_box_of(leaf: Any, classes: dict[type[Any], type[Any]]) -> Any:
    cls = classes.get(type(leaf))
    if cls is None:
        return leaf
    return cls(**{field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)})


# A dataclass, since Linen compares modules, including their initialisers, to look up the cache of ``nn.jit``.
@dataclasses.dataclass(frozen=True)
class _Initialiser:
    """Initialiser of a model whose boxes are read without a constraint."""

    plain: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _in_box_of(self.plain(*args, **kwargs), _WITHOUT_CONSTRAINTS)


def _boxing_without_constraints(
    method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    """Interceptor for ``nn.intercept_methods``: wraps a module's initialisers in ``_Initialiser`` during a method."""
    module = context.module
    fields = {field.name: getattr(module, field.name, None) for field in dataclasses.fields(module)}
    # ``kernel_init``, ``embedding_init``: fields in Flax, which modules pass on to submodules.
    plain = {
        name: value
        for name, value in fields.items()
        if "init" in name and callable(value) and not isinstance(value, nn.Module | type | _Initialiser)
    }
    for name, value in plain.items():
        object.__setattr__(module, name, _Initialiser(value))
    try:
        return method(*args, **kwargs)
    finally:
        for name, value in plain.items():
            object.__setattr__(module, name, value)


# ------------------------------------------------------------------------- names in a further collection

_AXES = "_axes"  # ``flax.linen.partitioning`` names the collection, and each entry of it, by this suffix


def with_names_of_collections(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns variables of ``model.init`` with names from collections like ``params_axes`` as boxes around parameters.

    Models in the style of T5X store names in collections of this kind. A collection with only names is removed;
    without rules the names have no effect. Leaves that a wrapped module has split stay unchanged.
    """
    of_names = {name for name, tree in variables.items() if name.endswith(_AXES) and _holds_names(tree)}
    rest = {name: tree for name, tree in variables.items() if name not in of_names}
    for collection in of_names:
        name = collection.removesuffix(_AXES)
        if name in rest and nn.get_logical_axis_rules():
            rest[name] = _boxed_by(rest[name], variables[collection])
    return rest


def _holds_names(tree: Any) -> bool:
    """Returns whether a collection is not empty and has only names as leaves."""
    if isinstance(tree, Mapping):
        return bool(tree) and all(map(_holds_names, tree.values()))
    return isinstance(tree, AxisMetadata)


def _boxed_by(tree: Any, names: Any) -> Any:
    """Returns the tree with a box of logical names around each bare value that has an entry in ``names``."""
    if not isinstance(tree, Mapping):
        return tree
    boxed = {}
    for key, value in tree.items():
        entry = names.get(f"{key}{_AXES}")
        is_named = isinstance(entry, AxisMetadata) and not isinstance(value, meta.AxisMetadata)
        boxed[key] = nn.LogicallyPartitioned(value, tuple(entry.names)) if is_named else value
        if isinstance(value, Mapping) and isinstance(names.get(key), Mapping):
            boxed[key] = _boxed_by(value, names[key])
    return boxed


# ------------------------------------------------------------------------------------------------------- names as axes


def _there(entry: AxisEntry, sizes: Mapping[str, int]) -> AxisEntry:
    return axes_entry(tuple(axis for axis in entry_axes(entry) if axis in sizes))


def mesh_names(box: Any) -> tuple[AxisEntry, ...]:
    """Returns a box's names as axes of the current mesh: logical names by the box's rules, or by the current rules."""
    return _by_rules(tuple(box.names), box.rules) if is_logical(box) else tuple(box.names)


def _by_rules(names: tuple[Any, ...], rules: Any) -> tuple[AxisEntry, ...]:
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(_there(entry, sizes) for entry in logical_to_mesh_axes(names, rules) or ())


def names_in_metadata(names: tuple[Any, ...], rules: Any) -> tuple[tuple[AxisEntry, ...], bool]:
    """Returns an NNX variable's names as axes of the current mesh, and whether rules were applied to any name.

    The variable's rules and the current rules apply. NNX treats a name without a rule as an axis. In the presence of
    rules, a name without a rule splits nothing unless the mesh has the axis.
    """
    by_name = dict(composite_rules(nn.get_logical_axis_rules(), rules))
    mesh = jax.sharding.get_abstract_mesh()
    # Without a mesh, a model that is bound or inspected keeps names without a rule.
    entries = tuple(by_name.get(name, name) for name in names)
    if by_name and not mesh.empty:
        entries = tuple(_there(entry, mesh.shape) for entry in entries)
    return entries, any(name in by_name for name in names)


def layer_name(name: str | None) -> AxisEntry:
    """Returns the entry for a layer dim that ``nn.scan`` adds with a name in ``metadata_params``, by rules if any."""
    return _by_rules((name,), None)[0] if nn.get_logical_axis_rules() else name
