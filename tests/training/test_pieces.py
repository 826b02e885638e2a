"""Tests of a head read in pieces: losses and gradients of the unsharded kernel, which no device ever holds."""

import math
import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from tests.support import (
    KEPT,
    assert_same_params,
    fsdp,
    gradients_are_those_of_one_device,
    integers,
    normal,
    on_mesh,
    train_on_one_device,
)
from xlstm_jax.distributed import (
    DeviceMeshManager,
    Replicas,
    create_train_state,
    init_sharded,
    make_train_step,
    plan_sharding,
    shard_modules,
)
from xlstm_jax.distributed.data_parallel.extensions.padding import ZeroPadding
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.wire.communication import DEFAULT_COMMUNICATION, Communication, PrimalType
from xlstm_jax.distributed.data_parallel.wire.pieces import Pieces
from xlstm_jax.distributed.training.cross_entropy import LMHead, chunked_cross_entropy
from xlstm_jax.formatting import format_bytes

VOCAB, DIM, ROWS, LENGTH = 48, 16, 16, 3
BATCH = ("x", "y")
# Wire formats, and the tolerance of gradients against one device, relative to the largest entry.
WIRES = {
    "float32": (DEFAULT_COMMUNICATION, 2e-6),
    "gathered in bfloat16": (Communication("bfloat16"), 2e-2),
    "scattered in bfloat16": (Communication(None, "bfloat16"), 2e-2),
    "scattered in float16": (Communication("bfloat16", "float16"), 2e-2),
}


@pytest.fixture(scope="module")
def mesh():
    return DeviceMeshManager.create_device_mesh({"x": 2, "y": 4})


