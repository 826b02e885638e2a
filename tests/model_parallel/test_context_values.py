"""Tests of the parts of context attention, of routing and of split tables, by hand: positions, masks, steps, dtypes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlstm_jax.distributed.model_parallel import context
from xlstm_jax.distributed.model_parallel.context import _Options
from xlstm_jax.distributed.model_parallel.embedding import look_up_split_rows
from xlstm_jax.distributed.model_parallel.router import Routing, load_balancing_loss, route_tokens, router_z_loss


def options_of(axes=(), layout="contiguous", causal=True, window=None, scale=0.5, block_size=4):
    return _Options(axes, layout, causal, window, scale, block_size)


def over(fn, count, *values):
    """Calls ``fn`` on ``count`` devices along "cp", which ``vmap`` simulates, with their entries of ``values``."""
    return jax.jit(jax.vmap(fn, axis_name="cp", axis_size=count))(*values)


# ------------------------------------------------------------------------------------------------- positions and masks


@pytest.mark.parametrize(
    "layout, back, want",
    [
        ("contiguous", 0, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        ("contiguous", 1, [[8, 9, 10, 11], [0, 1, 2, 3], [4, 5, 6, 7]]),
        ("zigzag", 0, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        ("zigzag", 2, [[2, 3, 8, 9], [4, 5, 6, 7], [0, 1, 10, 11]]),
    ],
)
def test_positions_of_tokens_follow_the_layout_and_the_places_back_in_the_ring(layout, back, want):
    def local(_):
        options = options_of(("cp",), layout)
        if not back:
            assert options.positions(4).tolist() == want
        return context._local_positions(options, 4, back)

    found = over(local, 3, np.zeros(3))
    assert (found.tolist(), found.dtype) == (want, np.int32)


def test_positions_of_a_single_device_count_its_tokens_in_32_bits():
    with jax.numpy_dtype_promotion("strict"):
        found = jax.eval_shape(lambda: context._local_positions(options_of(), 6))
    assert (found.shape, found.dtype) == ((6,), np.int32)
    assert options_of().positions(3).tolist() == [[0, 1, 2]]
    assert not options_of().is_unbalanced


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (2, 1), (0, 3)])
def test_mask_is_that_of_a_loop_over_queries_and_keys(causal, window):
    queries, keys = np.array([3, 9, 0]), np.array([1, 2, 3, 4, 8])
    segments = np.array([[0, 1, 1]]), np.array([[0, 0, 1, 0, 1]])

    def sees(q, k):
        left, right = window or (math.inf, math.inf)
        return -left <= k - q <= right and not (causal and k > q)

    want = np.array([[sees(q, k) for k in keys] for q in queries])
    options = options_of(causal=causal, window=window)
    found = context._visible(options, queries, keys, None, None)
    assert found is None if not (causal or window) else np.array_equal(np.asarray(found)[0, 0], want)
    same = segments[0][0][:, None] == segments[1][0]
    np.testing.assert_array_equal(np.asarray(context._visible(options, queries, keys, *segments))[0, 0], want & same)
    for q in (queries, queries[1:2], queries[2:]):
        for k in (keys, keys[:1], keys[4:], keys[1:3]):
            block = np.array([[sees(a, b) for b in k] for a in q])
            found = bool(context._any_visible(options, q, k))
            assert found or not block.any()
            if len(q) == len(k) == 1:
                assert found == block.all()


@pytest.mark.parametrize(
    "options, length, steps",
    [
        (options_of(("cp",), window=(3, 0)), 4, 2),
        (options_of(("cp",), window=(4, 0)), 4, 2),
        (options_of(("cp",), window=(5, 0)), 4, 3),
        (options_of(("cp",), window=(0, 9)), 4, 1),
        (options_of(("cp",), window=(99, 0)), 4, 3),
        (options_of(("cp",), window=(3, 0), causal=False), 4, 3),
        (options_of(("cp",), window=(3, 0), layout="zigzag"), 4, 3),
        (options_of(("cp",)), 4, 3),
    ],
)
def test_ring_has_a_step_for_each_device_that_a_causal_window_reaches(options, length, steps):
    found = []

    def local(x):
        found.append((context._steps(options, length), options.devices, options.is_unbalanced))
        return x

    jax.eval_shape(jax.vmap(local, axis_name="cp"), np.zeros(3))
    assert found == [(steps, 3, options.window is None)]


@pytest.mark.parametrize(
    "layout, length, block_size, want",
    [
        ("contiguous", 12, 4, 4),
        ("contiguous", 12, 5, 6),  # 5 / 4 is more than 6 / 5
        ("contiguous", 12, 1, 1),
        ("contiguous", 12, 99, 12),
        ("contiguous", 7, 3, 7),  # 7 / 3 is less than 3 / 1
        ("zigzag", 12, 99, 6),
        ("zigzag", 8, 3, 4),
    ],
)
def test_block_has_the_divisor_of_the_tokens_nearest_to_the_asked_size(layout, length, block_size, want):
    assert context._block_length(options_of(layout=layout, block_size=block_size), length) == want


# --------------------------------------------------------------------------------------------------------------- dtypes


def test_products_softmax_and_gathered_positions_have_their_dtypes_under_strict_promotion():
    query, segments = jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.bfloat16), jax.ShapeDtypeStruct((1, 4), np.int32)
    with jax.numpy_dtype_promotion("strict"):
        product = jax.eval_shape(lambda a: context._product("bqhd,bkhd->bhqk", a, a), query)
        out, residuals = jax.eval_shape(lambda q: context._ring_fwd(q, q, q, None, options_of()), query)
        seen = []

        def kernel(q, k, v, *, mask, is_causal, local_window_size, scale):
            seen.append((mask.shape, mask.dtype, is_causal, local_window_size, scale))
            return v

        jax.eval_shape(lambda q, s: context._by_gather(q, q, q, s, options_of(window=(1, 1)), kernel), query, segments)
    assert (product.shape, product.dtype) == ((1, 2, 4, 4), np.float32)
    assert (out.shape, out.dtype, residuals[-1].dtype) == (query.shape, jnp.bfloat16, np.float32)
    assert seen == [((1, 1, 4, 4), np.bool_, False, None, 0.5)]


def test_product_of_wide_operands_is_wide_and_order_without_moves_is_no_copy():
    wide, x = jax.ShapeDtypeStruct((2, 3), np.float32), np.arange(6).reshape(1, 6)
    assert jax.eval_shape(lambda a: context._product("ij,kj->ik", a, a.astype(jnp.bfloat16)), wide).dtype == np.float32
    assert context._in_order(x, np.arange(6)) is x
    assert context._in_order(x, np.array([0, 2, 1, 3, 4, 5])).tolist() == [[0, 2, 1, 3, 4, 5]]


# -------------------------------------------------------------------------------------------------- tables and routers


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_rows_of_a_table_split_over_devices_are_found_by_narrow_tokens(dtype):
    table = np.arange(40_000, dtype=np.float32).reshape(2, 20_000, 1)
    tokens = np.array([[0, 3, -1]]) if dtype == np.int8 else np.array([[0, 127, 255]])
    want = np.where(tokens < 0, tokens + 40_000, tokens)[..., None]

    def local(table):
        return look_up_split_rows(table, tokens.astype(dtype), 40_000, "cp", caller="f")

    np.testing.assert_array_equal(over(local, 2, table), np.stack([want, want]))


def test_rows_outside_of_a_split_table_are_nan_and_others_exact():
    table = np.arange(1, 9, dtype=np.float32).reshape(2, 4, 1)
    tokens = np.array([[-9, -8, -1, 0, 3, 4, 7, 8]])
    found = over(lambda table: look_up_split_rows(table, tokens, 8, "cp", caller="f"), 2, table)
    np.testing.assert_array_equal(found[0, 0, :, 0], [np.nan, 1, 8, 1, 4, 5, 8, np.nan])
    np.testing.assert_array_equal(found[0], found[1])


def test_losses_of_a_router_weight_rows_and_are_0_without_weight():
    logits = np.log(np.float32([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.3, 0.6, 0.1]])) + 2
    weights = np.float32([1, 3, 0])

    def losses(logits, weights):
        routing = route_tokens(logits, 2, normalize=True)
        plain = load_balancing_loss(routing), router_z_loss(routing)
        return routing, plain, (load_balancing_loss(routing, (), weights), router_z_loss(routing, weights))

    routing, plain, weighted = jax.jit(losses)(logits, weights)
    assert routing.experts.tolist() == [[0, 1], [2, 0], [1, 0]]
    np.testing.assert_allclose(routing.weights, [[2 / 3, 1 / 3], [8 / 9, 1 / 9], [2 / 3, 1 / 3]], rtol=1e-6)
    shares, probabilities = np.array([3, 2, 1]) / 6, np.array([0.9, 0.95, 1.15]) / 3
    assert plain == pytest.approx((3 * shares @ probabilities, 4), rel=1e-5)
    shares, probabilities = np.array([4, 1, 3]) / 8, np.array([0.5 + 0.3, 0.25 + 0.3, 0.25 + 2.4]) / 4
    assert weighted == pytest.approx((3 * shares @ probabilities, 4), rel=1e-5)
    _, _, nothing = jax.jit(losses)(logits, 0 * weights)
    assert nothing == (0, 0)
    for top_k in (0, 4):
        with pytest.raises(ValueError, match=f"top_k={top_k} of 3 experts"):
            route_tokens(logits, top_k)
    assert isinstance(routing, Routing)
