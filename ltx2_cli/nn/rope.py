"""Rotary position embedding in its split form (arXiv:2104.09864)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rope(NamedTuple):
    """Cos and sin of one stream's positions, each float32 [tokens, heads, head_dim / 2]."""

    cos: jax.Array | np.ndarray
    sin: jax.Array | np.ndarray


def rope_table(fractions: np.ndarray, width: int, heads: int, theta: float) -> Rope:
    """The table for positions given as fractions of the largest position, float32 [tokens, axes]. Frequencies are a log
    grid from π/2 to theta·π/2 made in float64; angles are float32 because that is what the weights were trained with.
    The axes run fastest; what does not fill width/2 is identity, in front."""
    tokens, axes = fractions.shape
    count = width // (2 * axes)
    grid = theta ** np.linspace(0.0, 1.0, count, dtype=np.float64) * (np.pi / 2)
    centred = fractions.astype(np.float32) * 2 - 1
    angles = (centred[:, None, :] * grid.astype(np.float32)[None, :, None]).reshape(tokens, count * axes)
    padded = np.pad(angles, ((0, 0), (width // 2 - count * axes, 0)))
    exact = padded.reshape(tokens, heads, width // heads // 2).astype(np.float64)
    return Rope(np.cos(exact).astype(np.float32), np.sin(exact).astype(np.float32))


def pack(rope: Rope) -> jax.Array:
    """Each head's cosines and then its sines, as wide as the head, float32 [tokens, heads * head_dim]."""
    return jnp.concatenate(rope, axis=-1).reshape(rope.cos.shape[0], -1)


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotate the halves of each head of x [batch, tokens, heads, head_dim] by its token's angles."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
