"""Tests of pure metric states: exact on uneven counts, monoids, communication in sync only, no overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import AXES, Model, count_collectives, data, fsdp, mesh_of, on_mesh
from xlstm_jax.distributed import DeviceMeshManager, create_train_state, make_train_step
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.metrics import (
    Compose,
    GlobalNorm,
    Max,
    Min,
    Perplexity,
    PureMetric,
    StandardDeviation,
    Sum,
    Throughput,
    WeightedMean,
    make_log_step,
)
from xlstm_jax.distributed.metrics import (
    pure_metric as states,
)
from xlstm_jax.distributed.metrics.cells import Count, Maximum, Minimum, Total, wide_float
from xlstm_jax.distributed.metrics.layout import Layout

ROWS = 6  # per device, padding included
SHARES = [6, 0, 3, 5, 1, 6, 2, 4]  # real rows of each device; one device has no rows
U = 2.0**-24


class MeanSquare(PureMetric):
    """A user's metric, as in the documentation of ``PureMetric``."""

    def identity(self):
        return {"total": Total.identity(), "count": Count.identity()}

    def observe(self, values):
        return {"total": Total.of(values**2), "count": Count.of(values.size)}

    def result(self, state):
        return state["total"].value / jnp.maximum(state["count"].value, 1)


def uneven(updates=3, seed=0):
    """Returns values [u, 8 * ROWS] and weights: fractions on the real rows, 0 on the padding (NaN)."""
    rng = np.random.default_rng(seed)
    real = np.concatenate([np.arange(ROWS) < share for share in SHARES])
    values = rng.normal(2.0, 3.0, (updates, real.size)).astype(np.float32)
    weights = np.where(real, rng.uniform(0.5, 2.0, values.shape), 0).astype(np.float32)
    return np.where(real, values, np.nan).astype(np.float32), weights


def float64(total):
    """Returns both parts of a Total in float64."""
    return np.asarray(total.high, np.float64) + np.asarray(total.low, np.float64)


def run(metric, mesh, axes, check_vma, *arrays):
    """Updates with arrays [u, b] in sequence, each device with its part, and synchronizes."""
    split = P(axes)
    places = (split, *[split] * len(arrays))
    update = on_mesh(metric.update, mesh, check_vma, places, split)
    local = metric.empty(axes, mesh)
    for batch in zip(*arrays, strict=True):
        local = update(local, *batch)
    return on_mesh(metric.sync, mesh, check_vma, split, P())(local)


CASES = {
    "sum": (Sum(), lambda v, w: np.sum(v * w)),
    "max": (Max(), lambda v, w: np.max(v)),
    "min": (Min(), lambda v, w: np.min(v)),
    "mean": (WeightedMean(), lambda v, w: np.sum(v * w) / np.sum(w)),
    "perplexity": (Perplexity(), lambda v, w: np.exp(np.sum(v * w) / np.sum(w))),
}


@pytest.mark.parametrize("metric", [WeightedMean(), Perplexity()], ids=lambda metric: type(metric).__name__)
def test_accumulated_weight_is_the_sum_of_the_weights_of_all_devices(metric):
    values, weights = uneven()
    synced = run(metric, mesh_of(2, 4), AXES, True, values, weights)
    np.testing.assert_allclose(metric.accumulated_weight(synced), weights.astype(np.float64).sum(), rtol=1e-6)
    assert not np.isclose(weights[:, :ROWS].sum(), weights.sum(), rtol=1e-3)  # guard: the first device alone
    both = Compose({"loss": metric, "largest": Max()})
    composed = both.state_of(both.observe(loss=(values, weights), largest=values))
    np.testing.assert_allclose(composed.cells["loss"]["weight"].value, weights.astype(np.float64).sum(), rtol=1e-6)
    with pytest.raises(ValueError, match="the state is that of another metric"):
        metric.accumulated_weight(Max().state_of({}))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dp, fsdp", [(1, 8), (2, 4)])
def test_catalogue_metrics_equal_numpy_on_uneven_shards(dp, fsdp, check_vma):
    metric = Compose({name: case for name, (case, _) in CASES.items()})
    values, weights = uneven()
    split = P(AXES)

    def step(local, v, w):
        return metric.update(local, **dict.fromkeys(CASES, (v, w)))

    mesh = mesh_of(dp, fsdp)
    update = on_mesh(step, mesh, check_vma, (split,) * 3, split)
    local = metric.empty(AXES, mesh)
    for v, w in zip(values, weights, strict=True):
        local = update(local, v, w)
    got = metric.compute(on_mesh(metric.sync, mesh, check_vma, split, P())(local))
    real = weights > 0
    v, w = values[real].astype(np.float64), weights[real].astype(np.float64)
    for name, (_, formula) in CASES.items():
        np.testing.assert_allclose(got[name], formula(v, w), rtol=1e-6, err_msg=name)
        first = weights[:, :ROWS] > 0  # guard: the first device alone has another value
        assert not np.isclose(formula(values[:, :ROWS][first], weights[:, :ROWS][first]), formula(v, w), rtol=1e-3)


