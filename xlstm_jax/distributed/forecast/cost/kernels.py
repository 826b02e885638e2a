"""The least time of what a GPU's schedule runs: each kernel at the roofline of its chip.

    kernel                              max(FLOP / peak rate of its dtype, bytes of HBM / bandwidth)
    loop                                that of its body, as often as it runs; of a conditional the longest branch
    collective                          nothing: it runs beside, or is waited for

    dot, also inside of a fusion        2 x size of the result x length of the contraction
    custom call of cuBLAS               the same
    convolution, custom call of cuDNN   2 x size of its output x values of the kernel for each feature of the output

Other custom calls (attention of cuDNN, kernels of Pallas) do not show their FLOP: they count with their bytes alone.
No kernel reaches its roofline; TPUs need none of this, as their compiler estimates cycles.
"""

import math
import re
from dataclasses import dataclass, field

from xlstm_jax.distributed.forecast.cost.cycles import moved_by
from xlstm_jax.distributed.forecast.hlo.computation import Computation
from xlstm_jax.distributed.forecast.hlo.instruction import COLLECTIVES, Instruction, Shape
from xlstm_jax.distributed.forecast.hlo.program import Program
from xlstm_jax.distributed.hardware.chips import Chip, peak_rate

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r'"?lhs_contracting_dim(?:s=|ension)s?"?[=:]?[{\[]([\d,"\s]*)[}\]]')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w+)->\w+")
_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul")
# Which array is the output of the convolution, and which its kernel, of (operand 0, operand 1, result).
_CUDNN = {
    "__cudnn$convForward": (2, 1),
    "__cudnn$convForwardGraph": (2, 1),
    "__cudnn$convBiasActivationForward": (2, 1),
    "__cudnn$convBackwardInput": (0, 1),
    "__cudnn$convBackwardFilter": (1, 2),
}
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "s8": "int8", "u8": "int8"}


@dataclass(frozen=True)
class Seconds:
    """The time of something that runs: in all, and of it the kernels that hold a matrix product."""

    total: float = 0.0
    products: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.total + other.total, self.products + other.products)

    def __sub__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.total - other.total, self.products - other.products)

    def times(self, count: int) -> "Seconds":
        return Seconds(self.total * count, self.products * count)


@dataclass(frozen=True)
class Kernels:
    """The kernels of a program on a chip."""

    program: Program
    chip: Chip
    _known: dict[str, Seconds] = field(default_factory=dict, repr=False)

    def seconds_of(self, computation: Computation, instruction: Instruction) -> Seconds:
        """The least time of one execution, with all that it calls."""
        opcode = instruction.opcode
        if opcode == "while":
            trips = self.program.trips_of(computation, instruction)
            return sum((self._all_of(name) for name in _called(instruction)), Seconds()).times(trips)
        if opcode == "conditional":
            return max((self._all_of(name) for name in _called(instruction)), key=lambda branch: branch.total)
        if opcode in ("call", "call-start", "async-start"):
            return sum((self._all_of(name) for name in _called(instruction)), Seconds())
        if not instruction.is_work or opcode in COLLECTIVES:
            return Seconds()
        return self._kernel(computation, instruction)

    def _all_of(self, name: str) -> Seconds:
        """The time of a computation that is scheduled."""
        if name not in self._known:
            computation = self.program.computations[name]
            times = (self.seconds_of(computation, instruction) for instruction in computation.instructions)
            self._known[name] = sum(times, Seconds())
        return self._known[name]

    def _kernel(self, computation: Computation, instruction: Instruction) -> Seconds:
        products = self._product_seconds(computation, instruction)
        memory = sum(moved_by(self.program, computation, instruction)) / self.chip.hbm_bandwidth
        seconds = max(products, memory)
        return Seconds(seconds, seconds if products else 0.0)

    def _product_seconds(self, computation: Computation, instruction: Instruction) -> float:
        """The time of the matrix products in an instruction at their peak rates."""
        if instruction.opcode == "fusion":
            inside = [self.program.computations[name] for name in _called(instruction)]
            return sum(self._product_seconds(within, inner) for within in inside for inner in within.instructions)
        if flops := product_flops(computation, instruction):
            (first, *_) = _operand_shapes(computation, instruction)
            return flops / peak_rate(self.chip, _dtype(first))
        return 0.0


def product_flops(computation: Computation, instruction: Instruction) -> int:
    """FLOP of an instruction that is a matrix product or a convolution; 0 of any other."""
    match = _TARGET.search(instruction.attributes) if instruction.opcode == "custom-call" else None
    target = match[1] if match else ""
    if instruction.opcode == "dot" or target.startswith(_CUBLAS):
        return _dot_flops(computation, instruction)
    if instruction.opcode == "convolution" or target in _CUDNN:
        return _convolution_flops(computation, instruction, *_CUDNN.get(target, (2, 1)))
    return 0


def _dot_flops(computation: Computation, instruction: Instruction) -> int:
    left = _operand_shapes(computation, instruction)[0]
    match = _CONTRACTED.search(instruction.attributes)
    dims = [int(dim) for dim in re.findall(r"\d+", match[1])] if match else []
    return 2 * math.prod(instruction.shapes[0].dims) * math.prod(left.dims[dim] for dim in dims)


def _convolution_flops(computation: Computation, instruction: Instruction, output: int, kernel: int) -> int:
    arrays = [*_operand_shapes(computation, instruction)[:2], instruction.shapes[0]]
    labels = _KERNEL_LABELS.search(instruction.attributes)
    features = arrays[kernel].dims[labels[1].index("o")] if labels else 1
    return 2 * math.prod(arrays[output].dims) * math.prod(arrays[kernel].dims) // features


def _operand_shapes(computation: Computation, instruction: Instruction) -> list[Shape]:
    return [computation.by_name[name].shapes[0] for name in instruction.operands]


def _dtype(shape: Shape) -> str:
    return "float8" if shape.dtype.startswith("f8") else _DTYPES.get(shape.dtype, "float32")


def _called(instruction: Instruction) -> list[str]:
    return [name for names in instruction.called.values() for name in names]
