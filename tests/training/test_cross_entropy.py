"""Tests of chunked losses: equal to losses of all logits at once, in every transformation, with smaller arrays."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from tests.support import AXES, assert_each_leaf, assert_same_params, equations, fsdp, integers, mesh_of, on_mesh
from xlstm_jax.distributed import DeviceMeshManager, init_sharded, value_and_grad
from xlstm_jax.distributed.training.cross_entropy import LMHead, TokenLosses, chunked_cross_entropy

VOCAB, DIM = 37, 16
ROUNDING = {jnp.float32: 2e-6, jnp.bfloat16: 2e-2, jnp.float64: 1e-13}


def example(batch=8, length=6, dtype=jnp.float32, vocab=VOCAB):
    """Returns hidden [b, t, d], kernel [d, V], labels [b, t]; rows differ in scale, so shares differ from the mean."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = (
        jax.random.normal(keys[0], (batch, length, DIM), dtype) * (1 + jnp.arange(batch, dtype=dtype))[:, None, None]
    )
    kernel = jax.random.normal(keys[1], (DIM, vocab), dtype) / 4
    return hidden, kernel, jax.random.randint(keys[2], (batch, length), 0, vocab)


def all_logits(hidden, kernel, labels):
    """Reference: optax on all logits, in float32 or wider."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum("...d,dv->...v", hidden, kernel, preferred_element_type=wide)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return TokenLosses(losses, jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == labels)


def weighted(losses_of):
    """Returns a scalar loss with a different weight for every token and both differentiable outputs."""

    def loss(hidden, kernel, labels, **options):
        found = losses_of(hidden, kernel, labels, **options)
        weight = jnp.linspace(0.5, 2.0, labels.size).reshape(labels.shape).astype(found.loss.dtype)
        return jnp.sum(found.loss * weight) + 0.1 * jnp.sum(found.log_normalizer**2 * weight)

    return loss


def gradients(losses_of, *arrays):
    """Returns the gradients of hidden and kernel."""
    return jax.jit(jax.grad(weighted(losses_of), argnums=(0, 1)))(*arrays)


def close(got, want, tolerance):
    """Asserts equality within ``tolerance`` of the largest entry."""
    assert got.dtype == want.dtype
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


# ---------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "dtype, chunk_size",
    [(jnp.float32, 1), (jnp.float32, 8), (jnp.float32, 37), (jnp.float32, 4096), (jnp.bfloat16, 8), (jnp.float64, 8)],
    ids=lambda value: str(value) if isinstance(value, int) else jnp.dtype(value).name,
)
def test_chunked_cross_entropy_matches_losses_and_gradients_of_full_logits(dtype, chunk_size):
    with jax.enable_x64(dtype == jnp.float64):
        arrays = example(dtype=dtype)
        got = jax.jit(partial(chunked_cross_entropy, chunk_size=chunk_size))(*arrays)
        want = all_logits(*arrays)
        assert got.loss.dtype == jnp.promote_types(dtype, jnp.float32)
        close(got.loss, want.loss, min(ROUNDING[dtype], 2e-6))  # logits are in float32, also of bfloat16
        close(got.log_normalizer, want.log_normalizer, min(ROUNDING[dtype], 2e-6))
        assert_array_equal(got.correct, want.correct)
        assert 0 < got.correct.sum() < got.correct.size  # guard: some are right and some are wrong
        grads = gradients(partial(chunked_cross_entropy, chunk_size=chunk_size), *arrays)
        for g, w in zip(grads, gradients(all_logits, *arrays), strict=True):
            close(g, w, ROUNDING[dtype])


def test_gradient_of_a_bfloat16_head_kernel_is_summed_in_float32():
    """A bfloat16 kernel's gradient differs from float64 by one rounding of the result and averaged factor roundings."""
    hidden, kernel, labels = example(batch=512, dtype=jnp.bfloat16)

    def mean(losses_of):
        return lambda kernel, hidden: losses_of(hidden, kernel, labels).loss.mean()

    with jax.enable_x64(True):
        wide = kernel.astype(jnp.float64), hidden.astype(jnp.float64)
        want = np.asarray(jax.jit(jax.grad(mean(all_logits)))(*wide))
    gradient = jax.grad(mean(partial(chunked_cross_entropy, chunk_size=8)))
    got = jax.jit(gradient)(kernel, hidden)
    # CPUs always sum in float32; the program shows the dtype that other backends use.
    products = [eqn for _, eqn in equations(jax.make_jaxpr(gradient)(kernel, hidden)) if "dot" in eqn.primitive.name]
    assert len(products) > 2 and {str(eqn.outvars[0].aval.dtype) for eqn in products} == {"float32"}
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error < 2**-8  # a bfloat16 sum over 3072 tokens would err several times more


