"""Tests of attention over a split sequence: values and gradients of one device, and the stated memory and traffic."""

import math
import re
from itertools import cycle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.support import FLOAT32_ROUNDING, assert_each_leaf, equations, integers, normal, on_mesh
from xlstm_jax.distributed import DeviceMeshManager, value_and_grad
from xlstm_jax.distributed.device_mesh.zigzag import from_zigzag, to_zigzag, zigzag_order
from xlstm_jax.distributed.model_parallel import ReorderedTokens, context, in_layout
from xlstm_jax.distributed.model_parallel.context import context_attention, context_positions
from xlstm_jax.distributed.model_parallel.sequence_layout import CONTIGUOUS, LAYOUTS
from xlstm_jax.forecast.compiling.compile import compile_for_topology

BATCH, TOKENS, HEADS, KEY_HEADS, SIZE = 2, 16, 8, 2, 4
SPLIT = P("dp", "cp")

QUERY = 2 * normal(0, (BATCH, TOKENS, HEADS, SIZE))
KEY, VALUE = (2 * normal(seed, (BATCH, TOKENS, KEY_HEADS, SIZE)) for seed in (1, 2))
COTANGENT = 2 * normal(3, (BATCH, TOKENS, HEADS, SIZE))
SEGMENTS = np.cumsum(integers(4, (BATCH, TOKENS), 0, 5) == 0, axis=1, dtype=np.int32)


@pytest.fixture(scope="module")
def mesh():
    return DeviceMeshManager.create_device_mesh({"dp": 2, "cp": 4})


def of_one_device(query, key, value, causal=True, window=None, segment_ids=None):
    """Reference: the softmax over all keys."""
    ahead = jnp.arange(TOKENS) - jnp.arange(TOKENS)[:, None]
    left, right = window if isinstance(window, tuple) else (window, window) if window else (TOKENS, TOKENS)
    seen = (ahead >= -left) & (ahead <= (min(right, 0) if causal else right))
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    key, value = (jnp.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(SIZE)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)), value)


def with_gradients(attend):
    """Returns the result of ``attend``, and the gradients of query, key and value."""

    def run(*arrays):
        out, backward = jax.vjp(attend, *arrays)
        return out, *backward(COTANGENT)

    return jax.jit(run)(QUERY, KEY, VALUE)


def over_devices(mesh, check_vma, layout, **options):
    """Runs ``context_attention`` on global arrays in natural order, laid out inside or before."""
    segments = options.pop("segment_ids", None)
    n = mesh.shape["cp"]

    def local(*arrays):
        with in_layout(arrays, layout) as (query, key, value, segments):
            return context_attention(query, key, value, segment_ids=segments, **{"block_size": 2, **options})

    specs = (SPLIT, SPLIT, SPLIT, None if segments is None else SPLIT)
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=SPLIT, check_vma=check_vma)

    def of_all(query, *arrays):
        query = to_zigzag(query, n) if layout == "zigzag" else query  # key and value by an exchange
        out = split(query, *arrays, segments)
        return from_zigzag(out, n) if layout == "zigzag" else out

    return of_all


def same(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=FLOAT32_ROUNDING * np.abs(w).max())


MASKS = {
    "causal": {},
    "segments": {"segment_ids": SEGMENTS},
    "window": {"window": 3, "segment_ids": SEGMENTS},
    "both sides": {"causal": False, "window": (2, 5)},
    "all": {"causal": False},
}
CASES = [(impl, layout, mask) for impl in ("ring", "ulysses", "gather") for layout in LAYOUTS for mask in MASKS]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case, check_vma", list(zip(CASES, cycle([True, False, False, True]))), ids=str)
def test_context_attention_values_and_gradients_match_a_single_device(case, check_vma, mesh):
    impl, layout, mask = case
    got = with_gradients(over_devices(mesh, check_vma, layout, impl=impl, **MASKS[mask]))
    same(got, with_gradients(lambda *arrays: of_one_device(*arrays, **MASKS[mask])))


