"""Custom steps: a handwritten ``shard_map`` around a gradient function, a key function, and an update.

``own(grads_of, ...)`` makes a step. ``grads_of(loss, params, batch, rng, axes)`` runs on a device, with
``loss(params, batch, rng)``, and returns the reported value and the gradients.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.step_corpus import losses
from tests.step_corpus.entries import Case, Entry, Setting, batch_on_mesh, mesh_of
from xlstm_jax.distributed import (
    accumulate_gradients,
    fold_rng_over_axis,
    partition_specs,
    sync_gradients,
    unbox,
    value_and_grad,
    with_ema,
)
from xlstm_jax.distributed.data_parallel import box_like
from xlstm_jax.distributed.optimizers import optimizer_state_shardings

GradsOf = Callable[..., tuple[Any, Any]]


# ------------------------------------------------------------------------------------------------------- keys


def folded(rng: jax.Array, count: Any, axes: Any) -> jax.Array:
    return fold_rng_over_axis(jax.random.fold_in(rng, count), axes)


def by_index(rng: jax.Array, count: Any, axes: Any) -> jax.Array:
    index = lax.axis_index(axes[0]) * 1000 + lax.axis_index(axes[-1])
    return jax.random.split(jax.random.fold_in(rng, index), 2)[1]


def same_everywhere(rng: jax.Array, count: Any, axes: Any) -> jax.Array:
    return jax.random.fold_in(rng, count)


def of_the_step(rng: jax.Array, count: Any, axes: Any) -> jax.Array:
    """Returns a key of the step number; the argument rng is ignored."""
    return fold_rng_over_axis(jax.random.fold_in(jax.random.key(11), count), axes)


# -------------------------------------------------------------------------------------------------- the step


def apply_gradients(state: Any, value: Any, grads: Any) -> tuple[Any, Any]:
    return state.apply_gradients(grads=grads), {"loss": value}


def own(
    grads_of: GradsOf,
    *,
    keys: Callable[..., jax.Array] = folded,
    finish: Callable[..., tuple[Any, Any]] = apply_gradients,
    rows_of: Callable[[Any], Any] = lambda batch: batch,
    batch_axes: Any = None,
    minimised: Any = None,
) -> Callable[[Entry, Setting], Case]:
    """Returns the maker of a custom step; ``rows_of(batch)`` selects rows, ``minimised`` replaces the entry's loss."""

    def make(entry: Entry, setting: Setting) -> Case:
        state, mesh, axes = entry.state(setting), mesh_of(entry.mesh), entry.axes
        loss_fn = minimised or entry.loss
        specs = partition_specs(state.params, mesh)

        @jax.jit
        def step(state: Any, batch: Any, rng: jax.Array) -> tuple[Any, Any]:
            def local(params: Any, batch: Any, rng: jax.Array, count: Any) -> tuple[Any, Any]:
                loss = lambda params, batch, rng: loss_fn(params, state.apply_fn, batch, rng)  # noqa: E731
                return grads_of(loss, params, batch, keys(rng, count, axes), axes)

            in_specs = specs, P(axes if batch_axes is None else batch_axes), P(), P()
            on_mesh = functools.partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=(P(), specs))
            run = on_mesh(local, check_vma=setting.check_vma)
            return finish(state, *run(state.params, rows_of(batch), rng, state.step))

        return Case(step, state, batch_on_mesh(entry.model), jax.random.key(5), {"loss_fn": entry.loss})

    return make


# ---------------------------------------------------------------------------------------- gradient functions


def ours(loss: Any, params: Any, batch: Any, rng: Any, axes: Any) -> Any:
    return value_and_grad(loss, axes)(params, batch, rng)


def of_jax(loss: Any, params: Any, batch: Any, rng: Any, axes: Any, change: Any = lambda x: x) -> Any:
    """Returns unaveraged gradients of plain JAX; ``change`` transforms the differentiated loss."""

    def changed(params: Any) -> Any:
        value = loss(params, batch, rng)
        return change(value), value

    (_, value), grads = jax.value_and_grad(changed, has_aux=True)(params)
    return lax.pmean(value, axes), grads


