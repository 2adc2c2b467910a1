"""Upsample latents between two stages."""

from contextlib import ExitStack
from math import prod

import jax
import numpy as np

from ltx2_cli.core.advice import UPSAMPLE, check_finite, memory_for
from ltx2_cli.core.components import Components, network_program
from ltx2_cli.core.keyframes import enlarged_keyframes, keyframe_programs
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.core.state import RunState, all_latents
from ltx2_cli.diffusion.latents import interpolated
from ltx2_cli.models.upsampler import LatentUpsampler, upsample_latents
from ltx2_cli.models.video_vae import Extent, LatentStatistics
from ltx2_cli.parallel.arrays import to_devices, to_host
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.request.spec import Streams


def upsample_stage(
    plan: Plan, stage: Stage, state: RunState, components: Components, report: Report
) -> tuple[Streams[np.ndarray], np.ndarray | None]:
    """The initial tokens of `stage`, float32 [videos, tokens, channels], and those behind its grid if it begins with
    some: video and generated keyframes upsampled, one at a time, or keyframes that it is given, drawn again; and audio
    with the length of the clip."""
    latents, keyframes = all_latents(state), state.behind if stage.source_keyframes else None
    with memory_for(UPSAMPLE, plan), ExitStack() as loaded:
        names = ("statistics", "upsampler")
        networks = [loaded.enter_context(components.use(name, report)) for name in names]
        loaded.enter_context(report.activity("upsample"))

        def each(run: Program, tokens: np.ndarray) -> np.ndarray:
            videos = to_devices([video[None] for video in tokens], plan.sharding.replicated)
            return np.concatenate([to_host(run(*networks, video)) for video in videos])

        run = upsampling_programs(plan, stage)
        video = each(run[0], latents.video)
        if keyframes is not None and not (stage.between_keyframes or stage.holds_keyframes):
            keyframes = each(run[1], keyframes)
        made = [video] if keyframes is None else [video, keyframes]
        check_finite([np.isfinite(x).all() for x in made], "the upsampled latents are", plan)
    if keyframes is not None and stage.holds_keyframes:
        with memory_for(UPSAMPLE, plan):
            keyframes = enlarged_keyframes(plan, stage, keyframes, components, report)
    audio = _lasting(latents.audio, stage.geometry.audio_frames)
    if keyframes is not None and stage.between_keyframes:
        keyframes = np.concatenate([keyframes, _new_keyframes(stage, video)], axis=1)
    return Streams(video, audio), _behind(stage, latents.video, keyframes) if stage.begins_behind else None


def _new_keyframes(stage: Stage, video: np.ndarray) -> np.ndarray:
    """The tokens with which a round begins the keyframes that it generates: latents of the upsampled clip that end
    there."""
    geometry = stage.geometry
    ends = np.asarray(geometry.keyframes)[-geometry.generated :, 0].astype(int) // geometry.scales.time
    latents = video.reshape(len(video), geometry.frames, -1, video.shape[2])
    return latents[:, ends].reshape(len(video), -1, video.shape[2])


def _behind(stage: Stage, source: np.ndarray, keyframes: np.ndarray | None) -> np.ndarray:
    """The tokens behind the grid that a stage begins with: zeros for images that are shown, whose conditions replace
    them; keyframes; the video of the source as a reference."""
    geometry = stage.geometry
    behind = np.zeros((len(source), geometry.video_tokens - geometry.grid_tokens, source.shape[2]), np.float32)
    end = geometry.token_counts[1]
    if keyframes is not None:
        behind[:, end - keyframes.shape[1] : end] = keyframes
    if stage.follows_source:
        behind[:, -source.shape[1] :] = source
    return behind


def upsampling_programs(plan: Plan, stage: Stage) -> list[Program]:
    """The programs from the statistics, the upsampler and one video's tokens to the initial tokens of the stage: for
    the clip, and for all of its keyframes if the stage begins with some of its own size; or those that draw keyframes
    again."""
    assert stage.source is not None
    (_, channels, frames, *size), where = stage.source.video, plan.sharding.replicated

    def program(name: str, extent: Extent) -> Program:
        tokens = jax.ShapeDtypeStruct((1, prod(extent), channels), np.float32, sharding=where)
        function = jitted(_upsampled, where, plan.sharding, convolves=True, size=extent)
        return network_program(plan, name, ["statistics", "upsampler"], function, tokens)

    height, width = size
    clip = program("upsample", (frames, height, width))
    if stage.holds_keyframes:
        return [clip, *keyframe_programs(plan, stage)]
    count = 0 if stage.between_keyframes else stage.source_keyframes
    return [clip, program("upsample keyframes", (count, height, width))] if count else [clip]


def _lasting(audio: np.ndarray, length: int) -> np.ndarray:
    """`audio` [videos, tokens, channels] cut or padded to this length if that is rounding; else stretched linearly."""
    tokens = audio.shape[1]
    if abs(length - tokens) <= 1:
        return np.pad(audio[:, :length], ((0, 0), (0, max(length - tokens, 0)), (0, 0)), mode="edge")
    return interpolated(audio, np.clip((np.arange(length) + 0.5) * tokens / length - 0.5, 0, tokens - 1))


def _upsampled(statistics: LatentStatistics, upsampler: LatentUpsampler, tokens: jax.Array, size: Extent) -> jax.Array:
    large = upsample_latents(upsampler, statistics, tokens.reshape(len(tokens), *size, -1))
    return large.reshape(len(tokens), -1, large.shape[-1])
