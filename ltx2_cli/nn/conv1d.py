"""Convolutions and filters along time, of samples that may lie side by side.

Samples [batch, time, channels] of few channels leave most lanes of a TPU's vectors empty. There several of them make a
row: [batch, rows, samples · channels], the same numbers in the same order. A layer sees in the width of its input how
many, and makes its kernel one of rows. By the compiler's schedule LTX-2.3's sound of 5 s takes 150 M cycles of a v6e
so, and 539 where samples lie one by one; it also compiles in two thirds of the time.
"""

import math
from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
from flax import nnx

from ltx2_cli.nn.layers import convolve_by_taps
from ltx2_cli.parallel.constrain import device
from ltx2_cli.weights.declare import CONV, TRANSPOSED_CONV, Scope

LANES, COLUMNS = 128, 256  # of a TPU's vector, of its matrix unit


def rows_kernel(
    kernel: jax.Array, samples: int, lead: int, step: int = 1, dilation: int = 1
) -> tuple[jax.Array, tuple[int, int]]:
    """What y[n] = Σ_t x[step·n + dilation·t − lead] · kernel[t] is to rows of so many samples of x: the kernel
    [window, samples · in, samples / step · out], and how many rows before and after its own a row of y sees."""
    window, d_in, d_out = kernel.shape
    reach, before = dilation * (window - 1) + 1, -(-lead // samples)
    after = (samples - step + reach - 1 - lead) // samples
    seen = (before + 1 + after) * samples
    starts = range(before * samples - lead, (before + 1) * samples - lead, step)
    none = jnp.zeros((), kernel.dtype)
    shifted = [
        jax.lax.pad(kernel, none, ((start, seen - start - reach, dilation - 1), (0, 0, 0), (0, 0, 0)))
        for start in starts
    ]
    return jnp.concatenate(shifted, axis=-1).reshape(-1, samples * d_in, len(shifted) * d_out), (before, after)


def convolve_rows(x: jax.Array, kernel: jax.Array, lead: int, dilation: int = 1, more: int = 0) -> jax.Array:
    """Rows [batch, rows, samples · in] under kernel [window, in, out]: y[n] = Σ_t x[n + dilation·t − lead] · kernel[t],
    with zeros around x. y has as many rows as x, and `more`."""
    samples = x.shape[-1] // kernel.shape[1]
    if samples > 1:
        kernel, (before, after) = rows_kernel(kernel, samples, lead, dilation=dilation)
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
        y = convolve_rows(x, kernel, self.dilation * (len(kernel) - 1) // 2, self.dilation)
        return y if self.bias is None else y + jnp.tile(self.bias[...], x.shape[-1] // kernel.shape[1])


class ConvTranspose1d(nnx.Module):
    """A transposed convolution with bias: `stride` samples out for each one in. It is a plain convolution whose
    channels are those samples: sooner compiled than one of an input with zeros between."""

    def __init__(self, scope: Scope, d_in: int, d_out: int, window: int, stride: int):
        self.kernel = scope.weight("weight", (window, d_in, d_out), (None, "conv_in", "conv_out"), TRANSPOSED_CONV)
        self.bias = scope.weight("bias", (d_out,), ("conv_out",))
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, rows, samples · in] to [batch, time · stride, out]; one sample more where window − stride is odd. On
        a TPU samples that fill no vector lie side by side, at most as many as fill its matrix unit."""
        window, d_in, d_out = self.kernel.shape
        trim, odd = divmod(window - self.stride, 2)
        front = -trim % self.stride  # zeros, so that a row's first sample is the first of a place
        places = -(-(front + window) // self.stride)  # that overlap
        kernel = jnp.pad(self.kernel[...], ((front, places * self.stride - front - window), (0, 0), (0, 0)))
        kernel = kernel.reshape(places, self.stride, d_in, d_out).swapaxes(1, 2).reshape(places, d_in, -1)
        y = convolve_rows(x, kernel[::-1], places - 1 - (trim + front) // self.stride, more=odd)
        y += jnp.tile(self.bias[...], y.shape[-1] // d_out)
        time = x.shape[1] * x.shape[2] // d_in * self.stride + odd
        if odd:
            y = y.reshape(len(x), -1, d_out)[:, :time]
        few = device().platform == "tpu" and d_out < LANES
        samples = math.gcd(1 << (COLUMNS // d_out).bit_length() - 1, time) if few else 1
        return y.reshape(len(x), -1, samples * d_out)


def upsample(x: jax.Array, taps: jax.Array, ratio: int, lead: int, channels: int) -> jax.Array:
    """Rows [batch, rows, samples · channels] at `ratio` times their rate, as rows so many times as wide: y[n] = ratio ·
    Σ_m x[m] · taps[n + lead − ratio·m]. Beyond its ends x goes on as its first and its last sample."""
    rows, width = x.shape[1:]
    before, after = (len(taps) - 1 - lead) // ratio, (lead + ratio - 1) // ratio
    places = [[p + lead - ratio * (d - before) for d in range(before + after + 1)] for p in range(ratio)]
    if width > channels:
        kernel = [[taps[k] if 0 <= k < len(taps) else jnp.zeros(()) for k in phase] for phase in places]
        return filter_rows(x, ratio * jnp.array(kernel).T[:, None], channels, before)
    x = jnp.pad(x, ((0, 0), (before, after), (0, 0)), mode="edge")
    # sums that XLA makes one loop of; as a convolution of each channel by itself it takes ten times as long
    sums = ((taps[k] * x[:, d : d + rows] for d, k in enumerate(phase) if 0 <= k < len(taps)) for phase in places)
    return jnp.concatenate([ratio * reduce(add, phase) for phase in sums], axis=-1)


def downsample(x: jax.Array, taps: jax.Array, ratio: int, channels: int) -> jax.Array:
    """Rows of samples, a multiple of `ratio`, at a `ratio`-th of their rate: y[n] = Σ_k x[ratio·n + k − lead] ·
    taps[k]. Half the taps lead: (len(taps) − 1) // 2. x goes on as in `upsample`."""
    rows, width = x.shape[1:]
    lead = (len(taps) - 1) // 2
    if width > ratio * channels:
        return filter_rows(x, taps[:, None, None], channels, lead, ratio)
    before, after = -(-lead // ratio), (len(taps) - 1 - lead) // ratio
    x = beyond(x, channels, before, after)
    places = [(d, p, lead + ratio * (d - before) + p) for d in range(before + after + 1) for p in range(ratio)]
    columns = [x[..., p * channels : (p + 1) * channels] for p in range(ratio)]
    return reduce(add, (taps[k] * columns[p][:, d : d + rows] for d, p, k in places if 0 <= k < len(taps)))


def beyond(x: jax.Array, channels: int, before: int, after: int) -> jax.Array:
    """Rows of samples with so many rows around them, of copies of the first and the last sample."""
    # Written before it is read: else a CPU computes SnakeBeta for each tap again, and the vocoder takes 1.8 times as
    # long.
    first, last = x[:, :1, :channels], x[:, -1:, -channels:]
    ends = (jnp.tile(end, (1, rows, x.shape[-1] // channels)) for end, rows in ((first, before), (last, after)))
    return jax.lax.optimization_barrier(jnp.concatenate([next(ends), x, *ends], axis=1))


def filter_rows(x: jax.Array, kernel: jax.Array, channels: int, lead: int, step: int = 1) -> jax.Array:
    """Every channel of rows of samples under one kernel [window, 1, samples out], as `rows_kernel` has it, by products.
    Beyond its ends x goes on as its first and its last sample."""
    kernel, around = rows_kernel(kernel, x.shape[-1] // channels, lead, step)
    return convolve_by_taps(beyond(x, channels, *around), jnp.kron(kernel, jnp.eye(channels)[None]), ((0, 0),))
