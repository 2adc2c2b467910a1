"""Sizes of upsampled clips, and corrections of upsampled latents before the second stage."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.diffusion.geometry import VAECompression
from ltx2_cli.errors import UsageError


@dataclass(frozen=True)
class UpsampleFactors:
    """How latents are resampled: `time` for each along time, except the first, which stays one; `up` for each in height
    and width, of which every `down`-th is kept."""

    time: int
    up: int
    down: int

    def upsampled(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """The size of upsampled latents; height and width are rounded up."""
        return self.time * (frames - 1) + 1, -(-height * self.up // self.down), -(-width * self.up // self.down)


def stage1_size(
    num_frames: int, height: int, width: int, by: UpsampleFactors, compression: VAECompression
) -> tuple[int, int, int]:
    """Frames, height and width of the first stage's clip, for a second stage of this size; in frames and pixels. Raises
    `UsageError` with the nearest possible size where this one is impossible."""
    size = (num_frames, height, width)
    sizes = [compression.clip_size(*by.upsampled(side, side, side)) for side in range(1, max(size) + 1)]
    nearest = np.abs(np.subtract(sizes, size)).argmin(axis=0).tolist()  # by axis, of two the smaller
    nearest_size = tuple(sizes[index][axis] for axis, index in enumerate(nearest))
    if nearest_size != size:
        raise UsageError(
            f"no clip is upsampled to {width}x{height}x{num_frames}: latents are made {by.time} for each one in time,"
            f" and {by.up / by.down:g} in height and width",
            f"the nearest is --width {nearest_size[2]} --height {nearest_size[1]} --num-frames {nearest_size[0]}",
        )
    return compression.clip_size(*(index + 1 for index in nearest))


# Of de-normalised latents [batch, frames, height, width, channels]. A strength of 0 leaves them bit-identical.

POSITIONS = (1, 2, 3)  # the axes of frames, height, width
STEEPNESS, KNEE = 4.0, 1.0  # of the sigmoid that selects large latents
MAX_REDUCTION, FULL_STRENGTH = 0.8, 0.75  # of the largest latents; the share of it at a compression of 1


def adain(latents: jax.Array, reference: jax.Array, factor: jax.Array | float) -> jax.Array:
    """`latents` moved by `factor` of the way to the mean and standard deviation of `reference`, per clip and channel;
    float32. Adaptive instance normalisation: Huang and Belongie, 2017, https://arxiv.org/abs/1703.06868, equation 8."""
    latents = latents.astype(jnp.float32)
    mean, std = _statistics(latents)
    reference_mean, reference_std = _statistics(reference.astype(jnp.float32))
    normalised = jnp.where(std > 0, (latents - mean) / jnp.where(std > 0, std, 1), 0)
    return latents + factor * (normalised * reference_std + reference_mean - latents)


def tone_map(latents: jax.Array, compression: jax.Array | float) -> jax.Array:
    """`latents` with large values reduced, by at most 60 % at a `compression` of 1; float32. With s = 0.75·compression:
    x · (1 − 0.8·s·sigmoid(4·s·(|x| − 1))), as in diffusers' LTX2LatentUpsamplePipeline, which names no paper."""
    latents, strength = latents.astype(jnp.float32), FULL_STRENGTH * compression
    reduction = jax.nn.sigmoid(STEEPNESS * strength * (jnp.abs(latents) - KNEE))
    return latents * (1 - MAX_REDUCTION * strength * reduction)


def _statistics(latents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and unbiased standard deviation of each channel; 0 for a single latent."""
    mean = latents.mean(POSITIONS, keepdims=True)
    squares = jnp.square(latents - mean).sum(POSITIONS, keepdims=True)
    return mean, jnp.sqrt(squares / max(latents[0, ..., 0].size - 1, 1))
