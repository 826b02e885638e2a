"""Tests of the plan against real placements, gathers and kept bytes: leaf by leaf, byte by byte, on 8 devices."""

import dataclasses
import io
import json
import math
import re
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from tests.models import LanguageModel
from tests.support import AXES, Model, fsdp, in_case, mean_loss, mesh_of
from xlstm_jax.distributed import (
    Offload,
    abstract_train_state,
    create_train_state,
    init_sharded,
    nnx_model,
    partition_specs,
    shard_module_params,
    shard_modules,
    shard_params,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.reasons import (
    Indivisible,
    Largest,
    NoParameter,
    OfSeveral,
    PrngKeys,
    Scalar,
    TooSmall,
    Unwrapped,
)
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.collectives import entry_axes
from xlstm_jax.distributed.optimizers.sharded_optimizer import optimizer_state_shardings
from xlstm_jax.distributed.plan.expert_plan import ExpertPlan, expert_plan
from xlstm_jax.distributed.plan.init_errors import InitError
from xlstm_jax.distributed.plan.leaf_plan import ByteCount, LeafPlan
from xlstm_jax.distributed.plan.matrix_plan import MatrixPlan, matrix_plans
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.distributed.plan.sharding_plan import ShardingPlan
from xlstm_jax.forecast.training import Workload
from xlstm_jax.formatting import format_bytes, format_fraction

KEY = jax.random.key(0)
X = jnp.ones((16, 16))
TOKENS = jnp.zeros((16, 8), jnp.int32)
# Moments of the parameters' shapes, and factored ones.
TX = optax.chain(optax.adamw(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=8))

# ---------------------------------------------------------------------------------------------------------- the models


class MLP(nn.Module):
    """Leaves split along either dim, small leaves, and leaves with sizes that no axis divides."""

    wrap: object = staticmethod(lambda cls: cls)

    @nn.compact
    def __call__(self, x):
        x = self.wrap(nn.Dense)(64, name="wide")(x)
        x = self.wrap(nn.Dense)(9, name="odd")(x)
        x = self.wrap(nn.Dense)(7, name="odder")(x)
        return nn.Dense(32, name="bare")(x)


class ConvNet(nn.Module):
    """Convolutions and a norm with running statistics."""

    wrap: object

    @nn.compact
    def __call__(self, images):
        x = self.wrap(nn.Conv)(32, (3, 3))(images)
        x = self.wrap(nn.BatchNorm)(use_running_average=False)(x)
        return self.wrap(nn.Conv)(16, (3, 3))(x)


class Tied(nn.Module):
    """An embedding used twice in a forward pass."""

    wrap: object

    def setup(self):
        self.embed = self.wrap(nn.Embed)(48, 16)

    def __call__(self, tokens):
        return self.embed.attend(jnp.tanh(self.embed(tokens)))


class Boxed(nn.Module):
    """Kernels that the model splits over "dp", as for tensor parallelism, and a wrapper within a wrapper."""

    wrap: object

    @nn.compact
    def __call__(self, x):
        split = nn.with_partitioning(nn.initializers.normal(), ("dp", None))
        small = nn.with_partitioning(nn.initializers.normal(), ("dp",))
        x = self.wrap(nn.Dense)(32, kernel_init=split, bias_init=small, name="boxed")(x)
        inner = shard_module_params(nn.Dense, "dp", 16)
        return self.wrap(inner)(64, name="nested")(x)


class Members(nn.Module):
    """Members of an ensemble, a group per device of "dp": ``nn.vmap`` names the added dim."""

    wrap: object
    members: int = 4

    @nn.compact
    def __call__(self, x):
        member = nn.vmap(
            self.wrap(nn.Dense),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=self.members,
            metadata_params={nn.PARTITION_NAME: "dp"},
        )
        return member(16, name="members")(x)


class Kinds(nn.Module):
    """A leaf of each kind of dtype; leaves without gradients have no optimizer state."""

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal
        self.param("bf16", normal(1.0, jnp.bfloat16), (16, 8))
        # A used leaf, because XLA for CPU aborts on the reduction of a complex gradient that is a constant 0.
        x = x + jnp.abs(self.param("complex", normal(1.0, jnp.complex64), (16, 8))).sum()
        self.param("counts", lambda key: jnp.arange(64))
        self.param("flags", lambda key: jnp.ones((64,), bool))
        self.param("key", lambda key: jax.random.split(key, 64))
        self.param("scalar", normal(), ())
        return x


def language_model(block):
    return LanguageModel(block, 32, 3, 2, remat=True, wrap=fsdp())


# Model, input, mesh; number of split parameters, number of replicated parameters.
MODELS = {
    "dense": (MLP(fsdp()), X, (2, 4), 3, 5),
    "scanned": (Model(fsdp(), remat=True), X, (2, 4), 5, 5),
    "unrolled": (Model(fsdp(), scan=False), X, (1, 8), 11, 11),
    "wrapped as a whole": (fsdp(Model)(), X, (2, 4), 8, 2),
    "batch statistics": (ConvNet(fsdp()), jnp.ones((8, 4, 4, 3)), (2, 4), 5, 1),
    "tied": (Tied(fsdp()), TOKENS, (2, 4), 1, 0),
    "tuple axes": (Model(fsdp(axis_name=("dp", "fsdp"))), X, (2, 4), 5, 5),
    "an axis of one": (Model(fsdp()), X, (8, 1), 0, 10),
    "boxes of the model, nested wrappers": (Boxed(fsdp()), X, (2, 4), 4, 0),
    "vmap over an axis": (Members(fsdp()), X, (2, 4), 1, 1),
    "kinds of dtype": (fsdp(Kinds)(), X, (2, 4), 4, 2),
    "recurrent": (language_model("recurrent"), TOKENS, (2, 4), 10, 2),
    "transformer": (language_model("transformer"), TOKENS, (2, 4), 8, 1),
}


def placed(model, tx, mesh, x):
    """Returns variables and optimizer state placed on the mesh."""
    variables = dict(init_sharded(model, mesh, KEY, x, batch_axes=AXES))
    if set(variables) == {"params"}:
        state = create_train_state(model, tx, mesh, KEY, x, batch_axes=AXES, allow_replicated=True)
        return {"params": state.params}, state.opt_state
    params = unbox(variables["params"])
    places = optimizer_state_shardings(jax.eval_shape(tx.init, params), variables["params"], mesh)
    return variables, jax.jit(tx.init, out_shardings=places)(params)


def share(value):
    """Returns the total bytes of a global array, and the bytes of its shard on the first device."""
    piece = value.addressable_shards[0].data
    itemsize = value.dtype.itemsize
    return ByteCount(math.prod(value.shape) * itemsize, math.prod(piece.shape) * itemsize)


def state_shares(opt_state, paths):
    """Returns the bytes of the optimizer state per parameter, matched by the longest path suffix."""
    shares = Counter()
    for path, value in leaves_with_path(opt_state):
        owners = [own for own in paths if f"/{path}".endswith(f"/{own}")]
        owner = max(owners, key=len, default=f"(optimizer) {path}")
        shares[owner] = shares.get(owner, ByteCount()) + share(value)
    return shares


def plan_of(name, **options):
    model, x, (dp, fsdp_size), *_ = MODELS[name]
    return plan_sharding(model, {"dp": dp, "fsdp": fsdp_size}, x, **options)


# ------------------------------------------------------------------------------------------------ plan and real arrays


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:'bf16', and 1 of 3 parameters in all, are trained in bfloat16")
@pytest.mark.parametrize("name", MODELS)
def test_plan_rows_equal_the_placed_leaves_in_shape_names_and_bytes(name):
    model, x, shape, num_split, num_whole = MODELS[name]
    variables, opt_state = placed(model, TX, mesh_of(*shape), x)
    plan = plan_of(name, tx=TX)
    params = dict(leaves_with_path(variables.pop("params")))
    others = {f"({name}) {path}": leaf for name in variables for path, leaf in leaves_with_path(variables[name])}
    states = state_shares(opt_state, params)
    assert [row.path for row in plan.rows if row.collection == "params"] == list(params)
    assert {row.path for row in plan.rows} == {*params, *others, *states}
    for path, leaf in (params | others).items():
        row, value = plan.row(path), leaf_of(leaf).value
        assert (row.shape, row.dtype, row.names) == (value.shape, str(value.dtype), leaf_of(leaf).names), path
        assert (row.parameters if path in params else row.other) == share(value), path
        assert row.parts == len({str(index) for index in value.sharding.devices_indices_map(value.shape).values()}), (
            path
        )
    for path in (*params, *states):
        assert plan.row(path).optimizer == states.get(path, ByteCount()), path
    # Guards: the comparison covers the intended numbers of split and replicated leaves.
    parts = [row.parts > 1 for row in plan.rows if row.collection == "params"]
    assert (sum(parts), len(parts) - sum(parts)) == (num_split, num_whole)
    assert any(state.per_device < state.total for state in states.values()) == (num_split > 0)


def test_plan_totals_equal_the_bytes_of_the_train_state_per_device():
    model, x, shape, *_ = MODELS["transformer"]
    state = create_train_state(model, optax.adamw(1e-2), mesh_of(*shape), KEY, x, batch_axes=AXES)
    plan = plan_of("transformer", tx=optax.adamw(1e-2))
    for kind, tree in (("parameters", state.params), ("optimizer", state.opt_state)):
        shares = [share(value) for value in jax.tree.leaves(tree)]
        assert getattr(plan, kind) == sum(shares, ByteCount())
    assert plan.bytes_per_device == plan.parameters.per_device * 2 + plan.optimizer.per_device
    whole = [value for value in jax.tree.leaves(state.params) if share(value).total == share(value).per_device]
    assert plan.replicated_fraction == sum(value.nbytes for value in whole) / plan.parameters.total > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["scanned", "kinds of dtype", "tuple axes"])
