"""Tests of the choice of matrices by path and shape: reported, and an error for ambiguous leaves."""

import io

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from rich.console import Console

from tests.models import LanguageModel
from tests.support import Model, data, fsdp, mesh_of, on_mesh
from xlstm_jax.distributed import muon, plan_sharding, shard_params
from xlstm_jax.distributed.optimizers import matrix_dimensions
from xlstm_jax.distributed.optimizers.matrices.dimensions import choose_matrices, full_shapes
from xlstm_jax.distributed.plan import ShardingPlan


def shapes_of(model, *inputs):
    return full_shapes(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"])


def chosen(shapes, overrides=None):
    """Returns by path (count, rows, columns), or the reason why a leaf is no matrix."""
    choices = choose_matrices(shapes, overrides)
    return {path: (c.count, *c.matrix) if c.dims else c.reason for path, c in choices.items()}


def test_matrix_dimensions_of_a_language_model_with_stacked_layers():
    shapes = shapes_of(LanguageModel("transformer", dim=32, num_layers=3, num_heads=2), jnp.ones((2, 8), jnp.int32))
    assert chosen(shapes) == {
        "blocks/attention_norm/scale": "a scale is a vector",
        "blocks/mlp_norm/scale": "a scale is a vector",
        "blocks/attention_out/kernel": (3, 32, 32),
        "blocks/query_key_value/kernel": (3, 32, 96),
        "blocks/up/kernel": (3, 32, 192),
        "blocks/down/kernel": (3, 96, 32),
        "embed/embedding": "a table that is looked up",
        "final_norm/scale": "a scale is a vector",
        "head/kernel": "the output layer: 256 outputs, as 'embed/embedding' has rows",
    }


class Vision(nn.Module):
    """A convolution and Flax's attention, both with biases."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), name="conv")(x).reshape(x.shape[0], -1, 8)
        return nn.Dense(5, name="logits")(nn.MultiHeadDotProductAttention(2, name="attention")(x))


def test_attention_and_convolution_kernels_take_output_dims_from_the_bias():
    found = chosen(shapes_of(Vision(), jnp.ones((1, 4, 4, 3))))
    assert found["conv/kernel"] == (1, 27, 8)  # 3 x 3 taps of 3 features
    assert found["attention/query/kernel"] == (1, 8, 8)  # 8 features, to 2 heads of 4
    assert found["attention/query/bias"] == "a bias is a vector"
    assert found["logits/kernel"] == (1, 8, 5)


UNSETTLED = {"blocks/up/kernel": (3, 8, 32)}


@pytest.mark.parametrize("dims, found", [(MuonDimensionNumbers(-2, -1), (3, 8, 32)), (None, "given for '*/up/*'")])
def test_path_pattern_decides_the_matrix_dimensions_of_matching_leaves(dims, found):
    assert chosen(UNSETTLED, {"*/up/*": dims}) == {"blocks/up/kernel": found}


def test_matrix_dimensions_classifies_shards_by_global_shape():
    """Shards are classified by global shape: a local kernel with as many rows as layers still is one matrix."""
    params = {"norm": {"scale": jnp.ones((4, 8))}, "mix": {"kernel": jnp.ones((16, 8))}}
    found = []

    def local(params):
        shards = shard_params(params, "fsdp", min_weight_size=100)
        found.append(matrix_dimensions()(shards))
        return shards["norm"]["scale"]

    jax.eval_shape(on_mesh(local, mesh_of(2, 4), False, (P(),), P()), params)
    assert found[0]["mix"]["kernel"] == MuonDimensionNumbers((0,), (1,))


def test_plan_sharding_reports_matrices_and_owners():
    model = Model(wrap=fsdp)
    plan = plan_sharding(model, {"dp": 2, "fsdp": 4}, data()["x"], tx=optax.chain(optax.clip(1.0), muon(0.1)))
    kernels = ("blocks/Dense_0/kernel", "blocks/Dense_1/kernel")
    six = next(one for one in plan.matrices if one.leaves == kernels)
    places = "at most 2 on each of 4 devices, 25% of which have none; the busiest computes 1.33 x the mean"
    assert str(six) == f"6 matrices of 16 x 32 (muon): {places}"
    assert (six.idle_fraction, six.workless_fraction) == (2 / 8, 1 / 4)  # devices own two, two, two, and no matrices
    whole = next(one for one in plan_sharding(model, {"fsdp": 1}, data()["x"], tx=muon(0.1)).matrices)
    assert str(whole) == "6 matrices of 16 x 32 (muon): every device computes every update"
    (none,) = (one for one in plan.matrices if one.reason == "a scale is a vector")
    assert none.leaves == ("blocks/LayerNorm_0/scale",) and none.count == 0
    console = Console(width=240, file=io.StringIO())
    console.print(plan.table())
    shown = console.file.getvalue()
    assert str(six) in shown and "no matrices: a bias is a vector" in shown
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert not plan_sharding(model, {"dp": 2, "fsdp": 4}, data()["x"], tx=optax.adam(0.1)).matrices
