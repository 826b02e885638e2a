"""Tests of shard, gather and sync: the life of a leaf, against one device without collectives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from tests.support import AXES, FLOAT32_ROUNDING, assert_same_params, equations, mesh_of, normal, on_mesh
from xlstm_jax.distributed import (
    DeviceMeshManager,
    gather_params,
    partition_specs,
    shard_params,
    sync_gradients,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel import gather_array_with_mean_grads
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_box
from xlstm_jax.distributed.data_parallel.trees import unbox
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import term_of_mean
from xlstm_jax.distributed.data_parallel.wire.communication import (
    DEFAULT_COMMUNICATION,
    PrimalType,
    gradient_of_shard,
)

BOTH_MODES = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
MESHES = pytest.mark.parametrize("dp, fsdp", [(1, 8), (2, 4), (8, 1), (1, 1)])


def sharded_tree(tree, mesh, axis_name, min_weight_size=0):
    """Returns the result of ``shard_params`` for a tree, seen from outside: boxes with names around local shapes."""
    boxes, threshold = [], () if min_weight_size is None else (min_weight_size,)

    def local(tree):
        boxes.append(shard_params(tree, axis_name, *threshold))
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), tree)
    return boxes[0]


# ------------------------------------------------------------------------------------------------------- shard, gather


@BOTH_MODES
@MESHES
@pytest.mark.parametrize("axis_name", ["fsdp", "dp", ("dp", "fsdp"), ["fsdp", "dp"]], ids=str)
def test_gather_params_inverts_shard_params_bit_for_bit(axis_name, dp, fsdp, check_vma):
    tree = {"w": normal(0, (16, 8)), "v": normal(1, (3, 5)), "scalar": jnp.float32(3), "empty": jnp.zeros((0, 8))}

    def round_trip(tree):
        back = gather_params(shard_params(tree, axis_name, 0), axis_name)
        return jax.tree.map(lambda x: x[None], back)

    got = on_mesh(round_trip, mesh_of(dp, fsdp), check_vma, P(), P(AXES))(tree)
    for name, value in tree.items():
        assert got[name].shape == (dp * fsdp, *value.shape)
        assert not [device for device, row in enumerate(got[name]) if not np.array_equal(row, value)], name


@pytest.mark.parametrize(
    "axis_name, names, local",
    [
        ("fsdp", ("fsdp", None), (4, 8)),
        (("dp", "fsdp"), (("dp", "fsdp"), None), (2, 8)),
        (["dp"], ("dp", None), (8, 8)),
    ],
    ids=str,
)
def test_shard_params_boxes_a_shard_with_the_names_of_the_split_axes(axis_name, names, local):
    box = sharded_tree({"w": jnp.ones((16, 8))}, mesh_of(2, 4), axis_name)["w"]
    assert isinstance(box, nn.Partitioned)
    assert box.names == names and box.value.shape == local


def test_shard_params_orders_axes_as_partition_specs_do():
    w, mesh = jnp.arange(16.0).reshape(16, 1), mesh_of(2, 4)
    for axes in [("dp", "fsdp"), ("fsdp", "dp")]:
        got = on_mesh(lambda w, axes=axes: shard_params(w, axes, 0).value, mesh, False, P(), P(axes))(w)
        assert_array_equal(got, w)


def test_shard_params_skips_leaves_below_the_threshold_indivisible_or_with_keys():
    tree = {
        "at": jnp.ones((8, 8)),
        "below": jnp.ones((8, 7)),
        "odd": jnp.ones((9, 9)),
        "key": jax.random.split(jax.random.key(0), 64),
    }
    out = sharded_tree(tree, mesh_of(1, 8), "fsdp", min_weight_size=64)
    assert [name for name, leaf in out.items() if is_box(leaf)] == ["at"]
    default = sharded_tree(
        {"at": jnp.ones((2**9, 2**9)), "below": jnp.ones((2**9, 2**9 - 1))}, mesh_of(1, 8), "fsdp", None
    )
    assert is_box(default["at"]) and not is_box(default["below"])


def test_shard_params_is_idempotent_and_keeps_axes_of_the_model():
    def local(tree):
        once = shard_params(tree, "fsdp", 0)
        assert [leaf.names for leaf in once.values()] == [("fsdp", None), ("tp", "fsdp")]
        assert jax.tree.structure(shard_params(once, "fsdp", 0)) == jax.tree.structure(once)
        back = gather_params(once, "fsdp")
        assert back["tp"].names == ("tp", None) and not is_box(back["short"])
        plain = nn.Partitioned(once["tp"].value, once["tp"].names)  # a box that the model makes
        assert gather_params(plain, "fsdp").value.shape == back["tp"].value.shape == (8, 8)
        return unbox(back)

    mesh = DeviceMeshManager.create_device_mesh({"tp": 2, "fsdp": 4})
    specs = {"tp": P("tp"), "short": P()}
    got = on_mesh(local, mesh, False, (specs,), specs)(
        {"tp": nn.Partitioned(normal(0, (16, 8)), ("tp", None)), "short": nn.Partitioned(normal(1, (16, 8)), ())}
    )
    assert_array_equal(got["tp"], normal(0, (16, 8)))


@BOTH_MODES
@pytest.mark.parametrize("names", [("tp", "fsdp"), ("fsdp", "tp"), ("fsdp", "tp", "dp"), ("dp", "fsdp", "tp")], ids=str)
@pytest.mark.parametrize("gathered", ["fsdp", ("dp", "fsdp")], ids=str)
def test_gather_params_over_some_axes_of_a_tuple_leaves_contiguous_shards(gathered, names, check_vma):
    """Gathering part of a tuple of axes leaves the shard of the remaining axes' plain layout; gradients too."""
    mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 2, "tp": 2})
    w, c = normal(0, (16, 3)), normal(1, (16, 3))
    gone = {gathered} if isinstance(gathered, str) else set(gathered)
    left = tuple(axis for axis in names if axis not in gone)

    def local(w, c):
        box = Sharded(w, (names, None))

        def loss(box):
            out = gather_params(box, gathered)
            assert out.names == ((left[0] if len(left) == 1 else left), None)
            return jnp.sum(out.value * c), out.value

        grad, value = jax.grad(loss, has_aux=True)(box)
        return value[None], grad.value

    specs = (P(names), P(left)), (P(tuple(a for a in mesh.axis_names if a not in left), left), P(names))
    value, grad = on_mesh(local, mesh, check_vma, *specs)(w, c)
    assert not [device for device, row in enumerate(value) if not np.array_equal(row, w)]
    # Every device along the gathered axes has the same loss, so the mean over them equals the gradient of a device.
    assert_allclose(grad, c, rtol=1e-6)