@pytest.mark.parametrize("check_vma", [True, False])
def test_global_norm_throughput_and_integer_metrics_equal_numpy(check_vma):
    values, _ = uneven()
    values = np.nan_to_num(values)
    norm = run(GlobalNorm(), mesh_of(2, 4), AXES, check_vma, values)
    np.testing.assert_allclose(GlobalNorm().compute(norm), np.linalg.norm(values.astype(np.float64)), rtol=1e-6)

    items = np.array([SHARES, SHARES[::-1]], np.int32)
    seconds = np.array([[0.5] * 8, [0.25] * 8], np.float32)
    rate = run(Throughput(devices=8), mesh_of(2, 4), AXES, check_vma, items, seconds)
    np.testing.assert_allclose(Throughput(devices=8).compute(rate), items.sum() / 0.75, rtol=1e-6)

    numbers = np.random.default_rng(1).integers(-(2**31), 2**31, (2, 80), dtype=np.int32)
    mask = numbers % 3 > 0
    total = run(Sum(jnp.int32), mesh_of(2, 4), AXES, check_vma, numbers, mask)
    assert int(total.cells.exact()) == int(numbers[mask].astype(np.int64).sum())
    largest = run(Max(jnp.int32), mesh_of(2, 4), AXES, check_vma, -np.abs(numbers | 1), mask)
    assert int(Max(jnp.int32).compute(largest)) == -np.abs(numbers | 1)[mask].min()


@pytest.mark.parametrize("check_vma", [True, False])
def test_global_norm_counts_replicated_leaves_and_a_tensor_parallel_axis_once(check_vma):
    mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 2, "tp": 2})
    rng = np.random.default_rng(0)
    tree = {"kernel": rng.normal(size=(8, 4)).astype(np.float32), "bias": rng.normal(size=(4,)).astype(np.float32)}
    metric = GlobalNorm(axes=("dp", "fsdp"))

    def local(kernel, bias):
        boxed = {"kernel": nn.Partitioned(kernel, ("fsdp", None)), "bias": bias}
        return metric.sync(metric.update(metric.empty(("dp", "fsdp")), boxed))

    synced = on_mesh(local, mesh, check_vma, (P("fsdp"), P()), P())(tree["kernel"], tree["bias"])
    want = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in tree.values()))
    np.testing.assert_allclose(metric.compute(synced), want, rtol=1e-6)
    naive = np.sqrt((tree["kernel"].astype(np.float64) ** 2).sum() * 2 + (tree["bias"] ** 2).sum() * 4)
    assert abs(naive / want - 1) > 0.1  # guard


# -------------------------------------------------------------------------------------------------------------- monoids

# XLA flushes numbers below 1e-38 to 0, and errors of sums are 2^-48 of their terms.
floats = st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-20 else 0.0)
ints = st.integers(-(2**31), 2**31 - 1)
CELLS = {"total": (Total, floats), "count": (Count, ints), "maximum": (Maximum, floats), "minimum": (Minimum, floats)}


def cell_of(kind, numbers):
    cell = kind.identity()
    for x in numbers:
        cell = merge(cell, kind.of(np.int32(x) if kind is Count else np.float32(x)))
    return cell


@jax.jit
def merge(a, b):
    return a.merge(b)


def assert_equal_cells(a, b):
    """Asserts equal leaves by value, without NaN."""
    for (path, y), x in zip(leaves_with_path(b), jax.tree.leaves(a), strict=True):
        assert np.array_equal(x, y), f"{path} is {x} in place of {y}"


