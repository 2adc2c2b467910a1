"""The vocoder: log-mel spectrogram to waveform, after HiFi-GAN (Kong et al., 2020) or BigVGAN (Lee et al., 2023).

The two have one structure and differ in their activations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.models.arch import VocoderArch
from ltx2_cli.nn.conv import Conv, TransposedConv
from ltx2_cli.weights.declare import Scope

Activation = Callable[[jax.Array], jax.Array]

OUTER_WINDOW = 7
LAST_SLOPE = 0.01  # of the last activation alone: the published weights were trained so
SNAKE_EPS = 1e-9


def upsample(x: jax.Array, taps: jax.Array | np.ndarray, ratio: int, lead: int) -> jax.Array:
    """x [batch, time, channels] at `ratio` times its rate: y[n] = ratio · Σ_m x[m] · taps[n + lead − ratio·m].

    Beyond its ends x goes on as its first and its last sample.
    """
    batch, time, channels = x.shape
    before, after = (len(taps) - 1 - lead) // ratio, (lead + ratio - 1) // ratio
    x = jnp.pad(x, ((0, 0), (before, after), (0, 0)), mode="edge")

    def phase(p: int) -> jax.Array:
        seen = [(d, p + lead - ratio * (d - before)) for d in range(before + after + 1)]
        return _total(taps[k] * x[:, d : d + time] for d, k in seen if 0 <= k < len(taps))

    phases = [ratio * phase(p) for p in range(ratio)]
    return jnp.stack(phases, axis=2).reshape(batch, time * ratio, channels)


def downsample(x: jax.Array, taps: jax.Array, ratio: int) -> jax.Array:
    """x [batch, time, channels] at a `ratio`-th of its rate: y[n] = Σ_k x[ratio·n + k − lead] · taps[k].

    Half the taps lead: (len(taps) − 1) // 2. `time` is a multiple of `ratio`; x goes on as in `upsample`.
    """
    batch, time, channels = x.shape
    lead = (len(taps) - 1) // 2
    before, after = -(-lead // ratio), (len(taps) - 1 - lead) // ratio
    x = jnp.pad(x, ((0, 0), (before * ratio, after * ratio), (0, 0)), mode="edge")
    x = x.reshape(batch, -1, ratio, channels)
    places = [(d, p, lead + ratio * (d - before) + p) for d in range(before + after + 1) for p in range(ratio)]
    return _total(taps[k] * x[:, d : d + time // ratio, p] for d, p, k in places if 0 <= k < len(taps))


def _total(terms: Iterator[jax.Array]) -> jax.Array:
    """A sum that XLA makes one loop of; as a convolution of each channel by itself it takes ten times as long."""
    first, *rest = terms
    return sum(rest, first)


@dataclass(frozen=True)
class LeakyReLU:
    """x where it is positive, elsewhere slope · x."""

    slope: float

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.leaky_relu(x, self.slope)


class SnakeBeta(nnx.Module):
    """x + sin²(α·x) / β, with α and β for each channel, stored as logarithms.

    It is computed at `ratio` times the sampling rate, between two low-pass filters of `taps` taps from the
    checkpoint, lest the overtones it makes come back as false low ones.
    """

    def __init__(self, scope: Scope, channels: int, ratio: int, taps: int):
        self.rising = (scope / "upsample").weight("filter", (1, 1, taps), (None, None, None))
        self.log_alpha = (scope / "act").weight("alpha", (channels,), ("conv_out",))
        self.log_beta = (scope / "act").weight("beta", (channels,), ("conv_out",))
        self.falling = (scope / "downsample").weight("filter", (1, 1, taps), (None, None, None))
        self.ratio = ratio

    def __call__(self, x: jax.Array) -> jax.Array:
        rising, falling = self.rising[0, 0], self.falling[0, 0]
        x = upsample(x, rising, self.ratio, (len(rising) - self.ratio) // 2)
        swing = jnp.square(jnp.sin(x * jnp.exp(self.log_alpha[...])))
        return downsample(x + swing / (jnp.exp(self.log_beta[...]) + SNAKE_EPS), falling, self.ratio)


def activation(scope: Scope, arch: VocoderArch, channels: int, slope: float | None = None) -> Activation:
    """HiFi-GAN's activation, with the architecture's slope unless another is given, or BigVGAN's."""
    if arch.act_fn == "leaky_relu":
        return LeakyReLU(arch.leaky_relu_negative_slope if slope is None else slope)
    return SnakeBeta(scope, channels, arch.antialias_ratio, arch.antialias_kernel_size)


