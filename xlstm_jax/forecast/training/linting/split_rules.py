"""The lint's rules for layers and sequences that are split over an axis; the table is in ``rules``."""

from collections.abc import Iterator

from xlstm_jax.forecast.cost.axis_traffic import axis_traffic
from xlstm_jax.forecast.cost.collective_traffic import ACTIVATIONS, Collective
from xlstm_jax.forecast.hardware.links import NETWORK
from xlstm_jax.forecast.training.linting.step import Defect, Step
from xlstm_jax.program_names import UNBALANCED_SCOPE
from xlstm_jax.wording import format_axes, format_bytes

MIN_FRACTION = 0.05  # of a step's time, or of its traffic
MIN_HIDDEN = 0.9  # of a ring's time


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
