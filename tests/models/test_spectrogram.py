import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ltx2_cli.errors import UsageError
from ltx2_cli.models.audio_vae import AudioVAE, AudioVAEArch
from ltx2_cli.models.spectrogram import crop_or_pad, log_mel, resample, resample_on_host
from ltx2_cli.weights.declare import Scope

PUBLISHED = AudioVAEArch()
UNLIKE = AudioVAEArch(in_channels=3, sample_rate=12000, mel_hop_length=100, mel_bins=20)
FLOOR = math.log(1e-5)

run = jax.jit(log_mel, static_argnums=(1, 2))


def resampled(x: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Each new sample is a sum over all old ones."""
    return x if rate == wanted else shares(len(x), rate, wanted) @ x


@lru_cache(maxsize=1)
def shares(samples: int, rate: int, wanted: int) -> np.ndarray:
    """Of each old sample in each new one."""
    lower = 0.99 * min(rate, wanted)
    new, old = np.arange(math.ceil(samples * wanted / rate)) / wanted, np.arange(samples) / rate
    t = np.clip((new[:, None] - old) * lower, -6, 6)
    return np.sinc(t) * np.cos(math.pi * t / 12) ** 2 * lower / rate


def hertz(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)


def triangle(f: float, low: float, peak: float, high: float) -> float:
    height = 2 / (high - low)
    if low < f <= peak:
        return height * (f - low) / (peak - low)
    return height * (high - f) / (high - peak) if peak < f < high else 0


def defined(x: np.ndarray, rate: int, arch: AudioVAEArch) -> np.ndarray:
    """Mel magnitudes [instants, mel bins] of one channel, float64, each step as it is defined."""
    x = resampled(x.astype(np.float64), rate, arch.sample_rate)
    last, n = len(x) - 1, np.arange(1024)
    hann = 0.5 - 0.5 * np.cos(2 * math.pi * n / 1024)
    fourier = np.exp(-2j * math.pi * np.outer(np.arange(513), n) / 1024)
    top = 15 + 27 * math.log(arch.sample_rate / 2 / 1000) / math.log(6.4)
    edges = [hertz(top * i / (arch.mel_bins + 1)) for i in range(arch.mel_bins + 2)]
    frequencies = [k * arch.sample_rate / 1024 for k in range(513)]
    bank = np.array([[triangle(f, *edges[m : m + 3]) for f in frequencies] for m in range(arch.mel_bins)])
    rows = []
    for middle in range(0, len(x) + 1, arch.mel_hop_length):
        place = np.abs(middle - 512 + n)  # mirrored at the first sample, then at the last
        rows += [bank @ np.abs(fourier @ (hann * x[last - np.abs(last - place)]))]
    return np.array(rows)


def sound(samples: int, rate: int, channels: int) -> np.ndarray:
    """Noise, another tone on each channel, and silence at the end."""
    time = np.arange(samples)[:, None] / rate
    tones = 0.5 * np.sin(2 * math.pi * 440 * (1 + np.arange(channels)) * time)
    wave = tones + 0.1 * np.random.default_rng(5).normal(size=(samples, channels))
    return (wave * (np.arange(samples) < 0.6 * samples)[:, None])[None].astype(np.float32)


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize(
    ("rate", "samples", "channels", "arch"),
    [
        (16000, 513, 2, PUBLISHED),  # the shortest there is
        (16000, 3200, 2, PUBLISHED),
        (48000, 4801, 2, PUBLISHED),
        (44100, 4000, 2, PUBLISHED),
        (24000, 2401, 1, PUBLISHED),
        (22050, 2209, 2, PUBLISHED),
        (8000, 1601, 1, PUBLISHED),
        (16001, 2000, 2, PUBLISHED),
        (12000, 2399, 3, UNLIKE),
        (48000, 5000, 1, UNLIKE),
    ],
)
def test_a_spectrogram_equals_its_definition(rate, samples, channels, arch):
    wave = sound(samples, rate, channels)
    got = np.asarray(run(wave, rate, arch), np.float64)
    each = [defined(channel, rate, arch) for channel in wave[0].T]
    wanted = np.stack(each if channels == arch.in_channels else each * arch.in_channels, axis=-1)[None]
    loud = wanted > 1e-5
    assert loud.mean() > 0.3
    assert got.shape == wanted.shape
    assert relative(np.exp(got), np.maximum(wanted, 1e-5)) < 1e-5
    assert relative(got[loud], np.log(wanted[loud])) < 1e-5
    np.testing.assert_allclose(got[~loud], FLOOR, rtol=1e-4)


@pytest.mark.parametrize("rate", [48000, 44100, 24000, 16000])
@pytest.mark.parametrize(("pitch", "place"), [(500, 10), (2000, 35), (6400, 59)])
def test_a_tone_is_in_its_bin(rate, pitch, place):
    """65 steps make 15 + 27 · log 8 / log 6.4 = 45.25 mels; 500, 2000 and 6400 Hz are 7.5, 25.1 and 42 of them."""
    wave = np.sin(2 * np.pi * pitch * np.arange(rate // 10) / rate)[None, :, None]
    assert (np.asarray(run(wave, rate, PUBLISHED)).argmax(axis=2)[:, 2:-2] == place).all()


def test_a_click_is_at_its_time():
    wave = np.zeros((1, 24000, 2), np.float32)
    wave[0, 7200, 0], wave[0, 12000, 1] = 1, 1  # after 0.3 and 0.5 seconds
    loudness = np.asarray(run(wave, 24000, PUBLISHED)).mean(axis=2)
    assert loudness.argmax(axis=1).tolist() == [[30, 50]]


@pytest.mark.parametrize(("rate", "samples"), [(48000, 4801), (44100, 1999), (8000, 1601), (16001, 700), (16000, 9)])
def test_the_host_resamples_by_the_same_definition(rate, samples):
    wave = sound(samples, rate, 2)[0]
    got, wanted = resample_on_host(wave, rate, 16000), resampled(wave.astype(np.float64), rate, 16000)
    assert got.dtype == np.float32
    assert got.shape == wanted.shape
    assert relative(got, wanted) < 1e-6


def test_resampling_removes_frequencies_above_the_lower_rate():
    time = np.arange(48000)[None, :, None] / 48000
    low, high = (resample(jnp.asarray(np.sin(2 * np.pi * f * time)), 48000, 16000) for f in (4000, 12000))
    assert np.abs(high[:, 20:-20]).max() < 0.003 * np.abs(low).max()


def test_silence_is_the_floor():
    got = run(np.zeros((2, 4800, 1), np.float32), 48000, PUBLISHED)
    assert got.shape == (2, 11, 64, 2)
    np.testing.assert_allclose(got, FLOOR, rtol=1e-6)


def test_spectrograms_and_their_products_are_float32():
    wave = jnp.zeros((1, 4800, 2), jnp.bfloat16)
    assert run(wave, 48000, PUBLISHED).dtype == jnp.float32
    with jax.default_matmul_precision("bfloat16"):
        program = run.lower(wave, 48000, PUBLISHED).as_text()
    assert program.count("stablehlo.dot_general") == program.count("precision = [HIGHEST, HIGHEST]") == 2


@pytest.mark.parametrize("make", [np.zeros, np.ones])
def test_gradients_are_finite(make):
    slope = jax.grad(lambda wave: log_mel(wave, 24000, PUBLISHED).sum())(make((1, 1200, 1), np.float32))
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("latents", [25, 26, 27])
def test_the_encoder_makes_the_requested_number_of_latents(latents):
    """A second has 101 instants, those of 26 latents."""
    mel = run(sound(16000, 16000, 2), 16000, PUBLISHED)
    fitted = np.asarray(crop_or_pad(mel, latents, PUBLISHED))
    assert fitted.shape == (1, 4 * latents - 3, 64, 2)
    np.testing.assert_array_equal(fitted[:, :101], mel[:, : 4 * latents - 3])
    np.testing.assert_allclose(fitted[:, 101:], FLOOR, rtol=1e-6)
    tokens = jax.eval_shape(AudioVAE.encode, AudioVAE(Scope(jnp.float32), PUBLISHED), fitted)
    assert tokens.shape == (1, latents, 128)


@pytest.mark.parametrize(
    ("shape", "rate", "sentence", "hint"),
    [
        ((1, 512, 2), 16000, "the audio lasts 0.0320 s, which is too short for a spectrogram", "0.0321 s is the least"),
        ((1, 0, 2), 48000, "the audio lasts 0.0000 s, which is too short for a spectrogram", "0.0321 s is the least"),
        (
            (1, 900, 6),
            16000,
            "the audio has 6 channels, the audio autoencoder hears 2",
            "mix it down to 2 channels or to one",
        ),
        ((1, 900, 2), 0, "the audio has a sampling rate of 0 Hz", "1 Hz is the least"),
    ],
)
def test_sound_without_a_spectrogram_is_refused(shape, rate, sentence, hint):
    with pytest.raises(UsageError, match=sentence) as refused:
        log_mel(np.zeros(shape, np.float32), rate, PUBLISHED)
    assert refused.value.hint == hint


def test_a_sound_that_ended_before_is_resampled_to_none() -> None:
    """Where a clip goes on from a frame behind the end of its sound."""
    assert resample_on_host(np.zeros((0, 2), np.float32), 48000, 16000).shape == (0, 2)
