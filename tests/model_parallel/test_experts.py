"""Tests of experts split over devices: results, losses and gradients equal one device with all experts."""

from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.support import (
    FLOAT32_ROUNDING,
    KEPT,
    assert_each_leaf,
    assert_same_params,
    equations,
    normal,
    train_on_one_device,
)
from xlstm_jax.distributed import (
    DeviceMeshManager,
    Replicas,
    create_train_state,
    make_eval_step,
    make_train_step,
    partition_specs,
    shard_module_params,
    shard_modules,
    sync_gradients,
    unbox,
)
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.metrics import WeightedMean, make_log_step
from xlstm_jax.distributed.model_parallel import ColumnDense, RowDense
from xlstm_jax.distributed.model_parallel import experts as experts_file
from xlstm_jax.distributed.model_parallel.activations import join_tokens, leave_split, split_tokens
from xlstm_jax.distributed.model_parallel.experts import (
    Experts,
    apply_by_group,
    mix_experts,
    mix_experts_with_capacity,
)
from xlstm_jax.distributed.model_parallel.router import Routing, load_balancing_loss, route_tokens, router_z_loss
from xlstm_jax.distributed.optimizers import matrix_dimensions, muon

DIM, COUNT, ROWS = 6, 8, 64
X = normal(1, (ROWS // 2, 2, DIM)) * np.float32(1 + np.arange(ROWS // 2) % 3)[:, None, None]


class MLP(nn.Module):
    """An expert with biases: rows of zeros do not give zeros."""

    @nn.compact
    def __call__(self, x):
        bias = nn.initializers.normal(0.5)
        return nn.Dense(DIM, bias_init=bias)(nn.gelu(nn.Dense(8, bias_init=bias)(x)))


def loss_fn(params, apply_fn, x, rng):
    """Returns the error plus both losses of the router."""
    y, sown = apply_fn({"params": params}, x, mutable=["losses"])
    balance, z = sown["losses"]["load_balance"][0], sown["losses"]["router_z"][0]
    return jnp.mean((y - x) ** 2) + 0.3 * balance + 0.1 * z


def of_one_device(**options):
    """Returns parameters, loss and gradients of all experts on one device."""
    model = Experts(MLP(), COUNT, axis=None, **options)
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    return params, *jax.jit(jax.value_and_grad(lambda params: loss_fn(params, model.apply, X, None)))(params)


def step_on(shape, axes, check_vma, tx=KEPT, **options):
    """Returns state and metrics after a step on a mesh, and the unboxed initial parameters."""
    mesh = DeviceMeshManager.create_device_mesh(shape, devices=jax.devices()[: int(np.prod(list(shape.values())))])
    said = {} if check_vma or "ep" in axes else {"batch_axes": axes}
    model = Experts(MLP(), COUNT, block_size=4, **said, **options)
    model = shard_modules(model, Experts, "fsdp", 8) if "fsdp" in shape else model
    state = create_train_state(model, tx, mesh, jax.random.key(0), X, batch_axes=axes, allow_replicated=True)
    before = jax.tree.map(np.asarray, unbox(state.params))
    step = make_train_step(loss_fn, mesh, axes, check_vma=check_vma, allow_replicated=True)
    return *step(state, X, jax.random.key(2)), before


# Axes of the mesh, and of the batch: "ep" splits the batch too, or is a separate axis.
MESHES = [
    ({"dp": 2, "fsdp": 2, "ep": 2}, ("dp", "fsdp", "ep")),
    ({"fsdp": 2, "ep": 4}, ("fsdp",)),
    ({"ep": 8}, ("ep",)),
    ({"dp": 4, "ep": 2}, "dp"),
    ({"fsdp": 4, "ep": 1}, ("fsdp", "ep")),
]
OPTIONS = {
    "top 2": {"top_k": 2},
    "capacity": {"top_k": 2, "capacity_factor": 0.8},
    "shared": {"top_k": 1, "shared": MLP()},
    "top 8": {"top_k": 8, "normalize": True},
    "top 3, normalized": {"top_k": 3, "normalize": True, "capacity_factor": 1.5},
}
CASES = [(mesh, name) for name in OPTIONS for mesh in MESHES]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case, check_vma", list(zip(CASES, cycle([True, False, False, True, False]))), ids=str)
def test_step_with_experts_matches_initial_values_loss_and_gradients_of_a_single_device(case, check_vma):
    (shape, axes), name = case
    options = OPTIONS[name]
    # With a capacity: as many groups of rows as devices that split the rows.
    groups = {"row_groups": int(np.prod(list(shape.values())))} if "capacity_factor" in options else {}
    params, loss, grads = of_one_device(**options, **groups)
    state, metrics, before = step_on(shape, axes, check_vma, **options)
    assert_each_leaf(np.testing.assert_array_equal, before, params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=FLOAT32_ROUNDING)
    assert_same_params(state.opt_state, grads)


def test_init_inside_shard_map_gives_each_device_the_local_experts():
    mesh = DeviceMeshManager.create_device_mesh({"ep": 2}, devices=jax.devices()[:2])

    def init(key, x):
        expert = nn.Dense(DIM, use_bias=False)
        return unbox(Experts(expert, 4, 1, block_size=2).init(key, x)["params"]["experts"]["kernel"])

    key, x = jax.random.key(3), X[:4, 0]
    got = jax.jit(jax.shard_map(init, mesh=mesh, in_specs=(P(), P("ep")), out_specs=P("ep")))(key, x)
    want = jax.jit(init)(key, x)  # without a mesh, all experts
    assert got.shape == (4, DIM, DIM) and not np.array_equal(want[0], want[2])
    np.testing.assert_array_equal(got, want)


def test_init_inside_shard_map_makes_the_parameters_of_the_local_experts_only():
    mesh, shapes = DeviceMeshManager.create_device_mesh({"ep": 2}, devices=jax.devices()[:2]), []

    def init(key, x):
        experts = unbox(Experts(nn.Dense(DIM, use_bias=False), 4, 1).init(key, x)["params"]["experts"]["kernel"])
        shapes.append(experts.shape)
        return experts

    args = jax.eval_shape(lambda: jax.random.key(3)), jax.ShapeDtypeStruct((4, DIM), jnp.float32)
    jax.eval_shape(jax.shard_map(init, mesh=mesh, in_specs=(P(), P("ep")), out_specs=P("ep")), *args)
    assert shapes == [(2, DIM, DIM)]


@pytest.mark.slow
def test_ten_clipped_adamw_steps_with_experts_match_a_single_device():
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    (shape, axes), options = MESHES[0], OPTIONS["top 2"]
    mesh = DeviceMeshManager.create_device_mesh(shape)
    model = shard_modules(Experts(MLP(), COUNT, **options), Experts, "fsdp", 8)
    state = create_train_state(model, tx, mesh, jax.random.key(0), X, batch_axes=axes, allow_replicated=True)
    step = make_train_step(loss_fn, mesh, axes, allow_replicated=True)
    params, *_ = of_one_device(**options)
    for number in range(10):
        state, _ = step(state, X, jax.random.key(number))
    plain = Experts(MLP(), COUNT, axis=None, **options)
    assert_same_params(state.params, train_on_one_device(plain, tx, params, loss_fn, X, 10)[0], 1e-4)


def test_sync_gradients_in_a_custom_step_handles_expert_parameters():
    (shape, axes), options = MESHES[0], OPTIONS["top 2"]
    mesh = DeviceMeshManager.create_device_mesh(shape)
    model = Experts(MLP(), COUNT, batch_axes=axes, **options)
    state = create_train_state(model, KEPT, mesh, jax.random.key(0), X, batch_axes=axes, allow_replicated=True)
    specs = partition_specs(state.params, mesh)

    def local(params, x):
        return sync_gradients(jax.grad(loss_fn)(params, model.apply, x, None), axes)

    step = jax.shard_map(local, mesh=mesh, in_specs=(specs, P(axes)), out_specs=specs, check_vma=False)
    assert_same_params(jax.jit(step)(state.params, X), of_one_device(**options)[2])


@pytest.mark.parametrize("expert, where", [(MLP, (Experts, nn.Dense)), (shard_module_params(MLP, "fsdp", 8), nn.Embed)])
def test_modules_chosen_or_wrapped_inside_an_expert_are_split_with_the_expert(expert, where):
    """Modules within an expert are split with the expert: their gather would run in a loop that differs by device."""
    mesh, axes = DeviceMeshManager.create_device_mesh({"fsdp": 4, "ep": 2}), ("fsdp", "ep")

    class Model(nn.Module):
        expert: type

        @nn.compact
        def __call__(self, x):
            known = nn.Embed(8, DIM, name="embed")((x[:, 0, 0] > 0).astype(int))[:, None]
            return Experts(self.expert(), COUNT, 2, name="mixture")(x + known)

    def loss_fn(params, apply_fn, x, rng):
        return jnp.mean((apply_fn({"params": params}, x) - x) ** 2)

    model = shard_modules(Model(expert), where, "fsdp", 8)
    state = create_train_state(model, KEPT, mesh, jax.random.key(0), X, batch_axes=axes, allow_replicated=True)
    assert state.params["mixture"]["experts"]["Dense_0"]["kernel"].axes == ("ep", "fsdp")
    params = unbox(state.params)
    want = jax.jit(jax.grad(lambda params: loss_fn(params, Model(MLP).apply, X, None)))(params)
    state, _ = make_train_step(loss_fn, mesh, axes, allow_replicated=True)(state, X, jax.random.key(2))
    assert_same_params(state.opt_state, want)


class SplitMLP(nn.Module):
    """``NormedMLP`` with layers split over "tp", behind a replicated norm."""

    @nn.compact
    def __call__(self, x):
        bias = nn.initializers.normal(0.5)
        hidden = nn.gelu(ColumnDense(8, axis_name="tp", bias_init=bias, name="up")(nn.LayerNorm()(x)))
        return RowDense(DIM, axis_name="tp", bias_init=bias, name="down")(hidden)


class NormedMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        bias = nn.initializers.normal(0.5)
        hidden = nn.gelu(nn.Dense(8, bias_init=bias, name="up")(nn.LayerNorm()(x)))
        return nn.Dense(DIM, bias_init=bias, name="down")(hidden)


def test_rows_of_an_expert_split_over_tp_stay_replicated_by_type_along_tp():
    """Rows stay replicated by type along "tp" for an expert split by rows, which sums its results."""
    mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "tp": 2}, devices=jax.devices()[:4])

    def expert(weights, rows):
        assert collectives.varying_axes(rows) == {"dp"} and collectives.varying_axes(weights) == {"dp", "tp"}
        return leave_split(rows @ weights, "tp")

    def run(weights, rows):
        return apply_by_group(expert, weights, rows, jnp.array([1, 2]), 2)

    specs = (P(None, None, "tp"), P("dp"))
    traced = jax.eval_shape(
        jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("dp")), np.ones((2, 5, 6)), np.ones((6, 5))
    )
    assert traced.shape == (6, 3)


