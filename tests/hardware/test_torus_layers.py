"""On TPU tori the gradient of a split leaf is scattered, whichever of Flax's layers it belongs to: never all-reduced.

One program holds all layers, and is compiled for a torus of two dims and one of three.
"""

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from tests.support import fsdp, plain
from xlstm_jax.distributed.data_parallel.leaf import is_box, leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.forecast import forecast
from xlstm_jax.forecast.training import Workload

TORI = {"v5e:4x4": {"x": 4, "y": 4}, "v5p:2x2x4": {"x": 2, "y": 2, "z": 4}}
WIDTH, HEADS, STEPS = 512, 4, 8
HEAD = WIDTH // HEADS
FEW = 4  # rows of a depthwise kernel: fewer than a TPU's tile has


class Cell(nn.Module):
    """One step of a recurrent cell, whose carry is the input."""

    cell: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        x = x[:, 0]
        carry = x if self.cell in (nn.GRUCell, nn.SimpleCell) else (x, x)
        return self.cell(WIDTH)(carry, x)[1]


class Experts(nn.Module):
    """Stacked matrices, one for each expert."""

    @nn.compact
    def __call__(self, x):
        up = self.param("up", nn.initializers.normal(), (HEADS, WIDTH, 2 * WIDTH))
        return jnp.einsum("btd,edf->betf", x, up)


class Tied(nn.Embed):
    """Embedding and head in one, of tokens that depend on the input."""

    def __call__(self, x):
        return self.attend(super().__call__(jnp.argmax(x[..., :7], axis=-1)))


# name -> (what makes the layer, dims of its input behind the batch)
SEQUENCE = (STEPS, WIDTH)
LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Dense": (partial(nn.Dense, WIDTH), SEQUENCE),
    "DenseGeneral_qkv": (partial(nn.DenseGeneral, (3, HEADS, HEAD)), SEQUENCE),
    "DenseGeneral_heads": (partial(nn.DenseGeneral, (3, HEAD)), SEQUENCE),
    "DenseGeneral_out": (partial(nn.DenseGeneral, WIDTH, axis=(-2, -1)), (STEPS, HEADS, HEAD)),
    "MultiHeadDotProductAttention": (partial(nn.MultiHeadDotProductAttention, HEADS), SEQUENCE),
    "Conv_1d": (partial(nn.Conv, WIDTH, (3,)), SEQUENCE),
    "Conv_2d": (partial(nn.Conv, WIDTH // 2, (3, 3)), (4, 4, WIDTH // 2)),
    "Conv_3d": (partial(nn.Conv, WIDTH // 4, (3, 3, 3)), (4, 4, 4, WIDTH // 4)),
    "Conv_depthwise": (partial(nn.Conv, 32 * WIDTH, (FEW,), feature_group_count=32 * WIDTH), (STEPS, 32 * WIDTH)),
    "ConvTranspose": (partial(nn.ConvTranspose, WIDTH // 2, (3, 3)), (4, 4, WIDTH // 2)),
    "Einsum": (partial(nn.Einsum, (WIDTH, HEADS, HEAD), "...d,dhk->...hk"), SEQUENCE),
    "Embed": (partial(Tied, 4 * WIDTH, WIDTH), SEQUENCE),
    "LSTMCell": (partial(Cell, nn.LSTMCell), SEQUENCE),
    "OptimizedLSTMCell": (partial(Cell, nn.OptimizedLSTMCell), SEQUENCE),
    "GRUCell": (partial(Cell, nn.GRUCell), SEQUENCE),
    "Experts": (Experts, SEQUENCE),
}
# Whose kernels XLA all-reduced, scattered as arrays of their own rank.
OF_HIGHER_RANK = ("DenseGeneral_qkv", "Conv_2d", "Conv_depthwise")


def wrapped(name, wrap):
    make, _ = LAYERS[name]
    return partial(wrap(make.func), *make.args, **make.keywords) if isinstance(make, partial) else wrap(make)


class Layers(nn.Module):
    """The layers side by side: each on an input of its own shape, their outputs added up."""

    names: tuple[str, ...]
    wrap: Any = plain

    @nn.compact
    def __call__(self, x):
        total = jnp.zeros(len(x))
        for name in self.names:
            dims = LAYERS[name][1]
            spread = jnp.cos(jnp.arange(math.prod(dims), dtype=x.dtype)).reshape(dims)
            out = wrapped(name, self.wrap)(name=name)(x.reshape(-1, *(1,) * len(dims)) * spread)
            total += jnp.sin(out).reshape(len(x), -1).sum(axis=-1)
        return total


def compiled(topology, names, **options):
    """(the forecast of a step of the layers, [(path, values, whether it is split)] of their leaves)."""
    axes = TORI[topology]
    wrap = partial(fsdp, axis_name=tuple(axes), min_weight_size=2**15, gather_dtype="bfloat16", **options)
    x = jax.ShapeDtypeStruct((2 * math.prod(axes.values()),), jnp.float32)

    def loss(params, apply_fn, batch, rng):
        del rng
        return jnp.mean(apply_fn({"params": params}, batch))

    workload = Workload(Layers(tuple(names), wrap), optax.sgd(1e-3), x, loss)
    step, (state, *rest) = workload.build_step(axes)
    leaves = [(path, leaf_of(leaf).value.size, is_box(leaf)) for path, leaf in leaves_with_path(state.params)]
    return forecast(step, state, *rest, topology=topology), leaves


def layers_of(collectives):
    """The layers that collectives serve."""
    return {module.split("/")[0] for c in collectives for module in c.modules}


def all_reduced(found):
    """The layers of which an all-reduce stands in for a scatter, or for a gather."""
    return layers_of(c for c in found.collectives if c.stands_for)


@pytest.fixture(scope="module", params=TORI)
def all_layers(request):
    pytest.importorskip("libtpu")
    return compiled(request.param, LAYERS, grad_scatter_dtype="bfloat16")


@pytest.mark.one_in(2)
@pytest.mark.libtpu
def test_no_gradient_of_a_sharded_leaf_is_all_reduced_on_tpu_tori(all_layers):
    found, leaves = all_layers
    assert all_reduced(found) == set()
    whole = sum(values for _, values, split in leaves if not split)
    reduced = sum(c.payload_bytes * c.count for c in found.collectives if c.kind == "all-reduce")
    assert 4 * whole < reduced <= 4 * (whole + 2**10)  # the loss, and what rounds an array up to a tile


@pytest.mark.one_in(2)
@pytest.mark.libtpu
def test_kernels_of_all_flax_layers_are_sharded_and_reduce_scattered_in_bfloat16(all_layers):
    """Guard: there was something to all-reduce, of each layer."""
    found, leaves = all_layers
    assert {path.split("/")[0] for path, _, split in leaves if split} == set(LAYERS)
    sent = sum(2 * values for _, values, split in leaves if split)
    scattered = [c for c in found.collectives if c.kind == "reduce-scatter"]
    assert layers_of(scattered) == set(LAYERS) and {c.dtype for c in scattered} == {"bf16"}
    over_first_axes = sum(c.payload_bytes for c in scattered if c.payload_bytes)
    assert over_first_axes >= sent


@pytest.mark.slow
@pytest.mark.libtpu
def test_gradients_scattered_without_matrix_shape_are_all_reduced_on_a_torus(monkeypatch):
    """Guard: it is the matrices that do it, and an all-reduce is seen."""
    monkeypatch.setattr(collectives, "_matrix_shape", lambda shape: shape)
    found, _ = compiled("v5e:4x4", OF_HIGHER_RANK)
    assert all_reduced(found) == set(OF_HIGHER_RANK)
