"""``elementwise_only``: raises for optax transforms that are wrong on shards, after a trial on a small tree."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.trees import stored_shape
from xlstm_jax.distributed.optimizers.lookahead import as_inner, with_plain_params
from xlstm_jax.distributed.optimizers.norms import check_averaged
from xlstm_jax.distributed.optimizers.sharded_optimizer import owner_of_state
from xlstm_jax.distributed.optimizers.transforms import (
    CHAINS,
    PASSING_ON,
    WITHHOLDING,
    Part,
    check_transform,
    links,
    name_of,
    parts,
)

_PROBE_AXIS = "elementwise_only_probe"
_PROBE_SHARDS = 2
# Scales of the gradients of each step: (of the first shard, of the second shard and of unsharded leaves). First
# ordinary and small gradients, so that moments and learned step sizes move; then a large and a small shard, so that any
# threshold on a norm is between them; then a NaN in one shard alone.
_PROBE_SCALES = ((1.0, 1.0), (1e-2, 1e-2), (1.0, 1.0), (1.0, 1.0), (1e4, 1e-4), (1.0, 1.0), (math.nan, 1.0), (1.0, 1.0))
# Both runs do the same arithmetic on every element, up to the order of sums in collectives.
_PROBE_TOLERANCE_EPS = 64


def elementwise_only(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Guards an optax transform inside ``shard_map``: raises if the transform would be silently wrong on shards.

    For boxed trees. The check uses no list of names; it runs the transform on a tree with the paths, boxes and ranks of
    the parameters but a few values per leaf, once unsharded and once cut in two, over eight steps with small, large,
    uneven and non-finite gradients. The updates must agree. At the real shapes, each moment must have the shape of its
    parameter: a moment of a different shape is factored, and needs the unsharded leaf. The check runs once for each
    kind of tree, in ``init`` and ``update``, at trace time.

    >>> params = {"w": nn.Partitioned(jnp.ones((8, 2)), names=("fsdp", None))}
    >>> state = elementwise_only(optax.adam(1e-3)).init(params)
    >>> elementwise_only(optax.lamb(1e-3)).init(params)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: elementwise_only: 'scale_by_trust_ratio' is wrong on shards: on a small tree, cut in 2, its update ...

    Args:
      tx: any optax transform. Transforms that call collectives, as the library's ``clip_by_global_norm``, pass the
        check.
    Returns:
      The same transform, without frozen leaves in its input and state. Extra arguments are passed on.
    Raises:
      ValueError: (in ``init`` or ``update``) the transform is wrong on shards or fails in the check; names part and
        leaf. (In ``update``, under ``check_vma=True``) a gradient was not averaged over all axes; names leaf and axis.
      TypeError: ``tx`` is not a transform.
    """
    check_transform(tx, "elementwise_only")
    tx = with_plain_params(tx)
    inner = as_inner(tx)
    verdicts: dict[str, str | None] = {}

    def check(tree: PyTree) -> None:
        key = str([(path, leaf.names, jax.typeof(leaf.value)) for path, leaf in trees.sharded_leaves(tree)])
        if key not in verdicts:
            abstract = trees.map_values(lambda leaf: jax.ShapeDtypeStruct(stored_shape(leaf), leaf.value.dtype), tree)
            # In a new thread, where no trace of jit or shard_map is active and values can be compared.
            with ThreadPoolExecutor(1) as pool:
                verdicts[key] = pool.submit(_verdict, tx, abstract).result()
        if verdicts[key]:
            raise ValueError(verdicts[key])

    def init(params: PyTree) -> PyTree:
        params = trees.without_frozen(params)
        check(params)
        return inner.init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree) -> tuple[PyTree, PyTree]:
        grads, params = updates, trees.without_frozen(params)
        updates = trees.without_frozen(grads)
        check_averaged(updates, params, "elementwise_only")
        check(updates)
        updates, state = inner.update(updates, state, params, **extra_args)
        # The inner transform gets no frozen leaves, but `optax.apply_updates` needs an update for each parameter.
        if all(leaf.trainable for _, leaf in trees.sharded_leaves(grads)):
            return updates, state
        by_path = dict(trees.sharded_leaves(updates))

        def or_zeros(path: str, grad: Sharded) -> PyTree:
            return by_path[path].value if grad.trainable else jnp.zeros_like(grad.value)

        return trees.map_values_with_path(or_zeros, grads), state

    return optax.GradientTransformationExtraArgs(init, update)