@pytest.mark.parametrize(
    "dtype", [jnp.int32, jnp.uint8, jnp.bool_, jnp.bfloat16, jnp.float16, jnp.complex64], ids=lambda d: d.__name__
)
def test_shard_and_gather_round_trip_keeps_any_dtype(dtype):
    w = (normal(0, (16, 8)) * 100).astype(dtype)
    round_trip = on_mesh(lambda w: gather_params(shard_params(w, "fsdp", 0), "fsdp"), mesh_of(1, 8), False, P(), P())
    assert_array_equal(round_trip(w), w)
    assert round_trip(w).dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_], ids=lambda d: d.__name__)
def test_gather_dtype_never_casts_integers_or_bools(dtype):
    # bfloat16 cannot represent 1001; bytes and bools would survive the cast, but must return in their dtype.
    w = jnp.arange(1000, 1064).reshape(8, 8).astype(dtype)
    got = on_mesh(
        lambda w: gather_params(shard_params(w, "fsdp", 0), "fsdp", gather_dtype=jnp.bfloat16),
        mesh_of(1, 8),
        False,
        P(),
        P(),
    )(w)
    assert_array_equal(got, w)
    assert got.dtype == dtype


def test_gather_array_with_mean_grads_accepts_a_negative_dim():
    def local(w):
        return jax.grad(lambda w: jnp.sum(gather_array_with_mean_grads(w, -1, "fsdp") ** 2))(w)

    w = normal(0, (4, 16))
    assert_allclose(on_mesh(local, mesh_of(1, 8), True, P(None, "fsdp"), P(None, "fsdp"))(w), 2 * w, rtol=1e-6)


