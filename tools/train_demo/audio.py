"""The courses of the audio autoencoder, and of the vocoder that hears what it makes."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.spectrogram import crop_or_pad, log_mel, resample
from ltx2_cli.models.vocoder import LEAST_MEL, VocoderWithBWE, VocoderWithBWEArch
from ltx2_cli.weights.declare import Scope, Weight, map_weights
from tools.train_demo.arch import ARCH
from tools.train_demo.initial import initial, with_spectra
from tools.train_demo.training import Course, train
from tools.train_demo.world import SAMPLING_RATE, draw_scene, record_sound

CLIPS, PIECES = 8, 4
INSTANTS = 41  # of a vocoder's piece
NOISE, SMALL = 0.1, 1e-3
LATENTS = 51  # of a clip
HOP = SAMPLING_RATE // 100


def draw(rng: np.random.Generator, clips: int = CLIPS) -> np.ndarray:
    """Sounds, float32 [clips, samples, 2]."""
    return np.stack([record_sound(draw_scene(rng)) for _ in range(clips)])


def spectrograms(sounds: jax.Array, latents: int = LATENTS) -> jax.Array:
    """What the autoencoder takes of sounds [clips, samples, 2], for so many latents."""
    return crop_or_pad(log_mel(sounds, SAMPLING_RATE, ARCH.audio_vae), latents, ARCH.audio_vae)


def loss(vae: AudioVAE, sounds: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """How far spectrograms are from themselves, in logarithms and, since faint notes matter less, in magnitude."""
    mel = spectrograms(sounds)
    latents = vae.encoder(mel)
    made = vae.decoder(latents + NOISE * jax.random.normal(key, latents.shape))
    error = jnp.mean(jnp.abs(made - mel)) + jnp.mean(jnp.square(made - mel))
    loud = jnp.mean(jnp.abs(jnp.exp(jnp.minimum(made, 4)) - jnp.exp(mel)))
    spread = jnp.mean(jnp.square(latents))
    return error + 10 * loud + SMALL * spread, {"error": error, "loud": loud, "spread": spread}


def trained_vae(course: Course, out: Path) -> AudioVAE:
    """The audio autoencoder at the end of its course."""
    return train(course, _silent(initial(AudioVAE(Scope("float32"), ARCH.audio_vae), seed=2)), loss, draw, out)


def _silent(vae: AudioVAE) -> AudioVAE:
    """`vae` with a decoder that begins at silence, which a bias takes long to learn."""

    def with_floor(weight: Weight) -> Weight:
        if weight.source != "decoder.conv_out.conv.bias":
            return weight
        return weight.with_value(jnp.full(weight.shape, np.log(LEAST_MEL), jnp.float32))

    return map_weights(with_floor, vae)


def vocoder_loss(
    vae: AudioVAE, vocoder: VocoderWithBWE, sounds: jax.Array, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """How far waveforms are from the sounds whose spectrograms the autoencoder made, sample by sample: every note has
    whole periods an instant, so that a vocoder can know its phase."""
    latents = vae.encoder(spectrograms(sounds))
    mel = vae.decoder(latents + NOISE * jax.random.normal(key, latents.shape))
    first = jax.random.randint(jax.random.fold_in(key, 1), (), 0, mel.shape[1] - INSTANTS + 1)
    piece = jax.lax.stop_gradient(jax.lax.dynamic_slice_in_dim(mel, first, INSTANTS, axis=1))
    wanted = jax.lax.dynamic_slice_in_dim(sounds, first * HOP, INSTANTS * HOP, axis=1)
    low = resample(wanted, SAMPLING_RATE, ARCH.audio_vae.sample_rate)
    narrow, wide = vocoder.vocoder(piece), vocoder(piece)
    inside, lower = slice(5 * HOP, -5 * HOP), slice(5 * HOP // 3, -5 * HOP // 3)  # the rest lacks its surroundings
    narrow_error = jnp.mean(jnp.abs(narrow - low)[:, lower])
    wide_error = jnp.mean(jnp.abs(wide - wanted)[:, inside])
    return narrow_error + wide_error + 0.1 * _spectral(narrow[:, lower], low[:, lower]), {
        "narrow": narrow_error,
        "wide": wide_error,
    }


def _spectral(made: jax.Array, wanted: jax.Array) -> jax.Array:
    made, wanted = (jnp.exp(log_mel(each, ARCH.audio_vae.sample_rate, ARCH.audio_vae)) for each in (made, wanted))
    return jnp.mean(jnp.abs(made - wanted))


def trained_vocoder(course: Course, vae: AudioVAE, out: Path) -> VocoderWithBWE:
    """The vocoder at the end of its course."""
    arch = ARCH.vocoder
    assert isinstance(arch, VocoderWithBWEArch)
    vocoder = with_spectra(initial(VocoderWithBWE(Scope("float32"), arch, clamp=False), seed=3), arch)
    return train(course, vocoder, partial(vocoder_loss, vae), partial(draw, clips=PIECES), out)
