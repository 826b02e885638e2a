"""Activations of layers that are split over a mesh axis: how they enter and leave, and how their tokens are split.

With n devices along the axis "tp", and x[b, t, d] an activation:

  function         forward                               backward
  enter_split      x as it is                            gradients of all devices, summed            (all-reduce)
  leave_split      terms of all devices, summed          the gradient as it is
  gather_tokens    x[b, t / n, d] -> x[b, t, d]          summed, each device keeps its tokens        (reduce-scatter)
  scatter_tokens   summed, each device keeps its tokens  dx[b, t / n, d] -> dx[b, t, d]              (all-gather)
  split_tokens     each device keeps its tokens          dx[b, t / n, d] -> dx[b, t, d]              (all-gather)
  join_tokens      x[b, t / n, d] -> x[b, t, d]          each device keeps its tokens

The first two stand around a split layer whose input and output are whole, and equal on all devices (tensor parallel);
the second two around a layer whose input and output are split along their tokens (sequence parallel). The last two lie
between activations that are split along their tokens and activations that are equal.

Each is right in both ``check_vma`` modes. With types JAX transposes its own collectives to the right-hand column.
Without types it takes the transpose of a sum for another sum, so the rules are written out here.

Outside ``shard_map`` values are global and nothing is done, nor over an axis of one device.
"""

import jax
from jax import Array

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.tracing import running_loss
from xlstm_jax.distributed.data_parallel.wire.transposes import all_parts, equal_in, own_part, summed


def devices_here(axis_name: str, caller: str) -> int:
    """The number of devices among which a layer is split here: 1 outside ``shard_map``, where values are global.

    Raises:
      ValueError: the axis is not among those that are bound; or it is one of the axes that the batch is split over.
    """
    if not collectives.is_bound(axis_name):
        if collectives.manual_axes():
            raise ValueError(collectives.unbound_message(axis_name, caller))
        return 1
    if axis_name in running_loss().batch_axes and collectives.axis_size((axis_name,)) > 1:
        raise ValueError(
            f"{caller}: {axis_name!r} splits this layer, and the loss is averaged over {running_loss().batch_axes}, as "
            f"if {axis_name!r} split the batch, too. Devices along it must see the same rows: leave {axis_name!r} "
            "out of batch_axes, and of the axes of the step."
        )
    return collectives.axis_size((axis_name,))


def parts_of_params(axis_name: str, caller: str) -> int:
    """The number of parts in which parameters are stored: as ``devices_here``, or as the mesh says that is set.

    Raises:
      ValueError: the mesh has no such axis.
    """
    # In `init` no axis is bound: parameters are made whole, under the mesh that says how they will be stored.
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or collectives.manual_axes() or collectives.is_bound(axis_name):
        return devices_here(axis_name, caller)
    if axis_name not in mesh.shape:
        raise ValueError(
            f"{caller}: {axis_name!r} is not an axis of the mesh, which has {tuple(mesh.shape)}. Give axis_name= one "
            f"of these, or the mesh the axis {axis_name!r}, of size 1 where nothing is to be split."
        )
    return mesh.shape[axis_name]


# -------------------------------------------------------------------------------------- whole, and equal on all devices


def enter_split(x: Array, axis_name: str, *, caller: str = "enter_split") -> Array:
    """``x``, whole and equal on all devices, for a layer that is split: its gradient is summed over the devices.

    >>> def loss(x, w):  # each of 4 devices multiplies by weights of its own
    ...     return leave_split(enter_split(x, "fsdp") * w, "fsdp").sum()
    >>> grad = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(jax.P(), jax.P("fsdp")), out_specs=jax.P())
    >>> grad(jnp.ones(1), jnp.array([1.0, 2.0, 3.0, 4.0])).tolist()
    [10.0]

    Raises:
      ValueError: the axis is not bound, or is one of the batch; or the type of ``x`` says that devices differ in it.
    """
    if (n := devices_here(axis_name, caller)) == 1:
        return x
    check_equal(x, axis_name, n, caller)
    # The transpose of this cast is the sum over devices.
    if collectives.is_tracked(axis_name):
        return collectives.to_varying(x, (axis_name,))
    return equal_in(x, (axis_name,))


def check_equal(x: Array, axis_name: str, n: int, caller: str) -> None:
    """Raises where the type of ``x`` says that it differs along the axis."""
    if axis_name in collectives.varying_axes(x):
        raise ValueError(
            f"{caller}: an input of shape {x.shape} differs along {axis_name!r} by its type, and must be whole and "
            f"equal on its {n} devices. Where each device has its share of the tokens, pass sequence_dim=; where it "
            "has its share of the features, as a column-split layer returns them, the next layer is a RowDense."
        )


def leave_split(x: Array, axis_name: str, *, caller: str = "leave_split") -> Array:
    """The sum of ``x`` over all devices, equal on all of them: what a row-split product ends with.

    >>> add = lambda x: leave_split(x, "fsdp")
    >>> jax.shard_map(add, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P())(jnp.arange(4.0)).tolist()
    [6.0]

    Raises:
      ValueError: the axis is not bound; or the type of ``x`` says that it is equal on all devices already.
    """
    if (n := devices_here(axis_name, caller)) == 1:
        return x
    check_differs(x, axis_name, n, caller)
    if collectives.is_tracked(axis_name):
        return collectives.all_reduce_sum(x, (axis_name,))
    return summed(x, (axis_name,))