def test_products_of_the_gradient_of_a_bfloat16_head_kernel_are_float32():
    hidden, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(4, 2), (2, 5)])

    def mean(kernel, hidden):
        return chunked_cross_entropy(hidden, kernel, np.zeros(4, np.int32), chunk_size=2).loss.mean()

    program = jax.make_jaxpr(jax.grad(mean))(kernel, hidden)
    products = [eqn for _, eqn in equations(program) if eqn.primitive.name == "dot_general"]
    assert len(products) > 2 and {eqn.outvars[0].aval.dtype.name for eqn in products} == {"float32"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)], ids=str)
def test_chunked_cross_entropy_accepts_any_leading_dims(shape):
    hidden, kernel, labels = example(batch=4)
    count = int(np.prod(shape))
    hidden, labels = hidden.reshape(-1, DIM)[:count].reshape(*shape, DIM), labels.ravel()[:count].reshape(shape)
    grads = gradients(partial(chunked_cross_entropy, chunk_size=8), hidden, kernel, labels)
    for g, w in zip(grads, gradients(all_logits, hidden, kernel, labels), strict=True):
        close(g, w, 2e-6)


def test_chunked_cross_entropy_accepts_a_table_with_vocab_dim_0():
    hidden, kernel, labels = example()
    options = {"chunk_size": 8}
    want = gradients(partial(chunked_cross_entropy, **options), hidden, kernel, labels)
    got = gradients(partial(chunked_cross_entropy, vocab_dim=0, **options), hidden, kernel.T, labels)
    close(got[0], want[0], 2e-6)
    close(got[1], want[1].T, 2e-6)


@pytest.mark.parametrize("of_hidden", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("of_kernel", [jnp.bfloat16, jnp.float32])
def test_chunked_cross_entropy_gradients_have_the_dtypes_of_the_inputs(of_hidden, of_kernel):
    arrays = jax.ShapeDtypeStruct((5, DIM), of_hidden), jax.ShapeDtypeStruct((DIM, VOCAB), of_kernel)
    labels = np.zeros(5, np.int32)
    found = lambda hidden, kernel: chunked_cross_entropy(hidden, kernel, labels, chunk_size=8)  # noqa: E731
    assert {x.dtype for x in jax.eval_shape(found, *arrays)[:2]} == {jnp.dtype(jnp.float32)}
    grads = jax.eval_shape(jax.grad(lambda *arrays: found(*arrays).loss.sum(), (0, 1)), *arrays)
    assert [grad.dtype for grad in grads] == [of_hidden, of_kernel]


def test_chunked_cross_entropy_takes_the_first_of_equal_logits_as_likeliest():
    hidden, kernel, _ = example()
    labels = jnp.zeros(hidden.shape[:-1], jnp.int32).at[0, 0].set(9)
    found = jax.jit(partial(chunked_cross_entropy, chunk_size=8))(hidden, 0 * kernel, labels)
    assert_array_equal(~found.correct, np.arange(48).reshape(8, 6) == 0)
    assert_allclose(found.loss, np.log(VOCAB), rtol=1e-6)


@pytest.mark.parametrize("vocab_dim", [0, 1])
def test_losses_by_hand_of_labels_at_the_borders_of_chunks_and_of_the_vocabulary(vocab_dim):
    """Five entries in chunks of two; the hidden states are bfloat16, and the kernel has bits that bfloat16 has not."""
    hidden = np.array([[1, 0, 2], [0, 1, 0], [3, 1, 1], [300, 0, 0], [1, 1, 1], [0, 1, 0]], np.float32)
    kernel = np.array([[1, -1, 0, 2, 1], [0, 3, 1, 3, 2], [1, 0, 0, 1, 2]], np.float32) * (1 + 2.0**-10)
    labels = np.array([4, 1, -1, 3, 5, 3], np.int8)
    logits = hidden @ kernel
    normalizer = logits.max(-1) + np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))
    find = jax.jit(partial(chunked_cross_entropy, chunk_size=2, vocab_dim=vocab_dim))
    found = find(hidden.astype(jnp.bfloat16), kernel if vocab_dim else kernel.T, labels)
    want = normalizer - np.take_along_axis(logits, np.clip(labels, 0, 4)[:, None], 1)[:, 0]
    assert_allclose(found.loss, np.where(labels < 0, 0, np.where(labels > 4, np.nan, want)), rtol=1e-6, atol=1e-6)
    assert_allclose(found.log_normalizer, np.where(labels < 0, 0, normalizer), rtol=1e-6)
    # Entries 1 and 3 are equally likely for the second token: the first counts.
    assert found.correct.tolist() == [True, True, False, True, False, False]