@pytest.mark.parametrize("axes, check_vma", [(("dp", "ep"), True), (("dp",), True), (("dp",), False)])
def test_step_with_expert_layers_split_over_tp_matches_a_single_device(axes, check_vma):
    """Layers within an expert may be split over "tp", whether or not the axis of experts splits the batch."""
    mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "ep": 2, "tp": 2})
    options = {"num_experts": 4, "top_k": 2, "block_size": 4}
    plain = Experts(NormedMLP(), axis=None, **options)
    model = Experts(SplitMLP(), batch_axes=axes, **options)

    def loss(params, apply_fn, x, rng):
        return jnp.mean((apply_fn({"params": params}, x) - x) ** 2)

    params = jax.jit(plain.init)(jax.random.key(0), X)["params"]
    grads = jax.jit(jax.grad(lambda params: loss(params, plain.apply, X, None)))(params)
    want = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    state = create_train_state(
        model, optax.sgd(0.5), mesh, jax.random.key(0), X, batch_axes=axes, allow_replicated=True
    )
    state, _ = make_train_step(loss, mesh, axes, check_vma=check_vma, allow_replicated=True)(
        state, X, jax.random.key(2)
    )
    assert_same_params(state.params, want)
    moved = jax.tree.map(lambda p, q: np.abs(p - q).max(), params, want)
    assert min(jax.tree.leaves(moved)) > 1e-4  # guard: every leaf was trained


