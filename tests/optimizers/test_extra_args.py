"""Tests that each optax transform is exact in a step or named in an error, and gets its extra arguments."""

import inspect
import re
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from optax import contrib

import tests.optimizer_cases as cases
from tests.optimizer_cases import CASES
from tests.support import AXES, Model, assert_same_params, data, fsdp, mean_loss, mesh_of, plain
from xlstm_jax.distributed import (
    TrainState,
    abstract_train_state,
    create_train_state,
    elementwise_only,
    ema_params,
    make_train_step,
    skip_counts,
    skip_nonfinite,
    with_ema,
)
from xlstm_jax.distributed.optimizers import slow_params, with_slow_params
from xlstm_jax.distributed.optimizers.transforms import REFUSED, STEP_EXTRA_ARGS, name_of, parts, taking_extra_args
from xlstm_jax.distributed.training.at_params import gradients_at

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"  # missing in the copy for mutations
STEPS = 4


def own(*names, required=(), everything=False):
    """Returns a user's transform that scales by 2 and records the names of its extra arguments."""
    seen = []
    kinds = inspect.Parameter

    def update(updates, state, params=None, **given):
        del params
        if not everything and (stray := given.keys() - {*names, *required}):
            raise TypeError(f"update() got an unexpected keyword argument '{sorted(stray)[0]}'")
        if missing := [name for name in required if name not in given]:
            raise TypeError(f"update() missing 1 required keyword-only argument: '{missing[0]}'")
        seen.append(sorted(given))
        return jax.tree.map(lambda u: 2 * u, updates), state

    usual = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("updates", "state")]
    usual.append(kinds("params", kinds.POSITIONAL_OR_KEYWORD, default=None))
    named = [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in names]
    named += [kinds(name, kinds.KEYWORD_ONLY) for name in required]
    rest = [kinds("extra_args", kinds.VAR_KEYWORD)] if everything else []
    update.__signature__ = inspect.Signature([*usual, *named, *rest])
    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update), seen


# -------------------------------------------------------------------------------------------- arguments of a transform

AROUND = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(9.0), tx, optax.scale(1.0)),
    "named_chain": lambda tx: optax.named_chain(("own", tx), ("scale", optax.scale(1.0))),
    "masked": lambda tx: optax.masked(tx, lambda params: jax.tree.map(lambda _: True, params)),
    "partition": lambda tx: optax.partition({"a": tx}, lambda params: jax.tree.map(lambda _: "a", params)),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1),
    "MultiSteps-transform": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    "inject": lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(rate=1.0),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "flatten": optax.flatten,
    "conditionally": lambda tx: optax.conditionally_transform(tx, lambda step: step >= 0),
    "mechanize": contrib.mechanize,
    "schedule_free": lambda tx: contrib.schedule_free(tx, 0.1),
    "with_ema": lambda tx: with_ema(tx, 0.9),
    "skip_nonfinite": skip_nonfinite,
    "elementwise_only": elementwise_only,
    "all of ours": lambda tx: skip_nonfinite(with_ema(optax.chain(tx), 0.9)),
}
GIVEN = {"value": jnp.float32(1), "grad": jnp.ones(3), "value_fn": jnp.sum, "grad_fn": lambda params, index: params}


@pytest.mark.parametrize("around", AROUND)
def test_taking_extra_args_passes_only_arguments_in_the_signature(around):
    inner, seen = own("grad", "scale")
    tx, params = taking_extra_args(AROUND[around](inner)), jnp.ones(3)
    tx.update(jnp.ones(3), tx.init(params), params, **GIVEN)
    assert seen
    assert not [given for given in seen if given != ["grad"]]


@pytest.mark.parametrize("around", ["alone", "chain", "MultiSteps", "all of ours"])
def test_taking_extra_args_passes_all_arguments_to_a_transform_with_var_keywords(around):
    inner, seen = own(everything=True)
    tx, params = taking_extra_args(AROUND[around](inner)), jnp.ones(3)
    tx.update(jnp.ones(3), tx.init(params), params, **GIVEN)
    assert seen[-1] == sorted(GIVEN)


def test_type_error_inside_a_transform_propagates_unchanged():
    def update(updates, state, params=None, **extra_args):
        return max(value=updates), state

    tx = taking_extra_args(optax.GradientTransformationExtraArgs(optax.init_empty_state, update))
    with pytest.raises(TypeError, match=r"^max|keyword"):
        tx.update(1.0, (), value=1.0)


