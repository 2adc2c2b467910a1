"""The audio autoencoder: log-mel spectrograms [batch, time, mel, channels] to latents of the same axes. Time and mel
shrink by 4, but for the first instant, which stands alone; nothing looks ahead in time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx

from ltx2_cli.models.config import NetworkArch
from ltx2_cli.models.video_vae import LatentStatistics, ResNet, norm_silu
from ltx2_cli.nn.layers import Conv
from ltx2_cli.weights.declare import Scope

NORM_EPS = 1e-6
CAUSAL = 2  # instants before its own that a convolution reads
MIDDLE = ("block_1", "block_2")  # the residual blocks between the levels and the latents


@dataclass(frozen=True)
class AudioVAEArch(NetworkArch):
    """The audio autoencoder over stereo log-mel spectrograms."""

    base_channels: int = 128
    output_channels: int = 2
    ch_mult: tuple[int, ...] = (1, 2, 4)
    num_res_blocks: int = 2
    in_channels: int = 2
    latent_channels: int = 8
    sample_rate: int = 16000
    mel_hop_length: int = 160
    mel_bins: int = 64

    compression = 4  # instants and mel bins of a spectrogram for one of its latents

    def conflicts(self) -> Iterator[str]:
        if len(self.ch_mult) != 3 or self.mel_bins % 4:
            yield "only three levels (len(ch_mult)) and mel_bins that divide by 4 are"

    @property
    def spectra_rate(self) -> float:
        """Spectra per second."""
        return self.sample_rate / self.mel_hop_length

    @property
    def latent_mels(self) -> int:
        """Mel bins of a latent."""
        return self.mel_bins // self.compression

    @property
    def features(self) -> int:
        """The size of a latent: all its channels and mel bins."""
        return self.latent_channels * self.latent_mels

    def instants(self, latents: int) -> int:
        """Instants of the spectrogram of `latents` latents."""
        return self.compression * (latents - 1) + 1

    def sizes(self, latents: int) -> list[int]:
        """The size of each of the decoder's activations for `latents` latents."""
        sizes, channels = [], self.ch_mult[-1]
        for level, multiple in enumerate(reversed(self.ch_mult)):
            size = 4**level * latents * self.latent_mels * self.base_channels
            blocks = self.num_res_blocks + 1 + (0 if level else len(MIDDLE))
            sizes += [
                size * channels,
                *[size * multiple] * 2 * blocks,
            ]  # of the upsampling or first convolution; of blocks
            channels = multiple
        return sizes

    @property
    def past(self) -> float:
        """Latents before its own that the decoder reads for an instant."""
        convolutions = 2 * (self.num_res_blocks + 1)
        past, rate = float(CAUSAL * (1 + 2 * len(MIDDLE) + convolutions)), 1
        for _ in self.ch_mult[1:]:
            rate *= 2
            past += CAUSAL * (1 + convolutions) / rate
        return past + CAUSAL / rate

    @property
    def mel_channels(self) -> int:
        """Mel bins of all channels of the audio."""
        return self.output_channels * self.mel_bins


