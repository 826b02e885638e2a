"""Optimizers on shards: what one who keeps the whole step inside ``shard_map`` needs to get right.

The straight way is ``training.make_train_step``, which runs the optimizer on global arrays, where every optax transform
is what it is on one device. Inside ``shard_map`` an optimizer sees slices. An elementwise one (AdamW, Lion) cannot
tell; one that looks across a leaf or the tree (a norm, a factored moment, a matrix sign) computes something else on
every device, without an error, and what should be replicated drifts apart.

  global_norm           the norm of the whole tree from its shards, one collective for each set of axes
  clip_by_global_norm   optax's clipping with that norm
  elementwise_only      a guard around any transform: tries it on a small tree, whole and in shards, and refuses it
                        where the two differ
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.axes import entry_axes, size_if_bound
from xlstm_jax.distributed.data_parallel.boxes import (
    Sharded,
    leaf_axes,
    leaf_names,
    leaf_value,
    leaves_with_path,
    map_leaves,
    rebox,
    split_differentiable,
    unbox,
)
from xlstm_jax.distributed.optimizers.norms import _sum_bwd, _sum_fwd, _sum_over_devices
from xlstm_jax.distributed.optimizers.state import owner_of_state

_sum_over_devices.defvjp(_sum_fwd, _sum_bwd)


# ------------------------------------------------------------------------------------------------------- the guard

_PROBE_AXIS = "elementwise_only_probe"
_PROBE_PARTS = 2
# The gradients of the steps, as scales of (the first shard, the second and what is whole). Common and small ones, so
# that moments and learned step sizes move; then one shard large and the other small, so that any threshold on a norm
# lies between them; then a NaN in one shard alone.
_PROBE_SCALES = ((1.0, 1.0), (1e-2, 1e-2), (1.0, 1.0), (1.0, 1.0), (1e4, 1e-4), (1.0, 1.0), (math.nan, 1.0), (1.0, 1.0))
# Both runs do the same arithmetic on every element, up to the order of sums that collectives make.
_PROBE_TOLERANCE_EPS = 64


class _Difference(NamedTuple):
    path: str
    step: int
    whole: float
    sharded: float


def elementwise_only(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Lets an optax transform through that is right on shards, and refuses one that would be silently wrong.

    For use inside ``shard_map`` on boxed trees. The transform is not looked up in a list but tried: on a tree with the
    paths, boxes and ranks of the parameters but a few values per leaf, once whole and once cut in two, over eight steps
    with small, large, uneven and non-finite gradients. The updates must agree. Its state is then compared with the real
    shapes: a moment that is shaped unlike its parameter is factored, and needs the whole leaf. This runs once for each
    kind of tree, in ``init`` and ``update``, at trace time.

    Args:
      tx: any optax transform. Those that run collectives themselves, as this file's ``clip_by_global_norm``, pass.
    Returns:
      The same transform; its extra arguments pass through.
    Raises:
      ValueError: (in ``init`` or ``update``) the transform is wrong on shards, or could not be tried; names the part of
        the chain, the leaf, both values, and the way out.
    """
    inner, verdicts = optax.with_extra_args_support(tx), {}

    def check(tree):
        key = tuple(
            (path, leaf_names(leaf), str(jax.typeof(leaf_value(leaf)))) for path, leaf in leaves_with_path(tree)
        )
        if key not in verdicts:
            # In a thread of its own, where no trace of jit or shard_map is under way and values can be compared.
            with ThreadPoolExecutor(1) as pool:
                verdicts[key] = pool.submit(_verdict, tx, map_leaves(_whole_leaf, tree)).result()
        if verdicts[key]:
            raise ValueError(verdicts[key])

    def init(params):
        check(params)
        return inner.init(params)

    def update(updates, state, params=None, **extra_args):
        check(updates)
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _whole_leaf(leaf: Any) -> Any:
    """The leaf's box around its global shape, abstract."""
    parts = [math.prod(size_if_bound(axis) for axis in entry_axes(entry)) for entry in leaf_names(leaf)]
    value = leaf_value(leaf)
    return rebox(leaf, jax.ShapeDtypeStruct(tuple(map(operator.mul, value.shape, parts)), value.dtype))


