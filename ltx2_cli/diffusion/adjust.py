"""What may be done to upsampled latents before they are refined: pure functions of de-normalised latents
[batch, frames, height, width, channels]. A strength of 0 leaves them as they are, to the bit."""

import jax
import jax.numpy as jnp

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