def test_plan_gradient_bytes_equal_the_bytes_of_computed_gradients(name):
    model, x, shape, *_ = MODELS[name]
    mesh = mesh_of(*shape)
    variables = init_sharded(model, mesh, KEY, x, batch_axes=AXES)
    specs = partition_specs(variables, mesh)

    def loss(variables, x):
        return jnp.mean(model.apply(variables, x) ** 2)

    run = jax.shard_map(value_and_grad(loss, AXES), mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(P(), specs))
    grads = jax.jit(run)(variables, x)[1]["params"]
    plan = plan_of(name)
    for path, leaf in leaves_with_path(grads):
        value = leaf_of(leaf).value
        takes_one = path not in ("counts", "flags", "key")
        assert plan.row(path).gradients == (share(value) if takes_one else ByteCount()), path


def gathers_of(jaxpr, times=1):
    """Returns the results of all all-gathers of a program, with the number of runs, loops included."""
    found = Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("all_gather"):
            aval = eqn.outvars[0].aval
            found[math.prod(aval.shape) * aval.dtype.itemsize, str(aval.dtype)] += times
        inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        for sub in jaxprs_in_params(eqn.params):
            found += gathers_of(sub, inner)
    return found


def forward_gathers(model, applied, x):
    """Returns the all-gathers of ``applied``'s forward pass inside ``shard_map``, on the parameters of ``model``."""
    mesh = mesh_of(2, 4)
    variables = jax.eval_shape(lambda: init_sharded(model, mesh, KEY, x, batch_axes=AXES))
    specs = partition_specs(variables, mesh)
    forward = jax.shard_map(applied.apply, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=P(AXES), check_vma=False)
    return gathers_of(jax.make_jaxpr(forward)(variables, x).jaxpr)


