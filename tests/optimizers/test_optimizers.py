"""Tests of optimizers on sharded parameters: exact outside ``shard_map``; inside exact, or an error."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.optimizer_cases import CASES, RIGHT
from tests.support import AXES, assert_each_leaf, assert_same_params, data, fsdp, mean_loss, mesh_of, on_mesh, plain
from xlstm_jax.distributed import (
    clip_by_global_norm,
    create_train_state,
    elementwise_only,
    global_norm,
    make_train_step,
    partition_specs,
    shardings,
    skip_nonfinite,
    unbox,
    with_ema,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded, rebox
from xlstm_jax.distributed.data_parallel.trees import map_leaves
from xlstm_jax.distributed.optimizers import elementwise
from xlstm_jax.distributed.optimizers.transforms import name_of
from xlstm_jax.distributed.training.state import sharded_opt_state

STEPS = 4
MESHES = [(2, 4), (4, 2), (8, 1), (1, 8)]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_mesh = pytest.mark.parametrize("dp, fsdp", MESHES, ids=lambda size: str(size))
each_mode = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])


def test_optimizer_cases_have_unique_names_and_both_verdicts():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 54
    assert sum(case.on_shards == RIGHT for case in CASES) >= 20 <= sum(case.on_shards != RIGHT for case in CASES)


# ----------------------------------------------------------------------------------------- outside of shard_map: exact


class TwoLayers(nn.Module):
    """A kernel split by columns, a kernel split by rows, a split vector, and a replicated vector of 4 values."""

    wrap: object = plain

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(self.wrap(nn.Dense)(16, name="up", bias_init=nn.initializers.normal(0.1))(x))
        return self.wrap(nn.Dense)(4, name="down", bias_init=nn.initializers.normal(0.1))(x)


NAMES = {"up": {"kernel": (None, "fsdp"), "bias": ("fsdp",)}, "down": {"kernel": ("fsdp", None), "bias": (None,)}}


def wrapped(cls):
    return fsdp(cls, min_weight_size=16)


@cache
def plain_start():
    return jax.jit(TwoLayers().init)(jax.random.key(0), whole_batch()["x"])["params"]


@cache
def whole_batch():
    return data()


def loss_on_one_device(params):
    return mean_loss(params, TwoLayers().apply, whole_batch())


@cache
def gradient_on_one_device():
    """Returns the loss and gradient function, compiled once for all optimizers."""
    return jax.jit(jax.value_and_grad(loss_on_one_device))


def on_one_device(tx):
    """Returns the parameters after four ordinary optax steps without a mesh."""
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def update(params, state, value, grad):
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss_on_one_device)
        return optax.apply_updates(params, updates), state

    params = plain_start()
    # Not weakly typed, as after a step: else the reference would be compiled twice.
    state = strong(tx.init(params))
    for _ in range(STEPS):
        params, state = update(params, state, *gradient_on_one_device()(params))
    return params


def strong(tree):
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), jax.tree.map(jnp.asarray, tree))


def places(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def furthest(got, want):
    """Returns the largest difference of any leaf, relative to the leaf's largest entry."""
    got, want = jax.tree.leaves(unbox(got)), jax.tree.leaves(unbox(want))
    return max(np.abs(np.asarray(g) - np.asarray(w)).max() / np.abs(w).max() for g, w in zip(got, want, strict=True))


@cache
def first_state():
    """Returns a state without optimizer: the initial parameters of all cases, compiled once."""
    x = whole_batch()["x"]
    return create_train_state(
        TwoLayers(wrapped), optax.identity(), mesh_of(2, 4), jax.random.key(0), x, batch_axes=AXES
    )


def started(tx):
    """Returns the state of ``create_train_state`` for this optimizer."""
    state = jax.tree.map(jnp.copy, first_state())  # the step donates its state
    return state.replace(tx=tx, opt_state=sharded_opt_state(tx, state.params, mesh_of(2, 4)))


