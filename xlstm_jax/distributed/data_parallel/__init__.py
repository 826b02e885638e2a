"""Fully sharded data parallelism for Linen modules, used inside ``shard_map``.

Life of a parameter W[d, f] on mesh axis "fsdp" of size N (d_fsdp: dim d is split over that axis):
  init      W[d, f]       -- shard_params  -->  W[d_fsdp, f]    each device keeps its shard, in a box with its names
  forward   W[d_fsdp, f]  -- gather_params -->  W[d, f]         all-gather, dropped after use
  backward  dW[d, f]      -- its transpose -->  dW[d_fsdp, f]   reduce-scatter, mean over N
Leaves that stay whole are averaged by ``sync_gradients``. ``shard_module_params`` puts all of it around a module.

The words of the library, each with one meaning:
  axis           of a mesh ("fsdp"); *dim* is of an array, *size* counts its elements, ``*_bytes`` its bytes
  shard          what one device keeps of an array that is split over an axis
  whole          a leaf, or a value, that every device has all of; the *global* array is the one over all devices
  box            the wrapper around a leaf that names the axes of each dim: ``nn.Partitioned``, ``Sharded``
  copy, replica  the same shard on another device, along an axis that does not split the leaf (``Copies``)
  gather dtype   the dtype in which shards are sent when they are gathered
  reduce-scatter dtype  the dtype in which gradients are sent and summed when they are scattered
  staged         of a collective over several axes: one collective for each axis, one after the other
  wire bytes     the bytes that a device sends over its links
  frozen         not trained, as its box says: gathered like any other leaf, without gradient and optimizer state
  minibatch      one of the m parts of a device's batch, where a step accumulates gradients

Read in this order, some 1,500 lines of code:
  wire/wires.py            how a shard is sent, and what arrives: ``Wire``. A new format is a row of wire/formats.py
  store.py                 how a device keeps a leaf: ``Store``. A new one is a subclass in a file of its own
  leaf.py                  a leaf: what is stored, the axes of each dim, wire, store, whether it is trained
  wire/copies.py           how gradients of copies are averaged: ``Copies``. A new kind: a subclass in its own file
  wire/gather_array.py     the gather of an array, and its gradient
  policy.py, shard.py      which dim is split; boxes are made
  modules/unit.py          a module that gathers its leaves when it runs. A new module system is a ``ModuleSystem``
  extension.py             what a feature adds to a unit: ``Extension``, registered in extensions/__init__.py
  modules/linen_module.py  the same for Linen

The method is ZeRO-3 (arXiv:1910.02054), known as FSDP (arXiv:2304.11277).
"""

from xlstm_jax.distributed.data_parallel import extensions  # noqa: F401  # registers them
from xlstm_jax.distributed.data_parallel.extensions.replicas import Replicas
from xlstm_jax.distributed.data_parallel.freezing import freeze_params
from xlstm_jax.distributed.data_parallel.gather import gather_params, sync_gradients
from xlstm_jax.distributed.data_parallel.modules.linen_module import shard_module_params
from xlstm_jax.distributed.data_parallel.modules.nnx_model import NnxModel, nnx_model
from xlstm_jax.distributed.data_parallel.modules.scan_layers import scan_layers
from xlstm_jax.distributed.data_parallel.modules.shard_modules import larger_than, shard_modules
from xlstm_jax.distributed.data_parallel.placement import bytes_per_device, partition_specs, shardings
from xlstm_jax.distributed.data_parallel.remat import remat_policy
from xlstm_jax.distributed.data_parallel.rename import rename_leaves, stack_layers, unstack_layers
from xlstm_jax.distributed.data_parallel.shard import shard_params, split_array_over_mesh
from xlstm_jax.distributed.data_parallel.trees import box_like, unbox
from xlstm_jax.distributed.data_parallel.typed_kernel import typed_kernel
from xlstm_jax.distributed.data_parallel.wire.gather_array import gather_array_with_mean_grads
from xlstm_jax.program_names import BLOCK_INPUT

__all__ = [
    "BLOCK_INPUT",
    "NnxModel",
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