def test_losses_over_three_parts_of_the_vocabulary_equal_those_of_the_unsplit_kernel():
    """Labels are in each part, at the borders, negative, and beyond the last; logits of two parts are equal."""
    mesh = DeviceMeshManager.create_device_mesh({"tp": 3}, devices=jax.devices()[:3])
    hidden = np.array([[1, 0, 2], [0, 1, 0], [3, 1, 1], [90, 0, 0], [1, 1, 1], [0, 1, 0], [0, 1, 0]], np.float32)
    kernel = np.array([[1, -1, 0, 2, 1, -1], [0, 3, 1, 3, 2, 3], [1, 0, 0, 1, 2, 0]], np.float32)
    labels = np.array([4, 1, -1, 3, 6, 3, 5], np.int8)

    def losses(kernel, vocab_axis=None):
        return chunked_cross_entropy(hidden, kernel, labels, chunk_size=3, vocab_axis=vocab_axis)

    def both(kernel):
        split = jax.shard_map(
            lambda kernel: losses(kernel, "tp"),
            mesh=mesh,
            in_specs=PartitionSpec(None, "tp"),
            out_specs=PartitionSpec(),
        )
        found = []
        for fn in (split, losses):
            of_tokens, backward = jax.vjp(fn, kernel)
            weights = jnp.where(labels < 6, jnp.arange(7.0), 0)
            zeros = jnp.zeros(7), np.zeros(7, jax.dtypes.float0)
            found.append((of_tokens, *backward(TokenLosses(weights, *zeros))))
        return found

    (got, got_grad), (want, want_grad) = jax.jit(both)(kernel)
    assert_each_leaf(partial(assert_allclose, rtol=1e-6), got, want)
    assert got.correct.tolist() == want.correct.tolist() == [True, True, False, True, False, False, False]
    assert_allclose(got_grad, want_grad, rtol=1e-5, atol=1e-6)


def test_chunked_cross_entropy_of_large_logits_does_not_overflow():
    hidden, kernel, labels = example()
    got = chunked_cross_entropy(1e4 * hidden, kernel, labels, chunk_size=8)
    assert_allclose(got.loss, all_logits(1e4 * hidden, kernel, labels).loss, rtol=1e-5, atol=1e-1)


# --------------------------------------------------------------------------------------------------------------- labels


def test_negative_labels_have_zero_loss_and_zero_gradient():
    hidden, kernel, labels = example()
    ignored = labels.at[::2].set(-100)
    grads = gradients(partial(chunked_cross_entropy, chunk_size=8), hidden, kernel, ignored)
    found = chunked_cross_entropy(hidden, kernel, ignored, chunk_size=8)
    for value in found:
        assert not np.any(value[::2])
    assert_allclose(found.loss[1::2], all_logits(hidden, kernel, labels).loss[1::2], rtol=1e-5)
    assert not np.any(grads[0][::2]) and np.all(np.any(grads[0][1::2], axis=-1))

    def of_the_others(hidden, kernel, labels):
        return jax.tree.map(lambda x: x.at[::2].set(jnp.zeros((), x.dtype)), all_logits(hidden, kernel, labels))

    close(grads[1], gradients(of_the_others, hidden, kernel, labels)[1], 2e-6)


def test_label_outside_the_vocabulary_gives_a_nan_loss():
    hidden, kernel, labels = example()
    found = chunked_cross_entropy(hidden, kernel, labels.at[1, 2].set(VOCAB), chunk_size=8)
    assert_array_equal(np.isnan(found.loss), np.arange(48).reshape(8, 6) == 8)


