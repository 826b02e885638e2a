"""The lint's rules for layers, sequences and experts that are split over an axis; the table is in ``rules``."""

from collections.abc import Iterator

from xlstm_jax.forecast.cost.axis_traffic import axis_traffic
from xlstm_jax.forecast.cost.collective_traffic import ACTIVATIONS, Collective
from xlstm_jax.forecast.hardware.links import NETWORK
from xlstm_jax.forecast.training.dispatch import Dispatch, dispatch
from xlstm_jax.forecast.training.linting.step import Defect, Step
from xlstm_jax.program_names import UNBALANCED_SCOPE
from xlstm_jax.wording import format_axes, format_bytes, format_fraction

MIN_FRACTION = 0.05  # of a step's time, or of its traffic
MIN_HIDDEN = 0.9  # of a ring's time
MAX_PADDING = 1.5  # times the rows that are there: a usual capacity is below
MIN_DROPPED = 0.05  # of the choices of the busiest device


def split_across_hosts(step: Step) -> Iterator[Defect]:
    """Activations of split layers that cross hosts: in each layer, and many times as slow as within a host."""
    crossing = [
        one
        for one in step.forecast.collectives
        if one.carries == ACTIVATIONS
        and one.timing
        and NETWORK in one.timing.networks
        and any("tensor" in step.plan.roles.get(axis, ()) for axis in one.axes or ())
    ]
    for traffic in axis_traffic(crossing):
        # Only GPUs have a timing: a slice of TPUs is one torus, and no host is behind a slower network.
        if (traffic.seconds or 0.0) >= MIN_FRACTION * step.seconds:
            yield Defect(
                format_axes(traffic.axes or ()),
                f"splits layers across hosts: {traffic.executions} collectives of activations take "
                f"{(traffic.seconds or 0.0) * 1e3:.3g} ms of a step over the network, "
                f"{format_bytes(traffic.wire_bytes)} per GPU.",
                traffic.wire_bytes,
            )


def exposed_rings(step: Step) -> Iterator[Defect]:
    """Rings whose products end before their transfers do."""
    # Rings send to the next device, shift by shift: permutes. Those of weights are no rings of activations.
    permutes = [one for one in step.forecast.collectives if one.kind == "collective-permute"]
    for traffic in axis_traffic(one for one in permutes if one.carries == ACTIVATIONS):
        hidden, waited = traffic.hidden_fraction, traffic.waited_s or 0.0
        if hidden is not None and hidden < MIN_HIDDEN and waited >= MIN_FRACTION * step.seconds:
            yield Defect(
                format_axes(traffic.axes or ()),
                f"has rings that do not hide: {traffic.executions} permutes take {(traffic.seconds or 0.0) * 1e3:.3g} "
                f"ms of a step, of which it waits {waited * 1e3:.3g} ms, as what runs beside them ends before.",
                traffic.wire_bytes,
                "Give each device more tokens, or the axis fewer devices; pass compiler_options='auto', without which "
                "TPUs and GPUs wait for more; of context_attention take impl='ulysses', which sends less.",
            )


def uneven_experts(step: Step) -> Iterator[Defect]:
    """Experts for which more is sent than their rows, or for whose busiest device the others wait."""
    for found in dispatch(step.forecast, step.plan, step.imbalance) if step.plan.experts else ():
        padded = found.wire_bytes - found.ideal_bytes
        if found.padding > MAX_PADDING and padded >= MIN_FRACTION * step.forecast.wire_bytes:
            yield Defect(
                found.experts.path,
                f"sends {format_bytes(found.wire_bytes)} in a step, {found.padding:.3g} times the rows that "
                "its tokens choose: shapes are those of all tokens going to one device.",
                padded,
                "Pass capacity_factor= to Experts, as 1.25, if tokens may be dropped; or split over fewer devices.",
            )
        yield from _imbalance(step, found)


def _imbalance(step: Step, found: Dispatch) -> Iterator[Defect]:
    # With a capacity rows are dropped, without one all devices wait: either way the router is uneven.
    cure = "Weight load_balancing_loss more, or split over fewer devices: several experts of a device even out."
    seconds, where = found.imbalance_s or 0.0, found.experts.path
    if seconds > 0 and seconds >= MIN_FRACTION * step.seconds:
        yield Defect(
            where,
            f"waits for its busiest device: at {found.imbalance:.3g} times the mean of rows a step takes "
            f"{seconds * 1e3:.3g} ms longer.",
            0,
            cure,
        )
    if found.dropped_fraction >= MIN_DROPPED:
        yield Defect(
            where,
            f"drops {format_fraction(found.dropped_fraction)} of the choices of its busiest device: at "
            f"{found.imbalance:.3g} times the mean of rows, where capacity_factor={found.experts.capacity_factor}.",
            0,
            cure,
        )


def unbalanced_sequences(step: Step) -> Iterator[Defect]:
    """Causal attention in a ring of contiguous shares: the first device has next to nothing to do, the last all."""
    modules: dict[str, Collective] = {}
    for one in step.forecast.collectives:
        if UNBALANCED_SCOPE in one.op_name:
            modules.setdefault(one.module, one)
    for module, one in modules.items():
        n = one.group_size
        yield Defect(
            module or one.name,
            f"has causal attention over {n} devices, each of which has its tokens in one piece: the last computes "
            f"{(2 * n - 1) / n:.3g} times the mean, and the others wait for it.",
            0,
        )
