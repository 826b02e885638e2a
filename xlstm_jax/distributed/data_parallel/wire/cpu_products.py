"""Order of dims in which a CPU computes the gradient of a narrow matrix: ``not_transposed_on_cpu``.

JAX computes the gradient of a weight matrix as a matrix product, followed by a transpose. If nothing else reads the
product, XLA drops the transpose and swaps the operands of the product. In bfloat16 the fast product routines of the CPU
do not accept this form, and the step of a decoder takes twice as long; in float32 the step is as fast.
"""

import jax


def not_transposed_on_cpu(product: jax.Array) -> jax.Array:
    """Returns the matrix ``product`` unchanged, behind an optimization barrier on CPU.

    ``product`` is the transpose of a matrix product. A transpose back cancels JAX's transpose, so that XLA finds no
    transpose between the product and the barrier.
    """
    return jax.lax.platform_dependent(product, cpu=lambda g: jax.lax.optimization_barrier(g.T).T, default=lambda g: g)
