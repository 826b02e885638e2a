"""Tests of frozen parameters: split and gathered as others, without gradients, moments or extra collectives."""

import io
import re
from collections import Counter
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from rich.console import Console

from tests.support import (
    AXES,
    Block,
    Model,
    as_called,
    assert_same_bits,
    assert_same_params,
    data,
    fsdp,
    in_case,
    integers,
    mean_loss,
    mesh_of,
    on_mesh,
    plain,
)
from xlstm_jax.distributed import (
    Checkpointer,
    Offload,
    Replicas,
    TrainState,
    abstract_train_state,
    check_step,
    create_train_state,
    elementwise_only,
    export_safetensors,
    freeze_params,
    global_norm,
    import_safetensors,
    init_sharded,
    make_train_step,
    muon,
    nnx_model,
    partition_specs,
    plan_sharding,
    scan_layers,
    shard_module_params,
    shard_modules,
    skip_nonfinite,
    sync_gradients,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, true_value
from xlstm_jax.distributed.data_parallel.wire.collectives import varying_axes
from xlstm_jax.distributed.optimizers import matrix_dimensions
from xlstm_jax.distributed.plan import ShardingPlan
from xlstm_jax.forecast import forecast
from xlstm_jax.forecast.cost.flops import count_flops
from xlstm_jax.forecast.training import Workload

MESH, KEY, BATCH = mesh_of(2, 4), jax.random.key(0), data()
X = BATCH["x"]
STEPS = 3
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))  # decays and clips every leaf


def is_trained(path):
    """Selects the head and each block's second Dense; the first Dense, norms and some biases are frozen."""
    return "Dense_1" in path


FROZEN = {"trainable": is_trained, "frozen_dtype": "bfloat16"}


def split_tree(params, trainable):
    """Returns the trained and the frozen leaves by path, and a function that merges the two dicts."""
    paths, treedef = trees.flatten_with_path(params, lambda node: False)
    trained, rest = ({p: x for p, x in paths if bool(trainable(p)) == kind} for kind in (True, False))
    return trained, rest, lambda both: jax.tree.unflatten(treedef, [both[path] for path, _ in paths])


def trained_on_one_device(model, start, tx, trainable=is_trained, steps=STEPS, loss_fn=mean_loss, batch=BATCH):
    """Returns losses, and parameters by path, of plain optax on the trained leaves alone."""
    trained, rest, merge = split_tree(start, trainable)
    opt_state = tx.init(trained)

    @jax.jit
    def step(trained, opt_state):
        loss = lambda trained: loss_fn(merge(rest | trained), model.apply, batch)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(trained)
        updates, opt_state = tx.update(grads, opt_state, trained)
        return value, global_norm(grads), optax.apply_updates(trained, updates), opt_state

    losses = []
    for _ in range(steps):
        value, norm, trained, opt_state = step(trained, opt_state)
        losses.append((float(value), float(norm)))
    return losses, merge(rest | trained)


def run(step, state, batch=BATCH, steps=STEPS):
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch, KEY)
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return losses, state


def on_host(params):
    """Returns unsharded values on the host, without boxes and padding."""
    return trees.map_leaves(lambda leaf: np.asarray(true_value(leaf)), params)


def frozen_paths(tree):
    return [path for path, leaf in trees.leaves_with_path(tree) if not leaf_of(leaf).trainable]


class Ahead(nn.Module):
    """``Model`` whose layers are gathered ahead by ``scan_layers``."""

    @nn.compact
    def __call__(self, x):
        x = fsdp(nn.Dense)(16)(x)
        x, _ = scan_layers(fsdp(Block), length=3)(name="blocks")(x, None)
        return fsdp(nn.Dense)(4)(x)


CASES = {
    "reduced once, gathered again, without types": (
        partial(Model, fsdp(reshard_after_forward=True)),
        {"num_minibatches": 2, "accumulation": "reduce_once", "check_vma": False},
    ),
    "copies, reduced once, their optimizer state split, padded": (
        partial(Model, fsdp(replicas=Replicas("dp", shard_optimizer_state=True), uneven="pad", min_weight_size=4)),
        {"num_minibatches": 2, "accumulation": "reduce_replicas_once"},
    ),
    "gathered ahead, each minibatch reduced": (Ahead, {"num_minibatches": 2}),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES)
