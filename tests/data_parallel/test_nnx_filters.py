"""Tests of NNX filters: as units, as trainable parameters, and as masks of weight decay.

The reference is the same NNX module on one device, trained by ``nnx.Optimizer`` with the filter as ``wrt=`` or mask.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.nnx import filterlib

from tests.support import AXES, FLOAT32_ROUNDING, assert_same_params, data, mean_loss, mesh_of
from xlstm_jax.distributed import (
    create_train_state,
    init_sharded,
    make_train_step,
    nnx_model,
    plan_sharding,
    shard_modules,
)
from xlstm_jax.distributed.data_parallel import freeze_params
from xlstm_jax.distributed.data_parallel.trees import sharded_leaves

KEY, BATCH = jax.random.key(0), data()
TX = optax.adamw(1e-2)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up, self.upper = nnx.LoRALinear(16, 32, lora_rank=4, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.upper(nnx.gelu(self.up(self.norm(x))))


class Net(nnx.Module):
    """Two blocks in a list, with numbers in their paths; the adapters start at values that are not zero."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        for block in self.blocks:
            block.up.lora.lora_b[...] = 0.1 * jax.random.normal(rngs.params(), (4, 32))

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def sharded(where=(nnx.Linear, Block)):
    return shard_modules(nnx_model(Net), where, "fsdp", 32)


def units(where):
    rows = plan_sharding(sharded(where), {"dp": 2, "fsdp": 4}, BATCH["x"]).rows
    return {row.gathered_with for row in rows if row.parts > 1}


@pytest.mark.parametrize("where, expected", [
    (filterlib.PathIn(("blocks", 0), ("last",)), {"blocks/0", "last"}),
    # By text, "up" is also part of "upper": a filter compares names.
    (nnx.PathContains("up"), {"blocks/0/up", "blocks/1/up", "blocks/0/up/lora", "blocks/1/up/lora"}),
    (nnx.All(nnx.Linear, nnx.Not(nnx.PathContains("blocks"))), {"first", "last"}),
    (nnx.All(nnx.Linear, nnx.PathContains(1)), {"blocks/1/up", "blocks/1/upper"}),
    ([filterlib.PathIn(("first",)), Block], {"first", "blocks/0", "blocks/1"}),
    (nnx.All(..., nnx.OfType(Block)), {"blocks/0", "blocks/1"}),
    (nnx.Any(lambda path, module: path == ("last",)), {"last"}),
], ids=["paths", "name", "class but name", "class and number", "list", "all of a class", "function"])  # fmt: skip
def test_a_filter_selects_units(where, expected):
    assert units(where) == expected


def trained_on_one_device(tx, wrt):
    """Returns losses and parameters of the plain module after two steps of ``nnx.Optimizer``."""
    module = nnx_model(Net).bind(jax.jit(nnx_model(Net).init)(KEY, BATCH["x"]))
    optimizer = nnx.Optimizer(module, tx, wrt=wrt)

    @nnx.jit
    def step(module, optimizer, batch):
        def loss(module):
            return jnp.mean((module(batch["x"]) - batch["y"]) ** 2)

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(module)
        optimizer.update(module, grads)
        return value

    losses = [step(module, optimizer, BATCH) for _ in range(2)]
    return losses, nnx_model(Net).unbind(module)["params"]


def trained_on_a_mesh(model, tx, check_vma, **options):
    state = create_train_state(model, tx, mesh_of(2, 4), KEY, BATCH["x"], batch_axes=AXES, **options)
    step, losses = make_train_step(mean_loss, mesh_of(2, 4), AXES, check_vma=check_vma), []
    for _ in range(2):
        state, metrics = step(state, BATCH, KEY)
        losses.append(metrics["loss"])
    return losses, state.params


