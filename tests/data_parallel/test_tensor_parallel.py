"""Tests of tensor parallelism inside wrapped modules: the gather leaves a split over another axis alone.

The stack is as in Megatron: products split by columns, then by rows; between the products tokens may be split as well
(sequence parallel). ``nn.map_variables`` turns parameters into plain ``nn.Partitioned`` boxes, on an extra dim or on
the split dim; the sharding over "fsdp" then wraps around the boxes, or inside.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from tests.support import KEPT, assert_same_params, fsdp, normal, on_mesh, plain
from xlstm_jax.distributed import (
    DeviceMeshManager,
    fold_rng_over_axis,
    gather_params,
    make_train_step,
    partition_specs,
    unbox,
)
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.collectives import is_tracked, local_shard

WIDTH, HIDDEN, LAYERS = 8, 16, 1
TX = optax.chain(KEPT, optax.adamw(1e-2))  # the optimizer state contains the gradients of the last step
BATCH = normal(1, (8, 4, WIDTH)) * np.float32(1 + np.arange(8) % 3)[:, None, None]  # [b, t, d]
MESHES = {"4x2": {"fsdp": 4, "tp": 2}, "2x2x2": {"dp": 2, "fsdp": 2, "tp": 2}}


# ---------------------------------------------------------------------- reductions over "tp", right in both modes


@jax.custom_vjp
def same_on_all(x):
    """Returns x, which is equal along "tp": the gradient is the sum of the gradients of all devices."""
    return x


same_on_all.defvjp(lambda x: (x, None), lambda _, grad: (jax.lax.psum(grad, "tp"),))


@jax.custom_vjp
def summed(x):
    """Returns the sum over "tp" with the gradient of each term. Without types JAX would sum the gradient again."""
    return jax.lax.psum(x, "tp")


summed.defvjp(lambda x: (jax.lax.psum(x, "tp"), None), lambda _, grad: (grad,))


def enter(x):
    return x if is_tracked("tp") else same_on_all(x)  # with types JAX itself does so


def leave(x):
    return jax.lax.psum(x, "tp") if is_tracked("tp") else summed(x)


# --------------------------------------------------------------------------------------- parameters of each device


class OnEachDevice(nn.Module):
    """Layer whose parameters differ per device along "tp".

    ``dims`` names the dim of a leaf along which the devices' parts are concatenated; any other leaf is stacked along a
    new first dim. With ``only_first`` the parts of all devices except the first are zero, and stay zero.
    """

    make: Callable[..., nn.Module]
    dims: Any = None
    only_first: bool = False

    @nn.compact
    def __call__(self, x):
        if self.is_initializing():
            rng = self.scope.rngs["params"]
            self.scope.rngs["params"] = rng.replace(rng=fold_rng_over_axis(rng.rng, "tp"))
        layer = partial(self.make, name="sharded")
        return nn.map_variables(layer, "params", self.own, self.stacked, mutable=True)()(x)

    def dim_of(self, path):
        return (self.dims or {}).get(getattr(path[-1], "key", None))

    def masked(self, value):
        return jnp.where(jax.lax.axis_index("tp") == 0, value, 0) if self.only_first else value

    def stacked(self, variables):
        def stack(path, leaf):
            dim, names, value = self.dim_of(path), list(leaf_of(leaf).names), self.masked(unbox(leaf))
            if dim is None:
                return nn.Partitioned(value[None], ("tp", *names))
            names[dim] = "tp"
            return nn.Partitioned(value, tuple(names))

        return jax.tree_util.tree_map_with_path(stack, variables, is_leaf=lambda x: isinstance(x, nn.Partitioned))

    def own(self, variables):
        def take(path, leaf):
            dim, names, value = self.dim_of(path), list(leaf_of(leaf).names), unbox(leaf)
            if dim is None:
                value, names = value[0], names[1:]
            else:
                names[dim] = None
            value = self.masked(value)
            return nn.Partitioned(value, tuple(names)) if any(names) else value

        return jax.tree_util.tree_map_with_path(take, variables, is_leaf=lambda x: isinstance(x, nn.Partitioned))


class Block(nn.Module):
    """Products by columns, then by rows; ``sequence`` splits x [b, t, d] over "tp" along t outside of the products."""

    tp: int
    sequence: bool
    wrap: Any = plain  # inside of the split over "tp"

    @nn.compact
    def __call__(self, x):
        dense = self.wrap(nn.Dense)
        x = jax.lax.all_gather(x, "tp", axis=1, tiled=True) if self.sequence else enter(x)
        dims = {"kernel": 1, "bias": 0} if self.wrap is plain else None  # else "fsdp" may split the dim
        h = OnEachDevice(partial(dense, HIDDEN // self.tp), dims, name="columns")(x)
        y = OnEachDevice(partial(dense, WIDTH, use_bias=False), name="rows")(nn.gelu(h))
        y = y + OnEachDevice(partial(Bias, WIDTH), only_first=True, name="bias")(y)
        return jax.lax.psum_scatter(y, "tp", scatter_dimension=1, tiled=True) if self.sequence else leave(y)


class Bias(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        bias = self.param("bias", nn.initializers.normal(0.1), (self.features,))
        return jnp.broadcast_to(bias, x.shape)


class Stack(nn.Module):
    """Blocks with residual connections, replicated parameters in between, tokens split or not."""

    tp: int
    sequence: bool
    outside: Any = plain
    inside: Any = plain

    @nn.compact
    def __call__(self, x):
        x = self.outside(nn.Dense)(WIDTH, name="first")(x)
        for layer in range(LAYERS):
            block = self.outside(Block)(self.tp, self.sequence, self.inside, name=f"block_{layer}")
            x = x + self.split(block)(x)
        return self.outside(nn.Dense)(WIDTH, name="last")(x)

    def split(self, block):
        if not self.sequence:
            return block
        return lambda x: gathered(block(split_tokens(x)))


def split_tokens(x):
    return local_shard(enter(x), 1, ("tp",))


def gathered(x):
    """Returns the tokens of all devices, by a sum of zero-padded parts: equal along "tp" by type."""
    whole = 0 * jnp.concatenate([x] * jax.lax.axis_size("tp"), axis=1)
    return leave(jax.lax.dynamic_update_slice_in_dim(whole, x, jax.lax.axis_index("tp") * x.shape[1], 1))


def on_one_device(params, x):
    """Trains from the global parameters, without a mesh."""
    x = x @ params["first"]["kernel"] + params["first"]["bias"]
    for layer in range(LAYERS):
        columns, rows, bias = (params[f"block_{layer}"][name]["sharded"] for name in ("columns", "rows", "bias"))
        kernel = columns["kernel"].reshape(-1, *columns["kernel"].shape[-2:])  # [1 or tp, d, h]
        h = nn.gelu(x @ jnp.concatenate(kernel, axis=1) + columns["bias"].ravel())
        x = x + h @ rows["kernel"].reshape(HIDDEN, WIDTH) + bias["bias"][0]
    return x @ params["last"]["kernel"] + params["last"]["bias"]


def error(y, x):
    return jnp.mean((y - jnp.roll(x, 1, axis=-1)) ** 2)


# ------------------------------------------------------------------------------------------------------------- tests


def mesh_and_axes(name):
    mesh = DeviceMeshManager.create_device_mesh(MESHES[name])
    return mesh, tuple(axis for axis in mesh.axis_names if axis != "tp")


@cache
def initialised(model, mesh, axes):
    """Initialises inside ``shard_map``, with different draws per device; in two passes, the first for the specs."""

    init = partial(on_mesh, lambda x: model.init(jax.random.key(0), x)["params"], mesh, False, P(axes))
    return init(partition_specs(jax.eval_shape(init(P()), BATCH), mesh))(BATCH)


CASES = {
    # The wrapper of "fsdp" around what is split over "tp": leaves split over both, over "tp" alone, and over "fsdp".
    "around": ("4x2", Stack(2, False, fsdp)),
    "around, tokens split": ("2x2x2", Stack(2, True, fsdp)),
    # The wrapper inside: boxes over "fsdp" go through map_variables of the model.
    "inside": ("2x2x2", Stack(2, False, plain, fsdp)),
}
RUNS = [("around", True), ("around", False), ("around, tokens split", True), ("around, tokens split", False)]
RUNS += [("inside", True)]


def loss_fn(params, apply_fn, x, rng):
    del rng
    return error(apply_fn({"params": params}, x), x)


@jax.jit
def of_one_device(params):
    return jax.value_and_grad(lambda params: error(on_one_device(params, BATCH), BATCH))(params)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case, check_vma", RUNS)
def test_tensor_parallel_gradients_and_three_steps_match_a_single_device(case, check_vma):
    name, model = CASES[case]
    mesh, axes = mesh_and_axes(name)
    params = initialised(model, mesh, axes)
    start = want = unbox(jax.device_get(params))
    state = TrainState.create(apply_fn=model.apply, params=jax.tree.map(jnp.copy, params), tx=TX)
    step = make_train_step(loss_fn, mesh, axes, check_vma=check_vma)
    opt_state = TX.init(want)
    for _ in range(3):
        state, metrics = step(state, BATCH, jax.random.key(0))
        loss, grads = of_one_device(want)
        updates, opt_state = TX.update(grads, opt_state, want)
        want = optax.apply_updates(want, updates)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
        assert_same_params(state.opt_state[0], grads)
    assert_same_params(state.params, want)
    assert not np.allclose(start["first"]["kernel"], want["first"]["kernel"], atol=1e-2)  # guard: parameters move


def names_of(params):
    return {path: leaf_of(leaf).names for path, leaf in leaves_with_path(params)}


def test_guard_tensor_parallel_cases_split_leaves_over_fsdp_and_tp():
    """Guard: the models of the parity test have leaves split over both axes, and over one axis."""
    around, tokens, inside = (names_of(initialised(model, *mesh_and_axes(name))) for name, model in CASES.values())
    for found in (around, tokens):
        assert found["block_0/columns/sharded/kernel"] == ("fsdp", "tp")
        assert found["block_0/columns/sharded/bias"] == ("tp",)
        assert found["first/kernel"] == (None, "fsdp")
    assert inside["block_0/columns/sharded/kernel"] == ("tp", None, "fsdp") and inside["first/kernel"] == (None, None)
    for found in (around, tokens, inside):
        assert found["block_0/rows/sharded/kernel"] == ("tp", None, "fsdp")
        assert found["block_0/bias/sharded/bias"] == ("tp", None)


NAMES = [("tp", "fsdp"), ("fsdp", "tp"), ("tp", None), (("tp", "fsdp"), None), (("fsdp", "tp"), None)]


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_gather_params_over_fsdp_leaves_a_partitioned_box_over_tp(names):
    """A gather over "fsdp" leaves the split over "tp": on any dim, also of a dim that was split over both axes.

    With "fsdp" outermost, the rows of a shard over "tp" alone are on devices along both axes, and are in order, too.
    """
    mesh, value = mesh_and_axes("4x2")[0], normal(0, (16, 16))
    names_left = tuple("tp" if name == "tp" or isinstance(name, tuple) else None for name in names)

    def gathered_over_fsdp(shard):
        box = gather_params({"w": nn.Partitioned(shard, names)}, "fsdp")["w"]
        assert isinstance(box, nn.Partitioned) and tuple(box.names) == names_left
        return box.value[None]  # a copy for each place along "fsdp"

    copies = on_mesh(gathered_over_fsdp, mesh, False, P(*names), P("fsdp", *names_left))(value)
    np.testing.assert_array_equal(copies, np.stack([value] * mesh.shape["fsdp"]))
