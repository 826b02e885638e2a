"""Activations of layers that are split over a mesh axis: how activations enter and leave, and how tokens are split.

With n devices along the axis "tp", and x[b, t, d] an activation:

  function         forward                               backward
  enter_split      x unchanged                           sum of the devices' gradients               (all-reduce)
  leave_split      sum of the devices' terms             gradient unchanged
  gather_tokens    x[b, t / n, d] -> x[b, t, d]          sum, each device keeps its tokens           (reduce-scatter)
  scatter_tokens   sum, each device keeps its tokens     dx[b, t / n, d] -> dx[b, t, d]              (all-gather)
  split_tokens     each device keeps its tokens          dx[b, t / n, d] -> dx[b, t, d]              (all-gather)
  join_tokens      x[b, t / n, d] -> x[b, t, d]          each device keeps its tokens

The first pair encloses a split layer whose input and output are replicated (tensor parallel). The second pair encloses
a split layer whose input and output are split along the tokens (sequence parallel). The third pair converts between
replicated activations and activations split along the tokens.

Each function is right in both ``check_vma`` modes. With ``check_vma=True`` JAX transposes its collectives to the
right-hand column. With ``check_vma=False`` JAX transposes a sum to another sum, so the rules are written out here.

Outside ``shard_map`` values are global and the functions return their input, as over an axis of a single device. An
axis that is not bound is an error only if other axes are bound.
"""

import jax
from jax import Array

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS
from xlstm_jax.distributed.data_parallel.wire.transposes import all_parts, equal_in, local_part, summed


def axis_devices(axis_name: str, caller: str) -> int:
    """Returns the number of devices along the axis of a split layer; 1 outside ``shard_map``, where values are global.

    ``caller`` is the name of the layer or function, for errors.

    Raises:
      ValueError: further axes are bound, but not this axis; or the batch is split over the axis.
    """
    if not collectives.is_bound(axis_name):
        if collectives.manual_axes():
            raise ValueError(collectives.unbound_message(axis_name, caller))
        return 1
    batch_axes = RUNNING_LOSS.get().batch_axes
    if axis_name in batch_axes and collectives.axis_size((axis_name,)) > 1:
        raise ValueError(
            f"{caller}: {axis_name!r} splits this layer, and the loss is averaged over {batch_axes}, as "
            f"if {axis_name!r} split the batch, too. Devices along it must see the same rows: leave {axis_name!r} "
            "out of batch_axes, and of the axes of the step."
        )
    return collectives.axis_size((axis_name,))


def param_shards(axis_name: str, caller: str) -> int:
    """Returns the number of shards along the axis in which a split layer stores its parameters.

    The number is ``axis_devices`` or, in ``init``, where no axis is bound, the size of the axis in the current mesh (1
    without a mesh). ``caller`` is the name of the layer, for errors.

    Raises:
      ValueError: the mesh has no such axis; or as ``axis_devices``.
    """
    # In `init` no axis is bound: parameters are made unsharded, under the mesh on which they will be stored.
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or collectives.manual_axes() or collectives.is_bound(axis_name):
        return axis_devices(axis_name, caller)
    if axis_name not in mesh.shape:
        raise ValueError(
            f"{caller}: {axis_name!r} is not an axis of the mesh, which has {tuple(mesh.shape)}. Pass one of these "
            f"as axis_name=, or add the axis {axis_name!r} to the mesh, with size 1 for no split."
        )
    return mesh.shape[axis_name]


# -------------------------------------------------------------------------------------------- replicated on all devices


def enter_split(x: Array, axis_name: str, *, caller: str = "enter_split") -> Array:
    """Returns the replicated ``x`` unchanged, as input of a split layer; backward sums the gradient over the devices.

    >>> def loss(x, w):  # each of 4 devices multiplies by weights of its own
    ...     return leave_split(enter_split(x, "fsdp") * w, "fsdp").sum()
    >>> grad = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(jax.P(), jax.P("fsdp")), out_specs=jax.P())
    >>> grad(jnp.ones(1), jnp.array([1.0, 2.0, 3.0, 4.0])).tolist()
    [10.0]

    Args:
      x: the input of the layer, equal on all devices along the axis.
      axis_name: the mesh axis over which the layer is split.
      caller: name of the layer or function, for errors.
    Raises:
      ValueError: other axes are bound, but not this axis; the batch is split over the axis; or ``x`` varies over the
        axis by its type.
    """
    if (n := axis_devices(axis_name, caller)) == 1:
        return x
    check_equal(x, axis_name, n, caller)
    # The transpose of this cast is the sum over devices.
    if collectives.is_tracked(axis_name):
        return collectives.to_varying(x, (axis_name,))
    return equal_in(x, (axis_name,))


