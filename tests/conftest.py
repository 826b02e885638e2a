"""Eight simulated CPU devices for the whole suite, set up before JAX starts; and a check that they are there."""

import os

# Test workers share two cores: one thread each for XLA's kernels keeps them out of each other's way. And most of their
# time goes into compiling programs that run once, so LLVM is told not to optimize: a third less in all.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0")

from xlstm_jax.distributed import simulate_cpu_devices

simulate_cpu_devices(8)


def pytest_sessionstart(session):
    """A suite about eight devices must not pass on one."""
    del session
    import jax

    assert jax.device_count() == 8, f"the suite needs 8 simulated devices, JAX has {jax.device_count()}"
