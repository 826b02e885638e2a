"""XLA options for GPUs that ``xla_options`` compares, by their effect; and the best options found."""

from typing import Any

import jax

from xlstm_jax.accelerators import PIPELINES_BY_MODE, compiler_options

MIB = 2**20


def at_once(count: int) -> dict[str, Any]:
    """Allows ``count`` collectives at a time; XLA's default is 1."""
    return {"xla_gpu_experimental_parallel_collective_overlap_limit": count}


def pipelined(kind: str) -> dict[str, Any]:
    """Pipelines the collectives of a kind in a loop: they start an iteration earlier, or end an iteration later."""
    if jax.__version_info__ >= PIPELINES_BY_MODE:
        return {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON"}
    return {f"xla_gpu_enable_pipelined_{kind}": True}


def combined(size: int) -> dict[str, Any]:
    """Combines gathers, and reduce-scatters, up to a total of ``size`` bytes."""
    return {f"xla_gpu_{kind}_combine_threshold_bytes": size for kind in ("all_gather", "reduce_scatter")}


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "2 at once": at_once(2),
    "4 at once": at_once(4),
    "8 at once": at_once(8),
    "gathers pipelined": pipelined("all_gather"),
    "scatters pipelined": pipelined("reduce_scatter"),
    "sums pipelined": pipelined("all_reduce"),
    "4 at once, gathers pipelined": at_once(4) | pipelined("all_gather"),
    "8 at once, gathers pipelined": at_once(8) | pipelined("all_gather"),
    "8 at once, both pipelined": at_once(8) | pipelined("all_gather") | pipelined("reduce_scatter"),
    "combined to 1 B": combined(1),
    "combined to 32 MiB": combined(32 * MIB),
    "combined to 64 MiB": combined(64 * MIB),
    "combined to 128 MiB": combined(128 * MIB),
    "combined to 1 GiB": combined(1024 * MIB),
    "8 at once, combined to 1 B": at_once(8) | combined(1),
    "8 at once, combined to 128 MiB": at_once(8) | combined(128 * MIB),
    "8, pipelined, to 128 MiB": at_once(8) | pipelined("all_gather") | combined(128 * MIB),
    "8, pipelined, to 1 B": at_once(8) | pipelined("all_gather") | combined(1),
    "loops doubled": {"xla_gpu_enable_while_loop_double_buffering": True},
    "latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "stream of priority": {"xla_gpu_enable_highest_priority_async_stream": True},
    "as early as can be": {"xla_gpu_experimental_collective_start_as_early_as_possible": True},
    "latencies of NCCL": {"xla_gpu_enable_analytical_sol_latency_estimator": True},
    "latencies of kernels": {"xla_gpu_enable_analytical_latency_estimator": True},
}

# Options with the least waiting by forecast, according to results/options: for the library, and for ``jit``, whose flat
# rings over every GPU have a latency so high that fewer and larger collectives are faster. The library's default for
# GPUs is another set, which others measured (``compiler_options``): 4 at once.
BEST_FOR_OURS = compiler_options("NVIDIA H100 80GB HBM3", chosen_by="forecast")
BEST_AHEAD = compiler_options("NVIDIA H100 80GB HBM3", pipelined=False, chosen_by="forecast")  # with scan_layers
BEST_FOR_JIT = OPTIONS["8, pipelined, to 128 MiB"]
