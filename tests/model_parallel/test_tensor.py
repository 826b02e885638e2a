"""Tests of tensor and sequence parallelism beside FSDP: training equals one device, on every mesh, in both modes.

The model has all split layers: embedding, attention with grouped queries, gated and plain feed-forward, and a head
with losses without logits. Tokens between layers are replicated, split, or split and gathered in rings.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.support import (
    KEPT,
    assert_each_leaf,
    assert_same_params,
    equations,
    fsdp,
    gradients_are_those_of_one_device,
    integers,
    normal,
    on_mesh,
    plain,
    train_on_one_device,
)
from xlstm_jax.distributed import (
    Checkpointer,
    DeviceMeshManager,
    LMHead,
    abstract_train_state,
    check_step,
    chunked_cross_entropy,
    create_train_state,
    init_sharded,
    make_train_step,
    partition_specs,
    shard_modules,
    unbox,
)
from xlstm_jax.distributed.model_parallel import (
    ColumnDense,
    RowDense,
    SplitAttention,
    SplitEmbed,
    SwiGLU,
    columns_of,
    enter_split,
    gather_tokens,
    join_tokens,
    leave_split,
    on_split_input,
    scatter_tokens,
    split_modules,
    split_param,
    split_tokens,
)
from xlstm_jax.distributed.model_parallel.dense import (
    _gathered_in_a_ring,
    _scattered_in_a_ring,
    column_products,
    row_product,
)

VOCAB, WIDTH, LENGTH = 24, 8, 8
TX = optax.chain(
    KEPT, optax.clip_by_global_norm(0.5), optax.adamw(1e-2)
)  # the state contains the gradients of the last step
TOKENS = integers(1, (8, LENGTH), 0, VOCAB)
WEIGHTS = np.where(np.arange(8 * LENGTH).reshape(8, LENGTH) % 3 == 0, -100, TOKENS)  # labels; a third has no weight

WHOLE, SPLIT, RING = {}, {"sequence_dim": 1}, {"sequence_dim": 1, "ring": True}
MESHES = {"2x4": {"fsdp": 2, "tp": 4}, "4x2": {"fsdp": 4, "tp": 2}, "2x2x2": {"dp": 2, "fsdp": 2, "tp": 2}}
MESHES |= {"2x1x4": {"dp": 2, "fsdp": 1, "tp": 4}, "8x1": {"fsdp": 8, "tp": 1}, "1x8": {"fsdp": 1, "tp": 8}}


class Block(nn.Module):
    kv_heads: int
    split: dict

    @nn.compact
    def __call__(self, x):
        norm = on_split_input(nn.LayerNorm, "tp") if self.split else nn.LayerNorm
        attention = SplitAttention(8, 2, self.kv_heads, **self.split, name="attention")
        x = x + attention(norm(name="norm_0")(x))
        x = x + SwiGLU(16, **self.split, name="gated")(norm(name="norm_1")(x))
        h = nn.gelu(ColumnDense(16, **self.split, name="up")(x))
        return x + RowDense(WIDTH, **self.split, name="down")(h)


class Model(nn.Module):
    kv_heads: int = 2
    split: dict | None = None
    wrap: object = plain

    @nn.compact
    def __call__(self, tokens, labels):
        split = dict(self.split or {})
        tokens_split = {name: value for name, value in split.items() if name != "ring"}
        x = self.wrap(SplitEmbed)(VOCAB, WIDTH, **tokens_split, name="embed")(tokens)
        x = self.wrap(Block)(self.kv_heads, split, name="block")(x)
        norm = on_split_input(nn.RMSNorm, "tp") if split else nn.RMSNorm
        x = self.wrap(norm)(name="norm")(x)
        head = LMHead(VOCAB, vocab_axis="tp", chunk_size=5, **tokens_split, name="head")
        return head.losses(x, labels)


def loss_fn(params, apply_fn, batch, rng):
    del rng
    tokens, labels = batch
    found = apply_fn({"params": params}, tokens, labels)
    return found.loss.sum() + 1e-3 * (found.log_normalizer**2).sum(), (labels >= 0).sum()


BATCH = (TOKENS, WEIGHTS)


@cache
def one_device(kv_heads, steps=10):
    """Returns the plain model's initial parameters; and after some steps parameters, last gradients, and losses."""
    model = Model(kv_heads)
    start = jax.jit(model.init)(jax.random.key(0), *BATCH)["params"]
    params, opt_state, losses = train_on_one_device(model, TX, start, loss_fn, BATCH, steps)
    return start, params, opt_state[0], losses


def on(name):
    mesh = DeviceMeshManager.create_device_mesh(MESHES[name])
    return mesh, tuple(axis for axis in mesh.axis_names if axis != "tp")


