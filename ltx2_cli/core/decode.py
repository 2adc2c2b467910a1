"""Latents to media: frames by the video VAE, sound by the audio VAE and the vocoder."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.generate import abstract_latents
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.diffusion.latents import Shape
from ltx2_cli.hosts import fetch
from ltx2_cli.media import Media
from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.bandwidth import BandwidthVocoder
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.models.vocoder import Vocoder
from ltx2_cli.plan import Plan
from ltx2_cli.sharding import ShardingPlan, activate
from ltx2_cli.spec import AV, NotFiniteError


def decode(plan: Plan, latents: AV[jax.Array], components: Components, report: Report) -> Iterator[Media]:
    """The media of each video, from its latents as tokens [videos, tokens, channels]."""
    with (
        components.use("vae", report) as vae,
        components.use("audio_vae", report) as audio_vae,
        components.use("vocoder", report) as vocoder,
    ):
        for video in range(len(plan.seeds)):
            with report.stage("decode"):
                which = np.int32(video)
                frames, frames_finite = _frames(vae, latents.video, which, plan.latent_shapes.video, plan.sharding)
                waveform, sound_finite = _waveform(audio_vae, vocoder, latents.audio, which, plan.sharding)
                _check_finite(AV(frames_finite, sound_finite), plan)
                media = Media(
                    fetch(frames),
                    fetch(waveform),
                    plan.spec.fps,
                    plan.arch.vocoder.output_sampling_rate,
                )
            yield media


def programs(plan: Plan) -> Iterator[Program]:
    """Those that `decode` runs, of latents that lie as `generate` leaves them."""
    latents, video = abstract_latents(plan), jax.ShapeDtypeStruct((), np.int32)
    vae, audio_vae, vocoder = (abstract_network(plan, name) for name in ("vae", "audio_vae", "vocoder"))
    shape, sharding = plan.latent_shapes.video, plan.sharding
    yield Program("frames", "vae", lambda: _frames.lower(vae, latents.video, video, shape, sharding))
    yield Program("sound", "vocoder", lambda: _waveform.lower(audio_vae, vocoder, latents.audio, video, sharding))


def _check_finite(finite: AV[jax.Array], plan: Plan) -> None:
    for what, good in zip(("picture", "sound"), finite, strict=True):
        if not bool(good):
            raise NotFiniteError(
                f"the decoded {what} is not finite in {plan.spec.dtype.value}", "--dtype float32 has the range it needs"
            )


@partial(jax.jit, static_argnames=("shape", "sharding"))
def _frames(
    vae: VideoVAE, tokens: jax.Array, video: jax.Array | np.int32, shape: Shape, sharding: ShardingPlan
) -> tuple[jax.Array, jax.Array]:
    """uint8 [frames, height, width, 3] of one of the videos in tokens [videos, tokens, channels], and whether they
    were finite; `shape` is that of its latents in a file."""
    _, channels, *size = shape
    with activate(sharding):
        pixels = vae.decode(tokens[video].reshape(1, *size, channels))[0].astype(jnp.float32)
    levels = jnp.round(jnp.clip((pixels + 1) / 2, 0, 1) * 255)
    return levels.astype(jnp.uint8), jnp.isfinite(pixels).all()


@partial(jax.jit, static_argnames="sharding")
def _waveform(
    audio_vae: AudioVAE,
    vocoder: Vocoder | BandwidthVocoder,
    tokens: jax.Array,
    video: jax.Array | np.int32,
    sharding: ShardingPlan,
) -> tuple[jax.Array, jax.Array]:
    """float32 [samples, channels] in [-1, 1] of one of the videos in tokens [videos, tokens, channels · mels], and
    whether it was finite."""
    with activate(sharding):
        waveform = vocoder(audio_vae.decode(tokens[video][None]))[0]
    return jnp.clip(waveform, -1, 1), jnp.isfinite(waveform).all()
