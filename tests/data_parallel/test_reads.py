"""Tests of boxes read inside ``shard_map``: one gather per read, with exact values and gradients in both modes."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from tests.support import AXES, as_called, fsdp, mesh_of, normal, on_mesh
from xlstm_jax.distributed import (
    Replicas,
    gather_params,
    init_sharded,
    partition_specs,
    plan_sharding,
    shard_module_params,
    sync_gradients,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded, true_value

KEY = jax.random.key(0)
X = normal(1, (16, 12))
READS = {
    "T": lambda w, x: x @ w.T.T,
    "x @ w": lambda w, x: x @ w,
    "jnp": lambda w, x: jnp.dot(x, w),
    "index": lambda w, x: x[:, :3] @ w[:3] + x[:, 3:] @ w[3:],
    "iterate": lambda w, x: sum(x[:, i : i + 1] * row for i, row in enumerate(w)),
    "astype": lambda w, x: x @ w.astype("float32"),
}


class Weight(nn.Module):
    """Module with one parameter of shape [12, features], read outside of the wrapper's methods."""

    features: int = 8

    def setup(self):
        self.weight = self.param("weight", nn.initializers.normal(1.0), (12, self.features))

    def __call__(self, x):
        return x @ self.weight


def losses(read, variables, x):
    return jnp.mean(jnp.sin(read(variables["params"]["weight"], x)) ** 2)


OPTIONS = {
    "one axis": ({}, 8),
    "two axes": ({"axis_name": ("dp", "fsdp")}, 8),
    "padded": ({"uneven": "pad", "axis_name": ("dp", "fsdp")}, 7),
    "copies": ({"replicas": Replicas("dp")}, 8),
}


def test_reads_of_a_box_outside_of_a_mesh_are_those_of_the_array():
    value = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    box = Sharded(jnp.asarray(value), ("fsdp", None))
    assert_array_equal(np.asarray(box), value)
    assert_array_equal(np.asarray(box, np.float64), value.astype(np.float64))
    assert_array_equal(box[1:], value[1:])
    assert_array_equal(np.stack(list(box)), value)
    assert_array_equal(box.astype("int32"), value.astype("int32"))
    assert box.astype("int32").dtype == jnp.int32 and np.asarray(box, np.float64).dtype == np.float64


