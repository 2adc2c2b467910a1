"""Upsampled clips: their sizes, and what may be done to their latents before they are refined."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.diffusion.geometry import VAECompression
from ltx2_cli.errors import UsageError


@dataclass(frozen=True)
class UpsampleFactors:
    """How latents are resampled: `time` for each one along time, but for the first, which stands alone; `up` for each
    one in height and in width, of which every `down`-th is kept."""

    time: int
    up: int
    down: int

    def upsampled(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """How many latents are made of so many; what is left over of a cell in height or width counts as one."""
        return self.time * (frames - 1) + 1, -(-height * self.up // self.down), -(-width * self.up // self.down)


def stage1_size(
    num_frames: int, height: int, width: int, by: UpsampleFactors, compression: VAECompression
) -> tuple[int, int, int]:
    """Frames, height and width of the clip of which one of this size is made, all in frames and pixels.

    Raises `UsageError` with the nearest size that can be made where this one cannot.
    """
    wanted = (num_frames, height, width)
    sizes = [compression.clip_size(*by.upsampled(side, side, side)) for side in range(1, max(wanted) + 1)]
    nearest = np.abs(np.subtract(sizes, wanted)).argmin(axis=0).tolist()  # by axis, of two the smaller
    made = tuple(sizes[index][axis] for axis, index in enumerate(nearest))
    if made != wanted:
        raise UsageError(
            f"no clip is upsampled to {width}x{height}x{num_frames}: latents are made {by.time} for each one in time,"
            f" and {by.up / by.down:g} in height and width",
            f"the nearest is --width {made[2]} --height {made[1]} --num-frames {made[0]}",
        )
    return compression.clip_size(*(index + 1 for index in nearest))


# Of de-normalised latents [batch, frames, height, width, channels]. A strength of 0 leaves them bit-identical.

PLACES = (1, 2, 3)  # frames, height, width
STEEPNESS, KNEE = 4.0, 1.0  # of the sigmoid that says how large a latent is
MOST, SHARE = 0.8, 0.75  # what is taken of the largest latents, and how much of that at full compression


def adain(latents: jax.Array, reference: jax.Array, factor: jax.Array | float) -> jax.Array:
    """`latents` moved by `factor` of the way to the mean and standard deviation that `reference`, of any size, has in
    each clip and channel; float32.

    Adaptive instance normalisation: Huang and Belongie, 2017, https://arxiv.org/abs/1703.06868, equation 8.
    """
    latents = latents.astype(jnp.float32)
    mean, std = _statistics(latents)
    wanted_mean, wanted_std = _statistics(reference.astype(jnp.float32))
    level = jnp.where(std > 0, (latents - mean) / jnp.where(std > 0, std, 1), 0)
    return latents + factor * (level * wanted_std + wanted_mean - latents)


def tone_map(latents: jax.Array, compression: jax.Array | float) -> jax.Array:
    """`latents` with the large ones made smaller, by at most 60 % at a `compression` of 1; float32.

    x · (1 − 0.8·s·sigmoid(4·s·(|x| − 1))) with s = 0.75·compression: `tone_map_latents` of diffusers'
    LTX2LatentUpsamplePipeline, for which no paper is named.
    """
    latents, strength = latents.astype(jnp.float32), SHARE * compression
    size = jax.nn.sigmoid(STEEPNESS * strength * (jnp.abs(latents) - KNEE))
    return latents * (1 - MOST * strength * size)


def _statistics(latents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and unbiased standard deviation of each channel; 0 for a single latent."""
    mean = latents.mean(PLACES, keepdims=True)
    squares = jnp.square(latents - mean).sum(PLACES, keepdims=True)
    return mean, jnp.sqrt(squares / max(latents[0, ..., 0].size - 1, 1))
