"""``CheckedStep``: a jitted step that says what is wrong with an argument which JAX refuses before it traces.

Such a call has failed already when its arguments are looked at, and a good one costs nothing. Only a state that was
donated is looked for before the call: releases of JAX differ in what follows, and some end the process.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import boxes
from xlstm_jax.distributed.training.checks import named_leaf, why_no_array

ARGUMENTS = ("state", "batch", "rng", "local")


class CheckedStep:
    """A ``jax.jit`` function of ``(state, batch, rng)``, or with the ``local`` state of a metric besides.

    It has all that the function has: ``lower``, ``trace``, ``eval_shape``, ``clear_cache``.
    """

    def __init__(self, jitted: jax.stages.Wrapped, mesh: Mesh | AbstractMesh):
        functools.update_wrapper(self, jitted)
        self._jitted, self._mesh = jitted, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _check_not_donated(args)
        return self._explained(self._jitted, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._explained(self._jitted.lower, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._explained(self._jitted.trace, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which copy looks for before there is a function to ask
            raise AttributeError(name)
        return getattr(self._jitted, name)

    def _explained(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return fn(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            elsewhere = "incompatible devices" in str(error)
            if found := next(_errors_in(args, self._mesh if elsewhere else None), None):
                raise found from None
            raise


def _check_not_donated(args: tuple[Any, ...]) -> None:
    """Looks at one array of each tree that is donated as a whole: to look at all costs as much as to call the step."""
    state = args[0] if args else None
    looked_at = {"state": (getattr(state, "step", None), getattr(state, "params", None)), "local": args[3:]}
    for name, trees in looked_at.items():
        for leaf in map(_first_leaf, trees):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise _deleted(name, name)


def _first_leaf(tree: PyTree) -> Any:
    """A leaf of nested dicts, without a look at the others."""
    while isinstance(tree, Mapping) and tree:
        tree = next(iter(tree.values()))
    return boxes.leaf_value(tree)


def _errors_in(args: tuple[Any, ...], mesh: Mesh | AbstractMesh | None) -> Iterator[Exception]:
    """What to raise in place of JAX's error for each leaf that JAX refuses; those elsewhere than on ``mesh`` too."""
    for name, argument in zip(ARGUMENTS, args, strict=False):
        for path, leaf in boxes.leaves_with_path(argument):
            value, where = boxes.leaf_value(leaf), named_leaf(name, path)
            if reason := why_no_array(value):
                yield TypeError(f"{where} is {reason}")
            elif isinstance(value, jax.Array) and not isinstance(value, Tracer):
                if value.is_deleted():
                    yield _deleted(name, where)
                elif isinstance(mesh, Mesh) and value.committed and _devices(value) != _ids(mesh.devices.flat):
                    yield ValueError(
                        f"{where} lies on the devices {_devices(value)}, and the mesh of the step has "
                        f"{_ids(mesh.devices.flat)}, in this order. Make state and step with one mesh, and "
                        "batches by shard_batch on it, or of NumPy arrays."
                    )


def _deleted(name: str, where: str) -> ValueError:
    if name in ("state", "local"):
        return ValueError(
            f"{where} was handed to a step before: that takes over the memory of its {name}, and returns the next. Go "
            f"on with what it returned, state, metrics{', local' if name == 'local' else ''} = step(...). To use one "
            f"twice, hand in a copy of it: jax.tree.map(jnp.copy, {name})."
        )
    return ValueError(f"{where} was deleted: it was donated to a function (donate_argnums). Hand in one that is alive.")


def _devices(value: jax.Array) -> list[int]:
    """The ids of an array's devices, in the order of its mesh."""
    if isinstance(value.sharding, NamedSharding) and isinstance(value.sharding.mesh, Mesh):
        return _ids(value.sharding.mesh.devices.flat)
    return sorted(_ids(value.sharding.device_set))


def _ids(devices: Any) -> list[int]:
    return [device.id for device in devices]
