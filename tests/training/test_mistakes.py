"""Tests of mistakes that run, and of programs that ended in raw errors: a single warning; correct code has none."""

import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.mistaken_models import OwnScan, ScanInScan, Stacked
from tests.step_corpus import ENTRIES
from tests.support import (
    AXES,
    assert_each_leaf,
    assert_same_params,
    data,
    fsdp,
    mean_loss,
    mesh_of,
    on_mesh,
    weighted_loss,
)
from xlstm_jax.distributed import (
    Checkpointer,
    abstract_train_state,
    check_replicas,
    check_step,
    create_train_state,
    gather_params,
    make_eval_step,
    make_train_step,
    partition_specs,
    shard_batch,
    shard_modules,
    skip_nonfinite,
    unbox,
    value_and_grad,
    with_ema,
)
from xlstm_jax.distributed.data_parallel import box_like
from xlstm_jax.distributed.data_parallel.trees import stored_values
from xlstm_jax.distributed.metrics import WeightedMean
from xlstm_jax.distributed.metrics.cells import Maximum, Total
from xlstm_jax.distributed.optimizers import muon
from xlstm_jax.distributed.training import mistakes

KEY, BATCH, MESH = jax.random.key(0), data(), mesh_of(2, 4)
ODD = data(features=7)  # no axis divides a dim of [7, 18]
DOWN = optax.linear_schedule(0.1, 0.0, 10)


@pytest.fixture(autouse=True)
def nothing_was_told():
    mistakes._warned.clear()


def create(tx=None, model=None, axes=AXES, make=create_train_state, batch=BATCH, **options):
    return make(model or fsdp(nn.Dense)(4), tx or optax.sgd(0.1), MESH, KEY, batch["x"], batch_axes=axes, **options)


def padding(features, **options):
    return create(model=fsdp(nn.Dense, uneven="pad")(features), batch=ODD, **options)


def copied(tree):
    """Returns unboxed copies of the parameters, safe from donation."""
    return jax.tree.map(jnp.copy, unbox(tree))


def abstract(tx=None, model=None, **options):
    return create(tx, model, make=abstract_train_state, **options)


def traced(loss=mean_loss, tx=None, batch=BATCH, axes=AXES, model=None, **options):
    return make_train_step(loss, MESH, axes, **options).trace(abstract(tx, model, axes=axes), batch, KEY)


# ------------------------------------------------------------------------------------- warnings, and correct neighbours


def with_mask(mask):
    return optax.adamw(0.1, mask=lambda params: jax.tree_util.tree_map_with_path(mask, params))


def is_kernel(path, _):
    return "kernel" in jax.tree_util.keystr(path)


