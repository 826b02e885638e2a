"""Tests of Muon on shards: equal to ``optax.contrib.muon`` on one device, for every mesh and in every context."""

import math
import re
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from tests.support import (
    AXES,
    Model,
    assert_each_leaf,
    assert_same_params,
    data,
    equations,
    fsdp,
    mean_loss,
    mesh_of,
    on_mesh,
    plain,
)
from xlstm_jax.distributed import (
    Checkpointer,
    DeviceMeshManager,
    Replicas,
    abstract_train_state,
    create_train_state,
    elementwise_only,
    make_train_step,
    muon,
    partition_specs,
    shard_module_params,
    skip_nonfinite,
    unbox,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded, true_value
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves
from xlstm_jax.distributed.optimizers import matrix_dimensions
from xlstm_jax.distributed.optimizers.matrices.dimensions import MatrixChoice
from xlstm_jax.distributed.optimizers.matrices.groups import MatrixForm, MatrixLeaf, grouped, in_rounds
from xlstm_jax.distributed.optimizers.matrices.muon import _scale_by_muon, _stepped, newton_schulz_flops
from xlstm_jax.distributed.optimizers.matrices.owners import by_owners
from xlstm_jax.forecast import forecast
from xlstm_jax.forecast.training import Workload

STEPS = 10
RATE = 0.02
TOLERANCE = 1e-5  # of float32: some 80 roundings of a leaf's largest entry


class Odd(nn.Module):
    """Kernels of 8 x 9 and 9 x 7 (devices divide only dim 0 of the first), and a kernel of three dims."""

    wrap: object = plain

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(self.wrap(nn.Dense)(9, name="first")(x))
        x = self.wrap(nn.DenseGeneral)((7, 2), name="heads", bias_init=nn.initializers.normal(0.1))(x)
        return self.wrap(nn.DenseGeneral)(4, axis=(-2, -1), name="out")(nn.tanh(x))


def started(model):
    return jax.jit(model.init)(jax.random.key(0), data()["x"])["params"]


def optax_muon(params, **options):
    return optax.contrib.muon(RATE, muon_weight_dimension_numbers=matrix_dimensions()(params), **options)


def step_on_one_device(model, tx):
    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(mean_loss)(params, model.apply, data()), state, params)
        return optax.apply_updates(params, updates), state

    return step


@cache
def reference(model, **options):
    """Returns parameters and state after ten steps of optax's Muon on one device, with the same choice of matrices."""
    params = started(model)
    tx = optax_muon(params, **options)
    state, step = tx.init(params), step_on_one_device(model, tx)
    for _ in range(STEPS):
        params, state = step(params, state)
    return params, state


def first_state(model, mesh, tx):
    return create_train_state(model, tx, mesh, jax.random.key(0), data()["x"], batch_axes=AXES, allow_replicated=True)


def trained(model, mesh, tx, steps=STEPS, **options):
    state = first_state(model, mesh, tx)
    step = make_train_step(mean_loss, mesh, AXES, allow_replicated=True, **options)
    for _ in range(steps):
        state, _ = step(state, data(), jax.random.key(1))
    return state


