"""What XLA must know to compile for a GPU that is not there: a ``GpuTargetConfigProto``, as text.

The facts are those of XLA's own descriptions (openxla/xla, ``xla/backends/gpu/target_config/specs``: a100_sxm_80,
h100_sxm, h200, b200, gb200). They decide which kernels the compiler can make and how it weighs them. The library itself
computes with the makers' figures in ``chips``, which may differ by some percent.
"""

from dataclasses import dataclass

from xlstm_jax.distributed.hardware.chips import Chip

# XLA asks for versions of CUDA and cuDNN, and without a device nobody else tells it (openxla/xla#25919).
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
CUDNN = 90800  # 9.8, as JAX counts it
_VERSIONS = """\
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 }"""


@dataclass(frozen=True)
class _Target:
    """XLA's facts about a GPU. A core is a streaming multiprocessor; memory in bytes, bandwidth in bytes/s."""

    compute_capability: int  # the major version; the minor one is 0
    core_count: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    memory_bandwidth: int
    device_memory_size: int
    l2_cache_size: int
    clock_rate_ghz: float
    active_links: int  # NVLinks


_TARGETS = {
    "a100": _Target(8, 108, 64, 167936, 166912, 2039040000000, 85100068864, 41943040, 1.41, 12),
    "h100": _Target(9, 132, 128, 233472, 232448, 3352320000000, 84942979072, 52428800, 1.98, 18),
    "h200": _Target(9, 132, 128, 233472, 232448, 4800000000000, 151397597184, 52428800, 1.98, 18),
    "b200": _Target(10, 148, 128, 233472, 232448, 7672320000000, 191514411008, 132644864, 1.965, 18),
    "gb200": _Target(10, 152, 128, 233472, 232448, 7928064000000, 197897748480, 135528448, 2.062, 18),
}


def compute_capability(chip: Chip) -> tuple[int, int]:
    """The generation of a GPU, as (9, 0)."""
    return _TARGETS[chip.name].compute_capability, 0


def target_config(chip: Chip) -> str:
    """The description of a GPU that ``get_topology_desc(platform="cuda", target_config=...)`` takes.

    >>> from xlstm_jax.distributed.hardware import CHIPS
    >>> "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES" in target_config(CHIPS["h100"])
    True
    """
    target = _TARGETS[chip.name]
    # sm_90a and later: instructions of this generation alone, such as those of its matrix units.
    extension = " feature_extension: ACCELERATED_FEATURES" if target.compute_capability >= 9 else ""
    return f"""\
gpu_device_info {{
{_SAME_FOR_ALL}
  cuda_compute_capability {{ major: {target.compute_capability} minor: 0{extension} }}
  core_count: {target.core_count}
  fpus_per_core: {target.fpus_per_core}
  shared_memory_per_core: {target.shared_memory_per_core}
  shared_memory_per_block_optin: {target.shared_memory_per_block_optin}
  memory_bandwidth: {target.memory_bandwidth}
  device_memory_size: {target.device_memory_size}
  l2_cache_size: {target.l2_cache_size}
  clock_rate_ghz: {target.clock_rate_ghz}
  device_interconnect_info {{ active_links: {target.active_links} }}
}}
{_VERSIONS}
device_description_str: "{chip.device_kinds[0]}"
"""