def then(change: Callable[[Any, Any], Any], grads_of: GradsOf = ours) -> GradsOf:
    """Returns ``grads_of`` followed by ``change(grads, axes)``."""

    def both(loss: Any, params: Any, batch: Any, rng: Any, axes: Any) -> Any:
        value, grads = grads_of(loss, params, batch, rng, axes)
        return value, change(grads, axes)

    return both


synced = then(sync_gradients, of_jax)


def with_changed_loss(change: Callable[[Any, Any], Any]) -> GradsOf:
    """Returns a function that differentiates ``change(loss, axes)`` and averages correctly."""

    def grads_of(loss: Any, params: Any, batch: Any, rng: Any, axes: Any) -> Any:
        value, grads = of_jax(loss, params, batch, rng, axes, lambda x: change(x, axes))
        return value, sync_gradients(grads, axes)

    return grads_of


def times(factor: float, where: str = "") -> Callable[[Any, Any], Any]:
    """Returns a change that multiplies gradients by a factor: all, or leaves with ``where`` in their path."""

    def change(grads: Any, axes: Any) -> Any:
        scale = lambda path, g: g * factor if where in jax.tree_util.keystr(path) else g  # noqa: E731
        return jax.tree_util.tree_map_with_path(scale, grads)

    return change


def reported(change: Callable[[Any, Any], Any]) -> GradsOf:
    """Returns correct gradients with a reported loss of ``change(local loss, axes)``."""

    def grads_of(loss: Any, params: Any, batch: Any, rng: Any, axes: Any) -> Any:
        return change(loss(params, batch, rng), axes), value_and_grad(loss, axes)(params, batch, rng)[1]

    return grads_of


def by_hand(count: int, divisor: float, take: slice = slice(None)) -> GradsOf:
    """Returns a loop over minibatches that adds gradients and divides by ``divisor``; ``take`` selects minibatches."""

    def grads_of(loss: Any, params: Any, batch: Any, rng: Any, axes: Any) -> Any:
        parts = [jax.tree.map(lambda x: jnp.split(x, count)[i], batch) for i in range(count)]  # noqa: B023
        found = [ours(loss, params, part, jax.random.fold_in(rng, i), axes) for i, part in enumerate(parts)]
        summed = jax.tree.map(lambda *gs: sum(gs) / divisor, *(grads for _, grads in found[take]))
        return sum(value for value, _ in found) / count, summed

    return grads_of


def accumulated(loss: Any, params: Any, batch: Any, rng: Any, axes: Any) -> Any:
    return accumulate_gradients(loss, params, batch, rng, axes, 2)


def clipped_on_shards(grads: Any, axes: Any) -> Any:
    return optax.clip_by_global_norm(0.05).update(grads, optax.EmptyState())[0]


def first_device(grads: Any, axes: Any) -> Any:
    """Returns the leaves of device 0 along the first axis."""
    return jax.tree.map(lambda g: lax.psum(jnp.where(lax.axis_index(axes[0]) == 0, g, 0 * g), axes[0]), grads)


def signs(grads: Any, axes: Any) -> Any:
    return jax.tree.map(jnp.sign, grads)


# --------------------------------------------------------------------------------------------------- updates


def with_own(tx: Any, change: Callable[[Any], Any] = lambda updates: updates) -> Callable[..., Any]:
    """Returns an update by a separate optimizer instead of the state's; ``change`` transforms the updates."""

    def finish(state: Any, value: Any, grads: Any) -> tuple[Any, Any]:
        before = unbox(state.params)
        updates, opt_state = tx.update(unbox(grads), state.opt_state, before)
        params = box_like(optax.apply_updates(before, change(updates)), state.params)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": value}

    return finish


def twice(state: Any, value: Any, grads: Any) -> tuple[Any, Any]:
    return state.apply_gradients(grads=grads).apply_gradients(grads=grads), {"loss": value}


def never(state: Any, value: Any, grads: Any) -> tuple[Any, Any]:
    return state.replace(step=state.step + 1), {"loss": value}


