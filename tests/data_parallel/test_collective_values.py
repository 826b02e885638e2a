"""Tests of collectives by their values on 2 x 3 devices, which ``vmap`` with names of axes simulates on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from tests.support import equations
from xlstm_jax.distributed.data_parallel.wire import collectives

A, B = 2, 3  # devices along "a" and "b"; "one" is an axis of a single device
DEVICES = list(np.ndindex(A, B))


def on_devices(fn, *values):
    """Calls ``fn`` on each device with its entry [a, b] of ``values``; returns the results, [a, b, ...]."""
    for axis in ("one", "b", "a"):
        fn = jax.vmap(fn, axis_name=axis)
    return jax.tree.map(lambda x: np.asarray(x)[:, :, 0], jax.jit(fn)(*(np.asarray(x)[:, :, None] for x in values)))


def numbers(*shape, dtype=np.float32):
    return np.arange(A * B * int(np.prod(shape)), dtype=np.float32).reshape(A, B, *shape).astype(dtype)


X = numbers(4, 6)


def test_index_of_a_device_has_the_first_axis_outermost():
    orders = (("a", "b"), ("b", "one", "a"), ("b",), ("one",), ())
    found = on_devices(lambda x: [collectives.axis_index(axes) for axes in orders], X)
    wanted = ([a * B + b, b * A + a, b, 0, 0] for a, b in DEVICES)
    np.testing.assert_array_equal(np.stack(found, -1).reshape(A * B, -1), list(wanted))
    assert {index.dtype for index in found} == {np.dtype(np.int32)}


def test_sizes_of_axes_are_products_and_axes_of_one_device_send_nothing():
    def sizes(x):
        assert [collectives.axis_size(axes) for axes in (("a", "b"), ("b",), ("one",), ())] == [6, 3, 1, 1]
        assert collectives.spread_axes(("one", "b", "a")) == ("b", "a") and collectives.spread_axes(()) == ()
        assert collectives.is_bound("a") and not collectives.is_bound("c")
        assert collectives.bound_or_none(("a",), caller="f") == ("a",)
        with pytest.raises(ValueError, match="f: 'c' is not a bound mesh axis"):
            collectives.bound_or_none(("a", "c"), caller="f")
        return x

    on_devices(sizes, X)
    assert collectives.bound_or_none(("a", "c"), caller="f") == () and not collectives.is_bound("a")
    collectives.check_bound((), caller="f")
    with pytest.raises(ValueError, match="f: 'a' is not a bound mesh axis"):
        collectives.check_bound(("a",), caller="f")


def test_gathers_concatenate_along_the_dim_in_the_order_of_axes():
    def gathered(x):
        by_order = [collectives.all_gather(x, 1, axes) for axes in (("a", "b"), ("b", "a"), ("one",))]
        return *by_order, collectives.all_gather(x, 0, ("b",)), collectives.local_shard(x, 1, ("b", "a"))

    ab, ba, alone, rows, shard = on_devices(gathered, X)
    for a, b in DEVICES:
        np.testing.assert_array_equal(ab[a, b], np.concatenate([X[place] for place in DEVICES], 1))
        np.testing.assert_array_equal(ba[a, b], np.concatenate([X[i, j] for j in range(B) for i in range(A)], 1))
        np.testing.assert_array_equal(rows[a, b], np.concatenate(X[a], 0))
        np.testing.assert_array_equal(shard[a, b], X[a, b][:, b * A + a, None])
    np.testing.assert_array_equal(alone, X)


def test_reduce_scatter_leaves_each_device_its_part_of_the_sum_in_the_given_dtype():
    x = X % 5  # sums of small integers are exact in bfloat16, too
    dims = ((0, ("a",)), (1, ("a", "b")), (1, ("b", "a")), (1, ("one",)))
    dtypes = (jnp.float32, jnp.bfloat16)
    both = on_devices(lambda x: [[collectives.reduce_scatter(x.astype(d), *to) for to in dims] for d in dtypes], x)
    for found, dtype in zip(both, dtypes, strict=True):
        assert {of.dtype for of in found} == {np.dtype(dtype)}
        for a, b in DEVICES:
            np.testing.assert_array_equal(found[0][a, b], x.sum(0)[b, 2 * a : 2 * a + 2])
            np.testing.assert_array_equal(found[1][a, b], x.sum((0, 1))[:, [a * B + b]])
            np.testing.assert_array_equal(found[2][a, b], x.sum((0, 1))[:, [b * A + a]])
        np.testing.assert_array_equal(found[3], x)


def sent(fn, *values):
    """Returns the operations that a device with these values sends, (name, parameters, shape and dtype of the operand).

    The mesh has 2 x 3 x 1 devices; nothing is compiled. Also returns the shapes of the results.
    """
    mesh = AbstractMesh((A, B, 1), ("a", "b", "one"), axis_types=(AxisType.Auto,) * 3)
    local = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jaxpr = jax.make_jaxpr(local)(*values)
    found = [eqn for _, eqn in equations(jaxpr) if eqn.primitive.name in ("ppermute", "all_to_all", "all_gather")]
    return [(eqn.primitive.name, eqn.params, eqn.invars[0].aval) for eqn in found], jaxpr.out_avals


@pytest.mark.parametrize(
    "by, ring, targets",
    [
        (1, True, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)]),
        (-1, True, [(0, 5), (1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]),
        (8, True, [(0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)]),
        (6, True, None),
        (0, False, None),
        (1, False, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        (-4, False, [(4, 0), (5, 1)]),
        (6, False, []),
    ],
)
def test_shift_sends_to_the_device_so_many_places_after_in_a_ring_or_a_row(by, ring, targets):
    found, results = sent(
        lambda tree: collectives.shift(tree, ("one", "a", "b"), by, ring=ring), {"x": np.ones((4, 2))}
    )
    assert [name for name, *_ in found] == ["ppermute"] * (targets is not None)
    for _, params, operand in found:
        assert list(map(tuple, params["perm"])) == targets and params["axis_name"] == ("a", "b")
        assert operand.shape == (4, 2)
    assert [result.shape for result in results] == [(4, 2)]
    if targets is None:
        tree = {"x": object()}
        assert collectives.shift(tree, (), 1) is tree


def test_permutation_sends_a_vector_for_each_dtype_to_its_targets():
    values = [np.ones((2, 2), np.float32), np.int8([1, 2, 3]), np.float32([5])]
    found, results = sent(lambda *xs: tuple(collectives.permute(xs, ("one", "b"), [(0, 2), (2, 1)])), *values)
    assert [(params["perm"], params["axis_name"]) for _, params, _ in found] == [(((0, 2), (2, 1)), ("b",))] * 2
    assert [(x.shape, x.dtype) for *_, x in found] == [((5,), np.float32), ((3,), np.int8)]
    assert [(x.shape, x.dtype) for x in results] == [(value.shape, value.dtype) for value in values]


def test_exchange_and_gather_of_equal_results_name_axes_with_devices_to_send_to():
    def exchanged(x):
        alone = collectives.all_to_all(x, ("one",)), collectives.all_gather_equal(x, 1, ("one",))
        assert alone == (x, x)
        return collectives.all_to_all(x, ("b", "one", "a")), collectives.all_gather_equal(x, 1, ("b", "one"))

    ((first, to_all, _), (second, gather, _)), results = sent(exchanged, np.ones((6, 2), np.float32))
    assert (first, to_all["axis_name"], to_all["split_axis"], to_all["concat_axis"]) == ("all_to_all", ("b", "a"), 0, 0)
    assert (second, gather["axis_name"], gather["all_gather_dimension"]) == ("all_gather", ("b",), 1)
    assert to_all["tiled"] and gather["tiled"] and [x.shape for x in results] == [(6, 2), (6, 6)]
    over_b = on_devices(lambda x: collectives.all_to_all(x, ("b",)), numbers(3, 2))
    np.testing.assert_array_equal(over_b, np.swapaxes(numbers(3, 2), 1, 2))


def test_sums_and_means_are_over_the_axes_of_each_value_in_float32():
    half = np.full((A, B, 1), 30_000, np.float16)  # the sum over three devices is infinite in float16
    axes = (("a", "b"), ("b", "one"), ("one",), ("b",))
    sums, means = on_devices(
        lambda x, half: [fn([x, x, x, half], axes) for fn in (collectives.psum, collectives.pmean)], X, half
    )
    np.testing.assert_allclose(sums[0], np.broadcast_to(X.sum((0, 1)), X.shape))
    np.testing.assert_allclose(sums[1], np.broadcast_to(X.sum(1, keepdims=True), X.shape))
    np.testing.assert_allclose(means[0], np.broadcast_to(X.mean((0, 1)), X.shape), rtol=1e-6)
    np.testing.assert_allclose(means[1], np.broadcast_to(X.mean(1, keepdims=True), X.shape), rtol=1e-6)
    assert (sums[2] == X).all() and (means[2] == X).all()
    assert np.isinf(sums[3]).all() and (means[3] == 30_000).all() and sums[3].dtype == means[3].dtype == np.float16


def test_all_reduce_has_extrema_of_every_sign_and_nan_of_any_device():
    signed, nan = (numbers(4) - 11.5), numbers(2)
    nan[1, 2, 1] = np.nan
    whole = numbers(1, dtype=np.int32) - 3
    operations = ("max", "min", "sum", "max", "min", "max")
    given = (signed, signed, signed, nan, nan, whole)
    found = on_devices(lambda *xs: tuple(collectives.all_reduce(operations, xs, ("a", "one", "b"))), *given)
    for operation, value, reduced in zip(operations, given, found, strict=True):
        want = getattr(value, operation)((0, 1))
        np.testing.assert_array_equal(reduced, np.broadcast_to(want, value.shape))
        assert reduced.dtype == value.dtype


def test_floats_are_ordered_as_integers_with_nan_at_the_end():
    floats = np.float32([-np.inf, -2.5, -1e-40, 0, 1e-40, 2.5, np.inf])

    def ordered(x):
        words = [collectives._ordered(x, operation) for operation in ("max", "min")]
        return words, [collectives._invert_negative(of[:-1]) for of in words]

    words, back = jax.tree.map(np.asarray, jax.jit(ordered)(np.append(floats, np.float32(np.nan))))
    for found, bits, end in zip(words, back, (2**31 - 1, -(2**31)), strict=True):
        assert found.dtype == np.int32 and (np.diff(found[:-1].astype(np.int64)) > 0).all() and found[-1] == end
        np.testing.assert_array_equal(bits.view(np.float32), floats)
    halves = jax.eval_shape(lambda x: collectives._ordered(x, "min"), jax.ShapeDtypeStruct((2,), np.float16))
    assert halves.dtype == np.int16
    words = np.int8([3])
    assert collectives._ordered(words, "max") is words


def test_stacked_gather_returns_values_of_every_width_bit_for_bit():
    values = (numbers(2, 2), numbers(1, dtype=np.float16) / 7, numbers(3, dtype=np.int8) - 5, numbers(1) % 2 > 0)
    found = on_devices(lambda *xs: tuple(collectives.all_gather_stacked(xs, ("b",))), *values)
    for value, rows in zip(values, found, strict=True):
        assert rows.dtype == value.dtype and rows.shape == (A, B, B, *value.shape[2:])
        np.testing.assert_array_equal(rows, np.broadcast_to(value[:, None], rows.shape))
    for dtype, word in ((np.int8, np.int32), (np.bool_, np.int32), (np.float16, np.float32), (np.float32, np.float32)):
        assert collectives._word_dtype(np.dtype(dtype)) == word, dtype
    assert collectives._word_dtype(np.dtype(np.int64)) == np.int64
    words = jax.eval_shape(collectives._as_words, jax.ShapeDtypeStruct((3, 2), np.int8))
    assert (words.shape, words.dtype) == ((6,), np.uint32)


def test_values_of_one_key_share_a_vector_and_return_in_order():
    seen = []

    def double(key, vector):
        seen.append((key, vector.shape))
        return jnp.stack([vector, 2 * vector])

    values = [np.float32([[1, 2]]), np.float32(3), np.zeros((0, 4), np.float32), np.float32([5])]
    found = jax.jit(lambda xs: collectives._as_one_vector_each(double, ["x", "y", "x", "x"], xs))(values)
    assert seen == [("x", (3,)), ("y", (1,))]
    assert [x.shape for x in found] == [(2, 1, 2), (2,), (2, 0, 4), (2, 1)]
    assert found[0][1].tolist() == [[2, 4]] and found[1].tolist() == [3, 6] and found[3].tolist() == [[5], [10]]


def test_term_of_a_mean_is_divided_in_the_wider_dtype_except_by_powers_of_two():
    narrow = np.full(2, 1000, jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        terms = [jax.eval_shape(lambda x, n=n: collectives.term_of_mean(x, n, x.dtype), narrow) for n in (3, 4)]
    assert [term.dtype for term in terms] == [jnp.bfloat16] * 2

    def converts(count, value, dtype):
        return str(jax.make_jaxpr(lambda x: collectives.term_of_mean(x, count, dtype))(value)).count("convert_element")

    assert [converts(n, narrow, narrow.dtype) for n in (1, 4, 3, 6)] == [0, 0, 2, 2]
    assert converts(4, np.ones(2, np.float32), np.dtype(jnp.bfloat16)) == 1
    assert collectives.term_of_mean(np.float32([1e30, 3]), 2, np.dtype(np.float32)).tolist() == [np.float32(5e29), 1.5]
    assert collectives.term_of_mean(jnp.float32([90_000]), 3, jnp.dtype(jnp.float16)).tolist() == [30_000]


def test_sums_have_at_least_32_bits_if_they_are_of_floats():
    kinds = {jnp.bfloat16: np.float32, np.float16: np.float32, np.float32: np.float32, np.float64: np.float64}
    kinds |= {np.int8: np.int8, np.bool_: np.bool_, np.complex64: np.complex64}
    assert {dtype: np.dtype(collectives.wide_dtype(np.dtype(dtype))).type for dtype in kinds} == kinds
    assert (
        collectives.widened(jnp.bfloat16([1])).dtype == np.float32
        and collectives.widened(jnp.int8([1])).dtype == np.int8
    )
    with jax.numpy_dtype_promotion("strict"):
        assert collectives.common_dtype(jnp.bfloat16, np.float32, np.int8) == np.float32
    assert collectives.common_dtype(jnp.bfloat16, np.float16) == np.float32
    assert collectives.value_dtype(2.0) == np.float32 and collectives.value_dtype(np.int8(2)) == np.int8


def test_entries_of_a_spec_and_axes_are_inverse():
    pairs = ((None, ()), ("a", ("a",)), (("a", "b"), ("a", "b")))
    assert [collectives.entry_axes(entry) for entry, _ in pairs] == [axes for _, axes in pairs]
    assert [collectives.axes_entry(axes) for _, axes in pairs] == [entry for entry, _ in pairs]
    assert collectives.entry_axes(("a",)) == ("a",)


@pytest.mark.parametrize(
    "shape, matrix",
    [
        ((256, 8, 128), (2048, 128)),
        ((4, 4096), (128, 128)),
        ((8, 8), (8, 8)),
        ((7, 8), (7, 8)),
        ((8, 7), (8, 7)),
        ((64,), (8, 8)),
        ((63,), (63,)),
        ((16, 2, 4), (16, 8)),
        ((3, 5, 8), (15, 8)),
        ((2, 4, 13), (8, 13)),
        ((2, 7, 12), (14, 12)),
    ],
)
def test_matrix_of_a_shard_has_at_least_8_rows_and_columns_where_there_is_one(shape, matrix):
    assert collectives._matrix_shape(shape) == matrix
