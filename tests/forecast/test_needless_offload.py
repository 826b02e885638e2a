"""Offload is found where a step needs it, and nowhere else; where it is not needed the lint says so."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

from tests.forecast.kept import KeptTexts, assert_kept_is_compiled
from tests.support import fsdp
from xlstm_jax.distributed import Offload, plan_sharding
from xlstm_jax.distributed.optimizers.offload import NO_OFFLOAD
from xlstm_jax.forecast import ReportCache, forecast
from xlstm_jax.forecast.training import Workload, fit, lint

GIB = 2**30
TOPOLOGY, MESH = "v5e:2x2", {"fsdp": 4}
X = jax.ShapeDtypeStruct((4, 16384), jnp.bfloat16)  # a row for each device: of which no minibatches can be made

pytestmark = pytest.mark.libtpu


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(X.shape[-1], use_bias=False, dtype=jnp.bfloat16, name="up")(x), None


class Layers(nn.Module):
    """16 layers of 1 GiB each in 4 stacks, of which a device has 4 GiB, and of Adam's moments 8."""

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(fsdp(Layer, gather_dtype=jnp.bfloat16), prevent_cse=False)
        layers = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        for i in range(4):  # an update needs room for three times the largest leaf: see docs/offload.md
            x = layers(name=f"layers_{i}")(x, None)[0]
        return x


def loss(params, apply_fn, x, rng):
    return jnp.mean(apply_fn({"params": params}, x).astype(jnp.float32) ** 2)


def build_step(options, tx=optax.adam(1e-3)):  # noqa: B008 # a tuple of functions
    """Of the three ways there is one, and one threshold."""
    if not options.keep_gathered or options.min_weight_size != 2**18:
        raise ValueError("the layers are as they are")
    training = Workload(Layers(), tx, X, loss, offload=options.offload)
    return training.build_step(options.mesh, options.num_minibatches)


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """``search(budget)``, which compiles each step once."""
    kept = ReportCache(tmp_path_factory.mktemp("reports"))
    return cache(lambda budget=None: fit(build_step, TOPOLOGY, budget, meshes=[MESH], cache=kept))


def forecast_offloaded(cache):
    step, args = Workload(Layers(), optax.adam(1e-3), X, loss, offload=Offload()).build_step(MESH)
    return forecast(step, *args, topology=TOPOLOGY, cache=cache)


KEPT = {"offloaded": forecast_offloaded}


@pytest.fixture(scope="module")
def offloaded():
    """The forecast of the step that needs it, which the search finds."""
    return forecast_offloaded(KeptTexts("offloaded"))


def findings(found):
    return [f for f in lint(found, plan_sharding(Layers(), MESH, X)) if f.rule == "needless-offload"]


@pytest.mark.slow
def test_stored_texts_of_the_offloaded_step_equal_fresh_compiler_output():
    assert_kept_is_compiled("offloaded", KEPT)


def test_fit_chooses_offload_only_for_a_step_beyond_the_memory_budget(search):
    needs, does_not = search(), search(64 * GIB)
    assert needs.best.options.offload == Offload() and "8 GiB of optimizer state" in needs.why_offload
    assert not [trial for trial in needs.trials if trial.options.offload == NO_OFFLOAD and trial.fits]
    assert {trial.options.offload for trial in does_not.trials} == {NO_OFFLOAD}
    assert does_not.best.seconds < needs.best.seconds and does_not.why_offload == ""


def test_lint_needless_offload_is_silent_for_a_step_fitting_only_with_offload(offloaded):
    assert offloaded.fits and offloaded.host.stored_bytes == 8 * GIB
    assert findings(offloaded) == []


def test_lint_needless_offload_fires_for_waits_where_hbm_has_room_for_the_moments(offloaded):
    """The same step on a chip of more memory."""
    roomy = dataclasses.replace(offloaded, available_bytes=64 * GIB)
    (finding,) = findings(roomy)
    assert finding.bytes == 16 * GIB and finding.cure == "Leave offload out."
    at_most, waited_ms = roomy.total_bytes / GIB + 8, roomy.host.waited_s * 1e3
    assert f"the step would take {at_most:.3g} GiB of 64 GiB at most. 16 GiB are transferred" in finding.text
    assert f"which waits {waited_ms:.3g} ms of its" in finding.text
    hidden = dataclasses.replace(roomy, host=dataclasses.replace(roomy.host, waited_s=0.01 * roomy.step_seconds))
    assert findings(hidden) == []


def test_lint_needless_offload_fires_for_multisteps_loading_all_moments_at_once():
    """``MultiSteps`` branches over all of its state."""
    tx = optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()
    step, args = Workload(Layers(), tx, X, loss, offload=Offload()).build_step(MESH)
    found = forecast(step, *args, topology=TOPOLOGY)
    assert found.host.stored_bytes == 12 * GIB and not found.fits
    (finding,) = findings(found)
    assert (
        "most come to the device at once" in finding.text
        and "num_minibatches instead of optax.MultiSteps" in finding.cure
    )
    assert finding.bytes >= 0.6 * 12 * GIB
