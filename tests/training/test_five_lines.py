"""The five lines of docs/howto/five_lines.md train as one device does: no axis is named, and the loss takes no key."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from tests.nnx_models import Model as NnxNet
from tests.support import Model, assert_same_params, data, fsdp, mesh_of, plain
from xlstm_jax.distributed import (
    DeviceMeshManager,
    abstract_train_state,
    check_step,
    create_fsdp_mesh,
    create_train_state,
    make_eval_step,
    make_train_step,
    nnx_model,
    shard_batch,
    shard_modules,
    unbox,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.metrics import WeightedMean, make_log_step
from xlstm_jax.distributed.model_parallel import ColumnDense, RowDense
from xlstm_jax.distributed.training import default_batch_axes
from xlstm_jax.forecast.training import Workload

KEY, BATCH, SGD = jax.random.key(0), data(), optax.sgd(0.1)


def loss_fn(params, apply_fn, batch):
    return jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)


def loss_of_statistics(params, apply_fn, batch, collections):
    variables = {"params": params, **collections}
    y, updated = apply_fn(variables, batch["x"], True, mutable=list(collections))
    return jnp.mean((y - batch["y"]) ** 2), updated


class Normed(nn.Module):
    """With statistics of the batch, which are those of all devices where ``axes`` are bound."""

    axes: tuple[str, ...] | None = None

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(64)(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axes if train else None)(x)
        return nn.Dense(4)(nn.relu(x))


class Split(nn.Module):
    """With two layers that are split over the axis "tp" of the model's own."""

    axis: str | None = "tp"

    @nn.compact
    def __call__(self, x):
        if self.axis is None:
            h = nn.tanh(nn.Dense(32, name="up")(x))
            return nn.Dense(4, name="down")(nn.Dense(16, name="mid")(h))
        h = nn.tanh(ColumnDense(32, axis_name=self.axis, name="up")(x))
        return nn.Dense(4, name="down")(RowDense(16, axis_name=self.axis, name="mid")(h))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the same model for one device, the mesh, and the loss."""

    model: Any
    plain: Any
    mesh: Callable[[], Any] = create_fsdp_mesh
    loss: Callable[..., Any] = loss_fn
    shard: Callable[..., Any] = shard_modules
    batch_axes: tuple[str, ...] = ("fsdp",)


def torus():
    return DeviceMeshManager.create_device_mesh({"fsdp_x": 4, "fsdp_y": 2})


NNX = nnx_model(lambda rngs: NnxNet(rngs, scan=False))
CASES = {
    "scan": Case(Model(plain), Model(plain)),
    "loop": Case(Model(plain, scan=False), Model(plain, scan=False), lambda: mesh_of(2, 4), batch_axes=("dp", "fsdp")),
    "torus": Case(Model(plain), Model(plain), torus, batch_axes=("fsdp_x", "fsdp_y")),
    "nnx": Case(NNX, NNX),
    "collections": Case(Normed(("fsdp",)), Normed(), loss=loss_of_statistics),
    "already split": Case(Model(fsdp()), Model(plain)),
    "split by hand": Case(Model(fsdp()), Model(plain), shard=lambda model, **options: model),
    "tensor": Case(
        Split(), Split(None), lambda: DeviceMeshManager.create_device_mesh({"fsdp": 4, "tp": 2}), batch_axes=("fsdp",)
    ),
}


def of_one_device(model, loss, variables, steps):
    """Trains as a script without the library: losses, and the variables after the last step."""
    params, kept = variables["params"], {name: tree for name, tree in variables.items() if name != "params"}
    losses = []
    for _ in range(steps):
        if kept:
            (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(params, model.apply, BATCH, kept)
        else:
            value, grads = jax.value_and_grad(loss)(params, model.apply, BATCH)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        losses.append(float(value))
    return losses, params, kept


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_five_line_setup_with_defaults_trains_as_on_a_single_device(case):
    mesh = case.mesh()
    model = case.shard(case.model, min_weight_size=32)
    state = create_train_state(model, SGD, mesh, KEY, BATCH["x"])
    step = make_train_step(case.loss, mesh)
    axes_of_leaves = {path: leaf_of(leaf).gathered_axes for path, leaf in leaves_with_path(state.params)}
    own = jax.device_get(unbox({"params": state.params, **state.collections}))
    if case.model is not NNX:  # whose plain form is the same object: its values are compared in tests of nnx_model
        assert_same_params(own, jax.jit(case.plain.init)(KEY, BATCH["x"]))

    losses, want, kept = of_one_device(case.plain, case.loss, own, 2)
    got = []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        got.append(float(metrics["loss"]))
    assert_allclose(got, losses, rtol=1e-5)
    assert_same_params(unbox(state.params), want, 1e-5)
    if kept:
        assert_same_params(unbox(dict(state.collections)), kept, 1e-5)

    # Guards: parameters are split over the axes of the mesh, devices have different rows, a step changes something.
    assert any(axes_of_leaves.values()), "no leaf is gathered"
    assert default_batch_axes(state.params, mesh) == case.batch_axes
    part = jax.tree.map(lambda x: x[:4], BATCH)
    first = case.loss(own["params"], case.plain.apply, part, *([kept] if kept else []))
    assert not np.allclose(first[0] if kept else first, losses[0], rtol=1e-3)
    assert abs(losses[0] - losses[1]) > 1e-4 * losses[0]
    assert step._cache_size() == 1  # the second step is not compiled again


# -------------------------------------------------------------------------------------------------------------- the key


@pytest.fixture(scope="module")
def state():
    return create_train_state(shard_modules(nn.Dense(4), min_weight_size=16), SGD, create_fsdp_mesh(), KEY, BATCH["x"])


def traced(state, loss, *key, **options):
    return make_train_step(loss, create_fsdp_mesh(), **options).eval_shape(state, BATCH, *key)[1]["loss"].shape == ()


def with_default(params, apply_fn, batch, rng=None):
    assert (rng is None) == with_default.draws_nothing
    return loss_fn(params, apply_fn, batch)


def test_train_step_accepts_losses_with_and_without_a_key(state):
    assert traced(state, loss_fn) and traced(state, loss_fn, None) and traced(state, loss_fn, KEY)
    with_key = lambda params, apply_fn, batch, rng: loss_fn(params, apply_fn, batch) + 0 * jax.random.uniform(rng)  # noqa: E731
    assert traced(state, with_key, KEY)
    for with_default.draws_nothing, key in ((True, ()), (False, (KEY,))):
        assert traced(state, with_default, *key)


def test_loss_without_a_key_gets_collections_as_fourth_argument(state):
    seen = []

    def look(params, apply_fn, batch, kept):
        seen.append(kept)
        return loss_fn(params, apply_fn, batch), kept

    with_statistics = state.replace(collections={"batch_stats": {"mean": jnp.zeros(4)}})
    for key in ((), (KEY,)):
        assert traced(with_statistics, look, *key)
    assert seen and not [kept for kept in seen if sorted(kept) != ["batch_stats"]]
    # Without collections the same argument is a key.
    with pytest.raises(TypeError, match=r"takes a key as argument 4, .*look\(params, apply_fn, batch, kept\)"):
        traced(state, look)


def test_check_step_works_without_a_key_for_right_and_wrong_steps(state):
    mesh = create_fsdp_mesh()
    assert check_step(make_train_step(loss_fn, mesh), state, BATCH).verdict == "right"

    @jax.jit
    def of_ones_own(state, batch):  # and a step that is wrong: it doubles the loss
        grads = jax.grad(lambda params: 2 * loss_fn(unbox(params), nn.Dense(4).apply, batch))(state.params)
        return state.apply_gradients(grads=grads), {}

    found = check_step(of_ones_own, state, BATCH, loss_fn=loss_fn)
    assert found.verdict == "wrong" and {round(leaf.ratio, 4) for leaf in found.leaves} == {2.0}


# ------------------------------------------------------------------------------------------------------------- the axes


def test_default_batch_axes_leave_out_the_axes_of_the_model():
    kernel = Sharded(jnp.ones((8, 8)), ("fsdp", "tp"), model_axes=("tp",))
    mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 2, "tp": 2})
    assert default_batch_axes({"kernel": kernel, "bias": jnp.ones(8)}, mesh) == ("dp", "fsdp")
    assert default_batch_axes({"bias": jnp.ones(8)}, mesh) == ("dp", "fsdp", "tp")  # guard


def test_eval_step_derives_batch_axes_from_the_state(state):
    mesh, metric = create_fsdp_mesh(), WeightedMean()
    axes = default_batch_axes(state.params, mesh)

    def eval_fn(params, apply_fn, batch):
        values = ((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2).mean(-1)
        return {"values": values, "weight": jnp.ones_like(values)}

    step = make_eval_step(eval_fn, mesh, metric=metric)
    local = step(state, shard_batch(BATCH, mesh, axes), metric.empty(axes, mesh))
    want = loss_fn(unbox(state.params), nn.Dense(4).apply, BATCH)
    assert_allclose(make_log_step(metric, mesh, axes)(local)[0], want, rtol=1e-5)


def test_create_train_state_raises_for_a_mesh_with_model_axes_only():
    mesh = DeviceMeshManager.create_device_mesh({"tp": 8})
    with pytest.raises(ValueError, match=r"over every axis of the mesh.*'tp'.*no axis is left for the batch"):
        create_train_state(Split(), SGD, mesh, KEY, BATCH["x"])


def test_abstract_train_state_and_workload_derive_the_axes_by_default():
    model, mesh = (
        shard_modules(Split(), min_weight_size=32),
        DeviceMeshManager.create_abstract_mesh({"fsdp": 2, "tp": 4}),
    )
    state = abstract_train_state(model, SGD, mesh, KEY, BATCH["x"])
    assert leaf_of(state.params["down"]["kernel"]).axes == ("fsdp",)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)
    training = Workload(shard_modules(nn.Dense(4), min_weight_size=16), SGD, shapes, loss_fn, (shapes["x"],))
    step, arguments = training.build_step({"fsdp": 4})
    assert step.eval_shape(*arguments)[1]["loss"].shape == ()


def test_default_and_explicit_batch_axes_lower_to_the_same_text(state):
    mesh = create_fsdp_mesh()
    texts = [
        make_train_step(loss_fn, mesh, *axes).lower(state, BATCH, *key).as_text()
        for axes, key in [(("fsdp",), ()), ((), ()), (("fsdp",), (None,))]
    ]
    assert texts[0] == texts[1] == texts[2]


def test_nnx_model_with_batch_norm_trains_exactly_with_default_axes():
    """An NNX model with a collection of its own."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 32, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs, axis_name="fsdp")
            self.down = nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.norm(self.up(x))))

    def loss(params, apply_fn, batch, collections):
        y, updated = apply_fn({"params": params, **collections}, batch["x"], mutable=list(collections))
        return jnp.mean((y - batch["y"]) ** 2), updated

    mesh = create_fsdp_mesh()
    model = shard_modules(nnx_model(Net), min_weight_size=32)
    state = create_train_state(model, SGD, mesh, KEY, BATCH["x"])
    before = jax.device_get(unbox(state.params))
    state, metrics = make_train_step(loss, mesh)(state, BATCH)

    def of_one_device(params):
        h = BATCH["x"] @ params["up"]["kernel"] + params["up"]["bias"]
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5) * params["norm"]["scale"] + params["norm"]["bias"]
        y = jax.nn.relu(h) @ params["down"]["kernel"] + params["down"]["bias"]
        return jnp.mean((y - BATCH["y"]) ** 2)

    want, grads = jax.value_and_grad(of_one_device)(before)
    assert_allclose(metrics["loss"], want, rtol=1e-5)
    assert_same_params(unbox(state.params), jax.tree.map(lambda p, g: p - 0.1 * g, before, grads), 1e-5)
    assert leaf_of(state.params["up"]["kernel"]).axes == ("fsdp",)