def test_training_beside_frozen_leaves_matches_a_single_device_in_all_cases(case):
    make_model, options = CASES[case]
    # 3 divides neither 8 nor 16, so the case with uneven="pad" does pad.
    mesh, batch = (mesh_of(2, 3), data(24)) if "padded" in case else (MESH, BATCH)
    state = create_train_state(make_model(), ADAM, mesh, KEY, X, batch_axes=AXES, **FROZEN)
    assert any(not leaf_of(leaf).stores_value for _, leaf in trees.leaves_with_path(state.params)) == ("padded" in case)
    start = on_host(state.params)
    want_losses, want = trained_on_one_device(Model(), start, ADAM, batch=batch)
    losses, state = run(make_train_step(mean_loss, mesh, AXES, **options), state, batch)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert_same_params(on_host(state.params), want)
    before = dict(trees.leaves_with_path(start))
    for path, leaf in trees.leaves_with_path(state.params):
        same = np.array_equal(np.asarray(true_value(leaf)), before[path])
        assert leaf_of(leaf).trainable == is_trained(path) == (not same), path
        assert leaf_of(leaf).value.dtype == ("float32" if is_trained(path) else "bfloat16")
    moments = [path for path, leaf in trees.leaves_with_path(state.opt_state) if np.ndim(leaf_of(leaf).value)]
    assert moments and not [path for path in moments if not is_trained(path)]


@pytest.mark.slow
def test_muon_beside_frozen_leaves_matches_a_single_device_with_and_without_offload():
    def state_of(offload):
        return create_train_state(
            Model(fsdp()), muon(0.02), MESH, KEY, X, batch_axes=AXES, offload=Offload(offload), **FROZEN
        )

    step, first = make_train_step(mean_loss, MESH, AXES), state_of(False)
    start = on_host(first.params)
    trained = split_tree(start, is_trained)[0]
    dimensions = matrix_dimensions()(trained)
    matrices = [path for path, dims in dimensions.items() if dims is not None]
    assert sorted(matrices) == ["Dense_1/kernel", "blocks/Dense_1/kernel"]  # guard: the rest is AdamW's
    tx = optax.contrib.muon(0.02, muon_weight_dimension_numbers=dimensions)
    want_losses, want = trained_on_one_device(Model(), start, tx)
    losses, last = run(step, first)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert_same_params(on_host(last.params), want)
    offloaded = state_of(True)
    assert "pinned_host" in {leaf.sharding.memory_kind for leaf in jax.tree.leaves(offloaded.opt_state)}
    losses_offloaded, offloaded = run(step, offloaded)
    assert losses_offloaded == losses
    assert_same_bits(on_host(offloaded.params), on_host(last.params))


# ------------------------------------------------------------------------------------------------------------- LoRA


class LoRADense(nn.Dense):
    """A Dense with the kernel W + A B: the parameter names of ``nn.Dense``, and two more."""

    rank: int = 2

    @nn.compact
    def __call__(self, x):
        a = self.param("lora_a", nn.initializers.normal(0.1), (x.shape[-1], self.rank))
        b = self.param("lora_b", nn.initializers.zeros, (self.rank, self.features))
        return super().__call__(x) + x @ a @ b


class Attention(nn.Module):
    """Transformer block with one head; ``dense`` makes the projections."""

    dense: type[nn.Module] = nn.Dense

    @nn.compact
    def __call__(self, x):
        width, h = x.shape[-1], nn.LayerNorm()(x)
        q, k, v = (self.dense(width, name=name)(h) for name in ("query", "key", "value"))
        mixed = nn.softmax(jnp.einsum("btd,bsd->bts", q, k) * width**-0.5) @ v
        x = x + self.dense(width, name="out")(mixed)
        return x + self.dense(width, name="down")(nn.gelu(self.dense(2 * width, name="up")(nn.LayerNorm()(x)))), None


class Transformer(nn.Module):
    """tokens [b, t] -> logits [b, t, 32]"""

    dense: type[nn.Module] = nn.Dense
    wrap: Callable = plain

    @nn.compact
    def __call__(self, tokens):
        x = self.wrap(nn.Embed)(32, 16, dtype=jnp.float32, name="embed")(tokens)
        block = nn.remat(self.wrap(Attention))
        layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return self.wrap(nn.Dense)(32, name="head")(layers(self.dense, name="blocks")(x)[0])


