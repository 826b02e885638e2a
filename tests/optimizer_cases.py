"""Table of the optax optimizers and wrappers that the tests apply to sharded parameters.

``lookahead`` (parameters in pairs), ``sam`` (a ``grad_fn`` argument) and rejected optimizers are in
``test_extra_args.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from tests.support import FLOAT32_ROUNDING
from xlstm_jax.distributed.data_parallel.trees import path_string

RIGHT = "right"


@dataclass(frozen=True)
class Case:
    """Configuration of an optimizer.

    Attributes:
      name: the test id.
      build: creates the transform; called again for every use.
      on_shards: ``RIGHT`` if the update of shards is exact, else a regex for the transform that the guard must name.
      tolerance: largest difference between one device and eight after four steps, relative to the largest entry of
        each leaf.
      cache_entries: maximum number of cache entries of the jitted step. Two, from a single compilation, if the state
        contains a PRNG key, whose sharding JAX represents in two ways.
    """

    name: str
    build: Callable[[], optax.GradientTransformationExtraArgs]
    on_shards: str = RIGHT
    tolerance: float = FLOAT32_ROUNDING
    cache_entries: int = 1


def matrices(params):
    """Returns a mask that is True for matrices, as commonly used for weight decay."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def labels(params):
    """Labels every leaf 'kernel' or 'rest' by its path."""

    def label(path, leaf):
        del leaf
        return "kernel" if "kernel" in path_string(path) else "rest"

    return jax.tree_util.tree_map_with_path(label, params)


def is_even_step(step):
    return step % 2 == 0


FROZEN = {"kernel": True, "bias": False}
FREEZING = {"up": FROZEN, "down": FROZEN}
WARMUP = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 6)