@pytest.mark.parametrize("gather_dtype", [None, jnp.bfloat16], ids=["as stored", "bfloat16"])
@pytest.mark.parametrize(
    "make, x, times",
    [(MLP, X, 3), (partial(Model, remat=True), X, 11), (lambda wrap: wrap(Model)(), X, 8), (Tied, TOKENS, 2)],
    ids=["dense", "scanned", "wrapped as a whole", "tied"],
)
def test_plan_gathered_bytes_and_uses_match_the_gathers_of_a_forward_pass(make, x, times, gather_dtype):
    model = make(fsdp(gather_dtype=gather_dtype))
    want = Counter()
    for row in plan_sharding(model, {"dp": 2, "fsdp": 4}, x).rows:
        want[row.gathered_bytes, row.gather_dtype] += row.uses
    assert +want == forward_gathers(model, model, x)
    assert sum(want.values()) == times


def test_state_of_an_optimizer_counts_for_its_parameters_and_the_rest_has_rows():
    plan = plan_sharding(nn.Dense(256), {"fsdp": 8}, jnp.ones((8, 1024)), tx=optax.adam(1e-3), min_weight_size=0)
    size = 4 * 1024 * 256
    assert plan.row("kernel").optimizer == ByteCount(2 * size, 2 * size // 8)  # two moments
    assert plan.row("bias").optimizer == ByteCount(2 * 1024, 2 * 1024 // 8)
    others = {row.path: row.optimizer for row in plan.rows if row.collection == "optimizer"}
    assert others == {"(optimizer) 0/count": ByteCount(4, 4)}


def test_frozen_parameters_have_no_gradients_and_no_optimizer_state_in_the_plan():
    frozen = {"trainable": lambda path: path != "kernel", "tx": optax.adam(1e-3)}
    plan = plan_sharding(nn.Dense(256), {"fsdp": 8}, jnp.ones((8, 1024)), min_weight_size=0, **frozen)
    kernel, bias = plan.row("kernel"), plan.row("bias")
    assert kernel.gradients == kernel.optimizer == ByteCount() and not kernel.trainable
    assert bias.gradients == bias.parameters == ByteCount(1024, 128) and bias.trainable
    assert kernel.parameters == ByteCount(4 * 1024 * 256, 4 * 1024 * 256 // 8)


def test_plan_of_leaves_split_over_several_axes_is_equal_after_json():
    plan = plan_sharding(nn.Dense(256), {"dp": 2, "fsdp": 4}, jnp.ones((8, 1024)))
    assert plan.row("kernel").names == (("dp", "fsdp"), None)
    read = ShardingPlan.from_json(plan.to_json())
    assert read == plan and read.row("kernel").names == (("dp", "fsdp"), None)


def test_plan_counts_a_padded_dim_as_a_single_use():
    """Three biases in eight rows are gathered once: only a scan counts as layers, not the padding ratio 8 // 3."""
    model = shard_module_params(nn.Dense, "fsdp", min_weight_size=0, uneven="pad")(3)
    plan = plan_sharding(model, {"fsdp": 8}, jnp.ones((8, 5)))
    assert {row.path: (row.shape, row.uses, row.gathered_bytes) for row in plan.rows} == {
        "bias": ((3,), 1, 8 * 4),
        "kernel": ((5, 3), 1, 8 * 3 * 4),
    }


def test_plan_counts_each_vmap_member_while_a_device_gathers_members_together():
    """Each device gathers its two of four ensemble members at once; the plan counts each member."""
    wrap = fsdp(min_weight_size=16)
    found = forward_gathers(Members(wrap), Members(wrap, members=2), X)
    rows = plan_sharding(Members(wrap), {"dp": 2, "fsdp": 4}, X).rows
    assert [(row.uses, row.gathered_bytes, row.use_shape) for row in rows] == [(2, 64, (16,)), (2, 1024, (16, 16))]
    assert found == {(2 * 64, "float32"): 1, (2 * 1024, "float32"): 1}


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    shapes=st.lists(
        st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 12, 16]), max_size=3).map(tuple), min_size=1, max_size=5
    ),
    axes=st.sampled_from([("fsdp",), ("dp",), ("dp", "fsdp"), ("fsdp", "dp")]),
    threshold=st.integers(0, 200),
)
def test_plan_of_a_plain_model_splits_leaves_as_shard_params_does(shapes, axes, threshold):
    class Leaves(nn.Module):
        @nn.compact
        def __call__(self):
            for i, shape in enumerate(shapes):
                self.param(f"leaf_{i}", nn.initializers.ones, shape)

    plan = plan_sharding(Leaves(), {"dp": 2, "fsdp": 4}, axis_name=axes, min_weight_size=threshold)
    split = {}

    def per_device():
        params = {f"leaf_{i}": jnp.ones(shape) for i, shape in enumerate(shapes)}
        for path, leaf in leaves_with_path(shard_params(params, axes, threshold)):
            split[path] = (leaf_of(leaf).names, 4 * math.prod(leaf_of(leaf).value.shape))

    jax.eval_shape(jax.shard_map(per_device, mesh=mesh_of(2, 4), in_specs=(), out_specs=P()))
    # Training balances the links between axes, so that the axes of a dim may come in another order.
    unordered = lambda names: [set(entry_axes(entry)) for entry in names]  # noqa: E731
    planned = {row.path: (unordered(row.names), row.parameters.per_device) for row in plan.rows}
    assert planned == {path: (unordered(names), size) for path, (names, size) in split.items()}
    assert plan.assumed.startswith("shard_module_params(Leaves, ") and plan.assumed.endswith(f", {threshold})")


