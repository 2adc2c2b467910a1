import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Video
from jax.sharding import Mesh

from ltx2_cli.models.video_vae import LatentStatistics, VideoVAE, VideoVAEArch, norm_silu
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.weights.declare import Scope, declared
from parity import adopt, published, randomise, relative_error

MIRRORED = {
    "latent_channels": 8,
    "block_out_channels": (16, 32, 64, 128),
    "decoder_block_out_channels": (16, 32, 64),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "decoder_causal": False,
}
PLAIN = {
    "latent_channels": 8,
    "block_out_channels": (16, 32, 64, 64),
    "decoder_block_out_channels": (16, 32, 32, 64),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "decoder_causal": False,
    "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
    "upsample_residual": (False, False, False, False),
    "upsample_factor": (2, 2, 1, 2),
    "decoder_spatial_padding_mode": "zeros",
}
# no list reads the same from behind, and encoder and decoder swap what they do at the borders
UNLIKE = {
    "in_channels": 4,
    "out_channels": 2,
    "latent_channels": 6,
    "patch_size": 2,
    "block_out_channels": (12, 24, 32),
    "layers_per_block": (1, 0, 0, 2),
    "downsample_type": ("temporal", "spatiotemporal", "spatial"),
    "encoder_spatial_padding_mode": "reflect",
    "decoder_block_out_channels": (6, 24, 24, 48),
    "decoder_layers_per_block": (1, 0, 0, 1, 0),
    "upsample_type": ("spatial", "temporal", "spatiotemporal", "spatial"),
    "upsample_residual": (False, True, False, True),
    "upsample_factor": (1, 4, 1, 2),
    "decoder_causal": True,
    "decoder_spatial_padding_mode": "zeros",
}
IMAGE = (1, 1, 2, 2)  # latents: batch, frames, height, width
CLIP = (2, 3, 2, 5)

