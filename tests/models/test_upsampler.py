import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Video
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplePipeline
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

from ltx2_cli.diffusion.geometry import UpsampleFactors
from ltx2_cli.models.upsampler import GroupNorm, LatentUpsampler, LatentUpsamplerArch, decimate, upsample_latents
from ltx2_cli.models.video_vae import LatentStatistics
from ltx2_cli.weights.declare import Scope
from parity import adopt, randomise, relative_error
from upsamplers import KINDS

# sizes, and latents: batch, frames, height, width
NARROW = ({"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1}, (1, 3, 4, 6))
WIDE = ({"in_channels": 6, "mid_channels": 64, "num_blocks_per_stage": 2}, (2, 2, 3, 5))
IMAGE = ({"in_channels": 4, "mid_channels": 96, "num_blocks_per_stage": 1}, (1, 1, 1, 2))
VAE = {
    "block_out_channels": (16, 32, 64, 128),
    "decoder_block_out_channels": (16, 32, 64),
    "layers_per_block": (1,) * 5,
    "decoder_layers_per_block": (1,) * 4,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}

run = jax.jit(lambda upsampler, latents: upsampler(latents))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def channels_first(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def pair(config: dict[str, object]) -> tuple[LTX2LatentUpsamplerModel, LatentUpsampler]:
    reference = randomise(LTX2LatentUpsamplerModel(**config), seed=1)
    arch = LatentUpsamplerArch(**config)
    assert not list(arch.conflicts())
    return reference, adopt(LatentUpsampler(Scope(jnp.float32), arch), reference.state_dict())


@pytest.mark.parametrize(("sizes", "shape"), [NARROW, WIDE, IMAGE], ids=["narrow", "wide", "image"])
@pytest.mark.parametrize("kind", KINDS)
def test_upsampled_latents_equal_the_reference(kind, sizes, shape):
    reference, ours = pair(sizes | KINDS[kind])
    latents = normal(*shape, sizes["in_channels"])
    with torch.no_grad():
        wanted = reference(channels_first(latents))
    got = run(ours, latents)
    assert relative_error(np.moveaxis(got, -1, 1), wanted) < 1e-5
    by = LatentUpsamplerArch(**sizes, **KINDS[kind]).upsampling
    assert got.shape[1:4] == by.upsampled(*shape[1:4])


def test_normalised_latents_are_upsampled_as_in_the_reference_pipeline():
    sizes, shape = NARROW
    reference, ours = pair(sizes | KINDS["rational x1.5"])
    vae = AutoencoderKLLTX2Video(**VAE, latent_channels=8)
    vae.latents_mean.copy_(torch.linspace(-1, 2, 8))
    vae.latents_std.copy_(torch.linspace(0.5, 3, 8))
    mean, std = (np.array(each) for each in (vae.latents_mean, vae.latents_std))
    statistics = adopt(
        LatentStatistics(Scope(jnp.bfloat16), 8), {"latents_mean": vae.latents_mean, "latents_std": vae.latents_std}
    )
    latents = normal(*shape, 8)
    pipeline = LTX2LatentUpsamplePipeline(vae=vae, latent_upsampler=reference)
    (wanted,) = pipeline(
        latents=channels_first(latents),
        latents_normalized=True,
        height=128,
        width=192,
        output_type="latent",
        return_dict=False,
    )
    got = jax.jit(upsample_latents)(ours, statistics, latents)
    assert got.dtype == jnp.float32
    assert relative_error(np.moveaxis(got * std + mean, -1, 1), wanted) < 1e-5


def test_weak_latents_are_normalised_as_in_the_reference():
    reference = randomise(torch.nn.GroupNorm(32, 64), seed=3)
    ours = adopt(GroupNorm(Scope(jnp.float32), 64), reference.state_dict())
    clips = normal(6, 2, 3, 2, 64) * 10.0 ** -np.arange(6, dtype=np.float32).reshape(6, 1, 1, 1, 1)
    for clip in (clips[i : i + 1] for i in range(6)):
        wanted = reference(channels_first(clip))
        assert relative_error(np.moveaxis(ours(jnp.asarray(clip)), -1, 1), wanted) < 1e-5


def test_bfloat16_is_near_float32():
    sizes, shape = WIDE
    _, ours = pair(sizes | KINDS["rational x1.5"])
    arch = LatentUpsamplerArch(**sizes, **KINDS["rational x1.5"])
    abstract = LatentUpsampler(Scope(jnp.bfloat16), arch)
    half = jax.tree.map(lambda like, weight: weight.astype(like.dtype), abstract, ours)
    latents = normal(*shape, sizes["in_channels"])
    got, wanted = run(half, latents), run(ours, latents)
    assert got.dtype == jnp.bfloat16
    assert np.linalg.norm(got.astype(np.float32) - wanted) < 0.03 * np.linalg.norm(wanted)


def test_downsampling_takes_every_second_position_of_the_kernel():
    image = np.arange(1.0, 6).reshape(1, 1, 1, 5, 1)
    kernel = np.zeros((3, 3))
    kernel[1] = [1, 10, 100]  # left, here, right
    assert decimate(jnp.asarray(image), jnp.asarray(kernel), 2).ravel().tolist() == [210, 432, 54]
    assert decimate(jnp.asarray(image), jnp.asarray(kernel), 3).ravel().tolist() == [210, 543]


@pytest.mark.parametrize(
    ("kind", "expected"),
    zip(KINDS, [(1, 2, 1), (1, 2, 1), (1, 3, 2), (2, 1, 1), (2, 2, 1)], strict=True),
)
def test_factors_of_each_kind(kind, expected):
    assert LatentUpsamplerArch(**KINDS[kind]).upsampling == UpsampleFactors(*expected)


@pytest.mark.parametrize(("kind", "expected"), zip(KINDS, ["ltx2", "ltx2.3", "ltx2.3", None, None], strict=True))
def test_the_model_version_of_each_layout(kind, expected):
    assert LatentUpsamplerArch(**KINDS[kind]).model_version == expected


@pytest.mark.parametrize(
    ("config", "conflict"),
    [
        ({"mid_channels": 48}, "mid_channels is 48, only multiples of 32 are"),
        ({"spatial_upsample": False}, "neither spatial_upsample nor temporal_upsample is true"),
        ({"rational_spatial_scale": 4.0}, "rational_spatial_scale is 4.0, only 1.5 and 2.0 are"),
    ],
)
def test_contradictory_values_are_refused(config, conflict):
    assert list(LatentUpsamplerArch(**config).conflicts()) == [conflict]


def test_an_unused_scale_is_no_conflict():
    for kind in ("plain x2", "temporal x2", "both x2"):
        assert not list(LatentUpsamplerArch(**KINDS[kind], rational_spatial_scale=4.0).conflicts())
