"""How much of each device's memory a program may fill: measured where the device says it, published otherwise."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from ltx2_cli.chips import chip

SHARE = 0.85  # of a device's memory that is planned with; the rest is for what no plan counts
FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
OWN_GROUP = Path("/proc/self/cgroup")  # ends with 0::PATH of the process's control group
GROUPS = Path("/sys/fs/cgroup")
DEFAULT_FRACTION = 0.75  # of a GPU's memory that jax allocates for itself


class DeviceMemory(NamedTuple):
    """Memory of one device, in bytes."""

    limit: float  # that a program may fill; infinite where nobody knows
    total: float  # that the device has: more than the limit on a GPU of which jax takes a fraction
    planned: float  # that one plans with


def device_memory(devices: Sequence[jax.Device]) -> DeviceMemory:
    """The memory of each of `devices`, which are of one kind.

    By what the device says of itself, else by what its maker publishes. A CPU's devices share the memory that
    this process may have, of which they get `SHARE`. Unknown: infinite.
    """
    reported = min((found for found in map(_reported_limit, devices) if found), default=None)
    if reported is not None:
        fraction = memory_fraction() if devices[0].platform == "gpu" else 1
        return DeviceMemory(reported, reported / fraction, SHARE * reported)
    if known := chip(devices[0].device_kind):
        return DeviceMemory(known.hbm_bytes, known.hbm_bytes, SHARE * known.hbm_bytes)
    share = _machine_share(devices)
    return DeviceMemory(share, share, share)


def usable_memory(devices: Sequence[jax.Device]) -> float:
    """Bytes of each device that one plans with."""
    return device_memory(devices).planned


def memory_fraction() -> float:
    """The fraction of a GPU's memory that jax takes in this process."""
    return float(os.environ.get(fraction_variable()) or DEFAULT_FRACTION)


def fraction_variable() -> str:
    """The environment variable that sets that fraction: the one that is set, else the one that every jax knows."""
    return next((name for name in FRACTION_VARIABLES if os.environ.get(name)), FRACTION_VARIABLES[-1])


def peak_memory(devices: Sequence[jax.Device]) -> int | None:
    """The most bytes that were in use at once on one of `devices`; None where none of them says it."""
    return max((found for device in devices if (found := _statistics(device).get("peak_bytes_in_use"))), default=None)


def _reported_limit(device: jax.Device) -> int | None:
    """What the device says that it may fill; None where it says nothing."""
    return _statistics(device).get("bytes_limit")


def _statistics(device: jax.Device) -> Mapping[str, int]:
    """What the device says of its memory: nothing, if it is one of another host, one that is only described to the
    compiler, a CPU, or a GPU whose memory jax does not manage (XLA_PYTHON_CLIENT_ALLOCATOR)."""
    try:
        return device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return {}


def _machine_share(devices: Sequence[jax.Device]) -> float:
    """What each CPU device gets of this machine's memory; infinite for other devices."""
    here = [device for device in devices if device.process_index == jax.process_index()]
    if devices[0].platform != "cpu" or not here:
        return math.inf
    return SHARE * _machine_memory() / len(here)


def _machine_memory() -> int:
    """Bytes that this process may have: the machine's, or the least that its control groups (of a container, of a
    SLURM job) leave it: cgroup v2, and v1 as containers see it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    own = re.search("^0::/(.*)$", OWN_GROUP.read_text() if OWN_GROUP.exists() else "", re.MULTILINE)
    group = GROUPS / (own[1] if own else "")
    groups = [each for each in (group, *group.parents) if each.is_relative_to(GROUPS)]
    files = [*(each / "memory.max" for each in groups), GROUPS / "memory" / "memory.limit_in_bytes"]
    limits = [file.read_text().strip() for file in files if file.is_file()]
    return min([memory, *(int(limit) for limit in limits if limit.isdecimal())])  # v2 writes `max` for no limit
