"""The lint's rules about collectives of GPUs, by the times of their forecast: what is waited for, and why.

waiting    the schedule waits, as one collective at a time is under way by default
latency    collectives that take longer to come around the ring than their bytes do
order      whole leaves cross hosts, where pieces would do
"""

from collections import defaultdict
from collections.abc import Iterator

from xlstm_jax.distributed.data_parallel.shard_choice import HOST_AXIS
from xlstm_jax.distributed.forecast.cost.traffic import Collective
from xlstm_jax.distributed.forecast.linting.step import Finding, Step, merged, sum_wire_bytes
from xlstm_jax.distributed.hardware.links import NETWORK, NVLINK
from xlstm_jax.wording import format_bytes, format_fraction, listed

MIN_WAITED_FRACTION = 0.05  # of a step's time
MANY = 8  # collectives in a step, of which fewer are not worth a change of the model
FLAT_LATENCY_S = 1e-4  # of a ring over hosts and GPUs, from which on two rings, 28 us and their hops, are faster
IN_TWO_STAGES = (
    f"Give the mesh an axis across hosts and one within, {{{HOST_AXIS!r}: hosts, 'fsdp_device': GPUs of a host}} as "
    "DeviceMeshManager.create_fsdp_mesh does, and axis_name both."
)


def waited_for(step: Step) -> Iterator[Finding]:
    """Collectives for whose bytes a step waits, the same kind for the same leaves together."""
    waited = [c for c in step.forecast.collectives if c.timing and c.timing.waited_by_bandwidth_s > 0]
    yield from filter(None, merged(waited, step, _waited))


def _waited(step: Step, where: str, members: list[Collective]) -> Finding | None:
    seconds = sum(c.count * c.timing.waited_by_bandwidth_s for c in members if c.timing)
    takes = sum(c.count * c.timing.bandwidth_s for c in members if c.timing)
    if seconds < MIN_WAITED_FRACTION * (step.forecast.step_seconds or 0):
        return None
    count, sent = sum(c.count for c in members), sum_wire_bytes(members)
    return Finding(
        "exposed-collective",
        where,
        f"the step waits {seconds * 1e3:.3g} ms for its {members[0].kind}, of the {takes * 1e3:.3g} ms that its bytes "
        f"take: {count} times in a step, {format_bytes(sent)} per GPU, "
        f"{format_fraction(sent / step.forecast.wire_bytes)} of the step's traffic.",
        "Let XLA have more collectives under way than one, its default, and begin gathers a layer ahead, by "
        "compiler_options='auto' for make_train_step; else take more tokens per GPU.",
        round(sent),
    )


def small_collectives(step: Step) -> Iterator[Finding]:
    """Many collectives whose latency is longer than the time of their bytes, by the axes that they run over."""
    found = defaultdict(list)
    for collective in step.forecast.collectives:
        if collective.timing and collective.timing.latency_s > collective.timing.bytes_s:
            found[collective.axes].append(collective)
    for axes, members in found.items():
        seconds = sum(c.count * min(c.timing.latency_s, c.timing.waited_s) for c in members if c.timing)
        many = sum(c.count for c in members) >= MANY
        if many and seconds >= MIN_WAITED_FRACTION * (step.forecast.step_seconds or 0):
            yield _small(axes, members, seconds)


def _small(axes: tuple[str, ...] | None, members: list[Collective], seconds: float) -> Finding:
    timings = [c.timing for c in members if c.timing]
    latency_s, sent, count = max(t.latency_s for t in timings), sum_wire_bytes(members), sum(c.count for c in members)
    flat = latency_s > FLAT_LATENCY_S and any(len(t.networks) > 1 for t in timings)
    fewer = (
        "Raise min_weight_size, so that small leaves stay whole and are averaged together, or wrap a larger module, "
        "whose leaves travel together."
    )
    return Finding(
        "small-collectives",
        listed(axes or ("unknown axes",)).replace("'", ""),
        f"{count} collectives take longer to come around than their bytes do, up to {latency_s * 1e6:.3g} us each: the "
        f"step waits {seconds * 1e3:.3g} ms for the latency of {format_bytes(sent)}.",
        IN_TWO_STAGES if flat else fewer,
        round(sent),
    )


def hosts_last(step: Step) -> Iterator[Finding]:
    """Leaves that are gathered in a host first and cross to other hosts whole."""
    for name, rows in step.groups:
        wasted = 0.0
        for row in rows:
            gathers = [gather for gather in step.gathers[row.path] if gather.timing]
            within = [g for g in gathers if g.timing and g.timing.networks == (NVLINK,)]
            for across in (g for g in gathers if g.timing and g.timing.networks == (NETWORK,)):
                before = [g for g in within if step.uses_at_once(g) < step.uses_at_once(across)]
                share = 1 / len(across.leaves)
                wasted += share * across.wire_bytes_per_step * (1 - 1 / before[0].group_size) if before else 0.0
        if wasted:
            yield Finding(
                "hosts-last",
                name,
                "is gathered in each host first, and crosses to other hosts whole: each adapter carries "
                f"{format_bytes(wasted)} more in a step than if its pieces crossed first.",
                f"Name the axis across hosts {HOST_AXIS!r}, as DeviceMeshManager.create_fsdp_mesh does: it is gathered "
                "first, when what is sent is smallest.",
                round(wasted),
            )
