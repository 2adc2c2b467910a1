"""The video autoencoder: pixels [batch, frames, height, width, 3] to latents [batch, frames, height, width, channels].
Time shrinks by 8, but for the first frame, which stands alone; height and width shrink by 32."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from ltx2_cli.models.config import LTX2, LTX2_3, NetworkArch
from ltx2_cli.nn.layers import Conv3D, FrameNumber, rms_norm
from ltx2_cli.weights.declare import Scope

NORM_EPS = 1e-8

Pixels = Float[jax.Array, "batch frames height width colors"]
VideoLatents = Float[jax.Array, "batch latent_frames latent_height latent_width channels"]

Extent = tuple[int, int, int]  # frames, height, width
Stride = tuple[int, int, int]  # frames, height, width
# Padding of a video. In time: true repeats the first frame before it, false also the last frame after it. Around each
# frame: zeros, or its reflection ("reflect").
Borders = tuple[bool, str]
Past = Any  # the last input frames of each convolution, a tree of arrays; None: there are none yet
PAST_FRAMES = 2  # of a convolution
STRIDES: dict[str, Stride] = {"spatial": (1, 2, 2), "temporal": (2, 1, 1), "spatiotemporal": (2, 2, 2)}


@dataclass(frozen=True)
class VideoVAEArch(NetworkArch):
    """The video autoencoder. Decoder lists run shallow to deep, but for `upsample_type`."""

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 128
    block_out_channels: tuple[int, ...] = (256, 512, 1024, 2048)
    decoder_block_out_channels: tuple[int, ...] = (256, 512, 1024)
    layers_per_block: tuple[int, ...] = (4, 6, 6, 2, 2)
    decoder_layers_per_block: tuple[int, ...] = (5, 5, 5, 5)
    downsample_type: tuple[str, ...] = ("spatial", "temporal", "spatiotemporal", "spatiotemporal")
    upsample_type: tuple[str, ...] = ("spatiotemporal", "spatiotemporal", "spatiotemporal")
    upsample_residual: tuple[bool, ...] = (True, True, True)
    upsample_factor: tuple[int, ...] = (2, 2, 2)
    patch_size: int = 4
    encoder_causal: bool = True
    decoder_causal: bool = True
    encoder_spatial_padding_mode: str = "zeros"
    decoder_spatial_padding_mode: str = "reflect"
    spatial_compression_ratio: int = 32
    temporal_compression_ratio: int = 8

    def conflicts(self) -> Iterator[str]:
        if not self.encoder_causal:
            yield "encoder_causal is false, only encoders that look back are"
        modes = {self.encoder_spatial_padding_mode, self.decoder_spatial_padding_mode}
        for mode in sorted(modes - {"zeros", "reflect"}):
            yield f"a spatial padding mode is {mode!r}, only 'zeros' and 'reflect' are"
        for kind in sorted({*self.downsample_type, *self.upsample_type} - {"spatial", "temporal", "spatiotemporal"}):
            yield f"a resampling type is {kind!r}, only 'spatial', 'temporal' and 'spatiotemporal' are"
        if not len(self.layers_per_block) - 1 == len(self.block_out_channels) == len(self.downsample_type):
            yield "the encoder's lists differ in length"
        deep_first = self.decoder_block_out_channels[::-1]
        stages = (deep_first, self.upsample_factor, self.upsample_residual, self.upsample_type)
        if {len(stage) for stage in stages} != {len(self.decoder_layers_per_block) - 1}:
            yield "the decoder's lists differ in length"
        chain = zip(deep_first, self.upsample_factor[::-1], deep_first[1:], strict=False)
        if any(deep // factor != shallow for deep, factor, shallow in chain):
            yield "decoder_block_out_channels do not shrink by upsample_factor"
        stated = self.temporal_compression_ratio, self.spatial_compression_ratio
        for direction, kinds in (("encoder", self.downsample_type), ("decoder", self.upsample_type)):
            frames = 2 ** sum(kind != "spatial" for kind in kinds)
            pixels = self.patch_size * 2 ** sum(kind != "temporal" for kind in kinds)
            if (frames, pixels) != stated:
                ratios = f"the compression ratios are {stated[0]} and {stated[1]}"
                yield f"the {direction} divides by {frames} and {pixels}, {ratios}"

    @property
    def model_version(self) -> str | None:
        layout = {*self.upsample_residual, self.decoder_spatial_padding_mode}
        return LTX2 if layout == {True, "reflect"} else LTX2_3 if layout == {False, "zeros"} else None

    @property
    def smallest(self) -> int:
        """The least height and width of a frame, in pixels: reflection needs a second cell."""
        return self.spatial_compression_ratio * (2 if self.decoder_spatial_padding_mode == "reflect" else 1)


class LatentStatistics(nnx.Module):
    """Mean and standard deviation of every latent feature, the last axis; results are float32."""

    def __init__(self, scope: Scope, features: int):
        self.mean = scope.weight("latents_mean", (features,), (None,), dtype=jnp.float32)
        self.std = scope.weight("latents_std", (features,), (None,), dtype=jnp.float32)

    def normalise(self, latents: jax.Array) -> jax.Array:
        """Latents of the encoder at the scale of the denoiser."""
        return (latents.astype(jnp.float32) - self.mean[...]) / self.std[...]

    def denormalise(self, latents: jax.Array) -> jax.Array:
        """Latents of the denoiser at the scale of the decoder."""
        return latents.astype(jnp.float32) * self.std[...] + self.mean[...]


def video_conv(scope: Scope, d_in: int, d_out: int, borders: Borders) -> Conv3D:
    """A convolution that keeps the video's size."""
    causal, mode = borders
    return Conv3D(scope / "conv", d_in, d_out, (2, 0) if causal else (1, 1), reflect=mode == "reflect")