CASES = [
    # Plain and with momentum.
    Case("sgd", lambda: optax.sgd(0.1)),
    Case("sgd-momentum", lambda: optax.sgd(0.1, momentum=0.9)),
    Case("sgd-nesterov", lambda: optax.sgd(0.1, momentum=0.9, nesterov=True)),
    Case("sgd-bf16-momentum", lambda: optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16)),
    Case("sgd-schedule", lambda: optax.sgd(WARMUP)),
    Case("optimistic-gd", lambda: optax.optimistic_gradient_descent(0.1)),
    Case("sign-sgd", lambda: optax.sign_sgd(0.01)),
    Case("signum", lambda: optax.signum(0.01)),
    Case("lion", lambda: optax.lion(0.01)),
    # Elementwise second moments.
    Case("adam", lambda: optax.adam(0.01)),
    Case("adam-bf16-moment", lambda: optax.adam(0.01, mu_dtype=jnp.bfloat16)),
    Case("adamw", lambda: optax.adamw(0.01, weight_decay=0.1)),
    Case("adamw-callable-mask", lambda: optax.adamw(0.01, weight_decay=0.1, mask=matrices)),
    Case("adamw-schedule", lambda: optax.adamw(WARMUP, weight_decay=0.1)),
    Case("nadam", lambda: optax.nadam(0.01)),
    Case("nadamw", lambda: optax.nadamw(0.01, weight_decay=0.1)),
    Case("adamax", lambda: optax.adamax(0.01)),
    Case("adamaxw", lambda: optax.adamaxw(0.01, weight_decay=0.1)),
    Case("amsgrad", lambda: optax.amsgrad(0.01)),
    Case("adabelief", lambda: optax.adabelief(0.01)),
    Case("yogi", lambda: optax.yogi(0.01)),
    Case("radam", lambda: optax.radam(0.01)),
    Case("optimistic-adam", lambda: optax.optimistic_adam_v2(0.01)),
    Case("adan", lambda: optax.adan(0.01)),
    Case("rmsprop", lambda: optax.rmsprop(0.01)),
    Case("rmsprop-centered-momentum", lambda: optax.rmsprop(0.01, centered=True, momentum=0.9)),
    Case("adagrad", lambda: optax.adagrad(0.1)),
    Case("adadelta", lambda: optax.adadelta(1.0)),
    Case("rprop", lambda: optax.rprop(0.01)),
    Case("ademamix", lambda: contrib.ademamix(0.01)),
    Case("simplified-ademamix", lambda: contrib.simplified_ademamix(0.01)),
    Case("adopt", lambda: contrib.adopt(0.01)),
    Case("acprop", lambda: contrib.acprop(0.01)),
    Case("madgrad", lambda: contrib.madgrad(0.01)),
    Case("cocob", lambda: contrib.cocob()),
    Case("schedule-free-sgd", lambda: contrib.schedule_free_sgd(0.1)),
    Case("schedule-free-adamw", lambda: contrib.schedule_free_adamw(0.01)),
    Case("schedule-free-lion", lambda: contrib.schedule_free(optax.lion(0.01), learning_rate=0.01, b1=0.9)),
    # Norms of a leaf or of the tree.
    Case("lamb", lambda: optax.lamb(0.01, weight_decay=0.1), "scale_by_trust_ratio"),
    Case("lars", lambda: optax.lars(1.0, weight_decay=0.1), "scale_by_trust_ratio"),
    Case("fromage", lambda: optax.fromage(0.01), "scale_by_trust_ratio"),
    Case("novograd", lambda: optax.novograd(0.01), "scale_by_novograd"),
    Case(
        "normalize-by-update-norm",
        lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
        "normalize_by_update_norm",
    ),
    Case("normalize", lambda: optax.chain(contrib.normalize(), optax.sgd(0.1)), "normalize"),
    Case("param-block-norm", lambda: optax.chain(optax.scale_by_param_block_norm(), optax.sgd(0.1)), "block_norm"),
    Case("param-block-rms", lambda: optax.chain(optax.scale_by_param_block_rms(), optax.sgd(0.1)), "block_rms"),
    # Clipping.
    Case("clip", lambda: optax.chain(optax.clip(0.05), optax.sgd(0.1, momentum=0.9))),
    Case(
        "clip-by-global-norm-adamw",
        lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01)),
        "clip_by_global_norm",
    ),
    Case("clip-by-block-rms", lambda: optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)), "clip_by_block_rms"),
    Case(
        "adaptive-grad-clip",
        lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
        "adaptive_grad_clip",
    ),
    Case("centralize", lambda: optax.chain(optax.centralize(), optax.sgd(0.1)), "centralize"),
    # Factored moments and full matrices.
    Case("adafactor", lambda: optax.adafactor(0.01), "clip_by_block_rms"),
    Case("adafactor-factored", lambda: optax.adafactor(0.01, min_dim_size_to_factor=2), "scale_by_factored_rms"),
    Case(
        "adafactor-unfactored-elementwise",
        lambda: optax.adafactor(0.01, clipping_threshold=None, multiply_by_parameter_scale=False),
    ),
    Case("sm3", lambda: optax.sm3(0.1), "scale_by_sm3"),
    Case("muon", lambda: contrib.muon(0.01), "scale_by_muon"),
    Case("galore", lambda: contrib.galore(0.01, rank=2, update_proj_gap=2), "galore"),
    # Step sizes computed from the full tree.
    Case("lbfgs", lambda: optax.lbfgs(), "scale_by_lbfgs"),
    Case("lbfgs-no-linesearch", lambda: optax.lbfgs(0.05, linesearch=None), "scale_by_lbfgs"),
    Case(
        "backtracking-linesearch",
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8)),
        "linesearch",
    ),
    Case("polyak-sgd", lambda: optax.polyak_sgd(0.5), "scale_by_polyak"),
    Case("momo", lambda: contrib.momo(0.5), "momo"),
    Case("momo-adam", lambda: contrib.momo_adam(0.05), "momo_adam"),
    Case("dog", lambda: contrib.dog(1.0, init_step=("distance", 0.01)), "scale_by_dog"),
    Case(
        "distance-over-gradients",
        lambda: optax.chain(optax.scale_by_distance_over_gradients(1.0), optax.scale(-1.0)),
        "scale_by_distance_over_gradients",
    ),
    Case("dowg", lambda: contrib.dowg(1.0), "dowg"),
    Case("prodigy", lambda: contrib.prodigy(1.0, estim_lr0=1e-2), "prodigy"),
    Case("dadapt-adamw", lambda: contrib.dadapt_adamw(1.0, estim_lr0=1e-2), "dadapt_adamw"),
    Case("mechanize", lambda: contrib.mechanize(optax.adamw(0.01), s_init=1e-1), "mechanize"),
    Case("reduce-on-plateau", lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(patience=1))),
    # Noise: every shard would draw the same values.
    Case("noisy-sgd", lambda: optax.noisy_sgd(0.1, key=jax.random.key(3)), "add_noise", cache_entries=2),
    Case(
        "add-noise",
        lambda: optax.chain(optax.add_noise(0.1, 0.55, jax.random.key(5)), optax.adam(0.01)),
        "add_noise",
        cache_entries=2,
    ),
    # Wrappers.
    Case("zero-nans", lambda: optax.chain(optax.zero_nans(), optax.adam(0.01))),
    Case("apply-if-finite", lambda: optax.apply_if_finite(optax.adam(0.01), 2), "apply_if_finite"),
    Case("multi-steps", lambda: optax.MultiSteps(optax.adamw(0.01), 2).gradient_transformation()),
    Case(
        "multi-steps-skipping-large",
        lambda: optax.MultiSteps(
            optax.adamw(0.01), 2, should_skip_update_fn=partial(optax.skip_large_updates, max_squared_norm=20.0)
        ).gradient_transformation(),
        "MultiSteps",
    ),
    Case("apply-every", lambda: optax.chain(optax.apply_every(2), optax.sgd(0.1))),
    Case("partition", lambda: optax.partition({"kernel": optax.adamw(0.01), "rest": optax.sgd(0.1)}, labels)),
    Case(
        "partition-lamb",
        lambda: optax.partition({"kernel": optax.lamb(0.01), "rest": optax.sgd(0.1)}, labels),
        "trust_ratio",
    ),
    Case("masked-decay", lambda: optax.chain(optax.masked(optax.add_decayed_weights(0.1), matrices), optax.sgd(0.1))),
    Case("inject-hyperparams", lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=WARMUP, weight_decay=0.1)),
    Case(
        "stateless",
        lambda: optax.chain(
            optax.stateless(lambda updates, params: jax.tree.map(lambda u, p: u + 0.1 * p, updates, params)),
            optax.stateless_with_tree_map(lambda u, p: u - 0.05 * p),
            optax.scale_by_learning_rate(0.1),
        ),
    ),
    Case("selective-transform", lambda: optax.selective_transform(optax.adam(0.01), freeze_mask=FREEZING)),
    Case("ema", lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1))),
    Case("flatten-adam", lambda: optax.flatten(optax.adam(0.01)), "flatten"),
    Case("freeze-part", lambda: optax.chain(optax.adam(0.01), optax.freeze(FREEZING))),
    Case(
        "set-to-zero-part",
        lambda: optax.partition({"kernel": optax.adam(0.01), "rest": optax.set_to_zero()}, labels),
    ),
    Case("keep-params-nonnegative", lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative())),
    Case("split-real-and-imaginary", lambda: contrib.split_real_and_imaginary(optax.adam(0.01))),
    Case("conditionally-transform", lambda: optax.conditionally_transform(optax.adam(0.01), is_even_step)),
    Case("conditionally-mask", lambda: optax.conditionally_mask(optax.adam(0.01), is_even_step)),
    Case(
        "named-chain",
        lambda: optax.named_chain(("decay", optax.add_decayed_weights(0.1)), ("rms", optax.rmsprop(0.01))),
    ),
]