def test_block_of_keys_with_larger_logits_is_added_to_a_softmax_and_gets_its_gradients():
    """The softmax over a block of keys, computed in NumPy, becomes that over two blocks."""
    options = context._Options((), CONTIGUOUS, False, None, 0.5, 4)
    q, d, (k, v) = normal(0, (3, 4)), normal(1, (3, 4)), normal(2, (2, 8, 4))
    k[4:] *= 3
    exponentials = np.exp(q @ k.T / 2)
    weights = exponentials / exponentials.sum(1, keepdims=True)
    out = weights @ v
    d_logits = weights * (d @ v.T - (d * out).sum(1, keepdims=True)) / 2
    assert exponentials.argmax(1).min() >= 4 and weights[:, :4].max(1).min() > 0.01  # guards

    def added(query, key, value, d_out, first, all_keys):
        places = (np.arange(3), np.arange(4), None, None)
        _, total, summed = context._attend(options, query, key, value, places, first)
        nothing = jnp.zeros_like(key), jnp.zeros_like(value)
        d_query, of_keys = context._terms(
            options, query, key, value, places, (d_out, *all_keys), jnp.zeros_like(query), nothing
        )
        return summed / total[..., None], d_query, *of_keys

    query, d_out = (x[None, None, None] for x in (q, d))  # [b, g, r, c, d]
    largest = np.log(exponentials[:, :4].max(1))
    state = exponentials[:, :4] / np.exp(largest)[:, None]
    first = tuple(x[None, None, None] for x in (largest, state.sum(1), state @ v[:4]))
    all_keys = tuple(x[None, None, None] for x in (np.log(exponentials.sum(1)), (d * out).sum(1)))
    got = jax.jit(added)(query, k[None, None, 4:], v[None, None, 4:], d_out, first, all_keys)
    wanted = out, d_logits[:, 4:] @ k[4:], d_logits[:, 4:].T @ q, weights[:, 4:].T @ d
    same([x.reshape(-1, 4) for x in got], wanted)


def test_ring_adds_terms_of_every_device_to_the_gradient_of_a_key_and_knows_the_position_of_each_key(mesh, monkeypatch):
    """Keys are their positions. Terms are replaced by the keys times the device's index plus 1, and the gradients of
    queries by the number of steps in which the positions were those of the keys."""
    options = context._Options(("cp",), CONTIGUOUS, False, None, 0.5, 2)

    def merged(options, d_query, blocks, of_queries, of_result, arrived, places):
        keys, values, _ = arrived
        factor = lax.axis_index("cp") + 1
        is_place = jnp.abs(keys[..., 0] - places[:, None, None]) < 0.5
        return d_query + is_place.all(), (keys * factor, values * factor)

    def gradients(query, key, value):
        residuals = query, key, value, None, query, jnp.zeros((1, 1, 1, 1, 2)) + 0 * query[0, 0, 0, 0]
        return context._ring_bwd(options, residuals, query)[:3]

    monkeypatch.setattr(context, "_merge_gradients", merged)
    places = np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1)
    steps, d_key, d_value = on_mesh(gradients, mesh, True, P(None, "cp"), P(None, "cp"))(*[places] * 3)
    np.testing.assert_array_equal(steps, np.full((1, 8, 1, 1), 4))
    for of_keys in (d_key, d_value):
        np.testing.assert_array_equal(of_keys, (1 + 2 + 3 + 4) * places)