def norm_silu(x: jax.Array, eps: float = NORM_EPS) -> jax.Array:
    """SiLU of x over its root mean square across channels."""
    return jax.nn.silu(rms_norm(x, eps))


def with_past(x: jax.Array, past: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The next frames x of a video behind the last ones before them, at first copies of its first one; and the last
    ones of both."""
    past = jnp.repeat(x[:, :1], PAST_FRAMES, axis=1) if past is None else past
    x = jnp.concatenate([past, x], axis=1)
    return x, x[:, -PAST_FRAMES:]


class ResNet(nnx.Module):
    """shortcut(x) + conv2(norm_silu(conv1(norm_silu(x)))); without a shortcut: x + …"""

    def __init__(self, conv1: nnx.Module, conv2: nnx.Module, shortcut: nnx.Module | None = None, eps: float = NORM_EPS):
        self.conv1, self.conv2, self.shortcut, self.eps = conv1, conv2, shortcut, eps

    def __call__(self, x: jax.Array) -> jax.Array:
        skip = x if self.shortcut is None else self.shortcut(x)
        return skip + self.conv2(norm_silu(self.conv1(norm_silu(x, self.eps)), self.eps))


class VideoResNet(ResNet):
    """A residual block of videos, which may come in pieces."""

    conv1: Conv3D
    conv2: Conv3D

    def resume(self, x: jax.Array, past: Past, start: FrameNumber, frames: int | None) -> tuple[jax.Array, Past]:
        """`__call__` for the next frames x of a video of `frames` frames, from its frame `start` on, but late by the
        frames that the convolutions look ahead; and the past for the frames after them."""
        (x, kept), late = with_past(x, past and past[0]), self.conv1.time_padding[1]
        y = self.conv1.resume(norm_silu(x, self.eps), start - PAST_FRAMES, frames)
        y, second = with_past(norm_silu(y, self.eps), past and past[1])
        y = self.conv2.resume(y, start - late - PAST_FRAMES, frames)
        skip = x[:, PAST_FRAMES - 2 * late :][:, : y.shape[1]]
        return skip + y, (kept, second)


class ResNets(nnx.Module):
    """The `count` residual blocks of one stage, in a loop: a TPU's compiler takes long for each convolution."""

    stride: Stride = (1, 1, 1)

    def __init__(self, scope: Scope, count: int, channels: int, borders: Borders):
        place, widths = scope.stacked("resnets", range(count)), (channels, channels, borders)
        self.blocks = VideoResNet(video_conv(place / "conv1", *widths), video_conv(place / "conv2", *widths))
        self.channels, self.count, self.convolutions = channels, count, 2 * count

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, block: (block(x), None), x, self.blocks)[0]

    def resume(self, x: jax.Array, past: Past, start: FrameNumber, frames: int | None) -> tuple[jax.Array, Past]:
        """As `VideoResNet.resume`."""

        def block(x: jax.Array, turn: tuple[VideoResNet, jax.Array], past: Past) -> tuple[jax.Array, Past]:
            resnet, number = turn
            return resnet.resume(x, past, start - 2 * resnet.conv1.time_padding[1] * number, frames)

        def in_place(begun: tuple[jax.Array, Past], turn: tuple[VideoResNet, jax.Array]) -> tuple[Any, None]:
            (x, pasts), (_, number) = begun, turn
            x, own = block(x, turn, jax.tree.map(lambda kept: kept[number], pasts))
            return (x, jax.tree.map(lambda kept, new: kept.at[number].set(new), pasts, own)), None

        turns = self.blocks, jnp.arange(self.count)
        if past is None:
            return jax.lax.scan(partial(block, past=None), x, turns)
        return jax.lax.scan(in_place, (x, past), turns)[0]

    def output_start(self, start: FrameNumber) -> FrameNumber:
        """The first frame of the output of `resume`."""
        return start - self.convolutions * self.blocks.conv1.time_padding[1]


