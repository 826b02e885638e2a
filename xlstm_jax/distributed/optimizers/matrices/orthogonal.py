"""The nearest orthogonal matrix by Newton-Schulz: of a batch of matrices, by matrix products alone.

With X = U S V^T an odd polynomial p of matrices acts on the singular values: p(X) = U p(S) V^T. Each step is one of
degree five, a X + (b A + c A^2) X with A = X X^T, whose coefficients drive all singular values towards 1, the small
ones fast. They must be at most about 1 at the start, which is what ``preconditioning`` sees to.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

FROBENIUS, SPECTRAL, AOL, SCHATTEN = "frobenius", "spectral", "aol", "schatten"
PRECONDITIONINGS = (FROBENIUS, SPECTRAL, AOL, SCHATTEN)

_NORMS: dict[str, Any] = {FROBENIUS: "fro", SPECTRAL: 2}

Products = tuple[jax.Array, jax.Array]  # X and A


def orthogonalized(x: jax.Array, coeffs: jax.Array, steps: int, preconditioning: str, eps: float) -> jax.Array:
    """Newton-Schulz of x[n, rows, columns], rows <= columns; ``coeffs`` has shape (3,), or (steps, 3)."""
    coeffs = coeffs.astype(x.dtype)
    each = jnp.tile(coeffs, (steps, 1)) if coeffs.ndim == 1 else coeffs
    if order := _NORMS.get(preconditioning):
        x = x / (jnp.linalg.norm(x, ord=order, axis=(-2, -1), keepdims=True) + eps)
    if preconditioning in _RESCALED:
        x, each = _stepped(*_RESCALED[preconditioning](x, x @ _adjoint(x), eps), each[0]), each[1:]
    # A loop, which is compiled once: written out, it takes a compiler several times as long.
    return jax.lax.scan(lambda x, abc: (_stepped(x, x @ _adjoint(x), abc), None), x, each)[0]


def _stepped(x: jax.Array, gram: jax.Array, abc: jax.Array) -> jax.Array:
    a, b, c = abc
    return a * x + (b * gram + c * gram @ gram) @ x


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """FLOP of the matrix products of one matrix, rows <= columns: two with all of it and one of the Gram matrix a step.

    >>> newton_schulz_flops(2048, 8192, 5)
    773094113280
    """
    return steps * (4 * rows**2 * columns + 2 * rows**3)


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _rescaled_by_rows(x: jax.Array, gram: jax.Array, eps: float) -> Products:
    """ "Almost orthogonal layers": by the sums of the Gram matrix's rows, which bound its eigenvalues."""
    scale = jax.lax.rsqrt(jnp.clip(jnp.abs(gram).sum(-1), min=eps))
    return x * scale[..., :, None], gram * scale[..., :, None] * scale[..., None, :]


def _rescaled_by_norm(x: jax.Array, gram: jax.Array, eps: float) -> Products:
    """By the Schatten-4 norm, which is the root of the Gram matrix's own norm."""
    norm = jnp.linalg.norm(gram, axis=(-2, -1), keepdims=True)
    scale = jax.lax.rsqrt(jnp.clip(norm, min=eps))
    return x * scale, gram * scale**2


_RESCALED: dict[str, Callable[[jax.Array, jax.Array, float], Products]] = {
    AOL: _rescaled_by_rows,
    SCHATTEN: _rescaled_by_norm,
}
