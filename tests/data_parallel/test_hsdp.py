"""Tests of hybrid sharding: shards on fast axes, copies on slow axes, reduced within the layer's backward pass.

``tests/exactness`` compares the training with one device.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.support import Model, data, equations, fsdp, mean_loss, mesh_of, on_mesh
from xlstm_jax.distributed import (
    Replicas,
    bytes_per_device,
    create_train_state,
    gather_params,
    global_norm,
    make_train_step,
    shard_module_params,
    sync_gradients,
    unbox,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.shard import box_params
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.distributed.optimizers.sharded_optimizer import optimizer_state_shardings
from xlstm_jax.distributed.training.accumulation import STRATEGIES

AXES, BATCH = ("dp", "fsdp"), data()
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def wrapped(**options):
    return fsdp(replicas=Replicas("dp", **options))


def state_of(wrap, mesh):
    return create_train_state(Model(wrap), TX, mesh, jax.random.key(0), BATCH["x"], batch_axes=AXES)


def programme(wrap, **options):
    """Returns the equations of a step on a 2 x 4 mesh."""
    mesh = mesh_of(2, 4)
    state = jax.eval_shape(lambda: state_of(wrap, mesh))
    step = make_train_step(mean_loss, mesh, AXES, **options)
    return equations(jax.make_jaxpr(step)(state, BATCH, jax.random.key(0)))


def reductions(found, axis="dp"):
    """Returns (shape, dtype, enclosing primitives) of all sums of arrays over an axis; scalars are excluded."""
    sums = [(w, e) for w, e in found if e.primitive.name.startswith("psum") and axis in e.params["axes"]]
    return [(v.aval.shape, str(v.aval.dtype), within) for within, e in sums for v in e.invars if v.aval.shape]


def test_gradients_over_replicas_are_reduced_inside_the_scan_in_reduce_dtype():
    found = reductions(programme(wrapped(reduce_dtype=jnp.bfloat16)))
    blocks = [(shape, dtype) for shape, dtype, within in found if "scan" in within]
    # A quarter of each leaf of one block; never an unsharded or a stacked leaf.
    assert sorted(blocks) == [((8,), "bfloat16"), ((8, 16), "bfloat16"), ((16, 8), "bfloat16")]
    without = reductions(programme(fsdp()))
    assert not [within for _, _, within in without if "scan" in within]  # guard: the option causes the reductions
    assert {dtype for _, dtype, _ in without} == {"float32"}


def test_each_gradient_value_is_reduced_over_replicas_exactly_once():
    values = sum(
        np.prod(shape) * (3 if "scan" in within else 1) for shape, _, within in reductions(programme(wrapped()))
    )
    on_device = bytes_per_device(state_of(wrapped(), mesh_of(2, 4)).params) // 4
    assert values == on_device  # each value once, 3 being the number of layers


@pytest.mark.parametrize("names", [("x", "y"), (("x", "tp", "y"), None)], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_has_a_single_mean_over_replicas_for_leaves_gathered_over_two_axes(check_vma, names):
    """A gradient has one reduction over copies; a second mean would keep the values and double the traffic."""
    axes = ("dp", "x", "tp", "y")
    sizes = dict.fromkeys(axes, 2) if "tp" in str(names) else {"dp": 2, "x": 2, "y": 2}
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), (jax.sharding.AxisType.Auto,) * len(sizes))
    how = Communication.of(None, None, Replicas("dp"))

    def gradient(shard, x):
        return jax.grad(lambda box: jnp.sum(unbox(gather_params(box, ("x", "y"))) * x))(
            Sharded(shard, names, communication=how)
        ).value

    run = jax.shard_map(gradient, mesh=mesh, in_specs=(P(*names), P("dp")), out_specs=P(*names), check_vma=check_vma)
    found = equations(jax.make_jaxpr(run)(jnp.ones((8, 8)), jnp.ones(2)))
    assert len(reductions(found)) == 1


def test_repeated_sync_gradients_does_not_divide_twice_by_the_number_of_replicas():
    """``sync_gradients`` divides a sum over copies once under types, however often a loss calls it."""
    w, x = jnp.ones((8, 2)), jnp.arange(8.0)

    def gradients(w, x):
        box = Sharded(w, ("fsdp", None), communication=Communication.of(None, None, Replicas("dp")))
        once = sync_gradients(jax.grad(lambda box: jnp.sum(unbox(gather_params(box, "fsdp"))) * x[0])(box), AXES)
        return once.value, sync_gradients(once, AXES).value

    for found in on_mesh(gradients, mesh_of(2, 4), True, (P("fsdp"), P(AXES)), P("fsdp"))(w, x):
        np.testing.assert_allclose(found, np.full((8, 2), x.mean()))


def test_shard_optimizer_state_divides_the_moments_by_the_number_of_replicas():
    plain, zero1 = (state_of(wrapped(shard_optimizer_state=on), mesh_of(4, 2)) for on in (False, True))
    whole = sum(leaf_of(leaf).value.nbytes for _, leaf in leaves_with_path(plain.params) if not leaf_of(leaf).axes)
    moments = 2 * (bytes_per_device(plain.params) - whole)
    assert bytes_per_device(plain.opt_state) - bytes_per_device(zero1.opt_state) == moments * 3 // 4
    assert bytes_per_device(plain.params) == bytes_per_device(zero1.params)


@pytest.mark.parametrize("splits, shard", [(True, (2, 4)), (False, (2, 16))], ids=["zero1", "copies"])
def test_moments_are_split_over_copies_only_with_shard_optimizer_state(splits, shard):
    moment = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    copies = Communication(replicas=Replicas("dp", shard_optimizer_state=splits))
    params = {"w": Sharded(moment, ("fsdp", None), communication=copies)}
    found = optimizer_state_shardings({"mu": {"w": moment}}, params, mesh_of(4, 2))
    assert found["mu"]["w"].shard_shape(moment.shape) == shard


def test_second_wrapper_keeps_the_replicas_of_the_first_wrapper():
    box = Sharded(jnp.ones((8, 8)), ("x", None), communication=Communication.of(None, None, Replicas(("dp", "y"))))
    for axis, copied in (("fsdp", ("dp", "y")), ("y", ("dp",))):
        twice = box_params({"w": box}, {axis: 2}, ShardPolicy(axis, min_weight_size=0))["w"]
        assert twice.names == ("x", axis) and twice.communication.copied_axes == copied


def test_replicas_raise_for_an_axis_in_axis_name_or_missing_from_the_mesh():
    with pytest.raises(ValueError, match="'dp' is in axis_name"):
        shard_module_params(Model, AXES, replicas=Replicas("dp"))
    with pytest.raises(TypeError, match=r"pass Replicas\('dp'\)"):
        shard_module_params(Model, "fsdp", replicas="dp")
    with pytest.raises(TypeError, match="nonsense"):
        Replicas("dp", reduce_dtype="nonsense")
    mesh = mesh_of(2, 4)
    wrap = fsdp(replicas=Replicas("slow"))
    with pytest.raises(ValueError, match=r"'slow' is not an axis of .*, which has \('dp', 'fsdp'\)"):
        state_of(wrap, mesh)


# --------------------------------------------------------------------------------------------------- penalties, experts


def no_penalty(params):
    return 0.0


def penalty_by_values(params):
    return 0.1 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


def penalty_by_norm(params):
    # Only split leaves: under check_vma=True replicated leaves vary within a loss, which raises.
    return 0.3 * global_norm([leaf for _, leaf in leaves_with_path(params) if leaf_of(leaf).axes]) ** 2


@cache
def first_state(shape, replicas):
    wrap, key = wrapped() if replicas else fsdp(), jax.random.key(0)
    return create_train_state(Model(wrap), optax.sgd(1.0), mesh_of(*shape), key, BATCH["x"], batch_axes=AXES)


@cache
def gradient_norm(shape, check_vma, accumulation, penalty, replicas=True):
    """Returns the gradient norm of a loss with a penalty on the parameters, after one step of 1 or 2 minibatches."""
    mesh, state = mesh_of(*shape), jax.tree.map(jnp.copy, first_state(shape, replicas))  # the step donates its state
    loss = lambda params, *args: mean_loss(params, *args) + penalty(params)  # noqa: E731
    options = {"num_minibatches": 1 if accumulation == "reduce_each" else 2, "accumulation": accumulation}
    _, metrics = make_train_step(loss, mesh, AXES, check_vma=check_vma, **options)(state, BATCH, jax.random.key(0))
    return float(metrics["grad_norm"])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("accumulation", list(STRATEGIES))
@pytest.mark.parametrize("check_vma", [True, False])
def test_penalty_computed_from_shards_is_counted_once_in_the_gradient(check_vma, accumulation):
    want = gradient_norm((1, 1), True, "reduce_each", penalty_by_values)
    assert gradient_norm((1, 1), True, "reduce_each", no_penalty) < 0.9 * want  # guard: the penalty counts
    for replicas in (True, False)[: 1 if accumulation == "reduce_replicas_once" else 2]:
        got = gradient_norm((2, 4), check_vma, accumulation, penalty_by_values, replicas)
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_the_global_norm_in_a_loss_of_each_device_is_that_of_one_device(check_vma):
    w, x = jnp.arange(1.0, 17).reshape(8, 2), jnp.arange(8.0)

    def gradient(w, x):
        return jax.grad(lambda box: global_norm(box) + x.sum())(Sharded(w, ("fsdp", None))).value

    got = on_mesh(gradient, mesh_of(1, 8), check_vma, (P("fsdp"), P("fsdp")), P("fsdp"))(w, x)
    want = np.asarray(w) / np.linalg.norm(w)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert not np.allclose(got, want * 8, rtol=0.1)  # guard: the sum over eight devices differs from their mean


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape, replicas", [((1, 8), False), ((2, 4), True)])
@pytest.mark.parametrize("check_vma", [True, False])
def test_penalty_on_the_global_norm_is_counted_once_in_the_gradient(check_vma, shape, replicas):
    want = gradient_norm((1, 1), True, "reduce_each", penalty_by_norm)
    assert gradient_norm((1, 1), True, "reduce_each", no_penalty) < 0.9 * want  # guard: the penalty counts
    assert gradient_norm(shape, check_vma, "reduce_each", penalty_by_norm, replicas) == pytest.approx(want, rel=1e-5)


class Experts(nn.Module):
    """A layer with one expert per device along "dp"."""

    @nn.compact
    def __call__(self, x):
        here = 1 if "dp" in jax.sharding.get_abstract_mesh().manual_axes else 2
        init = nn.with_partitioning(nn.initializers.normal(0.3), ("dp", None, None))
        return jnp.sin(x @ self.param("kernel", init, (here, 8, 4))[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_experts_split_over_the_replica_axis_are_not_averaged_as_replicas(check_vma):
    mesh, kernels = mesh_of(2, 4), []
    for replicas in (None, Replicas("dp", shard_optimizer_state=True)):
        model = fsdp(Experts, replicas=replicas)()
        state = create_train_state(model, optax.adam(1e-2), mesh, jax.random.key(0), BATCH["x"], batch_axes=AXES)
        state, _ = make_train_step(mean_loss, mesh, AXES, check_vma=check_vma)(state, BATCH, jax.random.key(0))
        kernels.append(np.asarray(leaf_of(state.params["kernel"]).value))
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert not np.allclose(kernels[0][0], kernels[0][1])  # guard: the experts differ
