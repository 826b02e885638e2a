"""Lint rules for layers and sequences that are split over an axis; the table is in ``rules``."""

from collections.abc import Iterator

from xlstm_jax.forecast.cost.axis_traffic import axis_traffic
from xlstm_jax.forecast.cost.collective_traffic import ACTIVATIONS, Collective
from xlstm_jax.forecast.hardware.links import NETWORK
from xlstm_jax.forecast.training.linting.step import Defect, Step
from xlstm_jax.formatting import format_axes, format_bytes, format_milliseconds
from xlstm_jax.program_names import UNBALANCED_SCOPE

MIN_FRACTION = 0.05  # fraction of a step's time or traffic
MIN_HIDDEN = 0.9  # fraction of a ring's time


def split_across_hosts(step: Step) -> Iterator[Defect]:
    """Finds activations of split layers (tensor parallelism) sent between hosts, far slower than within a host.

    Yields a defect for each set of mesh axes whose collectives take 5 % of the step's time or more. GPUs only.
    """
    crossing = [
        collective
        for collective in step.forecast.collectives
        if collective.carries == ACTIVATIONS
        and collective.timing
        and NETWORK in collective.timing.networks
        and any("tensor" in step.plan.roles.get(axis, ()) for axis in collective.axes or ())
    ]
    for traffic in axis_traffic(crossing):
        # Only GPUs have a timing: a TPU slice is a single torus without a slower network between hosts.
        if (traffic.seconds or 0.0) >= MIN_FRACTION * step.seconds:
            yield Defect(
                format_axes(traffic.axes or ()),
                f"splits layers across hosts: {traffic.executions} collectives of activations take "
                f"{format_milliseconds(traffic.seconds or 0.0)} of a step over the network, "
                f"{format_bytes(traffic.wire_bytes)} per GPU.",
                traffic.wire_bytes,
            )


def exposed_rings(step: Step) -> Iterator[Defect]:
    """Finds rings of activations (permutes, as in ring attention) whose transfers outlast the overlapped products.

    Yields a defect for each set of mesh axes with less than 90 % of the time hidden, if the step waits 5 % of its time
    or more. Nothing for devices without figures.
    """
    # Rings send to the next device in each shift, as permutes. Permutes of weights are not rings of activations.
    permutes = [permute for permute in step.forecast.collectives if permute.kind == "collective-permute"]
    for traffic in axis_traffic(permute for permute in permutes if permute.carries == ACTIVATIONS):
        hidden, waited = traffic.hidden_fraction, traffic.waited_s or 0.0
        if hidden is not None and hidden < MIN_HIDDEN and waited >= MIN_FRACTION * step.seconds:
            yield Defect(
                format_axes(traffic.axes or ()),
                f"has rings that are not hidden: {traffic.executions} permutes take "
                f"{format_milliseconds(traffic.seconds or 0.0)} of a step, which waits {format_milliseconds(waited)}, "
                "because the overlapped products end earlier.",
                traffic.wire_bytes,
                "Give each device more tokens, or the axis fewer devices; pass compiler_options='auto' if the step was "
                "compiled without options; use context_attention with impl='ulysses', which sends less.",
            )


def unbalanced_sequences(step: Step) -> Iterator[Defect]:
    """Finds causal ring attention over contiguous shares: the first device has little work, the last the most.

    Yields a defect for each module with such attention.
    """
    modules: dict[str, Collective] = {}
    for collective in step.forecast.collectives:
        if UNBALANCED_SCOPE in collective.op_name:
            modules.setdefault(collective.module, collective)
    for module, collective in modules.items():
        n = collective.group_size
        yield Defect(
            module or collective.name,
            f"has causal attention over {n} devices with contiguous tokens: the last device computes "
            f"{(2 * n - 1) / n:.3g} times the mean, and the others wait.",
            0,
        )
