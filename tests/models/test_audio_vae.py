import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Audio

from ltx2_cli.models.arch import AudioVAEArch
from ltx2_cli.models.audio_vae import AudioVAE, activate, pack, unpack
from ltx2_cli.weights.declare import Scope, declared, map_weights
from parity import adopt, published, randomise, relative_error

# the reference has as many statistics as base channels, so each config has base_channels = latent_channels · mels
CONFIGS = {
    "as published, small": {"base_channels": 16, "latent_channels": 4, "mel_bins": 16},
    "other numbers": {
        "base_channels": 18,
        "ch_mult": (2, 1, 3),
        "num_res_blocks": 1,
        "latent_channels": 3,
        "mel_bins": 24,
        "in_channels": 1,
        "output_channels": 3,
    },
}
INSTANTS = [1, 6]

encode = jax.jit(lambda vae, mel: vae.encoder(mel))
decode = jax.jit(lambda vae, latents: vae.decoder(latents))


def torch_order(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS.keys())
def pair(request: pytest.FixtureRequest) -> tuple[AutoencoderKLLTX2Audio, AudioVAE, AudioVAEArch]:
    reference = randomise(AutoencoderKLLTX2Audio(**request.param), seed=2)
    arch = AudioVAEArch(**request.param)
    return reference, adopt(AudioVAE(Scope(jnp.float32), arch), reference.state_dict()), arch


@pytest.mark.parametrize("instants", INSTANTS)
def test_the_decoder_equals_the_reference(pair, instants):
    reference, ours, arch = pair
    latents = normal(2, instants, arch.mel_bins // 4, arch.latent_channels)
    with torch.no_grad():
        wanted = reference.decode(torch_order(latents)).sample
    assert wanted.shape == (2, arch.output_channels, 4 * instants - 3, arch.mel_bins)
    assert relative_error(np.moveaxis(decode(ours, latents), -1, 1), wanted) < 1e-5


@pytest.mark.parametrize("instants", INSTANTS)
def test_the_encoder_equals_the_mean_of_the_reference(pair, instants):
    reference, ours, arch = pair
    mel = normal(2, 4 * instants - 3, arch.mel_bins, arch.in_channels)
    with torch.no_grad():
        wanted = reference.encode(torch_order(mel)).latent_dist.mean
    assert relative_error(np.moveaxis(encode(ours, mel), -1, 1), wanted) < 1e-5


def test_tokens_and_their_statistics_are_those_of_the_reference(pair):
    reference, ours, arch = pair
    latents = normal(2, 6, arch.mel_bins // 4, arch.latent_channels)
    packed = reference.decoder.patchifier.patchify(torch_order(latents))
    np.testing.assert_array_equal(pack(latents), packed)
    np.testing.assert_array_equal(unpack(pack(latents), arch.latent_channels), latents)

    tokens = normal(2, 6, arch.latent_channels * arch.mel_bins // 4)
    denormalised = torch.from_numpy(tokens) * reference.latents_std + reference.latents_mean
    mels = arch.mel_bins // 4
    with torch.no_grad():
        wanted = reference.decode(reference.decoder.patchifier.unpatchify(denormalised, arch.latent_channels, mels))
    assert relative_error(np.moveaxis(jax.jit(AudioVAE.decode)(ours, tokens), -1, 1), wanted.sample) < 1e-5


def test_encode_is_normalised_tokens(pair):
    reference, ours, arch = pair
    mel = normal(2, 21, arch.mel_bins, arch.in_channels)
    with torch.no_grad():
        mean = reference.encode(torch_order(mel)).latent_dist.mean
    packed = reference.decoder.patchifier.patchify(mean)
    wanted = (packed - reference.latents_mean) / reference.latents_std
    assert relative_error(jax.jit(AudioVAE.encode)(ours, mel), wanted) < 1e-5


def test_bfloat16_is_finite_and_near_float32(pair):
    _, ours, arch = pair
    half = map_weights(lambda weight: weight.with_value(weight.get_value().astype(jnp.bfloat16)), ours)
    latents = normal(2, 6, arch.mel_bins // 4, arch.latent_channels)
    mel = normal(2, 21, arch.mel_bins, arch.in_channels)
    for run, x in ((decode, latents), (encode, mel)):
        got, wanted = run(half, x), run(ours, x)
        assert got.dtype == jnp.bfloat16
        assert np.linalg.norm(got.astype(np.float32) - wanted) < 0.03 * np.linalg.norm(wanted)


def test_weak_activations_are_normed_as_in_the_reference(pair):
    reference, _, _ = pair
    x = normal(8, 16) * 10.0 ** -np.arange(8, dtype=np.float32)[:, None]
    wanted = torch.nn.functional.silu(reference.decoder.norm_out(torch.from_numpy(x)))
    np.testing.assert_allclose(activate(x), wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_norm_of_silence_and_of_a_burst_is_finite(dtype):
    assert not activate(jnp.zeros((1, 4), dtype)).any()
    silu_of_one = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(activate(jnp.full((1, 4), 3e4, dtype)).astype(np.float32), silu_of_one, rtol=1e-2)


def test_names_and_shapes_are_the_published_ones():
    assert declared(AudioVAE(Scope(jnp.bfloat16), AudioVAEArch())) == published("ltx2/audio_vae.tsv")
