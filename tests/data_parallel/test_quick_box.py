"""Tests of the library's box: JAX, Flax, pickles and copies treat the box like a ``flax.struct`` dataclass."""

import copy
import copyreg
import dataclasses
import io
import pickle

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import serialization, struct

from tests.support import in_case
from xlstm_jax.distributed.data_parallel.extensions.padding import ZeroPadding
from xlstm_jax.distributed.data_parallel.leaf import LOOKED_UP, Sharded
from xlstm_jax.distributed.data_parallel.wire.communication import Communication


class AsFlaxHasIt(nn.Partitioned):
    """A box registered by Flax."""


VALUE = jnp.arange(8.0)
MADE = Sharded(VALUE, ("fsdp",), communication=Communication.of("bfloat16", None), trainable=False)
REMADE = jax.tree.unflatten(jax.tree.structure(MADE), [VALUE])
BOXES = pytest.mark.parametrize("box", [MADE, REMADE], ids=["called", "unflattened"])


def equal(one, other):
    fields = [tuple(getattr(box, field.name) for field in dataclasses.fields(box)) for box in (one, other)]
    return type(one) is type(other) and fields[0][1:] == fields[1][1:] and bool(jnp.all(fields[0][0] == fields[1][0]))


@BOXES
def test_box_is_equal_after_copy_pickle_replace_and_tree_map(box):
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
def test_tree_structures_of_boxes_differ_if_static_fields_differ(box):
    mine = jax.tree.structure(box)
    assert mine == jax.tree.structure(box.replace(value=None, mesh=None).replace(value=1))
    for field in ({"trainable": True}, {"names": (None,)}, {"unit_depth": 2}, {"store": ZeroPadding((3,))}):
        other = jax.tree.structure(box.replace(**field))
        assert mine != other
        assert "Sharded" in str(other)
    assert pickle.loads(pickle.dumps(mine)) == mine
    assert hash(mine) == hash(jax.tree.structure(REMADE))


@BOXES
def test_tree_paths_of_a_box_equal_the_paths_of_a_flax_box(box):
    theirs = AsFlaxHasIt(VALUE, ("fsdp",))
    ours, plain = (jax.tree_util.tree_leaves_with_path({"kernel": one})[0][0] for one in (box, theirs))
    assert ours == plain
    assert jax.tree_util.keystr(ours) == "['kernel'].value"


@BOXES
def test_box_is_a_frozen_dataclass_and_converts_to_nnx_metadata(box):
    assert [field.name for field in dataclasses.fields(box)][:2] == ["value", "names"]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'value'"):
        box.value = VALUE
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'names'"):
        box.names = ()
    assert equal(Sharded.from_nnx_metadata(box.to_nnx_metadata()), box)


def test_replace_leaves_the_original_box_unchanged():
    other = REMADE.replace(value=VALUE + 1).replace(names=(None,))
    assert (REMADE.names, other.names) == (("fsdp",), (None,))
    assert equal(REMADE, MADE)


class FlaxPickler(pickle.Pickler):
    """Pickles ``Sharded`` as version 0.3.0 did with Flax's registration: an empty box, and the dict of the fields."""

    def __init__(self, file, fields):
        super().__init__(file)
        self.fields = fields

    def reducer_override(self, one):
        return (copyreg.__newobj__, (Sharded,), self.fields) if isinstance(one, Sharded) else NotImplemented


def test_unpickling_reads_a_box_of_version_0_3_0():
    fields = {field.name: getattr(MADE, field.name) for field in dataclasses.fields(MADE)}
    assert AsFlaxHasIt(VALUE, ("fsdp",)).__reduce_ex__(4)[2].keys() == {
        "value",
        "names",
        "mesh",
    }  # guard: Flax's fields
    for state in (fields, {name: fields[name] for name in fields if name != "marks"}):  # before a field was added
        FlaxPickler(file := io.BytesIO(), state).dump(MADE)
        box = pickle.loads(file.getvalue())
        assert equal(box, MADE)
        assert equal(jax.tree.map(lambda x: x, box), MADE)
        assert jax.tree.structure(box) == jax.tree.structure(MADE)


def test_unpickling_converts_the_looked_up_field_of_version_0_3_0_to_a_mark():
    fields = {field.name: getattr(MADE, field.name) for field in dataclasses.fields(MADE) if field.name != "marks"}
    for was, marks in ((True, frozenset({LOOKED_UP})), (False, frozenset())):
        FlaxPickler(file := io.BytesIO(), {**fields, "looked_up": was}).dump(MADE)
        assert equal(pickle.loads(file.getvalue()), MADE.replace(marks=marks))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_box_round_trips_through_each_pickle_protocol(protocol):
    assert equal(pickle.loads(pickle.dumps(REMADE, protocol)), MADE)


@pytest.mark.parametrize(
    ("value", "state"),
    [
        (VALUE, {"value": VALUE, "names": (), "mesh": None}),
        (VALUE, {"names": ()}),
        ({"rows": VALUE}, {"value": {"columns": VALUE}}),
    ],
    ids=["unknown", "missing", "within"],
)
def test_from_state_dict_errors_equal_the_errors_of_a_flax_box(value, state):
    said = []
    for box in (Sharded(value, ("fsdp",)), AsFlaxHasIt(value, ("fsdp",))):
        with in_case(box=box), pytest.raises(ValueError, match=r"field|keys") as error:
            serialization.from_state_dict({"dense": {"kernel": box}}, {"dense": {"kernel": state}})
        said.append(str(error.value).replace(type(box).__name__, "THE BOX"))
    assert said[0] == said[1]
    assert "/dense/kernel" in said[0]
    assert ("THE BOX" in said[0]) == (value is VALUE)


def test_subclass_of_sharded_is_registered_as_a_pytree():
    class Box(Sharded):
        pass

    box = jax.tree.map(lambda x: x + 1, Box(VALUE, ("fsdp",)))
    assert type(box) is Box
    assert box.names == ("fsdp",)


def test_struct_dataclass_on_a_subclass_of_sharded_keeps_the_registration():
    class Box(Sharded):
        pass

    assert struct.dataclass(Box) is Box
    assert equal(jax.tree.map(lambda x: x, Box(VALUE, ("fsdp",))), Box(VALUE, ("fsdp",)))


def test_subclass_of_sharded_may_have_static_fields_and_properties():
    class Box(Sharded):
        scale: float = struct.field(default=1.0, pytree_node=False)

        @property
        def total(self):
            return self.scale * self.value.sum()

    box = Box(VALUE, ("fsdp",), scale=2.0)
    ones = jax.tree.map(jnp.ones_like, box)
    assert (box.total, ones.total) == (56.0, 16.0)
