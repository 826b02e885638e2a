"""Recording wrapper of an optimizer.

  Recorded(inner, record)   replaces the optimizer's state and reads like ``inner``, so that a step may access parts of
                            the state (``opt_state.hyperparams``, ``opt_state[0].mu``)
  record                    the last call: gradients, parameters and state passed to the optimizer, and its updates

Updates pass through unchanged: the step trains as without the record.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import is_box
from xlstm_jax.distributed.optimizers.sharded_optimizer import is_state_box
from xlstm_jax.distributed.optimizers.transforms import taking_extra_args
from xlstm_jax.distributed.training.state import sharded_opt_state


class Record(NamedTuple):
    """Record of the last call of an optimizer, and the number of calls.

    ``opt_state`` is a dict of leaves by path, so that searches for a part of the optimizer's state find only ``inner``.
    ``has_params`` and ``has_value`` are 1 if the call had parameters, or ``value=``, else 0. ``seals`` are an integer 1
    and a float 1: a step that maps a function over the optimizer's state changes the seals, too, which shows that the
    record is no longer valid.
    """

    calls: Any
    grads: PyTree
    params: PyTree
    updates: PyTree
    opt_state: dict[str, Any]
    value: Any
    has_params: Any
    has_value: Any
    seals: tuple[Any, Any]

    def is_intact(self) -> bool:
        """Returns whether both ``seals`` (an integer 1 and a float 1 in the record) are still 1.

        If so, the step has not changed the record, as by a function mapped over the optimizer's state.
        """
        return all(float(seal) == 1 for seal in self.seals)


@register_pytree_with_keys_class
class Recorded:
    """State of a recording optimizer: the inner state, to which attributes and items belong, and the record."""

    def __init__(self, inner: PyTree, record: Record):
        self.inner, self.record = inner, record

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        return ((GetAttrKey("inner"), self.inner), (GetAttrKey("record"), self.record)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Recorded":
        return cls(*children)

    def __getattr__(self, name: str) -> Any:
        # While a copy is made, the fields do not exist yet.
        if name in ("inner", "record") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, at: Any) -> Any:
        return self.inner[at]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def _replace(self, **fields: Any) -> "Recorded":
        """Returns a ``Recorded`` with fields of the inner optimizer state replaced, and with the same record.

        A ``Recorded`` stands for the inner state in a step. If the inner state is a ``NamedTuple``, a step may call
        ``opt_state._replace(...)``, as without the record.
        """
        return Recorded(self.inner._replace(**fields), self.record)


def recorded_state(state: Any, mesh: Mesh) -> Any:
    """Returns the ``TrainState`` with a recording optimizer in place of ``state.tx``.

    ``opt_state`` becomes a ``Recorded``: the present state and the record. The new optimizer updates like ``state.tx``.
    Each call replaces the record: gradients, parameters and state passed in, the returned updates, and the number of
    calls so far. ``mesh`` is the mesh of the state.
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        if not isinstance(state, Recorded):  # a state initialised by the step itself
            return taking.update(updates, state, params, **extra)
        new, inner = taking.update(updates, state.inner, params, **extra)
        before = state.record
        record = Record(
            before.calls + 1,
            updates,
            before.params if params is None else params,
            new,
            dict(trees.leaves_with_path(state.inner)),
            jnp.asarray(extra.get("value", 0.0), jnp.float32),
            jnp.full_like(before.has_params, params is not None),
            jnp.full_like(before.has_value, "value" in extra),
            before.seals,
        )
        return new, Recorded(inner, record)

    taking = taking_extra_args(state.tx)
    record = _first_record(state, mesh)
    recorder = optax.GradientTransformationExtraArgs(taking.init, update)
    return state.replace(tx=recorder, opt_state=Recorded(state.opt_state, record))


def _first_record(state: Any, mesh: Mesh) -> Record:
    """Returns the record of a recording optimizer before its first call: zeros for gradients, parameters and updates.

    The zeros are sharded as the arrays of the record after a step. ``opt_state`` of the record has the leaves of the
    present state by path. ``state`` is a ``TrainState`` on ``mesh``.
    """

    def nothing(params: PyTree) -> Record:
        grads, given, updates = (jax.tree.map(jnp.zeros_like, params) for _ in range(3))
        none = [jnp.zeros(()) for _ in range(3)]
        seals = jnp.ones((), jnp.int32), jnp.ones(())
        return Record(jnp.zeros((), jnp.int32), grads, given, updates, {}, none[0], none[1], none[2], seals)

    boxed = [leaf for _, leaf in trees.leaves_with_path(state.opt_state) if is_box(leaf) and not is_state_box(leaf)]
    # A state created from boxed parameters has boxed moments: then the optimizer receives boxes.
    if any(leaf.stores_value for _, leaf in trees.sharded_leaves(boxed)):
        record = jax.jit(nothing)(trees.without_frozen(state.params))
    else:
        record = sharded_opt_state(optax.GradientTransformation(nothing, optax.identity().update), state.params, mesh)
    return record._replace(opt_state=dict(trees.leaves_with_path(state.opt_state)))
