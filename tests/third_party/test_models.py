"""Tests of unedited third-party models: sharded training equals one device: ``make test-models``.

Gradients agree to the rounding of float32, 6e-8 per operation: some 300 operations, as the longest of these models and
the recurrent model have between a parameter and the loss, add up to 2e-5 at most. Adam divides an entry's gradient g
by |g| + eps, so that an error d in a small g moves the step by up to learning_rate * d / eps = 100 d: parameters after
some steps agree to 100 times less than a leaf's largest gradient does, which is 1e-4 of the largest parameter in
leaves that start at zero.
"""

import jax
import numpy as np
import pytest

from tests.third_party import catalogue, compare

GRADIENT_ROUNDING, STEP_ROUNDING = 2e-5, 1e-4


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", catalogue.CASES)
def test_third_party_model_with_shard_modules_matches_a_single_device(name, check_vma):
    if not compare.has_gradient(name, check_vma):
        with pytest.raises(ValueError, match=r"has no gradient of this loss.*check_vma=False"):
            compare.outcome_of(name, check_vma)
        return
    outcome = compare.outcome_of(name, check_vma)
    assert outcome.same_bits
    assert outcome.gradients <= GRADIENT_ROUNDING
    assert outcome.steps <= STEP_ROUNDING
    # A tied embedding is gathered, and its gradient scattered, for the lookup and for the head.
    assert 0 < outcome.split <= outcome.scatters <= outcome.gathers


@pytest.mark.parametrize("name", ["GPT-2", "ViT"])
def test_comparison_detects_the_gradient_of_a_quarter_of_the_batch(name):
    case = catalogue.CASES[name]()
    params, whole, _ = compare.on_one_device(case)
    share = jax.tree.map(lambda x: x[: catalogue.BATCH // 4], case.inputs)
    of_share = jax.jit(jax.grad(compare.loss_of(case)), static_argnums=1)(params, case.model.apply, share, None)
    assert compare.difference(of_share, whole) > 0.1
    assert np.isfinite(compare.difference(whole, whole))
