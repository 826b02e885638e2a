"""``nnx_model``: turns an NNX model into functions ``init`` and ``apply``, which can be sharded from outside.

  nnx_model(make)                         a model whose parameters stay replicated
  shard_modules(model, where, "fsdp")    matching modules keep parameters split, and gather to run

Both results can be used like a Linen module in all of the library: ``create_train_state``, ``plan_sharding``,
``forecast``, checkpoints. ``bind`` returns the NNX module.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from xlstm_jax.common_types import PyTree
from xlstm_jax.deferred import import_for_nnx
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.extension import change_modules
from xlstm_jax.distributed.data_parallel.freezing import LeafPredicate
from xlstm_jax.distributed.data_parallel.layer_names import with_last_names, with_layer_names
from xlstm_jax.distributed.data_parallel.leaf import LOOKED_UP, Sharded
from xlstm_jax.distributed.data_parallel.modules.default_units import SeenModule, UnitRule, is_within, note_units
from xlstm_jax.distributed.data_parallel.modules.nnx_filters import (
    is_filter,
    leaf_mask,
    leaf_predicate,
    modules_taken,
)
from xlstm_jax.distributed.data_parallel.modules.nnx_module import (
    NNX,
    NOTE_SHAPE,
    collection_of,
    contents,
    is_variable,
    leaves_of,
    let_carries_vary,
    make_unit,
    modules_of,
    path_of,
    policy_of_reads,
    with_arrays_as_data,
    with_leaf,
)
from xlstm_jax.distributed.data_parallel.modules.unit import as_predicate, shard_here
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.trees import carry_axes
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key
from xlstm_jax.formatting import kind_of

NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm)  # these may take means over mesh axes
_Seen = tuple[tuple[int, ...], bool]  # a parameter's shape in its unit; whether exactly one lookup reads the parameter
STREAMS_OF_ZEROS = ("carry",)  # nnx.RNN draws a key from this stream for carries of zeros, nn.RNN uses a constant key


def nnx_model(make: Callable[[nnx.Rngs], nnx.Module]) -> "NnxModel":
    """Makes a model with ``init`` and ``apply``, as the functions of this library take it, from an NNX model.

    >>> from flax import nnx
    >>> model = nnx_model(lambda rngs: nnx.Linear(8, 16, rngs=rngs))
    >>> variables = model.init(jax.random.key(0), jnp.ones((4, 8)))
    >>> variables["params"]["kernel"].shape, model.apply(variables, jnp.ones((4, 8))).shape
    ((8, 16), (4, 16))

    Args:
      make: makes the module from an ``nnx.Rngs`` of the key, or dict of keys, passed to ``init``.
    Raises:
      TypeError: ``make`` is not a function.
    """
    if isinstance(make, nnx.Module) or not callable(make):
        raise TypeError(
            f"nnx_model takes a function that makes the module, not {kind_of(make)}; pass "
            "lambda rngs: MyModule(..., rngs=rngs)."
        )
    return NnxModel(make)


@dataclass(frozen=True, eq=False)
class NnxModel:
    """NNX model as functions of its variables; made by ``nnx_model``, sharded by ``shard_modules``.

    Variables are a dict of collections, as for a Linen module: ``params`` (``nnx.Param`` and its subclasses),
    ``batch_stats``, ``cache``, and others under NNX's name for the variable type. Each collection is a nested dict by
    attribute, ``{"blocks": {"0": {"kernel": ...}}}``, boxed where split. The state of ``nnx.Rngs`` is not included:
    keys are passed as arguments.

    >>> from flax import nnx
    >>> model = nnx_model(lambda rngs: nnx.Linear(8, 16, rngs=rngs))
    >>> module = model.bind(model.init(jax.random.key(0)))
    >>> type(module).__name__, sorted(model.unbind(module)["params"])
    ('Linear', ['bias', 'kernel'])
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    units: dict[str, ShardPolicy] = dataclasses.field(default_factory=dict)  # by the path of the gathering module
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)  # why a ``UnitRule`` chose a unit, by path

    def init(self, rngs: PyTree, /, *inputs: PyTree, method: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Returns the variables with the values of ``make(nnx.Rngs(...))``, split and boxed like a Linen module's.

        Args:
          rngs: a key, or a dict of keys by stream.
          *inputs: example inputs. The model is traced with their shapes to find the shape of a layer in scans over
            layers. Without inputs, no leading dim is treated as a layer dim.
          method, **kwargs: see ``apply``.
        """
        note_units(self.reasons)
        leaves = leaves_of(self._made(_streams(rngs)))
        # A parameter of scanned layers (nnx.scan) has a leading layer dim, which types do not distinguish from a dim of
        # the layer.
        seen = self._seen_shapes(rngs, inputs, method, kwargs) if self.units and (inputs or kwargs) else {}
        for path, policy in self.units.items():
            unit_params = {
                name: leaves[f"params/{name}"] for name, owner in self._unit_of_param.items() if owner == path
            }
            leaves |= _sharded(unit_params, path, policy, seen)
        return unflatten_dict(leaves, sep="/")

    def apply(
        self,
        variables: Mapping[str, Any],
        /,
        *inputs: PyTree,
        rngs: PyTree = None,
        method: str | Callable[..., Any] | None = None,
        mutable: bool | str | Iterable[str] = False,
        **kwargs: Any,
    ) -> Any:
        """Calls the module on ``inputs``.

        Args:
          variables: as returned by ``init``: global arrays, or shards inside ``shard_map``.
          rngs: a key, or a dict of keys by stream, for dropout and the like. Without a key, a module that draws random
            numbers raises.
          method: the name of another method, or a function of (module, inputs...), as
            ``lambda net, x: nnx.view(net, deterministic=True)(x)``.
          mutable: collections whose final values are returned; True: all.
        Returns:
          The output; with ``mutable``, the pair (output, dict of the mutable collections).
        Raises:
          ValueError: a variable is missing; names the variable.
        """
        module = self._bound(variables, rngs)
        # A cell makes zeros for its first carry; by type these are equal on all devices.
        let_carries_vary(module, frozenset(carry_axes((variables, inputs))))
        change_modules(modules_of(module).values())
        with jax.named_scope(type(module).__name__):
            output = _method(module, method)(*inputs, **kwargs)
        if mutable is False:
            return output
        after = self.unbind(module)
        names = after if mutable is True else [mutable] if isinstance(mutable, str) else mutable
        return output, {name: after[name] for name in names if name in after}

    def bind(self, variables: Mapping[str, Any], rngs: PyTree = None) -> nnx.Module:
        """Returns the NNX module with these variables, for ``nnx.split``, ``nnx.Optimizer`` and the like.

        Split parameters are both ``nnx.Param`` and boxes: ``partition_specs(nnx.state(module, nnx.Param), mesh)``
        returns their specs. They are gathered when a sharded module runs, and at any other read.

        Args:
          variables: as returned by ``init``.
          rngs: a key, or a dict of keys by stream, for the module's random streams; see ``apply``.
        Raises:
          ValueError: a parameter is padded (``uneven="pad"``) or frozen, which ``nnx.Optimizer`` does not support; or a
            variable is missing.
        """
        if others := [path for path, leaf in trees.sharded_leaves(variables) if not leaf.stores_value]:
            raise ValueError(
                f"bind: '{others[0]}' is stored with padding (uneven='pad'), which nnx.Optimizer would treat as "
                "values. Train the model by make_train_step, call it by apply, or shard it with uneven='replicate'."
            )
        if frozen := [path for path, leaf in trees.sharded_leaves(variables) if not leaf.trainable]:
            raise ValueError(
                f"bind: '{frozen[0]}' is frozen, which nnx.Optimizer does not support. Train the model by "
                "make_train_step, or call it by apply."
            )
        return self._bound(variables, rngs)

    def _bound(self, variables: Mapping[str, Any], rngs: PyTree) -> nnx.Module:
        graphdef, state = self._split
        leaves = flatten_dict(dict(variables), sep="/")
        return nnx.merge(graphdef, [self._with_value(path, leaf, leaves, rngs) for path, leaf in state])

    def unbind(self, module: nnx.Module) -> dict[str, Any]:
        """Returns the variables of a module made by ``bind``, as a dict of collections like the result of ``init``.

        Call it after custom steps on the module, say. Split parameters are in boxes; random state is left out.
        """
        return unflatten_dict(leaves_of(module), sep="/")

    def with_units(self, where: Any, policy: ShardPolicy) -> "NnxModel":
        """Returns a copy of the model whose modules matching ``where`` are units: they gather their parameters to run.

        ``shard_modules`` calls the method. ``where`` is a ``UnitRule``, a filter of NNX, or an argument of
        ``as_predicate``; ``policy`` has the options of the new units. Earlier units stay.

        Raises:
          ValueError: no module matches; a matching module is a unit already; or is a Linen module
            (``nnx.bridge.ToNNX``).
          TypeError: ``where`` has another form.
        """
        if isinstance(where, UnitRule):
            return self._with_units_by_rule(where, policy)
        modules = modules_of(self._abstract)
        if is_filter(where) and not isinstance(where, type):
            matching = modules_taken(where, {path: (self._parts[path], module) for path, module in modules.items()})
        else:
            matches = as_predicate(where, NNX)
            matching = [path for path, module in modules.items() if matches(path, module)]
        if not matching:
            described = ", ".join(
                f"{path or '(the model)'}: {type(module).__name__}" for path, module in modules.items()
            )
            raise ValueError(f"where={where!r} matches no module. There are {described}.")
        if twice := [path for path in matching if path in self.units]:
            raise ValueError(f"'{twice[0]}' matches where={where!r} and one before it; shard a module once.")
        if of_linen := [path for path in matching if isinstance(modules[path], nnx.bridge.ToNNX)]:
            raise ValueError(
                f"'{of_linen[0]}' matches where={where!r} and is a Linen module under nnx.bridge.ToNNX. Shard that: "
                "nnx.bridge.ToNNX(shard_modules(module, where, axis_name), rngs=rngs)."
            )
        return dataclasses.replace(self, units=self.units | dict.fromkeys(matching, policy))

    def _with_units_by_rule(self, rule: UnitRule, policy: ShardPolicy) -> "NnxModel":
        """Returns a copy of the model with further units (modules that gather their parameters), chosen by ``rule``.

        The new units have the options ``policy``. The rule chooses among modules that are neither a unit, nor inside a
        unit, nor a Linen module (``nnx.bridge.ToNNX``). The reasons of the choice are added to ``reasons`` of the copy.
        """
        params = [path for path, leaf in contents(self._abstract).items() if collection_of(leaf) == "params"]
        owners = {path.rpartition("/")[0] for path in params}
        seen = {}
        for path, module in modules_of(self._abstract).items():
            # A Linen module (nnx.bridge.ToNNX) gathers its parameters itself.
            if not isinstance(module, nnx.bridge.ToNNX) and not any(is_within(path, unit) for unit in self.units):
                is_cell = isinstance(module, nnx.RNNCellBase)
                seen[path] = SeenModule(type(module), path in owners, isinstance(module, nnx.Embed), is_cell)
        chosen = rule.choose(seen)
        units = self.units | dict.fromkeys(chosen, policy)
        return dataclasses.replace(self, units=units, reasons={**self.reasons, **chosen})

    def leaf_predicate(self, selection: Any) -> LeafPredicate:
        """Returns the predicate of a parameter's path, as "blocks/0/kernel", for a filter of NNX.

        ``trainable=`` of ``create_train_state``, ``init_sharded`` and ``plan_sharding`` takes filters itself; pass the
        predicate to ``freeze_params``, which has no model.

        >>> from flax import nnx
        >>> model = nnx_model(lambda rngs: nnx.LoRALinear(8, 4, lora_rank=2, rngs=rngs))
        >>> is_lora = model.leaf_predicate(nnx.LoRAParam)
        >>> is_lora("lora/lora_a"), is_lora("kernel")
        (True, False)

        Args:
          selection: a filter of (path, variable), as ``nnx.LoRAParam``, ``nnx.PathContains("norm")`` and ``nnx.All``,
            ``nnx.Any`` and ``nnx.Not`` of filters; or a predicate of a path, which is returned.
        Raises:
          ValueError: the filter selects no parameter.
          TypeError: ``selection`` has another form.
        """
        params = {path: leaf for path, leaf in contents(self._abstract).items() if collection_of(leaf) == "params"}
        return leaf_predicate(selection, {path: (self._parts[path], leaf) for path, leaf in params.items()})

    def leaf_mask(self, selection: Any) -> Callable[[PyTree], PyTree]:
        """Returns the mask for optax of the parameters that ``leaf_predicate(selection)`` selects.

        >>> from flax import nnx
        >>> model = nnx_model(lambda rngs: nnx.Linear(8, 4, rngs=rngs))
        >>> model.leaf_mask(nnx.Not(nnx.PathContains("bias")))({"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)})
        {'bias': False, 'kernel': True}
        """
        return leaf_mask(self.leaf_predicate(selection))

    @property
    def modules(self) -> dict[str, nnx.Module]:
        """Modules by path as text, as "blocks/0", with shapes in place of arrays; the model itself is at ``""``."""
        return modules_of(self._abstract)

    def _made(self, streams: nnx.Rngs) -> nnx.Module:
        """Returns a new module with initial values: ``make(streams)``, with ``streams`` as the source of random keys.

        Axis names in the metadata of variables stay metadata: NNX does not shard the values.
        """
        with nnx.use_eager_sharding(False):  # axes in a variable's metadata become names of its box
            return with_arrays_as_data(self.make(streams))

    def _with_units_in(self, module: nnx.Module) -> nnx.Module:
        """Turns the modules in ``module`` at the paths of ``units`` into units, in place, and returns ``module``."""
        modules = modules_of(module) if self.units else {}
        for path, policy in self.units.items():
            make_unit(modules[path], policy)
        return module

    @functools.cached_property
    def _abstract(self) -> nnx.Module:
        """The module that ``make`` returns, with a ``jax.ShapeDtypeStruct`` in place of each array; without units."""
        graphdefs: list[Any] = []

        def state() -> Any:
            graphdef, leaves = nnx.split(self._made(nnx.Rngs(0)))
            graphdefs.append(graphdef)
            return leaves

        # Not ``nnx.eval_shape``, which applies names in metadata to the current mesh.
        leaves = jax.eval_shape(state)
        return nnx.merge(graphdefs[0], leaves)

    @functools.cached_property
    def _parts(self) -> dict[str, tuple[Any, ...]]:
        """Paths of all modules and variables in the form of NNX, by path as text: "blocks/0" -> ("blocks", 0)."""
        return {path_of(parts): parts for parts, _ in nnx.iter_graph(self._abstract)}

    @functools.cached_property
    def _split(self) -> tuple[Any, list[tuple[str, Any]]]:
        """The graph definition of the abstract module with its units, and its leaves as pairs (path as text, variable).

        The pairs are in the order in which ``nnx.merge`` takes the leaves for this graph definition.
        """
        # Split once, from the abstract model: `apply` merges values into it, and runs no initialiser again.
        graphdef, state = nnx.split(self._with_units_in(nnx.clone(self._abstract)))
        flat = nnx.to_flat_state(state)
        return graphdef, [(path_of(path), leaf) for path, leaf in flat]

    @functools.cached_property
    def _unit_of_param(self) -> dict[str, str]:
        """Dict: path of a parameter -> path of the unit that gathers the parameter, the innermost unit around it.

        Parameters outside of all units are missing, and parameters inside a Linen module (``nnx.bridge.ToNNX``), which
        the wrappers of that module gather.
        """
        params = [path for path, leaf in contents(self._abstract).items() if collection_of(leaf) == "params"]
        # Parameters inside a Linen module (nnx.bridge.ToNNX) are gathered by the wrappers of that module.
        around = {
            path: [
                module for module in (*self.units, *self._linen_modules) if not module or path.startswith(f"{module}/")
            ]
            for path in params
        }
        innermost = {path: max(modules, key=len) for path, modules in around.items() if modules}
        return {path: unit for path, unit in innermost.items() if unit in self.units}

    @functools.cached_property
    def _linen_modules(self) -> list[str]:
        """Paths of the modules that contain a Linen module: the instances of ``nnx.bridge.ToNNX``."""
        return [path for path, module in modules_of(self._abstract).items() if isinstance(module, nnx.bridge.ToNNX)]

    def _seen_shapes(self, rngs: PyTree, inputs: Any, method: Any, kwargs: Any) -> dict[str, _Seen]:
        """Returns, by path of a variable in the model, (shape, is_lookup), as units read the variable in a traced call.

        A unit is a module that gathers its variables to run. ``shape`` is the shape in the unit: in a scan over layers
        the shape of a single layer, without the layer dim. ``is_lookup`` is true if the call of an ``nnx.Embed`` reads
        the variable, and no other call of a unit. Variables that no unit reads are missing. Nothing is computed.

        Args:
          rngs: a key, or a dict of keys by stream.
          inputs, method, kwargs: the call to trace, as in ``apply``.
        """
        seen: dict[str, _Seen] = {}

        def note(path: str, shape: tuple[int, ...], is_lookup: bool) -> None:
            seen[path] = shape, is_lookup and path not in seen

        def run(rngs: PyTree, inputs: Any) -> None:
            module = self._made(_streams(rngs))
            for path, leaf in contents(module).items():
                if is_variable(leaf):
                    leaf.set_metadata(NOTE_SHAPE, functools.partial(note, path))
            for norm in modules_of(module).values():
                if isinstance(norm, NORMS):
                    norm.axis_name = None  # the axis is not bound here, and does not affect shapes
            _method(self._with_units_in(module), method)(*inputs, **kwargs)

        jax.eval_shape(run, rngs, inputs)
        return seen

    def _with_value(self, path: str, leaf: Any, leaves: Mapping[str, Any], rngs: PyTree) -> Any:
        """Returns a copy of the abstract variable ``leaf`` at ``path`` with its value from ``leaves``.

        The value of random state (a key or count of ``nnx.Rngs``) is made from ``rngs``. A parameter that a unit
        gathers becomes a split variable. A bare array of the module is replaced by its value.

        Args:
          path: path in the model as text, as "blocks/0/kernel".
          leaf: the variable or bare array of the abstract module.
          leaves: the values or boxes by path with the collection, as "params/blocks/0/kernel".
          rngs: a key, or a dict of keys by stream; may be ``None``.
        Raises:
          ValueError: ``leaves`` has no entry for the variable.
        """
        name = collection_of(leaf)
        if name is None:
            # Random state has no collection: each call makes it from the call's keys.
            return leaf.copy(_random_state(path, leaf, rngs))
        if (full := f"{name}/{path}") not in leaves:
            raise ValueError(
                f"the variables have no '{full}', which the model has; they have the collections "
                f"{sorted({other.partition('/')[0] for other in leaves})}. Pass all that model.init returns."
            )
        policy = self.units.get(self._unit_of_param[path]) if path in self._unit_of_param else None
        if policy is None and name == "params" and not any(is_within(path, module) for module in self._linen_modules):
            policy = policy_of_reads(leaves[full])
        return with_leaf(leaf, leaves[full], policy) if is_variable(leaf) else leaves[full]


def _method(module: nnx.Module, method: str | Callable[..., Any] | None) -> Callable[..., Any]:
    if callable(method):
        return functools.partial(method, module)
    return getattr(module, method or "__call__")


def _streams(rngs: PyTree) -> nnx.Rngs:
    return nnx.Rngs(**rngs) if isinstance(rngs, Mapping) else nnx.Rngs(rngs)


def _random_state(path: str, leaf: Any, rngs: PyTree) -> Any:
    """Returns the value for ``leaf``, random state (a count or a key of ``nnx.Rngs``) of a module: zeros for a count.

    The value of a key is derived from the key of the leaf's stream in ``rngs`` (or of "default"), and from ``path``,
    the path of the leaf, so that streams have separate keys. A stacked leaf gets an array of keys, separate for each
    layer. If ``rngs`` has no key for the stream, the result is a ``_NoKey``, which raises when a key is drawn; the
    streams in ``STREAMS_OF_ZEROS`` use key 0.
    """
    value, tag = leaf.get_raw_value(), leaf.get_metadata("tag", "default")
    if not isinstance(leaf, nnx.RngKey):
        return jnp.zeros(value.shape, value.dtype)
    key = rngs.get(tag, rngs.get("default")) if isinstance(rngs, Mapping) else rngs
    if key is None and tag not in STREAMS_OF_ZEROS:
        return _NoKey(path, tag)
    key = jax.random.key(0) if key is None else key
    typed = key if is_prng_key(key) else jax.random.wrap_key_data(key)
    # Folded in by a checksum: Python's ``hash`` of a string differs between processes.
    folded = jax.random.fold_in(typed, zlib.crc32(path.encode()))
    return jax.random.split(folded, value.shape) if value.shape else folded


@jax.tree_util.register_static
@dataclass(frozen=True)
class _NoKey:
    """Placeholder for the key of a random stream that was given no key; raises when a key is drawn.

    NNX inspects a module's variables by ``hasattr`` (in ``nnx.view``, say), which must not raise: attributes that
    arrays do not have are missing here, too.
    """

    path: str
    tag: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(jax.Array, name):  # Python's special names: ``copy`` reads them
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise self._drawn()

    def __getitem__(self, index: Any) -> Any:
        raise self._drawn()

    def _drawn(self) -> ValueError:
        return ValueError(
            f"'{self.path}' draws random numbers of the stream {self.tag!r}, and apply was given no key for it: pass "
            f"rngs={{{self.tag!r}: key}}, or call the model so that it draws none (nnx.view(net, deterministic=True))."
        )


def _sharded(
    unit_params: Mapping[str, Any], path: str, policy: ShardPolicy, seen: Mapping[str, _Seen]
) -> dict[str, Any]:
    """Returns the parameters of the unit at ``path``, split and boxed by ``policy``, in the order of ``unit_params``.

    The keys are those of ``unit_params`` with "params/" in front. The shape of a single layer, without layer dims,
    decides which dim is split.

    Args:
      unit_params: values or boxes of the parameters that the unit gathers, by path in the model.
      path: path of the unit in the model.
      policy: the options of the unit.
      seen: by path in the model, the parameter's shape in the unit (of one layer), and whether a single lookup reads
        it. A parameter that is missing in ``seen`` has no layer dims.
    Raises:
      ValueError: the shape in ``seen`` is not the last dims of the parameter's shape.
    """
    below = {name: f"params/{name.removeprefix(f'{path}/' if path else '')}" for name in unit_params}
    leaves, layer_dims = {}, {}
    for name, leaf in unit_params.items():
        shape = np.shape(trees.stored_values(leaf))
        as_seen = seen.get(name, (shape, False))[0]
        count = len(shape) - len(as_seen)
        if count < 0 or shape[count:] != as_seen:
            raise ValueError(
                f"'{name}' of shape {shape} is seen by its module as {as_seen}: these are not its last dims. Scan over "
                "dim 0."
            )
        layer_dims[below[name]], leaves[below[name]] = count, with_last_names(leaf, len(as_seen))
    # Under vmap a leaf has the shape of one layer; the policy decides by this shape, as in a scan of Linen.
    shard: Callable[[Any], Any] = functools.partial(shard_here, policy)
    for depth in range(max(layer_dims.values(), default=0)):
        dims = {path: 0 if count > depth else None for path, count in layer_dims.items()}
        shard = jax.vmap(shard, in_axes=(dims,), out_axes=dims)
    boxed = trees.map_leaves(with_layer_names, shard(leaves))
    for name in unit_params:
        if isinstance(boxed[below[name]], Sharded) and seen.get(name, ((), False))[1]:
            boxed[below[name]] = boxed[below[name]].replace(marks=boxed[below[name]].marks | {LOOKED_UP})
    return {f"params/{name}": boxed[below[name]] for name in unit_params}


import_for_nnx()  # modules that extend models of NNX register themselves now
