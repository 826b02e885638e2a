"""Frozen leaves that are stored in blocks of bytes: what they take, what travels, and what is trained above them."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.support import AXES, assert_same_params, data, equations, fsdp, mean_loss, mesh_of, plain
from xlstm_jax.distributed import (
    Checkpointer,
    abstract_train_state,
    bytes_per_device,
    create_train_state,
    export_safetensors,
    freeze_params,
    import_safetensors,
    make_train_step,
    nnx_model,
    plan_sharding,
    scan_layers,
    shard_modules,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of, true_value
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves
from xlstm_jax.distributed.data_parallel.wire.quantized import FORMATS

BATCH, KEY, STEPS = data(), jax.random.key(0), 4
TX = optax.adam(1e-2)


class Layer(nn.Module):
    """Matrices that are split along their rows and their columns, and an adapter."""

    @nn.compact
    def __call__(self, x, _=None):
        a = self.param("lora_a", nn.initializers.normal(0.1), (64, 4))
        b = self.param("lora_b", nn.initializers.zeros, (4, 64))
        return x + nn.Dense(64, name="down")(nn.gelu(nn.Dense(128, name="up")(x))) + x @ a @ b, None


class Adapted(nn.Module):
    """A frozen base of layers in a scan and of layers gathered ahead; 'odd' is not filled by blocks."""

    wrap: Any = plain

    @nn.compact
    def __call__(self, x):
        layer, over = self.wrap(Layer), {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x = self.wrap(nn.Dense)(64, name="odd")(x)
        x, _ = nn.scan(nn.remat(layer), length=2, **over)(name="blocks")(x, None)
        ahead = nn.scan(layer, length=2, **over) if self.wrap is plain else scan_layers(layer, 2)
        return self.wrap(nn.Dense)(4, name="lora_head")(ahead(name="ahead")(x, None)[0])


def frozen(dtype):
    return {"trainable": lambda path: "lora" in path, "frozen_dtype": dtype}


MODEL = Adapted(fsdp(min_weight_size=256))


def state_on(mesh, dtype):
    return create_train_state(MODEL, TX, mesh, KEY, BATCH["x"], batch_axes=AXES, **frozen(dtype))


def unpacked(params):
    return jax.device_get(jax.jit(lambda params: map_leaves(true_value, params))(params))


@cache
def trained(dtype):
    """What it starts from, unpacked; losses; and the state."""
    mesh, losses = mesh_of(2, 4), []
    state = state_on(mesh, dtype)
    start, step = unpacked(state.params), make_train_step(mean_loss, mesh, AXES, check_vma=dtype != "int4")
    for _ in range(STEPS):
        state, metrics = step(state, BATCH, KEY)
        losses.append(float(metrics["loss"]))
    return start, losses, state


ONE_DEVICE = optax.partition(
    {True: TX, False: optax.set_to_zero()},
    lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "lora" in str(path), params),
)


@jax.jit
def step_on_one_device(params, opt_state):
    loss, grads = jax.value_and_grad(lambda params: mean_loss(params, Adapted().apply, BATCH))(params)
    updates, opt_state = ONE_DEVICE.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def trained_on_one_device(params):
    opt_state, losses = ONE_DEVICE.init(params), []
    for _ in range(STEPS):
        params, opt_state, loss = step_on_one_device(params, opt_state)
        losses.append(float(loss))
    return params, losses


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_adapters_train_as_on_one_device_above_the_unpacked_base(dtype):
    start, losses, state = trained(dtype)
    paths = [path for path, leaf in leaves_with_path(state.params) if leaf_of(leaf).packed]
    assert sorted(paths) == sorted(f"{part}/{name}/kernel" for part in ("ahead", "blocks") for name in ("down", "up"))
    params, want = trained_on_one_device(start)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_same_params(unpacked(state.params), params, tolerance=1e-4)
    assert losses[-1] < losses[0] / 2  # guard: the adapters were trained


def test_adapters_above_int8_train_to_the_loss_above_bfloat16():
    of_int8, exact = trained("int8")[1], unpacked(state_on(mesh_of(2, 4), "bfloat16").params)
    above_bfloat16 = trained_on_one_device(jax.tree.map(lambda x: x.astype(np.float32), exact))[1]
    np.testing.assert_allclose(of_int8, above_bfloat16, rtol=0.01)
    assert not np.allclose(of_int8, above_bfloat16, rtol=1e-4)  # guard: they are two bases


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_a_base_takes_is_the_same_on_any_mesh_and_what_the_plan_says(dtype):
    for mesh in (mesh_of(2, 4), mesh_of(1, 8)):
        state = jax.eval_shape(lambda mesh=mesh: state_on(mesh, dtype))
        packed = {path: leaf for path, leaf in leaves_with_path(state.params) if leaf_of(leaf).packed}
        values = 2 * 64 * 128  # of two layers
        bits = 8 * leaf_of(packed["blocks/up/kernel"]).stored_bytes / values
        assert bits == FORMATS[dtype].bits + 16 / 64 and packed["blocks/up/kernel"].value.dtype == jnp.uint8
        plan = plan_sharding(MODEL, dict(mesh.shape), BATCH["x"], **frozen(dtype))
        for path, leaf in packed.items():
            row, parts = plan.row(path), mesh.shape["fsdp"]
            stored = leaf_of(leaf).stored_bytes
            assert (row.parameters.total, row.parameters.per_device) == (stored, stored // parts)
            assert (row.dtype, row.gather_dtype, row.gathered_bytes) == (dtype, dtype, stored // 2)
            assert row.shape == (2, *((64, 128) if "up" in path else (128, 64)))


def test_packed_leaves_travel_as_they_are_stored_and_never_back():
    mesh = mesh_of(2, 4)
    state = abstract_train_state(MODEL, TX, mesh, KEY, BATCH["x"], batch_axes=AXES, **frozen("int8"))
    found = equations(jax.make_jaxpr(make_train_step(mean_loss, mesh, AXES))(state, BATCH, KEY))
    gathers = [eqn.invars[0].aval for _, eqn in found if eqn.primitive.name == "all_gather"]
    assert {aval.shape for aval in gathers if aval.dtype == jnp.uint8} == {(32, 66)}  # a quarter of a layer's matrix
    assert max(aval.size for aval in gathers if aval.dtype != jnp.uint8) == 128  # 'odd', a quarter of [8, 64]
    scatters = [eqn.invars[0].aval.size for _, eqn in found if eqn.primitive.name == "reduce_scatter"]
    assert max(scatters, default=0) <= 64 * 4  # adapters and the head


def test_checkpoints_move_between_meshes_as_they_are_and_exports_are_unpacked(tmp_path):
    state = trained("int8")[2]
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, state)
        mesh = mesh_of(1, 8)
        like = abstract_train_state(MODEL, TX, mesh, KEY, BATCH["x"], batch_axes=AXES, **frozen("int8"))
        restored = checkpointer.restore(like)
    for (path, was), (_, now) in zip(leaves_with_path(state.params), leaves_with_path(restored.params), strict=True):
        np.testing.assert_array_equal(leaf_of(was).value, leaf_of(now).value, err_msg=path)
    assert bytes_per_device(restored.params) < bytes_per_device(state.params)
    export_safetensors(state.params, tmp_path / "exported")
    values = unpacked(state.params)
    read = import_safetensors(tmp_path / "exported", jax.tree.map(np.zeros_like, values))
    jax.tree.map(np.testing.assert_array_equal, read, values)


def test_frozen_again_in_another_dtype_it_is_unpacked_first():
    params = {"w": Sharded(jnp.linspace(-1, 1, 256).reshape(4, 64), ("fsdp", None))}
    packed = freeze_params(params, lambda path: False, frozen_dtype="int8")["w"]
    assert (packed.value.shape, packed.shape, packed.dtype) == ((4, 66), (4, 64), jnp.float32)
    assert freeze_params({"w": packed})["w"].value is packed.value
    again = freeze_params({"w": packed}, frozen_dtype="bfloat16")["w"]
    assert not leaf_of(again).packed and leaf_of(again).axes == ("fsdp",)
    np.testing.assert_array_equal(again.value, packed.unbox().astype(jnp.bfloat16))
    assert np.abs(packed[1] - params["w"].value[1]).max() < 1 / 253  # half a code, of block maxima of at most 1


def test_layers_along_the_packed_dim_are_refused():
    stacked = Sharded(jnp.ones((64, 32)), (None, "fsdp"), trainable=False)
    packed = freeze_params({"w": stacked}, frozen_dtype="int8")["w"]
    with pytest.raises(ValueError, match=r"packed as int8 along dim 0, and dim 0 is that of its layers"):
        packed.remove_axis(0, {})
    assert P(*packed.names) == P(None, "fsdp")  # guard: it is the columns that are split


class Net(nnx.Module):
    def __init__(self, rngs):
        self.lora_head, self.wide = nnx.Linear(64, 4, rngs=rngs), nnx.Linear(8, 64, rngs=rngs)

    def __call__(self, x):
        return self.lora_head(self.wide(x))


def test_modules_of_nnx_which_read_what_is_stored_are_refused():
    model = shard_modules(nnx_model(lambda rngs: Net(rngs)), nnx.Linear, "fsdp", 32)
    state = create_train_state(model, TX, mesh_of(1, 8), KEY, BATCH["x"], batch_axes=AXES, **frozen("int8"))
    packed = {"wide": {"kernel": Sharded(jnp.ones((64, 64)), ("fsdp", None)), "bias": jnp.ones(64)}}
    params = dict(state.params) | freeze_params(packed, lambda path: False, frozen_dtype="int8")
    with pytest.raises(ValueError, match=r"'params/wide/kernel' is stored as int8, and modules of flax.nnx read"):
        model.apply({"params": params}, BATCH["x"])