ZERO_1 = Replicas("dp", shard_optimizer_state=True)
CASES = {
    "fsdp-8": (Model(wrap=fsdp), (1, 8), {}, {}),
    "accumulation-no-vma": (Model(wrap=fsdp), (4, 2), {}, {"num_minibatches": 2, "check_vma": False}),
    "zero-1": (Model(wrap=lambda cls: fsdp(cls, replicas=ZERO_1)), (2, 4), {}, {}),
    "copies": (Model(wrap=lambda cls: fsdp(cls, replicas=Replicas("dp"))), (4, 2), {}, {}),
    "padded-heads": (Odd(wrap=lambda cls: fsdp(cls, uneven="pad")), (2, 4), {}, {}),
    "one-device-options": (
        Model(wrap=fsdp),
        (1, 1),
        {"ns_coeffs": "dion", "nesterov": False, "adaptive": True, "consistent_rms": 0.2, "weight_decay": 0.1},
        {},
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", CASES)
def test_muon_on_shards_matches_a_single_device_for_ten_steps(name):
    model, mesh, of_muon, of_step = CASES[name]
    got = trained(model, mesh_of(*mesh), muon(RATE, **of_muon), **of_step)
    want, _ = reference(model.clone(wrap=plain), **of_muon)
    assert_same_params(map_leaves(true_value, got.params), want, TOLERANCE)


def test_muon_and_optax_choose_different_leaves_as_matrices_by_default():
    """Guard: optax by default treats stacked biases as a matrix, and stacked kernels as none."""
    params = started(Model())
    theirs, ours = (
        tx.init(params).inner_states["muon"].inner_state[0].mu["blocks"]["Dense_0"]
        for tx in (optax.contrib.muon(RATE), muon(RATE))
    )
    assert theirs["kernel"] == ours["bias"] == optax.MaskedNode()
    assert theirs["bias"].shape == (3, 32) and ours["kernel"].shape == (3, 16, 32)


# ----------------------------------------------------------------------------------------- updates of given gradients

SHAPES = {
    "up": ((3, 16, 32), (None, None, "fsdp")),
    "down": ((3, 32, 16), (None, "fsdp", None)),
    "layers": ((8, 6, 4), ("fsdp", None, None)),  # split along the layers themselves
    "both": ((16, 32), ("dp", "fsdp")),
    "pair": ((16, 32), (None, ("fsdp", "dp"))),
    "whole": ((4, 4), (None, None)),
}
DIMS = {name: MuonDimensionNumbers(len(shape) - 2, len(shape) - 1) for name, (shape, _) in SHAPES.items()}


def random_tree(seed, shapes=SHAPES):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {name: jax.random.normal(key, shape) for (name, (shape, _)), key in zip(shapes.items(), keys, strict=True)}


def boxed(tree, shapes=SHAPES):
    return {name: Sharded(value, shapes[name][1]) if any(shapes[name][1]) else value for name, value in tree.items()}


def two_updates(tx, params, grads):
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p + u, params, updates)
        grads = jax.tree.map(jnp.sin, grads)  # other gradients, to separate the weights of old and new gradients
    return params


def inside(tx, check_vma, shapes=SHAPES, dp=2, fsdp_size=4):
    params, grads = boxed(random_tree(0, shapes), shapes), boxed(random_tree(1, shapes), shapes)
    mesh = mesh_of(dp, fsdp_size)
    specs = partition_specs(params, mesh)
    run = on_mesh(lambda p, g: two_updates(tx, p, g), mesh, check_vma, (specs, specs), specs)
    return unbox(run(params, grads)), run.lower(params, grads)


def on_one_device(shapes=SHAPES, **options):
    dims = {name: DIMS[name] for name in shapes}
    tx = optax.contrib.muon(RATE, muon_weight_dimension_numbers=dims, **options)
    return jax.jit(lambda p, g: two_updates(tx, p, g))(random_tree(0, shapes), random_tree(1, shapes))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
def test_muon_inside_shard_map_matches_a_single_device_for_each_leaf_sharding(check_vma):
    tx = muon(RATE, muon_weight_dimension_numbers=DIMS)
    got, _ = inside(elementwise_only(tx) if check_vma else tx, check_vma)
    assert_same_params(got, on_one_device(), TOLERANCE)


LARGE = {"kernel": ((4, 256, 256), (None, None, "fsdp"))}  # as many values as are split by default


def test_muon_splits_newton_schulz_between_replicas_to_reduce_work():
    tx = muon(RATE, muon_weight_dimension_numbers={"kernel": DIMS["up"]})
    dims = {"kernel": DIMS["up"]}
    one = optax.contrib.muon(RATE, muon_weight_dimension_numbers=dims)
    want = jax.jit(lambda p, g: two_updates(one, p, g))(random_tree(0, LARGE), random_tree(1, LARGE))
    got, lowered = inside(tx, True, LARGE, dp=4, fsdp_size=2)
    assert_same_params(got, want, TOLERANCE)
    of_each = re.findall(r"dot_general.*-> tensor<((?:\d+x)?)256x256xf32>", lowered.as_text())
    assert set(of_each) == {""}  # a device has one of four; along fsdp alone: "2x"


def test_by_owners_returns_the_result_of_each_matrix_in_a_round():
    """``by_owners`` gives each of three devices the unsharded matrix of one form, and returns the results."""
    shapes = {"a": (3, 6), "b": (4, 9), "c": (2, 12)}
    matrices = {name: np.random.default_rng(i).normal(size=shape) for i, (name, shape) in enumerate(shapes.items())}
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 3}, devices=jax.devices()[:3])
    leaves = [
        (
            MatrixForm(shape[:1], shape[1:], shape, ((1, ("fsdp",)),), (), "float32"),
            MatrixLeaf(name, (0, 1), ()),
        )
        for name, shape in shapes.items()
    ]
    rounds = in_rounds(grouped(leaves, dict(mesh.shape)))
    assert [len(together) for together in rounds] == [3]  # guard

    def run(shards):
        return by_owners(lambda x: jnp.cumsum(x, axis=-1) * jnp.linalg.norm(x), rounds[0], shards, None)

    got = on_mesh(run, mesh, True, P(None, "fsdp"), P(None, "fsdp"))(matrices)
    for name, matrix in matrices.items():
        np.testing.assert_allclose(got[name], np.cumsum(matrix, axis=-1) * np.linalg.norm(matrix), rtol=1e-4, atol=1e-4)


