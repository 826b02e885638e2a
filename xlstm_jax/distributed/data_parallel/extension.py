"""The protocol by which a feature stands beside the units of a model, in a file of its own.

A unit (``modules/unit``) gathers its leaves by their boxes and runs. All else that a feature needs of a unit is a hook
of ``Extension``:

  enter     wires        leaves that travel by another wire than their boxes say
            replaced     leaves that the module reads otherwise
            arrived      a leaf of ``wires`` was gathered
            from_shards  a method's result, computed without a gather
  run       called       a method of the unit, or of a module within, is called
  leave     initialising around a method of a unit that may initialise it
  before    collections  collections that pass the unit, beside "params"
            named_wires  names of the wires of ``wires``, for plans and for ``check_step``
            avoids_gather  leaves of which nothing is gathered as a rule
            noting_parts   leaves of which modules gather parts, one after the other, in place of all

Two more hooks choose over which of several axes a leaf is gathered first: ``axis_orders`` where the leaves of one unit
are split, and ``arranged`` where all leaves of a model are there.

``extensions`` registers each feature with one line. Without any, units gather and run: the core imports no extension.
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
AxisOrder = tuple[str, ...]  # of mesh axes, outermost first


class Extension:
    """One feature while one unit runs.

    An instance is made where a unit is entered, and may keep state until the unit is left. A hook that a subclass
    does not write does nothing.

    Attributes:
      modules: classes of modules. The hooks that receive a module run for these classes alone; () means every class.
      collections: names of collections that pass the unit and stay replicated. If there are any, an instance is made
        for a unit that has one of these collections, and for no other unit.
    """

    modules: ClassVar[tuple[type[Any], ...]] = ()
    collections: ClassVar[tuple[str, ...]] = ()

    def wires(self, policy: ShardPolicy, variables: PyTree, module: ModulePath) -> Mapping[str, Wire]:
        """Returns the wires of leaves that do not travel as their boxes say, by path in ``variables``."""
        return {}

    def replaced(self) -> Mapping[str, Callable[[Any], Any]]:
        """Returns functions of leaves, by path: what the module reads in place of the leaf. Runs after ``wires``."""
        return {}

    def arrived(self, path: str, value: Any) -> None:
        """Receives the gathered value of a leaf of ``wires``."""

    def called(self, module: Any, method: str, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments for a method of the unit, or of a module within, which is about to run."""
        return kwargs

    def computes(self, module: Any, method: str) -> bool:
        """Returns whether ``from_shards`` may replace this method of a unit."""
        return False

    def from_shards(self, module: Any, method: str, policy: ShardPolicy, args: Any, kwargs: Any) -> Any:
        """Returns the result of the method, computed from shards; None where the unit is to gather."""
        return None

    def initialising(self, module: Any, method: str) -> AbstractContextManager[None]:
        """Returns a context around a method of a unit that may initialise the unit."""
        return nullcontext()

    def named_wires(self, variables: PyTree, how_of: Callable[[str], Communication]) -> Mapping[str, str]:
        """Returns the names of the wires that ``wires`` would return, by path; ``how_of(path)`` has the options."""
        return {}

    def axis_orders(
        self, sizes: Sequence[float], given: Sequence[AxisOrder], axis_sizes: Mapping[str, int], slow: Collection[str]
    ) -> Sequence[AxisOrder]:
        """Returns for each leaf, of ``sizes`` bytes, the order of its axes; axes that are ``slow`` cross hosts."""
        return given

    def arranged(self, params: PyTree, axis_sizes: Mapping[str, int]) -> PyTree:
        """Returns the boxed parameters of a whole model, with the axes of each in another order."""
        return params

    def avoids_gather(self, box: Sharded) -> bool:
        """Returns whether a leaf is not gathered as a rule, so that links carry next to nothing of the leaf."""
        return False

    def noting_parts(self, found: dict[str, "PartialGather"]) -> AbstractContextManager[None]:
        """Returns a context, around the initialisation of a model, that fills ``found`` by the paths of leaves."""
        return nullcontext()


class PartialGather(NamedTuple):
    """Parts of a leaf that a module gathers one after the other: ``entries`` of its dim ``along`` at a time.

    ``may_be_sent(box)`` is whether parts of the leaf travel so, which depends on how the leaf is split.
    """

    along: int
    entries: int
    may_be_sent: Callable[[Sharded], bool]


