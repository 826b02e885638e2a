"""Tests of ``create_nnx_module`` and ``nnx_value_and_grad``: a training script of NNX, sharded by three changed lines.

The reference is the same script on one device, with ``nnx.value_and_grad``, without the library.
"""

import contextlib
import dataclasses
import difflib
import enum
from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.nnx_models import Einsum
from tests.support import AXES, integers, mesh_of, normal, on_mesh
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_nnx_module,
    nnx_model,
    nnx_value_and_grad,
    shard_modules,
)
from xlstm_jax.distributed.metrics.cells import Count
from xlstm_jax.distributed.model_parallel import split_modules
from xlstm_jax.distributed.training import nnx_gradients

# As in Flax's guides: dropout is off, statistics change, and metrics read the logits.
PLAIN = """
import jax, jax.numpy as jnp, optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 512, rngs=rngs)
        self.norm = nnx.BatchNorm(512, rngs=rngs)
        self.head = nnx.Linear(512, 64, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.up(x))))

def loss_fn(net, batch):
    logits = net(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

net = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(net, optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)), wrt=nnx.Param)
metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

@nnx.jit
def train_step(net, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(net, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(net, grads)

batch = {
    "x": jax.random.normal(jax.random.key(1), (32, 64)) * (1 + jnp.arange(32) % 3)[:, None],
    "label": jax.random.randint(jax.random.key(2), (32,), 0, 64),
}
for _ in range(3):
    train_step(net, optimizer, metrics, batch)
found = {name: float(value) for name, value in metrics.compute().items()}
net.eval()
output = net(batch["x"])
"""
CHANGES = {
    "from flax import nnx\n": "from flax import nnx\nfrom xlstm_jax.distributed import *\n",
    "Net(nnx.Rngs(0))": "create_nnx_module(Net, 0)",
    "= nnx.value_and_grad(": "= nnx_value_and_grad(",
}


def meshes(kind):
    """Returns a context: no mesh, or a mesh that is set with axes of a type."""
    if kind == "no mesh":
        return contextlib.nullcontext()
    return jax.set_mesh(jax.make_mesh((8,), ("fsdp",), axis_types=(getattr(jax.sharding.AxisType, kind),)))


def values_of(net):
    state = nnx.state(net, nnx.Not(nnx.RngState))
    arrays = {path: getattr(leaf, "get_raw_value", lambda leaf=leaf: leaf)() for path, leaf in nnx.to_flat_state(state)}
    return {"/".join(map(str, path)): np.asarray(array) for path, array in arrays.items()}


def assert_same_values(got, want, rtol=1e-5):
    got, want = values_of(got), values_of(want)
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_allclose(got[path], value, rtol=rtol, atol=rtol * max(np.abs(value).max(), 0.1), err_msg=path)


@pytest.mark.parametrize("kind", ["no mesh", "Auto", "Explicit"])
def test_nnx_script_with_three_changed_lines_trains_as_on_one_device(kind):
    """Under ``jax.set_mesh`` the same script needs no other line."""
    changed = PLAIN
    for old, new in CHANGES.items():
        assert changed.count(old) == 1
        changed = changed.replace(old, new)
    lines = [line for line in difflib.ndiff(PLAIN.splitlines(), changed.splitlines()) if line.startswith("+ ")]
    assert len(lines) == 3
    want, got = {}, {}
    exec(PLAIN, want)
    with meshes(kind):
        exec(changed, got)
        got["output"] = np.asarray(got["output"])
    for name, value in want["found"].items():
        np.testing.assert_allclose(got["found"][name], value, rtol=1e-5, err_msg=name)
    assert_same_values(got["net"], want["net"])
    np.testing.assert_allclose(got["output"], want["output"], rtol=1e-4, atol=1e-5)
    # Guards: parameters and moments are split, statistics have moved, and devices differ.
    kernel = got["net"].up.kernel.get_raw_value()
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    moments = [
        leaf.get_raw_value() for _, leaf in nnx.to_flat_state(nnx.state(got["optimizer"], nnx.optimizer.OptVariable))
    ]
    assert any(m.size == kernel.size == 8 * m.addressable_shards[0].data.size for m in moments)
    assert np.abs(values_of(want["net"])["norm/mean"]).max() > 1e-3


# ------------------------------------------------------------------------------------------------ variables that change

WIDTH, VOCAB = 16, 32
# In Flax 0.12.8 the scales of nnx.WeightNorm are arrays and no parameters.
SCALES = flax.__version__ != "0.12.8"
TOKENS = integers(1, (16, 6), 0, VOCAB)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.statistics = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.statistics(jnp.tanh(self.linear(self.norm(x))))


