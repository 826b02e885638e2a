"""Training, and what surrounds it, under ``jax.set_mesh`` with explicit, Auto and mixed axes."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.mesh_types import EXPLICIT, MESHES, MODELS, TX, Linen, has_types_of, is_explicit, mesh_called, set_globally
from tests.support import (
    AXES,
    FLOAT32_ROUNDING,
    assert_same_bits,
    assert_same_params,
    data,
    fsdp,
    mean_loss,
    train_on_one_device,
)
from xlstm_jax.distributed import (
    Checkpointer,
    DeviceMeshManager,
    Offload,
    abstract_batch,
    abstract_train_state,
    check_replicas,
    check_step,
    create_nnx_module,
    create_train_state,
    export_safetensors,
    import_safetensors,
    make_eval_step,
    make_train_step,
    nnx_value_and_grad,
    partition_specs,
    plan_sharding,
    shard_batch,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel.trees import flatten_with_path
from xlstm_jax.distributed.metrics import MetricAccumulator, StatefulMetric, WeightedMean, make_log_step
from xlstm_jax.explicit_axes import (
    on_auto_axes,
    on_set_mesh,
    outside_other_mesh,
    sharding_of_input,
    splits_over_both_types,
    typed_like,
)
from xlstm_jax.forecast import forecast

KEY = jax.random.key(0)
STEPS = 3
MODEL = MODELS["linen"][0]


def test_program_takes_a_committed_input_in_its_sharding_on_the_same_axes_and_any_other_in_that_of_the_batch():
    mesh, other = (DeviceMeshManager.create_device_mesh({"dp": dp, "fsdp": 8 // dp}) for dp in (2, 4))
    x, of_batch = np.ones((16, 2), np.float32), NamedSharding(mesh, P(AXES))
    for sharding in (NamedSharding(mesh, P("dp")), NamedSharding(mesh, P())):
        assert sharding_of_input(jax.device_put(x, sharding), of_batch) == sharding
    for unplaced in (x, jnp.asarray(x), jax.device_put(x, NamedSharding(other, P("dp")))):
        assert sharding_of_input(unplaced, of_batch) == of_batch


def test_no_mesh_is_set_for_a_program_on_a_mesh_of_another_size():
    large, small = (jax.sharding.Mesh(np.reshape(jax.devices()[:n], (2, -1)), AXES) for n in (8, 4))

    def program_on(mesh):
        return {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P(AXES))), "step": 0}

    with jax.set_mesh(large):
        for mesh, is_set in ((small, False), (large, True)):
            with outside_other_mesh(program_on(mesh)):
                assert jax.sharding.get_mesh().empty != is_set
        assert jax.sharding.get_mesh() == large
    with outside_other_mesh(program_on(small)):
        assert jax.sharding.get_mesh().empty


def batch_of(mesh):
    # NumPy arrays, since `data` may have been called under another mesh.
    return shard_batch(jax.device_get(data()), mesh, mesh.axis_names)


def state_on(mesh, model=MODEL, tx=TX, **options):
    x = jax.device_get(data()["x"])
    return create_train_state(model, tx, mesh, KEY, x, batch_axes=mesh.axis_names, **options)


def trained(mesh, model=MODEL, *, state=None, batch=None, **options):
    """Returns state, losses and step after ``STEPS`` steps under the mesh that is set."""
    state = state_on(mesh, model) if state is None else state
    step, losses = make_train_step(mean_loss, mesh, mesh.axis_names, **options), []
    for _ in range(STEPS):
        state, metrics = step(state, batch_of(mesh) if batch is None else batch, KEY)
        losses.append(float(metrics["loss"]))
    return state, losses, step


def of_one_device(model=MODELS["linen"][1], share=slice(None)):
    batch = jax.tree.map(lambda x: x[share], data())
    params = jax.jit(model.init)(KEY, data()["x"])["params"]
    params, _, losses = train_on_one_device(model, TX, params, mean_loss, batch, STEPS)
    return jax.device_get(params), losses


KINDS_OF_MODELS = ("linen", "nnx")


@cache
def reference(name):
    """Returns what ``of_one_device`` returns for a model, computed without a set mesh."""
    with jax.set_mesh(None):
        return of_one_device(MODELS[name][1])


def assert_trained_as_on_one_device(state, losses, name="linen"):
    params, want = reference(name)
    np.testing.assert_allclose(losses, want, rtol=FLOAT32_ROUNDING)
    assert_same_params(unbox(jax.device_get(state.params)), params)


def implicit_leaves(tree):
    paths_and_arrays, _ = flatten_with_path(tree, lambda node: False)
    return [path for path, array in paths_and_arrays if not is_explicit(array)]


@pytest.fixture
def mesh():
    """Returns a mesh with explicit axes, which is set."""
    mesh = mesh_called("explicit")
    with jax.set_mesh(mesh):
        yield mesh


# ------------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("name", KINDS_OF_MODELS)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", MESHES)
def test_training_under_jax_set_mesh_matches_a_single_device(kind, check_vma, name):
    mesh = mesh_called(kind)
    with jax.set_mesh(mesh):
        state, losses, step = trained(mesh, MODELS[name][0], check_vma=check_vma)
    assert_trained_as_on_one_device(state, losses, name)
    assert step.jitted._cache_size() == 1  # types of results are those of arguments: nothing compiles twice
    assert has_types_of(kind, state)


@pytest.mark.parametrize("name", KINDS_OF_MODELS)
@pytest.mark.parametrize("kind", ["explicit", "explicit fsdp", "auto"])
def test_training_under_a_globally_set_mesh_matches_a_single_device(kind, name):
    with set_globally(mesh_called(kind)):
        state, losses, _ = trained(mesh_called(kind), MODELS[name][0])
    assert_trained_as_on_one_device(state, losses, name)


def test_guard_training_on_half_of_the_batch_differs_from_the_reference():
    assert not np.allclose(of_one_device(share=slice(8))[1], reference("linen")[1], rtol=0.1)


def test_explicit_mesh_without_set_mesh_gives_arrays_without_explicit_types():
    mesh = mesh_called("explicit")
    state, losses, _ = trained(mesh)
    assert_trained_as_on_one_device(state, losses)
    assert len(implicit_leaves(state)) == len(jax.tree.leaves(state))


def test_explicit_mesh_adds_no_collectives_to_a_step(mesh):
    def collectives(mesh):
        text = make_train_step(mean_loss, mesh, AXES).lower(state_on(mesh), batch_of(mesh), KEY).compile().as_text()
        return {kind: text.count(f"{kind}(") for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")}

    under = collectives(mesh)
    with jax.set_mesh(None):
        assert under == collectives(mesh)
    assert under["all-gather"]  # guard


# -------------------------------------------------------------------------------------------- arrays of the user's code


@pytest.mark.parametrize("spec", [P("dp"), P("fsdp"), P(AXES), P()], ids=str)
def test_train_step_accepts_any_explicit_sharding_of_batch_rows(mesh, spec):
    batch = jax.tree.map(lambda x: jax.device_put(x, spec), jax.device_get(data()))
    state, losses, _ = trained(mesh, batch=batch)
    assert_trained_as_on_one_device(state, losses)


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_train_step_accepts_numpy_batches_and_arrays_made_under_the_mesh(mesh, make):
    state, losses, _ = trained(mesh, batch=jax.tree.map(make, jax.device_get(data())))
    assert_trained_as_on_one_device(state, losses)


def test_create_train_state_accepts_example_inputs_made_under_the_mesh(mesh):
    for x in (jnp.ones((16, 8)), jax.device_put(np.ones((16, 8)), P("dp")), batch_of(mesh)["x"]):
        state = create_train_state(MODEL, TX, mesh, KEY, x, batch_axes=AXES)
        assert_trained_as_on_one_device(*trained(mesh, state=state)[:2])


def test_parameters_of_a_new_state_have_explicit_types(mesh):
    assert not implicit_leaves(state_on(mesh, MODEL).params)


def test_parameters_have_explicit_types_outside_the_step(mesh):
    assert not implicit_leaves(state_on(mesh, MODEL).params)  # of a new state, too
    state, _, _ = trained(mesh)
    kernel = state.params["first"]["kernel"].value
    assert str(jax.typeof(kernel)) == "float32[8,16@fsdp]"
    assert str(jax.typeof(jnp.ones((2, 8)) @ kernel)) == "float32[2,16@fsdp]"
    assert str(jax.typeof(jax.sharding.reshard(kernel, P()))) == "float32[8,16]"
    halved = state.replace(params=jax.tree.map(lambda x: x / 2, state.params))
    state, metrics = make_train_step(mean_loss, mesh, AXES)(halved, batch_of(mesh), KEY)
    assert is_explicit(state.params["last"]["kernel"].value) and np.isfinite(float(metrics["loss"]))


def test_results_of_a_step_on_mixed_axes_have_explicit_types():
    mesh, x = mesh_called("explicit fsdp"), np.ones((8, 2), np.float32)
    loss = lambda params, apply_fn, batch: jnp.mean(apply_fn({"params": params}, batch))  # noqa: E731
    with jax.set_mesh(mesh):
        state = create_train_state(nn.Dense(1), optax.sgd(0.1), mesh, KEY, x, allow_replicated=True)
        after, _ = make_train_step(loss, mesh, allow_replicated=True)(state, x)
    assert not implicit_leaves(after)


def test_state_created_without_a_set_mesh_trains_on_under_the_mesh(mesh):
    with jax.set_mesh(None):
        state = state_on(mesh)
        batch = batch_of(DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4}))
    state, losses, _ = trained(mesh, state=state, batch=batch)
    assert_trained_as_on_one_device(state, losses)
    assert not implicit_leaves(state)


def test_state_created_under_a_set_mesh_trains_on_without_the_mesh(mesh):
    state = state_on(mesh)
    with jax.set_mesh(None):
        state, losses, _ = trained(mesh, state=state)
    assert_trained_as_on_one_device(state, losses)


def test_train_step_runs_inside_jit_and_scan_under_an_explicit_mesh(mesh):
    step, batch = make_train_step(mean_loss, mesh, AXES), batch_of(mesh)

    @jax.jit
    def run(state):
        def body(state, _):
            state, metrics = step(state, batch, KEY)
            return state, metrics["loss"]

        return jax.lax.scan(body, state, length=STEPS)

    state, losses = run(state_on(mesh))
    assert_trained_as_on_one_device(state, losses)


MIXED = ["explicit fsdp", "explicit dp"]


@pytest.mark.parametrize("kind", MIXED)
def test_step_in_a_program_on_mixed_axes_returns_arrays_with_the_types_of_the_state(kind):
    """The carry of a scan must have equal types; arrays of a step are combined with arrays of the program."""
    mesh = mesh_called(kind)
    with jax.set_mesh(mesh):
        step, state, batch = make_train_step(mean_loss, mesh, AXES), state_on(mesh), batch_of(mesh)

        @jax.jit
        def run(state):
            def body(state, _):
                after, metrics = step(state, batch, KEY)
                moved = jax.tree.map(lambda new, old: jnp.max(abs(new - old)), after.params, state.params)
                return after, (metrics["loss"] * 1, moved)

            return jax.lax.scan(body, state, length=STEPS)

        types = jax.tree.map(jax.typeof, state)
        state, (losses, moved) = run(state)
        assert jax.tree.leaves(jax.tree.map(jax.typeof, state)) == jax.tree.leaves(types)
    assert_trained_as_on_one_device(state, losses)
    assert min(map(jnp.min, jax.tree.leaves(moved))) > 0


@pytest.mark.parametrize("axis_name, typed", [("fsdp", True), (AXES, False)], ids=str)
def test_update_on_mixed_axes_keeps_shards_of_dims_over_axes_of_both_types(axis_name, typed):
    """Types name explicit axes alone: with types, dims over both axes would be gathered over the Auto axis."""
    mesh = mesh_called("explicit fsdp")
    with jax.set_mesh(mesh):
        state = state_on(mesh, Linen(fsdp(axis_name=axis_name)))
        after = jax.jit(lambda state: state.apply_gradients(grads=state.params))(state)
        for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
            assert new.sharding.shard_shape(new.shape) == old.sharding.shard_shape(old.shape)
            assert is_explicit(new) == typed


def test_dim_is_over_both_types_if_some_of_its_axes_are_explicit():
    with jax.set_mesh(mesh_called("explicit fsdp")):
        assert splits_over_both_types(P(AXES)) and splits_over_both_types(P(None, AXES))
        assert not any(splits_over_both_types(spec) for spec in (P(*AXES), P("fsdp"), P()))


@pytest.mark.parametrize("kind", [*MIXED, "explicit"])
def test_gradients_of_an_nnx_module_have_the_types_of_its_parameters(kind):
    """In ``nnx.jit`` an optimizer combines the gradients with parameters; rows have the explicit axes of the batch."""
    rows = jax.device_get(data())
    mesh = mesh_called(kind)

    def loss_fn(module, batch):
        errors = jnp.mean((module(batch["x"]) - batch["y"]) ** 2, -1)
        return errors.mean(), {"rows": errors, "mean": errors.mean()}

    @nnx.jit
    def step(module, optimizer, batch):
        (loss, aux), grads = nnx_value_and_grad(loss_fn, has_aux=True)(module, batch)
        weighed = jax.tree.map(lambda param, grad: param + grad, nnx.state(module, nnx.Param), grads)
        optimizer.update(module, grads)
        return loss, aux["rows"] * aux["mean"], weighed

    params, want = reference("nnx")
    with jax.set_mesh(mesh):
        module = create_nnx_module(MODELS["nnx"][0], KEY, mesh=mesh)
        optimizer = nnx.Optimizer(module, TX, wrt=nnx.Param)
        found = [step(module, optimizer, rows) for _ in range(STEPS)]
        explicit = tuple(axis for axis, of_axis in zip(AXES, MESHES[kind][2], strict=True) if of_axis == EXPLICIT)
        assert jax.typeof(found[0][1]).sharding.spec == P(explicit)
    np.testing.assert_allclose([loss for loss, _, _ in found], want, rtol=FLOAT32_ROUNDING)
    np.testing.assert_allclose(np.mean(found[0][1]), want[0] ** 2, rtol=FLOAT32_ROUNDING)
    assert_same_params(unbox(jax.device_get(MODELS["nnx"][1].unbind(module)["params"])), params)


@pytest.mark.parametrize("kind", [*MIXED, "explicit", "auto"])
def test_results_are_typed_by_a_spec_or_by_the_arguments_that_they_replace(kind):
    x = np.arange(32.0, dtype=np.float32).reshape(16, 2)
    names = tuple(axis for axis, of_axis in zip(AXES, MESHES[kind][2], strict=True) if of_axis == EXPLICIT)

    with jax.set_mesh(mesh_called(kind)):
        replaced = jax.device_put(x, P("fsdp")) if "fsdp" in names else jnp.asarray(x)
        typed = on_auto_axes(
            lambda replaced, x: (replaced * 2, x * 2, x.sum(0)),
            like=lambda replaced, x: (replaced, P(AXES), P()),
            on_mixed_axes=True,
        )
        results = jax.jit(typed)(replaced, jnp.asarray(x))
        for result, want in zip(results, (2 * x, 2 * x, x.sum(0)), strict=True):
            np.testing.assert_array_equal(result, want)
        if names:
            of_replaced = P("fsdp", None) if "fsdp" in names else P(None, None)
            assert [jax.typeof(y).sharding.spec for y in results] == [of_replaced, P(names, None), P(None)]


@pytest.mark.parametrize("memory, spec", [("device", P("dp")), ("pinned_host", P(None))])
def test_results_that_replace_arguments_in_host_memory_keep_their_type(mesh, memory, spec):
    """JAX 0.12 pairs typed results with donated arguments of other memory, and refuses to run."""
    argument = jax.device_put(np.zeros(8), NamedSharding(mesh, P("dp"), memory_kind=memory))
    found = []

    def typed(argument):
        result = typed_like((jnp.zeros(8),), (argument,))[0]
        found.append(jax.typeof(result).sharding.spec)
        return result

    jax.eval_shape(typed, argument)
    assert found == [spec]


def test_replicated_arrays_of_a_mesh_of_other_sizes_are_placed_on_the_set_mesh(mesh):
    other = DeviceMeshManager.create_device_mesh({"fsdp": 8})
    replicated, split = (jax.device_put(np.zeros(8), NamedSharding(other, spec)) for spec in (P(), P("fsdp")))
    assert on_set_mesh(replicated).sharding.mesh == mesh
    assert on_set_mesh(split).sharding.mesh == other  # memory cannot be shared


def test_train_step_compiled_from_abstract_arguments_trains_under_an_explicit_mesh(mesh):
    state = state_on(mesh)
    abstract = abstract_train_state(MODEL, TX, mesh, KEY, jnp.ones((16, 8)), batch_axes=AXES)
    abstract = abstract.replace(apply_fn=state.apply_fn, tx=state.tx)
    batch = abstract_batch(data(), mesh, AXES)
    step, losses = make_train_step(mean_loss, mesh, AXES).lower(abstract, batch, KEY).compile(), []
    for _ in range(STEPS):
        state, metrics = step(state, batch_of(mesh), KEY)
        losses.append(float(metrics["loss"]))
    assert_trained_as_on_one_device(state, losses)


@pytest.mark.parametrize("tx", [TX, optax.contrib.muon(1e-2)], ids=["adam", "muon"])
def test_custom_step_with_apply_gradients_trains_under_an_explicit_mesh(mesh, tx):
    def own(mesh):
        state, losses = state_on(mesh, tx=tx), []
        specs = partition_specs(state.params, mesh)

        @partial(jax.shard_map, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(P(), specs))
        def on_device(params, batch):
            return value_and_grad(lambda params, batch: mean_loss(params, MODEL.apply, batch), AXES)(params, batch)

        @jax.jit
        def step(state, batch):
            loss, grads = on_device(state.params, batch)
            return state.apply_gradients(grads=grads), loss

        for _ in range(STEPS):
            state, loss = step(state, batch_of(mesh))
            losses.append(float(loss))
        return losses

    under = own(mesh)
    with jax.set_mesh(None):
        np.testing.assert_allclose(under, own(DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})), rtol=1e-6)
    assert under[0] > under[-1]  # guard


# ------------------------------------------------------------------------------------------------------ kinds of states


@pytest.mark.parametrize(
    "model, options",
    [
        (Linen(fsdp(uneven="pad"), hidden=15), {}),
        (Linen(fsdp(axis_name=AXES)), {}),
        (MODEL, {"offload": Offload()}),
        (MODEL, {"trainable": lambda path: "first" not in path}),
    ],
    ids=["padding", "two axes", "offload", "frozen"],
)
@pytest.mark.parametrize("kind", ["explicit", "explicit fsdp"])
def test_each_kind_of_state_trains_equally_with_and_without_a_set_mesh(kind, model, options):
    mesh = mesh_called(kind)
    with jax.set_mesh(mesh):
        state, losses, step = trained(mesh, state=state_on(mesh, model, **options))
    want, wanted, _ = trained(mesh, state=state_on(mesh, model, **options))
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    assert step.jitted._cache_size() == 1
    for (path, got), leaf in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(want), strict=True):
        assert got.sharding.shard_shape(got.shape) == leaf.sharding.shard_shape(leaf.shape), path


# --------------------------------------------------------------------------------------------------- other entry points


def evaluated(mesh):
    metric = WeightedMean()

    def eval_fn(params, apply_fn, batch):
        error = jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2, -1)
        return {"values": error, "weight": batch["weight"]}

    step, local = make_eval_step(eval_fn, mesh, mesh.axis_names, metric=metric), metric.empty(mesh.axis_names, mesh)
    log_step = make_log_step(metric, mesh, mesh.axis_names)
    state, values = state_on(mesh), []
    for _ in range(2):
        for _ in range(2):
            local = step(state, batch_of(mesh), local)
        value, local = log_step(local)
        values.append(value)
    assert float(values[0]) == float(values[1])
    return values[0]


@pytest.mark.parametrize("kind", ["explicit", "explicit fsdp"])
def test_evaluation_under_an_explicit_mesh_equals_an_auto_mesh(kind):
    want, mesh = float(evaluated(mesh_called("auto"))), mesh_called(kind)
    with jax.set_mesh(mesh):
        value = evaluated(mesh)
        assert float(value * 2) == pytest.approx(2 * want, rel=1e-6)


@pytest.mark.parametrize("kind", ["explicit", "explicit fsdp"])
def test_replicated_results_of_a_function_on_auto_axes_have_types_of_the_set_mesh(kind):
    with jax.set_mesh(mesh_called(kind)):
        total = on_auto_axes(jnp.sum, like=lambda x: P())
        (found,) = jax.make_jaxpr(total)(np.ones(4, np.float32)).out_avals
        assert AxisType.Explicit in found.sharding.mesh.axis_types and found.sharding.spec == P()
        (bare,) = jax.make_jaxpr(on_auto_axes(jnp.sum))(np.ones(4, np.float32)).out_avals
        assert AxisType.Explicit not in bare.sharding.mesh.axis_types  # guard


@pytest.mark.parametrize("kind", ["explicit", "explicit fsdp"])
def test_padded_rows_are_evaluated_and_trained_with_weight_zero_under_an_explicit_mesh(kind):
    def eval_fn(params, apply_fn, batch):
        return {"values": (apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2, "weight": batch["weight"]}

    def loss_fn(params, apply_fn, batch):
        found = eval_fn(params, apply_fn, batch)
        return jnp.sum(found["values"].mean(-1) * found["weight"]), jnp.sum(found["weight"])

    mesh, rows = mesh_called(kind), jax.tree.map(lambda x: x[:13], jax.device_get(data()))
    metric, plain_model = WeightedMean(), MODELS["linen"][1]
    params = jax.jit(plain_model.init)(KEY, data()["x"])["params"]
    want = jnp.mean((plain_model.apply({"params": params}, rows["x"]) - rows["y"]) ** 2)
    with jax.set_mesh(mesh):
        batch, real = shard_batch(rows, mesh, AXES, pad=True)
        batch = batch | {"weight": real}
        state = state_on(mesh)
        local = make_eval_step(
            lambda *args: jax.tree.map(lambda x: x if x.ndim == 1 else x.mean(-1), eval_fn(*args)), mesh, metric=metric
        )(state, batch, metric.empty(AXES, mesh))
        np.testing.assert_allclose(make_log_step(metric, mesh, AXES)(local)[0], want, rtol=1e-5)
        _, metrics = make_train_step(loss_fn, mesh, weighted=True)(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)


@pytest.mark.parametrize("model", [MODEL, Linen(fsdp(uneven="pad"), hidden=15)], ids=["split", "padded"])
def test_checkpoints_and_safetensors_round_trip_under_an_explicit_mesh(mesh, tmp_path, model):
    state = state_on(mesh, model)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, state)
        like = abstract_train_state(model, TX, mesh, KEY, jnp.ones((16, 8)), batch_axes=AXES)
        restored = checkpointer.restore(like)
    export_safetensors(state.params, tmp_path / "model.safetensors")
    imported = import_safetensors(tmp_path / "model.safetensors", like.params)
    for tree in (restored.params, imported):
        assert_same_bits(tree, state.params)
        assert not implicit_leaves(tree)
        types = [jax.tree.map(jax.typeof, jax.tree.leaves(one)) for one in (tree, state.params)]
        assert types[0] == types[1]
    assert trained(mesh, state=restored)[1] == trained(mesh, state=state)[1]


def test_check_step_gives_right_and_wrong_verdicts_under_an_explicit_mesh(mesh):
    def total(params, apply_fn, batch, rng):
        return 16 * mean_loss(params, apply_fn, batch)

    assert check_step(make_train_step(mean_loss, mesh, AXES), state_on(mesh), batch_of(mesh), KEY).verdict == "right"

    @jax.jit
    def own(state, batch, rng):
        specs = partition_specs(state.params, mesh)
        gradients = value_and_grad(lambda params, batch: mean_loss(params, state.apply_fn, batch), AXES)
        # Without `mesh=`: the step reads the mesh that is set.
        run = jax.shard_map(gradients, in_specs=(specs, P(AXES)), out_specs=(P(), specs))
        loss, grads = run(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    for loss_fn, verdict in ((mean_loss, "right"), (total, "wrong")):
        assert check_step(own, state_on(mesh), batch_of(mesh), KEY, loss_fn=loss_fn).verdict == verdict


def test_plans_and_forecasts_are_equal_with_and_without_a_set_mesh(mesh):
    def looked_at(mesh):
        step, args = make_train_step(mean_loss, mesh, AXES), (state_on(mesh), batch_of(mesh), KEY)
        plans = [plan_sharding(MODEL, sizes, jnp.ones((16, 8)), tx=TX) for sizes in (mesh.shape, {"dp": 4, "fsdp": 8})]
        absent = DeviceMeshManager.create_abstract_mesh({"dp": 4, "fsdp": 4})
        state = abstract_train_state(MODEL, TX, absent, KEY, jnp.ones((16, 8)), batch_axes=AXES)
        shape = state.params["first"]["kernel"].value.sharding.shard_shape((8, 16))
        return [str(plan) for plan in plans], shape, forecast(step, *args).total_bytes

    under = looked_at(mesh)
    with jax.set_mesh(None):
        assert under == looked_at(mesh)


def test_stateful_metrics_update_and_sync_under_an_explicit_mesh(mesh):
    for place in (None, mesh):
        total = MetricAccumulator(jnp.float32(0), mesh=place)
        total.update(2)
        total.update(jax.device_put(np.arange(8.0), P(AXES)))
        mean = StatefulMetric(WeightedMean(), mesh=place)
        mean.update(batch_of(mesh)["x"][:, :1].mean(-1))
        mean.update(jnp.ones(3))
        for metric in (total, mean):
            metric.sync()
            metric.load_state_dict(metric.state_dict())
        assert float(total.value * 2) == 60.0
        want = (np.asarray(data()["x"])[:, 0].sum() + 3) / 19
        assert float(mean.compute() + 1) == pytest.approx(want + 1, rel=1e-6)


def test_check_replicas_passes_under_an_explicit_mesh(mesh):
    check_replicas(state_on(mesh))


def test_shard_batch_places_arrays_on_the_set_mesh(mesh):
    batch, weight = shard_batch({"x": np.ones((13, 3))}, mesh, AXES, pad=True)
    assert str(jax.typeof(batch["x"])) == "float32[16@(dp,fsdp),3]" and is_explicit(weight)
    auto = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})
    assert is_explicit(shard_batch(np.ones((16, 3)), auto, AXES))  # the mesh that is set decides
    other = DeviceMeshManager.create_device_mesh({"fsdp": 8})
    assert shard_batch(np.ones((16, 3)), other, "fsdp").sharding == NamedSharding(other, P("fsdp"))
