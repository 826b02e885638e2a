"""NNX models train as their Linen twins do, sharded from outside: same values, same collectives, same plan.

The reference of the parity table is the plain *Linen* model on one device (``test_parity.reference``), whose parameters
come over under the twin's names. Tolerances are those of the Linen table.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import models, nnx_models
from tests import support as linen
from tests.nnx_models import NAMES_OF_LOOP, NAMES_OF_SCAN, Block, Model
from tests.support import (
    AXES,
    FLOAT32_ROUNDING,
    assert_same_params,
    count_collectives,
    data,
    fsdp,
    mean_loss,
    mesh_of,
)
from tests.test_parity import LEARNING_RATE, MESHES, STEPS, optimizer, reference, train
from xlstm_jax.distributed import (
    DeviceMeshManager,
    abstract_batch,
    abstract_train_state,
    box_like,
    create_train_state,
    init_sharded,
    make_train_step,
    nnx_model,
    plan_sharding,
    rename_leaves,
    shard_nnx_modules,
    shardings,
    unbox,
)
from xlstm_jax.distributed.data_parallel.boxes import is_box, leaves_with_path

KEY, BATCH = jax.random.key(0), data()
UNITS = (Block, nnx.Linear)  # of which the Linear inside a block are none


def is_unit(path, module):
    """What the Linen model wraps: blocks, and the layers before and after them."""
    return isinstance(module, Block) or path in ("first", "last")


def sharded(make=Model, where=is_unit, axis_name="fsdp", min_weight_size=32, **options):
    return shard_nnx_modules(nnx_model(make), where, axis_name, min_weight_size, **options)


def twin(scan=True, remat=False):
    return partial(Model, scan=scan, remat=remat)


def names(scan):
    return NAMES_OF_SCAN if scan else NAMES_OF_LOOP


def back(names):
    return {new: old for old, new in names.items()}


# -------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("mesh_shape, check_vma, scan, remat", [
    ("2x4", True, True, False), ("2x4", False, True, True), ("8", True, False, True), ("4x2", False, False, False),
    ("1", True, True, True),
])  # fmt: skip
def test_a_twin_trains_as_the_linen_model_does_on_one_device(mesh_shape, check_vma, scan, remat):
    shape = MESHES[mesh_shape]
    mesh = DeviceMeshManager.create_device_mesh(shape, devices=jax.devices()[: int(np.prod(list(shape.values())))])
    state = create_train_state(
        sharded(twin(scan, remat)), optimizer(), mesh, KEY, BATCH["x"], batch_axes=tuple(shape), whole_ok=True
    )
    start = jax.jit(linen.Model(scan=scan).init)(KEY, BATCH["x"])["params"]
    values = jax.device_put(rename_leaves(start, names(scan)), unbox(shardings(state.params, mesh)))
    state = state.replace(params=box_like(values, state.params))
    boxed = [leaf for _, leaf in leaves_with_path(state.params) if is_box(leaf)]
    assert len(boxed) >= 5

    grads, losses, params = train(make_train_step(mean_loss, mesh, tuple(shape), check_vma=check_vma), state)

    want = reference(scan, frozenset(), 1)
    assert_same_params(rename_leaves(unbox(grads), back(names(scan))), want[0])
    np.testing.assert_allclose(losses, want[1], rtol=2e-6)
    assert_same_params(rename_leaves(params, back(names(scan))), want[2])
    assert LEARNING_RATE * STEPS > 100 * FLOAT32_ROUNDING  # guard: ten steps do move what is compared


def test_the_initial_values_are_those_of_the_plain_module():
    plain = jax.jit(nnx_model(Model).init)(KEY, BATCH["x"])
    got = init_sharded(sharded(), mesh_of(2, 4), KEY, BATCH["x"], batch_axes=AXES)
    own = nnx.to_pure_dict(nnx.state(Model(nnx.Rngs(KEY)), nnx.Param))
    for (path, value), want, eager in zip(
        leaves_with_path(unbox(got["params"])), jax.tree.leaves(plain["params"]), jax.tree.leaves(own), strict=True
    ):
        np.testing.assert_allclose(value, want, rtol=1e-6, err_msg=path)
        np.testing.assert_allclose(value, eager, rtol=1e-6, err_msg=path)
    kernel = got["params"]["blocks"]["up"]["kernel"]
    assert kernel.names == (None, None, "fsdp") and kernel.value.addressable_shards[0].data.shape == (3, 16, 8)


def lowered_step(model, mesh, batch, loss, check_vma=True, inputs=None):
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = abstract_train_state(model, optax.sgd(0.1), mesh, key, inputs, batch_axes=AXES, whole_ok=True)
    step = make_train_step(loss, mesh, AXES, check_vma=check_vma, whole_ok=True)
    return step.lower(state, abstract_batch(batch, mesh, AXES), key).as_text()


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("block", ["mlp", "transformer", "recurrent"])
def test_a_twin_has_the_plan_and_the_collectives_of_the_linen_model(block, check_vma):
    mesh, remat = mesh_of(2, 4), check_vma
    if block == "mlp":
        x, batch, loss, new_names = BATCH["x"], BATCH, mean_loss, NAMES_OF_SCAN
        ours, other = sharded(twin(True, remat)), linen.Model(fsdp(), True, remat)
    else:
        x = batch = jax.ShapeDtypeStruct((8, 16), jnp.int32)
        new_names, size = {}, {"block": block, "dim": 32, "num_layers": 2, "num_heads": 2, "remat": remat}
        make = partial(nnx_models.LanguageModel, **size)
        ours = sharded(make, lambda path, _: path in ("blocks", "embed", "head"), min_weight_size=64)
        other = models.LanguageModel(**size, wrap=fsdp(min_weight_size=64))

        def loss(params, apply_fn, batch, rng):
            return jnp.mean(apply_fn({"params": params}, batch) ** 2)

    sizes = {"dp": 2, "fsdp": 4}
    rows = {row.path: row for row in plan_sharding(ours, sizes, x).rows}
    for row in plan_sharding(other, sizes, x).rows:
        old = max((name for name in new_names if row.path.startswith(f"{name}/")), key=len, default="")
        new = rows.pop(new_names.get(old, old) + row.path[len(old) :])
        assert (new.names, new.use_shape, new.uses, new.reason) == (row.names, row.use_shape, row.uses, row.reason)
    assert not rows
    counts = [count_collectives(lowered_step(m, mesh, batch, loss, check_vma, x)) for m in (ours, other)]
    assert counts[0] == counts[1] > 5