def test_plan_of_a_fully_wrapped_model_equals_the_plan_of_the_plain_model():
    sizes = {"dp": 2, "fsdp": 4}
    plain = plan_sharding(Model(), sizes, X, axis_name="fsdp", min_weight_size=32, tx=TX)
    wrapped = plan_sharding(fsdp(Model)(), sizes, X, tx=TX)
    assert plain.rows == wrapped.rows and not wrapped.assumed
    assert plain.assumed == "shard_module_params(Model, 'fsdp', 32)"
    everywhere = plan_sharding(Model(), sizes, X)
    assert everywhere.assumed == "shard_module_params(Model, ('dp', 'fsdp'), 262144)"
    assert everywhere.rows != plain.rows


# ----------------------------------------------------------------------------------------------------- without tracing


def test_plan_of_70_billion_parameters_takes_seconds_and_allocates_no_arrays():
    wrap = partial(shard_module_params, axis_name="fsdp", gather_dtype=jnp.bfloat16)
    model = LanguageModel("transformer", 8192, 80, 64, remat=True, wrap=wrap)
    tokens = jax.ShapeDtypeStruct((4096, 2048), jnp.int32)
    before, start = {id(array) for array in jax.live_arrays()}, time.process_time()
    plan = plan_sharding(model, {"dp": 16, "fsdp": 256}, tokens, tx=optax.adamw(1e-3))
    assert time.process_time() - start < 20  # processor time; half a second on an idle machine
    assert {id(array) for array in jax.live_arrays()} <= before
    assert plan.devices == 4096 and sum(math.prod(row.shape) for row in plan.rows) > 69e9
    up = plan.row("blocks/up/kernel")
    assert (up.names, up.uses, up.gathered_bytes) == ((None, None, "fsdp"), 80, 2 * 8192 * 6 * 8192)


class Jitted(nn.Module):
    """``nn.jit`` reuses a trace for several calls of ``init``."""

    @nn.compact
    def __call__(self, x):
        return JITTED_DENSE(32, name="dense")(x)


JITTED_DENSE = nn.jit(fsdp(nn.Dense))


def test_plan_sharding_and_init_sharded_leave_no_state_for_later_calls():
    mesh, sizes = mesh_of(2, 4), {"dp": 2, "fsdp": 4}
    init = partial(init_sharded, Jitted(), mesh, KEY, X, batch_axes=AXES)
    first = jax.eval_shape(init)
    plan = plan_sharding(Jitted(), sizes, X)
    assert jax.tree.structure(jax.eval_shape(init)) == jax.tree.structure(first)
    assert plan == plan_sharding(Jitted(), sizes, X)
    kernel, bias = plan.rows[1], plan.rows[0]
    assert (kernel.names, kernel.uses, bias.uses) == ((None, "fsdp"), 1, 1)
    assert leaf_of(first["params"]["dense"]["kernel"]).names == kernel.names
    with jax.set_mesh(mesh):
        assert plan_sharding(Jitted(), sizes, X) == plan


def test_plan_sharding_accepts_cond_with_a_module_in_a_single_branch():
    class Branches(nn.Module):
        def setup(self):
            self.dense = fsdp(nn.Dense)(16)

        def __call__(self, x):
            return nn.cond(x.sum() > 0, lambda self, x: self.dense(x), lambda self, x: x, self, self.dense(x))

    row = plan_sharding(Branches(), {"fsdp": 4}, X).row("dense/kernel")
    assert row.axes == ("fsdp",) and row.uses in (1, 2)


# ------------------------------------------------------------------------------------------------------------- reasons


@pytest.mark.parametrize(
    "name, path, reason",
    [
        ("dense", "wide/kernel", Largest(1, 64, 4)),
        ("dense", "odd/bias", TooSmall(9, 32)),
        ("dense", "odder/kernel", Indivisible(4, (9, 7))),
        ("dense", "bare/kernel", Unwrapped()),
        ("scanned", "blocks/LayerNorm_0/bias", TooSmall(16, 32)),
        ("scanned", "blocks/Dense_0/kernel", Largest(1, 32, 4)),
        ("batch statistics", "(batch_stats) BatchNorm_0/mean", NoParameter()),
        ("boxes of the model, nested wrappers", "boxed/kernel", Largest(1, 32, 4)),
        (
            "boxes of the model, nested wrappers",
            "nested/kernel",
            OfSeveral((("'dp'", Largest(1, 64, 2)), ("'fsdp'", Largest(0, 32, 4)))),
        ),
        ("kinds of dtype", "key", PrngKeys()),
        ("kinds of dtype", "scalar", TooSmall(1, 32)),
    ],
)
def test_plan_row_reason_equals_the_reason_of_the_sharding_decision(name, path, reason):
    plan = plan_of(name)
    assert plan.row(path).reason == reason and str(reason) in plan.explain(path)
    assert json.loads(plan.to_json())["leaves"][path]["reason"]["kind"] == type(reason).__name__