@pytest.mark.one_in(6)
@each_case
def test_train_step_matches_a_single_device_for_each_optimizer(case):
    mesh, traces = mesh_of(2, 4), []

    def loss_fn(*args):
        traces.append(args)
        return mean_loss(*args)

    state = started(case.build())
    step = make_train_step(loss_fn, mesh, AXES)
    before = places((state.params, state.opt_state))
    for index in range(STEPS):
        state, _ = step(state, whole_batch(), jax.random.key(1))
        if index == 0:
            traced = len(traces)
    want = on_one_device(case.build())
    assert_same_params(state.params, want, case.tolerance)
    assert places((state.params, state.opt_state)) == before
    assert len(traces) == traced, "a later step was compiled again"
    assert step._cache_size() <= case.cache_entries
    assert furthest(want, plain_start()) > 20 * case.tolerance  # guard: the optimizer did something


def test_model_of_optimizer_cases_has_row_column_vector_and_replicated_leaves():
    tx, x = optax.adam(0.01), whole_batch()["x"]
    state = create_train_state(TwoLayers(wrapped), tx, mesh_of(2, 4), jax.random.key(0), x, batch_axes=AXES)
    assert places(state) == places(started(tx).replace(apply_fn=state.apply_fn))  # as the cases begin
    assert map_leaves(lambda box: getattr(box, "names", (None,)), state.params) == NAMES
    assert state.opt_state[0].mu["up"]["kernel"].sharding.spec == P(None, "fsdp")
    assert state.opt_state[0].nu["down"]["kernel"].sharding.spec == P("fsdp")
    assert_same_params(state.params, plain_start())


# -------------------------------------------------------------------------------- inside shard_map: exact, or an error


def boxed(params):
    """Returns the parameters of ``TwoLayers`` in the boxes of the wrapped model."""

    def box(value, names):
        return Sharded(value, names) if any(names) else value

    return jax.tree.map(box, params, NAMES)


@cache
def four_gradients():
    """Returns stacked gradients of four steps, with scales that differ between steps and between shards."""
    rng = np.random.default_rng(2)

    def gradients(leaf):
        grads = rng.normal(size=(STEPS, *leaf.shape)) * np.array([1, 1e-2, 10, 0.1]).reshape(-1, *[1] * leaf.ndim)
        for dim, size in enumerate(leaf.shape):
            grads *= np.logspace(-1, 0.5, size).reshape(-1, *[1] * (leaf.ndim - 1 - dim))
        return jnp.asarray(grads, jnp.float32)

    return jax.tree.map(gradients, plain_start())


def one_update(tx, params, state, grads, value):
    """Returns parameters and state after an update, with 0.1 times the parameters added as a quadratic loss does."""
    grads = jax.tree.map(lambda g, p: g + 0.1 * p, grads, params)
    updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=lambda params: value)
    return optax.apply_updates(params, updates), state


def four_updates(tx, params, grads):
    """Returns the parameters after four updates."""
    tx = optax.with_extra_args_support(tx)

    def step(carry, grads_and_value):
        return strong(one_update(tx, *carry, *grads_and_value)), None

    values = jnp.array([2.0, 1.0, 1.5, 1.5])  # losses, for transforms that need the value
    return jax.lax.scan(step, (params, strong(tx.init(params))), (grads, values))[0][0]


def on_shards(tx, updates=four_updates, check_vma=False):
    """Runs ``four_updates`` inside ``shard_map``, on the shards of each device."""
    mesh, params = mesh_of(2, 4), boxed(plain_start())
    specs = partition_specs(params, mesh)
    stacked = jax.tree.map(lambda spec: P(None, *spec), specs, is_leaf=lambda x: isinstance(x, P))

    def local(params, grads):
        return updates(tx, params, map_leaves(rebox, params, grads))

    return on_mesh(local, mesh, check_vma, (specs, stacked), specs)(params, four_gradients())