def test_skip_nonfinite_sees_the_loss_around_a_transform_without_value_argument():
    tx, params = taking_extra_args(skip_nonfinite(own("scale")[0])), jnp.ones(3)
    _, state = tx.update(jnp.ones(3), tx.init(params), params, **GIVEN | {"value": jnp.nan})
    assert int(skip_counts(state)["skipped_steps"]) == 1
    beside = taking_extra_args(optax.chain(own("scale")[0], skip_nonfinite(optax.sgd(1.0))))
    with pytest.raises(ValueError, match=r"skip_nonfinite would not see the loss\. Put it around"):
        beside.update(jnp.ones(3), beside.init(params), params, **GIVEN)


def test_update_raises_for_an_argument_needed_and_refused_by_two_transforms():
    tx, params = taking_extra_args(optax.chain(own("scale")[0], own(required=["value"])[0])), jnp.ones(3)
    with pytest.raises(TypeError, match=r"needs value=, and another part takes no argument of that name"):
        tx.update(jnp.ones(3), tx.init(params), params, **GIVEN)


def test_update_raises_for_a_plain_gradient_transformation_with_a_required_argument():
    """A ``GradientTransformation`` gets no extra arguments from optax, and the error names the transform."""

    def halved(updates, state, params=None, *, value):
        return jax.tree.map(lambda u: value * u, updates), state

    tx = taking_extra_args(optax.chain(optax.GradientTransformation(optax.init_empty_state, halved), optax.sgd(1.0)))
    with pytest.raises(TypeError, match=r", a part of the optimizer, needs value=, and optax hands it no extra"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones(3), **GIVEN)


def test_gradients_for_sam_are_those_at_its_parameters_whatever_the_call():
    square = lambda params: (params["w"] ** 2, {"w": 2 * params["w"]})  # noqa: E731
    assert [gradients_at(square, {"w": w}, index) for w, index in ((3.0, 0), (3.0, 1), (5.0, 1))] == [
        {"w": 6.0},
        {"w": 6.0},
        {"w": 10.0},
    ]


# -------------------------------------------------------------------------------------------------------------- errors


def abstract(tx):
    return abstract_train_state(Model(fsdp()), tx, mesh_of(2, 4), jax.random.key(0), data()["x"], batch_axes=AXES)


def private():
    # Built like contrib.dpsgd, which warns about an argument.
    return optax.chain(contrib.differentially_private_aggregate(1.0, 1.0, jax.random.key(0)), optax.scale(-0.1))


IN_STEP = {
    "dpsgd": (private, "create_train_state: optax's differentially_private_aggregate takes a gradient for every"),
    "in-multi-steps": (lambda: optax.MultiSteps(private(), 2), "differentially_private_aggregate takes a gradient for"),
    "in-ours": (lambda: skip_nonfinite(with_ema(private(), 0.9)), "differentially_private_aggregate takes a gradient"),
    "in-a-partition": (lambda: optax.partition({"a": private()}, "a"), "differentially_private_aggregate takes"),
    "sophia": (
        lambda: contrib.sophia(0.1),
        r"hutchinson_estimator_diag_hessian differentiates the loss \(obj_fn\) twice",
    ),
    "injected": (lambda: optax.inject_hyperparams(contrib.sophia)(0.1), "hutchinson_estimator_diag_hessian differ"),
    "loss": (
        lambda: optax.chain(own(required=["loss"])[0]),
        "update of own needs loss=, and a training step has value=",
    ),
    "lookahead": (
        lambda: optax.MultiSteps(optax.lookahead(optax.sgd(0.1), 2, 0.5), 2),
        "lookahead stands in MultiSteps",
    ),
}


@pytest.mark.parametrize("name", IN_STEP)
def test_train_state_raises_for_an_unsupported_transform_before_tracing_the_model(name):
    build, rule = IN_STEP[name]

    def fail(*args, **kwargs):
        raise AssertionError("traced")

    with pytest.raises(ValueError, match=rule), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "__call__", fail)
        abstract(build())


