"""Which Linen submodules ``shard_modules`` shards: by class or predicate, or by their size or repetition in the model.

The units are chosen once, while the model is initialised: each time that a module is left. The boxes of their
parameters then say which module gathers them, so ``apply`` asks the boxes.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flax import linen as nn

from xlstm_jax.distributed.data_parallel.modules.linen_module import LINEN
from xlstm_jax.distributed.data_parallel.modules.unit import Predicate, as_predicate


@dataclass(frozen=True)
class SeenModule:
    """A module that has run: its class, its places, and the shapes of all parameters at or below its places.

    ``places`` are its own path, and the paths of modules that were passed to it, as a cell is passed to an RNN. Within
    ``nn.scan`` the shapes are those of one layer.
    """

    cls: type[nn.Module]
    places: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]

    @property
    def likeness(self) -> tuple[Any, ...]:
        """Equal for modules that could be layers of one scan: the class, and the names and shapes of parameters."""
        named = ((leaf.removeprefix(place), shape) for place in self.places for leaf, shape in self.shapes_in(place))
        return self.cls, *sorted(named)

    def shapes_in(self, place: str) -> list[tuple[str, tuple[int, ...]]]:
        return [(leaf, shape) for leaf, shape in self.shapes.items() if is_below(leaf, place)]


@dataclass
class Seen:
    """What an initialisation has shown so far. Paths start at the sharded model, which is "" itself.

    ``scanned`` are the modules that ``nn.scan`` gives a layer dim, ``units`` the chosen modules. ``unit_of`` has the
    path of its unit for each parameter of a unit.
    """

    modules: dict[str, SeenModule] = field(default_factory=dict)
    scanned: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    unit_of: dict[str, str] = field(default_factory=dict)

    def choose(self, path: str) -> None:
        """Makes a module a unit, which gathers those of its parameters that no other unit gathers."""
        self.units.add(path)
        self.unit_of |= {leaf: self.unit_of.get(leaf, path) for leaf in self.modules[path].shapes}

    def own_size(self, path: str) -> int:
        """The number of values below a module that no other unit gathers."""
        shapes = self.modules[path].shapes.items()
        return sum(math.prod(shape) for leaf, shape in shapes if self.unit_of.get(leaf, path) == path)


def is_below(path: str, module: str) -> bool:
    """Whether ``path`` is that of the module, or of what lies in it."""
    return not module or path == module or path.startswith(f"{module}/")


class Selection:
    """What ``where`` comes down to: decided while the model is initialised, and read off the boxes when it is applied.

    ``names_modules`` where a user has named the units, by a class or a predicate.
    """

    names_modules: ClassVar[bool] = False

    def units(self, seen: Seen, path: str, module: nn.Module) -> list[str]:
        """The paths of the modules to shard, decided when the module at ``path`` is left."""
        del seen, path, module
        return []

    def gathers(self, path: str, module: nn.Module, is_marked: bool) -> bool:
        """Whether a module is to gather split parameters; ``is_marked`` where boxes say that it does."""
        del path, module
        return is_marked


@dataclass(frozen=True)
class _Matching(Selection):
    """The modules of which a predicate is true."""

    names_modules: ClassVar[bool] = True

    predicate: Predicate

    def units(self, seen: Seen, path: str, module: nn.Module) -> list[str]:
        return [path] if self.predicate(path, module) else []

    def gathers(self, path: str, module: nn.Module, is_marked: bool) -> bool:
        return bool(self.predicate(path, module))


@dataclass(frozen=True)
class _LargerThan(Selection):
    size: int

    def __repr__(self) -> str:
        return f"larger_than({self.size})"

    def units(self, seen: Seen, path: str, module: nn.Module) -> list[str]:
        return [path] if seen.own_size(path) > self.size and not isinstance(module, nn.RNNCellBase) else []


@dataclass(frozen=True)
class _RepeatedBlocks(Selection):
    def __repr__(self) -> str:
        return "repeated_blocks()"

    def units(self, seen: Seen, path: str, module: nn.Module) -> list[str]:
        del module
        if path in seen.scanned and not any(other != path and is_below(path, other) for other in seen.scanned):
            return [path]
        return _repeated(seen, "") if not path else []


def _repeated(seen: Seen, path: str) -> list[str]:
    """The outermost modules below ``path`` that have a sibling of their class with parameters of the same shapes."""
    children = [child for child in seen.modules if child and child.rpartition("/")[0] == path]
    alike: dict[Any, list[str]] = defaultdict(list)
    for child in children:
        alike[seen.modules[child].likeness].append(child)
    groups = [group for group in alike.values() if len(group) > 1 and _is_block(seen, group[0])]
    chosen = [child for group in groups for child in group]
    rest = [child for child in children if child not in chosen and child not in seen.scanned]
    return chosen + [unit for child in rest for unit in _repeated(seen, child)]


def _is_block(seen: Seen, path: str) -> bool:
    """Whether a module has submodules with parameters, in the shapes that the model has: nothing has stacked them."""
    module, of_model = seen.modules[path], seen.modules[""].shapes
    depth = max(
        (leaf.count("/") - place.count("/") for place in module.places for leaf, _ in module.shapes_in(place)),
        default=0,
    )
    is_stored_so = all(of_model.get(leaf) == shape for leaf, shape in module.shapes.items())
    return depth > 1 and is_stored_so and not issubclass(module.cls, nn.RNNCellBase)


def larger_than(size: int) -> Selection:
    """For ``shard_modules``: every module whose own parameters have more than ``size`` values.

    The parameters of a chosen submodule do not count. So the innermost modules that are large enough are chosen, and a
    module around them gathers the rest if the rest is large enough, too. The cell of an ``nn.RNN`` is never chosen,
    since it would gather at every step of the loop; the RNN is.

    >>> model = shard_modules(nn.Sequential([nn.Dense(64), nn.Dense(4)]), larger_than(1000), "fsdp", min_weight_size=0)
    >>> plan = plan_sharding(model, {"fsdp": 4}, jnp.ones((8, 32)))
    >>> [(row.path, row.parts, row.gathered_with) for row in plan.rows if row.path.endswith("kernel")]
    [('layers_0/kernel', 4, 'layers_0'), ('layers_1/kernel', 1, None)]

    Args:
      size: a number of values, as 2**20.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"size={size!r} is no number of values; pass an int, as 2**20.")
    return _LargerThan(size)


def repeated_blocks() -> Selection:
    """For ``shard_modules``: the layers of a model that has several equal layers.

    A layer is a class that ``nn.scan`` runs over (for a scan of a function, pass the class of its module), or a module
    that has submodules, and a sibling of the same class whose parameters have the same names and shapes. Of layers
    within layers the outermost are taken. Modules around the layers (embedding, head) are not sharded; to shard them,
    too: ``shard_modules(shard_modules(model, repeated_blocks(), "fsdp"), nn.Embed, "fsdp")``.

    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return x + nn.Dense(32)(x)
    >>> model = shard_modules(nn.Sequential([Block(), Block()]), repeated_blocks(), "fsdp", min_weight_size=0)
    >>> plan = plan_sharding(model, {"fsdp": 4}, jnp.ones((8, 32)))
    >>> sorted({row.gathered_with for row in plan.rows})
    ['layers_0', 'layers_1']
    """
    return _RepeatedBlocks()


def as_selection(where: Any) -> Selection:
    """``where`` as users write it.

    Raises:
      TypeError: see ``as_predicate``.
    """
    return where if isinstance(where, Selection) else _Matching(as_predicate(where, LINEN))
