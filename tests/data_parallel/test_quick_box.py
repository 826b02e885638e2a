"""The library's box is what ``flax.struct`` would make of it, for JAX, Flax, pickles and copies alike."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import serialization

from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.wire.communication import Communication


class AsFlaxHasIt(nn.Partitioned):
    """A box that Flax registers."""


VALUE = jnp.arange(8.0)
MADE = Sharded(VALUE, ("fsdp",), communication=Communication.of("bfloat16", None), trainable=False)
REMADE = jax.tree.unflatten(jax.tree.structure(MADE), [VALUE])
BOXES = pytest.mark.parametrize("box", [MADE, REMADE], ids=["called", "unflattened"])


def equal(one, other):
    fields = [tuple(getattr(box, field.name) for field in dataclasses.fields(box)) for box in (one, other)]
    return type(one) is type(other) and fields[0][1:] == fields[1][1:] and bool(jnp.all(fields[0][0] == fields[1][0]))


@BOXES
def test_a_box_is_the_same_after_each_way_of_making_it_anew(box):
    state = jax.tree.map(lambda x: x + 1, serialization.to_state_dict(box))
    for other in (
        jax.tree.map(lambda x: x, box),
        copy.copy(box),
        copy.deepcopy(box),
        pickle.loads(pickle.dumps(box)),
        box.replace(value=VALUE),
        box.replace(names=("fsdp",)),
        dataclasses.replace(box, unit_depth=0),
        serialization.from_state_dict(box.replace(value=VALUE - 1), serialization.to_state_dict(box)),
    ):
        assert equal(other, box)
        assert jax.tree.structure(other) == jax.tree.structure(box)
    assert not equal(serialization.from_state_dict(box, state), box)  # guard: values are compared


@BOXES
def test_structures_differ_where_fields_do(box):
    mine = jax.tree.structure(box)
    assert mine == jax.tree.structure(box.replace(value=None, mesh=None).replace(value=1))
    for field in ({"trainable": True}, {"names": (None,)}, {"unit_depth": 2}, {"true_sizes": (3,)}):
        other = jax.tree.structure(box.replace(**field))
        assert mine != other
        assert "Sharded" in str(other)
    assert pickle.loads(pickle.dumps(mine)) == mine
    assert hash(mine) == hash(jax.tree.structure(REMADE))


@BOXES
def test_paths_are_those_of_flax(box):
    theirs = AsFlaxHasIt(VALUE, ("fsdp",))
    ours, plain = (jax.tree_util.tree_leaves_with_path({"kernel": one})[0][0] for one in (box, theirs))
    assert ours == plain
    assert jax.tree_util.keystr(ours) == "['kernel'].value"


@BOXES
def test_a_box_is_frozen_and_a_dataclass(box):
    assert [field.name for field in dataclasses.fields(box)][:2] == ["value", "names"]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'value'"):
        box.value = VALUE
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'names'"):
        box.names = ()
    assert equal(Sharded.from_nnx_metadata(box.to_nnx_metadata()), box)


def test_a_box_that_was_replaced_leaves_the_other_as_it_was():
    other = REMADE.replace(value=VALUE + 1).replace(names=(None,))
    assert (REMADE.names, other.names) == (("fsdp",), (None,))
    assert equal(REMADE, MADE)


def test_a_state_dict_of_other_fields_is_refused():
    with pytest.raises(ValueError, match="Unknown field"):
        serialization.from_state_dict(MADE, {"value": VALUE, "names": ()})


def test_a_class_of_a_user_is_registered_too():
    class Box(Sharded):
        pass

    box = jax.tree.map(lambda x: x + 1, Box(VALUE, ("fsdp",)))
    assert type(box) is Box
    assert box.names == ("fsdp",)
