"""Tiles along time of the audio's decoding, and the parts of a tile that devices make. They change no waveform: each
reads all latents that its samples depend on."""

import math
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

import jax

from ltx2_cli.chips import chip
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.networks import Networks
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
    """Tiles of audio latents, and their parts. All devices decode a tile to spectra; the vocoder, which takes most of
    the time and reads less far, makes a part on each. Hashable."""

    axis: AxisTiling
    parts: AxisTiling  # of a tile's latents
    spectra: int  # for a latent
    samples: int  # of the waveform for a latent

    @property
    def number(self) -> int:
        return len(self.axis.read_starts)

    @property
    def number_of_parts(self) -> int:
        return len(self.parts.read_starts)


class PlannedAudio(NamedTuple):
    """The decoding of a clip's audio."""

    tiles: AudioTiles | None
    bytes: int  # approximate, on each device, without weights


AudioPlanner = Callable[[int], PlannedAudio]  # by the number of devices that make a video's audio together


def no_audio(devices: int) -> PlannedAudio:
    """The planner for a clip whose audio is not decoded."""
    return PlannedAudio(None, 0)


def plan_audio(
    arch: Arch, networks: Networks, latents: int, windows: int, device: jax.Device, budget: float, devices: int
) -> PlannedAudio:
    """The fewest tiles that are decoded in `budget` bytes of a device, but one for each window of the clip; if none
    fit, those with the least memory. `devices` make a video's audio together."""
    divisible = arch.audio_vae.compression % arch.vocoder.period == 0
    most, parts = (max(1, latents // LEAST_LATENTS), devices) if divisible else (1, 1)
    tilings = [tile_audio(arch, latents, count, parts) for count in range(min(windows, most), most + 1)]
    choices = [PlannedAudio(tiles, audio_decode_bytes(arch, networks, tiles, device)) for tiles in tilings]
    fitting = (choice for choice in choices if choice.bytes <= budget)
    return next(fitting, min(choices, key=attrgetter("bytes")))


def tile_audio(arch: Arch, latents: int, count: int, parts: int = 1) -> AudioTiles:
    """So many tiles of audio latents, each of so many parts, or whole where a part reads all of it."""
    compression, vocoder = arch.audio_vae.compression, arch.vocoder
    after = math.ceil(vocoder.reach / compression)
    before = math.ceil(arch.audio_vae.past + vocoder.reach / compression)
    samples = compression * round(vocoder.output_sampling_rate / vocoder.spectra_rate)
    tiles = tile_axis(latents, count, before, SHARED_LATENTS, after)
    split = tile_axis(tiles.read_size, parts, after, SHARED_LATENTS)
    whole = split.read_size == tiles.read_size
    return AudioTiles(tiles, tile_axis(tiles.read_size, 1, 0, 0) if whole else split, compression, samples)


def audio_decode_bytes(arch: Arch, networks: Networks, tiles: AudioTiles, device: jax.Device) -> int:
    """Approximate bytes on a device to decode audio in these tiles, without the weights."""
    decoder, latents, known = networks.audio_vae.decoder, tiles.axis.read_size, chip(device.device_kind)
    itemsize = convolved_itemsize(decoder.conv_in.kernel, device)
    sizes = [itemsize * size for size in arch.audio_vae.sizes(latents)]
    sizes += [FLOAT32_BYTES * size for size in arch.vocoder.sizes(arch.audio_vae.instants(tiles.parts.read_size))]
    activations = AUDIO_BUFFERS[device.platform] * max(sizes)
    if known and known.keeps_activations:
        activations = sum(sizes) if tiles.number == 1 else activations  # in a loop it keeps weights alone
        read = (*weights(decoder), *weights(networks.vocoder))
        activations += sum(math.prod(weight.shape) * weight.dtype.itemsize for weight in read)
    return activations
