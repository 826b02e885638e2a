"""Tests of ``stack_layers`` and ``unstack_layers``, shard by shard; and of splitting an array over devices."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from jax.sharding import NamedSharding, PartitionSpec

from tests.support import (
    AXES,
    FLOAT32_ROUNDING,
    Model,
    assert_each_leaf,
    assert_same_params,
    count_collectives,
    data,
    fsdp,
    mean_loss,
    mesh_of,
    on_mesh,
)
from xlstm_jax.distributed import (
    Checkpointer,
    abstract_train_state,
    create_train_state,
    make_train_step,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel import rename, split_array_over_mesh, stack_layers, trees, unstack_layers
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, true_value

LOOP, SCAN = "block_{}", "blocks"
TX = optax.adamw(1e-2)


@cache
def states():
    """Returns a state of the loop model and a state of the scan model, on the same mesh."""
    wrap = fsdp(axis_name=AXES, gather_dtype="bfloat16", uneven="pad", min_weight_size=4)
    where = (TX, mesh_of(2, 4), jax.random.key(0), data()["x"])
    return [create_train_state(Model(wrap, scan), *where, batch_axes=AXES) for scan in (False, True)]


def described(tree):
    """Returns boxes, shapes, dtypes and placements of a tree, without values."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves]


@pytest.mark.slow
def test_stack_layers_turns_a_loop_state_into_an_equal_scan_state_for_training():
    """``stack_layers`` makes a scan state of a loop state: boxes, placements, moments and the next step agree."""
    loop, scan = states()
    step = make_train_step(mean_loss, mesh_of(2, 4), AXES)
    loop, _ = step(jax.tree.map(jnp.copy, loop), data(), jax.random.key(1))
    stacked = stack_layers(jax.tree.map(jnp.copy, loop), LOOP, SCAN).replace(apply_fn=scan.apply_fn)
    assert described(stacked.params) == described(scan.params)
    assert described(stacked.opt_state) == described(scan.opt_state)
    assert any(not leaf_of(leaf).stores_value for _, leaf in trees.leaves_with_path(scan.params))  # guard

    back = unstack_layers(stacked, SCAN, LOOP)
    assert described(back.params) == described(loop.params)
    assert_each_leaf(np.testing.assert_array_equal, back.params, loop.params)

    loop, of_loop = step(loop, data(), jax.random.key(1))
    stacked, of_scan = step(stacked, data(), jax.random.key(1))
    np.testing.assert_allclose(of_scan["loss"], of_loop["loss"], rtol=FLOAT32_ROUNDING)
    # AdamW makes a step of lr=0.01 out of any gradient, so a gradient that is pure rounding may differ by
    # a hundredth of it here.
    assert_same_params(unstack_layers(stacked.params, SCAN, LOOP), loop.params, 1e-3)


def test_checkpoint_of_a_loop_model_restores_into_a_scan_model_on_another_mesh(tmp_path):
    loop, _ = states()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"train": loop})
    model = Model(fsdp(axis_name=AXES), scan=True)
    target = abstract_train_state(model, TX, mesh_of(1, 4), jax.random.key(0), data()["x"], batch_axes=AXES)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore({"train": unstack_layers(target, SCAN, LOOP)})["train"]
        params = checkpointer.restore_params(unstack_layers(target.params, SCAN, LOOP))
    state = stack_layers(restored, LOOP, SCAN)
    for got, want in [(state.params, target.params), (state.opt_state, target.opt_state)]:
        assert described(got) == described(want)
    assert state.apply_fn == model.apply
    want = stack_layers(trees.map_leaves(true_value, loop.params), LOOP, SCAN)
    assert_same_params(state.params, want, tolerance=0)
    assert_same_params(params, restored.params, tolerance=0)


@pytest.mark.parametrize("spec", [PartitionSpec("fsdp"), PartitionSpec(None, AXES)], ids=str)
def test_stack_and_unstack_layers_keep_shardings_without_collectives(spec):
    mesh = mesh_of(2, 4)
    x = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, spec))
    scan = stack_layers({"block_0": x, "block_1": x + 1}, LOOP, SCAN)
    assert scan[SCAN].sharding == NamedSharding(mesh, PartitionSpec(None, *spec))
    assert [leaf.sharding for leaf in unstack_layers(scan, SCAN, LOOP).values()] == [x.sharding] * 2
    for fn, sharding, values in [
        (rename._stack, scan[SCAN].sharding, (x, x)),
        (rename._split, x.sharding, (scan[SCAN],)),
    ]:
        program = rename._jitted(fn, sharding).lower(*values).compile().as_text()
        assert count_collectives(program) == 0 and "num_partitions=8" in program