def example(vocab=VOCAB):
    """Returns hidden, kernel, labels; rows differ in scale, and some labels have no weight."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (ROWS, LENGTH, DIM)) * (1 + jnp.arange(ROWS))[:, None, None] / 4
    labels = jax.random.randint(keys[2], (ROWS, LENGTH), 0, vocab).at[::5, 1].set(-100)
    return hidden, jax.random.normal(keys[1], (DIM, vocab)) / 4, labels


def weighted_loss(hidden, kernel, labels, **options):
    """Returns a scalar with different weights for tokens and both differentiable outputs, and the correct flags."""
    found = chunked_cross_entropy(hidden, kernel, labels, **options)
    weight = 1 + labels % 3
    return jnp.sum(found.loss * weight + 0.1 * found.log_normalizer**2), found.correct


def on_devices(mesh, check_vma, names, communication=DEFAULT_COMMUNICATION, *, whole=False, chunk_size=16, vocab_dim=1):
    """Returns a function of (hidden, kernel, labels): losses of devices, correct flags, both gradients.

    The gradient of the kernel is the mean over devices that split the kernel or have copies, else the sum.
    """

    def losses(hidden, shard, labels):
        box = Sharded(shard, names, communication=communication)
        read = jnp.asarray(box) if whole else box
        loss, correct = weighted_loss(hidden, read, labels, chunk_size=chunk_size, vocab_dim=vocab_dim)
        return loss, correct

    def run(hidden, shard, labels):
        (loss, correct), grads = jax.value_and_grad(losses, argnums=(0, 1), has_aux=True)(hidden, shard, labels)
        return loss[None], correct, *grads

    split = P(*names)
    return on_mesh(run, mesh, check_vma, (P(BATCH), split, P(BATCH)), (P(BATCH), P(BATCH), P(BATCH), split))


def close(got, want, tolerance):
    assert got.dtype == want.dtype
    assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


# ---------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.one_in(7)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("vocab_dim", [1, 0])
@pytest.mark.parametrize("dim", ["vocabulary", "features"])
@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")], ids=str)
def test_cross_entropy_by_pieces_matches_a_single_device(mesh, axes, dim, vocab_dim, check_vma, wire):
    (communication, tolerance), (hidden, kernel, labels) = WIRES[wire], example()
    names = tuple(axes if i == (vocab_dim if dim == "vocabulary" else 1 - vocab_dim) else None for i in (0, 1))
    if communication.gather_dtype:  # a cast of the kernel is no mistake of the loss
        kernel = kernel.astype(communication.gather_dtype).astype(jnp.float32)
    kernel = kernel if vocab_dim else kernel.T
    run = on_devices(mesh, check_vma, names, communication, vocab_dim=vocab_dim)
    loss, correct, *grads = run(hidden, kernel, labels)
    of_one = partial(weighted_loss, vocab_dim=vocab_dim)
    (want, likeliest), wanted = jax.jit(jax.value_and_grad(of_one, (0, 1), has_aux=True))(hidden, kernel, labels)
    assert_allclose(loss.sum(), want, rtol=1e-6)
    assert_array_equal(correct, likeliest)
    assert 0 < correct.sum() < correct.size
    close(grads[0], wanted[0], 2e-6)
    close(8 * grads[1], wanted[1], tolerance)  # mean over devices of a summed loss
    assert not np.allclose(grads[1], wanted[1], rtol=0.1)  # guard: a sum would be seen


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("names", [(None, "y"), ("y", None)], ids=str)
@pytest.mark.parametrize(
    "replicas", [None, Replicas("x"), Replicas("x", "bfloat16")], ids=["other axis", "copies", "narrow"]
)
def test_cross_entropy_by_pieces_with_replicas_matches_a_gathered_kernel(mesh, replicas, names, check_vma):
    communication = Communication(replicas=replicas)
    (got, *_, pieces), (want, *_, gathered) = (
        on_devices(mesh, check_vma, names, communication, whole=whole)(*example()) for whole in (False, True)
    )
    assert_allclose(got, want, rtol=1e-6)
    close(pieces, gathered, 1e-2 if replicas and replicas.reduce_dtype else 2e-6)


@pytest.mark.parametrize("dim", [0, 1])
def test_scattered_gradient_of_a_piece_is_the_part_of_the_mean_over_devices_by_which_the_shard_grows(mesh, dim):
    local = normal(1, (8, 16, 16))  # of each device
    pieces = Pieces(1, (16, 64), 8 if dim else 64, dim=dim, axes=BATCH)
    shard = PrimalType((16, 8) if dim else (2, 64), np.float32, frozenset(BATCH), False)
    run = on_mesh(lambda g: pieces.scatter_gradient(g[0], shard), mesh, True, P(BATCH), P(*[None] * dim, BATCH))
    assert_allclose(run(local), local.mean(0), rtol=1e-5, atol=1e-6)


def test_positions_in_a_large_vocabulary_are_counted_in_32_bits():
    pieces = Pieces(0, (100_000, 4), 100_000)
    assert pieces.entries(7, 90_000, jnp.array([3, 40_000, 70_000])).tolist() == [10, 40_007, 70_007]
    assert pieces.entries(7, 3).tolist() == [7, 8, 9]


def test_cross_entropy_by_pieces_takes_the_first_of_equal_logits_as_likeliest(mesh):
    """The first of several equal logits wins, although a later piece may contain earlier entries."""
    hidden, kernel, _ = example()
    labels = jnp.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % VOCAB
    for likeliest in (0, 7, 11):
        tied = jnp.zeros_like(kernel).at[:, likeliest:].set(1.0)
        found = on_devices(mesh, True, (None, BATCH))(jnp.ones_like(hidden), tied, labels)
        assert_array_equal(found[1], labels == likeliest)


def test_cross_entropy_by_pieces_ignores_negative_labels_and_gives_nan_beyond_the_vocabulary(mesh):
    hidden, kernel, labels = example()
    labels = labels.at[3, 0].set(VOCAB).at[4, 0].set(-1)
    run = on_mesh(
        lambda hidden, shard, labels: chunked_cross_entropy(
            hidden, Sharded(shard, (None, BATCH)), labels, chunk_size=16
        ),
        mesh,
        True,
        (P(BATCH), P(None, BATCH), P(BATCH)),
        P(BATCH),
    )
    found, want = run(hidden, kernel, labels), chunked_cross_entropy(hidden, kernel, labels)
    assert_allclose(found.loss, want.loss, rtol=1e-5, atol=1e-6)
    assert np.isnan(found.loss[3, 0]) and found.loss[4, 0] == 0 and np.isnan(found.loss).sum() == 1


def test_padding_of_a_head_kernel_has_no_probability(mesh):
    hidden, kernel, labels = example(37)

    def losses(hidden, shard, labels):
        box = Sharded(shard, (None, BATCH), store=ZeroPadding((None, 37)))
        return chunked_cross_entropy(hidden, box, labels, chunk_size=16).loss

    run = on_mesh(losses, mesh, True, (P(BATCH), P(None, BATCH), P(BATCH)), P(BATCH))
    got = run(hidden, jnp.pad(kernel, ((0, 0), (0, 3))), labels)
    want = jax.jit(chunked_cross_entropy)(hidden, kernel, labels).loss
    assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert np.exp(-want[want > 0]).max() > 1 / 37  # guard: three entries with logit 0 would change losses


def test_losses_of_a_padded_kernel_in_pieces_equal_numpy():
    """Two devices with 3 of 5 entries and one of padding read entries 0, 1, 3, 4, and then 2 and the padding.

    Logits of entries 2 and 3 are equal in some rows, where entry 2 of the later piece comes first, and of entries 1 and
    2 in the last row. In the row before, entry 2 is largest.
    """
    mesh = DeviceMeshManager.create_device_mesh({"x": 2}, devices=jax.devices()[:2])
    kernel = np.array([[0.5, -1, 2, 2, 1, 0], [0, 1, 3, 1, 0, 0]], np.float32)
    hidden = np.array([[1, 0], [1, 0], [1, 0], [1, 0], [0, 1], [-1, 1.5]], np.float32)
    labels = np.array([0, 2, 3, -100, 2, 1], np.int32)

    def losses(hidden, shard, labels):
        return chunked_cross_entropy(
            hidden, Sharded(shard, (None, "x"), store=ZeroPadding((None, 5))), labels, chunk_size=4
        )

    found = on_mesh(losses, mesh, True, (P("x"), P(None, "x"), P("x")), P("x"))(hidden, kernel, labels)
    logits = (hidden @ kernel)[:, :5]
    want = np.log(np.exp(logits).sum(1)) - logits[np.arange(6), labels.clip(0)]
    assert_allclose(found.loss, np.where(labels < 0, 0, want), rtol=1e-6)
    assert found.correct.tolist() == [False, True, False, False, True, True]


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("names", [(None, BATCH), (BATCH, None)], ids=str)
@pytest.mark.parametrize("replicas", [None, Replicas("x")], ids=["two axes", "copies"])
def test_padding_of_a_head_kernel_has_zero_gradient_for_a_nonfinite_loss(mesh, replicas, names, check_vma):
    """Padding has gradient 0 for a loss that is not finite; else the padding would stay NaN after a restore."""
    hidden, kernel, labels = example(37)
    along, axes = names.index(None) ^ 1, "y" if replicas else BATCH
    stored = 40
    kernel = jnp.pad(kernel, ((0, 0), (0, stored - 37)))
    kernel, vocab_dim = (kernel, 1) if along else (kernel.T, 0)
    names = tuple(axes if name else None for name in names)

    def run(hidden, shard, labels):
        def loss(shard):
            sizes = tuple(37 if dim == along else None for dim in (0, 1))
            box = Sharded(shard, names, communication=Communication(replicas=replicas), store=ZeroPadding(sizes))
            return weighted_loss(hidden, box, labels, chunk_size=16, vocab_dim=vocab_dim)[0]

        return jax.grad(loss)(shard)

    grads = on_mesh(run, mesh, check_vma, (P(BATCH), P(*names), P(BATCH)), P(*names))
    for bad in (jnp.nan, jnp.inf):
        found = np.moveaxis(grads(hidden.at[1, 2, 3].set(bad), kernel, labels), along, 0)
        assert_array_equal(found[37:], 0)
        assert np.isnan(found[:37]).any()  # guard


def test_gradient_of_padding_is_zero_where_the_gradient_of_entries_is_nan():
    mesh = DeviceMeshManager.create_device_mesh({"x": 2}, devices=jax.devices()[:2])
    pieces = Pieces(1, (1, 5), 3, dim=1, axes=("x",))
    found = on_mesh(pieces.without_padding, mesh, True, P(None, "x"), P(None, "x"))(np.full((1, 6), np.nan, np.float32))
    assert np.isnan(found[0, :5]).all() and found[0, 5] == 0


# ------------------------------------------------------------------------------------------------------------ the head


class Model(nn.Module):
    """Embedding, dense layer, head."""

    wrap: object = lambda module: module
    vocab: int = VOCAB
    dim: int = DIM
    by_pieces: bool = True
    remat: bool = False

    @nn.compact
    def __call__(self, batch):
        tokens, labels = batch[:, :-1], batch[:, 1:]
        x = nn.tanh(
            self.wrap(nn.Dense)(self.dim, name="dense")(self.wrap(nn.Embed)(self.vocab, self.dim, name="embed")(tokens))
        )
        head = nn.remat(self.wrap(LMHead), methods=["losses"]) if self.remat else self.wrap(LMHead)
        return head(self.vocab, chunk_size=16, by_pieces=self.by_pieces, name="head").losses(x, labels=labels).loss


def model_loss(params, apply_fn, batch, rng=None):
    return apply_fn({"params": params}, batch).mean()


def batch_of(vocab, rows=ROWS):
    return integers(1, (rows, LENGTH + 1), 0, vocab)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "vocab, changes",
    [
        (VOCAB, {}),
        (VOCAB, {"wrap": partial(fsdp, axis_name=BATCH, replicas=None, reshard_after_forward=True)}),
        (VOCAB, {"remat": True}),
        (37, {}),
        (37, {"dim": 18, "wrap": partial(fsdp, axis_name="y", uneven="pad", replicas=Replicas("x"))}),
    ],
    ids=["vocabulary", "gathered again", "recomputed", "features", "padding and copies"],
)
def test_model_with_lm_head_by_pieces_has_the_gradients_of_a_single_device(mesh, vocab, changes, check_vma):
    plain = Model(vocab=vocab, dim=changes.get("dim", DIM))
    model = Model(**({"vocab": vocab, "wrap": partial(fsdp, axis_name=BATCH)} | changes))
    params = gradients_are_those_of_one_device(
        model, plain, model_loss, mesh, BATCH, batch_of(vocab), check_vma=check_vma
    )
    split = params["head"]["kernel"]
    assert split.axes and (split.names[0] is None) == (vocab == VOCAB or not split.stores_value)
    assert (not split.stores_value) == ("dim" in changes)  # guard


@pytest.mark.parametrize("names", [(None, BATCH), (BATCH, None)], ids=str)
@pytest.mark.parametrize("trainable", [True, False], ids=["trained", "frozen"])
def test_cross_entropy_by_pieces_allocates_no_array_of_the_kernel_size(mesh, trainable, names):
    """The largest array is a piece, its gradient, or its logits; a frozen kernel needs no scatter."""
    hidden, kernel, labels = example(480)

    def run(hidden, shard, labels, *, whole):
        def loss(hidden, shard):
            box = Sharded(shard, names, trainable=trainable)
            return weighted_loss(hidden, jnp.asarray(box) if whole else box, labels, chunk_size=16)[0]

        return jax.grad(loss, argnums=(0, 1))(hidden, shard)

    split = P(*names)
    largest, scatters = {}, {}
    for whole in (False, True):
        step = on_mesh(partial(run, whole=whole), mesh, True, (P(BATCH), split, P(BATCH)), (P(BATCH), split))
        text = step.lower(hidden, kernel, labels).compile().as_text()
        shapes = re.findall(r"[a-z]+\d+\[([\d,]+)\]", text)
        largest[whole] = max(math.prod(map(int, shape.split(","))) for shape in shapes)
        scatters[whole] = len(re.findall(r" reduce-scatter(?:-start)?\(", text))
    assert largest[False] <= max(DIM * 16, kernel.size // 8)
    assert largest[True] == kernel.size  # guard
    assert [bool(scatters[whole]) for whole in (False, True)] == [trainable, trainable]


class Doubled(LMHead):
    """Head with doubled losses."""

    def losses(self, hidden, labels):
        found = super().losses(hidden, labels)
        return found._replace(loss=2 * found.loss)


@pytest.mark.parametrize(
    "wrap",
    [fsdp, lambda cls, **options: shard_modules(cls, LMHead, "y", 32)],
    ids=["class", "model"],
)
def test_lm_head_subclass_with_custom_losses_uses_the_gathered_kernel(mesh, wrap):
    hidden, _, labels = example()
    head = wrap(Doubled, axis_name="y")(VOCAB, by_pieces=True)
    params = init_sharded(head, mesh, jax.random.key(0), hidden, batch_axes=BATCH)
    specs = nn.get_partition_spec(params)
    assert specs["params"]["kernel"] == P(None, "y")  # guard: the kernel is split
    run = on_mesh(partial(head.apply, method="losses"), mesh, True, (specs, P(BATCH), P(BATCH)), P(BATCH))
    of_one_device = LMHead(VOCAB)
    want = of_one_device.apply(of_one_device.init(jax.random.key(0), hidden), hidden, labels, method="losses").loss
    assert_allclose(run(params, hidden, labels).loss, 2 * want, rtol=1e-5, atol=1e-6)


class Scaled(LMHead):
    """Head with doubled logits and an additional method."""

    def scores(self, hidden, labels):
        return -self.losses(hidden, labels).loss

    @nn.compact
    def _operands(self, hidden):
        hidden, kernel = super()._operands(hidden)
        return 2 * hidden, kernel


@pytest.mark.parametrize("by_pieces", [False, True])
def test_lm_head_subclass_gathers_the_kernel_for_overridden_and_new_methods(mesh, by_pieces):
    hidden, _, labels = example()
    params = LMHead(VOCAB).init(jax.random.key(0), hidden)
    head = fsdp(Scaled, axis_name="y")(VOCAB, by_pieces=by_pieces)
    split = init_sharded(head, mesh, jax.random.key(0), hidden, batch_axes=BATCH)
    specs = nn.get_partition_spec(split), P(BATCH), P(BATCH)
    want = LMHead(VOCAB).apply(params, 2 * hidden, labels, method="losses").loss
    for method, sign in {"losses": 1, "scores": -1}.items():
        run = on_mesh(lambda *args, method=method: head.apply(*args, method=method), mesh, True, specs, P(BATCH))
        found = run(split, hidden, labels)
        assert_allclose(getattr(found, "loss", found), sign * want, rtol=1e-5, atol=1e-5)


class Files(nn.Dense):
    """A user's layer with a method named like a method of the library."""

    @classmethod
    def from_shards(cls, files):
        raise AssertionError


