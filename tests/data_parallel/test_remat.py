"""Tests of ``remat_policy``: keeps the requested activations, drops gathered weights and arrays derived from weights.

Kept arrays are read from JAX's list of residuals, inside ``shard_map``: only an unsharded weight has a weight's number
of values. Recomputed operations are counted in the gradient's jaxpr.
"""

import gc
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from tests.support import assert_same_params, fsdp, mesh_of, on_mesh
from xlstm_jax.distributed import abstract_train_state, init_sharded, partition_specs, sync_gradients, unbox
from xlstm_jax.distributed.data_parallel.regather import RECOMPUTED, may_be_complex
from xlstm_jax.distributed.data_parallel.remat import remat_policy
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.equations import GATHERS
from xlstm_jax.forecast import forecast
from xlstm_jax.forecast.training import Workload

try:
    from jax._src.ad_checkpoint import saved_residuals
except ImportError:  # the path in older releases
    from jax.ad_checkpoint import saved_residuals

SAVEABLE = jax.checkpoint_policies
WIDTH, HIDDEN, ROWS, LAYERS = 16, 40, 3, 2
WEIGHT = WIDTH * HIDDEN  # values of each kernel; no activation and no shard has as many, also stacked over layers
BASES = ("everything", "dots", "nothing")


class Mlp(nn.Module):
    """Two products; ``dtype`` is the compute dtype, and so decides whether gathered weights are cast."""

    dtype: type = jnp.float32

    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(HIDDEN, use_bias=False, dtype=self.dtype, name="up")(x))
        return x + nn.Dense(WIDTH, use_bias=False, dtype=self.dtype, name="down")(h).astype(x.dtype)


class Tied(nn.Module):
    """An embedding table, used as stored and transposed."""

    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(HIDDEN, WIDTH, name="embed")
        return jax.nn.softmax(jnp.sin(embed.attend(x))) @ embed.embedding


def codes(key, shape):
    return jax.random.randint(key, shape, 0, 16, jnp.int8)


