"""``nnx_model``: an NNX model as a pair of functions, ``init`` and ``apply``, sharded from outside.

  nnx_model(make)                             a model whose parameters stay whole
  shard_nnx_modules(model, where, "fsdp")     the modules that match keep theirs split, and gather them where they run

Both are models as a Linen module is one, so all of the library takes them: ``create_train_state``, ``plan_sharding``,
``forecast``, checkpoints. ``bind`` gives the NNX module itself.
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
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import boxes, collectives
from xlstm_jax.distributed.data_parallel.axes import as_axis_names
from xlstm_jax.distributed.data_parallel.communication import Replicas, is_prng_key
from xlstm_jax.distributed.data_parallel.decisions.shard_choice import DEFAULT_MIN_WEIGHT_SIZE, UNEVEN
from xlstm_jax.distributed.data_parallel.fronts.entering import shard_here
from xlstm_jax.distributed.data_parallel.fronts.nnx.units import (
    LEAF_PATH,
    SeenShapes,
    Unit,
    Where,
    carries_vary_over,
    let_carries_vary,
    make_unit,
    matches,
    modules_of,
    own_contents,
)
from xlstm_jax.distributed.data_parallel.fronts.nnx.variables import (
    collection_of,
    contents,
    get_at,
    path_of,
    put,
    set_at,
    variables_of,
    with_own_names,
)
from xlstm_jax.distributed.data_parallel.shard import ShardRule
from xlstm_jax.wording import kind_of

NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm)
STREAMS_OF_ZEROS = ("carry",)  # nnx.RNN draws from it for carries that are zeros, as nn.RNN does from a constant key


def nnx_model(make: Callable[[nnx.Rngs], nnx.Module]) -> "NnxModel":
    """An NNX model for the functions of this library, which take one with ``init`` and ``apply``.

    >>> from flax import nnx
    >>> model = nnx_model(lambda rngs: nnx.Linear(8, 16, rngs=rngs))
    >>> variables = model.init(jax.random.key(0), jnp.ones((4, 8)))
    >>> variables["params"]["kernel"].shape, model.apply(variables, jnp.ones((4, 8))).shape
    ((8, 16), (4, 16))

    Args:
      make: makes the module; given ``nnx.Rngs`` of the key, or dict of keys, that ``init`` is given.
    Raises:
      TypeError: ``make`` is no function.
    """
    if isinstance(make, nnx.Module) or not callable(make):
        raise TypeError(
            f"nnx_model takes a function that makes the module, not {kind_of(make)}; pass "
            "lambda rngs: MyModule(..., rngs=rngs)."
        )
    return NnxModel(make)


def shard_nnx_modules(
    model: "NnxModel",
    where: Where,
    axis_name: AxisNames,
    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
    *,
    reshard_after_forward: bool = False,
    replicas: Replicas | None = None,
    uneven: str = UNEVEN[0],
) -> "NnxModel":
    """The model with modules that keep their parameters sharded: ``shard_module_params`` for NNX, from outside.

    >>> from flax import nnx
    >>> model = shard_nnx_modules(nnx_model(lambda rngs: nnx.Linear(8, 16, rngs=rngs)), nnx.Linear, "fsdp", 64)
    >>> x = jnp.ones((8, 8))
    >>> params = init_sharded(model, mesh, jax.random.key(0), x, batch_axes=("dp", "fsdp"))["params"]
    >>> params["kernel"].names, params["bias"].shape
    ((None, 'fsdp'), (16,))

    Args:
      model: of ``nnx_model``. Called again, it shards further modules, in another way.
      where: the modules that are gathered as one each: a class or a tuple of classes, or a function of (path, module)
        that says whether a module is one; paths are like ``blocks/0/attention``, that of the model is empty. Of one
        within another, the inner one gathers its own parameters, and the outer the rest.
      axis_name, min_weight_size, gather_dtype, grad_scatter_dtype, reshard_after_forward, replicas, uneven: see
        ``shard_module_params``.
    Raises:
      TypeError: the model is none of ``nnx_model``, ``where`` is none of these, or a dtype is none.
      ValueError: no module matches, and the error lists those there are; or one is sharded twice.
    """
    if not isinstance(model, NnxModel):
        raise TypeError(f"shard_nnx_modules takes what nnx_model(make) returns, not {kind_of(model)}.")
    axes, rule = (
        as_axis_names(axis_name),
        ShardRule.of(min_weight_size, uneven, gather_dtype, grad_scatter_dtype, replicas),
    )
    if not (callable(where) or isinstance(where, tuple)):
        raise TypeError(
            f"where is {kind_of(where)}: pass a class of nnx modules, a tuple of them, or a function of (path, module)."
        )
    if replicas and (both := set(axes) & set(replicas.axes)):
        raise ValueError(f"{min(both)!r} is in axis_name={axes} and in {replicas}; an axis splits or copies, not both.")
    sharded = dataclasses.replace(model, rules=(*model.rules, (where, Unit(axes, rule, reshard_after_forward))))
    assert sharded.units  # made here, so that what does not match is refused here
    return sharded


@dataclass(frozen=True, eq=False)
class NnxModel:
    """An NNX model as functions of its variables; ``nnx_model`` makes one, ``shard_nnx_modules`` shards it.

    Variables are a dict of collections, as of a Linen module: ``params`` (``nnx.Param`` and its subclasses),
    ``batch_stats``, ``cache``, and others by the name that NNX has for their type; each a nested dict by attribute,
    ``{"blocks": {"0": {"kernel": ...}}}``, boxed where split. The state of ``nnx.Rngs`` is in none: keys are passed.

    >>> from flax import nnx
    >>> model = nnx_model(lambda rngs: nnx.Linear(8, 16, rngs=rngs))
    >>> module = model.bind(model.init(jax.random.key(0)))
    >>> type(module).__name__, sorted(model.unbind(module)["params"])
    ('Linear', ['bias', 'kernel'])
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    rules: tuple[tuple[Where, Unit], ...] = ()

    def init(self, rngs: PyTree, /, *inputs: PyTree, method: Any = None, **kwargs: Any) -> dict[str, Any]:
        """The variables, with the values that ``make(nnx.Rngs(...))`` has; split and boxed as a Linen module's are.

        Args:
          rngs: a key, or a dict of keys by stream.
          *inputs: what the model is called on. It is traced on them, without values, to see what a layer is where it
            scans over layers. Without inputs, a leading dim is not taken to be one of layers.
          method, **kwargs: as for ``apply``.
        """
        made = self._made(_streams(rngs))
        variables, found = variables_of(made), contents(nnx.iter_graph(made))
        for name, leaf in found.items():
            if collection_of(leaf) == "params":
                set_at(variables, f"params/{name}", with_own_names(leaf, np.ndim(leaf.get_raw_value())))
        shapes = self._seen_shapes(rngs, inputs, method, kwargs) if self.units and (inputs or kwargs) else {}
        for path, unit in self.units.items():
            own = {name: found[name] for name in self._own_params(path)}
            for name, leaf in _sharded(own, unit, shapes).items():
                set_at(variables, f"params/{name}", _with_unit(path, name, leaf))
        return variables

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
          variables: as of ``init``: of global arrays, or inside ``shard_map`` of shards.
          rngs: a key, or a dict of keys by stream, for dropout and the like; without one, a module that needs it fails.
          method: the name of another method, or a function of (module, inputs...), as
            ``lambda net, x: nnx.view(net, deterministic=True)(x)``.
          mutable: the collections that are returned as they are afterwards; True: all.
        Returns:
          The output; with ``mutable``, the pair of it and a dict of these collections.
        Raises:
          ValueError: a variable is missing; names it.
        """
        module = self.bind(variables, rngs)
        axes = {axis for leaf in jax.tree.leaves((variables, inputs)) for axis in collectives.varying_axes(leaf)}
        with jax.named_scope(type(module).__name__), carries_vary_over(axes):
            output = _method(module, method)(*inputs, **kwargs)
        if mutable is False:
            return output
        after = variables_of(module)
        names = after if mutable is True else [mutable] if isinstance(mutable, str) else mutable
        return output, {name: after[name] for name in names if name in after}

    def bind(self, variables: Mapping[str, Any], rngs: PyTree = None) -> nnx.Module:
        """The NNX module with these variables, for ``nnx.split``, ``nnx.Optimizer`` and the like.

        Parameters that are split are ``nnx.Param`` and boxes: ``partition_specs(nnx.state(module, nnx.Param), mesh)``
        gives their specs. They are gathered where a module that was sharded runs, and wherever else they are read.
        """
        graphdef, state = self._split
        values = [(path, self._with_value(path_of(path), leaf, variables, rngs)) for path, leaf in state]
        module: nnx.Module = nnx.merge(graphdef, nnx.from_flat_state(values))
        found, units = contents(nnx.iter_graph(module)), self._unit_of_param
        for path, unit in units.items():
            put(found[path], get_at(variables["params"], path), unit.axes, unit.rule)
        return module

    def unbind(self, module: nnx.Module) -> dict[str, Any]:
        """The variables of a module that ``bind`` made: its inverse, after training steps of your own, say."""
        return variables_of(module)

    def _made(self, streams: nnx.Rngs) -> nnx.Module:
        with nnx.use_eager_sharding(False):  # axes that a variable's metadata name are put into its box
            module = self.make(streams)
        let_carries_vary(module)
        return module

    @functools.cached_property
    def units(self) -> dict[str, Unit]:
        """What is sharded: by path of the module that gathers."""
        found = modules_of(self._abstract)
        chosen: dict[str, Unit] = {}
        for where, unit in self.rules:
            matching = [path for path, module in found.items() if matches(where, path, module)]
            if not matching:
                there = ", ".join(f"{path or '(the model)'}: {type(module).__name__}" for path, module in found.items())
                raise ValueError(f"where={where!r} matches no module. There are {there}.")
            if twice := [path for path in matching if path in chosen]:
                raise ValueError(f"'{twice[0]}' matches where={where!r} and one before it; shard a module once.")
            chosen |= dict.fromkeys(matching, unit)
        return chosen

    @functools.cached_property
    def _abstract(self) -> nnx.Module:
        return nnx.eval_shape(lambda: self._made(nnx.Rngs(0)))

    @functools.cached_property
    def _sharded_abstract(self) -> nnx.Module:
        module = nnx.clone(self._abstract)
        for path, unit in self.units.items():
            make_unit(modules_of(module)[path], unit)
        return module

    @functools.cached_property
    def _split(self) -> tuple[Any, list[tuple[Any, Any]]]:
        graphdef, state = nnx.split(self._sharded_abstract)
        return graphdef, list(nnx.to_flat_state(state))

    @functools.cached_property
    def _unit_of_param(self) -> dict[str, Unit]:
        """For each parameter that a unit gathers, by path, that unit."""
        return {name: unit for path, unit in self.units.items() for name in self._own_params(path)}

    def _own_params(self, unit: str) -> list[str]:
        """The paths of the parameters that the unit at a path gathers."""
        own = own_contents(modules_of(self._sharded_abstract)[unit])
        start = f"{unit}/" if unit else ""
        return [start + path for path, leaf in own.items() if collection_of(leaf) == "params"]

    def _seen_shapes(self, rngs: PyTree, inputs: Any, method: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters as their units see them where the model runs, by path."""

        def run(rngs: PyTree, inputs: Any, kwargs: Any) -> None:
            module = self._made(_streams(rngs))
            for path, leaf in contents(nnx.iter_graph(module)).items():
                if isinstance(leaf, nnx.Variable):
                    leaf.set_metadata(LEAF_PATH, path)
            for norm in modules_of(module).values():
                if isinstance(norm, NORMS):
                    norm.axis_name = None  # no axis is bound in ``init``, where Linen's BatchNorm looks at none either
            for path, unit in self.units.items():
                make_unit(modules_of(module)[path], unit)
            _method(module, method)(*inputs, **kwargs)

        with SeenShapes() as seen:
            jax.eval_shape(lambda rngs, inputs: run(rngs, inputs, kwargs), rngs, inputs)
        return seen.shapes

    def _with_value(self, path: str, leaf: Any, variables: Mapping[str, Any], rngs: PyTree) -> Any:
        name = collection_of(leaf)
        if name is None:
            return leaf.copy(_random_state(path, leaf, rngs))
        try:
            value = get_at(variables[name], path)
        except (KeyError, TypeError):
            raise ValueError(
                f"the variables have no '{name}/{path}', which the model has; they have the collections "
                f"{sorted(variables)}. Pass all that model.init returns."
            ) from None
        return leaf.copy(boxes.leaf_value(value)) if isinstance(leaf, nnx.Variable) else value


