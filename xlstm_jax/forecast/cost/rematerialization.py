"""Automatic rematerialization of XLA: instructions that the compiler runs twice because memory is scarce.

Near the limit of memory, XLA's pass HloRematerialization frees arrays and recomputes the arrays before their next use,
independently of ``nn.remat``. The added instructions have names such as ``fusion.12.remat2``. Training of a mixture on
GB200 gained 9.1 % by staying below the memory at which the pass begins (marin-community/marin#8054).

The pass begins at, in bytes of arguments, results and temporaries:

    TPUs  the memory available to programs, as in libtpu's error for a program that is too large
    GPUs  io + 95 % of (pool - io), io = arguments + results; ``xla_gpu_memory_limit_slop_factor`` sets the 95 %. For an
          absent GPU the pool is 80 % of the memory; in a run the pool is JAX's, 75 % of the memory unless
          XLA_PYTHON_CLIENT_MEM_FRACTION is set. For an H100, a program of 60.6 GB had no added instructions, a program
          of 65.6 GB had two; the formula gives 61.2 GB
"""

import re

from xlstm_jax.forecast.hlo.program import Program

MARGIN = 0.05  # distance that a step should keep from the limit, as a fraction of the limit
_COPY = re.compile(r"\.remat(?:_\w+|\d*)(?:\.\d+)*$")
GPU_POOL, GPU_SLOP = 0.8, 0.95


def rematerialized(program: Program) -> dict[str, int]:
    """Returns the instructions that the compiler added to recompute values: {instruction name: executions in a step}.

    {} if the compiler recomputes nothing. Such instructions have ".remat" in their names.
    """
    return {
        instruction.name: trips
        for computation, trips in program.executed()
        for instruction in computation.instructions
        if instruction.is_work and _COPY.search(instruction.name)
    }


def limit_bytes(available_bytes: int, io_bytes: int, *, on_gpu: bool) -> int:
    """Returns the memory of a program, in bytes, at which XLA begins to rematerialize.

    >>> limit_bytes(100, 20, on_gpu=False), limit_bytes(100, 20, on_gpu=True)
    (100, 77)

    TPUs: ``available_bytes``. GPUs: ``io_bytes`` + 95 % of (80 % of ``available_bytes`` - ``io_bytes``).

    Args:
      available_bytes: memory of the device that is available to programs.
      io_bytes: arguments, and results that overwrite no argument.
      on_gpu: whether the device is a GPU.
    """
    if not on_gpu:
        return available_bytes
    return io_bytes + int(GPU_SLOP * max(0.0, GPU_POOL * available_bytes - io_bytes))
