"""The vocoders: log-mel spectrogram to waveform, after HiFi-GAN (Kong et al., 2020) or BigVGAN (Lee et al., 2023). All
is float32 whatever the run's dtype: rounding is heard as noise, and the networks are small."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.errors import UsageError
from ltx2_cli.models.config import LTX2, LTX2_3, Config, NetworkArch, read_arch
from ltx2_cli.nn.conv1d import Conv1d, ConvTranspose1d, downsample_1d, upsample_1d
from ltx2_cli.nn.layers import convolve_by_taps
from ltx2_cli.weights.declare import CONV, Scope

OUTER_WINDOW = 7
LAST_SLOPE = 0.01  # of the last activation alone: the published weights were trained so
SNAKE_EPS = 1e-9
LEAST_MEL = 1e-5  # the magnitude of silence, before the logarithm
ZERO_CROSSINGS = 6  # of the resampler's sinc, on each side
ROLLOFF = 0.99  # of the resampler's band


@dataclass(frozen=True)
class VocoderArch(NetworkArch):
    """Mel spectrogram to waveform, by one generator."""

    in_channels: int = 128
    hidden_channels: int = 1024
    out_channels: int = 2
    upsample_kernel_sizes: tuple[int, ...] = (16, 15, 8, 4, 4)
    upsample_factors: tuple[int, ...] = (6, 5, 2, 2, 2)
    resnet_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resnet_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    act_fn: str = "leaky_relu"
    leaky_relu_negative_slope: float = 0.1
    antialias: bool = False
    antialias_ratio: int = 2
    antialias_kernel_size: int = 12
    final_act_fn: str | None = "tanh"
    final_bias: bool = True
    output_sampling_rate: int = 24000

    model_version = LTX2

    def sizes(self, instants: int) -> list[int]:
        """The size of each activation for `instants` instants of a spectrogram."""
        channels, sizes = self.hidden_channels, [instants * self.hidden_channels]
        steps = sum(map(len, self.resnet_dilations))
        for factor in self.upsample_factors:
            instants, channels = instants * factor, channels // 2
            sizes += [instants * channels] * (1 + 2 * steps)
            sizes += [instants * channels * self.antialias_ratio] * 2 * steps * self.antialias
        return sizes

    @property
    def reach(self) -> float:
        """Instants on each side of its own that a sample is made from."""
        filters = self.antialias * self.antialias_kernel_size / self.antialias_ratio  # of an activation: up and down
        reach, rate = float(OUTER_WINDOW // 2), 1
        blocks = [
            sum((dilation + 1) * (window // 2) + 2 * filters for dilation in dilations)
            for window, dilations in zip(self.resnet_kernel_sizes, self.resnet_dilations, strict=True)
        ]
        for window, factor in zip(self.upsample_kernel_sizes, self.upsample_factors, strict=True):
            reach += window / factor / rate
            rate *= factor
            reach += max(blocks) / rate
        return reach + (filters + OUTER_WINDOW // 2) / rate

    @property
    def period(self) -> int:
        """A spectrogram cut at multiples of so many instants gives samples in the places of the whole one's."""
        return 1

    @property
    def spectra_rate(self) -> float:
        """Spectra for each second of audio."""
        return self.output_sampling_rate / math.prod(self.upsample_factors)

    def conflicts(self) -> Iterator[str]:
        if (self.act_fn, self.antialias) not in (("leaky_relu", False), ("snakebeta", True)):
            implemented = "only 'leaky_relu' without and 'snakebeta' with it are"
            yield f"act_fn is {self.act_fn!r} with antialias {self.antialias}, {implemented}"
        if self.final_act_fn not in ("tanh", "clamp", None):
            yield f"final_act_fn is {self.final_act_fn!r}, only 'tanh', 'clamp' and None are"
        if self.antialias_kernel_size < 2 * self.antialias_ratio:
            yield "antialias_kernel_size is less than twice antialias_ratio"
        if len(self.upsample_kernel_sizes) != len(self.upsample_factors):
            yield "upsample_kernel_sizes and upsample_factors differ in length"
        if len(self.resnet_kernel_sizes) != len(self.resnet_dilations):
            yield "resnet_kernel_sizes and resnet_dilations differ in length"
        if self.hidden_channels < 2 ** len(self.upsample_factors):
            yield f"hidden_channels cannot be halved {len(self.upsample_factors)} times"