def check_equal(x: Array, axis_name: str, n: int, caller: str) -> None:
    """Raises a ``ValueError`` if ``x``, which must be replicated over the axis, varies over the axis by its type.

    Types show this under ``check_vma=True`` alone; otherwise nothing is raised. ``n``, the number of devices along the
    axis, and ``caller`` are for the error.
    """
    if axis_name in collectives.varying_axes(x):
        raise ValueError(
            f"{caller}: an input of shape {x.shape} differs along {axis_name!r} by its type, and must be "
            f"replicated on its {n} devices. For an input split along the tokens pass sequence_dim=; after a "
            "column-split layer, whose output is split along the features, take a RowDense."
        )


def leave_split(x: Array, axis_name: str, *, caller: str = "leave_split") -> Array:
    """Returns the sum of ``x`` over the devices, replicated: the last step of a row-split product.

    >>> add = lambda x: leave_split(x, "fsdp")
    >>> jax.shard_map(add, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P())(jnp.arange(4.0)).tolist()
    [6.0]

    Args:
      x: a term of the sum on each device, such as a product with the device's rows of a kernel.
      axis_name, caller: as for ``enter_split``.
    Raises:
      ValueError: for the axis, as ``enter_split``; or ``x`` is replicated over the axis by its type.
    """
    if (n := axis_devices(axis_name, caller)) == 1:
        return x
    check_differs(x, axis_name, n, caller)
    if collectives.is_tracked(axis_name):
        return collectives.all_reduce_sum(x, (axis_name,))
    return summed(x, (axis_name,))


def check_differs(x: Array, axis_name: str, n: int, caller: str) -> None:
    """Raises a ``ValueError`` if ``x`` is replicated over the axis by its type: a sum would count ``x`` n times.

    Types show this under ``check_vma=True`` alone; otherwise nothing is raised. ``n``, the number of devices along the
    axis, and ``caller`` are for the error.
    """
    if collectives.type_shows_varying(axis_name, x) and axis_name not in collectives.varying_axes(x):
        raise ValueError(
            f"{caller}: an input of shape {x.shape} is equal along {axis_name!r} by its type, and would count {n} "
            "times in the sum over its devices. Pass the output of a column-split layer, in which each device has "
            "different features."
        )


# ----------------------------------------------------------------------------------------------- split along the tokens


def gather_tokens(x: Array, dim: int, axis_name: str, *, caller: str = "gather_tokens") -> Array:
    """Gathers the tokens of all devices for a split layer: [b, t / n, d] -> [b, t, d].

    In backward the gradients are summed over the devices, and each device keeps the gradient of its tokens.

    >>> gather = lambda x: gather_tokens(x, 0, "fsdp")  # 4 tokens, 1 on each of 4 devices, which then have 4 each
    >>> jax.shard_map(gather, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))(jnp.ones((4, 1))).shape
    (16, 1)

    Args:
      x: activations of this device's tokens.
      dim: the dim of tokens, such as 1 of [b, t / n, d].
      axis_name, caller: as for ``enter_split``.
    Raises:
      ValueError: for the axis, as ``enter_split``; ``dim`` is the last dim (features) or no dim; or ``x`` is replicated
        over the axis by its type.
    """
    if axis_devices(axis_name, caller) == 1:
        return x
    check_local_tokens(x, dim, axis_name, caller)
    return collectives.all_gather(x, dim, (axis_name,))


def scatter_tokens(x: Array, dim: int, axis_name: str, *, caller: str = "scatter_tokens") -> Array:
    """Sums ``x`` over the devices and returns the sum for this device's tokens: [b, t, d] -> [b, t / n, d].

    >>> add = lambda x: scatter_tokens(x, 0, "fsdp")  # each of 4 devices has a term for each of 4 tokens
    >>> jax.shard_map(add, mesh=mesh, in_specs=jax.P(None, "fsdp"), out_specs=jax.P("fsdp"))(jnp.ones((4, 4))).tolist()
    [[4.0], [4.0], [4.0], [4.0]]

    Args:
      x: a term of the sum on each device, for all tokens.
      dim, axis_name, caller: as for ``gather_tokens``.
    Raises:
      ValueError: for the axis and ``dim``, as ``gather_tokens``; the devices do not divide the tokens; or ``x`` is
        replicated over the axis by its type.
    """
    if (n := axis_devices(axis_name, caller)) == 1:
        return x
    check_differs(x, axis_name, n, caller)
    check_tokens(x, dim, axis_name, caller)
    return collectives.reduce_scatter(x, dim, (axis_name,))