class Normed(nnx.Module):
    """Layers under ``nnx.WeightNorm`` and ``nnx.SpectralNorm``, which write kernels; statistics in a scan."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Block)(rngs.split(2))
        self.weight = nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), use_scale=SCALES, rngs=rngs)
        self.spectral = nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        run = nnx.remat(lambda x, block: block(x))
        x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(self.embed(tokens), self.blocks)
        return self.head(x + jnp.tanh(self.weight(x)) + jnp.tanh(self.spectral(x, update_stats=True)))


def cross_entropy(net, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(net(tokens), jnp.roll(tokens, -1, 1)).mean()


def trained(net, value_and_grad, *batch, loss=cross_entropy, steps=2, wrt=nnx.Param):
    optimizer = nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=wrt)

    @nnx.jit
    def step(net, optimizer, *batch):
        value, grads = value_and_grad(loss)(net, *batch)
        optimizer.update(net, grads)
        return value

    return [step(net, optimizer, *batch) for _ in range(steps)]


@pytest.mark.parametrize("check_vma", [True, False])
def test_variables_that_the_module_changes_are_those_of_one_device(check_vma):
    plain = Normed(nnx.Rngs(0))
    start = values_of(plain)
    wanted = trained(plain, nnx.value_and_grad, TOKENS)
    where = lambda path, module: path in ("embed", "blocks", "head")  # noqa: E731
    net = create_nnx_module(shard_modules(nnx_model(Normed), where, "fsdp", 32), 0, TOKENS, mesh=mesh_of(2, 4))
    losses = trained(net, partial(nnx_value_and_grad, check_vma=check_vma), TOKENS)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_same_values(net, plain)
    after = values_of(plain)  # guards: scales, statistics and written kernels have changed
    for path in (*["weight/scales/('kernel',)"] * SCALES, "blocks/statistics/mean", "weight/layer_instance/kernel"):
        assert np.abs(after[path] - start[path]).max() > 1e-4, path


class Tagger(nnx.Module):
    """Recurrent layers in both directions, also by ``nnx.Bidirectional``, and sequences of different lengths."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.forward = nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs))
        self.backward = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs), reverse=True, keep_order=True)
        both = [nnx.RNN(nnx.LSTMCell(2 * WIDTH, WIDTH, rngs=rngs)) for _ in range(2)]
        self.both = nnx.Bidirectional(*both, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = jnp.concatenate([self.forward(x, seq_lengths=1 + tokens[:, 0] % tokens.shape[1]), self.backward(x)], -1)
        return self.head(self.both(x))


@pytest.mark.parametrize("check_vma", [True, False])
def test_recurrent_layers_in_both_directions_train_as_on_one_device(check_vma):
    plain = Tagger(nnx.Rngs(0))
    wanted = trained(plain, nnx.value_and_grad, TOKENS)
    net = create_nnx_module(shard_modules(nnx_model(Tagger), min_weight_size=32), 0, mesh=mesh_of(2, 4))
    losses = trained(net, partial(nnx_value_and_grad, check_vma=check_vma), TOKENS)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_same_values(net, plain)


@pytest.mark.parametrize("check_vma", [True, False])
def test_recurrent_cell_has_the_gradients_of_one_device(check_vma):
    """The carry of zeros varies over devices by its type, as the inputs do."""
    make = lambda rngs: nnx.RNN(nnx.SimpleCell(2, 8, rngs=rngs))  # noqa: E731
    loss = lambda net, x: jnp.mean(net(x) ** 2)  # noqa: E731
    x = normal(1, (8, 3, 2))
    plain, net = (
        make(nnx.Rngs(0)),
        create_nnx_module(shard_modules(nnx_model(make), min_weight_size=8), 0, mesh=mesh_of(1, 2)),
    )
    found, grads = nnx_value_and_grad(loss, check_vma=check_vma)(net, x)
    wanted, wanted_grads = nnx.value_and_grad(loss)(plain, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert_same_values(grads, wanted_grads)


def test_recurrent_cell_whose_inputs_vary_by_type_is_traced():
    """A carry of zeros, equal on all devices by its type, could not be that of a scan over these inputs."""
    net = nnx.eval_shape(lambda: nnx.RNN(nnx.SimpleCell(2, 8, rngs=nnx.Rngs(0))))
    grad = nnx_value_and_grad(lambda net, x: jnp.mean(net(x) ** 2), mesh=mesh_of(1, 2))
    loss, grads = nnx.eval_shape(grad, net, jax.ShapeDtypeStruct((8, 3, 2), jnp.float32))
    assert loss.shape == () and grads["cell"]["dense_h"]["kernel"].shape == (8, 8)


class Written(nnx.Module):
    """Statistics of the rows, and a kernel that each call writes."""

    def __init__(self, rngs):
        self.statistics = nnx.BatchNorm(4, rngs=rngs)
        self.weight = nnx.WeightNorm(nnx.Linear(4, 2, use_bias=False, rngs=rngs), use_scale=False, rngs=rngs)

    def __call__(self, x):
        return self.weight(self.statistics(x))


def test_statistics_and_written_kernels_after_a_call_are_those_of_one_device():
    x = normal(1, (8, 4)) * np.float32(1 + np.arange(8) % 3)[:, None]
    plain, net = Written(nnx.Rngs(0)), create_nnx_module(nnx_model(Written), 0, x, mesh=mesh_of(1, 2))
    start = values_of(plain)
    loss, _ = nnx_value_and_grad(lambda net, x: jnp.mean(net(x) ** 2))(net, x)
    np.testing.assert_allclose(loss, jnp.mean(plain(x) ** 2), rtol=1e-5)
    assert_same_values(net, plain)
    after = values_of(plain)
    for path in ("statistics/mean", "weight/layer_instance/kernel"):  # guards
        assert np.abs(after[path] - start[path]).max() > 1e-3, path


class Doubled(nnx.Module):
    """Normalises under a mask, and doubles its kernel in each call."""

    def __init__(self):
        self.norm = nnx.BatchNorm(1, momentum=0.0, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))
        self.kernel = nnx.Param(np.float32([1]))

    def __call__(self, x, mask):
        self.kernel[...] = 2 * self.kernel[...]
        return self.norm(x, mask=mask) * self.kernel[...]


def test_statistics_under_a_mask_and_a_written_kernel_are_those_of_all_devices():
    """The unmasked rows 1, 2 and 3 have the mean 2; the mean of the means of both devices is 2.25."""
    net, x, mask = Doubled(), np.float32([[1], [2], [3], [9]]), np.array([[True], [True], [True], [False]])
    loss = nnx_value_and_grad(lambda *args: jnp.sum(args[0](*args[1:]) ** 2), mesh=mesh_of(1, 2), batch_axes="fsdp")
    loss(net, x, mask)
    np.testing.assert_allclose([net.norm.mean[...][0], net.kernel[...][0]], [2, 2], rtol=1e-6)


@pytest.mark.parametrize("fast, check_vma", [(True, True), (False, False)])
def test_statistics_under_a_mask_are_those_of_the_unmasked_rows_of_all_devices(fast, check_vma):
    """Devices have 1, 3, 4 and 0 unmasked rows; loss, gradients and statistics are those of one device."""
    x = normal(1, (16, 3)) * np.float32(1 + np.arange(16) % 3)[:, None] + jnp.arange(16)[:, None] / 4
    mask = (jnp.arange(16) >= 3) & (jnp.arange(16) != 4) & (jnp.arange(16) < 12)
    make = lambda rngs: nnx.BatchNorm(3, use_fast_variance=fast, momentum=0.5, rngs=rngs)  # noqa: E731
    loss = lambda net, x, mask: jnp.mean(jnp.sin(net(x, mask=mask[:, None])) ** 2)  # noqa: E731
    plain, net = make(nnx.Rngs(0)), create_nnx_module(nnx_model(make), 0, mesh=mesh_of(1, 4))
    start = values_of(plain)
    wanted, of_one = nnx.value_and_grad(loss)(plain, x, mask)
    value, grads = nnx_value_and_grad(loss, check_vma=check_vma)(net, x, mask)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert_same_values(net, plain)
    for name in ("scale", "bias"):
        np.testing.assert_allclose(grads[name].get_raw_value(), of_one[name].get_raw_value(), rtol=1e-4, atol=1e-6)
    assert np.abs(values_of(plain)["mean"] - start["mean"]).max() > 0.1  # guards: statistics change,
    unlike = jnp.mean(x, 0), jnp.mean(x, 0, where=mask[:, None])  # and the masked rows are unlike the others
    assert np.abs(unlike[0] - unlike[1]).max() > 0.1


# ---------------------------------------------------------------------------- a decoder in the manner of examples/gemma


class Kind(enum.Enum):
    LOCAL, GLOBAL = 1, 2


@dataclasses.dataclass(frozen=True)
class Config:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    window: int = 3
    kinds: tuple = (Kind.LOCAL, Kind.GLOBAL)


class Attention(nnx.Module):
    """Grouped queries, norms of queries and keys, a window, a soft cap, sown scores, and a cache that is passed in."""

    def __init__(self, config, kind, *, rngs):
        self.config, self.kind = config, kind
        self.out = Einsum("BTNH,NHD->BTD", (config.heads, config.dim, WIDTH), rngs=rngs)
        self.q = Einsum("BTD,NDH->BTNH", (config.heads, WIDTH, config.dim), rngs=rngs)
        self.kv = Einsum("BSD,CKDH->CBSKH", (2, config.kv_heads, WIDTH, config.dim), rngs=rngs)
        self._norms = nnx.Dict(q=nnx.RMSNorm(config.dim, rngs=rngs), k=nnx.RMSNorm(config.dim, rngs=rngs))
        self.offset = nnx.data(jnp.ones(()))  # an array without a variable

    @property
    def dim(self):
        return self.out.shape[1]

    def __call__(self, x, positions, cache, mask):
        assert not hasattr(self, "qkv")
        q, (k, v) = self._norms["q"](self.q(x)), self.kv(x)
        q = q * jnp.cos(positions / 7)[..., None, None] * self.dim**-0.5
        k = self._norms["k"](k) * jnp.sin(positions / 5 + self.offset)[..., None, None]
        if cache is not None:
            k, v = (
                jax.lax.dynamic_update_slice(cache[name], new, (0, 0, 0, 0)) for name, new in {"k": k, "v": v}.items()
            )
            cache = {"k": k, "v": v, "end": cache["end"] + x.shape[1]}
        if self.kind is Kind.LOCAL:
            mask = mask * jnp.triu(jnp.ones_like(mask), 1 - self.config.window)
        q = q.reshape(*q.shape[:2], self.kv.shape[1], -1, self.dim)
        scores = jnp.einsum("BTKGH,BSKH->BTKGS", q, k)
        scores = jnp.where(mask[:, :, None, None], 50 * jnp.tanh(scores / 50), -2e38)
        self.sow(nnx.Intermediate, "largest", jax.lax.top_k(scores, 2)[0])
        mixed = jnp.einsum("BTKGS,BSKH->BTKGH", nnx.softmax(scores), v)
        return cache, self.out(mixed.reshape(*x.shape[:2], self.config.heads, self.dim))

    def init_cache(self, size, rows):
        shape = (rows, size, self.kv.shape[1], self.dim)
        return {"k": jnp.zeros(shape), "v": jnp.zeros(shape), "end": jnp.zeros(rows, jnp.int32)}


class Layer(nnx.Module):
    def __init__(self, config, kind, *, rngs):
        self.attn, self.norm = Attention(config, kind, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate, self.up, self.down = linear(WIDTH, 32), linear(WIDTH, 32), linear(32, WIDTH)

    def __call__(self, x, positions, cache, mask):
        cache, mixed = self.attn(x, positions, cache, mask)
        h = self.norm(x + mixed)
        return cache, x + mixed + self.down(nnx.gelu(self.gate(h)) * jnp.matmul(h, self.up.kernel))


class Embedder(nnx.Module):
    def __init__(self, *, rngs):
        self.table = nnx.Param(nnx.initializers.normal()(rngs.params(), (VOCAB, WIDTH)))

    def encode(self, tokens):
        return self.table[(tokens,)] * self.table.shape[-1] ** 0.5

    def decode(self, x):
        return jnp.dot(x, self.table[...].T)


class Decoder(nnx.Module):
    def __init__(self, config, *, rngs):
        self.embedder = Embedder(rngs=rngs)
        self.layers = nnx.List([Layer(config, kind, rngs=rngs) for kind in config.kinds])

    def __call__(self, tokens, positions, cache, mask):
        x, new = self.embedder.encode(tokens), {}
        for number, layer in enumerate(self.layers):
            new[number], x = layer(x, positions, None if cache is None else cache[number], mask)
        return 30 * jnp.tanh(self.embedder.decode(x) / 30), None if cache is None else new


def decoder_loss(net, tokens, positions, mask):
    logits, _ = net(tokens, positions, None, mask)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1)).mean()


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")  # as examples/gemma does
@pytest.mark.parametrize("where, check_vma", [((Layer, Embedder), True), ((Einsum, Embedder, nnx.Linear), False)])
def test_decoder_in_the_manner_of_gemma_trains_and_decodes_as_on_one_device(where, check_vma):
    length = TOKENS.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), TOKENS.shape)
    batch = TOKENS, positions, jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (16, length, length))
    make = partial(Decoder, Config())
    plain = make(rngs=nnx.Rngs(0))
    wanted = trained(plain, nnx.value_and_grad, *batch, loss=decoder_loss)
    model = shard_modules(nnx_model(lambda rngs: make(rngs=rngs)), where, "fsdp", 32)
    net = create_nnx_module(model, 0, mesh=mesh_of(2, 4))
    losses = trained(net, partial(nnx_value_and_grad, check_vma=check_vma), *batch, loss=decoder_loss)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    nnx.pop(plain, nnx.Intermediate)
    assert_same_values(net, plain)

    def decoded(net):
        cache = {number: layer.attn.init_cache(8, 16) for number, layer in enumerate(net.layers)}
        logits, cache = net(TOKENS, positions, cache, jnp.ones((16, length, 8), bool))
        return logits, cache[1]["end"]

    for got, want in zip(nnx.jit(decoded)(net), nnx.jit(decoded)(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    kernel = net.layers[0].up.kernel.get_raw_value()
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size  # guard


# --------------------------------------------------------------------------------- in the manner of Flax's own guides


class Stack(nnx.Module):
    """As the guide of Flax on several devices: ``jax.lax.scan`` over a module that ``nnx.vmap`` has made."""

    def __init__(self, rngs):
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def create(rngs):
            return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

        self.layers = create(rngs.split(2))

    def __call__(self, x):
        return jax.lax.scan(lambda x, layer: (nnx.relu(layer(x)), None), x, self.layers)[0]


def test_module_as_a_pytree_in_jax_jit_and_lax_scan_trains_as_on_one_device():
    x = normal(3, (16, WIDTH))

    def trained(net, value_and_grad):
        optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)

        @jax.jit
        def step(net, optimizer, x):
            loss, grads = value_and_grad(lambda net, x: jnp.mean((net(x) - x) ** 2))(net, x)
            optimizer.update(net, grads)
            return net, optimizer, loss

        for _ in range(2):
            net, optimizer, loss = step(net, optimizer, x)
        return loss, net

    want, plain = trained(Stack(nnx.Rngs(0)), jax.value_and_grad)
    model = shard_modules(nnx_model(Stack), nnx.Linear, "fsdp", 32)
    got, net = trained(create_nnx_module(model, 0, x, mesh=mesh_of(2, 4)), nnx_value_and_grad)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_values(net, plain)
    assert net.layers.kernel.get_raw_value().sharding.spec == jax.P(None, None, "fsdp")


# ----------------------------------------------------------------------------------- adapters, random numbers, teachers


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.adapted = nnx.LoRALinear(WIDTH, 32, lora_rank=4, rngs=rngs)
        self.adapted.lora.lora_b[...] = 0.1 * jax.random.normal(rngs.params(), (4, 32))
        self.dropout, self.head = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.head(self.dropout(jnp.tanh(self.adapted(x)), rngs=rngs))


X = normal(4, (16, WIDTH))


def adapted():
    model = shard_modules(nnx_model(Adapted), nnx.Linear, "fsdp", min_weight_size=32)
    return create_nnx_module(model, 0, mesh=mesh_of(2, 4))


def from_teacher(net, teacher, x):
    return jnp.mean((net(x) - teacher(x)) ** 2)


def test_adapters_train_beside_a_teacher_as_on_one_device():
    """``wrt=nnx.LoRAParam``; the teacher is a second module, whose split parameters take no gradient."""
    plain, net = Adapted(nnx.Rngs(0)), adapted()
    teachers = (
        Adapted(nnx.Rngs(1)),
        create_nnx_module(
            shard_modules(nnx_model(Adapted), nnx.Linear, "fsdp", min_weight_size=32), 1, mesh=mesh_of(2, 4)
        ),
    )
    for module in (plain, net, *teachers):
        module.eval()
    start = values_of(plain)
    of_lora = partial(nnx.value_and_grad, argnums=nnx.DiffState(0, nnx.LoRAParam))
    options = {"loss": from_teacher, "wrt": nnx.LoRAParam}
    wanted = trained(plain, of_lora, teachers[0], X, **options)
    losses = trained(net, partial(nnx_value_and_grad, wrt=nnx.LoRAParam), teachers[1], X, **options)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_same_values(net, plain)
    moved = {path for path, value in values_of(net).items() if np.abs(value - start[path]).max() > 1e-6}
    assert moved == {"adapted/lora/lora_a", "adapted/lora/lora_b"}


@pytest.mark.parametrize("passed", [True, False], ids=["argument", "own"])
def test_draws_differ_by_device_and_by_call(passed):
    """Streams of the module, and an ``nnx.Rngs`` that is passed in, count on; equal rows get different masks."""
    net, rngs, x = adapted(), nnx.Rngs(5), jnp.ones((16, WIDTH))

    @nnx.jit
    def outputs(net, rngs, x):
        loss = lambda net, rngs, x: (0.0 * net.head.bias.sum(), net(x, rngs=rngs if passed else None))  # noqa: E731
        return nnx_value_and_grad(loss, has_aux=True)(net, rngs, x)[0][1]

    first, second = outputs(net, rngs, x), outputs(net, rngs, x)
    assert first.shape == (16, WIDTH)  # a row for each example, of all devices
    assert len({tuple(row) for row in np.asarray(first)}) == 16
    assert not np.array_equal(first, second)
    counts = [int(leaf.get_raw_value()) for _, leaf in nnx.to_flat_state(nnx.state((net, rngs), nnx.RngCount))]
    assert 2 in counts


def test_draws_from_a_key_among_the_arguments_differ_by_device():
    """A single key differs by device; of an array with a key for each row each device draws from the keys of its rows.

    On a single device a key stays as it is.
    """
    x, keys = jnp.ones((8, 2)), jax.random.split(jax.random.key(3), 8)

    def rows_of(keys):
        of_rows = keys if keys.ndim else jax.random.split(keys, 8)
        return jax.vmap(lambda key: jax.random.normal(key, (2,)))(of_rows)

    def drawn(devices, keys):
        loss = lambda net, x, keys: (jnp.mean(net(x)), rows_of(keys)[: len(x)])  # noqa: E731
        net = create_nnx_module(nnx_model(lambda rngs: nnx.Linear(2, 2, rngs=rngs)), 0, mesh=mesh_of(1, devices))
        return np.asarray(nnx_value_and_grad(loss, has_aux=True)(net, x, keys)[0][1])

    assert len({row.tobytes() for row in drawn(4, keys[0])}) == 8
    np.testing.assert_array_equal(drawn(1, keys[0]), rows_of(keys[0]))
    np.testing.assert_array_equal(drawn(4, keys), rows_of(keys))


def test_single_key_differs_by_device_and_keys_of_rows_stay():
    program = nnx_gradients._Program(jnp.mean, None, (), AXES, False, False)

    def on_device(single, rows):
        return jax.tree.map(lambda key: jax.random.key_data(program.drawn_here(key))[None], (single, rows))

    words = np.uint32([[0, 3], [0, 4]])
    keys = jax.random.wrap_key_data(words)
    of_devices, rows = on_mesh(on_device, mesh_of(2, 4), True, (jax.P(), jax.P()), jax.P(AXES))(keys[0], keys)
    assert len(np.unique(of_devices, axis=0)) == 8
    np.testing.assert_array_equal(rows, [words] * 8)


def test_numbers_beside_the_loss_are_averaged_in_float32_or_wider():
    net = create_nnx_module(
        shard_modules(nnx_model(lambda rngs: nnx.Linear(2, 2, rngs=rngs)), nnx.Linear, "fsdp"), 0, mesh=mesh_of(2, 4)
    )

    def outputs(net, x):
        numbers = {"bool": x.mean() > 0, "half": jnp.bfloat16(3), "float": jnp.float32(3)}
        return nnx_value_and_grad(lambda net, x: (net(x).mean(), numbers), has_aux=True)(net, x)[0][1]

    assert {number.dtype for number in nnx.eval_shape(outputs, net, jnp.ones((8, 2))).values()} == {
        jnp.dtype("float32")
    }


@pytest.mark.parametrize("check_vma", [True, False])
def test_weighted_numbers_beside_the_loss_are_those_of_one_device(check_vma):
    """Devices have weights of 0 to 2; counts are sums, and a mean of a device's rows becomes that of all rows."""
    net = create_nnx_module(lambda rngs: nnx.Linear(2, 2, rngs=rngs), 0, mesh=mesh_of(1, 4))
    x, weight = normal(1, (8, 2)), jnp.array([1.0, 0, 1, 1, 0, 0, 0, 1])

    def loss_fn(net, x, weight, count=Count.of):
        errors = jnp.mean((net(x) - 1) ** 2, -1)
        total, of_all = jnp.sum(weight * errors), jnp.sum(weight)
        numbers = (total / jnp.maximum(of_all, 1), {"rows": errors, "used": count(weight > 0)})
        return (total, of_all), numbers

    (_, (mean, rest)), _ = nnx_value_and_grad(loss_fn, has_aux=True, weighted=True, check_vma=check_vma)(net, x, weight)
    _, (wanted, rest_wanted) = loss_fn(net, x, weight, jnp.sum)
    np.testing.assert_allclose(mean, wanted, rtol=1e-6)
    np.testing.assert_allclose(rest["rows"], rest_wanted["rows"], rtol=1e-6)
    assert rest["used"] == rest_wanted["used"] == 4
    none, _ = nnx_value_and_grad(loss_fn, has_aux=True, weighted=True, check_vma=check_vma)(net, x, 0 * weight)
    assert none[1][0] == none[1][1]["used"] == 0


def test_integers_beside_the_loss_are_refused_and_sums_of_a_device_warn():
    net = create_nnx_module(lambda rngs: nnx.Linear(2, 2, rngs=rngs), 0, mesh=mesh_of(1, 4))

    def traced(number):
        loss = lambda net, x: (net(x).mean(), {"total": number(x)})  # noqa: E731
        return nnx.eval_shape(lambda net, x: nnx_value_and_grad(loss, has_aux=True)(net, x)[0], net, jnp.ones((8, 2)))

    with pytest.raises(TypeError, match=r"aux\['total'\] is an integer .* Count.of"):
        traced(lambda x: jnp.sum(x > 0))
    with pytest.warns(UserWarning, match=r"aux\['total'\] is the sum on each device"):
        traced(jnp.sum)


# --------------------------------------------------------------------------------------------------------------- errors


class Leaking(nnx.Module):
    """Keeps the mean of the rows of a device."""

    def __init__(self, rngs):
        self.linear, self.mean = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.mean[...] = x.mean()
        return self.linear(x)


@pytest.mark.parametrize("check_vma", [True, False])
def test_variable_that_would_differ_between_devices_is_refused(check_vma):
    net = create_nnx_module(Leaking, 0, mesh=mesh_of(2, 4))
    with pytest.raises(ValueError, match=r"'mean' would differ from device to device"):
        nnx_value_and_grad(lambda net, x: net(x).mean(), check_vma=check_vma)(net, X)


class Measured(nnx.Module):
    """Counts its rows by a metric: the count of a device is that of every other device."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.metric = nnx.metrics.Average()

    def __call__(self, x):
        self.metric.update(values=jnp.ones(len(x)))
        return self.linear(x)


def test_metric_updated_in_the_loss_is_refused_unless_a_single_device_has_all_rows():
    loss = lambda net, x: net(x).mean()  # noqa: E731
    with pytest.raises(ValueError, match=r"updates an nnx.Metric, the variable 'metric.count', .* auxiliary output"):
        nnx_value_and_grad(loss)(create_nnx_module(Measured, 0, mesh=mesh_of(1, 4)), X)
    net = create_nnx_module(Measured, 0, mesh=mesh_of(1, 1))
    nnx_value_and_grad(loss)(net, X)
    assert net.metric.count[...] == len(X)


def test_metric_that_would_count_the_rows_of_a_device_is_refused():
    class Counted(nnx.Module):
        def __init__(self):
            self.kernel, self.metric = nnx.Param(np.float32([1])), nnx.metrics.Average()

        def __call__(self, x):
            self.metric.update(values=x)
            return x * self.kernel[...]

    with pytest.raises(ValueError, match=r"updates an nnx.Metric, the variable 'metric.count', .* auxiliary output"):
        nnx_value_and_grad(lambda net, x: jnp.sum(net(x)), mesh=mesh_of(1, 2), batch_axes="fsdp")(Counted(), np.ones(2))


@pytest.mark.parametrize("kind", ["no mesh", "Explicit"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_name, sizes", [("fsdp", (4, 2)), (None, (8, 1)), ("fsdp", (1, 8))], ids=str)
def test_module_of_split_layers_trains_as_on_one_device(axis_name, sizes, check_vma, kind):
    """``split_modules``: a bias is split over the axis of the layers alone, and so is each kernel without units."""

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    def error(net, x):
        return jnp.mean((net(x) - x[:, ::-1]) ** 2)

    types = (jax.sharding.AxisType.Explicit if kind == "Explicit" else jax.sharding.AxisType.Auto,) * 2
    mesh, plain = jax.make_mesh(sizes, ("fsdp", "tp"), axis_types=types), Mlp(nnx.Rngs(0))
    wanted = trained(plain, nnx.value_and_grad, X, loss=error)
    model = split_modules(nnx_model(Mlp), {"up": "column", "down": "row"})
    model = model if axis_name is None else shard_modules(model, nnx.Linear, axis_name, 32)
    with jax.set_mesh(mesh) if kind == "Explicit" else contextlib.nullcontext():
        net = create_nnx_module(model, 0, mesh=mesh)
        losses = trained(net, partial(nnx_value_and_grad, check_vma=check_vma), X, loss=error)
        got = values_of(net)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for path, value in values_of(plain).items():
        np.testing.assert_allclose(got[path], value, rtol=1e-5, atol=1e-6, err_msg=path)
    bias = net.up.bias.get_raw_value()
    assert bias.addressable_shards[0].data.size * sizes[1] == bias.size  # guard


def test_module_that_computes_with_shards_of_named_axes_as_if_they_were_unsharded_is_refused():
    """As in a guide of Flax: names of mesh axes in the metadata, for a program that the compiler splits."""

    class Annotated(nnx.Module):
        def __init__(self, rngs):
            up, down = (nnx.with_partitioning(nnx.initializers.normal(), names) for names in names_of_layers)
            self.up = nnx.Linear(WIDTH, 32, use_bias=False, kernel_init=up, rngs=rngs)
            self.down = nnx.Linear(32, WIDTH, use_bias=False, kernel_init=down, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    names_of_layers = (None, "model"), ("model", None)
    mesh = DeviceMeshManager.create_device_mesh({"data": 2, "model": 4})
    model = shard_modules(nnx_model(Annotated), nnx.Linear, "data", 32)
    net = create_nnx_module(model, 0, mesh=mesh)
    for check_vma, words in (
        (True, r"the loss varies over 'model'"),
        (False, r"'loss'.* would differ .* \('model',\)"),
    ):
        with pytest.raises(ValueError, match=words):
            nnx_value_and_grad(lambda net, x: jnp.mean(net(x) ** 2), check_vma=check_vma)(net, X)


def test_loss_that_closes_over_weights_of_classes_trains_as_on_one_device():
    """The cure of the error on arguments with different numbers of rows; as an argument the weights would be split."""
    labels, weights = jnp.arange(16) % 8, 1.0 + jnp.arange(8)
    make = lambda rngs: nnx.Linear(WIDTH, 8, rngs=rngs)  # noqa: E731

    def loss_of(net, value_and_grad, weights):
        @nnx.jit
        def step(net, weights):
            def loss_fn(net, x, labels):
                return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(net(x), labels) * weights[labels])

            return value_and_grad(loss_fn)(net, X, labels)[0]

        return step(net, weights)

    net = create_nnx_module(nnx_model(make), 0, mesh=mesh_of(1, 8))
    wanted = loss_of(make(nnx.Rngs(0)), nnx.value_and_grad, weights)
    np.testing.assert_allclose(loss_of(net, nnx_value_and_grad, weights), wanted, rtol=1e-5)
    assert abs(loss_of(net, nnx_value_and_grad, weights[::-1]) / wanted - 1) > 1e-3  # guard: the weights count


def test_calls_that_fit_nothing_are_refused():
    net, mean = adapted(), lambda net, x: net(x).mean()
    net.eval()
    with pytest.raises(ValueError, match=r"Adapted was not made by create_nnx_module, and has no mesh"):
        nnx_value_and_grad(mean)(Adapted(nnx.Rngs(0)), X)
    with pytest.raises(ValueError, match=r"wrt=.*BatchStat.* selects no variable of Adapted"):
        nnx_value_and_grad(mean, wrt=nnx.BatchStat)(net, X)
    with pytest.raises(ValueError, match=r"shape \(10, 16\), and the 8 devices .* Pad the rows to 16"):
        nnx_value_and_grad(mean)(net, X[:10])
    with pytest.raises(ValueError, match=r"argument 1 after the module has 8 rows, .* argument 0 .* has 16, .* close"):
        nnx_value_and_grad(lambda net, x, weights: (net(x) * weights[0]).mean())(net, X, jnp.ones(8))
    for args in (X, jax.random.PRNGKey(0)), (jax.random.PRNGKey(0), X):
        with pytest.raises(ValueError, match=r"is uint32\[2\], as a key of .* Pass a key of jax.random.key"):
            nnx_value_and_grad(lambda net, *args: net(X).mean())(net, *args)
    with pytest.raises(ValueError, match=r"array of shape \(3,\), and a device has 2 rows"):
        nnx_value_and_grad(lambda net, x: (net(x).mean(), jnp.ones(3)), has_aux=True)(net, X)
    with pytest.raises(TypeError, match=r"has_aux=True: loss_fn must return \(loss, aux\)"):
        nnx_value_and_grad(mean, has_aux=True)(net, X)
