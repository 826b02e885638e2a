"""XLA's options that let collectives run while the cores compute, by kind of chip. Nothing is set unless asked for.

    jax.jit(step, compiler_options=compiler_options(jax.devices()[0].device_kind))
    make_train_step(..., compiler_options="auto")                                       the same

By default XLA waits for most collectives of a training step: on v5p and v6e for all of them, on v5e for all but some
gathers. What changes that is no code, but these options:

  v5p, v6e   the SparseCores run collectives by themselves          all bytes are asynchronous
  v5e        gathers in a loop over layers begin a layer ahead      nearly all gathers are; scatters are not
  NVIDIA     a schedule that hides latency; collectives in a loop over layers begin a layer ahead, or end one later

docs/compiler_options.md has what each option does to compiled TPU programs. The effect on GPUs has not been measured.
"""

from collections.abc import Mapping
from typing import Any

import jax

Options = dict[str, Any]

SPARSECORE: Options = {
    f"xla_tpu_enable_sparse_core_collective_offload_{kind}": True
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
}
# Its sister for reduce-scatters is left out: no scatter becomes asynchronous, and a step takes more memory.
ICI_PIPELINING: Options = {"xla_tpu_enable_ici_ag_pipelining": True}
PIPELINES_BY_MODE = (0, 11, 1)  # the release of JAX from which on XLA's GPU pipelining has modes, and other names
TPU_OPTIONS: dict[str, Options] = {
    "TPU v5": SPARSECORE,  # v5p
    "TPU v5p": SPARSECORE,
    "TPU v6 lite": SPARSECORE,  # v6e
    "TPU v6e": SPARSECORE,
    "TPU v5 lite": ICI_PIPELINING,  # v5e
    "TPU v5e": ICI_PIPELINING,
}
GPUS, CPU = ("NVIDIA ", "Tesla "), "cpu"  # what the kinds of all of them begin with


def compiler_options(device_kind: str) -> Options:
    """The options for ``jax.jit(..., compiler_options=...)`` that make collectives asynchronous.

    Args:
      device_kind: as ``jax.Device.device_kind`` names it: "TPU v5 lite", "NVIDIA H100 80GB HBM3", "cpu".
    Returns:
      A dict of its own, to be changed at will; {} for a CPU, on which nothing is asynchronous.
    Raises:
      ValueError: a kind for which no options are known; lists those that are.
    """
    if device_kind == CPU:
        return {}
    if device_kind.startswith(GPUS):
        return _gpu_options()
    if device_kind not in TPU_OPTIONS:
        known = ", ".join(map(repr, [*TPU_OPTIONS, f"{GPUS[0]}...", CPU]))
        raise ValueError(
            f"device_kind={device_kind!r}: no options are known for it, but for {known}. Leave compiler_options out, "
            "or pass a dict of options that you have tried on it."
        )
    return dict(TPU_OPTIONS[device_kind])


def _gpu_options() -> Options:
    by_mode = jax.__version_info__ >= PIPELINES_BY_MODE
    name = "xla_gpu_pipeline_{}" if by_mode else "xla_gpu_enable_pipelined_{}"
    on = "COLLECTIVE_PIPELINING_MODE_ON" if by_mode else True
    pipelined = {name.format(kind): on for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    return {"xla_gpu_enable_latency_hiding_scheduler": True, **pipelined}


def resolved(options: str | Mapping[str, Any] | None, device_kind: str) -> Options | None:
    """What ``jax.jit`` and ``compile`` take for a user's choice: a dict, "auto" for ``compiler_options``, or None.

    Raises:
      ValueError: another string; or "auto", and a kind for which no options are known.
    """
    if isinstance(options, str) and options != "auto":
        raise ValueError(f"compiler_options={options!r}: pass a dict of XLA's options, 'auto' or None.")
    return dict(compiler_options(device_kind) if options == "auto" else options or {}) or None
