"""The compiled text of a benchmark's step on one device, without names."""

import re

import jax

from benchmarks.cases import SIZES, Case, build

# On GPUs autotuning chooses a kernel's configuration by time, so the choice may differ between compilations.
NAMES = {"cpu": r", metadata=\{[^}]*\}", "gpu": r", metadata=\{[^}]*\}|, backend_config=.*"}


def instructions(case: Case, device: jax.Device) -> list[str]:
    """Returns the sorted lines of the compiled program: the order of independent instructions is arbitrary."""
    step, args = build(SIZES["small"], case, (1,), [device])
    text = re.sub(NAMES[device.platform], "", step.lower(*args).compile().as_text())
    lines = [re.sub(r"%[\w.\-]+", "%", line) for line in text.splitlines() if line.startswith("  ")]
    return sorted(lines)
