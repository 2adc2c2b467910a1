"""Devices that are not here, to compile for: those of TPU slices, and H100 GPUs.

`make compilers` installs their compilers, the optional dependencies `tpu-compiler` and `gpu-compiler`, as CI does.
"""

from importlib.util import find_spec

import jax
import pytest
from jax.experimental import topologies

from ltx2_cli.estimate.offline import topology

# Facts that XLA asks for of a GPU: NVIDIA's H100 SXM data sheet and the CUDA programming guide, compute capability 9.0.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84978434048
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed: make compilers")
needs_cuda = pytest.mark.skipif(
    find_spec("jax_cuda13_plugin") is None, reason="the GPUs' compiler is not installed: make compilers"
)


def devices(name: str) -> tuple[jax.Device, ...]:
    """Those of a TPU slice by its name, or eight H100 of one host."""
    if name != "h100":
        return topology(name)
    return tuple(topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x8").devices)
