"""Tests of the functions beneath the layers in an NNX model: values and gradients equal one device.

The metadata of kernels name the split axes, as in ``nnx.Linear``; the model calls ``enter_split`` and ``leave_split``
around the kernels, ``context_attention`` in between, and ``mix_experts`` on stacked parameters.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.support import FLOAT32_ROUNDING, KEPT, assert_same_params, normal
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_train_state,
    make_train_step,
    nnx_model,
    shard_modules,
    unbox,
)
from xlstm_jax.distributed.model_parallel import (
    context_attention,
    context_positions,
    enter_split,
    leave_split,
    mix_experts,
    route_tokens,
)

WIDTH, HEADS, EXPERTS = 8, 4, 4
X = normal(1, (8, 8, WIDTH)) * np.float32(1 + np.arange(8) % 3)[None, :, None]
SPEC = P(("fsdp", "ep"), "cp")


def linear(inputs, outputs, names, rngs):
    kernel = {"kernel_metadata": {"out_sharding": names}}
    return nnx.Linear(inputs, outputs, use_bias=False, **kernel, rngs=rngs)


class Attention(nnx.Module):
    """Attention with heads over "tp", and the sequence over "cp" in a ring."""

    def __init__(self, rngs):
        self.query, self.key, self.value = (linear(WIDTH, WIDTH, (None, "tp"), rngs) for _ in range(3))
        self.out = linear(WIDTH, WIDTH, ("tp", None), rngs)

    def __call__(self, x):
        x = enter_split(x, "tp")
        heads = [layer(x).reshape(*x.shape[:2], -1, WIDTH // HEADS) for layer in (self.query, self.key, self.value)]
        turned = jnp.cos(context_positions(x.shape[1], "cp") / 3.0)[:, None, None]
        y = context_attention(heads[0] * turned, heads[1] * turned, heads[2], "cp", impl="ring")
        return leave_split(self.out(y.reshape(*x.shape[:2], -1)), "tp")


class Mixture(nnx.Module):
    """Experts over "ep", which also splits the batch."""

    def __init__(self, rngs):
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        draw = partial(nnx.initializers.lecun_normal(batch_axis=0), dtype=jnp.float32)
        shapes = {"up": (EXPERTS, WIDTH, 16), "down": (EXPERTS, 16, WIDTH)}
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(draw(rngs.params(), shape), out_sharding=("ep", None, None)))

    def __call__(self, x):
        rows = x.reshape(-1, WIDTH)
        params = self.up[...], self.down[...]
        expert = lambda params, rows: nnx.gelu(rows @ params[0]) @ params[1]  # noqa: E731
        routing = route_tokens(self.router(rows), 2)
        return mix_experts(expert, params, rows, routing, self.axes, block_size=4).reshape(x.shape)

    @property
    def axes(self):
        """Returns () outside of ``shard_map``, where each device has all experts."""
        return ("ep",) if "ep" in jax.sharding.get_abstract_mesh().manual_axes else ()


class Net(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention, self.mixture = Attention(rngs), Mixture(rngs)
        self.gate = linear(WIDTH, 16, (None, "tp"), rngs)
        self.down = linear(16, WIDTH, ("tp", None), rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        x = x + leave_split(self.down(nnx.silu(self.gate(enter_split(x, "tp")))), "tp")
        return x + self.mixture(x)


def loss_fn(params, apply_fn, x, rng):
    return jnp.mean((apply_fn({"params": params}, x) - x[..., ::-1]) ** 2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("shape", [{"tp": 2, "ep": 2, "cp": 2}, {"fsdp": 2, "tp": 4}, {"fsdp": 2, "ep": 4}], ids=str)
def test_step_of_an_nnx_model_with_model_axes_matches_a_single_device(shape, check_vma):
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 1, "tp": 1, "ep": 1, "cp": 1} | shape)
    model = shard_modules(nnx_model(Net), (nnx.Linear, Mixture), "fsdp", 16)
    state = create_train_state(
        model, KEPT, mesh, jax.random.key(0), X, batch_axes=("fsdp", "ep"), allow_replicated=True
    )
    start = jax.tree.map(np.asarray, unbox(state.params))
    loss, grads = jax.jit(jax.value_and_grad(lambda params: loss_fn(params, nnx_model(Net).apply, X, None)))(start)
    step = make_train_step(loss_fn, mesh, batch_spec=SPEC, layout="zigzag", check_vma=check_vma, allow_replicated=True)
    state, metrics = step(state, X, jax.random.key(2))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=FLOAT32_ROUNDING)
    assert_same_params(state.opt_state, grads)
    of_device = state.params["attention"]["query"]["kernel"].value.addressable_shards[0].data.shape
    assert np.prod(of_device) == WIDTH * WIDTH / mesh.shape["tp"] / mesh.shape["fsdp"]  # guard: the kernel is split
    assert state.params["mixture"]["up"].names[0] == "ep"
