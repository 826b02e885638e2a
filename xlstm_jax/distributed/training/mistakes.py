"""Checks that warn of probable mistakes in a training program, such as parameters that no wrapper splits.

  create_train_state   checks the optimizer's parts on the shapes of the parameters, and the share of split parameters
  a step's trace       checks the same with the options of the step; its axes; its averages
  a step's call        checks padded rows and their weights

A certain mistake raises an error. A possible mistake warns, once per process. A mesh of a single device cannot split
anything, so warnings about splits are skipped.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_box, leaf_of
from xlstm_jax.distributed.data_parallel.modules import Stacks
from xlstm_jax.distributed.data_parallel.modules.holders import recording_holders
from xlstm_jax.distributed.data_parallel.policy import DEFAULT_MIN_WEIGHT_SIZE
from xlstm_jax.distributed.data_parallel.reasons import Indivisible, Reason, TooSmall, Unwrapped
from xlstm_jax.distributed.data_parallel.wire.collectives import value_dtype
from xlstm_jax.distributed.device_mesh.batch_layout import BatchLayout
from xlstm_jax.distributed.device_mesh.batches import padded_rows_of
from xlstm_jax.distributed.optimizers.learning_rate import LearningRate
from xlstm_jax.distributed.optimizers.sharded_optimizer import trainable
from xlstm_jax.distributed.optimizers.transforms import (
    Part,
    decay_mask,
    parts,
    schedules,
)
from xlstm_jax.distributed.training.arguments import collections_of
from xlstm_jax.distributed.training.moments import CreatedState, TracedStep
from xlstm_jax.distributed.training.varying import all_named_axes
from xlstm_jax.formatting import format_bytes, format_fraction, format_mesh, joined, listed
from xlstm_jax.introspection import warn_user
from xlstm_jax.private_names import core

LARGEST = 3  # number of replicated parameters to name
MOST_REPLICATED = 0.05  # share of the parameters' bytes from which replicated parameters warn
FEW_BYTES = 2**16  # replicated bytes below which splitting would save next to nothing: toys, and their biases
AnyMesh = Mesh | AbstractMesh
COUNTS = (0, 1, 10, 100, 1000, 10_000, 100_000)  # update counts at which schedules are compared
NO_DECAY = frozenset({"bias", "scale"})  # names of parameters that rarely should decay
LOOKS_REDUCED = re.compile(
    r"max|min|sum|total|count|num|tokens|ppl|perplex|exp|norm|std|largest|smallest|worst|peak", re.I
)
LOOKS_LIKE_WEIGHTS = re.compile(r"weight|mask|valid|pad|length|segment", re.I)
PASSED_ON = {"convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "copy", "pvary", "pcast"}
CELLS = "of xlstm_jax.distributed.metrics.cells"
REDUCED = {  # primitive that makes an auxiliary float: its name for the warning, and the value to return instead
    "reduce_max": ("the largest", f"Return Maximum.of(x) {CELLS}"),
    "reduce_min": ("the smallest", f"Return Minimum.of(x) {CELLS}"),
    "reduce_sum": ("the sum", f"Return Total.of(x), or of integers Count.of(x), {CELLS}"),
    "exp": ("the exponential", "Return the mean itself, and take its exponential of the metrics"),
    "sqrt": ("the root", "Return the mean of squares, and take its root of the metrics"),
}
CURES: dict[type[Reason], str] = {
    Unwrapped: "Wrap the modules that own them with shard_module_params, or choose them by shard_modules.",
    TooSmall: "Lower min_weight_size of the wrapper.",
    Indivisible: "Pass uneven='pad' to the wrapper, or choose another mesh.",
}
WEIGHED = "Return the sum of losses times batch['weight'], and the sum of the weights, with weighted=True."
COUNTING = {  # kind of value that counts padded rows: its description for the warning, and the cure
    "loss": ("the loss is computed without the weights of rows", WEIGHED),
    "mean of local means": (
        "the loss is the mean of the devices' means, and devices hold different numbers of rows of weight 1",
        WEIGHED,
    ),
    "weight of the loss": (
        "the weight of the loss is computed without the weights of rows",
        "Return jnp.sum(batch['weight']) as the weight.",
    ),
    "aux": (
        "beside the loss{} is computed without the weights of rows",
        "Multiply the number of each row by its weight; of counts and sums make Total.of(x, weight).",
    ),
    "metric": (
        "the metric{} gets no weights of rows",
        "Pass them on: metric.update(..., weight=batch['weight']).",
    ),
    "statistic": (
        "the loss depends on a sum over the rows of all devices without their weights",
        "Weigh the rows in it; or train on batches that the devices divide, without the last rows of an epoch.",
    ),
    "comparison": (
        "the loss compares rows of all devices, copies among them, without their weights",
        "Gather the weights too, and leave out rows of weight 0; or train on batches that the devices divide.",
    ),
    "collection": (
        "the collections{} are computed without the weights of rows, and so are the values that they normalise",
        "Train on batches that the devices divide, without the last rows of an epoch; see docs/processes.md.",
    ),
}
LOST_BOXES = (
    "Wrap the modules with shard_module_params and lower its min_weight_size; or boxes were lost (by unbox, or by "
    "model.init outside of the mesh): make the state with create_train_state."
)
_warned: set[object] = set()


def _warn(text: str, key: object = None) -> None:
    """Warns with ``text``, once per process and ``key``; None: the key is the text."""
    key = text if key is None else key
    if key not in _warned:
        _warned.add(key)
        warn_user(text)


# -------------------------------------------------------------------------------------------------------- the optimizer


def warn_of_narrow_params(params: PyTree, narrow: Sequence[str]) -> None:
    """Warns of trained parameters of 16 bits, which small updates do not change; ``narrow`` has their paths.

    ``params`` are boxed.
    """
    leaves = dict(trees.sharded_leaves(params))
    dtype, trained = value_dtype(leaves[narrow[0]].value), [leaf for leaf in leaves.values() if leaf.is_differentiable]
    least = float(jnp.finfo(dtype).eps) / 2
    _warn(
        f"'{narrow[0]}', and {len(narrow)} of {len(trained)} parameters in all, are trained in {dtype}: updates "
        f"smaller than {least:.2g} of a weight are rounded away. Keep parameters in float32, and compute and "
        "gather in 16 bits, by dtype=jnp.bfloat16 without param_dtype, and gather_dtype='bfloat16': "
        "docs/dtypes.md.",
        ("narrow", dtype),
    )


def warn_of_masks(with_mask: Sequence[Part], params: PyTree) -> None:
    """Warns of suspect masks of weight decay: if nothing decays, or if biases or scales decay, and no other vector.

    ``with_mask`` are the parts of the optimizer that may have a mask; ``params`` are boxed.
    """
    shapes = jax.eval_shape(trainable, params)
    ndim = {path: leaf.ndim for path, leaf in trees.leaves_with_path(shapes)}
    for taken in filter(None, [decay_mask(part, shapes) for part in with_mask]):
        if not any(taken.values()):
            _warn(
                f"the mask of weight decay is False for all {len(taken)} parameters, {listed(taken)}: nothing decays. "
                "An optimizer sees bare arrays, no boxes: choose by shape or by path, as mask=lambda params: "
                "jax.tree_util.tree_map_with_path(lambda path, p: 'kernel' in jax.tree_util.keystr(path), params)."
            )
        # If a vector decays too, the mask does not depend on the number of dims: then nothing is suspect.
        flat = [path for path in taken if ndim[path] <= 1]
        biases = [path for path, decays in taken.items() if decays and path.rpartition("/")[2] in NO_DECAY]
        if biases and flat and not any(taken[path] for path in flat):
            _warn(
                f"the mask of weight decay takes {listed(biases)}, of {ndim[biases[0]]} dims, and no parameter of one "
                f"dim, as {listed(flat, 1)}: biases and scales of stacked layers (nn.scan, nn.vmap) have one dim more. "
                "Choose parameters by name: docs/howto/weight_decay.md."
            )


def warn_of_equal_weights(tx: optax.GradientTransformation) -> None:
    """Warns of ``optax.MultiSteps`` over several steps in the optimizer ``tx`` of a step with a weighted loss.

    ``MultiSteps`` averages the gradients of the steps equally, although the steps have different weights.
    """
    for part in parts(tx):
        if part.name == "MultiSteps" and (count := _at(part.closure_values["_every_k_schedule"], 0)) > 1:
            _warn(
                f"weighted=True with optax.MultiSteps(..., {count:.0f}): it averages gradients of {count:.0f} steps "
                "equally, although the steps have different weights. Use make_train_step(..., num_minibatches="
                f"{count:.0f}, weighted=True) on batches of {count:.0f} times the rows, which averages by weight."
            )


def warn_of_other_schedule(tx: optax.GradientTransformation, learning_rate: LearningRate) -> None:
    """Warns if a schedule in ``learning_rate``, which a step reports, is no schedule of the optimizer ``tx``.

    ``learning_rate`` is a schedule, a number, or a dict of schedules and numbers; numbers are not compared. A schedule
    does not warn if its values at ``COUNTS``, some update counts, equal those of any schedule of the optimizer, or the
    product of all schedules of the optimizer. An optimizer without schedules does not warn.
    """
    rates = [*learning_rate.values()] if isinstance(learning_rate, Mapping) else [learning_rate]
    used_schedules = schedules(parts(tx))
    # With several schedules in a chain the user may report any of them, or their product.
    product = [lambda count: math.prod(factor(count) for factor in used_schedules)]
    for schedule in filter(callable, rates):
        if used_schedules and not any(_difference(schedule, other) is None for other in [*used_schedules, *product]):
            count, reported, used = _difference(schedule, used_schedules[0]) or (0, 0.0, 0.0)
            _warn(
                f"learning_rate= of make_train_step is another schedule than the optimizer's: at update {count} it is "
                f"{reported:.6g}, and the optimizer scales by {used:.6g}. It is only reported, and changes no update. "
                "Make one schedule, and pass it to both."
            )


def _difference(first: Callable[[Any], Any], other: Callable[[Any], Any]) -> tuple[int, float, float] | None:
    """Returns (count, first value, other value) at the first update count where two schedules differ; else None.

    Absolute values are compared at the update counts in ``COUNTS``, with a relative tolerance of 1e-4.
    """
    # Schedules are functions, so compare values where warmup, decay and their ends would differ.
    for count in COUNTS:
        a, b = abs(_at(first, count)), abs(_at(other, count))
        if not math.isclose(a, b, rel_tol=1e-4):
            return count, a, b
    return None


def _at(schedule: Callable[[Any], Any], count: int) -> float:
    # Evaluate eagerly: this runs while a step is traced, where a schedule would return a tracer. The promotion is for
    # schedules of optax, which mix ints and floats.
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        return float(schedule(jnp.int32(count)))


# --------------------------------------------------------------------------------------------------- what is replicated


class ModelFacts(NamedTuple):
    """Facts about a model beyond its parameters: by path, reasons for replicated leaves, and classes of modules."""

    reasons: Mapping[str, Reason]
    holders: Mapping[str, str]


# Functions that return the facts of the model, by the context of a check; ``checks`` replaces the first.
FACTS: dict[type, Callable[[Any], ModelFacts]] = {CreatedState: lambda context: ModelFacts({}, {})}


def warn_of_replicated(context: CreatedState | TracedStep) -> None:
    """Warns if no parameter is split over devices of the mesh, or if at least 5 % of the bytes are not split.

    ``context`` has the parameters, boxed, their mesh, and the paths of replicated parameters: of a new state, or of the
    state of a step. If some parameters are split, fewer than ``FEW_BYTES`` of replicated bytes do not warn. For the
    text of a warning, and only then, ``FACTS`` may trace the model.
    """
    if isinstance(context, CreatedState):
        params, mesh = context.params, context.mesh
    else:
        params, mesh = context.step.state.params, context.step.layout.mesh
    leaves, replicated = dict(trees.sharded_leaves(params)), list(context.replicated)
    nbytes = {path: leaf.stored_bytes for path, leaf in leaves.items()}
    replicated.sort(key=lambda path: -nbytes[path])
    total, replicated_bytes = sum(nbytes.values()), sum(nbytes[path] for path in replicated)
    if len(replicated) < len(leaves):
        is_spread = any(mesh.shape.get(axis, 1) > 1 for leaf in leaves.values() for axis in leaf.axes)
        if not is_spread or replicated_bytes < FEW_BYTES or replicated_bytes < MOST_REPLICATED * total:
            return
    # One warning per mesh and model; checking the key first avoids the trace for the facts.
    shapes = tuple((path, np.shape(leaf.value), leaf.names) for path, leaf in leaves.items())
    key = ("replicated", tuple(mesh.shape.items()), shapes)
    if key in _warned:
        return
    facts = FACTS[type(context)](context)
    named = [
        f"'{path}', {format_bytes(nbytes[path])}" + (f" ({facts.reasons[path]})" if path in facts.reasons else "")
        for path in replicated[:LARGEST]
    ]
    more = [f"and {len(replicated) - LARGEST} more"] if len(replicated) > LARGEST else []
    cures = _cures({path: nbytes[path] for path in replicated}, leaves, facts)
    rest = (
        f"and as much for gradients and each moment of the optimizer. The largest: {'; '.join(named + more)}. "
        f"{' '.join(cures)} If it is meant, pass allow_replicated=True."
    )
    if len(replicated) == len(leaves):
        _warn(
            f"no parameter is split: each of the {mesh.size} devices of the mesh {format_mesh(mesh.shape)} holds all "
            f"{format_bytes(total)} of parameters, {rest}",
            key,
        )
    else:
        _warn(
            f"{format_fraction(replicated_bytes / total)} of the parameters' bytes are not split, "
            f"{format_bytes(replicated_bytes)} of {format_bytes(total)}: each of the {mesh.size} devices of the mesh "
            f"{format_mesh(mesh.shape)} holds all of these, {rest}",
            key,
        )


def _cures(replicated: Mapping[str, int], leaves: Mapping[str, Sharded], facts: ModelFacts) -> list[str]:
    """Returns cures for replicated leaves, as a list of sentences for a warning, the cure for the most bytes first.

    ``replicated`` maps the path of a replicated leaf to its bytes, ``leaves`` are all parameters by path, and ``facts``
    has reasons for replicated leaves and classes of modules. Cures for less than 5 % of the replicated bytes are left
    out.
    """
    # Classes of the wrapped modules: unit_depth of a box counts the path names below its wrapped module.
    units = dict.fromkeys(
        facts.holders.get("/".join(path.split("/")[: -leaf.unit_depth]))
        for path, leaf in leaves.items()
        if leaf.axes and leaf.unit_depth
    )
    some_are_split = len(replicated) < len(leaves)
    cures: Counter[str] = Counter()
    to_wrap: Counter[str | None] = Counter()
    for path, nbytes in replicated.items():
        kinds = [type(reason) for reason in facts.reasons[path].all_reasons] if path in facts.reasons else []
        cls = facts.holders.get(path.rpartition("/")[0])
        if Unwrapped in kinds or (not kinds and some_are_split and cls not in units):
            cures[CURES[Unwrapped]] += nbytes
            to_wrap[cls] += nbytes
        elif known := next((CURES[kind] for kind in kinds if kind in CURES), ""):
            cures[known] += nbytes
        elif some_are_split:
            cures[CURES[TooSmall]] += nbytes
        else:
            cures[LOST_BOXES] += nbytes
    # Leave out small classes: a norm's scale is not worth naming next to an embedding.
    least = MOST_REPLICATED * sum(replicated.values())
    classes = [*units, *(cls for cls, nbytes in to_wrap.most_common() if nbytes >= least)]
    named = ", ".join(dict.fromkeys(cls for cls in classes if cls))
    sentences = [cure for cure, nbytes in cures.most_common() if nbytes >= least]
    if named and CURES[Unwrapped] in sentences:
        example = f"shard_modules(model, ({named}{',' * (', ' not in named)}), axis_name)"
        sentences[sentences.index(CURES[Unwrapped])] = f"{CURES[Unwrapped][:-1]}: {example}."
    return sentences


def warn_of_replicated_trees(extra_trees: PyTree, mesh: AnyMesh) -> None:
    """Warns of a leaf in ``extra_trees`` without a box that a wrapper would split by default.

    The warning names only the first such leaf.
    """
    for path, leaf in trees.leaves_with_path(extra_trees):
        if mesh.size > 1 and not is_box(leaf) and np.size(leaf) >= DEFAULT_MIN_WEIGHT_SIZE:
            _warn(
                f"extra_trees['{path}'], {format_bytes(leaf_of(leaf).stored_bytes)}, is replicated on each of the "
                f"{mesh.size} devices. Make it by init_sharded or create_train_state of a wrapped model, or restore it "
                "into parameters of a wrapped model. If it is meant, pass allow_replicated=True."
            )
            return


def facts_of_step(context: TracedStep) -> ModelFacts:
    """Traces a step again, and returns the classes of the modules that run meanwhile.

    In the ``ModelFacts``, ``holders`` maps the path of a module to the name of its class; ``reasons`` is {}: the
    reasons for replicated leaves are not known. The model is the object whose method ``apply_fn`` of the state is.
    """
    with recording_holders(getattr(context.step.state.apply_fn, "__self__", None)) as holders:
        context.trace_again()
    return ModelFacts({}, holders)


FACTS[TracedStep] = facts_of_step


def warn_of_gathered_stacks(stacks: Stacks, mesh: AnyMesh) -> None:
    """Warns of stacks of layers (``nn.scan``) whose weights a wrapped module gathers all at once.

    Nothing warns on a mesh of a single device, and each stack warns once per process.
    """
    new = {name: cls for name, cls in stacks.layers.items() if (name, cls) not in _warned}
    if mesh.size == 1 or not new:
        return
    _warned.update(new.items())
    named = joined([f"{name!r} scans over layers of {cls}" for name, cls in new.items()])
    _warn(
        f"{named} within a module that shard_module_params wraps: it gathers the weights of all layers at once. To "
        f"gather a layer at a time, wrap the scanned module, nn.scan(shard_module_params({next(iter(new.values()))}, "
        "...), ...). If it is meant, pass allow_replicated=True.",
    )


# ------------------------------------------------------------------------------------------------------- axes and means


def warn_of_idle_axes(
    without_rows: frozenset[str], layout: BatchLayout, state: Any, extra_trees: PyTree, jaxpr: core.Jaxpr
) -> None:
    """Warns of mesh axes along which devices repeat the same work.

    ``without_rows`` are the axes of several devices over which ``layout`` does not split the batch. Devices along such
    an axis repeat work if the axis splits no leaf of state and ``extra_trees``, is no axis of copies of their shards,
    and is in no equation of ``jaxpr``, the traced step.
    """
    idle, mesh, batch_axes = without_rows, layout.mesh, layout.axes
    leaves = [leaf for _, leaf in trees.sharded_leaves((state.params, collections_of(state), extra_trees))]
    idle -= {axis for leaf in leaves for axis in (*leaf.axes, *leaf.communication.copied_axes)}
    if not idle or ("idle", mesh, idle) in _warned:
        return
    if idle := idle - all_named_axes(jaxpr.eqns):
        names, times = sorted(idle), math.prod(mesh.shape[axis] for axis in idle)
        _warn(
            f"along {listed(names)} of the mesh {format_mesh(mesh.shape)} all devices compute the same: the batch is "
            f"split over {batch_axes}, and no parameter and no collective uses {listed(names)}. The result is right, "
            f"at {times} times the work. Name the axis in batch_axes, or split parameters over it.",
            ("idle", mesh, idle),
        )


def warn_of_averages(aux: tuple[str, ...], count: int, weighted: bool, jaxpr: Callable[[], Any]) -> None:
    """Warns of auxiliary floats that are sums, maxima or the like on each device, since a step returns their averages.

    ``aux`` are the paths of the floats. ``count`` is the number of values that are averaged, one of each minibatch of
    each device; for 1 nothing warns. ``jaxpr()`` traces a program whose results are the floats in the order of ``aux``.
    The trace is costly, so only floats whose names look like sums or maxima are checked. With ``weighted`` a sum does
    not warn.
    """
    looks = [path for path in aux if LOOKS_REDUCED.search(path) and ("aux", path) not in _warned]
    if count == 1 or not looks:
        return
    program = jaxpr().jaxpr
    made = {path: _maker(program, atom) for path, atom in zip(aux, program.outvars, strict=True)}
    for path in looks:
        statistic, cure = REDUCED.get(made[path], ("", ""))
        divided = weighted and made[path] == "reduce_sum"  # by the global weight
        if statistic and not divided:
            _warn(
                f"aux['{path}'] is {statistic} on each device, and floats beside the loss are averaged, over {count} "
                f"minibatches of devices here: that is not {statistic} of the batch. {cure}.",
                ("aux", path),
            )


def _maker(jaxpr: core.Jaxpr, atom: Any) -> str:
    """Returns the name of the primitive, such as "reduce_sum", that makes ``atom``, a result of ``jaxpr``.

    Casts and reshapes after the primitive are skipped, and calls of functions (``jit``) are entered. Returns "" if no
    equation makes ``atom``, as for an argument.
    """
    eqn = next((eqn for eqn in jaxpr.eqns if any(atom is made for made in eqn.outvars)), None)
    if eqn is None:
        return ""
    if eqn.primitive.name in PASSED_ON:
        return _maker(jaxpr, eqn.invars[0])
    if (inner := eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))) is None or eqn.primitive.name == "scan":
        return eqn.primitive.name
    # Inside a function (jit), look up the result at the same position. A loop's result has no single maker.
    inner = getattr(inner, "jaxpr", inner)
    return _maker(inner, inner.outvars[[made is atom for made in eqn.outvars].index(True)])


# ------------------------------------------------------------------------------------------------------------- the rows


def warn_of_padding(batch: PyTree, counting: Mapping[str, list[str]]) -> None:
    """Warns of values that count padded rows, the copies of rows that ``shard_batch`` appended to ``batch``.

    ``counting`` has the names of values that a step computes without the weights of rows, as lists by kind: the result
    of ``counting_padding``. The batch has at least one padded leaf. A batch whose leaves are all padded lacks the
    weights, and warns, too.
    """
    leaves = [(path, leaf) for path, leaf in trees.leaves_with_path(batch) if np.ndim(leaf)]
    padded = {path: of_leaf for path, leaf in leaves if (of_leaf := padded_rows_of(leaf))}
    rows, in_all = next(iter(padded.values()))
    copies = f"{in_all - rows} of them copies of weight 0"
    absent = len(padded) == len(leaves)
    if absent:
        _warn(
            f"shard_batch(..., pad=True) has made {in_all} rows of {rows}, {copies}, and the weight that it returned "
            f"is in no leaf of the batch, {listed([path for path, _ in leaves])}: copies count like real rows. Pass "
            "batch | {'weight': weight}, and use it: weighted=True or metric.update(..., weight=).",
            "padding",
        )
    for kind, names in counting.items():
        # Without weights in the batch everything counts copies: one warning says so; only statistics need another cure.
        if not absent or kind in ("collection", "statistic", "comparison"):
            counted, cure = COUNTING[kind]
            named = f" {listed(names)}" if any(names) else ""  # a single metric has no name
            _warn(
                f"shard_batch(..., pad=True) has made {in_all} rows of {rows}, {copies}, and {counted.format(named)}. "
                f"{cure}",
                ("padding", kind, *names),
            )