def test_loss_differs_from_a_single_device_with_wrong_row_offsets(monkeypatch):
    monkeypatch.setattr(experts_file, "starts_of", lambda sizes: jnp.cumsum(sizes))
    _, metrics, _ = step_on({"ep": 8}, ("ep",), False, top_k=2)
    assert abs(metrics["loss"] / of_one_device(top_k=2)[1] - 1) > 1e-3


def test_gradients_are_doubled_without_the_custom_rule_for_replicated_tokens(monkeypatch):
    """Guard: without types, slice and gather need a custom rule; the default gradients are twice as large."""
    monkeypatch.setattr(experts_file, "all_parts", collectives.all_gather_equal)
    state, _, _ = step_on({"dp": 4, "ep": 2}, "dp", False, top_k=2)
    got, want = unbox(state.opt_state)["experts"], of_one_device(top_k=2)[2]["experts"]
    np.testing.assert_allclose(
        got["Dense_0"]["kernel"],
        2 * want["Dense_0"]["kernel"],
        rtol=1e-3,
        atol=1e-4 * np.abs(got["Dense_0"]["kernel"]).max(),
    )


def on_rows(params, apply_fn, x):
    return {"values": jnp.mean((apply_fn({"params": params}, x) - x) ** 2, (1, 2))}


def evaluated(axes, **options):
    """Returns the metrics of ``make_eval_step`` without types on the mesh fsdp=2, ep=2; and the parameters."""
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 2, "ep": 2}, devices=jax.devices()[:4])
    model, metric = Experts(MLP(), COUNT, 2, capacity_factor=0.8, **options), WeightedMean()
    state = create_train_state(model, KEPT, mesh, jax.random.key(0), X, batch_axes=axes, allow_replicated=True)
    local = make_eval_step(on_rows, mesh, axes, metric=metric, check_vma=False)(state, X, metric.empty(axes, mesh))
    return make_log_step(metric, mesh, axes)(local)[0], unbox(state.params)


@pytest.mark.parametrize("axes, said", [(("fsdp", "ep"), {}), ("fsdp", {"batch_axes": "fsdp"})], ids=str)
def test_evaluation_without_check_vma_has_the_row_groups_of_training(axes, said):
    got, params = evaluated(axes, **said)
    model = Experts(MLP(), COUNT, 2, axis=None, capacity_factor=0.8, row_groups=4)
    want = on_rows(jax.tree.map(np.asarray, params), jax.jit(model.apply), X)["values"].mean()
    np.testing.assert_allclose(got, want, rtol=FLOAT32_ROUNDING)


def test_experts_without_check_vma_raise_for_batch_axes_different_from_the_step():
    with pytest.raises(ValueError, match=r"tokens differ along 'ep', and the step's batch is split over \('fsdp',\)"):
        evaluated("fsdp")
    with pytest.raises(ValueError, match=r"batch_axes='dp'\): the step's batch is split over \('dp', 'ep'\)"):
        step_on({"dp": 1, "ep": 2}, ("dp", "ep"), False, top_k=2, batch_axes="dp")
    model, mesh = Experts(MLP(), COUNT, 2), DeviceMeshManager.create_device_mesh({"ep": 2}, devices=jax.devices()[:2])
    params = unbox(jax.eval_shape(model.init, jax.random.key(0), X))
    local = jax.shard_map(model.apply, mesh=mesh, in_specs=(P(), P("ep")), out_specs=P("ep"), check_vma=False)
    with pytest.raises(ValueError, match=r"Experts\(axis='ep'\): under check_vma=False .*the step names no batch axes"):
        jax.eval_shape(local, params, X)


def test_experts_without_check_vma_raise_for_tokens_of_sequence_parallelism():
    """Without types, tokens of sequence parallelism raise: the router's gradient would miss tokens of other devices."""
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 2, "tp": 2}, devices=jax.devices()[:4])

    class Model(nn.Module):
        said: tuple[str, ...] | None

        @nn.compact
        def __call__(self, x):
            own = split_tokens(x, 1, "tp")
            return join_tokens(Experts(MLP(), COUNT, 2, axis="tp", batch_axes=self.said)(own), 1, "tp")

    error = lambda params, apply_fn, x, rng: jnp.mean(apply_fn({"params": params}, x) ** 2)  # noqa: E731
    for said, match in {
        None: r"Experts\(axis='tp'\): under check_vma=False",
        ("fsdp", "tp"): "the step's batch",
    }.items():
        model = Model(said)
        state = create_train_state(model, KEPT, mesh, jax.random.key(0), X, batch_axes="fsdp", allow_replicated=True)
        step = make_train_step(error, mesh, "fsdp", check_vma=False, allow_replicated=True)
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(step, state, X, jax.random.key(2))


