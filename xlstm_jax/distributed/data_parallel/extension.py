"""The protocol by which a feature, in a separate file, extends the units of a model.

A unit (``modules/unit``) is a wrapped module: it gathers its leaves, each with the options in the leaf's box, and runs.
A feature changes this through the hooks of ``Extension``, called when the unit is entered, runs and is left:

  enter     wires        returns wires (formats of sent shards) that replace the wires chosen by the boxes
            value_replacements  returns functions that replace leaves before the module reads the leaves
            on_gathered  receives the gathered value of a leaf of ``wires``
            computes     returns whether ``from_shards`` may compute a method's result
            from_shards  computes a method's result without a gather
  run       changed_arguments  returns the arguments for a method of the unit, or of a module within
  leave     initialising returns a context around a method that may initialise the unit
  model     around_models returns a context around a loss or evaluation function, with all models that it calls
            change_module changes a module of an NNX model before the model runs
  before    collections  names the collections that the unit receives, in addition to "params"
            named_wires  returns the names of the wires that ``wires`` would return, for plans and comparisons
            avoids_gather  returns whether a leaf is normally not gathered at all
            recording_parts   records leaves that modules gather in successive parts

Two more hooks choose the order of the axes in the gather of a leaf: ``axis_orders``, when the leaves of a unit are
split, and ``reorder_axes``, when the leaves of the entire model are available. Leaves that share collectives are
another protocol: ``shared_collectives``.

A feature is a subclass in a file of its own, under the decorator ``register``; ``extensions`` imports each file, with a
line. Units also run without extensions: the core imports no extension.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.distributed.data_parallel.wire.wire import Wire
from xlstm_jax.introspection import accepts_call

P = ParamSpec("P")
Result = TypeVar("Result")
ModulePath = tuple[str, ...]
AxisOrder = tuple[str, ...]  # mesh axes, outermost first


class Extension:
    """Base class of features that change how a unit (a wrapped module) gathers or runs.

    ``wires``, ``value_replacements``, ``on_gathered`` and ``changed_arguments`` are called on one instance for each
    entered unit, which may keep state until the unit is left. (Outside of any unit ``changed_arguments`` is called on a
    new instance.) Every other hook is called on a new instance, and has its arguments alone. The default hooks do
    nothing. Methods of a subclass that are no hooks have names that begin with "_".

    Attributes:
      modules: classes of modules. The hooks that receive a module run for these classes alone; () means every class.
      collections: names of replicated collections that the hooks read beside "params". If not empty, an instance is
        made only for units that have one of these collections, and the hooks ``computes``, ``from_shards``,
        ``initialising`` and ``change_module``, which are called on new instances, cannot be overridden.
      hooks: set by the library. Hooks that no class overrides are not called.
    Raises:
      TypeError: (when the subclass is defined) the subclass has a public method that is no hook; or only one of
        ``computes`` and ``from_shards``; or ``collections`` and a hook that is never called with ``collections``.
    """

    modules: ClassVar[tuple[type[Any], ...]] = ()
    collections: ClassVar[tuple[str, ...]] = ()
    hooks: ClassVar[frozenset[str]] = frozenset()  # the names of the hooks that the class overrides

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.hooks = frozenset([name for name in _HOOKS if getattr(cls, name) is not getattr(Extension, name)])
        # A hook that is never called would leave the feature out of the training, without an error.
        methods = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]
        if unknown := [name for name in methods if name not in _HOOKS]:
            close = difflib.get_close_matches(unknown[0], _HOOKS, 1)
            raise TypeError(
                f"the extension {cls.__name__}: the method {unknown[0]!r} is no hook of Extension"
                f"{f'; {close[0]!r} is' if close else ''}. Begin the names of other methods with _."
            )
        if len({"computes", "from_shards"} & cls.hooks) == 1:
            raise TypeError(
                f"the extension {cls.__name__}: from_shards is called where computes returns True; define both."
            )
        if cls.collections and (lost := sorted(_FOR_ANY_UNIT & cls.hooks)):
            raise TypeError(
                f"the extension {cls.__name__}: {lost[0]} is never called for an extension with collections, because "
                "it is called on new instances, for units without these collections, too. Put the hook into an "
                "Extension without collections."
            )

    def wires(self, policy: ShardPolicy, variables: PyTree, module: ModulePath) -> Mapping[str, Wire]:
        """Returns wires (formats in which shards are sent), by the path of a leaf in ``variables``; by default ``{}``.

        A leaf in the result is sent in this format, in place of the format that the options in the leaf's box select.

        Args:
          policy: the options of the unit.
          variables: the variables of the unit, with collections such as "params" at the top.
          module: the path of the unit in the model.
        """
        return {}

    def value_replacements(self) -> Mapping[str, Callable[[Any], Any]]:
        """Returns functions, by the path of a leaf in the unit's variables; by default ``{}``.

        A function takes the leaf, as a ``Sharded``, and returns the value that the module reads in place of the
        gathered value. Leaves of other paths are gathered as usual. The library calls the hook after ``wires``.
        """
        return {}

    def on_gathered(self, path: str, value: Any) -> None:
        """Receives the gathered value of the leaf at ``path``; by default does nothing.

        The library calls the hook only for leaves for which ``wires`` has returned a wire.
        """

    def changed_arguments(
        self, module: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) for a call of ``method`` of a unit or of a module inside; by default unchanged.

        ``args`` and ``kwargs`` are the arguments of the caller, without the module.
        """
        return args, kwargs

    def computes(self, module: Any, method: str) -> bool:
        """Returns whether ``from_shards`` may compute the result of ``method`` of the unit ``module``; here False.

        If False, the unit gathers its parameters for this method, and ``from_shards`` is not called.
        """
        return False

    def from_shards(self, module: Any, method: str, policy: ShardPolicy, args: Any, kwargs: Any) -> Any:
        """Returns the result of ``method`` of the unit ``module``, computed from shards, without a gather.

        ``None``, which is the default: the extension cannot compute the result, and the unit must gather.

        Args:
          module: the unit; its parameters are shards.
          method: the name of the method.
          policy: the options of the unit.
          args, kwargs: the arguments of the method.
        """
        return None

    def initialising(self, module: Any, method: str) -> AbstractContextManager[None]:
        """Returns a context manager that the library enters around ``method`` of ``module``; by default without effect.

        The module is a unit, or may become a unit, and may be in ``init``.
        """
        return nullcontext()

    def around_models(self) -> AbstractContextManager[None]:
        """Returns a context manager that the library enters around a loss or evaluation function; here without effect.

        The function may run models without any unit.
        """
        return nullcontext()

    def change_module(self, module: Any) -> None:
        """Changes ``module``, a module of an NNX model that is about to run, in place; by default does nothing."""

    def named_wires(self, variables: PyTree, how_of: Callable[[str], Communication]) -> Mapping[str, str]:
        """Returns texts, by the path of a leaf in ``variables``: the names of the wires that ``wires`` would return.

        By default ``{}``. A wire is a format in which shards are sent; a plan of the model shows the names.
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
        """Returns the axes that split each leaf of a unit, outermost first; by default ``default_orders``.

        Args:
          sizes: the bytes of each leaf; the result has the same order of leaves.
          default_orders: the axes of each leaf, as the user orders them.
          axis_sizes: the number of devices along each axis.
          slow: axes that cross hosts.
        """
        return default_orders

    def reorder_axes(self, params: PyTree, axis_sizes: Mapping[str, int]) -> PyTree:
        """Returns the boxed parameters of an entire model; by default ``params`` unchanged.

        A subclass may return boxes with another order of the mesh axes that split a dim, so that the links carry equal
        loads. The values are global arrays. ``axis_sizes`` has the axes of the mesh with their sizes.
        """
        return params

    def avoids_gather(self, box: Sharded) -> bool:
        """Returns whether a unit normally computes without a gather of the leaf in ``box``; by default False.

        An example is an embedding table of which only some rows are sent.
        """
        return False

    def recording_parts(self, partial_gathers: dict[str, "PartialGather"]) -> AbstractContextManager[None]:
        """Returns a context manager for ``model.init``; by default a context without effect.

        A subclass fills the dict ``partial_gathers`` in the context: path of a leaf in the model -> ``PartialGather``,
        for each leaf that a module gathers in successive parts. A ``PartialGather`` says along which dim the leaf is
        cut, and how many entries a part has.
        """
        return nullcontext()


_HOOKS = [name for name, value in vars(Extension).items() if callable(value) and not name.startswith("_")]
_FOR_ANY_UNIT = {"computes", "from_shards", "initialising", "change_module"}  # called on new instances, by module


class PartialGather(NamedTuple):
    """Gather of a leaf in successive parts, each with ``entries`` entries of the dim ``along``.

    ``may_be_sent(box)`` returns whether parts of the leaf can be sent, which depends on how the leaf is split.
    """

    along: int
    entries: int
    may_be_sent: Callable[[Sharded], bool]


Feature = TypeVar("Feature", bound=Extension)
EXTENSIONS: list[type[Extension]] = []  # the registered extensions, in the order in which their files are imported
COLLECTIONS: list[str] = []  # the collections, beside "params", that registered extensions read; each once
# By hook: the classes of modules to which the registered extensions that override the hook apply; ``object`` for every
# module. For other modules no extension is looked up. Extensions with ``collections`` are left out: a unit with these
# collections asks its instances.
MODULES: dict[str, tuple[type[Any], ...]] = dict.fromkeys(
    ("changed_arguments", "computes", "initialising", "change_module"), ()
)


def register(cls: type[Feature]) -> type[Feature]:
    """Registers an extension, after those that are registered already; a decorator of the class."""
    replace_extensions([*EXTENSIONS, cls])
    return cls


def replace_extensions(extensions: Iterable[type[Extension]]) -> None:
    """Registers ``extensions`` in the given order, instead of the extensions that are registered already."""
    EXTENSIONS[:] = extensions
    COLLECTIONS[:] = dict.fromkeys([name for cls in EXTENSIONS for name in cls.collections])
    for hook in MODULES:
        classes = [cls for cls in with_hook(hook) if not cls.collections]
        MODULES[hook] = tuple([module for cls in classes for module in (cls.modules or (object,))])


def with_hook(name: str) -> list[type[Extension]]:
    """Returns the registered extension classes that override the method ``name`` of ``Extension``.

    The order is the order of registration (``EXTENSIONS``). The list is empty without such a class.
    """
    return [cls for cls in EXTENSIONS if name in cls.hooks]


def with_hook_for(name: str, module: Any) -> list[type[Extension]]:
    """Returns the registered extension classes that override the method ``name``, and apply to ``module``.

    An extension applies if it has no ``collections``, and ``module`` is an instance of a class in its ``modules``, or
    its ``modules`` is empty. The order is the order of registration (``EXTENSIONS``).
    """
    classes = [cls for cls in with_hook(name) if not cls.collections]
    return [cls for cls in classes if not cls.modules or isinstance(module, cls.modules)]


def check_paths(extensions: Sequence[Extension], returned: Collection[str], paths: Collection[str]) -> None:
    """Raises if a path in ``returned``, keys of what hooks of ``extensions`` have returned, is not in ``paths``.

    ``paths`` are the paths of the leaves of a unit, as "params/kernel".

    Raises:
      ValueError: a path is not the path of a leaf: the extension would have no effect.
    """
    if unknown := [path for path in returned if path not in paths]:
        names = ", ".join(type(one).__name__ for one in extensions if {"wires", "value_replacements"} & one.hooks)
        raise ValueError(
            f"the extension {names}: {unknown[0]!r}, a path in the result of wires or value_replacements, is no leaf "
            f"of the unit, whose leaves are {', '.join(paths)}. Return the path of a leaf."
        )


def named_wires(variables: PyTree, how_of: Callable[[str], Communication]) -> dict[str, str]:
    """Returns, by path in ``variables``, the names (for plans) of the wires that extensions choose for leaves.

    A wire is a format in which shards are sent; leaves without such a choice are missing. ``variables`` are the
    variables of a unit. ``how_of(path)`` returns the communication options with which the leaf at ``path`` is gathered.
    """
    wires: dict[str, str] = {}
    for cls in with_hook("named_wires"):
        wires |= cls().named_wires(variables, how_of)
    return wires


def axis_orders(
    sizes: Sequence[float], default_orders: Sequence[AxisOrder], axis_sizes: Mapping[str, int], slow: Collection[str]
) -> Sequence[AxisOrder]:
    """Returns the axes of each split leaf, outermost first: ``default_orders``, unless an extension changes the orders.

    The result has the order of ``sizes``. If no leaf has two axes, no extension is asked.

    Args:
      sizes: bytes of each leaf.
      default_orders: the axes of each leaf, as the user orders them.
      axis_sizes: the number of devices along each axis.
      slow: axes that cross hosts.
    """
    if max(map(len, default_orders), default=0) < 2:
        return default_orders
    for cls in with_hook("axis_orders"):
        default_orders = cls().axis_orders(sizes, default_orders, axis_sizes, slow)
    return default_orders


def reorder_axes(params: PyTree, axis_sizes: Mapping[str, int]) -> PyTree:
    """Calls the hook ``reorder_axes`` of each registered extension on the boxed parameters of an entire model.

    Returns the result of the last extension; each extension gets the result of the extension before. An extension may
    change the order of the mesh axes that split a dim, so that the links between devices carry equal loads.

    Args:
      params: the parameters, with global arrays in the boxes.
      axis_sizes: the axes of the mesh with their sizes. With fewer than two axes of size 2 or more, no extension is
        called, and ``params`` is returned.
    """
    if sum([size > 1 for size in axis_sizes.values()]) < 2:
        return params
    for cls in with_hook("reorder_axes"):
        params = cls().reorder_axes(params, axis_sizes)
    return params


def avoids_gather(box: Sharded) -> bool:
    """Returns whether a registered extension normally computes without a gather of the leaf in ``box``.

    An example is an embedding table of which only the looked-up rows are sent.
    """
    return any(cls().avoids_gather(box) for cls in with_hook("avoids_gather"))


@contextmanager
def recording_parts() -> Iterator[dict[str, PartialGather]]:
    """Yields an empty dict: path in the model -> ``PartialGather``, filled while ``model.init`` runs in the context.

    The entries are the leaves that modules gather in successive parts. A ``PartialGather`` says along which dim the
    leaf is cut, and how many entries a part has.
    """
    partial_gathers: dict[str, PartialGather] = {}
    with ExitStack() as stack:
        for cls in with_hook("recording_parts"):
            stack.enter_context(cls().recording_parts(partial_gathers))
        yield partial_gathers


def computed_from_shards(module: Any, method: str, policy: ShardPolicy, args: Any, kwargs: Any) -> Any:
    """Returns the result of a unit's ``method``, computed from shards by the first extension that can do so.

    ``None``: no extension can, and the unit must gather. ``policy`` has the options of the unit; ``args`` and
    ``kwargs`` are the arguments of the method.
    """
    for cls in with_hook_for("computes", module):
        extension = cls()
        if extension.computes(module, method):
            result = extension.from_shards(module, method, policy, args, kwargs)
            if result is not None:
                return result
    return None


def arguments_from(
    extensions: Sequence[Extension] | None,
    module: Any,
    method: str,
    called: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) for a method of a module, after the hook ``changed_arguments`` of each extension.

    Only extensions that apply to the class of ``module`` are called; each gets the arguments that the extension before
    has returned. Arguments that ``called`` does not accept are not added: a subclass may override the method with other
    arguments, and call the method of its parent, whose arguments are then changed.

    Args:
      extensions: the extensions of the running unit; ``None``, if no unit has been entered yet, stands for new
        instances of the registered extensions that read no collection.
      module: the module.
      method: the name of the method.
      called: the function of the method, which takes the module and the arguments: of the module's class or of a
        parent.
      args, kwargs: the arguments of the call.
    """
    if extensions is None:
        extensions = [cls() for cls in with_hook_for("changed_arguments", module)]
    for extension in extensions:
        if "changed_arguments" in extension.hooks and (not extension.modules or isinstance(module, extension.modules)):
            changed = extension.changed_arguments(module, method, args, kwargs)
            if changed[1].keys() <= kwargs.keys() or accepts_call(called, 1 + len(changed[0]), changed[1]):
                args, kwargs = changed
    return args, kwargs


@contextmanager
def initialising(module: Any, method: str) -> Iterator[None]:
    """Enters, around ``method`` of the unit ``module``, the context that each extension returns from ``initialising``.

    Only extensions that apply to the class of ``module`` are asked.
    """
    with ExitStack() as stack:
        for cls in with_hook_for("initialising", module):
            stack.enter_context(cls().initialising(module, method))
        yield


def with_extensions(fn: Callable[P, Result]) -> Callable[P, Result]:
    """Returns a function that calls ``fn``, a loss or evaluation function, in the contexts of ``around_models``."""

    @wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
        with ExitStack() as stack:
            for cls in with_hook("around_models"):
                stack.enter_context(cls().around_models())
            return fn(*args, **kwargs)

    return called


def change_modules(modules: Iterable[Any]) -> None:
    """Calls the hook ``change_module`` of the extensions that apply to each of ``modules``, of a model about to run."""
    for module in modules:
        for cls in with_hook_for("change_module", module) if isinstance(module, MODULES["change_module"]) else ():
            cls().change_module(module)