def off_shards(tx):
    """Runs ``four_updates`` on one device."""
    return jax.jit(lambda params, grads: four_updates(tx, params, grads))(plain_start(), four_gradients())


@pytest.mark.one_in(6)
@each_case
def test_elementwise_only_accepts_exact_optimizers_and_raises_for_all_others(case):
    tx = elementwise_only(case.build())
    if case.on_shards == RIGHT:
        assert_same_params(on_shards(tx), off_shards(case.build()), case.tolerance)
    else:
        rule = rf"elementwise_only: '.*({case.on_shards}).*' is wrong on shards: .*make_train_step"
        with pytest.raises(ValueError, match=rule):
            on_shards(tx)


WRONG_ON_SHARDS = {
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "lamb": lambda: optax.lamb(0.05),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=2),
}


@pytest.mark.parametrize("build", WRONG_ON_SHARDS.values(), ids=WRONG_ON_SHARDS)
def test_optimizers_refused_by_elementwise_only_are_wrong_on_shards(build):
    assert furthest(on_shards(build()), off_shards(build())) > 0.01


# ---------------------------------------------------------------------------------- norm and clipping over the shards

BOXES = {
    "one": ("fsdp", None),
    "other": (None, "dp"),
    "tuple": (("dp", "fsdp"), None),
    "two_dims": ("dp", "fsdp"),
    "whole": (None, None),
}


def tree_of(leaves, dtype=jnp.float32):
    """Returns a tree of 16 x 8 leaves in the boxes of ``BOXES``; entries grow, so that slices have different norms."""
    rng, growing = np.random.default_rng(3), 1 + np.arange(128).reshape(16, 8)
    values = {name: jnp.asarray(rng.normal(size=(16, 8)) * growing, dtype) for name in leaves}
    return {"layer": {n: Sharded(v, BOXES[n]) if any(BOXES[n]) else v for n, v in values.items()}}


def over_mesh(fn, tree, mesh, check_vma, out_specs=None):
    specs = partition_specs(tree, mesh)
    return on_mesh(fn, mesh, check_vma, (specs,), specs if out_specs is None else out_specs)


def clip(max_norm):
    tx = clip_by_global_norm(max_norm)
    return lambda tree: tx.update(tree, tx.init(tree))[0]


# All boxes together on each mesh in each mode; each box alone on one mesh, where both axes have size > 1.
NORMS = [(list(BOXES), *mesh, mode) for mesh in MESHES for mode in (True, False)]
NORMS += [([name], 2, 4, bool(i % 2)) for i, name in enumerate(BOXES)]


@pytest.mark.parametrize(
    "leaves, dp, fsdp, check_vma", NORMS, ids=lambda x: "-".join(x) if isinstance(x, list) else str(x)
)
def test_global_norm_over_shards_matches_the_unsharded_norm(leaves, dp, fsdp, check_vma):
    tree, mesh = tree_of(leaves), mesh_of(dp, fsdp)
    got = over_mesh(global_norm, tree, mesh, check_vma, P())(tree)
    np.testing.assert_allclose(got, optax.tree.norm(unbox(tree)), rtol=1e-6)
    assert got.dtype == jnp.float32


@each_mode
@each_mesh
def test_clip_by_global_norm_over_shards_matches_unsharded_clipping(dp, fsdp, check_vma):
    tree, mesh = tree_of(BOXES), mesh_of(dp, fsdp)
    norm = float(optax.tree.norm(unbox(tree)))
    got = over_mesh(clip(norm / 3), tree, mesh, check_vma)(tree)
    want = optax.clip_by_global_norm(norm / 3).update(unbox(tree), optax.EmptyState())[0]
    assert_same_params(got, want, 1e-6)
    assert optax.tree.norm(want) < 0.4 * norm  # guard: the limit was passed
    assert jax.tree.structure(got) == jax.tree.structure(tree)


