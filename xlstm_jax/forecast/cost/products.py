"""FLOP of a compiled program's matrix products on one device, instruction by instruction.

    dot, also inside of a fusion   2 x size of the result x length of the contraction
    custom call of cuBLAS          the same
    convolution                    2 x size of the result x features in x taps on a value, not on padding or dilation
    custom call of cuDNN           2 x size of its output x values of the kernel for each feature of the output
    attention of cuDNN             b x n x t x s scores, one for each query and key of each head of d features:
                                   forward 2 products, 4 x scores x d FLOP; backward 5 products (scores are computed
                                   again), 2.5 x as many FLOP; half of both for a causal mask, and in each row at most
                                   a window's width
    Pallas kernels                 the FLOP of the kernel's jaxpr, once for each point of its grid (see ``flops``)
    any other custom call          no FLOP; a note of the forecast names the call

TPU programs use convolutions for the first four. A batched product is a convolution along a dilated dim, so that each
window holds one value. The attention formula is the one of "FlashAttention-2" (Dao, 2023, arxiv.org/abs/2307.08691,
section 4.1). No compiler estimates the time of a model's custom calls. As for any other kernel, their bytes are
operands and results, each counted once.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator

from xlstm_jax.forecast.cost.cycles import HbmBytes, moved_by, scheduled
from xlstm_jax.forecast.cost.flops import Flops, attention_flops, window_taps
from xlstm_jax.forecast.hardware.chips import Chip, peak_rate
from xlstm_jax.forecast.hlo.instruction import Instruction, Shape
from xlstm_jax.forecast.hlo.program import Computation, Program
from xlstm_jax.forecast.hlo.text import integers

_CONTRACTED = re.compile(r'"?lhs_contracting_dim(?:s=|ension)s?"?[=:]?[{\[]([\d,"\s]*)[}\]]')
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul")
# Indices of the convolution's output and kernel in (operand 0, operand 1, result).
_CUDNN = {
    "__cudnn$convForward": (2, 1),
    "__cudnn$convForwardGraph": (2, 1),
    "__cudnn$convBiasActivationForward": (2, 1),
    "__cudnn$convBackwardInput": (0, 1),
    "__cudnn$convBackwardFilter": (1, 2),
}
ATTENTION, PALLAS_ON_TPU = "__cudnn$fmha", "tpu_custom_call"
# Custom calls of the compiler itself: products and convolutions, which are counted, and memory-bound sorts etc.
COMPILER_TARGETS = re.compile(
    r"__cublas|__cudnn\$(conv|norm)|__cub\$|cub\$|__gpu\$xla|TopK|PartialReduce|X64|[A-Z]\w*$"
)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SETTINGS = re.compile(r'"(mask_type|sliding_window_length)":\s*"?(\w+)')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*(\[[^\]]*\])')


def executed_flops(program: Program, counts: Callable[[Instruction], bool]) -> float:
    """Returns the FLOP per device and step of the products for which ``counts`` returns True, loops multiplied out.

    ``counts`` is called with every executed instruction, also inside of fusions; instructions that are no products have
    0 FLOP.
    """
    return float(
        sum(
            trips * product_flops(within, instruction)
            for computation, trips in program.executed()
            for outer in computation.instructions
            for within, instruction in program.with_fused(computation, outer)
            if counts(instruction)
        )
    )


def product_flops(computation: Computation, instruction: Instruction) -> int:
    """Returns the FLOP of one execution of a product, convolution or cuDNN attention; 0 for any other instruction.

    A product is a ``dot`` or a custom call of cuBLAS or cuDNN. A fusion counts 0: its products lie inside.
    ``computation`` contains the instruction and its operands.
    """
    target = target_of(instruction)
    if target.startswith(ATTENTION):
        return cudnn_attention_flops(computation, instruction)
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    if instruction.opcode == "dot" or target.startswith(_CUBLAS):
        left, match = operand_shapes(computation, instruction)[0], _CONTRACTED.search(instruction.attributes)
        contracted = integers(match[1]) if match else ()
        return 2 * math.prod(instruction.shapes[0].dims) * math.prod(left.dims[dim] for dim in contracted)
    if target not in _CUDNN:
        return 0
    # Each value of the output sums over the values of the kernel for one feature.
    output, kernel = _CUDNN[target]
    arrays = [*operand_shapes(computation, instruction)[:2], instruction.shapes[0]]
    labels = _DIM_LABELS.search(instruction.attributes)
    features = arrays[kernel].dims[labels[2].index("o")] if labels else 1
    return 2 * math.prod(arrays[output].dims) * math.prod(arrays[kernel].dims) // features


def _convolution_flops(computation: Computation, instruction: Instruction) -> int:
    """Returns the FLOP of a ``convolution``: 2 x batch x output features x input features of a group x taps.

    Taps are pairs of an output position and a window position on an input value; positions on padding or between
    dilated values do not count. ``computation`` contains the instruction and its operands.
    """
    left, kernel, out = (*operand_shapes(computation, instruction)[:2], instruction.shapes[0])
    labels = _DIM_LABELS.search(instruction.attributes)
    assert labels  # every convolution has them
    of_left, of_kernel, of_out = (
        dict(zip(names, shape.dims, strict=True))
        for names, shape in zip(labels.groups(), (left, kernel, out), strict=True)
    )
    # window={size=3x3 pad=1_1x1_1} is {"size": ["3", "3"], "pad": ["1_1", "1_1"]}.
    described = _WINDOW.search(instruction.attributes)
    entries = [entry.split("=") for entry in described[1].split()] if described else []
    window = {name: values.split("x") for name, values in entries}
    # Times the taps of each dim of the window, below.
    flops = 2 * of_out["b"] * of_out["f"] * of_kernel["i"]
    for place, dim in enumerate(sorted(of_out.keys() - {"b", "f"})):
        along = {name: values[place] for name, values in window.items()}
        low, high = map(int, along.get("pad", "0_0").split("_"))
        stride, dilation, apart = (int(along.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        flops *= window_taps(of_left[dim], of_kernel[dim], of_out[dim], stride, (low, high), dilation, apart)
    return flops


def operand_shapes(computation: Computation, instruction: Instruction) -> list[Shape]:
    """Returns the shape of each operand, in order; for a tuple, the shape of its first element."""
    return [computation.by_name[name].shapes[0] for name in instruction.operands]


# ------------------------------------------------------------------------------- custom calls that a model brings along


def target_of(instruction: Instruction) -> str:
    """Returns the ``custom_call_target`` of a custom call, such as "tpu_custom_call"; "" for any other instruction."""
    match = _TARGET.search(instruction.attributes) if instruction.opcode == "custom-call" else None
    return match[1] if match else ""


def cudnn_attention_flops(computation: Computation, instruction: Instruction) -> int:
    """Returns the FLOP of a custom call of cuDNN's attention, forward or backward, for all heads and sequences.

    0 for attention in fp8, whose call does not list the size of the scores. ``computation`` contains the call.
    """
    scores, settings = _SCORES.search(instruction.attributes), dict(_SETTINGS.findall(instruction.attributes))
    if scores is None:  # fp8 attention has another format
        return 0
    *heads, queries, keys = map(int, json.loads(scores[1]))
    query, _, value = (computation.by_name[name].shapes[0] for name in instruction.operands[:3])
    # In the forward pass the first product contracts query features, and the second has value features as output.
    features = query.dims[-1], value.dims[-1]
    causal, window = "CAUSAL" in settings.get("mask_type", ""), int(settings.get("sliding_window_length", 0))
    backward = "Backward" in target_of(instruction)
    return attention_flops(math.prod(heads), queries, keys, features, causal=causal, window=window, backward=backward)


def pallas_seconds(program: Program, flops: Flops, chip: Chip) -> float | None:
    """Returns the seconds that Pallas kernels on TPUs take in a step, by a roofline; None for a program without them.

    The result is the larger of two times of all kernels together: their FLOP (``flops.in_kernels``, counted in the
    jaxpr) at the chip's rates, and their operands and results at HBM's rate. The compiler estimates no cycles for
    Pallas kernels.
    """
    # XLA's internal kernels have an estimate. The model's kernels have none, and are timed here.
    moved = [
        trips * sum(moved_by(program, computation, instruction))
        for computation, trips, instruction in scheduled(program)
        if target_of(instruction) == PALLAS_ON_TPU and instruction.estimated_cycles is None
    ]
    products = sum(count / peak_rate(chip, dtype) for dtype, count in flops.in_kernels.items())
    return max(products, sum(moved) / chip.hbm_bandwidth) if moved else None


def unknown_calls(program: Program, moved: HbmBytes) -> Iterator[str]:
    """Yields a sentence for each ``custom_call_target`` whose calls do work that the forecast counts as zero.

    The work is unknown: the compiler gives no cycles, and ``is_known`` is False. The sentence has the number of calls
    in a step, and their share of ``moved``, the HBM bytes of the step.
    """
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
            f"Custom call {target!r}, {count:,} in a step: its work is unknown and counts as zero. The call moves "
            f"{share:.0%} of the bytes that the step moves, so at least this share of the step is uncertain."
        )


def is_known(target: str) -> bool:
    """Returns whether the forecast counts the work of custom calls with the ``custom_call_target`` ``target``.

    True also for calls that the compiler itself adds.
    """
    return target.startswith((ATTENTION, PALLAS_ON_TPU)) or bool(COMPILER_TARGETS.match(target))
