"""Convolutions and filters along time, of samples that may be packed.

On a TPU, s consecutive samples are packed into the channel axis: [batch, time/s, s·channels], the same numbers in the
same order. Few channels would leave most lanes of a vector empty. A layer infers s from its input's width and expands
its kernel accordingly. By the compiler's schedule LTX-2.3's audio of 5 s takes 150 M cycles of a v6e with packing and
539 M without; it also compiles in two thirds of the time.
"""

import math
from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
from flax import nnx

from ltx2_cli.nn.layers import convolve_by_taps
from ltx2_cli.parallel.constrain import device
from ltx2_cli.parallel.mesh import LANES
from ltx2_cli.weights.declare import CONV, TRANSPOSED_CONV, Scope

MXU_COLUMNS = 256  # of a TPU's matrix unit


def packed_kernel(
    kernel: jax.Array, samples: int, lead: int, step: int = 1, dilation: int = 1
) -> tuple[jax.Array, tuple[int, int]]:
    """The equivalent of kernel [window, in, out] on rows of `samples` packed samples, and its padding (rows before,
    after), for y[n] = Σ_t x[step·n + dilation·t − lead] · kernel[t]: [rows, samples · in, samples / step · out]."""
    taps, d_in, d_out = kernel.shape
    reach, before = dilation * (taps - 1) + 1, -(-lead // samples)
    after = (samples - step + reach - 1 - lead) // samples
    window = (before + 1 + after) * samples
    starts = range(before * samples - lead, (before + 1) * samples - lead, step)
    none = jnp.zeros((), kernel.dtype)
    shifted = [
        jax.lax.pad(kernel, none, ((start, window - start - reach, dilation - 1), (0, 0, 0), (0, 0, 0)))
        for start in starts
    ]
    return jnp.concatenate(shifted, axis=-1).reshape(-1, samples * d_in, len(shifted) * d_out), (before, after)


def conv_packed(x: jax.Array, kernel: jax.Array, lead: int, dilation: int = 1, more: int = 0) -> jax.Array:
    """Rows [batch, rows, samples · in] convolved with kernel [window, in, out]: y[n] = Σ_t x[n + dilation·t − lead] ·
    kernel[t], where x is zero-padded. y has the rows of x, and `more`."""
    samples = x.shape[-1] // kernel.shape[1]
    if samples > 1:
        kernel, (before, after) = packed_kernel(kernel, samples, lead, dilation=dilation)
        return convolve_by_taps(x, kernel, ((before, after + more),))
    return convolve_by_taps(x, kernel, ((lead, dilation * (len(kernel) - 1) - lead + more),), dilation=dilation)


class Conv1d(nnx.Module):
    """A convolution along time that keeps the length."""

    def __init__(self, scope: Scope, d_in: int, d_out: int, window: int, dilation: int = 1, bias: bool = True):
        self.kernel = scope.weight("weight", (window, d_in, d_out), (None, "conv_in", "conv_out"), CONV)
        self.bias = scope.weight("bias", (d_out,), ("conv_out",)) if bias else None
        self.dilation = dilation

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, rows, samples · in] to [batch, rows, samples · out]."""
        kernel = self.kernel[...]
        y = conv_packed(x, kernel, self.dilation * (len(kernel) - 1) // 2, self.dilation)
        return y if self.bias is None else y + jnp.tile(self.bias[...], x.shape[-1] // kernel.shape[1])


class ConvTranspose1d(nnx.Module):
    """A transposed convolution with bias: `stride` samples out for each sample in. The work is a plain convolution to
    `stride` · out channels, which compiles sooner than one of an input with zeros between its samples."""

    def __init__(self, scope: Scope, d_in: int, d_out: int, window: int, stride: int):
        self.kernel = scope.weight("weight", (window, d_in, d_out), (None, "conv_in", "conv_out"), TRANSPOSED_CONV)
        self.bias = scope.weight("bias", (d_out,), ("conv_out",))
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, rows, samples · in] to [batch, time · stride, out]; one sample more where window − stride is odd. On
        a TPU samples of fewer channels than a vector's lanes are packed, up to the columns of the matrix unit."""
        window, d_in, d_out = self.kernel.shape
        trim, odd = divmod(window - self.stride, 2)
        front = -trim % self.stride  # zeros, so that each input sample's outputs start with a new group of `stride`
        groups = -(-(front + window) // self.stride)  # of outputs that one input sample reaches
        kernel = jnp.pad(self.kernel[...], ((front, groups * self.stride - front - window), (0, 0), (0, 0)))
        kernel = kernel.reshape(groups, self.stride, d_in, d_out).swapaxes(1, 2).reshape(groups, d_in, -1)
        y = conv_packed(x, kernel[::-1], groups - 1 - (trim + front) // self.stride, more=odd)
        y += jnp.tile(self.bias[...], y.shape[-1] // d_out)
        time = x.shape[1] * x.shape[2] // d_in * self.stride + odd
        if odd:
            y = y.reshape(len(x), -1, d_out)[:, :time]
        few = device().platform == "tpu" and d_out < LANES
        samples = math.gcd(1 << (MXU_COLUMNS // d_out).bit_length() - 1, time) if few else 1
        return y.reshape(len(x), -1, samples * d_out)


def upsample_1d(x: jax.Array, taps: jax.Array, ratio: int, lead: int, channels: int) -> jax.Array:
    """Rows [batch, rows, samples · channels] at `ratio` times their rate, in rows `ratio` times as wide: y[n] = ratio ·
    Σ_m x[m] · taps[n + lead − ratio·m]. x is padded by its first and last sample."""
    rows, width = x.shape[1:]
    before, after = (len(taps) - 1 - lead) // ratio, (lead + ratio - 1) // ratio
    tap_offsets = [[p + lead - ratio * (d - before) for d in range(before + after + 1)] for p in range(ratio)]
    if width > channels:
        kernel = [[taps[k] if 0 <= k < len(taps) else jnp.zeros(()) for k in phase] for phase in tap_offsets]
        return filter_rows(x, ratio * jnp.array(kernel).T[:, None], channels, before)
    x = jnp.pad(x, ((0, 0), (before, after), (0, 0)), mode="edge")
    # XLA fuses these sums into one loop; a convolution of each channel by itself takes ten times as long.
    sums = ((taps[k] * x[:, d : d + rows] for d, k in enumerate(phase) if 0 <= k < len(taps)) for phase in tap_offsets)
    return jnp.concatenate([ratio * reduce(add, phase) for phase in sums], axis=-1)


def downsample_1d(x: jax.Array, taps: jax.Array, ratio: int, channels: int) -> jax.Array:
    """Rows of packed samples, a multiple of `ratio`, at 1/`ratio` of their rate: y[n] = Σ_k x[ratio·n + k − lead] ·
    taps[k], where lead = (len(taps) − 1) // 2. x is padded as in `upsample_1d`."""
    rows, width = x.shape[1:]
    lead = (len(taps) - 1) // 2
    if width > ratio * channels:
        return filter_rows(x, taps[:, None, None], channels, lead, ratio)
    before, after = -(-lead // ratio), (len(taps) - 1 - lead) // ratio
    x = edge_pad(x, channels, before, after)
    tap_offsets = [(d, p, lead + ratio * (d - before) + p) for d in range(before + after + 1) for p in range(ratio)]
    columns = [x[..., p * channels : (p + 1) * channels] for p in range(ratio)]
    return reduce(add, (taps[k] * columns[p][:, d : d + rows] for d, p, k in tap_offsets if 0 <= k < len(taps)))


def edge_pad(x: jax.Array, channels: int, before: int, after: int) -> jax.Array:
    """Rows of packed samples, padded by rows of copies of the first and of the last sample."""
    # Written to memory before it is read: otherwise a CPU recomputes SnakeBeta for each tap, and the vocoder takes 1.8
    # times as long.
    first, last = x[:, :1, :channels], x[:, -1:, -channels:]
    ends = (jnp.tile(end, (1, rows, x.shape[-1] // channels)) for end, rows in ((first, before), (last, after)))
    return jax.lax.optimization_barrier(jnp.concatenate([next(ends), x, *ends], axis=1))


def filter_rows(x: jax.Array, kernel: jax.Array, channels: int, lead: int, step: int = 1) -> jax.Array:
    """Rows of packed samples, each channel convolved with one kernel [window, 1, samples out], by products. `lead` and
    `step` are those of `packed_kernel`. x is padded by its first and last sample."""
    kernel, padding = packed_kernel(kernel, x.shape[-1] // channels, lead, step)
    return convolve_by_taps(edge_pad(x, channels, *padding), jnp.kron(kernel, jnp.eye(channels)[None]), ((0, 0),))
