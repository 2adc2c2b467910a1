"""Other meshes for a plan: all that its profile's axes allow, and which of them is the fastest."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import jax

from ltx2_cli.core.report import Report
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.estimate import Estimate, compile_and_estimate, estimate_plan, forward_programs
from ltx2_cli.estimate.offline import declare_offline
from ltx2_cli.estimate.phases import LOOPS
from ltx2_cli.plan.resolve import Plan, build_plan
from ltx2_cli.request.spec import ShardingSpec
from ltx2_cli.sharding import divisors

CHEAPEST_FIRST = ("rows", "tokens", "heads")  # by what splitting each sends: nothing, tokens, sums; other axes more
COMPILED = 3  # meshes, of those that may fit
SECONDS = 300.0  # after which no other is begun


@dataclass(frozen=True)
class MeshSearch:
    """The meshes that were tried, and which is best."""

    tried: list[Estimate]  # compiled, if the weights leave room
    best: Estimate | None  # None: none fits
    seconds: float

    def record(self) -> dict[str, Any]:
        """The meshes that were tried, as JSON has them; null where one was not compiled."""
        return {
            "search": [
                {
                    "mesh": dict(candidate.plan.sharding.mesh.shape),
                    "chosen": candidate is self.best,
                    "fits": candidate.fits,
                    "phase_bytes": candidate.phase_bytes,
                    "sent_bytes": forward.sent_bytes if forward else None,
                    "seconds_per_step": candidate.stages[0].seconds_per_step if forward else None,
                    "compile_seconds": forward.compile_seconds if forward else None,
                }
                for candidate, forward in ((candidate, candidate.stages[0].forward) for candidate in self.tried)
            ],
            "search_seconds": self.seconds,
        }


def search_meshes(plan: Plan, devices: Sequence[jax.Device], report: Report) -> MeshSearch:
    """Every mesh of the plan's axes by its weights; of those that fit, the likeliest are compiled."""
    start = time.monotonic()
    with report.stage("lay out meshes"):
        tried = [estimate_plan(candidate) for candidate in meshes(plan, devices)]
    for place in [place for place, candidate in enumerate(tried) if candidate.fits][:COMPILED]:
        if time.monotonic() - start < SECONDS:
            candidate = tried[place].plan
            tried[place] = compile_and_estimate(candidate, forward_programs(candidate), report)
    fitting = [candidate for candidate in tried if candidate.stages[0].forward and candidate.fits]
    return MeshSearch(tried, min(fitting, key=_cost, default=None), time.monotonic() - start)


def _cost(candidate: Estimate) -> tuple[float, int, int]:
    """Sort key, best first: denoising time (2 digits), bytes sent, peak memory."""
    steps = sum(seconds for phase, seconds in candidate.phase_seconds.items() if phase in LOOPS)
    forward = candidate.compiled[0]
    return float(f"{steps:.2g}"), forward.sent_bytes, forward.memory.peak_bytes


def meshes(plan: Plan, devices: Sequence[jax.Device]) -> Iterator[Plan]:
    """The plan under each mesh of its profile's axes that divides devices, rows and model, the cheapest first: those
    with few devices along the axes that send most."""
    declared = declare_offline(plan.spec, plan.checkpoint)
    for sharding in mesh_specs(plan, len(devices)):
        try:
            yield build_plan(declared, replace(plan.spec, sharding=sharding), devices)
        except UsageError:  # something does not divide
            continue


def mesh_specs(plan: Plan, devices: int) -> Iterator[ShardingSpec]:
    """The plan's profile with each mesh of its axes that divides so many devices and the rows, the cheapest first."""
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