def test_user_layer_with_a_method_named_from_shards_gathers_the_kernel_as_usual(mesh):
    layer, x = fsdp(Files, axis_name="y")(32), jnp.ones((ROWS, DIM))
    params = init_sharded(layer, mesh, jax.random.key(0), x, batch_axes=BATCH)
    run = on_mesh(layer.apply, mesh, True, (nn.get_partition_spec(params), P(BATCH)), P(BATCH))
    want = nn.Dense(32).apply(nn.Dense(32).init(jax.random.key(0), x), x)
    assert_allclose(run(params, x), want, rtol=1e-6)


def test_lm_head_by_pieces_raises_for_a_kernel_of_another_vocabulary_size(mesh):
    hidden, _, labels = example()
    head, other = (fsdp(LMHead, axis_name="y")(size, by_pieces=True) for size in (VOCAB, VOCAB + 16))
    params = init_sharded(head, mesh, jax.random.key(0), hidden, batch_axes=BATCH)
    specs = nn.get_partition_spec(params), P(BATCH), P(BATCH)
    run = on_mesh(partial(other.apply, method="losses"), mesh, True, specs, P(BATCH))
    with pytest.raises(ScopeParamShapeError, match=r"\(16, 64\)"):
        run(params, hidden, labels)


def from_outside(**options):
    return shard_modules(Model(**options), (nn.Embed, nn.Dense, LMHead), BATCH, 32)


