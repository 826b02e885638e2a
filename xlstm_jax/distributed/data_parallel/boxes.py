"""Boxes of Flax as the library uses them: the meaning of names, reads without a constraint, a class with fast flatten.

  DimNames                   converts the names of dims in a model's boxes to mesh axes; by default each name is an axis
  boxes_without_constraints  context in which initialisers make boxes that are read without a sharding constraint
  ReadAsArray                mixin by which a box is read like an array
  QuickBox                   base class of the library's own boxes (``leaf.Sharded``), with a fast flatten and unflatten

*Names.* A feature with another meaning of names (``extensions/logical_names``) is a subclass of ``DimNames`` in a
separate file, and appends an instance to ``READERS``. The core calls the methods on ``reader()``.

*Constraints.* Where a mesh is set, Flax constrains the value of a box whenever the box is read. ``nn.DenseGeneral``
reads a box before the value has the dims of the names: it initialises a flat matrix in a box with the names of the
kernel, and reshapes. JAX refuses this constraint (and inside ``shard_map`` every constraint along a manual axis). So
initialisers that run under ``boxes_without_constraints`` make boxes without constraints, and ``trees.with_mesh_names``
converts the boxes of the result back to Flax's.

*Fast flatten.* Each call of a jitted function flattens and unflattens every box of a state.
``flax.struct.dataclass`` registers classes by ``jax.tree_util.register_dataclass``: JAX then reads each field
separately to flatten a box, and unflattens by a call of the class with a keyword per field: several microseconds of
Python. A ``QuickBox`` stores the flattened form, and boxes unflattened from the same tree structure share a dict of
fields, which is possible because boxes are frozen. ``jax.tree.unflatten`` of a state with 434 leaves takes 0.12 to
0.19 ms with this class, and 0.43 to 0.59 ms with Flax's registration (processor time, Python 3.13): 3 % of the about
9 ms in which a step of this state is dispatched to eight devices.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import serialization
from flax.core import meta
from jax.tree_util import GetAttrKey, register_pytree_with_keys
from jax.typing import DTypeLike

from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry

# -------------------------------------------------------------------------------------------------------- names of dims


class DimNames:
    """Converts the names of dims to mesh axes. By default each name is the name of an axis."""

    def has_rules_for(self, leaf: Any) -> bool:
        """Returns whether rules map the names in the box ``leaf`` to mesh axes: here False for any leaf.

        A subclass overrides the method, and returns True for a box with logical names.
        """
        del leaf
        return False

    def mesh_names(self, box: Any) -> tuple[AxisEntry, ...]:
        """Returns the mesh axes that split each dim of the value in ``box``: here ``box.names``, as a tuple, unchanged.

        An entry is ``None`` (not split), an axis, or a tuple of axes. A subclass may map logical names to axes.
        """
        return tuple(box.names)

    def layer_name(self, name: str | None) -> AxisEntry:
        """Returns the mesh axes that split the layer dim that ``nn.scan`` adds: here ``name``, unchanged.

        ``name`` is the dim's name in the user's ``metadata_params`` of ``nn.scan``; ``None`` without a name.
        """
        return name

    def names_in_metadata(self, names: tuple[Any, ...], rules: Any) -> tuple[tuple[AxisEntry, ...], bool]:
        """Returns (axes, is_logical) for the dim names in an NNX variable's metadata: here ``(names, False)``.

        In a subclass, ``axes`` has the mesh axes of each dim, and ``is_logical`` says whether rules map names to axes.

        Args:
          names: a name, or ``None``, for each dim of the variable.
          rules: the ``sharding_rules`` of the variable, or ``None``; not used here.
        """
        del rules
        return names, False

    def names_from_collections(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns ``variables``, the variables of ``model.init`` by collection: here unchanged, in a new dict.

        A subclass moves dim names that the model keeps in separate collections into boxes around the parameters.
        """
        return dict(variables)

    def rules_of_mesh(self) -> AbstractContextManager[None]:
        """Returns a context manager for ``model.init``: here a context without effect.

        In the context of a subclass, rules for logical names refer only to axes of the current mesh.
        """
        return nullcontext()


READERS: list[DimNames] = [DimNames()]