def split_tokens(x: Array, dim: int, axis_name: str) -> Array:
    """Returns this device's tokens of a replicated ``x``: [b, t, d] -> [b, t / n, d].

    >>> double = lambda x: join_tokens(2 * split_tokens(x, 0, "fsdp"), 0, "fsdp")
    >>> jax.shard_map(double, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())(jnp.arange(4.0)[:, None]).ravel().tolist()
    [0.0, 2.0, 4.0, 6.0]

    Args:
      x: activations of all tokens, equal on all devices along the axis.
      dim, axis_name: as for ``gather_tokens``.
    Raises:
      ValueError: for the axis, as ``enter_split``; ``dim`` is no dim of ``x``; the devices do not divide the tokens; or
        ``x`` varies over the axis by its type.
    """
    if (n := axis_devices(axis_name, "split_tokens")) == 1:
        return x
    check_equal(x, axis_name, n, "split_tokens")
    check_tokens(x, dim, axis_name, "split_tokens", features=0)
    return local_part(x, dim, (axis_name,))


def join_tokens(x: Array, dim: int, axis_name: str, *, caller: str = "join_tokens") -> Array:
    """Gathers the tokens of all devices for a layer that is not split: [b, t / n, d] -> [b, t, d], replicated.

    >>> join = lambda x: join_tokens(x, 0, "fsdp")
    >>> jax.shard_map(join, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P())(jnp.arange(4.0)[:, None]).shape
    (4, 1)

    Args:
      x, dim, axis_name, caller: as for ``gather_tokens``.
    Raises:
      ValueError: for the axis, as ``enter_split``; ``dim`` is no dim of ``x``; or ``x`` is replicated over the axis by
        its type.
    """
    if axis_devices(axis_name, caller) == 1:
        return x
    check_local_tokens(x, dim, axis_name, caller, features=0)
    return all_parts(x, dim, (axis_name,))


def check_local_tokens(x: Array, dim: int, axis_name: str, caller: str, *, features: int = 1) -> None:
    """Raises a ``ValueError`` if ``x`` cannot have this device's tokens along ``dim``, with tokens split over the axis.

    Either ``dim`` is not from 0 to ``x.ndim - features - 1``, where ``features`` counts the last dims that hold no
    tokens; or the type of ``x`` (under ``check_vma=True``) says that ``x`` is replicated over the axis.
    """
    _check_dim(x, dim, caller, features)
    if collectives.type_shows_varying(axis_name, x) and axis_name not in collectives.varying_axes(x):
        raise ValueError(
            f"{caller}: an input of shape {x.shape} is equal along {axis_name!r} by its type, so each device has all "
            f"tokens, and the gather would repeat them {collectives.axis_size((axis_name,))} times. Apply "
            f"split_tokens(x, {dim}, {axis_name!r}) before, or leave out sequence_dim=."
        )


def _check_dim(x: Array, dim: int, caller: str, features: int) -> None:
    if not 0 <= dim < x.ndim - features:
        raise ValueError(
            f"{caller}: dim {dim} is no dim of tokens of an array of shape {x.shape}; pass one from 0 to "
            f"{x.ndim - 1 - features}, as 1 for [b, t, d]."
        )


def check_tokens(x: Array, dim: int, axis_name: str, caller: str, *, features: int = 1) -> None:
    """Raises a ``ValueError`` if ``dim``, of all tokens of ``x``, cannot be split over the devices along the axis.

    Either ``dim`` is not from 0 to ``x.ndim - features - 1``, where ``features`` counts the last dims that hold no
    tokens; or the number of devices does not divide the size of ``dim``.
    """
    _check_dim(x, dim, caller, features)
    n, tokens = collectives.axis_size((axis_name,)), x.shape[dim]
    if tokens % n:
        raise ValueError(
            f"{caller}: dim {dim} of an array of shape {x.shape} has {tokens} tokens, which the {n} devices along "
            f"{axis_name!r} do not divide. Pad sequences to {-(-tokens // n) * n}."
        )