# ------------------------------------------------------------------------------------------------------ the router


def test_router_losses_weight_rows_and_match_a_single_device():
    """Router losses are weighted by rows: with 1, 2, 3, 4 weighted rows per device, the mean equals one device."""
    mesh = DeviceMeshManager.create_device_mesh({"dp": 4}, devices=jax.devices()[:4])
    logits = normal(3, (16, 5)) * 2
    weights = (jnp.arange(16) % 4 <= jnp.arange(16) // 4).astype(jnp.float32)

    def sums(logits, weights, axes=()):
        routing = route_tokens(logits, 2)
        both = load_balancing_loss(routing, axes, weights) + router_z_loss(routing, weights)
        return both * weights.sum()

    local = lambda logits, weights: sums(logits, weights, ("dp",))[None]  # noqa: E731
    split = jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    got, grad = jax.jit(jax.value_and_grad(lambda logits: split(logits, weights).sum()))(logits)
    want, of_one = jax.jit(jax.value_and_grad(lambda logits: sums(logits, weights)))(logits)
    np.testing.assert_allclose(got, want, rtol=FLOAT32_ROUNDING)
    np.testing.assert_allclose(grad, of_one, rtol=0, atol=FLOAT32_ROUNDING)
    kept = logits[weights > 0]  # reference: rows of weight 0 removed
    alone = jax.jit(sums)(kept, jnp.ones(len(kept)))
    np.testing.assert_allclose(want, alone, rtol=FLOAT32_ROUNDING)


def test_load_balancing_counts_the_choices_of_all_devices():
    """Device 0 has two rows for expert 0, device 1 one for expert 1 and a row of padding, and logits are all equal."""
    mesh = DeviceMeshManager.create_device_mesh({"dp": 2}, devices=jax.devices()[:2])
    chosen, weights = np.array([[0], [0], [1], [1]], np.int32), np.array([1, 1, 1, 0], np.float32)
    logits = np.log(np.array([[3, 1]] * 4, np.float32))

    def local(chosen, logits, weights):
        return load_balancing_loss(Routing(chosen, weights[:, None], logits), "dp", weights)[None]

    loss = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")))(chosen, logits, weights)
    np.testing.assert_allclose(loss, [2 * (2 / 3 * 3 / 4 + 1 / 3 * 1 / 4)] * 2, rtol=1e-6)


def test_router_losses_of_rows_with_weights_below_1_match_the_formulas():
    """Rows of weights 1/4, 1/2 and 0; the share of the choices is a constant of the gradient."""
    logits = np.float32([[2, 0, 1], [0, 1, -1], [5, 5, 5]])
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    def losses(weights):
        routing = route_tokens(jnp.asarray(logits), 2)
        return load_balancing_loss(routing, (), weights), router_z_loss(routing, weights)

    weights = np.float32([0.25, 0.5, 0])
    share = np.float32([0.75, 0.5, 0.25]) / 1.5  # of the first row's experts 0 and 2, and the second row's 1 and 0
    (balance, z), grad = jax.jit(lambda w: (losses(w), jax.grad(lambda w: losses(w)[0])(w)))(weights)
    of_row = 3 * probabilities @ share
    np.testing.assert_allclose(balance, of_row @ weights / 0.75, rtol=1e-6)
    np.testing.assert_allclose(z, np.log(np.exp(logits).sum(-1)) ** 2 @ weights / 0.75, rtol=1e-6)
    np.testing.assert_allclose(grad, (of_row - of_row @ weights / 0.75) / 0.75, rtol=1e-5, atol=1e-6)
    assert jax.jit(losses)(np.zeros(3, np.float32)) == (0, 0)  # not 0 / 0


def test_load_balance_of_three_devices_without_row_weights_is_that_of_one_device():
    mesh = DeviceMeshManager.create_device_mesh({"dp": 3}, devices=jax.devices()[:3])
    logits = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    local = lambda logits: load_balancing_loss(route_tokens(logits, 2), "dp")[None]  # noqa: E731
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")))(logits)
    want = jax.jit(lambda logits: load_balancing_loss(route_tokens(logits, 2)))(logits)
    np.testing.assert_allclose(got.mean(), want, rtol=FLOAT32_ROUNDING)
    assert len(set(got.tolist())) == 3  # guard: devices differ


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_tokens_are_routed_in_float32_and_to_the_first_of_equal_experts(dtype):
    logits = np.array([[0, 3, 3, 1], [1, 1, 1, 1]], dtype)
    routing = jax.jit(partial(route_tokens, top_k=2))(logits)
    assert routing.experts.tolist() == [[1, 2], [0, 1]] and routing.experts.dtype == jnp.int32
    assert routing.weights.dtype == routing.logits.dtype == jnp.float32
    np.testing.assert_allclose(routing.weights[0], np.exp(3) / (1 + 2 * np.exp(3) + np.exp(1)), rtol=1e-6)
    normalized = jax.jit(partial(route_tokens, top_k=4, normalize=True))(logits)
    np.testing.assert_allclose(normalized.weights.sum(-1), 1, rtol=1e-6)
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=f"top_k={top_k} of 4 experts"):
            route_tokens(logits, top_k)


