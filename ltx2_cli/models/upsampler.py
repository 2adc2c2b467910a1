"""The latent upsampler: de-normalised latents [batch, frames, height, width, channels] at more frames, rows, columns.

Residual blocks, a convolution whose channels become frames or pixels (depth to space), residual blocks again. All
padding is zeros, in time too.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from ltx2_cli.diffusion.upsampling import UpsampleFactors, adain, tone_map
from ltx2_cli.models.config import LTX2, LTX2_3, Config, NetworkArch
from ltx2_cli.models.video_vae import LatentStatistics, depth_to_space
from ltx2_cli.nn.conv import Conv, Conv3D
from ltx2_cli.weights.declare import Scope

GROUPS = 32
NORM_EPS = 1e-5
BLUR_WINDOW = 5
RATIONAL = {1.5: (3, 2), 2.0: (2, 1)}  # upsampling and then decimation factor of each scale


@dataclass(frozen=True)
class LatentUpsamplerArch(NetworkArch):
    """A latent upsampler; the last two fields are ignored where it resamples time."""

    in_channels: int = 128
    mid_channels: int = 1024
    num_blocks_per_stage: int = 4
    spatial_upsample: bool = True
    temporal_upsample: bool = False
    rational_spatial_scale: float = 2.0
    use_rational_resampler: bool = True

    only: ClassVar[Config] = {"dims": 3}

    def conflicts(self) -> Iterator[str]:
        if self.mid_channels % GROUPS:
            yield f"mid_channels is {self.mid_channels}, only multiples of {GROUPS} are"
        if not self.spatial_upsample and not self.temporal_upsample:
            yield "neither spatial_upsample nor temporal_upsample is true"
        if self.rational and self.rational_spatial_scale not in RATIONAL:
            known = " and ".join(map(str, RATIONAL))
            yield f"rational_spatial_scale is {self.rational_spatial_scale}, only {known} are"

    @property
    def rational(self) -> bool:
        """Whether it has a blur kernel, to decimate what it upsampled."""
        return self.use_rational_resampler and not self.temporal_upsample

    @property
    def upsampling(self) -> UpsampleFactors:
        """What it does to a clip's size."""
        up, down = RATIONAL[self.rational_spatial_scale] if self.rational else (2, 1)
        return UpsampleFactors(2 if self.temporal_upsample else 1, *((up, down) if self.spatial_upsample else (1, 1)))

    @property
    def model_version(self) -> str | None:
        """LTX-2's only spatial one is rational and of scale 2; temporal ones are alike in all versions."""
        if self.temporal_upsample:
            return None
        return LTX2 if self.rational and self.upsampling.down == 1 else LTX2_3


class ClipConv(nnx.Module):
    """A 3×3×3 convolution that keeps the clip's size."""

    def __init__(self, scope: Scope, d_in: int, d_out: int):
        self.conv = Conv3D(scope, d_in, d_out, (3, 3, 3), (1, 1), beyond="constant")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(x, ((1, 1), (1, 1)))


