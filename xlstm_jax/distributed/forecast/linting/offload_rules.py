"""The lint's rule about host offload: where it is not needed, or saves little.

What a step would take without offload is known in part. Its moments would lie on the device all the time:

    at most    what it takes now + the moments
    as a rule  the moments + the most that all else takes, of which the live ranges tell

So the first says for certain that a step would fit. The second is read from the schedule of the offloaded step, where
compilers say what is live (TPUs); without offload they might schedule otherwise.
"""

from collections.abc import Iterator

from xlstm_jax.distributed.forecast.cost.host import HostTraffic
from xlstm_jax.distributed.forecast.linting.step import Finding, Step
from xlstm_jax.wording import format_bytes, format_fraction

MIN_WAITED_FRACTION = 0.05  # of a step's time
MIN_SAVED_FRACTION = 0.4  # of the moments: what groups save even of a small optimizer state


def needless_offload(step: Step) -> Iterator[Finding]:
    """Offload of a step that fits without it and waits for it; else offload that leaves most moments on the device."""
    host, available = step.forecast.host, step.forecast.available_bytes
    if host is None or not host.stored_bytes:
        return
    without = step.forecast.total_bytes + host.stored_bytes
    if available and without <= available:
        if host.waited_s >= MIN_WAITED_FRACTION * (step.forecast.step_seconds or 0):
            yield _not_needed(step, host, without)
        return
    resident, peak = step.forecast.memory.resident_peak_bytes, step.forecast.memory.peak_live_bytes
    if (
        resident is not None
        and (saved := host.stored_bytes - (peak - resident)) < MIN_SAVED_FRACTION * host.stored_bytes
    ):
        yield _saves_little(host, max(0, saved))


def _not_needed(step: Step, host: HostTraffic, without: int) -> Finding:
    available, seconds = step.forecast.available_bytes or 0, step.forecast.step_seconds or 0.0
    return Finding(
        "needless-offload",
        "the optimizer",
        f"{format_bytes(host.stored_bytes)} of its state lie on the host, though with them on the device the step "
        f"would take {format_bytes(without)} of {format_bytes(available)} at most. "
        f"{format_bytes(host.moved_bytes)} travel there and back in a step, which waits {host.waited_s * 1e3:.3g} of "
        f"its {seconds * 1e3:.3g} ms for them.",
        "Leave offload out.",
        host.moved_bytes,
    )


def _saves_little(host: HostTraffic, saved: int) -> Finding:
    return Finding(
        "needless-offload",
        "the optimizer",
        f"{format_bytes(host.stored_bytes)} of its state lie on the host, but most come to the device at once: of its "
        f"memory {format_bytes(saved)} are saved, {format_fraction(saved / host.stored_bytes)} of them, for "
        f"{format_bytes(host.moved_bytes)} that travel in a step, {host.seconds * 1e3:.3g} ms.",
        "Take an optimizer that updates leaves one by one (num_minibatches for optax.MultiSteps, clipping of gradients "
        "for clipping of updates), and the step of make_train_step, which brings them in groups; or leave offload out.",
        host.stored_bytes - saved,
    )