def test_load_balancing_loss_of_a_balanced_router_is_1():
    routing = Routing(jnp.arange(8)[:, None] % 4, jnp.ones((8, 1)), jnp.zeros((8, 4)))
    np.testing.assert_allclose(load_balancing_loss(routing), 1)
    np.testing.assert_allclose(load_balancing_loss(route_tokens(50 * jnp.eye(1, 4).repeat(8, 0), 1)), 4, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ experts on their rows


def test_expert_gradient_sums_only_rows_of_the_expert():
    """An expert's gradient has its rows only, although the second block of two contains rows of the next expert."""
    factors, rows = np.float32([2, 3]), np.float32([[1], [10], [100], [1000], [10000]])
    total = lambda factors: apply_by_group(doubled, factors, rows, jnp.array([3, 1]), 2).sum()  # noqa: E731
    assert jax.grad(total)(factors).tolist() == [111, 1000]


def test_apply_by_group_matches_a_loop_and_zeros_rows_beyond_the_groups():
    sizes, rows = np.array([3, 0, 5, 1]), normal(0, (12, DIM))
    params = jax.vmap(lambda key: MLP().init(key, rows)["params"])(jax.random.split(jax.random.key(1), 4))

    def expert(params, rows):
        return MLP().apply({"params": params}, rows)

    def loop(params, rows):
        ends = np.cumsum(sizes)
        parts = [
            expert(jax.tree.map(lambda x, i=i: x[i], params), rows[end - size : end])
            for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        return jnp.concatenate([*parts, jnp.zeros((3, DIM))])

    weights = jnp.arange(12 * DIM).reshape(12, DIM) / 50
    by_group = lambda params, rows: apply_by_group(expert, params, rows, jnp.asarray(sizes), 2)  # noqa: E731
    got, want = (
        jax.jit(jax.value_and_grad(lambda *args, fn=fn: jnp.sum(fn(*args) * weights), (0, 1)))(params, rows)
        for fn in (by_group, loop)
    )
    np.testing.assert_allclose(got[0], want[0], rtol=FLOAT32_ROUNDING)
    assert_same_params(got[1][0], want[1][0])
    np.testing.assert_allclose(got[1][1], want[1][1], rtol=0, atol=FLOAT32_ROUNDING * 10)


def test_apply_by_group_takes_a_group_of_more_than_32767_rows():
    got = apply_by_group(doubled, np.float32([2]), np.ones((40_000, 1), np.float32), np.array([40_000]), 20_000)
    np.testing.assert_array_equal(got, np.full((40_000, 1), 2))


def doubled(factor, rows):
    return factor * rows


def test_rows_above_the_expert_capacity_are_dropped_last_choices_first():
    """Rows above the capacity are dropped, last choices first.

    C = ceil(0.5 x 2 x 4 / 2) = 2 rows of each expert: the first choices of rows 0 and 1, then no further rows.
    """
    routing = Routing(jnp.array([[0, 1], [0, 1], [0, 1], [1, 0]]), jnp.ones((4, 2)), jnp.zeros((4, 2)))
    factors, rows = jnp.array([[1.0], [10.0]]), jnp.arange(1.0, 5)[:, None]
    with_capacity = partial(mix_experts_with_capacity, doubled, capacity_factor=0.5)
    out, dropped = jax.jit(with_capacity)(factors, rows, routing)
    assert out.ravel().tolist() == [11.0, 2.0, 0.0, 40.0] and dropped == 0.5
    assert jax.jit(partial(mix_experts, doubled))(factors, rows, routing).ravel().tolist() == [11.0, 22.0, 33.0, 44.0]
    halves, _ = jax.jit(partial(with_capacity, row_groups=2))(factors, rows, routing)
    assert halves.ravel().tolist() == [11.0, 0.0, 3.0, 40.0]  # C = 1 in each group of two rows


def test_first_choices_take_the_slots_of_an_expert_before_second_choices():
    slots = jax.jit(partial(experts_file._slots, experts=2, capacity=2))
    sources, places = slots(np.array([[0, 1], [0, 1], [0, 1], [1, 0]], np.int32))
    assert sources.tolist() == [[0, 1], [3, 0]]
    assert places.tolist() == [[0, 1], [1, 2], [2, 3], [0, 3]]


def test_slots_of_an_expert_hold_more_rows_than_16_bits_count():
    slots = jax.jit(partial(experts_file._slots, experts=2, capacity=40_000))
    sources, _ = slots(np.ones((40_000, 1), np.int32))
    np.testing.assert_array_equal(sources[1], np.arange(40_000))


def test_expert_accepts_more_rows_than_16_bits_count():
    """An expert takes 40,000 rows, more than 16 bits count, if all rows choose the expert and the capacity allows."""
    rows, factors, ones = np.arange(40_000.0, dtype=np.float32)[:, None], np.float32([[1], [10]]), np.ones((40_000, 1))
    routing = Routing(ones.astype(np.int32), ones.astype(np.float32), np.zeros((40_000, 2), np.float32))
    out, dropped = jax.jit(partial(mix_experts_with_capacity, doubled, capacity_factor=2.0))(factors, rows, routing)
    np.testing.assert_array_equal(out, 10 * rows)
    assert dropped == 0


def test_tokens_of_three_devices_reach_their_experts_and_return_in_order():
    """Two experts on each device: device 0 sends both choices of all its tokens to device 1, the others to all."""
    mesh = DeviceMeshManager.create_device_mesh({"ep": 3}, devices=jax.devices()[:3])
    first = np.array([[2, 3], [3, 2], [2, 3]])
    chosen = np.concatenate([first, [[5, 0], [1, 4], [0, 1]], [[0, 5], [3, 0], [4, 2]]])
    factors, rows = 10.0 ** np.arange(6, dtype=np.float32)[:, None], np.arange(1, 10, dtype=np.float32)[:, None]
    routing = Routing(chosen, np.ones((9, 2), np.float32), np.zeros((9, 6), np.float32))

    def local(factors, rows, routing):
        with_capacity = mix_experts_with_capacity(doubled, factors, rows, routing, "ep", capacity_factor=3.0)[0]
        return mix_experts(doubled, factors, rows, routing, "ep", block_size=2), with_capacity

    both = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))(factors, rows, routing)
    for mixed in both:
        np.testing.assert_array_equal(mixed, factors[chosen].sum(1) * rows)


