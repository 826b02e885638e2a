"""Errors of optimizers, of plans, and of the guards of a training loop."""

import threading

import optax.contrib
from optax.contrib import MuonDimensionNumbers

from tests.errors.shared import (
    AXES,
    BATCH,
    KEY,
    MESH,
    Model,
    P,
    create_train_state,
    fsdp,
    jax,
    jnp,
    make_train_step,
    mean_loss,
    nn,
    np,
    on_mesh,
    optax,
    shaped,
)
from tests.errors.table import Section
from xlstm_jax.distributed import (
    LoopGuard,
    abstract_train_state,
    check_replicas,
    plan_sharding,
    remat_policy,
    replayed,
    shard_modules,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.optimizers import (
    Offload,
    clip_by_global_norm,
    elementwise_only,
    ema_params,
    global_norm,
    leaf_norms,
    muon,
    on_unsharded_matrices,
    skip_counts,
    skip_nonfinite,
    slow_params,
    with_ema,
    with_leaf_norms,
    with_slow_params,
)
from xlstm_jax.distributed.optimizers.matrices.dimensions import choose_matrices
from xlstm_jax.distributed.optimizers.transforms import taking_extra_args
from xlstm_jax.distributed.plan import ShardingPlan
from xlstm_jax.distributed.resilience import NonFiniteError, ReplicaError
from xlstm_jax.forecast.training import Workload

optimizers, plans, loops, models, losses, wrapping, meshes, dtypes, names = map(
    Section,
    [
        "Optimizers",
        "Plan",
        "The loop: LoopGuard, replicas",
        "Initial state and models",
        "Loss functions and gradients",
        "Wrapping and splitting parameters",
        "Meshes and devices",
        "Dtypes",
        "Axis names",
    ],
)
SGD, W = optax.sgd(0.1), {"w": jnp.ones(3)}
AVERAGED = with_ema(optax.sgd(1.0), 0.5)
UNSETTLED = {"blocks/up/kernel": (3, 8, 32)}
NO_TRANSFORMS = {
    "none": (None, "tx is None"),
    "uncalled": (optax.adam, "tx is the function adam"),
    "number": (1e-3, "tx is 0.001"),
    "model": (nn.Dense(4), "tx is a Dense"),
    "schedule": (optax.constant_schedule(1.0), "tx is the function"),
}
WRONG = {
    "factored": (
        optax.adafactor(0.01, min_dim_size_to_factor=8, clipping_threshold=None, multiply_by_parameter_scale=False),
        "scale_by_factored_rms",
    ),
    "norm": (optax.clip_by_global_norm(0.1), "clip_by_global_norm"),
}


def not_averaged(tx, over=None):
    """Returns a call of an optimizer inside ``shard_map``, with a gradient averaged over too few axes."""
    from xlstm_jax.distributed import sync_gradients

    def local(x):
        w = {"w": jnp.ones(8)}
        grads = jax.grad(lambda w: jnp.mean(x @ w["w"]))(jax.lax.pcast(w, AXES, to="varying"))
        grads = grads if over is None else sync_gradients(grads, over)
        return tx.update(grads, tx.init(w), w)[0]

    return lambda: shaped(local, BATCH["x"], in_specs=P(AXES))


def own(update=None, **required):
    """Returns a transform whose update needs ``loss=``."""

    def needs_loss(updates, state, params=None, *, loss):
        return updates, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update or needs_loss)


def scale():
    return optax.GradientTransformationExtraArgs(optax.init_empty_state, lambda u, s, params=None: (u, s))


def needs_value():
    def update(updates, state, params=None, *, value):
        return updates, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def halved():
    def update(updates, state, params=None, *, value):
        return updates, state

    return optax.GradientTransformation(optax.init_empty_state, update)


def updated(tx, **given):
    tx = taking_extra_args(tx)
    return lambda: tx.update(
        jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones(3), value=1.0, grad=jnp.ones(3), value_fn=None, **given
    )


def abstract(tx):
    return abstract_train_state(fsdp(nn.Dense)(4), tx, MESH, KEY, BATCH["x"], batch_axes=AXES)


def private():
    return optax.contrib.differentially_private_aggregate(1.0, 0.1, 0)