@pytest.mark.parametrize("check_vma", [True, False])
def test_lm_head_by_pieces_under_shard_modules_trains_in_minibatches(mesh, check_vma):
    """Minibatches with a scatter each train a head sharded from outside as on one device."""
    plain, batch = Model(), batch_of(VOCAB, rows=32)
    start = jax.jit(plain.init)(jax.random.key(0), batch)["params"]
    state = create_train_state(from_outside(), KEPT, mesh, jax.random.key(0), batch, batch_axes=BATCH)
    step = make_train_step(model_loss, mesh, BATCH, num_minibatches=2, check_vma=check_vma)
    grads = step(state, batch, jax.random.key(0))[0].opt_state
    assert_same_params(grads, train_on_one_device(plain, KEPT, start, model_loss, batch)[1])


@pytest.mark.parametrize(
    "make",
    [
        from_outside,
        partial(Model, partial(fsdp, axis_name=BATCH)),
        partial(Model, partial(fsdp, axis_name=BATCH), remat=True),
    ],
    ids=["from outside", "in its source", "recomputed"],
)
def test_lm_head_by_pieces_lowers_without_a_gather_of_the_full_kernel(mesh, make):
    def sizes_gathered(**options):
        batch = batch_of(VOCAB)
        state = create_train_state(make(**options), KEPT, mesh, jax.random.key(0), batch, batch_axes=BATCH)
        text = make_train_step(model_loss, mesh, BATCH).lower(state, batch, jax.random.key(0)).as_text()
        found = re.findall(r"all_gather.*-> tensor<((?:\d+x)+)f32>", text)
        return [math.prod(map(int, shape[:-1].split("x"))) for shape in found]

    pieces, whole = sizes_gathered(), sizes_gathered(by_pieces=False)
    assert DIM * VOCAB in whole and DIM * VOCAB not in pieces
    assert pieces.count(DIM * 16) >= whole.count(DIM * 16) + 2  # in forward and in backward


