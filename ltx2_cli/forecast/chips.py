"""What the makers publish of their chips, and the devices of a TPU slice that nobody has to own."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations_with_replacement

import jax
from jax.experimental import topologies

from ltx2_cli.spec import SpecError

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device as jax counts them, which on TPU v7x is half a chip."""

    name: str
    kinds: tuple[str, ...]  # beginnings of `jax.Device.device_kind`
    hbm_bytes: float  # that a program may fill
    flops: float  # a second, dense bfloat16
    hbm_bandwidth: float  # bytes a second
    wire_bandwidth: float  # bytes a second that a device sends over all its links to its like: half of both directions
    topology: str = ""  # an example of a slice, in libtpu's spelling; none for what is no TPU


# TPUs: bandwidths and FLOP/s from docs.cloud.google.com/tpu/docs, a chip's divided by its devices. The memory is what
# libtpu 0.0.42 gives a program, in its own message where one needs more; the tables name 192, 32, 95 and 16 GiB a chip.
# GPUs: NVIDIA's data sheets of the SXM modules, FLOP/s without sparsity, NVLink.
CHIPS = (
    # tpu7x: two devices a chip; 2307 TFLOP/s, 7380 GB/s, 1200 GB/s both ways a chip
    Chip("tpu7x", ("TPU7x", "TPU v7x"), 94.75 * GIB, 2307e12 / 2, 7380e9 / 2, 1200e9 / 4, "tpu7x:2x2x1"),
    # the pages of v6e and of tpu7x, which has the bandwidth: 918 TFLOP/s, 1638 GB/s, 800 GB/s both ways
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 31.25 * GIB, 918e12, 1638e9, 800e9 / 2, "v6e:2x4"),
    # v5e: 197 TFLOP/s, 819 GB/s, 400 GB/s both ways
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 15.75 * GIB, 197e12, 819e9, 400e9 / 2, "v5e:2x4"),
    # tpu7x's page, beside its own: 459 TFLOP/s, 2765 GB/s, 1200 GB/s both ways; one device a chip
    Chip("v5p", ("TPU v5",), 95.74 * GIB, 459e12, 2765e9, 1200e9 / 2, "v5p:2x2x1"),
    # nvidia.com/en-us/data-center/h100: 1979 TFLOP/s with sparsity, 80 GB, 3.35 TB/s, 900 GB/s both ways
    Chip("H100", ("NVIDIA H100",), 80e9, 1979e12 / 2, 3350e9, 900e9 / 2),
    # nvidia.com/en-us/data-center/h200: the same but 141 GB, 4.8 TB/s
    Chip("H200", ("NVIDIA H200",), 141e9, 1979e12 / 2, 4800e9, 900e9 / 2),
    # DGX B200 data sheet, an eighth of it: 4.5 PFLOP/s with sparsity, 180 GB, 8 TB/s, 1.8 TB/s both ways
    Chip("B200", ("NVIDIA B200",), 180e9, 4500e12 / 2, 8000e9, 1800e9 / 2),
)
# libtpu asks the machine that it is on for its place in a slice, and refuses to be loaded twice.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_SIDES = (2, 4, 8, 16)  # of the slices that are named in errors
_NAMED_DEVICES = 64  # that the largest of them has


def chip(name: str) -> Chip | None:
    """The chip of a `device_kind`, of a topology such as `v6e:2x4`, or of its name; None for one not known here."""
    return next((each for each in CHIPS if name.startswith((*each.kinds, f"{each.name}:")) or name == each.name), None)


def topology(name: str) -> tuple[jax.Device, ...]:
    """The devices of the TPU slice `name`, `v6e:2x4` for one, to compile for: no TPU is needed or touched.

    Raises `SpecError` where libtpu is not installed or knows no such slice.
    """
    try:
        return _devices(name)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith(("INVALID_ARGUMENT", "NOT_FOUND")):
            raise
        own = [each for each in CHIPS if each.topology and name.startswith(each.name)]
        known = "; ".join(", ".join(slices(each)) for each in own or CHIPS if each.topology)
        raise SpecError(f"libtpu knows no TPU slice {name}", f"it knows {known}") from error
    except RuntimeError as error:  # as jax says that there is no libtpu
        raise SpecError(
            f"compiling for {name} needs libtpu, the TPUs' compiler", "pip install 'ltx2[tpu]', on Linux for x86-64"
        ) from error


def slices(chip: Chip) -> list[str]:
    """The slices of a TPU that libtpu knows, smallest first, up to 64 devices."""
    rank = chip.topology.partition(":")[2].count("x") + 1
    sides = [(1,) * rank, *combinations_with_replacement(_SIDES, rank)]
    found: dict[str, int] = {}
    for name in (chip.topology, *(f"{chip.name}:{'x'.join(map(str, each))}" for each in sides)):
        with suppress(jax.errors.JaxRuntimeError):
            found[name] = len(_devices(name))
    return sorted((name for name in found if found[name] <= _NAMED_DEVICES), key=lambda name: found[name])


def _devices(name: str) -> tuple[jax.Device, ...]:
    single = set(name.partition(":")[2].split("x")) == {"1"}  # libtpu counts in hosts of 2x2 chips unless it is told
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if single else {}
    with _environment(_ALONE):
        return tuple(topologies.get_topology_desc(name, platform="tpu", **bounds).devices)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