def test_device_has_room_for_all_choices_of_all_tokens():
    """Two devices with two of four experts each: all 3 tokens of both devices may choose both experts of a device."""
    mesh, rows = DeviceMeshManager.create_device_mesh({"ep": 2}, devices=jax.devices()[:2]), []

    def expert(factor, x):
        rows.append(len(x))
        return factor * x

    def local(factors, x, routing):
        return mix_experts(expert, factors, x, routing, "ep")

    routing = Routing(np.zeros((6, 2), np.int32), *np.ones((2, 6, 2), np.float32))
    routing = routing._replace(logits=np.zeros((6, 4), np.float32))
    split = jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    jax.eval_shape(split, np.ones((4, 1), np.float32), np.ones((6, 1), np.float32), routing)
    assert set(rows) == {2 * 3 * 2}


def test_exchanged_rows_reach_the_experts_in_order_and_return_to_their_places():
    """Of two devices with an expert each, device 0 sends one row to each, and device 1 both rows to expert 0."""
    mesh = DeviceMeshManager.create_device_mesh({"ep": 2}, devices=jax.devices()[:2])
    rows, sizes = np.float32([[1], [2], [3], [4]]), np.array([1, 1, 2, 0], np.int32)

    def tenfold(rows, sizes):
        return jnp.where((jnp.arange(len(rows)) < sizes[0])[:, None], 10 * rows + jax.lax.axis_index("ep"), 0)

    def local(rows, sizes):
        return experts_file._exchanged(tenfold, rows, sizes, ("ep",), 2)

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))(rows, sizes)
    assert found.ravel().tolist() == [10, 21, 30, 40]


def test_results_of_experts_and_gradients_have_the_dtypes_of_the_experts():
    routing = Routing(jnp.array([[0], [1]]), jnp.ones((2, 1)), jnp.zeros((2, 2)))
    factors, rows = jnp.ones((2, 1), jnp.bfloat16), jnp.ones((2, 1), jnp.bfloat16)
    with_capacity = partial(mix_experts_with_capacity, doubled, capacity_factor=1.0)
    out, dropped = jax.eval_shape(with_capacity, factors, rows, routing)
    assert (out.dtype, dropped.dtype) == (jnp.bfloat16, jnp.float32)
    mix = partial(mix_experts, doubled)
    assert jax.eval_shape(mix, factors, rows, routing).dtype == jnp.bfloat16
    total = lambda *args: mix(*args, routing).astype(jnp.float32).sum()  # noqa: E731
    assert [x.dtype for x in jax.eval_shape(jax.grad(total, (0, 1)), factors, rows)] == [jnp.bfloat16] * 2


def of_length_one(factor, rows):
    """An expert whose derivative at zeros is not finite."""
    return factor * rows / jnp.sqrt((rows**2).sum(-1, keepdims=True))


def test_unassigned_and_padded_rows_leave_no_nan_in_expert_gradients():
    factors, rows = jnp.array([[2.0], [3.0]]), normal(0, (3, DIM))
    routing = Routing(jnp.array([[1], [1], [1]]), jnp.ones((3, 1)), jnp.zeros((3, 2)))

    def sums(factors, rows):
        grouped = apply_by_group(of_length_one, factors, rows, jnp.array([1, 1]), 4)  # an extra row, and a padded block
        slots, _ = mix_experts_with_capacity(of_length_one, factors, rows, routing, capacity_factor=1.0)
        return grouped.sum() + slots.sum()

    grads = jax.jit(jax.grad(sums, (0, 1)))(factors, rows)
    for name, grad in zip(("factors", "rows"), grads, strict=True):
        assert np.isfinite(grad).all() and np.any(grad), f"the gradient of {name} is not finite, or all zeros"


def test_invalid_or_duplicate_expert_choices_give_nan():
    routing = Routing(jnp.array([[1, 1], [2, 0], [-1, 0], [1, 0]]), jnp.ones((4, 2)), jnp.zeros((4, 2)))
    factors, rows = jnp.array([[1.0], [10.0]]), jnp.ones((4, 1))
    # A capacity of one row, which invalid choices do not take.
    for mix in (mix_experts, lambda *args: mix_experts_with_capacity(*args, capacity_factor=0.25)[0]):
        mixed = jax.jit(partial(mix, doubled))(factors, rows, routing)
        np.testing.assert_array_equal(mixed.ravel(), [np.nan, np.nan, np.nan, 11])


def test_choices_fit_that_are_distinct_numbers_of_experts():
    chosen = np.array([[0, 1], [2, 0], [0, 3], [-1, 0], [1, 1]], np.int32)
    routing = Routing(chosen, np.ones((5, 2), np.float32), np.zeros((5, 3), np.float32))
    assert jax.jit(experts_file._fits)(routing).tolist() == [True, True, False, False, False]


def test_invalid_choices_of_other_tokens_do_not_displace_a_choice_from_the_sent_rows():
    factors, rows = jnp.array([[1.0], [10.0]]), jnp.ones((4, 1))
    mesh, twice = (
        DeviceMeshManager.create_device_mesh({"ep": 2}, devices=jax.devices()[:2]),
        jnp.array([[0, 0], [0, 1]]),
    )
    local = partial(mix_experts, doubled, axes="ep")
    specs = P("ep"), P(), Routing(P(), P(), P())
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("ep"))
    mixed = jax.jit(split)(factors, rows[:2], Routing(twice, jnp.ones((2, 2)), jnp.zeros((2, 2))))
    np.testing.assert_array_equal(mixed.ravel(), [np.nan, 11, np.nan, 11])


