"""Tests of batch layouts: by the specs, with and without devices; specs that the data or the mesh lack raise."""

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import assert_each_leaf
from xlstm_jax.distributed import DeviceMeshManager, abstract_batch, create_train_state, make_train_step, shard_batch
from xlstm_jax.distributed.device_mesh import batches
from xlstm_jax.distributed.device_mesh.batch_layout import batch_layout
from xlstm_jax.distributed.device_mesh.batch_leaves import check_values, with_copies
from xlstm_jax.distributed.device_mesh.zigzag import from_zigzag, to_zigzag
from xlstm_jax.distributed.model_parallel import context_positions

ROWS = ("dp", "fsdp")
BATCH = {"tokens": np.arange(64).reshape(4, 16), "label": np.arange(4), "scale": np.float32(2)}
SPEC = {"tokens": P(ROWS, "cp"), "label": P(ROWS), "scale": P()}


@pytest.fixture(scope="module")
def mesh():
    return DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 2, "cp": 2})


def test_shard_batch_with_batch_spec_puts_the_right_slice_on_each_device(mesh):
    got = shard_batch(BATCH, mesh, batch_spec=SPEC)
    assert_each_leaf(np.testing.assert_array_equal, got, BATCH)
    of_device = {shard.device: np.asarray(shard.data) for shard in got["tokens"].addressable_shards}
    for (dp, fsdp, cp), device in np.ndenumerate(mesh.devices):
        row = 2 * dp + fsdp
        np.testing.assert_array_equal(of_device[device], BATCH["tokens"][row : row + 1, 8 * cp : 8 * cp + 8])
    abstract = abstract_batch(BATCH, mesh, batch_spec=SPEC)
    assert jax.tree.map(lambda x: x.sharding, abstract) == jax.tree.map(lambda x: x.sharding, got)


def test_layout_part_by_index_equals_the_slice_of_each_device(mesh):
    """``layout.part`` returns the part of each device by number, so that one device can compute every part."""
    layout = batch_layout(mesh, None, SPEC)
    assert layout.axes == ("dp", "fsdp", "cp") and layout.row_axes == ROWS
    own = lambda batch: jax.tree.map(lambda x: x[None] if x.ndim else x, batch)  # noqa: E731
    specs = SPEC | {"tokens": P(layout.axes), "label": P(layout.axes)}
    stacked = jax.shard_map(
        own, mesh=mesh, in_specs=(layout.specs(BATCH, spread=True),), out_specs=specs, check_vma=False
    )(BATCH)
    for device in range(8):
        part = layout.part(BATCH, jnp.int32(device))
        assert_each_leaf(
            np.testing.assert_array_equal, part, {k: x[device] if x.ndim else x for k, x in stacked.items()}
        )


def test_layout_part_of_a_device_has_its_rows_and_columns():
    """Device 7 of dp=2, fsdp=2, cp=2 has the last row and the second half of the sequence; device 4 the third row."""
    layout = batch_layout(DeviceMeshManager.create_abstract_mesh({"dp": 2, "fsdp": 2, "cp": 2}), None, P(ROWS, "cp"))
    part = jax.jit(layout.part)
    tokens = np.arange(16, dtype=np.int32).reshape(4, 4)
    assert [part(tokens, np.int32(device)).tolist() for device in (4, 7)] == [[[8, 9]], [[14, 15]]]


def test_batch_layout_omits_axes_of_size_1_from_in_specs():
    mesh = DeviceMeshManager.create_device_mesh({"dp": 1, "fsdp": 4, "cp": 2})
    layout = batch_layout(mesh, None, P(ROWS, "cp"))
    assert layout.specs(BATCH["tokens"], spread=True) == P("fsdp", "cp")
    assert layout.specs(BATCH["tokens"]) == P(ROWS, "cp")  # as written, for shardings of arrays
    assert batch_layout(mesh, ROWS).specs({"x": BATCH["tokens"], "n": 1}, spread=True) == {"x": P(("fsdp",)), "n": P()}


def test_layout_names_the_axes_of_sequences_and_rows_without_axes_of_size_1(mesh):
    found = batch_layout(mesh, None, SPEC).sequence
    assert (found.axes, found.row_axes) == (("cp",), ROWS)
    small = DeviceMeshManager.create_abstract_mesh({"dp": 1, "fsdp": 8, "cp": 1})
    found = batch_layout(small, None, SPEC).sequence
    assert (found.axes, found.row_axes) == ((), ("fsdp",))


def test_gradients_are_averaged_over_the_axes_of_rows_and_of_sequences():
    abstract = DeviceMeshManager.create_abstract_mesh({"dp": 2, "fsdp": 2, "cp": 2})
    layout = batch_layout(abstract, None, SPEC)
    assert (layout.axes, layout.row_axes) == (("dp", "fsdp", "cp"), ROWS)


