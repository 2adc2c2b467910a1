"""Summary of a run as rows for people."""

import math
from collections.abc import Collection, Iterator, Sequence

from ltx2_cli.core.advice import UPSAMPLE
from ltx2_cli.core.denoise_memory import host_bytes
from ltx2_cli.core.report import DECODE, DENOISE
from ltx2_cli.estimate.phases import REFINE
from ltx2_cli.nn.layers import IMAGE_AXES
from ltx2_cli.plan.inputs import STAGE2_DENOISER
from ltx2_cli.plan.pixel_tiles import PixelTiles
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import EULER, Stage
from ltx2_cli.plan.video_tiles import output_scale
from ltx2_cli.request.spec import ConditionSpec, Offload
from ltx2_cli.units import quantity


def request_rows(plan: Plan, phases: Collection[str]) -> Iterator[tuple[str, str]]:
    """The summary of a run of these phases: rows of a name and a value."""
    spec, mesh, decoding = plan.spec, plan.sharding.mesh, plan.decoding
    files = "" if plan.checkpoint.files else ", by the configs that come with ltx2"
    yield "model", (spec.model if spec.model == spec.checkpoint else f"{spec.model}, {spec.checkpoint}") + files
    if spec.text_encoder is not None:
        yield "text", spec.text_encoder
    if spec.transformer is not None:
        yield "denoiser", spec.transformer
    yield from (("lora", lora) for lora in spec.lora)
    kinds = plan.checkpoint.matrices(spec)
    for kind in dict.fromkeys(filter(None, kinds)):
        names = [name.replace("_", " ") for name, other in kinds._asdict().items() if other == kind]
        yield "weights", f"{kind} in the layers of the {', '.join(names)}"
    if spec.offload is not Offload.none:
        sizes = [host_bytes(plan, name) for name in ("text_encoder", "connectors", "transformer")]
        away = quantity(sum(sizes) if plan.keep_resident else max(sizes))
        size = f": {away} for each device" if mesh.devices.flat[0].platform != "cpu" else ", where CPUs compute anyway"
        yield "offload", f"{spec.offload.text} of text encoder, connectors and denoiser in the host's memory{size}"
    yield "recipe", spec.recipe
    clip = f"{spec.width}x{spec.height}, {spec.num_frames} frames at {spec.fps:g} a second"
    videos = f", {spec.num_videos} at once" if spec.num_videos > 1 else ""
    seconds = f"{spec.num_frames / spec.fps:.1f} s{videos}"
    yield ("video", f"{clip}: {seconds}") if spec.running.video else ("audio", f"{seconds}, alone")
    yield from ((f"from {segment.start:g} s", segment.prompt) for segment in spec.segments)
    for number, condition in enumerate(spec.conditions):
        placed = (video for stage in plan.stages for video in stage.placed_videos if video.number == number)
        yield _condition_row(condition, list(dict.fromkeys(video.strength for video in placed)))
    if spec.reference_strength != 1:
        yield "follows", f"with {spec.reference_strength:g} of the attention"
    if spec.audio:
        yield "audio", spec.audio.path
    for stage in plan.stages:
        yield from _stage_rows(plan, stage, phases)
    if spec.running.video and DECODE in phases:
        yield "decode", ", ".join([*_decoding_parts(plan), f"about {quantity(decoding.bytes)} on a device"])
    kind = mesh.devices.flat[0].device_kind
    yield "devices", f"{mesh.size} {kind}, profile {spec.sharding.profile}: {plan.sharding.text}"
    if plan.layout:
        yield "passes", plan.layout


