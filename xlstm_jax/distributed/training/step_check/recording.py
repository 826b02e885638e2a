"""An optimizer that records what it is called with, around the optimizer of a state.

  Recorded(inner, record)   in place of the optimizer's state: it reads like ``inner``, so that a step that looks into
                            the state (``opt_state.hyperparams``, ``opt_state[0].mu``) finds what it looks for
  record                    of the last call: gradients, parameters and state as the optimizer got them, and its updates

The updates are those of the optimizer itself: the step trains as it does without the record.
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
from xlstm_jax.distributed.optimizers.extra_args import taking_extra_args
from xlstm_jax.distributed.optimizers.state import is_state_box
from xlstm_jax.distributed.training.state import sharded_opt_state


class Record(NamedTuple):
    """The last call of an optimizer, and how many calls there were.

    ``opt_state`` is a dict of leaves by path: what looks for a part of the optimizer's state finds that of ``inner``.
    ``has_params`` and ``has_value`` are 1 where the call had parameters, and ``value=``; else these are 0. ``seals``
    are numbers 1, an integer and a float: a step that maps over the optimizer's state changes these, too, and then
    nothing of the record is what the optimizer got.
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
        """Whether nothing but the optimizer has changed the record."""
        return all(float(seal) == 1 for seal in self.seals)


@register_pytree_with_keys_class
class Recorded:
    """An optimizer's state and a record; attributes and items are those of the state."""

    def __init__(self, inner: PyTree, record: Record):
        self.inner, self.record = inner, record

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        return ((GetAttrKey("inner"), self.inner), (GetAttrKey("record"), self.record)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Recorded":
        return cls(*children)

    def __getattr__(self, name: str) -> Any:
        # Not while a copy is made, which has no fields yet.
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
        """As of the state, where that is a ``NamedTuple``."""
        return Recorded(self.inner._replace(**fields), self.record)


def recorded_state(state: Any, mesh: Mesh) -> Any:
    """The state with an optimizer that records its calls."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        if not isinstance(state, Recorded):  # a state that the step has made itself
            return own.update(updates, state, params, **extra)
        new, inner = own.update(updates, state.inner, params, **extra)
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

    own = taking_extra_args(state.tx)
    record = _first_record(state, mesh)
    recorder = optax.GradientTransformationExtraArgs(own.init, update)
    return state.replace(tx=recorder, opt_state=Recorded(state.opt_state, record))


def _first_record(state: Any, mesh: Mesh) -> Record:
    """A record of no call, in the places that a step gives to a record."""

    def nothing(params: PyTree) -> Record:
        grads, given, updates = (jax.tree.map(jnp.zeros_like, params) for _ in range(3))
        none = [jnp.zeros(()) for _ in range(3)]
        seals = jnp.ones((), jnp.int32), jnp.ones(())
        return Record(jnp.zeros((), jnp.int32), grads, given, updates, {}, none[0], none[1], none[2], seals)

    boxed = [leaf for _, leaf in trees.leaves_with_path(state.opt_state) if is_box(leaf) and not is_state_box(leaf)]
    # A state that was made of boxed parameters has boxed moments: then the optimizer sees boxes.
    if any(leaf.stores_value for _, leaf in trees.sharded_leaves(boxed)):
        record = jax.jit(nothing)(trees.without_frozen(state.params))
    else:
        record = sharded_opt_state(optax.GradientTransformation(nothing, optax.identity().update), state.params, mesh)
    return record._replace(opt_state=dict(trees.leaves_with_path(state.opt_state)))
