"""Latents to more of them, between two stages."""

from math import prod
from typing import Any

import jax
import numpy as np

from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.not_finite import in_float32
from ltx2_cli.core.out_of_memory import UPSAMPLE, memory_for
from ltx2_cli.core.programs import Program, jit_for_convs
from ltx2_cli.core.report import Report
from ltx2_cli.distributed import to_devices, to_host
from ltx2_cli.errors import NotFiniteError
from ltx2_cli.models import upsampler as network
from ltx2_cli.models.video_vae import LatentStatistics
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.request.spec import Streams
from ltx2_cli.sharding import ShardingPlan, activate

Size = tuple[int, int, int]  # latents in time, in height, in width


def upsample(
    plan: Plan, stage: Stage, latents: Streams[np.ndarray], components: Components, report: Report
) -> Streams[np.ndarray]:
    """What `stage` goes on from, tokens float32 [videos, tokens, channels]: the picture upsampled, one video after the
    other, and the sound, of as many latents as the clip has then."""
    run, strengths = upsampling_program(plan, stage), (np.float32(stage.adain), np.float32(stage.tone_map))
    with (
        memory_for(UPSAMPLE, plan),
        components.use("statistics", report) as statistics,
        components.use("upsampler", report) as upsampler,
        report.stage("upsample"),
    ):
        videos = [
            to_host(run(upsampler, statistics, picture, *strengths))
            for picture in to_devices([video[None] for video in latents.video], plan.sharding.replicated)
        ]
        if not all(np.isfinite(video).all() for video in videos):
            raise NotFiniteError(f"the upsampled latents are not finite in {plan.dtype.value}", in_float32(plan))
        return Streams(np.concatenate(videos), _lasting(latents.audio, stage.geometry.audio_frames))


def upsampling_program(plan: Plan, stage: Stage) -> Program:
    """The upsampler, its statistics, one video's tokens and two strengths to the tokens that the stage begins with."""
    assert stage.source is not None
    _, channels, *size = stage.source.video
    where = plan.sharding.replicated

    def arguments() -> tuple[Any, ...]:
        tokens = jax.ShapeDtypeStruct((1, prod(size), channels), np.float32, sharding=where)
        strength = jax.ShapeDtypeStruct((), np.float32)
        networks = (abstract_network(plan, name) for name in ("upsampler", "statistics"))
        return *networks, tokens, strength, strength

    function = jit_for_convs(_upsampled, plan.sharding, where, size=tuple(size))
    return Program("upsample", "upsampler", function, arguments)


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
    return large.reshape(len(tokens), -1, large.shape[-1])
