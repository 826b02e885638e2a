"""Errors of states, steps, loss functions and evaluations."""

import dataclasses
from functools import cache

from flax import nnx
from jax import lax

from tests.errors.shared import (
    AXES,
    BATCH,
    KEY,
    MESH,
    PLAIN,
    Block,
    P,
    create,
    create_train_state,
    data,
    fsdp,
    jax,
    jnp,
    make_train_step,
    mean_loss,
    mesh_of,
    nn,
    np,
    optax,
    shaped,
    state,
    trace,
    weighted_loss,
)
from tests.errors.table import Section
from tests.mistaken_models import OfRow, OwnScan, ScanInScan, Stacked, Vmapped, with_statistics
from xlstm_jax.distributed import (
    TrainState,
    abstract_train_state,
    check_step,
    fold_rng_over_axis,
    init_sharded,
    make_eval_step,
    partition_specs,
    shard_batch,
    sync_gradients,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.metrics import WeightedMean
from xlstm_jax.distributed.optimizers import skip_nonfinite, with_ema
from xlstm_jax.distributed.training import (
    accumulate_gradients,
    chunked_cross_entropy,
    default_batch_axes,
    varying_params,
)

calls, losses, models, evaluation, collections, checking, names, frozen, optimizers = map(
    Section,
    [
        "Calling a step",
        "Loss functions and gradients",
        "Initial state and models",
        "Evaluation",
        "Collections beside the parameters",
        "Checking a step",
        "Axis names",
        "Frozen parameters",
        "Optimizers",
    ],
)
SGD, MEAN = optax.sgd(0.1), WeightedMean()


@dataclasses.dataclass
class PlainBatch:
    """A dataclass that is not registered with JAX."""

    x: object


class Foreign:
    """An array of another package."""

    shape, dtype, __array__ = (16,), "torch.float32", None


class OfNnx(nnx.Module):
    """A module of Flax NNX."""


def abstract(tx=SGD, model=None, batch=BATCH, **options):
    """Returns a state of a wrapped Dense without values."""
    return abstract_train_state(model or fsdp(nn.Dense)(4), tx, MESH, KEY, batch["x"], batch_axes=AXES, **options)


def traced(loss=mean_loss, tx=SGD, batch=BATCH, axes=AXES, model=None, **options):
    """Traces a step of a wrapped Dense, or of another model."""
    return make_train_step(loss, MESH, axes, **options).trace(abstract(tx, model), batch, KEY)


@cache
def dense(mesh=MESH):
    """Returns a state of a wrapped Dense; its rows raise before a step runs."""
    return create_train_state(fsdp(nn.Dense)(4), SGD, mesh, KEY, BATCH["x"], batch_axes=AXES)


def changed(**leaves):
    return BATCH | leaves


def returned(change, **options):
    """Returns a call of a step whose loss function returns a change of the mean loss."""
    return lambda: trace(loss=lambda *args: change(mean_loss(*args)), **options)


def donated(leaf="state"):
    """Runs a step on donated arguments of an earlier step."""
    step = make_train_step(mean_loss, MESH, AXES)
    one = jax.tree.map(jnp.copy, dense())
    after, _ = step(one, BATCH, KEY)
    step(one if leaf == "state" else after.replace(params=one.params), BATCH, KEY)


def deleted_number():
    """Returns an array whose memory is free, as after a donation."""
    number = jnp.zeros((), jnp.int32)
    number.delete()
    return number


def callback_in_a_program():
    """Traces a step with a callback that returns a value, in a program under a set mesh with explicit axes."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    loss = lambda *args: mean_loss(*args) + jax.pure_callback(np.ones_like, number, jnp.float32(0))  # noqa: E731
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    given = jax.device_get(BATCH)
    with jax.set_mesh(mesh):
        created = create_train_state(fsdp(nn.Dense)(4), SGD, mesh, KEY, given["x"], batch_axes=AXES)
        jax.jit(make_train_step(loss, mesh, AXES)).trace(created, given, KEY)


def with_metric(given):
    metric = WeightedMean()
    step = make_train_step(lambda *args: (mean_loss(*args), {}), MESH, AXES, metric=metric)
    return lambda: step.trace(state(), BATCH, KEY, *given)


EVAL = {"values": BATCH["x"]}


def evaluate(
    fn=lambda params, apply_fn, batch: {"values": batch["x"]},
    of=None,
    batch=BATCH,
    local=True,
    mesh=MESH,
    metric=MEAN,
    extra_trees=None,
):
    step = make_eval_step(fn, mesh, AXES, metric=metric)
    local = metric.empty(AXES, mesh) if local is True else local
    return step.trace(
        dense() if of is None else of, batch, local, **({} if extra_trees is None else {"extra_trees": extra_trees})
    )


STEP = make_train_step(mean_loss, MESH, AXES)
WITH_KEY = make_train_step(lambda params, apply_fn, batch, rng: mean_loss(params, apply_fn, batch, rng), MESH, AXES)
EVALUATION = make_eval_step(lambda params, apply_fn, batch: {"values": batch["x"]}, MESH, AXES, metric=WeightedMean())


def own_gradient(loss, mesh=MESH, check_vma=True, batch=BATCH, axes=AXES, call=value_and_grad, split=AXES, **options):
    """Gradients of a loss of (params, batch) inside of shard_map, by value_and_grad."""
    params = {"w": jnp.ones((8, 4))}
    fn = lambda params, batch: call(loss, axes, **options)(params, batch)[1]  # noqa: E731
    return lambda: shaped(fn, params, batch, mesh=mesh, in_specs=(P(), P(split)), check_vma=check_vma)


def error_of(params, batch, reduce=jnp.mean):
    return reduce((batch["x"] @ params["w"] - batch["y"]) ** 2)


# ----- models that JAX refuses


ROWS3 = jnp.ones((16, 3, 4))


def in_a_branch():
    def loss(params, apply_fn, batch, rng):
        mean = batch["x"].mean()
        return lax.cond(mean > 0, lambda: mean_loss(params, apply_fn, batch), lambda: mean)

    traced(loss)


def in_a_branch_after_a_call():
    def loss(params, apply_fn, batch, rng):
        once = jax.jit(lambda params, batch: mean_loss(params, apply_fn, batch))
        mean = once(params, batch)
        return mean + lax.cond(batch["x"].mean() > 0, lambda: once(params, batch), lambda: mean)

    traced(loss)


def of_rows(model, loss, mesh=MESH, **options):
    """Returns a call that traces a step of an unsplit model of sequences."""
    whole = {"batch_axes": AXES, "allow_replicated": True}
    of = abstract_train_state(model, SGD, mesh, KEY, ROWS3, **whole)
    return lambda: make_train_step(loss, mesh, AXES, allow_replicated=True, **options).trace(of, ROWS3, KEY)


def of_dense(change):
    return of_rows(
        nn.Dense(8), lambda params, apply_fn, batch, rng: jnp.mean(change(apply_fn({"params": params}, batch)))
    )


def no_casts():
    jax.config.update("jax_auto_pcast", False)
    try:
        of_dense(nn.relu)()
    finally:
        jax.config.update("jax_auto_pcast", True)


# ----- collections


class Net(nn.Module):
    """A BatchNorm between two layers."""

    axes: object = AXES

    @nn.compact
    def __call__(self, x):
        x = fsdp(nn.Dense)(16)(x)
        return fsdp(nn.Dense)(4)(nn.BatchNorm(use_running_average=False, axis_name=self.axes)(x))


def net_loss(params, apply_fn, batch, rng, kept):
    out, kept = apply_fn({"params": params, **kept}, batch["x"], mutable=["batch_stats"])
    return jnp.mean((out - batch["y"]) ** 2), kept


def net(loss=net_loss, model=None, **options):
    return lambda: make_train_step(loss, MESH, AXES, **options).trace(abstract(model=model or Net()), BATCH, KEY)


def updated(change):
    return lambda *args: (lambda loss, new: (loss, change(new)))(*net_loss(*args))


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = fsdp(nn.Dense)(4)(x)
        self.sow("losses", "size", jnp.mean(x**2))
        return x


STATS = {"stats": {"n": jnp.zeros(())}}


def counting(params, _, batch, rng, kept):
    """Loss that counts devices whose rows are positive on the mean."""
    n = lax.cond(batch["x"].mean() > 0, lambda n: n + 1, lambda n: n, kept["stats"]["n"])
    return jnp.mean((batch["x"] @ params["w"]) ** 2) * (1 + n), {"stats": {"n": n}}


def whole(collections=None, shape=(8, 4)):
    return TrainState.create(apply_fn=None, params={"w": jnp.ones(shape)}, tx=SGD, collections=collections or {})


def masked_norm():
    """Traces a step of a wrapped model that normalises over devices under a mask."""

    class Masked(nn.Module):
        axes: object

        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm(axis_name=self.axes, name="norm")(nn.Dense(4)(x), mask=jnp.ones((len(x), 4), bool))

    state = abstract(model=fsdp(Masked)(None)).replace(apply_fn=fsdp(Masked)(AXES).apply)
    make_train_step(mean_loss, MESH, AXES).trace(state, BATCH, KEY)


def differs_along_tp():
    mesh = create({"fsdp": 2, "tp": 2}, jax.devices()[:4])
    loss = lambda params, _, batch, rng: error_of(params, batch) * (1.0 + lax.axis_index("tp"))  # noqa: E731
    make_train_step(loss, mesh, "fsdp", allow_replicated=True, check_vma=False).trace(whole(), BATCH, KEY)


# ----- others


def through(params, apply_fn, batch, rng, *, teacher):
    return mean_loss(params, apply_fn, batch) + sum(jnp.sum(x) for x in jax.tree.leaves(unbox(teacher)))


def given(others, loss=through, of=None, batch=BATCH):
    return lambda: make_train_step(loss, MESH, AXES)(
        of or dense(), batch, KEY, extra_trees=others() if callable(others) else others
    )


def deleted():
    old = jax.tree.map(jnp.copy, dense().params)
    jax.tree.map(lambda x: x.delete(), old)
    given({"teacher": old})()


def own_step(average, check_vma=True):
    """Traces a custom step on a wrapped Dense, with an average of the gradients of ``jax.grad``."""

    def step(state, batch):
        specs = partition_specs(state.params, MESH)
        grads_of = lambda params, batch: average(jax.grad(mean_loss)(params, state.apply_fn, batch, None))  # noqa: E731
        grads = jax.shard_map(grads_of, mesh=MESH, in_specs=(specs, P(AXES)), out_specs=specs, check_vma=check_vma)(
            state.params, batch
        )
        return state.apply_gradients(grads=grads)

    return lambda: jax.eval_shape(step, dense(), BATCH)


# ----- warnings


def padded(weigh=False, loss=mean_loss, **options):
    """Runs a step on 14 rows padded to 16."""
    rows = {name: np.asarray(BATCH[name][:14]) for name in ("x", "y")}
    batch, weight = shard_batch(rows, MESH, AXES, pad=True)
    batch |= {"weight": weight} if weigh else {}
    return make_train_step(loss, MESH, AXES, **options)(jax.tree.map(jnp.copy, dense()), batch, KEY)


class AroundScan(nn.Module):
    """A wrapped module with a scan inside."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x)
        scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(name="layers")(x, None)[0]


DOWN = optax.linear_schedule(0.1, 0.0, 10)


def beside(**aux):
    def loss(params, apply_fn, batch, rng):
        errors = (apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2
        return errors.mean(), {name: make(errors) for name, make in aux.items()}

    return lambda: traced(loss, has_aux=True)


def ema():
    return with_ema(optax.sgd(1.0), 0.5)


# ----- cross entropy


def entropy(**change):
    arguments = {"hidden": jnp.zeros((8, 6, 16)), "kernel": jnp.zeros((16, 37)), "labels": jnp.zeros((8, 6), int)}
    return lambda: chunked_cross_entropy(**arguments | change)


def other_values():
    return create_train_state(fsdp(nn.Dense)(4), SGD, MESH, jax.random.key(1), BATCH["x"], batch_axes=AXES)


def other_mesh():
    return create_train_state(fsdp(nn.Dense)(4), SGD, mesh_of(4, 2), KEY, BATCH["x"], batch_axes=AXES)


TX = {
    "none": (None, "tx is None", "optax.adamw"),
    "uncalled": (optax.adam, "tx is the function adam", "Call it: adam(...)"),
    "number": (1e-3, "tx is 0.001"),
    "model": (PLAIN, "tx is a Dense"),
    "schedule": (optax.constant_schedule(1.0), "tx is the function"),
}
MODELS = {
    "class": (nn.Dense, "the model is …; pass an instance", "the class Dense; pass an instance of it, Dense(...)"),
    "swapped": (optax.sgd(1.0), "the model is …, which has no init", "(model, tx, me"),
    "nnx": (
        OfNnx(),
        "the model is … of …, which has no init",
        "an OfNnx of flax.nnx",
        "pass nnx_model(lambda rngs: MyModule(",
    ),
}
KEYS = {
    "seed": (42, "an array int32[]"),
    "none": (None, "None"),
    "several": (jax.random.split(KEY, 3), "an array key<fry>[3]"),
    "floats": (jnp.ones(2), "an array float32[2]"),
    "half": (jnp.uint32(3), "an array uint32[]"),
}
RETURNED = [
    ("none", lambda loss: None, {}, "loss_fn returned None", "end with a return"),
    ("complex", lambda loss: loss + 1j, {}, "loss_fn returned a loss of dtype", "complex64; only a real float"),
    ("integer", lambda loss: jnp.int32(loss), {}, "loss_fn returned a loss of dtype", "int32; only a real float"),
    ("row", lambda loss: loss[None], {}, "loss_fn returned … where a scalar", "float32[1]"),
    ("pair", lambda loss: (loss, {}), {}, "loss_fn returned … where a scalar", "A pair (loss, aux) needs has_aux=True"),
    ("text", lambda loss: "0.5", {}, "loss_fn returned … where a scalar", "loss_fn returned '0.5'"),
    ("of-text", lambda loss: {"a": "b"}, {}, "loss_fn returned … where a scalar", "a dict of 'a'"),
    (
        "no-weight",
        lambda loss: loss,
        {"weighted": True},
        "…: loss_fn must return",
        "(sum, weight), not an array float32[]",
    ),
    ("no-aux", lambda loss: loss, {"has_aux": True}, "…: loss_fn must return", "(loss, aux), not an array float32[]"),
    ("three", lambda loss: (loss, 1, 2), {"has_aux": True}, "…: loss_fn must return", "(loss, aux), not a tuple of 3"),
    ("weight-none", lambda loss: (loss, None), {"weighted": True}, "loss_fn returned None"),
    (
        "weight-row",
        lambda loss: (loss, jnp.ones(3)),
        {"weighted": True},
        "loss_fn returned … where a scalar",
        "float32[3]",
    ),
    ("aux-number", lambda loss: (loss, 7.0), {"has_aux": True}, "has_aux=True: loss_fn must", "dict of numbers"),
]
LEARNING_RATES = [
    ("number", 1e-3, "0.001"),
    ("string", "cosine", "'cosine'"),
    ("dict", {"a": 1.0}, "a dict of 'a'"),
    ("empty", {}, "an empty dict"),
    ("true", True, "True"),
    ("false", False, "False"),
]

ROWS = [
    # ----- arguments of makers
    *[
        losses(
            f"loss-function-{name}",
            lambda bad=bad: make_train_step(bad, MESH, AXES),
            TypeError,
            "… takes first a function",
            "make_train_step takes first a function loss_fn(",
            says,
        )._replace(page=models.page)
        for name, bad, says in [
            ("none", None, "not None; pass"),
            ("mesh", MESH, "not a Mesh; pass (loss_fn, mesh, batch_axes)"),
            ("model", PLAIN, "not a Dense; write a function that calls apply_fn"),
            ("class", nn.Dense, "not the class Dense"),
        ]
    ],
    models(
        "eval-function-model",
        lambda: evaluate(PLAIN),
        TypeError,
        "… takes first a function",
        "make_eval_step takes first a function eval_fn(",
        "a Dense; write a function",
    ),
    losses(
        "loss-function-of-two",
        lambda: make_train_step(lambda params, batch: 0.0, MESH, AXES),
        TypeError,
        "… calls …, with … arguments",
        "loss_fn(params, apply_fn, batch, rng), with 4",
        "is the function <lambda>(params, batch)",
    ),
    losses(
        "loss-function-with-key",
        lambda: make_train_step(lambda params, apply_fn, batch, noise: 0.0, MESH, AXES).eval_shape(dense(), BATCH),
        TypeError,
        "the loss function takes a key as argument",
        "takes a key as argument 4, and the step was given none: ",
        "or write loss_fn(params, apply_fn, batch)",
    ),
    losses(
        "eval-function-of-two",
        lambda: evaluate(lambda params, batch: {}),
        TypeError,
        "… calls …, with … arguments",
        "eval_fn(params, apply_fn, batch), with 3 arguments",
        "<lambda>(params, batch)",
    ),
    losses(
        "loss-function-by-position",
        given({}, lambda params, apply_fn, batch, rng, teacher, second: 0.0),
        TypeError,
        "… calls …, with … arguments",
        "loss_fn(params, apply_fn, batch, rng), with 4",
    ),
    calls(
        "minibatches-none",
        lambda: make_train_step(mean_loss, MESH, AXES, 0),
        ValueError,
        "num_minibatches=… is not a positive",
        "num_minibatches=0",
    ),
    calls(
        "minibatches-float",
        lambda: make_train_step(mean_loss, MESH, AXES, 2.0, check_vma=False),
        ValueError,
        "num_minibatches=… is not a positive",
        "num_minibatches=2.0",
    ),
    calls(
        "minibatches-negative",
        lambda: make_train_step(mean_loss, MESH, AXES, -1),
        ValueError,
        "num_minibatches=… is not a positive",
        "num_minibatches=-1",
    ),
    calls(
        "accumulation-misspelt",
        lambda: make_train_step(mean_loss, MESH, AXES, accumulation="all"),
        ValueError,
        "accumulation=… is none of",
        "accumulation='all'",
    ),
    calls(
        "accumulation-without-copies",
        lambda: traced(num_minibatches=2, accumulation="reduce_replicas_once"),
        ValueError,
        "accumulation='reduce_replicas_once': no",
        "replicas=Replicas('dp')",
    ),
    calls(
        "aux-and-metric",
        lambda: make_train_step(mean_loss, MESH, AXES, has_aux=True, metric=WeightedMean()),
        ValueError,
        "has_aux and metric both",
    ),
    *[
        calls(
            f"learning-rate-{name}",
            lambda bad=bad: make_train_step(mean_loss, MESH, AXES, learning_rate=bad),
            TypeError,
            "learning_rate is …",
            f"learning_rate is {says}: pass the schedule",
            "inject_hyperparams",
        )
        for name, bad, says in LEARNING_RATES
    ],
    *[
        models(f"model-{name}-{maker}", call, TypeError, words, *says)
        for name, (model, words, *says) in MODELS.items()
        for maker, call in [
            ("state", lambda model=model: create_train_state(model, SGD, MESH, KEY, BATCH["x"], batch_axes=AXES)),
            ("init", lambda model=model: init_sharded(model, MESH, KEY, BATCH["x"], batch_axes=AXES)),
        ]
    ],
    *[
        models(
            f"init-key-{name}",
            lambda bad=bad: create_train_state(PLAIN, SGD, MESH, bad, BATCH["x"], batch_axes=AXES),
            TypeError,
            "… is …, where … takes a key",
            "where model.init takes a key: pass jax.random.key",
        )
        for name, bad in [("seed", 0), ("none", None), ("of-params", {"params": 0})]
    ],
    *[
        models(
            f"tx-{name}",
            lambda bad=bad: create_train_state(PLAIN, bad, MESH, KEY, BATCH["x"], batch_axes=AXES),
            TypeError,
            "…: tx is …, and no optimizer",
            *says,
        )
        for name, (bad, *says) in TX.items()
    ],
    models(
        "mask-in-boxes",
        lambda: abstract(optax.adamw(0.1, mask=jax.tree.map(lambda x: x.ndim > 1, abstract().params))),
        ValueError,
        "the … of optax.… has",
        "the mask of optax.masked has 'kernel' in a box, ",
        "mask=unbox(tree)",
    ),
    models(
        "labels-in-boxes",
        lambda: abstract(optax.partition({"a": SGD}, jax.tree.map(lambda _: "a", abstract().params))),
        ValueError,
        "the … of optax.… has",
        "the param_labels of optax.partition has 'kernel' in a box",
        "param_labels=unbox(tree)",
    ),
    models(
        "average-in-a-chain",
        lambda: abstract(optax.chain(ema(), optax.scale(0.5))),
        ValueError,
        "with_ema stands in an optax.chain",
        "before scale, ",
        "with_ema(optax.chain(...), decay)",
    ),
    optimizers(
        "step-of-lookahead",
        lambda: trace(
            TrainState.create(apply_fn=PLAIN.apply, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1)).replace(
                tx=optax.lookahead(optax.sgd(0.1), 5, 0.5)
            ),
            allow_replicated=True,
        ),
        ValueError,
        "the step: state.tx is optax.lookahead",
        "create_train_state(model, optax.lookahead(...), ...)",
    ),
    frozen(
        "all-frozen",
        lambda: traced(model=fsdp(nn.Dense, trainable=False)(4)),
        ValueError,
        "all … parameters are frozen",
        "all 2 parameters are frozen",
    ),
    # ----- calls of a step
    *[
        models(
            f"key-{name}",
            lambda bad=bad: trace(rng=bad),
            TypeError,
            "… is …, where … takes a key",
            f"rng is {says}, where step(state, batch, rng) takes a key: pass jax.random.key(",
            "seed)",
        )
        for name, (bad, says) in KEYS.items()
        if name not in ("seed", "none")
    ],
    models(
        "key-seed",
        lambda: trace(rng=42),
        TypeError,
        "… is …, where … takes a key",
        "rng is an array int32[]",
        "key(seed)",
    ),
    calls(
        "batch-first",
        lambda: STEP.trace(BATCH, whole(), KEY),
        TypeError,
        "a step takes (state, batch, rng), and its state is",
        "its state is a dict of 'weight', 'x', 'y', not a TrainState",
        "has no 'step'",
    ),
    models(
        "key-first",
        lambda: STEP.trace(state(), KEY, BATCH),
        TypeError,
        "… is …, where … takes a key",
        "rng['weight'] is an array float32[16]",
    ),
    calls(
        "a-pair",
        lambda: STEP.trace((state(), {}), BATCH, KEY),
        TypeError,
        "a step takes (state, batch, rng), and its state is",
        "its state is a tuple of 2, ",
        "state, metrics = step(state, batch, rng)",
    ),
    calls(
        "local-without-metric",
        lambda: trace(None, BATCH, KEY, jnp.ones(8)),
        ValueError,
        "make_train_step has metric=…",
        "metric=None, and its step was given local=an array",
    ),
    calls("metric-without-local", with_metric([]), ValueError, "make_train_step has metric=…", "was given local=None"),
    calls(
        "batch-axes-none-left",
        lambda: default_batch_axes({"kernel": Sharded(jnp.ones((8, 8)), ("dp", "fsdp"), model_axes=AXES)}, MESH),
        ValueError,
        "the model itself splits parameters over every axis",
        "every axis of the mesh, ('dp', 'fsdp') (over 'fsdp' it splits 'kernel')",
    ),
    calls(
        "call-without-key",
        lambda: WITH_KEY(dense(), BATCH),
        TypeError,
        "… was called without",
        "step(state, batch, rng) was called without 'rng'. Pass a key",
    ),
    calls(
        "call-without-batch",
        lambda: WITH_KEY.lower(dense()),
        TypeError,
        "… was called without",
        "step(state, batch, rng) was called without 'batch'",
    ),
    calls(
        "call-shape-without-key",
        lambda: WITH_KEY.eval_shape(dense(), BATCH),
        TypeError,
        "… was called without",
        "'rng'",
    ),
    calls(
        "call-unknown-name",
        lambda: STEP(dense(), BATCH, KEY, key=KEY),
        TypeError,
        "… has no argument",
        "has no argument 'key'",
    ),
    calls(
        "call-with-five",
        lambda: STEP(dense(), BATCH, KEY, None, dense()),
        TypeError,
        "… was called with … arguments",
        "was called with 5 arguments",
        "extra_trees=",
    ),
    calls("call-twice", lambda: STEP(dense(), BATCH, KEY, rng=KEY), TypeError, "… was given … twice", "'rng'"),
    calls(
        "evaluation-without-local",
        lambda: EVALUATION(dense(), BATCH),
        TypeError,
        "… was called without",
        "step(state, batch, local) was called without 'local'",
        "metric.empty",
    ),
    calls(
        "evaluation-with-key",
        lambda: EVALUATION(dense(), BATCH, KEY),
        TypeError,
        "an evaluation takes (state, batch, local), and its local",
        "its local is an array key<fry>",
        "metric.empty",
    ),
    calls(
        "state-of-another-mesh",
        lambda: STEP.trace(other_mesh(), BATCH, KEY),
        ValueError,
        "'…' lies on a mesh …, and the step was made",
        "a mesh {'dp': 4, 'fsdp': 2}, and the step was made for a mesh {'dp': 2",
        "restore into abstract_train_state",
    ),
    calls(
        "state-on-one-device",
        lambda: STEP(jax.device_put(jax.device_get(dense()), jax.devices()[0]), BATCH, KEY),
        ValueError,
        "… lies on the devices",
        "state['step'] lies on the devices [0]",
        "one mesh",
    ),
    calls(
        "callback-in-a-program",
        callback_in_a_program,
        ValueError,
        "the step contains …, and is called inside a jax.jit",
        "the step contains pure_callback",
        "Call the step outside of jax.jit",
    ),
    calls(
        "state-donated",
        donated,
        ValueError,
        "… was handed to a step before",
        "state was handed to",
        "jax.tree.map(jnp.copy, state)",
    ),
    calls(
        "params-donated", lambda: donated("params"), ValueError, "… was handed to a step before", "state was handed to"
    ),
    calls(
        "step-donated-without-jit",
        lambda: STEP.__wrapped__(state().replace(step=deleted_number()), BATCH, KEY),
        RuntimeError,
        "Array has been deleted: state.step was donated",
        "pass a state in memory",
    ),
    optimizers(
        "state-of-another-optimizer",
        lambda: trace(state().replace(tx=optax.sgd(0.1, momentum=0.9))),
        ValueError,
        "state.opt_state is not a state",
        "its leaf '0/count' is of shape (), and tx.init makes none",
    ),
    optimizers(
        "state-in-another-tree",
        lambda: trace(state().replace(tx=optax.adamw(1e-3))),
        ValueError,
        "state.opt_state is not a state",
        "its leaves are in another tree",
    ),
    # ----- batches
    calls(
        "step-batch-dataclass",
        lambda: trace(batch=PlainBatch(BATCH["x"])),
        TypeError,
        "… is …",
        "batch is a PlainBatch, a dataclass",
        "register_dataclass",
    ),
    calls(
        "step-batch-leaf-dataclass",
        lambda: trace(batch={"x": PlainBatch(1)}),
        TypeError,
        "… is …",
        "batch['x'] is a PlainBatch, a dataclass",
    ),
    calls(
        "step-batch-string",
        lambda: trace(batch=changed(name="train")),
        TypeError,
        "… is …",
        "batch['name'] is 'train', not an array. Leave it out",
    ),
    calls(
        "step-batch-strings",
        lambda: trace(batch=changed(t=np.array(["a"] * 16))),
        TypeError,
        "… is …",
        "batch['t'] is an array <U1[16], not of numbers",
    ),
    calls(
        "step-batch-foreign",
        lambda: trace(batch=changed(t=Foreign())),
        TypeError,
        "… is …",
        "batch['t'] is a Foreign of tests",
        "np.asarray",
    ),
    calls(
        "step-batch-numbers",
        lambda: trace(batch=changed(ids=[1] * 16)),
        ValueError,
        "… is a list or tuple of … numbers",
        "batch['ids'] is a list or tuple of 16 numbers",
        "np.asarray",
    ),
    calls(
        "step-batch-lists",
        lambda: trace(batch=changed(x=np.ones((16, 8)).tolist())),
        ValueError,
        "… is a list or tuple of … numbers",
        "batch['x/0'] is a list or tuple of 8 numbers",
    ),
    calls(
        "step-batch-tuple",
        lambda: trace(batch=(1, 2.0)),
        ValueError,
        "… is a list or tuple of … numbers",
        "batch is a list or tuple of 2 numbers",
    ),
    calls(
        "step-batch-uneven",
        lambda: trace(batch=changed(y=jnp.ones((32, 4)))),
        ValueError,
        "… of shape … holds … examples, but",
        "batch['y'] of shape (32, 4) holds 32 examples, but batch['weight'] of shape (16,) holds 16",
    ),
    calls(
        "step-batch-empty",
        lambda: trace(batch=jax.tree.map(lambda x: x[:0], BATCH)),
        ValueError,
        "… of shape … holds no examples",
        "batch['weight'] of shape (0,)",
    ),
    calls(
        "step-batch-does-not-divide",
        lambda: trace(batch=data(12)),
        ValueError,
        "… of shape … holds … examples, which",
        "batch['weight'] of shape (12,) holds 12 examples, which the mesh of {'dp': 2, 'fsdp': 4}, "
        "8 devices does not divide; "
        "the last 4 would be dropped. Pad the batch to 16",
    ),
    calls(
        "step-minibatches-do-not-divide",
        lambda: trace(num_minibatches=4),
        ValueError,
        "… of shape … holds … examples, which",
        "16 examples",
        "8 devices times num_minibatches=4, 32 minibatches in all",
        "to 32 examples",
    ),
    calls(
        "step-batch-of-parameters",
        lambda: traced(batch=BATCH | {"teacher": abstract().params}),
        ValueError,
        "… is a parameter in a box",
        "batch['teacher/kernel'] is a parameter in a box",
        "step(..., extra_trees={'teacher': params})",
    ),
    calls(
        "step-batch-placed-otherwise",
        lambda: STEP(dense(), changed(x=jax.device_put(BATCH["x"], jax.NamedSharding(MESH, P("dp", "fsdp")))), KEY),
        ValueError,
        "… of shape … is placed as",
        "batch['x'] of shape (16, 8) is placed as P",
        "over ('fsdp',)",
    ),
    calls(
        "local-batch-uneven",
        lambda: shaped(
            lambda x: accumulate_gradients(lambda p, b, r: p * jnp.mean(b[0]), jnp.ones(()), (x, x[:1]), None, AXES)[0],
            BATCH["x"],
            in_specs=P(AXES),
        ),
        ValueError,
        "… of shape … holds … examples, but",
        "batch['1'] of shape (1, 8) holds 1 examples, but batch['0']",
    ),
    calls(
        "local-batch-string",
        lambda: shaped(
            lambda x: accumulate_gradients(
                lambda p, b, r: p * jnp.mean(b["x"]), jnp.ones(()), {"x": x, "name": "a"}, None, AXES
            )[0],
            BATCH["x"],
            in_specs=P(AXES),
        ),
        TypeError,
        "… is …",
        "batch['name'] is 'a', not an array",
    ),
    calls(
        "local-batch-does-not-divide",
        lambda: shaped(
            lambda x: accumulate_gradients(lambda p, b, r: p * jnp.mean(b), jnp.ones(()), x, None, AXES, 4)[0],
            jnp.ones((80, 8)),
            in_specs=P(AXES),
        ),
        ValueError,
        "… of shape … holds … examples, which",
        "batch of shape (10, 8) holds 10 examples, which num_minibatches=4 does not divide; the "
        "last 2 would be dropped. Pad the "
        "batch to 12 examples",
        "or choose a divisor of 10",
    ),
    # ----- others
    calls(
        "others-no-dict",
        given([1]),
        TypeError,
        "extra_trees is …",
        "extra_trees is a list of 1; ",
        "extra_trees={'teacher': teacher_state.params}",
    ),
    calls(
        "others-no-dict-and-batch",
        given([1], batch=jax.tree.map(lambda x: x[:3], BATCH)),
        TypeError,
        "extra_trees is …",
        "extra_trees is a list of 1; pass a dict",
    ),
    calls(
        "others-unknown",
        given({"teacher": 1.0, "techer": 2.0}),
        TypeError,
        "the step was given extra_trees with",
        "the name 'techer', and loss_fn takes [",
        "'teacher']. Write loss_fn(",
        "rng, *, techer)",
    ),
    calls(
        "others-missing",
        given(None),
        TypeError,
        "… takes … by name, and",
        "takes 'teacher' by name",
        "step(..., extra_trees={'teacher': tree})",
    ),
    calls(
        "others-without-boxes",
        given(lambda: {"teacher": unbox(other_values().params)}),
        ValueError,
        "… of shape … has no box and is split as",
        "extra_trees['teacher/kernel'] of shape (8, 4)",
        "box_like(tree, params)",
    ),
    calls(
        "others-of-another-mesh",
        given(lambda: {"teacher": other_mesh().params}),
        ValueError,
        "'…' lies on a mesh …, and the step was made",
        "'extra_trees/teacher/bias' lies on a mesh {'dp': 4, 'fsdp': 2}",
    ),
    calls(
        "others-of-the-state",
        given(lambda: {"teacher": dense().params}),
        ValueError,
        "… is a leaf of the state too",
        "extra_trees['teacher/bias'] is a leaf",
        "jnp.copy, state.params",
    ),
    calls(
        "others-deleted", deleted, ValueError, "… was deleted: a step has", "extra_trees['teacher/bias'] was deleted"
    ),
    # ----- what a loss returns
    *[
        losses(f"loss-returns-{name}", returned(out, **options), TypeError, words, *says)
        for name, out, options, words, *says in RETURNED
    ],
    # ----- averages of a custom step
    losses(
        "own-step-without-average",
        own_step(lambda grads: grads),
        ValueError,
        "apply_gradients: JAX has summed the gradient of",
        "the gradient of 'bias' over ('fsdp',), and the gather has averaged that of 'kernel'",
        "Call sync_gradients once",
    ),
    losses(
        "own-step-averaged-twice",
        own_step(lambda grads: sync_gradients(jax.tree.map(lambda x: x / 2, sync_gradients(grads, AXES)), AXES)),
        ValueError,
        "sync_gradients: '…' of shape … was averaged over",
        "sync_gradients: 'bias' of shape (4,) was averaged over ('dp', 'fsdp')",
        "Call sync_gradients once",
    ),
    losses(
        "own-step-without-average-or-types",
        own_step(lambda grads: grads, check_vma=False),
        ValueError,
        "apply_gradients: the gradient of '…' differs between devices",
        "the gradient of 'bias' differs between devices along ('dp', 'fsdp')",
        "Call sync_gradients once",
    ),
    losses(
        "own-step-averages-shards",
        own_step(lambda grads: lax.pmean(grads, AXES), check_vma=False),
        ValueError,
        "apply_gradients: the gradient of '…' was averaged over",
        "the gradient of 'kernel' was averaged over ('fsdp',), axes that split the leaf",
        "in place of pmean",
    ),
    Section("Axis names")(
        "varying-params-outside",
        lambda: varying_params(dense().params, AXES),
        ValueError,
        "…: … is not a bound mesh axis",
        "varying_params: 'dp' is not a bound mesh axis",
    ),
    losses(
        "aux-named-loss",
        returned(lambda loss: (loss, {"loss": 7.0}), has_aux=True),
        ValueError,
        "the auxiliary output has the name",
        "'loss'",
    ),
    losses(
        "aux-integer",
        returned(lambda loss: (loss, {"n": {"tokens": jnp.int32(8)}}), has_aux=True),
        TypeError,
        "… is an integer (",
        "aux['n/tokens'] is an integer (int32[])",
        "Count.of(x)",
    ),
    losses(
        "aux-python-integer",
        returned(lambda loss: (loss, {"n": {"tokens": 8}}), has_aux=True),
        TypeError,
        "… is an integer (",
        "aux['n/tokens'] is an integer (int32[])",
        "For the sum: ",
    ),
    losses(
        "aux-string",
        returned(lambda loss: (loss, {"name": "a"}), has_aux=True),
        TypeError,
        "… is …, a …; the auxiliary",
        "aux['name'] is 'a', a str; the auxiliary output is made of numbers",
    ),
    losses(
        "loss-reduced-already",
        own_gradient(lambda p, b: lax.pmean(error_of(p, b), "dp")),
        ValueError,
        "… that loss_fn returned does not vary",
        "the loss that loss_fn returned does not vary over 'dp'",
        "already",
    ),
    losses(
        "weight-reduced-already",
        own_gradient(lambda p, b: (error_of(p, b, jnp.sum), lax.psum(jnp.sum(b["weight"]), AXES)), weighted=True),
        ValueError,
        "… that loss_fn returned does not vary",
        "the weight that loss_fn returned does not vary over 'dp'",
    ),
    losses(
        "axis-left-out",
        own_gradient(error_of, axes="dp"),
        ValueError,
        "the loss varies over",
        "'fsdp'",
        "leave out",
        "summed over its 4 devices",
    ),
    names(
        "axis-misspelt-gradient",
        own_gradient(error_of, axes=("dp", "fdsp"), check_vma=False),
        ValueError,
        "…: … is not a bound mesh axis",
        "value_and_grad: 'fdsp' is not a bound mesh axis",
        "('dp', 'fsdp')",
    ),
    names(
        "axis-misspelt-fold",
        lambda: shaped(lambda key: fold_rng_over_axis(key, "fdsp"), KEY),
        ValueError,
        "…: … is not a bound mesh axis",
        "fold_rng_over_axis: 'fdsp' is not a bound mesh axis",
    ),
    # ----- types and rules
    losses(
        "forward-derivative",
        lambda: traced(lambda p, apply_fn, b, rng: jax.jvp(lambda p: mean_loss(p, apply_fn, b), (p,), (p,))[1]),
        TypeError,
        "jax.jvp, jax.linearize or jax.jacfwd",
        "weights = gather_params(params",
    ),
    losses(
        "carry-without-type",
        lambda: traced(model=OwnScan()),
        TypeError,
        "a scan or a loop of this model",
        "float32[2,4]",
        "check_vma=False",
        "pcast(carry, axes",
    ),
    losses(
        "carry-of-a-loop-in-a-scan",
        lambda: traced(model=ScanInScan()),
        TypeError,
        "a scan or a loop in a layer of an nn.scan",
        "check_constancy_invariants=False",
        "check_vma=False",
    ),
    losses(
        "branch-of-two-types",
        of_dense(lambda x: lax.cond(lax.psum(x.sum(), AXES) > 0, lambda: x.sum(), lambda: 0.0)),
        TypeError,
        "a branch of this model",
        "Pass check_vma=False",
        "pcast(",
    ),
    losses(
        "constrained-activation",
        of_dense(lambda x: lax.with_sharding_constraint(x, jax.P(AXES))),
        ValueError,
        "the model constrains the sharding of an activation",
        "spec=P(",
        "Leave the constraint out where the axes are manual",
    ),
    losses(
        "vmapped-axis",
        of_rows(Vmapped(("v", *AXES)), with_statistics),
        ValueError,
        "… reduces over …, as jax.vmap",
        "jax.lax.psum over ",
        "'v'",
    ),
    losses(
        "vmapped-axis-alone",
        of_rows(Vmapped(("v",)), with_statistics),
        ValueError,
        "… reduces over …, as jax.vmap",
        "an axis that the mesh does not have",
        "Pass check_vma=False",
    ),
    losses(
        "equal-along-an-axis",
        of_rows(OfRow((*AXES, "tp")), with_statistics, jax.sharding.AbstractMesh((2, 2, 2), (*AXES, "tp"))),
        ValueError,
        "… reduces over (…), and its operand",
        "'tp'",
        "is equal along some of these axes",
        "for a BatchNorm, the axes of the batch",
    ),
    losses("no-casts", no_casts, ValueError, "the primitive … mixes types, and jax_auto_pcast", "is False"),
    losses(
        "rule-mixes-types",
        of_dense(jax.vmap(lambda row: lax.cond(row.sum() > 0, lambda a: a + 1, lambda a: a, 1.0))),
        ValueError,
        "one of JAX's own rules",
        "mixes types in the primitive ",
        "Pass check_vma=False",
    ),
    Section("Wrapping and splitting parameters")(
        "gather-in-a-branch", in_a_branch, ValueError, "'…' is gathered in a branch", "'kernel' is", "pmax(flag, "
    ),
    losses(
        "gather-in-a-branch-after-a-call",
        in_a_branch_after_a_call,
        ValueError,
        "a collective over …, such as the gather",
        "is in a branch or loop",
        "pmax(flag, ",
    ),
    losses(
        "differs-along-another-axis",
        differs_along_tp,
        ValueError,
        "… would differ from device to device along …, and the step returns",
        "'loss', 'grads/w' would",
        "along ('tp',)",
    ),
    # ----- collections
    collections(
        "masked-normalisation",
        masked_norm,
        ValueError,
        "… has axis_name=… and is called with a mask",
        "nn.LayerNorm at 'norm' has axis_name=('dp', 'fsdp')",
        "of these 8 devices",
        "Leave axis_name out",
        "psum of jax.lax",
    ),
    collections(
        "statistics-of-devices",
        net(model=Net(None)),
        ValueError,
        "the collections … would differ",
        "batch_stats/BatchNorm_0/mean', 'batch_stats/BatchNorm_0/var' would",
        "along ('dp', 'fsdp')",
        "nn.BatchNorm(..., axis_name=('dp', 'fsdp'))",
        "pmean(updated, ",
        "docs/collections.md",
    ),
    collections(
        "statistics-of-devices-without-types",
        net(model=Net("dp"), check_vma=False, num_minibatches=2),
        ValueError,
        "the collections … would differ",
        "along ('fsdp',)",
    ),
    collections(
        "collection-by-a-branch",
        lambda: make_train_step(counting, MESH, AXES, allow_replicated=True).trace(whole(STATS), BATCH, KEY),
        ValueError,
        "the collections … would differ",
        "'stats/n' would differ from device to device along ",
        "pmax(flag, ",
    ),
    collections(
        "collections-no-pair",
        net(lambda *args: net_loss(*args)[0]),
        TypeError,
        "…: loss_fn must return",
        "(what it returns ",
        ", updated collections), not",
    )._replace(page=losses.page),
    collections(
        "collections-no-dict",
        net(updated(lambda new: [new])),
        TypeError,
        "with collections: loss_fn must",
        "whose second part is a dict ",
        "names of ['batch_stats'], not a list",
    ),
    collections(
        "collections-unknown",
        net(updated(lambda new: new | {"losses": 0.0})),
        ValueError,
        "loss_fn returned the collection",
        "'losses', which the state does not have",
        "Return these",
    ),
    collections(
        "collections-in-part",
        net(updated(lambda new: {"batch_stats": {"BatchNorm_0": {"mean": new["batch_stats"]["BatchNorm_0"]["mean"]}}})),
        ValueError,
        "loss_fn … '…'. It returns",
        "did not return 'batch_stats/BatchNorm_0/var'",
    ),
    collections(
        "collections-dtype",
        net(updated(lambda new: jax.tree.map(jnp.bfloat16, new))),
        ValueError,
        "loss_fn made '…'",
        "made 'batch_stats/BatchNorm_0/mean' bfloat16[16], which was float32[16]",
    ),
    collections(
        "collections-not-taken",
        net(mean_loss),
        TypeError,
        "the state has the collections …, and … takes",
        "['batch_stats'], and loss_fn takes 4 ",
        "mutable=list",
    ),
    collections(
        "collections-taken-without",
        lambda: make_train_step(net_loss, MESH, AXES, allow_replicated=True).trace(whole(), BATCH, KEY),
        TypeError,
        "… takes collections as argument",
        "loss_fn takes collections as argument 5, and the state has none",
    ),
    collections(
        "eval-collections-taken-without",
        lambda: evaluate(lambda params, apply_fn, batch, collections: {}),
        TypeError,
        "… takes collections as argument",
        "eval_fn takes collections as argument 4, and the state has none",
    ),
    collections(
        "eval-collections-not-taken",
        lambda: evaluate(of=dense().replace(collections={"batch_stats": {"mean": jnp.zeros(8)}})),
        TypeError,
        "the state has the collections …, and … takes",
        "['batch_stats'], and eval_fn takes 3 arguments",
    ),
    collections(
        "collection-of-decoding",
        lambda: abstract_train_state(
            nn.MultiHeadDotProductAttention(num_heads=2, decode=True),
            SGD,
            MESH,
            KEY,
            BATCH["x"],
            batch_axes=AXES,
            allow_replicated=True,
        ),
        ValueError,
        "the model's collection … holds",
        "'cache' holds what decoding keeps of single ",
        "mutable=['params']",
    ),
    collections(
        "collection-that-is-sown",
        lambda: abstract(model=Sowing()),
        ValueError,
        "'…/…' is a tuple, which is what self.sow",
        "'losses/size' is a tuple",
        "mutable=['params']",
    ),
    # ----- evaluation
    evaluation(
        "eval-metric-none",
        lambda: make_eval_step(lambda params, apply_fn, batch: {}, MESH, AXES, metric=None),
        TypeError,
        "metric=… is no PureMetric",
        "metric=None",
    ),
    evaluation(
        "eval-state",
        lambda: evaluate(of=dense().params),
        TypeError,
        "an evaluation takes",
        "its state is a dict of",
        "which has no 'params'",
    ),
    calls(
        "eval-rows",
        lambda: evaluate(batch=data(21)),
        ValueError,
        "… of shape … holds … examples, which",
        "(21,)",
        "8 devices does not divide",
        "24 ",
        "pad=True",
    ),
    calls(
        "eval-state-of-another-mesh",
        lambda: evaluate(mesh=mesh_of(4, 2)),
        ValueError,
        "'…' lies on a mesh …, and the step was made",
        "'state/params/bias' lies on a mesh {'dp': 2, 'fsdp': 4}",
        "{'dp': 4, 'fsdp': 2}",
    ),
    evaluation(
        "eval-no-dict",
        lambda: evaluate(lambda params, apply_fn, batch: batch["x"]),
        TypeError,
        "eval_fn returned",
        "an array float32[",
        "and a dict of the arguments",
    ),
    # ----- check_step
    checking(
        "check-own-step",
        lambda: check_step(lambda state, batch, rng: (state, {}), dense(), BATCH, KEY),
        ValueError,
        "check_step: this step is not",
        "Pass loss_fn=",
    ),
    checking(
        "check-without-a-mesh",
        lambda: check_step(
            STEP, dense().replace(params=jax.device_put(unbox(dense().params), jax.devices()[0])), BATCH, KEY
        ),
        ValueError,
        "check_step: '…' is on no mesh",
        "check_step: 'bias' is on no mesh",
        "create_train_state",
    ),
    checking(
        "check-without-parameters",
        lambda: check_step(STEP, dense().replace(params={}), BATCH, KEY),
        ValueError,
        "check_step: state.params has no leaves",
    ),
    # ----- cross entropy
    losses(
        "entropy-hidden",
        entropy(hidden=jnp.zeros((8, 6, 5))),
        ValueError,
        "hidden of shape",
        "hidden of shape (8, 6, 5) does not fit",
        "must be 16",
    ),
    losses(
        "entropy-kernel-other-way",
        entropy(kernel=jnp.zeros((37, 16))),
        ValueError,
        "hidden of shape",
        "kernel of shape (37, 16)",
        "pass vocab_dim=0",
    ),
    losses(
        "entropy-kernel-of-one-dim",
        entropy(kernel=jnp.zeros((37,))),
        ValueError,
        "kernel of shape",
        "kernel of shape (37,) with vocab_dim=1: it must be [d, V]",
    ),
    losses("entropy-vocab-dim", entropy(vocab_dim=2), ValueError, "kernel of shape", "vocab_dim=2: it must be"),
    losses(
        "entropy-labels",
        entropy(labels=jnp.zeros((8, 5), int)),
        ValueError,
        "labels of shape … do not fit hidden",
        "labels of shape (8, 5)",
        "(8, 6), is needed",
    ),
    losses(
        "entropy-labels-dtype",
        entropy(labels=jnp.zeros((8, 6))),
        TypeError,
        "labels are …, and must",
        "labels are float32, and must be integers",
    ),
    losses("entropy-chunk-zero", entropy(chunk_size=0), ValueError, "chunk_size=… is not", "chunk_size=0"),
    losses("entropy-chunk-float", entropy(chunk_size=1.5), ValueError, "chunk_size=… is not", "chunk_size=1.5"),
    Section("Tensor and sequence parallelism")(
        "entropy-sequence-without-vocab",
        entropy(sequence_dim=1),
        ValueError,
        "…: sequence_dim=… is the dim of tokens that",
        "chunked_cross_entropy: sequence_dim=1",
    ),
    # ----- warnings
    models(
        "warned-narrow",
        lambda: abstract(model=fsdp(nn.Dense)(4, param_dtype=jnp.bfloat16)),
        UserWarning,
        "'…', and … of … parameters in all",
        "'bias', and 2 of 2 parameters in all, are trained in bfloat16",
        "smaller than 0.0039 of a weight",
    ),
    models(
        "warned-no-decay",
        lambda: abstract(optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: isinstance(x, nn.Partitioned), p))),
        UserWarning,
        "the mask of weight decay is False",
        "for all 2 parameters, 'bias', 'kernel'",
    ),
    models(
        "warned-decay-of-biases",
        lambda: abstract(optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), Stacked()),
        UserWarning,
        "the mask of weight decay takes",
        "'blocks/Dense_0/bias'",
        "of 2 dims, and no parameter of one dim, as 'Dense_0/bias'",
    ),
    calls(
        "warned-multi-steps",
        lambda: traced(weighted_loss, skip_nonfinite(optax.MultiSteps(optax.adam(0.1), 4)), weighted=True),
        UserWarning,
        "weighted=True with optax.MultiSteps",
        "(..., 4)",
        "num_minibatches=4, weighted=True",
    ),
    calls(
        "warned-another-schedule",
        lambda: traced(tx=optax.adamw(DOWN), learning_rate=optax.linear_schedule(0.1, 0.05, 10)),
        UserWarning,
        "learning_rate= of make_train_step",
        "at update 1 it is 0.095, and the optimizer scales by 0.09.",
    ),
    models(
        "warned-nothing-split",
        lambda: abstract(model=nn.Dense(4)),
        UserWarning,
        "no parameter is split: each of the",
        "8 devices of the mesh dp=2,fsdp=4",
        "allow_replicated=True",
    ),
    models(
        "warned-part-whole",
        lambda: abstract(model=nn.Sequential([nn.Dense(2**17), fsdp(nn.Dense)(4)])),
        UserWarning,
        "… of the parameters' bytes are not split",
        "dp=2,fsdp=4",
    ),
    calls(
        "warned-whole-others",
        lambda: make_train_step(lambda *args, teacher: through(*args, teacher=args[0]), MESH, AXES).trace(
            dense(), BATCH, KEY, extra_trees={"teacher": {"kernel": jnp.zeros((512, 512))}}
        ),
        UserWarning,
        "extra_trees['…'], …, is replicated on each",
        "extra_trees['teacher/kernel'], 1 MiB, is replicated on each of the 8 devices",
    ),
    Section("Layers in loops and scans")(
        "warned-gathered-stack",
        lambda: abstract(model=fsdp(AroundScan)()),
        UserWarning,
        "… within a module that shard_module_params wraps",
        "'layers' scans over layers of Block",
        "nn.scan(shard_module_params(Block",
    ),
    calls(
        "warned-idle-axis",
        lambda: traced(axes="fsdp"),
        UserWarning,
        "along … of the mesh",
        "along 'dp' of the mesh dp=2,fsdp=4 all devices compute the same",
        "2 times the work",
    ),
    losses(
        "warned-maximum",
        beside(worst=jnp.max),
        UserWarning,
        "aux['…'] is … on each device",
        "aux['worst'] is the largest on each device",
        "over 8 ",
        "Maximum.of(x)",
    ),
    calls(
        "warned-padding",
        padded,
        UserWarning,
        "shard_batch(..., pad=True) has made",
        "has made 16 rows of 14",
        "is in no leaf of the batch, 'x', 'y': copies count like",
    ),
    calls(
        "warned-padding-unweighted",
        lambda: padded(True),
        UserWarning,
        "shard_batch(..., pad=True) has made",
        "the loss is computed without the weights",
        "weighted=True",
    ),
]
