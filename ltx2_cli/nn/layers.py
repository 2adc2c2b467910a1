"""Layers that the networks share: linear, norms, feed-forward, modulation by the noise level, and convolutions of
channels-last arrays [batch, *axes, channels], also of images split over devices."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from ltx2_cli.parallel.constrain import device
from ltx2_cli.weights.declare import CONV, VIDEO_CONV, Axes, Scope, Shape

SINUSOID_WIDTH = 256
Padding = tuple[tuple[int, int], ...]  # places added before and after each axis
IMAGE_AXES = ("height", "width")  # mesh axes that images may be split along, inside `jax.shard_map`


class Linear(nnx.Module):
    """y = x·Wᵀ + b over the last axis. `axes` are the logical axes of (input, output). W is kept (out, in), as on disk:
    loading moves no element, and XLA multiplies by it from either side equally fast."""

    def __init__(self, scope: Scope, d_in: int, d_out: int, axes: Axes, bias: bool = True):
        self.kernel = scope.weight("weight", (d_out, d_in), axes[::-1])
        self.bias = scope.weight("bias", (d_out,), axes[1:]) if bias else None

    def __call__(self, x: Float[jax.Array, "*batch d_in"]) -> Float[jax.Array, "*batch d_out"]:
        # Not x @ w.mT: for a single row XLA on a CPU would first write wᵀ.
        last = (((x.ndim - 1,), (1,)), ((), ()))
        y = jax.lax.dot_general(x, self.kernel[...], last, precision=precision(x.dtype))
        return y if self.bias is None else y + self.bias[...]


def precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """The precision of products of arrays of `dtype`: float32 is multiplied in float32, where TPUs would by default
    round to bfloat16 and GPUs to TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rms_norm(
    x: Float[jax.Array, "*batch dim"], eps: float, weight: Float[jax.Array, " dim"] | None = None
) -> Float[jax.Array, "*batch dim"]:
    """x / sqrt(mean(x²) + eps) over the last axis; statistics in float32, the result in x's dtype."""
    normed = x.astype(jnp.float32) * rms_scale(x, eps)
    return (normed if weight is None else normed * weight).astype(x.dtype)


def rms_scale(x: Float[jax.Array, "*batch dim"], eps: float) -> Float[jax.Array, "*batch 1"]:
    """1 / sqrt(mean(x²) + eps) over the last axis, float32 [..., 1]."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + eps)


def layer_norm(x: Float[jax.Array, "*batch dim"], eps: float) -> Float[jax.Array, "*batch dim"]:
    """(x − mean) / sqrt(var + eps) over the last axis, no affine part; statistics in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + eps)).astype(x.dtype)