def aux(**beside):
    """Returns a trace of a step whose loss has auxiliary outputs: functions of the squared errors."""

    def loss(params, apply_fn, batch, rng):
        errors = (apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2
        return errors.mean(), {name: make(errors) for name, make in beside.items()}

    return lambda: traced(loss, has_aux=True)


def idle(**options):
    return lambda: traced(axes="fsdp", **options)


def uses_dp(params, apply_fn, batch, rng):
    """Loss in which each device along "dp" takes half of the rows: the model splits the batch."""
    half = batch["x"].shape[0] // 2
    x = jax.lax.dynamic_slice_in_dim(batch["x"], jax.lax.axis_index("dp") * half, half)
    return jax.lax.pmean(jnp.mean(apply_fn({"params": params}, x) ** 2), "dp")


def padded(weigh=False, loss=mean_loss, **options):
    """Runs a step on 14 rows padded to 16."""
    rows = {name: np.asarray(BATCH[name][:14]) for name in ("x", "y")}
    batch, weight = shard_batch(rows, MESH, AXES, pad=True)
    batch |= {"weight": weight} if weigh else {}
    make_train_step(loss, MESH, AXES, **options)(create(), batch, KEY)


def evaluated(weigh):
    batch, weight = shard_batch({"x": np.asarray(BATCH["x"][:14])}, MESH, AXES, pad=True)
    metric = WeightedMean()

    def eval_fn(params, apply_fn, batch):
        values = {"values": apply_fn({"params": params}, batch["x"]).mean(-1)}
        return values | ({"weight": batch["weight"]} if weigh else {})

    step = make_eval_step(eval_fn, MESH, AXES, metric=metric)
    step(create(), batch | ({"weight": weight} if weigh else {}), metric.empty(AXES, MESH))


NARROW = fsdp(nn.Dense)(4, param_dtype=jnp.bfloat16)
TOLD = {
    "bfloat16 master weights": (
        lambda: abstract(model=NARROW),
        r"'bias', and 2 of 2 parameters in all, are trained in bfloat16: .* than 0.0039 of a weight.*in float32, and",
    ),
    "a mask that is never true": (
        lambda: abstract(optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: isinstance(x, nn.Partitioned), p))),
        r"mask of weight decay is False for all 2 parameters, 'bias', 'kernel': nothing decays.*choose by shape or",
    ),
    "ndim > 1 of stacked layers": (
        lambda: abstract(with_mask(lambda _, x: x.ndim > 1), Stacked()),
        r"takes 'blocks/Dense_0/bias'.* of 2 dims, and no parameter of one dim, as 'Dense_0/bias'.*Choose parameters",
    ),
    "ndim > 1, injected": (
        lambda: abstract(
            optax.inject_hyperparams(optax.adamw, static_args="mask")(
                0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
            ),
            Stacked(),
        ),
        "takes 'blocks/Dense_0/bias'",
    ),
    "MultiSteps, weighted": (
        lambda: traced(weighted_loss, skip_nonfinite(optax.MultiSteps(optax.adam(0.1), 4)), weighted=True),
        r"weighted=True with optax.MultiSteps\(..., 4\).*num_minibatches=4, weighted=True",
    ),
    "another schedule": (
        lambda: traced(tx=optax.adamw(DOWN), learning_rate=optax.linear_schedule(0.1, 0.05, 10)),
        r"another schedule than the optimizer's: at update 1 it is 0.095, and the optimizer scales by 0.09\.",
    ),
    "another schedule, injected": (
        lambda: traced(tx=optax.inject_hyperparams(optax.sgd)(DOWN), learning_rate=lambda count: 5.0),
        r"at update 0 it is 5, and the optimizer scales by 0.1\.",
    ),
    "an idle axis": (
        idle(),
        r"along 'dp' of the mesh dp=2,fsdp=4 all devices compute the same.*2 times the work.*Name",
    ),
    "an idle axis, no types": (
        idle(check_vma=False),
        "along 'dp' of the mesh dp=2,fsdp=4 all devices compute the same",
    ),
    "a maximum": (aux(worst=jnp.max), r"aux\['worst'\] is the largest on each device.*over 8 .*Maximum.of\(x\)"),
    "a sum": (
        aux(total=lambda e: {"of": jnp.float32(jnp.sum(e > 1))}),
        r"aux\['total/of'\] is the sum .*Total.of\(x\)",
    ),
    "a perplexity": (aux(ppl=lambda e: jnp.exp(e.mean())), r"aux\['ppl'\] is the exponential.*Return the mean itself"),
    "padded rows": (padded, r"has made 16 rows of 14, .* is in no leaf of the batch, 'x', 'y': copies count like"),
    "padded rows, evaluated": (lambda: evaluated(weigh=False), r"has made 16 rows of 14, .*metric.update"),
}


@pytest.mark.parametrize("mistake, says", TOLD.values(), ids=TOLD)
def test_mistake_warns_once_with_the_cure(mistake, says):
    with pytest.warns(UserWarning, match=says) as told:
        mistake()
    assert len(told) == 1
    mistake()


def own_schedule(tx, schedule):
    return lambda: traced(tx=tx, learning_rate=schedule)