def _verdict(tx: optax.GradientTransformation, tree: PyTree) -> str | None:
    """Returns the error message of ``elementwise_only`` if the transform is wrong on shards of the tree; else None.

    ``tree`` has boxed abstract arrays of global shapes. The message names the first link of a chain that is wrong. The
    result is None if no leaf is split.
    """
    if not any(leaf.axes for _, leaf in trees.sharded_leaves(tree)):
        return None
    tried = ((tried, _why_wrong(tried, tree)) for tried in (tx, *_withheld(parts(tx)[0])))
    wrong, reason = next((pair for pair in tried if pair[1]), (tx, None))
    if reason is None:
        return None
    guilty = name_of(next((link for link in links(wrong) if _why_wrong(link, tree)), wrong))
    return (
        f"elementwise_only: {guilty!r} is wrong on shards: {reason}. Run the optimizer on global arrays instead "
        "(training.make_train_step does: forward and backward inside shard_map, tx.update outside of it in the same "
        "jit); for clipping inside shard_map use xlstm_jax.distributed.clip_by_global_norm."
    )


def _withheld(part: Part) -> Iterator[optax.GradientTransformation]:
    """Yields each transform inside ``part`` whose updates may not appear in a trial of ``part`` of eight steps.

    ``optax.MultiSteps(tx, 16)`` emits no update in eight steps, and ``skip_nonfinite(tx)`` drops the updates of a NaN,
    which shows a norm even behind a large threshold or a learning rate that is still 0. Only transforms that get the
    full tree of gradients are yielded: nothing inside ``optax.partition`` or ``optax.masked``.
    """
    withholds = part.name in WITHHOLDING
    for below in part.within if withholds or part.name in PASSING_ON else ():
        if withholds and below.tx is not None:
            yield below.tx
        yield from _withheld(below)
        # It hides a NaN from the later links of a chain.
        withholds = withholds or (part.name in CHAINS and below.name == "zero_nans")


def _why_wrong(tx: optax.GradientTransformation, tree: PyTree) -> str | None:
    """Returns the reason why a transform is wrong on shards, as text, by a trial on a small tree; None if it is right.

    ``tree`` has boxed abstract arrays of global shapes. The small tree has the same paths, boxes and ranks. A transform
    that raises an exception in the trial is wrong, too.
    """
    # A leaf split along several dims is cut along each in turn: a transform may combine elements along a single dim.
    cuts = max(sum(map(bool, leaf.names)) for _, leaf in trees.sharded_leaves(tree))
    try:
        differences = (difference for cut in range(cuts) for difference in _differences(tx, *_small_tree(tree, cut)))
        return next(differences, None) or _factored_state(tx, tree)
    except Exception as error:  # any exception: the transform has not been shown to be right
        return f"it could not be tried on a small tree ({type(error).__name__}: {str(error).splitlines()[0]})"


def _small_tree(tree: PyTree, cut: int) -> tuple[PyTree, list[int | None]]:
    """Returns a boxed tree with few random values, and a list with the dim of each leaf to cut in two, in tree order.

    The tree is like ``tree`` in paths, ranks and dtypes. Dims have size 3, the dim to cut has size 4. The dim to cut is
    split dim number ``cut`` of the leaf, counted from 0, or the last split dim if the leaf has fewer; None if the leaf
    is not split. Leaves without gradient (frozen, or not floats) become None, and have no entry in the list.
    """
    rng = np.random.default_rng(0)
    trainable, (_, put_back) = trees.differentiable(tree), trees.split_differentiable(tree)
    split_dims = [[dim for dim, entry in enumerate(leaf.names) if entry] for leaf in trainable]
    dims = [split[min(cut, len(split) - 1)] if split else None for split in split_dims]

    def small(leaf: Sharded, dim: int | None) -> PyTree:
        # Two values in each shard, so that a transform has elements to combine.
        shape = tuple(2 * _PROBE_SHARDS if d == dim else 3 for d in range(len(leaf.names)))
        value = jnp.asarray(rng.normal(size=shape), leaf.value.dtype)
        names = tuple(_PROBE_AXIS if d == dim else None for d in range(len(shape)))
        return value if dim is None else Sharded(value, names)

    return put_back(map(small, trainable, dims), fill_other=lambda leaf: None), dims


