"""Units of a Linen model that a ``UnitRule`` chooses, such as the default of ``shard_modules``.

A rule reads all modules of the model, so it chooses when the model is left during initialisation. Until then each
module that owns parameters splits its own: how a parameter is split follows from its shape in the module that owns it.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import linen as nn

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.extension import COLLECTIONS
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.modules.default_units import SeenModule, is_within, note_units
from xlstm_jax.distributed.data_parallel.modules.linen_module import (
    LinenRun,
    MapOfLeaves,
    RunningUnit,
    active_interceptors_of,
    do_nothing,
    parameters,
)
from xlstm_jax.distributed.data_parallel.modules.unit import shard_here
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.trees import map_leaves_with_path
from xlstm_jax.introspection import inside_map_variables
from xlstm_jax.private_names import BatchTracer


@dataclass(eq=False)
class LinenRunByRule(LinenRun):
    """Run of a sharded model whose units are chosen by the ``UnitRule`` that ``shard_modules`` got as ``where``."""

    # During initialisation: the modules that own parameters; the size of each parameter in the outermost module that
    # has been left, with the path of the module; the modules that nn.scan runs for each layer.
    _owners: set[str] = field(default_factory=set)
    _sizes: dict[str, tuple[int, str]] = field(default_factory=dict)
    _layers: set[str] = field(default_factory=set)

    def _initialise(self, path: str, module: nn.Module, method: Callable[[], Any]) -> Any:
        """Runs ``method``, a method of ``module`` in ``init``, then splits the parameters that ``module`` owns.

        Returns the result of ``method``, which takes no arguments. A module owns the parameters that no module inside
        has split before. Recurrent cells own no parameters, nor do modules inside a unit that the model itself has
        wrapped, or inside an ``nn.map_variables`` or ``nn.vmap`` of the model. When the outermost call of the model
        returns, ``_choose_units`` chooses the units of the whole model; until then the owner is the unit of a
        parameter.
        """
        result = method()
        # A cell would gather at every step of its loop: the module around the loop owns the cell's parameters.
        if any(issubclass(cls, nn.RNNCellBase) for _, cls in self._open_modules):
            return result
        watchers = active_interceptors_of(object)
        is_in_unit = any(isinstance(watcher, RunningUnit) for watcher in watchers[: watchers.index(self)])
        params = {"/".join((*place[len(self.root) :], name)): (name, leaf) for place, name, leaf in parameters(module)}
        # Under nn.vmap a leaf is one entry of the parameter, and in an nn.map_variables of the model (nn.WeightNorm) it
        # is not the parameter: a module around these owns the leaf.
        is_foreign = is_in_unit or inside_map_variables(MapOfLeaves)
        if is_foreign or any(isinstance(leaf.value, BatchTracer) for _, leaf in params.values()):
            return result

        self._seen[path] = type(module)
        for full, (_, leaf) in params.items():
            size, inner = self._sizes.get(full, (math.prod(leaf.true_shape), path))
            # A parameter that has grown since a module within was left has got a layer dim.
            if size != math.prod(leaf.true_shape):
                self._layers.add(inner)
            self._sizes[full] = math.prod(leaf.true_shape), path
        # A leaf that had a unit before belongs to a module that the model itself has wrapped. nn.scan runs a layer
        # twice, first for its shapes: in the second run the leaves of the layer are new again.
        new = {
            name
            for full, (name, leaf) in params.items()
            if self._unit_of.get(full, path) == path and not leaf.unit_depth
        }
        if new:
            self._owners.add(path)
            self._unit_of |= {full: path for full, (name, _) in params.items() if name in new}
            _map_params(module, functools.partial(_split, self.sharding.policy, new))
        if len(self._open_modules) == 1 and not path:
            self._choose_units(module)
        return result

    def _choose_units(self, model: nn.Module) -> None:
        """Chooses the units by the ``UnitRule``, and stores the unit of each parameter in its box (``unit_depth``).

        The unit of a parameter is the innermost chosen module around its owner, or the owner without such a module. The
        reasons are passed to ``note_units``, by path in the outermost model.
        """
        modules = {
            path: SeenModule(cls, path in self._owners, issubclass(cls, nn.Embed), is_layer=path in self._layers)
            for path, cls in sorted(self._seen.items())
        }
        chosen = self.sharding.where.choose(modules)
        depths = {}
        for full, owner in self._unit_of.items():
            unit = max((unit for unit in chosen if is_within(owner, unit)), key=len, default=owner)
            # A loop owns the parameters of a cell that was made outside of the loop: they are not below its path.
            if is_within(full, unit):
                depths[full] = len(full.split("/")) - len(unit.split("/") if unit else [])
        _map_params(model, functools.partial(_with_units, depths))
        at = "/".join(self.root)
        note_units({f"{at}/{path}".strip("/"): reason for path, reason in chosen.items()})


def _map_params(module: nn.Module, change: Callable[[PyTree], PyTree]) -> None:
    """Replaces the variables of a module, in ``init``, by ``change(variables)``; nothing is returned.

    ``variables`` is a dict of collections, with the variables of the module and its submodules: "params", and the
    replicated collections that extensions read.
    """
    unchanged = MapOfLeaves(lambda variables: variables)
    nn.map_variables(do_nothing, ["params", *COLLECTIONS], unchanged, change, mutable=True)(module)


def _split(policy: ShardPolicy, new: Collection[str], variables: PyTree) -> PyTree:
    """Returns the variables of a module; parameters with names in ``new`` are split and boxed, others unchanged.

    A name is relative to the module, as "mlp/kernel". Parameters that are not in ``new`` were split by a module inside.
    """

    def split_if_new(path: str, split: Any, leaf: Any) -> Any:
        return split if path.removeprefix("params/") in new else leaf

    return map_leaves_with_path(split_if_new, shard_here(policy, variables), variables)


def _with_units(depths: Mapping[str, int], variables: PyTree) -> PyTree:
    """Returns a model's variables with ``unit_depth`` in the boxes of parameters replaced by the value in ``depths``.

    ``depths`` has the number of names in a parameter's path below its unit, by the path of the parameter: 2 for
    "h_0/mlp/kernel" in the unit "h_0". Parameters that are not in ``depths`` or not boxed are unchanged.
    """

    def with_depth(path: str, leaf: Any) -> Any:
        depth = depths.get(path.removeprefix("params/"))
        return leaf if depth is None or not isinstance(leaf, Sharded) else leaf.replace(unit_depth=depth)

    return map_leaves_with_path(with_depth, variables)