def test_rows_of_weight_0_use_no_expert_capacity():
    """Rows of weight 0 use no capacity: with C = 1, a padding row would fill expert 0."""
    routing = Routing(jnp.array([[0], [0], [0], [0]]), jnp.ones((4, 1)), jnp.zeros((4, 2)))

    @jax.jit
    def mixed(row_weights):
        mix = partial(mix_experts_with_capacity, doubled, jnp.ones((2, 1)), jnp.arange(1.0, 5)[:, None], routing)
        return mix(capacity_factor=0.5, row_weights=row_weights)

    out, dropped = mixed(jnp.array([0, 0, 0.25, 2]))
    assert out.ravel().tolist() == [0, 0, 3, 0] and dropped == 0.5
    assert mixed(jnp.zeros(4))[1] == 0  # not 0 / 0


def test_dropped_share_of_replicated_tokens_matches_a_single_device():
    mesh = DeviceMeshManager.create_device_mesh({"ep": 4}, devices=jax.devices()[:4])
    model = Experts(MLP(), COUNT, 2, capacity_factor=0.5)
    variables = unbox(jax.jit(model.init)(jax.random.key(0), X))
    weights = (jnp.arange(ROWS) % 7 > jnp.arange(ROWS) // 16).reshape(X.shape[:2])

    def dropped(model, variables, x):
        return model.apply(variables, x, weights, mutable=["intermediates"])[1]["intermediates"]["dropped"][0]

    specs = {"params": {"experts": P("ep"), "router": P()}}
    split = jax.shard_map(partial(dropped, model), mesh=mesh, in_specs=(specs, P()), out_specs=P())
    want = jax.jit(partial(dropped, model.clone(axis=None, row_groups=4)))(variables, X)
    np.testing.assert_allclose(jax.jit(split)(variables, X), want, rtol=FLOAT32_ROUNDING)
    assert 0.1 < want < 1


def test_dropped_share_of_replicated_tokens_traces_under_strict_promotion_of_dtypes():
    mesh = DeviceMeshManager.create_device_mesh({"ep": 4}, devices=jax.devices()[:4])
    model = Experts(MLP(), COUNT, 2, capacity_factor=0.5)

    def dropped(variables, x):
        return model.apply(variables, x, mutable=["intermediates"])[1]["intermediates"]["dropped"][0]

    specs = {"params": {"experts": P("ep"), "router": P()}}
    split = jax.shard_map(dropped, mesh=mesh, in_specs=(specs, P()), out_specs=P())
    with jax.numpy_dtype_promotion("strict"):
        variables = unbox(jax.eval_shape(model.init, jax.random.key(0), X))
        assert jax.eval_shape(split, variables, X).dtype == jnp.float32


def test_experts_sow_the_dropped_share_into_intermediates():
    model = Experts(MLP(), COUNT, 2, axis=None, capacity_factor=0.25)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    assert set(variables) == {"params"}
    _, told = jax.jit(partial(model.apply, mutable=["intermediates"]))(variables, X)
    assert 0.5 < told["intermediates"]["dropped"][0] < 1


def test_mix_experts_exchanges_tokens_by_all_to_all_and_gathers_no_parameters():
    mesh = DeviceMeshManager.create_device_mesh({"ep": 8})
    params = jnp.ones((8, 1))

    def local(params, rows, logits):
        return mix_experts(doubled, params, rows, route_tokens(logits, 2), "ep")

    split = jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    found = [eqn for _, eqn in equations(jax.make_jaxpr(split)(params, X[:, 0], jnp.zeros((32, 8))))]
    sent = [eqn.outvars[0].aval.shape for eqn in found if eqn.primitive.name == "all_to_all"]
    # Rows both ways, at most 4 to each device, since a token goes to an expert once; and the counts.
    assert sorted(sent) == [(8, 1), (8, 4, DIM), (8, 4, DIM)]
    assert not [eqn for eqn in found if eqn.primitive.name in ("all_gather", "psum")]


# --------------------------------------------------------------------------------------------------------------- errors


def refused(match, shape=None, axes=("ep",), x=X, **options):
    options = {"num_experts": COUNT, "top_k": 2, **options}
    model = Experts(MLP(), **options)
    if shape is None:
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(model.init, jax.random.key(0), x)
        return
    mesh = DeviceMeshManager.create_device_mesh(shape, devices=jax.devices()[: int(np.prod(list(shape.values())))])
    params = unbox(jax.eval_shape(Experts(MLP(), options["num_experts"], 2).init, jax.random.key(0), x))
    local = lambda params, x: model.apply(params, x)  # noqa: E731
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P(axes)), params, x)


def test_experts_raise_for_invalid_options_and_mesh_sizes():
    refused("top_k=9 of 8 experts", top_k=9)
    refused("capacity_factor=0.0 leaves no row", capacity_factor=0.0)
    refused("row_groups=3 does not divide the 64 rows", capacity_factor=1.0, row_groups=3)
    refused("apply_by_group: block_size=0 must be", block_size=0)
    refused(r"8 experts do not divide over the 3 devices along \('ep',\)", {"ep": 3}, (), X[:3])
    refused(r"8 experts do not divide over the 3 devices along \('ep',\)", {"ep": 3}, ("ep",), X[:3])
    refused(r"a device has parameters of 8 experts, where 2 are needed, 8 over \('ep',\)", {"ep": 4})
    refused("Experts: 'ep' is not a bound mesh axis; the axes bound here", {"dp": 2}, ("dp",))
    refused(r"the 6 tokens of a device do not divide over the 4 devices", {"dp": 1, "ep": 4}, ("dp",), X[:3])
    refused(
        r"batch_axes=\('dp', 'ep'\).*tokens are the same along", {"dp": 2, "ep": 4}, ("dp",), batch_axes=("dp", "ep")
    )


