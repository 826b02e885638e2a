"""Drops gathered parameters of a unit after the forward pass, and gathers again for the backward pass: ``dropping``.

``regather`` chooses the values that are kept.
"""

from collections.abc import Callable
from typing import Any

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.modules.unit import Method, ModuleSystem, running
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.regather import keeping_no_weights
from xlstm_jax.distributed.data_parallel.trees import split_arrays
from xlstm_jax.distributed.data_parallel.wire import collectives


def dropping(run: Method, system: ModuleSystem, policy: ShardPolicy) -> Method:
    """Returns a function like ``run`` that gathers again in the backward pass, if ``policy`` says so, else ``run``.

    ``run(module, *args, **kwargs)`` gathers the parameters of ``module`` and computes; the new function has the same
    arguments and results. With the option ``reshard_after_forward``, values that are costly to compute are kept for the
    backward pass; gathered weights and results of cheap operations (casts, arithmetic) are computed again. Gathers over
    the axes that the option leaves out are not repeated: their results are kept. On a single device, or outside of
    ``shard_map``, ``run`` is called unchanged.

    Args:
      run: the function to change.
      system: the module library, with its version of ``jax.checkpoint``.
      policy: the options of the unit, with ``reshard_after_forward``.
    """
    if not policy.reshard_after_forward:
        return run

    def run_and_drop(module: Any, *args: Any, **kwargs: Any) -> Any:
        if running(policy.axes) != "manual" or collectives.axis_size(policy.axes) == 1:
            return run(module, *args, **kwargs)
        # ``checkpoint`` accepts only arrays: flags and functions among the arguments bypass it.
        arrays, put_back = split_arrays((args, kwargs), *system.objects)
        rebuild_results: list[Callable[[dict[int, Any]], PyTree]] = []

        def recomputed(module: Any, arrays: dict[int, Any]) -> dict[int, Any]:
            args, kwargs = put_back(arrays)
            results, rebuild = split_arrays(run(module, *args, **kwargs), *system.objects)
            rebuild_results.append(rebuild)
            return results

        # The checkpoint traces `again`, which appends the function that rebuilds its results.
        keep = keeping_no_weights(jax.checkpoint_policies.everything_saveable, policy.kept_axes)
        results = system.checkpoint(recomputed, policy=keep)(module, arrays)
        return rebuild_results[-1](results)

    return run_and_drop
