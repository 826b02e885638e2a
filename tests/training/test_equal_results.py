"""Tests of results that a step declares replicated: equal on all devices, or an error before the step runs.

Types of ``check_vma=True`` ignore branches, so the library reads the equations; both modes reject the same programs.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.support import AXES, in_case, mesh_of, on_mesh
from xlstm_jax.distributed import DeviceMeshManager, TrainState, make_eval_step, make_train_step
from xlstm_jax.distributed.metrics import Count, WeightedMean
from xlstm_jax.distributed.training import accumulate_gradients
from xlstm_jax.distributed.training.moments import Results

KEY, X = jax.random.key(0), jnp.ones((16, 4))
BOTH_MODES = pytest.mark.parametrize("check_vma", [True, False])
STATS = {"stats": {"n": jnp.zeros(())}}


def state_of(collections):
    return TrainState.create(apply_fn=None, params={"w": jnp.ones(4)}, tx=optax.sgd(0.1), collections=collections)


def mean_loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def counting(count, params, _, batch, rng, collections):
    """Loss of a model with a counter, updated by ``count(n, rows of this device)``."""
    del rng
    n = count(collections["stats"]["n"], batch)
    return mean_loss(params, batch) * (1 + n), {"stats": {"n": n}}


def hot(x):
    """Returns a predicate of local rows."""
    return x.mean() > 0


def hot_anywhere(x):
    return lax.pmax(hot(x), AXES)


def plus_1(n):
    return n + 1


def same(n):
    return n


@jax.custom_vjp
def by_rule(n, x):
    return lax.cond(hot(x), plus_1, same, n)


by_rule.defvjp(lambda n, x: (by_rule(n, x), x), lambda x, g: (g, jnp.zeros_like(x)))


def written(flag, n):
    """Increments a mutable array in a branch."""
    ref = jax.new_ref(n)

    def write():
        ref[...] = ref[...] + 1

    lax.cond(flag, write, lambda: None)
    return ref[...]


DIFFERING = {
    "cond": lambda n, x: lax.cond(hot(x), plus_1, same, n),
    "switch": lambda n, x: lax.switch(jnp.int32(x.sum()), [same, plus_1], n),
    "while_loop": lambda n, x: lax.while_loop(
        lambda c: c[1] < x.sum(), lambda c: (c[0] + 1, c[1] + 1), (n, 0 * x[0, 0])
    )[0],
    "fori_loop": lambda n, x: lax.fori_loop(0, (x > 0).sum(), lambda i, n: n + 1, n),
    "a branch in a scan": lambda n, x: lax.scan(lambda n, row: (lax.cond(hot(row), plus_1, same, n), None), n, x)[0],
    "a branch in a branch": lambda n, x: lax.cond(
        hot_anywhere(x), lambda n: lax.cond(hot(x), plus_1, same, n), same, n
    ),
    "a rule": by_rule,
    "remat of jit": lambda n, x: jax.checkpoint(jax.jit(lambda n: lax.cond(hot(x), plus_1, same, n)))(n),
    "the device": lambda n, x: lax.cond(lax.axis_index("dp") == 0, plus_1, same, n),
    "reduced over another axis": lambda n, x: lax.cond(lax.pmax(hot(x), "fsdp"), plus_1, same, n),
    "a collective in a branch": lambda n, x: lax.cond(
        lax.axis_index("dp") == 0, lambda n: n + lax.pmean(x.sum(), AXES), same, n
    ),
    "a mutable array": lambda n, x: written(hot(x), n),
    "no branch": lambda n, x: jnp.where(hot(x), n + 1, n),
}  # fmt: skip
EQUAL = {
    "cond": lambda n, x: lax.cond(hot_anywhere(x), plus_1, same, n),
    "a count": lambda n, x: lax.cond(n > 3, same, plus_1, n),
    "while_loop": lambda n, x: lax.while_loop(lambda n: n < 5, plus_1, n),
    "reduced afterwards": lambda n, x: lax.pmean(DIFFERING["cond"](n, x), AXES),
    "the largest afterwards": lambda n, x: lax.pmax(DIFFERING["fori_loop"](n, x), AXES),
    "gathered": lambda n, x: n + lax.all_gather(jnp.sort(x.ravel())[-1], AXES).max(),
    "a mutable array": lambda n, x: written(hot_anywhere(x), n),
    "a barrier": lambda n, x: lax.optimization_barrier((n + 1, x))[0],
}


def trace(loss, state, check_vma, mesh=None, axes=AXES, **options):
    make_train_step(loss, mesh or mesh_of(2, 4), axes, check_vma=check_vma, allow_replicated=True, **options).trace(
        state, X, KEY
    )


@BOTH_MODES
@pytest.mark.parametrize("kind", DIFFERING)
def test_train_step_raises_for_a_collection_with_device_dependent_values(kind, check_vma):
    with pytest.raises(ValueError, match=r"'stats/n' would differ from device to device along .*pmax\(flag, "):
        trace(partial(counting, DIFFERING[kind]), state_of(STATS), check_vma)


@BOTH_MODES
@pytest.mark.parametrize("kind", EQUAL)
def test_train_step_accepts_a_collection_equal_on_all_devices(kind, check_vma):
    trace(partial(counting, EQUAL[kind]), state_of(STATS), check_vma, num_minibatches=2)


@BOTH_MODES
def test_accumulate_gradients_raises_for_a_collection_differing_by_device(check_vma):
    def run(count):
        loss = lambda params, batch, rng, kept: counting(count, params, None, batch, rng, kept)  # noqa: E731
        step = lambda params, x: accumulate_gradients(loss, params, x, None, AXES, collections=STATS)  # noqa: E731
        jax.eval_shape(on_mesh(step, mesh_of(2, 4), check_vma, (P(), P(AXES)), P()), {"w": jnp.ones(4)}, X)

    run(EQUAL["cond"])
    with pytest.raises(ValueError, match="'stats/n' would differ from device to device"):
        run(DIFFERING["cond"])


@BOTH_MODES
def test_train_step_traces_the_loss_exactly_once(check_vma):
    """A step traces the loss once, also if types vary and values are equal."""
    calls = []

    def loss(*args):
        calls.append(1)
        return counting(lambda n, x: lax.all_gather(x.sum(), AXES).sum(), *args)

    trace(loss, state_of(STATS), check_vma)
    assert calls == [1]


# ------------------------------------------------------------------------- along an axis that does not split the batch

WITH_TP = {"fsdp": 2, "tp": 2}


def factor():
    return lax.cond(lax.axis_index("tp") == 0, lambda: 1.0, lambda: 2.0)


def ring_mean(x):
    """Returns the mean over two devices of "tp" by ``ppermute``; the equations do not show that it is replicated."""
    return (x + lax.ppermute(x, "tp", [(0, 1), (1, 0)])) / 2


RESULTS = {
    "loss": (lambda params, batch: mean_loss(params, batch) * factor(), {}),
    "aux/a": (lambda params, batch: (mean_loss(params, batch), {"a": factor()}), {"has_aux": True}),
    "aux/b": (lambda params, batch: (mean_loss(params, batch), {"b": Count.of(factor() > 1)}), {"has_aux": True}),
    "the state of the metric": (
        lambda params, batch: (mean_loss(params, batch), {"values": batch.mean() * factor()}),
        {"metric": WeightedMean()},
    ),
}


@BOTH_MODES
@pytest.mark.parametrize("name", RESULTS)
def test_train_step_raises_for_a_result_differing_along_another_mesh_axis(name, check_vma):
    fn, options = RESULTS[name]
    mesh = DeviceMeshManager.create_device_mesh(WITH_TP, devices=jax.devices()[:4])
    local = [options["metric"].empty("fsdp", mesh)] if "metric" in options else []
    step = make_train_step(
        lambda params, _, batch, rng: fn(params, batch),
        mesh,
        "fsdp",
        check_vma=check_vma,
        allow_replicated=True,
        **options,
    )
    with pytest.raises(ValueError, match=rf"'{name}'.* would differ from device to device along \('tp',\)"):
        step.trace(state_of({}), X, KEY, *local)


@BOTH_MODES
def test_eval_step_raises_for_a_metric_differing_along_another_mesh_axis(check_vma):
    mesh, metric = DeviceMeshManager.create_device_mesh(WITH_TP, devices=jax.devices()[:4]), WeightedMean()

    def run(by):
        observed = lambda params, _, batch: {"values": batch @ params["w"] * by()}  # noqa: E731
        step = make_eval_step(observed, mesh, "fsdp", metric=metric, check_vma=check_vma)
        step.trace(state_of({}), X, metric.empty("fsdp", mesh))

    run(lambda: lax.pmean(factor(), "tp"))
    with pytest.raises(ValueError, match=r"'the state of the metric' would differ .* along \('tp',\)"):
        run(factor)


@BOTH_MODES
@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_steps_raise_for_a_collective_in_a_branch_that_devices_may_take_differently(kind, check_vma):
    gathered = jax.jit(lambda x: lax.all_gather(x, AXES).sum())
    mesh, metric = mesh_of(2, 4), WeightedMean()

    def run(predicate):
        def gathered_twice(x):
            return gathered(x) + lax.cond(predicate(x), gathered, jnp.sum, x)  # the branch has the trace of the first

        if kind == "training":
            trace(lambda params, _, x, rng: mean_loss(params, x) + 0 * gathered_twice(x), state_of({}), check_vma)
        else:
            observed = lambda params, _, x: {"values": x[:, 0] * gathered_twice(x)}  # noqa: E731
            step = make_eval_step(observed, mesh, AXES, metric=metric, check_vma=check_vma)
            step.trace(state_of({}), X, metric.empty(AXES, mesh))

    run(hot_anywhere)
    with pytest.raises(ValueError, match=r"a collective over \('dp', 'fsdp'\).* in a branch .*pmax\(flag, "):
        run(hot)


def test_train_step_without_check_vma_accepts_a_hand_written_ring_reduction():
    """Without types a reduction by a hand-written ring passes; guard: without the ring the step raises."""
    mesh = DeviceMeshManager.create_device_mesh(WITH_TP, devices=jax.devices()[:4])
    for mean, refused in (ring_mean, False), (lambda x: x, True):

        def loss(params, _, batch, rng, mean=mean):
            return mean_loss(params, batch) * lax.stop_gradient(mean(1.0 + lax.axis_index("tp")))

        if refused:
            with (
                in_case(mean=mean, refused=refused),
                pytest.raises(ValueError, match=r"'loss', 'grads/w' would differ .* along \('tp',\)"),
            ):
                trace(loss, state_of({}), False, mesh, "fsdp")
        else:
            trace(loss, state_of({}), False, mesh, "fsdp")


@BOTH_MODES
def test_aux_values_depending_on_rows_are_averaged_over_devices(check_vma):
    def loss(params, _, batch, rng):
        return mean_loss(params, batch), {"share": lax.cond(batch[0, 0] > 3, lambda: 1.0, lambda: 0.0)}

    step = make_train_step(loss, mesh_of(2, 4), AXES, has_aux=True, check_vma=check_vma, allow_replicated=True)
    batch = np.repeat(np.arange(8.0, dtype=np.float32), 2)[:, None] * np.ones(4, np.float32)
    assert step(state_of({}), batch, KEY)[1]["share"] == 0.5


@pytest.mark.parametrize(
    "fn, check_vma, proved",
    [
        (lambda x: lax.psum(x, "fsdp"), True, True),
        (lambda x: lax.psum(x, "fsdp"), False, False),
        (lambda x: lax.cond(lax.psum(x, "fsdp")[0] > 0, lambda: 1.0, lambda: 2.0), True, False),
    ],
    ids=["types", "no types", "a branch"],
)
def test_types_prove_results_equal_without_branches_under_check_vma(fn, check_vma, proved):
    mesh = mesh_of(1, 8)
    program = jax.shard_map(fn, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=check_vma)
    assert Results((), jax.make_jaxpr(program)(jnp.ones(8)), mesh, ("fsdp",), {}).unproved != proved
