"""The protocol by which a feature, in a separate file, extends the units of a model.

A unit (``modules/unit``) is a wrapped module: it gathers its leaves, each with the options in the leaf's box, and runs.
A feature changes this through the hooks of ``Extension``, called when the unit is entered, runs and is left:

  enter     wires        returns wires (formats of sent shards) that replace the wires chosen by the boxes
            value_replacements  returns functions that replace leaves before the module reads the leaves
            on_gathered  receives the gathered value of a leaf of ``wires``
            from_shards  computes a method's result without a gather
  run       changed_arguments  returns the arguments for a method of the unit, or of a module within
  leave     initialising returns a context around a method that may initialise the unit
  before    collections  names the collections that the unit receives, in addition to "params"
            named_wires  returns the names of the wires that ``wires`` would return, for plans and ``check_step``
            avoids_gather  returns whether a leaf is normally not gathered at all
            recording_parts   records leaves that modules gather in successive parts

Two more hooks choose the order of the axes in the gather of a leaf: ``axis_orders``, when the leaves of a unit are
split, and ``reorder_axes``, when the leaves of the entire model are available.

``extensions`` registers each feature with a line. Units also run without extensions: the core imports no extension.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.distributed.data_parallel.wire.wires import Wire

ModulePath = tuple[str, ...]
AxisOrder = tuple[str, ...]  # mesh axes, outermost first


class Extension:
    """Base class of features that change how a unit (a wrapped module) gathers or runs.

    An instance is created when a unit is entered, and may keep state until the unit is left. The default hooks do
    nothing.

    Attributes:
      modules: classes of modules. The hooks that receive a module run for these classes alone; () means every class.
      collections: names of replicated collections that the hooks read beside "params". If not empty, an instance is
        made only for units that have one of these collections.
    """

    modules: ClassVar[tuple[type[Any], ...]] = ()
    collections: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def handles_module(cls, module: Any) -> bool:
        """Returns whether the hooks that receive a module run for ``module``, as ``modules`` says."""
        return not cls.modules or isinstance(module, cls.modules)

    def wires(self, policy: ShardPolicy, variables: PyTree, module: ModulePath) -> Mapping[str, Wire]:
        """Returns, by path in ``variables``, wires for the gather of leaves, in place of the wires in their boxes.

        ``policy`` has the options of the unit, ``module`` is the unit's path in the model.
        """
        return {}

    def value_replacements(self) -> Mapping[str, Callable[[Any], Any]]:
        """Returns, by path, functions that map a leaf to the value the module reads in its place; after ``wires``."""
        return {}

    def on_gathered(self, path: str, value: Any) -> None:
        """Receives the gathered value of the leaf at ``path``, if ``wires`` has returned a wire for the leaf."""

    def changed_arguments(
        self, module: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments, changed or not, for a call of a method of the unit or of a submodule."""
        return args, kwargs

    def computes(self, module: Any, method: str) -> bool:
        """Returns whether ``from_shards`` may compute the result of this method of a unit."""
        return False

    def from_shards(self, module: Any, method: str, policy: ShardPolicy, args: Any, kwargs: Any) -> Any:
        """Returns the method's result, computed from shards; ``None`` if the unit must gather."""
        return None

    def initialising(self, module: Any, method: str) -> AbstractContextManager[None]:
        """Returns a context around a method of a unit that may initialise the unit."""
        return nullcontext()

    def named_wires(self, variables: PyTree, how_of: Callable[[str], Communication]) -> Mapping[str, str]:
        """Returns the names of the wires that ``wires`` would choose, by path in ``variables``.

        ``how_of(path)`` returns the communication options with which the leaf at ``path`` is gathered.
        """
        return {}

    def axis_orders(
        self,
        sizes: Sequence[float],
        default_orders: Sequence[AxisOrder],
        axis_sizes: Mapping[str, int],
        slow: Collection[str],
    ) -> Sequence[AxisOrder]:
        """Returns, for each leaf of a unit, the axes over which the leaf is split, outermost first.

        ``sizes`` has the bytes of each leaf, ``default_orders`` its axes as the user orders them.
        ``slow`` axes cross hosts.
        """
        return default_orders

    def reorder_axes(self, params: PyTree, axis_sizes: Mapping[str, int]) -> PyTree:
        """Returns the boxed parameters of an entire model; a leaf over several axes may have another axis order."""
        return params

    def avoids_gather(self, box: Sharded) -> bool:
        """Returns whether a unit normally computes without a gather of the leaf, and sends few bytes of the leaf."""
        return False

    def recording_parts(self, partial_gathers: dict[str, "PartialGather"]) -> AbstractContextManager[None]:
        """Returns a context for ``model.init`` that adds leaves gathered in parts to ``partial_gathers``, by path."""
        return nullcontext()


