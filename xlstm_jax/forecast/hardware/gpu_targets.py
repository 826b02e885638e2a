"""Descriptions of absent GPUs for XLA's compiler: a ``GpuTargetConfigProto``, as text.

The facts come from XLA's descriptions (openxla/xla, ``xla/backends/gpu/target_config/specs``: a100_sxm_80, h100_sxm,
h200, b200, gb200, b300, gb300). XLA uses them to choose and to weigh kernels. The library computes with the makers'
figures in ``chips``, which may differ by some percent.
"""

from typing import NamedTuple

from xlstm_jax.forecast.hardware.chips import Chip

# XLA needs the versions of CUDA and cuDNN, and without a device has no other source (openxla/xla#25919).
_SAME_FOR_ALL = """\
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536"""
_VERSIONS = """\
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 }"""


class _Target(NamedTuple):
    """XLA's facts about a GPU: compute capability, number of NVLinks, and values of ``_FACTS``."""

    compute_capability: tuple[int, int]
    active_links: int
    facts: tuple[float, ...]


# A core is a streaming multiprocessor; memory in bytes, bandwidth in bytes/s.
_FACTS = "core_count fpus_per_core shared_memory_per_core shared_memory_per_block_optin memory_bandwidth".split()
_FACTS += ["device_memory_size", "l2_cache_size", "clock_rate_ghz"]
_TARGETS = {
    "a100": _Target((8, 0), 12, (108, 64, 167936, 166912, 2039040000000, 85100068864, 41943040, 1.41)),
    "h100": _Target((9, 0), 18, (132, 128, 233472, 232448, 3352320000000, 84942979072, 52428800, 1.98)),
    "h200": _Target((9, 0), 18, (132, 128, 233472, 232448, 4800000000000, 151397597184, 52428800, 1.98)),
    "b200": _Target((10, 0), 18, (148, 128, 233472, 232448, 7672320000000, 191514411008, 132644864, 1.965)),
    "b300": _Target((10, 3), 18, (158, 128, 233472, 232448, 7936000000000, 297021865984, 135528448, 1.965)),
    "gb200": _Target((10, 0), 18, (152, 128, 233472, 232448, 7928064000000, 197897748480, 135528448, 2.062)),
    "gb300": _Target((10, 3), 18, (152, 128, 233472, 232448, 7928064000000, 297021079552, 135528448, 2.07)),
}


def compute_capability(chip: Chip) -> tuple[int, int]:
    """Returns the compute capability of a GPU as (major, minor), such as (9, 0) for an H100."""
    return _TARGETS[chip.name].compute_capability


def target_config(chip: Chip) -> str:
    """Returns the description of a GPU for XLA's compiler, as the text of a ``GpuTargetConfigProto``.

    >>> from xlstm_jax.forecast.hardware import CHIPS
    >>> "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES" in target_config(CHIPS["h100"])
    True

    ``get_topology_desc(platform="cuda", target_config=...)`` takes this text.
    """
    target = _TARGETS[chip.name]
    major, minor = target.compute_capability
    # sm_90a and later: instructions of this generation alone, such as matrix unit instructions.
    extension = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    facts = "\n".join(f"  {name}: {value}" for name, value in zip(_FACTS, target.facts, strict=True))
    return f"""\
gpu_device_info {{
{_SAME_FOR_ALL}
  cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}
{facts}
  device_interconnect_info {{ active_links: {target.active_links} }}
}}
{_VERSIONS}
device_description_str: "{chip.device_kinds[0]}"
"""
