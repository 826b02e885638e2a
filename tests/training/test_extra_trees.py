"""Tests of extra trees: gathered, never differentiated, never donated; two-model programs equal one device."""

import re
from functools import cache, partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from numpy.testing import assert_allclose

from tests.support import AXES, Block, Model, as_called, assert_same_params, blocks_of, data, fsdp, mean_loss, mesh_of
from xlstm_jax.distributed import (
    TrainState,
    check_step,
    create_train_state,
    ema_params,
    freeze_params,
    make_eval_step,
    make_train_step,
    scan_layers,
    unbox,
    with_ema,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.device_mesh.batch_layout import batch_layout
from xlstm_jax.distributed.metrics import WeightedMean, make_log_step
from xlstm_jax.distributed.training import mistakes
from xlstm_jax.distributed.training.checks.calls import _check_extra_trees
from xlstm_jax.distributed.training.gradients import LossFunction
from xlstm_jax.distributed.training.step_check.one_device import OneDevice

KEY, BATCH = jax.random.key(0), data()
PAGES = Path(__file__).parents[2] / "docs" / "howto"


@cache
def state_of(mesh, seed=0, model=None, tx=None):
    model, tx = model or Model(fsdp), tx or optax.sgd(0.1)
    return create_train_state(model, tx, mesh, jax.random.key(seed), BATCH["x"], batch_axes=AXES)


def copied(state):
    return jax.tree.map(jnp.copy, state)


def through(params, apply_fn, batch, rng, *, teacher, of_teacher=None):
    """Distillation loss with a teacher that also scores outputs: gradients pass the teacher, not its parameters."""
    of_teacher = of_teacher or apply_fn
    out = apply_fn({"params": params}, batch["x"])
    wanted = of_teacher({"params": teacher}, batch["x"])
    judged = of_teacher({"params": teacher}, jnp.tanh(jnp.concatenate([out, out], -1)))
    return jnp.mean((out - wanted) ** 2) + jnp.mean(judged**2)


@cache
def on_one_device(steps=3):
    mesh = mesh_of(1, 1)
    params, teacher = (jax.device_get(unbox(state_of(mesh, seed).params)) for seed in (0, 1))
    loss_and_grad = jax.jit(jax.value_and_grad(lambda p, t: through(p, Model().apply, BATCH, None, teacher=t)))
    losses = []
    for _ in range(steps):
        loss, grads = loss_and_grad(params, teacher)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        losses.append(float(loss))
    return losses, params, teacher


OTHER_POLICY = Model(partial(fsdp, axis_name=("dp", "fsdp")))  # of the teacher: another split of the same model


@pytest.mark.one_in(5)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "mesh, options, policy",
    [
        ((2, 4), {}, None),
        ((1, 8), {"num_minibatches": 2}, None),
        ((2, 4), {"num_minibatches": 2, "accumulation": "reduce_once"}, OTHER_POLICY),
    ],
    ids=["2x4", "1x8-each", "2x4-once-other"],
)
def test_training_with_a_teacher_in_extra_trees_matches_a_single_device(mesh, options, policy, check_vma):
    mesh = mesh_of(*mesh)
    state, teacher = copied(state_of(mesh)), state_of(mesh, 1, policy).params
    loss = partial(through, of_teacher=policy.apply) if policy else through
    step = make_train_step(loss, mesh, AXES, check_vma=check_vma, allow_replicated=True, **options)
    losses, want, same = on_one_device()
    for right in losses:
        state, metrics = step(state, BATCH, KEY, extra_trees={"teacher": teacher})
        assert_allclose(metrics["loss"], right, rtol=1e-5)
    assert_same_params(state.params, want)
    assert_same_params(teacher, same)  # unchanged, and not donated
    assert step._cache_size() == 1
    start = unbox(state_of(mesh).params)["blocks"]["Dense_0"]["kernel"]
    assert np.abs(np.asarray(start) - want["blocks"]["Dense_0"]["kernel"]).max() > 1e-3  # guard


