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
    shared, repeated = (
        [f for f in findings if f.rule == rule] for rule in ("shared-matrix-product", "repeated-product")
    )
    assert bool(shared) == bool(repeated) == found
    if found:
        assert shared[0].bytes > 5 * 512 * 512 * 4  # five Gram matrices, each all-reduced
        # In each of 5 iterations the Gram matrix and what it multiplies are shared, its square is not.
        square, wide = 2 * 512**3, 2 * 512 * 512 * 1024
        share, done = 5 * (square + 2 * wide) / 8, 5 * (square + 2 * wide / 8)
        assert f"does {done:.3g} FLOP" in repeated[0].text and f"is {share:.3g}: 2.4 times" in repeated[0].text
        # With as many matrices an owner's one is less than a device's 2.4 shares of an eighth.
        assert "from 4 matrices of a shape on" in repeated[0].cure
        assert all("xlstm_jax.distributed.muon" in finding.cure for finding in (*shared, *repeated))
