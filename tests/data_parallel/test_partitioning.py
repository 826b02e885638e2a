"""Tests of the choice of the split dim, the names of a box, and the specs: functions of shapes and names alone."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.support import mesh_of
from xlstm_jax.distributed import bytes_per_device, partition_specs, unbox
from xlstm_jax.distributed.data_parallel import box_like
from xlstm_jax.distributed.data_parallel.extensions.padding import Padded
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of
from xlstm_jax.distributed.data_parallel.policy import choose_shard_dim
from xlstm_jax.distributed.data_parallel.reasons import (
    AlreadySplit,
    Indivisible,
    Largest,
    NoValues,
    OfSeveral,
    Scalar,
    Taken,
    TooSmall,
    reason_from_json,
)
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves_with_path, split_differentiable
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names
from xlstm_jax.distributed.optimizers.matrices.layout import Owned


@pytest.mark.parametrize(
    "shape, names, sizes, threshold, dim, reason",
    [
        ((8, 16), (None, None), {"fsdp": 4}, 0, 1, Largest(1, 16, 4)),
        ((16, 8), (None, None), {"fsdp": 4}, 0, 0, Largest(0, 16, 4)),
        ((8, 8), (None, None), {"fsdp": 4}, 0, 1, Largest(1, 8, 4)),
        ((15, 8), (None, None), {"fsdp": 4}, 0, 1, Largest(1, 8, 4)),
        ((16, 8), ("tp", None), {"fsdp": 4}, 0, 1, Largest(1, 8, 4)),
        ((16, 8), ("tp", None), {"fsdp": 16}, 0, None, Indivisible(16, (16, 8))),
        ((16, 8), ("tp", "ep"), {"fsdp": 4}, 0, None, Taken((16, 8), ("tp", "ep"))),
        ((16, 8), (None, "fsdp"), {"fsdp": 4}, 0, None, AlreadySplit("'fsdp'")),
        ((16, 8), (None, ("dp", "fsdp")), {"fsdp": 4}, 0, None, AlreadySplit("'fsdp'")),
        ((16, 8), (None, "fsdp"), {"dp": 2, "fsdp": 4}, 0, None, AlreadySplit("'fsdp'")),
        ((16, 4), (None, None), {"dp": 2, "fsdp": 4}, 0, 0, Largest(0, 16, 8)),
        ((3, 5), (None, None), {"fsdp": 4}, 0, None, Indivisible(4, (3, 5))),
        ((8, 8), (None, None), {"fsdp": 4}, 64, 1, Largest(1, 8, 4)),  # exactly the threshold: split
        ((8, 8), (None, None), {"fsdp": 4}, 65, None, TooSmall(64, 65)),
        ((), (), {"fsdp": 4}, 0, None, Scalar()),
        ((0, 8), (None, None), {"fsdp": 4}, 0, None, NoValues((0, 8))),
    ],
)
def test_choose_shard_dim_takes_the_largest_free_divisible_dim(shape, names, sizes, threshold, dim, reason):
    assert choose_shard_dim(shape, names, sizes, threshold) == (dim, reason)


def test_choose_shard_dim_with_uneven_pad_returns_both_sizes():
    assert choose_shard_dim((3, 5), (None, None), {"fsdp": 4}, 0, uneven="pad") == (1, Padded(1, 5, 8, 4))


REASONS = [
    (Largest(1, 64, 4), "dim 1 of size 64 is the largest that 4 divides"),
    (Padded(1, 5, 8, 4), "dim 1 of size 5 is the largest, padded to 8 for 4 shards"),
    (Indivisible(16, (16, 8)), "16 divides no free dim of shape (16, 8)"),
    (TooSmall(64, 65), "64 values are fewer than min_weight_size=65"),
    (AlreadySplit("'fsdp'"), "already split over 'fsdp'"),
    (Taken((2,), (("tp", "ep"),)), "every dim of shape (2,) is taken by (('tp', 'ep'),)"),
    (NoValues((0, 8)), "holds no values (shape (0, 8))"),
    (Scalar(), "is a scalar"),
    (OfSeveral((("'dp'", Scalar()), ("'fsdp'", TooSmall(1, 2)))), "over 'dp': is a scalar; over 'fsdp': 1 values"),
]


@pytest.mark.parametrize("reason, words", REASONS, ids=lambda value: type(value).__name__)
def test_reason_prints_the_numbers_and_round_trips_through_json(reason, words):
    assert str(reason).startswith(words)
    assert reason_from_json(json.loads(json.dumps(reason.to_json()))) == reason


@pytest.mark.parametrize("given, want", [("fsdp", ("fsdp",)), (("dp", "fsdp"), ("dp", "fsdp")), (["fs"], ("fs",))])
def test_as_axis_names_accepts_a_string_or_a_sequence(given, want):
    assert as_axis_names(given) == want


def test_box_like_restores_boxes_around_bare_values():
    boxed = {"w": Sharded(jnp.ones((4, 2)), ("fsdp", None)), "b": jnp.ones(3)}
    again = box_like(jax.tree.map(lambda x: 2 * x, unbox(boxed)), boxed)
    assert jax.tree.structure(again) == jax.tree.structure(boxed)
    chex.assert_trees_all_equal(unbox(again), jax.tree.map(lambda x: 2 * x, unbox(boxed)))


def test_leaf_of_fits_names_of_any_length_to_the_dims():
    assert leaf_of(nn.Partitioned(jnp.ones((2, 3)), ("fsdp",))).names == ("fsdp", None)
    assert leaf_of(nn.Partitioned(jnp.ones(()), ("fsdp", None))).names == ()
    assert leaf_of(jnp.ones((2, 3))).names == (None, None)
    assert leaf_of(nn.Partitioned(jnp.ones((2, 3)), (("dp", "fsdp"), "tp"))).axes == ("dp", "fsdp", "tp")


def test_repr_of_a_box_omits_fields_with_default_values():
    box = Sharded(jnp.ones((4, 2), jnp.bfloat16), ("fsdp", None))
    assert repr(box) == "Sharded(bfloat16[4, 2], ('fsdp', None))"
    assert repr(box.replace(trainable=False)) == "Sharded(bfloat16[4, 2], ('fsdp', None), trainable=False)"
    assert repr(Owned(jax.ShapeDtypeStruct((3,), "int8"), (None,))) == "Owned(int8[3], (None,))"
    assert repr(box.replace(value=None)) == "Sharded(None, ('fsdp', None))"


def test_leaf_of_returns_an_equal_box_for_all_flax_box_types():
    value, names = jnp.ones((4, 2)), ("fsdp", None)
    box = Sharded(value, names)
    for other in (nn.Partitioned(value, names), nn.LogicallyPartitioned(value, names)):
        assert jax.tree.structure(leaf_of(other)) == jax.tree.structure(box) and leaf_of(other).value is value
    bare = leaf_of(value)
    assert (bare.axes, bare.trainable, bare.stores_value, bare.true_shape) == ((), True, True, (4, 2))
    assert leaf_of(box) is box  # the same object, not a copy


def test_leaves_with_path_joins_keys_and_indices_with_slashes():
    tree = {"blocks": {"kernel": Sharded(jnp.ones((4, 2)), ("fsdp", None)), "list": [jnp.ones(3)]}}
    assert [path for path, _ in leaves_with_path(tree)] == ["blocks/kernel", "blocks/list/0"]
    assert map_leaves_with_path(lambda path, _: path, tree)["blocks"]["kernel"] == "blocks/kernel"
    assert leaves_with_path(jnp.ones(2))[0][0] == "."


def test_partition_specs_name_only_axes_with_more_than_a_single_device():
    tree = {
        "column": Sharded(jnp.ones((4, 8)), (None, "fsdp")),
        "both": Sharded(jnp.ones((8, 4)), (("dp", "fsdp"), None)),
        "whole": jnp.ones((4, 4)),
    }
    assert partition_specs(tree, mesh_of(2, 4)) == {"column": P(None, "fsdp"), "both": P(("dp", "fsdp")), "whole": P()}
    # An axis of size 1 splits nothing.
    assert partition_specs(tree, mesh_of(8, 1)) == {"column": P(), "both": P("dp"), "whole": P()}


def test_split_differentiable_separates_float_leaves_and_restores_the_tree():
    tree = {"w": Sharded(jnp.ones((4, 2)), ("fsdp", None)), "step": jnp.int32(3), "key": jax.random.key(0)}
    live, put_back = split_differentiable(tree)
    assert [leaf.names for leaf in live] == [("fsdp", None)]
    back = put_back([live[0].replace_boxed(2 * live[0].value)])
    assert np.array_equal(back["w"].value, 2 * np.ones((4, 2))) and back["step"] == 3 and back["key"] is tree["key"]
    assert put_back(live, fill_other=lambda leaf: None)["key"] is None


def test_unbox_returns_the_same_array_with_unchanged_sharding():
    mesh = mesh_of(2, 4)
    value = jax.device_put(jnp.ones((8, 4)), jax.sharding.NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh):
        assert unbox({"w": Sharded(value, (None, "dp"))})["w"] is value


def test_bytes_per_device_counts_only_the_shard_of_a_device():
    mesh = mesh_of(1, 8)
    split = jax.device_put(jnp.ones((8, 4)), jax.sharding.NamedSharding(mesh, P("fsdp")))
    assert bytes_per_device({"w": Sharded(split, ("fsdp", None)), "b": jnp.ones(3, jnp.bfloat16)}) == 4 * 4 + 3 * 2
