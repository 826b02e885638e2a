"""Tests of the numbers that check_step compares: tolerances, ratios, perturbed inputs and constant draws, by hand."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlstm_jax.distributed.training.step_check import comparison, draws, one_device, update
from xlstm_jax.distributed.training.step_check.comparison import NO_RATIO, compare_leaves, same_number

KEY = jax.random.key(0)


def never():
    raise AssertionError("the loss is computed once more, and need not be")


def arrays(**leaves):
    return {path: np.array(values, np.float64) for path, values in leaves.items()}


# ------------------------------------------------------------------------------------------------- gradients and losses


def test_ratio_rest_and_tolerance_of_each_leaf_are_those_of_least_squares():
    right = arrays(a=[3, 4], b=[0, 0, 12])
    got = arrays(a=[2 * 3 + 2, 2 * 4 - 1.5], b=[0, 0, 6])  # twice the first, and a rest of norm 2.5
    eps, wire = 1e-4, {"a": 0.25}
    a, b = compare_leaves(got, right, {"a": ("fsdp",)}, wire, lambda: arrays(a=[3.01, 4], b=[0, 0, 12]), eps)
    typical = 13 / math.sqrt(5)  # norm and number of all values
    known = 64 * eps * 5 + 4 * eps * typical * math.sqrt(2) + 0.25 + 8 * 0.01
    assert a[:2] == ("a", ("fsdp",)) and a[2:5] == pytest.approx((2, 0.5, known / 5))
    assert b[:2] == ("b", ()) and b[2:5] == pytest.approx((0.5, 0, 64 * eps + 4 * eps * typical * math.sqrt(3) / 12))
    assert not (a.copies_differ or a.differ_along or a.is_only_rounding)


def test_leaves_within_the_cheap_bound_are_not_computed_once_more():
    right = arrays(a=[3, 4])
    (leaf,) = compare_leaves(right, right, {}, {}, never, 1e-6)
    assert leaf[2:5] == pytest.approx((1, 0, 64e-6 + 4e-6)) and leaf.is_equal
    compare_leaves(arrays(a=[3, 5]), right, {}, {"a": 1.0}, never, 0.0)  # the difference is as large as the bound
    with pytest.raises(AssertionError, match="once more"):
        compare_leaves(arrays(a=[3, 5.001]), right, {}, {"a": 1.0}, never, 0.0)
    (leaf,) = compare_leaves(arrays(a=[math.nan, 4]), right, {}, {"a": 1.0}, lambda: right, 0.0)
    assert not leaf.is_equal
    assert compare_leaves({}, {}, {}, {}, never, 1e-6) == []


@pytest.mark.parametrize("allowed, second, ratio", [(5.0, 8.0, 1.0), (5.0, 8.5, math.inf), (4.9, 8.0, 2.0)])
def test_gradient_of_at_most_its_rounding_has_the_ratio_1_up_to_twice_the_rounding(allowed, second, ratio):
    right = arrays(z=[3, 4])
    (leaf,) = compare_leaves(arrays(z=[6, second]), right, {}, {"z": allowed}, lambda: right, 0.0)
    assert (leaf.ratio, leaf.error, leaf.is_only_rounding) == (ratio, 0, allowed == 5)
    assert leaf.is_only_rounding == (leaf.tolerance == NO_RATIO)


def test_leaf_is_equal_up_to_its_tolerance_of_ratio_and_rest_together():
    leaf = comparison.LeafCheck("w", (), 1.3, 0.4, 0.5)
    assert leaf.is_equal and not leaf._replace(error=0.41).is_equal and not leaf._replace(ratio=0.69).is_equal


def test_same_number_allows_rounding_and_then_the_change_of_perturbed_inputs():
    eps = 2**-10  # 64 eps of 2 are 1/8
    assert same_number(-2.125, -2.0, never, eps) == (True, 1 / 16)
    assert same_number(-2.25, -2.0, lambda: -2 + 2**-6, eps) == (True, 1 / 8)
    assert same_number(-2.25, -2.0, lambda: -2 - 2**-7, eps) == (False, 3 / 32)
    assert same_number(2.0, -2.0, lambda: -2.0, eps) == (False, 1 / 16)
    assert same_number(0.0, 0.0, never, eps) == (True, 0.0)
    assert same_number(1.0, 0.0, lambda: 0.125, eps) == (True, 0.0)
    assert not same_number(math.nan, 1.0, lambda: 1.0, eps)[0]


@pytest.mark.parametrize(
    "actual, expected, want",
    [
        ([[2, 3]] * 4, [[1, 0]] * 4, (2, 3, 1e-6)),
        ([[0]] * 4, [[0]] * 4, (1, 0, 0)),
        ([[0]] * 3 + [[1]], [[0]] * 4, (math.inf, 0, 0)),
        ([[1], [3], [1], [3]], [[1], [3], [1], [3]], (1, 0, 6 * math.sqrt(8 / 3) / 4)),
        ([[1], [3], [1], [3]], [[1]] * 4, (2, 0, math.sqrt(6 * 4 / 3 / 2) * 2)),
        ([[1, 1], [3, 1], [1, 1], [3, 1]], [[1, 0]] * 4, (2, 1, math.sqrt(6 * 4 / 3 / 2 / math.sqrt(2)) * 2)),
    ],
    ids=["factor and rest", "nothing", "beside nothing", "noise of both", "noise of one", "two values"],
)
def test_ratio_over_keys_has_the_standard_errors_of_two_halves(actual, expected, want):
    found = comparison._ratio(np.array(actual, np.float64), np.array(expected, np.float64))
    if want[0] == 2 and want[1] == 1:  # the error of the ratio alone is larger than that of the rest
        want = (2, 1, max(want[2], 6 * math.sqrt(4 / 3 / 4)))
    assert tuple(found) == pytest.approx(want)


def test_ratio_over_keys_is_unknown_if_halves_of_the_reference_point_apart():
    found = comparison._ratio(np.ones((4, 1)), np.array([[1.0], [1], [-1], [-1]]))
    assert math.isnan(found.value) and found.allowed == math.inf and not found.is_known
    found = comparison._ratio(np.ones((4, 1)), np.array([[1.0], [1], [0], [0]]))  # the product of the halves is 0
    assert math.isnan(found.value)


def test_ratios_end_after_8_keys_that_agree_and_number_keys_from_1():
    keys = []

    def sample(key):
        keys.append(key)
        return {"w": np.array([2.0])}, {"w": np.array([1.0])}

    found, count = comparison.ratios(sample)
    assert (count, keys) == (8, list(range(1, 9))) and found["w"][:2] == (2, 0)


# ------------------------------------------------------------------------------------------------------- one device


def test_perturbed_multiplies_floats_by_1_up_to_eps_and_leaves_the_rest():
    tree = {
        "float": np.arange(1, 17, dtype=np.float32),
        "narrow": np.full(16, 5, jnp.bfloat16),
        "complex": np.full(16, 2j, np.complex64),
        "int": np.arange(3),
        "bool": np.array(True),
        "key": KEY,
    }
    found, again = one_device.perturbed(tree, 0.25), one_device.perturbed(tree, 0.25)
    assert all(found[name] is tree[name] for name in ("int", "bool", "key"))
    for name in ("float", "narrow", "complex"):
        assert (found[name].dtype, found[name].shape) == (tree[name].dtype, tree[name].shape)
        np.testing.assert_array_equal(found[name], again[name])
        change = np.abs(np.asarray(found[name] / tree[name], np.complex64) - 1)
        assert 0.05 < change.max() <= 0.25 and len(set(change.tolist())) > 8, name
    assert np.any(found["float"] < tree["float"]) and np.any(found["float"] > tree["float"])


def test_other_parameters_are_moved_by_half_their_size_or_by_a_tenth():
    given = [np.full(4000, -8, np.float32), np.zeros(4000, np.float16), np.zeros((0, 3), np.float32)]
    large, zeros, empty = one_device._other_parameters(given, 1)
    assert [x.dtype for x in (large, zeros, empty)] == [x.dtype for x in given] and empty.shape == (0, 3)
    assert (large.mean(), large.std()) == (pytest.approx(-8, abs=0.3), pytest.approx(4, rel=0.05))
    assert (zeros.mean(), zeros.std()) == (pytest.approx(0, abs=0.01), pytest.approx(0.1, rel=0.05))
    fine = one_device._other_parameters([np.full(4000, 1 + 2**-7, np.float32)], 2)[0]
    draws_of_seed = np.random.default_rng(2).normal(size=4000)
    np.testing.assert_allclose(fine, (1 + 2**-7) * (1 + draws_of_seed / 2), rtol=1e-5, atol=1e-5)


def test_means_divide_by_the_weight_and_magnitudes_by_its_size():
    grads, sizes = [np.float32([2, -4])], [np.float32([2, 4])]
    loss, (mean,), (size,) = one_device._means(np.float32(6), np.float32(-2), grads, sizes)
    assert (float(loss), mean.tolist(), size.tolist()) == (-3, [-1, 2], [1, 2])
    loss, (mean,), (size,) = one_device._means(np.float32(6), np.float32(0), grads, sizes)
    assert (float(loss), mean.tolist(), size.tolist()) == (6, [2, -4], [2, 4])


def test_key_of_a_slice_is_folded_by_device_and_then_by_minibatch():
    fold = jax.random.fold_in
    assert one_device._key_of({"a": KEY}, 3, 0, 1) == {"a": fold(KEY, 3)}
    assert one_device._key_of({"a": KEY}, 3, 0, 2) == {"a": fold(fold(KEY, 3), 0)}
    assert one_device._key_of({"a": KEY}, 1, 2, 4) == {"a": fold(fold(KEY, 1), 2)}


def test_reference_is_finite_and_has_a_gradient_by_all_of_its_leaves():
    reference = one_device.Reference(1.0, {"a": np.zeros(2), "b": np.zeros(1)}, {}, never)
    assert reference.is_finite and not reference.has_gradient and reference.not_finite == []
    other = reference._replace(grads={"a": np.array([0, np.nan]), "b": np.zeros(1), "c": np.array([np.inf * 1j])})
    assert other.not_finite == ["a", "c"] and not other.is_finite and other.has_gradient
    assert not reference._replace(loss=math.inf).is_finite


# ------------------------------------------------------------------------------------------------------ constant draws


def test_bits_of_a_constant_key_are_the_highest_of_its_word_until_64_splits():
    keys = np.uint32([[splits, 0xDEADBEEF] for splits in (0, 63, 64, 65)])
    with jax.numpy_dtype_promotion("strict"):
        of_keys = jax.jit(lambda keys: [[draws._bits(key, width, (2, 3)) for key in keys] for width in (8, 16, 32)])(
            keys
        )
    for width, found in zip((8, 16, 32), of_keys, strict=True):
        for bits, (splits, word) in zip(found, keys.tolist(), strict=True):
            word = word if splits < 64 else splits * 0x9E3779B9 % 2**32
            assert bits.dtype == f"uint{width}" and bits.tolist() == [[word >> 32 - width] * 3] * 2, (width, splits)


def test_constant_key_counts_its_splits_and_holds_the_fraction_of_32_bits():
    key = draws.constant_key(31 / 32)
    assert jax.random.key_data(key).tolist() == [0, 31 * 2**27] and key.shape == ()
    with jax.numpy_dtype_promotion("strict"):
        keys = jax.random.split(jax.random.split(key, 1)[0], (2, 3))
    assert jax.random.key_data(keys).tolist() == [[[2, 31 * 2**27]] * 3] * 2
    assert jax.random.key_data(draws.constant_key()).tolist() == [0, 2**27]
    assert jax.random.key_data(jax.random.fold_in(key, 5)).tolist() == [0, 31 * 2**27]


def test_constant_like_keeps_the_shape_of_typed_keys_and_makes_one_of_an_old_key():
    tree = {"keys": jax.random.split(KEY, 3), "old": jax.random.PRNGKey(7), "x": np.ones(2), "word": np.uint32(3)}
    found = draws.constant_like(tree, 0.5)
    assert (found["keys"].shape, found["old"].shape) == ((3,), ())
    assert jax.random.key_data(found["keys"]).tolist() == [[0, 2**31]] * 3
    assert jax.random.key_data(found["old"]).tolist() == [0, 2**31]
    assert found["x"] is tree["x"] and found["word"] is tree["word"]


# ----------------------------------------------------------------------------------------------------------- the update


def an_update(new, old, updates, eps=2**-10):
    found = object.__new__(update._Update)
    vars(found).update(new=new, params_seen_by_tx=old, updates=updates, eps=dict.fromkeys(new, eps))
    return found


def test_a_parameter_is_the_sum_of_itself_and_its_update_up_to_the_rounding_of_both():
    of = an_update(arrays(w=[0]), {}, {})
    old, change = np.array([4.0]), np.array([-4.0])  # 2^-10 of both is 2^-7
    assert of.is_sum("w", np.array([2**-7]), old, change) and not of.is_sum("w", np.array([2**-7 * 1.01]), old, change)
    assert of.is_sum("w", np.array([1e-38]), np.zeros(1), np.zeros(1))
    assert not of.is_sum("w", np.array([1e-37]), np.zeros(1), np.zeros(1))
    assert not of.is_sum("w", np.array([0.0, 0]), old, change)
    assert not of.is_sum("w", np.array([np.nan]), old, change)


@pytest.mark.parametrize(
    "new, cause",
    [
        ([10, 20], "they stay as they were"),
        ([12, 18], "they move by 2 x its update"),
        ([9, 21], "they move by -1 x its update"),
        ([5.5, 9.5], "multiplies them by 0.5 after the update"),
        ([21, 39], "adds its update to 2 x the parameters"),
        ([11, 19], ""),
        ([14, 20], ""),
    ],
)
def test_cause_of_wrong_parameters_is_the_factor_that_fits(new, cause):
    of = an_update(arrays(w=new), arrays(w=[10, 20]), arrays(w=[1, -1]), eps=1e-7)
    found = of.multiple(["w"])
    assert cause in found and bool(found) == bool(cause)


def test_cause_of_a_misplaced_parameter_is_its_shape_or_another_leaf():
    of = an_update(
        arrays(a=[3, 5], b=[1, 1], c=[[1]]), arrays(a=[1, 1], b=[2, 4], c=[1]), arrays(a=[1, 1], b=[1, 1], c=[0])
    )
    assert "'a' gets the values of 'b'" in of.misplaced("a")
    assert of.misplaced("b") == ""
    assert "its shape is (1, 1), and was (1,)" in of.misplaced("c") and of.multiple(["a", "c"]) == ""
    assert "off by 2.2 x the norm of its updates" in of.unexplained_difference_text(["a"])  # (1, 3) over (1, 1)


def test_factor_between_two_arrays_is_real_and_fits_to_its_tolerance():
    right = np.array([3.0, 4.0])
    assert update._multiple(-2 * right, right, 0.0) == -2
    assert update._multiple(2j * right, right, 0.5) is None and update._multiple(right * (1 + 1j), right * 1j, 9) == 1
    assert update._multiple(right, np.zeros(2), 1.0) is None
    off = right + np.array([4.0, -3.0]) / 10  # a rest of a tenth
    assert update._multiple(off, right, 0.101) == pytest.approx(1) and update._multiple(off, right, 0.099) is None


def test_values_of_a_state_are_in_double_precision():
    found = update.values_of({"a": np.float32([0.1]), "b": np.complex64([1j]), "c": np.int32([2**25 + 1])})
    assert [x.dtype.name for x in found.values()] == ["float64", "complex128", "float64"]
    assert found["c"] == 2**25 + 1 and found["a"] == np.float64(np.float32(0.1))


def test_same_bits_compares_shapes_and_bytes():
    zero = np.zeros((2, 1), np.float32)
    assert update.same_bits(zero, jnp.zeros((2, 1)))
    assert not update.same_bits(zero, zero.T) and not update.same_bits(zero, -zero)
    assert not update.same_bits({"a": zero}, {"a": zero, "b": zero})
    nan = np.full((2, 1), np.nan, np.float32)
    assert update.same_bits(nan, nan.copy())


def test_words_on_wrong_leaves_are_a_common_ratio_or_the_largest_difference():
    leaf = comparison.LeafCheck("w", (), 2.0, 0.0, 1e-6)
    assert update._times([leaf, leaf]) == "2 x these"
    assert update._times([leaf, leaf._replace(ratio=4.0, error=4.0)]) == "off by up to 5 of their norm"
    assert update._times([leaf._replace(error=0.5)]) == "off by up to 1.1 of their norm"
    assert update._leaves(["a"]) == "1 leaf ('a')" and update._leaves(["a", "b"]).startswith("2 leaves (")


def test_each_leaf_has_the_tolerance_of_its_dtype():
    right = {"w": np.float32([3, 4]), "half": np.full(4, 2.0, jnp.bfloat16)}
    w, half = update.compare_each_leaf(right, right, never, 0.5)
    eps, narrow = 2.0**-23, 2.0**-7
    assert w.tolerance == pytest.approx(64 * eps + 4 * eps, rel=1e-6)
    assert half.tolerance == pytest.approx(64 * eps + 4 * eps + narrow, rel=1e-6)
    (wide,) = update.compare_each_leaf({"w": np.ones(1)}, {"w": np.ones(1)}, never, 1e-12)
    assert wide.tolerance == pytest.approx(68e-12, rel=1e-3)
    (wide,) = update.compare_each_leaf({"w": np.ones(1)}, {"w": np.ones(1)}, never, 0.0)
    assert wide.tolerance == pytest.approx(68 * 2.0**-52, rel=1e-6)


def test_collections_are_compared_by_their_floats_alone():
    right = {"mean": np.float32([1, 2]), "count": np.int32(3), "missing": np.float32(1)}
    before = {"mean": np.float32([0, 1]), "count": np.int32(0)}

    def found(mean, count=3):
        got = {"mean": np.float32(mean), "count": np.int32(count)}
        return " ".join(update.of_collections(got, right, before, lambda: right, 1e-7))

    assert found([1, 2]) == found([1, 2], count=9) == ""
    assert "('mean') stay as they were" in found([0, 1])
    assert "('mean') after the step are not those of one device, but 3 x these" in found([3, 6])


def test_finding_on_counts_is_for_steps_other_than_none_or_one():
    from flax.training.train_state import TrainState

    def found(after, before=3, cls=TrainState):
        states = [cls(step=step, apply_fn=None, params={}, tx=None, opt_state=None) for step in (before, after)]
        of = object.__new__(update._Update)
        vars(of).update(before=states[0], after=states[1])
        return list(of.of_count())

    assert found(3) == found(4) == found(9, cls=SimpleNamespace) == []
    assert [len(found(step)) for step in (2, 5)] == [1, 1] and "it counts itself 2 times" in found(5)[0]


def test_optimizer_of_the_step_is_compared_with_one_device_in_updates_and_then_in_state():
    grads, mu = {"w": np.float32([1, 2])}, {"mu": np.float32([4, 8])}

    def found(updates, state, shaken_updates=0.0, shaken_state=0.0, fails=False):
        of = object.__new__(update._Update)

        def on_one_device():
            if fails:
                raise KeyError("loss")
            shaken = {"w": grads["w"] * (1 + shaken_updates)}, {"mu": mu["mu"] * (1 + shaken_state)}
            return (grads, mu), lambda: shaken, 1e-7

        record = SimpleNamespace(updates={"w": np.float32(updates)}, opt_state={"mu": np.float32([0, 0])})
        after = SimpleNamespace(opt_state=SimpleNamespace(inner={"mu": np.float32(state)}))
        vars(of).update(record=record, after=after, on_one_device=on_one_device)
        return of.of_optimizer()

    right = found([1, 2], [4, 8])
    assert right == ((), (), ("updates", "the optimizer's state"))
    assert "'mu' is 0.25 x" in "".join(found([1, 2], [1, 2]).findings)
    assert "stays as it was" in "".join(found([1, 2], [0, 0]).findings)
    (finding,) = found([3, 6], [1, 2]).findings  # the state of wrong updates is not compared
    assert "updates of 1 leaf ('w') are not those" in finding and "but 3 x these" in finding
    assert not found([1.01, 2.02], [4, 8], shaken_updates=0.01).findings
    assert not found([1, 2], [4.04, 8.08], shaken_state=0.01).findings
    assert found([1.01, 2.02], [4, 8], shaken_state=0.01).findings
    assert found([1, 2], [4.04, 8.08], shaken_updates=0.01).findings
    unknown = found([3, 6], [1, 2], fails=True)
    assert unknown.findings == unknown.compared == () and "(KeyError: 'loss')" in unknown.unknown[0]
