"""The devices of a TPU slice that nobody has to own."""

import os
import re
from contextlib import suppress
from itertools import combinations_with_replacement

import jax
from jax.experimental import topologies

from ltx2_cli.chips import CHIPS, Chip
from ltx2_cli.errors import UsageError

# libtpu asks the machine that it is on for its place in a slice, and refuses to be loaded twice.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_SLICE = re.compile(r"(v\d|tpu)\w*:\d+(x\d+)*")
_SIDES = (2, 4, 8, 16)  # of the slices that are named in errors
_NAMED_DEVICES = 64  # that the largest of them has


def topology(name: str) -> tuple[jax.Device, ...]:
    """The devices of a TPU slice such as `v6e:2x4`, to compile for; no TPU is needed or touched. Raises `UsageError`
    where libtpu is not installed or does not know it."""
    tpus = [chip for chip in CHIPS if chip.topology]
    if not _SLICE.fullmatch(name):
        examples = ", ".join(f"--topology {chip.topology}" for chip in tpus)
        raise UsageError(f"{name} is no TPU slice", f"for example: {examples}")
    try:
        return _devices(name)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith(("INVALID_ARGUMENT", "NOT_FOUND")):
            raise
        own = [chip for chip in tpus if name.startswith(chip.name)]
        known = "; ".join(", ".join(slices(chip)) for chip in own or tpus)
        raise UsageError(f"libtpu knows no TPU slice {name}", f"it knows {known}") from error
    except RuntimeError as error:  # as jax says that there is no libtpu
        hint = "pip install 'ltx2[tpu]', on Linux for x86-64"
        raise UsageError(f"compiling for {name} needs libtpu, the TPUs' compiler", hint) from error


def slices(chip: Chip) -> list[str]:
    """The slices of a TPU that libtpu knows, smallest first, up to 64 devices."""
    rank = chip.topology.partition(":")[2].count("x") + 1
    shapes = [(1,) * rank, *combinations_with_replacement(_SIDES, rank)]
    sizes: dict[str, int] = {}
    for name in (chip.topology, *(f"{chip.name}:{'x'.join(map(str, shape))}" for shape in shapes)):
        with suppress(jax.errors.JaxRuntimeError):
            sizes[name] = len(_devices(name))
    return sorted((name for name in sizes if sizes[name] <= _NAMED_DEVICES), key=sizes.__getitem__)


def _devices(name: str) -> tuple[jax.Device, ...]:
    single = set(name.partition(":")[2].split("x")) == {"1"}  # libtpu counts in hosts of 2x2 chips unless it is told
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if single else {}
    before = dict(os.environ)
    os.environ.update(_ALONE)
    try:
        return tuple(topologies.get_topology_desc(name, platform="tpu", **bounds).devices)
    finally:
        for variable in _ALONE:
            del os.environ[variable]
        os.environ.update(before)