class Ahead(nn.Module):
    """Layers whose weights are gathered ahead, by the library's custom gradient rule."""

    @nn.compact
    def __call__(self, x):
        x, _ = scan_layers(fsdp(Block), 3)(name="blocks")(nn.Dense(16)(x), None)
        return nn.Dense(4)(x)


@pytest.mark.parametrize("model", [Model(fsdp), Model(fsdp, remat=True), Ahead()], ids=["", "remat", "ahead"])
def test_extra_trees_are_gathered_but_cause_no_reduce_scatter(model):
    """An extra tree is gathered on use and for remat, and never scattered."""
    mesh = mesh_of(2, 4)
    state, teacher = state_of(mesh, 0, model), state_of(mesh, 1, model).params

    def count(loss, **given):
        text = make_train_step(loss, mesh, AXES).lower(state, BATCH, KEY, **given).as_text()
        return [as_called(text).count(f"stablehlo.{kind}") for kind in ("reduce_scatter", "all_reduce", "all_gather")]

    def own(params, apply_fn, batch, rng):
        return through(params, apply_fn, batch, rng, teacher=params)

    got, plain = count(through, extra_trees={"teacher": teacher}), count(mean_loss)
    assert got[:2] == plain[:2]
    assert got[2] > plain[2]
    assert count(own)[0] > got[0]  # guard: a trained tree is scattered


def test_extra_trees_accept_a_bfloat16_teacher_and_ema_params():
    mesh = mesh_of(2, 4)
    state = copied(state_of(mesh, 0, None, with_ema(optax.sgd(0.1), 0.5)))
    small = freeze_params(state_of(mesh, 1).params, lambda path: False, frozen_dtype="bfloat16")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), on_one_device()[2])
    plain = jax.jit(lambda params, teacher: through(params, Model().apply, BATCH, None, teacher=teacher))
    want = plain(on_one_device(0)[1], rounded)
    step = make_train_step(through, mesh, AXES)
    state, metrics = step(state, BATCH, KEY, extra_trees={"teacher": small})
    assert_allclose(metrics["loss"], want, rtol=1e-5)
    average = ema_params(state.opt_state, state.params)
    inside = jax.jit(
        lambda state: step(state, BATCH, KEY, extra_trees={"teacher": ema_params(state.opt_state, state.params)})
    )
    _, metrics = inside(state)
    want = plain(*jax.device_get((unbox(state.params), unbox(average))))
    assert_allclose(metrics["loss"], want, rtol=1e-5)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return fsdp(nn.Dense)(4)(nn.BatchNorm(use_running_average=False, axis_name=AXES)(x))


def with_statistics(params, apply_fn, batch, rng, collections, *, teacher, temperature):
    variables = {"params": params, **collections}
    out, updated = apply_fn(variables, batch["x"], mutable=["batch_stats"])
    wanted, _ = apply_fn(teacher, batch["x"], mutable=["batch_stats"])
    return jnp.mean((out - temperature * wanted) ** 2), updated


@pytest.mark.one_in(2)
@pytest.mark.parametrize("check_vma", [True, False])
def test_extra_trees_with_collections_and_scalars_pass_check_step(check_vma):
    mesh = mesh_of(2, 4)
    state = copied(state_of(mesh, 0, Normed()))
    second = state_of(mesh, 1, Normed())
    others = {"teacher": {"params": second.params, **second.collections}, "temperature": 2.0}
    step = make_train_step(with_statistics, mesh, AXES, check_vma=check_vma)
    found = check_step(step, state, BATCH, KEY, extra_trees=others)
    assert found.ok, found
    state, metrics = step(state, BATCH, KEY, extra_trees=others)
    normed = (BATCH["x"] - BATCH["x"].mean(0)) / jnp.sqrt(BATCH["x"].var(0) + 1e-5)
    out, wanted = (normed @ unbox(made.params)["Dense_0"]["kernel"] for made in (state_of(mesh, 0, Normed()), second))
    assert_allclose(metrics["loss"], jnp.mean((out - 2 * wanted) ** 2), rtol=1e-5)


