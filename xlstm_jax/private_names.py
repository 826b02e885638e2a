"""The names of JAX, Flax and Python that their authors may change in any release: all of them, here and nowhere else.

``jax._src`` and names that begin with ``_`` are private, and ``jax.extend`` and ``jax.interpreters`` come without a
promise. Each is used because there is no public name for the same; where it is used says for what. So setup.cfg bounds
both packages from above. To raise a bound, run the suite on the new release: ``tests/house/test_private_names.py`` says
what each name must still do.

orbax has private names too, which can be used only where they are overridden: ``_save_fn`` of its JSON handler, and the
``byte_limiter`` that it hands to its writers of arrays, both in ``checkpoint/orbax_backend.py``.
"""

import threading
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
    from jax.extend import core
    from jax.extend.core.primitives import mul_p
    from jax.extend.random import define_prng_impl
    from jax.interpreters import batching, mlir

    register_atexit = threading._register_atexit  # type: ignore[attr-defined]
    job: Any = global_state  # its fields are typed as None, which they are before the process joins
    _interceptors, _context = _linen._global_interceptor_stack, _linen._context
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"xlstm_jax uses names that JAX {jax.__version__} or Flax {flax.__version__} has no more: {error}. Install the "
        "releases that it was tested with: pip install 'jax>=0.10,<0.13' 'flax>=0.12.8,<0.13'."
    ) from error

__all__ = [
    "ClusterEnv",
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
    """The ``in_shardings`` of ``jax.jit``, leaf by leaf, of ``jax.jit(...).trace(...)``, before it is compiled."""
    return traced._params["in_shardings"][-len(jax.tree.leaves(traced.args_info)) :]


def linen_interceptors() -> list[Any]:
    """What ``nn.intercept_methods`` has put around the modules that run now, innermost first."""
    return list(_interceptors)


def linen_callers() -> list[Any]:
    """The Linen modules of which a method runs now."""
    return list(_context.module_stack)
