"""Where training begins: values of the plain model's init, split; and an optimizer state split like them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.boxes import leaf_value, map_leaves, rebox, shardings
from xlstm_jax.distributed.device_mesh.checks import auto_mesh, check_no_explicit_mesh, mesh_axes
from xlstm_jax.distributed.optimizers.state import optimizer_state_shardings, own_copy, stored_state, trainable

# ------------------------------------------------------------------------------------------------------ initialisation


def init_sharded(
    model: nn.Module, mesh: Mesh, rng: PyTree, *inputs: PyTree, batch_axes: AxisNames, **kwargs: Any
) -> PyTree:
    """Initialises a model whose modules are wrapped, every device computing only the slices that it keeps.

    For every mesh the values are those of ``jax.jit(plain_model.init)`` on one device: the same random bits, and floats
    to within 2 units in the last place (XLA may compile a function such as ``erf_inv`` otherwise for a slice; seen on
    CPU: 3 units where a device's rows have 3 to 5 values, none at all on JAX 0.10). An initializer that factors a
    matrix (``orthogonal``) is the exception: it needs the whole leaf, and rounds as it will.

    Args:
      model: a Linen module with ``shard_module_params`` around it or its parts. Unwrapped parts stay replicated.
      mesh: the mesh, with the axes that the wrappers name.
      rng: a key, or a dict of keys, as ``model.init`` takes it.
      *inputs: example inputs with global shapes; split over ``batch_axes`` where their leading dim divides.
      batch_axes: the axes that the batch is split over.
      **kwargs: passed to ``model.init`` as they are, as ``train=False``.
    Returns:
      The variables: global arrays on the mesh, boxed where they are split.
    Raises:
      ValueError: a wrapper or a box names an axis that the mesh does not have.
    """
    return jitted_init(model, mesh, rng, *inputs, batch_axes=batch_axes, **kwargs)(rng, inputs)


def jitted_init(
    model: nn.Module, mesh: Mesh, rng: PyTree, *inputs: PyTree, batch_axes: AxisNames, **kwargs: Any
) -> Any:
    """The ``jax.jit`` function of ``(rng, inputs)`` that ``init_sharded`` calls, to be lowered and looked at."""
    check_no_explicit_mesh()
    mesh = auto_mesh(mesh)
    axes = mesh_axes(mesh, batch_axes, "batch_axes")

    def init(rng, inputs):
        # Wrapped modules see the sizes of the axes here, and box global values accordingly.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return model.init(rng, *inputs, **kwargs)

    placed = (NamedSharding(mesh, PartitionSpec()), jax.tree.map(lambda x: _input_sharding(x, mesh, axes), inputs))
    out = shardings(jax.eval_shape(init, rng, inputs), mesh)
    return jax.jit(init, in_shardings=placed, out_shardings=out)


def _input_sharding(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> NamedSharding:
    parts = math.prod(mesh.shape[axis] for axis in axes)
    splits = np.ndim(x) > 0 and np.shape(x)[0] % parts == 0
    return NamedSharding(mesh, PartitionSpec(axes) if splits else PartitionSpec())


# ------------------------------------------------------------------------------------------------------ the ready step


def create_train_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    rng: PyTree,
    *inputs: PyTree,
    batch_axes: AxisNames,
    **kwargs: Any,
) -> TrainState:
    """A Flax ``TrainState`` on the mesh: parameters by ``init_sharded``, the optimizer's moments split like them.

    Args:
      model, mesh, rng, *inputs, batch_axes, **kwargs: see ``init_sharded``.
      tx: any optax optimizer. It is initialised on the parameters without boxes, as global arrays.
    Returns:
      ``TrainState(step=0, apply_fn=model.apply, params, tx, opt_state)``: ``params`` boxed where they are split,
      ``opt_state`` bare, every leaf of it split like the parameter that it belongs to, and boxed only where that is
      padded.
    Raises:
      ValueError: the model has other variable collections than "params", which a ``TrainState`` has no place for.
    """
    mesh = auto_mesh(mesh)
    variables = dict(init_sharded(model, mesh, rng, *inputs, batch_axes=batch_axes, **kwargs))
    params = variables.pop("params", {})
    if variables:
        raise ValueError(
            f"the model has the variable collections {sorted(variables)} beside 'params', which a TrainState does not "
            "carry. Initialise with init_sharded, and write the step with value_and_grad and has_aux=True, which "
            "returns the updated collections."
        )

    def init(params):
        return stored_state(jax.tree.map(own_copy, tx.init(trainable(params))), params)

    out = optimizer_state_shardings(jax.eval_shape(init, params), params, mesh)
    step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, PartitionSpec()))
    opt_state = jax.jit(init, out_shardings=out)(params)
    return TrainState(step=step, apply_fn=model.apply, params=params, tx=tx, opt_state=opt_state)


def abstract_train_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    rng: PyTree,
    *inputs: PyTree,
    batch_axes: AxisNames,
    **kwargs: Any,
) -> TrainState:
    """What ``create_train_state`` would return, without allocating it: the target of a restore.

    Args:
      model, tx, mesh, rng, *inputs, batch_axes, **kwargs: see ``create_train_state``. ``rng`` and the inputs may be
        ``ShapeDtypeStruct``.
    Returns:
      The ``TrainState`` of ``ShapeDtypeStruct`` with shardings, boxed where parameters are split.
    Raises:
      ValueError: as ``create_train_state``.
    """
    mesh = auto_mesh(mesh)

    def create(rng, inputs):
        return create_train_state(model, tx, mesh, rng, *inputs, batch_axes=batch_axes, **kwargs)

    state = jax.eval_shape(create, rng, inputs)
    places = state.replace(
        step=NamedSharding(mesh, PartitionSpec()),
        params=shardings(state.params, mesh),
        opt_state=optimizer_state_shardings(state.opt_state, state.params, mesh),
    )

    def placed(leaf, place):
        value = leaf_value(leaf)
        return rebox(leaf, jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place))

    return map_leaves(placed, state, places)
