"""Tests of the text of a training state: one line, and a table in a notebook, for any kind of leaf."""

import re

import jax
import jax.numpy as jnp
import optax

from tests.support import AXES, Model, data, fsdp, mesh_of
from xlstm_jax.distributed import TrainState, abstract_train_state, bytes_per_device, create_train_state
from xlstm_jax.formatting import format_bytes

ARGUMENTS = (Model(fsdp()), optax.adam(1e-3), mesh_of(1, 8), jax.random.key(0), data()["x"])


class MyState(TrainState):
    key: jax.Array


def test_repr_of_a_train_state_has_the_step_and_bytes_per_device():
    state = create_train_state(*ARGUMENTS, batch_axes=AXES)
    kept = f"{format_bytes(bytes_per_device(state.params))} per device, leaves: {len(jax.tree.leaves(state.params))}"
    assert re.fullmatch(rf"<TrainState at step 0: params [^;,]*, {kept}; opt_state [^;]*>", repr(state))
    abstract = abstract_train_state(*ARGUMENTS, batch_axes=AXES)
    assert repr(abstract) == repr(state).replace("at step 0", "without values")


def test_repr_html_of_a_train_state_is_a_table():
    html = create_train_state(*ARGUMENTS, batch_axes=AXES)._repr_html_()
    texts = ("<pre", "TrainState at step 0", "params", "opt_state", "per device")
    assert not [text for text in texts if text not in html]


def test_repr_of_a_train_state_works_for_traced_deleted_and_missing_values():
    state = create_train_state(*ARGUMENTS, batch_axes=AXES)
    seen = []
    jax.eval_shape(lambda state: seen.append(repr(state)), state)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    seen += [repr(state), repr(jax.tree.map(lambda leaf: leaf.sharding, state))]
    assert not [text for text in seen if not text.startswith("<TrainState without values: params ")]


def test_repr_of_a_train_state_subclass_stays_short():
    params = {"kernel": jnp.ones((64, 64))}
    mine = MyState.create(apply_fn=None, params=params, tx=optax.adam(1e-3), key=jax.random.key(0))
    assert repr(mine).startswith("<MyState at step 0: params 16 KiB") and len(repr(mine)) < 200
