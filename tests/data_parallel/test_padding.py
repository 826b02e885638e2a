"""Tests of ``uneven="pad"``: dims that the devices do not divide are stored with zeros, invisible to users."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from tests.support import assert_each_leaf, assert_same_params, fsdp, normal, plain
from xlstm_jax.distributed import (
    Checkpointer,
    DeviceMeshManager,
    create_train_state,
    export_safetensors,
    import_safetensors,
    init_sharded,
    make_train_step,
    plan_sharding,
    shard_module_params,
    shard_params,
)
from xlstm_jax.distributed.checkpoint.record import _written, bare_leaves, boxed_like
from xlstm_jax.distributed.data_parallel.extensions.padding import Pad, ZeroPadding
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, stored_value, true_value
from xlstm_jax.distributed.data_parallel.store import UNCHANGED_STORE, LeafToSplit
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves
from xlstm_jax.distributed.training.state import abstract_train_state

FEATURES, WIDTH, CLASSES = 5, 7, 3
TX = {
    "adamw": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
}


class Odd(nn.Module):
    """Model without dims that 2, 4 or 8 divide; the hidden layers are scanned."""

    wrap: object = lambda module: module

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(self.wrap(nn.Dense)(WIDTH, name="first")(x))
        layer = nn.scan(Hidden, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = layer(self.wrap, name="layers")(x, None)
        return self.wrap(nn.Dense)(CLASSES, name="last")(x)


class Hidden(nn.Module):
    wrap: object

    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(self.wrap(nn.Dense)(WIDTH, name="dense")(x)), None


def loss_fn(params, apply_fn, batch, rng):
    del rng
    return jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)


@cache
def batch():
    return {
        "x": normal(1, (24, FEATURES)),
        "y": normal(2, (24, CLASSES)),
    }


def mesh_of(devices):
    return DeviceMeshManager.create_device_mesh({"fsdp": devices}, jax.devices()[:devices])


PADDED = fsdp(uneven="pad", min_weight_size=1)


def start(devices, tx="adamw", wrap=PADDED):
    key = jax.random.key(0)
    return create_train_state(Odd(wrap), TX[tx], mesh_of(devices), key, batch()["x"], batch_axes="fsdp")


@cache
def program(devices, tx, wrap, check_vma):
    """Returns the initial state of a training, and the step."""
    return start(devices, tx, wrap), make_train_step(loss_fn, mesh_of(devices), "fsdp", check_vma=check_vma)


def trained(devices, tx="adamw", wrap=PADDED, steps=3, check_vma=True):
    state, step = program(devices, tx, wrap, check_vma)
    state = jax.tree.map(jnp.copy, state)  # the step donates its state
    for _ in range(steps):
        state, metrics = step(state, batch(), jax.random.key(0))
    return state, metrics


def true_tree(tree):
    return jax.device_get(map_leaves(true_value, tree))


def padding_of(tree):
    """Returns the values of all padding, by path."""
    found = {}
    for path, leaf in leaves_with_path(tree):
        if not leaf_of(leaf).stores_value:
            value = np.asarray(leaf_of(leaf).value)
            inside = np.zeros(value.shape, bool)
            inside[tuple(slice(n) for n in true_value(leaf).shape)] = True
            found[path] = value[~inside]
    return found


# The padding that an optimizer sees depends neither on the mode nor on the number of devices.
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "devices, check_vma, tx", [(8, True, "adafactor"), (8, True, "adamw"), (8, False, "lamb"), (4, True, "adamw")]
)
def test_training_with_padded_leaves_matches_a_single_device(devices, check_vma, tx):
    """Padded training equals one device with Adafactor and LAMB, whose means over a leaf must exclude padding."""
    state, metrics = trained(devices, tx, check_vma=check_vma)
    want, want_metrics = trained(1, tx, wrap=plain)
    assert_same_params(true_tree(state.params), true_tree(want.params), tolerance=1e-4)
    np.testing.assert_allclose(metrics["grad_norm"], want_metrics["grad_norm"], rtol=1e-5)
    without_padding = [path for path, leaf in leaves_with_path(state.params) if leaf_of(leaf).stores_value]
    assert not without_padding  # guard


def test_padded_leaves_are_stored_in_even_shards_and_padding_stays_zero():
    state, _ = trained(8)
    shapes = {path: leaf_of(leaf).value.shape for path, leaf in leaves_with_path(state.params)}
    assert shapes["first/kernel"] == (FEATURES, 8) and shapes["layers/dense/kernel"] == (3, WIDTH, 8)
    for tree in (state.params, state.opt_state):
        padding = padding_of(tree)
        assert padding and all(values.size and not values.any() for values in padding.values())
    for _, leaf in leaves_with_path(state.params):
        assert leaf_of(leaf).value.addressable_shards[0].data.size == leaf_of(leaf).value.size // 8
    mu = next(leaf for path, leaf in leaves_with_path(state.opt_state) if path.endswith("mu/layers/dense/kernel"))
    assert leaf_of(mu).value.addressable_shards[0].data.size == 3 * WIDTH


def test_initial_values_of_padded_leaves_equal_the_plain_model():
    want = jax.jit(Odd().init)(jax.random.key(0), batch()["x"])["params"]
    assert_each_leaf(np.testing.assert_array_equal, true_tree(start(8).params), jax.device_get(want))


def test_plan_replicates_an_indivisible_leaf_by_default_and_pads_with_uneven_pad():
    x = batch()["x"]
    whole = plan_sharding(Odd(fsdp(min_weight_size=1)), {"fsdp": 8}, x, tx=TX["adamw"])
    padded = plan_sharding(Odd(PADDED), {"fsdp": 8}, x, tx=TX["adamw"])
    path = "layers/dense/kernel"
    assert whole.row(path).parts == 1 and "8 divides no free dim" in whole.explain(path)
    assert padded.row(path).parts == 8 and "padded to 8" in padded.explain(path)
    assert padded.row(path).shape == (3, WIDTH, WIDTH)
    assert padded.row(path).gathered_bytes == WIDTH * 8 * 4  # the padding travels, too
    total = 3 * WIDTH * WIDTH * 4
    assert tuple(padded.row(path).parameters) == (total, 3 * WIDTH * 4)
    assert tuple(padded.row(path).optimizer) == (2 * total, 2 * 3 * WIDTH * 4)
    assert tuple(whole.row(path).parameters) == (total, total)
    with pytest.raises(ValueError, match="uneven='cut' is none of"):
        shard_module_params(nn.Dense, "fsdp", uneven="cut")


@pytest.mark.slow
def test_checkpoints_of_padded_leaves_restore_on_any_number_of_devices(tmp_path):
    state, _ = trained(8)
    want = true_tree((state.params, state.opt_state))
    for index, devices in enumerate((8, 4, 1, 3, 8)):
        with Checkpointer(tmp_path / str(index)) as checkpointer:
            checkpointer.save(1, state, force=True)
            checkpointer.wait()
            target = abstract_train_state(
                Odd(PADDED), TX["adamw"], mesh_of(devices), jax.random.key(0), batch()["x"], batch_axes="fsdp"
            )
            state = checkpointer.restore(target)
        assert_each_leaf(np.testing.assert_array_equal, true_tree((state.params, state.opt_state)), want)
        kernels = (leaf_of(leaf) for path, leaf in leaves_with_path(state.params) if "dense/kernel" in path)
        widths = {kernel.value.shape[-1] for kernel in kernels}
        assert widths == {-(-WIDTH // devices) * devices}
        padding = padding_of((state.params, state.opt_state))
        assert not [path for path, values in padding.items() if values.any()], f"padding on {devices} devices"
    again, _ = program(8, "adamw", PADDED, True)[1](state, batch(), jax.random.key(0))
    further, _ = trained(8, steps=4)
    assert_each_leaf(np.testing.assert_array_equal, true_tree(again.params), true_tree(further.params))


@pytest.mark.parametrize(
    "shape, parts",
    [((12, 42), 8), ((6, 7), 2), ((7, 5), 1), ((2, 3, 20), 8), ((42,), 2)],
    ids=str,
)
def test_padded_leaf_is_saved_and_restored_in_as_many_parts_as_its_dims_allow(shape, parts):
    box = jax.jit(
        jax.shard_map(
            partial(shard_params, axis_name="fsdp", min_weight_size=0, uneven="pad"),
            mesh=mesh_of(8),
            in_specs=P(),
            out_specs={"w": P(*[None] * int(np.argmax(shape)), "fsdp")},
            check_vma=False,
        )
    )({"w": jnp.arange(1.0, 1 + np.prod(shape)).reshape(shape)})
    (value,) = bare_leaves(box).values()
    size = int(np.prod(shape))
    np.testing.assert_array_equal(value, np.arange(1.0, 1 + size).reshape(shape))
    assert np.prod(value.sharding.shard_shape(shape)) == size // parts
    back = boxed_like(box, {"w": value})
    np.testing.assert_array_equal(back["w"].value, box["w"].value)
    assert back["w"].value.sharding == box["w"].value.sharding

    def gathers(write):
        program = jax.jit(partial(write, box["w"]), out_shardings=box["w"].value.sharding).lower(value).compile()
        return re.findall(r"all-gather|all-reduce", program.as_text())

    assert not gathers(_written), "a device has the value in full"
    assert gathers(stored_value) or parts < 8  # guard: in one step XLA puts the value together on each device


def test_exported_and_saved_values_of_a_padded_leaf_have_no_padding(tmp_path):
    model, x = PADDED(nn.Dense)(7), jnp.ones((8, 6))
    params = init_sharded(model, mesh_of(8), jax.random.key(0), x, batch_axes="fsdp")["params"]
    export_safetensors(params, tmp_path)
    for saved in (load_file(tmp_path / "model.safetensors"), bare_leaves(params)):  # the second is of a checkpoint
        assert saved["kernel"].shape == (6, 7)
        np.testing.assert_array_equal(saved["kernel"], true_value(params["kernel"]))
    assert leaf_of(params["kernel"]).value.shape == (6, 8)  # guard: stored with padding


def test_safetensors_of_padded_leaves_load_in_plain_and_padded_models(tmp_path):
    state = start(8)
    export_safetensors(state.params, tmp_path)
    plain = jax.eval_shape(Odd().init, jax.random.key(0), batch()["x"])["params"]
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    plain = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), plain)
    assert_each_leaf(np.testing.assert_array_equal, import_safetensors(tmp_path, plain), true_tree(state.params))
    back = import_safetensors(tmp_path, state.params)
    assert_each_leaf(np.testing.assert_array_equal, true_tree(back), true_tree(state.params))
    assert padding_of(back).keys() == padding_of(state.params).keys()


def test_padding_of_two_dims_by_hand():
    """W[5, 7] is padded to [8, 7] for four parts, and then to [8, 9] for three."""
    leaf = LeafToSplit(jax.ShapeDtypeStruct((5, 7), jnp.float32), (None, None), 0, UNCHANGED_STORE)
    padded = Pad().prepare_for_split(leaf, 4)
    padded = Pad().prepare_for_split(padded._replace(dim=1), 3)
    store = padded.store
    assert (padded.value.shape, store) == ((8, 9), ZeroPadding((5, 7)))
    assert Pad().prepare_for_split(padded, 9) is padded
    assert store.shape((2, 3), (4, 3)) == (5, 7)
    value = 1 + np.arange(35.0).reshape(5, 7)
    stored = np.asarray(store.write(jnp.asarray(value), (8, 9)))
    assert stored.shape == (8, 9) and stored.sum() == value.sum()
    assert np.array_equal(store.read(stored, (False, False)), value) and store.read(stored, (True, False)).shape == (
        8,
        7,
    )
    for i, j in np.ndindex(4, 3):
        part = slice(2 * i, 2 * i + 2), slice(3 * j, 3 * j + 3)
        np.testing.assert_array_equal(store.written_part(value, (8, 9), part), stored[part])


def test_padding_follows_dims_of_layers():
    store = ZeroPadding((5, None, 7))
    assert [store.with_dim(i).sizes for i in (0, 1, 3)] == [(None, 5, None, 7), (5, None, None, 7), (5, None, 7, None)]
    assert [store.without_dim(i).sizes for i in range(3)] == [(None, 7), (5, 7), (5, None)]
    assert [store.of_last_dims(n).sizes for n in (1, 2, 3, 4)] == [(7,), (None, 7), (5, None, 7), (5, None, 7)]
    assert ZeroPadding((5, None)).without_dim(0) is ZeroPadding((5, None)).of_last_dims(1) is UNCHANGED_STORE