def test_layout_finds_leaves_whose_tokens_are_split_otherwise(mesh):
    layout, names = batch_layout(mesh, None, SPEC), ("label", "scale", "tokens")  # in the order of the leaves
    placed = {"label": P(ROWS), "scale": P(), "tokens": P(ROWS, "cp")}

    def misplaced(**specs):
        shardings = [NamedSharding(mesh, (placed | specs)[name]) for name in names]
        return [(path, axes) for path, _, axes in layout.misplaced(BATCH, shardings)]

    assert misplaced() == misplaced(tokens=P("dp")) == []  # rows are moved with the batch
    assert misplaced(tokens=P(None, "fsdp")) == [("tokens", ("fsdp",))]
    assert [*layout.misplaced(BATCH, [None, None, None])] == []


@pytest.mark.parametrize("length, fits", [(6, False), (8, True)])
def test_zigzag_tokens_divide_into_two_chunks_for_each_device(mesh, length, fits):
    layout = batch_layout(mesh, None, P(ROWS, "cp"), "zigzag")
    if fits:
        assert layout.of_batch(np.ones((4, length))).sequence.layout == "zigzag"
    else:
        with pytest.raises(ValueError, match="6 tokens do not divide into the 4 chunks"):
            layout.of_batch(np.ones((4, length)))


def test_shard_batch_pads_rows_but_not_tokens(mesh):
    rows = {"tokens": BATCH["tokens"][:3]}
    batch, weight = shard_batch(rows, mesh, batch_spec=P(ROWS, "cp"), pad=True)
    assert batch["tokens"].shape == (4, 16) and weight.tolist() == [1, 1, 1, 0] and weight.sharding.spec == P(ROWS)


def test_zigzag_layout_of_a_batch_gives_matching_context_positions_in_shard_map(mesh):
    """Inside ``shard_map`` each token is at the position that layers read; leaves in natural order are exchanged."""
    natural = np.tile(np.arange(16), (4, 1))
    batch, layout = to_zigzag({"x": natural}, 2) | {"natural": natural}, batch_layout(mesh, None, P(ROWS, "cp"))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(layout.specs(batch, spread=True),), out_specs=P(ROWS, "cp"))
    def as_layers_see_it(batch):
        with layout.of_batch(batch).entered(batch) as tokens:
            return tokens | {"positions": context_positions(8, "cp") + 0 * tokens["natural"]}

    seen = jax.device_get(as_layers_see_it(batch))
    assert seen["x"][0].tolist() == [*range(4), *range(12, 16), *range(4, 12)]
    assert seen["positions"].tolist() == seen["natural"].tolist() == seen["x"].tolist()
    assert layout.of_batch({"x": natural}).tokens == "contiguous"  # guard


def test_to_zigzag_and_from_zigzag_round_trip_a_global_batch():
    """``to_zigzag`` and ``from_zigzag`` keep scalars and per-row numbers."""
    batch = BATCH | {"weights": np.ones((4, 16)), "positions": np.tile(np.arange(16), (4, 1)), "x": np.ones((4, 16, 3))}
    there = to_zigzag(batch, 2)
    assert there["positions"].value[0].tolist() == [*range(4), *range(12, 16), *range(4, 12)]
    assert there["label"] is batch["label"] and there["scale"] is batch["scale"]
    assert_each_leaf(np.testing.assert_array_equal, from_zigzag(there, 2), batch)
    with pytest.raises(
        ValueError, match=r"batch\['image'\] of shape \(4, 8, 8\) has 8 entries along dim 1, .* 16 tokens"
    ):
        to_zigzag({"a": BATCH["tokens"], "image": np.ones((4, 8, 8))}, 2)
    with pytest.raises(ValueError, match="no leaf of the batch has a dim 1, of tokens"):
        to_zigzag({"label": BATCH["label"]}, 2)


def test_from_zigzag_needs_the_devices_of_to_zigzag_and_both_count_dims_from_the_end():
    tokens = {"tokens": BATCH["tokens"], "label": BATCH["label"]}
    ordered = to_zigzag(tokens, 2)
    for devices in (1, 4):
        with pytest.raises(ValueError, match=rf"from_zigzag\(batch, {devices}\): .* is laid out for 2 devices"):
            from_zigzag(ordered, devices)
    by_last = to_zigzag({"tokens": BATCH["tokens"]}, 2, dim=-1)
    np.testing.assert_array_equal(by_last["tokens"].value, ordered["tokens"].value)
    np.testing.assert_array_equal(from_zigzag(by_last, 2, dim=-1)["tokens"], BATCH["tokens"])


