"""Layers that the networks share: linear, norms, feed-forward, and modulation by the noise level."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.weights.declare import Axes, Scope

SINUSOID_WIDTH = 256


class Linear(nnx.Module):
    """y = x·Wᵀ + b over the last axis. `axes` are the logical axes of (input, output).

    W is kept (out, in), as on disk: loading moves no element, and XLA multiplies by it from either side equally fast.
    """

    def __init__(self, scope: Scope, d_in: int, d_out: int, axes: Axes, bias: bool = True):
        self.kernel = scope.weight("weight", (d_out, d_in), axes[::-1])
        self.bias = scope.weight("bias", (d_out,), axes[1:]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        # Not x @ w.mT: for a single row XLA on a CPU would first write wᵀ.
        last = (((x.ndim - 1,), (1,)), ((), ()))
        y = jax.lax.dot_general(x, self.kernel[...], last, precision=precision(x.dtype))
        return y if self.bias is None else y + self.bias[...]


def precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """The precision of products of arrays of `dtype`: float32 is multiplied in float32, where TPUs would by default
    round to bfloat16 and GPUs to TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rms_norm(x: jax.Array, eps: float, weight: jax.Array | None = None) -> jax.Array:
    """x / sqrt(mean(x²) + eps) over the last axis; statistics in float32, the result in x's dtype."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (normed if weight is None else normed * weight).astype(x.dtype)


def layer_norm(x: jax.Array, eps: float) -> jax.Array:
    """(x − mean) / sqrt(var + eps) over the last axis, no affine part; statistics in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + eps)).astype(x.dtype)


class FeedForward(nnx.Module):
    """Linear to `expansion` times the width, tanh-approximated GELU, linear back."""

    def __init__(self, scope: Scope, dim: int, expansion: int = 4, bias: bool = True):
        self.up = Linear(scope / "net" / 0 / "proj", dim, expansion * dim, ("embed", "mlp"), bias)
        self.down = Linear(scope / "net" / 2, expansion * dim, dim, ("mlp", "embed"), bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


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
