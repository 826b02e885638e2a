"""Tests of the table of checks: an empty table leaves programs unchanged, and each row runs a check."""

from collections import Counter
from pathlib import Path
from typing import get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import AXES, assert_each_leaf, data, fsdp, mean_loss, mesh_of, weighted_loss
from xlstm_jax.distributed import create_train_state, make_eval_step, make_train_step
from xlstm_jax.distributed.metrics import Count, WeightedMean
from xlstm_jax.distributed.training.moments import CHECKS, Averaged, Moment, TrainingCheck, run_checks

TABLE = "xlstm_jax.distributed.training.moments.CHECKS"
BATCH, MESH = data(), mesh_of(2, 4)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, axis_name=AXES)(fsdp(nn.Dense)(16)(x))
        return fsdp(nn.Dense)(4)(x)


def kept_loss(params, apply_fn, batch, rng, collections):
    out, updated = apply_fn({"params": params, **collections}, batch["x"], mutable=list(collections))
    return (jnp.mean(out**2), {"rows": Count.of(out[:, 0] > 0), "mean": jnp.mean(out)}), updated


def evaluated(params, apply_fn, batch):
    return {"values": apply_fn({"params": params}, batch["x"])[:, 0], "weight": batch["weight"]}


def state_of(model):
    return create_train_state(model, optax.adam(0.1), MESH, jax.random.key(0), BATCH["x"], batch_axes=AXES)


def training(loss_fn, model, **options):
    def make():
        step = make_train_step(loss_fn, MESH, AXES, 2, **options)
        return step, (state_of(model), BATCH, jax.random.key(1))

    return make


def evaluation():
    step = make_eval_step(evaluated, MESH, AXES, metric=WeightedMean())
    return step, (state_of(fsdp(nn.Dense)(4)), BATCH, WeightedMean().empty(AXES, MESH))


RUNS = {
    "weighted": training(weighted_loss, fsdp(nn.Dense)(4), weighted=True, accumulation="reduce_once"),
    "no types": training(mean_loss, fsdp(nn.Dense)(4), check_vma=False),
    "collections and numbers beside the loss": training(kept_loss, Net(), has_aux=True),
    "evaluation": evaluation,
}


@pytest.mark.parametrize("name", RUNS)
def test_emptying_the_check_table_changes_neither_program_nor_results(name, monkeypatch):
    def text_and_results():
        step, args = RUNS[name]()
        text = step.lower(*args).as_text()
        return text, jax.device_get(jax.tree.leaves(step(*args)))

    text, results = text_and_results()
    monkeypatch.setattr(TABLE, [])
    without, others = text_and_results()
    assert without == text
    assert_each_leaf(np.testing.assert_array_equal, others, results)


def test_guard_check_table_is_the_source_of_the_argument_errors(monkeypatch):
    """Guard: a mistake that the table rejects passes an empty table."""
    step, (state, batch, _) = RUNS["no types"]()
    with pytest.raises(TypeError, match=r"rng is .* where step\(state, batch, rng\) takes a key"):
        step.lower(state, batch, 3)
    monkeypatch.setattr(TABLE, [])
    with pytest.raises(TypeError, match="key"):  # raised by JAX
        step.lower(state, batch, 3)


def test_each_stage_has_checks_and_each_check_has_a_docs_page():
    rows = Counter(check.moment for check in CHECKS)
    assert set(rows) == set(get_args(Moment))
    pages = {check.page for check in CHECKS}
    assert not [page for page in pages if not (Path(__file__).parents[2] / "docs" / page).exists()]
    assert len({(check.moment, check.run_check) for check in CHECKS}) == len(CHECKS)


def test_checks_run_at_each_stage_of_training(monkeypatch):
    """Guard of the first test: its steps reach all moments except failures, and calls in a program of the user."""
    met = set()
    rows = [
        TrainingCheck(moment, lambda _, moment=moment: met.add(moment), "training.md") for moment in get_args(Moment)
    ]
    monkeypatch.setattr(TABLE, rows)
    for make in RUNS.values():
        step, args = make()
        step(*args)
    state = state_of(fsdp(nn.Dense)(4))
    state.apply_gradients(grads=jax.tree.map(jnp.zeros_like, state.params))  # as a custom step calls it
    assert met == set(get_args(Moment)) - {"failure", "refused", "in a program"}


def test_checks_of_a_kind_of_call_run_once_and_of_each_call_every_time(monkeypatch):
    """Calls of a known kind skip the checks that see nothing else; another kind is checked, also after good calls."""
    met = Counter()
    rows = [
        check._replace(run_check=lambda *context, check=check: (met.update([check.moment]), check.run_check(*context)))
        for check in CHECKS
    ]
    monkeypatch.setattr(TABLE, rows)
    step, (first, batch, key) = RUNS["no types"]()
    state, _ = step(first, batch, key)
    once = Counter(met)
    state, _ = step(state, batch, key)
    per_call = {"call": once["call"], "returned": once["returned"]}
    assert met - once == Counter(per_call) and min(per_call.values()) > 0
    with pytest.raises(ValueError, match="state was handed to a step before"):  # found in a call of a known kind
        step(first, batch, key)
    by_features = jax.device_put(batch["x"], jax.NamedSharding(MESH, jax.P(None, "fsdp")))
    with pytest.raises(ValueError, match=r"(?s)is placed as .* which splits another dim"):
        step(state, batch | {"x": by_features}, key)
    with pytest.raises(TypeError, match="has no argument 'mask'"):
        step(state, batch, key, mask=None)
    with pytest.raises(TypeError, match=r"batch\['x'\] is"):  # refused by JAX, and named
        step(state, batch | {"x": "text"}, key)
    step(state, batch, key)


def test_check_is_called_only_if_the_part_of_the_context_that_it_needs_is_not_empty(monkeypatch):
    seen = []
    row = TrainingCheck("aux", seen.append, "training.md", needs="paths")
    monkeypatch.setattr(TABLE, [row])
    for paths in ((), ("a",)):
        run_checks("aux", Averaged(paths, 1, False, lambda: None))
    assert [context.paths for context in seen] == [("a",)]


def test_check_gets_the_parts_of_the_context_that_it_reads_unless_an_option_switches_it_off(monkeypatch):
    seen = []
    row = TrainingCheck("aux", lambda *parts: seen.append(parts), "training.md", ("num_minibatches", "paths"))
    monkeypatch.setattr(TABLE, [row, row._replace(unless="weighted")])
    for weighted in (False, True):
        run_checks("aux", Averaged(("a",), 2, weighted, lambda: None))
    assert seen == [(2, ("a",))] * 3
