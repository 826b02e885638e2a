"""The FLOP of a compiled program's matrix products, instruction by instruction: what one device does.

    dot, also inside of a fusion   2 x size of the result x length of the contraction
    custom call of cuBLAS          the same
    convolution                    2 x size of the result x features in x taps on a value, not on padding or dilation
    custom call of cuDNN           2 x size of its output x values of the kernel for each feature of the output

TPUs' programs have convolutions for all of these. A batch of products is one along a dim that is dilated so that each
window holds one value. Attention of cuDNN counts by the formula of ``custom_calls``; kernels of Pallas do not
show their FLOP.
"""

import math
import re
from collections.abc import Callable

from xlstm_jax.distributed.forecast.cost.custom_calls import ATTENTION, cudnn_attention_flops, target_of
from xlstm_jax.distributed.forecast.cost.flops import window_taps
from xlstm_jax.distributed.forecast.hlo.computation import Computation
from xlstm_jax.distributed.forecast.hlo.instruction import Instruction, Shape
from xlstm_jax.distributed.forecast.hlo.program import Program

_CONTRACTED = re.compile(r'"?lhs_contracting_dim(?:s=|ension)s?"?[=:]?[{\[]([\d,"\s]*)[}\]]')
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul")
# Which array is the output of the convolution, and which its kernel, of (operand 0, operand 1, result).
_CUDNN = {
    "__cudnn$convForward": (2, 1),
    "__cudnn$convForwardGraph": (2, 1),
    "__cudnn$convBiasActivationForward": (2, 1),
    "__cudnn$convBackwardInput": (0, 1),
    "__cudnn$convBackwardFilter": (1, 2),
}


def executed_flops(program: Program, counts: Callable[[Instruction], bool]) -> float:
    """FLOP per device and step of the matrix products that ``counts`` is true of, loops multiplied out."""
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
    """FLOP of an instruction that is a matrix product or a convolution; 0 of any other."""
    target = target_of(instruction)
    if target.startswith(ATTENTION):
        return cudnn_attention_flops(computation, instruction)
    if instruction.opcode == "dot" or target.startswith(_CUBLAS):
        return _dot_flops(computation, instruction)
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    return _cudnn_flops(computation, instruction, *_CUDNN[target]) if target in _CUDNN else 0


def _dot_flops(computation: Computation, instruction: Instruction) -> int:
    left = operand_shapes(computation, instruction)[0]
    match = _CONTRACTED.search(instruction.attributes)
    dims = [int(dim) for dim in re.findall(r"\d+", match[1])] if match else []
    return 2 * math.prod(instruction.shapes[0].dims) * math.prod(left.dims[dim] for dim in dims)


def _convolution_flops(computation: Computation, instruction: Instruction) -> int:
    left, kernel, out = (*operand_shapes(computation, instruction)[:2], instruction.shapes[0])
    labels = _DIM_LABELS.search(instruction.attributes)
    assert labels  # every convolution has them
    of_left, of_kernel, of_out = (
        dict(zip(names, shape.dims, strict=True))
        for names, shape in zip(labels.groups(), (left, kernel, out), strict=True)
    )
    window = _window(instruction)
    found = 2 * of_out["b"] * of_out["f"] * of_kernel["i"]
    for place, dim in enumerate(sorted(of_out.keys() - {"b", "f"})):
        one = {name: values[place] for name, values in window.items()}
        low, high = map(int, one.get("pad", "0_0").split("_"))
        stride, dilation, apart = (int(one.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        found *= window_taps(of_left[dim], of_kernel[dim], of_out[dim], stride, (low, high), dilation, apart)
    return found


def _window(instruction: Instruction) -> dict[str, list[str]]:
    """``window={size=3x3 pad=1_1x1_1}`` as {"size": ["3", "3"], "pad": ["1_1", "1_1"]}."""
    match = _WINDOW.search(instruction.attributes)
    pairs = [entry.split("=") for entry in match[1].split()] if match else []
    return {name: values.split("x") for name, values in pairs}


def _cudnn_flops(computation: Computation, instruction: Instruction, output: int, kernel: int) -> int:
    arrays = [*operand_shapes(computation, instruction)[:2], instruction.shapes[0]]
    labels = _DIM_LABELS.search(instruction.attributes)
    features = arrays[kernel].dims[labels[2].index("o")] if labels else 1
    return 2 * math.prod(arrays[output].dims) * math.prod(arrays[kernel].dims) // features


def operand_shapes(computation: Computation, instruction: Instruction) -> list[Shape]:
    """Of each operand, the first of a tuple."""
    return [computation.by_name[name].shapes[0] for name in instruction.operands]