class GroupNorm(nnx.Module):
    """Mean 0 and variance 1 in each clip and group of neighbouring channels, then a scale and a shift for each channel;
    statistics in float32. Wu and He, 2018, https://arxiv.org/abs/1803.08494."""

    def __init__(self, scope: Scope, channels: int):
        self.scale = scope.weight("weight", (channels,), ("conv_out",))
        self.shift = scope.weight("bias", (channels,), ("conv_out",))

    def __call__(self, x: jax.Array) -> jax.Array:
        groups = x.astype(jnp.float32).reshape(len(x), -1, GROUPS, x.shape[-1] // GROUPS)
        centred = groups - groups.mean((1, 3), keepdims=True)
        variance = jnp.square(centred).mean((1, 3), keepdims=True)
        normed = (centred * jax.lax.rsqrt(variance + NORM_EPS)).reshape(x.shape)
        return (normed * self.scale[...] + self.shift[...]).astype(x.dtype)


class ResNet(nnx.Module):
    """silu(x + norm(conv(silu(norm(conv(x))))))."""

    def __init__(self, scope: Scope, channels: int):
        self.conv1 = ClipConv(scope / "conv1", channels, channels)
        self.norm1 = GroupNorm(scope / "norm1", channels)
        self.conv2 = ClipConv(scope / "conv2", channels, channels)
        self.norm2 = GroupNorm(scope / "norm2", channels)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.silu(self.norm1(self.conv1(x)))
        return jax.nn.silu(x + self.norm2(self.conv2(y)))


def per_frame(change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """A function of images [batch, height, width, channels], applied to each frame of x."""
    y = change(x.reshape(-1, *x.shape[2:]))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def decimate(x: jax.Array, kernel: jax.Array, every: int) -> jax.Array:
    """Each channel of x convolved with `kernel` [rows, columns] at every `every`-th row and column; float32 sums."""
    around, kernel = len(kernel) // 2, kernel.astype(jnp.float32)
    last_row, last_column = ((length - 1) // every * every + 1 for length in x.shape[2:4])
    seen = jnp.pad(x, ((0, 0), (0, 0), (around, around), (around, around), (0, 0)))
    places = [(i, j) for i in range(len(kernel)) for j in range(len(kernel))]
    # as a convolution of each channel by itself it would take many times as long
    first, *rest = (kernel[i, j] * seen[:, :, i : i + last_row : every, j : j + last_column : every] for i, j in places)
    return sum(rest, first).astype(x.dtype)


class Resample(nnx.Module):
    """Depth to space of a convolution; the first frame, which stands alone, gives one frame."""

    def __init__(self, scope: Scope, arch: LatentUpsamplerArch):
        by, width = arch.upsampling, arch.mid_channels
        self.cell, self.every = (by.time, by.up, by.up), by.down
        place, d_out = scope / ("conv" if arch.rational else 0), width * math.prod(self.cell)
        across = arch.temporal_upsample
        self.conv: ClipConv | Conv = (
            ClipConv(place, width, d_out) if across else Conv(place, width, d_out, (3, 3), ((1, 1), (1, 1)))
        )
        shape = (1, 1, BLUR_WINDOW, BLUR_WINDOW)
        self.blur = (scope / "blur_down").weight("kernel", shape, (None,) * 4) if arch.rational else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv(x) if self.cell[0] > 1 else per_frame(self.conv, x)
        y = depth_to_space(y, self.cell)[:, self.cell[0] - 1 :]
        return y if self.blur is None or self.every == 1 else decimate(y, self.blur[0, 0], self.every)


class LatentUpsampler(nnx.Module):
    """The network of every kind of upsampler."""

    def __init__(self, scope: Scope, arch: LatentUpsamplerArch):
        width, numbers = arch.mid_channels, range(arch.num_blocks_per_stage)
        self.conv_in = ClipConv(scope / "initial_conv", arch.in_channels, width)
        self.norm_in = GroupNorm(scope / "initial_norm", width)
        self.before = nnx.List([ResNet(scope / "res_blocks" / i, width) for i in numbers])
        self.resample = Resample(scope / "upsampler", arch)
        self.after = nnx.List([ResNet(scope / "post_upsample_res_blocks" / i, width) for i in numbers])
        self.conv_out = ClipConv(scope / "final_conv", width, arch.in_channels)

    def __call__(self, latents: jax.Array) -> jax.Array:
        """De-normalised latents to more of them, as `LatentUpsamplerArch.upsampling` says."""
        x = self.conv_in(latents.astype(self.conv_in.conv.kernel.dtype))
        x = jax.nn.silu(self.norm_in(x))
        for block in (*self.before, self.resample, *self.after):
            x = block(x)
        return self.conv_out(x)


def upsample(
    upsampler: LatentUpsampler,
    statistics: LatentStatistics,
    latents: jax.Array,
    adain_factor: jax.Array | float = 0.0,
    compression: jax.Array | float = 0.0,
) -> jax.Array:
    """Normalised latents to upsampled ones, normalised, float32.

    The upsampler works on the autoencoder's scale. There the result is moved to the statistics of its input by
    `adain_factor` (`adain`), and its range compressed by `compression` (`tone_map`).
    """
    small = statistics.denormalise(latents)
    large = adain(upsampler(small), small, adain_factor)
    return statistics.normalise(tone_map(large, compression))