def identity(x: jax.Array) -> jax.Array:
    """x."""
    return x


def within_limits(x: jax.Array) -> jax.Array:
    """x, cut off at -1 and 1."""
    return jnp.clip(x, -1, 1)


FINAL: dict[str | None, Activation] = {"tanh": jnp.tanh, "clamp": within_limits, None: identity}


def same_conv(scope: Scope, d_in: int, d_out: int, window: int, dilation: int = 1, bias: bool = True) -> Conv:
    """A convolution along time that keeps the length."""
    reach = dilation * (window - 1)
    return Conv(scope, d_in, d_out, (window,), ((reach // 2, reach - reach // 2),), dilation=dilation, bias=bias)


class ResidualStep(nnx.Module):
    """x + conv(act(dilated(act(x)))), the `index`-th of its block."""

    def __init__(self, scope: Scope, arch: VocoderArch, index: int, channels: int, window: int, dilation: int):
        self.act_dilated = activation(scope / "acts1" / index, arch, channels)
        self.dilated = same_conv(scope / "convs1" / index, channels, channels, window, dilation)
        self.act_plain = activation(scope / "acts2" / index, arch, channels)
        self.plain = same_conv(scope / "convs2" / index, channels, channels, window)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.plain(self.act_plain(self.dilated(self.act_dilated(x))))


class ResBlock(nnx.Module):
    """A residual step for each dilation."""

    def __init__(self, scope: Scope, arch: VocoderArch, channels: int, window: int, dilations: tuple[int, ...]):
        self.steps = nnx.List(
            ResidualStep(scope, arch, index, channels, window, dilation) for index, dilation in enumerate(dilations)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for step in self.steps:
            x = step(x)
        return x


class Stage(nnx.Module):
    """Upsampling in time to half the channels, then the mean of residual blocks of several windows."""

    def __init__(self, scope: Scope, arch: VocoderArch, index: int):
        d_in = arch.hidden_channels // 2**index
        window, factor = arch.upsample_kernel_sizes[index], arch.upsample_factors[index]
        leaky = arch.act_fn == "leaky_relu"
        self.activate: Activation = LeakyReLU(arch.leaky_relu_negative_slope) if leaky else identity
        self.upsample = TransposedConv(scope / "upsamplers" / index, d_in, d_in // 2, window, factor)
        first = index * len(arch.resnet_kernel_sizes)
        blocks = enumerate(zip(arch.resnet_kernel_sizes, arch.resnet_dilations, strict=True), start=first)
        self.blocks = nnx.List(
            ResBlock(scope / "resnets" / i, arch, d_in // 2, window, dilations) for i, (window, dilations) in blocks
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.upsample(self.activate(x))
        first, *rest = [block(x) for block in self.blocks]
        return sum(rest, first) / len(self.blocks)


class Vocoder(nnx.Module):
    """Spectrograms to sound. Float32 whatever the run's dtype: rounding is heard as noise, and the network is small."""

    def __init__(self, scope: Scope, arch: VocoderArch):
        scope = replace(scope, dtype=jnp.float32)
        depth = len(arch.upsample_factors)
        d_out = arch.hidden_channels // 2**depth
        self.conv_in = same_conv(scope / "conv_in", arch.in_channels, arch.hidden_channels, OUTER_WINDOW)
        self.stages = nnx.List(Stage(scope, arch, index) for index in range(depth))
        self.last = activation(scope / "act_out", arch, d_out, LAST_SLOPE)
        self.conv_out = same_conv(scope / "conv_out", d_out, arch.out_channels, OUTER_WINDOW, bias=arch.final_bias)
        self.final = FINAL[arch.final_act_fn]

    def __call__(self, mel: jax.Array) -> jax.Array:
        """The wave [batch, time · factors, channels] of mel [batch, time, mel bins, channels].

        It lies in [-1, 1] where the architecture's final activation, tanh or clamp, keeps it there.
        """
        x = mel.astype(jnp.float32).swapaxes(2, 3).reshape(*mel.shape[:2], -1)
        x = self.conv_in(x)
        for stage in self.stages:
            x = stage(x)
        return self.final(self.conv_out(self.last(x)))