def test_experts_raise_for_a_number_that_the_devices_do_not_divide_whether_or_not_they_share_tokens():
    mesh = DeviceMeshManager.create_device_mesh({"ep": 3}, devices=jax.devices()[:3])
    for shared_axes in ((), ("ep",)):
        check = partial(Experts(nn.Dense(2), 8, 1)._check_divides, axes=("ep",), shared_axes=shared_axes)
        split = jax.shard_map(check, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        with pytest.raises(ValueError, match=r"8 experts do not divide over the 3 devices along \('ep',\)"):
            jax.eval_shape(split, np.ones((9, 2), np.float32))


# -------------------------------------------------------------------------------------------------- with other features


class Layer(nn.Module):
    """A layer of a scan."""

    axis: str | None

    @nn.compact
    def __call__(self, x, _):
        return x + Experts(MLP(), COUNT, 2, axis=self.axis, name="mixture")(x), None


class Layers(nn.Module):
    """A scan of two rematerialised layers."""

    axis: str | None = "ep"

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return layers(self.axis, name="layers")(x, None)[0]


def error(params, apply_fn, x, rng):
    return jnp.mean((apply_fn({"params": params}, x) - x[:, ::-1]) ** 2)


ROUTER = optax.contrib.MuonDimensionNumbers((1,), (2,))  # of a scan, and without a bias: nothing else tells
FEATURES = {
    "scan and remat": ({}, {}, {}, optax.adamw(1e-2)),
    "clipped": ({}, {}, {}, optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))),
    "minibatches": ({}, {}, {"num_minibatches": 2}, optax.adam(1e-2)),
    "gathered again": ({"reshard_after_forward": True}, {}, {}, optax.adam(1e-2)),
    "padded": ({"uneven": "pad", "min_weight_size": 0}, {}, {}, optax.adam(1e-2)),
    "copies": ({"replicas": Replicas("dp")}, {}, {}, optax.adam(1e-2)),
    "frozen": ({}, {"trainable": lambda path: "experts" not in path}, {}, optax.sgd(0.1)),
    "muon": ({}, {}, {}, muon(1e-2, muon_weight_dimension_numbers=matrix_dimensions({"*/router/kernel": ROUTER}))),
    "adafactor": ({}, {}, {}, optax.adafactor(1e-2, min_dim_size_to_factor=4)),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("feature", FEATURES)
def test_three_steps_with_experts_and_another_feature_match_a_single_device(feature):
    wrapping, making, stepping, tx = FEATURES[feature]
    mesh, axes = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 2, "ep": 2}), ("dp", "fsdp", "ep")
    model = shard_modules(Layers(), Experts, "fsdp", **{"min_weight_size": 8, **wrapping})
    state = create_train_state(model, tx, mesh, jax.random.key(0), X, batch_axes=axes, allow_replicated=True, **making)
    params = jax.tree.map(np.asarray, unbox(state.params))
    step, opt_state = make_train_step(error, mesh, axes, allow_replicated=True, **stepping), tx.init(params)

    @jax.jit
    def step_of_one(params, opt_state):
        grads = jax.grad(error)(params, Layers(axis=None).apply, X, None)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    start = params
    for number in range(3):
        state, _ = step(state, X, jax.random.key(number))
        new, opt_state = step_of_one(params, opt_state)
        if making:  # frozen parameters stay
            new["layers"]["mixture"]["experts"] = start["layers"]["mixture"]["experts"]
        params = new
    assert_same_params(state.params, params, 1e-4)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, start)
    assert max(jax.tree.leaves(moved)) > 1e-3  # guard


@pytest.mark.slow
def test_int8_gathers_of_experts_change_the_loss_by_at_most_2_percent():
    losses = []
    for how in ({}, {"gather_dtype": "int8"}):
        mesh, axes = DeviceMeshManager.create_device_mesh({"fsdp": 4, "ep": 2}), ("fsdp", "ep")
        model = shard_modules(Experts(MLP(), COUNT, 2), Experts, "fsdp", 8, **how)
        state = create_train_state(
            model, optax.adam(1e-2), mesh, jax.random.key(0), X, batch_axes=axes, allow_replicated=True
        )
        losses.append(
            make_train_step(loss_fn, mesh, axes, allow_replicated=True)(state, X, jax.random.key(0))[1]["loss"]
        )
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)
    assert losses[0] != losses[1]


def test_experts_on_a_single_device_have_forward_mode_derivatives():
    """Experts on one device have a Hessian-vector product; with a capacity, a directional derivative."""
    params = Experts(MLP(), COUNT, 2).init(jax.random.key(0), X)["params"]
    ones = jax.tree.map(jnp.ones_like, params)

    def loss(params, model):
        return (model.apply({"params": params}, X) ** 2).mean()

    _, products = jax.jvp(jax.grad(partial(loss, model=Experts(MLP(), COUNT, 2))), (params,), (ones,))
    assert not [path for path, leaf in leaves_with_path(unbox(products)) if not np.isfinite(leaf).all()]
    full = partial(loss, model=Experts(MLP(), COUNT, 2, capacity_factor=1.25))
    _, slope = jax.jvp(full, (params,), (ones,))
    expected = sum(leaf.sum() for leaf in jax.tree.leaves(jax.grad(full)(params)))
    np.testing.assert_allclose(slope, expected, rtol=1e-4)
