"""Private names of JAX, Flax and Python, which may change in any release; the library imports them only here.

``jax._src`` and names with a leading ``_`` are private, and ``jax.extend`` and ``jax.interpreters`` are not covered by
a promise of stability. Each name is used because no public name exists; the place of use explains the purpose.
Therefore setup.cfg sets upper bounds on the versions of JAX and Flax. To raise a bound, run the suite on the release:
``tests/house/test_private_names.py`` tests the required behaviour of each name.

Private names of orbax can only be used by overriding them: ``_save_fn`` of its JSON handler, and the ``byte_limiter``
argument of its array writers, both in ``checkpoint/orbax_backend.py``.
"""

import threading
from collections.abc import Iterable
from typing import Any

import flax
import jax

try:
    from flax.linen import module as _linen
    from jax._src import dispatch
    from jax._src.clusters import ClusterEnv
    from jax._src.config import _check_vma as types_are_checked
    from jax._src.config import traceback_in_locations_limit
    from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
    from jax._src.distributed import global_state
    from jax._src.interpreters.batching import BatchTracer
    from jax.extend import core
    from jax.extend.core.primitives import mul_p
    from jax.extend.random import define_prng_impl
    from jax.interpreters import ad, batching, mlir

    register_atexit = threading._register_atexit  # type: ignore[attr-defined]
    job: Any = global_state  # the fields are typed as None, their value before the process joins
    # The interceptors of ``nn.intercept_methods`` around the running modules, innermost first.
    linen_interceptors: Iterable[Any] = _linen._global_interceptor_stack
    _context = _linen._context
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"xlstm_jax uses names that JAX {jax.__version__} or Flax {flax.__version__} no longer has: {error}. Install "
        "the tested releases: pip install 'jax>=0.10,<0.13' 'flax>=0.12.8,<0.13'."
    ) from error

__all__ = [
    "BatchTracer",
    "ClusterEnv",
    "ad",
    "batching",
    "core",
    "cudnn_attention",
    "define_prng_impl",
    "dispatch",
    "in_shardings_of",
    "job",
    "linen_callers",
    "linen_interceptors",
    "mlir",
    "mul_p",
    "register_atexit",
    "traceback_in_locations_limit",
    "types_are_checked",
]


def in_shardings_of(traced: Any) -> tuple[Any, ...]:
    """Returns the ``in_shardings`` of a traced function, one for each array of its arguments, before compilation.

    ``traced`` is the result of ``jax.jit(...).trace(...)``.
    """
    return traced._params["in_shardings"][-len(jax.tree.leaves(traced.args_info)) :]


def linen_callers() -> list[Any]:
    """Returns the Linen modules with a running method in this thread, outermost first, after a first entry None."""
    return list(_context.module_stack)