def test_plan_reason_is_from_the_nested_wrapper_responsible_for_the_split():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return shard_module_params(nn.Dense, "fsdp", 2**20)(16, name="dense")(x)

    plan = plan_sharding(shard_module_params(Outer, "fsdp", 64)(), {"fsdp": 8}, jnp.ones((8, 32)))
    assert plan.row("dense/kernel").reason == Largest(0, 32, 8) and plan.row("dense/bias").reason == TooSmall(16, 64)


def test_explain_describes_a_leaf_with_numbers_and_raises_for_an_unknown_path():
    plan = plan_of("scanned", tx=optax.adamw(1e-2))
    assert plan.explain("blocks/Dense_0/kernel") == (
        "'blocks/Dense_0/kernel' float32[3, 16, 32] (6 KiB) is split along dim 2 over 'fsdp' into 4 shards (dim 1 of "
        "size 32 is the largest that 4 divides; its module sees [16, 32]); a device keeps 1.5 KiB of it, 1.5 KiB of "
        "its gradient and 3 KiB of optimizer state, and gathers 2 KiB in float32 3 times in a forward pass, "
        "with all of the module 'blocks'."
    )
    assert plan.explain("blocks/LayerNorm_0/bias") == (
        "'blocks/LayerNorm_0/bias' float32[3, 16] (192 B) is replicated on each of 8 devices: 16 values are fewer than "
        "min_weight_size=32; its module sees [16]; a device keeps 192 B of it, 192 B of its gradient and 384 B of "
        "optimizer state."
    )
    assert plan.explain("(optimizer) 0/count") == (
        "'(optimizer) 0/count' int32[] (4 B) is replicated on each of 8 devices: belongs to no parameter; a device "
        "keeps 4 B of optimizer state."
    )
    with pytest.raises(ValueError, match=r"'blocks/Dense_0/kernal' is none of .* 11 leaves; .*'blocks/Dense_0/kernel'"):
        plan.explain("blocks/Dense_0/kernal")


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1234567, "1.18 MiB"),
        (1023 * 2**10, "1 MiB"),
        (100 * 2**20, "100 MiB"),
        (2**30 - 1, "1 GiB"),
        (5 * 2**40, "5 TiB"),
        (999 * 2**10, "999 KiB"),
        (3000 * 2**50, "3000 PiB"),
    ],
)
def test_format_bytes_chooses_binary_units_with_three_digits(count, text):
    assert format_bytes(count) == text


def test_format_fraction_prints_percent_with_two_digits():
    assert [format_fraction(f) for f in (0, 0.000019, 0.0312, 0.5, 1)] == ["0%", "0.0019%", "3.1%", "50%", "100%"]


# ----------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "name", ["batch statistics", "tuple axes", "boxes of the model, nested wrappers", "kinds of dtype"]
)
def test_plan_round_trips_through_json(name):
    plan = plan_of(name, tx=TX)
    text = plan.to_json()
    assert ShardingPlan.from_json(text) == plan
    assert ShardingPlan.from_json(text).to_json() == text
    assert plan_of(name, tx=TX).to_json() == text


def test_plan_repr_is_a_single_line_and_repr_html_has_the_table():
    plan = plan_of("tuple axes")
    assert len(repr(plan)) < 160 and repr(plan).startswith("<ShardingPlan on dp=")
    html = plan._repr_html_()
    assert not [text for text in ("<pre", "Sharding plan", plan.rows[0].path.split("/")[-1]) if text not in html]


def test_plan_json_changes_only_in_lines_of_affected_leaves():
    plain = partial(plan_sharding, Model(), {"dp": 2, "fsdp": 4}, X, axis_name="fsdp")
    before, after = (plain(min_weight_size=size).to_json().splitlines() for size in (65, 64))
    changed = [(old.strip(), new.strip()) for old, new in zip(before, after, strict=True) if old != new]
    # The wrapper, the totals; the last kernel, 16 x 4; and the reasons that name the threshold.
    assert len(changed) == 2 + 4 + sum('"minimum": 65' in line for line in before) - 1
    assert ('"names": [null, null], "parts": 1,', '"names": ["fsdp", null], "parts": 4,') in changed


