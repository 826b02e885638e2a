"""Tests of the numbers in states of optimizers and in metrics of a step: their shapes, dtypes and first values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xlstm_jax.distributed import with_ema
from xlstm_jax.distributed.metrics import BinnedRanking
from xlstm_jax.distributed.metrics.reductions import _means, _sum_dtype
from xlstm_jax.distributed.optimizers import muon, skip_nonfinite, with_leaf_norms
from xlstm_jax.distributed.optimizers.learning_rate import learning_rates
from xlstm_jax.distributed.optimizers.norms import global_norm
from xlstm_jax.distributed.training.accumulation import MinibatchResult, Partial, mean_over, rows_at, split_rows
from xlstm_jax.distributed.training.auxiliary import _as_mean

PARAMS = {"w": jnp.ones((4, 2), jnp.bfloat16)}


@pytest.mark.parametrize(
    "tx, counts",
    [
        (with_ema(optax.sgd(0.1), 0.9), 1),
        (with_leaf_norms(optax.sgd(0.1)), 1),
        (skip_nonfinite(optax.sgd(0.1)), 2),
        (muon(0.1), 2),  # and one of its schedule
    ],
    ids=["with_ema", "with_leaf_norms", "skip_nonfinite", "muon"],
)
def test_counts_in_states_are_scalars_of_32_bits(tx, counts):
    leaves = [
        leaf for leaf in jax.tree.leaves(jax.eval_shape(tx.init, PARAMS)) if jnp.issubdtype(leaf.dtype, jnp.integer)
    ]
    assert {(leaf.shape, leaf.dtype) for leaf in leaves} == {((), np.dtype(np.int32))}
    assert len(leaves) >= counts


def test_norms_and_learning_rates_are_scalars_of_float32():
    for tree in ({}, {"w": np.ones(2, np.int32)}, PARAMS):
        norm = jax.eval_shape(global_norm, tree)
        assert (norm.shape, norm.dtype) == ((), np.float32)
    over = jax.vmap(lambda _: global_norm({}), axis_name="a")
    assert jax.eval_shape(over, np.zeros(2)).dtype == np.float32
    rates = jax.eval_shape(lambda: learning_rates({"a": lambda n: jnp.bfloat16(n), "b": lambda n: 1e-3}, (), 3))
    assert {name: (x.shape, x.dtype) for name, x in rates.items()} == {
        f"learning_rate/{group}": ((), np.dtype(np.float32)) for group in "ab"
    }
    fine = learning_rates(lambda n: n / 3, (), 1)["learning_rate"]
    assert fine == np.float32(1 / 3)


@pytest.mark.parametrize(
    "leaf, dtype",
    [
        (np.True_, np.float32),
        (jnp.ones(2, jnp.bfloat16), np.float32),
        (np.float16(1), np.float32),
        (2.5, np.float32),
        (np.complex64(1j), np.complex64),
    ],
)
def test_numbers_beside_the_loss_are_averaged_in_float32_or_wider(leaf, dtype):
    found = _as_mean("x", leaf)
    assert found.dtype == dtype and found.shape == np.shape(leaf)
    for wrong, message in ((np.int8(1), r"aux\['x'\] is an integer \(int8\[\]\)"), ("a", r"aux\['x'\] is 'a', a str")):
        with pytest.raises(TypeError, match=message):
            _as_mean("x", wrong)


def test_means_over_devices_have_the_dtype_of_floats_and_float32_for_integers():
    arrays = [np.int8([1, 3]), np.float16([1, 2]), np.array([True, False])]
    values = [np.stack([x, 0 * x]) for x in arrays]

    def on_device(*xs):
        weight = jnp.where(jax.lax.axis_index("a") == 0, 3, 1)
        nothing = _means(list(xs), ("a",), 0 * weight)
        return _means(list(xs), ("a",), None), _means(list(xs), ("a",), weight), nothing

    equal, weighted, nothing = jax.jit(jax.vmap(on_device, axis_name="a"))(*values)
    for array, x, y, z in zip(arrays, equal, weighted, nothing, strict=True):
        assert {x.dtype, y.dtype} == {np.dtype(np.float16 if array.dtype == np.float16 else np.float32)}
        np.testing.assert_array_equal(x, [array.astype(np.float32) / 2] * 2)
        np.testing.assert_array_equal(y, [array.astype(np.float32) * 3 / 4] * 2)
        assert not z.any()
    assert _means([], ("a",), None) == []
    with pytest.raises(ValueError, match=r"weight has the shape \(2,\)"):
        jax.eval_shape(jax.vmap(lambda x: _means([x], ("a",), np.ones(2)), axis_name="a"), np.zeros(2))
    assert [_sum_dtype(d) for d in (np.bool_, np.int8, np.uint8, jnp.bfloat16, np.float32)] == [
        np.int32, np.int32, np.uint32, jnp.bfloat16, np.float32
    ]  # fmt: skip


def test_scores_are_counted_in_bins_beyond_32767_and_in_the_outermost():
    ranking = BinnedRanking(bins=40_000, low=-1, high=1)
    scores = np.float32([0.9, -0.9, 7, -7, np.nan])
    cells = jax.jit(ranking.observe)(scores, np.array([1, 0, 1, 2, 1]), np.float32([1, 2, 3, 4, 0]))
    found = {name: np.flatnonzero(cell.value).tolist() for name, cell in cells.items()}
    assert found["negative"] == [0, 2_000] and found["positive"] in ([37_999, 39_999], [38_000, 39_999])  # rounded
    assert cells["positive"].value[39_999] == 3 and cells["negative"].value[0] == 4


def test_minibatches_are_numbered_in_32_bits_and_averaged_by_weight():
    seen = []

    def on_minibatch(index, carry):
        seen.append(jnp.result_type(index))
        value = jnp.asarray(index, jnp.float32)
        return MinibatchResult(value.astype(jnp.bfloat16), [2 * value], value, carry + 1, value)

    found = jax.jit(lambda: mean_over(on_minibatch, 4, 0))()
    assert seen and set(seen) == {np.dtype(np.int32)}
    # Weights 0, 1, 2, 3: the mean of the index is (0 + 1 + 4 + 9) / 6.
    assert float(found.values) == np.float32(jnp.bfloat16(14 / 6)) and found.values.dtype == jnp.bfloat16
    assert found.grads[0] == np.float32(28 / 6) and (found.weight, found.carries) == (6, 4)
    assert found.stacked.tolist() == [0, 1, 2, 3]
    alone = mean_over(lambda index, carry: (index, carry), 1, "start")
    assert alone == (0, "start")


def test_rows_of_minibatches_and_sums_without_weight():
    parts = split_rows({"x": np.arange(8).reshape(4, 2), "scalar": 3}, 2)
    assert jax.tree.map(lambda x: np.asarray(x).tolist(), rows_at(parts, 1)) == {"x": [[4, 5], [6, 7]], "scalar": 3}
    none = Partial(np.float32([0, 0]), np.float32(0), None)
    assert none.mean().tolist() == [0, 0]
    running = Partial((np.float32([1]), []), np.float32(2), None)
    more = running + MinibatchResult(np.float16([3]), [], 2, "later")
    assert (more.sums[0].tolist(), more.sums[0].dtype, float(more.weight), more.carries) == (
        [7],
        np.float32,
        4,
        "later",
    )
    assert more.mean()[0].tolist() == [7 / 4]