def changed(change: Callable[[Any, Any], Any], before: bool = False) -> Callable[..., Any]:
    """Returns an update with ``change(new state, old state)``; with ``before`` the change precedes the optimizer."""

    def finish(state: Any, value: Any, grads: Any) -> tuple[Any, Any]:
        if before:
            return change(state, state).apply_gradients(grads=grads), {"loss": value}
        return change(state.apply_gradients(grads=grads), state), {"loss": value}

    return finish


def decayed(new: Any, old: Any) -> Any:
    return new.replace(params=jax.tree.map(lambda p: 0.99 * p, new.params))


def noisy(new: Any, old: Any) -> Any:
    """Adds noise to all parameters, outside of the optimizer."""
    key = jax.random.key(13)
    return new.replace(params=jax.tree.map(lambda p: p + 0.01 * jax.random.normal(key, p.shape), new.params))


def swapped(new: Any, old: Any) -> Any:
    first, second = (new.params[name] for name in ("Dense_0", "Dense_1"))
    swap = {"Dense_0": {**first, "bias": second["bias"]}, "Dense_1": {**second, "bias": first["bias"]}}
    return new.replace(params={**new.params, **swap})


def added_twice(new: Any, old: Any) -> Any:
    return new.replace(params=jax.tree.map(lambda p, q: 2 * p - q, new.params, old.params))


def old_params(new: Any, old: Any) -> Any:
    return new.replace(params=old.params)


def old_opt_state(new: Any, old: Any) -> Any:
    return new.replace(opt_state=old.opt_state)


def frozen_too(new: Any, old: Any) -> Any:
    layer = jax.tree.map(lambda p: p - 0.1, new.params["Dense_0"])
    return new.replace(params={**new.params, "Dense_0": layer})


def last_weights(new: Any, old: Any) -> Any:
    """Replaces the average of the weights by the weights."""
    opt_state = new.opt_state._replace(ema=unbox(new.params))
    return new.replace(opt_state=opt_state)


def one_less(new: Any, old: Any) -> Any:
    """Keeps all counts of the optimizer at 0."""
    zero = lambda x: jnp.zeros_like(x) if x.dtype == jnp.int32 and not x.shape else x  # noqa: E731
    return new.replace(opt_state=jax.tree.map(zero, new.opt_state))


def with_rate(new: Any, old: Any) -> Any:
    """Sets the rate of this update."""
    rate = {**new.opt_state.hyperparams, "learning_rate": 0.1 / (1.0 + new.step)}
    return new.replace(opt_state=new.opt_state._replace(hyperparams=rate))


def on_shards(tx: Any) -> Callable[[Entry, Setting], Case]:
    """Returns a step with gradients and update in one ``shard_map``: the optimizer sees shards."""

    def make(entry: Entry, setting: Setting) -> Case:
        state, mesh, axes = entry.state(setting), mesh_of(entry.mesh), entry.axes
        specs = partition_specs(state.params, mesh)

        @jax.jit
        def step(state: Any, batch: Any, rng: jax.Array) -> tuple[Any, Any]:
            in_state = optimizer_state_shardings(state.opt_state, state.params, mesh)
            of_state = jax.tree.map(lambda sharding: sharding.spec, in_state)

            def local(params: Any, opt_state: Any, batch: Any, rng: jax.Array) -> Any:
                loss = lambda params, batch, rng: entry.loss(params, state.apply_fn, batch, rng)  # noqa: E731
                value, grads = value_and_grad(loss, axes)(params, batch, folded(rng, state.step, axes))
                updates, opt_state = state.tx.update(unbox(grads), opt_state, unbox(params))
                return value, box_like(optax.apply_updates(unbox(params), updates), params), opt_state

            run = jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(specs, of_state, P(axes), P()),
                out_specs=(P(), specs, of_state),
                check_vma=setting.check_vma,
            )
            value, params, opt_state = run(state.params, state.opt_state, batch, rng)
            return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": value}

        return Case(step, state, batch_on_mesh(entry.model), jax.random.key(5), {"loss_fn": entry.loss})

    return make


