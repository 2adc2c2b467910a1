"""Latents to more of them, between two stages."""

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.programs import Program, convolving
from ltx2_cli.core.report import Report
from ltx2_cli.models import upsampler as network
from ltx2_cli.models.video_vae import LatentStatistics
from ltx2_cli.plan import Plan
from ltx2_cli.sharding import ShardingPlan, activate
from ltx2_cli.spec import AV
from ltx2_cli.stages import Stage

Size = tuple[int, int, int]  # latents in time, in height, in width
STATIC = ("size", "sharding")


def upsample(plan: Plan, stage: Stage, latents: AV[jax.Array], components: Components, report: Report) -> AV[jax.Array]:
    """What `stage` goes on from, tokens float32 [videos, tokens, channels]: the picture upsampled, one video after the
    other, and the sound, of as many latents as the clip has then."""
    run, size = convolving(_upsampled, plan.sharding, *STATIC), _size(stage)
    picture, sound = jax.device_put(latents, plan.sharding.replicated)
    with (
        components.use("statistics", report) as statistics,
        components.use("upsampler", report) as upsampler,
        report.stage("upsample"),
    ):
        videos = [
            run(upsampler, statistics, picture[video : video + 1], *_strengths(plan), size, plan.sharding)
            for video in range(len(picture))
        ]
        return jax.block_until_ready(AV(jnp.concatenate(videos), _lasting(sound, stage.geometry.audio_frames)))


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


def _lasting(sound: jax.Array, length: int) -> jax.Array:
    """`sound` [videos, tokens, channels] of this length: cut at its end, or its end held."""
    return jnp.pad(sound[:, :length], ((0, 0), (0, max(length - sound.shape[1], 0)), (0, 0)), mode="edge")


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