def test_stack_layers_finds_layers_at_any_depth_and_in_any_container():
    loop = FrozenDict(
        {
            "enc": {"layer_0_x": {"w": np.zeros(3)}, "layer_1_x": {"w": np.ones(3)}, "layer_10": np.ones(2)},
            "layer_0_x": {"enc": {"w": jnp.ones(())}},
            "layer_1_x": {"enc": {"w": jnp.zeros(())}},
        }
    )
    tx = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    opt_state = tx.init(loop)
    scan = stack_layers((loop, opt_state), "layer_{}_x", "layers")
    assert isinstance(scan[0], FrozenDict) and isinstance(scan[0]["enc"]["layers"]["w"], np.ndarray)
    assert scan[0]["layers"]["enc"]["w"].shape == (2,) and scan[0]["enc"]["layer_10"].shape == (2,)
    assert jax.tree.structure(scan[1]) == jax.tree.structure(
        optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(scan[0])
    )
    assert_each_leaf(np.testing.assert_array_equal, unstack_layers(scan, "layers", "layer_{}_x"), (loop, opt_state))


@pytest.mark.parametrize("lacking", [0, 1])
def test_layers_of_which_one_lacks_a_leaf_raise_and_a_single_layer_is_stacked(lacking):
    layers = {f"block_{i}": {"w": np.ones(2)} if i == lacking else {"b": np.ones(3), "w": np.ones(2)} for i in (0, 1)}
    bias = ["not there" if i == lacking else r"float64\[3\]" for i in (0, 1)]
    with pytest.raises(ValueError, match=f"'block_0/b' is {bias[0]}, and 'block_1/b' is {bias[1]}: the layers"):
        stack_layers(layers, LOOP, SCAN)
    assert stack_layers({"block_0": layers["block_0"]}, LOOP, SCAN)[SCAN]["w"].tolist() == [[1, 1]]


# ---------------------------------------------------------------------------------------------- an array over the mesh

WHOLE = PartitionSpec()


def split_on(mesh, axes, dim, out_spec=WHOLE, check_vma=True):
    return on_mesh(partial(split_array_over_mesh, axis_name=axes, split_axis=dim), mesh, check_vma, WHOLE, out_spec)


def test_layers_are_stacked_by_number_and_other_names_stay():
    names = [
        "block_10",
        "block_2",
        "block_0_norm",
        "norm_block_0",
        "block_01",
        "block_",
        *map("block_{}".format, (0, 1)),
    ]
    names += [f"block_{number}" for number in range(3, 10)]
    tree = {name: {"w": np.full(2, place)} for place, name in enumerate(names)}
    assert isinstance(stack_layers(FrozenDict(tree), "block_{}", "blocks"), FrozenDict)
    stacked = stack_layers(tree, "block_{}", "blocks")
    assert set(stacked) == {"blocks", "block_0_norm", "norm_block_0", "block_01", "block_"}
    assert stacked["blocks"]["w"][:, 0].tolist() == [names.index(f"block_{number}") for number in range(11)]
    with pytest.raises(ValueError, match="the tree has no 'block_0'"):
        stack_layers({"block_0_norm": tree["block_0"]}, "block_{}", "blocks")
    back = unstack_layers(stacked, "blocks", "block_{}")
    assert jax.tree.map(np.ndarray.tolist, back) == jax.tree.map(np.ndarray.tolist, tree)


@pytest.mark.parametrize("axes", ["fsdp", ("fsdp", "dp")], ids=str)
def test_split_array_over_mesh_assigns_slices_in_the_order_of_the_axes(axes):
    x = jnp.arange(96).reshape(4, 24)
    np.testing.assert_array_equal(split_on(mesh_of(2, 4), axes, -1, PartitionSpec(None, axes))(x), x)


@pytest.mark.parametrize("check_vma", [True, False])
def test_split_array_over_mesh_has_exact_gradients(check_vma):
    """``split_array_over_mesh`` has exact gradients for replicated parameters and for the output of an all-gather."""
    w, v, c = (jax.random.normal(key, (8, 16)) for key in jax.random.split(jax.random.key(0), 3))

    def loss(w, v, c):
        return jnp.mean(jnp.tanh(w * c) * jnp.tanh(2 * v * c))

    def on_device(w, v_shard, c):
        def local(w, v_shard):
            v = jax.lax.all_gather(v_shard, "fsdp", axis=1, tiled=True)
            return loss(*(split_array_over_mesh(x, "fsdp", 0) for x in (w, v, c)))

        # JAX transposes all_gather to the sum over devices.
        return *value_and_grad(local, "fsdp")(w, v_shard), jax.grad(lambda v: local(w, v) / 8)(v_shard)

    split = PartitionSpec(None, "fsdp")
    run = on_mesh(on_device, mesh_of(1, 8), check_vma, (WHOLE, split, WHOLE), (WHOLE, WHOLE, split))
    value, of_w, of_v = run(w, v, c)
    want, (want_w, want_v) = jax.value_and_grad(loss, (0, 1))(w, v, c)
    np.testing.assert_allclose(value, want, rtol=FLOAT32_ROUNDING)
    # Gradients of a mean over 128 values are of size 1 / 128; rounding is relative to their terms.
    np.testing.assert_allclose(of_w, want_w, atol=1e-7)
    np.testing.assert_allclose(of_v, want_v, atol=1e-7)
    assert np.abs(want_w).max() > 1e-3 < np.abs(want_v).max()  # guard