RUNS = [*((name, True) for name in OPTIONS), ("padded", False), ("copies", False)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name, check_vma", RUNS, ids=lambda value: value if isinstance(value, str) else f"{value}")
def test_reads_of_a_box_and_gradients_match_the_plain_array(name, check_vma):
    options, features = OPTIONS[name]
    mesh, model = mesh_of(2, 4), fsdp(Weight, **options)(features)
    variables = init_sharded(model, mesh, KEY, X, batch_axes=AXES)
    box, plain = variables["params"]["weight"], jax.jit(Weight(features).init)(KEY, X)
    specs = partition_specs(variables, mesh)

    def local(variables, x):
        weight = variables["params"]["weight"]
        assert (weight.shape, weight.ndim, weight.dtype) == ((12, features), 2, jnp.float32)
        assert weight.value.shape != weight.shape  # guard: a device holds a shard
        grads = {name: jax.grad(partial(losses, read))(variables, x) for name, read in READS.items()}
        return sync_gradients(grads, AXES)

    got = on_mesh(local, mesh, check_vma, (specs, P(AXES)), dict.fromkeys(READS, specs))(variables, X)
    want = jax.grad(partial(losses, READS["jnp"]))(plain, X)["params"]["weight"]
    for name in READS:
        assert_allclose(true_value(got[name]["params"]["weight"]), want, rtol=1e-4, atol=1e-6, err_msg=name)
    assert_array_equal(np.asarray(box), np.asarray(plain["params"]["weight"]))  # outside, values are global


class Net(nn.Module):
    """An embedding whose ``setup`` runs outside of its wrapper, in three ways."""

    how: str
    wrap: object

    @nn.compact
    def __call__(self, tokens):
        if self.how == "jit":
            return nn.jit(self.wrap(nn.Embed))(16, 8, name="embed")(tokens)
        embed = nn.Embed(16, 8, name="embed")
        if self.how == "setup has run":
            assert embed.embedding.shape == (16, 8)
        return self.wrap(lambda module, tokens: module(tokens))(embed, tokens)


@pytest.mark.parametrize("how", ["jit", "a function", "setup has run"])
def test_modules_bound_with_setup_done_match_the_plain_model(how):
    mesh, tokens, model = mesh_of(2, 4), jnp.arange(16), Net(how, fsdp())
    variables = init_sharded(model, mesh, KEY, tokens, batch_axes=AXES)
    specs = partition_specs(variables, mesh)
    got = on_mesh(model.apply, mesh, True, (specs, P(AXES)), P(AXES))(variables, tokens)
    plain = Net(how, lambda target: target)
    assert_array_equal(got, plain.apply(jax.jit(plain.init)(KEY, tokens), tokens))


def test_each_read_of_a_box_is_a_gather_in_the_gather_dtype_of_the_wrapper():
    mesh, model = mesh_of(2, 4), fsdp(Weight, gather_dtype="bfloat16")()
    variables = init_sharded(model, mesh, KEY, X, batch_axes=AXES)
    weight = variables["params"]["weight"]

    def twice(weight, x):
        assert weight.dtype == jnp.bfloat16
        return x @ weight + x @ jnp.tanh(weight)

    run = on_mesh(twice, mesh, True, (partition_specs(weight, mesh), P(AXES)), P(AXES))
    lines = [line for line in as_called(run.lower(weight, X).as_text()).splitlines() if "all_gather" in line]
    assert len(lines) == 2 and all("bf16" in line for line in lines)

    def gathered(weight):  # the wrapper supplies the axis that the call leaves open
        return gather_params(weight, "fsdp", "float16"), gather_params(weight, "fsdp", None, "float32")

    found = jax.eval_shape(on_mesh(gathered, mesh, False, (partition_specs(weight, mesh),), P()), weight)
    assert [str(whole.dtype) for whole in found] == ["float16", "bfloat16"]


def test_read_of_a_box_gathers_the_wrapper_axis_but_not_the_model_axis():
    """The wrapper gathers "fsdp" alone: a tensor-parallel module computes with its shard over "dp"."""

    class Column(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.normal(1.0), (None, "dp"))
            return x @ self.param("weight", init, (12, 8))

    mesh = mesh_of(2, 4)
    variables = init_sharded(shard_module_params(Column, "fsdp", 16)(), mesh, KEY, X, batch_axes="fsdp")
    weight = variables["params"]["weight"]
    assert weight.names == ("fsdp", "dp") and weight.model_axes == ("dp",)

    model = shard_module_params(Column, "fsdp", 16)()
    assert plan_sharding(model, mesh.shape, X).row("weight").gathered_bytes == 12 * 4 * 4

    def read(weight, x):
        assert weight.shape == (12, 4)
        return x @ weight

    got = on_mesh(read, mesh, True, (partition_specs(weight, mesh), P("fsdp")), P("fsdp", "dp"))(weight, X)
    assert_allclose(got, X @ weight.value, rtol=1e-5, atol=1e-5)


def test_tree_functions_treat_a_box_as_a_pytree_node():
    mesh = mesh_of(2, 4)
    box = init_sharded(fsdp(Weight)(), mesh, KEY, X, batch_axes=AXES)["params"]["weight"]
    assert [leaf.shape for leaf in jax.tree.leaves(box)] == [(12, 8)]
    assert type(jax.tree.map(jnp.zeros_like, box)) is type(box)
    assert jax.eval_shape(lambda b: b, box).value.shape == (12, 8)