def state_of(name, kv_heads=2, split=None, tx=TX):
    mesh, axes = on(name)
    model = Model(kv_heads, split, partial(fsdp, min_weight_size=16))
    return create_train_state(model, tx, mesh, jax.random.key(0), *BATCH, batch_axes=axes, allow_replicated=True)


RUNS = [
    ("2x4", 2, WHOLE, True),
    ("2x2x2", 4, SPLIT, False),
    ("2x1x4", 2, RING, True),
    ("2x4", 2, WHOLE, False),
    ("2x2x2", 4, SPLIT, True),
    ("4x2", 1, RING, False),
    ("1x8", 8, SPLIT, True),
    ("8x1", 2, RING, False),
    ("1x8", 1, RING, False),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name, kv_heads, split, check_vma", [RUNS[i] for i in (0, 4, 5, 1, 2, 3, 6, 7, 8)])
def test_ten_clipped_adamw_steps_with_tensor_parallelism_match_a_single_device(name, kv_heads, split, check_vma):
    mesh, axes = on(name)
    state = state_of(name, kv_heads, split)
    start, params, grads, losses = one_device(kv_heads)
    assert_each_leaf(np.testing.assert_array_equal, unbox(state.params), start)  # bit for bit
    step = make_train_step(loss_fn, mesh, axes, weighted=True, check_vma=check_vma, allow_replicated=True)
    for want in losses:
        state, metrics = step(state, BATCH, jax.random.key(0))
        assert float(metrics["loss"]) == pytest.approx(want, rel=1e-5)
    assert_same_params(state.params, params, 1e-4)  # ten times rounded, and divided by small second moments
    assert_same_params(state.opt_state[0], grads, 1e-4)  # of gradients at parameters that differ by as much
    assert losses[-1] < 0.8 * losses[0]  # guard: the loss decreases


def test_copied_column_dense_gives_each_device_the_key_head_of_local_queries():
    """Each device has the key head of its queries: of four devices, two compute the first head, two the second."""
    rng, mesh = np.random.default_rng(0), DeviceMeshManager.create_device_mesh({"tp": 4}, devices=jax.devices()[:4])
    x, kernel = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 5), (5, 2, 4)))
    layer = ColumnDense((2, 4), copied=True, use_bias=False)
    run = on_mesh(lambda x, kernel: layer.apply({"params": {"kernel": kernel}}, x), mesh, True, P(), P(None, "tp"))
    want = np.repeat(np.einsum("bd,dhe->bhe", x, kernel), 2, axis=1)
    np.testing.assert_allclose(run(x, kernel), want, rtol=1e-5)
    assert np.abs(want[:, 0] - want[:, 2]).max() > 1  # guard: heads differ


class SumsInScan(nn.Module):
    """Layer that returns the sum of its result over devices."""

    @nn.compact
    def __call__(self, x, _):
        return x, leave_split(x * self.param("scale", nn.initializers.ones, ()), "tp")


def test_layer_in_flax_scan_sums_varying_values_and_raises_for_replicated_values():
    """A layer in Flax's scan may sum varying values, although Flax's shape trace treats all arguments as replicated."""
    mesh = DeviceMeshManager.create_device_mesh({"tp": 2}, devices=jax.devices()[:2])
    layers = nn.scan(SumsInScan, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    params = {"params": {"scale": np.float32([1, 2, 4])}}

    def traced(spec):
        run = lambda x: layers.apply(params, x, None)[1]  # noqa: E731
        return jax.eval_shape(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=P()), np.ones((2, 5), np.float32))

    assert traced(P("tp")).shape == (3, 1, 5)
    with pytest.raises(ValueError, match="is equal along 'tp' by its type, and would count 2 times"):
        traced(P())


def test_tensor_parallel_checkpoint_restores_onto_other_meshes(tmp_path):
    state = state_of("2x4", split=SPLIT, tx=optax.sgd(0.1))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        for name in ("4x2", "8x1"):
            mesh, axes = on(name)
            model = Model(2, RING, partial(fsdp, min_weight_size=16))
            target = abstract_train_state(model, optax.sgd(0.1), mesh, jax.random.key(1), *BATCH, batch_axes=axes)
            found = checkpointer.restore(target).params
            assert_each_leaf(np.testing.assert_array_equal, unbox(found), unbox(state.params))
            assert found["block"]["up"]["kernel"].value.sharding.mesh == mesh