def _method(module: nnx.Module, method: str | Callable[..., Any] | None) -> Callable[..., Any]:
    if callable(method):
        return functools.partial(method, module)
    return getattr(module, method or "__call__")


def _streams(rngs: PyTree) -> nnx.Rngs:
    return nnx.Rngs(**rngs) if isinstance(rngs, Mapping) else nnx.Rngs(rngs)


def _random_state(path: str, leaf: Any, rngs: PyTree) -> Any:
    """The state of a stream of random numbers: a key of its own for each stream, and for each layer, from ``rngs``."""
    value, tag = leaf.get_raw_value(), leaf.get_metadata("tag", "default")
    if not isinstance(leaf, nnx.RngKey):
        return jnp.zeros(value.shape, value.dtype)
    key = rngs.get(tag, rngs.get("default")) if isinstance(rngs, Mapping) else rngs
    if key is None and tag not in STREAMS_OF_ZEROS:
        return _NoKey(path, tag)
    key = jax.random.key(0) if key is None else key
    typed = key if is_prng_key(key) else jax.random.wrap_key_data(key)
    own = jax.random.fold_in(typed, zlib.crc32(path.encode()))
    return jax.random.split(own, value.shape) if value.shape else own


@jax.tree_util.register_static
@dataclass(frozen=True)
class _NoKey:
    """Stands where a stream of random numbers was given no key, and says so when it is drawn from."""

    path: str
    tag: str

    def _refuse(self) -> Any:
        raise ValueError(
            f"'{self.path}' draws random numbers of the stream {self.tag!r}, and apply was given no key for it: pass "
            f"rngs={{{self.tag!r}: key}}, or call the model so that it draws none (nnx.view(net, deterministic=True))."
        )

    def __getitem__(self, index: Any) -> Any:
        return self._refuse()

    @property
    def shape(self) -> Any:
        return self._refuse()

    @property
    def dtype(self) -> Any:
        return self._refuse()


