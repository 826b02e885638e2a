"""The compiled text of a benchmark's step on one device, without what is only a name."""

import re

import jax

from benchmarks.cases import SIZES, Case, build

# On GPUs the configuration of a kernel is what autotuning has timed; it may differ from one compilation to the next.
NAMES = {"cpu": r", metadata=\{[^}]*\}", "gpu": r", metadata=\{[^}]*\}|, backend_config=.*"}


def instructions(case: Case, device: jax.Device) -> list[str]:
    """The lines of the compiled program, sorted: the order of those that do not depend on each other is free."""
    step, args = build(SIZES["small"], case, (1,), [device])
    text = re.sub(NAMES[device.platform], "", step.lower(*args).compile().as_text())
    lines = [re.sub(r"%[\w.\-]+", "%", line) for line in text.splitlines() if line.startswith("  ")]
    return sorted(lines)