def test_parity_model_has_leaves_split_over_fsdp_over_tp_over_both_and_over_none():
    """Guard: the parity test above has leaves split over both axes, over one axis, and over none."""
    params = state_of("2x4", kv_heads=2, tx=KEPT).params
    block = params["block"]
    assert block["up"]["kernel"].names == ("fsdp", "tp") and block["down"]["kernel"].names == ("tp", "fsdp")
    assert block["attention"]["query"]["kernel"].names == ("fsdp", "tp", None)
    assert "tp" not in block["attention"]["key"]["kernel"].axes  # two heads for four devices: copied
    assert params["embed"]["embedding"].names == ("tp", "fsdp") and params["head"]["kernel"].names == (None, "tp")
    assert {leaf.shape for leaf in jax.tree.leaves(unbox(params["norm"]))} == {(WIDTH,)}


class Scaled(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * split_param(self, "scale", nn.initializers.normal(), (3, 8), jnp.float32, dim=-1)


def test_axis_names_of_the_initializer_are_kept_beside_the_tensor_axis():
    """Names of the initialiser (mesh axes or logical) are kept beside the layer's axis, as in Flax's layers."""
    mesh, _ = on("2x4")
    init = nn.initializers.lecun_normal()
    logical = nn.with_logical_partitioning(init, ("embed", "mlp"))
    rules = (("embed", "fsdp"), ("mlp", "tp"))
    heads = nn.with_partitioning(init, ("fsdp", None, None))
    cases = [
        (ColumnDense(8, kernel_init=named("fsdp", None)), ("fsdp", "tp")),
        (RowDense(8, kernel_init=named(None, "fsdp")), ("tp", "fsdp")),
        (ColumnDense(8, kernel_init=logical), ("fsdp", "tp")),
        (ColumnDense((4, 2), kernel_init=heads), ("fsdp", "tp")),
        (ColumnDense((2, 2), copied=True, kernel_init=nn.with_partitioning(init, ("fsdp", "tp", None))), ("fsdp",)),
    ]
    x = jnp.ones((8, 8))
    with nn.logical_axis_rules(rules):
        for layer, names in cases:
            params = init_sharded(layer, mesh, jax.random.key(0), x, batch_axes="fsdp")["params"]
            assert partition_specs(params, mesh)["kernel"] == P(*names)
            plain_params = unbox(jax.jit(layer.init)(jax.random.key(0), x)["params"])
            assert_same_params(params, plain_params, 1e-6)
    params = init_sharded(Scaled(), mesh, jax.random.key(0), jnp.ones((2, 3, 8)), batch_axes="fsdp")["params"]
    assert params["scale"].names == (None, "tp")


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_split_layers_with_axis_names_in_the_initializer_match_a_single_device(check_vma):
    mesh, x = on("2x4")[0], normal(1, (8, 4, 8)) * np.float32(1 + np.arange(8))[:, None, None]
    model = nn.Sequential([ColumnDense(8, kernel_init=named("fsdp", None)), nn.gelu, RowDense(8)])
    params = gradients_are_those_of_one_device(model, model, foreign_loss, mesh, "fsdp", x, check_vma=check_vma)
    assert params["layers_0"]["kernel"].names == ("fsdp", "tp")


FLAX = {
    "dense": (ColumnDense(12), nn.Dense(12), 1),
    "rows": (RowDense(12), nn.Dense(12), 1),
    "heads": (ColumnDense((4, 3)), nn.DenseGeneral((4, 3)), 1),
    "after heads": (RowDense(6, axis=(-2, -1)), nn.DenseGeneral(6, axis=(-2, -1)), 1),
    "embedding": (SplitEmbed(10, 4), nn.Embed(10, 4), jnp.int32(1)),
    "attention": (SplitAttention(4, 3, use_bias=True), nn.MultiHeadDotProductAttention(4, qkv_features=12), None),
}


@pytest.mark.parametrize("case", FLAX)
def test_split_layers_on_a_single_device_equal_flax_layers(case):
    ours, theirs, ones = FLAX[case]
    shape = (2, 4) if case == "embedding" else (2, 5, 4, 3) if case == "after heads" else (2, 5, 12)
    x = jax.random.normal(jax.random.key(1), shape) if case != "embedding" else jnp.arange(8).reshape(shape)
    mask = {"mask": nn.make_causal_mask(jnp.ones((2, 5)))} if ones is None else {}
    params = jax.jit(ours.init)(jax.random.key(0), x)
    assert_each_leaf(np.testing.assert_array_equal, params, jax.jit(theirs.init)(jax.random.key(0), x))
    np.testing.assert_allclose(ours.apply(params, x), theirs.apply(params, x, **mask), rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------- how activations enter, leave and are split

X = normal(2, (4, 8, 3))  # [b, t, d]
W = np.arange(1, 5, dtype=np.float32)  # the factor of each device

# (function of x and the local w, reference of x and all w, is x split?, is the result split?)
PAIRS = {
    "enter, leave": (lambda x, w: leave_split(jnp.tanh(enter_split(x, "tp") * w), "tp"), False, False),
    "gather, scatter": (lambda x, w: scatter_tokens(jnp.tanh(gather_tokens(x, 1, "tp") * w), 1, "tp"), True, True),
    "enter, scatter": (lambda x, w: scatter_tokens(jnp.tanh(enter_split(x, "tp") * w), 1, "tp"), False, True),
    "gather, leave": (lambda x, w: leave_split(jnp.tanh(gather_tokens(x, 1, "tp") * w), "tp"), True, False),
}


def summed_terms(x, w):
    return sum(jnp.tanh(x * each) for each in w)


def square(y):
    """Returns a loss whose gradient differs between tokens."""
    return jnp.sum(y**2 * jnp.linspace(0.5, 2, y.shape[1])[:, None])


def gradients_of(fn, in_split, out_split, check_vma):
    """Returns the gradients of x and w of a loss of all tokens; a split result is joined before the loss."""
    mesh = DeviceMeshManager.create_device_mesh({"tp": 4}, devices=jax.devices()[:4])

    def loss(x, w):
        y = fn(x, w)
        return square(join_tokens(y, 1, "tp") if out_split else y)

    spec = P(None, "tp") if in_split else P()
    return on_mesh(jax.grad(loss, argnums=(0, 1)), mesh, check_vma, (spec, P("tp")), (spec, P("tp")))(X, W)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("pair", PAIRS)
def test_gradients_through_each_enter_and_leave_pair_match_a_single_device(pair, check_vma):
    want = jax.grad(lambda x, w: square(summed_terms(x, w)), argnums=(0, 1))(X, W)
    got = gradients_of(*PAIRS[pair], check_vma)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


def test_gradient_of_an_entering_array_is_summed_over_the_devices():
    """Each of two devices multiplies by a different factor, 1 and 2."""
    mesh = DeviceMeshManager.create_device_mesh({"tp": 2}, devices=jax.devices()[:2])

    def gradient(x, factor):
        return jax.grad(lambda x: (enter_split(x, "tp") * factor).sum())(x)

    assert on_mesh(gradient, mesh, False, (P(), P("tp")), P())(np.float32([5]), np.float32([1, 2])).tolist() == [3]


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_split_and_join_tokens_have_the_gradient_of_the_inner_function(check_vma):
    fn = lambda x, w: jnp.sin(split_tokens(x, 1, "tp"))  # noqa: E731
    got, _ = gradients_of(fn, False, True, check_vma)
    np.testing.assert_allclose(got, jax.grad(lambda x: square(jnp.sin(x)))(X), rtol=1e-5, atol=1e-6)


def test_split_and_join_tokens_accept_token_ids_without_a_feature_dim():
    mesh = DeviceMeshManager.create_device_mesh({"tp": 4}, devices=jax.devices()[:4])
    double = lambda tokens: join_tokens(2 * split_tokens(tokens, 1, "tp"), 1, "tp")  # noqa: E731
    np.testing.assert_array_equal(on_mesh(double, mesh, True, P(), P())(TOKENS), 2 * TOKENS)


def test_ring_products_have_the_gradients_of_gather_and_scatter_products():
    """Ring products have the gradients of gather and scatter, for both factors, with a different w per device."""
    mesh, w = DeviceMeshManager.create_device_mesh({"tp": 4}, devices=jax.devices()[:4]), jnp.arange(24.0) / 24

    def loss(x, w, ring):
        own, how = w * (1 + jax.lax.axis_index("tp")), {"sequence_dim": 1, "ring": ring}
        (h,) = column_products(x, [own[:12].reshape(3, 4)], "tp", **how)
        y = row_product(jnp.tanh(h), own[12:].reshape(4, 3), "tp", **how)
        return square(join_tokens(y, 1, "tp"))

    specs = (P(None, "tp"), P()), (P(None, "tp"), P("tp"))
    got, want = (
        on_mesh(jax.grad(partial(loss, ring=ring), argnums=(0, 1)), mesh, False, *specs)(X, w) for ring in (True, False)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)
    assert np.abs(got[1]).min() > 0  # guard


def test_ring_gathers_the_tokens_of_all_devices_in_their_order():
    mesh = DeviceMeshManager.create_device_mesh({"tp": 3}, devices=jax.devices()[:3])

    def gathered(x):
        return _gathered_in_a_ring(x, [None], "tp", 0, lambda x, kernel: x)[0]

    found = on_mesh(gathered, mesh, False, P("tp"), P(None, "tp"))(np.arange(6, dtype=np.float32)[:, None])
    np.testing.assert_array_equal(found, np.arange(6)[:, None] * np.ones(3))


def test_ring_scatters_the_sums_of_tokens_to_the_devices_of_the_tokens():
    """Device i has i + 1 times the tokens 0, 1, 2, of which it keeps token i."""
    mesh = DeviceMeshManager.create_device_mesh({"tp": 3}, devices=jax.devices()[:3])

    def scattered(x):
        return _scattered_in_a_ring(x.T, None, "tp", 0, lambda x, kernel: x)

    x = np.arange(1, 4, dtype=np.float32)[:, None] * np.arange(3, dtype=np.float32)
    assert on_mesh(scattered, mesh, False, P("tp"), P("tp"))(x).ravel().tolist() == [0, 6, 12]


def test_plain_sum_without_check_vma_has_a_wrong_gradient():
    """Guard: without types, a plain sum without ``leave_split`` or ``enter_split`` has a different gradient."""
    want = jax.grad(lambda x: square(summed_terms(x, W)))(X)
    for fn in (
        lambda x, w: jax.lax.psum(jnp.tanh(enter_split(x, "tp") * w), "tp"),
        lambda x, w: leave_split(jnp.tanh(x * w), "tp"),
    ):
        assert not np.allclose(gradients_of(fn, False, False, False)[0], want, rtol=0.1)


def primitives(split):
    """Returns the equations of a device's loss and gradients."""
    mesh, _ = on("2x4")
    model = Model(2, split, partial(fsdp, min_weight_size=16))
    params = jax.eval_shape(partial(init_sharded, model, mesh, jax.random.key(0), batch_axes="fsdp"), *BATCH)["params"]
    loss = lambda params, batch: loss_fn(params, model.apply, batch, None)[0]  # noqa: E731
    specs = partition_specs(params, mesh)
    step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=specs, check_vma=False)
    return [eqn for _, eqn in equations(jax.make_jaxpr(step)(params, BATCH))]


def over(eqns, kind, axis):
    """Returns the result shapes of collectives of a kind over an axis."""
    axes_of = lambda eqn: str(eqn.params.get("axis_name", eqn.params.get("axes")))  # noqa: E731
    return [eqn.outvars[0].aval.shape for eqn in eqns if eqn.primitive.name == kind and axis in axes_of(eqn)]


def test_fsdp_gathers_only_local_tp_columns_and_no_array_has_vocabulary_size():
    eqns = primitives(WHOLE)
    gathered = over(eqns, "all_gather", "fsdp")
    assert (WIDTH, 16 // 4) in [shape[::-1] for shape in gathered] + gathered  # of "up", and of "gate"
    assert (WIDTH, 16) not in [shape[::-1] for shape in gathered] + gathered
    assert not [
        v.aval for e in eqns for v in e.outvars if VOCAB in getattr(v.aval, "shape", ())[-1:] and v.aval.ndim > 2
    ]


def test_tensor_parallel_ring_permutes_tokens_instead_of_gathering():
    split, ring = primitives(SPLIT), primitives(RING)
    assert (
        len(over(split, "all_gather", "tp")) > len(over(ring, "all_gather", "tp")) <= 3
    )  # of the embedding, and the head
    assert len(over(ring, "ppermute", "tp")) >= 3 * 6 and not over(split, "ppermute", "tp")


# -------------------------------------------------------------------------------------------------------------- errors


def test_split_embed_handles_negative_and_out_of_range_tokens_like_flax():
    mesh = DeviceMeshManager.create_device_mesh({"tp": 4}, devices=jax.devices()[:4])
    table, tokens = jnp.arange(16.0).reshape(8, 2), jnp.array([0, 7, 5, -1, -8, 8, -9])
    got = on_mesh(SplitEmbed(8, 2).apply, mesh, True, (P("tp"), P()), P())({"params": {"embedding": table}}, tokens)
    np.testing.assert_array_equal(got, jnp.take(table, tokens, axis=0))
    assert np.isnan(got[-1]).all() and not np.isnan(got[:5]).any()


def test_split_embed_accepts_uint8_tokens_with_a_vocabulary_of_256():
    mesh = DeviceMeshManager.create_device_mesh({"tp": 4}, devices=jax.devices()[:4])
    table, tokens = jnp.arange(512.0).reshape(256, 2), jnp.array([0, 128, 255], jnp.uint8)
    got = on_mesh(SplitEmbed(256, 2).apply, mesh, True, (P("tp"), P()), P())({"params": {"embedding": table}}, tokens)
    np.testing.assert_array_equal(got, table[tokens])


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_chunked_cross_entropy_over_a_split_vocabulary_matches_the_unsplit_vocabulary(check_vma):
    mesh = DeviceMeshManager.create_device_mesh({"tp": 4}, devices=jax.devices()[:4])
    hidden = normal(3, (5, 6, 4))
    table = jnp.round(normal(4, (16, 4)))
    table = table.at[9].set(table[2])  # equally likely entries, on two devices
    labels = jnp.argmax(hidden @ table.T, axis=-1).at[0].set(9).at[1].set(16).at[2].set(-100)

    def losses(hidden, table, labels, **axis):
        found = chunked_cross_entropy(hidden, table, labels, vocab_dim=0, chunk_size=3, **axis)
        total = jnp.where(labels < 16, found.loss, 0).sum() + 0.1 * (found.log_normalizer**2).sum()
        return total, found

    of = lambda **axis: jax.grad(partial(losses, **axis), argnums=(0, 1), has_aux=True)  # noqa: E731
    specs = (P(), P("tp"), P()), ((P(), P("tp")), P())
    grads, found = on_mesh(of(vocab_axis="tp"), mesh, check_vma, *specs)(hidden, table, labels)
    want_grads, want = jax.jit(of())(hidden, table, labels)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), (grads, found), (want_grads, want))
    assert 6 <= want.correct.sum() < 18 and np.isnan(want.loss[1]).all()  # guard


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return columns_of([ColumnDense(8, name="a"), ColumnDense(8, dtype="bfloat16", name="b")], x)


