"""Audio to the log-mel spectrograms that the audio autoencoder was trained on. A waveform is [batch, samples, channels]
in [-1, 1], and its spectrogram float32. Sampling rates are whole numbers of samples a second; they and an
`AudioVAEArch` are static under `jax.jit`."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ltx2_cli.errors import UsageError
from ltx2_cli.models.audio_vae import AudioVAEArch
from ltx2_cli.models.vocoder import LEAST_MEL, ROLLOFF, ZERO_CROSSINGS, hann_sinc

WINDOW = 1024  # samples that one instant hears


def log_mel(wave: jax.Array | np.ndarray, rate: int, arch: AudioVAEArch) -> jax.Array:
    """The spectrogram [batch, instants, mel bins, channels] of a waveform of `rate` samples a second.

    An instant is the middle of its window: one at the start of the audio, one after each whole hop. What lies beyond
    both ends is the audio mirrored. Values are natural logarithms of magnitudes, of 1e-5 at least. A single channel
    is heard on all. Raises `UsageError` for any other number of channels, and for less audio than can be mirrored.
    """
    if wave.shape[2] not in (1, arch.in_channels):
        sentence = f"the audio has {wave.shape[2]} channels, the audio autoencoder hears {arch.in_channels}"
        raise UsageError(sentence, f"mix it down to {arch.in_channels} channels or to one")
    wave = resample(jnp.asarray(wave, jnp.float32), rate, arch.sample_rate)
    batch, samples, _ = wave.shape
    if samples <= WINDOW // 2:
        sentence = f"the audio lasts {samples / arch.sample_rate:.4f} s, which is too short for a spectrogram"
        raise UsageError(sentence, f"{(WINDOW // 2 + 1) / arch.sample_rate:.4f} s is the least")
    wave = jnp.broadcast_to(wave, (batch, samples, arch.in_channels))
    mirrored = jnp.pad(wave, ((0, 0), (WINDOW // 2, WINDOW // 2), (0, 0)), mode="reflect")
    starts = jnp.arange(samples // arch.mel_hop_length + 1) * arch.mel_hop_length
    windows = mirrored[:, starts[:, None] + np.arange(WINDOW)]  # [batch, instants, WINDOW, channels]
    hann = np.sin(np.pi * np.arange(WINDOW) / WINDOW) ** 2
    magnitudes = jnp.abs(jnp.fft.rfft(windows * hann.astype(np.float32)[:, None], axis=2))
    bank = mel_bank(arch.sample_rate, arch.mel_bins).astype(np.float32)
    return jnp.log(jnp.maximum(jnp.einsum("btfc,fm->btmc", magnitudes, bank, precision="highest"), LEAST_MEL))


def crop_or_pad(mel: jax.Array, latents: int, arch: AudioVAEArch) -> jax.Array:
    """`mel` cropped, or padded with silence, to the 4·latents − 3 frames that encode to exactly `latents`."""
    instants = arch.instants(latents)
    missing = max(0, instants - mel.shape[1])
    longer = jnp.pad(mel, ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=math.log(LEAST_MEL))
    return longer[:, :instants]


def samples_for(latents: int, arch: AudioVAEArch) -> int:
    """Samples, at the autoencoder's rate, that the spectrogram of so many latents hears: nothing of it is mirrored at
    the end."""
    return arch.compression * (latents - 1) * arch.mel_hop_length + WINDOW // 2


def mel_bank(rate: int, bins: int) -> np.ndarray:
    """Triangles of area 1, evenly apart on Slaney's mel scale from 0 Hz to `rate` / 2: float64 [frequencies, bins]. The
    scale is the Auditory Toolbox's (Slaney, 1998): 200/3 Hz a mel up to 1 kHz, above it 27 mels a factor of 6.4."""
    most = min(rate / 2, 1000) * 3 / 200 + 27 * math.log(max(rate / 2000, 1), 6.4)
    mels = np.linspace(0, most, bins + 2)
    edges = np.minimum(mels, 15) * 200 / 3 * 6.4 ** (np.maximum(mels - 15, 0) / 27)
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    hertz = np.arange(WINDOW // 2 + 1)[:, None] * rate / WINDOW
    rising, falling = (hertz - low) / (middle - low), (high - hertz) / (high - middle)
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)


def resample(wave: jax.Array, rate: int, wanted: int) -> jax.Array:
    """A waveform of `rate` samples a second at `wanted`, with silence beyond its ends; an equal rate changes nothing.
    The filter is a sinc of 6 zero crossings on each side under a Hann window, which lets 0.99 of the lower rate's band
    pass: torchaudio's default. Raises `UsageError` for a rate below 1."""
    if (filters := _filters(rate, wanted)) is None:
        return wave
    steps, places, taps = filters
    samples, rounds, padding = _lengths(wave.shape[1], filters)
    padded = jnp.pad(wave, ((0, 0), padding, (0, 0)))
    windows = padded[:, jnp.arange(rounds)[:, None, None] * steps + places]
    resampled = jnp.einsum("brpoc,po->brpc", windows, taps, precision="highest")
    return resampled.reshape(len(wave), -1, wave.shape[2])[:, :samples]


def resample_on_host(wave: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """As `resample`, of [samples, channels] and without jax: a length or a rate of its own compiles nothing."""
    if (filters := _filters(rate, wanted)) is None or not len(wave):
        return wave
    steps, places, taps = filters
    samples, rounds, padding = _lengths(len(wave), filters)
    padded = np.pad(wave, (padding, (0, 0)))
    resampled = np.empty((rounds, len(taps), wave.shape[1]), np.float32)
    for phase, (first, weights) in enumerate(zip(places[:, 0], taps, strict=True)):
        windows = sliding_window_view(padded[first:], len(weights), axis=0)[::steps][:rounds]
        resampled[:, phase] = windows @ weights
    return resampled.reshape(-1, wave.shape[1])[:samples]


class _Filters(NamedTuple):
    """The filters of a round: as many new samples as phases, for a whole number of old ones."""

    steps: int  # old samples
    places: NDArray[np.int64]  # [phases, taps], of the old samples that a new one is a sum of; 0 is a round's earliest
    taps: NDArray[np.float32]  # [phases, taps]


def _filters(rate: int, wanted: int) -> _Filters | None:
    """None for an equal rate."""
    if rate < 1:
        raise UsageError(f"the audio has a sampling rate of {rate} Hz", "1 Hz is the least")
    if rate == wanted:
        return None
    steps, phases = rate // math.gcd(rate, wanted), wanted // math.gcd(rate, wanted)
    band = ROLLOFF * min(1, phases / steps)  # zero crossings of the sinc in an old sample
    reach = math.ceil(ZERO_CROSSINGS / band)
    before = np.arange(phases)[:, None] * steps // phases  # the last old sample not after a new one
    offsets = np.arange(-reach, reach + 1)
    time = (before + offsets - np.arange(phases)[:, None] * steps / phases) * band
    return _Filters(steps, before + offsets + reach, (hann_sinc(time) * band).astype(np.float32))


def _lengths(samples: int, filters: _Filters) -> tuple[int, int, tuple[int, int]]:
    """New samples, rounds, and the silence before and after the old samples."""
    phases, reach = len(filters.taps), filters.taps.shape[1] // 2
    new = -(-samples * phases // filters.steps)
    rounds = -(-new // phases)
    return new, rounds, (reach, rounds * filters.steps + reach - samples)