@each_mode
def test_clip_by_global_norm_below_the_limit_changes_no_bit(check_vma):
    tree, mesh = tree_of(BOXES), mesh_of(2, 4)
    limit = 1.01 * float(optax.tree.norm(unbox(tree)))
    got = over_mesh(clip(limit), tree, mesh, check_vma)(tree)
    assert_each_leaf(np.testing.assert_array_equal, got, tree)


def test_norm_and_clipping_of_complex_and_narrow_arrays_are_those_by_hand():
    """On global arrays: absolute values of complex entries, squares of float16 in float32, no dtype changed."""
    tree = {"complex": jnp.array([3 + 4j]), "half": jnp.full(2, 300.0, jnp.float16), "count": jnp.array([7])}
    norm = float(global_norm(tree))
    assert norm == pytest.approx(np.sqrt(25 + 2 * 300**2))  # squares of 300 are infinite in float16
    below, _ = clip_by_global_norm(2 * norm).update(tree, ())
    above, _ = clip_by_global_norm(norm / 2).update(tree, ())
    for name, leaf in tree.items():
        half = leaf if name == "count" else leaf / 2
        assert above[name].dtype == below[name].dtype == leaf.dtype
        np.testing.assert_array_equal(below[name], leaf, f"{name} below the limit is scaled")
        np.testing.assert_allclose(above[name], half, 1e-3, err_msg=f"{name} above the limit has another factor")


@each_mode
@pytest.mark.parametrize(
    "leaves, count",
    [(["whole"], 0), (["one"], 1), (["tuple", "two_dims"], 1), (["one", "other", "whole"], 2), (list(BOXES), 3)],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_global_norm_takes_a_single_all_reduce_per_set_of_axes(leaves, count, check_vma):
    tree = tree_of(leaves)
    text = over_mesh(global_norm, tree, mesh_of(2, 4), check_vma, P()).lower(tree).as_text()
    assert text.count("all_reduce") == count


def test_global_norm_raises_for_a_gradient_without_sync_gradients():
    tree, mesh = tree_of(["one", "whole"]), mesh_of(2, 4)
    specs = {"layer": {"one": P("fsdp"), "whole": P("dp")}}
    rule = r"'layer/whole' of shape \(8, 8\) differs between devices along 'dp'.*sync_gradients.*in its box"
    with pytest.raises(ValueError, match=rule):
        on_mesh(global_norm, mesh, True, (specs,), P())(tree)


@pytest.mark.parametrize("placed", [True, False], ids=["on-the-mesh", "on-one-device"])
def test_global_norm_and_clipping_outside_shard_map_see_global_values(placed):
    tree = tree_of(BOXES)
    norm = float(optax.tree.norm(unbox(tree)))
    if placed:
        tree = jax.device_put(tree, map_leaves(rebox, tree, shardings(tree, mesh_of(2, 4))))
    np.testing.assert_allclose(jax.jit(global_norm)(tree), norm, rtol=1e-6)
    np.testing.assert_allclose(optax.tree.norm(unbox(jax.jit(clip(norm / 3))(tree))), norm / 3, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_clipping_keeps_narrow_dtypes_and_sums_squares_in_float32(dtype):
    tree = tree_of(["one", "whole"], dtype)
    tree["layer"]["wide"] = tree_of(["two_dims"])["layer"]["two_dims"]
    norm = float(optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), unbox(tree))))
    got = over_mesh(clip(norm / 4), tree, mesh_of(2, 4), True)(tree)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, tree)
    # Two roundings, of the norm and of the quotient, to the mantissa of the narrow dtype.
    assert furthest(got, jax.tree.map(lambda x: x.astype(jnp.float32) / 4, tree)) < 2 * float(jnp.finfo(dtype).eps)


def test_clipping_passes_float0_leaves_unchanged():
    count = np.zeros((3,), jax.dtypes.float0)

    def local(tree):
        clipped = clip(1.0)({**tree, "count": count})
        assert clipped.pop("count") is count
        return clipped

    tree = tree_of(["one", "whole"])
    got = over_mesh(local, tree, mesh_of(2, 4), True)(tree)
    np.testing.assert_allclose(optax.tree.norm(unbox(got)), 1, rtol=1e-6)