EXTENSIONS: list[type[Extension]] = []  # filled by ``extensions``, in the order of its lines


def with_hook(name: str) -> list[type[Extension]]:
    """Returns the registered extensions that write the hook of this name."""
    return [cls for cls in EXTENSIONS if getattr(cls, name) is not getattr(Extension, name)]


def with_hook_for(name: str, module: Any) -> list[type[Extension]]:
    """Returns the registered extensions that write the hook of this name, and take modules of this class."""
    return [cls for cls in with_hook(name) if not cls.modules or isinstance(module, cls.modules)]


def extensions_of(variables: Mapping[str, PyTree]) -> list[Extension]:
    """Returns an instance of each registered extension for a unit that has these collections of variables."""
    return [cls() for cls in EXTENSIONS if not cls.collections or not variables.keys().isdisjoint(cls.collections)]


def passing_collections() -> list[str]:
    """Returns the collections that pass units beside "params"."""
    return list(dict.fromkeys(name for cls in EXTENSIONS for name in cls.collections))


def named_wires(variables: PyTree, how_of: Callable[[str], Communication]) -> dict[str, str]:
    """Returns the names of all wires that extensions choose, by the paths of leaves in ``variables``."""
    found: dict[str, str] = {}
    for cls in with_hook("named_wires"):
        found |= cls().named_wires(variables, how_of)
    return found


def axis_orders(
    sizes: Sequence[float], given: Sequence[AxisOrder], axis_sizes: Mapping[str, int], slow: Collection[str]
) -> Sequence[AxisOrder]:
    """Returns for each leaf that is split the order of its axes: the given one without an extension."""
    if all(len(order) < 2 for order in given):
        return given
    for cls in with_hook("axis_orders"):
        given = cls().axis_orders(sizes, given, axis_sizes, slow)
    return given


def arranged(params: PyTree, axis_sizes: Mapping[str, int]) -> PyTree:
    """Returns the boxed parameters of a whole model, with the axes of each in the order of the extensions."""
    if sum(size > 1 for size in axis_sizes.values()) < 2:
        return params
    for cls in with_hook("arranged"):
        params = cls().arranged(params, axis_sizes)
    return params


def avoids_gather(box: Sharded) -> bool:
    """Returns whether an extension computes with a leaf without a gather, as a rule."""
    return any(cls().avoids_gather(box) for cls in with_hook("avoids_gather"))


@contextmanager
def noting_parts() -> Iterator[dict[str, PartialGather]]:
    """Fills with the leaves that modules gather in parts, by path, while a model is initialised."""
    found: dict[str, PartialGather] = {}
    with ExitStack() as stack:
        for cls in with_hook("noting_parts"):
            stack.enter_context(cls().noting_parts(found))
        yield found


def computes(module: Any, method: str) -> bool:
    """Returns whether an extension may compute the result of a unit's method from shards."""
    return any(cls().computes(module, method) for cls in with_hook_for("computes", module))


def computed_from_shards(module: Any, method: str, policy: ShardPolicy, args: Any, kwargs: Any) -> Any:
    """Returns the result of a unit's method, computed from shards by an extension; None where the unit is to gather."""
    for cls in with_hook_for("computes", module):
        extension = cls()
        if extension.computes(module, method):
            found = extension.from_shards(module, method, policy, args, kwargs)
            if found is not None:
                return found
    return None


def called(module: Any, method: str, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments for a method of a module that no unit has entered yet."""
    return kwargs_from(extensions_of(module.variables), module, method, args, kwargs)


def kwargs_from(
    extensions: Sequence[Extension], module: Any, method: str, args: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns the keyword arguments for a method of a module, as the hooks ``called`` of these extensions make them."""
    seeing = with_hook_for("called", module)
    for extension in extensions:
        if type(extension) in seeing:
            kwargs = extension.called(module, method, args, kwargs)
    return kwargs


@contextmanager
def initialising(module: Any, method: str) -> Iterator[None]:
    """Enters the contexts of all extensions around a method of a unit that may initialise the unit."""
    with ExitStack() as stack:
        for cls in with_hook_for("initialising", module):
            stack.enter_context(cls().initialising(module, method))
        yield
