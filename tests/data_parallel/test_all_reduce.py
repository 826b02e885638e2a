"""Tests of ``options=(AllReduceGradients(),)``: gradients are summed by an all-reduce, and equal those of one device.

``tests/exactness`` compares a training, and pairs with other features, with one device.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.support import (
    AXES,
    Model,
    data,
    equations,
    integers,
    mean_loss,
    mesh_of,
    on_mesh,
)
from xlstm_jax.distributed import (
    PackSmall,
    Replicas,
    abstract_train_state,
    chunked_cross_entropy,
    make_train_step,
    scan_layers,
    shard_module_params,
)
from xlstm_jax.distributed.data_parallel import AllReduceGradients
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import DEFAULT_COMMUNICATION, Option

SUMMED = (AllReduceGradients(),)
SUMS = ("psum", "psum_invariant", "reduce_scatter")


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("axes", [("fsdp",), AXES, AXES[::-1]], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_gets_its_slice_of_the_sum(axes, dim, check_vma):
    """The slices have the order of ``PartitionSpec(axes)``; the terms of a device are integers of its own."""
    mesh = mesh_of(2, 4)
    terms = integers(0, (8, 8, 16, 24), -9, 9).astype("float32")  # of each device
    count = 4 if axes == ("fsdp",) else 8
    over = terms.reshape(2, 4, 8, 16, 24)

    def local(terms):
        return SUMMED[0].reduce_scatter(terms[0], dim, axes)[None]

    spec = [None, None, None]
    spec[dim] = axes
    leading = "dp" if count == 4 else None
    run = jax.shard_map(local, mesh=mesh, in_specs=P(AXES), out_specs=P(leading, *spec), check_vma=check_vma)
    want = over.sum(1) if count == 4 else over.sum((0, 1))[None]
    np.testing.assert_array_equal(run(terms), want)


def test_reduce_scatter_over_axes_of_size_1_returns_the_terms():
    terms = np.arange(6.0, dtype="float32").reshape(2, 3)
    run = jax.shard_map(
        lambda x: SUMMED[0].reduce_scatter(x, 0, ("dp",)), mesh=mesh_of(1, 8), in_specs=P(), out_specs=P()
    )
    np.testing.assert_array_equal(run(terms), terms)


def sums(step, *args):
    names = {eqn.primitive.name for _, eqn in equations(jax.make_jaxpr(step)(*args))}
    return names.intersection(SUMS)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(16)(jnp.tanh(nn.Dense(32)(x))), None


class Ahead(nn.Module):
    """Layers gathered ahead, which reduce-scatter gradients in a loop of their own."""

    wrap: object

    @nn.compact
    def __call__(self, x):
        return scan_layers(self.wrap(Layer), 3)(name="layers")(x)[0]


@pytest.mark.parametrize("options, scatters", [(SUMMED, False), ((), True)], ids=["option", "default"])
@pytest.mark.parametrize("model", [Model, Ahead])
def test_step_with_the_option_has_no_reduce_scatter(model, options, scatters):
    wrap = partial(shard_module_params, axis_name="fsdp", min_weight_size=32, options=options)
    x = {"x": np.ones((16, 16), np.float32), "y": np.ones((16, 16), np.float32)} if model is Ahead else data()
    loss = lambda params, apply_fn, batch, rng: (apply_fn({"params": params}, batch["x"]) ** 2).mean()  # noqa: E731
    mesh, key = mesh_of(2, 4), jax.random.key(0)
    state = abstract_train_state(model(wrap=wrap), optax.sgd(1.0), mesh, key, x["x"], batch_axes=AXES)
    found = sums(make_train_step(loss, mesh, AXES), state, x, key)
    assert ("reduce_scatter" in found) == scatters, found
    assert found & {"psum", "psum_invariant"}


@pytest.mark.parametrize("others", [{"packing": PackSmall()}, {"gather_dtype": "int8"}, {"replicas": Replicas("dp")}])
def test_option_sums_gradients_of_leaves_that_are_packed_or_sent_in_8_bits_or_copied(others):
    def of_step(options):
        model = Model(
            wrap=partial(shard_module_params, axis_name="fsdp", min_weight_size=32, options=options, **others)
        )
        mesh, key, batch = mesh_of(2, 4), jax.random.key(0), data()
        state = abstract_train_state(model, optax.sgd(1.0), mesh, key, batch["x"], batch_axes=AXES)
        return sums(make_train_step(mean_loss, mesh, AXES), state, batch, key)

    assert "reduce_scatter" not in of_step(SUMMED)
    assert "reduce_scatter" in of_step(())


def test_gradients_of_pieces_of_a_head_are_summed_by_an_all_reduce():
    """``chunked_cross_entropy`` gathers and scatters pieces of a matrix by itself."""
    mesh, x, labels = mesh_of(1, 8), np.ones((8, 2, 16), np.float32), integers(0, (8, 2), 0, 64)

    def scatters(options):
        head = shard_module_params(nn.Dense, "fsdp", 32, options=options)(64, use_bias=False)

        def loss(params, apply_fn, batch, rng):
            return chunked_cross_entropy(batch["x"], params["kernel"], batch["labels"], chunk_size=32).loss.mean()

        batch = {"x": x, "labels": labels}
        state = abstract_train_state(head, optax.sgd(1.0), mesh, jax.random.key(0), x, batch_axes="fsdp")
        return "reduce_scatter" in sums(make_train_step(loss, mesh, "fsdp"), state, batch, jax.random.key(0))

    assert not scatters(SUMMED)
    assert scatters(())  # guard: the loss scatters gradients of pieces


def test_the_first_option_that_computes_a_sum_computes_it():
    class Nothing(Option):
        pass

    class Doubled(Option):
        def reduce_scatter(self, terms, dim, axes):
            return 2 * lax.psum_scatter(terms, axes, scatter_dimension=dim, tiled=True)

    def scattered(*options):
        run = lambda x: collectives.reduce_scatter(x, 0, ("fsdp",), options)  # noqa: E731
        return np.asarray(on_mesh(run, mesh_of(1, 8), False, P(), P("fsdp"))(np.arange(8.0, dtype="float32")))

    np.testing.assert_array_equal(scattered(), 8 * np.arange(8.0))
    np.testing.assert_array_equal(scattered(Nothing()), 8 * np.arange(8.0))
    np.testing.assert_array_equal(scattered(Nothing(), Doubled(), *SUMMED), 16 * np.arange(8.0))
    assert Option().reduce_scatter(jnp.ones(8), 0, ("fsdp",)) is None


def test_options_of_a_wrapper_reach_the_communication_of_leaves():
    policy = ShardPolicy("fsdp", options=list(SUMMED))
    assert policy.communication.options == SUMMED == policy.options
    assert policy == ShardPolicy("fsdp", options=SUMMED)  # a list and a tuple are the same option
    assert ShardPolicy("fsdp").communication == DEFAULT_COMMUNICATION