def named(*names):
    return nn.with_partitioning(nn.initializers.lecun_normal(), names)


TP8, TP4 = {"tp": 8}, {"fsdp": 2, "tp": 4}


# ---------------------------------------------------------------------------------------------------- norms and dropout


class FactorOfColumns(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, (2,))


def test_gradient_of_replicated_parameters_on_split_input_sums_three_devices():
    mesh = DeviceMeshManager.create_device_mesh({"tp": 3}, devices=jax.devices()[:3])
    grad = jax.grad(
        lambda scale, x: on_split_input(FactorOfColumns, "tp")().apply({"params": {"scale": scale}}, x).sum()
    )
    for check_vma in (True, False):
        got = on_mesh(grad, mesh, check_vma, (P(), P("tp")), P())(jnp.ones(2), jnp.arange(6.0).reshape(3, 2))
        assert got.tolist() == [6, 9]


def test_dropout_on_split_input_is_the_plain_dropout_on_a_single_device():
    def drop(cls, key):
        return cls(0.5, deterministic=False).apply({}, jnp.ones((2, 8)), rngs={"dropout": key})

    key = jax.random.key(1)
    got, want = jax.jit(lambda key: [drop(cls, key) for cls in (on_split_input(nn.Dropout, "tp"), nn.Dropout)])(key)
    np.testing.assert_array_equal(got, want)


