"""All communication of the library: names of mesh axes, dtypes of sums, and the only calls of ``jax.lax`` collectives.

*Types.* Under ``check_vma=True`` the type of a value lists the manual mesh axes over which the value varies. A
reduction runs over exactly these axes: along any other axis the value is equal on each device, and a mean is a no-op.
Under ``check_vma=False`` types list no axes, and a reduction runs over all requested axes.

*Cost.* Axes of size 1 are skipped. Collectives over several axes are staged: gathers begin with the innermost axis,
scatters with the outermost, so that shards are in the order of ``PartitionSpec((outer, inner))`` and each stage uses
the links of one axis. Values narrower than 32 bits are summed in float32. Many small values (metrics) are sent as one
vector.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import reduce, wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.tracers import current_trace
from jax import lax
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, DType, PyTree
from xlstm_jax.introspection import is_for_shapes

# -------------------------------------------------------------------------------------------------------- names of axes

AxisEntry = None | str | tuple[str, ...]


def size_if_bound(axis: str) -> int:
    """Returns the number of devices along a bound axis (inside ``shard_map``, say); 1 for an unbound axis."""
    try:
        return jax.lax.axis_size(axis)
    except NameError:  # JAX's error of an axis that is not bound
        return 1


def as_axis_names(axis_name: AxisNames) -> tuple[str, ...]:
    """Returns an axis, or a sequence of axes, as a tuple of axes; a string is the name of a single axis.

    Raises:
      ValueError: no axis, a repeated axis, a non-string entry, or a set (sets have no order).
    """
    if isinstance(axis_name, set | frozenset):
        raise ValueError(f"axis_name={axis_name!r}: a set has no order, and axes do; pass a tuple, outermost first.")
    # A value of another type becomes a name, so that the check below raises and shows the value.
    names = (axis_name,) if isinstance(axis_name, str) or not isinstance(axis_name, Sequence) else tuple(axis_name)
    if not names or [name for name in names if not (isinstance(name, str) and name)]:
        raise ValueError(
            f"axis_name={axis_name!r} names no mesh axis; pass one, as 'fsdp', or several, as ('dp', 'fsdp')."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name={axis_name!r} names an axis twice; name each mesh axis once.")
    return names


def entry_axes(entry: AxisEntry) -> tuple[str, ...]:
    """Returns the axes in one dim's entry of a ``PartitionSpec``: None -> (), "a" -> ("a",), ("a", "b") unchanged."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_entry(axes: tuple[str, ...]) -> AxisEntry:
    """Returns the entry of a ``PartitionSpec`` for a dim split over ``axes``: the inverse of ``entry_axes``.

    () -> None, ("a",) -> "a", ("a", "b") unchanged.
    """
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else axes


# ------------------------------------------------------------------------------------------------------- dtypes of sums

P = ParamSpec("P")
Result = TypeVar("Result")


def is_prng_key(value: Any) -> bool:
    """Returns whether ``value`` is an array of typed PRNG keys."""
    return jnp.issubdtype(value_dtype(value), jax.dtypes.prng_key)


def value_dtype(value: Any) -> Any:
    """Returns the dtype of an array, an abstract array, or a Python number."""
    return value.dtype if hasattr(value, "dtype") else jnp.result_type(value)