def scattered_as(dtype, grad_scatter_dtype, devices):
    """Returns the dtype of a gradient's reduce-scatter, and all dtypes of floats in the trace."""

    def local(w):
        return jax.grad(lambda w: jnp.sum(gather_array_with_mean_grads(w, 0, "fsdp", None, grad_scatter_dtype)))(w)

    traced = jax.make_jaxpr(on_mesh(local, mesh_of(1, devices), True, P("fsdp"), P("fsdp")))(jnp.zeros((64, 8), dtype))
    found = [eqn for _, eqn in equations(traced)]
    scattered = [str(v.aval.dtype) for eqn in found if eqn.primitive.name == "reduce_scatter" for v in eqn.invars]
    return scattered, {str(v.aval.dtype) for eqn in found for v in eqn.outvars} - {"int32"}


def test_gradient_reduce_scatter_runs_in_float32_unless_a_dtype_is_set():
    assert scattered_as(jnp.bfloat16, None, 8)[0] == ["float32"]
    assert scattered_as(jnp.float32, None, 8)[0] == ["float32"]
    assert scattered_as(jnp.bfloat16, jnp.bfloat16, 8)[0] == ["bfloat16"]


def test_grad_scatter_dtype_causes_no_cast_on_a_single_device():
    assert scattered_as(jnp.float32, jnp.bfloat16, 1) == ([], {"float32"})
    assert "bfloat16" in scattered_as(jnp.float32, jnp.bfloat16, 8)[1]  # guard: a cast would be seen


def test_float8_gather_and_sync_gradients_sum_in_a_wider_dtype():
    w = normal(0, (16, 8))

    def local(w):
        grad = jax.grad(
            lambda w: jnp.sum(gather_array_with_mean_grads(w, 0, "fsdp", jnp.float8_e4m3fn).astype(jnp.float32))
        )
        return grad(w), sync_gradients(jnp.ones((4,), jnp.float8_e4m3fn), "fsdp")

    grad, synced = on_mesh(local, mesh_of(1, 8), False, P("fsdp"), (P("fsdp"), P()))(w)
    assert_array_equal(grad, np.ones((16, 8)))
    assert synced.dtype == jnp.float8_e4m3fn


def test_prng_keys_are_not_sharded_and_sharded_keys_are_gathered():
    keys = jax.random.split(jax.random.key(7), 8)

    def local(whole, part):
        assert not is_box(shard_params(whole, "fsdp", 0))
        out = gather_array_with_mean_grads(part, 0, "fsdp", jnp.bfloat16)
        return jax.random.key_data(out)

    got = on_mesh(local, mesh_of(1, 8), False, (P(), P("fsdp")), P())(keys, keys)
    assert_array_equal(got, jax.random.key_data(keys))


# ----------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.one_in(5)
@pytest.mark.parametrize("shape", [(16, 3), (3, 16), (3, 5), (8,)], ids=str)
@MESHES
@BOTH_MODES
def test_gradient_of_a_sharded_leaf_matches_the_unsharded_gradient(check_vma, dp, fsdp, shape):
    w, x = normal(0, shape), normal(1, (32, shape[0]))

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def one_device(w, x):
        grads = jax.grad(lambda s: loss(gather_params(s, "fsdp"), x))(shard_params(w, "fsdp", 0))
        return gather_params(sync_gradients(grads, AXES), "fsdp")[None]

    want = jax.grad(loss)(w, x)  # one device, no collectives
    # The gradient is replicated on return. (A gather makes its type varying, hence the leading dim.)
    got = on_mesh(one_device, mesh_of(dp, fsdp), check_vma, (P(), P(AXES)), P(AXES))(w, x)
    for row in got:
        assert_allclose(row, want, rtol=FLOAT32_ROUNDING, atol=FLOAT32_ROUNDING * np.abs(want).max())
    assert not np.allclose(jax.grad(loss)(w, x[:4]), want, rtol=0.1)  # guard: the devices' rows do differ