@pytest.mark.parametrize("make", [from_outside, partial(Model, partial(fsdp, axis_name=BATCH))], ids=["outside", "own"])
@pytest.mark.parametrize("vocab, entries", [(VOCAB, 16), (37, 16), (8, 8)], ids=["vocabulary", "features", "one piece"])
def test_plan_lists_piece_bytes_of_an_lm_head_by_pieces(mesh, make, vocab, entries):
    rows = {}
    for by_pieces in (False, True):
        plan = plan_sharding(make(vocab=vocab, by_pieces=by_pieces), dict(mesh.shape), batch_of(vocab))
        rows[by_pieces] = plan.row("head/kernel")
    assert rows[True].dims == ((1,) if vocab == VOCAB else (0,))
    assert (rows[False].piece_bytes, rows[True].piece_bytes) == (0, DIM * entries * 4)
    assert f"pieces of {format_bytes(DIM * entries * 4)}" in rows[True].sentence(8)
    assert "pieces" not in rows[False].sentence(8) and "at a time" in str(plan)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda cls, **options: fsdp(cls, **options, gather_dtype="int8"),
        lambda cls, **options: fsdp(Scaled if cls is LMHead else cls, **options),
    ],
    ids=["blocks", "losses of its own"],
)
def test_plan_lists_no_piece_bytes_for_a_kernel_gathered_in_full(mesh, wrap):
    model = Model(partial(wrap, axis_name=BATCH))
    row = plan_sharding(model, dict(mesh.shape), batch_of(VOCAB)).row("head/kernel")
    assert row.uses and not row.piece_bytes