def test_dropout_differs_by_device_on_split_tokens_and_not_on_replicated_tokens():
    mesh = DeviceMeshManager.create_device_mesh({"tp": 4}, devices=jax.devices()[:4])
    x, key = jnp.ones((2, 32, 4)), {"dropout": jax.random.key(0)}

    def drop(cls, spec):
        layer = cls(0.5, deterministic=False)
        return on_mesh(lambda x: layer.apply({}, x, rngs=key), mesh, True, spec, spec)(x)

    masks = np.split(np.asarray(drop(on_split_input(nn.Dropout, "tp"), P(None, "tp"))), 4, axis=1)
    assert len({mask.tobytes() for mask in masks}) == 4
    whole = nn.Dropout(0.5, deterministic=False).apply({}, x, rngs=key)
    np.testing.assert_array_equal(drop(nn.Dropout, P()), whole)
    alone = on_split_input(nn.Dropout, "tp")(0.5, deterministic=False).apply({}, x, rngs=key)
    np.testing.assert_array_equal(alone, whole)


def test_keys_of_a_module_on_split_input_differ_by_device_except_those_of_parameters():
    class Drawn(nn.Module):
        @nn.compact
        def __call__(self):
            return [jax.random.key_data(self.make_rng(name)) for name in ("dropout", "params")]

    mesh = DeviceMeshManager.create_device_mesh({"tp": 2}, devices=jax.devices()[:2])

    def drawn(key):
        return on_split_input(Drawn, "tp")().apply({}, rngs={"dropout": key, "params": key})

    found = on_mesh(drawn, mesh, False, P(), P("tp"))(jax.random.key(0))
    of_dropout, of_params = (np.asarray(keys).reshape(2, -1) for keys in found)
    assert (of_dropout[0] != of_dropout[1]).any() and (of_params[0] == of_params[1]).all()