NO_SPEC = "a PartitionSpec of names of axes and None is needed"


def test_train_step_raises_for_a_batch_placed_against_the_batch_spec(mesh):
    state = create_train_state(Scale(), optax.sgd(0.1), mesh, jax.random.key(0), batch_axes=ROWS, allow_replicated=True)
    loss_fn = lambda params, apply_fn, batch, rng: (params["w"] * batch["tokens"]).mean()  # noqa: E731
    step = make_train_step(loss_fn, mesh, batch_spec=SPEC, allow_replicated=True)
    placed = jax.device_put(BATCH["tokens"], NamedSharding(mesh, P("dp", "fsdp")))
    with pytest.raises(ValueError, match=r"batch\['tokens'\] of shape \(4, 16\) is placed as .* over \('fsdp',\)"):
        step(state, BATCH | {"tokens": placed}, jax.random.key(0))
    with pytest.raises(ValueError, match=r"batch\['tokens'\] .* the 2 devices over \('cp',\) do not divide dim 1"):
        step(state, BATCH | {"tokens": BATCH["tokens"][:, :15]}, jax.random.key(0))
    loss = step(state, shard_batch(BATCH, mesh, batch_spec=SPEC), jax.random.key(0))[1]["loss"]
    np.testing.assert_allclose(loss, 2 * BATCH["tokens"].mean())


class Scale:
    """Model with the parameter 2."""

    def init(self, rng):
        del rng
        return {"params": {"w": jnp.float32(2)}}

    def apply(self, variables):
        return variables["params"]["w"]


def test_rows_that_pad_an_empty_batch_are_those_of_an_earlier_batch_whose_memory_is_used_again():
    x, y = np.arange(1.0, 7).reshape(3, 2), np.arange(3, dtype=np.int8)
    padded = with_copies({"x": x, "y": y, "n": 5}, rows=3, padded=8)
    assert padded["y"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1] and padded["n"] == 5
    x[:] = 9
    empty = with_copies({"x": x[:0], "y": y[:0], "n": 6}, rows=0, padded=2)
    assert (empty["x"].tolist(), empty["y"].tolist(), empty["n"]) == ([[1, 2], [1, 2]], [0, 0], 6)
    for other in ({"x": x[:0], "y": y[:0].astype(np.int16), "n": 6}, {"x": x[:0, :1], "y": y[:0], "n": 6}):
        with pytest.raises(ValueError, match="hands in 0 rows"):
            with_copies(other, rows=0, padded=2)


@pytest.mark.parametrize(
    "rows, pad, expected", [(0, True, 4), (5, True, 8), (8, True, 8), (8, False, 8), (5, 8, 8), (4, 4, 4), (0, 4, 4)]
)
def test_rows_are_padded_to_a_multiple_of_the_shards_and_at_least_to_one_of_each(rows, pad, expected):
    assert batches._padded_rows(rows, 4, pad, ("dp",)) == expected


@pytest.mark.parametrize(
    "rows, pad, match",
    [
        (0, False, r"Hand in 4 rows, or pass pad=True"),
        (3, False, r"Hand in 4 rows"),
        (9, False, r"4 does not divide the 9 rows.*Hand in 8 or 12 rows"),
        (5, 4, "pad=4 rows for 5 rows .* at least as many, and a multiple of 4"),
        (5, 6, "pad=6 rows for 5"),
        (0, 0, "pad=0 rows for 0"),
    ],
)
def test_rows_or_padding_that_do_not_fit_the_shards_raise(rows, pad, match):
    with pytest.raises(ValueError, match=match):
        batches._padded_rows(rows, 4, pad, ("dp",))


@pytest.mark.parametrize("number, fits", [(2**31 - 1, True), (-(2**31), True), (2**31, False), (-(2**31) - 1, False)])
def test_whole_numbers_of_a_batch_are_those_of_32_bits(number, fits):
    if fits:
        check_values({"n": number})
    else:
        with pytest.raises(ValueError, match=rf"batch\['n'\] is {number}, which int32 does not hold"):
            check_values({"n": number})


def test_padded_batch_counts_as_padded_until_it_is_deleted(monkeypatch):
    monkeypatch.setattr(batches, "_padded", [])
    mesh = DeviceMeshManager.create_device_mesh({"dp": 2}, devices=jax.devices()[:2])
    whole, weight = shard_batch({"x": np.ones((4, 1))}, mesh, "dp", pad=True)
    assert not batches.any_padded() and weight.tolist() == [1, 1, 1, 1]  # no row was needed
    first, weight = shard_batch({"x": np.ones((3, 1)), "n": 1}, mesh, "dp", pad=True)
    second, _ = shard_batch({"x": np.ones((1, 1))}, mesh, "dp", pad=True)
    assert (weight.tolist(), weight.dtype) == ([1, 1, 1, 0], np.float32)
    found = [batches.padded_rows_of(leaf) for leaf in (first["x"], second["x"], first["n"], whole["x"], weight)]
    assert found == [(3, 4), (1, 2), None, None, None]
    del first
    assert batches.any_padded()
    del second
    assert not batches.any_padded()


