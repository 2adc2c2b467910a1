"""Convolutions of channels-last arrays [batch, *axes, channels], and of images split over devices."""

import jax
import jax.numpy as jnp
from flax import nnx

from ltx2_cli.nn.basic import precision
from ltx2_cli.weights.declare import CONV, TRANSPOSED_CONV, VIDEO_CONV, Scope, Shape

Padding = tuple[tuple[int, int], ...]  # places added before and after each axis
IMAGE_AXES = ("height", "width")  # mesh axes that images may be split along, inside `jax.shard_map`


def convolve(x: jax.Array, kernel: jax.Array, padding: Padding, stride: int = 1, dilation: int = 1) -> jax.Array:
    """x [batch, *axes, in], zeros around it, under kernel [*window, in, out].

    Along every axis alike the window moves by `stride` and its places lie `dilation` apart.
    """
    rank = len(padding)
    axes = "DHW"[-rank:]
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride,) * rank,
        padding=padding,
        rhs_dilation=(dilation,) * rank,
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
        precision=precision(x.dtype),
    )


class Conv(nnx.Module):
    """A convolution along as many axes as `window` has; the padding is zeros."""

    def __init__(
        self,
        scope: Scope,
        d_in: int,
        d_out: int,
        window: Shape,
        padding: Padding,
        stride: int = 1,
        dilation: int = 1,
        bias: bool = True,
    ):
        axes = (*(None,) * len(window), "conv_in", "conv_out")
        self.kernel = scope.weight("weight", (*window, d_in, d_out), axes, CONV)
        self.bias = scope.weight("bias", (d_out,), ("conv_out",)) if bias else None
        self.padding, self.stride, self.dilation = padding, stride, dilation

    def __call__(self, x: jax.Array) -> jax.Array:
        y = convolve(x, self.kernel[...], self.padding, self.stride, self.dilation)
        return y if self.bias is None else y + self.bias[...]


class Conv3D(nnx.Module):
    """A 3×3×3 convolution with bias that keeps the size of a video [batch, frames, height, width, channels].

    In time `around` frames are added before and behind: copies of the first and the last (edge), or zeros (constant).
    Around each frame are zeros or, if `mirrored`, its reflection; an image that lies in parts on several devices gets
    the neighbours' edges.

    It is made of convolutions in two dimensions, with the frames merged into the batch. XLA makes that faster than one
    in three dimensions, and with half the temporaries.
    """

    def __init__(
        self, scope: Scope, d_in: int, d_out: int, around: tuple[int, int], beyond: str = "edge", mirrored: bool = False
    ):
        self.kernel = scope.weight("weight", (3, 3, 3, d_in, d_out), (*(None,) * 3, "conv_in", "conv_out"), VIDEO_CONV)
        self.bias = scope.weight("bias", (d_out,), ("conv_out",))
        self.around, self.beyond, self.mirrored = around, beyond, mirrored

    def __call__(self, x: jax.Array) -> jax.Array:
        x, beside = halo_pad(x, self.mirrored)
        kernel, kept = self.kernel[...], x.shape[1]
        height, width, frames, d_in, d_out = kernel.shape
        x = jnp.pad(x, ((0, 0), self.around, (0, 0), (0, 0), (0, 0)), mode=self.beyond)
        joined = jnp.concatenate([x[:, frame : frame + kept] for frame in range(frames)], axis=-1)
        images = joined.reshape(-1, *joined.shape[2:])
        y = convolve(images, kernel.reshape(height, width, frames * d_in, d_out), beside)
        return y.reshape(x.shape[0], kept, *y.shape[1:]) + self.bias[...]


class TransposedConv(nnx.Module):
    """A transposed convolution with bias along one axis: `stride` places out for each one in.

    It is a plain convolution whose channels are those places: sooner compiled than one of an input with zeros between.
    """

    def __init__(self, scope: Scope, d_in: int, d_out: int, window: int, stride: int):
        self.kernel = scope.weight("weight", (window, d_in, d_out), (None, "conv_in", "conv_out"), TRANSPOSED_CONV)
        self.bias = scope.weight("bias", (d_out,), ("conv_out",))
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, in] to [batch, length · stride, out]; one place more where window − stride is odd."""
        window, d_in, d_out = self.kernel.shape
        places = -(-window // self.stride)  # that overlap
        kernel = jnp.pad(self.kernel[...], ((0, places * self.stride - window), (0, 0), (0, 0)))
        kernel = kernel.reshape(places, self.stride, d_in, d_out).swapaxes(1, 2).reshape(places, d_in, -1)
        y = convolve(x, kernel[::-1], ((places - 1, places - 1),)).reshape(x.shape[0], -1, d_out)
        trim = (window - self.stride) // 2
        return y[:, trim : x.shape[1] * self.stride + window - self.stride - trim] + self.bias[...]


def halo_pad(x: jax.Array, mirrored: bool) -> tuple[jax.Array, Padding]:
    """Pad x [..., height, width, channels] by one pixel on each side, and return the zero padding still left to the
    convolution.

    An axis that lies in parts on several devices gets the neighbours' edges, sent by them. Around the whole image are
    zeros or, if `mirrored`, a reflection.
    """
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