class Normed(nn.Module):
    norm: object

    @nn.compact
    def __call__(self, x):
        x = self.norm(name="norm")(split_tokens(x, 1, "tp"))
        return RowDense(4, sequence_dim=1)(nn.tanh(ColumnDense(8, sequence_dim=1)(x)))


def own_loss(params, apply_fn, x, rng):
    y = apply_fn({"params": params}, x)
    return jnp.mean((join_tokens(y, 1, "tp") - jnp.roll(x, 1, axis=1)) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped, check_vma", [(True, True), (True, False), (False, True), (False, False)])
def test_unwrapped_norm_on_split_tokens_is_exact_with_check_vma_and_raises_without(wrapped, check_vma):
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 4, "tp": 2})
    x = normal(1, (8, 8, 4)) * np.float32(1 + np.arange(8))[:, None]
    model = fsdp(Normed, min_weight_size=16)(on_split_input(nn.LayerNorm, "tp") if wrapped else nn.LayerNorm)
    state = create_train_state(model, optax.sgd(1.0), mesh, jax.random.key(0), x, batch_axes="fsdp")
    step = make_train_step(own_loss, mesh, "fsdp", check_vma=check_vma)
    if wrapped or check_vma:
        found = check_step(step, state, x, jax.random.key(0))
        assert found.verdict == "right", "; ".join(map(str, found.findings))
        return
    with pytest.raises(ValueError, match=r"'grads/norm/bias', 'grads/norm/scale' would differ .* along \('tp',\)"):
        step(state, x, jax.random.key(0))


