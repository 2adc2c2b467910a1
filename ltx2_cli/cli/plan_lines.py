"""A forecast as a page of text."""

import math
from collections.abc import Iterator, Sequence

from ltx2_cli.cli.preview import held
from ltx2_cli.console import columns
from ltx2_cli.forecast.forecast import Forecast
from ltx2_cli.forecast.hlo import Collective, wire_bytes
from ltx2_cli.forecast.meshes import Search
from ltx2_cli.forecast.phases import LOOPS
from ltx2_cli.forecast.record import assumptions
from ltx2_cli.stages import REFINER
from ltx2_cli.units import natural


def lines(forecast: Forecast) -> Iterator[str]:
    """Everything worth saying, a heading over each part."""
    yield from columns([*_request(forecast), *(("warning", each) for each in forecast.warnings)])
    yield from ("", *_memory(forecast))
    for each in forecast.stages:
        yield from ("", *_forward(each))
    if forecast.rooflines:
        yield from ("", *_time(forecast))


def search_lines(search: Search) -> Iterator[str]:
    """Each mesh that was tried, and which was chosen, and why."""
    yield f"meshes, the cheapest first; {search.seconds:.0f} s"
    rows = [("  mesh", "a device needs", "sends", "step")]
    rows += [(f"  {mesh_of(each)}", *_tried(each)) for each in search.tried]
    yield from columns(rows, right=(1, 2, 3))
    if search.best is None:
        yield "none of them fits"
    else:
        yield f"chosen: {mesh_of(search.best)}; its step is the shortest, of equal ones it sends least"
    yield ""


def mesh_of(forecast: Forecast) -> str:
    """The mesh in words."""
    return forecast.plan.sharding.text


def _tried(forecast: Forecast) -> tuple[str, str, str]:
    needed = natural(max(forecast.phase_bytes.values()))
    if not forecast.fits:
        return needed, "does not fit", ""
    if forecast.forward is None:
        return needed, "not compiled", ""
    step = forecast.step
    return needed, natural(forecast.forward.wire_bytes), _seconds(step.seconds) if step else ""


def _request(forecast: Forecast) -> list[tuple[str, str]]:
    plan, kind = forecast.plan, forecast.plan.sharding.mesh.devices.flat[0].device_kind
    spec = plan.spec
    clip = f"{spec.width}x{spec.height}, {spec.num_frames} frames at {spec.fps:g} a second"
    files = "" if plan.checkpoint.files else ", by the configs that come with ltx2"
    return [
        ("model", (spec.model if spec.model == spec.checkpoint else f"{spec.model}, {spec.checkpoint}") + files),
        ("video", f"{clip}" + f", {spec.num_videos} of them" * (spec.num_videos > 1)),
        *(row for each in forecast.stages for row in _stage(each)),
        ("devices", f"{forecast.devices} {kind}, profile {spec.sharding.profile}: {mesh_of(forecast)}"),
    ]


def _stage(forecast: Forecast) -> Iterator[tuple[str, str]]:
    """What one stage does, and to begin with."""
    plan, stage = forecast.plan, forecast.stage
    spec, geometry = plan.spec, stage.geometry
    if stage.source is not None:
        yield "upsample", spec.refinement.upsampler or f"{spec.checkpoint}, its own upsampler"
    if stage.network == REFINER:
        yield from (("lora", lora) for lora in spec.refinement.lora or ())
        yield "held", held(plan)
    tokens = f"{geometry.video_tokens} of video, {geometry.audio_frames} of sound, {spec.max_sequence_length} of text"
    yield "tokens", tokens
    passes = ", ".join(each.name.lower() for each in stage.passes)
    mesh = f"; devices {stage.sharding.text}" * (stage.sharding != plan.sharding)
    yield "denoise", f"{forecast.steps} steps, passes: {passes}{mesh}"


def _memory(forecast: Forecast) -> Iterator[str]:
    limit = forecast.hbm_bytes
    yield f"memory of a device{'' if math.isinf(limit) else f', of {natural(int(limit))}'}"
    rows = []
    for phase, memory in forecast.memory.items():
        about = "about " if forecast.is_estimated(phase) else ""
        parts = f"weights {natural(memory.weights)}, beside them {about}{natural(memory.activations)}"
        if memory.loading > memory.weights + memory.activations:
            parts += f"; {natural(memory.loading)} while it is loaded"
        rows.append((f"  {phase}", natural(memory.peak), parts, "" if memory.peak <= limit else "does not fit"))
    yield from columns(rows, right=(1,))


def _forward(forecast: Forecast) -> Iterator[str]:
    yield "one forward of a device" + _of(forecast)
    rows = [("  work", natural(forecast.flops / forecast.devices, "FLOP"), "", "")]
    forward = forecast.forward
    if forward is None:
        reasons = [each.reason for each in forecast.refused] or ["the weights do not fit"]
        yield from columns([*rows, ("  not compiled", "", reasons[0], "")], right=(1,))
        return
    rows += [(f"  {_words(name)}", natural(size), "", "") for name, size in vars(forward.memory).items()]
    rows += [("  sends", natural(forward.wire_bytes), "", ""), *_collectives(forward.collectives)]
    yield from columns(rows, right=(1,))
    yield f"  compiled in {forward.compile_seconds:.0f} s"


def _of(forecast: Forecast) -> str:
    """Of which stage, where there are several."""
    return f", stage {forecast.number + 1}" * (len(forecast.plan.stages) > 1)


def _words(key: str) -> str:
    return key.removesuffix("_bytes")


def _collectives(collectives: Sequence[Collective]) -> Iterator[tuple[str, str, str, str]]:
    """Those of one kind along the same axes together, those that send most first."""
    alike: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for each in collectives:
        alike.setdefault((each.kind, each.axes), []).append(each)
    for (kind, axes), group in sorted(alike.items(), key=lambda item: -wire_bytes(item[1])):
        times = sum(each.times for each in group)
        yield f"    {kind}", natural(wire_bytes(group)), f"along {', '.join(axes)}" if axes else "", f"{times} times"


def _time(forecast: Forecast) -> Iterator[str]:
    clip = forecast.clip_seconds
    yield "least time: no run is faster"
    rows = []
    for each, phase in zip(forecast.stages, LOOPS, strict=False):
        step = forecast.rooflines[phase]
        parts = [f"{part} {_seconds(seconds)}" for part, seconds in vars(step).items()]
        rows.append((f"  step{_of(each)}", _seconds(step.seconds), ", ".join(parts)))
    phases = [f"{phase} {_seconds(seconds)}" for phase, seconds in clip.items()]
    yield from columns([*rows, ("  clip", _seconds(sum(clip.values())), ", ".join(phases))], right=(1,))
    yield from (f"  if {each}" for each in assumptions(forecast))


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
