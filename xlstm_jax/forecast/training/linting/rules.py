"""Lint rules: each rule checks a compiled step against its plan and yields defects.

``RULES`` is the table of rules: name, function, and cure. A cure that depends on the defect comes from the function.
Functions with a leading ``_`` are helpers. The bytes of a defect are traffic per step for communication, memory for
kept arrays.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from xlstm_jax.accelerators import TPUS
from xlstm_jax.distributed.data_parallel.policy import next_multiple
from xlstm_jax.distributed.data_parallel.reasons import Indivisible, TooSmall, Unwrapped
from xlstm_jax.distributed.plan.leaf_plan import LeafPlan
from xlstm_jax.forecast.cost.collective_traffic import Collective, executions, sum_wire_bytes
from xlstm_jax.forecast.hardware.links import NETWORK, NVLINK
from xlstm_jax.forecast.hlo.op_names import FORWARD, in_shard_map
from xlstm_jax.forecast.hlo.text import float_bytes_of
from xlstm_jax.forecast.training.linting import memory_rules, product_rules, split_rules
from xlstm_jax.forecast.training.linting.expert_rules import UNEVEN_EXPERTS
from xlstm_jax.forecast.training.linting.step import Defect, Rule, Step, shared_name, size_of
from xlstm_jax.formatting import format_bytes, format_fraction, format_milliseconds, listed, path_pattern
from xlstm_jax.program_names import HOST_AXIS

# Size of a leaf with the default min_weight_size in float32: below, a step's time hardly changes.
MIN_KEPT_BYTES = 2**20
MIN_REPLICATED_BYTES = 2**20
# Fraction of the bytes that a device sends in a step. TPU compilers reduce small arrays by an all-reduce on any mesh,
# up to 7% of a well-made step.
MAX_ALL_REDUCED_FRACTION = 0.075
MIN_WAITED_FRACTION = 0.05  # fraction of a step's time
MIN_NAMED_FRACTION = 0.01  # fraction of a step's time; a module with a shorter wait is not named
MANY = 8  # collectives in a step; fewer do not justify a change of the model
FLAT_LATENCY_S = 1e-4  # latency of a ring over hosts and GPUs; above, two rings (28 us and their hops) are faster
MIN_SHARED_BYTES = 2**20
# Multiple of a device's fair share of matrix products; padding of indivisible dims stays below.
MAX_WORK = 1.5
MIN_REPEATED_FRACTION = 0.01  # fraction of the step's FLOP
MIN_SAVED_FRACTION = 0.4  # fraction of the moments; groups save as much even for a small optimizer state

F32_BYTES = 4
_VMAP = re.compile(r"vmap\(.*gather_params")  # members of nn.vmap run together, so they are gathered together
_PRODUCT = re.compile(r"\b(?:dot_general|eigh|svd|qr)\b")
OPTIMIZER = "the optimizer"


# -------------------------------------------------------------------------------------------------------------- gathers


class _Repeat(NamedTuple):
    """Gathers of a leaf over a set of mesh axes: executed count, needed count, and bytes sent in vain."""

    executed: int
    needed: int
    wasted: float


def repeated_gathers(step: Step) -> Iterator[Defect]:
    """Finds leaves gathered more often than forward and backward need.

    Each pass needs a gather for each use and minibatch. Yields a defect for each group of leaves that differ only in a
    module's number, with the bytes sent in vain.
    """
    for name, rows in step.groups:
        repeats = [repeat for row in rows if (repeat := _repeat(step, row)).wasted]
        if repeats:
            executed, needed, wasted = (sum(column) for column in zip(*repeats, strict=True))
            uses, minibatches = sum(row.uses for row in rows), step.num_minibatches
            yield Defect(
                name,
                f"is gathered {executed} times in a step, where {minibatches} x {uses} uses need {needed}: at most one "
                f"gather in forward and one in backward each. The rest sends {format_bytes(wasted)} per device.",
                wasted,
                "Call the module once in a step, put only one nn.remat around it (reshard_after_forward=True is one), "
                "or wrap the loop around it rather than its body; if the step goes through more than "
                f"{minibatches} minibatches, pass their number to lint, as num_minibatches."
                if uses
                else "By the plan the leaf is replicated: make the plan of the model that the step trains.",
            )


def _repeat(step: Step, row: LeafPlan) -> _Repeat:
    """Returns a ``_Repeat`` of a leaf: the number of gathers in a step, the needed number, and the bytes sent in vain.

    ``row`` is the leaf's row in the plan, with ``uses``, the gathers per forward pass. A leaf that is gathered in
    stages has gathers over several sets of mesh axes; each set is checked twice. Forward needs at most uses x
    minibatches gathers; forward and backward together need at most twice as many. Returns the check with the most bytes
    in vain; zeros if no check finds an excess, or if the leaf is split by the model and no wrapper gathers it.
    """
    gathers, repeats = step.gathers[row.path], [_Repeat(0, 0, 0.0)]
    if row.parts > 1 and not row.uses:
        return repeats[0]  # a box of the model, which no wrapper gathers: the needed count is unknown
    for axes in {gather.axes for gather in gathers}:
        over = [gather for gather in gathers if gather.axes == axes]
        forward = [gather for gather in over if gather.direction == FORWARD]
        need = row.uses * step.num_minibatches
        for some, needed in ((forward, need), (over, 2 * need)):
            if (executed := executions(some)) > needed:
                repeats.append(_Repeat(executed, needed, sum_wire_bytes(some) * (1 - needed / executed)))
    return max(repeats, key=lambda repeat: repeat.wasted)


def wide_gathers(step: Step) -> Iterator[Defect]:
    """Finds leaves gathered in a wider dtype than their wrapper requests.

    Yields a defect for each group of leaves that differ only in a module's number. On a CPU leaves in bfloat16 are
    skipped, because its compiler widens them.
    """
    for name, rows in step.groups:
        # The CPU backend always sends bfloat16 as float32.
        asking = [row for row in rows if row.uses and not (step.on_cpu and row.gather_dtype == "bfloat16")]
        pairs = step.gathers_of(asking)
        if wide := [(row, gather) for row, gather in pairs if float_bytes_of(gather.dtype) > row.gather_itemsize]:
            (row, gather), *_ = wide
            sent = sum_wire_bytes(gather for _, gather in wide)
            # Traffic is proportional to the width of a value.
            asked = sum(g.wire_bytes_per_step * r.gather_itemsize / float_bytes_of(g.dtype) for r, g in wide)
            yield Defect(
                name,
                f"is gathered as {gather.dtype}, but its wrapper requests {row.gather_dtype}: {format_bytes(sent)} per "
                f"device and step instead of {format_bytes(asked)}.",
                sent - asked,
                f"Pass gather_dtype={row.gather_dtype} to the leaf's shard_module_params in the step too, and compute "
                "in this dtype.",
            )


def hoisted_gathers(step: Step) -> Iterator[Defect]:
    """Finds gathers of every layer at once, before the loop over layers.

    Yields a defect for each group of leaves whose gathered weights take at least 1 MiB more than a layer needs. Gathers
    of several members of an ``nn.vmap`` do not count, because the members run together.
    """
    for name, rows in step.groups:
        hoisted = [gather for _, gather in step.gathers_of(rows) if step.layers_at_once(gather) > 1]
        gathers = [gather for gather in hoisted if not _VMAP.search(gather.op_name)]
        if not gathers:
            continue
        layers = max(map(step.layers_at_once, gathers))
        uses = max(1, *map(step.uses_at_once, gathers))
        nbytes = uses * max(row.gathered_size for row in rows) * max(float_bytes_of(gather.dtype) for gather in gathers)
        per_layer = round(nbytes / layers)
        if (extra := (layers - 1) * per_layer) >= MIN_KEPT_BYTES:
            yield Defect(
                name,
                f"is gathered for {layers} layers at once, {format_bytes(layers * per_layer)} that stay in memory "
                f"during the loop, although a layer needs {format_bytes(per_layer)}.",
                extra,
            )


# --------------------------------------------------------------------------------------------------------------- memory


def kept_gathered(step: Step) -> Iterator[Defect]:
    """Finds gathered weights of several layers, 1 MiB or more, that stay alive from forward to backward.

    Yields a defect for each group of leaves that differ only in a module's number; nothing if the step keeps weights on
    purpose (``keep_gathered``).
    """
    if step.keep_gathered:
        return
    for name, rows in step.groups:
        layers = sum(_kept_layers(step, row) for row in rows)
        # Kept weights have the requested dtype, or the gather's dtype if the compiler narrowed it.
        widths = filter(None, (float_bytes_of(gather.dtype) for gather in step.gathers[rows[0].path]))
        each = round(rows[0].gathered_size * min([rows[0].gather_itemsize, *widths]))
        kept_bytes = layers * each
        if layers > 1 and kept_bytes >= MIN_KEPT_BYTES:
            yield Defect(
                name,
                f"is gathered in forward and not again in backward, so that {layers} layers of {format_bytes(each)} "
                f"live from one to the other: {format_bytes(kept_bytes)} per device.",
                kept_bytes,
            )


def _kept_layers(step: Step, row: LeafPlan) -> int:
    """Returns the number of layers whose gathered weights for a leaf stay alive from forward to backward; 0 for none.

    Layers count that a step gathers in forward and not again in backward. Not counted are vectors (biases), because the
    backward pass of an addition does not read the vector; frozen leaves; gathers of several layers at once; and on a
    CPU, whose compiler merges gathers, leaves outside of loops. ``row`` is the leaf's row in the plan.
    """
    gathers = step.gathers[row.path]
    again = any(gather.direction != FORWARD for gather in gathers)
    # Outside of loops the CPU compiler merges gathers that nn.remat keeps apart.
    merged = step.on_cpu and row.layers == 1
    if again or merged or len(row.use_shape) < 2 or not row.gradients.total:
        return 0
    by_axes: dict[tuple[str, ...] | None, int] = defaultdict(int)
    for gather in gathers:
        by_axes[gather.axes] += 0 if round(step.uses_at_once(gather)) > 1 else gather.count
    most = max(by_axes.values())
    return min(most // step.num_minibatches or 1, row.layers) if most else 0


def replicated_leaves(step: Step) -> Iterator[Defect]:
    """Finds leaves of 1 MiB or more that stay replicated.

    Yields a defect for each group of leaves of equal shape that differ only in a module's number. For leaves that are
    replicated as too small, the size of a single layer counts.
    """
    alike = defaultdict(list)
    for row in step.plan.replicated:
        # Small leaves of many layers are large in sum, but splitting them means many small gathers.
        too_small = any(isinstance(reason, TooSmall) for reason in row.reason.all_reasons)
        if row.parameters.total // (row.layers if too_small else 1) >= MIN_REPLICATED_BYTES:
            alike[path_pattern(row.path), row.shape].append(row)
    for rows in alike.values():
        nbytes, devices = sum(row.all_bytes.per_device for row in rows), step.plan.devices
        yield Defect(
            shared_name(rows),
            f"is replicated on each of {devices} devices ({rows[0].reason}): {format_bytes(nbytes)} with gradient and "
            f"optimizer state; split evenly, a device would keep {format_bytes(nbytes / devices)}.",
            nbytes,
            _replication_cure(rows[0]),
        )


def _replication_cure(row: LeafPlan) -> str:
    """Returns a sentence on how to split the replicated leaf of ``row``, by the reason in the plan.

    The reasons with a sentence are: the axes divide no dim; the leaf is too small; no module is wrapped. "" for any
    other reason: then the rule's default cure applies.
    """
    kinds = (Indivisible, TooSmall, Unwrapped)
    match next((reason for kind in kinds for reason in row.reason.all_reasons if isinstance(reason, kind)), None):
        case Indivisible(parts=parts):
            size = max(row.use_shape)
            fits = next_multiple(size, parts)
            return f"Pass uneven='pad', or give its dim of {size} the size {fits}, which {parts} divides."
        case TooSmall():
            return f"Lower min_weight_size to {math.prod(row.use_shape)} or less."
        case Unwrapped():
            return "Put shard_module_params around the module that owns the leaf."
        case _:
            return ""


# -------------------------------------------------------------------------------------------------------------- traffic


def all_reduces_of_shards(step: Step) -> Iterator[Defect]:
    """Finds all-reduces in place of a reduce-scatter or an all-gather, which send half the bytes.

    Yields first a defect for each group of all-reduces by which the compiler has replaced another collective, if these
    send over 7.5 % of the step's bytes in total. Then a defect for each all-reduce that averages the unsharded
    gradients of leaves, although the leaves are gathered over one of its axes.
    """
    stand_ins = [c for c in step.forecast.collectives if c.stands_for]
    if sum_wire_bytes(stand_ins) > MAX_ALL_REDUCED_FRACTION * step.forecast.wire_bytes:
        for where, members in step.merged(stand_ins):
            first, sent = members[0], sum_wire_bytes(members)
            yield Defect(
                where,
                f"the compiler replaces the {first.stands_for} over {first.axes} by an all-reduce, "
                f"{executions(members)} times in a step: {format_bytes(sent)} per device, "
                f"{step.share_of_traffic(sent)} of the step's traffic, instead of {format_bytes(sent / 2)}.",
                sent / 2,
                "Give the mesh one axis for each axis of the torus, and axis_name the tuple of these axes: the "
                f"compiler does not replace a collective over a single axis of the torus.{_narrower(members)}",
            )
    for collective in step.forecast.collectives:
        if rows := _unreduced_gradients(step, collective):
            yield _unreduced_gradient(collective, rows)


def _narrower(members: Iterable[Collective]) -> str:
    """Returns a further cure, a sentence after a space, if a collective is a reduce-scatter of float32 gradients.

    A reduce-scatter that the compiler replaced by an all-reduce counts, too. "" if ``members`` has no such collective.
    """
    if any("reduce-scatter" in (c.kind, c.stands_for) and float_bytes_of(c.dtype) == F32_BYTES for c in members):
        return (
            " The gradients are sent as f32: pass grad_scatter_dtype=jnp.bfloat16 to shard_module_params, which sends "
            "half the bytes and rounds each sum."
        )
    return ""


def _unreduced_gradients(step: Step, reduce: Collective) -> list[LeafPlan]:
    """Returns the leaves whose unsharded gradient ``reduce`` averages, although they are gathered over one of its axes.

    [] if ``reduce`` is no all-reduce of gradients. An all-reduce may combine many arrays, and does not name them, so
    the leaves are found by size. From the number of averaged values, the values of leaves without a gather (which are
    rightly averaged) are subtracted. Gathered leaves of the same modules are returned as rows of the plan, largest
    first, as long as their values fit into the rest.
    """
    if reduce.kind != "all-reduce" or "sync_gradients" not in reduce.op_name or not (total := size_of(reduce)):
        return []
    owned = [row for path, row in step.rows.items() if path.rpartition("/")[0] in reduce.modules]
    axes = set(reduce.axes or ())
    split = [row for row in owned if any(axes & set(gather.axes or ()) for gather in step.gathers.get(row.path, ()))]
    rest = total - sum(math.prod(row.shape) / row.parts for row in owned if row not in split)
    unreduced = []
    for row in sorted(split, key=lambda row: -row.parameters.total):
        if (size := math.prod(row.shape)) <= rest:
            unreduced.append(row)
            rest -= size
    return unreduced


def _unreduced_gradient(reduce: Collective, rows: Sequence[LeafPlan]) -> Defect:
    """Returns the defect of an all-reduce of gradients, ``reduce``, in place of which a reduce-scatter would do.

    ``rows`` are the rows of these gradients' leaves in the plan. The defect has the paths of the leaves, a sentence,
    the bytes that a reduce-scatter would save, and a cure.
    """
    fraction = sum(math.prod(row.shape) for row in rows) * float_bytes_of(reduce.dtype) / reduce.payload_bytes
    sent = reduce.wire_bytes_per_step * fraction
    return Defect(
        listed(row.path for row in rows).replace("'", ""),
        f"the unsharded gradient is averaged over {reduce.axes} by an all-reduce, {format_bytes(sent)} per device and "
        f"step, although the leaf is gathered over one of these axes: a reduce-scatter sends half the bytes.",
        sent / 2,
        "Differentiate with respect to the split parameters, as value_and_grad does, with the gather inside of the "
        "loss: its transpose is the reduce-scatter.",
    )


def exposed_collectives(step: Step) -> Iterator[Defect]:
    """Finds collectives whose bytes a step waits for, if the waits are 5 % of the step's time or more in sum.

    Yields a defect for each group of collectives of equal kind and module with a wait of 1 % of the step's time or
    more; the longest wait is always named. Nothing for devices without figures, such as CPUs.
    """
    waited = [c for c in step.forecast.collectives if c.by_bandwidth.waited_s > 0]
    groups = [(where, members, _waited_s(members)) for where, members in step.merged(waited)]
    # Waits of many modules add up, so their sum decides. The module with the longest wait is always named.
    if not groups or _waited_s(waited) < MIN_WAITED_FRACTION * step.seconds:
        return
    least = min(MIN_NAMED_FRACTION * step.seconds, max(seconds for *_, seconds in groups))
    for where, members, seconds in groups:
        if seconds < least:
            continue
        kind, sent = members[0].kind, sum_wire_bytes(members)
        takes = sum(c.count * c.by_bandwidth.seconds for c in members)
        # By default XLA runs a single collective at a time on a GPU. On a TPU without SparseCores XLA's options hide
        # only gathers.
        chip = step.forecast.chip
        helps = chip and (
            not chip.torus_axes or (TPUS[chip.name].xla_options and (chip.sparse_cores or kind == "all-gather"))
        )
        yield Defect(
            where,
            f"the step waits {format_milliseconds(seconds)} for its {kind}, whose bytes take "
            f"{format_milliseconds(takes)}: {executions(members)} times in a step, {format_bytes(sent)} per device, "
            f"{step.share_of_traffic(sent)} of the step's traffic.",
            sent,
            f"{OVERLAP_OPTIONS if helps else ''}{MORE_OVERLAP_ON_GPUS if step.forecast.on_gpus else ''}"
            f"More tokens per device make the wait a smaller part of the step."
            f"{_narrower(members)}",
        )


def _waited_s(collectives: Iterable[Collective]) -> float:
    return sum(c.count * c.by_bandwidth.waited_s for c in collectives)


# ---------------------------------------------------------------------------------------- GPUs, by latency and by hosts


def small_collectives(step: Step) -> Iterator[Defect]:
    """Finds many collectives whose latency exceeds the time of their bytes. GPUs only.

    Yields a defect for each set of mesh axes with 8 or more executions of such collectives in a step, if the step waits
    5 % of its time or more for their latency.
    """
    small = defaultdict(list)
    for collective in step.forecast.collectives:
        if collective.timing and collective.timing.latency_s > collective.timing.bytes_s:
            small[collective.axes].append((collective, collective.timing))
    for axes, pairs in small.items():
        members, sent = [collective for collective, _ in pairs], sum_wire_bytes(collective for collective, _ in pairs)
        seconds = sum(collective.count * min(timing.latency_s, timing.waited_s) for collective, timing in pairs)
        if executions(members) < MANY or seconds < MIN_WAITED_FRACTION * step.seconds:
            continue
        latency_s = max(timing.latency_s for _, timing in pairs)
        flat = latency_s > FLAT_LATENCY_S and any(len(timing.networks) > 1 for _, timing in pairs)
        yield Defect(
            listed(axes or ("unknown axes",)).replace("'", ""),
            f"{executions(members)} collectives have more latency than transfer time, up to {latency_s * 1e6:.3g} us "
            f"each: the step waits {format_milliseconds(seconds)} for the latency of {format_bytes(sent)}.",
            sent,
            IN_TWO_STAGES if flat else "",
        )


def hosts_last(step: Step) -> Iterator[Defect]:
    """Finds leaves that are gathered within a host before they are sent between hosts. GPUs only.

    Yields a defect for each group of leaves that differ only in a module's number. The opposite order sends smaller
    pieces between hosts; the bytes of the defect are the difference in a step.
    """
    for name, rows in step.groups:
        wasted = 0.0
        for row in rows:
            gathers = [(gather, gather.timing.networks) for gather in step.gathers[row.path] if gather.timing]
            within = [gather for gather, networks in gathers if networks == (NVLINK,)]
            for across in (gather for gather, networks in gathers if networks == (NETWORK,)):
                before = [g for g in within if step.uses_at_once(g) < step.uses_at_once(across)]
                # The loop visits a collective of several leaves once for each leaf.
                share = 1 / len(across.leaves)
                wasted += share * across.wire_bytes_per_step * (1 - 1 / before[0].group_size) if before else 0.0
        if wasted:
            yield Defect(
                name,
                "is gathered within each host first, and then sent between hosts: each adapter carries "
                f"{format_bytes(wasted)} more in a step than in the opposite order.",
                wasted,
            )


# ----------------------------------------------------------------------------------------------------------- optimizers
# ``make_train_step`` runs an optimizer on global arrays, outside of ``shard_map``. The compiler distributes a matrix
# product there over devices, with collectives for each: Newton-Schulz has 15 products for every matrix. Every device
# repeats the products that the compiler does not distribute.


def shared_matrix_products(step: Step) -> Iterator[Defect]:
    """Finds collectives of matrix products outside of ``shard_map``, in the optimizer.

    Yields a single defect if they send 1 MiB or more per device in a step.
    """
    serving = [c for c in step.forecast.collectives if not in_shard_map(c.op_name) and _PRODUCT.search(c.op_name)]
    sent = sum_wire_bytes(serving)
    if sent >= MIN_SHARED_BYTES:
        yield Defect(
            OPTIMIZER,
            f"multiplies sharded matrices: {executions(serving)} collectives in matrix products, {format_bytes(sent)} "
            f"per device, {step.share_of_traffic(sent)} of the step's traffic, and work repeated on several devices.",
            sent,
        )


def repeated_products(step: Step) -> Iterator[Defect]:
    """Finds matrix products outside of ``shard_map`` of which each device does far more than an even share.

    Yields at most one defect: if a device does over 1.5 times its share, and the excess is 1 % of the step's FLOP or
    more.
    """
    forecast = step.forecast
    share, done = forecast.flops.shared, forecast.shared_flops or 0.0
    if done <= MAX_WORK * share or done - share < MIN_REPEATED_FRACTION * forecast.flops.total:
        return
    yield Defect(
        OPTIMIZER,
        f"each device does {done:.3g} FLOP of matrix products a step, but an even share among {forecast.devices} "
        f"devices is {share:.3g}: {done / share:.3g} times as many, because devices repeat products.",
        0,
        # With M < D matrices on D devices, an owner of a full matrix does 1 / M of the work; now each device does
        # done / share / D of the work.
        f"{WHOLE_MATRICES} That is less work from {math.floor(forecast.devices * share / done) + 1} matrices of a "
        "shape on.",
    )


def needless_offload(step: Step) -> Iterator[Defect]:
    """Finds offload of a step that waits and would fit without it, or offload that leaves most moments on the device.

    Yields at most one defect. The memory of the step without offload, with the moments on the device all the time, is
    only partly known:

        upper bound    memory of the offloaded step + moments
        usual          moments + peak of everything else, from the live ranges

    The upper bound proves that a step would fit. The usual value comes from the schedule of the offloaded step, if the
    compiler writes live ranges (TPUs); without offload the schedule may differ.
    """
    host, available, memory = step.forecast.host, step.forecast.available_bytes, step.forecast.memory
    if host is None or not host.stored_bytes:
        return
    stored, moved = format_bytes(host.stored_bytes), format_bytes(host.moved_bytes)
    without = step.forecast.total_bytes + host.stored_bytes
    if available and without <= available:
        if host.waited_s >= MIN_WAITED_FRACTION * step.seconds:
            yield Defect(
                OPTIMIZER,
                f"{stored} of its state are in host memory, but with them on the device the step would take "
                f"{format_bytes(without)} of {format_bytes(available)} at most. {moved} are transferred in a step, "
                f"which waits {format_milliseconds(host.waited_s)} of its {format_milliseconds(step.seconds)} for the "
                "transfers.",
                host.moved_bytes,
            )
    elif memory.resident_peak_bytes is not None:
        saved = host.stored_bytes - (memory.peak_live_bytes - memory.resident_peak_bytes)
        if saved < MIN_SAVED_FRACTION * host.stored_bytes:
            saved = max(0, saved)
            yield Defect(
                OPTIMIZER,
                f"{stored} of its state are in host memory, but most come to the device at once: only "
                f"{format_bytes(saved)} of device memory, {format_fraction(saved / host.stored_bytes)} of the state, "
                f"are saved, for {moved} of transfers in a step, {format_milliseconds(host.seconds)}.",
                host.stored_bytes - saved,
                "Use an optimizer that updates leaves one by one (num_minibatches instead of optax.MultiSteps, "
                "clipping of gradients instead of updates), and the step of make_train_step, which transfers leaves "
                "in groups; or leave offload out.",
            )


# ------------------------------------------------------------------------------------------------------------ the table

OVERLAP_OPTIONS = (
    "If the step was compiled without them, pass XLA's options: compiler_options='auto' to make_train_step, or "
    "compiler_options(device_kind) to a jax.jit of your own. "
)
MORE_OVERLAP_ON_GPUS = (
    "On GPUs these run four collectives at once instead of one, as others measured fastest; 'forecast' runs eight and "
    "pipelines gathers, which waits least by estimate, but was slower where others measured it. "
)
IN_TWO_STAGES = (
    f"Give the mesh an axis across hosts and one within, {{{HOST_AXIS!r}: hosts, 'fsdp_device': GPUs of a host}} as "
    "DeviceMeshManager.create_fsdp_mesh does, and pass both as axis_name."
)
WHOLE_MATRICES = (
    "Use xlstm_jax.distributed.muon instead of optax.contrib.muon, or put on_unsharded_matrices around the update "
    "rule: each device then updates some of the matrices, unsharded."
)

_TABLE = (
    Rule("repeated-gather", repeated_gathers),
    Rule("wide-gather", wide_gathers),
    Rule("all-reduce-of-shards", all_reduces_of_shards),
    Rule("hoisted-gather", hoisted_gathers,
         "Put the loop outside of the wrapper: nn.scan(nn.remat(shard_module_params(Block, axis_name)), ...)."),
    Rule("kept-gathered", kept_gathered,
         "Pass reshard_after_forward=True to the shard_module_params around it, or put nn.remat around the wrapped "
         "module. The policy of an outer nn.remat overrides what is within: give it remat_policy(), which keeps no "
         "gathered weight. Where memory is left and links are slow, pass keep_gathered=True to lint."),
    Rule("exposed-collective", exposed_collectives),
    Rule("small-collectives", small_collectives,
         "Raise min_weight_size, so that small leaves are replicated and averaged together, or wrap a larger module, "
         "whose leaves are gathered together."),
    Rule("hosts-last", hosts_last,
         f"Name the axis across hosts {HOST_AXIS!r}, as DeviceMeshManager.create_fsdp_mesh does, or pass the name as "
         "inter_host_axes: the gather over this axis then comes first, with the smallest pieces."),
    Rule("split-across-hosts", split_rules.split_across_hosts,
         "Put the axis of split layers last in the mesh, with at most the GPUs of a host: the devices then share "
         "NVLink."),
    Rule("exposed-ring", split_rules.exposed_rings),
    UNEVEN_EXPERTS,
    Rule("unbalanced-sequence", split_rules.unbalanced_sequences,
         "Make the step with layout='zigzag', which reorders its batches; in a shard_map of your own, pass "
         "in_layout(batch, 'zigzag', axis) as the batch."),
    Rule("replicated-leaf", replicated_leaves,
         "Split the leaf over another axis, or give it a dim that the axis divides."),
    Rule("shared-matrix-product", shared_matrix_products, WHOLE_MATRICES),
    Rule("repeated-product", repeated_products, WHOLE_MATRICES),
    Rule("wide-product", product_rules.wide_products,
         "Give the module dtype=jnp.bfloat16; its sums stay float32. If float32 is intended, leave this rule out."),
    Rule("float32-model", product_rules.float32_model,
         "Pass dtype=jnp.bfloat16 to the modules, whose parameters and sums stay float32, and "
         "gather_dtype=jnp.bfloat16 to shard_module_params. If float32 is intended, leave this rule out."),
    Rule("held-scores", product_rules.held_scores,
         "Use a kernel: attention(q, k, v) of docs/kernels.md chooses the platform's kernel."),
    Rule("memory-bound", memory_rules.memory_bound),
    Rule("near-memory-limit", memory_rules.near_memory_limit,
         "Take less memory, 5% below that limit: fewer rows per device, more minibatches, nn.remat of another block, "
         "or offload. xlstm-jax fit keeps the margin."),
    Rule("needless-offload", needless_offload, "Leave offload out."),
)  # fmt: skip
RULES = {rule.name: rule for rule in _TABLE}
