"""Latents to media: frames by the video VAE, sound by the audio VAE and the vocoder."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.generate import abstract_latents
from ltx2_cli.core.not_finite import in_float32
from ltx2_cli.core.out_of_memory import DECODE, memory_for
from ltx2_cli.core.programs import Program, convolving
from ltx2_cli.core.report import DECODE as DECODING
from ltx2_cli.core.report import Report
from ltx2_cli.decoding import VIDEOS, Decoding
from ltx2_cli.hosts import fetch, fetch_on_first, place
from ltx2_cli.media import Media
from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.bandwidth import BandwidthVocoder
from ltx2_cli.models.tiles import decode_frames
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.models.vocoder import Vocoder
from ltx2_cli.nn.halo import IMAGE_AXES
from ltx2_cli.plan import Plan
from ltx2_cli.sharding import ShardingPlan, activate
from ltx2_cli.spec import AV, NotFiniteError

WHOLE = PartitionSpec()
BOTH = AV(True, True)
NO_FRAMES, SILENCE = np.empty((0, 0, 0, 3), np.uint8), np.empty((0, 2), np.float32)


def decode(
    plan: Plan, latents: AV[np.ndarray], components: Components, report: Report, wanted: AV[bool] = BOTH
) -> Iterator[Media]:
    """The media of each video, from its latents as tokens [videos, tokens, channels]; what is not wanted is empty.

    So is everything on all of several hosts but the first.
    """
    videos, at_once = len(latents.video), plan.decoding.videos
    to_frames, to_sound = _decoders(plan)
    with memory_for(DECODE, plan), ExitStack() as loaded:
        vae, audio_vae, vocoder = (
            loaded.enter_context(components.use(name, report)) if needed else None
            for name, needed in (("vae", wanted.video), ("audio_vae", wanted.audio), ("vocoder", wanted.audio))
        )
        for first in range(0, videos, at_once):
            frames, waveforms = [NO_FRAMES] * at_once, [SILENCE] * at_once
            with report.stage(DECODING):
                rows = np.minimum(np.arange(first, first + at_once), videos - 1)  # the last one fills up the devices
                video, audio = _place(plan, AV(*(stream[rows] for stream in latents)))
                # Both are begun before either is waited for.
                picture = to_frames(vae, video, plan.decoding, plan.sharding) if vae else None
                sound = to_sound(audio_vae, vocoder, audio, plan.decoding, plan.sharding) if vocoder else None
                if picture:
                    _check_finite("picture", picture[1], plan)
                    if (levels := fetch_on_first(picture[0])) is not None:
                        frames = [clip.reshape(*clip.shape[:2], -1, 3) for clip in levels]
                if sound:
                    _check_finite("sound", sound[1], plan)
                    if (samples := fetch_on_first(sound[0])) is not None:
                        waveforms = list(samples)
            for clip, waveform in list(zip(frames, waveforms, strict=True))[: videos - first]:
                yield Media(clip, waveform, plan.spec.fps, plan.arch.vocoder.output_sampling_rate)


def programs(plan: Plan, wanted: AV[bool] = BOTH) -> Iterator[Program]:
    """Those that `decode` runs."""
    to_frames, to_sound = _decoders(plan)
    decoding, sharding, rows = plan.decoding, plan.sharding, plan.decoding.videos
    vae, audio_vae, vocoder = (abstract_network(plan, name) for name in ("vae", "audio_vae", "vocoder"))
    _, channels, *size = plan.latent_shapes.video
    _, tokens, features = abstract_latents(plan, plan.stages[-1]).audio.shape
    video = jax.ShapeDtypeStruct((rows, *size, channels), np.float32, sharding=decoding.latents)
    audio = jax.ShapeDtypeStruct((rows, tokens, features), np.float32, sharding=decoding.tokens)
    if wanted.video:
        yield Program("frames", "vae", lambda: to_frames.lower(vae, video, decoding, sharding))
    if wanted.audio:
        yield Program("sound", "vocoder", lambda: to_sound.lower(audio_vae, vocoder, audio, decoding, sharding))


def _decoders(plan: Plan) -> tuple[Any, Any]:
    static = "decoding", "sharding"
    return convolving(_frames, plan.sharding, *static), convolving(_waveforms, plan.sharding, *static)


def _place(plan: Plan, tokens: AV[np.ndarray]) -> AV[jax.Array]:
    """Each device's part: of video latents [videos, frames, height, width, channels], of sound as many tokens."""
    _, channels, *size = plan.latent_shapes.video
    video = tokens.video.reshape(-1, *size, channels)
    return AV(place(video, plan.decoding.latents), place(tokens.audio, plan.decoding.tokens))


def _check_finite(what: str, finite: jax.Array, plan: Plan) -> None:
    if not fetch(finite).all():
        raise NotFiniteError(f"the decoded {what} is not finite in {plan.spec.dtype.value}", in_float32(plan))


def _frames(
    vae: VideoVAE, latents: jax.Array, decoding: Decoding, sharding: ShardingPlan
) -> tuple[jax.Array, jax.Array]:
    """uint8 [videos, frames, height, width · 3] of latents [videos, frames, height, width, channels]; for each device,
    whether its part is finite."""

    def part(vae: VideoVAE, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        levels, finite = decode_frames(vae, latents, decoding.tiles)
        return levels, finite.reshape(1, 1, 1)

    where, whose = decoding.latents.spec, PartitionSpec(VIDEOS, *IMAGE_AXES)
    split = jax.shard_map(part, mesh=decoding.mesh, in_specs=(WHOLE, where), out_specs=(where, whose))
    with activate(sharding):
        return split(vae, latents)


def _waveforms(
    audio_vae: AudioVAE,
    vocoder: Vocoder | BandwidthVocoder,
    tokens: jax.Array,
    decoding: Decoding,
    sharding: ShardingPlan,
) -> tuple[jax.Array, jax.Array]:
    """float32 [videos, samples, channels] in [-1, 1] of tokens [videos, tokens, channels · mels]; for each device,
    whether its videos' are finite."""

    def part(networks: tuple[AudioVAE, Vocoder | BandwidthVocoder], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        audio_vae, vocoder = networks
        waveform = vocoder(audio_vae.decode(tokens))
        return jnp.clip(waveform, -1, 1), jnp.isfinite(waveform).all().reshape(1)

    where = decoding.tokens.spec
    split = jax.shard_map(part, mesh=decoding.mesh, in_specs=(WHOLE, where), out_specs=(where, where))
    with activate(sharding):
        return split((audio_vae, vocoder), tokens)
