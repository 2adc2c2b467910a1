import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Video

from ltx2_cli.models.arch import VideoVAEArch
from ltx2_cli.models.video_vae import LatentStatistics, VideoVAE, activate
from ltx2_cli.weights.declare import Scope, declared, map_weights
from parity import adopt, published, randomise, relative_error

COMPRESSION = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
CONFIGS = {
    "residual, mirrored": {
        "latent_channels": 8,
        "block_out_channels": (16, 32, 64, 128),
        "decoder_block_out_channels": (16, 32, 64),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1),
        "decoder_causal": False,
    },
    "plain, zeros": {
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
    },
    "every list its own order": {
        "in_channels": 4,
        "out_channels": 2,
        "latent_channels": 6,
        "patch_size": 2,
        "block_out_channels": (12, 24, 32),
        "layers_per_block": (2, 1, 0, 3),
        "downsample_type": ("temporal", "spatiotemporal", "spatial"),
        "encoder_causal": False,
        "encoder_spatial_padding_mode": "reflect",
        "decoder_block_out_channels": (6, 24, 24, 48),
        "decoder_layers_per_block": (2, 0, 1, 3, 1),
        "upsample_type": ("spatial", "temporal", "spatiotemporal", "spatial"),
        "upsample_residual": (False, True, False, True),
        "upsample_factor": (1, 4, 1, 2),
        "decoder_causal": True,
        "decoder_spatial_padding_mode": "zeros",
    },
}
LATENTS = {"one frame, two cells": (1, 1, 2, 2), "a batch of odd sizes": (2, 3, 2, 5)}  # batch, frames, height, width

encode = jax.jit(lambda vae, video: vae.encoder(video))
decode = jax.jit(lambda vae, latents: vae.decoder(latents))


def torch_order(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def scales(arch: VideoVAEArch) -> tuple[int, int]:
    """How many frames and how many pixels a side one latent of the encoder spans."""
    kinds = arch.downsample_type
    return 2 ** sum(kind != "spatial" for kind in kinds), arch.patch_size * 2 ** sum(
        kind != "temporal" for kind in kinds
    )


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS.keys())
def pair(request: pytest.FixtureRequest) -> tuple[AutoencoderKLLTX2Video, VideoVAE, VideoVAEArch]:
    stages = len(request.param["decoder_layers_per_block"]) - 1
    reference = AutoencoderKLLTX2Video(
        **request.param,
        **COMPRESSION,
        decoder_spatio_temporal_scaling=(True,) * stages,
        decoder_inject_noise=(False,) * (stages + 1),
    )
    arch = VideoVAEArch(**request.param)
    reference = randomise(reference, seed=1)
    return reference, adopt(VideoVAE(Scope(jnp.float32), arch), reference.state_dict()), arch


@pytest.mark.parametrize("shape", LATENTS.values(), ids=LATENTS.keys())
def test_the_decoder_equals_the_reference(pair, shape):
    reference, ours, arch = pair
    latents = normal(*shape, arch.latent_channels)
    with torch.no_grad():
        wanted = reference.decode(torch_order(latents)).sample
    assert relative_error(np.moveaxis(decode(ours, latents), -1, 1), wanted) < 1e-5


@pytest.mark.parametrize("shape", LATENTS.values(), ids=LATENTS.keys())
def test_the_encoder_equals_the_mean_of_the_reference(pair, shape):
    reference, ours, arch = pair
    batch, frames, height, width = shape
    time, side = scales(arch)
    video = normal(batch, time * (frames - 1) + 1, side * height, side * width, arch.in_channels)
    with torch.no_grad():
        wanted = reference.encode(torch_order(video)).latent_dist.mean
    assert relative_error(np.moveaxis(encode(ours, video), -1, 1), wanted) < 1e-5


def test_bfloat16_is_finite_and_near_float32(pair):
    _, ours, arch = pair
    half = map_weights(lambda weight: weight.with_value(weight.get_value().astype(jnp.bfloat16)), ours)
    latents = normal(*LATENTS["one frame, two cells"], arch.latent_channels)
    video = normal(1, 1, *2 * (2 * scales(arch)[1],), arch.in_channels)
    for run, x in ((decode, latents), (encode, video)):
        got, wanted = run(half, x), run(ours, x)
        assert got.dtype == jnp.bfloat16
        assert np.linalg.norm(got.astype(np.float32) - wanted) < 0.03 * np.linalg.norm(wanted)


def test_decode_and_encode_speak_of_normalised_latents(pair):
    reference, ours, arch = pair
    latents = normal(*LATENTS["one frame, two cells"], arch.latent_channels)
    mean, std = (buffer.numpy() for buffer in (reference.latents_mean, reference.latents_std))
    wanted = decode(ours, latents * std + mean)
    np.testing.assert_allclose(
        jax.jit(lambda vae, x: vae.decode(x))(ours, latents), wanted, rtol=0, atol=1e-4 * np.abs(wanted).max()
    )
    video = normal(1, 1, *2 * (2 * scales(arch)[1],), arch.in_channels)
    wanted = (encode(ours, video) - mean) / std
    np.testing.assert_allclose(
        jax.jit(lambda vae, x: vae.encode(x))(ours, video), wanted, rtol=0, atol=1e-4 * np.abs(wanted).max()
    )


def test_weak_activations_are_normed_as_in_the_reference(pair):
    reference, _, _ = pair
    x = normal(8, 16) * 10.0 ** -np.arange(8, dtype=np.float32)[:, None]
    wanted = torch.nn.functional.silu(reference.decoder.norm_out(torch.from_numpy(x)))
    np.testing.assert_allclose(activate(x), wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_norm_of_a_dark_or_a_glaring_place_is_finite(dtype):
    assert not activate(jnp.zeros((1, 4), dtype)).any()
    silu_of_one = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(activate(jnp.full((1, 4), 3e4, dtype)).astype(np.float32), silu_of_one, rtol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_statistics_are_float32_in_every_run(dtype):
    statistics = LatentStatistics(Scope(dtype), 2)
    values = iter(([1.0, -2.0], [1e-6, 4.0]))
    assert {weight.dtype for weight in (statistics.mean, statistics.std)} == {jnp.dtype(jnp.float32)}
    statistics = map_weights(lambda weight: weight.with_value(jnp.asarray(next(values))), statistics)
    latents = jnp.asarray([[1.0, -10.0]], dtype)
    normalised = statistics.normalise(latents)
    assert normalised.dtype == statistics.denormalise(latents).dtype == jnp.float32
    np.testing.assert_allclose(normalised, [[0.0, -2.0]])
    np.testing.assert_allclose(statistics.denormalise(latents), [[1.000001, -42.0]], rtol=1e-7)


def test_names_and_shapes_are_the_published_ones():
    arch = VideoVAEArch(decoder_causal=False)
    assert declared(VideoVAE(Scope(jnp.bfloat16), arch)) == published("ltx2/vae.tsv")
