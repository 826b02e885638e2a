"""FLOP of a step, counted in its jaxpr: by module and by direction (forward, backward, recompute).

``compiled.cost_analysis()`` counts the body of a loop once. The jaxpr has the number of trips:

    step.trace(*abstract_args).jaxpr    -- count_flops -->    Flops: 2 for each multiply-add, per device

Only matrix products and convolutions count, including those in Pallas kernels and in cuDNN's attention, because the
peak rates of chips refer to them. A Pallas kernel counts at every point of its grid, even at points that a mask skips.
Elementwise work, reductions, gathers and sorts do not count: memory bounds them, not arithmetic. Work that no output
needs does not count either, such as the value of a loss when only its gradient is used.

A product has the dtype of its wider operand, so a product with a single 8-bit operand does not run at the 8-bit rate
(see ``peak_rate``). An array rounded to float8 and widened again before the product, as in Flax's Fp8DotGeneralOp,
counts as wide: for NVIDIA's GPUs XLA drops both casts and multiplies in bfloat16.

Inside of ``shard_map`` shapes are local. Outside, shapes are global, and the work is assumed to be spread evenly over
the devices, which holds if every operand is sharded over the full mesh.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xlstm_jax.equations import name_and_params, nested_jaxprs
from xlstm_jax.forecast.hlo.op_names import in_shard_map, module_paths
from xlstm_jax.private_names import core

# Operations that may contain matrix products, which the jaxpr does not show.
OPAQUE = {"cholesky", "custom_linear_solve", "eig", "eigh", "fft", "ffi_call", "hessenberg", "householder_product"}
OPAQUE |= {"io_callback", "lu", "pure_callback", "qr", "schur", "svd", "triangular_solve", "tridiagonal"}
OPAQUE |= {"tridiagonal_solve"}
# FLOP by (operation name, dtype, whether the operation is inside of a Pallas kernel)
Counts = dict[tuple[str, str, bool], float]
BACKWARD = 2.5  # ratio of attention's products, backward to forward: 5 (including recomputed scores) to 2


@dataclass(frozen=True)
class Work:
    """FLOP per device and step by module, direction and dtype of the wider operand; path "" is outside of modules."""

    path: str
    direction: str
    dtype: str
    flops: float


@dataclass(frozen=True)
class Flops:
    """FLOP of matrix products and convolutions per device and step.

    Attributes:
      work: entries by module, direction and dtype, largest first.
      unknown_loops: names of ``while`` loops that contain products and whose length depends on values; each counts as
        one trip.
      opaque: names of operations with unknown FLOP, which are not counted: solvers, custom calls.
      shared: part of the total outside of ``shard_map``, which the compiler distributes over devices if it can.
      in_kernels: part of the total inside of Pallas kernels, by dtype.
      scores_bytes: for modules whose attention materializes the array of scores (query x key): bytes of the largest
        such array on a device, by module path. Attention kernels hold only a block of scores at a time and have no
        entry.
      scores_bytes_per_step: for the same modules: bytes of scores that the forward passes of a step compute on a
        device, over all layers and minibatches.
    """

    work: tuple[Work, ...]
    unknown_loops: tuple[str, ...]
    opaque: tuple[str, ...]
    shared: float = 0.0
    in_kernels: dict[str, float] = field(default_factory=dict)
    scores_bytes: dict[str, float] = field(default_factory=dict)
    scores_bytes_per_step: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(work.flops for work in self.work)

    def by_module(self) -> dict[str, float]:
        return self._sums("path")

    def by_direction(self) -> dict[str, float]:
        """Returns FLOP by direction ("forward", "backward", "recompute", "other", as far as present), largest first."""
        return self._sums("direction")

    def by_dtype(self) -> dict[str, float]:
        return self._sums("dtype")

    def _sums(self, key: str) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for work in self.work:
            sums[getattr(work, key)] += work.flops
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def count_flops(jaxpr: Any, num_devices: int = 1) -> Flops:
    """Counts the FLOP of one step per device.

    Args:
      jaxpr: jaxpr of the step, as ``step.trace(*args).jaxpr``; the arguments and their mesh may be abstract.
      num_devices: number of devices in the mesh.
    Returns:
      The counts, loops of known length multiplied out; a ``cond`` counts its branch with the most FLOP.
    """
    seen = _Seen()
    counted = _flops_of(jaxpr, "jit(step)", seen)
    # Scores may be in a branch of a cond whose products do not count, because another branch has more FLOP.
    paths = module_paths([*(name for name, *_ in counted), *(name for name, *_ in seen.pairs)])
    sums: dict[tuple[str, str, str], float] = defaultdict(float)
    in_kernels: dict[str, float] = defaultdict(float)
    for (name, dtype, in_kernel), flops in counted.items():
        sums[(*paths[name], dtype)] += flops / num_devices
        if in_kernel:
            in_kernels[dtype] += flops / num_devices
    work = [Work(*key, flops) for key, flops in sorted(sums.items(), key=lambda item: -item[1])]
    # Counts inside of `shard_map` are also for all devices (see `RUNS`), so both are divided by their number.
    shared = sum(flops for (name, *_), flops in counted.items() if not in_shard_map(name)) / num_devices
    scores: dict[str, float] = defaultdict(float)
    scores_per_step: dict[str, float] = defaultdict(float)
    for name, array, _, runs in (seen.pairs[i] for i in seen.summed & seen.weighing):
        path = paths[name][0]
        on_a_device = array.size * array.dtype.itemsize / (1 if in_shard_map(name) else num_devices)
        scores[path] = max(scores[path], on_a_device)
        scores_per_step[path] += runs * on_a_device
    loops, opaque = (tuple(dict.fromkeys(names)) for names in (seen.loops, seen.opaque))
    return Flops(tuple(work), loops, opaque, shared, dict(in_kernels), dict(scores), dict(scores_per_step))


@dataclass(frozen=True)
class _Seen:
    """Findings of a walk over a jaxpr besides FLOP: operation names, and arrays that may be attention scores.

    Scores are the product of queries and keys: their exponential is summed (softmax), and the result weighs values in
    a product that contracts the token dim. Only the forward pass counts, because the gradient of logits is a similar
    product.
    """

    loops: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    # Name and type of a product, numbers of queries and keys, and runs in a step.
    pairs: list[tuple[str, Any, set[int], int]] = field(default_factory=list)
    scans: list[int] = field(default_factory=list)  # lengths of the scans around the current operation
    # By variable: the index in `pairs` of each array from which the variable is computed, and whether through an exp.
    stems: dict[Any, set[tuple[int, bool]]] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)
    weighing: set[int] = field(default_factory=set)

    def of(self, variables: Sequence[Any]) -> list[set[tuple[int, bool]]]:
        return [set() if isinstance(v, core.Literal) else self.stems.get(v, set()) for v in variables]

    def follow(self, eqn: Any, name: str) -> None:
        """Records whether an equation computes or uses attention scores; called for each equation of a jaxpr, in order.

        A batched product that may compute scores (queries x keys) is appended to ``pairs``. Its output is followed
        through later equations whose outputs have the same size, up to the next product. If the exponential of the
        output is summed (softmax), the index of the product in ``pairs`` is added to ``summed``. If a product that
        contracts the queries or the keys reads the exponential, the index is added to ``weighing``. Equations of the
        backward pass add nothing to ``summed`` and ``weighing``. ``name`` is JAX's name of the operation, with its
        direction.
        """
        stems = set().union(*self.of(eqn.invars))
        exponentials = {i for i, by_exp in stems if by_exp and "transpose(" not in name}
        if eqn.primitive.name == "reduce_sum":
            self.summed.update(exponentials)
        if eqn.primitive.name == "dot_general":
            self.weighing.update(i for i in exponentials if _contracted_size(eqn) in self.pairs[i][2])
            stems = set()
            if sides := _sides_of_pairs(eqn):
                stems = {(len(self.pairs), False)}
                self.pairs.append((name, eqn.outvars[0].aval, sides, math.prod(self.scans)))
        if eqn.primitive.name == "exp":
            stems = {(i, True) for i, _ in stems}
        if any(nested_jaxprs(eqn)):
            stems = set()  # `copy_stems` sets the stems of the outputs
        for v in eqn.outvars:
            self.stems[v] = {stem for stem in stems if self.pairs[stem[0]][1].size == getattr(v.aval, "size", None)}

    def copy_stems(self, outer: Sequence[Any], inner: Sequence[Any], *, out: bool = False) -> None:
        """Copies ``stems`` (for each variable the products that it is computed from) into or out of a nested jaxpr.

        ``out=False``: from the operands ``outer`` of an operation to the inputs ``inner`` of its jaxpr. ``out=True``:
        from the outputs ``inner`` of the jaxpr to the results ``outer`` of the operation, in addition to present stems
        of the results. Both lists are paired from the end: an operation may have more leading operands than its jaxpr
        has inputs.
        """
        # Aligned at the end: extra leading operands are a branch index, or values that a loop closes over.
        for v, w in zip(reversed(outer), reversed(inner), strict=False):
            target, source = (v, w) if out else (w, v)
            self.stems[target] = (self.of([target])[0] if out else set()) | self.of([source])[0]


def _flops_of(jaxpr: Any, prefix: str, seen: _Seen) -> Counts:
    """Returns the FLOP of a jaxpr's products and convolutions, summed over all devices, nested jaxprs x runs included.

    Keys are (operation name, dtype of the wider operand, whether the operation is in a Pallas kernel). A name begins
    with ``prefix`` and ends with the primitive. Work in ``shard_map``, where shapes are local, is multiplied by the
    number of devices. Of a ``cond`` the branch with the most FLOP counts. Loops of unknown length, operations with
    unknown FLOP, and possible attention scores are added to ``seen``.
    """
    counted: Counts = defaultdict(float)
    for eqn in _live(jaxpr):
        primitive = eqn.primitive.name
        name = "/".join(filter(None, (prefix, str(eqn.source_info.name_stack))))
        inside: Counts = {}
        seen.follow(eqn, f"{name}/{primitive}")
        if primitive in FORMULAS:
            dtype = max((v.aval.dtype for v in eqn.invars[:2]), key=lambda dtype: dtype.itemsize).name
            inside = {(f"{name}/{primitive}", dtype, False): FORMULAS[primitive](eqn)}
        elif primitive in OPAQUE:
            seen.opaque.append(f"{name}/{primitive}")
        elif primitive == "cond":
            # One branch runs; take the one with the most FLOP: an upper bound, except for loops of unknown length.
            branches = [_within(eqn, branch, f"{name}/cond/branch_0_fun", seen) for branch in eqn.params["branches"]]
            inside = max(branches, key=lambda branch: sum(branch.values()))
        else:
            inside = _flops_inside(eqn, name, seen)
        for key, flops in inside.items():
            counted[key] += flops
    return counted


def _within(eqn: Any, jaxpr: Any, prefix: str, seen: _Seen) -> Counts:
    # Stems go into the inner jaxpr before the walk, and out of it afterwards.
    seen.copy_stems(eqn.invars, jaxpr.invars)
    counted = _flops_of(jaxpr, prefix, seen)
    seen.copy_stems(eqn.outvars, jaxpr.outvars, out=True)
    return counted


def _live(jaxpr: Any) -> list[Any]:
    """Returns the equations of a jaxpr that have effects or compute something for the outputs, in order.

    The compiler drops all other equations.
    """
    needed, live = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, core.Literal))
            live.append(eqn)
    return live[::-1]


def _flops_inside(eqn: Any, name: str, seen: _Seen) -> Counts:
    """Returns the FLOP of the jaxprs nested in the operation ``eqn``, times their runs; {} for most operations.

    Keys are those of ``_flops_of``: (operation name, dtype, whether in a Pallas kernel). ``name`` is the name of the
    operation, without the primitive. A ``while``, or a Pallas kernel whose grid depends on values, counts as one run,
    and is added to ``seen.loops`` if it has FLOP.
    """
    kind = name_and_params(eqn)[0]
    scope, times = RUNS[kind](eqn) if kind in RUNS else ("", 1)
    if eqn.primitive.name == "pallas_call":
        seen = _Seen(seen.loops, seen.opaque)  # a kernel's arrays are blocks, which are never in HBM
    counted: Counts = defaultdict(float)
    lengths = [eqn.params["length"]] if eqn.primitive.name == "scan" else []
    seen.scans.extend(lengths)
    for jaxpr in nested_jaxprs(eqn):
        for (path, dtype, in_kernel), flops in _within(eqn, jaxpr, f"{name}/{scope}".rstrip("/"), seen).items():
            counted[path, dtype, in_kernel or eqn.primitive.name == "pallas_call"] += flops * (times or 1)
    del seen.scans[len(seen.scans) - len(lengths) :]
    if times is None and counted:
        seen.loops.append(f"{name}/{eqn.primitive.name}")
    return counted


# ------------------------------- name scope inside of an operation, and the number of its runs (None where unknown)


RUNS: dict[str, Callable[[Any], tuple[str, int | None]]] = {
    "jit": lambda eqn: (f"jit({eqn.params['name']})", 1),
    "remat2": lambda eqn: ("checkpoint", 1),  # jax.checkpoint, nn.remat
    "scan": lambda eqn: ("while/body", eqn.params["length"]),
    "while": lambda eqn: ("while/body", None),
    # The inner work is local; multiplied by the devices that split the shapes, it is the work of all devices.
    "shard_map": lambda eqn: (
        "shard_map",
        math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"]),
    ),
    "pallas_call": lambda eqn: (
        "",
        None if eqn.params["grid_mapping"].num_dynamic_grid_bounds else math.prod(eqn.params["grid_mapping"].grid),
    ),
}


# ------------------------------------------------------------------------------------------------ FLOP of one operation


def _contracted_size(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)


def _sides_of_pairs(eqn: Any) -> set[int]:
    """Returns {number of queries, number of keys} of a ``dot_general`` that may compute attention scores; else set().

    The numbers are the products of each operand's dims without batch and contracted dims. The product may compute
    scores if it has a batch dim, and if both numbers exceed the contracted size (the features of a query): true for
    long sequences. If both numbers are equal, the set has one element.
    """
    contracted, batches = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    sides = {
        math.prod(size for dim, size in enumerate(shape) if dim not in {*used, *batch})
        for shape, used, batch in zip(shapes, contracted, batches, strict=True)
    }
    return sides if batches[0] and min(sides) > _contracted_size(eqn) else set()


def _ragged_dot_general(eqn: Any) -> int:
    """Returns the FLOP of a ``ragged_dot_general`` in a jaxpr: 2 x size of the left operand x output features.

    Each row of the left operand is multiplied by the matrix of a single group, so the number of groups does not count.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    out = {*range(eqn.invars[1].aval.ndim)} - {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2 * eqn.invars[0].aval.size * math.prod(eqn.invars[1].aval.shape[dim] for dim in out)


def _conv_general_dilated(eqn: Any) -> int:
    """Returns the FLOP of a convolution in a jaxpr: 2 x batch x output features x input features of a group x taps.

    A tap on padding or between dilated values does not count. The formula covers groups of features and groups of the
    batch: the input features of the right operand are the features of one group, and each output feature of the right
    operand is computed once for every example in the output.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    left, right, out = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    taps = [
        window_taps(left[i], right[j], out[k], *settings)
        for i, j, k, *settings in zip(
            numbers.lhs_spec[2:],
            numbers.rhs_spec[2:],
            numbers.out_spec[2:],
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    ]
    out_batch, out_features, in_features = out[numbers.out_spec[0]], *(right[d] for d in numbers.rhs_spec[:2])
    return 2 * out_batch * out_features * in_features * math.prod(taps)


def window_taps(
    size: int, window: int, out: int, stride: int, padding: tuple[int, int], dilation: int, window_dilation: int
) -> int:
    """Returns the taps of a convolution along one dim: the number of pairs of an output and a window position.

    Only window positions on an input value count. Positions on padding, or between dilated input values, do not count.

    Args:
      size: length of the input, without padding and dilation.
      window: length of the window.
      out: length of the output.
      stride: step of the window from an output to the next.
      padding: positions before the first and behind the last input value; only the first matters, given ``out``.
      dilation: distance of neighbouring input values, 1 without dilation.
      window_dilation: distance of neighbouring positions of the window, 1 without dilation.
    """
    # Positions before the first value and behind the last are padding; positions between two values are dilation.
    position = np.arange(out)[:, None] * stride + np.arange(window) * window_dilation - padding[0]
    return int(((position >= 0) & (position <= (size - 1) * dilation) & (position % dilation == 0)).sum())


def attention_flops(
    heads: int, queries: int, keys: int, features: tuple[int, int], *, causal: bool, window: int, backward: bool
) -> int:
    """Returns the FLOP of the forward pass, or of the backward pass, of fused attention, for all heads and sequences.

    Forward: 2 x heads x scores of a head x sum of ``features``. Backward: 2.5 times as many.

    Args:
      heads: heads of all sequences of the batch, batch x heads of a sequence.
      queries, keys: tokens of a sequence; there are queries x keys scores in a head.
      features: sizes of a query and of a value.
      causal: whether only half of the scores count.
      window: maximum number of scores for a query; 0: no limit.
      backward: True: the FLOP of the backward pass alone; False: of the forward pass alone.
    """
    scores = queries * keys / (2 if causal else 1)
    scores = min(scores, queries * window) if window else scores
    return int((BACKWARD if backward else 1) * 2 * heads * scores * sum(features))


def _cudnn_attention(eqn: Any) -> int:
    """Returns the FLOP of cuDNN's attention in a jaxpr, forward or backward, for all heads and sequences.

    Queries, keys and values are [b, t, n, d] or, if the parameter ``layout`` of the operation is 1, [b, n, t, d].
    """
    # Heads may share keys and values, so the query's heads count.
    query, key, value = (v.aval.shape for v in eqn.invars[:3])
    long, head = (2, 1) if eqn.params["layout"] else (1, 2)
    return attention_flops(
        query[0] * query[head],
        query[long],
        key[long],
        (query[3], value[3]),
        causal="CAUSAL" in str(getattr(eqn.params["mask_type"], "name", "")),
        window=eqn.params["sliding_window_length"] or 0,
        backward="bwd" in eqn.primitive.name,
    )


FORMULAS = {
    "dot_product_attention_fwd_wrapper": _cudnn_attention,
    "dot_product_attention_bwd_wrapper": _cudnn_attention,
    "dot_general": lambda eqn: 2 * eqn.outvars[0].aval.size * _contracted_size(eqn),
    "ragged_dot_general": _ragged_dot_general,
    "conv_general_dilated": _conv_general_dilated,
}
