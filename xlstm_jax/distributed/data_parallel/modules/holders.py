"""Records the classes of modules with parameters, by path, so that a warning can name classes to wrap.

Linen   modules exist while the model is initialised or applied, and are recorded then
NNX     modules exist at any time
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

from flax import linen as nn

from xlstm_jax.distributed.data_parallel.modules.unit import Method

LIBRARIES = {"nn": "flax.linen", "nnx": "flax.nnx"}  # as users import them


@runtime_checkable
class HasModules(Protocol):
    """Protocol of a model that lists its modules by path without being run, as a model of NNX does."""

    @property
    def modules(self) -> Mapping[str, object]: ...


@contextmanager
def recording_holders(model: object) -> Iterator[dict[str, str]]:
    """Yields a dict: path of a module of ``model`` -> name of its class, as ``{"blocks/mlp": "nn.Dense"}``.

    For an NNX model the dict is filled at once; a Linen module is added when a method of the module runs in the
    context. Classes of Flax have the name that users write, ``nn.Dense`` or ``nnx.Linear``; other classes have their
    ``__name__``. The path of the model itself is "". For a transformed module (``nn.scan``, ``nn.remat``) the class
    inside the transformation is recorded.
    """
    class_names: dict[str, str] = {}
    if isinstance(model, HasModules):
        class_names |= {path: _name(type(module)) for path, module in model.modules.items()}

    def note(method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        cls = type(context.module)
        # nn.remat calls internal functions on a module at the path of the model.
        if hasattr(cls, context.method_name):
            # The module inside nn.scan has the path of the outer module and is entered later: its class replaces the
            # class of the outer module.
            class_names["/".join(context.module.path)] = _name(cls)
        return method(*args, **kwargs)

    with nn.intercept_methods(note):
        yield class_names


def _name(cls: type[Any]) -> str:
    # A wrapped class is a subclass under the original name.
    for library, module in LIBRARIES.items():
        # A program without modules of NNX has not imported NNX.
        if getattr(sys.modules.get(module), cls.__name__, None) in cls.__mro__:
            return f"{library}.{cls.__name__}"
    return cls.__name__


def seeing_calls(on_call: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Returns a context in which ``on_call(module)`` is called after each return of ``__call__`` of a Linen module."""

    def intercept(method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        result = method(*args, **kwargs)
        if context.method_name == "__call__":
            on_call(context.module)
        return result

    return nn.intercept_methods(intercept)
