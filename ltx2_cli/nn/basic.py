"""Linear layers, norms and the feed-forward that every network here shares."""

import jax
import jax.numpy as jnp
from flax import nnx

from ltx2_cli.weights.declare import Axes, Scope


class Linear(nnx.Module):
    """y = x·Wᵀ + b over the last axis, and (x·Aᵀ)·Bᵀ where the scope has factors. `axes` are the logical axes of
    (input, output).

    W is kept (out, in), as on disk: loading moves no element, and XLA multiplies by it from either side equally fast.
    """

    def __init__(self, scope: Scope, d_in: int, d_out: int, axes: Axes, bias: bool = True):
        self.kernel = scope.weight("weight", (d_out, d_in), axes[::-1])
        self.a, self.b = scope.factors("weight", (d_out, d_in), axes[::-1])
        self.bias = scope.weight("bias", (d_out,), axes[1:]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = _times(x, self.kernel[...])
        if self.a is not None and self.b is not None:
            y = y + _times(_times(x, self.a[...]), self.b[...])
        return y if self.bias is None else y + self.bias[...]


def _times(x: jax.Array, w: jax.Array) -> jax.Array:
    """x·wᵀ over the last axis."""
    # Not x @ w.mT: for a single row XLA on a CPU would first write wᵀ.
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=precision(x.dtype))


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