@dataclass(frozen=True)
class VocoderWithBWEArch(VocoderArch):
    """Bandwidth extension (BWE): the first generator is at `input_sampling_rate`; the second adds the bands above."""

    hidden_channels: int = 1536
    upsample_kernel_sizes: tuple[int, ...] = (11, 4, 4, 4, 4, 4)
    upsample_factors: tuple[int, ...] = (5, 2, 2, 2, 2, 2)
    act_fn: str = "snakebeta"
    antialias: bool = True
    final_act_fn: str | None = None
    final_bias: bool = False
    bwe_in_channels: int = 128
    bwe_hidden_channels: int = 512
    bwe_out_channels: int = 2
    bwe_upsample_kernel_sizes: tuple[int, ...] = (12, 11, 4, 4, 4)
    bwe_upsample_factors: tuple[int, ...] = (6, 5, 2, 2, 2)
    bwe_resnet_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    bwe_resnet_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    bwe_act_fn: str = "snakebeta"
    bwe_leaky_relu_negative_slope: float = 0.1
    bwe_antialias: bool = True
    bwe_antialias_ratio: int = 2
    bwe_antialias_kernel_size: int = 12
    bwe_final_act_fn: str | None = None
    bwe_final_bias: bool = False
    filter_length: int = 512
    hop_length: int = 80
    window_length: int = 512
    num_mel_channels: int = 64
    input_sampling_rate: int = 16000
    output_sampling_rate: int = 48000

    model_version = LTX2_3

    @property
    def reach(self) -> float:
        hops = self.bwe.reach + self.window_length / self.hop_length
        return super().reach + hops * self.hop_length / math.prod(self.upsample_factors)

    @property
    def period(self) -> int:
        return self.hop_length // math.gcd(self.hop_length, math.prod(self.upsample_factors))

    @property
    def spectra_rate(self) -> float:
        return self.input_sampling_rate / math.prod(self.upsample_factors)

    @property
    def bwe(self) -> VocoderArch:
        """The second generator."""
        values = vars(self)
        return VocoderArch(**{key.name: values.get(f"bwe_{key.name}", values[key.name]) for key in fields(VocoderArch)})

    def sizes(self, instants: int) -> list[int]:
        hops = -(-instants * math.prod(self.upsample_factors) // self.hop_length)
        return super().sizes(instants) + self.bwe.sizes(hops)

    @property
    def ratio(self) -> int:
        """Samples out for each sample of the first generator."""
        return self.output_sampling_rate // self.input_sampling_rate

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        yield from (f"of the second generator, {conflict}" for conflict in self.bwe.conflicts())
        if self.output_sampling_rate % self.input_sampling_rate:
            yield "output_sampling_rate is no multiple of input_sampling_rate"
        if (hop := self.hop_length * self.ratio) != (extended := math.prod(self.bwe_upsample_factors)):
            yield f"the second generator makes {extended} samples of a hop, which lasts {hop}"
        if any((k - f) % 2 for k, f in zip(self.bwe_upsample_kernel_sizes, self.bwe_upsample_factors, strict=False)):
            yield "a factor of the second generator is odd and its kernel size even, or the other way round"
        if (mels := self.out_channels * self.num_mel_channels) != self.bwe_in_channels:
            yield f"the second generator takes {self.bwe_in_channels} channels, its spectrograms have {mels}"
        if self.out_channels != self.bwe_out_channels:
            yield "out_channels and bwe_out_channels differ"
        if not 0 <= self.window_length - self.filter_length < self.hop_length:
            yield "filter_length and window_length give more or fewer spectra than hops"


CLASSES: dict[str, type[VocoderArch]] = {"LTX2Vocoder": VocoderArch, "LTX2VocoderWithBWE": VocoderWithBWEArch}


def vocoder_arch(config: Config, where: str) -> VocoderArch:
    """The vocoder of a config, by the class it names, else by its keys; otherwise as `read_arch`."""
    name = config.get("_class_name", "LTX2VocoderWithBWE" if "bwe_in_channels" in config else "LTX2Vocoder")
    if name not in CLASSES:
        problem = f"a vocoder of class {name!r} is not implemented, only {', '.join(CLASSES)} are"
        raise UsageError(f"{where}: {problem}", "name another checkpoint as the model")
    return read_arch(CLASSES[name], config, where)


class Activation(nnx.Module):
    """HiFi-GAN's leaky ReLU, or BigVGAN's SnakeBeta: x + sin²(α·x) / β, α and β for each channel, stored as logarithms.
    SnakeBeta is computed at `ratio` times the sampling rate, between two low-pass filters of the checkpoint; otherwise
    its overtones would alias."""

    def __init__(self, scope: Scope, arch: VocoderArch, channels: int, slope: float | None = None):
        self.slope, self.ratio = arch.leaky_relu_negative_slope if slope is None else slope, arch.antialias_ratio
        self.snake = arch.act_fn == "snakebeta"
        if self.snake:
            taps = (1, 1, arch.antialias_kernel_size)
            self.rising = (scope / "upsample").weight("filter", taps, (None, None, None))
            self.log_alpha = (scope / "act").weight("alpha", (channels,), ("conv_out",))
            self.log_beta = (scope / "act").weight("beta", (channels,), ("conv_out",))
            self.falling = (scope / "downsample").weight("filter", taps, (None, None, None))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, rows, samples · channels], of the same shape."""
        if not self.snake:
            return jax.nn.leaky_relu(x, self.slope)
        rising, falling = self.rising[0, 0], self.falling[0, 0]
        (channels,) = self.log_alpha.shape
        x = upsample_1d(x, rising, self.ratio, (len(rising) - self.ratio) // 2, channels)
        alpha, beta = (jnp.tile(jnp.exp(log[...]), x.shape[-1] // channels) for log in (self.log_alpha, self.log_beta))
        x += jnp.square(jnp.sin(x * alpha)) / (beta + SNAKE_EPS)
        return downsample_1d(x, falling, self.ratio, channels)


class ResidualStep(nnx.Module):
    """x + conv(act(dilated(act(x)))), number `index` of its block."""

    def __init__(self, scope: Scope, arch: VocoderArch, index: int, channels: int, window: int, dilation: int):
        self.act_dilated = Activation(scope / "acts1" / index, arch, channels)
        self.dilated = Conv1d(scope / "convs1" / index, channels, channels, window, dilation)
        self.act_plain = Activation(scope / "acts2" / index, arch, channels)
        self.plain = Conv1d(scope / "convs2" / index, channels, channels, window)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.plain(self.act_plain(self.dilated(self.act_dilated(x))))


class UpsampleStage(nnx.Module):
    """Upsampling in time to half the channels, then the mean of residual blocks: a step for each dilation."""

    def __init__(self, scope: Scope, arch: VocoderArch, index: int):
        d_in = arch.hidden_channels // 2**index
        window, factor = arch.upsample_kernel_sizes[index], arch.upsample_factors[index]
        self.activate = Activation(scope, arch, d_in) if arch.act_fn == "leaky_relu" else None
        self.upsample = ConvTranspose1d(scope / "upsamplers" / index, d_in, d_in // 2, window, factor)
        first = index * len(arch.resnet_kernel_sizes)
        blocks = enumerate(zip(arch.resnet_kernel_sizes, arch.resnet_dilations, strict=True), start=first)
        self.blocks = nnx.List(
            nnx.List(
                ResidualStep(scope / "resnets" / i, arch, step, d_in // 2, window, dilation)
                for step, dilation in enumerate(dilations)
            )
            for i, (window, dilations) in blocks
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.upsample(self.activate(x) if self.activate else x)
        return reduce(add, (reduce(lambda y, step: step(y), steps, x) for steps in self.blocks)) / len(self.blocks)


class Vocoder(nnx.Module):
    """Spectrograms to audio, by one generator."""

    def __init__(self, scope: Scope, arch: VocoderArch):
        scope = replace(scope, dtype=jnp.float32)
        depth = len(arch.upsample_factors)
        d_out = arch.hidden_channels // 2**depth
        self.conv_in = Conv1d(scope / "conv_in", arch.in_channels, arch.hidden_channels, OUTER_WINDOW)
        self.stages = nnx.List(UpsampleStage(scope, arch, index) for index in range(depth))
        self.last = Activation(scope / "act_out", arch, d_out, LAST_SLOPE)
        self.conv_out = Conv1d(scope / "conv_out", d_out, arch.out_channels, OUTER_WINDOW, bias=arch.final_bias)
        self.channels, self.final = arch.out_channels, arch.final_act_fn

    def __call__(self, mel: jax.Array) -> jax.Array:
        """Mel [batch, time, mel bins, channels] to the wave [batch, time · factors, channels], in [-1, 1] if the final
        activation limits it."""
        x = mel.astype(jnp.float32).swapaxes(2, 3).reshape(*mel.shape[:2], -1)
        x = self.conv_in(x)
        for stage in self.stages:
            x = stage(x)
        x = self.conv_out(self.last(x)).reshape(len(x), -1, self.channels)
        return jnp.tanh(x) if self.final == "tanh" else jnp.clip(x, -1, 1) if self.final == "clamp" else x


def hann_sinc(time: np.ndarray) -> np.ndarray:
    """A sinc under a Hann window, at times in units of its zero crossings; float64."""
    return np.sinc(time) * np.cos(np.clip(time / ZERO_CROSSINGS, -1, 1) * np.pi / 2) ** 2


def mono_hops(wave: jax.Array, hop: int) -> jax.Array:
    """wave [batch, samples, channels], whole hops, as [batch · channels, hops, hop]. A TPU's compiler takes seconds for
    filters of hops, minutes for filters of single samples."""
    batch, samples, channels = wave.shape
    return wave.swapaxes(1, 2).reshape(batch * channels, samples // hop, hop)


def upsample_wave(wave: jax.Array, hop: int, ratio: int) -> jax.Array:
    """wave [batch, samples, channels], whole hops, at `ratio` times its rate: y[n] = Σ_m x[m] · r · sinc(r · (n / ratio
    − m)) under a Hann window, r for `ROLLOFF`. x is padded by its first and last sample."""
    batch, samples, channels = wave.shape
    reach = math.ceil(ZERO_CROSSINGS / ROLLOFF / hop)  # hops of the filter on each side
    distances = np.arange(ratio * hop) / ratio - np.arange(-reach * hop, (reach + 1) * hop)[:, None]
    filters = (ROLLOFF * hann_sinc(ROLLOFF * distances)).astype(np.float32)
    hops = mono_hops(jnp.pad(wave, ((0, 0), (reach * hop, reach * hop), (0, 0)), mode="edge"), hop)
    windows = [hops[:, first : first + samples // hop] for first in range(2 * reach + 1)]
    y = jnp.matmul(jnp.concatenate(windows, axis=-1), filters, precision="highest")
    return y.reshape(batch, channels, samples * ratio).swapaxes(1, 2)


class LogMel(nnx.Module):
    """The log-mel spectrogram of a waveform, causal: a frame depends on its own hop and on earlier hops."""

    def __init__(self, scope: Scope, arch: VocoderWithBWEArch):
        bins, stft = arch.filter_length // 2 + 1, scope / "stft_fn"
        self.forward_basis = stft.weight("forward_basis", (arch.filter_length, 1, 2 * bins), (None, None, None), CONV)
        # part of the checkpoint, unused
        self.inverse_basis = stft.weight("inverse_basis", (2 * bins, 1, arch.filter_length), (None, None, None))
        self.mel_basis = scope.weight("mel_basis", (arch.num_mel_channels, bins), (None, None))
        self.hop, self.past = arch.hop_length, max(0, arch.window_length - arch.hop_length)

    def __call__(self, wave: jax.Array) -> jax.Array:
        """[batch, samples, channels], whole hops, to [batch, hops, mel bins, channels]."""
        batch, samples, channels = wave.shape
        filters = self.forward_basis[:, 0]
        hops = -(-len(filters) // self.hop)
        filters = jnp.pad(filters, ((0, hops * self.hop - len(filters)), (0, 0))).reshape(hops, self.hop, -1)
        padded = jnp.pad(wave, ((0, 0), (self.past, hops * self.hop), (0, 0)))[:, : samples + (hops - 1) * self.hop]
        spectrum = convolve_by_taps(mono_hops(padded, self.hop), filters, ((0, 0),))
        real, imaginary = jnp.split(spectrum, 2, axis=-1)
        magnitudes = jnp.sqrt(jnp.square(real) + jnp.square(imaginary))
        mel = jnp.matmul(magnitudes, self.mel_basis[...].mT, precision="highest")
        mel = jnp.log(jnp.maximum(mel, LEAST_MEL))
        return jnp.moveaxis(mel.reshape(batch, channels, *mel.shape[1:]), 1, -1)


class VocoderWithBWE(nnx.Module):
    """Spectrograms to audio: the first generator's waveform, resampled, plus the bands of the second generator. `clamp`
    limits the first waveform to [-1, 1] before it is used."""

    def __init__(self, scope: Scope, arch: VocoderWithBWEArch, clamp: bool):
        scope = replace(scope, dtype=jnp.float32)
        self.vocoder = Vocoder(scope / "vocoder", arch)
        self.log_mel = LogMel(scope / "mel_stft", arch)
        self.bwe = Vocoder(scope / "bwe_generator", arch.bwe)
        self.hop, self.ratio, self.clamp = arch.hop_length, arch.ratio, clamp

    def __call__(self, mel: jax.Array) -> jax.Array:
        """[batch, time, mel bins, channels] to [batch, time · factors · ratio, channels], in [-1, 1]."""
        wave = self.vocoder(mel)
        if self.clamp:
            wave = jnp.clip(wave, -1, 1)
        samples = wave.shape[1]
        wave = jnp.pad(wave, ((0, 0), (0, -samples % self.hop), (0, 0)))
        missing = self.bwe(self.log_mel(wave))
        return jnp.clip(missing + upsample_wave(wave, self.hop, self.ratio), -1, 1)[:, : samples * self.ratio]


def build_vocoder(scope: Scope, arch: VocoderArch, clamp: bool = True) -> Vocoder | VocoderWithBWE:
    """The abstract network of `arch`; `clamp` is for `VocoderWithBWE` alone."""
    return VocoderWithBWE(scope, arch, clamp) if isinstance(arch, VocoderWithBWEArch) else Vocoder(scope, arch)
