"""Other meshes for a plan: all that its profile's axes allow, and which of them is the fastest."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax

from ltx2_cli.core.report import Report
from ltx2_cli.forecast.configs import declare_described
from ltx2_cli.forecast.forecast import Forecast, forecast, forward_programs
from ltx2_cli.forecast.phases import LOOPS
from ltx2_cli.plan import Plan, decide
from ltx2_cli.sharding import divisors
from ltx2_cli.spec import ShardingSpec, SpecError

CHEAPEST_FIRST = ("rows", "tokens", "heads")  # by what splitting each sends: nothing, tokens, sums; other axes more
COMPILED = 3  # meshes, of those that may fit
SECONDS = 300.0  # after which no other is begun


@dataclass(frozen=True)
class Search:
    """The meshes that were tried, and which is best."""

    tried: tuple[Forecast, ...]  # compiled, if the weights leave room
    best: Forecast | None  # None: none fits
    seconds: float


def search(plan: Plan, devices: Sequence[jax.Device], report: Report) -> Search:
    """Every mesh of the plan's axes by its weights, and of those that they leave room the likeliest compiled."""
    began = time.monotonic()
    with report.stage("lay out meshes"):
        tried = [Forecast(each) for each in meshes(plan, devices)]
    for place in [place for place, each in enumerate(tried) if each.fits][:COMPILED]:
        if time.monotonic() - began < SECONDS:
            tried[place] = forecast(tried[place].plan, forward_programs(tried[place].plan), report)
    fitting = [each for each in tried if each.forward and each.fits]
    return Search(tuple(tried), min(fitting, key=cost, default=None), time.monotonic() - began)


def cost(forecast: Forecast) -> tuple[float, float, float]:
    """What is best least: the time of all steps, to a hundredth; then what one sends; then its memory."""
    assert forecast.forward is not None
    steps = sum(seconds for phase, seconds in forecast.clip_seconds.items() if phase in LOOPS)
    return float(f"{steps:.2g}"), forecast.forward.wire_bytes, forecast.forward.memory.peak_bytes


def meshes(plan: Plan, devices: Sequence[jax.Device]) -> Iterator[Plan]:
    """The plan under each mesh of its profile's axes that divides devices, rows and model, the cheapest first: those
    with few devices along the axes that send most."""
    declared = declare_described(plan.spec, plan.checkpoint)
    for sharding in mesh_specs(plan, len(devices)):
        try:
            yield decide(declared, replace(plan.spec, sharding=sharding), devices)
        except SpecError:  # as it says, something does not divide
            continue


def mesh_specs(plan: Plan, devices: int) -> Iterator[ShardingSpec]:
    """The plan's profile with each mesh of its axes that divides so many devices and the rows, the cheapest first."""
    sharding = plan.spec.sharding
    if not sharding.mesh:
        return
    rules = {**sharding.weights, **sharding.activations}
    order = [rules[name] for name in CHEAPEST_FIRST if name in rules]
    axes = [*dict.fromkeys(order), *(axis for axis in sharding.mesh if axis not in order)]
    rows = len(plan.stages[0].passes) * plan.spec.num_videos
    for sizes in sorted(_factors(devices, len(axes)), key=lambda sizes: sizes[::-1]):
        chosen = dict(zip(axes, sizes, strict=True))
        if rows % chosen.get(sharding.activations.get("rows", ""), 1):
            continue
        yield replace(sharding, mesh={axis: chosen[axis] for axis in sharding.mesh})


def _factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """The ways to write `number` as a product of so many factors."""
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        yield from ((first, *rest) for rest in _factors(number // first, parts - 1))