def test_sophia_with_a_hessian_diagonal_fn_of_gradients_is_accepted():
    diagonal = optax.stateless(lambda grads, params: jax.tree.map(jnp.square, grads))
    abstract(contrib.sophia(0.1, hessian_diagonal_fn=diagonal))


# ------------------------------------------------------------------------------------------- the list of optax's names

# Aliases of functions in the cases, and functions that only combine others.
OTHER_NAMES = {
    "multi_transform": "partition",
    "inject_stateful_hyperparams": "inject_hyperparams",
    "with_extra_args_support": "chain",
    "identity": "chain",
    "optimistic_adam": "optimistic_adam_v2",  # optax deprecates the name
    "dpsgd": "differentially_private_aggregate",
    "sophia": "hutchinson_estimator_diag_hessian",
}


def makers(module):
    """Yields the names of functions of ``module`` that make a transform."""
    for name, value in vars(module).items():
        fn = getattr(value, "func", value)
        if inspect.isfunction(fn) and not name.startswith("_") and fn.__module__.startswith("optax"):
            returned = str(inspect.signature(fn).return_annotation)
            text = inspect.getsource(fn)
            unsaid = "_empty" in returned and re.search(r"return \S*(GradientTransformation\w*|chain)\(", text)
            if "GradientTransformation" in returned or unsaid:
                yield name


@cache
def in_cases():
    """Returns the optax names in the source of the cases, and the names of the transforms inside."""
    written = set(re.findall(r"(?:optax|contrib)\.(\w+)", inspect.getsource(cases)))
    return written | {part.name for case in CASES for part in parts(case.build())}


def test_each_optax_transform_has_a_case_or_a_listed_refusal():
    names = [*makers(optax), *makers(contrib)]
    assert {"adamw", "dog", "monitor", "scale_by_factored_rms", "sam", "hutchinson_estimator_diag_hessian"} <= {*names}
    known = in_cases() | REFUSED.keys() | {"lookahead", "sam", "monitor", "snapshot", "measure_with_ema"}  # below
    assert not [name for name in names if name not in known and OTHER_NAMES.get(name) not in known]


def test_optimizers_page_lists_refused_transforms_and_arguments_of_a_step():
    page = PAGE.read_text()
    refused = page.partition("## Refused")[2].partition("\n## ")[0]
    assert not [name for name in REFUSED if f"`{name}`" not in refused and f"`contrib.{name}`" not in refused]
    assert not [name for name in STEP_EXTRA_ARGS if f"`{name}`" not in page]


# -------------------------------------------------------------------------------------- lookahead, and its slow weights


DATA = data(features=7)


def two_layers(wrap=plain):
    """A padded kernel and a padded bias, a split kernel, and a replicated bias of 4."""
    return nn.Sequential([wrap(nn.Dense)(6), nn.tanh, wrap(nn.Dense)(4)])


def looking_ahead():
    return optax.lookahead(optax.adam(0.02), sync_period=3, slow_step_size=0.5)


@cache
def trained(build, **options):
    """Returns the state after four steps on the mesh, and the parameters after each step."""
    mesh = mesh_of(2, 4)
    state = create_train_state(
        two_layers(fsdp(uneven="pad", min_weight_size=6)), build(), mesh, jax.random.key(0), DATA["x"], batch_axes=AXES
    )
    step = make_train_step(mean_loss, mesh, AXES, **options)
    for _ in range(STEPS):
        state, _ = step(state, DATA, jax.random.key(1))
    return state


@cache
def one_device():
    """Returns the initial parameters, and the gradient of the loss as a function of parameters."""
    model = two_layers()
    params = jax.jit(model.init)(jax.random.key(0), DATA["x"])["params"]
    return params, jax.jit(jax.grad(lambda params: mean_loss(params, model.apply, DATA)))


def measured():
    measures = {"norm": optax.tree.norm, "mean": optax.measure_with_ema(optax.tree.norm, 0.9)}
    return optax.chain(optax.snapshot("first", optax.tree.norm), optax.monitor(measures), optax.sgd(0.1))


