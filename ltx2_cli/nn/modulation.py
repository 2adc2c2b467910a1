"""What the noise level does to a transformer: sinusoid, two linears, rows of shifts, scales and gates."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.nn.basic import Linear
from ltx2_cli.weights.declare import Scope

SINUSOID_WIDTH = 256


def sinusoid(timesteps: jax.Array) -> jax.Array:
    """[cos, sin] of timesteps [...] at 128 frequencies from 1 down to nearly 1e-4, float32 [..., 256].

    The frequencies' exponents are float32: timesteps reach 1000, and the weights know the angles so rounded.
    """
    half = SINUSOID_WIDTH // 2
    exponents = np.float32(-np.log(10_000.0)) * np.arange(half, dtype=np.float32) / np.float32(half)
    frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
    angles = timesteps.astype(jnp.float32)[..., None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class AdaLayerNormSingle(nnx.Module):
    """Modulation rows from a timestep, after PixArt-α (arXiv:2310.00426)."""

    def __init__(self, scope: Scope, dim: int, rows: int):
        embedder = scope / "emb" / "timestep_embedder"
        self.linear_1 = Linear(embedder / "linear_1", SINUSOID_WIDTH, dim, (None, "embed"))
        self.linear_2 = Linear(embedder / "linear_2", dim, dim, (None, "embed"))
        self.linear = Linear(scope / "linear", dim, rows * dim, (None, "embed"))
        self.rows = rows

    def __call__(self, timesteps: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The modulation [..., rows, dim] and the embedding it was made from [..., dim], in the weights' dtype."""
        dtype = self.linear_1.kernel.dtype
        embedded = self.linear_2(jax.nn.silu(self.linear_1(sinusoid(timesteps).astype(dtype))))
        rows = jnp.split(self.linear(jax.nn.silu(embedded)), self.rows, axis=-1)
        return jnp.stack(rows, axis=-2), embedded