@BOTH_MODES
def test_gather_array_with_mean_grads_divides_the_gradient_sum_of_lax_all_gather(check_vma):
    w, x = normal(0, (16, 4)), normal(1, (8, 4))

    def local(gather):
        def run(w, x):
            return jax.grad(lambda w: jnp.sum(jnp.sin(gather(w)) @ x[0]))(w)

        return on_mesh(run, mesh_of(1, 8), check_vma, (P("fsdp"), P("fsdp")), P("fsdp"))(w, x)

    ours = local(lambda w: gather_array_with_mean_grads(w, 0, "fsdp"))
    summed = local(lambda w: jax.lax.all_gather(w, "fsdp", axis=0, tiled=True))
    assert_allclose(8 * ours, summed, rtol=1e-5, atol=1e-6)
    assert np.abs(summed).max() > 0.1


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gather_array_with_mean_grads_scatters_gradients_along_any_dim(dim, dtype):
    shape = [3, 5, 2]
    shape[dim] = 16
    w, x = normal(0, tuple(shape)), normal(1, (8, *shape))
    names = P(*[None] * dim, AXES)

    def grad(w, x):
        return jax.grad(lambda w: jnp.sum(gather_array_with_mean_grads(w, dim, AXES, dtype, dtype) * x[0]))(w)

    got = on_mesh(grad, mesh_of(2, 4), True, (names, P(AXES)), names)(w, x)
    assert_allclose(got, x.mean(0), atol=1e-6 if dtype is None else 0.02)


@BOTH_MODES
def test_lowered_gather_and_scatter_use_the_requested_dtypes(check_vma):
    """Lowered collectives have the requested dtypes; results return in the dtype of x."""

    def run(gather_dtype, scatter_dtype):
        def local(w, x):
            out = jax.value_and_grad(
                lambda w: jnp.sum(gather_array_with_mean_grads(w, 0, "fsdp", gather_dtype, scatter_dtype) * x)
            )(w)
            return out[1], out[0][None]

        fn = on_mesh(local, mesh_of(1, 8), check_vma, (P("fsdp"), P()), P("fsdp"))
        args = normal(0, (16, 4)), jnp.ones((16, 4), jnp.float32)
        assert fn(*args)[0].dtype == jnp.float32
        lines = fn.lower(*args).as_text().splitlines()
        gathers = [line for line in lines if "all_gather" in line]
        scatters = "".join(lines).split('"stablehlo.reduce_scatter"')[1:]
        assert len(gathers) == 1 and len(scatters) == 1
        return gathers[0].split("->")[1], scatters[0].split("->")[1][:40]

    for gather_dtype, scatter_dtype, on_gather, on_scatter in [
        (None, None, "f32", "f32"),
        (jnp.bfloat16, None, "bf16", "f32"),
        (None, jnp.bfloat16, "f32", "bf16"),
        ("bfloat16", "float16", "bf16", "f16"),
    ]:
        gather, scatter = run(gather_dtype, scatter_dtype)
        assert f"x{on_gather}>" in gather and f"x{on_scatter}>" in scatter


def test_float16_gradient_mean_does_not_overflow_if_the_sum_would():
    big = jnp.full((8, 8), 9000, jnp.float16)

    def local(w):
        return jax.grad(lambda w: jnp.sum(gather_array_with_mean_grads(w, 0, "fsdp", None, jnp.float16) * big))(w)

    got = on_mesh(local, mesh_of(1, 8), False, P("fsdp"), P("fsdp"))(jnp.ones((8, 8), jnp.float32))
    assert_array_equal(got, np.full((8, 8), 9000))
    assert 8 * 9000 > float(np.finfo(np.float16).max)  # guard

    def of_first_device(w):
        one = jnp.where(jax.lax.axis_index("fsdp") == 0, 80000.0, 0.0)  # an eighth fits into float16, the sum does not
        return jax.grad(lambda w: jnp.sum(gather_array_with_mean_grads(w, 0, "fsdp", None, jnp.float16) * one))(w)

    got = on_mesh(of_first_device, mesh_of(1, 8), False, P("fsdp"), P("fsdp"))(jnp.ones((8, 8), jnp.float32))
    assert_array_equal(got, np.full((8, 8), 10000))


