"""``scan_layers``: ``nn.scan`` over wrapped layers that gathers a layer's weights while the layer before computes.

Where nothing is gathered (outside of ``shard_map``, in ``init``, on one device), the result runs ``nn.scan`` of
``nn.remat``. Otherwise the layer's function, parameters and keys are passed to ``prefetch.prefetched_scan``.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from flax import linen as nn
from flax.core import lift, meta
from flax.linen.transforms import lift_transform

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.modules.linen_module import RunningUnit, active_interceptors_of, inside_unit
from xlstm_jax.distributed.data_parallel.prefetch import leaves_of_layer, prefetched_scan, route_of
from xlstm_jax.distributed.data_parallel.trees import split_arrays
from xlstm_jax.formatting import kind_of
from xlstm_jax.introspection import recomputes

Layer = TypeVar("Layer", bound=type[nn.Module])

SPLIT_RNGS: Mapping[Any, bool] = {"params": True, "dropout": True}


def scan_layers(
    layer: Layer,
    length: int,
    *,
    split_rngs: Mapping[Any, bool] = SPLIT_RNGS,
    in_axes: Any = nn.broadcast,
    prefetch: bool = True,
) -> Layer:
    """Makes a scan over layers that gathers the next layers' weights while a layer computes, forward and backward.

    The result equals ``nn.scan(nn.remat(layer, prevent_cse=False), variable_axes={"params": 0}, ...)``: the same names,
    shapes, initial values, results and gradients. The forward pass keeps each layer's input.

    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return x + nn.Dense(x.shape[-1])(x), None
    >>> blocks = scan_layers(shard_module_params(Block, "fsdp", min_weight_size=64), length=3)(name="blocks")
    >>> variables = init_sharded(blocks, mesh, jax.random.key(0), jnp.ones((8, 16)), batch_axes=("dp", "fsdp"))
    >>> variables["params"]["Dense_0"]["kernel"].names  # three layers of [16, 16]
    (None, None, 'fsdp')

    Args:
      layer: the class of a layer, wrapped by ``shard_module_params``, without ``nn.remat``. ``__call__`` takes the
        carry and further positional arguments, and returns (carry, outputs), as for ``nn.scan``. A layer may use
        parameters and random numbers, and no other collection.
      length: the number of layers.
      split_rngs: see ``nn.scan``.
      in_axes: for each argument after the carry, or once for all: ``nn.broadcast`` (every layer gets the same value) or
        0 (each layer gets an entry of [layers, ...], the argument's first dim).
      prefetch: False: ``nn.scan`` of ``nn.remat``, without prefetch.
    Returns:
      A class like ``layer``, called like the class of ``nn.scan``. Inside ``shard_map`` the gathered weights of two
      layers are in memory at a time, and in the backward pass the unsharded gradients of two layers. In ``init``, or
      with mutable parameters, the call runs ``nn.scan`` of ``nn.remat``.
    Raises:
      TypeError: ``layer`` is not a Linen module class, or already has an ``nn.remat``.
      ValueError: ``in_axes`` has an invalid entry; when the scan runs: a leaf cannot be gathered ahead, as one
        that is gathered along several dims.
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise TypeError(f"scan_layers takes the class of a layer, not {kind_of(layer)}; pass its class and length=...")
    if recomputes(layer):
        raise TypeError(
            f"scan_layers got {layer.__name__}, a layer inside nn.remat, but scan_layers recomputes layers itself. "
            "Pass shard_module_params(Block, axis_name), or, for a policy that keeps more, write "
            "nn.scan(nn.remat(..., policy=...))."
        )
    if invalid_axes := [axis for axis in jax.tree.leaves(in_axes) if axis is not nn.broadcast and axis != 0]:
        raise ValueError(
            f"scan_layers: in_axes={in_axes!r} has {invalid_axes[0]!r}; pass 0 or nn.broadcast for an argument."
        )
    rngs, options = dict(split_rngs), {"in_axes": in_axes, "length": length}
    # prevent_cse keeps XLA from merging both computations, which is impossible across the iterations of a loop.
    recomputed_layer = nn.remat(layer, prevent_cse=False)
    scanned = nn.scan(recomputed_layer, variable_axes={"params": 0}, split_rngs=rngs, **options)
    if prefetch:
        # Lifted over the plain layer: ``prefetched_scan`` recomputes layers itself.
        prefetching = lift_transform(_prefetching_scan, layer, split_rngs=rngs, **options)
        setattr(scanned, "__call__", _prefetching_if_split(scanned.__call__, prefetching.__call__))  # noqa: B010
    return scanned


def _prefetching_if_split(plain: Callable[..., Any], prefetching: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that runs ``prefetching`` if a parameter of the layers must be gathered, else ``plain``.

    ``plain`` runs the ordinary scan over the layers, ``prefetching`` the scan that gathers weights ahead; both are
    methods with the same arguments and results. Each call decides: ``plain`` runs for an unbound module, in ``init``,
    with mutable parameters, outside of ``shard_map``, and if no parameter is split.
    """

    @functools.wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # During initialisation nn.scan makes the parameters: nothing can be gathered yet.
        if self.scope is None or self.is_mutable_collection("params"):
            return plain(self, *args, **kwargs)
        # Outside of shard_map, and where no leaf is split, there is nothing to gather ahead.
        leaves = leaves_of_layer(_of_one_layer(self.variables.get("params", {})))
        if all(route_of(path, leaf, self.path) is None for path, leaf in leaves):
            return plain(self, *args, **kwargs)
        with inside_unit(self, ()):
            return prefetching(self, *args, **kwargs)

    return method


def _of_one_layer(stacked: PyTree) -> PyTree:
    """Returns stacked leaves unchanged, with boxes that name only the dims of one layer.

    The arrays keep their shape [layers, ...]; the entry of the layer dim is removed from the names of each box.
    """
    return meta.remove_axis(stacked, 0, {})


def _prefetching_scan(
    run: Callable[..., Any], *, split_rngs: Mapping[Any, bool], in_axes: Any, length: int
) -> Callable[..., Any]:
    """Returns ``f(scopes, carry, *args)``, for Linen's ``lift_transform``, which runs ``length`` layers in sequence.

    ``f`` calls ``prefetched_scan``, which gathers weights ahead, and returns (last carry, outputs [layers, ...]).

    Args:
      run: the layer, ``run(scopes, carry, *args)``, which returns (carry, outputs).
      split_rngs: for each random stream: whether each layer gets a separate key.
      in_axes: for each of ``args``, or once for all: 0 (each layer gets an entry of the first dim) or ``nn.broadcast``.
      length: the number of layers.
    """

    def scan(make_scopes: Any, _: Any, variables: Any, rngs: Any, carry: PyTree, *args: Any) -> Any:
        keys = [_split(k, length) if split else k for k, split in zip(rngs, split_rngs.values(), strict=True)]
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        # Per layer: keys of split streams, and arguments with a layer dim.
        is_per_layer = [*split_rngs.values(), *(axis == 0 for axis in axes)]
        inputs = list(zip(is_per_layer, [*keys, *args], strict=True))
        per_layer, put_own = split_arrays([x if is_stacked else None for is_stacked, x in inputs])
        shared, put_shared = split_arrays([None if is_stacked else x for is_stacked, x in inputs])

        counted = _SameRandomCounts()

        def layer(weights: PyTree, carry: PyTree, per_layer: PyTree, shared: PyTree) -> Any:
            both = zip(is_per_layer, put_own(per_layer), put_shared(shared), strict=True)
            merged = [x if is_stacked else y for is_stacked, x, y in both]
            scopes = make_scopes(weights, tuple(merged[: len(keys)]))
            with counted.from_the_same(scopes):
                return run(scopes, carry, *merged[len(keys) :])

        path = active_interceptors_of(RunningUnit)[0].path
        return prefetched_scan(layer, _of_one_layer(variables), carry, per_layer, shared, path), ()

    # No collection is returned: a layer is computed twice, and would write twice.
    return lift.pack(scan, ("params",), (), tuple(split_rngs), name="scan")


def _split(keys: PyTree, length: int) -> PyTree:
    """Returns the tree of random keys with each key split into an array of ``length`` keys, one for each layer.

    The keys equal those of ``nn.scan``. The arguments stay valid (they are cloned).
    """
    return lift.tree_map_rngs(lambda key: jax.random.split(jax.random.clone(key), length), keys)


class _SameRandomCounts:
    """Makes a layer draw the same random numbers each time the layer is traced.

    Linen counts in a scope the keys made so far, across traces, so the backward pass would draw different keys. Every
    trace after the first starts from the counts at the end of the first trace, as in ``nn.scan``, which traces a layer
    once to find its results.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    @contextlib.contextmanager
    def from_the_same(self, scopes: Any) -> Iterator[None]:
        """Enters a context for one trace of a layer; the layer draws equal random numbers in each of these contexts.

        ``scopes`` is a tree of Linen scopes, each with counts of the keys drawn so far. When the first context ends,
        the counts are stored. Each later context sets the counts of its scopes to the stored counts at the start.
        """
        counts = [scope.rng_counters for scope in jax.tree.leaves(scopes)]
        if self._before is not None:
            for count, before in zip(counts, self._before, strict=True):
                _reset_counts(count, before)
        yield
        if self._before is None:
            self._before = [_copied(count) for count in counts]


def _copied(counts: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a copy of a nested dict of counts. The keys of the dicts are the same objects.

    ``copy.deepcopy`` would also copy the keys, and replace a token of Flax among them.
    """
    return {name: _copied(count) if isinstance(count, dict) else count for name, count in counts.items()}


def _reset_counts(counts: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Sets the numbers in the nested dict ``counts`` to the numbers in ``before``, in place, with the same keys.

    In place, since other scopes hold the same dicts. A layer makes the same modules in each trace, so the keys match.
    """
    for name, count in before.items():
        if isinstance(count, dict):
            _reset_counts(counts[name], count)
        else:
            counts[name] = count