def test_plan_diff_lists_added_removed_and_changed_leaves():
    class Wider(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = fsdp(nn.Dense)(64, name="wide")(x)
            return fsdp(nn.Dense)(8, name="new")(x)

    before = plan_sharding(MLP(fsdp(min_weight_size=100)), {"dp": 2, "fsdp": 4}, X)
    after = plan_sharding(Wider(), {"dp": 1, "fsdp": 8}, X)
    assert before.diff(before) == [] == before.diff(ShardingPlan.from_json(before.to_json()))
    found = {difference.path: difference for difference in before.diff(after)}
    assert next(iter(found)) == "(mesh)" and "('fsdp', 4)" in str(found["(mesh)"])
    assert str(found["odd/kernel"]) == "odd/kernel: removed, float32[64, 9]"
    assert str(found["new/kernel"]) == "new/kernel: added, float32[64, 8]"
    assert found["wide/bias"].before["names"] == (None,) and found["wide/bias"].after["names"] == ("fsdp",)
    assert "\n  parts: 1 -> 8\n" in str(found["wide/bias"])
    assert "  parameters: 256 B, 256 B per device -> 256 B, 32 B per device" in str(found["wide/bias"])
    assert {"shape", "dtype"}.isdisjoint(found["wide/kernel"].before)


def test_plan_check_raises_for_exceeded_limits_with_the_worst_leaves():
    plan = plan_of("dense", tx=optax.adamw(1e-2))
    whole = [row.parameters.total for row in plan.rows if row.collection == "params" and row.parts == 1]
    fraction = sum(whole) / plan.parameters.total
    plan.check(max_replicated_fraction=fraction, max_bytes_per_device=plan.bytes_per_device)
    with pytest.raises(
        ValueError,
        match=re.escape(f"({format_bytes(sum(whole))} of {format_bytes(plan.parameters.total)})")
        + r" are replicated on each of 8 devices; max_replicated_fraction=0.02 allows 2%. The largest: 'bare/kernel' .*"
        r"no wrapped module owns it; .*; and 2 more. Wrap their modules",
    ):
        plan.check()
    with pytest.raises(
        ValueError,
        match=rf"keeps .* \({plan.bytes_per_device} bytes\); max_bytes_per_device=1000 allows 1000 B. The largest per "
        r"device: 'wide/kernel' .*Split over more devices",
    ):
        plan.check(max_replicated_fraction=1, max_bytes_per_device=1000)
    for fraction in (float("nan"), -0.1, 2):  # nothing is more than NaN
        with (
            in_case(fraction=fraction),
            pytest.raises(ValueError, match=r"max_replicated_fraction=\S+ is no fraction from 0 to 1; pass 0.02"),
        ):
            plan.check(max_replicated_fraction=fraction)
    with pytest.raises(ValueError, match="max_bytes_per_device=nan is no positive number of bytes; pass 14"):
        plan.check(max_bytes_per_device=float("nan"))


def test_plan_on_a_single_device_has_replicated_fraction_zero():
    one = plan_sharding(Model(), {"fsdp": 1}, X, min_weight_size=32)
    assert one.replicated_fraction == 0 and one.replicated == ()
    assert plan_sharding(Model(fsdp()), {"dp": 8, "fsdp": 1}, X).replicated_fraction == 1
    assert "is replicated on the only device" in plan_sharding(Model(), {"fsdp": 1}, X).explain("Dense_0/bias")


# -------------------------------------------------------------------------------------------------------------- errors


# --------------------------------------------------------------------------------------------------------------- tables


def rendered(plan, width):
    from rich.console import Console

    console = Console(width=width, file=io.StringIO())
    console.print(plan.table())
    return console.file.getvalue()


def test_printed_plan_fits_the_width_of_the_terminal(monkeypatch):
    plan = plan_of("dense")
    for width in (60, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        assert str(plan) == "\n".join(line.rstrip() for line in rendered(plan, width).splitlines())
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, str(plan).splitlines())) <= 80 and repr(plan).startswith("<ShardingPlan on ")


