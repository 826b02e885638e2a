"""The default of ``batch_axes``: every axis of the mesh, except the axes over which the model itself splits layers.

Initialisation reads the model's axes off the parameters' boxes, and a step off its first state, ``StepOfState``: when
``make_train_step`` is called there is no state yet.
"""

from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.leaf import split_by_model
from xlstm_jax.distributed.data_parallel.trees import map_leaves, sharded_leaves
from xlstm_jax.distributed.training.moments import CheckedStep
from xlstm_jax.formatting import format_axes


def default_batch_axes(params: PyTree, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of the mesh, in order, except the axes over which the model itself splits parameters.

    Tensor parallelism and experts are such splits. Pass the axes on to ``shard_batch`` and to ``metric.empty``.

    >>> params = {"kernel": nn.Partitioned(jnp.ones((8, 32)), (None, "fsdp"))}
    >>> default_batch_axes(params, mesh), default_batch_axes({"bias": jnp.ones(4)}, mesh)
    (('dp',), ('dp', 'fsdp'))

    Args:
      params: the parameters, in the boxes in which ``create_train_state`` returns them.
      mesh: the mesh of the parameters.
    Raises:
      ValueError: the model splits layers over every axis of the mesh.
    """
    leaves = sharded_leaves(map_leaves(split_by_model, params))
    model_axes = {axis: path for path, leaf in leaves for axis in leaf.model_axes}
    axes = tuple(axis for axis in mesh.axis_names if axis not in model_axes)
    if not axes and mesh.axis_names:
        axis = mesh.axis_names[-1]
        raise ValueError(
            f"the model itself splits parameters over every axis of the mesh, {format_axes(mesh.axis_names)} (over "
            f"{axis!r} it splits '{model_axes[axis]}'), and no axis is left for the batch. Add an axis to the mesh, of "
            "size 1 for a batch that is not split, or pass batch_axes."
        )
    return axes


class StepOfState:
    """Step made without ``batch_axes``: reads the axes off the state that the step is first called with.

    The first call makes the ``CheckedStep`` for these axes; all calls run this ``CheckedStep``.

    Args:
      make: makes the step for batch axes.
      mesh: the mesh of the step.
    """

    __name__ = "step"
    __wrapped__: CheckedStep  # set by the first call: ``inspect.unwrap`` then finds the options of the step

    def __init__(self, make: Callable[[tuple[str, ...]], Any], mesh: Mesh | AbstractMesh):
        self._make, self._mesh = make, mesh

    def of_state(self, state: Any) -> CheckedStep:
        """Returns the step for the batch axes of ``state``, which are the ``default_batch_axes`` of its parameters.

        The step is made at the first call; later calls return the same step. For a state without ``params`` returns a
        step over all axes of the mesh, which reports the mistake when called.
        """
        if "__wrapped__" not in vars(self):
            if not hasattr(state, "params"):  # the step reports the mistake, whatever its axes
                return self._make(self._mesh.axis_names)
            self.__wrapped__ = self._make(default_batch_axes(state.params, self._mesh))
        return self.__wrapped__

    def _of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckedStep:
        return self.of_state(args[0] if args else kwargs.get("state"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = vars(self).get("__wrapped__") or self._of_call(args, kwargs)
        return step(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_call(args, kwargs).lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_call(args, kwargs).trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_call(args, kwargs).eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        if "__wrapped__" in vars(self):
            self.__wrapped__.clear_cache()

    def __getattr__(self, name: str) -> Any:
        # Without a call there is no jitted function yet, and nothing in its cache.
        if name == "_cache_size" and "__wrapped__" not in vars(self):
            return lambda: 0
        if name.startswith("__") or "__wrapped__" not in vars(self):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)
