"""A plan and its estimate as text: the rows of `--dry-run`, the page of `ltx2 plan`."""

import math
from collections.abc import Iterator, Sequence

from ltx2_cli.console import columns
from ltx2_cli.estimate.collectives import Collective, sent_bytes
from ltx2_cli.estimate.estimate import Estimate, StageEstimate, assumptions
from ltx2_cli.estimate.meshes import MeshSearch
from ltx2_cli.nn.conv import IMAGE_AXES
from ltx2_cli.plan.decoding import DecodePlan
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import REFINER, Stage
from ltx2_cli.units import natural


def request_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """What a run would do, a name and a value a row."""
    spec, mesh = plan.spec, plan.sharding.mesh
    files = "" if plan.checkpoint.files else ", by the configs that come with ltx2"
    yield "model", (spec.model if spec.model == spec.checkpoint else f"{spec.model}, {spec.checkpoint}") + files
    if spec.text_encoder is not None:
        yield "text", spec.text_encoder
    yield from (("lora", lora) for lora in spec.lora)
    yield "recipe", spec.recipe
    clip = f"{spec.width}x{spec.height}, {spec.num_frames} frames at {spec.fps:g} a second"
    videos = f", {spec.num_videos} at once" if spec.num_videos > 1 else ""
    yield "video", f"{clip}: {spec.num_frames / spec.fps:.1f} s{videos}"
    for stage in plan.stages:
        yield from _stage_rows(plan, stage)
    yield "decode", _decoding(plan.decoding)
    yield (
        "devices",
        f"{mesh.size} {mesh.devices.flat[0].device_kind}, profile {spec.sharding.profile}: {plan.sharding.text}",
    )


def _stage_rows(plan: Plan, stage: Stage) -> Iterator[tuple[str, str]]:
    spec, geometry = plan.spec, stage.geometry
    if stage.source is not None:
        yield "upsample", spec.second_stage.upsampler or f"{spec.checkpoint}, its own upsampler"
    if stage.network == REFINER:
        yield from (("lora", lora) for lora in spec.second_stage.lora or ())
    tokens = f"{geometry.video_tokens} of video, {geometry.audio_frames} of sound, {spec.max_sequence_length} of text"
    yield "tokens", tokens
    passes = ", ".join(guidance_pass.name.lower() for guidance_pass in stage.passes)
    mesh = f"; devices {stage.sharding.text}" if stage.sharding != plan.sharding else ""
    yield "denoise", f"{stage.steps} steps, passes: {passes}{mesh}"


def _decoding(decoding: DecodePlan) -> str:
    """How decoding is divided, as far as it is."""
    height, width = (decoding.mesh.shape[axis] for axis in IMAGE_AXES)
    parts = [f"{decoding.videos} videos at a time"] if decoding.videos > 1 else []
    parts += [f"images in {height}x{width} parts"] if height * width > 1 else []
    parts += ["{}x{}x{} tiles of frames, height and width".format(*decoding.tiles.counts)] if decoding.tiles else []
    return ", ".join([*parts, f"about {natural(decoding.bytes)} on a device"])


def estimate_lines(estimate: Estimate) -> Iterator[str]:
    """The page of `ltx2 plan`, a heading over each part."""
    yield from columns([*request_rows(estimate.plan), *(("warning", warning) for warning in estimate.warnings)])
    yield from ("", *_memory(estimate))
    for number in range(len(estimate.stages)):
        yield from ("", *_forward(estimate, number))
    if estimate.phase_seconds:
        yield from ("", *_time(estimate))


def _memory(estimate: Estimate) -> Iterator[str]:
    limit = estimate.device_bytes
    yield "memory of a device" + ("" if math.isinf(limit) else f", of {natural(int(limit))}")
    rows = []
    for phase, memory in estimate.memory.items():
        about = "about " if memory == estimate.uncompiled[phase] else ""
        parts = f"weights {natural(memory.weights)}, beside them {about}{natural(memory.activations)}"
        if memory.loading > memory.weights + memory.activations:
            parts += f"; {natural(memory.loading)} while it is loaded"
        rows.append((f"  {phase}", natural(memory.peak), parts, "" if memory.peak <= limit else "does not fit"))
    yield from columns(rows, right=(1,))


def _forward(estimate: Estimate, number: int) -> Iterator[str]:
    stage = estimate.stages[number]
    yield "one forward of a device" + _of_stage(estimate, number)
    rows = [("  work", natural(stage.flops, "FLOP"), "", "")]
    if stage.collectives is None or stage.sent_bytes is None:
        reasons = [failure.reason for failure in estimate.failures] or ["the weights do not fit"]
        yield from columns([*rows, ("  not compiled", "", reasons[0], "")], right=(1,))
        return
    rows += [(f"  {name.removesuffix('_bytes')}", natural(size or 0), "", "") for name, size in stage.memory.items()]
    rows += [("  sends", natural(stage.sent_bytes), "", ""), *_communication(stage.collectives)]
    yield from columns(rows, right=(1,))
    yield f"  compiled in {stage.compile_seconds:.0f} s"


def _of_stage(estimate: Estimate, number: int) -> str:
    return f", stage {number + 1}" if len(estimate.stages) > 1 else ""


def _communication(collectives: Sequence[Collective]) -> Iterator[tuple[str, str, str, str]]:
    """Collectives of one kind along the same axes together, those that send most first."""
    alike: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for collective in collectives:
        alike.setdefault((collective.kind, collective.axes), []).append(collective)
    for (kind, axes), group in sorted(alike.items(), key=lambda item: -sent_bytes(item[1])):
        times = sum(collective.times for collective in group)
        yield f"    {kind}", natural(sent_bytes(group)), f"along {', '.join(axes)}" if axes else "", f"{times} times"


def _time(estimate: Estimate) -> Iterator[str]:
    yield "least time: no run is faster"
    rows = [(f"  step{_of_stage(estimate, number)}", *_step(stage)) for number, stage in enumerate(estimate.stages)]
    phases = [f"{phase} {_duration(seconds)}" for phase, seconds in estimate.phase_seconds.items()]
    rows.append(("  clip", _duration(sum(estimate.phase_seconds.values())), ", ".join(phases)))
    yield from columns(rows, right=(1,))
    yield from (f"  if {assumption}" for assumption in assumptions(estimate.plan))


def _step(stage: StageEstimate) -> tuple[str, str]:
    parts = stage.roofline_seconds or {}
    return _duration(stage.seconds_per_step or 0), ", ".join(f"{part} {_duration(parts[part])}" for part in parts)


def search_lines(search: MeshSearch) -> Iterator[str]:
    """Each mesh that was tried, and which was chosen, and why."""
    yield f"meshes, the cheapest first; {search.seconds:.0f} s"
    rows = [("  mesh", "a device needs", "sends", "step")]
    rows += [(f"  {candidate.plan.sharding.text}", *_candidate(candidate)) for candidate in search.tried]
    yield from columns(rows, right=(1, 2, 3))
    if search.best is None:
        yield "none of them fits"
    else:
        yield f"chosen: {search.best.plan.sharding.text}; its step is the shortest, of equal ones it sends least"
    yield ""


def _candidate(candidate: Estimate) -> tuple[str, str, str]:
    needed, stage = natural(max(candidate.phase_bytes.values())), candidate.stages[0]
    if not candidate.fits:
        return needed, "does not fit", ""
    if stage.sent_bytes is None:
        return needed, "not compiled", ""
    return needed, natural(stage.sent_bytes), _duration(stage.seconds_per_step) if stage.seconds_per_step else ""


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
