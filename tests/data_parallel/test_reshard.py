"""Tests of ``reshard_after_forward``: gathered weights are dropped after forward, and results are unchanged."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.support import Model, assert_each_leaf, assert_same_params, data, equations, fsdp, mean_loss, mesh_of
from xlstm_jax.distributed import (
    init_sharded,
    partition_specs,
    remat_policy,
    shard_module_params,
    unbox,
    value_and_grad,
)

AXES, BATCH = ("dp", "fsdp"), data()
EVERYTHING = jax.checkpoint_policies.everything_saveable


def loss_and_gradients(model, mesh, check_vma=True, made_by=lambda make: make()):
    """Returns the jitted function and its arguments; ``jax.eval_shape`` makes the shapes of parameters."""
    variables = made_by(lambda: init_sharded(model, mesh, jax.random.key(0), BATCH["x"], batch_axes=AXES))
    specs = partition_specs(variables, mesh)

    def fn(variables, batch):
        return value_and_grad(lambda v: mean_loss(v["params"], model.apply, batch), AXES)(variables)

    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(P(), specs), check_vma=check_vma)
    return jax.jit(mapped), (variables, BATCH)


def gathers(model, mesh, of="jit"):
    """Returns the numbers of gathers and products in the traced gradient, within operations named ``of``."""
    fn, args = loss_and_gradients(model, mesh, made_by=jax.eval_shape)
    traced = [(within, eqn) for within, eqn in equations(jax.make_jaxpr(fn)(*args)) if of in within]
    found = [(eqn.primitive.name, 3 if "scan" in within else 1) for within, eqn in traced]
    return {
        kind: sum(times for name, times in found if name.startswith(kind)) for kind in ("all_gather", "dot_general")
    }


@pytest.mark.one_in(4)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("scan", [True, False])
def test_reshard_after_forward_leaves_loss_and_gradients_unchanged(scan, check_vma):
    mesh = mesh_of(2, 4)
    results = []
    for reshard in (False, True):
        fn, args = loss_and_gradients(Model(fsdp(reshard_after_forward=reshard), scan=scan), mesh, check_vma)
        results.append(fn(*args))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    assert_same_params(results[1][1], results[0][1], tolerance=1e-6)


@pytest.mark.parametrize("scan", [True, False])
def test_reshard_after_forward_regathers_weights_and_recomputes_no_dot_general(scan):
    mesh = mesh_of(2, 4)
    kept, dropped = (gathers(Model(fsdp(reshard_after_forward=on), scan=scan), mesh) for on in (False, True))
    # Of the first layer, whose input takes no gradient, nothing is read again; biases are not either.
    assert kept["all_gather"] < dropped["all_gather"] <= 2 * kept["all_gather"]
    assert dropped["dot_general"] == kept["dot_general"]


class Flagged(nn.Module):
    """Module with a flag, a keyword argument, and a second method."""

    @nn.compact
    def __call__(self, x, train, *, scale=None):
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(16, name="dense")(x) * (scale or 1.0)

    def kernel_norm(self):
        return jnp.linalg.norm(self.variables["params"]["dense"]["kernel"])


def test_reshard_after_forward_keeps_static_flags_keywords_dropout_and_methods():
    mesh, x = mesh_of(1, 8), jnp.ones((16, 32))
    outputs = []
    for wrap in (fsdp(), fsdp(reshard_after_forward=True)):
        model = wrap(Flagged)()
        variables = init_sharded(model, mesh, jax.random.key(0), x, train=False, batch_axes=AXES)

        def fn(variables, x, model=model):
            rngs = {"dropout": jax.random.key(1)}
            norm = model.apply(variables, method="kernel_norm")
            return model.apply(variables, x, True, scale=2.0, rngs=rngs), norm[None]

        specs = partition_specs(variables, mesh)
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=P("fsdp"), check_vma=False)
        outputs.append(jax.jit(mapped)(variables, x))
    assert_each_leaf(np.testing.assert_array_equal, *outputs)
    assert np.ptp(np.asarray(outputs[0][0]), axis=0).max() > 0  # guard: rows differ only by dropout


def test_reshard_after_forward_supports_parameters_read_in_setup():
    mesh, tokens = mesh_of(1, 8), jnp.arange(16) % 8
    gradients = []
    for wrap in (fsdp(), fsdp(reshard_after_forward=True)):
        model = wrap(nn.Embed)(32, 16)
        variables = init_sharded(model, mesh, jax.random.key(0), tokens, batch_axes=AXES)
        specs = partition_specs(variables, mesh)

        def fn(variables, tokens, model=model):
            def loss(variables):
                x = jnp.sin(model.apply(variables, tokens))
                return jnp.mean(model.apply(variables, x, method="attend") ** 2)

            return value_and_grad(loss, AXES)(variables)

        mapped = jax.shard_map(fn, mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=(P(), specs))
        gradients.append(jax.jit(mapped)(variables, tokens)[1])
    assert_same_params(*gradients, tolerance=1e-6)


def test_reshard_after_forward_is_a_no_op_on_a_single_device_and_outside_shard_map():
    one = mesh_of(1, 1)
    plain, dropping = (loss_and_gradients(Model(fsdp(reshard_after_forward=on)), one) for on in (False, True))
    assert plain[0].lower(*plain[1]).as_text() == dropping[0].lower(*dropping[1]).as_text()
    jaxpr = jax.make_jaxpr(lambda x: Model(fsdp(reshard_after_forward=True)).init(jax.random.key(0), x))(BATCH["x"])
    assert not [eqn for _, eqn in equations(jaxpr) if eqn.primitive.name.startswith(("remat", "checkpoint"))]


def around(policy):
    """Returns the model with an ``nn.remat`` of this policy around each wrapped block."""

    class Outer(Model):
        @nn.compact
        def __call__(self, x):
            x = self.wrap(nn.Dense)(16)(x)
            block = nn.remat(self.wrap(_block()), policy=policy, prevent_cse=False)
            scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            x, _ = scan(name="blocks")(x, None)
            return self.wrap(nn.Dense)(4)(x)

    return Outer


def _block():
    from tests.support import Block

    return Block


def test_outer_remat_policy_overrides_reshard_after_forward():
    """An outer remat policy overrides ``reshard_after_forward`` in the two cases of the remat page."""
    mesh = mesh_of(2, 4)

    def counted(policy, reshard):
        return gathers(around(policy)(fsdp(reshard_after_forward=reshard)), mesh, of="scan")["all_gather"]

    once = counted(EVERYTHING, False)
    assert counted(EVERYTHING, True) == once  # the outer policy keeps weights that the inner policy drops
    assert counted(remat_policy(), True) == counted(remat_policy(), False) > once


class Sized(nn.Module):
    """Module that returns a dict of an array, a string and a number."""

    @nn.compact
    def __call__(self, x):
        return {"y": nn.Dense(16)(x), "name": "sized", "width": 16}


def test_reshard_after_forward_keeps_outputs_of_types_other_than_arrays():
    mesh, model = mesh_of(2, 4), fsdp(Sized, reshard_after_forward=True)()
    variables = init_sharded(model, mesh, jax.random.key(0), BATCH["x"], batch_axes=AXES)

    def loss(variables, batch):
        found = model.apply(variables, batch["x"])
        assert found["name"] == "sized" and sum(range(found["width"])) == 120
        return jnp.mean(found["y"] ** 2)

    specs = partition_specs(variables, mesh)
    fn = value_and_grad(loss, AXES)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(P(), specs))
    assert [e for within, e in equations(jax.make_jaxpr(mapped)(variables, BATCH)) if e.primitive.name == "remat2"]
    assert np.isfinite(jax.jit(mapped)(variables, BATCH)[0])


def _complex(key, shape):
    real, imaginary = jax.random.split(key)
    return (jax.random.normal(real, shape) + 1j * jax.random.normal(imaginary, shape)) / 4


class Spectral(nn.Module):
    """Real parameters with complex intermediate values, and a complex parameter."""

    @nn.compact
    def __call__(self, x, _=None):
        spectrum = nn.Dense(16, use_bias=False)(x) * jnp.exp(1j * jnp.arange(16))
        mixed = nn.Dense(16, use_bias=False)(jnp.abs(spectrum)) @ self.param("mix", _complex, (16, 16))
        return x + jnp.abs(mixed), None


class Spectra(nn.Module):
    block: object

    @nn.compact
    def __call__(self, x):
        over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
        return nn.Dense(4)(nn.scan(self.block, **over)(name="blocks")(nn.Dense(16)(x), None)[0])


COMPLEX = {
    "again": partial(shard_module_params, Spectral, "fsdp", 16, reshard_after_forward=True),
    "policy": lambda: nn.remat(fsdp(Spectral), policy=remat_policy(offload=["block_input"])),
}


@pytest.mark.parametrize("block", COMPLEX)
def test_complex_values_are_not_kept_for_the_backward_pass(block):
    fn, args = loss_and_gradients(Spectra(COMPLEX[block]()), mesh_of(2, 4), made_by=jax.eval_shape)
    jax.eval_shape(fn, *args)  # JAX's policies raise for complex values that are kept
    every = Spectra(nn.remat(fsdp(Spectral), policy=EVERYTHING))
    kept, _ = loss_and_gradients(every, mesh_of(2, 4), made_by=jax.eval_shape)
    with pytest.raises(TypeError, match="reduce_precision does not accept"):  # guard
        jax.eval_shape(kept, *args)


@pytest.mark.parametrize("block, check_vma", [("again", True), ("policy", False)])
def test_reshard_after_forward_trains_complex_parameters_exactly(block, check_vma):
    """``reshard_after_forward`` trains complex values, for which JAX's policies raise in ``reduce_precision``."""
    fn, args = loss_and_gradients(Spectra(COMPLEX[block]()), mesh_of(2, 4), check_vma)
    params = unbox(args[0]["params"])
    loss, grads = jax.jit(jax.value_and_grad(lambda p: mean_loss(p, Spectra(Spectral).apply, BATCH)))(params)
    got, sharded = fn(*args)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), unbox(sharded["params"]), grads)
    assert jnp.iscomplexobj(grads["blocks"]["mix"])  # guard
    with pytest.raises(TypeError, match="reduce_precision does not accept"):  # guard: the kept values are complex
        kept = nn.remat(Spectral, policy=EVERYTHING)
        jax.eval_shape(jax.grad(lambda p: mean_loss(p, Spectra(kept).apply, BATCH)), params)