@pytest.mark.parametrize("count", [1, 4, 6, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_term_of_mean_in_a_narrow_dtype_is_bit_equal_to_float32_division(dtype, count):
    value = (normal(0, (4096,)) * 10.0 ** jnp.arange(-8, 8).repeat(256)).astype(dtype)
    want = (value.astype(jnp.float32) / count).astype(dtype)
    term = partial(term_of_mean, count=count, dtype=jnp.dtype(dtype))
    assert_array_equal(jax.jit(term)(value), want)
    wide = [eqn for _, eqn in equations(jax.make_jaxpr(term)(value)) if eqn.primitive.name == "convert_element_type"]
    assert bool(wide) == (count == 6)  # a power of two divides without a cast


def test_error_for_several_axes_names_the_axis_that_is_not_bound():
    def local(x):
        return sync_gradients(x, ("fsdp", "nope"))

    with pytest.raises(
        ValueError, match=r": 'nope' is not a bound mesh axis; the axes bound here are \('dp', 'fsdp'\)"
    ):
        on_mesh(local, mesh_of(1, 8), False, P(), P())(jnp.ones(8))


@BOTH_MODES
def test_gathered_complex_gradients_keep_the_imaginary_part(check_vma):
    w = (normal(0, (8, 4)) + 1j * normal(1, (8, 4))).astype(jnp.complex64)

    def loss(w):
        return jnp.sum(jnp.abs(w - (1 + 2j)) ** 2)

    def local(w):
        return jax.grad(lambda w: loss(gather_array_with_mean_grads(w, 0, "fsdp")))(w)

    got = on_mesh(local, mesh_of(1, 8), check_vma, P("fsdp"), P("fsdp"))(w)
    assert_allclose(got, jax.grad(loss)(w), rtol=1e-6)
    assert np.abs(np.imag(got)).max() > 1


def test_gradient_of_a_shard_has_the_dtype_of_the_shard():
    for wide, dtype in ((jnp.float32, jnp.bfloat16), (jnp.complex64, jnp.complex64)):
        primal = PrimalType((4,), jnp.dtype(dtype), frozenset(), batched=False)
        returned = partial(gradient_of_shard, communication=DEFAULT_COMMUNICATION, primal=primal)
        assert jax.eval_shape(returned, np.zeros(4, wide)).dtype == dtype


def test_integer_leaves_get_float0_gradients_beside_exact_float_gradients():
    tree = {"w": normal(0, (8, 4)), "ids": jnp.arange(8)}

    def local(tree):
        def loss(tree):
            whole = gather_params(tree, "fsdp")
            return jnp.sum(whole["w"][whole["ids"]] ** 2)

        grads = sync_gradients(jax.grad(loss, allow_int=True)(shard_params(tree, "fsdp", 0)), "fsdp")
        assert grads["ids"].value.dtype == jax.dtypes.float0
        return grads["w"].value

    assert_allclose(on_mesh(local, mesh_of(1, 8), False, P(), P("fsdp"))(tree), 2 * tree["w"], rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------------- sync


@BOTH_MODES
@pytest.mark.parametrize("axis_names", [("dp", "fsdp"), ["fsdp", "dp"]], ids=str)
def test_sync_gradients_averages_each_leaf_over_axes_not_named_by_the_box(axis_names, check_vma):
    """``sync_gradients`` averages plain ``jax.grad`` in both modes, for leaves split over no axis, one, and two."""
    mesh = mesh_of(2, 4)
    w, x = normal(0, (16, 8)), normal(1, (32, 16))
    boxes = {"whole": (None, None), "one": ("fsdp", None), "both": (("dp", "fsdp"), None)}

    def loss(tree, x):
        return sum(jnp.mean(jnp.tanh(x @ w) ** 2) for w in jax.tree.leaves(tree))

    def local(tree, x):
        tree = {k: Sharded(v, boxes[k]) if any(boxes[k]) else v for k, v in tree.items()}
        return unbox(sync_gradients(jax.grad(lambda t: loss(gather_params(t, AXES), x))(tree), axis_names))

    specs = {k: P(*names) for k, names in boxes.items()}
    got = on_mesh(local, mesh, check_vma, (specs, P(AXES)), specs)(dict.fromkeys(boxes, w), x)
    want = jax.grad(loss)(dict.fromkeys(boxes, w), x)
    for name in boxes:
        assert_allclose(got[name], want[name], rtol=0, atol=FLOAT32_ROUNDING * float(jnp.abs(want[name]).max()))


def test_sync_gradients_divides_sums_of_replicated_leaves_and_keeps_gradients_of_split_leaves():
    """By their types: JAX has summed the gradient of the replicated leaf, and the gather has averaged the other."""

    def local(summed, split):
        return unbox(sync_gradients({"summed": summed, "split": Sharded(split, ("fsdp",))}, "fsdp"))

    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 2}, devices=jax.devices()[:2])
    run = on_mesh(local, mesh, True, (P(), P("fsdp")), {"summed": P(), "split": P("fsdp")})
    grads = run(np.float32([6]), np.float32([3, 5]))
    assert {name: grad.tolist() for name, grad in grads.items()} == {"summed": [3], "split": [3, 5]}


def test_collectives_psum_counts_a_value_replicated_by_type_once():
    """``collectives.psum`` counts a value that is replicated by type once, unlike ``lax.psum`` (once per device)."""
    for check_vma, count in ((True, 1), (False, 8)):
        run = on_mesh(lambda x: collectives.psum([x], [AXES])[0], mesh_of(2, 4), check_vma, P(), P())
        assert run(jnp.float32(1)) == count


def test_guard_gradients_of_replicated_leaves_differ_without_sync_gradients():
    """Guard of the test above: without sync, the local gradient of a replicated leaf is far from the mean."""
    w, x = normal(0, (3, 5)), normal(1, (32, 3))
    grads = on_mesh(
        lambda w, x: jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)[None],
        mesh_of(1, 8),
        False,
        (P(), P("fsdp")),
        P("fsdp"),
    )(w, x)
    assert np.abs(grads - grads.mean(0)).max() > 0.1 * np.abs(grads.mean(0)).max()