class Foreign(nn.Module):
    """A block of Flax layers, written without a mesh in mind."""

    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(4, qkv_features=32, normalize_qk=True, name="attention")
        x = x + attention(x, mask=nn.make_causal_mask(x[..., 0]))
        return x + nn.Dense(8, name="down")(nn.gelu(nn.Dense(16, name="up")(x)))


DENSE = {"attention/(query|key|value)|up": "column", "out|down": "row"}
FOREIGN = DENSE | {"(query|key)_ln": "inside"}


def foreign_loss(params, apply_fn, x, rng):
    del rng
    return jnp.mean((apply_fn({"params": params}, x) - jnp.roll(x, 1, axis=1)) ** 2)


@pytest.mark.parametrize("check_vma, where", [(True, nn.Dense), (False, lambda path, module: path == "")])
def test_unedited_model_with_split_modules_matches_a_single_device(check_vma, where):
    mesh, x = on("4x2")[0], normal(1, (8, 4, 8)) * np.float32(1 + np.arange(8))[:, None, None]
    # With types JAX sums the gradients of the norms within heads itself.
    split = DENSE if check_vma else FOREIGN
    model = split_modules(shard_modules(Foreign(), where, "fsdp", 16), split)
    params = gradients_are_those_of_one_device(model, Foreign(), foreign_loss, mesh, "fsdp", x, check_vma=check_vma)
    assert params["up"]["kernel"].names == ("fsdp", "tp")
    assert params["attention"]["out"]["kernel"].axes[0] == "tp"


class ForeignDecoder(nn.Module):
    """Decoder with a tied head or a separate head; the loss uses unsharded logits."""

    tied: bool

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, 8, name="embed")
        x = nn.LayerNorm(name="norm")(Foreign(name="block")(embed(tokens)))
        return embed.attend(x) if self.tied else nn.Dense(VOCAB, name="head")(x)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tied, check_vma", [(True, True), (False, False)], ids=["tied", "head"])
def test_vocabulary_split_by_split_modules_matches_a_single_device(tied, check_vma):
    def loss(params, apply_fn, tokens, rng):
        logits = apply_fn({"params": params}, tokens)
        assert logits.shape == (*tokens.shape, VOCAB)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, axis=1)).mean()

    model = ForeignDecoder(tied)
    split = FOREIGN | {"embed|head": "vocabulary"}
    sharded = split_modules(shard_modules(model, (nn.Embed, nn.Dense, Foreign), "fsdp", 16), split)
    mesh = on("4x2")[0]
    params = gradients_are_those_of_one_device(sharded, model, loss, mesh, "fsdp", TOKENS, check_vma=check_vma)
    assert params["embed"]["embedding"].names[0] == "tp"
    assert tied or params["head"]["kernel"].names == ("fsdp", "tp")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head"])
def test_split_vocabulary_returns_the_logits_of_all_entries(tied):
    model = split_modules(ForeignDecoder(tied), FOREIGN | {"embed|head": "vocabulary"})
    for check_vma in (True, False):
        assert shapes_on_mesh(model, TOKENS, check_vma) == (*TOKENS.shape, VOCAB)


class TwoMethods(nn.Module):
    def setup(self):
        self.up, self.norm, self.down = nn.Dense(16), nn.LayerNorm(), nn.Dense(8)

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        return self.up(x)

    def decode(self, x):
        return self.down(nn.gelu(x) * self.norm(jnp.ones((8,))).mean())


