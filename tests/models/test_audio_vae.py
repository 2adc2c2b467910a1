import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Audio

from ltx2_cli.models.audio_vae import NORM_EPS, AudioVAE, AudioVAEArch, mel_to_tokens, tokens_to_mel
from ltx2_cli.models.video_vae import norm_silu
from ltx2_cli.weights.declare import Scope, declared
from parity import adopt, published, randomise, relative_error

# the reference has as many statistics as base channels, so base_channels is latent_channels · latent mels here
SMALL = {"base_channels": 16, "latent_channels": 4, "mel_bins": 16}
UNLIKE = {
    "base_channels": 18,
    "ch_mult": (2, 1, 3),
    "num_res_blocks": 1,
    "latent_channels": 3,
    "mel_bins": 24,
    "in_channels": 1,
    "output_channels": 3,
}

encode = jax.jit(AudioVAE.encode)
decode = jax.jit(AudioVAE.decode)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def channels_first(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


@pytest.fixture(scope="module", params=[SMALL, UNLIKE], ids=["small", "unlike"])
def pair(request: pytest.FixtureRequest) -> tuple[AutoencoderKLLTX2Audio, AudioVAE, AudioVAEArch]:
    reference, arch = randomise(AutoencoderKLLTX2Audio(**request.param), seed=2), AudioVAEArch(**request.param)
    return reference, adopt(AudioVAE(Scope(jnp.float32), arch), reference.state_dict()), arch


@pytest.mark.parametrize("instants", [1, 6])
def test_the_decoded_spectrogram_equals_the_reference(pair, instants):
    reference, ours, arch = pair
    mels = arch.mel_bins // 4
    tokens = normal(2, instants, arch.latent_channels * mels)
    denormalised = torch.from_numpy(tokens) * reference.latents_std + reference.latents_mean
    latents = reference.decoder.patchifier.unpatchify(denormalised, arch.latent_channels, mels)
    with torch.no_grad():
        wanted = reference.decode(latents).sample
    assert wanted.shape == (2, arch.output_channels, 4 * instants - 3, arch.mel_bins)
    assert relative_error(np.moveaxis(decode(ours, tokens), -1, 1), wanted) < 1e-5


@pytest.mark.parametrize("instants", [1, 6])
def test_encoded_tokens_equal_the_mean_of_the_reference(pair, instants):
    reference, ours, arch = pair
    mel = normal(2, 4 * instants - 3, arch.mel_bins, arch.in_channels)
    with torch.no_grad():
        mean = reference.encode(channels_first(mel)).latent_dist.mean
    wanted = (reference.decoder.patchifier.patchify(mean) - reference.latents_mean) / reference.latents_std
    assert relative_error(encode(ours, mel), wanted) < 1e-5


def test_unpacking_inverts_packing():
    latents = normal(2, 5, 4, 3)
    np.testing.assert_array_equal(tokens_to_mel(mel_to_tokens(latents), 3), latents)


@pytest.mark.parametrize("pair", [SMALL], ids=["small"], indirect=True)
def test_bfloat16_is_near_float32(pair):
    _, ours, arch = pair
    half = jax.tree.map(lambda like, weight: weight.astype(like.dtype), AudioVAE(Scope(jnp.bfloat16), arch), ours)
    tokens = normal(2, 6, arch.latent_channels * arch.mel_bins // 4)
    mel = normal(2, 21, arch.mel_bins, arch.in_channels)
    for run, x, dtype in ((decode, tokens, jnp.bfloat16), (encode, mel, jnp.float32)):
        got, wanted = run(half, x), run(ours, x)
        assert got.dtype == dtype
        assert np.linalg.norm(got.astype(np.float32) - wanted) < 0.03 * np.linalg.norm(wanted)


def test_weak_activations_are_normalised_as_in_the_reference(pair):
    reference, _, _ = pair
    x = normal(8, 16) * 10.0 ** -np.arange(8, dtype=np.float32)[:, None]
    wanted = torch.nn.functional.silu(reference.decoder.norm_out(torch.from_numpy(x)))
    np.testing.assert_allclose(norm_silu(jnp.asarray(x), NORM_EPS), wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_norm_of_silence_and_of_a_burst_is_finite(dtype):
    assert not norm_silu(jnp.zeros((1, 4), dtype), NORM_EPS).any()
    silu_of_one = 1 / (1 + np.exp(-1))
    got = norm_silu(jnp.full((1, 4), 3e4, dtype), NORM_EPS).astype(np.float32)
    np.testing.assert_allclose(got, silu_of_one, rtol=1e-2)


def test_names_and_shapes_equal_the_published_ones():
    assert declared(AudioVAE(Scope(jnp.bfloat16), AudioVAEArch())) == published("ltx2/audio_vae.tsv")
