"""Layout of the work on devices: the sharding profile of their kind, and the placement of guidance passes."""

from collections.abc import Iterator, Sequence

import jax

from ltx2_cli.chips import chip
from ltx2_cli.errors import UsageError
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.plan.decoding import DecodePlan
from ltx2_cli.plan.pixel_tiles import PixelTiles
from ltx2_cli.plan.step_cost import Step, mean_seconds
from ltx2_cli.request.profiles import profile_names
from ltx2_cli.request.spec import Decoder
from ltx2_cli.request.spelling import option_name, typed
from ltx2_cli.units import duration, quantity


def device_profile(devices: Sequence[jax.Device]) -> str:
    """The sharding profile of these devices. Raises `UsageError` for several devices of an unknown kind."""
    platform, kind = devices[0].platform, devices[0].device_kind
    if platform == "cpu" or len(devices) == 1:
        return "single"
    if platform == "gpu":
        return platform
    if (published := chip(kind)) and published.profile:
        return published.profile
    known = ", ".join(typed("sharding", name) for name in profile_names("sharding"))
    hint = f"name one: {known}, or a FILE"
    raise UsageError(f"no sharding profile is made for {len(devices)} devices of kind {kind}", hint)


def layout_warnings(sharding: ShardingPlan, heads: int, decoding: DecodePlan, decode_budget: float) -> Iterator[str]:
    """Warnings: self-attention cannot trade tokens for heads; decoding needs more than `decode_budget` bytes."""
    local, parts = heads // sharding.parts("heads"), sharding.parts("tokens")
    if local % parts:
        yield (
            f"{local} attention heads do not divide by the {parts} devices that split the tokens: each of them gathers"
            " all keys and values; fewer devices along that axis, or another mesh, would not"
        )
    if (needed := decoding.video_bytes) > decode_budget:
        sides = f"a smaller {option_name('height')} or {option_name('width')}"
        less = f"fewer {option_name('num_frames')}, {sides}, or more devices"
        if isinstance(decoding.tiles, PixelTiles):  # of one size
            less = typed("decoder", Decoder.convolution.value)
        yield (
            f"decoding takes about {quantity(needed)} on a device that has {quantity(max(decode_budget, 0))} for it;"
            f" {less}"
        )


def check_reference_layout(sharding: ShardingPlan, heads: int) -> None:
    """Raise `UsageError` if self-attention cannot trade tokens for heads, as weighted references need."""
    local, parts = heads // sharding.parts("heads"), sharding.parts("tokens")
    if local % parts:
        raise UsageError(
            f"{local} attention heads do not divide by the {parts} devices that split the tokens, which references with"
            " a strength or a mask of attention need",
            f"{typed('sharding', 'FILE')} with another mesh, or no {option_name('reference_strength')} and no mask",
        )


def choose_layout(
    steps: Sequence[Step], together: ShardingPlan, side_by_side: ShardingPlan
) -> tuple[ShardingPlan, str]:
    """The layout that is faster for all steps by estimate, and a sentence with the reason. `together`: all passes of a
    video on each device, where passes reuse work; `side_by_side`: less communication. Side by side and no sentence if
    both are equal, or rates are unknown."""
    ways = {"together, they reuse work": together, "side by side": side_by_side}
    times = {name: seconds for name, sharding in ways.items() if (seconds := mean_seconds(steps, sharding)) is not None}
    if together == side_by_side or not times:
        return side_by_side, ""
    best, other = sorted(times, key=lambda name: times[name])
    took = {name: duration(seconds) for name, seconds in times.items()}
    return ways[best], f"{best}: about {took[best]} a step by estimate, {took[other]} {other}, {ways[other].text}"
