"""Shared objects of the rows: a small mesh, model, state and batch, each made once."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.support import AXES, Block, Model, data, fsdp, mean_loss, mesh_of, on_mesh, weighted_loss
from xlstm_jax.distributed import DeviceMeshManager, create_train_state, make_train_step

create = DeviceMeshManager.create_device_mesh
KEY = jax.random.key(0)
MESH = mesh_of(2, 4)
BATCH = data()
MODEL = Model(fsdp)
PLAIN = nn.Dense(4)
WHOLE = P()


@cache
def state():
    """Returns a state of MODEL and adam on MESH; rows only trace steps, so the state is never donated."""
    return create_train_state(MODEL, optax.adam(1e-3), MESH, KEY, BATCH["x"], batch_axes=AXES)


def trace(given=None, batch=BATCH, rng=KEY, *local, loss=mean_loss, mesh=MESH, axes=AXES, extra_trees=None, **options):
    """Traces a step of a loss on a batch, with the shared state unless another is given."""
    named = {} if extra_trees is None else {"extra_trees": extra_trees}
    step = make_train_step(loss, mesh, axes, **options)
    return step.trace(state() if given is None else given, batch, rng, *local, **named)


def shaped(fn, *args, mesh=MESH, in_specs=WHOLE, out_specs=WHOLE, check_vma=True):
    """Traces a function inside ``shard_map`` without running."""
    return jax.eval_shape(on_mesh(fn, mesh, check_vma, in_specs, out_specs), *args)


__all__ = [
    "AXES",
    "BATCH",
    "KEY",
    "MESH",
    "MODEL",
    "PLAIN",
    "Block",
    "DeviceMeshManager",
    "Model",
    "P",
    "create",
    "create_train_state",
    "data",
    "fsdp",
    "jax",
    "jnp",
    "make_train_step",
    "mean_loss",
    "mesh_of",
    "nn",
    "np",
    "on_mesh",
    "optax",
    "shaped",
    "state",
    "trace",
    "weighted_loss",
]