@pytest.mark.parametrize("width", [100, 140])
def test_plan_table_fits_the_width_and_lists_modules_by_size_totals_and_reasons(width):
    plan = plan_of("transformer", tx=optax.adamw(1e-2))
    text = rendered(plan, width)
    lines = [line.strip() for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    modules = [line.split()[0] for line in lines if line.split() and line.split()[0] in ("blocks", "embed", "head")]
    assert modules == ["blocks", "embed", "head"]
    total = next(line for line in lines if line.startswith("total"))
    assert format_bytes(plan.parameters.total) in total and format_bytes(plan.optimizer.per_device) in total
    assert f"{format_fraction(plan.replicated_fraction)} of the parameters' bytes are replicated" in text
    assert re.search(r"final_norm/scale +\S+ \S+ +no wrapped module owns it", text)


def test_plan_table_merges_equal_modules_with_numbered_names():
    text = rendered(plan_of("unrolled"), 140)
    assert "block_*" in text and "LayerNorm_0/bias \N{MULTIPLICATION SIGN}3" in text and "block_1" not in text
    scanned, unrolled = (rendered(plan_of(name), 140) for name in ("scanned", "unrolled"))
    assert len(unrolled.splitlines()) == len(scanned.splitlines())


def test_plan_table_of_a_plain_model_states_the_assumed_wrapper():
    plan = plan_sharding(Model(), {"fsdp": 4}, X)
    assert "No module is wrapped; planned as shard_module_params(Model, 'fsdp', 262144)." in rendered(plan, 100)


def test_plan_separates_host_bytes_of_offloaded_optimizer_state():
    """The plan counts host and device bytes of offloaded state as the abstract state does, and in each text."""
    tx, sizes = optax.adam(1e-3), {"dp": 2, "fsdp": 4}
    state = abstract_train_state(Model(fsdp), tx, mesh_of(2, 4), KEY, X, batch_axes=AXES, offload=Offload())
    want = {"pinned_host": 0, "device": 0}
    for leaf in jax.tree.leaves(state.opt_state):
        want[leaf.sharding.memory_kind] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    plan, without = (plan_sharding(Model(fsdp), sizes, X, tx=tx, offload=Offload(there)) for there in (True, False))
    assert (plan.host.per_device, plan.optimizer.per_device) == tuple(want.values())
    assert want["pinned_host"] > 5 * want["device"] > 0 == without.host.total  # guard: both kinds exist
    assert plan.bytes_per_device == without.bytes_per_device - plan.host.per_device
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert {d.path for d in plan.diff(without)} == {row.path for row in plan.rows if row.host.total}
    row = plan.row("blocks/Dense_0/kernel")
    assert f", its host {format_bytes(row.host.per_device)} of optimizer state" in plan.explain(row.path)
    assert "on its host" in (text := rendered(plan, 160)) and "on its host" not in rendered(without, 160)
    assert f"Its host keeps {format_bytes(plan.host.per_device)} of optimizer state for it." in text


class Positions(nn.Module):
    """Model with a table of four learned positions, which only accepts four tokens."""

    @nn.compact
    def __call__(self, tokens):
        table = self.param("positions", nn.initializers.normal(), (4, 8))
        return nn.Dense(8)(nn.Embed(16, 8)(tokens) + table)


class Switched(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.1, deterministic=not train)(nn.Dense(8)(x))


class NnxPositions(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.positions = nnx.Embed(16, 8, rngs=rngs), nnx.Param(jnp.zeros((4, 8)))

    def __call__(self, tokens):
        return self.embed(tokens) + self.positions


COLUMNS, FEWER = (jax.ShapeDtypeStruct((8, count), jnp.int32) for count in (5, 4))
DO_NOT_FIT = {
    "positions": (
        Positions(),
        COLUMNS,
        r"Positions.init fails .*int32\[8, 5\].* It takes int32\[8, 4\].*\(8, 4\)",
    ),
    "sharded": (shard_modules(Positions(), nn.Dense, "fsdp", 8), COLUMNS, r"int32\[8, 5\].* It takes int32\[8, 4\]"),
    "nnx": (shard_modules(nnx_model(NnxPositions), nnx.Embed, "fsdp", 8), COLUMNS, r"5\].* It takes int32\[8, 4\]"),
    "an argument": (Switched(), X, "missing 1 .*'train'. Pass 'train' too: .* by keyword: .*train'?[=:] ?False"),
    "images": (Positions(), jax.ShapeDtypeStruct((8, 9), jnp.int32), "9.* Pass the arguments with which"),
}


@pytest.mark.parametrize("of_workload", [False, True], ids=["plan_sharding", "Workload"])
@pytest.mark.parametrize("model, inputs, says", DO_NOT_FIT.values(), ids=DO_NOT_FIT)
def test_plan_sharding_and_workload_raise_for_inputs_not_fitting_the_model(model, inputs, says, of_workload):
    """The error names wrong and fitting inputs: README's batch [b, t + 1], a missing argument, an image size."""
    workload = Workload(model, optax.sgd(0.1), inputs, mean_loss)
    with pytest.raises(ValueError, match=says) as raised:
        workload.build_step({"fsdp": 4}) if of_workload else plan_sharding(model, {"fsdp": 4}, inputs)
    assert ("Workload(..., inputs=(" in str(raised.value)) == of_workload


def test_workload_inputs_and_init_kwargs_are_passed_to_init():
    for model, batch, how in [
        (Positions(), COLUMNS, {"inputs": (FEWER,)}),
        (Switched(), X, {"init_kwargs": {"train": False}}),
    ]:
        workload = Workload(model, optax.sgd(0.1), batch, mean_loss, **how)
        _, (state, _, _) = workload.build_step({"fsdp": 4})
        plan = plan_sharding(model, {"fsdp": 4}, *workload.init_inputs, **workload.init_kwargs)
        assert {row.path for row in plan.rows} == {path for path, _ in leaves_with_path(state.params)}


def test_plan_sharding_does_not_report_library_errors_as_init_error():
    with pytest.raises(ValueError, match="'nope' is not an axis of axis_sizes") as raised:
        plan_sharding(shard_modules(Positions(), nn.Dense, "nope", 8), {"fsdp": 4}, FEWER)
    assert not isinstance(raised.value, InitError)


# ------------------------------------------------------------------------------------------------- numbers by hand


def row_of(path, total, per_device, *, collection="params", kind="parameters", **fields):
    parts = total // per_device
    shape = (total // 4,)
    counts = {kind: ByteCount(total, per_device)}
    return LeafPlan(path, collection, shape, "float32", (None,), parts, Scalar(), shape, **counts, **fields)


def plan_by_hand(devices=4):
    rows = (
        row_of("a", 400, 100),
        row_of("small", 8, 8),
        row_of("b", 800, 200),
        row_of("large", 40, 40),
        row_of("(batch_stats) mean", 100, 100, collection="batch_stats", kind="other"),
        row_of("(optimizer) mu", 64, 16, collection="optimizer", kind="host"),
    )
    return ShardingPlan({"dp": 1, "fsdp": devices}, "", rows)


def test_replicated_leaves_are_parameters_largest_first_and_none_on_a_single_device():
    plan = plan_by_hand()
    assert [row.path for row in plan.replicated] == ["large", "small"]
    assert plan.replicated_fraction == 48 / 1248
    assert plan.bytes_per_device == 100 + 8 + 200 + 40 + 100  # without the host
    assert (plan_by_hand(1).replicated, plan_by_hand(1).replicated_fraction) == ((), 0)


def test_plan_check_allows_exactly_its_limits():
    plan = plan_by_hand()
    plan.check(max_replicated_fraction=48 / 1248, max_bytes_per_device=448)
    plan.check(max_replicated_fraction=1)
    plan_by_hand(1).check(max_replicated_fraction=0)
    for limits, match in [
        ({"max_replicated_fraction": 0.038}, r"3.8% of the parameters' bytes .*The largest: 'large'"),
        ({"max_replicated_fraction": 1, "max_bytes_per_device": 447}, "448 bytes.*The largest per device: 'b'"),
        ({"max_replicated_fraction": 1.001}, "is no fraction"),
        ({"max_replicated_fraction": -0.001}, "is no fraction"),
        ({"max_replicated_fraction": float("nan")}, "is no fraction"),
        ({"max_bytes_per_device": 0}, "is no positive number"),
    ]:
        with pytest.raises(ValueError, match=match):
            plan.check(**limits)


def test_leaf_without_gathers_has_gathered_size_0_and_a_leaf_on_hosts_its_bytes():
    rows = plan_by_hand().rows
    assert [row.gathered_size for row in rows] == [0] * len(rows)
    gathered = row_of("w", 400, 100, uses=2, gathered_bytes=200, gather_dtype="bfloat16")
    assert (gathered.gathered_size, gathered.gather_itemsize) == (100, 2)
    stacked = dataclasses.replace(gathered, shape=(3, 2), use_shape=(2,))
    assert (gathered.layers, stacked.layers, dataclasses.replace(stacked, use_shape=()).layers) == (1, 3, 6)
    assert rows[-1].description == "'(optimizer) mu' float32[16] (64 B)"
    assert rows[-2].description == "'(batch_stats) mean' float32[25] (100 B)"


def test_difference_of_plans_names_leaves_in_the_order_of_the_first_plan_then_added_leaves():
    plan = plan_by_hand()
    other = dataclasses.replace(plan, rows=(row_of("new", 4, 4), row_of("b", 800, 800), *plan.rows[:2]))
    changes = plan.diff(other)
    assert [change.path for change in changes] == ["b", "large", *(row.path for row in plan.rows[-2:]), "new"]
    assert [bool(change.before) + 2 * bool(change.after) for change in changes] == [3, 1, 1, 1, 2]
    assert set(changes[0].before) == {"parts", "parameters"}


def test_padding_of_experts_and_idle_owners_of_matrices_by_hand():
    def padding(top_k, experts=8, capacity=None):
        return ExpertPlan("moe", experts, top_k, capacity, ("ep",), 4, 1, 0, 0).padding

    # Two experts on each of four devices: a token sends at most two rows to a device.
    assert [padding(1), padding(2), padding(4), padding(4, capacity=1.25)] == [4, 4, 2, 1.25]
    seven, five = (MatrixPlan("muon", ("w",), count, 2, 3, owners=4, per_owner=2, reason="") for count in (7, 5))
    assert (seven.idle_fraction, seven.workless_fraction) == (1 / 8, 0)
    assert (five.idle_fraction, five.workless_fraction) == (3 / 8, 1 / 4)
    none = MatrixPlan("muon", ("w",), 0, 0, 0, 0, 0, "of rank 1")
    assert (none.idle_fraction, none.workless_fraction) == (0, 0)


def test_matrices_in_a_part_of_the_mesh_count_for_all_parts():
    """Three layers on each of two parts: two matrices in each layer, updated by four devices of a part."""
    leaves, form = (SimpleNamespace(path="up"), SimpleNamespace(path="gate")), SimpleNamespace(rows=2, columns=3)
    group = SimpleNamespace(leaves=leaves, form=form, count=6, num_owners=4, places_per_owner=2)
    choices = {path: SimpleNamespace(count=6, dims=(1, 2), reason="") for path in ("up", "gate")}
    choices["bias"] = SimpleNamespace(count=0, dims=(), reason="of rank 1")
    found = matrix_plans([SimpleNamespace(rule="muon", groups=[group], choices=choices)])
    assert found == (
        MatrixPlan("muon", ("up", "gate"), 12, 2, 3, owners=8, per_owner=2, reason=""),
        MatrixPlan("muon", ("bias",), 0, 0, 0, 0, 0, "of rank 1"),
    )


def test_plan_of_experts_counts_the_layers_of_a_scan_and_no_leaves_of_others():
    rows = [row_of("moe/experts/up", 480, 120), row_of("moe/experts/down", 240, 60), row_of("moe/router", 800, 800)]
    rows += [row_of("other/moe/experts/up", 40, 40), row_of("moe/experts/mean", 44, 44, collection="batch_stats")]
    module = SimpleNamespace(axis=("x", "y"), num_experts=4, top_k=2, capacity_factor=None)
    found = expert_plan("moe", module, 60, {"x": 2, "y": 2, "dp": 3}, rows)
    assert (found.devices, found.layers, found.expert_bytes, found.expert_size) == (4, 3, 60, 15)


def test_plan_of_experts_without_parameters_has_one_layer_and_no_bytes():
    module = SimpleNamespace(axis=None, num_experts=4, top_k=2, capacity_factor=1.25)
    found = expert_plan("", module, 0, {"x": 2}, [row_of("other", 5, 5)])
    assert found == ExpertPlan("", 4, 2, 1.25, (), devices=1, layers=1, expert_bytes=0, expert_size=0)
    found = expert_plan("", module, 4, {"x": 2}, [row_of("experts/up", 32, 8)])
    assert (found.layers, found.expert_bytes, found.expert_size) == (2, 4, 1)


def test_experts_of_a_device_are_neighbours_and_padding_follows_room_and_choices():
    plan = ExpertPlan("moe", 12, 2, None, ("x", "y"), devices=4, layers=1, expert_bytes=8, expert_size=2)
    assert [plan.owner(expert) for expert in (0, 2, 3, 11)] == [0, 0, 1, 3] and plan.per_device == 3
    assert [list(plan.experts_of(device)) for device in (0, 3)] == [[0, 1, 2], [9, 10, 11]]
    assert plan.padding == 4 * 2 / 2 and dataclasses.replace(plan, top_k=6).padding == 4 * 3 / 6
    assert dataclasses.replace(plan, capacity_factor=1.5).padding == 1.5
    assert "0 to 2, the last 9 to 11" in str(plan) and "layers" not in str(plan)
    assert "in each of 2 layers" in str(dataclasses.replace(plan, layers=2))
    assert str(dataclasses.replace(plan, devices=1, axes=())).endswith("2 for a token: each device has them all")
    assert ExpertPlan.from_json({**vars(plan), "axes": ["x", "y"]}) == plan
