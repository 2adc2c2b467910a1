"""The vocoder with bandwidth extension (BWE): a generator at a low sampling rate, and one that adds higher bands."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import VocoderArch, VocoderWithBWEArch
from ltx2_cli.models.config import Config, read_arch
from ltx2_cli.models.vocoder import Vocoder, upsample, within_limits
from ltx2_cli.nn.conv import convolve
from ltx2_cli.weights.declare import CONV, Scope

LEAST_MEL = 1e-5  # the magnitude of silence, before the logarithm
ZERO_CROSSINGS = 6  # of the resampler's sinc, on each side
ROLLOFF = 0.99  # of the resampler's band


def hann_sinc(ratio: int) -> np.ndarray:
    """Taps of the low-pass filter that upsamples by `ratio`: a sinc under a Hann window, float64, odd in number."""
    width = math.ceil(ZERO_CROSSINGS / ROLLOFF)
    time = (np.arange(2 * width * ratio + 1) / ratio - width) * ROLLOFF
    window = np.cos(np.clip(time / ZERO_CROSSINGS, -1, 1) * np.pi / 2) ** 2
    return np.sinc(time) * window * ROLLOFF / ratio


class LogMel(nnx.Module):
    """The log-mel spectrogram of a waveform, causal: a frame depends on its own hop and on those before."""

    def __init__(self, scope: Scope, arch: VocoderWithBWEArch):
        bins, stft = arch.filter_length // 2 + 1, scope / "stft_fn"
        self.forward_basis = stft.weight("forward_basis", (arch.filter_length, 1, 2 * bins), (None, None, None), CONV)
        # published beside it for the way back, which nothing takes
        self.inverse_basis = stft.weight("inverse_basis", (2 * bins, 1, arch.filter_length), (None, None, None))
        self.mel_basis = scope.weight("mel_basis", (arch.num_mel_channels, bins), (None, None))
        self.hop, self.past = arch.hop_length, max(0, arch.window_length - arch.hop_length)

    def __call__(self, wave: jax.Array) -> jax.Array:
        """[batch, samples, channels], whole hops, to [batch, hops, mel bins, channels]."""
        batch, samples, channels = wave.shape
        # Whole hops as channels, and zeros behind the filters: over single samples a TPU's compiler takes minutes.
        filters = self.forward_basis[:, 0]
        hops = -(-len(filters) // self.hop)
        filters = jnp.pad(filters, ((0, hops * self.hop - len(filters)), (0, 0))).reshape(hops, self.hop, -1)
        mono = wave.swapaxes(1, 2).reshape(batch * channels, samples)
        seen = jnp.pad(mono, ((0, 0), (self.past, hops * self.hop)))[:, : samples + (hops - 1) * self.hop]
        spectrum = convolve(seen.reshape(batch * channels, -1, self.hop), filters, ((0, 0),))
        real, imaginary = jnp.split(spectrum, 2, axis=-1)
        magnitudes = jnp.sqrt(jnp.square(real) + jnp.square(imaginary))
        mel = jnp.matmul(magnitudes, self.mel_basis[...].mT, precision="highest")
        mel = jnp.log(jnp.maximum(mel, LEAST_MEL))
        return jnp.moveaxis(mel.reshape(batch, channels, *mel.shape[1:]), 1, -1)


class VocoderWithBWE(nnx.Module):
    """Spectrograms to sound: the first generator's waveform, resampled, plus the bands of the second generator.

    `clamp` limits the first waveform to [-1, 1] before it is used. Float32 as in `Vocoder`.
    """

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
            wave = within_limits(wave)
        samples = wave.shape[1]
        wave = jnp.pad(wave, ((0, 0), (0, -samples % self.hop), (0, 0)))
        missing = self.bwe(self.log_mel(wave))
        taps = hann_sinc(self.ratio)
        resampled = upsample(wave, taps.astype(np.float32), self.ratio, len(taps) // 2)
        return within_limits(missing + resampled)[:, : samples * self.ratio]


CLASSES: dict[str, type[VocoderArch]] = {"LTX2Vocoder": VocoderArch, "LTX2VocoderWithBWE": VocoderWithBWEArch}


def vocoder_arch(config: Config, where: str) -> VocoderArch:
    """What a vocoder's config describes: the class it names, else the one that has its keys.

    `where` names the file in errors. Raises `UsageError` for what is not implemented.
    """
    extended = "LTX2VocoderWithBWE" if "bwe_in_channels" in config else "LTX2Vocoder"
    name = config.get("_class_name", extended)
    if name not in CLASSES:
        raise UsageError(
            f"{where}: a vocoder of class {name!r} is not implemented, only {', '.join(CLASSES)} are",
            "--model names another checkpoint",
        )
    return read_arch(CLASSES[name], config, where)


def build_vocoder(scope: Scope, arch: VocoderArch, clamp: bool = True) -> Vocoder | VocoderWithBWE:
    """The network that `arch` describes, abstract; `clamp` as in `VocoderWithBWE`, elsewhere it means nothing."""
    if isinstance(arch, VocoderWithBWEArch):
        return VocoderWithBWE(scope, arch, clamp)
    return Vocoder(scope, arch)
