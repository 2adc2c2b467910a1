"""Latents to media: frames by the video VAE, sound by the audio VAE and the vocoder."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Report
from ltx2_cli.diffusion.latents import unpack
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
    videos = unpack(latents, plan.latent_shapes)
    with (
        components.use("vae", report) as vae,
        components.use("audio_vae", report) as audio_vae,
        components.use("vocoder", report) as vocoder,
    ):
        for video in range(len(plan.seeds)):
            with report.stage("decode"):
                frames, frames_finite = _frames(vae, videos.video[video : video + 1], plan.sharding)
                tokens = latents.audio[video : video + 1]
                waveform, sound_finite = _waveform(audio_vae, vocoder, tokens, plan.sharding)
                _check_finite(AV(frames_finite, sound_finite), plan)
                media = Media(
                    np.asarray(frames[0]),
                    np.asarray(waveform[0]),
                    plan.spec.fps,
                    plan.arch.vocoder.output_sampling_rate,
                )
            yield media


def _check_finite(finite: AV[jax.Array], plan: Plan) -> None:
    for what, good in zip(("picture", "sound"), finite, strict=True):
        if not bool(good):
            raise NotFiniteError(
                f"the decoded {what} is not finite in {plan.spec.dtype.value}", "--dtype float32 has the range it needs"
            )


@partial(jax.jit, static_argnames="sharding")
def _frames(vae: VideoVAE, latents: jax.Array, sharding: ShardingPlan) -> tuple[jax.Array, jax.Array]:
    """uint8 [videos, frames, height, width, 3] of latents [videos, channels, frames, height, width]."""
    with activate(sharding):
        pixels = vae.decode(jnp.moveaxis(latents, 1, -1)).astype(jnp.float32)
    levels = jnp.round(jnp.clip((pixels + 1) / 2, 0, 1) * 255)
    return levels.astype(jnp.uint8), jnp.isfinite(pixels).all()


@partial(jax.jit, static_argnames="sharding")
def _waveform(
    audio_vae: AudioVAE, vocoder: Vocoder | BandwidthVocoder, tokens: jax.Array, sharding: ShardingPlan
) -> tuple[jax.Array, jax.Array]:
    """float32 [videos, samples, channels] in [-1, 1] of tokens [videos, tokens, channels · mels]."""
    with activate(sharding):
        waveform = vocoder(audio_vae.decode(tokens))
    return jnp.clip(waveform, -1, 1), jnp.isfinite(waveform).all()