@each_mode
def test_clipping_before_adamw_passes_elementwise_only_and_matches_unsharded_updates(check_vma):
    def loop(tx, params, grads):
        state = tx.init(params)
        for step in range(STEPS):
            params, state = one_update(tx, params, state, jax.tree.map(lambda g, step=step: g[step], grads), 1.0)
        return params

    def after(clipping):
        return optax.chain(clipping, optax.adamw(0.1, eps=0.1))  # a large eps: Adam alone would undo the scaling

    got = on_shards(elementwise_only(after(clip_by_global_norm(0.5))), loop, check_vma)
    want = off_shards(after(optax.clip_by_global_norm(0.5)))
    assert_same_params(got, want)
    assert furthest(off_shards(after(optax.identity())), want) > 0.01  # guard: clipping matters


# --------------------------------------------------------------------------------------------------- more of the guard


def whole_and_split():
    """Returns a boxed tree outside of ``shard_map``, with global shapes."""
    return boxed(plain_start())


def only_the_first_kernel(params):
    first, rest = params["up"], params["down"]
    return {"up": jax.tree.map(lambda p: p.ndim > 1, first), "down": jax.tree.map(lambda p: False, rest)}


def test_elementwise_only_raises_for_a_norm_masked_to_a_single_leaf():
    tx = elementwise_only(optax.masked(optax.clip_by_global_norm(0.1), only_the_first_kernel))
    with pytest.raises(ValueError, match=r"'masked\(clip_by_global_norm\)'.*'up/kernel'"):
        tx.init(whole_and_split())


def test_elementwise_only_raises_for_a_norm_of_a_split_leaf():
    params = {"w": Sharded(jax.ShapeDtypeStruct((4,), jnp.float32), ("fsdp",))}
    with pytest.raises(ValueError, match="'clip_by_global_norm' is wrong on shards"):
        jax.eval_shape(elementwise_only(optax.clip_by_global_norm(0.1)).init, params)


def test_elementwise_only_raises_for_moments_factored_only_in_large_matrices():
    # Matrices of the small tree have dims 3 and 4, below 8; the larger tree has 8 x 16 and 16 x 4.
    tx = optax.adafactor(0.01, min_dim_size_to_factor=8, clipping_threshold=None, multiply_by_parameter_scale=False)
    with pytest.raises(ValueError, match=r"'scale_by_factored_rms'.*has the shape \(8,\), and not that of"):
        elementwise_only(tx).init(whole_and_split())


def test_elementwise_only_raises_for_a_factored_moment_with_the_shape_of_a_bias():
    tx = optax.adafactor(0.01, clipping_threshold=None, multiply_by_parameter_scale=False)
    params = {"kernel": Sharded(jnp.ones((256, 256)), (None, "fsdp")), "bias": jnp.ones((256,))}
    with pytest.raises(
        ValueError, match=r"'scale_by_factored_rms'.*has the shape \(256,\), and not that of its parameter"
    ):
        elementwise_only(tx).init(params)


def test_elementwise_only_raises_for_centralize_on_a_leaf_split_along_two_dims():
    # The mean over the second dim does not notice a cut through the first.
    params = {"kernel": Sharded(jnp.ones((8, 8)), ("dp", "fsdp"))}
    with pytest.raises(ValueError, match="'centralize' is wrong on shards"):
        elementwise_only(optax.centralize()).init(params)


def is_late(step):
    return step >= 100


