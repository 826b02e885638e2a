"""Tests of the formats of shards by hand: bytes of blocks, columns of lookups, entries of pieces, and their dtypes."""

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from xlstm_jax.distributed.data_parallel.extensions.fp8_products import dequantised, quantised
from xlstm_jax.distributed.data_parallel.trees import l2_norm, sum_of_squares
from xlstm_jax.distributed.data_parallel.wire import lookup, quantized
from xlstm_jax.distributed.data_parallel.wire.blocks import Blocks, InBlocks, matrix_of_parts
from xlstm_jax.distributed.data_parallel.wire.communication import DEFAULT_COMMUNICATION, Communication
from xlstm_jax.distributed.data_parallel.wire.pieces import Pieces

NUMBERS = np.random.default_rng(0)


# --------------------------------------------------------------------------------------------------------------- blocks


def packed_by_numpy(x, format_name):
    """Returns the codes and scales of rows, bytes by bytes, by loops."""
    rows = []
    for row in np.asarray(x, np.float32).reshape(-1, x.shape[-1]):
        block = min(64, row.size)
        padded = np.append(row, np.zeros(-row.size % block, np.float32)).reshape(-1, block)
        largest = np.float32(127 if format_name == "int8" else 448)
        scales = (np.abs(padded).max(1) / largest).astype(ml_dtypes.bfloat16)
        scaled = padded / np.where(scales == 0, 1, scales.astype(np.float32))[:, None]
        codes = np.round(scaled).astype(np.int8) if format_name == "int8" else scaled.astype(ml_dtypes.float8_e4m3fn)
        words = scales.view(np.uint16)
        rows.append(np.concatenate([codes.view(np.uint8).ravel(), words >> 8, words & 255]).astype(np.uint8))
    return np.stack(rows).reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("format_name", ["int8", "float8_e4m3fn"])
def test_packed_bytes_are_those_of_numpy_and_are_unpacked_to_code_times_scale(format_name):
    x = NUMBERS.normal(size=(2, 100)).astype(np.float32) * np.float32([[1], [1e-30]])
    x[0, 64:] = 0

    def both(x):
        packed = quantized.pack(x, format_name)
        return packed, quantized.unpack(packed, format_name, 100, jnp.float32)

    with jax.numpy_dtype_promotion("strict"):
        packed, values = jax.jit(both)(x)
    want = packed_by_numpy(x, format_name)
    np.testing.assert_array_equal(packed, want)
    codes, high, low = np.split(want, [128, 130], -1)
    scales = (high.astype(np.uint32) << 24 | low.astype(np.uint32) << 16).view(np.float32)
    numbers = codes.view(np.int8 if format_name == "int8" else ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(values, (numbers.reshape(2, 2, 64) * scales[..., None]).reshape(2, 128)[:, :100])
    assert values.dtype == np.float32 and packed.dtype == np.uint8


def test_sizes_of_blocks_and_rows_at_the_borders_of_64_values():
    sizes = {0: (0, 64), 1: (1, 1), 63: (1, 63), 64: (1, 64), 65: (2, 64), 128: (2, 64), 129: (3, 64)}
    assert {size: quantized._blocks_of(size) for size in sizes} == sizes
    assert {size: quantized.packed_size(size) for size in (0, 1, 63, 64, 65)} == {0: 0, 1: 3, 63: 65, 64: 66, 65: 132}
    # At most 1/128 of padding: 63 values of 8128 are, and of 8000 are not.
    assert [quantized.fills_blocks(size) for size in (0, 1, 63, 64, 65, 128)] == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]
    assert [quantized.fills_blocks(size) for size in (8064 + 1, 8064 + 2, 63 * 128 + 64)] == [True, True, True]
    assert not quantized.fills_blocks(64 * 100 + 1) and quantized.fills_blocks(64 * 127 + 1)


def test_error_bounds_are_half_the_distance_of_codes_times_the_scale():
    one_ulp = 1 + 2.0**-8
    int8, fp8 = quantized.FORMATS["int8"], quantized.FORMATS["float8_e4m3fn"]
    np.testing.assert_array_equal(int8.error_bound(np.array([-5.0, 0]), 254.0), [one_ulp, one_ulp])
    found = fp8.error_bound(np.array([-64.0, 0.0]), np.float32(448))
    np.testing.assert_array_equal(found, [64 / 8 / 2, one_ulp * 2.0**-9 / 2])
    tenth = int8.error_bound(0.0, np.float64(0.1))
    assert tenth == 0.1 / 127 * one_ulp / 2 and tenth.dtype == np.float64
    assert int8.smallest == 127 * np.finfo(np.float32).tiny


@pytest.mark.parametrize(
    "shape, count, want",
    [
        ((8, 4, 64), 8, (8, 256)),
        ((8, 4, 64), 16, (32, 64)),
        ((8, 4, 64), 64, (64, 32)),
        ((16, 63), 8, (8, 126)),
        ((5,), 4, (4, 2)),
        ((4, 2, 128), 4, (4, 256)),
        ((0, 64), 4, (4, 0)),
    ],
)
def test_matrix_of_parts_has_rows_for_all_devices_and_few_padding(shape, count, want):
    assert matrix_of_parts(shape, count) == want


