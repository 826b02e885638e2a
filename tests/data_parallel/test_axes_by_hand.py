"""Tests of the choice of axes by hand: what splits, is gathered, kept, summed and balanced, on meshes of four axes."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from xlstm_jax.distributed.data_parallel import link_balance
from xlstm_jax.distributed.data_parallel.extensions.masked_statistics import unmasked_statistics
from xlstm_jax.distributed.data_parallel.leaf import (
    Sharded,
    _axes_of_equal_reads,
    leaf_of,
    rebox,
    shard_to_gather,
    split_by_model,
)
from xlstm_jax.distributed.data_parallel.modules.unit import split_over
from xlstm_jax.distributed.data_parallel.planned import Decision, PlannedLeaf, planning_mesh
from xlstm_jax.distributed.data_parallel.policy import ShardChoice, choose_shard_dim
from xlstm_jax.distributed.data_parallel.wire.communication import set_context
from xlstm_jax.distributed.data_parallel.wire.partial_gather import partial_stages
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS, RunningLoss
from xlstm_jax.distributed.device_mesh import batch_layout as layouts
from xlstm_jax.distributed.device_mesh.batch_layout import batch_layout
from xlstm_jax.distributed.device_mesh.batch_leaves import with_copies
from xlstm_jax.distributed.model_parallel.dense import last_dims
from xlstm_jax.distributed.model_parallel.experts import Experts
from xlstm_jax.explicit_axes import splits_over_both_types, unsplit_over

SIZES = {"dp": 2, "fsdp": 3, "tp": 4, "one": 1}
MESH = AbstractMesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 4)
SPLIT = Sharded(np.zeros((4, 6)), (("tp", "dp"), "fsdp"), model_axes=("tp",))


def in_mesh(fn, check_vma=False):
    """Calls ``fn()`` inside a ``shard_map`` over ``MESH`` that is traced, and returns what ``fn`` has returned."""
    found = []

    def local(x):
        found.append(fn())
        return x

    jax.eval_shape(jax.shard_map(local, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=check_vma), np.zeros(2))
    return found[0]


# --------------------------------------------------------------------------------------------------------------- leaves


def test_axes_of_a_leaf_are_in_the_order_of_dims_and_gathered_without_those_of_the_model():
    assert (SPLIT.axes, SPLIT.gathered_axes) == (("tp", "dp", "fsdp"), ("dp", "fsdp"))
    assert replace(SPLIT, model_axes=()).gathered_axes == SPLIT.axes
    assert Sharded(np.zeros(2), (None,)).axes == Sharded(np.zeros(2), (None,)).gathered_axes == ()
    assert in_mesh(lambda: split_over(replace(SPLIT, names=("one", "fsdp")), ("one", "fsdp", "tp"))) == ("fsdp",)


def test_boxes_of_flax_have_the_axes_of_the_model_that_the_loss_lists():
    box = nn.Partitioned(np.zeros((4, 6)), (("dp", "tp"), "fsdp"))
    assert leaf_of(box).model_axes == () and leaf_of(box).names == (("dp", "tp"), "fsdp")
    with set_context(RUNNING_LOSS, RunningLoss(model_axes=frozenset({"tp", "fsdp", "ep"}))):
        assert leaf_of(box).model_axes == ("tp", "fsdp")
    assert leaf_of(replace(SPLIT, names=("fsdp",))).names == ("fsdp", None)
    surplus = leaf_of(replace(SPLIT, names=("tp", None, "fsdp")))
    assert (surplus.names, surplus.model_axes) == (("tp", None), ("tp",))
    assert leaf_of(np.zeros((2, 3))).names == (None, None) and leaf_of(5).names == ()
    assert split_by_model(box).model_axes == ("dp", "tp", "fsdp")
    assert split_by_model(box, {"dp", "fsdp"}).model_axes == ("tp",)
    assert split_by_model(SPLIT) is SPLIT and split_by_model(SPLIT, {"tp"}).model_axes == ()
    bare, unsplit = np.zeros(2), nn.Partitioned(np.zeros(2), (None,))
    assert split_by_model(bare) is bare and split_by_model(unsplit) is unsplit
    assert rebox(bare, 3) == 3 and rebox(box, 3).names == box.names


def test_gradient_of_a_gather_over_axes_of_the_model_is_summed_over_those_of_the_batch():
    def factor(axes, batch_axes):
        def gradient():
            with set_context(RUNNING_LOSS, RunningLoss(axes=batch_axes)):
                _, back = jax.vjp(lambda x: shard_to_gather(replace(SPLIT, value=x), axes, "w"), jnp.ones((4, 6)))
                return back(jnp.ones((4, 6)))[0]

        return in_mesh(lambda: str(jax.make_jaxpr(lambda: gradient())()))

    assert "4.0" in factor(("tp", "dp"), ("tp", "dp")) and "8.0" not in factor(("tp", "dp"), ("tp", "dp"))
    assert "4.0" not in factor(("tp", "dp"), ("dp",))
    assert "4.0" not in factor(("dp", "fsdp"), ("tp", "dp"))  # no axis of the model is gathered
    with pytest.raises(ValueError, match="the model itself splits 'w' over"):
        factor(("tp",), ())


def test_axes_of_equal_reads_are_gathered_in_no_batch_and_varying():
    leaf = replace(SPLIT, names=(("tp", "dp"), ("fsdp", "one")))

    def equal(axes, batch_axes):
        def within():
            x = jax.lax.pcast(jnp.zeros(()), ("dp", "tp", "fsdp"), to="varying")
            with set_context(RUNNING_LOSS, RunningLoss(axes=batch_axes)):
                return _axes_of_equal_reads(leaf, x, axes)

        return in_mesh(within, check_vma=True)

    assert equal(("dp", "fsdp", "tp", "one"), ("tp",)) == ("dp", "fsdp")
    assert equal(("dp", "fsdp"), ("fsdp",)) == ("dp",) and equal(("fsdp",), ("tp",)) == ("fsdp",)
    assert equal(("dp", "fsdp"), ()) == () and equal((), ("tp",)) == ()


@pytest.mark.parametrize(
    "axes, want",
    [
        ({"c"}, ([("c",)], (), ("a", "b"))),
        ({"b", "c"}, ([("b", "c")], (), "a")),
        ({"a", "b", "c"}, ([("a", "b", "c")], (), None)),
        ({"b"}, ([("c",), ("b",)], ("c",), ("a", "c"))),
        ({"a", "c"}, ([("c",), ("b",), ("a",)], ("b",), "b")),
        ({"a"}, ([("c",), ("b",), ("a",)], ("b", "c"), ("b", "c"))),
    ],
)
def test_stages_of_a_gather_over_some_axes_of_a_dim(axes, want):
    assert partial_stages(("a", "b", "c"), axes) == want


def test_planned_leaf_is_gathered_by_its_own_wrapper_or_if_all_of_its_axes_are():
    def planned(names, *decided):
        decisions = tuple(Decision(axes, ShardChoice(dim, None), (4, 6), names, "", "") for axes, dim in decided)
        return PlannedLeaf(np.zeros((4, 6)), names, decisions=decisions, box_type=Sharded)

    leaf = planned((("tp", "fsdp"), "dp"), (("fsdp",), 0))
    assert leaf.gathered(("fsdp",)).names == ("tp", "dp") and leaf.gathered(("fsdp",)).box_type is Sharded
    assert leaf.gathered(("dp",)) is leaf and planned(("tp", "fsdp"), (("fsdp",), None)).gathered(("fsdp",)).axes != ()
    whole = leaf.gathered(("dp", "fsdp", "tp"))
    assert whole.names == (None, None) and whole.box_type is None
    mesh = planning_mesh({"a": 2, "b": 3})
    assert (
        dict(mesh.shape) == {"a": 2, "b": 3}
        and mesh.axis_names == ("a", "b")
        and mesh != AbstractMesh((2, 3), ("a", "b"))
    )


@pytest.mark.parametrize(
    "shape, names, least, uneven, dim",
    [
        ((12, 12), (None, None), 144, "replicate", 1),
        ((12, 12), (None, None), 145, "replicate", None),
        ((18, 12), (None, None), 0, "replicate", 0),
        ((18, 12), ("tp", None), 0, "replicate", 1),
        ((18, 12), ("tp", "other"), 0, "replicate", None),
        ((18, 12), ("fsdp", None), 0, "replicate", None),
        ((18, 12), (("tp", "dp"), None), 0, "replicate", None),
        ((0, 12), (None, None), 0, "replicate", None),
        ((7, 5), (None, None), 0, "replicate", None),
        ((7, 5), (None, None), 0, "pad", 0),
        ((7, 7), (None, None), 0, "pad", 1),
        ((7, 7), (None, "tp"), 0, "pad", 0),
        ((), (), 0, "pad", None),
    ],
)
def test_dim_to_split_is_the_largest_that_is_free_and_divides(shape, names, least, uneven, dim):
    assert choose_shard_dim(shape, names, {"dp": 2, "fsdp": 3}, least, uneven).dim == dim


# -------------------------------------------------------------------------------------------------------------- balance


def test_traffic_of_a_leaf_shrinks_from_the_outermost_axis_inwards():
    assert link_balance._traffic(24.0, ("a", "b", "c"), {"a": 2, "b": 3, "c": 4}) == {"a": 12, "b": 8, "c": 3}
    assert link_balance._traffic(24.0, (), {}) == {}


def test_orders_rotate_the_outermost_axis_and_keep_slow_axes_inside():
    sizes = {"a": 2, "b": 2, "slow": 2}
    orders = [("a", "b"), ("a", "b"), ("slow", "a", "b"), ("a",)]
    found = link_balance.balanced_orders([8.0, 16.0, 4.0, 1.0], orders, sizes, {"slow"})
    # The largest keeps its order (a: 8, b: 4); then b outermost (a: 8 + 2, b: 4 + 4); then b again (a: 11, b: 10).
    assert found == [("b", "a"), ("a", "b"), ("b", "a", "slow"), ("a",)]
    assert link_balance.balanced_orders([1.0], [("a",)], sizes) == [("a",)]
    many = tuple("abcdefg")
    found = link_balance.balanced_orders([64.0, 8.0], [many, many], dict.fromkeys(many, 2))
    assert found[0] == many and found[1][0] != "a" and sorted(found[1]) == list(many)


def test_first_dim_over_two_spread_axes_is_reorderable_in_the_order_of_the_mesh():
    sizes = {"dp": 2, "fsdp": 3, "one": 1, "tp": 4}
    of = lambda names, model=(): link_balance._reorderable(Sharded(np.zeros((4, 6)), names, model_axes=model), sizes)  # noqa: E731
    assert of((("fsdp", "dp"), "tp")) == (0, ("dp", "fsdp")) and of(("tp", ("fsdp", "dp"))) == (1, ("dp", "fsdp"))
    assert of((("fsdp", "one"), "tp")) == (0, ()) and of((("fsdp", "tp"), None), ("tp",)) == (0, ())
    assert of((("fsdp", "one", "dp"), None)) == (0, ("dp", "fsdp", "one")) and of(("x", ("x", "dp"))) == (0, ())


# ---------------------------------------------------------------------------------------------------------------- batch


def test_layout_of_a_spec_has_axes_in_order_rows_and_spread_tokens():
    by_axes = batch_layout(MESH, ("dp", "one"))
    assert (by_axes.axes, by_axes.row_axes, by_axes.spec) == (("dp", "one"), ("dp", "one"), P(("dp", "one")))
    assert (by_axes.sequence.axes, by_axes.sequence.row_axes) == ((), ("dp",))
    spec = {"tokens": P(("fsdp", "one"), None, ("tp", "dp")), "label": P(("fsdp", "one"))}
    layout = batch_layout(MESH, None, spec)
    assert (layout.axes, layout.row_axes) == (("fsdp", "one", "tp", "dp"), ("fsdp", "one"))
    assert (layout.sequence.axes, layout.sequence.row_axes) == (("tp", "dp"), ("fsdp",)) and layout.spec is spec
    batch = {"tokens": np.zeros((3, 5, 8)), "label": np.zeros(3)}
    assert layout.specs(batch) == spec
    assert layout.specs(batch, spread=True) == {"tokens": P("fsdp", None, ("tp", "dp")), "label": P("fsdp")}
    assert layout._token_dims(batch) == [None, 2]
    with pytest.raises(ValueError, match=r"the 8 devices over .* do not divide dim 2 of size 12"):
        layout.specs({"tokens": np.zeros((3, 5, 12)), "label": np.zeros(3)})


@pytest.mark.parametrize(
    "axes, spec, message",
    [
        (None, None, "pass one of them"),
        ("dp", P("dp"), "pass one of them"),
        (P("dp"), None, "pass one of them"),
        (None, P(), "splits nothing"),
        (None, P("dp", "other"), "the mesh has no axis 'other'"),
        (None, P("dp", ("tp", "dp")), "names the axis 'dp' twice"),
        (None, {"a": P("dp"), "b": P("tp")}, r"over \('dp',\) at 'a' and over \('tp',\) at\s+'b'"),
        (("dp", "other"), None, "batch_axes=.*: the mesh has no axis 'other'"),
    ],
)
def test_layout_raises_for_axes_and_specs_that_name_no_split(axes, spec, message):
    with pytest.raises(ValueError, match=message):
        batch_layout(MESH, axes, spec)


def test_parts_of_a_batch_are_cut_in_row_major_order_of_the_axes():
    layout = batch_layout(MESH, None, P("dp", ("tp", "fsdp")))
    batch = {"x": np.arange(2 * 12 * 2).reshape(2, 12, 2), "scalar": np.float32(3)}
    for device in range(24):
        dp, rest = divmod(device, 12)
        part = layout.part(batch, device)
        np.testing.assert_array_equal(part["x"], batch["x"][dp : dp + 1, rest : rest + 1])
        assert part["scalar"] == 3
    assert layouts.num_shards(MESH, ("dp", "tp")) == 8 and layouts.num_shards(MESH, ()) == 1
    assert layouts._columns(P("dp", ("tp", "one"), None, "one"), MESH) == {1: ("tp",)}
    assert layouts._columns(P("dp", P.UNCONSTRAINED), MESH) == {}


def test_rows_that_pad_repeat_in_turn_or_are_copies_of_an_earlier_row():
    batch = {"x": np.arange(6).reshape(3, 2), "scalar": 5}
    padded = with_copies(batch, 3, 8)
    assert padded["x"][:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0, 2] and padded["scalar"] == 5
    empty = with_copies({"x": np.zeros((0, 2), np.int64), "scalar": 5}, 0, 2)
    assert empty["x"].tolist() == [[0, 1], [0, 1]] and empty["scalar"] == 5


# ---------------------------------------------------------------------------------------------- layers, explicit axes


@pytest.mark.parametrize("axis, count", [(-1, 1), (2, 1), ((-2, -1), 2), ((1, 2), 2), ([0, 1, 2], 3)])
def test_layer_contracts_the_last_dims_in_their_order(axis, count):
    assert last_dims(axis, np.zeros((2, 3, 4)), "f") == count
    for wrong in (0, (-1, -2), (0, 2), (0, 1)):
        with pytest.raises(ValueError, match=r"f: axis=.* are not the last dims"):
            last_dims(wrong, np.zeros((2, 3, 4)), "f")


def test_tokens_differ_along_the_named_axes_or_those_of_their_type():
    def axes(batch_axes, check_vma, of_step=()):
        def within():
            x = jnp.zeros((2, 3))
            x = jax.lax.pcast(x, ("dp", "fsdp"), to="varying") if check_vma else x
            with set_context(RUNNING_LOSS, RunningLoss(axes=of_step)):
                return Experts._token_axes(SimpleNamespace(batch_axes=batch_axes), x, ("tp", "fsdp", "dp"))

        return in_mesh(within, check_vma)

    assert axes(None, True) == axes(("dp", "fsdp"), True) == ("fsdp", "dp")
    assert axes("tp", False) == ("tp",) and axes(None, False, ("dp", "one")) == ("dp",)
    assert axes(None, False) == ("tp", "fsdp", "dp")
    with pytest.raises(ValueError, match="tokens differ along 'dp'"):
        axes(("fsdp",), True)
    with pytest.raises(ValueError, match="tokens are the same along 'tp'"):
        axes(("dp", "fsdp", "tp"), True)


@pytest.mark.parametrize("fast", [True, False])
def test_statistics_of_unmasked_rows_are_over_devices_and_all_dims_but_features(fast):
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 2)).astype(np.float32)
    mask = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], bool)[..., None, None]
    norm = SimpleNamespace(axis=-1, axis_name="b", use_fast_variance=fast)
    run = jax.vmap(lambda x, mask: unmasked_statistics(x, mask, norm), axis_name="b")
    mean, var = jax.jit(run)(x, mask)
    rows = x[mask[..., 0, 0]].reshape(-1, 2)
    np.testing.assert_allclose(mean.reshape(3, 2), np.tile(rows.mean(0), (3, 1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(var.reshape(3, 2), np.tile(rows.var(0), (3, 1)), rtol=1e-5)
    assert mean.shape == var.shape == (3, 1, 1, 2)


def test_arrays_are_unsplit_over_the_named_axes_alone():
    mesh = jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        assert splits_over_both_types([("dp", "fsdp")]) and not splits_over_both_types(["dp", "fsdp", None])
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):

        def specs(x):
            split = jax.sharding.reshard(x, P(("a", "b"), "c"))
            assert unsplit_over(split, ["other"]) is split
            return [jax.typeof(unsplit_over(split, axes)).sharding.spec for axes in (["a"], ["b", "c"], ["c"])]

        found = []
        jax.eval_shape(lambda x: found.extend(specs(x)), np.zeros((8, 8)))
        assert found == [P("b", "c"), P("a", None), P(("a", "b"), None)]
    plain = np.zeros(2)
    assert unsplit_over(plain, ["a"]) is plain
