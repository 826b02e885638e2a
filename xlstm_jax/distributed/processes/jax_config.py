"""How JAX is set in this process, as far as it decides what is computed: ``jax_settings()``.

Two processes that set it differently compile different programs of the same code, or draw different numbers from the
same key, and nothing says so. Not compared is what a process may have for itself: where it is (addresses, platforms,
devices and their number), what it writes (logs, dumps, profiles, tracebacks), what it keeps (compilation caches), how
it checks itself without another result (leaks, transfers), and paths, which differ from host to host.
"""

import os
import re

import jax

COMPARED_OPTIONS = frozenset(
    # the values: dtypes, precision, random bits, formulas
    "jax_enable_x64 jax_explicit_x64_dtypes jax_numpy_dtype_promotion jax_numpy_rank_promotion "
    "jax_default_matmul_precision jax_allow_f16_reductions jax_default_prng_impl jax_enable_custom_prng "
    "jax_legacy_prng_key jax_threefry_partitionable jax_threefry_gpu_kernel_lowering jax_random_seed_offset "
    "jax_high_dynamic_range_gumbel jax_accurate_erf_inv jax_softmax_custom_jvp jax_use_hlo_logistic_lowering "
    # the program, and so the collectives in which processes meet
    "jax_disable_jit jax_debug_nans jax_debug_infs jax_no_execution jax_use_shardy_partitioner "
    "jax_use_direct_linearize jax_remat3 jax_compiler_enable_remat_pass jax_disable_most_optimizations "
    "jax_optimization_level jax_exec_time_optimization_effort jax_memory_fitting_level jax_memory_fitting_effort "
    "jax_error_checking_behavior_nan jax_error_checking_behavior_divide jax_error_checking_behavior_oob "
    "jax_ragged_dot_use_ragged_dot_instruction jax_remove_size_one_mesh_axis_from_type "
    # how processes meet
    "jax_cpu_collectives_implementation jax_sort_devices_by_process_index jax_share_binary_between_hosts "
    "jax_enable_preemption_service jax_enable_recoverability".split()
)
FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
PLAIN_VARIABLES = ("NVIDIA_TF32_OVERRIDE",)  # turns TensorFloat-32 off or on in the libraries that XLA calls
OWN_FLAGS = re.compile(r"dump|device_count|cache|profile|log|(dir|path|file|to|from)$")  # of a process, by their names


def jax_settings() -> dict[str, str]:
    """The options, flags and variables that decide what is computed, as short texts by their names."""
    values = jax.config.values
    # Attributes know what a context manager, as jax.enable_x64(), has set in this thread; some options have none.
    options = {name: str(getattr(jax.config, name, values[name])) for name in COMPARED_OPTIONS & values.keys()}
    flags = {
        f"{variable} {name}": value
        for variable in FLAG_VARIABLES
        for name, value in _flags(os.environ.get(variable, "")).items()
    }
    return options | flags | {name: os.environ[name] for name in PLAIN_VARIABLES if name in os.environ}


def _flags(text: str) -> dict[str, str]:
    """Flags by name: the last one counts, and one without a value is true."""
    pairs = (flag.partition("=") for flag in text.split())
    return {name: value or "true" for name, _, value in pairs if not OWN_FLAGS.search(name)}