class Around(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.inner.decode(self.inner.encode(x))


def shapes_on_mesh(model, x, check_vma):
    mesh = on("4x2")[0]
    params = jax.eval_shape(partial(init_sharded, model, mesh, jax.random.key(0), batch_axes="fsdp"), x)
    specs = partition_specs(params, mesh), P("fsdp")
    apply = jax.shard_map(model.apply, mesh=mesh, in_specs=specs, out_specs=P("fsdp"), check_vma=check_vma)
    return jax.eval_shape(apply, params, x).shape


def test_split_modules_of_several_methods_raises_without_check_vma_for_an_unlisted_norm():
    x, split = jnp.ones((8, 4, 8)), {"up": "column", "down": "row"}
    model = split_modules(TwoMethods(), split)
    for each in (model, Around(model)):
        assert shapes_on_mesh(each, x, check_vma=True) == x.shape
    with pytest.raises(ValueError, match=r"'norm' \(LayerNorm\) has replicated parameters, and runs after 'up' is"):
        shapes_on_mesh(model, x, check_vma=False)
    assert shapes_on_mesh(split_modules(TwoMethods(), split | {"norm": "replicated"}), x, check_vma=False) == x.shape


class Layers(nn.Module):
    """Three layers whose products depend on unsharded inputs."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8, name="mid")(nn.Dense(16, name="up")(x))
        return nn.Dense(8, name="down")(h)


UNPAIRED = {
    "swapped": (
        {"up": "row", "mid": "column"},
        r"'up' is split by rows, .* all 8 .* 4.* 'up' by 'column' and 'mid', which runs after it, by 'row'",
    ),
    "rows alone": (
        {"mid": "row"},
        r"'mid' is split by rows, .* all 16 .* 8.* the layer before 'mid' by 'column'",
    ),
    "rows after rows": (
        {"up": "column", "mid|down": "row"},
        r"'down' is split by rows, .* a row-split layer runs in between",
    ),
    "columns alone": ({"up": "column"}, r"'mid' is not split, .* 'up' returned, .* 8 of 16 .* Split 'mid' by 'row'"),
    "columns after columns": (
        {"up|mid": "column", "down": "row"},
        r"'mid' is split by col.* Split 'mid' by 'row'",
    ),
    "a head after columns": (
        {"up": "column", "mid": "vocabulary"},
        r"'mid' is split by .*, or leave 'up' out of s",
    ),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("case", UNPAIRED)
def test_split_modules_raises_for_unpaired_layers_by_name(case, check_vma):
    split, says = UNPAIRED[case]
    x, model = jnp.ones((8, 8)), shard_modules(Layers(), nn.Dense, "fsdp", 16)
    with pytest.raises(ValueError, match=f"split_modules: {says}"):
        shapes_on_mesh(split_modules(model, split), x, check_vma)
    pair = split_modules(model, {"up": "column", "mid": "row"})
    assert shapes_on_mesh(pair, x, check_vma) == x.shape  # guard


def test_split_modules_accepts_layers_with_a_shared_input_or_result():
    """Column-split layers may share an input (queries and keys), and row-split layers a split activation."""

    class Fork(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8, name="a")(x) * nn.Dense(8, name="b")(x)
            return nn.Dense(8, name="c")(h) + nn.Dense(8, name="d")(h)

    model = split_modules(Fork(), {"a|b": "column", "c|d": "row"})
    assert shapes_on_mesh(model, jnp.ones((8, 8)), check_vma=False) == (8, 8)


def test_dropout_marked_inside_after_a_column_split_layer_differs_by_device():
    mesh = DeviceMeshManager.create_device_mesh({"tp": 4}, devices=jax.devices()[:4])
    layers = [nn.Dense(64, bias_init=nn.initializers.ones), nn.Dropout(0.5, deterministic=False)]
    key, x = {"dropout": jax.random.key(0)}, jnp.zeros((8, 4))

    def masks(split):
        model = split_modules(nn.Sequential(layers), {"layers_0": "column"} | split)
        params = {"params": {"layers_0": {"kernel": jnp.zeros((4, 64)), "bias": jnp.ones(64)}}}
        specs = {"params": {"layers_0": {"kernel": P(None, "tp"), "bias": P("tp")}}}
        apply = on_mesh(lambda p, x: model.apply(p, x, rngs=key), mesh, False, (specs, P()), P(None, "tp"))
        return {mask.tobytes() for mask in np.split(np.asarray(apply(params, x)), 4, axis=1)}

    assert len(masks({"layers_1": "inside"})) == 4
    assert len(masks({})) == 1  # guard


def test_shard_modules_shards_a_wrapped_norm_on_split_tokens():
    mesh, x = on("4x2")[0], normal(1, (8, 8, 4)) * np.float32(1 + np.arange(8))[:, None]
    plain_model = Normed(on_split_input(nn.LayerNorm, "tp"))
    model = shard_modules(plain_model, nn.LayerNorm, "fsdp", 4)
    params = gradients_are_those_of_one_device(model, plain_model, own_loss, mesh, "fsdp", x, check_vma=False)
    assert params["norm"]["scale"].names == ("fsdp",)