def frozen(params):
    return {path for path, leaf in sharded_leaves(params) if not leaf.trainable}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "trainable",
    [nnx.LoRAParam, nnx.Any(nnx.LoRAParam, filterlib.PathIn(("last", "bias")))],
    ids=["class", "class or path"],
)
def test_a_filter_selects_trainable_parameters(trainable, check_vma):
    losses, params = trained_on_a_mesh(sharded(), TX, check_vma, trainable=trainable)
    wanted, want = trained_on_one_device(TX, trainable)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    # AdamW divides by the root of a mean of squares: a step errs like its gradients, relatively.
    assert_same_params(params, want, 10 * FLOAT32_ROUNDING)
    others = trained_on_one_device(TX, nnx.Param)[0]
    assert not np.allclose(losses, others, rtol=1e-3)  # guard: frozen parameters make a difference
    assert "blocks/0/up/kernel" in frozen(params) and "blocks/0/up/lora/lora_a" not in frozen(params)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_filter_is_a_mask_of_weight_decay(check_vma):
    model, decayed = sharded(), nnx.Not(nnx.Any(nnx.PathContains("bias"), nnx.PathContains("norm")))

    def adamw(mask):
        return optax.adamw(1e-2, weight_decay=0.5, mask=mask)

    losses, params = trained_on_a_mesh(model, adamw(model.leaf_mask(decayed)), check_vma)
    # The reference has the mask as a tree, made by hand.
    plain = nnx_model(Net).init(KEY)["params"]
    tree = jax.tree_util.tree_map_with_path(lambda path, _: not any(n in str(path) for n in ("bias", "norm")), plain)
    tx, want = adamw(tree), plain
    opt_state, wanted = tx.init(want), []

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(lambda params: mean_loss(params, nnx_model(Net).apply, BATCH))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for _ in range(2):
        want, opt_state, loss = step(want, opt_state)
        wanted.append(loss)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_same_params(params, want, 10 * FLOAT32_ROUNDING)
    everywhere = trained_on_a_mesh(model, adamw(None), check_vma)[1]
    assert np.abs(everywhere["blocks"]["0"]["norm"]["scale"] - params["blocks"]["0"]["norm"]["scale"]).max() > 1e-3
    # ``nnx.Optimizer`` passes a state of variables to the mask.
    module = model.bind(init_sharded(model, mesh_of(2, 4), KEY, BATCH["x"], batch_axes=AXES))
    optimizer = nnx.Optimizer(module, adamw(model.leaf_mask(decayed)), wrt=nnx.Param)
    grads = jax.tree.map(jnp.zeros_like, nnx.state(module, nnx.Param))
    before = model.unbind(module)["params"]
    optimizer.update(module, grads)
    after = model.unbind(module)["params"]
    assert_same_params(after["last"]["kernel"].value, 0.995 * before["last"]["kernel"].value)
    np.testing.assert_array_equal(after["blocks"]["0"]["norm"]["scale"], before["blocks"]["0"]["norm"]["scale"])


def test_a_mask_with_frozen_parameters_and_a_predicate_for_freeze_params():
    model = sharded()
    is_lora = model.leaf_predicate(nnx.LoRAParam)
    params = freeze_params(init_sharded(model, mesh_of(2, 4), KEY, batch_axes=AXES)["params"], is_lora)
    assert frozen(params) and all("lora" not in path for path in frozen(params))
    tx = optax.adamw(1e-2, mask=model.leaf_mask(nnx.PathContains("lora_a")))
    losses, _ = trained_on_a_mesh(model, tx, True, trainable=nnx.LoRAParam)
    assert np.isfinite(losses).all()
    rows = plan_sharding(model, {"dp": 2, "fsdp": 4}, BATCH["x"], trainable=nnx.LoRAParam).rows
    assert {row.path for row in rows if not row.trainable} == frozen(params)


def test_selections_that_fit_nothing():
    model = sharded()
    with pytest.raises(ValueError, match=r"PathContains\('uper'.*matches no module. There are .*blocks/0/up: LoRALin"):
        sharded(nnx.PathContains("uper"))
    with pytest.raises(TypeError, match=r"where is the class Param: pass a module class .* a filter of modules"):
        sharded(nnx.Param)
    with pytest.raises(ValueError, match=r"selects none of the parameters: 'blocks/0/norm/bias.*path as a tuple"):
        model.leaf_predicate(nnx.BatchStat)
    with pytest.raises(TypeError, match=r"selection of parameters is 'lora'; pass a filter of NNX"):
        model.leaf_mask("lora")
    with pytest.raises(TypeError, match=r"trainable is the class LoRAParam.*model.leaf_predicate\(filter\)"):
        freeze_params(jax.eval_shape(model.init, KEY)["params"], nnx.LoRAParam)
    options = {"batch_axes": AXES, "trainable": lambda path: "lora" in path}
    params = jax.eval_shape(lambda: create_train_state(model, TX, mesh_of(2, 4), KEY, **options))
    assert frozen(params.params) and all("lora" not in path for path in frozen(params.params))