def test_elementwise_only_raises_for_optax_contrib_muon():
    with pytest.raises(ValueError, match=r"'partition.*scale_by_muon.*' is wrong on shards"):
        inside(elementwise_only(optax.contrib.muon(RATE)), False, {"both": SHAPES["both"]})


@pytest.mark.parametrize("exchange_dtype, differ", [("bfloat16", True), ("float32", False)])
def test_exchange_dtype_rounds_once_in_each_direction(exchange_dtype, differ):
    """A narrow ``exchange_dtype`` rounds once each way, to 2**-8; Newton-Schulz amplifies the first rounding."""
    shapes = {name: SHAPES[name] for name in ("up", "down")}
    dims = {name: DIMS[name] for name in shapes}
    tx = muon(RATE, muon_weight_dimension_numbers=dims, exchange_dtype=exchange_dtype)
    got, lowered = inside(tx, True, shapes)
    want, start = on_one_device(shapes), random_tree(0, shapes)
    for name in shapes:
        moved = np.linalg.norm(want[name] - start[name])
        off = np.linalg.norm(got[name] - want[name]) / moved
        assert off < 1e-2
        assert (off > 1e-4) == differ
    assert ("all_to_all" in lowered.as_text()) and ("xbf16" in lowered.as_text()) == differ


# --------------------------------------------------------------------------------------------------- in the ready step


def abstract_state(mesh, tx):
    x = data()["x"]
    return abstract_train_state(Model(fsdp), tx, mesh, jax.random.key(0), x, batch_axes=AXES, allow_replicated=True)


def primitives_of_a_step(tx):
    mesh = mesh_of(2, 4)
    step = make_train_step(mean_loss, mesh, AXES, allow_replicated=True)
    jaxpr = step.trace(abstract_state(mesh, tx), data(), jax.random.key(1)).jaxpr
    return [eqn.primitive.name for _, eqn in equations(jaxpr)]


def test_muon_step_has_two_all_to_alls_per_round_of_forms():
    """Muon has two all-to-alls per round: 16 x 32 and 32 x 16 share a form, 8 x 16 and 16 x 4 share a round."""
    assert primitives_of_a_step(muon(RATE)).count("all_to_all") == 2 * 2
    assert "all_to_all" not in primitives_of_a_step(optax.adamw(RATE))  # guard


def test_muon_state_has_the_structure_of_optax_and_the_sharding_of_parameters():
    theirs, state = optax_muon(started(Model())), abstract_state(mesh_of(2, 4), muon(RATE))
    moments = state.opt_state.inner_states["muon"].inner_state[0].mu
    assert moments["blocks"]["Dense_0"]["kernel"].sharding.spec == P(None, None, "fsdp")
    assert jax.tree.structure(unbox(state.opt_state)) == jax.tree.structure(theirs.init(started(Model())))


