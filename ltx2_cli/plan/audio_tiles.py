"""Tiles along time of the audio's decoding, which change no waveform: a tile reads what its samples are made from."""

import math
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.chips import chip
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.networks import Networks
from ltx2_cli.models.vocoder import Vocoder, VocoderWithBWE
from ltx2_cli.nn.layers import convolved_itemsize
from ltx2_cli.plan.axis_tiling import AxisTiling, tile_axis
from ltx2_cli.units import FLOAT32_BYTES
from ltx2_cli.weights.declare import weights

SHARED_LATENTS = 1  # that neighbours both decode: the first instant of a tile stands alone
LEAST_LATENTS = 250  # of a tile: 10 s as published, of which the latents read besides are a quarter
# Live activations of the audio decoder's program, in sizes of the largest one, by platform; other chips keep all. From
# `memory_analysis()` of libtpu 0.0.42 and XLA for CPUs and CUDA with jax 0.10.2; `tests/estimate/test_phases.py` has
# the figures.
AUDIO_BUFFERS = {"cpu": 8, "gpu": 6, "tpu": 17}


class AudioTiles(NamedTuple):
    """Tiles of audio latents. Hashable."""

    axis: AxisTiling
    samples: int  # of the waveform for a latent

    @property
    def number(self) -> int:
        return len(self.axis.read_starts)


class PlannedAudio(NamedTuple):
    """The decoding of a clip's audio."""

    tiles: AudioTiles | None
    bytes: int  # approximate, on each device, without weights


UNDECODED = PlannedAudio(None, 0)


def plan_audio(
    arch: Arch, networks: Networks, latents: int, windows: int, device: jax.Device, budget: float
) -> PlannedAudio:
    """The fewest tiles that are decoded in `budget` bytes of a device, but one for each window of the clip; if none
    fit, those with the least memory."""
    most = 1 if arch.audio_vae.compression % arch.vocoder.period else max(1, latents // LEAST_LATENTS)
    tilings = [tile_audio(arch, latents, count) for count in range(min(windows, most), most + 1)]
    choices = [PlannedAudio(tiles, audio_decode_bytes(arch, networks, tiles, device)) for tiles in tilings]
    fitting = (choice for choice in choices if choice.bytes <= budget)
    return next(fitting, min(choices, key=attrgetter("bytes")))


def tile_audio(arch: Arch, latents: int, count: int) -> AudioTiles:
    """So many tiles of audio latents."""
    compression, vocoder = arch.audio_vae.compression, arch.vocoder
    after = math.ceil(vocoder.reach / compression)
    before = math.ceil(arch.audio_vae.past + vocoder.reach / compression)
    samples = compression * round(vocoder.output_sampling_rate / vocoder.spectra_rate)
    return AudioTiles(tile_axis(latents, count, before, SHARED_LATENTS, after), samples)


def audio_decode_bytes(arch: Arch, networks: Networks, tiles: AudioTiles, device: jax.Device) -> int:
    """Approximate bytes on a device to decode audio in these tiles, without the weights."""
    decoder, latents, known = networks.audio_vae.decoder, tiles.axis.read_size, chip(device.device_kind)
    itemsize = convolved_itemsize(decoder.conv_in.kernel, device.platform)
    sizes = [itemsize * size for size in arch.audio_vae.sizes(latents)]
    sizes += [FLOAT32_BYTES * size for size in arch.vocoder.sizes(arch.audio_vae.instants(latents))]
    activations = AUDIO_BUFFERS[device.platform] * max(sizes)
    if known and known.keeps_activations:
        activations = sum(sizes) if tiles.number == 1 else activations  # in a loop it keeps weights alone
        read = (*weights(decoder), *weights(networks.vocoder))
        activations += sum(math.prod(weight.shape) * weight.dtype.itemsize for weight in read)
    return activations


def decode_audio(
    audio_vae: AudioVAE, vocoder: Vocoder | VocoderWithBWE, tokens: jax.Array, tiles: AudioTiles
) -> jax.Array:
    """Decode normalised tokens [videos, latents, channels · mels] to a waveform [videos, samples, channels]."""
    axis, samples = tiles
    if tiles.number == 1:
        return vocoder(audio_vae.decode(tokens))

    def decode_tile(starts: tuple[jax.Array, jax.Array]) -> jax.Array:
        read_start, write_start = starts
        read = jax.lax.dynamic_slice_in_dim(tokens, read_start, axis.read_size, axis=1)
        wave = vocoder(audio_vae.decode(read))
        kept = wave.shape[1] - (axis.read_size - axis.write_size) * samples
        return jax.lax.dynamic_slice_in_dim(wave, (write_start - read_start) * samples, kept, axis=1)

    pieces = jax.lax.map(decode_tile, (jnp.array(axis.read_starts), jnp.array(axis.write_starts)))
    lengths = [*(np.diff(axis.write_starts) * samples).tolist(), pieces.shape[2]]
    return jnp.concatenate([piece[:, :length] for piece, length in zip(pieces, lengths, strict=True)], axis=1)