def test_monitor_measures_match_a_single_device():
    """Measures of a monitor equal one device; optax adds measures in the first update, so a step compiles twice."""
    state, (params, grad) = trained(measured), one_device()
    tx = measured()
    opt_state = tx.init(params)
    for _ in range(STEPS):
        updates, opt_state = tx.update(grad(params), opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_same_params(state.params, params)
    got, want = jax.tree.leaves(state.opt_state), jax.tree.leaves(opt_state)
    assert len(want) == 5  # two measures, the snapshot's measure, the mean's, and its count
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_lookahead_matches_a_single_device_and_shards_slow_weights_like_parameters():
    state = trained(looking_ahead)
    params, grad = one_device()
    pair, tx = optax.LookaheadParams.init_synced(params), looking_ahead()
    opt_state, update = tx.init(pair), jax.jit(tx.update)
    for _ in range(STEPS):
        updates, opt_state = update(grad(pair.fast), opt_state, pair)
        pair = optax.apply_updates(pair, updates)
    slow = slow_params(state.opt_state, state.params)
    assert_same_params(state.params, pair.fast)
    assert_same_params(slow, pair.slow)
    moved = [np.abs(f - s).max() for f, s in zip(*map(jax.tree.leaves, pair), strict=True)]
    assert max(moved) > 1e-3  # guard: after the third step the fast weights leave the slow weights
    box, kernel = slow["layers_0"]["kernel"], state.params["layers_0"]["kernel"]
    assert (box.names, box.value.shape, box.value.sharding) == (kernel.names, kernel.value.shape, kernel.value.sharding)
    assert box.value.shape != (7, 6)  # guard: the leaf is padded


def test_lookahead_slow_weights_keep_the_parameter_dtype_with_wider_updates():
    params, grads = jnp.ones(4, jnp.bfloat16), jnp.full(4, 0.5, jnp.float32)
    tx = with_slow_params(optax.lookahead(optax.sgd(1.0), sync_period=1, slow_step_size=0.5))
    _, state = tx.update(grads, tx.init(params), params)
    assert state.slow.dtype == jnp.bfloat16 and state.slow.tolist() == [0.75] * 4  # halfway from 1 to 1 - 0.5


def test_lookahead_works_inside_library_wrappers_and_in_manually_created_states():
    params = {"kernel": jnp.ones(4)}
    for tx in (optax.chain(optax.clip(1.0), looking_ahead()), skip_nonfinite(with_ema(looking_ahead(), 0.5))):
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        state = state.apply_gradients(grads=params)
        assert slow_params(state.opt_state, params)["kernel"].shape == (4,)
    assert float(ema_params(state.opt_state, params)["kernel"][0]) == pytest.approx(1 - 0.01)
    pairs = optax.LookaheadParams.init_synced(params)
    state = TrainState.create(apply_fn=None, params=pairs, tx=looking_ahead()).apply_gradients(grads=params)
    assert float(state.params.fast["kernel"][0]) == pytest.approx(0.98)
    named = name_of(optax.MultiSteps(with_slow_params(looking_ahead()), 2))
    assert named == "MultiSteps(with_slow_params(lookahead))"
    abstract(optax.MultiSteps(with_slow_params(looking_ahead()), 2))


# -------------------------------------------------------------------------------------------------------------- SAM


def sam(opaque):
    return contrib.sam(
        optax.adam(0.02), optax.chain(contrib.normalize(), optax.sgd(0.3)), sync_period=2, opaque_mode=opaque
    )


@pytest.mark.parametrize("opaque", [False, True], ids=["transparent", "opaque"])
def test_sam_on_shards_matches_a_single_device(opaque):
    # Minibatches: the gradients at the adversarial parameters are of the batch, too.
    state = trained(partial(sam, opaque), num_minibatches=2)
    params, grad = one_device()
    tx = sam(opaque)
    more = {"grad_fn": lambda params, index: grad(params)} if opaque else {}
    opt_state, update, start = tx.init(params), jax.jit(partial(tx.update, **more)), params
    for _ in range(STEPS):
        updates, opt_state = update(grad(params), opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_same_params(state.params, params)
    # guard: parameters differ without adversarial steps
    adam = optax.adam(0.02)
    without, adam_state, update = start, adam.init(start), jax.jit(adam.update)
    for _ in range(STEPS if opaque else STEPS // 2):
        updates, adam_state = update(grad(without), adam_state, without)
        without = optax.apply_updates(without, updates)
    assert max(np.abs(p - q).max() for p, q in zip(*map(jax.tree.leaves, (without, params)), strict=True)) > 1e-3