def _verdict(tx: optax.GradientTransformation, tree: PyTree) -> str | None:
    """Why the transform must not run on shards of this tree, as an error message; None if it may."""
    if not any(map(leaf_axes, (leaf for _, leaf in leaves_with_path(tree)))):
        return None
    reason = _why_wrong(tx, tree)
    if reason is None:
        return None
    guilty = _name(next((part for part in _parts(tx) if _why_wrong(part, tree)), tx))
    return (
        f"elementwise_only: {guilty!r} is wrong on shards: {reason}. Run the optimizer on global arrays instead "
        "(training.make_train_step does: forward and backward inside shard_map, tx.update outside of it in the same "
        "jit); for clipping inside shard_map use xlstm_jax.distributed.clip_by_global_norm."
    )


def _why_wrong(tx: optax.GradientTransformation, tree: PyTree) -> str | None:
    cuts = max(len(_split_dims(leaf)) for _, leaf in leaves_with_path(tree))
    try:
        tried = (found for cut in range(cuts) for found in _differences(tx, *_small_tree(tree, cut)))
        difference = next(tried, None)
        factored = None if difference else _factored_state(tx, tree)
    except Exception as error:  # whatever a transform raises on being tried, it has not been shown to be right
        return f"it could not be tried on a small tree ({type(error).__name__}: {str(error).splitlines()[0]})"
    if difference:
        path, step, whole, sharded = difference
        return (
            f"on a small tree, cut in {_PROBE_PARTS}, its update of '{path}' in step {step} is {sharded:.6g} where "
            f"that of the whole leaf is {whole:.6g}. It looks across a leaf or across the tree"
        )
    return factored


def _small_tree(tree: PyTree, cut: int) -> tuple[PyTree, list[int | None]]:
    """Leaves of the same ranks, dtypes and paths with 4 values along one of their split dims and 3 along the others.

    Returns:
      The tree, boxed along the dim that is cut, and that dim for each of its leaves: the ``cut``-th of those that are
      split (the last where there are fewer), None where the leaf is whole.
    """
    rng, dims = np.random.default_rng(0), []

    def shrink(leaf):
        split = _split_dims(leaf)
        dim = split[min(cut, len(split) - 1)] if split else None
        dims.append(dim)
        shape = tuple(2 * _PROBE_PARTS if d == dim else 3 for d in range(len(leaf_names(leaf))))
        value = jnp.asarray(rng.normal(size=shape), leaf_value(leaf).dtype)
        if dim is None:
            return value
        return Sharded(value, tuple(_PROBE_AXIS if d == dim else None for d in range(len(shape))))

    live, put_back = split_differentiable(tree)
    return put_back([shrink(leaf) for leaf in live], rest=lambda leaf: None), dims


def _split_dims(leaf: Any) -> list[int]:
    return [dim for dim, entry in enumerate(leaf_names(leaf)) if entry]