def metrics_as(make: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda state, value, grads: (state.apply_gradients(grads=grads), make(value))


SGD, ADAM = optax.sgd(0.1), optax.adam(1e-2)
scaled = functools.partial(jax.tree.map, lambda u: 8 * u)


def entry(name: str, kind: str, make: Any, loss: Any = losses.mean, *, verdict: str, **more: Any) -> Entry:
    return Entry(name, f"own: {kind}", verdict, make, loss, **({"nnx": False} | more))


right = functools.partial(entry, verdict="right")
wrong = functools.partial(entry, verdict="wrong")

NOISE = {"loss": losses.diffusion(), "model": "denoiser", "without_draws": losses.diffusion(False)}
RIGHT = [
    right("value_and_grad", "gradients", make=own(ours), nnx=True),
    right("value_and_grad, tuple", "gradients", make=own(ours), mesh="tuple"),
    right("jax.grad and sync_gradients", "gradients", make=own(synced), nnx=True),
    right("jax.grad and sync_gradients, copies", "gradients", make=own(synced), mesh="copies"),
    right("sync_gradients of averages", "gradients", make=own(then(sync_gradients)), mesh="fsdp"),
    right("batch split over one axis of two", "gradients", make=own(ours, batch_axes="fsdp")),
    right("accumulation by hand", "minibatches", make=own(by_hand(2, 2))),
    right("accumulate_gradients", "minibatches", make=own(accumulated), mesh="fsdp"),
    right("own sgd", "optimizer", make=own(ours, finish=with_own(SGD)), tx=SGD),
    right("own adam", "optimizer", make=own(synced, finish=with_own(ADAM)), tx=ADAM, tolerance=0.02),
    right("the loss alone as metrics", "metrics", make=own(ours, finish=metrics_as(lambda x: x))),
    right("no metrics", "metrics", make=own(ours, finish=metrics_as(lambda x: {}))),
    right("loss by another name", "metrics", make=own(ours, finish=metrics_as(lambda x: {"train/loss": x}))),
    right("keys by the axes' indices", "keys", make=own(synced, keys=by_index), nnx=True),
    right("the same key on all devices", "keys", make=own(ours, keys=same_everywhere)),
    right("keys of the step's number alone", "keys", make=own(ours, keys=of_the_step), mesh="fsdp"),
    right("dropout, attention", "keys", make=own(synced), model="attention"),
    right("dropout, scan and remat", "keys", make=own(ours), model="scan", mesh="fsdp"),
    right("dropout, layer norm", "keys", make=own(ours, keys=by_index), model="norm"),
    right("head of zeros", "zeros", make=own(ours), model="zero_head"),
    right("experts, one never chosen", "zeros", make=own(synced), model="experts"),
    right("noise from rng", "draws", make=own(ours), **NOISE),
    right("noise, keys of the step's number alone", "draws", make=own(synced, keys=of_the_step), **NOISE),
    right("contrastive, all_gather", "statistic", make=own(ours), loss=losses.contrastive(("dp", "fsdp"))),
]

SYNC = r"sync_gradients|averag|summed|not the same"
ZERO = r"zero|no gradient|none|all 0|\b0 x"
FACTOR = r"\bx the right|scale|factor|times|sign|divided|summed"
STATISTIC = r"statistic|no mean|not a mean|not the mean|all_gather|minibatch|normalis"
ANY = "."
WRONG = [
    wrong("no sync_gradients", "averages", make=own(of_jax), names=SYNC, nnx=True),
    wrong("no sync_gradients, one axis", "averages", make=own(of_jax), names=SYNC, mesh="fsdp"),
    wrong("no sync_gradients, copies", "averages", make=own(of_jax), names=SYNC, mesh="copies"),
    wrong(
        "sync over one axis of two",
        "averages",
        names=SYNC,
        nnx=True,
        make=own(then(lambda grads, axes: sync_gradients(grads, axes[1:]), of_jax)),
    ),
    wrong(
        "sync of averages that were scaled",
        "averages",
        names=ANY,
        check_vma=(True,),
        make=own(then(sync_gradients, then(times(1.0)))),
    ),
    wrong(
        "pmean of shards, too",
        "averages",
        names=ANY,
        refused="psum|pmean",  # by JAX, with types
        make=own(then(lambda grads, axes: jax.tree.map(lambda g: lax.pmean(g, axes), grads), of_jax)),
    ),
    wrong("gradients of device 0", "averages", names=ANY, make=own(then(first_device, of_jax)), check_vma=(False,)),
    wrong(
        "loss averaged before jax.grad, types on",
        "averages",
        names=ANY,
        check_vma=(True,),
        make=own(with_changed_loss(lax.pmean)),
    ),
    wrong(
        "loss summed before jax.grad, types off",
        "averages",
        names=ANY,
        check_vma=(False,),
        make=own(with_changed_loss(lax.psum)),
    ),
    wrong(
        "loss divided by the devices",
        "factor",
        names=FACTOR,
        nnx=True,
        make=own(with_changed_loss(lambda x, axes: x / 8)),
    ),
    wrong("loss times 3", "factor", names=FACTOR, make=own(with_changed_loss(lambda x, axes: 3 * x)), mesh="tuple"),
    wrong("gradients divided by the devices", "factor", names=FACTOR, make=own(then(times(1 / 8)))),
    wrong(
        "gradients divided by the devices, attention",
        "factor",
        names=FACTOR,
        make=own(then(times(1 / 8))),
        model="attention",
        mesh="fsdp",
    ),
    wrong("sign of all gradients", "factor", names=FACTOR, make=own(then(times(-1.0)))),
    wrong("sign of one layer's", "factor", names=FACTOR, make=own(then(times(-1.0, "Dense_1")))),
    wrong("one layer's doubled", "factor", names=FACTOR, make=own(then(times(2.0, "Dense_0"), synced))),
    wrong("one layer's halved, scan", "factor", names=FACTOR, make=own(then(times(0.5, "Dense_0"))), model="scan"),
    wrong("biases' doubled", "factor", names=FACTOR, make=own(then(times(2.0, "bias"))), mesh="fsdp"),
    wrong("gradients of a layer dropped", "zeros", names=ZERO, make=own(then(times(0.0, "Dense_1")))),
    wrong("gradients of biases dropped", "zeros", names=ZERO, make=own(then(times(0.0, "bias"), synced))),
    wrong("no update", "zeros", names=ZERO, make=own(ours, finish=never)),
    wrong("clipping on shards", "optimizer", names=ANY, make=own(then(clipped_on_shards)), check_vma=(False,)),
    wrong("signs for gradients", "optimizer", names=ANY, make=own(then(signs))),
    wrong("updates times 8, own sgd", "optimizer", names=ANY, make=own(ours, finish=with_own(SGD, scaled)), tx=SGD),
    wrong("updates times 8, own adam", "optimizer", names=ANY, make=own(ours, finish=with_own(ADAM, scaled)), tx=ADAM),
    wrong("no sync_gradients, own adam", "optimizer", names=ANY, make=own(of_jax, finish=with_own(ADAM)), tx=ADAM),
    wrong("two updates", "optimizer", names=ANY, make=own(ours, finish=twice)),
    wrong("accumulation, not divided", "minibatches", names=FACTOR, make=own(by_hand(2, 1))),
    wrong("accumulation, divided twice", "minibatches", names=FACTOR, make=own(by_hand(4, 16)), mesh="fsdp"),
    wrong("accumulation, the last minibatch", "minibatches", names=ANY, make=own(by_hand(2, 1, slice(1, None)))),
    wrong("another loss than loss_fn", "loss", names=ANY, make=own(ours, minimised=losses.squares)),
    wrong(
        "sum in the step, mean in loss_fn",
        "loss",
        names=FACTOR + "|sum",
        make=own(synced, minimised=losses.of_rows(jnp.sum)),
    ),
    wrong("sum in both", "loss", names="sum|divided", make=own(ours), loss=losses.of_rows(jnp.sum), nnx=True),
    wrong("loss summed for the log", "metrics", names="loss", make=own(reported(lax.psum))),
    wrong(
        "loss of one device for the log",
        "metrics",
        names="loss",
        check_vma=(False,),
        make=own(reported(lambda x, axes: x)),
    ),
    wrong(
        "loss divided twice for the log",
        "metrics",
        names="loss",
        make=own(reported(lambda x, axes: lax.pmean(x, axes) / 8)),
        mesh="fsdp",
    ),
    wrong(
        "last rows dropped",
        "rows",
        names=ANY,
        make=own(ours, rows_of=functools.partial(jax.tree.map, lambda x: x[: len(x) // 2])),
    ),
    wrong(
        "half of the rows twice",
        "rows",
        names=ANY,
        make=own(
            ours,
            rows_of=functools.partial(jax.tree.map, lambda x: jnp.tile(x[: len(x) // 2], (2,) + (1,) * (x.ndim - 1))),
        ),
    ),
    wrong("mean of a mask on each device", "loss", names="weight", make=own(ours), loss=losses.masked_mean),
    wrong(
        "contrastive, negatives of the device", "statistic", names=STATISTIC, make=own(ours), loss=losses.contrastive()
    ),
    wrong(
        "root mean square", "statistic", names=STATISTIC, make=own(synced), loss=losses.root_mean_square, mesh="fsdp"
    ),
    wrong("noise from rng, divided by the devices", "draws", names=ANY, make=own(then(times(1 / 8))), **NOISE),
    wrong("noise from rng, no sync_gradients", "draws", names=ANY, make=own(of_jax), **NOISE),
]

MOMENTUM, AVERAGED, RATED = optax.sgd(0.1, momentum=0.9), with_ema(SGD, 0.9), optax.inject_hyperparams(optax.sgd)(0.1)
COUNTED = optax.sgd(optax.linear_schedule(0.1, 0.0, 10))
CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1))
NOT_FIRST = {"trainable": lambda path: "Dense_0" not in path}
# Changes of gradients depend neither on dropout nor on types.
STILL = {"model": "still", "check_vma": (True,)}
right_update = functools.partial(right, kind="update", **STILL)
wrong_update = functools.partial(wrong, kind="update", **STILL)
UPDATED = [
    right_update("momentum", make=own(ours), tx=MOMENTUM),
    right_update("an average of the weights", make=own(synced), tx=AVERAGED),
    right_update("a rate that the step sets", make=own(ours, finish=changed(with_rate, before=True)), tx=RATED),
    right_update("every second step updates", make=own(ours), tx=optax.MultiSteps(SGD, 2)),
    right_update("frozen leaves", make=own(ours), **NOT_FIRST),
    right_update("on shards, element by element", make=on_shards(MOMENTUM), tx=MOMENTUM),
    wrong_update("parameters times 0.99 after it", names="0.99", make=own(ours, finish=changed(decayed))),
    wrong_update(
        "parameters times 0.99 before it",
        names="before the optimizer",
        make=own(synced, finish=changed(decayed, before=True)),
    ),
    wrong_update("noise on parameters", names="x the norm of its updates", make=own(ours, finish=changed(noisy))),
    wrong_update("two biases swapped", names="gets the values of", make=own(ours, finish=changed(swapped))),
    wrong_update("added twice", names="2 x its update", make=own(ours, finish=changed(added_twice)), mesh="tuple"),
    wrong_update("parameters not returned", names="stay as they were", make=own(ours, finish=changed(old_params))),
    wrong_update(
        "optimizer's state not returned",
        names="stays as it was",
        make=own(ours, finish=changed(old_opt_state)),
        tx=MOMENTUM,
    ),
    wrong_update("frozen leaves, too", names="frozen", make=own(ours, finish=changed(frozen_too)), **NOT_FIRST),
    wrong_update(
        "the average of the weights replaced",
        names="ema|average",
        make=own(ours, finish=changed(last_weights)),
        tx=AVERAGED,
    ),
    wrong_update("counts that stay 0", names="all numbers|count", make=own(ours, finish=changed(one_less)), tx=COUNTED),
    wrong_update(
        "clipping on shards, in the optimizer",
        names="shards",
        make=on_shards(CLIPPED),
        tx=CLIPPED,
        check_vma=(False,),
    ),
]

ENTRIES = RIGHT + WRONG  # The settings of a round depend on the order.