class Dequantised(nn.Module):
    """Weights derived from parameters: by scales per block, by a table of 16 values, normalised, and clipped."""

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal(0.3)
        scaled = self.param("scaled", normal, (4, WIDTH // 4, HIDDEN)) * self.param("scale", normal, (4, 1, 1))
        table = self.param("table", normal, (16,))[self.param("codes", codes, (HIDDEN, WIDTH))]
        norm = self.param("norm", normal, (WIDTH, HIDDEN))
        norm = jnp.tanh(norm * lax.rsqrt(jnp.sum(norm**2, 0) + 1e-3))
        clipped = jnp.clip(self.param("clipped", normal, (WIDTH, HIDDEN)), -0.5, 0.5)
        x = jnp.sin(x @ scaled.reshape(WIDTH, HIDDEN)) @ jnp.concatenate([table[:, :8], table[:, 8:] * 2], 1)
        return jnp.sin(x @ norm) @ clipped.T


class Named(nn.Module):
    """A weight with a checkpoint name right after the gather, as for a policy that drops weights by name."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(0.3), (WIDTH, HIDDEN))
        kernel = checkpoint_name(kernel, "gathered")
        return jnp.sin(checkpoint_name(jnp.sin(x @ kernel), "activation")) @ jnp.ones((HIDDEN, WIDTH)) * 0.1


class Attention(nn.Module):
    """Four projections, and two products with batch dims."""

    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.Dense(WIDTH, name=name)(x).reshape(-1, 4, 4) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k))
        return nn.Dense(WIDTH, name="out")(jnp.einsum("hts,shd->thd", weights, v).reshape(x.shape))


class Stack(nn.Module):
    """Layers of a wrapped module, each rematerialised with the policy; ``policy="none"``: not rematerialised."""

    wrapped: type
    policy: object = "none"
    scan: bool = True

    @nn.compact
    def __call__(self, x):
        layer = self.wrapped if self.policy == "none" else nn.remat(self.wrapped, policy=self.policy)
        if not self.scan:
            for i in range(LAYERS):
                x = layer(name=f"layer_{i}")(x)
            return x
        over = nn.scan(
            lambda module, x, _: (module(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return over(layer(name="layers"), x, None)[0]


MODULES = {
    "cast after the gather": fsdp(partial(Mlp, dtype=jnp.bfloat16)),
    "gathered in the dtype of compute": fsdp(partial(Mlp, dtype=jnp.bfloat16), gather_dtype=jnp.bfloat16),
    "cast to a wider dtype": fsdp(Mlp, gather_dtype=jnp.bfloat16),
    "transposed": fsdp(Tied),
    "dequantised": fsdp(Dequantised),
    "named": fsdp(Named),
    "packed for the gather": fsdp(partial(Mlp, dtype=jnp.bfloat16), gather_dtype="int8"),
}
every_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
in_and_out_of_scan = pytest.mark.parametrize("scan", [True, False], ids=["scan", "loop"])
both_modes = pytest.mark.parametrize("check_vma", [True, False])


MESH_SIZE = 8
X = jax.ShapeDtypeStruct((MESH_SIZE * ROWS, WIDTH), jnp.float32)


@cache
def abstract_params(module, scan):
    model, rng = Stack(module, scan=scan), jax.eval_shape(lambda: jax.random.key(0))
    return abstract_train_state(model, optax.sgd(1.0), mesh_of(1, MESH_SIZE), rng, X, batch_axes="fsdp").params


def per_device(module, policy, scan, check_vma, ask):
    """Returns ``ask(loss, params, x)`` for the loss of one device, evaluated while ``shard_map`` traces."""
    mesh, model, params = mesh_of(1, MESH_SIZE), Stack(module, policy, scan), abstract_params(module, scan)
    told = []

    def loss(params, x):
        return jnp.mean(model.apply({"params": params}, x).astype(jnp.float32) ** 2)

    def body(params, x):
        told.append(ask(loss, params, x))
        return jnp.zeros(1)

    run = on_mesh(body, mesh, check_vma, (partition_specs(params, mesh), P("fsdp")), P("fsdp"))
    run.trace(params, X)
    return told[0]


def kept_sizes(module, policy, scan=False, check_vma=True, *, frozen=False):
    """Returns the sizes of the values kept for the backward pass; stacked values count as one layer."""

    def ask(loss, params, x):
        return saved_residuals(partial(loss, params), x) if frozen else saved_residuals(loss, params, x)

    sizes = [math.prod(aval.shape) for aval, _ in per_device(module, policy, scan, check_vma, ask)]
    return [WEIGHT if scan and size == WEIGHT * LAYERS else size for size in sizes]


def count(jaxpr, name):
    """Returns the number of equations of a primitive in a jaxpr, nested jaxprs included."""
    inner = [sub for eqn in jaxpr.eqns for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)]
    return sum(eqn.primitive.name == name for eqn in jaxpr.eqns) + sum(
        count(getattr(sub, "jaxpr", sub), name) for sub in inner if is_jaxpr(sub)
    )


def is_jaxpr(value):
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def counted(module, policy, name, scan=False):
    def ask(loss, params, x):
        return count(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1), allow_int=True))(params, x).jaxpr, name)

    return per_device(module, policy, scan, True, ask)


# ------------------------------------------------------------------------------------------------------- kept arrays


@pytest.mark.one_in(3)
@in_and_out_of_scan
@every_module
def test_remat_policy_saves_no_gathered_weight(module, scan):
    for base in BASES:
        assert WEIGHT not in kept_sizes(module, remat_policy(base), scan)
    assert WEIGHT not in kept_sizes(module, remat_policy("everything"), scan, check_vma=False)


@in_and_out_of_scan
@every_module
def test_guard_jax_checkpoint_policies_save_gathered_weights(module, scan):
    """Guard: JAX's policies keep weights, and the size identifies an unsharded weight."""
    for policy in ("none", SAVEABLE.everything_saveable):
        assert WEIGHT in kept_sizes(module, policy, scan)


@in_and_out_of_scan
@every_module
def test_remat_policy_saves_no_gathered_frozen_weight(module, scan):
    """Frozen weights are dropped: in gradients of the input the gather, with its custom rule, is one operation."""
    assert WEIGHT not in kept_sizes(module, remat_policy(), scan, frozen=True)
    assert WEIGHT in kept_sizes(module, SAVEABLE.everything_saveable, scan, frozen=True)


def test_remat_policy_drops_a_weight_saved_by_a_save_anything_except_base():
    """``save_anything_except_these_names`` keeps the output of the gather, in front of the name."""
    refusing = SAVEABLE.save_anything_except_these_names("gathered")
    assert WEIGHT in kept_sizes(MODULES["named"], refusing)
    assert WEIGHT not in kept_sizes(MODULES["named"], remat_policy(refusing))


@pytest.mark.parametrize("refused", [frozenset(), GATHERS], ids=["nothing", "gathers"])
def test_guard_policy_rejecting_only_the_gather_saves_the_cast_weight(refused):
    """Guard of the list of operations: a policy that rejects only the gather keeps the cast weight."""
    policy = partial(keep_but, refused)
    assert WEIGHT in kept_sizes(MODULES["cast after the gather"], policy)
    assert WEIGHT in kept_sizes(MODULES["dequantised"], policy)


def keep_but(refused, primitive, *_, **__):
    return primitive.name not in refused


# --------------------------------------------------------------------------------------------- recomputed operations


@pytest.mark.one_in(3)
@in_and_out_of_scan
@every_module
def test_remat_policy_everything_recomputes_no_dot_general(module, scan):
    want = counted(module, "none", "dot_general", scan)
    assert counted(module, remat_policy(), "dot_general", scan) == want
    assert counted(module, remat_policy("nothing"), "dot_general", scan) > want  # guard


def test_remat_policy_dots_recomputes_only_products_with_batch_dims():
    attention = fsdp(Attention)
    once = counted(attention, "none", "dot_general")
    assert counted(attention, remat_policy("everything"), "dot_general") == once
    assert counted(attention, remat_policy("dots"), "dot_general") == once + 2 * LAYERS
    assert counted(attention, remat_policy("nothing"), "dot_general") == once + 5 * LAYERS


@in_and_out_of_scan
@pytest.mark.parametrize("base", BASES)
def test_remat_policy_gathers_each_weight_once_forward_and_once_backward(base, scan):
    module = MODULES["gathered in the dtype of compute"]
    kernels = 2 * (1 if scan else LAYERS)
    assert counted(module, remat_policy(base), "all_gather", scan) == 2 * kernels
    assert counted(module, "none", "all_gather", scan) == kernels


def test_remat_policy_with_a_custom_base_follows_the_base_for_activations():
    named = MODULES["named"]
    activation = ROWS * HIDDEN
    assert activation in kept_sizes(named, remat_policy(SAVEABLE.save_only_these_names("activation")))
    assert activation in kept_sizes(named, remat_policy(SAVEABLE.save_any_names_but_these("gathered")))
    assert activation not in kept_sizes(named, remat_policy(SAVEABLE.save_only_these_names("another")))
    assert activation not in kept_sizes(named, remat_policy(SAVEABLE.nothing_saveable))
    # A policy that saves a weight by name keeps the weight.
    assert WEIGHT in kept_sizes(named, remat_policy(SAVEABLE.save_only_these_names("gathered")))


def test_remat_policy_keeps_the_offload_decision_of_the_base():
    offload = SAVEABLE.offload_dot_with_no_batch_dims("device", "pinned_host")
    policy, kernel = remat_policy(offload), jax.typeof(jnp.ones((2, 2)))
    dot = partial(jax.lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    eqn = jax.make_jaxpr(dot)(jnp.ones((2, 2)), jnp.ones((2, 2))).jaxpr.eqns[0]
    assert policy(eqn.primitive, kernel, kernel, **eqn.params) == offload(eqn.primitive, kernel, kernel, **eqn.params)
    assert policy(eqn.primitive, kernel, kernel, **eqn.params).dst == "pinned_host"


# ------------------------------------------------------------------------------------------------------------ results


@pytest.mark.one_in(2)
@both_modes
def test_gradients_with_remat_policy_match_gradients_without_remat(check_vma):
    mesh, module = mesh_of(1, MESH_SIZE), MODULES["cast to a wider dtype"]
    x = jax.random.normal(jax.random.key(1), X.shape)
    params = init_sharded(Stack(module), mesh, jax.random.key(0), x, batch_axes="fsdp")["params"]

    def grads_of(policy):
        def body(params, x):
            def loss(params):
                return jnp.mean(Stack(module, policy).apply({"params": params}, x) ** 2)

            return sync_gradients(jax.grad(loss)(params), "fsdp")

        specs = partition_specs(params, mesh)
        return on_mesh(body, mesh, check_vma, (specs, P("fsdp")), specs)(params, x)

    want = grads_of("none")
    assert not [path for path, leaf in leaves_with_path(unbox(want)) if np.abs(leaf).max() == 0]  # guard
    for base in BASES:
        assert_same_params(grads_of(remat_policy(base)), want)


# ------------------------------------------------------------------------------------------------------- the function


def test_remat_policy_returns_the_same_object_for_the_same_base():
    assert remat_policy() is remat_policy(None) is remat_policy("everything")
    assert remat_policy("dots") is remat_policy("dots") is not remat_policy("nothing")
    assert remat_policy(keep_but) is remat_policy(keep_but)


# Operations that exist in only one of the two tested releases of JAX.
OTHER_RELEASE = {
    *("log2", "one_minus_square", "polynomial", "relayout", "reduced_vary_cast", "vary_unreduced_cast"),
    *("reduced_vary_cast_p", "vary_unreduced_cast_p"),
}


def test_gathers_and_recomputed_lists_name_existing_jax_primitives():
    gc.unfreeze()  # frozen objects are not listed
    names = {thing.name for thing in gc.get_objects() if isinstance(thing, Primitive)}
    assert {name for name in names if name.startswith("all_gather")} <= GATHERS
    # A release may split some gathers into two operations (_start and _done), and lack others.
    assert {name.removesuffix("_start").removesuffix("_done") for name in GATHERS} <= names
    assert RECOMPUTED - names <= OTHER_RELEASE


# ---------------------------------------------------------------------------------------------- the compiled program

DIM, DEEP = 512, 96  # some layers live in on-chip memory, which does not count
LAYER_BYTES = 2 * DIM * 4 * DIM * 2  # two kernels in bfloat16


class TpuMlp(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.silu(nn.Dense(4 * DIM, use_bias=False, dtype=jnp.bfloat16, name="up")(x))
        return x + nn.Dense(DIM, use_bias=False, dtype=jnp.bfloat16, name="down")(h), None


class TpuModel(nn.Module):
    policy: object

    @nn.compact
    def __call__(self, x):
        block = nn.remat(fsdp(TpuMlp, gather_dtype=jnp.bfloat16), policy=self.policy, prevent_cse=False)
        scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=DEEP)
        return scan(name="blocks")(x, None)[0]


def squares(params, apply_fn, batch, rng):
    del rng
    return jnp.mean(apply_fn({"params": params}, batch).astype(jnp.float32) ** 2)


def compiled(policy):
    batch = jax.ShapeDtypeStruct((8 * 128, DIM), jnp.bfloat16)
    step, args = Workload(TpuModel(policy), optax.sgd(1e-3), batch, squares).build_step({"fsdp": 8})
    return forecast(step, *args, topology="v5e:2x4")


def gathers(found, direction):
    return sum(
        c.count * len(c.modules) for c in found.collectives if c.kind == "all-gather" and c.direction == direction
    )


@pytest.mark.slow
def test_remat_policy_frees_the_bytes_of_gathered_weights_on_tpu():
    """On a TPU ``remat_policy`` frees the bytes of gathered weights; the reference policy differs in gathers only."""
    pytest.importorskip("libtpu")
    keeping, dropping = compiled(partial(keep_but, RECOMPUTED)), compiled(remat_policy("everything"))
    saved = keeping.memory.temporary_bytes - dropping.memory.temporary_bytes
    assert saved >= 0.85 * DEEP * LAYER_BYTES
    assert [gathers(keeping, direction) for direction in ("forward", "recompute")] == [2 * DEEP, 0]
    assert [gathers(dropping, direction) for direction in ("forward", "recompute")] == [2 * DEEP, 2 * DEEP]


def test_complex_operations_are_known_by_their_types_or_their_name():
    real, whole, pair = (jax.core.ShapedArray((2,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.complex64))
    assert not may_be_complex("add", [real, whole], {}) and not may_be_complex(
        "convert_element_type", [real], {"new_dtype": jnp.bfloat16}
    )
    assert may_be_complex("add", [real, pair], {}) and may_be_complex(
        "convert_element_type", [real], {"new_dtype": jnp.complex64}
    )
    assert may_be_complex("fft", [real], {})