def wide_dtype(dtype: Any) -> Any:
    """Returns the default dtype of sums of values of ``dtype``: float32 for narrower floats, else ``dtype``."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype


def promoting(fn: Callable[P, Result]) -> Callable[P, Result]:
    """Decorator: returns ``fn``, called under JAX's standard promotion of dtypes and ranks, whatever the user's flags.

    So a library function may mix dtypes and ranks. The flags apply while JAX traces. A backward rule is traced later,
    and needs a separate decorator.
    """

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return fn(*args, **kwargs)

    return run


@promoting
def common_dtype(*dtypes: DTypeLike) -> Any:
    """Returns the dtype to which JAX promotes ``dtypes``."""
    return reduce(jnp.promote_types, dtypes)


def widened(value: jax.Array) -> jax.Array:
    """Returns the value in the dtype of sums: floats narrower than float32 in float32, any other value unchanged."""
    return value.astype(wide_dtype(value.dtype))


def term_of_mean(value: jax.Array, count: int, dtype: DType) -> jax.Array:
    """Returns ``value / count`` in ``dtype``: the term of this device in a mean over ``count`` devices.

    The caller sums the terms over the devices, in ``dtype``. The value is divided before the sum, and before it is
    narrowed: a float16 sum then overflows only if the mean does.
    """
    # A narrow value is divided by a power of two in its narrow dtype, which gives the same bits: XLA takes the factor
    # into the matrix product that makes the value, and saves a pass over the gradient.
    if value.dtype == dtype != wide_dtype(dtype) and count & (count - 1) == 0:
        return value * (1 / count)
    return (widened(value) / count).astype(dtype)


# ----------------------------------------------------------------------------------------------------------- bound axes

Key = TypeVar("Key")


def is_bound(axis: str) -> bool:
    """Returns whether a collective over ``axis`` can run here: inside ``shard_map``, ``pmap`` or a named ``vmap``."""
    if axis in jax.sharding.get_abstract_mesh().manual_axes:
        return True
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def manual_axes() -> tuple[str, ...]:
    """Returns the mesh axes that the enclosing ``shard_map`` has bound; () outside of ``shard_map``."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def bound_axes(axis_name: AxisNames, *, caller: str) -> tuple[str, ...]:
    """Returns a user's ``axis_name``, the name of an axis or a sequence of names, as a tuple, after checks of the axes.

    Raises a ``ValueError`` if an axis is not bound (by ``shard_map``, say); the error names ``caller``, the user's
    function. Raises a ``ValueError`` as well for no axis, a repeated axis, an entry that is no string, or a set.
    """
    axes = as_axis_names(axis_name)
    unbound = [axis for axis in axes if not is_bound(axis)]
    if unbound:
        raise ValueError(unbound_message(unbound[0], caller))
    return axes


def check_bound(axes: tuple[str, ...], *, caller: str) -> None:
    """Raises a ``ValueError`` if a mesh axis in ``axes`` is not bound (by ``shard_map``, say); () is accepted.

    The error names the first such axis and ``caller``, the user's function, and lists the bound axes.
    """
    if axes:
        bound_axes(axes, caller=caller)


def bound_or_none(axes: tuple[str, ...], *, caller: str) -> tuple[str, ...]:
    """Returns ``axes`` if all are bound; () if no axis at all is bound (in ``init``, say), where values are global.

    Raises:
      ValueError: some axes are bound, but not all of ``axes``; names ``caller``, the user's function.
    """
    if not manual_axes() and not any(map(is_bound, axes)):
        return ()
    return bound_axes(axes, caller=caller)


def unbound_message(axis: str, caller: str) -> str:
    """Returns the text of the error that ``axis``, which the function ``caller`` needs, is not bound.

    The text lists the bound axes, and says how to bind ``axis``.
    """
    cure = f"no mesh axis is bound here. Call it inside jax.shard_map over a mesh that has the axis {axis!r}"
    if bound := manual_axes():
        cure = f"the axes bound here are {bound}. Pass one of them, or put {axis!r} into the mesh of the shard_map"
    return f"{caller}: {axis!r} is not a bound mesh axis; {cure}."


def axis_size(axes: Sequence[str]) -> int:
    """Returns the number of devices over bound ``axes``, the product of the sizes, as a Python int; 1 for no axes."""
    mesh = jax.sharding.get_abstract_mesh()  # its sizes are already known: ``lax.axis_size`` takes ten times longer
    return math.prod([mesh.shape[axis] if axis in mesh.manual_axes else lax.axis_size(axis) for axis in axes])