def _decoding_parts(plan: Plan) -> list[str]:
    """How decoding is divided."""
    decoding = plan.decoding
    height, width = (decoding.mesh.shape[axis] for axis in IMAGE_AXES)
    parts = ["by diffusion"] if plan.networks.diffusion_decoder else []
    parts += [f"{decoding.videos} videos at a time"] if decoding.videos > 1 else []
    parts += [f"images in {height}x{width} parts"] if height * width > 1 else []
    if isinstance(tiles := decoding.tiles, PixelTiles):
        parts += ["{}x{}x{} tiles of frames, height and width".format(*tiles.counts)] * (math.prod(tiles.counts) > 1)
    elif tiles:
        frames_at_once, _, _ = output_scale(plan.network("vae").decoder, tiles.cut)
        parts += ["{}x{} tiles of height and width".format(*tiles.counts)] * (math.prod(tiles.counts) > 1)
        parts += [f"{frames_at_once * tiles.frames_at_once} frames at a time"] * bool(tiles.frames_at_once)
    if audio := decoding.audio_tiles:
        counts = {"tiles": audio.number, "parts": audio.number_of_parts}
        divided = " of ".join(f"{count} {name}" for name, count in counts.items() if count > 1)
        parts += [f"the audio in {divided}"] if divided else []
    parts += [] if decoding.at_once or not decoding.audio_bytes else ["the audio after the frames"]
    return parts


def _stage_rows(plan: Plan, stage: Stage, phases: Collection[str]) -> Iterator[tuple[str, str]]:
    """The work of a stage, as far as it is in these phases."""
    spec = plan.spec
    if stage.source is not None and UPSAMPLE in phases:
        yield "upsample", spec.second_stage.upsampler or f"{spec.checkpoint}, its own upsampler"
    if (REFINE if stage.source else DENOISE) not in phases:
        return
    if stage.network == STAGE2_DENOISER:
        yield from (("lora", lora) for lora in spec.second_stage.lora or ())
    at_once, windows = stage.largest_window.geometry, len(stage.windows)
    video, audio, text = at_once.video_tokens, at_once.audio_frames, spec.max_sequence_length
    largest = stage.largest_window.tile_geometry.video_tokens
    in_tiles = f" in {stage.tiles.text} of {largest}" if stage.tiles else ""
    yield "tokens", f"{video} of video{in_tiles}, {audio} of audio, {text} of text"
    passes = "; ".join(
        ", ".join(each.name.lower() for each in own) + f" in {count} of them" * (len(stage.pass_counts) > 1)
        for own, count in stage.pass_counts.items()
    )
    other = f"; devices {stage.sharding.text}" if stage.sharding != plan.sharding else ""
    steps = f"{stage.steps} steps" + f", sampler {stage.sampler}" * (stage.sampler != EULER)
    steps += f", {stage.forwards} forwards" * (stage.forwards > stage.steps)
    if stage.first_block_cache is not None:
        steps += f", the first block alone where it changes by at most {stage.first_block_cache:g}"
    frames, *_ = plan.arch.compression.clip_size(at_once.frames, 1, 1)
    most = "" if stage.turns == windows else "at most "
    steps += f", in each of {windows} windows of {most}{frames} frames" * (windows > 1)
    yield "denoise", f"{steps}, passes: {passes}{other}"


def _condition_row(condition: ConditionSpec, strengths: Sequence[float]) -> tuple[str, str]:
    """A condition of the clip, of these strengths in the stages."""
    shown = f"{condition.kind} {condition.path}"
    strength = f"strength {', then '.join(f'{value:g}' for value in strengths)}"
    match condition.kind:
        case "reference":
            count = condition.num_frames or 1
            frames = f"{count} frames" if count > 1 else "an image"
            size = f"1/{condition.downscale} of the size" if condition.downscale != 1 else "the clip's size"
            return "follows", f"{shown}, {frames} at {size}, {strength}"
        case "mask":
            return "follows", f"where {shown} is white"
        case "clip":
            begin, end = condition.regenerate
            level = f", from noise level {condition.noise_level:g}" if condition.noise_level < 1 else ""
            return "regenerate", f"frames {begin} to {end} of {shown}, {condition.streams}{level}"
        case _:
            return "shows", f"{shown} at frame {condition.frame}, {strength}"
