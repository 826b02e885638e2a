"""The work of custom calls that a model brings along: attention of cuDNN, kernels of Pallas. No compiler estimates it.

    attention of cuDNN   b x n x t x s scores, one for each query and key of each head of d features:
                         forward 2 products, 4 x scores x d FLOP; backward 5, as it makes the scores again, or 2.5 x
                         as many; half of both where the mask is causal, and of each row at most a window's width
    kernels of Pallas    the FLOP of the kernel's own jaxpr, once for each point of its grid (see ``flops``)
    any other            is named in a note of the forecast

The formula is that by which "FlashAttention-2" (Dao, 2023, arxiv.org/abs/2307.08691, section 4.1) measures attention.
The bytes of all of them are those of their operands and results, each once, as of any other kernel.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator

from xlstm_jax.distributed.forecast.cost.cycles import HbmBytes, moved_by, scheduled
from xlstm_jax.distributed.forecast.cost.flops import Flops, attention_flops
from xlstm_jax.distributed.forecast.hlo.computation import Computation
from xlstm_jax.distributed.forecast.hlo.instruction import Instruction
from xlstm_jax.distributed.forecast.hlo.program import Program
from xlstm_jax.distributed.hardware.chips import Chip, peak_rate

ATTENTION, PALLAS_ON_TPU = "__cudnn$fmha", "tpu_custom_call"
# Of a compiler's own: products and convolutions, which are counted, and sorts and the like, which memory bounds.
OWN = re.compile(r"__cublas|__cudnn\$(conv|norm)|__cub\$|cub\$|__gpu\$xla|TopK|PartialReduce|X64|[A-Z]\w*$")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SETTINGS = re.compile(r'"(mask_type|sliding_window_length)":\s*"?(\w+)')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*(\[[^\]]*\])')


def target_of(instruction: Instruction) -> str:
    """What a custom call calls; "" of another instruction."""
    match = _TARGET.search(instruction.attributes) if instruction.opcode == "custom-call" else None
    return match[1] if match else ""


def cudnn_attention_flops(computation: Computation, instruction: Instruction) -> int:
    """FLOP of a custom call of cuDNN's attention, forward or backward."""
    scores, settings = _SCORES.search(instruction.attributes), dict(_SETTINGS.findall(instruction.attributes))
    if scores is None:  # fp8 has its own
        return 0
    *heads, queries, keys = map(int, json.loads(scores[1]))
    query, _, value = (computation.by_name[name].shapes[0] for name in instruction.operands[:3])
    features = query.dims[-1], value.dims[-1]
    causal, window = "CAUSAL" in settings.get("mask_type", ""), int(settings.get("sliding_window_length", 0))
    backward = "Backward" in target_of(instruction)
    return attention_flops(math.prod(heads), queries, keys, features, causal=causal, window=window, backward=backward)


def pallas_seconds(program: Program, flops: Flops, chip: Chip) -> float | None:
    """On TPUs: the time of all kernels of Pallas by their roofline; None where there are none.

    The compiler estimates no cycles for them. FLOP are those of the jaxpr, so it is one roofline of all together.
    """
    found = [
        trips * sum(moved_by(program, computation, instruction))
        for computation, trips, instruction in scheduled(program)
        if target_of(instruction) == PALLAS_ON_TPU and instruction.estimated_cycles is None
    ]
    products = sum(count / peak_rate(chip, dtype) for dtype, count in flops.in_kernels.items())
    return max(products, sum(found) / chip.hbm_bandwidth) if found else None


def unknown_calls(program: Program, moved: HbmBytes) -> Iterator[str]:
    """A sentence for each custom call that is not known: its work counts as nothing, which makes a share uncertain."""
    calls: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for computation, trips, instruction in scheduled(program):
        target = target_of(instruction)
        if not target or not instruction.is_work or instruction.estimated_cycles is not None or is_known(target):
            continue
        calls[target][0] += trips
        calls[target][1] += trips * sum(moved_by(program, computation, instruction))
    for target, (count, nbytes) in calls.items():
        share = nbytes / moved.total if moved.total else 0.0
        yield (
            f"Custom call {target!r}, {count:,} in a step: its work is counted as nothing, as it is not known here. "
            f"The arrays that it reads and writes are {share:.0%} of the bytes that the step moves: at least so much "
            "of the step is uncertain."
        )


def is_known(target: str) -> bool:
    """Whether the work of a custom call is counted, or is a compiler's own."""
    return target.startswith((ATTENTION, PALLAS_ON_TPU)) or bool(OWN.match(target))
