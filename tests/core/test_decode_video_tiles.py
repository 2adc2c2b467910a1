"""Decoding in tiles and in few frames after another gives the frames of the whole clip, and takes the memory that was
foreseen."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compilers import needs_cuda
from devices import cpu, tpus
from ltx2_cli.core.decode_video_tiles import decode_tiled
from ltx2_cli.estimate.offline import topology
from ltx2_cli.models.video_vae import VideoVAE, VideoVAEArch
from ltx2_cli.plan import video_tiles as module
from ltx2_cli.plan.axis_tiling import AxisTiling, tile_axis
from ltx2_cli.plan.video_tiles import Tiles, tile_images, video_decode_bytes
from ltx2_cli.weights.declare import Scope
from tools.weights import random_weights

SHAPES = {
    "latent_channels": 8,
    "block_out_channels": (8, 16, 32),
    "decoder_block_out_channels": (8, 16, 32),
    "layers_per_block": (1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "downsample_type": ("spatiotemporal", "temporal", "spatial"),
    "upsample_type": ("spatial", "temporal", "spatiotemporal"),
    "patch_size": 2,
}
BORDERS = {
    "mirrored": {"decoder_causal": False, "decoder_spatial_padding_mode": "reflect"},
    "plain": {"decoder_causal": False, "decoder_spatial_padding_mode": "zeros", "upsample_residual": (False,) * 3},
    "causal": {"decoder_causal": True, "decoder_spatial_padding_mode": "zeros"},
}
TILES = [  # the cut is before the first upsampling, the second or the last
    Tiles(1, (1, 7)),
    Tiles(3, (1, 2)),
    Tiles(5, (2, 3)),
    Tiles(1, (1, 1), 1),
    Tiles(1, (1, 1), 4),
    Tiles(3, (1, 2), 3),
    Tiles(5, (2, 1), 8),
    Tiles(5, (1, 1), 40),
]
LATENTS = (1, 25, 9, 14, 8)

decode = jax.jit(decode_tiled, static_argnames="tiles")


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module", params=BORDERS)
def vae(request: pytest.FixtureRequest) -> VideoVAE:
    return random_weights(VideoVAE(Scope(jnp.float32), VideoVAEArch(**SHAPES, **BORDERS[request.param])), seed=0)


@pytest.fixture(scope="module")
def whole(vae: VideoVAE) -> np.ndarray:
    levels, finite = decode(vae, normal(*LATENTS), None)
    assert finite
    assert levels.shape == (1, 97, 72, 112 * 3)
    return np.asarray(levels).astype(int)


def test_frames_are_pixels_in_256_levels() -> None:
    vae = random_weights(VideoVAE(Scope(jnp.float32), VideoVAEArch(**SHAPES, **BORDERS["mirrored"])), seed=0)
    latents = normal(1, 3, 4, 5, 8)
    levels, finite = decode(vae, latents, None)
    assert finite
    pixels = np.asarray(jax.jit(VideoVAE.decode)(vae, latents))
    np.testing.assert_allclose(levels, (pixels.clip(-1, 1) * 127.5 + 127.5).reshape(levels.shape), rtol=0, atol=0.51)


@pytest.mark.parametrize(
    ("vae", "tiles"),
    [
        *(("mirrored", each) for each in TILES),
        *(("plain", each) for each in TILES[::2]),
        *(("causal", each) for each in TILES[1::2]),
    ],
    indirect=["vae"],
    ids=repr,
)
def test_tiled_frames_equal_those_decoded_at_once(vae: VideoVAE, whole: np.ndarray, tiles: Tiles) -> None:
    (_, *sides), _ = module.activations(vae.decoder, LATENTS[1:4])[tiles.cut]
    seen = [axis.read_size for axis in tile_images(vae.decoder, tiles, *sides)]
    assert all(some < side for some, side, count in zip(seen, sides, tiles.counts, strict=True) if count > 1)
    levels, finite = decode(vae, normal(*LATENTS), tiles)
    assert finite
    assert np.abs(levels - whole).max() <= 1  # a level of 255 may round the other way


@pytest.mark.parametrize("frames", [2, 3])
def test_short_clips_come_whole(vae: VideoVAE, frames: int) -> None:
    """Shorter than what the layers look ahead."""
    latents = normal(1, frames, 4, 5, 8)
    np.testing.assert_allclose(*(decode(vae, latents, tiles)[0].astype(int) for tiles in (None, TILES[3])), atol=1)


def test_too_small_receptive_fields_are_noticed(
    vae: VideoVAE, whole: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = module.receptive_field(vae.decoder, 3)
    monkeypatch.setattr(module, "receptive_field", lambda decoder, cut: side - 2)
    levels, _ = jax.jit(partial(decode_tiled, tiles=Tiles(3, (1, 3))))(vae, normal(*LATENTS))
    assert np.abs(levels - whole).max() > 1


@pytest.mark.parametrize("tiles", [Tiles(5, (2, 3)), Tiles(3, (1, 2), 3)], ids=repr)
@pytest.mark.parametrize("place", [(24, 8, 13), (0, 0, 0)])
def test_values_that_are_not_finite_in_one_tile_are_reported(
    vae: VideoVAE, tiles: Tiles, place: tuple[int, int, int]
) -> None:
    latents = normal(*LATENTS)
    latents[0][place] = np.nan
    assert not decode(vae, latents, tiles)[1]


def test_tiles_cover_an_axis() -> None:
    # 0 1 2 3 | 4 5 6 7 | 6 7 8 9, and two places more on either side that has them
    assert tile_axis(10, 3, halo=2, shared=0) == AxisTiling(8, (0, 2, 2), 4, (0, 4, 6))
    assert tile_axis(9, 2, halo=1, shared=1) == AxisTiling(7, (0, 2), 5, (0, 4))  # both keep place 4
    assert tile_axis(5, 1, halo=3, shared=1) == AxisTiling(5, (0,), 5, (0,))


def small_vae() -> VideoVAE:
    arch = VideoVAEArch(**SHAPES | {"decoder_block_out_channels": (32, 64, 128)}, decoder_causal=False)
    return VideoVAE(Scope(jnp.float32), arch)


@pytest.mark.parametrize("tiles", [None, Tiles(5, (3, 4)), Tiles(3, (1, 1), 1), Tiles(5, (1, 1), 2)], ids=repr)
def test_estimated_memory_is_near_the_compiled_one(tiles: Tiles | None) -> None:
    vae = small_vae()
    latents = jax.ShapeDtypeStruct((1, 9, 24, 32, 8), jnp.float32)
    taken = decode.lower(vae, latents, tiles).compile().memory_analysis()
    foreseen = video_decode_bytes(vae.decoder, latents.shape[1:4], tiles, *cpu())
    assert 0.4 < (taken.temp_size_in_bytes + taken.output_size_in_bytes) / foreseen < 1.1
    assert tiles is None or foreseen < video_decode_bytes(vae.decoder, latents.shape[1:4], None, *cpu()) / 2


@needs_cuda
def test_a_gpu_holds_fewer_activations_of_the_whole_decoder() -> None:
    vae, (gpu,) = small_vae(), topology("h100")
    held = jax.sharding.SingleDeviceSharding(gpu)
    size = (9, 24, 32)
    latents = jax.ShapeDtypeStruct((1, *size, 8), jnp.float32, sharding=held)
    taken = decode.lower(vae, latents, None).compile().memory_analysis()
    foreseen = video_decode_bytes(vae.decoder, size, None, gpu)
    assert 0.6 < (taken.temp_size_in_bytes + taken.output_size_in_bytes) / foreseen < 1
    assert foreseen < 0.8 * video_decode_bytes(vae.decoder, size, None, *tpus("TPU v6 lite", 1))
