"""Devices: the platforms that jax tries, the devices it finds, and their memory."""

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ltx2_cli.chips import chip
from ltx2_cli.errors import UsageError

if TYPE_CHECKING:  # importing jax takes long
    import jax

TPU_DEVICES = ("/dev/accel*", "/dev/vfio/[0-9]*")
# A folder of its own: in the environment itself, jax would print an error at every start on a machine without a GPU.
GPU_COMPILER = Path(sys.prefix) / "gpu-compiler"
PLANNABLE_FRACTION = 0.85  # of a device's memory that a plan may use; the rest is a reserve
FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
OWN_GROUP = Path("/proc/self/cgroup")  # holds 0::PATH of the process's control group
CGROUPS = Path("/sys/fs/cgroup")
BFLOAT16_CAPABILITY = 8.0  # compute capability of the first GPUs that multiply it
DEFAULT_FRACTION = 0.75  # of a GPU's memory, which jax allocates
RESERVE = 0.1  # of jax's allocation on a GPU: no estimate has its libraries' workspaces, and no card was measured
RESERVE_REMARK = f"{RESERVE:.0%} kept for cuDNN's workspaces, autotuning and fragmentation; not measured"


def computes_in_float32(device: "jax.Device") -> bool:
    """Whether XLA computes with bfloat16 in float32: on CPUs, and on NVIDIA's GPUs before compute capability 8.0."""
    capability = device.compute_capability if device.platform == "gpu" else ""
    return device.platform == "cpu" or (capability[:1].isdecimal() and float(capability) < BFLOAT16_CAPABILITY)


def skip_absent_tpu() -> None:
    """Keep jax from starting libtpu on a machine without a TPU, which takes up to half a minute and prints lines. Call
    it before jax detects devices; later it has no effect. GPUs, platforms of JAX_PLATFORMS, and compilation for a
    described TPU are not affected."""
    import jax
    from jax.extend.backend import register_backend_factory

    settings: Any = jax.config  # untyped
    if is_tpu_absent(settings.jax_platforms):
        with suppress(RuntimeError):  # already started
            register_backend_factory("tpu", lambda: None, priority=0, fail_quietly=True)


def is_tpu_absent(platforms: str | None) -> bool:
    """Whether no platform is requested and there is no device file of a TPU. jax itself requests `tpu,cpu` for a TPU on
    the PCI bus."""
    return not (platforms or "JAX_FORCE_TPU_INIT" in os.environ or any(map(glob, TPU_DEVICES)))


def find_gpu_compiler() -> None:
    """Let jax find the GPUs' compiler where `make compilers` installs it. Call it before jax is imported, which looks
    for cuDNN then."""
    sys.path.append(str(GPU_COMPILER))


def slice_index(device: "jax.Device") -> int:
    """The number of a device's TPU slice; 0 for other devices and described ones, for which jax has no such number."""
    return getattr(device, "slice_index", 0)


def chip_place(device: "jax.Device") -> tuple[int, ...]:
    """The slice and the coordinates of a device's chip; the number of a device without coordinates, such as a CPU."""
    return slice_index(device), *getattr(device, "coords", (device.id,))


def install_command(extra: str = "") -> str:
    """The command that installs ltx2, with an optional dependency such as `[tpu]`; no index has the name ltx2."""
    return f"in a clone of ltx2: pip install -c constraints.txt '.{extra}'"


def find_devices() -> "list[jax.Device]":
    """The devices that jax detects. Raises `UsageError` where the platforms of JAX_PLATFORMS are unusable."""
    import jax

    skip_absent_tpu()
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for a plugin that is not installed
        settings: Any = jax.config
        reason = str(error).partition(" (set JAX_PLATFORMS")[0] or "its plugin is not installed"
        raise UsageError(
            f"jax cannot use JAX_PLATFORMS={settings.jax_platforms}: {reason}",
            f"leave JAX_PLATFORMS out to take what is here; for a GPU, {install_command('[gpu]')}",
        ) from error


class DeviceMemory(NamedTuple):
    """Memory of one device, in bytes; infinite where unknown."""

    limit: float  # for a program; on a GPU without `RESERVE`
    total: float  # of the device: more than the limit on a GPU, of which jax takes a fraction
    planned: float  # for a plan


def device_memory(devices: "Sequence[jax.Device]") -> DeviceMemory:
    """The memory of each of `devices`, of one kind: as the device reports it, else as its maker publishes it. CPU
    devices share `PLANNABLE_FRACTION` of the memory of this process."""
    fraction, usable = (memory_fraction(), 1 - RESERVE) if devices[0].platform == "gpu" else (1, 1)
    if taken := min((size for device in devices if (size := _statistics(device).get("bytes_limit"))), default=0):
        return DeviceMemory(usable * taken, taken / fraction, PLANNABLE_FRACTION * taken)
    if known := chip(devices[0].device_kind):
        return DeviceMemory(usable * known.hbm_bytes, known.hbm_bytes, PLANNABLE_FRACTION * known.hbm_bytes)
    import jax

    local = [device for device in devices if device.process_index == jax.process_index()]
    budget = PLANNABLE_FRACTION * machine_memory() / len(local) if devices[0].platform == "cpu" and local else math.inf
    return DeviceMemory(budget, budget, budget)


def host_memory(devices: "Sequence[jax.Device]") -> float:
    """Bytes of this host's memory for each device that it has of these; infinite where it has none."""
    import jax

    local = set(jax.local_devices()) & set(devices)
    return PLANNABLE_FRACTION * machine_memory() / len(local) if local else math.inf


def memory_fraction() -> float:
    """The fraction of a GPU's memory that jax allocates in this process."""
    return float(os.environ.get(fraction_variable()) or DEFAULT_FRACTION)


def fraction_variable() -> str:
    """The environment variable of that fraction: the one that is set, else the one that every jax version knows."""
    return next((name for name in FRACTION_VARIABLES if os.environ.get(name)), FRACTION_VARIABLES[-1])


def peak_memory(devices: "Sequence[jax.Device]") -> int | None:
    """The peak of bytes in use on one of `devices`; None where none reports it."""
    return max((peak for device in devices if (peak := _statistics(device).get("peak_bytes_in_use"))), default=None)


def _statistics(device: "jax.Device") -> Mapping[str, int]:
    """The device's own figures. Empty for a device of another host, one described to a compiler, a CPU, or a GPU whose
    memory jax does not manage (XLA_PYTHON_CLIENT_ALLOCATOR)."""
    import jax

    try:
        return device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return {}


def machine_memory() -> int:
    """Bytes for this process: the machine's, or the lowest limit of its control groups (of a container or a SLURM job):
    cgroup v2, and v1 as in containers."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    own = re.search("^0::/(.*)$", OWN_GROUP.read_text() if OWN_GROUP.exists() else "", re.MULTILINE)
    group = CGROUPS / (own[1] if own else "")
    files = [folder / "memory.max" for folder in (group, *group.parents) if folder.is_relative_to(CGROUPS)]
    files.append(CGROUPS / "memory" / "memory.limit_in_bytes")
    limits = [file.read_text().strip() for file in files if file.is_file()]
    return min([memory, *(int(limit) for limit in limits if limit.isdecimal())])  # v2 writes `max` for no limit