def check_differs(x: Array, axis_name: str, n: int, caller: str) -> None:
    """Raises where the type of ``x`` says that it is equal along the axis, so that it would count n times."""
    if collectives.types_tell(axis_name, x) and axis_name not in collectives.varying_axes(x):
        raise ValueError(
            f"{caller}: an input of shape {x.shape} is equal along {axis_name!r} by its type, and would count {n} "
            "times in the sum over its devices. A row-split layer takes what a column-split one has returned: each "
            "device's share of the features."
        )


# ----------------------------------------------------------------------------------------------- split along the tokens


def gather_tokens(x: Array, dim: int, axis_name: str, *, caller: str = "gather_tokens") -> Array:
    """All tokens from each device's share, [b, t / n, d] -> [b, t, d], for a layer that is split.

    Its gradient is summed over the devices, and each keeps the gradient of its own tokens.

    >>> gather = lambda x: gather_tokens(x, 0, "fsdp")  # 4 tokens, 1 on each of 4 devices, which then have 4 each
    >>> jax.shard_map(gather, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))(jnp.ones((4, 1))).shape
    (16, 1)

    Raises:
      ValueError: the axis is not bound; or the type of ``x`` says that all devices have the same tokens.
    """
    if devices_here(axis_name, caller) == 1:
        return x
    check_own_tokens(x, dim, axis_name, caller)
    return collectives.all_gather(x, dim, (axis_name,))


def scatter_tokens(x: Array, dim: int, axis_name: str, *, caller: str = "scatter_tokens") -> Array:
    """The sum of ``x`` over all devices, of which each keeps its share of the tokens: [b, t, d] -> [b, t / n, d].

    >>> add = lambda x: scatter_tokens(x, 0, "fsdp")  # each of 4 devices has a term for each of 4 tokens
    >>> jax.shard_map(add, mesh=mesh, in_specs=jax.P(None, "fsdp"), out_specs=jax.P("fsdp"))(jnp.ones((4, 4))).tolist()
    [[4.0], [4.0], [4.0], [4.0]]

    Raises:
      ValueError: the axis is not bound, or does not divide ``dim``; or the type of ``x`` says that it is equal.
    """
    if (n := devices_here(axis_name, caller)) == 1:
        return x
    check_differs(x, axis_name, n, caller)
    check_tokens(x, dim, axis_name, caller)
    return collectives.reduce_scatter(x, dim, (axis_name,))


def split_tokens(x: Array, dim: int, axis_name: str) -> Array:
    """This device's share of the tokens of ``x``, which is whole and equal: [b, t, d] -> [b, t / n, d].

    >>> double = lambda x: join_tokens(2 * split_tokens(x, 0, "fsdp"), 0, "fsdp")
    >>> jax.shard_map(double, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())(jnp.arange(4.0)[:, None]).ravel().tolist()
    [0.0, 2.0, 4.0, 6.0]

    Raises:
      ValueError: the axis is not bound, or does not divide ``dim``; or the type of ``x`` says that it differs.
    """
    if (n := devices_here(axis_name, "split_tokens")) == 1:
        return x
    check_equal(x, axis_name, n, "split_tokens")
    check_tokens(x, dim, axis_name, "split_tokens", features=0)
    return own_part(x, dim, (axis_name,))


def join_tokens(x: Array, dim: int, axis_name: str, *, caller: str = "join_tokens") -> Array:
    """All tokens from each device's share, [b, t / n, d] -> [b, t, d], whole and equal: for what is not split.

    >>> join = lambda x: join_tokens(x, 0, "fsdp")
    >>> jax.shard_map(join, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P())(jnp.arange(4.0)[:, None]).shape
    (4, 1)

    Raises:
      ValueError: the axis is not bound; or the type of ``x`` says that all devices have the same tokens.
    """
    if devices_here(axis_name, caller) == 1:
        return x
    check_own_tokens(x, dim, axis_name, caller, features=0)
    return all_parts(x, dim, (axis_name,))


def check_own_tokens(x: Array, dim: int, axis_name: str, caller: str, *, features: int = 1) -> None:
    """Raises where ``dim`` is no dim of tokens, or the type of ``x`` says that all devices have the same tokens."""
    _check_dim(x, dim, caller, features)
    if collectives.types_tell(axis_name, x) and axis_name not in collectives.varying_axes(x):
        raise ValueError(
            f"{caller}: an input of shape {x.shape} is equal along {axis_name!r} by its type, so each device has all "
            f"tokens, and would get them {collectives.axis_size((axis_name,))} times. Take split_tokens(x, {dim}, "
            f"{axis_name!r}) before, or leave out sequence_dim=."
        )


def _check_dim(x: Array, dim: int, caller: str, features: int) -> None:
    if not 0 <= dim < x.ndim - features:
        raise ValueError(
            f"{caller}: dim {dim} is no dim of tokens of an array of shape {x.shape}; pass one from 0 to "
            f"{x.ndim - 1 - features}, as 1 for [b, t, d]."
        )


def check_tokens(x: Array, dim: int, axis_name: str, caller: str, *, features: int = 1) -> None:
    """Raises where ``dim`` is no dim of tokens, or the devices along the axis do not divide them."""
    _check_dim(x, dim, caller, features)
    n, tokens = collectives.axis_size((axis_name,)), x.shape[dim]
    if tokens % n:
        raise ValueError(
            f"{caller}: dim {dim} of an array of shape {x.shape} has {tokens} tokens, which the {n} devices along "
            f"{axis_name!r} do not divide. Pad sequences to {-(-tokens // n) * n}."
        )