def _differences(tx: optax.GradientTransformation, params: PyTree, dims: list[int | None]) -> Iterator[str]:
    """Compares updates of ``tx`` on unsharded leaves with updates on shards, over eight steps.

    Yields a message for each leaf and step with a difference beyond rounding.

    Args:
      tx: the transform.
      params: the small tree of parameters from ``_small_tree``.
      dims: for each leaf the dim along which it is cut in two shards; None: each shard is the full leaf.
    """
    # The unsharded run is a vmap, too, over equal copies: the `b2**t` of a scalar and of a vector may round
    # differently, and some transforms magnify that.
    inner = as_inner(tx)

    def updated(grad: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        # Extra arguments of optax's transforms: line searches, `reduce_on_plateau`.
        extra_args = {"value": jnp.float32(1), "grad": grad, "value_fn": partial(optax.tree.norm, squared=True)}
        updates, state = inner.update(grad, state, params, **extra_args)
        return updates, state, optax.apply_updates(params, updates)

    def run(cut: list[int | None], axis_name: str | None) -> Iterator[PyTree]:
        # vmap simulates devices: collectives of the transform run over the named axis, without a mesh.
        init_shards, step_shards = (jax.jit(jax.vmap(fn, axis_name=axis_name)) for fn in (inner.init, updated))
        shards = _stacked(params, cut)
        state = init_shards(shards)
        for grad in _probe_gradients(params, dims):
            updates, state, shards = step_shards(_stacked(grad, cut), state, shards)
            yield updates

    paths = [path for path, _ in trees.leaves_with_path(params)]
    for step, (want, got) in enumerate(zip(run([None] * len(dims), None), run(dims, _PROBE_AXIS), strict=True)):
        want = _stacked(jax.tree.map(lambda copies: copies[0], want), dims)
        for path, w, g in zip(paths, jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            if difference := _first_difference(np.asarray(w), np.asarray(g)):
                yield (
                    f"on a small tree, cut in {_PROBE_SHARDS}, its update of '{path}' in step {step} is "
                    f"{difference[1]:.6g} where that of the whole leaf is {difference[0]:.6g}. It looks across a leaf "
                    "or across the tree"
                )


def _stacked(tree: PyTree, dims: list[int | None]) -> PyTree:
    """Returns the tree with leaves [shards, ...]: each leaf is cut along its dim in ``dims``; for None it is repeated.

    ``dims`` are in tree order; the number of shards is ``_PROBE_SHARDS``, two.
    """
    values, treedef = jax.tree.flatten(tree)
    n = _PROBE_SHARDS
    shards = [[x] * n if dim is None else jnp.split(x, n, dim) for x, dim in zip(values, dims, strict=True)]
    return jax.tree.unflatten(treedef, map(jnp.stack, shards))


def _first_difference(full: np.ndarray, sharded: np.ndarray) -> tuple[float, float] | None:
    """Returns the first entries, of ``full`` and of ``sharded``, that differ by more than rounding; None if all agree.

    Of complex entries the real parts are returned. NaN agrees with NaN.
    """
    eps = float(jnp.finfo(full.dtype).eps)
    full, sharded = full.astype(np.complex128), sharded.astype(np.complex128)
    # Relative to the largest entry: an entry near 0 is a difference of larger numbers, with their rounding errors.
    largest = np.max(np.abs(full), where=np.isfinite(full), initial=0)
    wrong = ~np.isclose(full, sharded, rtol=0, atol=_PROBE_TOLERANCE_EPS * eps * largest, equal_nan=True)
    return (full[wrong][0].real, sharded[wrong][0].real) if wrong.any() else None


def _probe_gradients(params: PyTree, dims: list[int | None]) -> Iterator[PyTree]:
    """Yields a tree of gradients, shaped like ``params``, for each of eight trial steps.

    Entries are random, mostly positive. Each step has two scales (``_PROBE_SCALES``): one for the first shard of a leaf
    along its dim in ``dims``, one for the rest of the leaf, and for a leaf with None in ``dims``.
    """
    rng = np.random.default_rng(1)
    values, treedef = jax.tree.flatten(params)
    for first, rest in _PROBE_SCALES:
        grads = []
        for value, dim in zip(values, dims, strict=True):
            grad = (1 + np.arange(value.size).reshape(value.shape)) * (1 + rng.normal(size=value.shape)) * rest
            if dim is not None:
                shard = (slice(None),) * dim + (slice(0, value.shape[dim] // _PROBE_SHARDS),)
                grad[shard] *= first / rest
            grads.append(jnp.asarray(grad, value.dtype))
        yield jax.tree.unflatten(treedef, grads)


def _factored_state(tx: optax.GradientTransformation, tree: PyTree) -> str | None:
    """Returns a message for the first leaf of the optimizer's state with a shape unlike its parameter's; else None.

    Ignores scalars and leaves whose shape does not depend on the parameters. ``tree`` has boxed abstract arrays of
    global shapes, because optax factors moments only of large dims.
    """
    # At the real shapes: optax factors moments only for dims of 128 or more, larger than in the small tree.
    params = trees.unbox(tree)
    small = dict(trees.leaves_with_path(jax.eval_shape(tx.init, trees.unbox(_small_tree(tree, 0)[0]))))
    by_path = dict(trees.leaves_with_path(params))
    shapes = {leaf.shape for leaf in by_path.values()}
    for path, leaf in trees.leaves_with_path(jax.eval_shape(tx.init, params)):
        owner = owner_of_state(path, by_path)
        allowed = shapes if owner is None else {owner.shape}
        # Constant shapes, such as coefficients, do not depend on the parameters.
        constant = path in small and leaf.shape == small[path].shape
        if leaf.size > 1 and leaf.shape not in allowed and not constant:
            return f"its state '{path}' has the shape {leaf.shape}, and not that of its parameter, which it needs whole"
    return None
