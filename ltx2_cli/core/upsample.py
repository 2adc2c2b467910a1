"""Upsample latents between two stages."""

from contextlib import ExitStack
from math import prod

import jax
import numpy as np

from ltx2_cli.core.advice import UPSAMPLE, check_finite, memory_for
from ltx2_cli.core.components import Components, network_program
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.models.upsampler import LatentUpsampler, upsample_latents
from ltx2_cli.models.video_vae import Extent, LatentStatistics
from ltx2_cli.parallel.arrays import to_devices, to_host
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.request.spec import Streams


def upsample_stage(
    plan: Plan, stage: Stage, latents: Streams[np.ndarray], components: Components, report: Report
) -> Streams[np.ndarray]:
    """The initial tokens of `stage`, float32 [videos, tokens, channels]: video upsampled, one at a time, and audio with
    the length of the clip."""
    run = upsampling_program(plan, stage)
    with memory_for(UPSAMPLE, plan), ExitStack() as loaded:
        names = ("statistics", "upsampler")
        statistics, upsampler = (loaded.enter_context(components.use(name, report)) for name in names)
        loaded.enter_context(report.activity("upsample"))
        videos = [
            to_host(run(statistics, upsampler, video))
            for video in to_devices([video[None] for video in latents.video], plan.sharding.replicated)
        ]
        video = np.concatenate(videos)
        check_finite(np.isfinite(video), "the upsampled latents are", plan)
    return Streams(video, _lasting(latents.audio, stage.geometry.audio_frames))


def upsampling_program(plan: Plan, stage: Stage) -> Program:
    """The program from the statistics, the upsampler and one video's tokens to the initial tokens of the stage."""
    assert stage.source is not None
    (_, channels, *size), where = stage.source.video, plan.sharding.replicated
    tokens = jax.ShapeDtypeStruct((1, prod(size), channels), np.float32, sharding=where)
    function = jitted(_upsampled, where, plan.sharding, convolves=True, size=tuple(size))
    return network_program(plan, "upsample", ["statistics", "upsampler"], function, tokens)


def _lasting(audio: np.ndarray, length: int) -> np.ndarray:
    """`audio` [videos, tokens, channels] cut or padded to this length if that is rounding; else stretched linearly."""
    tokens = audio.shape[1]
    if abs(length - tokens) <= 1:
        return np.pad(audio[:, :length], ((0, 0), (0, max(length - tokens, 0)), (0, 0)), mode="edge")
    places = np.clip((np.arange(length) + 0.5) * tokens / length - 0.5, 0, tokens - 1)
    below = places.astype(int)
    part = (places - below).astype(np.float32)[:, None]
    return audio[:, below] * (1 - part) + audio[:, np.minimum(below + 1, tokens - 1)] * part


def _upsampled(statistics: LatentStatistics, upsampler: LatentUpsampler, tokens: jax.Array, size: Extent) -> jax.Array:
    large = upsample_latents(upsampler, statistics, tokens.reshape(len(tokens), *size, -1))
    return large.reshape(len(tokens), -1, large.shape[-1])
