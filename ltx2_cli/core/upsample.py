"""Latents to more of them, between two stages."""

import jax
import numpy as np

from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.not_finite import in_float32
from ltx2_cli.core.out_of_memory import UPSAMPLE, memory_for
from ltx2_cli.core.programs import Program, convolving
from ltx2_cli.core.report import Report
from ltx2_cli.hosts import fetch, place
from ltx2_cli.models import upsampler as network
from ltx2_cli.models.video_vae import LatentStatistics
from ltx2_cli.plan import Plan
from ltx2_cli.sharding import ShardingPlan, activate
from ltx2_cli.spec import AV, NotFiniteError
from ltx2_cli.stages import Stage

Size = tuple[int, int, int]  # latents in time, in height, in width
STATIC = ("size", "sharding")


def upsample(
    plan: Plan, stage: Stage, latents: AV[np.ndarray], components: Components, report: Report
) -> AV[np.ndarray]:
    """What `stage` goes on from, tokens float32 [videos, tokens, channels]: the picture upsampled, one video after the
    other, and the sound, of as many latents as the clip has then."""
    run, size = convolving(_upsampled, plan.sharding, *STATIC), _size(stage)
    with (
        memory_for(UPSAMPLE, plan),
        components.use("statistics", report) as statistics,
        components.use("upsampler", report) as upsampler,
        report.stage("upsample"),
    ):
        videos = [
            fetch(run(upsampler, statistics, picture, *_strengths(plan), size, plan.sharding))
            for picture in place([video[None] for video in latents.video], plan.sharding.replicated)
        ]
        if not all(np.isfinite(video).all() for video in videos):
            raise NotFiniteError(f"the upsampled latents are not finite in {plan.spec.dtype.value}", in_float32(plan))
        return AV(np.concatenate(videos), _lasting(latents.audio, stage.geometry.audio_frames))


def upsampling_program(plan: Plan, stage: Stage) -> Program:
    """The one that `upsample` runs."""
    assert stage.source is not None
    _, channels, *_ = stage.source.video
    tokens = jax.ShapeDtypeStruct(
        (1, int(np.prod(_size(stage))), channels), np.float32, sharding=plan.sharding.replicated
    )

    def lower() -> jax.stages.Lowered:
        upsampler, statistics = (abstract_network(plan, name) for name in ("upsampler", "statistics"))
        run = convolving(_upsampled, plan.sharding, *STATIC)
        return run.lower(upsampler, statistics, tokens, *_strengths(plan), _size(stage), plan.sharding)

    return Program("upsample", "upsampler", lower)


def _size(stage: Stage) -> Size:
    assert stage.source is not None
    _, _, frames, height, width = stage.source.video
    return frames, height, width


def _strengths(plan: Plan) -> tuple[np.float32, np.float32]:
    return np.float32(plan.spec.refinement.adain), np.float32(plan.spec.refinement.tone_map)


def _lasting(sound: np.ndarray, length: int) -> np.ndarray:
    """`sound` [videos, tokens, channels] of this length: cut, or its end held, where the two lengths differ by their
    rounding; else stretched, each token between its neighbours."""
    tokens = sound.shape[1]
    if abs(length - tokens) <= 1:
        return np.pad(sound[:, :length], ((0, 0), (0, max(length - tokens, 0)), (0, 0)), mode="edge")
    places = np.clip((np.arange(length) + 0.5) * tokens / length - 0.5, 0, tokens - 1)
    below = places.astype(int)
    part = (places - below).astype(np.float32)[:, None]
    return sound[:, below] * (1 - part) + sound[:, np.minimum(below + 1, tokens - 1)] * part


def _upsampled(
    upsampler: network.LatentUpsampler,
    statistics: LatentStatistics,
    tokens: jax.Array,
    adain: jax.Array,
    tone_map: jax.Array,
    size: Size,
    sharding: ShardingPlan,
) -> jax.Array:
    latents = tokens.reshape(len(tokens), *size, -1)
    with activate(sharding):
        large = network.upsample(upsampler, statistics, latents, adain, tone_map)
    return jax.lax.with_sharding_constraint(large.reshape(len(tokens), -1, large.shape[-1]), sharding.replicated)