def test_sync_gradients_averages_float16_and_bfloat16_in_float32():
    """``sync_gradients`` averages in float32: float16 overflows at 8 x 9000, bfloat16 loses 1 / 128."""
    fp16 = jnp.full((8, 1), 9000, jnp.float16)
    bf16 = (1 + jnp.arange(8) / 128).astype(jnp.bfloat16)[:, None]

    def local(a, b):
        return sync_gradients({"a": a[0], "b": b[0]}, "fsdp")

    got = on_mesh(local, mesh_of(1, 8), False, (P("fsdp"), P("fsdp")), P())(fp16, bf16)
    assert got["a"].dtype == jnp.float16 and got["a"] == 9000
    assert got["b"].dtype == jnp.bfloat16 and got["b"] == jnp.mean(bf16.astype(jnp.float32)).astype(jnp.bfloat16)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("types", [("Explicit", "Explicit"), ("Auto", "Explicit"), ("Auto", "Auto")], ids=str)
@pytest.mark.parametrize("where", ["arrays", "jit"])
def test_shard_params_under_a_set_mesh_splits_global_arrays_and_trains_as_on_one_device(where, types):
    """Parameters of functions, without a model: each device keeps its shards, and boxes gather themselves when read."""
    rng = np.random.default_rng(0)
    params = {"w": np.float32(rng.normal(size=(16, 32))), "b": np.zeros(32, np.float32), "odd": np.ones((9, 9))}
    x = np.float32(rng.normal(size=(16, 16)) * (1 + np.arange(16)[:, None] % 3))

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"]) ** 2) + jnp.mean(params["odd"] ** 2)

    want, grads = jax.value_and_grad(loss)(jax.tree.map(np.float32, params), x)
    mesh = jax.make_mesh((2, 4), AXES, axis_types=tuple(getattr(jax.sharding.AxisType, one) for one in types))
    with jax.set_mesh(mesh):
        shard = lambda params: shard_params(params, "fsdp", 64)  # noqa: E731
        boxed = (jax.jit(shard) if where == "jit" else shard)(jax.tree.map(np.float32, params))
        assert boxed["w"].names == (None, "fsdp") and not is_box(boxed["odd"]) and not is_box(boxed["b"])
        if where == "arrays":
            assert boxed["w"].value.addressable_shards[0].data.shape == (16, 8)
        specs = partition_specs(boxed, mesh)
        run = jax.shard_map(value_and_grad(loss, AXES), in_specs=(specs, P(AXES)), out_specs=(P(), specs))
        value, got = jax.jit(run)(boxed, jax.device_put(x, P(AXES)))
        with pytest.raises(ValueError, match="'other' is not a bound mesh axis; no mesh axis is bound here"):
            shard_params(params, "other")
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert_same_params(jax.device_get(unbox(got)), grads)
