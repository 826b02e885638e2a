"""Rules that choose the units of a model from all of its modules at once, and the rule that is the default.

``default_units`` is the default of ``where`` in ``shard_modules``.

A parameter is gathered by the innermost unit around it. The units are

  an embedding          alone, so that a lookup may send rows in place of the table
  a layer of a scan     the module that ``nn.scan`` runs for each layer
  a block of a loop     a module with modules inside, among siblings of its class with numbers in their names: h_0, h_1
  a loop over time      the module around a recurrent cell; the cell would gather at each step
  an owner              a module with parameters that is outside of the units above: a head, the layers of an MLP

A block is large enough to be gathered while the block before it computes, and small beside the model.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from xlstm_jax.distributed.data_parallel.wire.communication import set_context


class SeenModule(NamedTuple):
    """Module of a model, as a ``UnitRule`` reads it.

    Attributes:
      cls: the class of the module.
      owns: whether the module itself has parameters, apart from parameters of its submodules.
      is_embedding: whether the module looks rows of a table up.
      is_cell: whether a loop over time calls the module.
      is_layer: whether ``nn.scan`` runs the module once for each of its layers.
    """

    cls: type[Any]
    owns: bool
    is_embedding: bool = False
    is_cell: bool = False
    is_layer: bool = False


@dataclass(frozen=True)
class UnitRule:
    """Choice of units from all modules of a model at once.

    ``choose`` takes the modules by path, and returns the units by path, each with the reason, as a text.
    """

    choose: Callable[[Mapping[str, SeenModule]], Mapping[str, str]]


def is_within(path: str, outer: str) -> bool:
    """Returns whether the module at ``path`` is the module at ``outer``, or lies inside it.

    Paths are texts like "blocks/0/mlp". The model itself has the path "", so every path is within "".
    """
    return not outer or path == outer or path.startswith(f"{outer}/")


_chosen: ContextVar[dict[str, str] | None] = ContextVar("reasons of chosen units", default=None)


@contextmanager
def recording_units() -> Iterator[dict[str, str]]:
    """Yields an empty dict, which ``note_units`` fills while the context is active: path of a unit -> reason.

    A unit is a module that gathers its parameters to run. The entries are the units that a ``UnitRule`` chooses for
    models that are initialised in the context, as ``{"h_0": "one of 2 blocks of a loop"}``.
    """
    reasons: dict[str, str] = {}
    with set_context(_chosen, reasons):
        yield reasons


def note_units(reasons: Mapping[str, str]) -> None:
    """Adds the reasons of chosen units, by path in the model, to the dict that ``recording_units`` has yielded.

    Does nothing outside of a ``recording_units`` context. In nested contexts only the innermost dict is changed.
    """
    if (recorded := _chosen.get()) is not None:
        recorded |= reasons


# ----------------------------------------------------------------------------------------------------- the default rule

# Smaller than the threshold of a model whose units are chosen by hand: at 2**18 about 6 % of a ResNet-50 would stay
# replicated. Norms and biases of most models stay replicated.
DEFAULT_UNITS_MIN_WEIGHT_SIZE = 2**14


def default_units(modules: Mapping[str, SeenModule]) -> dict[str, str]:
    """Returns the modules of a model that become units by default: path -> reason, in the order of ``modules``.

    A unit is a module that gathers its parameters to run. The reasons are "embedding", "layer of a scan", "one of N
    blocks of a loop", "loop over time" (the module around a recurrent cell) and "owns parameters outside of blocks".
    Recurrent cells and the modules inside cells are no units.

    >>> block, dense = SeenModule(nn.Module, owns=False), SeenModule(nn.Dense, owns=True)
    >>> default_units({"": block, "h_0": block, "h_0/up": dense, "h_1": block, "h_1/up": dense})
    {'h_0': 'one of 2 blocks of a loop', 'h_1': 'one of 2 blocks of a loop'}
    """
    cells = [path for path, module in modules.items() if module.is_cell]
    candidates = {path: module for path, module in modules.items() if not any(is_within(path, cell) for cell in cells)}
    around_owners = {outer for path, module in modules.items() if module.owns for outer in _outer(path)}
    alike = Counter(_sibling_of(path, module) for path, module in candidates.items() if path in around_owners)

    units = {}
    for path, module in candidates.items():
        count = alike[_sibling_of(path, module)]
        if module.is_embedding:
            units[path] = "embedding"
        elif module.is_layer:
            units[path] = "layer of a scan"
        elif path in around_owners and count > 1 and _has_number(path):
            units[path] = f"one of {count} blocks of a loop"

    blocks = tuple(units)
    for path, module in candidates.items():
        if any(is_within(path, block) for block in blocks):
            continue
        if any(path == outer[0] for cell in cells if (outer := [p for p in _outer(cell) if p in candidates])):
            units[path] = "loop over time"
        elif module.owns:
            units[path] = "owns parameters outside of blocks"
    return {path: units[path] for path in candidates if path in units}


def _outer(path: str) -> list[str]:
    """Returns the paths of the modules around the module at ``path``, innermost first and the model ("") last.

    "h/0/up" gives ["h/0", "h", ""]; the model's path "" gives [].
    """
    names = path.split("/") if path else []
    return ["/".join(names[:count]) for count in range(len(names) - 1, -1, -1)]


def _has_number(path: str) -> bool:
    return bool(re.search(r"\d", path.rpartition("/")[-1]))


def _sibling_of(path: str, module: SeenModule) -> tuple[str, str, type]:
    """Returns a key that is equal for the blocks of a loop: (path around the module, name pattern, class).

    The name pattern is the last name of ``path`` with "*" for each number: a ``Block`` at "encoder/h_12" gives
    ("encoder", "h_*", Block).
    """
    outer, _, name = path.rpartition("/")
    return outer, re.sub(r"\d+", "*", name), module.cls


DEFAULT_UNITS = UnitRule(default_units)