def _differences(tx: optax.GradientTransformation, params: PyTree, dims: list[int | None]) -> Iterator[_Difference]:
    """Where the updates of the sharded run differ from those of the whole run, step by step."""
    inner = optax.with_extra_args_support(tx)
    paths = [path for path, _ in leaves_with_path(params)]
    treedef = jax.tree.structure(params)

    def pieces(tree):
        """The tree with a leading dim, one piece for each shard; what is whole is repeated."""
        cut = [
            jnp.stack([value] * _PROBE_PARTS if dim is None else jnp.split(value, _PROBE_PARTS, axis=dim))
            for value, dim in zip(jax.tree.leaves(tree), dims, strict=True)
        ]
        return treedef.unflatten(cut)

    def copies(tree):
        return jax.tree.map(lambda value: jnp.stack([value] * _PROBE_PARTS), tree)

    def step(grad, state, params):
        updates, state = inner.update(grad, state, params, value=jnp.float32(1), grad=grad, value_fn=_probe_loss)
        return updates, state, optax.apply_updates(params, updates)

    def runs(axis_name, params):
        """The jitted step, the state and the parameters. Whole leaves are run as copies, so that both runs do the same
        operations: a scalar's ``b2**t`` and a vector's may round apart, and some transforms magnify that."""
        named = {} if axis_name is None else {"axis_name": axis_name}
        return jax.jit(jax.vmap(step, **named)), jax.jit(jax.vmap(inner.init, **named))(params), params

    whole_step, whole_state, whole = runs(None, copies(params))
    shard_step, shard_state, shards = runs(_PROBE_AXIS, pieces(params))
    for index, grad in enumerate(_probe_gradients(params, dims)):
        want, whole_state, whole = whole_step(copies(grad), whole_state, whole)
        got, shard_state, shards = shard_step(pieces(grad), shard_state, shards)
        want = pieces(jax.tree.map(lambda value: value[0], want))
        for path, w, g in zip(paths, jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            yield from _first_difference(path, index, np.asarray(w), np.asarray(g))


def _first_difference(path: str, step: int, whole: np.ndarray, sharded: np.ndarray) -> Iterator[_Difference]:
    eps = float(jnp.finfo(whole.dtype).eps)
    whole, sharded = whole.astype(np.complex128), sharded.astype(np.complex128)
    largest = np.max(np.abs(whole), where=np.isfinite(whole), initial=0)
    tolerance = _PROBE_TOLERANCE_EPS * eps * largest
    wrong = ~np.isclose(whole, sharded, rtol=0, atol=tolerance, equal_nan=True)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        yield _Difference(path, step, float(whole[at].real), float(sharded[at].real))


def _probe_loss(params: PyTree) -> jax.Array:
    return sum(jnp.sum(jnp.abs(leaf) ** 2) for leaf in jax.tree.leaves(params))


def _probe_gradients(params: PyTree, dims: list[int | None]) -> Iterator[PyTree]:
    """Gradients of the scales above that pull one way with noise that turns some of them around."""
    rng = np.random.default_rng(1)
    values, treedef = jax.tree.flatten(params)
    for first, rest in _PROBE_SCALES:
        grads = []
        for value, dim in zip(values, dims, strict=True):
            grad = (1 + np.arange(value.size).reshape(value.shape)) * (1 + rng.normal(size=value.shape)) * rest
            if dim is not None:
                shard = (slice(None),) * dim + (slice(0, value.shape[dim] // _PROBE_PARTS),)
                grad[shard] *= first / rest
            grads.append(jnp.asarray(grad, value.dtype))
        yield treedef.unflatten(grads)


def _factored_state(tx: optax.GradientTransformation, tree: PyTree) -> str | None:
    """Says which moment is shaped unlike its parameter at the real, global shapes; None if there is none."""
    params = unbox(tree)
    by_path = dict(leaves_with_path(params))
    shapes = {leaf.shape for leaf in by_path.values()}
    for path, leaf in leaves_with_path(jax.eval_shape(tx.init, params)):
        owner = owner_of_state(path, by_path)
        allowed = shapes if owner is None else {owner.shape}
        if leaf.size > 1 and leaf.shape not in allowed:
            return (
                f"its state '{path}' has the shape {leaf.shape}, and not that of its parameter. It keeps a factor or a "
                "history of a whole leaf"
            )
    return None


def _parts(tx: optax.GradientTransformation) -> Iterator[optax.GradientTransformation]:
    """The transforms of an ``optax.chain``, or the one; read off the closures, for the error message alone."""
    inits, updates = (_closure(fn).get(name) for fn, name in ((tx.init, "init_fns"), (tx.update, "update_fns")))
    if not (inits and updates):
        yield tx
        return
    for init, update in zip(inits, updates, strict=True):
        yield from _parts(optax.GradientTransformationExtraArgs(init, update))


def _closure(fn: Callable[..., Any]) -> dict[str, Any]:
    return dict(inspect.getclosurevars(fn).nonlocals) if inspect.isfunction(fn) else {}


def _name(tx: optax.GradientTransformation) -> str:
    """The function that made the transform, and those that it holds: ``masked(scale_by_trust_ratio)``."""
    held = _closure(tx.update)
    if isinstance(held.get("tx"), optax.GradientTransformation):  # what with_extra_args_support has wrapped
        return _name(held["tx"])
    name = getattr(tx.update, "__qualname__", type(tx.update).__name__).split(".")[0]
    inner = [held[key] for key in ("inner",) if key in held] + list(dict(held.get("transforms") or {}).values())
    inner += [part for part in _parts(tx) if part is not tx]
    inside = ", ".join(_name(part) for part in inner if isinstance(part, optax.GradientTransformation))
    return f"{name}({inside})" if inside else name