def spread_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes in ``axes`` of size 2 or more, in order: only along these axes a collective sends something."""
    if not axes:
        return ()
    mesh = jax.sharding.get_abstract_mesh()
    manual, sizes = mesh.manual_axes, mesh.shape
    return tuple([axis for axis in axes if (sizes[axis] if axis in manual else lax.axis_size(axis)) > 1])


def axis_index(axes: Sequence[str]) -> jax.Array:
    """Returns this device's index along the axes, the first axis outermost; int32 scalar. 0 without axes.

    Axes of size 1 are left out. They do not change the index, but the result would have a type that varies over them.
    """
    axes = spread_axes(axes)
    return lax.axis_index(axes) if axes else jnp.int32(0)


def local_shard(value: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """Returns this device's shard of a replicated value, cut along ``dim`` by the n devices of ``axes``.

    [..., d, ...] -> [..., d / n, ...]. n must divide d: the caller checks. Nothing is sent.
    """
    if (count := axis_size(axes)) == 1:
        return value
    size = value.shape[dim] // count
    return lax.dynamic_slice_in_dim(value, axis_index(axes) * size, size, dim)


# ---------------------------------------------------------------------------------------------------------------- types

# Returns ``varying_axes`` of a value from its type: JAX 0.12 has `manual_axis_type`, JAX 0.10 `vma`.
_has_axis_type = hasattr(jax.typeof(np.float32(0)), "manual_axis_type")
varying_axes_of_type: Callable[[Any], frozenset[str]] = attrgetter(
    "manual_axis_type.varying" if _has_axis_type else "vma"
)


def varying_axes(value: Any) -> frozenset[str]:
    """Returns the manual axes over which ``value`` varies by type; empty under ``check_vma=False``."""
    return varying_axes_of_type(jax.typeof(value))


def is_tracked(axis: str) -> bool:
    """Returns whether the types of JAX arrays show if a value varies along the bound mesh ``axis``.

    True under ``check_vma=True`` in the enclosing ``shard_map``, False under ``check_vma=False``.
    """
    # JAX has no public name for the mode. A device's index always varies along its axis, so its type shows the mode.
    if current_trace() != _in_this_trace.trace:
        _in_this_trace.trace, _in_this_trace.tracked = current_trace(), {}
    if axis not in _in_this_trace.tracked:
        _in_this_trace.tracked[axis] = axis in varying_axes(lax.axis_index(axis))
    return _in_this_trace.tracked[axis]


class _InThisTrace(threading.local):
    """Cache of ``is_tracked`` for the last trace.

    Without the cache each call would add an equation to the program, for every leaf.
    """

    trace: Any = None
    tracked: dict[str, bool]


_in_this_trace = _InThisTrace()


def type_shows_varying(axis: str, value: Any) -> bool:
    """Returns whether the type of ``value`` tells if the value is equal along the mesh ``axis``.

    If True, a value without ``axis`` in its type is equal on all devices along ``axis``. False under
    ``check_vma=False``, and during the trace that ``nn.scan`` makes only for shapes: all arguments then have the type
    "equal on every device".
    """
    return is_tracked(axis) and not is_for_shapes(value)


def to_varying(tree: PyTree, axes: Collection[str]) -> PyTree:
    """Returns the same arrays, typed as varying over the tracked axes in ``axes``; costs nothing at run time.

    An axis is tracked under ``check_vma=True``; other axes are ignored. JAX inserts this cast where types differ, and
    transposes it to a sum over the axes. If the cast is made here, before differentiation, the cast is not
    differentiated, and each device gets the local gradient.
    """
    tracked = {axis for axis in axes if is_tracked(axis)}
    if not tracked:
        return tree
    values, treedef = jax.tree.flatten(tree)
    missing = [tuple(sorted(tracked - varying_axes(value))) for value in values]
    cast = [lax.pcast(x, over, to="varying") if over else x for x, over in zip(values, missing, strict=True)]
    return jax.tree.unflatten(treedef, cast)


def zeros_of_type(abstract: jax.ShapeDtypeStruct, dtype: DType) -> jax.Array:
    """Returns zeros of ``dtype`` with the shape and the varying axes of ``abstract``, a result of ``jax.eval_shape``.

    Used as the first carry of a ``scan``, whose type must equal the type of the carry that the body returns.
    """
    varying = getattr(abstract, "manual_axis_type", abstract)
    axes = tuple(sorted(getattr(varying, "varying", None) or getattr(varying, "vma", None) or ()))
    return to_varying(jnp.zeros(abstract.shape, dtype), axes)


# ---------------------------------------------------------------------------------------------------------- collectives


def all_gather(value: jax.Array, dim: int, axes: Sequence[str]) -> jax.Array:
    """Concatenates the shards of n devices along ``dim``: [..., d / n, ...] -> [..., d, ...], the same on each device.

    The devices are those of ``axes``, in the order of ``PartitionSpec(axes)``, the first axis outermost.
    """
    # The dim is moved to the front before the gather, and back after it. XLA on CPU copies the result of a gather along
    # another dim once more, which took 2 to 9 % of a step; it fuses the move back into the matrix product that reads
    # the result. TPU programs stay the same.
    for axis in reversed(spread_axes(axes)):
        value = jnp.moveaxis(lax.all_gather(jnp.moveaxis(value, dim, 0), axis, axis=0, tiled=True), 0, dim)
    return value


def all_gather_equal(value: jax.Array, dim: int, axes: Sequence[str]) -> jax.Array:
    """Returns the shards ``value`` of n devices, concatenated along ``dim``: [..., d / n, ...] -> [..., d, ...].

    The devices are those of ``axes``, the first axis outermost. Under ``check_vma=True`` the type of the result is
    "equal along ``axes``", while the result of a plain gather varies by type.
    """
    # The type must be set explicitly: JAX does not infer equality, and types the result of a plain gather as varying.
    axes = spread_axes(axes)
    tracked = bool(axes) and is_tracked(axes[0])
    to = "invarying" if tracked else "varying"
    return lax.all_gather(to_varying(value, axes), axes, axis=dim, tiled=True, to=to) if axes else value


def all_to_all(value: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sends ``value[i]`` to device i; entry i of the result comes from device i: [n, ...] -> [n, ...] over n devices.

    Devices are in the order of ``PartitionSpec(axes)``, the first axis outermost.
    """
    axes = spread_axes(axes)
    return lax.all_to_all(to_varying(value, axes), axes, 0, 0, tiled=True) if axes else value