def test_ulysses_masks_the_keys_of_other_segments():
    """A kernel that counts the keys a query sees, for segments of 3 and of 1 tokens over two devices."""
    mesh = DeviceMeshManager.create_device_mesh({"cp": 2}, devices=jax.devices()[:2])

    def count(query, key, value, *, mask, **options):
        del key, value, options
        return jnp.broadcast_to(mask.sum(-1).swapaxes(1, 2)[..., None], query.shape)

    def counted(x, segments):
        return context_attention(x, x, x, causal=False, segment_ids=segments, impl="ulysses", kernel=count)

    split = jax.shard_map(counted, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"))
    seen = jax.jit(split)(np.zeros((1, 4, 2, 1), np.float32), np.array([[0, 0, 0, 1]]))
    assert seen[0, :, :, 0].tolist() == [[3, 3]] * 3 + [[1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("shape", [{"dp": 1, "cp": 8}, {"dp": 2, "cp": 1}, {"dp": 1, "cp": 2}], ids=str)
@pytest.mark.parametrize("impl", ["ring", "gather"])
def test_context_attention_matches_a_single_device_on_other_meshes(impl, shape, check_vma):
    mesh = DeviceMeshManager.create_device_mesh(shape, devices=jax.devices()[: math.prod(shape.values())])
    same(with_gradients(over_devices(mesh, check_vma, "zigzag", impl=impl)), with_gradients(of_one_device))


def test_layout_argument_different_from_the_batch_layout_changes_the_result(mesh):
    attend = over_devices(mesh, True, "contiguous", impl="gather")
    got = from_zigzag(jax.jit(attend)(*(x.value for x in to_zigzag((QUERY, KEY, VALUE), 4))), 4)
    assert np.abs(got - of_one_device(QUERY, KEY, VALUE)).max() > 0.1


class Attention(nn.Module):
    """Attention with projections and a factor that depends on the position."""

    impl: str = "gather"

    @nn.compact
    def __call__(self, x):
        query, key, value = (nn.DenseGeneral((HEADS, SIZE), name=name)(x) for name in ("query", "key", "value"))
        angle = context_positions(x.shape[1], "cp")[:, None, None] / 3.0
        query, key = (a * jnp.cos(angle) for a in (query, key))
        y = context_attention(query, key, value, impl=self.impl)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1))(y)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_attention_parameter_gradients_in_a_step_match_a_single_device(check_vma, mesh):
    x = 2 * normal(5, (BATCH, TOKENS, 6))
    params = Attention().init(jax.random.key(0), x)
    model = Attention("ring")
    gradients = value_and_grad(lambda params, x: jnp.mean((model.apply(params, x) - x) ** 2), ("dp", "cp"))

    def step(params, x):
        with in_layout(x, "zigzag") as x:
            return gradients(params, x)

    loss, grads = on_mesh(step, mesh, check_vma, (P(), SPLIT), P())(params, x)
    want = jax.jit(jax.value_and_grad(lambda params: jnp.mean((Attention().apply(params, x) - x) ** 2)))(params)
    np.testing.assert_allclose(loss, want[0], rtol=FLOAT32_ROUNDING)
    same(jax.tree.leaves(grads), jax.tree.leaves(want[1]))


def test_ring_attention_sums_bfloat16_inputs_in_float32(mesh):
    """Narrow inputs are summed in float32, and in the ring values may have another size than keys."""
    narrow = [x.astype(jnp.bfloat16) for x in (QUERY, KEY, jnp.concatenate([VALUE, VALUE], axis=-1))]
    got = jax.jit(over_devices(mesh, False, "contiguous", impl="ring"))(*narrow)
    assert got.dtype == jnp.bfloat16
    want = of_one_device(*(x.astype(jnp.float32) for x in narrow))
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=0.02 * np.abs(want).max())


# ----------------------------------------------------------------------------------------------- memory and traffic


def traced(mesh, fn, *specs):
    """Returns the primitives of ``fn`` of local query, key and value."""
    local = jax.shard_map(fn, mesh=mesh, in_specs=specs or (SPLIT,) * 3, out_specs=SPLIT, check_vma=False)
    return [eqn.primitive.name for _, eqn in equations(jax.make_jaxpr(local)(QUERY, KEY, VALUE))]


def gradients(*arrays, **options):
    return jax.grad(lambda *arrays: context_attention(*arrays, **options).sum(), (0, 1, 2))(*arrays)


def test_ring_attention_sends_each_key_and_value_shard_around_once(mesh):
    forward = traced(mesh, lambda *arrays: context_attention(*arrays, impl="ring"))
    both = traced(mesh, lambda *arrays: gradients(*arrays, impl="ring"))
    sent = {"forward": forward.count("ppermute"), "with gradients": both.count("ppermute")}
    # Keys and values to the 3 other devices; for gradients once more, and the gradients, which return home.
    assert sent == {"forward": 2 * 3, "with gradients": 2 * (3 + 3 + 4)}
    others = {name for name in {*forward, *both} if re.match("all_gather|all_to_all|psum|reduce_scatter", name)}
    assert not others, "the ring sends by ppermute alone"


def test_window_ends_the_ring_after_the_last_visible_shard(mesh):
    forward = traced(mesh, lambda *arrays: context_attention(*arrays, impl="ring", window=3))
    assert forward.count("ppermute") == 2 * 1  # a device has 4 tokens, and sees the previous device's tokens


def options_of(mesh, window, causal=True, layout=CONTIGUOUS, block_size=4):
    return context._Options(mesh.axis_names, layout, causal, window, 1.0, block_size)


