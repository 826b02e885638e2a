"""``varying_params``: lets ``jax.grad`` return local gradients, whose type differs from the type of a mean.

Under ``check_vma=True`` JAX sums the gradient of a parameter over each axis along which the parameter does not vary by
type, and the sum has the type of a mean. If the parameters are cast to varying before ``jax.grad``, nothing is summed:
gradients have the type "varying", which only an average takes away, and JAX refuses gradients that were not averaged.
``value_and_grad`` casts in the same way.
"""

from functools import partial

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.training.gradients import varying_if_frozen, varying_leaves


def varying_params(params: PyTree, axis_names: AxisNames) -> PyTree:
    """Returns the parameters typed as varying along the axes, for ``jax.grad`` and ``sync_gradients`` in a custom step.

    >>> def local_grad(w, x):  # of mean(w * x), on each of 4 devices
    ...     return jax.grad(lambda w: jnp.mean(w * x))(varying_params(w, "fsdp"))
    >>> mean = lambda w, x: sync_gradients(local_grad(w, x), "fsdp")
    >>> specs = {"in_specs": (jax.P(), jax.P("fsdp")), "out_specs": jax.P()}
    >>> jax.shard_map(mean, mesh=mesh, **specs)(jnp.float32(1), jnp.arange(8.0))
    Array(3.5, dtype=float32)

    Args:
      params: the parameters, boxed where they are split. Differentiate with respect to the result.
      axis_names: all axes along which the batch or gathered weights differ, as for ``sync_gradients``.
    Returns:
      The same tree and values, at no cost. With ``check_vma=False`` types list no axes, and nothing changes.
    Raises:
      ValueError: an axis is not bound.
    """
    axes = collectives.bound_axes(axis_names, caller="varying_params")
    trainable, put_back = trees.split_differentiable(params)
    return put_back(varying_leaves(trainable, axes), fill_other=partial(varying_if_frozen, axes=axes))
