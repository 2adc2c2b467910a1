"""Latents to waveforms by the audio's decoder and the vocoder, whole or in tiles, in one program."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.vocoder import Vocoder, VocoderWithBWE
from ltx2_cli.plan.audio_tiles import AudioTiles
from ltx2_cli.plan.axis_tiling import AxisTiling


def decode_audio(
    audio_vae: AudioVAE, vocoder: Vocoder | VocoderWithBWE, tokens: jax.Array, tiles: AudioTiles, part: Any = 0
) -> jax.Array:
    """Decode normalised tokens [videos, latents, channels · mels] to a part of each tile, for `join_audio`: [tiles,
    videos, samples, channels]."""
    axis, parts, count, samples = tiles

    def decode_part(read: jax.Array) -> jax.Array:
        spectra = audio_vae.decode(read)
        if tiles.number_of_parts == 1:
            return vocoder(spectra)
        start, written = (jnp.array(starts)[part] for starts in (parts.read_starts, parts.write_starts))
        size = spectra.shape[1] - (read.shape[1] - parts.read_size) * count
        wave = vocoder(jax.lax.dynamic_slice_in_dim(spectra, start * count, size, axis=1))
        kept = wave.shape[1] - (parts.read_size - parts.write_size) * samples
        return jax.lax.dynamic_slice_in_dim(wave, (written - start) * samples, kept, axis=1)

    if tiles.number == 1:
        return decode_part(tokens)[None]
    reads = jnp.array(axis.read_starts)
    return jax.lax.map(
        lambda start: decode_part(jax.lax.dynamic_slice_in_dim(tokens, start, axis.read_size, axis=1)), reads
    )


def join_audio(pieces: jax.Array, tiles: AudioTiles) -> jax.Array:
    """The waveform [videos, samples, channels] of all parts of all tiles [tiles, parts, videos, samples, channels]."""
    axis, parts, _, samples = tiles
    waves = []
    for tile, read, write in zip(pieces, axis.read_starts, axis.write_starts, strict=True):
        wave = _joined(tile, parts, samples)
        kept = wave.shape[1] - (axis.read_size - axis.write_size) * samples
        waves.append(jax.lax.slice_in_dim(wave, (write - read) * samples, (write - read) * samples + kept, axis=1))
    return _joined(waves, axis, samples)


def _joined(pieces: Iterable[jax.Array], axis: AxisTiling, samples: int) -> jax.Array:
    """Pieces [videos, samples, channels] one after another; each ends where the next begins."""
    lengths = [*(np.diff(axis.write_starts) * samples).tolist(), None]
    return jnp.concatenate([piece[:, :length] for piece, length in zip(pieces, lengths, strict=True)], axis=1)
