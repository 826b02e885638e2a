"""Muon, for leaves that are split: momentum and all else element by element on the shards, Newton-Schulz by owners."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike
from optax.contrib import MuonState

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, rebox
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import dtype_name
from xlstm_jax.distributed.optimizers.matrices.dimensions import MatrixChoice, choices_of, normalized
from xlstm_jax.distributed.optimizers.matrices.groups import MatrixGroup, in_rounds
from xlstm_jax.distributed.optimizers.matrices.layout import Values, map_groups, report_matrices
from xlstm_jax.distributed.optimizers.matrices.orthogonal import FROBENIUS, PRECONDITIONINGS, orthogonalized
from xlstm_jax.distributed.optimizers.matrices.owners import by_owners

MUON, ADAM = "muon", "adam"
DEFAULT_NS_COEFFS = (3.4445, -4.7750, 2.0315)
DEFAULT_NS_STEPS = 5
DEFAULT_BETA = 0.95
DEFAULT_EPS = 1e-8
NS_COEFFS = {
    "standard": DEFAULT_NS_COEFFS,
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}

Choices = Mapping[str, MatrixChoice]


@dataclass(frozen=True)
class _Rule:
    """What Muon makes of gradients, before learning rate and weight decay; as in ``optax.contrib.scale_by_muon``."""

    ns_coeffs: Any
    ns_steps: int
    beta: ArrayLike
    eps: Any
    mu_dtype: Any
    nesterov: bool
    adaptive: bool
    preconditioning: str
    exchange_dtype: str | None


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Any = DEFAULT_NS_COEFFS,
    ns_steps: int = DEFAULT_NS_STEPS,
    beta: ArrayLike = DEFAULT_BETA,
    eps: ArrayLike = DEFAULT_EPS,
    weight_decay: Any = 0.0,
    weight_decay_mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = FROBENIUS,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: Any = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: ArrayLike | None = None,
    exchange_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """``optax.contrib.muon`` at the cost of its arithmetic: each device orthogonalises whole matrices of its own.

    Matrices of one shape are a group: every device gets its share of them by one all-to-all, runs Newton-Schulz on
    these as one batch, and sends the updates back by another. The rest of the leaves is trained by AdamW. Arguments,
    defaults and state are those of optax, and so is every update, to rounding; use it in ``make_train_step``, inside
    ``shard_map`` on boxed trees, or on one device.

    >>> params = {"up": {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16)}}
    >>> tx = muon(1e-2)
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> state.inner_states["muon"].inner_state[0].mu["up"]["bias"]
    MaskedNode()

    Args:
      learning_rate: and all others that are not named below: as in ``optax.contrib.muon``; ``ns_steps`` is a Python
        number.
      muon_weight_dimension_numbers: as there, a tree of ``optax.contrib.MuonDimensionNumbers`` and None, a prefix of
        one, or a function of the parameters; None: ``matrix_dimensions()``, which knows stacked layers, embeddings and
        output layers. (Optax's default takes all leaves of two dims, and no others.)
      exchange_dtype: in which momentum and updates travel; None: as they are, float32 for float32 parameters. bfloat16
        halves the bytes, and rounds what Newton-Schulz is given and what it returns.
    Raises:
      ValueError: an unknown preset, preconditioning or dtype; coefficients of another shape than (3,) or (n, 3); or (in
        ``init`` and ``update``) what ``matrix_dimensions`` raises.
      TypeError: ``exchange_dtype`` is no dtype, ``ns_steps`` no number.
    """
    rule = _Rule(
        ns_coeffs=_checked_coeffs(ns_coeffs, ns_steps),
        ns_steps=ns_steps,
        beta=beta,
        eps=eps,
        mu_dtype=None if mu_dtype is None else jax.dtypes.canonicalize_dtype(mu_dtype),
        nesterov=nesterov,
        adaptive=adaptive,
        preconditioning=_checked_preconditioning(preconditioning),
        exchange_dtype=dtype_name(exchange_dtype, "exchange_dtype"),
    )
    adam = optax.adamw(
        learning_rate=learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        weight_decay=adam_weight_decay,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
    )

    def of(choices: Choices, tree: PyTree) -> optax.GradientTransformationExtraArgs:
        matrices = optax.chain(
            _scale_by_muon(rule, choices),
            _scale_by_shape(choices, consistent_rms),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        )
        labels = trees.map_leaves_with_path(lambda path, leaf: MUON if choices[path].dims else ADAM, tree)
        return optax.partition({MUON: matrices, ADAM: adam}, labels)

    def init(params: PyTree) -> PyTree:
        choices = choices_of(muon_weight_dimension_numbers, params)
        report_matrices(MUON, params, choices, any_order=True)
        return of(choices, params).init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any) -> tuple[PyTree, PyTree]:
        choices = choices_of(muon_weight_dimension_numbers, updates)
        return of(choices, updates).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _scale_by_muon(rule: _Rule, choices: Choices) -> optax.GradientTransformation:
    def init(params: PyTree) -> MuonState:
        mu = optax.tree.zeros_like(params, dtype=rule.mu_dtype)
        return MuonState(count=jnp.zeros([], jnp.int32), mu=mu, ns_coeffs=jnp.asarray(rule.ns_coeffs))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, MuonState]:
        del params
        mu = optax.tree.update_moment(updates, state.mu, rule.beta, 1)
        count = jnp.asarray(optax.safe_increment(state.count))
        momentum = _momentum(rule, mu, updates, count)
        of_groups = partial(_of_groups, rule, jnp.asarray(state.ns_coeffs))
        updates, _ = map_groups(of_groups, momentum, choices, any_order=True)
        if rule.adaptive:
            updates = trees.map_leaves(_scaled_by_dual_norm, updates, momentum)
        return updates, MuonState(count=count, mu=optax.tree.cast(mu, rule.mu_dtype), ns_coeffs=state.ns_coeffs)

    return optax.GradientTransformation(init, update)


def _momentum(rule: _Rule, mu: PyTree, updates: PyTree, count: jax.Array) -> PyTree:
    """What is orthogonalised: the mean of gradients without the bias of its start, one step ahead with ``nesterov``."""
    beta = rule.beta
    if not rule.nesterov:
        return optax.tree.bias_correction(mu, beta, count)
    ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
    now = optax.tree.bias_correction(updates, beta, count)
    return jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)


def _of_groups(
    rule: _Rule, ns_coeffs: jax.Array, groups: Sequence[MatrixGroup], values: Values, state: Any
) -> tuple[Values, Any]:
    def orthogonal(matrices: jax.Array) -> jax.Array:
        return orthogonalized(matrices, ns_coeffs, rule.ns_steps, rule.preconditioning, rule.eps)

    new: Values = {}
    for together in in_rounds(groups):
        with jax.named_scope(f"muon_{'_'.join(group.name for group in together)}"):
            new |= by_owners(orthogonal, together, values, rule.exchange_dtype)
    return new, state


def _scaled_by_dual_norm(update: Any, momentum: Any) -> Any:
    """The update times its inner product with the momentum, over all of the leaf."""
    own, was = leaf_of(update).value, leaf_of(momentum).value
    axes = [axis for axis in leaf_of(update).axes if collectives.is_bound(axis)]
    (product,) = collectives.psum([jnp.sum(was.conj() * own)], [axes])
    return rebox(update, product * own)


def _scale_by_shape(choices: Choices, consistent_rms: ArrayLike | None) -> optax.GradientTransformation:
    """As in optax: by what makes steps alike for matrices of any width, or as large as those of AdamW."""

    def scale(choice: MatrixChoice) -> jax.Array:
        assert choice.dims is not None
        inputs, outputs = (
            np.prod([choice.shape[dim] for dim in dims]) for dims in normalized(choice.dims, len(choice.shape))
        )
        if consistent_rms is None:
            return jnp.sqrt(jnp.maximum(1, outputs / inputs))
        return jnp.sqrt(jnp.maximum(inputs, outputs)) * consistent_rms

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params

        def scaled(path: str, leaf: Any) -> Any:
            return rebox(leaf, scale(choices[path]) * leaf_of(leaf).value)

        return trees.map_leaves_with_path(scaled, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _checked_coeffs(ns_coeffs: Any, ns_steps: Any) -> Any:
    if not isinstance(ns_steps, int):
        raise TypeError(f"muon: ns_steps={ns_steps!r} is no Python number; pass {DEFAULT_NS_STEPS}, say.")
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in NS_COEFFS:
            raise ValueError(f"muon: there is no preset ns_coeffs={ns_coeffs!r}; there are {', '.join(NS_COEFFS)}.")
        ns_coeffs = NS_COEFFS[ns_coeffs]
    shape: Any = np.shape(ns_coeffs)
    if not shape or len(shape) > 2 or shape[-1] != 3:
        raise ValueError(f"muon: ns_coeffs of shape {shape}; pass three numbers, or three for each of ns_steps steps.")
    if len(shape) == 1:
        return ns_coeffs
    if shape[0] > ns_steps:
        raise ValueError(f"muon: ns_coeffs are for {shape[0]} steps, more than {ns_steps=}; pass as many.")
    return tuple(ns_coeffs)[-ns_steps:]


def _checked_preconditioning(name: Any) -> str:
    if name not in PRECONDITIONINGS:
        raise ValueError(f"muon: preconditioning={name!r}; there are {', '.join(PRECONDITIONINGS)}.")
    return str(name)