@pytest.mark.slow
def test_checkpoint_moves_between_muon_and_optax_on_another_mesh(tmp_path):
    """Five steps with one optimizer and five with the other, through a checkpoint, equal ten steps on one device."""
    model, x = Model(wrap=fsdp), data()["x"]
    runs = {"ours": (mesh_of(2, 4), muon(RATE)), "theirs": (mesh_of(1, 1), optax_muon(started(Model())))}
    steps = {name: make_train_step(mean_loss, mesh, AXES, allow_replicated=True) for name, (mesh, _) in runs.items()}

    def five_steps(name, state):
        for _ in range(STEPS // 2):
            state, _ = steps[name](state, data(), jax.random.key(1))
        return state

    for first, second in (("ours", "theirs"), ("theirs", "ours")):
        before = five_steps(first, first_state(model, *runs[first]))
        mesh, tx = runs[second]
        with Checkpointer(tmp_path / first) as checkpointer:
            checkpointer.save(STEPS // 2, before)
            target = abstract_train_state(model, tx, mesh, jax.random.key(0), x, batch_axes=AXES)
            state = checkpointer.restore(target)
        assert_each_leaf(np.testing.assert_array_equal, unbox(state.opt_state), unbox(before.opt_state))
        assert_same_params(five_steps(second, state).params, reference(Model())[0], TOLERANCE)


def test_skip_nonfinite_around_muon_skips_a_nonfinite_step():
    mesh = mesh_of(2, 4)
    tx = skip_nonfinite(optax.chain(optax.clip_by_global_norm(1.0), muon(RATE)))
    state = first_state(Model(wrap=fsdp), mesh, tx)
    before = jax.tree.map(np.asarray, unbox(state.params))
    bad = {**data(), "x": jnp.asarray(data()["x"]).at[0, 0].set(jnp.nan)}
    state, metrics = make_train_step(mean_loss, mesh, AXES, allow_replicated=True)(state, bad, jax.random.key(1))
    assert metrics["skipped_steps"] == 1
    assert_each_leaf(np.testing.assert_array_equal, unbox(state.params), before)


# ----------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{"preconditioning": p} for p in ("spectral", "aol", "schatten")], ids=str)
def test_muon_options_match_optax_on_a_single_device(options):
    shapes = {name: SHAPES[name] for name in ("up", "down")}
    tx = muon(RATE, muon_weight_dimension_numbers={name: DIMS[name] for name in shapes}, **options)
    got = jax.jit(lambda p, g: two_updates(tx, p, g))(random_tree(0, shapes), random_tree(1, shapes))
    assert_same_params(got, on_one_device(shapes, **options), TOLERANCE)


def test_newton_schulz_step_is_the_polynomial_of_fifth_degree():
    """With X = diag(2, 3) the entries are a x + b x^3 + c x^5."""
    x = np.diag([2.0, 3.0])
    np.testing.assert_allclose(_stepped(x, x @ x.T, (2.0, 0.5, 0.25)), np.diag([4 + 4 + 8, 6 + 13.5 + 60.75]))


def test_momentum_of_muon_has_the_dtype_that_is_asked_for():
    params = {"w": np.ones((8, 4), np.float32)}
    for given, want in ((None, "float32"), ("bfloat16", "bfloat16"), (jnp.float16, "float16")):
        state = jax.eval_shape(muon(0.1, mu_dtype=given).init, params)
        momenta = [leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim == 2]
        assert momenta == [jnp.dtype(want)], (given, momenta)


def test_nesterov_momentum_of_muon_is_a_step_ahead():
    """Matrices are not orthogonalised here; the second gradient differs from the first."""
    choices = {"w": MatrixChoice("w", (2, 3), MuonDimensionNumbers(), "")}
    options = {"ns_coeffs": (1.0, 0.0, 0.0), "orthogonal": lambda x, coeffs: x, "mu_dtype": None, "adaptive": False}
    tx = _scale_by_muon(choices, beta=0.5, nesterov=True, exchange_dtype=None, **options)

    @jax.jit
    def second(one, other):
        with jax.numpy_dtype_promotion("standard"):
            return tx.update({"w": other}, tx.update({"w": one}, tx.init({"w": one}))[1])[0]["w"]

    one, other = np.ones((2, 3), np.float32), np.full((2, 3), 5, np.float32)
    mu = 0.5 * (0.5 * one) + 0.5 * other
    np.testing.assert_allclose(second(one, other), 0.5 * mu / (1 - 0.5**3) + 0.5 * other / (1 - 0.5**2), rtol=1e-6)


# ----------------------------------------------------------------------------------------- compiled for TPUs and GPUs


class Layers(nn.Module):
    """Eight layers, each with two matrices of the form 256 x 1024 and one of 256 x 256."""

    axis_name: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        block = shard_module_params(Layer, axis_name=self.axis_name, min_weight_size=2**15)
        return nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=8)(name="layers")(x)[0]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(256, use_bias=False, name="mix")(nn.RMSNorm(name="norm")(x))
        h = nn.gelu(nn.Dense(1024, use_bias=False, name="up")(x))
        return x + nn.Dense(256, use_bias=False, name="down")(h), None


def square(params, apply_fn, x, rng):
    del rng
    return jnp.mean(apply_fn({"params": params}, x) ** 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "topology, sizes",
    [
        pytest.param("v5e:2x4", {"fsdp_x": 2, "fsdp_y": 4}, marks=pytest.mark.libtpu),
        pytest.param("h100:4x8", {"fsdp_host": 4, "fsdp_device": 8}, marks=pytest.mark.cuda_plugin),
    ],
)
def test_compiled_muon_has_two_all_to_alls_per_round_and_a_share_of_the_flops(topology, sizes):
    """Compiled Muon has two all-to-alls per round and a device's share of the flops.

    On 8 devices a device owns 2 of 16 large and 1 of 8 small matrices, form by form; on 32 devices 1 of 24, or zeros.
    """
    x, devices = jax.ShapeDtypeStruct((64, 256), jnp.float32), math.prod(sizes.values())
    workload = Workload(Layers(tuple(sizes)), muon(RATE, exchange_dtype="bfloat16"), x, square)
    step, args = workload.build_step(sizes)
    found = forecast(step, *args, topology=topology, compiler_options="auto")
    exchanges = [c for c in found.collectives if c.kind == "all-to-all"]
    ours = [c for c in found.collectives if "muon" in c.op_name]
    forms, largest = {"256x1024": 16, "256x256": 8}, 256 * 1024
    together = devices >= 24
    assert [c.count for c in exchanges] == [1] * (2 if together else 4) and ours == exchanges  # none in Newton-Schulz
    values = devices * largest if together else 16 * largest + 8 * 256 * 256  # includes zeros for idle devices
    assert sum(c.wire_bytes for c in exchanges) <= 1.05 * 2 * values * 2 / devices  # both ways, in bfloat16
    work = {name: flops for name, flops in found.flops.by_module().items() if "muon" in name}
    one, other = (newton_schulz_flops(256, columns, steps=5) for columns in (1024, 256))
    names = ["muon_256x1024_256x256"] if together else [f"muon_{form}" for form in forms]
    assert work == dict(zip(names, [one] if together else [2 * one, other], strict=True))
    if not together:  # orthogonalising one form overlaps the exchange of the other
        assert not [c for c in exchanges if not c.asynchronous]
        assert any(set(c.overlapped.modules) - set(c.modules) for c in exchanges)


def test_muon_forms_with_fewer_matrices_than_devices_run_in_parallel():
    """Forms with fewer matrices than devices run in parallel: a step costs the largest matrix only.

    On 8 devices six devices own a 16 x 32 matrix each, and two devices own a smaller matrix each. Counted are the FLOP
    of one device.
    """
    mesh, tx = mesh_of(1, 8), muon(RATE)
    state = abstract_state(mesh, tx)
    kernels = [leaf for path, leaf in leaves_with_path(unbox(state.params)) if path.endswith("kernel")]
    matrices = Counter()
    for kernel in kernels:
        matrices[tuple(sorted(kernel.shape[-2:]))] += math.prod(kernel.shape[:-2])
    assert matrices == {(16, 32): 6, (8, 16): 1, (4, 16): 1}, "guard: 8 matrices, one for each device"
    step = make_train_step(mean_loss, mesh, AXES, allow_replicated=True)
    work = forecast(step, state, data(), jax.random.key(1)).flops.by_module()
    of_muon = {name: flops for name, flops in work.items() if "muon" in name}
    # Each of five steps multiplies [16, 32] by [32, 16], two [16, 16], and [16, 16] by [16, 32].
    assert of_muon == {"muon_16x32_8x16_4x16": 5 * (2 * 2 * 16 * 16 * 32 + 2 * 16**3)}


def test_state_of_muon_has_the_dtypes_of_optax():
    """A narrower count of steps would overflow in a long run."""
    params = {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}

    def dtypes(tx):
        return [leaf.dtype for leaf in jax.tree.leaves(tx.init(params))]

    assert sorted(map(str, dtypes(muon(RATE)))) == sorted(map(str, dtypes(optax.contrib.muon(RATE))))
    assert jnp.int32 in dtypes(muon(RATE))  # guard