Spans = tuple[jax.Array, jax.Array]


def ragged_all_to_all(
    value: jax.Array, out: jax.Array, sent: Spans, received_spans: Spans, axes: Sequence[str]
) -> jax.Array:
    """Sends rows of ``value`` to every device, a different number to each. Not available on CPUs.

    Returns ``out`` with the rows that have arrived at this device.

    Args:
      value: the rows to send.
      out: initial result; rows that arrive replace rows of ``out``.
      sent: (begins, sizes): ``sizes[i]`` rows go to device i, from row ``begins[i]`` of ``value`` on.
      received_spans: (begins, sizes): ``begins[i]`` is the first row, in the result of device i, of the rows sent to
        device i; ``sizes[i]`` rows come from device i to this device.
      axes: the axes over which devices exchange rows.
    """
    axes = spread_axes(axes)
    operands = to_varying((value, out, *sent, *received_spans), varying_axes(value).union(axes))
    return lax.ragged_all_to_all(*operands, axis_name=axes)


def shift(tree: PyTree, axes: Sequence[str], by: int = 1, *, ring: bool = True) -> PyTree:
    """Sends the arrays of ``tree`` to the device ``by`` places after this device along ``axes``.

    Returns the arrays of the device ``by`` places before this device (after, if ``by`` is negative). With ``ring``
    places are counted around the end: for ``by`` 1 the first device receives from the last device. Otherwise a device
    without such a sender receives zeros.
    """
    axes = spread_axes(axes)
    count = axis_size(axes)
    if not (by % count if ring else by):
        return tree
    targets = [(i, (i + by) % count) for i in range(count) if ring or 0 <= i + by < count]
    return jax.tree.map(lambda value: lax.ppermute(to_varying(value, axes), axes, targets), tree)


