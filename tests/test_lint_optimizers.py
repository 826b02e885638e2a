"""The lint names an optimizer whose matrix products the compiler shares among devices, and its cure."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

from tests.support import mesh_of
from xlstm_jax.distributed import muon, plan_sharding, shard_module_params
from xlstm_jax.distributed.forecast import Workload, forecast, lint

X = jax.ShapeDtypeStruct((64, 512), jnp.float32)


def loss(params, apply_fn, x, rng):
    del rng
    return jnp.mean(apply_fn({"params": params}, x) ** 2)


@pytest.mark.parametrize("tx, found", [(optax.contrib.muon(0.1), True), (muon(0.1), False)], ids=["optax", "ours"])
def test_a_matrix_product_of_an_optimizer_on_shards(tx, found):
    model = shard_module_params(nn.Dense, "fsdp")(1024)
    mesh = mesh_of(1, 8)
    step, args = Workload(model, tx, X, loss).build_step(mesh)
    findings = lint(forecast(step, *args), plan_sharding(model, mesh.shape, X))
    findings = [finding for finding in findings if finding.rule == "shared-matrix-product"]
    assert bool(findings) == found
    if found:
        assert findings[0].bytes > 5 * 512 * 512 * 4  # five Gram matrices, each all-reduced
        assert "xlstm_jax.distributed.muon" in findings[0].cure