def _sharded(variables: Mapping[str, Any], unit: Unit, seen: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The parameters of a unit, by path, in boxes; each decided on as its layer is, with leading dims for layers."""
    shapes = {path: np.shape(variable.get_raw_value()) for path, variable in variables.items()}
    layer_dims = {path: _layer_dims(path, shape, seen.get(path, shape)) for path, shape in shapes.items()}
    shard: Callable[[Any], Any] = functools.partial(shard_here, unit.axes, unit.rule)
    for depth in range(max(layer_dims.values(), default=0)):
        dims = {path: 0 if count > depth else None for path, count in layer_dims.items()}
        shard = jax.vmap(shard, in_axes=(dims,), out_axes=dims)
    leaves = {path: with_own_names(v, len(shapes[path]) - layer_dims[path]) for path, v in variables.items()}
    return boxes.map_leaves(boxes.with_layer_names, shard(leaves))


def _with_unit(unit: str, path: str, leaf: Any) -> Any:
    """The leaf at a path, in a box that says that the unit at another path gathers it."""
    if not isinstance(leaf, boxes.Sharded):
        return leaf
    return leaf.replace(unit_depth=len(path.split("/")) - len(unit.split("/") if unit else []))


def _layer_dims(path: str, shape: tuple[int, ...], seen: tuple[int, ...]) -> int:
    """How many leading dims are of layers, by the shape that the module sees of a parameter."""
    count = len(shape) - len(seen)
    if count < 0 or shape[count:] != seen:
        raise ValueError(
            f"'{path}' of shape {shape} is seen by its module as {seen}: these are not its last dims. Scan over dim 0."
        )
    return count