def test_reference_of_a_loss_reads_the_unsharded_values_of_extra_trees():
    mesh, teacher = mesh_of(1, 2), np.arange(1, 5, dtype=np.float32)
    params = {"w": jax.device_put(np.float32(3), NamedSharding(mesh, jax.P()))}
    teacher = {"w": Sharded(jax.device_put(teacher, NamedSharding(mesh, jax.P("fsdp"))), ("fsdp",))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    def loss(params, apply_fn, x, rng, *, teacher):
        return jnp.mean((params["w"] * x - teacher["w"].sum()) ** 2)

    x, layout = np.float32([1, 2]), batch_layout(mesh, AXES)
    one_device = OneDevice(LossFunction(loss, False), layout, 1, state, x, mesh, {"teacher": teacher})
    found = one_device.on_full_batch(KEY)
    assert found.loss == pytest.approx(np.mean((3 * x - 10) ** 2))
    assert float(found.grads["w"]) == pytest.approx(np.mean(2 * x * (3 * x - 10)))


def test_check_step_finds_a_squared_mean_of_extra_trees_wrong():
    """Guard of the test above."""
    mesh = mesh_of(2, 4)
    state, second = copied(state_of(mesh, 0, Normed())), state_of(mesh, 1, Normed())
    others = {"teacher": {"params": second.params, **second.collections}, "temperature": 2.0}

    def squared(*args, **others):
        return with_statistics(*args, **others)[0] ** 2, {}

    assert not check_step(make_train_step(squared, mesh, AXES), state, BATCH, KEY, extra_trees=others).ok


@pytest.mark.one_in(2)
@pytest.mark.parametrize("check_vma", [True, False])
def test_eval_step_accepts_extra_trees_and_donates_none(check_vma):
    mesh, metric = mesh_of(2, 4), WeightedMean()
    state, teacher = state_of(mesh), state_of(mesh, 1).params

    def eval_fn(params, apply_fn, batch, *, teacher):
        return {
            "values": jnp.sum(apply_fn({"params": params}, batch["x"]) * apply_fn({"params": teacher}, batch["x"]), -1)
        }

    step = make_eval_step(eval_fn, mesh, AXES, metric=metric, check_vma=check_vma)
    local = step(state, BATCH, metric.empty(AXES, mesh), extra_trees={"teacher": teacher})
    params, same = on_one_device(0)[1:]
    want = eval_fn(params, Model().apply, BATCH, teacher=same)["values"].mean()
    assert_allclose(make_log_step(metric, mesh, AXES)(local)[0], want, rtol=1e-5)
    own = step(state, BATCH, metric.empty(AXES, mesh), extra_trees={"teacher": state.params})  # nothing is donated
    assert not np.isclose(make_log_step(metric, mesh, AXES)(own)[0], want)


# -------------------------------------------------------------------------------------------------------------- errors


def given(others, loss=through, mesh=None, **options):
    mesh = mesh or mesh_of(2, 4)
    return make_train_step(loss, mesh, AXES)(copied(state_of(mesh)), BATCH, KEY, extra_trees=others, **options)


def deleted():
    mesh = mesh_of(2, 4)
    old = copied(state_of(mesh))
    jax.tree.map(lambda x: x.delete(), old.params)
    given({"teacher": old.params})


def of_the_state():
    state = copied(state_of(mesh_of(2, 4)))
    make_train_step(through, mesh_of(2, 4), AXES)(state, BATCH, KEY, extra_trees={"teacher": state.params})


def by_position(params, apply_fn, batch, rng, teacher, second):
    return through(params, apply_fn, batch, rng, teacher=teacher)


REFUSED = {
    "no dict": (
        lambda: given([1]),
        TypeError,
        r"extra_trees is a list of 1; .*extra_trees=\{'teacher': teacher_state.params\}",
    ),
    "no dict, of another mesh": (
        lambda: given([state_of(mesh_of(4, 2)).params]),
        TypeError,
        r"extra_trees is a list of 1; pass a dict",
    ),
    "no dict, and a batch that does not divide": (
        lambda: make_train_step(through, mesh_of(2, 4), AXES)(
            state_of(mesh_of(2, 4)), jax.tree.map(lambda x: x[:3], BATCH), KEY, extra_trees=[1]
        ),
        TypeError,
        r"extra_trees is a list of 1; pass a dict",
    ),
    "another name": (
        lambda: given({"teacher": 1.0, "techer": 2.0}),
        TypeError,
        r"extra_trees with the name 'techer', and loss_fn takes \[.*'teacher'\]. Write loss_fn\(.*rng, \*, techer\)",
    ),
    "none": (
        lambda: given(None),
        TypeError,
        r"takes 'teacher' by name, .*step\(..., extra_trees=\{'teacher': tree\}\)",
    ),
    "by position": (
        lambda: given({}, by_position),
        TypeError,
        r"calls loss_fn\(params, apply_fn, batch, rng\), with 4",
    ),
    "no box": (
        lambda: given({"teacher": unbox(state_of(mesh_of(2, 4)).params)}),
        ValueError,
        r"extra_trees\['teacher/.*'\] of shape .* has no box and is split as .*box_like\(tree, params\)",
    ),
    "another mesh": (
        lambda: given({"teacher": state_of(mesh_of(4, 2)).params}),
        ValueError,
        r"'extra_trees/teacher/.*' lies on a mesh \{'dp': 4, 'fsdp': 2\}, and the step was made for a mesh",
    ),
    "of the state": (
        of_the_state,
        ValueError,
        r"extra_trees\['teacher/.*'\] is a leaf of the state too.*jnp.copy, state.p",
    ),
    "deleted": (deleted, ValueError, r"extra_trees\['teacher/.*'\] was deleted: a step has taken over the state"),
}


@pytest.mark.parametrize("make, error, says", REFUSED.values(), ids=REFUSED)
def test_train_step_raises_for_invalid_extra_trees(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_split_extra_tree_without_a_box_raises_and_a_replicated_one_does_not():
    for spec in (jax.P(), jax.P("fsdp")):
        tree = {"teacher": {"kernel": jax.device_put(np.ones(4), jax.NamedSharding(mesh_of(2, 4), spec))}}
        if not any(spec):
            _check_extra_trees(tree, [])
    with pytest.raises(ValueError, match=r"'teacher/kernel'\] of shape \(4,\) has no box and is split as .*box_like"):
        _check_extra_trees(tree, [])


def test_extra_tree_with_a_donated_array_raises_and_one_with_a_copy_does_not():
    here, copy = jax.device_put(np.ones(4)), jax.device_put(np.ones(4))
    _check_extra_trees({"teacher": {"kernel": copy}}, [{"kernel": here}])
    with pytest.raises(ValueError, match=r"extra_trees\['teacher/kernel'\] is a leaf of the state too"):
        _check_extra_trees({"teacher": {"kernel": here}}, [{"kernel": here}])


def test_train_step_warns_of_a_large_replicated_extra_tree():
    mistakes._warned.clear()
    large = {"kernel": jnp.zeros((512, 512))}
    with pytest.warns(
        UserWarning, match=r"extra_trees\['teacher/kernel'\], 1 MiB, is replicated on each of the 8 devices"
    ):
        make_train_step(lambda *args, teacher: through(*args, teacher=args[0]), mesh_of(2, 4), AXES).lower(
            state_of(mesh_of(2, 4)), BATCH, KEY, extra_trees={"teacher": large}
        )


# ----------------------------------------------------------------------------------------------- two-model programs


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("page", ["gan", "dpo", "distill", "actor_critic"])
def test_programs_of_docs_pages_with_extra_trees_run_in_both_vma_modes(page, check_vma):
    program = "\n".join(blocks_of(PAGES / f"{page}.md"))
    program, count = re.subn(r"(make_(?:train|eval)_step\([^)]*)\)", rf"\1, check_vma={check_vma})", program)
    assert count == {"gan": 2, "distill": 2}.get(page, 1)
    exec(compile(program, f"{page}.md", "exec"), {"__name__": page})