TOKENS = integers(3, (16, 9), 0, 32)
# SGD instead of Adam: Adam's first steps are +-1 for a gradient that is pure rounding.
SGD = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.5, momentum=0.9))
LORA = {"trainable": lambda path: "lora" in path, "frozen_dtype": "bfloat16"}


def token_loss(params, apply_fn, batch, rng=None):
    del rng
    logits = apply_fn({"params": params}, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def merged(params):
    """Returns the weights of the plain model: W + A B, without adapters."""
    if "lora_a" not in params:
        return {name: merged(leaf) if isinstance(leaf, dict) else leaf for name, leaf in params.items()}
    return {"kernel": params["kernel"] + params["lora_a"] @ params["lora_b"], "bias": params["bias"]}


@pytest.mark.slow
def test_lora_training_matches_a_single_device_and_merged_weights_load_in_the_plain_model(tmp_path):
    model = Transformer(LoRADense, fsdp())
    state = create_train_state(model, SGD, MESH, KEY, TOKENS[:, :-1], batch_axes=AXES, **LORA)
    start = on_host(state.params)
    one = {"trainable": LORA["trainable"], "loss_fn": token_loss, "batch": TOKENS}
    want_losses, want = trained_on_one_device(Transformer(LoRADense), start, SGD, **one)
    losses, state = run(make_train_step(token_loss, MESH, AXES), state, TOKENS)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert_same_params(on_host(state.params), want)
    query = state.params["blocks"]["query"]
    assert query["kernel"].value.dtype == "bfloat16" and query["lora_b"].dtype == "float32"
    assert np.abs(query["lora_b"]).max() > 0.01 and losses[-1][0] < losses[0][0]  # guard: the adapters were trained
    # The merged weights, through a file, in the plain model on one device.
    export_safetensors(jax.jit(merged)(unbox(state.params)), tmp_path)
    plain_params = jax.eval_shape(Transformer().init, KEY, TOKENS)["params"]
    dtypes = jax.eval_shape(merged, unbox(state.params))
    target = jax.tree.map(lambda x, like: np.zeros(x.shape, like.dtype), plain_params, dtypes)
    exported = import_safetensors(tmp_path, target)
    logits = jax.jit(Transformer(LoRADense).apply)({"params": want}, TOKENS)
    np.testing.assert_allclose(jax.jit(Transformer().apply)({"params": exported}, TOKENS), logits, atol=2e-5)
    kernels = [tree["blocks"]["query"]["kernel"] for tree in (exported, start)]
    assert np.abs(kernels[0] - kernels[1].astype(np.float32)).max() > 1e-3  # guard: the adapters matter


# ------------------------------------------------------------------------------------------ operations of the program


def collectives(lowered):
    return Counter(re.findall(r"stablehlo\.(all_reduce|all_gather|reduce_scatter)", as_called(lowered.as_text())))


def abstract_step(model, loss_fn=mean_loss, tx=ADAM, **freezing):
    state = abstract_train_state(model, tx, MESH, KEY, X, batch_axes=AXES, **freezing)
    return make_train_step(loss_fn, MESH, AXES), state


@pytest.mark.parametrize("remat", [True, False])
def test_frozen_leaves_are_gathered_but_cause_no_reduce_scatter_and_no_gradient_flops(remat):
    model = Model(fsdp(), scan=False, remat=remat)

    def sent_and_flops(**freezing):
        step, state = abstract_step(model, **freezing)
        flops = count_flops(step.trace(state, BATCH, KEY).jaxpr, MESH.size).total
        return collectives(step.lower(state, BATCH, KEY)), flops, state.params

    everything, flops, _ = sent_and_flops()
    frozen, flops_frozen, params = sent_and_flops(**FROZEN)
    split = {path for path, leaf in trees.leaves_with_path(params) if leaf_of(leaf).axes}
    assert everything["reduce_scatter"] == len(split)
    # Of the trained leaves, the kernels of the head and of each block's second Dense are large enough to be split.
    trained = {"Dense_1/kernel", *(f"block_{i}/Dense_1/kernel" for i in range(3))}
    assert set(filter(is_trained, split)) == trained
    assert frozen["reduce_scatter"] == len(trained)
    # No parameter before the first block is trained, so its input needs no gradient: with remat, its second
    # Dense is not gathered for the backward pass.
    assert frozen["all_gather"] == everything["all_gather"] - remat >= len(split)
    assert frozen["all_reduce"] < everything["all_reduce"]
    # A product of [examples, d] with [d, f] takes 2 examples d f FLOP, and so does each gradient of it. Not computed
    # are the gradients of four frozen kernels, [8, 16] of the first layer and [16, 32] of three blocks; and in the
    # first block, the gradients of the inputs of both Dense, [16, 32] and [32, 16].
    examples = X.shape[0] / MESH.size  # per device
    first_layer, in_block = 2 * examples * 8 * 16, 2 * examples * 16 * 32
    assert flops - flops_frozen == first_layer + 3 * in_block + 2 * in_block


def test_frozen_leaf_has_zero_gradient_in_plain_array_operations():
    ones = np.ones(3, np.float32)
    params = freeze_params({"base": ones, "lora": ones}, lambda path: path == "lora")
    grads = jax.grad(lambda params: jnp.dot(params["base"], 3 * ones) + jnp.dot(params["lora"], 3 * ones))(params)
    assert grads["base"].value.tolist() == [0, 0, 0] and grads["lora"].tolist() == [3, 3, 3]


def test_frozen_floats_vary_over_the_axes_of_the_batch_by_type_as_trainable_leaves_do():
    """A gradient rule (``jax.custom_vjp``) may then return a gradient of each device for either of them."""
    params = freeze_params(
        {"base": jnp.ones(3), "lora": jnp.ones(3), "steps": jnp.int32(2)}, lambda path: path == "lora"
    )
    types = {}

    def loss(params, x):
        types.update({name: varying_axes(leaf_of(leaf).value) for name, leaf in params.items()})
        return jnp.mean(params["base"] * params["lora"] * x)

    loss_and_grads = lambda params, x: value_and_grad(loss, AXES)(params, x)[0]  # noqa: E731
    jax.eval_shape(on_mesh(loss_and_grads, MESH, True, (P(), P(AXES)), P()), params, jnp.ones((8, 3)))
    assert types == {"base": set(AXES), "lora": set(AXES), "steps": set()}


def test_custom_step_gradients_of_frozen_leaves_are_zero_without_reduce_scatter():
    model = Model(fsdp())
    params = init_sharded(model, MESH, KEY, X, batch_axes=AXES, trainable=is_trained)["params"]
    specs = partition_specs(params, MESH)

    def by_hand(params, batch):
        return sync_gradients(jax.grad(mean_loss)(params, model.apply, batch), AXES)

    def by_ours(params, batch):
        return value_and_grad(mean_loss, AXES)(params, model.apply, batch)[1]

    rows = {name: P(AXES) for name in BATCH}
    want = jax.jit(jax.grad(mean_loss), static_argnums=1)(unbox(params), Model().apply, BATCH)
    want = dict(trees.leaves_with_path(want))
    for check_vma, fn in [(True, by_hand), (False, by_ours)]:
        gradient = on_mesh(fn, MESH, check_vma, (specs, rows), specs)
        assert collectives(gradient.lower(params, BATCH))["reduce_scatter"] == 2
        for path, leaf in trees.leaves_with_path(gradient(params, BATCH)):
            np.testing.assert_allclose(leaf_of(leaf).value, want[path] * is_trained(path), rtol=1e-4, atol=1e-6)
            assert leaf_of(leaf).trainable == is_trained(path)


def test_optimizer_inside_shard_map_has_moments_and_decay_for_trainable_leaves_only():
    params, moments = (
        freeze_params({"base": jnp.ones((8, 4)), "lora": jnp.ones((8, 4))}, lambda path: path == "lora"),
        [],
    )
    tx = elementwise_only(optax.adamw(0.1, weight_decay=0.1))

    def update(params):
        state = tx.init(params)
        moments.extend(path for path, _ in trees.leaves_with_path(state[0].mu))
        return optax.apply_updates(params, tx.update(params, state, params)[0])

    after = on_mesh(update, MESH, True, (P(),), P())(params)
    assert moments == ["lora"]
    assert np.array_equal(after["base"].value, params["base"].value) and np.all(after["lora"] < 0.95)


def test_wrappers_with_trainable_false_freeze_all_leaves_of_the_wrapped_module():
    """``shard_module_params`` and ``shard_modules`` freeze replicated leaves too, with and without a mesh."""

    class Adapted(nn.Module):
        base: nn.Module
        wrap: Callable = plain

        @nn.compact
        def __call__(self, x):
            return self.wrap(nn.Dense)(4, name="head")(nn.gelu(self.base(x)))

    base = nn.Sequential([fsdp(nn.Dense)(16), nn.LayerNorm()])
    inside = Adapted(shard_module_params(base, "fsdp", 32, trainable=False), fsdp())
    outside = shard_modules(Adapted(nn.Sequential([nn.Dense(16), nn.LayerNorm()])), nn.Dense, "fsdp", 32)
    by_path = lambda path, module: path == "base"  # noqa: E731
    outside = shard_modules(outside, by_path, "fsdp", 32, trainable=False)
    for model in (inside, outside):
        state = create_train_state(model, ADAM, MESH, KEY, X, batch_axes=AXES, frozen_dtype="float16")
        leaves = dict(trees.leaves_with_path(state.params))
        assert {path.split("/")[0] for path in frozen_paths(state.params)} == {"base"}
        assert len(frozen_paths(state.params)) == 4 and leaf_of(leaves["base/layers_0/kernel"]).axes == ("fsdp",)
        assert {leaf_of(leaves[path]).value.dtype.name for path in frozen_paths(state.params)} == {"float16"}
        plan = plan_sharding(model, dict(MESH.shape), X, tx=ADAM, frozen_dtype="float16")
        assert {row.path for row in plan.rows if not row.trainable} == set(frozen_paths(state.params))
    plain_model = Adapted(nn.Sequential([nn.Dense(16), nn.LayerNorm()]))
    start, head = on_host(state.params), lambda path: path.startswith("head/")
    _, want = trained_on_one_device(plain_model, start, ADAM, head)
    _, state = run(make_train_step(mean_loss, MESH, AXES), state)
    assert_same_params(on_host(state.params), want)


def test_initial_values_of_frozen_leaves_are_plain_values_cast_to_frozen_dtype_per_shard():
    state = create_train_state(Model(fsdp()), ADAM, MESH, KEY, X, batch_axes=AXES, **FROZEN)
    want = jax.jit(Model().init)(KEY, X)["params"]
    want = trees.map_leaves_with_path(lambda path, x: x if is_trained(path) else x.astype("bfloat16"), want)
    assert_same_params(on_host(state.params), want, 2**-8)  # the last bit of bfloat16
    kernel = state.params["blocks"]["Dense_0"]["kernel"]
    assert kernel.value.addressable_shards[0].data.shape == (3, 16, 8) and kernel.value.dtype == jnp.bfloat16
    abstract = abstract_train_state(Model(fsdp()), ADAM, MESH, KEY, X, batch_axes=AXES, **FROZEN)
    assert [jnp.shape(x) for x in jax.tree.leaves(abstract)] == [jnp.shape(x) for x in jax.tree.leaves(state)]
    assert frozen_paths(abstract) == frozen_paths(state)


def test_frozen_base_and_trainable_delta_merged_in_the_loss_match_a_single_device():
    base = init_sharded(Model(fsdp()), MESH, KEY, X, batch_axes=AXES)["params"]
    delta = {"Dense_1": jax.tree.map(jnp.zeros_like, unbox(base["Dense_1"]))}
    of_delta = lambda path: path.startswith("delta/")  # noqa: E731
    both = freeze_params({"base": base, "delta": delta}, of_delta)

    def loss_fn(params, apply_fn, batch, rng=None):
        base, delta = params["base"]["Dense_1"], params["delta"]["Dense_1"]
        head = {name: jnp.add(base[name], delta[name]) for name in delta}
        return mean_loss({**params["base"], "Dense_1": head}, apply_fn, batch)

    start = on_host(both)
    want_losses, want = trained_on_one_device(Model(), start, SGD, of_delta, loss_fn=loss_fn)
    state = TrainState.create(apply_fn=Model(fsdp()).apply, params=both, tx=SGD)
    losses, state = run(make_train_step(loss_fn, MESH, AXES), state)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert_same_params(on_host(state.params), want)
    assert np.abs(state.params["delta"]["Dense_1"]["kernel"]).max() > 0.01  # guard: the adapter trains


@pytest.mark.parametrize("check_vma", [True, False])
def test_loss_closing_over_frozen_parameters_raises_with_a_hint_at_freeze_params(check_vma):
    frozen = init_sharded(Model(fsdp()), MESH, KEY, X, batch_axes=AXES, trainable=is_trained)["params"]

    def closed_over_error(head, apply_fn, batch, rng):
        return mean_loss({**frozen, "Dense_1": head}, apply_fn, batch)

    state = TrainState.create(apply_fn=Model(fsdp()).apply, params=unbox(frozen["Dense_1"]), tx=SGD)
    with pytest.raises(ValueError, match=r"kernel' is split .* closes over it.* frozen.*trainable=.*freeze_params"):
        make_train_step(closed_over_error, MESH, AXES, check_vma=check_vma, allow_replicated=True).lower(
            state, BATCH, KEY
        )


def test_restore_returns_frozen_parameters_and_raises_for_a_different_trainable_or_dtype(tmp_path):
    create = partial(create_train_state, fsdp(nn.Dense)(16), ADAM, MESH, KEY, X, batch_axes=AXES)
    target = partial(abstract_train_state, fsdp(nn.Dense)(16), ADAM, MESH, KEY, X, batch_axes=AXES)
    freezing = {"trainable": lambda path: path == "bias", "frozen_dtype": "bfloat16"}
    state = create(**freezing)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        restored = checkpointer.restore(target(**freezing))
        assert_same_bits(restored, state)
        assert frozen_paths(restored.params) == ["kernel"]
        with pytest.raises(ValueError, match=r"opt_state.*mu/kernel.*same model, optimizer and frozen parameters"):
            checkpointer.restore(target())
        with pytest.raises(ValueError, match=r"'params/kernel' was saved as bfloat16.* has float32.*frozen_dtype"):
            checkpointer.restore(target(trainable=freezing["trainable"]))


def test_plan_marks_frozen_leaves_and_counts_no_gradient_or_optimizer_bytes():
    tx = optax.chain(optax.adam(1e-3))
    plans = [plan_sharding(Model(fsdp()), dict(MESH.shape), X, tx=tx, **freezing) for freezing in ({}, FROZEN)]
    everything, plan = plans
    state = abstract_train_state(Model(fsdp()), tx, MESH, KEY, X, batch_axes=AXES, **FROZEN)
    for path, leaf in trees.leaves_with_path(state.params):
        row, before = plan.row(path), everything.row(path)
        nbytes = before.parameters.per_device
        kept = (nbytes, nbytes, 2 * nbytes) if is_trained(path) else (nbytes // 2, 0, 0)
        assert (row.parameters.per_device, row.gradients.per_device, row.optimizer.per_device) == kept
        assert (row.trainable, row.names, row.uses) == (is_trained(path), before.names, before.uses)
        assert row.dtype == leaf_of(leaf).value.dtype.name
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert {change.path for change in everything.diff(plan)} == set(frozen_paths(state.params))
    assert "it is frozen, without gradient" in plan.explain("Dense_0/kernel")
    console = Console(width=140, file=io.StringIO())
    console.print(plan.table())
    frozen_rows = [line for line in console.file.getvalue().splitlines() if "frozen" in line]
    assert len(frozen_rows) == len(frozen_paths(state.params))
    # A model without wrappers is planned like a wrapped model.
    assumed = plan_sharding(nn.Dense(16), {"fsdp": 8}, X, min_weight_size=8, trainable=lambda path: path == "bias")
    assert not assumed.row("kernel").trainable and assumed.row("kernel").parts == 8 and assumed.row("bias").trainable


def test_workload_forecast_has_no_argument_bytes_for_moments_of_frozen_leaves():
    loss_fn = lambda params, apply_fn, batch, rng: jnp.mean(apply_fn({"params": params}, batch) ** 2)  # noqa: E731
    training = Workload(
        fsdp(nn.Dense)(16), optax.adam(1e-3), X, loss_fn, **FROZEN | {"trainable": lambda p: p == "bias"}
    )
    step, args = training.build_step(MESH)
    found = forecast(step, *args)
    kernel = 8 * 16 * 2 // 4  # frozen: bfloat16, split over 4 devices, without moments
    bias_and_moments = 3 * 16 * 4  # trained by Adam in float32, and too small to be split
    inputs = 2 * 8 * 4  # 2 of the 16 examples on each of 8 devices
    counts = 2 * 4  # of the state's steps, and of Adam's
    assert found.memory.argument_bytes == kernel + bias_and_moments + inputs + counts


def test_muon_check_step_and_skip_nonfinite_use_trainable_leaves_only():
    """Muon, ``check_step`` and ``skip_nonfinite`` use trained parameters only."""
    # Muon plans matrices of trained leaves, and its step keeps the dtype of frozen leaves.
    muon_plan = plan_sharding(Model(fsdp()), dict(MESH.shape), X, tx=muon(1e-3), **FROZEN)
    of_muon = [path for matrix in muon_plan.matrices for path in matrix.leaves]
    assert of_muon and not [path for path in of_muon if not is_trained(path)]
    step, abstract = abstract_step(Model(fsdp()), tx=muon(1e-3), **FROZEN)
    assert jax.eval_shape(step, abstract, BATCH, KEY)[0].params["Dense_0"]["kernel"].value.dtype == "bfloat16"

    # check_step compares trained leaves.
    state = create_train_state(Model(fsdp()), skip_nonfinite(ADAM), MESH, KEY, X, batch_axes=AXES, **FROZEN)
    step = make_train_step(mean_loss, MESH, AXES)
    found = check_step(step, state, BATCH, KEY)
    assert found.ok, str(found)
    assert found.leaves and not [leaf.path for leaf in found.leaves if not is_trained(leaf.path)]

    # skip_nonfinite skips a step with NaN, which changes no leaf.
    before = on_host(state.params)
    state, metrics = step(
        state, BATCH | {"y": np.where(np.arange(len(BATCH["y"]))[:, None] == 0, np.nan, BATCH["y"])}, KEY
    )
    assert metrics["skipped_in_a_row"] == 1
    assert_same_bits(on_host(state.params), before)


def test_frozen_nnx_model_trains_as_on_a_single_device_and_bind_raises():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.Dense_0, self.Dense_1 = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            return self.Dense_1(nnx.gelu(self.Dense_0(x)))

    plain_model = nnx_model(lambda rngs: Net(rngs))
    by_wrapper = shard_modules(plain_model, lambda path, _: path == "Dense_0", "fsdp", 32, trainable=False)
    by_wrapper = shard_modules(by_wrapper, lambda path, _: path == "Dense_1", "fsdp", 32)
    by_predicate = shard_modules(plain_model, nnx.Linear, "fsdp", 32)
    for model, freezing in [(by_wrapper, {"frozen_dtype": "bfloat16"}), (by_predicate, FROZEN)]:
        state = create_train_state(model, ADAM, MESH, KEY, X, batch_axes=AXES, **freezing)
        start = on_host(state.params)
        assert frozen_paths(state.params) == ["Dense_0/bias", "Dense_0/kernel"]
        _, want = trained_on_one_device(plain_model, start, ADAM)
        step = make_train_step(mean_loss, MESH, AXES)
        assert collectives(step.lower(state, BATCH, KEY))["reduce_scatter"] == 1
        _, state = run(step, state)
        assert_same_params(on_host(state.params), want)
        with (
            in_case(model=model, freezing=freezing),
            pytest.raises(
                ValueError, match=r"bind: 'params/Dense_0/bias' is frozen, which nnx.Optimizer does not support"
            ),
        ):
            model.bind({"params": state.params})


def test_train_step_raises_for_all_leaves_frozen_and_wrapper_for_a_trainable_predicate():
    step, state = abstract_step(fsdp(nn.Dense)(4), trainable=lambda path: path.startswith("params/"))
    with pytest.raises(ValueError, match=r"all 2 parameters are frozen, 'bias' among them.*such a path"):
        step.lower(state, BATCH, KEY)
    with pytest.raises(TypeError, match=r"trainable=<function.*not True or False.*create_train_state"):
        shard_module_params(nn.Dense, "fsdp", trainable=is_trained)
    assert freeze_params({"ids": jnp.arange(3)}, is_trained)["ids"].shape == (3,)  # integers stay unchanged
