"""The weights that training begins with."""

import zlib

import jax.numpy as jnp
import numpy as np

from ltx2_cli.models.spectrogram import mel_bank
from ltx2_cli.models.vocoder import VocoderWithBWE, VocoderWithBWEArch
from ltx2_cli.weights.declare import CONV, TRANSPOSED_CONV, VIDEO_CONV, M, Weight, map_weights

TAPS = 12


def initial(module: M, seed: int) -> M:
    """`module` with random matrices that keep a signal's spread, norms that change nothing, zeros for biases."""
    return map_weights(lambda weight: weight.with_value(jnp.asarray(_value(weight, seed).astype(np.float32))), module)


def _value(weight: Weight, seed: int) -> np.ndarray:
    shape, name = weight.get_value().shape, weight.source
    last = name.rsplit(".", 1)[-1]
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if last == "filter":
        return np.broadcast_to(low_pass(), shape)
    if last in ("bias", "alpha", "beta", "latents_mean"):
        return np.zeros(shape)
    if last == "latents_std":
        return np.ones(shape)
    norm = name.rpartition(".")[0].rpartition(".")[2]
    if "norm" in norm:
        adds_one = norm.endswith(("layernorm", "q_norm", "k_norm")) or name == "norm.weight"  # Gemma's
        return np.zeros(shape) if adds_one else np.ones(shape)
    if "table" in last or "embed_tokens" in name:
        return 0.02 * noise
    if last == "learnable_registers":
        return noise
    return noise * _fan_in(weight) ** -0.5


def _fan_in(weight: Weight) -> int:
    shape = weight.get_value().shape[bool(weight.layers) :]
    if weight.layout in (CONV, VIDEO_CONV):
        return int(np.prod(shape[:-1]))
    if weight.layout == TRANSPOSED_CONV:
        return shape[1] * 2
    return shape[-1]


def low_pass() -> np.ndarray:
    """The filter on both sides of a vocoder's activations: a sinc that cuts at a quarter, under a Kaiser window."""
    attenuation = 2.285 * (TAPS / 2 - 1) * np.pi * 4 * 0.3 + 7.95
    time = np.arange(TAPS) - TAPS / 2 + 0.5
    taps = 0.5 * np.kaiser(TAPS, 0.1102 * (attenuation - 8.7)) * np.sinc(0.5 * time)
    return taps / taps.sum()


def with_spectra(vocoder: VocoderWithBWE, arch: VocoderWithBWEArch) -> VocoderWithBWE:
    """`vocoder` with the Fourier transform and the mel filters that its second generator hears through."""
    length, bins = arch.filter_length, arch.filter_length // 2 + 1
    angles = 2 * np.pi * np.outer(np.arange(bins), np.arange(length)) / length
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)
    basis = np.concatenate([np.cos(angles), -np.sin(angles)]) * window
    constants = {
        "mel_stft.stft_fn.forward_basis": basis[:, None],
        "mel_stft.stft_fn.inverse_basis": np.linalg.pinv(basis).T[:, None],
        "mel_stft.mel_basis": mel_bank(arch.input_sampling_rate, arch.num_mel_channels)[::2].T,
    }

    def filled(weight: Weight) -> Weight:
        if weight.source not in constants:
            return weight
        return weight.with_value(jnp.asarray(constants[weight.source].transpose(weight.order), jnp.float32))

    return map_weights(filled, vocoder)