# ---------------------------------------------------------------------------------------------------- unsharded kernels


def in_a_branch(losses):
    return lambda hidden, box, labels: jax.lax.cond(labels[0, 0] >= 0, losses, losses, hidden, box, labels)


def for_each_row(losses):
    return lambda hidden, box, labels: jax.vmap(lambda *row: losses(row[0], box, row[1]))(hidden, labels)


@pytest.mark.parametrize(
    "around, fields",
    [
        (lambda losses: losses, {"communication": Communication("int8")}),
        (lambda losses: losses, {"model_axes": ("y",), "read_as_stored": True}),
        (lambda losses: losses, {"store": ZeroPadding((DIM - 1, None)), "names": (BATCH, None)}),
        (in_a_branch, {}),
        (for_each_row, {}),
    ],
    ids=["blocks", "an axis of the model", "padded features", "a branch", "examples by themselves"],
)
def test_cross_entropy_gathers_the_full_kernel_where_pieces_are_unsupported(mesh, around, fields):
    """The program without pieces is the program of a gathered kernel."""
    fields = {"names": (None, BATCH)} | fields

    def run(hidden, shard, labels, *, whole):
        box = Sharded(shard, **fields)
        width = box.shape[0]

        def losses(hidden, box, labels):
            read = jnp.asarray(box) if whole else box
            return chunked_cross_entropy(hidden, read, labels, chunk_size=16).loss

        return around(losses)(hidden[..., :width], box, labels)

    def program(whole):
        specs = P(BATCH), P(*fields["names"]), P(BATCH)
        return on_mesh(partial(run, whole=whole), mesh, True, specs, P(BATCH)).lower(*example()).as_text()

    assert program(whole=False) == program(whole=True)
    assert "dot_general" in program(whole=True)


def test_chunked_cross_entropy_outside_shard_map_treats_a_sharded_box_as_global():
    hidden, kernel, labels = example()
    found = chunked_cross_entropy(hidden, Sharded(kernel, (None, BATCH)), labels, chunk_size=16)
    assert_array_equal(found.loss, chunked_cross_entropy(hidden, kernel, labels, chunk_size=16).loss)


def test_jax_grad_inside_a_loss_raises_for_a_kernel_by_pieces(mesh):
    """``jax.grad`` inside a loss raises: it would average the kernel's gradient, but no replicated leaf's."""
    model = Model(partial(fsdp, axis_name=BATCH))
    batch = batch_of(VOCAB)
    state = create_train_state(model, KEPT, mesh, jax.random.key(0), batch, batch_axes=BATCH)

    def loss(params, apply_fn, batch, rng):
        return jax.grad(model_loss)(params, apply_fn, batch)["dense"]["bias"].sum()

    with pytest.raises(ValueError, match=r"'head/kernel', of shape .* is taken in a loss function"):
        make_train_step(loss, mesh, BATCH)(state, batch, jax.random.key(0))