def causal_conv(scope: Scope, d_in: int, d_out: int, window: int = CAUSAL + 1) -> Conv:
    """A convolution that keeps the spectrogram's size: zeros before it in time, on both sides in mel."""
    return Conv(scope / "conv", (window, window, d_in, d_out), ((window - 1, 0), (window // 2, window // 2)))


class AudioUpsample(nnx.Module):
    """Nearest-neighbour upsampling by 2 in time and mel, then a convolution. The first instant is not doubled."""

    def __init__(self, scope: Scope, channels: int):
        self.conv = causal_conv(scope / "conv", channels, channels)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(x.repeat(2, axis=1).repeat(2, axis=2))[:, 1:]


def audio_resnets(scope: Scope, names: Iterable[str | int], d_in: int, d_out: int) -> list[nnx.Module]:
    """Residual blocks in a row; the first changes the channels."""
    blocks: list[nnx.Module] = []
    for i, name in enumerate(names):
        place, width = scope / name, d_out if i else d_in
        shortcut = None if width == d_out else causal_conv(place / "nin_shortcut", width, d_out, window=1)
        convs = causal_conv(place / "conv1", width, d_out), causal_conv(place / "conv2", d_out, d_out)
        blocks.append(ResNet(*convs, shortcut, NORM_EPS))
    return blocks


class AudioEncoder(nnx.Module):
    """Spectrograms to the mean of their latents' distribution, not normalised."""

    def __init__(self, scope: Scope, arch: AudioVAEArch):
        widths = [arch.base_channels * multiple for multiple in (1, *arch.ch_mult)]
        layers: list[nnx.Module] = []
        for level, (d_in, d_out) in enumerate(pairwise(widths)):
            place = scope / "down" / level
            layers += audio_resnets(place / "block", range(arch.num_res_blocks), d_in, d_out)
            if level < len(arch.ch_mult) - 1:  # half the time, rounded up, and half the mel bins
                layers += [Conv(place / "downsample" / "conv", (3, 3, d_out, d_out), ((2, 0), (0, 1)), stride=2)]
        self.conv_in = causal_conv(scope / "conv_in", arch.in_channels, widths[0])
        self.layers = nnx.List(layers + audio_resnets(scope / "mid", MIDDLE, widths[-1], widths[-1]))
        self.conv_out = causal_conv(scope / "conv_out", widths[-1], 2 * arch.latent_channels)

    def __call__(self, mel: jax.Array) -> jax.Array:
        """[batch, 4t - 3, mel bins, channels] to [batch, t, mel bins / 4, latent channels]."""
        x = self.conv_in(mel.astype(self.conv_in.kernel.dtype))
        for layer in self.layers:
            x = layer(x)
        return jnp.split(self.conv_out(norm_silu(x, NORM_EPS)), 2, axis=-1)[0]  # the other half is the log-variance


class AudioDecoder(nnx.Module):
    """Latents, de-normalised, to spectrograms."""

    def __init__(self, scope: Scope, arch: AudioVAEArch):
        widths = [arch.base_channels * multiple for multiple in (*arch.ch_mult, arch.ch_mult[-1])]
        layers = audio_resnets(scope / "mid", MIDDLE, widths[-1], widths[-1])
        for level in reversed(range(len(arch.ch_mult))):
            place = scope / "up" / level
            layers += audio_resnets(place / "block", range(arch.num_res_blocks + 1), widths[level + 1], widths[level])
            if level:
                layers += [AudioUpsample(place / "upsample", widths[level])]
        self.conv_in = causal_conv(scope / "conv_in", arch.latent_channels, widths[-1])
        self.layers = nnx.List(layers)
        self.conv_out = causal_conv(scope / "conv_out", widths[0], arch.output_channels)

    def __call__(self, latents: jax.Array) -> jax.Array:
        """[batch, t, mel bins / 4, latent channels] to [batch, 4t - 3, mel bins, channels]."""
        x = self.conv_in(latents.astype(self.conv_in.kernel.dtype))
        for layer in self.layers:
            x = layer(x)
        return self.conv_out(norm_silu(x, NORM_EPS))


class AudioVAE(nnx.Module):
    """Encoder, decoder, and the statistics that scale their latents for the denoiser. An instant is one token of
    channels · mels features, mels fastest; statistics are of features, for tokens [batch, time, features]."""

    def __init__(self, scope: Scope, arch: AudioVAEArch):
        self.encoder = AudioEncoder(scope / "encoder", arch)
        self.decoder = AudioDecoder(scope / "decoder", arch)
        self.statistics = LatentStatistics(scope, arch.features)
        self.channels = arch.latent_channels

    def encode(self, mel: jax.Array) -> jax.Array:
        """A spectrogram to normalised tokens, float32 [batch, time, features]."""
        return self.statistics.normalise(mel_to_tokens(self.encoder(mel)))

    def decode(self, tokens: jax.Array) -> jax.Array:
        """Normalised tokens [batch, time, features] to a spectrogram."""
        return self.decoder(tokens_to_mel(self.statistics.denormalise(tokens), self.channels))


def mel_to_tokens(latents: jax.Array) -> jax.Array:
    """Latents [batch, time, mel, channels] to tokens [batch, time, channels · mel]."""
    return latents.swapaxes(2, 3).reshape(*latents.shape[:2], -1)


def tokens_to_mel(tokens: jax.Array, channels: int) -> jax.Array:
    """The inverse of `mel_to_tokens`."""
    return tokens.reshape(*tokens.shape[:2], channels, -1).swapaxes(2, 3)
