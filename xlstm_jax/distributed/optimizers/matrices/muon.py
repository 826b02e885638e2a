"""Muon for split leaves: Newton-Schulz on the owner devices, everything else (momentum) elementwise on the shards.

Newton-Schulz computes the nearest orthogonal matrix by matrix products alone. With X = U S V^T an odd polynomial p acts
on the singular values: p(X) = U p(S) V^T. Each step has degree five, a X + (b A + c A^2) X with A = X X^T; the
coefficients drive all singular values towards 1, small values fast. The initial singular values must be at most about
1: ``preconditioning`` scales them.
"""

from collections.abc import Callable, Mapping, Sequence
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
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.dtypes import dtype_name
from xlstm_jax.distributed.optimizers.matrices.dimensions import MatrixChoice, choices_of
from xlstm_jax.distributed.optimizers.matrices.groups import MatrixGroup, in_rounds
from xlstm_jax.distributed.optimizers.matrices.layout import Values, map_groups, report_matrices
from xlstm_jax.distributed.optimizers.matrices.owners import by_owners

MUON, ADAM = "muon", "adam"
FROBENIUS, SPECTRAL, AOL, SCHATTEN = "frobenius", "spectral", "aol", "schatten"
PRECONDITIONINGS = (FROBENIUS, SPECTRAL, AOL, SCHATTEN)
_NORMS: dict[str, Any] = {FROBENIUS: "fro", SPECTRAL: 2}
DEFAULT_NS_COEFFS = (3.4445, -4.7750, 2.0315)
DEFAULT_NS_STEPS = 5
DEFAULT_BETA = 0.95
DEFAULT_EPS = 1e-8
# As in optax. "standard": github.com/KellerJordan/modded-nanogpt; "dion": three coefficients for each step, of Ahn et
# al., "Dion: Distributed Orthonormalized Updates", 2025.
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
    """Makes ``optax.contrib.muon`` without redundant work: each device orthogonalises its share of unsharded matrices.

    Matrices of equal shape form a group: an all-to-all brings every device its share, the device runs Newton-Schulz on
    the share as a batch, and a second all-to-all sends the updates back. Further leaves are trained by AdamW.
    Arguments, defaults and state are as in optax, and every update is equal to optax's up to rounding. Use the
    optimizer in ``make_train_step``, inside ``shard_map`` on boxed trees, or on one device.

    >>> params = {"up": {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16)}}
    >>> tx = muon(1e-2)
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> state.inner_states["muon"].inner_state[0].mu["up"]["bias"]
    MaskedNode()

    Args:
      learning_rate: as in ``optax.contrib.muon``, like every argument not listed below. (But ``ns_steps`` must be a
        Python int.)
      muon_weight_dimension_numbers: as in optax, a tree of ``optax.contrib.MuonDimensionNumbers`` and None, a prefix of
        such a tree, or a function of the parameters; None: ``matrix_dimensions()``, which handles stacked layers,
        embeddings and output layers. (Optax's default takes exactly the leaves of two dims.)
      exchange_dtype: dtype of momentum and updates in the exchange; None: unchanged, float32 for float32 parameters.
        bfloat16 halves the bytes, and rounds the arguments and results of Newton-Schulz.
    Raises:
      ValueError: an unknown preset, preconditioning or dtype; coefficients of a shape other than (3,) or (n, 3); or (in
        ``init`` and ``update``) as ``matrix_dimensions``.
      TypeError: ``exchange_dtype`` is not a dtype, or ``ns_steps`` not a Python int.
    """
    if preconditioning not in PRECONDITIONINGS:
        raise ValueError(f"muon: preconditioning={preconditioning!r}; there are {', '.join(PRECONDITIONINGS)}.")
    scale_by_muon = partial(
        _scale_by_muon,
        ns_coeffs=_checked_coeffs(ns_coeffs, ns_steps),
        orthogonal=partial(orthogonalized, steps=ns_steps, preconditioning=preconditioning, eps=eps),
        beta=beta,
        mu_dtype=None if mu_dtype is None else jax.dtypes.canonicalize_dtype(mu_dtype),
        nesterov=nesterov,
        adaptive=adaptive,
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

    def verb(choices: Choices, tree: PyTree) -> optax.GradientTransformationExtraArgs:
        matrices = optax.chain(
            scale_by_muon(choices),
            _scale_by_shape(choices, consistent_rms),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        )
        labels = trees.map_leaves_with_path(lambda path, leaf: MUON if choices[path].dims else ADAM, tree)
        return optax.partition({MUON: matrices, ADAM: adam}, labels)

    def init(params: PyTree) -> PyTree:
        choices = choices_of(muon_weight_dimension_numbers, params)
        report_matrices(MUON, params, choices, any_order=True)
        return verb(choices, params).init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree) -> tuple[PyTree, PyTree]:
        choices = choices_of(muon_weight_dimension_numbers, updates)
        # AdamW and optax's bias correction raise a float to an int.
        with jax.numpy_dtype_promotion("standard"):
            return verb(choices, updates).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _scale_by_muon(
    choices: Choices,
    *,
    ns_coeffs: Any,
    orthogonal: Callable[[jax.Array, jax.Array], jax.Array],
    beta: ArrayLike,
    mu_dtype: Any,
    nesterov: bool,
    adaptive: bool,
    exchange_dtype: str | None,
) -> optax.GradientTransformation:
    """Makes the transform ``optax.contrib.scale_by_muon`` for split leaves: Muon without learning rate and decay.

    Args:
      choices: whether each leaf is a matrix, by path.
      ns_coeffs: coefficients of Newton-Schulz, (3,) or (n, 3).
      orthogonal: takes matrices [n, rows, columns] and coefficients; returns orthogonalised matrices.
      exchange_dtype: dtype in which matrices are sent; None: unchanged.
      beta, mu_dtype, nesterov, adaptive: as in optax.
    """

    def init(params: PyTree) -> MuonState:
        mu = optax.tree.zeros_like(params, dtype=mu_dtype)
        return MuonState(count=jnp.zeros([], jnp.int32), mu=mu, ns_coeffs=jnp.asarray(ns_coeffs))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, MuonState]:
        del params
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = jnp.asarray(optax.safe_increment(state.count))
        coeffs = jnp.asarray(state.ns_coeffs)
        # Bias correction as in Adam. Nesterov momentum is a step ahead, so it is corrected for the next count.
        momentum = optax.tree.bias_correction(mu, beta, optax.safe_increment(count) if nesterov else count)
        if nesterov:
            now = optax.tree.bias_correction(updates, beta, count)
            momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, momentum, now)

        def of_groups(groups: Sequence[MatrixGroup], values: Values, state: Any) -> tuple[Values, Any]:
            new: Values = {}
            for together in in_rounds(groups):
                with jax.named_scope(f"muon_{'_'.join(group.name for group in together)}"):
                    new |= by_owners(lambda x: orthogonal(x, coeffs), together, values, exchange_dtype)
            return new, state

        # In any order: p(P X Q) = P p(X) Q for permutations P and Q of rows and columns.
        updates, _ = map_groups(of_groups, momentum, choices, any_order=True)
        if adaptive:
            updates = trees.map_values(_scaled_by_dual_norm, updates, trees.stored_values(momentum))
        return updates, MuonState(count=count, mu=optax.tree.cast(mu, mu_dtype), ns_coeffs=state.ns_coeffs)

    return optax.GradientTransformation(init, update)


