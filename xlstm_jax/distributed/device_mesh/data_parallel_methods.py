"""``DataParallel``: plain data parallelism, for training loops that call methods of an object to shard and average.

  create_data_parallel_sharding   mesh -> the sharding of a batch
  shard_batch                     places a batch in this sharding
  shard_model_state               parameters and optimizer state: replicated or split
  all_reduce_gradients            averages the local gradients within the step

Such a loop replicates the parameters on every device. To split them, use ``shard_module_params`` and
``make_train_step``.
"""

from typing import cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.policy import DEFAULT_MIN_WEIGHT_SIZE, choose_shard_dim
from xlstm_jax.distributed.data_parallel.shard import sync_gradients
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names, entry_axes
from xlstm_jax.distributed.device_mesh import batches
from xlstm_jax.distributed.device_mesh.batch_layout import auto_mesh, check_mesh, mesh_axes
from xlstm_jax.explicit_axes import placed

DATA_AXIS = "data"  # axis of DeviceMeshManager.create_data_parallel_mesh
STEP_AXIS = "batch"  # usual axis name of a step under pmap, also the default in the metrics
SHARDINGS_OF_A_STATE = ("replicate", "shard")
REDUCE_TYPES = ("mean", "sum")


class DataParallel(nnx.Module):
    """Methods for plain data parallelism: shard a batch, place a state, average gradients. A module without state.

    Every method can also be called on the class. ``create_data_parallel_sharding``, ``shard_batch`` and
    ``all_reduce_gradients`` have a second name with the suffix ``_static``, as in ``DistributedMetrics``.

    >>> data = DeviceMeshManager.create_data_parallel_mesh()
    >>> dp = DataParallel()
    >>> batch = dp.shard_batch({"x": np.ones((16, 3))}, dp.create_data_parallel_sharding(data))
    >>> params = dp.shard_model_state({"w": jnp.ones(3)}, data)
    >>> grads = jax.jit(jax.grad(lambda params, batch: jnp.mean(batch["x"] @ params["w"])))(params, batch)
    >>> dp.all_reduce_gradients(grads)["w"].tolist()
    [1.0, 1.0, 1.0]
    """

    @staticmethod
    def create_data_parallel_sharding(mesh: Mesh, data_axis: AxisNames = DATA_AXIS) -> NamedSharding:
        """Returns the sharding of a batch whose dim 0, the rows, is split over ``data_axis``, one axis or several.

        Raises a ``TypeError`` if ``mesh`` is not a mesh with devices, and a ``ValueError`` if the mesh lacks an axis.
        """
        check_mesh(mesh, devices=True)
        return placed(NamedSharding(auto_mesh(mesh), PartitionSpec(mesh_axes(mesh, data_axis, "data_axis"))))

    @staticmethod
    def shard_batch(batch: PyTree, sharding: NamedSharding) -> PyTree:
        """Makes the global batch from the rows of this process, split as ``sharding`` says; call it in every process.

        ``batch`` has arrays [rows, ...] with the rows of this process, and scalars, which are replicated. Returns a
        tree of global arrays [all rows, ...], like the function ``shard_batch``.

        Raises:
          TypeError: ``sharding`` is not a ``NamedSharding``; or as ``shard_batch``.
          ValueError: ``sharding`` does not split rows, or also splits other dims; or as ``shard_batch``.
        """
        cure = "Pass that of create_data_parallel_sharding(mesh)."
        if not isinstance(sharding, NamedSharding):
            raise TypeError(f"sharding is a {type(sharding).__name__}, and names no axes of a mesh. {cure}")
        rows, *others = [*sharding.spec, None]
        if not entry_axes(rows) or any(map(entry_axes, others)):
            raise ValueError(f"sharding splits by {sharding.spec}, and a batch is split along its rows alone. {cure}")
        return batches.shard_batch(batch, cast(Mesh, sharding.mesh), entry_axes(rows))

    @staticmethod
    def shard_model_state(
        state: PyTree, mesh: Mesh, param_sharding: str = "replicate", *, min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE
    ) -> PyTree:
        """Returns the state as global arrays on the devices of the mesh, replicated or split.

        Args:
          state: arrays, as parameters, an optimizer state or ``nnx.state(model)``; equal in every process.
          mesh: the mesh.
          param_sharding: "replicate" for a copy on every device; or "shard" to split each leaf over the first axis of
            the mesh, along the dim that ``shard_params`` would choose: for a step under plain ``jit``, where XLA
            gathers.
          min_weight_size: with "shard", leaves with fewer values stay replicated.
        Raises:
          ValueError: ``param_sharding`` has another value.
        """
        check_mesh(mesh, devices=True)
        _check_choice("param_sharding", param_sharding, SHARDINGS_OF_A_STATE)
        axis_sizes, mesh = {mesh.axis_names[0]: mesh.devices.shape[0]}, auto_mesh(mesh)

        def spec(shape: tuple[int, ...]) -> PartitionSpec:
            dim, _ = choose_shard_dim(shape, (None,) * len(shape), axis_sizes, min_weight_size)
            return PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, mesh.axis_names[0])

        def put(leaf: PyTree) -> jax.Array:
            split = spec(np.shape(leaf)) if param_sharding == "shard" else PartitionSpec()
            return jax.device_put(leaf, placed(NamedSharding(mesh, split)))

        return jax.tree.map(put, state)

    @staticmethod
    def replicate_params(params: PyTree, mesh: Mesh) -> PyTree:
        """Returns the parameters as global arrays, with a full copy on every device of the mesh."""
        return DataParallel.shard_model_state(params, mesh)

    @staticmethod
    def all_reduce_gradients(gradients: PyTree, reduce_type: str = "mean", axis_name: AxisNames = STEP_AXIS) -> PyTree:
        """Returns the gradients of the loss of the full batch, from the gradients that the step has computed.

        Inside ``shard_map`` or ``pmap`` a device has the gradient of the loss of its local rows; gradients are averaged
        or summed, correctly in both ``check_vma`` modes (by ``sync_gradients``). Under plain ``jit`` arrays are global,
        so the gradient already belongs to the full batch, and is returned unchanged.

        Args:
          gradients: the result of ``jax.grad``, not yet averaged.
          reduce_type: "mean" if the loss is a mean over rows, "sum" if it is a sum.
          axis_name: the axis, or the tuple of axes, bound by the step; ignored if no axis is bound.
        Raises:
          ValueError: ``reduce_type`` has another value; or the step has bound other axes, which the error names.
        """
        _check_choice("reduce_type", reduce_type, REDUCE_TYPES)
        axes = as_axis_names(axis_name)
        if not collectives.manual_axes() and not any(map(collectives.is_bound, axes)):
            return gradients
        # Compute the mean first, also for a sum: only the mean is correct whether or not JAX has already summed.
        means = sync_gradients(gradients, axes)
        if reduce_type == "mean":
            return means
        count = collectives.axis_size(axes)
        return trees.map_values(lambda leaf: leaf.value * count if leaf.is_differentiable else leaf.value, means)

    # These methods are static already, so both names are the same function.
    create_data_parallel_sharding_static = create_data_parallel_sharding
    shard_batch_static = shard_batch
    all_reduce_gradients_static = all_reduce_gradients


def _check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"Unsupported {argument}: {value!r} is none of {', '.join(map(repr, choices))}.")