def reader() -> DimNames:
    """Returns the last entry of ``READERS``: the ``DimNames`` object that converts the names in boxes to mesh axes."""
    return READERS[-1]


# -------------------------------------------------------------------------------------------- boxes without constraints


@contextmanager
def boxes_without_constraints() -> Iterator[None]:
    """Enters a context in which initialisers of Linen modules make boxes whose ``unbox`` sets no sharding constraint.

    If rules for logical names are in force, the rules inside the context refer only to axes of the current mesh.
    """
    rules = reader().rules_of_mesh() if nn.get_logical_axis_rules() else nullcontext()
    with rules, nn.intercept_methods(_boxing_without_constraints):
        yield


class Unconstrained:
    """Mixin for classes of boxes: ``unbox`` returns the value, without a sharding constraint."""

    value: Any

    def unbox(self, apply_constraint: bool = True) -> Any:
        del apply_constraint
        return self.value


class _Named(Unconstrained, meta.Partitioned[Any]):
    """``nn.Partitioned`` whose ``unbox`` returns the value without a sharding constraint."""


# For each class of boxes the class without constraints, and the other way round.
UNCONSTRAINED_BOX_OF: dict[type[Any], type[Any]] = {}
FLAX_BOX_OF: dict[type[Any], type[Any]] = {}


def read_without_constraints(boxes: type[Any], unconstrained: type[Any]) -> None:
    """Registers ``unconstrained`` to replace the box class ``boxes`` inside ``boxes_without_constraints``.

    Both are classes with the same fields; ``unbox`` of ``unconstrained`` sets no sharding constraint. The variables of
    ``model.init`` get the class ``boxes`` back, from ``trees.with_mesh_names``.
    """
    UNCONSTRAINED_BOX_OF[boxes], FLAX_BOX_OF[unconstrained] = unconstrained, boxes


read_without_constraints(nn.Partitioned, _Named)


def in_box_of(cls: type[Any], leaf: Any) -> Any:
    """Returns the boxed ``leaf`` in a box of the class ``cls``, with equal fields."""
    return cls(**{field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)})


# A dataclass: to look a module up in the cache of ``nn.jit``, Linen compares modules, and with them the initialisers.
@dataclasses.dataclass(frozen=True)
class _Initialiser:
    """Initialiser that calls ``plain``, an initialiser of the model, and returns boxes without constraints."""

    plain: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self.plain(*args, **kwargs)
        return in_box_of(UNCONSTRAINED_BOX_OF[type(value)], value) if type(value) in UNCONSTRAINED_BOX_OF else value


def _boxing_without_constraints(
    method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    """Interceptor for ``nn.intercept_methods``: returns ``method(*args, **kwargs)``, a call on ``context.module``.

    During the call the module's fields that are initialisers, such as ``kernel_init``, are replaced by initialisers
    that make boxes without sharding constraints.
    """
    module = context.module
    fields = {field.name: getattr(module, field.name, None) for field in dataclasses.fields(module)}
    # ``kernel_init``, ``embedding_init``: Flax has them as fields, and passes them to the modules within as fields.
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


# ---------------------------------------------------------------------------------------------------- reads as an array


class ReadAsArray:
    """Mixin for classes of boxes: ``jnp.dot(x, box)``, ``box[0]`` and the like compute with the array ``unbox()``."""

    __slots__ = ()

    unbox: Callable[..., Any]

    def __jax_array__(self) -> jax.Array:
        return self.unbox()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.unbox(), dtype, copy=copy)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.unbox()[index]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.unbox())

    @property
    def T(self) -> jax.Array:  # noqa: N802  # the name on arrays
        return self.unbox().T

    def astype(self, dtype: DTypeLike) -> jax.Array:
        return self.unbox().astype(dtype)


# --------------------------------------------------------------------------------------------------------- fast flatten

VALUE = "value"  # the only field that is a leaf; other fields belong to the tree's structure


class _Fields(dict[str, Any]):
    """Fields of a box except its value: the part of a box in a tree's structure."""

    def __hash__(self) -> int:  # type: ignore[override]  # the dict is never modified
        return hash(frozenset(self.items()))


