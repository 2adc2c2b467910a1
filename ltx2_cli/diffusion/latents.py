"""Latents as tokens and as files, and the noise they begin as.

Tokens are float32 [videos, tokens, channels]; files hold video [1, channels, frames, height, width] and audio
[1, channels, frames, mel], normalised, as the denoiser sees them.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.spec import AV

Shape = tuple[int, ...]


def noise(seed: int, shapes: AV[Shape]) -> AV[jax.Array]:
    """Standard normal noise of one video in the files' layout; the same on any number of devices."""
    key = jax.random.key(np.uint32(seed))
    return AV(*(jax.random.normal(jax.random.fold_in(key, i), shape) for i, shape in enumerate(shapes)))


def file_shapes(geometry: Geometry, channels: AV[int], audio_latent_mels: int) -> AV[Shape]:
    """Shapes of one video's latents in a file, the leading 1 included; `channels` are those of a token."""
    video = (1, channels.video, geometry.frames, geometry.height, geometry.width)
    return AV(video, (1, channels.audio // audio_latent_mels, geometry.audio_frames, audio_latent_mels))


def pack(latents: AV[jax.Array]) -> AV[jax.Array]:
    """Files' layout to tokens: video tokens run over frame, row, column; audio features over channel, mel."""
    video, audio = latents
    return AV(
        jnp.moveaxis(video, 1, -1).reshape(video.shape[0], -1, video.shape[1]),
        jnp.moveaxis(audio, 1, 2).reshape(audio.shape[0], audio.shape[2], -1),
    )


def unpack(tokens: AV[jax.Array], shapes: AV[Shape]) -> AV[jax.Array]:
    """Tokens to the files' layout, one row a video."""
    _, channels, frames, height, width = shapes.video
    video = tokens.video.reshape(-1, frames, height, width, channels)
    _, channels, frames, mels = shapes.audio
    audio = tokens.audio.reshape(-1, frames, channels, mels)
    return AV(jnp.moveaxis(video, -1, 1), jnp.moveaxis(audio, 1, 2))