def test_ring_takes_as_many_steps_as_a_causal_window_reaches_back():
    mesh = DeviceMeshManager.create_device_mesh({"cp": 6}, devices=jax.devices()[:6])

    def steps(**options):
        found = []
        local = lambda x: found.append(context._steps(options_of(mesh, **options), 4)) or x  # noqa: E731
        jax.eval_shape(on_mesh(local, mesh, True, P("cp"), P("cp")), jnp.zeros(6))
        return found[0]

    assert [steps(window=(left, 9)) for left in (0, 1, 4, 5, 19, 20, 21)] == [1, 2, 2, 3, 6, 6, 6]
    assert [steps(window=None), steps(window=(1, 1), causal=False), steps(window=(1, 1), layout="zigzag")] == [6, 6, 6]


@pytest.mark.parametrize(
    "layout, block_size, expected",
    # The divisors of 12 are 1, 2, 3, 4, 6, 12, and those of half of it 1, 2, 3, 6.
    [(CONTIGUOUS, 4, 4), (CONTIGUOUS, 5, 6), (CONTIGUOUS, 100, 12), ("zigzag", 4, 3), ("zigzag", 100, 6)],
)
def test_length_of_blocks_is_the_divisor_with_the_nearest_ratio(layout, block_size, expected):
    options = context._Options((), layout, True, None, 1.0, block_size)
    assert context._block_length(options, 12) == expected


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (0, 0), (1, 0), (4, 1)], ids=str)
def test_masks_of_positions_equal_a_loop_over_pairs_and_blocks_without_pairs_are_skipped(window, causal):
    options = context._Options((), CONTIGUOUS, causal, window, 1.0, 4)
    left, right = window or (99, 99)
    places = np.arange(12)
    want = np.array([[-left <= k - q <= right and (k <= q or not causal) for k in places] for q in places])
    mask = context._visible(options, places, places, None, None)
    assert mask is None and want.all() if mask is None else np.array_equal(mask[0, 0], want)
    for q, k in np.ndindex(4, 4):
        queries, keys = slice(3 * q, 3 * q + 3), slice(3 * k, 3 * k + 3)
        assert bool(context._any_visible(options, places[queries], places[keys])) == want[queries, keys].any()


@pytest.mark.parametrize("impl", ["ring", "gather", "ulysses"])
def test_attention_and_its_gradients_have_the_dtypes_of_their_inputs(impl):
    arrays = [jax.ShapeDtypeStruct(QUERY.shape, dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.float32)]
    attend = lambda *arrays: context_attention(*arrays, impl=impl, block_size=4)  # noqa: E731
    if impl != "ring":  # jax.nn.dot_product_attention takes equal dtypes
        arrays = arrays[:1] * 3
    assert jax.eval_shape(attend, *arrays).dtype == jnp.bfloat16
    grads = jax.eval_shape(jax.grad(lambda *arrays: attend(*arrays).astype(jnp.float32).sum(), (0, 1, 2)), *arrays)
    assert [grad.dtype for grad in grads] == [array.dtype for array in arrays]


def test_masks_of_segments_compare_the_segments_of_each_sequence():
    options = context._Options((), CONTIGUOUS, False, None, 1.0, 4)
    queries, keys = np.array([[0, 0, 1], [2, 2, 2]]), np.array([[0, 1], [3, 2]])
    mask = context._visible(options, np.arange(3), np.arange(2), queries, keys)
    assert mask.shape == (2, 1, 3, 2)
    assert mask.astype(int)[:, 0].tolist() == [[[1, 0], [1, 0], [0, 1]], [[0, 1], [0, 1], [0, 1]]]