class QuickBox(meta.Partitioned[Any]):
    """``nn.Partitioned`` whose subclasses are frozen dataclasses like Flax's, with the fast flatten of this file."""

    # The flattened form: the value, and the other fields. These fields are in a tuple, since tuples compare their
    # entries by identity first, and each call of a jitted function compares the structures of its arguments.
    __slots__ = (VALUE, "_parts")

    def __init_subclass__(cls, **options: Any) -> None:
        # JAX makes boxes without __init__ and __post_init__, and boxes would share the value of a cached_property. A
        # mixed-in class may define these, too.
        attributes = {name: attribute for base in reversed(cls.__mro__) for name, attribute in vars(base).items()}
        if "__init__" in vars(cls) or attributes["__post_init__"] is not QuickBox.__post_init__:
            why = "has an __init__ or __post_init__, which JAX does not call when it makes a box"
            raise TypeError(f"the class of boxes {cls.__name__} {why}. Make it a class method that returns a box.")
        for name, attribute in attributes.items():
            if isinstance(attribute, cached_property):
                raise TypeError(
                    f"the class of boxes {cls.__name__}: {name} is a cached_property, which boxes would share. Make it "
                    "a property."
                )
        # Not ``super()``: Flax would register the class its way, and JAX accepts only one registration.
        dataclasses.dataclass(frozen=True, **options)(cls)
        for field in dataclasses.fields(cls):
            if field.name != VALUE and field.metadata.get("pytree_node", True):
                raise TypeError(
                    f"the class of boxes {cls.__name__}: {field.name} would be no leaf of a tree, as only value is. "
                    "Declare it by flax.struct.field(pytree_node=False)."
                )
        cls._flax_dataclass = True  # type: ignore[attr-defined]  # ``struct.dataclass`` then leaves it as it is
        cls.replace = _replaced  # type: ignore[assignment]
        register_pytree_with_keys(cls, _parts_with_key, partial(_of_parts, cls), _parts_of)
        serialization.register_serialization_state(cls, _to_state_dict, _from_state_dict)

    def __post_init__(self) -> None:
        _set_parts(self, ((self.value,), (_Fields(vars(self)),)))

    def __getstate__(self) -> dict[str, Any]:  # the pickled form of Flax's boxes, and of version 0.3.0
        return {VALUE: self.value, **vars(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    def to_nnx_metadata(self) -> dict[str, Any]:
        return {VALUE: self.value, **super().to_nnx_metadata()}


def _replaced(box: QuickBox, **updates: Any) -> Any:
    """Returns a new box of the class of ``box``, with the values in ``updates`` for the fields named there.

    The other fields are those of ``box``. This function is the method ``replace`` of ``QuickBox``, a base class of
    boxes.
    """
    if updates.keys() == {VALUE}:  # shares its fields with this one
        return _of_parts(type(box), _parts_of(box)[1], (updates[VALUE],))
    return dataclasses.replace(box, **updates)


# These bypass the checks of frozen classes.
_new, _set_attribute = object.__new__, object.__setattr__
_set_value, _set_parts = (vars(QuickBox)[name].__set__ for name in QuickBox.__slots__)
_parts_of = operator.attrgetter("_parts")


def _of_parts(cls: type[QuickBox], fields: tuple[_Fields], values: Any) -> QuickBox:
    box = _new(cls)
    _set_attribute(box, "__dict__", fields[0])
    _set_value(box, values[0])
    _set_parts(box, (values, fields))
    return box


def _parts_with_key(box: QuickBox) -> tuple[tuple[tuple[Any, Any]], tuple[_Fields]]:
    (value,), fields = _parts_of(box)
    return ((GetAttrKey(VALUE), value),), fields


def _to_state_dict(box: QuickBox) -> dict[str, Any]:
    return {VALUE: serialization.to_state_dict(box.value)}


def _from_state_dict(box: QuickBox, state: dict[str, Any]) -> Any:
    of, path = f"while restoring an instance of {type(box).__name__}", serialization.current_path()  # Flax's wording
    if VALUE not in state:
        raise ValueError(f"Missing field {VALUE} in state dict {of}, at path {path}")
    value = serialization.from_state_dict(box.value, state[VALUE], name=VALUE)
    if others := ",".join(name for name in state if name != VALUE):
        raise ValueError(f'Unknown field(s) "{others}" in state dict {of} at path {path}')
    return box.replace(value=value)