encode = jax.jit(VideoVAE.encode)
decode = jax.jit(VideoVAE.decode)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def channels_first(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def video_of(shape: tuple[int, ...], arch: VideoVAEArch) -> np.ndarray:
    """A random video that the encoder turns into latents of `shape`."""
    batch, frames, height, width = shape
    time = 2 ** sum(kind != "spatial" for kind in arch.downsample_type)
    side = 2 ** sum(kind != "temporal" for kind in arch.downsample_type) * arch.patch_size
    return normal(batch, time * (frames - 1) + 1, side * height, side * width, arch.in_channels)


def along_channels(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(-1, 1, 1, 1)


@pytest.fixture(scope="module", params=[MIRRORED, PLAIN, UNLIKE], ids=["mirrored", "plain", "unlike"])
def pair(request: pytest.FixtureRequest) -> tuple[AutoencoderKLLTX2Video, VideoVAE, VideoVAEArch]:
    stages = len(request.param["upsample_type"]) if "upsample_type" in request.param else 3
    reference = AutoencoderKLLTX2Video(
        **request.param,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
        decoder_spatio_temporal_scaling=(True,) * stages,
        decoder_inject_noise=(False,) * (stages + 1),
    )
    reference, arch = randomise(reference, seed=1), VideoVAEArch(**request.param)
    return reference, adopt(VideoVAE(Scope(jnp.float32), arch), reference.state_dict()), arch


@pytest.mark.parametrize("shape", [IMAGE, CLIP], ids=["image", "clip"])
def test_decoded_pixels_equal_the_reference(pair, shape):
    reference, ours, arch = pair
    latents = normal(*shape, arch.latent_channels)
    mean, std = along_channels(reference.latents_mean), along_channels(reference.latents_std)
    with torch.no_grad():
        wanted = reference.decode(channels_first(latents) * std + mean).sample
    assert relative_error(np.moveaxis(decode(ours, latents), -1, 1), wanted) < 1e-5


@pytest.mark.parametrize("shape", [IMAGE, CLIP], ids=["image", "clip"])
def test_encoded_latents_equal_the_mean_of_the_reference(pair, shape):
    reference, ours, arch = pair
    video = video_of(shape, arch)
    mean, std = along_channels(reference.latents_mean), along_channels(reference.latents_std)
    with torch.no_grad():
        wanted = (reference.encode(channels_first(video)).latent_dist.mean - mean) / std
    assert wanted.shape == (shape[0], arch.latent_channels, *shape[1:])
    assert relative_error(np.moveaxis(encode(ours, video), -1, 1), wanted) < 1e-5


@pytest.mark.parametrize("pair", [MIRRORED], ids=["mirrored"], indirect=True)
def test_bfloat16_is_near_float32(pair):
    _, ours, arch = pair
    half = jax.tree.map(lambda like, weight: weight.astype(like.dtype), VideoVAE(Scope(jnp.bfloat16), arch), ours)
    latents = normal(*IMAGE, arch.latent_channels)
    for run, x, dtype in ((decode, latents, jnp.bfloat16), (encode, video_of(IMAGE, arch), jnp.float32)):
        got, wanted = run(half, x), run(ours, x)
        assert got.dtype == dtype
        assert np.linalg.norm(got.astype(np.float32) - wanted) < 0.03 * np.linalg.norm(wanted)


def test_more_blocks_compile_no_more_convolutions():
    two = ShardingPlan(Mesh(np.array(jax.devices()[:2]), ("device",)), (), ())

    def compiled(*counts: int) -> int:
        arch = VideoVAEArch(**MIRRORED | {"decoder_layers_per_block": counts})
        with activate(two):
            lowered = jax.jit(lambda vae, latents: vae.decode(latents)).lower(
                VideoVAE(Scope(jnp.float32), arch), jax.ShapeDtypeStruct((1, 3, 2, 5, 8), jnp.float32)
            )
        return lowered.as_text().count("stablehlo.convolution")

    assert compiled(5, 4, 3, 2) == compiled(1, 1, 1, 1) == 2 + 3 + 2 * 4  # at the ends, upsampling, a block a stage


def test_weak_activations_are_normalised_as_in_the_reference(pair):
    reference, _, _ = pair
    x = normal(8, 16) * 10.0 ** -np.arange(8, dtype=np.float32)[:, None]
    wanted = torch.nn.functional.silu(reference.decoder.norm_out(torch.from_numpy(x)))
    np.testing.assert_allclose(norm_silu(jnp.asarray(x)), wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_norm_of_small_and_large_values_is_finite(dtype):
    assert not norm_silu(jnp.zeros((1, 4), dtype)).any()
    silu_of_one = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(norm_silu(jnp.full((1, 4), 3e4, dtype)).astype(np.float32), silu_of_one, rtol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_statistics_are_float32_in_every_run(dtype):
    statistics = LatentStatistics(Scope(dtype), 2)
    assert {weight.dtype for weight in (statistics.mean, statistics.std)} == {jnp.dtype(jnp.float32)}
    statistics.mean, statistics.std = (
        weight.with_value(jnp.asarray(values))
        for weight, values in ((statistics.mean, [1.0, -2.0]), (statistics.std, [1e-9, 4.0]))
    )
    latents = jnp.asarray([[1.0, -10.0]], dtype)
    normalised, denormalised = statistics.normalise(latents), statistics.denormalise(latents)
    assert normalised.dtype == denormalised.dtype == jnp.float32
    np.testing.assert_array_equal(normalised, [[0.0, -2.0]])
    np.testing.assert_array_equal(denormalised, [[1.0, -42.0]])


LTX2_3 = VideoVAEArch(
    block_out_channels=(256, 512, 1024, 1024),
    layers_per_block=(4, 6, 4, 2, 2),
    decoder_block_out_channels=(256, 512, 512, 1024),
    decoder_layers_per_block=(4, 6, 4, 2, 2),
    upsample_type=("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
    upsample_residual=(False,) * 4,
    upsample_factor=(2, 2, 1, 2),
    decoder_causal=False,
    decoder_spatial_padding_mode="zeros",
)


@pytest.mark.parametrize(("model", "arch"), [("ltx2", VideoVAEArch(decoder_causal=False)), ("ltx2.3", LTX2_3)])
def test_names_and_shapes_equal_the_published_ones(model, arch):
    assert not list(arch.conflicts())
    assert declared(VideoVAE(Scope(jnp.bfloat16), arch)) == published(f"{model}/vae.tsv")
