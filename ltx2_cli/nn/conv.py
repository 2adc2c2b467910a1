"""Convolutions of channels-last arrays [batch, *axes, channels]."""

import jax
import jax.numpy as jnp
from flax import nnx

from ltx2_cli.weights.declare import CONV, TRANSPOSED_CONV, Scope, Shape

Padding = tuple[tuple[int, int], ...]  # how many zeros lie before and after each axis


def convolve(x: jax.Array, kernel: jax.Array, padding: Padding, stride: int = 1, dilation: int = 1) -> jax.Array:
    """x [batch, *axes, in] under kernel [*window, in, out]; stride and dilation hold along every axis."""
    axes = "DHW"[-len(padding) :]
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride,) * len(padding),
        padding=padding,
        rhs_dilation=(dilation,) * len(padding),
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
    )


class Conv(nnx.Module):
    """A convolution with bias along as many axes as `window` has."""

    def __init__(
        self, scope: Scope, d_in: int, d_out: int, window: Shape, padding: Padding, stride: int = 1, dilation: int = 1
    ):
        axes = (*(None,) * len(window), "conv_in", "conv_out")
        self.kernel = scope.weight("weight", (*window, d_in, d_out), axes, CONV)
        self.bias = scope.weight("bias", (d_out,), ("conv_out",))
        self.padding, self.stride, self.dilation = padding, stride, dilation

    def __call__(self, x: jax.Array) -> jax.Array:
        return convolve(x, self.kernel[...], self.padding, self.stride, self.dilation) + self.bias[...]


class Conv3D(nnx.Module):
    """A convolution with bias along frames, height and width.

    It is written as a sum of two-dimensional convolutions, one for each frame under the window, over frames merged
    into the batch: compilers make those faster than one in three dimensions, and with smaller temporaries.
    """

    def __init__(self, scope: Scope, d_in: int, d_out: int, window: Shape, padding: Padding):
        axes = (None, None, None, "conv_in", "conv_out")
        self.kernel = scope.weight("weight", (*window, d_in, d_out), axes, CONV)
        self.bias = scope.weight("bias", (d_out,), ("conv_out",))
        self.padding = padding

    def __call__(self, x: jax.Array) -> jax.Array:
        kernels = self.kernel[...]
        around, *beside = self.padding
        x = jnp.pad(x, ((0, 0), around, (0, 0), (0, 0), (0, 0)))
        batch, frames = x.shape[0], x.shape[1] - len(kernels) + 1
        seen = [x[:, i : i + frames].reshape(batch * frames, *x.shape[2:]) for i in range(len(kernels))]
        first, *rest = [convolve(x, kernel, tuple(beside)) for x, kernel in zip(seen, kernels, strict=True)]
        y = sum(rest, first) + self.bias[...]
        return y.reshape(batch, frames, *y.shape[1:])


class TransposedConv(nnx.Module):
    """A transposed convolution with bias along one axis: `stride` samples out for each one in.

    `stride` places of the output are `stride` channels of an ordinary convolution, so no zeros are multiplied.
    """

    def __init__(self, scope: Scope, d_in: int, d_out: int, window: int, stride: int):
        self.kernel = scope.weight("weight", (window, d_in, d_out), (None, "conv_in", "conv_out"), TRANSPOSED_CONV)
        self.bias = scope.weight("bias", (d_out,), ("conv_out",))
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, in] to [batch, length · stride + (window − stride) % 2, out]."""
        window, d_in, d_out = self.kernel.shape
        reach = -(-window // self.stride)  # inputs that touch one output
        kernel = jnp.pad(self.kernel[...], ((0, reach * self.stride - window), (0, 0), (0, 0)))
        # [reach, stride, in, out], the latest input first -> [reach, in, stride · out], the earliest first
        kernel = kernel.reshape(reach, self.stride, d_in, d_out)[::-1].swapaxes(1, 2).reshape(reach, d_in, -1)
        y = convolve(x, kernel, ((reach - 1, reach - 1),))
        y = y.reshape(x.shape[0], -1, d_out)
        trim = (window - self.stride) // 2
        length = (x.shape[1] - 1) * self.stride + window - 2 * trim
        return y[:, trim : trim + length] + self.bias[...]