class PartialGather(NamedTuple):
    """Gather of a leaf in successive parts, each with ``entries`` entries of the dim ``along``.

    ``may_be_sent(box)`` returns whether parts of the leaf can be sent, which depends on how the leaf is split.
    """

    along: int
    entries: int
    may_be_sent: Callable[[Sharded], bool]


EXTENSIONS: list[type[Extension]] = []  # filled by ``extensions``, in the order of its lines


def with_hook(name: str) -> list[type[Extension]]:
    """Returns the registered extension classes that override the method ``name`` of ``Extension``."""
    return [cls for cls in EXTENSIONS if getattr(cls, name) is not getattr(Extension, name)]


def with_hook_for(name: str, module: Any) -> list[type[Extension]]:
    """Returns the registered extension classes that override the method ``name`` and apply to ``module``."""
    return [cls for cls in with_hook(name) if cls.handles_module(module)]


def extensions_of(has_collection: Callable[[str], bool]) -> list[Extension]:
    """Returns new instances of the registered extensions that apply to a unit.

    ``has_collection(name)`` returns whether the unit has the collection.
    """
    return [cls() for cls in EXTENSIONS if not cls.collections or any(map(has_collection, cls.collections))]


def collections_of_extensions() -> list[str]:
    """Returns the names of the collections that extensions read when a unit is entered, in addition to "params"."""
    return list(dict.fromkeys(name for cls in EXTENSIONS for name in cls.collections))


def named_wires(variables: PyTree, how_of: Callable[[str], Communication]) -> dict[str, str]:
    """Returns, by path in ``variables``, the names of the wires that extensions choose for leaves of a unit.

    ``how_of(path)`` returns the communication options with which the leaf at ``path`` is gathered.
    """
    wires: dict[str, str] = {}
    for cls in with_hook("named_wires"):
        wires |= cls().named_wires(variables, how_of)
    return wires


def axis_orders(
    sizes: Sequence[float], default_orders: Sequence[AxisOrder], axis_sizes: Mapping[str, int], slow: Collection[str]
) -> Sequence[AxisOrder]:
    """Returns the axes of each split leaf, outermost first: ``default_orders``, unless an extension reorders them."""
    if all(len(order) < 2 for order in default_orders):
        return default_orders
    for cls in with_hook("axis_orders"):
        default_orders = cls().axis_orders(sizes, default_orders, axis_sizes, slow)
    return default_orders


def reorder_axes(params: PyTree, axis_sizes: Mapping[str, int]) -> PyTree:
    """Returns the boxed parameters of an entire model, with the axis order of each leaf as extensions choose."""
    if sum(size > 1 for size in axis_sizes.values()) < 2:
        return params
    for cls in with_hook("reorder_axes"):
        params = cls().reorder_axes(params, axis_sizes)
    return params


def avoids_gather(box: Sharded) -> bool:
    """Returns whether an extension normally computes results without a gather of the leaf."""
    return any(cls().avoids_gather(box) for cls in with_hook("avoids_gather"))


@contextmanager
def recording_parts() -> Iterator[dict[str, PartialGather]]:
    """Yields a dict to be filled with the leaves that modules gather in parts, by path, during initialisation."""
    partial_gathers: dict[str, PartialGather] = {}
    with ExitStack() as stack:
        for cls in with_hook("recording_parts"):
            stack.enter_context(cls().recording_parts(partial_gathers))
        yield partial_gathers


def computes(module: Any, method: str) -> bool:
    """Returns whether an extension may compute the result of a unit's method from shards."""
    return any(cls().computes(module, method) for cls in with_hook_for("computes", module))


def computed_from_shards(module: Any, method: str, policy: ShardPolicy, args: Any, kwargs: Any) -> Any:
    """Returns the result of a unit's method, computed by an extension from shards; ``None``: a gather is needed."""
    for cls in with_hook_for("computes", module):
        extension = cls()
        if extension.computes(module, method):
            result = extension.from_shards(module, method, policy, args, kwargs)
            if result is not None:
                return result
    return None


def arguments_from_extensions(
    module: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments for a method of a module that no unit has entered yet."""
    return arguments_from(extensions_of(lambda collection: False), module, method, args, kwargs)


def arguments_from(
    extensions: Sequence[Extension], module: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments for a method of a module, as the hooks ``changed_arguments`` return them."""
    for extension in extensions:
        if extension.handles_module(module):
            args, kwargs = extension.changed_arguments(module, method, args, kwargs)
    return args, kwargs


@contextmanager
def initialising(module: Any, method: str) -> Iterator[None]:
    """Enters the contexts that the hook ``initialising`` of the extensions returns for a method of a unit."""
    with ExitStack() as stack:
        for cls in with_hook_for("initialising", module):
            stack.enter_context(cls().initialising(module, method))
        yield
