"""Latents to media: frames by the video VAE, sound by the audio VAE and the vocoder."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.not_finite import in_float32
from ltx2_cli.core.out_of_memory import DECODE, memory_for
from ltx2_cli.core.programs import Program, jit_for_convs
from ltx2_cli.core.report import DECODE as DECODING
from ltx2_cli.core.report import Report
from ltx2_cli.diffusion.latents import token_shapes
from ltx2_cli.distributed import to_devices, to_first_host, to_host
from ltx2_cli.errors import NotFiniteError
from ltx2_cli.media import Media
from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.tiles import decode_frames
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.models.vocoder import Vocoder, VocoderWithBWE
from ltx2_cli.nn.conv import IMAGE_AXES
from ltx2_cli.plan.decoding import VIDEOS, DecodePlan
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import Streams
from ltx2_cli.sharding import ShardingPlan, activate

WHOLE = PartitionSpec()
BOTH = Streams(True, True)
NO_FRAMES, SILENCE = np.empty((0, 0, 0, 3), np.uint8), np.empty((0, 2), np.float32)


def decode(
    plan: Plan, latents: Streams[np.ndarray], components: Components, report: Report, wanted: Streams[bool] = BOTH
) -> Iterator[Media]:
    """The media of each video, from its latents as tokens [videos, tokens, channels]; what is not wanted is empty.

    So is everything on all of several hosts but the first.
    """
    videos, at_once = len(latents.video), plan.decoding.videos
    to_frames, to_sound = _video_program(plan), _audio_program(plan)
    with memory_for(DECODE, plan), ExitStack() as loaded:
        vae, audio_vae, vocoder = (
            loaded.enter_context(components.use(name, report)) if needed else None
            for name, needed in (("vae", wanted.video), ("audio_vae", wanted.audio), ("vocoder", wanted.audio))
        )
        for first in range(0, videos, at_once):
            frames, waveforms = [NO_FRAMES] * at_once, [SILENCE] * at_once
            with report.stage(DECODING):
                rows = np.minimum(np.arange(first, first + at_once), videos - 1)  # the last one fills up the devices
                video, audio = _place(plan, Streams(*(stream[rows] for stream in latents)))
                # Both are begun before either is waited for.
                picture = to_frames(vae, video) if vae else None
                sound = to_sound(audio_vae, vocoder, audio) if vocoder else None
                if picture:
                    _check_finite("picture", picture[1], plan)
                    if (levels := to_first_host(picture[0])) is not None:
                        frames = [clip.reshape(*clip.shape[:2], -1, 3) for clip in levels]
                if sound:
                    _check_finite("sound", sound[1], plan)
                    if (samples := to_first_host(sound[0])) is not None:
                        waveforms = list(samples)
            for clip, waveform in list(zip(frames, waveforms, strict=True))[: videos - first]:
                yield Media(clip, waveform, plan.stages[-1].geometry.fps, plan.arch.vocoder.output_sampling_rate)


def programs(plan: Plan, wanted: Streams[bool] = BOTH) -> Iterator[Program]:
    """Those that `decode` runs."""
    return chain([_video_program(plan)] if wanted.video else [], [_audio_program(plan)] if wanted.audio else [])


def _video_program(plan: Plan) -> Program:
    """Latents [videos, frames, height, width, channels] to frames, and whether each device's are finite."""

    def arguments() -> tuple[Any, ...]:
        _, channels, *size = plan.latent_shapes.video
        shape = plan.decoding.videos, *size, channels
        return abstract_network(plan, "vae"), jax.ShapeDtypeStruct(shape, np.float32, sharding=plan.decoding.latents)

    return Program("frames", "vae", _jit_decoder(_frames, plan), arguments)


def _audio_program(plan: Plan) -> Program:
    """Tokens [videos, tokens, channels · mels] to waveforms, and whether each device's are finite."""

    def arguments() -> tuple[Any, ...]:
        shape = token_shapes(plan.decoding.videos, plan.latent_shapes).audio
        networks = (abstract_network(plan, name) for name in ("audio_vae", "vocoder"))
        return *networks, jax.ShapeDtypeStruct(shape, np.float32, sharding=plan.decoding.tokens)

    return Program("sound", "vocoder", _jit_decoder(_waveforms, plan), arguments)


def _jit_decoder(function: Callable[..., Any], plan: Plan) -> Any:
    return jit_for_convs(function, plan.sharding, None, decoding=plan.decoding)


def _place(plan: Plan, tokens: Streams[np.ndarray]) -> Streams[jax.Array]:
    """Each device's part: of video latents [videos, frames, height, width, channels], of sound as many tokens."""
    _, channels, *size = plan.latent_shapes.video
    video = tokens.video.reshape(-1, *size, channels)
    return Streams(to_devices(video, plan.decoding.latents), to_devices(tokens.audio, plan.decoding.tokens))


def _check_finite(what: str, finite: jax.Array, plan: Plan) -> None:
    if not to_host(finite).all():
        raise NotFiniteError(f"the decoded {what} is not finite in {plan.dtype.value}", in_float32(plan))


def _frames(
    vae: VideoVAE, latents: jax.Array, decoding: DecodePlan, sharding: ShardingPlan
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
    vocoder: Vocoder | VocoderWithBWE,
    tokens: jax.Array,
    decoding: DecodePlan,
    sharding: ShardingPlan,
) -> tuple[jax.Array, jax.Array]:
    """float32 [videos, samples, channels] in [-1, 1] of tokens [videos, tokens, channels · mels]; for each device,
    whether its videos' are finite."""

    def part(networks: tuple[AudioVAE, Vocoder | VocoderWithBWE], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        audio_vae, vocoder = networks
        waveform = vocoder(audio_vae.decode(tokens))
        return jnp.clip(waveform, -1, 1), jnp.isfinite(waveform).all().reshape(1)

    where = decoding.tokens.spec
    split = jax.shard_map(part, mesh=decoding.mesh, in_specs=(WHOLE, where), out_specs=(where, where))
    with activate(sharding):
        return split((audio_vae, vocoder), tokens)
