"""Tests of the benchmark of forecast accuracy in small: facts agree; and large models have the stated sizes."""

import jax
import pytest

from benchmarks import forecast_accuracy
from benchmarks.large_models import SIZES, language_model
from xlstm_jax.distributed.plan.planning import plan_sharding


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["xLSTM, FSDP", "Transformer, replicated"])
def test_forecasts_of_small_models_equal_measured_facts_exactly(case):
    found = list(forecast_accuracy.compare(case, jax.devices()))
    assert {c.quantity.split(":")[0] for c in found} >= {"plan", "argument bytes", "collectives"}
    assert all(c.exact and c.forecast == c.fact for c in found), found
    by_quantity = {c.quantity: c.fact for c in found}
    assert by_quantity["collectives: executions"] >= by_quantity["collectives: names"] > 0  # guard: something ran
    assert by_quantity["plan: parameter bytes"] > 0


def test_profiler_counts_collectives_twice_for_a_step_run_twice():
    """Guard: a step that runs twice runs its collectives twice."""
    _, _, step, (state, batch, key) = forecast_accuracy.build("Transformer, replicated", jax.devices())
    state, _ = jax.block_until_ready(step(state, batch, key))

    def twice():
        return step(step(state, batch, key)[0], batch, key)

    assert set(forecast_accuracy.executed(twice, jax.device_count()).values()) == {2}


@pytest.mark.parametrize("name, parameters", [("1.3B", 1.44e9), ("7B", 7.39e9)])
def test_large_models_have_the_parameter_count_of_the_model_name(name, parameters):
    workload = language_model(SIZES[name], devices=256, shard_axes=("fsdp",))
    plan = plan_sharding(workload.model, {"fsdp": 256}, *workload.init_inputs)
    assert plan.parameters.total / 4 == pytest.approx(parameters, rel=0.01)
    assert plan.replicated_fraction < 0.001