def test_bytes_of_blocks_are_those_of_a_packed_row_for_each_index():
    int8 = Blocks("int8")
    assert int8.itemsize == 66 / 64 and int8.averages
    wire = int8.wire((4, 64), np.dtype(np.float32), 0)
    assert wire == InBlocks("int8", (4, 64), np.dtype(np.float32), 0) and (wire.along(0), wire.along(1)) == (0, 0)
    shapes = [((4, 64), 0), ((64, 4), 1), ((3, 5), 0), ((2, 3, 64), 1)]
    for shape, dim in shapes:
        sent = jax.eval_shape(int8.wire(shape, np.dtype(np.float32), dim).send, jax.ShapeDtypeStruct(shape, np.float32))
        assert sent.size == int8.nbytes(shape, dim) and sent.dtype == np.uint8
    terms = np.array([1.0, 127.0, 0.5])
    np.testing.assert_allclose(int8.mean_error(terms)[0, :3], 2 * (1 + 2**-8) / 2 * np.ones(3))


def test_fp8_codes_are_bits_of_the_divided_and_clipped_values():
    x, scale = np.float32([[1, -3, 1e6]]), np.float32([2])
    codes = jax.jit(quantised)(x, scale)
    assert codes.dtype == np.uint8
    want = np.clip(x / 2, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(codes, want.view(np.uint8))
    back = jax.jit(dequantised, static_argnums=2)(codes, scale, jnp.bfloat16)
    assert back.dtype == jnp.bfloat16 and back.astype(np.float32).tolist() == [[1, -3, 896]]


# -------------------------------------------------------------------------------------------------------------- lookups

TABLE = lookup.RowLookup((10, 6), (12, 8), 0, ("a",), ("b",), 2, 2, DEFAULT_COMMUNICATION)


def test_columns_of_a_device_are_a_block_of_the_row_or_one_for_each_outer_device():
    assert (TABLE.parts, TABLE.width, TABLE.blocks) == (4, 4, (1, 4))
    by_columns = replace(TABLE, dim=1)
    assert (by_columns.width, by_columns.blocks) == (4, (2, 2))
    assert replace(TABLE, stored=(12, 7)).width == 4  # with padding
    rows, layouts = np.arange(16, dtype=np.float32).reshape(2, 8), (TABLE, by_columns)

    def there_and_back(rows):
        parts = [lookup._in_parts(rows, layout) for layout in layouts]
        back = [lookup._in_one(part, layout) for part, layout in zip(parts, layouts, strict=True)]
        return parts, back, lookup._in_parts(rows[:, :6], TABLE)

    (parts, of_columns), back, padded = jax.tree.map(np.asarray, jax.jit(there_and_back)(rows))
    np.testing.assert_array_equal(parts, [rows[:, :4], rows[:, 4:]])
    np.testing.assert_array_equal(of_columns, [rows[:, [0, 1, 4, 5]], rows[:, [2, 3, 6, 7]]])
    np.testing.assert_array_equal(padded[1], [[4, 5, 0, 0], [12, 13, 0, 0]])
    np.testing.assert_array_equal(back, [rows, rows])


def test_bytes_of_a_lookup_are_columns_rows_and_indices_by_hand():
    # 12 rows of 4 columns from the other half of outer devices; of 3 rows and 8 columns half to the other device of the
    # group; then 5 rows for each of 2 devices, half of them sent, with 4 values and an index each.
    assert TABLE.sent_bytes(5, 2, 4.0, 8.0) == 12 * 4 / 2 * 4 + 3 * 4 * 2 / 2 * 4 + 5 * 2 / 2 * (4 * 8 + 2)
    assert replace(TABLE, dim=1).sent_bytes(5, 2, 4.0, 8.0) == 12 * 4 / 2 * 4 + 5 * 2 / 2 * (4 * 8 + 2)


def test_lookup_by_rows_is_chosen_only_if_it_sends_less_than_a_gather():
    def chosen(tokens, stored=(1024, 512), axes=(("a", 2), ("b", 4)), dim=0):
        sizes = {"tokens": tokens, "index_bytes": 4, "table_bytes": 4.0, "row_bytes": 8.0}
        found = lookup.by_rows(stored, stored, dim, axes, DEFAULT_COMMUNICATION, "path", **sizes)
        return found and (found.outer, found.group, found.outer_count, found.group_count)

    # The columns of a device fill 128 lanes for the group "b" alone: 512 / 4, and not 512 / 8.
    assert chosen(1) == (("a",), ("b",), 2, 4)
    assert chosen(1, (1024, 1024)) == ((), ("a", "b"), 1, 8)
    assert chosen(10**6) is None
    assert chosen(1, (1024, 64)) == (("a",), ("b",), 2, 4)
    # A gather of columns sends 3/4 of 1024 * 512 * 4 bytes; a token 3/4 of 4 rows of 128 columns, and an index.
    equal = 3 / 4 * 1024 * 512 * 4 / (4 * 3 / 4 * (128 * 8 + 4))
    few, many = math.floor(equal), math.ceil(equal)
    assert chosen(few, axes=(("b", 4),), dim=1) and chosen(many, axes=(("b", 4),), dim=1) is None


@pytest.mark.parametrize("dim", [0, 1])
def test_looked_up_rows_and_gradients_are_those_of_the_table_for_narrow_tokens(dim):
    table = np.arange(80_000, dtype=np.float32).reshape(40_000, 2)
    shards = np.stack(np.split(table, 2, dim))
    layout = lookup.RowLookup(table.shape, table.shape, dim, (), ("b",), 1, 2, DEFAULT_COMMUNICATION)
    tokens = np.array([[[39_999, 1]], [[1, 40_000]]], np.uint16)  # of each device; the last is outside of the table

    def on_device(shard, tokens):
        def loss(shard):
            rows = lookup.look_up(shard, tokens, layout)
            return jnp.sum(jnp.where(jnp.isnan(rows), 0, rows) * 3), rows

        return jax.grad(loss, has_aux=True)(shard)

    gradients, rows = jax.jit(jax.vmap(on_device, axis_name="b"))(shards, tokens)
    np.testing.assert_array_equal(rows[0, 0], table[[39_999, 1]])
    np.testing.assert_array_equal(rows[1, 0], [table[1], [np.nan, np.nan]])
    want = np.zeros_like(table)
    want[39_999], want[1] = 3 / 2, 2 * 3 / 2  # a mean over two devices
    np.testing.assert_array_equal(np.concatenate(gradients, dim), want)


# --------------------------------------------------------------------------------------------------------------- pieces


def test_entries_of_a_piece_count_the_parts_of_all_devices_in_32_bits():
    split, alone = Pieces(0, (9, 4), 5, 0, ("b",)), Pieces(0, (9, 4), 9)
    seen = []

    def on_device(x):
        seen.append((split.parts, split.size, Pieces(1, (9, 4), 4, 0, ("b",)).parts))
        places = jnp.int8([3, 0])
        return split.entries(1, 2), split.entries(1, 2, places), alone.entries(3, 2), alone.entries(3, 2, places)

    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(jax.vmap(on_device, axis_name="b"))(np.zeros(2))
    assert seen == [(2, 9, 1)]
    assert [x[0].tolist() for x in found] == [[1, 2, 6, 7], [7, 1], [3, 4], [6, 3]]
    assert {x.dtype for x in found} == {np.dtype(np.int32)}


def test_gradients_of_padding_entries_are_zero_in_32_bits():
    split = Pieces(1, (2, 5), 3, 1, ("b",))
    gradient = np.full((2, 2, 3), np.nan, np.float32)
    gradient[0], gradient[1, :, :2] = 1, 2
    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(jax.vmap(split.without_padding, axis_name="b"))(gradient)
    np.testing.assert_array_equal(found, [np.ones((2, 3)), [[2, 2, 0]] * 2])
    whole, x = Pieces(0, (2, 5), 2), np.full((2, 5), np.nan)
    assert whole.without_padding(x) is x


def test_pieces_gather_and_scatter_a_part_of_each_device():
    split = Pieces(0, (6, 2), 3, 0, ("b",))
    shards = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    found = jax.jit(jax.vmap(lambda x: split.gather_piece(x, 1, 2), axis_name="b"))(shards)
    np.testing.assert_array_equal(found, [shards[:, 1:].reshape(4, 2)] * 2)


# ------------------------------------------------------------------------------------------------------ norms, options


def test_norms_are_of_32_bits_also_of_nothing_and_of_narrow_values():
    shapes = [jax.ShapeDtypeStruct((2, 3), dtype) for dtype in (jnp.bfloat16, np.float32, np.complex64)]
    with jax.numpy_dtype_promotion("strict"):
        squares = [jax.eval_shape(sum_of_squares, x) for x in shapes]
    assert {(x.shape, x.dtype) for x in squares} == {((), np.dtype(np.float32))}
    for some in itertools.chain([[]], ([x] for x in shapes), [shapes]):
        found = jax.eval_shape(l2_norm, some)
        assert (found.shape, found.dtype) == ((), np.float32)


def test_options_that_are_not_given_are_those_of_the_other():
    other = Communication("int8", "bfloat16", of_layers=True)
    assert Communication().filled_from(other) == other
    mine = Communication("bfloat16", of_layers=False).filled_from(other)
    assert (mine.gather_dtype, mine.grad_scatter_dtype, mine.of_layers) == ("bfloat16", "bfloat16", False)
    half, wide = np.ones(2, np.float16), np.ones(2, np.float32)
    assert DEFAULT_COMMUNICATION.dtypes(half) == (np.float16, np.float32)
    assert other.dtypes(wide) == (np.float32, jnp.bfloat16) and other.format_of(wide) == other.sent_as(wide) == "int8"
    assert Communication("bfloat16").sent_as(wide) == "bfloat16" and DEFAULT_COMMUNICATION.sent_as(half) == "float16"
    assert DEFAULT_COMMUNICATION.format_of(wide) is None and DEFAULT_COMMUNICATION.copied_axes == ()