RIGHT = {
    "float32 computed in bfloat16": lambda: abstract(model=fsdp(nn.Dense)(4, dtype=jnp.bfloat16)),
    "frozen in bfloat16": lambda: abstract(trainable=lambda path: "bias" in path, frozen_dtype="bfloat16"),
    "a mask by ndim": lambda: abstract(with_mask(lambda _, x: x.ndim > 1)),
    "a mask by name of stacked layers": lambda: abstract(with_mask(is_kernel), Stacked()),
    "everything decays": lambda: abstract(optax.adamw(0.1), Stacked()),
    "a mask without the head": lambda: abstract(with_mask(lambda path, _: "Dense_1" not in str(path)), Stacked()),
    "a mask of another transform": lambda: abstract(optax.masked(optax.adam(0.1), {"bias": False, "kernel": False})),
    "MultiSteps of means": lambda: traced(tx=optax.MultiSteps(optax.adam(0.1), 4)),
    "weighted minibatches": lambda: traced(weighted_loss, num_minibatches=2, weighted=True),
    "the optimizer's schedule": own_schedule(optax.adamw(DOWN), DOWN),
    "an equal schedule": own_schedule(optax.adamw(DOWN), optax.linear_schedule(0.1, 0.0, 10)),
    "scaled once more": own_schedule(optax.chain(optax.sgd(DOWN), optax.scale(0.5)), lambda count: 0.5 * DOWN(count)),
    "one of two groups": own_schedule(
        optax.partition({"a": optax.sgd(lambda count: 1.0), "b": optax.adam(DOWN)}, {"bias": "a", "kernel": "b"}),
        {"a": lambda count: 1.0, "b": DOWN},
    ),
    "an optimizer that keeps no schedule": own_schedule(optax.sgd(0.1), DOWN),
    "muon": own_schedule(muon(DOWN), DOWN),
    "all axes": traced,
    "parameters over the axis": idle(model=fsdp(nn.Dense, axis_name=("dp", "fsdp"))(4), check_vma=False),
    "a model that uses the axis": lambda: traced(uses_dp, axes="fsdp"),
    "a mean of maxima": aux(max_error=lambda e: e.max(-1).mean(), norm=lambda e: jnp.mean(jnp.sqrt(e))),
    "cells": aux(worst=Maximum.of, total=Total.of, loss_sum=lambda e: e.mean()),
    "weighted sums": lambda: traced(
        lambda *args: (weighted_loss(*args), {"sum": jnp.sum(args[2]["y"])}), has_aux=True, weighted=True
    ),
    "padded rows with weights": lambda: padded(True, weighted_loss, weighted=True),
    "padded rows, evaluated with weights": lambda: evaluated(weigh=True),
}


@pytest.mark.parametrize("program", RIGHT.values(), ids=RIGHT)
def test_correct_variant_of_a_mistake_gives_no_warning(program):
    program()  # a warning is an error here


def test_optimizer_chains_similar_to_rejected_chains_are_accepted():
    abstract(optax.chain(optax.clip_by_global_norm(1.0), with_ema(optax.adam(0.1), 0.9)))
    abstract(with_ema(optax.chain(optax.adam(0.1), optax.scale(0.5)), 0.9))
    abstract(optax.adamw(0.1, mask=unbox(jax.tree.map(lambda x: x.ndim > 1, create().params))))


# ----------------------------------------------------------------------------------------------------------- two models