def flax_state(tx):
    from flax.training.train_state import TrainState as FlaxTrainState

    state = FlaxTrainState.create(apply_fn=None, params={"kernel": jnp.ones(3)}, tx=tx)
    return lambda: make_train_step(mean_loss, MESH, AXES, allow_replicated=True).trace(state, BATCH, KEY)


IN_STEP = {
    "dpsgd": (private, "create_train_state: optax's differentially_private_aggregate takes a gradient for every"),
    "dpsgd-in-multi-steps": (
        lambda: optax.MultiSteps(private(), 2),
        "differentially_private_aggregate takes a gradient for",
    ),
    "dpsgd-in-ours": (
        lambda: skip_nonfinite(with_ema(private(), 0.9)),
        "differentially_private_aggregate takes a gradient",
    ),
    "dpsgd-in-a-partition": (lambda: optax.partition({"a": private()}, "a"), "differentially_private_aggregate takes"),
    "sophia": (
        lambda: optax.contrib.sophia(0.1),
        "hutchinson_estimator_diag_hessian differentiates the loss (obj_fn) twice",
    ),
    "sophia-injected": (
        lambda: optax.inject_hyperparams(optax.contrib.sophia)(0.1),
        "hutchinson_estimator_diag_hessian differ",
    ),
}


def monitored():
    """Updates with an optimizer whose state changes its tree."""
    tx = skip_nonfinite(
        optax.GradientTransformation(
            lambda params: {}, lambda updates, state, params=None: (updates, {"new": jnp.ones(())})
        )
    )
    return tx.update(W, tx.init(W), W)


def uneven_owners():
    shampoo = optax.scale(1.0)
    tx = on_unsharded_matrices(shampoo, {"w": MuonDimensionNumbers(1, 2)})
    params = {"w": Sharded(jnp.ones((6, 8, 8)), ("dp", "fsdp", None))}
    return shaped(tx.init, params, in_specs=(P("dp", "fsdp"),), check_vma=False)


# ----- plans


