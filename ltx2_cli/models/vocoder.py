"""The vocoder: log-mel spectrogram to waveform, after HiFi-GAN (Kong et al., 2020)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from ltx2_cli.models.arch import VocoderArch
from ltx2_cli.nn.conv import Conv, TransposedConv
from ltx2_cli.weights.declare import Scope

OUTER_WINDOW = 7
LAST_SLOPE = 0.01  # of the last activation alone: the published weights were trained so


def same_conv(scope: Scope, d_in: int, d_out: int, window: int, dilation: int = 1) -> Conv:
    """A convolution along time that keeps the length."""
    reach = dilation * (window - 1)
    return Conv(scope, d_in, d_out, (window,), ((reach // 2, reach - reach // 2),), dilation=dilation)


class ResBlock(nnx.Module):
    """x + conv(leaky(dilated(leaky(x)))), once for each dilation."""

    def __init__(self, scope: Scope, channels: int, window: int, dilations: tuple[int, ...], slope: float):
        self.dilated = nnx.List(
            same_conv(scope / "convs1" / i, channels, channels, window, dilation)
            for i, dilation in enumerate(dilations)
        )
        self.plain = nnx.List(
            same_conv(scope / "convs2" / i, channels, channels, window) for i in range(len(dilations))
        )
        self.slope = slope

    def __call__(self, x: jax.Array) -> jax.Array:
        for dilated, plain in zip(self.dilated, self.plain, strict=True):
            y = dilated(jax.nn.leaky_relu(x, self.slope))
            x = x + plain(jax.nn.leaky_relu(y, self.slope))
        return x


class Stage(nnx.Module):
    """Upsampling in time to half the channels, then the mean of residual blocks of several windows."""

    def __init__(self, scope: Scope, arch: VocoderArch, index: int):
        d_in = arch.hidden_channels // 2**index
        window, factor = arch.upsample_kernel_sizes[index], arch.upsample_factors[index]
        self.upsample = TransposedConv(scope / "upsamplers" / index, d_in, d_in // 2, window, factor)
        first, slope = index * len(arch.resnet_kernel_sizes), arch.leaky_relu_negative_slope
        blocks = enumerate(zip(arch.resnet_kernel_sizes, arch.resnet_dilations, strict=True), start=first)
        self.blocks = nnx.List(
            ResBlock(scope / "resnets" / i, d_in // 2, window, dilations, slope) for i, (window, dilations) in blocks
        )
        self.slope = slope

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.upsample(jax.nn.leaky_relu(x, self.slope))
        first, *rest = [block(x) for block in self.blocks]
        return sum(rest, first) / len(self.blocks)


class Vocoder(nnx.Module):
    """Spectrograms to sound. Float32 whatever the run's dtype: rounding is heard as noise, and the network is small."""

    def __init__(self, scope: Scope, arch: VocoderArch):
        scope = replace(scope, dtype=jnp.float32)
        depth = len(arch.upsample_factors)
        self.conv_in = same_conv(scope / "conv_in", arch.in_channels, arch.hidden_channels, OUTER_WINDOW)
        self.stages = nnx.List(Stage(scope, arch, index) for index in range(depth))
        d_out = arch.hidden_channels // 2**depth
        self.conv_out = same_conv(scope / "conv_out", d_out, arch.out_channels, OUTER_WINDOW)

    def __call__(self, mel: jax.Array) -> jax.Array:
        """[batch, time, mel bins, channels] to [batch, time · factors, channels], in (-1, 1)."""
        x = mel.astype(jnp.float32).swapaxes(2, 3).reshape(*mel.shape[:2], -1)
        with jax.default_matmul_precision("highest"):  # or accelerators would multiply in less than float32
            x = self.conv_in(x)
            for stage in self.stages:
                x = stage(x)
            return jnp.tanh(self.conv_out(jax.nn.leaky_relu(x, LAST_SLOPE)))