LATE = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(0.1)], [100])
HIDDEN = {  # transforms that are wrong on shards, and show no wrong update in a trial of eight steps
    "few updates": lambda: skip_nonfinite(optax.MultiSteps(optax.lamb(0.05), 16)),
    "zero rate": lambda: skip_nonfinite(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(LATE))),
    "large threshold": lambda: with_ema(skip_nonfinite(optax.clip_by_global_norm(1e9)), 0.9),
    "late condition": lambda: optax.conditionally_transform(optax.clip_by_global_norm(0.5), is_late),
    "no NaN": lambda: optax.chain(optax.zero_nans(), optax.lamb(LATE)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("build", HIDDEN.values(), ids=HIDDEN)
def test_elementwise_only_raises_for_a_transform_whose_updates_another_transform_withholds(build):
    with pytest.raises(ValueError, match=r"'.*(clip_by_global_norm|trust_ratio).*' is wrong on shards"):
        elementwise_only(build()).init(whole_and_split())


@pytest.mark.parametrize(
    "around",
    [skip_nonfinite, lambda tx: optax.MultiSteps(tx, 16), lambda tx: optax.chain(optax.zero_nans(), tx)],
    ids=["skip_nonfinite", "MultiSteps", "zero_nans"],
)
def test_transform_whose_updates_another_transform_withholds_is_tried_alone(around, monkeypatch):
    """The trial is replaced by one that only LAMB's norm fails, alone: around it, no trial shows anything."""
    lamb, split = optax.scale_by_trust_ratio(), {"w": Sharded(np.ones(8, np.float32), ("fsdp",))}
    is_lamb = lambda tx: name_of(tx) == name_of(lamb)  # noqa: E731
    monkeypatch.setattr(elementwise, "_why_wrong", lambda tx, tree: "it has a norm" if is_lamb(tx) else None)
    assert "'scale_by_trust_ratio' is wrong on shards: it has a norm" in str(elementwise._verdict(around(lamb), split))
    assert elementwise._verdict(around(optax.scale(2.0)), split) is None


def test_elementwise_only_accepts_a_skipped_and_accumulated_optimizer_that_clips_over_devices():
    tx = optax.chain(clip_by_global_norm(0.5), optax.adamw(0.1))
    elementwise_only(skip_nonfinite(with_ema(optax.MultiSteps(tx, 16), 0.9))).init(whole_and_split())


@pytest.mark.parametrize("build", WRONG_ON_SHARDS.values(), ids=WRONG_ON_SHARDS)
def test_elementwise_only_accepts_any_optimizer_without_split_leaves(build):
    params = plain_start()
    guarded, grads = elementwise_only(build()), jax.tree.map(jnp.ones_like, params)
    got, _ = guarded.update(grads, guarded.init(params), params)
    want, _ = build().update(grads, build().init(params), params)
    assert_each_leaf(np.testing.assert_array_equal, got, want)


def test_elementwise_only_probes_a_transform_once_per_kind_of_tree():
    calls, adam = [], optax.adam(0.1)

    def counting(updates, state, params=None):
        calls.append(1)
        return adam.update(updates, state, params)

    def calls_of(fn, *args):
        before = len(calls)
        return fn(*args), len(calls) - before

    tx, params = elementwise_only(optax.GradientTransformation(adam.init, counting)), whole_and_split()
    state, tried = calls_of(tx.init, params)
    assert tried > 0
    assert calls_of(tx.update, params, state, params)[1] == 1
    assert calls_of(tx.init, params)[1] == 0
    assert calls_of(tx.init, {"kernel": params["up"]["kernel"]})[1] == tried


@pytest.mark.one_in(2)
@pytest.mark.parametrize("transform", [jax.jit, lambda fn: partial(jax.eval_shape, fn)], ids=["jit", "eval_shape"])
def test_elementwise_only_decides_inside_a_jax_trace(transform):
    params = whole_and_split()
    state = transform(elementwise_only(optax.adam(0.1)).init)(params)
    assert state[0].mu["up"]["kernel"].names == (None, "fsdp")
    with pytest.raises(ValueError, match="'scale_by_trust_ratio' is wrong on shards"):
        transform(elementwise_only(optax.lamb(0.1)).init)(params)
