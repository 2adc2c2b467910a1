"""The network of the diffusion decoder, beside diffusers'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from torch.nn.attention import flex_attention

from ltx2_cli.models import diffusion_decoder
from ltx2_cli.models.diffusion_decoder import DiffusionDecoder, DiffusionDecoderArch
from ltx2_cli.weights.declare import Scope, declared
from parity import adopt, randomise, relative_error

TINY = {
    "latent_channels": 6,
    "patch_size": 2,
    "decoder_head_dim": 16,
    "decoder_stage_channels": (64, 32, 32, 32, 16),
    "decoder_stage_depths": (1, 1, 1, 1, 2),
    "decoder_stage_kernels": ((3, 3, 5), (3, 5, 3), (3, 5, 5), (3, 3, 5)),
    "decoder_upsample_strides": ((1, 2, 2), (2, 1, 1), (2, 2, 1), (2, 1, 1)),
    "decoder_upsample_channel_reductions": (2, 1, 1, 2),
    "decoder_stage5_kernel": (11, 7, 5),
    "decoder_t_emb_dim": 24,
    "decoder_timestep_scale_multiplier": 900.0,
}

run = jax.jit(lambda decoder, latents, noise, steps: decoder(latents, noise, steps), static_argnums=3)


def channels_first(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def test_names_and_shapes_of_the_published_size_equal_those_of_the_reference():
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in LTX2VideoDiffusionDecoderModel().state_dict().items()}
    assert declared(DiffusionDecoder(Scope(jnp.bfloat16), DiffusionDecoderArch())) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "steps"),
    [((2, 1, 3, 5, 6), 3), ((1, 3, 3, 5, 6), 1)],
    ids=["three steps of frames that ghosts fill up", "one step of several blocks of queries"],
)
def test_decoded_pixels_equal_the_reference(shape, steps, monkeypatch: pytest.MonkeyPatch):
    """The first grid is as small as its window, the last has several blocks of queries along each axis."""
    # torch's compiler fails where torchax was imported; without it the reference computes the same
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(diffusion_decoder, "FEED_FORWARD_TOKENS", 100)  # several parts, the last one smaller
    reference = randomise(LTX2VideoDiffusionDecoderModel(**TINY), seed=1)
    arch = DiffusionDecoderArch(**TINY)
    assert not list(arch.conflicts())
    ours = adopt(DiffusionDecoder(Scope(jnp.float32), arch), reference.state_dict())
    random = np.random.default_rng(5)
    latents = random.normal(size=shape).astype(np.float32)
    noise = random.normal(size=arch.noise_shape(shape)).astype(np.float32)
    mean, std = (x.view(-1, 1, 1, 1) for x in (reference.latents_mean, reference.latents_std))
    network = reference.decoder
    with torch.no_grad():
        features = network.forward_stages_1_to_3(channels_first(latents) * std + mean)
        context = network.forward_stage_4(features, crop_trailing_ghost=False)[:, : noise.shape[1]]
        wanted = network.denoise(context, channels_first(noise), steps)[:, :, : 8 * shape[1] - 7]
    got = run(ours, latents, noise, steps)
    assert relative_error(np.moveaxis(got, -1, 1), wanted) < 1e-4