def distilled(teacher, params, apply_fn, batch):
    wanted = jax.lax.stop_gradient(apply_fn({"params": teacher}, batch["x"]))
    return jnp.mean((apply_fn({"params": params}, batch["x"]) - 2 * wanted) ** 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("check_vma", [True, False])
def test_padded_teacher_parameters_in_collections_train_exactly(check_vma):
    plain = nn.Dense(18)
    teacher, state = padding(18).params, padding(18)
    params = copied(state.params)

    def loss(params, apply_fn, batch, rng, collections):
        return distilled(collections["teacher"], params, apply_fn, batch), {}

    step = make_train_step(loss, MESH, AXES, check_vma=check_vma)
    state, metrics = step(state.replace(collections={"teacher": teacher}), ODD, KEY)
    want, grads = jax.value_and_grad(lambda p: distilled(params, p, plain.apply, ODD))(params)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    assert_same_params(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    assert_same_params(state.collections["teacher"], params)
    assert check_step(step, state, ODD, KEY).ok


# ------------------------------------------------------------------------------------------------- custom updates, GANs

TXS = {
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "muon": muon(0.1),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("tx", TXS.values(), ids=TXS)
def test_apply_gradients_accepts_boxed_and_bare_gradients_of_padded_leaves(tx):
    plain, mesh = nn.Dense(18), MESH
    state = padding(18, tx=tx)
    specs = partition_specs(state.params, mesh)

    def loss(params, batch):
        return jnp.mean(jnp.tanh(state.apply_fn({"params": params}, batch["x"])) ** 2)

    of_mesh = on_mesh(value_and_grad(loss, AXES), mesh, True, (specs, P(AXES)), (P(), specs))
    in_boxes = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    bare = jax.jit(lambda state, grads: state.apply_gradients(grads=unbox(grads)))
    params, opt_state = copied(state.params), tx.init(copied(state.params))
    assert params["kernel"].shape == (7, 18) and state.params["kernel"].value.shape == (7, 20)
    for update in (in_boxes, bare, lambda state, grads: state.apply_gradients(grads=grads, collections={"step": 1})):
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(plain.apply({"params": p}, ODD["x"])) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        structure = jax.tree.structure(state.opt_state)
        state = update(state, of_mesh(state.params, ODD)[1])
        assert jax.tree.structure(state.opt_state) == structure
    assert_same_params(state.params, params, 1e-4)
    assert int(state.step) == 3 and state.collections == {"step": 1}
    assert state.params["kernel"].value.sharding.spec == specs["kernel"]


def test_apply_gradients_with_boxed_opt_state_behaves_as_in_flax():
    state = create()
    boxed = type(state).create(apply_fn=state.apply_fn, params=state.params, tx=optax.adam(0.1))
    grads = jax.tree.map(jnp.ones_like, state.params)
    updated = boxed.apply_gradients(grads=grads)
    assert jax.tree.structure(updated) == jax.tree.structure(boxed)
    specs = partition_specs(boxed, MESH)
    on_devices = on_mesh(lambda s, g: s.apply_gradients(grads=g), MESH, True, (specs, specs.params), specs)
    assert_same_params(on_devices(boxed, grads).params, updated.params)


# ------------------------------------------------------------------------------------------------ padding, and donation


def test_unbox_removes_padding_and_box_like_restores_padding():
    state = padding(18)
    bare = unbox(state.params)
    assert bare["kernel"].shape == (7, 18) and state.params["kernel"].value.shape == (7, 20)
    assert_each_leaf(np.testing.assert_array_equal, box_like(bare, state.params), state.params)
    assert_each_leaf(np.testing.assert_array_equal, box_like(stored_values(state.params), state.params), state.params)
    assert np.asarray(nn.Dense(18).apply({"params": bare}, ODD["x"])).any()
    shapes = padding(18, make=abstract_train_state).params
    assert unbox(shapes)["kernel"].shape == (7, 18)
    assert box_like(unbox(shapes), shapes)["kernel"].value.shape == (7, 20)


def test_unbox_check_replicas_and_save_raise_for_a_donated_state(tmp_path):
    state = create()
    make_train_step(mean_loss, MESH, AXES)(state, BATCH, KEY)
    says = r": '.*' of shape .* is gone: a step that was given this state.*jax.tree.map\(jnp.copy, state\)"
    for name, read in {"unbox": unbox, "check_replicas": check_replicas}.items():
        with pytest.raises(ValueError, match=name + says):
            read(state.params)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match=f"save of step 3{says}"):
        checkpointer.save(3, state)


# ------------------------------------------------------------------------------------------------------ models of users


def test_scan_with_untyped_carry_raises_and_both_remedies_trace():
    with pytest.raises(TypeError, match=r"begins with a carry .* float32\[2,4\].*check_vma=False.*pcast\(carry, axes"):
        traced(model=OwnScan())
    traced(model=OwnScan(), check_vma=False)
    traced(model=OwnScan(cast=True))


def test_loop_in_a_layer_of_a_scan_raises_with_the_flag_of_flax_that_trains_it():
    with pytest.raises(TypeError, match=r"in a layer of an nn.scan.*check_constancy_invariants=False") as raised:
        traced(model=ScanInScan())
    assert "check_vma=False" in str(raised.value) and "nn.remat_scan has no such option" in str(raised.value)
    assert "zeros" not in str(raised.value) and "pcast" not in str(raised.value)  # guard: no carry of zeros here
    traced(model=ScanInScan(), check_vma=False)
    traced(model=ScanInScan(check=False))


@pytest.mark.parametrize("check_vma", [True, False])
def test_jvp_in_a_loss_raises_unless_parameters_are_gathered_first(check_vma):
    def slope(params, apply_fn, batch, rng, gather=lambda params: gather_params(params, AXES)):
        params = gather(params)
        return jax.jvp(lambda p: mean_loss(p, apply_fn, batch), (params,), (params,))[1]

    with pytest.raises(TypeError, match=r"differentiates forward through the gather.*weights = gather_params\(params"):
        traced(lambda *args: slope(*args, gather=lambda params: params), check_vma=check_vma)
    state = create()
    params = copied(state.params)
    want = jax.grad(lambda p: slope(p, nn.Dense(4).apply, BATCH, None, lambda params: params))(params)
    state, _ = make_train_step(slope, MESH, AXES, check_vma=check_vma)(jax.tree.map(jnp.copy, state), BATCH, KEY)
    assert_same_params(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, params, want))


class Shares(nn.Module):
    """Module that shares the scope of its Dense, so the parameters have the same paths."""

    def setup(self):
        self.dense = nn.Dense(4)
        nn.share_scope(self, self.dense)

    def __call__(self, x):
        return self.dense(x)


class Around(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Shares(name="shares")(nn.Dense(8)(x))


@pytest.mark.parametrize("where", [nn.Dense, Shares, (Shares, nn.Dense)], ids=["hidden", "around", "both"])
@pytest.mark.parametrize("plain", [Shares(), Around()], ids=["itself", "inside"])
def test_shard_modules_finds_classes_hidden_by_nn_share_scope(plain, where):
    state = create(model=shard_modules(plain, where, "fsdp", 16))
    params = copied(state.params)
    kernel = state.params.get("shares", state.params)["kernel"]
    assert kernel.names == ("fsdp", None)
    state, _ = make_train_step(mean_loss, MESH, AXES)(state, BATCH, KEY)
    grads = jax.grad(lambda p: mean_loss(p, plain.apply, BATCH))(params)
    assert_same_params(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))


# ---------------------------------------------------------------------------------------------------------- checkpoints


def saved(folder, tx, step=1, around=lambda state: state):
    with Checkpointer(folder) as checkpointer:
        return checkpointer.save(step, around(create(tx)))


def restored(folder, tx, around=lambda state: state):
    with Checkpointer(folder) as checkpointer:
        checkpointer.restore(around(abstract(tx)))


@pytest.mark.parametrize("name", ["adabelief", "nadam", "radam", "yogi", "lamb"])
def test_restore_warns_of_the_state_of_another_optimizer(name, tmp_path):
    saved(tmp_path, optax.adam(0.1), around=lambda state: {"train": state, "epoch": 3})
    says = r"'train/opt_state/0/count' was saved with the optimizer chain\(scale_by_adam, scale\) of.*restore_params"
    with pytest.warns(UserWarning, match=says):
        restored(tmp_path, getattr(optax, name)(0.1), lambda state: {"train": state, "epoch": 0})
    restored(tmp_path, optax.adam(0.2, b1=0.8), lambda state: {"train": state, "epoch": 0})  # other numbers only


def test_save_raises_for_a_state_of_another_experiment_in_the_same_directory(tmp_path):
    saved(tmp_path, optax.adam(0.1))
    says = r"step 1 in .* is of another state.*'opt_state/0/count'.*first int32\[\] there and nothing here.*restore_p"
    with pytest.raises(ValueError, match=says):
        saved(tmp_path, optax.sgd(0.1), 2)
    assert saved(tmp_path, optax.adam(0.2), 2)
    with Checkpointer(tmp_path) as checkpointer:  # restores parameters alone
        params = checkpointer.restore_params(abstract().params)
        assert checkpointer.save(3, create(optax.sgd(0.1)).replace(params=params))


# ------------------------------------------------------------------------------------------------------------- the page

DOCS = Path(__file__).parents[2] / "docs"
KINDS = {"prevented", "error", "warns", "check_step", "not detected"}


def rows():
    lines = (DOCS / "mistakes.md").read_text().splitlines()
    lines = [line for line in lines if line.startswith("| ") and not line.startswith(("| ---", "| mistake"))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_each_row_of_the_mistakes_page_names_an_existing_message_or_entry():
    heads = re.findall(r"\*\*`([^`]+)`\*\*", (DOCS / "troubleshooting.md").read_text())
    heads = {" ".join(head.split()) for head in heads}
    wrong = {entry.name for entry in ENTRIES if entry.verdict == "wrong"}
    assert len(rows()) > 70 and {answer for _, answer, _ in rows()} == KINDS
    for mistake, answer, how in rows():
        quoted = set(re.findall(r"`([^`]+)`", how))
        if answer in ("error", "warns"):
            assert quoted & heads and all(quote in heads for quote in quoted if "…" in quote), mistake
        if answer == "check_step":
            assert quoted and quoted <= wrong, mistake


def test_guard_library_warnings_are_errors_in_the_test_suite():
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="told"):
        mistakes._warn("told")