def _scaled_by_dual_norm(update: Sharded, momentum: jax.Array) -> jax.Array:
    """Returns the local shard of an update, multiplied by the inner product of update and momentum.

    The inner product is over the full leaf, with a sum over devices inside ``shard_map``. ``momentum`` is the local
    shard.
    """
    axes = [axis for axis in update.axes if collectives.is_bound(axis)]
    (product,) = collectives.psum([jnp.sum(momentum.conj() * update.value)], [axes])
    return product * update.value


def _scale_by_shape(choices: Choices, consistent_rms: ArrayLike | None) -> optax.GradientTransformation:
    """Makes optax's transform that multiplies updates by a factor that depends on the size of the leaf's matrices.

    With ``consistent_rms=None`` the factor is sqrt(max(1, outputs / inputs)), for equal steps at any width, from
    github.com/KellerJordan/Muon. Otherwise the factor is sqrt(max(inputs, outputs)) * consistent_rms, for steps as
    large as AdamW's, from Liu et al., "Muon is Scalable for LLM Training", 2025. ``choices`` has the dims of the
    matrices, by path.
    """

    def scale(choice: MatrixChoice) -> jax.Array:
        # NumPy scalars, unlike Python numbers, have a dtype, which widens narrow updates, as in optax.
        inputs, outputs = np.array(choice.matrix)
        if consistent_rms is None:
            return jnp.sqrt(jnp.maximum(1, outputs / inputs))
        return jnp.sqrt(jnp.maximum(inputs, outputs)) * consistent_rms

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params

        def scaled(path: str, leaf: Sharded) -> jax.Array:
            return scale(choices[path]) * leaf.value

        return trees.map_values_with_path(scaled, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _checked_coeffs(ns_coeffs: Any, ns_steps: Any) -> Any:
    """Returns the coefficients of Newton-Schulz: three numbers for all steps, or a tuple of three numbers per step.

    ``ns_coeffs`` are these coefficients, or the name of a preset, such as "dion".

    Raises:
      ValueError: the preset is unknown, the shape is neither (3,) nor (n, 3), or there are more rows than ``ns_steps``.
      TypeError: ``ns_steps`` is not a Python int.
    """
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
        raise ValueError(f"muon: ns_coeffs are for {shape[0]} steps, more than {ns_steps=}; pass at most as many.")
    return tuple(ns_coeffs)[-ns_steps:]


# ---------------------------------------------------------------------------------------------------- Newton-Schulz


def orthogonalized(x: jax.Array, coeffs: jax.Array, steps: int, preconditioning: str, eps: ArrayLike) -> jax.Array:
    """Returns n nearly orthogonal matrices, by Newton-Schulz, from x[n, rows, columns] with rows <= columns.

    The result has the shape of ``x``; all singular values are near 1.

    Args:
      x: the matrices.
      coeffs: coefficients (a, b, c) for all steps, shape (3,); or for each step, shape (n, 3).
      steps: number of steps if ``coeffs`` has shape (3,); otherwise there are n steps.
      preconditioning: norm by which each matrix (with "aol" each row) is first divided: "frobenius", "spectral", "aol"
        or "schatten".
      eps: added to this norm, or lower bound of its square, against a division by 0.
    """
    coeffs = coeffs.astype(x.dtype)
    each = jnp.tile(coeffs, (steps, 1)) if coeffs.ndim == 1 else coeffs
    # Newton-Schulz diverges for singular values far above 1, and each of these norms is at least the largest singular
    # value.
    if order := _NORMS.get(preconditioning):
        x = x / (jnp.linalg.norm(x, ord=order, axis=(-2, -1), keepdims=True) + eps)
    else:  # by the Gram matrix, which the first step needs anyway
        gram = x @ _adjoint(x)
        if preconditioning == AOL:  # "almost orthogonal layers": row sums bound the eigenvalues of the Gram matrix
            scale = jax.lax.rsqrt(jnp.clip(jnp.abs(gram).sum(-1), min=eps))
            x, gram = x * scale[..., :, None], gram * scale[..., :, None] * scale[..., None, :]
        else:  # the norm of the Gram matrix is the square of the Schatten-4 norm of x
            scale = jax.lax.rsqrt(jnp.clip(jnp.linalg.norm(gram, axis=(-2, -1), keepdims=True), min=eps))
            x, gram = x * scale, gram * scale**2
        x, each = _stepped(x, gram, each[0]), each[1:]
    # A loop, whose body is compiled once: unrolled steps take XLA several times as long to compile.
    return jax.lax.scan(lambda x, abc: (_stepped(x, x @ _adjoint(x), abc), None), x, each)[0]


def _stepped(x: jax.Array, gram: jax.Array, abc: jax.Array) -> jax.Array:
    a, b, c = abc
    # a X + (b A + c A^2) X with A = X X^T: polynomials of the small matrix first, a single product with X last.
    return a * x + (b * gram + c * gram @ gram) @ x


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Returns the FLOP of Newton-Schulz for a matrix, rows <= columns: three matrix products in each step.

    >>> newton_schulz_flops(2048, 8192, 5)
    773094113280
    """
    return steps * (4 * rows**2 * columns + 2 * rows**3)


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))