class FeedForward(nnx.Module):
    """Linear to four times the width, tanh-approximated GELU, linear back."""

    def __init__(self, scope: Scope, dim: int, bias: bool = True):
        self.up = Linear(scope / "net" / 0 / "proj", dim, 4 * dim, ("embed", "mlp"), bias)
        self.down = Linear(scope / "net" / 2, 4 * dim, dim, ("mlp", "embed"), bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(materialize(jax.nn.gelu(self.up(x), approximate=True)))


def materialize(x: jax.Array) -> jax.Array:
    """x, which products read, written to a TPU's memory first: else XLA computes it in them, for each tile again."""
    # By the compiler's schedule LTX-2.3's feed-forward takes 1.98 M cycles with this and 2.33 without on v6e:2x4, 1.96
    # and 2.54 on tpu7x:2x2x1.
    return jax.lax.optimization_barrier(x) if device().platform == "tpu" else x


def sinusoid(timesteps: jax.Array) -> jax.Array:
    """[cos, sin] of timesteps [...] at 128 frequencies from 1 down to nearly 1e-4, float32 [..., 256]. The frequencies'
    exponents are float32: timesteps reach 1000, and the weights know the angles so rounded."""
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


def convolve(x: jax.Array, kernel: jax.Array, padding: Padding, stride: int = 1, dilation: int = 1) -> jax.Array:
    """x [batch, *axes, in], zeros around it, under kernel [*window, in, out]. Along every axis alike the window moves
    by `stride` and its places lie `dilation` apart."""
    rank = len(padding)
    axes = "DHW"[-rank:]
    layout, exact = (f"N{axes}C", f"{axes}IO", f"N{axes}C"), precision(x.dtype)
    steps = (stride,) * rank, padding, None, (dilation,) * rank
    return jax.lax.conv_general_dilated(x, kernel, *steps, dimension_numbers=layout, precision=exact)


def convolve_by_taps(
    x: jax.Array, kernel: jax.Array, padding: Padding, stride: int = 1, dilation: int = 1
) -> jax.Array:
    """`convolve`, on a TPU in a loop with a product for each place of the window, summed in float32."""
    # libtpu unrolls a convolution of many channels into megabytes of code: those of the sound's decoders took half a
    # minute on v6e, minutes on tpu7x, each. What is read lies behind a barrier, so that products of one shape are one
    # kernel, however wide and dilated the window.
    if stride > 1 or device().platform != "tpu":
        return convolve(x, kernel, padding, stride, dilation)
    *window, d_in, d_out = kernel.shape
    x, taps = jnp.pad(x, ((0, 0), *padding, (0, 0))), kernel.reshape(-1, d_in, d_out)
    places = [size - dilation * (width - 1) for size, width in zip(x.shape[1:-1], window, strict=True)]

    def add_tap(tap: jax.Array, y: jax.Array) -> jax.Array:
        place: Sequence[jax.Array] = jnp.unravel_index(tap, window)
        seen = jax.lax.dynamic_slice(x, (0, *(dilation * at for at in place), 0), (len(x), *places, d_in))
        read = jax.lax.optimization_barrier((seen, taps[tap]))
        return y + jnp.matmul(*read, precision=precision(x.dtype), preferred_element_type=jnp.float32)

    y = jnp.zeros_like(x, jnp.float32, shape=(len(x), *places, d_out))
    return jax.lax.fori_loop(0, len(taps), add_tap, y).astype(x.dtype)


class Conv(nnx.Module):
    """A convolution along as many axes as the window of its kernel, of `shape` (*window, in, out); zeros pad."""

    def __init__(
        self, scope: Scope, shape: Shape, padding: Padding, stride: int = 1, dilation: int = 1, bias: bool = True
    ):
        self.kernel = scope.weight("weight", shape, (*(None,) * (len(shape) - 2), "conv_in", "conv_out"), CONV)
        self.bias = scope.weight("bias", shape[-1:], ("conv_out",)) if bias else None
        self.padding, self.stride, self.dilation = padding, stride, dilation

    def __call__(self, x: jax.Array) -> jax.Array:
        y = convolve_by_taps(x, self.kernel[...], self.padding, self.stride, self.dilation)
        return y if self.bias is None else y + self.bias[...]


class Conv3D(nnx.Module):
    """A 3×3×3 convolution with bias that keeps the size of a video [batch, frames, height, width, channels].

    In time `around` frames are added before and behind: copies of the first and the last (edge), or zeros (constant).
    Around each frame is what `halo_pad` says. It is made of convolutions in two dimensions, with the frames merged into
    the batch: XLA makes that faster than one in three dimensions, and with half the temporaries.
    """

    def __init__(
        self, scope: Scope, d_in: int, d_out: int, around: tuple[int, int], beyond: str = "edge", mirrored: bool = False
    ):
        self.kernel = scope.weight("weight", (3, 3, 3, d_in, d_out), (*(None,) * 3, "conv_in", "conv_out"), VIDEO_CONV)
        self.bias = scope.weight("bias", (d_out,), ("conv_out",))
        self.around, self.beyond, self.mirrored = around, beyond, mirrored

    def __call__(self, x: jax.Array) -> jax.Array:
        x, beside = halo_pad(x, self.mirrored)
        return self._between(jnp.pad(x, ((0, 0), self.around, (0, 0), (0, 0), (0, 0)), mode=self.beyond), beside)

    def resume(self, x: jax.Array, past: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Of one that only looks back: the next frames x of a video, and what `past` is for those behind them. None:
        they are the first."""
        before = self.around[0]
        past = jnp.repeat(x[:, :1], before, axis=1) if past is None else past
        x = jnp.concatenate([past, x], axis=1)
        return self._between(*halo_pad(x, self.mirrored)), x[:, -before:]

    def _between(self, x: jax.Array, beside: Padding) -> jax.Array:
        """Of each three successive frames of x one; `beside` them are zeros."""
        kernel, kept = self.kernel[...], x.shape[1] - sum(self.around)
        height, width, frames, d_in, d_out = kernel.shape
        joined = jnp.concatenate([x[:, frame : frame + kept] for frame in range(frames)], axis=-1)
        images = joined.reshape(-1, *joined.shape[2:])
        y = convolve(images, kernel.reshape(height, width, frames * d_in, d_out), beside)
        return y.reshape(x.shape[0], kept, *y.shape[1:]) + self.bias[...]


def halo_pad(x: jax.Array, mirrored: bool) -> tuple[jax.Array, Padding]:
    """Pad x [..., height, width, channels] by one pixel on each side, and return the zero padding still left to the
    convolution. An axis that lies in parts on several devices gets the neighbours' edges, sent by them. Around the
    whole image are zeros or, if `mirrored`, a reflection."""
    sizes = jax.sharding.get_abstract_mesh().shape
    split = [sizes.get(axis, 1) > 1 for axis in IMAGE_AXES]
    left = tuple((0, 0) if is_split or mirrored else (1, 1) for is_split in split)
    if mirrored and not all(split):
        reflected = tuple((0, 0) if is_split else (1, 1) for is_split in split)
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 3) + reflected + ((0, 0),), mode="reflect")
    for axis, is_split in zip(IMAGE_AXES, split, strict=True):
        if is_split:
            x = _exchange_edges(x, axis, sizes[axis], mirrored)
    return x, left


def _exchange_edges(x: jax.Array, mesh_axis: str, parts: int, mirrored: bool) -> jax.Array:
    axis, last = x.ndim - 3 + IMAGE_AXES.index(mesh_axis), parts - 1

    def edge(index: int) -> jax.Array:
        index %= x.shape[axis]
        return jax.lax.slice_in_dim(x, index, index + 1, axis=axis)

    # without a sender: zeros
    before = jax.lax.ppermute(edge(-1), mesh_axis, [(part, part + 1) for part in range(last)])
    behind = jax.lax.ppermute(edge(0), mesh_axis, [(part + 1, part) for part in range(last)])
    if mirrored:
        part = jax.lax.axis_index(mesh_axis)
        before = jnp.where(part == 0, edge(1), before)
        behind = jnp.where(part == last, edge(-2), behind)
    return jnp.concatenate([before, x, behind], axis=axis)
