"""Notes which modules hold the parameters of a model, by class: a warning can then name the classes to wrap.

Linen   modules show while the model is initialised or applied, so they are noted there
NNX     the model has them at any time
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from flax import linen as nn
from flax import nnx

from xlstm_jax.distributed.data_parallel.modules.unit import Method

LIBRARIES = {"nn": nn, "nnx": nnx}  # as users import them


@runtime_checkable
class HasModules(Protocol):
    """A model whose modules are there at any time, by path, as an ``NnxModel``'s are."""

    @property
    def modules(self) -> Mapping[str, object]: ...


@contextmanager
def noting_holders(model: object) -> Iterator[dict[str, str]]:
    """Fills with the classes of modules by their paths, as ``{"blocks/mlp": "nn.Dense"}``, while a model runs.

    A class of Flax has the name that users write, ``nn.Dense`` or ``nnx.Linear``. The model itself is at path "". Of
    transformations around a module (``nn.scan``, ``nn.remat``) the module within them is noted.
    """
    found: dict[str, str] = {}
    if isinstance(model, HasModules):
        found |= {path: _name(type(module)) for path, module in model.modules.items()}

    def note(method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        cls = type(context.module)
        # nn.remat calls functions of its own on a module that stands at the path of the model.
        if hasattr(cls, context.method_name):
            # The module within nn.scan has the path of the one around it, and is entered after it.
            found["/".join(context.module.path)] = _name(cls)
        return method(*args, **kwargs)

    with nn.intercept_methods(note):
        yield found


def _name(cls: type[Any]) -> str:
    # A class that was wrapped is a subclass with the name that it had.
    for library, module in LIBRARIES.items():
        if getattr(module, cls.__name__, None) in cls.__mro__:
            return f"{library}.{cls.__name__}"
    return cls.__name__
