"""Audio decoded in tiles is the waveform of the whole, and no more is read for it than it is made from."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from devices import tpus
from ltx2_cli.core.decode_audio_tiles import decode_audio, join_audio
from ltx2_cli.models.audio_vae import AudioVAE, AudioVAEArch
from ltx2_cli.models.vocoder import VocoderArch, VocoderWithBWEArch, build_vocoder
from ltx2_cli.plan.audio_tiles import AudioTiles, plan_audio, tile_audio
from ltx2_cli.plan.axis_tiling import tile_axis
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.weights.declare import Scope
from tools.weights import random_weights

SMALL = {"in_channels": 32, "hidden_channels": 32}  # with the published factors and kernels
PUBLISHED = {
    "2.0": VocoderArch(**SMALL),
    "2.3": VocoderWithBWEArch(**SMALL | {"hidden_channels": 64}, bwe_hidden_channels=32),
}
OTHER = VocoderWithBWEArch(  # hops of four thirds of an instant
    in_channels=32,
    hidden_channels=12,
    upsample_kernel_sizes=(7,),
    upsample_factors=(3,),
    resnet_kernel_sizes=(5,),
    resnet_dilations=((2, 4),),
    bwe_in_channels=10,
    bwe_hidden_channels=20,
    bwe_upsample_kernel_sizes=(8, 6),
    bwe_upsample_factors=(4, 2),
    bwe_resnet_kernel_sizes=(3, 5),
    bwe_resnet_dilations=((1,), (3,)),
    filter_length=12,
    window_length=13,
    hop_length=4,
    num_mel_channels=5,
    input_sampling_rate=8000,
    output_sampling_rate=16000,
)


@partial(jax.jit, static_argnames="tiles")
def decode(audio_vae: AudioVAE, vocoder: Any, latents: np.ndarray, tiles: AudioTiles) -> jax.Array:
    """All parts one after another, as many devices make them side by side."""
    numbers = jnp.arange(tiles.number_of_parts)
    parts = jax.lax.map(lambda part: decode_audio(audio_vae, vocoder, latents, tiles, part), numbers)
    return join_audio(jnp.moveaxis(parts, 0, 1), tiles)


def audio_networks(vocoder: VocoderArch) -> tuple[Any, tuple[AudioVAE, Any]]:
    """The architecture and random networks."""
    arch = SimpleNamespace(audio_vae=AudioVAEArch(base_channels=8, mel_bins=16), vocoder=vocoder)
    scope = Scope(jnp.float32)
    networks = AudioVAE(scope, arch.audio_vae), build_vocoder(scope, vocoder)
    return arch, (random_weights(networks[0], seed=0), random_weights(networks[1], seed=1))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("vocoder", PUBLISHED.values(), ids=PUBLISHED)
def test_a_tile_reads_what_its_samples_are_made_from(vocoder: VocoderArch) -> None:
    """A latent that is not a number shows by which samples it is heard."""
    arch, networks = audio_networks(vocoder)
    latents, place = normal(1, 80, arch.audio_vae.features), 20
    latents[:, place] = np.nan
    tiles = tile_audio(arch, 1000, 5)
    (heard,) = np.nonzero(np.isnan(decode(*networks, latents, tiles=tile_audio(arch, 80, 1))[0, :, 0]))
    first, last = ((sample - tiles.samples * place) / tiles.samples for sample in (heard[0], heard[-1]))
    before, after = (tiles.axis.write_starts[2] - tiles.axis.read_starts[2]), math.ceil(vocoder.reach / 4)
    assert tiles.axis.read_size == tiles.axis.write_size + before + after
    assert 0.6 * after < -first <= after
    assert 0.6 * before < last <= before


@pytest.mark.parametrize(("count", "parts"), [(3, 1), (1, 8), (3, 4)])
@pytest.mark.parametrize("vocoder", [PUBLISHED["2.0"], OTHER], ids=["2.0", "other"])
def test_tiles_and_parts_make_the_waveform_of_the_whole(vocoder: VocoderArch, count: int, parts: int) -> None:
    arch, networks = audio_networks(vocoder)
    latents, tiles = normal(2, 190, arch.audio_vae.features), tile_audio(arch, 190, count, parts)
    assert (tiles.number, tiles.number_of_parts) == (count, parts)
    assert tiles.parts.read_size < (140 if parts == 1 else 60)
    whole = np.asarray(decode(*networks, latents, tiles=tile_audio(arch, 190, 1)))
    np.testing.assert_allclose(decode(*networks, latents, tiles=tiles), whole, rtol=0, atol=1e-5 * whole.std())
    axis, parts_axis = tile_axis(190, 3, 1, 1, after=0), tile_axis(tiles.axis.read_size, parts, 0, 1)
    cut = tiles._replace(axis=axis) if parts == 1 else tiles._replace(parts=parts_axis)
    assert np.abs(decode(*networks, latents, tiles=cut) - whole).max() > 1e-4 * whole.std()


def test_audio_that_each_part_would_read_is_whole() -> None:
    arch, _ = audio_networks(PUBLISHED["2.3"])
    shares = {latents: tile_audio(arch, latents, 1, 8) for latents in (1, 8, 30, 36, 126, 501)}
    assert [tiles.parts.read_size for tiles in shares.values()] == [1, 8, 30, 36, 49, 96]
    assert [tiles.number_of_parts for tiles in shares.values()] == [1, 1, 1, 1, 8, 8]


def planned(**keys: object) -> Plan:
    return plan_offline(read_spec({"model": "ltx2.3", "prompt": "a fox", **keys}), tpus("TPU v6 lite", 8))


def test_a_long_clip_is_decoded_in_the_memory_of_its_windows() -> None:
    short, long = planned(num_frames=241).decoding, planned(num_frames=1441, windows=6).decoding
    assert (short.audio_tiles.number, long.audio_tiles.number) == (1, 6)
    assert (short.audio_tiles.number_of_parts, short.at_once) == (8, True)
    assert long.audio_bytes < 1.3 * short.audio_bytes
    frames = 3 * 1441 * 512 * 768 / 8  # of a device
    assert long.video_bytes < 1.1 * short.video_bytes + frames
    assert planned(num_frames=1441, windows=6, vae_memory_gb=1000).decoding.tiles is None


def test_audio_takes_the_fewest_tiles_that_fit() -> None:
    plan = planned(num_frames=481, sharding="single")
    arch, latents, device = plan.arch, plan.stages[-1].geometry.audio_frames, plan.sharding.mesh.devices.flat[0]

    def tiles(room: float, arch: Any = arch, latents: int = latents) -> int:
        chosen = plan_audio(arch, plan.networks, latents, 1, device, room, 1)
        assert chosen.bytes <= room or room == 1
        return chosen.tiles.number

    whole = plan.decoding.audio_bytes
    assert (tiles(whole), tiles(0.99 * whole), tiles(1)) == (1, 2, 2)  # of 10 s or more
    assert tiles(0.7 * whole, latents=2 * latents) == 4
    unlike = replace(arch.vocoder, hop_length=96)  # hops begin anew with every third instant: nowhere between latents
    assert tiles(1, arch=replace(arch, vocoder=unlike)) == 1
