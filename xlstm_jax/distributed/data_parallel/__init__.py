"""Fully sharded data parallelism for Linen modules, used inside ``shard_map``.

Life of a parameter W[d, f] on mesh axis "fsdp" of size N (d_fsdp: dim d is split over that axis):
  init      W[d, f]       -- shard_params  -->  W[d_fsdp, f]    each device keeps a shard, in a box with axis names
  forward   W[d_fsdp, f]  -- gather_params -->  W[d, f]         all-gather, dropped after use
  backward  dW[d, f]      -- its transpose -->  dW[d_fsdp, f]   reduce-scatter, mean over N
Replicated leaves are averaged by ``sync_gradients``. ``shard_module_params`` does all of this around a module.

The words of the library, each with one meaning:
  axis           of a mesh ("fsdp"); *dim* is of an array, *size* counts elements, ``*_bytes`` counts bytes
  shard          the part of a split array on a device
  leaf           an array of a tree of parameters, bare or in a box
  unit           a wrapped module: all its parameters are gathered when a public method is entered
  replicated     of a leaf or value: every device has the full array; the *global* array is the array over all devices
  unsharded parameter  the full array that a gather makes of the shards
  box            the wrapper around a leaf that names the axes of each dim: ``nn.Partitioned``, ``Sharded``
  copy, replica  the same shard on another device, along an axis that does not split the leaf (``Copies``)
  gather dtype   the dtype in which shards are sent by a gather
  reduce-scatter dtype  the dtype in which gradients are sent and summed by a reduce-scatter
  staged         of a collective over several axes: a collective per axis, in sequence
  wire           the format in which the shards of a leaf are sent, with its conversions: ``Wire``
  wire bytes     bytes sent by a device over the links
  frozen         not trained, as the box says: gathered like any other leaf, without gradient and optimizer state
  minibatch      one of the m parts of a device's batch, where a step accumulates gradients

Six files lead a parameter through a unit, some 700 lines of code (1,900 with docstrings); read in this order:
  wire/wire.py             format in which a shard is sent and received: ``Wire``. A new format is a ``WireFormat`` in a
                           new file, and a row of wire/formats.py
  wire/communication.py    the options of a leaf; the gather of an array, and the gradient of the gather
  store.py                 format in which a device stores a leaf: ``Store``. A new format is a subclass in a new file
  leaf.py                  a leaf: stored array, axes of each dim, communication, store, trainable or frozen
  shard.py                 leaves are split and boxed (``policy`` chooses the dim), and gathered; averages of gradients
  modules/unit.py          a module with gathers around its methods. A new module system is a ``ModuleSystem``

``policy`` (options of a unit), ``wire/collectives`` (every collective, and names of axes) and ``wire/running_loss``
(facts on the loss that is being differentiated) are used throughout; their docstrings suffice.

Then, as needed:
  extension.py             hooks by which a feature changes a unit: ``Extension``, in a new file that extensions imports
  modules/linen_module.py  units of Linen, chosen in a model from outside; ``linen_class`` wraps a class
                           (``shard_module_params``), ``shard_modules`` chooses the units of a model of Linen or NNX
  wire/copies.py           copies of shards; a new kind is a subclass in a new file
  boxes.py, trees.py       boxes of Flax; walks over trees, shardings
``training`` goes on with ``gradients``, ``accumulation`` and ``step``.

The method is ZeRO-3 (arXiv:1910.02054), known as FSDP (arXiv:2304.11277).
"""

from typing import TYPE_CHECKING

from xlstm_jax.deferred import names_when_used
from xlstm_jax.distributed.data_parallel import extensions  # noqa: F401  # registers them
from xlstm_jax.distributed.data_parallel.extensions.all_reduce import AllReduceGradients
from xlstm_jax.distributed.data_parallel.extensions.packed import PackSmall
from xlstm_jax.distributed.data_parallel.extensions.replicas import Replicas
from xlstm_jax.distributed.data_parallel.freezing import freeze_params
from xlstm_jax.distributed.data_parallel.modules.linen_class import shard_module_params
from xlstm_jax.distributed.data_parallel.modules.scan_layers import scan_layers
from xlstm_jax.distributed.data_parallel.modules.shard_modules import larger_than, shard_modules
from xlstm_jax.distributed.data_parallel.remat import remat_policy
from xlstm_jax.distributed.data_parallel.rename import rename_leaves, stack_layers, unstack_layers
from xlstm_jax.distributed.data_parallel.shard import (
    gather_params,
    shard_params,
    split_array_over_mesh,
    sync_gradients,
)
from xlstm_jax.distributed.data_parallel.trees import box_like, bytes_per_device, partition_specs, shardings, unbox
from xlstm_jax.distributed.data_parallel.typed_kernel import typed_kernel
from xlstm_jax.distributed.data_parallel.wire import formats  # noqa: F401  # registers them
from xlstm_jax.distributed.data_parallel.wire.communication import gather_array_with_mean_grads
from xlstm_jax.program_names import BLOCK_INPUT

if TYPE_CHECKING:
    from xlstm_jax.distributed.data_parallel.modules.nnx_model import NnxModel, nnx_model
else:
    __getattr__ = names_when_used(
        __name__,
        {
            "NnxModel": "xlstm_jax.distributed.data_parallel.modules.nnx_model",
            "nnx_model": "xlstm_jax.distributed.data_parallel.modules.nnx_model",
        },
    )

__all__ = [
    "BLOCK_INPUT",
    "AllReduceGradients",
    "NnxModel",
    "PackSmall",
    "Replicas",
    "box_like",
    "bytes_per_device",
    "freeze_params",
    "gather_array_with_mean_grads",
    "gather_params",
    "larger_than",
    "nnx_model",
    "partition_specs",
    "remat_policy",
    "rename_leaves",
    "scan_layers",
    "shard_module_params",
    "shard_modules",
    "shard_params",
    "shardings",
    "split_array_over_mesh",
    "stack_layers",
    "sync_gradients",
    "typed_kernel",
    "unbox",
    "unstack_layers",
]