class Positions(nn.Module):
    """Positions for eight tokens."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(8, 16)(tokens) + self.param("positions", nn.initializers.zeros, (8, 16))
        return nn.Dense(4)(x)


def plan():
    return plan_sharding(fsdp(nn.Dense)(32), {"dp": 2, "fsdp": 4}, BATCH["x"], tx=optax.adamw(1e-2))


def edited(old, new):
    def call():
        text = plan().to_json()
        assert old in text, f"{old!r} is not in the plan {text}"
        ShardingPlan.from_json(text.replace(old, new, 1))

    return call


# ----- loops


def guarded(*steps, **options):
    """Returns a call of a loop whose steps return these metrics."""

    def call():
        with LoopGuard(**options) as guard:
            for number, metrics in enumerate(steps, 1):
                guard.step_done(number, metrics)

    return call


def counted(in_a_row, in_all=7):
    return {"loss": 1.0, "skipped_in_a_row": jnp.int32(in_a_row), "skipped_steps": jnp.int32(in_all)}


def donated_loss():
    loss = jnp.float32(1)
    with LoopGuard() as guard:
        guard.step_done(7, {"loss": loss})
        jax.jit(lambda x: x + 1, donate_argnums=0)(loss)
        guard.step_done(8, {"loss": 1.0})


def paused():
    with LoopGuard(step_timeout_s=None) as guard, guard.paused(-1):
        pass


def entered_twice():
    guard = LoopGuard(step_timeout_s=None)
    for _ in range(2):
        with guard:
            pass


def in_a_thread():
    """Enters a guard outside of the main thread, and raises its error in this thread."""
    found = []

    def run():
        try:
            with LoopGuard(step_timeout_s=None):
                pass
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise found[0]


def copies_that_differ():
    own = on_mesh(lambda x: {"mean": x.mean(), "sum": jax.lax.psum(x.sum(), AXES)}, MESH, False, P(AXES), P())
    check_replicas(own(jnp.arange(8.0)))


def losses_that_differ():
    local_loss = on_mesh(lambda x: x.mean(), MESH, False, P(AXES), P())
    with LoopGuard() as guard:
        guard.step_done(1, {"loss": local_loss(jnp.arange(8.0))})


def gone():
    state = create_train_state(fsdp(nn.Dense)(4), SGD, MESH, KEY, BATCH["x"], batch_axes=AXES)
    jax.tree.map(lambda x: x.delete(), state.params)
    check_replicas(state.params)


ROWS = [
    *[
        models(
            f"{caller.__name__.replace('_', '-')}-{name}",
            lambda caller=caller, bad=bad: caller(tx=bad),
            TypeError,
            "…: tx is …, and no optimizer",
            says,
        )
        for caller in (elementwise_only, skip_nonfinite)
        for name, (bad, says) in NO_TRANSFORMS.items()
    ],
    # ----- shards
    *[
        optimizers(
            f"on-shards-{name}",
            lambda tx=tx: elementwise_only(tx).init({"kernel": Sharded(np.ones((8, 16), np.float32), (None, "fsdp"))}),
            ValueError,
            "elementwise_only: … is wrong on shards",
            says,
            "make_train_step",
        )
        for name, (tx, says) in WRONG.items()
    ],
    *[
        losses(
            f"not-averaged-{name}-{axes or 'any'}",
            not_averaged(tx, axes),
            ValueError,
            "…: '…' of shape … differs between devices",
            f"{who}: 'w' of shape (8,) differs between devices along {along}, but",
            "Call sync_gradients once",
            "over all axes that the batch is split over",
        )
        for name, tx, who in [
            ("elementwise", elementwise_only(optax.adam(1e-3)), "elementwise_only"),
            ("skip", skip_nonfinite(optax.adam(1e-3)), "skip_nonfinite"),
            ("clip", clip_by_global_norm(1.0), "global_norm"),
        ]
        for axes, along in [(None, "'dp', 'fsdp'"), ("fsdp", "'dp'")]
    ],
    losses(
        "norm-not-averaged",
        lambda: shaped(global_norm, {"layer": {"whole": jnp.ones((8, 8))}}, in_specs=P("dp")),
        ValueError,
        "…: '…' of shape … differs between devices",
        "'layer/whole' of shape (4, 8) differs between devices along 'dp'",
        "sync_gradients",
    ),
    *[
        names(
            f"{name}-of-another-axis",
            lambda fn=fn: shaped(
                lambda x: fn({"layer": {"kernel": Sharded(x, ("tp", "fsdp"))}}),
                jnp.ones((8, 8)),
                in_specs=P(None, "fsdp"),
                check_vma=False,
            ),
            ValueError,
            "…: … is not a bound mesh axis",
            "'layer/kernel'",
            "'tp' is not a bound mesh axis; the axes bound here are ('dp', 'fsdp')",
        )
        for name, fn in [("norm", global_norm), ("clip", lambda tree: clip_by_global_norm(1.0).update(tree, None)[0])]
    ],
    *[
        optimizers(
            f"clip-{name}",
            lambda bad=bad: clip_by_global_norm(bad),
            ValueError,
            "clip_by_global_norm: max_norm=…",
            "it must be more than 0. ",
            "float('inf')",
        )
        for name, bad in [
            ("negative", -1.0),
            ("zero", 0),
            ("nan", float("nan")),
            ("numpy", np.float32(-1)),
            ("jax", jnp.float32(-1)),
        ]
    ],
    *[
        optimizers(
            f"clip-{name}",
            lambda bad=bad: clip_by_global_norm(bad),
            TypeError,
            "clip_by_global_norm: max_norm is",
            "where one number is needed",
        )
        for name, bad in [("none", None), ("string", "1"), ("dict", {"w": 1.0}), ("array", jnp.ones(2))]
    ],
    # ----- averages, others
    optimizers(
        "decay-one",
        lambda: with_ema(SGD, 1),
        ValueError,
        "with_ema: decay",
        "decay=1; it must be at least 0 and less than 1",
    ),
    optimizers(
        "decay-string", lambda: with_ema(SGD, "0.999"), TypeError, "with_ema: decay", "decay is '0.999'; pass a number"
    ),
    optimizers(
        "average-without-parameters",
        lambda: AVERAGED.update(W, AVERAGED.init(W)),
        ValueError,
        "with_ema: update needs",
        "the parameters",
    ),
    optimizers(
        "leaf-norms-without-parameters",
        lambda: with_leaf_norms(SGD).update(W, with_leaf_norms(SGD).init(W)),
        ValueError,
        "with_leaf_norms: update needs",
        "the parameters",
    ),
    optimizers(
        "leaf-norms-every",
        lambda: with_leaf_norms(SGD, every=0),
        ValueError,
        "with_leaf_norms: every=…",
        "every=0; pass the number of updates between norms",
    ),
    optimizers(
        "leaf-norms-none",
        lambda: leaf_norms(SGD.init(W), W),
        ValueError,
        "leaf_norms: the optimizer's state holds",
        "holds norms of 0 optimizers",
    ),
    optimizers(
        "leaf-norms-of-others",
        lambda: leaf_norms(with_leaf_norms(SGD).init(W), {"w": jnp.ones(4), "b": jnp.ones(4)}),
        ValueError,
        "leaf_norms: the optimizer's state holds",
        "holds norms of 1 leaves, and the parameters have 2",
    ),
    optimizers(
        "average-none",
        lambda: ema_params(SGD.init(W), W),
        ValueError,
        "ema_params: the optimizer's state holds",
        "holds 0 averages of weights",
    ),
    optimizers(
        "average-twice",
        lambda: ema_params(optax.chain(AVERAGED, AVERAGED).init(W), W),
        ValueError,
        "ema_params: the optimizer's state holds",
        "holds 2 averages",
    ),
    optimizers(
        "average-of-others",
        lambda: ema_params(AVERAGED.init(W), {"w": jnp.ones(4)}),
        ValueError,
        "…: what the optimizer keeps of",
        "keeps of 'w' has the shape (3,), and the parameter (4,)",
    ),
    optimizers(
        "slow-none", lambda: with_slow_params(SGD), ValueError, "with_slow_params: tx is", "neither optax.lookahead nor"
    ),
    optimizers(
        "slow-not-there",
        lambda: slow_params(SGD.init(W), W),
        ValueError,
        "slow_params: the optimizer's state holds",
        "holds slow weights 0 times",
    ),
    optimizers(
        "slow-without-parameters",
        lambda: with_slow_params(optax.lookahead(SGD, 2, 0.5)).update(W, None),
        ValueError,
        "with_slow_params: update needs",
        "the parameters",
    ),
    optimizers(
        "skip-twice",
        lambda: skip_counts(optax.chain(skip_nonfinite(SGD), skip_nonfinite(SGD)).init(W)),
        ValueError,
        "skip_nonfinite stands in this optimizer",
        "2 times",
    ),
    optimizers("skip-around-monitor", monitored, ValueError, "skip_nonfinite: the optimizer's state has"),
    # ----- extra arguments
    optimizers(
        "value-beside-skip",
        updated(optax.chain(scale(), skip_nonfinite(optax.sgd(1.0)))),
        ValueError,
        "a transform beside skip_nonfinite takes no value=",
        "would not see the loss. Put it around",
    ),
    optimizers(
        "value-needed-and-refused",
        updated(optax.chain(scale(), needs_value())),
        TypeError,
        "…, a part of the optimizer, needs",
        "needs value=, and another part takes no argument of that name",
    ),
    optimizers(
        "value-not-handed-on",
        updated(optax.chain(halved(), optax.sgd(1.0))),
        TypeError,
        "…, a part of the optimizer, needs",
        "needs value=, and optax hands it no extra",
    ),
    *[
        optimizers(f"refused-{name}", lambda build=build: abstract(build()), ValueError, "…: optax's … …", says)
        for name, (build, says) in IN_STEP.items()
    ],
    optimizers(
        "refused-loss",
        lambda: abstract(optax.chain(own())),
        ValueError,
        "…: the update of … needs",
        "needs loss=, and a training step has value=",
    ),
    optimizers(
        "refused-lookahead",
        lambda: abstract(optax.MultiSteps(optax.lookahead(SGD, 2, 0.5), 2)),
        ValueError,
        "…: optax.lookahead stands in",
        "lookahead stands in MultiSteps",
    ),
    optimizers("refused-dpsgd-of-flax", flax_state(private()), ValueError, "…: optax's … …", "the step: optax's diff"),
    optimizers(
        "refused-lookahead-of-flax",
        flax_state(optax.lookahead(optax.sgd(1.0), 2, 0.5)),
        ValueError,
        "the step: state.tx is optax.lookahead",
    ),
    # ----- matrices
    optimizers(
        "matrix-unsettled",
        lambda: choose_matrices(UNSETTLED),
        ValueError,
        "… of shape … has … dims and no bias",
        "'blocks/up/kernel' of shape (3, 8, 32) has 3 dims and no bias",
        "matrix_dimensions({",
    ),
    optimizers(
        "matrix-no-leaf",
        lambda: choose_matrices(UNSETTLED, {"head/*": None}),
        ValueError,
        "matrix_dimensions: … fits none",
        "'head/*' fits none of the 1 leaves, as 'blocks/up/kernel'",
    ),
    optimizers(
        "matrix-no-dim",
        lambda: choose_matrices(UNSETTLED, {"*": MuonDimensionNumbers(1, 3)}),
        ValueError,
        "… of shape … is labelled as a matrix",
        "'blocks/up/kernel' of shape (3, 8, 32) is labelled as a matrix with",
    ),
    optimizers(
        "matrix-dim-twice",
        lambda: choose_matrices(UNSETTLED, {"*": MuonDimensionNumbers(1, 1)}),
        ValueError,
        "… of shape … is labelled as a matrix",
        "inputs along (1,) and outputs along (1,)",
        "none twice",
    ),
    optimizers(
        "matrix-of-a-bias",
        lambda: muon(0.1, muon_weight_dimension_numbers={"bias": MuonDimensionNumbers()}).init({"bias": jnp.ones(8)}),
        ValueError,
        "… of shape … is labelled as a matrix",
        "'bias' of shape (8,) is labelled as a matrix",
    ),
    optimizers(
        "matrix-as-a-tuple",
        lambda: choose_matrices({"bias": (8,)}, {"bias": (0, 1)}),
        TypeError,
        "…: pass optax.contrib",
        "'bias': pass optax.contrib.MuonDimensionNumbers",
    ),
    optimizers(
        "matrix-uneven-owners",
        uneven_owners,
        ValueError,
        "on_unsharded_matrices: … has",
        "'w' has 3 matrices on each of 2 parts",
        "the 4 devices",
    ),
    optimizers(
        "muon-preconditioning",
        lambda: muon(0.1, preconditioning="qr"),
        ValueError,
        "muon: preconditioning=…",
        "preconditioning='qr'; there are frobenius, spectral",
    ),
    optimizers(
        "muon-preset",
        lambda: muon(0.1, ns_coeffs="fast"),
        ValueError,
        "muon: there is no preset",
        "no preset ns_coeffs='fast'; there are standard, dion",
    ),
    optimizers(
        "muon-two-numbers",
        lambda: muon(0.1, ns_coeffs=(1.0, 2.0)),
        ValueError,
        "muon: ns_coeffs",
        "of shape (2,); pass three",
    ),
    optimizers(
        "muon-few-steps",
        lambda: muon(0.1, ns_coeffs="dion", ns_steps=3),
        ValueError,
        "muon: ns_coeffs",
        "for 5 steps, more than ns_steps=3",
    ),
    dtypes(
        "muon-exchange",
        lambda: muon(0.1, exchange_dtype="int8"),
        ValueError,
        "…=…: parameters and gradients are floats",
        "exchange_dtype=int8",
    )._replace(words="…=…: … travels in blocks"),
    optimizers(
        "muon-traced-steps",
        lambda: optax.inject_hyperparams(muon)(0.1).init({"w": jnp.ones((8, 8))}),
        TypeError,
        "muon: ns_steps=…",
        "is no Python number",
    ),
    wrapping(
        "offload-params",
        lambda: Offload(params=True),
        ValueError,
        "Offload(params=True)",
        "parameters stay on the device",
        "BLOCK_INPUT",
    ),
    wrapping(
        "offload-one-name",
        lambda: remat_policy(offload="block_input"),
        TypeError,
        "offload=… is one string",
        "offload='block_input' is one string; pass the names in a list",
    ),
    *[
        wrapping(
            f"remat-base-{name}",
            lambda bad=bad: remat_policy(bad),
            ValueError,
            "base=… is none of",
            "is none of 'everything', 'dots', 'nothing', nor a policy; pass one of them",
        )
        for name, bad in [("misspelt", "dot"), ("number", 3), ("list", ["dots"])]
    ],
    # ----- plans
    plans(
        "plan-path",
        lambda: plan().explain("kernal"),
        ValueError,
        "… is none of the plan's",
        "'kernal' is none of",
        "'kernel'",
    ),
    plans(
        "plan-format",
        edited('"format": 3', '"format": 7'),
        ValueError,
        "a plan of format",
        "a plan of format 7; this release reads format 3. Write it again",
    ),
    plans(
        "plan-list",
        lambda: ShardingPlan.from_json("[]"),
        ValueError,
        "a plan of format",
        "format None; this release reads format 3",
    ),
    plans(
        "plan-edited", edited('"parameters": [', '"parameters": [1'), ValueError, "the plan's totals", "it was edited"
    ),
    plans(
        "plan-replicated",
        lambda: plan_sharding(Model(), {"fsdp": 8}, BATCH["x"]).check(),
        ValueError,
        "… of the parameters' bytes",
        "are replicated on each of 8 devices; max_replicated_fraction=0.02 allows 2%",
    ),
    plans(
        "plan-large",
        lambda: plan().check(max_replicated_fraction=1, max_bytes_per_device=100),
        ValueError,
        "each of … devices keeps",
        "max_bytes_per_device=100 allows 100 B",
        "Split over more devices",
    ),
    *[
        plans(
            f"plan-fraction-{name}",
            lambda bad=bad: plan().check(max_replicated_fraction=bad),
            ValueError,
            "max_replicated_fraction=…",
            "is no fraction from 0 to 1; pass 0.02",
        )
        for name, bad in [("nan", float("nan")), ("negative", -0.1), ("two", 2)]
    ],
    plans(
        "plan-bytes-nan",
        lambda: plan().check(max_bytes_per_device=float("nan")),
        ValueError,
        "max_bytes_per_device=…",
        "max_bytes_per_device=nan is no positive number of bytes; pass 14",
    ),
    *[
        wrapping(
            f"plan-option-{name.replace('_', '-')}",
            lambda name=name, value=value: plan_sharding(Model(fsdp), {"fsdp": 4}, BATCH["x"], **{name: value}),
            ValueError,
            "…=… is for models without wrappers",
            f"{name}=",
            f"Leave {name} out",
        )
        for name, value in [("axis_name", "fsdp"), ("min_weight_size", 2**18)]
    ],
    plans(
        "plan-size-zero",
        lambda: plan_sharding(Model(fsdp), {"fsdp": 0}, BATCH["x"]),
        ValueError,
        "axis_sizes has",
        "axis_sizes has 'fsdp': 0, which is no number of devices",
    ),
    plans(
        "plan-size-wild",
        lambda: plan_sharding(Model(fsdp), {"fsdp": -1}, BATCH["x"]),
        ValueError,
        "axis_sizes has",
        "'fsdp': -1",
    ),
    names(
        "plan-no-axis", lambda: plan_sharding(Model(fsdp), {}, BATCH["x"]), ValueError, "axis_name=… names no mesh axis"
    ),
    plans(
        "plan-number",
        lambda: plan_sharding(Model(fsdp), 8, BATCH["x"]),
        TypeError,
        "axis_sizes=…",
        "axis_sizes=8 is no mapping; pass the sizes by axis",
    ),
    names(
        "plan-other-axis",
        lambda: plan_sharding(Model(fsdp), {"dp": 8}, BATCH["x"]),
        ValueError,
        "shard_module_params: … is not an axis of",
        "'fsdp' is not an axis of axis_sizes, which has ('dp',)",
    ),
    plans(
        "plan-axis-name",
        lambda: plan_sharding(Model(), {"fsdp": 4}, BATCH["x"], axis_name="tp"),
        ValueError,
        "axis_name=…: there is no axis",
        "axis_name='tp': there is no axis 'tp' in axis_sizes=",
        "'fsdp': 4",
    ),
    plans(
        "plan-inputs",
        lambda: plan_sharding(Positions(), {"fsdp": 4}, jnp.ones((4, 9), int)),
        ValueError,
        "….init fails on the inputs of the plan",
        "Positions.init fails on the inputs of the plan",
    )._replace(exception=ValueError),
    plans(
        "workload-inputs",
        lambda: Workload(Positions(), SGD, jnp.ones((4, 9), int), mean_loss).build_step({"fsdp": 4}),
        ValueError,
        "….init fails on …, …",
        "Workload(..., inputs=(",
    ),
    names(
        "plan-librarys-own",
        lambda: plan_sharding(shard_modules(Positions(), nn.Dense, "nope", 8), {"fsdp": 4}, jnp.ones((4, 8), int)),
        ValueError,
        "shard_module_params: … is not an axis of",
        "'nope' is not an axis of axis_sizes",
    ),
    # ----- loops
    loops(
        "guard-timeout-zero",
        lambda: LoopGuard(step_timeout_s=0),
        ValueError,
        "…=…: a number of seconds",
        "step_timeout_s=0",
    ),
    loops(
        "guard-timeout-nan",
        lambda: LoopGuard(first_step_timeout_s=float("nan")),
        ValueError,
        "…=…: a number of seconds",
        "first_step_timeout_s=nan",
    ),
    loops(
        "guard-timeout-long",
        lambda: LoopGuard(step_timeout_s=1e10),
        ValueError,
        "…=… s is longer",
        "step_timeout_s=1e+10 s is longer than the 9.22",
        "e+09 s that a timer can take",
    ),
    loops(
        "guard-skipped-negative",
        lambda: LoopGuard(max_skipped_in_a_row=-1),
        ValueError,
        "max_skipped_in_a_row=…",
        "max_skipped_in_a_row=-1",
    ),
    loops(
        "guard-outside",
        lambda: LoopGuard(step_timeout_s=None).step_done(1),
        ValueError,
        "… of a LoopGuard outside",
        "step_done of a LoopGuard outside of its block",
    ),
    loops("guard-twice", entered_twice, ValueError, "this LoopGuard is in use", "make one for each loop"),
    loops("guard-paused", paused, ValueError, "…=…: a number of seconds", "timeout_s=-1"),
    loops("guard-in-a-thread", in_a_thread, ValueError, "LoopGuard was entered outside", "main thread"),
    loops(
        "guard-without-loss",
        guarded({"Loss": 1.0}),
        ValueError,
        "step_done: the metrics have no",
        "no 'loss', their names are ['Loss']",
    ),
    loops("guard-donated-loss", donated_loss, ValueError, "the loss of step … was donated", "the loss of step 7"),
    *[
        loops(
            f"guard-loss-{name}",
            guarded({"loss": 1.0}, {"loss": bad, "accuracy": np.nan}, {"loss": 1.0}),
            NonFiniteError,
            "the loss of step … is",
            "loss of step 2 is ",
            "and its update was applied",
        )
        for name, bad in [("nan", np.nan), ("inf", np.inf), ("of-jax", jnp.float32(jnp.nan))]
    ],
    loops(
        "guard-skipped",
        guarded(counted(1), counted(2), counted(3), counted(0), max_skipped_in_a_row=2),
        NonFiniteError,
        "step …: the loss or a gradient was not finite",
        "step 3: ",
        "in 3 steps in a row (7 in all), ",
        "=2; ",
        "of step 0.",
    ),
    loops(
        "guard-skipped-last",
        guarded(counted(1, 1), max_skipped_in_a_row=0),
        NonFiniteError,
        "step …: the loss or a gradient was not finite",
        "step 1: ",
        "in 1 steps in a row",
    ),
    loops(
        "replicas-differ",
        copies_that_differ,
        ReplicaError,
        "… of … leaves are declared equal",
        "1 of 2 leaves",
        "'mean', float32[]",
        "8 different values in all",
    ),
    loops(
        "losses-differ",
        losses_that_differ,
        ReplicaError,
        "… of … leaves are declared equal",
        "1 of 1 leaves",
        "'the loss of step 1', float32[]",
        "8 different values in all",
    ),
    Section("Checkpoints")(
        "replicas-gone", gone, ValueError, "…: '…' of shape … is gone", "check_replicas: 'bias' of shape (4,) is gone"
    ),
    loops(
        "replayed-function",
        lambda: replayed(jax.jit(lambda state, batch, rng: (state, {}))),
        TypeError,
        "replayed takes a step of make_train_step",
        "Pass what make_train_step returned",
    ),
    loops(
        "replayed-never",
        lambda: replayed(make_train_step(mean_loss, MESH, AXES), every=0),
        ValueError,
        "every=…: a replay in every",
        "every=0",
        "1 or more",
    ),
    loops(
        "replayed-abstract",
        lambda: replayed(make_train_step(mean_loss, MESH.abstract_mesh, AXES)),
        ValueError,
        "replayed: the mesh of the step is abstract",
        "moves work between devices",
    ),
]
