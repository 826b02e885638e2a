"""Imports that wait until a program needs them: an import of ``flax.nnx`` takes as long as an import of this library.

  names_when_used(face, modules)   names of a face (``__init__.py``), each imported when first read
  import_with_nnx(module)          modules that register code for NNX, imported together with ``modules/nnx_model``

A training with Linen then never imports ``flax.nnx``, nor the library's checkpoints, replays and ``check_step``.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

_waiting: list[str] = []  # modules of ``import_with_nnx``, until NNX is used
_nnx_is_used = False


def names_when_used(face: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a function ``__getattr__`` for a face (a package's ``__init__.py``): imports a name when first read.

    In the face the function stands in the ``else`` of ``if TYPE_CHECKING:``, beside usual imports of the same names:
    type checkers would take any name for an attribute of a module with ``__getattr__``.

    Args:
      face: ``__name__`` of the face.
      modules: for each name, the dotted name of the module that defines it; for a subpackage of the face, the dotted
        name of the subpackage.
    Raises:
      AttributeError: (the returned function) the face has no such name.
    """

    def imported(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name])
        value = module if modules[name] == f"{face}.{name}" else getattr(module, name)
        setattr(sys.modules[face], name, value)  # later reads find the name without this function
        return value

    return imported


def import_with_nnx(module: str) -> None:
    """Imports ``module``, a dotted name: now if this program uses NNX already, else when the program first uses NNX.

    For modules that register code for NNX. The program uses NNX from the call of ``import_for_nnx`` on.
    """
    _waiting.append(module)
    if _nnx_is_used:
        import_for_nnx()


def import_for_nnx() -> None:
    """Imports the modules passed to ``import_with_nnx`` so far, in order, and makes later calls import at once.

    Called when a program first uses NNX.
    """
    global _nnx_is_used
    _nnx_is_used = True
    while _waiting:
        importlib.import_module(_waiting.pop(0))