def permute(values: Sequence[jax.Array], axes: Sequence[str], targets: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """Sends ``values`` from device i to device j for each (i, j) in ``targets``, and returns the arrays that arrive.

    Devices are numbered along ``axes``, the first axis outermost. The result has the order of ``values``; on a device
    that is no target it has zeros. Values with the same dtype and the same varying axes share one collective.
    """
    axes = spread_axes(axes)
    # Grouped by varying axes, too: in one vector all values would get the same type.
    keys = [(value.dtype, varying_axes(value)) for value in values]

    def send(_: Any, vector: jax.Array) -> jax.Array:
        return lax.ppermute(to_varying(vector, axes), axes, targets)

    return _as_one_vector_each(send, keys, values)


def reduce_scatter(value: jax.Array, dim: int, axes: Sequence[str], options: Sequence[Any] = ()) -> jax.Array:
    """Sums over devices and leaves each of n devices its shard of ``dim``: [..., d, ...] -> [..., d / n, ...].

    Sums are in the value's dtype; devices are those of ``axes``, the first axis outermost. The shards become matrices
    along a leading dim, which is scattered. Otherwise XLA on TPU may all-reduce the full array and slice the result, at
    twice the bytes: if a shard does not fill the tiles in which a TPU lays out an array, or if an array of three or
    more dims is laid out with another dim outermost.

    The first of ``options`` (``communication.Option``) whose method ``reduce_scatter`` returns an array computes the
    shard instead.
    """
    for option in options:
        if (shard := option.reduce_scatter(value, dim, axes)) is not None:
            return shard
    # For narrow dtypes the dim itself is moved to the front: the matrix product that makes a gradient can write this
    # layout, while shards of another dim would be copied. (In float32 this takes XLA on CPU 6 % of a step longer.)
    if dim and value.dtype.itemsize < 4:
        return jnp.moveaxis(reduce_scatter(jnp.moveaxis(value, dim, 0), 0, axes), 0, dim)
    for axis in spread_axes(axes):
        size, n = value.shape[dim], axis_size([axis])
        shards = value.reshape(*value.shape[:dim], n, size // n, *value.shape[dim + 1 :])
        shards = jnp.moveaxis(shards, dim, 0)
        matrices = shards.reshape(n, *_matrix_shape(shards.shape[1:]))
        value = lax.psum_scatter(matrices, axis, scatter_dimension=0, tiled=False).reshape(shards.shape[1:])
    return value


_TILE = 8, 128  # rows and columns in which a TPU lays out the last two dims of an array


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape (rows, columns), each 8 or more, to which an array of this ``shape`` can be reshaped.

    The columns are the last dim or, if it is too small, the product of several last dims. If too few rows remain, the
    columns are the largest divisor of the array's size up to 128, the columns of a tile. If no such matrix exists, the
    result is ``shape`` itself.

    >>> _matrix_shape((256, 8, 128)), _matrix_shape((4, 4096)), _matrix_shape((3, 5))
    ((2048, 128), (128, 128), (3, 5))
    """
    size, (fewest, most) = math.prod(shape), _TILE
    last_dims = [math.prod(shape[dim:]) for dim in range(len(shape) - 1, 0, -1)]
    divisors = [columns for columns in range(most, 0, -1) if size % columns == 0]
    wide = [c for c in last_dims + divisors if c >= fewest and size // c >= fewest]
    return (size // wide[0], wide[0]) if wide else shape


def all_reduce_sum(value: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Returns the sum of ``value`` over the devices of ``axes``, in the shape and dtype of ``value``.

    Under ``check_vma=True`` the type of ``value`` must vary over all ``axes``. Narrow floats are not widened.
    """
    return lax.psum(value, tuple(axes))


def _axes_to_reduce(value: Any, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes in ``axes`` over which a reduction of ``value`` would change the value or its type, in order.

    Along a tracked axis (``check_vma=True``) the type of the value decides: the axis is returned if the value varies
    over the axis, also at size 1. Another axis is returned if its size is 2 or more.
    """
    # A tracked axis of size 1 is kept if the value varies over it: only a reduction can change that in its type.
    varying = varying_axes(value)
    return tuple([a for a in axes if (a in varying if is_tracked(a) else axis_size([a]) > 1)])


def _reduce_together(
    reduce: Callable[[list[jax.Array], tuple[str, ...]], list[jax.Array]],
    values: Sequence[Any],
    axes: Sequence[Sequence[str]],
) -> list[jax.Array]:
    """Reduces ``values[i]`` over the mesh axes ``axes[i]``, with one call of ``reduce`` per distinct tuple of axes.

    ``reduce(arrays, axes)`` is ``lax.psum`` or ``lax.pmean`` on a list. Axes that change neither a value nor its type
    are left out first; a value without remaining axes is returned as it is. Floats narrower than float32 are reduced in
    float32. Returns the arrays in the order and with the dtypes of ``values``.
    """
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, (value, over) in enumerate(zip(values, axes, strict=True)):
        groups[_axes_to_reduce(value, over)].append(index)
    out = [jnp.asarray(value) for value in values]
    for over, indices in groups.items():
        if over:
            # Widened before the sum: in bfloat16 a sum over 256 devices loses entire terms.
            for i, reduced in zip(indices, reduce([widened(out[i]) for i in indices], over), strict=True):
                out[i] = reduced.astype(out[i].dtype)
    return out


def psum(values: Sequence[Any], axes: Sequence[Sequence[str]]) -> list[jax.Array]:
    """Sums ``values[i]`` over the mesh axes ``axes[i]``, with one collective for each distinct set of axes.

    Returns the sums in the order and with the dtypes of ``values``; narrow floats are summed in float32. A value whose
    type is equal along an axis counts once along the axis, not once per device.
    """
    return _reduce_together(lax.psum, values, axes)


def pmean(values: Sequence[Any], axes: Sequence[Sequence[str]]) -> list[jax.Array]:
    """Averages ``values[i]`` over the mesh axes ``axes[i]``, with one collective for each distinct set of axes.

    Returns the means in the order and with the dtypes of ``values``; narrow floats are summed in float32.
    """
    return _reduce_together(lax.pmean, values, axes)


_REDUCTIONS = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
_SIGNED = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def all_reduce(operations: Sequence[str], values: Sequence[Any], axes: Sequence[str]) -> list[jax.Array]:
    """Reduces ``values[i]`` over the devices of ``axes`` by ``operations[i]``: "sum", "max" or "min".

    Returns the reduced arrays in the order and with the dtypes of ``values``. Values of equal operation and dtype are
    sent as one vector, uncast, by one collective. Every device's value counts, also a value that is equal on all
    devices by type: a sum of 1 over 8 devices is 8 for either ``check_vma``, as for ``lax.psum``. If a value is NaN on
    any device, the result is NaN, also for "max" and "min".
    """
    # For "max" and "min" floats are sent as integers: an all-reduce of floats ignores NaN on some platforms.
    dtypes = [jnp.result_type(value) for value in values]
    sent = [x if op == "sum" else _ordered(jnp.asarray(x), op) for op, x in zip(operations, values, strict=True)]
    keys = [(operation, jnp.result_type(value)) for operation, value in zip(operations, sent, strict=True)]

    def reduce(key: tuple[str, Any], vector: jax.Array) -> jax.Array:
        vector = to_varying(vector, spread_axes(axes))
        over = _axes_to_reduce(vector, axes)
        return _REDUCTIONS[key[0]](vector, over) if over else vector

    reduced = zip(_as_one_vector_each(reduce, keys, sent), dtypes, strict=True)
    return [
        x if x.dtype == dtype else lax.bitcast_convert_type(_invert_negative(x), dtype)  # the inverse of _ordered
        for x, dtype in reduced
    ]


def _ordered(value: jax.Array, operation: str) -> jax.Array:
    """Returns floats as signed integers of equal width that compare like the floats; other dtypes unchanged.

    ``operation`` is "max" or "min". A NaN becomes the largest integer for "max" and the smallest for "min", so that an
    extremum of the integers is NaN if any float is NaN.
    """
    # The bits of positive floats, read as integers, are in order already. For negative floats the order is reversed, so
    # all their bits except the sign are inverted.
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    integer = _SIGNED[value.dtype.itemsize]
    bounds = jnp.iinfo(integer)
    end = bounds.max if operation == "max" else bounds.min
    bits = _invert_negative(lax.bitcast_convert_type(value, integer))
    return jnp.where(jnp.isnan(value), jnp.array(end, integer), bits)


def _invert_negative(bits: jax.Array) -> jax.Array:
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def all_gather_stacked(values: Sequence[Any], axes: Sequence[str]) -> list[jax.Array]:
    """Gathers ``values`` from n devices: returns a list of arrays [n, ...] for values [...], by a single collective.

    Devices are in the order of ``PartitionSpec(axes)``, the first axis outermost. The results have the dtypes of
    ``values``, and are equal on each device by type. Values are sent as 32-bit words; narrower values are widened.
    """
    values = [jnp.asarray(value) for value in values]

    def gather(_: None, words: jax.Array) -> jax.Array:
        words = to_varying(words, axes)[None]
        return lax.all_gather(words, tuple(axes), tiled=True, to="invarying" if is_tracked(axes[0]) else "varying")

    rows = _as_one_vector_each(gather, [None] * len(values), [_as_words(value) for value in values])
    pairs = zip(rows, values, strict=True)
    return [row.view(_word_dtype(x.dtype)).astype(x.dtype).reshape(-1, *x.shape) for row, x in pairs]


def _as_words(value: jax.Array) -> jax.Array:
    """Returns the bits of an array of any shape as one vector of 32-bit words, uint32 [w], in row-major order.

    Values narrower than 32 bits are first widened to float32 or int32; a value of 64 bits becomes two words.
    """
    return value.ravel().astype(_word_dtype(value.dtype)).view(jnp.uint32)


def _word_dtype(dtype: DType) -> DTypeLike:
    """Returns the dtype in which values of ``dtype`` are sent: whole 32-bit words, without loss.

    ``dtype`` itself if it has 32 bits or more; float32 for narrower floats; int32 for narrower integers and bools.
    """
    if dtype.itemsize >= 4:
        return dtype
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def _as_one_vector_each(
    fn: Callable[[Key, jax.Array], jax.Array], keys: Sequence[Key], values: Sequence[Any]
) -> list[jax.Array]:
    """Calls ``fn(key, vector)`` once per distinct key, for the concatenation of all ``values`` that have this key.

    ``keys[i]`` is the key of ``values[i]``; values are flattened. ``fn`` returns a vector of the same length, or [...,
    length] with further leading dims. Returns, in the order of ``values``, the part of each value, [..., *shape of the
    value].
    """
    groups: dict[Key, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        groups[key].append(index)
    out: dict[int, jax.Array] = {}
    for key, indices in groups.items():
        shapes = [jnp.shape(values[i]) for i in indices]
        result = fn(key, jnp.concatenate([jnp.ravel(values[i]) for i in indices]))
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        for i, shape, range_ in zip(indices, shapes, jnp.split(result, ends[:-1], axis=-1), strict=True):
            out[i] = range_.reshape(*range_.shape[:-1], *shape)
    return [out[i] for i in range(len(values))]
