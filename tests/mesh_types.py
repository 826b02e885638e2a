"""Meshes of each kind of axis types, ways to set a mesh, and models of two layers, for tests under ``jax.set_mesh``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, Mesh

from tests.support import AXES, fsdp, plain
from xlstm_jax.distributed import nnx_model, shard_modules

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# Sizes, names and types of the axes.
MESHES = {
    "explicit": ((2, 4), AXES, (EXPLICIT, EXPLICIT)),
    "explicit fsdp": ((2, 4), AXES, (AUTO, EXPLICIT)),
    "explicit dp": ((2, 4), AXES, (EXPLICIT, AUTO)),
    "auto": ((2, 4), AXES, (AUTO, AUTO)),
    "one explicit axis": ((8,), ("fsdp",), (EXPLICIT,)),
    "one auto axis": ((8,), ("fsdp",), (AUTO,)),
}
# A norm over all gradients, and moments: both are wrong if computed from shards.
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def mesh_called(kind: str) -> Mesh:
    """Returns the mesh of a row of ``MESHES``."""
    shape, axes, types = MESHES[kind]
    return jax.make_mesh(shape, axes, axis_types=types)


@contextmanager
def set_globally(mesh: Mesh) -> Iterator[None]:
    """Sets the mesh without a context, and removes the set mesh at the end of the block."""
    jax.set_mesh(mesh)
    try:
        yield
    finally:
        jax.set_mesh(None)


HOW = {"context": jax.set_mesh, "global": set_globally}


def is_explicit(x: Any) -> bool:
    """Returns whether the type of an array is of a mesh with explicit axes."""
    return EXPLICIT in jax.typeof(x).sharding.mesh.axis_types


def has_types_of(kind: str, tree: Any) -> bool:
    """Returns whether the types of all arrays are explicit exactly if the mesh has explicit axes."""
    return {is_explicit(x) for x in jax.tree.leaves(tree)} == {EXPLICIT in MESHES[kind][2]}


class Linen(nn.Module):
    """Two layers; ``wrap`` is applied to each."""

    wrap: Callable[..., Any] = plain
    hidden: int = 16

    @nn.compact
    def __call__(self, x):
        return self.wrap(nn.Dense)(4, name="last")(nn.tanh(self.wrap(nn.Dense)(self.hidden, name="first")(x)))


class Nnx(nnx.Module):
    """The NNX version of ``Linen``."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


# The sharded and the plain model.
MODELS = {
    "linen": (Linen(fsdp()), Linen()),
    "padded": (Linen(fsdp(uneven="pad")), Linen()),
    "nnx": (shard_modules(nnx_model(Nnx), nnx.Linear, "fsdp", min_weight_size=32), nnx_model(Nnx)),
}
