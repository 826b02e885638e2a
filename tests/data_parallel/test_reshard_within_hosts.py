"""Tests of weights that stay gathered over the axis across hosts, and are gathered again within a host."""

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tests.data_parallel.test_remat import saved_residuals
from tests.support import Block, Model, data, equations, gradients_are_those_of_one_device, mean_loss, plain
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_train_state,
    init_sharded,
    make_train_step,
    nnx_model,
    partition_specs,
    remat_policy,
    shard_module_params,
    shard_modules,
)
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.regather import keeping_no_weights
from xlstm_jax.equations import GATHERS, named_axes

HOST = "across"
AXES, BATCH, LAYERS = ("fsdp", HOST), data(features=16), 3
OPTIONS = {"axis_name": AXES, "inter_host_axes": HOST, "min_weight_size": 32}


def mesh():
    """Returns a mesh of two hosts with four devices each."""
    return DeviceMeshManager.create_device_mesh({"fsdp": 4, HOST: 2})


def wrap(**options):
    return partial(shard_module_params, **OPTIONS, **options)


def gathers(model, loss_fn=mean_loss):
    """Returns the number of gathers of a step over each axis; gathers of a scan count once for each layer."""
    key, options = jax.random.key(0), {"batch_axes": AXES}
    state = jax.eval_shape(lambda: create_train_state(model, optax.sgd(0.1), mesh(), key, BATCH["x"], **options))
    step = make_train_step(loss_fn, mesh(), AXES)
    count = Counter()
    for within, eqn in equations(jax.make_jaxpr(step)(state, BATCH, jax.random.key(1))):
        if eqn.primitive.name in GATHERS:
            count[named_axes(eqn)[0]] += LAYERS if "scan" in within else 1
    return count


def loss_of_inputs(params, apply_fn, x, rng):
    return mean_loss(params, apply_fn, {"x": x, "y": jnp.sin(x[:, :4])})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("scan", [True, False])
def test_gradients_with_weights_gathered_again_within_hosts_are_those_of_one_device(scan, check_vma):
    model, of_one_device = Model(wrap(reshard_after_forward="fsdp"), scan=scan), Model(plain, scan=scan)
    gradients_are_those_of_one_device(
        model, of_one_device, loss_of_inputs, mesh(), AXES, BATCH["x"], check_vma=check_vma
    )


@pytest.mark.parametrize("scan", [True, False])
def test_backward_pass_gathers_again_within_hosts_and_not_across_hosts(scan):
    kept, again, within, everywhere = (
        gathers(Model(wrap(reshard_after_forward=axes), scan=scan)) for axes in (False, True, "fsdp", AXES)
    )
    assert again[HOST] > kept[HOST], "guard: with True, weights are gathered across hosts twice"
    assert within == {HOST: kept[HOST], "fsdp": again["fsdp"]}
    assert everywhere == again


def test_gathers_over_axes_that_the_option_leaves_out_are_kept_for_the_backward_pass():
    policy = ShardPolicy((HOST, "fsdp"), inter_host_axes=(HOST,), reshard_after_forward=("fsdp",))
    assert policy.kept_axes == {HOST}
    keep = keeping_no_weights(lambda *args, **params: True, policy.kept_axes)
    gather = SimpleNamespace(name="all_gather")
    assert [keep(gather, axis_name=axes) for axes in (HOST, "fsdp", (HOST, "fsdp"))] == [True, False, False]


def test_policy_of_nn_remat_keeps_gathers_across_hosts():
    class Outer(nn.Module):
        policy: Any

        @nn.compact
        def __call__(self, x):
            block = nn.remat(wrap()(Block), policy=self.policy, prevent_cse=False)
            scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            return scan(name="blocks")(x, None)[0]

    def loss(params, apply_fn, batch, rng):
        return jnp.mean((apply_fn({"params": params}, batch["x"]) - 1) ** 2)

    again, within = (gathers(Outer(remat_policy("nothing", gathered_over=axes)), loss) for axes in ((), HOST))
    assert again[HOST] == again["fsdp"] == within["fsdp"]
    assert within[HOST] == again[HOST] / 2


@pytest.mark.parametrize("axes, keeps_a_part", [("fsdp", True), (AXES, False)])
def test_weights_kept_for_the_backward_pass_are_divided_by_the_devices_of_a_host(axes, keeps_a_part):
    model = wrap(reshard_after_forward=axes)(Block)(40)  # no activation of 2 rows has as many values as a kernel
    x = jnp.ones((16, 40))
    variables = init_sharded(model, mesh(), jax.random.key(0), x, batch_axes=AXES)
    kept = []

    def loss(params, x):
        def summed(params):
            return model.apply({"params": params}, x)[0].sum()

        kept[:] = [aval.size for aval, _ in saved_residuals(summed, params)]
        return summed(params)[None]

    specs = partition_specs(variables, mesh())["params"]
    mapped = jax.shard_map(loss, mesh=mesh(), in_specs=(specs, jax.P(AXES)), out_specs=jax.P(AXES), check_vma=False)
    jax.eval_shape(mapped, variables["params"], x)
    weight = 40 * 80
    assert weight not in kept
    assert (weight // 4 in kept) == keeps_a_part, kept


@pytest.mark.parametrize("check_vma", [True, False])
def test_modules_of_nnx_gather_again_within_hosts(check_vma):
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.gelu(self.first(x)))

    unsharded = nnx_model(lambda rngs: Layers(rngs))
    within = shard_modules(unsharded, nnx.Linear, **OPTIONS, reshard_after_forward="fsdp")
    gradients_are_those_of_one_device(within, unsharded, loss_of_inputs, mesh(), AXES, BATCH["x"], check_vma=check_vma)
    kept, again = (
        gathers(shard_modules(unsharded, nnx.Linear, **OPTIONS, reshard_after_forward=axes)) for axes in (False, True)
    )
    assert again[HOST] > kept[HOST]
    assert gathers(within) == {HOST: kept[HOST], "fsdp": again["fsdp"]}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"reshard_after_forward": "tp"}, "has 'tp', which is none of axis_name="),
        ({"reshard_after_forward": HOST}, "keeps weights gathered over 'fsdp', which is none of inter_host_axes="),
        ({"reshard_after_forward": "fsdp", "inter_host_axes": ()}, "Name 'across' in inter_host_axes"),
    ],
)
def test_axes_that_cannot_be_kept_raise_an_error_with_a_cure(changes, words):
    with pytest.raises(ValueError, match=words):
        shard_module_params(nn.Dense, **OPTIONS | changes)