# ----------------------------------------------------------------------- several processes, in the place of one of them


class Device(NamedTuple):
    id: int
    process_index: int


@pytest.mark.parametrize(
    "held, raises",
    [
        ({0: (0, 1), 1: (2, 3)}, False),
        ({0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, False),  # a model axis crosses hosts
        ({0: (0, 1, 2), 1: (3,)}, True),
        ({0: (0, 1), 1: (1, 2), 2: (2, 3)}, True),  # some in common
    ],
    ids=["apart", "copies", "uneven", "overlap"],
)
def test_processes_hold_equal_sets_of_shards_or_sets_apart(mesh, monkeypatch, held, raises):
    places = [(process, shard) for process, shards in held.items() for shard in shards]
    found = {Device(i, process): (slice(shard or None, shard + 1),) for i, (process, shard) in enumerate(places)}
    monkeypatch.setattr(batches, "NamedSharding", lambda *_: SimpleNamespace(devices_indices_map=lambda _: found))
    shards_of = partial(batches._shards_of_processes.__wrapped__, mesh, ROWS)  # ROWS split a batch into 4 shards
    if raises:
        with pytest.raises(
            ValueError, match=r"of the 4 shards of a batch over .* no number of rows for each process fits"
        ):
            shards_of()
    else:
        assert shards_of() == {process: frozenset(shards) for process, shards in held.items()}


class Compared(Exception):  # noqa: N818
    """Raised in the place of a comparison with other processes."""


@pytest.mark.parametrize("processes, compares", [(1, False), (2, True), (4, True)])
def test_shard_batch_compares_the_batch_with_any_other_process_before_it_makes_arrays(
    mesh, monkeypatch, processes, compares
):
    shards = np.split(np.arange(4), processes)  # ROWS split a batch into 4 shards
    monkeypatch.setattr(batches, "_shards_of_processes", lambda *_: dict(enumerate(map(set, shards))))

    def compare(batch, rows, *_):
        raise Compared(rows)

    monkeypatch.setattr(batches, "_agree_on_batch", compare)
    if compares:
        monkeypatch.setattr(jax, "make_array_from_process_local_data", None)
        with pytest.raises(Compared, match=r"^4$"):
            shard_batch({"x": np.ones((4, 3))}, mesh, ROWS)
    else:
        assert shard_batch({"x": np.ones((4, 3))}, mesh, ROWS)["x"].shape == (4, 3)


@pytest.fixture
def agreed(mesh, monkeypatch):
    """Returns a function that agrees on a batch as process 1 of 4: returns what is compared, with which processes."""
    shards = {0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}}
    monkeypatch.setattr(batches, "_shards_of_processes", lambda *_: shards)
    monkeypatch.setattr(batches, "_batches_seen", {})
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)

    def agree(batch, rows, failure=None):
        compared = []

        def compare(entries, subject, me, processes, timeout_s):
            compared.append((entries, list(processes)))
            assert (me, timeout_s) == (1, 7.0)
            if failure:
                raise failure

        monkeypatch.setattr(batches, "compare", compare)
        batches._agree_on_batch(batch, rows, mesh, batch_layout(mesh, ROWS), 7.0)
        return compared

    return agree


def test_processes_compare_shapes_and_scalars_of_a_new_batch_and_rows_with_those_of_the_same_shards(agreed):
    batch = {"x": np.ones((4, 3), np.float32), "lr": np.float32(0.5)}
    (of_all, every), (of_rows, sharing) = agreed(batch, 4)
    assert every == [0, 1, 2, 3] and sharing == [0, 1]
    assert of_all["rows for each process"] == "4" and of_all["x"] == "float32 ['rows', 3]"
    assert of_all["lr"].startswith("float32[] (0.5)") and "x" in of_rows


def test_processes_compare_a_known_batch_again_only_after_a_failure_or_with_other_rows(agreed):
    batch = {"x": np.ones((4, 3), np.float32)}
    with pytest.raises(ValueError, match="differ"):
        agreed(batch, 4, ValueError("differ"))
    assert [len(agreed(batch, rows)) for rows in (4, 4, 8, 8, 4)] == [2, 0, 2, 0, 2]
