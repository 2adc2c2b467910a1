"""Absent devices, of a TPU slice or a host with GPUs; and the search for the fastest mesh of a plan."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from math import prod
from typing import Any

import jax
from jax.experimental import topologies

from ltx2_cli.chips import CHIPS, Chip
from ltx2_cli.core.report import Report
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.estimate import Estimate, compile_and_estimate, estimate_plan, forward_programs
from ltx2_cli.estimate.gpus import gpu_names, gpus
from ltx2_cli.parallel.devices import install_command
from ltx2_cli.parallel.mesh import divisors
from ltx2_cli.plan.resolve import Plan, build_plan
from ltx2_cli.request.spec import ShardingSpec

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
    """The devices of a TPU slice such as `v6e:2x4`, or GPUs such as `h100:8`, to compile for; needs none of them.
    Raises `UsageError` if their compiler is not installed or does not know them."""
    if not _SLICE.fullmatch(name):
        return gpus(name)
    tpus = [chip for chip in CHIPS if chip.topology]
    try:
        return _devices(name)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith(("INVALID_ARGUMENT", "NOT_FOUND")):
            raise
        own = [chip for chip in tpus if name.startswith(chip.name)]
        known = "; ".join(", ".join(slices(chip)) for chip in own or tpus)
        raise UsageError(f"libtpu knows no TPU slice {name}", f"it knows {known}") from error
    except RuntimeError as error:  # as jax says that there is no libtpu
        hint = f"on Linux for x86-64, {install_command('[tpu]')}"
        raise UsageError(f"compiling for {name} needs libtpu, the TPUs' compiler", hint) from error


def slices(chip: Chip) -> list[str]:
    """The slices of a TPU that libtpu knows, smallest first, up to 64 devices; or numbers of a GPU."""
    if not chip.topology:
        return gpu_names(chip)
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


CHEAPEST_FIRST = ("rows", "tokens", "heads")  # by what splitting each sends: nothing, tokens, sums; other axes more
COMPILED = 3  # meshes, of those that may fit
COMPILE_SECONDS = 300.0  # after which no other is begun


@dataclass(frozen=True)
class MeshSearch:
    """The meshes of a search, and the best one."""

    tried: list[Estimate]  # compiled, if the weights leave room
    best: Estimate | None  # None: none fits
    seconds: float

    def record(self) -> dict[str, Any]:
        """The meshes as JSON; null for values of a mesh that was not compiled."""
        return {
            "search": [
                {
                    "mesh": dict(candidate.plan.sharding.mesh.shape),
                    "chosen": candidate is self.best,
                    "fits": candidate.fits,
                    "phase_bytes": candidate.phase_bytes,
                    "sent_bytes": forward.sent_bytes if forward else None,
                    "seconds_per_step": candidate.stages[0].seconds_per_step if forward else None,
                    "expected_seconds_per_step": None if candidate.unmeasured else candidate.stages[0].expected_seconds,
                    "compile_seconds": forward.compile_seconds if forward else None,
                }
                for candidate, forward in ((candidate, candidate.stages[0].forward) for candidate in self.tried)
            ],
            "search_seconds": self.seconds,
        }


def search_meshes(plan: Plan, devices: Sequence[jax.Device], report: Report) -> MeshSearch:
    """Try every mesh of the plan's axes by the memory of its weights, and compile the most promising that fit."""
    start = time.monotonic()
    with report.activity("lay out meshes"):
        tried = [estimate_plan(candidate) for candidate in meshes(plan, devices)]
    for place in [place for place, candidate in enumerate(tried) if candidate.fits][:COMPILED]:
        if time.monotonic() - start < COMPILE_SECONDS:
            candidate = tried[place].plan
            tried[place] = compile_and_estimate(candidate, forward_programs(candidate), report)
    fitting = [candidate for candidate in tried if candidate.stages[0].forward and candidate.fits]
    return MeshSearch(tried, min(fitting, key=_cost, default=None), time.monotonic() - start)


def _cost(candidate: Estimate) -> tuple[float, int, int]:
    """Sort key, best first: denoising time (2 digits), bytes sent, peak memory."""
    times = [stage.stage.forwards * stage.expected_seconds.low for stage in candidate.stages if stage.expected_seconds]
    forward = candidate.compiled[0]
    return float(f"{sum(times):.2g}"), forward.sent_bytes, forward.memory.peak_bytes


def meshes(plan: Plan, devices: Sequence[jax.Device]) -> Iterator[Plan]:
    """Plans on each mesh of the profile's axes that divides devices, rows and model, the cheapest first: fewest devices
    along the axes that send most."""
    for sharding in mesh_specs(plan, len(devices)):
        try:
            yield build_plan(plan, replace(plan.spec, sharding=sharding), devices)
        except UsageError:  # something does not divide
            continue


def mesh_specs(plan: Plan, devices: int) -> Iterator[ShardingSpec]:
    """The plan's profile with each mesh of its axes that divides the devices and the rows, the cheapest first."""
    sharding, rows = plan.spec.sharding, len(plan.stages[0].passes) * plan.spec.num_videos
    if not sharding.mesh:
        return
    rules = {**sharding.weights, **sharding.activations}
    order = [rules[name] for name in CHEAPEST_FIRST if name in rules]
    first, *axes = [*dict.fromkeys(order), *(axis for axis in sharding.mesh if axis not in order)]
    for reversed_sizes in product(divisors(devices), repeat=len(axes)):  # of the axes, the last of which varies least
        chosen = dict(zip(axes, reversed_sizes[::-1], strict=True))
        chosen[first], rest = divmod(devices, prod(reversed_sizes))
        if not rest and rows % chosen.get(sharding.activations.get("rows", ""), 1) == 0:
            yield replace(sharding, mesh={axis: chosen[axis] for axis in sharding.mesh})