def space_to_depth(x: jax.Array, stride: Stride) -> jax.Array:
    """Cells of `stride` become channels (channel, frame, row, column), the last running fastest."""
    b, f, h, w, c = x.shape
    t, p, q = stride
    cells = x.reshape(b, f // t, t, h // p, p, w // q, q, c).transpose(0, 1, 3, 5, 7, 2, 4, 6)
    return cells.reshape(b, f // t, h // p, w // q, c * t * p * q)


def depth_to_space(x: jax.Array, stride: Stride) -> jax.Array:
    """The inverse of `space_to_depth`."""
    b, f, h, w, c = x.shape
    t, p, q = stride
    cells = x.reshape(b, f, h, w, -1, t, p, q).transpose(0, 1, 5, 2, 6, 3, 7, 4)
    return cells.reshape(b, f * t, h * p, w * q, c // (t * p * q))


class Downsample(nnx.Module):
    """Space to depth by `stride` of a convolution, plus space to depth of the input, averaged in groups of channels."""

    def __init__(self, scope: Scope, d_in: int, d_out: int, stride: Stride, borders: Borders):
        self.conv = video_conv(scope / "conv", d_in, d_out // math.prod(stride), borders)
        self.stride, self.d_out = stride, d_out

    def resume(self, x: jax.Array, past: Past, start: FrameNumber, frames: int | None) -> tuple[jax.Array, Past]:
        """The next frames of a video."""
        if past is None:  # the first frame is repeated to fill its cell
            x = jnp.concatenate([x[:, : self.stride[0] - 1], x], axis=1)
        skip = space_to_depth(x, self.stride)
        skip = skip.reshape(*skip.shape[:-1], self.d_out, -1).mean(axis=-1)
        x, past = with_past(x, past)
        return space_to_depth(self.conv.resume(x, start - PAST_FRAMES, frames), self.stride) + skip, past


class VideoUpsample(nnx.Module):
    """Depth to space by `stride` of a convolution, to d_in / factor channels; `residual` adds depth to space of the
    input."""

    convolutions = 1

    def __init__(self, scope: Scope, d_in: int, factor: int, stride: Stride, residual: bool, borders: Borders):
        self.conv = video_conv(scope / "conv", d_in, d_in * math.prod(stride) // factor, borders)
        self.stride, self.residual, self.channels = stride, residual, d_in // factor

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._enlarged(self.conv(x), x)[:, self.stride[0] - 1 :]  # only the last frame of the first cell is kept

    def resume(self, x: jax.Array, past: Past, start: FrameNumber, frames: int | None) -> tuple[jax.Array, Past]:
        """As `VideoResNet.resume`."""
        x, past = with_past(x, past)
        y = self.conv.resume(x, start - PAST_FRAMES, frames)
        skip = x[:, PAST_FRAMES - self.conv.time_padding[1] :][:, : y.shape[1]]
        return self._enlarged(y, skip), past

    def output_start(self, start: FrameNumber) -> FrameNumber:
        """The first frame of the output of `resume`."""
        by = self.stride[0]
        return by * (start - self.conv.time_padding[1]) - (by - 1)

    def _enlarged(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """Depth to space of the convolution's output y, with the input x added if that is `residual`."""
        y = depth_to_space(y, self.stride)
        if self.residual:
            skip = depth_to_space(x, self.stride)
            y = y + jnp.tile(skip, y.shape[-1] // skip.shape[-1])
        return y


def stage_resnets(scope: Scope, count: int, channels: int, borders: Borders) -> list[ResNets]:
    """The residual blocks of one stage, if it has any."""
    return [ResNets(scope, count, channels, borders)] if count else []


class VideoEncoder(nnx.Module):
    """Pixels in [-1, 1] to the mean of their latents' distribution, not normalised. The encoder only looks back. It
    encodes the frames of one latent at a time, and keeps the last frames of each convolution: memory is that of one
    latent."""

    def __init__(self, scope: Scope, arch: VideoVAEArch):
        borders = (True, arch.encoder_spatial_padding_mode)
        widths = (arch.latent_channels, *arch.block_out_channels)
        *counts, mid_count = arch.layers_per_block
        layers: list[ResNets | Downsample] = []
        for i, (count, kind) in enumerate(zip(counts, arch.downsample_type, strict=True)):
            stage = scope / "down_blocks" / i
            layers += stage_resnets(stage, count, widths[i], borders)
            layers += [Downsample(stage / "downsamplers" / 0, widths[i], widths[i + 1], STRIDES[kind], borders)]
        layers += stage_resnets(scope / "mid_block", mid_count, widths[-1], borders)
        self.conv_in = video_conv(scope / "conv_in", arch.in_channels * arch.patch_size**2, widths[0], borders)
        self.layers = nnx.List(layers)
        # one more channel than the mean: a log-variance for all of them
        self.conv_out = video_conv(scope / "conv_out", widths[-1], arch.latent_channels + 1, borders)
        self.patch_size, self.frames_at_once = (
            arch.patch_size,
            math.prod(STRIDES[kind][0] for kind in arch.downsample_type),
        )

    def __call__(self, video: Pixels) -> VideoLatents:
        """[batch, 8k + 1, 32h, 32w, 3] to [batch, k + 1, h, w, channels]."""
        first, past = self._resume(video[:, :1], (None,) * (len(self.layers) + 2))
        later = video[:, 1:].reshape(video.shape[0], -1, self.frames_at_once, *video.shape[2:]).swapaxes(0, 1)
        if not len(later):
            return first
        _, latents = jax.lax.scan(lambda past, frames: self._resume(frames, past)[::-1], past, later)
        return jnp.concatenate([first, latents[:, :, 0].swapaxes(0, 1)], axis=1)

    def _resume(self, video: jax.Array, pasts: tuple[Past, ...]) -> tuple[jax.Array, tuple[Past, ...]]:
        """The next latent of a video, and the past for the latent after it."""
        # squares of pixels to channels (channel, column, row), the last running fastest
        columns_first = video.astype(self.conv_in.kernel.dtype).swapaxes(2, 3)
        x = space_to_depth(columns_first, (1, self.patch_size, self.patch_size)).swapaxes(2, 3)
        x, first = with_past(x, pasts[0])
        x, following = self.conv_in.resume(x, 0, None), []  # before the first frame are its copies: no end is near
        for layer, past in zip(self.layers, pasts[1:-1], strict=True):
            x, past = layer.resume(x, past, 0, None)
            following.append(past)
        x, last = with_past(norm_silu(x), pasts[-1])
        return self.conv_out.resume(x, 0, None)[..., :-1], (first, *following, last)


class VideoDecoder(nnx.Module):
    """De-normalised latents to pixels, about in [-1, 1], not clamped."""

    def __init__(self, scope: Scope, arch: VideoVAEArch):
        borders = (arch.decoder_causal, arch.decoder_spatial_padding_mode)
        # published lists run from the pixels to the latents, all but `upsample_type`
        mid_count, *counts = reversed(arch.decoder_layers_per_block)
        widths = tuple(reversed(arch.decoder_block_out_channels))
        factors, residuals = reversed(arch.upsample_factor), reversed(arch.upsample_residual)
        self.conv_in = video_conv(scope / "conv_in", arch.latent_channels, widths[0], borders)
        layers: list[ResNets | VideoUpsample] = [*stage_resnets(scope / "mid_block", mid_count, widths[0], borders)]
        stages = zip(counts, widths, factors, residuals, arch.upsample_type, strict=True)
        for i, (count, width, factor, residual, kind) in enumerate(stages):
            stage = scope / "up_blocks" / i
            layers += [VideoUpsample(stage / "upsamplers" / 0, width, factor, STRIDES[kind], residual, borders)]
            layers += stage_resnets(stage, count, width // factor, borders)
        width = widths[-1] // arch.upsample_factor[0]
        self.layers = nnx.List(layers)
        self.conv_out = video_conv(scope / "conv_out", width, arch.out_channels * arch.patch_size**2, borders)
        self.patch_size = arch.patch_size

    def __call__(self, latents: VideoLatents) -> Pixels:
        """[batch, k + 1, h, w, channels] to [batch, 8k + 1, 32h, 32w, 3]."""
        return self.tail(self.head(latents, len(self.layers)), len(self.layers))

    def head(self, latents: jax.Array, cut: int) -> jax.Array:
        """The output of the first `cut` layers for latents."""
        x = self.conv_in(latents.astype(self.conv_in.kernel.dtype))
        for layer in self.layers[:cut]:
            x = layer(x)
        return x

    def tail(self, x: jax.Array, cut: int) -> jax.Array:
        """The pixels from the output x of the first `cut` layers."""
        for layer in self.layers[cut:]:
            x = layer(x)
        return self._pixels(self.conv_out(norm_silu(x)))

    def resume(self, x: jax.Array, cut: int, past: Past, start: FrameNumber, frames: int) -> tuple[jax.Array, Past]:
        """`tail` for the next frames x of a video, which begin at its frame `start` of `frames`: as many frames of the
        result, from `output_start(cut, start)` on, and the past for the frames after them. A layer is late by the
        frames that it looks ahead, so the first ones that come are before the video's begin, and x must go on behind
        its end. Frames outside of it have any values."""
        pasts, following = past or (None,) * (len(self.layers) - cut + 1), []
        for layer, own in zip(self.layers[cut:], pasts[:-1], strict=True):
            x, own = layer.resume(x, own, start, frames)
            start, frames = layer.output_start(start), layer.stride[0] * (frames - 1) + 1
            following.append(own)
        x, last = with_past(norm_silu(x), pasts[-1])
        return self._pixels(self.conv_out.resume(x, start - PAST_FRAMES, frames)), (*following, last)

    def output_start(self, cut: int, start: FrameNumber) -> FrameNumber:
        """The first frame of the output of `resume`."""
        for layer in self.layers[cut:]:
            start = layer.output_start(start)
        return start - self.conv_out.time_padding[1]

    def _pixels(self, x: jax.Array) -> jax.Array:
        """Squares of pixels from channels (color, column, row)."""
        return depth_to_space(x.swapaxes(2, 3), (1, self.patch_size, self.patch_size)).swapaxes(2, 3)


class VideoVAE(nnx.Module):
    """Encoder, decoder, and the statistics that scale their latents for the denoiser."""

    def __init__(self, scope: Scope, arch: VideoVAEArch):
        self.encoder = VideoEncoder(scope / "encoder", arch)
        self.decoder = VideoDecoder(scope / "decoder", arch)
        self.statistics = LatentStatistics(scope, arch.latent_channels)

    def encode(self, video: Pixels) -> VideoLatents:
        """Pixels in [-1, 1] to normalised latents, float32."""
        return self.statistics.normalise(self.encoder(video))

    def decode(self, latents: VideoLatents) -> Pixels:
        """Normalised latents to pixels in [-1, 1], not clamped."""
        return self.decoder(self.statistics.denormalise(latents))