@pytest.mark.parametrize("name", CELLS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_merge_is_commutative_and_associative_and_the_identity_neutral(name, data):
    kind, elements = CELLS[name]
    numbers = [data.draw(st.lists(elements, max_size=4)) for _ in range(3)]
    a, b, c = (cell_of(kind, some) for some in numbers)
    assert_equal_cells(merge(a, b), merge(b, a))
    assert_equal_cells(merge(a, kind.identity()), a)
    assert_equal_cells(merge(kind.identity(), a), a)
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    if kind is not Total:
        assert_equal_cells(left, right)
        return
    # Each of four merges errs by at most 3 u^2 of the result, or 3 u^2 of the sizes for different signs.
    size = sum(abs(x) for some in numbers for x in some)
    exact = sum(float(np.float32(x)) for some in numbers for x in some)
    for cell in (left, right):
        assert abs(float(np.float64(cell.high) + np.float64(cell.low)) - exact) <= 15 * 3 * U**2 * size


def test_cells_reduce_all_but_the_kept_dims_and_keep_infinities_dtypes_and_both_halves():
    def sent(cell):
        return cell.from_pieces([piece for _, piece in cell.pieces()])

    @jax.jit
    def cells(x, n, weight, large):
        none = n[:0].astype(jnp.int8)
        exact = Total.of(large).merge(Total.of(1.0))  # 2^25 + 1, of which high has 2^25
        return {
            "total, kept": (Total.of(x, keep=1).value, [3, 5, 7]),
            "total, weighted": (Total.of(x, weight, keep=1).value, [6, 7, 8]),
            "count, kept": (Count.of(n, keep=1).value, [3, 5, -7]),
            "largest, kept": (Maximum.of(n, keep=1).value, [3, 4, -2]),
            "smallest, kept": (Minimum.of(n, keep=1).value, [0, 1, -5]),
            "largest of none": (Maximum.of(none, keep=1).value, [-128] * 3),
            "smallest of none": (Minimum.of(none).value, 127),
            "infinity, sent": (sent(Total.of(x * jnp.inf, keep=1)).value[1:], [np.inf, np.inf]),
            "infinity, lower half": (Total.of(jnp.inf * x[1]).pieces()[1][1], 0),
            "low part, sent": (sent(exact).low + (sent(exact).high - large), 1),
            "both limbs, sent": (sent(Count.of(n[0] * 70000)).low, np.uint32(-70000 & 0xFFFFFFFF)),
            "largest, of the state's dtype": (
                Maximum.identity((), jnp.int32).merge(Maximum(jnp.int8(3))).value.astype(jnp.float32),
                3,
            ),
        }

    found = cells(
        jnp.arange(6.0).reshape(2, 3), jnp.array([[0, 1, -2], [3, 4, -5]]), jnp.array([-1, 2]), jnp.float32(2**25)
    )
    for name, (got, want) in found.items():
        np.testing.assert_array_equal(got, want, f"{name}: another value")
    merged = jax.eval_shape(lambda a, b: Maximum(a).merge(Maximum(b)), jnp.int8(1), jnp.int32(2))
    sums = jax.eval_shape(lambda x: Maximum(x).from_pieces([x.astype(jnp.int32)]), jnp.bool_(True))
    assert (merged.value.dtype, sums.value.dtype) == (jnp.int8, bool), "a cell changes its dtype"


def test_layouts_differ_by_name_shape_and_type_of_the_cells_and_cast_to_their_dtypes():
    cells = {"a": Total.identity((2,)), "b": Maximum.identity((), jnp.int8)}
    layout = Layout(cells)
    others = [
        {**cells, "a": Total.identity((3,))},
        {**cells, "b": Minimum.identity((), jnp.int8)},
        {**cells, "b": Maximum.identity((), jnp.int32)},
        {"c": cells["a"], "b": cells["b"]},
    ]
    assert layout == Layout(dict(reversed(cells.items()))), "the order of names counts"
    assert all(layout != Layout(other) for other in others), "a state of other cells would be taken for this state"
    packed = jax.eval_shape(lambda x: layout.pack({"b": Maximum(x)}, cells), jnp.int32(7))
    assert {x.dtype.name: x.shape for x in packed.values()} == {"float32": (4,), "int8": (1,)}, "a cell keeps its dtype"


def test_cells_are_importable_from_the_metrics_package():
    from xlstm_jax.distributed import metrics

    for cell in (Total, Count, Maximum, Minimum):
        assert getattr(metrics, cell.__name__) is cell


def test_max_and_min_identities_are_the_extreme_values_of_the_dtype():
    assert float(Max().compute(Max().state_of({}))) == -np.inf
    assert float(Min().compute(Min().state_of({}))) == np.inf
    assert int(Max(jnp.int32).compute(Max(jnp.int32).state_of({}))) == np.iinfo(np.int32).min
    assert int(Min(jnp.int8).compute(Min(jnp.int8).state_of({}))) == 127
    assert not bool(Maximum.identity((), bool).value) and bool(Minimum.identity((), bool).value)


@pytest.mark.parametrize("metric", [*[case for case, _ in CASES.values()], GlobalNorm(), Throughput(), Sum(jnp.int32)])
def test_compute_of_an_empty_metric_returns_the_declared_value(metric):
    value = float(metric.compute(metric.state_of({})))
    assert not np.isnan(value)
    if isinstance(metric, WeightedMean) and not isinstance(metric, Perplexity):
        assert value == 0 and float(WeightedMean(-1.0).compute(metric.state_of({}))) == -1


def test_nan_and_infinity_propagate_to_computed_metrics():
    for values, want in (([1, np.inf], np.inf), ([1, -np.inf, 3], -np.inf), ([np.nan, 1], np.nan)):
        split = np.array(values + [0] * (8 - len(values)), np.float32)[None]
        for metric in (Sum(), WeightedMean(), Max() if want != -np.inf else Min()):
            got = metric.compute(run(metric, mesh_of(1, 8), AXES, True, split))
            np.testing.assert_array_equal(got, np.float32(want))


# --------------------------------------------------------------------------------------------------------- collectives


TWENTY = Compose(
    {f"m{i}": [Sum(), WeightedMean(), Perplexity(), Max(), Min()][i % 5] for i in range(20)}
    | {"n": Sum(jnp.int32), "top": Max(jnp.int32)}
)


@pytest.fixture(params=["gathered", "reduced"])
def way(request, monkeypatch):
    """Selects the way to synchronize: small states are gathered from all devices, larger states reduced."""
    if request.param == "reduced":
        monkeypatch.setattr(states, "GATHER_BYTES", 0)
    return request.param


@pytest.mark.one_in(3)
@pytest.mark.parametrize("check_vma", [True, False])
def test_sync_takes_a_single_gather_or_four_reductions_and_update_no_collective(way, check_vma):
    mesh, split = mesh_of(2, 4), P(AXES)
    local = TWENTY.empty(AXES, mesh)

    def step(local, v):
        return TWENTY.update(local, n=v.size, top=v.astype(jnp.int32), **{f"m{i}": v for i in range(20)})

    update = on_mesh(step, mesh, check_vma, (split, split), split).lower(local, jnp.ones(8))
    assert count_collectives(update.as_text()) == 0 and count_collectives(update.compile().as_text()) == 0
    # sums of float32, sums of the uint32 limbs of counts, maxima, minima (float32 and int32 both travel as int32)
    want = 1 if way == "gathered" else 4
    sync = on_mesh(TWENTY.sync, mesh, check_vma, split, P()).lower(local)
    assert count_collectives(sync.as_text()) == want and count_collectives(sync.compile().as_text()) == want

    def one_by_one(local):
        return [metric.sync(metric.empty(AXES)) for metric in TWENTY.metrics.values()]

    apart = on_mesh(one_by_one, mesh, check_vma, split, P()).lower(local)
    assert count_collectives(apart.as_text()) == 22  # guard: unfused collectives are counted


@pytest.mark.parametrize("check_vma", [True, False])
def test_gathered_and_reduced_sync_agree_with_numpy(way, check_vma):
    """Both ways to synchronize equal NumPy: sums of any size, NaN, infinities, counts beyond 32 bits, bools."""
    # Merged in pairs, or summed as halves of 12 bits, which is exact to a pair only for values of similar size.
    error = 8 * {"gathered": 3 * U**2, "reduced": U}[way]
    rng = np.random.default_rng(0)
    floats = (rng.normal(size=8) * 10.0 ** rng.integers(-20, 20, 8)).astype(np.float32)
    metric = Compose(
        {"sum": Sum(), "inf": Sum(), "nan": Max(), "min": Min(), "n": Sum(jnp.int32), "any": Max(bool)}
        | {"half": Max(jnp.bfloat16), "small": Min(jnp.int8)}
    )

    def local(v, i):
        state = metric.empty(AXES)
        seen = {"sum": v, "inf": jnp.where(i == 3, jnp.inf, v), "nan": jnp.where(i == 5, jnp.nan, v), "min": v}
        cells = metric.observe(**seen, any=i == 2, half=i.astype(jnp.bfloat16), small=-i.astype(jnp.int8))
        cells["n"] = Count.of(2**40 + 3).merge(Count.of(-i))
        state = state.replace(vectors=jax.tree.map(lambda x: x[None], metric.state_of(cells).vectors))
        return metric.sync(collectives.to_varying(state, AXES))

    synced = on_mesh(local, mesh_of(2, 4), check_vma, (P(AXES),) * 2, P())(floats, np.arange(8, dtype=np.int32))
    exact, cells = floats.astype(np.float64), synced.cells
    assert abs(float64(cells["sum"]) - exact.sum()) <= error * np.abs(exact).sum()
    assert int(cells["n"].exact()) == 8 * (2**40 + 3) - 28
    got = metric.compute(synced)
    assert np.isinf(got["inf"]) and np.isnan(got["nan"]) and float(got["min"]) == floats.min()
    assert bool(got["any"]) and float(got["half"]) == 7 and int(got["small"]) == -7
    assert (got["any"].dtype, got["half"].dtype, got["small"].dtype) == (bool, jnp.bfloat16, jnp.int8)


def test_merged_totals_keep_rounding_errors_and_counts_keep_signs():
    """1 is lost in a float32 sum of 2^25, and -3 has a carry from the lower 32 bits to the upper 32."""

    @jax.jit
    def merged(large, one, count):
        total = Total(large, jnp.zeros_like(large)).merge(Total(one, jnp.zeros_like(one)))
        return total.merge(Total(-large, jnp.zeros_like(large))), Count.of(count).merge(Count.of(2**33))

    total, count = merged(np.float32(2**25), np.float32(1), np.int32(-3))
    assert float(total.value) == 1 and np.float32(2**25) + np.float32(1) == np.float32(2**25)
    assert int(count.exact()) == 2**33 - 3


def test_small_state_merges_the_rows_of_all_devices():
    values, metric = np.arange(1, 9, dtype=np.float32), Sum()

    def local(values):
        return metric.sync(metric.update(metric.empty(AXES), values))

    assert float(metric.compute(on_mesh(local, mesh_of(2, 4), True, P(AXES), P())(values))) == 36


def test_sync_reduces_a_state_too_large_to_gather():
    class Wide(MeanSquare):
        def identity(self):
            return {"total": Total.identity((states.GATHER_BYTES // 64 + 1,)), "count": Count.identity()}

    split = P(AXES)
    sync = on_mesh(Wide().sync, mesh_of(2, 4), True, split, P()).lower(Wide().empty(AXES, mesh_of(2, 4)))
    assert "all_gather" not in sync.as_text() and count_collectives(sync.as_text()) == 2


def test_state_has_a_vector_per_dtype_for_any_number_of_metrics():
    shapes = {name.split("-")[0]: x.shape for name, x in TWENTY.empty().vectors.items()}
    assert shapes == {"float32": (1, 2 * 20 + 4 + 4), "int32": (1, 1), "uint32": (1, 2)}
    assert jax.tree.structure(TWENTY.empty().cells) == jax.tree.structure(TWENTY.identity())
    named = Compose({"train/loss": WeightedMean(), "train": Sum()})  # not taken apart
    assert jax.tree.structure(named.empty().cells) == jax.tree.structure(named.identity())


# -------------------------------------------------------------------------------------------------------- large numbers


def test_float_sum_stays_exact_beyond_2_to_the_24():
    add = jax.jit(lambda s, n: jax.lax.fori_loop(0, n, lambda _, s: Sum().update(s, 1.0), s))
    state = add(Sum().as_local(Sum().state_of(Total.of(2.0**24 - 10)), "fsdp", mesh_of(1, 1)).replace(axes=()), 1000)
    assert float64(state.cells)[0] == 2**24 + 990
    assert np.float32(2**24) + np.float32(1) == 2**24  # guard: float32 alone stops at 2^24


@pytest.mark.parametrize("check_vma", [True, False])
def test_ten_billion_samples_are_counted_and_averaged(check_vma):
    """Count and mean stay exact for 1.25e9 samples on each of eight devices, and a few more steps."""
    mesh, split = mesh_of(1, 8), P(AXES)
    metric = Compose({"n": Sum(jnp.int32), "mean": WeightedMean()})
    before = {"n": Count.of(1_250_000_001), "mean": {"total": Total.of(1.25e9), "weight": Total.of(1.25e9)}}
    local = metric.as_local(metric.state_of(before), AXES, mesh)
    local = local.replace(vectors=jax.tree.map(lambda x: jnp.tile(x[:1], (8, 1)), local.vectors))

    def steps(local, v):
        def one(local, v):
            return metric.update(local, n=1, mean=v), None

        return jax.lax.scan(one, local, v)[0]

    local = on_mesh(steps, mesh, check_vma, (split, split), split)(local, jnp.full(8 * 1000, 3.0))
    synced = on_mesh(metric.sync, mesh, check_vma, split, P())(local)
    cells = synced.cells
    assert int(cells["n"].exact()) == 8 * (1_250_000_001 + 1000)
    assert float64(cells["mean"]["total"]) == 8 * (1.25e9 + 3000)
    assert float64(cells["mean"]["weight"]) == 8 * (1.25e9 + 1000)
    assert np.float32(1.25e9) + np.float32(1) == np.float32(1.25e9)  # guard


def test_sync_of_sums_of_similar_size_loses_no_precision(way):
    """Sums of similar size stay exact: gathers merge pairs; reductions send halves, whose sums are exact."""
    del way
    values = (1e8 + np.random.default_rng(0).uniform(0, 1e8, 8)).astype(np.float32)
    total = float64(run(Sum(), mesh_of(1, 8), AXES, True, values[None]).cells)
    exact = values.astype(np.float64).sum()
    assert abs(total - exact) <= 8 * 2.0**-36 * exact
    assert abs(float(np.float32(exact)) - exact) > 8 * 2.0**-36 * exact  # guard: a single float32 would err more


def test_count_merges_integers_of_any_sign_and_size():
    numbers = [0, 1, -1, 2**31 - 1, -(2**31), 2**40 + 3, -(2**40) - 3]
    for x in numbers:
        for y in numbers:
            cell = Count.of(x).merge(Count.of(y))
            assert int(cell.exact()) == x + y
            assert float(cell.value) == pytest.approx(x + y, rel=2 * U)
            assert int(cell.from_pieces([3 * piece for _, piece in cell.pieces()]).exact()) == 3 * (x + y)
    assert int(Count.of(np.array([5, -7], np.int32)).exact()) == -2
    quarters = [jnp.uint32(x) for x in (0x1FFFF, 0xFFFF, 0, 0)]  # the first carry causes the second
    assert int(cell.from_pieces(quarters).exact()) == 0x1FFFF + (0xFFFF << 16)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_count_of_numpy_integers_beyond_32_bits_is_exact(dtype):
    large = dtype(3 * 2**32 + 5)
    assert int(jnp.asarray(large)) == 5  # guard: JAX drops the upper 32 bits
    assert int(Count.of(large).exact()) == 3 * 2**32 + 5
    assert int(Count.of(np.array([large, large]), weight=np.array([2, 1])).exact()) == 3 * (3 * 2**32 + 5)
    assert int(Count.of(np.int64(-(2**40) - 3)).exact()) == -(2**40) - 3
    tokens = Throughput(devices=2)
    assert float(tokens.result(tokens.observe(large, 0.5))) == pytest.approx(4 * int(large), rel=2 * U)


def test_global_norm_counts_the_absolute_value_of_complex_entries():
    norm = GlobalNorm()
    assert float(norm.result(norm.observe({"a": jnp.array([3 + 4j]), "b": jnp.array([12.0])}))) == 13


TRUNCATED = {
    "complex sum": (Sum(), jnp.ones(2, jnp.complex64)),
    "complex mean": (WeightedMean(), jnp.ones(2, jnp.complex64)),
    "complex deviation": (StandardDeviation(), jnp.ones(2, jnp.complex64)),
    "complex largest": (Max(), jnp.ones(2, jnp.complex64)),
    "fraction": (Max(jnp.int32), jnp.array([2.7])),
    "infinity": (Min(jnp.int32), jnp.array([jnp.inf])),
}


@pytest.mark.parametrize("metric, values", TRUNCATED.values(), ids=TRUNCATED)
def test_metrics_raise_for_values_that_their_dtype_would_truncate(metric, values):
    with pytest.raises(TypeError, match=r"complex64.*imaginary parts would be lost|which it would truncate"):
        metric.observe(values)


def test_layout_raises_for_a_cell_that_its_dtype_would_truncate():
    cells = {"largest": Maximum.identity((), jnp.int32)}
    with pytest.raises(TypeError, match="largest is a Maximum of dtype int32, and float32 was observed"):
        Layout(cells).pack({"largest": Maximum.of(jnp.array([2.7]))}, cells)


def test_metric_floats_and_counts_have_64_bits_with_enable_x64():
    with jax.enable_x64(True):
        mean = WeightedMean()
        state = mean.update(mean.empty(), jnp.array([1.0, 2.0**-40], jnp.float64))
        assert float(mean.compute_local(state)[0]) == (1 + 2.0**-40) / 2
        count = Sum(jnp.int64)
        state = count.update(count.update(count.empty(), 2**40 + 1), jnp.array([2**40, -5]))
        value = count.compute_local(state)
        assert value.dtype == jnp.int64 and int(value[0]) == 2**41 - 4


def test_metrics_accumulate_floats_of_64_bits_with_enable_x64():
    assert wide_float() == np.float32  # guard
    with jax.enable_x64(True):
        assert wide_float() == np.float64
        mean = WeightedMean()
        state = jax.eval_shape(lambda values: mean.update(mean.empty(), values), np.zeros(2, np.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {np.dtype(np.float64)}


# ----------------------------------------------------------------------------------------- wrong axes, types and states


@pytest.mark.parametrize("check_vma", [True, False])
def test_metrics_count_values_replicated_along_another_axis_once(check_vma):
    mesh = DeviceMeshManager.create_device_mesh({"dp": 4, "tp": 2})
    v = np.arange(8, dtype=np.float32)
    metric = Compose({"sum": Sum(), "n": Sum(jnp.int32)})

    def local(v):
        return metric.sync(metric.update(metric.empty("dp"), sum=v, n=v.size))

    got = metric.compute(on_mesh(local, mesh, check_vma, P("dp"), P())(v))
    assert float(got["sum"]) == v.sum() and float(got["n"]) == 8
    kept = metric.empty("dp", mesh)
    kept = on_mesh(lambda s, v: metric.update(s, sum=v, n=v.size), mesh, check_vma, (P("dp"),) * 2, P("dp"))(kept, v)
    got, _ = make_log_step(metric, mesh, "dp")(kept)
    assert float(got["sum"]) == v.sum() and float(got["n"]) == 8


def test_metric_calls_raise_for_the_wrong_kind_of_state_or_argument():
    metric, mesh = WeightedMean(), mesh_of(1, 8)
    local = metric.empty(AXES, mesh)
    synced = metric.state_of({})
    with pytest.raises(TypeError, match=r"compute got a Local.*sync\(state\) first, or compute_local"):
        metric.compute(local)
    with pytest.raises(TypeError, match=r"update takes a Local state, not Synced\. Convert it with as_local"):
        metric.update(synced, 1.0)
    with pytest.raises(TypeError, match="merge of Local and Synced"):
        metric.merge(local, synced)
    with pytest.raises(ValueError, match=r"over the axes \('dp', 'fsdp'\) and \('fsdp',\)"):
        metric.merge(local, metric.empty("fsdp", mesh))
    with pytest.raises(ValueError, match=r"holds the values of 8 devices. Call this inside shard_map"):
        metric.update(local, 1.0)
    with pytest.raises(ValueError, match=r"outside of shard_map it needs mesh=\): 'dp' is not a bound mesh axis"):
        metric.empty(AXES)
    with pytest.raises(ValueError, match="there is no metric 'los' among"):
        Compose({"loss": metric}).update(Compose({"loss": metric}).empty(), los=1.0)
    with pytest.raises(TypeError, match="a count of integers got values of dtype float32"):
        Sum(jnp.int32).update(Sum(jnp.int32).empty(), 1.5)
    with pytest.raises(ValueError, match=r"weight of shape \(3,\) does not fit values of shape \(2,\)"):
        metric.update(metric.empty(), jnp.ones(2), jnp.ones(3))
    assert metric.compute_local(local).shape == (8,)


# ------------------------------------------------------------------------------------------ jit, pmap, scan, train step


def test_metric_state_under_plain_jit_accumulates_global_arrays():
    values, weights = uneven()
    place = NamedSharding(mesh_of(2, 4), P(AXES))
    update = jax.jit(WeightedMean().update, donate_argnums=0)
    state = WeightedMean().empty()
    for v, w in zip(values, weights, strict=True):
        state = update(state, jax.device_put(v, place), jax.device_put(w, place))
    got = jax.jit(lambda s: WeightedMean().compute(WeightedMean().sync(s)))(state)
    real = weights > 0
    np.testing.assert_allclose(got, np.average(values[real], weights=weights[real]), rtol=1e-6)


def test_metric_state_updates_and_syncs_inside_pmap():
    metric = Compose({"mean": WeightedMean(), "max": Max()})
    step = jax.pmap(lambda s, v, w: metric.update(s, mean=(v, w), max=(v, w)), axis_name="batch")
    state = jax.pmap(lambda _: metric.empty("batch"), axis_name="batch")(np.arange(8))
    values, weights = (x.reshape(3, 8, ROWS) for x in uneven())
    for v, w in zip(values, weights, strict=True):
        state = step(state, v, w)
    got = jax.pmap(lambda s: metric.compute(metric.sync(s)), axis_name="batch")(state)
    real = weights > 0
    np.testing.assert_allclose(got["mean"], np.full(8, np.average(values[real], weights=weights[real])), rtol=1e-6)
    np.testing.assert_allclose(got["max"], np.full(8, values[real].max()))


@pytest.mark.parametrize("check_vma", [True, False])
def test_metric_state_is_carried_through_lax_scan(check_vma):
    metric = Compose({"mean": WeightedMean(), "n": Sum(jnp.int32), "max": Max()})

    def local(v):
        def body(state, x):
            return metric.update(state, mean=x, n=1, max=x), None

        return metric.sync(jax.lax.scan(body, metric.empty(AXES), v)[0])

    v = np.arange(40, dtype=np.float32)
    got = metric.compute(on_mesh(local, mesh_of(2, 4), check_vma, P(AXES), P())(v))
    assert (float(got["mean"]), float(got["n"]), float(got["max"])) == (19.5, 40, 39)


def test_log_step_returns_the_values_and_an_empty_state():
    mesh, metric = mesh_of(1, 2), Sum(jnp.int32)
    log_step = make_log_step(metric, mesh, AXES)
    first, emptied = log_step(metric.as_local(metric.state_of(Count.of(jnp.int32(7))), AXES, mesh))
    second, _ = log_step(emptied)
    assert (int(first), int(second)) == (7, 0)


def observed_loss(params, apply_fn, batch, rng):
    error = jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2, axis=-1)
    return error.mean(), {"error": (error, batch["weight"]), "square": batch["x"], "n": error.size}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("num_minibatches", [2, 1])
def test_train_step_carries_a_metric_state_without_additional_collectives(check_vma, num_minibatches):
    mesh, metric = mesh_of(2, 4), Compose({"error": WeightedMean(), "square": MeanSquare(), "n": Sum(jnp.int32)})
    batch = data(batch=32)
    model = Model(wrap=fsdp)
    options = {"num_minibatches": num_minibatches, "check_vma": check_vma}
    step = make_train_step(observed_loss, mesh, AXES, metric=metric, **options)
    state = create_train_state(model, optax.sgd(0.0), mesh, jax.random.key(0), batch["x"], batch_axes=AXES)
    plain = make_train_step(lambda *args: observed_loss(*args)[0], mesh, AXES, **options)
    local, rng = metric.empty(AXES, mesh), jax.random.key(1)
    with_metric = count_collectives(step.lower(state, batch, rng, local).as_text())
    assert with_metric == count_collectives(plain.lower(state, batch, rng).as_text()) > 0

    for _ in range(2):
        donated = local
        state, metrics, local = step(state, batch, rng, local)
        assert not [path for path, leaf in leaves_with_path(donated) if not leaf.is_deleted()]
    got, emptied = make_log_step(metric, mesh, AXES)(local)
    error = np.mean((np.asarray(model.apply({"params": state.params}, batch["x"])) - np.asarray(batch["y"])) ** 2, -1)
    np.testing.assert_allclose(got["error"], np.average(error, weights=batch["weight"]), rtol=1e-5)
    np.testing.assert_allclose(got["square"], np.mean(np.asarray(batch["x"], np.float64) ** 2), rtol=1e-6)
    assert float(got["n"]) == 64 and float(metrics["loss"]) == pytest.approx(error.mean(), rel=1e-5)
    _, _, local = step(state, batch, rng, emptied)
    assert step._cache_size() == 1, "the step was compiled again for the emptied state"
    assert float(make_log_step(metric, mesh, AXES)(local)[0]["n"]) == 32


@pytest.mark.one_in(2)
@pytest.mark.parametrize("devices", [4, 8])
def test_metric_state_resumes_from_a_checkpoint_on_any_number_of_devices(tmp_path, devices):
    metric = Compose({"mean": WeightedMean(), "max": Max(), "n": Sum(jnp.int32)})
    values, weights = uneven()
    split = P(AXES)

    def add(mesh, local, v, w):
        step = on_mesh(lambda s, v, w: metric.update(s, mean=(v, w), max=(v, w), n=1), mesh, True, (split,) * 3, split)
        return step(local, v, w)

    def sync(mesh, local):
        return on_mesh(metric.sync, mesh, True, split, P())(local)

    first, second = mesh_of(2, 4), mesh_of(devices // 4, 4)
    local = add(first, metric.empty(AXES, first), values[0], weights[0])
    whole = add(first, local, values[1], weights[1])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"step": jnp.int32(7), "metrics": sync(first, local)})
        checkpointer.wait_until_finished()
        target = {"step": jnp.int32(0), "metrics": metric.state_of({})}
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(jnp.asarray, target))
    resumed = add(second, metric.as_local(restored["metrics"], AXES, second), values[1], weights[1])
    got, want = metric.compute(sync(second, resumed)), metric.compute(sync(first, whole))
    np.testing.assert_allclose(got["mean"], want["mean"], rtol=1e-6)
    assert float(got["max"]) == float(want["max"]) and float(got["n"]) == 8 + devices


def test_counts_are_merged_under_strict_promotion_of_dtypes():
    most = Count(jnp.uint32([0]), jnp.uint32([2**32 - 1]))
    with jax.numpy_dtype_promotion("strict"):
        both = most.merge(most)
    assert (both.high.tolist(), both.low.tolist()) == ([1], [2**32 - 2])


def test_weighted_counts_are_exact_under_strict_promotion_of_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        count = Count.of(np.array([1, 2**20 + 1, -3]), np.array([2, 65535, 4]))
    assert int(count.exact()) == 2 + 65535 * (2**20 + 1) - 12
