"""Latents as tokens and as files, and the noise they begin as.

Tokens are float32 [videos, tokens, channels]; files hold video [1, channels, frames, height, width] and audio
[1, channels, frames, mel], normalised, as the denoiser sees them.
"""

from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.media import replacing
from ltx2_cli.spec import AV, MAKE_ROOM, RunError, SpecError

A = TypeVar("A", jax.Array, np.ndarray)  # nothing is compiled for what lies on the host
Shape = tuple[int, ...]
WANTED = "a safetensors file of float32 `video` (1, C, F, H, W) and `audio` (1, C, A, M), or no --noise at all"


def noise(seed: int, shapes: AV[Shape]) -> AV[jax.Array]:
    """Standard normal noise of one video in the files' layout; the same on any number of devices."""
    key = jax.random.key(jnp.uint32(seed))
    return AV(*(jax.random.normal(jax.random.fold_in(key, i), shape) for i, shape in enumerate(shapes)))


def file_shapes(geometry: Geometry, channels: AV[int], audio_latent_mels: int) -> AV[Shape]:
    """Shapes of one video's latents in a file, the leading 1 included; `channels` are those of a token."""
    video = (1, channels.video, geometry.frames, geometry.height, geometry.width)
    return AV(video, (1, channels.audio // audio_latent_mels, geometry.audio_frames, audio_latent_mels))


def pack(latents: AV[A]) -> AV[A]:
    """Files' layout to tokens: video tokens run over frame, row, column; audio features over channel, mel."""
    video, audio = latents
    return AV(
        video.transpose(0, 2, 3, 4, 1).reshape(video.shape[0], -1, video.shape[1]),
        audio.transpose(0, 2, 1, 3).reshape(audio.shape[0], audio.shape[2], -1),
    )


def unpack(tokens: AV[A], shapes: AV[Shape]) -> AV[A]:
    """Tokens to the files' layout, one row a video."""
    _, channels, frames, height, width = shapes.video
    video = tokens.video.reshape(-1, frames, height, width, channels)
    _, channels, frames, mels = shapes.audio
    audio = tokens.audio.reshape(-1, frames, channels, mels)
    return AV(video.transpose(0, 4, 1, 2, 3), audio.transpose(0, 2, 1, 3))


def read_noise(path: str, shapes: AV[Shape]) -> AV[np.ndarray]:
    """The noise in a safetensors file of `video` and `audio`; raises `SpecError` unless they have these shapes."""
    try:
        found = load_file(Path(path).expanduser())
    except (OSError, SafetensorError) as error:
        raise SpecError(f"the noise file {path} cannot be read: {error}", WANTED) from error
    problems = [
        f"`{name}` is {found[name].dtype} {found[name].shape}, not float32 {shape}" if name in found else f"no `{name}`"
        for name, shape in shapes._asdict().items()
        if name not in found or found[name].shape != shape or found[name].dtype != np.float32
    ]
    if problems:
        raise SpecError(f"the noise file {path} does not fit this clip: {'; '.join(problems)}", WANTED)
    if not all(np.isfinite(found[name]).all() for name in AV._fields):
        raise SpecError(f"the noise file {path} holds values that are not finite", WANTED)
    return AV(found["video"], found["audio"])


def save_latents(latents: AV[jax.Array | np.ndarray], path: Path) -> None:
    """Write one video's latents as float32 `video` and `audio`, under a temporary name until they are whole.

    Raises `RunError` where there is no room.
    """
    with replacing(path) as temporary:
        try:
            save_file({name: np.ascontiguousarray(stream) for name, stream in latents._asdict().items()}, temporary)
        except SafetensorError as error:
            raise RunError(f"the latents could not be written to {path}: {error}", MAKE_ROOM) from error