def test_chunked_cross_entropy_accepts_uint8_labels():
    hidden, kernel, labels = example(vocab=256)
    got = chunked_cross_entropy(hidden, kernel, labels.astype(jnp.uint8))
    assert_array_equal(got.loss, chunked_cross_entropy(hidden, kernel, labels).loss)


def test_uint8_labels_are_exact_for_a_vocabulary_larger_than_uint8():
    logits, labels = np.linspace(0, 3, 40_000, dtype=np.float32), np.array([3, 255], np.uint8)
    got = jax.jit(chunked_cross_entropy)(np.ones((2, 1), np.float32), logits[None], labels)
    assert_allclose(got.loss, np.log(np.exp(logits).sum(dtype=np.float64)) - logits[labels], rtol=1e-5)


# -------------------------------------------------------------------------------------------------------- in programs


def sizes_in(jaxpr):
    """Yields the size of every array in a jaxpr, nested jaxprs included."""
    for eqn in jaxpr.eqns:
        yield from (var.aval.size for var in eqn.outvars if hasattr(var.aval, "size"))
        for sub in jaxprs_in_params(eqn.params):
            yield from sizes_in(getattr(sub, "jaxpr", sub))


def test_chunked_cross_entropy_allocates_no_array_of_all_logits():
    hidden, kernel, labels = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in example(batch=64, vocab=1000))
    largest = {
        name: max(sizes_in(jax.make_jaxpr(jax.grad(weighted(losses_of), argnums=(0, 1)))(hidden, kernel, labels).jaxpr))
        for name, losses_of in {"all": all_logits, "chunked": partial(chunked_cross_entropy, chunk_size=50)}.items()
    }
    assert largest == {"all": 64 * 6 * 1000, "chunked": max(64 * 6 * 50, DIM * 1000)}