def test_ring_attention_stores_only_local_residuals_for_the_backward_pass(mesh):
    """The ring keeps local query, key, value, result, and a number per query: no logits, and no remote keys."""
    kept = []

    def forward(*arrays):
        out, backward = jax.vjp(lambda *arrays: context_attention(*arrays, impl="ring"), *arrays)
        kept.extend(jax.tree.leaves(jax.eval_shape(lambda: backward)))
        return out

    traced(mesh, forward)
    local = (BATCH // 2) * (TOKENS // 4)
    of_arrays = local * (HEADS * SIZE + KEY_HEADS * 2 * SIZE + HEADS * SIZE + HEADS)
    assert 0 < sum(x.size for x in kept) <= of_arrays + 4 * TOKENS  # and positions


def test_ring_attention_in_a_layer_loop_stores_no_hoisted_masks(mesh):
    """In a loop over layers, JAX computes masks per pair of blocks; hoisted masks would be as large as the logits."""

    def loss(*arrays):
        layer = jax.checkpoint(lambda x, _: (context_attention(x, *arrays[1:], impl="ring", block_size=2), None))
        return lax.scan(layer, arrays[0], length=2)[0].sum()

    def gradient(*arrays):
        return jax.grad(loss)(*arrays)

    local = jax.shard_map(gradient, mesh=mesh, in_specs=(SPLIT,) * 3, out_specs=SPLIT, check_vma=False)
    made = [v.aval for _, eqn in equations(jax.make_jaxpr(local)(QUERY, KEY, VALUE)) for v in eqn.outvars]
    masks = [value.ndim for value in made if value.ndim >= 5 and value.dtype == bool]
    assert set(masks) == {5}  # masks of one pair of blocks; masks of a sequence of blocks have 6 and 7 dims


@pytest.mark.slow
@pytest.mark.libtpu
def test_compiled_tpu_ring_uses_async_permutes_and_stores_no_logits():
    devices, tokens, heads, size = 8, 4096, 8, 128
    mesh = jax.sharding.AbstractMesh((devices,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    split = P(None, "cp")
    x = jax.ShapeDtypeStruct((1, tokens, heads, size), jnp.bfloat16, sharding=jax.NamedSharding(mesh, split))

    def local(*arrays):
        with in_layout(tuple(ReorderedTokens(x, "zigzag", devices) for x in arrays), "zigzag") as arrays:
            return gradients(*arrays, impl="ring")

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split))
    program = compile_for_topology(step, x, x, x, topology="v5e:2x4", cache=None)
    kinds = re.findall(r" (all-gather|all-to-all|all-reduce|collective-permute)(-start)?\(", program.hlo)
    assert set(kinds) == {("collective-permute", "-start")}
    assert program.memory["temp"] < heads * tokens * (tokens // devices) * 4  # float32 logits of one device's queries


@pytest.mark.parametrize("layout, shares", [("contiguous", [3, 7, 11, 15]), ("zigzag", [9, 9, 9, 9])])
def test_zigzag_balances_work_between_devices_and_contiguous_does_not(layout, shares):
    """With zigzag each device computes the same number of pairs of half shards."""
    order = zigzag_order(16, 4) if layout == "zigzag" else np.arange(16)
    halves = order.reshape(4, 2, 2)
    how = context._Options((), layout, True, None, 1.0, 2)
    pairs = [[context._any_visible(how, q, k) for q in own for k in halves.reshape(8, 2)] for own in halves]
    assert [sum(map(bool, row)) for row in pairs] == shares


def test_custom_kernel_gets_a_mask_for_gather_and_is_causal_for_ulysses(mesh):
    calls = {}

    def kernel(query, key, value, **options):
        calls[tuple(query.shape)] = options
        return jax.nn.dot_product_attention(query, key, value, **options)

    for impl in ("gather", "ulysses"):
        traced(mesh, lambda *arrays, impl=impl: context_attention(*arrays, impl=impl, kernel=kernel, window=3))
    of_gather, of_ulysses = calls[(1, 4, HEADS, SIZE)], calls[(1, TOKENS, HEADS // 4, SIZE)]
    assert of_gather["mask"].shape == (1, 1, 4, TOKENS) and not of_gather["is_causal"]
    assert of_ulysses["mask"] is None and of_ulysses["is_causal"] and of_ulysses["local_window_size"] == (3, 3)


# -------------------------------------------------------------------------------------------------------------- layouts


def test_to_zigzag_reorders_a_batch_and_from_zigzag_inverts_the_order():
    batch = {"tokens": np.arange(48).reshape(2, 24), "x": jnp.arange(96).reshape(2, 24, 2)}
    there = to_zigzag(batch, 3)
    tokens = there["tokens"].value
    assert tokens[0].tolist() == [*range(4), *range(20, 24), *range(4, 8), *range(16, 20), *range(8, 16)]
    assert_each_leaf(np.testing.assert_array_equal, from_zigzag(there, 3), batch)
    last = to_zigzag(batch["tokens"], 3, dim=-1)
    np.testing.assert_array_equal(last.value, tokens)
    for laid_out in (last, last.value):
        np.testing.assert_array_equal(from_zigzag(laid_out, 3, dim=-1), batch["tokens"])
    with pytest.raises(
        ValueError, match=r"from_zigzag\(batch, 4\): batch of shape \(2, 24\) is laid out for 3 devices"
    ):
        from_zigzag(last, 4, dim=-1)


def test_zigzag_on_a_single_device_accepts_an_odd_sequence_length():
    odd, window = QUERY[:, :7], np.int64(3)
    np.testing.assert_array_equal(to_zigzag(odd, 1).value, odd)
    assert context_positions(7, "cp", "zigzag").tolist() == list(range(7))
    got, want = (context_attention(odd, odd, odd, impl="ring", layout=how, window=window) for how in LAYOUTS)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_context_positions_match_the_layout_without_a_global_table(layout, mesh):
    positions = jnp.arange(16)[None]
    want = to_zigzag(positions, 4).value if layout == "zigzag" else positions
    places = {"mesh": mesh, "in_specs": (), "out_specs": P("cp")}

    def of_device():
        with in_layout((), layout):
            return context_positions(4, "cp")

    np.testing.assert_array_equal(jax.shard_map(of_device, **places)(), want[0])
    # Whole, outside of shard_map; and more tokens than two bytes count.
    np.testing.assert_array_equal(context_positions(40_000, "cp", layout), np.arange(40_000))
    program = jax.make_jaxpr(jax.shard_map(of_device, **places))()
    arguments = [(eqn.primitive.name, x.aval) for _, eqn in equations(program) for x in eqn.invars]
    assert not [(name, aval) for name, aval in arguments if aval.size > 4]  # no table of all tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_context_positions_count_more_tokens_than_16_bits(layout):
    positions = jax.jit(lambda: context_positions(40_000, "cp", layout))()
    np.testing.assert_array_equal(positions, np.arange(40_000))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_in_layout_exchanges_chunks_between_devices_like_to_zigzag(devices):
    """``in_layout`` equals ``to_zigzag`` for leaves of several dtypes and ranks, also over two axes."""
    shape = {"a": 2, "b": 2} if devices == 4 else {"a": devices}
    mesh, axes = DeviceMeshManager.create_device_mesh(shape, devices=jax.devices()[:devices]), tuple(shape)
    tokens = np.arange(3 * 4 * devices).reshape(3, -1)
    batch = {"tokens": tokens, "ids": 2 * tokens, "x": normal(0, (3, 4 * devices, 2))}
    batch |= {"mask": tokens % 3 == 0, "of_row": np.arange(3)}

    def local(batch):
        with in_layout(batch, "zigzag", axes) as batch:
            return batch

    specs = dict.fromkeys(batch, P(None, axes)) | {"of_row": P()}
    split = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs))
    want = jax.tree.map(np.asarray, to_zigzag(batch, devices))
    assert_each_leaf(np.testing.assert_array_equal, split(batch), jax.tree.map(np.asarray, values_of(want)))
    assert_each_leaf(np.testing.assert_array_equal, split(to_zigzag(batch, devices)), values_of(want))
    sent = [eqn for _, eqn in equations(jax.make_jaxpr(split)(batch)) if eqn.primitive.name == "ppermute"]
    assert len(sent) == 2 * 3  # of integers, floats and booleans


def values_of(batch):
    return {name: getattr(leaf, "value", leaf) for name, leaf in batch.items()}


def test_jit_cache_of_an_inner_function_distinguishes_layouts(mesh):
    """The trace cache of ``jit`` distinguishes layouts: an inner function is traced once per layout."""

    @jax.jit
    def positions(x):
        return x + context_positions(x.shape[1], "cp")

    def local(x, layout):
        with in_layout(x, layout) as x:
            return positions(jnp.zeros_like(x))

    for layout in (*LAYOUTS, *LAYOUTS):
        split = jax.shard_map(lambda x, how=layout: local(x, how), mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
        want = zigzag_order(16, 4) if layout == "zigzag" else np.arange(16)
        np.testing.assert_array_equal(split(jnp.zeros((2, 16)))[0], want)


# --------------------------------------------------------------------------------------------------------------- errors