def scanned(losses_of):
    """Returns a function of the losses, computed row by row in a scan with a shared kernel."""

    def losses(hidden, kernel, labels, **options):
        return jax.lax.scan(
            lambda _, row: (None, losses_of(row[0], kernel, row[1], **options)), None, (hidden, labels)
        )[1]

    return losses


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "around", [jax.remat, scanned, lambda f: jax.vmap(f, in_axes=(0, None, 0))], ids=["remat", "scan", "vmap"]
)
def test_chunked_cross_entropy_has_exact_gradients_under_remat_scan_and_vmap(around):
    arrays = example()
    losses_of = around(partial(chunked_cross_entropy, chunk_size=8))
    got = gradients(losses_of, *arrays)
    for g, w in zip(got, gradients(all_logits, *arrays), strict=True):
        close(g, w, 2e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("varying", ["all", "hidden and labels", "kernel"])
def test_chunked_cross_entropy_in_shard_map_is_exact_with_replicated_inputs(varying, check_vma):
    """Gradients have the types of the inputs: the gradient of a replicated kernel is the sum over devices."""
    mesh, split = mesh_of(2, 2), PartitionSpec(AXES)
    hidden, kernel, labels = example()
    kernels = jnp.stack([kernel * (1 + i) for i in range(4)]) if varying != "hidden and labels" else kernel[None]
    hidden, labels = (hidden[:2], labels[:2]) if varying == "kernel" else (hidden, labels)
    specs = {"all": (split, split, split), "hidden and labels": (split, None, split), "kernel": (None, split, None)}
    specs = tuple(spec or PartitionSpec() for spec in specs[varying])

    def on_device(losses_of, hidden, kernel, labels):
        def loss(hidden, kernel):
            return jnp.sum(losses_of(hidden, kernel[0], labels).loss ** 2)

        grads = jax.grad(loss, argnums=(0, 1))(hidden, kernel)
        return jax.tree.map(lambda grad: grad[None], grads)

    got, want = (
        on_mesh(
            partial(on_device, losses_of),
            mesh,
            check_vma,
            specs,
            split
            if not check_vma
            else tuple(PartitionSpec(AXES) if spec != PartitionSpec() else PartitionSpec() for spec in specs[:2]),
        )(hidden, kernels, labels)
        for losses_of in (partial(chunked_cross_entropy, chunk_size=8), all_logits)
    )
    for g, w in zip(got, want, strict=True):
        assert np.any(w)
        close(g, w, 2e-6)


def test_chunked_cross_entropy_under_jit_keeps_the_sharding_of_tokens():
    mesh, arrays = mesh_of(1, 4), example()
    rows = jax.NamedSharding(mesh, PartitionSpec("fsdp"))
    placed = [jax.device_put(x, rows if x.shape[0] == 8 else jax.NamedSharding(mesh, PartitionSpec())) for x in arrays]
    got = jax.jit(partial(chunked_cross_entropy, chunk_size=8))(*placed)
    assert got.loss.sharding.is_equivalent_to(rows, 2)
    assert_allclose(got.loss, all_logits(*arrays).loss, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- the head


class Tied(nn.Embed):
    """An embedding whose table is also the head."""

    def losses(self, hidden, labels):
        return chunked_cross_entropy(hidden, self.embedding, labels, vocab_dim=0, chunk_size=8)


class Model(nn.Module):
    """Embedding, dense layer, head; the head may be the embedding."""

    wrap: object = lambda module: module
    tied: bool = False
    scan: bool = False
    head: type = partial(LMHead, chunk_size=8)

    @nn.compact
    def __call__(self, tokens, labels=None):
        embed = self.wrap(Tied if self.tied else nn.Embed)(64, DIM, name="embed")
        x = nn.tanh(self.wrap(nn.Dense)(DIM, name="dense")(embed(tokens)))
        head = embed if self.tied else self.wrap(self.head)(64, name="head")
        if labels is None:
            return embed.attend(x) if self.tied else head(x)
        return head.losses(x, labels)


def plain_loss(params, batch, model):
    logits = model.apply({"params": params}, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def test_lm_head_equals_nn_dense_in_names_values_and_logits():
    tokens = jnp.arange(12).reshape(2, 6)
    dense = partial(nn.Dense, use_bias=False)
    want, variables = (Model(head=head).init(jax.random.key(0), tokens) for head in (dense, LMHead))
    assert jax.tree.structure(want) == jax.tree.structure(variables)
    assert_each_leaf(assert_array_equal, want, variables)
    for dtype in (None, jnp.bfloat16):
        logits = [Model(head=partial(head, dtype=dtype)).apply(want, tokens) for head in (dense, LMHead)]
        assert logits[0].dtype == logits[1].dtype
        assert_array_equal(*logits)


def test_lm_head_initialised_with_labels_has_the_same_values():
    tokens = jnp.arange(12).reshape(2, 6)
    jax.tree.map(
        assert_array_equal,
        Model().init(jax.random.key(0), tokens),
        Model().init(jax.random.key(0), tokens, labels=tokens),
    )


# Half of all combinations: any two of the three options occur in all four combinations.
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "check_vma, gather_dtype, tied",
    [(True, None, False), (True, jnp.bfloat16, True), (False, None, True), (False, jnp.bfloat16, False)],
)
def test_sharded_lm_head_gradients_match_a_single_device(check_vma, gather_dtype, tied):
    mesh, batch = mesh_of(2, 4), integers(1, (16, 9), 0, 64)
    model = Model(fsdp(gather_dtype=gather_dtype), tied)
    plain = jax.jit(Model(tied=tied).init)(jax.random.key(0), batch)["params"]
    params = init_sharded(model, mesh, jax.random.key(0), batch, batch_axes=AXES)["params"]
    assert_same_params(params, plain, 0)
    specs = nn.get_partition_spec(params)

    def loss(params, batch):
        return model.apply({"params": params}, batch[:, :-1], batch[:, 1:]).loss.mean()

    step = on_mesh(value_and_grad(loss, AXES), mesh, check_vma, (specs, PartitionSpec(AXES)), (PartitionSpec(), specs))
    got, grads = step(params, batch)
    want, want_grads = jax.jit(jax.value_and_grad(plain_loss), static_argnums=2)(plain, batch, Model(tied=tied))
    assert_allclose(got, want, rtol=1e-5 if gather_dtype is None else 1e-2)
    assert_same_params(grads, want_grads, 1e-5 if gather_dtype is None else 5e-2)
    assert any(map(str, jax.tree.leaves(specs)))  # guard: something is split
    logits = on_mesh(
        lambda params, tokens: model.apply({"params": params}, tokens),
        mesh,
        check_vma,
        (specs, PartitionSpec(AXES)),
        PartitionSpec(AXES),
    )(params, batch)
    assert_allclose(
        logits, Model(tied=tied).apply({"params": plain}, batch), rtol=0, atol=1e-5 if gather_dtype is None else 0.1
    )
